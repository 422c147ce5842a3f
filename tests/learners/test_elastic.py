# SPDX-License-Identifier: Apache-2.0
"""Learners that come and go: a short campaign, how one takes over, and what they refuse."""

import contextlib
import importlib.util
import logging
import os
import re
import signal
import socket
import threading
from unittest import mock

import pytest
import torch
from deadline import Thread
from files import fill
from program import HELPERS, ROOT, Program, last_step, load, read_meta
from small_run import create_learner, create_parser, parse, save, update

from beast.errors import EnvError, FlagError
from beast.flags import parse_flags
from beast.learners import elastic, learner_group
from beast.learners.elastic import ElasticGroup, join_group
from beast.runs.run import Run
from beast.runs.run_folder import RunFolder

CATCH = "--env Catch --disable_cuda --num_actors 1 --envs_per_actor 4 --batch_size 4"


@pytest.mark.whole
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "options",
    [
        "--kills 2 --learners 3 --program polybeast",
        pytest.param("--kills 1 --learners 2 --target lighthouse", marks=pytest.mark.long),
    ],
)
def test_learners_stay_one_policy_whoever_is_killed(options):
    pytest.importorskip("torchft")
    # It sees for itself that everything is as it should be.
    with Program(ROOT / "campaigns" / "elastic.py", "--seed 1", options) as campaign:
        output = campaign.finish(seconds=380)
    assert "| failures | 0 |" in output, output


def test_the_campaign_measures_each_learners_pauses(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "campaigns")
    import elastic

    pauses = elastic.find_pauses([10, 11, 19, 20], killed=[8, 13, 15, 30])
    assert pauses == [(1, 1), (8, 4), (1, 1)]


@pytest.fixture
def lighthouse():
    """The address of a lighthouse."""
    LighthouseServer = pytest.importorskip("torchft.coordination").LighthouseServer
    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=5000)
    yield f"localhost:{server.address().rpartition(':')[2]}"
    server.shutdown()


def start(tmp_path, lighthouse, *arguments):
    arguments = (f"--elastic {lighthouse} --xpid run", "--savedir", tmp_path, *arguments)
    return Program(HELPERS / "catch.py", CATCH, *arguments)


@pytest.mark.whole
def test_a_learner_with_other_flags_is_refused_before_it_joins(tmp_path, lighthouse):
    with start(tmp_path, lighthouse, "--learning_rate 0.001") as first:
        first.wait_until(lambda: last_step(tmp_path / "run") > 1000)
        with start(tmp_path, lighthouse, "--learning_rate 0.002") as other:
            output = other.finish(1)
        *before, line = output.splitlines()
        assert not any("ERROR" in line or "Traceback" in line for line in before), output
        message = "all learners need the same flags: this learner has {'learning_rate': 0.002}, "
        assert line.endswith(message + "another one {'learning_rate': 0.001}")
        assert len(list((tmp_path / "run").glob("out.*-*.log"))) == 1  # of the first one
        step = last_step(tmp_path / "run")
        first.wait_until(lambda: last_step(tmp_path / "run") > step + 1000)
        assert "number of learners is 2" not in first.output


@pytest.mark.whole
def test_another_learner_writes_once_the_writer_is_dead(tmp_path, lighthouse):
    folder = tmp_path / "run"
    with start(tmp_path, lighthouse) as writer:
        writer.wait_until(lambda: last_step(folder) > 0)
        with start(tmp_path, lighthouse) as other:
            other.wait_until(
                lambda: "The number of learners is 2 now; this one has rank 1" in other.output
            )
            os.kill(writer.pid, signal.SIGSTOP)
            other.wait_until(
                lambda: "The number of learners is 1 now; this one has rank 0" in other.output
            )
            message = "This learner cannot write logs and checkpoints: another process is training"
            other.wait_until(lambda: message in other.output)
            steps = own_step(other)
            other.wait_until(lambda: own_step(other) > steps)
            step = last_step(folder)  # which nobody changes
            os.kill(writer.pid, signal.SIGKILL)
            other.wait_until(lambda: last_step(folder) > step)
            os.kill(other.pid, signal.SIGTERM)
            other.finish(128 + signal.SIGTERM)
            assert read_meta(folder)["status"] == "stopped by SIGTERM"
            assert load(folder / "model.tar")["step"] > step


