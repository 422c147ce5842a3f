# SPDX-License-Identifier: Apache-2.0
"""Who may use environment servers, and how little those who may not can do to them."""

import argparse
import contextlib
import os
import re
import shutil
import socket
import stat
import subprocess

import catch_poly  # noqa: F401 - it makes the polybeast of this process play Catch
import grpc
import numpy as np
import pytest
from counting import Counting, ServerThread, free_address
from program import TESTS, Program, last_step, run, wait_until
from stream import DEADLINE, Stream, serving
from test_actor_pool import Rig, act_zero
from test_server import Counted, Old, array, leaf, refusal

import credentials
import polybeast
import polybeast_env
import servers
from environment import EnvError
from experiment import FlagError
from libtorchbeast import ActorPool, BatchingQueue, DynamicBatcher, Server, query_server, wire
from libtorchbeast import rpcenv_pb2 as pb
from libtorchbeast import server as server_module
from libtorchbeast.access import is_local

REPO = TESTS.parent
CATCH, CATCH_SERVER = TESTS / "catch_poly.py", TESTS / "catch_env.py"
ANY_PORT = "127.0.0.1:0"
TOKEN = "correct-horse-battery-staple"


def make_certificates(folder, days=365):
    subprocess.run(
        ["sh", REPO / "make_certificates.sh", folder, "localhost"],
        check=True, capture_output=True, env=os.environ | {"DAYS": str(days)},
    )  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of certificates: own, strange (of another authority), expired (of our own)."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates with")
    root = tmp_path_factory.mktemp("certificates")
    make_certificates(root / "own")
    make_certificates(root / "strange")
    (root / "expired").mkdir()
    for name in ("ca.pem", "ca.key"):
        shutil.copy(root / "own" / name, root / "expired" / name)
    make_certificates(root / "expired", days=-1)
    (root / "token").touch(mode=0o600)
    (root / "token").write_text(TOKEN + "\n")
    return root


def as_flags(folders, certificate=None, ca=None, token_file=None):
    """Return flags: `certificate` like "own/server", `ca` a folder, by default that of it."""
    flags = dict.fromkeys(("tls_cert", "tls_key", "tls_ca", "auth_token_file"))
    if certificate:
        flags["tls_cert"] = str(folders / f"{certificate}.pem")
        flags["tls_key"] = str(folders / f"{certificate}.key")
        flags["tls_ca"] = str(folders / (ca or certificate.split("/")[0]) / "ca.pem")
    if token_file:
        flags["auth_token_file"] = str(folders / token_file)
    return argparse.Namespace(**flags)


def as_words(flags):
    return [f"--{name}={value}" for name, value in vars(flags).items() if value]


@pytest.fixture
def start():
    """Return a function that has something stopped, or a rig closed, at the end of the test."""
    with contextlib.ExitStack() as stack:

        def start(what):
            if isinstance(what, Rig):
                stack.enter_context(contextlib.suppress(ConnectionError))  # the test knows
            stack.callback(getattr(what, "close", None) or what.stop)
            return what

        yield start


# --------------------------------------------------------------------------------- who may come in


@pytest.mark.parametrize("address", [ANY_PORT, "unix:{}/socket", "localhost:0", "[::1]:0"])
@pytest.mark.parametrize("how", ["tls", "token", "both"])
def test_tls_and_token_work_with_the_learners_core(folders, tmp_path, start, address, how):
    if "::1" in address and not socket.has_ipv6:
        pytest.skip("no IPv6")
    flags = [
        as_flags(folders, how != "token" and who, token_file=how != "tls" and "token")
        for who in ("own/server", "own/learner")
    ]
    address = address.format(tmp_path)
    server = start(ServerThread(Counting, address, **credentials.load(flags[0])))
    access = credentials.load(flags[1])
    assert query_server(server.address, 3, **access)["num_envs"] == 3
    rig = start(Rig([server.address] * 2, act_zero, (), **access))
    rig.columns(4)
    assert servers.query_servers([server.address], None, flags=flags[1])["num_envs"] == 1


