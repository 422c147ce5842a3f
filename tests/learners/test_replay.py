# SPDX-License-Identifier: Apache-2.0
"""What replay.py promises: targets of a loop over episodes, stacks to the bit, no torn row."""

import contextlib
import functools
import sys

import ale_py
import gymnasium as gym
import numpy as np
import pytest
import torch
from catch_env import Mixed
from deadline import Thread

import atari_wrappers
import monobeast
from beast.envs.environments import Environments, create_environments
from beast.learners.replay import Replay
from beast.learners.sum_tree import SumTree
from beast.nest import map_nest
from libtorchbeast.rows import Rows

KEYS = ("frame", "reward", "done", "truncated", "terminated", "last_action")
T, DISCOUNTING = 5, 0.9

gym.register_envs(ale_py)
SHORT = {"game": "breakout", "repeat_action_probability": 0.0, "max_num_frames_per_episode": 100}
gym.register("ReplayedBreakout-v0", "ale_py.env:AtariEnv", kwargs=SHORT)


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 10**6])
def test_sum_tree_finds_what_cumulative_sums_do(size):
    rng = np.random.default_rng(size)
    tree, priorities = SumTree(size), np.zeros(size)
    for _ in range(20):
        places = rng.integers(size, size=500)
        # Multiples of 2**-20, some of them 0, so that all sums are exact.
        new = rng.integers(0, 2**20, 500) * (rng.random(500) < 0.7) / 2**20
        new[-1] = 0.5
        tree.set(places, new)
        priorities[places] = new
        sums = priorities.cumsum()
        assert tree.total == sums[-1]
        values = np.append(
            rng.random(500) * sums[-1], [0, sums[places[-1]] * (sums[places[-1]] < sums[-1])]
        )
        found = tree.find(values)
        np.testing.assert_array_equal(found, np.searchsorted(sums, values, side="right"))
        np.testing.assert_array_equal(tree.get(found), priorities[found])
    last = np.flatnonzero(priorities)[-1]
    assert tree.find(np.array([sums[-1], np.nextafter(sums[-1], np.inf)])).tolist() == [last] * 2


def test_sum_tree_does_not_drift_and_never_finds_a_zero():
    rng, size = np.random.default_rng(0), 5000
    tree, priorities = SumTree(size), np.zeros(size)
    for _ in range(500):
        places = rng.integers(size, size=200)
        new = 10 ** rng.uniform(-12, 12, 200) * (rng.random(200) < 0.3)
        tree.set(places, new)
        priorities[places] = new
        found = tree.find(np.append(rng.random(100), 1) * tree.total)
        assert (priorities[found] > 0).all()
    assert tree.total == pytest.approx(priorities.sum(), rel=1e-12)
    tree.set(np.arange(size), 0)
    assert tree.total == 0
    tree.set(np.array([7]), 1e-12)
    assert tree.total == 1e-12


