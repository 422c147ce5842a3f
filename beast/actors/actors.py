# SPDX-License-Identifier: Apache-2.0
"""Actor processes, and the free and the full queue of buffer indices between them and the learner.

Tracks who holds which buffer; replaces dead actors. What an actor does is MonoBeast's `act`.
"""

import threading
import time
from collections import deque

import numpy as np
import torch

from beast.learners.learner_group import SEEDS_A_RANK
from beast.processes.fork_server import child_main, kill_fork_server, start_fork_server
from beast.processes.supervisor import Supervisor
from beast.processes.watchdog import PATIENCE

MIN_ROLLOUTS = 10  # rollouts per environment after which consecutive deaths are reset to 0
LOOK_INTERVAL = 1  # seconds
PAUSES = (0, 1, 3, 10, 30)  # seconds before a restart, by the number of consecutive deaths


class FreeBuffers:
    """An actor's end of its pipe: yields arrays of indices of buffers to fill.

    A buffer counts as filled when the next ones are asked for.
    """

    def __init__(self, pipe, heartbeat):
        self._pipe, self._heartbeat = pipe, heartbeat

    def __iter__(self):
        indices = []  # an empty list at first: the actor is ready
        while True:
            self._pipe.send(("full", indices))
            indices = self._pipe.recv()
            yield np.array(indices)

    def beat(self):
        """Record that the actor is alive; raise EOFError where the main process closed the pipe."""
        if self._pipe.poll():
            raise EOFError
        self._heartbeat[0] = time.monotonic()


class Actors:
    """Actor processes, and the free and the full queue of buffer indices.

    Each actor has a pipe of its own, through which it gets free indices and returns full ones, so
    that killing one at any point blocks no other and loses no index. A dead actor is replaced by a
    new process, and so is one that is silent for too long. If all of them die repeatedly, the run
    ends.

    Args:
      flags: num_actors, envs_per_actor, num_buffers, seed; stall_timeout_s: an
        actor may be silent for PATIENCE times as long; deterministic: each actor has buffers of
        its own, and gives as many to each batch, always the same ones to the same places;
        otherwise first come, first served.
      act: what an actor does, called in its process with flags, the actor's number, a seed (a list
        of ints), FreeBuffers, and `args`.
      first_step: of the run. A restarted actor, or one of a resumed run, must not play the same
        games again.
    """

    def __init__(self, flags, act, args=(), first_step=0):
        self._context = start_fork_server()
        self._flags, self._act, self._args = flags, act, args
        self._first_step = first_step
        num_actors = flags.num_actors
        # time.monotonic() at which each actor last did something other than wait for buffers.
        shared = torch.zeros(num_actors, dtype=torch.float64).share_memory_()
        self._shared_heartbeats, self._heartbeats = shared, shared.numpy()
        self._closing = threading.Lock()  # held by the thread that ends the processes
        self._condition = threading.Condition()  # guards all attributes below
        # One free and one full queue for all actors; with --deterministic, for each.
        self._num_queues = num_actors if flags.deterministic else 1
        self._free = [deque() for _ in range(self._num_queues)]
        self._full = [deque() for _ in range(self._num_queues)]
        self._put_back(range(flags.num_buffers))
        self._waiting = {}  # start time of the wait, by waiting actor, in order
        self._seconds_waited = 0.0
        self._held = [[] for _ in range(num_actors)]
        self._closed = False
        self._error = None

        self._supervisor = Supervisor(
            [f"actor {actor}" for actor in range(num_actors)],
            self._create_process,
            self._heartbeat,
            PATIENCE * flags.stall_timeout_s,
            MIN_ROLLOUTS,
            "rollouts",
            # One actor may have bad luck, but not all; where they take turns, all wait for it.
            all_of=not flags.deterministic,
            pauses=PAUSES,
        )
        self._watcher = threading.Thread(target=self._watch, name="actors", daemon=True)
        self._watcher.start()

    def take(self, count):
        """Wait for `count` full buffers and return their indices; None once closed.

        Raises:
          EnvError: all actors died repeatedly.
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
        return {"full_buffers": num_full, "actor_restarts": self._supervisor.num_deaths()}

    def texts(self, metrics):
        return {"full": f"{metrics['full_buffers']}/{self._flags.num_buffers}"}

    def silences(self):
        """Return a tuple of each actor that has something to do, as a Watchdog wants them."""
        lookout = self._supervisor.lookout
        watcher = (
            "the watcher of the actors",
            "starts or ends one, by the fork server",
            time.monotonic() - lookout.last_look - LOOK_INTERVAL,
            None,
        )
        return [watcher, *self._supervisor.silences("steps its environments")]

    def pids(self):
        return self._supervisor.pids()

    def close(self):
        """Wake all who wait and end all processes. May be called again, and by several threads."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        with self._closing:
            self._supervisor.wake()
            self._watcher.join(3)
            if self._watcher.is_alive():
                kill_fork_server()
                self._watcher.join()
            self._supervisor.close()

    def _put_back(self, indices):  # caller holds the condition
        share = len(indices) // self._num_queues
        for i, queue in enumerate(self._free):
            queue.extend(indices[i * share : (i + 1) * share])

    def _hand_out(self):  # caller holds the condition
        for actor in list(self._waiting):
            free = self._free[actor % self._num_queues]
            if len(free) < self._flags.envs_per_actor or self._closed:
                continue
            self._end_wait(actor)
            self._held[actor] = [free.popleft() for _ in range(self._flags.envs_per_actor)]
            try:
                self._supervisor.children[actor].pipe.send(self._held[actor])
            except OSError:
                pass  # it has died; the watcher takes the indices back

    def _end_wait(self, actor):  # caller holds the condition
        now = time.monotonic()
        self._seconds_waited += now - self._waiting.pop(actor, now)
        self._heartbeats[actor] = now

    def _heartbeat(self, actor):
        with self._condition:
            return None if actor in self._waiting else float(self._heartbeats[actor])

    def _watch(self):
        try:
            while not self._closed:
                for child, message in self._supervisor.news(LOOK_INTERVAL):
                    if self._closed:
                        return
                    if message is None:
                        self._replace(child)
                    else:
                        self._accept(child, message[1])
        except Exception as error:
            with self._condition:
                if not self._closed:  # once closed, starting a process fails: no error
                    self._error = error
                self._closed = True
                self._condition.notify_all()

    def _accept(self, child, indices):
        """Take full buffers of an actor, and give it others when its turn comes."""
        actor = child.number
        if indices:
            child.count_work()
        with self._condition:
            self._full[actor % self._num_queues].extend(indices)
            self._held[actor] = []
            self._waiting[actor] = time.monotonic()
            self._hand_out()
            self._condition.notify_all()

    def _replace(self, child):
        """Take the indices of a dead actor back, and have another process take its place."""
        actor = child.number
        with self._condition:
            # To the front, since with --deterministic its successor has to fill them next.
            self._free[actor % self._num_queues].extendleft(reversed(self._held[actor]))
            self._held[actor] = []
            self._end_wait(actor)
            self._hand_out()  # the returned indices may serve waiting actors
        self._supervisor.restart(child)

    def _create_process(self, actor, num_deaths, pipe):
        number = 1 + actor + SEEDS_A_RANK * self._flags.rank
        seed = [self._flags.seed, number, num_deaths, self._first_step]
        free_buffers = FreeBuffers(pipe, self._shared_heartbeats[actor : actor + 1])
        arguments = (self._act, pipe, self._flags, actor, seed, free_buffers, *self._args)
        return self._context.Process(target=child_main, args=arguments)
