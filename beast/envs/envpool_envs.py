# SPDX-License-Identifier: Apache-2.0
"""Turn N environments of EnvPool (C++) into the rows of a rollout: `--env_backend envpool`.

libtorchbeast/rows.py describes a row. EnvPool resets one step later, so that each end of an episode
takes an extra row, `terminated` or `truncated`. docs/environment.md lists how its Atari games
differ from those of atari_wrappers.py.

EnvPool reports every end in the step of a time limit as a truncation. So the time limits of
families that do not look at theirs are applied here, and Atari's `info` says what else has ended.
"""

import contextlib
import difflib
import functools
import importlib.util
import re
import sys
import warnings

import gymnasium as gym
import numpy as np

from beast.envs import atari_games
from beast.envs.gym_envs import read_keys
from beast.envs.spaces import (
    ACTION_MASK,
    action_range,
    check_mask,
    count_actions,
    empty_actions,
    empty_observation,
    find_invalid,
)
from beast.errors import EnvError, FlagError
from libtorchbeast.rows import Rows, are_finite, draw_seeds
from libtorchbeast.spaces import spaces_to_json

MASK_IN_INFO = f"info:{ACTION_MASK}"  # in EnvPool's specification
NO_LIMIT = 2**31 - 1  # steps, as EnvPool writes it
ATARI_FRAMES = 108_000  # the time limit of an Atari game, in frames of the emulator
# Families whose environments end by a time limit as if by a wrapper around them.
PLAIN_LIMITS = {"classic_control", "box2d", "toy_text", "mujoco.gym"}


def check_installed():
    """Raise a FlagError where EnvPool is not installed."""
    if importlib.util.find_spec("envpool") is None:
        raise FlagError(
            "--env_backend envpool needs a package that is not installed: pip install "
            f"envpool==1.2.7 (for Python 3.12 and newer; this is {sys.version.split()[0]})"
        )


