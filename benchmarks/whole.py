# SPDX-License-Identifier: Apache-2.0
"""How fast is a whole program, where does a step's time go, and what is the bottleneck?

    python benchmarks/whole.py [--repeats 3] [flags of monobeast.py]
    python benchmarks/whole.py --program polybeast [flags of polybeast.py]
    python benchmarks/whole.py --program both [flags that both have]

In each round the whole program runs, then each part alone on one core, in the precision that the
program uses:

- environments: stepping them with either --env_backend, of which the faster one counts;
- inference: in batches of --envs_per_actor, or as large as PolyBeast's were in the mean;
- learning: from batches of --batch_size rollouts;
- transport: rows and rollouts on their way to the learner. MonoBeast: into shared memory and out of
  it. PolyBeast: with transport.py's mocks, both sides of the wire;
- weights: publishing them, and loading them as often as actors or inference threads do.

Parts are timed by CPU time, the whole program by the clock. If a step needs e + i + l seconds of a
core for environment, inference and learning, then n cores cannot make more than n / (e + i + l)
steps a second: that is what the parts allow, and `share` how much of it the whole reaches.
"elsewhere" is the core time of the whole that no part accounts for: cores that wait, memory and
caches that are shared, other programs. Work of a GPU is timed by the clock and counts for no core;
then the parts allow no more than the slowest of cores, inference and learning.

The bottleneck is the largest part; with a GPU, the side that waits least for the other, by the
program's own log. Prints Markdown. `ab.py` compares two checkouts.
"""

import argparse
import copy
import functools
import itertools
import math
import os
import statistics
import time

import ale_py
import gymnasium as gym
import numpy as np
import torch
import transport
from ab import run_program, steps_per_second
from machine import print_header, run_apart
from net import rate_of, rate_of_inference, rate_of_learning

import monobeast
import polybeast
import polybeast_env
from beast.actors.rollout_buffers import create_buffers, write_row
from beast.actors.weights import LocalWeights, SharedWeights
from beast.envs.environments import create_environments
from beast.errors import EnvError
from beast.flags import parse_flags
from beast.learners.devices import choose_precision, get_device
from beast.learners.nets import create_net
from beast.nest import map_nest
from beast.processes.machine import keep_freed_memory

PROGRAMS = {"monobeast": monobeast, "polybeast": polybeast}


def get_num_envs(program, flags):
    """Return how many environments an actor, or a stream, steps as one batch."""
    return (flags.envs_per_stream or 8) if program is polybeast else flags.envs_per_actor


def make_actor(program, flags):
    """Return environments and model as one actor, or stream, of the program has them."""
    source = polybeast_env if program is polybeast else monobeast
    num_envs = get_num_envs(program, flags)
    environments = create_environments(flags, source.create_env, num_envs, [1], "actor")
    arguments = (environments.observation_space, environments.num_actions, flags.use_lstm)
    if program is polybeast:
        return environments, program.Net(*arguments, flags.model)
    return environments, program.Net(*arguments)


def measure_environments(program, flags, num_rows, seconds, backend):
    flags.env_backend = backend
    try:
        environments, model = make_actor(program, flags)
    except EnvError:
        return math.nan  # not every environment is one of ale-py's
    environments.initial()
    N = environments.num_envs
    actions = np.random.default_rng(1).integers(model.num_actions, size=(999, N))
    actions = itertools.cycle(actions)
    return rate_of(lambda: environments.step(next(actions)), N, seconds, time.process_time)


def measure_inference(program, flags, num_rows, seconds):
    environments, model = make_actor(program, flags)
    device = get_device(flags) if program is polybeast else torch.device("cpu")
    space = environments.observation_space
    return rate_of_inference(flags, model, space, num_rows, device, seconds)


def measure_learning(program, flags, num_rows, seconds):
    environments, model = make_actor(program, flags)
    return rate_of_learning(program, flags, model, environments.observation_space, seconds)


