# SPDX-License-Identifier: Apache-2.0
"""How many rows/s of 4x84x84 go into and come out of the replay, and how much memory do they take?

    python benchmarks/replay.py [--repeats 3] [--seconds 2] [--rows 100000]

Rows come as rollouts of 20 of 16 environments, as actors write them; a sample is what a learner
gets: whole stacks, targets, weights. The goals are 5 times what two cores can learn from. Where
TorchRL is installed, its buffer is measured, too, with whole observations and next observations,
as its collectors give them:

    pip install --no-deps torchrl tensordict pyvers importlib_metadata zipp

It prints Markdown.
"""

import argparse
import contextlib
import importlib.util
import logging
import pathlib
import statistics
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

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


class Ours:
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


class TorchRL:
    """TorchRL's buffer, full of transitions."""

    def __init__(self, rollouts, num_rows, prioritized):
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        from torchrl.data.replay_buffers.samplers import PrioritizedSampler, RandomSampler

        sampler = PrioritizedSampler(num_rows, 0.6, 0.4) if prioritized else RandomSampler()
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(num_rows), sampler=sampler, priority_key="td_error"
        )
        rows = {key: torch.from_numpy(np.stack([r[key] for r in rollouts])) for key in rollouts[0]}
        self.parts = []
        for i in range(len(rollouts)):  # as many rows as of 16 environments
            now = {k: x[i, :-1].repeat(NUM_ENVS, *[1] * (x.dim() - 2)) for k, x in rows.items()}
            after = {k: x[i, 1:].repeat(NUM_ENVS, *[1] * (x.dim() - 2)) for k, x in rows.items()}
            part = {
                "observation": now["frame"],
                "action": after["last_action"],
                "next": {"observation": after["frame"], "reward": after["reward"]}
                | {key: after[key] for key in ("done", "terminated", "truncated")},
            }
            self.parts.append(TensorDict(part, batch_size=[T * NUM_ENVS]))
        self.count = 0
        while len(self.buffer) < num_rows:
            self.append()

    def append(self):
        self.buffer.extend(self.parts[self.count % len(self.parts)])
        self.count += 1
        return T * NUM_ENVS

    def sample(self, batch_size, beta):
        sample = self.buffer.sample(batch_size)
        if beta is not None:
            sample["td_error"] = torch.rand(batch_size)
            self.buffer.update_tensordict_priority(sample)
        return batch_size

    def row_bytes(self):
        part = self.parts[0]
        return sum(x.nbytes for x in part.values(True, True)) / len(part)


def rate(function, seconds, *args):
    """Return rows/s of a function that returns how many it has moved."""
    count, start = function(*args), time.perf_counter()  # the first call warms up
    count = 0
    while time.perf_counter() < start + seconds:
        count += function(*args)
    return count / (time.perf_counter() - start)


@contextlib.contextmanager
def writing(buffer, rows_per_second):
    """Append at a fixed rate in a thread."""
    stop, start, count = threading.Event(), time.perf_counter(), 0

    def write():
        nonlocal count
        while not stop.wait(max(0, start + count / rows_per_second - time.perf_counter())):
            count += buffer.append()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield lambda: count / (time.perf_counter() - start)
    finally:
        stop.set()
        thread.join()


def measure(buffer, batch_size, beta, write_rate, seconds, notes):
    """Return rows/s appended, if batch_size is None, else sampled."""
    if batch_size is None:
        return rate(buffer.append, seconds)
    if not write_rate:
        return rate(buffer.sample, seconds, batch_size, beta)
    with writing(buffer, write_rate) as written:
        result = rate(buffer.sample, seconds, batch_size, beta)
        notes.append(f"The writer beside the sampler appended {written():,.0f} rows/s.")
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2, help="of each measurement")
    parser.add_argument("--rows", type=int, default=100_000, help="in a replay; TorchRL: a fifth")
    flags = parser.parse_args()
    rollouts, notes = make_rollouts(), []
    print_header(np, torch)
    transitions = [
        ("append", None, None, 0),
        ("32 transitions", 32, None, 0),
        ("512 transitions", 512, None, 0),
    ]
    prioritized = [
        ("append, prioritized", None, None, 0),
        ("32 transitions, prioritized", 32, 0.4, 0),
        ("512 transitions, prioritized", 512, 0.4, 0),
        (f"the same beside {APPEND_GOAL:,} appended rows/s", 512, 0.4, APPEND_GOAL),
    ]
    sequences = [("64 sequences of 40 + 80 rows, prioritized", 64, 0.6, 0)]
    suites = [
        ("replay.py", lambda: Ours(rollouts, flags.rows, n_step=3), transitions),
        ("replay.py", lambda: Ours(rollouts, flags.rows, n_step=3, alpha=0.6), prioritized),
        (
            "replay.py",
            lambda: Ours(rollouts, flags.rows, n_step=5, alpha=0.9, sequence_length=120),
            sequences,
        ),
    ]
    few = flags.rows // 5
    if importlib.util.find_spec("torchrl"):
        import torchrl

        logging.getLogger("torchrl").setLevel(logging.WARNING)
        print(f"- TorchRL {torchrl.__version__}")
        suites.append(("TorchRL", lambda: TorchRL(rollouts, few, False), transitions))
        try:
            import torchrl._torchrl  # compiled for one version of PyTorch

            suites.append(("TorchRL", lambda: TorchRL(rollouts, few, True), prioritized))
        except ImportError:
            print("- TorchRL's sum tree, which is compiled, does not load with this PyTorch.")
    print("\n| | buffer | rows/s (smallest-largest) | goal | bytes a row |\n|---|---|---|---|---|")
    for name, make, cases in suites:
        buffer = make()
        for what, *case in cases:
            rates = [measure(buffer, *case, flags.seconds, notes) for _ in range(flags.repeats)]
            goal = APPEND_GOAL if case[0] is None else SAMPLE_GOAL
            print(
                f"| {what} | {name} | {statistics.median(rates):,.0f} ({min(rates):,.0f}-"
                f"{max(rates):,.0f}) | {goal:,} | {buffer.row_bytes():,.0f} |",
                flush=True,
            )
        del buffer
    print("", *notes, sep="\n")


if __name__ == "__main__":
    main()