LEARNER, SERVER = "own/learner", "own/server"
TROUBLES = {
    "wrong authority here": ((SERVER,), (LEARNER, "strange"), "this learner refuses the "
                             "certificate of .*{}.*local issuer.*this learner's --tls_ca"),
    "wrong authority there": ((SERVER,), ("strange/learner", "own"),
                              "{} refuses the certificate of this learner.*strange/learner.pem "
                              r"\(unable to get local issuer certificate\).*server's --tls_ca"),
    "server expired": (("expired/server",), (LEARNER,), "{}: certificate has expired; make it "),
    "learner expired": ((SERVER,), ("expired/learner",), r"{} refuses.*learner.pem \(certificate "
                        "has expired"),
    "a server's for a learner's": ((SERVER,), (SERVER,), r"{} refuses.*unsuitable certificate pu"),
    "a learner's for a server's": ((LEARNER,), (LEARNER,), "unsuitable .*must be a server's"),
    "learner without TLS": ((SERVER,), (), "{} wants TLS: give this learner --tls_cert"),
    "server without TLS": ((), (LEARNER,), "{} speaks no TLS: start it with --tls_cert"),
    "token wrong": (("", "", "token"), ("", "", "other"), "refused by the environment server at "
                    "{}: this server asks for a token, but the learner has another one: give"),
    "token missing": (("", "", "token"), (), "{}: .* asks for a token, but the learner has none"),
    "token wrong in TLS": ((SERVER, "", "token"), (LEARNER, "", "other"), "{}: .* another one"),
}  # fmt: skip


@pytest.mark.parametrize("name", TROUBLES)
def test_a_refused_learner_is_told_why_and_ends(folders, monkeypatch, name):
    theirs, ours, message = TROUBLES[name]
    (folders / "other").touch(mode=0o600)
    (folders / "other").write_text("incorrect-horse-battery-staple")
    monkeypatch.setattr(servers, "CONNECT_TIMEOUT", 1)
    with serving(Old, ANY_PORT, **credentials.load(as_flags(folders, *theirs))) as address:
        message = "(?s)no environment server can be used: .*" + message.format(address)
        with pytest.raises(EnvError, match=message):
            servers.query_servers([address], None, flags=as_flags(folders, *ours))


def test_a_certificate_that_does_not_name_the_host_says_how_to_make_one(folders):
    access = credentials.load(as_flags(folders, "own/server"))
    with serving(Old, "127.0.0.2:0", **access) as address:
        message = credentials.explain_refusal(address, as_flags(folders, "own/learner"))
    assert "not valid for '127.0.0.2'" in message and "make_certificates.sh" in message


def test_one_server_that_refuses_does_not_keep_the_learner_from_the_others(folders, caplog):
    with (
        serving(Old, ANY_PORT, auth_token="another") as strange,
        serving(Old, ANY_PORT, auth_token=TOKEN) as good,
    ):
        flags = as_flags(folders, token_file="token")
        assert servers.query_servers([strange, good], None, flags=flags)["num_envs"] == 1
    message = f"refused by the environment server at {strange}: .* the learner has another one"
    assert re.search(message, caplog.text)


@pytest.mark.parametrize("reconnect", [False, True])
def test_actors_that_are_refused_say_so(start, reconnect):
    server = start(ServerThread(Counting, auth_token=TOKEN))
    message = f"refused by the environment server at {server.address}: .* another one"
    rig = start(Rig([server.address], act_zero, (), reconnect=reconnect, auth_token="other"))
    if reconnect:
        (event, *_) = rig.wait_for_event(message)
        assert "trying again in" in event
    else:
        with pytest.raises(ConnectionRefusedError, match=message):
            rig.running.result()


def test_actors_whose_tls_fails_say_what_grpc_says(folders, start):
    server = start(ServerThread(Counting, **credentials.load(as_flags(folders, "own/server"))))
    access = credentials.load(as_flags(folders, "own/learner", "strange"))
    with pytest.raises(
        TimeoutError, match=f"{server.address} within 1.0 s: .*(?i:ssl|handsh|cert)"
    ):
        query_server(server.address, connect_timeout_s=1, **access)


def test_a_stranger_has_nothing_made_and_does_not_fill_the_log(caplog):
    with serving(Counted, ANY_PORT, auth_token=TOKEN) as address:
        for wishes in ({}, {"auth_token": TOKEN[:-1]}, {"auth_token": TOKEN + "x"}, {}, {}):
            code, details = refusal(address, num_envs=4000, **wishes)
            assert code == grpc.StatusCode.UNAUTHENTICATED and TOKEN not in details
        with Stream(address, auth_token=TOKEN):
            assert Counted.alive == 1
    message = r"refused 1 stream\(s\) without this server's token, most recently of ipv4:127.0.0.1"
    assert len(re.findall(message, caplog.text)) == 1
    assert TOKEN not in caplog.text


def test_a_token_that_nobody_asks_for_does_no_harm():
    with serving(Old, ANY_PORT) as address:
        assert query_server(address, auth_token=TOKEN)["num_envs"] == 1


