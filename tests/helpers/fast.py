# SPDX-License-Identifier: Apache-2.0
"""A program that logs every half second, for tests that wait for its logs.

python tests/helpers/fast.py gala --env CartPole-v1
"""

import importlib
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))

from beast.runs import run

run.LOG_INTERVAL = 0.5

if __name__ == "__main__":
    program = importlib.import_module(sys.argv.pop(1))
    sys.argv[0] = f"{program.__name__}.py"
    program.run_program(program.main)
