# SPDX-License-Identifier: Apache-2.0
"""Finding environment servers: which answer counts, who is refused and why, what local ones get."""

import json
import logging
import re
import resource
import socket
import subprocess
import sys
import threading
import unittest.mock
from types import SimpleNamespace

import catch_poly  # noqa: F401 - it makes the polybeast of this process play Catch
import gymnasium as gym
import numpy as np
import pytest
from catch_env import Catch
from counting import FakeServer, has_ipv6, obey
from deadline import wait_until
from old_env import Old
from stream import ServerThread, make_many, serving

import polybeast
import polybeast_env
from beast.envs.spaces import check_discrete
from beast.errors import EnvError, FlagError
from beast.learners.learner_group import ALONE
from beast.servers import handshakes, listening, server_processes, servers
from libtorchbeast import access
from libtorchbeast.spaces import spaces_to_json


@pytest.fixture
def fake_query(monkeypatch):
    """Return a function by whose argument all servers are asked: called with an address."""
    monkeypatch.setattr(handshakes, "MAJORITY_TIMEOUT", 60)

    def replace(query):
        monkeypatch.setattr(
            handshakes.libtorchbeast, "query_server", lambda address, *_, **__: query(address)
        )

    return replace


SPACES = spaces_to_json(gym.spaces.Box(0, 1, (3,), np.uint8), gym.spaces.Discrete(3), 1)


def deep(depth, key="a"):
    """Return spaces whose observations are in so many dicts."""
    spaces = json.loads(SPACES)
    for _ in range(depth):
        spaces["observation"] = {"type": "Dict", "spaces": [["KEY", spaces["observation"]]]}
    return json.dumps(spaces).replace("KEY", key)


@pytest.mark.parametrize(
    ("handshake", "message"),
    [({"spaces": "no JSON"}, "has spaces that"), ({"spaces": ""}, "has no spaces"),
     ({"spaces": deep(150)}, "levels deep"), ({"spaces": deep(1, r"\ud800")}, "surrogates"),
     ({"spaces": SPACES.replace("[3]", "[4]")}, "by its space uint8.2, 4."),
     ({"spaces": SPACES, "env": "a\nb"}, "whose name cannot be used: 'a.nb'"),
     ({"spaces": SPACES, "num_envs": 5000}, "5,000 environments a stream")],
)  # fmt: skip
def test_an_unusable_server_is_named_and_the_others_count(handshake, message, caplog):
    bad, good = FakeServer(obey(**handshake)), FakeServer(obey(2, spaces=SPACES))
    for addresses in ([bad.address, good.address], [good.address, bad.address]):
        assert handshakes.query_servers(addresses, None)["spaces"] == SPACES
        (text,) = {text for text in caplog.messages if "0 s so far" in text}
        assert bad.address in text and re.search(message, text)
        caplog.clear()
    with pytest.raises(EnvError, match=f"(?s)no .* can be used: .*{bad.address}.*{message}"):
        handshakes.query_servers([bad.address], None)
    bad.stop()
    good.stop()


@pytest.mark.parametrize("order", ["odd one two", "one odd two", "one two odd"])
def test_what_most_servers_say_counts_whoever_answers_first(fake_query, order):
    answered = threading.Event()

    def query(address):
        if address == "odd":
            answered.set()
            return {"num_envs": 2}
        answered.wait()
        return {"num_envs": 4}

    fake_query(query)
    assert handshakes.query_servers(order.split(), None) == {"num_envs": 4}


def test_where_servers_differ_the_first_that_answers_counts(fake_query, monkeypatch):
    ended = threading.Event()

    def query(address):
        if address == "silent":
            ended.wait()
        return {"env": address}

    fake_query(query)
    for addresses in (["a", "b"], ["b", "a"]):
        assert handshakes.query_servers(addresses, None)["env"] == addresses[0]
    monkeypatch.setattr(handshakes, "MAJORITY_TIMEOUT", 0.1)
    assert handshakes.query_servers(["silent", "b"], None)["env"] == "b"
    ended.set()


