# SPDX-License-Identifier: Apache-2.0
"""A learner's port, environments that dial in to it, and fakes of either end."""

import contextlib
import queue
import socket
from concurrent import futures

import grpc
from deadline import Thread, wait_until

from libtorchbeast import Dialer, Listener, rpcenv_pb2
from libtorchbeast.dialer import METHOD


class Port:
    """A port with its Listener."""

    def __init__(self, max_streams=16, port=0, **options):
        self._socket = socket.create_server(("127.0.0.1", port))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.listener = Listener(self._socket.fileno(), max_streams, **options)

    def close(self):
        self.listener.close()
        self._socket.close()


class DialerThread:
    """Environments that dial in, in a thread of this process; `accepted` are by whom."""

    def __init__(self, env_class, *addresses, **options):
        self.dialer, self.accepted = Dialer(env_class, addresses, **options), []
        self._thread = Thread(self.dialer.run, self.accepted.append)

    def result(self):
        return self._thread.result()

    def stop(self):
        self.dialer.stop()
        with contextlib.suppress(RuntimeError):
            self._thread.result()


class FakeEnvironments:
    """A stream to a learner, which says what it is given, and keeps what it hears."""

    def __init__(self, address, *messages, token=None):
        self._channel = grpc.insecure_channel(address)
        self._requests = queue.SimpleQueue()
        for message in messages:
            self.send(message)
        self.heard, metadata = [], [("auth-token", token)] if token else []
        self.call = self._channel.stream_stream(METHOD)(
            iter(self._requests.get, None), metadata=metadata
        )
        self._thread = Thread(self._listen)

    def send(self, message):
        self._requests.put(message if isinstance(message, bytes) else message.SerializeToString())

    def _listen(self):
        for message in self.call:
            self.heard.append(rpcenv_pb2.Action.FromString(message))

    def refusal(self):
        """Return status code and text with which the learner ends the stream."""
        wait_until(lambda: not self._thread.is_alive())
        return self.call.code(), self.call.details()

    def stop(self):
        self._requests.put(None)
        self._channel.close()


class FakeLearner:
    """Speaks with environments as it is told: called with their messages; yields Actions."""

    def __init__(self, speak):
        self._server = grpc.server(
            futures.ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)]
        )
        handler = grpc.stream_stream_rpc_method_handler(
            lambda requests, context: speak(map(rpcenv_pb2.Step.FromString, requests), context),
            response_serializer=rpcenv_pb2.Action.SerializeToString,
        )
        service, method = METHOD[1:].split("/")
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service, {method: handler})]
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self):
        self._server.stop(None)
