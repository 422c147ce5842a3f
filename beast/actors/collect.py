# SPDX-License-Identifier: Apache-2.0
"""Rollouts collected in the learner's own thread: no actors, no lag."""

import itertools

import torch

from beast.learners.devices import autocast, to_float32
from beast.learners.learner import Batch
from beast.nest import map_nest

INPUTS = ("frame", "reward", "done", "last_action")  # keys of a row that are inputs of the net


def _write_row(rows, t, row):
    """Write row t, a dict of nests of [n, ...]; return False if it is None."""
    for key, value in (row or {}).items():
        map_nest(lambda x, a: x[t].copy_(torch.as_tensor(a)), rows[key], value)
    return row is not None


@torch.no_grad()
def _play(flags, model, device, groups, parts, agent_states):
    """Fill rollouts; return whether they are complete.

    Args:
      parts: the rows of each group, [T + 1, n, ...].
      agent_states: a list of the recurrent state of each group, which is updated.
    """
    for part in parts:
        map_nest(lambda x: x[0].copy_(x[-1]), part)
    # Weights are cast once within one autocast block.
    with autocast(flags, device):
        for t, i in itertools.product(range(flags.unroll_length), range(len(groups))):
            group, part = groups[i], parts[i]
            if t > 0 and not _write_row(part, t, group.receive()):
                return False
            inputs = {k: map_nest(lambda x, t=t: x[t : t + 1].to(device), part[k]) for k in INPUTS}
            outputs, agent_states[i] = to_float32(model(inputs, agent_states[i]))
            _write_row(part, t + 1, {name: x[0] for name, x in outputs.items()})
            group.send(part["action"][t + 1].numpy())
    return all([_write_row(p, -1, g.receive()) for g, p in zip(groups, parts, strict=True)])


def collect(flags, model, groups, sample_rows):
    """Yield one Batch of rollouts after the other, until woken; each overwrites the one before.

    As MonoBeast's: rows [T + 1, N, ...], of which row 0 is the last row of the rollout before it,
    and in row t + 1 the answer to row t. `agent_state` is a pair: of the recurrent states before
    the first row, and before the last one.

    Args:
      flags: unroll_length T, env, and those of autocast.
      model: the net that acts; not copied.
      groups: ParallelEnvironments, each with as many of the N environments; one is stepped while
        the next is answered.
      sample_rows: rows and outputs [T, B, ...], of any T and B.
    """
    n, device = groups[0].num_envs, next(model.parameters()).device
    shape = flags.unroll_length + 1, n * len(groups)
    rows = map_nest(lambda x: torch.zeros(*shape, *x.shape[2:], dtype=x.dtype), sample_rows)
    parts = [map_nest(lambda x, i=i: x[:, i * n : (i + 1) * n], rows) for i in range(len(groups))]
    state = map_nest(lambda x: x.to(device), model.initial_state(n))
    agent_states = [state] * len(groups)
    for group, part in zip(groups, parts, strict=True):
        if not _write_row(part, -1, group.initial()):
            return
    while True:
        first = map_nest(lambda *x: torch.cat(x, dim=1), *agent_states)
        if not _play(flags, model, device, groups, parts, agent_states):
            return
        last = map_nest(lambda *x: torch.cat(x, dim=1), *agent_states)
        device_rows = map_nest(lambda x: x.to(device), rows)
        yield Batch(device_rows, (first, last), rows, [], {"environments": flags.env})
