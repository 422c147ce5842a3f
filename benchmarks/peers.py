# SPDX-License-Identifier: Apache-2.0
"""How many agent steps a second does learning make, next to other libraries on this machine?

    python benchmarks/peers.py [--repeats 3] [--seconds 40] [flags of monobeast.py]
    python benchmarks/peers.py --suite ppo-cheetah [flags of ppo.py]    PPO alone

A suite is one task, with the same net for all: IMPALA and others learn Pong with the shallow net;
PPO learns Pong, and HalfCheetah, with equal batches, epochs and numbers of environments; SAC learns
HalfCheetah and DQN Pong, with equal batches and replay ratios, so that steps/s compare updates/s.
Where a library has two rows for one algorithm, the faster one is the peer. Programs run one after
the other and over again, so that a slow minute slows all of them. Counted are steps learned from,
for `--seconds`, after a third of that to warm up. On first use each peer gets a virtual environment
of its own in build/peers, of the versions below; what does not install or start is reported with
the reason. The peers' drivers are in benchmarks/peers. Linux only. Prints Markdown.
"""

import argparse
import contextlib
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import typing
import uuid

import ale_py
import gymnasium as gym
import numpy as np
import torch
from machine import ROOT, print_header, processes_of
from whole import measure_whole

import dqn
import monobeast
import ppo
import sac
from beast.processes.machine import count_cores

START_SECONDS = 120  # that a program may take to its first update
STOP_SECONDS = 15  # to end by itself
NORMALIZED = "Adam; observations and rewards normalized"


class PeerError(Exception):
    """A peer did not install, start or learn."""


class Peer(typing.NamedTuple):
    requirements: str
    command: str  # behind the virtual environment's python, from benchmarks/peers
    differences: tuple = ()  # the cells of DIFFERENCES


DIFFERENCES = ["algorithm", "steps an update", "epochs", "environments", "processes", "besides"]
SB3 = "torch==2.13.0 stable-baselines3[extra]==2.9.2 ale-py==0.12.1 gymnasium[mujoco]"
PEERS = {
    "sample_factory": Peer(
        "torch==2.13.0 sample-factory==2.1.1 ale-py==0.10.1",
        "sample_factory_appo.py",
        (
            *("asynchronous PPO, no V-trace", 640, 1, 32),
            "2 that step, 1 for inference, 1 that learns, main",
            "Adam",
        ),
    ),
    "rllib": Peer(
        "torch==2.13.0 ray[rllib]==2.60.0 ale-py==0.12.1 opencv-python-headless==5.0.0.93",
        "rllib_impala.py",
        (
            *("IMPALA, new API stack", 500, 1, 16),
            "2 that step and infer, main learns, Ray's own",
            "Adam; resizes each of the 4 frames; float32 frames",
        ),
    ),
    "torchrl": Peer(
        "torch==2.13.0 torchrl==0.14.1 torchvision==0.28.0 gymnasium==1.4.0 ale-py==0.12.1 "
        "hydra-core==1.3.8 tqdm==4.70.1",
        "torchrl_impala.py",
        (
            *("IMPALA, the package's recipe", 640, 1, 2),
            "2 that step and infer, main learns",
            "RMSProp; one environment a process; float32 frames, normalized; the recipe drops "
            "every 33rd rollout, which is not counted",
        ),
    ),
    "sb3-a2c": Peer(
        SB3,
        "sb3.py",
        ("A2C, in turns", 320, 1, 16, "16 that step, main infers and learns", "RMSProp"),
    ),
    "sb3-ppo": Peer(
        SB3,
        "sb3.py ppo=1 envs=8 rollout=128",
        (
            *("PPO, in turns, as CleanRL's", "1024, in 4 minibatches", 4, 8),
            "8 that step, main infers and learns",
            "Adam",
        ),
    ),
    "sb3-ppo-pong": Peer(
        SB3,
        "sb3.py ppo=1 envs=32 rollout=64 minibatch=512",
        (
            *("PPO, in turns", "2048, in 4 minibatches", 4, 32),
            "32 that step, main infers and learns",
            "Adam",
        ),
    ),
    "sb3-ppo-pong-threads": Peer(
        SB3,
        f"sb3.py ppo=1 envs=32 rollout=64 minibatch=512 threads={count_cores()}",
        (
            *("PPO, in turns", "2048, in 4 minibatches", 4, 32),
            f"32 that step, main infers and learns with {count_cores()} threads",
            "Adam",
        ),
    ),
    "sb3-ppo-cheetah": Peer(
        SB3,
        "sb3.py ppo=1 cheetah=1 envs=8 processes=0 rollout=256 epochs=10 minibatch=64",
        (*("PPO, in turns", "2048, in 32 minibatches", 10, 8), "one", NORMALIZED),
    ),
    "sb3-ppo-cheetah-processes": Peer(
        SB3,
        "sb3.py ppo=1 cheetah=1 envs=8 processes=1 rollout=256 epochs=10 minibatch=64",
        (
            *("PPO, in turns", "2048, in 32 minibatches", 10, 8),
            "8 that step, main infers and learns",
            NORMALIZED,
        ),
    ),
    **{
        f"sb3-sac-cheetah{suffix}": Peer(
            SB3,
            f"sb3.py sac=1 cheetah=1 envs=1 processes=0 ratio=256 minibatch=256 threads={threads}",
            ("SAC", 256, "-", 1, f"one, {threads} threads", "Adam"),
        )
        for suffix, threads in (("", 1), ("-threads", count_cores()))
    },
    **{
        f"sb3-dqn-pong{suffix}": Peer(
            SB3,
            f"sb3.py dqn=1 envs={envs} processes={int(envs > 1)} ratio=8 minibatch=32 "
            f"threads={threads}",
            (
                *("DQN, in turns", 32, "-", envs),
                f"{envs if envs > 1 else 'none'} that step, main learns with {threads} thread(s)",
                "Adam; whole stacks in the replay",
            ),
        )
        for suffix, envs, threads in (
            ("", 1, 1),
            ("-processes", 4, 1),
            ("-threads", 1, count_cores()),
        )
    },
}


