# SPDX-License-Identifier: Apache-2.0
"""sac.py against the definitions of its parts, and the program from the command line."""

import contextlib
import copy
import itertools
import math
import os
import signal
import threading
import types

import gymnasium as gym
import numpy as np
import pytest
import torch
from program import HELPERS, Program, last_step, load, read_rows, run
from torch import nn

import sac
from beast.actors.weights import Version
from beast.envs.parallel import ParallelEnvironments
from beast.errors import FlagError
from beast.learners.learner import Learner
from beast.learners.nets import create_net
from beast.learners.replay import Handle, Sample
from beast.learners.replay_feed import ReplayFeed
from beast.nest import map_nest

BOX, ACTIONS = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-1, 1, (2,))
SCRIPT = HELPERS / "fast.py"
B = 8


def parse(arguments=""):
    return sac.resolve(sac.parser.parse_args(arguments.split()), ACTIONS)


def create_nets(flags, seed=0):
    torch.manual_seed(seed)
    return [sac.Net(BOX, 2, **sac.net_arguments(flags)) for _ in range(2)]


def make_sample(seed=0):
    random = torch.Generator().manual_seed(seed)
    frame = torch.randn(2, B, 3, generator=random)
    discounts = torch.full((1, B), 0.99)
    discounts[0, :3] = 0  # ends
    return Sample(
        rows={"frame": frame},
        actions=torch.rand(1, B, 2, generator=random) * 2 - 1,
        returns=torch.randn(1, B, generator=random),
        discounts=discounts,
        bootstrap=torch.ones(1, B, dtype=torch.int64),
        mask=torch.ones(1, B, dtype=torch.bool),
        agent_state=(),
        weights=torch.ones(B),
        handle=Handle(np.zeros(B, np.int64), np.arange(B)),
    )


