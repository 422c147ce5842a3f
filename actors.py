# SPDX-License-Identifier: Apache-2.0
"""Actor processes and the queues of buffer indices between them and the learner: MonoBeast's only.

What is learned stands in monobeast.py; here stands who lives, who dies, who holds which buffer, and
how many buffers there must be.
"""

import contextlib
import functools
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import deque

from checkpoint import FlagError
from watchdog import PATIENCE, STOP_SIGNALS, print_stacks_on_signal

# So many deaths of every actor end the run, if none gave so many rollouts (of each of its
# environments) in between: then it is not bad luck.
MAX_DEATHS, MIN_ROLLOUTS = 5, 10
PAUSES = (0, 1, 3, 10, 30)  # seconds before it is started anew, by how often it has died so
HANDLED_SIGNALS = (*STOP_SIGNALS, signal.SIGUSR1)  # which an actor is not ready for at once


def check_buffers(flags):
    """Refuse fewer buffers than can be in use at once; fill in num_buffers.

    At the least number actors and learner wait for each other, so by default there is room for one
    batch more. What is beyond that waits in the full queue, and makes the policy lag larger.
    """
    least = flags.num_actors * flags.envs_per_actor + flags.batch_size
    if flags.num_buffers is None:
        flags.num_buffers = least if flags.deterministic else least + flags.batch_size
    if flags.num_buffers < least:
        raise FlagError(
            f"--num_buffers is {flags.num_buffers}, but the actors fill --num_actors x "
            f"--envs_per_actor = {flags.num_actors} x {flags.envs_per_actor} buffers at once, and "
            f"the learner takes --batch_size = {flags.batch_size} more: give it at least {least}"
        )
    if flags.deterministic and flags.num_buffers != least:
        raise FlagError(
            f"--num_buffers is {flags.num_buffers}, but with --deterministic actors fill as many "
            f"as the learner has: give it {least}, or leave it out"
        )


def check_lock_step(flags):
    """Refuse what --deterministic does not go with."""
    num_envs = flags.num_actors * flags.envs_per_actor
    for name, value in {"batch_size": num_envs, "num_learner_threads": 1}.items():
        if getattr(flags, name) != value:
            raise FlagError(
                f"--{name} is {getattr(flags, name)}, but --deterministic makes each batch of one "
                f"rollout of each of the {num_envs} environments, one after the other: give "
                f"--{name} {value}"
            )
    if flags.autotune:
        raise FlagError("--autotune goes by the time that things take, --deterministic by none")
    if flags.eval_interval:
        raise FlagError(
            "--eval_interval logs evaluations when they end, which a clock decides, and "
            "--deterministic makes logs that are the same: leave out one of them"
        )


def check_shared_memory(flags, num_bytes):
    """Refuse buffers for which /dev/shm has no room: to touch them would end the run by SIGBUS."""
    free = shutil.disk_usage("/dev/shm").free
    if num_bytes > 0.95 * free:
        raise FlagError(
            f"the rollout buffers need {num_bytes / 2**20:,.0f} MiB of shared memory, but "
            f"/dev/shm has {free / 2**20:,.0f} MiB left: enlarge it (mount -o remount,size=... "
            "/dev/shm; in Docker: docker run --shm-size=...), or lower --num_buffers "
            f"({flags.num_buffers}), --num_actors ({flags.num_actors}) or --envs_per_actor "
            f"({flags.envs_per_actor})"
        )


def start_fork_server():
    """Return the multiprocessing context in which actors are started.

    A fork server has no threads, and imports the large packages once for all actors.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "torch", "gymnasium", "ale_py", "cv2"])
    # It inherits that the signals are blocked, and so outlives a Ctrl-C or SIGTERM that reaches
    # the whole process group: only the main process decides what to do then. The resource tracker
    # comes first because starting it unblocks the signals.
    multiprocessing.resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    multiprocessing.forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
    remove_after_death(multiprocessing.util.get_temp_dir())
    return context


def kill_fork_server():
    """Wake whoever waits for the fork server, which may be stopped; there will be another one."""
    pid = multiprocessing.forkserver._forkserver._forkserver_pid
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end_process(process, patience):
    """Kill an actor unless it ends by itself in so many seconds."""
    process.join(max(0, patience))
    if process.is_alive() or process.exitcode == 255:
        # It hangs; or the fork server died, and it only seems to be dead.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    process.join(2)
    if process.is_alive():  # as far as the fork server tells
        kill_fork_server()
        process.join(2)  # no longer: an actor stopped as it started may hold the pipe that tells


@functools.cache  # keeps the process, and with it the pipe
def remove_after_death(folder):
    """Have a folder, here that of the fork server's socket, removed even if we are killed."""
    return subprocess.Popen(
        ["sh", "-c", 'read _; rm -rf "$0"', folder], stdin=subprocess.PIPE, process_group=0
    )


