# SPDX-License-Identifier: Apache-2.0
"""Command lines: what they refuse and how, and what a checkpoint adds to them."""

import json
import multiprocessing.connection
import multiprocessing.util
import os
import pathlib
import re
import shutil
import sys

import pytest
from program import ROOT
from small_run import change, create_parser, parse, save

import dqn
import gala
import monobeast
import polybeast
import ppo
import sac
from beast.errors import EnvError, FlagError
from beast.flags import LEFT_OUT, parse_flags, run_program
from beast.parser import positive
from beast.processes import fork_server, lifetime
from beast.servers import credentials, servers
from beast.servers.addresses import consecutive_addresses, expand_addresses

COUNTS = ["total_steps", "num_actors", "batch_size", "unroll_length", "num_learner_threads"]
COUNTS += ["num_episodes", "num_test_envs"]
both = pytest.mark.parametrize("program", [monobeast, polybeast], ids=lambda p: p.__name__)


@both
@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--discounting 1.5", "1.5 is not valid: it must be from 0 to 1"),
        ("--alpha=-0.1", "-0.1 is not valid: it must be from 0 to 1"),
        ("--entropy_cost=-1", "-1 is not valid: it must not be negative"),
        ("--baseline_cost nan", "nan is not valid: it must not be negative"),
        ("--epsilon inf", "inf is not valid: it must be positive"),
        ("--policy_clipping 0", "argument --policy_clipping: 0 is not valid: it must be positive"),
        ("--eval_interval=-1", "-1 is not valid: it must not be negative"),
        ("--unroll_length 2.5", "invalid int value: '2.5'"),
        ("--learning_rte 0.1", "--learning_rte 0.1; did you mean --learning_rate?"),
        ("--unrol_length=5", "--unrol_length=5; did you mean --unroll_length?"),
        *[
            (f"--{name} 0", f"argument --{name}: 0 is not valid: it must be positive")
            for name in COUNTS
        ],
        ("--lr 0.1", "arguments: --lr 0.1; did you mean --learning_rate? (--help"),
        ("-lr 0.1", "did you mean --learning_rate? (--help"),
        ("--learning-rate=0.1", "did you mean --learning_rate? (--help"),
        ("--gamma=0.9", "did you mean --discounting? (--help"),
        ("--device cuda", "arguments: --device cuda; did you mean --disable_cuda? (--help"),
        ("--num-envs 8", "did you mean --num_actors or --envs_per_"),
        ("--num_workers 8", "did you mean --num_"),
        ("--random_seed 8", "did you mean --seed? (--help"),
        ("--zzz 3 --wandbb", "arguments: --zzz 3 --wandbb; did you mean --wandb? (--help"),
        ("--total_steps 1.5e0", "argument --total_steps: invalid int value: '1.5e0'"),
        ("--total_steps 1e999", "argument --total_steps: invalid int value: '1e999'"),
        ("--learning 0.1", "unrecognized arguments: --learning 0.1"),  # no abbreviations
    ],
)
def test_a_flag_that_cannot_be_is_refused_in_one_line(program, capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        program.parser.parse_args(arguments.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and message in line
    assert line.startswith(f"{program.__name__}.py: ") and "--help" in line


@pytest.mark.parametrize(
    "program", [monobeast, polybeast, ppo, gala, dqn, sac], ids=lambda p: p.__name__
)
def test_help_is_short_and_lists_no_flag_that_is_left_out(program):
    text = program.parser.format_help()
    assert 60 < len(text.splitlines()) < 120
    metavars = re.findall(r"^  --[a-z_]+ ([A-Z:_]+)", text, re.M)
    assert len(metavars) > 20 and max(map(len, metavars)) <= len("HOST:PORT")
    flags = program.parser.parse_args([])
    hidden = {name for name in LEFT_OUT if f"  --{name} " not in text}
    left_out = set() if program in (monobeast, polybeast) else {"env_backend", "greedy"}
    left_out |= {gala: {"write_profiler_trace"}}.get(program, set())
    assert hidden == left_out
    assert all(getattr(flags, name) == LEFT_OUT[name] for name in hidden)


@pytest.mark.parametrize(("has_gpu", "words"), [(True, "--disable_cuda"), (False, ""), (True, "")])
def test_a_learner_on_the_cpu_keeps_freed_memory(monkeypatch, has_gpu, words):
    kept = []
    monkeypatch.setattr(sys, "argv", ["a/program.py", *words.split()])
    monkeypatch.setattr("torch.cuda.device_count", lambda: int(has_gpu))
    # It would initialize CUDA, before a rank has chosen its GPU by CUDA_VISIBLE_DEVICES.
    monkeypatch.setattr("torch.cuda.is_available", lambda: pytest.fail("asks too early"))
    monkeypatch.setattr("beast.flags.keep_freed_memory", lambda: kept.append(True))
    for name in ("start_logging", "exit_on_signals"):
        monkeypatch.setattr(f"beast.flags.{name}", lambda *_: None)
    with pytest.raises(SystemExit):
        run_program(lambda: 0)
    assert bool(kept) == (bool(words) or not has_gpu)


@pytest.mark.parametrize("is_own", [False, True])
def test_an_error_in_code_of_a_users_own_is_shown_above_the_line(monkeypatch, is_own):
    monkeypatch.setattr(sys, "argv", ["a/program.py"])
    for name in ("start_logging", "keep_freed_memory", "signal.signal"):
        monkeypatch.setattr(f"beast.flags.{name}", lambda *_: None)

    def main():
        try:
            raise KeyError("speed") if is_own else FlagError("wrong")
        except Exception as error:
            raise EnvError("step(3) failed") from error

    with pytest.raises(SystemExit) as end:
        run_program(main)
    trace, line = end.value.code.split("program.py: ")
    assert line == "step(3) failed" and trace.endswith("KeyError: 'speed'\n" if is_own else "")
    assert ("test_flags.py" in trace) == trace.startswith("Traceback") == is_own


def test_integers_may_be_written_as_powers_of_ten():
    flags = monobeast.parser.parse_args("--total_steps 5e6 --batch_size 1e1 --seed 0e0".split())
    assert repr((flags.total_steps, flags.batch_size, flags.seed)) == "(5000000, 10, 0)"


def test_a_flag_of_the_servers_alone_is_said_to_be_one(capsys):
    hint = "; --{} is a flag of polybeast_env.py: add it to polybeast.py, too"
    with pytest.raises(SystemExit):
        polybeast.parser.parse_args(["--server_address=a:1"])
    hints = "did you mean --server_addresses?" + hint.format("server_address")
    assert hints in capsys.readouterr().err
    with pytest.raises(SystemExit):
        polybeast.parser.parse_args(["--learner", "a:1"])
    assert hint.format("learner") in capsys.readouterr().err


def test_a_flag_that_no_checkpoint_can_hold_is_refused_at_once(tmp_path):
    parser = create_parser()
    parser.add_argument("--roots", type=pathlib.Path, nargs="*")
    parser.add_argument("--root", type=pathlib.Path)
    assert parse(tmp_path, "--xpid run", parser).root is None
    for arguments, name in (("--root /a", "--root"), ("--roots /a /b", "--roots > 0")):
        with pytest.raises(FlagError, match=f"^{name} is a pathlib.PosixPath, with which no ch"):
            parse(tmp_path, f"--xpid run {arguments}", parser)
    assert parse(tmp_path, "--xpid run --root /a --disable_checkpoint", parser).root
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["rank", "num_learners"])
def test_a_flag_that_the_program_would_overwrite_is_refused(tmp_path, name):
    parser = create_parser()
    parser.add_argument(f"--{name}", type=int, default=16)
    with pytest.raises(FlagError, match="set by the program: rename your flag"):
        parse(tmp_path, "--xpid run", parser)


@pytest.mark.parametrize(
    "name, value",
    [("num_episodes", "9"), ("stall_timeout_s", [0.1]), ("use_lstm", 3), ("env_backend", "x")]
    + [("chosen", None), ("env", 3), (None, [])],
)
def test_saved_flags_of_wrong_types_are_refused(tmp_path, name, value):
    save(parse(tmp_path))
    change(tmp_path / "run" / "model.tar", "flags", *([name] if name else []), to=value)
    with pytest.raises(FlagError, match=r"use the checkpoint \S*model.tar: it is damaged"):
        parse(tmp_path)


def test_saved_flags_of_a_fork_may_be_lists_and_may_change(tmp_path):
    parser = create_parser()
    parser.add_argument("--sizes", type=positive(int), nargs="*", choices=[1, 2])
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--level", action="store_const", const=3, default=False)
    flags = parse(tmp_path, "--xpid run --sizes 1 2 --level", parser)
    flags.layers = [64, 64]
    save(flags)
    resumed = parse(tmp_path, "--xpid run", parser)
    assert (resumed.sizes, resumed.layers, resumed.level) == ([1, 2], [64, 64], 3)


@pytest.mark.parametrize("xpid", ["", " ", ".", "..", "a/b", "a/", "/a", "a\nb", "a\0b"])
@pytest.mark.parametrize("mode", ["train", "test"])
def test_a_run_is_named_as_one_folder_can_be(tmp_path, capsys, xpid, mode):
    arguments = [f"--xpid={xpid}", "--savedir", str(tmp_path), "--mode", mode]
    with pytest.raises(SystemExit):
        parse_flags(create_parser(), arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"argument --xpid: {xpid!r} is not valid: it must be the name of one folder in" in line
    with pytest.raises(FlagError, match="File name too long"):
        parse(tmp_path, "--xpid " + 300 * "a")


def test_a_new_run_named_much_like_another_is_pointed_out(tmp_path, caplog):
    save(parse(tmp_path, "--xpid pong-lstm"))
    save(parse(tmp_path, "--xpid sweep-1"))
    for xpid in ("pong-lstm", "breakout", "sweep-12"):
        parse(tmp_path, f"--xpid {xpid}")
    assert not caplog.text
    parse(tmp_path, "--xpid pong-lsmt")
    assert caplog.messages == ["--xpid pong-lsmt is a new run; there is also pong-lstm"]


def test_a_missing_wandb_is_reported_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FlagError, match="pip install wandb"):
        parse(tmp_path, "--xpid run --wandb")
    save(parse(tmp_path))
    assert parse(tmp_path, "--xpid run --wandb --mode test").wandb


def test_flags_come_from_the_checkpoint_unless_given(tmp_path):
    save(parse(tmp_path, "--xpid run --learning_rate 0.25 --use_lstm"))
    flags = parse(tmp_path)
    assert flags.learning_rate == 0.25 and flags.use_lstm and flags.total_steps == 1000
    flags = parse(tmp_path, "--xpid run --learning_rate 0.5 --total_steps 2000")
    assert flags.learning_rate == 0.5  # though that is the default
    assert flags.use_lstm and flags.total_steps == 2000
    # Nor do they leak into the next call of the process.
    parser = create_parser()
    assert parse(tmp_path, "--xpid run", parser).learning_rate == 0.25
    assert parse(tmp_path, "--xpid other", parser).learning_rate == 0.5
    assert parse(tmp_path, "", parser).xpid not in ("run", "other")


@pytest.mark.parametrize(
    ("program", "given", "chosen"),
    [
        (monobeast, {"envs_per_actor": 8}, {"num_actors", "num_buffers"}),
        (monobeast, {"num_buffers": 100}, {"num_actors", "envs_per_actor"}),
        (polybeast, {"num_servers": 3}, {"num_actors", "envs_per_stream"}),
    ],
)
def test_choices_for_the_machine_are_made_anew_unless_given(tmp_path, program, given, chosen):
    ((name, value),) = given.items()
    flags = parse(tmp_path, f"--xpid run --{name} {value}", program.parser)
    for _ in range(2):  # once more: what was kept stays so
        flags = program.resolve(flags)
        assert set(flags.chosen) == chosen
        assert all(getattr(flags, name) is not None for name in chosen)
        save(flags)
        flags = parse(tmp_path, "--xpid run", program.parser)
        assert vars(flags).items() >= (given | dict.fromkeys(chosen)).items()
    assert parse(tmp_path, "--xpid run --num_actors 5", program.parser).num_actors == 5


def test_flags_of_one_call_alone_do_not_come_from_the_checkpoint(tmp_path):
    parser = create_parser()
    credentials.add_flags(parser)  # which secrets are sent is not for a checkpoint to say
    save(parse(tmp_path, "--xpid run --frame_skip 2", parser))
    names = ("disable_cuda", "disable_checkpoint", "end_with_stdin", "wandb", *credentials.FLAGS)
    others = {"savedir": "/gone", "mode": "test", "of_an_older_version": 3}
    for name, value in (dict.fromkeys(names, True) | others).items():
        change(tmp_path / "run" / "model.tar", "flags", name, to=value)
    flags = parse(tmp_path, "--xpid run", parser)
    assert not any(getattr(flags, name) for name in names) and flags.frame_skip == 2
    assert flags.savedir == str(tmp_path) and flags.mode == "train"
    assert "of_an_older_version" not in flags
    assert parse(tmp_path, "--xpid run --mode test", parser).mode == "test"


def test_a_checkpoint_opens_no_port(tmp_path):
    save(parse(tmp_path, "--xpid run", polybeast.parser))
    for name, value in {"listen": "0.0.0.0:50050", "insecure": True}.items():
        change(tmp_path / "run" / "model.tar", "flags", name, to=value)
    flags = parse(tmp_path, "--xpid run", polybeast.parser)
    assert flags.listen is None and not flags.insecure


def test_best_brings_its_own_flags_and_is_for_tests_alone(tmp_path):
    save(parse(tmp_path, "--xpid run --learning_rate 0.25"))
    shutil.copy(tmp_path / "run" / "model.tar", tmp_path / "run" / "best.tar")
    save(parse(tmp_path, "--xpid run --learning_rate 0.125"))
    assert parse(tmp_path, "--xpid run --mode test --best").learning_rate == 0.25
    assert parse(tmp_path, "--xpid run --mode test").learning_rate == 0.125
    for flag in ("--best", "--record_video videos", "--result_file result.json"):
        with pytest.raises(FlagError, match=f"{flag.split()[0]} is for --mode test"):
            parse(tmp_path, f"--xpid run {flag}")


OTHER_ENV = "--env is Breakout, .* is of PongNo.*: leave --env out"


@pytest.mark.parametrize(
    ("saved", "refused", "message", "taken"),
    [
        ("", "--env Breakout", OTHER_ENV, "--env PongNoFrameskip-v4"),
        ("", "--env Breakout --mode test", OTHER_ENV, "--env PongNoFrameskip-v4 --mode test"),
        ("--total_steps 200", "", r"has done its 200 steps: .* \(200\)", "--total_steps 201"),
        ("--total_steps 200", "--total_steps 100", "has done its 200 steps: raise", "--mode test"),
        # A module that only the checkpoint names is not imported.
        ("--env evil:Pong", "", "names 'evil:Pong', .* add --env evil:Pong$", "--env evil:Pong"),
        ("--env evil:Pong", "--mode test", "add --env", "--mode test --env evil:Pong"),
        ("--env my-evil:Pong", "", "add --env my-evil:Pong$", "--env my-evil:Pong"),
    ],
)
def test_what_a_run_does_not_go_on_with_is_refused(tmp_path, saved, refused, message, taken):
    save(parse(tmp_path, f"--xpid run {saved}"))
    with pytest.raises(FlagError, match=message):
        parse(tmp_path, f"--xpid run {refused}")
    assert parse(tmp_path, f"--xpid run {taken}").xpid == "run"
    assert parse(tmp_path, "--xpid other --env Breakout").env == "Breakout"


@pytest.mark.parametrize("program", [monobeast, polybeast])
def test_defaults_are_those_of_the_published_curves(program):
    text = (ROOT / "results" / "atari" / "breakout-2" / "meta.json").read_text()
    groups = (program.loss, program.rmsprop)
    names = [action.dest for group in groups for action in group._group_actions]
    assert len(names) == 10
    for name in [*names, "batch_size", "unroll_length", "reward_clipping"]:
        assert program.parser.get_default(name) == json.loads(text)["flags"][name], name


def test_a_folder_of_runs_stays_where_the_current_folder_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert monobeast.parser.parse_args(["--savedir", "runs"]).savedir == str(tmp_path / "runs")
    default = monobeast.parser.parse_args([]).savedir
    assert default == os.path.expanduser("~/logs/torchbeast")


def test_evaluations_are_for_programs(tmp_path):
    with pytest.raises(FlagError, match="at which .* would start anew: give main.. --eval_int"):
        parse(tmp_path, "--eval_interval 10")
    assert parse(tmp_path, "").eval_interval == 0


def test_a_run_keeps_its_algorithm(tmp_path):
    save(parse(tmp_path, "--xpid run --algorithm ddpg --learning_rate 1", sac.parser))
    for mode in ("train", "test"):
        with pytest.raises(FlagError, match="--algorithm is td3, but .* is of ddpg: leave"):
            parse(tmp_path, f"--xpid run --algorithm td3 --mode {mode}", sac.parser)
    assert parse(tmp_path, "--xpid run", sac.parser).algorithm == "ddpg"


def test_a_test_of_a_run_that_is_not_there_lists_those_that_are(tmp_path):
    with pytest.raises(FlagError, match=r"there is no checkpoint in .*nope \(no run has"):
        parse(tmp_path, "--xpid nope --mode test")
    for i, xpid in enumerate(("old", "new")):
        save(parse(tmp_path, f"--xpid {xpid}"))
        os.utime(tmp_path / xpid / "model.tar", (i, i))
    (tmp_path / "latest").symlink_to("new")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FlagError, match=r"nope \(runs with one, the newest first: new, old\)$"):
        parse(tmp_path, "--xpid nope --mode test")
    (tmp_path / "old" / "model.tar").rename(tmp_path / "old" / "best.tar")
    with pytest.raises(FlagError, match=r"best.tar needs one finished game .*first: old\)"):
        parse(tmp_path, "--xpid new --mode test --best")


