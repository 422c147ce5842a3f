# SPDX-License-Identifier: Apache-2.0
"""N environments as one batch, stepped by several processes at once.

    environments = ParallelEnvironments(create_env, draw_seeds(seed, N), num_processes, "name")
    row = environments.initial()
    row = environments.step(actions)         # or, with something to do meanwhile:
    environments.send(actions); ...; row = environments.receive()

Each process steps its share by an `Environments`, into shared memory; a step is a byte through a
pipe each way. So rows and episodes are those of `Environments`, bit for bit, however many processes
there are; with 0 it is one, in this process, where a debugger can stop.
"""

import contextlib
import time

import numpy as np
import torch

from beast.envs.environments import Environments
from beast.errors import EnvError, FlagError
from beast.nest import leaves_of, map_nest
from beast.processes.fork_server import child_main, start_fork_server
from beast.processes.machine import check_shared_memory, count_cores
from beast.processes.randomness import seed_generators
from beast.processes.supervisor import Supervisor
from beast.processes.watchdog import PATIENCE

MIN_STEPS = 200  # steps after which consecutive deaths are reset to 0
INITIAL, STEP = b"i", b"s"
TOTALS = ("episode_return", "episode_step", "game_return", "game_step")


class ParallelEnvironments:
    """N environments in several processes; for one thread, but for `wake`.

    Args:
      create_env: called without arguments, in the processes; returns a Gymnasium environment.
      seeds: N ints, one for each environment.
      num_processes: among which the environments are divided evenly.
      name: put in front of error messages.
      stall_timeout_s: a process is replaced after PATIENCE times as many seconds of silence.

    Attributes:
      row: the last one, whose arrays stay the same and are overwritten by `initial` and `receive`.
      supervisor: of the processes.
      num_envs: as of Environments.

    A process that is lost, or silent for too long, is replaced. The next row of its environments
    repeats their last observations, as truncated; in the row after it new episodes begin. Where an
    environment raises, so does `receive`.
    """

    def __init__(self, create_env, seeds, num_processes, name, stall_timeout_s=60):
        self.num_envs, self._create_env, self._seeds = len(seeds), create_env, seeds
        self._is_awake, self._here = False, None
        sample = Environments(create_env, 1 if num_processes else self.num_envs, 0, name)
        shares = np.array_split(range(self.num_envs), num_processes) if num_processes else []
        self._columns = [slice(int(share[0]), int(share[-1]) + 1) for share in shares]
        self._names = [f"{name}, process {i}" for i in range(num_processes)]
        self._asked_at = [None] * num_processes  # time.monotonic() of a request without an answer
        self._is_new = [False] * num_processes  # replacement processes that have not sent a row
        self.supervisor = Supervisor(
            self._names,
            self._create_process,
            self._asked_at.__getitem__,
            PATIENCE * stall_timeout_s,
            MIN_STEPS,
            "steps",
        )
        if num_processes == 0:
            sample.seeds = list(seeds)
            self._here, self.row = sample, sample.row
            return
        with contextlib.closing(sample):
            self._allocate(sample.row)
        self._context = start_fork_server()
        self.supervisor.start()

    def initial(self):
        """Reset every environment and return the very first row; None once woken."""
        if self._here:
            return None if self._is_awake else self._here.initial()
        self._ask(INITIAL)
        row = self.receive()
        # Of a process that was lost meanwhile it is no first row: all begin again.
        return self.initial() if row and any(self._is_new) else row

    def step(self, actions):
        """Take actions, as Environments.step does, and return the next row; None once woken."""
        self.send(actions)
        return self.receive()

    def send(self, actions):
        """Have the environments take actions; `row` stays as it is until `receive`.

        Raises:
          EnvError: a process cannot be started, or an environment of it has raised before.
        """
        if self._here:
            self._actions = np.array(actions)
            return
        self._shared[1].numpy()[:] = actions
        self._ask(STEP)

    def receive(self):
        """Wait until all have taken their actions, and return the next row; None once woken.

        Raises:
          EnvError: an environment raised, or returned what its spaces do not allow; or a process
            died repeatedly.
        """
        if self._here:
            return None if self._is_awake else self._here.step(self._actions)
        waiting = list(self.supervisor.children)
        while waiting and not self._is_awake:
            for child, message in self.supervisor.news(1, waiting):
                waiting.remove(child)
                self._asked_at[child.number] = None
                if message is not None:
                    child.count_work()
                    self._copy_row(child.number)
                elif child.failure:
                    raise EnvError(f"{child.name} failed:\n{child.failure}")
                else:
                    self._cut_episodes(self._columns[child.number])
                    self._is_new[child.number] = True
                    self.supervisor.restart(child)
        return None if self._is_awake else self.row

    def wake(self):
        """Have `receive`, `step` and `initial` return None from now on; for any thread."""
        self._is_awake = True
        self.supervisor.wake()

    def close(self):
        """End all processes. No thread may use this any more."""
        if self._here:
            self._here.close()
        self.wake()
        self.supervisor.close()

    def _ask(self, command):
        """Have each process write the next row; the first one of a new process is of a reset."""
        for child in self.supervisor.children:
            while not (child.is_running or self._is_awake):
                if child.due is None:
                    raise EnvError(f"{child.name} has ended: {child.cause}")
                list(self.supervisor.news(1, []))  # news starts the process
            self._asked_at[child.number] = time.monotonic()
            if child.is_running:
                with contextlib.suppress(OSError):  # it has died, which shows soon
                    child.pipe.send_bytes(INITIAL if self._is_new[child.number] else command)

    def _create_process(self, i, num_deaths, pipe):
        columns = self._columns[i]
        # Other seeds, so that the same games are not played again.
        seeds = [seed + num_deaths for seed in self._seeds[columns]]
        shared = [map_nest(lambda a: a[columns], part) for part in self._shared]
        arguments = (step_environments, pipe, pipe, self._create_env, seeds, self._names[i])
        return self._context.Process(target=child_main, args=(*arguments, *shared))

    def _allocate(self, sample_row):
        """Make the row, and shared memory for rows and actions, [N, ...] like a row [1, ...]."""
        self.row = map_nest(lambda a: np.zeros((self.num_envs, *a.shape[1:]), a.dtype), sample_row)
        check_shared_memory(sum(a.nbytes for a in leaves_of(self.row)), "rows of environments")
        shared = map_nest(lambda a: torch.from_numpy(a.copy()).share_memory_(), self.row)
        actions = torch.from_numpy(self.row["last_action"].copy()).share_memory_()
        self._shared = shared, actions

    def _copy_row(self, i):
        columns = self._columns[i]

        def copy(target, source):
            target[columns] = source.numpy()[columns]

        # The row after a cut keeps the totals of the cut episodes, and their games are not counted.
        kept = (*TOTALS, "game_done") if self._is_new[i] else ()
        for name in self.row.keys() - kept:
            map_nest(copy, self.row[name], self._shared[0][name])
        self._is_new[i] = False

    def _cut_episodes(self, columns):
        """Write the row of environments that are lost; their frames stay as they were."""
        row = self.row
        for name in TOTALS:  # episodes that ended in the last row have been counted
            has_ended = row["game_done" if name.startswith("game") else "done"][columns]
            row[name][columns][has_ended] = 0
        for name in ("reward", "done", "terminated", "game_done"):
            row[name][columns] = 0
        row["truncated"][columns] = True
        row["last_action"][columns] = self._shared[1].numpy()[columns]


