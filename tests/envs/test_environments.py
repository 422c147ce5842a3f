# SPDX-License-Identifier: Apache-2.0
"""The rows of Gymnasium environments, stepped one after the other: beast/envs/environments.py."""

import functools
import logging
import multiprocessing
import re
import traceback
import types

import gymnasium as gym
import numpy as np
import pytest
from catch_env import Catch, Counter

from beast.envs.environments import Environments, sample_environment, try_out
from beast.errors import EnvError, FlagError, format_cause
from beast.nest import map_nest
from libtorchbeast.rows import MAX_FLOAT, MAX_STEPS, Rows, draw_seeds, write_observation

DISCRETE = gym.spaces.Discrete(3, start=-1)
MULTI_DISCRETE = gym.spaces.MultiDiscrete([2, 3], start=[0, -1])
BOX = gym.spaces.Box(np.array([-1, -np.inf]), np.array([0.5, np.inf]), dtype=np.float64)


class Acting(Counter):
    """Counter with any action space, which keeps its actions as they come."""

    def __init__(self, action_space, **kwargs):
        super().__init__(**kwargs)
        self.action_space = action_space
        self.taken = []

    def step(self, action):
        assert self.action_space.contains(action)
        self.taken.append(action)
        return super().step(0)


class Changed(Counter):
    """Counter that changes what `step` returns, in all steps or in one."""

    def __init__(self, change, at_step=None, **kwargs):
        super().__init__(**kwargs)
        self.change, self.at_step = change, at_step

    def step(self, action):
        result = super().step(action)
        return self.change(*result) if self.at_step in (None, len(self.actions)) else result


def test_a_create_env_that_leaves_no_keys_out_is_told(caplog):
    def warnings(asked, **parts):
        space = gym.spaces.Dict(parts)
        env = gym.wrappers.TransformObservation(Counter(), lambda _: space.sample(), space)
        caplog.clear()
        flags = types.SimpleNamespace(observation_keys=asked)
        try_out(Environments(lambda: env, 1, 0), flags)
        return caplog.text

    board, speed, mask = gym.spaces.Discrete(3), gym.spaces.Discrete(2), gym.spaces.MultiBinary(3)
    text = warnings("board, speed", board=board, speed=speed, secret=board)
    assert "--observation_keys is board, speed, but observations have secret as well" in text
    assert warnings("board,speed", board=board, speed=speed, action_mask=mask) == ""
    assert warnings("camera", board=board, speed=speed) == ""  # a part of its own, of two parts
    assert warnings(None, board=board, speed=speed) == ""


def rows_of(environments, num_steps):
    """Return copies of the first row and of those after `num_steps` steps."""
    rows = [map_nest(np.copy, environments.initial())]
    for t in range(num_steps):
        action = np.full(environments.num_envs, t % 3)
        rows.append(map_nest(np.copy, environments.step(action)))
    return rows


def column(rows, key, i=0):
    return [row[key][i].tolist() for row in rows]


@pytest.mark.parametrize("value", [300, -1])
def test_an_integer_that_its_dtype_does_not_have_is_refused(value):
    target = np.zeros(1, np.uint8)
    write_observation(target, 0, 255, "as at first")
    with pytest.raises(ValueError, match=rf"observation is {value}, which is no uint8, as at"):
        write_observation(target, 0, value, "as at first")


def test_more_steps_than_a_row_can_hold_are_no_error():
    rows = Rows(1)
    rows._episode_step, rows._game_step = [MAX_STEPS], [MAX_STEPS]
    rows.step(0, 1.0, False, False, False)
    assert rows.row["episode_step"] == rows.row["game_step"] == 2**31 - 1


def test_sums_of_the_largest_rewards_are_finite():
    for reward in (MAX_FLOAT, -MAX_FLOAT):
        rows = Rows(1)
        for _ in range(3):
            rows.step(0, reward, False, False, False)
            assert rows.row["episode_return"] == rows.row["game_return"] == np.float32(reward)
        rows.step(0, -reward, True, False, True)
        assert rows.row["game_return"] == rows.row["episode_return"] == 0


def test_terminated_episode_resets_in_the_same_row():
    rows = rows_of(Environments(lambda: Counter(length=3), 2, 0), 7)
    assert column(rows, "frame") == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1]]
    assert column(rows, "reward") == [0, 1, 2, 3, 1, 2, 3, 1]
    assert column(rows, "done") == [True, False, False, True, False, False, True, False]
    assert column(rows, "game_done") == column(rows, "done", 1) == column(rows, "done")
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


