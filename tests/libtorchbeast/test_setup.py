# SPDX-License-Identifier: Apache-2.0
"""What scripts/setup.sh does where something is missing."""

import shutil
import subprocess

import pytest
from deadline import ROOT, Thread, wait_until

# A Python without ensurepip until apt-get has run; its pip does what $PIP says.
PYTHON = """
case "$*" in
  *version_info*) echo 3.11; exit $OLD ;;
  *ensurepip*) [ -e "$LOGS/apt" ] ;;
  *sysconfig*) echo /nowhere ;;
  "-m venv .venv") mkdir -p .venv/bin .venv/lib/python3.11; cp "$0" .venv/bin/python ;;
  "-m pip install"*) echo "$@" >>"$LOGS/pip"; eval "$PIP" ;;
esac
"""
APT = '[ $1 = update ] || { echo "$@" >>"$LOGS/apt"; exit $APT; }\n'


@pytest.fixture
def machine(tmp_path):
    """Run setup.sh in a copy of the repository, on a machine with just what a bare Debian has."""
    home, commands, logs = (tmp_path / name for name in ("repo", "bin", "logs"))
    for folder in (home / "scripts", commands, logs):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", home / "scripts")
    for path in ROOT.glob("requirements*.txt"):
        shutil.copy(path, home)
    for name in ("sh", "cat", "cmp", "cp", "dirname", "mkdir", "rm", "touch", "env", "sleep"):
        (commands / name).symlink_to(shutil.which(name))
    scripts = {"python3": PYTHON, "apt-get": APT, "id": "echo $ID\n", "sudo": "exit 1\n"}
    for name, text in scripts.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}")
        (commands / name).chmod(0o755)

    class Machine:
        venv, repo = home / ".venv", home

        def run(self, *arguments, shell="sh", fails=False, **environment):
            """Run setup.sh, which must fail or not; return what it printed."""
            values = {"PATH": commands, "LOGS": logs, "ID": 0, "OLD": 0, "APT": 0, "PIP": ""}
            result = subprocess.run(
                [shutil.which(shell), home / "scripts" / "setup.sh", *arguments],
                env={name: str(value) for name, value in (values | environment).items()},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=60,
            )
            assert (result.returncode != 0) == fails, result.stdout
            return result.stdout

        def log(self, name):
            path = logs / name
            return path.read_text().splitlines() if path.exists() else []

    return Machine()


def test_a_bare_machine_is_set_up_once(machine):
    output = machine.run("dev", "compiler")
    assert output.startswith("This will:\n")
    (packages,) = machine.log("apt")
    for package in ("python3.11-venv", "g++", "libgrpc++-dev", "python3.11-dev"):
        assert f" {package}" in packages and f" {package}" in output
    assert machine.log("pip")[0].endswith("-r requirements-dev.txt")
    assert machine.run("dev", "compiler") == machine.run() == ""  # nothing to do
    assert len(machine.log("apt")) == len(machine.log("pip")) == 1


def test_monobeast_needs_no_compiler_and_changes_are_installed(machine):
    machine.run()
    assert machine.log("apt") == ["install -y --no-install-recommends python3.11-venv"]
    assert machine.log("pip")[0].endswith("-r requirements.txt")
    with open(machine.repo / "requirements-env.txt", "a") as file:
        file.write("another==1.0\n")
    machine.run()
    assert len(machine.log("pip")) == 2


def test_without_rights_the_command_is_printed_and_nothing_done(machine):
    command = machine.run("compiler", ID=1000, fails=True).splitlines()[-1]
    assert command.startswith("  apt-get update && apt-get install -y")
    assert "python3.11-venv g++" in command
    assert not machine.venv.exists() and not machine.log("apt")


def test_no_fitting_python_is_named(machine):
    message = "No Python from 3.11 to 3.14 found; tried: python3 python3.14"
    assert message in machine.run(OLD=1, fails=True)
    assert "tried: nowhere." in machine.run(PYTHON="nowhere", fails=True)


def test_without_a_network_it_fails_and_tries_again(machine):
    assert "Is there a network?" in machine.run(APT=100, fails=True).splitlines()[-1]
    assert not machine.venv.exists()
    output = machine.run(PIP="exit 1", fails=True)
    assert "pip could not install requirements.txt" in output.splitlines()[-1]
    machine.run()
    assert len(machine.log("pip")) == 2
    assert machine.run() == ""


@pytest.mark.parametrize("version", ["3.10", "3.11"])
def test_an_environment_of_somebody_else_is_left_alone(machine, version):
    (machine.venv / "lib" / f"python{version}").mkdir(parents=True)
    (machine.venv / "bin").mkdir()
    (machine.venv / "bin" / "python").symlink_to(machine.repo.parent / "bin" / "python3")
    assert "a .venv that this script has not made: move it" in machine.run(fails=True)
    assert (machine.venv / "lib" / f"python{version}").exists() and not machine.log("pip")
    assert not (machine.venv / ".incomplete").exists()


def test_a_folder_that_was_renamed_is_told(machine):
    machine.run(PIP="exit 1", fails=True)
    machine.run()
    assert (machine.venv / ".from" / "folder").read_text() == f"{machine.repo}\n"
    (machine.venv / ".from" / "folder").write_text("/before\n")
    assert machine.run().startswith("This folder was /before, whose name .venv holds")


@pytest.mark.skipif(not shutil.which("flock"), reason="flock is missing")
def test_a_second_make_waits_for_the_first(machine):
    (machine.repo.parent / "bin" / "flock").symlink_to(shutil.which("flock"))
    first = Thread(lambda: machine.run(PIP="sleep 2"))
    wait_until(lambda: (machine.venv / ".incomplete").exists())
    output = machine.run()
    assert output == "Waiting for another make, which sets up .venv.\n"
    first.result()
    assert len(machine.log("pip")) == 1


@pytest.mark.parametrize("how", ["KILL", "INT"])
def test_an_environment_where_pip_was_interrupted_is_made_again(machine, how):
    # Ctrl-C reaches pip, which exits with 1, and the shell: bash (sh on Fedora) goes on then.
    interrupt = "kill -INT $PPID; exit 1" if how == "INT" else "kill -KILL $$"
    shell = "bash" if shutil.which("bash") else "sh"
    machine.run(PIP=f"touch .venv/half; {interrupt}", shell=shell, fails=True)
    assert (machine.venv / "half").exists()
    assert "remove .venv" in machine.run()
    assert not (machine.venv / "half").exists()
    assert machine.run() == ""
