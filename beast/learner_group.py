# SPDX-License-Identifier: Apache-2.0
"""Several learners of one policy: each update sums what their batches give.

A learner is a rank of the group, with actors or streams of its own. W ranks with batches of B
rollouts are one learner with batches of W x B: gradients and metrics are summed, in one tensor and
one exchange an update. Clipping, the check that all is finite and the step of the optimizer come
after it, on all ranks alike, so that their weights stay equal to the last bit. A rank without a
batch gives zeros, so that the others go on. Rank 0 has the run's folder, its checkpoints and its
evaluations. How ranks are started and find each other is in torchrun.py.
"""

import contextlib
import datetime
import os
import pathlib
import signal

import torch
import torch.distributed as dist

from beast.errors import EnvError, FlagError
from beast.starvation import Starvation

TIMEOUT = 20  # seconds for an update, after which a rank that does not take part is lost
SEEDS_A_RANK = 2**20  # seeds of actors or streams, so that no two play the same games
# What a rank gives besides metrics: whether it has a batch, whether its gradient is not finite,
# whether it asks to stop; number and sum of returns, of episodes and of games.
OTHERS = 7


class Alone:
    """The group of a learner that is the only one of its policy."""

    rank, size, has_to_stop, by_torchrun, not_finite = 0, 1, False, False, ()

    def from_rank_0(self, function):
        return function()

    def check_same(self, what, value):
        pass

    def share_state(self, learner):
        pass

    def barrier(self):
        pass

    def sum(self, model, metrics):
        return metrics

    def share_returns(self, *returns):
        return returns

    def ask_to_stop(self, stop):
        stop.set()

    def batch_in_hand(self):
        return contextlib.nullcontext()


ALONE = Alone()
_current = ALONE


def current():
    """Return the group of this process."""
    return _current


def set_current(group):
    global _current
    _current = group