def test_critics_are_as_many_perceptrons():
    critics = sac.Critics(3, 5, 16)
    x, action = torch.randn(B, 3), torch.randn(B, 2)
    values = critics(x, action)
    for j in range(3):
        y = torch.cat([x, action], dim=1)
        for i in range(3):
            layer = nn.Linear(*critics.weights[i][j].shape)
            layer.weight.data, layer.bias.data = critics.weights[i][j].T, critics.biases[i][j, 0]
            y = layer(y.relu() if i else y)
        torch.testing.assert_close(values[j], y[:, 0])
    assert not torch.allclose(values[0], values[1])


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (1.5, -2.0), (-20.0, -1.0), (20.0, 2.0)])
def test_densities_of_actions_are_those_of_torch(mean, log_std):
    outputs = torch.tensor([[mean, log_std]], dtype=torch.float64).expand(1000, 2)
    torch.manual_seed(0)
    action, log_prob = sac.sample_action(outputs)
    torch.manual_seed(0)
    u = mean + math.exp(log_std) * torch.randn(1000, 1, dtype=torch.float64)
    torch.testing.assert_close(action, u.tanh())
    normal = torch.distributions.Normal(mean, math.exp(log_std))
    tanh = torch.distributions.TanhTransform(cache_size=1)
    squashed = torch.distributions.TransformedDistribution(normal, [tanh])
    expected = squashed.log_prob(tanh(u))[:, 0]
    torch.testing.assert_close(log_prob, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("algorithm", sac.ALGORITHMS)
def test_the_critics_loss_is_that_of_a_loop_over_transitions(algorithm):
    flags, sample = parse(f"--algorithm {algorithm}"), make_sample()
    model, target = create_nets(flags)
    x, next_x = sample.rows["frame"]
    arguments = sample.actions[0], next_x, sample.returns[0], sample.discounts[0]
    torch.manual_seed(5)
    loss, _ = sac.compute_critic_loss(flags, model, target, x, *arguments)
    torch.manual_seed(5)
    if algorithm == "sac":
        action, log_prob = sac.sample_action(model.actor(next_x))
        bonus = -model.log_alpha.exp() * log_prob
    else:
        noise = flags.target_noise * torch.randn(B, 2)
        assert algorithm == "ddpg" or noise.abs().max() < 0.7
        action = (target.actor(next_x).tanh() + noise.clamp(-0.5, 0.5)).clamp(-1, 1)
        bonus = torch.zeros(B)
    total = 0.0
    assert len(target.critics(next_x, action)) == (1 if algorithm == "ddpg" else 2)
    for i in range(B):
        value = min(c[i].item() for c in target.critics(next_x, action)) + bonus[i].item()
        y = sample.returns[0, i].item() + sample.discounts[0, i].item() * value
        for c in model.critics(x, sample.actions[0]):
            total += 0.5 * (y - c[i].item()) ** 2 / B
    assert loss.item() == pytest.approx(total, rel=1e-5)


def changed(before, after):
    return {n.split(".")[0] for n in before if not torch.equal(before[n], after[n])}


@pytest.mark.parametrize("algorithm", sac.ALGORITHMS)
def test_each_loss_moves_its_own_parameters(algorithm):
    flags, sample = parse(f"--algorithm {algorithm}"), make_sample()
    model, target = create_nets(flags)
    optimizers, _ = sac.create_optimizers(flags, model)
    before, targets = copy.deepcopy(model.state_dict()), copy.deepcopy(target.state_dict())
    sac.learn(flags, model, target, sample, optimizers, num_updates=0)
    if algorithm == "td3":  # the actor follows at every other update
        assert changed(before, model.state_dict()) == {"critics"}
        assert not changed(targets, target.state_dict())
        sac.learn(flags, model, target, sample, optimizers, num_updates=1)
    moved = {"critics", "actor"} | ({"log_alpha"} if algorithm == "sac" else set())
    assert changed(before, model.state_dict()) == moved
    for name, value in target.state_dict().items():
        expected = torch.lerp(targets[name], model.state_dict()[name], flags.target_rate)
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("algorithm", sac.ALGORITHMS)
def test_the_actor_climbs_the_value_and_leaves_critics_alone(algorithm):
    flags, sample = parse(f"--algorithm {algorithm}"), make_sample()
    model, _ = create_nets(flags)
    x = sample.rows["frame"][0]
    torch.manual_seed(0)
    loss, log_prob = sac.compute_actor_loss(flags, model, x)
    torch.manual_seed(0)
    if algorithm == "sac":
        action, densities = sac.sample_action(model.actor(x))
        value = model.critics(x, action).amin(dim=0) - densities  # alpha is 1
        assert log_prob.item() == pytest.approx(densities.mean().item())
    else:
        value = model.critics(x, model.actor(x).tanh())[0]
    assert loss.item() == pytest.approx(-value.mean().item(), rel=1e-5)
    loss.backward(inputs=list(model.actor.parameters()))
    assert all(p.grad is None for p in [*model.critics.parameters(), model.log_alpha])


@pytest.mark.parametrize(("target_entropy", "rises"), [(-100.0, False), (100.0, True)])
def test_alpha_rises_where_the_entropy_is_too_low(target_entropy, rises):
    flags, sample = parse(f"--target_entropy={target_entropy}"), make_sample()
    model, target = create_nets(flags)
    optimizers, _ = sac.create_optimizers(flags, model)
    sac.learn(flags, model, target, sample, optimizers, num_updates=0)
    assert (model.log_alpha.item() > 0) == rises


@pytest.mark.whole
def test_the_value_of_a_linear_system_is_riccatis():
    """x' = x + a, reward -(x^2 + a^2), discount 0.9: the best value is -p x^2 (DDPG's actor)."""
    p = 1.0
    for _ in range(200):
        p = 1 + 0.9 * p / (1 + 0.9 * p)
    gain = 0.9 * p / (1 + 0.9 * p)  # the best action is -gain * x
    flags = parse("--algorithm ddpg --target_rate 0.05")
    torch.manual_seed(0)
    space = gym.spaces.Box(-1, 1, (1,))
    model = sac.Net(space, 1, **sac.net_arguments(flags))
    target = copy.deepcopy(model)
    optimizers, _ = sac.create_optimizers(flags, model)
    for i in range(1000):
        x, action = torch.rand(32, 1) * 2 - 1, torch.rand(1, 32, 1) * 2 - 1
        following = x + action[0]
        sample = make_sample()._replace(
            rows={"frame": torch.stack([x, following])},
            actions=action,
            returns=-(x.square() + action[0].square()).T,
            discounts=torch.full((1, 32), 0.9),
        )
        sac.learn(flags, model, target, sample, optimizers, i)
    x = torch.linspace(-0.8, 0.8, 9)[:, None]
    with torch.no_grad():
        best = model.actor(x).tanh()
        values = model.critics(x, best)[0]
    torch.testing.assert_close(best, -gain * x, rtol=0, atol=0.08)
    torch.testing.assert_close(values, -p * x[:, 0].square(), rtol=0, atol=0.08)


@pytest.mark.parametrize(
    ("observations", "actions", "message"),
    [(BOX, gym.spaces.Discrete(2), "needs a bounded Box: dqn.py takes Discrete"),
     (gym.spaces.Dict(a=gym.spaces.Box(0, 255, (3, 96, 96), np.uint8)), ACTIONS,
      "observations are images")],
)  # fmt: skip
def test_spaces_it_does_not_take_are_refused(observations, actions, message):
    with pytest.raises(FlagError, match=message):
        flags = sac.resolve(sac.parser.parse_args([]), actions)
        create_net(sac.Net, observations, actions, **sac.net_arguments(flags))


def test_a_target_entropy_must_be_finite(capsys):
    for value in ("nan", "inf"):
        with pytest.raises(SystemExit):
            sac.parser.parse_args(["--target_entropy", value])
        assert (
            f"--target_entropy: {value} is not valid: it must be finite" in capsys.readouterr().err
        )


def test_flags_of_another_algorithm_are_refused():
    for arguments in ("--target_noise 0.3", "--exploration_noise 0.3",
                      "--algorithm td3 --target_entropy -5"):  # fmt: skip
        with pytest.raises(FlagError, match="is not for --algorithm (sac|td3)"):
            parse(arguments)
    for algorithm in ("sac", "td3", "ddpg"):
        flags = parse(f"--algorithm {algorithm}")
        assert sac.resolve(flags, ACTIONS) == flags


class Walk(gym.Env):
    """Observes [id, episode, step, last action]; of 5 steps, every other episode is cut."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,))
    action_space = gym.spaces.Box(-1, 1, (1,))
    episode = -1

    def reset(self, *, seed=None, options=None):
        self.id = self.id if seed is None else seed
        self.episode, self.count, self.last = self.episode + 1, 0, 0.0
        return self._observe(), {}

    def step(self, action):
        self.count, self.last = self.count + 1, float(action[0])
        is_over, is_cut = self.count == 5, self.episode % 2 == 1
        return self._observe(), float(self.count), is_over and not is_cut, is_over and is_cut, {}

    def _observe(self):
        return np.array([self.id, self.episode, self.count, self.last], np.float32)


class Constant(nn.Module):
    """A net whose action is always 0.25."""

    def __init__(self):
        super().__init__()
        self.action = nn.Parameter(torch.tensor(0.25))

    def forward(self, inputs, agent_state):
        assert inputs.keys() == {"frame", "reward", "done", "last_action"}
        return {"action": self.action.expand(*inputs["done"].shape, 1)}, agent_state


def test_what_is_played_is_replayed_row_by_row():
    flags = sac.parser.parse_args("--num_envs 3 --discounting 0.5 --seed 1".split())
    spaces = Walk.observation_space, Walk.action_space
    flags = sac.resolve(flags, spaces[1])
    _, (rows, _, state) = create_net(sac.Net, *spaces, **sac.net_arguments(flags))
    feed = ReplayFeed(sac.create_replay(flags, rows, state), 1.0, 0, 8, 0)
    with contextlib.closing(ParallelEnvironments(Walk, [11, 22, 33], 0, "test")) as environments:
        steps = sac.play(flags, Constant(), environments, feed, num_random=30)
        list(itertools.takewhile(lambda num_steps: num_steps < 300, steps))
    sample = feed.replay.sample(2000)
    (x, following), action = sample.rows["frame"], sample.actions[0, :, 0]
    assert (x[:, 0] == np.array([11, 22, 33])[sample.handle.envs]).all()
    assert np.unique(sample.handle, axis=1).shape[1] > 240  # places
    np.testing.assert_array_equal(sample.returns[0], x[:, 2] + 1)
    is_end = (x[:, 2] == 4) & (x[:, 1] % 2 == 0)
    np.testing.assert_array_equal(sample.discounts[0], np.where(is_end, 0, 0.5))
    goes_on = ~is_end  # as a cut episode, the last observation of which follows
    np.testing.assert_array_equal(following[goes_on][:, :2], x[goes_on][:, :2])
    np.testing.assert_array_equal(following[goes_on][:, 2], x[goes_on][:, 2] + 1)
    np.testing.assert_array_equal(following[goes_on][:, 3], action[goes_on])
    # Of the first 30 agent steps, 10 rows of each environment, actions are random.
    is_random = sample.handle.starts < 10
    assert ((action != 0.25) == is_random).all() and len(set(action[is_random])) > 10


SMALL = "--learning_starts 100 --batch_size 32 --replay_ratio 32"


def train(folder, name, *arguments):
    run(SCRIPT, "sac", SMALL, *arguments, "--xpid", name, "--savedir", folder)
    return read_rows(folder / name), load(folder / name / "model.tar")["model_state_dict"]


def test_updates_that_are_not_finite_are_counted_one_by_one(monkeypatch):
    flags = parse("--batch_size 8 --learning_starts 0")
    model, target = create_nets(flags)
    learner = Learner(model, sac.create_optimizers(flags, model)[0], lambda step: 1, Version())
    records, numbers = [], itertools.count()

    class Feed(ReplayFeed):
        def count_due(self):
            return 4

    class Drawn:
        def sample(self, batch_size):
            sample, number = make_sample(), next(numbers)
            if number in (5, 42):
                sample.returns[0, 0] = torch.nan
            fields = map_nest(lambda x: x.numpy(), sample._replace(handle=())._asdict())
            return sample._replace(**fields | {"handle": sample.handle})

        def __len__(self):
            return 8

    class FakeRun(types.SimpleNamespace):
        def record(self, metrics, batch=None, is_update=True):
            names = set(batch.cpu_rows) if batch else None
            records.append((math.isfinite(metrics["total_loss"]), names))

    monkeypatch.setattr(sac, "play", lambda *args: range(2 * sac.RECORD_STEPS + 1))
    run = FakeRun(first_step=0, stop=threading.Event(), follow=iter)
    feed = Feed(Drawn(), ratio=32.0, learning_starts=0, rows_per_update=8, slack=0)
    sac.play_and_learn(flags, learner, target, None, feed, run)
    # Of the steps 0, 1, 10, 20 and 40; at 1 and 10 those before one that was skipped, and that.
    assert [finite for finite, _ in records] == [True, True, False, True, False, True, True]
    has_sample = [bool(names) and "sample.frame" in names for _, names in records]
    assert has_sample == [False, False, True, False, True, False, False]


def test_a_run_that_would_end_before_its_first_update_is_refused():
    with pytest.raises(FlagError, match="--learning_starts 10,000 leaves none of .* 10,000"):
        parse("--total_steps 10000")
    parse("--total_steps 10001")


@pytest.mark.long
@pytest.mark.whole
def test_deterministic_runs_are_the_same_and_resume(tmp_path):
    arguments = "--deterministic --seed 3 --num_envs 2 --total_steps 400"
    outcomes = [train(tmp_path, name, arguments) for name in ("one", "two")]
    (_, weights), (_, others) = outcomes
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    arguments = "--total_steps 600 --num_env_processes 2"
    output = run(SCRIPT, "sac", "--xpid one --savedir", tmp_path, arguments)
    assert "The replay is filled anew" in output, output
    assert last_step(tmp_path / "one") >= 600
    output = run(SCRIPT, "sac", "--mode test --num_episodes 2 --xpid one --savedir", tmp_path)
    assert "2 games: mean return" in output


@pytest.mark.whole
def test_a_run_survives_a_killed_process_and_ends_on_sigterm(tmp_path):
    arguments = f"{SMALL} --seed 1 --total_steps 1000000 --num_envs 2 --num_env_processes 2"
    with Program(SCRIPT, "sac", arguments, "--xpid run --savedir", tmp_path) as program:
        program.wait_until(lambda: last_step(tmp_path / "run") > 200)
        os.kill(sorted(program.members("forkserver"))[1], signal.SIGKILL)
        program.wait_until(lambda: "died and is replaced" in program.output)
        before = last_step(tmp_path / "run")
        program.wait_until(lambda: last_step(tmp_path / "run") > before + 200)
        os.kill(program.pid, signal.SIGTERM)
        output = program.finish(128 + signal.SIGTERM)
    assert "To go on" in output
