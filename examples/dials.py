# SPDX-License-Identifier: Apache-2.0
"""An environment of which each action has two parts: how far to turn either of two dials."""

import gymnasium as gym
import numpy as np

SIZES = (5, 9)  # positions of either dial
TURNS = (3, 5)  # by one position to the left or right, or none; by up to two


class Dials(gym.Env):
    """Turn both dials to the positions that are shown; 1 as soon as both are there."""

    def __init__(self):
        self.observation_space = gym.spaces.Box(0, 1, (2 * sum(SIZES),), np.float32)
        self.action_space = gym.spaces.MultiDiscrete(TURNS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.goal = self.np_random.integers([SIZES, SIZES])
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        self.at = np.clip(self.at + action - np.array(TURNS) // 2, 0, np.array(SIZES) - 1)
        self.steps += 1
        found = bool((self.at == self.goal).all())
        return self._observe(), float(found), found, self.steps == 10, {}

    def _observe(self):
        positions = zip([*self.at, *self.goal], 2 * SIZES, strict=True)
        return np.concatenate([np.eye(size, dtype=np.float32)[at] for at, size in positions])


# python ppo.py --env dials:Dials-v0, with PYTHONPATH=examples
gym.register("Dials-v0", Dials)
