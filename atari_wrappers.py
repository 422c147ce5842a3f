# SPDX-License-Identifier: Apache-2.0
"""The classic preprocessing of Atari games, for Gymnasium 1.x and ale-py.

    env = wrap_pytorch(wrap_deepmind(make_atari("PongNoFrameskip-v4")))  # uint8 [4, 84, 84]

    make_atari      the game, one emulator frame at a time
                      NoopReset     1..noop_max idle frames after a reset
                      FrameSkip     one action for several frames; maximum of the last two
    wrap_deepmind     EpisodicLife  a lost life ends the episode, but not the game
                      FireReset     presses FIRE where a game waits for it
                      ResizeFrame   84 x 84, by area
                      FrameStack    the last four frames                      [84, 84, 4]
    wrap_pytorch    channels first                                            [4, 84, 84]

Rewards are raw sums over the skipped frames; the agent clips them. No frame is read from the
emulator unless an observation is made of it. Every observation is an array of its own: later
steps do not change it, and changing it does not change later ones.
"""

import operator

import gymnasium as gym
import numpy as np

from beast.envs import atari_games
from beast.errors import FlagError


def add_flags(parser):
    """Add the flags that `create_atari` reads."""
    group = parser.add_argument_group("atari", "preprocessing of ale-py's games")

    def number(name, default, text):
        group.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)

    def switch(name, dest, text):
        group.add_argument(f"--{name}", action="store_false", dest=dest, help=text)

    number("noop_max", 30, "Begin each game with 1 to N idle frames; 0: none.")
    number("frame_skip", 4, "Frames for which an action is repeated.")
    number("frame_size", 84, "Resize frames to N x N pixels; 0: do not resize.")
    number("frame_stack", 4, "Frames in an observation.")
    switch("no_max_pool", "max_pool", "Observe the last frame, not the maximum of the last two.")
    switch("no_episodic_life", "episodic_life", "End episodes with the game, not with each life.")
    switch("no_fire_reset", "fire_reset", "Leave it to the agent to press FIRE to begin.")
    switch("color", "grayscale", "Observe three channels a frame instead of one.")
    text = "Probability of repeating the previous action. Default: by the id, "
    text += "0 for -v4, 0.25 for -v0 and ALE/*-v5."
    group.add_argument("--sticky_actions", type=float, metavar="P", help=text)
    text = "Use all 18 actions, not only those that the game needs."
    group.add_argument("--full_action_space", action="store_true", help=text)


def create_atari(flags, render_mode=None):
    """Make `flags.env` as the flags say; observations are uint8 [frame_stack, 84, 84]."""
    atari_games.check_keys(flags)
    names = ("noop_max", "frame_skip", "max_pool", "grayscale", "sticky_actions")
    options = {name: getattr(flags, name) for name in (*names, "full_action_space")}
    env = make_atari(flags.env, render_mode=render_mode, **options)
    env = wrap_deepmind(
        env, flags.episodic_life, flags.fire_reset, flags.frame_size, flags.frame_stack
    )
    return wrap_pytorch(env)


def make_atari(
    env_id,
    noop_max=30,
    frame_skip=4,
    max_pool=True,
    grayscale=True,
    sticky_actions=None,
    full_action_space=False,
    max_episode_frames=None,
    render_mode=None,
):
    """Make a game of ale-py with idle frames at its start and our own frame skip.

    Where `sticky_actions` or `max_episode_frames` is None, the id's own value holds. A frame skip
    that belongs to the id is replaced by `frame_skip`.
    """
    import ale_py

    if sticky_actions is not None:
        atari_games.check_sticky_actions(sticky_actions)
    spec = atari_games.find_spec(env_id)
    full_action_space = full_action_space or spec.kwargs.get("full_action_space", False)
    options = {"full_action_space": full_action_space, "render_mode": render_mode}
    if sticky_actions is not None:
        options["repeat_action_probability"] = sticky_actions
    if max_episode_frames is not None:
        options["max_num_frames_per_episode"] = max_episode_frames
    # Else every emulator of every actor prints its banner.
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    obs_type = "grayscale" if grayscale else "rgb"
    env = gym.make(spec, obs_type=obs_type, frameskip=1, disable_env_checker=True, **options)
    if noop_max:
        env = NoopReset(env, noop_max)
    return FrameSkip(env, frame_skip, max_pool)


def wrap_deepmind(env, episode_life=True, fire_reset=True, frame_size=84, frame_stack=4):
    """Wrap what `make_atari` returned; observations are uint8 [height, width, channels].

    Colors are stacked frame by frame: red, green and blue of the oldest frame come first.
    """
    if episode_life:
        env = EpisodicLife(env)
    if fire_reset and atari_games.waits_for_fire(env.unwrapped.ale):
        env = FireReset(env)
    if frame_size:
        env = ResizeFrame(env, frame_size)
    return FrameStack(env, frame_stack)


