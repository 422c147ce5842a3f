# SPDX-License-Identifier: Apache-2.0
"""Child processes: how they start, from the fork server or by spawning, and how they end.

The fork server has no threads and imports packages once. No torch here; the server imports it for
all. Each child imports the program anew, which may have been edited by then.
"""

import contextlib
import functools
import logging
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import weakref

from beast.errors import EnvError
from beast.processes.edited_files import edited_files
from beast.processes.lifetime import (
    HANDLED_SIGNALS,
    STOP_SIGNALS,
    default_signals_in_forks,
    exit_with_parent,
    lead_group,
    signal_name,
    signals_blocked,
    socket_folder,
    start_logging,
)
from beast.processes.watchdog import print_stacks_on_signal

_started = weakref.WeakSet()  # processes that have not been ended yet


def start_fork_server():
    """Start the fork server; return its multiprocessing context."""
    context = multiprocessing.get_context("forkserver")
    modules = ["torch", "gymnasium", "ale_py"]
    # What a sample environment has imported.
    modules += [name for name in ("cv2", "envpool") if name in sys.modules]
    context.set_forkserver_preload(modules)
    # Before the server, since we may be killed at any moment after it has made its socket there.
    remove_after_death(_make_socket_folder())
    # It inherits that the signals are blocked, and so outlives a Ctrl-C or SIGTERM that reaches
    # the whole process group: only the main process decides what to do then.
    with signals_blocked():
        multiprocessing.forkserver.ensure_running()
    return context


def _make_socket_folder():
    """Create and return multiprocessing's folder for sockets of this process and its children."""
    before, tempfile.tempdir = tempfile.tempdir, socket_folder()
    try:
        return multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = before


@contextlib.contextmanager
def all_cores():
    """Give this thread, which may be pinned (devices.use_threads), the main thread's cores."""
    own, cores = os.sched_getaffinity(0), os.sched_getaffinity(os.getpid())
    if own == cores:
        yield
        return
    with contextlib.suppress(OSError):  # the cores have changed meanwhile
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, own)


def kill_fork_server():
    """Kill the fork server, which may be stopped, to wake callers; a new one starts on demand."""
    pid = multiprocessing.forkserver._forkserver._forkserver_pid
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def describe_exit(process):
    """Return why a process has ended, as far as its status says."""
    if process.exitcode is None:
        return f"its process {process.pid} cannot be killed"
    if process.exitcode < 0:
        return f"killed by {signal_name(-process.exitcode)}"
    return f"it ended with status {process.exitcode}"


def start_process(process, name):
    """Start a process of the fork server or of the context "spawn".

    Raises:
      EnvError: the system refuses another process, or the fork server has died.
    """
    if edited := edited_files():
        logging.warning(
            "%s starts with code that was edited after this run began (%s): to edit while a run "
            "goes on, work in another clone", name, ", ".join(edited),
        )  # fmt: skip
    is_spawned = isinstance(process, multiprocessing.context.SpawnProcess)
    try:
        # For a fork server that has to be started anew, too: it inherits both.
        with signals_blocked(), all_cores():
            process.start() if is_spawned else multiprocessing.forkserver.ensure_running()
        if not is_spawned:  # with signals open, since it waits for the fork server's imports
            process.start()
    except (EOFError, OSError, ValueError) as error:  # ValueError: too many files to send
        if isinstance(error, FileNotFoundError) and not is_spawned:
            # Somebody has cleaned the temporary folder. The next try starts another server; all
            # children of this one count as dead, and are replaced.
            os.makedirs(multiprocessing.util.get_temp_dir(), 0o700, exist_ok=True)
            kill_fork_server()
        raise EnvError(
            f"{name} cannot be started ({error!r}): look for an error above, for free memory, and "
            "at the limits of processes and files (ulimit -u, -n)"
        ) from None
    _started.add(process)
    # At its exit multiprocessing would wait for it, as it is not daemonic: environments may start
    # processes of their own. It ends with this one all the same (lead_group, exit_with_parent).
    multiprocessing.process._children.discard(process)


def end_process(process, patience):
    """Kill a process that start_process has started, unless it ends in so many seconds.

    What its environments have started is killed in any case: it leads a group.
    """
    if process not in _started:  # its id may be that of another one by now
        return
    _started.discard(process)
    process.join(max(0, patience))
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, and left nobody
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive() or process.exitcode == 255:
        # It hangs; or the fork server died, and it only seems to be dead.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    process.join(2)
    is_spawned = isinstance(process, multiprocessing.context.SpawnProcess)
    if process.is_alive() and not is_spawned:  # the fork server has not reported its end
        kill_fork_server()
        process.join(2)  # no longer: a child stopped as it started may hold the fork server's pipe


def child_main(function, pipe, *args, niceness=10):
    """Run in a process of the fork server: call `function(*args)`, and send its error.

    The process ignores signals, but ends with the main process. It leads a process group, so
    processes that its environments start end with it.

    Args:
      niceness: by default the learner comes first, and children take what is left of the cores.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
    default_signals_in_forks()
    lead_group()
    start_logging()
    print_stacks_on_signal()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
    exit_with_parent()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    os.nice(niceness)
    try:
        function(*args)
    except Exception:
        with contextlib.suppress(OSError):  # the main process has closed the pipe
            pipe.send(("error", traceback.format_exc()))


@functools.cache  # keeps the process, and with it the pipe
def remove_after_death(folder):
    """Have a folder, such as that of the fork server's socket, removed even after SIGKILL."""
    return subprocess.Popen(
        ["sh", "-c", 'read _; rm -rf "$0"', folder], stdin=subprocess.PIPE, process_group=0
    )
