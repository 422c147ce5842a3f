# SPDX-License-Identifier: Apache-2.0
"""A learner's port, and what strangers and broken environments at it can do."""

import contextlib
import re
import socket
import time

import grpc
import pytest
from catch_env import Catch
from counting import Counting, has_ipv6, make_first, make_step
from deadline import DEADLINE, Thread, wait_until
from dialing import DialerThread, FakeEnvironments, FakeLearner, Port
from rig import Rig, act_zero
from stream import make_many

from beast.errors import EnvError
from beast.learners.learner_group import ALONE
from beast.servers.handshakes import query_servers
from beast.servers.listening import Listening
from libtorchbeast import Dialer
from libtorchbeast import rpcenv_pb2 as pb

TOKEN = "correct-horse-battery-staple"


def playing(port, **options):
    return contextlib.closing(Rig([], listener=port.listener, **options))


def test_connections_that_are_closed_keep_nobody_out():
    with Port(max_streams=1) as port:
        for _ in range(300):  # more than may be open at the same time
            host, _, number = port.address.rpartition(":")
            socket.create_connection((host, int(number))).close()
        with DialerThread(Counting, port.address):
            assert Thread(port.listener.query).result(DEADLINE)["num_envs"] == 1


def test_slow_environments_keep_others_from_no_query():
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(Port())
        querying = Thread(port.listener.query, 1)
        for _ in range(8):  # all that are asked at the same time
            stack.enter_context(FakeEnvironments(port.address)).hello()
        stack.enter_context(DialerThread(Counting, port.address))
        assert querying.result(DEADLINE)["num_envs"] == 1


def test_a_query_without_an_answer_ends_when_a_pool_begins():
    with Port() as port, FakeEnvironments(port.address) as slow:
        querying = Thread(port.listener.query, 2)
        assert slow.hello().options["num-envs"] == "2"
        with playing(port, num_envs=1) as rig:
            with pytest.raises(RuntimeError, match="used by an ActorPool"):
                querying.result()
            with DialerThread(Counting, port.address):
                rig.columns(2)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_strangers_fill_one_line_of_the_log_and_then_another(host):
    if ":" in host and not has_ipv6():
        pytest.skip("no IPv6")
    with Port(auth_token=TOKEN, host=host) as port:
        for token in (None, TOKEN[:-1], TOKEN + "x", *["another"] * 17):
            with FakeEnvironments(port.address, token=token) as stranger:
                code, reason = stranger.refusal()
            assert code == grpc.StatusCode.UNAUTHENTICATED and TOKEN not in reason
        with DialerThread(Counting, port.address, auth_token=TOKEN):
            assert port.listener.query()["num_envs"] == 1
    text = "refused a stream without this learner's token, from " + re.escape(
        port.address.rpartition(":")[0]
    )
    first, others = port.events
    assert re.match(text, first) and re.match("19 events, the latest: " + text, others)


