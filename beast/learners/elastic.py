# SPDX-License-Identifier: Apache-2.0
"""Learners that come and go: --elastic, with torchft (https://github.com/meta-pytorch/torchft).

Each learner is started by itself. Before every update they agree on who takes part (the quorum)
through torchft's lighthouse, a small server. A learner whose step is behind, because it is new or
missed an update, first takes weights, optimizer and counts from one that is up to date, and drops
its gradient of the old weights. Then all sum their gradients and metrics (exchange.py), and each
commits the update unless it saw an error. A learner that saw one tries again with the same batch in
the next quorum. If another learner has committed the update, that batch may be part of it: so it
is dropped, and the weights are taken from the other learner. No batch counts twice.

The oldest learner of the quorum writes logs and checkpoints. Sums are made on the CPU, with GPUs,
too. This file was not tested with GPUs.
"""

import contextlib
import copy
import datetime
import http.client
import http.server
import importlib.util
import json
import logging
import os
import re
import socket
import time
import warnings

import torch.distributed as dist

from beast.errors import EnvError, FlagError
from beast.learners import learner_group
from beast.learners.exchange import Exchange, refuse_difference
from beast.learners.learner_group import Alone, Starvation
from beast.learners.torchrun import check_flags
from beast.processes.randomness import seed_generators
from beast.runs.checkpoint import NOT_RESUMED
from beast.runs.code_version import describe_code

INSTALL = "pip install torchft==0.2.0"
# Seconds after which the others go on without a learner that is lost, or that hangs between sums.
# One that hangs in a sum, with heartbeats, costs them SUM_TIMEOUT more.
TIMEOUT = 20
SUM_TIMEOUT = 5  # seconds for one sum, or one connection; several may follow each other
# Seconds that the lighthouse waits for a learner that is alive but has not asked for a quorum. With
# fewer, newcomers could start without the learner that has the newest weights, while that one still
# waits for a lost one.
JOIN_TIMEOUT = TIMEOUT
LIGHTHOUSE_OPTIONS = f"--min_replicas 1 --join_timeout_ms {1000 * JOIN_TIMEOUT}"
QUORUM_TIMEOUT = JOIN_TIMEOUT + 5  # seconds for an answer of the lighthouse
# Consecutive failed exchanges after which a learner ends; a newcomer sooner, so that one whom the
# others cannot reach does not end them.
MAX_FAILURES, NEWCOMERS_FAILURES = 20, 5
# Seconds after which a newcomer that has stopped to fetch a tensor is dropped, and after which all
# weights must have been fetched: so long the learner that gives them may wait.
HEAL_TIMEOUT, LONGEST_HEAL = 60, 180
# Flags about a machine, in which learners of one policy may differ.
OWN_FLAGS = (
    "env", "savedir", "seed", "rank", "num_actors", "num_servers", "server_addresses",
    "listen", "max_streams", "insecure", "spaces",
    "batch_size", "envs_per_actor", "envs_per_stream", "num_buffers", "num_learner_threads",
    "num_inference_threads", "max_learner_queue_size", "replay_rollouts", "stall_timeout_s",
)  # fmt: skip


def _answers(address):
    """Return whether something accepts connections at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), SUM_TIMEOUT).close()
    except (OSError, OverflowError):
        return False
    return True


def join_group(flags):
    """Return a group that this learner joins with its first batch.

    Args:
      flags: as given on the command line.

    Raises:
      FlagError: torchft is missing, the lighthouse does not answer, a flag does not work with
        --elastic, or the commit is not that of the other learners.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise FlagError(
            f"--elastic is {flags.elastic}, but torchrun has started this learner "
            f"(TORCHELASTIC_RUN_ID is {os.environ['TORCHELASTIC_RUN_ID']}): use one of the two"
        )
    check_flags(flags, "with --elastic")
    if flags.wandb:
        raise FlagError("--wandb is for one learner: leave it out with --elastic")
    if flags.xpid is None:
        raise FlagError("--elastic needs --xpid NAME, the same for all learners of the run")
    if flags.seed is not None:
        raise FlagError(
            f"--seed is {flags.seed}, but learners of an --elastic run draw their seeds, so that "
            "no two play the same games: leave it out"
        )
    match = re.fullmatch(r"(?:\[.+\]|[^:\[\]]+):(\d{1,5})", flags.elastic)
    if not match:
        raise FlagError(f"--elastic is {flags.elastic!r}, but should be HOST:PORT of a lighthouse")
    if importlib.util.find_spec("torchft") is None:
        raise FlagError(f"--elastic needs a package that is not installed: {INSTALL}")
    if not _answers(flags.elastic):
        raise FlagError(
            f"no lighthouse answers at --elastic {flags.elastic}: start one there with "
            f"torchft_lighthouse {LIGHTHOUSE_OPTIONS} --bind [::]:{match[1]}"
        )
    group = ElasticGroup(flags.elastic)
    group.ask_others()
    group.check_same("commit", describe_code())
    learner_group.set_current(group)
    return group


