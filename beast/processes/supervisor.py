# SPDX-License-Identifier: Apache-2.0
"""Child processes: started, listened to, killed when silent, replaced when dead, ended.

What they do, and what has to be repaired when one dies, is the caller's: actors, agents,
environments, environment servers. No torch here.
"""

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import sys
import threading
import time

from beast.errors import EnvError
from beast.processes.fork_server import describe_exit, end_process, start_process
from beast.processes.watchdog import Lookout

MAX_DEATHS = 5  # consecutive deaths that end the run
CHECK_INTERVAL = 1  # seconds between two looks for silent children
RETRY_PAUSE = 1  # seconds, at least, until a failed start is tried again
END_PATIENCE = 1  # seconds for a child to exit after it has failed or closed its pipe


class Child:
    """A slot for one child process at a time.

    Attributes:
      number, name: its index in the supervisor, and what logs call it.
      process, pipe: of the process; None where the next one has not been started yet.
      is_dead: whether the process has been ended; it may be restarted.
      start_time: time.monotonic() when the process was started.
      due: time.monotonic() from which the next process is to be started, or None.
      failure: what the process sent as its error, usually a traceback, or None.
      cause: why the last process died or could not be started, in words.
      num_deaths, deaths_in_a_row: all of them; those since a process has done enough work.
      work: units of work of this process.
    """

    def __init__(self, number, name, enough):
        self.number, self.name = number, name
        self.process = self.pipe = self.failure = self.cause = None
        self.is_dead = False
        self.due = self.start_time = 0.0
        self.num_deaths = self.deaths_in_a_row = self.work = 0
        self._enough = enough

    @property
    def is_running(self):
        return self.process is not None and not self.is_dead

    def count_work(self):
        """Count a unit of work; `enough` of them end a series of deaths."""
        self.work += 1
        if self.work == self._enough:
            self.deaths_in_a_row = 0


