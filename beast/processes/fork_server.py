# SPDX-License-Identifier: Apache-2.0
"""The fork server, which starts actor processes: it has no threads and imports once.

No torch here; the server itself imports it for all actors.
"""

import contextlib
import functools
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
import weakref

from beast.errors import EnvError
from beast.processes.lifetime import signals_blocked, socket_folder

_running = weakref.WeakSet()  # processes that were started, and not ended yet


def start_fork_server():
    """Start the fork server; return its multiprocessing context."""
    context = multiprocessing.get_context("forkserver")
    modules = ["__main__", "torch", "gymnasium", "ale_py"]
    modules += ["cv2"] if "cv2" in sys.modules else []  # a sample environment has imported it
    context.set_forkserver_preload(modules)
    # Before the server, since we may be killed at any moment after it has made its socket there.
    _remove_after_death(_make_socket_folder())
    # It inherits that the signals are blocked, and so outlives a Ctrl-C or SIGTERM that reaches
    # the whole process group: only the main process decides what to do then.
    with signals_blocked():
        multiprocessing.forkserver.ensure_running()
    return context


def _make_socket_folder():
    """Create and return multiprocessing's folder for sockets of this process and its children."""
    before, tempfile.tempdir = tempfile.gettempdir(), socket_folder()
    try:
        return multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = before


def start_process(process, name):
    """Start a process of that context.

    Raises:
      EnvError: the fork server has died, or could not fork.
    """
    try:
        # For a fork server that has to be started anew: it inherits both.
        with signals_blocked(), all_cores():
            multiprocessing.forkserver.ensure_running()
        # With signals open, since it waits for the fork server's imports.
        process.start()
    except (EOFError, OSError, ValueError) as error:  # the latter: of too many files to send
        raise EnvError(
            f"{name} cannot be started ({error!r}): look for an error above, for free memory, and "
            "at the limits of processes and files (ulimit -u, -n)"
        ) from None
    _running.add(process)
    # At its exit multiprocessing would wait for it, as it is not daemonic: environments may start
    # processes of their own. It ends with this one all the same (lead_group).
    multiprocessing.process._children.discard(process)


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


def end_process(process, patience):
    """Kill a process of the fork server unless it ends within so many seconds.

    Processes that its environments started are killed in any case.
    """
    if process not in _running:  # its id may be that of another one by now
        return
    _running.discard(process)
    process.join(max(0, patience))
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, and left nobody
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive() or process.exitcode == 255:
        # It hangs; or the fork server died, and it only seems to be dead.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    process.join(2)
    if process.is_alive():  # as far as the fork server knows
        kill_fork_server()
        process.join(2)  # no longer: an actor stopped as it started may hold the fork server's pipe


@functools.cache  # keeps the process, and with it the pipe
def _remove_after_death(folder):
    """Have a folder, such as that of the fork server's socket, removed even after SIGKILL."""
    return subprocess.Popen(
        ["sh", "-c", 'read _; rm -rf "$0"', folder], stdin=subprocess.PIPE, process_group=0
    )
