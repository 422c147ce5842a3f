# SPDX-License-Identifier: Apache-2.0
"""--write_profiler_trace: a trace of some updates, for chrome://tracing or perfetto."""

import logging
import threading

import torch

from beast.checkpoint import run_path


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
        profiler.export_chrome_trace(str(self._path))
        logging.info("Wrote %s", self._path)
