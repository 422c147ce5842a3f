# SPDX-License-Identifier: Apache-2.0
"""How learners started by torchrun find each other; learner_group.py has the group itself."""

import atexit
import contextlib
import datetime
import json
import logging
import os
import select
import signal
import sys
import threading
import time
import uuid

import torch
import torch.distributed as dist

from beast.errors import FlagError
from beast.learners import learner_group
from beast.learners.learner_group import ALONE, TIMEOUT, LearnerGroup
from beast.runs.code_version import describe_code

IMPORT_TIMEOUT = 300  # seconds for all ranks to import what they need
STOP_TIMEOUT = 5  # seconds in which the others answer a rank that was asked to stop at the start
PARENT = os.getppid()  # asked before others are waited for, meanwhile torchrun may end
# Environment variables that torchrun sets.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def join_group(flags):
    """Return the group of learners that torchrun has started; ALONE, if it has started none.

    Args:
      flags: as the command line gives them.

    Raises:
      FlagError: the program is for one learner; torchrun's variables contradict each other, or the
        flags contradict them; or another rank has other flags, another commit, or another kind
        of device.
    """
    variables = {name: os.environ.get(name) for name in VARIABLES}
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        if flags.mode == "train" and (variables["WORLD_SIZE"] or "1") != "1":
            logging.warning("WORLD_SIZE is set, but not by torchrun: this learner trains alone")
        return ALONE
    if "elastic" not in flags:
        raise FlagError(
            f"{flags.program} is for one learner, but torchrun has started this one (RANK is "
            f"{variables['RANK']}): start it by python (docs/learners.md)"
        )
    rank, size, local_rank, local_size = _check_variables(variables)
    check_flags(flags)
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        if flags.xpid is None:
            raise FlagError(
                "torchrun's --max-restarts resumes the run by its name: give it one with --xpid"
            )
        if flags.disable_checkpoint:
            raise FlagError("torchrun's --max-restarts needs checkpoints: no --disable_checkpoint")
    device = _choose_gpu(flags, local_rank, local_size)
    # Else a rank that is lost would abort the others, before they have saved.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    timeout = datetime.timedelta(seconds=TIMEOUT)
    with _time_limit(IMPORT_TIMEOUT + STOP_TIMEOUT):
        store, _, _ = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(_agree_on_attempt(store, rank, size), store)
        dist.init_process_group("gloo", timeout=timeout, store=store, rank=rank, world_size=size)
    atexit.register(dist.destroy_process_group)
    threading.Thread(target=_end_with_torchrun, args=(PARENT,), daemon=True).start()
    if rank > 0:  # it has a log of its own
        for handler in logging.getLogger().handlers:
            handler.setLevel(logging.WARNING)
    for name in ("TORCHELASTIC_RUN_ID", *VARIABLES[:3]):
        del os.environ[name]  # processes that are started from here are no learners
    group = LearnerGroup(rank, size, device, Start(store, rank, size))
    group.local_rank = local_rank
    group.check_same("device", device)
    same = {k: v for k, v in vars(flags).items() if k not in ("program", "savedir")}
    group.check_same("command line", same)
    group.check_same("commit", describe_code())
    learner_group.set_current(group)
    return group


