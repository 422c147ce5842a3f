# SPDX-License-Identifier: Apache-2.0
"""Turn N games of ale-py's AtariVectorEnv into the rows of a rollout: `--env_backend ale_vector`.

What a row holds stands in environment.py. These games reset one step later, so that each end of an
episode takes an extra row with its last observation, `terminated` or `truncated`, whose action is
ignored; the next row has reward 0 and `done`. docs/ale_vector.md lists how the games differ from
those of atari_wrappers.py.

Two kinds of end are found here, as ale-py's own would not do. Its `episodic_life` resets the whole
game at each lost life; ours goes on after the extra row, in which FIRE is pressed where the game
waits for it, else nothing. And its time limit stops before the last frame has been read, so that
the observation to bootstrap from would be an old one.
"""

import json

import gymnasium as gym
import numpy as np

import atari_wrappers
import packages
from environment import EnvError, empty_observation, space_to_dict

NO_LIMIT = 2**30  # emulator frames a game
# What a registered id may say. Its frame skip, colors and screen give way to the flags.
_KNOWN = {"game", "repeat_action_probability", "max_num_frames_per_episode"}
_KNOWN |= {"full_action_space", "frameskip", "obs_type", "render_mode"}


class AtariEnvironments:
    """N games of `flags.env`, stepped as one batch in ale-py; to be used as an Environments.

    Args:
      flags: those of atari_wrappers.add_flags, and env.
      num_envs: N.
      seed: an int or a sequence of ints, from which each game draws a seed of its own.
      name: put in front of error messages.
      num_threads: that step the games. One, since there is a process a core.

    Rows are returned in `row`, whose arrays stay the same and are overwritten by each call.
    """

    def __init__(self, flags, num_envs, seed, name="environments", num_threads=1):
        self.name = name
        self.num_envs = num_envs
        self.seeds = [int(s) for s in np.random.SeedSequence(seed).generate_state(num_envs) // 2]
        self.stack_size = flags.frame_stack
        self._env_id = flags.env
        self._episodic_life = flags.episodic_life
        try:
            self._envs, fire, self._max_frames = _make(flags, num_envs, num_threads)
        except Exception as error:
            raise EnvError(
                f"{name}: cannot create the environments: {error}{packages.advice(error)}"
            ) from error
        self._between_lives = int(fire)  # an action: FIRE is 1 in each set that has it, no-op is 0
        self._action_space = self._envs.single_action_space
        self.num_actions = int(self._action_space.n)
        stack, height, width, *colors = self._envs.single_observation_space.shape
        channels = stack * (colors[0] if colors else 1)
        self.observation_space = gym.spaces.Box(0, 255, (channels, height, width), np.uint8)

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
            "last_action": np.zeros(num_envs, np.int64),
        }
        # In double precision, in which sums of rewards stay exact for long.
        self._totals = {
            f"{what}_{total}": np.zeros(num_envs)
            for what in ("episode", "game")
            for total in ("return", "step")
        }
        # What the last row showed: the end of an episode, that of a game, and that of a game by the
        # time limit, of which ale-py does not know.
        self._ended = np.zeros(num_envs, bool)
        self._game_over = np.zeros(num_envs, bool)
        self._cut = np.zeros(num_envs, bool)
        self._lives = np.zeros(num_envs, np.int32)
        self._num_steps = 0  # for error messages

    @property
    def spaces(self):
        """Observation and action space as JSON."""
        spaces = {"observation": self.observation_space, "action": self._action_space}
        return json.dumps({k: space_to_dict(s) for k, s in spaces.items()}, sort_keys=True)

    def initial(self):
        """Begin every game anew and return the very first row."""
        observations, info = self._envs.reset(seed=np.array(self.seeds))
        for key, array in self.row.items():
            if key != "frame":
                array[:] = key in ("done", "game_done")
        for total in self._totals.values():
            total[:] = 0
        self._write_frames(observations)
        self._ended[:] = self._game_over[:] = self._cut[:] = False
        self._lives = info["lives"].copy()
        return self.row

    def step(self, actions):
        """Take `actions` ([N] ints in 0..num_actions - 1) and return the next row.

        Raises:
          EnvError: an action is out of range.
        """
        row, ended = self.row, self._ended
        self._num_steps += 1
        # Checked here, since ale-py would wait for ever for a game that has refused its action.
        invalid = ~ended & ((actions < 0) | (actions >= self.num_actions))
        if invalid.any():
            i = int(invalid.argmax())
            raise EnvError(
                f"{self.name}: environment {i} ({self._env_id}, seed {self.seeds[i]}), step "
                f"{self._num_steps}: the action is {actions[i]}; it must be from 0 to "
                f"{self.num_actions - 1}"
            )
        # Where a game is over, ale-py resets it now and ignores the action.
        sent = np.where(ended, self._between_lives, actions).astype(np.int64)
        observations, rewards, terminated, _, info = self._envs.step(sent)
        if self._cut.any():
            terminated = terminated & ~self._cut
            observations, info = self._envs.reset(options={"reset_mask": self._cut})
        lives, cut = info["lives"], info["episode_frame_number"] >= self._max_frames
        game_over = terminated | cut
        self._cut = cut & ~terminated
        if self._episodic_life:
            # Some games show no lives for a few frames before they end; that end counts.
            terminated = terminated | (~ended & (0 < lives) & (lives < self._lives))
        begins = ended & ~game_over  # a game that ends between two lives takes one more row

        row["reward"][:] = np.where(ended, 0, rewards)
        row["last_action"][:] = np.where(ended, row["last_action"], sent)
        row["terminated"][:] = terminated
        row["truncated"][:] = cut & ~terminated  # an end of both kinds is a termination
        row["done"][:] = begins
        row["game_done"][:] = game_begins = begins & self._game_over
        for key, total in self._totals.items():
            total += row["reward"] if key.endswith("return") else ~ended
            row[key][:] = total
            total[begins if key.startswith("episode") else game_begins] = 0
        self._write_frames(observations)

        self._ended = terminated | cut
        self._game_over = game_over
        self._lives = lives.copy()
        return row

    def close(self):
        self._envs = None  # its destructor ends the threads; its close() does not

    def _write_frames(self, observations):
        if observations.ndim == 5:  # [N, stack, height, width, 3]
            observations = observations.transpose(0, 1, 4, 2, 3)
        self.row["frame"].reshape(observations.shape)[:] = observations


