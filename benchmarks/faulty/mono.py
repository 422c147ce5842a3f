# SPDX-License-Identifier: Apache-2.0
"""A MonoBeast whose games fail when they are told to, and which learns from no broken row.

FAULTS_FOLDER=/tmp/faults python benchmarks/faulty/mono.py --num_actors 4
"""

import functools
import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))

from faulty.environment import check_rows, create_environments  # noqa: E402

import experiment  # noqa: E402
import monobeast  # noqa: E402


def act(*args):
    """Be an actor of this fork: a process that is to run this function imports this file first."""
    _act(*args)


def learn(flags, model, batch, *others):
    check_rows(batch)
    return _learn(flags, model, batch, *others)


_act, monobeast.act = monobeast.act, act
_learn, monobeast.learn = monobeast.learn, learn
monobeast.create_environments = functools.partial(create_environments, monobeast.create_env)
monobeast.LOG_INTERVAL = 1

if __name__ == "__main__":
    experiment.run_program(monobeast.main)
