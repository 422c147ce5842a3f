# SPDX-License-Identifier: Apache-2.0
"""Did a change make a program slower? Whole runs of two checkouts, in alternating pairs.

    python benchmarks/ab.py BEFORE AFTER --all [--pairs 3] [--seconds 20]
    python benchmarks/ab.py BEFORE AFTER [--program polybeast] [--pairs 7] [--seconds 40] [flags]
    python benchmarks/ab.py . . --only_after=--compile

BEFORE and AFTER are folders of this repository, both built (`make build`); all other flags go to
the program, in both, and those of `--only_after` to the second one. `--all` goes through SETTINGS,
those that README.md and benchmarks/README.md speak of: defaults, large batches, precisions, nets; a
pair of all takes a quarter of an hour. What holds at the defaults need not hold there: blocks of
memory grow with the batch.

Steps/s are counted from the program's logs.csv, after a third of `--seconds` to warm up. A pair's
runs follow each other, and the order changes from pair to pair, so that a slow minute of the
machine hits both. CPU time a step, of all processes of a run, says more than steps/s where the
machine does other things, too. Prints Markdown.
"""

import argparse
import contextlib
import csv
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from machine import cpu_seconds, descendants, print_header

START_SECONDS = 300  # that a program may take to its first update, and from one row to the next
STOP_SECONDS = 30
PROGRAMS = ["monobeast", "polybeast", "ppo", "gala", "dqn", "sac"]
SETTINGS = [  # programs and their flags
    ("monobeast", ""),
    ("monobeast", "--use_lstm"),
    ("monobeast", "--precision fp32"),
    ("monobeast", "--envs_per_actor 32 --batch_size 32"),
    ("monobeast", "--precision fp32 --envs_per_actor 16 --batch_size 32"),
    ("polybeast", ""),
    ("polybeast", "--precision fp32"),
    ("polybeast", "--envs_per_stream 32 --batch_size 32"),
    ("polybeast", "--model shallow"),
    ("polybeast", "--model shallow --envs_per_stream 32 --batch_size 32"),
    ("ppo", ""),
    ("ppo", "--num_env_processes 0"),
    ("ppo", "--env HalfCheetah-v5"),
    ("gala", ""),
]


class RunFailed(SystemExit):
    """A program has ended early, or is too slow: a message."""


@contextlib.contextmanager
def running(*command):
    """Run Python with these arguments and a temporary --savedir, which it ends with.

    Yields the process, and a function that returns the rows of its log. The function raises
    RunFailed where the program has ended, or is too slow.
    """
    with tempfile.TemporaryDirectory() as savedir:
        command = [sys.executable, *command, "--savedir", savedir, "--xpid", "benchmark"]
        output = pathlib.Path(savedir, "output")
        with open(output, "wb") as file:
            process = subprocess.Popen(
                [*command, "--disable_checkpoint"], stdin=subprocess.PIPE, stdout=file, stderr=file
            )
        num_rows, latest = 0, time.monotonic()

        def read():
            nonlocal num_rows, latest
            rows = read_rows(pathlib.Path(savedir, "benchmark", "logs.csv"))
            if len(rows) > num_rows:
                num_rows, latest = len(rows), time.monotonic()
            if process.poll() is not None or time.monotonic() > latest + START_SECONDS:
                what = f"{' '.join(map(str, command))} has ended or logs nothing: see above"
                raise RunFailed(f"{output.read_text()}\n{what}")
            return rows

        try:
            yield process, read
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run_program(script, arguments, seconds):
    """Run a program for a while; return its rows of logs.csv after a third of `seconds`, and its
    CPU seconds a second meanwhile. Raises RunFailed."""
    rows, samples = [], []  # samples: times and CPU seconds so far
    with running(script, *arguments) as (process, read):
        while not rows or seconds_between(rows[0], rows[-1]) < 4 / 3 * seconds:
            time.sleep(1)
            rows = read()
            if rows and seconds_between(rows[0], rows[-1]) >= seconds / 3:
                with contextlib.suppress(FileNotFoundError):  # a process that has just ended
                    pids = [process.pid, *descendants(process.pid)]
                    samples.append((time.monotonic(), cpu_seconds(pids)))
    warm = [row for row in rows if seconds_between(rows[0], row) >= seconds / 3]
    if len(warm) < 2 or len(samples) < 2:
        raise RunFailed(f"{script} has logged too few rows for a rate: give more seconds")
    (begin, before), (end, after) = samples[0], samples[-1]
    return warm, (after - before) / (end - begin)


