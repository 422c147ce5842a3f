# SPDX-License-Identifier: Apache-2.0
"""PPO against the definitions of its parts, and the program from the command line."""

import contextlib
import functools
import math
import os
import signal
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from catch_env import Mixed
from program import ROOT, Program, last_step, load, read_meta, read_rows, run, split_words
from table import N, T, Table, make_rows

import gala
import ppo
from beast.actors.collect import INPUTS
from beast.envs.environments import Environments, try_out
from beast.envs.parallel import ParallelEnvironments
from beast.errors import FlagError
from beast.learners.nets import create_net
from beast.learners.normalizer import Normalizer, RewardScaler
from beast.nest import map_nest
from beast.runs import evaluate
from beast.runs.diagnostics import is_finite

SCRIPT = ROOT / "ppo.py"


def parse(arguments="", continuous=False):
    flags = ppo.parser.parse_args(["--disable_cuda", *arguments.split()])
    actions = gym.spaces.Box(-1, 1, (2,)) if continuous else gym.spaces.Discrete(2)
    flags = ppo.resolve(flags, actions)
    flags.precision, flags.fp32_devices = "fp32", []
    return flags


@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
def test_targets_are_those_of_a_loop_over_each_episode(gae_lambda):
    model = Table()
    flags = parse(f"--gae_lambda {gae_lambda} --advantage_scaling none --reward_scaling none")
    rows = make_rows(model)
    batch = ppo.compute_targets(flags, model, rows, ())
    values = model(rows, ())[0]["baseline"].detach()
    for i in range(N):
        advantage = 0.0
        for t in reversed(range(T)):
            if rows["truncated"][t, i] or rows["terminated"][t, i]:  # from here only a reset
                assert not batch["mask"][t, i]
                advantage = 0.0
                continue
            ends = rows["done"][t + 1, i] or rows["terminated"][t + 1, i]
            going_on = 0.0 if ends else flags.discounting
            delta = rows["reward"][t + 1, i] + going_on * values[t + 1, i] - values[t, i]
            advantage = delta + going_on * gae_lambda * advantage
            assert batch["mask"][t, i]
            assert batch["advantages"][t, i].item() == pytest.approx(float(advantage), abs=1e-12)
            expected = float(advantage + values[t, i])
            assert batch["vs"][t, i].item() == pytest.approx(expected, abs=1e-12)


def test_a_net_gets_as_much_when_it_learns_as_when_it_acts():
    seen = []

    class Net(Table):
        def forward(self, inputs, agent_state):
            seen.append({key: inputs[key] for key in INPUTS})
            return super().forward(inputs, agent_state)

    model, flags = Net(), parse("--num_minibatches 2")
    rows = make_rows(Table())
    batch = ppo.compute_targets(flags, model, rows, ())
    ppo.compute_loss(flags, model, batch, ())
    assert len(seen) == 2
    for key in INPUTS:
        torch.testing.assert_close(seen[0][key], rows[key][-1:], equal_nan=True)
        torch.testing.assert_close(seen[1][key], rows[key][:-1], equal_nan=True)


@pytest.mark.parametrize("program", [ppo, gala])
@pytest.mark.parametrize(
    ("shape", "dtype", "num_weights"),
    [
        ((96, 96, 3), np.uint8, 32 * 3 * 8 * 8),  # CarRacing's
        ((3, 96, 96), np.uint8, 32 * 3 * 8 * 8),
        ((4, 84, 84), np.uint8, 32 * 4 * 8 * 8),
        ((10, 10, 4), bool, 32 * 4 * 3 * 3),  # MinAtar's
        ((10, 10, 10), bool, 32 * 10 * 3 * 3),
    ],
)
def test_images_are_seen_with_their_channels_first_or_last(program, shape, dtype, num_weights):
    image = torch.from_numpy(
        np.random.default_rng(0).integers(2, size=(2, 3, *shape)).astype(dtype)
    )
    net = program.Net(gym.spaces.Box(0, 1 if dtype is bool else 255, shape, dtype), 5)
    assert next(net.trunk.convs[0].parameters()).numel() == num_weights
    outputs, _ = net({"frame": image, "done": torch.zeros(2, 3, dtype=torch.bool)}, ())
    assert outputs["policy_logits"].shape == (2, 3, 5)
    first = shape if shape[0] < shape[-1] else (shape[-1], *shape[:-1])
    assert net.observations(image[0])[0][0].shape == (3, *first)


def gradients(model, flags, rows):
    batch = ppo.compute_targets(flags, model, rows, ())
    model.zero_grad()
    ppo.compute_loss(flags, model, batch, ())[0].backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("use_gru", [False, True])
