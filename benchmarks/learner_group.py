# SPDX-License-Identifier: Apache-2.0
"""What does it cost that several learners sum their gradients?

    python benchmarks/learner_group.py [--repeats 3] [--updates 30] [--nets deep,shallow]

For each net: first the exchange alone, between 2 and 4 ranks that do nothing else, by what torchrun
starts and PolyBeast uses. Then learning from random rollouts, in turn by one learner with a thread
on each of two cores and twice the batch, and by two learners with a thread and a batch each. All on
this machine, over gloo. Prints Markdown.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import torch
from machine import print_header
from net import NUM_ACTIONS, make_batch

import polybeast
from beast.actors.weights import LocalWeights
from beast.learners import torchrun
from beast.learners.devices import choose_precision
from beast.learners.learner import Learner
from beast.processes.machine import keep_freed_memory


def measure(net, batch_size, threads, updates):
    """Be a rank, or the only learner: print seconds an update, and of them in the exchange.

    With a batch size of 0 the exchange is all that an update does.
    """
    flags = polybeast.parser.parse_args(["--disable_cuda", "--learning_rate", "1e-8"])
    keep_freed_memory()  # as the programs do
    ranks = torchrun.join_group(flags)
    torch.set_num_threads(threads)
    space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    net = polybeast.Net(space, NUM_ACTIONS, False, net)
    choose_precision(flags, net, [torch.device("cpu")])
    optimizer, decay = polybeast.create_optimizer(flags, net)
    learner = Learner(net, optimizer, decay, LocalWeights(net))
    learner.group.share_state(learner)
    exchange = 0.0
    sum_over_learners = ranks.sum

    def timed_sum(model, metrics):
        nonlocal exchange
        begin = time.perf_counter()
        try:
            return sum_over_learners(model, metrics)
        finally:
            exchange += time.perf_counter() - begin

    ranks.sum = timed_sum
    if batch_size == 0:
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)

        def update():
            for parameter in net.parameters():
                parameter.grad.fill_(1.0)
            timed_sum(net, {"steps": torch.ones(())})
    else:
        batch = make_batch(space, NUM_ACTIONS, flags.unroll_length, batch_size)

        def update():
            polybeast.learn(flags, net, batch, (), optimizer, ranks)

    for _ in range(3):
        update()
        ranks.share_returns([], [])  # as Run.record does after each update
    exchange, begin = 0.0, time.perf_counter()
    for _ in range(updates):
        update()
        ranks.share_returns([], [])
    seconds = (time.perf_counter() - begin) / updates
    ranks.leave(is_over=True)
    if ranks.rank == 0:
        print(json.dumps([seconds, exchange / updates]), flush=True)


def run(num_ranks, **options):
    """Return what rank 0 has measured."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [sys.executable, *(launcher if num_ranks > 1 else [])]
    command += [__file__, "--worker", json.dumps(options)]
    # torchrun would set it, too, with a warning; the number of threads is set in the process.
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if num_ranks > 1 else {})
    result = subprocess.run(command, stdout=subprocess.PIPE, env=environment, text=True, check=True)
    return json.loads(result.stdout.strip().splitlines()[-1])


def show(values):
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--nets", default="deep,shallow")
    parser.add_argument("--batch_size", type=int, default=8)
    options = parser.parse_args()
    print_header(torch)
    space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    B = options.batch_size
    for name in options.nets.split(","):
        parameters = polybeast.Net(space, NUM_ACTIONS, False, name).parameters()
        num_bytes = 4 * sum(p.numel() for p in parameters)
        print(f"\n{name} net, {num_bytes / 1e6:.1f} MB\n", flush=True)
        times = {}
        for _ in range(options.repeats):
            for ranks in (2, 4):
                seconds, _ = run(ranks, net=name, batch_size=0, threads=1, updates=options.updates)
                times.setdefault(f"exchange alone, {ranks} ranks", []).append(1e3 * seconds)
            updates = options.updates
            one, _ = run(1, net=name, batch_size=2 * B, threads=2, updates=updates)
            two, exchange = run(2, net=name, batch_size=B, threads=1, updates=updates)
            times.setdefault(f"one learner, 2 threads, batch {2 * B}", []).append(1e3 * one)
            times.setdefault(f"two learners, a thread each, batch {B}", []).append(1e3 * two)
            times.setdefault("of it in the exchange, waits included", []).append(1e3 * exchange)
            times.setdefault("the exchange, %", []).append(100 * exchange / two)
        print("| | ms an update, or % of it |\n|---|---|")
        for what, values in times.items():
            print(f"| {what} | {show(values)} |")


if __name__ == "__main__":
    if "--worker" in sys.argv:
        measure(**json.loads(sys.argv[2]))
    else:
        main()
