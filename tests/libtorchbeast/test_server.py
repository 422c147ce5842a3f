# SPDX-License-Identifier: Apache-2.0
"""What libtorchbeast.Server promises, asked by a client in Python."""

import contextlib
import queue
import re
import sys
import threading
import types

import grpc
import gymnasium as gym
import numpy as np
import pytest
from catch_env import Catch, Counter, Echo
from deadline import DEADLINE, Thread, run_with_deadline, wait_until
from old_env import Counted, Old
from stream import (
    EnvironmentFailed,
    Stream,
    array,
    as_lists,
    from_nest,
    leaf,
    make_many,
    refusal,
    serving,
)

import atari_wrappers
import libtorchbeast
from beast.envs.environments import Environments
from beast.nest import map_nest
from libtorchbeast import ActorPool, BatchingQueue, DynamicBatcher, Server, server, wire
from libtorchbeast import rpcenv_pb2 as pb
from libtorchbeast.rows import Rows

ANY_PORT = "127.0.0.1:0"


def play(stream, num_steps, actions=lambda t, num_envs: np.full(num_envs, t % 3)):
    """Return the first row and those after `num_steps` steps."""
    num_envs = stream.handshake.num_envs
    return [stream.row] + [stream.step(actions(t, num_envs)) for t in range(num_steps)]


def columns(rows):
    """Return what environment 0 has under each key: one entry for each row."""
    return {key: [row[key][0].tolist() for row in rows] for key in rows[0]}


def test_old_api_without_spaces_and_with_reset_without_arguments():
    with serving(Old) as address, Stream(address) as stream:
        assert stream.handshake.num_envs == 1
        assert stream.handshake.spaces == stream.handshake.env == ""
        assert stream.handshake.protocol_version == wire.PROTOCOL_VERSION
        column = columns(play(stream, 7))
    assert column["frame"] == [[0], [1], [2], [0], [1], [2], [0], [1]]
    assert column["reward"] == [0, 0.5, 1, 1.5, 0.5, 1, 1.5, 0.5]
    assert column["done"] == [True, False, False, True, False, False, True, False]
    assert column["game_done"] == column["done"]
    assert column["episode_return"] == [0, 0.5, 1.5, 3, 0.5, 1.5, 3, 0.5]
    assert column["episode_step"] == [0, 1, 2, 3, 1, 2, 3, 1]
    assert column["last_action"] == [0, 0, 1, 2, 0, 1, 2, 0]
    assert not any(column["truncated"] + column["terminated"])


class Lives(Counter):
    """Every third episode ends the game, every other one is cut."""

    def step(self, action):
        observation, reward, terminated, _, info = super().step(action)
        cut = terminated and self.episode % 2 == 0
        info["game_over"] = self.episode % 3 == 2
        return observation, reward, terminated and not cut, cut, info


class Limited(Old):
    """Cut by a time limit, in the old API."""

    def step(self, action):
        observation, reward, done, _ = super().step(action)
        return observation, reward, done, {"TimeLimit.truncated": done}


@pytest.mark.parametrize(
    "create_env",
    [Catch, lambda: Echo(length=3), lambda: Echo(length=3, truncates=True), lambda: Lives(3)],
    ids=["Catch", "terminated", "truncated", "lives"],
)
def test_rows_of_either_style_are_those_of_environments(create_env):
    direct = Environments(create_env, 3, [1, 2])
    expected = [as_lists(direct.initial())]
    expected += [as_lists(direct.step(np.full(3, t % 3))) for t in range(60)]
    for kwargs in ({"make_environments": make_many(create_env)}, {}):
        with serving(create_env, **kwargs) as address:
            with Stream(address, num_envs=3, seed="1,2") as stream:
                assert as_lists(play(stream, 60)) == expected


@pytest.mark.parametrize(
    ("truncated_rows", "truncated", "done", "frame"),
    [(1, [0, 0, 1, 0, 0], [1, 0, 0, 1, 0], [0, 1, 2, 0, 1]),
     (0, [0, 0, 0, 0, 0], [1, 0, 1, 0, 1], [0, 1, 0, 1, 0])],
)  # fmt: skip
def test_a_time_limit_is_an_end_for_learners_without_its_row(
    truncated_rows, truncated, done, frame
):
    with serving(lambda: Limited(2)) as address:
        with Stream(address, truncated_rows=truncated_rows) as stream:
            column = columns(play(stream, 4))
    assert (column["truncated"], column["done"]) == (truncated, done)
    assert column["frame"] == [[t] for t in frame]
    assert truncated_rows or column["reward"] == [0, 0.5, 1, 0.5, 1]


