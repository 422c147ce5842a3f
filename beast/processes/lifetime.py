# SPDX-License-Identifier: Apache-2.0
"""Starting and ending of processes and threads: signals, parents, process groups.

No torch here.
"""

import contextlib
import errno
import fcntl
import functools
import importlib.machinery
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import signal
import sys
import tempfile
import threading
import time

from beast.errors import FlagError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores SIGHUP
    STOP_SIGNALS += (signal.SIGHUP,)  # the terminal, or the connection to it, is lost
LOG_FORMAT = "[%(levelname)s %(asctime)s %(process)d] %(message)s"
MAX_SOCKET_PATH = 107  # bytes, by Linux
MAX_NAME = 32  # of these, bytes for names that we and multiprocessing make
HANDLED_SIGNALS = (*STOP_SIGNALS, signal.SIGUSR1)  # a new process needs a moment to handle them


def start_logging():
    logging.basicConfig(format=LOG_FORMAT, level=logging.INFO)


def signal_name(number):
    """Return a signal's name; most real-time signals have none."""
    return next((s.name for s in signal.Signals if s == number), f"signal {number}")


def lock_file(file):
    """Lock a file against other processes until it is closed, where the file system knows locks.

    Raises:
      BlockingIOError: another process has locked it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        folder = os.path.dirname(file.name)
        logging.warning("%s is on a file system without locks: start nothing else in it", folder)


class StopSignals:
    """Catches STOP_SIGNALS; one that comes more than a second later ends the process at once.

    Within that second it is a duplicate: make and timeout send it to the process and to its
    group.

    Args:
      announce: called with the name of the first one, in a thread, since the main thread may be
        holding the very locks that this needs.

    Attributes:
      first: the first signal caught, or None.
    """

    def __init__(self, announce):
        self._announce, self.first = announce, None
        self._pid = os.getpid()

    def catch(self):
        self._handlers = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}

    def restore(self):
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _handle(self, number, _):
        if os.getpid() != self._pid:  # in a child that an environment has forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.first is None:
            self.first, self.time = signal.Signals(number), time.monotonic()
            threading.Thread(target=self._announce, args=(self.first.name,)).start()
        # A terminal that is closed may send another SIGHUP much later.
        elif number != signal.SIGHUP and time.monotonic() > self.time + 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            os._exit(128 + number)  # process 1, of a container, does not end by it


class Threads:
    """Starts threads; at the end of its `with` block wakes and joins them, and raises their error.

    Args:
      stop: threading.Event, set when a thread ends or raises; code that waits for it leaves the
        block.
      on_exit: functions that wake the threads, called when the block is left.
    """

    def __init__(self, stop, on_exit):
        self._stop, self._on_exit = stop, on_exit
        self._threads, self._errors = [], []

    def start(self, function, *args, name=None, copies=1):
        """Start threads that call `function(*args)`; `name` is for logs, by default its name."""
        name = name or function.__name__.replace("_", " ")
        for i in range(copies):
            thread = threading.Thread(target=self._run, args=(function, args), name=f"{name} {i}")
            thread.start()
            self._threads.append(thread)

    def _run(self, function, args):
        try:
            function(*args)
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._stop.set()

    def __enter__(self):
        return self

    def __exit__(self, error_type, error, traceback):
        self._stop.set()
        for wake in self._on_exit:
            try:
                wake()
            except Exception as failure:  # call the remaining functions, too
                self._errors.append(failure)
        for thread in self._threads:
            thread.join()
        if self._errors and error is None:
            raise self._errors[0]
        if self._errors:
            logging.error("Another thread failed, too", exc_info=self._errors[0])


def exit_on_signals():
    """Make SIGINT and SIGTERM raise SystemExit in the main thread, with a shell's status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in a background job of a shell
            signal.signal(number, _exit_on_signal)


def _exit_on_signal(number, frame):
    # An extension module whose initialization raises may end in a SIGSEGV (ale_py's does).
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), importlib.machinery.ExtensionFileLoader):
            threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
            return
        frame = frame.f_back
    sys.exit(128 + number)


@contextlib.contextmanager
def signals_blocked():
    """Block the handled signals in the processes that are started in this block.

    A process unblocks them when its handlers are in place. Until then a Ctrl-C, which reaches the
    whole process group, would end it in the middle of its imports.
    """
    multiprocessing.resource_tracker.ensure_running()  # starting it later would unblock them
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)


def exit_now():
    """End this process at once, and its process group if it leads one."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def lead_group(number=signal.SIGKILL):
    """Lead a process group, to which the kernel sends a signal when the parent ends.

    For processes that multiprocessing has started, and that may start others. By default all in the
    group are killed, even if they hang. SIGCONT wakes a stopped one, for exit_with_parent.
    """
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # which a background group gets for its output
    os.setpgid(0, 0)
    pipe = multiprocessing.parent_process().sentinel
    with contextlib.suppress(OSError):  # a sandbox may not know it: exit_with_parent is left then
        # When its other end is closed, the kernel sends the group a SIGIO, or what F_SETSIG says.
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, number)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def default_signals_in_forks():
    """Have processes that environments fork from this one end by signals, as those expect."""
    for number in STOP_SIGNALS:
        os.register_at_fork(after_in_child=functools.partial(signal.signal, number, signal.SIG_DFL))


def exit_with_parent(pipe=None, end=exit_now, while_alive=lambda: None):
    """End this process when its parent ends, even by SIGKILL; a thread watches a pipe.

    Args:
      pipe: file descriptor of a pipe whose other end the parent holds open: for programs that a
        program starts, standard input. By default multiprocessing's own.
      end: called in the thread when the parent has ended.
      while_alive: called about once a second until then.
    """
    if pipe is None:
        pipe = multiprocessing.parent_process().sentinel

    def watch():
        while not (multiprocessing.connection.wait([pipe], timeout=1) and os.read(pipe, 1) == b""):
            while_alive()
        end()

    threading.Thread(target=watch, name="exit with parent", daemon=True).start()


def socket_folder():
    """Return a folder for sockets: the temporary folder, or one with a shorter path.

    Raises:
      FlagError: there is none.
    """
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:  # it tries neither /dev/shm nor too long paths
        temporary = os.environ.get("TMPDIR", "/tmp")
    for folder in (temporary, "/tmp", "/var/tmp", "/dev/shm"):
        is_short = len(os.fsencode(folder)) <= MAX_SOCKET_PATH - MAX_NAME
        if is_short and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise FlagError(
        f"TMPDIR ({temporary}) is too long for sockets, whose paths have at most "
        f"{MAX_SOCKET_PATH} bytes, or cannot be written to, nor can /tmp: set it to another folder"
    )
