# SPDX-License-Identifier: Apache-2.0
"""Who is silent is logged, with stacks; silent servers are replaced."""

import contextlib
import logging
import multiprocessing
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
from deadline import Thread
from program import HELPERS, ROOT, Program, last_step, wait_until
from small_run import create_learner, parse

from beast.processes import watchdog
from beast.processes.watchdog import Lookout, Watchdog, watched
from beast.runs import run
from beast.servers.server_processes import ServerProcesses


@pytest.fixture
def watch(caplog):
    """Return a function that starts a watchdog; all are closed in the end."""
    caplog.set_level(logging.INFO)
    with contextlib.ExitStack() as stack:

        def watch(*args):
            watchdog = Watchdog(*args)
            stack.callback(watchdog.close)
            return watchdog

        yield watch


def messages(caplog, pattern):
    return [r.getMessage() for r in caplog.records if re.search(pattern, r.getMessage())]


def test_a_stopped_process_counts_silence_from_its_return(monkeypatch):
    clock = types.SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(watchdog, "time", clock)
    now = 100.0
    lookout = Lookout()
    for now in range(100, 120):  # read by the clock
        lookout.look()
        assert lookout.seconds_silent(90) == now - 100  # nobody watched before
        assert lookout.seconds_silent(110) == now - max(110, 100)
    now = 500
    assert lookout.seconds_silent(110) == 0
    lookout.look()
    for now in range(500, 520):
        lookout.look()
        assert lookout.seconds_silent(110) == now - 500
        assert lookout.seconds_silent(505) == now - 505


@pytest.mark.whole
@pytest.mark.timeout(600)
def test_a_job_that_was_suspended_goes_on_with_all_its_processes(tmp_path):
    """As by Slurm, or by Ctrl-Z: longer than any of them may be silent."""
    agents = "--env CartPole-v1 --disable_cuda --num_agents 2 --envs_per_agent 2 --deterministic"
    cases = {
        "catch": "--env Catch --num_actors 2 --envs_per_actor 2 --batch_size 4",
        "catch_poly": "--env Catch --num_servers 2 --envs_per_stream 2 --batch_size 4",
        "fast": "ppo --env CartPole-v1 --num_envs 4 --unroll_length 32 --disable_cuda",
        "fast gala": f"gala {agents}",
    }
    stall_timeout_s, before = 3, {}  # five times as long is enough to start

    def send(program, number):
        for pid in program.members():
            os.kill(pid, number)

    with contextlib.ExitStack() as stack:
        programs = {}
        for name, arguments in cases.items():
            run = f"--stall_timeout_s {stall_timeout_s} --total_steps 1_000_000_000 --xpid run"
            folder, script = tmp_path / name, HELPERS / f"{name.split()[0]}.py"
            program = Program(script, arguments, run, "--savedir", folder, TMPDIR=str(tmp_path))
            programs[folder] = stack.enter_context(program)
            program.wait_until(lambda folder=folder: last_step(folder / "run") > 0)
            send(program, signal.SIGSTOP)
            before[folder] = last_step(folder / "run"), len(program.output)
        time.sleep(watchdog.PATIENCE * stall_timeout_s + 1)
        for folder, program in programs.items():
            send(program, signal.SIGCONT)
            step, begin = before[folder]
            program.wait_until(lambda f=folder, s=step: last_step(f / "run") > s + 500)
            os.kill(program.pid, signal.SIGTERM)
            output = program.finish(128 + signal.SIGTERM)
            assert "The watchdog could not run for" in output[begin:], output
            assert "died" not in output[begin:] and "was silent" not in output[begin:], output


def test_a_silent_thread_is_logged_with_its_stack_and_again(watch, caplog):
    watchdog = watch(0.2)
    watchdog.beat("sleeps", pause=3600)
    done = threading.Event()

    def wait_in_vain():
        watchdog.beat("waits in vain")
        done.wait()
        watchdog.beat("goes on")
        wait_until(lambda: messages(caplog, "lazy is no longer silent"))

    thread = threading.Thread(target=wait_in_vain, name="lazy")
    thread.start()
    try:
        wait_until(lambda: len(messages(caplog, "lazy has been silent")) >= 3)
    finally:
        done.set()
        thread.join()
    logged = messages(caplog, "lazy has been silent")
    assert all("it waits in vain" in text and "in wait_in_vain" in text for text in logged)
    assert not messages(caplog, "MainThread")
    watchdog.beat("hangs", pause=0.3)
    wait_until(lambda: messages(caplog, "MainThread has been silent .* it hangs"))


def test_the_main_thread_sleeps_between_two_looks_after_the_run(tmp_path, monkeypatch):
    flags, pauses = parse(tmp_path), []
    monkeypatch.setattr(run, "LOG_INTERVAL", 0.01)
    with run.Run(flags, create_learner(flags)) as one:
        monkeypatch.setattr(one.watchdog, "beat", lambda what, pause=0: pauses.append(pause))
        monkeypatch.setattr(one, "tick", one.stop.set)
        one.watch()
    assert pauses == [0, 0.01]


@pytest.mark.whole
def test_a_thread_that_beats_or_has_ended_is_not_logged(watch, caplog):
    looked = threading.Semaphore(0)
    watchdog = watch(4, lambda: looked.release() or [])
    thread = threading.Thread(target=lambda: watchdog.beat("ends"), name="short")
    thread.start()
    thread.join()
    for _ in watchdog.follow(range(6), "waits", "works"):
        assert looked.acquire(timeout=60)  # a quarter of what would be too long
    watchdog.close()
    assert messages(caplog, "silent") == []


