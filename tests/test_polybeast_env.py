# SPDX-License-Identifier: Apache-2.0
"""What polybeast_env.py promises: as a program, asked by a client in Python."""

import contextlib
import json
import os
import re
import signal
import socket
import time

import catch_env
import gymnasium as gym
import numpy as np
import pytest
from program import HELPERS, ROOT, Program
from stream import EnvironmentFailed, Stream

import polybeast_env
from beast import server_processes
from beast.environments import Environments

ATARI, CATCH = ROOT / "polybeast_env.py", HELPERS / "catch_env.py"


def wait_for_servers(program, *addresses, times=1):
    for address in addresses:
        line = f"serving on {address}\n"
        program.wait_until(lambda line=line: program.output.count(line) == times)


def servers(program):
    """Return the ids of the server processes, in the order in which they were started."""
    return sorted(program.members("spawn_main"))


def free_ports(host, number):
    """Return the first of so many consecutive ports on which nobody listens."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            first = None
            for i in range(number):
                probe = stack.enter_context(socket.socket())
                probe.bind((host, first + i if first else 0))
                first = first or probe.getsockname()[1]
            return first


def choose(t, num_envs):
    return np.full(num_envs, t % 3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [("--server_address nonsense", "'nonsense' should be host:port or unix:/path"),
     ("--server_address :50051", "host:port"), ("--server_address ::1:50051", "host:port"),
     ("--server_address h:0", "0 to 1"), ("--server_address h:65536", "65536"),
     ("--server_address h:65530 --num_servers 7", "ports 65530 to 65536"),
     ("--num_servers 0", "--num_servers is 0"), ("--envs_per_stream 0", "--envs_per_stream is 0"),
     ("--seed -1", "--seed is -1")],
)  # fmt: skip
def test_bad_flags_are_refused_by_name(flags, message):
    with pytest.raises(SystemExit) as error:
        polybeast_env.main(flags.split())
    assert str(error.value).startswith("polybeast_env.py: ") and message in str(error.value)


# ---------------------------------------------------------------------------- a program that serves


@pytest.fixture(scope="module")
def catch():
    """A fork's servers on a loopback address of their own, and their addresses."""
    port = free_ports("127.0.0.2", 2)
    addresses = [f"127.0.0.2:{port}", f"127.0.0.2:{port + 1}"]
    with Program(CATCH, "--env", "Echo-truncated", "--server_address", addresses[0]) as program:
        wait_for_servers(program, *addresses)
        yield program, addresses


def test_each_server_is_a_process_behind_all_others(catch):
    program, _ = catch
    assert len(servers(program)) == 2
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in servers(program)} == {
        min(os.getpriority(os.PRIO_PROCESS, program.pid) + 10, 19)
    }


def test_time_limits_come_over_the_wire(catch):
    _, addresses = catch
    with Stream(addresses[1], num_envs=2) as stream:
        rows = [stream.row] + [stream.step(choose(t, 2)) for t in range(9)]
    assert [row["truncated"].tolist() for row in rows] == [[t == 7] * 2 for t in range(10)]
    assert [row["done"].tolist() for row in rows] == [[t in (0, 8)] * 2 for t in range(10)]
    assert [row["frame"][0, :2].tolist() for row in rows[6:]] == [[0, 6], [0, 7], [1, 0], [1, 1]]
    assert [row["episode_return"][0] for row in rows[6:]] == [21, 28, 28, 1]


def test_server_that_is_killed_is_started_anew(catch):
    program, addresses = catch
    victim, survivor = servers(program)
    with Stream(addresses[0]) as stream, Stream(addresses[1]) as other:
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(Exception, match="UNAVAILABLE"):
            stream.step(choose(0, 8))
        message = f"the server of {addresses[0]} ended, killed by SIGKILL; restarting it in 1 s"
        wait_for_servers(program, addresses[0], times=2)
        assert message in program.output
        other.step(choose(0, 8))
    assert survivor in servers(program) and victim not in servers(program)
    with Stream(addresses[0]) as stream:
        stream.step(choose(0, 8))


def test_flags_of_the_learner_hold_where_none_are_given():
    given = {"env": "Breakout", "frame_skip": 2, "max_pool": False, "unknown": 1}
    words = ["--frame_skip", "3", "--learner_flags", json.dumps(given)]
    flags = server_processes.parse_flags(polybeast_env.parser, words)
    assert (flags.env, flags.frame_skip, flags.max_pool) == ("Breakout", 3, False)
    assert flags.envs_per_stream == 8 and not hasattr(flags, "unknown")


