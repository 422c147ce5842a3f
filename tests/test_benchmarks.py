# SPDX-License-Identifier: Apache-2.0
"""Each benchmark still measures: programs change, and what times them must follow."""

import os
import re
import subprocess

import pytest
from program import ROOT, run


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "command",
    [
        "ab.py . . --pairs 1 --seconds 6 --only_after=--compile",
        "environments.py --repeats 1 --steps 100",
        "gossip.py --repeats 1 --seconds 10",
        "growth.py --repeats 1 --seconds 0.5 --sizes 8",
        "learner_group.py --repeats 1 --updates 3 --nets shallow",
        "memory.py --seconds 5 --sizes 1x2",
        "net.py --nets shallow --batch_sizes 8 --rows 16 --seconds 0.2 --disable_cuda",
        "replay.py --repeats 1 --seconds 0.2 --rows 10000",
        "starvation.py --repeats 1 --seconds 10",
        "straggler.py --repeats 1 --seconds 5",
        "transport.py --repeats 1 --seconds 0.5",
        "whole.py --repeats 1 --seconds 0.5 --whole_seconds 10",
        "whole.py --program polybeast --repeats 1 --seconds 0.5 --whole_seconds 10 --model shallow",
    ],
)
def test_a_benchmark_ends_with_a_table(command):
    name, arguments = command.split(maxsplit=1)
    output = run(ROOT / "benchmarks" / name, arguments)
    assert "|---|" in output, output
    assert not any(word in output for word in (" nan ", " inf "))


def run_gpu_sh(tmp_path, python, *arguments):
    folders = {"OUT": str(tmp_path), "PREFIX": str(tmp_path / "prefix"), "PYTHON": python}
    command = ["bash", f"{ROOT.name}/benchmarks/gpu.sh", *arguments]  # from any folder
    result = subprocess.run(
        command, cwd=ROOT.parent, env=os.environ | folders, capture_output=True, text=True
    )
    assert (tmp_path / "results.txt").read_text() == result.stdout
    assert (tmp_path / "runs.tar.gz").exists()
    return result.returncode, result.stdout


@pytest.mark.parametrize(("part", "minutes"), [("long", 9), ("short", 3)])
@pytest.mark.parametrize("python", ["true", "false"])  # the programs
def test_each_part_of_gpu_sh_runs_all_stages_and_is_limited(tmp_path, part, minutes, python):
    status, output = run_gpu_sh(tmp_path, python, part)
    assert int(re.search("at most ([0-9]+) s", output)[1]) < 60 * minutes
    stages = re.findall("^== ([a-z]+) took", output, re.M)
    wanted = ["machine", "setup", "tests", "whole", "pong"]
    assert stages == (wanted if part == "long" else wanted[1:4])
    failed = "none" if python == "true" else " ".join(f"{stage} (status 1)" for stage in stages)
    assert output.endswith(f"failed: {failed}\n") and status == (failed != "none")


@pytest.mark.whole
def test_a_stage_of_gpu_sh_that_hangs_is_ended(tmp_path):
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 100\n")
    hanging.chmod(0o755)
    status, output = run_gpu_sh(tmp_path, str(hanging), "tests=1", "pong=1")
    assert status == 1 and output.endswith("failed: tests (status 124) pong (status 124)\n")
