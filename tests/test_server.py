# SPDX-License-Identifier: Apache-2.0
"""What libtorchbeast.Server promises, asked by a client in Python."""

import contextlib
import json
import queue
import re
import socket
import sys
import threading

import grpc
import gymnasium as gym
import numpy as np
import pytest
from catch_env import Catch, Counter, Echo
from counting import Mirror
from stream import DEADLINE, EnvironmentFailed, Stream, from_nest, serving

import atari_wrappers
from beast.environments import Environments, map_nest
from libtorchbeast import (
    ActorPool,
    BatchingQueue,
    DynamicBatcher,
    Server,
    plain_environments,
    rpcenv_pb2,
    server,
    wire,
)

ANY_PORT = "127.0.0.1:0"


class Old:
    """An environment as forks have them: no spaces, a reset without arguments, four values."""

    def __init__(self, length=3, observation=None):
        self.length = length
        self.observation = observation or (lambda t: np.array([t], np.int32))
        self.actions = []

    def reset(self):
        self.t = 0
        return self.observation(0)

    def step(self, action):
        self.actions.append(action)
        self.t += 1
        return self.observation(self.t), 0.5 * self.t, self.t == self.length, {}


def batches(create_env, num_envs=2):
    """Return what Server's make_environments may be."""
    return lambda n, seed, name: Environments(create_env, n or num_envs, seed, name)


def play(stream, num_steps, actions=lambda t, num_envs: np.full(num_envs, t % 3)):
    """Return the first row and those after `num_steps` steps."""
    num_envs = stream.handshake.num_envs
    return [stream.row] + [stream.step(actions(t, num_envs)) for t in range(num_steps)]


def assert_rows_equal(rows, others):
    for t, (row, other) in enumerate(zip(rows, others, strict=True)):
        assert row.keys() == other.keys()
        for key in row:

            def assert_equal(a, b, key=key, t=t):
                assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), (
                    f"{key} in row {t}: {a} is not {b}"
                )

            map_nest(assert_equal, row[key], other[key])


def refusal(address, **options):
    """Return status code and text with which a server refuses a stream."""
    with pytest.raises(grpc.RpcError) as error:
        Stream(address, **options)
    return error.value.code(), error.value.details()


# ------------------------------------------------------------------------------------------- rows


def test_old_api_without_spaces_and_with_reset_without_arguments():
    with serving(Old, ANY_PORT) as address, Stream(address) as stream:
        assert stream.handshake.num_envs == 1
        assert stream.handshake.spaces == ""
        assert stream.handshake.protocol_version == server.PROTOCOL_VERSION
        rows = play(stream, 7)
    column = {key: [row[key][0].tolist() for row in rows] for key in rows[0]}
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
    expected = [map_nest(np.copy, direct.initial())]
    expected += [map_nest(np.copy, direct.step(np.full(3, t % 3))) for t in range(60)]
    for kwargs in ({"make_environments": batches(create_env)}, {}):
        with serving(create_env, ANY_PORT, **kwargs) as address:
            with Stream(address, num_envs=3, seed="1,2") as stream:
                assert_rows_equal(play(stream, 60), expected)


@pytest.mark.parametrize("truncated_rows", [0, 1])
def test_time_limit_is_an_end_for_learners_that_do_not_know_of_the_extra_row(truncated_rows):
    with serving(lambda: Limited(2), ANY_PORT) as address:
        with Stream(address, truncated_rows=truncated_rows) as stream:
            rows = play(stream, 4)
    column = {key: [row[key][0].tolist() for row in rows] for key in rows[0]}
    if truncated_rows:
        assert column["truncated"] == [False, False, True, False, False]
        assert column["done"] == [True, False, False, True, False]
        assert column["frame"] == [[0], [1], [2], [0], [1]]
    else:
        assert not any(column["truncated"])
        assert column["done"] == [True, False, True, False, True]
        assert column["reward"] == [0, 0.5, 1, 0.5, 1]
        assert column["frame"] == [[0], [1], [0], [1], [0]]


