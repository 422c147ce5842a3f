# SPDX-License-Identifier: Apache-2.0
"""Step N Gymnasium environments as one batch, whose rows libtorchbeast/rows.py describes."""

import contextlib
import logging
import multiprocessing
import re

import gymnasium as gym
import numpy as np

from beast.envs import atari_games
from beast.envs.ale_vector import AtariEnvironments
from beast.envs.envpool_envs import EnvPoolEnvironments
from beast.envs.spaces import (
    ACTION_MASK,
    action_range,
    check_mask,
    count_actions,
    empty_actions,
    empty_observation,
    find_invalid,
    find_outside,
    random_actions,
    to_action,
)
from beast.errors import EnvError, FlagError
from beast.processes.watchdog import watched
from libtorchbeast.rows import (
    Rows,
    close_all,
    count_games,
    draw_seeds,
    read_step,
    write_observation,
)
from libtorchbeast.spaces import spaces_to_json

SAID = (gym.error.Error, FlagError, ImportError)  # whose messages say what to change


def create_environments(flags, create_env, num_envs, seed, name):
    """Return environments of --env_backend: an Environments, or what can be used like it.

    Args:
      create_env: called with the flags; returns a Gymnasium environment.
      num_envs, seed, name: as of Environments.
    """
    if flags.env_backend == "ale_vector":
        return AtariEnvironments(flags, num_envs, seed, name)
    if flags.env_backend == "envpool":
        return EnvPoolEnvironments(flags, num_envs, seed, name)
    return Environments(lambda: create_env(flags), num_envs, seed, name)


def try_out(environments, flags=None, num_steps=10):
    """Reset `environments` and take a few random steps, so that mistakes show before training.

    Args:
      flags: with observation_keys; None: there are none.

    Returns:
      The very first row, as `initial` does, whose arrays the steps have overwritten.

    Raises:
      EnvError: an environment raised, or returned what its spaces do not allow.
    """
    _warn_of_keys(environments.observation_space, getattr(flags, "observation_keys", None))
    random = np.random.default_rng(0)
    environments.watched_steps = num_steps + 1
    space, num_envs = environments.action_space, environments.num_envs
    with watched(f"tries out {environments.name}", getattr(flags, "stall_timeout_s", 60)):
        row = environments.initial()
        for _ in range(num_steps):
            environments.step(random_actions(space, num_envs, random, environments.row["frame"]))
    return row


def sample_environment(flags, create_env):
    """Return one environment that was tried out, closed: for its spaces."""
    sample = create_environments(flags, create_env, 1, [flags.seed, 0], "the environment")
    with contextlib.closing(sample):
        try_out(sample, flags)
        if flags.env_backend == "gym":
            atari_games.warn_of_name(flags.env, sample.envs[0])
    return sample


