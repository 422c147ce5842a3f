# SPDX-License-Identifier: Apache-2.0
"""Find how many processes and environments make a program the fastest on this machine.

    python -m beast.autotune monobeast.py --env BreakoutNoFrameskip-v4

Each trial is the program itself in a child process, with the flags given and a temporary folder.
The last line printed is the command with the fastest flags; it is not run. Nothing that learning
depends on is varied: batch size, unroll length and the like stay, and the number of environments is
bounded, since with it grows the policies' lag.
"""

import argparse
import contextlib
import csv
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time

from beast.parser import value_of
from beast.processes.lifetime import STOP_SIGNALS
from beast.processes.machine import MAX_ENVS, MAX_LAG
from beast.servers.addresses import expand_addresses

GAIN = 1.1  # times the best rate so far; less might be noise, and more environments mean more lag
TRIALS_PER_FLAG = 3
MIN_UPDATES = 20  # by the learner, that a rate is measured over
PATIENCE = 120  # seconds for a trial to be measured; most take 10 to 15
GRACE = 15  # seconds for a trial to end
ENVS = "envs_per_actor", "envs_per_stream"  # flags, of which a program has one
ALL_GIVEN = "the command line sets all flags that could be varied: leave some out"
NOT_IN_TRIALS = ("--wandb", "--write_profiler_trace")  # flags
TRIAL = "--mode train --xpid trial --total_steps 1000000000000 --disable_checkpoint "
TRIAL += "--eval_interval 0 --end_with_stdin"

parser = argparse.ArgumentParser(
    prog="python -m beast.autotune",
    usage="%(prog)s PROGRAM [FLAG ...]",
    description="Find the fastest flags of a program on this machine, in some minutes, and "
    "print the command with them. It varies num_actors and envs_per_actor for monobeast.py and "
    "its forks; num_servers (not with --server_addresses), num_actors, envs_per_stream and "
    "num_inference_threads for polybeast.py and its forks. Flags that are given are kept.",
)
parser.add_argument("program", metavar="PROGRAM", help="monobeast.py, polybeast.py or a fork.")
parser.add_argument(
    "flags", metavar="FLAG", nargs=argparse.REMAINDER, help="Flags of the program, as in training."
)


class TrialError(RuntimeError):
    """A trial failed; the message is why."""


def main(argv=None):
    arguments = parser.parse_args(argv)
    if {"-h", "--help"} & set(arguments.flags):
        return parser.print_help()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parser.error("it measures one learner: start it without torchrun")
    given = {flag.partition("=")[0] for flag in arguments.flags}
    if "--elastic" in given:
        parser.error("it measures one learner: leave --elastic out")
    if "--listen" in given:
        parser.error("environments that dial in are not started here: leave --listen out")
    if not os.path.exists(arguments.program):
        parser.error(f"there is no file {arguments.program}")
    try:
        best = tune(arguments.program, arguments.flags)
    except (TrialError, ValueError) as error:  # ValueError: of expand_addresses
        sys.exit(f"{parser.prog}: {error}")
    print("The fastest:")
    print(shlex.join(["python", arguments.program, *arguments.flags, *as_arguments(best)]))


def tune(program, arguments):
    """Return the fastest values of those flags that the arguments leave open, as a dict.

    Raises:
      TrialError: there is nothing to vary; or the program fails with the arguments as they are.
    """
    start = find_flags(program, arguments)
    print(f"Trying {program}, each time for about 15 seconds:", flush=True)
    first = run_trial(program, arguments, {n: v for n, v in start.items() if v is not None})
    start = {name: first.flags[name] for name in start}
    rates = {as_text(start): first.rate}
    most_envs = max(MAX_LAG * first.flags["batch_size"], count_envs(first.flags))
    print_rate(start, first.rate)

    def measure(values):
        """Return the steps/s of a trial; 0 if it fails."""
        text = as_text(values)
        if text not in rates:
            try:
                check_trial(first.flags | values, most_envs)
                rates[text] = run_trial(program, arguments, values).rate
                print_rate(values, rates[text])
            except TrialError as error:
                rates[text] = 0
                print(f"{'skipped':>12}          {text}: {str(error).splitlines()[-1]}", flush=True)
        return rates[text]

    return search(measure, start, most_envs)


def find_flags(program, arguments):
    """Return the flags to vary, in the order of the search, and the value at which each starts.

    None stands for the program's own default, which depends on the machine.
    """
    process = subprocess.run([sys.executable, program, "--help"], capture_output=True, text=True)
    known = set(re.findall(r"--(\w+)", process.stdout))
    if {"num_actors", "envs_per_actor"} <= known:
        start = dict.fromkeys(("num_actors", "envs_per_actor"))
    elif {"num_actors", "envs_per_stream"} <= known:
        names = ("num_servers", "num_actors", "envs_per_stream", "num_inference_threads")
        start = dict.fromkeys(names)
        if addresses := value_of("server_addresses", arguments):
            del start["num_servers"]
            start |= {"num_actors": len(expand_addresses(addresses)), "envs_per_stream": MAX_ENVS}
    else:
        raise TrialError(
            f"{program} --help lists no --num_actors with --envs_per_actor, as monobeast.py does, "
            f"or with --envs_per_stream, as polybeast.py does\n{process.stderr}".strip()
        )
    start = {name: value for name, value in start.items() if value_of(name, arguments) is None}
    if not start:
        raise TrialError(ALL_GIVEN)
    return start


