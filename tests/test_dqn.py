# SPDX-License-Identifier: Apache-2.0
"""dqn.py against the definitions of its parts, and the program from the command line."""

import contextlib
import copy
import math
import os
import signal
import threading
import types

import gymnasium as gym
import numpy as np
import pytest
import torch
from deadline import Thread
from program import HELPERS, ROOT, Program, column, last_step, load, read_rows, split_words

import dqn
from beast.actors import rollout_buffers
from beast.actors.weights import SharedWeights, Version
from beast.errors import FlagError
from beast.learners import nets
from beast.learners.learner import Learner
from beast.learners.replay import Replay
from beast.learners.replay_feed import ReplayFeed, announce_refill, to_tensors
from beast.nest import map_nest

BOX, ACTIONS = gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(3)
SCRIPT = HELPERS / "fast.py"
SMALL = "--num_actors 2 --envs_per_actor 2 --learning_starts 200 --replay_capacity 5000"


def parse(arguments=""):
    flags = dqn.parser.parse_args(["--disable_cuda", "--num_actors", "2", *arguments.split()])
    return dqn.resolve(flags, ACTIONS)


def create_nets(flags, seed=0):
    torch.manual_seed(seed)
    return [dqn.Net(BOX, 3, **dqn.net_arguments(flags)) for _ in range(2)]


def make_sample(flags, B=6, seed=0):
    """Return a Sample of tensors with random ends, as a Replay draws it."""
    random = np.random.default_rng(seed)
    L, n = flags.burn_in + flags.sequence_length, flags.n_step
    T, num_rows = flags.unroll_length, 20 * (L + n)
    num_rollouts = num_rows // T + 2
    rows = {
        "frame": random.normal(size=(num_rollouts * T + 1, 4)).astype(np.float32),
        "reward": random.normal(size=num_rollouts * T + 1).astype(np.float32),
        "done": random.random(num_rollouts * T + 1) < 0.15,
        "truncated": random.random(num_rollouts * T + 1) < 0.1,
        "terminated": random.random(num_rollouts * T + 1) < 0.05,
        "last_action": random.integers(3, size=num_rollouts * T + 1),
        "policy_logits": random.normal(size=(num_rollouts * T + 1, 3)).astype(np.float32),
        "baseline": random.normal(size=num_rollouts * T + 1).astype(np.float32),
    }
    rows["done"][0] = True
    model = create_nets(flags)[0]
    state = tuple(s.numpy() for s in model.initial_state(1))
    example = {name: x[None, :1] for name, x in rows.items()}
    replay = Replay(
        example, state, num_rollouts * T, 1, T, sequence_length=L, n_step=n,
        discounting=flags.discounting, alpha=flags.priority_exponent, seed=seed,
    )  # fmt: skip
    for i in range(num_rollouts - 1):
        part = slice(i * T, (i + 1) * T + 1)
        new = tuple(random.normal(size=s.shape).astype(np.float32) for s in state)
        replay.append(0, {name: x[part] for name, x in rows.items()}, new, first=i == 0)
    sample = replay.sample(B)
    return to_tensors(sample, torch.device("cpu"))._replace(
        weights=torch.from_numpy(random.random(B).astype(np.float32))
    )


def values_of(model, sample, t, i):
    """Return the values of row t of sequence i of a sample, by a net without an LSTM."""
    inputs = {name: x[t, i][None, None] for name, x in sample.rows.items()}
    return model(inputs, ())[0]["policy_logits"][0, 0].detach().double()


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dueling", [False, True])
def test_the_loss_is_that_of_a_loop_over_transitions(double, dueling):
    switches = " --no_double" * (not double) + " --no_dueling" * (not dueling)
    flags = parse(f"--num_atoms 1 --n_step 3{switches}")
    (model, target), sample = create_nets(flags), make_sample(flags)
    loss, metrics, priorities = dqn.compute_loss(flags, model, target, sample)
    total, errors = 0.0, []
    for i in range(6):
        following = values_of(target, sample, 1, i)
        choosing = values_of(model, sample, 1, i) if double else following
        value = sample.returns[0, i] + sample.discounts[0, i] * following[choosing.argmax()]
        error = float(value - values_of(model, sample, 0, i)[sample.actions[0, i]])
        errors.append(abs(error))
        total += float(sample.weights[i]) * 0.5 * error**2 / 6
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert priorities.tolist() == pytest.approx(errors, rel=1e-4)
    assert metrics["mean_error"].item() == pytest.approx(np.mean(errors), rel=1e-4)


