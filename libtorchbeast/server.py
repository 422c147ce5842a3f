# SPDX-License-Identifier: Apache-2.0
"""Serve environments over gRPC, by the protocol in rpcenv.proto.

    Server(MyEnv, "0.0.0.0:50051", auth_token=TOKEN).run()

Needs numpy, grpcio and protobuf: no gymnasium, and nothing that is compiled here.
"""

import contextlib
import errno
import logging
import os
import queue
import re
import socket
import stat
import threading
from concurrent import futures

import grpc

from libtorchbeast import MAX_STREAMS, access, wire
from libtorchbeast.session import Session

# Of all streams: twice those of one, which may come back before its loss was noticed.
MAX_ENVS = 2 * wire.MAX_ENVS
MAX_CONNECTIONS = 128  # strangers may hold some of them for a while
GRACE = 2  # seconds in which streams end by themselves

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else two servers could share a port
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", wire.MAX_ACTION_BYTES),
    # That is the limit of what arrives; decompressed, it might be a thousand times as much.
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none
    # Clients that send nothing, or open no stream, hold a connection for some seconds.
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.max_connection_idle_ms", 20_000),  # without a stream
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.max_concurrent_streams", 2 * MAX_STREAMS),  # a connection
    ("grpc.max_metadata_size", wire.MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", wire.MAX_METADATA_BYTES),
    # Let clients ping us.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)
# Ping clients, which may be unplugged; on unix sockets they can only be stopped (Ctrl-Z).
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Where gRPC has a ping of its own under way, it sends none of those; the wait is the same.
    ("grpc.http2.ping_timeout_ms", 20_000),
)


# gRPC logs a traceback for each header that is not UTF-8, before any token is checked.
logging.getLogger("grpc._cython.cygrpc").addFilter(access.LogThrottle())


class Server:
    """Serves environments, fresh ones to each stream, to several streams at once.

    Args:
      env_class: called without arguments; returns an environment of the old Gym API or of
        Gymnasium's. Its observations may be any nest of arrays, and it need not have spaces.
      server_address: host:port or unix:/path.
      make_environments: instead of `env_class`: called with N (or None: as you like), a list of
        ints as seed (or None) and a name for error messages; returns environments.Environments or
        something alike.
      env: the name of what is played. Learners refuse servers with different names; servers
        without a name are accepted.
      busy_since: an array of MAX_STREAMS floats, for others to read: time.monotonic() of when each
        stream's environments began to do what they are doing; 0 where they wait for actions.
      tls: PEM texts of the authority that signed the learners' certificates, of the server's own
        certificate and of its key. Clients without such a certificate are refused.
      auth_token: clients that do not send this text are refused.
      insecure: serve whoever can reach the address. Without it, and without `tls` or `auth_token`,
        only addresses of this machine are allowed.
    """

    def __init__(
        self,
        env_class,
        server_address="unix:/tmp/polybeast",
        *,
        make_environments=None,
        env="",
        busy_since=None,
        tls=None,
        auth_token=None,
        insecure=False,
    ):
        self._address = server_address
        access.check_credentials(tls, auth_token)
        self._tls = tls
        self._is_safe = insecure or bool(tls or auth_token)
        self._condition = threading.Condition()  # guards all attributes below
        self._token_check = access.TokenCheck(auth_token)
        self._log = access.PeerLog()
        self._session = Session(env_class, make_environments, env, self._log)
        self._thread = None  # the one that runs us
        self._busy_since = [0.0] * MAX_STREAMS if busy_since is None else busy_since
        self._free_slots = list(range(MAX_STREAMS))  # entries of busy_since
        self._num_envs = 0  # environments of all streams
        self._stop = queue.SimpleQueue()  # a handler of a signal may put while another one does
        self._stopped = threading.Event()

    def run(self, started=None):
        """Serve until `stop`. Calls `started`, if given, with the address once clients can connect.

        Raises:
          RuntimeError: the address cannot be served on; no thread can be started for a stream; or
            this is the second run.
        """
        with self._condition:
            if self._thread is not None:
                raise RuntimeError("this server has been run before; make another one")
            self._thread = threading.get_ident()
        handler = grpc.stream_stream_rpc_method_handler(self._run_stream)  # of bytes
        # A backstop, in case that calls come in faster than _take_slot counts them.
        options = _OPTIONS if self._address.startswith("unix:") else _OPTIONS + _KEEPALIVE
        failures = []

        def fail(error):
            failures.append(error)
            self._stop.put(None)

        server = grpc.server(
            _Threads(fail), options=options, maximum_concurrent_rpcs=2 * MAX_STREAMS
        )
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("rpcenv.RPCEnvServer", {"StreamingEnv": handler})]
        )
        try:
            self._address = _bind(server, self._address, self._is_safe, self._tls)
            server.start()
            if started is not None:
                started(self._address)
            self._stop.get()
        finally:
            server.stop(None)
            with self._condition:
                self._condition.wait_for(lambda: len(self._free_slots) == MAX_STREAMS, GRACE)
            self._stopped.set()
        if failures:
            raise RuntimeError(f"cannot start a thread for a stream: {failures[0]}")

    def stop(self):
        """End all streams and `run`, and wait for that, unless called in the thread that runs."""
        with self._condition:
            if self._thread is None:
                raise RuntimeError("this server is not running")
        self._stop.put(None)
        if threading.get_ident() != self._thread:  # else we are in a handler of a signal
            self._stopped.wait()

    def _run_stream(self, requests, context):
        """Yield a serialized Step for the beginning and for each of the serialized Actions."""
        metadata = dict(context.invocation_metadata())
        refusal = self._token_check.refuse(metadata, context.peer(), self._address)
        if refusal is not None:  # before anything is made
            context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
        try:
            options = wire.read_stream_options(metadata)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        slot = self._take_slot(options.num_envs or 0, context)
        counted_envs = options.num_envs or 0  # else it is our own number, known once they are made
        name = f"{self._address} for {context.peer()}"

        def count(num_envs):
            nonlocal counted_envs
            with self._condition:
                self._num_envs += num_envs - counted_envs
                counted_envs = num_envs

        try:
            yield from self._session.play(options, requests, name, self._busy_since, slot, count)
        except wire.Refusal as error:
            self._log.error("the learner refused these environments", name, str(error))
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            with self._condition:
                self._free_slots.append(slot)
                self._num_envs -= counted_envs
                self._condition.notify_all()

    def _take_slot(self, num_envs, context):
        """Return a stream's index in busy_since; end the stream if the server is full."""
        with self._condition:
            if not self._free_slots:
                problem = f"serves {MAX_STREAMS} streams already, and no more at once"
            elif self._num_envs + num_envs > MAX_ENVS:
                problem = f"has {self._num_envs} environments, and with {num_envs} more would have "
                problem += f"more than {MAX_ENVS}: ask for fewer (--envs_per_stream)"
            else:
                self._num_envs += num_envs
                return self._free_slots.pop()
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._address} {problem}")


