# SPDX-License-Identifier: Apache-2.0
"""Promises of atari_wrappers.py, checked against the plain pipeline on top of AtariEnv."""

import argparse
import collections
import contextlib

import ale_py
import cv2
import gymnasium as gym
import numpy as np
import pytest

from atari_wrappers import (
    EpisodicLife,
    FireReset,
    ResizeFrame,
    add_flags,
    create_atari,
    make_atari,
    wrap_deepmind,
    wrap_pytorch,
)
from beast.envs.ale_vector import AtariEnvironments
from beast.envs.environments import Environments
from beast.errors import EnvError
from libtorchbeast.plain_environments import PlainEnvironments

PONG, BREAKOUT = "PongNoFrameskip-v4", "BreakoutNoFrameskip-v4"
gym.register_envs(ale_py)


class Reference:
    """The same pipeline written the plain way: every frame is read, nothing is kept back."""

    def __init__(self, env_id, noop_max=30, skip=4, max_pool=True, gray=True, stack=4, **kwargs):
        obs_type = "grayscale" if gray else "rgb"
        self.env = gym.make(env_id, obs_type=obs_type, frameskip=1, **kwargs)
        self.noop_max, self.skip, self.pool = noop_max, skip, max_pool
        self.frames = collections.deque(maxlen=stack)

    def observe(self, frame):
        frame = cv2.resize(frame, (84, 84), interpolation=cv2.INTER_AREA)
        frame = frame[None] if frame.ndim == 2 else np.moveaxis(frame, -1, 0)
        self.frames.append(frame)
        while len(self.frames) < self.frames.maxlen:
            self.frames.append(frame)
        return np.concatenate(self.frames)

    def reset(self, seed=None):
        frame, _ = self.env.reset(seed=seed)
        if self.noop_max:
            for _ in range(self.env.unwrapped.np_random.integers(1, self.noop_max + 1)):
                frame, *_ = self.env.step(0)
        self.frames.clear()
        return self.observe(frame)

    def step(self, action):
        frames, total = [], 0.0
        for _ in range(self.skip):
            frame, reward, terminated, truncated, _ = self.env.step(action)
            frames.append(frame)
            total += reward
            if terminated or truncated:
                break
        pooled = frames[-2:] if self.pool and len(frames) == self.skip else frames[-1:]
        return self.observe(np.max(pooled, axis=0)), total, terminated, truncated


def pipeline(env_id, frame_size=84, frame_stack=4, episode_life=False, fire_reset=False, **kwargs):
    env = make_atari(env_id, **kwargs)
    return wrap_pytorch(wrap_deepmind(env, episode_life, fire_reset, frame_size, frame_stack))


CASES = [  # a game, our options, and those of the reference
    (PONG, {}, {}),
    ("PongNoFrameskip-v0", {}, {}),
    ("ALE/Breakout-v5", {}, {}),
    ("SpaceInvaders-v4", {}, {}),
    (BREAKOUT, {"max_pool": False, "noop_max": 0}, {"max_pool": False, "noop_max": 0}),
    (BREAKOUT, {"frame_skip": 1, "frame_stack": 1}, {"skip": 1, "stack": 1}),
    (BREAKOUT, {"frame_skip": 3, "frame_stack": 2}, {"skip": 3, "stack": 2}),
    (BREAKOUT, {"frame_skip": 2, "sticky_actions": 0.5},
     {"skip": 2, "repeat_action_probability": 0.5}),
    (BREAKOUT, {"grayscale": False, "full_action_space": True},
     {"gray": False, "full_action_space": True}),
    # A game that ends within a skip; its last frame is observed alone.
    *[(PONG, {"noop_max": 0, "max_episode_frames": limit},
       {"noop_max": 0, "max_num_frames_per_episode": limit}) for limit in (100, 101, 103)],
]  # fmt: skip


