# SPDX-License-Identifier: Apache-2.0
"""The rules of a row: what N environments give to an actor, and how episodes end.

A row is a dict of arrays with leading dimension N, one entry (a column) per environment:

    frame           [N, *obs_shape]  the observation that arrived with this row, or a nest of them
    reward          [N] float32      raw reward of the step that led here
    done            [N] bool         a new episode begins here (also in the very first row)
    truncated       [N] bool         the true last observation of an episode cut by a time limit
    terminated      [N] bool         the last observation of an episode that ended for good; always
                                       false where environments reset in the same step
    episode_return  [N] float32      of the episode so far; where done, of the one that just ended;
                                       the largest float32 where it would be larger
    episode_step    [N] int32        likewise, in agent steps
    game_done       [N] bool         a new game begins here; differs from done where a lost life
    game_return     [N] float32        ends an episode but not the game
    game_step       [N] int32
    last_action     [N] int64        the action that led here; 0 in the very first row. Of a
                                       MultiDiscrete space [N, k] int64, of a Box [N, k] float32

An episode that terminates resets within the step: its last reward comes together with the next
episode's first observation. One that is truncated takes an extra row, so that V-trace can
bootstrap from the observation at which it was cut. The action given in that row is ignored. The
row after it has reward 0 and `done`. Environments that reset one step later take the extra row
after a termination, too.

Imports NumPy alone: forks install this package without gymnasium, MonoBeast needs no gRPC.
"""

import numpy as np

DTYPES = {
    "reward": np.float32,
    "done": np.bool_,
    "truncated": np.bool_,
    "terminated": np.bool_,
    "episode_return": np.float32,
    "episode_step": np.int32,
    "game_done": np.bool_,
    "game_return": np.float32,
    "game_step": np.int32,
    "last_action": np.int64,
}
MAX_FLOAT = float(np.finfo(np.float32).max)
MAX_STEPS = np.iinfo(np.int32).max  # of an episode or a game that a row can have


class Rows:
    """The rows of N environments, written column by column; the caller writes `last_action`.

    Attributes:
      row: the last row, whose arrays stay the same and are overwritten.
      at_end: N bools: the row is the extra one at the end of an episode, so `begin` comes next.

    Args:
      num_envs: N.
      frame: a nest of arrays, which is to be row["frame"]; None: the caller will put one there.
      last_action: an array, which is to be row["last_action"]; None: N int64s.
      resets_later: an extra row follows a termination, too.
    """

    def __init__(self, num_envs, frame=None, last_action=None, resets_later=False):
        self.row = {} if frame is None else {"frame": frame}
        self.row |= {key: np.zeros(num_envs, dtype) for key, dtype in DTYPES.items()}
        if last_action is not None:
            self.row["last_action"] = last_action
        self._resets_later = resets_later
        self.restart()

    def restart(self):
        """Write the very first row."""
        num_envs = len(self.row["done"])
        for key in DTYPES:
            self.row[key][:] = key in ("done", "game_done")
        # Python's floats have double precision, in which sums of rewards stay exact for long.
        self._episode_return, self._game_return = [0.0] * num_envs, [0.0] * num_envs
        self._episode_step, self._game_step = [0] * num_envs, [0] * num_envs
        self._game_over = [False] * num_envs
        self.at_end = [False] * num_envs

    def step(self, i, reward, terminated, truncated, game_over):
        """Write the row to which a step of environment i led.

        Args:
          game_over: of an episode that ended: whether the game did, too.

        Returns:
          Whether the next episode begins in this row: then its frame is the first one of that.
        """
        self._episode_return[i] = _clamp(self._episode_return[i] + reward)
        self._episode_step[i] += 1
        self._game_return[i] = _clamp(self._game_return[i] + reward)
        self._game_step[i] += 1
        self.row["reward"][i] = reward
        return self._write(i, terminated, truncated, game_over)

    def begin(self, i):
        """Write the row after the extra one: the next episode begins."""
        row = self.row
        row["reward"][i] = 0
        row["truncated"][i] = row["terminated"][i] = False
        row["done"][i] = True
        row["game_done"][i] = self._game_over[i]
        self._write_totals(i)
        self._clear_totals(i)
        self.at_end[i] = False

    def end_again(self, i, terminated, truncated):
        """Write one more extra row, since the game ended before the next episode began."""
        self.row["reward"][i] = 0
        self._write(i, terminated, truncated, True)

    def end_game(self, i):
        """End the game, too, in a row in which an episode begins: its reset has ended it."""
        self.row["game_done"][i] = True
        self._game_return[i], self._game_step[i] = 0.0, 0

    def _write(self, i, terminated, truncated, game_over):
        row = self.row
        truncated = truncated and not terminated  # an end of both kinds is a termination
        begins = terminated and not self._resets_later
        row["done"][i] = begins
        row["truncated"][i] = truncated
        if self._resets_later:
            row["terminated"][i] = terminated
        if terminated or truncated:
            self._game_over[i] = game_over
            self.at_end[i] = not begins
        row["game_done"][i] = begins and game_over
        self._write_totals(i)
        if begins:
            self._clear_totals(i)
        return begins

    def _write_totals(self, i):
        self.row["episode_return"][i] = self._episode_return[i]
        self.row["episode_step"][i] = min(self._episode_step[i], MAX_STEPS)
        self.row["game_return"][i] = self._game_return[i]
        self.row["game_step"][i] = min(self._game_step[i], MAX_STEPS)

    def _clear_totals(self, i):
        self._episode_return[i], self._episode_step[i] = 0.0, 0
        if self._game_over[i]:
            self._game_return[i], self._game_step[i] = 0.0, 0