def live_for_parent():
    """Have this process ignore the signals that are the main process's, but end with that."""

    def end_with_parent():
        multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
        os._exit(1)  # at once, whatever the environment is doing

    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
    print_stacks_on_signal()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
    threading.Thread(target=end_with_parent, daemon=True).start()


class Actors:
    """Actor processes, and the free and the full queue of buffer indices.

    Each actor has a pipe of its own, through which it gets free indices and returns full ones, so
    that one that is killed, wherever it may stand, locks nobody else out and loses no index. It is
    replaced by a new process, and so is one that is silent for too long. Where all of them die time
    and again, the run ends.

    Args:
      start: called with (actor, incarnation, pipe); returns a started process.
      num_actors, envs_per_actor, num_buffers: ints.
      heartbeats: tensor [num_actors] in shared memory, of time.monotonic(): when an actor last did
        something. While one waits for buffers, that does not matter.
      stall_timeout_s: PATIENCE times as long may an actor be silent.
      lock_step: each actor has buffers of its own, and gives as many to each batch: always the same
        ones to the same places. Else whoever is the first gets, and gives, the next ones.
    """

    def __init__(
        self, start, num_actors, envs_per_actor, num_buffers, heartbeats, stall_timeout_s,
        lock_step=False,
    ):  # fmt: skip
        self._start = start
        self._envs_per_actor = envs_per_actor
        self._heartbeats = heartbeats.numpy()
        self._patience = PATIENCE * stall_timeout_s
        self._closing = threading.Lock()  # held by who ends the processes
        self._condition = threading.Condition()  # guards what follows
        # One queue of either kind for all actors, or one for each.
        self._num_queues = num_actors if lock_step else 1
        self._free = [deque() for _ in range(self._num_queues)]
        self._full = [deque() for _ in range(self._num_queues)]
        self._put_back(range(num_buffers))
        self._waiting = {}  # actors that wait for free buffers, in turn; since when
        self._seconds_waited = 0.0
        self._held = [[] for _ in range(num_actors)]
        self._closed = False
        self._error = None

        # Of the watcher alone, while it runs.
        self._processes = [None] * num_actors  # None: is to be started
        self._start_times = [0.0] * num_actors
        self._pipes = [None] * num_actors
        self._deaths = [0] * num_actors
        self._deaths_in_a_row = [0] * num_actors
        self._num_rollouts = [0] * num_actors  # since the last death
        self._tracebacks = [None] * num_actors
        self._looked = time.monotonic()  # when the watcher last looked after them
        self._wake_reader, self._wake_writer = multiprocessing.Pipe(duplex=False)
        self._watcher = threading.Thread(target=self._watch, name="actors", daemon=True)
        self._watcher.start()

    def take(self, count):
        """Wait for `count` full buffers and return their indices; None once closed."""
        share = count // self._num_queues
        with self._condition:
            self._condition.wait_for(lambda: self._closed or min(map(len, self._full)) >= share)
            if self._closed:
                return None
            return [queue.popleft() for queue in self._full for _ in range(share)]

    def release(self, indices):
        """Give buffers that were taken back to the actors."""
        with self._condition:
            self._put_back(indices)
            self._hand_out()

    def num_full(self):
        return sum(map(len, self._full))

    def seconds_waited(self):
        """Return how long actors have waited for free buffers, all of them together."""
        with self._condition:
            now = time.monotonic()
            return self._seconds_waited + sum(now - since for since in self._waiting.values())

    @property
    def num_restarts(self):
        return sum(self._deaths)

    def silences(self):
        """Return a tuple of each actor that has something to do, as a Watchdog wants them."""
        seconds = time.monotonic() - self._looked
        watcher = (
            "the watcher of the actors",
            "starts or ends one, by the fork server",
            seconds,
            None,
        )
        return [watcher] + [
            (f"actor {actor}", "steps its environments", seconds, process.pid)
            for actor, process, seconds in self._seconds_silent()
        ]

    def pids(self):
        return [process.pid for process in list(self._processes) if process is not None]

    def check(self):
        """Raise the error that has closed the queues, if there is one."""
        with self._condition:
            if self._error is not None:
                raise self._error

    def close(self):
        """Wake all who wait and end all processes. May be called again, and by several threads."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        with self._closing:
            if self._wake_writer.closed:
                return
            self._wake_writer.close()  # which the watcher notices
            self._watcher.join(3)
            if self._watcher.is_alive():
                kill_fork_server()
                self._watcher.join()
            self._wake_reader.close()
            for pipe in filter(None, self._pipes):
                pipe.close()  # which the actors notice
            deadline = time.monotonic() + 3
            for process in filter(None, self._processes):
                end_process(process, deadline - time.monotonic())

    def _put_back(self, indices):  # requires the condition's lock
        share = len(indices) // self._num_queues
        for i, queue in enumerate(self._free):
            queue.extend(indices[i * share : (i + 1) * share])

    def _hand_out(self):  # requires the condition's lock
        for actor in list(self._waiting):
            free = self._free[actor % self._num_queues]
            if len(free) < self._envs_per_actor or self._closed:
                continue
            self._end_wait(actor)
            self._held[actor] = [free.popleft() for _ in range(self._envs_per_actor)]
            try:
                self._pipes[actor].send(self._held[actor])
            except OSError:
                pass  # it has died; the watcher takes the indices back

    def _end_wait(self, actor):  # requires the condition's lock
        now = time.monotonic()
        self._seconds_waited += now - self._waiting.pop(actor, now)
        self._heartbeats[actor] = now

    def _watch(self):
        # For a fork server that is started anew.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
        try:
            while not self._closed:
                self._looked = time.monotonic()
                self._start_those_due()
                self._kill_silent()
                actors = {pipe: actor for actor, pipe in enumerate(self._pipes) if pipe}
                actors |= {p.sentinel: actor for actor, p in enumerate(self._processes) if p}
                ready = multiprocessing.connection.wait([self._wake_reader, *actors], timeout=1)
                for actor in sorted({actors[r] for r in ready if r is not self._wake_reader}):
                    # Asked for before the messages are read, so that the last ones are not lost.
                    dead = not self._processes[actor].is_alive()
                    if not self._read_messages(actor) or dead:
                        self._replace(actor)
        except Exception as error:
            with self._condition:
                if not self._closed:  # else it is only that nothing can be started any more
                    self._error = error
                self._closed = True
                self._condition.notify_all()

    def _seconds_silent(self):
        now = time.monotonic()
        with self._condition:
            return [
                (actor, process, now - self._heartbeats[actor])
                for actor, process in enumerate(self._processes)
                if actor not in self._waiting and process is not None
            ]

    def _kill_silent(self):
        for actor, process, seconds in self._seconds_silent():
            if seconds > self._patience:
                self._tracebacks[actor] = f"it was silent for {seconds:.0f} s, and so was killed"
                process.kill()

    def _read_messages(self, actor):
        """Handle what the actor has sent; return False where it has failed or closed its end."""
        pipe = self._pipes[actor]
        try:
            while pipe.poll():
                kind, content = pipe.recv()
                if kind == "error":
                    self._tracebacks[actor] = content
                    return False
                self._num_rollouts[actor] += bool(content)
                if self._num_rollouts[actor] == MIN_ROLLOUTS:
                    self._deaths_in_a_row[actor] = 0
                with self._condition:
                    self._full[actor % self._num_queues].extend(content)
                    self._held[actor] = []
                    self._waiting[actor] = time.monotonic()
                    self._hand_out()
                    self._condition.notify_all()
        except (EOFError, OSError):
            return False
        return True

    def _replace(self, actor):
        """Take the indices of a dead actor back, and have another process take its place."""
        process = self._processes[actor]
        end_process(process, 1)
        with self._condition:
            self._pipes[actor].close()
            self._processes[actor] = self._pipes[actor] = None
            # In front, where its successor has to go on.
            self._free[actor % self._num_queues].extendleft(reversed(self._held[actor]))
            self._held[actor] = []
            self._end_wait(actor)
        cause, self._tracebacks[actor] = self._tracebacks[actor], None
        if cause is None and process.exitcode < 0:
            cause = f"killed by {signal.Signals(-process.exitcode).name}"
        elif cause is None:
            cause = f"it ended with status {process.exitcode}"
        with self._condition:
            self._hand_out()  # to others, of the indices that came back
        self._count_death(actor, cause)

    def _count_death(self, actor, cause):
        self._deaths[actor] += 1
        self._deaths_in_a_row[actor] += 1
        if min(self._deaths_in_a_row) >= MAX_DEATHS:
            raise RuntimeError(
                f"all actors died {MAX_DEATHS} times with less than {MIN_ROLLOUTS} rollouts in "
                f"between, most recently actor {actor}: {cause}"
            )
        in_a_row = self._deaths_in_a_row[actor]
        pause = PAUSES[min(in_a_row, len(PAUSES)) - 1]
        logging.error(
            "Actor %d died and is started anew in %g s (death %d; %d soon after another: %d of "
            "all actors end the run): %s",
            *(actor, pause, self._deaths[actor], in_a_row, MAX_DEATHS, cause),
        )
        self._num_rollouts[actor] = 0
        self._start_times[actor] = time.monotonic() + pause

    def _start_those_due(self):
        for actor, process in enumerate(self._processes):
            if process is None and time.monotonic() >= self._start_times[actor]:
                self._start_process(actor)

    def _start_process(self, actor):
        pipe, far_end = multiprocessing.Pipe()
        self._heartbeats[actor] = time.monotonic()  # so that it has time to start
        try:
            self._processes[actor] = self._start(actor, self._deaths[actor], far_end)
        except (EOFError, OSError) as error:  # the fork server has died, or could not fork
            pipe.close()
            self._count_death(actor, f"it could not be started ({error!r})")
            return
        finally:
            far_end.close()
        with self._condition:
            self._pipes[actor] = pipe
