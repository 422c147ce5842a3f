# SPDX-License-Identifier: Apache-2.0
"""Did a change make a program slower? Whole runs of two checkouts, in alternating pairs.

    python benchmarks/ab.py BEFORE AFTER [--program polybeast] [--pairs 7] [--seconds 40] [flags]

BEFORE and AFTER are folders of this repository, both built (`make build`); all other flags go to
the program, in both. Steps/s are counted from the program's logs.csv, after a third of `--seconds`
to warm up. A pair's runs follow each other, and the order changes from pair to pair, so that a slow
minute of the machine hits both. CPU time a step, of all processes of a run, says more than steps/s
where the machine does other things, too. Prints Markdown.
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
PROGRAMS = ["monobeast", "polybeast", "ppo", "gala"]


def run_program(script, arguments, seconds):
    """Run a program for a while; return its rows of logs.csv after a third of `seconds`, and its
    CPU seconds a second meanwhile."""
    with tempfile.TemporaryDirectory() as savedir:
        command = [sys.executable, script, "--savedir", savedir, "--xpid", "benchmark"]
        command += ["--disable_checkpoint", *arguments]
        output = pathlib.Path(savedir, "output")
        with open(output, "wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file)
        rows, samples = [], []  # samples: times and CPU seconds so far
        latest = time.monotonic()  # of the rows
        try:
            while not rows or seconds_between(rows[0], rows[-1]) < 4 / 3 * seconds:
                time.sleep(1)
                num_rows = len(rows)
                rows = read_rows(pathlib.Path(savedir, "benchmark", "logs.csv"))
                if len(rows) > num_rows:
                    latest = time.monotonic()
                if process.poll() is not None or time.monotonic() > latest + START_SECONDS:
                    sys.exit(f"{output.read_text()}\n{script} has ended or logs nothing: see above")
                if rows and seconds_between(rows[0], rows[-1]) >= seconds / 3:
                    with contextlib.suppress(FileNotFoundError):  # a process that has just ended
                        pids = [process.pid, *descendants(process.pid)]
                        samples.append((time.monotonic(), cpu_seconds(pids)))
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    warm = [row for row in rows if seconds_between(rows[0], row) >= seconds / 3]
    if len(warm) < 2 or len(samples) < 2:
        sys.exit(f"{script} has logged too few rows for a rate: give more seconds")
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("before", type=pathlib.Path, help="folder of the old checkout")
    parser.add_argument("after", type=pathlib.Path, help="folder of the new one")
    parser.add_argument("--program", default="monobeast", choices=PROGRAMS)
    parser.add_argument("--pairs", type=int, default=7, help="(default: 7)")
    parser.add_argument("--seconds", type=float, default=40, help="of a run (default: 40)")
    options, arguments = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that programs are ended, too
    print_header()
    for name, folder in (("before", options.before), ("after", options.after)):
        command = ["git", "-C", folder, "describe", "--always", "--dirty"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        print(f"- {name}: {commit or folder}")
    columns = ["pair", "before, steps/s", "after", "ratio"]
    columns += ["before, CPU us a step", "after", "ratio"]
    print(f"\n| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|", flush=True)
    rates, costs = {"before": [], "after": []}, {"before": [], "after": []}
    for pair in range(options.pairs):
        for name in ("before", "after") if pair % 2 == 0 else ("after", "before"):
            script = getattr(options, name) / f"{options.program}.py"
            rows, cores = run_program(script, arguments, options.seconds)
            rates[name].append(steps_per_second(rows))
            costs[name].append(1e6 * cores / rates[name][-1])
        cells = [str(pair + 1)]
        for values, form in ((rates, ",.1f"), (costs, ",.0f")):
            before, after = values["before"][-1], values["after"][-1]
            cells += [f"{before:{form}}", f"{after:{form}}", f"{after / before:.3f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n- {options.program}, median (lowest to highest) of {options.pairs} pairs")
    for what, values, form in (("steps/s", rates, ",.1f"), ("CPU us a step", costs, ",.0f")):
        ratios = [a / b for b, a in zip(values["before"], values["after"], strict=True)]
        before, after = (spread(values[name], form) for name in ("before", "after"))
        print(f"- {what}: before {before}, after {after}; after / before {spread(ratios, '.3f')}")


if __name__ == "__main__":
    main()
