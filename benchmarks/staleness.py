# SPDX-License-Identifier: Apache-2.0
"""What do old policies cost, and what does V-trace win back? A run with an exact lag.

    python benchmarks/staleness.py --lag 8 --correction vtrace --batch_size 16 --xpid lag-8 [flags]

This is MonoBeast with --deterministic, where each batch is one rollout of each environment and the
policy that acts is always one update behind the one that learns. Here it is --lag updates behind,
since the last lag + 1 versions of the weights are kept. Each update asserts the lag of its batch.
`--correction none` sets the log importance weights to 0, for targets and advantages, as if the
policy that learns had acted. All other flags, and the log, are MonoBeast's.
"""

import pathlib
import sys
import types

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import monobeast
import vtrace
from beast.actors.weights import SharedWeights
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


def without_correction(behavior_policy_logits, target_policy_logits, **arguments):
    """Return V-trace's targets as if the policy that learns had acted, and the true log rhos."""
    corrected = vtrace.from_logits(behavior_policy_logits, target_policy_logits, **arguments)
    plain = vtrace.from_logits(target_policy_logits, target_policy_logits, **arguments)
    return plain._replace(log_rhos=corrected.log_rhos)  # for the diagnostics alone


def act(*arguments):
    """Be an actor: the process that is to run this function imports this file first."""
    monobeast_act(*arguments)


monobeast_act = monobeast.act


def main():
    parser = monobeast.parser
    parser.add_argument("--lag", default=1, type=positive(int), help="In updates.")
    parser.add_argument("--correction", default="vtrace", choices=["vtrace", "none"])
    parser.set_defaults(deterministic=True, disable_checkpoint=True)
    flags = parse_flags(parser)
    monobeast.act, monobeast.Run = act, CheckedRun
    monobeast.SharedWeights = lambda model: OldWeights(model, flags.lag)
    if flags.correction == "none":
        monobeast.vtrace = types.SimpleNamespace(from_logits=without_correction)
    return monobeast.train(flags)


if __name__ == "__main__":
    run_program(main)
