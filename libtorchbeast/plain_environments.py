# SPDX-License-Identifier: Apache-2.0
"""Environments without known spaces, as forks write them, stepped as one batch.

Environments of beast/envs/environments.py have Gymnasium's API and spaces, against which all is
checked.
"""

import inspect

import numpy as np

from libtorchbeast.rows import (
    Rows,
    close_all,
    count_games,
    draw_seeds,
    read_step,
    write_observation,
)


class PlainEnvironments:
    """N environments as one batch, whose rows rows.py describes.

    They may have the old Gym API (`reset` returns the observation, `step` four values) or
    Gymnasium's, and need no spaces. All observations must be like the first one.

    Args:
      env_class: called N times without arguments.
      num_envs: N.
      seed: a sequence of ints, from which each environment draws a seed; or None.

    Where `truncated_rows` is false, a time limit ends an episode as everything else does. Learners
    that do not know of the extra row would learn from it as if it were a step.
    """

    spaces = ""
    stack_size = 0
    truncated_rows = True

    def __init__(self, env_class, num_envs, seed):
        self.num_envs = num_envs
        self._seeds = [None] * num_envs if seed is None else draw_seeds(seed, num_envs)
        self._rows = Rows(num_envs)
        self._envs = []
        self._num_steps = 0  # for error messages
        try:
            for _ in range(num_envs):
                self._envs.append(env_class())
        except BaseException:
            self.close()
            raise

    def initial(self):
        self._rows.restart()
        for i, seed in enumerate(self._seeds):
            self._reset(i, seed)
        return self._rows.row

    def step(self, actions):
        """Take a nest of arrays [N, ...], of which each environment gets its entries as arrays."""
        self._num_steps += 1
        for i in range(self.num_envs):
            try:
                if self._rows.at_end[i]:
                    self._rows.begin(i)
                    self._reset(i)
                else:
                    self._step(i, actions)
            except Exception as error:
                error.add_note(f"in environment {i}, step {self._num_steps}")
                raise
        return self._rows.row

    def close(self):
        envs, self._envs = self._envs, []
        close_all(envs)

    def _step(self, i, actions):
        result = self._envs[i].step(_column(actions, i))
        if not isinstance(result, (tuple, list)) or len(result) not in (4, 5):
            raise ValueError(f"step() should return 4 or 5 values, but returned {result!r:.1000}")
        observation, reward, *ends, info = result
        info = info if isinstance(info, dict) else {}
        if len(ends) == 1:  # the old API
            ends = (False if info.get("TimeLimit.truncated") else ends[0], ends[0])
        reward, terminated, truncated, game_over = read_step(reward, *ends, info)
        if not self.truncated_rows:
            terminated, truncated = terminated or truncated, False
        if isinstance(actions, np.ndarray) and actions.ndim == 1 and actions.dtype.kind in "biu":
            self._rows.row["last_action"][i] = actions[i].astype(np.int64)
        if self._rows.step(i, reward, terminated, truncated, game_over):
            self._reset(i)
        else:
            self._write_frame(i, observation)

    def _reset(self, i, seed=None):
        env = self._envs[i]
        num_games = None if self._rows.row["game_done"][i] else count_games(env)
        result = env.reset() if seed is None or not _takes_seed(env) else env.reset(seed=seed)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            result, _ = result  # Gymnasium's API
        if num_games is not None and count_games(env) != num_games:
            self._rows.end_game(i)
        self._write_frame(i, result)

    def _write_frame(self, i, observation):
        row = self._rows.row
        if "frame" not in row:
            row["frame"] = _zeros_like(observation, self.num_envs)
        write_observation(row["frame"], i, observation, "as at first")


def _column(nest, i):
    if isinstance(nest, dict):
        return {key: _column(item, i) for key, item in nest.items()}
    if isinstance(nest, tuple):
        return tuple(_column(item, i) for item in nest)
    return nest[i, ...]  # stays an array, where nest[i] could become a scalar


def _takes_seed(env):
    """Return whether env.reset takes a seed, which wrappers may only pass on."""
    try:
        parameters = inspect.signature(env.reset).parameters
    except (TypeError, ValueError):  # not written in Python
        return False
    passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return "seed" in parameters or (passes_on and hasattr(env, "env") and _takes_seed(env.env))


def _zeros_like(observation, num_envs):
    """Return a nest of zeros that holds `num_envs` such observations."""
    if isinstance(observation, dict):
        return {key: _zeros_like(item, num_envs) for key, item in observation.items()}
    if isinstance(observation, (tuple, list)):
        return tuple(_zeros_like(item, num_envs) for item in observation)
    array = np.asarray(observation)
    return np.zeros((num_envs, *array.shape), array.dtype.newbyteorder("="))