@pytest.mark.parametrize(
    ("access", "message"),
    [({"auth_token": ""}, "printable"), ({"auth_token": "a b"}, "printable"),
     ({"auth_token": "ключ"}, "printable"), ({"tls": ("a", "", "c")}, "three PEM texts")],
)  # fmt: skip
def test_credentials_that_are_none_are_refused_by_the_core(access, message):
    with pytest.raises(ValueError, match=message):
        Server(Old, ANY_PORT, **access)
    with pytest.raises(ValueError, match=message):
        query_server(ANY_PORT, **access)
    with pytest.raises(ValueError, match=message):
        ActorPool(1, BatchingQueue(), DynamicBatcher(), [ANY_PORT], (), **access)


# ------------------------------------------------------------------------------------------- flags


def spoil(folder, what):
    """Spoil one of the files in `folder`; return what is said of it."""
    key = (folder / "server.key").read_text()
    if what == "missing":
        (folder / "server.key").unlink()
        return "cannot read --tls_key .*server.key: No such file"
    if what == "a folder":
        (folder / "ca.pem").unlink()
        (folder / "ca.pem").mkdir()
        return "cannot read --tls_ca .*ca.pem: Is a directory"
    if what == "empty":
        (folder / "server.pem").write_text("\n")
        return "--tls_cert .*server.pem is empty"
    if what == "bytes":
        (folder / "server.key").write_bytes(bytes(range(256)))
        return "--tls_key .*server.key should hold ASCII"
    if what == "not PEM":
        (folder / "ca.pem").write_text("certainly\n")
        return "--tls_ca .*ca.pem is no PEM file of a CERTIFICATE"
    if what == "swapped":
        (folder / "server.key").write_text((folder / "server.pem").read_text())
        return "--tls_key .*server.key is no PEM file of a PRIVATE KEY"
    if what == "of another certificate":
        (folder / "server.key").write_text((folder / "learner.key").read_text())
        return "--tls_key .*server.key is not the key of the certificate in --tls_cert .*server.pem"
    if what == "torn":
        (folder / "server.key").write_text(key[:100])
        return "cannot use --tls_cert .*server.pem with --tls_key .*server.key"
    if what == "encrypted":
        subprocess.run(
            ["openssl", "pkey", "-in", folder / "server.key", "-aes128", "-passout", "pass:secret",
             "-out", folder / "locked.key"], check=True,
        )  # fmt: skip
        (folder / "locked.key").rename(folder / "server.key")
        return "--tls_key .*server.key is encrypted.*openssl pkey"
    if what == "token empty":
        (folder / "token").write_text(" \n")
        return "--auth_token_file .*token is empty"
    if what == "token of two lines":
        (folder / "token").write_text("one\ntwo\n")
        return "--auth_token_file .*token should hold one line .*openssl rand"
    raise AssertionError(what)


SPOILED = [
    "missing", "a folder", "empty", "bytes", "not PEM", "swapped", "of another certificate", "torn",
    "encrypted", "token empty", "token of two lines",
]  # fmt: skip


@pytest.fixture
def nothing_starts(monkeypatch):
    def start(*args, **kwargs):
        raise AssertionError("something was started")

    monkeypatch.setattr(servers, "keep_serving", start)
    monkeypatch.setattr(polybeast, "train_on", start)


@pytest.mark.parametrize("what", SPOILED)
def test_a_file_that_cannot_be_used_is_named_before_anything_starts(
    folders, tmp_path, nothing_starts, what
):
    folder = tmp_path / "own"
    shutil.copytree(folders / "own", folder)
    shutil.copy(folders / "token", folder / "token")
    message = spoil(folder, what)
    words = as_words(as_flags(tmp_path, "own/server", token_file="own/token"))
    with pytest.raises(FlagError, match=message):
        polybeast.main(["--server_addresses", "a:1", "--savedir", str(tmp_path / "runs"), *words])
    with pytest.raises(SystemExit, match=f"^polybeast_env.py: {message}"):
        polybeast_env.main(words)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("left_out", ["tls_cert", "tls_key", "tls_ca"])
def test_tls_takes_three_files(folders, tmp_path, nothing_starts, left_out):
    flags = as_flags(folders, "own/server")
    setattr(flags, left_out, None)
    message = f"go together, but there is no --{left_out}"
    with pytest.raises(SystemExit, match=message):
        polybeast_env.main(as_words(flags))
    with pytest.raises(FlagError, match=message):
        polybeast.main(["--server_addresses", "a:1", "--savedir", str(tmp_path), *as_words(flags)])


