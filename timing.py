# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom, and for what share of the time."""

import threading
import time


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
        """Return the seconds so far, those that go on included."""
        with self._lock:
            return self._total + (0 if self._outside else time.monotonic() - self._since)


class TimeShares:
    """Turns seconds that were counted since the start into shares of the time since the last call.

    >>> shares = TimeShares()
    >>> shares(learner_wait=0.0)
    {'learner_wait': 0.0}
    """

    def __init__(self):
        self._time, self._seconds = time.monotonic(), {}

    def __call__(self, **seconds):
        now = time.monotonic()
        elapsed = max(now - self._time, 1e-9)
        shares = {
            k: min(1.0, (s - self._seconds.get(k, 0.0)) / elapsed) for k, s in seconds.items()
        }
        self._time, self._seconds = now, seconds
        return shares
