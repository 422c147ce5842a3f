# SPDX-License-Identifier: Apache-2.0
"""Children are replaced, not for ever, and what a dead one sent is not lost."""

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import time

import pytest
from deadline import Thread
from program import wait_until

from beast.errors import EnvError
from beast.processes import supervisor
from beast.processes.fork_server import child_main
from beast.processes.supervisor import Supervisor


def echo(pipe):
    """Send back what comes; raise it where it is an error, exit where it is None."""
    while True:
        match pipe.recv():
            case None:
                pipe.send(("last", 1))
                pipe.send(("last", 2))
                os._exit(3)
            case Exception() as error:
                raise error
            case content:
                pipe.send(("echo", content))


@pytest.fixture
def supervise():
    """Return a function that starts a Supervisor of two children; all are closed in the end."""
    context = multiprocessing.get_context("forkserver")
    with contextlib.ExitStack() as stack:

        def start(heartbeat=lambda number: None, patience=60, enough=2, **kwargs):
            def create(number, num_deaths, pipe):
                return context.Process(target=child_main, args=(echo, pipe, pipe))

            names = ["child 0", "child 1"]
            one = Supervisor(names, create, heartbeat, patience, enough, "echoes", **kwargs)
            stack.callback(one.close)
            one.start()
            return one

        yield start


def next_news(one):
    """Return the news of the next call that has some: pairs of a number and a message."""
    found = []
    wait_until(lambda: found.extend((c.number, message) for c, message in one.news(1)) or found)
    return found


def test_messages_of_a_dead_child_come_before_its_death(supervise):
    one = supervise()
    one.children[1].pipe.send(None)
    multiprocessing.connection.wait([one.children[1].process.sentinel], 60)
    assert next_news(one) == [(1, ("last", 1)), (1, ("last", 2)), (1, None)]
    assert one.children[1].cause == "it ended with status 3"
    assert one.pids() == [one.children[0].process.pid]


def test_a_death_is_logged_with_its_cause_and_replaced(supervise, caplog):
    one = supervise()
    one.children[0].pipe.send(ZeroDivisionError("the game is broken"))
    assert next_news(one) == [(0, None)]
    one.restart(one.children[0])
    line = "Child 0 died and is replaced (deaths: 1 in all, 1 in a row; the run ends at 5 in a row)"
    assert line in caplog.text
    assert "Traceback" in caplog.text and "the game is broken" in caplog.text
    assert list(one.news(0)) == []  # which starts it
    one.children[0].pipe.send("again")
    assert next_news(one) == [(0, ("echo", "again"))] and one.num_deaths() == 1


def kill(one, number):
    list(one.news(0))
    one.children[number].process.kill()
    assert next_news(one) == [(number, None)]
    one.restart(one.children[number])


def test_deaths_in_a_row_are_an_error_but_not_after_enough_work(supervise):
    one = supervise()
    for _ in range(supervisor.MAX_DEATHS - 1):
        kill(one, 0)
    list(one.news(0))
    for _ in range(2):
        one.children[0].count_work()
    for _ in range(supervisor.MAX_DEATHS - 1):
        kill(one, 0)
    with pytest.raises(EnvError, match="^child 0 died 5 times with less than 2 echoes .* SIGKILL"):
        kill(one, 0)


def test_where_all_must_die_one_alone_may_die_for_ever(supervise):
    one = supervise(all_of=True)
    for _ in range(supervisor.MAX_DEATHS + 2):
        kill(one, 0)
    for _ in range(supervisor.MAX_DEATHS - 1):
        kill(one, 1)
    with pytest.raises(EnvError, match="^child 1, like all others, died 5 times"):
        kill(one, 1)


def test_starts_that_fail_are_deaths_too(supervise, monkeypatch, caplog):
    one = supervise()

    def fail(self):
        raise EOFError

    one.children[1].process.kill()
    assert next_news(one) == [(1, None)]
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", fail)
    one.restart(one.children[1])
    assert list(one.news(0)) == [] and one.num_deaths() == 2
    assert "Child 1 did not start, and is tried again in 1 s (deaths: 2 in all, 2" in caplog.text
    monkeypatch.setattr(supervisor, "RETRY_PAUSE", 0)
    with pytest.raises(EnvError, match="most recently: child 1 cannot be started"):
        wait_until(lambda: list(one.news(1)))


def test_a_pause_comes_before_a_restart(supervise, caplog):
    one = supervise(pauses=(0, 1))
    kill(one, 0)
    begin = time.monotonic()
    kill(one, 0)
    assert "Child 0 died and is replaced in 1 s" in caplog.text
    assert one.children[0].process is None
    wait_until(lambda: list(one.news(0.1)) or one.children[0].process)
    assert time.monotonic() > begin + 1


@pytest.mark.whole
def test_a_silent_child_is_killed_unless_it_has_nothing_to_do(supervise):
    beats = {}
    one = supervise(beats.get, patience=1)
    for child in one.children:
        os.kill(child.process.pid, signal.SIGSTOP)
    list(one.news(0))
    beats[1] = time.monotonic()
    assert next_news(one) == [(1, None)]
    assert "it was silent for" in one.children[1].cause
    assert [name for name, *_ in one.silences("plays")] == []
    beats[0] = time.monotonic()
    assert [name for name, *_ in one.silences("plays")] == ["child 0"]


def test_wake_and_close_end_a_wait(supervise):
    one = supervise()
    for end in (one.wake, one.close):
        pids = one.pids()
        waiting = Thread(lambda: list(one.news(60)))
        end()
        assert waiting.result() == []
    one.wake()
    assert list(one.news(60)) == []
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def test_a_child_that_cannot_be_created_leaves_no_other(caplog):
    caplog.set_level(logging.ERROR)
    context, made = multiprocessing.get_context("forkserver"), []

    def create(number, num_deaths, pipe):
        if made:
            raise TypeError("cannot be pickled")
        made.append(context.Process(target=child_main, args=(echo, pipe, pipe)))
        return made[0]

    with pytest.raises(TypeError, match="cannot be pickled"):
        Supervisor(["child 0", "child 1"], create, lambda number: None, 60, 2, "echoes").start()
    assert made[0].exitcode is not None and not caplog.records


def test_a_closed_supervisor_starts_nothing(supervise):
    one = supervise()
    one.children[0].process.kill()
    for child, message in one.news(60):
        assert message is None
        one.close()
        one.restart(child)
    assert one.children[0].process is None and list(one.news(0)) == []
