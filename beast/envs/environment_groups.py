# SPDX-License-Identifier: Apache-2.0
"""Groups of parallel environments, of which one is stepped while another is answered."""

import contextlib

import numpy as np

from beast.envs.parallel import ParallelEnvironments
from beast.errors import FlagError
from beast.processes.machine import count_cores


def check_groups(flags):
    """Refuse groups or processes that do not fit --num_envs; choose the latter if not given."""
    if flags.num_envs % flags.num_groups:
        raise FlagError(
            f"--num_envs is {flags.num_envs}, which --num_groups {flags.num_groups} does not "
            "divide: give another number of either"
        )
    n = flags.num_envs // flags.num_groups
    if flags.num_env_processes is None:
        flags.num_env_processes = min(count_cores(), n)
        flags.chosen = [*flags.chosen, "num_env_processes"]
    if flags.num_env_processes > n:
        raise FlagError(
            f"--num_env_processes is {flags.num_env_processes}, but a group has {n} environments "
            f"(--num_envs {flags.num_envs} / --num_groups {flags.num_groups}): give at most {n}"
        )


class EnvironmentGroups:
    """Groups of environments, each stepped while another is answered; for Run.watch.

    Args:
      create_env, stall_timeout_s: as of ParallelEnvironments.
      seeds: of all environments.
      num_groups: of as many environments each.
      num_processes: of each group.

    Attributes:
      groups: a list of ParallelEnvironments.
    """

    def __init__(self, create_env, seeds, num_groups, num_processes, stall_timeout_s=60):
        self.groups = []
        with contextlib.ExitStack() as stack:  # which closes those before one that fails
            stack.callback(self.close)
            for i, part in enumerate(np.array_split(seeds, num_groups)):
                name = f"group {i}" if num_groups > 1 else "environments"
                arguments = create_env, part.tolist(), num_processes, name, stall_timeout_s
                self.groups.append(ParallelEnvironments(*arguments))
            stack.pop_all()

    def waits(self):
        return {}

    def metrics(self):
        return {"process_restarts": sum(process.deaths.total for process in self._processes)}

    def texts(self, metrics):
        return {}

    def silences(self):
        """Return a tuple of each process that has something to do, as a Watchdog wants them."""
        return [
            (process.name, "steps its environments", process.seconds_silent(), process.pid)
            for process in self._processes
            if process.is_asked
        ]

    def pids(self):
        return [process.pid for process in self._processes]

    def wake(self):
        for group in self.groups:
            group.wake()

    def close(self):
        for group in self.groups:
            group.close()

    @property
    def _processes(self):
        return [process for group in self.groups for process in group.processes]
