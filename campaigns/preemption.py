# SPDX-License-Identifier: Apache-2.0
"""What does a run lose that is killed and resumed, again and again?

    python campaigns/preemption.py [--kills 100] [--program all] [--seed 0]

Trains Catch (catch.py, catch_poly.py of tests/helpers) and CartPole (ppo.py, gala.py) with a
checkpoint every two seconds, sends SIGKILL to the learner or to its process group, and resumes. One
of five kills comes while the program starts, two in the next five seconds, and two while a
checkpoint is being written.

After each kill: both checkpoints can be read and are no older than before, at most one interval is
lost, and nothing is left behind. After each start: the run resumes at the checkpoint's step, with
its weights and learning rate, equal to the last bit. logs.csv: its rows are whole, its steps never
go backwards, each learning rate is that of its step. At last the run is stopped by SIGTERM.

Prints Markdown, and what failed; then the exit status is 1.
"""

import argparse
import contextlib
import csv
import hashlib
import importlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers"), str(ROOT / "benchmarks")]

import torch
from machine import print_header
from program import Program, load, shared_memory, wait_until

INTERVAL = 2  # seconds between checkpoints, of which at most one may be lost
LEARNING_RATE, TOTAL_STEPS = 0.001, 200_000_000
FORKS = {"monobeast": "catch", "polybeast": "catch_poly", "ppo": "ppo", "gala": "gala"}
ARGUMENTS = {
    "monobeast": "--env Catch --num_actors 2 --envs_per_actor 4 --batch_size 4",
    "polybeast": "--env Catch --num_servers 2 --envs_per_stream 4 --batch_size 4",
    "ppo": "--env CartPole-v1 --num_env_processes 2",
    "gala": "--env CartPole-v1 --num_agents 2",
}
# What first gets the restored model and optimizer, as which of its arguments: of gala.py's agents
# the main process has all.
RESTORED = {"gala": ("AgentMemory", 0, 1)}
PATIENCE = 300  # seconds for anything that should happen, on a busy machine
OF_TORCH = "torchinductor_"  # folders that PyTorch leaves behind


def digest(model_state_dict):
    """Return a hash of the weights."""
    result = hashlib.sha256()
    for name, tensor in sorted(model_state_dict.items()):
        result.update(name.encode() + tensor.numpy().tobytes())
    return result.hexdigest()


def learning_rate(name, step):
    decay = 1 if name == "gala" else 1 - min(step, TOTAL_STEPS) / TOTAL_STEPS
    return LEARNING_RATE * decay


def run_fork(name, report, arguments):
    """Run a program; write into the file `report` with what its first update began."""
    importlib.import_module(FORKS[name])
    program = importlib.import_module(name)
    importlib.import_module("beast.runs.run").LOG_INTERVAL = 0.5
    function, model, optimizer = RESTORED.get(name, ("learn", 1, 4))
    begin = getattr(program, function)

    def report_and_begin(*args):
        setattr(program, function, begin)
        lr = args[optimizer].param_groups[0]["lr"]
        first = {"weights": digest(args[model].state_dict()), "lr": lr}
        pathlib.Path(report).write_text(json.dumps(first))
        return begin(*args)

    setattr(program, function, report_and_begin)
    program.run_program(lambda: program.main(arguments))