def read_rows(path):
    """Return those rows of logs.csv in which something has been learned."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if int(row["step"]) > 0]


def seconds_between(row, other):
    return float(other["_time"]) - float(row["_time"])


def steps_per_second(rows):
    return (int(rows[-1]["step"]) - int(rows[0]["step"])) / seconds_between(rows[0], rows[-1])


def spread(values, form):
    values = [format(f(values), form) for f in (statistics.median, min, max)]
    return "{} ({} to {})".format(*values)


def compare(options, program, arguments):
    """Run alternating pairs; print a table's row for each, and last one of medians and spreads."""
    rates, costs = {"before": [], "after": []}, {"before": [], "after": []}
    setting = " ".join([f"{program}.py", *arguments, options.only_after]).rstrip()
    for pair in range(options.pairs):
        for name in ("before", "after") if pair % 2 == 0 else ("after", "before"):
            script = getattr(options, name) / f"{program}.py"
            own = options.only_after.split() if name == "after" else []
            rows, cores = run_program(script, [*arguments, *own], options.seconds)
            rates[name].append(steps_per_second(rows))
            costs[name].append(1e6 * cores / rates[name][-1])
        if not options.all:
            cells = [str(pair + 1)]
            for values, form in ((rates, ",.1f"), (costs, ",.0f")):
                before, after = values["before"][-1], values["after"][-1]
                cells += [f"{before:{form}}", f"{after:{form}}", f"{after / before:.3f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    cells = [f"`{setting}`"]
    for values, form in ((rates, ",.1f"), (costs, ",.0f")):
        ratios = [a / b for b, a in zip(values["before"], values["after"], strict=True)]
        cells += [spread(values["before"], form), spread(values["after"], form)]
        cells += [spread(ratios, ".3f")]
    print(f"| {' | '.join(cells)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("before", type=pathlib.Path, help="folder of the old checkout")
    parser.add_argument("after", type=pathlib.Path, help="folder of the new one")
    parser.add_argument("--all", action="store_true", help="all of SETTINGS, of all programs")
    parser.add_argument("--program", default="monobeast", choices=PROGRAMS)
    parser.add_argument("--pairs", type=int, help="(default: 7; with --all 3)")
    parser.add_argument("--seconds", type=float, help="of a run (default: 40; with --all 20)")
    parser.add_argument("--only_after", default="", help="flags of the program in AFTER alone")
    options, arguments = parser.parse_known_args()
    options.pairs = options.pairs or (3 if options.all else 7)
    options.seconds = options.seconds or (20 if options.all else 40)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that programs are ended, too
    print_header()
    for name, folder in (("before", options.before), ("after", options.after)):
        command = ["git", "-C", folder, "describe", "--always", "--dirty"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        print(f"- {name}: {commit or folder}")
    print(f"- medians (lowest to highest) of {options.pairs} pairs of {options.seconds:.0f} s")
    columns = ["pair" if not options.all else "setting", "before, steps/s", "after", "ratio"]
    columns += ["before, CPU us a step", "after", "ratio"]
    print(f"\n| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|", flush=True)
    settings = SETTINGS if options.all else [(options.program, "")]
    for program, flags in settings:
        try:
            compare(options, program, [*flags.split(), *arguments])
        except RunFailed as error:  # a package is missing, or an older checkout lacks a flag
            if not options.all:
                raise
            print(error, file=sys.stderr)
            print(f"| `{program}.py {flags}` failed | | | | | | |", flush=True)


if __name__ == "__main__":
    main()
