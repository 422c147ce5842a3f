# SPDX-License-Identifier: Apache-2.0
"""A learner's port, environments that dial in to it, and fakes of either end."""

import contextlib
import queue
import socket

import grpc
from counting import FakeServer
from deadline import DEADLINE, Thread, wait_until
from stream import OPTIONS

from libtorchbeast import Dialer, Listener, rpcenv_pb2
from libtorchbeast.dialer import METHOD


class Port(contextlib.AbstractContextManager):
    """A port with its Listener, whose `events` are complete once it is closed."""

    def __init__(self, max_streams=16, port=0, host="127.0.0.1", **options):
        is_ipv6 = ":" in host
        family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        number = self._socket.getsockname()[1]
        self.address = f"[{host}]:{number}" if is_ipv6 else f"{host}:{number}"
        self.listener = Listener(self._socket.fileno(), max_streams, **options)
        self.events = []
        self._log = Thread(lambda: self.events.extend(iter(self.listener.next_event, None)))

    def close(self):
        self.listener.close()
        self._log.result()
        self._socket.close()

    def __exit__(self, *_):
        self.close()


class DialerThread(contextlib.AbstractContextManager):
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

    def __exit__(self, *_):
        self.dialer.stop()
        self._thread.result()


class FakeEnvironments(contextlib.AbstractContextManager):
    """A stream to a learner, which says what it is given, and keeps what it hears."""

    def __init__(self, address, *messages, token=None):
        self._channel = grpc.insecure_channel(address, OPTIONS)
        self._requests = queue.SimpleQueue()
        for message in messages:
            self.send(message)
        self.heard, metadata = [], [("auth-token", token)] if token else []
        self.call = self._channel.stream_stream(METHOD)(
            iter(self._requests.get, None), metadata=metadata, timeout=DEADLINE
        )
        self._thread = Thread(self._listen)

    def send(self, message):
        self._requests.put(message if isinstance(message, bytes) else message.SerializeToString())

    def _listen(self):
        for message in self.call:
            self.heard.append(rpcenv_pb2.Action.FromString(message))

    def hello(self):
        """Wait for the learner's first message."""
        wait_until(lambda: self.heard or not self._thread.is_alive())
        if not self.heard:
            self._thread.result()
        return self.heard[0]

    def refusal(self):
        """Return status code and text with which the learner ends the stream."""
        wait_until(lambda: not self._thread.is_alive())
        return self.call.code(), self.call.details()

    def stop(self):
        self._requests.put(None)
        self._channel.close()

    def __exit__(self, *_):
        self.stop()


class FakeLearner(FakeServer):
    """Speaks with environments as it is told: called with their messages; yields Actions."""

    method, request = METHOD, rpcenv_pb2.Step
