# SPDX-License-Identifier: Apache-2.0
"""Tiny environments whose returns are known, and environment servers for them.

    python tests/helpers/catch_env.py --env Catch --server_address 127.0.0.1:50051

As any fork would, it replaces create_env and leaves the rest of polybeast_env.py alone.
"""

import ctypes
import multiprocessing
import os
import pathlib
import sys
import time

import gymnasium as gym
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))

import polybeast_env


class Catch(gym.Env):
    """A ball falls down a board; the paddle below should be under it. Return 1 or -1."""

    def __init__(self, rows=10, columns=5):
        self.observation_space = gym.spaces.Box(0, 1, (1, rows, columns), np.uint8)
        self.action_space = gym.spaces.Discrete(3)
        self.rows, self.columns = rows, columns

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.ball = [0, int(self.np_random.integers(self.columns))]
        self.paddle = self.columns // 2
        return self._board(), {}

    def step(self, action):
        self.paddle = min(max(self.paddle + action - 1, 0), self.columns - 1)
        self.ball[0] += 1
        landed = self.ball[0] == self.rows - 1
        reward = (1.0 if self.ball[1] == self.paddle else -1.0) if landed else 0.0
        return self._board(), reward, landed, False, {}

    def _board(self):
        board = np.zeros(self.observation_space.shape, np.uint8)
        board[0, self.ball[0], self.ball[1]] = 1
        board[0, -1, self.paddle] = 1
        return board


class Counter(gym.Env):
    """Observes [episode, step in it]; the reward is the step. Ends or is cut at a length."""

    def __init__(self, length=7, truncates=False, dtype=np.float32):
        self.observation_space = gym.spaces.Box(0, 1e6, (2,), dtype)
        self.action_space = gym.spaces.Discrete(3)
        self.length, self.truncates = length, truncates
        self.episode = -1
        self.actions = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.step_count = 0
        return self._observation(), {}

    def step(self, action):
        self.actions.append(int(action))
        self.step_count += 1
        end = self.step_count == self.length
        return (
            self._observation(),
            float(self.step_count),
            end and not self.truncates,
            end and self.truncates,
            {},
        )

    def _observation(self):
        return np.array([self.episode, self.step_count], self.observation_space.dtype)


class Echo(Counter):
    """Counter that also observes the action it was given last."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.observation_space = gym.spaces.Box(0, 1e6, (3,), np.float32)

    def _observation(self):
        last_action = self.actions[-1] if self.actions else 0
        return np.array([self.episode, self.step_count, last_action], np.float32)


class Failing(Catch):
    """Catch that raises, hangs, or holds Python's lock at step 25, in the first process there.

    Or it hangs in its first reset.

    That process makes the file `marker`, and writes its id there.
    """

    def __init__(self, how, marker):
        super().__init__()
        self.how, self.marker, self.count = how, marker, 0

    def step(self, action):
        self.count += 1
        if self.count == 25 and self._is_first():
            if self.how == "raise":
                raise ValueError("the game is broken")
            if self.how == "hold":
                ctypes.PyDLL(None).sleep(3600)
            time.sleep(3600)
        return super().step(action)

    def reset(self, **kwargs):
        if self.how == "reset" and self._is_first():
            time.sleep(3600)
        return super().reset(**kwargs)

    def _is_first(self):
        try:
            with open(self.marker, "x") as file:
                file.write(f"{os.getpid()}\n")
        except FileExistsError:
            return False
        return True


class Old(Catch):
    """Catch with the step of the old Gym API."""

    def step(self, action):
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, info


class Parent(Catch):
    """Catch that has forked a process, which is to end with it."""

    def __init__(self):
        super().__init__()
        fork = multiprocessing.get_context("fork")
        self.child = fork.Process(target=time.sleep, args=(3600,), daemon=True)
        self.child.start()

    def close(self):
        self.child.terminate()
        self.child.join(30)
        if self.child.is_alive():
            raise RuntimeError("the child does not end")


class Mixed(gym.Wrapper):
    """Catch whose observations are dicts, of a random length, ended or cut; games of two lives."""

    def __init__(self):
        super().__init__(Catch())
        board = self.env.observation_space
        self.observation_space = gym.spaces.Dict(
            {"board": board, "more": gym.spaces.Tuple([gym.spaces.Box(0, 1, (2,), np.float32)])}
        )
        self.lives = 0

    def reset(self, **kwargs):
        board, info = self.env.reset(**kwargs)
        self.lives = (self.lives + 1) % 2
        return self._observe(board), info

    def step(self, action):
        board, reward, terminated, _, info = self.env.step(action)
        truncated = bool(self.np_random.random() < 0.1)
        return self._observe(board), reward, terminated, truncated, info | {"game_over": self.lives}

    def _observe(self, board):
        return {"board": board, "more": (self.np_random.random(2, np.float32),)}


def create_env(flags):
    """Make Catch, Old, Parent, or Failing-HOW@MARKER, where HOW is raise, hang, hold or reset."""
    if flags.env.startswith("Failing-"):
        how, _, marker = flags.env.removeprefix("Failing-").partition("@")
        return Failing(how, marker)
    return {"Catch": Catch, "Old": Old, "Parent": Parent}[flags.env]()


polybeast_env.create_env = create_env

if __name__ == "__main__":
    sys.exit(polybeast_env.main())
