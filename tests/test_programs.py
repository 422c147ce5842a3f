# SPDX-License-Identifier: Apache-2.0
"""What both programs promise, as processes: they learn, log, stop, resume, play, and fail well."""

import importlib
import importlib.metadata
import os
import re
import signal
import subprocess
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import catch  # noqa: F401 - both make the programs of this process play Catch
import catch_poly  # noqa: F401
import numpy as np
import pytest
import torch
from program import (
    HELPERS,
    ROOT,
    Program,
    column,
    last_step,
    load,
    read_meta,
    read_rows,
    run,
    shared_memory,
    split_words,
    traces,
    wait_until,
)

import monobeast
import polybeast
from beast.errors import FlagError

pytestmark = pytest.mark.whole


class Case(NamedTuple):
    module: ModuleType
    fork: str  # the file in helpers/ that makes it play Catch
    learn: str  # 16 environments or fewer: with these it learns Catch in all of a dozen seeds
    small: str
    metrics: set  # in logs.csv, of this program alone
    waits: tuple
    status: str  # on the status line, likewise
    most_lag: int
    failure: str  # what the log says when an environment raises
    restarts: str  # the metric that counts it
    prefix: str  # of a layer of its net

    @property
    def script(self):
        return HELPERS / f"{self.fork}.py"

    @property
    def name(self):
        return self.module.__name__


