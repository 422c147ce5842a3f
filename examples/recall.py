# SPDX-License-Identifier: Apache-2.0
"""An environment that asks for a memory: what was shown first is asked for last."""

import gymnasium as gym
import numpy as np

DELAY = 8  # steps between what is shown and the question
WAIT = 0  # the action until the question comes


class Recall(gym.Env):
    """Shows 1 or 2, then nothing, then a question; 1 for the action of that number, else -1.

    Who does anything but wait meanwhile has lost at once. So the last action, which nets get,
    keeps no secret, and whoever has no memory can but guess: a mean return of 0.
    """

    def __init__(self):
        self.observation_space = gym.spaces.Box(0, 1, (3,), np.float32)  # is 1, is 2, is asked
        self.action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.shown = int(self.np_random.integers(1, 3))
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        asked = self.steps == DELAY
        right = action == (self.shown if asked else WAIT)
        self.steps += 1
        reward = (1.0 if asked else 0.0) if right else -1.0
        return self._observe(), reward, asked or not right, False, {}

    def _observe(self):
        seen = {0: self.shown - 1, DELAY: 2}.get(self.steps)
        return np.array([seen == i for i in range(3)], np.float32)


# python monobeast.py --env recall:Recall-v0 --use_lstm, with PYTHONPATH=examples
gym.register("Recall-v0", Recall)