class Start:
    """How ranks wait for each other before training; environments may take long to start.

    Each counts beats in torchrun's store meanwhile, so that the others see that it is alive.
    SIGTERM to one rank ends all of them.

    Keys of the store:
      beats/RANK: counted up each second while the rank lives.
      waits/N: how many ranks have come to meeting N.
      waits/N/decision: "go" or "stop", by the rank that proposes first; it holds for all.
      stop: is there once a rank has to stop; stopping: how many do.
      first: the first value that was given to `share_first`.
    """

    def __init__(self, store, rank, size):
        self._store, self._rank, self._size = store, rank, size
        self._num_meetings, self._is_stopping, self._is_over = 0, False, threading.Event()
        self._is_meeting = self._has_to_stop = False
        signal.signal(signal.SIGTERM, self._handle)  # until a run catches it
        thread = threading.Thread(target=self._beat, daemon=True)
        thread.start()
        atexit.register(lambda: (self.end(), thread.join()))

    def end(self):
        """Record that all ranks train from here on."""
        self._is_over.set()

    def meet(self, call):
        """Make a collective call once all ranks are ready for it, or raise a TimeoutError."""
        self._num_meetings += 1
        self._is_meeting = True
        try:
            self._wait(f"waits/{self._num_meetings}")
            call()
        finally:
            self._is_meeting = False
        if self._has_to_stop:
            self._stop()

    def share_first(self, value):
        """Return the first value, of JSON, that any rank has given; None while all gave None."""
        if value is not None:
            self._store.compare_set("first", "", json.dumps(value))
        return json.loads(self._store.get("first")) if self._store.check(["first"]) else None

    def _wait(self, key):
        """Wait until all ranks have arrived; all continue or all stop, as the first decides."""
        pause = 0.01
        seen = {}  # beats of another rank, and when they were as many first
        self._store.add(key, 1)
        while self._store.add(key, 0) < self._size:
            for rank in set(range(self._size)) - {self._rank}:
                beats, now = self._store.add(f"beats/{rank}", 0), time.monotonic()
                if beats != seen.setdefault(rank, (beats, now))[0]:
                    seen[rank] = beats, now
                if now > seen[rank][1] + TIMEOUT:
                    raise TimeoutError(f"rank {rank} is silent")
            if self._has_to_stop or self._store.check(["stop"]):
                self._decide(key, "stop")
            time.sleep(pause)
            pause = min(1, 2 * pause)
        self._decide(key, "go")

    def _decide(self, key, proposal):
        """Stop, if a rank's first proposal for this meeting was to stop."""
        if self._store.compare_set(f"{key}/decision", "", proposal) == b"stop":
            self._stop()

    def _beat(self):
        with contextlib.suppress(RuntimeError):  # the store is gone
            while not self._is_over.wait(1):
                with _time_limit(TIMEOUT + STOP_TIMEOUT):
                    self._store.add(f"beats/{self._rank}", 1)
                    has_to_stop = self._store.check(["stop"])
                if has_to_stop and not self._is_stopping:
                    os.kill(os.getpid(), signal.SIGTERM)
                    return

    def _handle(self, *_):
        """Stop; in a meeting only after it, since others may be in its call already."""
        self._has_to_stop = True
        if not self._is_meeting:
            self._stop()

    def _stop(self):
        """Exit, with status 0 if all ranks do: torchrun restarts ranks after any other status."""
        if self._is_stopping:
            return
        self._is_stopping, status = True, 128 + signal.SIGTERM
        with contextlib.suppress(RuntimeError):
            self._store.set("stop", "")
            num_stopping, end = self._store.add("stopping", 1), time.monotonic() + STOP_TIMEOUT
            while num_stopping < self._size and time.monotonic() < end:
                time.sleep(0.1)
                num_stopping = self._store.add("stopping", 0)
            status = 0 if num_stopping == self._size else status
        sys.exit(status)


@contextlib.contextmanager
def _time_limit(seconds):
    """End this process if the block takes longer: calls of torchrun's store have no limit."""

    def end():
        logging.critical("torchrun's store has not answered for %d s: this learner ends", seconds)
        os._exit(1)  # the main thread may be blocked, too

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_flags(flags, how="under torchrun"):
    """Refuse flags that do not work with several learners."""
    if flags.mode != "train":
        raise FlagError(f"--mode {flags.mode} is for one process: it does not work {how}")
    for name, reason in {
        "deterministic": "makes runs the same that one learner makes",
        "pipes_basename": "names one place, at which all learners would start servers",
        "write_profiler_trace": "holds the other learners up for too long",
        "compile": "takes longer than learners wait for each other",
    }.items():
        if getattr(flags, name, None):
            raise FlagError(f"--{name} {reason}: leave it out {how}")


def _check_variables(variables):
    """Return the variables as numbers, or raise a FlagError that names contradicting ones."""
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
    if not 0 <= rank - local_rank <= size - local_size:
        raise FlagError(
            f"RANK is {rank}, but LOCAL_RANK is {local_rank}, of {local_size} learners here and "
            f"{size} in all: start the program by torchrun, which sets them"
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise FlagError(f"RANK is {rank}, but {name} is not set: start the program by torchrun")
    return rank, size, local_rank, local_size


def _choose_gpu(flags, local_rank, local_size):
    """Restrict this process to one GPU that no other rank uses; return "cuda" or "cpu"."""
    num_gpus = torch.cuda.device_count()  # does not initialize CUDA
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
    """Return a name that all ranks of this start share and no earlier start used.

    torchrun's store may outlive a restart, with the addresses of ranks that are gone in it. Its
    restart count is per machine. So rank 0 draws a name, the others answer it with numbers of their
    own, and the name holds once rank 0 has repeated those.
    """
    own, end = uuid.uuid4().hex, time.monotonic() + IMPORT_TIMEOUT
    if rank == 0:
        store.set("attempt", own)
    while time.monotonic() < end:
        if rank == 0:
            keys = [f"{own}/{other}" for other in range(1, size)]
            if all(store.check([key]) for key in keys):
                answers = [store.get(key).decode() for key in keys]
                store.set(f"{own}/answers", " ".join([own, *answers]))
                return own
        elif store.check(["attempt"]):
            name = store.get("attempt").decode()
            store.set(f"{name}/{rank}", own)
            if store.check([f"{name}/answers"]):
                if own in store.get(f"{name}/answers").decode().split():
                    return name
        time.sleep(0.1)
    raise FlagError(f"another learner has not answered for {IMPORT_TIMEOUT} s: see its log")


def _end_with_torchrun(pid):
    """End, as by SIGTERM, when torchrun was killed: a thread."""
    with contextlib.suppress(ProcessLookupError):  # the process has ended already
        select.select([os.pidfd_open(pid)], [], [])
    os.kill(os.getpid(), signal.SIGTERM)
