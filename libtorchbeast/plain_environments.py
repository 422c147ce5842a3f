# SPDX-License-Identifier: Apache-2.0
"""Environments of which nothing is known, as forks write them, stepped as one batch."""

import inspect

import numpy as np

from libtorchbeast.wire import FIELDS


class PlainEnvironments:
    """N environments, of which nothing is known, as one batch: see environment.Environments.

    They may follow the old Gym API (`reset` returns the observation, `step` four values) or
    Gymnasium's, and need no spaces. The first observation says what all others look like.

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
        self._seeds = [None] * num_envs
        if seed is not None:
            state = np.random.SeedSequence(seed).generate_state(num_envs)
            self._seeds = [int(s) for s in state // 2]
        self._row = {key: np.zeros(num_envs, dtype) for key, (_, dtype) in FIELDS.items()}
        # Kept in double precision, in which sums of float32 rewards stay exact for long.
        self._returns = {"episode": [0.0] * num_envs, "game": [0.0] * num_envs}
        self._steps = {"episode": [0] * num_envs, "game": [0] * num_envs}
        self._truncated = [False] * num_envs  # the last row showed the end of a cut episode
        self._game_over = [False] * num_envs
        self._envs = []
        try:
            for _ in range(num_envs):
                self._envs.append(env_class())
        except BaseException:
            self.close()
            raise

    def initial(self):
        for i, seed in enumerate(self._seeds):
            self._reset(i, seed)
        self._row["game_done"][:] = True
        return self._row

    def step(self, actions):
        """Take a nest of arrays [N, ...], of which each environment gets its entries as arrays."""
        for i in range(self.num_envs):
            self._step(i, actions)
        return self._row

    def close(self):
        for env in self._envs:
            if hasattr(env, "close"):
                env.close()
        self._envs = []

    def _step(self, i, actions):
        row = self._row
        if self._truncated[i]:  # the extra row is over; this one begins the next episode
            self._truncated[i] = row["truncated"][i] = False
            row["reward"][i] = 0.0
            row["game_done"][i] = self._game_over[i]
            self._write_totals(i)
            self._reset(i)
            return

        result = self._envs[i].step(_column(actions, i))
        if not isinstance(result, (tuple, list)) or len(result) not in (4, 5):
            raise ValueError(f"step() should return 4 or 5 values, but returned {result!r:.1000}")
        observation, reward, *ends, info = result
        info = info if isinstance(info, dict) else {}
        if len(ends) == 1:  # the old API
            ends = (ends[0] and not info.get("TimeLimit.truncated"), ends[0])
        terminated, truncated = bool(ends[0]), bool(ends[1])
        if not self.truncated_rows:
            terminated, truncated = terminated or truncated, False
        reward = float(np.asarray(reward).item())
        if not abs(reward) <= np.finfo(np.float32).max:
            raise ValueError(f"the reward is {reward}; it must be finite, as a float32")

        for what in ("episode", "game"):
            self._returns[what][i] += reward
            self._steps[what][i] += 1
        over = (terminated or truncated) and bool(info.get("game_over", True))
        self._game_over[i] = over
        self._truncated[i] = truncated and not terminated
        row["reward"][i] = reward
        row["done"][i] = terminated
        row["truncated"][i] = self._truncated[i]
        row["game_done"][i] = over and terminated
        if isinstance(actions, np.ndarray) and actions.ndim == 1 and actions.dtype.kind in "iu":
            row["last_action"][i] = actions[i].astype(np.int64)
        self._write_totals(i)
        if terminated:
            self._reset(i)
        else:
            self._write_frame(i, observation)

    def _reset(self, i, seed=None):
        """Begin an episode: write its first observation, and its totals from nought."""
        env = self._envs[i]
        result = env.reset() if seed is None or not _takes_seed(env) else env.reset(seed=seed)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            result, _ = result  # Gymnasium's API
        self._row["done"][i] = True
        self._returns["episode"][i], self._steps["episode"][i] = 0.0, 0
        if self._game_over[i]:
            self._game_over[i] = False
            self._returns["game"][i], self._steps["game"][i] = 0.0, 0
        self._write_frame(i, result)

    def _write_totals(self, i):
        for what in ("episode", "game"):
            self._row[f"{what}_return"][i] = self._returns[what][i]
            self._row[f"{what}_step"][i] = self._steps[what][i]

    def _write_frame(self, i, observation):
        if "frame" not in self._row:
            self._row["frame"] = _zeros_like(observation, self.num_envs)
        _write(self._row["frame"], i, observation)


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


def _write(target, i, observation, path="observation"):
    """Write an observation into the arrays' entries i; it must be as the first one was."""
    if isinstance(target, dict):
        if not isinstance(observation, dict) or observation.keys() != target.keys():
            raise ValueError(f"{path} should be a dict with the keys {list(target)}, as at first")
        for key, item in target.items():
            _write(item, i, observation[key], f"{path}[{key!r}]")
    elif isinstance(target, tuple):
        if not isinstance(observation, (tuple, list)) or len(observation) != len(target):
            raise ValueError(f"{path} should be a tuple of {len(target)}, as it was at first")
        for k, item in enumerate(target):
            _write(item, i, observation[k], f"{path}[{k}]")
    else:
        array = np.asarray(observation)
        if array.dtype.newbyteorder("=") != target.dtype or array.shape != target.shape[1:]:
            raise ValueError(
                f"{path} is {array.dtype}{list(array.shape)}, "
                f"but was {target.dtype}{list(target.shape[1:])} at first"
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"{path} holds numbers that are not finite")
        target[i] = array
