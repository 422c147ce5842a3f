# SPDX-License-Identifier: Apache-2.0
"""What both programs promise, as processes: they learn, log, stop, resume, play, and fail well."""

import os
import re
import shutil
import signal
import subprocess
import warnings
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import catch  # noqa: F401 - both make the programs of this process play Catch
import catch_poly  # noqa: F401
import numpy as np
import pytest
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
    learn: str  # 16 environments or fewer: with these it learns Catch, see `learned`
    small: str
    smallest: str
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
        learn="--num_actors 1 --envs_per_actor 8 --num_learner_threads 2",
        small="--num_actors 2 --envs_per_actor 2 --batch_size 4",
        smallest="--num_actors 1 --envs_per_actor 4",
        metrics={"full_buffers", "actor_restarts"},
        waits=("learner_wait", "actor_wait"),
        status=r"full \d+/24",
        most_lag=24,  # one at most for each buffer
        failure=r"ERROR .*Actor \d died and is replaced",
        restarts="actor_restarts",
        prefix="trunk.convs.0.0.weight",
    ),
    Case(
        polybeast,
        fork="catch_poly",
        learn="--num_servers 2 --num_actors 2 --envs_per_stream 8",
        # More streams than servers, and a queue that no batch divides.
        small="--num_servers 2 --num_actors 3 --envs_per_stream 3 --batch_size 4 "
        "--max_learner_queue_size 5 --num_inference_threads 2",
        smallest="--num_servers 1 --num_actors 1",
        metrics={"inference_batch_size", "learner_queue_size", "connected_actors", "reconnects"},
        waits=("learner_wait",)
        + tuple(f"actor_wait_{what}" for what in ("inference", "environments", "learner")),
        status=r"batch [\d.]+ \| queue \d+/8 \| actors \d/2",
        most_lag=10,  # batches: two that are made, one in the queue, two fetched, one learned from
        failure=r"WARNING .*stream \d: the environment server at unix:\S+ says",
        restarts="reconnects",
        prefix="trunk.convs.0.2.conv1.weight",
    ),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case(request):
    return request.param


def out(folder):
    return (folder / "out.log").read_text()


@pytest.fixture(scope="module")
def learned(case, tmp_path_factory):
    """A run that learned Catch, of which an environment raised once: its folder and output."""
    # With the default entropy cost one run in ten of PolyBeast settles on losing all games of a
    # column; with this one none of 50 on an idle machine, and none of 32 of MonoBeast. On a busy
    # machine a run may still end before it has learned: then a longer one begins anew.
    for steps in (60_000, 120_000, 240_000):
        savedir, temporary = (tmp_path_factory.mktemp(name) for name in ("learned", "temporary"))
        env = f"Failing-raise@{savedir / 'marker'}"
        output = run(
            case.script, case.learn, "--seed 12 --learning_rate 0.01 --entropy_cost 0.02",
            "--total_steps", steps, "--env", env, "--xpid first --savedir", savedir,
            TMPDIR=str(temporary),
        )  # fmt: skip
        assert traces(temporary) == [] and (savedir / "marker").exists()
        facts = SimpleNamespace(savedir=savedir, folder=savedir / "first", env=env, steps=steps)
        if has_learned(facts):
            break
        warnings.warn(f"{case.name} has not learned Catch in {steps} steps", stacklevel=1)
    facts.output = output
    return facts


def has_learned(facts):
    # 0.6 is a column that is always lost.
    return float(read_rows(facts.folder)[-1]["mean_episode_return"]) > 0.8


def test_catch_is_learned_with_not_an_update_more_than_asked_for(learned):
    assert has_learned(learned)
    # However many threads learn.
    assert learned.steps <= last_step(learned.folder) < learned.steps + 8 * 20


def test_an_environment_that_raises_is_logged_and_made_anew(case, learned):
    text = out(learned.folder)  # of the learner alone
    assert re.search(case.failure, text), text
    assert 'raise ValueError("the game is broken")' in text
    assert re.search(r"environment \d \(.*\), step 25: step\(\d\) raised ValueError", text)
    assert read_rows(learned.folder)[-1][case.restarts] == "1"