def test_actions_are_arrays_without_the_dimension_of_environments():
    envs = []

    def create_env():
        envs.append(Old())
        return envs[-1]

    actions = {
        "move": np.array([3, 4, 5], np.int16),
        "look": (np.arange(6, dtype=np.float32).reshape(3, 2), np.array([True, False, True])),
    }
    with serving(create_env, ANY_PORT) as address, Stream(address, num_envs=3) as stream:
        row = stream.step(actions)
        assert row["last_action"].tolist() == [0, 0, 0]  # not one integer
        row = stream.step(np.array([7, 8, 9], np.uint8))
        assert row["last_action"].tolist() == [7, 8, 9]
        stream.step(np.array([0.5, 1.5, 2.5]))
        stream.step(np.zeros((3, 0)))
    for i, env in enumerate(envs):
        move, (look, flag) = env.actions[0]["move"], env.actions[0]["look"]
        assert (move.dtype, move.shape, int(move)) == (np.int16, (), 3 + i)
        assert (look.dtype, look.tolist()) == (np.float32, [2 * i, 2 * i + 1])
        assert (flag.dtype, flag.shape, bool(flag)) == (bool, (), i != 1)
        assert (env.actions[1].dtype, env.actions[1].shape) == (np.uint8, ())
        assert (env.actions[2].dtype, env.actions[2].item()) == (np.float64, 0.5 + i)
        assert env.actions[3].shape == (0,)
        look[:] = 0  # it may be changed, and belongs to no other environment
    assert envs[1].actions[0]["look"][0].tolist() == [0, 0]


def test_observations_are_nests_of_arrays_of_every_dtype():
    dtypes = "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64"

    def observe(t):
        return {
            "dtypes": tuple(((np.arange(6) + t) % 5).astype(name) for name in dtypes.split()),
            "list": [t, 0.5 + t, True, np.float32(t), np.array(t, np.uint8)],
            "strided": (np.arange(12) + t).reshape(3, 4)[:, ::2].T,
            "big-endian": np.array([1, t], ">i4"),
            "empty": np.zeros((0, 5), np.int8),
            "ключ": (),
        }

    with serving(lambda: Old(2, observe), ANY_PORT) as address:
        with Stream(address, num_envs=2) as stream:
            frames = [row["frame"] for row in play(stream, 3)]
    for t, frame in zip([0, 1, 0, 1], frames, strict=True):
        expected = observe(t)
        assert list(frame) == list(expected) and frame["ключ"] == ()
        for name, array in zip(dtypes.split(), frame["dtypes"], strict=True):
            assert array.dtype == name and array.shape == (2, 6)
            assert array[1].tolist() == ((np.arange(6) + t) % 5).astype(name).tolist()
        assert [a.dtype.name for a in frame["list"]] == "int64 float64 bool float32 uint8".split()
        assert frame["strided"][0].tolist() == expected["strided"].tolist()
        assert frame["big-endian"].tolist() == [[1, t], [1, t]]
        assert frame["empty"].shape == (2, 0, 5)


def test_messages_are_those_of_protobuf_to_the_length():
    observation = {"a": (np.arange(300, dtype=np.int16), np.bool_(True)), "b" * 200: np.zeros(1)}
    environments = plain_environments.PlainEnvironments(
        lambda: Old(3, lambda _: observation), num_envs=2, seed=None
    )
    encoder = wire.RowEncoder(environments, newest_frame_only=False)
    row = environments.initial()
    fields = {key: row[key].tobytes() for key in wire.FIELDS}
    expected = rpcenv_pb2.Step(observation=from_nest(row["frame"]), **fields)
    expected.handshake.protocol_version = 1
    expected.handshake.num_envs = 2
    message = encoder.encode_first(row, 1)
    assert rpcenv_pb2.Step.FromString(message) == expected
    assert len(message) == len(expected.SerializeToString())
    expected.ClearField("handshake")
    assert rpcenv_pb2.Step.FromString(encoder.encode(row)) == expected


