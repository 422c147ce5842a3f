# SPDX-License-Identifier: Apache-2.0
"""What only PolyBeast promises: it survives its servers, here and on other machines."""

import contextlib
import os
import re
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import catch_poly  # it makes the polybeast of this process play Catch
import pytest
import torch
from catch_env import Catch, Counter
from counting import free_address
from program import (
    HELPERS,
    ROOT,
    Program,
    column,
    last_step,
    load,
    read_meta,
    read_rows,
    run,
    split_words,
    traces,
)
from stream import make_many, serving

import polybeast

pytestmark = pytest.mark.whole

CATCH, CATCH_SERVER = HELPERS / "catch_poly.py", HELPERS / "catch_env.py"
ENDLESS = "--total_steps 100_000_000"


def test_servers_whose_main_process_is_killed_are_restarted(tmp_path):
    folder = tmp_path / "run"
    arguments = (
        f"--num_servers 2 --envs_per_stream 2 --batch_size 2 {ENDLESS} --env Catch --xpid run"
    )
    with Program(CATCH, arguments, "--savedir", tmp_path, TMPDIR=str(tmp_path)) as program:
        program.wait_until(lambda: last_step(folder) > 0)
        (private,) = tmp_path.glob("polybeast-*")
        assert private.stat().st_mode & 0o777 == 0o700
        (main,) = program.members("--end_with_stdin")
        pid = min(program.members("spawn_main"))
        os.kill(pid, signal.SIGSTOP)  # one that does not notice
        # Once it has stopped, the kernel hangs it up when its parent, in another group, has died.
        program.wait_until(lambda: ") T " in Path(f"/proc/{pid}/stat").read_text())
        os.kill(main, signal.SIGKILL)
        program.wait_until(lambda: program.output.count("Starting environment servers") == 2)
        program.wait_until(lambda: program.output.count(" is back") == 2)
        step = last_step(folder)
        program.wait_until(lambda: last_step(folder) > step)
        (main,) = program.members("--end_with_stdin")
        os.kill(main, signal.SIGTERM)  # upon which it ends by itself
        output = program.finish(1)
    assert "main process was killed by SIGKILL" in output
    assert output.splitlines()[-1].endswith("the environment servers have ended: see above")
    assert load(folder / "model.tar")["step"] > step
    assert traces(tmp_path) == []


@pytest.fixture(
    scope="module",
    # Of what a server that says nothing any more is lost: the limit of an answer, or keepalive.
    params=[("5", "hangs"), pytest.param(("300", "was lost"), marks=pytest.mark.long)],
    ids=["answer", "keepalive"],
)
def survived(request, tmp_path_factory):
    """A run on servers that were started elsewhere: what they went through, and what came of it."""
    answer_timeout, lost = request.param
    savedir = tmp_path_factory.mktemp("machines")
    folder, facts = savedir / "run", SimpleNamespace(steps=[])
    with contextlib.ExitStack() as stack:
        near, far = facts.near, facts.far = free_address("127.0.0.1"), free_address("127.0.0.2")
        arguments = "--env Catch --num_servers 1 --envs_per_stream 4 --insecure --server_address"
        near_server, far_server = (
            stack.enter_context(Program(CATCH_SERVER, arguments, address))
            for address in (near, far)
        )
        facts.others = [
            stack.enter_context(serving(None, make_environments=make_many(env, n), env=game))
            for env, n, game in ((Counter, 4, ""), (Catch, 3, ""), (Catch, 4, "Asterix"))
        ]
        for server in (near_server, far_server):  # only with both are four environments the rule
            server.wait_until(lambda server=server: "serving on" in server.output)
        program = stack.enter_context(
            Program(
                CATCH, "--server_addresses", ",".join([near, far, *facts.others]), ENDLESS,
                "--batch_size 4 --xpid run --savedir", savedir, ANSWER_TIMEOUT=answer_timeout,
            )
        )  # fmt: skip

        def wait_for_text(pattern, since=0):
            program.wait_until(lambda: re.search(pattern, program.output[since:]))
            return len(program.output)

        def latest(key):
            return float(read_rows(folder)[-1][key])

        def wait_for_steps():
            step = last_step(folder)
            program.wait_until(lambda: last_step(folder) >= step + 500)
            facts.steps.append(last_step(folder))

        program.wait_until(lambda: last_step(folder) > 0 and latest("connected_actors") == 2)
        program.wait_until(lambda: program.output.count("refused: ") >= 3)

        (pid,) = near_server.members("spawn_main")
        os.kill(pid, signal.SIGKILL)
        at = wait_for_text(rf"stream 0: the environment server at {near} was lost")
        wait_for_text(rf"stream 0: the environment server at {near} is back")
        program.wait_until(lambda: latest("reconnects") >= 1 and latest("connected_actors") == 2)
        wait_for_steps()

        (pid,) = near_server.members("spawn_main")
        os.kill(pid, signal.SIGSTOP)
        wait_for_steps()  # of the other server alone
        os.kill(pid, signal.SIGCONT)

        far_processes = far_server.members()
        for pid in far_processes:  # which are as silent then as if they were unplugged
            os.kill(pid, signal.SIGSTOP)
        at = wait_for_text(rf"stream 1: the environment server at {far} {lost}", at)
        wait_for_steps()

        near_server.process.kill()
        near_server.wait_for_members()  # the server notices by itself
        wait_for_text(r"No stream is connected .*: waiting for \['", at)
        program.wait_until(lambda: latest("connected_actors") == 0)

        # Another one takes its place, which names no game, as forks' servers.
        with serving(None, near, make_environments=make_many(Catch, 4)):
            wait_for_steps()
            for pid in far_processes:
                os.kill(pid, signal.SIGCONT)
            wait_for_text(rf"stream 1: the environment server at {far} is back", at)
            program.wait_until(lambda: latest("connected_actors") == 2)

            (pid,) = far_server.members("spawn_main")
            os.kill(pid, signal.SIGSTOP)  # even then it stops in time
            program.process.send_signal(signal.SIGTERM)
            facts.status, facts.output = program.end()
            os.kill(pid, signal.SIGCONT)

        assert far_server.process.poll() is None  # a server stays when the learner goes
        facts.rows, facts.checkpoint = read_rows(folder), load(folder / "model.tar")
    return facts


