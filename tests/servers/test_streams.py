# SPDX-License-Identifier: Apache-2.0
"""PolyBeast's streams: inference, its metrics, and rollouts as the learner gets them."""

import threading
from types import SimpleNamespace

import gymnasium as gym
import pytest
import torch
from catch_env import Echo
from deadline import Thread
from stream import make_many, serving
from torch import nn

import libtorchbeast
import polybeast
from beast.actors.weights import LocalWeights
from beast.learners.learner_group import ALONE
from beast.servers import servers, streams

CPU = torch.device("cpu")
RUN = SimpleNamespace(follow=iter, watchdog=SimpleNamespace(follow=lambda batches, *_: batches))


@pytest.fixture
def created():
    """Streams to a server that is not there."""
    flags = polybeast.parser.parse_args(["--seed", "1"])
    found = SimpleNamespace(addresses=["unix:/nowhere"], num_envs=1, spaces="", env=None)
    found.observation_space, found.action_space = gym.spaces.Discrete(2), gym.spaces.Discrete(2)
    found.listening = None
    found.credentials = {}
    created = streams.Streams(flags, found, (), 0, CPU)
    yield created
    created.queue.close()
    created.batcher.close()


def test_no_batch_of_inference_is_lost_between_two_ticks(created):
    created.count_batch(5)
    assert created.metrics()["inference_batch_size"] == 5
    assert created.metrics()["inference_batch_size"] is None
    with created._lock:  # neither happens while the other does
        threads = [Thread(created.count_batch, 5), Thread(created.metrics)]
        for thread in threads:
            thread.assert_blocked()
    for thread in threads:
        thread.result()


def test_waits_of_a_stream_are_means_of_those_that_were_there(created):
    created._num_streams, means = 0, []
    for number, seconds in ((10, 20), (1, 23), (100, 123)):  # of all streams so far
        created._pool = SimpleNamespace(
            num_connected=lambda number=number: number,
            waits=lambda seconds=seconds: {"inference": seconds},
        )
        means.append(created.waits()["actor_wait_inference"])
    assert means == [2, 5, 6]


def test_events_are_logged_but_of_long_ones_not_each_in_whole(created, caplog):
    events = [f"stream {i}: {'x' * 2000}; trying again in {i} s" for i in range(3)]
    created._pool = SimpleNamespace(next_event=iter([*events, "stream 1: back", None]).__next__)
    created.log_events()
    whole, *others, last = caplog.messages
    assert whole == events[0] and last == "stream 1: back"
    for message, event in zip(others, events[1:], strict=True):
        assert message.startswith(event[:100]) and message.endswith(event[-100:])
        assert len(message) < 700


class Overtaken(nn.Module):
    """Answers with its weights, which are all the same in every whole version.

    While it answers, newer ones are published.
    """

    publish = None  # shared by the threads' copies, and so not copied with them

    def __init__(self, size=1000):
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.zeros(size)) for _ in range(2))

    def set(self, value):
        with torch.no_grad():
            self.one.fill_(value)
            self.other.fill_(value)

    def forward(self, inputs, agent_state):
        Overtaken.publish()
        shape = inputs["reward"].shape
        values = torch.cat([self.one, self.other])
        return {
            "action": torch.zeros(shape, dtype=torch.int64),
            "least": values.min().expand(shape).clone(),
            "most": values.max().expand(shape).clone(),
        }, agent_state + 1


def create_learner(model):
    return SimpleNamespace(lock=threading.RLock(), model=model, weights=LocalWeights(model))


class Answers:
    """Inference threads, and the streams and the learner as far as they know them."""

    def __init__(self, precision, model, num_threads):
        self.batcher = libtorchbeast.DynamicBatcher(batch_dim=1, maximum_batch_size=64)
        self.sizes, self.count_batch = [], lambda size: self.sizes.append(size)
        self.learner = create_learner(model)
        flags = polybeast.parser.parse_args(["--precision", precision])
        arguments = (polybeast.inference, flags, self.learner, CPU, self, RUN)
        self.threads = [Thread(*arguments) for _ in range(num_threads)]

    def close(self):
        self.batcher.close()
        for thread in self.threads:
            thread.result()