def test_actions_like_the_last_one_are_decoded_as_all_others_are():
    decode = wire.ActionDecoder(2, None).decode

    def message(nest):
        return rpcenv_pb2.Action(action=from_nest(nest)).SerializeToString()

    for i in range(3):
        for action in (np.full(2, i), np.full((2, 3), i + 0.5), (np.full(2, i), {"a": np.ones(2)})):
            for _ in range(2):  # the second time, it is like the last one
                decoded, wanted = decode(message(action)), nest_of(action)
                assert nest_of(decoded) == wanted
    assert decode(message(np.arange(2))).flags.writeable
    for wrong in (message(np.arange(3)), message(np.arange(2))[:-1], message(np.arange(2)) + b"x"):
        with pytest.raises(ValueError):
            decode(wrong)
    bools = message(np.ones(2, bool))
    assert decode(bools).tolist() == [True, True]
    with pytest.raises(ValueError):
        decode(bools[:-1] + b"\2")


def nest_of(x):
    """Return a nest of lists, to be compared."""
    if isinstance(x, dict):
        return {key: nest_of(item) for key, item in x.items()}
    return [nest_of(item) for item in x] if isinstance(x, tuple) else (x.dtype, x.tolist())


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
        with serving(create_env, ANY_PORT) as address, Stream(address, **options):
            return [seeds.get() for _ in range(seeds.qsize())]

    first = seeds_of(Seeded, num_envs=2, seed=5)
    assert len(set(first)) == 2 and all(isinstance(seed, int) for seed in first)
    assert seeds_of(lambda: Wrapper(Seeded()), num_envs=2, seed=5) == first
    assert seeds_of(Seeded, num_envs=2, seed="5,1") != first
    assert seeds_of(Seeded) == ["none"]
    assert seeds_of(lambda: Wrapper(Old()), seed=5) == []


def test_handshake_names_the_environment_if_it_has_a_name():
    for kwargs, name in (({}, ""), ({"env": "Old-v0"}, "Old-v0")):
        with serving(Old, ANY_PORT, **kwargs) as address, Stream(address) as stream:
            assert stream.handshake.env == name


def test_a_refused_server_logs_why(caplog):
    with serving(None, ANY_PORT, make_environments=batches(Catch), env="Catch") as address:
        for kwargs, message in (
            ({"env": "Pong"}, "plays Catch, expected Pong"),
            ({"spaces": json.dumps({"observation": {}})}, "has other spaces: .*observation"),
        ):
            queue, batcher = BatchingQueue(), DynamicBatcher()
            pool = ActorPool(1, queue, batcher, [address], (), **kwargs)
            with pytest.raises(ConnectionRefusedError, match=message):
                pool.run()
            assert re.search(f"for ipv4.*: the learner refused .*{message}", caplog.text)


# ------------------------------------------------------------------------------ newest frame only


def stacked_pong():
    # Cut after 100 steps, so that episodes end.
    env = atari_wrappers.make_atari("PongNoFrameskip-v4", max_episode_frames=400)
    return atari_wrappers.wrap_pytorch(atari_wrappers.wrap_deepmind(env))


STACKED = {
    "Pong": (stacked_pong, 4, 300),
    "Catch": (lambda: gym.wrappers.FrameStackObservation(Catch(), 3), 3, 100),
}


@pytest.mark.parametrize("name", STACKED)
def test_newest_frames_make_the_same_stacks_to_the_last_bit(name):
    create_env, stack_size, num_steps = STACKED[name]
    random = np.random.default_rng(0)
    actions = random.integers(3, size=(num_steps, 3))
    with serving(None, ANY_PORT, make_environments=batches(create_env)) as address:
        with Stream(address, num_envs=3, seed=1) as stream:
            assert stream.handshake.stack_size == 0
            expected = play(stream, num_steps, lambda t, _: actions[t])
        with Stream(address, num_envs=3, seed=1, newest_frame_only=1) as stream:
            assert stream.handshake.stack_size == stack_size
            rows, num_full = [stream.row], 0
            for action in actions:
                rows.append(stream.step(action))
                num_full += stream.num_full
    assert_rows_equal(rows, expected)
    ends = sum(int(row["done"].sum()) for row in rows[1:])
    assert ends >= 3
    assert num_full <= ends  # whole stacks only where an episode begins


