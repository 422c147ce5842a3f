# SPDX-License-Identifier: Apache-2.0
"""A PolyBeast fork that learns the tiny environments of catch_env.py.

    python tests/helpers/catch_poly.py --env Catch --savedir /tmp/runs

As any fork would, it replaces create_env and Net and leaves the rest alone.
"""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))

import catch
import catch_env

import polybeast
from beast.servers import handshakes, streams


class Net(catch.Net):
    def __init__(self, observation_space, num_actions, use_lstm=False, model=None):
        super().__init__(observation_space, num_actions, use_lstm)


PolyNet = polybeast.Net
polybeast.Net, polybeast.create_env = Net, catch_env.create_env
polybeast.ENV_SCRIPT = catch_env.__file__
handshakes.CONNECT_TIMEOUT = streams.CONNECT_TIMEOUT = 5
if "ANSWER_TIMEOUT" in os.environ:
    handshakes.ANSWER_TIMEOUT, handshakes.PATIENCE = float(os.environ["ANSWER_TIMEOUT"]), 0
streams.CHECK_INTERVAL = 0.5

if __name__ == "__main__":
    polybeast.run_program(polybeast.main)