def test_initial_begins_all_anew():
    environments = Environments(lambda: Counter(length=3, truncates=True), 1, 0)
    for num_steps in (2, 3, 1):
        row = rows_of(environments, num_steps)[0]
        assert row["done"].all() and row["game_done"].all()
        for key in ("reward", "truncated", "episode_return", "game_step", "last_action"):
            assert not row[key].any(), key
        assert environments.envs[0].step_count == num_steps  # also after an extra row


def test_an_end_of_both_kinds_is_a_termination():
    def end_both(observation, reward, terminated, truncated, info):
        return observation, reward, terminated, terminated, info

    rows = rows_of(Environments(lambda: Changed(end_both, length=2), 1, 0), 4)
    assert column(rows, "done") == [True, False, True, False, True]
    assert not any(column(rows, "truncated"))


def test_episode_returns_stay_exact_over_many_small_rewards():
    small = lambda observation, *_: (observation, 0.1, False, False, {})  # noqa: E731
    environments = Environments(lambda: Changed(small), 1, 0)
    environments.initial()
    action = np.zeros(1, np.int64)
    for _ in range(20_000):
        row = environments.step(action)
    assert row["episode_return"][0] == np.float32(2000)  # a sum of float32s would be 0.3 off


@pytest.mark.parametrize("truncates", [False, True])
def test_whole_games_are_added_up_over_lives(truncates):
    def three_lives(observation, reward, terminated, truncated, info):
        info["game_over"] = (terminated or truncated) and observation[0] % 3 == 2
        return observation, reward, terminated, truncated, info

    environments = Environments(lambda: Changed(three_lives, length=2, truncates=truncates), 1, 0)
    rows = rows_of(environments, 19)
    done = [row for row in rows[1:] if row["done"][0]]
    assert [row["episode_return"][0] for row in done] == [3] * len(done)
    assert column(done, "game_done")[:6] == [False, False, True, False, False, True]
    assert column(done, "game_return")[:6] == [3, 6, 9, 3, 6, 9]
    assert column(done, "game_step")[:6] == [2, 4, 6, 2, 4, 6]
    assert not any(row["game_done"][0] for row in rows[1:] if not row["done"][0])


@pytest.mark.parametrize("counts", [False, True])
def test_a_game_over_of_another_meaning_is_told_once(caplog, counts):
    caplog.set_level(logging.INFO)

    def over(observation, reward, terminated, truncated, info):
        return observation, reward, terminated, truncated, info | {"game_over": False}

    def create():
        env = Changed(over, length=2)
        if counts:
            env.num_games = 1
        return env

    try_out(Environments(create, 2, 0))
    assert caplog.text.count("info['game_over'] is False at the end") == (not counts)


@pytest.mark.parametrize("dtype", ["<f8", ">f8"])
def test_a_float64_beyond_float32_is_refused(dtype):
    def large(observation, *rest):
        return (observation.astype(float) * 1e39).astype(dtype), *rest

    def create():
        env = Changed(large)
        env.observation_space = gym.spaces.Box(-1e300, 1e300, (2,), np.float64)
        return env

    with pytest.raises(EnvError, match=r"not finite \(as float32\)"):
        try_out(Environments(create, 1, 0))


def test_a_game_that_ends_between_two_episodes_adds_nothing():
    rows = Rows(1, resets_later=True)
    rows.step(0, 1.0, terminated=True, truncated=False, game_over=False)
    rows.end_again(0, terminated=True, truncated=False)
    assert rows.row["reward"] == 0 and rows.row["terminated"] and not rows.row["done"]
    rows.begin(0)
    assert rows.row["done"] and rows.row["game_done"] and rows.row["game_return"] == 1


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


def test_seeds_reach_every_environment_and_differ():
    def balls(seed):
        rows = rows_of(Environments(lambda: Catch(columns=100), 8, seed), 40)
        return np.stack([row["frame"] for row in rows])

    first = balls([7, 1])
    np.testing.assert_array_equal(first, balls([7, 1]))
    assert (first != balls([7, 2])).any()
    assert len({first[0, i].tobytes() for i in range(8)}) > 4
    assert (first[0] != first[9]).any()  # the next games are others
    assert max(draw_seeds(1, 100)) < 2**31  # for simulators that keep an int32


