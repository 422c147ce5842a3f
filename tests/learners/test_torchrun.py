# SPDX-License-Identifier: Apache-2.0
"""Under torchrun: how a run of several learners starts, goes on, and ends."""

import os
import pathlib
import re
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from deadline import Thread
from launcher import results, train
from program import last_step, load, read_rows, shared_memory, traces, wait_until

import gala
import monobeast
import ppo
from beast.errors import FlagError
from beast.flags import parse_flags
from beast.learners import torchrun


@pytest.mark.whole
@pytest.mark.parametrize(
    "program", ["monobeast", pytest.param("polybeast", marks=pytest.mark.long)]
)
def test_two_learners_train_resume_and_end_by_sigterm_as_one(tmp_path, program):
    with train(2, tmp_path, program, "--total_steps 5000 --seed 3") as process:
        process.finish()
    (contents, _), folder = results(tmp_path), tmp_path / "run"
    assert contents["stats"]["step"] >= 5000
    assert len(contents["stats"]["game_returns"]) == 100
    assert last_step(folder) == contents["stats"]["step"] == load(folder / "model.tar")["step"]
    log = (folder / "out.rank1.log").read_text()
    assert "steps/s" in log and "ended" in log

    number = {"monobeast": 1, "polybeast": 3}[program]
    with train(number, tmp_path, program, "--total_steps 10_000_000") as process:
        process.wait_until(lambda: last_step(folder) > 6000)
        process.process.terminate()  # torchrun passes it on
        process.end()
        process.wait_for_members()
    log = (folder / "out.log").read_text()
    assert "2 learners: an update sums over 8 new rollouts" in log and "Resuming" in log
    assert f"was of 2 x 4 rollouts (learners x --batch_size), and now is of {number} x 4" in log
    assert results(tmp_path, number)[0]["status"] == 0
    assert load(folder / "model.tar")["step"] == last_step(folder)


def descendants(pid):
    """Return the ids of a process's children, their children and so on."""
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [d for child in map(int, children) for d in (child, *descendants(child))]


@pytest.mark.whole
@pytest.mark.parametrize(
    "program", ["monobeast", pytest.param("polybeast", marks=pytest.mark.long)]
)
def test_a_rank_without_batches_holds_nobody_up(tmp_path, program):
    folder = tmp_path / "run"

    def lags():
        """Return the lags that rank 1 has logged last: dashes while it has no batch."""
        path = folder / "out.rank1.log"
        return re.findall(r"\| lag (\S+)", path.read_text())[-1:] if path.exists() else []

    arguments, options = "--total_steps 10_000_000 --seed 1", "--max-restarts 1"
    with train(2, tmp_path, program, arguments, options=options) as process:
        process.wait_until(lambda: last_step(folder) > 2000 and lags())
        stopped = descendants(process.rank(1))
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        process.wait_until(lambda: lags() == ["-/-/-"])
        step = last_step(folder)
        process.wait_until(lambda: last_step(folder) > step + 2000)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        process.wait_until(lambda: lags() != ["-/-/-"])
        os.kill(process.rank(1), signal.SIGTERM)  # upon which torchrun does not start them anew
        process.finish()
    for content in results(tmp_path):
        assert content["status"] == 0 and content["stats"]["step"] > step + 2000


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
        pytest.param("SIGKILL", 0, "monobeast", 0, marks=pytest.mark.long),
        ("SIGKILL", 1, "polybeast", 1),
        pytest.param("SIGSTOP", 0, "polybeast", 0, marks=pytest.mark.long),
        ("SIGSTOP", 1, "monobeast", 1),
        ("fail", 0, "monobeast", 1),
        pytest.param("fail", 1, "polybeast", 0, marks=pytest.mark.long),
        ("cut", 0, "polybeast", 1),
        pytest.param("cut", 1, "monobeast", 0, marks=pytest.mark.long),
        pytest.param("SIGTERM", 0, "monobeast", 0, marks=pytest.mark.long),
        pytest.param("SIGTERM", 1, "polybeast", 1, marks=pytest.mark.long),
        pytest.param("torchrun SIGTERM", 0, "polybeast", 0, marks=pytest.mark.long),
        pytest.param("torchrun SIGTERM", 1, "monobeast", 1, marks=pytest.mark.long),
        ("torchrun SIGKILL", 0, "monobeast", 0),
    ],
)
def test_a_rank_that_ends_ends_the_run_or_has_it_restarted(
    tmp_path, how, restarts, program, victim
):
    folder, model, before = tmp_path / "run", tmp_path / "run" / "model.tar", shared_memory()
    arguments = "--total_steps 10_000_000 --checkpoint_interval_s 1"
    options, environment = f"--max-restarts {restarts}", {"TMPDIR": str(tmp_path)}
    environment |= {"RANK_TIMEOUT": "10"} if how == "SIGSTOP" else {}
    is_wanted = "SIGTERM" in how  # and so no reason to start anew
    with train(2, tmp_path, program, arguments, options=options, **environment) as process:
        # Saved, not only logged: a run that resumes at step 0 says that it is new.
        process.wait_until(lambda: model.exists() and load(model)["step"] > 2000)
        first = process.rank(0)
        disturb(process, tmp_path, how, victim)
        deadline = time.monotonic() + LIMIT
        if restarts and not is_wanted:
            process.wait_until(lambda: process.rank(0) not in (None, first), LIMIT)
            process.wait_until(lambda: "Resuming" in (folder / "out.log").read_text())
            step = last_step(folder)
            process.wait_until(lambda: last_step(folder) > step + 2000)
            os.kill(process.rank(0), signal.SIGTERM)
            output = process.finish()
        else:
            status, output = process.end(LIMIT)
            assert (status == 0) == (how == "SIGTERM"), output
            wait_until(lambda: process.members() == [], max(0, deadline - time.monotonic()))
    text = output + "".join(path.read_text() for path in folder.glob("out*.log"))
    assert ("Resuming" in text) == (restarts == 1 and not is_wanted), text[-10_000:]
    message = "is stopped, so it is killed" if how == "SIGSTOP" else "another learner has ended"
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
        ({"LOCAL_RANK": "1"}, "", "RANK is 0, but LOCAL_RANK is 1, of 2 learners here and 2 in"),
        ({"MASTER_PORT": None}, "", "RANK is 0, but MASTER_PORT is not set"),
        ({}, "--mode test", "--mode test is for one process"),
        ({}, "--deterministic --batch_size 16", "--deterministic makes runs the same"),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, "", "give it one with --xpid"),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, "--xpid x --disable_checkpoint", "needs checkpoints"),
    ],
)
def test_flags_and_variables_that_contradict_are_refused_at_once(
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


def test_variables_of_another_launcher_are_named_in_training(monkeypatch, caplog):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for mode in ("test", "train"):
        flags = monobeast.parser.parse_args(["--mode", mode])
        assert torchrun.join_group(flags).size == 1
        assert ("this learner trains alone" in caplog.text) == (mode == "train")


@pytest.mark.parametrize("program", [ppo, gala])
def test_programs_for_one_learner_refuse_several_at_once(program, monkeypatch, tmp_path, capsys):
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
        ("commit", "the same commit: rank 1 has 0123abc, rank 0 "),
    ],
)
def test_a_rank_that_differs_is_refused_with_both_values(tmp_path, other, message):
    with train(2, tmp_path, "monobeast", f"OTHER:{other}") as process:
        status, output = process.end()
        process.wait_for_members()
    assert status != 0 and message in output
    assert not (tmp_path / "run" / "model.tar").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.whole
