# SPDX-License-Identifier: Apache-2.0
"""Environments that dial in to a learner, by the protocol in rpcenv.proto.

    Dialer(MyEnv, ["learner:50050"], auth_token=TOKEN).run()

Needs numpy, grpcio and protobuf: no gymnasium, and nothing that is compiled here.
"""

import contextlib
import functools
import logging
import queue
import random
import time
import traceback

import grpc
from google.protobuf.message import DecodeError

from libtorchbeast import access, rpcenv_pb2, wire
from libtorchbeast.session import Session

PAUSES = (0.2, 1, 2, 4, 8)  # seconds before another attempt, by the number of failures in a row
ENOUGH_ACTIONS = 200  # of a stream, after which the pauses are short again
SLOW = 60  # seconds of making environments, after which the log says that nobody has waited
LOG_INTERVAL = 10  # seconds between two lines about a learner that is waited for
METHOD = "/rpcenv.RPCLearner/StreamingLearner"

_OPTIONS = (
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", wire.MAX_ACTION_BYTES),
    # That is the limit of what arrives; decompressed, it might be a thousand times as much.
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each stream
    # Ping the learner, which may be unplugged or stopped.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # else a ping may take a minute
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # to connect; else 20 s, at a machine that is gone
)
_TEXTS = {
    grpc.StatusCode.UNAUTHENTICATED: "refused by the learner at {}: {}",
    grpc.StatusCode.UNIMPLEMENTED: "the learner at {} is of a version that environments cannot "
    "dial in to: update it ({})",
    grpc.StatusCode.UNAVAILABLE: "the learner at {} cannot be reached, or has gone: {}",
    grpc.StatusCode.CANCELLED: "the learner at {} has ended, or this stream hangs",
}
# What another attempt would not change.
_FINAL = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
)
# What is no fault: learners end, and come later than their environments.
_IN_ORDER = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED


class Dialer:
    """Dials in to a learner, with fresh environments for each stream, again and again.

    Args:
      env_class, make_environments, env: as of Server.
      addresses: host:port of the learners; where one is gone, the next one is tried.
      first: index of the address to be tried first, again after a stream that has played, and
        every other time while none is to be had: so that processes of many machines stay spread.
      busy_since: an array, of whose first entry Server says what it is.
      tls: PEM texts of the authority that signed the learner's certificate, of our own certificate
        and of its key.
      auth_token: the token that the learner asks for.
      play: in place of environments: called with StreamOptions, an iterator of serialized Actions
        and the address; returns a generator of serialized Steps.
      reconnect: dial again when a stream is lost.
    """

    def __init__(
        self, env_class, addresses, first=0, *,
        make_environments=None, env="", busy_since=None, tls=None, auth_token=None, play=None,
        reconnect=True,
    ):  # fmt: skip
        access.check_credentials(tls, auth_token)
        self._addresses, self._first = list(addresses), first
        self._log, self._throttle = access.PeerLog(), access.Throttle()
        busy_since = [0.0] if busy_since is None else busy_since
        self._session = None if play else Session(env_class, make_environments, env, self._log)
        self.play = play or functools.partial(self._session.play, busy_since=busy_since, slot=0)
        self._reconnect, self._reason = reconnect, None
        self._tls, self._metadata = tls, [("auth-token", auth_token)] if auth_token else []
        self._news = queue.SimpleQueue()  # whose methods a handler of a signal may call
        self._is_stopped = False

    def run(self, started=None):
        """Dial until `stop`. Calls `started`, if given, with the address that first accepts us.

        Raises:
          RuntimeError: all learners (one that is gone does not) refuse us for good before any has
            accepted us; a stream is lost, and we are not to reconnect; or `give_up` was called.
        """
        num_failures, num_tries, has_played, refusing = 0, 0, False, set()
        while not self._is_stopped:
            address = self._address(num_tries)
            stream = _Stream(self, address, None if has_played else started)
            error = stream.run()
            has_played |= stream.num_actions > 0
            if self._reason is not None:
                raise RuntimeError(self._reason)
            if error is None:  # it was there to tell the spaces, or the learner ends
                self._wait(PAUSES[0])
            if self._is_stopped or error is None:
                continue
            if stream.is_refused and not has_played:
                refusing.add(address)
            if refusing == set(self._addresses) or not self._reconnect:
                raise RuntimeError(error)
            if count := self._throttle.count():
                level = logging.INFO if has_played else logging.WARNING
                level = level if stream.is_in_order else logging.ERROR
                more = f" ({count} streams since the last such line)" if count > 1 else ""
                logging.log(level, "%s%s", error, more)
            num_tries = 0 if stream.num_actions else num_tries + 1
            num_failures = 1 if stream.num_actions >= ENOUGH_ACTIONS else num_failures + 1
            pause = PAUSES[min(num_failures, len(PAUSES)) - 1] * random.uniform(0.5, 1.5)
            # Another address follows ours at once, and we pause before ours: where learners start
            # together, each process finds its own.
            if num_tries % 2 == 0 or len(self._addresses) == 1:
                self._wait(pause)

    def _address(self, num_tries):
        """Return the first address at even tries, and the others in turn at odd ones."""
        others = len(self._addresses) - 1
        step = 1 + num_tries // 2 % others if num_tries % 2 and others else 0
        return self._addresses[(self._first + step) % len(self._addresses)]

    def stop(self):
        """End the stream and `run`. For any thread, and handlers of signals."""
        self._is_stopped = True
        self._news.put("stop")

    def give_up(self, reason):
        """End `run` by a RuntimeError, once the stream that calls this has ended."""
        self._reason = reason

    def num_failures(self):
        return self._session.num_failures if self._session else 0

    def _wait(self, seconds):
        try:
            return self._news.get(timeout=seconds)
        except queue.Empty:
            return None


