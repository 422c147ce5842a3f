# SPDX-License-Identifier: Apache-2.0
"""Environments as forks have them."""

import numpy as np
from deadline import wait_until


class Old:
    """An environment as forks have them: no spaces, a reset without arguments, four values."""

    def __init__(self, length=3, observation=None):
        self.length = length
        self.observation = observation or (lambda t: np.array([t], np.int32))
        self.actions = []

    def reset(self):
        self.t = 0
        return self.observation(0)

    def step(self, action):
        self.actions.append(action)
        self.t += 1
        return self.observation(self.t), 0.5 * self.t, self.t == self.length, {}


class Counted(Old):
    """Knows which ones there are."""

    alive = set()

    def __init__(self):
        super().__init__()
        self.alive.add(self)

    def close(self):
        self.alive.remove(self)

    @classmethod
    def wait_for(cls, number):
        wait_until(lambda: len(cls.alive) == number)
