# SPDX-License-Identifier: Apache-2.0
"""Forks of the programs, made by the diffs in examples/."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = {path.stem: path.read_text() for path in sorted((ROOT / "examples").glob("*.diff"))}
# Each example learns in a minute or so on two idle cores. What ends a test is the number of steps:
# other programs may take the cores.
DEADLINE = 1200  # seconds


@pytest.fixture
def apply(tmp_path):
    """Apply a diff to a copy of the programs; return the folder of the fork."""
    if not shutil.which("git"):
        pytest.skip("git, which applies diffs, is missing")
    fork = tmp_path / "fork"
    for folder in ("beast", "libtorchbeast", "examples"):
        shutil.copytree(ROOT / folder, fork / folder)
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*.so"), ROOT / "pyproject.toml"]:
        shutil.copy(path, fork)

    def apply(diff):
        if not diff:
            return fork
        # Else git would look for the repository that the copy may lie in.
        environ = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path)}
        command = ["git", "-C", fork, "apply", "--verbose", "-"]
        done = subprocess.run(command, input=diff, capture_output=True, text=True, env=environ)
        assert done.returncode == 0, (
            f"{done.stderr}\nThe programs have changed where the diff changes them: commit them, "
            "and run python scripts/remake_diffs.py"
        )
        return fork

    return apply


@pytest.fixture
def load(monkeypatch):
    """Load a program of a fork; return its module."""

    def load(fork, program):
        spec = importlib.util.spec_from_file_location(f"fork_{program}", fork / f"{program}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load