@pytest.mark.parametrize(("env_id", "ours", "plain"), CASES)
def test_each_option_gives_the_rows_of_the_plain_pipeline(env_id, ours, plain):
    env, reference = pipeline(env_id, **ours), Reference(env_id, **plain)
    rng = np.random.default_rng(7)
    np.testing.assert_array_equal(env.reset(seed=7)[0], reference.reset(seed=7))
    rewards = 0.0
    for _ in range(100 if ours else 250):
        action = int(rng.integers(env.action_space.n))
        observation, reward, terminated, truncated, _ = env.step(action)
        expected = reference.step(action)
        np.testing.assert_array_equal(observation, expected[0])
        assert (reward, terminated, truncated) == expected[1:]
        rewards += abs(reward)
        if terminated or truncated:
            np.testing.assert_array_equal(env.reset()[0], reference.reset())
    assert rewards > 0 or ours  # else the test has seen little


@pytest.mark.parametrize("size", [84, 42, 80, 100])
@pytest.mark.parametrize("height", [210, 250])
def test_resizing_bands_equals_resizing_the_frame(size, height):
    rng = np.random.default_rng(0)
    env = gym.Env()
    env.observation_space = gym.spaces.Box(0, 255, (height, 160), np.uint8)
    wrapper = ResizeFrame(env, size)
    frame = rng.integers(256, size=(height, 160), dtype=np.uint8)
    for i in range(100):
        expected = cv2.resize(frame, (size, size), interpolation=cv2.INTER_AREA)
        np.testing.assert_array_equal(wrapper.observation(frame), expected)
        frame = frame.copy()
        top, rows = rng.integers(height), rng.integers(1, 20)
        if i % 5:  # now and then nothing changes
            frame[top : top + rows, 20:60] = rng.integers(
                256, size=(len(frame[top : top + rows]), 40)
            )


@pytest.mark.whole
def test_idle_frames_after_a_reset_are_1_to_noop_max():
    env = make_atari(PONG, noop_max=3)
    env.reset(seed=1)
    assert {env.reset()[1]["episode_frame_number"] for _ in range(30)} == {1, 2, 3}
    env = make_atari(PONG, max_episode_frames=3)  # which end the game, time and again
    for seed in range(9):
        env.reset(seed=seed)
        assert not env.unwrapped.ale.game_over()


def test_a_lost_life_ends_the_episode_but_not_the_game():
    # A ball is lost, each time, only if FIRE was pressed.
    env = pipeline(BREAKOUT, episode_life=True, fire_reset=True)
    _, info = env.reset(seed=1)
    assert info["lives"] == 5
    for lives in (4, 3, 2, 1, 0):
        frames = info["episode_frame_number"]
        steps = (env.step(2)[2:] for _ in range(3000))
        terminated, truncated, info = next(end for end in steps if any(end[:2]))
        assert (terminated, truncated, info["lives"]) == (True, False, lives)
        assert info["game_over"] == (lives == 0)
        assert info["episode_frame_number"] > frames
        before = info["episode_frame_number"]
        _, info = env.reset()
        if lives:  # one idle step, FIRE and action 2
            assert info["episode_frame_number"] == before + 3 * 4
            assert info["lives"] == lives
    assert info["lives"] == 5
    assert info["episode_frame_number"] <= 30 + 2 * 4


class FakeGame(gym.Env):
    """Plays back (lives, reward, terminated, truncated), one a step; observes how many games."""

    observation_space, action_space = gym.spaces.Discrete(99), gym.spaces.Discrete(3)

    def __init__(self, script):
        self.script, self.resets, self.seeds = iter(script), 0, []

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        self.seeds.append(seed)
        return self.resets, {"lives": 3}

    def step(self, action):
        lives, *rest = next(self.script)
        return self.resets, *rest, {"lives": lives}


def test_lives_of_zero_before_the_end_do_not_end_it_twice():
    env = EpisodicLife(FakeGame([(1, 0, False, False), (0, 0, False, False), (0, 0, True, False)]))
    env.reset()
    assert [env.step(0)[2] for _ in range(3)] == [True, False, True]


