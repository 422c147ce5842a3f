# SPDX-License-Identifier: Apache-2.0
"""Who may use environment servers, and how little those who may not can do to them."""

import argparse
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time

import catch_poly  # noqa: F401 - it makes the polybeast of this process play Catch
import grpc
import numpy as np
import pytest
from catch_env import Catch
from counting import Counting, free_address, has_ipv6
from deadline import DEADLINE, Thread, wait_until
from old_env import Counted, Old
from program import HELPERS, ROOT, Program, last_step
from rig import Rig, act_zero
from stream import Stream, make_many, refusal, serving

import polybeast
import polybeast_env
from beast.errors import EnvError, FlagError
from beast.servers import credentials, handshakes, server_processes, servers
from libtorchbeast import ActorPool, BatchingQueue, DynamicBatcher, Listener, Server, query_server
from libtorchbeast import server as server_module
from libtorchbeast.access import is_local, warn_of_loopback

ANY_PORT = "127.0.0.1:0"
LEARNER, SERVER = "own/learner", "own/server"
TOKEN = "correct-horse-battery-staple"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of certificates: own, strange (of another authority)."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates with")
    root = tmp_path_factory.mktemp("certificates")
    for name in ("own", "strange"):
        command = ["sh", ROOT / "scripts" / "make_certificates.sh", root / name, "localhost"]
        subprocess.run(command, check=True, capture_output=True)
    (root / "token").touch(mode=0o600)
    (root / "token").write_text(TOKEN + "\n")
    return root


def test_certificates_stay_where_no_new_ones_can_be_made(folders):
    before = {path: path.read_bytes() for path in (folders / "own").iterdir()}
    command = ["sh", ROOT / "scripts" / "make_certificates.sh", folders / "own", "localhost"]
    failed = subprocess.run(command, capture_output=True, env=os.environ | {"DAYS": "1y"})
    assert failed.returncode and b"1y" in failed.stderr
    assert before == {path: path.read_bytes() for path in (folders / "own").iterdir()}


def test_an_authoritys_certificate_is_made_again_of_its_key(folders, tmp_path):
    folder = shutil.copytree(folders / "own", tmp_path / "own")
    signed = (folder / "server.pem").read_bytes()
    (folder / "ca.pem").write_bytes(b"")  # what an interrupted call left
    command = ["sh", ROOT / "scripts" / "make_certificates.sh", folder, "localhost"]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "before.pem").write_bytes(signed)
    for name in ("before.pem", "server.pem"):
        command = ["openssl", "verify", "-CAfile", folder / "ca.pem", folder / name]
        subprocess.run(command, check=True, capture_output=True)


def as_flags(folders, certificate=None, ca=None, token_file=None):
    """Return flags: `certificate` like "own/server", `ca` a folder, by default that of it."""
    names = (certificate and f"{certificate}.pem", certificate and f"{certificate}.key")
    names += (certificate and f"{ca or certificate.split('/')[0]}/ca.pem", token_file)
    paths = [str(folders / name) if name else None for name in names]
    keys = ("tls_cert", "tls_key", "tls_ca", "auth_token_file")
    return argparse.Namespace(**dict(zip(keys, paths, strict=True)))


def as_words(flags):
    return [f"--{name}={value}" for name, value in vars(flags).items() if value]


def both(folders, *args, **kwargs):
    """Return the credentials of a server and of a learner."""
    return [credentials.load(as_flags(folders, who, *args, **kwargs)) for who in (SERVER, LEARNER)]


@pytest.mark.parametrize("address", [ANY_PORT, "unix:{}/socket", "localhost:0", "[::1]:0"])
@pytest.mark.parametrize("how", ["tls", "token", "both"])
def test_tls_and_token_work_with_the_learners_core(folders, tmp_path, address, how):
    if "::1" in address and not has_ipv6():
        pytest.skip("no IPv6")
    theirs, ours = both(folders, token_file=None if how == "tls" else "token")
    if how == "token":
        theirs["tls"] = ours["tls"] = None
    with serving(Counting, address.format(tmp_path), **theirs) as address:
        assert query_server(address, 3, **ours)["num_envs"] == 3
        with contextlib.closing(Rig([address] * 2, act_zero, (), **ours)) as rig:
            rig.columns(4)


HANDSHAKES = [
    ((SERVER,), (LEARNER, "strange"), "(?i)ssl|handsh|cert"),  # they are of another authority
    ((SERVER,), ("strange/learner", "own"), "(?i)ssl|handsh|cert|closed|reset"),  # we are
    ((SERVER,), (), "closed|reset|settings"),  # only they have TLS
    ((), (LEARNER,), "(?i)ssl|handsh|wrong.version"),  # only we have
]