def own_step(program):
    """Return the step of the last status line that a program has printed; 0 if there is none."""
    steps = re.findall(r"% \| ([\d,]+) steps", program.output)
    return int(steps[-1].replace(",", "")) if steps else 0


class Member:
    """A learner of a group that comes and goes, whose gradients are all `value`."""

    def __init__(self, tmp_path, lighthouse, value, **metrics):
        self.group, self.value = ElasticGroup(lighthouse), value
        self.metrics = {"steps": float(value)} | metrics
        net = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.learner = create_learner(parse(tmp_path), model=net)
        self.group.share_state(self.learner)

    def sum(self):
        """Return how many learners took part, the sum of gradients, and that of steps."""
        model = self.learner.model
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, self.value)
        steps = self.group.sum(model, self.metrics)["steps"]
        self.group.share_returns([], [])
        assert all(p.grad.stride() == p.stride() for p in model.parameters())
        gradients = {g for p in model.parameters() for g in p.grad.flatten().tolist()}
        return self.group.size, gradients, float(steps)


@pytest.mark.whole
def test_gradients_of_a_newcomers_old_weights_do_not_count(tmp_path, lighthouse):
    first, other = (Member(tmp_path, lighthouse, value) for value in (1, 100))
    assert first.sum() == (1, {1.0}, 1.0)
    first.group.sum(first.learner.model, first.metrics)
    with pytest.raises(ValueError, match="learn calls group.sum twice in an update"):
        first.group.sum(first.learner.model, first.metrics)
    first.group.share_returns([], [])
    with torch.no_grad():
        other.learner.model.weight += 1
    thread = Thread(lambda: [other.sum() for _ in range(3)])
    sums = []
    while [size for size, _, _ in sums].count(2) < 3:
        sums.append(first.sum())
    together = [s for s in sums if s[0] == 2]
    assert together == [(2, {1.0}, 1.0), (2, {101.0}, 101.0), (2, {101.0}, 101.0)]
    assert thread.result() == together
    assert torch.equal(first.learner.model.weight, other.learner.model.weight)
    for member in (first, other):
        member.group.leave(is_over=True)


@pytest.mark.whole
def test_others_go_on_when_one_hangs_in_a_sum_and_take_it_back(tmp_path, lighthouse, monkeypatch):
    *others, hanging = members = [Member(tmp_path, lighthouse, value) for value in (1, 2, 4)]
    sum_all(members, 3)
    may_go_on, pack = threading.Event(), hanging.group.exchange.pack

    def wait_and_pack(*args):  # torchft's threads still send heartbeats
        may_go_on.wait()
        return pack(*args)

    monkeypatch.setattr(hanging.group.exchange, "pack", wait_and_pack)
    thread = Thread(hanging.sum)
    assert sum_all(others, 2) == [(2, {3.0}, 3.0)] * 2
    assert sum_all(others, 2) == [(2, {3.0}, 3.0)] * 2
    may_go_on.set()
    assert [*sum_all(others, 3), thread.result()] == [(3, {3.0}, 3.0)] * 3  # its batch was dropped
    for member in members:
        member.group.leave(is_over=True)


@pytest.mark.whole
def test_a_newcomer_that_nobody_can_reach_ends_before_the_others(tmp_path, lighthouse, monkeypatch):
    monkeypatch.setattr(elastic, "SUM_TIMEOUT", 1)
    monkeypatch.setattr(elastic, "NEWCOMERS_FAILURES", 2)
    monkeypatch.setattr(elastic, "MAX_FAILURES", 5)
    first, other = [Member(tmp_path, lighthouse, value) for value in (1, 10)]
    first.sum()
    join = other.group._join

    def join_behind_a_firewall():
        join()
        monkeypatch.setattr(other.group._manager._pg, "configure", lambda *_: 1 / 0)

    monkeypatch.setattr(other.group, "_join", join_behind_a_firewall)
    has_ended = threading.Event()

    def take_part():  # as Run does where there is an error
        try:
            with pytest.raises(EnvError, match="2 exchanges with other learners in a row have"):
                other.sum()
        finally:
            other.group.leave(is_over=False)
            has_ended.set()

    thread = Thread(take_part)
    while not has_ended.is_set():
        assert first.sum() == (1, {1.0}, 1.0)
    thread.result()
    assert first.sum() == (1, {1.0}, 1.0)
    first.group.leave(is_over=True)