def test_actions_are_arrays_without_an_environment_dimension():
    envs = []

    def create_env():
        envs.append(Old())
        return envs[-1]

    actions = {
        "move": np.array([3, 4, 5], np.int16),
        "look": (np.arange(6, dtype=np.float32).reshape(3, 2), np.array([True, False, True])),
    }
    with serving(create_env) as address, Stream(address, num_envs=3) as stream:
        row = stream.step(actions)
        assert row["last_action"].tolist() == [0, 0, 0]  # not one integer
        row = stream.step(np.array([7, 8, 9], np.uint8))
        assert row["last_action"].tolist() == [7, 8, 9]
        stream.step(np.array([0.5, 1.5, 2.5]))
        stream.step(np.zeros((3, 0)))
    for i, env in enumerate(envs):
        nest, *arrays = env.actions
        assert as_lists(nest) == as_lists(map_nest(lambda x, i=i: x[i], actions))
        assert as_lists(arrays) == as_lists([np.uint8(7 + i), np.float64(0.5 + i), np.zeros(0)])
        nest["look"][0][:] = -1  # it may be changed, and belongs to no other environment


def test_observations_are_nests_of_arrays_of_every_dtype():
    dtypes = "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64"

    def observe(t):
        return {
            "dtypes": tuple(((np.arange(6) + t) % 5).astype(name) for name in dtypes.split()),
            "list": [t, 0.5 + t, True, np.float32(t), np.array(t, np.uint8)],
            "strided": (np.arange(12) + t).reshape(3, 4)[:, ::2].T,
            "big-endian": np.array([1, t], ">i4"),
            "empty": np.zeros((0, 5), np.int8),
            "ключ" * 20: (),
        }

    with serving(lambda: Old(2, observe)) as address:
        with Stream(address, num_envs=2) as stream:
            frames = [row["frame"] for row in play(stream, 3)]
    for t, frame in zip([0, 1, 0, 1], frames, strict=True):
        wanted = observe(t)
        wanted["list"] = tuple(wanted["list"])
        wanted["big-endian"] = wanted["big-endian"].astype(np.int32)
        assert list(frame) == list(wanted)
        assert as_lists(frame) == as_lists(map_nest(lambda x: np.stack([x, x]), wanted))


def test_actions_like_the_last_one_are_decoded_as_all_others_are():
    decode = wire.ActionDecoder(2, None).decode

    def message(nest):
        return pb.Action(action=from_nest(nest)).SerializeToString()

    for i in range(3):
        for action in (np.full(2, i), np.full((2, 3), i + 0.5), (np.full(2, i), {"a": np.ones(2)})):
            for _ in range(2):  # the second time, it is like the last one
                assert as_lists(decode(message(action))) == as_lists(action)
    assert decode(message(np.arange(2))).flags.writeable
    for wrong in (message(np.arange(3)), message(np.arange(2))[:-1], message(np.arange(2)) + b"x"):
        with pytest.raises(ValueError):
            decode(wrong)
    bools = message(np.ones(2, bool))
    assert decode(bools).tolist() == [True, True]
    with pytest.raises(ValueError):
        decode(bools[:-1] + b"\2")


def test_seeds_are_given_where_they_are_accepted():
    seeds = queue.SimpleQueue()

    class Seeded(Old):
        def reset(self, seed="none"):
            seeds.put(seed)
            return super().reset()

    class Wrapper:  # of the old kind
        def __init__(self, env):
            self.env, self.step = env, env.step

        def reset(self, **kwargs):
            return self.env.reset(**kwargs)

    def seeds_of(create_env, **options):
        with serving(create_env) as address, Stream(address, **options):
            return [seeds.get() for _ in range(seeds.qsize())]

    first = seeds_of(Seeded, num_envs=2, seed=5)
    assert len(set(first)) == 2 and all(isinstance(seed, int) for seed in first)
    assert seeds_of(lambda: Wrapper(Seeded()), num_envs=2, seed=5) == first
    for other in ("5,1", 2**128 - 1):
        assert seeds_of(Seeded, num_envs=2, seed=other) != first
    assert seeds_of(Seeded) == ["none"]
    assert seeds_of(lambda: Wrapper(Old()), seed=5) == []


