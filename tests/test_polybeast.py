# SPDX-License-Identifier: Apache-2.0
"""The whole learner program: it learns, survives its servers, stops, goes on, and fails well."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import catch_poly  # it makes the polybeast of this process play Catch
import numpy as np
import pytest
import torch
from catch_env import Catch, Counter, Echo
from counting import FakeServer, obey
from deadline import Thread
from program import (
    TESTS,
    Program,
    column,
    last_step,
    load,
    read_meta,
    read_rows,
    run,
    split_words,
    wait_until,
)
from stream import serving
from torch import nn

import experiment
import libtorchbeast
import monobeast
import polybeast
import polybeast_env
import servers
from environment import EnvError, Environments
from experiment import FlagError

REPO = TESTS.parent
CATCH, CATCH_SERVER = TESTS / "catch_poly.py", TESTS / "catch_env.py"
POLYBEAST = REPO / "polybeast.py"
ANY_PORT = "127.0.0.1:0"
# Learns Catch in all of a dozen seeds; a few seconds on two cores.
GOOD = "--num_servers 2 --envs_per_stream 8 --learning_rate 0.01 --total_steps 100_000"
SMALL = "--num_servers 1 --envs_per_stream 4 --batch_size 4"
ENDLESS = "--total_steps 100_000_000"
STOP_TIME = 15  # seconds; servers may take 5 of them, and the machine may be busy


def out(folder):
    """Return what out.log holds so far."""
    try:
        return (folder / "out.log").read_text()
    except FileNotFoundError:
        return ""


def traces(folder):
    """Return what a program has left in its folder for temporary files; PyTorch's is not ours."""
    paths = folder.rglob("*")
    return [path for path in paths if path.name.startswith("polybeast-") or path.is_socket()]


# ---------------------------------------------------------------------- one run from start to end


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Facts of a run that learned Catch with servers of its own."""
    savedir, temporary = tmp_path_factory.mktemp("learned"), tmp_path_factory.mktemp("t")
    status, output = run(
        CATCH, GOOD, "--env Catch --seed 12 --xpid first --savedir", savedir,
        TMPDIR=str(temporary),
    )  # fmt: skip
    return {"savedir": savedir, "status": status, "output": output, "temporary": temporary}


def test_catch_is_learned_in_under_a_minute(learned):
    assert learned["status"] == 0, learned["output"]
    rows = read_rows(learned["savedir"] / "first")
    assert float(rows[-1]["mean_episode_return"]) >= 0.9
    assert float(rows[-1]["_time"]) - float(rows[0]["_time"]) < 60
    assert int(rows[-1]["step"]) >= 100_000


def test_servers_started_here_leave_no_process_no_socket_and_no_folder(learned):
    # That no process is left has been seen by `run`.
    (command,) = re.findall(r"Starting environment servers: (.*)", learned["output"])
    assert f"unix:{learned['temporary']}/" in command
    assert learned["output"].count("serving on unix:") == 2
    assert traces(learned["temporary"]) == []


def test_folder_holds_what_happened(learned):
    folder = learned["savedir"] / "first"
    for name in ("meta.json", "logs.csv", "out.log", "model.tar", "best.tar"):
        assert (folder / name).stat().st_size > 0, name
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    assert list(folder.glob("*.tmp")) == []
    latest = learned["savedir"] / "latest"
    assert latest.is_symlink() and latest.resolve() == folder.resolve()
    assert "Saved" in out(folder)


def test_meta_tells_flags_and_circumstances(learned):
    meta = read_meta(learned["savedir"] / "first")
    assert meta["flags"]["seed"] == 12 and meta["flags"]["envs_per_stream"] == 8
    assert meta["status"] == "ended"
    assert meta["start"] < meta["end"]
    assert meta["versions"]["torch"] == torch.__version__


def test_logs_go_forward_and_never_hold_a_nan(learned):
    folder = learned["savedir"] / "first"
    text = (folder / "logs.csv").read_text()
    assert text.startswith("_tick,_time,step,")
    assert "nan" not in text.lower()
    rows = read_rows(folder)
    assert [int(row["_tick"]) for row in rows] == list(range(len(rows)))
    for key in ("_time", "step"):
        assert column(rows, key) == sorted(column(rows, key))
    wanted = {"mean_episode_return", "mean_game_return", "total_loss", "pg_loss", "baseline_loss"}
    wanted |= {"entropy_loss", "grad_norm", "learning_rate", "steps_per_second"}
    wanted |= {"inference_batch_size", "learner_queue_size", "connected_actors", "reconnects"}
    wanted |= {"policy_lag_min", "policy_lag_mean", "policy_lag_max"}
    wanted |= {"learner_wait", "actor_wait_inference", "actor_wait_environments"}
    wanted |= {"actor_wait_learner"}
    assert wanted <= rows[0].keys()


def test_shares_of_time_spent_waiting_are_told(learned):
    rows = read_rows(learned["savedir"] / "first")
    for key in ("learner_wait", "actor_wait_inference", "actor_wait_environments"):
        assert any(column(rows, key))
        assert all(0 <= share <= 1 for share in column(rows, key))
    text = out(learned["savedir"] / "first")
    assert re.search(r"wait \d+%/\d+%/\d+%/\d+% ", text)


def test_figures_of_servers_batches_and_queue_are_true(learned):
    rows = read_rows(learned["savedir"] / "first")
    sizes = column(rows, "inference_batch_size")
    assert len(sizes) > 0 and all(8 <= size <= 16 for size in sizes)  # of one stream, or of both
    assert all(0 <= size <= 8 for size in column(rows, "learner_queue_size"))
    assert max(column(rows, "connected_actors")) == 2
    assert max(column(rows, "reconnects")) == 0


def test_screen_tells_steps_frames_returns_batch_queue_and_lag(learned):
    line = [line for line in learned["output"].splitlines() if "steps/s" in line][-2]
    number = r"-?[\d,.e+-]+"
    pattern = rf"\d+\.\d% \| {number} steps \| {number} steps/s \({number} frames/s\) "
    pattern += rf"\| return {number} \| game {number} \| loss {number} "
    pattern += rf"\| wait \d+%/\d+%/\d+%/\d+% \| batch {number} "
    pattern += rf"\| queue \d/8 \| lag {number}/{number}/{number} \| actors 2/2 "
    pattern += rf"\| health (ok|-|\w+ {number}) \| left \d+:\d\d"
    assert re.search(pattern, line), line


def test_policy_lag_is_small_but_not_nought(learned):
    rows = read_rows(learned["savedir"] / "first")
    lags = [column(rows, f"policy_lag_{name}") for name in ("min", "mean", "max")]
    assert len(lags[0]) > 0
    for least, mean, most in zip(*lags, strict=True):
        assert 0 <= least <= mean <= most
    # Two batches are made at a time, one is in the queue, two are fetched, one is learned from.
    assert 0 < max(lags[1]) <= 10


def test_learning_rate_falls_linearly_to_nought(learned):
    for row in read_rows(learned["savedir"] / "first"):
        left = 1 - min(int(row["step"]), 100_000) / 100_000
        assert float(row["learning_rate"]) == pytest.approx(0.01 * left)
    assert float(row["learning_rate"]) == 0


def test_checkpoint_holds_all_that_goes_on(learned):
    checkpoint = load(learned["savedir"] / "first" / "model.tar")
    wanted = {"model_state_dict", "optimizer_state_dict", "scheduler_state_dict", "step", "stats"}
    assert wanted | {"random_states", "flags"} <= checkpoint.keys()
    assert checkpoint["step"] == checkpoint["stats"]["step"] >= 100_000
    assert checkpoint["flags"]["env"] == "Catch"


def play(capsys, *arguments):
    """Run a test in this process; return what it printed and the returns that it told of."""
    capsys.readouterr()
    assert polybeast.main(["--mode", "test", *split_words(arguments)]) == 0
    output = capsys.readouterr().out
    return output, [float(r) for r in re.findall(r"^game \d+: return (\S+) in", output, re.M)]


def test_mode_test_plays_the_latest_run_by_default(learned):
    status, output = run(CATCH, "--mode test --savedir", learned["savedir"])
    assert status == 0, output
    returns = [float(r) for r in re.findall(r"^game \d+: return (\S+) in 9 steps", output, re.M)]
    assert len(returns) == 10
    assert f"10 games: mean return {np.mean(returns):.2f}, 95 % confidence" in output
    assert "sampling" in output and "Catch" in output and "at step 100," in output
    assert "serving on" not in output  # it needs no server
    assert np.mean(returns) > 0.5


def test_mode_test_samples_or_is_greedy(learned, capsys):
    arguments = ("--xpid first --num_episodes 100 --savedir", learned["savedir"])
    sampled, returns = play(capsys, *arguments)
    greedy, best = play(capsys, *arguments, "--greedy")
    assert "sampling" in sampled and "greedy" in greedy and "greedy" not in sampled
    assert len(returns) == len(best) == 100
    assert set(returns) <= {-1.0, 1.0} and np.mean(returns) > 0.8
    assert np.mean(best) >= np.mean(returns)


def test_mode_test_plays_the_best_checkpoint(learned, capsys):
    step = load(learned["savedir"] / "first" / "best.tar")["step"]
    output, returns = play(capsys, "--best --savedir", learned["savedir"])
    assert f"at step {step:,}, Catch" in output and np.mean(returns) > 0.5


@pytest.mark.parametrize("mode", ["train", "test"])
def test_monobeast_refuses_a_checkpoint_of_polybeast_and_names_both(learned, mode):
    words = ["--xpid", "first", "--mode", mode, "--savedir", str(learned["savedir"])]
    with pytest.raises(FlagError, match="is of polybeast.py, but this is monobeast.py"):
        monobeast.main(words)


def test_mode_test_leaves_the_run_as_it_is(learned, capsys):
    folder = learned["savedir"] / "first"
    before = {path: path.read_bytes() for path in folder.iterdir()}
    play(capsys, "--savedir", learned["savedir"])
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


# --------------------------------- a game that breaks, an LSTM, and numbers that go into no others


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Facts of a run in which an environment raises once, with all that can be more than one."""
    savedir, temporary = tmp_path_factory.mktemp("mixed"), tmp_path_factory.mktemp("t")
    words = "--use_lstm --num_servers 2 --num_actors 3 --envs_per_stream 3 --batch_size 4 "
    words += "--max_learner_queue_size 5 --num_inference_threads 2 --num_learner_threads 3 "
    words += f"--write_profiler_trace --pipes_basename unix:{temporary}/pipe --total_steps 12_000"
    status, output = run(
        CATCH, words, "--env", f"Failing-raise:{savedir / 'marker'}", "--savedir", savedir,
        TMPDIR=str(temporary),
    )  # fmt: skip
    return {"savedir": savedir, "status": status, "output": output, "temporary": temporary}