class Campaign:
    """One run that is killed and resumed; `problems` are texts, the rest is for the table."""

    def __init__(self, name, folder, dice, slack):
        self.name, self.folder, self.dice, self.slack = name, folder, dice, slack
        self.run, self.temporary = folder / "runs" / "run", folder / "tmp"
        self.report = folder / "report.json"
        self.temporary.mkdir()
        self.problems, self.lost_seconds = [], []
        self.kills = dict.fromkeys(("starting", "training", "writing"), 0)
        self.in_writing = 0  # kills that left an unfinished file
        self.saved = None  # step of the newest checkpoint, and its weights
        self.score = (0, None)  # of the best one

    def check(self, is_good, what):
        if not is_good:
            self.problems.append(f"{self.name}, kill {sum(self.kills.values())}: {what}")
            print(f"FAILED: {self.problems[-1]}", file=sys.stderr, flush=True)

    def start(self):
        """Start or resume the program; return it."""
        self.report.unlink(missing_ok=True)
        arguments = f"--fork {self.name} {self.report} {ARGUMENTS[self.name]} --disable_cuda "
        arguments += f"--xpid run --savedir {self.run.parent} --checkpoint_interval_s {INTERVAL} "
        arguments += f"--learning_rate {LEARNING_RATE} --total_steps {TOTAL_STEPS}"
        return Program(__file__, arguments, TMPDIR=str(self.temporary))

    def kill(self, when, whole_group):
        self.kills[when] += 1
        with self.start() as program:
            began = None  # when training began
            if when == "starting":
                time.sleep(self.dice.uniform(0, 6))
            else:
                program.wait_until(self.report.exists, PATIENCE)
                if self.name == "gala":  # whose agents have yet to start
                    program.wait_until(lambda: "Saved" in program.output, PATIENCE)
                began = time.time()
                time.sleep(self.dice.uniform(0, 5))
            members, deadline = program.members(), time.monotonic() + 2 * INTERVAL
            while when == "writing" and time.monotonic() < deadline:
                if self.is_writing():
                    break
            killed = time.time()
            (os.killpg if whole_group else os.kill)(program.pid, signal.SIGKILL)
            status, output = program.end()
            self.check(status == -signal.SIGKILL, f"ended by itself, {status}:\n{output}")
            self.check_leftovers(program, members)
        self.check_start(output)
        self.check_checkpoints(killed, began)

    def is_writing(self):
        return any(os.path.exists(self.run / name) for name in ("model.tar.tmp", "best.tar.tmp"))

    def check_leftovers(self, program, pids):
        """Check that all processes, sockets, folders and shared memory go, too."""

        def leftovers():
            paths = [p for p in self.temporary.glob("*") if not p.name.startswith(OF_TORCH)]
            shared = [name for name in shared_memory() if any(str(pid) in name for pid in pids)]
            return program.members(), paths, shared

        with contextlib.suppress(AssertionError):
            wait_until(lambda: not any(leftovers()), PATIENCE)
        self.check(not any(leftovers()), f"left over: {leftovers()}")
        for path in self.temporary.glob("*"):
            shutil.rmtree(path, ignore_errors=True)  # reported once

    def check_start(self, output):
        """Check that the program, as far as it got, resumed the checkpoint."""
        resumed = re.search(r"Resuming \S+ at step ([\d,]+)", output)
        if resumed and self.saved is not None:
            step = int(resumed[1].replace(",", ""))
            self.check(step == self.saved["step"], f"resumed at {step}, not {self.saved['step']}")
        first = json.loads(self.report.read_text() or "{}") if self.report.exists() else {}
        if first:
            step = self.saved["step"] if self.saved else 0
            self.check(bool(resumed) == bool(self.saved), "resumed without a checkpoint, or not")
            self.check(
                first["lr"] == learning_rate(self.name, step),
                f"learning rate {first['lr']} at {step}",
            )
            if self.saved:
                same = first["weights"] == self.saved["weights"]
                self.check(same, "other weights than the checkpoint's")
        self.check_rows()

    def check_rows(self):
        path = self.run / "logs.csv"
        text = path.read_text() if path.exists() else ""
        self.check(text == "" or text.endswith("\n"), f"the last row is torn: {text[-80:]!r}")
        table = list(csv.reader(text.splitlines()))
        self.check(len({len(row) for row in table}) <= 1, "rows of logs.csv differ in length")
        rows = [dict(zip(table[0], row, strict=False)) for row in table[1:]]
        steps = [int(row["step"]) for row in rows]
        self.check(steps == sorted(steps), "steps in logs.csv go backwards")
        ticks = [int(row["_tick"]) for row in rows]
        self.check(ticks == list(range(len(rows))), "ticks are missing in logs.csv")
        for step, row in zip(steps, rows, strict=True):
            rate, expected = float(row["learning_rate"]), learning_rate(self.name, step)
            self.check(rate == expected, f"learning rate {rate} at step {step}, not {expected}")

    def check_checkpoints(self, killed, began):
        self.in_writing += self.is_writing()
        path, before = self.run / "model.tar", self.saved
        try:
            if path.exists() or before:
                checkpoint = load(path)
                step = checkpoint["step"]
                self.saved = {"step": step, "weights": digest(checkpoint["model_state_dict"])}
                self.saved["time"] = checkpoint["time"]
                self.check(step >= (before["step"] if before else 0), f"{before} became {step}")
                self.check_best(checkpoint)
        except Exception as error:
            self.check(False, f"unreadable checkpoint: {error!r}")
        if began:
            seconds = killed - max(self.saved["time"] if self.saved else 0, began)
            self.lost_seconds.append(seconds)
            self.check(seconds <= INTERVAL + self.slack, f"{seconds:.2f} s of training were lost")

    def check_best(self, newest):
        def score(checkpoint):
            returns = checkpoint["stats"]["game_returns"]
            return len(returns), statistics.fmean(returns) if returns else None

        path = self.run / "best.tar"
        best = score(load(path)) if path.exists() else (0, None)
        self.check(best >= self.score, f"the best checkpoint of {self.score} is now of {best}")
        self.check(best >= score(newest), f"the best, {best}, is worse than {score(newest)}")
        self.score = best

    def stop(self):
        """End the run by SIGTERM once it has been resumed for the last time."""
        with self.start() as program:
            program.wait_until(lambda: "Resuming" in program.output, PATIENCE)
            program.process.send_signal(signal.SIGTERM)
            status, output = program.end()
            program.wait_for_members()
        self.check(status == 128 + signal.SIGTERM, f"status {status} after SIGTERM:\n{output}")
        self.check("Saved" in output, "no checkpoint after SIGTERM")
        self.check_start(output)
        self.check_checkpoints(time.time(), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="per program (default: 100)")
    parser.add_argument("--program", default="all", choices=["all", *FORKS])
    parser.add_argument("--seed", type=int, default=0, help="of kill times (default: 0)")
    parser.add_argument(
        "--slack",
        type=float,
        default=0,
        help="seconds more that a kill may lose, for a slow machine (default: 0)",
    )
    flags = parser.parse_args()
    campaigns, start = [], time.monotonic()
    for name in FORKS if flags.program == "all" else [flags.program]:
        with tempfile.TemporaryDirectory(prefix="preemption-") as folder:
            dice = random.Random(flags.seed)
            campaign = Campaign(name, pathlib.Path(folder), dice, flags.slack)
            campaigns.append(campaign)
            for number in range(flags.kills):
                when = ("training", "writing", "starting", "writing", "training")[number % 5]
                campaign.kill(when, whole_group=campaign.dice.random() < 0.5)
            campaign.stop()
    report(campaigns, time.monotonic() - start)
    return any(campaign.problems for campaign in campaigns)


def report(campaigns, seconds):
    print_header(torch)
    print(f"- a checkpoint every {INTERVAL} s, {seconds:,.0f} s in all\n")
    titles = ["", "kills", "starting + training + aimed at writing", "unfinished files found"]
    titles += ["seconds lost, median", "most", "steps done", "failures"]
    print("|", " | ".join(titles), "|")
    print("|" + "---|" * len(titles))
    for campaign in campaigns:
        cells = [campaign.name, sum(campaign.kills.values())]
        cells += [" + ".join(map(str, campaign.kills.values())), campaign.in_writing]
        lost = campaign.lost_seconds
        cells += [f"{f(lost):.2f}" if lost else "-" for f in (statistics.median_high, max)]
        cells += [f"{campaign.saved['step']:,}" if campaign.saved else 0, len(campaign.problems)]
        print("|", " | ".join(map(str, cells)), "|")
    for campaign in campaigns:
        for problem in campaign.problems:
            print(f"\n- {problem}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fork"]:
        run_fork(sys.argv[2], sys.argv[3], sys.argv[4:])
    sys.exit(main())