def test_environments_describe_themselves():
    def create_env():
        env = gym.wrappers.FrameStackObservation(Catch(), 3)
        env.frame_skip = 2
        return gym.wrappers.TimeLimit(env, 10)

    plain, wrapped = Environments(Catch, 1, 0), Environments(create_env, 1, 0)
    assert (plain.stack_size, plain.frame_skip) == (0, 1)
    assert (wrapped.stack_size, wrapped.frame_skip) == (3, 2)
    plain.envs[0].stack_size, plain.envs[0].frame_skip = "large", (2, 5)  # of another meaning
    assert (plain.stack_size, plain.frame_skip) == (0, 1)
    assert plain.spaces == Environments(Catch, 3, 1).spaces != wrapped.spaces


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda *values: {}["key"], "raised KeyError: 'key'"),
     (lambda *values: [(a, b, c, d, e) for a, b, c, d, e in [values[:4]]],  # as a wrapper does
      "expected 5, got 4.*is it of the old Gym API"),
     (lambda o, r, terminated, truncated, info: (o, r, terminated, info),
      "the old Gym API: return terminated and truncated"),
     (lambda o, *rest: o, "step.. returned ndarray; it should return observation, reward, "),
     (lambda *values: values[:3], "step.. returned 3 values; it should return observation, "),
     (lambda o, r, *rest: (o, "1", *rest), "the reward is '1': it is no number"),
     (lambda o, r, *rest: (o, np.array("1"), *rest), "the reward is array.*: it is no number"),
     (lambda o, r, *rest: (o, np.ones(2), *rest), r"the reward is array\(\[1., 1.\]\): can only"),
     (lambda o, r, *rest: (o, np.nan, *rest), r"the reward is nan"),
     (lambda o, r, *rest: (o, 1e39, *rest), r"the reward is 1e\+39; it must be finite"),
     (lambda o, r, *rest: (o, 10**400, *rest), "the reward is 10000.*: int too large"),
     (lambda o, r, end, *rest: (o, r, None, *rest), "terminated is None; it must be True or False"),
     (lambda o, r, end, *rest: (o, r, "False", *rest), "terminated is 'False'; it must be"),
     (lambda o, r, end, cut, info: (o, r, end, 2, info), "truncated is 2; it must be True or"),
     (lambda o, r, end, cut, info: (o, r, end, np.array([end, cut]), info),
      r"truncated is array\(\[False, False\]\); it must be True or False"),
     (lambda o, r, end, cut, info: (o, r, True, cut, {"game_over": None}),
      r"info\['game_over'\] is None; it must be True or False"),
     (lambda *values: (*values[:4], None), "info is the NoneType None; it must be a dict"),
     (lambda *values: (*values[:4], [{}]), r"info is the list \[\{\}\]; it must be a dict"),
     (lambda o, *rest: (o.astype(int), *rest), "observation is int64.2., but should be float32"),
     (lambda o, *rest: (o.astype(float), *rest),
      r"float64\[2\], but should be float32.*: return it with .astype\(np.float32\)"),
     (lambda o, *rest: (o[1:], *rest),
      r"observation is float32\[1\], but should be float32\[2\], as its space"),
     (lambda o, *rest: (o + np.inf, *rest), "observation has numbers that are not finite"),
     (lambda o, *rest: ({"board": o}, *rest), "observation is object.*but should be float32")],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:invalid value")
def test_trying_out_finds_a_broken_step_and_names_it(change, message):
    steps = iter([99, 5])
    environments = Environments(lambda: Changed(change, next(steps)), 2, 0, "sample")
    where = rf"sample: environment 1 \(.*, seed {environments.seeds[1]}\), step 5: "
    with pytest.raises(EnvError, match=f"{where}.*{message}"):
        try_out(environments)


@pytest.mark.parametrize(
    "change", [np.bool_, int, float, lambda x: np.array(x), lambda x: np.array([x])]
)
def test_an_end_may_be_any_bool_and_a_number_an_array_of_one(change):
    def convert(observation, reward, terminated, truncated, info):
        info = {"game_over": change(terminated or truncated)}
        return observation, np.array([reward]), change(terminated), change(truncated), info

    for kind in ({"length": 3}, {"length": 3, "truncates": True}):
        rows = rows_of(Environments(lambda kind=kind: Changed(convert, **kind), 1, 0), 9)
        plain = rows_of(Environments(lambda kind=kind: Counter(**kind), 1, 0), 9)
        for key in ("reward", "done", "truncated", "episode_return", "game_return"):
            assert column(rows, key) == column(plain, key), key


