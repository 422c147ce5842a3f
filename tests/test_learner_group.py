# SPDX-License-Identifier: Apache-2.0
"""Several learners: they are one with a larger batch, go on where one has none, and end as one."""

import contextlib
import copy
import os
import pathlib
import re
import signal
import socket
import subprocess
import threading
import time
import uuid
from types import SimpleNamespace

import pytest
import rank
import small_run
import torch
from deadline import Thread
from program import (
    HELPERS,
    ROOT,
    Program,
    last_step,
    load,
    read_rows,
    shared_memory,
    traces,
    wait_until,
)

import gala
import monobeast
import polybeast
import ppo
from beast import actors, checkpoint, learner_group, servers, starvation, streams, torchrun
from beast.errors import FlagError
from beast.exchange import Exchange, describe_net, refuse_difference
from beast.flags import parse_flags
from beast.learner import Learner
from beast.learner_group import LearnerGroup
from beast.run import Run
from beast.weights import LocalWeights

SMALL = {
    "monobeast": "--num_actors 1 --envs_per_actor 4",
    "polybeast": "--num_servers 1 --num_actors 1 --envs_per_stream 4",
}


class Torchrun(Program):
    """Some learners, of which each writes rankN.tar into a folder in the end."""

    def __init__(self, num_ranks, *arguments, options="", where="--standalone", **environ):
        self.mark = f"TORCHRUN_TEST={uuid.uuid4()}"
        launcher = ("torch.distributed.run", where, f"--nproc-per-node {num_ranks}", options)
        name, value = self.mark.split("=")
        script = HELPERS / "rank.py"
        super().__init__("-m", *launcher, script, *arguments, cwd=ROOT, **environ, **{name: value})

    def members(self, word=""):
        """Return the ids of its processes, of which torchrun puts some in sessions of their own."""
        members = []
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                marked = self.mark.encode() in (path / "environ").read_bytes().split(b"\0")
                if marked and state not in "ZX" and word in (path / "cmdline").read_text():
                    members.append(int(path.name))
        return members

    def rank(self, number):
        """Return the process id of a rank."""
        for pid in self.members("rank.py"):
            with contextlib.suppress(OSError):
                environ = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if f"RANK={number}".encode() in environ:
                    return pid
        return None


def finish(program, status=0):
    """Wait for the end of a Program; return what it printed."""
    got, output = program.end()
    assert got == status, output
    program.wait_for_members()
    return output


# How much ranks may differ from one learner: in metrics, in weights as a part of the largest one,
# and in gradients as a part of the largest one of the same parameter. Of these float32 needed a
# tenth or less on the one CPU where it was measured (metrics 2.9e-5, gradients 4.3e-6). Other CPUs
# may add in another order. Where bfloat16 rounds, only ranks are alike.
TOLERANCES = {"small": (1e-9, 1e-9, 1e-9), "fp32": (3e-4, 1e-5, 1e-4), "bf16": None}


