# SPDX-License-Identifier: Apache-2.0
"""A PolyBeast fork whose learner refuses broken rows, and so ends.

FAULTS_FOLDER=/tmp/faults python campaigns/faulty/poly.py --server_addresses ...
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "campaigns")]

from faulty.rows import check_rows

import polybeast
from beast.runs import run


def learn(flags, model, batch, *others):
    check_rows(batch)
    return _learn(flags, model, batch, *others)


_learn, polybeast.learn = polybeast.learn, learn
run.LOG_INTERVAL = 1

if __name__ == "__main__":
    polybeast.run_program(polybeast.main)