CASES = [
    Case(
        monobeast,
        fork="catch",
        learn="--num_actors 1 --envs_per_actor 8",
        small="--num_actors 2 --envs_per_actor 2 --batch_size 4",
        metrics={"full_buffers", "actor_restarts"},
        waits=("learner_wait", "actor_wait"),
        status=r"full \d+/24",
        most_lag=24,  # one at most for each buffer
        failure=r"ERROR .*Actor \d died and is restarted",
        restarts="actor_restarts",
        prefix="conv.0.weight",
    ),
    Case(
        polybeast,
        fork="catch_poly",
        learn="--num_servers 2 --envs_per_stream 8",
        # More streams than servers, and a queue that no batch divides.
        small="--num_servers 2 --num_actors 3 --envs_per_stream 3 --batch_size 4 "
        "--max_learner_queue_size 5 --num_inference_threads 2",
        metrics={"inference_batch_size", "learner_queue_size", "connected_actors", "reconnects"},
        waits=("learner_wait",)
        + tuple(f"actor_wait_{what}" for what in ("inference", "environments", "learner")),
        status=r"batch [\d.]+ \| queue \d+/8 \| actors \d/2",
        most_lag=10,  # batches: two that are made, one in the queue, two fetched, one learned from
        failure=r"WARNING .*stream \d: the environment server at unix:\S+ says",
        restarts="reconnects",
        prefix="conv.2.conv1.weight",
    ),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case(request):
    return request.param


def out(folder):
    return (folder / "out.log").read_text()


# ---------------------------------------------------------------------- one run from start to end


@pytest.fixture(scope="module")
def learned(case, tmp_path_factory):
    """A run that learned Catch: its folder, and what it printed."""
    savedir, temporary = tmp_path_factory.mktemp("learned"), tmp_path_factory.mktemp("temporary")
    status, output = run(
        case.script, case.learn, "--env Catch --seed 12 --learning_rate 0.01 --xpid first",
        "--total_steps 100_000 --savedir", savedir, TMPDIR=str(temporary),
    )  # fmt: skip
    assert status == 0, output
    assert traces(temporary) == []
    return SimpleNamespace(savedir=savedir, folder=savedir / "first", output=output)


def test_catch_is_learned(learned):
    rows = read_rows(learned.folder)
    assert float(rows[-1]["mean_episode_return"]) >= 0.9
    assert int(rows[-1]["step"]) >= 100_000


def test_the_folder_holds_what_happened(learned):
    for name in ("meta.json", "logs.csv", "out.log", "model.tar", "best.tar"):
        assert (learned.folder / name).stat().st_size > 0, name
    assert len(list(learned.folder.glob("events.out.tfevents.*"))) == 1
    assert list(learned.folder.glob("*.tmp")) == []
    latest = learned.savedir / "latest"
    assert latest.is_symlink() and latest.resolve() == learned.folder.resolve()
    assert "New run: " in out(learned.folder) and "Saved " in out(learned.folder)
    assert load(learned.folder / "model.tar")["flags"]["env"] == "Catch"


def test_meta_holds_flags_and_circumstances(case, learned):
    meta = read_meta(learned.folder)
    assert meta["flags"]["seed"] == 12 and meta["flags"]["learning_rate"] == 0.01
    assert meta["flags"]["program"] == f"{case.name}.py"
    assert meta["status"] == "ended" and meta["start"] < meta["end"]
    # Not torch.__version__, which says more than the package: 2.13.0+cu130.
    assert meta["versions"]["torch"] == importlib.metadata.version("torch")
    assert meta["machine"]["cores"] == os.cpu_count() and "cpu" in meta["machine"]
    assert {"commit", "changed"} <= meta["git"].keys()


def test_logs_only_grow_and_never_hold_a_nan(case, learned):
    text = (learned.folder / "logs.csv").read_text()
    assert text.startswith("_tick,_time,step,")
    for written in (text, learned.output):
        assert "nan" not in written.lower() and "inf |" not in written
    rows = read_rows(learned.folder)
    assert [int(row["_tick"]) for row in rows] == list(range(len(rows)))
    for key in ("_time", "step"):
        assert column(rows, key) == sorted(column(rows, key))
    expected = {"mean_episode_return", "mean_game_return", "total_loss", "pg_loss", *case.waits}
    expected |= {"baseline_loss", "entropy_loss", "grad_norm", "steps_per_second"} | case.metrics
    assert expected <= rows[0].keys()
    for name in case.waits:
        assert all(0 <= fraction <= 1 for fraction in column(rows, name))
    assert any(column(rows, "learner_wait"))
    assert float(rows[-1]["learning_rate"]) == 0


def test_the_status_line_shows_the_run(case, learned):
    line = [line for line in learned.output.splitlines() if "steps/s" in line][-1]
    number, percent = r"-?[\d,.e+-]+", r"\d+%"
    pattern = rf"100\.0% \| {number} steps \| {number} steps/s \({number} frames/s\) "
    pattern += rf"\| return {number} \| game {number} \| loss ({number}|-) "
    pattern += rf"\| wait {'/'.join([percent] * len(case.waits))} \| {case.status} "
    pattern += rf"\| lag ({number}|-)/({number}|-)/({number}|-) \| health (ok|-|\w+ {number}) "
    assert re.search(pattern + r"\| left 0:00:00", line), line


def test_policy_lag_is_small_but_not_zero(case, learned):
    rows = read_rows(learned.folder)
    lags = [column(rows, f"policy_lag_{name}") for name in ("min", "mean", "max")]
    assert len(lags[0]) > 0
    for least, mean, most in zip(*lags, strict=True):
        assert 0 <= least <= mean <= most
    assert 0 < max(lags[1]) <= case.most_lag


def play(case, capsys, *arguments):
    """Test in this process; return what it printed, and the returns in it."""
    capsys.readouterr()
    assert case.module.main(["--mode", "test", *split_words(arguments)]) == 0
    output = capsys.readouterr().out
    return output, [float(r) for r in re.findall(r"^game \d+: return (\S+) in 9", output, re.M)]


def test_mode_test_plays_the_latest_run_and_leaves_it_as_it_is(case, learned, capsys):
    before = {path: path.read_bytes() for path in learned.folder.iterdir()}
    output, returns = play(case, capsys, "--savedir", learned.savedir)
    assert len(returns) == 10 and np.mean(returns) > 0.5
    assert re.search(rf"{learned.folder} at step 100,\d+, Catch$", output, re.M)
    assert "10 games: mean return " in output and ", sampling, 3 actions, 8 at once" in output
    assert {path: path.read_bytes() for path in learned.folder.iterdir()} == before


def test_mode_test_samples_or_is_greedy_with_the_newest_or_the_best_checkpoint(
    case, learned, capsys
):
    arguments = ("--xpid first --num_episodes 100 --savedir", learned.savedir)
    _, returns = play(case, capsys, *arguments)
    assert len(returns) == 100 and set(returns) <= {-1.0, 1.0} and np.mean(returns) > 0.8
    output, greedy = play(case, capsys, *arguments, "--greedy --best")
    assert "greedy" in output and "sampling" not in output and np.mean(greedy) > 0.9
    assert f"at step {load(learned.folder / 'best.tar')['step']:,}, Catch" in output


def test_what_cannot_be_resumed_or_tested_is_refused_before_anything_starts(
    case, learned, tmp_path, monkeypatch
):
    def start(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    whole = (learned.folder / "model.tar").read_bytes()
    for name, content in (("damaged", whole[: len(whole) // 2]), ("whole", whole)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.tar").write_bytes(content)
    # Nor are servers waited for.
    remote = ["--server_addresses", f"unix:{tmp_path}/nobody"] if case.module is polybeast else []
    for arguments, message in (
        ("--xpid whole", r"has done its 100,\d+ steps: raise --total_steps"),
        ("--xpid whole --env Counter", "--env is Counter, but the checkpoint .* is of Catch"),
        ("--xpid whole --env Counter --mode test", "--env is Counter, but .* is of Catch"),
        ("--xpid whole --use_lstm --mode test", "does not fit .*--use_lstm was False, is True"),
        ("--xpid whole --mode test_render", "no screen to show games on.* use --mode test"),
        ("--xpid damaged", f"cannot read the checkpoint {tmp_path}/damaged/model.tar"),
        ("--xpid damaged --mode test --env Catch", f"the checkpoint {tmp_path}/damaged/model.tar"),
        ("--xpid none --mode test", r"there is no checkpoint in .* \(runs with one, .*whole"),
    ):
        with pytest.raises(FlagError, match=message):
            case.module.main([*arguments.split(), "--savedir", str(tmp_path), *remote])
    assert (tmp_path / "whole" / "model.tar").read_bytes() == whole


# ------------------------------- an environment that raises, an LSTM, several learner threads


@pytest.fixture(scope="module")
def mixed(case, tmp_path_factory):
    """A run in which an environment raises once."""
    savedir, temporary = tmp_path_factory.mktemp("mixed"), tmp_path_factory.mktemp("temporary")
    status, output = run(
        case.script, case.small, "--use_lstm --num_learner_threads 3 --total_steps 8_000",
        "--env", f"Failing-raise:{savedir / 'marker'}", "--savedir", savedir,
        TMPDIR=str(temporary),
    )  # fmt: skip
    assert status == 0, output
    assert traces(temporary) == []
    assert (savedir / "marker").exists()
    return SimpleNamespace(savedir=savedir, folder=(savedir / "latest").resolve(), output=output)


def test_an_environment_that_raises_is_logged_with_its_traceback_and_the_run_goes_on(case, mixed):
    text = out(mixed.folder)  # of the learner alone
    assert re.search(case.failure, text), text
    assert 'raise ValueError("the game is broken")' in text
    assert re.search(r"environment \d \(.*\), step 25: step\(\d\) raised ValueError", text)
    rows = read_rows(mixed.folder)
    assert rows[-1][case.restarts] == "1"
    # Not a single update more, however many threads learn.
    assert 8_000 <= int(rows[-1]["step"]) < 8_000 + 4 * 20


def test_a_run_without_a_seed_and_a_name_keeps_what_it_drew(mixed):
    assert re.fullmatch(r"torchbeast-\d{8}-\d{6}", mixed.folder.name)
    meta, checkpoint = read_meta(mixed.folder), load(mixed.folder / "model.tar")
    assert isinstance(meta["flags"]["seed"], int)
    assert meta["flags"]["seed"] == checkpoint["flags"]["seed"]


def test_mode_test_plays_with_an_lstm(case, mixed, capsys):
    # --use_lstm is known from the checkpoint.
    _, returns = play(case, capsys, "--num_episodes 20 --greedy --savedir", mixed.savedir)
    assert len(returns) == 20


# -------------------------------------------------------------------------------- stop and resume


# Keeps what the optimizer is at its first step.
SPY = """
import os, sys
sys.path.insert(0, {helpers!r})
import {fork}, torch
import {program} as program
learn = program.learn

def spy(flags, model, batch, initial_agent_state, optimizer):
    if not os.path.exists({path!r}):
        seen = {{"optimizer": optimizer.state_dict(), "model": model.state_dict()}}
        torch.save(seen | {{"flags": vars(flags)}}, {path!r})
    return learn(flags, model, batch, initial_agent_state, optimizer)

program.learn = spy
if __name__ == "__main__":
    program.run_program(program.main)
"""


@pytest.fixture(scope="module")
def stopped(case, tmp_path_factory):
    """What happened in a run that was stopped by SIGTERM, resumed, and stopped by Ctrl-C."""
    savedir, temporary = tmp_path_factory.mktemp("stopped"), tmp_path_factory.mktemp("temporary")
    folder, facts = savedir / "run", SimpleNamespace(before=shared_memory())
    facts.folder, facts.temporary = folder, temporary
    arguments = "--env Catch --seed 5 --learning_rate 0.003 --alpha 0.98 --total_steps 2_000_000"
    with Program(
        case.script, case.small, arguments, "--xpid run --savedir", savedir, TMPDIR=str(temporary)
    ) as program:
        program.wait_until(lambda: last_step(folder) > 1000)
        program.process.send_signal(signal.SIGTERM)
        facts.first = program.end()
        program.wait_for_members()
    facts.checkpoint = load(folder / "model.tar")
    facts.meta, facts.rows = read_meta(folder), read_rows(folder)

    spy, seen = savedir / "spy.py", savedir / "seen.tar"
    names = {"helpers": str(HELPERS), "fork": case.fork, "program": case.name}
    spy.write_text(SPY.format(path=str(seen), **names))
    arguments = "--xpid run --total_steps 3_000_000 --savedir"
    with Program(spy, arguments, savedir, TMPDIR=str(temporary)) as program:
        program.wait_until(lambda: last_step(folder) > facts.checkpoint["step"] + 1000)
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does
        facts.second = program.end()
        program.wait_for_members()
    facts.seen = load(seen)
    return facts


def test_a_stop_signal_ends_a_run_with_its_status_and_a_checkpoint_and_leaves_nothing(stopped):
    for number, (status, output) in (
        (signal.SIGTERM, stopped.first),
        (signal.SIGINT, stopped.second),
    ):
        assert status == 128 + number, output
        assert f"Caught {number.name}: ending" in output
        for text in ("Traceback", "KeyboardInterrupt", "ERROR", "died", "was lost"):
            assert text not in output
    assert stopped.checkpoint["step"] == int(stopped.rows[-1]["step"]) > 1000
    assert stopped.meta["status"] == "stopped by SIGTERM" and stopped.meta["end"]
    step = load(stopped.folder / "model.tar")["step"]
    assert step == int(read_rows(stopped.folder)[-1]["step"]) > stopped.checkpoint["step"]
    assert traces(stopped.temporary) == []
    wait_until(lambda: shared_memory() <= stopped.before)  # other programs take some for a moment


def test_resuming_restores_flags_model_and_optimizer(stopped):
    checkpoint, seen = stopped.checkpoint, stopped.seen
    assert f"Resuming {stopped.folder} at step {checkpoint['step']:,}" in stopped.second[1]
    assert seen["flags"] == checkpoint["flags"] | {"total_steps": 3_000_000}
    assert seen["flags"]["seed"] == 5 and seen["flags"]["env"] == "Catch"
    for key, value in seen["model"].items():
        assert torch.equal(value, checkpoint["model_state_dict"][key]), key
    saved = checkpoint["optimizer_state_dict"]
    assert seen["optimizer"]["state"].keys() == saved["state"].keys() != set()
    for index, state in seen["optimizer"]["state"].items():
        for key, value in state.items():
            assert torch.equal(value, saved["state"][index][key]), (index, key)
    (group,) = seen["optimizer"]["param_groups"]
    assert group["lr"] == pytest.approx(0.003 * (1 - checkpoint["step"] / 3_000_000))
    assert group["initial_lr"] == 0.003 and group["alpha"] == 0.98


def test_a_resumed_run_goes_on_in_its_log_and_meta(stopped):
    rows, count = read_rows(stopped.folder), len(stopped.rows)
    assert rows[:count] == stopped.rows
    assert [int(row["_tick"]) for row in rows] == list(range(len(rows)))
    for key in ("_time", "step"):
        assert column(rows, key) == sorted(column(rows, key))
    for i, row in enumerate(rows):
        left = 1 - int(row["step"]) / (2_000_000 if i < count else 3_000_000)
        assert float(row["learning_rate"]) == pytest.approx(0.003 * left)
    meta = read_meta(stopped.folder)
    assert meta["earlier"] == [stopped.meta] and meta["start"] >= stopped.meta["end"]


# ---------------------------------------------------------------------------------- it fails well


FAILING = """
import sys
sys.path.insert(0, {helpers!r})
import {fork}
import {program} as program
learn, calls = program.learn, []

def failing_learn(*args):
    calls.append(args)
    if len(calls) == 3:
        raise ArithmeticError("the learner is broken")
    return learn(*args)

program.learn = failing_learn
if __name__ == "__main__":
    program.run_program(program.main)
"""


def test_an_error_in_the_learner_ends_the_run_with_its_traceback(case, tmp_path):
    script, folder = tmp_path / "failing.py", tmp_path / "run"
    names = {"helpers": str(HELPERS), "fork": case.fork, "program": case.name}
    script.write_text(FAILING.format(**names))
    arguments = "--num_learner_threads 2 --env Catch --xpid run --savedir"
    status, output = run(script, case.small, arguments, tmp_path, TMPDIR=str(tmp_path))
    assert status == 1
    assert "Traceback" in output and "in failing_learn" in output
    assert "ArithmeticError: the learner is broken" in output
    assert "ArithmeticError" in read_meta(folder)["status"] and "in failing_learn" in out(folder)
    assert traces(tmp_path) == []


def test_an_unknown_game_is_a_short_error_that_says_what_to_change(case, tmp_path):
    status, output = run(
        ROOT / f"{case.name}.py", "--env PongNoFrameskipp-v4 --savedir", tmp_path / "runs",
        TMPDIR=str(tmp_path),
    )  # fmt: skip
    assert status == 1
    assert "PongNoFrameskipp-v4" in output and "such as PongNoFrameskip-v4" in output
    assert "Traceback" not in output
    assert output.strip().splitlines()[-1].startswith(f"{case.name}.py: ")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------ the programs themselves


def test_pong_is_trained_and_played(case, tmp_path):
    small = {"monobeast": "--num_actors 1 --envs_per_actor 4", "polybeast": "--num_servers 1"}
    status, output = run(
        ROOT / f"{case.name}.py", small[case.name], "--batch_size 4 --total_steps 200 --use_lstm",
        "--xpid run --savedir", tmp_path,
    )  # fmt: skip
    assert status == 0, output
    assert re.search(r"[1-9][\d,]* frames/s", output)
    checkpoint = load(tmp_path / "run" / "model.tar")
    assert checkpoint["step"] >= 200 and checkpoint["flags"]["env"] == "PongNoFrameskip-v4"
    assert case.prefix in checkpoint["model_state_dict"]
    arguments = "--mode test --num_episodes 1 --savedir"
    if case.module is polybeast:
        return  # the same code; its deep net takes a minute for a game
    status, output = run(ROOT / f"{case.name}.py", arguments, tmp_path)
    assert status == 0, output
    score, steps = map(float, re.search(r"game 1: return (\S+) in (\d+) steps", output).groups())
    assert -21 <= score <= 21 and steps > 500  # to 21 points, not to the first one
    assert "1 game: mean return" in output and "human-normalized" in output


@pytest.mark.parametrize("name", ["monobeast", "polybeast", "polybeast_env"])
def test_help_has_groups_defaults_and_seconds(name):
    parser = importlib.import_module(name).parser
    shown = " ".join(parser.format_help().split())
    groups = {group.title: group._group_actions for group in parser._action_groups}
    assert [action.dest for action in groups.pop("options")] == ["help"]
    actions = [action for group in groups.values() for action in group]
    assert len(groups) >= 3 and len(actions) >= 15
    for action in actions:
        assert action.help, action.dest
        if action.default is not None and not isinstance(action.default, bool):
            assert f"(default: {action.default})" in shown, action.dest
        elif action.default is None and action.type in (int, float):
            assert re.search("by default|default:|where", action.help.lower()), action.dest
        if action.dest.endswith("_s"):
            assert action.help.startswith("Seconds"), action.dest
