# SPDX-License-Identifier: Apache-2.0
"""PolyBeast's streams: inference, its metrics, and rollouts as the learner gets them."""

import threading
from types import SimpleNamespace

import pytest
import torch
from catch_env import Echo
from deadline import Thread
from stream import serving
from torch import nn

import libtorchbeast
import monobeast
import polybeast
from beast import servers, streams
from beast.environments import Environments
from beast.weights import LocalWeights

CPU = torch.device("cpu")
RUN = SimpleNamespace(follow=iter, watchdog=SimpleNamespace(follow=lambda batches, *_: batches))


def create_streams(arguments="", addresses=("unix:/nowhere",), spaces="", num_envs=1):
    """Return streams to servers that need not be there yet."""
    flags = polybeast.parser.parse_args(["--seed", "1", *arguments.split()])
    found = SimpleNamespace(addresses=addresses, num_envs=num_envs, spaces=spaces, env=None)
    found.credentials = {}
    return streams.Streams(flags, found, (), 0, CPU)


class BlockingList(list):
    """A list to which nothing is added before `may_go` is set."""

    def __init__(self):
        super().__init__()
        self.entered, self.may_go = threading.Event(), threading.Event()

    def append(self, item):
        self.entered.set()
        self.may_go.wait()
        super().append(item)


def test_no_batch_of_inference_is_lost_between_two_ticks():
    created = create_streams()
    created._batch_sizes = sizes = BlockingList()
    counting = Thread(created.count_batch, 5)
    assert sizes.entered.wait(10)
    reading = Thread(lambda: created.metrics()["inference_batch_size"])
    reading.assert_blocked()  # or else it would read the list before the 5 is in it
    sizes.may_go.set()
    counting.result()
    assert reading.result() == 5
    assert created.metrics()["inference_batch_size"] is None
    created.close()


# -------------------------------------------------------------------------------------- inference


class Even(nn.Module):
    """Answers with its weights, which are all the same in every whole version."""

    def __init__(self, size=1000):
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.zeros(size)) for _ in range(2))

    def set(self, value):
        with torch.no_grad():
            self.one.fill_(value)
            self.other.fill_(value)

    def forward(self, inputs, agent_state):
        shape = inputs["reward"].shape
        values = torch.cat([self.one, self.other])
        return {
            "action": torch.zeros(shape, dtype=torch.int64),
            "least": values.min().expand(shape).clone(),
            "most": values.max().expand(shape).clone(),
        }, agent_state + 1


class Answers:
    """Inference threads, and the streams and the learner as far as they know them."""

    def __init__(self, precision, model):
        self.batcher = libtorchbeast.DynamicBatcher(batch_dim=1, maximum_batch_size=64)
        self.sizes, self.count_batch = [], lambda size: self.sizes.append(size)
        self.learner = SimpleNamespace(
            lock=threading.RLock(), model=model, weights=LocalWeights(model)
        )
        self.flags = polybeast.parser.parse_args(["--precision", precision])
        self.threads = []

    def start(self, num_threads):
        arguments = (polybeast.inference, self.flags, self.learner, CPU, self, RUN)
        self.threads += [Thread(*arguments) for _ in range(num_threads)]

    def close(self):
        self.batcher.close()
        for thread in self.threads:
            thread.result()


class Overtaken(Even):
    """While it answers, newer weights are published."""

    publish = None  # shared by the threads' copies, and so not copied with them

    def forward(self, inputs, agent_state):
        Overtaken.publish()
        return super().forward(inputs, agent_state)


def test_answers_hold_the_version_of_the_weights_that_gave_them(monkeypatch):
    model = Even()
    answers = Answers("fp32", Overtaken())
    learner = answers.learner

    def publish():
        with learner.lock:
            model.set(learner.weights.version)
            learner.weights.publish(model)

    monkeypatch.setattr(Overtaken, "publish", staticmethod(publish))
    answers.start(2)

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


class OneLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, inputs, agent_state):
        value = self.layer(inputs["reward"].unsqueeze(-1)).squeeze(-1)
        assert value.dtype == torch.bfloat16
        return {"action": torch.zeros(value.shape, dtype=torch.int64), "value": value}, ()


def test_answers_in_bf16_are_of_the_newest_weights():
    model = OneLayer()
    answers = Answers("bf16", model)
    answers.start(1)
    for weight in (1.0, 2.0, 3.0):
        nn.init.constant_(model.layer.weight, weight)
        nn.init.zeros_(model.layer.bias)
        answers.learner.weights.publish(model)
        inputs = ({"reward": torch.full((1, 2), 10.0)}, ())
        outputs, _ = Thread(answers.batcher.compute, inputs).result()
        assert outputs["value"].tolist() == [[10 * weight] * 2]
        assert outputs["value"].dtype == torch.float32
    answers.close()