@pytest.mark.parametrize("num_atoms", [1, 51])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(
    "lstm", ["", "--use_lstm --burn_in 3 --sequence_length 4 --unroll_length 4"]
)
def test_forbidden_actions_count_for_nothing(num_atoms, double, lstm):
    flags = parse(f"{lstm} --no_dueling --num_atoms {num_atoms}" + " --no_double" * (not double))
    mask = gym.spaces.MultiBinary(5)
    space = gym.spaces.Dict(observation=BOX, action_mask=mask)
    small = create_nets(flags)
    large = [dqn.Net(space, 5, **dqn.net_arguments(flags)) for _ in small]
    for one, other in zip(small, large, strict=True):
        other.advantage.bias.data[3 * num_atoms :] = torch.linspace(
            9 - 18 * (num_atoms > 1), 9, num_atoms
        ).repeat(2)
        for x, y in zip(one.parameters(), other.parameters(), strict=True):
            x.data.copy_(y.data[tuple(map(slice, x.shape))])
    sample = make_sample(flags)
    frame = sample.rows["frame"]
    mask = torch.tensor([1, 1, 1, 0, 0], dtype=torch.int8).repeat(*frame.shape[:2], 1)
    # Of rows in which no return ends, it does not matter.
    ends = torch.zeros(frame.shape[:2], dtype=torch.bool).scatter(0, sample.bootstrap, True)
    mask[~ends] = 1
    assert not ends.all()
    rows = sample.rows | {"frame": {"observation": frame, "action_mask": mask}}
    expected = dqn.compute_loss(flags, *small, sample)
    torch.testing.assert_close(
        dqn.compute_loss(flags, *large, sample._replace(rows=rows)), expected
    )
    allowed = rows["frame"] | {"action_mask": torch.ones_like(mask)}
    sample = sample._replace(rows=rows | {"frame": allowed})
    assert not torch.allclose(dqn.compute_loss(flags, *large, sample)[2], expected[2])


def test_a_dueling_net_adds_advantages_whose_mean_is_zero():
    flags = parse("--num_atoms 1")
    model, _ = create_nets(flags)
    inputs = {"frame": torch.randn(2, 3, 4), "done": torch.zeros(2, 3, dtype=torch.bool)}
    values = model(inputs, ())[0]["policy_logits"]
    features = model.trunk(*model.observations(inputs["frame"].flatten(0, 1)))
    expected = model.value(features).view(2, 3)
    torch.testing.assert_close(values.mean(dim=-1), expected)


