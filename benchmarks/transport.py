# SPDX-License-Identifier: Apache-2.0
"""How many agent steps/s pass through actor pool, dynamic batcher, learner queue and servers?

    python benchmarks/transport.py [--repeats 3] [--seconds 6]

The environments are mocks that do nothing, inference answers at once, and the learner takes its
batches and drops them: what is left is PolyBeast's own work, on both sides of the wire, on all
cores. Each round measures each case again. CPU time is what a step costs on either side: it
says more than the rate where the machine does other things too. Prints Markdown.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import socket
import statistics
import tempfile
import threading
import time
from typing import NamedTuple

import numpy as np
from machine import cpu_seconds, print_header, read_status

import libtorchbeast
from beast.processes.lifetime import exit_with_parent
from libtorchbeast.rows import DTYPES

UNROLL_LENGTH = 20
BATCH_SIZE, QUEUE_SIZE = 32, 64  # rollouts


class Case(NamedTuple):
    name: str
    shape: tuple
    stack_size: int  # 0: whole observations travel
    num_streams: int
    envs_per_stream: int
    num_servers: int
    fork: bool = False  # as forks use it: env outputs as a tuple, one environment a stream
    goal: int | None = None
    tcp: bool = True
    dial_in: bool = False  # to the learner, each stream from a process of its own
    learner_pause: float = 0  # seconds a batch


CASES = [
    Case("4x84x84, whole", (4, 84, 84), 0, 2, 32, 2, goal=60_000),
    Case("4x84x84, newest frame only", (4, 84, 84), 4, 2, 32, 2, goal=100_000),
    Case("4x84x84, newest frame only, unix sockets", (4, 84, 84), 4, 2, 32, 2, tcp=False),
    Case("100 bytes", (100,), 0, 2, 32, 2, goal=200_000),
    Case("100 bytes, 8 streams", (100,), 0, 8, 32, 2, goal=200_000),
    Case("4x84x84, newest frame only, dialed in", (4, 84, 84), 4, 2, 32, 2, dial_in=True),
    Case("100 bytes, dialed in", (100,), 0, 2, 32, 2, dial_in=True),
    # From a process each, as those that dial in.
    Case("100 bytes, 8 streams, 8 servers", (100,), 0, 8, 32, 8),
    Case("100 bytes, 8 streams, dialed in", (100,), 0, 8, 32, 8, dial_in=True),
    Case("100 bytes, as forks use it", (100,), 0, 8, 1, 2, fork=True, goal=10_000),
    Case("newest frame only, 8 x 32 environments, 8 servers", (4, 84, 84), 4, 8, 32, 8),
    Case(
        "newest frame only, 8 x 32 environments, dialed in", (4, 84, 84), 4, 8, 32, 8, dial_in=True
    ),
]


class Resources(NamedTuple):
    """What processes take, together."""

    peak_bytes: int  # resident memory, at its highest
    num_files: int
    num_threads: int


class Measurement(NamedTuple):
    rate: float  # environment steps/s
    learner_us: float  # of CPU, a step
    servers_us: float
    learner_bytes: int  # resident memory before the pool runs
    learner: Resources
    servers: Resources


class MockEnvironments:
    """N environments that observe the same all the time."""

    spaces = json.dumps("mock")

    def __init__(self, shape, stack_size, num_envs):
        self.num_envs, self.stack_size = num_envs, stack_size
        # All frames of a stack are alike, so that each observation is one frame on from the last.
        frame = np.random.default_rng(1).integers(
            0, 256, (num_envs, shape[0] // max(stack_size, 1), *shape[1:]), np.uint8
        )
        self.row = {
            "frame": np.concatenate([frame] * max(stack_size, 1), axis=1),
            **{key: np.zeros(num_envs, dtype) for key, dtype in DTYPES.items()},
        }

    def initial(self):
        return self.row

    def step(self, actions):
        return self.row

    def close(self):
        pass


def server_main(case, address, pipe):
    def make(num_envs, seed, name):
        return MockEnvironments(case.shape, case.stack_size, case.envs_per_stream)

    exit_with_parent()
    # As polybeast_env.py sets it: gRPC's older way to wait for sockets needs fewer threads.
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener,-event_engine_client")
    if case.dial_in:
        libtorchbeast.Dialer(None, [address], make_environments=make).run()
    else:
        libtorchbeast.Server(None, address, make_environments=make).run(pipe.send)


def measure(case, seconds):
    """Return a Measurement, taken after a third of the time to warm up."""
    import torch

    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    servers, addresses, listener = [], [], None
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if case.dial_in:
            port = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            listener = libtorchbeast.Listener(port.fileno(), case.num_streams)
            stack.callback(listener.close)
        for i in range(case.num_servers):
            pipe, far_end = context.Pipe()
            address = "127.0.0.1:0" if case.tcp else f"unix:{folder}/{i}"
            if case.dial_in:
                address = f"127.0.0.1:{port.getsockname()[1]}"
            server = context.Process(target=server_main, args=(case, address, far_end), daemon=True)
            server.start()
            stack.callback(server.join)
            stack.callback(server.kill)
            servers.append(server)
            if not case.dial_in:
                addresses.append(pipe.recv())
        return measure_on(case, seconds, addresses, listener, [s.pid for s in servers], torch)


def read_resources(pids):
    return Resources(
        1024 * sum(read_status(pid, "VmHWM") for pid in pids),
        sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        sum(read_status(pid, "Threads") for pid in pids),
    )


def measure_on(case, seconds, addresses, listener, server_pids, torch):
    N = case.envs_per_stream
    learner_bytes = 1024 * read_status(os.getpid(), "VmRSS")
    batcher = libtorchbeast.DynamicBatcher(minimum_batch_size=1, maximum_batch_size=1024)
    queue = libtorchbeast.BatchingQueue(
        minimum_batch_size=BATCH_SIZE,
        maximum_batch_size=BATCH_SIZE,
        maximum_queue_size=QUEUE_SIZE,
    )
    agent_state = ()
    options = {} if case.fork else {"dict_outputs": True, "newest_frame_only": case.stack_size > 0}
    pool = libtorchbeast.ActorPool(
        UNROLL_LENGTH,
        queue,
        batcher,
        [addresses[i % len(addresses)] for i in range(case.num_streams) if addresses],
        agent_state,
        listener=listener,
        **options,
    )

    def infer():
        for batch in batcher:
            rows, state = batch.get_inputs()
            columns = (rows[1] if case.fork else rows["reward"]).shape[1]
            action = torch.zeros(1, columns, dtype=torch.int64)
            logits, baseline = torch.zeros(1, columns, 6), torch.zeros(1, columns)
            if case.fork:
                outputs = (action, logits, baseline)
            else:
                outputs = {"action": action, "policy_logits": logits, "baseline": baseline}
            batch.set_outputs((outputs, state))

    def learn():
        for _ in queue:
            time.sleep(case.learner_pause)

    threads = [threading.Thread(target=f) for f in (pool.run, infer, learn)]
    for thread in threads:
        thread.start()
    # By the third rollout, their memory has been used before.
    while pool.count() < 3 * UNROLL_LENGTH * N * case.num_streams:
        time.sleep(0.01)
    time.sleep(seconds / 3)
    pids = [[os.getpid()], server_pids]
    begin, count = time.perf_counter(), pool.count()
    cpu = [cpu_seconds(side) for side in pids]
    time.sleep(seconds)
    steps = pool.count() - count
    rate = steps / (time.perf_counter() - begin)
    costs = [1e6 * (cpu_seconds(side) - c) / steps for side, c in zip(pids, cpu, strict=True)]
    resources = [read_resources(side) for side in pids]
    queue.close()
    batcher.close()
    for thread in threads:
        thread.join()
    return Measurement(rate, *costs, learner_bytes, *resources)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--seconds", type=float, default=6, help="a case (default: 6)")
    parser.add_argument("--only", default="", help="cases whose name fits this regular expression")
    flags = parser.parse_args()

    import grpc
    import torch

    print_header(grpc, np, torch)
    print(f"- unroll length {UNROLL_LENGTH}, median of {flags.repeats} rounds\n", flush=True)
    cases = [case for case in CASES if re.search(flags.only, case.name)]
    measurements = {case.name: [] for case in cases}
    for _ in range(flags.repeats):
        for case in cases:
            measurements[case.name].append(measure(case, flags.seconds))
    titles = ["case", "streams x environments", "steps/s", "lowest", "highest", "goal"]
    print("|", " | ".join([*titles, "CPU a step, learner", "servers"]), "|")
    print("|---|---|---|---|---|---|---|---|")
    for case in cases:
        values, *costs = list(zip(*measurements[case.name], strict=True))[:3]
        numbers = [f"{v:,.0f}" for v in (statistics.median(values), min(values), max(values))]
        goal = f"{case.goal:,}" if case.goal else ""
        shape = f"{case.num_streams} x {case.envs_per_stream}"
        costs = [f"{statistics.median(cost):.1f} us" for cost in costs]
        print("|", " | ".join([case.name, shape, *numbers, goal, *costs]), "|")


if __name__ == "__main__":
    main()
