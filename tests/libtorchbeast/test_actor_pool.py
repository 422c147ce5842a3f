# SPDX-License-Identifier: Apache-2.0
"""ActorPool: rollouts from real servers, lost servers, and servers that send rubbish."""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time

import counting
import gymnasium as gym
import nest
import numpy as np
import pytest
import torch
from counting import (
    FakeServer,
    ServerProcess,
    free_address,
    hang_after_the_first_row,
    make_first,
    make_step,
    obey,
    say,
    wait_for_end,
)
from deadline import DEADLINE, Thread, run_with_deadline, wait_until
from old_env import Old
from program import HELPERS, ROOT
from rig import STATE, Rig, T, act_zero, answer, assert_equal, by_environment, check_chain
from stream import ServerThread, from_nest, make_many

from libtorchbeast import (
    ActorPool,
    AsyncError,
    BatchingQueue,
    DynamicBatcher,
    query_server,
    rpcenv_pb2,
)
from libtorchbeast import server as server_module

# The main thread may wait where no signal reaches it.
pytestmark = pytest.mark.timeout(120, method="thread")
OPTIONS = {"num-envs", "seed", "newest-frame-only", "truncated-rows"}


@pytest.fixture
def start():
    """Return a function that keeps what it is given, and stops or closes it in the end."""
    with contextlib.ExitStack() as stack:

        def keep(thing):
            # If it fails for one of these, run() has raised it in the test already.
            stack.enter_context(contextlib.suppress(ConnectionError, TimeoutError))
            stack.callback(thing.close if isinstance(thing, Rig) else thing.stop)
            return thing

        yield keep


@pytest.mark.parametrize(
    ("env_class", "num_envs", "columns", "dict_outputs"),
    [
        (counting.OldCounting, None, 1, False),
        (counting.Truncated, None, 1, False),  # forks would take the extra row for a step
        (counting.Truncated, 3, 3, True),
        *itertools.product([counting.Counting], [3], [1, 2, 3, 6], [False, True]),
    ],
)
def test_each_environment_of_a_stream_is_a_column(
    start, env_class, num_envs, columns, dict_outputs
):
    address, n = start(ServerThread(env_class)).address, num_envs or 1
    options = {"columns": columns, "dict_outputs": dict_outputs, "num_envs": num_envs, "limit": 8}
    taken = start(Rig([address] * 2, **options)).columns(60)
    # Columns of a rollout stay neighbors, also where a batch ends between them.
    ids = [int(env_outputs["frame"][0, 0]) for env_outputs, _, _ in taken]
    for i in range(0, 60, n):
        assert sorted(ids[i : i + n]) == list(range(min(ids[i : i + n]), min(ids[i : i + n]) + n))
    chains = by_environment(taken).values()
    assert len(chains) == 2 * n
    for chain in chains:
        assert len(chain) > 1
        check_chain(chain, STATE, truncates=env_class is counting.Truncated and dict_outputs)


@pytest.mark.parametrize(
    "state", [(), torch.full((1, 1), 3.0), {"a": (torch.ones(1, 1, 2), ())}, (torch.zeros(3, 1),)]
)
def test_agent_states_may_be_any_nest_and_are_copied(start, state):
    address, given = start(ServerThread(counting.Counting)).address, nest.map(torch.clone, state)

    def agent(env_outputs, state):
        (action, seen, _), new_state = answer(env_outputs, state)
        return (action, seen, torch.zeros_like(action)), new_state

    rig = start(Rig([address], agent, given, columns=3, num_envs=3))
    nest.map(torch.zero_, given)
    for i in range(3):
        _, initial_agent_state = rig.take()
        wanted = nest.map(lambda s, i=i: (s + T * i).repeat_interleave(3, 1), state)
        assert_equal(initial_agent_state, wanted)


def test_a_bare_tensor_as_agent_outputs_is_the_action(start):
    address = start(ServerThread(counting.OldCounting)).address
    agent = lambda env_outputs, state: (env_outputs[1].long(), state)  # noqa: E731
    (_, outputs), _ = start(Rig([address], agent)).take()
    assert outputs.shape == (T + 1, 1)