def test_an_environment_that_raises_is_told_with_its_traceback_and_the_run_goes_on(mixed):
    assert mixed["status"] == 0, mixed["output"]
    assert (mixed["savedir"] / "marker").exists()
    text = out(mixed["savedir"] / "latest")  # of the learner alone, not of its servers
    (stream, address) = re.search(
        r"WARNING .* stream (\d): the environment server at (\S+) says", text
    ).groups()
    assert address.startswith(f"unix:{mixed['temporary']}/pipe.")
    assert 'raise ValueError("the game is broken")' in text  # of its traceback
    assert re.search(r"environment \d \(.*\), step 25: step\(\d\) raised ValueError", text)
    assert f"stream {stream}: the environment server at {address} is back" in text
    rows = read_rows(mixed["savedir"] / "latest")
    assert int(rows[-1]["step"]) >= 12_000
    assert rows[-1]["reconnects"] == "1"


def test_servers_share_more_actors_than_there_are_of_them(mixed):
    rows = read_rows(mixed["savedir"] / "latest")
    assert max(column(rows, "connected_actors")) == 3
    assert "actors 3/3" in mixed["output"]
    assert max(column(rows, "inference_batch_size")) <= 9
    assert max(column(rows, "learner_queue_size")) <= 5 + 3  # what is over goes in as a whole


def test_sockets_at_a_place_of_ones_own_are_gone_too(mixed):
    assert mixed["output"].count(f"serving on unix:{mixed['temporary']}/pipe.") == 2
    assert traces(mixed["temporary"]) == []


