# SPDX-License-Identifier: Apache-2.0
"""Actor processes that are killed, hang or fail, and the queues of buffers between."""

import argparse
import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import re
import signal
import time
import types

import pytest
import torch
from deadline import DEADLINE, Thread
from program import wait_until

from beast.actors import actors
from beast.actors.actors import Actors
from beast.errors import EnvError
from beast.processes.fork_server import describe_exit
from beast.processes.supervisor import MAX_DEATHS

pytestmark = pytest.mark.whole


def play(flags, actor, seed, free_buffers, seeds, marker):
    """Be an actor, which writes its seed into its buffers; see Rig for `flags.fails`."""
    assert not multiprocessing.current_process().daemon  # environments may start processes
    if flags.fails == "at the start":
        raise KeyError("no such game")
    for count, indices in enumerate(free_buffers):
        for index in indices:
            free_buffers.beat()
            seeds[index] = torch.tensor(seed)
            if flags.fails == "always" and count == 1:
                raise ValueError("the game is broken")
            if flags.fails == "hangs once":
                with contextlib.suppress(FileExistsError), open(marker, "x"):
                    time.sleep(3600)


class Rig:
    """Actors that play nothing, and all processes that they ever were."""

    def __init__(self, marker, **overrides):
        flags = {"num_actors": 1, "envs_per_actor": 2, "num_buffers": 6, "seed": 7, "fails": None}
        flags |= {"stall_timeout_s": 60, "deterministic": False, "rank": 0}
        self.flags = argparse.Namespace(**flags | overrides)
        self.seeds = torch.zeros(self.flags.num_buffers, 4, dtype=torch.int64).share_memory_()
        self.marker = marker
        self.actors = Actors(self.flags, play, (self.seeds, str(marker)), first_step=500)

    @property
    def num_restarts(self):
        return self.actors.metrics()["actor_restarts"]

    @property
    def supervisor(self):
        return self.actors._supervisor

    @property
    def children(self):
        return self.supervisor.children

    @property
    def num_full(self):
        return self.actors.metrics()["full_buffers"]

    def process(self, actor):
        """Return the process that is this actor now, as soon as there is one."""
        return wait_until(lambda: self.children[actor].process)

    def kill(self, actor):
        """Kill the actor, and wait until it is replaced."""
        process = self.process(actor)
        process.kill()
        wait_until(lambda: self.children[actor].process not in (None, process))

    def take(self, count):
        return Thread(self.actors.take, count).result()

    def take_and_release_all(self, times=2):
        """Every index comes back full, once: none was lost, none is there twice."""
        M = self.flags.num_buffers
        for _ in range(times):
            indices = self.take(M)
            assert sorted(indices) == list(range(M))
            self.actors.release(indices)


@pytest.fixture
def make_rig(monkeypatch, tmp_path):
    monkeypatch.setattr(actors, "PAUSES", (0,))
    context, rigs = multiprocessing.get_context("forkserver"), []
    monkeypatch.setattr(actors, "start_fork_server", lambda: context)

    def make(**overrides):
        rigs.append(Rig(tmp_path / "marker", **overrides))
        return rigs[-1]

    yield make
    for rig in rigs:
        processes = [child.process for child in rig.children if child.process is not None]
        rig.actors.close()
        assert not any(process.is_alive() for process in processes)


def test_no_rollout_begins_before_all_its_buffers_are_there(make_rig):
    rig = make_rig(num_buffers=4)
    indices = rig.take(4)
    rig.actors.release(indices[:1])
    wait_until(lambda: rig.actors._waiting)
    assert rig.num_full == 0 and not rig.actors._held[0]
    rig.actors.release(indices[1:])
    assert sorted(rig.take(4)) == [0, 1, 2, 3]


def test_each_actor_and_each_restart_has_a_seed_of_its_own(make_rig):
    rig = make_rig(num_actors=2, num_buffers=4, deterministic=True)
    for num_deaths in (0, 1):
        first, second = [7, 1, 0, 500], [7, 2, num_deaths, 500]
        indices = rig.take(4)
        assert [rig.seeds[i].tolist() for i in indices] == [first, first, second, second]
        rig.kill(1)
        rig.actors.release(indices)