def measure_transport(program, flags, num_rows, seconds):
    environments, model = make_actor(program, flags)
    if program is monobeast:
        return rate_of_shared_memory(flags, environments, seconds)
    case = transport.Case(
        flags.env,
        environments.observation_space.shape,
        environments.stack_size,
        flags.num_actors or flags.num_servers,
        environments.num_envs,
        flags.num_servers,
        tcp=False,
    )
    measurement = transport.measure(case, seconds)
    return 1e6 / (measurement.learner_us + measurement.servers_us)


def rate_of_shared_memory(flags, environments, seconds):
    """Write rows into the rollout buffers as `act` does, and batch them as the learner does."""
    N, T, B = environments.num_envs, flags.unroll_length, flags.batch_size
    spaces = environments.observation_space, environments.action_space
    _, answer = create_net(monobeast.Net, *spaces, use_lstm=flags.use_lstm)
    buffers = create_buffers(flags, *answer)
    rows, row = buffers["rows"], environments.initial()
    arrays = map_nest(torch.Tensor.numpy, rows)
    keys = rows.keys() - row.keys()  # of the net's answer
    row = row | {key: np.zeros_like(arrays[key][:N, 0]) for key in keys}
    batch = map_nest(lambda b: torch.empty(T + 1, B, *b.shape[2:], dtype=b.dtype), rows)
    free, columns = itertools.cycle(range(flags.num_buffers)), itertools.cycle(range(B))

    def transport_rollouts():
        indices = np.array([next(free) for _ in range(N)])
        for t in range(T + 1):
            write_row(arrays, indices, t, row)
        for m in indices:
            i = next(columns)
            map_nest(lambda x, b: x[:, i].copy_(b[m]), batch, rows)  # noqa: B023

    return rate_of(transport_rollouts, N * T, seconds, time.process_time)