def search(measure, start, most_envs=sys.maxsize):
    """Double each value in turn, or halve it, as long as steps/s rise; return the best values.

    More processes or streams than fit `most_envs` get fewer environments each, where that is open.
    """
    best, best_rate = start, measure(start)
    envs = next((name for name in ENVS if name in start), None)
    wanted_envs = start.get(envs)
    for name in start:
        factor, first = 2, best[name]
        for _ in range(TRIALS_PER_FLAG):
            values = best | {name: int(best[name] * factor)}
            # Keep the number of streams per server.
            if name == "num_servers" and "num_actors" in best:
                streams = best["num_actors"] // best["num_servers"]
                values["num_actors"] = streams * values["num_servers"]
            if envs and values.get("num_actors", 0) not in (0, best.get("num_actors")):
                values[envs] = max(1, min(wanted_envs, most_envs // values["num_actors"]))
            rate = measure(values) if min(values.values()) > 0 else 0
            if rate > GAIN * best_rate:
                best, best_rate = values, rate
                wanted_envs = best[name] if name == envs else wanted_envs
            elif factor == 2 and best[name] == first:
                factor = 0.5
            else:
                break
    return best


def count_envs(flags):
    """Return how many environments there are in all; `flags` is a dict."""
    return flags["num_actors"] * next(flags[name] for name in ENVS if name in flags)


def check_trial(flags, most_envs):
    """Refuse flags, a dict, that the program would refuse or whose policy lag is too large."""
    num_servers = flags.get("num_servers") or 0
    if flags.get("server_addresses"):
        num_servers = len(expand_addresses(flags["server_addresses"]))
    if flags["num_actors"] < num_servers:
        raise TrialError(f"{num_servers} servers need as many streams")
    if count_envs(flags) > most_envs:
        raise TrialError(
            f"{count_envs(flags)} environments make more than {MAX_LAG} batches of --batch_size "
            f"{flags['batch_size']} at once, so that the policies would lag"
        )


class Trial:
    """What a trial has measured: its steps/s, and all its flags."""

    def __init__(self, rate, flags):
        self.rate, self.flags = rate, flags


def run_trial(program, arguments, values):
    """Run the program in a child process until its rate is known, and return a Trial.

    Args:
      arguments, values: command-line arguments, and flags that come after them.

    Raises:
      TrialError: it ended, or was too slow; the message is all that it printed.
    """
    with tempfile.TemporaryDirectory(prefix="tune-", ignore_cleanup_errors=True) as folder:
        arguments = [a for a in arguments if a not in NOT_IN_TRIALS]
        output, run_folder = pathlib.Path(folder, "output"), pathlib.Path(folder, "trial")
        with open(output, "w") as file:
            process = subprocess.Popen(
                [sys.executable, program, *arguments, *as_arguments(values), *TRIAL.split(),
                 "--savedir", folder],
                stdin=subprocess.PIPE,  # the trial ends with this process, even by SIGKILL
                stdout=file, stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C is for us: we end the trial
                # Leaves nothing behind, however the trial ends.
                env=os.environ | {"TMPDIR": folder},
            )  # fmt: skip
        deadline, rate = time.monotonic() + PATIENCE, None
        try:
            while rate is None and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
                rate = read_rate(run_folder)
        finally:
            end(process)
        if rate is None:
            text = output.read_text(errors="replace").strip()
            if time.monotonic() > deadline:
                text += f"\nno steps to measure within {PATIENCE} s"
            raise TrialError(text.strip() or f"ended with {process.returncode}")
        return Trial(rate, json.loads((run_folder / "meta.json").read_text())["flags"])


def end(process):
    """End a trial and all processes of its group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdin.close()


def read_rate(folder):
    """Return steps/s since the first row with steps in a run's log; None with too few rows.

    All before that row is warm-up. The steps of MIN_UPDATES are enough, and so are three rows more.
    """
    path = folder / "logs.csv"
    text = path.read_text() if path.exists() else ""
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())  # complete lines only
    ticks = [(float(row["_time"]), int(row["step"])) for row in rows if int(row["step"]) > 0]
    if not ticks:
        return None
    flags = json.loads((folder / "meta.json").read_text())["flags"]
    seconds, steps = (last - first for first, last in zip(ticks[0], ticks[-1], strict=True))
    enough = steps >= MIN_UPDATES * flags["batch_size"] * flags["unroll_length"]
    return steps / seconds if enough or (steps > 0 and len(ticks) > 3) else None


def as_arguments(values):
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def as_text(values):
    return " ".join(as_arguments(values))


def print_rate(values, rate):
    print(f"{rate:12,.0f} steps/s  {as_text(values)}", flush=True)


if __name__ == "__main__":
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    main()
