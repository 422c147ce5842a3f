# SPDX-License-Identifier: Apache-2.0
"""An actor's own process: its end of the pipe to the main process, its signals, its errors."""

import contextlib
import functools
import os
import signal
import time
import traceback

import numpy as np
import torch

from beast.processes.lifetime import HANDLED_SIGNALS, STOP_SIGNALS, exit_with_parent, lead_group
from beast.processes.watchdog import print_stacks_on_signal


class FreeBuffers:
    """An actor's end of its pipe: yields arrays of indices of buffers to fill.

    A buffer counts as filled when the next ones are asked for.
    """

    def __init__(self, pipe, heartbeat):
        self._pipe, self._heartbeat = pipe, heartbeat

    def __iter__(self):
        indices = []  # at first none is full, but the actor is ready
        while True:
            self._pipe.send(("full", indices))
            indices = self._pipe.recv()
            yield np.array(indices)

    def beat(self):
        """Record that the actor is alive; raise EOFError where the main process closed the pipe."""
        if self._pipe.poll():
            raise EOFError
        self._heartbeat[0] = time.monotonic()


def actor_main(act, pipe, *args, niceness=10):
    """Be an actor process: ignore signals, which are for the main process, but end with that.

    It leads a process group, in which the processes that its environments start end with it.

    Args:
      niceness: by default the learner comes first, and actors take what is left of the cores.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
        # Environments end theirs by SIGTERM.
        os.register_at_fork(after_in_child=functools.partial(signal.signal, number, signal.SIG_DFL))
    lead_group()
    print_stacks_on_signal()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
    exit_with_parent()
    torch.set_num_threads(1)
    os.nice(niceness)
    try:
        act(*args)
    except (EOFError, BrokenPipeError):
        pass  # the main process has closed the pipe
    except Exception:
        with contextlib.suppress(OSError):
            pipe.send(("error", traceback.format_exc()))