class Column:
    """One environment: it plays random episodes, remembers them, and hands out rollouts.

    A frame is [column, episode, step in it], and so the key of a row.
    """

    def __init__(self, env, resets_later=False, seed=0):
        self.env, self.resets_later = env, resets_later
        self.random = np.random.default_rng([seed, env])
        self.episodes = []  # [rewards, kind]: "terminated", "truncated", or None while it lasts
        self.keys, self.starts = [], []  # of all rows handed out; numbers of the rows 0 among them
        self.restart()

    def restart(self):
        """Begin as the first rollout of a new process does; what was played counts as truncated."""
        if self.episodes and self.episodes[-1][1] is None:
            self.episodes[-1][1] = "truncated"
        self.rows = Rows(1, np.zeros((1, 3), np.float32), resets_later=self.resets_later)
        self.first = True
        self.episodes.append([[], None])
        self.last = self._copy()

    def rollout(self):
        """Return the arguments of `append`."""
        first, self.first = self.first, False
        self.starts.append(len(self.keys) - (not first))
        rows = [self.last]
        if first:
            self.keys.append(self._key())
        for _ in range(T):
            self._step()
            rows.append(self._copy())
            self.keys.append(self._key())
        self.last = rows[-1]
        rollout = {key: np.stack([row[key] for row in rows]) for key in self.last}
        return self.env, rollout, (state_of(*rollout["frame"][0]),), first

    def target(self, episode, step, n_step):
        """Return reward, discount, steps, and the key to bootstrap from, by a plain loop."""
        rewards, kind = self.episodes[episode]
        value, k = 0.0, 0
        while k < n_step and step + k < len(rewards):
            value += DISCOUNTING**k * rewards[step + k]
            k += 1
        if step + k == len(rewards) and kind == "terminated":
            return value, 0.0, k, None
        return value, DISCOUNTING**k, k, (episode, step + k)

    def is_end(self, episode, step):
        rewards, kind = self.episodes[episode]
        return kind is not None and step == len(rewards)

    def _key(self):
        return len(self.episodes) - 1, len(self.episodes[-1][0])

    def _step(self):
        row, before = self.rows.row, (self.env, *self._key())
        if self.rows.at_end[0]:
            self.rows.begin(0)
            self.episodes.append([[], None])
        else:
            row["last_action"][0] = action_of(*before)
            reward = float(np.float32(self.random.normal()))
            kind = self.random.choice(["", "terminated", "truncated"], p=[0.7, 0.15, 0.15])
            kinds = kind == "terminated", kind == "truncated"
            begins = self.rows.step(0, reward, *kinds, True)
            self.episodes[-1][0].append(reward)
            self.episodes[-1][1] = str(kind) or None
            if begins:
                self.episodes.append([[], None])
        self.answer = q_of(*before)

    def _copy(self):
        self.rows.row["frame"][0] = self.env, *self._key()
        q, max_q = getattr(self, "answer", (0, 0))
        row = {key: self.rows.row[key][0].copy() for key in KEYS}
        return row | {"q": np.float32(q), "max_q": np.float32(max_q)}


def action_of(env, episode, step):
    return (31 * env + 7 * episode + step) % 11


def q_of(env, episode, step):
    """Return Q of the action taken, and the largest one."""
    q = np.sin(env + 2 * episode + 3 * step)
    return q, q + step % 3


def state_of(env, episode, step):
    return np.full((2, 1, 4), 10_000 * env + 100 * episode + step, np.float32)


def example(column):
    _, rollout, state, _ = Column(column).rollout()
    return {key: x[:, None] for key, x in rollout.items()}, state


def make_replay(capacity=400, num_envs=3, **kwargs):
    return Replay(*example(0), capacity, num_envs, T, discounting=DISCOUNTING, **kwargs)


def check_samples(replay, columns, L, n):
    """Compare every sample that can be drawn with the episodes; return how many there are."""
    expected = set()
    for column in columns:
        num_rows = len(column.keys)
        starts = range(num_rows) if L == 1 else column.starts
        expected |= {
            (column.env, start)
            for start in starts
            if max(0, num_rows - replay.capacity) <= start <= num_rows - L - n
            and (L > 1 or not column.is_end(*column.keys[start]))
        }
    # Of as many equal shares each place has at least one to itself.
    sample = replay.sample(2 * len(expected) + 1)
    pairs = zip(*(x.tolist() for x in sample.handle), strict=True)
    drawn = {pair: b for b, pair in enumerate(pairs)}
    assert drawn.keys() == expected
    for (env, start), b in drawn.items():
        column = columns[env]
        state = state_of(env, *column.keys[start])
        assert L == 1 or (sample.agent_state[0][:, b : b + 1] == state).all()
        for t in range(L):
            key = column.keys[start + t]
            assert sample.rows["frame"][t, b].tolist() == [env, *key]
            assert sample.mask[t, b] == (not column.is_end(*key))
            if sample.mask[t, b]:
                reward, discount, steps, bootstrap_key = column.target(*key, n)
                assert sample.actions[t, b] == action_of(env, *key)
                assert sample.returns[t, b] == pytest.approx(reward, abs=1e-5)
                assert sample.discounts[t, b] == pytest.approx(discount, rel=1e-6)
                assert sample.bootstrap[t, b] == (t + steps if L > 1 else 1)
                bootstrap = sample.rows["frame"][sample.bootstrap[t, b], b].tolist()
                assert discount == 0 or bootstrap == [env, *bootstrap_key]
    return len(expected)