def test_parts_of_an_action_are_independent(use_gru):
    torch.manual_seed(0)
    space = gym.spaces.MultiDiscrete([2, 5, 3])
    net, (_, outputs, _) = create_net(ppo.Net, gym.spaces.Box(-1, 1, (4,)), space, use_gru=use_gru)
    assert outputs["policy_logits"].shape == (2, 3, 3, 5)
    torch.nn.init.normal_(net.policy.weight, std=0.5)
    inputs = {"frame": torch.randn(50, 40, 4), "done": torch.zeros(50, 40, dtype=torch.bool)}
    logits, action = (net(inputs, net.initial_state(40))[0][k] for k in ("policy_logits", "action"))
    assert action.flatten(0, 1).amax(0).tolist() == [1, 4, 2]
    policy, other = (ppo.distribution(x, False) for x in (logits, 0.5 * logits))
    parts = [
        [torch.distributions.Categorical(logits=x[:, :, i, :n]) for i, n in enumerate(space.nvec)]
        for x in (logits, 0.5 * logits)
    ]
    log_prob = sum(part.log_prob(action[..., i]) for i, part in enumerate(parts[0]))
    torch.testing.assert_close(policy.log_prob(action), log_prob)
    torch.testing.assert_close(policy.entropy(), sum(part.entropy() for part in parts[0]))
    kl = sum(map(torch.distributions.kl_divergence, *parts))
    torch.testing.assert_close(ppo.kl_divergence(policy, other, continuous=False), kl)


@pytest.mark.parametrize("penalty", ["clip", "kl"])
def test_what_stands_in_a_row_after_an_end_changes_no_gradient(penalty):
    model, flags = Table(), parse(f"--penalty {penalty}")
    rows = make_rows(model)
    before = gradients(model, flags, rows)
    for t, i in ((1, 0), (4, 1), (T, 3), (3, 4)):
        rows["reward"][t, i] = 1e3
        rows["action"][t, i] = 1
        rows["policy_logits"][t, i] += torch.arange(4)
    for one, other in zip(before, gradients(model, flags, rows), strict=True):
        assert torch.equal(one, other)


def test_policies_are_what_they_are_by_definition():
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 5, 3, 4, generator=generator, dtype=torch.float64)
    one, other = (ppo.distribution(x, continuous=False) for x in (a, b))
    actions = torch.randint(4, (5, 3), generator=generator)
    p, q = a.softmax(-1), b.softmax(-1)
    chosen = p.gather(-1, actions[..., None]).squeeze(-1)
    torch.testing.assert_close(one.log_prob(actions), chosen.log())
    torch.testing.assert_close(one.entropy(), -(p * p.log()).sum(-1))
    kl = ppo.kl_divergence(one, other, continuous=False)
    torch.testing.assert_close(kl, (p * (p / q).log()).sum(-1))
    rare = torch.tensor([[[0.0, -99.0, -1e9]]])  # the next one's probability is no float32
    rarer = torch.tensor([[[0.0, -104.0, -1e9]]], requires_grad=True)
    rare, rarer = (ppo.distribution(x, continuous=False) for x in (rare, rarer))
    kl = ppo.kl_divergence(rare, rarer, continuous=False)
    assert kl.shape == (1, 1) and 0 <= kl.item() < 1e-6

    one, other = (ppo.distribution(x, continuous=True) for x in (a, b))
    actions = torch.randn(5, 3, 2, generator=generator, dtype=torch.float64)
    mean, std = a[..., :2], a[..., 2:].exp()
    mean_b, std_b = b[..., :2], b[..., 2:].exp()
    density = torch.exp(-((actions - mean) ** 2) / (2 * std**2)) / (std * math.sqrt(2 * math.pi))
    torch.testing.assert_close(one.log_prob(actions), density.log().sum(-1))
    entropy = 0.5 * math.log(2 * math.pi * math.e) + std.log()
    torch.testing.assert_close(one.entropy(), entropy.sum(-1))
    kl = (std_b / std).log() + (std**2 + (mean - mean_b) ** 2) / (2 * std_b**2) - 0.5
    torch.testing.assert_close(ppo.kl_divergence(one, other, continuous=True), kl.sum(-1))


def policy_gradient(flags, log_rho, advantage, kl=0.0, penalty=1.0):
    """Return the policy loss of a single transition, and its derivatives by log_rho and by kl."""
    log_rho, kl = (torch.tensor([[x]], requires_grad=True) for x in (log_rho, kl))
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss = ppo.compute_policy_loss(
        flags, log_rho, torch.tensor([[advantage]]), kl, torch.tensor(penalty), mask
    )
    loss.backward()
    return loss.item(), log_rho.grad.item(), 0.0 if kl.grad is None else kl.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_clipped"),
    [(1.3, 1.0, True), (1.1, 1.0, False), (0.7, 1.0, False), (0.7, -1.0, True), (0.9, -1.0, False),
     (1.3, -1.0, False)],
)  # fmt: skip
def test_the_gradient_is_zero_exactly_where_it_is_clipped(ratio, advantage, is_clipped):
    _, gradient, _ = policy_gradient(parse("--policy_clipping 0.2"), math.log(ratio), advantage)
    assert (gradient == 0) == is_clipped
    assert is_clipped or gradient == pytest.approx(-ratio * advantage)


