# SPDX-License-Identifier: Apache-2.0
"""What environment.py promises about the rows of a rollout."""

import json

import gymnasium as gym
import numpy as np
import pytest
from catch import Catch, Counter, Failing

from environment import EnvError, Environments, map_nest, space_from_dict, space_to_dict


def rows_of(environments, num_steps, actions=None):
    """Return copies of the first row and of those after `num_steps` steps."""
    N = len(environments.envs)
    rows = [map_nest(np.copy, environments.initial())]
    for t in range(num_steps):
        action = np.full(N, t % 3) if actions is None else actions[t]
        rows.append(map_nest(np.copy, environments.step(action)))
    return rows


def column(rows, key, i=0):
    return [row[key][i].tolist() for row in rows]


def test_first_row_begins_an_episode():
    (row,) = rows_of(Environments(Counter, 2, 0), 0)
    assert row["done"].all() and row["game_done"].all()
    for key in ("reward", "truncated", "terminated", "episode_return", "last_action"):
        assert not row[key].any(), key


def test_terminated_episode_resets_in_the_same_row():
    rows = rows_of(Environments(lambda: Counter(length=3), 1, 0), 7)
    assert column(rows, "frame") == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1]]
    assert column(rows, "reward") == [0, 1, 2, 3, 1, 2, 3, 1]
    assert column(rows, "done") == [True, False, False, True, False, False, True, False]
    assert column(rows, "episode_return") == [0, 1, 3, 6, 1, 3, 6, 1]
    assert column(rows, "episode_step") == [0, 1, 2, 3, 1, 2, 3, 1]
    assert column(rows, "last_action") == [0, 0, 1, 2, 0, 1, 2, 0]
    assert not any(column(rows, "truncated") + column(rows, "terminated"))


def test_truncated_episode_takes_an_extra_row():
    environments = Environments(lambda: Counter(length=3, truncates=True), 1, 0)
    rows = rows_of(environments, 9)
    assert column(rows, "frame")[:6] == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1]]
    assert column(rows, "reward")[:6] == [0, 1, 2, 3, 0, 1]
    assert column(rows, "done")[:6] == [True, False, False, False, True, False]
    assert column(rows, "truncated")[:6] == [False, False, False, True, False, False]
    # Final in the row of the reset, which adds nothing.
    assert column(rows, "episode_return")[:6] == [0, 1, 3, 6, 6, 1]
    assert column(rows, "episode_step")[:6] == [0, 1, 2, 3, 3, 1]
    # The action given in the extra row is not taken; last_action stays the last real one.
    assert environments.envs[0].actions == [0, 1, 2, 1, 2, 0, 2]
    assert column(rows, "last_action")[:6] == [0, 0, 1, 2, 2, 1]


def test_an_end_of_both_kinds_is_a_termination():
    class Both(Counter):
        def step(self, action):
            observation, reward, terminated, truncated, info = super().step(action)
            return observation, reward, terminated or truncated, terminated or truncated, info

    rows = rows_of(Environments(lambda: Both(length=2), 1, 0), 4)
    assert column(rows, "done") == [True, False, True, False, True]
    assert not any(column(rows, "truncated"))


def test_episode_returns_stay_exact_over_a_million_small_rewards():
    class Small(Counter):
        def step(self, action):
            return (*super().step(action)[:1], 0.1, False, False, {})

    environments = Environments(Small, 1, 0)
    environments.initial()
    action = np.zeros(1, np.int64)
    for _ in range(200_000):
        row = environments.step(action)
    assert row["episode_return"][0] == np.float32(20_000)  # float32 sums would be off by hundreds


@pytest.mark.parametrize("truncates", [False, True])
def test_whole_games_are_added_up_over_lives(truncates):
    class Lives(Counter):
        """Three episodes make a game."""

        def step(self, action):
            observation, reward, terminated, truncated, info = super().step(action)
            info["game_over"] = (terminated or truncated) and self.episode % 3 == 2
            return observation, reward, terminated, truncated, info

    rows = rows_of(Environments(lambda: Lives(length=2, truncates=truncates), 1, 0), 19)
    done = [row for row in rows[1:] if row["done"][0]]
    assert [row["episode_return"][0] for row in done] == [3] * len(done)
    assert column(done, "game_done")[:6] == [False, False, True, False, False, True]
    assert column(done, "game_return")[:6] == [3, 6, 9, 3, 6, 9]
    assert column(done, "game_step")[:6] == [2, 4, 6, 2, 4, 6]
    assert not any(row["game_done"][0] for row in rows[1:] if not row["done"][0])


