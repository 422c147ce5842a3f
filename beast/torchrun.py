# SPDX-License-Identifier: Apache-2.0
"""How learners that torchrun has started find each other; learner_group.py is what they then do."""

import atexit
import datetime
import logging
import os
import select
import signal
import threading
import time
import uuid

import torch
import torch.distributed as dist

from beast import learner_group
from beast.errors import FlagError
from beast.learner_group import ALONE, LearnerGroup
from beast.run_folder import run_git

START_TIMEOUT = 3600  # seconds for all ranks to find their environments
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # that torchrun sets


def join_group(flags):
    """Return the group of learners that torchrun has started; ALONE, if it has started none.

    Args:
      flags: as the command line gives them.

    Raises:
      FlagError: the program is for one learner; torchrun's variables contradict each other, or the
        flags do not go with them; or another rank has other flags, another commit, or another kind
        of device.
    """
    variables = {name: os.environ.get(name) for name in VARIABLES}
    if variables["RANK"] is None or "TORCHELASTIC_RUN_ID" not in os.environ:
        return ALONE
    if "elastic" not in flags:
        raise FlagError(
            f"{flags.program} is for one learner, but torchrun has started this one (RANK is "
            f"{variables['RANK']}): start it by python (docs/learners.md)"
        )
    rank, size = _check_variables(variables)
    check_flags(flags)
    if flags.xpid is None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        raise FlagError(
            "torchrun's --max-restarts resumes the run by its name: give it one with --xpid"
        )
    device = _choose_gpu(flags, *(int(variables[name]) for name in VARIABLES[2:]))
    # Else a rank that is lost would abort the others, before they have saved.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    store, _, _ = next(dist.rendezvous("env://"))
    dist.init_process_group(
        "gloo",
        timeout=datetime.timedelta(seconds=START_TIMEOUT),
        store=dist.PrefixStore(_agree_on_attempt(store, rank, size), store),
        rank=rank,
        world_size=size,
    )
    atexit.register(dist.destroy_process_group)
    threading.Thread(target=_end_with_torchrun, args=(os.getppid(),), daemon=True).start()
    if rank > 0:  # it has a log of its own
        for handler in logging.getLogger().handlers:
            handler.setLevel(logging.WARNING)
    del os.environ["RANK"]  # processes that are started from here are no learners
    group = LearnerGroup(rank, size, device)
    group.check_same("device", device)
    group.check_same("command line", {k: v for k, v in vars(flags).items() if k != "program"})
    group.check_same("commit", run_git("rev-parse", "HEAD"))
    learner_group.set_current(group)
    return group


def check_flags(flags, how="under torchrun"):
    """Refuse what several learners do not go with."""
    if flags.mode != "train":
        raise FlagError(f"--mode {flags.mode} is for one process: it does not work {how}")
    for name, reason in {
        "deterministic": "makes runs the same that one learner makes",
        "pipes_basename": "names one place, at which all learners would start servers",
        "write_profiler_trace": "holds the other learners up for too long",
    }.items():
        if getattr(flags, name, None):
            raise FlagError(f"--{name} {reason}: leave it out {how}")


def _check_variables(variables):
    """Return rank and size, or raise a FlagError that says what contradicts what."""
    try:
        rank, size, local_rank, local_size = (int(value) for value in variables.values())
    except (TypeError, ValueError):
        raise FlagError(f"torchrun sets {VARIABLES} to numbers, but they are {variables}") from None
    for number, limit in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if not 0 <= int(variables[number]) < int(variables[limit]):
            raise FlagError(
                f"{number} is {variables[number]}, but {limit} is {variables[limit]}: start the "
                "program by torchrun, which sets both"
            )
    if local_size > size:
        raise FlagError(f"LOCAL_WORLD_SIZE is {local_size}, but WORLD_SIZE is {size}: see torchrun")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise FlagError(f"RANK is {rank}, but {name} is not set: start the program by torchrun")
    return rank, size


def _choose_gpu(flags, local_rank, local_size):
    """Have this process see one GPU, which is no other rank's; return "cuda", or "cpu"."""
    num_gpus = torch.cuda.device_count()  # which leaves CUDA as it is
    if flags.disable_cuda or not num_gpus:
        return "cpu"
    if local_size > num_gpus:
        raise FlagError(
            f"torchrun starts {local_size} learners here (--nproc-per-node), but there are "
            f"{num_gpus} GPUs: start as many, or add --disable_cuda"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local_rank]
    return "cuda"


def _agree_on_attempt(store, rank, size):
    """Return a name that all ranks of this start have in common, and no earlier start had.

    torchrun's store may outlive a restart, with the addresses of ranks that are gone in it. Its own
    count of restarts is one of each machine. So rank 0 draws a name, the others answer it with
    numbers of their own, and the name holds once rank 0 has repeated those.
    """
    own, end = uuid.uuid4().hex, time.monotonic() + START_TIMEOUT
    if rank == 0:
        store.set("attempt", own)
        answers = [store.get(f"{own}/{other}").decode() for other in range(1, size)]
        store.set(f"{own}/answers", " ".join([own, *answers]))
        return own
    while time.monotonic() < end:
        name = store.get("attempt").decode()
        store.set(f"{name}/{rank}", own)
        if store.check([f"{name}/answers"]):
            if own in store.get(f"{name}/answers").decode().split():
                return name
        time.sleep(0.1)
    raise FlagError(f"rank 0 has not answered for {START_TIMEOUT} s: see its log")


def _end_with_torchrun(pid):
    """End, as by SIGTERM, when torchrun was killed: a thread."""
    select.select([os.pidfd_open(pid)], [], [])
    os.kill(os.getpid(), signal.SIGTERM)
