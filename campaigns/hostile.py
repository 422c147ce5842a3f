# SPDX-License-Identifier: Apache-2.0
"""What damage can strangers, and hostile learners, do to an environment server?

    python campaigns/hostile.py [--streams 10000] [--seed 1]

Runs two servers of Catch on this machine, each a process, one with a token, one with TLS and a
token. Each has a learner, which must get rows all the time on its first connections, and a client
that connects again and again, while streams of all the KINDS below are opened, in random order.
Then come thousands of headers that are not UTF-8, which must not fill the log; and as many silent
connections as possible: how long do they keep a learner out? Prints Markdown; the status is 1 where
a promise was broken.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import gzip
import os
import pathlib
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import grpc  # noqa: E402
from machine import descendants, print_header, read_status  # noqa: E402

import libtorchbeast  # noqa: E402
from libtorchbeast import rpcenv_pb2 as pb  # noqa: E402
from libtorchbeast import server, wire  # noqa: E402

METHOD = "/rpcenv.RPCEnvServer/StreamingEnv"
NUM_THREADS = 8  # of attackers, so that learners find a free stream
PATIENCE = 15  # seconds for operations that take much less
NUM_ENVS = 2
LONG = 1000  # streams
# Growth of a server: malloc keeps the memory of the largest messages, in each thread, and at the
# peak several streams have one each. A leak would grow with the number of streams.
MAX_GROWTH, MAX_PEAK = 128 * 2**20, 384 * 2**20
SLACK = 4  # descriptors and threads by which gRPC's own number varies
NUM_BAD_HEADERS, MAX_LOG_GROWTH = 3000, 5000  # streams with a header that is not UTF-8; bytes
EXPECTED = {  # statuses of streams that are refused with a reason
    "token missing": "UNAUTHENTICATED",
    "token wrong": "UNAUTHENTICATED",
    "token with a tail": "UNAUTHENTICATED",
    "stream option unknown": "INVALID_ARGUMENT",
    "option of 999,999,999 environments": "INVALID_ARGUMENT",
    "method unknown": "UNIMPLEMENTED",
    "TLS without certificate": "UNAVAILABLE",
    "TLS with a stranger's certificate": "UNAVAILABLE",
    "action empty": "INVALID_ARGUMENT",
    "action garbage": "INVALID_ARGUMENT",
    "action too deep": "INVALID_ARGUMENT",
    "action too wide": "INVALID_ARGUMENT",
    "action of a wrong shape": "INVALID_ARGUMENT",
    "action of a huge shape": "INVALID_ARGUMENT",
    "action too long": "RESOURCE_EXHAUSTED",
    "message of 4 GB announced": "stream ended",
    "message compressed a thousandfold": "stream ended",
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


def request(token, path=METHOD, **more):
    """Return the headers of a stream."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "server"}
    fields |= {"content-type": "application/grpc", "te": "trailers", "auth-token": token}
    fields |= {key.replace("_", "-"): value for key, value in more.items()}
    return b"".join(header(key, value) for key, value in fields.items())


BEGIN = PREFACE + frame(SETTINGS, 0, 0, b"")

# ----------------------------------------------------------------------------------------- attacks


class Target:
    """A server, and what can be measured of it."""

    def __init__(self, folder, name, with_tls):
        self.name, self.with_tls = name, with_tls
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.token = secrets.token_hex(16)
        token_file = folder / f"{name}.token"
        token_file.touch(mode=0o600)
        token_file.write_text(self.token)
        arguments = ["--env", "Catch", "--num_servers", "1", "--server_address", self.address]
        arguments += ["--end_with_stdin", "--auth_token_file", str(token_file)]
        self.tls = self.strange_tls = None
        if with_tls:
            arguments += [f"--tls_cert={folder}/own/server.pem"]
            arguments += [f"--tls_key={folder}/own/server.key", f"--tls_ca={folder}/own/ca.pem"]
            files = ("own/ca.pem", "own/learner.pem", "own/learner.key")
            self.tls = tuple((folder / file).read_bytes() for file in files)
            files = ("own/ca.pem", "strange/learner.pem", "strange/learner.key")
            self.strange_tls = tuple((folder / file).read_bytes() for file in files)
        self.log_path = folder / f"{name}.log"
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "helpers" / "catch_env.py"), *arguments],
                stdin=subprocess.PIPE, stdout=log, stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + 60
        while "serving on" not in self.log():
            assert time.monotonic() < deadline and self.process.poll() is None, self.log()
            time.sleep(0.1)
        (self.pid,) = [
            pid for pid in descendants(self.process.pid)
            if b"spawn_main" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        ]  # fmt: skip

    def log(self):
        return self.log_path.read_text(errors="replace")

    def resources(self):
        """Return resident bytes, descriptors and threads of the server."""
        return (
            1024 * read_status(self.pid, "VmRSS"),
            len(os.listdir(f"/proc/{self.pid}/fd")),
            read_status(self.pid, "Threads"),
        )

    def peak(self):
        return 1024 * read_status(self.pid, "VmHWM")

    def access(self):
        tls = self.tls and tuple(text.decode() for text in self.tls)
        return {"tls": tls, "auth_token": self.token}

    def connect(self):
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), PATIENCE)

    def end(self):
        self.process.stdin.close()
        self.process.wait(PATIENCE)


