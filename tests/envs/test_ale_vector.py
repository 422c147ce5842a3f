# SPDX-License-Identifier: Apache-2.0
"""What ale_vector.py promises about the rows of a rollout, with the real games of ale-py."""

import contextlib
import os

import ale_py
import gymnasium as gym
import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv
from program import ROOT, column, load, read_rows, run

import atari_wrappers
import monobeast
from beast.envs.ale_vector import AtariEnvironments
from beast.envs.environments import Environments
from beast.errors import EnvError
from beast.nest import map_nest

pytestmark = pytest.mark.whole

NONE = 10**9  # no time limit
KEYS = ["frame", "reward", "done", "truncated", "terminated", "episode_return", "episode_step",
        "game_done", "game_return", "game_step", "last_action"]  # fmt: skip

# A game with a time limit, here, so that processes that import this file have them, too.
gym.register_envs(ale_py)
SHORT = {"game": "breakout", "repeat_action_probability": 0.0, "max_num_frames_per_episode": 100}
gym.register("ShortBreakout-v0", "ale_py.env:AtariEnv", kwargs=SHORT)
gym.register("Hard-v0", "ale_py.env:AtariEnv", kwargs={"game": "pong", "difficulty": 1})


def make_flags(arguments):
    """Return the flags in `arguments`, which begin with the environment."""
    return monobeast.parser.parse_args(["--env", *arguments.split()])


@contextlib.contextmanager
def environments(arguments, num_envs=1, seed=1, **kwargs):
    with contextlib.closing(
        AtariEnvironments(make_flags(arguments), num_envs, seed, **kwargs)
    ) as envs:
        yield envs


def rows_of(environments, actions):
    """Return copies of the first row and of those after each of `actions`, [num_steps, N]."""
    rows = [map_nest(np.copy, environments.initial())]
    for action in actions:
        rows.append(map_nest(np.copy, environments.step(action)))
    return rows


def where(rows, key, i=0):
    return [t for t, row in enumerate(rows) if row[key][i]]


def assert_rows_equal(rows, expected):
    assert len(rows) == len(expected)
    for t, (row, other) in enumerate(zip(rows, expected, strict=True)):
        for key in KEYS:
            np.testing.assert_array_equal(row[key], other[key], f"{key} of row {t}")


def play_plainly(seed, actions, game, lives_end=True, between_lives=0, limit=NONE, **options):
    """Return the rows of a single game, stepped by a plain loop: {key: value} each."""
    env = AtariVectorEnv(game, 1, num_threads=1, reward_clipping=False, **options)
    observation, info = env.reset(seed=np.array([seed]))
    row = dict.fromkeys(KEYS, 0) | {"done": True, "game_done": True, "frame": observation[0]}
    rows, end, cut = [row], None, False
    episode, game_rewards = [], []
    for action in actions:
        lives, row = info["lives"][0], row | {"reward": 0, "done": False, "game_done": False}
        if cut:  # ale-py does not know that the game is over
            observation, info = env.reset()
            over = False
        else:
            sent = action if end is None else between_lives
            observation, reward, terminated, _, info = env.step(np.array([sent]))
            over = bool(terminated[0])
        cut = not over and info["episode_frame_number"][0] >= limit
        row["frame"] = observation[0]
        if end is None:
            row["reward"], row["last_action"] = int(reward[0]), action
            episode.append(row["reward"])
            game_rewards.append(row["reward"])
            lost = lives_end and 0 < info["lives"][0] < lives
        else:
            lost = False
        row["terminated"] = over or lost
        row["truncated"] = cut and not row["terminated"]
        for name, rewards in (("episode", episode), ("game", game_rewards)):
            row |= {f"{name}_return": sum(rewards), f"{name}_step": len(rewards)}
        if end is not None and not over and not cut:
            row |= {"done": True, "game_done": end == "game"}
            episode = []
            game_rewards = [] if end == "game" else game_rewards
            end = None
        elif over or cut:
            end = "game"
        elif lost:
            end = "life"
        rows.append(row)
    return rows


