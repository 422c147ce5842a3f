# SPDX-License-Identifier: Apache-2.0
"""A MonoBeast fork whose games fail on command, and whose learner refuses broken rows.

FAULTS_FOLDER=/tmp/faults python campaigns/faulty/mono.py --num_actors 4
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "campaigns")]

from faulty.environment import create_environments
from faulty.rows import check_rows

import monobeast
from beast.runs import run


def act(*args):
    """Be an actor of this fork: a process that is to run this function imports this file first."""
    _act(*args)


def learn(flags, model, batch, *others):
    check_rows(batch)
    return _learn(flags, model, batch, *others)


_act, monobeast.act = monobeast.act, act
_learn, monobeast.learn = monobeast.learn, learn
monobeast.create_environments = create_environments
run.LOG_INTERVAL = 1

if __name__ == "__main__":
    monobeast.run_program(monobeast.main)
