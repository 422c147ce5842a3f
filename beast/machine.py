# SPDX-License-Identifier: Apache-2.0
"""What a run may use of this machine, and how many processes it therefore starts. No torch here."""

import logging
import os
import pathlib

from beast.shared_memory import count_learners, has_shared_memory

# The rollouts under way, in batches: about the age of the acting policies, in updates. It is 2.4 in
# the published curves of Atari. In MinAtar 8 updates cost at most a tenth of the return, and 64 a
# sixth in one game of two (results/README.md); this is between them.
MAX_LAG = 16
FEW_CORES, FEW_PROCESSES = 2, 2  # few cores have the processes of the published curves
MAX_ENVS, MIN_ENVS = 8, 4  # a process or stream; with fewer, most of the time goes into messages
# Of memory: an actor or a server with 8 Atari games takes 50 to 80 MiB (benchmarks/memory.py).
PROCESS_BYTES, LEARNER_BYTES = 2**27, 2**32
PROC, CGROUPS = pathlib.Path("/proc"), pathlib.Path("/sys/fs/cgroup")


def count_cores():
    """Return how many cores this process may use, at least 1.

    It is the least of its affinity and its control groups' quotas, shared equally among the
    learners that torchrun starts on this machine.
    """
    quotas = [text.split() for text in _read_limits("cpu", "cpu.max")]  # version 2, in microseconds
    names = "cpu.cfs_quota_us", "cpu.cfs_period_us"  # version 1
    quotas += zip(*(_read_limits("cpu", name) for name in names), strict=False)
    limited = [int(quota) / int(period) for quota, period in quotas if quota not in ("max", "-1")]
    return max(1, int(min([len(os.sched_getaffinity(0)), *limited])) // count_learners())


def count_memory():
    """Return the bytes of memory that this process may use."""
    lines = [line.split() for line in (PROC / "meminfo").read_text().splitlines()]
    available = next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")
    limits = [
        *_read_limits("memory", "memory.max"),
        *_read_limits("memory", "memory.limit_in_bytes"),
    ]
    return min([available, *(int(limit) for limit in limits if limit != "max")]) // count_learners()


def _read_limits(controller, name):
    """Return the contents of a file of this process's control groups, from the innermost on."""
    found = []
    file = PROC / "self/cgroup"
    for line in file.read_text().splitlines() if file.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = CGROUPS / controller if controllers else CGROUPS
        group = top / path.strip("/")  # a container may see only what is above it, as its own
        found += [group, *(parent for parent in group.parents if parent.is_relative_to(top))]
    files = [folder / name for folder in found]
    return [file.read_text().strip() for file in files if file.is_file()]


def choose_actors(flags, has_gpu):
    """Fill in num_actors and envs_per_actor where they are open; flags.chosen then names them.

    Where the learner has no GPU, it gets half of the cores: learning takes about as long as acting.
    """
    cores = FEW_CORES if flags.deterministic else count_cores()
    flags.chosen = [n for n in ("num_actors", "envs_per_actor") if getattr(flags, n) is None]
    if flags.num_actors is None:
        most = cores - 1 if has_gpu else cores // 2
        flags.num_actors = _count_processes(flags, cores, most, flags.envs_per_actor)
    if flags.envs_per_actor is None:
        flags.envs_per_actor = _count_envs(flags, flags.num_actors)
    _log_choice(flags, cores)


def fit_actors(flags, rollout_bytes):
    """Lower num_actors and num_buffers, where they were chosen, to what /dev/shm has room for."""
    wanted = flags.num_actors
    if flags.deterministic or not {"num_actors", "num_buffers"} <= set(flags.chosen):
        return
    while flags.num_actors > 1 and not has_shared_memory(flags.num_buffers * rollout_bytes):
        flags.num_actors -= 1
        flags.num_buffers -= flags.envs_per_actor
    if flags.num_actors < wanted:
        logging.warning(
            "/dev/shm has no room for the rollouts of %d actors: --num_actors is %d",
            *(wanted, flags.num_actors),
        )


def choose_servers(flags, has_gpu):
    """Fill in num_servers, num_actors (streams) and envs_per_stream where they are open.

    Nothing where servers run already. Many servers get two streams each, so that one plays while
    the rows of the other are answered.
    """
    flags.chosen = []
    if flags.server_addresses:
        return
    names = ("num_servers", "num_actors", "envs_per_stream")
    flags.chosen = [name for name in names if getattr(flags, name) is None]
    cores = count_cores()
    if flags.num_servers is None:
        most = cores if has_gpu else cores // 2
        most = _count_processes(flags, cores, most, flags.envs_per_stream)
        flags.num_servers = min(most, flags.num_actors or most)
    if flags.num_actors is None:
        twice = 2 * flags.num_servers * (flags.envs_per_stream or MIN_ENVS)
        streams = 2 if cores > FEW_CORES and twice <= MAX_LAG * flags.batch_size else 1
        flags.num_actors = streams * flags.num_servers
    if flags.envs_per_stream is None:
        flags.envs_per_stream = _count_envs(flags, flags.num_actors)
    _log_choice(flags, cores)


def _count_processes(flags, cores, most, num_envs):
    """Return how many processes play: at most so many, and as lag and memory allow."""
    if cores <= FEW_CORES:
        return FEW_PROCESSES
    by_lag = MAX_LAG * flags.batch_size // (num_envs or MIN_ENVS)
    by_memory = (count_memory() - LEARNER_BYTES) // PROCESS_BYTES
    return max(FEW_PROCESSES, min(most, by_lag, by_memory))


def _count_envs(flags, num_groups):
    """Return how many environments each actor or stream steps at once."""
    return max(1, min(MAX_ENVS, MAX_LAG * flags.batch_size // num_groups))


def _log_choice(flags, cores):
    if flags.chosen:
        logging.info(
            "Chosen for %d cores, %.0f GiB of memory and at most %d environments (%d batches): %s",
            *(cores, count_memory() / 2**30, MAX_LAG * flags.batch_size, MAX_LAG),
            ", ".join(f"--{name} {getattr(flags, name)}" for name in flags.chosen),
        )
