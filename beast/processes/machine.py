# SPDX-License-Identifier: Apache-2.0
"""Cores and memory that a run may use, and default numbers of processes. No torch here."""

import ctypes
import logging
import os
import pathlib
import shutil

from beast.errors import FlagError

# The rollouts under way, in batches: about the age of the acting policies, in updates. It is 2.4 in
# the published curves of Atari. In MinAtar 64 updates cost nothing, and 256 a third in one game of
# two (results/staleness/README.md), but Pong at 64 learned more slowly (results/tuning/README.md).
MAX_LAG = 16
FEW_CORES, FEW_PROCESSES = 2, 2  # few cores have the processes of the published curves
MAX_ENVS, MIN_ENVS = 8, 4  # a process or stream; with fewer, most of the time goes into messages
# Of memory: an actor or a server with 8 Atari games takes 50 to 80 MiB, a learner 340 to 620, and
# 1,010 with the deep net (benchmarks/memory.py). The rest is for activations of larger batches,
# such as 1.3 GiB for 32 rollouts of the deep net.
PROCESS_BYTES, LEARNER_BYTES = 2**27, 2**31
PROC, CGROUPS = pathlib.Path("/proc"), pathlib.Path("/sys/fs/cgroup")


def count_cores():
    """Return the number of cores that this process may use, at least 1.

    It is the least of its affinity and its control groups' quotas, shared equally among the
    learners that torchrun starts on this machine.
    """
    limits = [len(os.sched_getaffinity(0))]
    names = "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"  # of version 2, and two of version 1
    for both, quota, period in _read_groups("cpu", names):
        quota, period = both.split() or (quota, period)
        if quota not in ("", "max", "-1"):
            limits.append(int(quota) / int(period))
    return max(1, int(min(limits)) // count_learners())


def count_memory():
    """Return the bytes of free memory that this process may use."""
    lines = [line.split() for line in (PROC / "meminfo").read_text().splitlines()]
    free = [next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")]
    names = "memory.max", "memory.current", "memory.stat"  # of version 2, and of version 1:
    names += "memory.limit_in_bytes", "memory.usage_in_bytes"
    for limit, used, stat, old_limit, old_used in _read_groups("memory", names):
        limit, used = limit or old_limit, used or old_used or 0
        if limit not in ("", "max"):
            stat = dict(line.split() for line in stat.splitlines())
            # Files in memory count as used, but make room.
            names = "inactive_file", "active_file"
            cache = sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in names)
            free.append(max(0, int(limit) - max(0, int(used) - cache)))
    return min(free) // count_learners()


def check_memory(num_bytes, flag, number):
    """Refuse so many items, the value of a flag, for which the memory has no room."""
    if num_bytes > (free := count_memory()):
        raise FlagError(
            f"{flag} {number:,} takes {num_bytes / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB of "
            f"memory are free: give at most {int(0.9 * number * free / num_bytes):,}"
        )


def _read_groups(controller, names):
    """Return the contents of files of this process's control groups, the innermost first.

    It is a list of strings for each group; "" where there is no such file.
    """
    folders = []
    file = PROC / "self/cgroup"
    for line in file.read_text().splitlines() if file.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = CGROUPS / controller if controllers else CGROUPS
        group = top / path.strip("/")  # a container may see only what is above it, as its own
        folders += [group, *(parent for parent in group.parents if parent.is_relative_to(top))]
    files = [[folder / name for name in names] for folder in folders]
    return [[f.read_text().strip() if f.is_file() else "" for f in group] for group in files]


def choose_actors(flags, has_gpu):
    """Choose num_actors and envs_per_actor if not given; flags.chosen then names them.

    Without a GPU the learner gets half of the cores: learning takes about as long as acting.
    """
    reasons, limits = {}, {"lag": MAX_LAG * flags.batch_size}  # of all environments
    if flags.num_buffers is not None and not flags.deterministic:
        limits["--num_buffers"] = flags.num_buffers - flags.batch_size
    if flags.num_actors is None:
        cores = FEW_CORES if flags.deterministic else count_cores()
        most, num_envs = cores - 1 if has_gpu else cores // 2, flags.envs_per_actor
        flags.num_actors, reason = _count_processes(cores, most, limits, num_envs)
        reasons["num_actors"] = reason
    if flags.envs_per_actor is None:
        flags.envs_per_actor, reason = _count_envs(limits, flags.num_actors)
        reasons["envs_per_actor"] = reason
    flags.chosen = [*flags.chosen, *reasons]
    _log_choice(flags, reasons, flags.deterministic)


def fit_actors(flags, rollout_bytes):
    """Lower num_actors and num_buffers, if not given, to fit into shared memory."""
    wanted = flags.num_actors
    if flags.deterministic or not {"num_actors", "num_buffers"} <= set(flags.chosen):
        return
    while flags.num_actors > 1 and not has_shared_memory(flags.num_buffers * rollout_bytes):
        flags.num_actors -= 1
        flags.num_buffers -= flags.envs_per_actor
    if flags.num_actors < wanted:
        logging.warning(
            f"Shared memory has no room for the rollouts of {wanted} actors: --num_actors is "
            f"{flags.num_actors}"
        )


def choose_servers(flags, has_gpu):
    """Choose num_servers, num_actors (streams) and envs_per_stream if not given.

    Many servers get two streams each, so that one plays while the rows of the other are answered.
    """
    reasons, limits = {}, {"lag": MAX_LAG * flags.batch_size}  # of all environments
    cores = count_cores()
    if flags.num_servers is None:
        most, num_envs = cores if has_gpu else cores // 2, flags.envs_per_stream
        flags.num_servers, reason = _count_processes(cores, most, limits, num_envs)
        if flags.num_actors and flags.num_actors < flags.num_servers:
            flags.num_servers, reason = flags.num_actors, "--num_actors"
        reasons["num_servers"] = reason
    if flags.num_actors is None:
        twice = 2 * flags.num_servers * (flags.envs_per_stream or MIN_ENVS)
        streams = 2 if cores > FEW_CORES and twice <= limits["lag"] else 1
        flags.num_actors = streams * flags.num_servers
        few = "cores" if cores <= FEW_CORES else "lag"
        reasons["num_actors"] = "two for each server" if streams == 2 else few
    if flags.envs_per_stream is None:
        flags.envs_per_stream, reason = _count_envs(limits, flags.num_actors)
        reasons["envs_per_stream"] = reason
    flags.chosen = [*flags.chosen, *reasons]
    _log_choice(flags, reasons)


def keep_freed_memory():
    """Make malloc keep large freed blocks, instead of faulting them in at each update.

    On a CPU this makes learning a fifth faster, and a third with large batches
    (benchmarks/README.md). Call it before any thread starts: malloc gives the arena of a thread
    that has ended to the next one, a learner's, and only the first arena holds blocks above 64 MiB.
    glibc only; a no-op elsewhere.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
    mallopt(M_ARENA_MAX, 1)
    # glibc before 2.35 allows no more than half of an arena of its threads.
    _ = mallopt(M_MMAP_THRESHOLD, 2**30) or mallopt(M_MMAP_THRESHOLD, 2**25)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def _count_processes(cores, most, limits, num_envs):
    """Return the number of processes, and its limit: a maximum, one of `limits`, or memory.

    Args:
      limits: largest numbers of environments in all, by reason.
      num_envs: of a process or stream; None if not given.
    """
    if cores <= FEW_CORES:
        return FEW_PROCESSES, f"for {FEW_CORES} cores or fewer"
    bounds = {"cores": most} | {why: n // (num_envs or MIN_ENVS) for why, n in limits.items()}
    bounds["memory"] = (count_memory() - LEARNER_BYTES) // PROCESS_BYTES
    return _least(bounds, 1 if num_envs else FEW_PROCESSES)


def _count_envs(limits, num_groups):
    """Return the number of environments of an actor or stream, and its limit."""
    bounds = {f"at most {MAX_ENVS}": MAX_ENVS}
    return _least(bounds | {why: n // num_groups for why, n in limits.items()}, 1)


def _least(bounds, minimum):
    name = min(bounds, key=bounds.get)
    return max(minimum, bounds[name]), name


def _log_choice(flags, reasons, deterministic=False):
    """Log what was chosen and why.

    Args:
      reasons: the limit of each chosen flag, by the flag's name.
    """
    values = {name: f"--{name} {getattr(flags, name)}" for name in reasons}
    if deterministic and reasons:
        logging.info("--deterministic fixes %s", ", ".join(values.values()))
    elif reasons:
        choices = ", ".join(f"{value} ({reasons[name]})" for name, value in values.items())
        text = (
            f"Chosen for this machine (limited by): {choices}. There are {count_cores()} cores and "
            f"{count_memory() / 2**30:.0f} GiB of memory"
        )
        if (num := count_learners()) > 1:
            text += f" for each of {num} learners that share this machine"
        text += "."
        if "lag" in reasons.values():
            text += (
                f" More than {MAX_LAG * flags.batch_size} environments, {MAX_LAG} batches, would "
                "make the policies lag"
            )
        logging.info(text)


def count_learners():
    """Return the number of learners that torchrun started on this machine, including this one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def has_shared_memory(num_bytes):
    """Return whether memory and /dev/shm have so many bytes for each learner on this machine."""
    return num_bytes <= 0.95 * min(_free_bytes(), count_memory())


def _free_bytes():
    """Return this learner's share of the free bytes, since others may be about to take theirs."""
    return shutil.disk_usage("/dev/shm").free // count_learners()


def check_shared_memory(num_bytes, what, advice=""):
    """Refuse a size for which there is no room: SIGBUS or SIGKILL would end the run.

    Raises:
      FlagError: it names `what` needs the memory, and how to get it, `advice` included.
    """
    if not has_shared_memory(num_bytes):
        num = count_learners()
        each = f" for each of {num} learners" if num > 1 else ""
        free, place, remedy = min(
            (_free_bytes(), "/dev/shm", "enlarge it (mount -o remount,size=... /dev/shm; in "
             "Docker: docker run --shm-size=...)"),
            (count_memory(), "memory", "raise its limit, if it has one"),
        )  # fmt: skip
        raise FlagError(
            f"{what} need {num_bytes / 2**20:,.0f} MiB of shared memory, but {place} has "
            f"{free / 2**20:,.0f} MiB left{each}: {remedy}{advice}"
        )