def test_the_projection_is_that_of_a_loop_over_atoms():
    torch.manual_seed(0)
    support = torch.linspace(-10, 10, 51, dtype=torch.float64)
    returns, discounts = 6 * torch.randn(7, dtype=torch.float64), torch.rand(7).double()
    probabilities = torch.randn(7, 51, dtype=torch.float64).softmax(dim=-1)
    projected = dqn.project(returns, discounts, probabilities, support)
    expected = torch.zeros(7, 51, dtype=torch.float64)
    for i in range(7):
        for j in range(51):
            atom = float((returns[i] + discounts[i] * support[j]).clamp(-10, 10))
            place = (atom + 10) / 0.4
            below = min(int(place), 49)
            expected[i, below] += probabilities[i, j] * (1 - (place - below))
            expected[i, below + 1] += probabilities[i, j] * (place - below)
    torch.testing.assert_close(projected, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(projected.sum(dim=-1), torch.ones(7).double(), rtol=0, atol=1e-13)
    inside = returns.abs() + discounts * 10 < 10  # where nothing is cut off, the mean is kept
    mean = returns + discounts * (probabilities * support).sum(dim=-1)
    assert inside.any()
    torch.testing.assert_close(((projected * support).sum(dim=-1))[inside], mean[inside])


def test_the_categorical_loss_is_its_definition():
    flags = parse()
    (model, target), sample = create_nets(flags), make_sample(flags)
    loss, _, priorities = dqn.compute_loss(flags, model, target, sample)
    total = 0.0
    for i in range(6):
        inputs = [{k: x[t, i][None, None] for k, x in sample.rows.items()} for t in range(2)]
        best = model.compute_values(model.compute_logits(inputs[1], ())[0])[0, 0].argmax()
        following = target.compute_logits(inputs[1], ())[0][0, 0, best].softmax(dim=-1)
        goal = dqn.project(sample.returns[0, i], sample.discounts[0, i], following, model.support)
        taken = model.compute_logits(inputs[0], ())[0][0, 0, sample.actions[0, i]]
        log_taken = taken.log_softmax(dim=-1)
        total -= (sample.weights[i] * (goal * log_taken).sum()).item() / 6
        divergence = torch.where(goal > 0, goal * (goal.log() - log_taken), 0).sum().item()
        assert priorities[i].item() == pytest.approx(divergence, rel=1e-3)
    assert loss.item() == pytest.approx(total, rel=1e-5)


def test_rescaling_is_inverted_to_float32():
    x = torch.cat([torch.linspace(-1, 1, 2001), torch.logspace(-6, 5, 500)])
    x = torch.cat([x, -x])
    torch.testing.assert_close(dqn.unscale(dqn.rescale(x)), x, rtol=2e-6, atol=1e-6)
    exact = x.double()
    exact = exact.sign() * ((exact.abs() + 1).sqrt() - 1) + 1e-3 * exact
    torch.testing.assert_close(dqn.rescale(x).double(), exact, rtol=1e-6, atol=1e-12)
    ordered = dqn.rescale(x.sort().values)
    assert (ordered.diff() >= 0).all() and torch.equal(dqn.rescale(-x), -dqn.rescale(x))


RECURRENT = "--use_lstm --burn_in 10 --sequence_length 8 --n_step 2 --unroll_length 5"


def test_burn_in_brings_the_state_up_to_date_without_a_gradient():
    flags = parse(RECURRENT)
    (model, target), sample = create_nets(flags), make_sample(flags)
    rows = dict(sample.rows)
    rows["frame"] = rows["frame"].clone().requires_grad_()
    state = tuple(s.clone().requires_grad_() for s in sample.agent_state)
    loss, _, _ = dqn.compute_loss(
        flags, model, target, sample._replace(rows=rows, agent_state=state)
    )
    loss.backward()
    gradient = rows["frame"].grad.abs().sum(dim=(1, 2))
    assert (gradient[:10] == 0).all() and (gradient[10:18] > 0).all() and (gradient[18:] == 0).all()
    assert all(s.grad is None for s in state)
    logits = dqn.run_net(flags, model, sample.rows, sample.agent_state, 10, 18)
    whole, _ = model.compute_logits(sample.rows, sample.agent_state)
    torch.testing.assert_close(logits, whole[10:])


def test_an_end_within_a_sequence_hides_what_comes_after_it():
    flags = parse(RECURRENT)
    (model, _), sample = create_nets(flags), make_sample(flags)
    done = sample.rows["done"].clone()
    done[:] = False
    done[14] = True
    sample = sample._replace(rows=sample.rows | {"done": done})
    before = dqn.run_net(flags, model, sample.rows, sample.agent_state, 10, 18)
    frame = sample.rows["frame"].clone()
    frame[13] += 1
    changed = sample.rows | {"frame": frame}
    after = dqn.run_net(flags, model, changed, sample.agent_state, 10, 18)
    assert torch.equal(before[:3], after[:3]) and not torch.equal(before[3], after[3])
    assert torch.equal(before[4:], after[4:])


def test_the_recurrent_loss_is_that_of_a_loop_over_rows():
    flags = parse(RECURRENT + " --value_rescaling")
    (model, target), sample = create_nets(flags), make_sample(flags)
    loss, _, priorities = dqn.compute_loss(flags, model, target, sample)
    logits = [
        net.compute_values(net.compute_logits(sample.rows, sample.agent_state)[0]).detach()
        for net in (model, target)
    ]
    losses, count, errors = 0.0, 0, [[] for _ in range(6)]
    for i in range(6):
        for t in range(10, 18):
            if not sample.mask[t, i]:
                continue
            end = sample.bootstrap[t, i]
            best = logits[0][end, i].argmax()
            value = dqn.unscale(logits[1][end, i, best])
            goal = dqn.rescale(sample.returns[t, i] + sample.discounts[t, i] * value)
            error = abs(float(goal - logits[0][t, i, sample.actions[t, i]]))
            losses += float(sample.weights[i]) * 0.5 * error**2
            errors[i].append(error)
            count += 1
    assert loss.item() == pytest.approx(losses / count, rel=1e-4)
    expected = [0.9 * max(e) + 0.1 * np.mean(e) for e in errors]
    assert priorities.tolist() == pytest.approx(expected, rel=1e-3)


def test_first_priorities_are_of_what_the_actors_computed():
    flags = parse(RECURRENT)
    sample = make_sample(flags)
    answers = {name: torch.roll(x, -1, 0).numpy() for name, x in sample.rows.items()}
    parts = (x.numpy() for x in (sample.returns, sample.discounts, sample.bootstrap, sample.mask))
    priorities = dqn.initial_priorities(flags, answers, *parts)
    for i in range(6):
        errors = []
        for t in range(10, 18):
            if sample.mask[t, i]:
                value = answers["baseline"][sample.bootstrap[t, i], i]
                taken = answers["policy_logits"][t, i, answers["last_action"][t, i]]
                target = sample.returns[t, i] + sample.discounts[t, i] * value
                errors.append(abs(float(target - taken)))
        assert priorities[i] == pytest.approx(0.9 * max(errors) + 0.1 * np.mean(errors), rel=1e-4)


def test_epsilons_are_those_of_their_flags():
    assert dqn.final_epsilons(parse("--envs_per_actor 2")).tolist() == pytest.approx([0.01] * 4)
    recurrent = dqn.final_epsilons(parse("--use_lstm --envs_per_actor 4"))
    assert recurrent[0].item() == pytest.approx(0.4)
    assert recurrent[-1].item() == pytest.approx(0.4**8)
    given = dqn.final_epsilons(parse("--use_lstm --final_epsilon 0.2 --envs_per_actor 1"))
    assert given.tolist() == pytest.approx([0.2] * 2)
    torch.manual_seed(0)
    values = torch.tensor([1, 0.5, -1, nets.FORBIDDEN, -torch.inf]).expand(100_000, 2, 5)
    action = torch.zeros(100_000, 2, dtype=torch.int64)
    explored = dqn.explore(action, values, torch.tensor([0.0, 0.6]))
    assert not explored[:, 0].any()
    shares = torch.bincount(explored[:, 1], minlength=5) / 100_000
    assert shares.tolist() == pytest.approx([0.6, 0.2, 0.2, 0, 0], abs=0.01)


def test_priorities_go_back_and_targets_follow_at_intervals():
    flags = parse("--num_atoms 1 --target_interval 3 --batch_size 6")
    (model, target), sample = create_nets(flags), make_sample(flags)
    arrays = map_nest(torch.Tensor.numpy, sample._replace(handle=())._asdict())
    drawn = sample._replace(**arrays | {"handle": sample.handle})
    asked, updates = [], []
    replay = types.SimpleNamespace(
        sample=lambda *args: asked.append(args) or drawn, update=lambda *args: updates.append(args)
    )
    feed, optimizer = ReplayFeed(replay, 1.0, 0, 6, 0), dqn.create_optimizer(flags, model)[0]
    expected = dqn.compute_loss(flags, model, target, sample)[2]
    before = copy.deepcopy(target.state_dict())
    dqn.learn(flags, model, target, feed, optimizer, 2, beta=0.5)
    assert asked == [(6, 0.5)] * 2 and [handle for handle, _ in updates] == [sample.handle] * 2
    np.testing.assert_allclose(updates[0][1], expected.numpy(), rtol=1e-6)
    torch.testing.assert_close(target.state_dict(), before, rtol=0, atol=0)
    dqn.learn(flags, model, target, feed, optimizer, 1, beta=0.5)
    torch.testing.assert_close(target.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_updates_before_one_that_is_not_finite_are_recorded(monkeypatch):
    flags, compute_loss, records, states = parse("--batch_size 6"), dqn.compute_loss, [], []
    model, target = create_nets(flags)
    learner = Learner(model, *dqn.create_optimizer(flags, model), Version())
    sample = make_sample(flags)
    fields = map_nest(torch.Tensor.numpy, sample._replace(handle=())._asdict())
    sample = sample._replace(**fields | {"handle": sample.handle})

    def fail_third(*arguments):
        total_loss, metrics, priorities = compute_loss(*arguments)
        states.append(copy.deepcopy(model.state_dict()))
        return total_loss, metrics | {"loss": math.nan if len(states) == 3 else 1}, priorities

    class Drawn(Feeding):
        def sample(self, *arguments):
            return sample

        def update(self, *arguments):
            pass

    def record(metrics, batch=None, is_update=True):
        records.append((metrics, batch))

    monkeypatch.setattr(dqn, "compute_loss", fail_third)
    run = types.SimpleNamespace(follow=iter, stop=threading.Event(), record=record)
    feed = ReplayFeed(Drawn(), 1.0, 0, 6, 0)
    dqn.learn_from_replay(flags, learner, target, [(*feed.take_batch(), 5)], feed, run)
    (good, _), (bad, batch) = records
    assert good["steps"] == 0 and good["loss"] == 1 and math.isfinite(good["total_loss"])
    assert math.isnan(bad["loss"]) and "sample.frame" in batch.cpu_rows
    assert batch.sources == {"environments": [0]}
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in states[2].items())


@pytest.mark.parametrize(("clipping", "reward"), [("abs_one", 1.0), ("none", 4.0)])
def test_the_replay_is_made_as_the_flags_say(clipping, reward):
    arguments = f"--n_step 3 --discounting 0.5 --reward_clipping {clipping} --unroll_length 5"
    arguments += " --replay_capacity 200 --envs_per_actor 1 --priority_exponent 0.5"
    flags = parse(arguments)
    _, (rows, outputs, state) = nets.create_net(dqn.Net, BOX, ACTIONS, **dqn.net_arguments(flags))
    replay = dqn.create_replay(flags, rows, outputs, state, stack_size=1)
    rollout = {name: np.zeros((41, *x.shape[2:]), x.numpy().dtype) for name, x in rows.items()}
    rollout["reward"][:], rollout["done"][0] = 4, True
    for i in range(8):
        part = {name: x[5 * i : 5 * i + 6] for name, x in rollout.items()}
        replay.append(0, part, state, first=i == 0)
    sample = replay.sample(10)
    assert (sample.returns == reward * (1 + 0.5 + 0.25)).all()
    assert (sample.discounts == 0.5**3).all()
    replay.update(sample.handle, np.full(10, 4.0))
    assert (replay._tree.get(sample.handle.starts) == 4**0.5).all()


@pytest.mark.parametrize(("num_atoms", "has_answers"), [(1, True), (51, False)])
def test_first_and_later_priorities_have_one_unit(num_atoms, has_answers):
    flags = parse(f"{RECURRENT} --num_atoms {num_atoms} --replay_capacity 400 --envs_per_actor 1")
    _, (rows, outputs, state) = nets.create_net(dqn.Net, BOX, ACTIONS, **dqn.net_arguments(flags))
    replay = dqn.create_replay(flags, rows, outputs, state, stack_size=1)
    assert (replay._initial_priority is not None) == has_answers
    T = flags.unroll_length
    rollout = {
        n: np.zeros((T + 1, *x.shape[2:]), x.numpy().dtype) for n, x in (rows | outputs).items()
    }
    rollout["done"][:] = True
    for i in range(6):
        replay.append(0, rollout, state, first=i == 0)
    assert set(replay.sample(2).rows) >= {"frame", "reward"}


def test_outputs_of_a_net_are_stored_when_named(monkeypatch):
    monkeypatch.setattr(dqn, "REPLAY_KEYS", (*dqn.REPLAY_KEYS, "baseline"))
    flags = parse("--replay_capacity 200 --envs_per_actor 1")
    _, (rows, outputs, state) = nets.create_net(dqn.Net, BOX, ACTIONS, **dqn.net_arguments(flags))
    replay = dqn.create_replay(flags, rows, outputs, state, stack_size=1)
    rollout = {n: np.zeros((21, *x.shape[2:]), x.numpy().dtype) for n, x in rows.items()}
    rollout["done"][0], rollout["baseline"] = True, np.arange(21, dtype=np.float32)
    replay.append(0, rollout, state, first=True)
    sample = replay.sample(50)
    np.testing.assert_array_equal(sample.rows["baseline"][0], sample.handle.starts)


class Explored(Exception):
    """Ends an actor at its first exploration."""


@pytest.mark.parametrize("actor", [0, 1])
def test_each_actor_explores_with_its_environments_epsilons(monkeypatch, actor):
    flags = parse("--use_lstm --envs_per_actor 2 --env CartPole-v1")
    flags.precision = "fp32"
    with contextlib.closing(dqn.create_env(flags)) as env:
        spaces = env.observation_space, env.action_space
    net, sample = nets.create_net(dqn.Net, *spaces, **dqn.net_arguments(flags))
    buffers = rollout_buffers.create_buffers(flags, *sample)
    buffers["exploration"] = torch.full((flags.num_buffers,), 0.5)
    for name, dtype in (("environment", torch.int64), ("is_first", torch.bool)):
        buffers[name] = torch.zeros(flags.num_buffers, dtype=dtype)
    found = []

    def explore(action, values, epsilon):
        found.append(epsilon)
        raise Explored

    class FreeBuffers:
        def __iter__(self):
            return iter([np.array([0, 1])])

        def beat(self):
            pass

    monkeypatch.setattr(dqn, "explore", explore)
    with pytest.raises(Explored):
        dqn.act(flags, actor, [1], FreeBuffers(), buffers, SharedWeights(net))
    own = slice(2 * actor, 2 * actor + 2)
    torch.testing.assert_close(found[0], (1 + dqn.final_epsilons(flags)[own]) / 2)  # half way
    assert buffers["environment"][:2].tolist() == [2 * actor, 2 * actor + 1]


class Feeding:
    """A Replay whose samples are counted: enough of one for a ReplayFeed."""

    num_rows, num_needed = 0, 1

    def append(self, env, rollout, state, is_first):
        self.num_rows += len(rollout["done"]) - 1

    def can_sample(self):
        return self.num_rows >= self.num_needed

    def __len__(self):
        return self.num_rows


def make_rollout(T=10):
    rollout = {name: np.zeros(T + 1, bool) for name in ("done", "truncated", "terminated")}
    rollout |= {name: np.zeros(T + 1) for name in ("episode_return", "game_return")}
    return rollout | {"game_done": np.zeros(T + 1, bool)}


@pytest.mark.parametrize("slow", ["actors", "learner"])
def test_both_sides_are_held_to_the_replay_ratio(slow):
    feed = ReplayFeed(Feeding(), ratio=3.0, learning_starts=100, rows_per_update=32, slack=64)
    turns = iter(range(10**9))

    def write():
        for _ in range(500):
            if slow == "actors":
                while next(turns) % 3:
                    pass
            feed.append(0, make_rollout(), (), False, 0, 0)
            feed.wait_to_play()

    def learn():
        steps = 0
        for new, _, num_updates in feed.batches():
            steps += new
            for _ in range(num_updates):
                feed.count_update()
            if steps == 5000 and not feed.count_due():
                return steps

    writer, learner = Thread(write), Thread(learn)
    assert learner.result() == 5000
    writer.result()
    assert feed.num_updates == 3 * 4900 // 32
    assert feed.metrics()["replay_ratio"] == pytest.approx(3, rel=0.01)


def test_waits_for_the_other_side_end_when_closed():
    feed = ReplayFeed(Feeding(), ratio=1.0, learning_starts=0, rows_per_update=32, slack=0)
    feed.append(0, make_rollout(64), (), True, 0, 0)
    writer = Thread(feed.wait_to_play)
    writer.assert_blocked()
    feed.replay.num_needed = 100  # the first sequence is not complete
    feed.append(0, make_rollout(1), (), False, 0, 0)
    assert writer.result() is None
    feed.replay.num_needed = 1
    writer = Thread(feed.wait_to_play)
    writer.assert_blocked()
    waiting = ReplayFeed(Feeding(), ratio=1.0, learning_starts=0, rows_per_update=32, slack=0)
    learner = Thread(lambda: list(waiting.batches()))
    learner.assert_blocked()
    feed.close()
    waiting.close()
    assert writer.result() is None and learner.result() == []


@pytest.mark.parametrize(
    ("arguments", "actions", "message"),
    [("--value_rescaling", ACTIONS, "--value_rescaling .* add --num_atoms 1"),
     ("--burn_in 20", ACTIONS, "--burn_in 20 needs --use_lstm: add that, or give --burn_in 40"),
     ("--sequence_length 20", ACTIONS, "--sequence_length 20 needs --use_lstm"),
     ("--use_lstm --value_range 5", ACTIONS, "--value_range 5 needs --num_atoms above 1"),
     ("--use_lstm --burn_in 0 --sequence_length 1", ACTIONS, "length 1 .* is no sequence"),
     ("--use_lstm --sequence_length 20", ACTIONS, "40 rows only the --sequence_length 20 would"),
     ("--total_steps 20000", ACTIONS, "starts 20,000 leaves none of --total_steps 20,000"),
     ("", gym.spaces.Box(-1, 1, (2,)), "Discrete actions: ppo.py and, if bounded, sac.py")],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(arguments, actions, message):
    with pytest.raises(FlagError, match=message):
        dqn.resolve(dqn.parser.parse_args(arguments.split()), actions)


def test_a_resumed_run_without_steps_to_learn_from_is_told(caplog):
    flags = parse("--total_steps 50000")
    announce_refill(flags, 0)
    announce_refill(flags, 29_999)
    assert "No more is learned" not in caplog.text
    announce_refill(flags, 30_000)
    assert "No more is learned: 20,000 steps are left" in caplog.text


@pytest.mark.whole
@pytest.mark.parametrize(
    ("arguments", "message"),
    [("--replay_capacity 1000000000000", r"replay_capacity 1,000.* GiB, but .* GiB .* free"),
     ("--use_lstm --replay_capacity 300", r"--replay_capacity 300 is .*at least \d+"),
     ("--env Pendulum-v1", "the action space is Box.* ppo.py and, if bounded, sac.py")],
)  # fmt: skip
def test_a_replay_that_cannot_be_is_refused_before_the_start(arguments, message, tmp_path):
    where = f"--env CartPole-v1 --savedir {tmp_path} --xpid run {SMALL} {arguments}"
    with pytest.raises(FlagError, match=message):
        dqn.main(where.split())
    assert not (tmp_path / "run").exists()


def play_chain(num_states=5):
    """Return rows of random play on a chain: 1 goes right, 0 left; the last state ends it."""
    random, state, rows = np.random.default_rng(0), 0, []
    rows.append({"state": 0, "reward": 0.0, "done": True, "last_action": 0})
    for _ in range(4000):
        action = int(random.integers(2))
        state = max(0, state + (1 if action else -1))
        ends = state == num_states - 1
        reward = 1.0 if ends else 0.0
        state = 0 if ends else state
        rows.append({"state": state, "reward": reward, "done": ends, "last_action": action})
    return rows


@pytest.mark.whole
@pytest.mark.parametrize("arguments", ["--num_atoms 1 --n_step 1", "--n_step 1 --value_range 2"])
def test_values_of_a_chain_are_those_of_dynamic_programming(arguments):
    arguments += " --discounting 0.9 --learning_rate 0.01 --epsilon 3e-4 --target_interval 20"
    flags = parse(arguments)
    rows, states = play_chain(), 5
    space = gym.spaces.Discrete(states)
    torch.manual_seed(0)
    model = dqn.Net(space, 2, **dqn.net_arguments(flags))
    target, T = copy.deepcopy(model), flags.unroll_length
    arrays = {
        "frame": np.array([row["state"] for row in rows]),
        **{k: np.array([row[k] for row in rows]) for k in ("reward", "done", "last_action")},
        "truncated": np.zeros(len(rows), bool), "terminated": np.zeros(len(rows), bool),
    }  # fmt: skip
    example = {name: x[None, :1] for name, x in arrays.items()}
    replay = Replay(
        example, (), 4000, 1, T, n_step=1, discounting=0.9, alpha=flags.priority_exponent
    )
    for i in range(4000 // T):
        part = {name: x[i * T : (i + 1) * T + 1] for name, x in arrays.items()}
        replay.append(0, part, (), first=i == 0)
    feed = ReplayFeed(replay, 1.0, 0, 32, 0)
    optimizer, _ = dqn.create_optimizer(flags, model)
    dqn.learn(flags, model, target, feed, optimizer, 600, beta=1.0)
    inputs = {"frame": torch.arange(4)[None], "done": torch.zeros(1, 4, dtype=torch.bool)}
    values = model(inputs, ())[0]["policy_logits"][0].detach()
    expected = torch.zeros(4, 2)
    for _ in range(200):
        best = torch.cat([expected.max(dim=1).values, torch.zeros(1)])
        left = 0.9 * best[[0, 0, 1, 2]]
        right = torch.tensor([0.0, 0, 0, 1]) + 0.9 * best[1:]
        expected = torch.stack([left, right], dim=1)
    torch.testing.assert_close(values, expected, rtol=0, atol=0.02)


def test_an_environment_of_a_module_is_created(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    flags = parse("--env recall:Recall-v0")
    flags.render_mode = None
    assert dqn.create_env(flags).reset(seed=1)[0].shape == (3,)


def test_only_stacks_of_games_are_taken_apart(monkeypatch, tmp_path):
    sizes, create_env = [], dqn.create_env

    def stack(flags):
        env = create_env(flags)
        return gym.wrappers.FrameStackObservation(env, 4) if flags.env == "CartPole-v1" else env

    monkeypatch.setattr(dqn, "create_replay", lambda *values: sizes.append(values[-1]) or 1 / 0)
    monkeypatch.setattr(dqn, "create_env", stack)
    for env in ("CartPole-v1", "PongNoFrameskip-v4"):
        with pytest.raises(ZeroDivisionError):
            dqn.main(f"--env {env} --savedir {tmp_path} {SMALL}".split())
    assert sizes == [1, 4]


def train(folder, name, *arguments):
    where = ("--xpid", name, "--savedir", folder)
    assert dqn.main(split_words(["--env CartPole-v1", SMALL, *arguments, *where])) == 0
    return read_rows(folder / name), load(folder / name / "model.tar")["model_state_dict"]


@pytest.mark.whole
def test_deterministic_runs_are_the_same_and_resume(tmp_path, caplog, capsys):
    caplog.set_level("INFO")
    arguments = "--deterministic --seed 3 --unroll_length 10 --batch_size 8 --total_steps 1500"
    arguments += " --use_lstm --burn_in 10 --sequence_length 20"
    outcomes = [train(tmp_path, name, arguments) for name in ("one", "two")]
    (rows, weights), (_, others) = outcomes
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert last_step(tmp_path / "one") >= 1500 and float(rows[-1]["policy_lag_max"]) <= 1
    assert column(rows, "replay_ratio")[-1] == pytest.approx(2, rel=0.1)
    where = "--xpid one --savedir", tmp_path
    assert dqn.main(split_words(["--total_steps 2000", *where])) == 0  # other flags as before
    assert "The replay is filled anew" in caplog.text
    assert last_step(tmp_path / "one") >= 2000
    assert dqn.main(split_words(["--mode test --num_episodes 2", *where])) == 0
    assert "2 games: mean return" in capsys.readouterr().out


@pytest.mark.whole
def test_cartpole_is_learned_though_an_actor_is_killed(tmp_path):
    arguments = f"--env CartPole-v1 {SMALL} --seed 1 --total_steps 1000000 --batch_size 64"
    arguments += " --value_range 100 --target_interval 100 --epsilon_steps 5000 --xpid run"
    arguments += " --learning_rate 1e-3 --learning_starts 1000 --replay_capacity 50000"
    with Program(SCRIPT, "dqn", arguments, "--savedir", tmp_path) as program:
        program.wait_until(lambda: last_step(tmp_path / "run") > 2000)
        victim = sorted(program.members("forkserver"))[1]
        os.kill(victim, signal.SIGKILL)
        program.wait_until(lambda: "died and is replaced" in program.output)

        def returns():
            return column(read_rows(tmp_path / "run"), "mean_episode_return")

        program.wait_until(lambda: max(returns(), default=0) > 100)  # a random player has 22
        os.kill(program.pid, signal.SIGTERM)
        output = program.finish(128 + signal.SIGTERM)
    assert "To go on" in output
    assert not math.isnan(returns()[-1])
