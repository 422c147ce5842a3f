# SPDX-License-Identifier: Apache-2.0
"""Where environment servers are, and who keeps them running: PolyBeast's only. No torch here.

What is learned stands in polybeast.py, what is played in polybeast_env.py; here stand addresses,
processes that are started anew when they die, and the learner's first question to a server.
"""

import contextlib
import itertools
import json
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

import credentials
import libtorchbeast
from environment import EnvError, space_from_dict
from libtorchbeast.access import is_local
from watchdog import PATIENCE, STOP_SIGNALS, Watchdog, print_stacks_on_signal

HANDLED_SIGNALS = (*STOP_SIGNALS, signal.SIGUSR1)  # which a process is not ready for at once
FIRST_PAUSE, LONGEST_PAUSE = 1, 30  # seconds before a dead server is started anew
GRACE = 5  # seconds in which servers end by themselves
CONNECT_TIMEOUT = 20  # seconds until a server that cannot be reached is spoken of
ANSWER_TIMEOUT = 300  # seconds for a server to make its environments
MAJORITY_TIMEOUT = 5  # seconds after the first answer in which the others are heard
FOLDER_PREFIX = "polybeast-"  # of temporary folders for sockets


def consecutive_addresses(address, num_servers):
    """Return the addresses of so many servers, of which the first is given."""
    if num_servers < 1:
        raise ValueError(f"--num_servers is {num_servers}; it must be positive")
    if re.fullmatch(r"unix:.+", address):
        if num_servers == 1:
            return [address]
        return [f"{address}.{i}" for i in range(num_servers)]
    match = re.fullmatch(r"(\[.+\]|[^:\[\]]+):(\d{1,5})", address)
    if not match:
        raise ValueError(f"the address {address!r} should be host:port or unix:/path")
    host, port = match[1], int(match[2])
    if not 1 <= port <= port + num_servers - 1 < 2**16:
        raise ValueError(
            f"with --num_servers {num_servers} the address {address} takes the ports "
            f"{port} to {port + num_servers - 1}, but there are only 1 to {2**16 - 1}"
        )
    return [f"{host}:{port + i}" for i in range(num_servers)]


def expand_addresses(text):
    """Return the addresses in "host:port,host:first_port-last_port,unix:/path"."""
    addresses = []
    for part in text.split(","):
        match = re.fullmatch(r"(unix:.+)|([^:]+|\[.+\]):(\d+)(?:-(\d+))?", part.strip())
        first, last = (int(match[3] or 0), int(match[4] or match[3] or 0)) if match else (1, 0)
        if not 0 <= first <= last < 2**16:
            raise ValueError(
                f"--server_addresses has {part!r}; give host:port, host:first_port-last_port or "
                "unix:/path, separated by commas"
            )
        addresses += [match[1] or f"{match[2]}:{port}" for port in range(first, last + 1)]
    return addresses


def check_servers(flags):
    """Raise ValueError where the learner's flags of its servers cannot work."""
    if flags.server_addresses and flags.pipes_basename is not None:
        raise ValueError(
            f"--server_addresses ({flags.server_addresses}) names servers that run already, "
            f"--pipes_basename ({flags.pipes_basename}) where to start some: give only one"
        )
    if flags.server_addresses:
        num_addresses = len(expand_addresses(flags.server_addresses))
        credentials.load(flags)
    else:
        num_addresses = len(own_addresses(flags, "/a/temporary/folder"))
    if (flags.num_actors or num_addresses) < num_addresses:
        raise ValueError(
            f"--num_actors is {flags.num_actors}, but there are {num_addresses} servers, each of "
            f"which needs an actor: give it at least {num_addresses}"
        )
    if (flags.num_actors or 0) > libtorchbeast.MAX_STREAMS * num_addresses:
        raise ValueError(
            f"--num_actors is {flags.num_actors}, but {num_addresses} servers take at most "
            f"{libtorchbeast.MAX_STREAMS} streams each"
        )
    if (flags.envs_per_stream or 1) > libtorchbeast.MAX_ENVS:
        raise ValueError(
            f"--envs_per_stream is {flags.envs_per_stream}, but servers step at most "
            f"{libtorchbeast.MAX_ENVS} environments as one batch"
        )


def own_addresses(flags, folder):
    """Return where the learner starts servers: by default in `folder`."""
    address = flags.pipes_basename or f"unix:{folder}/server"
    addresses = consecutive_addresses(address, flags.num_servers)
    if not is_local(address):
        raise ValueError(
            f"--pipes_basename {address} may be reached from other machines, but servers that are "
            "started here are for this learner alone: give unix:/path or 127.0.0.1:port"
        )
    return addresses