def test_the_folder_holds_what_happened(case, learned):
    for name in ("meta.json", "logs.csv", "out.log", "model.tar", "best.tar"):
        assert (learned.folder / name).stat().st_size > 0, name
    assert len(list(learned.folder.glob("events.out.tfevents.*"))) == 1
    assert list(learned.folder.glob("*.tmp")) == []
    latest = learned.savedir / "latest"
    assert latest.is_symlink() and latest.resolve() == learned.folder.resolve()
    assert "New run: " in out(learned.folder) and "Saved " in out(learned.folder)
    assert load(learned.folder / "model.tar")["flags"]["env"] == learned.env
    flags = read_meta(learned.folder)["flags"]
    assert flags["seed"] == 12 and flags["program"] == f"{case.name}.py"


def test_logs_and_status_line_hold_all_metrics_and_never_a_nan(case, learned):
    text = (learned.folder / "logs.csv").read_text()
    assert text.startswith("_tick,_time,step,")
    for written in (text, learned.output):
        assert "nan" not in written.lower() and "inf |" not in written
    rows = read_rows(learned.folder)
    expected = {"mean_episode_return", "mean_game_return", "total_loss", "pg_loss", *case.waits}
    expected |= {"baseline_loss", "entropy_loss", "grad_norm", "steps_per_second"} | case.metrics
    assert expected <= rows[0].keys()
    for name in case.waits:
        assert all(0 <= fraction <= 1 for fraction in column(rows, name))
    assert any(column(rows, "learner_wait"))
    assert float(rows[-1]["learning_rate"]) == 0
    lags = [column(rows, f"policy_lag_{name}") for name in ("min", "mean", "max")]
    assert len(lags[0]) > 0
    for least, mean, most in zip(*lags, strict=True):
        assert 0 <= least <= mean <= most
    assert 0 < max(lags[1]) <= case.most_lag
    # All of a status line is in test_run.py.
    line = [line for line in learned.output.splitlines() if "steps/s" in line][-1]
    waits, number = "/".join([r"\d+%"] * len(case.waits)), r"-?[\d,.e+-]+"
    assert re.search(rf"100\.0% \| {number} steps .*\| game {number} \| loss ", line), line
    assert re.search(rf"\| wait {waits} \| {case.status} \| lag .*\| left 0:00:00", line), line


def play(case, capsys, *arguments):
    """Test in this process; return what it printed, and the returns in it."""
    capsys.readouterr()
    assert case.module.main(["--mode", "test", *split_words(arguments)]) == 0
    output = capsys.readouterr().out
    return output, [float(r) for r in re.findall(r"^game \d+: return (\S+) in 9", output, re.M)]


def test_mode_test_plays_a_run_and_leaves_it_as_it_is(case, learned, capsys):
    before = {path: path.read_bytes() for path in learned.folder.iterdir()}
    output, returns = play(case, capsys, "--savedir", learned.savedir)
    assert len(returns) == 10 and np.mean(returns) > 0
    step = rf"{learned.steps // 1000},\d+"
    assert re.search(rf"{learned.folder} at step {step}, {learned.env}$", output, re.M)
    assert "10 games: mean return " in output and ", sampling, 3 actions, 8 at once" in output
    more = "--xpid first --num_episodes 100 --greedy --best --savedir"
    output, returns = play(case, capsys, more, learned.savedir)
    assert "greedy" in output and "sampling" not in output
    assert len(returns) == 100 and set(returns) <= {-1.0, 1.0} and np.mean(returns) > 0.9
    assert f"at step {load(learned.folder / 'best.tar')['step']:,}, {learned.env}" in output
    assert {path: path.read_bytes() for path in learned.folder.iterdir()} == before