def test_answers_hold_the_version_of_the_weights_that_gave_them(monkeypatch):
    model = Overtaken()
    answers = Answers("fp32", Overtaken(), 2)
    learner = answers.learner

    def publish():
        with learner.lock:
            model.set(learner.weights.version)
            learner.weights.publish(model)

    monkeypatch.setattr(Overtaken, "publish", staticmethod(publish))

    def ask(num_columns):
        inputs = {"reward": torch.zeros(1, num_columns)}
        state, versions = torch.zeros(1, num_columns), []
        for count in range(1, 51):
            outputs, state = answers.batcher.compute((inputs, state))
            (version,) = set(outputs["policy_version"].flatten().tolist())
            assert outputs["policy_version"].shape == (1, num_columns)
            assert outputs["policy_version"].dtype == torch.int64
            for name in ("least", "most"):
                assert set(outputs[name].flatten().tolist()) == {version - 1}
            assert set(state.flatten().tolist()) == {count}
            versions.append(version)
        assert versions == sorted(set(versions))  # each time with newer weights

    for caller in [Thread(ask, 1 + i) for i in range(4)]:
        caller.result()
    answers.close()
    assert sum(answers.sizes) == 50 * (1 + 2 + 3 + 4)
    assert max(answers.sizes) <= 10


class Scale(nn.Module):
    """Scales the reward, and acts at random."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, inputs, agent_state):
        value = self.layer(inputs["reward"].unsqueeze(-1)).squeeze(-1)
        return {"action": torch.randint(3, value.shape), "value": value}, agent_state


def test_answers_in_bf16_are_of_the_newest_weights():
    model = Scale()
    answers = Answers("bf16", model, 1)
    for weight in (1.0, 2.0, 3.0):
        nn.init.constant_(model.layer.weight, weight + 2**-10)  # more than bf16 can hold
        answers.learner.weights.publish(model)
        inputs = ({"reward": torch.full((1, 2), 8.0)}, ())
        outputs, _ = Thread(answers.batcher.compute, inputs).result()
        assert outputs["value"].tolist() == [[8 * weight] * 2]
        assert outputs["value"].dtype == torch.float32
    answers.close()


T, PERIOD = 5, 8  # seven steps, the last of them to the limit, and the reset


def test_a_batch_says_who_acted_and_has_rows_of_time_limits():
    learner = create_learner(Scale())
    echoes = make_many(lambda: Echo(length=PERIOD - 1, truncates=True))
    with serving(None, "127.0.0.1:0", make_environments=echoes) as address:
        flags = f"--seed 1 --unroll_length {T} --batch_size 9 --server_addresses {address}"
        flags = polybeast.parser.parse_args(flags.split())
        with servers.connect(flags, None, lambda space: None, ALONE) as found:
            created = streams.Streams(flags, found, (), 0, CPU)
        inference = (polybeast.inference, flags, learner, CPU, created, RUN)
        threads = [Thread(created.run), Thread(*inference)]
        batch = Thread(next, streams.read_batches(created.queue, CPU, RUN)).result()
        created.queue.close()
        created.batcher.close()
        for thread in threads:
            thread.result()
    assert batch.policy_versions == [1] * 9 and batch.sources == {"streams": [0]}
    assert not {"actor", "policy_version"} & batch.rows.keys()
    assert batch.rows["reward"].shape == (T + 1, 9) and batch.agent_state == ()
    rows = batch.rows
    episode, step, _ = rows["frame"].long().unbind(-1)
    number = PERIOD * episode + step
    assert torch.equal(number, torch.arange(9) * T + torch.arange(T + 1)[:, None])
    assert torch.equal(rows["truncated"], number % PERIOD == PERIOD - 1)
    assert torch.equal(rows["done"], number % PERIOD == 0)
    assert not rows["terminated"].any()
    limits = number[rows["truncated"]] % T
    assert set(limits.tolist()) == set(range(T))  # at row 0, and so at row T, and at all between
    assert torch.equal(rows["reward"], torch.where(rows["done"], 0, number % PERIOD).float())
    final = rows["truncated"] | rows["done"] & (number > 0)
    assert set(rows["episode_return"][final].tolist()) == {28.0}
    assert set(rows["episode_step"][final].tolist()) == {7}
    # What the environment was given is what the model answered to the row before, except that an
    # answer to the last row of an episode is not given to anybody.
    seen, given = rows["frame"][..., 2].long(), rows["action"]
    assert torch.equal(seen, rows["last_action"])
    given = torch.where(rows["done"], seen, given)
    assert torch.equal(seen[1:], given[1:])
