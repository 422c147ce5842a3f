# SPDX-License-Identifier: Apache-2.0
"""GALA: gossip against its theory, the loss against its definition, and the program."""

import concurrent.futures
import contextlib
import copy
import functools
import math
import multiprocessing
import multiprocessing.forkserver
import os
import re
import signal
import sys
import threading
import types

import gymnasium as gym
import pytest
import small_run
import torch
from deadline import Thread, wait_until
from program import ROOT, column, last_step, load, read_rows, run, split_words
from table import Table, make_rows

import gala
from beast.errors import EnvError, FlagError
from beast.gossip.agents import AgentLink, Agents
from beast.gossip.population import AgentMemory, Mailboxes, Population, state_of
from beast.learners.learner import Batch
from beast.learners.nets import create_net
from beast.processes.fork_server import end_process, start_process
from beast.runs.diagnostics import is_finite
from beast.runs.run import MAX_SKIPPED, Run

SCRIPT = ROOT / "gala.py"


def equal(one, other):
    return all(torch.equal(weight, other[name]) for name, weight in one.items())


def make_models(n, size=6, seed=0):
    torch.manual_seed(seed)
    return [torch.nn.Linear(size, 1, bias=False).double() for _ in range(n)]


def make_mailboxes(topology, models):
    n = len(models)
    return Mailboxes([gala.find_in_peers(topology, agent, n) for agent in range(n)], models)


def weights_of(models):
    return torch.stack([model.weight.detach().flatten() for model in models])


def mix_all(mailboxes, models, version=None):
    message = copy.deepcopy(models[0])
    for agent, model in enumerate(models):
        mailboxes.mix(agent, model, message, version)


def publish_all(mailboxes, models):
    for weights, model in zip(mailboxes.weights, models, strict=True):
        weights.publish(model)


@pytest.mark.parametrize(
    ("topology", "agent", "num_agents", "in_peers"),
    [("ring", 0, 4, [3]), ("ring", 2, 4, [1]), ("ring", 0, 1, []), ("complete", 1, 4, [0, 2, 3]),
     ("exponential", 0, 8, [4, 6, 7]), ("exponential", 3, 5, [1, 2, 4]),
     ("exponential", 0, 2, [1])],
)  # fmt: skip
def test_who_sends_to_whom(topology, agent, num_agents, in_peers):
    assert gala.find_in_peers(topology, agent, num_agents) == in_peers