# ----------------------------------------------------------------------- time limits over the wire

T, PERIOD = 5, 8  # seven steps, the last of them to the limit, and the reset
LIMITS = range(PERIOD - 1, 9 * T, PERIOD)
both = pytest.mark.parametrize("program", [monobeast, polybeast], ids=lambda p: p.__name__)


class Table(nn.Module):
    """What it answers to each row of one stream of Echo is a parameter of that row's own."""

    def __init__(self, num_rows=9 * T + 1):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.policy_logits = nn.Parameter(torch.randn(num_rows, 3, generator=generator))
        self.baseline = nn.Parameter(torch.randn(num_rows, generator=generator))

    def initial_state(self, batch_size):
        return ()

    def forward(self, inputs, agent_state):
        row = row_number(inputs).clamp(max=len(self.baseline) - 1)
        policy_logits = self.policy_logits[row]
        action = torch.distributions.Categorical(logits=policy_logits).sample()
        baseline = self.baseline[row]
        return {"policy_logits": policy_logits, "baseline": baseline, "action": action}, agent_state


def row_number(rows):
    episode, step, _ = rows["frame"].long().unbind(-1)
    return PERIOD * episode + step


def echo(num_envs, seed, name):
    env = lambda: Echo(length=PERIOD - 1, truncates=True)  # noqa: E731
    return Environments(env, num_envs or 1, seed, name)


@pytest.fixture(scope="module")
def batch():
    """Nine rollouts of one environment with a time limit, as the learner gets them."""
    model = Table()
    learner = SimpleNamespace(lock=threading.RLock(), model=model, weights=LocalWeights(model))
    arguments = f"--unroll_length {T} --batch_size 9"
    with serving(None, "127.0.0.1:0", make_environments=echo) as address:
        flags = polybeast.parser.parse_args(["--server_addresses", address])
        with servers.connect(flags, None) as found:
            created = create_streams(arguments, [address], found.spaces)
        inference = (polybeast.inference, flags, learner, CPU, created, RUN)
        threads = [Thread(created.run), Thread(*inference)]
        batch = Thread(next, streams.read_batches(created.queue, CPU, RUN)).result()
        created.close()
        for thread in threads:
            thread.result()
    return batch


def gradients(program, rows, model, **overrides):
    """Return metrics, and a row of gradient for each row of the stream: logits and baseline."""
    flags = program.parser.parse_args(["--discounting", "0.9", "--grad_norm_clipping", "1e9"])
    vars(flags).update(overrides)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    metrics = program.learn(flags, model, rows, (), optimizer)
    return metrics, torch.cat([model.policy_logits.grad, model.baseline.grad[:, None]], dim=1)


def test_a_batch_says_who_acted_and_with_which_weights(batch):
    assert batch.policy_versions == [1] * 9 and batch.sources == {"streams": [0]}
    assert not {"actor", "policy_version"} & batch.rows.keys()
    assert batch.rows["reward"].shape == (T + 1, 9) and batch.agent_state == ()


def test_a_time_limit_comes_over_the_wire_as_a_row_of_its_own(batch):
    rows = batch.rows
    number = row_number(rows)
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


@both
@pytest.mark.parametrize("limit", LIMITS)
def test_the_value_of_a_reset_row_changes_no_gradient_before_it(batch, program, limit):
    model = Table()
    _, before = gradients(program, batch.rows, model)
    with torch.no_grad():
        model.baseline[limit + 1] += 5
    _, after = gradients(program, batch.rows, model)
    assert torch.equal(after[: limit + 1], before[: limit + 1])
    assert not torch.equal(after[limit + 1], before[limit + 1])  # but its own
    assert not before[limit].any()  # there is no transition out of the last row


@both
@pytest.mark.parametrize("limit", LIMITS)
def test_the_last_reward_before_a_time_limit_counts(batch, program, limit):
    model = Table()
    metrics, before = gradients(program, batch.rows, model, reward_clipping="none")
    assert metrics["steps"] == 9 * T - len(LIMITS)
    is_last = row_number(batch.rows) == limit
    rows = batch.rows | {"reward": batch.rows["reward"] + is_last}
    _, after = gradients(program, rows, model, reward_clipping="none")
    changed = (after != before).any(dim=1)
    assert changed[limit - 1] and not changed[limit:].any()