class Suite(typing.NamedTuple):
    program: typing.Any  # ours
    env: str
    ours: dict  # names to flags; the first one is compared with the peers
    peers: list
    differences: tuple = ()  # of ours; of monobeast.py they follow its flags


NETS = {
    "PongNoFrameskip-v4": "84x84 gray frames, stacks of 4, frame skip 4; convolutions of 32 8x8/4, "
    "64 4x4/2, 64 3x3/1, then 512, policy and baseline.",
    "HalfCheetah-v5": "policy and baseline with two layers of 64 tanh each; SAC: actor and two "
    "critics with two layers of 256 ReLU each.",
}
PLAIN_DQN = (
    "--num_atoms 1 --n_step 1 --priority_exponent 0 --no_double --no_dueling --batch_size 32 "
    "--replay_ratio 8 --learning_starts 1000 --replay_capacity 50000"
).split()
PRECISIONS = {"": [], ", fp32": ["--precision", "fp32"]}
SUITES = {
    "impala": Suite(
        monobeast, "PongNoFrameskip-v4", {f"monobeast{k}": v for k, v in PRECISIONS.items()},
        ["sample_factory", "rllib", "torchrl", "sb3-a2c", "sb3-ppo"],
    ),
    "ppo-pong": Suite(
        ppo, "PongNoFrameskip-v4", {f"ppo{k}": v for k, v in PRECISIONS.items()},
        ["sb3-ppo-pong", "sb3-ppo-pong-threads"],
        (
            *("PPO, in turns", "2048, in 4 minibatches", 4, 32),
            f"{count_cores()} that step, main infers and learns with as many threads", "Adam",
        ),
    ),
    "ppo-cheetah": Suite(
        ppo, "HalfCheetah-v5", {"ppo": [], "ppo, one process": ["--num_env_processes", "0"]},
        ["sb3-ppo-cheetah", "sb3-ppo-cheetah-processes"],
        (
            *("PPO, in turns", "2048, in 32 minibatches", 10, 8),
            f"{count_cores()} that step, main infers and learns",
            NORMALIZED,
        ),
    ),
    "sac-cheetah": Suite(
        sac, "HalfCheetah-v5", {"sac": ["--learning_starts", "1000"]},
        ["sb3-sac-cheetah", "sb3-sac-cheetah-threads"],
        ("SAC", 256, "-", 1, "one", "Adam"),
    ),
    "dqn-pong": Suite(
        dqn, "PongNoFrameskip-v4",
        {f"dqn{k}": [*PLAIN_DQN, *v] for k, v in PRECISIONS.items()},
        ["sb3-dqn-pong", "sb3-dqn-pong-processes", "sb3-dqn-pong-threads"],
        ("DQN", 32, "-", 16, "2 that step and infer, main learns", "Adam; newest frames"),
    ),
}  # fmt: skip