def test_with_deterministic_each_actor_has_buffers_of_its_own(make_rig):
    rig = make_rig(num_actors=3, num_buffers=12, deterministic=True)
    batches = [rig.take(6) for _ in range(2)]
    assert batches == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    rig.actors.release(batches[1])
    rig.actors.release(batches[0])
    assert [rig.take(6) for _ in range(2)] == batches[::-1]


def test_actors_killed_while_waiting_for_buffers_lock_nobody_out(make_rig):
    rig = make_rig(num_actors=3)
    wait_until(lambda: rig.num_full == 6 and len(rig.actors._waiting) == 3)
    waited = rig.actors.waits()["actor_wait"]
    wait_until(lambda: rig.actors.waits()["actor_wait"] > waited)
    rig.kill(1)
    rig.take_and_release_all()
    for actor in range(3):
        rig.process(actor).kill()
    wait_until(lambda: rig.num_restarts == 4)
    rig.take_and_release_all(3)
    assert rig.actors.texts(rig.actors.metrics())["full"].endswith("/6")


def test_actors_killed_at_any_moment_lose_no_buffer(make_rig):
    rig = make_rig(num_actors=3, num_buffers=8)
    for k in range(6):
        for _ in range(7 * k % 5):
            rig.actors.release(rig.take(2))
        held = rig.take(2)
        rig.kill(k % 3)
        rig.actors.release(held)
    rig.take_and_release_all(3)
    assert rig.num_restarts == 6


@pytest.mark.parametrize("fails", ["always", "at the start"])
def test_actors_that_all_fail_again_and_again_end_the_run(make_rig, caplog, fails):
    rig = make_rig(fails=fails, num_actors=2)

    def take_all():
        while (indices := rig.actors.take(1)) is not None:
            rig.actors.release(indices)

    with pytest.raises(EnvError, match=f"died {MAX_DEATHS} times") as raised:
        Thread(take_all).result(2 * DEADLINE)
    for text in (caplog.text, str(raised.value)):
        assert "Traceback (most recent call last)" in text and "in play" in text
        assert ("the game is broken" if fails == "always" else "no such game") in text
    assert min(child.num_deaths for child in rig.children) == MAX_DEATHS


def test_one_actor_that_always_fails_ends_a_deterministic_run(make_rig):
    rig = make_rig(num_actors=2, num_buffers=4, deterministic=True)
    rig.actors.release(rig.take(4))
    for _ in range(MAX_DEATHS - 1):
        rig.kill(0)
    rig.process(0).kill()
    with pytest.raises(EnvError, match=f"died {MAX_DEATHS} times"):
        while True:
            rig.take(4)


def test_an_actor_that_dies_but_gives_rollouts_is_restarted(make_rig):
    rig = make_rig(num_buffers=8)
    for _ in range(MAX_DEATHS + 2):
        for _ in range(actors.MIN_ROLLOUTS + 8 // 2):  # those before the last death included
            rig.actors.release(rig.take(rig.flags.envs_per_actor))
        rig.kill(0)
    rig.take_and_release_all()
    assert rig.num_restarts == MAX_DEATHS + 2


def test_an_actor_that_cannot_be_started_stops_no_other(make_rig, monkeypatch, caplog):
    start = multiprocessing.process.BaseProcess.start

    def start_all_but_one(self):
        if self._args[3] == 2:  # the actor's number
            raise BlockingIOError("no more processes")
        start(self)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start_all_but_one)
    monkeypatch.setattr("beast.processes.supervisor.RETRY_PAUSE", 0.1)
    rig = make_rig(num_actors=3)
    wait_until(lambda: rig.children[2].num_deaths > MAX_DEATHS)
    assert "actor 2 cannot be started (BlockingIOError('no more processes')" in caplog.text
    rig.take_and_release_all()


def test_why_a_process_has_ended():
    process = types.SimpleNamespace(pid=7, exitcode=None)
    assert describe_exit(process) == "its process 7 cannot be killed"
    process.exitcode = -9
    assert describe_exit(process) == "killed by SIGKILL"
    process.exitcode = -35
    assert describe_exit(process) == "killed by signal 35"
    process.exitcode = 3
    assert describe_exit(process) == "it ended with status 3"