class LocalServers:
    """Servers on this machine, for one learner. Use as a context manager.

    Args:
      flags: of the learner.
      script, words: path of polybeast_env.py, or of a fork of it, and its command line.

    Attributes: `addresses`, and the `process` that looks after them.
    """

    def __init__(self, flags, script, *words):
        self._folder = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX)
        self.addresses = own_addresses(flags, self._folder.name)
        address = flags.pipes_basename or f"unix:{self._folder.name}/server"
        # Those are for servers on other machines.
        words = [w for w in words if not w.startswith(("--tls_", "--auth_token_file"))]
        self._command = [sys.executable, script, "--server_address", address]
        self._command += ["--end_with_stdin", *words]

    def __enter__(self):
        self._start()
        return self

    def __exit__(self, *_):
        self.process.stdin.close()  # upon which it ends
        try:
            self.process.wait(GRACE + 2)
        except subprocess.TimeoutExpired:
            self.process.kill()  # upon which its children end
            self.process.wait()
        self._folder.cleanup()

    def _start(self):
        logging.info("Starting environment servers: %s", " ".join(self._command))
        # In a process group of its own, since a Ctrl-C is for the learner, which still needs them.
        self.process = subprocess.Popen(self._command, stdin=subprocess.PIPE, process_group=0)

    def check(self):
        """Start them anew if they were killed; return False if they have ended by themselves."""
        status = self.process.poll()
        if status is not None and status < 0:
            how = signal.Signals(-status).name
            logging.error("The environment servers' main process was killed by %s", how)
            self.process.stdin.close()
            time.sleep(FIRST_PAUSE)  # in which its children notice, and remove sockets and folder
            os.makedirs(self._folder.name, exist_ok=True)
            self._start()
        return status is None or status < 0


def query_servers(addresses, num_envs, local=None, flags=None):
    """Wait for servers that say what their environments are; return a handshake as a dict.

    All are asked at the same time, again and again. Those that answer within MAJORITY_TIMEOUT of
    the first are heard, and where they differ, the handshake that most of them gave is returned;
    of equally many, the one of the server that is listed first.

    Args:
      num_envs: environments that it shall make in order to answer; None: as many as it likes.
      local: LocalServers, which are not waited for once they have ended.
      flags: which name the files of credentials.py, for servers that ask for some.

    Raises:
      EnvError: every server answers, and none can be used.
    """
    access = credentials.load(flags)
    answers, done = queue.SimpleQueue(), threading.Event()

    def query(address):
        refusal = access.get("tls") and credentials.explain_refusal(address, flags)
        if not refusal:
            try:
                return libtorchbeast.query_server(
                    address, num_envs, ANSWER_TIMEOUT, CONNECT_TIMEOUT, **access
                )
            except TimeoutError:
                refusal = flags and credentials.explain_refusal(address, flags)
                if not refusal:
                    raise
        raise ConnectionRefusedError(refusal)

    def ask(address):
        answer = None
        while not done.is_set() and (answer is None or isinstance(answer, OSError)):
            try:
                answer = query(address)
            except BaseException as error:
                answer = error
            answers.put((address, answer))
            if isinstance(answer, ConnectionError):
                done.wait(2)  # before it is asked again

    # In threads, so that Ctrl-C reaches this one.
    for address in set(addresses):
        threading.Thread(target=ask, args=(address,), daemon=True).start()
    latest, deadline, start = {}, None, time.monotonic()  # answers by address
    try:
        while deadline is None or time.monotonic() < deadline:
            if local is not None and not local.check():
                raise EnvError("the environment servers could not be started: see above")
            try:
                address, answer = answers.get(timeout=0.1)
            except queue.Empty:
                continue
            latest[address] = answer
            if isinstance(answer, dict):
                deadline = deadline or time.monotonic() + MAJORITY_TIMEOUT
            elif isinstance(answer, OSError):  # of which ours are, too
                advice = ""
                if isinstance(answer, TimeoutError) and local is None:
                    advice = "; start polybeast_env.py there, or correct --server_addresses"
                seconds = time.monotonic() - start
                logging.warning(
                    "Waiting for environment servers, %.0f s so far: %s%s", seconds, answer, advice
                )
            else:
                raise answer
            final = (dict, ConnectionRefusedError, ConnectionAbortedError)  # asking again is vain
            if len(latest) == len(set(addresses)):
                if all(isinstance(a, final) for a in latest.values()):
                    break
    finally:
        done.set()
    handshakes = [latest[a] for a in addresses if isinstance(latest.get(a), dict)]
    if not handshakes:
        raise EnvError(f"no environment server can be used: {answer}")
    return max(handshakes, key=handshakes.count)  # the first of the most frequent


def read_spaces(handshake):
    """Return the observation space and the action space of which a handshake tells."""
    if not handshake["spaces"]:
        raise EnvError(
            "the environment servers do not tell the spaces, which the net is made from: serve the "
            "environment by create_env of polybeast_env.py"
        )
    spaces = {key: space_from_dict(d) for key, d in json.loads(handshake["spaces"]).items()}
    return spaces["observation"], spaces["action"]


