# SPDX-License-Identifier: Apache-2.0
"""What does a slow agent of gala.py cost the others, with gossip and with averaged gradients?

    python benchmarks/straggler.py [--seconds 20] [--repeats 3]

Four agents play with environments that sleep for 2 ms a step, so that cores are not the limit. In
turn all are alike, and one agent's environments sleep ten times as long. Prints Markdown: the
steps/s of each of the three others (their mean) and of the slow one, and the ratios.
"""

import argparse
import contextlib
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import gymnasium as gym
import numpy as np
import torch
from machine import ROOT, print_header

NUM_AGENTS, NUM_ENVS = 4, 4  # and environments an agent
SLEEP, FACTOR = 0.002, 10  # seconds a step; of the slow agent, so many times as long
FLAGS = f"--num_agents {NUM_AGENTS} --envs_per_agent {NUM_ENVS} --disable_cuda --disable_checkpoint"
FOLDER = pathlib.Path(os.environ.get("STRAGGLER_FOLDER", "/nowhere"))  # of counts, one an agent


class SleepEnv(gym.Env):
    """An episode of 100 steps without a task; the first process to make one is the slow one."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)
    num_steps, factor, file = 0, 1, None  # of this process

    def __init__(self, render_mode=None):
        self._sleeps = multiprocessing.parent_process() is not None  # in agents alone
        if self._sleeps and SleepEnv.file is None:
            SleepEnv.file = os.open(FOLDER / f"{os.getpid()}.steps", os.O_CREAT | os.O_WRONLY)
        if self._sleeps and os.environ["STRAGGLER"] == "1":
            with contextlib.suppress(FileExistsError), open(FOLDER / "slow", "x") as file:
                file.write(str(os.getpid()))
            if (FOLDER / "slow").read_text() == str(os.getpid()):
                SleepEnv.factor = FACTOR

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._left = 100
        return np.zeros(4, np.float32), {}

    def step(self, action):
        if self._sleeps:
            time.sleep(SLEEP * self.factor)
            SleepEnv.num_steps += 1
            os.pwrite(SleepEnv.file, b"%9d" % self.num_steps, 0)  # never seen empty or in part
        self._left -= 1
        return np.zeros(4, np.float32), 0.0, self._left == 0, False, {}


gym.register("Sleep-v0", SleepEnv)


def read_counts(folder):
    """Return the steps of each agent so far, by process id."""
    texts = {int(path.stem): path.read_text() for path in folder.glob("*.steps")}
    return {pid: int(text) for pid, text in texts.items() if text}


def measure(exchange, has_straggler, seconds):
    """Return the mean steps/s of the agents that are not slow, and that of the slow one or None."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        environ = {"PYTHONPATH": str(ROOT / "benchmarks"), "STRAGGLER_FOLDER": name}
        command = [sys.executable, ROOT / "gala.py", "--env", "straggler:Sleep-v0", *FLAGS.split()]
        command += ["--savedir", folder / "runs", "--exchange", exchange]
        with open(folder / "log", "w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log,
                env=os.environ | environ | {"STRAGGLER": str(int(has_straggler))},
            )  # fmt: skip
            try:
                wanted = 200 * NUM_ENVS / (FACTOR if has_straggler else 1)  # steps, to warm up
                while min((counts := read_counts(folder)).values(), default=0) < wanted or (
                    len(counts) < NUM_AGENTS
                ):
                    assert process.poll() is None, (folder / "log").read_text()
                    time.sleep(0.1)
                begin, before = time.monotonic(), read_counts(folder)
                time.sleep(seconds)
                after, duration = read_counts(folder), time.monotonic() - begin
            finally:
                process.terminate()
                process.wait()
        rates = {pid: (after[pid] - before[pid]) / duration for pid in before}
        slow = rates.pop(int((folder / "slow").read_text())) if has_straggler else None
        return statistics.mean(rates.values()), slow


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print_header(torch)
    print("\n| round | exchange | all alike, steps/s | others of the slow one | ratio | slow one |")
    print("|---|---|---|---|---|---|")
    ratios = {"gossip": [], "allreduce": []}
    for number in range(options.repeats):
        for exchange in ratios:
            alike, _ = measure(exchange, False, options.seconds)
            others, slow = measure(exchange, True, options.seconds)
            ratios[exchange].append(others / alike)
            cells = number + 1, exchange, f"{alike:,.0f}", f"{others:,.0f}", f"{others / alike:.2f}"
            print("|", " | ".join(map(str, cells)), f"| {slow:,.0f} |", flush=True)
    for exchange, values in ratios.items():
        print(f"\n{exchange}: median of the ratios {statistics.median(values):.2f}")


if __name__ == "__main__":
    main()