@pytest.mark.parametrize("resets_later", [False, True], ids=["same step", "later"])
@pytest.mark.parametrize("n_step", [1, 3, 7])
@pytest.mark.parametrize("L", [1, T, 13])
def test_samples_are_those_of_a_loop_over_episodes(L, n_step, resets_later):
    rng = np.random.default_rng(n_step)
    columns = [Column(env, resets_later) for env in range(3)]
    replay = make_replay(sequence_length=L, n_step=n_step)
    assert not replay.can_sample()
    with pytest.raises(ValueError, match="no sequence is complete"):
        replay.sample(2)
    # Not in step: column 2 gets most rollouts. The places are filled several times over.
    for i, env in enumerate(rng.choice(3, size=200, p=[0.1, 0.3, 0.6])):
        if rng.random() < 0.05:
            columns[env].restart()
        replay.append(*columns[env].rollout())
        if i in (8, 40, 90, 199):
            assert check_samples(replay, columns, L, n_step) > 2
    num_rows = [len(column.keys) for column in columns]
    assert len({n % replay.capacity for n in num_rows}) == 3 and num_rows[2] > 4 * replay.capacity
    assert len(replay) == sum(min(n, replay.capacity) for n in num_rows)
    kinds = [kind for column in columns for _, kind in column.episodes]
    assert {"terminated", "truncated"} <= set(kinds)


def test_a_whole_rollout_comes_back_with_its_state():
    """As IMPALA replays it: T + 1 rows, among them those at which the rollout meets the next."""
    column = Column(0)
    replay = make_replay(num_envs=1, sequence_length=T)
    rollouts = {}
    for _ in range(100):
        env, rollout, state, first = column.rollout()
        replay.append(env, rollout, state, first)
        rollouts[rollout["frame"][0].tobytes()] = rollout, state
    sample = replay.sample(200)
    for b in range(200):
        rollout, state = rollouts[sample.rows["frame"][0, b].tobytes()]
        for key, x in rollout.items():
            np.testing.assert_array_equal(sample.rows[key][:, b], x)
        np.testing.assert_array_equal(sample.agent_state[0][:, b : b + 1], state[0])
    assert sample.agent_state[0].flags.c_contiguous and sample.rows["frame"].shape == (
        T + 1,
        200,
        3,
    )


def test_rewards_are_clipped_in_returns_but_not_in_rows():
    column, replay = Column(0), make_replay(num_envs=1, n_step=2, reward_limit=0.5)
    for _ in range(10):
        replay.append(*column.rollout())
    for episode, (rewards, _) in enumerate(column.episodes):
        column.episodes[episode][0] = np.clip(rewards, -0.5, 0.5).tolist()
    check_samples(replay, [column], 1, 2)
    assert abs(replay.sample(50).rows["reward"]).max() > 0.5


@pytest.mark.parametrize("L", [1, 13])
def test_new_sequences_enter_with_a_priority_of_their_own(L):
    n, columns = 3, [Column(env) for env in range(2)]

    def initial_priority(answers, returns, discounts, bootstrap, mask):
        max_q = np.take_along_axis(answers["max_q"], bootstrap, axis=0)
        errors = np.abs(returns + discounts * max_q - answers["q"][:L])
        return np.where(mask, errors, 0).max(axis=0) + 1

    replay = make_replay(
        num_envs=2, sequence_length=L, n_step=n, alpha=0.5, initial_priority=initial_priority
    )
    for env in [0, 1, 1] * 40:
        replay.append(*columns[env].rollout())
    sample = replay.sample(3000, beta=1)
    expected = []
    for env, start in zip(*sample.handle, strict=True):
        errors, column = [0.0], columns[env]
        for key in column.keys[start : start + L]:
            if not column.is_end(*key):
                value, discount, _, bootstrap_key = column.target(*key, n)
                max_q = q_of(env, *bootstrap_key)[1] if bootstrap_key else 0
                errors.append(abs(value + discount * max_q - q_of(env, *key)[0]))
        expected.append((max(errors) + 1) ** 0.5)
    expected = np.array(expected)
    assert expected.max() > 1.5 * expected.min()
    np.testing.assert_allclose(sample.weights, expected.min() / expected, rtol=1e-5)