@pytest.mark.parametrize(
    ("space", "dtype"),
    [
        (gym.spaces.Box(-1, 1, (3,)), torch.float32),
        (gym.spaces.MultiDiscrete([2, 3, 4]), torch.int64),
    ],
)
def test_actions_of_several_parts_come_back_as_last_action(start, space, dtype):
    torch.manual_seed(0)  # else one in 64 second rollouts begins with zeros, too

    def agent(env_outputs, state):
        assert env_outputs["last_action"].dtype == dtype
        T, B = env_outputs["reward"].shape
        return {"action": torch.randint(2, (T, B, 3), dtype=dtype)}, state

    many = make_many(lambda: counting.Mirror(space))
    address = start(ServerThread(None, make_environments=many)).address
    rig = start(Rig([address], agent, (), columns=2, dict_outputs=True, num_envs=2))
    for first in (True, False):
        (env_outputs, agent_outputs), _ = rig.take()
        last_action = env_outputs["last_action"]
        assert last_action.dtype == dtype and last_action.shape == (T + 1, 2, 3)
        assert torch.equal(last_action, agent_outputs["action"])
        assert torch.equal(last_action, env_outputs["frame"])
        assert (last_action[0] == 0).all() == first and (last_action[1:] != 0).any()


def test_messages_may_be_larger_than_grpc_takes_by_default(start):
    large = lambda: Old(observation=lambda t: np.full((5, 2**20), t, np.uint8))  # noqa: E731
    address = start(ServerThread(large)).address
    frame = start(Rig([address], act_zero, (), unroll_length=2)).take()[0][0][0]
    assert frame.shape == (3, 1, 5, 2**20)
    assert [row.unique().tolist() for row in frame] == [[0], [1], [2]]


def test_options_of_a_stream_travel_as_metadata(start):
    fork, server = start(FakeServer(obey(1))), start(FakeServer(obey(2)))
    start(Rig([fork.address], act_zero, ())).take()
    assert not OPTIONS & fork.metadata[0].keys()
    options = {"dict_outputs": True, "num_envs": 2, "newest_frame_only": True}
    start(Rig([server.address] * 2, act_zero, (), seeds=["1,2,3", "4"], **options)).take()
    wait_until(lambda: len(server.metadata) == 2)
    for metadata in server.metadata:
        assert metadata.keys() >= OPTIONS and metadata["num-envs"] == "2"
        assert metadata["newest-frame-only"] == metadata["truncated-rows"] == "1"
    first, second = sorted(metadata["seed"] for metadata in server.metadata)
    # More numbers may follow.
    assert first.startswith("1,2,3") and second.startswith("4")


def test_a_stream_reconnects_with_a_new_seed_and_longer_pauses(start):
    server = start(FakeServer(say(make_first(1), *[make_step(1)] * T)))  # and the stream is over
    rig = start(Rig([server.address], act_zero, (), reconnect=True, seeds=["7"]))

    def pauses():
        return re.findall(r"trying again in ([\d.]+) s", "\n".join(rig.events))

    wait_until(lambda: len(pauses()) >= 4)
    first, *_, fourth = map(float, pauses()[:4])
    assert first <= 0.15 and fourth >= 0.4  # 0.1 and 0.8 seconds, give or take a half
    seeds = [metadata["seed"] for metadata in server.metadata]
    assert all(seed.startswith("7") for seed in seeds) and len(set(seeds)) == len(seeds)


def test_a_stream_that_is_always_lost_does_not_fill_the_log(start):
    steps = [make_step(1)] * (10 * T)  # after ten rollouts the pause is short again
    server = start(FakeServer(say(make_first(1), *steps)))
    rig = start(Rig([server.address], act_zero, (), reconnect=True))
    wait_until(lambda: len(server.metadata) > 30)
    rig.wait_for_event("events, the latest: stream 0: .* was lost.*; streams now: [01]$")
    assert 10 < len([event for event in rig.events if "was lost" in event]) < 20


def test_environments_that_cannot_be_made_get_another_seed(start):
    server = start(FakeServer(say(rpcenv_pb2.Step(error="no level for this seed"))))
    start(Rig([server.address], act_zero, (), reconnect=True, seeds=["7"]))
    wait_until(lambda: len(server.metadata) >= 3)
    seeds = [metadata["seed"] for metadata in server.metadata]
    assert seeds[:3] == ["7,0", "7,1", "7,2"]