class LearnerGroup:
    """A group of learners, as one of them sees it. Its lock is held while `sum` waits for others.

    Args:
      rank, size: of this learner, and how many there are.
      device: "cuda" or "cpu", the type of the device that the learners compute on.

    Attributes:
      has_to_stop: whether one asked for it in the last exchange: all stop after the same update.
      not_finite: ranks that gave something that is not finite in the last exchange.
      num_batches: ranks that had a batch in the last exchange.
      starvation: whether this learner has batches.
    """

    by_torchrun = True

    def __init__(self, rank, size, device):
        self.rank, self.size = rank, size
        self.has_to_stop, self.not_finite, self.num_batches = False, [], 0
        timeout = datetime.timedelta(seconds=TIMEOUT)
        self._objects = dist.new_group(timeout=timeout)
        backend = "nccl" if device == "cuda" else "gloo"
        self._tensors = dist.new_group(timeout=timeout, backend=backend)
        self._processes = [None] * size
        dist.all_gather_object(self._processes, (_machine(), os.getpid()))
        self._layout = None  # numbers a metric, by name; unknown until some rank has a batch
        self._asks_to_stop = False
        self._has_summed = False  # since returns were shared
        self._returns = [], []  # of episodes and games that the others do not know yet
        self._shared_returns = [], []  # that exchanges have brought
        self.starvation = Starvation()

    def from_rank_0(self, function):
        """Return what `function` returns, which rank 0 alone calls, or raise its FlagError."""
        outcome = [None]
        if self.rank == 0:
            try:
                outcome = [(function(), None)]
            except FlagError as error:
                outcome = [(None, str(error))]
        dist.broadcast_object_list(outcome)
        value, error = outcome[0]
        if error is not None:
            raise FlagError(error if self.rank == 0 else f"rank 0 could not start: {error}")
        return value

    def check_same(self, what, value):
        """Refuse a rank whose value, a text or a dict, is not that of rank 0."""
        values = [None] * self.size
        dist.all_gather_object(values, value)
        for rank, other in enumerate(values):
            if other == values[0]:
                continue
            first, second = values[0], other
            if isinstance(other, dict):
                names = [n for n in first | other if first.get(n) != other.get(n)]
                first, second = ({n: v.get(n) for n in names} for v in (first, other))
            raise FlagError(f"the {what} of rank {rank} is {second}, that of rank 0 {first}")

    def share_state(self, learner):
        """Have all learners begin with the weights, optimizer and counts of rank 0."""
        tensors = learner.model.state_dict()
        layout = {name: f"{t.dtype} {list(t.shape)}" for name, t in tensors.items()}
        self.check_same("net", layout | {"order": list(tensors)})
        state = [None]
        if self.rank == 0:
            parts = learner.model, learner.optimizer, learner.scheduler
            state = [([part.state_dict() for part in parts], learner.stats)]
        dist.broadcast_object_list(state)
        (model, optimizer, scheduler), stats = state[0]
        if self.rank > 0:
            learner.model.load_state_dict(model)
            learner.optimizer.load_state_dict(optimizer)
            learner.scheduler.load_state_dict(scheduler)
            learner.stats.update(stats)
        self._buffers = {n: b.clone() for n, b in learner.model.named_buffers()}

    def barrier(self):
        """Wait until all learners have come so far, for as long as it takes."""
        dist.barrier()
        self.starvation = Starvation()  # its time begins here

    def sum(self, model, metrics):
        """Sum gradients, in place, and metrics over all learners.

        Args:
          metrics: of this learner's batch, tensors and numbers by name; empty where it has none.
            `moments`, a tensor [moments], is gathered instead.

        Returns:
          Metrics of all batches; empty where no learner has had one yet.

        Raises:
          EnvError: another learner has gone, or is silent.
        """
        self._has_summed = True
        self._check_buffers(model)
        if self._layout is None:
            self._agree_on_layout(metrics)
        if self._layout is None:
            return {}
        flat, num_gradients = self._flatten(model, metrics)

        def exchange():
            dist.all_reduce(flat, group=self._tensors)
            return flat[num_gradients:].double().cpu()

        numbers = self._exchange(exchange)
        sizes = [len(numbers) - self.size * self._row_size, self.size * self._row_size]
        there, table = numbers.split(sizes)
        self._unflatten(model, flat, there.tolist())
        return self._read_table(table.view(self.size, self._row_size))

    def _exchange(self, call):
        try:
            return call()
        except RuntimeError as error:
            self._kill_stopped_ranks()
            raise EnvError(
                f"another learner has ended, or has not answered for {TIMEOUT} s: see its log "
                f"({str(error).splitlines()[0]})"
            ) from error

    def _kill_stopped_ranks(self):
        """Kill ranks of this machine that are stopped: torchrun would give them 30 s to end."""
        for machine, pid in self._processes:
            with contextlib.suppress(OSError):
                status = pathlib.Path(f"/proc/{pid}/stat").read_text()
                if machine == _machine() and status.rpartition(")")[2].split()[0] == "T":
                    os.kill(pid, signal.SIGKILL)

    def _check_buffers(self, model):
        for name, buffer in model.named_buffers():
            if not torch.equal(buffer, self._buffers[name]):
                raise FlagError(
                    f"a forward pass changes the net's buffer {name!r}, of which each learner "
                    "would have another one: use a layer without such statistics (GroupNorm or "
                    "LayerNorm for BatchNorm)"
                )

    def _agree_on_layout(self, metrics):
        own = {name: torch.as_tensor(value).numel() for name, value in metrics.items()}
        answers = [None] * self.size
        answer = own, self._asks_to_stop
        self._exchange(lambda: dist.all_gather_object(answers, answer, group=self._objects))
        layouts = [layout for layout, _ in answers if layout]
        for layout in layouts:
            if layout != layouts[0]:
                raise ValueError(f"learners have other metrics: {layout} and {layouts[0]}")
        self.has_to_stop = any(asks for _, asks in answers)
        if layouts:
            self._layout = layouts[0]
            self._row_size = OTHERS + sum(self._layout.values())

    def _flatten(self, model, metrics):
        """Return one tensor, and how much of it is gradients; then which there are, and a table."""
        parameters = list(model.parameters())
        is_double = any(p.dtype == torch.float64 for p in parameters)
        dtype, device = torch.float64 if is_double else torch.float32, parameters[0].device
        gradients = torch.cat(
            [
                (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1).to(dtype)
                for p in parameters
            ]
        )
        row = [bool(metrics), False, self._asks_to_stop]
        for returns in self._returns:
            row += [len(returns), sum(returns)]
            returns.clear()
        row = torch.tensor(row + [0] * (self._row_size - OTHERS), dtype=dtype, device=device)
        row[1] = ~gradients.isfinite().all()
        if metrics:
            values = {n: torch.as_tensor(v, device=device).flatten() for n, v in metrics.items()}
            if {name: value.numel() for name, value in values.items()} != self._layout:
                raise ValueError(
                    f"metrics have to be the same in each update, {list(self._layout)}, but are "
                    f"{list(metrics)}"
                )
            row[OTHERS:] = torch.cat([values[name].to(dtype) for name in self._layout])
        there = torch.tensor([p.grad is not None for p in parameters], dtype=dtype, device=device)
        table = torch.zeros(self.size, self._row_size, dtype=dtype, device=device)
        table[self.rank] = row
        return torch.cat([gradients, there, table.flatten()]), gradients.numel()

    def _unflatten(self, model, flat, there):
        parameters = list(model.parameters())
        parts = flat[: sum(p.numel() for p in parameters)].split([p.numel() for p in parameters])
        for parameter, part, is_there in zip(parameters, parts, there, strict=True):
            if not is_there:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = part.view(parameter.shape).to(parameter.dtype, copy=True)
            else:
                parameter.grad.copy_(part.view(parameter.shape))

    def _read_table(self, table):
        """Return the metrics of a table [size, numbers of a rank]; remember what else is in it."""
        self.num_batches = int(table[:, 0].sum())
        self.not_finite = [i for i, row in enumerate(table) if row[1] or not row.isfinite().all()]
        self.has_to_stop = bool(table[:, 2].any())
        for returns, begin in zip(self._shared_returns, (3, 5), strict=True):
            for count, total in table[:, begin : begin + 2].tolist():
                returns += [total / count] * int(count) if count else []
        parts = table[:, OTHERS:].split(list(self._layout.values()), dim=1)
        return {
            name: part if name == "moments" else part.sum()
            for name, part in zip(self._layout, parts, strict=True)
        }

    def share_returns(self, *returns):
        """Return returns of episodes and games that ended at any learner: lists.

        These go to the others with the next exchange; those of the exchanges since the last call
        are returned, each as the mean of what its learner had.

        Raises:
          FlagError: there was no sum since the last call.
        """
        if not self._has_summed:
            raise FlagError(
                "torchrun has started several learners, but this program's `learn` does not sum "
                "over them, as docs/learners.md shows: start it without torchrun"
            )
        self._has_summed = False
        for pending, new in zip(self._returns, returns, strict=True):
            pending += new
        shared, self._shared_returns = self._shared_returns, ([], [])
        return shared

    def ask_to_stop(self, stop):
        """Have all learners stop after one of the next updates."""
        self._asks_to_stop = True
        if self.size == 1:
            stop.set()

    def batch_in_hand(self):
        return self.starvation.batch_in_hand()


def _machine():
    """Return what the processes have in common that see each other by their ids."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, os.readlink("/proc/self/ns/pid")
