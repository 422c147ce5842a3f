# SPDX-License-Identifier: Apache-2.0
"""Who may import what: environment servers no torch, the package no program, no test a test."""

import ast
import re
import subprocess
import sys

import pytest
from program import ROOT

PROGRAMS = {"monobeast", "polybeast", "polybeast_env", "gala", "ppo", "dqn", "sac", "polybeast_ray"}
ALLOWED = {("polybeast.py", "polybeast_env", "create_env")}
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.glob("libtorchbeast/*.py"))

IMPORT_BLOCKED = """
import importlib
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[2].split(",") or name.endswith("._C"):
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Blocker())
importlib.import_module(sys.argv[1])
print(" ".join(name for name in sys.modules if name.split(".")[0] in ("beast", "libtorchbeast")))
"""


def import_blocked(module, *blocked):
    """Import a module where some packages and the compiled part are missing.

    Returns:
      The modules of ours that it imported.
    """
    command = [sys.executable, "-c", IMPORT_BLOCKED, module, ",".join(blocked)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, f"{module}: {result.stderr}"
    return result.stdout.split()


@pytest.mark.whole
def test_each_module_of_environment_servers_needs_no_torch():
    lines = (ROOT / "requirements-dev.txt").read_text() + (ROOT / "requirements.txt").read_text()
    blocked = {name.replace("-", "_") for name in re.findall(r"(?m)^([\w-]+)==", lines)} | {"nest"}
    assert {"torch", "matplotlib", "pytest"} < blocked
    modules = import_blocked("polybeast_env", *blocked)
    assert "beast.servers.server_processes" in modules and "libtorchbeast.rows" in modules
    for module in [*modules, "libtorchbeast.server", "beast.servers.servers"]:
        import_blocked(module, *blocked)
        path = ROOT / module.replace(".", "/")
        if path.is_dir() and not (path := path / "__init__.py").exists():  # a room
            continue
        path = path.with_suffix(".py")
        assert "torch" not in [name.split(".")[0] for name, _ in imports(path)]  # nor later


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_libtorchbeast_works_where_it_is_installed_alone(path):
    blocked = ["torch", "gymnasium", "ale_py", "cv2", "beast"]
    if path.name in ("rows.py", "plain_environments.py"):  # NumPy alone
        blocked += ["grpc", "google"]
    import_blocked(".".join(path.with_suffix("").parts).removesuffix(".__init__"), *blocked)
    roots = {module.split(".")[0] for module, _ in imports(ROOT / path)}
    assert not roots & {"torch", "beast"}  # nor later


def imports(path):
    """Yield (module, name) of each import of a file; name is None where the module is imported."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.module, alias.name) for alias in node.names)


def test_nothing_imports_a_program():
    files = [*ROOT.glob("*.py"), *ROOT.glob("beast/**/*.py"), *ROOT.glob("libtorchbeast/*.py")]
    assert len(files) > 30
    for path in files:
        for module, name in imports(path):
            allowed = (str(path.relative_to(ROOT)), module, name) in ALLOWED
            assert allowed or module.split(".")[0] not in PROGRAMS, f"{path} imports {module}"


def test_rooms_import_only_those_below_them():
    rooms = ("errors", "parser", "nest", "processes", "envs", "runs", "learners", "actors")
    allowed = {room: set(rooms[: i + 1]) for i, room in enumerate(rooms)}
    allowed |= {room: {*rooms, room} for room in ("servers", "gossip")}
    for path in (ROOT / "beast").glob("*/*.py"):
        for module, name in imports(path):
            package, *parts = f"{module}.{name}".split(".")
            if package == "beast":
                assert parts[0] in allowed[path.parent.name], f"{path} imports {parts[0]}"


@pytest.mark.parametrize("program", ["monobeast.py", "polybeast.py"])
def test_the_head_of_a_program_can_be_surveyed(program):
    found = [(module, name) for module, name in imports(ROOT / program) if "beast." in module]
    assert 12 <= len(found) <= 24 and len({module for module, _ in found}) <= 13


def test_no_test_imports_another_test_and_names_are_short():
    for path in (ROOT / "tests").rglob("*.py"):
        imported = [module for module, _ in imports(path)]
        assert not [name for name in imported if name.split(".")[-1].startswith("test_")], path
        long = [name for name in re.findall(r"def (test_\w+)", path.read_text()) if len(name) > 60]
        assert not long, f"{path}: at most 60 characters: {long}"
