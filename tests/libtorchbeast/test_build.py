# SPDX-License-Identifier: Apache-2.0
"""What setup.py says where something is missing, and what it builds."""

import importlib.util
import re
import shutil
import subprocess
import sys

import pytest
from deadline import ROOT, run_with_deadline
from google.protobuf import descriptor_pb2

from libtorchbeast import rpcenv_pb2

PROGRAMS = ("make", "cmake", "protoc", "grpc_cpp_plugin", "c++")


@pytest.fixture
def fail(tmp_path):
    """Run setup.py with just these programs, on sources of its own; return what it prints."""
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("csrc", "libtorchbeast"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so"))

    def fail(programs=PROGRAMS, options="", **environment):
        path = tmp_path / f"bin-{len(programs)}"
        path.mkdir()
        for name in programs:
            (path / name).write_text(f'#!/bin/sh\nexec {shutil.which(name)} {options} "$@"\n')
            (path / name).chmod(0o755)
        result = subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext"],
            cwd=tmp_path,
            env={"PATH": str(path), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=250,
        )
        assert result.returncode != 0 and "Traceback" not in result.stdout
        return result.stdout

    return fail


def test_what_is_missing_is_named_with_the_lines_that_install_it(fail):
    # A compiler that finds no headers at all; the environment may have a cmake of its own.
    output = fail(programs=["c++"], options="-nostdinc -nostdinc++")
    headers = {"google/protobuf/message.h", "grpcpp/grpcpp.h"}
    _, _, missing = output.partition("Install")[0].partition("missing:\n")
    missing = set(re.findall("^  (.*)$", missing, re.M)) - {"cmake"}
    assert missing == {"make", "protoc", "grpc_cpp_plugin"} | headers
    lines = dict(re.findall(r"^  ([\w, ]+): +(.* install .*)$", output, re.M))
    assert list(lines) == ["Debian, Ubuntu", "Fedora", "conda"]
    assert all("grpc" in line for line in lines.values())
    packages = [word for word in lines["Debian, Ubuntu"].split()[3:] if "python" not in word]
    assert " ".join(packages) in (ROOT / "scripts" / "setup.sh").read_text()


def test_no_compiler_or_an_unknown_sanitizer_is_refused_in_words(fail):
    assert "missing:\n  a C++ compiler" in fail(programs=[])
    assert re.search("SANITIZE is 'memory'.*address.*thread.*undefined", fail(SANITIZE="memory"))


@pytest.mark.skipif(not shutil.which("protoc"), reason="protoc is missing")
def test_the_python_messages_are_those_of_the_proto_file(tmp_path):
    """Else: make proto."""
    file = tmp_path / "descriptors"
    subprocess.run(
        ["protoc", f"--proto_path={ROOT / 'csrc'}", f"--descriptor_set_out={file}", "rpcenv.proto"],
        check=True,
    )
    (now,) = descriptor_pb2.FileDescriptorSet.FromString(file.read_bytes()).file
    for message in [*now.message_type, *(n for m in now.message_type for n in m.nested_type)]:
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
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not all(map(shutil.which, PROGRAMS)), reason=f"one of {', '.join(PROGRAMS)} is missing"
)
def test_the_core_stands_malformed_messages_and_many_threads():
    """The short versions of `make fuzz` and `make stress`."""
    build = ROOT / "build" / "unity"  # files compiled together: half the time
    options = ["-DSANITIZE=address,undefined", "-DCMAKE_UNITY_BUILD=ON"]
    for command in (
        ["cmake", "-S", ROOT / "csrc", "-B", build, *options],
        ["cmake", "--build", build, "--parallel", "--target", "fuzz", "stress_test"],
        [build / "fuzz"],
        [build / "stress_test"],
    ):
        result = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500
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
    run_with_deadline("\n".join([*(f"import {module}" for module in modules), USE_THEM]), 250)