def test_an_environment_need_not_be_one_of_gymnasium():
    class Duck:
        observation_space, action_space = Counter().observation_space, Counter().action_space
        reset, step = lambda self, seed: ([0, 0], {}), lambda self, action: {}["speed"]

    class Bare:
        pass

    environments = Environments(Duck, 1, 0)
    with pytest.raises(EnvError, match=r"environment 0 \(.*Duck.*, step 1: .*KeyError: 'speed'"):
        environments.step(np.zeros(1, np.int64))
    environments.close()  # without a method of that name
    for made in (None, Bare()):
        with pytest.raises(EnvError, match="environment 0 is .*, which has no observation_"):
            Environments(lambda made=made: made, 1, 0)


def test_the_cause_of_an_error_shows_the_users_code_alone():
    def cause(*values):
        return {}["key"]

    def refuse():
        raise FlagError("choose another game")

    for change, frames in ((cause, ["step", "cause"]), (lambda *_: None, [])):
        environments = Environments(lambda change=change: Changed(change), 1, 0)
        environments.initial()
        with pytest.raises(EnvError) as error:
            environments.step(np.zeros(1, np.int64))
        trace = traceback.extract_tb(getattr(error.value.__cause__, "__traceback__", None))
        assert [frame.name for frame in trace[1:]] == frames
        assert ("KeyError: 'key'" in format_cause(error.value)) == bool(frames)
    for create in (refuse, lambda: gym.make("Nowhere-v0")):
        with pytest.raises(EnvError, match="environment 0: .*(choose|doesn't exist)") as error:
            Environments(create, 1, 0)
        assert format_cause(error.value) == ""


@pytest.mark.parametrize("space", [DISCRETE, MULTI_DISCRETE, BOX], ids=str)
def test_trying_out_takes_valid_actions_and_no_random_numbers(space):
    state = np.random.get_state()[1].tolist()
    environments = Environments(lambda: Acting(space), 2, 0)
    assert try_out(environments) is environments.row
    assert all(len(env.taken) == 10 for env in environments.envs)
    assert np.random.get_state()[1].tolist() == state


def test_a_failing_reset_or_constructor_is_named():
    class Resetting(Catch):
        def __init__(self, reset):
            super().__init__()
            self.observation_space = gym.spaces.Dict(board=self.observation_space)
            self.reset = lambda **_: reset()

    def create():
        raise ImportError("no such game")

    for reset, message in (
        (lambda: {}["level"], "reset.* raised KeyError: 'level'"),
        (lambda: {"board": 0}, "the old Gym API: return observation and info"),
        (lambda: ({"board": 0}, None), "no pair of an observation and a dict"),
        (
            lambda: ({"bord": 0}, {}),
            r"should be a dict with the keys \['board'\], as its space "
            r"says, but lacks \['board'\] and has \['bord'\] besides",
        ),
        (lambda: ({"board": 0, "x": 1}, {}), r"but has \['x'\] besides"),
        (lambda: (0, {}), "but is a int"),
    ):
        environments = Environments(lambda reset=reset: Resetting(reset), 1, 0)
        with pytest.raises(EnvError, match=f"environment 0 .*, step 0: .*{message}"):
            environments.initial()
    for name in ("Minigrid-v0", "CartPole-v99", "nowhere/Game-v0"):
        with pytest.raises(EnvError, match="create environment 0: .* as package:ID$"):
            Environments(lambda name=name: gym.make(name), 1, 0)
    with pytest.raises(EnvError, match="cannot create environment 0: ImportError: no such game$"):
        Environments(create, 1, 0)


def test_one_environment_for_two_copies_is_refused():
    env = Catch()
    for wrap in (lambda: env, lambda: gym.wrappers.TimeLimit(env, 9)):
        with pytest.raises(EnvError, match="returned the same environment twice: make a new one"):
            Environments(wrap, 2, 1)
        Environments(wrap, 1, 1)


def test_refused_spaces_close_every_environment():
    with pytest.raises(EnvError, match="(?s)sample: the action space is .* only Discrete"):
        Environments(lambda: Acting(gym.spaces.Text(5)), 1, 0, "sample")
    closed = []

    class Closing(Catch):
        def close(self):
            closed.append(self.columns)

    columns = iter([5, 6])
    with pytest.raises(EnvError, match="the observation space of environment 1 is Box.* 6.*Box"):
        Environments(lambda: Closing(columns=next(columns)), 2, 0)
    assert closed == [5, 6]