def wrap_pytorch(env):
    """Put channels first: [height, width, channels] or [height, width] to [channels, ...]."""
    height, width, *channels = env.observation_space.shape
    space = _image_space(*(channels or [1]), height, width)

    def channels_first(frame):
        frame = frame[:, :, None] if frame.ndim == 2 else frame
        return np.ascontiguousarray(frame.transpose(2, 0, 1))  # no copy after `wrap_deepmind`

    return gym.wrappers.TransformObservation(env, channels_first, space)


def _reader(env):
    """Return the emulator's method that reads its screen into an array."""
    gray = len(env.observation_space.shape) == 2
    return env.unwrapped.ale.getScreenGrayscale if gray else env.unwrapped.ale.getScreenRGB


def _image_space(*shape):
    return gym.spaces.Box(0, 255, shape, np.uint8)


class NoopReset(gym.Wrapper):
    """Begin each game with a random number of idle frames, 1 to `noop_max`."""

    def __init__(self, env, noop_max):
        super().__init__(env)
        if noop_max < 1:
            raise FlagError(f"noop_max should be 0 (no idle frames) or more, not {noop_max}")
        self.noop_max = noop_max
        self._read = _reader(env)

    def reset(self, *, seed=None, options=None):
        _, info = self.env.reset(seed=seed, options=options)
        game = self.unwrapped
        noop = game.ale.getLegalActionSet()[0]
        for _ in range(int(game.np_random.integers(1, self.noop_max + 1))):
            game.ale.act(noop)
            if game.ale.game_over():
                game.ale.reset_game()
        frame = np.empty(self.observation_space.shape, np.uint8)
        self._read(frame)
        return frame, info | _game_info(game.ale)


def _game_info(ale):
    return {
        "lives": ale.lives(),
        "episode_frame_number": ale.getEpisodeFrameNumber(),
        "frame_number": ale.getFrameNumber(),
    }


class FrameSkip(gym.Wrapper):
    """Repeat each action for `skip` frames; observe the maximum of the last two.

    The console draws some sprites in every other frame only, hence the maximum. A game that ends
    within a skip stops there, and its last frame is observed alone: the frame before was not read,
    since to read it each time just in case would be slow. This drives the emulator itself, as
    AtariEnv.step would read every frame.
    """

    def __init__(self, env, skip=4, max_pool=True):
        super().__init__(env)
        if skip < 1:
            raise FlagError(f"frame_skip should be 1 or more, not {skip}")
        self.frame_skip = skip
        self.metadata = env.metadata | {"render_fps": 60 / skip}  # the console's real speed
        self.max_pool = max_pool and skip > 1
        self._read = _reader(env)
        self._ale = env.unwrapped.ale
        self._actions = self._ale.getLegalActionSet()
        if env.action_space.n < len(self._actions):
            self._actions = self._ale.getMinimalActionSet()
        self._before = np.empty(env.observation_space.shape, np.uint8)  # the last frame but one
        self._ready = False

    def reset(self, *, seed=None, options=None):
        result = self.env.reset(seed=seed, options=options)
        self._ready = True
        return result

    def step(self, action):
        if not self._ready:
            raise gym.error.ResetNeeded("call reset() before the first step()")
        try:
            index = operator.index(action)
        except TypeError:
            index = -1
        if not 0 <= index < len(self._actions):
            raise ValueError(
                f"the action is {action!r}, but should be an integer from 0 to "
                f"{len(self._actions) - 1}"
            )
        ale, act, over = self._ale, self._actions[index], False
        reward, last_but_one = 0.0, self.frame_skip - 2 if self.max_pool else -1
        for i in range(self.frame_skip):
            reward += ale.act(act)
            over = ale.game_over()  # of either kind
            if over:
                break
            if i == last_but_one:
                self._read(self._before)
        frame = np.empty_like(self._before)
        self._read(frame)
        if self.max_pool and i == self.frame_skip - 1:
            np.maximum(frame, self._before, out=frame)
        truncated = over and ale.game_truncated()
        terminated = over and ale.game_over(with_truncation=False)
        return frame, reward, terminated, truncated, _game_info(ale)


