# SPDX-License-Identifier: Apache-2.0
"""Does training survive faults, and does anything grow?

    python campaigns/faults.py --program polybeast --minutes 45 --faults 520 --seed 1
    python campaigns/faults.py --program monobeast --minutes 45 --faults 520
    python campaigns/faults.py --faults 0 --minutes 120        memory alone: the soak

While a real run learns Pong, at random times, with random targets, overlapping:

- servers or actors are killed (SIGKILL), or stopped (SIGSTOP) and continued; so are main processes
  of servers; these are also ended and restarted on the same address, as by an init system;
- connections are cut (RST), or all their packets dropped: in the kernel where this script may have
  a network namespace and tc, else by the proxy in front of each server;
- environments raise, return NaN, another shape or dtype, and hang: in SIGSTOP, or reading a pipe;
- the learner is stopped, and no process may grow meanwhile.

At least one stream or actor is left alone at all times. All processes are sampled every 5 seconds
(memory.py). The status is 1 unless: the learner never stands still for a minute, ends only when
told to and leaves nothing behind; every fault is named in a log, except those that are over before
they can be noticed; the step rate is back 30 s after the last one; no broken row is learned from
(the learner is a fork that checks each: faulty/); nothing grows. Prints Markdown.
"""

import argparse
import dataclasses
import heapq
import math
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable

import memory
from faulty.network import can_drop_packets, drop_packets, enter_namespaces
from faulty.system import NUM_ENVS, Failure, System, Worker, send
from faulty.verdict import BACK_WITHIN, STANDSTILL, Verdict

SAMPLE_INTERVAL = 5  # seconds
NAMED_WITHIN = 30  # seconds in which a log names a fault, once it can be noticed

# How often each kind comes up.
WORKER_KINDS = {"kill": 12, "stop": 12, "raise": 7, "nan": 7, "shape": 7, "dtype": 7, "hang": 8}
WORKER_KINDS |= {"block": 8}
SERVER_KINDS = WORKER_KINDS | {"cut": 12, "hole": 12, "kill main": 5, "end main": 5, "stop main": 3}
SILENT = ("stop", "hang", "block", "hole")  # noticed only by how long they last
ENDS_MAIN = ("kill main", "end main")


@dataclasses.dataclass(eq=False)
class Fault:
    number: int
    kind: str
    seconds: float  # for which its cause lasts
    pattern: str = None  # of the log line that names it
    has_to_be_named: bool = True
    targets: list = ()  # workers and hosts that are not healthy meanwhile
    begin: float = None
    end: float = None  # of its cause
    named: float = None
    undo: Callable = None