PLAYED, LOST = (3, 1, False, False), (2, 1, False, False)
ENDED, CUT = (2, 1, True, False), (2, 1, False, True)


def test_a_game_goes_on_with_an_idle_step_unless_seeded():
    env = EpisodicLife(FakeGame([PLAYED, PLAYED]))
    assert [env.reset()[0] for _ in range(3)] == [1, 1, 1]  # the last two take a step each
    assert env.reset(seed=1)[0] == 2


@pytest.mark.parametrize(
    ("script", "resets"),
    [((PLAYED, PLAYED), 1), ((ENDED, PLAYED), 2), ((PLAYED, CUT), 2), ((CUT, ENDED), 3)],
)
def test_a_game_that_ends_by_fire_or_action_2_is_followed_by_one(script, resets):
    env = FireReset(FakeGame(script))
    observation, info = env.reset(seed=1)
    assert observation == env.unwrapped.resets == resets
    assert env.unwrapped.seeds == [1] + [None] * (resets - 1)  # else it would be the same game
    assert info["lives"] == (2 if script == (CUT, PLAYED) else 3)


class Idle(gym.Wrapper):
    """Takes a step in `reset`, as a wrapper of a user's may, and tells nothing of it."""

    def reset(self, *, seed=None, options=None):
        observation, _ = self.env.reset(seed=seed, options=options)
        observation, _, terminated, truncated, _ = self.env.step(0)
        if terminated or truncated:
            observation, _ = self.env.reset(options=options)
        return observation, {}


@pytest.mark.parametrize("make", [Environments, PlainEnvironments])
@pytest.mark.parametrize(
    ("wrap", "script", "games"),
    [
        # One life, whose end is followed by the end of the game in the idle step, or is not.
        (lambda env: env, [PLAYED, LOST, ENDED, PLAYED, LOST, LOST, PLAYED], [2]),
        (lambda env: env, [PLAYED, LOST, CUT, LOST, CUT, PLAYED], [2, 1]),
        (lambda env: env, [PLAYED, LOST, LOST, ENDED, PLAYED], [3]),
        (FireReset, [PLAYED] * 3 + [LOST, LOST, ENDED] + [PLAYED] * 2, [2]),
        # The next life is lost in `reset`, too; so the game of which it was is not over.
        (FireReset, [PLAYED] * 3 + [LOST, ENDED, LOST, LOST, LOST, PLAYED], [2]),
        (Idle, [PLAYED, PLAYED, LOST, LOST, ENDED, PLAYED, ENDED, PLAYED], [2, 2]),
        (lambda env: gym.wrappers.TimeLimit(env, 2), [PLAYED, PLAYED, ENDED, PLAYED], [2]),
    ],
)  # fmt: skip
def test_a_game_that_ends_within_reset_is_counted(make, wrap, script, games):
    environments = make(lambda: wrap(EpisodicLife(FakeGame(script))), 1, [1])
    row, found = environments.initial(), []
    frame = row["frame"][0]
    with contextlib.suppress(EnvError, StopIteration):  # the script is over
        while True:
            environments.step(np.zeros(1, np.int64))
            if row["game_done"][0]:
                assert row["done"][0] and row["game_return"][0] == row["game_step"][0]
                found.append(row["game_step"][0])
            assert row["game_done"][0] == (row["frame"][0] > frame)
            frame = row["frame"][0]
    assert found == games


@pytest.mark.parametrize(
    ("game", "full", "frames"),
    [("MsPacmanNoFrameskip-v4", False, 0), ("MsPacmanNoFrameskip-v4", True, 0),
     (BREAKOUT, True, 8)],
)  # fmt: skip
def test_fire_is_pressed_only_in_games_that_use_it(game, full, frames):
    env = pipeline(game, fire_reset=True, noop_max=0, full_action_space=full)
    assert env.reset(seed=1)[1]["episode_frame_number"] == frames