class EnvPoolEnvironments:
    """N environments of `flags.env`, stepped as one batch in EnvPool; used as an Environments.

    Args:
      flags: env and observation_keys; for Atari those of atari_wrappers.add_flags.
      num_envs: N.
      seed: an int or a sequence of ints, from which each environment draws a seed of its own.
      name: put in front of error messages.

    Attributes:
      game: ale-py's name of the game; None for other environments.

    Rows are returned in `row`, whose arrays stay the same and are overwritten by each call.

    Raises:
      EnvError: EnvPool is not installed, or does not make these environments.
    """

    def __init__(self, flags, num_envs, seed, name="environments"):
        self.name, self.num_envs = name, num_envs
        self.seeds = draw_seeds(seed, num_envs)
        self._env_id = flags.env
        try:
            check_installed()
            import envpool  # here, since others do without

            # Bounds of EnvPool are float64, also those of float32 spaces.
            warnings.filterwarnings("ignore", ".*precision lowered by casting", UserWarning)
            family = _find_family(flags.env)
            options = _atari_options(flags) if family == "atari" else {}
            options |= {"num_envs": num_envs, "seed": self.seeds}
            options["num_threads"] = 1  # since there is a process for each core
            self._limit = NO_LIMIT  # steps of an episode, where it is applied here
            if family in PLAIN_LIMITS:
                self._limit = envpool.make_spec(flags.env).config.max_episode_steps
                options["max_episode_steps"] = min(self._limit + 1, NO_LIMIT)
            self._make = functools.partial(envpool.make_gymnasium, flags.env, **options)
            self._pool = self._make()
            config = self._pool.spec.config
            if config.max_num_players != 1:
                raise FlagError(f"{flags.env} has {config.max_num_players} players; only 1 works")
            self.observation_space = _correct(self._pool.spec.observation_space)
            self.action_space = _correct(self._pool.spec.action_space, is_action=True)
            self._key = None  # the only part of a Dict that is observed
            if flags.observation_keys:
                self._keep(read_keys(self, flags.observation_keys))
            self._has_mask_in_info = self._observe_mask()
            self.num_actions = count_actions(self.action_space)
            check_mask(self.observation_space, self.action_space)
            frame = empty_observation(self.observation_space, num_envs)
        except Exception as error:
            self._pool = None
            text = str(error) if isinstance(error, (FlagError, EnvError)) else repr(error)
            raise EnvError(f"{name}: cannot create the environments: {text}") from None
        self.game = config.task if family == "atari" else None
        self.stack_size = getattr(config, "stack_num", 0)
        self.frame_skip = getattr(config, "frame_skip", 1)
        self._episodic_life = getattr(config, "episodic_life", False)
        self._action_range = action_range(self.action_space)
        self._rows = Rows(
            num_envs, frame, empty_actions(self.action_space, num_envs), resets_later=True
        )
        self.row = self._rows.row
        self._is_new = True
        # The last row showed an end by a time limit of which EnvPool does not know.
        self._cut = np.zeros(num_envs, bool)
        self._lives = np.zeros(num_envs, np.int32)
        self._num_steps = 0  # used in error messages

    @property
    def spaces(self):
        """Observation space, action space and frame skip as JSON."""
        return spaces_to_json(self.observation_space, self.action_space, self.frame_skip)

    def describe_protocol(self):
        """Return what an evaluation's protocol says of these environments, as a list."""
        parts, config = ["EnvPool"], self._pool.spec.config
        if self.game is not None:
            parts += [f"up to {config.noop_max} idle frames first", f"frame skip {self.frame_skip}"]
            parts.append(f"sticky actions {config.repeat_action_probability:g}")
            parts.append(f"at most {config.max_episode_steps:,} steps a game")
            parts += ["each life an episode"] * self._episodic_life
            parts += ["FIRE pressed to begin an episode"] * config.use_fire_reset
        return parts

    def initial(self):
        """Begin every episode anew and return the very first row."""
        if not self._is_new:
            self._pool = self._make()  # EnvPool takes seeds when it is made, and only then
        self._is_new = False
        self._rows.restart()
        self._cut[:] = False
        with self._errors("reset"):
            observations, info = self._pool.reset()
        self._write_frames(observations, info, np.arange(self.num_envs))
        self._lives = info.get("lives", self._lives)
        return self.row

    def step(self, actions):
        """Take `actions`, like the row's last_action, and return the next row.

        Raises:
          EnvError: an action is outside its space; or EnvPool raised, or returned numbers that are
            not finite.
        """
        self._num_steps += 1
        ended = np.array(self._rows.at_end)
        if (i := find_invalid(actions, self._action_range, ended)) is not None:
            least, largest = self._action_range
            raise self._error(
                i, f"the action is {actions[i]}; it must be from {least} to {largest}"
            )
        rewards = np.zeros(self.num_envs, np.float32)
        terminated, truncated = np.zeros((2, self.num_envs), bool)
        cut, played = np.flatnonzero(self._cut), np.flatnonzero(~self._cut)
        self._cut[:] = False
        if len(cut):
            with self._errors("reset"):
                observations, info = self._pool.reset(cut)
            self._write_frames(observations, info, cut)
        if len(played):
            sent = self._to_actions(actions, ended)
            arguments = (sent[played], played) if len(cut) else (sent,)  # which is faster
            # Where an episode is over, EnvPool resets it now and ignores the action.
            with self._errors("step"):
                observations, rewards[played], terminated[played], truncated[played], info = (
                    self._pool.step(*arguments)
                )
            self._write_frames(observations, info, played)
            self._cut[played] = ~terminated[played] & (info["elapsed_step"] >= self._limit)
            truncated |= self._cut
        game_over, restarted = terminated | truncated, np.zeros(self.num_envs, bool)
        if self.game is not None:
            lives = info["lives"]
            terminated |= info["terminated"] != 0  # which may be in the step of the time limit
            game_over = truncated | terminated & (info["terminated"] != 0)
            if self._episodic_life:
                # As EnvPool does: some games show no lives for a few frames before they end.
                terminated |= ~ended & (0 < lives) & (lives < self._lives)
                # The idle frames after a lost life may end the game, too.
                restarted = ended & (lives > self._lives)
            self._lives = lives.copy()

        if not np.isfinite(rewards).all():
            i = int(np.isfinite(rewards).argmin())
            raise self._error(i, f"the reward is {rewards[i]}; it must be finite")
        self.row["last_action"][~ended] = actions[~ended]
        columns = (ended, rewards, terminated, truncated, game_over, restarted)
        columns = zip(*(column.tolist() for column in columns), strict=True)
        for i, (is_ended, *outcome, is_restarted) in enumerate(columns):
            if not is_ended:
                self._rows.step(i, *outcome)
                continue
            self._rows.begin(i)
            if is_restarted:
                self._rows.end_game(i)
        return self.row

    def close(self):
        self._pool = None  # its destructor ends the threads; its close() does not

    def _keep(self, keys):
        """Observe only the parts of a Dict that `keys` names; one alone, as itself."""
        parts = {key: self.observation_space[key] for key in keys}
        self._key = keys[0] if len(keys) == 1 and keys[0] != ACTION_MASK else None
        self.observation_space = parts.get(self._key) or gym.spaces.Dict(parts)

    def _observe_mask(self):
        """Observe info["action_mask"], as gym_envs.ObserveMask; return whether there is one."""
        space, mask = self.observation_space, self._pool.spec.state_array_spec.get(MASK_IN_INFO)
        parts = space.spaces if isinstance(space, gym.spaces.Dict) else {"observation": space}
        is_discrete = isinstance(self.action_space, gym.spaces.Discrete)
        if mask is None or not is_discrete or ACTION_MASK in parts:
            return False
        if list(mask.shape) != [self.action_space.n]:
            raise EnvError(f"{MASK_IN_INFO} is {mask}, but the actions are {self.action_space}")
        masks = gym.spaces.MultiBinary(int(self.action_space.n))
        self.observation_space = gym.spaces.Dict({**parts, ACTION_MASK: masks})
        return True

    def _write_frames(self, observations, info, columns):
        part = observations if self._key is None else observations[self._key]
        if self._has_mask_in_info:
            parts = part if isinstance(part, dict) else {"observation": part}
            part = {**parts, ACTION_MASK: info[ACTION_MASK] != 0}
        self._write(self.row["frame"], part, columns)

    def _write(self, target, source, columns):
        if isinstance(target, dict):
            for key, part in target.items():
                self._write(part, source[key], columns)
            return
        if source.dtype.kind == "f" and not (finite := are_finite(source)).all():
            i = int(finite.reshape(len(source), -1).all(axis=1).argmin())
            what = "the observation has numbers that are not finite (as float32)"
            raise self._error(columns[i], what)
        target[columns] = source.reshape(len(columns), *target.shape[1:])

    def _to_actions(self, actions, ended):
        """Return actions as EnvPool takes them, where an action counts."""
        space, (least, _) = self.action_space, self._action_range
        ended = ended.reshape(-1, *[1] * (actions.ndim - 1))
        actions = np.where(ended, least, actions)
        if isinstance(space, gym.spaces.Box):
            return np.clip(actions.astype(space.dtype), space.low, space.high)
        return actions + space.start

    @contextlib.contextmanager
    def _errors(self, call):
        try:
            yield
        except Exception as error:
            raise EnvError(
                f"{self.name}: {self._env_id} in EnvPool, step {self._num_steps}: {call}() raised "
                f"{type(error).__name__}: {error}"
            ) from error

    def _error(self, i, what):
        return EnvError(
            f"{self.name}: environment {i} ({self._env_id}, seed {self.seeds[i]}), step "
            f"{self._num_steps}: {what}"
        )