def _clamp(total):
    return max(-MAX_FLOAT, min(MAX_FLOAT, total))


def read_step(reward, terminated, truncated, info):
    """Return the arguments of Rows.step, a float and three bools, from what `step` returned.

    A bool may also be NumPy's, 0 or 1, or an array of one element, as the reward may.

    Raises:
      ValueError: one of them is something else, or the reward is not finite as a float32.
    """
    try:
        number = reward.item() if hasattr(reward, "item") else reward
        if isinstance(number, (str, bytes)):  # which float would read
            raise TypeError("it is no number")
        number = float(number)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"the reward is {reward!r:.100}: {error}") from None
    if not abs(number) <= MAX_FLOAT:
        raise ValueError(f"the reward is {number}; it must be finite, as a float32")
    if not isinstance(info, dict):
        raise ValueError(f"info is the {type(info).__name__} {info!r:.100}; it must be a dict")
    terminated = _read_bool(terminated, "terminated")
    truncated = _read_bool(truncated, "truncated")
    if not terminated and not truncated:
        return number, False, False, False
    game_over = _read_bool(info.get("game_over", True), "info['game_over']")
    return number, terminated, truncated, game_over


def _read_bool(value, name):
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    try:
        number = value.item() if hasattr(value, "item") else value
    except (ValueError, RuntimeError):  # of more than one element
        number = None
    if number not in (0, 1):
        raise ValueError(f"{name} is {value!r:.100}; it must be True or False")
    return bool(number)


def close_all(envs):
    """Close environments, all even if one raises, and then raise its error.

    That is raised here, so that it comes with the error that is being handled, if any.
    """
    errors = []
    for env in envs:
        try:
            if hasattr(env, "close"):
                env.close()
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]


def count_games(env):
    """Return how many games an environment has begun: its, or a wrapper's, `num_games`; else 0."""
    try:
        return env.get_wrapper_attr("num_games")
    except AttributeError:  # none has it; or it is no environment of Gymnasium
        return getattr(env, "num_games", 0)


def draw_seeds(seed, num_envs):
    """Return an int for each environment, drawn from an int or a sequence of ints."""
    return [int(s) for s in np.random.SeedSequence(seed).generate_state(num_envs) // 2]


def write_observation(target, i, observation, source, path="observation"):
    """Write an observation into entry i of a nest of arrays [N, ...].

    Args:
      source: from where the nest's structure, shapes and dtypes come, for error messages.

    Raises:
      ValueError: the observation has others; or it has numbers that are not finite.
    """
    if isinstance(target, dict):
        if not isinstance(observation, dict) or observation.keys() != target.keys():
            raise ValueError(
                f"{path} should be a dict with the keys {list(target)}, {source}, but "
                + _describe_keys(observation, target)
            )
        for key, item in target.items():
            write_observation(item, i, observation[key], source, f"{path}[{key!r}]")
    elif isinstance(target, tuple):
        if not isinstance(observation, (tuple, list)) or len(observation) != len(target):
            raise ValueError(f"{path} should be a tuple of {len(target)}, {source}")
        for k, item in enumerate(target):
            write_observation(item, i, observation[k], source, f"{path}[{k}]")
    else:
        array = np.asarray(observation)
        # A Python number has no dtype of its own.
        if array.shape != target.shape[1:] or not (
            array.dtype == target.dtype
            or array.dtype.newbyteorder("=") == target.dtype
            or (isinstance(observation, int) and array.dtype.kind != "O")  # too large
            or (isinstance(observation, float) and target.dtype.kind == "f")
        ):
            is_like = array.shape == target.shape[1:] and array.dtype.kind in "biuf"
            hint = f": return it with .astype(np.{target.dtype})" if is_like else ""
            raise ValueError(
                f"{path} is {array.dtype}{list(array.shape)}, but should be "
                f"{target.dtype}{list(target.shape[1:])}, {source}{hint}"
            )
        if array.dtype.kind == "f" and not are_finite(array).all():
            raise ValueError(f"{path} has numbers that are not finite (as float32)")
        target[i] = array
        if isinstance(observation, int) and target.dtype.kind in "iu" and target[i] != observation:
            raise ValueError(f"{path} is {observation}, which is no {target.dtype}, {source}")


def are_finite(array):
    """Return which floats of an array are finite, also as float32, in which nets take them."""
    return np.isfinite(array) if array.itemsize <= 4 else abs(array) <= MAX_FLOAT


def _describe_keys(observation, target):
    """Return which keys an observation lacks, and which it has beyond those of a dict."""
    if not isinstance(observation, dict):
        return f"is a {type(observation).__name__}"
    lacks, more = (
        [k for k in a if k not in b] for a, b in ((target, observation), (observation, target))
    )
    differences = [f"lacks {lacks}" if lacks else "", f"has {more} besides" if more else ""]
    return " and ".join(filter(None, differences))