@pytest.mark.whole
def test_a_failed_handshake_is_reported_as_grpc_does(folders):
    def check(theirs, ours, message):
        access = credentials.load(as_flags(folders, *ours))
        with serving(Old, **credentials.load(as_flags(folders, *theirs))) as address:
            with pytest.raises(TimeoutError, match=message):
                query_server(address, connect_timeout_s=3, **access)

    for thread in [Thread(check, *arguments) for arguments in HANDSHAKES]:
        thread.result()


def test_learners_and_actors_that_are_refused_say_so(caplog):
    access = {"auth_token": TOKEN}
    with (
        serving(Old, auth_token="another") as strange,
        serving(None, make_environments=make_many(Catch), auth_token=TOKEN) as good,
    ):
        message = f"refused by the environment server at {strange}: .* the learner has another one"
        assert handshakes.query_servers([strange, good], None, credentials=access)["num_envs"] == 1
        assert re.search(message, caplog.text)
        with pytest.raises(EnvError, match=f"no .* can be used: {message}"):
            handshakes.query_servers([strange], None, credentials=access)
        with contextlib.closing(Rig([strange], act_zero, (), reconnect=True, **access)) as rig:
            assert "trying again in" in rig.wait_for_event(message)[0]
        pool = ActorPool(1, BatchingQueue(), DynamicBatcher(), [strange], (), **access)
        with pytest.raises(ConnectionRefusedError, match=message):
            pool.run()


def test_a_stranger_has_nothing_made_and_does_not_fill_the_log(caplog):
    with serving(Counted, auth_token=TOKEN) as address:
        for options in ({}, {"auth_token": TOKEN[:-1]}, {"auth_token": TOKEN + "x"}, {}, {}):
            code, details = refusal(address, num_envs=4000, **options)
            assert code == grpc.StatusCode.UNAUTHENTICATED and TOKEN not in details
        with Stream(address, auth_token=TOKEN):
            assert len(Counted.alive) == 1
    message = r"refused 1 stream\(s\) without this server's token, most recently from ipv4"
    assert len(re.findall(message, caplog.text)) == 1
    assert TOKEN not in caplog.text


def test_a_listener_refuses_a_certificate_without_its_key(folders):
    ca, certificate, key = both(folders)[1]["tls"]
    strange = (folders / "strange" / "learner.key").read_text()
    with socket.create_server(("127.0.0.1", 0)) as port:
        for tls in (("a", "b", "c"), (ca, certificate, strange)):
            with pytest.raises(ValueError, match="cannot serve with that certificate and key"):
                Listener(port.fileno(), 1, tls=tls)
        Listener(port.fileno(), 1, tls=(ca, certificate, key)).close()


@pytest.mark.parametrize(
    ("access", "message"),
    [({"auth_token": ""}, "printable"), ({"auth_token": "a b"}, "printable"),
     ({"auth_token": "ключ"}, "printable"), ({"tls": ("a", "", "c")}, "three PEM texts")],
)  # fmt: skip
def test_credentials_that_are_none_are_refused_by_the_core(access, message):
    for function, *arguments in (
        (Server, Old, ANY_PORT),
        (query_server, ANY_PORT),
        (ActorPool, 1, BatchingQueue(), DynamicBatcher(), [ANY_PORT], ()),
    ):
        with pytest.raises(ValueError, match=message):
            function(*arguments, **access)


SPOILED = {  # what is done to the files, and what is said
    "missing": (lambda f: (f / "server.key").unlink(), "cannot read --tls_key .*: No such file"),
    "empty": (lambda f: (f / "server.pem").write_text("\n"), "--tls_cert .*server.pem is empty"),
    "bytes": (lambda f: (f / "server.key").write_bytes(bytes(range(256))),
              "--tls_key .*server.key should hold ASCII"),
    "not PEM": (lambda f: (f / "ca.pem").write_text("yes"), "--tls_ca .* is no PEM file of a CERT"),
    "swapped": (lambda f: shutil.copy(f / "server.pem", f / "server.key"),
                "--tls_key .*server.key is no PEM file of a PRIVATE KEY"),
    "of another certificate": (lambda f: shutil.copy(f / "learner.key", f / "server.key"),
                               "--tls_key .* is not the key of the certificate in --tls_cert "),
    "torn": (lambda f: (f / "server.key").write_text((f / "server.key").read_text()[:100]),
             "cannot use --tls_cert .*server.pem with --tls_key .*server.key"),
    "encrypted": (lambda f: (f / "server.key").write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----"),
                  "--tls_key .*server.key is encrypted.*openssl pkey"),
    "token empty": (lambda f: (f / "token").write_text(" \n"), "--auth_token_file .* is empty"),
    "token of two lines": (lambda f: (f / "token").write_text("one\ntwo\n"),
                           "--auth_token_file .*token should hold one line .*openssl rand"),
}  # fmt: skip