def test_new_transitions_enter_with_the_largest_priority_so_far():
    column, replay = Column(0), make_replay(num_envs=1, alpha=0.5)
    replay.append(*column.rollout())
    old = replay.sample(100).handle
    replay.update(old, np.full(100, 9.0))
    replay.update(old, np.full(100, 4.0))
    replay.append(*column.rollout())
    sample = replay.sample(1000, beta=1)
    is_new = sample.handle.starts > old.starts.max()
    assert 0 < is_new.sum() < 1000
    np.testing.assert_allclose(sample.weights, np.where(is_new, 2 / 3, 1), rtol=1e-6)


def test_draws_are_stratified_and_weighted_by_priority():
    alpha, beta, column = 0.6, 0.4, Column(0)
    replay = make_replay(num_envs=1, alpha=alpha)
    for _ in range(30):
        replay.append(*column.rollout())
    sample = replay.sample(2 * 10**4)
    starts = np.unique(sample.handle.starts)
    counts = np.bincount(sample.handle.starts)[starts]
    assert (abs(counts - len(sample.weights) / len(starts)) <= 2).all()  # chance would allow 30
    assert (sample.weights == 1).all()

    priorities = np.random.default_rng(0).uniform(0.1, 10, starts.max() + 1)
    replay.update(sample.handle, priorities[sample.handle.starts])
    sample = replay.sample(10**4, beta)
    P = priorities[starts] ** alpha / (priorities[starts] ** alpha).sum()
    counts = np.bincount(sample.handle.starts, minlength=starts.max() + 1)[starts]
    np.testing.assert_allclose(counts, 10**4 * P, atol=2)
    weights = (len(starts) * P) ** -beta
    expected = dict(zip(starts.tolist(), weights / weights.max(), strict=True))
    np.testing.assert_allclose(
        sample.weights, [expected[start] for start in sample.handle.starts.tolist()], rtol=1e-5
    )
    assert sample.weights.dtype == np.float32
    small = replay.sample(2, beta)
    assert small.weights.max() == 1


def test_priorities_of_what_was_overwritten_are_dropped():
    column, replay = Column(0), make_replay(capacity=100, num_envs=1, alpha=1)
    for _ in range(20):
        replay.append(*column.rollout())
    sample = replay.sample(300)
    for _ in range(10):
        replay.append(*column.rollout())
    there = sample.handle.starts >= len(column.keys) - replay.capacity
    assert 0 < there.sum() < 300
    replay.update(sample.handle, np.where(there, 5, 1e6))
    drawn = replay.sample(1000, beta=1)
    old = drawn.handle.starts <= sample.handle.starts.max()
    np.testing.assert_allclose(drawn.weights, np.where(old, 1 / 5, 1))
    for _ in range(40):
        replay.append(*column.rollout())
    replay.update(sample.handle, np.full(300, 1e6))
    assert (replay.sample(1000, beta=1).weights == 1).all()
    replay.update(replay.sample(300).handle, np.zeros(300))  # still drawn
    check_samples(replay, [column], 1, 1)


def test_mistakes_are_refused():
    with pytest.raises(ValueError, match="capacity 15 is 15 rows .* need 37: give at least 37"):
        make_replay(15, 1, sequence_length=20, n_step=5)
    column, replay = Column(0), make_replay(num_envs=2)
    env, rollout, state, first = column.rollout()
    with pytest.raises(ValueError, match="the first one of a process as first"):
        replay.append(env, rollout, state)
    replay.append(env, rollout, state, first)
    lost = column.rollout()
    with pytest.raises(ValueError, match="append rollouts in order"):
        replay.append(*column.rollout())
    with pytest.raises(ValueError, match="must begin with an episode"):
        replay.append(0, lost[1] | {"done": np.zeros(T + 1, bool)}, state, first=True)
    with pytest.raises(ValueError, match="has 5 rows; it must be 6"):
        replay.append(0, map_nest(lambda x: x[:-1], lost[1]), state)
    replay.append(*lost)
    sample = replay.sample(4)
    for wrong in (np.nan, np.inf, -1):
        with pytest.raises(ValueError, match="negative or not finite"):
            replay.update(sample.handle, np.array([1, 1, wrong, 1]))


