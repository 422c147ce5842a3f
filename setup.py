# SPDX-License-Identifier: Apache-2.0
"""Build libtorchbeast's compiled part and the module `nest`; csrc/CMakeLists.txt does the work.

    pip install -r requirements.txt
    pip install --no-build-isolation -e .     # or: python setup.py build_ext --inplace

On Linux. gRPC and protobuf are the system's or conda's; what is missing is listed, with the line
that installs it. SANITIZE=address, thread or undefined in the environment adds a
sanitizer; the modules then need its runtime from the start:

    LD_PRELOAD=$(c++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 python -m pytest
"""

import filecmp
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SANITIZERS = ("address", "thread", "undefined")
PYTHON_H = Path(sysconfig.get_path("include"), "Python.h")
# Each line installs everything, since package managers skip what is there. The first one's packages
# are those of scripts/setup.sh.
INSTALL = {
    "Debian, Ubuntu": "apt-get install -y g++ make cmake pkg-config libgrpc++-dev libprotobuf-dev "
    "protobuf-compiler-grpc python{version}-dev",
    "Fedora": "dnf install -y gcc-c++ make cmake grpc-devel grpc-plugins protobuf-devel "
    "python{version}-devel",
    "conda": "conda install -y -c conda-forge cxx-compiler make cmake libgrpc libprotobuf",
}


def prefixes() -> list[str]:
    """Where gRPC may be, beside the system's own places."""
    found = os.environ.get("CMAKE_PREFIX_PATH", "").split(os.pathsep)
    found.append(os.environ.get("CONDA_PREFIX", ""))
    return [prefix for prefix in found if prefix]


def find_program(name: str) -> str | None:
    """Look beside this Python too, where pip puts cmake."""
    path = [f"{prefix}/bin" for prefix in prefixes()]
    path += [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    return shutil.which(name, path=os.pathsep.join(path))


def find_compiler() -> list[str]:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    commands = [shlex.split(name) for name in names]
    return next((command for command in commands if find_program(command[0])), [])


def has_header(header: str) -> bool:
    includes = [f"-I{prefix}/include" for prefix in prefixes()]
    command = [*find_compiler(), *includes, "-E", "-x", "c++", "-"]
    source = f"#if !__has_include(<{header}>)\n#error missing\n#endif\n"
    return not subprocess.run(command, input=source.encode(), capture_output=True).returncode


def find_missing() -> list[str]:
    missing = []
    if not find_compiler():
        missing.append("a C++ compiler: c++, g++ or clang++, or what CXX names")
    for program in ("make", "cmake", "protoc", "grpc_cpp_plugin"):
        if not find_program(program):
            missing.append(program)
    for header in ("google/protobuf/message.h", "grpcpp/grpcpp.h"):
        if find_compiler() and not has_header(header):
            missing.append(header)
    if not PYTHON_H.exists():
        missing.append(f"Python.h for {sys.executable}")
    return missing


def explain(missing: list[str]) -> str:
    version = "3"
    if not PYTHON_H.exists():  # those of this Python, which need not be the system's
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
    lines = ["PolyBeast's C++ part cannot be built, because this is missing:"]
    lines += [f"  {what}" for what in missing]
    lines += ["Install it (the first two as root or with sudo), then run the same command again:"]
    for system, line in INSTALL.items():
        lines.append(f"  {system + ':':16}{line.format(version=version)}")
    lines += ["MonoBeast (monobeast.py) and environment servers (polybeast_env.py) do without."]
    return "\n".join(lines)


class BuildExt(build_ext):
    def run(self):
        built = run_cmake()
        for extension in self.extensions:
            target = Path(self.get_ext_fullpath(extension.name))
            source = built / target.name
            if target.exists() and filecmp.cmp(source, target, shallow=False):
                continue
            # Renamed into place: a process that has the old one loaded keeps it.
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.{os.getpid()}")
            shutil.copy(source, temporary)
            temporary.replace(target)


def run_cmake() -> Path:
    """Build what has changed; returns the directory where the modules are."""
    sanitize = os.environ.get("SANITIZE", "")
    if sanitize and sanitize not in SANITIZERS:
        raise SystemExit(f"SANITIZE is {sanitize!r}; it must be one of {', '.join(SANITIZERS)}.")
    try:
        import pybind11
    except ImportError:
        raise SystemExit(
            f"{sys.executable} has no pybind11: pip install -r requirements.txt"
        ) from None

    suffix = sysconfig.get_config_var("EXT_SUFFIX")  # .cpython-311-x86_64-linux-gnu.so
    build = ROOT / "build" / (suffix.split(".")[1] + (f"-{sanitize}" if sanitize else ""))
    options = [
        f"-DPYTHON_INCLUDE_DIRS={sysconfig.get_path('include')}",
        f"-DPYBIND11_INCLUDE_DIR={pybind11.get_include()}",
        f"-DEXTENSION_SUFFIX={suffix}",
        f"-DSANITIZE={sanitize}",
        f"-DCMAKE_PREFIX_PATH={';'.join(prefixes())}",
    ]
    # CMake reads these once; what was built with others must go.
    variables = ("CXX", "CXXFLAGS", "LDFLAGS", "CMAKE_GENERATOR")
    made_with = "\n".join([str(ROOT), *options, *(f"{v}={os.environ.get(v)}" for v in variables)])
    note = build / "made_with.txt"
    cmake = find_program("cmake")
    if not cmake or not note.exists() or note.read_text() != made_with:
        if missing := find_missing():
            raise SystemExit(explain(missing))
        shutil.rmtree(build, ignore_errors=True)
        call(cmake, "-S", ROOT / "csrc", "-B", build, *options)
        note.write_text(made_with)
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count())
    call(cmake, "--build", build, "--parallel", jobs)
    return build


def call(*command) -> None:
    # CMake's make is not part of one that may have called us.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    if subprocess.run(command, env=env).returncode != 0:
        if missing := find_missing():  # which was there when the build directory was made
            raise SystemExit(explain(missing))
        raise SystemExit(f"Failed (see above): {shlex.join(map(str, command))}")


setup(
    packages=["libtorchbeast"],
    ext_modules=[Extension("libtorchbeast._C", []), Extension("nest", [])],
    cmdclass={"build_ext": BuildExt},
)
