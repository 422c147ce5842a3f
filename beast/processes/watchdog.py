# SPDX-License-Identifier: Apache-2.0
"""Logs threads and processes that are silent for too long, with stacks. No torch here.

SIGUSR1 to a program prints the Python stacks of all its threads and processes.
"""

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
import time
import traceback

# Times --stall_timeout_s: an actor or environment server that is silent for so long is killed and
# replaced.
PATIENCE = 5
# Seconds from one look of a watcher to the next, beyond which it was stopped itself. None lets more
# than 5 pass by itself. A shorter stop counts as silence.
MAX_GAP = 10
STDERR = 2  # also where sys.stderr is something else


class Lookout:
    """Measures how long others have been silent, for a watcher that polls them.

    If the watcher was stopped (SIGSTOP, Ctrl-Z, a suspended job), so may the others have been:
    their silence then counts from when it continues.

    Attributes:
      last_look: time.monotonic() of it.
    """

    def __init__(self):
        self.last_look = self._since = time.monotonic()

    def look(self):
        """Begin a round; return whether the watcher was stopped since the last one."""
        now = time.monotonic()
        was_stopped = now - self.last_look > MAX_GAP
        if was_stopped:
            self._since = now  # first, since other threads ask meanwhile
        self.last_look = now
        return was_stopped

    def seconds_silent(self, heartbeat):
        """Return the seconds since a heartbeat, a time.monotonic(); 0 if the watcher was stopped.

        Negative if the heartbeat is in the future, because of a pause.
        """
        now = time.monotonic()
        return 0.0 if now - self.last_look > MAX_GAP else now - max(heartbeat, self._since)


class Watchdog:
    """Logs silent threads and processes, from a thread of its own, until it is closed.

    Args:
      timeout_s: seconds of silence that are logged; again each time they have doubled.
      others: returns a list of tuples for all that are not threads of this process: a name, what
        it does, for how many seconds (negative in a pause), and the id of its process or None.
    """

    def __init__(self, timeout_s, others=list):
        self._timeout_s, self._others = timeout_s, others
        self._beats = {}  # (name, what, since) by thread
        self._next = {}  # seconds of silence at which somebody is logged again, by name
        self._stop, self._lookout = threading.Event(), Lookout()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self, what, pause=0):
        """Record this thread's activity from here on.

        Args:
          pause: seconds that it sleeps first, which do not count as silence.
        """
        thread = threading.current_thread()
        self._beats[thread.ident] = thread.name, what, time.monotonic() + pause

    def follow(self, batches, waiting, working):
        """Yield from `batches`, recording that this thread waits for one, or works on it."""
        self.beat(waiting)
        for batch in batches:
            self.beat(working)
            yield batch
            self.beat(waiting)

    def close(self):
        self._stop.set()
        self._thread.join()

    def _watch(self):
        while not self._stop.wait(min(self._timeout_s / 4, 5)):
            last_look = self._lookout.last_look
            if self._lookout.look():
                logging.warning(
                    "The watchdog could not run for %.0f s: was this process stopped, or did a "
                    "thread hold the GIL?",
                    time.monotonic() - last_look,
                )
                self._next.clear()
                continue  # others have had no time yet to go on
            frames = sys._current_frames()
            for thread, (name, what, since) in list(self._beats.items()):
                seconds = self._lookout.seconds_silent(since)
                if thread in frames and self._is_news(name, seconds):
                    stack = "".join(traceback.format_stack(frames[thread]))
                    log_silence(name, what, seconds, f". Its stack:\n{stack}")
            for name, what, seconds, pid in self._others():
                if self._is_news(name, seconds):
                    log_silence(name, what, seconds, "" if pid is None else describe_process(pid))

    def _is_news(self, name, seconds):
        if seconds < self._timeout_s:
            if seconds and self._next.pop(name, None):  # 0: nobody has looked
                logging.info("%s is no longer silent", name)
            return False
        if seconds < self._next.get(name, 0):
            return False
        self._next[name] = 2 * seconds
        return True


@contextlib.contextmanager
def watched(what, timeout_s=60):
    """Context manager around what may hang before a run and its watchdog are there.

    In children it does nothing: their parents watch them.
    """
    if multiprocessing.parent_process() is not None:
        yield
        return
    watchdog = Watchdog(timeout_s)
    watchdog.beat(what)
    try:
        yield
    finally:
        watchdog.close()


def log_silence(name, what, seconds, details):
    logging.warning("%s has been silent for %.0f s: it %s%s", name, seconds, what, details)


def describe_process(pid):
    """Make a process print its stacks; return a description of its state."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        os.kill(pid, signal.SIGUSR1)
    except OSError:
        return f"; its process {pid} has ended"
    if state in "tT":
        return f"; its process {pid} is stopped, and goes on after: kill -CONT {pid}"
    return f"; its process {pid} prints its stack"


def print_stacks_on_signal(other_processes=list):
    """Make SIGUSR1 print the stacks of this process and of others, given by their ids."""

    def print_others(*_):
        # Not by faulthandler, which reads stacks that run, and so has ended a run with a SIGSEGV.
        # Without names: what this interrupts may hold threading's lock.
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                stack = "".join(traceback.format_stack(frame))
                with contextlib.suppress(OSError):  # a full disk, a closed pipe
                    os.write(STDERR, f"Thread {ident:#x}:\n{stack}\n".encode())
        for pid in other_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
                time.sleep(0.05)  # so that they do not print at the same time

    faulthandler.unregister(signal.SIGUSR1)  # else to register again would do nothing
    signal.signal(signal.SIGUSR1, print_others)
    # The main thread's comes first, and without the interpreter, which may be what hangs.
    faulthandler.register(signal.SIGUSR1, file=STDERR, all_threads=False, chain=True)
