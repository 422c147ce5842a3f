# SPDX-License-Identifier: Apache-2.0
"""Actor processes, and the free and the full queue of buffer indices between them and the learner.

Who holds which buffer, who has died, and who replaces it. What an actor does is MonoBeast's `act`.
"""

import logging
import multiprocessing
import multiprocessing.connection
import threading
import time
from collections import deque

import torch

from beast.errors import EnvError
from beast.learners.learner_group import SEEDS_A_RANK
from beast.processes.actor_process import FreeBuffers, actor_main
from beast.processes.deaths import MAX_DEATHS, Deaths, describe_exit
from beast.processes.fork_server import end_process, kill_fork_server, start_process
from beast.processes.watchdog import PATIENCE, Lookout

# Of each of its environments, which end a series of deaths. When MAX_DEATHS of every actor are in a
# series it is not bad luck, and the run ends.
MIN_ROLLOUTS = 10
LOOK_INTERVAL = 1  # seconds
PAUSES = (0, 1, 3, 10, 30)  # seconds before it is restarted, by how often it has died so


class Actors:
    """Actor processes, and the free and the full queue of buffer indices.

    Each actor has a pipe of its own, through which it gets free indices and returns full ones, so
    that one that is killed, at whatever point, locks nobody else out and loses no index. It is
    replaced by a new process, and so is one that is silent for too long. Where all of them die time
    and again, the run ends.

    Args:
      flags: num_actors, envs_per_actor, num_buffers, seed; stall_timeout_s: PATIENCE times as long
        may an actor be silent; deterministic: each actor has buffers of its own, and gives as many
        to each batch: always the same ones to the same places. Else whoever is first gets, and
        gives, the next ones.
      context: as of start_fork_server.
      act: what an actor does, called in its process with flags, the actor's number, a seed (a list
        of ints), FreeBuffers, and `args`.
      first_step: of the run. A restarted actor, or one of a resumed run, must not play the same
        games again.
    """

    def __init__(self, flags, context, act, args=(), first_step=0):
        self._flags, self._context, self._act, self._args = flags, context, act, args
        self._first_step = first_step
        self._envs_per_actor = flags.envs_per_actor
        num_actors = flags.num_actors
        # Of time.monotonic(): when an actor last did something other than wait for buffers.
        shared = torch.zeros(num_actors, dtype=torch.float64).share_memory_()
        self._shared_heartbeats, self._heartbeats = shared, shared.numpy()
        self._patience = PATIENCE * flags.stall_timeout_s
        self._closing = threading.Lock()  # held by who ends the processes
        self._condition = threading.Condition()  # guards what follows
        # One queue of either kind for all actors, or one for each.
        self._num_queues = num_actors if flags.deterministic else 1
        self._free = [deque() for _ in range(self._num_queues)]
        self._full = [deque() for _ in range(self._num_queues)]
        self._put_back(range(flags.num_buffers))
        self._waiting = {}  # actors that wait for free buffers, in turn; since when
        self._seconds_waited = 0.0
        self._held = [[] for _ in range(num_actors)]
        self._closed = False
        self._error = None

        # Of the watcher alone, while it runs.
        self._processes = [None] * num_actors  # None: is to be started
        self._start_times = [0.0] * num_actors
        self._pipes = [None] * num_actors
        self._deaths = [Deaths(MIN_ROLLOUTS) for _ in range(num_actors)]
        self._tracebacks = [None] * num_actors
        self._lookout = Lookout()
        self._wake_reader, self._wake_writer = multiprocessing.Pipe(duplex=False)
        self._watcher = threading.Thread(target=self._watch, name="actors", daemon=True)
        self._watcher.start()

    def take(self, count):
        """Wait for `count` full buffers and return their indices; None once closed.

        Raises:
          EnvError: all actors died time and again.
        """
        share = count // self._num_queues
        with self._condition:
            self._condition.wait_for(lambda: self._closed or min(map(len, self._full)) >= share)
            if self._error is not None:
                raise self._error
            if self._closed:
                return None
            return [queue.popleft() for queue in self._full for _ in range(share)]

    def release(self, indices):
        """Give buffers that were taken back to the actors."""
        with self._condition:
            self._put_back(indices)
            self._hand_out()

    def waits(self):
        """Return the mean seconds since the start for which an actor waited for free buffers."""
        with self._condition:
            now = time.monotonic()
            seconds = self._seconds_waited + sum(now - t for t in self._waiting.values())
        return {"actor_wait": seconds / len(self._held)}

    def metrics(self):
        num_full = sum(map(len, self._full))
        return {"full_buffers": num_full, "actor_restarts": sum(d.total for d in self._deaths)}

    def texts(self, metrics):
        return {"full": f"{metrics['full_buffers']}/{self._flags.num_buffers}"}

    def silences(self):
        """Return a tuple of each actor that has something to do, as a Watchdog wants them."""
        seconds = time.monotonic() - self._lookout.last_look - LOOK_INTERVAL
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
        try:
            while not self._closed:
                self._lookout.look()
                self._start_those_due()
                self._kill_silent()
                actors = {pipe: actor for actor, pipe in enumerate(self._pipes) if pipe}
                actors |= {p.sentinel: actor for actor, p in enumerate(self._processes) if p}
                ready = multiprocessing.connection.wait([self._wake_reader, *actors], LOOK_INTERVAL)
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
        with self._condition:
            return [
                (actor, process, self._lookout.seconds_silent(self._heartbeats[actor]))
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
                if content:
                    self._deaths[actor].count_work()
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
        cause = cause or describe_exit(process)
        with self._condition:
            self._hand_out()  # to others, of the indices that came back
        self._count_death(actor, cause)

    def _count_death(self, actor, cause):
        deaths = self._deaths[actor]
        deaths.count()
        if min(other.in_a_row for other in self._deaths) >= MAX_DEATHS:
            raise EnvError(
                f"all actors died {MAX_DEATHS} times with less than {MIN_ROLLOUTS} rollouts in "
                f"between, most recently actor {actor}: {cause}"
            )
        pause = PAUSES[min(deaths.in_a_row, len(PAUSES)) - 1]
        logging.error(
            "Actor %d died and is restarted in %g s (%d deaths in all, %d in a row; the run ends "
            "when all actors have %d in a row): %s",
            *(actor, pause, deaths.total, deaths.in_a_row, MAX_DEATHS, cause),
        )
        self._start_times[actor] = time.monotonic() + pause

    def _start_those_due(self):
        for actor, process in enumerate(self._processes):
            if process is None and time.monotonic() >= self._start_times[actor]:
                self._start_process(actor)

    def _start_process(self, actor):
        pipe, far_end = multiprocessing.Pipe()
        self._heartbeats[actor] = time.monotonic()  # so that it has time to start
        try:
            with far_end:
                self._processes[actor] = self._create_process(actor, far_end)
        except EnvError as error:
            pipe.close()
            self._count_death(actor, str(error))
            return
        with self._condition:
            self._pipes[actor] = pipe

    def _create_process(self, actor, pipe):
        number = 1 + actor + SEEDS_A_RANK * self._flags.rank
        seed = [self._flags.seed, number, self._deaths[actor].total, self._first_step]
        free_buffers = FreeBuffers(pipe, self._shared_heartbeats[actor : actor + 1])
        arguments = (self._act, pipe, self._flags, actor, seed, free_buffers, *self._args)
        process = self._context.Process(target=actor_main, args=arguments)
        start_process(process, f"actor {actor}")
        return process
