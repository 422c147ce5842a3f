# SPDX-License-Identifier: Apache-2.0
"""Gate-v0: CartPole that one process alone cannot step while the file $GATE is there.

It is the first one, of those that a main process has started, to make such an environment. To be
used as --env gate:Gate-v0, with this folder on PYTHONPATH. The program then logs often, and waits
for an agent that stands still at its end for less long.
"""

import contextlib
import multiprocessing
import os
import pathlib
import time

import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

from beast.gossip import agents
from beast.runs import run

GATE = pathlib.Path(os.environ.get("GATE", "/nowhere"))
OWNER = GATE.with_suffix(".owner")
run.LOG_INTERVAL, agents.HOLD_TIMEOUT = 0.5, 5


class GateEnv(CartPoleEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        if multiprocessing.parent_process() is not None:
            with contextlib.suppress(FileExistsError), open(OWNER, "x") as file:
                file.write(str(os.getpid()))

    def step(self, action):
        while GATE.exists() and OWNER.exists() and OWNER.read_text() == str(os.getpid()):
            time.sleep(0.01)
        return super().step(action)


gym.register("Gate-v0", GateEnv, max_episode_steps=500)
