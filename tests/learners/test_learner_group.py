# SPDX-License-Identifier: Apache-2.0
"""Several learners: together they are one with a larger batch."""

import copy
import signal
import subprocess
import threading
from types import SimpleNamespace

import gymnasium as gym
import pytest
import rank
import small_run
import torch
from launcher import Torchrun, train
from program import last_step, load, wait_until

import gala
import monobeast
import polybeast
from beast.actors import actors
from beast.actors.weights import LocalWeights
from beast.errors import FlagError
from beast.learners import learner_group
from beast.learners.exchange import Exchange, describe_net, refuse_difference
from beast.learners.learner import Learner
from beast.learners.learner_group import LearnerGroup
from beast.learners.nets import create_net
from beast.runs import checkpoint
from beast.runs.run import Run
from beast.servers import servers, streams

# How much ranks may differ from one learner: in metrics, in weights as a part of the largest one,
# and in gradients as a part of the largest one of the same parameter. Of these float32 needed a
# tenth or less on the one CPU where it was measured (metrics 2.9e-5, gradients 4.3e-6). Other CPUs
# may add in another order. Where bfloat16 rounds, only ranks are alike.
TOLERANCES = {"small": (1e-9, 1e-9, 1e-9), "fp32": (3e-4, 1e-5, 1e-4), "bf16": None}


@pytest.mark.whole
@pytest.mark.parametrize("program", ["monobeast", "polybeast"])
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_are_one_learner_with_their_batches(tmp_path, num_ranks, program):
    with Torchrun(num_ranks, "updates", tmp_path, program) as process:
        process.finish()
    ranks = [load(tmp_path / f"rank{i}.tar") for i in range(num_ranks)]
    for net in rank.NETS:
        first, *others = (content[net] for content in ranks)
        for other in others:  # to the last bit
            for kind in ("weights", "gradients"):
                for name, tensor in first[kind].items():
                    same = tensor is other[kind][name] or torch.equal(tensor, other[kind][name])
                    assert same, (net, kind, name)
        single = rank.learn(rank.PROGRAMS[program], net, num_ranks)
        check_results(net, first, single, num_ranks)
        before = rank.make_net(rank.PROGRAMS[program], net).state_dict()
        changes = [(w - before[name]).abs().max() for name, w in first["weights"].items()]
        assert max(changes) > (3e-4 if net == "bf16" else 1e-3)


def check_results(net, first, single, num_ranks):
    """Check that a rank has learned what a single learner has."""
    assert first["rate"] == single["rate"]
    for update, (ours, alone) in enumerate(zip(first["results"], single["results"], strict=True)):
        broken = update == rank.BROKEN
        assert ours.pop("not_finite") == ([num_ranks - 1] if broken else [])
        assert ours.keys() | {"not_finite"} == alone.keys() and ours["steps"] == alone["steps"]
        if TOLERANCES[net]:
            limits = {"rel": TOLERANCES[net][0], "abs": TOLERANCES[net][0], "nan_ok": broken}
            for name, value in ours.items():
                assert value == pytest.approx(alone[name], **limits), (net, update, name)
    for name, gradient in single["gradients"].items():
        assert (gradient is None) == (first["gradients"][name] is None), name
    if net == "small":
        assert first["gradients"]["unused"] is None
    if TOLERANCES[net]:
        _, of_weights, of_gradients = TOLERANCES[net]
        largest = max(weight.abs().max() for weight in single["weights"].values())
        for name, weight in single["weights"].items():
            assert (first["weights"][name] - weight).abs().max() <= of_weights * largest, name
        for name, gradient in single["gradients"].items():
            if gradient is not None:
                largest = gradient.abs().max()
                assert (first["gradients"][name] - gradient).abs().max() <= of_gradients * largest


@pytest.mark.whole
def test_a_rank_whose_update_is_not_finite_is_named(tmp_path):
    folder = tmp_path / "run"
    with train(2, tmp_path, "monobeast", "--total_steps 10_000_000") as process:
        process.wait_until(lambda: last_step(folder) > 2000)
        (tmp_path / "spoil1").touch()
        assert process.end()[0] != 0
        process.wait_for_members()
    assert "not finite (1 in all" in (folder / "out.log").read_text()
    assert "See the logs of learners [1]" in (folder / "out.log").read_text()
    assert "Its batch comes from {'actors': [0, 0, 0, 0]}" in (folder / "out.rank1.log").read_text()
    assert load(folder / "bad_batch.rank1.tar")["batch"]["reward"].isnan().any()
    assert not (folder / "bad_batch.tar").exists()


def test_fewer_servers_than_learners_are_refused():
    flags = polybeast.parser.parse_args(["--server_addresses", "host:1-2"])
    flags.num_learners, flags.rank = 2, 1
    assert servers.own_addresses(flags) == ["host:2"]
    flags.num_learners = 3
    with pytest.raises(ValueError, match="names 2 servers, but there are 3 learners"):
        servers.own_addresses(flags)


