# SPDX-License-Identifier: Apache-2.0
"""Where time and energy of a run go: wait fractions, joules, a trace of some updates."""

import logging
import pathlib
import re
import threading
import time

import torch

from beast.runs.checkpoint import run_path

POWERCAP = pathlib.Path("/sys/class/powercap")


class Stopwatch:
    """Counts the seconds in which all of `num_threads` threads are in `with` blocks of it."""

    def __init__(self, num_threads=1):
        self._lock = threading.Lock()
        self._outside, self._since, self._total = num_threads, None, 0.0

    def __enter__(self):
        with self._lock:
            self._outside -= 1
            self._since = time.monotonic()

    def __exit__(self, *_):
        with self._lock:
            if self._outside == 0:
                self._total += time.monotonic() - self._since
            self._outside += 1

    def seconds(self):
        """Return the seconds so far, a wait that goes on included."""
        with self._lock:
            return self._total + (0 if self._outside else time.monotonic() - self._since)


class WaitFractions:
    """Turns seconds since the start into fractions of the time since the last call.

    >>> fractions = WaitFractions()
    >>> fractions(learner_wait=0.0)
    {'learner_wait': 0.0}
    """

    def __init__(self):
        self._time, self._seconds = time.monotonic(), {}

    def __call__(self, **seconds):
        now = time.monotonic()
        elapsed = max(now - self._time, 1e-9)
        fractions = {
            k: min(1.0, (s - self._seconds.get(k, 0.0)) / elapsed) for k, s in seconds.items()
        }
        self._time, self._seconds = now, seconds
        return fractions


class CPUEnergy:
    """Joules used by all CPU packages since its creation, by RAPL, other programs included.

    Read it once a minute or more often: a counter must not wrap twice in between.
    """

    def __init__(self):
        # Not intel-rapl:0:0, which is a part of intel-rapl:0; nor psys, the whole machine.
        folders = [f for f in POWERCAP.glob("*") if re.fullmatch(r"intel-rapl:\d+", f.name)]
        self._counters, self._total = [], 0.0
        try:
            packages = [f for f in folders if (f / "name").read_text().startswith("package")]
            spans = [_joules(package / "max_energy_range_uj") for package in packages]
            self._last = [_joules(package / "energy_uj") for package in packages]
        except (OSError, ValueError):  # most systems let only root read them
            return
        self._counters = list(zip(packages, spans, strict=True))

    def metrics(self):
        """Return {"cpu_joules": joules}; {} if the counter cannot be read."""
        try:
            now = [_joules(package / "energy_uj") for package, _ in self._counters]
        except (OSError, ValueError) as error:  # which must not end a run
            logging.warning("Cannot read the energy counter of the CPU any more: %s", error)
            self._counters = []
        if not self._counters:
            return {}
        spans = [span for _, span in self._counters]
        grown = [(b - a) % span for a, b, span in zip(self._last, now, spans, strict=True)]
        self._total, self._last = self._total + sum(grown), now
        return {"cpu_joules": self._total}


def _joules(path):
    return int(path.read_text()) / 1e6  # of microjoules


class UpdateProfiler:
    """Profiles 20 updates of one thread, after 25 others, and writes trace.json."""

    def __init__(self, flags):
        self._path = run_path(flags) / "trace.json"
        self._profiler = None

    def count_update(self):
        """Count an update of this thread; requires the learner's lock.

        The profiler sees only the thread that starts it, which is the first one that comes here.
        """
        if self._profiler is None:
            schedule = torch.profiler.schedule(wait=20, warmup=5, active=20, repeat=1)
            self._profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=self._write)
            self._profiler.start()
            self._thread = threading.get_ident()
        if threading.get_ident() == self._thread:
            self._profiler.step()

    def _write(self, profiler):
        temporary = self._path.with_suffix(".new")
        profiler.export_chrome_trace(str(temporary))  # raises nothing where it cannot write
        try:
            temporary.replace(self._path)
            logging.info("Wrote %s", self._path)
        except OSError:
            logging.error("Cannot write %s: is the disk full?", self._path)
