# SPDX-License-Identifier: Apache-2.0
"""A replay between those who play and the learner, both of whom wait for each other.

The replay ratio is the number of rows learned from for each agent step. Where playing is faster,
`wait_to_play` holds the actors back, since the writer gives them no buffers meanwhile; where
learning is faster, `batches` holds the learner back.
"""

import logging
import threading

import numpy as np
import torch

from beast.errors import FlagError
from beast.learners.learner import Batch
from beast.nest import map_nest
from beast.runs.run import ENDS

MAX_UPDATES = 8  # updates between two versions of the weights, unless --deterministic


def to_tensors(sample, device):
    """Return a Sample of tensors on the device."""
    fields = map_nest(torch.from_numpy, sample._replace(handle=())._asdict())
    fields = map_nest(lambda x: x.to(device), fields) | {"handle": sample.handle}
    return sample._replace(**fields)


def check_learning_starts(flags):
    """Raise a FlagError where a run would end before its first update."""
    if flags.learning_starts >= flags.total_steps:
        raise FlagError(
            f"--learning_starts {flags.learning_starts:,} leaves none of --total_steps "
            f"{flags.total_steps:,} to learn from: give fewer steps before learning, or more in all"
        )


def announce_refill(flags, first_step):
    """Say what a resumed run, of which the checkpoint has no replay, begins with."""
    if not first_step:
        return
    logging.info(
        "The replay is filled anew, and target nets are copies of the nets: learning goes on after "
        f"{flags.learning_starts:,} steps"
    )
    if first_step + flags.learning_starts >= flags.total_steps:
        logging.warning(
            f"No more is learned: {flags.total_steps - first_step:,} steps are left, and "
            f"--learning_starts is {flags.learning_starts:,}; lower it, or raise --total_steps"
        )


def add_sample(batch, sample):
    """Return a Batch with a Sample's rows and sources, which bad_batch.tar is to have."""
    rows = {f"sample.{name}": map_nest(lambda x: x.cpu(), x) for name, x in sample.rows.items()}
    sources = {"environments": np.unique(sample.handle.envs).tolist()}
    return batch._replace(cpu_rows=batch.cpu_rows | rows, sources=sources)


class ReplayFeed:
    """A Replay that is written to and learned from at a fixed ratio.

    Args:
      replay: a Replay.
      ratio: rows to learn from for each agent step.
      learning_starts: agent steps before the first update; nothing is learned for them.
      rows_per_update: of a sample, without its burn-in.
      slack: rows that the learner may be behind before the actors wait.
    """

    def __init__(self, replay, ratio, learning_starts, rows_per_update, slack):
        self.replay, self._ratio, self._learning_starts = replay, ratio, learning_starts
        self._rows_per_update = rows_per_update
        self._slack = max(slack, rows_per_update)
        self.num_updates = 0
        self._condition = threading.Condition()  # guards all attributes below
        self._num_steps = 0
        self._new = []  # rollouts appended since the last batch: steps, ends, version and actor
        self._closed = False

    def append(self, env, rollout, state, is_first, version, actor):
        """Append a rollout of rows [T + 1, ...] to the replay; see Replay.append.

        Args:
          version: of the weights that acted; None where there is no lag.
        """
        self.replay.append(env, rollout, state, is_first)
        mask = ~(rollout["truncated"] | rollout["terminated"])[:-1]
        ends = {name: np.array(rollout[name]) for name in ENDS}
        with self._condition:
            self._num_steps += int(mask.sum())
            self._new.append((int(mask.sum()), ends, version, actor))
            self._condition.notify_all()

    def wait_to_play(self):
        """Wait until the learner is not too far behind, has nothing to sample yet, or is closed."""

        def may_play():
            return self._closed or self._rows_due() <= self._slack or not self.replay.can_sample()

        with self._condition:
            self._condition.wait_for(may_play)

    def count_due(self):
        """Return how many updates may be made now."""
        with self._condition:
            if not self.replay.can_sample():
                return 0
            return max(0, int(self._rows_due() // self._rows_per_update))

    def take_batch(self):
        """Return the agent steps of the rollouts that are new, and a Batch of their ends."""
        with self._condition:
            new, self._new = self._new, []
        steps, ends, versions, actors = zip(*new, strict=True) if new else ((), (), (), ())
        rows = map_nest(lambda *x: torch.from_numpy(np.stack(x, axis=1)), *ends) if new else NO_ENDS
        versions = [version for version in versions if version is not None]
        return sum(steps), Batch(rows, (), rows, versions, {"actors": list(actors)})

    def batches(self):
        """Yield agent steps, a Batch of ends, and a number of updates to make, until closed."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closed or self._new or self.count_due())
                if self._closed:
                    return
            yield *self.take_batch(), min(self.count_due(), MAX_UPDATES)

    def count_update(self):
        with self._condition:
            self.num_updates += 1
            self._condition.notify_all()

    def metrics(self):
        """Return the rows in the replay, and those learned from for each step after the start."""
        with self._condition:
            steps = self._num_steps - self._learning_starts
            learned = self.num_updates * self._rows_per_update
        ratio = {"replay_ratio": learned / steps} if steps > 0 else {}
        return {"replay_rows": float(len(self.replay))} | ratio

    def close(self):
        """Wake all who wait."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _rows_due(self):  # caller holds the condition
        rows = self._ratio * (self._num_steps - self._learning_starts)
        return rows - self.num_updates * self._rows_per_update


NO_ENDS = {name: torch.zeros(1, 0) for name in ENDS}
NO_ENDS |= {name: torch.zeros(1, 0, dtype=torch.bool) for name in ("done", "game_done")}