class _Threads(futures.Executor):
    """Runs each call in a daemon thread of its own.

    Args:
      on_failure: called with the error if no thread can be started. Raised here, it would end
        gRPC's own thread, and with it all streams, unseen.
    """

    def __init__(self, on_failure):
        self._on_failure = on_failure

    def submit(self, function, /, *args, **kwargs):
        future = futures.Future()

        def run():
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        try:
            threading.Thread(target=run, name="stream", daemon=True).start()
        except RuntimeError as error:
            future.set_exception(error)
            self._on_failure(error)
        return future


def _bind(server, address, is_safe, tls):
    """Make the gRPC server listen on `address`; return it, with the actual port for port 0.

    The socket file of a killed server is replaced.
    """
    unix = re.fullmatch(r"unix:(?://)?(.+)", address)
    tcp = re.fullmatch(r"(?:\[(.+)\]|([^:\[\]]+)):(\d{1,5})", address)
    if not (unix or (tcp and int(tcp[3]) < 2**16)):
        raise RuntimeError(f"cannot serve on {address!r}: it should be host:port or unix:/path")
    access.check_address(address, is_safe)
    # Before gRPC is asked, whose raw log line would come before our message.
    problem = _unix_problem(unix[1]) if unix else _tcp_problem(tcp[1] or tcp[2], int(tcp[3]))
    port = 0
    with contextlib.suppress(RuntimeError):
        if problem:
            pass
        elif tls is None:
            port = server.add_insecure_port(address)
        else:
            ca, certificate, key = access.pem_bytes(tls)
            credentials = grpc.ssl_server_credentials(
                [(key, certificate)], ca, require_client_auth=True
            )
            port = server.add_secure_port(address, credentials)
    if port == 0:
        problem = problem or "gRPC cannot bind to it, or not with that certificate and key"
        raise RuntimeError(f"cannot serve on {address}: {problem}")
    if tcp:
        access.warn_of_loopback(address)
    return address if unix else f"{address.rpartition(':')[0]}:{port}"


def _unix_problem(path):
    """Return why a path cannot be listened on, or None. Removes a dead server's socket.

    gRPC would take the file away from another server, which would not even notice.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(path)
        return "another server listens there; end it, or choose another address"
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(path)
        os.unlink(path)
    except OSError as error:
        reason = error.strerror or error
        in_use = error.errno == errno.EADDRINUSE
        return f"{reason}, by a file; choose another path" if in_use else reason


def _tcp_problem(host, port):
    """Return why a port cannot be listened on; None if one address of the host works."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror or error
    for family, kind, *_, where in infos:
        try:
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
            return None
        except OSError as error:
            problem = error.strerror or error
            if error.errno == errno.EADDRINUSE:
                problem = f"{problem}, by another program; end it, or choose another port"
    return problem
