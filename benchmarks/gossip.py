# SPDX-License-Identifier: Apache-2.0
"""How many steps/s does gala.py learn from next to monobeast.py, and what does its exchange cost?

    python benchmarks/gossip.py [--repeats 3] [--seconds 45] [flags that both programs have]

Whole programs with 16 environments each run one after the other, and over again, so that a slow
minute slows all of them. Their nets are alike, their updates are not: MonoBeast's are of 160 steps
and V-trace, those of agents of 20 and A2C. What an exchange costs is the ratio to `none`. Prints
Markdown.
"""

import argparse
import statistics

import ale_py
import gymnasium as gym
import numpy as np
import torch
from machine import print_header
from whole import measure_whole, monobeast

import gala

AGENTS = "--num_agents 4 --envs_per_agent 4 --exchange"
CASES = {
    "monobeast, 2 x 8": (monobeast, "--num_actors 2 --envs_per_actor 8"),
    **{f"gala, 4 x 4, {way}": (gala, f"{AGENTS} {way}") for way in ("none", "gossip", "allreduce")},
    "gala, 1 x 16": (gala, "--num_agents 1 --envs_per_agent 16"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--seconds", type=float, default=45, help="for a program (default: 45)")
    options, arguments = parser.parse_known_args()
    print_header(ale_py, gym, np, torch)
    rates, cores = {name: [] for name in CASES}, {name: [] for name in CASES}
    for _ in range(options.repeats):
        for name, (program, flags) in CASES.items():
            rate, log = measure_whole(program, [*flags.split(), *arguments], options.seconds)
            rates[name].append(rate)
            cores[name].append(log["busy_cores"])
    columns = ["agent steps/s", f"median of {options.repeats}", "lowest", "highest", "busy cores"]
    print("\n|", " | ".join([*columns, "to monobeast", "to gala's none"]), "|\n" + "|---" * 7 + "|")
    bases = rates["monobeast, 2 x 8"], rates["gala, 4 x 4, none"]
    for name, values in rates.items():
        cells = [f"{f(values):,.0f}" for f in (statistics.median, min, max)]
        cells.append(f"{statistics.median(cores[name]):.2f}")
        for base in bases:
            ratio = statistics.median(a / b for a, b in zip(values, base, strict=True))
            cells.append(f"{ratio:.2f}")
        print("|", " | ".join([name, *cells]), "|")


if __name__ == "__main__":
    main()
