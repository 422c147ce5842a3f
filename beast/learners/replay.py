# SPDX-License-Identifier: Apache-2.0
"""Replay of rollouts: transitions or sequences, drawn uniformly or by priority. NumPy alone.

    replay = Replay(rows, state, capacity, num_envs, unroll_length, ...)
    replay.append(i, rollout, state, first)           a writer thread: rollouts of environment i
    sample = replay.sample(batch_size, beta)          the learner
    replay.update(sample.handle, priorities)          with prioritized replay

dqn.py   n_step=3, stack_size=4, alpha=0.6, initial_priority=...; sequences: agent states,
         sequence_length = burn-in + length trained
sac.py   unroll_length=1, no agent state, and all else by default: vectors, continuous actions

Shapes: T unroll length, B batch, L sequence length, R rows of a sample, K frames in a stack.
libtorchbeast/rows.py says what a row holds. Each environment (a column) has a ring of places and
counts its own rows, so columns need not be in step. A row's number is never used twice: it shows
when a place was overwritten. Of stacked frames only the newest is stored.
"""

import threading
from typing import Any, NamedTuple

import numpy as np

from beast.errors import FlagError
from beast.learners.sum_tree import SumTree
from beast.nest import leaves_of, map_nest
from beast.processes.machine import check_memory

SMALLEST_PRIORITY = 1e-6  # a priority of 0 would never be drawn, and so never be updated
OTHER_BYTES = 18  # bytes of a row in the sum tree and in flags
# How the stack of a row begins: it goes on from the row before; or an episode begins, before whose
# first frame there are copies of it (atari_wrappers.py) or zeros (ale-py's vector environment).
CONTINUES, REPEATS, ZEROS = range(3)


class Handle(NamedTuple):
    """Where a sample was drawn, for `update`."""

    envs: np.ndarray  # [B] columns
    starts: np.ndarray  # [B] numbers of first rows


class Sample(NamedTuple):
    """Transitions out of L rows of B sequences, and the rows to evaluate for them."""

    rows: dict  # nests of arrays [R, B, ...]: the L rows and the n_step after them; with L = 1 only
    # the row that is left, and the one to bootstrap from
    actions: np.ndarray  # [L, B, ...], taken in rows 0..L - 1
    returns: np.ndarray  # [L, B] float32, discounted sums of up to n_step rewards
    discounts: np.ndarray  # [L, B] float32, of the value of the bootstrap row; 0 after an end
    bootstrap: np.ndarray  # [L, B] int64, index into `rows`
    mask: np.ndarray  # [L, B] bool, false where no transition leaves the row
    agent_state: Any  # nest of arrays [layers, B, ...] before row 0
    weights: np.ndarray  # [B] float32, importance weights; the largest is 1
    handle: Handle


