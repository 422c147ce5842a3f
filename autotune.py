# SPDX-License-Identifier: Apache-2.0
"""--autotune: how many processes and environments are the fastest on this machine.

A trial is the program itself in a child process, with the flags of the run but a temporary folder.
Only the speed is to change: batch size, unroll length and the like are not touched, and there are
bounds to how much the policies' lag can grow with the number of environments.
"""

import argparse
import csv
import ctypes
import logging
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

import experiment

GAIN = 1.1  # times the best rate so far; less might be noise, and more environments mean more lag
MAX_BATCHES = 8  # that all rollouts under way make up: about how many updates the policies lag
TRIALS_PER_FLAG = 3
MIN_UPDATES = 20  # of the learner, which count as a whole
PATIENCE = 120  # seconds for a trial to be measured; most take 10 to 15
GRACE = 15  # seconds for it to end


def tune(flags, parser, argv, check_flags, tuned_flags):
    """Set to the fastest values found what tuned_flags names and the command line leaves open.

    Args:
      flags: what the parser made of argv and of the run's checkpoint.
      check_flags: raises FlagError where flags cannot work; fills in what depends on others.
      tuned_flags: returns, given checked flags, a dict from names to where the search begins.
    """
    check_flags(argparse.Namespace(**vars(flags)))  # a copy: here nothing is to be filled in
    start = tuned_flags(flags)
    given = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(start)))
    start = {name: value for name, value in start.items() if getattr(given, name) is None}
    if not start:
        return
    # Where as many processes as cores cannot even start, begin with as many as usual.
    usual = {name: getattr(flags, name) or value for name, value in start.items()}
    stop, trials = threading.Event(), {}  # (steps/s, error) by words

    def measure(values):
        """Return the steps/s of a trial; 0 where it fails."""
        words, trial = as_words(values), argparse.Namespace(**vars(flags) | values)
        if words not in trials:
            logging.info("Autotune: trying %s", words)
            try:
                check_flags(argparse.Namespace(**vars(trial)))
                check_lag(trial)
                trials[words] = run_trial(trial, parser, stop), ""
            except experiment.FlagError as error:
                trials[words] = 0, str(error)
            if signals:
                sys.exit(128 + signals[0])
        return trials[words][0]

    with experiment.stop_on_signals(stop) as signals:
        if not measure(start):
            start = usual
        if not measure(start):
            sys.exit(trials[as_words(start)][1])  # as it would have come without --autotune
        best = search(measure, start)
        if signals:
            sys.exit(128 + signals[0])
    lines = [
        f"{rate:12,.0f} steps/s  {words}" if rate else
        f"{'skipped':>12}          {words}: {error.splitlines()[-1]}"
        for words, (rate, error) in trials.items()
    ]  # fmt: skip
    logging.info("Autotune: tried\n%s\nand train with %s", "\n".join(lines), as_words(best))
    vars(flags).update(best)


def check_lag(flags):
    """Refuse so many environments that learning would suffer."""
    get = vars(flags).get
    num_processes = get("num_actors") or get("num_servers")
    num_envs = num_processes * (get("envs_per_actor") or get("envs_per_stream"))
    if num_envs > MAX_BATCHES * flags.batch_size:
        raise experiment.FlagError(
            f"{num_envs} environments make more than {MAX_BATCHES} batches of --batch_size "
            f"{flags.batch_size} at once, so that the policies would lag"
        )


def search(measure, start):
    """Double one value after the other, else halve it, while that gains; return the best ones."""
    best, best_rate = start, measure(start)
    for name in start:
        factor = 2
        for _ in range(TRIALS_PER_FLAG):
            value = int(best[name] * factor)
            rate = measure(best | {name: value}) if value > 0 else 0
            if rate > GAIN * best_rate:
                best, best_rate = best | {name: value}, rate
            elif factor == 2 and best[name] == start[name]:
                factor = 0.5
            else:
                break
    return best


def run_trial(flags, parser, stop):
    """Return the steps/s of the program in a child process; 0 once `stop` is set.

    Raises:
      FlagError: it ended, or was too slow; the message is all that it printed.
    """
    with tempfile.TemporaryDirectory(prefix="tune-", ignore_cleanup_errors=True) as folder:
        own = {"savedir": folder, "xpid": "trial", "total_steps": 10**12, "autotune": False}
        own |= {"disable_checkpoint": True, "write_profiler_trace": False, "wandb": False}
        own |= {"eval_interval": 0}
        words = experiment.command_words(parser, argparse.Namespace(**vars(flags) | own))
        path = pathlib.Path(folder, "output")
        with open(path, "w") as output:
            process = subprocess.Popen(
                [sys.executable, sys.modules["__main__"].__file__, *words],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                # In a process group of its own, since a Ctrl-C is for us, who end it.
                process_group=0, preexec_fn=end_with_parent,
                env=os.environ | {"TMPDIR": folder},  # so that nothing is left, however it ends
            )  # fmt: skip
        rate, deadline = None, time.monotonic() + PATIENCE
        min_steps = MIN_UPDATES * flags.batch_size * flags.unroll_length
        try:
            while rate is None and process.poll() is None and time.monotonic() < deadline:
                if stop.wait(0.2):
                    return 0
                rate = read_rate(pathlib.Path(folder, "trial", "logs.csv"), min_steps)
        finally:
            process.terminate()
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if rate is None:
            text = path.read_text(errors="replace")
            if time.monotonic() > deadline:
                text += f"no steps to measure within {PATIENCE} s"
            raise experiment.FlagError(text.strip() or f"ended with {process.returncode}")
        return rate


def end_with_parent():
    """Have this process get a SIGTERM when its parent dies, even of SIGKILL (Linux only)."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def read_rate(path, min_steps):
    """Return the steps/s since the first row that tells of steps; None while there are too few.

    All before that row is warm-up. `min_steps` are enough, and so are three rows more.
    """
    text = path.read_text() if path.exists() else ""
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())  # whole lines
    ticks = [(float(row["_time"]), int(row["step"])) for row in rows if int(row["step"]) > 0]
    if not ticks:
        return None
    seconds, steps = (last - first for first, last in zip(ticks[0], ticks[-1], strict=True))
    enough = steps >= min_steps or steps > 0 and len(ticks) > 3
    return steps / seconds if enough else None


def as_words(values):
    return " ".join(f"--{name} {value}" for name, value in values.items())