def test_profiler_trace_shows_twenty_updates_of_all_learner_threads(mixed):
    trace = json.loads((mixed["savedir"] / "latest" / "trace.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert names.count("Optimizer.step#RMSprop.step") == 20


def test_a_run_without_a_seed_and_a_name_keeps_what_it_drew(mixed):
    folder = (mixed["savedir"] / "latest").resolve()
    assert re.fullmatch(r"torchbeast-\d{8}-\d{6}", folder.name)
    meta, checkpoint = read_meta(folder), load(folder / "model.tar")
    assert isinstance(meta["flags"]["seed"], int)
    assert meta["flags"]["seed"] == checkpoint["flags"]["seed"]


def test_mode_test_plays_with_an_lstm(mixed, capsys):
    for words in ("", "--greedy"):  # --use_lstm is known from the checkpoint
        _, returns = play(capsys, "--num_episodes 7 --savedir", mixed["savedir"], words)
        assert len(returns) == 7


def test_mode_test_plays_by_its_seed(mixed, capsys):
    def returns(words):
        return play(
            capsys, "--num_episodes 50 --savedir", mixed["savedir"], words
        )[1]  # fmt: skip

    # A policy this young wins some games and loses others.
    assert returns("--seed 1") == returns("--seed 1") != returns("--seed 2")


# ---------------------------------------------------------------------------- stop, and go on


# Tells what the optimizer is at its first step.
SPY = """
import pathlib, sys
sys.path.insert(0, {tests!r})
import catch_poly, experiment, polybeast, torch
learn = polybeast.learn

def spy(flags, model, batch, initial_agent_state, optimizer):
    path = pathlib.Path({path!r})
    if not path.exists():
        torch.save({{
            "optimizer": optimizer.state_dict(), "model": model.state_dict(), "flags": vars(flags)
        }}, path)
    return learn(flags, model, batch, initial_agent_state, optimizer)

polybeast.learn = spy
if __name__ == "__main__":
    experiment.start_logging()
    sys.exit(polybeast.main())
"""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """What happened in a run that was stopped by SIGTERM, resumed, and stopped by Ctrl-C."""
    savedir, temporary = tmp_path_factory.mktemp("stopped"), tmp_path_factory.mktemp("t")
    folder, facts = savedir / "run", {}
    facts["folder"], facts["temporary"] = folder, temporary
    # A rollout of each of ten environments is more than two batches.
    words = "--num_servers 1 --envs_per_stream 10 --batch_size 4 --env Catch --seed 5 "
    words += "--learning_rate 0.003 --alpha 0.98 --total_steps 2_000_000"
    with Program(
        CATCH, words, "--xpid run --savedir", savedir, TMPDIR=str(temporary)
    ) as program:  # fmt: skip
        program.wait_until(lambda: last_step(folder) > 1000)
        facts["members"] = len(program.members())
        program.process.send_signal(signal.SIGTERM)
        facts["term_status"], facts["term_output"] = program.end(STOP_TIME)
        program.wait_for_members()
    facts["checkpoint"] = load(folder / "model.tar")
    facts["meta"], facts["rows"] = read_meta(folder), read_rows(folder)

    spy, told = savedir / "spy.py", savedir / "told.tar"
    spy.write_text(SPY.format(tests=str(TESTS), path=str(told)))
    with Program(
        spy, "--xpid run --total_steps 3_000_000 --savedir", savedir, TMPDIR=str(temporary)
    ) as program:  # fmt: skip
        step = facts["checkpoint"]["step"]
        program.wait_until(lambda: step + 1000 < last_step(folder))
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does
        facts["int_status"], facts["int_output"] = program.end(STOP_TIME)
        program.wait_for_members()
    facts["told"] = load(told)
    return facts


def test_sigterm_ends_the_run_in_time_with_its_status(stopped):
    assert stopped["term_status"] == 128 + signal.SIGTERM, stopped["term_output"]
    assert "Caught SIGTERM" in stopped["term_output"]
    assert "Traceback" not in stopped["term_output"]


def test_ctrl_c_ends_the_run_in_time_with_its_status(stopped):
    assert stopped["int_status"] == 128 + signal.SIGINT, stopped["int_output"]
    assert "Caught SIGINT" in stopped["int_output"]
    for word in ("Traceback", "KeyboardInterrupt", "ERROR", "was lost"):
        assert word not in stopped["int_output"]


def test_no_process_socket_or_folder_is_left_after_a_stop(stopped):
    assert stopped["members"] >= 3  # while it ran: itself, what starts servers, a server
    assert traces(stopped["temporary"]) == []


def test_stopping_writes_a_checkpoint(stopped):
    checkpoint = stopped["checkpoint"]
    assert checkpoint["step"] == int(stopped["rows"][-1]["step"]) > 1000
    assert stopped["meta"]["status"] == "stopped by SIGTERM" and stopped["meta"]["end"]
    later = load(stopped["folder"] / "model.tar")
    assert later["step"] == int(read_rows(stopped["folder"])[-1]["step"]) > checkpoint["step"]


def test_resuming_goes_on_with_the_same_flags_except_for_those_given(stopped):
    saved = dict(stopped["checkpoint"]["flags"])
    assert stopped["told"]["flags"] == saved | {"total_steps": 3_000_000}
    assert saved["seed"] == 5 and saved["alpha"] == 0.98 and saved["env"] == "Catch"


def test_resuming_goes_on_with_the_same_model_and_optimizer(stopped):
    checkpoint, told = stopped["checkpoint"], stopped["told"]
    for key, value in told["model"].items():
        assert torch.equal(value, checkpoint["model_state_dict"][key]), key
    saved = checkpoint["optimizer_state_dict"]
    assert told["optimizer"]["state"].keys() == saved["state"].keys() != set()
    for index, state in told["optimizer"]["state"].items():
        for key, value in state.items():
            assert torch.equal(value, saved["state"][index][key]), (index, key)


def test_learning_rate_goes_on_by_the_new_number_of_steps(stopped):
    step = stopped["checkpoint"]["step"]
    (group,) = stopped["told"]["optimizer"]["param_groups"]
    assert group["lr"] == pytest.approx(0.003 * (1 - step / 3_000_000))
    assert group["initial_lr"] == 0.003 and group["alpha"] == 0.98
    rows, count = read_rows(stopped["folder"]), len(stopped["rows"])
    for row, total_steps in [(r, 2_000_000) for r in rows[:count]] + [
        (r, 3_000_000) for r in rows[count:]
    ]:
        expected = 0.003 * (1 - int(row["step"]) / total_steps)
        assert float(row["learning_rate"]) == pytest.approx(expected)


def test_steps_in_the_log_never_go_back(stopped):
    rows, before = read_rows(stopped["folder"]), stopped["rows"]
    assert rows[: len(before)] == before
    assert [int(row["_tick"]) for row in rows] == list(range(len(rows)))
    for key in ("_time", "step"):
        assert column(rows, key) == sorted(column(rows, key))
    assert int(rows[len(before)]["step"]) >= stopped["checkpoint"]["step"]


def test_resuming_is_told_in_meta(stopped):
    meta = read_meta(stopped["folder"])
    assert meta["earlier"] == [stopped["meta"]]
    assert meta["start"] >= stopped["meta"]["end"]


def test_more_environments_a_stream_than_in_a_batch_are_split_among_batches(stopped):
    rows = stopped["rows"]
    assert set(column(rows, "inference_batch_size")) == {10}
    updates = [int(row["step"]) for row in rows]
    assert all(step % (20 * 4) == 0 for step in updates)  # no step of Catch is an extra row


def test_servers_end_by_themselves_after_sigkill(tmp_path):
    words = f"--num_servers 2 --envs_per_stream 2 --batch_size 2 {ENDLESS} --env Catch --xpid run"
    with Program(CATCH, words, "--savedir", tmp_path, TMPDIR=str(tmp_path)) as program:
        program.wait_until(lambda: last_step(tmp_path / "run") > 0)
        assert len(program.members()) >= 4
        program.process.kill()
        program.process.wait()
        program.wait_for_members()
        assert traces(tmp_path) == []  # nor the folder that the learner has made


def test_servers_whose_main_process_is_killed_are_started_anew_and_others_end_the_run(tmp_path):
    folder = tmp_path / "run"
    words = f"--num_servers 2 --envs_per_stream 2 --batch_size 2 {ENDLESS} --env Catch --xpid run"
    with Program(CATCH, words, "--savedir", tmp_path, TMPDIR=str(tmp_path)) as program:
        program.wait_until(lambda: last_step(folder) > 0)
        (main,) = program.members("--end_with_stdin")
        os.kill(main, signal.SIGKILL)
        program.wait_until(lambda: program.output.count("Starting environment servers") == 2)
        program.wait_until(lambda: program.output.count(" is back") == 2)
        step = last_step(folder)
        program.wait_until(lambda: last_step(folder) > step)
        (main,) = program.members("--end_with_stdin")
        os.kill(main, signal.SIGTERM)  # upon which it ends by itself
        status, output = program.end()
        program.wait_for_members()
    assert status == 1 and "main process was killed by SIGKILL" in output
    assert output.splitlines()[-1].endswith("the environment servers have ended: see above")
    assert load(folder / "model.tar")["step"] > step
    assert traces(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_servers_start_leaves_nothing_behind(tmp_path, number):
    with Program(
        CATCH, SMALL, "--env Catch --savedir", tmp_path / "runs", TMPDIR=str(tmp_path)
    ) as program:  # fmt: skip
        program.wait_until(lambda: "Starting environment servers" in program.output)
        os.killpg(program.pid, number)
        status, output = program.end(STOP_TIME)
        program.wait_for_members()
    assert status in (128 + number, -number)
    assert "Traceback" not in output
    assert traces(tmp_path) == []


# ---------------------------------------------------------------- servers on other machines


class Host:
    """Another machine: a network namespace where one can be made, else a loopback address.

    Its cable can be pulled; where it has none, processes that are stopped are as silent.
    """

    def __init__(self):
        number = os.getpid() % 2**14
        self.name = f"polybeast-{os.getpid()}"
        self.device = f"pb{os.getpid()}"
        near, self.ip = (f"198.18.{number // 64}.{number % 64 * 4 + i}" for i in (1, 2))
        self.prefix = ["ip", "netns", "exec", self.name]
        self.server = None  # the Program that runs on it
        try:
            for words in (
                f"netns add {self.name}",
                f"link add {self.device} type veth peer name far netns {self.name}",
                f"addr add {near}/30 dev {self.device}",
                f"link set {self.device} up",
                f"-n {self.name} addr add {self.ip}/30 dev far",
                f"-n {self.name} link set far up",
            ):
                self._ip(words)
        except (OSError, subprocess.CalledProcessError):
            self.close()
            self.name, self.prefix = None, []
            self.ip = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"

    def _ip(self, words):
        subprocess.run(["ip", *words.split()], check=True, capture_output=True)

    def unplug(self):
        if self.name is not None:
            self._ip(f"link set {self.device} down")
        else:
            for pid in self.server.members():
                os.kill(pid, signal.SIGSTOP)

    def plug_in(self):
        if self.name is not None:
            self._ip(f"link set {self.device} up")
        else:
            for pid in self.server.members():
                os.kill(pid, signal.SIGCONT)

    def close(self):
        if self.name is not None:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                self._ip(f"netns del {self.name}")  # with it goes the cable


def free_address(ip):
    with socket.socket() as probe:
        with contextlib.suppress(OSError):  # not an address of ours: all its ports are free
            probe.bind((ip, 0))
        return f"{ip}:{probe.getsockname()[1] or 50051}"


def batches(create_env, num_envs, seeds=None):
    """Return what Server's make_environments may be; the seeds it is given go into a list."""

    def make_environments(wished_num_envs, seed, name):
        if seeds is not None:
            seeds.append(seed)
        return Environments(create_env, wished_num_envs or num_envs, seed, name)

    return make_environments


def kill_server(program):
    """Kill the process that serves, not the one that started it."""
    (pid,) = program.members("spawn_main")
    os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def many_machines(tmp_path_factory):
    """Facts of a run on servers that were started elsewhere, most of which come to harm."""
    savedir, facts = tmp_path_factory.mktemp("machines"), {}
    folder = savedir / "run"
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(contextlib.closing(Host()))
        near, far = facts["near"], facts["far"] = free_address("127.0.0.1"), free_address(host.ip)
        words = "--env Catch --num_servers 1 --envs_per_stream 4 --insecure --server_address"
        near_server = stack.enter_context(Program(CATCH_SERVER, words, near))
        host.server = stack.enter_context(Program(CATCH_SERVER, words, far, prefix=host.prefix))
        other_env, other_number = (
            stack.enter_context(serving(None, ANY_PORT, make_environments=batches(env, n)))
            for env, n in ((Counter, 4), (Catch, 3))
        )
        facts["other_env"], facts["other_number"] = other_env, other_number
        for server in (near_server, host.server):  # only with both are four environments the rule
            server.wait_until(lambda server=server: "serving on" in server.output)
        program = stack.enter_context(
            Program(
                CATCH, "--server_addresses", ",".join([near, far, other_env, other_number]),
                "--learning_rate 0.005", ENDLESS, "--xpid run --savedir", savedir,
            )
        )  # fmt: skip

        def wait_for_text(pattern, since=0):
            program.wait_until(lambda: re.search(pattern, out(folder)[since:]))
            return len(out(folder))

        def latest(key):
            return float(read_rows(folder)[-1][key])

        def wait_for_steps(count):
            step = last_step(folder)
            program.wait_until(lambda: last_step(folder) >= step + count)
            return last_step(folder)

        wait_for_text(rf"refused: the environment server at {other_env} has the spaces")
        wait_for_text(rf"refused: the environment server at {other_number} has 3 env")
        program.wait_until(lambda: last_step(folder) > 0 and latest("connected_actors") == 2)

        kill_server(near_server)
        at = wait_for_text(rf"stream 0: the environment server at {near} was lost")
        wait_for_text(rf"stream 0: the environment server at {near} is back")
        program.wait_until(lambda: latest("reconnects") == 1 and latest("connected_actors") == 2)
        facts["after_kill"] = wait_for_steps(1000)

        (pid,) = near_server.members("spawn_main")
        os.kill(pid, signal.SIGSTOP)
        facts["beside_hanging"] = wait_for_steps(2000)
        os.kill(pid, signal.SIGCONT)

        host.unplug()
        at = wait_for_text(rf"stream 1: the environment server at {far} was lost", at)
        facts["beside_unplugged"] = wait_for_steps(1000)

        near_server.process.kill()
        near_server.wait_for_members()  # the server notices by itself
        wait_for_text(r"No environment server answers: waiting for \['", at)
        program.wait_until(lambda: latest("connected_actors") == 0)
        facts["alone"] = last_step(folder)

        with serving(None, near, make_environments=batches(Catch, 4)):
            facts["after_return"] = wait_for_steps(2000)
            host.plug_in()
            wait_for_text(rf"stream 1: the environment server at {far} is back", at)
            program.wait_until(lambda: latest("connected_actors") == 2)
            program.wait_until(lambda: latest("mean_episode_return") >= 0.9)

            (pid,) = host.server.members("spawn_main")
            os.kill(pid, signal.SIGSTOP)  # even then it stops in time
            program.process.send_signal(signal.SIGTERM)
            facts["status"], facts["output"] = program.end(STOP_TIME)
            os.kill(pid, signal.SIGCONT)

        host.server.process.send_signal(signal.SIGTERM)
        facts["server_status"], facts["server_output"] = host.server.end(STOP_TIME)
        host.server.wait_for_members()
        facts["text"], facts["rows"] = out(folder), read_rows(folder)
        facts["checkpoint"] = load(folder / "model.tar")
    return facts


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0), (2, 1, 0)])
def test_what_most_servers_say_holds_whoever_answers_first(order):
    def late(create_env, num_envs):
        make_environments = batches(create_env, num_envs)

        def make_late(*args):
            time.sleep(0.5)
            return make_environments(*args)

        return make_late

    with contextlib.ExitStack() as stack:
        addresses = [
            stack.enter_context(serving(None, ANY_PORT, make_environments=make))
            for make in (batches(Counter, 2), late(Catch, 4), late(Catch, 4))
        ]
        addresses = [addresses[i] for i in order]
        handshake = servers.query_servers(addresses, None)
        assert handshake == libtorchbeast.query_server(addresses[order.index(1)])