def step_environments(pipe, create_env, seeds, name, row, actions):
    """Step environments whenever the main process asks for a row: what such a process does."""
    seed_generators(seeds)  # else each process would begin with those of the one it is forked from
    environments = Environments(create_env, len(seeds), 0, name)
    with contextlib.closing(environments):
        environments.seeds = seeds
        environments.row.update(map_nest(torch.Tensor.numpy, row))
        actions = actions.numpy()
        while True:
            if pipe.recv_bytes() == INITIAL:
                environments.initial()
            else:
                environments.step(actions)
            pipe.send(("row", None))


def check_groups(flags, num_groups=1):
    """Refuse groups or processes that do not fit --num_envs; choose the latter if not given."""
    if flags.num_envs % num_groups:
        raise FlagError(
            f"--num_envs is {flags.num_envs}, which --num_groups {num_groups} does not "
            "divide: give another number of either"
        )
    n = flags.num_envs // num_groups
    if flags.num_env_processes is None:
        flags.num_env_processes = min(count_cores(), n)
        flags.chosen = [*flags.chosen, "num_env_processes"]
    if flags.num_env_processes > n:
        raise FlagError(
            f"--num_env_processes is {flags.num_env_processes}, but there are {n} environments "
            f"(in each group, if there are several): give at most {n}"
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
        with contextlib.ExitStack() as stack:  # closes the groups made so far if one fails
            stack.callback(self.close)
            for i, part in enumerate(np.array_split(seeds, num_groups)):
                name = f"group {i}" if num_groups > 1 else "environments"
                arguments = create_env, part.tolist(), num_processes, name, stall_timeout_s
                self.groups.append(ParallelEnvironments(*arguments))
            stack.pop_all()

    def waits(self):
        return {}

    def metrics(self):
        return {"process_restarts": sum(group.supervisor.num_deaths() for group in self.groups)}

    def texts(self, metrics):
        return {}

    def silences(self):
        """Return a tuple of each process that has something to do, as for a Watchdog."""
        groups = [group.supervisor.silences("steps its environments") for group in self.groups]
        return sum(groups, [])

    def pids(self):
        return [pid for group in self.groups for pid in group.supervisor.pids()]

    def wake(self):
        for group in self.groups:
            group.wake()

    def close(self):
        for group in self.groups:
            group.close()