def test_runs_have_a_default_name_and_a_test_takes_the_latest(tmp_path):
    flags = parse_flags(polybeast.parser, ["--savedir", str(tmp_path)])
    assert re.match(r"polybeast-2\d{7}-\d{6}-[0-9a-f]{8}$", flags.xpid)
    for arguments in ("--mode test", "--xpid latest"):
        with pytest.raises(FlagError, match="there is no .*latest: check --savedir, or give"):
            parse(tmp_path, arguments)
    save(parse(tmp_path, "--xpid one --learning_rate 0.25"))
    save(parse(tmp_path, "--xpid two --learning_rate 0.125"))
    (tmp_path / "latest").symlink_to("two")
    assert parse(tmp_path, "--mode test").learning_rate == 0.125
    assert parse(tmp_path, "--xpid latest").xpid == "two"


def test_servers_given_replace_those_of_the_checkpoint(tmp_path):
    for before, now, addresses, number in (
        ("--server_addresses a:1", "--num_servers 2", None, 2),
        ("--num_servers 2", "--server_addresses a:1", "a:1", None),
        ("--server_addresses b:1", "", "b:1", None),
    ):
        save(parse(tmp_path / before, f"--xpid run {before}", polybeast.parser))
        flags = parse(tmp_path / before, f"--xpid run {now}", polybeast.parser)
        assert (flags.server_addresses, flags.num_servers) == (addresses, number)