@pytest.mark.whole
@pytest.mark.parametrize("program", ["monobeast", "polybeast"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_are_one_learner_with_their_batches(tmp_path, num_ranks, program):
    with Torchrun(num_ranks, "updates", tmp_path, program) as process:
        finish(process)
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
        assert max(changes) > 1e-3


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


def train(num_ranks, folder, program, *arguments, **options):
    return Torchrun(
        num_ranks, "train", folder, program, "--env Catch --xpid run --disable_cuda --batch_size 4",
        SMALL[program], "--savedir", folder, *arguments, **options,
    )  # fmt: skip


def results(folder, num_ranks=2):
    """Return what the ranks wrote at their ends, after checking that they are one policy."""
    contents = [load(folder / f"rank{i}.tar") for i in range(num_ranks)]
    for content in contents[1:]:
        assert content["weights"] == contents[0]["weights"]
        assert content["stats"]["step"] == contents[0]["stats"]["step"]
        assert content["stats"]["game_returns"] == contents[0]["stats"]["game_returns"]
    return contents


@pytest.mark.whole
@pytest.mark.parametrize("program", ["monobeast", "polybeast"])
def test_two_learners_train_resume_and_end_by_sigterm_as_one(tmp_path, program):
    with train(2, tmp_path, program, "--total_steps 20_000 --seed 3") as process:
        finish(process)
    (contents, _), folder = results(tmp_path), tmp_path / "run"
    assert contents["stats"]["step"] >= 20_000
    assert len(contents["stats"]["game_returns"]) == 100
    assert last_step(folder) == contents["stats"]["step"] == load(folder / "model.tar")["step"]
    log = (folder / "out.rank1.log").read_text()
    assert "steps/s" in log and "ended" in log

    number = {"monobeast": 1, "polybeast": 3}[program]
    with train(number, tmp_path, program, "--total_steps 10_000_000") as process:
        process.wait_until(lambda: last_step(folder) > 25_000)
        process.process.terminate()  # torchrun passes it on
        process.end(40)
        process.wait_for_members()
    log = (folder / "out.log").read_text()
    assert "2 learners: an update sums over 8 rollouts" in log and "Resuming" in log
    assert f"was of 2 x 4 rollouts (learners x --batch_size), and now is of {number} x 4" in log
    assert results(tmp_path, number)[0]["status"] == 0
    assert load(folder / "model.tar")["step"] == last_step(folder)


def descendants(pid):
    """Return the ids of a process's children, their children and so on."""
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [d for child in map(int, children) for d in (child, *descendants(child))]


@pytest.mark.whole
@pytest.mark.parametrize("program", ["monobeast", "polybeast"])
def test_a_rank_without_batches_holds_nobody_up_and_takes_part_again_later(tmp_path, program):
    folder = tmp_path / "run"

    def lags():
        """Return the lags that rank 1 has logged last: dashes while it has no batch."""
        path = folder / "out.rank1.log"
        return re.findall(r"\| lag (\S+)", path.read_text())[-1:] if path.exists() else []

    with train(2, tmp_path, program, "--total_steps 10_000_000 --seed 1") as process:
        process.wait_until(lambda: last_step(folder) > 2000 and lags())
        stopped = descendants(process.rank(1))
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        process.wait_until(lambda: lags() == ["-/-/-"])
        step = last_step(folder)
        process.wait_until(lambda: last_step(folder) > step + 5000)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        process.wait_until(lambda: lags() != ["-/-/-"])
        os.kill(process.rank(1), signal.SIGTERM)  # of one of them, which asks the others
        finish(process)
    for content in results(tmp_path):
        assert content["status"] == 0 and content["stats"]["step"] > step + 5000


LIMIT = 40  # seconds, within which the run has ended, or has begun anew


def disturb(process, folder, how, victim):
    """Disturb a rank or torchrun."""
    if how.startswith("torchrun"):
        os.kill(process.pid, getattr(signal, how.split()[1]))
    elif how.startswith("SIG"):
        os.kill(process.rank(victim), getattr(signal, how))
    else:
        (folder / f"{how}{victim}").touch()  # upon which the rank does it in `learn`


@pytest.mark.whole
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("how", "restarts", "program", "victim"),
    [
        ("SIGKILL", 0, "monobeast", 0),
        ("SIGKILL", 1, "polybeast", 1),
        ("SIGSTOP", 0, "polybeast", 0),
        ("SIGSTOP", 1, "monobeast", 1),
        ("fail", 0, "monobeast", 1),
        ("fail", 1, "polybeast", 0),
        ("cut", 0, "polybeast", 1),
        ("cut", 1, "monobeast", 0),
        ("SIGTERM", 0, "monobeast", 0),
        ("SIGTERM", 1, "polybeast", 1),
        ("torchrun SIGTERM", 0, "polybeast", 0),
        ("torchrun SIGTERM", 1, "monobeast", 1),
        ("torchrun SIGKILL", 0, "monobeast", 0),
    ],
)
def test_the_end_of_a_rank_ends_the_run_in_time_or_has_it_started_again(
    tmp_path, how, restarts, program, victim
):
    folder, model, before = tmp_path / "run", tmp_path / "run" / "model.tar", shared_memory()
    arguments = "--total_steps 10_000_000 --checkpoint_interval_s 1"
    options = f"--max-restarts {restarts}"
    is_wanted = "SIGTERM" in how  # and so no reason to start anew
    with train(2, tmp_path, program, arguments, options=options, TMPDIR=str(tmp_path)) as process:
        process.wait_until(lambda: model.exists() and last_step(folder) > 2000)
        first = process.rank(0)
        disturb(process, tmp_path, how, victim)
        if restarts and not is_wanted:
            process.wait_until(lambda: process.rank(0) not in (None, first), LIMIT)
            process.wait_until(lambda: "Resuming" in (folder / "out.log").read_text())
            step = last_step(folder)
            process.wait_until(lambda: last_step(folder) > step + 2000)
            os.kill(process.rank(0), signal.SIGTERM)
            output = finish(process)
        else:
            status, output = process.end(LIMIT)
            assert (status == 0) == (how == "SIGTERM"), output
        wait_until(lambda: process.members() == [], LIMIT)
    text = output + "".join(path.read_text() for path in folder.glob("out*.log"))
    assert ("Resuming" in text) == (restarts == 1 and not is_wanted), text[-10_000:]
    message = "another learner has ended"
    if is_wanted or how == "torchrun SIGKILL":
        message = "Caught SIGTERM: ending"
        assert [content["status"] for content in results(tmp_path)] == [0, 0]
    assert message in text, text[-10_000:]
    assert model.exists() and traces(tmp_path) == []
    wait_until(lambda: shared_memory() <= before)  # other programs take some for a moment


@pytest.mark.parametrize(
    ("environment", "arguments", "message"),
    [
        ({"RANK": "2"}, "", "RANK is 2, but WORLD_SIZE is 2"),
        ({"LOCAL_RANK": "3"}, "", "LOCAL_RANK is 3, but LOCAL_WORLD_SIZE is 2"),
        ({"LOCAL_WORLD_SIZE": "4"}, "", "LOCAL_WORLD_SIZE is 4, but WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "two"}, "", "to numbers"),
        ({"RANK": None}, "", "to numbers, but they are {'RANK': None"),
        (
            {"LOCAL_RANK": "1"},
            "",
            "RANK is 0, but LOCAL_RANK is 1, of 2 learners here and 2 in all",
        ),
        ({"MASTER_PORT": None}, "", "RANK is 0, but MASTER_PORT is not set"),
        ({}, "--mode test", "--mode test is for one process"),
        ({}, "--deterministic --batch_size 16", "--deterministic makes runs the same"),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, "", "give it one with --xpid"),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, "--xpid x --disable_checkpoint", "needs checkpoints"),
    ],
)
def test_flags_and_variables_that_contradict_each_other_are_refused_at_once(
    monkeypatch, tmp_path, environment, arguments, message
):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in (variables | environment).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(FlagError, match=re.escape(message)):
        parse_flags(monobeast.parser, [*arguments.split(), "--savedir", str(tmp_path)])


