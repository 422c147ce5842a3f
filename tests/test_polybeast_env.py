# SPDX-License-Identifier: Apache-2.0
"""What polybeast_env.py promises: as a program, asked by a client in Python."""

import json
import os
import re
import signal
import socket
import subprocess

import catch_env
import numpy as np
import pytest
from counting import consecutive_free_addresses, free_address
from deadline import Thread
from program import HELPERS, Program, run
from stream import EnvironmentFailed, Stream

import polybeast_env
from beast.envs.environments import Environments
from beast.servers import server_processes

CATCH = HELPERS / "catch_env.py"


def wait_for_servers(program, *addresses, times=1):
    for address in addresses:
        line = f"serving on {address}\n"
        program.wait_until(lambda line=line: program.output.count(line) == times)


def servers(program):
    """Return the ids of the server processes, in the order in which they were started."""
    return sorted(program.members("spawn_main"))


def choose(t, num_envs):
    return np.full(num_envs, t % 3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [("--server_address nonsense", "65,536; or unix:/path"),
     ("--server_address :50051", "host:port"), ("--server_address ::1:50051", "host:port"),
     ("--server_address h:0", "0 to 1"), ("--server_address h:65536", "65536"),
     ("--server_address h:65530 --num_servers 7", "ports 65530 to 65536"),
     ("--server_address h:1 --auth_token_file /none", "cannot read --auth_token_file /none"),
     ("--num_servers -1", "argument --num_servers: -1 is not valid"),
     ("--envs_per_stream -1", "--envs_per_stream: -1"), ("--seed -1", "--seed: -1"),
     ("--stall_timeout_s -1", "--stall_timeout_s: -1")],
)  # fmt: skip
def test_bad_flags_are_refused_by_name(flags, message, capsys):
    with pytest.raises(SystemExit) as error:
        polybeast_env.main(flags.split())
    printed = f"{error.value}\n{capsys.readouterr().err}"  # argparse has printed what is wrong
    assert re.search(f"(?m)^polybeast_env.py: .*{re.escape(message)}", printed)


def test_flags_of_the_learner_hold_where_none_are_given():
    given = {"env": "Breakout", "frame_skip": 2, "max_pool": False, "unknown": 1}
    words = ["--frame_skip", "3", "--learner_flags", json.dumps(given)]
    flags = server_processes.parse_flags(polybeast_env.parser, words)
    assert (flags.env, flags.frame_skip, flags.max_pool) == ("Breakout", 3, False)
    assert flags.envs_per_stream == 8 and not hasattr(flags, "unknown")
    secrets = "--tls_cert server.pem --tls_key server.key --insecure --noop_max 3".split()
    words = ["--learner", "host:1", "--learner_flags", json.dumps(secrets)]
    flags = server_processes.parse_flags(polybeast_env.parser, words)
    assert (flags.tls_cert, flags.tls_key, flags.insecure, flags.noop_max) == (None, None, False, 3)


@pytest.mark.whole
def test_each_server_is_a_process_and_restarted_when_killed(tmp_path):
    addresses = [f"unix:{tmp_path}/socket.{i}" for i in range(2)]

    def first_row(address, **options):
        with Stream(address, num_envs=20, **options) as stream:
            return stream.row["frame"].tolist()

    arguments = f"--env Catch --seed 7 --server_address unix:{tmp_path}/socket"
    with Program(CATCH, arguments) as program:
        wait_for_servers(program, *addresses)
        victim, survivor = servers(program)
        nice = min(os.getpriority(os.PRIO_PROCESS, program.pid) + 10, 19)
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in (victim, survivor)} == {nice}
        played = [(first_row(addresses[0]), [7, 0, 0, 0]), (first_row(addresses[0]), [7, 0, 0, 1])]
        with Stream(addresses[0]) as stream, Stream(addresses[1], num_envs=20) as other:
            played.append((other.row["frame"].tolist(), [7, 1, 0, 0]))
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(Exception, match="UNAVAILABLE"):
                stream.step(choose(0, 8))
            wait_for_servers(program, addresses[0], times=2)
            assert f"The server of {addresses[0]} died and is replaced in 1 s" in program.output
            assert "1 in a row): killed by SIGKILL" in program.output
            other.step(choose(0, 20))
            message = f"{addresses[1]}.*: environment 0 .*, step 2: the action is 9"
            with pytest.raises(EnvironmentFailed, match=message):
                other.step(np.full(20, 9))
        assert survivor in servers(program) and victim not in servers(program)
        played.append((first_row(addresses[0]), [7, 0, 1, 0]))
        assert first_row(addresses[0], seed="1,2") == first_row(addresses[1], seed="1,2")
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does
        output = program.finish(128 + signal.SIGINT)
    assert "KeyboardInterrupt" not in output
    # By default each stream of each server, and of each life of it, plays games of its own.
    for board, seed in played:
        environments = Environments(catch_env.Catch, 20, seed)
        assert environments.initial()["frame"].tolist() == board


