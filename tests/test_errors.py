# SPDX-License-Identifier: Apache-2.0
"""What a user meets who has forgotten something: a package, a server; and what --help says."""

import importlib
import logging
import re
import socket
from pathlib import Path

import pytest
from program import run

import environment
import packages
import servers

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ["monobeast", "polybeast", "polybeast_env"]
each_program = pytest.mark.parametrize("program", PROGRAMS)

WITHOUT = """
import runpy
import sys

program, missing, *words = sys.argv[1:]
sys.modules[missing] = None  # so that importing it fails
sys.path.insert(0, program.rpartition("/")[0])
sys.argv = [program, *words]
if __name__ == "__main__":
    runpy.run_path(program, run_name="__main__")
"""


def run_without(missing, folder, program, words=""):
    script = folder / "without.py"
    script.write_text(WITHOUT)
    return run(script, ROOT / f"{program}.py", missing, words)


@pytest.mark.parametrize(
    "program, missing",
    [
        ("monobeast", "torch"),
        ("monobeast", "numpy"),
        ("polybeast", "torch"),
        ("polybeast", "tqdm"),
        ("polybeast_env", "gymnasium"),
    ],
)
def test_a_missing_package_is_a_short_error_with_the_command(tmp_path, program, missing):
    status, output = run_without(missing, tmp_path, program, "--help")
    assert status == 1
    (line,) = output.strip().splitlines()
    assert line.startswith(f"{program}.py: ") and missing in line
    (file,) = re.findall(r"python\S* -m pip install -r (\S+)$", line)
    name = "requirements-env.txt" if program == "polybeast_env" else "requirements.txt"
    assert Path(file) == ROOT / name


@pytest.mark.parametrize("missing", ["ale_py", "cv2"])
def test_a_package_that_only_the_environment_needs_is_asked_for(tmp_path, missing):
    status, output = run_without(missing, tmp_path, "monobeast", f"--savedir {tmp_path}/runs")
    assert status == 1
    (line,) = output.strip().splitlines()
    assert missing in line and line.endswith(f"pip install -r {ROOT}/requirements.txt")
    assert packages.PACKAGES[missing] in line


def test_packages_are_those_of_the_requirements():
    names = set()
    for file in ("requirements.txt", "requirements-env.txt"):
        names |= set(re.findall(r"^([\w-]+)==", (ROOT / file).read_text(), re.M))
    builds = {"pybind11", "setuptools"}  # which no program imports
    assert set(packages.PACKAGES.values()) == names - builds


def test_a_package_of_a_researchers_environment_is_asked_for_by_its_module():
    def create_env():
        import no_such_game  # noqa: F401

    with pytest.raises(environment.EnvError, match="pip install no_such_game$"):
        environment.Environments(create_env, 1, 0)


@pytest.mark.parametrize("error", [ValueError("no"), ImportError("no", name="torch"), KeyError()])
def test_other_errors_get_no_advice(error):
    assert packages.advice(error) == ""


def test_a_server_that_cannot_be_reached_is_named_with_how_long_it_was_waited_for(
    caplog, monkeypatch
):
    failures = [TimeoutError(f"no environment server at host:1 within {i} s") for i in (20, 20)]
    times = iter([100.0, 120.0, 140.0])

    def query(*_, **__):
        if failures:
            raise failures.pop()
        return {"spaces": ""}

    monkeypatch.setattr(servers.libtorchbeast, "query_server", query)
    monkeypatch.setattr(servers.time, "monotonic", lambda: next(times, 140.0))
    caplog.set_level(logging.WARNING)
    assert servers.query_servers(["host:1"], None) == {"spaces": ""}
    for seconds, message in zip((20, 40), caplog.messages, strict=True):
        assert f"{seconds} s so far: no environment server at host:1" in message
        assert "start polybeast_env.py there" in message and "--server_addresses" in message


def test_a_port_in_use_ends_a_learner_whose_servers_want_it(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        words = f"--num_servers 1 --pipes_basename {address} --savedir {tmp_path}/runs"
        status, output = run(ROOT / "polybeast.py", words)
    assert status == 1
    assert f"cannot serve on {address}: Address already in use, by another program" in output
    assert output.strip().splitlines()[-1].startswith("polybeast.py: the environment servers")
    assert not (tmp_path / "runs").exists()


@each_program
def test_help_has_groups_defaults_and_seconds(program):
    parser = importlib.import_module(program).parser
    shown = " ".join(parser.format_help().split())
    groups = {group.title: group._group_actions for group in parser._action_groups}
    assert [action.dest for action in groups.pop("options")] == ["help"]
    actions = [action for group in groups.values() for action in group]
    assert len(groups) >= 3 and len(actions) >= 15
    for action in actions:
        assert action.help, action.dest
        if action.default is not None and not isinstance(action.default, bool):
            assert f"(default: {action.default})" in shown, action.dest
        elif action.default is None and action.type in (int, float):
            assert re.search("by default|default:|where", action.help.lower()), action.dest
        if action.dest.endswith("_s"):
            assert action.help.startswith("Seconds"), action.dest
