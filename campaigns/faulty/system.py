# SPDX-License-Identifier: Apache-2.0
"""What a fault campaign runs: a learner with its actors, or with servers behind proxies."""

import asyncio
import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

from faulty.network import Proxy

SCRIPTS = pathlib.Path(__file__).parent
NUM_HOSTS, SERVERS_PER_HOST = 3, 2  # main processes of servers, and servers of each
NUM_ACTORS = 4
NUM_ENVS = 4  # of each stream or actor
SMALL = "--env PongNoFrameskip-v4 --batch_size 8 --total_steps 1000000000".split()
SHUTDOWN = 10  # seconds in which everything ends
RESTART_PAUSE = 1  # seconds after which a host is restarted, as by an init system


class Failure(Exception):
    """The campaign cannot go on."""


@dataclasses.dataclass(eq=False)
class Worker:
    """An actor, or an environment server with the one stream to it."""

    number: int  # of the actor or stream
    name: str  # of its environments: "actor 1", or the server's address
    pid_file: pathlib.Path
    host: "Host" = None
    proxy: Proxy = None
    connected: bool = True  # by the learner's log
    faults: set = dataclasses.field(default_factory=set)

    @property
    def pid(self):
        return int(self.pid_file.read_text()) if self.pid_file.exists() else None

    def is_healthy(self):
        return self.connected and not self.faults and state(self.pid) not in (None, *"TtZX")


@dataclasses.dataclass(eq=False)
class Host:
    """A main process of servers, which stands for a machine; restarted when it ends."""

    command: list
    workers: list = dataclasses.field(default_factory=list)
    process: subprocess.Popen = None
    start_time: float = 0  # when it is to be restarted
    faults: set = dataclasses.field(default_factory=set)


class Log:
    """A log file that grows."""

    def __init__(self, path):
        self._file, self._rest = open(path, "rb"), b""

    def new_lines(self):
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