def test_of_servers_of_which_as_many_differ_the_one_listed_first_is_believed():
    with contextlib.ExitStack() as stack:
        addresses = [
            stack.enter_context(serving(None, ANY_PORT, make_environments=batches(Catch, n)))
            for n in (2, 3)
        ]
        assert servers.query_servers(addresses, None)["num_envs"] == 2
        assert servers.query_servers(addresses[::-1], None)["num_envs"] == 3


@pytest.mark.timeout(600)
def test_servers_on_other_machines_train_catch(many_machines):
    assert many_machines["status"] == 128 + signal.SIGTERM, many_machines["output"]
    assert max(column(many_machines["rows"], "mean_episode_return")) >= 0.9
    assert many_machines["checkpoint"]["step"] >= many_machines["after_return"]
    assert "Starting environment servers" not in many_machines["output"]


def test_servers_that_differ_are_refused_by_name_and_the_rest_go_on(many_machines):
    text = many_machines["text"]
    for stream, name, what in (
        (2, "other_env", "has the spaces .*, but expected are "),
        (3, "other_number", "has 3 environments a stream, but expected are 4"),
    ):
        server = rf"the environment server at {many_machines[name]}"
        assert re.search(rf"WARNING .*stream {stream}: refused: {server} {what}", text)
    assert max(column(many_machines["rows"], "connected_actors")) == 2


