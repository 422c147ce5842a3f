# SPDX-License-Identifier: Apache-2.0
"""A pool with all that a learner program builds around it, and what its rollouts should be."""

import re
import time

import nest
import numpy as np
import torch
from counting import LENGTH
from deadline import DEADLINE, Thread, wait_until
from stream import FIELDS

from libtorchbeast import ActorPool, BatchingQueue, DynamicBatcher

T = 4
FORK_KEYS = ["frame", "reward", "done", "episode_step", "episode_return"]
DTYPES = {key: torch.from_numpy(np.zeros(0, dtype)).dtype for key, dtype in FIELDS.items()}
STATE = (torch.full((1, 1), 5.0), {"h": torch.full((2, 1, 3), 7, dtype=torch.int64)})


def answer(env_outputs, state):
    """Act by what is seen; return what was seen, and how often the state has been changed."""
    frame = env_outputs["frame"] if isinstance(env_outputs, dict) else env_outputs[0]
    leaves = nest.flatten(state)
    count = leaves[0] if leaves else torch.zeros(frame.shape[:2])
    action = (frame[..., 0] + frame[..., 1] + 2 * frame[..., 2]) % 3
    outputs = (action, frame.clone(), count.clone())
    if isinstance(env_outputs, dict):
        outputs = dict(zip(("action", "seen", "count"), outputs, strict=True))
    return outputs, nest.map(lambda s: s + 1, state)


def act_zero(env_outputs, state):
    """Act the same, whatever the observation."""
    reward = env_outputs["reward"] if isinstance(env_outputs, dict) else env_outputs[1]
    action = torch.zeros(reward.shape, dtype=torch.int64)
    return ({"action": action} if isinstance(env_outputs, dict) else (action,)), state


class Rig:
    """A pool with all that a learner program builds around it, except for the learner."""

    def __init__(self, addresses, agent=answer, state=STATE, columns=1, limit=None, **options):
        self.queue = BatchingQueue(
            minimum_batch_size=columns, maximum_batch_size=columns, maximum_queue_size=limit
        )
        self.batcher = DynamicBatcher()
        length = options.pop("unroll_length", T)
        self.pool = ActorPool(length, self.queue, self.batcher, addresses, state, **options)
        self.agent = agent
        self.events = []
        self.threads = [Thread(self.watch), Thread(self.infer)]
        self.running = Thread(self.pool.run)

    def infer(self):
        for batch in self.batcher:
            inputs = batch.get_inputs()
            outputs = self.agent(*inputs)
            batch.set_outputs(outputs)
            nest.map(torch.zero_, inputs)  # both are ours, to be changed at will
            nest.map(lambda t: t.detach().zero_(), outputs)
            del batch

    def watch(self):
        for event in iter(self.pool.next_event, None):
            self.events.append(event)

    def take(self):
        """Return a copy of the next batch, after which the batch itself is ruined."""
        taker = Thread(next, self.queue)
        deadline = time.monotonic() + DEADLINE
        while taker.is_alive() and time.monotonic() < deadline:
            taker.join(0.05)
            if not self.running.is_alive():
                self.running.result()
                raise AssertionError("run() has ended")
        batch = taker.result(0)
        copy = nest.map(torch.clone, batch)
        nest.map(torch.zero_, batch)
        return copy

    def columns(self, count):
        """Return the next `count` columns."""
        columns = []
        while len(columns) < count:
            columns.extend(split(self.take()))
        return columns

    def wait_for_event(self, pattern):
        return wait_until(lambda: [e for e in self.events if re.search(pattern, e, re.DOTALL)])

    def close(self):
        """Close everything; run() must come back."""
        for closable in (self.batcher, self.queue):
            if not closable.is_closed():
                closable.close()
        try:
            self.running.result()
        finally:
            for thread in self.threads:
                thread.result()