def test_a_run_without_a_seed_draws_one(tmp_path):
    arguments = ["--savedir", str(tmp_path), "--xpid", "run"]
    seeds = {parse_flags(create_parser(), arguments).seed for _ in range(3)}
    assert len(seeds) == 3 and all(0 <= seed < 2**32 for seed in seeds)


def test_the_default_env_is_pong_unless_servers_run_already(tmp_path):
    for program in (monobeast, polybeast):
        assert parse(tmp_path, "--xpid run", program.parser).env == "PongNoFrameskip-v4"
    assert parse(tmp_path, "--server_addresses host:50051", polybeast.parser).env is None


def test_other_systems_than_linux_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(FlagError, match="runs on Linux only, not on darwin"):
        parse(tmp_path)


def test_a_module_that_is_a_forks_default_excuses_no_other(tmp_path):
    save(parse(tmp_path, "--xpid run --env evil:Pong-v0"))
    parser = create_parser()
    parser.set_defaults(env="our:Pong-v0")
    with pytest.raises(FlagError, match="add --env evil:Pong-v0"):
        parse(tmp_path, "--xpid run", parser)


def test_a_checkpoint_alone_does_not_say_where_a_token_goes(tmp_path):
    def parse_run(arguments=""):
        return parse(tmp_path, f"--xpid run {arguments}", polybeast.parser)

    save(parse_run("--server_addresses h:1,h:2"))
    assert parse_run().server_addresses == "h:1,h:2"
    with pytest.raises(FlagError, match="'h:1,h:2', .* add --server_addresses h:1,h:2; "):
        parse_run("--auth_token_file token")
    parse_run("--auth_token_file token --server_addresses h:1,h:2")


