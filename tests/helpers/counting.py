# SPDX-License-Identifier: Apache-2.0
"""Environments that count, servers of them in processes, and a server that may lie.

    python tests/helpers/counting.py 127.0.0.1:0

Nothing here needs torch, so such a process starts fast.
"""

import functools
import itertools
import os
import pathlib
import socket
import subprocess
import sys
import threading
from concurrent import futures

import grpc
import gymnasium as gym
import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))

from deadline import DEADLINE, Thread
from stream import FIELDS, from_nest

from libtorchbeast import Server, rpcenv_pb2

LENGTH = 5  # steps in an episode
_ids = itertools.count()


class Counting(gym.Env):
    """Observes [its id, episode, step, last action]; the reward is the step."""

    truncates = False

    def __init__(self):
        self.observation_space = gym.spaces.Box(0, 2**62, (4,), np.int64)
        self.action_space = gym.spaces.Discrete(3)
        self.id = 1000 * os.getpid() + next(_ids)
        self.episode, self.last_action = -1, 0

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        self.count = 0
        return self.observe(), {}

    def step(self, action):
        self.count += 1
        self.last_action = int(action)
        ends = self.count == LENGTH
        terminated, truncated = ends and not self.truncates, ends and self.truncates
        return self.observe(), float(self.count), terminated, truncated, {}

    def observe(self):
        return np.array([self.id, self.episode, self.count, self.last_action])


class Truncated(Counting):
    truncates = True


class OldCounting:
    """Counting in the old Gym API, without spaces."""

    def __init__(self):
        self.env = Counting()

    def reset(self):
        return self.env.reset()[0]

    def step(self, action):
        assert isinstance(action, np.ndarray) and action.shape == (), repr(action)
        observation, reward, terminated, _, info = self.env.step(action)
        return observation, reward, terminated, info


class Raising(Counting):
    """Fails in its third episode."""

    def reset(self, **kwargs):
        if self.episode == 1:
            raise RuntimeError("the ball is lost")
        return super().reset(**kwargs)


class Mirror(gym.Env):
    """Observes its last action, of any action space."""

    def __init__(self, action_space):
        self.action_space = action_space
        self.observation_space = gym.spaces.Box(-9, 9, action_space.shape, action_space.dtype)

    def reset(self, *, seed=None, options=None):
        return np.zeros(self.action_space.shape, self.action_space.dtype), {}

    def step(self, action):
        return action, 0.0, False, False, {}


def free_address(ip="127.0.0.1"):
    with socket.socket() as probe:
        probe.bind((ip, 0))
        return f"{ip}:{probe.getsockname()[1]}"


def consecutive_free_addresses(ip="127.0.0.1"):
    while True:
        with socket.create_server((ip, 0)) as first:
            port = first.getsockname()[1]
            try:
                socket.create_server((ip, port + 1)).close()
            except (OSError, OverflowError):
                continue
            return [f"{ip}:{port}", f"{ip}:{port + 1}"]


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:  # it is switched off, though Python knows it
        return False
    return True


class ServerProcess:
    """A server of Counting in a process of its own."""

    def __init__(self, address="127.0.0.1:0"):
        command = [sys.executable, __file__, address]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @functools.cached_property
    def address(self):
        """Where it serves; waits until it does."""
        address = self.process.stdout.readline().strip()
        assert address, "the server did not start"
        return address

    def kill(self):
        self.process.kill()
        self.process.communicate()

    stop = kill


# ---------------------------------------------------------------------------- a server that may lie


def make_step(num_envs=2, observation=None, **fields):
    """Return a good row of zeros, and what is given otherwise."""
    row = {key: np.zeros(num_envs, dtype).tobytes() for key, dtype in FIELDS.items()}
    observation = observation or from_nest(np.zeros((num_envs, 3), np.uint8))
    return rpcenv_pb2.Step(observation=observation, **(row | fields))


def make_first(num_envs=2, observation=None, version=1, spaces="", stack_size=0, env="", **fields):
    """Return a good first message, and what is given otherwise."""
    handshake = rpcenv_pb2.Handshake(
        protocol_version=version, num_envs=num_envs, spaces=spaces, stack_size=stack_size, env=env
    )
    return make_step(num_envs, observation, handshake=handshake, **fields)


class FakeServer:
    """Speaks with clients as it is told.

    Args:
      speak: called with an iterator over actions, and gRPC's context; yields messages, or bytes.
    """

    method, request = "/rpcenv.RPCEnvServer/StreamingEnv", rpcenv_pb2.Action

    def __init__(self, speak):
        self.metadata = []  # of each stream: a dict
        self.speak = speak
        self.grpc_server = grpc.server(
            futures.ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)]
        )
        handler = grpc.stream_stream_rpc_method_handler(
            self._serve,
            request_deserializer=self.request.FromString,
            response_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
        )
        _, service, method = self.method.split("/")
        self.grpc_server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service, {method: handler})]
        )
        self.address = f"127.0.0.1:{self.grpc_server.add_insecure_port('127.0.0.1:0')}"
        self.grpc_server.start()

    def _serve(self, requests, context):
        self.metadata.append(dict(context.invocation_metadata()))
        yield from self.speak(requests, context)

    def stop(self):
        self.grpc_server.stop(None)


def obey(num_envs=2, **handshake):
    """Return what to `speak` for a good server."""

    def speak(requests, context):
        yield make_first(num_envs, **handshake)
        for _ in requests:
            yield make_step(num_envs)

    return speak


def say(*messages):
    """Return what to `speak` to say these, one at first, one after each action, and then end."""

    def speak(requests, context):
        for message in messages:
            yield message
            next(requests, None)

    return speak


def wait_for_end(context):
    """Say nothing until the client has gone."""
    ended = threading.Event()
    if context.add_callback(ended.set):
        ended.wait(DEADLINE)
    yield from ()


def hang_after_the_first_row(requests, context):
    yield make_first(1)
    yield from wait_for_end(context)


def main(address):
    Thread(lambda: (sys.stdin.read(), os._exit(1)))  # end with the process that started us
    Server(Counting, address).run(lambda address: print(address, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