@pytest.fixture
def group(tmp_path):
    """A group of one rank, without torchrun."""
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield LearnerGroup(0, 1, "cpu", SimpleNamespace(meet=lambda call: call(), end=list))
    torch.distributed.destroy_process_group()


def share(group, model):
    group.share_state(SimpleNamespace(model=model, optimizer_name="", state=model.state_dict))


def test_ranks_compare_environment_net_and_optimizer(group, monkeypatch):
    compared, space = {}, gym.spaces.Box(-1, 1, (4,))
    monkeypatch.setattr(group, "check_same", lambda what, value: compared.update({what: value}))
    monkeypatch.setattr(learner_group, "_current", group)
    net, _ = create_net(gala.Net, space, gym.spaces.Discrete(2))
    share(group, net)
    expected = {"environment": f"{space}, Discrete(2)", "net": describe_net(net), "optimizer": ""}
    assert compared == expected


def test_a_forward_pass_that_changes_a_buffer_is_refused(group):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model.register_buffer("unchanged", torch.tensor([torch.nan, torch.inf]))
    share(group, model)
    group.sum(model, {"steps": 1.0})
    group.share_returns([], [])
    model(torch.randn(3, 2))
    with pytest.raises(FlagError, match="the net's buffer '1.running_mean'"):
        group.sum(model, {"steps": 1.0})


def test_a_forward_pass_that_adds_or_grows_a_buffer_is_refused(group):
    model = torch.nn.Linear(2, 2)
    share(group, model)
    model.register_buffer("late", torch.ones(1))
    with pytest.raises(FlagError, match="the net's buffer 'late'"):
        group.sum(model, {"steps": 1.0})
    model.register_buffer("cache", torch.ones(3), persistent=False)
    share(group, model)
    for size in (1, 2):
        model.cache = torch.ones(size)
        with pytest.raises(FlagError, match="the net's buffer 'cache'"):
            group.sum(model, {"steps": 1.0})


def test_nets_whose_unsaved_buffers_differ_are_refused():
    nets = [torch.nn.Linear(2, 2) for _ in range(2)]
    for size, net in zip((1, 4), nets, strict=True):
        net.register_buffer("cache", torch.ones(size), persistent=False)
    with pytest.raises(FlagError, match=r"'cache': 'torch.float32 \[1\]'.*'torch.float32 \[4\]'"):
        refuse_difference("net", *(("", describe_net(net)) for net in nets))


@pytest.mark.parametrize("is_reused", [False, True])
def test_a_rank_stopped_before_the_last_barrier_is_killed(group, monkeypatch, is_reused):
    def fail():
        raise RuntimeError  # without a message

    monkeypatch.setattr(torch.distributed, "barrier", fail)
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: learner_group._state(process.pid)[0] == "T")
            begin = learner_group._state(process.pid)[1]
            begin = "1" if is_reused else begin  # of another process, which had the id before
            group._processes = [(learner_group._machine(), process.pid, begin)]
            group.leave(is_over=True)
            if is_reused:
                assert learner_group._state(process.pid)[0] == "T"
            else:
                assert process.wait(60) == -signal.SIGKILL
        finally:
            process.kill()


def test_returns_are_kept_until_an_update_takes_them(group):
    model = torch.nn.Linear(2, 2)
    share(group, model)
    group.sum(model, {"steps": 1.0})
    assert group.share_returns([1.0, 3.0], [5.0]) == ([], [])
    for _ in range(3):  # exchanges in which nobody has a batch
        assert group.sum(model, {}) == {} and group.exchange.num_batches == 0
    group.sum(model, {"steps": 1.0})
    assert group.exchange.num_batches == 1
    assert group.share_returns([], []) == ([2.0, 2.0], [5.0])
    with pytest.raises(FlagError, match="does not sum over them"):
        group.share_returns([], [])


@pytest.mark.parametrize("program", [monobeast, polybeast])
def test_where_nobody_has_a_batch_there_are_no_metrics(group, program):
    model, flags = torch.nn.Linear(2, 2), SimpleNamespace(grad_norm_clipping=1.0)
    share(group, model)
    arguments = flags, model, None, (), torch.optim.SGD(model.parameters(), 1.0), group
    assert program.learn(*arguments) == {}
    group.sum(model, {"steps": 1.0})
    group.share_returns([], [])
    assert program.learn(*arguments) == {}


def test_a_learn_that_does_not_sum_ends_with_its_first_update(group, tmp_path):
    flags = small_run.parse(tmp_path)
    learner = small_run.create_learner(flags)
    learner.group = group
    with pytest.raises(FlagError, match="`learn` does not sum over them"):
        with Run(flags, learner) as run, learner.lock:
            run.record(dict(small_run.UPDATE), small_run.create_batch())


