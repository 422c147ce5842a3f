# SPDX-License-Identifier: Apache-2.0
"""What do more environments cost: steps/s, CPU time, memory, files and threads on either side?

    python benchmarks/growth.py [--repeats 3] [--seconds 6] [--sizes 8,4096] [--only 4x84]

The same mocks as in transport.py, from 8 to 4,096 environments on up to 64 streams, all on this
machine; again with a learner so slow that all wait for it, which takes the most memory. Each
measurement has processes of its own, and so peaks of memory of its own. Prints Markdown.

"learner's growth" is its memory beyond what it had before the actors began, and "rollouts, at most"
the part of that which can be rollouts, as max_rollouts() counts them. Memory, files and threads of
servers are sums over their processes.
"""

import argparse
import statistics

from machine import print_header, run_apart
from transport import (
    BATCH_SIZE,
    QUEUE_SIZE,
    UNROLL_LENGTH,
    Case,
    MockEnvironments,
    measure,
)

from beast.processes.machine import keep_freed_memory

SIZES = [8, 32, 128, 512, 1024, 2048, 4096]
ENVS_PER_STREAM, MAX_STREAMS = 32, 64
STREAMS_PER_SERVER = 16  # the most that a server takes
OBSERVATIONS = {  # shape, stack size, seconds that the learner takes for a batch
    "4x84x84, newest frame only": ((4, 84, 84), 4, 0),
    "4x84x84, newest frame only, slow learner": ((4, 84, 84), 4, 0.02),
    "100 bytes": ((100,), 0, 0),
}
OUTPUT_BYTES = 8 + 6 * 4 + 4  # transport.py's answer a row: action, policy logits, baseline
TITLES = [
    "environments", "streams x environments", "servers", "steps/s", "lowest", "highest",
    "CPU a step, learner", "servers", "learner's memory", "learner's growth",
    "rollouts, at most", "servers' memory",
    "files, learner + servers", "threads, learner + servers",
]  # fmt: skip


def make_case(observation, num_envs):
    num_streams = min(max(num_envs // ENVS_PER_STREAM, 2), MAX_STREAMS)
    num_servers = max(num_streams // STREAMS_PER_SERVER, 2)
    shape, stack_size, pause = OBSERVATIONS[observation]
    return Case(
        observation,
        shape,
        stack_size,
        num_streams,
        num_envs // num_streams,
        num_servers,
        learner_pause=pause,
    )


def rollout_bytes(case):
    """Return the size of one environment's rollout, T + 1 rows."""
    row = MockEnvironments(case.shape, case.stack_size, 1).row
    return (UNROLL_LENGTH + 1) * (sum(array.nbytes for array in row.values()) + OUTPUT_BYTES)


def max_rollouts(case):
    """Return about how many rollouts, of one environment each, the learner holds at most.

    Each stream: the one that it writes, or a finished one that the queue has no room for, and a row
    more. The queue: it takes a stream's rollout while it is not full. The learner: a batch, and the
    next one that is being made.
    """
    num_envs = case.num_streams * case.envs_per_stream
    one_row = num_envs / (UNROLL_LENGTH + 1)
    return num_envs + one_row + (QUEUE_SIZE - 1 + case.envs_per_stream) + 2 * BATCH_SIZE


def measure_as_learner(case, seconds):
    keep_freed_memory()  # as polybeast.py does
    return measure(case, seconds)


def row_of(case, measurements):
    """Return the cells of a size: medians, and of steps/s the spread."""

    def median(function):
        return statistics.median(map(function, measurements))

    def both(name):
        learner = median(lambda m: getattr(m.learner, name))
        return f"{learner:.0f} + {median(lambda m: getattr(m.servers, name)):.0f}"

    rates = [m.rate for m in measurements]
    return [
        f"{case.num_streams * case.envs_per_stream:,}",
        f"{case.num_streams} x {case.envs_per_stream}",
        f"{case.num_servers}",
        *(f"{rate:,.0f}" for rate in (statistics.median(rates), min(rates), max(rates))),
        f"{median(lambda m: m.learner_us):.1f} us",
        f"{median(lambda m: m.servers_us):.1f} us",
        f"{median(lambda m: m.learner.peak_bytes) / 1e6:,.0f} MB",
        f"{median(lambda m: m.learner.peak_bytes - m.learner_bytes) / 1e6:,.0f} MB",
        f"{max_rollouts(case) * rollout_bytes(case) / 1e6:,.0f} MB",
        f"{median(lambda m: m.servers.peak_bytes) / 1e6:,.0f} MB",
        both("num_files"),
        both("num_threads"),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--seconds", type=float, default=6, help="a size (default: 6)")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="(default: %(default)s)")
    parser.add_argument("--only", default="", help="observations whose name has this in it")
    flags = parser.parse_args()

    import grpc
    import numpy
    import torch

    print_header(grpc, numpy, torch)
    print(f"- unroll length {UNROLL_LENGTH}, median of {flags.repeats} rounds", flush=True)
    names = [name for name in OBSERVATIONS if flags.only in name]
    cases = [make_case(name, int(size)) for name in names for size in flags.sizes.split(",")]
    measurements = {case: [] for case in cases}
    for _ in range(flags.repeats):
        for case in cases:
            measurements[case].append(run_apart(measure_as_learner, case, flags.seconds))
    for name in names:
        case = next(case for case in cases if case.name == name)
        print(f"\n{name}, {rollout_bytes(case):,} bytes a rollout of one environment:\n")
        print("|", " | ".join(TITLES), "|")
        print("|" + "---|" * len(TITLES))
        for case in cases:
            if case.name == name:
                print("|", " | ".join(row_of(case, measurements[case])), "|")


if __name__ == "__main__":
    main()
