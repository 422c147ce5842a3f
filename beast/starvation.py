# SPDX-License-Identifier: Apache-2.0
"""A learner of a group that has no batch must not hold the others up: it joins their updates."""

import contextlib
import math
import threading
import time

import torch

PATIENCE = 1  # seconds that the others wait for a batch of a rank, until it gives zeros
PAUSE = 0.1  # seconds between two exchanges in which no rank has a batch


class Starvation:
    """Whether a learner has batches, or has had none for too long. For all of its threads."""

    def __init__(self):
        self._lock = threading.Lock()  # guards what follows
        self._in_hand = 0  # batches that threads have
        self._last_batch = math.inf

    def begin(self):
        """Count the time without a batch from here on, not only from the first batch."""
        self._last_batch = time.monotonic()

    @contextlib.contextmanager
    def batch_in_hand(self):
        """Say that a thread has a batch, while it waits for the lock and learns from it."""
        with self._lock:
            self._in_hand += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_hand -= 1
                self._last_batch = time.monotonic()

    def starves(self):
        """Return whether this rank has had no batch for so long that the others must not wait."""
        with self._lock:
            return not self._in_hand and time.monotonic() > self._last_batch + PATIENCE


def join_updates(flags, learner, run, learn):
    """Take part in the updates of the other learners while there is no batch here: a thread.

    Args:
      learn: as in the programs; without a batch it gives no gradient, but takes the step.
    """
    group = learner.group
    if group.starvation is None:  # the learner is the only one
        run.stop.wait()
        return
    torch.set_num_threads(learner.num_threads)
    pause = PATIENCE / 20
    while not run.stop.wait(pause):
        pause = PATIENCE / 20
        run.watchdog.beat("waits until there is no batch")
        if not group.starvation.starves():
            continue
        with learner.lock:
            if run.stop.is_set() or not group.starvation.starves():
                continue
            run.watchdog.beat("joins the update of other learners")
            metrics = learn(flags, learner.model, None, (), learner.optimizer, group)
            if group.exchange.num_batches:
                learner.publish()
                run.record(metrics)
                pause = 0.001  # in which others get the lock
            else:
                pause = PAUSE
            if group.exchange.has_to_stop:
                run.stop.set()