def _make(flags, num_envs, num_threads):
    """Return an AtariVectorEnv, whether its game waits for FIRE, and its limit in frames."""
    import ale_py  # here, so that environments other than Atari's do without it
    from ale_py import roms
    from ale_py.vector_env import AtariVectorEnv

    for flag, least in (("noop_max", 0), ("frame_skip", 1), ("frame_size", 0), ("frame_stack", 1)):
        if getattr(flags, flag) < least:
            raise ValueError(f"--{flag} is {getattr(flags, flag)}; it should be {least} or more")
    spec = atari_wrappers.game_spec(flags.env)
    unknown = sorted(spec.kwargs.keys() - _KNOWN)
    unknown += ["max_episode_steps"] if spec.max_episode_steps is not None else []
    unknown += ["additional_wrappers"] if spec.additional_wrappers else []
    if unknown:
        raise ValueError(
            f"{flags.env} is registered with {', '.join(unknown)}, which --env_backend ale_vector "
            "cannot do: use --env_backend gym"
        )
    sticky_actions = flags.sticky_actions
    if sticky_actions is None:
        sticky_actions = spec.kwargs.get("repeat_action_probability", 0.25)  # AtariEnv's default
    atari_wrappers.check_sticky_actions(sticky_actions)

    # A game of its own tells what AtariVectorEnv does not: the screen's size, and the actions used.
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.loadROM(roms.get_rom_path(spec.kwargs["game"]))
    fire = flags.fire_reset and atari_wrappers.waits_for_fire(ale)
    height, width = ale.getScreenDims()
    envs = AtariVectorEnv(
        spec.kwargs["game"],
        num_envs,
        num_threads=num_threads,
        max_num_frames_per_episode=NO_LIMIT,
        repeat_action_probability=sticky_actions,
        full_action_space=flags.full_action_space,
        autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP,
        img_height=flags.frame_size or height,
        img_width=flags.frame_size or width,
        grayscale=flags.grayscale,
        stack_num=flags.frame_stack,
        frameskip=flags.frame_skip,
        maxpool=flags.max_pool,
        noop_max=flags.noop_max,
        episodic_life=False,
        life_loss_info=False,
        reward_clipping=False,  # the agent does that
        use_fire_reset=fire,
    )
    return envs, fire, spec.kwargs.get("max_num_frames_per_episode") or NO_LIMIT
