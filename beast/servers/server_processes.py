# SPDX-License-Identifier: Apache-2.0
"""The processes of polybeast_env.py: one a server, restarted when it dies, and their supervisor.

What a learner needs to find and start servers is in servers.py. No torch here.
"""

import argparse
import contextlib
import itertools
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time

import libtorchbeast
from beast.errors import format_cause
from beast.processes.lifetime import (
    HANDLED_SIGNALS,
    STOP_SIGNALS,
    exit_now,
    exit_with_parent,
    signals_blocked,
    start_logging,
)
from beast.processes.watchdog import PATIENCE, Lookout, Watchdog, print_stacks_on_signal
from beast.servers.addresses import remove_folder, remove_socket

FIRST_PAUSE, LONGEST_PAUSE = 1, 30  # seconds before a dead server is restarted
GRACE = 5  # seconds in which servers end by themselves


def add_flags(parser):
    """Add the flags of a program that another program starts."""
    parser.set_defaults(render_mode=None)  # with which create_env makes its environment
    group = parser.add_argument_group("started by a program")
    group.add_argument("--end_with_stdin", action="store_true",
                       help="Stop, as after SIGTERM, when standard input ends.")  # fmt: skip
    group.add_argument("--learner_flags", default="{}", metavar="JSON",
                       help="Flags of the learner that starts these servers; defaults of those "
                       "that are not given here.")  # fmt: skip


def parse_flags(parser, argv=None):
    """Parse the command line; flags that it does not give are as in --learner_flags."""
    learner_flags = json.loads(parser.parse_args(argv).learner_flags)
    known = {action.dest for action in parser._actions} & learner_flags.keys()
    namespace = argparse.Namespace(**{name: learner_flags[name] for name in known})
    return parser.parse_args(argv, namespace)


def server_main(run_server, flags, address, seed, pipe, busy_since):
    """Run the server at `address`: a process. Report through the pipe: see ServerProcess."""
    served = []  # the address, once it is ours

    def started(address):
        served.append(address)
        pipe.send(None)

    def end():
        for address in served:
            remove_socket(address)
        exit_now()

    def record_alive():
        busy_since[-1] = time.monotonic() + 1  # called once a second, which is no silence

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides what to do
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print_stacks_on_signal()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
    exit_with_parent(end=end, while_alive=record_alive)
    os.nice(10)  # a learner on the same machine comes first
    start_logging()
    try:
        run_server(flags, address, seed, started, [signal.SIGTERM], busy_since)
    except (ValueError, RuntimeError, ImportError, OSError) as error:  # else all is printed
        pipe.send((str(error) or type(error).__name__, format_cause(error)))
        sys.exit(1)


class ServerProcess:
    """A server process, which is restarted when it dies.

    Args:
      run_server: called in the process as in polybeast_env.py. The process sends None when
        learners can connect, or why it ends: a line, and the traceback to be printed above it.
    """

    def __init__(self, run_server, flags, address, number):
        self.run_server, self.flags, self.address = run_server, flags, address
        self.number = number
        self.incarnations, self.lookout = itertools.count(), Lookout()
        self.has_served = False
        self.pause = FIRST_PAUSE
        self.start()

    def start(self):
        self.pipe, far_end = multiprocessing.Pipe()
        # A restarted server must not play the same games again.
        seed = [self.number, next(self.incarnations)]
        context = multiprocessing.get_context("spawn")
        # Since when each stream's environments have been at one step (0: they wait for actions);
        # and when the process was last alive.
        self.busy_since = context.RawArray("d", libtorchbeast.MAX_STREAMS + 1)
        self.busy_since[-1] = time.monotonic()
        args = (self.run_server, self.flags, self.address, seed, far_end, self.busy_since)
        self.process = context.Process(target=server_main, args=args)
        with signals_blocked():
            self.process.start()
        far_end.close()
        self.start_time = time.monotonic()
        self.failure, self.traceback = None, ""

    def handles(self):
        """Return what becomes ready when there is news of the process."""
        return [] if self.process is None else [self.pipe, self.process.sentinel]

    def check(self):
        """Log what happened to the process; restart it where it is time to.

        Raises:
          RuntimeError: it ended before learners could connect.
        """
        self.lookout.look()
        if self.process is None:
            if time.monotonic() >= self.start_time:
                self._restart()
            return
        dead = not self.process.is_alive()  # asked first, so that no last message is lost
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                if message := self.pipe.recv():
                    self.failure, self.traceback = message
                else:
                    self.has_served = True
                    logging.info("serving on %s", self.address)
        if dead:
            self._plan_restart()
        elif (seconds := self.seconds_silent()) > PATIENCE * self.flags.stall_timeout_s:
            self.failure = f"the server of {self.address} was silent for {seconds:.0f} s"
            self.process.kill()

    def seconds_silent(self):
        """Return for how long the process, or the slowest of its streams, has been at one step."""
        return self.lookout.seconds_silent(min(filter(None, self.busy_since)))

    def end(self, deadline):
        if self.process is not None:
            self.process.join(max(0, deadline - time.monotonic()))
            self.process.kill()
            self.process.join()
        if self.has_served:
            remove_socket(self.address)
        remove_folder(self.address)

    def _plan_restart(self):
        code, now = self.process.exitcode, time.monotonic()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        cause = self.failure or f"the server of {self.address} ended, {how}"
        sys.stderr.write(self.traceback)
        if not self.has_served:
            raise RuntimeError(cause)
        if now - self.start_time > 2 * LONGEST_PAUSE:
            self.pause = FIRST_PAUSE
        logging.error("%s; restarting it in %d s", cause, self.pause)
        self.process, self.start_time = None, now + self.pause
        self.pause = min(2 * self.pause, LONGEST_PAUSE)

    def _restart(self):
        try:
            self.start()
        except OSError as error:  # no memory, say, or too many processes
            logging.error(
                "the server of %s cannot be started (%s); trying again in %d s",
                *(self.address, error, LONGEST_PAUSE),
            )
            self.process, self.start_time = None, time.monotonic() + LONGEST_PAUSE


def supervise(run_server, flags, addresses):
    """Run a server at each address until a signal or the end of standard input; return a status."""
    reader, writer = os.pipe()  # gets a byte when all is to end: the number of a signal, or 0
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: os.write(writer, bytes([number])))
    if flags.end_with_stdin:
        exit_with_parent(0, end=lambda: os.write(writer, bytes([0])))
    servers = []

    def running():
        return [server for server in servers if server.process is not None]

    def silences():
        return [
            (f"the server of {s.address}", "is at one step, or its process is stopped",
             s.seconds_silent(), process.pid)
            for s, process in [(s, s.process) for s in servers]  # which another thread may end
            if process is not None
        ]  # fmt: skip

    print_stacks_on_signal(lambda: [server.process.pid for server in running()])
    watchdog = Watchdog(flags.stall_timeout_s, silences)
    try:
        for number, address in enumerate(addresses):
            servers.append(ServerProcess(run_server, flags, address, number))
        while True:
            handles = [reader]
            for server in servers:
                handles += server.handles()
            pauses = [s.start_time - time.monotonic() for s in servers if s.process is None]
            # A dead server's handles stay silent for as long as a child of its own holds them.
            ready = multiprocessing.connection.wait(handles, max(0, min([GRACE, *pauses])))
            if reader in ready:
                number = os.read(reader, 1)[0]
                return 128 + number if number else 0
            for server in servers:
                server.check()
    finally:
        watchdog.close()
        for server in running():
            server.process.terminate()
        deadline = time.monotonic() + GRACE
        for server in servers:
            server.end(deadline)
