# SPDX-License-Identifier: Apache-2.0
"""Environments by their ids in Gymnasium, and action masks."""

import contextlib
import functools

import gymnasium as gym
import numpy as np

from beast.envs.atari_games import is_game, is_spec_of_game  # programs use is_game
from beast.envs.spaces import ACTION_MASK
from beast.errors import FlagError

masks_in_info = {}  # whether info has an action mask, by ids of environments with Discrete actions


def create(flags):
    """Return the environment that is registered as flags.env.

    One whose `info` has an action mask observes a Dict of "observation" and "action_mask".
    """
    if is_game(flags.env):  # create_env of most programs asks before
        raise FlagError(f"{flags.env} is a game of Atari: dqn.py, ppo.py and others play it")
    if flags.env.startswith("MinAtar/") and flags.env not in gym.registry:
        from minatar.gym import register_envs

        register_envs()
    env = make(flags.env, flags.render_mode)
    if is_spec_of_game(env.spec):  # which is_game does not know by this name
        raise FlagError(f"{flags.env} is ale-py's {env.spec.id}: give --env {env.spec.id}")
    has_mask = ACTION_MASK in getattr(env.observation_space, "spaces", ())
    may_have_one = isinstance(env.action_space, gym.spaces.Discrete) and not has_mask
    if may_have_one and flags.env not in masks_in_info:
        # Another copy plays, since the first reset of each is to be with its own seed. This one is
        # closed before: some environments can exist only once.
        if flags.render_mode is not None:  # whose window is for playing
            env.close()
            env = make(flags.env)
        with contextlib.closing(env):
            result = env.reset(seed=0)
        masks_in_info[flags.env] = isinstance(result, tuple) and ACTION_MASK in result[-1]
        env = make(flags.env, flags.render_mode)
    if flags.observation_keys:
        env = _keep(env, read_keys(env, flags.observation_keys))
    return ObserveMask(env) if may_have_one and masks_in_info[flags.env] else env


def make(env_id, render_mode=None, **arguments):
    """Return an environment as it is registered, whose time limits are truncations.

    Args:
      arguments: for its class, beside those that are registered.

    Raises:
      FlagError: it takes no render_mode, but there is one.
    """
    # Environments checks what it returns.
    create = functools.partial(gym.make, env_id, disable_env_checker=True, **arguments)
    # Some environments take no render_mode, others must have one.
    try:
        env = create() if render_mode is None else create(render_mode=render_mode)
    except TypeError as error:
        if "render_mode" not in str(error):
            raise
        if render_mode is not None:
            raise FlagError(f"{env_id} cannot be rendered: it takes no render_mode") from None
        env = create(render_mode=None)
    if hasattr(env.unwrapped, "StepStatus"):  # NetHack's: its own limit looks like a death
        env = gym.wrappers.TimeLimit(env, int(env.unwrapped._max_episode_steps) - 1)
    return env


def read_keys(env, text):
    """Return the keys in `text`, of --observation_keys; raise a FlagError if `env` lacks one."""
    space, keys = env.observation_space, [key.strip() for key in text.split(",")]
    known = list(space.spaces) if isinstance(space, gym.spaces.Dict) else []
    if unknown := [key for key in keys if key not in known]:
        raise FlagError(
            f"--observation_keys has {', '.join(unknown)}, but observations are {space}: "
            + (f"name some of {', '.join(known)}" if known else "leave the flag out")
        )
    # A mask of Discrete actions is obeyed even where it is not asked for.
    if isinstance(env.action_space, gym.spaces.Discrete):
        keys += [key for key in known if key == ACTION_MASK and key not in keys]
    return keys


def _keep(env, keys):
    space = env.observation_space
    if len(keys) == 1 and keys[0] != ACTION_MASK:
        return gym.wrappers.TransformObservation(env, lambda x: x[keys[0]], space[keys[0]])
    return gym.wrappers.FilterObservation(env, keys)


def rescale_actions(env):
    """Return `env` with actions from -1 to 1 where they are a bounded Box.

    Gymnasium's RescaleAction divides by 0 where the two bounds of a part are equal.
    """
    space = env.action_space
    if not isinstance(space, gym.spaces.Box) or not space.is_bounded():
        return env

    def rescale(action):
        share = (1 + action) / 2
        rescaled = (1 - share) * space.low + share * space.high
        return np.clip(rescaled, space.low, space.high).astype(space.dtype)  # rounding errors

    return gym.wrappers.TransformAction(env, rescale, gym.spaces.Box(-1, 1, space.shape))


class ObserveMask(gym.Wrapper):
    """Adds info["action_mask"] to the observation, which becomes, or is, a Dict.

    `info` must have it in each step, but for the last one of an episode, where the one before may
    hold.
    """

    def __init__(self, env):
        super().__init__(env)
        inner, space = env.observation_space, env.action_space
        self._is_dict = isinstance(inner, gym.spaces.Dict)
        parts = inner.spaces if self._is_dict else {"observation": inner}
        mask = gym.spaces.MultiBinary(int(space.n))
        self.observation_space = gym.spaces.Dict({**parts, ACTION_MASK: mask})

    def reset(self, **kwargs):
        observation, info = self.env.reset(**kwargs)
        return self._observe(observation, info), info

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            info = {ACTION_MASK: self._mask} | info
        return self._observe(observation, info), reward, terminated, truncated, info

    def _observe(self, observation, info):
        space = self.observation_space[ACTION_MASK]
        if ACTION_MASK not in info:
            raise ValueError("info has no 'action_mask' in this step, but it had one after reset")
        mask = (np.asarray(info[ACTION_MASK]) != 0).astype(space.dtype)
        if mask.shape != space.shape:
            raise ValueError(
                f"info['action_mask'] has the shape {list(mask.shape)}, but there are "
                f"{space.shape[0]} actions"
            )
        self._mask = mask  # of an end without one, whose value may count, if a time limit cut it
        parts = observation if self._is_dict else {"observation": observation}
        return {**parts, ACTION_MASK: mask}