@pytest.mark.parametrize(("interval", "reasons"), [(0, (1, 2)), (10, (1,))])
def test_the_log_names_servers_waited_for_and_later_why(
    interval, reasons, fake_query, caplog, monkeypatch
):
    monkeypatch.setattr(handshakes, "FIRST_LINE", 0)
    monkeypatch.setattr(access, "LOG_INTERVAL", interval)
    failures = [TimeoutError(f"no environment server at host:{i} within 20 s") for i in (2, 1)]

    def query(address):
        wait_until(lambda: caplog.messages)  # the first line does not wait for a time-out
        if failures:
            raise failures.pop()
        return {"env": "Pong"}

    fake_query(query)
    caplog.set_level(logging.INFO)
    assert handshakes.query_servers(["host:1"], None) == {"env": "Pong"}
    first, *later = caplog.messages
    assert first == "Waiting for environment servers at host:1"
    for i, message in zip(reasons, later, strict=True):
        assert f"0 s so far: no environment server at host:{i} within 20 s" in message
        assert "start polybeast_env.py there" in message and "--server_addresses" in message


def parse(*arguments):
    return polybeast.parser.parse_args(arguments)


def test_connect_returns_the_servers_environment():
    with serving(None, make_environments=make_many(Catch, 4), env="Catch") as address:
        with servers.connect(
            parse("--server_addresses", address), None, check_discrete, ALONE
        ) as found:
            assert found.addresses == [address] and found.num_envs == 4
            assert found.env == "Catch" and found.action_space.n == 3 and found.frame_skip == 1
            assert found.observation_space == gym.spaces.Box(0, 1, (1, 10, 5), np.uint8)
            assert found.pids() == []
        arguments = ("--server_addresses", address, "--envs_per_stream", "7")
        with servers.connect(parse(*arguments), None, check_discrete, ALONE) as found:
            assert found.num_envs == 7

        def refuse(space):
            raise FlagError(f"{space} is not what this program takes")

        with pytest.raises(FlagError, match=r"Discrete\(3\) is not what"):
            servers.connect(parse("--server_addresses", address), None, refuse, ALONE).__enter__()


def adopt(given, served, eval_interval=0):
    flags = SimpleNamespace(env=given, eval_interval=eval_interval)
    servers.check_env(flags, served, "the servers")
    return servers.adopt_env(flags, SimpleNamespace(env=served, frame_skip=3, listening=None))


@pytest.mark.parametrize("given", [None, "Catch", "Breakout"])
@pytest.mark.parametrize("served", [None, "Catch"])  # forks' servers name none
def test_the_game_is_that_of_the_servers_or_refused(given, served, caplog):
    caplog.set_level(logging.INFO)
    if (given, served) == ("Breakout", "Catch"):
        with pytest.raises(FlagError, match="is Breakout, but the servers play Catch: start"):
            adopt(given, served)
        return
    flags = adopt(given, served)
    assert flags.env == given or served and flags.frames_per_step == 3
    logged = ["The environments play Catch"] if served and not given else []
    assert caplog.messages == logged


def test_a_game_of_a_module_is_taken_over_only_where_given():
    with pytest.raises(FlagError, match="play 'my-evil:Pong-v0', .* add --env my-evil:Pong-v0$"):
        adopt(None, "my-evil:Pong-v0", eval_interval=1)
    adopt("my-evil:Pong-v0", "my-evil:Pong-v0", eval_interval=1)
    adopt(None, "my-evil:Pong-v0")  # imports nothing here


def create_nothing(num_envs, seed, name):
    raise RuntimeError("the game is not installed")


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (lambda: ServerThread(Old), "name no spaces"),
        (lambda: ServerThread(None, make_environments=create_nothing),
         r"create_nothing(?s:.*)RuntimeError: the game is not installed"),
        (lambda: FakeServer(obey(version=7)), "version 7, .* 1"),
        (lambda: ServerThread(None, make_environments=make_many(Catch), env="Asterix"),
         "is Catch, but .* play Asterix"),  # though of equal spaces
    ],
)  # fmt: skip
def test_servers_that_all_are_unusable_end_the_run(tmp_path, start, message):
    server = start()
    arguments = ["--env", "Catch", "--savedir", str(tmp_path)]
    with pytest.raises((EnvError, FlagError), match=message):
        polybeast.main([*arguments, "--server_addresses", server.address])
    server.stop()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--num_actors 3 --num_servers 4", "--num_actors is 3, .* 4 servers"),
        ("--num_actors 2 --server_addresses a:1-2,b:2", "--num_actors is 2, .* 3 servers"),
        ("--num_actors 17 --num_servers 1", "--num_actors is 17, .* 1 servers .* 16 streams"),
        ("--max_learner_queue_size 7 --batch_size 9", "is 7, .* --batch_size = 9"),
        ("--server_addresses a:1 --pipes_basename unix:/b", r"a:1\) .*unix:/b\) .* only one"),
        ("--server_addresses a:1 --num_servers 2", r"a:1\) .*--num_servers \(2\) .* only one"),
        ("--server_addresses a:1,,b:2", "separated by commas"),
        ("--server_addresses a:2-1", "a:2-1"),
        ("--server_addresses nowhere", "nowhere.* host:port"),
        ("--pipes_basename nowhere", "nowhere.* host:port"),
        ("--pipes_basename 0.0.0.0:5000", "0.0.0.0:5000 may be reached from other machines"),
        ("--envs_per_stream 5000", "--envs_per_stream is 5000, .* 4096"),
    ],
)
def test_flags_that_cannot_be_are_refused_before_anything_starts(arguments, message):
    with pytest.raises(FlagError, match=message):
        polybeast.resolve(parse(*arguments.split()))