def sum_all(members, size):
    """Have members sum at the same time until so many take part; return the last results."""

    def sum_until(member):
        while (result := member.sum())[0] != size:
            pass
        return result

    return [thread.result() for thread in [Thread(sum_until, member) for member in members]]


@pytest.mark.whole
@pytest.mark.parametrize("joins", [False, True], ids=["before it joins", "after it has joined"])
def test_a_newcomer_with_other_metrics_is_refused(tmp_path, lighthouse, monkeypatch, caplog, joins):
    caplog.set_level(logging.INFO)
    first, other = Member(tmp_path, lighthouse, 1), Member(tmp_path, lighthouse, 1, more=2.0)
    assert first.sum() == (1, {1.0}, 1.0)
    if joins:  # as where both begin at once
        monkeypatch.setattr(other.group, "ask_others", lambda: None)

    def join_and_leave():  # as Run does where there is an error
        try:
            other.sum()
        finally:
            other.group.leave(is_over=True)

    thread = Thread(join_and_leave)
    while thread.is_alive():
        assert first.sum() == (1, {1.0}, 1.0)
    with pytest.raises(FlagError, match="the same metrics: this learner has {'more': 1}"):
        thread.result()
    assert first.sum() == (1, {1.0}, 1.0)
    assert ("number of learners is 2" in caplog.text) == joins
    first.group.leave(is_over=True)


@pytest.mark.whole
def test_the_lighthouse_may_have_an_ipv6_address(tmp_path, lighthouse, monkeypatch):
    lighthouse = lighthouse.replace("localhost", "[::1]")
    try:
        socket.create_connection(("::1", int(lighthouse.rpartition(":")[2]))).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    monkeypatch.setattr(learner_group, "_current", learner_group.ALONE)
    join_group(create_parser().parse_args(["--xpid", "run", "--elastic", lighthouse]))
    first, other = Member(tmp_path, lighthouse, 1), Member(tmp_path, lighthouse, 1, more=2.0)
    assert first.sum() == (1, {1.0}, 1.0)
    with pytest.raises(FlagError, match="the same metrics: this learner has {'more': 1}"):
        other.sum()
    first.group.leave(is_over=True)


@pytest.fixture
def take_part(caplog):
    """Make runs of learners that take part, and have made two updates: they exchange nothing."""
    caplog.set_level(logging.INFO)

    @contextlib.contextmanager
    def take_part(savedir, rank):
        flags = parse(savedir, "--xpid run --disable_cuda")
        learner = create_learner(flags)
        learner.group = ElasticGroup("localhost:1")
        with Run(flags, learner) as run:
            learner.group.rank = rank
            for _ in range(2):
                update(learner)
            yield run

    return take_part


CANNOT_WRITE = "This learner cannot write logs and checkpoints: "


def lock(folder):
    """Hold the folder as a stopped writer does; return a function that ends that."""
    holder = RunFolder(parse(folder))
    return lambda: holder.close("")


def put_a_file_there(folder):
    (folder / "run").rename(folder / "moved")
    (folder / "run").touch()
    return (folder / "run").unlink


def put_a_folder_in_place_of_the_log(folder):
    (folder / "run" / "logs.csv").mkdir()
    return (folder / "run" / "logs.csv").rmdir


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lock, "another process is training in"),
        (lambda folder: fill(folder).unlink, "cannot use --savedir .*No space left on device"),
        (put_a_file_there, "cannot use --savedir .*File exists"),
        (put_a_folder_in_place_of_the_log, "cannot use --savedir .*Is a directory"),
    ],
    ids=["locked", "full", "no folder", "no log"],
)
def test_a_learner_that_cannot_take_over_tries_again(small_disk, take_part, caplog, spoil, reason):
    with take_part(small_disk, rank=0) as run:
        mend = spoil(small_disk)
        for _ in range(2):
            run._handover.take()
        mend()
        assert len(re.findall(CANNOT_WRITE + reason, caplog.text)) == 1
        run._handover.take()
        assert caplog.messages[-1] == "This learner writes logs and checkpoints from here on"
    assert load(small_disk / "run" / "model.tar")["step"] == 200
    assert read_meta(small_disk / "run")["status"] == "ended"


def test_a_learner_that_takes_over_replaces_a_damaged_checkpoint(tmp_path, take_part, caplog):
    model = tmp_path / "run" / "model.tar"
    with take_part(tmp_path, rank=0) as run:
        model.write_bytes(b"damaged")
        run._handover.take()
        assert caplog.messages[-1] == "This learner writes logs and checkpoints from here on"
    assert load(model)["step"] == 200