def test_a_server_that_is_killed_is_named_and_used_again_once_it_is_back(many_machines):
    assert many_machines["after_kill"] > 0  # see the fixture
    assert f"at {many_machines['near']} was lost" in many_machines["text"]
    reconnects = column(many_machines["rows"], "reconnects")
    assert reconnects == sorted(reconnects) and reconnects[0] == 0 and reconnects[-1] >= 3


def test_a_server_that_hangs_or_is_unplugged_does_not_stop_the_others(many_machines):
    assert many_machines["after_kill"] < many_machines["beside_hanging"]
    assert many_machines["beside_hanging"] < many_machines["beside_unplugged"]


def test_when_all_servers_are_lost_the_learner_waits_says_so_and_goes_on(many_machines):
    (line,) = set(re.findall(r"No environment server answers: .*", many_machines["text"]))
    assert many_machines["near"] in line and many_machines["far"] in line
    assert many_machines["after_return"] > many_machines["alone"]


def test_a_server_stays_when_the_learner_goes(many_machines):
    assert many_machines["server_status"] == 128 + signal.SIGTERM
    assert "serving on" in many_machines["server_output"]


# ---------------------------------------------------------------------------------- it fails well


def test_an_unknown_game_is_a_short_error_that_says_what_to_change(tmp_path):
    start = time.monotonic()
    status, output = run(
        POLYBEAST, "--env PongNoFrameskipp-v4 --savedir", tmp_path / "runs", TMPDIR=str(tmp_path)
    )  # fmt: skip
    assert status == 1
    assert time.monotonic() < start + 60
    assert "PongNoFrameskipp-v4" in output and "such as PongNoFrameskip-v4" in output
    assert "Traceback" not in output
    last = output.strip().splitlines()[-1]
    assert last.startswith("polybeast.py: ") and "servers could not be started" in last
    assert list(tmp_path.iterdir()) == []


FAILING = """
import sys
sys.path.insert(0, {tests!r})
import catch_poly, experiment, polybeast
learn, calls = polybeast.learn, []

def failing_learn(*args):
    calls.append(args)
    if len(calls) == 3:
        raise ArithmeticError("the learner is broken")
    return learn(*args)

polybeast.learn = failing_learn
if __name__ == "__main__":
    experiment.start_logging()
    sys.exit(polybeast.main())
"""


