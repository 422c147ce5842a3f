# SPDX-License-Identifier: Apache-2.0
"""A training run without a program around it: resuming, metrics, bad updates, signals, the end."""

import json
import logging
import math
import os
import re
import shlex
import shutil
import signal
import sys
import types
from collections import deque

import numpy as np
import pytest
import torch
from deadline import run_with_deadline
from files import fill, read_events
from program import HELPERS, ROOT, load, read_meta, read_rows, run, wait_until
from small_run import UPDATE, B, create_batch, create_learner, parse, record, save, update

from beast.errors import EnvError, FlagError
from beast.learners.learner_group import Alone
from beast.processes.lifetime import STOP_SIGNALS
from beast.runs import curves
from beast.runs.run import MAX_SKIPPED, Run

CPU_ONLY = "--xpid run --disable_cuda"


def start(tmp_path, arguments=CPU_ONLY, **kwargs):
    flags = parse(tmp_path, arguments)
    return Run(flags, create_learner(flags, **kwargs))


@pytest.mark.parametrize("metrics", [{"total_loss": 1.0}, UPDATE | {"step": 1.0}])
def test_metrics_without_steps_or_with_our_names_are_refused(tmp_path, metrics):
    with start(tmp_path) as run:
        with pytest.raises(ValueError, match="must have `steps`, .* and none of .*'step'"):
            record(run, metrics)


def test_a_metric_with_the_name_of_another_column_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"names of ours, \['policy_lag_mean'\]"):
        with start(tmp_path) as run:
            record(run, UPDATE | {"policy_lag_mean": 1.0})
            run.tick()


def test_the_last_checkpoint_is_saved_if_the_last_row_is_not(tmp_path, monkeypatch):
    with pytest.raises(ZeroDivisionError):
        with start(tmp_path) as run:
            record(run)
            monkeypatch.setattr(run, "tick", lambda: 1 / 0)
    assert load(tmp_path / "run" / "model.tar")["step"] == 100


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_a_removed_folder_fails_a_run_but_hides_no_error(tmp_path, error):
    with pytest.raises(error or FlagError, match=None if error else "No such file"):
        with start(tmp_path) as run:
            shutil.rmtree(run.path)
            if error:
                raise error


def test_a_run_that_cannot_be_resumed_ends_and_frees_its_folder(tmp_path):
    save(parse(tmp_path))
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    with pytest.raises(FlagError, match="does not fit this Linear"):
        with start(tmp_path, size=4):
            pass
    assert read_meta(tmp_path / "run")["status"].startswith("FlagError: the checkpoint in")
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers
    with start(tmp_path):
        pass


def test_a_refused_start_leaves_what_the_run_has_said_of_itself(tmp_path):
    with start(tmp_path) as run:
        record(run)
    before = (run.path / "meta.json").read_bytes()
    with pytest.raises(FlagError, match="does not fit this Linear"):
        with start(tmp_path, f"{CPU_ONLY} --total_steps 2000", size=4):
            pass
    assert (run.path / "meta.json").read_bytes() == before


def test_a_run_whose_last_checkpoint_cannot_be_made_has_failed(tmp_path, monkeypatch):
    def fail(learner):
        raise FlagError("it holds a fraction")

    with pytest.raises(FlagError):
        with start(tmp_path) as run:
            monkeypatch.setattr(run._folder.checkpoints, "save", fail)
    assert read_meta(run.path)["status"] == "FlagError: it holds a fraction"


