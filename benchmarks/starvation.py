# SPDX-License-Identifier: Apache-2.0
"""What does a learner without environments cost another one of its policy?

    python benchmarks/starvation.py [--seconds 60] [--repeats 3]

MonoBeast plays Pong under torchrun, each rank on its own core, with one actor of 8 environments.
In turn: one rank; two ranks, of which the second one's actor is stopped. Prints Markdown: steps/s
of the first one's batches, and the ratio, each round's and the median.
"""

import argparse
import csv
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machine import print_header

LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
FLAGS = "--xpid run --num_actors 1 --envs_per_actor 8 --disable_cuda --disable_checkpoint"


def be_rank():
    os.environ["STARVATION_RANK"] = os.environ["LOCAL_RANK"]  # which its actors do not see

    import monobeast
    from beast.runs import run

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"])]})
    run.LOG_INTERVAL = 1
    monobeast.run_program(monobeast.main)


def read_rows(folder):
    """Return time and step of each row of the log."""
    path = folder / "run" / "logs.csv"
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [(float(row["_time"]), int(row["step"])) for row in csv.DictReader(file)]


def find_actors(rank):
    """Return the process ids of the actors of a rank, whose core they share."""
    actors = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes()
            environment = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"forkserver" in command and f"STARVATION_RANK={rank}".encode() in environment:
            actors.append(int(path.name))
    return actors


def measure(num_ranks, seconds):
    """Return the steps/s that the first rank's batches make; a second rank has none."""
    with tempfile.TemporaryDirectory() as folder:
        folder, stopped = pathlib.Path(folder), []
        command = [*LAUNCHER, f"--nproc-per-node={num_ranks}", __file__, "--rank", *FLAGS.split()]
        command += ["--savedir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while len(read_rows(folder)) < 10:  # when compilers, caches and queues are warm
                assert process.poll() is None, "the learners have ended"
                time.sleep(1)
            if num_ranks > 1:
                stopped = find_actors(1)
                assert stopped, "the second rank has no actors"
                for pid in stopped:
                    os.kill(pid, signal.SIGSTOP)
                time.sleep(10)  # until it has used up what it had
            begin, first = read_rows(folder)[-1]
            time.sleep(seconds)
            end, last = read_rows(folder)[-1]
            return (last - first) / (end - begin)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            process.terminate()
            process.wait()


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