@pytest.mark.parametrize("topology", ["ring", "complete", "exponential"])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_mixing_in_step_multiplies_with_the_matrix(topology, n):
    models = make_models(n)
    mailboxes, first = make_mailboxes(topology, models), weights_of(models)
    matrix = mailboxes.matrix()
    torch.testing.assert_close(matrix.sum(0), torch.ones(n, dtype=torch.float64))
    torch.testing.assert_close(matrix.sum(1), torch.ones(n, dtype=torch.float64))
    if topology == "ring":
        assert torch.linalg.svdvals(matrix)[1] == pytest.approx(math.cos(math.pi / n), abs=1e-12)
    for k in range(1, 20):
        publish_all(mailboxes, models)
        mix_all(mailboxes, models)
        expected = torch.linalg.matrix_power(matrix, k) @ first
        torch.testing.assert_close(weights_of(models), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(weights_of(models).mean(0), first.mean(0))


ROUNDS = {2: (1, 20), 3: (10, 43), 4: (20, 76), 8: (88, 302)}  # by agents and delay


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("n", ROUNDS)
def test_agents_agree_as_fast_as_theory_says(n, delay):
    """The rounds follow from the second eigenvalue, by which the spread shrinks: to a thousandth.

    With a delay the first messages, by 1 smaller here, have part in what the agents agree on.
    """
    rounds = ROUNDS[n][delay]
    models, columns = make_models(n), torch.arange(6, dtype=torch.float64)
    for agent, model in enumerate(models):  # what shrinks most slowly
        model.weight.data = (columns + 2 * math.pi * agent / n).cos()[None]
    mailboxes = make_mailboxes("ring", models)
    for model in models:
        model.weight.data += delay
    first = weights_of(models)
    limit = first.mean(0) - delay / 3
    spread, last = (first - first.mean(0)).norm(), 0
    for count in range(1, int(1.3 * rounds) + 3):
        publish_all(mailboxes, models)
        mix_all(mailboxes, models, mailboxes.weights[0].version - delay)
        x = weights_of(models)
        if (x - x.mean(0)).norm() >= 1e-3 * spread:
            last = count
    assert last + 1 == pytest.approx(rounds, rel=0.02, abs=1 + delay)
    assert (x - limit).norm() < 1e-3 * spread


@pytest.mark.parametrize("n", [3, 4, 8])
def test_agents_stay_within_the_bound_of_proposition_1(n):
    models = make_models(n)
    with torch.no_grad():
        for model in models:
            model.weight.zero_()
    mailboxes = make_mailboxes("ring", models)
    consensus = gala.Consensus(mailboxes, copy.deepcopy(models[0]), torch.zeros(n, 6))
    generator, ratios, tighter = torch.Generator().manual_seed(n), [], 0
    for _ in range(300):
        updates = torch.randn(n, 6, generator=generator, dtype=torch.float64)
        for agent, (model, update) in enumerate(zip(models, updates, strict=True)):
            with torch.no_grad():
                model.weight += update
            consensus.count(agent, update.norm().item())
        tighter = math.cos(math.pi / n) * (tighter + (updates - updates.mean(0)).norm().item())
        publish_all(mailboxes, models)
        distance = consensus.distance()
        mix_all(mailboxes, models)
        x = weights_of(models)
        assert (x - x.mean(0)).norm().item() == pytest.approx(distance, rel=1e-5)
        assert 0 < distance <= tighter <= consensus.bound
        ratios.append(distance / consensus.bound)
    assert max(ratios) > 0.2  # or the bound would say nothing


def test_peers_gradients_are_distinguished_from_others():
    models = make_models(4, size=2)
    # Of 0 and 2 alike, and of 1 and 3, which are no peers; 60 degrees between the two pairs.
    gradients = torch.tensor([[1, 0], [1, 3**0.5], [3, 0], [2, 2 * 3**0.5]])
    metrics = gala.Consensus(make_mailboxes("ring", models), models[0], gradients).metrics()
    assert metrics["gradient_cosine_peers"] == pytest.approx(0.5)
    assert metrics["gradient_cosine_others"] == pytest.approx(1)
    gradients[1, 0] = math.inf  # an update of agent 1 is skipped
    metrics = gala.Consensus(make_mailboxes("ring", models), models[0], gradients).metrics()
    assert metrics["gradient_cosine_peers"] == pytest.approx(0.5)  # of 3 with 0 and with 2
    assert metrics["gradient_cosine_others"] == pytest.approx(1)


def parse(arguments=""):
    flags = gala.parser.parse_args(["--disable_cuda", *arguments.split()])
    flags.precision, flags.fp32_devices = "fp32", []
    return flags


@pytest.mark.parametrize(("clipping", "largest"), [("none", math.inf), ("abs_one", 1)])
def test_the_loss_is_that_of_a2c_by_definition(clipping, largest):
    model, flags = Table(), parse(f"--reward_clipping {clipping}")
    rows = make_rows(model)
    rewards = rows["reward"].clamp(-largest, largest)
    outputs = model(rows, ())[0]
    log_policy = outputs["policy_logits"].log_softmax(-1)
    values, total, count = outputs["baseline"], 0.0, 0
    T, N = len(values) - 1, values.shape[1]
    for i in range(N):
        target = values[T, i].item()  # the return from row t on, or what the baseline says of it
        for t in reversed(range(T)):
            if rows["truncated"][t, i] or rows["terminated"][t, i]:
                target = values[t, i].item()
                continue
            ends = rows["done"][t + 1, i] or rows["terminated"][t + 1, i]
            going_on = 0 if ends else flags.discounting
            target = rewards[t + 1, i].item() + going_on * target
            advantage = target - values[t, i]
            log_probs = log_policy[t, i]
            total = total - log_probs[rows["action"][t + 1, i]] * advantage.detach()
            total = total + flags.baseline_cost * advantage**2
            total = total + flags.entropy_cost * (log_probs.exp() * log_probs).sum()
            count += 1
    (total / count).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss, metrics = gala.compute_loss(flags, model, rows, ())
    loss.backward()
    assert loss.item() == pytest.approx((total / count).item(), abs=1e-12)
    assert metrics["steps"] == count
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_the_baseline_does_not_shape_the_policys_features():
    net = gala.Net(gym.spaces.Box(-1, 1, (4,)), 2)
    net({"frame": torch.randn(5, 3, 4)}, ())[0]["baseline"].sum().backward()
    assert all(p.grad is None for p in net.trunk.parameters())
    assert all(p.grad.abs().sum() > 0 for p in net.baseline_trunk.parameters())


def learn_five_times(flags, rows):
    model = Table()
    optimizer = gala.create_optimizer(flags, model)
    for _ in range(5):
        gala.learn(flags, model, rows, (), optimizer)
    return gala.flatten(model.parameters())


def learn_with_averages(agent, rows, path):
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(path)
    torch.distributed.init_process_group("gloo", store=store, rank=agent, world_size=2)
    return learn_five_times(parse("--exchange allreduce"), rows)


@pytest.mark.whole
def test_averaged_gradients_are_those_of_all_environments(tmp_path):
    model, flags = Table(), parse()
    rows = make_rows(model)
    for name in ("truncated", "terminated", "done"):
        rows[name][:] = False  # or the parts would have other numbers of transitions
    parts = [{name: x[:, part] for name, x in rows.items()} for part in (slice(3), slice(3, 6))]
    paths, context = [str(tmp_path / "store")] * 2, multiprocessing.get_context("forkserver")
    with concurrent.futures.ProcessPoolExecutor(2, context) as pool:
        weights = list(pool.map(learn_with_averages, range(2), parts, paths, timeout=120))
    expected = learn_five_times(flags, rows)
    assert not torch.equal(expected, gala.flatten(model.parameters()))
    for of_agent in weights:
        torch.testing.assert_close(of_agent, expected, rtol=0, atol=1e-12)
    assert torch.equal(*weights)


def test_an_agent_learns_what_others_batches_have_used(monkeypatch):
    monkeypatch.setattr(gala.dist, "all_reduce", lambda x: x.add_(1))
    monkeypatch.setattr(gala.dist, "get_world_size", lambda: 2)
    model = torch.nn.Linear(2, 3)
    model.weight.grad = torch.ones(3, 2)
    gala.average_gradients(model)
    assert (model.weight.grad == 1).all() and (model.bias.grad == 0.5).all()


@pytest.fixture
def sums(monkeypatch):
    """The gradients that all_reduce was given, of the only agent of a group."""
    sums = []
    monkeypatch.setattr(gala.dist, "all_reduce", lambda x: sums.append(x.clone()))
    monkeypatch.setattr(gala.dist, "get_world_size", lambda: 1)
    return sums


@pytest.mark.parametrize("exchange", ["gossip", "allreduce"])
def test_parameters_without_a_gradient_stay_as_they_are(sums, exchange):
    model, flags = Table(), parse(f"--exchange {exchange}")
    model.register_parameter("more", torch.nn.Parameter(torch.ones(3, dtype=torch.float64)))
    model.policy.bias.requires_grad_(False)
    gradient, before = torch.ones(23, dtype=torch.float64), copy.deepcopy(model)
    gala.learn(flags, model, make_rows(model), (), gala.create_optimizer(flags, model), gradient)
    assert torch.equal(model.more, before.more)
    assert torch.equal(model.policy.bias, before.policy.bias)
    assert not torch.equal(model.policy.weight, before.policy.weight)
    parts = gradient.split([x.numel() for x in model.parameters()])
    norms = {name: x.norm() for (name, _), x in zip(model.named_parameters(), parts, strict=True)}
    assert norms["more"] == norms["policy.bias"] == 0 < norms["policy.weight"]


def test_a_checkpoint_is_written_of_an_optimizer_of_a_part():
    model, flags = Table(), parse("")
    learned = types.SimpleNamespace(parameters=model.policy.parameters)
    optimizer = gala.create_optimizer(flags, learned)
    state_of(model, optimizer)
    optimizer.state_dict()  # KeyError, if it had entries of parameters that it does not know


@pytest.mark.parametrize("exchange", ["gossip", "allreduce"])
def test_a_metric_that_is_not_finite_costs_all_agents_the_step(monkeypatch, sums, exchange):
    compute_loss = gala.compute_loss

    def with_metric(*args):
        loss, metrics = compute_loss(*args)
        return loss, metrics | {"of_a_fork": torch.tensor(math.inf)}

    monkeypatch.setattr(gala, "compute_loss", with_metric)
    model, flags = Table(), parse(f"--exchange {exchange}")
    before, optimizer = copy.deepcopy(model), gala.create_optimizer(flags, model)
    metrics = gala.learn(flags, model, make_rows(model), (), optimizer)
    assert not is_finite(metrics) and metrics["update_norm"] == 0
    assert equal(model.state_dict(), before.state_dict())
    assert exchange == "gossip" or sums[0].isnan().all()  # so the other agents take none


@pytest.mark.parametrize("is_saved", [False, True])
def test_bad_updates_end_no_run_and_are_saved_beside_good_ones(tmp_path, is_saved):
    flags = small_run.parse(tmp_path)
    learner, bad = small_run.create_learner(flags), {"steps": 1.0, "update_norm": math.nan}
    updates = [(0, bad, small_run.create_batch())] * (2 * MAX_SKIPPED)
    updates += [(1, {"steps": 1.0, "update_norm": 1.0}, small_run.create_batch())] * is_saved
    agents = types.SimpleNamespace(updates=lambda: (update for update in updates))
    consensus = types.SimpleNamespace(count=lambda *_: None)
    refused = pytest.raises(FlagError, match="no checkpoint was written at step 20: the last 20 up")
    with contextlib.nullcontext() if is_saved else refused:
        with Run(flags, learner, max_skipped=None) as run:
            gala.count_updates(learner, agents, consensus, run)
    assert learner.stats["skipped_updates"] == 2 * MAX_SKIPPED
    assert (tmp_path / "run" / "model.tar").exists() == is_saved


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--agent 2", "--agent 2 is for --mode test"),
        ("--mode test --agent 4", "--agent is 4, but --num_agents is 4"),
        ("--message_delay 1", "is 1, which is for --exchange gossip --deterministic, not for --ex"),
        ("--message_delay 1 --deterministic --exchange none", "not for --exchange none --determin"),
        ("--max_staleness 3 --exchange none", "is 3, .* not for --exchange none: give another --e"),
        ("--max_staleness 3 --deterministic", "not for --exchange gossip --deterministic"),
        ("--topology complete --exchange allreduce", "is complete, .* not for --exchange allr"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(arguments, message):
    with pytest.raises(FlagError, match=message):
        gala.check_flags(parse(arguments))


@pytest.mark.parametrize(("words", "plays"), [("", 1), ("--agent 0", 0), ("--agent 2", 2)])
def test_the_agent_asked_for_plays_or_that_with_the_best_returns(monkeypatch, words, plays):
    made = []
    monkeypatch.setattr(gala, "parse_flags", lambda parser, argv: parser.parse_args(argv))
    monkeypatch.setattr(gala.evaluate, "test", lambda *arguments: made.append(arguments[2]))
    assert gala.main(["--mode", "test", "--num_agents", "3", *words.split()]) == 0
    population = made[0](gym.spaces.Box(-1, 1, (4,)), 3).eval()
    for agent, net in enumerate(population.agents):
        net.policy.bias.data[agent] = 100
    population.returns.copy_(torch.tensor([1, 5, 3]))
    assert population({"frame": torch.zeros(1, 1, 4)}, ())[0]["action"] == plays


def test_max_staleness_waits_for_a_message():
    models, waits = make_models(2), []
    mailboxes = make_mailboxes("ring", models)

    def wait_until(condition):
        assert not condition()
        waits.append(condition)
        for _ in range(3 * is_sent):
            with torch.no_grad():
                models[1].weight += 1
            mailboxes.weights[1].publish(models[1])
        return condition()

    link, is_sent = types.SimpleNamespace(agent=0, wait_until=wait_until), False
    arguments = link, mailboxes, models[0], copy.deepcopy(models[0])
    assert gala.gossip(parse(""), *arguments, misses=9) == 10 and not waits
    flags, own = parse("--max_staleness 3"), models[0].weight.detach().clone()
    assert gala.gossip(flags, *arguments, misses=0) == 1 and not waits
    assert gala.gossip(flags, *arguments, misses=1) == 2 and not waits
    assert gala.gossip(flags, *arguments, misses=2) == 3 and len(waits) == 1  # it has to hold
    assert torch.equal(models[0].weight, own)
    is_sent = True
    assert gala.gossip(flags, *arguments, misses=2) == 0
    mixed = (own + models[1].weight) / 2  # the newest of three messages
    torch.testing.assert_close(models[0].weight, mixed)
    assert gala.gossip(flags, *arguments, misses=0) == 1  # and that one once
    torch.testing.assert_close(models[0].weight, mixed)


@pytest.mark.parametrize("delay", [0, 1])
def test_in_step_an_agent_mixes_what_is_as_old_as_the_delay(delay):
    models, versions = make_models(2), []
    mailboxes = make_mailboxes("ring", models)

    def wait_until(condition):
        assert not condition()  # agent 1 has not come as far
        with torch.no_grad():
            models[1].weight += 1
        mailboxes.weights[1].publish(models[1])
        versions.append(mailboxes.weights[1].version)
        return condition()

    link = types.SimpleNamespace(agent=0, wait_until=wait_until)
    flags = parse(f"--deterministic --message_delay {delay}")
    for _ in range(3):
        mailboxes.weights[0].publish(models[0])
        own, peers_last = (models[i].weight.detach().clone() for i in (0, 1))
        gala.gossip(flags, link, mailboxes, models[0], copy.deepcopy(models[0]), misses=0)
        expected = (own + peers_last + 1 - delay) / 2
        torch.testing.assert_close(models[0].weight.detach(), expected)
    assert len(versions) == 3


def test_too_many_updates_that_are_not_finite_end_an_agent():
    near, far = multiprocessing.Pipe()
    limits = torch.full((2,), 2**62)
    link = AgentLink(0, [1], False, far, torch.zeros(1, dtype=torch.int64), limits, torch.zeros(1))
    names = ("frame", "done", "episode_return", "game_done", "game_return")
    rows = {name: torch.zeros(6, 4) for name in names}
    batch = Batch(rows, (), rows, [], {})
    for norm in [1.0] + [float("nan")] * (MAX_SKIPPED - 1) + [1.0]:
        link.report({"grad_norm": norm}, batch)
        kind, (_, sent) = near.recv()
        assert kind == "update" and ("frame" in sent) == (norm != 1.0) and "game_return" in sent
    with pytest.raises(FloatingPointError, match=f"{MAX_SKIPPED} updates in a row"):
        for _ in range(MAX_SKIPPED):
            link.report({"grad_norm": float("inf")}, batch)
    assert link.rounds[0] == 2 * MAX_SKIPPED


class HasToHold(Exception):
    pass


def learn_once(agent, is_replacement=False, has_news=False):
    """Have an agent make one update that hardly moves it.

    At first the baseline's bias of agent 0 is 1, that of agent 1 is 2. With news the in-peers have
    sent theirs.

    Returns:
      The rows that it learned from, and the biases that it has sent and saved.
    """
    flags = parse("--num_agents 3 --envs_per_agent 1 --learning_rate 1e-9 --env CartPole-v1")
    threads, batches, env = torch.get_num_threads(), [], gala.create_env(flags)
    net, (rows, outputs, _) = create_net(gala.Net, env.observation_space, env.action_space)
    population = Population(net, 3)
    for i, agents_net in enumerate(population.agents):
        torch.nn.init.constant_(agents_net.baseline.bias, 1 + i)
    optimizer = gala.create_optimizer(flags, population)
    memory = AgentMemory(population, optimizer, [[2], [0], [1]])
    if has_news:
        publish_all(memory.mailboxes, population.agents)

    def hold():
        raise HasToHold

    link = types.SimpleNamespace(
        agent=agent, seed=[1, agent], is_replacement=is_replacement, hold=hold,
        report=lambda metrics, batch: batches.append(batch), has_to_hold=lambda: True,
    )  # fmt: skip
    make_net = functools.partial(copy.deepcopy, net)
    with pytest.raises(HasToHold):
        gala.learn_alone(flags, link, rows | outputs, make_net, memory, None)
    torch.set_num_threads(threads)
    memory.mailboxes.weights[agent].load_into(net)
    memory.load(agent, population.agents[agent], optimizer)
    saved = population.agents[agent].baseline.bias.item()
    return batches[0].rows, net.baseline.bias.item(), saved


@pytest.mark.parametrize(
    ("kwargs", "sent", "saved"),
    [({}, 2, 2), ({"is_replacement": True}, 1, 1), ({"has_news": True}, 2, 1.5)],
)
def test_an_agent_begins_with_its_weights_or_a_peers_and_sends(kwargs, sent, saved):
    """A replacement begins with those of an in-peer. They are sent before news are mixed in."""
    assert learn_once(1, **kwargs)[1:] == pytest.approx((sent, saved), abs=1e-3)


def test_each_agent_plays_games_of_its_own_and_new_ones(monkeypatch):
    monkeypatch.setattr("beast.processes.supervisor.start_process", lambda process, name: None)
    monkeypatch.setattr(Agents, "close", lambda self: None)
    seeds = []

    def create_process(target, args, kwargs):  # not daemonic: environments may start processes
        seeds.append(args[3].seed)

    context = types.SimpleNamespace(Process=create_process)
    monkeypatch.setattr("beast.gossip.agents.start_fork_server", lambda: context)
    for seed, first_step in ((1, 0), (2, 0), (1, 500)):  # the last one is a run that is resumed
        flags = parse(f"--num_agents 2 --seed {seed}")
        Agents(flags, [[], []], None, (), False, first_step)
    assert len({tuple(seed) for seed in seeds}) == len(seeds) == 6
    one, again, other = (learn_once(agent)[0]["frame"][0] for agent in (0, 0, 1))
    assert torch.equal(one, again) and not torch.equal(one, other)


def wait_for_the_end(flags, link):
    link._pipe.recv()


@pytest.mark.whole
@pytest.mark.parametrize("in_step", [False, True])
def test_agents_without_an_update_do_not_delay_the_end(in_step, caplog):
    flags = parse("--num_agents 2 --seed 1")
    agents = Agents(flags, [[], []], wait_for_the_end, (), in_step, 0)
    with contextlib.closing(agents):
        agents.finish()
        assert list(agents.updates()) == []
        agents._supervisor.children[0].count_work()  # one has: it is waited for, in step all are
        assert not agents._are_done()
        agents._held[0] = True
        assert agents._are_done() != in_step
    assert not caplog.records  # none was killed as silent


def test_signals_are_handled_while_the_fork_server_imports(monkeypatch):
    blocked, context = [], multiprocessing.get_context("forkserver")
    read = multiprocessing.forkserver.read_signed
    masks = lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [])  # noqa: E731
    monkeypatch.setattr(
        multiprocessing.forkserver, "read_signed", lambda fd: blocked.append(masks()) or read(fd)
    )
    process = context.Process(target=int)
    start_process(process, "one")
    end_process(process, 60)
    assert blocked[0] == set() and process.exitcode == 0


def arguments_of(folder, env="CartPole-v1"):
    where = f"--env {env} --disable_cuda --xpid run --savedir {folder} --num_agents 3"
    return f"{where} --envs_per_agent 4"


def train(folder, *options):
    """Train in this process; the agents are processes of their own."""
    assert gala.main(split_words([arguments_of(folder), *options])) == 0


def agents_of(folder):
    """Return the weights of each agent in the newest checkpoint, by name."""
    saved = load(folder / "run" / "model.tar")["model_state_dict"]
    agents = [{} for _ in range(1 + max(int(name.split(".")[1]) for name in saved if "." in name))]
    for name, weight in saved.items():
        if match := re.fullmatch(r"agents\.(\d+)\.(.+)", name):
            agents[int(match[1])][match[2]] = weight
    return agents


def wait_for_steps(folder, count):
    step = max(0, last_step(folder))
    wait_until(lambda: last_step(folder) > step + count)


def stands_still(folder):
    """Return whether two rows in a row are without a step."""
    steps = [row["step"] for row in read_rows(folder)[-2:]]
    return len(steps) == 2 and len(set(steps)) == 1


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    """Return the folder of a run, and a function that goes on with it and calls `act` meanwhile.

    `act` gets the run's Agents once 1,000 steps are made. A signal or an error has to end the run.
    """
    savedir, started = tmp_path_factory.mktemp("disturbed"), []
    folder = savedir / "run"

    def go_on(act, *options):
        is_over = threading.Event()

        def wait_and_act():
            try:
                wait_for_steps(folder, 1000)
                act(started[-1])
            except BaseException:
                if not is_over.is_set():
                    os.kill(os.getpid(), signal.SIGTERM)
                raise

        thread = Thread(wait_and_act)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("beast.runs.run.LOG_INTERVAL", 0.5)
            patch.setattr("beast.gossip.agents.HOLD_TIMEOUT", 5)
            patch.setattr(
                gala, "Agents", lambda *args: started.append(Agents(*args)) or started[-1]
            )
            # Which evaluations run; a worker of xdist has none.
            patch.setattr(sys.modules["__main__"], "__file__", str(SCRIPT), raising=False)
            try:
                return gala.main(split_words([arguments_of(savedir), *options]))
            finally:
                is_over.set()
                thread.result()

    return types.SimpleNamespace(savedir=savedir, folder=folder, go_on=go_on)


@pytest.fixture(scope="module")
def gossiped(disturbed):
    """What happened in a run with gossip, of which an agent stood still, and another was killed."""
    folder = disturbed.folder

    def act(agents):
        has_learned = lambda row: all(row[f"return_{i}"] for i in range(3))  # noqa: E731
        wait_until(lambda: has_learned(read_rows(folder)[-1]))
        _, killed, stopped = agents.pids()
        os.kill(stopped, signal.SIGSTOP)
        wait_for_steps(folder, 2000)
        os.kill(stopped, signal.SIGCONT)
        wait_for_steps(folder, 1000)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: "died and is replaced" in (folder / "out.log").read_text())
        wait_for_steps(folder, 2000)
        os.kill(stopped, signal.SIGSTOP)  # it does not hold up the end for long
        os.kill(os.getpid(), signal.SIGTERM)

    status = disturbed.go_on(act, "--seed 1 --total_steps 10_000_000")
    return types.SimpleNamespace(
        status=status, saved=load(folder / "model.tar"), agents=agents_of(disturbed.savedir),
        rows=read_rows(folder),
    )  # fmt: skip


