# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, once and twice, in every state of both programs: how soon, what status, what is left."""

import os
import pathlib
import signal
import time

import pytest
from program import Program, last_step, run, shared_memory, wait_until

TESTS = pathlib.Path(__file__).parent
PROGRAMS = {"monobeast": TESTS / "catch.py", "polybeast": TESTS / "catch_poly.py"}
SOON = 30  # seconds; 10 will do, where nothing else wants the cores
TRAIN = "--env Catch --xpid run --total_steps 1000000000 --savedir"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of short runs, by program."""
    folders = {}
    for name, script in PROGRAMS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        status, output = run(script, "--env Catch --xpid run --total_steps 1000 --savedir",
                             folders[name])  # fmt: skip
        assert status == 0, output
    return folders


def says(text):
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


STATES = {  # program, flags, whether it is in the state
    "mono-starting": ("monobeast", TRAIN, says("Run folder")),
    "mono-learning": ("monobeast", TRAIN, learns),
    "mono-children-stopped": ("monobeast", TRAIN, children_are_stopped),
    "mono-testing": ("monobeast", "--mode test --num_episodes 100000000 --savedir", says("game 1")),
    "poly-starting": ("polybeast", TRAIN, says("Starting environment servers")),
    "poly-waiting": ("polybeast", f"--server_addresses unix:/nowhere {TRAIN}", says("Waiting for")),
    "poly-learning": ("polybeast", TRAIN, learns),
    "poly-children-stopped": ("polybeast", TRAIN, children_are_stopped),
    "poly-testing": ("polybeast", "--mode test --num_episodes 100000000 --savedir", says("game 1")),
}


@pytest.mark.parametrize(
    ("state", "times"),
    # What is stopped cannot notice that its parent was ended at once, before it goes on.
    [
        (s, t)
        for s in STATES
        for t in ("once", "twice")
        if (s[5:], t) != ("children-stopped", "twice")
    ],
)
def test_ctrl_c_ends_a_program_soon_and_whole(state, times, trained, tmp_path, record_property):
    name, words, is_in_state = STATES[state]
    folder = trained[name] if "testing" in state else tmp_path
    before = shared_memory()
    with Program(PROGRAMS[name], words, folder, TMPDIR=str(tmp_path)) as program:
        program.wait_until(lambda: is_in_state(program, folder))
        began = time.monotonic()
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does
        if times == "twice":
            wait_until(lambda: time.monotonic() > began + 1.2 or program.process.poll() is not None)
            if program.process.poll() is None:
                os.killpg(program.pid, signal.SIGINT)
                began = time.monotonic()
        status, output = program.end(SOON / 2 if times == "twice" else SOON)
        record_property("seconds", round(time.monotonic() - began, 2))
        program.wait_for_members()
    assert status in [128 + signal.SIGINT, -signal.SIGINT][: 1 + (times == "twice")], output
    wait_until(lambda: shared_memory() <= before)  # other programs take some for a moment
    assert [path for path in tmp_path.rglob("*") if path.is_socket()] == []
    if times == "once":
        assert "Traceback" not in output
        assert [path for path in tmp_path.glob("polybeast-*")] == []
        has_begun = state not in ("poly-starting", "poly-waiting")
        assert (folder / "run" / "model.tar").exists() == has_begun
