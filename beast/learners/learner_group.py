# SPDX-License-Identifier: Apache-2.0
"""Several learners of one policy: each update sums gradients and metrics of their batches.

A learner is a rank of the group, with actors or streams of its own. W ranks with batches of B
rollouts are one learner with batches of W x B: gradients and metrics are summed, in one tensor and
one exchange an update. Clipping, the check that all is finite and the step of the optimizer come
after it, on all ranks alike, so that their weights stay equal to the last bit. A rank without a
batch gives zeros, so that the others go on. Rank 0 has the run's folder, its checkpoints and its
evaluations. torchrun.py has how ranks start and find each other.
"""

import contextlib
import datetime
import logging
import math
import os
import pathlib
import signal
import threading
import time

import torch
import torch.distributed as dist

from beast.errors import EnvError, FlagError
from beast.learners.exchange import Exchange, refuse_difference

TIMEOUT = 20  # seconds for an update, after which a rank that does not take part is lost
SEEDS_A_RANK = 2**20  # seeds of actors or streams, so that no two play the same games


class Alone:
    """The group of a single learner."""

    rank, local_rank, size, name, by_torchrun = 0, 0, 1, "", False
    exchange, starvation = Exchange(), None

    def from_rank_0(self, function):
        return function()

    def share_first(self, value):
        return value

    def check_same(self, what, value):
        pass

    def share_state(self, learner):
        pass

    def barrier(self):
        pass

    def sum(self, model, metrics):
        return metrics

    def share_returns(self, *returns):
        return returns

    def ask_to_stop(self, stop):
        stop.set()

    def leave(self, is_over):
        pass

    def batch_in_hand(self):
        return contextlib.nullcontext()


ALONE = Alone()
_current = ALONE


def current():
    """Return the group of this process."""
    return _current


def set_current(group):
    global _current
    _current = group


class LearnerGroup:
    """A member's view of a group of learners.

    The learner's lock is held while `sum` waits for others.

    Args:
      rank, size: of this learner, and how many there are.
      device: "cuda" or "cpu", the type of the device that the learners compute on.
      start: a torchrun.Start, which waits for the others.

    Attributes:
      local_rank: among those on this machine.
      name: suffix of its files; empty for rank 0, which writes the run's own.
      exchange: an Exchange; if one learner asks to stop, all stop after the same update.
      starvation: a Starvation: whether this learner has batches.
    """

    by_torchrun, local_rank = True, 0

    def __init__(self, rank, size, device, start):
        self.rank, self.size, self.name = rank, size, f"rank{rank}" if rank else ""
        self.exchange, self._start = Exchange(), start
        timeout = datetime.timedelta(seconds=TIMEOUT)
        is_cuda = device == "cuda"
        self._tensors = dist.new_group(timeout=timeout, backend="nccl") if is_cuda else None
        self._processes, processes = [], [None] * size
        own = _machine(), os.getpid(), _state(os.getpid())[1]
        self._meet(lambda: dist.all_gather_object(processes, own))
        self._processes = processes
        self._asks_to_stop = False
        self.starvation = Starvation()
        self.share_returns = self.exchange.share_returns
        self.batch_in_hand = self.starvation.batch_in_hand

    def from_rank_0(self, function):
        """Call `function` on rank 0 only; return its result or raise its FlagError on all."""
        outcome = [None]
        if self.rank == 0:
            try:
                outcome = [(function(), None)]
            except FlagError as error:
                outcome = [(None, str(error))]
        self._meet(lambda: dist.broadcast_object_list(outcome))
        value, error = outcome[0]
        if error is not None:
            raise FlagError(error if self.rank == 0 else f"rank 0 could not start: {error}")
        return value

    def share_first(self, value):
        """Return the first value, of JSON, that any rank has given; None while all gave None."""
        return self._start.share_first(value)

    def check_same(self, what, value):
        """Refuse a rank whose value, a text or a dict, is not that of rank 0."""
        values = [None] * self.size
        self._meet(lambda: dist.all_gather_object(values, value))
        for rank, other in enumerate(values):
            refuse_difference(what, (f"rank {rank}", other), ("rank 0", values[0]))

    def share_state(self, learner):
        """Broadcast weights, optimizer and counts of rank 0 to all learners."""
        self.check_same("optimizer", learner.optimizer_name)
        state = [learner.state() if self.rank == 0 else None]
        self._meet(lambda: dist.broadcast_object_list(state))
        if self.rank > 0:
            learner.load_state(state[0])
        self.exchange.remember_buffers(learner.model)

    def barrier(self):
        """Wait until all learners are ready to train; a silent one ends the wait."""
        self._meet(dist.barrier)
        self._start.end()
        self.starvation.begin()

    def _meet(self, call):
        """Make a collective call once all ranks are ready for it."""
        self._communicate(lambda: self._start.meet(call))

    def sum(self, model, metrics):
        """Sum gradients, in place, and metrics over all learners.

        Args:
          metrics: of this learner's batch, tensors and numbers by name; empty where it has none.
            `moments`, a tensor [moments], is gathered instead.

        Returns:
          Metrics of all batches; empty where no learner has one.

        Raises:
          EnvError: another learner has gone, or is silent.
          ValueError: see Exchange.
        """
        self.exchange.check_is_first()
        if self.exchange.layout is None:
            self._agree_on_layout(metrics)
        if self.exchange.layout is None:
            return {}
        tensor = self.exchange.pack(model, metrics, self.rank, self.size, self._asks_to_stop)

        def add():
            # NCCL keeps to the time limit in `wait`, which a synchronous call no longer makes.
            dist.all_reduce(tensor, group=self._tensors, async_op=True).wait()
            tensor[:1].cpu()  # what failed on a GPU shows here

        self._communicate(add)
        return self.exchange.unpack(model, tensor, self.size)

    def _communicate(self, call):
        try:
            call()
        except (RuntimeError, TimeoutError) as error:
            self._kill_stopped_ranks()
            reason = str(error).partition("\n")[0]
            raise EnvError(
                f"another learner has ended, or has not answered for {TIMEOUT} s: see its log "
                f"({reason})"
            ) from None

    def _kill_stopped_ranks(self):
        """Kill ranks of this machine that are stopped: torchrun would give them 30 s to end."""
        for machine, pid, begin in self._processes:
            with contextlib.suppress(OSError):
                state, its_begin = _state(pid)
                if machine == _machine() and begin == its_begin and state in "tT":
                    # Here, since torchrun ends this process as soon as it sees the other's end.
                    logging.error("The learner of process %d is stopped, so it is killed", pid)
                    os.kill(pid, signal.SIGKILL)

    def _agree_on_layout(self, metrics):
        answers = [None] * self.size
        answer = self.exchange.layout_of(metrics), self._asks_to_stop
        self._communicate(lambda: dist.all_gather_object(answers, answer))
        layouts = [layout for layout, _ in answers if layout]
        for layout in layouts:
            if layout != layouts[0]:
                raise ValueError(
                    f"learn must return the same metrics at all learners, but they have {layout} "
                    f"and {layouts[0]}"
                )
        self.exchange.has_to_stop = any(asks for _, asks in answers)
        if layouts:
            self.exchange.layout = layouts[0]

    def ask_to_stop(self, stop):
        """Have all learners stop after one of the next updates."""
        self._asks_to_stop = True
        if self.size == 1:
            stop.set()

    def leave(self, is_over):
        """Leave the group; at the end of a run, wait until all ranks have the last sum."""
        if is_over:
            with contextlib.suppress(EnvError):
                self._communicate(dist.barrier)