@pytest.mark.parametrize("dtype", [">f4", np.longdouble])
def test_a_dtype_that_no_tensor_has_is_refused(dtype):
    class Odd(Catch):
        def __init__(self):
            super().__init__()
            self.observation_space = gym.spaces.Box(0, 1, (2,), dtype)

    with pytest.raises(EnvError, match="observation is Box.*, which is no array of numbers of a t"):
        Environments(Odd, 1, 0)


@pytest.mark.parametrize("space", [gym.spaces.Discrete(3), gym.spaces.Box(0, 1, ())])
def test_an_int_that_is_too_large_is_refused(space):
    class Large(gym.Env):
        observation_space, action_space = space, gym.spaces.Discrete(2)

        def reset(self, **kwargs):
            return 10**39, {}

    with pytest.raises(EnvError, match=r"observation is object\[\], but should be"):
        Environments(Large, 1, 0).initial()


def test_a_space_of_the_old_gym_is_said_to_be_one():
    class Discrete:
        n, shape, dtype, spaces = 2, (), np.dtype(np.int64), ()

    Discrete.__module__ = "gym.spaces.discrete"
    old = Discrete()
    for spaces, name in (
        ((DISCRETE, old), "the action space is"),
        ((old, DISCRETE), "the space of observation is"),
        ((gym.spaces.Tuple([DISCRETE]), DISCRETE), r"the space of observation\[0\] is"),
    ):

        def create(spaces=spaces):
            env = Acting(spaces[1])
            env.observation_space = spaces[0]
            if isinstance(spaces[0], gym.spaces.Tuple):
                env.observation_space.spaces = (old,)
            return env

        with pytest.raises(EnvError, match=rf"{name} .*a gym\.spaces\..*the old package gym"):
            Environments(create, 1, 0)


def test_spaces_of_several_players_are_said_to_be_theirs():
    class Parallel(Acting):
        def action_space(self, agent):
            return DISCRETE

    env = Parallel(DISCRETE)
    del env.action_space  # of the object; the method of the class is left
    with pytest.raises(EnvError, match="an environment of several players needs a wrapper"):
        Environments(lambda: env, 1, 0)


def test_a_create_env_that_goes_by_the_name_of_a_game_is_told(caplog):
    def warnings(env_id, create):
        caplog.clear()
        flags = types.SimpleNamespace(env=env_id, env_backend="gym", seed=1, stall_timeout_s=60)
        sample_environment(flags, lambda flags: create())
        return caplog.text

    text = warnings("PongNoFrameskip-v4", Counter)
    assert "--env is PongNoFrameskip-v4, but create_env made <Counter" in text
    assert warnings("counter", Counter) == warnings(None, Counter) == ""
    game = functools.partial(gym.make, "ale_py:PongNoFrameskip-v4")
    assert warnings("PongNoFrameskip-v4", game) == ""


SMALL = gym.spaces.Box(-1, 1, (2,))


@pytest.mark.parametrize(
    ("space", "inside", "outside", "path"),
    [
        (SMALL, [1, -1], [0, 1.1], "observation"),
        (gym.spaces.Box(-np.inf, 1, (2,)), [-9, 1], [0, 2], "observation"),
        (gym.spaces.Discrete(3, start=-1), 1, -2, "observation"),
        (gym.spaces.MultiDiscrete([2, 3]), [1, 2], [2, 0], "observation"),
        (gym.spaces.MultiBinary(2), [1, 0], [2, 0], "observation"),
        (gym.spaces.Dict(a=gym.spaces.Tuple([SMALL])), [1, 1], [2, 1], r"observation\['a'\]\[0\]"),
    ],
    ids=str,
)
def test_an_observation_outside_its_space_is_named_once(space, inside, outside, path, caplog):
    class Leaving(Counter):
        observation_space = property(lambda self: space, lambda self, value: None)

        def _observation(self):
            x = outside if self.step_count == 2 else inside
            if isinstance(space, gym.spaces.Dict):
                return {"a": (np.array(x, np.float32),)}
            return np.array(x, space.dtype)

    environments = Environments(lambda: Leaving(length=4), 2, 0)
    environments.initial()
    environments.step(np.zeros(2, int))
    assert not caplog.records
    for _ in range(8):
        environments.step(np.zeros(2, int))
    (record,) = caplog.records
    assert re.search(f"environment 0 .*, step 2: {path} has numbers outside", record.getMessage())


