# SPDX-License-Identifier: Apache-2.0
"""Processes that die are replaced, but not for ever."""

import logging
import signal

from beast.errors import EnvError

MAX_DEATHS = 5  # with little work in between, which end the run


def describe_exit(process):
    """Return why a process has ended, as far as its status says."""
    if process.exitcode is None:
        return f"its process {process.pid} cannot be killed"
    if process.exitcode < 0:
        return f"killed by {signal.Signals(-process.exitcode).name}"
    return f"it ended with status {process.exitcode}"


class Deaths:
    """How often a process, and those that took its place, have died.

    Args:
      enough: how much work (rollouts, updates, steps) ends a series of deaths.

    Attributes:
      total: all deaths.
      in_a_row: those since one of these processes has done enough.
    """

    def __init__(self, enough):
        self.total = self.in_a_row = self._work = 0
        self._enough = enough

    def count_work(self):
        self._work += 1
        if self._work == self._enough:
            self.in_a_row = 0

    @property
    def has_worked(self):
        """Whether the process that lives now has done any work."""
        return self._work > 0

    def count(self):
        self.total += 1
        self.in_a_row += 1
        self._work = 0

    def log(self, name, unit, cause):
        """Log the death that was counted last, and that the process is replaced.

        Raises:
          EnvError: it was one too many.
        """
        if self.in_a_row >= MAX_DEATHS:
            raise EnvError(
                f"{name} died {MAX_DEATHS} times with less than {self._enough} {unit} in between, "
                f"most recently: {cause}"
            )
        logging.error(
            "%s died and is replaced (%d deaths in all, %d in a row; %d in a row end the run): %s",
            *(name.capitalize(), self.total, self.in_a_row, MAX_DEATHS, cause),
        )
