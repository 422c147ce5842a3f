# SPDX-License-Identifier: Apache-2.0
"""How fast are the nets alone: learning by batch size, inference by rows, in each precision?

    python benchmarks/net.py [--seconds 3] [--nets deep,shallow] [--batch_sizes 8,32,128,512]
                             [--rows 16,64,512] [--precisions fp32,bf16] [--disable_cuda]

Calls `learn` of polybeast.py on random rollouts that lie on the device already, and its net on rows
that come from the CPU and are answered there, as in its inference. On the GPU if there is one, with
the highest use of its memory in brackets (rows lie in pinned memory then; in fp32, PyTorch lets its
convolutions compute in TF32); else on one core, in agent steps a second of the thread's CPU time.
Prints Markdown.
"""

import argparse
import time

import gymnasium as gym
import numpy as np
import torch
from machine import print_header

import polybeast
from beast.envs.spaces import empty_observation
from beast.learners.devices import (
    DeviceCopies,
    autocast,
    get_device,
    to_float32,
)
from beast.nest import map_nest
from beast.processes.machine import keep_freed_memory

NUM_ACTIONS = 6  # of Pong


def rate_of(function, steps_a_call, seconds, clock=time.perf_counter):
    """Return steps/s of calling `function` for so long, after a fifth of that to warm up."""
    for limit in (seconds / 5, seconds):
        end, begin, calls = time.perf_counter() + limit, clock(), 0
        while calls == 0 or time.perf_counter() < end:
            function()
            calls += 1
    return calls * steps_a_call / (clock() - begin)


def clock_of(device):
    """Return the clock: on a CPU that of the thread's CPU time, which others disturb less."""
    return time.thread_time if device.type == "cpu" else time.perf_counter


def random_rows(space, num_actions, T, B):
    """Return the inputs of a model, tensors [T, B, ...], with random frames."""
    frames = map_nest(torch.from_numpy, empty_observation(space, T * B))
    false = torch.zeros(T, B, dtype=torch.bool)
    return {
        "frame": map_nest(lambda x: x.random_().view(T, B, *x.shape[1:]), frames),
        "reward": torch.zeros(T, B),
        "done": false,
        "truncated": false,
        "terminated": false,
        "last_action": torch.randint(num_actions, (T, B)),
    }


def make_batch(space, num_actions, T, B):
    """Return a batch of random rollouts, tensors [T + 1, B, ...]."""
    batch = random_rows(space, num_actions, T + 1, B)
    batch["action"] = torch.randint(num_actions, (T + 1, B))
    batch["policy_logits"] = torch.zeros(T + 1, B, num_actions)
    return batch


def rate_of_learning(program, flags, model, space, seconds):
    """Return steps/s of the program's `learn`."""
    T, B = flags.unroll_length, flags.batch_size
    device = get_device(flags)
    model.to(device)
    batch = make_batch(space, model.num_actions, T, B)
    batch, agent_state = map_nest(lambda x: x.to(device), (batch, model.initial_state(B)))
    # So small a step that the weights stay what they are: the data mean nothing.
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-8)

    def learning():
        program.learn(flags, model, batch, agent_state, optimizer)

    return rate_of(learning, T * B, seconds, clock_of(device))


@torch.no_grad()
def rate_of_inference(flags, model, space, num_rows, device, seconds):
    """Return rows/s of inference on `num_rows` at once, copies to and from the device included."""
    model.to(device)
    rows = random_rows(space, model.num_actions, 1, num_rows), model.initial_state(num_rows)
    if device.type == "cuda":  # as the dynamic batcher's are
        rows = map_nest(lambda x: x.pin_memory(), rows)
    copies = DeviceCopies(device)

    def infer():
        map_nest(lambda x: x.cpu(), to_float32(model(*copies.copy(rows))))

    with autocast(flags, device):  # around all calls, so that weights are cast once
        return rate_of(infer, num_rows, seconds, clock_of(device))


def main():
    def names(text):
        return text.split(",") if text else []

    def numbers(text):
        return [int(name) for name in names(text)]

    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--nets", default="deep,shallow", type=names, help="of polybeast.py")
    parser.add_argument("--batch_sizes", default="8,32,128,512", type=numbers, help="rollouts")
    parser.add_argument("--rows", default="16,32,64,128,256,512", type=numbers, help="at once")
    parser.add_argument("--precisions", default="fp32,bf16", type=names, help="to compare")
    parser.add_argument("--seconds", default=3.0, type=float, help="a measurement")
    parser.add_argument("--disable_cuda", action="store_true", help="measure the CPU")
    options = parser.parse_args()
    torch.set_num_threads(1)
    space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    flags = polybeast.parser.parse_args(["--disable_cuda"] if options.disable_cuda else [])
    device = get_device(flags)
    if device.type == "cpu":
        keep_freed_memory()  # as the learner does

    def learning(net, precision, batch_size):
        flags.precision, flags.batch_size = precision, batch_size
        model = polybeast.Net(space, NUM_ACTIONS, False, net)
        return rate_of_learning(polybeast, flags, model, space, options.seconds)

    def inference(net, precision, rows):
        flags.precision = precision
        model = polybeast.Net(space, NUM_ACTIONS, False, net)
        return rate_of_inference(flags, model, space, rows, device, options.seconds)

    def measure(function, *arguments):
        if device.type != "cuda":
            return f"{function(*arguments):,.0f}"
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        rate = function(*arguments)
        return f"{rate:,.0f} ({torch.cuda.max_memory_allocated() / 2**30:.1f} GiB)"

    print_header(gym, np, torch)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "one core"
    print(f"- {where}; 4x84x84, unroll length {flags.unroll_length}\n", flush=True)
    for function, title, sizes in (
        (learning, "learning, rollouts a batch", options.batch_sizes),
        (inference, "inference, rows at once", options.rows),
    ):
        columns = [f"{net} {p}" for net in options.nets for p in options.precisions]
        print("|", " | ".join([title, *columns]), "|")
        print("|" + "---|" * (1 + len(columns)))
        for size in sizes:
            cells = [
                measure(function, net, precision, size)
                for net in options.nets
                for precision in options.precisions
            ]
            print("|", " | ".join([f"{size:,}", *cells]), "|", flush=True)
        print()


if __name__ == "__main__":
    main()