def test_the_first_of_several_processes_checks_observations(monkeypatch):
    def watches(name):
        monkeypatch.setattr(multiprocessing.current_process(), "_name", name)
        return Environments(Counter, 1, 0).watched_steps > 0

    names = "MainProcess", "ForkServerProcess-1", "SpawnProcess-1:1", "ForkServerProcess-2"
    assert list(map(watches, names)) == [True, True, True, False]


@pytest.mark.parametrize(
    ("space", "num_actions", "actions", "taken"),
    [
        (DISCRETE, 3, np.array([2, 0]), [1, -1]),
        (MULTI_DISCRETE, (2, 3), np.array([[0, 2], [1, 0]]), [[0, 1], [1, -1]]),
        (BOX, 2, np.array([[-1, 7], [0, -9]], np.float32), [[-1, 7], [0, -9]]),
        (gym.spaces.MultiDiscrete([200, 3], np.uint8, start=[50, 0]), (200, 3),
         np.array([[199, 0], [1, 2]]), [[249, 0], [51, 2]]),
        (gym.spaces.MultiDiscrete([2, 3], np.int32), (2, 3), np.array([[0, 2], [1, 0]]),
         [[0, 2], [1, 0]]),
        (gym.spaces.MultiDiscrete([2, 3], np.uint64), (2, 3), np.array([[0, 2], [1, 0]]),
         [[0, 2], [1, 0]]),
        (gym.spaces.Box(-0.1, 0.1, (2,), np.float64), 2, np.array([[0.1, -0.1]] * 2, np.float32),
         [[0.1, -0.1]] * 2),
        (gym.spaces.Box(-0.1, 0.1, (1,), np.float16), 1, np.float32([[-0.0999], [0.05]]),
         [[np.float16(-0.0999)], [np.float16(0.05)]]),
        (gym.spaces.Box(-np.inf, np.inf, (1,), np.float16), 1, np.float32([[65504], [-7]]),
         [[65504], [-7]]),
    ],
    ids=str,
)  # fmt: skip
def test_environments_get_actions_of_their_space(space, num_actions, actions, taken):
    environments = Environments(lambda: Acting(space, length=3, truncates=True), 2, 0)
    assert environments.num_actions == num_actions
    row = environments.initial()
    assert row["last_action"].dtype == actions.dtype and not row["last_action"].any()
    environments.step(actions)
    assert row["last_action"].tolist() == actions.tolist()
    for env, wanted in zip(environments.envs, taken, strict=True):
        assert np.asarray(env.taken[0]).tolist() == wanted
        if space is not DISCRETE:
            assert env.taken[0].dtype == space.dtype
            env.taken[0][:] = 0  # an environment may change its action
    assert row["last_action"].tolist() == actions.tolist() != np.zeros_like(actions).tolist()


@pytest.mark.parametrize(
    ("space", "action"),
    [(DISCRETE, -1), (DISCRETE, 3), (MULTI_DISCRETE, [0, 3]), (MULTI_DISCRETE, [-1, 0]),
     (BOX, [0.6, 0.0]), (BOX, [0.0, np.inf]), (BOX, [np.nan, 0.0]),
     (gym.spaces.Box(-np.inf, np.inf, (1,), np.float16), [1e5])],
)  # fmt: skip
def test_an_action_out_of_range_is_an_error(space, action):
    environments = Environments(lambda: Acting(space, length=2, truncates=True), 2, 0)
    good = np.zeros_like(environments.initial()["last_action"])
    bad = good.copy()
    bad[1] = action
    environments.step(good)
    environments.step(good)
    environments.step(bad)  # in the extra row, where it is ignored
    with pytest.raises(EnvError, match=r"environment 1 .* step 3: the action is .*must be from"):
        environments.step(bad)


@pytest.mark.parametrize(
    ("space", "actions", "message"),
    [(DISCRETE, np.zeros((2, 1), np.int64), r"int64\[2, 1\].* are int64\[2\]"),
     (DISCRETE, np.zeros(2), r"float64\[2\].* are int64\[2\]"),
     (BOX, np.zeros(2, np.float32), r"float32\[2\].* are float32\[2, 2\]"),
     (MULTI_DISCRETE, np.zeros((3, 2), np.int64), r"int64\[3, 2\].* are int64\[2, 2\]")],
)  # fmt: skip
def test_actions_of_another_shape_or_kind_are_an_error(space, actions, message):
    environments = Environments(lambda: Acting(space), 2, 0)
    environments.initial()
    with pytest.raises(EnvError, match=message):
        environments.step(actions)
