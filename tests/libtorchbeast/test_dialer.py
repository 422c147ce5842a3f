# SPDX-License-Identifier: Apache-2.0
"""Environments that dial in: their rollouts, who is refused, and comings and goings."""

import contextlib
import itertools
import logging
import os
import re
import signal
import subprocess
import sys
import time

import counting
import grpc
import gymnasium as gym
import numpy as np
import pytest
import torch
from counting import free_address, make_first, make_step
from deadline import Thread, run_with_deadline, wait_until
from dialing import DialerThread, FakeEnvironments, FakeLearner, Port
from program import HELPERS, ROOT
from rig import STATE, Rig, act_zero, by_environment, check_chain, check_rows
from stream import make_many

from libtorchbeast import ClosedBatchingQueue, dialer, rpcenv_pb2, wire

pytestmark = pytest.mark.timeout(120, method="thread")


@pytest.fixture
def start():
    """Return a function that keeps what it is given, and stops or closes it in the end."""
    with contextlib.ExitStack() as stack:

        def keep(thing):
            stack.callback(thing.stop if hasattr(thing, "stop") else thing.close)
            return thing

        yield keep


@pytest.fixture
def rig(start):
    """Return a function that makes a Port and a Rig on it."""

    def make(*arguments, port_options=(), **options):
        port = start(Port(**dict(port_options)))
        rig = start(Rig([], *arguments, listener=port.listener, **options))
        rig.address, rig.port = port.address, port
        return rig

    return make


@pytest.mark.parametrize(
    ("env_class", "num_envs", "columns", "dict_outputs"),
    [
        (counting.OldCounting, None, 1, False),
        (counting.Truncated, None, 1, False),
        (counting.Truncated, 3, 3, True),
        (counting.Counting, 3, 2, True),
    ],
)
def test_rollouts_are_those_of_servers(start, rig, env_class, num_envs, columns, dict_outputs):
    options = {"columns": columns, "dict_outputs": dict_outputs, "num_envs": num_envs, "limit": 8}
    learner = rig(**options)
    for _ in range(2):
        start(DialerThread(env_class, learner.address))
    wait_until(lambda: learner.pool.num_connected() == 2)
    chains = by_environment(learner.columns(60)).values()
    assert len(chains) == 2 * (num_envs or 1)
    for chain in chains:
        assert len(chain) > 1
        check_chain(chain, STATE, truncates=env_class is counting.Truncated and dict_outputs)


class Stacked(gym.Env):
    """Frames of noise in stacks of four, of which the newest one travels."""

    stack_size = 4

    def __init__(self):
        self.observation_space = gym.spaces.Box(0, 255, (4, 6, 6), np.uint8)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.stack = self.np_random.integers(0, 256, (4, 6, 6), np.uint8)
        return self.stack, {}

    def step(self, action):
        frame = self.np_random.integers(0, 256, (1, 6, 6), np.uint8)
        self.stack = np.concatenate([self.stack[1:], frame])
        return self.stack, 0.0, bool(self.np_random.random() < 0.2), False, {}


def test_newest_frames_are_restacked_and_seeds_are_the_learners(start, rig, monkeypatch):
    options = {"dict_outputs": True, "num_envs": 2, "columns": 2}
    batches, sizes, encode = [], [], wire.RowEncoder.encode_first

    def encode_first(*args):
        step = encode(*args)
        sizes.append(rpcenv_pb2.Step.FromString(step).handshake.stack_size)
        return step

    monkeypatch.setattr(wire.RowEncoder, "encode_first", encode_first)
    for newest in (False, True):
        learner = rig(act_zero, (), newest_frame_only=newest, listener_seed="7,0", **options)
        seeds = []
        start(DialerThread(None, learner.address, make_environments=make_many(Stacked, 2, seeds)))
        batches.append([learner.take()[0][0]["frame"] for _ in range(3)])
        assert seeds == [[7, 0, 0, 0]]  # the stream's index, and connections before
        learner.close()
    for whole, restacked in zip(*batches, strict=True):
        assert torch.equal(whole, restacked)
    assert sizes == [0, 4]


def test_a_question_ends_in_order_and_environments_come_back(start):
    port = start(Port())
    asking = Thread(lambda: port.listener.query(3, check=lambda handshake: {}))
    asking.assert_blocked()
    environments = start(
        DialerThread(None, port.address, make_environments=make_many(counting.Counting), env="Game")
    )
    handshake = asking.result()
    assert handshake["num_envs"] == 3 and handshake["env"] == "Game" and handshake["spaces"]
    assert not environments.accepted  # no action has come yet
    learner = start(Rig([], num_envs=2, columns=2, listener=port.listener))
    learner.take()
    assert environments.accepted == [port.address]
    second = Thread(port.listener.query)
    port.close()
    with pytest.raises(ClosedBatchingQueue):
        second.result()


def test_streams_wait_for_the_pool(start):
    port = start(Port())
    for _ in range(3):
        start(DialerThread(counting.OldCounting, port.address))
    wait_until(lambda: port.listener.num_streams() == 3)
    learner = start(Rig([], listener=port.listener))
    wait_until(lambda: learner.pool.num_connected() == 3)


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({"env": "Pong"}, {}, "plays Game, expected Pong"),
        ({"spaces": "{}"}, {}, "has other spaces"),
        ({"expected_num_envs": 3}, {}, "has 1 environments a stream, expected 3"),
        ({}, {"auth_token": "wrong"}, "asks for a token, but this is another one"),
        ({}, {"auth_token": None}, "asks for a token, but there is none"),
    ],
)
def test_who_does_not_fit_is_refused_by_name_on_both_ends(start, rig, options, given, message):
    learner = rig(port_options={"auth_token": "right"}, **options)
    arguments = {"make_environments": make_many(counting.Counting), "env": "Game"}
    arguments |= {"auth_token": "right"} | given
    with pytest.raises(RuntimeError, match=f"refused.* {message}"):
        DialerThread(None, learner.address, **arguments).result()
    if "auth_token" in given:
        (event,) = wait_until(lambda: learner.port.events)
        assert "refused a stream without this learner's token" in event and "right" not in event
    else:
        learner.wait_for_event(f"stream 0: refused: .*{message}")


def test_one_learner_that_refuses_leaves_the_others(start, rig, monkeypatch, caplog):
    monkeypatch.setattr(dialer, "PAUSES", (0.01,))
    refusing = rig(port_options={"auth_token": "other"})
    learner = rig(act_zero, (), port_options={"auth_token": "right"})
    addresses = refusing.address, learner.address
    player = start(DialerThread(counting.OldCounting, *addresses, auth_token="right"))
    wait_until(lambda: player.accepted == [learner.address])
    assert f"refused by the learner at {refusing.address}" in caplog.text
    learner.take()
    with pytest.raises(RuntimeError, match="refused by the learner"):
        DialerThread(counting.OldCounting, *addresses, auth_token="wrong").result()


def test_rows_unlike_those_of_others_are_refused_for_good(start, rig):
    learner = rig(act_zero, ())
    start(DialerThread(counting.OldCounting, learner.address))
    learner.take()
    other = start(FakeEnvironments(learner.address, make_first(1)))
    code, details = other.refusal()
    assert code == grpc.StatusCode.FAILED_PRECONDITION and "uint8" in details
    learner.take()


def test_another_version_is_refused_with_both_numbers(start, rig):
    learner = rig(act_zero, ())
    other = start(FakeEnvironments(learner.address, make_first(1, version=2)))
    text = "speaks protocol version 2, but this learner speaks 1: update the older one"
    learner.wait_for_event(text)
    code, details = other.refusal()
    assert code == grpc.StatusCode.FAILED_PRECONDITION and text in details
    assert other.heard[0].protocol_version == 1

    told = []

    def speak(requests, context):
        yield rpcenv_pb2.Action(protocol_version=2)
        told.append(next(requests).error)

    newer = start(FakeLearner(speak))
    text = f"the learner at {newer.address} speaks protocol version 2, but these environments "
    with pytest.raises(RuntimeError, match=text + "speak 1: update the older one"):
        DialerThread(counting.OldCounting, newer.address).result()
    assert re.search(text, *told)


def test_a_server_of_environments_is_no_learner(start):
    server = start(counting.FakeServer(counting.obey()))
    with pytest.raises(RuntimeError, match="cannot dial in to: update it"):
        DialerThread(counting.OldCounting, server.address).result()


def test_no_more_streams_than_allowed(start, rig, caplog):
    learner = rig(act_zero, (), port_options={"max_streams": 1})
    first = start(DialerThread(counting.OldCounting, learner.address))
    wait_until(lambda: learner.pool.num_connected() == 1)
    second = start(DialerThread(counting.OldCounting, learner.address))
    wait_until(lambda: "has 1 streams already, and no more" in caplog.text)
    (event,) = wait_until(lambda: learner.port.events)
    assert event.startswith("refused 127.0.0.1:") and "(its --max_streams)" in event
    first.stop()
    wait_until(lambda: second.accepted)


def test_streams_come_and_go_and_take_the_places_of_others(start, rig):
    learner, seeds = rig(act_zero, (), listener_seed="1", num_envs=1), []
    arguments = {"make_environments": make_many(counting.Counting, 1, seeds)}
    stay, go = (DialerThread(None, learner.address, **arguments) for _ in range(2))
    wait_until(lambda: learner.pool.num_connected() == 2)
    for round_ in range(1, 4):
        go.stop()
        wait_until(lambda: learner.pool.num_connected() == 1 == len(learner.pool.silences()))
        assert [index for index, *_ in learner.pool.silences()] in ([0], [1])
        go = DialerThread(None, learner.address, **arguments)
        wait_until(lambda: learner.pool.num_connected() == 2)
        assert sorted(index for index, *_ in learner.pool.silences()) == [0, 1]
        assert learner.pool.num_reconnects() == round_
    assert len({tuple(seed) for seed in seeds}) == len(seeds) == 5  # no game is played twice
    for thing in (stay, go):
        thing.stop()
    wait_until(lambda: learner.pool.num_connected() == 0 == len(learner.pool.silences()))
    learner.wait_for_event(
        r"stream \d: the environment process at [\d.:]+ has come; streams now: \d"
    )
    learner.wait_for_event(r"stream \d: the environment process at .* was lost.*; streams now: \d")


def test_the_next_learner_is_tried_when_one_is_gone(start, caplog):
    caplog.set_level(logging.INFO)
    ports = [Port(), start(Port())]
    rigs = [start(Rig([], act_zero, (), listener=port.listener)) for port in ports]
    addresses = [port.address for port in ports]
    start(DialerThread(counting.OldCounting, *addresses))
    wait_until(lambda: rigs[0].pool.num_connected() == 1)
    other = start(DialerThread(counting.OldCounting, *addresses, first=1))
    wait_until(lambda: rigs[1].pool.num_connected() == 1)
    rigs[0].close()
    ports[0].close()
    wait_until(lambda: rigs[1].pool.num_connected() == 2)
    assert other.accepted == [addresses[1]]
    assert f"the learner at {addresses[0]} has ended" in caplog.text


def test_a_failing_environment_is_named_and_tried_again(start, rig, caplog):
    learner = rig(act_zero, ())
    start(DialerThread(counting.Raising, learner.address))
    learner.wait_for_event("the environment process at .* says: .*RuntimeError: the ball is lost")
    wait_until(lambda: learner.pool.num_reconnects() >= 1)
    assert "the ball is lost" in caplog.text


def test_pauses_grow_though_streams_play_a_little(start, rig, monkeypatch):
    monkeypatch.setattr(dialer, "PAUSES", (0.01, 0.01, 600))
    learner, seeds = rig(act_zero, ()), []
    make = make_many(counting.Raising, 1, seeds)
    start(DialerThread(None, learner.address, make_environments=make))
    wait_until(lambda: len(seeds) == 3)
    time.sleep(1)
    assert len(seeds) == 3


def test_the_first_address_is_tried_every_other_time():
    tries = dialer.Dialer(counting.Counting, ["a", "b", "c"], 1)
    assert "".join(map(tries._address, range(8))) == "bcbabcba"
    assert dialer.Dialer(counting.Counting, ["a"], 5)._address(3) == "a"


def test_processes_pause_before_their_first_address_alone(monkeypatch):
    events = []

    class Gone:
        num_actions, is_refused, is_in_order = 0, False, True

        def __init__(self, dialer, address, started):
            events.append(address)

        def run(self):
            return "the learner is not there yet"

    def wait(seconds):
        events.append("-")
        if len(events) > 8:
            tries.stop()

    monkeypatch.setattr(dialer, "_Stream", Gone)
    tries = dialer.Dialer(counting.Counting, ["a", "b", "c"])
    monkeypatch.setattr(tries, "_wait", wait)
    tries.run()
    assert "".join(events) == "ab-ac-ab-"


def test_processes_come_back_to_their_first_address(start, rig, monkeypatch):
    monkeypatch.setattr(dialer, "PAUSES", (0.01,))
    home, second, third = free_address("127.0.0.1"), rig(act_zero, ()), rig(act_zero, ())
    played = start(DialerThread(counting.Counting, home, second.address, third.address))
    second.take()
    first = rig(act_zero, (), port_options={"port": int(home.rpartition(":")[2])})
    second.close()
    first.take()
    assert played.accepted == [second.address] and third.pool.count() == 0


def test_environments_say_that_nobody_waited_for_them(start, rig, monkeypatch, caplog):
    class Slow(counting.Counting):
        def __init__(self):
            super().__init__()
            time.sleep(1.5)

    monkeypatch.setattr(dialer, "SLOW", 1)
    learner = rig(act_zero, (), step_timeout_s=0.5)
    start(DialerThread(Slow, learner.address))
    wait_until(lambda: "did not wait for the environments, which took 2 s: it has" in caplog.text)


def test_a_stream_that_says_nothing_any_more_is_cut_off(start, rig):
    learner = rig(act_zero, (), step_timeout_s=0.5)
    silent = start(FakeEnvironments(learner.address, make_first(1), make_step(1)))
    learner.wait_for_event("hangs: it took more than 0.5 s")
    assert silent.refusal()[0] == grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_killed_or_stopped_costs_its_rollout(start, rig, signal_number):
    learner = rig(act_zero, (), step_timeout_s=1)
    code = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(HELPERS)!r}]
import counting
from libtorchbeast import Dialer
Dialer(counting.Counting, [{learner.address!r}]).run()
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        learner.take()
        os.kill(process.pid, signal_number)
        learner.wait_for_event("was lost: the connection or|hangs: it took more than 1 s")
        process.kill()
    wait_until(lambda: learner.pool.num_connected() == 0)
    start(DialerThread(counting.OldCounting, learner.address))
    learner.take()


def test_closing_ends_everything_whatever_streams_do():
    run_with_deadline("""
    import time
    import counting
    from deadline import Thread, wait_until
    from dialing import DialerThread, Port
    from rig import Rig, act_zero

    class Hanging(counting.Counting):
        def reset(self, **kwargs):
            time.sleep(3600)

    def check(moment):
        port = Port()
        if moment != "nobody":
            DialerThread(Hanging if moment in ("asked", "hanging") else counting.Counting,
                         port.address)
            wait_until(lambda: port.listener.num_streams() == 1)
        if moment == "asked":
            Thread(port.listener.query)
            time.sleep(0.5)
        if moment in ("playing", "hanging", "nobody"):
            rig = Rig([], act_zero, (), listener=port.listener)
            if moment == "playing":
                rig.take()
            time.sleep(0.3)
            rig.close()
        port.close()
        port.close()

    moments = ("waiting", "asked", "playing", "hanging", "nobody")
    for moment, thread in [(moment, Thread(check, moment)) for moment in moments]:
        print(f"ends while {moment}?", flush=True)
        thread.result(50)  # or the stacks of all would come first
    """)  # fmt: skip


@pytest.mark.parametrize("moment", ["nobody", "waiting", "playing"])
def test_environments_stop_at_any_moment(start, moment):
    port = start(Port())
    address = "127.0.0.1:9" if moment == "nobody" else port.address
    environments = DialerThread(counting.OldCounting, address)
    if moment == "waiting":
        wait_until(lambda: port.listener.num_streams() == 1)
    if moment == "playing":
        learner = start(Rig([], listener=port.listener))
        learner.take()
    environments.dialer.stop()
    environments.result()
    wait_until(lambda: port.listener.num_streams() == 0)


def test_servers_and_dialers_fill_the_same_batches(start, rig):
    server = start(counting.ServerProcess())
    port = start(Port())
    learner = start(Rig([server.address], listener=port.listener, num_envs=1, dict_outputs=True))
    start(DialerThread(counting.Counting, port.address))
    actors = itertools.chain.from_iterable(
        column[0]["actor"].unique().tolist() for column in iter_columns(learner)
    )
    assert set(itertools.islice(actors, 60)) == {0, 1}
    assert [peer.partition(" at ")[0] for _, peer, *_ in learner.pool.silences()] == [
        "the environment server", "the environment process",
    ]  # fmt: skip


def iter_columns(learner):
    while True:
        for column in learner.columns(1):
            check_rows(*column, truncates=False)
            yield column