@pytest.mark.parametrize("program", [ppo, gala])
def test_programs_for_one_learner_refuse_others_before_anything_starts(
    program, monkeypatch, tmp_path, capsys
):
    with pytest.raises(SystemExit):
        program.main(["--savedir", str(tmp_path), "--elastic", "localhost:1"])
    assert "unrecognized arguments: --elastic localhost:1" in capsys.readouterr().err
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    name = program.parser.get_default("program")
    with pytest.raises(FlagError, match=f"{name} is for one learner, .*RANK is 1"):
        program.main(["--savedir", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.whole
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("--learning_rate=0.5", "rank 1 has {'learning_rate': 0.5}, rank 0 {'"),
        ("--total_steps=5", "rank 1 has {'total_steps': 5}, rank 0 {'"),
        ("commit", "the same commit: rank 1 has 0123abc, rank 0 "),
        ("environment", "the same environment: rank 1 has Box("),
        ("optimizer", "the same optimizer: rank 1 has Adam, rank 0 RMSprop"),
        ("net", "the same net: rank 1 has {'more.weight': 'torch.float32 [2, 2]', 'more.bias'"),
    ],
)
def test_a_rank_that_differs_is_refused_with_both_values(tmp_path, other, message):
    with train(2, tmp_path, "monobeast", f"OTHER:{other}") as process:
        status, output = process.end()
        process.wait_for_members()
    assert status != 0 and message in output
    assert not (tmp_path / "run" / "model.tar").exists()
    assert other in ("net", "optimizer") or not (tmp_path / "run").exists()