def test_a_refused_server_logs_why(caplog):
    message = "plays Catch, expected Pong"
    with serving(None, make_environments=make_many(Catch), env="Catch") as address:
        pool = ActorPool(1, BatchingQueue(), DynamicBatcher(), [address], (), env="Pong")
        with pytest.raises(ConnectionRefusedError, match=message):
            pool.run()
        assert re.search(f"for ipv4.*: the learner refused .*{message}", caplog.text)


def stacked_pong():
    # Cut after 40 steps, so that episodes end.
    env = atari_wrappers.make_atari("PongNoFrameskip-v4", max_episode_frames=160)
    return atari_wrappers.wrap_pytorch(atari_wrappers.wrap_deepmind(env))


def stacked_catch():
    return gym.wrappers.FrameStackObservation(Catch(), 3)


class Repainted(gym.ObservationWrapper):
    """Stacked Catch in floats, an old frame of which changes now and then."""

    def __init__(self):
        super().__init__(stacked_catch())
        space = self.env.observation_space
        self.observation_space = gym.spaces.Box(0, 2, space.shape, np.float64)

    def observation(self, observation):
        stack = observation.astype(np.float64)
        if self.np_random.random() < 0.2:
            stack[self.np_random.integers(2), -1, -1] += 0.5
        return stack


@pytest.mark.whole
@pytest.mark.parametrize(
    ("create_env", "stack_size"), [(stacked_pong, 4), (stacked_catch, 3), (Repainted, 3)]
)
def test_newest_frames_make_the_same_stacks_to_the_last_bit(create_env, stack_size):
    actions = np.random.default_rng(0).integers(3, size=(100, 3))
    with serving(None, make_environments=make_many(create_env)) as address:
        with Stream(address, num_envs=3, seed=1) as stream:
            assert stream.handshake.stack_size == 0
            expected = play(stream, len(actions), lambda t, _: actions[t])
        with Stream(address, num_envs=3, seed=1, newest_frame_only=1) as stream:
            assert stream.handshake.stack_size == stack_size
            rows, num_full = [stream.row], 0
            for action in actions:
                rows.append(stream.step(action))
                num_full += stream.num_full
    np.testing.assert_equal(rows, expected)
    assert rows[-1]["frame"].dtype == expected[-1]["frame"].dtype
    ends = sum(int(row["done"].sum()) for row in rows[1:])
    assert ends >= 3
    # Whole stacks come only where an episode begins, or an old frame has changed.
    assert num_full > ends if create_env is Repainted else num_full <= ends


class Wrong(Old):
    def __init__(self, reward=0.0, done=False):
        super().__init__()
        self.wrong = reward, done

    def step(self, action):
        observation, *_, info = super().step(action)
        return observation, *self.wrong, info


def fail(message):
    raise ValueError(message)


def observing(observe, from_t=0):
    """Return what makes an environment whose observations are others from row `from_t` on."""
    return lambda: Old(observation=lambda t: observe() if t >= from_t else np.zeros(1, np.int32))


def test_bad_actions_and_refusals_do_not_fill_the_log(caplog):
    evil = "\x1b[2J\n[INFO] Saved"
    refused = pb.Action(refusal=evil).SerializeToString()
    with serving(None, make_environments=make_many(Catch)) as address:
        for _ in range(20):
            with Stream(address) as stream, pytest.raises(EnvironmentFailed, match="action is 99"):
                stream.step(np.array([99]))
            with Stream(address) as stream, pytest.raises(StopIteration):
                stream.send(refused)
    failed, refusal = caplog.messages
    assert "action is 99" in failed and refusal.endswith(r": \x1b[2J" + "\n  | [INFO] Saved")