def measure_weights(program, flags, num_rows, seconds):
    """Publish the weights of an update, and load them as often as is done meanwhile."""
    environments, actor_model = make_actor(program, flags)
    device = get_device(flags)
    model = copy.deepcopy(actor_model).to(device)
    weights = (LocalWeights if program is polybeast else SharedWeights)(model)
    loads = max(1, flags.batch_size // environments.num_envs)  # before each rollout
    if program is polybeast:
        loads = flags.num_inference_threads
        actor_model.to(device)

    def transport_weights():
        weights.publish(model)
        for _ in range(loads):
            weights.load_into(actor_model)

    steps = flags.unroll_length * flags.batch_size
    with torch.no_grad():
        return rate_of(transport_weights, steps, seconds, time.process_time)


ENVIRONMENTS = {
    f"environments, {backend}": functools.partial(measure_environments, backend=backend)
    for backend in ("gym", "ale_vector")
}
PARTS = ENVIRONMENTS | {
    "inference": measure_inference,
    "learning": measure_learning,
    "transport": measure_transport,
    "weights": measure_weights,
}


def measure_part(name, program, flags, num_rows, seconds):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    if get_device(flags).type == "cpu":
        keep_freed_memory()  # as the learner does
    return PARTS[name](PROGRAMS[program], flags, num_rows, seconds)


def measure_whole(program, arguments, seconds):
    """Run the program; return its steps/s, and the means of some metrics that it logs."""
    rows, busy_cores = run_program(program.__file__, arguments, seconds)
    keys = [key for key in rows[0] if "_wait" in key or key == "inference_batch_size"]
    log = {key: statistics.mean(float(row[key] or 0) for row in rows[1:]) for key in keys}
    return steps_per_second(rows), log | {"busy_cores": busy_cores}


def name_waits(log):
    """Return who waits for whom in the whole program, as a text, and which side limits it."""
    learner = log["learner_wait"]
    actors = log.get("actor_wait_learner", log.get("actor_wait"))
    text = f"{log['busy_cores']:.2f} of {len(os.sched_getaffinity(0))} cores are busy; the learner "
    text += f"waits {learner:.0%} of the time, an actor {actors:.0%} for the learner"
    waits = {what: log.get(f"actor_wait_{what}") for what in ("inference", "environments")}
    if None in waits.values():  # MonoBeast's actors do both themselves
        return text, "the learner" if learner < actors else "the actors"
    text += "".join(f", {share:.0%} for {what}" for what, share in waits.items())
    return text, "the learner" if learner < actors else f"the actors' {max(waits, key=waits.get)}"


def report(program, flags, rates, log):
    """Print a program's table and its bottleneck."""
    cores = len(os.sched_getaffinity(0))
    rate = {name: statistics.median(values) for name, values in rates.items()}
    whole = rate["whole program"]
    fastest = max(ENVIRONMENTS, key=lambda name: np.nan_to_num(rate[name]))
    on_gpu = []
    if get_device(flags).type == "cuda":
        on_gpu = ["inference", "learning"] if program is polybeast else ["learning"]
    counted = [name for name in (fastest, *list(PARTS)[len(ENVIRONMENTS) :]) if name not in on_gpu]
    us = {name: 1e6 / value for name, value in rate.items()}
    us["whole program"] *= cores
    us["elsewhere"] = us["whole program"] - sum(us[name] for name in counted)

    print("\n| part | steps/s | lowest | highest | us of a core a step | share |")
    print("|---|---|---|---|---|---|")
    for name in [*rates, "elsewhere"]:
        spread = [rate[name], min(rates[name]), max(rates[name])] if name in rates else []
        cells = [f"{number:,.0f}" for number in spread] or [""] * 3
        share = f"{us[name] / us['whole program']:.0%}"
        if name in on_gpu:
            cells += ["", f"{whole / rate[name]:.0%} of the GPU's time"]
        else:
            counts = name in [*counted, "whole program", "elsewhere"]
            cells += [f"{us[name]:,.1f}", share if counts else ""]
        print("|", " | ".join([name, *cells]), "|")

    busy = sum(us[name] for name in (fastest, "inference", "learning") if name not in on_gpu)
    allowed = min([1e6 * cores / busy, *(rate[name] for name in on_gpu)])
    waits, side = name_waits(log)
    part = max(counted, key=us.get)
    print(f"\n- Parts allow {allowed:,.0f} steps/s on {cores} cores; share: {whole / allowed:.2f}")
    print(f"- In the whole program {waits}")
    if on_gpu:
        print(f"- Bottleneck: {side}: that side waits least", flush=True)
    else:
        taken = f"{us[part] / us['whole program']:.0%} of a step's core time"
        more = ", though more goes elsewhere" if us["elsewhere"] > us[part] else ""
        print(f"- Bottleneck: {part}, with {taken}{more}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--seconds", type=float, default=10, help="for a part (default: 10)")
    parser.add_argument("--whole_seconds", type=float, default=45, help="(default: 45)")
    parser.add_argument("--program", default="monobeast", choices=[*PROGRAMS, "both"])
    options, arguments = parser.parse_known_args()
    print_header(ale_py, gym, np, torch)
    for program_name in PROGRAMS if options.program == "both" else [options.program]:
        program = PROGRAMS[program_name]
        flags = parse_flags(program.parser, arguments)
        flags = program.resolve(flags)
        environments, model = make_actor(program, flags)
        environments.close()
        choose_precision(flags, model, [get_device(flags), torch.device("cpu")])
        what = f"{program_name}, {flags.env}, {flags.precision}, {get_device(flags)}"
        print(f"\n- {what}, median of {options.repeats} rounds", flush=True)
        rates, logs = {name: [] for name in [*PARTS, "whole program"]}, []
        for _ in range(options.repeats):
            rate, log = measure_whole(program, arguments, options.whole_seconds)
            rates["whole program"].append(rate)
            logs.append(log)
            num_rows = round(log.get("inference_batch_size", 0)) or get_num_envs(program, flags)
            for name in PARTS:
                part = name, program_name, flags, num_rows, options.seconds
                rates[name].append(run_apart(measure_part, *part))
        log = {key: statistics.mean(each[key] for each in logs) for key in logs[0]}
        report(program, flags, rates, log)


if __name__ == "__main__":
    main()
