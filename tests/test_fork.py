# SPDX-License-Identifier: Apache-2.0
"""A fork's learner and environment run unchanged, as processes of their own, and learn Catch."""

import os
import re
import signal

import pytest
from program import HELPERS, Program

pytestmark = pytest.mark.whole

ENV, LEARNER = HELPERS / "fork_env.py", HELPERS / "fork_learner.py"


def assert_nothing_left(program, folder):
    program.wait_for_members()
    assert list(folder.iterdir()) == []  # no socket


def test_a_fork_learns_catch_and_leaves_nothing_behind(tmp_path):
    with Program(LEARNER, "--pipes_basename", f"unix:{tmp_path}/catch") as learner:
        status, output = learner.end()
        assert status == 0, output
        assert float(re.search(r"mean return (\S+) after", output)[1]) >= 0.9, output
        assert "Error" not in output and "Traceback" not in output
        assert_nothing_left(learner, tmp_path)


def test_servers_may_be_started_by_their_own_script_and_serve_learner_after_learner(tmp_path):
    name = ("--pipes_basename", f"unix:{tmp_path}/catch", "--num_servers 2")
    with Program(ENV, *name) as servers:
        for _ in range(2):
            arguments = (
                "--external_servers --num_actors 4 --batch_size 4 --total_steps 500",
                *name,
            )
            with Program(LEARNER, *arguments) as learner:
                status, output = learner.end()
                assert status == 0, output
        assert servers.process.poll() is None
        servers.process.terminate()
        servers.end()
        assert_nothing_left(servers, tmp_path)


def test_a_fork_whose_servers_die_ends_with_the_error(tmp_path):
    name = ("--pipes_basename", f"unix:{tmp_path}/catch", "--num_servers 2")
    with Program(ENV, *name) as servers:
        arguments = ("--external_servers --num_actors 2 --total_steps 1_000_000_000", *name)
        with Program(LEARNER, *arguments) as learner:
            learner.wait_until(lambda: re.search(r"actors' steps [1-9]", learner.output))
            for pid in servers.members():
                os.kill(pid, signal.SIGKILL)
            status, output = learner.end()
            assert status == 1, output
            assert "ConnectionError" in output and f"{tmp_path}/catch" in output, output
            learner.wait_for_members()