def say(target, data):
    """Send this, close our end, and wait until the server closes its own."""
    with target.connect() as connection, contextlib.suppress(ConnectionError, BrokenPipeError):
        connection.sendall(data)
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


def call(target, messages=(), token=None, method=METHOD, tls=None, leave=False, **options):
    """Open a stream as learners do; return how it ends.

    Args:
      leave: cut the connection after the first row instead.
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
        ended.wait(PATIENCE)

    try:
        stream = channel.stream_stream(method)(say_and_stay(), metadata=metadata, timeout=PATIENCE)
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


def nested(depth):
    message = b""
    for number in (*[2] * depth, 1):
        message = wire._head(number, len(message)) + message
    return message


def bomb(target):
    """Send a message that is a thousand times as large when decompressed."""
    data = b"\1" + len(BOMB).to_bytes(4, "big") + BOMB
    frames = [frame(DATA, 0, 1, data[i : i + 2**14]) for i in range(0, len(data), 2**14)]
    head = request(target.token, grpc_encoding="gzip")
    return converse(target, BEGIN + frame(HEADERS, END_HEADERS, 1, head) + b"".join(frames))


BOMB = gzip.compress(bytes(50 * 2**20))  # 50 KB
assert len(BOMB) < 2**16  # what may be sent before the server asks for more


def open_stream(target, tail):
    """Return a stream with the right token, as bytes, and then `tail`."""
    head = frame(HEADERS, END_HEADERS, 1, request(target.token, num_envs=str(NUM_ENVS)))
    return BEGIN + head + tail


def prefixed(message, length):
    return frame(DATA, 0, 1, b"\0" + length.to_bytes(4, "big") + message)


RANDOM = random.Random(1)
WIDE = wire._head(2, 0) * 500_000  # half a million empty nests, 1 MB

ANY_SERVER = {
    "garbage": lambda t: say(t, RANDOM.randbytes(RANDOM.randrange(1, 5000))),
    "HTTP/1.1": lambda t: say(t, b"GET / HTTP/1.1\r\nHost: server\r\n\r\n"),
    "nothing, then gone": vanish,
    "preface, then gone": lambda t: vanish(t, BEGIN),
    "half a TLS hello": lambda t: say(t, bytes.fromhex("1603010200010001fc0303") + bytes(40)),
    "token missing": lambda t: call(t, auth_token=None),
    "token wrong": lambda t: call(t, token=secrets.token_hex(16)),
    "token with a tail": lambda t: call(t, token=t.token + "0"),
    "metadata of 100 KB": lambda t: call(t, seed="1," * 50_000),
    "stream option unknown": lambda t: call(t, newest_frame_only="perhaps"),
    "option of 999,999,999 environments": lambda t: call(t, num_envs="999999999"),
    "method unknown": lambda t: call(t, method="/rpcenv.RPCEnvServer/Shell"),
    "opened, then gone": lambda t: call(t, leave=True),
    "action empty": lambda t: call(t, [b""]),
    "action garbage": lambda t: call(t, [b"\x0a\xff\xff\xff"]),
    "action too deep": lambda t: call(t, [nested(50)]),
    "action too wide": lambda t: call(t, [wire._head(1, len(WIDE)) + WIDE]),
    "action of a wrong shape": lambda t: call(t, [action(shape=[3], data=bytes(24))]),
    "action of a huge shape": lambda t: call(t, [action(shape=[NUM_ENVS, 2**62, 2**62])]),
    "action too long": lambda t: call(t, [bytes(wire.MAX_ACTION_BYTES + 1)]),
}
PLAIN_SERVER = {  # raw HTTP/2 that no gRPC client would send
    "frame truncated": lambda t: say(t, BEGIN + frame(HEADERS, END_HEADERS, 1, b"", 10_000)),
    "frame of 16 MB announced": lambda t: say(t, BEGIN + frame(DATA, 0, 1, b"x", 2**24 - 1)),
    "frames unknown and odd": lambda t: say(
        t, BEGIN + b"".join(frame(RANDOM.randrange(256), RANDOM.randrange(256), i, b"odd")
                            for i in range(20))),
    "headers of 1 MB": lambda t: say(
        t, BEGIN + frame(HEADERS, 0, 1, request(t.token))
        + b"".join(frame(CONTINUATION, END_HEADERS * (i == 63), 1, header("x", "y" * 16_000))
                   for i in range(64))),
    "headers without end": lambda t: say(t, BEGIN + frame(HEADERS, 0, 1, request(t.token))),
    "streams reset at once": lambda t: say(
        t, BEGIN + b"".join(frame(HEADERS, END_HEADERS, i, request("x"))
                            + frame(RST_STREAM, 0, i, bytes(4)) for i in range(1, 200, 2))),
    "pings": lambda t: say(t, BEGIN + frame(PING, 0, 0, bytes(8)) * 500),
    "message of 4 GB announced": lambda t: converse(
        t, open_stream(t, prefixed(b"x", 2**32 - 1))),
    "message truncated": lambda t: vanish(t, open_stream(t, prefixed(action()[:5], 100))),
    "message compressed a thousandfold": bomb,
    "actions, rows never read": lambda t: vanish(
        t, open_stream(t, prefixed(action(), len(action())) * 200)),
}  # fmt: skip
TLS_SERVER = {
    "TLS without certificate": lambda t: call(t, tls=(t.tls[0], None, None)),
    "TLS with a stranger's certificate": lambda t: call(t, tls=t.strange_tls),
    "no TLS": lambda t: say(t, BEGIN + frame(HEADERS, END_HEADERS, 1, request(t.token))),
}
KINDS = ANY_SERVER | PLAIN_SERVER | TLS_SERVER


# ---------------------------------------------------------------------------------------- learners


class Learner:
    """A learner with two streams, and a client that connects again and again."""

    def __init__(self, target):
        import torch

        self.target, self.torch = target, torch
        self.queue = libtorchbeast.BatchingQueue(minimum_batch_size=4, maximum_batch_size=4)
        self.batcher = libtorchbeast.DynamicBatcher()
        self.pool = libtorchbeast.ActorPool(
            20, self.queue, self.batcher, [target.address] * 2, (), dict_outputs=True,
            num_envs=4, reconnect=True, **target.access(),
        )  # fmt: skip
        self.stop = threading.Event()
        self.seconds = []  # that queries took
        self.failures = []
        self.rates = []  # steps in each second
        functions = [self.pool.run, self.infer, self.learn, self.query, self.count, self.listen]
        self.threads = [threading.Thread(target=function) for function in functions]
        for thread in self.threads:
            thread.start()

    def infer(self):
        for batch in self.batcher:
            rows, state = batch.get_inputs()
            action = self.torch.zeros(rows["reward"].shape, dtype=self.torch.int64)
            batch.set_outputs(({"action": action}, state))
            self.stop.wait(0.01)  # leave the cores to the attackers

    def learn(self):
        for _ in self.queue:
            pass

    def query(self):
        while not self.stop.wait(0.2):
            begin = time.monotonic()
            try:
                libtorchbeast.query_server(self.target.address, 1, PATIENCE, **self.target.access())
                self.seconds.append(time.monotonic() - begin)
            except OSError as error:
                self.failures.append(str(error))

    def count(self):
        before = None
        while not self.stop.wait(1):
            count = self.pool.count()
            if before:
                self.rates.append(count - before)
            before = count

    def listen(self):
        with contextlib.suppress(StopIteration):
            while True:
                self.failures.append(self.pool.next_event())

    def close(self):
        self.stop.set()
        self.queue.close()
        self.batcher.close()
        for thread in self.threads:
            thread.join()


def starve(target):
    """Hold as many silent connections as possible; return the seconds until a learner can connect
    again, and until the last of them has been closed."""
    with contextlib.ExitStack() as stack:
        silent = []
        for i in range(2 * server.MAX_CONNECTIONS):
            with contextlib.suppress(OSError):
                connection = stack.enter_context(target.connect())
                if not target.with_tls and i % 2:
                    connection.sendall(BEGIN + frame(HEADERS, 0, 1, b""))  # headers to come
                silent.append(connection)
        begin = time.monotonic()
        libtorchbeast.query_server(target.address, 1, 90, **target.access())
        let_in = time.monotonic() - begin
        for connection in silent:
            connection.settimeout(max(0.1, begin + 60 - time.monotonic()))
            with contextlib.suppress(OSError):
                while connection.recv(2**16):
                    pass
        return let_in, time.monotonic() - begin


def fill_log(target):
    """Send headers that are not UTF-8, without a token; return by how much the log grows."""
    size = target.log_path.stat().st_size
    head = request("none") + header("x", b"\xff" * 20)
    streams = range(1, 61, 2)  # as many as a connection may open
    data = BEGIN + b"".join(frame(HEADERS, END_HEADERS | END_STREAM, i, head) for i in streams)
    for _ in range(NUM_BAD_HEADERS // len(streams)):
        say(target, data)
    return target.log_path.stat().st_size - size


def settle(target, goal=(0, 0, 0)):
    """Wait until ended connections are cleaned up; return the least resources seen."""
    least, deadline = target.resources(), time.monotonic() + (40 if any(goal) else 5)
    while time.monotonic() < deadline and any(n > g for n, g in zip(least, goal, strict=True)):
        time.sleep(0.1)
        least = tuple(map(min, least, target.resources()))
    return least


def attack(targets, num_streams, seed):
    """Open so many streams; return counters of outcomes by kind, and unexpected ones as texts."""
    jobs, choose = [], random.Random(seed)
    plain, with_tls = (dict(ANY_SERVER, **more) for more in (PLAIN_SERVER, TLS_SERVER))
    for i in range(num_streams):
        target = targets[i % 2]
        kinds = list((with_tls if target.with_tls else plain).items())
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
            if outcome != EXPECTED.get(kind, outcome) or outcome in ("OK", "DEADLINE_EXCEEDED"):
                odd.append(f"{target.name}: {kind}: {outcome}")
    return outcomes, odd


def run(num_streams, seed, folder):
    """Return a report in Markdown, and broken promises as texts."""
    for name in ("own", "strange"):
        command = ["sh", ROOT / "scripts" / "make_certificates.sh", folder / name, "localhost"]
        subprocess.run(command, check=True, capture_output=True)
    with contextlib.ExitStack() as stack:
        targets = []
        for name, with_tls in (("token", False), ("TLS and token", True)):
            targets.append(Target(folder, name, with_tls))
            stack.callback(targets[-1].end)
        learners = [stack.enter_context(contextlib.closing(Learner(t))) for t in targets]
        attack(targets, 2 * len(KINDS), seed)  # for memory that is allocated once
        before = [settle(t) for t in targets]
        first_peaks = [t.peak() for t in targets]
        begin = time.monotonic()
        outcomes, broken = attack(targets, num_streams, seed)
        seconds = time.monotonic() - begin
        after = [settle(t, (2**50, *b[1:])) for t, b in zip(targets, before, strict=True)]
        for learner in learners:
            learner.stop.set()
            broken += [f"{learner.target.name}: a learner: {text}" for text in learner.failures]
            if learner.pool.num_reconnects() or not learner.rates or min(learner.rates) == 0:
                broken.append(f"{learner.target.name}: a learner was disturbed: {learner.rates}")
        log_growth = fill_log(targets[0])
        if log_growth > MAX_LOG_GROWTH:
            broken.append(f"{targets[0].name}: headers that are not UTF-8 fill its log")
        starved = [starve(t) if num_streams >= LONG else None for t in targets]
        peaks = [t.peak() for t in targets]

    lines = [f"{num_streams:,} streams in {seconds:.0f} s, by kind and outcome:", ""]
    lines += ["| kind | streams | outcome |", "|---|---|---|"]
    for kind in KINDS:
        counts = outcomes[kind]
        texts = ", ".join(f"{name} {count:,}" for name, count in counts.most_common())
        lines.append(f"| {kind} | {counts.total():,} | {texts} |")
    titles = ["server", "memory before", "after", "peak", "descriptors", "threads"]
    titles += ["learner's steps/s, lowest", "a query took, median, most"]
    titles += ["silent connections kept learners out, and lasted"]
    lines += ["", f"Log of {NUM_BAD_HEADERS:,} headers that are not UTF-8: {log_growth:,} bytes."]
    lines += ["", f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for target, learner, b, a, first_peak, peak, silence in zip(
        targets, learners, before, after, first_peaks, peaks, starved, strict=True
    ):
        crashes = target.log().count("died and is replaced")
        if crashes or "Traceback" in target.log():
            broken.append(f"{target.name}: it crashed, or an exception was not caught")
        growth = [after - before for after, before in zip(a, b, strict=True)]
        if growth[0] > MAX_GROWTH or max(growth[1:]) > SLACK or peak - first_peak > MAX_PEAK:
            broken.append(f"{target.name}: it grew: {b} became {a}, peak {first_peak} {peak}")
        if silence and max(silence) >= 60:
            broken.append(f"{target.name}: silent connections stay open: {silence}")
        waits = sorted(learner.seconds)
        cells = [
            target.name, f"{b[0] / 1e6:.1f} MB", f"{a[0] / 1e6:.1f} MB", f"{peak / 1e6:.1f} MB",
            f"{b[1]}, {a[1]}", f"{b[2]}, {a[2]}", min(learner.rates, default=0),
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
    flags = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

    import numpy
    import torch

    torch.set_num_threads(1)
    print_header(grpc, numpy, torch)
    print(flush=True)
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        report, broken = run(flags.streams, flags.seed, pathlib.Path(folder))
    print(report)
    for promise in broken[:50]:
        print("broken:", promise, file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