@pytest.fixture
def long_tmpdir(tmp_path, monkeypatch):
    folder = tmp_path / (90 * "x")
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_sockets_get_a_short_folder_where_tmpdir_is_long(long_tmpdir, monkeypatch):
    config = multiprocessing.current_process()._config  # which children inherit
    monkeypatch.setitem(config, "tempdir", None)
    folder = fork_server._make_socket_folder()
    assert multiprocessing.util.get_temp_dir() == folder and os.path.isdir(folder)
    assert len(multiprocessing.connection.arbitrary_address("AF_UNIX")) < 108
    flags = polybeast.parser.parse_args(["--num_servers", "100"])
    local = servers.LocalServers(flags, "script.py")
    assert all(len(address.removeprefix("unix:")) < 108 for address in local.addresses)
    assert list(long_tmpdir.iterdir()) == []


def test_sockets_get_a_folder_where_the_usual_ones_are_read_only(monkeypatch):
    def find():
        raise FileNotFoundError("No usable temporary directory")

    monkeypatch.setattr("tempfile.gettempdir", find)
    monkeypatch.setattr("os.access", lambda path, mode: path == "/dev/shm")
    assert lifetime.socket_folder() == "/dev/shm"


def test_a_flag_that_servers_cannot_be_given_is_refused_by_name():
    flags = polybeast.parser.parse_args(["--num_servers", "1"])
    flags.level_dir, flags.sizes = pathlib.Path("/levels"), (1, 2)
    with pytest.raises(FlagError, match="--level_dir is a PosixPath, which environment servers"):
        servers.LocalServers(flags, "script.py")
    flags.level_dir = None
    assert json.loads(servers.LocalServers(flags, "script.py")._command[-1])["sizes"] == [1, 2]