def split(batch):
    """Return the columns of a batch, each ({key: [T + 1, ...]}, agent outputs, agent state)."""
    (env_outputs, agent_outputs), state = batch
    if isinstance(env_outputs, tuple):
        env_outputs = dict(zip(FORK_KEYS, env_outputs, strict=True))
    for key, dtype in DTYPES.items():
        assert key not in env_outputs or env_outputs[key].dtype == dtype
    return [
        (
            nest.map(lambda x, i=i: x[:, i], env_outputs),
            nest.map(lambda x, i=i: x[:, i], agent_outputs),
            nest.map(lambda x, i=i: x[:, i], state),
        )
        for i in range(env_outputs["reward"].shape[1])
    ]


def check_rows(env_outputs, agent_outputs, initial_agent_state, truncates):
    if isinstance(agent_outputs, dict):
        agent_outputs = tuple(agent_outputs[key] for key in ("action", "seen", "count"))
    actions, seen, counts = agent_outputs
    leaves = nest.flatten(initial_agent_state)
    assert len(actions) == T + 1
    for t in range(T + 1):
        row = {key: value[t] for key, value in env_outputs.items()}
        _, episode, step, _ = row["frame"].tolist()
        truncated = truncates and step == LENGTH
        if "truncated" in row:
            assert row["truncated"] == truncated and not row["terminated"]
        assert row["done"] == (step == 0)
        length = LENGTH if step == 0 and episode > 0 else step
        assert row["episode_step"] == length
        assert row["episode_return"] == length * (length + 1) / 2
        if "game_done" in row:
            assert row["game_done"] == row["done"]
            assert row["game_return"] == row["episode_return"]
            assert row["game_step"] == row["episode_step"]
        if t == 0:
            continue
        # The agent's outputs in row t are its answer to row t - 1, and led to row t.
        before = {key: value[t - 1] for key, value in env_outputs.items()}
        assert torch.equal(seen[t], before["frame"])
        if leaves:
            assert counts[t] == leaves[0].flatten()[0] + t - 1
        id_, old_episode, old_step, last_action = before["frame"].tolist()
        if truncates and old_step == LENGTH:  # the action was ignored
            wanted = [id_, old_episode + 1, 0, last_action]
            reward = 0
        else:
            action = (id_ + old_episode + 2 * old_step) % 3
            assert actions[t] == action
            wanted = [id_, old_episode, old_step + 1, action]
            reward = old_step + 1
            if old_step + 1 == LENGTH and not truncates:
                wanted[1:3] = [old_episode + 1, 0]
        assert row["frame"].tolist() == wanted
        assert row["reward"] == reward
        if "last_action" in row:
            assert row["last_action"] == wanted[3]


def by_environment(columns):
    """Return the columns of each environment in the order in which they came."""
    chains = {}
    for column in columns:
        chains.setdefault(int(column[0]["frame"][0, 0]), []).append(column)
    return chains


def assert_equal(a, b):
    nest.map_many2(lambda x, y: np.testing.assert_array_equal(x, y), a, b)


def check_chain(chain, initial_state, truncates=False):
    """Check that rollouts of one environment are what they should be from its very first row on."""
    first = {key: value[0] for key, value in chain[0][0].items()}
    assert first["frame"][1:].tolist() == [0, 0, 0]
    assert first["done"] and first["reward"] == first["episode_step"] == 0
    state, previous = initial_state, None
    for env_outputs, agent_outputs, initial_agent_state in chain:
        assert_equal(initial_agent_state, nest.map(lambda s: s[:, 0], state))
        if previous is not None:  # row 0 is the last one of the rollout before
            assert_equal(nest.map(lambda x: x[0], (env_outputs, agent_outputs)), previous)
        previous = nest.map(lambda x: x[-1], (env_outputs, agent_outputs))
        state = nest.map(lambda s: s + T, state)  # the agent answers T rows
        check_rows(env_outputs, agent_outputs, initial_agent_state, truncates)