def test_query_server_returns_what_a_server_says(start):
    said = {"spaces": '{"a": 1}', "stack_size": 0, "env": "Pong"}
    server = start(FakeServer(obey(3, **said)))
    assert query_server(server.address) == {"protocol_version": 1, "num_envs": 3, **said}
    query_server(server.address, num_envs=3, timeout_s=10)
    assert "num-envs" not in server.metadata[0] and server.metadata[1]["num-envs"] == "3"


def test_query_server_raises_where_there_is_none_or_it_fails(start):
    address = free_address()
    with pytest.raises(TimeoutError, match=re.escape(address)):
        query_server(address, timeout_s=0.3)
    silent = start(FakeServer(lambda requests, context: wait_for_end(context)))
    with pytest.raises((TimeoutError, ConnectionError), match=re.escape(silent.address)):
        query_server(silent.address, timeout_s=0.3)
    failing = start(FakeServer(say(rpcenv_pb2.Step(error="no such game"))))
    with pytest.raises(ConnectionError, match="no such game"):
        query_server(failing.address)


ARGUMENTS = {
    "unroll_length": T,
    "learner_queue": BatchingQueue(),
    "inference_batcher": DynamicBatcher(),
    "env_server_addresses": ["127.0.0.1:1", "127.0.0.1:2"],
    "initial_agent_state": (),
}


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [({"unroll_length": 0}, ValueError, "unroll_length is 0"),
     ({"env_server_addresses": []}, ValueError, "env_server_addresses is empty"),
     ({"num_envs": 0}, ValueError, "num_envs is 0"),
     ({"num_envs": "two"}, TypeError, "num_envs cannot be 'two'"),
     ({"num_evs": 2}, TypeError, "num_evs"),
     ({"seeds": ["1"]}, ValueError, "seeds"), ({"seeds": ["1", "2", "3"]}, ValueError, "seeds"),
     ({"seeds": ["1", "1\n2"]}, ValueError, "integers separated by commas, not '1\n2'"),
     ({"listener_seed": "x"}, ValueError, "integers separated by commas, not 'x'"),
     ({"ranges": {"frame": np.array(1)}}, ValueError, r"int64\[\]; it should have integers .2, "),
     ({"ranges": {"frame": np.zeros((1, 4), int)}}, ValueError, "integers .2, ...., or .0, ..."),
     ({"ranges": {"frame": np.zeros(2)}}, ValueError, "integers .2, ...., or .0, ..."),
     ({"connect_timeout_s": 0}, ValueError, "timeout.*must be positive"),
     ({"step_timeout_s": 0}, ValueError, "timeout.*must be positive"),
     ({"connect_timeout_s": float("nan")}, ValueError, "timeout.*must be positive"),
     ({"step_timeout_s": float("nan")}, ValueError, "timeout.*must be positive"),
     ({"learner_queue": None}, TypeError, "incompatible"),
     ({"inference_batcher": None}, TypeError, "incompatible"),
     ({"initial_agent_state": torch.zeros(3)}, ValueError, "array is float32.3.")],
    ids=repr,
)  # fmt: skip
def test_invalid_arguments_are_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        ActorPool(**(ARGUMENTS | wrong))


def test_torchbeasts_arguments_go_by_position_new_ones_by_name():
    pool = ActorPool(**ARGUMENTS)
    assert pool.count() == pool.num_connected() == pool.num_reconnects() == 0
    del pool  # which never ran
    ActorPool(*ARGUMENTS.values(), num_envs=None, seeds=None, reconnect=True, env="Pong")
    with pytest.raises(TypeError):
        ActorPool(*ARGUMENTS.values(), True)


@pytest.mark.parametrize("reconnect", [False, True])
@pytest.mark.parametrize(
    "agent",
    [
        lambda env_outputs, state: (env_outputs[1].long(),),  # no state
        lambda env_outputs, state: ((), env_outputs[1]),  # no action
        lambda env_outputs, state: {"action": env_outputs[1].long(), "state": state},
    ],
)
def test_wrong_outputs_of_the_agent_end_the_run(start, agent, reconnect):
    rig = start(Rig([start(FakeServer(obey(2))).address], agent, (), reconnect=reconnect))
    with pytest.raises((ValueError, TypeError)):
        rig.running.result()
    rig.running.error = None


