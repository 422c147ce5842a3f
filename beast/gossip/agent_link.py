# SPDX-License-Identifier: Apache-2.0
"""An agent process's connection to the main process: reports, pauses, heartbeats."""

import datetime
import time

import torch
import torch.distributed as dist

from beast.nest import map_nest
from beast.runs.diagnostics import is_finite
from beast.runs.run import ENDS, MAX_SKIPPED

NEVER = 2**62
# Limits on an agent's updates: after HOLD it stops until told to go on; after PACE it waits until
# the main process has counted those before.
HOLD, PACE = 0, 1


class AgentLink:
    """An agent's end of its pipe, and what it shares with the others.

    Attributes:
      agent: its number.
      seed: a list of ints, another one for each process.
      is_replacement: whether it takes the place of one that died.
      rounds: of all agents, how many updates each has made: shared memory.
    """

    def __init__(self, agent, seed, is_replacement, pipe, rounds, limits, heartbeats):
        self.agent, self.seed, self.is_replacement = agent, seed, is_replacement
        self.rounds = rounds
        self._pipe, self._limits, self._heartbeats = pipe, limits, heartbeats
        self._skipped = 0  # updates in a row

    def report(self, metrics, batch):
        """Count an update; give the main process its metrics, and rows in which episodes end.

        Raises:
          FloatingPointError: too many updates in a row were not finite: a replacement begins with
            other weights.
        """
        finite = is_finite(metrics)
        rows = {name: batch.cpu_rows[name] for name in ENDS} if finite else batch.cpu_rows
        self._pipe.send(("update", (metrics, map_nest(torch.Tensor.numpy, rows))))
        self._skipped = 0 if finite else self._skipped + 1
        if self._skipped == MAX_SKIPPED:
            raise FloatingPointError(f"{MAX_SKIPPED} updates in a row were not finite")
        self.rounds[self.agent] += 1
        self._heartbeats[self.agent] = time.monotonic()
        self.wait_until(lambda: self.rounds[self.agent] < self._limits[PACE])

    def join_group(self, port):
        """Join the group of all agents, whose master TCPStore has this port, for all_reduce."""
        store = dist.TCPStore("localhost", port, is_master=False)
        timeout = datetime.timedelta(days=30)  # a job may be suspended
        sizes = {"rank": self.agent, "world_size": len(self.rounds)}
        dist.init_process_group("gloo", store=store, timeout=timeout, **sizes)

    def has_to_hold(self):
        return bool(self.rounds[self.agent] >= self._limits[HOLD])

    def hold(self):
        """Report that its state is in shared memory, and wait until told to go on."""
        self._pipe.send(("held", None))
        self._pipe.recv()
        self._heartbeats[self.agent] = time.monotonic()

    def wait_until(self, condition):
        """Wait until a condition is true; return whether it is, or this agent has to hold.

        Raises:
          EOFError: the main process has closed the pipe.
        """
        while not condition():
            if self.has_to_hold():
                return False
            if self._pipe.poll():
                raise EOFError
            self._heartbeats[self.agent] = time.monotonic()  # to wait for others is no silence
            time.sleep(0.0005)
        return True