def test_environments_are_independent_columns():
    lengths = iter([2, 3, 5])
    rows = rows_of(Environments(lambda: Counter(length=next(lengths)), 3, 0), 30)
    for i, length in enumerate((2, 3, 5)):
        assert [t for t, d in enumerate(column(rows, "done", i)) if d] == list(range(0, 31, length))


def test_nested_observations_and_scalars():
    class Nested(Counter):
        def __init__(self):
            super().__init__(length=2)
            inner = self.observation_space
            self.observation_space = gym.spaces.Dict(
                count=inner, pair=gym.spaces.Tuple((gym.spaces.Discrete(9), inner))
            )

        def _observation(self):
            inner = np.array([self.episode, self.step_count], np.float32)
            return {"count": inner, "pair": (self.step_count, inner)}

    rows = rows_of(Environments(Nested, 2, 0), 3)
    assert rows[1]["frame"]["count"].shape == (2, 2)
    assert [row["frame"]["pair"][0].tolist() for row in rows] == [[0, 0], [1, 1], [0, 0], [1, 1]]
    assert rows[0]["frame"]["pair"][0].dtype == np.int64


def test_discrete_actions_may_start_elsewhere():
    class Shifted(Counter):
        def __init__(self):
            super().__init__()
            self.action_space = gym.spaces.Discrete(3, start=-1)

    environments = Environments(Shifted, 1, 0)
    rows_of(environments, 3)
    assert environments.envs[0].actions == [-1, 0, 1]
    assert environments.row["last_action"][0] == 2


def test_seeds_reach_every_environment_and_differ():
    def balls(seed):
        rows = rows_of(Environments(lambda: Catch(columns=100), 8, seed), 40)
        return np.stack([row["frame"] for row in rows])

    first = balls([7, 1])
    np.testing.assert_array_equal(first, balls([7, 1]))
    assert (first != balls([7, 2])).any()
    assert len({first[0, i].tobytes() for i in range(8)}) > 4


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "raised ValueError: the game is broken"),
        ("nan", "the reward is nan"),
        ("shape", r"observation is uint8\[1, 9, 5\], its space says uint8\[1, 10, 5\]"),
        ("dtype", r"observation is float32\[1, 10, 5\], its space says uint8"),
    ],
)
def test_a_broken_environment_is_named_with_its_step(how, message):
    steps = iter([25, 99])
    environments = Environments(lambda: Failing(how, next(steps)), 2, 0, name="actor 3")
    with pytest.raises(EnvError, match=rf"actor 3: environment 0 .*, step 25: .*{message}"):
        rows_of(environments, 30)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_observations_and_rewards_that_are_not_finite_are_refused(value):
    class NotFinite(Counter):
        def _observation(self):
            return np.array([value if self.step_count == 3 else 0, 0], np.float32)

    class TooMuch(Counter):  # for a float32
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, 1e39, *rest

    with pytest.raises(EnvError, match="step 3: .*observation holds numbers that are not finite"):
        rows_of(Environments(NotFinite, 1, 0), 9)
    with pytest.raises(EnvError, match=r"step 1: the reward is 1e\+39; it must be finite"):
        rows_of(Environments(TooMuch, 1, 0), 9)


def test_a_failing_reset_and_a_failing_constructor_are_named():
    class NoReset(Catch):
        def reset(self, **_):
            raise OSError("no such level")

    with pytest.raises(EnvError, match="environment 0 .*, step 0: reset.* OSError: no such level"):
        Environments(NoReset, 1, 0).initial()

    def create():
        raise ImportError("no such game")

    with pytest.raises(EnvError, match="cannot create environment 0: ImportError: no such game"):
        Environments(create, 1, 0)


def test_a_wrong_nest_is_refused():
    class Missing(Catch):
        def __init__(self):
            super().__init__()
            self.observation_space = gym.spaces.Dict(board=self.observation_space)

        def _board(self):
            return {"bord": np.zeros((1, 10, 5), np.uint8)}

    with pytest.raises(EnvError, match=r"should be a dict with the keys \['board'\]"):
        Environments(Missing, 1, 0).initial()


