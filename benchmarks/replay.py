# SPDX-License-Identifier: Apache-2.0
"""How many rows/s of 4x84x84 go into and come out of the replay, and how much memory do they take?

    python benchmarks/replay.py [--repeats 3] [--seconds 2] [--rows 100000]

Rows come as rollouts of 20 of 16 environments, as actors write them; a sample is what a learner
gets: whole stacks, targets, weights. The goals are 5 times what two cores can learn from. Prints
Markdown.
"""

import argparse
import statistics
import time

import numpy as np
import torch
from machine import print_header

from beast.learners.replay import Replay

T, NUM_ENVS, K, CYCLE, EPISODE = 20, 16, 4, 600, 100  # rows come again after a cycle
APPEND_GOAL, SAMPLE_GOAL = 10_000, 20_000  # rows/s


def make_rollouts():
    """Return the rollouts of a cycle, each a dict of [T + 1, ...]; the first row is the last."""
    frames = np.random.default_rng(0).integers(0, 256, (CYCLE, 84, 84), np.uint8)
    t = np.arange(CYCLE + 1)
    oldest = t - t % EPISODE  # first frame of the episode, repeated before it
    stacks = np.maximum(t[:, None] - np.arange(K - 1, -1, -1), oldest[:, None]) % CYCLE
    rows = {key: np.zeros(CYCLE + 1, bool) for key in ("truncated", "terminated")}
    rows |= {"done": t % EPISODE == 0, "reward": np.zeros(CYCLE + 1, np.float32)}
    rows |= {"last_action": t % 6, "frame": frames[stacks]}
    return [{k: x[i : i + T + 1].copy() for k, x in rows.items()} for i in range(0, CYCLE, T)]


class FullReplay:
    """The replay, full of rollouts, which come with agent states if there are sequences."""

    def __init__(self, rollouts, num_rows, **kwargs):
        example = {key: x[:, None] for key, x in rollouts[0].items()}
        has_state = kwargs.get("sequence_length", 1) > 1
        self.state = (np.zeros((1, 1, 512), np.float32),) * 2 if has_state else ()
        self.replay = Replay(example, self.state, num_rows, NUM_ENVS, T, stack_size=K, **kwargs)
        self.rollouts, self.count = rollouts, 0
        while len(self.replay) < self.replay.capacity * NUM_ENVS:
            self.append()

    def append(self):
        """Append a rollout of each environment; return the number of rows."""
        rollout = self.rollouts[self.count % len(self.rollouts)]
        for env in range(NUM_ENVS):
            self.replay.append(env, rollout, self.state, first=self.count == 0)
        self.count += 1
        return T * NUM_ENVS

    def sample(self, batch_size, beta):
        """Draw a batch, with new priorities if beta is given; return the number of rows in it."""
        sample = self.replay.sample(batch_size, beta or 0)
        if beta is not None:
            self.replay.update(sample.handle, np.random.random(batch_size))
        return sample.mask.size

    def row_bytes(self):
        return self.replay.count_bytes() / (self.replay.capacity * NUM_ENVS)


def rate(function, seconds, *args):
    """Return rows/s of a function that returns how many it has moved."""
    count, start = function(*args), time.perf_counter()  # the first call warms up
    count = 0
    while time.perf_counter() < start + seconds:
        count += function(*args)
    return count / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2, help="of each measurement")
    parser.add_argument("--rows", type=int, default=100_000, help="in a replay")
    flags = parser.parse_args()
    rollouts = make_rollouts()
    print_header(np, torch)
    transitions = {"append": None, "32 transitions": 32, "512 transitions": 512}
    suites = [  # the replay's options, batch sizes, and beta if it is prioritized
        ({"n_step": 3}, transitions, None),
        ({"n_step": 3, "alpha": 0.6}, transitions, 0.4),
        (
            {"n_step": 5, "alpha": 0.9, "sequence_length": 120},
            {"64 sequences of 40 + 80 rows": 64},
            0.6,
        ),
    ]
    print("\n| | rows/s (smallest-largest) | goal | bytes a row |\n|---|---|---|---|")
    for options, cases, beta in suites:
        replay = FullReplay(rollouts, flags.rows, **options)
        for what, batch_size in cases.items():
            move, arguments, goal = replay.sample, (batch_size, beta), SAMPLE_GOAL
            if batch_size is None:
                move, arguments, goal = replay.append, (), APPEND_GOAL
            rates = [rate(move, flags.seconds, *arguments) for _ in range(flags.repeats)]
            print(
                f"| {what}{', prioritized' * (beta is not None)} | {statistics.median(rates):,.0f} "
                f"({min(rates):,.0f}-{max(rates):,.0f}) | {goal:,} | {replay.row_bytes():,.0f} |",
                flush=True,
            )
        del replay  # before the next one is filled


if __name__ == "__main__":
    main()