@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_stacks_of_which_an_old_frame_changed_are_sent_whole(dtype):
    random, K, C = np.random.default_rng(0), 4, 2
    stacks = random.integers(9, size=(3, K * C, 5, 3)).astype(dtype)
    splitter, received = wire._Stacks(stacks, K), None
    for t in range(40):
        changed = np.zeros(3, bool)
        if t > 0:
            new = random.integers(9, size=(3, C, 5, 3)).astype(dtype)
            stacks = np.concatenate([stacks[:, C:], new], axis=1)
            changed[:] = random.random(3) < 0.2
            stacks[changed, t % (C * (K - 1)), t % 5, t % 3] += 1
        newest, is_full, full = splitter.split(stacks)
        if t == 0:
            assert is_full.all()
            received = full
        else:
            assert is_full.tolist() == changed.tolist()
            received = np.concatenate([received[:, C:], newest], axis=1)
            received[is_full] = full
        assert received.tobytes() == stacks.tobytes()


# -------------------------------------------------------------------------------------- failures


class Fragile(Old):
    """Fails where it is told to."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        if where == "create":
            raise ValueError("broken in create")

    def reset(self):
        if self.where == "reset":
            raise ValueError("broken in reset")
        return super().reset()

    def step(self, action):
        if self.where == "step" and self.t == 1:
            raise ValueError("broken in step \udcff")
        if self.where == "exit":
            sys.exit("broken in exit")
        observation, reward, done, info = super().step(action)
        if self.where == "nan":
            reward = float("nan")
        if self.where == "shape" and self.t == 2:
            observation = np.zeros(5, np.int32)
        if self.where == "dtype" and self.t == 2:
            observation = observation.astype(np.int64)
        return observation, reward, done, info


@pytest.mark.parametrize(
    ("where", "message"),
    [("create", "broken in create"), ("reset", "broken in reset"), ("step", "broken in step"),
     ("exit", "broken in exit"), ("nan", "must be finite"),
     ("shape", r"int32\[5\], but should be int32\[1\]"), ("dtype", "int64.1., but should be")],
)  # fmt: skip
def test_environment_that_raises_tells_the_learner_and_the_server_goes_on(where, message, caplog):
    broken = [where, "not"]
    with serving(lambda: Fragile(broken.pop(0)), ANY_PORT) as address:
        with pytest.raises(EnvironmentFailed, match=message) as error:
            with Stream(address) as stream:
                play(stream, 3)
        assert "Traceback (most recent call last)" in str(error.value)
        assert "failed" in caplog.text and "Traceback" in caplog.text
        with Stream(address) as stream:
            play(stream, 5)


@pytest.mark.parametrize("observation", [{1: np.zeros(1)}, np.array(["text"]), np.array([None])])
def test_observation_that_cannot_be_sent_is_an_error(observation):
    with serving(lambda: Old(3, lambda _: observation), ANY_PORT) as address:
        with pytest.raises(EnvironmentFailed, match="(?i)error"):
            Stream(address)


def test_row_that_is_too_large_for_a_message_is_an_error(monkeypatch):
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 1000)
    with serving(lambda: Old(3, lambda _: np.zeros(100)), ANY_PORT) as address:
        with Stream(address, num_envs=1):
            pass
        with pytest.raises(EnvironmentFailed, match="at most 1000: take fewer environments"):
            Stream(address, num_envs=2)


def nested(depth):
    """Return an Action of a leaf in so many tuples, as bytes."""
    message = leaf().SerializeToString()
    for number in (*[2] * depth, 1):  # items of a Nest; the action of an Action
        message = wire._head(number, len(message)) + message
    return message


def array(dtype=8, shape=(2,), data=bytes(16)):
    return rpcenv_pb2.Array(dtype=dtype, shape=shape, data=data)


def leaf(**kwargs):
    return rpcenv_pb2.Nest(array=array(**kwargs))


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
    "both": (rpcenv_pb2.Nest(array=array(), items=[leaf()]), "items as well"),
    "keys only": (rpcenv_pb2.Nest(keys=["a"]), "0 items for the keys"),
    "key twice": (rpcenv_pb2.Nest(keys=["a", "a"], items=[leaf(), leaf()]), "2 items for the keys"),
}


def serialize(action):
    if isinstance(action, bytes):
        return action
    return rpcenv_pb2.Action(action=action).SerializeToString()


@pytest.fixture(scope="module")
def two_olds():
    with serving(Old, ANY_PORT) as address:
        yield address


@pytest.mark.parametrize("name", BAD_ACTIONS)
def test_malformed_action_is_refused_and_the_server_goes_on(two_olds, name):
    action, message = BAD_ACTIONS[name]
    with Stream(two_olds, num_envs=2) as stream:
        with pytest.raises(grpc.RpcError, match=message) as error:
            stream.send(serialize(action))
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with Stream(two_olds) as stream:
        play(stream, 1)


@pytest.mark.parametrize(
    ("space", "actions", "unlike"),
    [
        (gym.spaces.Box(-1, 1, (3,)), np.eye(2, 3, dtype=np.float32), np.eye(2, 3, dtype=np.int64)),
        (gym.spaces.MultiDiscrete([2, 3]), np.array([[1, 2], [0, 1]]), np.array([1, 2])),
    ],
    ids=["box", "multi-discrete"],
)
def test_actions_of_several_parts_travel_there_and_back(space, actions, unlike):
    with serving(None, ANY_PORT, make_environments=batches(lambda: Mirror(space))) as address:
        with Stream(address, num_envs=2) as stream:
            assert stream.row["last_action"].tolist() == np.zeros_like(actions).tolist()
            row = stream.step(actions)
            for key in ("last_action", "frame"):
                assert row[key].tolist() == actions.tolist() and row[key].dtype == actions.dtype
            with pytest.raises(grpc.RpcError, match="the action should be"):
                stream.step(unlike)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_envs": 0}, "num-envs is 0"), ({"num_envs": 4097}, "from 1 to 4096"),
     ({"num_envs": "many"}, "num-envs is 'many'"), ({"num_envs": "9" * 5000}, "num-envs"),
     ({"seed": "1,x"}, "seed is '1,x'"), ({"seed": ""}, "seed"), ({"seed": "-1"}, "seed"),
     ({"newest_frame_only": "yes"}, "newest-frame-only")],
)  # fmt: skip
def test_stream_options_that_make_no_sense_are_refused(two_olds, options, message):
    code, details = refusal(two_olds, **options)
    assert code == grpc.StatusCode.INVALID_ARGUMENT and message in details


# ------------------------------------------------------------------------------------- lifetimes


class Counted(Old):
    """Knows how many there are."""

    alive = 0
    changed = threading.Condition()

    def __init__(self):
        super().__init__()
        self.count(1)

    def close(self):
        self.count(-1)

    @staticmethod
    def count(change):
        with Counted.changed:
            Counted.alive += change
            Counted.changed.notify_all()

    @staticmethod
    def wait_for(alive):
        with Counted.changed:
            assert Counted.changed.wait_for(lambda: Counted.alive == alive, DEADLINE), Counted.alive


def test_streams_have_environments_of_their_own():
    with serving(Counted, ANY_PORT) as address:
        with Stream(address, num_envs=2) as one, Stream(address, num_envs=3) as other:
            assert Counted.alive == 5
            one.step(np.zeros(2))
            assert one.step(np.zeros(2))["frame"].tolist() == [[2], [2]]
            assert other.step(np.zeros(3))["frame"].tolist() == [[1], [1], [1]]
        Counted.wait_for(0)


def test_full_server_refuses_and_takes_the_next_when_one_has_left():
    with serving(Counted, ANY_PORT) as address, contextlib.ExitStack() as stack:
        streams = [stack.enter_context(Stream(address)) for _ in range(server.MAX_STREAMS)]
        code, details = refusal(address)
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"{address} serves {server.MAX_STREAMS} streams already" in details
        for stream in streams:
            stream.step(np.zeros(1))
        streams[3].close()
        Counted.wait_for(server.MAX_STREAMS - 1)
        with Stream(address) as stream:
            stream.step(np.zeros(1))
    Counted.wait_for(0)


@pytest.mark.parametrize("how", ["half-close", "cancel", "close", "bad action", "stop"])
def test_environments_are_closed_however_the_stream_ends(how):
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(serving(Counted, ANY_PORT))
        stream = Stream(address)
        stream.step(np.zeros(1))
        assert Counted.alive == 1
        if how == "half-close":
            stream.send_end()
        elif how == "cancel":
            stream.call.cancel()
        elif how == "close":
            stream.close()
        elif how == "bad action":
            with pytest.raises(grpc.RpcError):
                stream.send(b"")
        else:
            stack.close()
        Counted.wait_for(0)
        stream.close()


def test_environment_that_hangs_blocks_neither_other_streams_nor_the_servers_stop(monkeypatch):
    monkeypatch.setattr(server, "GRACE", 0.1)
    stepping, go_on = threading.Event(), threading.Event()

    class Hanging(Counted):
        def step(self, action):
            if action == 1:
                stepping.set()
                assert go_on.wait(DEADLINE)
            return super().step(action)

    with serving(Hanging, ANY_PORT) as address:
        streams = [Stream(address), Stream(address)]
        threads = [
            threading.Thread(target=pytest.raises, args=(grpc.RpcError, stream.step, np.ones(1)))
            for stream in streams
        ]
        for thread in threads:
            stepping.clear()
            thread.start()
            assert stepping.wait(DEADLINE)
        streams[0].call.cancel()
        threads[0].join(DEADLINE)
        with Stream(address) as stream:
            play(stream, 3, lambda *_: np.zeros(1))
            assert Counted.alive == 3
    threads[1].join(DEADLINE)
    assert not any(thread.is_alive() for thread in threads)
    go_on.set()
    Counted.wait_for(0)
    for stream in streams:
        stream.close()


def test_close_that_raises_is_logged_and_survived(caplog):
    class Sticky(Counted):
        def close(self):
            super().close()
            raise ValueError("does not want to")

    with serving(Sticky, ANY_PORT) as address:
        for _ in range(2):
            with Stream(address):
                pass
            Counted.wait_for(0)
    assert "does not want to" in caplog.text


# ------------------------------------------------------------------------- run, stop and addresses


def test_run_again_and_stop_before_run_are_errors():
    server = Server(Old, ANY_PORT)
    with pytest.raises(RuntimeError, match="not running"):
        server.stop()
    started = queue.SimpleQueue()
    thread = threading.Thread(target=server.run, args=(started.put,))
    thread.start()
    address = started.get(timeout=DEADLINE)
    with pytest.raises(RuntimeError, match="run before"):
        server.run()
    with Stream(address) as stream:
        play(stream, 1)
        server.stop()  # returns when it has ended
        thread.join(1)
        assert not thread.is_alive()
        with pytest.raises(grpc.RpcError):
            stream.step(np.zeros(1))
    with pytest.raises(RuntimeError, match="run before"):
        server.run()
    server.stop()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_address_in_use_is_refused_and_the_first_server_goes_on(tmp_path, kind):
    address = ANY_PORT if kind == "tcp" else f"unix:{tmp_path}/socket"
    with serving(Old, address) as address:
        with pytest.raises(RuntimeError, match=f"cannot serve on {address}: "):
            Server(Old, address).run()
        with Stream(address) as stream:
            play(stream, 1)
    if kind == "unix":
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


def test_socket_that_a_killed_server_left_does_not_matter(tmp_path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/socket")
    with serving(Old, f"unix:{tmp_path}/socket") as address, Stream(address) as stream:
        play(stream, 1)
