# SPDX-License-Identifier: Apache-2.0
"""A run's threads, how long they wait, and what watches for the end of the parent."""

import importlib.machinery
import multiprocessing
import os
import signal
import threading
import time
from contextlib import nullcontext

import pytest

from beast.processes.lifetime import StopSignals, Threads, exit_on_signals, exit_with_parent
from beast.runs import profiling

DEADLINE = 60  # seconds


@pytest.mark.parametrize(
    ("cause", "error"),
    [
        ("a thread ends", None),
        ("a thread raises", "the first error"),
        ("the block is left", None),
        ("the block raises", "of the block"),
    ],
)
def test_any_end_joins_all_threads_and_the_first_error_counts(cause, error):
    stop, woken, calls, names = threading.Event(), threading.Event(), [], []

    def wait():
        assert woken.wait(DEADLINE)
        names.append(threading.current_thread().name)
        if error:
            raise ValueError("a later error")

    def end():
        if error:
            raise KeyError("the first error")

    before = threading.active_count()
    on_exit = [lambda: calls.append(1), lambda: calls.append(2), woken.set]
    with pytest.raises(KeyError, match=error) if error else nullcontext():
        with Threads(stop, on_exit=on_exit) as threads:
            threads.start(wait, copies=2)
            threads.start(wait, name="third")
            if cause.startswith("a thread"):
                threads.start(end)
                assert stop.wait(DEADLINE) and not woken.is_set()
            if cause == "the block raises":
                raise KeyError("of the block")
    assert stop.is_set() and calls == [1, 2]
    assert threading.active_count() <= before  # threads of other tests may end meanwhile
    assert sorted(names) == ["third 0", "wait 0", "wait 1"]


def test_a_wake_that_fails_does_not_keep_the_others_asleep(caplog):
    stop, woken = threading.Event(), threading.Event()

    def wait():
        assert woken.wait(DEADLINE)

    with pytest.raises(ZeroDivisionError):
        with Threads(stop, on_exit=[lambda: 1 / 0, woken.set]) as threads:
            threads.start(wait)
    assert woken.is_set()
    with pytest.raises(KeyError, match="of the block"):
        with Threads(threading.Event(), on_exit=[lambda: 1 / 0]):
            raise KeyError("of the block")
    assert "Another thread failed, too" in caplog.text and "ZeroDivisionError" in caplog.text


def test_seconds_become_fractions_of_the_time_since_last_call(monkeypatch):
    clock = [10.0]
    monkeypatch.setattr(profiling.time, "monotonic", lambda: clock[0])
    fractions = profiling.WaitFractions()
    clock[0] = 12.0
    assert fractions(a=1.0, b=0.5) == {"a": 0.5, "b": 0.25}
    clock[0] = 16.0
    assert fractions(a=1.0, b=4.5) == {"a": 0.0, "b": 1.0}


def test_a_stopwatch_counts_while_all_threads_wait_also_now(monkeypatch):
    clock = [10.0]
    monkeypatch.setattr(profiling.time, "monotonic", lambda: clock[0])
    stopwatch = profiling.Stopwatch(2)
    entered, leave = threading.Event(), threading.Event()

    def wait():
        with stopwatch:
            entered.set()
            leave.wait(DEADLINE)

    thread = threading.Thread(target=wait)
    thread.start()
    assert entered.wait(DEADLINE)
    clock[0] = 11.0
    assert stopwatch.seconds() == 0  # one of them has something to do
    with stopwatch:
        clock[0] = 13.0
        assert stopwatch.seconds() == 2
        clock[0] = 14.0
    clock[0] = 20.0
    assert stopwatch.seconds() == 3
    leave.set()
    thread.join()
    assert stopwatch.seconds() == 3


def test_the_end_of_a_pipe_ends_the_process_that_watches_it():
    read_end, write_end = os.pipe()
    ended, looked = threading.Event(), threading.Semaphore(0)
    exit_with_parent(read_end, ended.set, looked.release)
    os.write(write_end, b"no end yet\n")
    assert all(looked.acquire(timeout=DEADLINE) for _ in range(2))
    assert not ended.is_set()
    os.close(write_end)
    assert ended.wait(DEADLINE)
    os.close(read_end)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_raises_in_no_extension_being_initialized(number):
    initialized = []

    class Loader(importlib.machinery.ExtensionFileLoader):
        def create_module(self, spec):
            os.kill(os.getpid(), number)
            initialized.append(spec)

    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    exit_on_signals()
    try:
        with pytest.raises(SystemExit) as error:
            Loader("extension", "extension.so").create_module("spec")
            threading.Event().wait(DEADLINE)
    finally:
        for n, handler in handlers.items():
            signal.signal(n, handler)
    assert initialized == ["spec"] and error.value.code == 128 + number


def test_a_child_that_an_environment_forks_ends_by_a_signal():
    context = multiprocessing.get_context("fork")
    is_up, signals = context.Event(), StopSignals(print)
    signals.catch()
    try:
        # In short naps: a signal just before a sleep begins is handled when that sleep has ended.
        naps = 20 * DEADLINE
        child = context.Process(
            target=lambda: (is_up.set(), [time.sleep(0.1) for _ in range(int(naps))])
        )
        child.start()
        assert is_up.wait(DEADLINE)  # Python forgets signals that come before
        child.terminate()
        child.join(DEADLINE)
    finally:
        signals.restore()
    assert child.exitcode == -signal.SIGTERM and signals.first is None