@pytest.mark.parametrize("name", ["own/server.key", "token"])
def test_a_secret_that_all_can_read_is_warned_of(folders, tmp_path, caplog, name):
    shutil.copytree(folders / "own", tmp_path / "own")
    shutil.copy(folders / "token", tmp_path / "token")
    (tmp_path / name).chmod(0o644)
    for _ in range(2):
        credentials.load(as_flags(tmp_path, "own/server", token_file="token"))
    assert caplog.text.count(f"{name}: chmod 600") == 1
    assert caplog.text.count("can read") == 1


def test_a_token_that_can_be_guessed_is_warned_of(tmp_path, caplog):
    (tmp_path / "short").touch(mode=0o600)
    (tmp_path / "short").write_text("secret")
    assert credentials.load(as_flags(tmp_path, token_file="short"))["auth_token"] == "secret"
    assert "can be guessed" in caplog.text


class Started(Exception):
    """Servers were to be started."""


def test_servers_started_here_are_in_a_private_folder_and_need_no_credentials(
    folders, tmp_path, monkeypatch
):
    def start(command, **kwargs):
        (address,) = [word for word in command if word.startswith("unix:")]
        folder = os.path.dirname(address.removeprefix("unix:"))
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        assert not [word for word in command if "tls" in word or "token" in word]
        raise Started

    monkeypatch.setattr(subprocess, "Popen", start)
    words = as_words(as_flags(folders, "own/learner", token_file="token"))
    with pytest.raises(Started):
        polybeast.main(["--env", "Catch", "--savedir", str(tmp_path), *words])


# ----------------------------------------------------------------------------------- where to serve


@pytest.mark.parametrize(
    ("address", "local"),
    [("127.0.0.1:1", True), ("127.9.8.7:1", True), ("localhost:1", True), ("[::1]:1", True),
     ("unix:/a", True), ("0.0.0.0:1", False), ("[::]:1", False), ("128.0.0.1:1", False),
     ("10.0.0.1:1", False), ("[2001:db8::1]:1", False), ("host:1", False),
     ("localhost.example.org:1", False), ("127.0.0.1.example.org:1", False)],
)  # fmt: skip
def test_only_unix_and_loopback_are_local(address, local):
    assert is_local(address) == local


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:50051", "some-host:50051"])
def test_servers_refuse_to_be_open_to_all(address, nothing_starts):
    message = f"cannot serve on {re.escape(address)}: .*--tls_cert.*--auth_token_file.*--insecure"
    with pytest.raises(RuntimeError, match=message):
        Server(Old, address).run()
    if not address.endswith(":0"):
        with pytest.raises(SystemExit, match=f"^polybeast_env.py: {message}"):
            polybeast_env.main(["--server_address", address, "--num_servers", "2"])


@pytest.mark.parametrize("access", [{"insecure": True}, {"auth_token": TOKEN}])
def test_servers_serve_everywhere_where_that_is_wanted_or_safe(access):
    with serving(Old, "0.0.0.0:0", **access) as address:
        port = address.rpartition(":")[2]
        token = access.get("auth_token")
        assert query_server(f"127.0.0.1:{port}", auth_token=token)["num_envs"] == 1


def test_a_learner_starts_no_servers_that_others_can_reach(tmp_path, nothing_starts):
    with pytest.raises(FlagError, match="--pipes_basename 0.0.0.0:5000 may be reached from other"):
        polybeast.main(["--savedir", str(tmp_path), "--pipes_basename", "0.0.0.0:5000"])


# ------------------------------------------------------------------------------------------- limits


def test_a_server_makes_only_so_many_environments_in_all_streams(monkeypatch):
    monkeypatch.setattr(server_module, "MAX_ENVS", 5)
    with serving(Counted, ANY_PORT) as address:
        with Stream(address, num_envs=2), Stream(address), Stream(address, num_envs=2) as third:
            code, details = refusal(address, num_envs=1)
            assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert f"{address} has 5 environments, and with 1 more" in details
            third.close()
            Counted.wait_for(3)
            with Stream(address, num_envs=2):
                Counted.wait_for(5)
    Counted.wait_for(0)


@pytest.mark.parametrize(
    ("size", "code"),
    [(wire.MAX_ACTION_BYTES - 100, "OK"), (wire.MAX_ACTION_BYTES + 1, "RESOURCE_EXHAUSTED")],
)
def test_actions_have_a_largest_size(size, code):
    with serving(Old, ANY_PORT) as address, Stream(address) as stream:
        request = pb.Action(action=leaf(dtype=1, shape=(1, size), data=bytes(size)))
        if code == "OK":
            stream.send(request.SerializeToString())
        else:
            with pytest.raises(grpc.RpcError, match=code):
                stream.send(request.SerializeToString())


