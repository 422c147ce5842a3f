# SPDX-License-Identifier: Apache-2.0
"""Environments come to a learner and leave it: does the run go on, and does all follow down again?

    python campaigns/churn.py [--minutes 30] [--most 64]

Processes dial in to a learner of Catch, from 0 to 64 and back, again and again. They leave by
SIGTERM, by SIGKILL, or silently, by SIGSTOP. At each low, when the last one has gone, the learner's
memory, threads and descriptors are those of the lows before. Exits non-zero where they are not, or
where no step was made while environments were there. Prints Markdown.
"""

import argparse
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

LEARNER = ROOT / "tests" / "helpers" / "catch_poly.py"
PERIOD = 150  # seconds from one low to the next
SILENCE = 70  # seconds after which the learner has noticed a silent process: it pings them
WAYS = (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP)
LIMITS = {"own_mb": 16, "threads": 4, "descriptors": 4}  # at a low, above the first one


def dial(address):
    """Be a process with environments: without torch, which takes long to import."""
    from catch_env import Catch

    from beast.envs.environments import Environments
    from beast.processes.lifetime import exit_with_parent
    from libtorchbeast import Dialer

    def make(num_envs, seed, name):
        return Environments(Catch, num_envs, seed, name)

    exit_with_parent(0)
    Dialer(None, [address], make_environments=make, env="Catch").run()


def start(address):
    command = [sys.executable, __file__, "--dial", address]  # ends with its standard input
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)


def play(minutes, most, learner, address):
    """Have processes come and go; yield at each low how long it took, and how many have left."""
    begin, living, stopped, left = time.monotonic(), [], [], dict.fromkeys(WAYS, 0)
    low = False
    try:
        while (seconds := time.monotonic() - begin) < 60 * minutes:
            phase = seconds % PERIOD / (PERIOD - SILENCE)
            target = round(most * max(0, 1 - abs(2 * phase - 1)))
            while len(living) < target:
                living.append(start(address))
            while len(living) > target:
                process, way = living.pop(random.randrange(len(living))), random.choice(WAYS)
                process.send_signal(way)
                left[way] += 1
                stopped.append((time.monotonic(), process))
            for since, process in stopped[:]:
                if process.poll() is not None or time.monotonic() > since + SILENCE:
                    process.kill()
                    process.wait()
                    stopped.remove((since, process))
            is_low = seconds % PERIOD > PERIOD - 5
            if is_low and not low:
                assert learner.process.poll() is None, learner.output
                yield {"minutes": seconds / 60, "left": sum(left.values())}
            low = is_low
            time.sleep(1)
    finally:
        for process in [*living, *(process for _, process in stopped)]:
            process.kill()
            process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--most", type=int, default=64, help="processes at a high (default: 64)")
    parser.add_argument("--dial", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.dial:
        return dial(flags.dial)
    import memory
    from counting import free_address
    from program import Program, last_step

    address, failures, lows = free_address(), [], []
    columns = ["minutes", "left", "step", "own_mb", "threads", "descriptors"]
    with tempfile.TemporaryDirectory() as savedir:
        words = ["--listen", address, "--savedir", savedir, "--xpid", "run", "--env", "Catch"]
        words += ["--envs_per_stream", "2", "--total_steps", "1e9", "--batch_size", "4"]
        with Program(LEARNER, *words) as learner:
            print("|", " | ".join(columns), "|")
            print("|---" * len(columns), "|", sep="")
            for low in play(flags.minutes, flags.most, learner, address):
                low |= memory.read_process(learner.pid)
                low["step"] = last_step(pathlib.Path(savedir) / "run")
                lows.append(low)
                print("|", " | ".join(f"{low[name]:,.0f}" for name in columns), "|", flush=True)
                if len(lows) > 1 and low["step"] <= lows[-2]["step"]:
                    failures.append("no steps between two lows")
            learner.process.send_signal(signal.SIGTERM)
            status, output = learner.end()
    most = max(map(int, re.findall(r"streams now: (\d+)", output)), default=0)
    print(f"\nstreams at most {most}, status {status}")
    for name, limit in LIMITS.items():
        largest = max(low[name] for low in lows)
        if largest > lows[0][name] + limit:
            failures.append(f"{name} has grown from {lows[0][name]} to {largest}")
    if "Traceback" in output or status != 128 + signal.SIGTERM or most == 0:
        failures.append(output[-3000:])
    return "\n".join(failures) or None


if __name__ == "__main__":
    sys.exit(main())
