# SPDX-License-Identifier: Apache-2.0
"""A fork of MonoBeast or PolyBeast whose learner raises an error on broken rows.

    FAULTS_FOLDER=/tmp/faults python campaigns/faulty/learner.py monobeast --num_actors 4

MonoBeast's games fail on command, too, as those of environment.py do.
"""

import importlib
import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "campaigns")]

from faulty.environment import create_environments
from faulty.rows import check_rows

from beast.runs import run

program = importlib.import_module(sys.argv[1])  # actors have the same arguments


def act(*args):
    """Be an actor of MonoBeast: a process that is to run this function imports this file first."""
    _act(*args)


def learn(flags, model, batch, *others):
    check_rows(batch)
    return _learn(flags, model, batch, *others)


_learn, program.learn = program.learn, learn
if program.__name__ == "monobeast":
    _act, program.act = program.act, act
    program.create_environments = create_environments
run.LOG_INTERVAL = 1

if __name__ == "__main__":
    program.run_program(lambda: program.main(sys.argv[2:]))
