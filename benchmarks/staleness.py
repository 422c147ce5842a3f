# SPDX-License-Identifier: Apache-2.0
"""What do old policies cost, and which correction wins it back? A run with an exact lag.

    python benchmarks/staleness.py --lag 8 --correction vtrace --batch_size 16 --xpid lag-8 [flags]

This is MonoBeast with --deterministic, where each batch is one rollout of each environment and the
policy that acts is always one update behind the one that learns. Here it is --lag updates behind,
since the last lag + 1 versions of the weights are kept. Each update asserts the lag of its batch.
corrections.py has the losses. All other flags, and the log, are MonoBeast's, with two more columns:
`total_variation` and `second_moment` (of log rho), from the policy that acted to the one that
learns.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import corrections

import monobeast
from beast.actors.weights import SharedWeights
from beast.errors import FlagError
from beast.flags import parse_flags, run_program
from beast.parser import positive
from beast.runs.run import Run


class OldWeights(SharedWeights):
    """Weights of which actors get a version that is `lag` updates behind the learner's."""

    def __init__(self, model, lag):
        super().__init__(model, num_slots=lag + 1)
        self._lag = lag

    def load_into(self, model, version):
        """Load what is lag - 1 older than `version`, which is one update behind already."""
        return super().load_into(model, max(1, version - self._lag + 1))


class CheckedRun(Run):
    """A run that fails where a rollout is not exactly as old as asked for."""

    def record(self, update, batch):
        version = self._learner.weights.version - 1  # that was learned from
        expected = max(1, version - self._flags.lag)  # the first rollouts can be of version 1 alone
        versions = set(batch.policy_versions)
        assert versions == {expected}, f"update {version} learned from versions {versions}"
        super().record(update, batch)


def act(*arguments):
    """Be an actor: the process that is to run this function imports this file first."""
    monobeast_act(*arguments)


monobeast_act = monobeast.act


def main():
    parser = monobeast.parser
    parser.add_argument("--lag", default=1, type=positive(int), help="In updates.")
    parser.add_argument("--correction", default="vtrace", choices=list(corrections.CORRECTIONS))
    parser.set_defaults(deterministic=True, disable_checkpoint=True)
    flags = parse_flags(parser)
    if flags.compile or flags.replay_ratio:
        raise FlagError("--compile and --replay_ratio do not work here: leave them out")
    monobeast.act, monobeast.Run = act, CheckedRun
    monobeast.SharedWeights = lambda model: OldWeights(model, flags.lag)
    monobeast.compute_loss = corrections.Loss()
    return monobeast.train(flags)


if __name__ == "__main__":
    run_program(main)