@pytest.mark.parametrize(
    ("how", "victim", "status", "message"),
    [
        ("SIGTERM", 0, 0, ""),  # which waits for the other one
        pytest.param("SIGTERM", 1, 0, "", marks=pytest.mark.long),
        ("torchrun SIGTERM", None, 1, ""),
        pytest.param("SIGKILL", 1, 1, "Signal 9 (SIGKILL)", marks=pytest.mark.long),
        pytest.param(
            *("SIGSTOP", 1, 1, "another learner has ended, or has not answered for 20 s: see"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_rank_that_is_ended_or_stopped_at_the_start_ends_all(
    tmp_path, how, victim, status, message
):
    options = "--max-restarts 1" if "SIGTERM" in how else ""  # which must not start them anew
    with train(2, tmp_path, "monobeast", "OTHER:late", options=options) as process:
        process.wait_until((tmp_path / "late").exists)
        disturb(process, tmp_path, how, victim)
        got, output = process.end(LIMIT)
        process.wait_for_members()
    assert (got != 0) == status and message in output, output
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
def test_ranks_wait_at_the_start_for_others_that_are_alive(monkeypatch, start):
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
def test_sigterm_at_the_start_leaves_no_rank_alone_in_a_call(start, is_in_call):
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

    def end(status):
        statuses.append(status)
        is_over.set()

    monkeypatch.setattr(torchrun.os, "_exit", end)
    start._store = SimpleNamespace(add=lambda *_: is_over.wait(60), check=lambda *_: False)
    monkeypatch.setattr(torchrun, "STOP_TIMEOUT", 0.1 - torchrun.TIMEOUT)  # last: it may be now
    assert is_over.wait(60) and statuses == [1]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("program", "options"),
    [
        pytest.param(
            *("polybeast", "--node-rank {node} --master-addr localhost --master-port {port}"),
            marks=pytest.mark.long,
        ),
        ("monobeast", "--rdzv-backend c10d --rdzv-id run --rdzv-endpoint localhost:{port}"),
    ],
)
def test_two_agents_on_one_machine_train_and_evaluate_as_one_run(tmp_path, program, options):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    nodes = ["--nnodes 2 " + options.format(node=node, port=port) for node in (0, 1)]
    arguments = "--total_steps 10_000_000 --eval_interval 500 --num_episodes 2"
    folder = tmp_path / "run"
    with (
        train(1, tmp_path, program, arguments, where=nodes[0]) as first,
        train(1, tmp_path, program, arguments, where=nodes[1]) as second,
    ):
        first.wait_until(lambda: any(row.get("eval_return_mean") for row in read_rows(folder)))
        os.kill(first.rank(0) or second.rank(0), signal.SIGTERM)
        first.finish()
        second.finish()
    assert results(tmp_path)[0]["stats"]["step"] == last_step(folder)
    assert "Evaluation" not in (tmp_path / "run" / "out.rank1.log").read_text()