@pytest.mark.parametrize(
    ("env_id", "given", "expected"),
    [(PONG, None, 0), ("PongNoFrameskip-v0", None, 0.25), ("ALE/Pong-v5", None, 0.25),
     ("Pong-v4", None, 0), (PONG, 0.25, 0.25), ("ALE/Pong-v5", 0.0, 0)],
)  # fmt: skip
def test_sticky_actions_are_the_ids_own_unless_given(env_id, given, expected):
    ale = make_atari(env_id, sticky_actions=given).unwrapped.ale
    assert ale.getFloat("repeat_action_probability") == expected


def trajectory(env, seed, steps=100):
    rng = np.random.default_rng(0)
    rows = [env.reset(seed=seed)[0]]
    for _ in range(steps):
        observation, reward, terminated, truncated, _ = env.step(rng.integers(env.action_space.n))
        rows.append(observation)
        if terminated or truncated:
            rows.append(env.reset()[0])
    return np.stack(rows)


def test_a_seed_makes_idle_frames_and_games_reproducible():
    kwargs = {"episode_life": True, "fire_reset": True, "sticky_actions": 0.25}
    env = pipeline(BREAKOUT, **kwargs)
    first = trajectory(env, 5)
    np.testing.assert_array_equal(first, trajectory(pipeline(BREAKOUT, **kwargs), 5))
    np.testing.assert_array_equal(first, trajectory(env, 5))  # also in the middle of a game
    other = trajectory(env, 6)
    assert first.shape != other.shape or (first != other).any()


def test_a_game_is_truncated_at_the_emulators_frame_limit():
    assert make_atari(PONG).unwrapped.ale.getInt("max_num_frames_per_episode") == 108_000
    env = pipeline(PONG, noop_max=0, max_episode_frames=50, episode_life=True)
    env.reset(seed=1)
    ends = [env.step(0)[2:] for _ in range(13)]
    assert [(a, b, info["game_over"]) for a, b, info in ends[:-1]] == [(False, False, False)] * 12
    assert ends[-1][:2] == (False, True)
    assert ends[-1][2]["game_over"] and ends[-1][2]["episode_frame_number"] == 50
    assert env.reset()[1]["episode_frame_number"] == 0


@pytest.mark.parametrize(
    ("create", "shape"),
    [
        (lambda: make_atari(PONG), (210, 160)),
        (lambda: wrap_deepmind(make_atari(PONG)), (84, 84, 4)),
        (lambda: wrap_deepmind(make_atari(PONG), frame_stack=1), (84, 84, 1)),
        (lambda: pipeline(PONG), (4, 84, 84)),
        (lambda: pipeline(PONG, grayscale=False), (12, 84, 84)),
        (lambda: pipeline(PONG, frame_size=0), (4, 210, 160)),
        (lambda: pipeline(PONG, frame_size=None, frame_stack=1), (1, 210, 160)),
        (lambda: wrap_pytorch(make_atari(PONG)), (1, 210, 160)),
        (lambda: wrap_pytorch(make_atari(PONG, grayscale=False)), (3, 210, 160)),
    ],
)
def test_observations_fit_their_space_and_are_not_changed_later(create, shape):
    env = create()
    kept = [env.reset(seed=1)[0]]
    copies = [kept[0].copy()]
    for i in range(20):
        kept.append(env.step(i % 6)[0])
        copies.append(kept[-1].copy())
    for observation, copy in zip(kept, copies, strict=True):
        assert observation.shape == env.observation_space.shape == shape
        assert env.observation_space.contains(observation)
        np.testing.assert_array_equal(observation, copy)
        if shape[:2] == (84, 84):  # what wrap_pytorch then need not copy
            observation = observation.transpose(2, 0, 1)
        assert observation.flags.c_contiguous
    expected = env.step(0)[0]
    env.reset(seed=1)
    for i in range(20):
        env.step(i % 6)[0][:] = 0  # which changes no later one
    np.testing.assert_array_equal(env.step(0)[0], expected)