@pytest.mark.whole
@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (lambda program: os.killpg(program.pid, signal.SIGTERM), 128 + signal.SIGTERM),
        (lambda program: program.process.stdin.close(), 0),
        (lambda program: program.process.kill(), -signal.SIGKILL),
    ],
    ids=["SIGTERM", "stdin", "SIGKILL"],
)
def test_no_process_and_no_socket_is_left(tmp_path, end, expected):
    address = f"unix:{tmp_path}/socket"
    arguments = ["--env", "Parent", "--server_address", address]
    arguments += ["--end_with_stdin"] if expected >= 0 else []
    with Program(CATCH, *arguments, stdin=subprocess.PIPE) as program:
        wait_for_servers(program, f"{address}.0", f"{address}.1")
        assert sorted(os.listdir(tmp_path)) == ["socket.0", "socket.1"]
        with Stream(f"{address}.0") as stream:
            stream.step(choose(0, 8))
            end(program)
            output = program.finish(expected)
    assert not os.listdir(tmp_path)
    assert "Traceback" not in output


@pytest.mark.whole
def test_what_environments_have_started_ends_with_them(tmp_path):
    address = f"unix:{tmp_path}/socket"
    with Program(CATCH, f"--env Parent --num_servers 1 --server_address {address}") as program:
        wait_for_servers(program, address)
        (server,) = servers(program)
        before = set(program.members())
        with Stream(address, num_envs=2) as stream:
            stream.step(choose(0, 2))
            assert len(set(program.members()) - before) == 2
        program.wait_until(
            lambda: set(program.members()) <= before
        )  # one may have been short-lived
        assert "does not end" not in program.output
        with Stream(address, num_envs=2):
            started = set(program.members()) - before
            os.kill(server, signal.SIGKILL)  # in their hands its port would stay in use
            wait_for_servers(program, address, times=2)
        assert len(started) == 2 and not started & set(program.members())


@pytest.mark.whole
@pytest.mark.parametrize("is_learners", [True, False])
def test_a_server_that_hangs_ends_with_its_program(is_learners, tmp_path):
    marker = tmp_path / "marker"
    address = f"unix:{tmp_path}/socket" if is_learners else free_address()
    arguments = f"--env Failing-hold@{marker} --num_servers 1 --server_address {address}"
    arguments += " --end_with_stdin" * is_learners
    with Program(CATCH, arguments, stdin=subprocess.PIPE) as program:
        wait_for_servers(program, address)
        with Stream(address, num_envs=1) as stream:

            def play():
                with pytest.raises(Exception, match="UNAVAILABLE"):
                    for t in range(100):
                        stream.step(choose(t, 1))

            player = Thread(play)
            program.wait_until(marker.exists)
            program.process.kill()
            program.end()
            program.wait_for_members()
            player.result()


def test_create_env_may_read_the_mode_as_in_programs_that_test():
    flags = server_processes.parse_flags(polybeast_env.parser, ["--learner_flags", '{"mode": 1}'])
    assert flags.mode == "train"


@pytest.mark.whole
def test_an_environment_that_hangs_before_it_is_served_is_told(tmp_path):
    arguments = f"--env Failing-reset@{tmp_path}/marker --num_servers 1 --stall_timeout_s 1.5"
    output = run(CATCH, arguments, f"--server_address unix:{tmp_path}/socket", status=1)
    assert "prints its stack" in output and "in reset" in output, output
    assert re.search("(?m)^polybeast_env.py: the server of unix:.* died: .*silent for", output)


@pytest.mark.whole
def test_one_hanging_environment_does_not_end_the_others(tmp_path):
    address = f"unix:{tmp_path}/socket"
    arguments = f"--env Failing-reset@{tmp_path}/marker --num_servers 2 --stall_timeout_s 2"
    with Program(CATCH, arguments, f"--server_address {address}") as program:
        wait_for_servers(program, f"{address}.0", f"{address}.1")
        assert "and so was killed" in program.output


@pytest.mark.whole
def test_what_cannot_be_served_ends_it_with_a_reason(tmp_path):
    first, second = consecutive_free_addresses()
    port = int(second.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        in_use = f"cannot serve on 127.0.0.1:{port}: Address already in use, by another program; "
        for env, address, message in (
            ("Catch", first, f"{in_use}end it, or choose another port"),
            ("Old", f"unix:{tmp_path}/socket", "step 1: .* the old Gym API: return terminated and"),
        ):
            output = run(CATCH, "--env", env, "--server_address", address, status=1)
            assert re.search(f"(?m)^polybeast_env.py: .*{message}", output), output
            assert "Traceback" not in output and "chttp2" not in output, output  # nor gRPC's lines
    words = ["--env", "Unknown", "--server_address", f"unix:{tmp_path}/socket"]
    output = run(CATCH, *words, status=1)  # of two servers that cannot be started
    trace, line = output.split("polybeast_env.py: the environment: ")
    assert line.strip() == "cannot create environment 0: KeyError: 'Unknown'"
    assert trace.count("Traceback") == 1 and "in create_env" in trace
    assert not list(tmp_path.iterdir())
