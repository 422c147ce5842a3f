# SPDX-License-Identifier: Apache-2.0
"""The processes of polybeast_env.py, one for each server, and the program that keeps them alive.

What a learner needs to find and start servers is in servers.py. No torch here.
"""

import argparse
import atexit
import contextlib
import json
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import time
import traceback

import libtorchbeast
from beast.errors import format_cause
from beast.processes.lifetime import (
    HANDLED_SIGNALS,
    STOP_SIGNALS,
    default_signals_in_forks,
    exit_now,
    exit_with_parent,
    lead_group,
    start_logging,
)
from beast.processes.supervisor import Supervisor
from beast.processes.watchdog import PATIENCE, Watchdog, print_stacks_on_signal
from beast.servers import credentials
from beast.servers.addresses import remove_folder, remove_socket

PAUSES = (1, 2, 4, 8, 16, 30)  # seconds before a restart, by the number of consecutive deaths
MIN_SECONDS = 60  # seconds of life after which consecutive deaths are reset to 0
GRACE = 5  # seconds in which servers end by themselves


def add_flags(parser):
    """Add the flags of a program that another program starts."""
    parser.set_defaults(render_mode=None, mode="train")  # which create_env may read
    group = parser.add_argument_group("started by a program")
    group.add_argument("--end_with_stdin", action="store_true",
                       help="Stop, as after SIGTERM, when standard input ends.")  # fmt: skip
    group.add_argument("--learner_flags", default="{}", metavar="JSON",
                       help="Flags of the learner that starts these servers, or a list of its "
                       "arguments; defaults of those that are not given here.")  # fmt: skip


def parse_flags(parser, argv=None):
    """Parse the command line; flags that it does not give are as in --learner_flags."""
    learner_flags = json.loads(parser.parse_args(argv).learner_flags)
    if isinstance(learner_flags, list):  # some of which only a learner knows
        learner_flags = vars(parser.parse_known_args(learner_flags)[0])
    known = {action.dest for action in parser._actions} & learner_flags.keys()
    known -= {*credentials.FLAGS, "insecure"}  # a learner's are not good for a server
    namespace = argparse.Namespace(**{name: learner_flags[name] for name in known})
    return parser.parse_args(argv, namespace)


@contextlib.contextmanager
def busy(busy_since):
    """Make a server count as silent within; `busy_since` as of libtorchbeast.Server."""
    busy_since[0] = time.monotonic()
    yield
    busy_since[0] = 0.0


def server_main(run_server, flags, address, seed, pipe, busy_since):
    """Run the server at `address`: a process. Send ("serving", address) once a learner can use it.

    Without an address the environments dial in, and the address is that of the learner.
    """
    served = []  # holds the address once the server listens there

    def send(*message):
        with contextlib.suppress(OSError):  # the supervisor is ending
            pipe.send(message)

    def started(its_address):
        served.extend([address] if address else [])
        send("serving", its_address)

    def end():
        for its_address in served:
            remove_socket(its_address)
        exit_now()  # with what environments have started, which must not keep the port

    def record_alive():
        busy_since[-1] = time.monotonic() + 1  # called once a second, which is no silence

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides what to do
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    default_signals_in_forks()
    # Servers are killed with their program, even if they hang; but those with unix sockets have to
    # remove these first, unless a learner, whose servers they are, does it.
    has_socket = (address or "").startswith("unix:") and not flags.end_with_stdin
    lead_group(signal.SIGCONT if has_socket else signal.SIGKILL)
    print_stacks_on_signal()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
    exit_with_parent(end=end, while_alive=record_alive)
    os.nice(10)  # a learner on the same machine comes first
    start_logging()
    status = 1
    try:
        run_server(flags, address, seed, started, busy_since)
        status = 0
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        send("error", str(error) or type(error).__name__, format_cause(error))
    except Exception as error:
        traceback.print_exc()
        send("error", f"{type(error).__name__}: {error}", format_cause(error))
    # Streams' threads may still be creating environments. An interpreter that ends beneath them
    # aborts, or prints that environments have leaked. What was registered for the exit, such as
    # that of the environments' own processes, happens all the same.
    multiprocessing.util._exit_function()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class ServerProcesses:
    """A process for each server, restarted when it dies.

    Args:
      run_server: called in the process, as in polybeast_env.py.
      addresses: of the servers; None for each that dials in to a learner.
    """

    def __init__(self, run_server, flags, addresses):
        self._run_server, self._flags, self._addresses = run_server, flags, addresses
        self._context = multiprocessing.get_context("spawn")
        # Since when each stream's environments have been at one step (0: they wait for actions);
        # and when the process was last alive.
        self._busy_since = [None] * len(addresses)
        self._has_served = [False] * len(addresses)
        self.supervisor = Supervisor(
            [
                f"the server of {address}" if address else f"environment process {i}"
                for i, address in enumerate(addresses)
            ],
            self._create_process,
            # When the slowest stream, or the process, last made progress.
            lambda number: min(filter(None, self._busy_since[number])),
            PATIENCE * flags.stall_timeout_s,
            max_deaths=None,
            pauses=PAUSES,
        )

    def silences(self):
        return self.supervisor.silences("is at one step, or its process is stopped")

    def run(self, stop):
        """Start all servers and restart those that die, until `stop`, a list, is not empty.

        Raises:
          RuntimeError: a server cannot be started, or ended before learners could use it.
        """
        self.supervisor.start()
        while not stop:
            for child, message in self.supervisor.news(GRACE):
                if message is not None:
                    self._has_served[child.number] = True
                    if self._addresses[child.number]:
                        logging.info("serving on %s", self._addresses[child.number])
                    else:
                        logging.info("%s plays for %s", child.name, message[1])
                # One that was killed, for silence, say, may have had bad luck, unless none serves.
                elif self._has_served[child.number] or (
                    not child.failure and (any(self._has_served) or not any(self._addresses))
                ):
                    self.supervisor.restart(child)
                else:
                    raise RuntimeError(child.failure or f"{child.name} died: {child.cause}")
            for child in self.supervisor.children:
                if child.is_running and time.monotonic() > child.start_time + MIN_SECONDS:
                    child.deaths_in_a_row = 0

    def close(self):
        """End all servers, and remove their sockets."""
        for child in self.supervisor.children:
            if child.is_running:
                child.process.terminate()
        self.supervisor.close(GRACE)
        for address, has_served in zip(self._addresses, self._has_served, strict=True):
            if has_served and address:
                remove_socket(address)
            elif address:
                remove_folder(address)

    def _create_process(self, number, num_deaths, pipe):
        seed = [number, num_deaths]  # a restarted server must not play the same games again
        busy_since = self._context.RawArray("d", libtorchbeast.MAX_STREAMS + 1)
        busy_since[-1] = time.monotonic()
        self._busy_since[number] = busy_since
        args = (self._run_server, self._flags, self._addresses[number], seed, pipe, busy_since)
        return self._context.Process(target=server_main, args=args)


def supervise(run_server, flags, addresses):
    """Run a server at each address until a signal or the end of standard input; return a status."""
    servers, stop = ServerProcesses(run_server, flags, addresses), []

    def end(number=0, _=None):
        stop.append(number)
        servers.supervisor.wake()

    for number in STOP_SIGNALS:
        signal.signal(number, end)
    if flags.end_with_stdin:
        exit_with_parent(0, end=end)
    print_stacks_on_signal(servers.supervisor.pids)
    watchdog = Watchdog(flags.stall_timeout_s, servers.silences)
    try:
        servers.run(stop)
        return 128 + stop[0] if stop[0] else 0
    finally:
        watchdog.close()
        servers.close()