def state(pid):
    """Return the letter of a process's state; None if there is no such process."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def send(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def find_ports(count):
    """Return the first of so many free ports, below those that the kernel gives out."""
    for first in range(20_000, 30_000, count):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
            return first
        except OSError:
            continue
    raise Failure("no free ports")


class System:
    """All processes of a campaign; use as a context manager, which kills what is left of them.

    Args:
      program: polybeast or monobeast.
      folder: of logs and of the run.
      learner_flags: a list of arguments.
      stall_timeout: seconds, of learner and servers.

    Attributes: `learner`, a Popen; `hosts` and `workers`; `num_own_ends`, of main processes of
    servers that ended without a fault of their own.
    """

    def __init__(self, program, folder, learner_flags, stall_timeout):
        self.poly = program == "polybeast"
        self.folder = folder
        self.hosts, self.workers = [], []
        self.learner, self.num_own_ends = None, 0
        self._environ = os.environ | {"FAULTS_FOLDER": str(folder)}
        self._logs = {}
        self._shared_memory = set(os.listdir("/dev/shm"))
        watched = ["--stall_timeout_s", stall_timeout]
        flags = ["--savedir", folder, "--xpid", "run", *SMALL, *watched, *learner_flags]
        if self.poly:
            self._create_servers(watched)
            addresses = ",".join(f"127.0.0.1:{w.proxy.port}" for w in self.workers)
            flags += ["--model", "shallow", "--envs_per_stream", NUM_ENVS]
            flags += ["--server_addresses", addresses]
        else:
            flags += ["--num_actors", NUM_ACTORS, "--envs_per_actor", NUM_ENVS]
            names = [f"actor {i}" for i in range(NUM_ACTORS)]
            self.workers = [Worker(i, n, folder / f"{n}.pid") for i, n in enumerate(names)]
        self._command = [SCRIPTS / "learner.py", program, *flags]

    def __enter__(self):
        for i in range(len(self.hosts)):
            self._start_host(i)
        self.learner = self._start(self._command, "learner.log")
        return self

    def __exit__(self, *_):
        while members := self.members():
            for pid in members:
                send(pid, signal.SIGKILL)
            for process in filter(None, [self.learner, *(host.process for host in self.hosts)]):
                process.poll()
            time.sleep(0.05)

    def _create_servers(self, flags):
        loop = asyncio.new_event_loop()  # of the proxies
        threading.Thread(target=loop.run_forever, daemon=True).start()
        port = find_ports(NUM_HOSTS * SERVERS_PER_HOST)
        for _ in range(NUM_HOSTS):
            address = ["--server_address", f"127.0.0.1:{port}", "--num_servers", SERVERS_PER_HOST]
            host = Host([SCRIPTS / "environment.py", *address, *flags])
            self.hosts.append(host)
            for _ in range(SERVERS_PER_HOST):
                proxy = Proxy(port, loop)
                asyncio.run_coroutine_threadsafe(proxy.start(), loop).result()
                name = f"127.0.0.1:{port}"
                pid_file = self.folder / f"{name}.pid"
                host.workers.append(Worker(len(self.workers), name, pid_file, host, proxy))
                self.workers.append(host.workers[-1])
                port += 1

    def _start(self, arguments, log_name):
        path = self.folder / log_name
        with open(path, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, *map(str, arguments), "--end_with_stdin"],
                stdin=subprocess.PIPE,  # so that it ends with a campaign that is killed
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C is for the campaign
                env=self._environ,
            )
        if path not in self._logs:
            self._logs[path] = Log(path)
        return process

    def _start_host(self, i):
        self.hosts[i].process = self._start(self.hosts[i].command, f"servers{i}.log")

    def restart_hosts(self, ending):
        """Restart main processes of servers; `ending` are the kinds of faults that end one."""
        for i, host in enumerate(self.hosts):
            if host.process is not None and host.process.poll() is not None:
                # It ends by itself where a stopped server still has its address.
                self.num_own_ends += not any(fault.kind in ending for fault in host.faults)
                host.process, host.start_time = None, time.time() + RESTART_PAUSE
            if host.process is None and time.time() >= host.start_time:
                self._start_host(i)

    def new_log_lines(self):
        return [line for log in self._logs.values() for line in log.new_lines()]

    def members(self):
        """Return the ids of all processes of the campaign, zombies apart."""
        mark, members = f"FAULTS_FOLDER={self.folder}".encode(), []
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    members.append(int(path.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return members

    def kinds_of_processes(self):
        """Return what each process is, by id."""
        kinds = {self.learner.pid: "learner"}
        kinds |= {host.process.pid: "servers' main" for host in self.hosts if host.process}
        what = "server" if self.poly else "actor"
        kinds |= {worker.pid: what for worker in self.workers if state(worker.pid)}
        return {pid: kinds.get(pid, "helper of Python's") for pid in self.members()}

    def shut_down(self, patience):
        """End everything by signals; return what went wrong, as texts."""
        failures, limit = [], patience * SHUTDOWN
        ends = [("the learner", self.learner, signal.SIGINT)]
        ends += [(f"servers {i}", h.process, signal.SIGTERM) for i, h in enumerate(self.hosts)]
        for name, process, number in ends:
            if process is None:
                continue
            process.send_signal(number)
            try:
                status = process.wait(limit)
                if status != 128 + number:
                    failures.append(f"{name}: status {status} after {number.name}")
            except subprocess.TimeoutExpired:
                failures.append(f"{name}: still running {limit:.0f} s after {number.name}")
        deadline = time.time() + limit
        while (members := self.members()) and time.time() < deadline:
            time.sleep(0.1)
        if members:
            failures.append(f"processes left: {sorted(members)}")
        if left := set(os.listdir("/dev/shm")) - self._shared_memory:
            failures.append(f"shared memory left: {sorted(left)}")
        for worker in self.workers:
            if worker.proxy is not None:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", worker.proxy.server_port)) == 0:
                        failures.append(f"a process still listens at {worker.name}")
        return failures