@pytest.fixture
def nothing_starts(monkeypatch):
    def start(*args, **kwargs):
        raise AssertionError("something was started")

    monkeypatch.setattr(server_processes, "supervise", start)
    monkeypatch.setattr(servers, "connect", start)


@pytest.mark.parametrize("what", SPOILED)
def test_an_unusable_file_is_named_before_anything_starts(folders, tmp_path, nothing_starts, what):
    shutil.copytree(folders, tmp_path, dirs_exist_ok=True)
    shutil.copy(folders / "token", tmp_path / "own")
    spoil, message = SPOILED[what]
    spoil(tmp_path / "own")
    words = as_words(as_flags(tmp_path, SERVER, token_file="own/token"))
    with pytest.raises(FlagError, match=message):
        polybeast.main(["--server_addresses", "a:1", "--savedir", str(tmp_path / "runs"), *words])
    with pytest.raises(SystemExit, match=f"^polybeast_env.py: {message}"):
        polybeast_env.main(words)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("left_out", ["tls_cert", "tls_key", "tls_ca"])
def test_tls_takes_three_files(folders, left_out):
    flags = as_flags(folders, SERVER)
    setattr(flags, left_out, None)
    with pytest.raises(ValueError, match=f"go together, but there is no --{left_out}"):
        credentials.load(flags)


@pytest.mark.parametrize("name", ["own/server.key", "token"])
def test_a_secret_that_all_can_read_or_guess_is_warned_of(folders, tmp_path, caplog, name):
    shutil.copytree(folders, tmp_path, dirs_exist_ok=True)
    flags = as_flags(tmp_path, SERVER, token_file="token")
    credentials.load(flags)
    assert caplog.text == ""
    (tmp_path / name).chmod(0o644)
    for _ in range(2):
        credentials.load(flags)
    assert caplog.text.count(f"{name}: chmod 600") == caplog.text.count("can read") == 1
    (tmp_path / "token").write_text("secret")
    assert credentials.load(flags)["auth_token"] == "secret"
    assert "can be guessed" in caplog.text


@pytest.mark.parametrize(
    ("address", "local"),
    [("127.0.0.1:1", True), ("127.9.8.7:1", True), ("localhost:1", True), ("[::1]:1", True),
     ("unix:/a", True), ("0.0.0.0:1", False), ("[::]:1", False), ("128.0.0.1:1", False),
     ("10.0.0.1:1", False), ("[2001:db8::1]:1", False), ("host:1", False),
     ("localhost.example.org:1", False), ("127.0.0.1.example.org:1", False)],
)  # fmt: skip
def test_only_unix_and_loopback_are_local(address, local):
    assert is_local(address) == local


@pytest.mark.parametrize(
    ("address", "ip", "told"),
    [("host:1", "127.0.1.1", True), ("host:1", "10.0.0.1", False), ("host:1", "::1", True),
     ("localhost:1", "127.0.0.1", False), ("127.0.0.1:1", "127.0.0.1", False)],
)  # fmt: skip
def test_names_that_others_cannot_reach_are_told(address, ip, told, monkeypatch, caplog):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(None, None, None, "", (ip, 0))])
    warn_of_loopback(address)
    assert (f"host is {ip} on this machine" in caplog.text) == told == bool(caplog.records)


@pytest.mark.parametrize("address", ["0.0.0.0:5005", "[::]:5005", "192.0.2.1:5005", "host:5005"])
def test_servers_refuse_to_be_open_to_all(address, nothing_starts):
    message = f"cannot serve on {re.escape(address)}: .*--tls_cert.*--auth_token_file.*--insecure"
    with pytest.raises(RuntimeError, match=message):
        Server(Old, address).run()
    with pytest.raises(SystemExit, match=f"^polybeast_env.py: {message}"):
        polybeast_env.main(["--server_address", address, "--num_servers", "2"])


@pytest.mark.parametrize("access", [{"insecure": True}, {"auth_token": TOKEN}])
def test_servers_serve_everywhere_where_that_is_wanted_or_safe(access):
    with serving(Old, "0.0.0.0:0", **access) as address:
        local, token = address.replace("0.0.0.0", "127.0.0.1"), access.get("auth_token")
        assert query_server(local, auth_token=token)["num_envs"] == 1


