# SPDX-License-Identifier: Apache-2.0
"""A PolyBeast that ends at once if a row that cannot be right reaches its learner.

FAULTS_FOLDER=/tmp/faults python benchmarks/faulty/poly.py --server_addresses ...
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))

from faulty.environment import check_rows  # noqa: E402

import experiment  # noqa: E402
import polybeast  # noqa: E402


def learn(flags, model, batch, *others):
    check_rows(batch)
    return _learn(flags, model, batch, *others)


_learn, polybeast.learn = polybeast.learn, learn
polybeast.LOG_INTERVAL = 1

if __name__ == "__main__":
    experiment.run_program(polybeast.main)
