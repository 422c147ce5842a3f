# SPDX-License-Identifier: Apache-2.0
"""What setup.py says where something is missing, and what it builds."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from libtorchbeast import rpcenv_pb2

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAMS = ("make", "cmake", "protoc", "grpc_cpp_plugin", "c++")

needs_programs = pytest.mark.skipif(
    not all(map(shutil.which, PROGRAMS)), reason=f"one of {', '.join(PROGRAMS)} is missing"
)


@pytest.fixture
def setup_py(tmp_path):
    """Run setup.py on sources of its own, where nothing was built, with just these programs."""
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("csrc", "libtorchbeast"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so"))

    def run(*arguments, programs=PROGRAMS, options="", **environment):
        path = tmp_path / "bin"
        path.mkdir()
        for name in programs:
            script = path / name
            script.write_text(f'#!/bin/sh\nexec {shutil.which(name)} {options} "$@"\n')
            script.chmod(0o755)
        return subprocess.run(
            [sys.executable, "setup.py", "-q", *arguments],
            cwd=tmp_path,
            env={"PATH": str(path), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=250,
        )

    return run


def test_what_is_missing_is_named_with_the_lines_that_install_it(setup_py):
    # A compiler that finds no headers at all; the environment may have a cmake of its own.
    result = setup_py("build_ext", programs=["c++"], options="-nostdinc -nostdinc++")
    assert result.returncode != 0
    headers = {"google/protobuf/message.h", "grpcpp/grpcpp.h"}
    _, _, missing = result.stdout.partition("Install")[0].partition("missing:\n")
    missing = set(re.findall("^  (.*)$", missing, re.M)) - {"cmake"}
    assert missing == {"make", "protoc", "grpc_cpp_plugin"} | headers
    lines = dict(re.findall(r"^  ([\w, ]+): +(.* install .*)$", result.stdout, re.M))
    assert list(lines) == ["Debian, Ubuntu", "Fedora", "conda", "Homebrew"]
    assert all("grpc" in line for line in lines.values())
    packages = [word for word in lines["Debian, Ubuntu"].split()[3:] if "python" not in word]
    assert " ".join(packages) in (ROOT / "scripts" / "setup.sh").read_text()
    assert "Traceback" not in result.stdout


@pytest.mark.parametrize(
    ("circumstances", "texts"),
    [
        ({"programs": []}, ["missing:\n  a C++ compiler"]),
        ({"SANITIZE": "memory"}, ["SANITIZE is 'memory'", "address", "thread", "undefined"]),
    ],
)
def test_no_compiler_or_an_unknown_sanitizer_is_refused_in_words(setup_py, circumstances, texts):
    result = setup_py("build_ext", **circumstances)
    assert result.returncode != 0 and "Traceback" not in result.stdout
    assert [text for text in texts if text not in result.stdout] == []


@pytest.mark.skipif(not shutil.which("protoc"), reason="protoc is missing")
def test_the_python_messages_are_those_of_the_proto_file(tmp_path):
    """Else: make proto."""
    file = tmp_path / "descriptors"
    subprocess.run(
        ["protoc", f"--proto_path={ROOT / 'csrc'}", f"--descriptor_set_out={file}", "rpcenv.proto"],
        check=True,
    )
    (now,) = descriptor_pb2.FileDescriptorSet.FromString(file.read_bytes()).file
    for message in now.message_type:
        for field in message.field:
            field.ClearField("json_name")  # protoc leaves it out of what it generates
    assert descriptor_pb2.FileDescriptorProto.FromString(rpcenv_pb2.DESCRIPTOR.serialized_pb) == now


@pytest.mark.skipif(sys.platform != "linux", reason="ldd is Linux's")
@pytest.mark.parametrize("module", ["libtorchbeast._C", "nest"])
def test_modules_link_what_they_need_and_no_torch(module):
    path = importlib.util.find_spec(module).origin
    output = subprocess.run(["ldd", "-r", path], capture_output=True, text=True, check=True)
    lines = (output.stdout + output.stderr).splitlines()
    assert not [line for line in lines if "not found" in line]
    undefined = re.findall(r"undefined symbol: (\w+)", "\n".join(lines))
    assert not [symbol for symbol in undefined if not re.match("_?Py", symbol)]
    linked = {line.split()[0] for line in lines if line.startswith("\t")}
    assert not [name for name in linked if re.match("lib(torch|c10|python)", name)]
    assert bool([name for name in linked if "grpc++" in name]) == (module == "libtorchbeast._C")


@pytest.mark.whole
@needs_programs
@pytest.mark.parametrize("program", ["fuzz", "stress_test"])
def test_the_core_stands_malformed_messages_and_many_threads(program):
    """The short versions of `make fuzz` and `make stress`, which build there too."""
    build = ROOT / "build" / "ctest-address,undefined"
    for command in (
        ["cmake", "-S", ROOT / "csrc", "-B", build, "-DSANITIZE=address,undefined"],
        ["cmake", "--build", build, "--target", program, "--parallel"],
        [build / program],
    ):
        result = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=250
        )
        assert result.returncode == 0, result.stdout


# A list and its reverse: of any two, either comes first once.
MODULES = ["libtorchbeast._C", "torch", "nest", "grpc", "tensorboard.summary", "cv2"]
USE_THEM = """
queue = libtorchbeast._C.BatchingQueue(batch_dim=0)
queue.enqueue((torch.ones(2, 3), {"a": torch.zeros(2)}))
ones, rest = next(queue)
assert ones.shape == (2, 3) and nest.flatten(rest)[0].shape == (2,)
try:
    libtorchbeast._C.query_server("unix:/nowhere/at/all", timeout_s=0.1)
except TimeoutError:
    pass
grpc.insecure_channel("localhost:1").close()
from libtorchbeast import rpcenv_pb2
rpcenv_pb2.Step(reward=b"1234").SerializeToString()
cv2.resize(ones.numpy(), (5, 5))
torch.nn.Linear(3, 3)(ones).sum().backward()
"""


@pytest.mark.whole
@pytest.mark.parametrize("modules", [MODULES, MODULES[::-1]], ids=["forward", "backward"])
def test_the_module_gets_on_with_others_in_any_order_of_imports(modules):
    program = "\n".join([*(f"import {module}" for module in modules), USE_THEM])
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr
