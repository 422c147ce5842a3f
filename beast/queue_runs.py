# SPDX-License-Identifier: Apache-2.0
r"""Run many commands, as many at a time as this machine has cores and GPUs for.

    python -m beast.queue_runs --cores_per_run 2 --gpus_per_run 1 --runs_per_gpu 2 -- \
        python monobeast.py --env "{Pong,Breakout}NoFrameskip-v4" --seed "{1,2,3}" \
        --xpid "{env}-{seed}"

Braces are crossed, the first ones slowest: these are six runs, from Pong-1 to Breakout-3. Braces
have the name of their flag, or one of their own, {x=1,2}; {x} elsewhere is the same value.

Each run has a slot: cores of its own, which it sees by its affinity, and GPUs, which it sees by
CUDA_VISIBLE_DEVICES. The folder `queue` in the runs' --savedir holds queue.csv, a row a run, and
XPID.out, what each run has printed. (Not beside the runs, so that XPID* are runs and nothing else.)
"""

import argparse
import collections
import csv
import ctypes
import datetime
import itertools
import json
import logging
import math
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from typing import NamedTuple

from beast.errors import FlagError
from beast.parser import folder_name, positive, value_of
from beast.processes.lifetime import STOP_SIGNALS, lock_file, signal_name, start_logging
from beast.processes.machine import count_cores

# As in flags.py and checkpoint.py.
SAVEDIR, CHECKPOINT, BEST = "~/logs/torchbeast", "model.tar", "best.tar"
FIELDS = ("xpid", "slot", "start", "end", "status")  # columns of queue.csv
INTERVAL = 0.1  # seconds from one look at the processes to the next
GRACE = 30  # seconds for the processes of a run that outlive its first one
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None)

# fmt: off
parser = argparse.ArgumentParser(
    prog="python -m beast.queue_runs", usage="%(prog)s --cores_per_run N [FLAG ...] -- COMMAND",
    description="Run a command once for each combination of the values in its braces, each on "
    "cores and GPUs of its own. A run that has ended is skipped, one with a checkpoint resumed.",
    allow_abbrev=False)
parser.add_argument("--cores_per_run", type=positive(int), required=True,
                    help="Cores of each run, which no other run of the queue uses.")
parser.add_argument("--gpus_per_run", type=positive(int),
                    help="GPUs of each run. Default: all runs see the same.")
parser.add_argument("--runs_per_gpu", default=1, type=positive(int),
                    help="Runs that share a GPU. By default %(default)s.")
parser.add_argument("--dry_run", action="store_true",
                    help="Print slots and commands, and start nothing.")
# fmt: on


def main(argv=None):
    arguments = sys.argv[1:] if argv is None else argv
    at = arguments.index("--") if "--" in arguments else len(arguments)
    flags, command = parser.parse_args(arguments[:at]), arguments[at + 1 :]
    start_logging()
    try:
        if not command:
            raise FlagError("give the command after --")
        if flags.runs_per_gpu > 1 and flags.gpus_per_run is None:
            raise FlagError("--runs_per_gpu needs --gpus_per_run")
        runs = make_runs(command)
        cores = sorted(os.sched_getaffinity(0))[: count_cores()]
        slots = make_slots(flags, cores, find_gpus() if flags.gpus_per_run else [])
        if flags.dry_run:
            lines = [f"{run.action}: {shlex.join(run.command)}" for run in runs]
            return print(*slots, *lines, sep="\n")
        queue = Queue(runs, slots)
    except FlagError as error:
        parser.error(str(error))
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: queue.signals.append(number))
    sys.exit(queue.work())


def expand(words):
    """Return the commands that one with braces stands for; each is a list of arguments."""
    levels, parts_of_words, flag = {}, [], None
    for word in words:
        match = re.match(r"--?([A-Za-z][\w-]*)", word)
        flag = match[1] if match else flag
        parts = re.split(r"\{([^{}]*)\}", word)
        for i in range(1, len(parts), 2):  # those in braces, of which only the name is kept
            name, is_named, values = parts[i].partition("=")
            if not (is_named and name.isidentifier()):
                name, values = (flag, parts[i]) if "," in parts[i] else (parts[i], "")
            if name is None:
                raise FlagError(f"{word} belongs to no flag: name its braces, {{name={values}}}")
            if values and levels.setdefault(name, values) != values:
                hint = f"name one of them, {{other={values}}}"
                raise FlagError(f"the braces {name} are {levels[name]} and {values}: {hint}")
            parts[i] = name
        parts_of_words.append(parts)
    for name in (name for parts in parts_of_words for name in parts[1::2]):
        if name not in levels:
            known = ", ".join(levels) or "none (quote braces, or the shell expands them)"
            raise FlagError(f"{{{name}}} has no values anywhere; braces that have some: {known}")
    commands = []
    for values in itertools.product(*(text.split(",") for text in levels.values())):
        chosen = dict(zip(levels, map(str.strip, values), strict=True))
        filled = [[chosen[p] if i % 2 else p for i, p in enumerate(ps)] for ps in parts_of_words]
        commands.append(["".join(parts) for parts in filled])
    return commands


def make_runs(command):
    """Return the runs of a command with braces; refuse those that have one name."""
    runs = [QueuedRun(arguments) for arguments in expand(command)]
    xpid, count = collections.Counter(run.xpid for run in runs).most_common(1)[0]
    if xpid is None:
        raise FlagError("give the command an --xpid, with the names of all braces in it")
    for run in runs:
        try:
            folder_name(run.xpid)
        except argparse.ArgumentTypeError as error:
            raise FlagError(f"--xpid: {error}") from None
    if count > 1:
        raise FlagError(f"{count} runs have the --xpid {xpid}: put the names of all braces into it")
    if len(folders := {str(run.savedir) for run in runs}) > 1:
        raise FlagError(f"a queue has one --savedir, not {', '.join(sorted(folders))}")
    return runs


class QueuedRun:
    """A run of the queue, and its process once that is started."""

    def __init__(self, command):
        self.command, self.xpid = command, value_of("xpid", command)
        self.savedir = pathlib.Path(value_of("savedir", command) or SAVEDIR).expanduser()
        self.folder = self.savedir / (self.xpid or "")
        self.out = self.savedir / "queue" / f"{self.xpid}.out"
        self.process = self.slot = self.meta_before = self._end_time = None

    @property
    def meta(self):
        """What the program says of the run in its meta.json; empty where there is none."""
        try:
            return dict(json.loads((self.folder / "meta.json").read_text()))
        except (OSError, ValueError, TypeError):
            return {}

    @property
    def action(self):
        """What the queue does with the run next."""
        if value_of("mode", self.command) not in (None, "train"):
            return "start"
        can_resume, status = (self.folder / CHECKPOINT).exists(), str(self.meta.get("status"))
        is_over = status == "ended" or (status.startswith("ended, but") and BEST in status)
        if is_over and not (can_resume and self._asks_for_more()):
            return "skip"
        return "resume" if can_resume else "start"

    def _asks_for_more(self):
        asked, made = value_of("total_steps", self.command), self.meta.get("flags", {})
        try:
            return float(asked or 0) > made.get("total_steps", math.inf)
        except ValueError:  # the program refuses it
            return True

    def start(self, slot):
        def prepare():  # in the new process
            os.sched_setaffinity(0, slot.cores)
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # ends the run if the queue is killed

        meta = self.meta
        gpus = {} if slot.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(slot.gpus)}
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with open(self.out, "ab") as file:
            self.process = subprocess.Popen(
                self.command, env=os.environ | gpus, preexec_fn=prepare,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C is for the queue, which passes it on
            )  # fmt: skip
        self.slot, self.meta_before = slot, meta

    def send(self, number):
        """Send a signal to all processes of the run; return whether there are any."""
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):  # the latter: the id is another user's by now
            return False
        return True

    def has_ended(self):
        """Return whether all its processes have ended; those that outlive GRACE are killed."""
        if self.process.poll() is None:
            return False
        self._end_time = self._end_time or time.monotonic()
        is_late = time.monotonic() > self._end_time + GRACE
        return not self.send(signal.SIGKILL if is_late else 0) or is_late


class Slot(NamedTuple):
    """Where one run at a time runs: ids of cores, and of GPUs or None."""

    number: int
    cores: list
    gpus: list | None

    def __str__(self):
        gpus = "" if self.gpus is None else f", GPUs {','.join(self.gpus)}"
        return f"slot {self.number}: cores {','.join(map(str, self.cores))}{gpus}"


def make_slots(flags, cores, gpus):
    """Return the slots that there are cores and GPUs for, both given as lists of ids."""
    num_cores, num_gpus = flags.cores_per_run, flags.gpus_per_run
    if num_cores > len(cores):
        raise FlagError(f"--cores_per_run is {num_cores}, but there are only {len(cores)} cores")
    if num_gpus and num_gpus > len(gpus):
        source = "CUDA_VISIBLE_DEVICES or, where that is not set, nvidia-smi -L"
        raise FlagError(f"--gpus_per_run is {num_gpus}, but {len(gpus)} GPUs are in {source}")
    seats = gpus * flags.runs_per_gpu  # in this order, so that all are in use before one is shared
    count = min(len(cores) // num_cores, len(seats) // num_gpus if num_gpus else len(cores))

    def share(ids, i, size):
        return ids[i * size : (i + 1) * size] if size else None

    return [Slot(i, share(cores, i, num_cores), share(seats, i, num_gpus)) for i in range(count)]


def find_gpus():
    """Return the ids of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [text.strip() for text in visible.split(",") if text.strip() not in ("", "-1")]
    try:
        shown = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return []
    return re.findall(r"^GPU (\d+):", shown, re.M)


class Queue:
    """Starts waiting runs in free slots.

    Attributes:
      signals: those that were caught. They are passed on to all runs, and no more runs are started.
    """

    def __init__(self, runs, slots):
        self.signals, self._num_passed_on = [], 0
        self._runs, self._waiting, self._running = runs, collections.deque(runs), []
        self._free = list(slots)
        self._path = runs[0].savedir / "queue" / "queue.csv"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = open(self._path.with_suffix(".lock"), "w")  # until the end
            lock_file(self._lock)
            text = self._path.read_text(errors="replace") if self._path.exists() else ""
            rows = list(csv.DictReader(text.splitlines()))  # of earlier queues
        except (OSError, csv.Error) as error:
            reason = "another queue uses it" if isinstance(error, BlockingIOError) else error
            raise FlagError(f"cannot use --savedir {runs[0].savedir}: {reason}") from None
        self._rows = {row.get("xpid"): row for row in rows}
        for row in self._rows.values():
            if row.get("status") == "running":  # its queue was killed: it no longer has the lock
                row["status"] = "lost"
        self._rows |= {run.xpid: {"xpid": run.xpid, "status": "waiting"} for run in runs}

    def work(self):
        """Run them all; return the exit status, 0 where all have ended, now or before."""
        logging.info("%d runs, %d at a time: %s", len(self._runs), len(self._free), self._path)
        while self._running or (self._waiting and not self.signals):
            for number in self.signals[self._num_passed_on :]:
                self._num_passed_on += 1
                logging.info("Caught %s: passing it on", signal.Signals(number).name)
                for run in self._running:
                    run.send(number)
            for run in [run for run in self._running if run.has_ended()]:
                self._finish(run)
            while self._waiting and self._free and not self.signals:
                self._start(self._waiting.popleft())
            time.sleep(INTERVAL)
        statuses = [self._rows[run.xpid]["status"].partition(" ")[0] for run in self._runs]
        counts = collections.Counter(statuses)
        logging.info("%s", ", ".join(f"{count} {status}" for status, count in counts.items()))
        if self.signals:
            return 128 + self.signals[0]
        return int(not counts.keys() <= {"ended", "skipped"})

    def _start(self, run):
        try:
            action, meta = run.action, run.meta
            if action == "skip":
                times = {"start": meta.get("start"), "end": meta.get("end")}
                return self._report(run, "skipped: it has ended before", status="skipped", **times)
            run.start(self._free[0])
        except (OSError, subprocess.SubprocessError) as error:
            return self._report(run, f"failed: {error}", status="failed", end=_now())
        self._running.append(run)
        slot = self._free.pop(0)
        self._report(run, f"{action}s in {slot}", status="running", slot=slot.number, start=_now())

    def _finish(self, run):
        self._running.remove(run)
        self._free.append(run.slot)
        code, status = run.process.returncode, "ended"
        said = str(run.meta.get("status")) if run.meta != run.meta_before else ""
        # With any exit status: torchrun is given a 0, or else would start it again.
        if (self.signals and said != "ended") or (code == 0 and said.startswith("stopped")):
            status = "stopped"
        elif code != 0:
            status = f"failed ({signal_name(-code) if code < 0 else code})"
        self._report(run, f"{status}: see {run.out}", status=status, end=_now())

    def _report(self, run, text, **row):
        """Log a run's new status, and write queue.csv so that nobody reads half of it."""
        self._rows[run.xpid] |= row
        done = len(self._runs) - len(self._waiting) - len(self._running)
        level = logging.ERROR if text.startswith("failed") else logging.INFO
        logging.log(level, "%d of %d done | %s %s", done, len(self._runs), run.xpid, text)
        temporary = self._path.with_suffix(".tmp")
        try:
            with open(temporary, "w", newline="") as file:
                writer = csv.DictWriter(file, FIELDS, extrasaction="ignore")
                writer.writeheader()
                writer.writerows(self._rows.values())
            temporary.rename(self._path)
        except OSError as error:  # a full disk, which must not end a run
            logging.error("Cannot write %s (%s)", self._path, error.strerror)


def _now():
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")  # as in meta.json


if __name__ == "__main__":
    main()