@pytest.mark.whole
@pytest.mark.parametrize(
    ("how", "victim", "status", "message"),
    [
        ("SIGTERM", 0, 0, ""),  # which waits for the other one
        ("SIGTERM", 1, 0, ""),
        ("SIGSTOP", 1, 1, "rank.py: another learner has ended, or has not answered for 20 s: see"),
    ],
)
def test_a_rank_that_is_ended_or_stopped_at_the_start_ends_all(
    tmp_path, how, victim, status, message
):
    options = "--max-restarts 1" if how == "SIGTERM" else ""  # which must not start them anew
    with train(2, tmp_path, "monobeast", "OTHER:late", options=options) as process:
        process.wait_until((tmp_path / "late").exists)
        os.kill(process.rank(victim), getattr(signal, how))
        got, output = process.end(40)
        process.wait_for_members()
    assert got == status and message in output, output
    assert status or "Traceback" not in output
    assert not (tmp_path / "run").exists()


@pytest.fixture
def start():
    """A store, and the Start of rank 0 of two."""
    handler, store = signal.getsignal(signal.SIGTERM), torch.distributed.HashStore()
    start = torchrun.Start(store, 0, 2)
    yield store, start
    start.end()
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.whole  # it takes seconds
def test_ranks_wait_at_the_start_for_others_that_are_alive_but_not_for_silent_ones(
    monkeypatch, start
):
    monkeypatch.setattr(torchrun, "TIMEOUT", 5)
    store, start = start

    def be_rank_1():
        for _ in range(60):
            store.add("beats/1", 1)
            time.sleep(0.1)
        store.add("waits/1", 1)  # the first wait

    thread, calls = Thread(be_rank_1), []
    start.meet(lambda: calls.append(1))
    thread.result()
    monkeypatch.setattr(torchrun, "TIMEOUT", 0.5)
    with pytest.raises(TimeoutError, match="rank 1 is silent"):
        start.meet(lambda: calls.append(2))
    assert calls == [1]


@pytest.mark.parametrize("is_in_call", [False, True])
def test_a_rank_that_waits_at_the_start_and_gets_sigterm_leaves_no_other_one_alone_in_a_call(
    start, is_in_call
):
    store, start = start

    def be_rank_1():
        wait_until(lambda: store.add("waits/1", 0) == 1)  # rank 0 waits
        if is_in_call:
            store.compare_set("waits/1/decision", "", "go")
        os.kill(os.getpid(), signal.SIGTERM)
        if is_in_call:
            store.add("waits/1", 1)
        wait_until(lambda: store.check(["stop"]))
        store.add("stopping", 1)

    thread, calls = Thread(be_rank_1), []
    with pytest.raises(SystemExit) as stop:
        start.meet(lambda: calls.append(1))
    thread.result()
    assert stop.value.code == 0 and calls == [1] * is_in_call
    assert store.get("waits/1/decision") == (b"go" if is_in_call else b"stop")


def test_a_rank_ends_where_calls_of_the_store_do_not_return(monkeypatch, start):
    statuses, is_over, (_, start) = [], threading.Event(), start
    monkeypatch.setattr(torchrun, "STOP_TIMEOUT", 0.1 - torchrun.TIMEOUT)

    def end(status):
        statuses.append(status)
        is_over.set()

    monkeypatch.setattr(torchrun.os, "_exit", end)
    start._store = SimpleNamespace(add=lambda *_: is_over.wait(60), check=lambda *_: False)
    assert is_over.wait(60) and statuses == [1]