@pytest.mark.parametrize(
    ("kl", "loss", "gradient"),
    [(0.0, 0.0, 1), (0.019, 0.019, 1), (0.02, 0.02, 1), (0.03, 0.13, 1 + 2000 * 0.01)],
)
def test_the_penalty_has_a_cutoff_at_twice_the_target(kl, loss, gradient):
    flags = parse("--penalty kl --kl_target 0.01")
    got = policy_gradient(flags, 0.0, 0.0, kl)
    assert got == pytest.approx((loss, 0, gradient), abs=1e-6, rel=1e-4)


def test_the_penalty_stays_finite(monkeypatch):
    model, flags = Table(), parse("--penalty kl")
    metrics = {}
    monkeypatch.setattr(ppo, "compute_loss", lambda *_: (None, metrics))
    for kl, penalty in ((1.0, 1e6), (0.0, 1e-6)):
        metrics["behavior_target_kl"] = kl
        for _ in range(400):
            ppo.adapt_penalty(flags, model, None, ())
        assert model.kl_penalty.item() == pytest.approx(penalty)


@pytest.mark.parametrize(("kl", "factor"), [(1.31, 1.5), (1.29, 1), (0.71, 1), (0.69, 1 / 1.5)])
def test_the_penalty_follows_the_kl(monkeypatch, kl, factor):
    model, flags = Table(), parse("--penalty kl")
    metrics = {"behavior_target_kl": torch.tensor(kl * flags.kl_target)}
    monkeypatch.setattr(ppo, "compute_loss", lambda *_: (None, metrics))
    assert ppo.adapt_penalty(flags, model, None, ()) == pytest.approx(factor)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_the_normalizer_has_the_moments_of_all_that_it_has_seen(offset):
    random = np.random.default_rng(0)
    x = random.normal(offset, [0.5, 2, 3], (350_000, 3))
    normalizer, begin = Normalizer(3), 0
    for size in (1, 2, 3, 1000, 0, 50_000, 7):
        normalizer.update(torch.from_numpy(x[begin : begin + size]))
        begin += size
    normalizer.update(torch.from_numpy(x[begin:]))
    np.testing.assert_allclose(normalizer.mean.numpy(), x.mean(0), rtol=1e-12)
    expected = np.sqrt(x.var(0, ddof=1) + 1e-4) + 1e-8
    np.testing.assert_allclose(normalizer.std().numpy(), expected, rtol=1e-9)
    y = normalizer(torch.from_numpy(x))
    np.testing.assert_allclose(y.numpy(), np.clip((x - x.mean(0)) / expected, -5, 5), atol=1e-6)
    assert torch.equal(Normalizer(2)(torch.ones(4, 2)), torch.ones(4, 2))  # before it has seen any


def test_rewards_are_divided_by_the_deviation_of_returns():
    random, scaler = np.random.default_rng(0), RewardScaler()
    rewards, done = random.normal(size=(60, 3)), random.random((60, 3)) < 0.1
    mask = random.random((60, 3)) < 0.9
    returns, current = [], np.zeros(3)
    for t in range(60):
        current = rewards[t] + 0.9 * current
        returns += current[mask[t]].tolist()
        current = np.where(done[t], 0, current)
    for begin in (0, 20, 40):  # returns go on from one rollout to the next
        parts = (torch.from_numpy(x[begin : begin + 20]) for x in (rewards, done, mask))
        scaled = scaler(*parts, 0.9)
    expected = rewards[40:] / (np.sqrt(np.var(returns, ddof=1) + 1e-4) + 1e-8)
    np.testing.assert_allclose(scaled.numpy(), expected.clip(-10, 10), rtol=1e-9)


def test_rewards_are_divided_though_returns_exceed_float32():
    scaler, mask = RewardScaler(), torch.ones(20, 2, dtype=torch.bool)
    for size in (3e38, -3e38, 1.0):
        rewards = torch.full((20, 2), size)
        scaled = scaler(rewards, torch.zeros(20, 2, dtype=torch.bool), mask, 0.99)
        assert scaled.dtype == torch.float32 and scaled.isfinite().all()
        assert size == 1 or 0 < abs(scaled[0, 0]) <= 10


def test_scaled_rewards_end_where_episodes_do():
    model, rows = Table(), make_rows(Table())
    model.reward_scaler, scaler = RewardScaler(), RewardScaler()
    found = ppo.compute_targets(parse("--reward_scaling std"), model, rows, ())
    mask = ~(rows["truncated"] | rows["terminated"])[:-1]
    rows["reward"][1:] = scaler(rows["reward"][1:], rows["done"][1:], mask, 0.99)
    expected = ppo.compute_targets(parse("--reward_scaling none"), model, rows, ())
    assert torch.equal(found["vs"], expected["vs"])