def _warn_of_keys(space, asked):
    """Warn of parts that nobody has asked for: a create_env of one's own may ignore the flag."""
    keys = {key.strip() for key in asked.split(",")} if asked else set()
    known = set(space.keys()) if isinstance(space, gym.spaces.Dict) else set()
    # A Dict within, that was asked for alone, has other keys.
    if keys and keys <= known and (others := known - keys - {ACTION_MASK}):
        logging.warning(
            "--observation_keys is %s, but observations have %s as well: create_env has to leave "
            "them out (gymnasium.wrappers.FilterObservation)",
            asked, ", ".join(sorted(map(str, others))),
        )  # fmt: skip


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
        self.seeds = draw_seeds(seed, num_envs)
        self.envs = []
        try:
            for i in range(num_envs):
                try:
                    with watched(f"creates environment {i} of {name}"):
                        self.envs.append(create_env())
                except Exception as error:
                    hint = ""
                    if isinstance(error, gym.error.UnregisteredEnv):
                        hint = " Name one that a package registers as package:ID"
                    raise EnvError(
                        f"{name}: cannot create environment {i}: {_describe(error)}{hint}"
                    ) from (None if isinstance(error, SAID) else error)
            self._check_spaces()
        except BaseException:
            self.close()
            raise
        self.observation_space = self.envs[0].observation_space
        self.action_space = self.envs[0].action_space
        self.num_actions = count_actions(self.action_space)
        # Frames a step, and frames stacked in an observation (0: unknown), as wrappers say.
        self.frame_skip = self._wrapper_number("frame_skip", 1)
        is_stack = isinstance(self.observation_space, gym.spaces.Box)
        self.stack_size = self._wrapper_number("stack_size", 0) if is_stack else 0
        self._action_range = action_range(self.action_space)
        self._rows = Rows(
            num_envs,
            frame=empty_observation(self.observation_space, num_envs),
            last_action=empty_actions(self.action_space, num_envs),
        )
        self.row = self._rows.row
        self._has_told_of_game = False
        self._steps = [0] * num_envs  # calls of step so far, for error messages
        # Rows that are still compared with the bounds of their space. Of processes only the first
        # one of each parent (its name ends in -1 or :1) does so, or each would warn.
        numbers = re.split("[-:]", multiprocessing.current_process().name)[1:]
        self.watched_steps = 1000 if set(numbers) <= {"1"} else 0

    @property
    def spaces(self):
        """Observation space, action space and frame skip as JSON."""
        return spaces_to_json(self.observation_space, self.action_space, self.frame_skip)

    def initial(self):
        """Reset every environment and return the very first row."""
        self._rows.restart()
        for i, seed in enumerate(self.seeds):
            self._reset(i, seed)
        self._warn_of_bounds()
        return self.row

    def step(self, actions):
        """Take `actions` and return the next row.

        Args:
          actions: like the row's last_action. Of Discrete, [N] ints in 0..num_actions - 1; of
            MultiDiscrete, [N, k] ints likewise; of a Box, [N, k] floats within its bounds.

        Raises:
          EnvError: an action is outside its space; or an environment raised, or returned what its
            spaces do not allow.
        """
        self._check_actions(actions)
        for i, action in enumerate(actions.tolist() if actions.ndim == 1 else actions):
            if self._rows.at_end[i]:
                self._rows.begin(i)
                self._reset(i)
            else:
                self._step(i, action)
        self._warn_of_bounds()
        return self.row

    def close(self):
        envs, self.envs = self.envs, []
        close_all(envs)

    def _check_actions(self, actions):
        likeness = self.row["last_action"]
        if actions.shape != likeness.shape or not np.can_cast(
            actions.dtype, likeness.dtype, "same_kind"
        ):
            raise EnvError(
                f"{self.name}: the actions are {actions.dtype}{list(actions.shape)}, but those of "
                f"{self.num_envs} environments with the action space {self.action_space} "
                f"are {likeness.dtype}{list(likeness.shape)}"
            )
        # In a row after an end the action is ignored.
        if (i := find_invalid(actions, self._action_range, self._rows.at_end)) is not None:
            self._steps[i] += 1
            least, largest = self._action_range
            raise self._error(
                i, f"the action is {actions[i]}; it must be from {least} to {largest}"
            )

    def _step(self, i, action):
        self._steps[i] += 1
        try:
            result = self.envs[i].step(to_action(self.action_space, action))
        except Exception as error:
            raise self._error(i, f"step({action}) raised {_describe(error)}") from error
        try:
            observation, *outcome, info = result
            outcome = read_step(*outcome, info)
        except (TypeError, ValueError) as error:
            raise self._error(i, _describe_result(result) or str(error)) from None
        if self.watched_steps > 0 and ACTION_MASK in info:
            self._warn_of_mask(i)
        if self.watched_steps > 0 and (outcome[1] or outcome[2]) and not outcome[3]:
            self._warn_of_game(i)
        self.row["last_action"][i] = action
        if self._rows.step(i, *outcome):
            self._reset(i)
        else:
            self._write_frame(i, observation)

    def _reset(self, i, seed=None):
        num_games = None if self.row["game_done"][i] else count_games(self.envs[i])
        try:
            result = self.envs[i].reset(seed=seed)
        except Exception as error:
            raise self._error(i, f"reset() raised {_describe(error)}") from error
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise self._error(
                i,
                "reset() returned no pair of an observation and a dict, as in the old Gym API: "
                "return observation and info",
            )
        if num_games is not None and count_games(self.envs[i]) != num_games:
            self._rows.end_game(i)
        self._write_frame(i, result[0])

    def _write_frame(self, i, observation):
        try:
            write_observation(self.row["frame"], i, observation, "as its space says")
        except ValueError as error:
            raise self._error(i, f"the observation is not of its space: {error}") from None

    def _warn_of_bounds(self):
        """Warn once of an observation outside its space, by whose bounds nets may scale it."""
        if self.watched_steps > 0:
            self.watched_steps -= 1
            if found := find_outside(self.observation_space, self.row["frame"]):
                self.watched_steps = 0
                path, i, space = found
                what = f"{path} has numbers outside its space, {space}: correct them, or its bounds"
                logging.warning("%s", self._error(i, what))

    def _warn_of_mask(self, i):
        if ACTION_MASK not in getattr(self.observation_space, "spaces", ()):
            self.watched_steps = 0
            what = "info has an action_mask, but the observation has none, so the net ignores it: "
            what += "let reset return it, too, and create_env wrap it by gym_envs.ObserveMask"
            if not isinstance(self.action_space, gym.spaces.Discrete):
                what = "info has an action_mask, which is ignored: it is for Discrete actions alone"
            logging.warning("%s", self._error(i, what))

    def _warn_of_game(self, i):
        if not self._has_told_of_game and not count_games(self.envs[i]):
            self._has_told_of_game = True
            what = "info['game_over'] is False at the end of an episode, which so counts as a part "
            what += "of a game: if it means another thing here, have a wrapper remove it"
            logging.info("%s", self._error(i, what))

    def _wrapper_number(self, name, default):
        try:
            value = self.envs[0].get_wrapper_attr(name)
        except AttributeError:
            return default
        # Others may mean another thing by this name, as a range of frame skips.
        return int(value) if isinstance(value, (int, np.integer)) and value > 0 else default

    def _check_spaces(self):
        first = self.envs[0]
        # Of wrappers around one environment, too. Streams and groups are not compared.
        cores = [getattr(env, "unwrapped", env) for env in self.envs]
        if len({id(core) for core in cores}) < self.num_envs:
            raise EnvError(
                f"{self.name}: create_env returned the same environment twice: make a new one in "
                "each call, or give flags by which a process steps one alone"
            )
        for i, env in enumerate(self.envs):
            for what in ("observation_space", "action_space"):
                if not hasattr(env, what):
                    raise EnvError(
                        f"{self.name}: environment {i} is {env!r:.100}, which has no {what}: "
                        "return a Gymnasium environment from create_env"
                    )
        try:
            count_actions(first.action_space)
            check_mask(first.observation_space, first.action_space)
            empty_observation(first.observation_space, 0)
        except EnvError as error:
            raise EnvError(f"{self.name}: {error}") from None
        for i, env in enumerate(self.envs):
            for what in ("observation_space", "action_space"):
                space, other = getattr(env, what), getattr(first, what)
                if space != other:
                    raise EnvError(
                        f"{self.name}: the {what.replace('_', ' ')} of environment {i} is {space}, "
                        f"but that of environment 0 is {other}; all must be equal"
                    )

    def _error(self, i, what):
        env = self.envs[i]
        env_id = getattr(getattr(env, "spec", None), "id", env)  # it may be no gym.Env
        return EnvError(
            f"{self.name}: environment {i} ({env_id}, seed {self.seeds[i]}), "
            f"step {self._steps[i]}: {what}"
        )


def _describe(error):
    if isinstance(error, FlagError):
        return str(error)
    text = f"{type(error).__name__}: {error}"
    if re.search("expected 5, got 4|unexpected keyword argument '(seed|options)'", text):
        text += " (is it of the old Gym API? The package shimmy has wrappers for it)"
    return text


def _describe_result(result):
    """Return what is wrong with the tuple that `step` returned, or None."""
    expected = "observation, reward, terminated, truncated and info"
    if not isinstance(result, (tuple, list)):
        return f"step() returned {type(result).__name__}; it should return {expected}"
    if len(result) == 4:
        return f"step() has the old Gym API: return terminated and truncated, that is, {expected}"
    if len(result) != 5:
        return f"step() returned {len(result)} values; it should return {expected}"
    return None
