# SPDX-License-Identifier: Apache-2.0
"""Whole programs as processes of their own, and what they leave in a run's folder."""

import contextlib
import csv
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import torch
from deadline import wait_until

HELPERS = pathlib.Path(__file__).parent
ROOT = HELPERS.parent.parent
DEADLINE = 200  # seconds, of which a loaded machine may need some


def split_words(arguments):
    """Return command line words: strings are split, all else is one word each."""
    return [w for a in arguments for w in (a.split() if isinstance(a, str) else [str(a)])]


class Program:
    """A program in a session of its own, all of which is killed in the end.

    Args:
      script, arguments: what Python runs.
      prefix: words before the command.
      cwd, stdin, environ: where it runs, what it reads, and what is new in its environment.
    """

    def __init__(
        self, script, *arguments, prefix=(), cwd=None, stdin=subprocess.DEVNULL, **environ
    ):
        self._output = tempfile.TemporaryFile()  # a pipe could fill up while nobody reads it
        self.process = subprocess.Popen(
            [*prefix, sys.executable, script, *split_words(arguments)],
            stdin=stdin,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=cwd,
            env=os.environ | environ,
        )
        self.pid = self.process.pid  # and id of the session

    def __enter__(self):
        return self

    def __exit__(self, *_):
        while members := self.members():  # what one of them started meanwhile, too
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
        self.process.wait()
        self._output.close()

    @property
    def output(self):
        """What it has printed so far."""
        descriptor = self._output.fileno()
        # The process shares the file's position, which must stay where it is.
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def members(self, word=""):
        """Return the ids of the session's processes that have not ended, with `word` in them."""
        members = []
        for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
            try:
                stat = path.read_text(errors="replace")
                state, _, _, session, *_ = stat.rpartition(")")[2].split()
                command = (path.parent / "cmdline").read_text(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            if int(session) == self.pid and state not in "ZX" and word in command:
                members.append(int(path.parent.name))
        return members

    def wait_for_members(self):
        """Wait until no process is left: some take a moment to see that they may go."""
        wait_until(lambda: self.members() == [])

    def wait_until(self, condition, seconds=DEADLINE):
        """Wait while it runs, and say what it printed where that is in vain."""

        def has_ended_or_is_true():
            ended = self.process.poll() is not None  # asked first: the condition sees its last act
            result = condition()
            assert result or not ended, f"ended with status {self.process.returncode}"
            return result

        try:
            return wait_until(has_ended_or_is_true, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; it printed:\n{self.output}") from None

    def end(self, seconds=DEADLINE):
        """Wait for the end; return status and what was printed."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end in {seconds} s; it printed:\n{self.output}") from None
        return self.process.returncode, self.output

    def finish(self, status=0, seconds=DEADLINE):
        """Wait for the end with this status, and of all members; return what was printed."""
        got, output = self.end(seconds)
        assert got == status, output
        self.wait_for_members()
        return output


def marked(mark, word=""):
    """Return the ids of processes with `mark`, NAME=VALUE, in their environments."""
    pids = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            is_marked = mark.encode() in (path / "environ").read_bytes().split(b"\0")
            if is_marked and state not in "ZX" and word in (path / "cmdline").read_text():
                pids.append(int(path.name))
    return pids


def run(script, *arguments, status=0, **kwargs):
    """Run a program, which is to end with this status; return what it printed."""
    with Program(script, *arguments, **kwargs) as program:
        return program.finish(status)


def read_rows(folder):
    """Return the rows of logs.csv; none while there is no such file."""
    try:
        with open(folder / "logs.csv", newline="") as file:
            return list(csv.DictReader(file))
    except FileNotFoundError:
        return []


def last_step(folder):
    """Return the step in the last row of logs.csv, -1 where there is none yet."""
    steps = [row["step"] for row in read_rows(folder)]
    return int(steps[-1] or -1) if steps else -1


def column(rows, key):
    return [float(row[key]) for row in rows if row[key]]


def load(path):
    return torch.load(path, weights_only=True)


def read_meta(folder):
    return json.loads((folder / "meta.json").read_text())


def traces(folder):
    """Return what a program has left in its folder for temporary files; PyTorch's is not ours."""
    paths = folder.rglob("*")
    return [path for path in paths if path.name.startswith("polybeast-") or path.is_socket()]


def shared_memory():
    return set(os.listdir("/dev/shm"))