def play(environments, num_rows, seed=0):
    """Return copies of so many rows, each a dict of nests [N, ...]."""
    rng, space = np.random.default_rng(seed), environments.action_space
    rows = [map_nest(np.copy, environments.initial())]
    while len(rows) < num_rows:
        draws = [_draw(space, rng) for _ in rows[0]["done"]]
        rows.append(map_nest(np.copy, environments.step(np.stack(draws))))
    return [{key: row[key] for key in KEYS} for row in rows]


def _draw(space, rng):
    if isinstance(space, gym.spaces.Discrete):
        return np.int64(rng.integers(space.n))
    return rng.uniform(space.low, space.high).astype(space.dtype)


def check_rows(rows, capacity, stack_size, length=10, **kwargs):
    """Replay rows; compare all that can be drawn with them, to the bit."""
    N = len(rows[0]["done"])
    stacked = map_nest(lambda *x: np.stack(x), *rows)
    replay = Replay(stacked, (), capacity, N, length, stack_size=stack_size, **kwargs)
    for at in range(0, len(rows) - length, length):
        for env in range(N):
            rollout = map_nest(
                lambda x, i=env, t=at: torch.from_numpy(x[t : t + length + 1, i]), stacked
            )
            replay.append(env, rollout, (), first=at == 0)
    sample = replay.sample(4 * len(replay))
    envs, starts = sample.handle
    end = at + length  # number of the newest row
    assert set(starts) <= set(range(end + 1 - replay.capacity + stack_size - 1, end))
    ends = (stacked["truncated"] | stacked["terminated"])[-replay.capacity + stack_size - 1 : -1]
    assert len({*zip(envs, starts, strict=True)}) > 0.9 * (~ends).sum()
    steps = 1 if len(sample.rows["done"]) == 2 else np.arange(len(sample.rows["done"]))[:, None]
    numbers = starts + (np.arange(2)[:, None] if steps == 1 else steps)
    map_nest(lambda x, y: np.testing.assert_array_equal(x[numbers, envs], y), stacked, sample.rows)
    np.testing.assert_array_equal(stacked["last_action"][starts + 1, envs], sample.actions[0])
    return replay


ATARI = {
    "--frame_skip 20": {0, 1},
    "--frame_skip 20 --no_episodic_life --color --frame_stack 2": {0, 1},
    "--frame_skip 8 --env ReplayedBreakout-v0 --frame_stack 3": {0, 1},
    "--frame_skip 20 --env_backend ale_vector": {0, 2},
    "--frame_skip 20 --env_backend ale_vector --no_episodic_life": {0, 2},
    "--frame_skip 8 --env_backend ale_vector --env ReplayedBreakout-v0 --color": {0, 2},
    "--frame_skip 8 --frame_stack 1": {0},
}


@pytest.mark.whole
@pytest.mark.parametrize("arguments", ATARI)
def test_stacks_are_those_of_the_environments_to_the_bit(arguments):
    flags = monobeast.parser.parse_args(["--env", "BreakoutNoFrameskip-v4", *arguments.split()])
    create_env = functools.partial(atari_wrappers.create_atari, render_mode=None)
    with contextlib.closing(create_environments(flags, create_env, 2, 1, "env")) as envs:
        rows = play(envs, 301)
        replay = check_rows(rows, 200, envs.stack_size)
    done = np.stack([row["done"] for row in rows])
    assert done.sum() > 10
    assert set(replay._stacks) == ATARI[arguments]
    newest = rows[0]["frame"][0].nbytes // flags.frame_stack
    assert replay._frames.nbytes == 200 * newest  # 7,056 a row of gray frames
    assert newest == 7056 * (3 if "--color" in arguments else 1)


@pytest.mark.parametrize("padding", ["reset", "zero"])
def test_stacks_of_vectors_are_rebuilt_too(padding):
    def create_env():
        env = gym.make("CartPole-v1", max_episode_steps=15)
        return gym.wrappers.FrameStackObservation(env, 3, padding_type=padding)

    with contextlib.closing(Environments(create_env, 2, 0)) as envs:
        replay = check_rows(play(envs, 301), 200, 3)
    assert replay._frames.shape == (200, 1, 4)


