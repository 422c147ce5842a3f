# SPDX-License-Identifier: Apache-2.0
"""Turn N Gymnasium environments into the rows of a rollout.

A row is a dict of arrays with leading dimension N, one entry per environment:

    frame           [N, *obs_shape]  the observation that arrived with this row, or a nest of them
    reward          [N] float32      raw reward of the step that led here
    done            [N] bool         a new episode begins here (also in the very first row)
    truncated       [N] bool         the true last observation of an episode cut by a time limit
    terminated      [N] bool         always false here: these environments reset in the same step
    episode_return  [N] float32      of the episode so far; where done, of the one that just ended
    episode_step    [N] int32        likewise, in agent steps
    game_done       [N] bool         a new game begins here; differs from done where a lost life
    game_return     [N] float32        ends an episode but not the game
    game_step       [N] int32
    last_action     [N] int64        the action that led here; 0 in the very first row. Of a
                                       MultiDiscrete space [N, k] int64, of a Box [N, k] float32

An episode that terminates resets within the step: its last reward comes together with the next
episode's first observation. One that is truncated takes an extra row, so that V-trace can
bootstrap from the observation at which it was cut. The action given in that row is ignored.
"""

import json

import gymnasium as gym
import numpy as np

import packages

MAX_REWARD = float(np.finfo(np.float32).max)


class EnvError(RuntimeError):
    """An environment raised or broke its contract; the message names it and the step."""


def map_nest(function, nest, *others):
    """Apply `function` to each leaf of a nest of dicts and tuples (or of several alike ones)."""
    if isinstance(nest, dict):
        return {k: map_nest(function, v, *(o[k] for o in others)) for k, v in nest.items()}
    if isinstance(nest, tuple):
        return tuple(map_nest(function, *leaves) for leaves in zip(nest, *others, strict=True))
    return function(nest, *others)