@pytest.mark.parametrize("continuous", [False, True])
def test_one_epoch_of_one_minibatch_has_the_gradient_of_a2c(continuous):
    model = Table(continuous)
    flags = parse(
        "--num_epochs 1 --num_minibatches 1 --advantage_scaling none --reward_scaling none",
        continuous,
    )
    rows = make_rows(model)
    batch = ppo.compute_targets(flags, model, rows, ())
    found = gradients(model, flags, rows)
    model.zero_grad()
    outputs, _ = model(batch, ())
    policy = ppo.distribution(outputs["policy_logits"], continuous)
    mask = batch["mask"]
    policy_loss = -(policy.log_prob(batch["action"]) * batch["advantages"])[mask].mean()
    baseline_loss = flags.baseline_cost * ((batch["vs"] - outputs["baseline"]) ** 2)[mask].mean()
    (policy_loss + baseline_loss - flags.entropy_cost * policy.entropy()[mask].mean()).backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.parametrize("use_gru", [False, True])
def test_minibatches_hold_each_transition_once(use_gru):
    model, flags = Table(), parse("--num_minibatches 5" + " --use_gru" * use_gru)
    batch = ppo.compute_targets(flags, model, make_rows(model), ())
    whole = ppo.compute_loss(flags, model, batch, ())[0]
    parts = list(ppo.make_minibatches(flags, batch, (batch["frame"][:1, :, 0],)))
    sizes = [int(part["mask"].sum()) for part, _ in parts]
    assert len(parts) == 5 and sum(sizes) == int(batch["mask"].sum())
    for part, state in parts:  # with a GRU, whole columns and their states
        assert not use_gru or torch.equal(state[0], part["frame"][:1, :, 0])
    losses = [
        ppo.compute_loss(flags, model, part, ())[0] * n
        for n, (part, _) in zip(sizes, parts, strict=True)
    ]
    torch.testing.assert_close(sum(losses) / sum(sizes), whole)
    seen = torch.cat([part["frame"][..., 0][part["mask"]] for part, _ in parts]).sort().values
    torch.testing.assert_close(seen, batch["frame"][..., 0][batch["mask"]].sort().values)


@pytest.mark.parametrize("use_gru", [False, True])
def test_each_epoch_has_other_minibatches(use_gru):
    model, flags = Table(), parse("--num_minibatches 2" + " --use_gru" * use_gru)
    batch, state = ppo.compute_targets(flags, model, make_rows(model), ()), (torch.zeros(1, N, 1),)
    orders = set()
    for _ in range(5):
        parts = [part["frame"] for part, _ in ppo.make_minibatches(flags, batch, state)]
        orders.add(tuple(torch.cat(parts, dim=1).flatten().tolist()))
    assert len(orders) > 1  # of 6 columns there are 720


def test_the_learning_rate_falls_to_zero():
    flags = parse("--total_steps 1000")
    _, decay = ppo.create_optimizer(flags, Table())
    assert [decay(step) for step in (0, 250, 1000, 1080)] == [1, 0.75, 0, 0]


def test_a_gru_is_reset_at_done_inside_a_rollout():
    net = ppo.Net(gym.spaces.Box(-1, 1, (4,)), 2, use_gru=True).eval()
    rows = {"frame": torch.randn(5, 3, 4), "done": torch.zeros(5, 3, dtype=torch.bool)}
    state = (torch.randn(1, 3, 256),)
    without = net(rows, state)[0]["policy_logits"]
    rows["done"][2, 1] = True
    logits = net(rows, state)[0]["policy_logits"]
    fresh = {name: x[2:, 1:2] for name, x in rows.items()}
    fresh = net(fresh, net.initial_state(1))[0]["policy_logits"]
    torch.testing.assert_close(logits[2:, 1:2], fresh)
    assert not torch.isclose(logits[2:, 1], without[2:, 1]).any()
    torch.testing.assert_close(logits[:2], without[:2])
    torch.testing.assert_close(logits[:, [0, 2]], without[:, [0, 2]])