def test_actions_are_integers_in_range_after_a_reset():
    env = make_atari(PONG)
    with pytest.raises(gym.error.ResetNeeded):
        env.step(0)
    env.reset(seed=1)
    for action in (3, np.int64(3), np.array(3), np.uint8(3)):
        assert len(env.step(action)) == 5
    for action in (-1, 6, 1.0, "2", None, np.array([1, 2])):
        with pytest.raises(ValueError, match="integer from 0 to 5"):
            env.step(action)


PLAIN = {"entry_point": "ale_py.env:AtariEnv", "kwargs": {"game": "pong"}}
gym.register("Limited-v0", **PLAIN, max_episode_steps=9)
gym.register("Ram-v0", "ale_py.env:AtariEnv", kwargs={"game": "pong", "obs_type": "ram"})
gym.register("All-v0", "ale_py.env:AtariEnv", kwargs={"game": "pong", "full_action_space": True})
gym.register(
    "Wrapped-v0", **PLAIN, additional_wrappers=(gym.wrappers.RescaleObservation.wrapper_spec(),)
)


@pytest.mark.parametrize(
    ("env_id", "words"),
    [("CartPole-v1", r"not a game of ale-py.* give others without --env_backend ale_vector$"),
     ("Minigrid-v0", r"no environment .* give others without --env_backend ale_vector$"),
     ("PingNoFrameskip-v4", "is it .*PongNoFrameskip-v4"),
     ("pong", "is it .*Pong-v4"),
     ("ALE/Pog-v5", "is it ALE/Pong-v5"),
     ("NoSuchNamespace/Pong-v5", "NoSuchNamespace"),
     ("not an id", "PongNoFrameskip-v4"),
     ("Limited-v0", "registered with max_episode_steps.*max_num_frames_per_episode"),
     ("Wrapped-v0", "registered with additional_wrappers.*create_env"),
     ("Ram-v0", "registered with continuous actions, sound or RAM.*create_env")],
)  # fmt: skip
def test_a_wrong_id_is_refused_and_the_message_helps(env_id, words):
    flags = parse("--env", env_id)
    with pytest.raises(ValueError, match=words):
        create_atari(flags)
    with pytest.raises((ValueError, EnvError), match=words):
        AtariEnvironments(flags, 1, 0)


def test_an_id_may_have_all_actions():
    flags = parse("--env", "All-v0")
    assert create_atari(flags).action_space.n == AtariEnvironments(flags, 1, 0).num_actions == 18


@pytest.mark.parametrize(
    "kwargs",
    [{"noop_max": -1}, {"frame_skip": 0}, {"frame_size": -1}, {"frame_stack": 0},
     {"sticky_actions": 1.5}],
)  # fmt: skip
def test_a_wrong_option_is_refused_by_name(kwargs):
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        pipeline(PONG, **kwargs)


def parse(*args):
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default=BREAKOUT)
    add_flags(parser)
    return parser.parse_args(args)


def test_flags_default_to_the_classic_preprocessing():
    ours = pipeline(BREAKOUT, episode_life=True, fire_reset=True)
    np.testing.assert_array_equal(trajectory(create_atari(parse()), 1), trajectory(ours, 1))


def test_flags_and_the_render_mode_reach_the_wrappers():
    args = "--noop_max 0 --frame_skip 3 --no_episodic_life --no_fire_reset --color --frame_size 42"
    args += " --frame_stack 2 --sticky_actions 0.5 --full_action_space --no_max_pool"
    env = create_atari(parse(*args.split()), render_mode="rgb_array")
    assert env.action_space.n == 18
    assert env.unwrapped.ale.getFloat("repeat_action_probability") == 0.5
    observation, info = env.reset(seed=1)
    assert observation.shape == (6, 42, 42) and info["episode_frame_number"] == 0
    info = env.step(0)[-1]
    assert info["episode_frame_number"] == 3 and "game_over" not in info
    assert not env.get_wrapper_attr("max_pool")
    assert env.render().shape == (210, 160, 3) and env.render().dtype == np.uint8
    assert env.metadata["render_fps"] == 60 / 3  # of the console, so that videos have its speed