@pytest.mark.parametrize("case", CASES[:1], ids=["monobeast"], indirect=True)
def test_ctrl_c_ends_mode_test(case, learned):
    arguments = ("--mode test --num_episodes 100_000_000 --savedir", learned.savedir)
    with Program(case.script, *arguments) as program:
        program.wait_until(lambda: "game 1:" in program.output)
        os.killpg(program.pid, signal.SIGINT)
        output = program.finish(128 + signal.SIGINT)
    assert "Traceback" not in output, output


def test_what_cannot_be_resumed_or_tested_is_refused_at_once(case, learned, tmp_path, monkeypatch):
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
    for arguments, message in (  # test_flags.py and test_checkpoint.py have more
        ("--xpid whole", rf"has done its {learned.steps // 1000},\d+ steps: raise --total_steps"),
        ("--xpid whole --use_lstm --mode test", "does not fit .*--use_lstm was False, is True"),
        ("--xpid whole --mode test_render", "no screen to show games on.* use --mode test"),
        ("--xpid damaged", f"cannot read the checkpoint {tmp_path}/damaged/model.tar"),
    ):
        with pytest.raises(FlagError, match=message):
            case.module.main([*arguments.split(), "--savedir", str(tmp_path), *remote])
    assert (tmp_path / "whole" / "model.tar").read_bytes() == whole


def test_a_replay_that_memory_cannot_hold_is_refused(case, tmp_path):
    replay = "--replay_ratio 1 --replay_rollouts 1_000_000_000"
    output = run(case.script, case.smallest, "--env Catch --savedir", tmp_path, replay, status=1)
    assert re.search(r"--replay_rollouts 1,000,000,000 takes [\d.]+ GiB, but", output), output
    assert list(tmp_path.iterdir()) == []


FAILING = """
import sys
sys.path.insert(0, {helpers!r})
import {fork}
import {program} as program

def learn(*args):
    raise ArithmeticError("the learner is broken")

program.learn = learn
if __name__ == "__main__":
    program.run_program(program.main)
"""


def test_an_error_in_the_learner_ends_the_run_with_its_traceback(case, tmp_path):
    script = tmp_path / "failing.py"
    names = {"helpers": str(HELPERS), "fork": case.fork, "program": case.name}
    script.write_text(FAILING.format(**names))
    arguments = ("--env Catch --xpid run --savedir", tmp_path)
    output = run(script, case.smallest, *arguments, TMPDIR=str(tmp_path), status=1)
    assert "Traceback" in output and "in learn" in output
    assert "ArithmeticError: the learner is broken" in output
    assert read_meta(tmp_path / "run")["status"] == "ArithmeticError: the learner is broken"
    assert traces(tmp_path) == []


@pytest.fixture(scope="module")
def stopped(case, tmp_path_factory):
    """What happened in a run that was stopped as it saved, resumed, and stopped by Ctrl-C."""
    savedir, temporary = tmp_path_factory.mktemp("stopped"), tmp_path_factory.mktemp("temporary")
    folder, facts = savedir / "run", SimpleNamespace(before=shared_memory())
    facts.folder, facts.temporary = folder, temporary
    arguments = "--env Catch --seed 5 --learning_rate 0.003 --alpha 0.98 --total_steps 2_000_000 "
    arguments += "--checkpoint_interval_s 0.5 --xpid run --savedir"
    with Program(case.script, case.small, arguments, savedir, TMPDIR=str(temporary)) as program:
        program.wait_until(lambda: last_step(folder) > 1000)
        since = len(program.output)
        program.wait_until(lambda: re.search("Saved .*model.tar", program.output[since:]))
        program.process.send_signal(signal.SIGTERM)
        facts.first = program.end()
        program.wait_for_members()
    facts.checkpoint = load(folder / "model.tar")
    facts.meta, facts.rows = read_meta(folder), read_rows(folder)

    arguments = "--xpid run --total_steps 3_000_000 --savedir"
    with Program(case.script, arguments, savedir, TMPDIR=str(temporary)) as program:
        program.wait_until(lambda: last_step(folder) > facts.checkpoint["step"] + 1000)
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does
        facts.second = program.end()
        program.wait_for_members()
    return facts