class _Stream:
    """One stream to a learner.

    Attributes:
      num_actions: that have come.
      is_refused: for good.
      is_in_order: it was lost since the learner ended, or is not there yet.
    """

    def __init__(self, dialer, address, started):
        self._dialer, self._address, self._started = dialer, address, started
        self.num_actions, self.is_refused, self.is_in_order = 0, False, False
        self._seconds = 0.0  # that it took to make the environments
        self._error = None
        self._calls = queue.SimpleQueue()  # the call, once there is one

    def run(self):
        """Play until the stream ends; return why, for a log; None: in order."""
        dialer, call = self._dialer, None
        num_failures = dialer.num_failures()
        with _open_channel(self._address, dialer._tls) as channel:
            # gRPC's thread that sends makes the environments and steps them, too: one thread less
            # between an action and its row.
            call = channel.stream_stream(METHOD)(self._steps(), metadata=dialer._metadata)
            self._calls.put(call)
            while dialer._wait(LOG_INTERVAL) != self:
                if dialer._is_stopped:
                    call.cancel()
                elif self.num_actions == 0:
                    logging.info("Waiting for the learner at %s", self._address)
        if dialer.num_failures() > num_failures:
            self._error = "the environments failed"
        elif call.code() == grpc.StatusCode.CANCELLED and self.num_actions == 0:
            # It asked others, too, and needs one answer; if it has ended, a next try tells.
            if self._seconds > SLOW:
                logging.warning(
                    "The learner at %s did not wait for the environments, which took %.0f s: it "
                    "has ended, others were faster, or its --stall_timeout_s is too short",
                    self._address, self._seconds,
                )  # fmt: skip
        elif self._error is None and call.code() != grpc.StatusCode.OK:
            self.is_refused, self.is_in_order = call.code() in _FINAL, call.code() in _IN_ORDER
            text = _TEXTS.get(call.code(), "the learner at {} says: {}")
            self._error = text.format(self._address, call.details())
        return self._error and access.printable(self._error)

    def _steps(self):
        """Yield serialized Steps to be sent."""
        try:
            call = self._calls.get()
            hello = rpcenv_pb2.Action.FromString(next(call))
            if hello.protocol_version != wire.PROTOCOL_VERSION:
                self.is_refused = True
                self._error = (
                    f"the learner at {self._address} speaks protocol version "
                    f"{hello.protocol_version}, but these environments speak "
                    f"{wire.PROTOCOL_VERSION}: update the older one"
                )
                yield rpcenv_pb2.Step(error=self._error).SerializeToString()
            else:
                options = wire.read_stream_options(dict(hello.options))
                steps = self._dialer.play(options, self._count(call), self._address)
                with contextlib.closing(steps):
                    begin = time.monotonic()
                    step = next(steps, None)
                    self._seconds = time.monotonic() - begin
                    if step is not None:
                        yield step
                    yield from steps
            next(call, None)  # so that the last Step arrives before the connection is closed
        except grpc.RpcError:  # of which the call has the status
            pass
        except StopIteration:
            self._error = f"the learner at {self._address} has ended the stream before it began"
        except (ValueError, DecodeError) as error:
            self._error = f"the learner at {self._address} sent a malformed message: {error}"
        except Exception as error:
            logging.error("%s", access.printable(traceback.format_exc()))
            self._error = f"the stream to {self._address} failed: {error!r}"
        finally:
            self._dialer._news.put(self)

    def _count(self, call):
        for request in call:
            self.num_actions += 1
            if self.num_actions == 1 and self._started is not None:
                self._started(self._address)
            yield request


def _open_channel(address, tls):
    if tls is None:
        return grpc.insecure_channel(address, _OPTIONS)
    ca, certificate, key = access.pem_bytes(tls)
    return grpc.secure_channel(
        address, grpc.ssl_channel_credentials(ca, key, certificate), _OPTIONS
    )