def test_learning_takes_a_clipped_step_for_each_minibatch(monkeypatch):
    model, kls, norms = Table(), [], []
    flags = parse("--num_epochs 3 --num_minibatches 4 --grad_norm_clipping 0.01")
    compute_loss = ppo.compute_loss

    def with_kl(*args):
        loss, metrics = compute_loss(*args)
        kls.append(metrics["behavior_target_kl"].item())
        return loss, metrics

    def measure(optimizer, *_):
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())

    monkeypatch.setattr(ppo, "compute_loss", with_kl)
    optimizer, _ = ppo.create_optimizer(flags, model)
    optimizer.register_step_pre_hook(measure)
    rows = make_rows(model)
    batch = ppo.compute_targets(flags, model, rows, ())
    metrics = ppo.learn(flags, model, rows, ((), ()), optimizer)
    assert norms == pytest.approx([0.01] * 12, rel=1e-3)
    assert metrics["grad_norm"] > 0.01 and metrics["clipped_updates"] == 1
    assert metrics["behavior_target_kl"] == pytest.approx(sum(kls[-4:]) / 4)
    assert metrics["behavior_target_kl"] > 1.1 * sum(kls) / 12
    vs, values = (batch[name][batch["mask"]] for name in ("vs", "values"))
    unexplained = (vs - values).var(correction=0) / vs.var(correction=0)
    assert metrics["explained_variance"] == pytest.approx(max(-1, 1 - unexplained.item()))


def test_the_bootstrap_value_is_of_the_state_before_the_last_row():
    calls = []

    class Net(Table):
        def forward(self, inputs, agent_state):
            calls.append((len(inputs["frame"]), agent_state[0].unique().tolist()))
            return super().forward(inputs, agent_state)

    model, flags = Net(), parse("--use_gru --num_minibatches 2 --num_epochs 1")
    states = [(torch.full((1, N, 1), x),) for x in (1.0, 2.0)]
    ppo.learn(flags, model, make_rows(Table()), states, ppo.create_optimizer(flags, model)[0])
    assert calls == [(1, [2.0]), (T, [1.0]), (T, [1.0])]


def test_advantages_are_scaled_by_moments_of_unmasked_ones():
    model, batches = Table(), []
    for scaling in ("none", "batch"):
        flags = parse(f"--advantage_scaling {scaling}")
        batches.append(ppo.compute_targets(flags, model, make_rows(model), ()))
    mask, x = batches[0]["mask"], batches[0]["advantages"][batches[0]["mask"]]
    assert not mask.all()
    expected = (x - x.mean()) / x.std(correction=0)
    torch.testing.assert_close(batches[1]["advantages"][mask], expected)
    assert not batches[1]["advantages"][~mask].any()


def begin(flags, create_env):
    """Return flags, groups of environments in this process, their rollouts, model, optimizer."""
    n = flags.num_envs // flags.num_groups
    groups = [
        ParallelEnvironments(create_env, [i + 1] * n, 0, "test") for i in range(flags.num_groups)
    ]
    env = create_env()
    spaces = env.observation_space, env.action_space
    flags.precision = "fp32"
    flags = ppo.resolve(flags, spaces[1])
    model, (rows, outputs, _) = create_net(ppo.Net, *spaces, **ppo.net_arguments(flags))
    batches = ppo.collect(flags, model, groups, rows | outputs)
    return flags, groups, batches, model, ppo.create_optimizer(flags, model)[0]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("env", "arguments"),
    [("CartPole-v1", ""), ("CartPole-v1", "--num_groups 2 --use_gru"),
     ("Pendulum-v1", "--use_gru")],
)  # fmt: skip
def test_before_the_first_step_the_policy_is_the_one_that_acted(env, arguments):
    """Rows, answers and recurrent states are aligned, over ends of episodes, too.

    So the ratio is 1 to the last bit where the net gets as many rows at once as when it acted.
    Elsewhere the matrix product that makes policy_logits adds in another order: ratios were up to
    4.8e-7 off, here and in a whole rollout's.
    """
    flags = ppo.parser.parse_args(
        f"--env {env} --disable_cuda --num_envs 4 --unroll_length 60 --num_env_processes 0 "
        f"--num_minibatches 2 {arguments}".split()
    )
    n, ends = 4 // flags.num_groups, 0
    flags, groups, batches, model, optimizer = begin(
        flags, functools.partial(ppo.create_env, flags)
    )
    for _ in range(4):
        batch = next(batches)
        ends += batch.rows["done"].sum() + batch.rows["truncated"].sum()
        prepared = ppo.compute_targets(flags, model, batch.rows, batch.agent_state[1])
        _, metrics = ppo.compute_loss(flags, model, prepared, batch.agent_state[0])
        assert abs(metrics["behavior_target_kl"]) < 1e-6 and metrics["clipped_rhos"] == 0
        answers, _ = model(prepared, batch.agent_state[0])
        torch.testing.assert_close(answers["baseline"], prepared["values"], rtol=1e-4, atol=1e-5)
        for i in range(0, 4, n):
            part = map_nest(lambda x, i=i: x[:, i : i + n], prepared)
            state = map_nest(lambda x, i=i: x[:, i : i + n], batch.agent_state[0])
            for t in range(flags.unroll_length):
                with torch.no_grad():
                    answers, state = model(map_nest(lambda x, t=t: x[t : t + 1], part), state)
                assert torch.equal(answers["policy_logits"][0], part["behavior_policy_logits"][t])
                assert torch.equal(answers["baseline"][0], part["values"][t])
        before = map_nest(torch.clone, model.state_dict())
        metrics = ppo.learn(flags, model, batch.rows, batch.agent_state, optimizer)
        assert metrics["behavior_target_kl"] > 1e-6
        assert any((x != before[name]).any() for name, x in model.state_dict().items())
    assert ends > 4
    for group in groups:
        group.close()


