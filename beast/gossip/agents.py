# SPDX-License-Identifier: Apache-2.0
"""Processes that play and learn by themselves, as the main process of gala.py sees them.

Each sends metrics through a pipe of its own, so that killing one at any point blocks no
other. One that dies is replaced. The main process has them hold still while it saves what they
have learned.
"""

import contextlib
import datetime
import logging
import threading
import time
from collections import deque

import torch
import torch.distributed as dist

from beast.errors import EnvError
from beast.learners.learner import Batch
from beast.nest import map_nest
from beast.processes.fork_server import child_main, start_fork_server
from beast.processes.supervisor import Supervisor
from beast.processes.watchdog import PATIENCE, Lookout
from beast.runs.diagnostics import is_finite
from beast.runs.run import ENDS, MAX_SKIPPED

NEVER = 2**62
# Limits on an agent's updates: after HOLD it stops until told to go on; after PACE it waits until
# the main process has counted those before.
HOLD, PACE = 0, 1
MIN_UPDATES = 100  # updates after which consecutive deaths are reset to 0
AHEAD = 2  # updates that agents in step make before the first of them is counted
HOLD_TIMEOUT = 20  # seconds for all agents to finish an update


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
        self._skipped = 0  # consecutive skipped updates

    def report(self, metrics, batch):
        """Count an update; give the main process its metrics, and rows in which episodes end.

        Raises:
          FloatingPointError: too many updates in a row were not finite: a replacement begins with
            the weights of another agent, if that sends it any.
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
            # Waiting for other agents is no silence.
            self._heartbeats[self.agent] = time.monotonic()
            time.sleep(0.0005)
        return True


class Agents:
    """Agent processes.

    To save, `hold` sets the limit HOLD. Each agent that meets it writes its state to shared memory,
    sends "held" and waits; the main process copies the states, and sends "go on".

    Args:
      flags: num_agents, seed, stall_timeout_s.
      game_returns: for each agent a list of the returns of its last 100 games; updated in place.
      learn_alone: what an agent does, called in its process with flags, an AgentLink and `args`.
      in_step: whether agents wait for each other in each update, with --exchange allreduce as with
        --deterministic. Then all are held after the same one, and the death of one ends the run.
      first_step: of the run. A replaced agent, or one of a resumed run, must not play the same
        games again.
      measure: called at each tick; returns more metrics, numbers by name.
    """

    def __init__(self, flags, game_returns, learn_alone, args, in_step, first_step, measure=dict):
        self._context = start_fork_server()
        self._flags, self._game_returns, self._first_step = flags, game_returns, first_step
        self._learn_alone, self._args, self._measure = learn_alone, args, measure
        self._in_step = in_step
        n = flags.num_agents
        self._rounds = torch.zeros(n, dtype=torch.int64).share_memory_()
        self._limits = torch.tensor([NEVER, AHEAD if in_step else NEVER]).share_memory_()
        self._heartbeats = torch.zeros(n, dtype=torch.float64).share_memory_()
        self._condition = threading.Condition()  # guards all attributes below
        # Agents that are not waited for: they hold still, or died at the end of the run.
        self._held, self._is_over, self._is_read = [False] * n, False, True
        # Whether each agent has saved its state since the last request to hold.
        self._has_saved = [False] * n
        self._supervisor = Supervisor(
            [f"agent {agent}" for agent in range(n)],
            self._create_process,
            self._heartbeat,
            PATIENCE * flags.stall_timeout_s,
            MIN_UPDATES,
            "updates",
        )
        self._supervisor.start()

    def updates(self):
        """Yield metrics and a Batch of each update of each agent, until all are held for good.

        Then agents that have not made an update yet, as they start, are not waited for.

        Raises:
          EnvError: an agent died repeatedly, or one that others wait for died.
        """
        try:
            yield from self._in_order() if self._in_step else self._as_they_come()
        finally:
            with self._condition:
                self._is_read = False
                self._condition.notify_all()

    def _in_order(self):
        """Yield one update of each agent in turn."""
        rounds = [deque() for _ in self._held]
        for update in self._as_they_come():
            rounds[update[0]].append(update)
            if all(rounds):
                yield from [updates.popleft() for updates in rounds]
                with self._condition:
                    self._limits[PACE] += 1

    def _as_they_come(self):
        children = self._supervisor.children
        while not (self._is_over and self._are_done()):
            if self._is_late():
                return
            # At the end, agents that are held or dead send nothing more.
            still = [c for c in children if not (self._held[c.number] and self._is_over)]
            for child, message in self._supervisor.news(0.1, still):
                if message is None:
                    self._replace(child)
                elif message[0] == "held":
                    self._note_held(child)
                else:
                    yield self._count_update(child, *message[1])

    def _are_done(self):
        """Return whether no update has to be waited for: agents that still start have none."""
        children = self._supervisor.children
        if self._in_step and any(child.work for child in children):
            return all(self._held)  # synchronous agents wait for each other
        agents = zip(self._held, children, strict=True)
        return all(held or not child.work for held, child in agents)

    def _is_late(self):
        """Return whether HOLD_TIMEOUT has passed since the end, for agents that wait for others."""
        if not (self._is_over and self._in_step):
            return False
        if self._supervisor.lookout.seconds_silent(self._end_time) < HOLD_TIMEOUT:
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
            lookout = Lookout()  # allows for time in which this process was stopped
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
                                self._supervisor.children[agent].pipe.send("go on")
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
                else:  # dead or late: its last published weights are complete
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
        if not self._in_step:  # else _is_late gives up all of them at once
            self._supervisor.patience = min(self._supervisor.patience, HOLD_TIMEOUT)
        self._supervisor.wake()

    def close(self):
        """End all processes."""
        self.finish()
        self._supervisor.close()

    def game_returns(self):
        """Return the mean of the last 100 games of each agent; None where there is none."""
        return [sum(games) / len(games) if games else None for games in self._game_returns]

    def waits(self):
        return {}

    def metrics(self):
        returns = {f"return_{agent}": mean for agent, mean in enumerate(self.game_returns())}
        restarts = {"agent_restarts": self._supervisor.num_deaths()}
        return returns | restarts | self._measure()

    def texts(self, metrics):
        return {}

    def silences(self):
        return self._supervisor.silences("plays and learns")

    def pids(self):
        return self._supervisor.pids()

    def _ask_to_hold(self):
        with self._condition:
            # Synchronous agents all stop at update limits[PACE].
            hold = min(self._limits[HOLD], self._limits[PACE]) if self._in_step else 0
            self._limits[HOLD] = hold

    def _heartbeat(self, agent):
        with self._condition:
            return None if self._held[agent] else self._heartbeats[agent].item()

    def _note_held(self, child):
        with self._condition:
            if self._limits[HOLD] == NEVER:  # the request to hold is over
                with contextlib.suppress(OSError):  # it has died, which shows soon
                    child.pipe.send("go on")
            else:
                self._held[child.number] = self._has_saved[child.number] = True
                self._condition.notify_all()

    def _count_update(self, child, metrics, rows):
        """Return an update as `updates` yields it."""
        agent, rows = child.number, map_nest(torch.from_numpy, rows)
        child.count_work()
        games = rows["game_return"][1:][rows["game_done"][1:]].tolist()
        self._game_returns[agent] = (self._game_returns[agent] + games)[-100:]
        return agent, metrics, Batch(rows, (), rows, [], {"agents": [agent]})

    def _replace(self, child):
        agent = child.number
        if self._in_step:
            raise EnvError(
                f"agent {agent} died, and with --exchange allreduce or --deterministic the others "
                f"cannot go on without it: {child.cause}"
            )
        with self._condition:
            is_over = self._is_over  # read once: another thread may set it
            self._held[agent] = is_over  # until the end of the run
            self._has_saved[agent] = False
            self._condition.notify_all()
        if is_over:
            logging.error("Agent %d ended before its last update was saved: %s", agent, child.cause)
        else:
            self._supervisor.restart(child)

    def _create_process(self, agent, num_deaths, pipe):
        seed = [self._flags.seed, 1 + agent, num_deaths, self._first_step]
        shared = self._rounds, self._limits, self._heartbeats
        link = AgentLink(agent, seed, num_deaths > 0, pipe, *shared)
        arguments = (self._learn_alone, pipe, self._flags, link, *self._args)
        return self._context.Process(target=child_main, args=arguments, kwargs={"niceness": 0})
