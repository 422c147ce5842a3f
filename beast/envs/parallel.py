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
import multiprocessing
import multiprocessing.connection
import time
from multiprocessing.reduction import ForkingPickler

import numpy as np
import torch

from beast.envs.environments import Environments
from beast.envs.spaces import spaces_to_json
from beast.errors import EnvError
from beast.nest import map_nest
from beast.processes.actor_process import actor_main
from beast.processes.deaths import Deaths, describe_exit
from beast.processes.fork_server import end_process, start_fork_server, start_process
from beast.processes.machine import check_shared_memory
from beast.processes.watchdog import PATIENCE, Lookout

MIN_STEPS = 200  # after so many, earlier deaths no longer count
INITIAL, STEP, DONE = b"i", b"s", b"."
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
      processes: a list of Process.
      row: the last one, whose arrays stay the same and are overwritten by `initial` and `receive`.
      num_envs, observation_space, action_space, num_actions, stack_size, frame_skip, spaces: as of
        Environments.

    A process that is lost, or silent for too long, is replaced. The next row of its environments
    repeats their last observations, as truncated; in the row after it new episodes begin. Where an
    environment raises, so does `receive`.
    """

    def __init__(self, create_env, seeds, num_processes, name, stall_timeout_s=60):
        self.num_envs, self._name = len(seeds), name
        self._patience = PATIENCE * stall_timeout_s
        self.processes, self._is_awake = [], False
        sample = Environments(create_env, 1 if num_processes else self.num_envs, 0, name)
        self.observation_space, self.action_space = sample.observation_space, sample.action_space
        self.num_actions = sample.num_actions
        self.stack_size, self.frame_skip = sample.stack_size, sample.frame_skip
        self._wake_reader, self._wake_writer = multiprocessing.Pipe(duplex=False)
        if num_processes == 0:
            sample.seeds = list(seeds)
            self._here, self.row = sample, sample.row
            return
        self._here = None
        with contextlib.closing(sample):
            self._allocate(sample.row)
        context, shares = start_fork_server(), np.array_split(range(self.num_envs), num_processes)
        with contextlib.ExitStack() as stack:  # which ends those before one that does not start
            stack.callback(self.close)
            for i, share in enumerate(shares):
                columns = slice(int(share[0]), int(share[-1]) + 1)
                arguments = (
                    *(create_env, seeds[columns], f"{name}, process {i}"),
                    *(map_nest(lambda a, c=columns: a[c], part) for part in self._shared),
                )
                self.processes.append(Process(context, f"{name}, process {i}", columns, arguments))
            stack.pop_all()

    @property
    def spaces(self):
        return spaces_to_json(self.observation_space, self.action_space, self.frame_skip)

    def initial(self):
        """Reset every environment and return the very first row; None once woken."""
        if self._here:
            return None if self._is_awake else self._here.initial()
        for process in self.processes:
            process.ask(INITIAL)
        return self.receive()

    def step(self, actions):
        """Take actions, as Environments.step does, and return the next row; None once woken."""
        self.send(actions)
        return self.receive()

    def send(self, actions):
        """Have the environments take actions; `row` stays as it is until `receive`."""
        if self._here:
            self._actions = np.array(actions)
            return
        self._shared[1].numpy()[:] = actions
        for process in self.processes:
            process.ask(STEP)

    def receive(self):
        """Wait until all have taken their actions, and return the next row; None once woken.

        Raises:
          EnvError: an environment raised, or returned what its spaces do not allow; or a process
            died time and again.
        """
        if self._here:
            return None if self._is_awake else self._here.step(self._actions)
        waiting = list(self.processes)
        while waiting and not self._is_awake:
            pipes = [process.pipe for process in waiting]
            sentinels = [process.sentinel for process in waiting]
            multiprocessing.connection.wait([*pipes, *sentinels, self._wake_reader], timeout=1)
            for process in list(waiting):
                cause = process.cause_of_death(self._patience)  # asked first: it may just answer
                if process.has_answered():
                    self._copy_row(process)
                elif cause:
                    self._cut_episodes(process.columns)
                    process.replace(cause)
                else:
                    continue
                waiting.remove(process)
        return None if self._is_awake else self.row

    def wake(self):
        """Have `receive`, `step` and `initial` return None from now on; for any thread."""
        self._is_awake = True
        self._wake_writer.close()

    def close(self):
        """End all processes. No thread may use this any more."""
        if self._here:
            self._here.close()
        self.wake()
        for process in self.processes:
            process.pipe.close()  # which it notices
        deadline = time.monotonic() + 3
        for process in self.processes:
            process.end(deadline - time.monotonic())

    def _allocate(self, sample_row):
        """Make the row, and shared memory for rows and actions, [N, ...] like a row [1, ...]."""
        self.row = map_nest(lambda a: np.zeros((self.num_envs, *a.shape[1:]), a.dtype), sample_row)
        sizes = []
        map_nest(lambda a: sizes.append(a.nbytes), self.row)
        check_shared_memory(sum(sizes), "rows of environments")
        shared = map_nest(lambda a: torch.from_numpy(a.copy()).share_memory_(), self.row)
        actions = torch.from_numpy(self.row["last_action"].copy()).share_memory_()
        self._shared = shared, actions

    def _copy_row(self, process):
        columns = process.columns

        def copy(target, source):
            target[columns] = source.numpy()[columns]

        # The row after a cut keeps the totals of the cut episodes, and their games are not counted.
        kept = (*TOTALS, "game_done") if process.is_new else ()
        for name in self.row.keys() - kept:
            map_nest(copy, self.row[name], self._shared[0][name])
        process.is_new = False

    def _cut_episodes(self, columns):
        """Write the row of environments that are lost; their frames stay as they were."""
        row = self.row
        for name in TOTALS:  # those of episodes that ended in the row before were counted then
            has_ended = row["game_done" if name.startswith("game") else "done"][columns]
            row[name][columns][has_ended] = 0
        for name in ("reward", "done", "terminated", "game_done"):
            row[name][columns] = 0
        row["truncated"][columns] = True
        row["last_action"][columns] = self._shared[1].numpy()[columns]


class Process:
    """A process that steps environments, as the main process sees it, and those that replace it."""

    def __init__(self, context, name, columns, arguments):
        self.name, self.columns = name, columns
        self.deaths, self._lookout = Deaths(MIN_STEPS), Lookout()
        self._context, self._arguments = context, arguments
        self.is_new = False  # in place of another one, without a row yet
        self._start()

    @property
    def pid(self):
        return self._process.pid

    @property
    def sentinel(self):
        return self._process.sentinel

    def ask(self, command):
        """Have it write the next row; the first one of a new process is that of a reset."""
        command = INITIAL if self.is_new else command
        self._lookout.look()
        self.is_asked, self._asked_at = True, time.monotonic()
        with contextlib.suppress(OSError):  # it has died, which shows soon
            self.pipe.send_bytes(command)

    def has_answered(self):
        """Return whether the row is written.

        Raises:
          EnvError: an environment raised.
        """
        try:
            if not self.pipe.poll():
                return False
            message = self.pipe.recv_bytes()
        except (EOFError, OSError):
            self._has_gone = True
            return False
        if message != DONE:
            _, text = ForkingPickler.loads(message)
            raise EnvError(f"{self.name} failed:\n{text}")
        self.is_asked = False
        self.deaths.count_work()
        return True

    def cause_of_death(self, patience):
        """Return why it has to be replaced; None where it has not."""
        self._lookout.look()
        if self.seconds_silent() > patience:
            return f"it was silent for {patience:.0f} s, and so was killed"
        if self._has_gone:
            self._process.join(1)  # it is about to end
        if self._process.is_alive():
            return "it closed its pipe" if self._has_gone else None
        return describe_exit(self._process)

    def seconds_silent(self):
        return self._lookout.seconds_silent(self._asked_at)

    def replace(self, cause):
        self.end(0)
        self.pipe.close()
        self.deaths.count()
        self.deaths.log(self.name, "steps", cause)
        self.is_new = True
        self._start()

    def end(self, patience):
        end_process(self._process, patience)

    def _start(self):
        self.pipe, far_end = multiprocessing.Pipe()
        create_env, seeds, name, *shared = self._arguments
        # Other seeds, so that the same games are not played again.
        seeds = [seed + self.deaths.total for seed in seeds]
        arguments = (step_environments, far_end, far_end, create_env, seeds, name, *shared)
        process = self._context.Process(target=actor_main, args=arguments)
        with far_end:
            start_process(process, self.name)
        self._process = process
        self.is_asked, self._asked_at, self._has_gone = False, time.monotonic(), False


def step_environments(pipe, create_env, seeds, name, row, actions):
    """Step environments whenever the main process asks for a row: what such a process does."""
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
            pipe.send_bytes(DONE)