@pytest.mark.parametrize(
    "action_space",
    [gym.spaces.Box(-1, 1, (2, 2)), gym.spaces.Box(0, 9, (2,), np.int64), gym.spaces.Text(5),
     gym.spaces.MultiDiscrete([[2, 3], [4, 5]]), gym.spaces.Tuple([gym.spaces.Discrete(2)])],
)  # fmt: skip
def test_unsupported_action_spaces_are_refused(action_space):
    with pytest.raises(EnvError, match="(?s)test: the action space is .* only Discrete"):
        Environments(lambda: Acting(action_space), 1, 0, "test")


def test_unsupported_and_unlike_spaces_are_refused():
    class Words(Catch):
        def __init__(self):
            super().__init__()
            self.observation_space = gym.spaces.Text(5)

    with pytest.raises(EnvError, match="Text.*wrap the environment"):
        Environments(Words, 1, 0)

    columns = iter([5, 6])
    with pytest.raises(EnvError, match="environment 1 has the spaces"):
        Environments(lambda: Catch(columns=next(columns)), 2, 0)


def test_close_closes_every_environment_also_after_a_failure():
    closed = []

    class Closing(Catch):
        def __init__(self, columns):
            super().__init__(columns=columns)

        def close(self):
            closed.append(self.columns)

    columns = iter([5, 6])
    with pytest.raises(EnvError):
        Environments(lambda: Closing(next(columns)), 2, 0)
    assert closed == [5, 6]


@pytest.mark.parametrize("action", [-1, 3])
def test_action_out_of_range_is_an_error(action):
    environments = Environments(lambda: Counter(length=3), 2, 0)
    environments.initial()
    with pytest.raises(EnvError, match=f"environment 1 .*the action is {action}; .* from 0 to 2"):
        environments.step(np.array([0, action]))


class Acting(Counter):
    """Counter with any action space, which keeps its actions as they come."""

    def __init__(self, action_space, **kwargs):
        super().__init__(**kwargs)
        self.action_space = action_space

    def step(self, action):
        assert self.action_space.contains(action)
        self.taken = [*getattr(self, "taken", []), action]
        return super().step(0)


MULTI_DISCRETE = gym.spaces.MultiDiscrete([2, 3], start=[0, -1])
BOX = gym.spaces.Box(np.array([-1, -np.inf]), np.array([0.1, np.inf]), dtype=np.float64)


@pytest.mark.parametrize(
    ("space", "num_actions", "actions", "taken"),
    [
        (MULTI_DISCRETE, (2, 3), np.array([[0, 2], [1, 0]]), [[0, 1], [1, -1]]),
        (BOX, 2, np.array([[-1, 7], [0, -9]], np.float32), [[-1, 7], [0, -9]]),
    ],
    ids=["multi-discrete", "box"],
)
def test_actions_of_several_parts(space, num_actions, actions, taken):
    environments = Environments(lambda: Acting(space, length=3, truncates=True), 2, 0)
    assert environments.num_actions == num_actions
    dtype = np.float32 if space is BOX else np.int64
    row = environments.initial()
    assert row["last_action"].dtype == dtype and row["last_action"].tolist() == [[0, 0]] * 2
    environments.step(actions)
    assert row["last_action"].tolist() == actions.tolist()
    for env, wanted in zip(environments.envs, taken, strict=True):
        assert env.taken[0].tolist() == wanted and env.taken[0].dtype == space.dtype
        env.taken[0][:] = 0  # it may do with them what it likes
    assert row["last_action"].tolist() == actions.tolist() != np.zeros_like(actions).tolist()
    for _ in range(3):
        environments.step(actions)
    # The one in the extra row is not taken, whatever it is.
    assert row["done"].all() and [len(env.taken) for env in environments.envs] == [3, 3]
    assert row["last_action"].tolist() == actions.tolist()


@pytest.mark.parametrize(
    ("space", "action"),
    [(MULTI_DISCRETE, [0, 3]), (MULTI_DISCRETE, [-1, 0]), (BOX, [0.2, 0.0]), (BOX, [0.0, np.inf]),
     (BOX, [np.nan, 0.0])],
)  # fmt: skip
def test_a_part_of_an_action_out_of_range_is_an_error(space, action):
    environments = Environments(lambda: Acting(space, length=2, truncates=True), 2, 0)
    row = environments.initial()
    good = np.zeros_like(row["last_action"])
    bad = good.copy()
    bad[1] = action
    environments.step(good)
    environments.step(good)
    environments.step(bad)  # where all is ignored
    with pytest.raises(EnvError, match=r"environment 1 .* step 3: the action is \[.*must be from"):
        environments.step(bad)


