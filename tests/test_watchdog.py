# SPDX-License-Identifier: Apache-2.0
"""Who is silent is logged, with stacks; silent servers are replaced."""

import contextlib
import logging
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from program import Program, last_step, wait_until

from beast.watchdog import Watchdog

REPO = pathlib.Path(__file__).parent.parent
HELPERS = REPO / "tests" / "helpers"
CATCH, CATCH_ENV, CATCH_POLY = (HELPERS / f"catch{end}.py" for end in ("", "_env", "_poly"))


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


def test_a_silent_thread_is_logged_with_its_stack_and_again_after_twice_the_time(watch, caplog):
    watchdog = watch(0.2)
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


def test_a_thread_that_beats_now_and_then_or_has_ended_is_not_logged(watch, caplog):
    looked = threading.Semaphore(0)
    watchdog = watch(1, lambda: looked.release() or [])
    thread = threading.Thread(target=lambda: watchdog.beat("ends"), name="short")
    thread.start()
    thread.join()
    for _ in watchdog.follow(range(9), "waits", "works"):
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


def test_an_interpreter_that_is_kept_busy_prints_its_stacks_all_the_same():
    code = """
import ctypes, sys
from beast.watchdog import Watchdog
def hold_the_interpreter():
    ctypes.PyDLL(None).sleep(4)  # PyDLL keeps the lock
watchdog = Watchdog(0.5)
import time; time.sleep(1)
hold_the_interpreter()
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60
    )
    assert "in hold_the_interpreter" in result.stderr


@pytest.mark.whole
@pytest.mark.parametrize("script", [CATCH, CATCH_POLY], ids=["monobeast", "polybeast"])
def test_sigusr1_prints_the_stacks_of_all_processes_and_the_run_goes_on(script, tmp_path):
    arguments = f"--env Catch --savedir {tmp_path} --xpid run --total_steps 100000000"
    with Program(script, arguments, TMPDIR=str(tmp_path)) as program:
        program.wait_until(lambda: last_step(tmp_path / "run") > 0)
        places = ["in train", "in batch_and_learn", "in _watch"]
        places += (
            ["in act"] if script == CATCH else ["in supervise", "in server_main", "in _run_stream"]
        )

        def are_printed():  # a server may be between two messages at that moment, not in answer
            os.kill(program.pid, signal.SIGUSR1)
            time.sleep(0.5)
            return all(place in program.output for place in places)

        program.wait_until(are_printed)
        step = last_step(tmp_path / "run")
        program.wait_until(lambda: last_step(tmp_path / "run") > step)
        os.kill(program.pid, signal.SIGINT)
        status, _ = program.end()
        assert status == 128 + signal.SIGINT


@pytest.mark.whole
def test_a_stopped_server_is_logged_killed_and_replaced():
    arguments = "--env Catch --server_address 127.0.0.3:0 --num_servers 1 --stall_timeout_s 1"
    arguments = arguments.replace(":0", f":{50000 + os.getpid() % 10000}")
    with Program(CATCH_ENV, arguments) as program:
        program.wait_until(lambda: program.output.count("serving on") == 1)
        (server,) = program.members("spawn_main")
        os.kill(server, signal.SIGSTOP)
        program.wait_until(lambda: f"its process {server} is stopped" in program.output)
        program.wait_until(lambda: program.output.count("serving on") == 2)
        assert re.search(r"was silent for \d+ s; restarting it in", program.output)
        assert server not in program.members()
        os.kill(program.pid, signal.SIGTERM)
        program.end()


@pytest.mark.whole
def test_a_server_whose_environment_hangs_is_logged_with_its_stack_and_replaced(tmp_path):
    marker = tmp_path / "marker"
    arguments = f"--env Failing-hang:{marker} --savedir {tmp_path} --xpid run --stall_timeout_s 1"
    arguments += " --total_steps 100000000 --num_servers 1"
    with Program(CATCH_POLY, arguments, TMPDIR=str(tmp_path)) as program:
        program.wait_until(marker.exists)
        program.wait_until(lambda: re.search(r"silent for \d+ s; restarting it in", program.output))
        assert "catch_env.py" in program.output and "in step" in program.output
        assert re.search(r"the server of unix:.* has been silent for \d+ s", program.output)
        assert re.search(r"stream 0 has been silent for \d+ s: it waits for env", program.output)
        step = last_step(tmp_path / "run")
        program.wait_until(lambda: last_step(tmp_path / "run") > step)
        os.kill(program.pid, signal.SIGINT)
        program.end()