def test_messages_that_grow_when_they_are_read_are_refused():
    with serving(Old) as address, grpc.insecure_channel(address) as channel:
        call = channel.stream_stream("/rpcenv.RPCEnvServer/StreamingEnv")(
            iter([bytes(10**6)]), timeout=DEADLINE, compression=grpc.Compression.Gzip
        )
        with pytest.raises(grpc.RpcError, match="(?i)compression"):
            list(call)


@pytest.fixture
def limits(monkeypatch):
    """Give servers low limits of silence and of connections."""
    options = {"grpc.server_handshake_timeout_ms": 500, "grpc.max_connection_idle_ms": 500}
    options = dict(server_module._OPTIONS) | options | {"grpc.max_allowed_incoming_connections": 4}
    monkeypatch.setattr(server_module, "_OPTIONS", tuple(options.items()))


@pytest.mark.parametrize("with_tls", [False, True])
def test_those_who_say_nothing_do_not_keep_others_out(folders, limits, with_tls):
    theirs, ours = both(folders) if with_tls else ({}, {})
    with serving(Old, **theirs) as address, contextlib.ExitStack() as stack:
        host, _, port = address.rpartition(":")
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(10)
        ]
        for connection in silent:  # all are closed, at once or in time
            connection.settimeout(DEADLINE)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(1000):
                    pass
        assert query_server(address, timeout_s=DEADLINE, **ours)["num_envs"] == 1


def test_a_learner_stays_while_it_has_nothing_to_say(limits):
    with serving(Old) as address, Stream(address) as quiet:
        with grpc.insecure_channel(address) as channel:  # one with a connection alone
            states = []
            channel.subscribe(states.append, try_to_connect=True)
            ready = grpc.ChannelConnectivity.READY
            wait_until(lambda: ready in states and states[-1] != ready)
        quiet.step(np.zeros(1))


@pytest.mark.whole
def test_a_run_over_tls_with_a_token_keeps_the_token_secret(folders, tmp_path, capfd):
    address = free_address()
    words = as_words(as_flags(folders, SERVER, token_file="token"))
    arguments = ("--env Catch --num_servers 1 --server_address", address, *words)
    with Program(HELPERS / "catch_env.py", *arguments) as server:
        server.wait_until(lambda: f"serving on {address}" in server.output)
        arguments = ["--total_steps=500", f"--savedir={tmp_path}", f"--server_addresses={address}"]
        words = as_words(as_flags(folders, LEARNER, token_file="token"))
        assert polybeast.main([*arguments, "--xpid=run", *words]) == 0
        assert last_step(tmp_path / "run") >= 500
        assert TOKEN not in "".join(capfd.readouterr()) + (tmp_path / "run/meta.json").read_text()
        message = f"refused by the .* at {address}: .* the learner has none"
        with pytest.raises(EnvError, match=message):
            polybeast.main([*arguments, *as_words(as_flags(folders, LEARNER))])


@pytest.mark.whole
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "target, num_streams", [("server", 68), pytest.param("learner", 86, marks=pytest.mark.long)]
)
def test_hostile_streams_neither_crash_nor_disturb(target, num_streams, monkeypatch, capfd):
    monkeypatch.syspath_prepend(ROOT / "campaigns")
    import hostile

    wait_for_goal = hostile.settle

    def settle(target, goal=None):  # the campaign has more patience, up to 40 seconds
        if goal is not None:
            return wait_for_goal(target, [number + hostile.SLACK for number in goal])
        end, seen = time.monotonic() + 1.5, []
        wait_until(lambda: seen.append(target.resources()) or time.monotonic() > end)
        return tuple(map(min, zip(*seen, strict=True)))

    monkeypatch.setattr(hostile, "settle", settle)
    monkeypatch.setattr(hostile.Environments, "interval", 3)
    monkeypatch.setattr(hostile.Peer, "interval", 3)
    words = ["hostile.py", "--target", target, "--streams", str(num_streams)]  # two of each kind
    monkeypatch.setattr(sys, "argv", words)
    assert hostile.main() == 0, capfd.readouterr()
    report = capfd.readouterr().out
    assert f"{num_streams} streams in" in report
    assert re.search(r"\| metadata of 100 KB \| (\d) \| RESOURCE_EXHAUSTED \1 \|", report)
    # And not too much; a learner's line may be due later.
    assert re.search(f"3,000 headers that are not UTF-8: [{int(target == 'server')}-9]", report)
