# SPDX-License-Identifier: Apache-2.0
"""An environment that observes a dict: a board, and which of its corners to go to."""

import gymnasium as gym
import numpy as np

SIZE = 5
CORNERS = [(0, 0), (0, SIZE - 1), (SIZE - 1, 0), (SIZE - 1, SIZE - 1)]
MOVES = [(-1, 0), (1, 0), (0, -1), (0, 1)]


class Find(gym.Env):
    """Walk from the middle of the board to the corner that is named; 1 for it, -1 for another.

    The board looks the same whatever the goal is, so nobody does well by the board alone.
    """

    def __init__(self):
        self.observation_space = gym.spaces.Dict(
            board=gym.spaces.Box(0, 1, (1, SIZE, SIZE), np.uint8),
            goal=gym.spaces.Discrete(len(CORNERS)),
        )
        self.action_space = gym.spaces.Discrete(len(MOVES))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = np.array([SIZE // 2, SIZE // 2])
        self.goal = int(self.np_random.integers(len(CORNERS)))
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        self.at = np.clip(self.at + MOVES[action], 0, SIZE - 1)
        self.steps += 1
        at = tuple(self.at)
        reward = 0.0 if at not in CORNERS else 1.0 if at == CORNERS[self.goal] else -1.0
        return self._observe(), reward, at in CORNERS, self.steps == 20, {}

    def _observe(self):
        board = np.zeros((1, SIZE, SIZE), np.uint8)
        board[0, self.at[0], self.at[1]] = 1
        return {"board": board, "goal": self.goal}


# python monobeast.py --env find:Find-v0, with PYTHONPATH=examples
gym.register("Find-v0", Find)
