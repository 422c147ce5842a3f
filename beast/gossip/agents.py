# SPDX-License-Identifier: Apache-2.0
"""Processes that play and learn by themselves, as the main process of gala.py sees them.

Each sends metrics through a pipe of its own, so that one that is killed, at whatever point, jams
nobody. One that dies is replaced. The main process has them hold still while it saves what they
have learned.
"""

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import threading
import time
from collections import deque

import torch

from beast.errors import EnvError
from beast.gossip.agent_link import HOLD, NEVER, PACE, AgentLink
from beast.learners.learner import Batch
from beast.nest import map_nest
from beast.processes.actor_process import actor_main
from beast.processes.deaths import Deaths, describe_exit
from beast.processes.fork_server import end_process, start_process
from beast.processes.watchdog import PATIENCE, Lookout

MIN_UPDATES = 100  # that end a series of deaths
AHEAD = 2  # updates that agents in step make before the first of them is counted
HOLD_TIMEOUT = 20  # seconds for all agents to finish an update


class Agents:
    """Agent processes.

    Args:
      flags: num_agents, seed, stall_timeout_s.
      game_returns: for each agent a list of the returns of its last 100 games; updated in place.
      context: as of start_fork_server.
      learn_alone: what an agent does, called in its process with flags, an AgentLink and `args`.
      in_step: whether agents wait for each other in each update, with --exchange allreduce as with
        --deterministic. Then all are held after the same one, and the death of one ends the run.
      first_step: of the run. A replaced agent, or one of a resumed run, must not play the same
        games again.
      measure: called at each tick; returns more metrics, numbers by name.
    """

    def __init__(
        self, flags, game_returns, context, learn_alone, args, in_step, first_step, measure=dict
    ):
        self._flags, self._game_returns = flags, game_returns
        self._context, self._first_step = context, first_step
        self._learn_alone, self._args, self._measure = learn_alone, args, measure
        self._in_step, self._patience = in_step, PATIENCE * flags.stall_timeout_s
        n = flags.num_agents
        self._rounds = torch.zeros(n, dtype=torch.int64).share_memory_()
        self._limits = torch.tensor([NEVER, AHEAD if in_step else NEVER]).share_memory_()
        self._heartbeats = torch.zeros(n, dtype=torch.float64).share_memory_()
        self._lookout = Lookout()
        self._condition = threading.Condition()  # guards what follows
        self._held, self._is_over, self._is_read = [False] * n, False, True
        self._has_saved = [False] * n  # what it has learned, since it was last asked to hold
        self._deaths = [Deaths(MIN_UPDATES) for _ in range(n)]
        self._processes, self._pipes = [None] * n, [None] * n
        self._wake_reader, self._wake_writer = multiprocessing.Pipe(duplex=False)
        with contextlib.ExitStack() as stack:  # which ends those before one that does not start
            stack.callback(self.close)
            for agent in range(n):
                self._start(agent)
            stack.pop_all()

    def updates(self):
        """Yield metrics and a Batch of each update of each agent, until all are held for good.

        Then agents that have not made an update yet, as they start, are not waited for.

        Raises:
          EnvError: an agent died time and again, or one that others wait for.
        """
        try:
            yield from self._in_order() if self._in_step else self._as_they_come()
        finally:
            with self._condition:
                self._is_read = False
                self._condition.notify_all()

    def _in_order(self):
        """Yield one update of each agent in turn."""
        rounds = [deque() for _ in self._processes]
        for update in self._as_they_come():
            rounds[update[0]].append(update)
            if all(rounds):
                yield from [updates.popleft() for updates in rounds]
                with self._condition:
                    self._limits[PACE] += 1

    def _as_they_come(self):
        while not (self._is_over and self._are_done()):
            self._lookout.look()
            if self._is_late():
                return
            # At the end, agents that are held or dead send nothing more.
            agents = [i for i, held in enumerate(self._held) if not (held and self._is_over)]
            sources = {self._pipes[agent]: agent for agent in agents}
            sources |= {self._processes[agent].sentinel: agent for agent in agents}
            wake = [] if self._is_over else [self._wake_reader]
            ready = multiprocessing.connection.wait([*sources, *wake], timeout=0.1)
            ready = {sources[source] for source in ready if source in sources}
            # Asked for before messages are read, so that the last ones are not lost.
            alive = {agent: self._processes[agent].is_alive() for agent in ready}
            # The dead first: the sums of others fail because of them.
            for agent in sorted(ready, key=lambda agent: (alive[agent], agent)):
                cause = yield from self._read(agent)
                if cause or not alive[agent]:
                    self._replace(agent, cause)
            is_short = self._is_over and not self._in_step  # in step others wait for each one
            patience = min(self._patience, HOLD_TIMEOUT) if is_short else self._patience
            for agent, seconds in self._seconds_silent():
                if seconds > patience and self._processes[agent].is_alive():
                    logging.warning("Agent %d was silent for %.0f s: killing it", agent, seconds)
                    self._processes[agent].kill()
                    self._heartbeats[agent] = time.monotonic()  # it takes a moment to end

    def _are_done(self):
        """Return whether no update has to be waited for: agents that still start have none."""
        if self._in_step and any(deaths.has_worked for deaths in self._deaths):
            return all(self._held)  # since they wait for each other
        agents = zip(self._held, self._deaths, strict=True)
        return all(held or not deaths.has_worked for held, deaths in agents)

    def _is_late(self):
        """Return whether HOLD_TIMEOUT has passed since the end, for agents that wait for others."""
        if not (self._is_over and self._in_step):
            return False
        if self._lookout.seconds_silent(self._end_time) < HOLD_TIMEOUT:
            return False
        late = [agent for agent, held in enumerate(self._held) if not held]
        logging.error(
            "Agents %s have not finished their last update in %d s: it is lost", late, HOLD_TIMEOUT
        )
        return True

    @contextlib.contextmanager
    def hold(self):
        """Have all agents hold still in this block; yield for each if it has shared its state.

        One that has died, or is late, has not. Another thread has to follow `updates` meanwhile,
        unless they are held for good.
        """
        self._ask_to_hold()
        with self._condition:
            lookout = Lookout()  # to wait longer where this process was stopped
            begin = time.monotonic()
            while not (all(self._held) or not self._is_read) and (
                lookout.seconds_silent(begin) < HOLD_TIMEOUT
            ):
                self._condition.wait(1)
                lookout.look()
            if self._is_read and not all(self._held):
                late = [agent for agent, held in enumerate(self._held) if not held]
                logging.warning(
                    "Agents %s have not finished an update for %d s", late, HOLD_TIMEOUT
                )
        try:
            yield list(self._has_saved)
        finally:
            with self._condition:
                if not self._is_over:
                    self._limits[HOLD] = NEVER
                    for agent, held in enumerate(self._held):
                        if held:
                            self._heartbeats[agent] = time.monotonic()
                            with contextlib.suppress(OSError):
                                self._pipes[agent].send("go on")
                    self._held = [False] * len(self._held)
                    self._has_saved = list(self._held)

    @contextlib.contextmanager
    def hold_and_copy(self, population, optimizer, memory):
        """Have all agents hold still in this block, in which a Population has what they have.

        Args:
          optimizer: of the population, which has the state of theirs.
          memory: AgentMemory, into which an agent saves before it holds.
        """
        with self.hold() as has_saved:
            for agent, (net, is_new) in enumerate(zip(population.agents, has_saved, strict=True)):
                if is_new:
                    memory.load(agent, net, optimizer)
                else:  # it is dead or late, but what it has sent is whole
                    memory.mailboxes.weights[agent].load_into(net)
                if (mean := self.game_returns()[agent]) is not None:
                    population.returns[agent] = mean
            yield

    def finish(self):
        """Hold all agents for good; for any thread."""
        with self._condition:
            if self._is_over:
                return
            self._is_over, self._end_time = True, time.monotonic()
            self._ask_to_hold()
        self._wake_writer.close()

    def close(self):
        """End all processes."""
        self.finish()
        for pipe in filter(None, self._pipes):
            pipe.close()  # which they notice
        deadline = time.monotonic() + 3
        for process in filter(None, self._processes):
            end_process(process, deadline - time.monotonic())

    def game_returns(self):
        """Return the mean of the last 100 games of each agent; None where there is none."""
        return [sum(games) / len(games) if games else None for games in self._game_returns]

    def waits(self):
        return {}

    def metrics(self):
        returns = {f"return_{agent}": mean for agent, mean in enumerate(self.game_returns())}
        restarts = {"agent_restarts": sum(deaths.total for deaths in self._deaths)}
        return returns | restarts | self._measure()

    def texts(self, metrics):
        return {}

    def silences(self):
        return [
            (f"agent {agent}", "plays and learns", seconds, self._processes[agent].pid)
            for agent, seconds in self._seconds_silent()
        ]

    def pids(self):
        return [process.pid for process in self._processes]

    def _ask_to_hold(self):
        with self._condition:
            # In step every agent comes as far as PACE, and none goes beyond.
            hold = min(self._limits[HOLD], self._limits[PACE]) if self._in_step else 0
            self._limits[HOLD] = hold

    def _seconds_silent(self):
        with self._condition:
            return [
                (agent, self._lookout.seconds_silent(beat))
                for agent, beat in enumerate(self._heartbeats.tolist())
                if not self._held[agent]
            ]

    def _read(self, agent):
        """Handle what an agent has sent; return why it has failed, if it has."""
        try:
            while self._pipes[agent].poll():
                kind, content = self._pipes[agent].recv()
                if kind == "error":
                    return content
                if kind == "held":
                    with self._condition:
                        if self._limits[HOLD] == NEVER:  # too late
                            self._pipes[agent].send("go on")
                        else:
                            self._held[agent] = self._has_saved[agent] = True
                            self._condition.notify_all()
                    return None
                metrics, rows = content
                rows = map_nest(torch.from_numpy, rows)
                self._deaths[agent].count_work()
                games = rows["game_return"][1:][rows["game_done"][1:]].tolist()
                self._game_returns[agent] = (self._game_returns[agent] + games)[-100:]
                yield agent, metrics, Batch(rows, (), rows, [], {"agents": [agent]})
        except (EOFError, OSError):
            pass  # it has died
        return None

    def _replace(self, agent, cause):
        process = self._processes[agent]
        end_process(process, 1)
        cause = cause or describe_exit(process)
        if self._in_step:
            raise EnvError(
                f"agent {agent} died, and with --exchange allreduce or --deterministic the others "
                f"cannot go on without it: {cause}"
            )
        if self._is_over:
            logging.error("Agent %d ended before its last update was saved: %s", agent, cause)
        else:
            self._deaths[agent].count()
            self._deaths[agent].log(f"agent {agent}", "updates", cause)
        with self._condition:
            self._held[agent] = self._is_over  # then for good
            self._has_saved[agent] = False
            self._condition.notify_all()
        if not self._is_over:
            self._pipes[agent].close()
            self._start(agent)

    def _start(self, agent):
        pipe, far_end = multiprocessing.Pipe()
        deaths = self._deaths[agent].total
        seed = [self._flags.seed, 1 + agent, deaths, self._first_step]
        shared = self._rounds, self._limits, self._heartbeats
        self._heartbeats[agent] = time.monotonic()
        link = AgentLink(agent, seed, deaths > 0, far_end, *shared)
        arguments = (self._learn_alone, far_end, self._flags, link, *self._args)
        process = self._context.Process(target=actor_main, args=arguments, kwargs={"niceness": 0})
        try:
            with far_end:
                start_process(process, f"agent {agent}")
        except EnvError:
            pipe.close()
            raise
        self._processes[agent], self._pipes[agent] = process, pipe