class Supervisor:
    """Keeps child processes alive.

    One thread at a time may call `start`, `news` and `restart`; any thread may call `close`,
    `wake`, `pids`, `silences` and `num_deaths`, and send through the pipe of a child, which stays
    open until `restart` or `close`.

    A child sends pairs through its pipe: a kind and its content. The kind "error" says that it
    ends, and why; a third item is a traceback to be printed above that.

    Args:
      names: of the children, for logs.
      create: called with the child's number, the number of deaths before, and the far end of the
        pipe; returns a Process of the fork server or of the context "spawn", not started yet.
      heartbeat: called with the child's number; returns the time.monotonic() at which it last
        showed life, or None where it has nothing to do. For any thread.
      patience: seconds of silence after which a child is killed; may be changed.
      enough, unit: how many units of work end a series of deaths, and what a unit is called.
      max_deaths: consecutive deaths that raise EnvError; None: unlimited.
      all_of: whether to raise only once every child has reached max_deaths.
      pauses: seconds before a restart, by the number of consecutive deaths; the last value repeats.

    Attributes:
      children: a list of Child.
      lookout: the Lookout of `news`.
    """

    def __init__(
        self, names, create, heartbeat, patience, enough=None, unit=None,
        max_deaths=MAX_DEATHS, all_of=False, pauses=(0,),
    ):  # fmt: skip
        self.children = [Child(i, name, enough) for i, name in enumerate(names)]
        self.lookout, self.patience = Lookout(), patience
        self._create, self._heartbeat = create, heartbeat
        self._enough, self._unit = enough, unit
        self._max_deaths, self._all_of, self._pauses = max_deaths, all_of, pauses
        self._next_check = 0.0
        self._lock = threading.RLock()  # guards the writer; signal handlers may wake, too
        self._is_closed = False
        self._wake_reader, self._wake_writer = multiprocessing.Pipe(duplex=False)

    def start(self):
        """Start all children now, rather than by the first `news`, which would retry.

        Raises:
          EnvError: a child cannot be started; no child is left.
          Exception: of `create`, or of pickling its arguments; no child is left.
        """
        try:
            for child in self.children:
                self._start(child)
        except BaseException:
            self.close()
            raise

    def news(self, timeout, children=None):
        """Wait for news at most `timeout` seconds; yield pairs of a Child and its message.

        The message is None where the child has died; then it is for the caller to restart it. A
        child that lives gives at most one message in each call, a dead one all that it has sent.

        Args:
          children: listen to these alone. A child removed from the list during iteration is not
            read further; its death is yielded by a later call.

        Raises:
          EnvError: a child cannot be started, and max_deaths is reached.
        """
        if self._is_closed:
            return
        children = self.children if children is None else children
        self.lookout.look()
        if self._start_those_due():
            timeout = 0  # the caller may wait for that alone
        running = [child for child in children if child.is_running]
        handles = [child.pipe for child in running]
        handles += [child.process.sentinel for child in running]
        handles.append(self._wake_reader)
        try:
            ready = set(multiprocessing.connection.wait(handles, self._until_due(timeout)))
            if self._wake_reader in ready:
                self._wake_reader.recv_bytes()
            # Who is dead is asked before messages are read, so that the last ones are not lost. The
            # dead come first: what others report may be due to them.
            dead = [child for child in running if child.process.sentinel in ready]
            if time.monotonic() >= self._next_check:
                dead += self._find_lost(
                    c for c in running if c.pipe not in ready and c.process.sentinel not in ready
                )
        except (EOFError, OSError):
            if not self._is_closed:
                raise
            return
        alive = [child for child in running if child.pipe in ready and child not in dead]
        for child in dead + alive:
            if not self._is_closed:
                yield from self._read(child, children, is_dead=child in dead)

    def restart(self, child):
        """Count the death of a child; `news` starts another process in its place after the pause.

        Raises:
          EnvError: max_deaths is reached.
        """
        child.pipe.close()
        child.process = child.pipe = None
        self._count_death(child, "died and is replaced")

    def wake(self):
        """End the wait in `news`, or in the next one. For any thread, and signal handlers."""
        with self._lock:
            if not self._is_closed:
                self._wake_writer.send_bytes(b"")

    def pids(self):
        """Return the ids of all processes that run. For any thread."""
        processes = [child.process for child in self.children if child.is_running]
        return [process.pid for process in processes if process is not None]

    def silences(self, what):
        """Return a tuple of each child that has something to do, as a Watchdog wants them.

        For any thread.

        Args:
          what: the children do, for the log.
        """
        found = []
        for child in self.children:
            process = child.process  # which another thread may replace
            if process is None or child.is_dead:
                continue
            seconds = self._seconds_silent(child)
            if seconds is not None:
                found.append((child.name, what, seconds, process.pid))
        return found

    def num_deaths(self):
        """Return the number of deaths of all children. For any thread."""
        return sum(child.num_deaths for child in self.children)

    def close(self, patience=3):
        """Close the pipes, which children notice; kill those that live after so many seconds.

        May be called again. No other thread may send through a pipe any more.
        """
        with self._lock:
            self._is_closed = True
            self._wake_writer.close()  # which ends a wait in `news`
        for child in self.children:
            if child.pipe is not None:
                child.pipe.close()
        deadline = time.monotonic() + patience
        for child in self.children:
            if child.process is not None:
                end_process(child.process, deadline - time.monotonic())
        self._wake_reader.close()

    def _until_due(self, timeout):
        times = [child.due for child in self.children if child.due is not None]
        return max(0, min(timeout, min(times) - time.monotonic())) if times else timeout

    def _seconds_silent(self, child):
        beat = self._heartbeat(child.number)
        # Silence counts from the start at the earliest.
        return None if beat is None else self.lookout.seconds_silent(max(beat, child.start_time))

    def _find_lost(self, children):
        """Kill and return those that are silent for too long; return those that died unnoticed.

        A sentinel may be held open by processes that the child has started.
        """
        self._next_check, lost = time.monotonic() + CHECK_INTERVAL, []
        for child in children:
            seconds = self._seconds_silent(child)
            if not child.process.is_alive():
                lost.append(child)
            elif seconds is not None and seconds > self.patience and not child.pipe.poll():
                child.cause = f"it was silent for {seconds:.0f} s, and so was killed"
                end_process(child.process, 0)
                lost.append(child)
        return lost

    def _read(self, child, children, is_dead):
        is_readable = not is_dead
        try:
            while is_readable or child.pipe.poll():
                message = child.pipe.recv()
                if message[0] == "error":
                    child.failure = message[1]
                    print(*message[2:], sep="", end="", file=sys.stderr)  # which may be closed
                    break
                yield child, message
                if not is_dead or child not in children:
                    return
                is_readable = False
        except (EOFError, OSError):
            pass  # it has closed its end
        self._end(child)
        yield child, None

    def _end(self, child):
        child.process.join(END_PATIENCE)
        how = "it closed its pipe" if child.process.is_alive() else describe_exit(child.process)
        end_process(child.process, 0)
        child.cause = child.failure or child.cause or how
        child.is_dead = True

    def _start_those_due(self):
        """Start children; return whether any was to be started."""
        now = time.monotonic()
        due = [child for child in self.children if child.due is not None and child.due <= now]
        for child in due:
            try:
                self._start(child)
            except EnvError as error:
                child.cause = str(error)
                self._count_death(child, "did not start, and is tried again", RETRY_PAUSE)
        return bool(due)

    def _start(self, child):
        """Start a process.

        Raises:
          EnvError: it cannot be started.
        """
        child.due = child.failure = child.cause = None
        child.start_time, child.is_dead, child.work = time.monotonic(), False, 0
        with contextlib.ExitStack() as stack:
            try:
                near_end, far_end = multiprocessing.Pipe()
                stack.callback(far_end.close)
                stack.callback(near_end.close)
                process = self._create(child.number, child.num_deaths, far_end)
            except OSError as error:
                raise EnvError(
                    f"{child.name} cannot be started ({error!r}): look at the limit of open files "
                    "(ulimit -n), and for free memory"
                ) from None
            start_process(process, child.name)
            stack.pop_all()
        far_end.close()
        child.pipe, child.process = near_end, process
        if self._is_closed:  # meanwhile, by another thread
            near_end.close()
            end_process(process, 0)

    def _count_death(self, child, event, least_pause=0):
        """Count and log a death; have another process started after a pause.

        Raises:
          EnvError: max_deaths is reached.
        """
        child.num_deaths += 1
        child.deaths_in_a_row += 1
        counted = self.children if self._all_of else [child]
        most = self._max_deaths
        if most and min(other.deaths_in_a_row for other in counted) >= most:
            others = ", like all others," if len(counted) > 1 else ""
            raise EnvError(
                f"{child.name}{others} died {most} times with less than {self._enough} "
                f"{self._unit} in between, most recently: {child.cause}"
            )
        pause = self._pauses[min(child.deaths_in_a_row, len(self._pauses)) - 1]
        pause = max(pause, least_pause)
        child.due = time.monotonic() + pause
        limit = f"; the run ends {'when all have' if self._all_of else 'at'} {most} in a row"
        logging.error(
            "%s %s%s (deaths: %d in all, %d in a row%s): %s",
            child.name[0].upper() + child.name[1:],
            event,
            f" in {pause:g} s" if pause else "",
            child.num_deaths,
            child.deaths_in_a_row,
            limit if most else "",
            child.cause,
        )