def test_actions_at_the_bounds_of_a_box_are_within():
    space = gym.spaces.Box(-0.1, 0.1, (1,), np.float64)
    environments = Environments(lambda: gym.wrappers.ClipAction(Acting(space)), 1, 0)
    environments.initial()
    environments.step(np.array([[0.1]], np.float32))  # a little more, as a float64
    environments.step(np.array([[-7]], np.float32))
    assert np.concatenate(environments.envs[0].unwrapped.taken).tolist() == [0.1, -0.1]


@pytest.mark.parametrize(
    ("space", "actions", "message"),
    [(gym.spaces.Discrete(3), np.zeros((2, 1), np.int64), r"int64\[2, 1\].* are int64\[2\]"),
     (gym.spaces.Discrete(3), np.zeros(2), r"float64\[2\].* are int64\[2\]"),
     (BOX, np.zeros(2, np.float32), r"float32\[2\].* are float32\[2, 2\]"),
     (MULTI_DISCRETE, np.zeros((3, 2), np.int64), r"int64\[3, 2\].* are int64\[2, 2\]")],
)  # fmt: skip
def test_actions_of_another_shape_or_kind_are_an_error(space, actions, message):
    environments = Environments(lambda: Acting(space), 2, 0)
    environments.initial()
    with pytest.raises(EnvError, match=message):
        environments.step(actions)


SPACES = {
    "frames": gym.spaces.Box(0, 255, (4, 84, 84), np.uint8),
    "unbounded": gym.spaces.Box(-np.inf, np.inf, (3,)),
    "mixed": gym.spaces.Box(np.array([-0.1, -np.inf]), np.array([np.inf, 0.1]), dtype=np.float64),
    "no dimension": gym.spaces.Box(0, 1, ()),
    "empty": gym.spaces.Box(0, 1, (0, 3)),
    "large": gym.spaces.Box(0, 2**64 - 1, (2,), np.uint64),
    "half": gym.spaces.Box(0, 0.1, (2, 2), np.float16),
    "discrete": gym.spaces.Discrete(5, start=-2, dtype=np.int32),
    "multi-discrete": gym.spaces.MultiDiscrete([[2, 3], [4, 5]], np.int8, start=[[1, 0], [0, 1]]),
    "multi-binary": gym.spaces.MultiBinary([2, 3]),
    "binary": gym.spaces.MultiBinary(4),
    "nested": gym.spaces.Dict(
        {"b": gym.spaces.Discrete(2), "a": gym.spaces.Tuple([gym.spaces.Box(0, 1.1, (2,))])}
    ),
}


@pytest.mark.parametrize("name", SPACES)
def test_spaces_survive_json(name):
    space = SPACES[name]
    text = json.dumps(space_to_dict(space), sort_keys=True)
    assert "[[[" not in text  # bounds that are alike everywhere are one number
    again = space_from_dict(json.loads(text))
    assert again == space and repr(again) == repr(space)
    assert again.dtype == space.dtype and again.shape == space.shape
    if isinstance(space, gym.spaces.Box):  # which is equal to what is nearly the same
        assert again.low.tobytes() == space.low.tobytes()
        assert again.high.tobytes() == space.high.tobytes()
    assert json.dumps(space_to_dict(again), sort_keys=True) == text


def test_spaces_that_cannot_be_sent_are_refused_by_name():
    with pytest.raises(EnvError, match=r"Text\("):
        space_to_dict(gym.spaces.Dict(text=gym.spaces.Text(5)))


def test_environments_tell_their_spaces_as_json():
    environments = Environments(Counter, 2, 0)
    spaces = json.loads(environments.spaces)
    assert space_from_dict(spaces["observation"]) == environments.observation_space
    assert space_from_dict(spaces["action"]) == gym.spaces.Discrete(3)
    assert environments.spaces == Environments(Counter, 3, 1).spaces
    assert environments.spaces != Environments(lambda: Counter(dtype=np.int32), 2, 0).spaces


def test_environments_tell_how_many_frames_are_stacked():
    assert Environments(Catch, 1, 0).stack_size == 0

    def stacked():
        env = gym.wrappers.FrameStackObservation(Catch(), 3)
        return gym.wrappers.TimeLimit(env, 10)

    assert Environments(stacked, 1, 0).stack_size == 3