def test_an_error_in_the_learner_ends_everything_with_its_traceback(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(tests=str(TESTS)))
    words = f"{SMALL} --num_servers 2 --env Catch --xpid run --savedir {tmp_path}"
    status, output = run(script, words, TMPDIR=str(tmp_path))  # which sees that no process is left
    assert status == 1
    assert "Traceback" in output and "in failing_learn" in output
    assert "ArithmeticError: the learner is broken" in output
    folder = tmp_path / "run"
    assert "ArithmeticError" in read_meta(folder)["status"] and "in failing_learn" in out(folder)
    assert traces(tmp_path) == []


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Return a function that trains in this process, on a server in it; and sees all threads end.

    It returns the status and the seeds that the server was asked for.
    """
    monkeypatch.setattr(experiment, "keep_freed_memory", lambda: None)
    before = set(threading.enumerate())

    def train(*arguments, env=Catch, num_envs=4):
        seeds = []
        with serving(None, ANY_PORT, make_environments=batches(env, num_envs, seeds)) as address:
            words = ["--savedir", str(tmp_path), "--server_addresses", address]
            words += ["--batch_size", "4", *split_words(arguments)]
            return polybeast.main(words), seeds[1:]  # the first one only asked for the spaces

    yield train
    names = ("run_to_the_end", "answer", "batch_and_learn", "tell", "run")
    left = [t for t in threading.enumerate() if t not in before and t.name in names]
    assert left == []


class FailingNet(catch_poly.Net):
    """Fails when it first answers actors, or when it first learns, as `when` says."""

    when = None

    def forward(self, inputs, agent_state):
        is_learning = torch.is_grad_enabled()
        if self.when == "learn" and is_learning:
            raise ArithmeticError("the net is broken")
        if self.when == "answer" and not is_learning and "episode_step" in inputs:
            raise ArithmeticError("the net is broken")
        return super().forward(inputs, agent_state)


@pytest.mark.parametrize("when", ["learn", "answer"])
def test_a_net_that_raises_ends_the_run_with_that_error(train, monkeypatch, tmp_path, when):
    monkeypatch.setattr(polybeast, "Net", FailingNet)
    monkeypatch.setattr(FailingNet, "when", when)
    with pytest.raises(ArithmeticError, match="the net is broken") as error:
        train("--num_inference_threads 2 --num_actors 3 --xpid run", ENDLESS)
    assert any(entry.name == "forward" for entry in error.traceback)
    assert read_meta(tmp_path / "run")["status"] == "ArithmeticError: the net is broken"
    assert not (tmp_path / "run" / "model.tar").exists()


class Astronomical(Catch):
    """Pays more than can be squared."""

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, 1e30, *rest


def test_updates_that_are_not_finite_end_the_run_and_leave_their_batch(train, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(FloatingPointError, match="lower --learning_rate"):
        train("--reward_clipping none --xpid run", ENDLESS, env=Astronomical)
    assert "FloatingPointError" in read_meta(folder)["status"]
    skipped = re.findall(r"The update was skipped, .*; (\d+) in a row", out(folder))
    # Another learner thread may have had one more at hand.
    assert skipped[: experiment.MAX_SKIPPED] == [str(1 + k) for k in range(experiment.MAX_SKIPPED)]
    dump = load(folder / "bad_batch.tar")
    batch, _ = dump["batch"]
    assert (batch["reward"] == 1e30).any() and batch["reward"].shape == (21, 4)
    assert dump["origin"] == {"streams": [0]}
    assert not (folder / "model.tar").exists()


class SometimesAstronomical(Catch):
    """Pays more than can be squared, once in a while."""

    count = 0

    def step(self, action):
        observation, reward, *rest = super().step(action)
        SometimesAstronomical.count += 1
        return observation, 1e30 if self.count % 2000 == 1000 else reward, *rest


def test_an_update_that_is_not_finite_is_skipped_and_counted(train, tmp_path):
    folder = tmp_path / "run"
    status, _ = train(
        "--reward_clipping none --xpid run --total_steps 6000", env=SometimesAstronomical
    )
    assert status == 0
    checkpoint = load(folder / "model.tar")
    skipped = checkpoint["stats"]["skipped_updates"]
    assert 1 <= skipped <= 4 and out(folder).count("The update was skipped") == skipped
    assert read_rows(folder)[-1]["skipped_updates"] == str(skipped)
    assert all(w.isfinite().all() for w in checkpoint["model_state_dict"].values())
    assert checkpoint["step"] >= 6000


class NotANumber(Catch):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float("nan"), *rest


def test_a_reward_that_is_not_a_number_does_not_come_through(train, tmp_path, monkeypatch):
    folder = tmp_path / "run"

    def stop():
        wait_until(lambda: out(folder).count("the reward is nan; it must be finite") > 1)
        os.kill(os.getpid(), signal.SIGINT)

    stopping = Thread(stop)
    status, _ = train("--xpid run", ENDLESS, env=NotANumber)
    stopping.result()
    assert status == 128 + signal.SIGINT
    assert load(folder / "model.tar")["step"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num_actors 3 --num_servers 4", "--num_actors is 3, .* 4 servers"),
        ("--num_actors 1 --server_addresses a:1,b:2", "--num_actors is 1, .* 2 servers"),
        ("--max_learner_queue_size 7 --batch_size 9", "is 7, .* --batch_size = 9"),
        ("--server_addresses a:1 --pipes_basename unix:/b", r"a:1\) .*unix:/b\) .* only one"),
        ("--server_addresses a:1,,b:2", "separated by commas"),
        ("--server_addresses nowhere", "nowhere.* host:port"),
        ("--pipes_basename nowhere", "nowhere.* host:port"),
        ("--batch_size 0", "--batch_size is 0"),
        ("--unroll_length 0", "--unroll_length is 0"),
        ("--total_steps -5", "--total_steps is -5"),
        ("--num_servers 0", "--num_servers is 0"),
        ("--num_actors 0", "--num_actors is 0"),
        ("--envs_per_stream 0", "--envs_per_stream is 0"),
        ("--num_inference_threads 0", "--num_inference_threads is 0"),
        ("--num_learner_threads -1", "--num_learner_threads is -1"),
        ("--max_learner_queue_size 0", "--max_learner_queue_size is 0"),
        ("--envs_per_stream 5000", "--envs_per_stream is 5000, .* 4096"),
        ("--seed -1", "--seed is -1"),
        ("--checkpoint_interval_s 0", "--checkpoint_interval_s is 0.0"),
        ("--best", "--best is for --mode test"),
    ],
)
def test_contradictory_flags_are_refused_before_anything_starts(
    tmp_path, monkeypatch, words, message
):
    def start(*args, **kwargs):
        raise AssertionError("a server was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(FlagError, match=message):
        polybeast.main(["--env", "Catch", "--savedir", str(tmp_path), *words.split()])
    assert list(tmp_path.iterdir()) == []


class Spaceless:
    """A game in the old API, which does not say what its observations are."""

    def reset(self):
        return np.zeros(3, np.float32)


def create_nothing(num_envs, seed, name):
    raise RuntimeError("the game is not installed")


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (lambda: serving(Spaceless, ANY_PORT), "do not tell the spaces"),
        (
            lambda: serving(None, ANY_PORT, make_environments=create_nothing),
            r"create_nothing(?s:.*)RuntimeError: the game is not installed",
        ),
        (lambda: stopping(FakeServer(obey(version=7))), "version 7, .* 1"),
    ],
    ids=["spaces", "environments", "version"],
)
def test_servers_none_of_which_can_be_used_end_the_run_with_the_reason(tmp_path, server, message):
    with server() as address, pytest.raises(EnvError, match=message):
        polybeast.main(["--savedir", str(tmp_path), "--server_addresses", address])
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def stopping(server):
    try:
        yield server.address
    finally:
        server.stop()


class Started(Exception):
    """Servers were to be started."""


def test_flags_of_the_environment_reach_servers_started_here(tmp_path, monkeypatch):
    commands = []

    def start(command, **kwargs):
        commands.append(command)
        raise Started

    monkeypatch.setattr(subprocess, "Popen", start)
    words = "--env BreakoutNoFrameskip-v4 --seed 7 --num_servers 3 --envs_per_stream 5 --color "
    words += "--no_episodic_life --no_fire_reset --no_max_pool --frame_skip 2 --frame_size 0 "
    words += "--frame_stack 1 --noop_max 0 --sticky_actions 0.5 --full_action_space"
    words += f" --savedir {tmp_path}"
    with pytest.raises(Started):
        polybeast.main(words.split())
    python, script, *arguments = commands[0]
    served = vars(polybeast_env.parser.parse_args(arguments))
    flags = vars(polybeast.parser.parse_args(words.split()))
    assert python == sys.executable and script == polybeast.ENV_SCRIPT
    assert served.pop("server_address").startswith("unix:/") and served.pop("end_with_stdin")
    assert not served.pop("insecure")
    assert len(served) > 12
    assert served == {name: flags[name] for name in served}


# ----------------------------------------------------------------------------- seeds, and resuming


def first_weights(monkeypatch):
    """Return a list to which the weights of each run's net are added before it learns."""
    weights = []

    class Recorded(catch_poly.Net):
        def __init__(self, *args):
            super().__init__(*args)
            weights.append(torch.cat([p.detach().flatten() for p in self.parameters()]))

    monkeypatch.setattr(polybeast, "Net", Recorded)
    return weights