def test_a_loss_that_is_not_finite_leaves_the_weights():
    model, flags = Table(), parse("--num_minibatches 1")
    optimizer, _ = ppo.create_optimizer(flags, model)
    rows, before = make_rows(model), map_nest(torch.clone, model.state_dict())
    rows["reward"][2, 2] = torch.nan
    metrics = ppo.learn(flags, model, rows, ((), ()), optimizer)
    assert math.isnan(metrics["total_loss"]) and metrics["steps"] > 0
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("name", ["of_none", "loss"])
def test_a_metric_that_is_not_finite_leaves_the_weights(monkeypatch, name):
    model, flags, compute_loss = Table(), parse("--num_minibatches 1"), ppo.compute_loss

    def with_metric(*arguments):
        total_loss, metrics = compute_loss(*arguments)
        return total_loss, metrics | {name: math.nan}

    monkeypatch.setattr(ppo, "compute_loss", with_metric)
    optimizer, _ = ppo.create_optimizer(flags, model)
    rows, before = make_rows(model), map_nest(torch.clone, model.state_dict())
    metrics = ppo.learn(flags, model, rows, ((), ()), optimizer)
    assert math.isnan(metrics[name]) and math.isfinite(metrics["total_loss"])
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize(("column", "steps"), [(1, 1), (0, 0)])  # in 0 there is only a reset
@pytest.mark.parametrize(("penalty", "continuous"), [("clip", False), ("kl", True)])
def test_metrics_of_a_rollout_of_one_row_are_finite(column, steps, penalty, continuous):
    arguments = f"--num_envs 1 --unroll_length 1 --penalty {penalty} --reward_scaling none"
    model, flags = Table(continuous), parse(arguments, continuous)
    optimizer, _ = ppo.create_optimizer(flags, model)
    rows = map_nest(lambda x: x[:2, column : column + 1], make_rows(model))
    metrics = ppo.learn(flags, model, rows, ((), ()), optimizer)
    assert is_finite(metrics) and metrics["steps"] == steps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--num_envs 6 --num_groups 4", "--num_envs is 6, which --num_groups 4 does not divide"),
        ("--num_envs 4 --num_env_processes 5", "is 5, but there are 4 environments"),
        ("--num_envs 2 --unroll_length 3 --num_minibatches 7", "is 7, but a rollout has 6 steps"),
        ("--use_gru --num_envs 4 --num_minibatches 5", "a rollout has 4 environments, which"),
        ("--kl_target 0.02", "--kl_target 0.02 is for --penalty kl, but this is clip"),
        (
            "--penalty kl --policy_clipping 0.3",
            "is for --penalty clip, but this is kl: give another --penalty, or --policy_clip",
        ),
    ],
)
def test_flags_that_contradict_each_other_are_refused(arguments, message):
    with pytest.raises(FlagError, match=message):
        parse(arguments)


def test_minibatches_that_nobody_asked_for_are_chosen_again():
    assert "num_minibatches" in parse("--use_gru --num_envs 2").chosen
    assert "num_minibatches" not in parse("--num_envs 4 --num_minibatches 2").chosen


class HalfBounded(gym.Env):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(np.float32([-np.inf, -3]), np.float32([np.inf, np.inf]))
    reset = lambda self, seed=None, options=None: (np.zeros(2, np.float32), {})  # noqa: E731

    def __init__(self, render_mode=None):
        pass

    def step(self, action):
        return action, 0.0, False, False, {}


def test_actions_are_clipped_only_where_there_are_bounds():
    gym.register("HalfBounded-v0", HalfBounded)
    try:
        env = ppo.create_env(parse("--env HalfBounded-v0", continuous=True))
        env.reset()
        for action, taken in (([-70, -2], [-70, -2]), ([70, -5], [70, -3])):
            assert env.action_space.contains(np.float32(action))
            assert env.step(np.float32(action))[0].tolist() == taken
    finally:
        del gym.registry["HalfBounded-v0"]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.filterwarnings("ignore")  # Gymnasium's, of bounds in float16
