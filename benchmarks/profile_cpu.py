# SPDX-License-Identifier: Apache-2.0
"""Where do the programs spend their time on a CPU? Flame graphs, and tables of them.

    python benchmarks/profile_cpu.py [--program monobeast] [--seconds 20] [flags of the programs]

Runs each program and samples its main process and the busiest of its other processes (an actor, a
server), stacks of Python and of C++ together: once for the table, once more for the flame graph.
Writes PROGRAM-main.svg, PROGRAM-actor.svg and so on into --output, and prints the tables.

py-spy is a tool for this alone, so it stands in no requirements file; where it is not installed,
pip fetches it into a temporary folder. It samples Python's threads, those that wait included, but
not the C++ threads of the actor pool and of gRPC: `perf record` does.
"""

import argparse
import collections
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch
from ab import running
from machine import ROOT, cpu_seconds, descendants, print_header

WORKERS = {"monobeast": "actor", "polybeast": "server"}
PY_SPY = "py-spy==0.4.3"
UNNAMED = r"(0x|\[unknown\])"
# By the function that runs and its file: the first that fits. What has no name is code that oneDNN
# generates, or, in libc, one of the variants of memmove and memset.
GROUPS = {
    "sockets": r"sendmsg|recvmsg|\b(send|recv|readv?|writev?) \(",
    "convolutions and matrix products": r"\(\?\)|\(perf-\d+\.map\)|dnnl|mkl|gemm|Xbyak|openblas",
    "OpenMP's barriers": r"libgomp|libiomp",
    "ALE emulator": r"ale_py",
    "image scaling": r"cv2|opencv|cv::",
    "memory copies": rf"memmove|memcpy|memset|{UNNAMED}.*libc\.so|copy_kernel|contig_to_contig",
    "PyTorch's other kernels (elementwise, reductions)": r"libtorch|libc10",
    "NumPy": r"numpy",
    "gRPC, protobuf, our C++": r"grpc|protobuf|absl|upb|_C\.cpython|nest\.cpython",
    "kernel": r"kernel|\[k\]",
    "Python": r"libpython|bin/python|\(python|\.py:|\.py\)|\.c:|\.h:",
    "other": r"",
}
# By the function that runs or one of the two that called it; these are tried before the others.
CALLERS = {
    "waiting": r"acquire_lock|lock_acquire|futex|epoll|poll \(|\bselect|cond_(timed)?wait|sleep",
    "locks, wake-ups": r"pthread_(cond|mutex)",
    "memory allocation, page faults": r"malloc|memalign|\b(c?free\b|(brk|m(un)?map) \()|page_fault",
}


def find_py_spy(folder):
    """Return the path of py-spy, which may have to be fetched."""
    beside = pathlib.Path(sys.executable).parent / "py-spy"
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, PY_SPY]
        subprocess.run(pip, check=True)
        found = f"{folder}/bin/py-spy"
    return found


def record(py_spy, pid, seconds, svg):
    """Return stacks and their counts of samples, and draw the flame graph of as many others."""
    with tempfile.NamedTemporaryFile("r") as raw:
        for form, path in (("raw", raw.name), ("flamegraph", svg)):
            command = [py_spy, "record", "--native", "--format", form, "--output", path]
            command += ["--duration", str(seconds), "--rate", "50", "--pid", str(pid)]
            subprocess.run(command, check=True, capture_output=True)
        lines = [line.rsplit(" ", 1) for line in raw.read().splitlines()]
    return [(stack.split(";"), int(count)) for stack, count in lines]


def group_of(stack):
    near = ";".join(stack[-3:])
    for name, pattern in CALLERS.items():
        if re.search(pattern, near):
            return name
    return next(name for name, pattern in GROUPS.items() if re.search(pattern, stack[-1]))


def name_of(stack):
    """Return a short name of the function that runs; what has none goes by its caller's."""
    leaf = stack[-1]
    if re.match(UNNAMED, leaf):
        named = [frame for frame in stack if not re.match(UNNAMED, frame)]
        leaf = f"unnamed, called by {named[-1]}" if named else "unnamed"
    kernel = re.search(r"\b\w+_kernel\b", leaf)  # of PyTorch, amid its templates
    return kernel[0] if kernel else re.sub(r"<.*>", "<>", leaf).replace("|", "/")[:90]


def print_tables(title, stacks):
    total = sum(count for _, count in stacks)
    groups, functions = collections.Counter(), collections.Counter()
    for stack, count in stacks:
        group = group_of(stack)
        groups[group] += count
        if group != "waiting":
            functions[name_of(stack), group] += count
    busy = max(1, sum(functions.values()))
    print(f"\n{title}: {total:,} samples\n")
    print("| group | of all samples | of those that do not wait |\n|---|---|---|")
    for group, count in groups.most_common():
        share = "" if group == "waiting" else f"{count / busy:.1%}"
        print(f"| {group} | {count / total:.1%} | {share} |")
    print("\n| function by itself | group | of those that do not wait |\n|---|---|---|")
    for (name, group), count in functions.most_common(12):
        print(f"| `{name}` | {group} | {count / busy:.1%} |", flush=True)


def profile(program, options, arguments, py_spy):
    with running(ROOT / f"{program}.py", "--disable_cuda", *arguments) as (process, read):
        while not read():
            time.sleep(1)
        time.sleep(options.warmup)
        worker = max(descendants(process.pid), key=lambda pid: cpu_seconds([pid]))
        for name, pid in (("main", process.pid), (WORKERS[program], worker)):
            svg = pathlib.Path(options.output) / f"{program}-{name}.svg"
            print_tables(f"{program}.py, {name}", record(py_spy, pid, options.seconds, str(svg)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--program", choices=[*WORKERS, "both"], default="both")
    parser.add_argument("--seconds", type=int, default=20, help="of a recording (default: 20)")
    parser.add_argument("--warmup", type=int, default=10, help="seconds from the first update on")
    parser.add_argument("--output", default="profiles", help="folder (default: profiles)")
    options, arguments = parser.parse_known_args()
    pathlib.Path(options.output).mkdir(parents=True, exist_ok=True)
    print_header(np, torch)
    with tempfile.TemporaryDirectory() as folder:
        py_spy = find_py_spy(folder)
        print(f"- {PY_SPY}, 50 samples/s, {options.seconds} s a process")
        for program in WORKERS if options.program == "both" else [options.program]:
            profile(program, options, arguments, py_spy)


if __name__ == "__main__":
    main()