@pytest.mark.whole
def test_gossip_goes_on_without_an_agent_that_hangs_or_dies(gossiped):
    assert gossiped.status == 128 + signal.SIGTERM
    saved, last = gossiped.saved, gossiped.rows[-1]
    assert saved["step"] == int(last["step"]) and not equal(*gossiped.agents[:2])
    assert all(agent["policy.bias"].any() for agent in gossiped.agents)  # zeros at first
    assert saved["optimizer_state_dict"]["state"][0]["square_avg"].any()
    assert float(last["consensus_distance"]) > 0 and last["return_0"] and last["return_2"]
    games = saved["stats"]["games_of_agents"]
    assert len(games) == 3 and all(games)


@pytest.mark.whole
def test_allreduce_waits_for_agents_and_is_resumed_and_played(disturbed, gossiped):
    """Agents that gossip has left different become equal; also those that differ by an update."""
    folder, go_on = disturbed.folder, disturbed.go_on

    def evaluate_and_kill(agents):
        stopped = agents.pids()[1]
        wait_until((folder / ".eval" / "model.tar").exists)
        os.kill(stopped, signal.SIGSTOP)  # so that the evaluation has a core
        wait_until(lambda: column(read_rows(folder), "eval_return_mean"))
        wait_until(lambda: stands_still(folder))
        os.kill(stopped, signal.SIGCONT)
        wait_for_steps(folder, 1000)
        os.kill(stopped, signal.SIGKILL)

    def interrupt(agents):
        os.kill(agents.pids()[0], signal.SIGSTOP)
        wait_until(lambda: stands_still(folder))  # else it could end in time
        os.kill(os.getpid(), signal.SIGINT)

    count, exchange = len(gossiped.rows), "--exchange allreduce"
    with pytest.raises(EnvError, match=r"agent \d died, .* the others cannot go on without"):
        go_on(evaluate_and_kill, exchange, "--eval_interval 1000 --num_episodes 2")
    rows = read_rows(folder)[count:]
    assert int(rows[0]["step"]) >= gossiped.saved["step"]
    assert max(column(rows, "consensus_distance")) < 1e-4
    assert not column(rows, "gradient_cosine_peers")
    # Those from before the run was resumed count on.
    before, after = (
        x["stats"]["games_of_agents"] for x in (gossiped.saved, load(folder / "model.tar"))
    )
    for one, other in zip(before, after, strict=True):
        assert len(other) == 100 or other[: len(one)] == one

    before = (folder / "out.log").read_text()
    assert go_on(interrupt, exchange, "--eval_interval 0") == 128 + signal.SIGINT
    printed = (folder / "out.log").read_text().removeprefix(before)
    assert "have not finished their last update" in printed
    saved = load(folder / "model.tar")
    assert saved["step"] == last_step(folder)
    train(disturbed.savedir, exchange, "--total_steps", saved["step"] + 500)
    assert last_step(folder) >= saved["step"] + 500
    first, *others = agents_of(disturbed.savedir)
    assert all(equal(first, other) for other in others)
    assert float(read_rows(folder)[-1]["consensus_distance"]) < 1e-4

    mode = "--mode test --num_episodes 2 --agent 1"
    output = run(SCRIPT, arguments_of(disturbed.savedir), exchange, mode)
    assert "2 games: mean return" in output, output
    assert "at once, agent 1" in output  # who plays


@pytest.mark.whole
def test_agents_go_on_with_what_each_of_them_had_learned(tmp_path):
    def states():
        saved = load(tmp_path / "run" / "model.tar")["optimizer_state_dict"]["state"]
        return [saved[i]["square_avg"] for i in sorted(saved)]

    def check_distance(tolerance):
        weights = torch.stack([torch.cat([w.flatten() for w in x.values()]) for x in agents])
        apart, rows = (weights - weights.mean(0)).norm().item(), read_rows(tmp_path / "run")
        assert column(rows, "consensus_distance")[-1] == pytest.approx(apart, rel=tolerance)
        assert apart > 0.01 and not column(rows, "gradient_cosine_peers")

    train(tmp_path, "--exchange none --total_steps 2000")
    agents, squares = agents_of(tmp_path), states()
    check_distance(0.1)  # of the last row: agents may learn from a batch or two more
    step = last_step(tmp_path / "run")
    # In step, so that no agent makes more updates than others: two to come to the end, two ahead.
    options = f"--exchange none --total_steps {step + 100} --learning_rate 1e-12"
    train(tmp_path, options, "--deterministic")
    assert last_step(tmp_path / "run") >= step + 100 and not equal(agents[0], agents[1])
    for before, after in zip(agents, agents_of(tmp_path), strict=True):
        for name, weight in before.items():
            torch.testing.assert_close(weight, after[name], rtol=0, atol=1e-6)
    check_distance(1e-3)
    n = len(squares) // 3
    assert not torch.equal(squares[0], squares[n])
    for before, after in zip(squares, states(), strict=True):
        # Each of these updates leaves 0.99 of it, and adds something.
        assert (after >= 0.9 * before).all() and not torch.equal(before, after)