def test_fewer_servers_than_learners_are_refused():
    flags = polybeast.parser.parse_args(["--server_addresses", "host:1-2"])
    flags.num_learners, flags.rank = 2, 1
    assert servers.own_addresses(flags) == ["host:2"]
    flags.num_learners = 3
    with pytest.raises(ValueError, match="names 2 servers, but there are 3 learners"):
        servers.own_addresses(flags)


@pytest.mark.whole
def test_the_rank_of_updates_that_are_not_finite_is_named_and_writes_its_batch(tmp_path):
    folder = tmp_path / "run"
    with train(2, tmp_path, "monobeast", "--total_steps 10_000_000") as process:
        process.wait_until(lambda: last_step(folder) > 2000)
        (tmp_path / "spoil1").touch()
        assert process.end(40)[0] != 0
        process.wait_for_members()
    assert "not finite (1 in all" in (folder / "out.log").read_text()
    assert "See the logs of learners [1]" in (folder / "out.log").read_text()
    assert "Its batch comes from {'actors': [0, 0, 0, 0]}" in (folder / "out.rank1.log").read_text()
    assert load(folder / "bad_batch.rank1.tar")["batch"]["reward"].isnan().any()
    assert not (folder / "bad_batch.tar").exists()


@pytest.mark.whole
@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("monobeast", "--node-rank {node} --master-addr localhost --master-port {port}"),
        ("polybeast", "--rdzv-backend c10d --rdzv-id run --rdzv-endpoint localhost:{port}"),
    ],
)
def test_two_agents_on_one_machine_train_and_evaluate_as_one_run(tmp_path, program, options):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    nodes = ["--nnodes 2 " + options.format(node=node, port=port) for node in (0, 1)]
    arguments = "--total_steps 10_000_000 --eval_interval 5000 --num_episodes 2"
    folder = tmp_path / "run"
    with (
        train(1, tmp_path, program, arguments, where=nodes[0]) as first,
        train(1, tmp_path, program, arguments, where=nodes[1]) as second,
    ):
        first.wait_until(lambda: any(row.get("eval_return_mean") for row in read_rows(folder)))
        os.kill(first.rank(0) or second.rank(0), signal.SIGTERM)
        finish(first)
        finish(second)
    assert results(tmp_path)[0]["stats"]["step"] == last_step(folder)
    assert "Evaluation" not in (tmp_path / "run" / "out.rank1.log").read_text()


@pytest.fixture
def group(tmp_path):
    """A group of one rank, without torchrun."""
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield LearnerGroup(0, 1, "cpu")
    torch.distributed.destroy_process_group()


def share(group, model):
    group.share_state(SimpleNamespace(model=model, optimizer=None, state=model.state_dict))


def test_a_net_whose_forward_pass_changes_a_buffer_is_refused_by_name(group):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model.register_buffer("unchanged", torch.tensor([torch.nan, torch.inf]))
    share(group, model)
    group.sum(model, {"steps": 1.0})
    model(torch.randn(3, 2))
    with pytest.raises(FlagError, match="changes the net's buffer '1.running_mean'"):
        group.sum(model, {"steps": 1.0})


def test_a_forward_pass_that_changes_the_shape_of_a_buffer_is_refused(group):
    model = torch.nn.Linear(2, 2)
    model.register_buffer("cache", torch.ones(3), persistent=False)
    share(group, model)
    for size in (1, 2):
        model.cache = torch.ones(size)
        with pytest.raises(FlagError, match="changes the net's buffer 'cache'"):
            group.sum(model, {"steps": 1.0})


