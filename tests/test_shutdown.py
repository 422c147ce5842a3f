# SPDX-License-Identifier: Apache-2.0
"""How both programs end, whatever they are doing: with which status, and what they leave.

Stop signals to a run that simply learns, one after the other, are in test_programs.py.
"""

import os
import signal
import subprocess
import time

import pytest
from program import HELPERS, Program, last_step, run, shared_memory, traces, wait_until

pytestmark = pytest.mark.whole

SCRIPTS = {"mono": HELPERS / "catch.py", "poly": HELPERS / "catch_poly.py"}
SMALL = {
    "mono": "--num_actors 2 --envs_per_actor 2 --batch_size 4",
    "poly": "--num_servers 2 --envs_per_stream 2 --batch_size 4",
}
TRAIN = "--env Catch --xpid run --total_steps 1000000000 --savedir"
TEST = "--mode test --num_episodes 100000000 --savedir"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of short runs, by program."""
    folders = {}
    for name, script in SCRIPTS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        arguments = "--env Catch --xpid run --total_steps 100 --savedir"
        status, output = run(script, SMALL[name], arguments, folders[name])
        assert status == 0, output
    return folders


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


STATES = {  # flags, whether it is in the state
    "mono-starting": (TRAIN, prints("New run")),
    "mono-learning": (TRAIN, learns),
    "mono-children-stopped": (TRAIN, children_are_stopped),
    "mono-testing": (TEST, prints("game 1")),
    "poly-starting": (TRAIN, prints("Starting environment servers")),
    "poly-waiting": (f"--server_addresses unix:/nowhere {TRAIN}", prints("Waiting for")),
    "poly-learning": (TRAIN, learns),
    "poly-children-stopped": (TRAIN, children_are_stopped),
    "poly-testing": (TEST, prints("game 1")),
}
WAYS = {
    "mono-starting": "SIGINT SIGTERM",
    "mono-learning": "twice SIGKILL stdin",
    "mono-children-stopped": "SIGINT",
    "mono-testing": "SIGINT",
    "poly-starting": "SIGINT SIGTERM",
    "poly-waiting": "SIGINT SIGTERM stdin",
    "poly-learning": "twice SIGKILL stdin",
    "poly-children-stopped": "SIGTERM",
    "poly-testing": "SIGTERM",
}


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
    ("state", "way"), [(state, way) for state in STATES for way in WAYS[state].split()]
)
def test_a_program_ends_and_leaves_nothing(state, way, trained, tmp_path):
    name = state[:4]
    arguments, is_in_state = STATES[state]
    folder = trained[name] if "testing" in state else tmp_path
    before = shared_memory()
    with Program(
        SCRIPTS[name], *([] if "testing" in state else [SMALL[name]]), arguments, folder,
        *(["--end_with_stdin"] if way == "stdin" else []),
        stdin=subprocess.PIPE, TMPDIR=str(tmp_path),
    ) as program:  # fmt: skip
        program.wait_until(lambda: is_in_state(program, folder))
        statuses = end(program, way)
        status, output = program.end()
        program.wait_for_members()
    assert status in statuses, output
    assert traces(tmp_path) == []
    wait_until(lambda: shared_memory() <= before)  # other programs take some for a moment
    if way in ("SIGINT", "SIGTERM", "stdin"):
        assert "Traceback" not in output
        has_begun = state not in ("poly-starting", "poly-waiting")
        assert (folder / "run" / "model.tar").exists() == has_begun
