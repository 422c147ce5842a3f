# SPDX-License-Identifier: Apache-2.0
"""PolyBeast's streams of environments: the C++ actor pool with its batcher and queue."""

import collections
import logging
import threading

import libtorchbeast
from beast.envs.spaces import row_ranges
from beast.learners.devices import DeviceCopies
from beast.learners.learner import Batch
from beast.learners.learner_group import SEEDS_A_RANK
from beast.runs.diagnostics import mean, show
from beast.servers.handshakes import CONNECT_TIMEOUT, answer_timeout
from libtorchbeast.access import Throttle

CHECK_INTERVAL = 5  # seconds between two looks at the servers
MAX_EVENT = 600  # characters of an event in the log; longer ones are rare there


class Streams:
    """Actor threads in C++, one a stream, with the inference batcher and the learner queue.

    Args:
      flags: of the program.
      servers: as of beast.servers.connect.
      initial_agent_state: of one environment, a nest of tensors [layers, 1, ...].
      first_step: of the run. A resumed run must not play the same games again.
      device: of the learner; for a GPU batches are in pinned memory, from which it copies faster.

    Attributes:
      batcher: DynamicBatcher of rows for inference.
      queue: BatchingQueue of rollouts for the learner.
    """

    def __init__(self, flags, servers, initial_agent_state, first_step, device):
        self._servers = servers
        self._num_streams = (flags.num_actors or len(servers.addresses)) if servers.addresses else 0
        self._addresses = [
            servers.addresses[i % len(servers.addresses)] for i in range(self._num_streams)
        ]
        self._queue_size = flags.max_learner_queue_size or flags.batch_size
        self.batcher = libtorchbeast.DynamicBatcher(
            batch_dim=1,
            minimum_batch_size=1,
            maximum_batch_size=max(512, servers.num_envs),
            pin_memory=device.type == "cuda",
        )
        self.queue = libtorchbeast.BatchingQueue(
            batch_dim=1,
            minimum_batch_size=flags.batch_size,
            maximum_batch_size=flags.batch_size,
            maximum_queue_size=self._queue_size,
            pin_memory=device.type == "cuda",
        )
        self._pool = libtorchbeast.ActorPool(
            flags.unroll_length,
            self.queue,
            self.batcher,
            self._addresses,
            initial_agent_state,
            dict_outputs=True,
            num_envs=flags.envs_per_stream,
            expected_num_envs=servers.num_envs,
            newest_frame_only=True,
            seeds=[
                f"{flags.seed},{1 + i + SEEDS_A_RANK * flags.rank},{first_step}"
                for i in range(self._num_streams)
            ],
            reconnect=True,
            spaces=servers.spaces,
            ranges=row_ranges(servers.observation_space, servers.action_space),
            env=servers.env,
            listener=servers.listening and servers.listening.listener,
            listener_seed=f"{flags.seed},{flags.rank},{first_step}",
            connect_timeout_s=CONNECT_TIMEOUT,
            step_timeout_s=answer_timeout(flags),
            **servers.credentials,
        )
        self._lock = threading.Lock()  # guards all attributes below
        self._batch_sizes = []  # sizes of inference batches since the last tick
        self._waits = {}  # seconds by what all streams together have waited for, at the last call
        self._mean_waits = collections.defaultdict(float)  # the same of a stream

    def run(self):
        """Play until the queues are closed: a thread."""
        self._pool.run()

    def log_events(self):
        """Log events of servers: a thread."""
        throttle = Throttle()
        for event in iter(self._pool.next_event, None):
            # Tracebacks of environments that fail for days would fill the disk.
            if len(event) > MAX_EVENT and not throttle.count():
                event = f"{event[: MAX_EVENT // 2]} [...] {event[-MAX_EVENT // 2 :]}"
            logging.warning("%s", event)

    def watch_servers(self, stop):
        """Restart local servers that were killed: a thread.

        Raises:
          EnvError: they have ended by themselves.
        """
        throttle = Throttle()
        while not stop.wait(CHECK_INTERVAL):
            self._servers.check()
            if self._pool.num_connected() == 0 and throttle.count():
                addresses = sorted(set(self._addresses))
                more = f" and {len(addresses) - 8} more" if len(addresses) > 8 else ""
                if addresses:
                    logging.warning(
                        "No stream is connected (for errors see above): waiting for %s%s",
                        addresses[:8],
                        more,
                    )
                if self._servers.listening is not None:
                    where = self._servers.listening.address
                    logging.warning("No environments are there: waiting for some at %s", where)

    def count_batch(self, num_rows):
        """Count a batch that inference has answered."""
        with self._lock:
            self._batch_sizes.append(num_rows)

    def waits(self):
        """Return mean seconds that a stream has waited since the start, by what it waited for."""
        num_streams = max(1, self._num_streams, self._pool.num_connected())  # they come and go
        waits = self._pool.waits()
        with self._lock:
            for name, seconds in waits.items():
                more = (seconds - self._waits.get(name, 0.0)) / num_streams
                self._mean_waits[f"actor_wait_{name}"] += more
            self._waits = waits
            return dict(self._mean_waits)

    def metrics(self):
        with self._lock:
            sizes, self._batch_sizes = self._batch_sizes, []
        return {
            "inference_batch_size": mean(sizes),
            "learner_queue_size": self.queue.size(),
            "connected_actors": self._pool.num_connected(),
            "reconnects": self._pool.num_reconnects(),
        }

    def texts(self, latest):
        return {
            "batch": show(latest["inference_batch_size"]),
            "queue": f"{latest['learner_queue_size']}/{self._queue_size}",
            "actors": f"{latest['connected_actors']}/{self._num_streams}"
            if self._servers.listening is None
            else str(latest["connected_actors"]),
        }

    def silences(self):
        """Return how long streams have waited, for a Watchdog."""
        return [
            (f"stream {i}", f"waits for {what} ({peer})", seconds, None)
            for i, peer, what, seconds in self._pool.silences()
            if what != "learner"
        ]

    def pids(self):
        return self._servers.pids()


def read_batches(queue, device, run):
    """Yield one Batch of the queue's rollouts after the other, until the queue is closed."""
    copies = DeviceCopies(device)  # which go on while another thread learns
    for (env_outputs, agent_outputs), agent_state in run.follow(queue):
        rows = env_outputs | agent_outputs
        versions = rows.pop("policy_version")[1:].double().mean(dim=0).tolist()
        sources = {"streams": rows.pop("actor")[0].unique().tolist()}
        device_rows, device_state = copies.copy((rows, agent_state))
        yield Batch(device_rows, device_state, rows, versions, sources)
        copies.wait()  # before the queue gets its memory back
