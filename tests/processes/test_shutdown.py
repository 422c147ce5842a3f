# SPDX-License-Identifier: Apache-2.0
"""How both programs end, whatever they are doing: with which status, and what they leave.

Stop signals to runs that simply learn, resume or play are in test_programs.py, and SIGKILL of those
of MonoBeast is in test_faults.py.
"""

import os
import signal
import subprocess
import time

import pytest
from program import HELPERS, Program, last_step, shared_memory, traces, wait_until

pytestmark = pytest.mark.whole

SCRIPTS = {"mono": HELPERS / "catch.py", "poly": HELPERS / "catch_poly.py"}
SMALL = {
    "mono": "--num_actors 2 --envs_per_actor 2 --batch_size 4",
    "poly": "--num_servers 2 --envs_per_stream 2 --batch_size 4",
}
TRAIN = "--env Catch --xpid run --total_steps 1000000000 --savedir"


def prints(text):
    return lambda program, folder: text in program.output


def learns(program, folder):
    return last_step(folder / "run") > 0


def children_are_stopped(program, folder):
    """Stop all actors, or servers, once it learns: as a debugger does, or a machine that sleeps."""
    if not learns(program, folder):
        return False
    for pid in sorted(program.members("forkserver"))[1:] + program.members("spawn_main"):
        os.kill(pid, signal.SIGSTOP)  # all but the fork server itself, which comes first
    return True


CASES = [  # the program with its state, its flags, whether it is in the state, and how it ends
    ("mono-starting", TRAIN, prints("New run"), "SIGKILL"),
    ("mono-learning", TRAIN, learns, "twice"),
    ("mono-children-stopped", TRAIN, children_are_stopped, "SIGINT"),
    ("poly-starting", TRAIN, prints("Starting environment servers"), "SIGINT"),
    ("poly-starting", TRAIN, prints("Starting environment servers"), "SIGKILL"),
    ("poly-waiting", f"--server_addresses unix:/nowhere {TRAIN}", prints("Waiting for"), "SIGTERM"),
    ("poly-listening", f"--listen 127.0.0.1:0 {TRAIN}", prints("to dial in at"), "SIGTERM"),
    ("poly-learning", TRAIN, learns, "SIGKILL"),
    ("poly-learning", TRAIN, learns, "stdin"),
    ("poly-children-stopped", TRAIN, children_are_stopped, "SIGTERM"),
]


def end(program, way):
    """End the program in this way; return the statuses that it may end with."""
    if way == "stdin":
        program.process.stdin.close()
        return [128 + signal.SIGTERM]
    if way == "SIGKILL":
        program.process.kill()
        return [-signal.SIGKILL]
    number = signal.SIGINT if way == "twice" else getattr(signal, way)
    os.killpg(program.pid, number)  # as a terminal does
    if way != "twice":
        return [128 + number]
    again = time.monotonic() + 1.2
    wait_until(lambda: time.monotonic() > again or program.process.poll() is not None)
    if program.process.poll() is None:
        os.killpg(program.pid, number)
    return [128 + number, -number]


@pytest.mark.parametrize(
    ("state", "arguments", "is_in_state", "way"), CASES, ids=[f"{c[0]}-{c[-1]}" for c in CASES]
)
def test_a_program_ends_and_leaves_nothing(state, arguments, is_in_state, way, tmp_path):
    name, before = state[:4], shared_memory()
    starts_servers = not state.endswith(("-waiting", "-listening"))
    with Program(
        SCRIPTS[name], SMALL[name] * starts_servers, arguments, tmp_path,
        *(["--end_with_stdin"] if way == "stdin" else []),
        stdin=subprocess.PIPE, TMPDIR=str(tmp_path),
    ) as program:  # fmt: skip
        program.wait_until(lambda: is_in_state(program, tmp_path))
        statuses = end(program, way)
        status, output = program.end()
        program.wait_for_members()
    assert status in statuses, output
    assert traces(tmp_path) == []
    wait_until(lambda: shared_memory() <= before)  # other programs take some for a moment
    if way in ("SIGINT", "SIGTERM", "stdin"):
        assert "Traceback" not in output
        has_begun = state.partition("-")[2] not in ("starting", "waiting", "listening")
        assert (tmp_path / "run" / "model.tar").exists() == has_begun