class EpisodicLife(gym.Wrapper):
    """End the episode at each lost life, while the game goes on.

    `reset()` starts a new game only when the last one is over or when a seed is given; otherwise it
    plays one idle step and drops that step's reward. `info["game_over"]` says at every step
    whether the whole game ended there; `num_games` counts games, so that it shows where one ended
    in a step of `reset`, of ours or of a wrapper around us.
    """

    def __init__(self, env):
        super().__init__(env)
        self.num_games = 0
        self._lives = 0
        self._game_over = True

    def step(self, action):
        frame, reward, terminated, truncated, info = self.env.step(action)
        info["game_over"] = self._game_over = terminated or truncated
        # Some games show no lives for a few frames before they end (Qbert); that end counts.
        terminated = terminated or 0 < info["lives"] < self._lives
        self._lives = info["lives"]
        return frame, reward, terminated, truncated, info

    def reset(self, *, seed=None, options=None):
        if not self._game_over and seed is None:
            frame, _, _, _, info = self.step(0)
        if self._game_over or seed is not None:
            frame, info = self.env.reset(seed=seed, options=options)
            self._game_over = False
            self.num_games += 1
        self._lives = info["lives"]
        return frame, info


class FireReset(gym.Wrapper):
    """Press FIRE after each reset, thus also after a lost life, and then take action 2 once.

    Some games stand still until FIRE is pressed. Action 2 belongs to the classic wrapper, on whose
    games published scores were reached.
    """

    def reset(self, *, seed=None, options=None):
        frame, info = self.env.reset(seed=seed, options=options)
        for action in (1, 2):
            frame, _, terminated, truncated, step_info = self.env.step(action)
            info.update(step_info)
            if terminated or truncated:
                frame, info = self.env.reset(options=options)
        return frame, info


class ResizeFrame(gym.ObservationWrapper):
    """Resize frames to `size` x `size` by area interpolation.

    The result is that of cv2.resize(..., INTER_AREA), which would take a fifth of a step's time.
    But little moves between two frames: only bands of rows that changed are resized again. 210
    rows make 84, so that each band of 5 rows makes 2 that depend on no other row.
    """

    def __init__(self, env, size=84):
        super().__init__(env)
        if size < 1:
            raise FlagError(f"frame_size should be 0 (as it is) or more, not {size}")
        import cv2

        self._resize, self._area = cv2.resize, cv2.INTER_AREA
        height, width, *colors = env.observation_space.shape
        self.observation_space = _image_space(size, size, *colors)
        # Bands need a scale that floating point holds exactly, else their weights would differ in
        # the last bit. Without such a scale the frame is one band.
        bands = int(np.gcd(height, size)) if 2 * height % size == 0 else 1
        self._rows_in, self._rows_out = height // bands, size // bands
        row_bytes = width * int(np.prod(colors))
        word = np.uint64 if self._rows_in * row_bytes % 8 == 0 else np.uint8
        self._as_bands = lambda frame: frame.reshape(bands, -1).view(word)
        self._last = np.zeros(env.observation_space.shape, np.uint8)
        self._resized = np.zeros(self.observation_space.shape, np.uint8)  # of `_last`

    def observation(self, frame):
        # One byte a band; to search bytes for the runs of ones is fast.
        changed = (self._as_bands(frame) != self._as_bands(self._last)).any(axis=1).tobytes()
        begin = changed.find(1)
        while begin >= 0:
            end = changed.find(0, begin) % (len(changed) + 1)  # -1, if all the rest changed
            source = frame[begin * self._rows_in : end * self._rows_in]
            target = self._resized[begin * self._rows_out : end * self._rows_out]
            size = target.shape[1::-1]
            self._resize(source, size, dst=target, interpolation=self._area)
            begin = changed.find(1, end)
        self._last = frame
        return self._resized.copy()


class FrameStack(gym.Wrapper):
    """Observe the last `num_frames` frames as [height, width, channels], the newest one last.

    An episode begins with its first frame repeated. In memory channels come first, so that
    `wrap_pytorch` need not copy.
    """

    def __init__(self, env, num_frames=4):
        super().__init__(env)
        if num_frames < 1:
            raise FlagError(f"frame_stack should be 1 (no stack) or more, not {num_frames}")
        self.stack_size = num_frames
        height, width, *colors = env.observation_space.shape
        self._colors = colors[0] if colors else 1
        self._frames = np.zeros((num_frames * self._colors, height, width), np.uint8)
        self.observation_space = _image_space(height, width, len(self._frames))

    def step(self, action):
        frame, reward, terminated, truncated, info = self.env.step(action)
        self._frames[: -self._colors] = self._frames[self._colors :]
        self._frames[-self._colors :] = frame if frame.ndim == 2 else frame.transpose(2, 0, 1)
        return self._frames.copy().transpose(1, 2, 0), reward, terminated, truncated, info

    def reset(self, *, seed=None, options=None):
        frame, info = self.env.reset(seed=seed, options=options)
        frames = self._frames.reshape(-1, self._colors, *frame.shape[:2])
        frames[:] = frame if frame.ndim == 2 else frame.transpose(2, 0, 1)
        return self._frames.copy().transpose(1, 2, 0), info
