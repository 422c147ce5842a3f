# SPDX-License-Identifier: Apache-2.0
"""Do learners that come and go stay one policy when any of them is killed?

    python campaigns/elastic.py [--target any] [--kills 50] [--learners 4] [--program monobeast]

Trains Catch (tests/helpers) with several learners of --elastic, sends SIGKILL to one of them at a
random moment, and starts another one soon after. `--target writer` kills the learner that writes
logs and checkpoints. `--target lighthouse` kills the lighthouse: then all learners must end, and
all are started again.

After each update each learner writes a line: time, number of the exchange, a hash of weights and
optimizer, and which batches were in it. From these lines the campaign checks that after each
exchange all learners that continue are equal, that no batch counts twice, and that the checkpoint
has the sum of their steps.

It also measures pauses. A pause is the time between two lines of the same learner. The report has
the longest one of all learners. A pause may contain several kills, each of which may cost the
time-out again; so the time from the last kill in it to its end is what must not exceed TIMEOUT in
beast/learners/elastic.py plus two seconds. Prints Markdown; if a check fails, says so and exits
with 1.
"""

import argparse
import collections
import contextlib
import csv
import hashlib
import importlib
import itertools
import json
import os
import pathlib
import random
import signal
import socket
import statistics
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers"), str(ROOT / "benchmarks")]

import torch
from machine import print_header
from program import Program, load, wait_until

from beast.learners.elastic import LIGHTHOUSE_OPTIONS, TIMEOUT

FORKS = {"monobeast": "catch", "polybeast": "catch_poly"}
ARGUMENTS = {
    "monobeast": "--num_actors 1 --envs_per_actor 4",
    "polybeast": "--num_servers 1 --num_actors 1 --envs_per_stream 4",
}
PATIENCE = 120  # seconds to wait for anything, on a busy machine
SLACK = 2  # seconds by which a pause may exceed TIMEOUT