def test_nets_whose_buffers_differ_are_refused_though_those_are_not_saved():
    nets = [torch.nn.Linear(2, 2) for _ in range(2)]
    for size, net in zip((1, 4), nets, strict=True):
        net.register_buffer("cache", torch.ones(size), persistent=False)
    with pytest.raises(FlagError, match=r"'cache': 'torch.float32 \[1\]'.*'torch.float32 \[4\]'"):
        refuse_difference("net", *(("", describe_net(net)) for net in nets))


@pytest.mark.parametrize("is_reused", [False, True])
def test_a_rank_that_is_stopped_before_the_last_barrier_is_killed_and_no_other_process(
    group, monkeypatch, is_reused
):
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
        assert group.sum(model, {})["steps"] == 0 and group.exchange.num_batches == 0
    group.sum(model, {"steps": 1.0})
    assert group.exchange.num_batches == 1
    assert group.share_returns([], []) == ([2.0, 2.0], [5.0])
    with pytest.raises(FlagError, match="does not sum over them"):
        group.share_returns([], [])


def test_a_program_whose_learn_does_not_sum_ends_with_its_first_update(group, tmp_path):
    flags = small_run.parse(tmp_path)
    learner = small_run.create_learner(flags)
    learner.group = group
    with pytest.raises(FlagError, match="`learn` does not sum over them"):
        with Run(flags, learner) as run, learner.lock:
            run.record(dict(small_run.UPDATE), small_run.create_batch())


def test_metrics_may_come_in_another_order_but_not_under_other_names(group):
    model = torch.nn.Linear(2, 2)
    share(group, model)
    group.sum(model, {"steps": 1.0, "loss": 2.0})
    assert group.sum(model, {"loss": 3.0, "steps": 4.0}) == {"steps": 4.0, "loss": 3.0}
    with pytest.raises(ValueError, match="have to be the same in each update"):
        group.sum(model, {"steps": 1.0, "other": 2.0})


def test_a_learner_without_a_batch_gets_gradients_in_the_memory_layout_of_the_others():
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
    fake = SimpleNamespace(addresses=["a", "b"], num_envs=2, spaces="", env=None, credentials={})
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

    arguments = "--num_actors 4 --envs_per_actor 1 --num_buffers 8 --seed 7"
    for number in range(3):
        flags = monobeast.parser.parse_args(arguments.split())
        flags.rank = number
        system = actors.Actors(flags, SimpleNamespace(Process=Process), None)
        for actor in range(4):
            system._create_process(actor, pipe=None)
    assert found[:4] == [(7, 1, 0, 0), (7, 2, 0, 0), (7, 3, 0, 0), (7, 4, 0, 0)]
    assert len(set(found)) == 12


def test_where_no_learner_has_a_batch_nothing_changes(group, monkeypatch):
    monkeypatch.setattr(starvation, "PATIENCE", 0.1)
    flags, net = monobeast.parser.parse_args(["--disable_cuda"]), rank.SmallNet()
    optimizer, decay = monobeast.create_optimizer(flags, net)
    learner = Learner(net, optimizer, decay, LocalWeights(net))
    learner.group = group
    group.share_state(learner)
    batch = rank.make_batch(0)
    batch = {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}
    monobeast.learn(flags, net, batch, (), optimizer, group)
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
    starvation.join_updates(flags, learner, run, learn)
    assert [result["steps"] for result in results] == [0, 0, 0]
    assert learner.weights.version == version and learner.step == 0
    torch.testing.assert_close(learner.state()["parts"][:2], before, rtol=0, atol=0)


def test_a_checkpoint_of_another_number_of_learners_is_resumed_with_a_warning(tmp_path, caplog):
    small_run.save(small_run.parse(tmp_path))
    flags = small_run.parse(tmp_path)
    flags.num_learners = 4
    assert checkpoint.resume(flags, small_run.create_learner(flags))
    assert "was of 1 x 1 rollouts (learners x --batch_size), and now is of 4 x 1" in caplog.text
    caplog.clear()
    flags.elastic = "localhost:1"  # which says nothing of a number
    assert checkpoint.resume(flags, small_run.create_learner(flags))
    assert "rollouts" not in caplog.text