BROKEN = {
    "create": (lambda: fail("broken in create"), "broken in create"),
    "create and exit": (lambda: sys.exit("no licence"), "no licence"),
    "reset": (observing(lambda: fail("broken in reset")), "broken in reset"),
    "step": (observing(lambda: fail("broken in step \udcff"), 2), "broken in step"),
    "exit": (observing(lambda: sys.exit("broken in exit"), 1), "broken in exit"),
    "nan": (lambda: Wrong(np.nan), "(?s)must be finite.*in environment 0, step 1"),
    "end": (lambda: Wrong(done=None), "(?s)terminated is None; it .*in environment 0, step 1"),
    "ends": (lambda: Wrong(done=np.zeros(2, bool)), r"terminated is array\(\[False, False"),
    "shape": (observing(lambda: np.zeros(5, np.int32), 2), r"int32\[5\], but should be int32\[1\]"),
    "dtype": (observing(lambda: np.zeros(1, np.int64), 2), "int64.1., but should be"),
    "key": (observing(lambda: {1: np.zeros(1)}), "an observation has the key 1; it should be a st"),
    "text": (observing(lambda: np.array(["text"])), "(?i)error"),
    "object": (observing(lambda: np.array([None])), "(?i)error"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_environment_is_reported_and_the_server_goes_on(what, caplog):
    create_env, message = BROKEN[what]
    games = [create_env, Old]
    with serving(lambda: games.pop(0)()) as address:
        with pytest.raises(EnvironmentFailed, match=message) as error:
            with Stream(address) as stream:
                play(stream, 3)
        assert "Traceback (most recent call last)" in str(error.value)
        assert "failed" in caplog.text and "Traceback" in caplog.text
        with Stream(address) as stream:
            play(stream, 5)


def test_row_that_is_too_large_for_a_message_is_an_error(monkeypatch):
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 1000)
    with serving(lambda: Old(3, lambda _: np.zeros(100))) as address:
        with Stream(address, num_envs=1):
            pass
        with pytest.raises(EnvironmentFailed, match="at most 1000: take fewer environments"):
            Stream(address, num_envs=2)
    environments = types.SimpleNamespace(num_envs=1, spaces="", stack_size=4)
    row = Rows(1).row | {"frame": np.zeros((1, 4, 20, 20), np.uint8)}  # newest frames of 400 bytes
    with pytest.raises(ValueError, match="1 environments are 20.. bytes, but .* at most 1000"):
        wire.RowEncoder(environments, True).encode_first(row, "")


def nested(depth):
    """Return an Action of a leaf in so many tuples, as bytes."""
    message = leaf().SerializeToString()
    for number in (*[2] * depth, 1):  # items of a Nest; the action of an Action
        message = wire._head(number, len(message)) + message
    return message


WIDE = pb.Nest(items=[pb.Nest()] * 1001)
FLOATS, INTEGERS = np.zeros((2, 3), np.float32), np.zeros((2, 2), np.int64)
BAD_ACTIONS = {
    "nothing": (b"", "no action"),
    "garbage": (b"\x0a\xff\xff\xff", "not an Action"),
    "unknown dtype": (leaf(dtype=99), "unknown dtype 99"),
    "negative dtype": (leaf(dtype=-1), "unknown dtype -1"),
    "other N": (leaf(shape=(3,), data=bytes(24)), "shape .3., but there are 2 environments"),
    "no N": (leaf(shape=()), "shape .., but there are 2 environments"),
    "too short": (leaf(data=bytes(15)), "15 bytes of data, but is int64.2."),
    "too long": (leaf(data=bytes(17)), "17 bytes of data"),
    "negative size": (leaf(shape=(2, -1, -1)), "shape .2, -1, -1."),
    "huge": (leaf(shape=(2, 2**62, 2**62)), "16 bytes of data"),
    "many dimensions": (leaf(shape=(2,) + (1,) * 40), "shape"),
    "not bools": (leaf(dtype=0, data=b"\1\2"), "other than 0 and 1"),
    "too deep": (nested(50), "more than 32 levels"),
    "far too deep": (nested(2000), "not an Action"),
    "wide": (WIDE, "more than 1000 items"),
    "wide below": (pb.Nest(items=[WIDE]), "more than 1000 items"),
    "both": (pb.Nest(array=array(), items=[leaf()]), "items as well"),
    "keys only": (pb.Nest(keys=["a"]), "0 items for the keys"),
    "key twice": (pb.Nest(keys=["a", "a"], items=[leaf(), leaf()]), "2 items for the keys"),
    "integers for a box": (from_nest(INTEGERS), "should be floats.2, 3., but is int64", FLOATS),
    "one of two parts": (leaf(), "should be integers.2, 2., but is int64.2.", INTEGERS),
    "a nest for a box": (pb.Nest(items=[from_nest(FLOATS)]), "should be one array", FLOATS),
}


@pytest.mark.parametrize("name", BAD_ACTIONS)
def test_malformed_actions_are_refused(name):
    action, message, *likeness = BAD_ACTIONS[name]
    if not isinstance(action, bytes):
        action = pb.Action(action=action).SerializeToString()
    with pytest.raises(ValueError, match=message):
        wire.decode_actions(action, 2, *likeness or [None])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_envs": 0}, "num-envs is 0"), ({"num_envs": 4097}, "from 1 to 4096"),
     ({"num_envs": "many"}, "num-envs is 'many'"), ({"num_envs": "9" * 5000}, "num-envs"),
     ({"seed": "1,x"}, "seed is '1,x'"), ({"seed": ""}, "seed"), ({"seed": "-1"}, "seed"),
     ({"newest_frame_only": "yes"}, "newest-frame-only")],
)  # fmt: skip
def test_stream_options_that_make_no_sense_are_refused(options, message):
    with serving(Old) as address:
        code, details = refusal(address, **options)
    assert code == grpc.StatusCode.INVALID_ARGUMENT and message in details


