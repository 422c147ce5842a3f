# SPDX-License-Identifier: Apache-2.0
"""MonoBeast's rollout buffers in shared memory, and batches of them."""

import torch

from beast.errors import FlagError
from beast.learners.devices import DeviceCopies
from beast.learners.learner import Batch
from beast.nest import leaves_of, map_nest
from beast.parser import Parser
from beast.processes.machine import check_shared_memory


def _check_deterministic(flags, num_buffers):
    """Refuse flags that do not work with --deterministic."""
    num_envs = flags.num_actors * flags.envs_per_actor
    needed = {"batch_size": num_envs, "num_learner_threads": 1, "num_buffers": num_buffers}
    for name, value in needed.items():
        if getattr(flags, name) != value:
            raise FlagError(
                f"--{name} is {getattr(flags, name)}, but --deterministic makes each batch of one "
                f"rollout of each of the {num_envs} environments, while the next one is played: "
                f"give --{name} {value}"
            )


def choose_buffers(flags):
    """Choose num_buffers; refuse fewer than can be in use at once.

    With the least number, actors and learner wait for each other, so the default has room for one
    batch more. Further buffers wait in the full queue and increase the policy lag.
    """
    least = flags.num_actors * flags.envs_per_actor + flags.batch_size
    if flags.num_buffers is None:
        flags.num_buffers = least if flags.deterministic else least + flags.batch_size
        flags.chosen = [*flags.chosen, "num_buffers"]
    if flags.deterministic:
        _check_deterministic(flags, least)
    if flags.num_buffers < least:
        raise FlagError(
            f"--num_buffers is {flags.num_buffers}, but the actors fill --num_actors x "
            f"--envs_per_actor = {flags.num_actors} x {flags.envs_per_actor} buffers at once, and "
            f"the learner takes --batch_size = {flags.batch_size} more: give it at least {least}"
        )


def _describe_rollout(flags, row, agent_output, agent_state):
    """Return one rollout on the device "meta", which has no memory."""
    T = flags.unroll_length
    return {
        "rows": map_nest(lambda x: x.to("meta").new_empty(T + 1, *x.shape[2:]), row | agent_output),
        "initial_agent_state": map_nest(
            lambda s: s.to("meta").new_empty(s.shape[0], 1, *s.shape[2:]), agent_state
        ),
        "policy_version": torch.empty((), dtype=torch.int64, device="meta"),
        # The actor that filled the buffer.
        "actor": torch.empty((), dtype=torch.int64, device="meta"),
    }


def count_bytes(*sample):
    """Return the bytes of one rollout; the arguments are those of create_buffers."""
    return sum(x.nbytes for x in leaves_of(_describe_rollout(*sample)))


def create_buffers(flags, row, agent_output, agent_state):
    """Return the rollout buffers in shared memory: one tensor a key, [num_buffers, T + 1, ...].

    Args:
      row, agent_output: dicts of tensors [T, B, ...] (or nests of them), agent_state: nest of
        tensors [layers, B, ...]; all of them samples.

    Raises:
      FlagError: /dev/shm has no room for them.
    """
    M = flags.num_buffers
    lower = [f"--{name} ({getattr(flags, name)})" for name in ("num_actors", "envs_per_actor")]
    if "num_buffers" in Parser.flag_names(flags.program):  # not in dqn.py
        lower.insert(0, f"--num_buffers ({M})")
    advice = f", or lower {' or '.join(lower)}"
    num_bytes = M * count_bytes(flags, row, agent_output, agent_state)
    check_shared_memory(num_bytes, "the rollout buffers", advice)
    return map_nest(
        lambda x: torch.zeros(M, *x.shape, dtype=x.dtype).share_memory_(),
        _describe_rollout(flags, row, agent_output, agent_state),
    )


def write_agent_state(buffers, indices, agent_state):
    """Write the recurrent state before row 0, tensors [layers, N, ...], into N buffers."""

    def write(buffer, state):
        for i, index in enumerate(indices):
            buffer[index] = state[:, i : i + 1]

    map_nest(write, buffers["initial_agent_state"], agent_state)


def write_row(rows, indices, t, row):
    """Write row t, a dict of nests of arrays [N, ...], into N buffers, whose arrays are `rows`."""
    for key, value in row.items():
        map_nest(lambda b, a: b.__setitem__((indices, t), a), rows[key], value)


def read_batches(flags, actors, buffers, learner, run):
    """Yield one Batch of full buffers after the other, until the actors are closed.

    Each overwrites the one before. With --deterministic the buffers go back to the actors when the
    next batch is asked for, and so with the weights that were learned from this one.
    """
    T, B, copies = flags.unroll_length, flags.batch_size, DeviceCopies(learner.device)
    pin = learner.device.type == "cuda"
    rows = map_nest(
        lambda b: torch.empty(T + 1, B, *b.shape[2:], dtype=b.dtype, pin_memory=pin),
        buffers["rows"],
    )
    for indices in run.follow(iter(lambda: actors.take(B), None)):
        for i, m in enumerate(indices):
            map_nest(lambda x, b, i=i, m=m: x[:, i].copy_(b[m]), rows, buffers["rows"])
        agent_state = map_nest(
            lambda b, at=indices: torch.cat([b[m] for m in at], dim=1),
            buffers["initial_agent_state"],
        )
        versions = buffers["policy_version"][indices].tolist()
        sources = {"actors": buffers["actor"][indices].tolist()}
        if not flags.deterministic:
            actors.release(indices)
        device_rows, device_state = copies.copy((rows, agent_state))
        yield Batch(device_rows, device_state, rows, versions, sources)
        copies.wait()  # before the rows are overwritten
        if flags.deterministic:
            buffers["policy_version"][indices] = learner.weights.version
            actors.release(indices)