def empty_observation(space, num_envs):
    """Return a nest of zeros [num_envs, ...] that holds a batch of observations of `space`."""
    if isinstance(space, gym.spaces.Dict):
        return {key: empty_observation(s, num_envs) for key, s in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(empty_observation(s, num_envs) for s in space.spaces)
    if space.shape is None or space.dtype is None or space.dtype.kind not in "biuf":
        raise EnvError(
            f"observation space {space} is not made of arrays of numbers; "
            "wrap the environment so that it is a Box, or a Dict or Tuple of them"
        )
    return np.zeros((num_envs, *space.shape), space.dtype)


def count_actions(space):
    """Return what a net needs to know of an action space.

    Of Discrete, the number of actions; of MultiDiscrete, a tuple of the numbers of its k parts; of
    a Box, the number k of its parts.
    """
    if isinstance(space, gym.spaces.Discrete):
        return int(space.n)
    if isinstance(space, gym.spaces.MultiDiscrete) and len(space.shape) == 1:
        return tuple(space.nvec.tolist())
    if isinstance(space, gym.spaces.Box) and len(space.shape) == 1 and space.dtype.kind == "f":
        return space.shape[0]
    raise EnvError(
        f"the action space is {space}; only Discrete, and MultiDiscrete and Box (of floats) of one "
        "dimension are supported, so wrap the environment to have one of these"
    )


def empty_actions(space, num_envs):
    """Return zeros that hold a batch of actions of `space`, as agents choose them.

    Those of Discrete and MultiDiscrete are int64, [num_envs] and [num_envs, k], and count from 0
    wherever the space starts; those of a Box are float32, [num_envs, k].
    """
    dtype = np.float32 if isinstance(space, gym.spaces.Box) else np.int64
    return np.zeros((num_envs, *space.shape), dtype)


def _action_range(space):
    """Return the least and the largest action, each a number or [k], as agents choose them."""
    if isinstance(space, gym.spaces.Discrete):
        return 0, int(space.n) - 1
    if isinstance(space, gym.spaces.MultiDiscrete):
        return np.zeros_like(space.nvec), space.nvec - 1
    # Not infinite, since actions may not be.
    largest = np.finfo(np.float32).max
    return tuple(np.clip(b, -largest, largest).astype(np.float32) for b in (space.low, space.high))


def space_to_dict(space):
    """Return a space as what JSON can say; spaces that are equal give the same."""
    if isinstance(space, gym.spaces.Dict):
        items = [[key, space_to_dict(s)] for key, s in space.spaces.items()]
        return {"type": "Dict", "spaces": items}
    if isinstance(space, gym.spaces.Tuple):
        return {"type": "Tuple", "spaces": [space_to_dict(s) for s in space.spaces]}
    if isinstance(space, gym.spaces.Box):
        bounds = {"low": _bound_to_list(space.low), "high": _bound_to_list(space.high)}
        return {"type": "Box", "shape": list(space.shape), "dtype": space.dtype.name} | bounds
    if isinstance(space, gym.spaces.Discrete):
        numbers = {"n": int(space.n), "start": int(space.start)}
        return {"type": "Discrete", "dtype": space.dtype.name} | numbers
    if isinstance(space, gym.spaces.MultiDiscrete):
        numbers = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
        return {"type": "MultiDiscrete", "dtype": space.dtype.name} | numbers
    if isinstance(space, gym.spaces.MultiBinary):
        return {"type": "MultiBinary", "n": np.asarray(space.n).tolist()}
    raise EnvError(f"the space {space} is of a kind that cannot be sent")


def _bound_to_list(bound):
    if bound.size == 0:
        return 0
    return bound.flat[0].item() if (bound == bound.flat[0]).all() else bound.tolist()


def space_from_dict(d):
    """Return the space of which `space_to_dict` made `d`."""
    spaces = gym.spaces
    if d["type"] == "Dict":
        return spaces.Dict([(key, space_from_dict(s)) for key, s in d["spaces"]])
    if d["type"] == "Tuple":
        return spaces.Tuple([space_from_dict(s) for s in d["spaces"]])
    if d["type"] == "Box":
        shape = tuple(d["shape"])
        low, high = (
            np.broadcast_to(np.array(d[bound], d["dtype"]), shape).copy()
            for bound in ("low", "high")
        )
        return spaces.Box(low, high, shape, np.dtype(d["dtype"]))
    if d["type"] == "Discrete":
        return spaces.Discrete(d["n"], start=d["start"], dtype=np.dtype(d["dtype"]).type)
    if d["type"] == "MultiDiscrete":
        return spaces.MultiDiscrete(d["nvec"], np.dtype(d["dtype"]), start=d["start"])
    if d["type"] == "MultiBinary":
        return spaces.MultiBinary(d["n"])
    raise EnvError(f"there is no space of type {d['type']!r}")


class Environments:
    """N environments, stepped one after the other as one batch.

    Args:
      create_env: called N times without arguments; returns a Gymnasium environment.
      num_envs: N.
      seed: an int or a sequence of ints, from which each environment draws a seed of its own.
      name: put in front of error messages.

    Rows are returned in `row`, whose arrays stay the same and are overwritten by each call.
    """

    def __init__(self, create_env, num_envs, seed, name="environments"):
        self.name = name
        self.num_envs = num_envs
        self.seeds = [int(s) for s in np.random.SeedSequence(seed).generate_state(num_envs) // 2]
        self.envs = []
        try:
            for i in range(num_envs):
                try:
                    self.envs.append(create_env())
                except Exception as error:
                    raise EnvError(
                        f"{name}: cannot create environment {i}: {_describe(error)}"
                    ) from error
            self._check_spaces()
        except BaseException:
            self.close()
            raise
        self.observation_space = self.envs[0].observation_space
        action_space = self.envs[0].action_space
        self.num_actions = count_actions(action_space)
        self._action_range = _action_range(action_space)
        # What an environment's own actions count from.
        self._first_action = getattr(action_space, "start", np.zeros((), action_space.dtype))
        if isinstance(action_space, gym.spaces.Discrete):
            self._first_action = int(self._first_action)
        self.row = {
            "frame": empty_observation(self.observation_space, num_envs),
            "reward": np.zeros(num_envs, np.float32),
            "done": np.ones(num_envs, bool),
            "truncated": np.zeros(num_envs, bool),
            "terminated": np.zeros(num_envs, bool),
            "episode_return": np.zeros(num_envs, np.float32),
            "episode_step": np.zeros(num_envs, np.int32),
            "game_done": np.ones(num_envs, bool),
            "game_return": np.zeros(num_envs, np.float32),
            "game_step": np.zeros(num_envs, np.int32),
            "last_action": empty_actions(action_space, num_envs),
        }
        # Kept in double precision, in which sums of float32 rewards stay exact for long.
        self._episode = [_Totals() for _ in range(num_envs)]
        self._game = [_Totals() for _ in range(num_envs)]
        self._steps = [0] * num_envs  # calls of step since the start, for error messages
        self._truncated = [False] * num_envs  # the last row showed the end of a cut episode
        self._game_over = [False] * num_envs

    @property
    def spaces(self):
        """Observation and action space as JSON."""
        spaces = {"observation": self.observation_space, "action": self.envs[0].action_space}
        return json.dumps({k: space_to_dict(s) for k, s in spaces.items()}, sort_keys=True)

    @property
    def stack_size(self):
        """How many frames an observation is a stack of; 0 where that is not known."""
        try:
            return int(self.envs[0].get_wrapper_attr("stack_size"))
        except AttributeError:
            return 0

    def initial(self):
        """Reset every environment and return the very first row."""
        for i, seed in enumerate(self.seeds):
            self._reset(i, seed)
        return self.row

    def step(self, actions):
        """Take `actions` and return the next row.

        Args:
          actions: like the row's last_action. Of Discrete, [N] ints in 0..num_actions - 1; of
            MultiDiscrete, [N, k] ints likewise; of a Box, [N, k] floats within its bounds.

        Raises:
          EnvError: an action is none of its space; or an environment raised, or returned what its
            spaces do not allow.
        """
        self._check_actions(actions)
        for i, action in enumerate(actions.tolist() if actions.ndim == 1 else actions):
            self._step(i, action)
        return self.row

    def close(self):
        for env in self.envs:
            env.close()
        self.envs = []

    def _check_actions(self, actions):
        likeness = self.row["last_action"]
        if actions.shape != likeness.shape or not np.can_cast(
            actions.dtype, likeness.dtype, "same_kind"
        ):
            raise EnvError(
                f"{self.name}: the actions are {actions.dtype}{list(actions.shape)}, but those of "
                f"{self.num_envs} environments with the action space {self.envs[0].action_space} "
                f"are {likeness.dtype}{list(likeness.shape)}"
            )
        least, largest = self._action_range
        allowed = (least <= actions) & (actions <= largest)  # false for NaN
        if allowed.all():
            return
        for i in range(self.num_envs):
            if not allowed[i].all() and not self._truncated[i]:  # else it is ignored
                self._steps[i] += 1
                raise self._error(
                    i, f"the action is {actions[i]}; it must be from {least} to {largest}"
                )

    def _step(self, i, action):
        row, episode, game = self.row, self._episode[i], self._game[i]
        if self._truncated[i]:  # the extra row is over; this one begins the next episode
            self._truncated[i] = False
            row["reward"][i] = 0.0
            row["truncated"][i] = False
            row["game_done"][i] = self._game_over[i]
            self._write_totals(i)
            self._reset(i)
            return

        self._steps[i] += 1
        try:
            observation, reward, terminated, truncated, info = self.envs[i].step(
                action + self._first_action
            )
            reward = float(reward)
        except Exception as error:
            raise self._error(i, f"step({action}) raised {_describe(error)}") from error
        if not abs(reward) <= MAX_REWARD:
            raise self._error(i, f"the reward is {reward}; it must be finite, as a float32")

        episode.add(reward)
        game.add(reward)
        row["reward"][i] = reward
        row["last_action"][i] = action
        if terminated:
            row["game_done"][i] = self._game_over[i] = info.get("game_over", True)
        elif truncated:
            self._truncated[i] = True
            self._game_over[i] = info.get("game_over", True)
            row["game_done"][i] = False
        else:
            row["game_done"][i] = False
        row["done"][i] = terminated
        row["truncated"][i] = self._truncated[i]
        self._write_totals(i)
        if terminated:
            self._reset(i)
        else:
            self._write_frame(i, observation)

    def _reset(self, i, seed=None):
        """Begin an episode: write its first observation, and its totals from nought."""
        try:
            observation, _ = self.envs[i].reset(seed=seed)
        except Exception as error:
            raise self._error(i, f"reset() raised {_describe(error)}") from error
        self.row["done"][i] = True
        self._episode[i].clear()
        if self._game_over[i]:
            self._game_over[i] = False
            self._game[i].clear()
        self._write_frame(i, observation)

    def _write_totals(self, i):
        self.row["episode_return"][i] = self._episode[i].reward
        self.row["episode_step"][i] = self._episode[i].steps
        self.row["game_return"][i] = self._game[i].reward
        self.row["game_step"][i] = self._game[i].steps

    def _write_frame(self, i, observation):
        try:
            self._write(i, self.row["frame"], observation, "observation")
        except (KeyError, TypeError, ValueError) as error:
            raise self._error(i, f"the observation is not of its space: {error}") from error

    def _write(self, i, target, observation, path):
        if isinstance(target, dict):
            if not isinstance(observation, dict) or observation.keys() != target.keys():
                raise TypeError(f"{path} should be a dict with the keys {sorted(target)}")
            for key in target:
                self._write(i, target[key], observation[key], f"{path}[{key!r}]")
        elif isinstance(target, tuple):
            if not isinstance(observation, tuple) or len(observation) != len(target):
                raise TypeError(f"{path} should be a tuple of {len(target)}")
            for k, (t, o) in enumerate(zip(target, observation, strict=True)):
                self._write(i, t, o, f"{path}[{k}]")
        else:
            array = np.asarray(observation)
            # A Python number for a scalar space (Discrete, say) has no dtype of its own.
            if array.shape != target.shape[1:] or (
                array.dtype != target.dtype and not isinstance(observation, (bool, int, float))
            ):
                raise ValueError(
                    f"{path} is {array.dtype}{list(array.shape)}, "
                    f"its space says {target.dtype}{list(target.shape[1:])}"
                )
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ValueError(f"{path} holds numbers that are not finite")
            target[i] = array

    def _check_spaces(self):
        first = self.envs[0]
        try:
            count_actions(first.action_space)
        except EnvError as error:
            raise EnvError(f"{self.name}: {error}") from None
        for i, env in enumerate(self.envs):
            if (env.observation_space, env.action_space) != (
                first.observation_space,
                first.action_space,
            ):
                raise EnvError(
                    f"{self.name}: environment {i} has the spaces {env.observation_space} and "
                    f"{env.action_space}, but environment 0 has {first.observation_space} and "
                    f"{first.action_space}; all must be alike"
                )

    def _error(self, i, what):
        spec = self.envs[i].spec
        return EnvError(
            f"{self.name}: environment {i} ({spec.id if spec else self.envs[i]}, "
            f"seed {self.seeds[i]}), step {self._steps[i]}: {what}"
        )


class _Totals:
    """Return and length of one episode or game."""

    def __init__(self):
        self.clear()

    def add(self, reward):
        self.reward += reward
        self.steps += 1

    def clear(self):
        self.reward = 0.0
        self.steps = 0


def _describe(error):
    return f"{type(error).__name__}: {error}{packages.advice(error)}"
