# SPDX-License-Identifier: Apache-2.0
"""What memory does a run need, by its number of environments?

    python benchmarks/memory.py [--seconds 20] [--sizes 2x8,4x8,8x8,16x8] [flags of monobeast.py]
    python benchmarks/memory.py --program polybeast [flags of polybeast.py: --model shallow, ...]

Runs the program for so many seconds after the first rows of its log, and adds up what its
processes hold then: proportional shares, so that what several of them share counts once. Of this,
"shared" lies in /dev/shm. What a GPU holds is not measured: net.py shows it. Prints Markdown.
"""

import argparse
import pathlib
import time

import ale_py
import torch
from ab import running
from machine import ROOT, descendants, print_header

SIZE_FLAGS = {
    "monobeast": "--num_actors {0} --envs_per_actor {1}",
    "polybeast": "--num_servers {0} --num_actors {0} --envs_per_stream {1}",
}


def memory_of(pid):
    """Return MiB of a process by kind: its share of all, and of it what is shared memory."""
    lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
    return sizes["Pss"], sizes["Pss_Shmem"]


def measure(program, arguments, seconds):
    """Run the program; return the memory of its own process, and of each of the others."""
    script = ROOT / f"{program}.py"
    with running(script, *arguments, "--disable_cuda", "--end_with_stdin") as (process, read):
        while len(read()) < 2:
            time.sleep(0.2)
        time.sleep(seconds)
        return memory_of(process.pid), [memory_of(pid) for pid in descendants(process.pid)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=20, help="after the first updates (20)")
    parser.add_argument("--sizes", default="2x8,4x8,8x8,16x8", help="processes x environments")
    parser.add_argument("--program", default="monobeast", choices=SIZE_FLAGS)
    options, arguments = parser.parse_known_args()
    print_header(ale_py, torch)
    print("\n| processes x environments | all, MiB | the learner | the others | shared |")
    print("|---|---|---|---|---|")
    for size in options.sizes.split(","):
        flags = SIZE_FLAGS[options.program].format(*size.split("x")).split()
        own, others = measure(options.program, [*flags, *arguments], options.seconds)
        rest = sum(pss for pss, _ in others)
        shared = own[1] + sum(shared for _, shared in others)
        numbers = [own[0] + rest, own[0], rest, shared]
        print("|", " | ".join([size, *(f"{number:,.0f}" for number in numbers)]), "|", flush=True)


if __name__ == "__main__":
    main()
