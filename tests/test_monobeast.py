# SPDX-License-Identifier: Apache-2.0
"""What only MonoBeast promises as a whole program; its actors have tests of their own."""

import re

import pytest
from program import HELPERS, read_meta, run, shared_memory, wait_until

pytestmark = pytest.mark.whole


def test_an_environment_that_always_raises_ends_the_run_with_a_clear_error(tmp_path):
    before, folder = shared_memory(), tmp_path / "run"
    arguments = "--num_actors 2 --envs_per_actor 2 --batch_size 4 --env Failing-raise --xpid run"
    status, output = run(HELPERS / "catch.py", arguments, "--savedir", tmp_path)
    assert status == 1
    (error,) = re.findall(r"^catch.py: all actors died 5 times (?s:.*)", output, re.M)
    assert 'raise ValueError("the game is broken")' in error  # of the last traceback
    assert re.search(r"actor \d: environment \d \(.*\), step 25: step\(\d\) raised Val", error)
    assert read_meta(folder)["status"].startswith("EnvError: all actors died 5 times")
    assert "is restarted in" in (folder / "out.log").read_text()
    assert (folder / "model.tar").exists()  # what was learned is good
    wait_until(lambda: shared_memory() <= before)  # other programs take some for a moment