# -------------------------------------------------------------------------------- how it may end


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "stdin", "SIGKILL"])
def test_no_process_and_no_socket_is_left(tmp_path, how):
    (tmp_path / "sockets").mkdir()
    address = f"unix:{tmp_path}/sockets/s"
    os.mkfifo(tmp_path / "stdin")
    arguments = ["--env", "Catch", "--server_address", address, "--end_with_stdin"]
    redirect = ["sh", "-c", 'exec "$@" < "$0"', tmp_path / "stdin"]
    with (
        Program(CATCH, *arguments, prefix=redirect) as program,
        open(tmp_path / "stdin", "w") as stdin,
    ):
        wait_for_servers(program, f"{address}.0", f"{address}.1")
        assert sorted(os.listdir(tmp_path / "sockets")) == ["s.0", "s.1"]
        with Stream(f"{address}.0") as stream:
            stream.step(choose(0, 8))
            begin = time.monotonic()
            if how == "stdin":
                stdin.close()
                expected = 0
            elif how == "SIGKILL":
                program.process.kill()
                expected = -signal.SIGKILL
            else:
                os.killpg(program.pid, getattr(signal, how))  # as a terminal does
                expected = 128 + getattr(signal, how)
            status, output = program.end()
            program.wait_for_members()
            assert time.monotonic() - begin < 10
    assert status == expected
    assert not os.listdir(tmp_path / "sockets")
    assert "Traceback" not in output


@pytest.mark.parametrize("what", ["--env", "port", "create_env", "step", "path"])
def test_what_cannot_be_served_ends_it_with_a_reason(tmp_path, what):
    with contextlib.ExitStack() as stack:
        address = f"unix:{tmp_path}/socket"
        arguments = ["--env", "Catch"]
        script = CATCH
        if what == "--env":
            script, arguments = ATARI, ["--env", "PongNoFrameskip-v44"]
            message = "there is no environment 'PongNoFrameskip-v44'"
        elif what == "port":
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            address = f"127.0.0.1:{listener.getsockname()[1] - 1}"  # that of the second server
            message = (
                f"cannot serve on 127.0.0.1:{listener.getsockname()[1]}: Address already in use, "
                "by another program; end it, or choose another port"
            )
        elif what == "create_env":
            arguments = ["--env", "Nonsense"]
            message = "cannot create environment 0: KeyError: 'Nonsense'"
        elif what == "step":
            arguments = ["--env", "Old"]
            message = "step 1: .* the old Gym API: return terminated and truncated"
        else:
            address = f"unix:{tmp_path}/no/socket"
            message = f"cannot serve on {address}.[01]: No such file or directory"
        program = stack.enter_context(Program(script, *arguments, "--server_address", address))
        status, output = program.end()
        program.wait_for_members()
        assert status == 1
        assert re.search(f"(?m)^polybeast_env.py: .*{message}", output), output
        assert "Traceback" not in output and "chttp2" not in output, output  # nor lines of gRPC
    assert not list(tmp_path.iterdir())


def test_environment_that_fails_tells_the_learner_where(tmp_path):
    address = f"unix:{tmp_path}/socket"
    env = f"Failing-raise:{tmp_path}/marker"
    with Program(
        CATCH, "--env", env, "--server_address", address, "--num_servers", 1, "--seed", 1
    ) as program:
        wait_for_servers(program, address)
        with Stream(address, num_envs=2) as stream, pytest.raises(EnvironmentFailed) as error:
            for t in range(30):
                stream.step(choose(t, 2))
        assert "Traceback" in str(error.value)
        assert "step(0) raised ValueError: the game is broken" in str(error.value)
        assert "environment 0" in str(error.value) and address in str(error.value)
        with Stream(address, num_envs=2) as stream:
            for t in range(30):
                stream.step(choose(t, 2))
        assert "the game is broken" in program.output


def test_seed_decides_what_is_played(tmp_path):
    address = f"unix:{tmp_path}/socket"
    flags = polybeast_env.parser.parse_args(["--env", "Catch", "--seed", "7"])
    with Program(
        CATCH, "--env", "Catch", "--seed", 7, "--num_servers", 1, "--server_address", address
    ) as program:
        wait_for_servers(program, address)
        boards = []
        for options in ({}, {}, {"seed": "1,2"}, {"seed": "1,2"}):
            with Stream(address, num_envs=20, **options) as stream:
                boards.append(stream.row["frame"].tolist())
    # By default each stream of each server, and of each life of it, plays games of its own.
    for stream, board in enumerate(boards[:2]):
        seed = [7, 0, 0, stream]
        environments = Environments(lambda: catch_env.create_env(flags), 20, seed)
        assert environments.initial()["frame"].tolist() == board
    assert boards[0] != boards[1] != boards[2] == boards[3]
    assert gym.spaces.Discrete(3) == environments.envs[0].action_space
