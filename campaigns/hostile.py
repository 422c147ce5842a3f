# SPDX-License-Identifier: Apache-2.0
"""What damage can strangers and hostile peers do to an environment server, or to a learner?

    python campaigns/hostile.py [--streams 10000] [--seed 1] [--target learner]

Runs two servers of Catch on this machine, or two learners that listen, each a process, one with a
token, one with TLS and a token. Each has a peer, which must play all the time on its first
connections, and a client that connects again and again, while streams of all the kinds below are
opened, in random order. Then come thousands of headers that are not UTF-8, which must not fill the
log; thousands of streams at once, which must not have as many threads; and as many silent
connections as possible: how long do they keep others out? Prints Markdown; the status is 1 where a
promise was broken.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import functools
import gzip
import os
import pathlib
import random
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "helpers")]

import grpc
import numpy
import torch
from counting import free_address
from machine import print_header, read_status
from program import HELPERS, Program

import libtorchbeast
from libtorchbeast import rpcenv_pb2 as pb
from libtorchbeast import wire
from libtorchbeast.session import Session

NUM_THREADS = 8  # of attackers, so that learners find a free stream
PATIENCE = 15  # seconds for operations that take much less
NUM_ENVS = 2
LONG = 1000  # streams
# Growth of a server: malloc keeps the memory of the largest messages, in each thread, and at the
# peak several streams have one each. A leak would grow with the number of streams.
MAX_GROWTH, MAX_PEAK = 128 * 2**20, 384 * 2**20
SLACK = 4  # descriptors and threads by which gRPC's own number varies
NUM_BAD_HEADERS, MAX_LOG_GROWTH = 3000, 5000  # streams with a header that is not UTF-8; bytes
NUM_FLOOD, MAX_FLOOD_THREADS = 20_000, 160  # streams that are opened and reset at once
MAX_KINDS = 8  # of log lines about streams, of each of which a learner has one in ten seconds
LOST = ".*(?:the learner at |the stream to |the environments failed).*"  # of the dialer
EXPECTED = {  # outcomes, each with a pattern for the begin of kinds; default: INVALID_ARGUMENT
    "UNAUTHENTICATED": "token",
    "UNIMPLEMENTED": "method unknown",
    "UNAVAILABLE": "TLS with",
    "RESOURCE_EXHAUSTED": "action too long|metadata",
    "FAILED_PRECONDITION": "handshake of (another|other)",
    "stream ended": "message (of|compressed)",
    "left": ".*, then gone$|message truncated|actions, rows never read",
    "closed": "garbage|HTTP|half a TLS|frame|headers|streams|pings|no TLS",
}

# ------------------------------------------------------------------------------------------ HTTP/2

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
END_STREAM, END_HEADERS = 1, 4


def frame(kind, flags, stream, payload, length=None):
    length = len(payload) if length is None else length
    return length.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def header(name, value):
    """Return a header, text or bytes, that is neither indexed nor compressed."""
    parts = [b"\0"]
    for text in (name.encode(), value if isinstance(value, bytes) else value.encode()):
        if len(text) < 127:
            parts.append(bytes([len(text)]))
        else:
            rest, digits = len(text) - 127, [127]
            while rest > 127:
                digits.append(rest & 127 | 128)
                rest >>= 7
            parts.append(bytes([*digits, rest]))
        parts.append(text)
    return b"".join(parts)


def request(target, token=None, **more):
    """Return the headers of a stream."""
    fields = {":method": "POST", ":scheme": "http", ":path": target.method, ":authority": "server"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    fields["auth-token"] = token or target.token
    fields |= {key.replace("_", "-"): value for key, value in more.items()}
    return b"".join(header(key, value) for key, value in fields.items())


BEGIN = PREFACE + frame(SETTINGS, 0, 0, b"")

# ----------------------------------------------------------------------------------------- attacks


class Target:
    """A process with an open port, and what can be measured of it."""

    def __init__(self, folder, name, with_tls):
        self.name, self.with_tls, self.folder = name, with_tls, folder
        self.address = free_address()
        self.token = secrets.token_hex(16)
        self.token_file = folder / f"{name}.token"
        self.token_file.touch(mode=0o600)
        self.token_file.write_text(self.token)
        self.tls = self.strange_tls = None
        if with_tls:
            files = ("own/ca.pem", "own/learner.pem", "own/learner.key")
            self.tls = tuple((folder / file).read_bytes() for file in files)
            files = ("own/ca.pem", "strange/learner.pem", "strange/learner.key")
            self.strange_tls = tuple((folder / file).read_bytes() for file in files)
        self.programs = []

    def start(self, script, certificate, *arguments):
        """Start a program of tests/helpers, which chooses GRPC_VERBOSITY itself."""
        arguments += ("--end_with_stdin --auth_token_file", self.token_file)
        if self.with_tls:
            own = self.folder / "own"
            arguments += ("--tls_cert", own / f"{certificate}.pem", "--tls_ca", own / "ca.pem")
            arguments += ("--tls_key", own / f"{certificate}.key")
        prefix = ("env", "-u", "GRPC_VERBOSITY")
        program = Program(HELPERS / script, *arguments, prefix=prefix, stdin=subprocess.PIPE)
        self.programs.append(program)

    def wait_for(self, text):
        self.programs[0].wait_until(lambda: text in self.log())

    def log(self):
        return self.programs[0].output

    def resources(self):
        """Return resident bytes, descriptors and threads."""
        return (
            1024 * read_status(self.pid, "VmRSS"),
            len(os.listdir(f"/proc/{self.pid}/fd")),
            read_status(self.pid, "Threads"),
        )

    def peak(self):
        return 1024 * read_status(self.pid, "VmHWM")

    def connect(self):
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), PATIENCE)

    def end(self):
        with contextlib.ExitStack() as stack:  # which kills those that do not end
            for program in self.programs:
                stack.enter_context(program).process.stdin.close()
            for program in self.programs:
                program.end(PATIENCE)


class EnvServer(Target):
    """An environment server; its peer is a learner."""

    what, method, max_connections = "server", "/rpcenv.RPCEnvServer/StreamingEnv", 128

    def __init__(self, folder, name, with_tls):
        super().__init__(folder, name, with_tls)
        arguments = ("--env Catch --num_servers 1 --server_address", self.address)
        self.start("catch_env.py", "server", *arguments)
        self.wait_for("serving on")
        (self.pid,) = self.programs[0].members("spawn_main")

    def kinds(self):
        own = TLS_TARGET if self.with_tls else PLAIN_TARGET | PLAIN_SERVER
        return ANY_TARGET | ANY_SERVER | own

    def access(self):
        tls = self.tls and tuple(text.decode() for text in self.tls)
        return {"tls": tls, "auth_token": self.token}

    def knock(self):
        """Be let in, or raise OSError."""
        libtorchbeast.query_server(self.address, 1, PATIENCE, **self.access())

    def peer(self):
        return Learner(self)

    def broken(self, seconds):
        """Return what the log shows to be wrong, after so many seconds of attacks."""
        if "died and is replaced" in self.log() or "Traceback" in self.log():
            return ["it crashed, or an exception was not caught"]
        return []


class ListeningLearner(Target):
    """A learner that listens; its peer is a process of environments that dial in."""

    what, method = "learner", "/rpcenv.RPCLearner/StreamingLearner"
    max_streams = 64
    max_connections = max_streams + 128

    def __init__(self, folder, name, with_tls):
        super().__init__(folder, name, with_tls)
        arguments = f"--listen {self.address} --total_steps 1000000000 --batch_size 2 "
        arguments += f"--unroll_length 5 --max_streams {self.max_streams} --disable_checkpoint "
        arguments += f"--envs_per_stream {NUM_ENVS} --disable_cuda --xpid run --savedir"
        self.start("catch_poly.py", "server", arguments, folder / name)
        self.pid = self.programs[0].pid
        arguments = ("--env Catch --num_servers 1 --learner", self.address)
        self.start("catch_env.py", "learner", *arguments)
        self.wait_for("has come")

    def kinds(self):
        return ANY_TARGET | ANY_LEARNER | (TLS_TARGET if self.with_tls else PLAIN_TARGET)

    def knock(self):
        """Be let in, or raise OSError."""
        outcome = call(self, leave=True)
        if outcome != "left":
            raise OSError(outcome)

    def peer(self):
        return Environments(self)

    def broken(self, seconds):
        """Return what the log shows to be wrong, after so many seconds of attacks."""
        broken = ["a traceback"] if "Traceback" in self.log() else []
        lines = [line for line in self.log().split("\n")]
        if not all(line.isprintable() for line in lines):
            broken.append("a raw line in the log")
        events = [line for line in lines if line.startswith("[") and " stream" in line]
        if len(events) > MAX_KINDS * (seconds / 10 + 2):
            broken.append(f"{len(events)} lines of streams in the log of {seconds:.0f} s")
        return broken


def say(target, data):
    """Send this, close our end, and wait until the server closes its own."""
    with target.connect() as connection, contextlib.suppress(ConnectionError):
        connection.sendall(data)
        with contextlib.suppress(OSError):  # the server has closed its end
            connection.shutdown(socket.SHUT_WR)
        while connection.recv(2**16):
            pass
    return "closed"


def converse(target, data):
    """Send this and stay; return how the server ends the stream, or the whole connection."""
    with target.connect() as connection, connection.makefile("rb") as file:
        connection.sendall(data)
        while len(head := file.read(9)) == 9:
            kind, flags = head[3:5]
            file.read(int.from_bytes(head[:3], "big"))
            if kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
                return "stream ended"
            if kind == GOAWAY:
                return "sent away"
    return "closed"


def vanish(target, data=b""):
    """Send this and cut the connection."""
    with target.connect() as connection:
        connection.sendall(data)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    return "left"


def call(target, messages=(), token=None, method=None, tls=None, leave=False, stay=True, **options):
    """Open a stream as the target's peers do; return how it ends.

    Args:
      leave: cut the connection after the first message instead.
      stay: do not end our half after the messages.
      options: of the stream, as metadata; None leaves one out.
    """
    settings = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    tls = tls or target.tls
    if tls is None:
        channel = grpc.insecure_channel(target.address, settings)
    else:
        ca, certificate, key = tls
        channel_credentials = grpc.ssl_channel_credentials(ca, key or None, certificate or None)
        channel = grpc.secure_channel(target.address, channel_credentials, settings)
    metadata = {"num-envs": str(NUM_ENVS), "auth-token": token or target.token}
    metadata |= {key.replace("_", "-"): value for key, value in options.items()}
    metadata = [(key, value) for key, value in metadata.items() if value is not None]
    ended = threading.Event()

    def say_and_stay():
        yield from messages
        if stay:
            ended.wait(PATIENCE)

    try:
        method = channel.stream_stream(method or target.method)
        stream = method(say_and_stay(), metadata=metadata, timeout=PATIENCE)
        for _ in stream:
            if leave:
                return "left"
        return "OK"
    except grpc.RpcError as error:
        return error.code().name
    finally:
        ended.set()
        channel.close()


def action(**kwargs):
    array = {"dtype": pb.INT64, "shape": [NUM_ENVS], "data": bytes(8 * NUM_ENVS)} | kwargs
    return pb.Action(action=pb.Nest(array=pb.Array(**array))).SerializeToString()


@functools.cache
def first(**handshake):
    """Return a good first message of Catch, but for what is given, as bytes."""
    import catch_env

    from beast.envs.environments import Environments

    def make(num_envs, seed, name):
        return Environments(catch_env.Catch, num_envs, seed, name)

    options = wire.StreamOptions(NUM_ENVS, None, False, True)
    session = Session(None, make, "Catch", None)
    step = pb.Step.FromString(next(session.play(options, iter(()), "", [0.0], 0)))
    for key, value in handshake.items():
        setattr(step.handshake, key, value)
    return step.SerializeToString()


def row(**array):
    """Return a first message whose observation is as given."""
    step = pb.Step.FromString(first())
    step.observation.array.MergeFrom(pb.Array(**array | {"shape": []}))
    step.observation.array.shape[:] = array.get("shape", step.observation.array.shape)
    return step.SerializeToString()


def observation(nest):
    return first() + wire._head(2, len(nest)) + nest


def nested(depth):
    message = b""
    for number in (*[2] * depth, 1):
        message = wire._head(number, len(message)) + message
    return message


def bomb(target):
    """Send a message that is a thousand times as large when decompressed."""
    data = b"\1" + len(BOMB).to_bytes(4, "big") + BOMB
    frames = [frame(DATA, 0, 1, data[i : i + 2**14]) for i in range(0, len(data), 2**14)]
    head = request(target, grpc_encoding="gzip")
    return converse(target, BEGIN + frame(HEADERS, END_HEADERS, 1, head) + b"".join(frames))


BOMB = gzip.compress(bytes(50 * 2**20))  # 50 KB
assert len(BOMB) < 2**16  # what may be sent before the server asks for more


def open_stream(target, tail):
    """Return a stream with the right token, as bytes, and then `tail`."""
    head = frame(HEADERS, END_HEADERS, 1, request(target, num_envs=str(NUM_ENVS)))
    return BEGIN + head + tail


def prefixed(message, length):
    return frame(DATA, 0, 1, b"\0" + length.to_bytes(4, "big") + message)


UGLY = "\x1b[2J\0\n[INFO forged]\u2028"
NAN = wire._head(3, 4 * NUM_ENVS) + b"\xff" * 4 * NUM_ENVS  # rewards
RANDOM = random.Random(1)
WIDE = wire._head(2, 0) * 500_000  # half a million empty nests, 1 MB

ANY_TARGET = {
    "garbage": lambda t: say(t, RANDOM.randbytes(RANDOM.randrange(1, 5000))),
    "HTTP/1.1": lambda t: say(t, b"GET / HTTP/1.1\r\nHost: server\r\n\r\n"),
    "nothing, then gone": vanish,
    "preface, then gone": lambda t: vanish(t, BEGIN),
    "half a TLS hello": lambda t: say(t, bytes.fromhex("1603010200010001fc0303") + bytes(40)),
    "token missing": lambda t: call(t, auth_token=None),
    "token wrong": lambda t: call(t, token=secrets.token_hex(16)),
    "token with a tail": lambda t: call(t, token=t.token + "0"),
    "metadata of 100 KB": lambda t: call(t, seed="1," * 50_000),
    "method unknown": lambda t: call(t, method=t.method + "Shell"),
    "opened, then gone": lambda t: call(t, leave=True),
}
ANY_SERVER = {
    "stream option unknown": lambda t: call(t, newest_frame_only="perhaps"),
    "option of 999,999,999 environments": lambda t: call(t, num_envs="999999999"),
    "action empty": lambda t: call(t, [b""]),
    "action garbage": lambda t: call(t, [b"\x0a\xff\xff\xff"]),
    "action too deep": lambda t: call(t, [nested(50)]),
    "action too wide": lambda t: call(t, [wire._head(1, len(WIDE)) + WIDE]),
    "action of a wrong shape": lambda t: call(t, [action(shape=[3], data=bytes(24))]),
    "action of a huge shape": lambda t: call(t, [action(shape=[NUM_ENVS, 2**62, 2**62])]),
    "action too long": lambda t: call(t, [bytes(wire.MAX_ACTION_BYTES + 1)]),
}
ANY_LEARNER = {
    "nothing said, then half closed": lambda t: call(t, stay=False),
    "step empty": lambda t: call(t, [b""]),
    "step garbage": lambda t: call(t, [b"\x0a\xff\xff\xff"]),
    "handshake of another version": lambda t: call(t, [first(protocol_version=9)]),
    "handshake of another game": lambda t: call(t, [first(env=UGLY)]),
    "handshake of other spaces": lambda t: call(t, [first(spaces=UGLY * 1000)]),
    "handshake that is not UTF-8": lambda t: call(t, [b"\x0a\x06\x1a\x04\xff\xfe\xff\xff"]),
    "handshake of 0 environments": lambda t: call(t, [first(num_envs=0)]),
    "handshake of 4 billion environments": lambda t: call(t, [first(num_envs=2**32 - 1)]),
    "error of 1 MB": lambda t: call(t, [pb.Step(error=UGLY * 50_000).SerializeToString()]),
    "first step of 8 MB": lambda t: call(t, [first() + bytes(2) * 2**22]),
    "row too deep": lambda t: call(t, [observation(nested(50))]),
    "row too wide": lambda t: call(t, [observation(WIDE)]),
    "row of a wrong shape": lambda t: call(t, [row(shape=[NUM_ENVS, 1, 10, 6])]),
    "row of a huge shape": lambda t: call(t, [row(shape=[NUM_ENVS, 2**62, 2**62])]),
    "good row, then garbage": lambda t: call(t, [first(), b"\x0a\xff\xff\xff"]),
    "good row, then not a number": lambda t: call(t, [first(), first() + NAN]),
    "good row, then nothing": lambda t: call(t, [first()], stay=False),
    "good row, then gone": lambda t: call(t, [first()], leave=True),
}
PLAIN_TARGET = {  # raw HTTP/2 that no gRPC client would send
    "frame truncated": lambda t: say(t, BEGIN + frame(HEADERS, END_HEADERS, 1, b"", 10_000)),
    "frame of 16 MB announced": lambda t: say(t, BEGIN + frame(DATA, 0, 1, b"x", 2**24 - 1)),
    "frames unknown and odd": lambda t: say(
        t, BEGIN + b"".join(frame(RANDOM.randrange(256), RANDOM.randrange(256), i, b"odd")
                            for i in range(20))),
    "headers of 1 MB": lambda t: say(
        t, BEGIN + frame(HEADERS, 0, 1, request(t))
        + b"".join(frame(CONTINUATION, END_HEADERS * (i == 63), 1, header("x", "y" * 16_000))
                   for i in range(64))),
    "headers without end": lambda t: say(t, BEGIN + frame(HEADERS, 0, 1, request(t))),
    "streams reset at once": lambda t: say(
        t, BEGIN + b"".join(frame(HEADERS, END_HEADERS, i, request(t, "x"))
                            + frame(RST_STREAM, 0, i, bytes(4)) for i in range(1, 200, 2))),
    "pings": lambda t: say(t, BEGIN + frame(PING, 0, 0, bytes(8)) * 500),
    "message truncated": lambda t: vanish(t, open_stream(t, prefixed(action()[:5], 100))),
    "message compressed a thousandfold": bomb,
    "actions, rows never read": lambda t: vanish(
        t, open_stream(t, prefixed(action(), len(action())) * 200)),
}  # fmt: skip
PLAIN_SERVER = {  # a learner, whose gRPC is C++'s, waits for the rest
    "message of 4 GB announced": lambda t: converse(t, open_stream(t, prefixed(b"x", 2**32 - 1)))
}
TLS_TARGET = {
    "TLS without certificate": lambda t: call(t, tls=(t.tls[0], None, None)),
    "TLS with a stranger's certificate": lambda t: call(t, tls=t.strange_tls),
    "no TLS": lambda t: say(t, BEGIN + frame(HEADERS, END_HEADERS, 1, request(t))),
}

# ---------------------------------------------------------------------------------------- learners


class Peer:
    """Who uses a target as it is meant to be used. One client more connects again and again."""

    interval = 1  # seconds in which there are to be steps

    def __init__(self, target, *functions):
        self.target = target
        self.stop = threading.Event()
        self.seconds = []  # that connecting took
        self.failures = []
        self.rates = []  # steps a second, in each interval
        functions += (self.knock, self.measure)
        self.threads = [threading.Thread(target=function) for function in functions]
        for thread in self.threads:
            thread.start()

    def knock(self):
        while not self.stop.wait(0.2):
            begin = time.monotonic()
            try:
                self.target.knock()
                self.seconds.append(time.monotonic() - begin)
            except OSError as error:
                self.failures.append(str(error))

    def measure(self):
        before = self.count()
        while not self.stop.wait(self.interval):
            count = self.count()
            self.rates.append((count - before) // self.interval)
            before = count

    def problems(self):
        disturbed = [f"disturbed: {self.rates}"] if not self.rates or min(self.rates) == 0 else []
        return self.failures + disturbed

    def close(self):
        self.stop.set()
        for thread in self.threads:
            thread.join()


class Learner(Peer):
    """A learner with two streams to a server."""

    def __init__(self, target):
        self.queue = libtorchbeast.BatchingQueue(minimum_batch_size=4, maximum_batch_size=4)
        self.batcher = libtorchbeast.DynamicBatcher()
        self.pool = libtorchbeast.ActorPool(
            20, self.queue, self.batcher, [target.address] * 2, (), dict_outputs=True,
            num_envs=4, reconnect=True, **target.access(),
        )  # fmt: skip
        super().__init__(target, self.pool.run, self.infer, self.learn, self.listen)

    def infer(self):
        for batch in self.batcher:
            rows, state = batch.get_inputs()
            action = torch.zeros(rows["reward"].shape, dtype=torch.int64)
            batch.set_outputs(({"action": action}, state))
            self.stop.wait(0.01)  # leave the cores to the attackers

    def learn(self):
        for _ in self.queue:
            pass

    def count(self):
        return self.pool.count()

    def listen(self):
        with contextlib.suppress(StopIteration):
            while True:
                self.failures.append(self.pool.next_event())

    def problems(self):
        return super().problems() + ["reconnected"] * self.pool.num_reconnects()

    def close(self):
        self.stop.set()
        self.queue.close()
        self.batcher.close()
        super().close()


class Environments(Peer):
    """The environments of a ListeningLearner, which plays and learns."""

    interval = 10  # it logs its steps from time to time

    def count(self):
        steps = re.findall(r"\| ([\d,]+) steps \|", self.target.log())
        return int(steps[-1].replace(",", "")) if steps else 0

    def problems(self):
        log = self.target.programs[1].output.partition("plays for")[2]
        return super().problems() + re.findall(LOST, log)


def starve(target):
    """Hold as many silent connections as possible; return the seconds until a peer can connect
    again, and until the last of them has been closed."""
    with contextlib.ExitStack() as stack:
        silent = []
        for i in range(target.max_connections + 128):
            with contextlib.suppress(OSError):
                connection = stack.enter_context(target.connect())
                if not target.with_tls and i % 2:
                    connection.sendall(BEGIN + frame(HEADERS, 0, 1, b""))  # headers to come
                silent.append(connection)
        begin = time.monotonic()
        while True:
            try:
                target.knock()
                break
            except OSError:
                if time.monotonic() > begin + 90:
                    raise
        let_in = time.monotonic() - begin
        for connection in silent:
            connection.settimeout(max(0.1, begin + 60 - time.monotonic()))
            with contextlib.suppress(OSError):
                while connection.recv(2**16):
                    pass
        return let_in, time.monotonic() - begin


def fill_log(target):
    """Send headers that are not UTF-8, without a token; return by how much the log grows."""
    size = len(target.log())
    head = request(target, "none") + header("x", b"\xff" * 20)
    streams = range(1, 61, 2)  # as many as a connection may open
    data = BEGIN + b"".join(frame(HEADERS, END_HEADERS | END_STREAM, i, head) for i in streams)
    for _ in range(NUM_BAD_HEADERS // len(streams)):
        say(target, data)
    return len(target.log()) - size


def flood(target):
    """Open and reset streams, as fast as can be; return the largest number of threads."""
    head = request(target, "none")
    data = BEGIN + b"".join(
        frame(HEADERS, END_HEADERS, i, head) + frame(RST_STREAM, 0, i, bytes(4))
        for i in range(1, NUM_FLOOD // 5, 2)
    )
    connections = [target.connect() for _ in range(10)]
    threads = [threading.Thread(target=c.sendall, args=(data,)) for c in connections]
    for thread in threads:
        thread.start()
    end, most = time.monotonic() + 3, 0
    while time.monotonic() < end:
        most = max(most, target.resources()[2])
    for connection, thread in zip(connections, threads, strict=True):
        connection.close()
        thread.join()
    return most


def settle(target, goal=(0, 0, 0)):
    """Wait until ended connections are cleaned up; return the least resources seen."""
    least, deadline = target.resources(), time.monotonic() + (40 if any(goal) else 5)
    while time.monotonic() < deadline and any(n > g for n, g in zip(least, goal, strict=True)):
        time.sleep(0.1)
        least = tuple(map(min, least, target.resources()))
    return least


def expect(kind):
    """Return the outcome that streams of this kind are to have."""
    outcomes = [name for name, pattern in EXPECTED.items() if re.match(pattern, kind)]
    return outcomes[0] if outcomes else "INVALID_ARGUMENT"


def attack(targets, num_streams, seed):
    """Open so many streams; return counters of outcomes by kind, and unexpected ones as texts."""
    jobs, choose = [], random.Random(seed)
    for i in range(num_streams):
        target = targets[i % 2]
        kinds = list(target.kinds().items())
        jobs.append((target, *kinds[(i // 2) % len(kinds)]))
    choose.shuffle(jobs)
    outcomes, odd = collections.defaultdict(collections.Counter), []

    def open_hostile(job):
        target, kind, function = job
        try:
            return target, kind, function(target)
        except OSError as error:
            return target, kind, type(error).__name__

    with concurrent.futures.ThreadPoolExecutor(NUM_THREADS) as pool:
        for target, kind, outcome in pool.map(open_hostile, jobs):
            outcomes[kind][outcome] += 1
            if outcome != expect(kind):
                odd.append(f"{target.name}: {kind}: {outcome}")
    return outcomes, odd


def run(Target, num_streams, seed, folder):
    """Return a report in Markdown, and broken promises as texts."""
    for name in ("own", "strange"):
        command = ["sh", ROOT / "scripts" / "make_certificates.sh", folder / name, "localhost"]
        subprocess.run(command, check=True, capture_output=True)
    with contextlib.ExitStack() as stack:
        targets = []
        for name, with_tls in (("token", False), ("TLS and token", True)):
            targets.append(Target(folder, name, with_tls))
            stack.callback(targets[-1].end)
        peers = [stack.enter_context(contextlib.closing(t.peer())) for t in targets]
        kinds = targets[0].kinds() | targets[1].kinds()
        attack(targets, 2 * len(kinds), seed)  # for memory that is allocated once
        before = [settle(t) for t in targets]
        first_peaks = [t.peak() for t in targets]
        begin = time.monotonic()
        outcomes, broken = attack(targets, num_streams, seed)
        seconds = time.monotonic() - begin
        after = [settle(t, (2**50, *b[1:])) for t, b in zip(targets, before, strict=True)]
        for peer in peers:
            peer.stop.set()
            broken += [f"{peer.target.name}: its peer: {text}" for text in peer.problems()]
        log_growth = fill_log(targets[0])
        if log_growth > MAX_LOG_GROWTH:
            broken.append(f"{targets[0].name}: headers that are not UTF-8 fill its log")
        num_threads = flood(targets[0])
        if num_threads - before[0][2] > MAX_FLOOD_THREADS:
            broken.append(f"{targets[0].name}: {num_threads} threads in a flood of streams")
        starved = [starve(t) if num_streams >= LONG else None for t in targets]
        peaks = [t.peak() for t in targets]
        for target in targets:
            broken += [f"{target.name}: {text}" for text in target.broken(time.monotonic() - begin)]

    lines = [f"{num_streams:,} streams in {seconds:.0f} s, by kind and outcome:", ""]
    lines += ["| kind | streams | outcome |", "|---|---|---|"]
    for kind in kinds:
        counts = outcomes[kind]
        texts = ", ".join(f"{name} {count:,}" for name, count in counts.most_common())
        lines.append(f"| {kind} | {counts.total():,} | {texts} |")
    titles = [Target.what, "memory before", "after", "peak", "descriptors", "threads"]
    titles += ["steps/s, lowest", "connecting took, median, most"]
    titles += ["silent connections kept others out, and lasted"]
    lines += ["", f"Log of {NUM_BAD_HEADERS:,} headers that are not UTF-8: {log_growth:,} bytes."]
    lines += [f"Threads in a flood of {NUM_FLOOD:,} streams: {num_threads}."]
    lines += ["", f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for target, peer, b, a, first_peak, peak, silence in zip(
        targets, peers, before, after, first_peaks, peaks, starved, strict=True
    ):
        growth = [after - before for after, before in zip(a, b, strict=True)]
        if growth[0] > MAX_GROWTH or max(growth[1:]) > SLACK or peak - first_peak > MAX_PEAK:
            broken.append(f"{target.name}: it grew: {b} became {a}, peak {first_peak} {peak}")
        if silence and max(silence) >= 60:
            broken.append(f"{target.name}: silent connections stay open: {silence}")
        waits = sorted(peer.seconds)
        cells = [
            target.name, f"{b[0] / 1e6:.1f} MB", f"{a[0] / 1e6:.1f} MB", f"{peak / 1e6:.1f} MB",
            f"{b[1]}, {a[1]}", f"{b[2]}, {a[2]}", min(peer.rates, default=0),
            f"{waits[len(waits) // 2]:.2f}, {waits[-1]:.2f} s" if waits else "",
            "{:.1f} s, {:.1f} s".format(*silence) if silence else "",
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines), broken


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--streams",
        type=int,
        default=10_000,
        help=f"With fewer than {LONG:,}, no silent connections are tried. (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the order (default: 1)")
    targets = {"server": EnvServer, "learner": ListeningLearner}
    parser.add_argument("--target", choices=targets, default="server", help="(default: server)")
    flags = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    torch.set_num_threads(1)
    print_header(grpc, numpy, torch)
    print(flush=True)
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        Target = targets[flags.target]
        report, broken = run(Target, flags.streams, flags.seed, pathlib.Path(folder))
    print(report)
    for promise in broken[:50]:
        print("broken:", promise, file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
