# SPDX-License-Identifier: Apache-2.0
"""Which fraction of the time learner, actors and streams wait. No torch here."""

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