def test_a_stop_signal_saves_and_leaves_nothing(stopped):
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


def test_a_resumed_run_goes_on_in_its_log_and_meta(stopped):
    """The campaign of kills in test_faults.py compares weights."""
    assert f"Resuming {stopped.folder} at step {stopped.checkpoint['step']:,}" in stopped.second[1]
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
    assert meta["flags"] == stopped.meta["flags"] | {"total_steps": 3_000_000}


def test_sigterm_saves_also_before_a_run_has_resumed(case, stopped, tmp_path):
    folder, before = tmp_path / "run", shared_memory()
    shutil.copytree(stopped.folder, folder)
    step = load(folder / "model.tar")["step"]
    with Program(case.script, "--xpid run --savedir", tmp_path, TMPDIR=str(tmp_path)) as program:
        program.wait_until(lambda: "Flags:" in program.output)
        program.process.send_signal(signal.SIGTERM)
        output = program.finish(128 + signal.SIGTERM)
    assert "Traceback" not in output and traces(tmp_path) == []
    wait_until(lambda: shared_memory() <= before)  # other programs take some for a moment
    # It says of what step the checkpoint is, and this is where the run stood.
    (*_, saved) = re.findall(r"Saved \S*model.tar at step ([\d,]+)", output)
    saved = int(saved.replace(",", ""))
    assert saved == load(folder / "model.tar")["step"] == last_step(folder) >= step
    assert read_meta(folder)["status"] == "stopped by SIGTERM"


@pytest.mark.parametrize("case", CASES[1:], ids=["polybeast"], indirect=True)
def test_an_unknown_game_is_a_short_error_with_advice(case, tmp_path):
    output = run(
        ROOT / f"{case.name}.py", "--env PongNoFrameskipp-v4 --savedir", tmp_path / "runs",
        TMPDIR=str(tmp_path), status=1,
    )  # fmt: skip
    assert "`PongNoFrameskipp` doesn't exist. Did you mean: `PongNoFrameskip`" in output
    assert "Traceback" not in output
    assert output.strip().splitlines()[-1].startswith(f"{case.name}.py: ")
    assert list(tmp_path.iterdir()) == []


def test_a_small_shared_memory_is_for_fewer_actors(tmp_path):
    mount = "mount -t tmpfs -o size=30m none /dev/shm"  # of the default's 33 MB
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("cannot mount a small file system")
    prefix = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", "taskset", "-c", "0,1"]
    arguments = "--total_steps 200 --xpid run --savedir", tmp_path
    with Program(ROOT / "monobeast.py", *arguments, prefix=prefix) as program:
        output = program.finish()
    assert "no room for the rollouts of 2 actors: --num_actors is 1" in output


def test_pong_is_trained_and_played_with_an_lstm(case, tmp_path):
    script = ROOT / f"{case.name}.py"
    arguments = (
        "--batch_size 4 --unroll_length 20 --total_steps 200 --use_lstm --xpid run --savedir"
    )
    output = run(script, case.smallest, arguments, tmp_path)
    assert re.search(r"[1-9][\d,]* frames/s", output)
    checkpoint = load(tmp_path / "run" / "model.tar")
    assert checkpoint["step"] >= 200 and checkpoint["flags"]["env"] == "PongNoFrameskip-v4"
    assert case.prefix in checkpoint["model_state_dict"]
    if case.module is polybeast:
        return  # the same code; its deep net takes a minute for a game
    # --use_lstm is known from the checkpoint.
    output = run(script, "--mode test --num_episodes 1 --savedir", tmp_path)
    score, steps = map(float, re.search(r"game 1: return (\S+) in (\d+) steps", output).groups())
    assert -21 <= score <= 21 and steps > 500  # to 21 points, not to the first one
    assert "1 game: mean return" in output and "human-normalized" in output
