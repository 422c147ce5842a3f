# SPDX-License-Identifier: Apache-2.0
"""What benchmarks and campaigns report of the machine, and read of its processes.

Importing it puts the repository's root on sys.path.
"""

import concurrent.futures
import contextlib
import datetime
import multiprocessing
import os
import pathlib
import platform
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from beast.processes.lifetime import exit_with_parent


def print_header(*modules):
    """Print machine, versions, commit, date and command: every result needs them."""

    def git(*args):
        command = ["git", "-C", str(ROOT), *args]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    names = [platform.processor() or platform.machine()]
    if pathlib.Path("/proc/cpuinfo").exists():
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":")[1].strip() for line in lines if "model name" in line] or names
    cores = len(os.sched_getaffinity(0))
    changed = " with uncommitted changes" if git("status", "--porcelain", "-uno") else ""
    versions = [f"{module.__name__} {module.__version__}" for module in modules]
    print(f"- Machine: {names[0]}, {cores} cores; {platform.platform()}")
    print(f"- Versions: {', '.join([f'Python {platform.python_version()}', *versions])}")
    print(
        f"- Commit: {git('rev-parse', '--short', 'HEAD')}{changed}; date: {datetime.date.today()}"
    )
    print(f"- Command: `python {' '.join(sys.argv)}`")


def cpu_seconds(pids):
    """Return the CPU time that these processes have taken so far."""
    ticks = 0
    for pid in pids:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # utime and stime
    return ticks / os.sysconf("SC_CLK_TCK")


def descendants(pid):
    """Return the ids of a process's children, their children and so on."""
    command = ["pgrep", "-P", str(pid)]
    children = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return [d for child in map(int, children) for d in (child, *descendants(child))]


def processes_of(mark):
    """Return ids and command lines of all processes with this mark in their environment.

    Neither a process group nor parents lead to all of them: Ray's processes leave both.
    """
    pids = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                pids[int(folder.name)] = (folder / "cmdline").read_bytes()
    return pids


def read_status(pid, key):
    """Return a number from /proc/pid/status, where memory is in KiB."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(rf"^{key}:\s+(\d+)", text, re.MULTILINE)[1])


def run_apart(function, *arguments):
    """Return what a function returns in a new process, which ends with this one."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context, exit_with_parent) as pool:
        return pool.submit(function, *arguments).result()