def test_close_unblocks_take_and_is_no_error(make_rig):
    rig = make_rig(num_buffers=4)
    taking = Thread(rig.actors.take, 5)  # more than there are
    wait_until(lambda: rig.num_full == 4)
    taking.assert_blocked()
    rig.actors.close()
    assert taking.result() is None
    assert rig.actors.take(1) is None
    rig.actors.release([0])  # by a learner that comes too late


def test_close_lets_actors_end_and_may_be_called_again(make_rig):
    rig = make_rig(num_actors=3)
    rig.take(2)
    rig.kill(2)
    rig.take(1)
    processes = [rig.process(actor) for actor in range(3)]
    assert rig.actors.pids() == [process.pid for process in processes]
    wait_until(lambda: len(rig.actors._waiting) + len(list(filter(None, rig.actors._held))) == 3)
    for closing in [Thread(rig.actors.close) for _ in range(4)]:
        closing.result()
    assert [process.exitcode for process in processes] == [0, 0, 0]  # none was killed
    rig.actors.close()


@pytest.mark.parametrize("when", ["at once", "hangs"])
def test_close_ends_actors_that_start_or_hang(make_rig, when):
    rig = make_rig(num_actors=4, fails="hangs once", num_buffers=8)
    if when == "hangs":
        wait_until(rig.marker.exists)
    rig.actors.close()
    assert not any(c.process.is_alive() for c in rig.children if c.process is not None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_actors_leave_it_to_the_main_process_to_stop(make_rig, number):
    rig = make_rig()  # Ctrl-C reaches the whole process group
    indices = rig.take(6)
    os.kill(rig.process(0).pid, number)
    rig.actors.release(indices)
    rig.take_and_release_all()
    assert rig.num_restarts == 0


def test_a_silent_actor_is_replaced(make_rig, caplog):
    rig = make_rig(num_actors=2)
    wait_until(lambda: rig.actors._waiting)
    os.kill(rig.process(0).pid, signal.SIGSTOP)

    def is_replaced():
        rig.actors.release(rig.take(rig.num_full))  # so that it has something to do
        return rig.children[0].num_deaths > 0

    rig.supervisor.patience, patience = 0.5, rig.supervisor.patience
    wait_until(is_replaced)
    rig.supervisor.patience = patience  # in which a process has to start
    assert re.search(r"Actor \d died .* it was silent for \d+ s, and so was killed", caplog.text)
    rig.take_and_release_all()


def test_an_actor_that_waits_for_buffers_is_not_silent(make_rig):
    rig = make_rig(num_actors=2)
    wait_until(lambda: len(rig.actors._waiting) == 2)
    rig.supervisor.patience, patience = 0, rig.supervisor.patience  # of whoever does not wait
    lookout = rig.supervisor.lookout
    last_look = lookout.last_look
    (watcher,) = rig.actors.silences()
    assert watcher[0] == "the watcher of the actors"
    assert watcher[2] <= time.monotonic() - last_look - actors.LOOK_INTERVAL  # its sleep
    now = lookout.last_look
    wait_until(lambda: lookout.last_look > now + 1)  # so it has looked after them
    rig.supervisor.patience = patience
    rig.take_and_release_all()
    assert rig.num_restarts == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_run_goes_on_without_its_fork_server(make_rig, number):
    rig = make_rig(num_actors=2)
    rig.take_and_release_all(1)
    os.kill(multiprocessing.forkserver._forkserver._forkserver_pid, number)
    # The fork server reports its end, and starts its successor.
    os.kill(rig.process(0).pid, signal.SIGKILL)
    wait_until(lambda: rig.num_restarts > 0)
    rig.take_and_release_all(3)


def test_close_does_not_wait_for_a_fork_server_that_is_stopped(make_rig):
    rig = make_rig(num_actors=2)
    rig.take(2)
    pids = [rig.process(actor).pid for actor in range(2)]
    os.kill(multiprocessing.forkserver._forkserver._forkserver_pid, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    Thread(rig.actors.close).result()
    for pid in pids:
        wait_until(lambda pid=pid: not pathlib.Path(f"/proc/{pid}/cmdline").exists()
                   or not pathlib.Path(f"/proc/{pid}/cmdline").read_bytes())  # fmt: skip