def set_up(name):
    """Make the peer's virtual environment, unless it is there; return its python."""
    venv = ROOT / "build" / "peers" / name.split("-")[0]
    python = venv / "bin" / "python"
    installed = venv / "requirements.txt"
    requirements = "\n".join(PEERS[name].requirements.split())
    if installed.exists() and installed.read_text() == requirements:
        return python
    print(f"Installing {name} in {venv}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    (venv / "wanted.txt").write_text(requirements)
    command = [python, "-m", "pip", "install", "-q", "-r", venv / "wanted.txt"]
    pip = subprocess.run(command, capture_output=True, text=True, check=False)
    if pip.returncode:
        raise PeerError(f"does not install: {last_error(pip.stderr)}")
    (venv / "wanted.txt").rename(installed)
    return python


def last_error(output):
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error", line, re.IGNORECASE)]
    return re.sub(r" \(/.*\)", "", (errors or lines or ["no output"])[-1])[:200]


def stop(process, mark):
    """Interrupt the program; what is left of it after a while is killed."""
    process.send_signal(signal.SIGINT)
    begin = time.time()
    while pids := processes_of(mark):
        process.poll()  # so that it does not remain as a zombie
        late = time.time() > begin + STOP_SECONDS
        for pid, line in pids.items() if late else ():
            # These two remove what others left in /dev/shm, and end when the others have ended.
            cleaner = b"resource_tracker" in line or b"torch_shm_manager" in line
            if not cleaner or time.time() > begin + 2 * STOP_SECONDS:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
    process.wait()


def measure_peer(name, python, seconds):
    """Run the peer; return its steps/s after a third of the time to warm up."""
    mark = f"BENCHMARK_OF_PEERS={uuid.uuid4()}"
    key, value = mark.split("=")
    script, *arguments = PEERS[name].command.split()
    command = [python, ROOT / "benchmarks" / "peers" / script, *arguments]
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "w") as log:
        # All that it writes goes to the folder, also what is for the home folder. One thread a
        # process, unless its driver sets another number: with more processes than cores, threads
        # that wait for each other cost a lot.
        environ = os.environ | {key: value, "HOME": folder, "TMPDIR": folder}
        environ["OMP_NUM_THREADS"] = "1"
        process = subprocess.Popen(command, env=environ, cwd=folder, stdout=log, stderr=log)
        begin, ticks = time.time(), []  # ticks: (step, time) after warming up
        try:
            while not ticks or ticks[-1][1] < ticks[0][1] + seconds:
                time.sleep(1)
                ended = process.poll() is not None
                # By a file of its own, since the program shares the position of this one.
                output = pathlib.Path(folder, "log").read_text(errors="replace")
                found = re.findall(r"steps (\d+) ([\d.]+)\n", output)
                ticks = [(int(step), float(at)) for step, at in found if int(step) > 0]
                if ended:
                    raise PeerError(f"does not run: {last_error(output)}")
                latest = ticks[-1][1] if ticks else begin
                ticks = [tick for tick in ticks if tick[1] >= ticks[0][1] + seconds / 3]
                if time.time() > latest + START_SECONDS:
                    raise PeerError(f"no update in {START_SECONDS} s: {last_error(output)}")
        finally:
            stop(process, mark)
    return (ticks[-1][0] - ticks[0][0]) / (ticks[-1][1] - ticks[0][1])


def describe_monobeast(flags):
    flags = monobeast.resolve(flags)
    steps, envs = flags.batch_size * flags.unroll_length, flags.num_actors * flags.envs_per_actor
    threads = max(1, count_cores() - flags.num_actors)
    processes = f"{flags.num_actors} that step and infer, main learns with {threads} thread(s)"
    besides = "RMSProp; the net also gets last action and reward"
    return "IMPALA", steps, 1, envs, processes, besides


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--seconds", type=float, default=40, help="for a program (default: 40)")
    parser.add_argument("--suite", default="impala", choices=SUITES, help="(default: impala)")
    parser.add_argument("--peers", nargs="+", choices=PEERS, help="(default: those of the suite)")
    options, arguments = parser.parse_known_args()
    suite = SUITES[options.suite]
    arguments = ["--env", suite.env, *arguments]
    flags = suite.program.parser.parse_args(arguments)  # refuses a wrong flag now

    reasons, pythons = {}, {}
    for name in options.peers or suite.peers:
        try:
            pythons[name] = set_up(name)
        except PeerError as error:
            reasons[name] = str(error)

    print_header(ale_py, gym, np, torch)
    print(f"- {suite.env}, median of {options.repeats} rounds", flush=True)
    rates = {name: [] for name in [*suite.ours, *pythons]}
    for _ in range(options.repeats):
        for name, more in suite.ours.items():
            rate, _ = measure_whole(suite.program, arguments + more, options.seconds)
            rates[name].append(rate)
        for name in [name for name in pythons if name not in reasons]:
            try:
                rates[name].append(measure_peer(name, pythons[name], options.seconds))
            except PeerError as error:
                reasons[name] = str(error)
            print(name, rates[name], reasons.get(name, ""), file=sys.stderr)

    print("\n| agent steps/s | median | lowest | highest | ours to it |\n|---|---|---|---|---|")
    for name, values in rates.items():
        if name in reasons:
            continue
        numbers = [statistics.median(values), min(values), max(values)]
        ours = next(iter(rates.values()))
        ratio = statistics.median(a / b for a, b in zip(ours, values, strict=True))
        print("|", " | ".join([name, *map("{:,.0f}".format, numbers), f"{ratio:.2f}"]), "|")

    threads = "one thread a process where no other number stands"
    print(f"\nAll: on the CPU, {threads}, the peers in fp32;", NETS[suite.env], "\n")
    print("| |", " | ".join([*DIFFERENCES, "versions"]), "|")
    print("|---" * (len(DIFFERENCES) + 2) + "|")
    ours = suite.differences or describe_monobeast(flags)
    print("|", " | ".join(map(str, [next(iter(rates)), *ours, "above"])), "|")
    for name, peer in PEERS.items():
        if name in pythons and name not in reasons:
            print("|", " | ".join(map(str, [name, *peer.differences, peer.requirements])), "|")
    for name, reason in reasons.items():
        print(f"\n{name} ({PEERS[name].requirements}) {reason}")


if __name__ == "__main__":
    main()