@pytest.mark.parametrize("order", ["newest first", "not of the row before"])
def test_frames_that_are_no_stacks_are_refused(order):
    frames = np.arange(40)[:, None] + np.arange(4)[:: 1 if order[0] == "o" else -1]
    frames[0] = 3
    if order != "newest first":
        frames = frames[:, ::-1] * 1
        frames[3, 1] = 0
    rows = {key: np.zeros(11, bool) for key in ("done", "truncated", "terminated")}
    rows |= {"reward": np.zeros(11), "last_action": np.zeros(11), "frame": frames[:11]}
    rows["done"][0] = True
    replay = Replay(map_nest(lambda x: x[:, None], rows), (), 100, 1, 10, stack_size=4)
    with pytest.raises(ValueError, match="give stack_size 1"):
        replay.append(0, rows, (), first=True)


@pytest.mark.parametrize("zeros", [False, True])
def test_a_screen_that_never_changes_is_rebuilt(zeros):
    """Then each row's stack is that of any other, also of row 0, before which there is none."""
    frames = np.full((41, 1, 4), 7, np.uint8)
    if zeros:
        for i in range(4):
            frames[i, 0, : 3 - i] = 0
    rows = [{key: np.zeros(1) for key in KEYS} | {"frame": frame} for frame in frames]
    rows = [row | {key: np.zeros(1, bool) for key in KEYS[2:5]} for row in rows]
    rows[0]["done"][0] = True
    check_rows(rows, 40, 4)


def test_nests_and_continuous_actions_come_back():
    with contextlib.closing(Environments(Mixed, 2, 0)) as envs:
        check_rows(play(envs, 201), 150, 1, length=1)
    with contextlib.closing(Environments(lambda: gym.make("Pendulum-v1"), 3, 0)) as envs:
        rows = play(envs, 301)
        replay = check_rows(rows, 450, 1, length=1)
    assert replay.sample(8).actions.dtype == np.float32 and replay.sample(8).actions.shape == (
        1,
        8,
        1,
    )


@pytest.mark.whole
def test_a_row_that_is_being_overwritten_is_never_returned(monkeypatch):
    """Rows of 16 KiB that carry their number are written as fast as possible, while drawn."""
    num_envs, length, size = 2, 4, 2048
    done = np.zeros(length + 1, bool)
    rows = {key: done for key in ("done", "truncated", "terminated")}
    numbers = np.zeros(length + 1, np.int64)
    rows |= {"frame": np.zeros((length + 1, size), np.int64), "last_action": numbers}
    rows["reward"] = numbers.astype(np.float32)
    example, state = map_nest(lambda x: x[:, None], rows), (np.zeros((1, 1, size), np.int64),)
    replay = Replay(example, state, 64, num_envs, length, sequence_length=5, n_step=1)
    finished = []

    def write():
        last = 0
        while not finished:
            at = np.arange(last, last + length + 1)
            rollout = rows | {"frame": np.repeat(at[:, None], size, axis=1), "last_action": at}
            rollout["reward"], rollout["done"] = at.astype(np.float32), done | (at == 0)
            for env in range(num_envs):
                replay.append(env, rollout, (np.full((1, 1, size), last),), first=last == 0)
            last += length
        return last

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    writer = Thread(write)
    try:
        num_draws = 0
        while num_draws < 10**5:
            if not replay.can_sample():
                continue
            sample = replay.sample(20)
            expected = sample.handle.starts + np.arange(6)[:, None]
            frames = sample.rows["frame"]
            assert (frames == expected[..., None]).all()
            np.testing.assert_array_equal(sample.rows["reward"], expected)
            np.testing.assert_array_equal(sample.actions, expected[1:])
            assert (sample.agent_state[0] == expected[0, :, None]).all()
            num_draws += expected.size
    finally:
        finished.append(True)
        sys.setswitchinterval(interval)
    assert writer.result() > 1000 * length  # rows, of which 32 are there at a time
