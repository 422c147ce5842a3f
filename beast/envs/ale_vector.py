# SPDX-License-Identifier: Apache-2.0
"""Turn N games of ale-py's AtariVectorEnv into the rows of a rollout: `--env_backend ale_vector`.

libtorchbeast/rows.py describes a row. These games reset one step later, so that each end of an
episode takes an extra row, `terminated` or `truncated`. docs/environment.md lists how the games
differ from those of atari_wrappers.py.

Two kinds of end are handled here instead of in ale-py. Its `episodic_life` resets the whole
game at each lost life; ours goes on after the extra row, in which FIRE is pressed where the game
waits for it, else nothing. And its time limit stops before the last frame has been read, so that
the observation to bootstrap from would be an old one.
"""

import gymnasium as gym
import numpy as np

from beast.envs import atari_games
from beast.envs.spaces import empty_observation, find_invalid
from beast.errors import EnvError
from libtorchbeast.rows import Rows, draw_seeds
from libtorchbeast.spaces import spaces_to_json

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

    Rows are returned in `row`, whose arrays stay the same and are overwritten by each call.
    """

    def __init__(self, flags, num_envs, seed, name="environments"):
        self.name = name
        self.num_envs = num_envs
        self.seeds = draw_seeds(seed, num_envs)
        self.stack_size, self.frame_skip = flags.frame_stack, flags.frame_skip
        self._env_id = flags.env
        self._episodic_life = flags.episodic_life
        try:
            self._envs, fire, self._max_frames = _make(flags, num_envs)
        except Exception as error:
            raise EnvError(f"{name}: cannot create the environments: {error}") from None
        self._between_lives = int(fire)  # an action: FIRE is 1 in each set that has it, no-op is 0
        self.action_space = self._envs.single_action_space
        self.num_actions = int(self.action_space.n)
        stack, height, width, *colors = self._envs.single_observation_space.shape
        channels = stack * (colors[0] if colors else 1)
        self.observation_space = gym.spaces.Box(0, 255, (channels, height, width), np.uint8)

        self._rows = Rows(
            num_envs, empty_observation(self.observation_space, num_envs), resets_later=True
        )
        self.row = self._rows.row
        # The last row showed the end of a game by the time limit, of which ale-py does not know.
        self._cut = np.zeros(num_envs, bool)
        self._lives = np.zeros(num_envs, np.int32)
        self._num_steps = 0  # used in error messages

    @property
    def spaces(self):
        """Observation space, action space and frame skip as JSON."""
        return spaces_to_json(self.observation_space, self.action_space, self.frame_skip)

    def initial(self):
        """Begin every game anew and return the very first row."""
        observations, info = self._envs.reset(seed=np.array(self.seeds))
        self._rows.restart()
        self._write_frames(observations)
        self._cut[:] = False
        self._lives = info["lives"].copy()
        return self.row

    def step(self, actions):
        """Take `actions` ([N] ints in 0..num_actions - 1) and return the next row.

        Raises:
          EnvError: an action is out of range.
        """
        ended = np.array(self._rows.at_end)
        self._num_steps += 1
        # Checked here, since ale-py would wait for ever for a game that has refused its action.
        if (i := find_invalid(actions, (0, self.num_actions - 1), ended)) is not None:
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
        self._lives = lives.copy()

        np.copyto(self.row["last_action"], sent, where=~ended)
        self._write_frames(observations)
        columns = zip(
            *(a.tolist() for a in (ended, rewards, terminated, cut, game_over)), strict=True
        )
        for i, (ended, reward, terminated, truncated, game_over) in enumerate(columns):
            if not ended:
                self._rows.step(i, reward, terminated, truncated, game_over)
            elif game_over:  # the game ended between two lives
                self._rows.end_again(i, terminated, truncated)
            else:
                self._rows.begin(i)
        return self.row

    def close(self):
        self._envs = None  # its destructor ends the threads; its close() does not

    def _write_frames(self, observations):
        if observations.ndim == 5:  # [N, stack, height, width, 3]
            observations = observations.transpose(0, 1, 4, 2, 3)
        self.row["frame"].reshape(observations.shape)[:] = observations


def _make(flags, num_envs):
    """Return an AtariVectorEnv, whether its game waits for FIRE, and its limit in frames."""
    import ale_py  # imported here, so that other environments do not need it
    from ale_py import roms
    from ale_py.vector_env import AtariVectorEnv

    for flag, least in (("noop_max", 0), ("frame_skip", 1), ("frame_size", 0), ("frame_stack", 1)):
        if getattr(flags, flag) < least:
            raise ValueError(f"--{flag} is {getattr(flags, flag)}; it should be {least} or more")
    atari_games.check_keys(flags)
    spec = atari_games.find_spec(flags.env)
    unknown = sorted(spec.kwargs.keys() - _KNOWN)
    if unknown:
        raise ValueError(
            f"{flags.env} is registered with {', '.join(unknown)}, which --env_backend ale_vector "
            "cannot do: use --env_backend gym"
        )
    sticky_actions = flags.sticky_actions
    if sticky_actions is None:
        sticky_actions = spec.kwargs.get("repeat_action_probability", 0.25)  # AtariEnv's default
    atari_games.check_sticky_actions(sticky_actions)

    # A game of its own says what AtariVectorEnv does not: the screen's size, and the actions used.
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.loadROM(roms.get_rom_path(spec.kwargs["game"]))
    fire = flags.fire_reset and atari_games.waits_for_fire(ale)
    height, width = ale.getScreenDims()
    envs = AtariVectorEnv(
        spec.kwargs["game"],
        num_envs,
        num_threads=1,  # since there is a process for each core
        max_num_frames_per_episode=NO_LIMIT,
        repeat_action_probability=sticky_actions,
        full_action_space=flags.full_action_space or spec.kwargs.get("full_action_space", False),
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
        reward_clipping=False,  # the learner clips rewards
        use_fire_reset=fire,
    )
    return envs, fire, spec.kwargs.get("max_num_frames_per_episode") or NO_LIMIT