def _machine():
    """Return an id of the process namespace, equal for processes that can signal each other."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, os.readlink("/proc/self/ns/pid")


def _state(pid):
    """Return a process's state, a letter, and its start time, since ids are reused."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


BATCH_PATIENCE = 1  # seconds that the others wait for a batch of a rank, until it gives zeros
PAUSE = 0.1  # seconds between two exchanges in which no rank has a batch


class Starvation:
    """Tracks whether a learner has had no batch for too long, over all of its threads."""

    def __init__(self):
        self._lock = threading.Lock()  # guards all attributes below
        self._in_hand = 0  # batches that learner threads hold
        self._last_batch = math.inf

    def begin(self):
        """Start counting the time without a batch."""
        self._last_batch = time.monotonic()

    @contextlib.contextmanager
    def batch_in_hand(self):
        """Context manager of a thread that has a batch, from waiting for the lock to the update."""
        with self._lock:
            self._in_hand += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_hand -= 1
                self._last_batch = time.monotonic()

    def starves(self):
        """Return whether this rank has had no batch for so long that the others must not wait."""
        with self._lock:
            return not self._in_hand and time.monotonic() > self._last_batch + BATCH_PATIENCE


def join_updates(flags, learner, run, learn):
    """Take part in the updates of the other learners while there is no batch here: a thread.

    Args:
      learn: the program's function; without a batch it adds no gradient, but takes the step.
    """
    group = learner.group
    if group.starvation is None:  # the learner is the only one
        run.stop.wait()
        return
    torch.set_num_threads(learner.num_threads)
    pause = BATCH_PATIENCE / 20
    while not run.stop.wait(pause):
        pause = BATCH_PATIENCE / 20
        run.watchdog.beat("waits until there is no batch")
        if not group.starvation.starves():
            continue
        with learner.lock:
            if run.stop.is_set() or not group.starvation.starves():
                continue
            run.watchdog.beat("joins the update of other learners")
            metrics = learn(flags, learner.model, None, (), learner.optimizer, group)
            if group.exchange.num_batches:
                learner.publish()
                run.record(metrics)
                pause = 0.001  # lets other threads take the lock
            else:
                pause = PAUSE
            if group.exchange.has_to_stop:
                run.stop.set()