def test_a_tmpdir_too_long_for_sockets_is_refused(long_tmpdir, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(FlagError, match=f"^TMPDIR .{long_tmpdir}. is too long for sockets"):
        parse(tmp_path)


@pytest.mark.parametrize("parse", [expand_addresses, lambda text: consecutive_addresses(text, 3)])
def test_a_path_too_long_for_a_socket_is_refused(parse):
    parse(f"unix:{99 * 'x'}")
    with pytest.raises(ValueError, match=r"xx(\.2)? is too long: .* at most 107 bytes"):
        parse(f"unix:/{107 * 'x'}")


def test_several_servers_have_consecutive_addresses():
    addresses = consecutive_addresses("some.host:50051", 3)
    assert addresses == ["some.host:50051", "some.host:50052", "some.host:50053"]
    assert consecutive_addresses("[::1]:7", 2) == ["[::1]:7", "[::1]:8"]
    assert consecutive_addresses("0.0.0.0:65535", 1) == ["0.0.0.0:65535"]
    assert consecutive_addresses("unix:/a/b", 1) == ["unix:/a/b"]
    assert consecutive_addresses("unix:/a/b", 2) == ["unix:/a/b.0", "unix:/a/b.1"]


def test_server_addresses_may_be_ranges_and_sockets():
    addresses = ["h:1", "h:3", "h:4", "[::1]:5", "unix:/a"]
    assert expand_addresses("h:1, h:3-4,[::1]:5,unix:/a") == addresses
    for text in ("h", "h:2-1", "h:1-70000", ":1", "h:1,"):
        with pytest.raises(ValueError, match="--server_addresses has .*; give host:port"):
            expand_addresses(text)
