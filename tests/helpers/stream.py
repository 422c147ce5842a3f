# SPDX-License-Identifier: Apache-2.0
"""A server in a thread, and the learner's side of a stream in plain Python.

Nothing here needs torch.
"""

import contextlib
import queue

import grpc
import numpy as np
import pytest
from deadline import DEADLINE, Thread, wait_until

from beast.envs.environments import Environments
from libtorchbeast import Server
from libtorchbeast import rpcenv_pb2 as pb

FIELDS = {
    "reward": np.float32,
    "done": bool,
    "truncated": bool,
    "terminated": bool,
    "episode_return": np.float32,
    "episode_step": np.int32,
    "game_done": bool,
    "game_return": np.float32,
    "game_step": np.int32,
    "last_action": np.int64,
}
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


def to_array(message):
    dtype = pb.DType.Name(message.dtype).lower()
    return np.frombuffer(message.data, dtype).reshape(tuple(message.shape))


def to_nest(message):
    if message.HasField("array"):
        return to_array(message.array)
    items = [to_nest(item) for item in message.items]
    return dict(zip(message.keys, items, strict=True)) if message.keys else tuple(items)


def from_nest(nest):
    if isinstance(nest, dict):
        return pb.Nest(items=map(from_nest, nest.values()), keys=nest.keys())
    if isinstance(nest, tuple):
        return pb.Nest(items=map(from_nest, nest))
    array = np.asarray(nest)
    dtype = pb.DType.Value(array.dtype.name.upper())
    return pb.Nest(array=pb.Array(dtype=dtype, shape=array.shape, data=array.tobytes()))


def as_lists(nest):
    """Return a nest of arrays or tensors as one of dtypes, shapes and lists, to be compared."""
    if isinstance(nest, dict):
        return {key: as_lists(item) for key, item in nest.items()}
    if isinstance(nest, (tuple, list)):
        return type(nest)(map(as_lists, nest))
    return nest.dtype, tuple(nest.shape), nest.tolist()


class EnvironmentFailed(Exception):
    """The server has sent an error."""


class Stream:
    """A stream to a server. `handshake` is its handshake, `row` the last row as a dict of arrays.

    Where only the newest frames travel, they are stacked again; then `num_full` says of how many
    columns the whole stacks came with the last row.
    """

    def __init__(self, address, **options):
        self._channel = grpc.insecure_channel(address, OPTIONS)
        self._requests = queue.SimpleQueue()
        options = {"truncated_rows": 1} | options
        method = self._channel.stream_stream("/rpcenv.RPCEnvServer/StreamingEnv")  # of bytes
        self.call = method(
            iter(self._requests.get, None),
            metadata=[(key.replace("_", "-"), str(value)) for key, value in options.items()],
            timeout=DEADLINE,
            wait_for_ready=True,
        )
        self.row = None
        self._read()

    def step(self, actions):
        """Send a nest of arrays [N, ...]; return the next row."""
        return self.send(pb.Action(action=from_nest(actions)).SerializeToString())

    def send(self, request):
        self._requests.put(request)
        return self._read()

    def send_end(self):
        self._requests.put(None)

    def close(self):
        self.send_end()
        self._channel.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _read(self):
        step = pb.Step.FromString(next(self.call))
        if step.error:
            raise EnvironmentFailed(step.error)
        assert step.HasField("handshake") == (self.row is None)
        if step.HasField("handshake"):
            self.handshake = step.handshake
        row = {key: np.frombuffer(getattr(step, key), dtype) for key, dtype in FIELDS.items()}
        if step.HasField("last_action_array"):
            row["last_action"] = to_array(step.last_action_array)
        assert all(len(array) == self.handshake.num_envs for array in row.values())
        row["frame"] = to_nest(step.observation)
        if self.handshake.stack_size:
            row["frame"] = self._restack(step, row["frame"])
        self.row = row
        return row

    def _restack(self, step, newest):
        is_full = np.frombuffer(step.is_full, bool)
        self.num_full = int(is_full.sum())
        full = to_array(step.full) if self.num_full else ()
        assert len(full) == self.num_full
        if self.row is None:
            assert is_full.all()
            return full
        channels = newest.shape[1]
        stacks = np.concatenate([self.row["frame"][:, channels:], newest], axis=1)
        if self.num_full:
            stacks[is_full] = full
        return stacks


def make_many(create_env, num_envs=1, seeds=None):
    """Return what Server's make_environments may be; the seeds it is given go into a list."""

    def make_environments(asked_num_envs, seed, name):
        if seeds is not None:
            seeds.append(seed)
        return Environments(create_env, asked_num_envs or num_envs, seed, name)

    return make_environments


class ServerThread:
    """A server in a thread of this process."""

    def __init__(self, env_class, address="127.0.0.1:0", **kwargs):
        self._server = Server(env_class, address, **kwargs)
        started = []
        self._thread = Thread(self._server.run, started.append)
        wait_until(lambda: started or not self._thread.is_alive())
        self.address = started[0] if started else self._thread.result()

    def stop(self):
        self._server.stop()
        self._thread.result()


@contextlib.contextmanager
def serving(env_class, *args, **kwargs):
    """Run a Server in a thread; yield its address."""
    server = ServerThread(env_class, *args, **kwargs)
    try:
        yield server.address
    finally:
        server.stop()


def refusal(address, **options):
    """Return status code and text with which a server refuses a stream."""
    with pytest.raises(grpc.RpcError) as error:
        Stream(address, **options)
    return error.value.code(), error.value.details()


def leaf(**kwargs):
    return pb.Nest(array=array(**kwargs))


def array(dtype=8, shape=(2,), data=bytes(16)):
    return pb.Array(dtype=dtype, shape=shape, data=data)