PLAIN = {
    "ALE/Breakout-v5": {"between_lives": 1, "repeat_action_probability": 0.25},
    "BreakoutNoFrameskip-v4 --no_episodic_life --no_fire_reset --sticky_actions 0.1": {
        "lives_end": False, "use_fire_reset": False, "repeat_action_probability": 0.1,
        "num_steps": 250,
    },
    "ShortBreakout-v0 --no_episodic_life": {"lives_end": False, "limit": 100},
    # Each action costs a life, also the one between two lives, which is no end.
    "BreakoutNoFrameskip-v4 --noop_max 0 --frame_skip 120": {
        "between_lives": 1, "noop_max": 0, "frameskip": 120, "num_steps": 30,
    },
    # A life ends after 97 frames, and the game between two lives, after 101.
    "ShortBreakout-v0 --noop_max 0": {"between_lives": 1, "limit": 100, "noop_max": 0},
    # In the step after the time limit, which is thrown away, all lives are lost.
    "ShortBreakout-v0 --noop_max 0 --frame_skip 600": {
        "between_lives": 1, "limit": 100, "noop_max": 0, "frameskip": 600, "num_steps": 30,
    },
    "QbertNoFrameskip-v4 --frame_skip 8": {
        "game": "qbert", "frameskip": 8, "use_fire_reset": False,
    },
    "FreewayNoFrameskip-v4 --full_action_space --frame_stack 2 --frame_size 42 --no_max_pool": {
        "game": "freeway", "full_action_space": True, "stack_num": 2, "img_height": 42,
        "img_width": 42, "maxpool": False, "use_fire_reset": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("arguments", PLAIN)
def test_rows_are_those_of_a_plain_loop(arguments):
    options = {"game": "breakout", "num_steps": 120} | PLAIN[arguments]
    num_steps = options.pop("num_steps")
    with environments(arguments, 2, seed=[5, 6]) as envs:
        actions = np.random.default_rng(1).integers(envs.num_actions, size=(num_steps, 2))
        rows, seeds = rows_of(envs, actions), envs.seeds
    columns = [play_plainly(seeds[i], actions[:, i].tolist(), **options) for i in range(2)]
    plain = zip(*columns, strict=True)
    assert_rows_equal(rows, [{k: np.stack([r[k] for r in row]) for k in KEYS} for row in plain])
    if not arguments.startswith("Freeway"):
        assert sum(row["terminated"].sum() + row["truncated"].sum() for row in rows) > 1


def test_a_game_that_shows_no_lives_at_its_end_ends_once(monkeypatch):
    class LastLifeIsNotShown(AtariVectorEnv):
        def step(self, actions):
            *step, info = super().step(actions)
            return *step, info | {"lives": np.where(info["lives"] == 1, 0, info["lives"])}

    def ends():
        with environments("BreakoutNoFrameskip-v4 --noop_max 0") as envs:
            rows = rows_of(envs, np.ones((140, 1), np.int64))
        return [t for t in where(rows, "terminated") if t < where(rows, "game_done")[1]]

    assert len(ends()) == 5
    monkeypatch.setattr(ale_py.vector_env, "AtariVectorEnv", LastLifeIsNotShown)
    assert len(ends()) == 4


WRAPPED = [
    "BreakoutNoFrameskip-v4",
    "BreakoutNoFrameskip-v4 --color",
    "BreakoutNoFrameskip-v4 --no_max_pool --frame_stack 1",
    "BreakoutNoFrameskip-v4 --full_action_space --frame_size 160",
    "SpaceInvadersNoFrameskip-v4 --frame_size 0 --frame_skip 3",
]


@pytest.mark.parametrize("arguments", WRAPPED)
def test_an_episode_is_that_of_the_wrappers_to_the_last_bit(arguments):
    flags = make_flags(f"{arguments} --noop_max 0 --no_fire_reset --no_episodic_life")
    with contextlib.closing(AtariEnvironments(flags, 1, 1)) as vector:
        classic = Environments(lambda: atari_wrappers.create_atari(flags), 1, 1)
        assert vector.spaces == classic.spaces and vector.stack_size == classic.stack_size
        assert vector.num_actions == classic.num_actions
        actions = np.random.default_rng(0).integers(classic.num_actions, size=(100, 1))
        rows, expected = rows_of(vector, actions), rows_of(classic, actions)
        classic.close()
    K = flags.frame_stack
    C = rows[0]["frame"].shape[1] // K
    for t in range(101):
        new = min(t + 1, K) * C  # frames of this episode; before them a vector has zeros
        row = rows[t]["frame"]
        np.testing.assert_array_equal(row[:, -new:], expected[t]["frame"][:, -new:])
        assert not row[:, :-new].any() if new < row.shape[1] else True
        for key in set(KEYS) - {"frame"}:
            assert rows[t][key] == expected[t][key], (t, key)
    assert not any(row["terminated"][0] for row in rows)


def test_an_action_out_of_range_names_the_environment():
    with environments("BreakoutNoFrameskip-v4", 2, name="actor 3") as envs:
        envs.initial()
        envs.step(np.array([0, 3]))
        where = f"actor 3: environment 1 (BreakoutNoFrameskip-v4, seed {envs.seeds[1]}), step "
        for step, action in enumerate((-1, 4, 2**40), 2):
            with pytest.raises(EnvError) as error:
                envs.step(np.array([0, action]))
            message = f"{step}: the action is {action}; it must be from 0 to 3"
            assert str(error.value) == where + message


def test_seeds_reach_every_environment_and_differ():
    actions, found = np.random.default_rng(0).integers(6, size=(30, 2)), []
    for seed in ([1, 2], [1, 2], 3):
        with environments("PongNoFrameskip-v4 --sticky_actions 0.5", 2, seed) as envs:
            found.append(rows_of(envs, actions))
    first, again, other = found
    assert_rows_equal(first, again)
    last = [rows[-1]["frame"] for rows in (first, other)]
    assert len({frame.tobytes() for frame in (*last[0], *last[1])}) == 4
    with environments("PongNoFrameskip-v4", 2, [1, 2]) as envs:
        wrapped = Environments(lambda: gym.make("CartPole-v1"), 2, [1, 2])
        assert envs.seeds == wrapped.seeds


def test_close_ends_the_threads():
    def threads():
        return set(os.listdir("/proc/self/task"))

    before = threads()  # some of which may be ending
    envs = AtariEnvironments(make_flags("PongNoFrameskip-v4"), 2, 0)
    envs.initial()
    assert len(threads() - before) == 1
    envs.close()
    assert threads() <= before
    envs.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("CartPole-v1", "CartPole-v1 is not a game of ale-py"),
     ("Hard-v0", "registered with difficulty, which --env_backend ale_vector cannot do"),
     ("PongNoFrameskip-v4 --sticky_actions 1.5", "a probability from 0 to 1, not 1.5"),
     ("PongNoFrameskip-v4 --noop_max -1", "--noop_max is -1; it should be 0 or more"),
     ("PongNoFrameskip-v4 --frame_skip 0", "--frame_skip is 0; it should be 1 or more"),
     ("PongNoFrameskip-v4 --frame_size -1", "--frame_size is -1; it should be 0 or more"),
     ("PongNoFrameskip-v4 --frame_stack 0", "--frame_stack is 0; it should be 1 or more")],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_by_name(arguments, message):
    with pytest.raises(EnvError, match=f"^actor 0: cannot create the environments: .*{message}"):
        AtariEnvironments(make_flags(arguments), 1, 0, "actor 0")


PROGRAMS = {
    "monobeast.py": "--num_actors 1 --envs_per_actor 1 --batch_size 1",
    "polybeast.py": "--model shallow --num_servers 1 --envs_per_stream 4 --batch_size 4",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_trains_on_it_without_opencv(program, tmp_path):
    (tmp_path / "cv2.py").write_text("raise RuntimeError('cv2 was imported')")  # by the wrappers
    arguments = "--env BreakoutNoFrameskip-v4 --env_backend ale_vector --total_steps 800 "
    arguments += f"{PROGRAMS[program]} --xpid run --savedir"
    run(ROOT / program, arguments, tmp_path, PYTHONPATH=str(tmp_path))
    rows = read_rows(tmp_path / "run")
    assert int(rows[-1]["step"]) >= 800
    for key in ("mean_episode_return", "total_loss", "grad_norm"):
        assert np.isfinite(column(rows, key)).all() and column(rows, key), key
    assert load(tmp_path / "run" / "model.tar")["stats"]["episode_returns"]