BROKEN = {  # messages, and the reason that both ends get
    "nothing": ([b""], "sent no handshake"),
    "no Step": ([b"\x0a\xff"], "malformed message"),
    "another protocol": ([make_first(version=9)], "speaks protocol version 9, but"),
    "other environments": ([make_first(num_envs=3)], "has 3 environments a stream, expected 2"),
    "a long row": ([make_first(reward=bytes(9))], "malformed message: reward is 9 bytes"),
    "a later row": ([make_first(), make_step(done=b"\7\7")], "malformed message: done is bool"),
    "an error": ([pb.Step(error="\x1b[2J\n[INFO forged\u2028]" * 2000)], r"says: .*forged"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_environments_get_the_reason_and_fill_no_log(what):
    messages, reason = BROKEN[what]
    with Port() as port, playing(port, agent=act_zero, state=(), num_envs=2) as rig:
        for _ in range(5):
            with FakeEnvironments(port.address, *messages) as broken:
                code, details = broken.refusal()
            assert code.name in ("INVALID_ARGUMENT", "FAILED_PRECONDITION") and len(details) <= 500
            assert details.isprintable()
            assert what == "an error" or re.search(reason, details)
        wait_until(lambda: rig.events)
        (event,) = [event for event in rig.events if "has come" not in event]
        assert re.search(f"^stream 0: .*{reason}", event, re.S) and "streams now: 0" in event
        assert all(line.isprintable() for line in event.split("\n"))
        assert all(line.startswith("  | ") for line in event.split("\n")[1:])


def test_a_learner_that_waits_logs_broken_environments_once():
    with Port() as port:
        asking = Thread(
            query_servers, [], None, listening=Listening(port.address, port.listener, ALONE)
        )
        for _ in range(2):
            with FakeEnvironments(port.address, b"\x0a\xff") as stranger:
                stranger.refusal()
        with DialerThread(None, port.address, make_environments=make_many(Catch), env="Catch"):
            assert asking.result()["env"] == "Catch"
    assert "malformed message" in port.events[0] and len(port.events) == 2  # the other at the end


def test_what_does_not_fit_is_refused_and_the_next_is_taken():
    def check_fit(handshake):
        if handshake["env"] != "Catch":
            raise EnvError(f"another game, {handshake['env']}")

    catches = {"make_environments": make_many(Catch)}
    with Port() as port:
        listening = Listening(port.address, port.listener, ALONE)
        asking = Thread(query_servers, [], None, listening=listening, check_fit=check_fit)
        with pytest.raises(RuntimeError, match="refused: .* has another game, Breakout"):
            Dialer(None, [port.address], env="Breakout", **catches).run()
        with DialerThread(None, port.address, env="Catch", **catches):
            assert asking.result()["env"] == "Catch"
    assert [re.sub("process at .* has", "", event) for event in port.events] == [
        "refused: the environment  another game, Breakout"
    ]


def test_an_error_of_the_check_ends_the_query():
    with Port() as port:
        asking = Thread(port.listener.query, check=lambda handshake: handshake["no such key"])
        with DialerThread(Counting, port.address), pytest.raises(KeyError, match="no such key"):
            asking.result()


def test_one_that_is_slow_to_answer_does_not_keep_others_waiting():
    with Port() as port, FakeEnvironments(port.address) as slow:
        querying = Thread(port.listener.query)
        slow.hello()
        with DialerThread(Counting, port.address):
            assert querying.result()["num_envs"] == 1
        assert slow.refusal()[0] == grpc.StatusCode.CANCELLED


def test_a_stream_in_place_of_another_was_not_silent_before():
    with Port() as port, playing(port) as rig:
        with DialerThread(Counting, port.address):
            rig.columns(1)
        wait_until(lambda: not rig.pool.silences())
        time.sleep(0.1)
        before = time.monotonic()
        with FakeEnvironments(port.address) as slow:
            slow.hello()
            ((index, _, what, seconds),) = rig.pool.silences()
            assert index == 0 and what == "connection" and seconds < time.monotonic() - before


def test_close_waits_until_another_thread_has_closed():
    with Port() as port, FakeEnvironments(port.address):
        wait_until(port.listener.num_streams)
        closing = [Thread(port.listener.close) for _ in range(3)]
        closing[0].result()
        assert port.listener.num_streams() == 0
        for thread in closing:
            thread.result()


def hello(**options):
    options = {key.replace("_", "-"): value for key, value in options.items()}
    return pb.Action(protocol_version=1, options=options)


HELLOS = {  # of hostile learners, and what environments say of them
    "no Action": (b"\x0a\xff", "malformed message"),
    "no version": (pb.Action(), "speaks protocol version 0"),
    "too many environments": (hello(num_envs="9" * 9), "num-envs is 9+; it should be from 1 to"),
    "a seed of 1 MB": (hello(seed="1," * 2**19), "malformed message: seed is '1,"),
    "an option that is none": (hello(newest_frame_only="\x1b[2J"), "newest-frame-only is"),
    "an option cut off": (b"\x22\x05\x0a\x03\xff", "malformed"),
}


@pytest.mark.parametrize("what", HELLOS)
def test_environments_outlast_a_hostile_learner_and_say_why(what, caplog):
    message, reason = HELLOS[what]
    learner = FakeLearner(lambda *_: [message])
    dialer = Dialer(Counting, [learner.address])
    thread = Thread(dialer.run)
    if "version" in what:
        with pytest.raises(RuntimeError, match=reason):
            thread.result()
    else:
        wait_until(lambda: caplog.records)
        dialer.stop()
        thread.result()
        assert re.search(reason, caplog.text) and len(caplog.text) < 2000
        assert all(line.isprintable() for line in caplog.text.split("\n"))
    learner.stop()