def test_a_late_learner_resumes_what_the_others_have_saved(tmp_path, take_part, caplog):
    with take_part(tmp_path, rank=0) as run:
        save(parse(tmp_path), num_updates=5)  # by a writer that has ended since
        run._handover.take()
        assert run._learner.step == 500 and "Resuming again, at step 500" in caplog.text
    assert load(tmp_path / "run" / "model.tar")["step"] == 500


def test_a_late_learner_replaces_nothing_that_it_cannot_read(
    tmp_path, take_part, monkeypatch, caplog
):
    with take_part(tmp_path, rank=0) as run, monkeypatch.context() as patch:
        save(parse(tmp_path), num_updates=5)
        patch.setattr(torch, "load", mock.Mock(side_effect=OSError("Input/output error")))
        run._handover.take()
        assert f"{CANNOT_WRITE}cannot read the checkpoint" in caplog.text
        patch.undo()
        run._handover.take()
        assert run._learner.step == 500


def test_a_late_group_does_not_take_over_a_newer_checkpoint(tmp_path, take_part, caplog):
    with pytest.raises(FlagError, match="nothing was saved: the checkpoint is of step 500"):
        with take_part(tmp_path, rank=0) as run:
            run._group.size = 2
            save(parse(tmp_path), num_updates=5)
            run._handover.take()
            assert run._learner.step == 200
    assert load(tmp_path / "run" / "model.tar")["step"] == 500


def test_a_learner_that_never_took_over_says_nothing_was_saved(tmp_path, take_part):
    release = lock(tmp_path)
    with pytest.raises(FlagError, match="nothing was saved: another process is training in"):
        with take_part(tmp_path, rank=0):
            pass
    release()
    assert not (tmp_path / "run" / "model.tar").exists()


def test_an_unreadable_checkpoint_stays_when_all_end_at_once(tmp_path, take_part, caplog):
    model = tmp_path / "run" / "model.tar"
    with pytest.raises(EnvError, match="the lighthouse has gone"):
        with take_part(tmp_path, rank=1):
            model.write_bytes(b"damaged")
            raise EnvError("the lighthouse has gone")
    assert model.read_bytes() == b"damaged"
    assert f"{CANNOT_WRITE}cannot read the checkpoint {model}: it is damaged" in caplog.text


@pytest.mark.parametrize(("num_updates", "step"), [(1, 200), (3, 300)])
def test_when_all_end_at_once_the_newest_weights_are_saved(tmp_path, take_part, num_updates, step):
    with pytest.raises(EnvError):
        with take_part(tmp_path, rank=1):
            save(parse(tmp_path), num_updates)  # by the writer
            raise EnvError("the lighthouse has gone")
    assert load(tmp_path / "run" / "model.tar")["step"] == step


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--elastic needs --xpid NAME"),
        ("--xpid run --seed 3", "--seed is 3, but learners of an --elastic run draw their seeds"),
        ("--xpid run --mode test", "--mode test is for one process: it does not work with"),
        ("--xpid run --write_profiler_trace", "leave it out with --elastic"),
        ("--xpid run --compile", "--compile takes longer than learners wait for each other"),
        ("--xpid run --elastic nowhere", "is 'nowhere', but should be HOST:PORT"),
        ("--xpid run --wandb", "--wandb is for one learner: leave it out with --elastic"),
        ("--xpid run", "no lighthouse answers at --elastic localhost:1:"),
    ],
)
def test_what_does_not_go_with_elastic_is_refused_by_name(
    tmp_path, monkeypatch, arguments, message
):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "torchft" or find(name))
    check_refused(tmp_path, arguments, message)


def check_refused(folder, arguments, message):
    arguments = f"--elastic localhost:1 {arguments} --savedir {folder}".split()
    with pytest.raises(FlagError, match=re.escape(message)):
        parse_flags(create_parser(), arguments)
    assert list(folder.iterdir()) == []


def test_torchrun_and_elastic_at_once_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x7")
    check_refused(tmp_path, "--xpid run", "localhost:1, but torchrun has started this learner")


def test_without_the_package_one_line_says_what_to_install(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torchft" else find(name)
    )
    with socket.create_server(("localhost", 0)) as server:
        arguments = f"--xpid run --elastic localhost:{server.getsockname()[1]}"
        check_refused(tmp_path, arguments, "not installed: pip install torchft==")