def run_member(name, number, folder, arguments):
    """Be a learner; append a line to FOLDER/NUMBER.jsonl after each update."""
    from beast.learners.exchange import HEADER_SIZE, Exchange

    importlib.import_module(FORKS[name])
    program = importlib.import_module(name)
    learn, compute_loss, read_table = program.learn, program.compute_loss, Exchange._read_table
    lines = os.open(folder / f"{number}.jsonl", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    serials, batches = itertools.count(), []

    def marked_loss(*args):
        loss, metrics = compute_loss(*args)
        return loss, metrics | {"member": float(number), "serial": float(next(serials))}

    def watched_table(self, table):
        sizes = list(itertools.accumulate(self.layout.values(), initial=HEADER_SIZE))
        first = [sizes[list(self.layout).index(column)] for column in ("member", "serial")]
        batches[:] = [[int(row[i]) for i in first] for row in table.tolist() if row[0]]
        return read_table(self, table)

    def watched_learn(flags, model, batch, agent_state, optimizer, group):
        metrics = learn(flags, model, batch, agent_state, optimizer, group)
        line = {
            "time": time.time(),
            "exchange": group._manager.current_step(),
            "rank": group.rank,
            "state": digest(model, optimizer, group._learner.stats),
            "batches": sorted(batches),
            "steps": int(metrics["steps"]),
        }
        os.write(lines, (json.dumps(line) + "\n").encode())
        return metrics

    program.compute_loss, program.learn = marked_loss, watched_learn
    Exchange._read_table = watched_table
    program.run_program(lambda: program.main(arguments))


def digest(model, optimizer, stats):
    """Return a hash of the weights, the optimizer's state, the learning rate and all counts."""
    result = hashlib.sha256(json.dumps([stats, optimizer.param_groups[0]["lr"]]).encode())
    for weight in model.parameters():
        result.update(weight.detach().numpy().tobytes())
        result.update(optimizer.state[weight]["square_avg"].numpy().tobytes())
    return result.hexdigest()[:16]


def read_lines(path):
    """Return the lines of a learner, without one that a kill has cut off."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def find_pauses(times, killed):
    """Return the pauses between updates of a learner: seconds, and those from the last kill in it.

    Args:
      times: when it made its updates.
      killed: when learners were killed.
    """
    return [
        (b - a, b - max([a, *(k for k in killed if a < k < b)]))
        for a, b in itertools.pairwise(times)
    ]


class Campaign:
    """Learners that are killed and replaced; `problems` says which checks failed."""

    def __init__(self, flags, folder):
        self.flags, self.folder = flags, folder
        self.dice = random.Random(flags.seed)
        self.problems, self.numbers = [], itertools.count()
        self.life, self.lives = 0, collections.defaultdict(list)  # numbers of learners, by life
        self.learners = {}  # those that run: Programs by number
        self.kills, self.writers_killed, self.newcomers_killed, self.simultaneous = 0, 0, 0, 0
        self.killed = []  # times
        self.step = 0  # of the last checkpoint
        self.found = []  # what the checks of each life have found
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            self.port = probe.getsockname()[1]

    def check(self, is_good, what):
        if not is_good:
            self.problems.append(f"after {self.kills} kills: {what}")
            print(f"FAILED: {self.problems[-1]}", file=sys.stderr, flush=True)

    def start_lighthouse(self):
        executable = pathlib.Path(sys.executable).parent / "torchft_lighthouse"
        self.lighthouse = Program(
            executable, f"--bind [::]:{self.port}", LIGHTHOUSE_OPTIONS, RUST_LOG="error"
        )
        self.wait_for(self.lighthouse_answers, "an answer of the lighthouse")

    def lighthouse_answers(self):
        with contextlib.suppress(OSError):
            socket.create_connection(("localhost", self.port)).close()
            return True

    def start_learner(self):
        number = next(self.numbers)
        self.lives[self.life].append(number)
        arguments = f"--member {self.flags.program} {number} {self.folder} --env Catch "
        arguments += f"--elastic localhost:{self.port} --xpid run --savedir {self.folder} "
        arguments += f"--disable_cuda --batch_size 4 {ARGUMENTS[self.flags.program]} "
        arguments += "--total_steps 100_000_000 --checkpoint_interval_s 5"
        self.learners[number] = Program(__file__, arguments)

    def last_exchange(self, number):
        """Return the number of the exchange in a learner's last line; 0 if there is none."""
        path = self.folder / f"{number}.jsonl"
        try:
            with open(path, "rb") as file:
                file.seek(max(0, os.path.getsize(path) - 4096))
                lines = file.read().splitlines(keepends=True)
        except FileNotFoundError:
            return 0
        whole = [line for line in lines if line.endswith(b"\n")]
        return json.loads(whole[-1])["exchange"] if whole else 0

    def wait_for(self, condition, what):
        def is_true():
            self.check_learners()
            return condition()

        try:
            wait_until(is_true, PATIENCE)
        except AssertionError:
            outputs = [f"{n}: {p.output[-1000:]}" for n, p in self.learners.items()]
            self.check(False, f"{what} did not happen in {PATIENCE} s\n" + "\n".join(outputs))
            raise

    def wait_for_all(self):
        """Wait until all learners take part."""

        def have_gone_on(begin):
            return all(self.last_exchange(n) > begin.get(n, 0) for n in self.learners)

        self.wait_for(lambda: have_gone_on({}), "an update of all learners")
        begin = {n: self.last_exchange(n) + 5 for n in self.learners}
        self.wait_for(lambda: have_gone_on(begin), "five more of each")

    def have_newest_weights(self):
        """Return the running learners that have made the newest update, or the one before it."""
        # Read first, since the learners continue meanwhile.
        newest = max(self.last_exchange(n) for n in self.lives[self.life])
        return [n for n in sorted(self.learners) if self.last_exchange(n) >= max(1, newest - 1)]

    def kill_learner(self):
        """Kill a learner; another one must have the newest weights, or they would be lost."""
        self.wait_for(lambda: len(self.have_newest_weights()) >= 2, "a second learner")
        writer = self.have_newest_weights()[0]
        victim = writer
        if self.flags.target == "any":
            victim = self.dice.choice(sorted(self.learners))
        self.killed.append(time.time())
        self.writers_killed += victim == writer
        self.newcomers_killed += not self.last_exchange(victim)
        self.simultaneous += len(self.learners) < self.flags.learners
        program = self.learners.pop(victim)
        os.kill(program.pid, signal.SIGKILL)
        self.kills += 1
        with program:
            status, output = program.end()
            self.check(status == -signal.SIGKILL, f"learner {victim} ended by itself:\n{output}")
            program.wait_for_members()

    def run_kills(self):
        """Kill learners at random moments, and replace each of them some seconds later."""
        self.start_life()
        end = time.monotonic()
        due = []  # times at which to start learners
        while self.kills < self.flags.kills:
            end += self.dice.uniform(0, 2 * self.flags.pause)
            while time.monotonic() < end or due:
                due.sort()
                if due and (due[0] <= time.monotonic() or len(self.have_newest_weights()) < 2):
                    self.start_learner()
                    due.pop(0)
                elif time.monotonic() >= end:
                    break
                time.sleep(0.05)
            self.check_learners()
            self.kill_learner()
            due.append(time.monotonic() + self.dice.uniform(0, self.flags.pause))
            end = max(end, time.monotonic())
        for _ in due:
            self.start_learner()
        self.wait_for_all()
        self.stop(signal.SIGTERM, 128 + signal.SIGTERM, "stopped by SIGTERM")

    def run_lighthouses(self):
        """Kill the lighthouse, check that all learners save and end, and start all again."""
        while True:
            self.start_life()
            if self.kills == self.flags.kills:
                break
            time.sleep(self.dice.uniform(0, 2 * self.flags.pause))
            os.kill(self.lighthouse.pid, signal.SIGKILL)
            self.lighthouse.__exit__()
            self.kills += 1
            self.stop(None, 1, "the lighthouse at")
            self.start_lighthouse()
            self.life += 1
        self.stop(signal.SIGTERM, 128 + signal.SIGTERM, "stopped by SIGTERM")

    def start_life(self):
        for _ in range(self.flags.learners):
            self.start_learner()
        self.wait_for_all()

    def check_learners(self):
        for number, program in self.learners.items():
            status = program.process.poll()
            assert status is None, f"learner {number} ended by itself:\n{program.output}"

    def stop(self, number, status, message):
        """Send a signal, if any; check that all learners end with this status and message."""
        begin = time.monotonic()
        for program in self.learners.values():
            if number is not None:
                os.kill(program.pid, number)
        for learner, program in self.learners.items():
            with program:
                got, output = program.end()
                self.check(got == status, f"status {got} of learner {learner}:\n{output}")
                said = output + (self.folder / "run" / "meta.json").read_text()
                self.check(message in said, f"learner {learner} did not say: {message}\n{output}")
                program.wait_for_members()
        self.seconds_to_end = time.monotonic() - begin
        self.learners.clear()
        self.check_life()

    def check_life(self):
        """Check the exchanges of the learners since all were started."""
        variants = collections.defaultdict(lambda: collections.defaultdict(list))
        last, pauses = {}, []  # exchange of each learner; pauses of all
        for number in self.lives[self.life]:
            lines = read_lines(self.folder / f"{number}.jsonl")
            pauses += find_pauses([line["time"] for line in lines], self.killed)
            for line in lines:
                key = line["state"], json.dumps(line["batches"]), line["steps"]
                variants[line["exchange"]][key].append(number)
                last[number] = max(last.get(number, 0), line["exchange"])
        chain, dead_ends = [], 0
        for exchange, of_learners in sorted(variants.items()):
            # A learner may commit an update and die before any other one has it: a dead end.
            alive = [k for k, v in of_learners.items() if any(last[n] > exchange for n in v)]
            dead_ends += len(of_learners) - max(1, len(alive))
            self.check(len(alive) <= 1, f"learners differ after exchange {exchange}")
            key = (alive or list(of_learners))[0]
            chain.append((*key, len(of_learners[key])))
        numbers = sorted(variants)
        self.check(numbers == list(range(1, len(numbers) + 1)), "exchanges are missing")
        batches = [tuple(batch) for _, text, *_ in chain for batch in json.loads(text)]
        twice = [b for b, count in collections.Counter(batches).items() if count > 1]
        self.check(not twice, f"batches counted twice: {twice[:10]}")
        checkpoint = load(self.folder / "run" / "model.tar")
        totals = list(itertools.accumulate((c[2] for c in chain), initial=self.step))
        self.step = checkpoint["step"]
        self.check(self.step in totals[-10:], f"saved at {self.step}, not one of {totals[-10:]}")
        with open(self.folder / "run" / "logs.csv", newline="") as file:
            steps = [int(row["step"]) for row in csv.DictReader(file)]
        self.check(steps == sorted(steps), "steps in logs.csv go backwards")
        self.found.append((len(chain), len(batches), dead_ends, pauses, [c[3] for c in chain]))

    def report(self, seconds):
        pauses, since_kills = zip(*(p for found in self.found for p in found[3]), strict=True)
        longest, limit = max(since_kills), TIMEOUT + SLACK
        self.check(longest <= limit, f"no update for {longest:.1f} s after a kill, not {limit}")
        print_header(torch)
        alone = sum(n == 1 for *_, members in self.found for n in members)
        exchanges = sum(n for n, *_ in self.found)
        rows = {
            "program, learners": f"{self.flags.program}, {self.flags.learners}",
            f"SIGKILL ({self.flags.target})": self.kills,
            "of them the writer": self.writers_killed,
            "before their first update": self.newcomers_killed,
            "while another one was away": self.simultaneous,
            "seconds": f"{seconds:,.0f}",
            "exchanges, and batches in them": f"{exchanges:,}, {sum(f[1] for f in self.found):,}",
            "exchanges with one learner": alone,
            "updates that died with their learner": sum(f[2] for f in self.found),
            "longest pause of a learner, s": f"{max(pauses):.1f}",
            "longest from the last kill in a pause, s": f"{longest:.1f}",
            "pauses above 1 s: number, median": f"{sum(p > 1 for p in pauses)}, "
            f"{statistics.median([p for p in pauses if p > 1] or [0]):.1f}",
            "last stop: seconds until all had ended": f"{self.seconds_to_end:.1f}",
            "steps": f"{self.step:,}",
            "failures": len(self.problems),
        }
        print("\n| | |\n|---|---|")
        for name, value in rows.items():
            print(f"| {name} | {value} |")
        for problem in self.problems:
            print(f"\n- {problem}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="any", choices=["any", "writer", "lighthouse"])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--pause", type=float, default=5, help="mean seconds between two kills")
    parser.add_argument("--program", default="monobeast", choices=list(FORKS))
    parser.add_argument("--seed", type=int, default=0, help="of kill times")
    flags = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        campaign = Campaign(flags, pathlib.Path(folder))
        campaign.start_lighthouse()
        try:
            if flags.target == "lighthouse":
                campaign.run_lighthouses()
            else:
                campaign.run_kills()
        finally:
            for program in (*campaign.learners.values(), campaign.lighthouse):
                program.__exit__()
        campaign.report(time.monotonic() - begin)
    return bool(campaign.problems)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--member"]:
        run_member(sys.argv[2], int(sys.argv[3]), pathlib.Path(sys.argv[4]), sys.argv[5:])
    sys.exit(main())
