# SPDX-License-Identifier: Apache-2.0
"""What does a learner without environments cost another one of its policy?

    python benchmarks/starvation.py [--seconds 60] [--repeats 3]

MonoBeast plays Pong under torchrun, each rank on its own core, with one actor of 8 environments.
In turn: one rank; two ranks, of which the second one's actor is stopped. Prints Markdown: steps/s
of the first one's batches, and the ratio, each round's and the median.
"""

import argparse
import os
import signal
import statistics
import sys
import time

from ab import running, steps_per_second
from machine import print_header, processes_of

LAUNCHER = ["-m", "torch.distributed.run", "--standalone"]
FLAGS = ["--num_actors", "1", "--envs_per_actor", "8", "--disable_cuda"]


def be_rank():
    os.environ["STARVATION_RANK"] = os.environ["LOCAL_RANK"]  # which its actors do not see

    import monobeast
    from beast.runs import run

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"])]})
    run.LOG_INTERVAL = 1
    monobeast.run_program(monobeast.main)


def measure(num_ranks, seconds):
    """Return the steps/s that the first rank's batches make; a second rank has none."""
    stopped, launcher = [], [*LAUNCHER, f"--nproc-per-node={num_ranks}"]
    with running(*launcher, __file__, "--rank", *FLAGS) as (_, read):
        try:
            while len(read()) < 10:  # when compilers, caches and queues are warm
                time.sleep(1)
            if num_ranks > 1:
                marked = processes_of("STARVATION_RANK=1")
                stopped = [pid for pid, command in marked.items() if b"forkserver" in command]
                assert stopped, "the second rank has no actors"
                for pid in stopped:
                    os.kill(pid, signal.SIGSTOP)
                time.sleep(10)  # until it has used up what it had
            first = read()[-1]
            time.sleep(seconds)
            return steps_per_second([first, read()[-1]])
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    import torch

    print_header(torch)
    print("\n| round | alone, steps/s | beside a rank without batches | ratio |\n|---|---|---|---|")
    ratios = []
    for number in range(options.repeats):
        alone, beside = (measure(ranks, options.seconds) for ranks in (1, 2))
        ratios.append(beside / alone)
        print(f"| {number + 1} | {alone:,.0f} | {beside:,.0f} | {ratios[-1]:.2f} |", flush=True)
    print(f"\nMedian of the ratios: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    if "--rank" in sys.argv:
        sys.argv.remove("--rank")
        be_rank()
    main()