def _find_family(env_id):
    """Return the part of EnvPool that has an id, such as "atari" or "mujoco.gym".

    Raises:
      FlagError: none has it; the message names near matches.
    """
    from envpool.registration import registry

    if env_id in registry.specs:
        return registry.specs[env_id][0].removeprefix("envpool.")
    ids = {i.lower(): i for i in registry.specs}
    # Without what other packages have around a name: ALE/Pong-v5, PongNoFrameskip-v4.
    name = re.sub("noframeskip|deterministic|-v[0-9]+$", "", env_id.lower().split("/")[-1])
    near = [i for i in ids if i == env_id.lower()]
    near += [i for i in ids if i.startswith(f"{name}-v")]
    near += difflib.get_close_matches(name, ids, 4)
    near = [ids[i] for i in dict.fromkeys(near)][:4]
    raise FlagError(
        f"EnvPool has no environment {env_id!r}; "
        + (f"is it {' or '.join(near)}?" if near else "envpool.list_all_envs() lists all")
    )


def _atari_options(flags):
    """Return EnvPool's options for the flags of atari_wrappers.add_flags.

    Raises:
      FlagError: EnvPool does not have what a flag says.
    """
    if not flags.max_pool:
        raise FlagError("--no_max_pool: EnvPool always takes the maximum of the last two frames")
    for flag in ("noop_max", "frame_skip", "frame_size", "frame_stack"):
        if getattr(flags, flag) < 1:
            raise FlagError(f"--{flag} is {getattr(flags, flag)}; EnvPool needs 1 or more")
    options = {
        "noop_max": flags.noop_max,
        "frame_skip": flags.frame_skip,
        "img_height": flags.frame_size,
        "img_width": flags.frame_size,
        "stack_num": flags.frame_stack,
        "episodic_life": flags.episodic_life,
        "use_fire_reset": flags.fire_reset,
        "gray_scale": flags.grayscale,
        "full_action_space": flags.full_action_space,
        "max_episode_steps": -(-ATARI_FRAMES // flags.frame_skip),
        "reward_clip": False,  # the learner clips rewards
    }
    if flags.sticky_actions is not None:
        atari_games.check_sticky_actions(flags.sticky_actions)
        options["repeat_action_probability"] = flags.sticky_actions
    return options


def _correct(space, is_action=False):
    """Return a space of EnvPool with infinite bounds where it has none.

    EnvPool writes the least positive float for -inf, and a Box of ints for MultiDiscrete actions.
    """
    if isinstance(space, gym.spaces.Dict):
        return gym.spaces.Dict({key: _correct(part) for key, part in space.items()})
    if not isinstance(space, gym.spaces.Box):
        return space
    if space.dtype.kind != "f":
        if is_action and len(space.shape) == 1:
            return gym.spaces.MultiDiscrete(space.high - space.low + 1, start=space.low)
        return space
    largest, least = np.finfo(space.dtype).max, np.finfo(space.dtype).tiny
    low = np.where((space.low == least) | (space.low <= -largest), -np.inf, space.low)
    high = np.where(space.high >= largest, np.inf, space.high)
    return gym.spaces.Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype)