def test_an_error_in_the_inference_thread_ends_the_run(start):
    def agent(env_outputs, state):
        raise KeyError("out of memory, say")

    rig = start(Rig([start(FakeServer(obey(2))).address], agent, (), reconnect=True))
    with pytest.raises(KeyError):
        rig.threads[1].result()
    rig.threads[1].error = None  # whose traceback holds the batch
    with pytest.raises(AsyncError):
        rig.running.result()
    rig.running.error = None


def test_the_first_error_ends_the_run_though_other_streams_wait(start):
    """One waits for the queue, one for the agent, one for its server; then another one fails."""
    fail, unanswered = threading.Event(), []

    def wait_for_the_agent(requests, context):
        yield make_first(1, from_nest(np.full((1, 3), 7, np.uint8)))
        yield from wait_for_end(context)

    def fail_when_told(requests, context):
        yield make_first(1)
        fail.wait(DEADLINE)
        yield make_step(1, error="the game is broken")

    def infer():
        for batch in batcher:
            env_outputs, state = batch.get_inputs()
            if env_outputs[0].max() == 7:
                unanswered.append(batch)
            else:
                batch.set_outputs(act_zero(env_outputs, state))

    speaks = (obey(1), wait_for_the_agent, hang_after_the_first_row, fail_when_told)
    servers = [start(FakeServer(speak)) for speak in speaks]
    queue = BatchingQueue(maximum_batch_size=1, maximum_queue_size=1)
    batcher = DynamicBatcher(maximum_batch_size=1)
    pool = ActorPool(1, queue, batcher, [server.address for server in servers], ())
    running, inference = Thread(pool.run), Thread(infer)
    wait_until(lambda: pool.count() == 2 and queue.size() == 1 and unanswered)
    wait_until(lambda: pool.num_connected() == 4)
    running.assert_blocked()
    fail.set()
    with pytest.raises(ConnectionError, match="the game is broken"):
        running.result()
    batcher.close()
    inference.result()


def test_a_server_that_is_missing_or_silent_is_named(start, tmp_path):
    hanging = (hang_after_the_first_row, lambda requests, context: wait_for_end(context))
    addresses = [start(FakeServer(speak)).address for speak in hanging]
    addresses += [free_address(), f"unix:{tmp_path}/nothing"]
    limits = {"step_timeout_s": 0.3, "connect_timeout_s": 0.3}
    errors = [(ConnectionError, TimeoutError)] * 2 + [TimeoutError] * 2
    for address, error in zip(addresses, errors, strict=True):
        begin, rig = time.monotonic(), start(Rig([address], act_zero, (), **limits))
        with pytest.raises(error, match=re.escape(address)):
            rig.running.result()
        assert time.monotonic() - begin > 0.2


@pytest.mark.whole
def test_a_slow_agent_or_learner_is_not_held_against_the_server(start):
    may_answer = threading.Event()

    def agent(env_outputs, state):
        may_answer.wait()
        return answer(env_outputs, state)

    server = start(ServerThread(counting.Counting))
    waits_for_agent, waits_for_learner = (
        start(Rig([server.address], agent, limit=1, step_timeout_s=3)) for agent in (agent, answer)
    )
    wait_until(lambda: waits_for_learner.pool.count() == 2 * T)
    time.sleep(3.5)  # longer than a server may take
    may_answer.set()
    for rig in (waits_for_agent, waits_for_learner):
        check_chain(rig.columns(4), STATE)


def test_an_environment_that_raises_ends_the_run_or_is_made_anew(start):
    server = start(ServerThread(counting.Raising))
    rig = start(Rig([server.address]))
    with pytest.raises(ConnectionError, match="the ball is lost") as caught:
        while True:
            rig.take()
    rig = start(Rig([server.address], reconnect=True))
    chains = {}
    wait_until(lambda: chains.update(by_environment(rig.columns(2))) or len(chains) >= 3)
    (event, *_) = rig.wait_for_event("the ball is lost")
    for text in (str(caught.value), event):
        assert "Traceback" in text and server.address in text
    assert rig.pool.num_reconnects() >= 2


