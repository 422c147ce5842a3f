# SPDX-License-Identifier: Apache-2.0
"""What may be used of a machine, and the numbers of processes and environments that follow."""

import functools
import os
import platform
import shutil

import pytest
import torch
from program import ROOT, run

import atari_wrappers
import monobeast
import polybeast
from beast.actors.rollout_buffers import choose_buffers
from beast.errors import FlagError
from beast.flags import parse_flags
from beast.processes import machine
from beast.processes.machine import check_shared_memory

GIB = 2**30


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Return a function that makes a machine of so many cores, with files below /proc and /sys."""

    def make(cores, memory=1024 * GIB, cgroup="0::/", files=None):
        monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
        monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        contents = {"proc/self/cgroup": cgroup}
        contents |= {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:  {memory // 1024} kB\n"}
        contents |= {f"cgroup/{path}": text for path, text in (files or {}).items()}
        for path, text in contents.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text + "\n")

    return make


V1 = {"cpu/a/b/cpu.cfs_quota_us": "250000", "cpu/a/b/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("0::/", {}, 16),
        ("0::/a/b", {"a/b/cpu.max": "max 100000"}, 16),
        ("0::/a/b", {"a/b/cpu.max": "300000 100000"}, 3),
        # The outer one counts.
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000"}, 4),
        ("0::/elsewhere", {"cpu.max": "150000 100000"}, 1),  # a container sees its own as the top
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "9900000 100000"}, 16),
        ("4:memory:/\n3:cpu,cpuacct:/a/b\n0::/", V1, 2),
        ("3:cpu:/a/b", V1 | {"cpu/a/b/cpu.cfs_quota_us": "-1"}, 16),
    ],
)
def test_cores_are_the_least_of_affinity_and_quotas(fake, cgroup, files, cores):
    fake(16, cgroup=cgroup, files=files)
    assert machine.count_cores() == cores


USED = {"a/memory.max": str(8 * GIB), "a/memory.current": str(5 * GIB)}
USED_V1 = {
    "memory/a/memory.limit_in_bytes": str(3 * GIB),
    "memory/a/memory.usage_in_bytes": str(GIB),
}


@pytest.mark.parametrize(
    ("cgroup", "files", "gib"),
    [
        ("0::/", {}, 1024),
        ("0::/a", {"a/memory.max": "max", "a/memory.current": str(GIB)}, 1024),
        ("0::/a", {"a/memory.max": str(8 * GIB)}, 8),
        ("0::/a", USED, 3),
        ("0::/a", USED | {"a/memory.stat": f"anon 1\ninactive_file {2 * GIB}\nshmem 1"}, 5),
        ("0::/a", USED | {"a/memory.stat": f"inactive_file {GIB}\nactive_file {GIB}"}, 5),
        ("0::/a", USED | {"a/memory.current": str(9 * GIB)}, 0),
        ("0::/a/b", USED | {"a/b/memory.max": str(6 * GIB), "a/b/memory.current": "0"}, 3),
        ("4:memory:/a", {"memory/a/memory.limit_in_bytes": str(3 * GIB)}, 3),
        ("4:memory:/a", USED_V1, 2),
        ("4:memory:/a", USED_V1 | {"memory/a/memory.stat": f"total_inactive_file {GIB}"}, 3),
        ("4:memory:/a", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, 1024),
    ],
)
def test_memory_is_the_least_of_what_is_free_and_of_limits(fake, cgroup, files, gib):
    fake(16, cgroup=cgroup, files=files)
    assert machine.count_memory() == gib * GIB


def test_learners_of_one_machine_share_it(fake, monkeypatch):
    fake(16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert machine.count_cores() == 4
    assert machine.count_memory() == 256 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "40")
    assert machine.count_cores() == 1


def test_learners_of_one_machine_share_dev_shm(monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=8 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    check_shared_memory(7 * 2**20, "rollouts")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_shared_memory(3 * 2**20, "rollouts")
    with pytest.raises(FlagError, match="need 4 MiB .* 4 MiB left for each of 2 learners: enlarge"):
        check_shared_memory(4 * 2**20, "rollouts")


def test_shared_memory_is_memory(fake):
    fake(16, memory=10 * 2**20)
    check_shared_memory(9 * 2**20, "rollouts")
    with pytest.raises(FlagError, match="need 10 MiB .*, but memory has 10 MiB left: raise its"):
        check_shared_memory(10 * 2**20, "rollouts")


def choose_actors(arguments, has_gpu=False):
    flags = monobeast.parser.parse_args(arguments.split())
    machine.choose_actors(flags, has_gpu)
    return flags.num_actors, flags.envs_per_actor


@pytest.mark.parametrize(
    ("cores", "has_gpu", "arguments", "chosen"),
    [
        (1, False, "", (2, 8)),
        (2, False, "", (2, 8)),
        (4, False, "", (2, 8)),
        (4, True, "", (3, 8)),
        (16, False, "", (8, 8)),
        (16, True, "", (15, 8)),
        (64, False, "", (32, 4)),  # the policies would be too old with all of them, or with 8
        (64, True, "", (32, 4)),
        (64, True, "--batch_size 32", (63, 8)),
        (128, False, "--batch_size 32", (64, 8)),
        (128, True, "--batch_size 32", (127, 4)),
        (16, True, "--num_actors 4", (4, 8)),
        (16, True, "--num_actors 64", (64, 2)),
        (16, True, "--envs_per_actor 32", (4, 32)),
        (16, True, "--num_actors 20 --envs_per_actor 20", (20, 20)),
        (16, True, "--deterministic", (2, 8)),
        (64, False, "--deterministic", (2, 8)),
        (128, False, "--deterministic --batch_size 16 --num_buffers 32", (2, 8)),
        (16, False, "--num_buffers 40", (8, 4)),  # and a batch
        (16, False, "--num_buffers 24 --envs_per_actor 8", (2, 8)),
        (16, False, "--num_buffers 40 --num_actors 4", (4, 8)),
        (2, False, "--num_buffers 20", (2, 6)),
        (16, False, "--num_buffers 1000", (8, 8)),
        (16, True, "--batch_size 1", (4, 4)),
    ],
)
def test_actors_follow_the_machine(fake, cores, has_gpu, arguments, chosen):
    fake(cores)
    assert choose_actors(arguments, has_gpu) == chosen


@pytest.mark.parametrize(
    ("cores", "has_gpu", "arguments", "chosen"),
    [
        (1, False, "", (2, 2, 8)),
        (2, False, "", (2, 2, 8)),
        (4, False, "", (2, 4, 8)),
        (4, True, "", (4, 8, 8)),
        (16, False, "", (8, 16, 8)),
        (16, True, "", (16, 32, 4)),
        (64, False, "", (32, 32, 4)),
        (64, True, "", (32, 32, 4)),
        (64, True, "--batch_size 32", (64, 128, 4)),
        (128, True, "--batch_size 32", (128, 128, 4)),
        (16, True, "--num_servers 4", (4, 8, 8)),
        (16, True, "--num_actors 6", (6, 6, 8)),
        (16, True, "--envs_per_stream 16", (8, 8, 16)),
        (16, True, "--num_servers 3 --num_actors 3 --envs_per_stream 3", (3, 3, 3)),
        (2, False, "--num_servers 4", (4, 4, 8)),
    ],
)
def test_servers_and_streams_follow_the_machine(fake, cores, has_gpu, arguments, chosen):
    fake(cores)
    flags = polybeast.parser.parse_args(arguments.split())
    machine.choose_servers(flags, has_gpu)
    assert (flags.num_servers, flags.num_actors, flags.envs_per_stream) == chosen


def test_nothing_is_chosen_for_servers_that_run_already(fake):
    fake(16)
    flags = polybeast.parser.parse_args(["--server_addresses", "host1:50051"])
    flags = polybeast.resolve(flags)
    assert (flags.num_actors, flags.envs_per_stream, flags.chosen) == (None, None, [])


def test_little_memory_means_few_processes(fake):
    fake(64, memory=machine.LEARNER_BYTES + 5 * machine.PROCESS_BYTES)
    assert choose_actors("--batch_size 32", has_gpu=True) == (5, 8)
    fake(64, memory=GIB)
    assert choose_actors("--batch_size 32", has_gpu=True) == (2, 8)


@pytest.mark.parametrize(
    ("arguments", "actors", "buffers"),
    [
        ("", 3, 3 * 8 + 2 * 8),  # what fits
        ("--num_actors 8", 8, 8 * 8 + 2 * 8),  # given, so it is refused elsewhere
        ("--num_buffers 80", 8, 80),
        ("--deterministic --batch_size 16", 2, 2 * 8 + 16),
    ],
)
def test_actors_are_as_many_as_dev_shm_holds_rollouts_of(
    fake, monkeypatch, caplog, arguments, actors, buffers
):
    fake(16)
    flags = monobeast.parser.parse_args(arguments.split())
    machine.choose_actors(flags, has_gpu=False)
    choose_buffers(flags)
    usage = shutil.disk_usage("/")._replace(free=45 * 100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    machine.fit_actors(flags, rollout_bytes=100)
    assert (flags.num_actors, flags.num_buffers) == (actors, buffers)
    assert ("no room for the rollouts of 8 actors" in caplog.text) == (actors == 3)


def test_the_learner_gets_the_cores_of_actors_without_dev_shm(fake, monkeypatch, tmp_path):
    fake(16)
    num_threads = []

    def create_learner(*arguments):
        num_threads.append(arguments[-1])
        raise InterruptedError  # that is all

    create_env = functools.partial(atari_wrappers.create_atari, render_mode=None)
    monkeypatch.setattr(monobeast, "create_env", create_env)  # other tests have set another one
    monkeypatch.setattr(machine, "fit_actors", lambda flags, *_: setattr(flags, "num_actors", 3))
    monkeypatch.setattr(monobeast, "Learner", create_learner)
    flags = parse_flags(monobeast.parser, ["--savedir", str(tmp_path), "--disable_cuda"])
    with pytest.raises(InterruptedError):
        monobeast.train(flags)
    assert num_threads == [16 - 3]


@pytest.mark.parametrize(
    ("arguments", "gib", "line"),
    [
        ("", 64, "--num_actors 15 (cores), --envs_per_actor 8 (at most 8). There are 16 cores and "
         "64 GiB of memory.\n"),
        ("--batch_size 4", 64, "--num_actors 15 (cores), --envs_per_actor 4 (lag). There are 16 "
         "cores and 64 GiB of memory. More than 64 environments, 16 batches, would make the pol"),
        ("--envs_per_actor 16", 64, "--num_actors 8 (lag). There"),
        ("--num_buffers 48", 64, "--num_actors 10 (--num_buffers), --envs_per_actor 4 (--num_b"),
        ("", 3, "--num_actors 8 (memory), --envs_per_actor 8 (at most 8). There are 16 cores"),
        ("--num_actors 3", 64, "(limited by): --envs_per_actor 8 (at most 8). There"),
    ],
)  # fmt: skip
def test_what_was_chosen_is_logged_with_what_bounds_it(fake, caplog, arguments, gib, line):
    caplog.set_level("INFO")
    fake(16, memory=gib * GIB)
    choose_actors(arguments, has_gpu=True)
    assert line in caplog.text


def test_the_log_says_who_else_has_its_share_and_what_was_fixed(fake, caplog, monkeypatch):
    caplog.set_level("INFO")
    fake(64)
    choose_actors("--num_actors 3 --envs_per_actor 4")
    assert not caplog.text
    choose_actors("--deterministic")
    assert caplog.messages == ["--deterministic fixes --num_actors 2, --envs_per_actor 8"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    machine.choose_servers(polybeast.parser.parse_args([]), has_gpu=False)
    assert (
        "--num_servers 8 (cores), --num_actors 16 (two for each server), --envs_per_stream 8 "
        "(at most 8). There are 16 cores and 256 GiB of memory for each of 4 learners that share "
        "this machine."
    ) in caplog.text


COUNTING = """
import ctypes
import os
import sys
sys.path.insert(0, {root!r})
import polybeast  # whose gRPC has threads before any learner

learn = polybeast.learn

def count_arenas(*args):
    libc, name = ctypes.CDLL(None), {folder!r} + "/" + str(os.getpid())
    libc.fopen.restype = ctypes.c_void_p
    file = ctypes.c_void_p(libc.fopen(name.encode(), b"w"))
    assert libc.malloc_info(0, file) == 0 and libc.fclose(file) == 0
    return learn(*args)

polybeast.learn = count_arenas
if __name__ == "__main__":
    polybeast.run_program(polybeast.main)
"""


@pytest.mark.whole
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's malloc")
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about learning on a CPU")
def test_all_threads_of_a_learner_share_one_arena(tmp_path):
    (tmp_path / "arenas").mkdir()
    script = tmp_path / "counting.py"
    script.write_text(COUNTING.format(root=str(ROOT), folder=str(tmp_path / "arenas")))
    arguments = (
        "--env PongNoFrameskip-v4 --model shallow --num_servers 1 --num_actors 2 "
        "--envs_per_stream 4 --batch_size 4 --unroll_length 10 --total_steps 120 "
        "--disable_checkpoint --savedir"
    )
    run(script, arguments, tmp_path)
    [file] = (tmp_path / "arenas").iterdir()
    assert file.read_text().count("<heap nr=") == 1