@pytest.mark.timeout(600)
def test_a_run_survives_servers_killed_hanging_or_silent(survived):
    assert survived.status == 128 + signal.SIGTERM, survived.output
    assert survived.steps == sorted(set(survived.steps))
    assert survived.checkpoint["step"] >= survived.steps[-1]
    assert "Starting environment servers" not in survived.output
    reconnects = column(survived.rows, "reconnects")
    assert reconnects == sorted(reconnects) and reconnects[0] == 0 and reconnects[-1] >= 3
    (line,) = set(re.findall(r"No stream is connected .*", survived.output))
    assert survived.near in line and survived.far in line
    assert "The environments play Catch" in survived.output
    assert survived.checkpoint["flags"]["env"] == "Catch"


def test_servers_that_differ_are_refused_by_name(survived):
    reasons = ["has other spaces: .*", "has 3 environments a stream, expected 4"]
    reasons.append("plays Asterix, expected Catch")
    for stream, (address, reason) in enumerate(zip(survived.others, reasons, strict=True), 2):
        refusal = f"stream {stream}: refused: the environment server at {address} {reason}"
        assert re.search(f"WARNING .*{refusal}", survived.output)
    assert max(column(survived.rows, "connected_actors")) == 2


@pytest.fixture
def train(tmp_path):
    """Return a function that trains in this process, on a server in it; and sees all threads end.

    It returns the status and the seeds that the server was asked for.
    """
    before = set(threading.enumerate())

    def train(*arguments):
        seeds = []
        with serving(None, make_environments=make_many(Catch, 4, seeds)) as address:
            words = ("--batch_size 4", *arguments, "--server_addresses", address)
            status = polybeast.main(split_words([*words, "--savedir", tmp_path]))
            return status, seeds[1:]  # the first one only asked for the spaces

    yield train
    names = ("actors", "log events", "watch servers", "inference", "batch and learn", "watchdog")
    assert [t for t in set(threading.enumerate()) - before if t.name.startswith(names)] == []


class FailingNet(catch_poly.Net):
    """Fails when it answers actors."""

    def forward(self, inputs, agent_state):
        if threading.current_thread().name.startswith("inference"):
            raise ArithmeticError("the net is broken")
        return super().forward(inputs, agent_state)


def test_an_error_in_inference_ends_the_run_with_it(train, monkeypatch, tmp_path):
    monkeypatch.setattr(polybeast, "Net", FailingNet)
    with pytest.raises(ArithmeticError, match="the net is broken") as error:
        train("--num_inference_threads 2 --num_actors 3 --xpid run", ENDLESS)
    assert any(entry.name == "forward" for entry in error.traceback)
    assert read_meta(tmp_path / "run")["status"] == "ArithmeticError: the net is broken"
    assert not (tmp_path / "run" / "model.tar").exists()


def test_the_seed_reaches_model_and_streams_and_resuming_differs(train, monkeypatch, tmp_path):
    weights, seeds = [], []

    def create_net(*args, **kwargs):
        net = catch_poly.Net(*args, **kwargs)
        weights.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
        return net

    monkeypatch.setattr(polybeast, "Net", create_net)
    for xpid, seed in (("a", 3), ("b", 3), ("c", 4)):
        status, asked = train(f"--xpid {xpid} --seed {seed} --num_actors 2 --total_steps 100")
        assert status == 0
        seeds.append(sorted(asked))
    assert seeds == [[[s, 1, 0, 0], [s, 2, 0, 0]] for s in (3, 3, 4)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    step = load(tmp_path / "a" / "model.tar")["step"]
    status, asked = train("--xpid a --total_steps 500 --num_actors 1")
    assert status == 0 and asked == [[3, 1, step, 0]]
    # These servers name no game, and so the run has none, and may be tested with any.
    assert load(tmp_path / "a" / "model.tar")["flags"]["env"] is None
    arguments = "--mode test --num_episodes 1 --xpid a --env Catch --savedir"
    assert polybeast.main([*arguments.split(), str(tmp_path)]) == 0


def test_all_numbers_may_be_one(train, tmp_path):
    arguments = "--unroll_length 1 --batch_size 1 --envs_per_stream 1 --num_learner_threads 1"
    assert train(arguments, "--total_steps 15 --xpid run")[0] == 0
    assert load(tmp_path / "run" / "model.tar")["step"] == 15


def test_without_the_compiled_part_it_says_how_to_build_it(tmp_path):
    for path in [*ROOT.glob("*.py"), *ROOT.glob("libtorchbeast/*.py"), *ROOT.glob("beast/**/*.py")]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(path, copy)
    arguments = "--env PongNoFrameskip-v4 --num_servers 1 --savedir runs"
    output = run(tmp_path / "polybeast.py", arguments, cwd=tmp_path, TMPDIR=str(tmp_path), status=1)
    assert "pip install --no-build-isolation -e ." in output and "compiled part" in output
    assert "Traceback" not in output
    assert not (tmp_path / "runs").exists()
    assert traces(tmp_path) == []