@pytest.mark.whole
def test_a_killed_and_restarted_server_costs_only_its_rollout(start, tmp_path):
    servers = [start(ServerProcess(a)) for a in ("127.0.0.1:0", f"unix:{tmp_path}/socket")]
    addresses = [server.address for server in servers]
    rig = start(Rig(addresses, limit=4, reconnect=True))
    columns = []

    def collect_from(*servers):
        """Take rollouts until there are three new ones of all these servers."""
        first = len(columns)

        def has_come():
            columns.extend(rig.columns(1))
            pids = [int(column[0]["frame"][0, 0]) // 1000 for column in columns[first:]]
            return all(pids.count(server.process.pid) > 2 for server in servers)

        wait_until(has_come)

    collect_from(*servers)
    assert rig.pool.num_connected() == 2 and rig.pool.num_reconnects() == 0
    for i, address in enumerate(addresses):
        servers[i].kill()
        other = servers[1 - i]
        wait_until(lambda other=other: collect_from(other) or rig.pool.num_connected() == 1)
        rig.wait_for_event(re.escape(address))
        collect_from(other)
        servers[i] = start(ServerProcess(address))
        collect_from(*servers)
        assert rig.pool.num_connected() == 2 and rig.pool.num_reconnects() == i + 1
        rig.wait_for_event(f"{re.escape(address)} is back")
    chains = by_environment(columns).values()
    assert len(chains) == 4
    for chain in chains:  # each from its very first row on, with the first state
        check_chain(chain, STATE)


@pytest.mark.parametrize("closed", ["queue", "batcher"])
def test_a_server_that_ends_after_the_run_is_no_error(start, closed):
    stepping, may_end = threading.Event(), threading.Event()

    def speak(requests, context):
        yield make_first()
        next(requests)
        stepping.set()
        may_end.wait(DEADLINE)

    rig = start(Rig([start(FakeServer(speak)).address], act_zero, ()))
    assert stepping.wait(DEADLINE)
    getattr(rig, closed).close()
    may_end.set()
    rig.running.result()


IN_A_TUPLE = rpcenv_pb2.Nest(items=[from_nest(np.zeros((2, 3), np.uint8))])


@pytest.mark.parametrize(
    ("odd", "message"),
    [  # agreement_test.cc has all that servers must agree in
        (obey(2, env="Asterix"), "plays Asterix, expected Pong"),
        (obey(2, env="a" + 200 * "é"), "plays aé.*�?\\.\\.\\., expected Pong"),  # cut within one
        (obey(3), "3.*2"),
        (obey(2, observation=IN_A_TUPLE), r"\(\(uint8.*\(uint8"),  # the same arrays, in a tuple
    ],
)
@pytest.mark.parametrize("reconnect", [False, True])
def test_a_server_that_disagrees_is_refused_by_name(start, odd, message, reconnect):
    late = threading.Event()

    def speak(requests, context):
        late.wait(DEADLINE)
        yield from odd(requests, context)

    good, refused = start(FakeServer(obey(2))), start(FakeServer(speak))
    options = {"columns": 2, "num_envs": 2, "env": "Pong", "reconnect": reconnect}
    rig = start(Rig([good.address, refused.address], act_zero, (), **options))
    rig.take()
    late.set()
    if reconnect:
        (text, *_) = rig.wait_for_event(message)
        for _ in range(3):
            rig.take()
        assert rig.pool.num_connected() == 1
    else:
        with pytest.raises(ConnectionError, match=message) as caught:
            while True:
                rig.take()
        text = str(caught.value)
    assert refused.address in text and good.address not in text


def obey_all(**fields):
    """Return what to `speak` for a server all of whose rows are these."""

    def speak(requests, context):
        yield make_first(**fields)
        for _ in requests:
            yield make_step(**fields)

    return speak


# csrc/tests/wire_test.cc and rollout_test.cc have all that can be wrong with a row.
@pytest.mark.parametrize(
    "messages",
    [
        (make_first(), make_step(observation=from_nest(np.zeros((2, 4), np.uint8)))),
        (make_first(), b"\xff" * 20),
        (make_step(),),
        (make_first(0),),
        (),
    ],
    ids=["another shape", "no protobuf", "no handshake", "no environments", "nothing"],
)
def test_a_malformed_message_is_a_clear_connection_error(start, messages):
    server = start(FakeServer(say(*messages)))
    with pytest.raises(ConnectionError, match=re.escape(server.address)) as caught:
        start(Rig([server.address], act_zero, ())).running.result()
    assert len(str(caught.value)) > len(server.address) + 20  # it says what


RANGES = {"frame": np.array([[0] * 3, [4] * 3]), "last_action": np.empty(0, np.int64)}


def frame(*numbers):
    return from_nest(np.full((2, 3), numbers))


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ({"observation": frame(*[0.5] * 3)}, "frame .*float64.2, 3."),
        ({"observation": frame(0, 5, 0)}, "the number 5, .* 0 to 4"),
        ({"last_action": np.array([0, 99]).tobytes()}, "last_action"),
        ({"game_return": np.array([0, np.nan], "f").tobytes()}, "game_return has"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_lying_server_costs_its_stream_alone_and_is_named(start, lie, message, first):
    truth = {"observation": frame(0, 4, 0)}
    opening = make_first(**(truth | lie if first else truth))
    liar = start(FakeServer(say(opening, make_step(**(truth | lie)))))
    good = start(FakeServer(obey_all(**truth)))
    options = {"dict_outputs": True, "reconnect": True, "ranges": RANGES, "columns": 2}
    rig = start(Rig([liar.address, good.address], act_zero, (), **options))
    (event, *_) = rig.wait_for_event(f"{liar.address} sent a malformed message: .*{message}")
    assert good.address not in event
    assert rig.take()[0][0]["frame"].shape == (T + 1, 2, 3)
    check = lambda handshake: dict(RANGES)  # noqa: E731
    assert query_server(good.address, check=check)["num_envs"] == 2
    if first:
        message = f"{liar.address} sent an invalid .*{message}"
        with pytest.raises(ConnectionRefusedError, match=message):
            query_server(liar.address, check=check)


EVIL = "\x1b[2J\x9b1A\r\u2028\u202e\n[INFO] Saved é"
ESCAPED = r"\x1b[2J\x9b1A\r\u2028\u202e" + "\n  | [INFO] Saved é"


@pytest.mark.parametrize(
    ("text", "shown"),
    [(EVIL, re.escape(ESCAPED)), (100_000 * "x" + "end", r"\.\.\.x{19900,20100}end")],
    ids=["forges a line", "long"],
)
def test_a_servers_text_is_escaped_and_shortened(start, text, shown):
    server = start(FakeServer(say(make_first(), rpcenv_pb2.Step(error=text))))
    with pytest.raises(ConnectionError, match=f"says: {shown}$"):
        start(Rig([server.address], act_zero, ())).running.result()


@pytest.mark.parametrize("seconds", [1e10, float("inf")])
def test_a_time_limit_may_be_as_long_as_one_likes(start, seconds):
    address = start(FakeServer(hang_after_the_first_row)).address
    assert query_server(address, 1, seconds)["num_envs"] == 1
    limits = {"step_timeout_s": seconds, "connect_timeout_s": seconds}
    rig = start(Rig([address], act_zero, (), **limits))
    wait_until(lambda: rig.pool.num_connected() == 1)
    rig.running.assert_blocked(0.6)  # in which it looks at its streams


def test_rollouts_that_do_not_fit_into_memory_cost_their_stream(start):
    server = start(FakeServer(obey(2)))
    options = {"unroll_length": 10**12, "num_envs": 2, "reconnect": True}
    rig = start(Rig([server.address], act_zero, (), **options))
    (event, *_) = rig.wait_for_event("does not fit into memory; trying again")
    assert server.address in event


STOPPED = """
import sys
from rig import Rig, act_zero

rig = Rig(sys.argv[1:], act_zero, (), step_timeout_s=8)
rig.take()
print("a rollout", flush=True)
rig.close()  # else threads of the core may run when the interpreter ends, which aborts
"""


@pytest.mark.whole
def test_a_learner_that_was_stopped_finds_its_streams_again(start, tmp_path, monkeypatch):
    """For longer than an answer may take, and than servers wait for a learner on TCP."""
    keepalive = dict(server_module._KEEPALIVE)
    whole = keepalive["grpc.keepalive_time_ms"] + keepalive["grpc.keepalive_timeout_ms"]
    assert whole == keepalive["grpc.http2.ping_timeout_ms"] == 20_000
    keepalive |= {"grpc.keepalive_time_ms": 1000}
    keepalive |= {"grpc.keepalive_timeout_ms": 1000, "grpc.http2.ping_timeout_ms": 2000}
    monkeypatch.setattr(server_module, "_KEEPALIVE", tuple(keepalive.items()))
    is_stepping, go_on = threading.Event(), threading.Event()

    class Gate(counting.Counting):
        def step(self, action):
            is_stepping.set()
            assert go_on.wait(DEADLINE)
            return super().step(action)

    server = start(ServerThread(Gate, f"unix:{tmp_path}/socket"))
    command, path = [sys.executable, "-c", STOPPED, server.address], {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=HELPERS, env=os.environ | path
    ) as learner:
        try:
            assert is_stepping.wait(DEADLINE)
            learner.send_signal(signal.SIGSTOP)
            time.sleep(11)  # the pool takes 10 seconds without a look at its streams for a stop
            learner.send_signal(signal.SIGCONT)
            time.sleep(1)  # in which it looks at its streams
            go_on.set()
            assert learner.communicate(timeout=DEADLINE)[0] == "a rollout\n"
        finally:
            go_on.set()
            learner.kill()


CLOSING = """
    import torch
    from counting import FakeServer, free_address, hang_after_the_first_row, obey, wait_for_end
    from deadline import Thread, wait_until
    from libtorchbeast import ActorPool, BatchingQueue, DynamicBatcher

    def answer(batcher):
        for batch in batcher:
            batch.set_outputs(((torch.zeros(1, 1, dtype=torch.int64),), ()))

    def check(state, speak, close, is_there, inference=True, reconnect=False):
        server = FakeServer(speak) if speak else None
        address = server.address if server else free_address()
        queue = BatchingQueue(maximum_batch_size=1, maximum_queue_size=1)
        batcher = DynamicBatcher(maximum_batch_size=1)
        pool = ActorPool(2, queue, batcher, [address], (), reconnect=reconnect,
                         connect_timeout_s=0.1 if reconnect else 60)
        running = Thread(pool.run)
        if inference:
            answering = Thread(answer, batcher)
        wait_until(lambda: is_there(pool, queue, batcher))
        running.assert_blocked(0.05)
        for closable in close:
            {"queue": queue, "batcher": batcher}[closable].close()
        assert running.result() is None, state
        if "batcher" not in close:
            batcher.close()
        if inference:
            answering.result()
        if server is not None:
            server.stop()

    def check_all(close):
        check("connecting", None, close, lambda pool, queue, batcher: True)
        check("between two attempts", None, close, reconnect=True,
              is_there=lambda pool, queue, batcher: "again" in pool.next_event())
        check("waiting for the first row", lambda requests, context: wait_for_end(context), close,
              lambda pool, queue, batcher: True)
        check("waiting for a row", hang_after_the_first_row, close,
              lambda pool, queue, batcher: pool.num_connected() == 1 and batcher.size() == 0)
        check("in compute", obey(1), close, inference=False,
              is_there=lambda pool, queue, batcher: batcher.size() == 1)
        check("in enqueue", obey(1), close,
              lambda pool, queue, batcher: pool.count() == 4 and queue.size() == 1)

    orders = [["queue", "batcher"], ["batcher", "queue"], ["queue"], ["batcher"]]
    for thread in [Thread(check_all, close) for close in orders]:
        thread.result()
"""


@pytest.mark.whole
def test_run_comes_back_after_close_from_every_state():
    run_with_deadline(CLOSING)


def test_a_program_ends_though_the_pool_still_runs():
    run_with_deadline("""
        from counting import ServerProcess, free_address
        from deadline import Thread, wait_until
        from libtorchbeast import ActorPool, BatchingQueue, DynamicBatcher

        server = ServerProcess()
        queue, batcher = BatchingQueue(), DynamicBatcher()
        pool = ActorPool(2, queue, batcher, [server.address, free_address()], ())
        running = Thread(pool.run)
        watching = Thread(pool.next_event)
        wait_until(lambda: batcher.size() == 1)
    """)


def test_steps_are_counted_and_what_actors_wait_for_is_measured(start):
    server = start(FakeServer(obey(2)))
    rig = start(Rig([server.address], act_zero, columns=2, limit=2))
    rig.columns(6)
    wait_until(lambda: rig.queue.size() == 2 and rig.pool.silences()[0][2] == "learner")
    assert rig.pool.count() == (3 + 2) * 2 * T  # one rollout waits, one is kept waiting
    waits = rig.pool.waits()
    assert waits.keys() == {"inference", "environments", "learner"}
    assert all(seconds > 0 for seconds in waits.values())
    wait_until(lambda: rig.pool.waits()["learner"] > waits["learner"])  # which goes on
    assert rig.pool.waits()["inference"] == waits["inference"]