class Campaign:
    """Injects faults into a System and watches it.

    Attributes:
      faults: those that have begun.
      growth: MB of processes while the learner was stopped.
      quiet: begin and end of the time before the faults.
      last: when the last fault was over.
      settling: seconds after that in which the step rate comes back.
    """

    def __init__(self, flags, system, longest, stall_timeout):
        self.flags, self.system = flags, system
        self.longest, self.stall_timeout = longest, stall_timeout
        self.settling = min(BACK_WITHIN, 15 * flags.minutes)
        self.drops_packets = system.poly and can_drop_packets()
        self.faults, self.growth = [], []
        self.quiet = self.last = None
        self.recorder = memory.Recorder(system.folder / "memory.csv")
        self._random = random.Random(flags.seed)
        self._pending = []  # faults that are to be undone, by time
        self._ticks = []  # time and step, from the learner's log
        self._next_sample = 0

    def run(self):
        self._start_time = time.time()
        self._run_until(lambda: len(self._ticks) > 1, 180, "the first steps")
        workers = self.system.workers
        self._run_until(lambda: all(w.is_healthy() for w in workers), 60, "all workers")
        begin = time.time()
        end = begin + 60 * self.flags.minutes
        plan = []
        self.quiet = (begin, end)
        if self.flags.faults:
            self.quiet = (begin, begin + min(60, (end - begin) / 5))
            end -= 1.5 * self.settling
            plan = list(self._plan(self.quiet[1], end))
        while plan or time.time() < end:
            if time.time() > end + self.flags.patience * (0.5 * (end - begin) + 120):
                raise Failure(f"only {len(self.faults)} faults of {self.flags.faults} could begin")
            for fault in [fault for moment, fault in plan if moment <= time.time()]:
                if self._inject(fault):
                    plan = [entry for entry in plan if entry[1] is not fault]
                elif fault.kind == "stop learner":
                    break  # which waits until all others are over
            self._tick()
        self._run_until(lambda: not any(f.targets for f in self.faults), 120, "the last faults")
        self.last = max((fault.end for fault in self.faults), default=end)
        while self.faults and time.time() < self.last + 1.5 * self.settling:
            self._tick()
        settled = self.last + self.settling
        if self.faults:  # a rate takes two ticks, which a busy machine may not have had yet
            self._run_until(lambda: sum(t >= settled for t, _ in self._ticks) > 1, 60, "steps then")

    def _plan(self, begin, end):
        """Yield times and faults, in order."""
        kinds = SERVER_KINDS if self.system.poly else WORKER_KINDS
        count = self.flags.faults
        num_stops = min(count, 1 if self.flags.minutes < 10 else 3)
        chosen = self._random.choices(list(kinds), kinds.values(), k=count - num_stops)
        plan = [(self._random.uniform(begin, end), kind) for kind in chosen]
        spaced = [begin + (end - begin) * (i + 0.5) / num_stops for i in range(num_stops)]
        plan = sorted(plan + [(moment, "stop learner") for moment in spaced])
        for number, (moment, kind) in enumerate(plan, 1):
            seconds = math.exp(self._random.uniform(math.log(1), math.log(self.longest)))
            yield moment, Fault(number, kind, self.longest if "learner" in kind else seconds)

    def _run_until(self, condition, seconds, what):
        deadline = time.time() + self.flags.patience * seconds
        while not condition():
            if time.time() > deadline:
                raise Failure(f"waited {self.flags.patience * seconds:.0f} s for {what}")
            self._tick()

    # ------------------------------------------------------------------ watching

    def _tick(self):
        time.sleep(0.05)
        now = time.time()
        for line in self.system.new_log_lines():
            self._read_line(line, now)
        if self.system.learner.poll() is not None:
            raise Failure(f"the learner ended with status {self.system.learner.returncode}")
        self._check_standstill(now)
        self.system.restart_hosts(ENDS_MAIN)
        while self._pending and self._pending[0][0] <= now:
            fault = heapq.heappop(self._pending)[-1]
            fault.undo()
            fault.end = now
        for fault in self.faults:
            self._follow(fault, now)
        if now >= self._next_sample:
            self._next_sample = now + SAMPLE_INTERVAL
            self.recorder.sample(now - self._start_time, self.system.kinds_of_processes())

    def _read_line(self, line, now):
        if match := re.search(r"\| ([\d,]+) steps \|", line):
            step = int(match[1].replace(",", ""))
            if not self._ticks or step > self._ticks[-1][1]:
                self._ticks.append((now, step))
        if re.search(r"\| actors (\d+)/\1 \|", line):
            for worker in self.system.workers:  # one that was lost at first is never "back"
                worker.connected = True
        event = r" stream (\d+): (?:the|no|refused: the) environment server at"
        if match := re.search(event, line):
            self.system.workers[int(match[1])].connected = " is back" in line
        for fault in self.faults:
            if fault.targets and fault.named is None and re.search(fault.pattern, line):
                fault.named = now

    def _check_standstill(self, now):
        """End a campaign whose learner will not go on; shorter standstills are judged later."""
        stops = [f for f in self.faults if f.kind == "stop learner"]
        if self._ticks and all(f.end for f in stops):
            since = max([self._ticks[-1][0], *(f.end for f in stops)])
            if now > since + 3 * self.flags.patience * STANDSTILL:
                raise Failure(f"the learner stands still at step {self._ticks[-1][1]:,}")

    def _follow(self, fault, now):
        """See whether an environment has met the fault, and whether its targets are free again."""
        if fault.begin is None:
            taken = self.system.folder / f"{fault.number}.taken"
            if not taken.exists():
                return
            fault.begin = taken.stat().st_mtime
            pid = int(taken.read_text())
            if fault.kind == "hang":
                self._undo_later(fault, lambda: send(pid, signal.SIGCONT))
            elif fault.kind == "block":
                self._undo_later(fault, lambda: self._unblock(fault))
            else:
                fault.end = now
        if fault.end is None or not fault.targets:
            return
        late = now > fault.end + self.flags.patience * NAMED_WITHIN
        if fault.named or not fault.has_to_be_named or late:
            for target in fault.targets:
                target.faults.discard(fault)
            fault.targets = ()

    def _undo_later(self, fault, undo):
        fault.undo = undo
        heapq.heappush(self._pending, (time.time() + fault.seconds, fault.number, fault))

    def _unblock(self, fault):
        try:
            path = self.system.folder / f"{fault.number}.pipe"
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            pass  # its reader has been ended

    # ------------------------------------------------------------------ faults

    def _inject(self, fault):
        """Begin a fault; return False where no target can be found for it now."""
        fault.targets = self._choose_targets(fault.kind)
        if not fault.targets:
            return False
        for target in fault.targets:
            target.faults.add(fault)
        fault.pattern = self._pattern(fault)
        if fault.kind in SILENT:
            fault.has_to_be_named = fault.seconds > 1.25 * self.stall_timeout + 3
        self.faults.append(fault)
        fault.begin = time.time()
        getattr(self, f"_{fault.kind.replace(' ', '_')}", self._command_environment)(fault)
        if fault.begin and not fault.undo:
            fault.end = fault.begin
        return True

    def _choose_targets(self, kind):
        workers = self.system.workers
        healthy = {worker for worker in workers if worker.is_healthy()}
        if kind == "stop learner":
            is_quiet = len(healthy) == len(workers) and not any(f.targets for f in self.faults)
            return list(workers) if is_quiet else ()
        if kind.endswith(" main"):
            hosts = [h for h in self.system.hosts if not h.faults and h.process]
            hosts = [h for h in hosts if 0 < len(healthy - set(h.workers)) < len(healthy)]
            if not hosts:
                return ()
            host = self._random.choice(hosts)
            return [host] if kind == "stop main" else [host, *host.workers]
        if len(healthy) < 2:
            return ()
        return [self._random.choice(sorted(healthy, key=lambda worker: worker.number))]

    def _kill(self, fault):
        send(fault.targets[0].pid, signal.SIGKILL)

    def _stop(self, fault, pid=None):
        pid = pid or fault.targets[0].pid
        send(pid, signal.SIGSTOP)
        self._undo_later(fault, lambda: send(pid, signal.SIGCONT))

    def _cut(self, fault):
        fault.targets[0].proxy.cut()

    def _hole(self, fault):
        proxy = fault.targets[0].proxy
        if self.drops_packets:  # between learner and proxy, or between proxy and server
            port = self._random.choice([proxy.port, proxy.server_port])
            self._undo_later(fault, drop_packets(port, fault.number))
        else:
            self._undo_later(fault, proxy.hold())

    def _kill_main(self, fault):
        fault.targets[0].process.kill()

    def _end_main(self, fault):
        fault.targets[0].process.terminate()

    def _stop_main(self, fault):
        fault.has_to_be_named = False  # its servers do not need it
        self._stop(fault, fault.targets[0].process.pid)

    def _stop_learner(self, fault):
        learner, before = self.system.learner.pid, {}
        for pid in self.system.members():
            sample = memory.read_process(pid)
            # A process that has just been started still grows.
            if pid != learner and sample and os.stat(f"/proc/{pid}").st_ctime < time.time() - 20:
                before[pid] = sample
        send(learner, signal.SIGSTOP)

        def undo():
            for pid, sample in before.items():
                if after := memory.read_process(pid):
                    self.growth.append(after["own_mb"] - sample["own_mb"])
            send(learner, signal.SIGCONT)

        # Servers close the stream of a learner that has been silent for 20 s.
        fault.has_to_be_named = self.system.poly and fault.seconds > 30
        self._undo_later(fault, undo)

    def _command_environment(self, fault):
        """Have an environment of the target fail in its next step."""
        fault.begin = None  # until then
        folder = self.system.folder
        if fault.kind == "block":
            os.mkfifo(folder / f"{fault.number}.pipe")
        (folder / "command").write_text(f"{fault.number} {fault.kind}")
        env = self._random.randrange(NUM_ENVS)
        (folder / "command").rename(folder / f"{fault.targets[0].name}.{env}")

    def _pattern(self, fault):
        """Return a pattern of log lines that name the fault and its target."""
        workers = [target for target in fault.targets if isinstance(target, Worker)]
        numbers = "|".join(str(w.number) for w in workers)
        name = re.escape(workers[0].name) if workers else None
        lost = rf" stream ({numbers}): the environment server at \S+ was lost"
        if fault.kind in SILENT and self.system.poly:
            away = rf" stream {numbers}: (no environment|the environment server at \S+ hangs)"
            return rf" (stream {numbers}|the server of {name}) has been silent|{lost}|{away}"
        if fault.kind in SILENT:
            return rf" actor {numbers} has been silent| Actor {numbers} died"
        if fault.kind == "kill" and self.system.poly:
            return rf"{name} died.*killed by SIGKILL|{lost}"
        return {
            "kill": rf"Actor {numbers} died.*killed by SIGKILL",
            "raise": rf"\bfault {fault.number}\b",
            "nan": rf"{name}\b.*: the reward is nan",
            "shape": rf"{name}\b.*: observation is uint8\[4, 84, 83\]",
            "dtype": rf"{name}\b.*: observation is float32\[4, 84, 84\]",
        }.get(fault.kind, lost)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--program", choices=["polybeast", "monobeast"], default="polybeast")
    add("--minutes", type=float, default=45, help="from the first step on (default: 45)")
    add("--faults", type=int, default=520, help="(default: 520)")
    add("--seed", type=int, default=1, help="of times, kinds and targets (default: 1)")
    add("--patience", type=float, default=1, help="Factor of all limits of time and rate, for a "
        "busy machine. (default: 1)")  # fmt: skip
    add("--folder", help="for logs, memory.csv and memory.png; by default a temporary one")
    add("--results", help="Copy the last two to this path, which has no suffix.")
    flags = parser.parse_args()
    enter_namespaces()
    longest = min(60, 6 * flags.minutes)  # seconds that a fault lasts
    stall_timeout = max(5, round(longest / 6))
    folder = pathlib.Path(flags.folder or tempfile.mkdtemp(prefix="faults-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    failures = []

    with System(flags.program, folder, ["--seed", flags.seed], stall_timeout) as system:
        print(f"- Logs: {folder}", flush=True)
        campaign = Campaign(flags, system, longest, stall_timeout)
        try:
            campaign.run()
            failures += system.shut_down(flags.patience)
        except Failure as failure:
            failures.append(str(failure))
            print(*(folder / "learner.log").read_text().splitlines()[-30:], sep="\n")
    if campaign.quiet is not None:
        failures += Verdict(campaign).failures
        failures += memory.judge(campaign.recorder.rows, flags.patience * memory.WARM_UP)
        memory.draw(campaign.recorder.rows, folder / "memory.png")
        for suffix in (".csv", ".png") if flags.results else ():
            shutil.copy(folder / f"memory{suffix}", f"{flags.results}{suffix}")
    print()
    print("\n".join(f"FAILED: {text}" for text in failures) or "No failures.")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