def remove_socket(address):
    if address.startswith("unix:"):
        with contextlib.suppress(OSError):
            os.unlink(address.removeprefix("unix:"))


def remove_temporary_folder(address):
    """Remove the folder that a learner, which may have been killed, made for sockets, if empty."""
    folder = os.path.dirname(address.removeprefix("unix:"))
    if os.path.basename(folder).startswith(FOLDER_PREFIX):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


class ServerProcess:
    """A server process, which is started anew when it dies.

    Args:
      serve: run by the process, with `flags`, `address`, a seed and a pipe; tells through that when
        it serves (None), or why it does not (a text).
    """

    def __init__(self, serve, flags, address, number):
        self.serve, self.flags, self.address, self.number = serve, flags, address, number
        self.incarnations = itertools.count()
        self.has_served = False
        self.pause = FIRST_PAUSE
        self.start()

    def start(self):
        self.pipe, far_end = multiprocessing.Pipe()
        # A restarted server must not play the same games again.
        seed = [self.number, next(self.incarnations)]
        context = multiprocessing.get_context("spawn")
        # Since when each stream's environments have been at one thing (0: they wait for actions);
        # and when the process was last alive.
        self.busy_since = context.RawArray("d", libtorchbeast.MAX_STREAMS + 1)
        self.busy_since[-1] = time.monotonic()
        self.process = context.Process(
            target=self.serve, args=(self.flags, self.address, seed, far_end, self.busy_since)
        )
        # Blocked until it is ready for them, lest a Ctrl-C show tracebacks of imports. Starting the
        # resource tracker would unblock them.
        multiprocessing.resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
        self.process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
        far_end.close()
        self.start_time = time.monotonic()
        self.failure = None

    def handles(self):
        """Return what there may be news from."""
        return [] if self.process is None else [self.pipe, self.process.sentinel]

    def check(self):
        """Log what happened to the process; start it anew where it is time to.

        Raises:
          RuntimeError: it never came to serve.
        """
        now = time.monotonic()
        if self.process is None:
            if now >= self.start_time:
                try:
                    self.start()
                except OSError as error:  # no memory, say, or too many processes
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
                    logging.error(
                        "the server of %s cannot be started (%s); trying again in %d s",
                        *(self.address, error, LONGEST_PAUSE),
                    )
                    self.process, self.start_time = None, now + LONGEST_PAUSE
            return
        dead = not self.process.is_alive()  # asked first, so that no last message is lost
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                self.failure = self.pipe.recv()
                if self.failure is None:
                    self.has_served = True
                    logging.info("serving on %s", self.address)
        if not dead:
            seconds = self.seconds_silent()
            if seconds > PATIENCE * self.flags.stall_timeout_s:
                self.failure = f"the server of {self.address} was silent for {seconds:.0f} s"
                self.process.kill()
            return
        code = self.process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        cause = self.failure or f"the server of {self.address} ended, {how}"
        if not self.has_served:
            raise RuntimeError(cause)
        if now - self.start_time > 2 * LONGEST_PAUSE:
            self.pause = FIRST_PAUSE
        logging.error("%s; it is started anew in %d s", cause, self.pause)
        self.process, self.start_time = None, now + self.pause
        self.pause = min(2 * self.pause, LONGEST_PAUSE)

    def seconds_silent(self):
        """Return for how long the process, or the slowest of its streams, has been at one thing."""
        return time.monotonic() - min(filter(None, self.busy_since))

    def end(self, deadline):
        if self.process is not None:
            self.process.join(max(0, deadline - time.monotonic()))
            self.process.kill()
            self.process.join()
        if self.has_served:
            remove_socket(self.address)
        remove_temporary_folder(self.address)


def keep_serving(serve, flags, addresses):
    """Run the server processes until a signal or the end of standard input; return the status."""
    reader, writer = os.pipe()
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: os.write(writer, bytes([number])))
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
            servers.append(ServerProcess(serve, flags, address, number))
        while True:
            handles = [reader] + [0] * flags.end_with_stdin
            for server in servers:
                handles += server.handles()
            pauses = [s.start_time - time.monotonic() for s in servers if s.process is None]
            # A dead server's handles stay silent for as long as a child of its own holds them.
            ready = multiprocessing.connection.wait(handles, max(0, min([GRACE, *pauses])))
            if reader in ready:
                return 128 + os.read(reader, 1)[0]
            if 0 in ready and not os.read(0, 2**16):
                return 0
            for server in servers:
                server.check()
    finally:
        watchdog.close()
        for server in running():
            server.process.terminate()
        deadline = time.monotonic() + GRACE
        for server in servers:
            server.end(deadline)
