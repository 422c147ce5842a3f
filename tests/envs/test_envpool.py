# SPDX-License-Identifier: Apache-2.0
"""What envpool_envs.py promises about the rows of a rollout, with the real environments of EnvPool.

EnvPool itself is needed for most of it, and so Python 3.12 or newer (pip install envpool==1.2.7).
"""

import contextlib
import importlib.util
import os

import gymnasium as gym
import numpy as np
import pytest
from program import ROOT, read_rows, run

import atari_wrappers
import monobeast
from beast import flags as program_flags
from beast.envs import envpool_envs
from beast.envs.environments import Environments, create_environments, try_out
from beast.envs.envpool_envs import EnvPoolEnvironments
from beast.envs.spaces import random_actions
from beast.errors import EnvError, FlagError
from beast.nest import map_nest

needs_envpool = pytest.mark.skipif(
    importlib.util.find_spec("envpool") is None, reason="EnvPool is not installed"
)
pytestmark = pytest.mark.whole

KEYS = ["reward", "done", "truncated", "terminated", "episode_return", "episode_step",
        "game_done", "game_return", "game_step", "last_action", "frame"]  # fmt: skip
CARTPOLE = {
    "import_path": "envpool.classic_control", "spec_cls": "CartPoleEnvSpec",
    "dm_cls": "CartPoleDMEnvPool", "gymnasium_cls": "CartPoleGymnasiumEnvPool",
    "reward_threshold": 1.0,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def short_ids():
    """Register CartPole with a time limit at which poles fall, too."""
    if importlib.util.find_spec("envpool") is not None:
        from envpool.registration import register

        register(task_id="ShortCartPole-v1", max_episode_steps=10, **CARTPOLE)


def make_flags(arguments):
    """Return the flags in `arguments`, which begin with the environment."""
    return monobeast.parser.parse_args(["--env_backend", "envpool", "--env", *arguments.split()])


@contextlib.contextmanager
def environments(arguments, num_envs=1, seed=1, **kwargs):
    with contextlib.closing(
        EnvPoolEnvironments(make_flags(arguments), num_envs, seed, **kwargs)
    ) as envs:
        yield envs


def play(arguments, num_steps, num_envs=2, seed=1, policy=None):
    """Return copies of the first row and of those after random actions, or those of a policy."""
    random = np.random.default_rng(0)
    with environments(arguments, num_envs, seed) as envs:
        rows = [map_nest(np.copy, envs.initial())]
        for _ in range(num_steps):
            if policy is None:
                actions = random_actions(envs.action_space, num_envs, random, rows[-1]["frame"])
            else:
                actions = policy(rows[-1]["frame"])
            rows.append(map_nest(np.copy, envs.step(actions)))
    return rows


def balance(frame):
    return (frame[:, 2] + frame[:, 3] > 0).astype(np.int64)


def assert_rows_equal(rows, expected):
    assert len(rows) == len(expected)
    for t, (row, other) in enumerate(zip(rows, expected, strict=True)):
        for key in KEYS:
            np.testing.assert_equal(row[key], other[key], f"{key} of row {t}")


def play_plainly(env_id, seed, actions, lives_end=False, **options):
    """Return the rows of one environment that a plain loop steps; {key: value} each."""
    import envpool

    pool = envpool.make_gymnasium(env_id, num_envs=1, num_threads=1, seed=[seed], **options)
    observation, info = pool.reset()
    row = dict.fromkeys(KEYS, 0) | {"done": True, "game_done": True, "frame": first(observation)}
    rows, end, episode, game = [row], None, [], []
    for action in actions:
        lives = info.get("lives")
        sent = 1 if end else action  # ignored after an end
        observation, (reward,), (ended,), (cut,), info = pool.step(np.array([sent]))
        row = row | {"reward": 0, "done": False, "game_done": False, "frame": first(observation)}
        row["terminated"] = row["truncated"] = False
        if end is not None:
            row |= {"done": True, "game_done": end == "game"}
            game = [] if end == "game" else game
            row |= {"episode_return": sum(episode), "episode_step": len(episode)}
            episode, end = [], None
            rows.append(row)
            continue
        episode.append(float(reward))
        game.append(float(reward))
        over = bool(ended) if lives is None else info["terminated"][0] == 1
        lost = lives_end and 0 < info["lives"][0] < lives[0]
        row |= {"reward": reward, "last_action": action, "terminated": over or lost}
        row["truncated"] = cut and not row["terminated"]
        for name, rewards in (("episode", episode), ("game", game)):
            row |= {f"{name}_return": sum(rewards), f"{name}_step": len(rewards)}
        if over or cut:
            end = "game"
        elif lost:
            end = "life"
        rows.append(row)
    return rows


def first(observation):
    return map_nest(lambda x: x[0], observation)


def stack(*values):
    return np.stack(values) if not isinstance(values[0], dict) else map_nest(stack, *values)


PLAIN = {
    # A life takes 24 actions or more, a game 120: there are both kinds of end.
    "Breakout-v5": {"lives_end": True, "limit": 130, "episodic_life": True},
    "Breakout-v5 --no_episodic_life --no_fire_reset --sticky_actions 0.25": {
        "limit": 150, "use_fire_reset": False, "repeat_action_probability": 0.25,
    },
    "SpaceInvaders-v5 --frame_skip 8 --color --frame_stack 2 --frame_size 42 --noop_max 5": {
        "lives_end": True, "limit": 100, "episodic_life": True, "frame_skip": 8, "stack_num": 2,
        "gray_scale": False, "img_height": 42, "img_width": 42, "noop_max": 5,
    },
    "BossfightEasy-v0": {"num_steps": 300},
    "Acrobot-v1": {"num_steps": 1100},
    "MiniGrid-Empty-5x5-v0": {"num_steps": 600},
}  # fmt: skip


@needs_envpool
@pytest.mark.parametrize("arguments", PLAIN)
def test_rows_are_those_of_a_plain_loop(arguments, monkeypatch):
    options = {"num_steps": 600} | PLAIN[arguments]
    num_steps, limit = options.pop("num_steps"), options.pop("limit", None)
    if limit is not None:
        frames = limit * options.get("frame_skip", 4) - 1  # rounded up to whole actions
        monkeypatch.setattr(envpool_envs, "ATARI_FRAMES", frames)
        options["max_episode_steps"] = limit
    with environments(arguments, 3, seed=[5, 6]) as envs:
        actions = np.random.default_rng(1).integers(envs.num_actions, size=(num_steps, 3))
        rows = [map_nest(np.copy, envs.initial())]
        rows += [map_nest(np.copy, envs.step(action)) for action in actions]
        seeds = envs.seeds
    env_id = arguments.split()[0]
    columns = [play_plainly(env_id, seeds[i], actions[:, i].tolist(), **options) for i in range(3)]
    plain = [
        {key: stack(*(column[key] for column in row)) for key in KEYS}
        for row in zip(*columns, strict=True)
    ]
    assert_rows_equal(rows, plain)
    ends = {kind: sum(row[kind].sum() for row in rows) for kind in ("terminated", "truncated")}
    assert ends["terminated"] or "Acrobot" in arguments
    assert ends["truncated"] or "Bossfight" in arguments


ROW_BY_ROW = ("ShortCartPole-v1", np.ones_like, 10), ("CartPole-v0", balance, 200)


@needs_envpool
@pytest.mark.parametrize("env_id, policy, limit", ROW_BY_ROW, ids=["falls", "stands"])
def test_rows_of_cartpole_follow_gymnasiums_physics(env_id, policy, limit):
    if policy is not balance:
        policy = lambda frame: np.ones(len(frame), np.int64)  # noqa: E731
    N, physics = 20, gym.make("CartPole-v1").unwrapped
    rows = play(env_id, 3 * limit, N, policy=policy)
    physics.reset(seed=0)
    counts = {"fell": 0, "cut": 0, "fell at the limit": 0}
    for i in range(N):
        steps, over = 0, None
        for before, row in zip(rows, rows[1:], strict=False):
            if over:  # a new episode begins
                begun = np.abs(row["frame"][i]) <= 0.05
                assert row["done"][i] and row["game_done"][i] and begun.all()
                assert row["reward"][i] == 0 and not row["terminated"][i] | row["truncated"][i]
                assert row["episode_step"][i] == row["episode_return"][i] == steps
                steps, over = 0, None
                continue
            physics.state, physics.steps_beyond_terminated = before["frame"][i].astype(float), None
            action = row["last_action"][i]
            observation, reward, terminated, *_ = physics.step(action)
            steps += 1
            assert action == policy(before["frame"])[i]
            np.testing.assert_allclose(row["frame"][i], observation, rtol=1e-5, atol=1e-6)
            assert row["reward"][i] == reward == 1
            assert row["terminated"][i] == terminated
            assert row["truncated"][i] == (steps == limit and not terminated)
            assert not row["done"][i] and row["episode_step"][i] == row["game_step"][i] == steps
            over = terminated or steps == limit
            counts["fell"] += terminated
            counts["fell at the limit"] += terminated and steps == limit
            counts["cut"] += over and not terminated
    expected = {"fell", "fell at the limit"} if policy is not balance else set()
    assert counts["cut"] > 0 and {key for key in counts if counts[key]} == {"cut", *expected}


WRAPPED = [
    ("PongNoFrameskip-v4", "Pong-v5"),
    ("BreakoutNoFrameskip-v4 --color --frame_stack 1", "Breakout-v5 --color --frame_stack 1"),
    ("QbertNoFrameskip-v4 --full_action_space", "Qbert-v5 --full_action_space"),
    (
        "SpaceInvadersNoFrameskip-v4 --frame_skip 3 --frame_size 60",
        "SpaceInvaders-v5 --frame_skip 3 --frame_size 60",
    ),
]


@needs_envpool
@pytest.mark.parametrize("classic, arguments", WRAPPED)
def test_an_atari_game_is_that_of_the_wrappers_to_the_last_bit(classic, arguments):
    options = " --noop_max 1 --no_fire_reset --no_episodic_life"
    flags = make_flags(classic + options)
    wrapped = Environments(lambda: atari_wrappers.create_atari(flags), 1, 1)
    with contextlib.closing(wrapped), environments(arguments + options) as envs:
        assert envs.spaces == wrapped.spaces and envs.num_actions == wrapped.num_actions
        assert envs.stack_size == wrapped.stack_size and envs.frame_skip == wrapped.frame_skip
        rows, expected = [envs.initial()], [wrapped.initial()]
        random = np.random.default_rng(0)
        for _ in range(100):
            assert_rows_equal(rows, expected)
            action = random.integers(envs.num_actions, size=1)
            rows, expected = [envs.step(action)], [wrapped.step(action)]


@needs_envpool
def test_a_game_that_ends_at_its_time_limit_has_terminated(monkeypatch):
    def first_end():
        rows = play("Breakout-v5 --no_episodic_life", 600, 1)
        return next(
            (t, bool(row["terminated"][0]), bool(row["truncated"][0]))
            for t, row in enumerate(rows)
            if row["terminated"][0] or row["truncated"][0]
        )

    step, terminated, truncated = first_end()
    assert terminated and not truncated
    monkeypatch.setattr(envpool_envs, "ATARI_FRAMES", step * 4)
    assert first_end() == (step, True, False)
    monkeypatch.setattr(envpool_envs, "ATARI_FRAMES", step * 4 - 4)
    assert first_end() == (step - 1, False, True)


@needs_envpool
def test_a_life_lost_at_the_time_limit_ends_the_game_too(monkeypatch):
    def ends():
        rows = play("Breakout-v5", 40, 1, policy=lambda frame: np.zeros(1, np.int64))
        kinds = ("terminated", "truncated", "game_done")
        return [[t for t, row in enumerate(rows) if row[kind][0]] for kind in kinds]

    (step, *_), truncated, _ = ends()  # of the first life
    assert truncated == []
    monkeypatch.setattr(envpool_envs, "ATARI_FRAMES", step * 4)
    terminated, truncated, game_done = ends()
    assert terminated[0] == step and step not in truncated
    assert game_done[:2] == [0, step + 1]


@needs_envpool
def test_lives_say_what_ends():
    """An end of a life; a reset that ends the game, which has more lives; and no lives shown."""
    with environments("Breakout-v5 --no_fire_reset") as envs:
        envs.initial()
        step, lives = envs._pool.step, iter([5, 1, 5, 5, 0])

        def fake(*args):
            *results, info = step(*args)
            return *results, info | {"lives": np.array([next(lives)], np.int32)}

        envs._pool.step = fake
        rows = [map_nest(np.copy, envs.step(np.array([1]))) for _ in range(5)]
    assert [row["terminated"][0] for row in rows] == [False, True, False, False, False]
    assert [row["done"][0] for row in rows] == [False, False, True, False, False]
    assert [row["game_done"][0] for row in rows] == [False, False, True, False, False]
    assert [row["game_step"][0] for row in rows] == [1, 2, 2, 1, 2]


@needs_envpool
@pytest.mark.parametrize("arguments", ["CartPole-v1", "StarpilotEasy-v0", "Pong-v5"])
def test_equal_seeds_give_equal_rows_and_others_differ(arguments):
    first, again, other = (play(arguments, 40, 2, seed) for seed in ([1, 2], [1, 2], 3))
    assert_rows_equal(first, again)
    last = [rows[-1]["frame"] for rows in (first, other)]
    assert len({frame.tobytes() for frame in (*last[0], *last[1])}) == 4


@needs_envpool
def test_masks_in_info_are_observed_as_gymnasiums():
    taxi = gym.make("Taxi-v4").unwrapped
    random = np.random.default_rng(0)
    with environments("Taxi-v4", 3) as envs:
        assert envs.observation_space["action_mask"] == gym.spaces.MultiBinary(6)
        row, num_ends = envs.initial(), 0
        for _ in range(450):  # through time limits of 200
            masks, states = row["frame"]["action_mask"], row["frame"]["observation"]
            assert [list(mask) for mask in masks] == [list(taxi.action_mask(s)) for s in states]
            actions = [random.choice(np.flatnonzero(mask)) for mask in masks]
            row = envs.step(np.array(actions))
            num_ends += int(row["done"].sum())
    assert num_ends >= 6


@needs_envpool
def test_initial_begins_anew_with_the_same_seeds():
    with environments("CartPole-v1", 2) as envs:
        first = map_nest(np.copy, envs.initial())
        for _ in range(20):
            envs.step(np.ones(2, np.int64))
        assert_rows_equal([map_nest(np.copy, envs.initial())], [first])


@needs_envpool
def test_one_thread_steps_and_close_ends_all():
    def threads():
        return set(os.listdir("/proc/self/task"))

    with environments("CartPole-v1"):
        pass  # libraries start theirs
    before = threads()
    envs = EnvPoolEnvironments(make_flags("Pong-v5"), 4, 0)
    envs.initial()
    begun = threads() - before
    assert 1 <= len(begun) <= 2  # one of EnvPool's waits; it made the games
    envs.close()
    assert threads() <= before
    envs.close()


SPACES = {
    "CartPole-v1": (gym.spaces.Box, np.float32, gym.spaces.Discrete),
    "Acrobot-v1": (gym.spaces.Box, np.float32, gym.spaces.Discrete),
    "StarpilotEasy-v0": (gym.spaces.Box, np.uint8, gym.spaces.Discrete),
    "CoinrunEasy-v0": (gym.spaces.Box, np.uint8, gym.spaces.Discrete),
    "HalfCheetah-v4": (gym.spaces.Box, np.float64, gym.spaces.Box),
    "CheetahRun-v1": (gym.spaces.Dict, None, gym.spaces.Box),
    "LunarLander-v3": (gym.spaces.Box, np.float32, gym.spaces.Discrete),
    "FrozenLake-v1": (gym.spaces.Discrete, np.int64, gym.spaces.Discrete),
    "Snake-v1": (gym.spaces.Dict, None, gym.spaces.Discrete),
    "Cleaner-v0 --observation_keys grid": (gym.spaces.Box, np.int8, gym.spaces.MultiDiscrete),
    "MiniGrid-Empty-5x5-v0": (gym.spaces.Dict, None, gym.spaces.Discrete),
    "MiniGrid-Empty-5x5-v0 --observation_keys image": (
        gym.spaces.Box, np.uint8, gym.spaces.Discrete,
    ),
    "MiniGrid-Empty-5x5-v0 --observation_keys image,direction": (
        gym.spaces.Dict, None, gym.spaces.Discrete,
    ),
}  # fmt: skip


@needs_envpool
@pytest.mark.parametrize("arguments", SPACES)
def test_rows_are_in_their_spaces(arguments, recwarn):
    kind, dtype, action_kind = SPACES[arguments]
    with environments(arguments, 2) as envs:
        assert type(envs.observation_space) is kind and type(envs.action_space) is action_kind
        assert dtype is None or envs.observation_space.dtype == dtype
        assert envs.spaces
    for row in play(arguments, 60):
        for i in range(2):
            observation = map_nest(lambda x, i=i: x[i], row["frame"])
            assert envs.observation_space.contains(observation), (observation, i)
    assert not recwarn.list


@needs_envpool
def test_bounds_are_infinite_where_envpool_has_none():
    with environments("LunarLander-v3") as envs:
        assert (envs.observation_space.low == -np.inf).all()
        assert (envs.observation_space.high == np.inf).all()
    with environments("HalfCheetah-v4") as envs:
        likeness = gym.spaces.Box(-1, 1, (6,), np.float64)
        assert envs.action_space == likeness and envs.num_actions == 6


@needs_envpool
@pytest.mark.parametrize(
    ("arguments", "message"),
    [("PongNoFrameskip-v4", "no environment 'PongNoFrameskip-v4'; is it Pong-v5\\?$"),
     ("cartpole-v1", "is it CartPole-v1 or"),
     ("starpilot", "is it StarpilotHard-v0 or StarpilotEasy-v0 or"),
     ("qqq", "no environment 'qqq'; envpool.list_all_envs\\(\\) lists all$"),
     ("TicTacToe-v1", "TicTacToe-v1 has 2 players; only 1 works"),
     ("Game2048-v1 --observation_keys x", "name some of action_mask, board"),
     ("Pong-v5 --sticky_actions 1.5", "a probability from 0 to 1, not 1.5"),
     ("Pong-v5 --noop_max 0", "--noop_max is 0; EnvPool needs 1 or more"),
     ("Pong-v5 --frame_size 0", "--frame_size is 0; EnvPool needs 1 or more"),
     ("Pong-v5 --no_max_pool", "--no_max_pool: EnvPool always takes the maximum")],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_in_a_line(arguments, message):
    with pytest.raises(EnvError, match=f"^actor 0: cannot create the environments: .*{message}"):
        EnvPoolEnvironments(make_flags(arguments), 1, 0, "actor 0")


@needs_envpool
def test_errors_name_the_environments():
    with environments("CartPole-v1", 2, name="actor 3") as envs:
        envs.initial()
        where = f"actor 3: environment 1 (CartPole-v1, seed {envs.seeds[1]}), step "
        for step, action in enumerate((-1, 2, 2**40), 1):
            with pytest.raises(EnvError) as error:
                envs.step(np.array([0, action]))
            assert (
                str(error.value) == f"{where}{step}: the action is {action}; it must be from 0 to 1"
            )

        def fail(*args):
            raise RuntimeError("no power")

        step = envs._pool.step
        envs._pool.step = fail
        with pytest.raises(EnvError) as error:
            envs.step(np.array([0, 1]))
        text = "actor 3: CartPole-v1 in EnvPool, step 4: step() raised RuntimeError: no power"
        assert str(error.value) == text

        def spoil(*args):
            observations, rewards, *others = step(*args)
            observations[1, 2] = np.nan
            return observations, rewards, *others

        envs._pool.step = spoil
        with pytest.raises(EnvError) as error:
            envs.step(np.array([0, 1]))
        what = "the observation has numbers that are not finite (as float32)"
        assert str(error.value) == f"{where}5: {what}"


def test_without_envpool_a_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = r"pip install envpool==1\.2\.7 \(for Python 3\.12 and newer; this is 3"
    arguments = ["--env_backend", "envpool", "--env", "Pong-v5"]
    with pytest.raises(FlagError, match=text):
        program_flags.parse_flags(monobeast.parser, arguments)
    with pytest.raises(EnvError, match=f"^actor 0: cannot create the environments: .*{text}"):
        EnvPoolEnvironments(monobeast.parser.parse_args(arguments), 1, 0, "actor 0")


def test_pictures_are_refused():
    arguments = ["--env_backend", "envpool", "--mode", "test_render"]
    with pytest.raises(FlagError, match="plays without pictures: use --mode test"):
        program_flags.evaluate.check_flags(monobeast.parser.parse_args(arguments))


PROGRAMS = {
    "monobeast.py": "--num_actors 1 --envs_per_actor 2",
    "polybeast.py": "--model shallow --num_servers 1 --envs_per_stream 2",
}


@needs_envpool
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_trains_on_it_and_tests(program, tmp_path):
    arguments = "--env StarpilotEasy-v0 --env_backend envpool --total_steps 400 --batch_size 2 "
    arguments += f"{PROGRAMS[program]} --xpid run --savedir"
    output = run(ROOT / program, arguments, tmp_path)
    assert int(read_rows(tmp_path / "run")[-1]["step"]) >= 400, output
    arguments = "--mode test --num_episodes 2 --xpid run --savedir"
    output = run(ROOT / program, arguments, tmp_path)
    assert "15 actions, EnvPool, 2 at once" in output, output
    assert "2 games: mean return" in output


@needs_envpool
def test_a_program_for_discrete_actions_names_those_for_others(tmp_path):
    arguments = "--env HalfCheetah-v4 --env_backend envpool --savedir"
    output = run(ROOT / "monobeast.py", arguments, tmp_path, status=1)
    (line,) = (line for line in output.splitlines() if line)
    assert "ppo.py and, if bounded, sac.py" in line


@needs_envpool
def test_servers_make_them():
    import polybeast_env

    flags = polybeast_env.parser.parse_args(["--env_backend", "envpool", "--env", "CartPole-v1"])
    envs = create_environments(flags, polybeast_env.create_env, 2, 1, "a server")
    with contextlib.closing(envs):
        assert type(envs) is EnvPoolEnvironments
        assert try_out(envs)["frame"].shape == (2, 4)
