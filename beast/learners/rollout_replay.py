# SPDX-License-Identifier: Apache-2.0
"""Old rollouts for IMPALA: drawn at random, and learned from beside the new ones of a batch.

V-trace corrects for the policies that made them, which are stored with them (Schmitt et al. 2020,
LASER, and Espeholt et al. 2018, section 5.2.2, mix them in the same way).
"""

import logging
import math

import torch

from beast.errors import FlagError
from beast.nest import map_nest
from beast.parser import non_negative, positive
from beast.processes.machine import check_memory
from beast.runs import diagnostics


def add_flags(parser):
    """Add the flags of a program that mixes old rollouts into its batches."""
    # fmt: off
    group = parser.add_argument_group("replay")
    group.add_argument("--replay_ratio", default=0.0, type=non_negative(float),
                       help="Old rollouts in a batch for each new one, drawn at random; 0: none.")
    group.add_argument("--replay_rollouts", default=1000, type=positive(int),
                       help="Replay capacity, in rollouts; the newest stay.")
    # fmt: on


class RolloutReplay:
    """The newest rollouts of this learner.

    After an update that is not finite all are forgotten: new or old, the cause would come back.

    Args:
      flags: replay_ratio, replay_rollouts, batch_size, seed, rank, num_learners, elastic.
      rollout_bytes: of one rollout.

    Raises:
      FlagError: there are fewer rollouts than a batch needs, or more than memory has room for.
    """

    def __init__(self, flags, rollout_bytes):
        self._count = round(flags.replay_ratio * flags.batch_size)  # in a batch
        self._capacity = flags.replay_rollouts
        if flags.replay_ratio > 0 and self._count == 0:
            raise FlagError(
                f"--replay_ratio {flags.replay_ratio:g} is less than one old rollout in a batch of "
                f"{flags.batch_size} new ones: give at least {1 / flags.batch_size:g}, or 0"
            )
        asked, ratio = f"{flags.replay_ratio:g}", f"{self._count / flags.batch_size:g}"
        if asked != ratio:
            logging.warning(
                "--replay_ratio %s acts as %s: there are %d old rollouts in a batch of %d new ones",
                asked, ratio, self._count, flags.batch_size,
            )  # fmt: skip
        if self._count > self._capacity:
            raise FlagError(
                f"--replay_ratio {flags.replay_ratio:g} needs {self._count} old rollouts for a "
                f"batch of {flags.batch_size} new ones, but --replay_rollouts is {self._capacity}: "
                "give at least as many"
            )
        if self._count:
            check_memory(self._capacity * rollout_bytes, "--replay_rollouts", self._capacity)
        self._random = torch.Generator().manual_seed((flags.seed + flags.rank) % 2**63)
        # The number of elastic learners, whose steps are added up, is not known.
        self._num_learners = math.inf if getattr(flags, "elastic", None) else flags.num_learners
        self._stored, self._num_stored = None, 0  # a nest of tensors [capacity, ...]

    def mix(self, batch):
        """Return a Batch with old rollouts behind the new ones.

        Of its fields rows and agent_state have both, sources count the old ones, and the others are
        of the new ones alone. As long as there are fewer old rollouts than a batch takes, there are
        none.
        """
        if self._count == 0:
            return batch
        size = min(self._num_stored, self._capacity)
        if size < self._count:
            return batch
        indices = torch.randperm(size, generator=self._random)[: self._count]
        rows, state = map_nest(lambda x: x[indices].movedim(0, 1), self._stored)
        return batch._replace(
            rows=map_nest(_join, batch.rows, rows),
            agent_state=map_nest(_join, batch.agent_state, state),
            sources=batch.sources | {"old rollouts": self._count},
        )

    def store(self, batch, metrics):
        """Store the new rollouts of a Batch; forget all if its update was not finite.

        Raises:
          ValueError: the metric `steps` counts old rollouts, too.
        """
        if self._count == 0:
            return
        if metrics.get("steps", 0) > self._num_learners * batch.cpu_rows["done"][1:].numel():
            raise ValueError(
                "the metric `steps` of compute_loss counts old rollouts, too, so the run would end "
                "too soon: return mask[:, : flags.batch_size].sum()"
            )
        if not diagnostics.is_finite(metrics):
            self._num_stored = 0
            return
        n = batch.cpu_rows["done"].shape[1]  # behind them agent_state may have old ones
        state = map_nest(lambda x: x[:, :n].cpu().movedim(1, 0), batch.agent_state)
        new = map_nest(lambda x: x.movedim(1, 0), batch.cpu_rows), state
        if self._stored is None:
            self._stored = map_nest(lambda x: x.new_empty(self._capacity, *x.shape[1:]), new)
        places = [(self._num_stored + i) % self._capacity for i in range(n)]

        def put(stored, x):  # one by one: torch has no index_put of all dtypes
            for place, item in zip(places, x, strict=True):
                stored[place].copy_(item)

        map_nest(put, self._stored, new)
        self._num_stored += n


def _join(new, old):
    """Return tensors [T + 1, B, ...] and [T + 1, N, ...] as one, on the device of the first."""
    return torch.cat([new, old.to(new.device)], dim=1)