def test_environments_say_how_many_where_a_checkpoint_does_not(monkeypatch):
    answers = {"spaces": SPACES, "env": "Catch", "num_envs": 7}
    monkeypatch.setattr(servers, "query_servers", lambda *arguments: answers)
    for number, found in ((None, 7), (4, 4)):
        flags = SimpleNamespace(spaces=SPACES, envs_per_stream=number, env="Catch")
        flags.stall_timeout_s, flags.eval_interval = 60, 0
        listening = SimpleNamespace(address="")
        assert servers.Servers(flags, [], {}, check_discrete, None, listening).num_envs == found


def test_local_servers_get_the_learners_flags_but_no_secret(monkeypatch):
    start = unittest.mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(servers, "remove_after_death", lambda folder: None)
    arguments = "--env BreakoutNoFrameskip-v4 --seed 7 --num_servers 3 --envs_per_stream 5 --color "
    arguments += "--no_episodic_life --no_fire_reset --no_max_pool --frame_skip 2 --frame_size 0 "
    arguments += "--frame_stack 1 --noop_max 0 --sticky_actions 0.5 --full_action_space "
    arguments += "--env_backend ale_vector --stall_timeout_s 7 --auth_token_file /secret"
    flags = parse(*arguments.split())
    flags.levels, flags.spaces = [3, 4], "{}"  # of a fork; of a resumed run
    with (
        pytest.raises(InterruptedError),
        servers.connect(flags, "script.py", check_discrete, ALONE),
    ):
        pass
    python, script, *arguments = start.call_args[0][0]
    assert python == sys.executable and script == "script.py"
    served = vars(server_processes.parse_flags(polybeast_env.parser, arguments))
    given = json.loads(served.pop("learner_flags"))
    assert given["levels"] == [3, 4] and not {"auth_token_file", "spaces"} & given.keys()
    assert served.pop("server_address").startswith("unix:/") and served.pop("end_with_stdin")
    assert served.pop("auth_token_file") is None and not served.pop("insecure")
    assert served.pop("learner") is None and served.pop("program") == "polybeast_env.py"
    assert len(served) > 12 and served == {name: getattr(flags, name) for name in served}


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
def test_all_addresses_are_those_of_both_protocols():
    flags = SimpleNamespace(listen="[::]:0", max_streams=4)
    with listening.listen(flags, {}, ALONE) as port:
        number = int(port.address.rpartition(":")[2])
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, number), timeout=10).close()


def test_many_streams_raise_the_limit_of_open_files(monkeypatch):
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    flags = SimpleNamespace(listen=None, max_streams=1000)
    listening.allow_files(flags, 700)
    assert raised == []
    listening.allow_files(flags, 3000)
    assert raised == [(3256, 4096)]
    with pytest.raises(ValueError, match="4,000 streams to servers may need 4,256 open .* 4,096"):
        listening.allow_files(flags, 4000)
    flags.listen = "a:1"
    with pytest.raises(ValueError, match="1,200 .* and --max_streams 1000 may need 4,224 open"):
        listening.allow_files(flags, 1200)


def test_slow_environments_have_as_long_as_a_stall_may_last():
    for stall, seconds in ((1, 300), (100, 500)):
        assert handshakes.answer_timeout(SimpleNamespace(stall_timeout_s=stall)) == seconds