def test_actions_at_the_bounds_are_in_the_environments_space(dtype):
    low = np.random.default_rng(0).uniform(-3, 1, 50)
    high = low + np.linspace(0, 2, 50)  # the first part has equal bounds
    space = gym.spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype)

    actions = []

    class Bounded(HalfBounded):
        action_space = space

        def step(self, action):
            assert self.action_space.contains(action)
            actions.append(action)
            return np.zeros(2, np.float32), 0.0, False, False, {}

    gym.register("Bounded-v0", Bounded)
    try:
        flags = parse("--env Bounded-v0", continuous=True)
        environments = Environments(lambda: ppo.create_env(flags), 1, 0)
        environments.initial()
        for action in (-7, -1, 0, 1, 7):
            environments.step(np.full((1, 50), action, np.float32))
        middle = (space.low.astype(float) + space.high.astype(float)) / 2
        goals = [space.low, space.low, middle, space.high, space.high]
        for action, goal in zip(actions, goals, strict=True):
            np.testing.assert_allclose(action, goal, rtol=2e-3 if dtype == np.float16 else 1e-6)
    finally:
        del gym.registry["Bounded-v0"]


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize(
    ("arguments", "num_minibatches"),
    [
        ("", (4, 32)),
        ("--use_gru", (4, 8)),
        ("--use_gru --num_envs 2", (2, 2)),
        ("--num_envs 1 --unroll_length 3", (3, 3)),
    ],
)
def test_defaults_fit_each_other(arguments, num_minibatches, continuous):
    assert parse(arguments, continuous).num_minibatches == num_minibatches[continuous]


@pytest.mark.parametrize("program", [ppo, gala])
def test_actions_are_drawn_from_the_policy_or_are_its_mode(program):
    space, logits = gym.spaces.Box(-1, 1, (4,)), torch.tensor([0.0, 1.0, -1.0])
    net = program.Net(space, 3)
    net.policy.weight.data.zero_()
    net.policy.bias.data.copy_(logits)
    rows = {"frame": torch.zeros(100, 200, 4), "done": torch.zeros(100, 200, dtype=torch.bool)}
    actions = net(rows, ())[0]["action"]
    frequencies = torch.bincount(actions.flatten(), minlength=3) / actions.numel()
    torch.testing.assert_close(frequencies, logits.softmax(0), rtol=0, atol=0.02)
    assert (net.eval()(rows, ())[0]["action"] == 1).all()


def test_continuous_actions_are_drawn_or_are_the_mean():
    net = ppo.Net(gym.spaces.Box(-1, 1, (4,)), 2, continuous=True)
    means, log_std = torch.tensor([0.5, -2.0]), torch.tensor([0.0, -1.0])
    net.policy.weight.data.zero_()
    net.policy.bias.data.copy_(means)
    net.log_std.data.copy_(log_std)
    rows = {"frame": torch.zeros(100, 200, 4), "done": torch.zeros(100, 200, dtype=torch.bool)}
    actions = net(rows, ())[0]["action"].flatten(0, 1)
    torch.testing.assert_close(actions.mean(0), means, rtol=0, atol=0.04)
    torch.testing.assert_close(actions.std(0), log_std.exp(), rtol=0.03, atol=0)
    assert (net.eval()(rows, ())[0]["action"] == means).all()


@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_a_group_is_answered_while_the_others_step(num_groups):
    flags, events = parse("--unroll_length 2 --num_envs 6"), []

    class Group:
        num_envs, row = 2, {"frame": np.zeros((2, 3)), "done": np.zeros(2, bool)}

        def __init__(self, name):
            self.name = name

        def initial(self):
            return self.row

        def send(self, actions):
            events.append(("send", self.name))

        def receive(self):
            events.append(("receive", self.name))
            return self.row

    model = Table().float()
    model.initial_state = lambda batch_size: ()
    model.forward = lambda inputs, state: ({"action": torch.zeros(1, 2, dtype=torch.long)}, state)
    keys = {"frame": torch.zeros(1, 1, 3), "done": torch.zeros(1, 1, dtype=torch.bool)}
    keys |= {name: torch.zeros(1, 1) for name in ("reward", "last_action")}
    keys["action"] = torch.zeros(1, 1, dtype=torch.long)
    next(ppo.collect(flags, model, [Group(i) for i in range(num_groups)], keys))
    groups = range(num_groups)
    expected = [("send", i) for i in groups]
    expected += [(event, i) for i in groups for event in ("receive", "send")]
    assert events == expected + [("receive", i) for i in groups]


def train(folder, env, *arguments):
    where = f"--env {env} --disable_cuda --xpid run --savedir {folder} --seed 3"
    assert ppo.main(split_words([where, *arguments])) == 0


@pytest.mark.whole
def test_logs_and_weights_are_the_same_with_more_processes(tmp_path):
    rows, weights = [], []
    for processes in (0, 2):  # test_parallel.py compares the rows of 1, too
        folder = tmp_path / str(processes)
        options = "--num_envs 8 --unroll_length 16 --total_steps 7000 --deterministic"
        train(folder, "CartPole-v1", options, f"--num_env_processes {processes}")
        rows.append(read_rows(folder / "run"))
        for row in rows[-1]:  # of what no seed decides
            times = {"_time", "steps_per_second", "learner_wait", "process_restarts"}
            for name in [k for k in row if k in times or "joule" in k]:
                row.pop(name)
        weights.append(load(folder / "run" / "model.tar")["model_state_dict"])
    assert rows[0] == rows[1] and len(rows[0]) > 1
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


