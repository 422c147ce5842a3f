# SPDX-License-Identifier: Apache-2.0
"""A short fault campaign against each program, by the script that runs the long ones."""

import pytest
from program import TESTS, run

FAULTS = TESTS.parent / "benchmarks" / "faults.py"
# A machine that is busy with other things has no steady rate; the long campaigns look at that.
SHORT = "--minutes 1.2 --faults 12 --seed 1 --share 0.1"


@pytest.mark.parametrize("program", ["polybeast", "monobeast"])
def test_training_survives_faults_names_them_and_leaves_nothing_behind(program, tmp_path):
    status, output = run(FAULTS, SHORT, "--program", program, "--folder", tmp_path)
    assert status == 0 and "- Faults: 12," in output, output