def test_metrics_may_come_in_any_order_but_need_equal_names(group):
    model = torch.nn.Linear(2, 2)
    share(group, model)
    group.sum(model, {"steps": 1.0, "loss": 2.0})
    with pytest.raises(ValueError, match="learn calls group.sum twice in an update"):
        group.sum(model, {})
    group.share_returns([], [])
    assert group.sum(model, {"loss": 3.0, "steps": 4.0}) == {"steps": 4.0, "loss": 3.0}
    group.share_returns([], [])
    with pytest.raises(ValueError, match="have to be the same in each update"):
        group.sum(model, {"steps": 1.0, "other": 2.0})


def test_gradients_without_a_batch_have_the_others_memory_layout():
    # Else a norm adds in another order, and weights differ in their last bits from then on.
    nets = [torch.nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last) for _ in range(2)]
    nets[0](torch.randn(4, 8, 9, 9)).square().sum().backward()
    exchanges, metrics = [Exchange() for _ in nets], {"steps": 1.0}
    packed = []
    for i, (net, exchange) in enumerate(zip(nets, exchanges, strict=True)):
        exchange.remember_buffers(net)
        exchange.layout = exchange.layout_of(metrics)
        packed.append(exchange.pack(net, {} if i else metrics, i, 2))
    for net, exchange in zip(nets, exchanges, strict=True):
        exchange.unpack(net, sum(packed), 2)
    for ours, other in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(ours.grad, other.grad)
        assert ours.grad.stride() == other.grad.stride() == ours.stride()
    assert not nets[0].weight.grad.is_contiguous()


def test_streams_of_ranks_play_with_seeds_of_their_own(monkeypatch):
    found = []
    monkeypatch.setattr(
        streams.libtorchbeast, "ActorPool", lambda *args, seeds, **kwargs: found.append(seeds)
    )
    fake = SimpleNamespace(
        addresses=["a", "b"], num_envs=2, spaces="", env=None, credentials={}, listening=None,
        observation_space=gym.spaces.Discrete(2), action_space=gym.spaces.Discrete(2),
    )  # fmt: skip
    for number in range(3):
        flags = polybeast.parser.parse_args(["--num_actors", "4", "--seed", "7"])
        flags.rank = number
        streams.Streams(flags, fake, (), 0, torch.device("cpu"))
    assert found[0] == ["7,1,0", "7,2,0", "7,3,0", "7,4,0"]
    assert len({seed for seeds in found for seed in seeds}) == 12


def test_actors_of_ranks_play_with_seeds_of_their_own(monkeypatch):
    monkeypatch.setattr(actors.Actors, "_watch", lambda self: None)
    found = []

    class Process:
        def __init__(self, args, **_):
            found.append(tuple(args[4]))

        def start(self):
            pass

    monkeypatch.setattr(actors, "start_fork_server", lambda: SimpleNamespace(Process=Process))
    arguments = "--num_actors 4 --envs_per_actor 1 --num_buffers 8 --seed 7"
    for number in range(3):
        flags = monobeast.parser.parse_args(arguments.split())
        flags.rank = number
        system = actors.Actors(flags, None)
        for actor in range(4):
            system._create_process(actor, num_deaths=0, pipe=None)
    assert found[:4] == [(7, 1, 0, 0), (7, 2, 0, 0), (7, 3, 0, 0), (7, 4, 0, 0)]
    assert len(set(found)) == 12


def test_where_no_learner_has_a_batch_nothing_changes(group, monkeypatch):
    monkeypatch.setattr(learner_group, "BATCH_PATIENCE", 0.1)
    flags, net = monobeast.parser.parse_args(["--disable_cuda"]), rank.SmallNet()
    optimizer, decay = monobeast.create_optimizer(flags, net)
    learner = Learner(net, optimizer, decay, LocalWeights(net))
    learner.group = group
    group.share_state(learner)
    batch = rank.make_batch(0)
    batch = {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}
    monobeast.learn(flags, net, batch, (), optimizer, group)
    group.share_returns([], [])
    before, version = copy.deepcopy(learner.state()["parts"][:2]), learner.weights.version
    results = []

    def learn(*args):
        results.append(monobeast.learn(*args))
        if len(results) == 3:
            run.stop.set()
        return results[-1]

    # It has no `record`, as there is nothing to record.
    run = SimpleNamespace(stop=threading.Event(), watchdog=SimpleNamespace(beat=lambda what: None))
    group.starvation.begin()
    learner_group.join_updates(flags, learner, run, learn)
    assert results == [{}, {}, {}]
    assert learner.weights.version == version and learner.step == 0
    torch.testing.assert_close(learner.state()["parts"][:2], before, rtol=0, atol=0)


def test_resuming_with_another_number_of_learners_warns(tmp_path, caplog):
    small_run.save(small_run.parse(tmp_path))
    flags = small_run.parse(tmp_path)
    flags.num_learners = 4
    assert checkpoint.resume(flags, small_run.create_learner(flags))
    assert "was of 1 x 1 rollouts (learners x --batch_size), and now is of 4 x 1" in caplog.text
    caplog.clear()
    flags.elastic = "localhost:1"  # which says nothing of a number
    assert checkpoint.resume(flags, small_run.create_learner(flags))
    assert "rollouts" not in caplog.text