def check_completed_flags(flags, group):
    """Refuse flags that differ from those of the other learners; draw a seed for this one.

    Args:
      flags: completed from the checkpoint.
    """
    check_flags(flags, "with --elastic")
    flags.rank, flags.seed = 0, int.from_bytes(os.urandom(4), "little")
    not_compared = (*NOT_RESUMED, *OWN_FLAGS)
    group.check_same("flags", {k: v for k, v in vars(flags).items() if k not in not_compared})


class ElasticGroup:
    """A group of learners that come and go, as one of them sees it: the methods of LearnerGroup.

    Args:
      lighthouse: its HOST:PORT.

    Attributes:
      rank: in the quorum; 0 for the oldest learner; None until this one has joined.
      size: of the quorum.
    """

    by_torchrun, local_rank = False, 0
    # This learner waits for nobody.
    from_rank_0, share_first, barrier = Alone.from_rank_0, Alone.share_first, Alone.barrier

    def __init__(self, lighthouse):
        self._lighthouse, self._is_stopping = lighthouse, False
        self.name = f"{socket.gethostname()}-{os.getpid()}"
        self.rank, self.size = None, 1
        self.exchange, self.starvation = Exchange(), Starvation()
        self.share_returns = self.exchange.share_returns
        self.batch_in_hand = self.starvation.batch_in_hand
        # What all learners must have in common, by name: of this one, and of one that takes part.
        self._facts, self._facts_of_others = {}, {}
        self._manager, self._has_committed = None, False

    def check_same(self, what, value):
        """Refuse a value that differs from that of a learner that takes part.

        It is compared again when this learner or another one joins.
        """
        # The form in which it is sent.
        self._facts[what] = json.loads(json.dumps(value, default=str))
        self._compare()

    def _compare(self):
        for what, own in self._facts.items():
            other = self._facts_of_others.get(what, own)
            refuse_difference(what, ("this learner", own), ("another one", other))

    def ask_others(self):
        """Get the facts of a learner that takes part, so that check_same compares with them.

        torchft compares nothing before a quorum, but a page of its lighthouse lists the stores of
        all members. Where that cannot be read, facts are compared only when this learner joins.
        """
        members, timeout = [], datetime.timedelta(seconds=SUM_TIMEOUT)
        with contextlib.suppress(OSError, http.client.HTTPException):
            lighthouse = http.client.HTTPConnection(self._lighthouse, timeout=SUM_TIMEOUT)
            lighthouse.request("GET", "/status")
            page = lighthouse.getresponse().read().decode(errors="replace")
            members = re.findall(r"TCPStore: (\S+:\d+)", page)
        for member in filter(_answers, members):  # the oldest one first
            host, _, port = member.rpartition(":")
            with contextlib.suppress(dist.DistError):
                store = dist.TCPStore(host, int(port), timeout=timeout, wait_for_workers=False)
                self._facts_of_others = json.loads(store.get("facts"))
                return

    def share_state(self, learner):
        self.check_same("device", learner.device.type)
        self.check_same("optimizer", learner.optimizer_name)
        # Else learners that resume one checkpoint would all draw the same actions' noise.
        seed_generators([int.from_bytes(os.urandom(8), "little")])
        self._learner = learner
        self.exchange.remember_buffers(learner.model)

    def sum(self, model, metrics):
        """Sum gradients, in place, and metrics over the learners of the next quorum.

        Raises:
          EnvError: the lighthouse does not answer, too many exchanges have failed, or a newcomer
            takes too long to fetch the weights.
          FlagError: this learner differs from the others; or see Exchange.
        """
        self.exchange.check_is_first()
        if self._manager is None:
            self.exchange.layout = self.exchange.layout_of(metrics)
            self.ask_others()
            self.check_same("metrics", self.exchange.layout)
            self._join()
        device = self._learner.device
        most = MAX_FAILURES if self._has_committed else NEWCOMERS_FAILURES
        for _ in range(most):
            if self._start_quorum():
                metrics = {}  # the batch's gradient is of the old weights
                self.exchange.forget_returns()
                self.exchange.remember_buffers(model)
                for parameter in model.parameters():
                    parameter.grad = None
            tensor = self.exchange.pack(model, metrics, self.rank, self.size).cpu()
            self._manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM).wait()
            if self._commit():
                self._has_committed = True
                return self.exchange.unpack(model, tensor.to(device), self.size)
            if self._is_stopping:  # the batch is dropped
                for parameter in model.parameters():
                    parameter.grad = None
                self.exchange.num_batches = 0
                return {}
        raise EnvError(
            f"{most} exchanges with other learners in a row have failed: can the machines "
            "reach each other by their host names, on all ports?"
        )

    def _commit(self):
        try:
            return self._manager.should_commit()
        except TimeoutError:  # this learner is the source of a newcomer's weights
            raise EnvError(
                f"another learner has not fetched the weights within {LONGEST_HEAL} s: is its "
                "network that slow, or was it stopped?"
            ) from None

    def _join(self):
        """Join the others. From here on they wait for this learner, so it must have a batch."""
        os.environ.setdefault("RUST_LOG", "error")
        from torchft import Manager, ProcessGroupGloo  # imported here, since few users have it
        from torchft.checkpointing import HTTPTransport

        # What they log is either not an error here, or logged here.
        for name in ("torchft", "torchft_quorums", "torchft_commits", "torchft_errors"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        http.server.BaseHTTPRequestHandler.log_message = lambda *_: None
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        timeout, host = datetime.timedelta(seconds=TIMEOUT), socket.gethostname()
        sum_timeout = datetime.timedelta(seconds=SUM_TIMEOUT)
        transport = HTTPTransport(datetime.timedelta(seconds=HEAL_TIMEOUT), num_chunks=0)
        transport._checkpoint_lock.timeout = LONGEST_HEAL  # else that would be the same
        try:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            self._store.set("facts", json.dumps(self._facts))  # for ask_others
            self._manager = Manager(
                ProcessGroupGloo(timeout=sum_timeout),
                self._heal,
                self._state,
                min_replica_size=1,
                use_async_quorum=False,
                timeout=timeout,
                checkpoint_transport=transport,
                quorum_timeout=datetime.timedelta(seconds=QUORUM_TIMEOUT),
                connect_timeout=sum_timeout,
                rank=0,
                world_size=1,
                store_addr=host,
                store_port=self._store.port,
                lighthouse_addr=f"http://{self._lighthouse}",
                # Ranks follow from the names, so the oldest learner is the first.
                replica_id=f"{time.time():017.6f}-{self.name}",
            )
        except Exception as error:  # of several types, since the library is written in Rust
            raise EnvError(
                f"cannot join others via the lighthouse at {self._lighthouse}, as {host}: {error!r}"
            ) from None

    def _start_quorum(self):
        """Agree on who takes part; return whether this learner took the state of another one."""
        self._is_healed, is_waiting = False, True
        while is_waiting:
            try:
                self._manager.start_quorum()
                is_waiting = False
            except (EnvError, FlagError):
                raise
            except Exception as error:  # of several types, as above
                # There is no quorum while half of the learners or more are alive but do not ask.
                is_late = isinstance(error, TimeoutError) and not self._is_stopping
                if not (is_late and _answers(self._lighthouse)):
                    raise EnvError(
                        f"the lighthouse at {self._lighthouse} has not answered, so this learner "
                        f"ends: {error!r}"
                    ) from None
                logging.warning("No quorum for %d s: too many other learners hang", QUORUM_TIMEOUT)
                # Otherwise the next call would raise the same error.
                self._manager._quorum_future = None
        before, self.size = self.size, self._manager.num_participants()
        self.rank = self._manager.participating_rank()
        if self.size != before:
            logging.info(
                "The number of learners is %d now; this one has rank %d", self.size, self.rank
            )
        return self._is_healed

    def _state(self):
        return {"facts": self._facts, "state": self._learner.state()}

    def _heal(self, received):
        self._facts_of_others = received["facts"]
        self._compare()
        step, own_step = received["state"]["stats"]["step"], self._learner.step
        if step < own_step:
            logging.error(
                f"This learner was at step {own_step:,}, the others are at {step:,}: it goes on "
                "from there"
            )
        try:
            # A copy, since the received tensors lie in memory that must not be written to.
            self._learner.load_state(copy.deepcopy(received["state"]))
        except Exception as error:
            raise EnvError(f"cannot take the state of another learner: {error!r}") from None
        self._is_healed = True
        logging.info("Took weights and counts from another learner")

    def ask_to_stop(self, stop):
        """Stop this learner; the others continue."""
        self._is_stopping = True
        stop.set()

    def leave(self, is_over):
        """Leave the group; the others continue, whether the run is over here or has failed."""
        if self._manager is not None:
            self._manager.shutdown()
            self._manager = None