class Replay:
    """Rows of several environments, for one writer of each column and any number of samplers.

    Args:
      example_row: dict of nests of arrays [T, B, ...] of any T and B: the keys to store, among them
        frame, reward, done, truncated, terminated and last_action.
      example_state: nest of arrays [layers, B, ...], () where none is needed.
      capacity: rows in all; each column holds its share, rounded up to whole rollouts.
      num_envs: columns.
      unroll_length: T of the rollouts that are appended.
      sequence_length: L. With 1 a sample begins in any row that a transition leaves, else in row 0
        of a rollout, before which the agent state is known.
      n_step: rewards in a return.
      discounting: discount factor of a step.
      stack_size: K, frames stacked along the first axis of `frame`, the newest last; 1: none.
      reward_limit: rewards are clipped to [-reward_limit, reward_limit] in returns, not in rows.
      alpha: exponent of priorities; 0: uniform.
      initial_priority: function from (answers, returns, discounts, bootstrap, mask), all as of a
        Sample of B new ones, to priorities [B]. `answers` are the rows that follow each row of the
        sample, without frames: in them is what the agent answered. None: new ones have the largest
        priority so far, at first 1.
      seed: of the samples.

    Raises:
      FlagError: the capacity is too small, or the memory has no room for it.
    """

    def __init__(
        self, example_row, example_state, capacity, num_envs, unroll_length, *,
        sequence_length=1, n_step=1, discounting=0.99, stack_size=1, reward_limit=np.inf,
        alpha=0.0, initial_priority=None, seed=0,
    ):  # fmt: skip
        self._T, self._L, self._K, self.n_step = unroll_length, sequence_length, stack_size, n_step
        # Rows in a column.
        self.capacity = -(-capacity // (num_envs * unroll_length)) * unroll_length
        # Rows of a start and after it, the last of which has the answer to the one before.
        self._needed = sequence_length + n_step + (initial_priority is not None)
        # Some start must be left while the next rollout overwrites the oldest rows.
        least = self._needed + 2 * unroll_length + stack_size + 1
        if self.capacity < least:
            raise FlagError(
                f"--replay_capacity {capacity:,} is {self.capacity} rows of each of {num_envs} "
                f"environments, but sequences of {sequence_length} rows, returns of {n_step} steps "
                f"and rollouts of {unroll_length} need {least}: give at least {least * num_envs}"
            )
        _check_memory(example_row, num_envs * self.capacity, stack_size)
        self._discounting, self._reward_limit = discounting, reward_limit
        self._alpha, self._initial_priority = alpha, initial_priority
        places = num_envs * self.capacity
        example, states = map_nest(np.asarray, (dict(example_row), example_state))
        if stack_size > 1:
            shape = getattr(example["frame"], "shape", (0, 0, 1))
            if shape[2] % stack_size != 0:
                raise ValueError(f"frames are no stacks of {stack_size}: give stack_size 1")
            example["frame"] = example["frame"][:, :, : shape[2] // stack_size]
        self._rows = map_nest(lambda x: np.zeros((places, *x.shape[2:]), x.dtype), example)
        self._frames = self._rows.pop("frame")  # with stacks only the newest one of each
        places_of_states = places // unroll_length  # rollouts begin at least T rows apart
        self._states = map_nest(
            lambda x: np.zeros((len(x), places_of_states, *x.shape[2:]), x.dtype), states
        )
        self._stacks = np.zeros(places, np.uint8)  # CONTINUES, REPEATS or ZEROS
        self._is_start = np.zeros(places, bool)  # row 0 of a rollout
        # The lock guards what follows. Rows are copied without it: those that are being overwritten
        # count as gone before the copy begins, those that are new as there when it is done.
        self._lock = threading.Lock()
        self._written = np.zeros(num_envs, np.int64)  # rows of each column so far
        self._reserved = np.zeros(num_envs, np.int64)  # the same, with those that are being written
        self._tree, self._largest = SumTree(places), 1.0
        self._random = np.random.default_rng(seed)

    def __len__(self):
        """Return the number of rows that can be drawn or are needed by those that can."""
        return int(np.minimum(self._written, self.capacity).sum())

    def can_sample(self):
        """Return whether any transition or sequence is complete."""
        return self._tree.total > 0

    def count_bytes(self):
        """Return the bytes of all arrays, which take memory as they are filled."""
        arrays = self._stacks, self._is_start, self._rows, self._frames, self._states
        return sum(array.nbytes for array in leaves_of(arrays)) + self._tree.num_bytes

    def append(self, env, rollout, state=(), first=False):
        """Append a rollout; those of one column come in their order, from one thread at a time.

        Args:
          env: the column.
          rollout: dict of nests of arrays [T + 1, ...], row 0 of which is the last one appended.
          state: nest of arrays [layers, 1, ...]: the agent state before row 0.
          first: the first rollout of a process, which does not go on from the last one.

        Raises:
          ValueError: the rollout does not follow the last one, or its stacks cannot be rebuilt.
        """
        rows = {key: map_nest(np.asarray, rollout[key]) for key in self._rows}
        frames = map_nest(np.asarray, rollout["frame"])
        self._check_order(env, rows, first)
        with self._lock:
            start = self._written[env] if first else self._written[env] - 1
            end = start + self._T + 1
            if first and start > 0:  # no transition leads to this rollout
                self._rows["truncated"][self._places(env, start - 1)] = True
            oldest, self._reserved[env] = self._oldest(env), end
            self._tree.set(self._places(env, np.arange(oldest, self._oldest(env))), 0)
        numbers = np.arange(start if first else start + 1, end)
        self._write(env, rows, frames, numbers)
        self._is_start[self._places(env, start)] = True
        at = slice(None), self._places(env, start) // self._T
        map_nest(lambda s, x: s.__setitem__(at, np.asarray(x)[:, 0]), self._states, state)
        if first and self._K > 1 and not np.array_equal(self._stack(env, numbers), frames):
            raise ValueError(f"frames are no stacks of {self._K} in a row: give stack_size 1")
        complete = np.arange(max(0, self._written[env] - self._needed + 1), end - self._needed + 1)
        priorities = self._initial_priorities(env, complete)
        with self._lock:
            self._written[env] = end
            self._tree.set(self._places(env, complete), priorities)

    def sample(self, batch_size, beta=0.0):
        """Return a Sample, one of each of `batch_size` equal shares of the sum of priorities.

        Args:
          beta: exponent of importance weights.
        """
        envs, starts = np.zeros((2, batch_size), np.int64)
        priorities, result = np.zeros(batch_size), None
        todo = np.arange(batch_size)
        while todo.size > 0:
            with self._lock:
                envs[todo], starts[todo], priorities[todo] = self._draw(todo, batch_size)
            part = self._read(envs[todo], starts[todo])
            if result is None:
                result = part
            else:
                map_nest(lambda x, y, i=todo: x.__setitem__((slice(None), i), y), result, part)
            with self._lock:  # those that were overwritten meanwhile are drawn again
                todo = todo[starts[todo] < self._oldest(envs[todo])]
        weights = (priorities / priorities.min()) ** -beta
        return Sample(*result, weights.astype(np.float32), Handle(envs, starts))

    def update(self, handle, priorities):
        """Set priorities [B] of a sample; what was overwritten since then is left out."""
        priorities = self._powers(priorities)
        with self._lock:
            there = handle.starts >= self._oldest(handle.envs)
            places = self._places(handle.envs[there], handle.starts[there])
            self._tree.set(places, priorities[there])
            self._largest = max(self._largest, priorities[there].max(initial=0))

    def _places(self, envs, numbers):
        return envs * self.capacity + numbers % self.capacity

    def _oldest(self, envs):
        """Return the number of the oldest row at which a sample may begin: its stack is there."""
        return np.maximum(0, self._reserved[envs] - self.capacity + self._K - 1)

    def _powers(self, priorities):
        """Return priorities to the power of alpha."""
        priorities = np.asarray(priorities, np.float64)
        if not (np.isfinite(priorities).all() and (priorities >= 0).all()):
            raise ValueError("priorities are negative or not finite: skip the update that has them")
        return np.maximum(priorities, SMALLEST_PRIORITY) ** self._alpha

    def _check_order(self, env, rows, first):
        if len(rows["done"]) != self._T + 1:
            raise ValueError(f"the rollout has {len(rows['done'])} rows; it must be {self._T + 1}")
        if first:
            if not rows["done"][0]:
                raise ValueError("a first rollout must begin with an episode (done in row 0)")
            return
        last = self._places(env, self._written[env] - 1)
        same = [self._rows[key][last] == rows[key][0] for key in ("done", "reward")]
        if self._written[env] == 0 or not all(same):
            raise ValueError(
                f"row 0 is not the last row of column {env}: append rollouts in order, and the "
                "first one of a process as first"
            )

    def _write(self, env, rows, frames, numbers):
        """Write the last rows of a rollout to the places of `numbers`."""
        places, n = self._places(env, numbers), len(numbers)
        if self._K > 1:
            frames = frames.reshape(self._T + 1, self._K, -1, *frames.shape[2:])
            self._stacks[places] = CONTINUES
            if (begins := np.flatnonzero(rows["done"][-n:])).size > 0:
                self._stacks[places[begins]] = _classify(frames, begins + len(frames) - n)
            frames = frames[:, -1]
        self._is_start[places] = False
        stored, new = (self._rows, self._frames), (rows, frames)
        map_nest(lambda s, x: s.__setitem__(places, x[-n:]), stored, new)

    def _initial_priorities(self, env, starts):
        """Return priorities of rows that are complete now; 0 where no sample begins."""
        places = self._places(env, starts)
        if self._L > 1:
            begins = self._is_start[places]
        else:
            begins = ~(self._rows["truncated"][places] | self._rows["terminated"][places])
        priorities = begins * self._largest
        if self._initial_priority is not None and begins.any():
            numbers, _, *targets = self._targets(env, starts[begins])
            places = self._places(env, numbers + 1)
            answers = map_nest(lambda x: x[places], self._rows)
            priorities[begins] = self._powers(self._initial_priority(answers, *targets))
        return priorities

    def _draw(self, strata, num_strata):
        """Return columns, numbers of rows, and priorities."""
        total = self._tree.total
        if total == 0:
            raise ValueError("no sequence is complete yet: wait until can_sample")
        places = self._tree.find((strata + self._random.random(len(strata))) * total / num_strata)
        newest = self._written[envs := places // self.capacity] - 1
        return envs, newest - (newest - places) % self.capacity, self._tree.get(places)

    def _read(self, envs, starts):
        """Return the fields of a Sample up to agent_state."""
        numbers, *targets = self._targets(envs, starts)
        places = self._places(envs, numbers)

        def take(x):
            return x.take(places, axis=0)

        rows = map_nest(take, self._rows)
        rows["frame"] = self._stack(envs, numbers) if self._K > 1 else map_nest(take, self._frames)
        at = self._places(envs, starts) // self._T
        return rows, *targets, map_nest(lambda x: x.take(at, axis=1), self._states)

    def _targets(self, envs, starts):
        """Return numbers of rows [R, B], actions, returns, discounts, bootstrap, mask [L, B]."""
        L, n = self._L, self.n_step
        numbers = starts + np.arange(L + n)[:, None]
        places = self._places(envs, numbers)
        truncated, terminated = self._rows["truncated"][places], self._rows["terminated"][places]
        ends = self._rows["done"][places] | terminated
        rewards = self._rows["reward"][places].astype(np.float64)
        rewards = rewards.clip(-self._reward_limit, self._reward_limit)
        returns, discounts = np.zeros((L, len(starts))), np.ones((L, len(starts)))
        steps, goes_on = np.zeros((L, len(starts)), np.int64), np.ones((L, len(starts)), bool)
        for k in range(1, n + 1):  # from a row to the k-th after it
            returns += np.where(goes_on, discounts * rewards[k : k + L], 0)
            steps += goes_on
            discounts *= np.where(goes_on, self._discounting * ~ends[k : k + L], 1)
            goes_on &= ~(ends | truncated)[k : k + L]
        actions = self._rows["last_action"][places[1 : L + 1]]
        mask = ~(truncated | terminated)[:L]
        if L == 1:  # the rows between are not needed
            numbers, bootstrap = np.stack([starts, starts + steps[0]]), np.ones_like(steps)
        else:
            bootstrap = steps + np.arange(L)[:, None]
        returns, discounts = returns.astype(np.float32), discounts.astype(np.float32)
        return numbers, actions, returns, discounts, bootstrap, mask

    def _stack(self, envs, numbers):
        """Return the stacks [..., K * C, ...] of rows `numbers`, from the newest frames."""
        K, frames = self._K, self._frames
        envs, numbers = (x[..., None] for x in np.broadcast_arrays(envs, numbers))
        back = np.arange(K)
        begins = self._stacks[self._places(envs, numbers - back[:-1])]  # [..., K - 1]
        begins = np.concatenate([begins, np.full_like(envs, REPEATS)], axis=-1)
        nearest = (begins != CONTINUES).argmax(axis=-1)[..., None]  # rows back, at most K - 1
        back = back[::-1]  # the oldest frame comes first
        stacks = frames.take(self._places(envs, numbers - np.minimum(back, nearest)), axis=0)
        if (zeros := np.take_along_axis(begins, nearest, axis=-1) == ZEROS).any():
            stacks[zeros & (back > nearest)] = 0
        return stacks.reshape(*numbers.shape[:-1], -1, *frames.shape[2:])


def _check_memory(rows, num_rows, stack_size):
    """Refuse a replay that the memory has no room for; agent states, which are few, aside."""
    sizes = {n: sum(np.asarray(x)[0, 0].nbytes for x in leaves_of(rows[n])) for n in rows}
    row_bytes = sum(sizes.values()) - sizes["frame"] * (1 - 1 / stack_size)
    check_memory((row_bytes + OTHER_BYTES) * num_rows, "--replay_capacity", num_rows)


def _classify(frames, begins):
    """Return how the stacks of rows `begins` begin; frames are [T + 1, K, C, ...]."""
    older, newest = frames[begins, :-1], frames[begins, -1:]
    before = frames[begins - 1, 1:]  # row 0 is the first row of a process, so it continues nothing
    axes = tuple(range(1, older.ndim))
    continues = (older == before).all(axis=axes) & (begins > 0)
    repeats, zeros = (older == newest).all(axis=axes), ~older.any(axis=axes)
    if not (continues | repeats | zeros).all():
        raise ValueError("episodes begin with stacks that cannot be rebuilt: give stack_size 1")
    return np.select([continues, repeats], [CONTINUES, REPEATS], ZEROS)