def test_metrics_are_means_over_a_tick_also_those_of_ones_own(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    ends = torch.zeros(3, B, dtype=torch.bool)
    ends[1, 0] = ends[2, 1] = True
    ends[0, 2] = True  # which was counted as the last row of the rollout before
    returns = torch.arange(9.0).view(3, B)
    batch = create_batch(2, done=ends, episode_return=returns, game_done=ends, game_return=returns)
    system = types.SimpleNamespace(  # what plays
        waits=lambda: {"actor_wait": 0.0},
        metrics=lambda: {"full_buffers": 3},
        texts=lambda metrics: {"full": f"{metrics['full_buffers']}/4"},
        silences=list,
    )
    with start(tmp_path) as run:
        run._system = system
        run.tick()
        record(run, UPDATE | {"my_metric": 1.0, "rare": 5.0}, batch)
        record(run, UPDATE | {"my_metric": 2.0})
        run.tick()
    first, row, last = read_rows(tmp_path / "run")
    assert "my_metric" in first and first["my_metric"] == first["mean_episode_return"] == ""
    assert (row["my_metric"], row["rare"], row["total_loss"]) == ("1.5", "5.0", "0.5")
    assert row["step"] == "200" and "steps" not in row
    assert float(row["mean_episode_return"]) == float(row["mean_game_return"]) == (3 + 7) / 2
    assert float(row["learning_rate"]) == pytest.approx(0.5 * 0.8)
    assert [row[f"policy_lag_{name}"] for name in ("min", "mean", "max")] == ["0", "0.0", "0"]
    assert row["full_buffers"] == "3" and float(row["actor_wait"]) == 0
    assert last["my_metric"] == last["policy_lag_max"] == ""  # no update since
    assert read_events(tmp_path / "run", "my_metric") == [(200, 1.5)]
    drawn = curves.read_run(str(tmp_path / "run"), [])
    assert {"mean_game_return", "hours"} <= drawn.columns.keys()
    assert drawn.settings["env"] == "PongNoFrameskip-v4"
    line = next(message for message in caplog.messages if "200 steps" in message)
    number = r"-?[\d,.e+-]+"
    pattern = rf"20\.0% \| 200 steps \| {number} steps/s \({number} frames/s\) "
    pattern += r"\| return 5 \| loss 0\.5 \| wait \d+%/0% \| full 3/4 \| lag 0/0/0 "
    pattern += r"\| health after 1,000 updates \| left \d+:\d\d:\d\d"
    assert re.fullmatch(pattern, line), line
    line = next(message for message in caplog.messages if "0 steps" in message)
    assert "return - | loss - " in line and "lag -/-/- " in line and line.endswith("left -")


def test_a_run_without_end_logs_no_time_that_is_left(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with start(tmp_path, f"{CPU_ONLY} --total_steps {10**18}") as run:
        run.tick()
        record(run)
    assert caplog.text.count("| left -\n") == 2


def test_what_no_checkpoint_can_hold_ends_a_run_early(tmp_path):
    folder = tmp_path / "run"
    for name, spoil in {
        "--root": lambda run: setattr(run._flags, "root", folder),
        "stats > best > 1": lambda run: run._learner.stats.update(best=[1.0, np.float64(2)]),
        "optimizer_state_dict > param_groups > 0 > kind": lambda run: (
            run._learner.optimizer.param_groups[0].update(kind=signal.SIGINT)
        ),
        "model_state_dict > _extra_state": lambda run: setattr(
            type(run._learner.model), "get_extra_state", lambda self: {1: deque()}
        ),
    }.items():
        run = start(tmp_path, model=type("Net", (torch.nn.Linear,), {})(3, 1))
        spoil(run)
        with pytest.raises(FlagError, match=f"^{name}( > 1)? is a .*, with which no checkpoint "):
            run.__enter__()
        assert not folder.exists()
    with pytest.raises(FlagError, match="^stats > best is a numpy.float64, with which no"):
        with start(tmp_path) as run:
            record(run)
            run._folder.checkpoints.save(run._learner)
            run._learner.stats["best"] = np.float64(2)
    assert load(folder / "model.tar")["step"] == 100


def test_the_flags_that_are_logged_are_flags(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with start(tmp_path):
        pass
    (text,) = [message for message in caplog.messages if message.startswith("Flags:")]
    assert "'learning_rate': 0.5" in text and "'seed': 1" in text
    assert not re.search("'(program|rank|chosen|num_learners|render_mode|autotune)'", text)


@pytest.mark.parametrize(
    "arguments, added",
    [(["--xpid", "run"], ""), (["--xpid=run"], ""), (["--env", "a b"], " --xpid run")],
)
def test_a_stopped_run_says_by_which_command_it_goes_on(
    tmp_path, caplog, monkeypatch, arguments, added
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sys, "argv", ["dir/fork.py", *arguments])
    for is_stopped, options in ((False, ""), (True, " --disable_checkpoint"), (True, "")):
        assert "To go on" not in caplog.text
        with start(tmp_path, CPU_ONLY + options) as run:
            run._signals.first = signal.SIGINT if is_stopped else None
    command = f"To go on: python dir/fork.py {shlex.join(arguments)}{added}"
    assert caplog.messages[-1] == command


def test_a_run_that_another_learner_stops_is_not_over(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with start(tmp_path) as run:
        run._group = Alone()
        run._group.exchange = types.SimpleNamespace(num_batches=1, has_to_stop=True)
        record(run)
    assert read_meta(tmp_path / "run")["status"] == "stopped by another learner"
    assert run.exit_status == 0 and "To go on" in caplog.text


def test_a_signal_after_the_last_step_leaves_the_run_ended(tmp_path):
    with start(tmp_path, f"{CPU_ONLY} --total_steps 100") as run:
        record(run)
        run._signals.first = signal.SIGTERM
    assert read_meta(tmp_path / "run")["status"] == "ended" and run.exit_status == 0


@pytest.mark.parametrize("error", [EnvError("all actors died"), RuntimeError("out of luck")])
def test_an_error_is_in_meta_and_an_environments_is_saved(tmp_path, error):
    with pytest.raises(type(error)):
        with start(tmp_path) as run:
            record(run)
            raise error
    assert read_meta(tmp_path / "run")["status"] == f"{type(error).__name__}: {error}"
    assert (tmp_path / "run" / "model.tar").exists() == isinstance(error, EnvError)


def test_an_update_that_is_not_finite_is_skipped_and_counted(tmp_path, caplog):
    with start(tmp_path) as run:
        record(run, UPDATE | {"grad_norm": float("nan")})
        assert run._learner.stats["skipped_in_a_row"] == 1
        with run._learner.lock:
            run.record({"steps": 0}, create_batch(), is_update=False)
        assert run._learner.stats["skipped_in_a_row"] == 1
        record(run)
        assert run._learner.stats["skipped_in_a_row"] == 0
    assert re.search(r"skipped, as it is not finite \(1 in all; 1 in a row.*grad_norm nan.*"
                     r"batch comes from \{'actors': \[0\]\}", caplog.text)  # fmt: skip
    row = read_rows(tmp_path / "run")[-1]
    assert row["skipped_updates"] == "1" and row["step"] == "200" and row["total_loss"] == "0.5"
    assert "grad_norm" not in row


def test_skipped_updates_make_nothing_healthy(tmp_path, monkeypatch):
    counts = []
    with start(tmp_path) as run:
        monkeypatch.setattr(run._diagnostics, "text", lambda _, count: counts.append(count) or "ok")
        record(run)
        run.tick()
        record(run, UPDATE | {"grad_norm": float("nan")})
        with run._learner.lock:
            run.record({"steps": 1}, create_batch(), is_update=False)
        run.tick()
    assert counts == [1, 0, 0]


def test_updates_that_stay_not_finite_end_the_run(tmp_path):
    message = (
        f"{MAX_SKIPPED} updates in a row.*bad_batch.tar.*Beyond 1e.06 or not finite in it: "
        "frame, policy_logits. Look at .*mask.*; else try a lower --learning_rate"
    )
    frame = {"a": torch.zeros(3, 3), "b": (torch.full((3, 3), 65535.0**2),)}
    logits = torch.tensor([[[0.0, -math.inf]]]).expand(3, 3, 2)
    batch = create_batch(frame=frame, policy_logits=logits)
    with pytest.raises(FloatingPointError, match=message):
        with start(tmp_path) as run:
            record(run)
            run._folder.checkpoints.save(run._learner)
            for _ in range(MAX_SKIPPED):
                record(run, UPDATE | {"total_loss": float("inf")}, batch)
    bad = load(tmp_path / "run" / "bad_batch.tar")
    assert bad["metrics"]["total_loss"] == float("inf") and bad["sources"] == {"actors": [0]}
    assert bad["batch"].keys() == batch.rows.keys()
    assert load(tmp_path / "run" / "model.tar")["step"] == 100


def test_an_unwritable_last_checkpoint_is_an_error(small_disk, caplog):
    reason = r"model.tar of step 200 could not be written \(No space .*that of step 100 stays"
    with pytest.raises(FlagError, match=reason):
        with start(small_disk) as run:
            update(run._learner, [1.0])
            run._folder.checkpoints.save(run._learner)
            filler = fill(small_disk)
            update(run._learner, [1.0])
    assert re.search(reason.replace("model", "best"), caplog.text)
    assert list(small_disk.glob("run/*.tmp")) == []
    filler.unlink()
    with start(small_disk) as run:
        record(run)
    assert load(small_disk / "run" / "model.tar")["step"] == 200


@pytest.mark.parametrize("is_told", [False, True])  # the signal came to another learner
def test_torchrun_does_not_restart_a_stopped_run_on_a_full_disk(small_disk, is_told, monkeypatch):
    with start(small_disk) as run:
        run._group = Alone()
        run._group.by_torchrun = True
        record(run)
        filler = fill(small_disk)
        monkeypatch.setattr(run._group.exchange, "has_to_stop", is_told)
        run._signals.first = None if is_told else signal.SIGTERM
    assert run.exit_status == 0
    filler.unlink()


def test_a_profiler_trace_is_written(tmp_path):
    with start(tmp_path, f"{CPU_ONLY} --write_profiler_trace --total_steps 100000") as run:
        for _ in range(100):
            with run._learner.lock:  # before learning begins
                run.record({"steps": 1}, create_batch(), is_update=False)
        for _ in range(50):
            update(run._learner)
            record(run)
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert names.count("Optimizer.step#RMSprop.step") == 20


@pytest.mark.parametrize("handler", ["SIG_DFL", "SIG_IGN"])  # the latter by nohup
def test_a_lost_terminal_stops_a_run_unless_it_is_ignored(handler):
    code = f"import signal; signal.signal(signal.SIGHUP, signal.{handler})\n"
    code += "from beast.processes import lifetime; print(signal.SIGHUP in lifetime.STOP_SIGNALS)"
    assert run_with_deadline(code).strip() == str(handler == "SIG_DFL")


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_ends_a_run_with_checkpoint_and_status(tmp_path, number, caplog):
    caplog.set_level(logging.INFO)
    handlers = [signal.getsignal(n) for n in STOP_SIGNALS]
    with start(tmp_path) as run:
        record(run)
        os.kill(os.getpid(), number)
        assert run.stop.wait(60)
        # The next one comes soon after, however slow this machine is; SIGHUP may come late.
        run._signals.time += -60 if number == signal.SIGHUP else 60
        os.kill(os.getpid(), number)  # as make and timeout do; this does not end the process
        wait_until(lambda: f"Caught {number.name}: ending" in caplog.messages)
    assert run.exit_status == 128 + number
    assert read_meta(tmp_path / "run")["status"] == f"stopped by {number.name}"
    assert load(tmp_path / "run" / "model.tar")["step"] == 100
    assert [signal.getsignal(n) for n in STOP_SIGNALS] == handlers


SECOND_SIGNAL = """
import os, signal, sys
from small_run import create_learner, parse
from beast.runs.run import Run
flags = parse(sys.argv[1])
with Run(flags, create_learner(flags)) as run:
    os.kill(os.getpid(), signal.SIGTERM)
    run.stop.wait()
    run._signals.time -= 60
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
"""


@pytest.mark.whole
def test_a_second_signal_after_a_while_ends_the_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SECOND_SIGNAL)
    run(script, tmp_path, PYTHONPATH=f"{ROOT}:{HELPERS}", status=-signal.SIGINT)
