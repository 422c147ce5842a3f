# SPDX-License-Identifier: Apache-2.0
"""A PolyBeast fork that learns the tiny environments of catch_env.py.

    python tests/catch_poly.py --env Catch --savedir /tmp/runs

As any fork would, it replaces create_env and Net and leaves the rest alone.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import catch
import catch_env

import experiment
import polybeast
import servers


class Net(catch.Net):
    def __init__(self, observation_space, num_actions, use_lstm=False, model=None):
        super().__init__(observation_space, num_actions, use_lstm)


polybeast.Net = Net
polybeast.ENV_SCRIPT = catch_env.__file__
polybeast.LOG_INTERVAL = 0.5
servers.CONNECT_TIMEOUT = 5

if __name__ == "__main__":
    experiment.run_program(polybeast.main)
