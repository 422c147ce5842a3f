# SPDX-License-Identifier: Apache-2.0
"""A fork's learner and environment run unchanged, as processes of their own, and learn Catch."""

import re

import pytest
from program import HELPERS, Program

pytestmark = pytest.mark.whole

ENV, LEARNER = HELPERS / "fork_env.py", HELPERS / "fork_learner.py"


def test_a_fork_learns_catch_and_leaves_nothing_behind(tmp_path):
    with Program(LEARNER, "--pipes_basename", f"unix:{tmp_path}/catch") as learner:
        output = learner.finish()
        assert float(re.search(r"mean return (\S+) after", output)[1]) >= 0.8, output
        assert "Error" not in output and "Traceback" not in output
    assert list(tmp_path.iterdir()) == []  # no socket


def test_a_forks_learner_ends_with_its_servers_program(tmp_path):
    address = ("--pipes_basename", f"unix:{tmp_path}/catch")
    arguments = ("--external_servers --num_actors 4 --total_steps 1_000_000_000", *address)
    with Program(ENV, *address) as servers, Program(LEARNER, *arguments) as learner:
        learner.wait_until(lambda: re.search(r"actors' steps [1-9]", learner.output))
        assert servers.process.poll() is None
        servers.process.terminate()
        output = learner.finish(1)
        assert "ConnectionError" in output and f"{tmp_path}/catch" in output, output
        servers.end()
        servers.wait_for_members()
    assert list(tmp_path.iterdir()) == []