@pytest.mark.parametrize(
    "nest",
    [pb.Nest(items=[pb.Nest()] * 1001), pb.Nest(items=[pb.Nest(items=[pb.Nest()] * 1001)])],
    ids=["wide", "wide below"],
)
def test_actions_have_a_largest_width(nest):
    with pytest.raises(ValueError, match="more than 1000 items"):
        wire.decode_actions(pb.Action(action=nest).SerializeToString(), 1, None)


def test_what_is_said_of_a_bad_action_is_short():
    nest = pb.Nest(
        keys=["key" * 1000] * 1000, items=[pb.Nest(array=array(shape=(1,), data=bytes(8)))]
    )
    with pytest.raises(ValueError, match="1 items for the keys") as error:
        wire.decode_actions(pb.Action(action=nest).SerializeToString(), 1, None)
    assert len(str(error.value)) < 300


def test_messages_that_grow_when_they_are_read_are_refused():
    message = pb.Action(action=leaf(dtype=1, shape=(1, 10**6), data=bytes(10**6)))
    with serving(Old, ANY_PORT) as address, grpc.insecure_channel(address) as channel:
        call = channel.stream_stream("/rpcenv.RPCEnvServer/StreamingEnv")(
            iter([message.SerializeToString()]), timeout=DEADLINE,
            compression=grpc.Compression.Gzip,
        )  # fmt: skip
        with pytest.raises(grpc.RpcError, match="(?i)compression"):
            for _ in call:
                pass


def test_metadata_has_a_largest_size():
    with serving(Old, ANY_PORT) as address:
        code, _ = refusal(address, seed="1," * 10_000)
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        with Stream(address) as stream:
            stream.step(np.zeros(1))


@pytest.mark.parametrize("with_tls", [False, True])
def test_those_who_say_nothing_do_not_keep_others_out(folders, monkeypatch, with_tls):
    options = dict(server_module._OPTIONS) | {
        "grpc.server_handshake_timeout_ms": 1000,
        "grpc.max_connection_idle_ms": 1000,
        "grpc.max_allowed_incoming_connections": 4,
    }
    monkeypatch.setattr(server_module, "_OPTIONS", tuple(options.items()))
    theirs, ours = (
        credentials.load(as_flags(folders, with_tls and who)) for who in ("own/server", LEARNER)
    )
    with serving(Old, ANY_PORT, **theirs) as address, contextlib.ExitStack() as stack:
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


def test_a_learner_stays_while_it_has_nothing_to_say(monkeypatch):
    options = dict(server_module._OPTIONS) | {"grpc.max_connection_idle_ms": 200}
    monkeypatch.setattr(server_module, "_OPTIONS", tuple(options.items()))
    with serving(Old, ANY_PORT) as address, Stream(address) as quiet:
        with grpc.insecure_channel(address) as channel:  # one with a connection alone
            states = []
            channel.subscribe(states.append, try_to_connect=True)
            ready = grpc.ChannelConnectivity.READY
            wait_until(lambda: ready in states and states[-1] != ready)
        quiet.step(np.zeros(1))


# ----------------------------------------------------------------------------------- whole programs


def test_the_whole_program_trains_over_tls_with_a_token(folders, tmp_path):
    address = free_address()
    words = as_words(as_flags(folders, "own/server", token_file="token"))
    with Program(
        CATCH_SERVER, "--env Catch --num_servers 1 --server_address", address, *words
    ) as server:
        server.wait_until(lambda: f"serving on {address}" in server.output)
        words = as_words(as_flags(folders, "own/learner", token_file="token"))
        status, output = run(
            CATCH, "--total_steps 2000 --xpid run --savedir", tmp_path, "--server_addresses",
            address, *words,
        )  # fmt: skip
        assert status == 0, output
        assert last_step(tmp_path / "run") >= 2000
        assert TOKEN not in output + (tmp_path / "run" / "meta.json").read_text()
        status, output = run(
            CATCH, "--total_steps 2000 --savedir", tmp_path, "--server_addresses", address,
            *as_words(as_flags(folders, "own/learner")),
        )  # fmt: skip
        assert status == 1
        assert re.search(f"refused by the .* at {address}: .* the learner has none", output)
        assert "Traceback" not in output


@pytest.mark.timeout(600)
def test_hundreds_of_hostile_streams_neither_crash_a_server_nor_disturb_its_learner():
    status, output = run(REPO / "benchmarks" / "hostile.py", "--streams 300")
    assert status == 0, output
    assert "300 streams in" in output