def test_seed_reaches_model_and_each_stream(train, monkeypatch):
    weights, seeds = first_weights(monkeypatch), []
    for number, seed in enumerate((3, 3, 4)):
        status, wished = train(f"--xpid {number} --seed {seed} --num_actors 2 --total_steps 100")
        assert status == 0
        seeds.append(sorted(wished))
    assert seeds == [[[s, 1, 0, 0], [s, 2, 0, 0]] for s in (3, 3, 4)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_finished_run_goes_on_only_where_total_steps_is_raised(train, tmp_path):
    assert train("--xpid run --seed 3 --total_steps 100")[0] == 0
    step = load(tmp_path / "run" / "model.tar")["step"]
    with pytest.raises(FlagError, match=rf"has done its {step} steps: raise --total_steps"):
        train("--xpid run")
    status, seeds = train("--xpid run --total_steps 500")
    assert status == 0
    assert seeds == [[3, 1, step, 0]]  # other games than before
    assert load(tmp_path / "run" / "model.tar")["step"] >= 500


def test_a_checkpoint_that_does_not_fit_is_refused_by_name_and_left_alone(train, tmp_path):
    train("--xpid run --total_steps 100")
    path = tmp_path / "run" / "model.tar"
    before = path.read_bytes()
    with pytest.raises(FlagError, match="does not fit .*--use_lstm was False, is True"):
        train("--xpid run --use_lstm --total_steps 500")
    assert path.read_bytes() == before


def test_all_numbers_may_be_one(train, tmp_path):
    words = "--unroll_length 1 --batch_size 1 --envs_per_stream 1 --num_learner_threads 1"
    assert train(words, "--total_steps 15 --xpid run")[0] == 0
    assert load(tmp_path / "run" / "model.tar")["step"] == 15


def test_no_checkpoint_is_written_where_none_is_wanted(train, tmp_path):
    assert train("--xpid run --disable_checkpoint --total_steps 100")[0] == 0
    assert not (tmp_path / "run" / "model.tar").exists()


# ----------------------------------------------------------------------------- weights, answers


class Even(nn.Module):
    """Answers with its weights, which are all the same in every whole version."""

    def __init__(self, size=1000):
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.zeros(size)) for _ in range(2))

    def set(self, value):
        with torch.no_grad():
            self.one.fill_(value)
            self.other.fill_(value)

    def forward(self, inputs, agent_state):
        shape = inputs["reward"].shape
        values = torch.cat([self.one, self.other])
        return {
            "action": torch.zeros(shape, dtype=torch.int64),
            "least": values.min().expand(shape).clone(),
            "most": values.max().expand(shape).clone(),
        }, agent_state + 1


def test_published_weights_are_a_copy_with_a_version_that_counts():
    model, other = Even(), Even()
    weights = polybeast.PublishedWeights(model)
    assert weights.version == weights.load_into(other) == 1
    model.set(2)
    assert weights.load_into(other) == 1
    assert not other.one.any()  # not those that were never published
    weights.publish(model)
    assert weights.version == weights.load_into(other) == 2
    other.set(9)  # a reader's copy is its own
    assert weights.load_into(other) == 2
    assert set(other.other.tolist()) == {2}


def test_published_weights_are_never_torn():
    weights = polybeast.PublishedWeights(Even())
    ended = threading.Event()

    def publish():
        model = Even()
        try:
            for value in range(1, 500):
                model.set(value)
                weights.publish(model)
        finally:
            ended.set()

    def read():
        model, versions = Even(), [1]
        while not ended.is_set():
            versions.append(weights.load_into(model))
            (value,) = set(model.one.tolist() + model.other.tolist())
            assert value == versions[-1] - 1
        assert versions == sorted(versions)
        return len(set(versions))

    readers = [Thread(read) for _ in range(3)]
    publisher = Thread(publish)
    assert max(reader.result() for reader in readers) > 1
    publisher.result()


def test_answers_tell_the_version_of_the_weights_that_gave_them():
    model, lock = Even(), threading.Lock()
    weights = polybeast.PublishedWeights(model)

    class Overtaken(Even):
        """While it answers, newer weights are published."""

        def forward(self, inputs, agent_state):
            with lock:
                model.set(weights.version)
                weights.publish(model)
            return super().forward(inputs, agent_state)

    batcher = libtorchbeast.DynamicBatcher(batch_dim=1, maximum_batch_size=64)
    flags, sizes, device = polybeast.parser.parse_args([]), [], torch.device("cpu")
    threads = [
        Thread(polybeast.inference, flags, Overtaken(), batcher, weights, device, sizes)
        for _ in range(2)
    ]

    def ask(num_columns):
        inputs = {"reward": torch.zeros(1, num_columns)}
        state, versions = torch.zeros(1, num_columns), []
        for count in range(1, 51):
            outputs, state = batcher.compute((inputs, state))
            (version,) = set(outputs["policy_version"].flatten().tolist())
            assert outputs["policy_version"].shape == (1, num_columns)
            assert outputs["policy_version"].dtype == torch.int64
            for name in ("least", "most"):
                assert set(outputs[name].flatten().tolist()) == {version - 1}
            assert set(state.flatten().tolist()) == {count}
            versions.append(version)
        assert versions == sorted(set(versions))  # each time with newer weights

    for caller in [Thread(ask, 1 + i) for i in range(4)]:
        caller.result()
    batcher.close()
    for thread in threads:
        thread.result()
    assert sum(sizes) == 50 * (1 + 2 + 3 + 4)
    assert max(sizes) <= 10


def test_answers_in_bf16_are_of_the_newest_weights():
    class OneLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, inputs, agent_state):
            value = self.layer(inputs["reward"].unsqueeze(-1)).squeeze(-1)
            assert value.dtype == torch.bfloat16
            return {"action": torch.zeros(value.shape, dtype=torch.int64), "value": value}, ()

    model = OneLayer()
    weights = polybeast.PublishedWeights(model)
    batcher = libtorchbeast.DynamicBatcher(batch_dim=1)
    flags = polybeast.parser.parse_args(["--precision", "bf16"])

    def answer():
        polybeast.inference(flags, OneLayer(), batcher, weights, torch.device("cpu"), [])

    thread = Thread(answer)
    for weight in (1.0, 2.0, 3.0):
        nn.init.constant_(model.layer.weight, weight)
        nn.init.zeros_(model.layer.bias)
        weights.publish(model)
        inputs = ({"reward": torch.full((1, 2), 10.0)}, ())
        outputs, _ = Thread(batcher.compute, inputs).result()
        assert outputs["value"].tolist() == [[10 * weight] * 2]
        assert outputs["value"].dtype == torch.float32
    batcher.close()
    thread.result()


# ----------------------------------------------------------------------- time limits over the wire

T, PERIOD = 5, 8  # seven steps, the last of them to the limit, and the reset
LIMITS = range(PERIOD - 1, 9 * T, PERIOD)