@pytest.mark.parametrize(
    ("asked", "message"),
    [([{}] * server.MAX_STREAMS, f"serves {server.MAX_STREAMS} streams already"),
     ([{"num_envs": 2}] * 9 + [{}, {"num_envs": 1}], "has 20 environments, and with 1 more")],
)  # fmt: skip
def test_a_full_server_takes_a_stream_when_another_has_left(monkeypatch, asked, message):
    monkeypatch.setattr(server, "MAX_ENVS", 20)
    with serving(Counted) as address, contextlib.ExitStack() as stack:
        streams = [stack.enter_context(Stream(address, **options)) for options in asked]
        num_envs = len(Counted.alive)
        code, details = refusal(address, num_envs=1)
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and f"{address} {message}" in details
        play(streams[0], 1)
        frames = [play(stream, 1)[-1]["frame"][-1].item() for stream in streams]
        assert frames == [2] + [1] * (len(streams) - 1)
        streams[3].close()
        Counted.wait_for(num_envs - streams[3].handshake.num_envs)
        with Stream(address, num_envs=1) as stream:
            play(stream, 1)
    Counted.wait_for(0)


ENDS = {
    "half-close": lambda stream, server: stream.send_end(),
    "cancel": lambda stream, server: stream.call.cancel(),
    "close": lambda stream, server: stream.close(),
    "bad action": lambda stream, server: pytest.raises(grpc.RpcError, stream.send, b""),
    "stop": lambda stream, server: server.close(),
}


@pytest.mark.parametrize("how", ENDS)
def test_environments_are_closed_however_the_stream_ends(how):
    with contextlib.ExitStack() as stack:
        stream = Stream(stack.enter_context(serving(Counted)))
        stream.step(np.zeros(1))
        assert len(Counted.alive) == 1
        ENDS[how](stream, stack)
        Counted.wait_for(0)
        stream.close()


def test_an_environment_that_hangs_blocks_no_stream_and_no_stop(monkeypatch):
    monkeypatch.setattr(server, "GRACE", 0.1)
    stepping, go_on = threading.Event(), threading.Event()

    class Hanging(Counted):
        def step(self, action):
            if action == 1:
                stepping.set()
                assert go_on.wait(DEADLINE)
            return super().step(action)

    with serving(Hanging) as address:
        streams = [Stream(address), Stream(address)]
        threads = []
        for stream in streams:
            stepping.clear()
            threads.append(Thread(pytest.raises, grpc.RpcError, stream.step, np.ones(1)))
            assert stepping.wait(DEADLINE)
        streams[0].call.cancel()
        threads[0].result()
        with Stream(address) as stream:
            play(stream, 3, lambda *_: np.zeros(1))
            assert len(Counted.alive) == 3
    threads[1].result()
    go_on.set()
    Counted.wait_for(0)
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("at", [0, 3, None])
def test_a_stream_is_busy_only_while_its_environments_are(at):
    busy_since, seen = [0.0] * libtorchbeast.MAX_STREAMS, []

    def observe(t):
        seen.append(sum(map(bool, busy_since)))
        return fail("at last") if t == at else np.zeros(1)

    class Watched(Old):
        def close(self):  # which may hang, too
            observe(-1)

    server = Server(lambda: Watched(9, observe), ANY_PORT, busy_since=busy_since)
    context = types.SimpleNamespace(invocation_metadata=lambda: [], peer=lambda: "a learner")
    action = pb.Action(action=from_nest(np.zeros(1))).SerializeToString()
    for t, step in enumerate(server._run_stream(iter([action] * 4), context)):
        assert not any(busy_since)  # a learner may be slow to read, and to act
        assert bool(pb.Step.FromString(step).error) == (t == at)
    assert seen == [1] * (6 if at is None else at + 2) and not any(busy_since)


