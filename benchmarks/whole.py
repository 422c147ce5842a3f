# SPDX-License-Identifier: Apache-2.0
"""How fast is a whole program, next to what its parts allow on these cores?

    python benchmarks/whole.py [--repeats 3] [flags of monobeast.py]
    python benchmarks/whole.py --program polybeast [flags of polybeast.py]

In each round every part is measured alone on one core, the other cores being idle: stepping the
environments, inference in batches of `--envs_per_actor` (or `--envs_per_stream`), and learning from
batches of `--batch_size` rollouts; then the whole program. If one step needs e + i + l seconds of a
core for the three, then n cores cannot make more than n / (e + i + l) steps a second; `share` is
how much of that the whole reaches. With a GPU, learning is measured there and does not count for
the cores. Seconds are wall-clock time. Prints Markdown.
"""

import argparse
import csv
import itertools
import multiprocessing
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

import ale_py  # noqa: E402
import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from environments import print_header  # noqa: E402

import experiment  # noqa: E402
import monobeast  # noqa: E402
import polybeast  # noqa: E402
import polybeast_env  # noqa: E402
from environment import Environments, map_nest  # noqa: E402


def rate_of(function, steps_a_call, seconds):
    """Return steps/s of calling `function` for so long, after a fifth of that to warm up."""
    for limit in (seconds / 5, seconds):
        begin, calls = time.perf_counter(), 0
        while time.perf_counter() < begin + limit:
            function()
            calls += 1
    return calls * steps_a_call / (time.perf_counter() - begin)


def make_actor(flags):
    """Return environments and model as one actor, or stream, of the program has them."""
    poly = hasattr(flags, "envs_per_stream")
    create_env = polybeast_env.create_env if poly else monobeast.create_env
    num_envs = (flags.envs_per_stream or 8) if poly else flags.envs_per_actor
    environments = Environments(lambda: create_env(flags), num_envs, [1])
    arguments = (environments.observation_space, environments.num_actions, flags.use_lstm)
    if poly:
        return environments, polybeast.Net(*arguments, flags.model)
    return environments, monobeast.Net(*arguments)


def measure_environments(flags, seconds):
    environments, model = make_actor(flags)
    environments.initial()
    random = np.random.default_rng(1)
    N = environments.num_envs
    actions = itertools.cycle(random.integers(model.num_actions, size=(999, N)))
    return rate_of(lambda: environments.step(next(actions)), N, seconds)


@torch.inference_mode()
def measure_inference(flags, seconds):
    environments, model = make_actor(flags)
    inputs = map_nest(lambda a: torch.from_numpy(a).unsqueeze(0), environments.initial())
    agent_state = model.initial_state(environments.num_envs)
    return rate_of(lambda: model(inputs, agent_state), environments.num_envs, seconds)


def measure_learning(flags, seconds):
    environments, model = make_actor(flags)
    T, B = flags.unroll_length, flags.batch_size
    row = environments.initial()
    inputs = map_nest(lambda a: torch.from_numpy(a[:1]).unsqueeze(0), row)
    output, _ = model(inputs, model.initial_state(1))
    batch = {
        key: value.detach().expand(T + 1, B, *value.shape[2:]).clone()
        for key, value in (inputs | output).items()
    }
    batch["done"][:] = False
    device = torch.device("cuda" if torch.cuda.is_available() and not flags.disable_cuda else "cpu")
    model.to(device)
    batch = {key: value.to(device) for key, value in batch.items()}
    agent_state = tuple(state.to(device) for state in model.initial_state(B))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5)
    learn = monobeast.learn
    return rate_of(lambda: learn(flags, model, batch, agent_state, optimizer), T * B, seconds)


PARTS = {
    "environments": measure_environments,
    "inference": measure_inference,
    "learning": measure_learning,
}


def measure_part(name, flags, seconds, pipe):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    experiment.keep_freed_memory()
    pipe.send(PARTS[name](flags, seconds))


def measure_whole(program, arguments, seconds):
    """Run the program; return its steps/s after a third of the time to warm up."""
    with tempfile.TemporaryDirectory() as savedir:
        command = [sys.executable, program.__file__, "--savedir", savedir]
        command += ["--xpid", "benchmark", "--disable_checkpoint", *arguments]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        logs = pathlib.Path(savedir) / "benchmark" / "logs.csv"
        ticks = []
        while process.poll() is None and (
            not ticks or ticks[-1][0] < ticks[0][0] + 4 / 3 * seconds
        ):
            time.sleep(1)
            if logs.exists():
                with open(logs, newline="") as file:
                    rows = [row for row in csv.DictReader(file) if int(row["step"]) > 0]
                ticks = [(float(row["_time"]), int(row["step"])) for row in rows]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    if not ticks:
        sys.exit(errors)
    ticks = [tick for tick in ticks if tick[0] >= ticks[0][0] + seconds / 3]
    return (ticks[-1][1] - ticks[0][1]) / (ticks[-1][0] - ticks[0][0])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--seconds", type=float, default=10, help="for a part (default: 10)")
    parser.add_argument("--whole_seconds", type=float, default=45, help="(default: 45)")
    parser.add_argument("--program", default="monobeast", choices=["monobeast", "polybeast"])
    options, arguments = parser.parse_known_args()
    program = {"monobeast": monobeast, "polybeast": polybeast}[options.program]
    flags = program.parser.parse_args(arguments)
    print_header(ale_py, gym, np, torch)
    print(f"- {flags.env}, median of {options.repeats} rounds", flush=True)

    rates = {name: [] for name in [*PARTS, "whole program", "parts allow", "share"]}
    context = multiprocessing.get_context("spawn")
    for _ in range(options.repeats):
        for name in PARTS:
            pipe, far_end = context.Pipe()
            arguments_of_part = (name, flags, options.seconds, far_end)
            process = context.Process(target=measure_part, args=arguments_of_part)
            process.start()
            far_end.close()  # so that recv raises if the process dies
            rates[name].append(pipe.recv())
            process.join()
        rates["whole program"].append(measure_whole(program, arguments, options.whole_seconds))
        busy = list(PARTS)
        if torch.cuda.is_available() and not flags.disable_cuda:
            busy.remove("learning")
        seconds_a_step = sum(1 / rates[name][-1] for name in busy)
        rates["parts allow"].append(len(os.sched_getaffinity(0)) / seconds_a_step)
        rates["share"].append(rates["whole program"][-1] / rates["parts allow"][-1])

    print("\n| agent steps/s | median | lowest | highest |\n|---|---|---|---|")
    for name, values in rates.items():
        form = "{:.2f}" if name == "share" else "{:,.0f}"
        numbers = [statistics.median(values), min(values), max(values)]
        print("|", " | ".join([name, *map(form.format, numbers)]), "|")


if __name__ == "__main__":
    main()