class Table(nn.Module):
    """What it answers to each row of one stream of Echo is a parameter of that row's own."""

    def __init__(self, num_rows):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.policy_logits = nn.Parameter(torch.randn(num_rows, 3, generator=generator))
        self.baseline = nn.Parameter(torch.randn(num_rows, generator=generator))

    def initial_state(self, batch_size):
        return ()

    def forward(self, inputs, agent_state):
        row = row_number(inputs).clamp(max=len(self.baseline) - 1)
        policy_logits = self.policy_logits[row]
        action = torch.distributions.Categorical(logits=policy_logits).sample()
        baseline = self.baseline[row]
        return {"policy_logits": policy_logits, "baseline": baseline, "action": action}, agent_state


def row_number(rows):
    episode, step, _ = rows["frame"].long().unbind(-1)
    return PERIOD * episode + step


@pytest.fixture(scope="module")
def over_the_wire():
    """Nine rollouts of one environment with a time limit, as a learner gets them from a server."""
    model = Table(9 * T + 1)
    queue = libtorchbeast.BatchingQueue(batch_dim=1, minimum_batch_size=9, maximum_batch_size=9)
    batcher = libtorchbeast.DynamicBatcher(batch_dim=1)
    weights = polybeast.PublishedWeights(model)
    environments = batches(lambda: Echo(length=PERIOD - 1, truncates=True), 1)
    with serving(None, ANY_PORT, make_environments=environments) as address:
        actors = libtorchbeast.ActorPool(T, queue, batcher, [address], (), dict_outputs=True)
        flags = polybeast.parser.parse_args([])
        inference = (flags, Table(9 * T + 1), batcher, weights, torch.device("cpu"), [])
        threads = [Thread(actors.run), Thread(polybeast.inference, *inference)]
        (env_outputs, agent_outputs), _ = Thread(next, queue).result()
        queue.close()
        batcher.close()
        for thread in threads:
            thread.result()
    return env_outputs | agent_outputs


def gradients(program, batch, model, **overrides):
    """Return figures, and a row of gradient for each row of the stream: logits and baseline."""
    flags = program.parser.parse_args(["--discounting", "0.9", "--grad_norm_clipping", "1e9"])
    vars(flags).update(overrides)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    figures = program.learn(flags, model, batch, (), optimizer)
    return figures, torch.cat([model.policy_logits.grad, model.baseline.grad[:, None]], dim=1)


def test_a_time_limit_comes_over_the_wire_as_a_row_of_its_own(over_the_wire):
    batch = over_the_wire
    number = row_number(batch)
    assert torch.equal(number, torch.arange(9) * T + torch.arange(T + 1)[:, None])
    assert torch.equal(batch["truncated"], number % PERIOD == PERIOD - 1)
    assert torch.equal(batch["done"], number % PERIOD == 0)
    assert not batch["terminated"].any()
    limits = number[batch["truncated"]] % T
    assert set(limits.tolist()) == set(range(T))  # at row 0, and so at row T, and at all between
    assert torch.equal(batch["reward"], torch.where(batch["done"], 0, number % PERIOD).float())
    final = batch["truncated"] | batch["done"] & (number > 0)
    assert set(batch["episode_return"][final].tolist()) == {28.0}
    assert set(batch["episode_step"][final].tolist()) == {7}
    # What the environment was given is what the model answered to the row before, except that an
    # answer to the last row of an episode is not given to anybody.
    told, given = batch["frame"][..., 2].long(), batch["action"]
    assert torch.equal(told, batch["last_action"])
    given = torch.where(batch["done"], told, given)
    assert torch.equal(told[1:], given[1:])


@pytest.mark.parametrize("program", [monobeast, polybeast], ids=lambda module: module.__name__)
@pytest.mark.parametrize("limit", LIMITS)
def test_value_of_a_reset_row_changes_no_gradient_before_it(over_the_wire, program, limit):
    model = Table(9 * T + 1)
    _, before = gradients(program, over_the_wire, model)
    with torch.no_grad():
        model.baseline[limit + 1] += 5
    _, after = gradients(program, over_the_wire, model)
    assert torch.equal(after[: limit + 1], before[: limit + 1])
    assert not torch.equal(after[limit + 1], before[limit + 1])  # but its own
    assert not before[limit].any()  # there is no transition out of the last row


@pytest.mark.parametrize("program", [monobeast, polybeast], ids=lambda module: module.__name__)
@pytest.mark.parametrize("limit", LIMITS)
def test_last_reward_before_a_time_limit_counts(over_the_wire, program, limit):
    model = Table(9 * T + 1)
    figures, before = gradients(program, over_the_wire, model, reward_clipping="none")
    assert figures["steps"] == 9 * T - len(LIMITS)
    is_last = row_number(over_the_wire) == limit
    batch = over_the_wire | {"reward": over_the_wire["reward"] + is_last}
    _, after = gradients(program, batch, model, reward_clipping="none")
    changed = (after != before).any(dim=1)
    assert changed[limit - 1] and not changed[limit:].any()


# --------------------------------------------------------------------- polybeast.py as it stands


@pytest.fixture(scope="module")
def pong(tmp_path_factory):
    """Savedir, status and output of a very short run of Pong."""
    savedir = tmp_path_factory.mktemp("pong")
    words = "--num_servers 1 --envs_per_stream 4 --batch_size 4 --total_steps 200 --use_lstm"
    status, output = run(POLYBEAST, words, "--savedir", savedir)
    return savedir, status, output


def test_pong_is_trained_with_the_deep_net(pong):
    savedir, status, output = pong
    assert status == 0, output
    checkpoint = load(savedir / "latest" / "model.tar")
    assert checkpoint["step"] >= 200
    assert "conv.2.conv1.weight" in checkpoint["model_state_dict"]
    assert re.search(r"[1-9][\d,]* frames/s", output)


def test_help_tells_flags_and_defaults_and_needs_no_compiled_part(tmp_path):
    copy_without_compiled_part(tmp_path)
    for name, default in (("polybeast.py", "5000000"), ("polybeast_env.py", "127.0.0.1:50051")):
        status, output = run(tmp_path / name, "--help", cwd=tmp_path)
        assert status == 0, output
        assert "--envs_per_stream" in output
        assert f"(default: {default})" in " ".join(output.split())


def copy_without_compiled_part(folder):
    (folder / "libtorchbeast").mkdir()
    for path in [*REPO.glob("*.py"), *(REPO / "libtorchbeast").glob("*.py")]:
        shutil.copy(path, folder / path.relative_to(REPO))


def test_without_the_compiled_part_it_says_how_to_build_it(tmp_path):
    copy_without_compiled_part(tmp_path)
    words = "--env PongNoFrameskip-v4 --num_servers 1 --savedir runs"
    status, output = run(tmp_path / "polybeast.py", words, cwd=tmp_path, TMPDIR=str(tmp_path))
    assert status == 1
    assert "pip install --no-build-isolation -e ." in output and "compiled part" in output
    assert "Traceback" not in output
    assert not (tmp_path / "runs").exists()
    assert traces(tmp_path) == []