def test_a_server_that_cannot_start_a_thread_ends(monkeypatch):
    start = threading.Thread.start

    def start_all_but_streams(self):
        if self.name == "stream":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_all_but_streams)
    with pytest.raises(RuntimeError, match="a thread for a stream: can't start new thread"):
        with serving(Counted) as address:
            with pytest.raises(grpc.RpcError), Stream(address):
                pass


class Sticky(Catch):
    alive = set()

    def __init__(self):
        super().__init__()
        self.alive.add(self)

    def close(self):
        self.alive.remove(self)
        raise ValueError("does not want to")


@pytest.mark.parametrize("make_environments", [make_many(Sticky), None])
def test_all_are_closed_once_though_that_raises_and_is_logged(make_environments, caplog):
    with serving(Sticky, make_environments=make_environments) as address:
        for _ in range(2):
            with Stream(address, num_envs=3):
                assert len(Sticky.alive) == 3
            wait_until(lambda: not Sticky.alive)
    assert "does not want to" in caplog.text and "KeyError" not in caplog.text


def test_a_server_ends_though_signals_interrupt_one_another(tmp_path):
    code = f"""
    import signal
    from libtorchbeast.server import Server

    server = Server(object, "unix:{tmp_path}/server")
    signal.signal(signal.SIGALRM, lambda *_: server.stop())
    server.run(lambda _: signal.setitimer(signal.ITIMER_REAL, 0.1, 0.00002))
    signal.setitimer(signal.ITIMER_REAL, 0)
    """
    run_with_deadline(code)


def test_run_again_and_stop_before_run_are_errors():
    server = Server(Old, ANY_PORT)
    with pytest.raises(RuntimeError, match="not running"):
        server.stop()
    started = queue.SimpleQueue()
    thread = Thread(server.run, started.put)
    address = started.get(timeout=DEADLINE)
    with pytest.raises(RuntimeError, match="run before"):
        server.run()
    with Stream(address) as stream:
        play(stream, 1)
        server.stop()
        thread.result()
        with pytest.raises(grpc.RpcError):
            stream.step(np.zeros(1))
    with pytest.raises(RuntimeError, match="run before"):
        server.run()
    server.stop()


@pytest.mark.parametrize("address", [ANY_PORT, "unix:{}/socket"])
def test_address_in_use_is_refused_and_the_first_server_goes_on(tmp_path, address):
    with serving(Old, address.format(tmp_path)) as address:
        with pytest.raises(RuntimeError, match=f"cannot serve on {address}: "):
            Server(Old, address).run()
        with Stream(address) as stream:
            play(stream, 1)
    assert not list(tmp_path.iterdir())  # nothing is left


@pytest.mark.parametrize(
    ("address", "message"),
    [("nonsense", "host:port or unix:/path"), ("127.0.0.1:65536", "host:port or unix:/path"),
     ("unix:{}/no/socket", "No such file or directory"), ("unix:{}/file", "in use"),
     ("unix:{}/" + 120 * "x", "too long"), ("192.0.2.1:50051", "Cannot assign")],
)  # fmt: skip
def test_bad_address_is_an_error_that_names_it(tmp_path, address, message):
    (tmp_path / "file").write_text("precious")
    address = address.format(tmp_path)
    with pytest.raises(RuntimeError, match=message) as error:
        Server(Old, address, insecure=True).run()
    assert address in str(error.value)
    assert (tmp_path / "file").read_text() == "precious"