@pytest.mark.whole
def test_the_program_trains_resumes_evaluates_and_plays(tmp_path):
    arguments = "--num_envs 4 --unroll_length 100 --num_epochs 2 --num_minibatches 2"
    more = "--total_steps 1000 --penalty kl --use_gru --num_groups 2"
    train(tmp_path, "Pendulum-v1", arguments, more)
    folder = tmp_path / "run"
    step, before = last_step(folder), load(folder / "model.tar")["model_state_dict"]
    where = f"--xpid run --savedir {tmp_path} --num_episodes 2"
    more = "--total_steps 10_000_000 --eval_interval 1000 --checkpoint_interval_s 1"
    with Program(SCRIPT, where, more) as program:
        program.wait_until(lambda: program.members("--end_with_stdin"))
        os.kill(program.pid, signal.SIGSTOP)  # so that the evaluation has a core
        program.wait_until(lambda: not program.members("--end_with_stdin"))
        os.kill(program.pid, signal.SIGCONT)
        program.wait_until(lambda: any(r.get("eval_return_mean") for r in read_rows(folder)))
        os.kill(program.pid, signal.SIGINT)
        output = program.finish(130)
    assert load(folder / "model.tar")["step"] == last_step(folder)
    assert f"Resuming {folder} at step {step:,}" in output
    assert read_meta(folder)["flags"]["continuous"] is True
    after = load(folder / "model.tar")["model_state_dict"]
    assert after["normalizer.count"] > before["normalizer.count"] > 0
    output = run(SCRIPT, "--mode test", where)
    assert "greedy" in output and "2 games: mean return" in output


@pytest.mark.whole
def test_pong_is_trained_and_played(tmp_path):
    train(tmp_path, "PongNoFrameskip-v4", "--total_steps 1000 --num_envs 8 --frame_size 42")
    assert read_meta(tmp_path / "run")["flags"]["continuous"] is False
    output = run(SCRIPT, f"--mode test --num_episodes 1 --xpid run --savedir {tmp_path}")
    assert "greedy" in output and "1 game: mean return" in output


@pytest.mark.whole
def test_it_learns(tmp_path):
    train(tmp_path, "CartPole-v1", "--total_steps 80_000")
    # Of the last 100 games; without learning it is 22.
    assert float(read_rows(tmp_path / "run")[-1]["mean_game_return"]) > 100


@pytest.mark.whole
@pytest.mark.parametrize("program", [ppo, gala])
@pytest.mark.parametrize(
    "env", ["PongNoFrameskip-v4", "MinAtar/Breakout-v1", "HalfCheetah-v5", "CartPole-v1"]
)
def test_environments_are_made_by_their_names(program, env):
    pytest.importorskip({"Min": "minatar", "Hal": "mujoco"}.get(env[:3], "gymnasium"))
    flags = program.parser.parse_args(["--env", env])
    flags.render_mode = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        environments = Environments(lambda: program.create_env(flags), 3, 1, "three")
        with contextlib.closing(environments):
            row = try_out(environments)
    assert len(row["frame"]) == 3 and row["frame"].any()
    # MinAtar's are registered once, not for each environment.
    assert not [warning for warning in caught if "Overriding" in str(warning.message)]


def test_nests_are_learned_from_and_evaluations_leave_moments():
    flags = parse("--num_envs 4 --unroll_length 20 --reward_scaling std")
    flags, (environments,), batches, model, optimizer = begin(flags, Mixed)
    frames = []
    for _ in range(3):
        batch = next(batches)
        mask = ~batch.rows["truncated"][:-1]
        frame = map_nest(lambda x, m=mask: x[:-1][m], batch.rows["frame"])
        frames.append(model.observations(frame)[1])
        metrics = ppo.learn(flags, model, batch.rows, batch.agent_state, optimizer)
        assert is_finite(metrics) and metrics["behavior_target_kl"] > 0
    mean = torch.cat(frames).double().mean(0)
    assert len(mean) == 2 and len(model.observations.images) == 1  # a board, and two numbers
    torch.testing.assert_close(model.normalizer.mean, mean)
    before = map_nest(torch.clone, model.state_dict())
    games = list(evaluate.play(environments, model.eval(), 2))
    assert len(games) == 2
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_numbers_without_axes_are_observations_too():
    number, vector = gym.spaces.Box(-1, 1, ()), gym.spaces.Box(-1, 1, (3,))
    for space in (number, gym.spaces.Dict({"number": number, "vector": vector})):
        create_net(ppo.Net, space, gym.spaces.Discrete(2))  # raises if the net cannot answer
