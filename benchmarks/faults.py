# SPDX-License-Identifier: Apache-2.0
"""Does training survive its faults, and does anything grow?

    python benchmarks/faults.py --program polybeast --minutes 45 --faults 520 --seed 1
    python benchmarks/faults.py --program monobeast --minutes 45 --faults 520
    python benchmarks/faults.py --faults 0 --minutes 120        memory alone: the soak

While a real run learns Pong, at random moments, at random targets, overlapping:

- servers or actors are killed (SIGKILL), stopped (SIGSTOP) and continued; so are the main processes
  of servers; these are also ended and started anew on the same address, as an init system would;
- connections are cut (RST) and made black holes: packets dropped in the kernel where this script
  may have a network namespace and tc, else by the proxy that stands before each server;
- environments raise, return NaN, another shape or dtype, and hang: in SIGSTOP, or reading a pipe;
- the learner is stopped, and nobody's memory may grow meanwhile.

At least one stream or actor is left alone at all times. All processes are sampled every 5 seconds
(memory.py). Exits with 1 unless: the learner never stands still for a minute, ends only when told
to and leaves nothing behind; every fault is named in a log, but for those that are over before
anybody could notice; the step rate comes back within 30 s of the last one; no broken row is learned
from (the learner is a fork that looks at each: faulty/); nothing grows. Prints Markdown.
"""

import argparse
import asyncio
import csv
import dataclasses
import heapq
import itertools
import math
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import memory  # noqa: E402
from faulty.network import Proxy, can_drop_packets, drop_packets, enter_namespaces  # noqa: E402

NUM_HOSTS, SERVERS_PER_HOST = 3, 2  # main processes of servers, and servers of each
NUM_ACTORS = 4
NUM_ENVS = 4  # of each stream or actor
SMALL = ["--env", "PongNoFrameskip-v4", "--batch_size", "8", "--total_steps", "1000000000"]
SAMPLE_INTERVAL = 5  # seconds
NAMED_WITHIN = 30  # seconds in which a log names a fault, once it can be seen
STANDSTILL = 60  # seconds in which the learner takes a step, whatever happens
SHUTDOWN = 10  # seconds
BACK_WITHIN = 30  # seconds after the last fault in which the step rate is back,
SHARE = 0.8  # so much of it
UNNOTICED_GROWTH = 8  # MB that a process may grow by while the learner is stopped

# How often each kind comes up.
WORKER_KINDS = {"kill": 12, "stop": 12, "raise": 7, "nan": 7, "shape": 7, "dtype": 7, "hang": 8}
WORKER_KINDS |= {"block": 8}
SERVER_KINDS = WORKER_KINDS | {"cut": 12, "hole": 12, "kill main": 5, "end main": 5, "stop main": 3}
SILENT = ("stop", "hang", "block", "hole")  # only the time that it lasts gives it away
ENDS_MAIN = ("kill main", "end main")
TITLES = {
    "kill": "server or actor killed (SIGKILL)",
    "stop": "server or actor stopped, later continued",
    "raise": "environment raises",
    "nan": "environment gives a NaN reward",
    "shape": "environment gives another shape",
    "dtype": "environment gives another dtype",
    "hang": "environment hangs: stops its process",
    "block": "environment hangs: reads a silent pipe",
    "cut": "connection cut (RST)",
    "hole": "packets dropped, both ways",
    "kill main": "servers' main process killed, started anew",
    "end main": "servers ended (SIGTERM), started anew",
    "stop main": "servers' main process stopped, later continued",
    "stop learner": "learner stopped, later continued",
}


@dataclasses.dataclass(eq=False)
class Worker:
    """An environment server, with the one stream to it, or an actor."""

    number: int  # of the stream or actor
    name: str  # that its environments have: the server's address, or "actor 1"
    pid_file: pathlib.Path
    host: "Host" = None
    proxy: Proxy = None
    connected: bool = True  # as far as the learner has told
    faults: set = dataclasses.field(default_factory=set)

    @property
    def pid(self):
        return int(self.pid_file.read_text()) if self.pid_file.exists() else None

    def is_healthy(self):
        return self.connected and not self.faults and state(self.pid) not in (None, *"TtZX")