@pytest.mark.whole
def test_runs_in_step_are_the_same(tmp_path):
    for delay, total in ((1, 1000), (0, 3000)):  # the second one resumes the first
        found = []
        for name in ("one", "other"):
            folder = tmp_path / name / "run"
            count = len(read_rows(folder))
            options = f"--message_delay {delay} --seed 7 --total_steps {total}"
            train(tmp_path / name, options, "--deterministic")
            found.append((agents_of(tmp_path / name), last_step(folder)))
            rows = read_rows(folder)[count:]
            apart = [(float(r["consensus_distance"]), float(r["consensus_bound"])) for r in rows]
            assert delay or len(apart) > 1 and all(0 < x <= bound for x, bound in apart)
        assert found[0][1] == found[1][1]
        assert all(equal(*pair) for pair in zip(found[0][0], found[1][0], strict=True))
        assert not equal(found[0][0][0], found[0][0][1])


@pytest.mark.long
def test_agents_learn(tmp_path):
    train(tmp_path, "--learning_rate 2e-3 --entropy_cost 0 --seed 1 --total_steps 50_000")
    # Without learning it is 22. Every agent has played 100 games long before the end.
    returns = {k: float(v) for k, v in read_rows(tmp_path / "run")[-1].items() if "return_" in k}
    assert {"return_0", "return_1", "return_2"} <= returns.keys(), returns
    assert min(returns[f"return_{agent}"] for agent in range(3)) > 60, returns


@pytest.mark.whole
def test_twenty_agents_start():
    """A process can be sent 256 file descriptors: not one for each tensor of each agent."""
    net, _ = create_net(gala.Net, gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2))
    population = Population(net, 20)
    optimizer = gala.create_optimizer(parse(), population)
    memory = AgentMemory(population, optimizer, [[(agent - 1) % 20] for agent in range(20)])
    process = multiprocessing.get_context("forkserver").Process(target=id, args=(memory,))
    start_process(process, "one")
    end_process(process, 60)
    assert process.exitcode == 0


@pytest.mark.whole
@pytest.mark.parametrize("exchange", ["gossip", "allreduce"])
def test_one_agent_learns_alone(tmp_path, exchange):
    arguments = f"--num_agents 1 --total_steps 200 --exchange {exchange}"
    if exchange == "gossip":  # once as a process, from images
        arguments += " --envs_per_agent 2 --frame_size 42"
        run(SCRIPT, arguments_of(tmp_path, "PongNoFrameskip-v4"), arguments)
    else:
        train(tmp_path, arguments)
    assert len(agents_of(tmp_path)) == 1 and last_step(tmp_path / "run") >= 200
    assert float(read_rows(tmp_path / "run")[-1]["consensus_distance"]) == 0