def test_the_silence_of_another_process_is_logged_with_its_state(watch, caplog):
    code = "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN); print(1); signal.pause()"
    with subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            watch(0.2, lambda: [("it", "does its work", 5, process.pid)])
            wait_until(lambda: messages(caplog, f"it has been silent for 5 s: it does its work; "
                                                f"its process {process.pid} prints"))  # fmt: skip
            os.kill(process.pid, signal.SIGSTOP)
            watch(0.2, lambda: [("it", "does its work", 9, process.pid)])
            wait_until(lambda: messages(caplog, f"is stopped, .* kill -CONT {process.pid}"))
        finally:
            process.kill()


def test_a_main_thread_that_is_busy_prints_its_stack():
    code = """
import ctypes
from beast.processes.watchdog import print_stacks_on_signal
def hold_the_interpreter():
    print("holds it", flush=True)
    ctypes.PyDLL(None).pause()  # PyDLL keeps the lock
print_stacks_on_signal()
hold_the_interpreter()
"""
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "holds it\n"
        wait_until(lambda: pathlib.Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "S")
        process.send_signal(signal.SIGUSR1)
        assert "in hold_the_interpreter" in process.communicate(timeout=60)[1]


def test_what_hangs_before_a_run_is_logged_in_the_main_process(monkeypatch, caplog):
    with watched("creates it", 0.1):
        wait_until(lambda: messages(caplog, "MainThread has been silent for .* s: it creates it"))
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "a parent, which watches it")
    with watched("tries it out", 0.1):
        assert not any(thread.name == "watchdog" for thread in threading.enumerate())


@pytest.mark.parametrize("where", ["full", "closed"])
def test_a_stderr_that_cannot_be_written_raises_nothing(where):
    code = """
import os, signal, threading
from beast.processes.watchdog import print_stacks_on_signal
print_stacks_on_signal()
threading.Thread(target=threading.Event().wait, daemon=True).start()
os.kill(os.getpid(), signal.SIGUSR1)
print("goes on")
"""
    if where == "full":
        stderr = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, stderr = os.pipe()
        os.close(reader)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)
    os.close(stderr)
    assert done.stdout == "goes on\n"


def print_stacks(program, *places):
    """Send SIGUSR1 until stacks of all these places are printed."""

    def are_printed():  # a server may be between two messages at that moment, not in answer
        os.kill(program.pid, signal.SIGUSR1)
        time.sleep(0.3)
        return all(place in program.output for place in places)

    program.wait_until(are_printed)


def goes_on(program, folder):
    """Wait for a later step, and end the program as Ctrl-C does."""
    step = last_step(folder)
    program.wait_until(lambda: last_step(folder) > step)
    os.kill(program.pid, signal.SIGINT)
    assert program.end()[0] == 128 + signal.SIGINT


@pytest.mark.whole
def test_sigusr1_prints_all_stacks_and_the_run_goes_on(tmp_path):
    arguments = f"--env Catch --savedir {tmp_path} --xpid run --total_steps 100000000"
    with Program(HELPERS / "catch.py", arguments) as program:
        program.wait_until(lambda: last_step(tmp_path / "run") > 0)
        print_stacks(program, "in train", "in batch_and_learn", "in _watch", "in act")
        goes_on(program, tmp_path / "run")


def serve(flags, address, seed, started, busy_since):
    started(address)
    threading.Event().wait()


@pytest.mark.whole
def test_a_stopped_server_is_killed_and_replaced(caplog):
    caplog.set_level(logging.INFO)
    flags = types.SimpleNamespace(stall_timeout_s=60, end_with_stdin=False)  # to start within
    servers, stop = ServerProcesses(serve, flags, ["unix:/tmp/nowhere"]), []
    supervisor = servers.supervisor
    (child,) = supervisor.children
    thread = Thread(servers.run, stop)
    try:
        wait_until(lambda: messages(caplog, "serving on"))
        process = child.process
        # Until the next report: one that lives reports each second.
        wait_until(lambda: servers._busy_since[0][-1] > time.monotonic())
        supervisor.patience, patience = 5, supervisor.patience
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: child.process not in (None, process))
        supervisor.patience = patience
        assert process.exitcode == -signal.SIGKILL
        assert messages(caplog, r"died and is replaced in 1 s .*it was silent for \d+ s")
        wait_until(lambda: len(messages(caplog, "serving on")) == 2)
    finally:
        stop.append(0)
        supervisor.wake()
        thread.result()
        servers.close()


@pytest.mark.whole
def test_a_server_that_hangs_is_replaced_and_its_stack_logged(tmp_path):
    marker = tmp_path / "marker"
    # Silence of five times as many seconds ends a server: more than a slow machine starts one in.
    arguments = f"--env Failing-hang@{marker} --savedir {tmp_path} --stall_timeout_s 2 --xpid run "
    arguments += "--total_steps 100000000 --num_servers 1"
    with Program(HELPERS / "catch_poly.py", arguments, TMPDIR=str(tmp_path)) as program:
        program.wait_until(marker.exists)
        for pattern in (
            r"catch_env.py.*, line \d+,? in step",
            r"the server of unix:.* has been silent for \d+ s",
            r"stream 0 has been silent for \d+ s: it waits for env",
            r"died and is replaced in 1 s .*silent for \d+ s",
        ):
            program.wait_until(lambda pattern=pattern: re.search(pattern, program.output))
        step = last_step(tmp_path / "run")
        program.wait_until(lambda: last_step(tmp_path / "run") > step)
        places = ["in train", "in batch_and_learn", "in _watch"]
        print_stacks(program, *places, "in supervise", "in server_main", "in _run_stream")
        goes_on(program, tmp_path / "run")