@dataclasses.dataclass(eq=False)
class Host:
    """A main process of servers: what runs on one machine, started anew when it ends."""

    command: list
    workers: list = dataclasses.field(default_factory=list)
    process: subprocess.Popen = None
    start_time: float = 0  # when it is to be started
    faults: set = dataclasses.field(default_factory=set)


@dataclasses.dataclass(eq=False)
class Fault:
    number: int
    kind: str
    seconds: float  # for which its cause lasts
    pattern: str = None  # of the line that names it
    has_to_be_named: bool = True
    targets: list = ()  # workers and hosts that are not healthy meanwhile
    begin: float = None
    end: float = None  # when its cause was gone
    named: float = None
    undo: Callable = None


class Failure(Exception):
    """There is no point in going on."""


def state(pid):
    """Return the letter of a process's state; None if there is no such process."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def began(pid):
    """Return when a process was started, in seconds since the epoch."""
    try:
        return os.stat(f"/proc/{pid}").st_ctime
    except FileNotFoundError:
        return math.inf


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


class Log:
    """A log file that grows."""

    def __init__(self, path):
        self.path, self.file, self.rest = path, open(path, "ab+"), b""  # noqa: SIM115
        self.file.seek(0)

    def new_lines(self):
        *lines, self.rest = (self.rest + self.file.read()).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


class Campaign:
    def __init__(self, flags):
        self.flags = flags
        self.random = random.Random(flags.seed)
        self.poly = flags.program == "polybeast"
        self.folder = pathlib.Path(flags.folder or tempfile.mkdtemp(prefix="faults-")).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.environ = os.environ | {"FAULTS_FOLDER": str(self.folder)}
        self.patience = flags.patience
        self.longest = min(60, 6 * flags.minutes)  # seconds that a fault lasts
        self.stall_timeout = max(5, round(self.longest / 6))
        self.settling = min(BACK_WITHIN, 15 * flags.minutes)  # after the last fault
        self.drops_packets = self.poly and can_drop_packets()
        self.hosts, self.workers, self.logs = [], [], []
        self.faults, self.pending = [], []  # those that have begun; undoing, by time
        self.ticks = []  # time and step, as the learner logs them
        self.growth = []  # of processes while the learner was stopped, in MB
        self.recorder = memory.Recorder(self.folder / "memory.csv")
        self.next_sample = 0
        self.failures = []
        self.quiet = self.last = None  # before the faults; when the last one was over
        self.num_own_ends = 0  # of main processes of servers

    # ------------------------------------------------------------------ processes

    def __enter__(self):
        self.shared_memory = set(os.listdir("/dev/shm"))
        watched = ["--stall_timeout_s", self.stall_timeout]
        learner = ["--savedir", self.folder, "--xpid", "run", "--seed", self.flags.seed]
        learner += [*SMALL, *watched]
        if self.poly:
            self.start_servers(watched)
            addresses = ",".join(f"127.0.0.1:{w.proxy.port}" for w in self.workers)
            learner += ["--model", "shallow", "--envs_per_stream", NUM_ENVS]
            learner += ["--server_addresses", addresses]
        else:
            learner += ["--num_actors", NUM_ACTORS, "--envs_per_actor", NUM_ENVS]
            for i in range(NUM_ACTORS):
                name = f"actor {i}"
                self.workers.append(Worker(i, name, self.folder / f"{name}.pid"))
        script = ROOT / "benchmarks" / "faulty" / f"{self.flags.program[:4]}.py"
        self.learner = self.start([script, *learner], "learner.log")
        return self

    def __exit__(self, *_):
        while members := self.members():
            for pid in members:
                send(pid, signal.SIGKILL)
            for process in [self.learner, *(host.process for host in self.hosts)]:
                if process is not None:
                    process.poll()
            time.sleep(0.05)

    def start(self, words, log_name):
        path = self.folder / log_name
        if path not in [log.path for log in self.logs]:
            self.logs.append(Log(path))
        with open(path, "ab") as output:
            return subprocess.Popen(
                [sys.executable, *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # a Ctrl-C is for the campaign
                env=self.environ,
            )

    def start_servers(self, flags):
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        port = find_ports(NUM_HOSTS * SERVERS_PER_HOST)
        for i in range(NUM_HOSTS):
            script = ROOT / "benchmarks" / "faulty" / "environment.py"
            words = ["--server_address", f"127.0.0.1:{port}", "--num_servers", SERVERS_PER_HOST]
            host = Host([script, *words, *flags])
            for _ in range(SERVERS_PER_HOST):
                proxy = Proxy(port, loop)
                asyncio.run_coroutine_threadsafe(proxy.start(), loop).result()
                name = f"127.0.0.1:{port}"
                worker = Worker(len(self.workers), name, self.folder / f"{name}.pid", host, proxy)
                self.workers.append(worker)
                host.workers.append(worker)
                port += 1
            self.hosts.append(host)
            host.process = self.start(host.command, f"servers{i}.log")

    def members(self):
        """Return the processes that come from here, zombies apart."""
        mark, members = f"FAULTS_FOLDER={self.folder}".encode(), []
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    members.append(int(path.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return members

    def kinds_of_processes(self):
        kinds = {self.learner.pid: "learner"}
        kinds |= {host.process.pid: "servers' main" for host in self.hosts if host.process}
        what = "server" if self.poly else "actor"
        kinds |= {worker.pid: what for worker in self.workers if state(worker.pid)}
        return {pid: kinds.get(pid, "helper of Python's") for pid in self.members()}

    # ------------------------------------------------------------------ what goes on

    def tick(self):
        """Look after everything; to be called all the time."""
        time.sleep(0.05)
        now = time.time()
        for log in self.logs:
            for line in log.new_lines():
                self.hear(line, now)
        if self.learner.poll() is not None:
            raise Failure(f"the learner ended with status {self.learner.returncode}")
        if self.ticks and not self.is_learner_stopped():
            if (
                now
                > max(self.ticks[-1][0], self.last_stop_of_learner())
                + 3 * self.patience * STANDSTILL
            ):
                raise Failure(f"the learner stands still at step {self.ticks[-1][1]:,}")
        for i, host in enumerate(self.hosts):
            if host.process is not None and host.process.poll() is not None:
                # It ends by itself where a stopped server still has its address.
                self.num_own_ends += not any(f.kind in ENDS_MAIN for f in host.faults)
                host.process, host.start_time = None, now + 1  # as init systems do
            if host.process is None and now >= host.start_time:
                host.process = self.start(host.command, f"servers{i}.log")
        while self.pending and self.pending[0][0] <= now:
            fault = heapq.heappop(self.pending)[-1]
            fault.undo()
            fault.end = now
        for fault in self.faults:
            self.follow(fault, now)
        if now >= self.next_sample:
            self.next_sample = now + SAMPLE_INTERVAL
            self.recorder.sample(now - self.start_time, self.kinds_of_processes())

    def hear(self, line, now):
        if match := re.search(r"\| ([\d,]+) steps \|", line):
            step = int(match[1].replace(",", ""))
            if not self.ticks or step > self.ticks[-1][1]:
                self.ticks.append((now, step))
        if match := re.search(
            r" stream (\d+): (?:the|no|refused: the) environment server at", line
        ):
            self.workers[int(match[1])].connected = line.endswith(" is back")
        for fault in self.faults:
            if fault.targets and fault.named is None and re.search(fault.pattern, line):
                fault.named = now

    def follow(self, fault, now):
        """See how far a fault has come."""
        if fault.begin is None:  # it is an environment's, which has not seen it yet
            taken = self.folder / f"{fault.number}.taken"
            if not taken.exists():
                return
            fault.begin = taken.stat().st_mtime
            pid = int(taken.read_text())
            if fault.kind == "hang":
                self.undo_later(fault, lambda: send(pid, signal.SIGCONT))
            elif fault.kind == "block":
                self.undo_later(fault, lambda: self.unblock(fault))
            else:
                fault.end = now
        if fault.end is None or not fault.targets:
            return
        if (
            fault.named
            or not fault.has_to_be_named
            or now > fault.end + self.patience * NAMED_WITHIN
        ):
            for target in fault.targets:
                target.faults.discard(fault)
            fault.targets = ()

    def undo_later(self, fault, undo):
        fault.undo = undo
        heapq.heappush(self.pending, (time.time() + fault.seconds, fault.number, fault))

    def unblock(self, fault):
        try:
            os.close(os.open(self.folder / f"{fault.number}.pipe", os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            pass  # nobody reads any more: the process has been ended

    def is_learner_stopped(self):
        return any(f.kind == "stop learner" and f.end is None for f in self.faults)

    def last_stop_of_learner(self):
        return max((f.end or 0 for f in self.faults if f.kind == "stop learner"), default=0)

    def run_until(self, condition, seconds, what):
        deadline = time.time() + self.patience * seconds
        while not condition():
            if time.time() > deadline:
                raise Failure(f"waited {self.patience * seconds:.0f} s in vain for {what}")
            self.tick()

    # ------------------------------------------------------------------ faults

    def inject(self, fault):
        """Begin a fault if a target can be found for it; say whether that was so."""
        healthy = {w for w in self.workers if w.is_healthy()}
        if fault.kind == "stop learner":
            if any(f.targets for f in self.faults) or len(healthy) < len(self.workers):
                return False
            fault.targets = list(self.workers)
        elif fault.kind.endswith(" main"):
            hosts = [h for h in self.hosts if not h.faults and h.process]
            hosts = [h for h in hosts if 0 < len(healthy - set(h.workers)) < len(healthy)]
            if not hosts:
                return False
            host = self.random.choice(hosts)
            fault.targets = [host] if fault.kind == "stop main" else [host, *host.workers]
        else:
            if len(healthy) < 2:
                return False
            fault.targets = [self.random.choice(sorted(healthy, key=lambda w: w.number))]
        for target in fault.targets:
            target.faults.add(fault)
        fault.pattern = self.pattern(fault)
        if fault.kind in SILENT:
            fault.has_to_be_named = fault.seconds > 1.25 * self.stall_timeout + 3
        self.faults.append(fault)
        fault.begin = time.time()
        getattr(self, f"do_{fault.kind.replace(' ', '_')}", self.do_in_environment)(fault)
        if fault.begin and not fault.undo:
            fault.end = fault.begin
        return True

    def do_kill(self, fault):
        send(fault.targets[0].pid, signal.SIGKILL)

    def do_stop(self, fault):
        self.stop(fault, fault.targets[0].pid)

    def stop(self, fault, pid):
        send(pid, signal.SIGSTOP)
        self.undo_later(fault, lambda: send(pid, signal.SIGCONT))

    def do_cut(self, fault):
        fault.targets[0].proxy.cut()

    def do_hole(self, fault):
        proxy = fault.targets[0].proxy
        if self.drops_packets:  # between learner and proxy, or between proxy and server
            port = self.random.choice([proxy.port, proxy.server_port])
            self.undo_later(fault, drop_packets(port, fault.number))
        else:
            self.undo_later(fault, proxy.hold())

    def do_kill_main(self, fault):
        fault.targets[0].process.kill()

    def do_end_main(self, fault):
        fault.targets[0].process.terminate()

    def do_stop_main(self, fault):
        fault.has_to_be_named = False  # its servers do not need it
        self.stop(fault, fault.targets[0].process.pid)

    def do_stop_learner(self, fault):
        # What has just been started still grows, whatever the learner does.
        pids = [
            pid
            for pid in self.members()
            if pid != self.learner.pid and began(pid) < time.time() - 20
        ]
        before = {pid: memory.read_process(pid) for pid in pids}
        send(self.learner.pid, signal.SIGSTOP)

        def undo():
            for pid, figures in before.items():
                after = memory.read_process(pid)
                if figures and after:
                    self.growth.append(after["own_mb"] - figures["own_mb"])
            send(self.learner.pid, signal.SIGCONT)

        # Servers give a silent learner up after 20 s.
        fault.has_to_be_named = self.poly and fault.seconds > 30
        self.undo_later(fault, undo)

    def do_in_environment(self, fault):
        fault.begin = None  # until an environment has seen it
        if fault.kind == "block":
            os.mkfifo(self.folder / f"{fault.number}.pipe")
        command = self.folder / f"{fault.targets[0].name}.{self.random.randrange(NUM_ENVS)}"
        command.with_name("command").write_text(f"{fault.number} {fault.kind}")
        command.with_name("command").rename(command)

    def pattern(self, fault):
        """Return what a line of a log has to say to name the fault and its target."""
        workers = [target for target in fault.targets if isinstance(target, Worker)]
        numbers = "|".join(str(w.number) for w in workers)
        name = re.escape(workers[0].name) if workers else None
        lost = rf" stream ({numbers}): the environment server at \S+ was lost"
        if fault.kind in SILENT and self.poly:
            away = rf" stream {numbers}: (no environment|the environment server at \S+ hangs)"
            return rf" (stream {numbers}|the server of {name}) has been silent|{lost}|{away}"
        if fault.kind in SILENT:
            return rf" actor {numbers} has been silent| Actor {numbers} died"
        return {
            "kill": rf"{name} ended, killed by SIGKILL|{lost}"
            if self.poly
            else rf"Actor {numbers} died.*killed by SIGKILL",
            "raise": rf"\bfault {fault.number}\b",
            "nan": rf"{name}\b.*: the reward is nan",
            "shape": rf"{name}\b.*: observation is uint8\[4, 84, 83\]",
            "dtype": rf"{name}\b.*: observation is float32\[4, 84, 84\]",
        }.get(fault.kind, lost)

    def plan(self, begin, end):
        """Return moments and faults, in order."""
        kinds = SERVER_KINDS if self.poly else WORKER_KINDS
        count = self.flags.faults
        num_stops = min(count, 1 if self.flags.minutes < 10 else 3)
        chosen = self.random.choices(list(kinds), kinds.values(), k=count - num_stops)
        moments = sorted(self.random.uniform(begin, end) for _ in chosen)
        spaced = [begin + (end - begin) * (i + 0.5) / num_stops for i in range(num_stops)]
        plan = list(zip(moments, chosen, strict=True))
        plan = sorted(plan + [(moment, "stop learner") for moment in spaced])
        for number, (moment, kind) in enumerate(plan, 1):
            seconds = math.exp(self.random.uniform(math.log(1), math.log(self.longest)))
            yield moment, Fault(number, kind, self.longest if "learner" in kind else seconds)

    # ------------------------------------------------------------------ the whole of it

    def run(self):
        self.start_time = time.time()
        self.run_until(lambda: len(self.ticks) > 1, 180, "the first steps")
        self.run_until(lambda: all(w.is_healthy() for w in self.workers), 60, "all workers")
        begin = time.time()
        end = begin + 60 * self.flags.minutes
        plan = []
        self.quiet = (begin, end)
        if self.flags.faults:
            self.quiet = (begin, begin + min(60, (end - begin) / 5))
            end -= 1.5 * self.settling  # in which the rate is looked at
            plan = list(self.plan(self.quiet[1], end))
        while plan or time.time() < end:
            if time.time() > end + self.patience * (0.5 * (end - begin) + 120):
                raise Failure(f"only {len(self.faults)} faults of {self.flags.faults} could begin")
            due = [fault for moment, fault in plan if moment <= time.time()]
            for fault in due:
                if self.inject(fault):
                    plan = [entry for entry in plan if entry[1] is not fault]
                elif fault.kind == "stop learner":
                    break  # for which all else has to be over
            self.tick()
        self.run_until(lambda: not any(f.targets for f in self.faults), 120, "the last faults")
        self.last = max((fault.end for fault in self.faults), default=end)
        while self.faults and time.time() < self.last + 1.5 * self.settling:
            self.tick()

    def shut_down(self):
        """End everything, and see that nothing is left."""
        statuses = {}
        for name, process, number in [
            ("the learner", self.learner, signal.SIGINT),
            *((f"servers {i}", host.process, signal.SIGTERM) for i, host in enumerate(self.hosts)),
        ]:
            if process is None:
                continue
            process.send_signal(number)
            try:
                status = process.wait(self.patience * SHUTDOWN)
                self.check(status == 128 + number, f"{name}: status {status} upon {number.name}")
            except subprocess.TimeoutExpired:
                self.check(
                    False,
                    f"{name}: still there {self.patience * SHUTDOWN:.0f} s after {number.name}",
                )
            statuses[name] = process.returncode
        deadline = time.time() + self.patience * SHUTDOWN
        while (members := self.members()) and time.time() < deadline:
            time.sleep(0.1)
        self.check(not members, f"processes left: {sorted(members)}")
        left = set(os.listdir("/dev/shm")) - self.shared_memory
        self.check(not left, f"shared memory left: {sorted(left)}")
        for worker in self.workers:
            if worker.proxy is not None:
                with socket.socket() as probe:
                    code = probe.connect_ex(("127.0.0.1", worker.proxy.server_port))
                self.check(code != 0, f"somebody listens at {worker.name} still")
        print(f"- Ends: {statuses}")

    def check(self, holds, text):
        if not holds:
            self.failures.append(text)

    # ------------------------------------------------------------------ what is told

    def judge(self):
        """Print tables and figures; note what is not as it should be."""
        with open(self.folder / "run" / "logs.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        times = [float(row["_time"]) for row in rows]
        steps = [int(row["step"]) for row in rows]
        self.judge_standstill(times, steps)
        if self.last is not None:
            self.judge_rate(times, steps)
        for row in rows:
            for key, value in row.items():
                self.check(not value or math.isfinite(float(value)), f"logs.csv: {key} is {value}")
            mean_return = float(row["mean_episode_return"] or 0)
            self.check(abs(mean_return) <= 21, f"logs.csv: mean_episode_return is {mean_return}")
        if self.faults:
            self.judge_faults()
        if self.growth:
            most = max(self.growth)
            print(f"- While the learner was stopped, no process grew by more than {most:.1f} MB")
            self.check(most <= UNNOTICED_GROWTH, f"{most:.1f} MB grown while the learner stopped")
        print()
        self.failures += memory.judge(self.recorder.rows)
        memory.draw(self.recorder.rows, self.folder / "memory.png")

    def judge_standstill(self, times, steps):
        stops = [f for f in self.faults if f.kind == "stop learner"]
        longest, since = 0, times[0]
        for i in range(1, len(times)):
            stopped = sum(max(0, min(times[i], f.end) - max(since, f.begin)) for f in stops)
            longest = max(longest, times[i] - since - stopped)
            if steps[i] > steps[i - 1]:
                since = times[i]
        print(f"- Steps: {steps[-1]:,}; longest time without one: {longest:.0f} s")
        self.check(
            longest <= self.patience * STANDSTILL, f"the learner stood still for {longest:.0f} s"
        )

    def judge_rate(self, times, steps):
        def rates(begin, end):
            ticks = [(t, s) for t, s in zip(times, steps, strict=True) if begin <= t <= end]
            return [(t, (s - r) / (t - u)) for (u, r), (t, s) in itertools.pairwise(ticks)]

        def median(rates):
            return statistics.median([rate for _, rate in rates] or [0.0])

        before, seconds = median(rates(*self.quiet)), self.quiet[1] - self.quiet[0]
        print(f"- Steps a second in {seconds:.0f} s without faults: median {before:,.0f}")
        if not self.faults:
            return
        enough, after = SHARE / self.patience * before, rates(self.last, math.inf)
        back = next((t - self.last for t, rate in after if rate >= enough), math.inf)
        settled = median(rates(self.last + self.settling, math.inf))
        print(f"- Meanwhile: median {median(rates(self.quiet[1], self.last)):,.0f}")
        print(
            f"- After the last fault: {enough:,.0f} within {back:.0f} s; from "
            f"{self.settling:.0f} s on, median {settled:,.0f}"
        )
        soon = self.patience * BACK_WITHIN
        self.check(back <= soon, f"the rate was not back {soon:.0f} s after the last fault")
        self.check(settled >= enough, f"the rate after all faults is {settled:,.0f}")

    def judge_faults(self):
        named = sum(fault.named is not None for fault in self.faults)
        how = "tc" if self.drops_packets else "the proxy"
        print(f"- Faults: {len(self.faults)}, {named} of them named in a log; dropped by {how}")
        print(f"- Main processes of servers that ended by themselves: {self.num_own_ends}\n")
        columns = ["fault", "number", "named", "over before it could be noticed", "not named"]
        columns += ["s until named, median", "most"]
        print("|", " | ".join(columns), "|\n" + "|---" * len(columns) + "|")
        for kind, title in TITLES.items():
            faults = [fault for fault in self.faults if fault.kind == kind]
            missing = [f for f in faults if f.named is None and f.has_to_be_named]
            delays = [f.named - f.begin for f in faults if f.named is not None]
            counts = [len(faults), len(delays), len(faults) - len(delays) - len(missing)]
            cells = [title, *map(str, counts), str(len(missing))]
            figures = (statistics.median, max) if delays else ()
            cells += [f"{figure(delays):.1f}" for figure in figures] or ["-", "-"]
            if faults:
                print("|", " | ".join(cells), "|")
            for fault in missing:
                at = time.strftime("%X", time.localtime(fault.begin))
                text = f"{kind}, {fault.seconds:.0f} s, at {at}: no {fault.pattern}"
                self.check(False, f"fault {fault.number} is not named: {text}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--program", choices=["polybeast", "monobeast"], default="polybeast")
    add("--minutes", type=float, default=45, help="from the first step on (default: 45)")
    add("--faults", type=int, default=520, help="(default: 520)")
    add("--seed", type=int, default=1, help="of moments, kinds and targets (default: 1)")
    add("--patience", type=float, default=1, help="times as long, and as slow, as it should be, "
        "may everything be: for a busy machine (default: 1)")  # fmt: skip
    add("--folder", help="for logs, memory.csv and memory.png; by default a temporary one")
    add("--results", help="copy the last two there: a path without its suffix")
    flags = parser.parse_args()
    enter_namespaces()

    with Campaign(flags) as campaign:
        print(f"- Logs: {campaign.folder}", flush=True)
        try:
            campaign.run()
            campaign.shut_down()
        except Failure as failure:
            campaign.failures.append(str(failure))
            print(*(campaign.folder / "learner.log").read_text().splitlines()[-30:], sep="\n")
        if campaign.quiet is not None:
            campaign.judge()
    if flags.results and campaign.quiet is not None:
        for suffix in (".csv", ".png"):
            shutil.copy(campaign.folder / f"memory{suffix}", f"{flags.results}{suffix}")
    print()
    print("\n".join(f"FAILED: {text}" for text in campaign.failures) or "All is well.")
    return bool(campaign.failures)


if __name__ == "__main__":
    sys.exit(main())
