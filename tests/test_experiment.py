# SPDX-License-Identifier: Apache-2.0
"""A run's folder and flags: what is kept, what is dropped, and what survives a crash."""

import argparse
import csv
import json
import logging
import math
import os
import random
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import experiment
import timing
from experiment import FlagError


def Experiment(flags, step):
    """Return the folder of a run whose logs go on at `step`."""
    run = experiment.Experiment(flags)
    run.start_logs(step)
    return run


def make_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="train")
    parser.add_argument("--xpid")
    parser.add_argument("--savedir")
    parser.add_argument("--disable_checkpoint", action="store_true")
    parser.add_argument("--disable_cuda", action="store_true")
    parser.add_argument("--wandb", action="store_true")
    parser.add_argument("--total_steps", type=int, default=1000)
    parser.add_argument("--learning_rate", type=float, default=0.5)
    parser.add_argument("--use_lstm", action="store_true")
    parser.add_argument("--frame_skip", type=int, default=4)
    return parser


def parse(tmp_path, words="--xpid run"):
    return experiment.parse_flags(make_parser(), [*words.split(), "--savedir", str(tmp_path)])


class Agent:
    """A model with its optimizer, that has learned for some steps."""

    def __init__(self, flags, steps=0, size=3):
        self.model = torch.nn.Linear(size, 1)
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=flags.learning_rate)
        self.stats = {"step": 0, "episode_returns": []}
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda _: 1 - self.stats["step"] / flags.total_steps
        )
        for _ in range(steps):
            self.learn()

    def learn(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 3)).square().sum().backward()
        self.optimizer.step()
        self.stats["step"] += 100
        self.scheduler.step()

    def parts(self):
        return self.model, self.optimizer, self.scheduler, self.stats


def save(tmp_path, flags=None, steps=2):
    flags = flags or parse(tmp_path)
    agent = Agent(flags, steps)
    with Experiment(flags, 0) as run:
        run.save_checkpoint(*agent.parts())
    return agent


# ---------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_brings_everything_back(tmp_path):
    saved = save(tmp_path)
    flags = parse(tmp_path)
    agent = Agent(flags)
    experiment.resume(flags, *agent.parts())
    assert agent.stats == saved.stats == {"step": 200, "episode_returns": []}
    for key in ("model", "optimizer", "scheduler"):
        mine, other = getattr(agent, key).state_dict(), getattr(saved, key).state_dict()
        assert str(mine) == str(other), key
    # And both go on alike, with the next random numbers of the generator, too.
    after_saving = torch.get_rng_state()
    saved.learn()
    torch.set_rng_state(after_saving)
    agent.learn()
    assert torch.equal(agent.model.weight, saved.model.weight)
    assert agent.scheduler.get_last_lr() == saved.scheduler.get_last_lr() == [0.5 * 0.7]


def test_a_checkpoint_is_read_without_running_code_of_it(tmp_path):
    save(tmp_path)
    checkpoint = torch.load(tmp_path / "run" / "model.tar", weights_only=True)
    assert checkpoint["step"] == 200 and checkpoint["flags"]["learning_rate"] == 0.5

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    torch.save({"step": Evil()}, tmp_path / "run" / "model.tar")
    with pytest.raises(FlagError, match="cannot read the checkpoint"):
        parse(tmp_path)
    assert not (tmp_path / "evil").exists()


def test_a_crash_while_saving_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    save(tmp_path)
    path = tmp_path / "run" / "model.tar"
    before, real_save = path.read_bytes(), torch.save

    def save_half(checkpoint, file):
        real_save(checkpoint, file)
        file.truncate(file.tell() // 2)
        raise OSError("no space left on device")

    flags = parse(tmp_path)
    with pytest.raises(OSError, match="no space left"):
        with Experiment(flags, 200) as run:
            monkeypatch.setattr(torch, "save", save_half)
            run.save_checkpoint(*Agent(flags, 3).parts())
    assert path.read_bytes() == before
    assert experiment.load_checkpoint(flags)["step"] == 200
    assert "no space left" in json.loads((tmp_path / "run" / "meta.json").read_text())["status"]


def test_no_checkpoint_is_written_where_none_is_wanted(tmp_path):
    save(tmp_path, parse(tmp_path, "--xpid run --disable_checkpoint"))
    assert not (tmp_path / "run" / "model.tar").exists()
    assert experiment.load_checkpoint(parse(tmp_path)) is None


def test_random_states_are_restored():
    def draw():
        return random.random(), np.random.normal(), torch.rand(1).item()

    experiment.seed_generators([1, 2])
    np.random.normal()  # now NumPy holds the second one of a pair back
    states = experiment.random_states()
    first = draw()
    assert draw() != first
    experiment.restore_random_states(states)
    assert draw() == first


def test_generators_are_seeded_alike_by_the_same_numbers_only():
    def draw(seed):
        experiment.seed_generators(seed)
        return random.random(), np.random.rand(), torch.rand(1).item()

    assert draw([1, 2]) == draw([1, 2])
    others = [draw(seed) for seed in ([1, 2], [2, 1], [1, 3], [1, 2, 0, 0, 7])]
    for values in zip(*others, strict=True):
        assert len(set(values)) == 4


def test_weights_that_do_not_fit_are_refused_with_the_flags_that_differ(tmp_path):
    save(tmp_path)
    flags = parse(tmp_path, "--xpid run --use_lstm --frame_skip 2")
    with pytest.raises(FlagError) as error:
        experiment.resume(flags, *Agent(flags, size=4).parts())
    for text in ("--use_lstm was False, is True", "--frame_skip was 4, is 2", "size mismatch"):
        assert text in str(error.value)
    assert "--xpid was" not in str(error.value)
    flags = parse(tmp_path)
    with pytest.raises(FlagError, match="the code of Net has changed"):
        experiment.resume(flags, *Agent(flags, size=4).parts())


def test_a_finished_run_says_what_to_raise(tmp_path):
    save(tmp_path, steps=10)
    flags = parse(tmp_path)
    with pytest.raises(FlagError, match=r"has done its 1,000 steps: raise --total_steps \(1,000\)"):
        experiment.resume(flags, *Agent(flags).parts())
    flags = parse(tmp_path, "--xpid run --total_steps 1001")
    experiment.resume(flags, *Agent(flags).parts())


# ---------------------------------------------------------------------------------------- flags


def test_flags_come_from_the_checkpoint_unless_given(tmp_path):
    save(tmp_path, parse(tmp_path, "--xpid run --learning_rate 0.25 --use_lstm"))
    flags = parse(tmp_path)
    assert flags.learning_rate == 0.25 and flags.use_lstm and flags.total_steps == 1000
    flags = parse(tmp_path, "--xpid run --learning_rate 0.5 --total_steps 2000")
    assert flags.learning_rate == 0.5  # though that is the default
    assert flags.use_lstm and flags.total_steps == 2000


def test_mode_savedir_and_the_disabling_flags_are_of_the_call_alone(tmp_path):
    save(tmp_path)
    path = tmp_path / "run" / "model.tar"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["flags"] |= {"disable_cuda": True, "disable_checkpoint": True, "savedir": "/gone"}
    torch.save(checkpoint, path)
    flags = parse(tmp_path)
    assert not flags.disable_cuda and not flags.disable_checkpoint
    assert flags.savedir == str(tmp_path) and flags.mode == "train"
    assert parse(tmp_path, "--xpid run --mode test").mode == "test"


def test_a_missing_wandb_is_asked_for_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(FlagError, match="pip install wandb"):
        parse(tmp_path, "--xpid run --wandb")
    assert parse(tmp_path, "--xpid run --wandb --mode test").wandb


def test_wandb_gets_the_same_figures_and_a_resumed_run_goes_on_there(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    flags = parse(tmp_path, "--xpid run --wandb")
    ids = []
    for step in (0, 100, 0):  # new, resumed, begun again
        with Experiment(flags, step) as run:
            run.log(step + 100, {"total_loss": 0.5, "mean_game_return": None}, {})
            run.log(step + 200, {"total_loss": 0.25, "mean_game_return": None}, {})
            assert run._wandb.step == step + 200 and run._wandb.config["learning_rate"] == 0.5
            assert run._wandb.summary["total_loss"] == 0.5  # a step is told when the next one comes
            assert "mean_game_return" not in dict(run._wandb.summary)
            ids.append(run._wandb.id)
    assert ids[0] == ids[1] != ids[2]
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*"))) >= 2


def test_flags_that_are_no_more_do_not_matter(tmp_path):
    save(tmp_path)
    path = tmp_path / "run" / "model.tar"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["flags"]["of_an_older_version"] = 3
    torch.save(checkpoint, path)
    assert "of_an_older_version" not in parse(tmp_path)


def test_flags_of_one_run_do_not_leak_into_the_next_one_of_the_process(tmp_path):
    save(tmp_path, parse(tmp_path, "--xpid run --learning_rate 0.25"))
    parser = make_parser()
    words = ["--savedir", str(tmp_path)]
    assert experiment.parse_flags(parser, ["--xpid", "run", *words]).learning_rate == 0.25
    assert experiment.parse_flags(parser, ["--xpid", "other", *words]).learning_rate == 0.5
    assert experiment.parse_flags(parser, words).xpid not in ("run", "other")


def test_a_run_without_a_name_is_named_by_the_time_and_a_test_takes_the_latest(tmp_path):
    assert parse(tmp_path, "").xpid.startswith("torchbeast-2")
    with pytest.raises(FlagError, match="there is no run in"):
        parse(tmp_path, "--mode test")
    save(tmp_path, parse(tmp_path, "--xpid one --learning_rate 0.25"))
    save(tmp_path, parse(tmp_path, "--xpid two --learning_rate 0.125"))
    assert parse(tmp_path, "--mode test").learning_rate == 0.125
    assert parse(tmp_path, "--xpid latest").xpid == "two"


# ----------------------------------------------------------------------------------- the folder


def test_a_folder_in_use_is_refused_until_it_is_free(tmp_path):
    flags = parse(tmp_path)
    with Experiment(flags, 0):
        before = (tmp_path / "run" / "meta.json").read_bytes()
        with pytest.raises(FlagError, match=f"another process is training in {tmp_path / 'run'}"):
            Experiment(flags, 0)
        assert (tmp_path / "run" / "meta.json").read_bytes() == before
    with Experiment(flags, 0):
        pass


def test_meta_tells_how_a_run_ended(tmp_path):
    flags, path = parse(tmp_path), tmp_path / "run" / "meta.json"
    with pytest.raises(ValueError):
        with Experiment(flags, 0):
            meta = json.loads(path.read_text())
            assert meta["status"] == "running" and meta["end"] is None
            raise ValueError("out of luck")
    assert json.loads(path.read_text())["status"] == "ValueError: out of luck"
    for _ in range(2):
        with Experiment(flags, 0):
            pass
    meta = json.loads(path.read_text())
    assert meta["status"] == "ended"
    assert [m["status"] for m in meta["earlier"]] == ["ValueError: out of luck", "ended"]
    assert "earlier" not in meta["earlier"][1]


def test_latest_links_the_newest_run_and_spares_what_is_no_link(tmp_path, caplog):
    for xpid in ("one", "two", "one"):
        with Experiment(parse(tmp_path, f"--xpid {xpid}"), 0):
            assert (tmp_path / "latest").resolve() == (tmp_path / xpid).resolve()
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "precious").touch()
    with Experiment(parse(tmp_path), 0):
        pass
    assert (tmp_path / "latest" / "precious").exists()
    assert "Could not link" in caplog.text


def test_a_tick_goes_to_screen_and_files(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    figures = {"mean_episode_return": None, "total_loss": None}
    with Experiment(parse(tmp_path), 0) as run:
        run.log(0, figures, {"return": "-", "loss": "-"})
        run.log(250, {"mean_episode_return": 1.5, "total_loss": -2.0}, {"return": "1.5"})
    rows = read(tmp_path / "run" / "logs.csv")
    assert [row["step"] for row in rows] == ["0", "250"]
    assert [row["mean_episode_return"] for row in rows] == ["", "1.5"]
    assert "0.0% | 0 steps | 0 steps/s (0 frames/s) | return - | loss - | left -" in caplog.text
    assert "25.0% | 250 steps | " in caplog.text and " | return 1.5 | left 0:0" in caplog.text
    assert "25.0% | 250 steps | " in (tmp_path / "run" / "out.log").read_text()
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))


def test_rows_beyond_the_checkpoint_are_dropped_on_resuming(tmp_path):
    flags = parse(tmp_path)
    with Experiment(flags, 0) as run:
        for step in (0, 100, 200, 300, 400):
            run.log(step, {"loss": step / 2}, {})
    with Experiment(flags, 200) as run:
        run.log(250, {"loss": 7.0}, {})
    rows = read(tmp_path / "run" / "logs.csv")
    assert [row["step"] for row in rows] == ["0", "100", "200", "250"]
    assert [row["_tick"] for row in rows] == ["0", "1", "2", "3"]


def test_a_run_that_starts_anew_starts_a_new_log(tmp_path):
    flags = parse(tmp_path)  # killed before its first checkpoint, say
    for _ in range(2):
        with Experiment(flags, 0) as run:
            run.log(0, {}, {})
            run.log(100, {}, {})
    assert [row["step"] for row in read(tmp_path / "run" / "logs.csv")] == ["0", "100"]


# --------------------------------------------------------------------------------------- the CSV


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def make_csv(tmp_path):
    opened = []

    def make(step=0):
        opened.append(experiment._CSV(tmp_path / "logs.csv", step))
        return opened[-1]

    yield make
    for file in opened:
        file.close()


def test_csv_has_its_header_from_the_start(make_csv, tmp_path):
    make_csv()
    assert (tmp_path / "logs.csv").read_text().split() == ["_tick,_time,step"]


def test_csv_grows_by_columns_and_keeps_its_rows(make_csv, tmp_path):
    table = make_csv()
    table.write({"step": 1, "loss": 0.5})
    table.write({"step": 2, "loss": 0.25, "return": 3, "lag": None})
    table.write({"step": 3, "return": 4})
    rows = read(tmp_path / "logs.csv")
    assert list(rows[0]) == ["_tick", "_time", "step", "loss", "return", "lag"]
    assert [row["_tick"] for row in rows] == ["0", "1", "2"]
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert [row["loss"] for row in rows] == ["0.5", "0.25", ""]
    assert [row["return"] for row in rows] == ["", "3", "4"]
    assert [row["lag"] for row in rows] == ["", "", ""]
    times = [float(row["_time"]) for row in rows]
    assert times == sorted(times) and times[0] > 1.5e9  # seconds since the epoch


def test_csv_rows_can_be_read_at_once(make_csv, tmp_path):
    table = make_csv()
    for step in range(3):
        table.write({"step": step})
        assert len(read(tmp_path / "logs.csv")) == step + 1


def test_csv_goes_on_after_dropping_rows_with_columns_of_its_own(make_csv, tmp_path):
    table = make_csv()
    for step in range(1, 6):
        table.write({"step": step, "loss": step})
    table.close()
    table = make_csv(3)
    table.write({"step": 4, "return": 9})
    rows = read(tmp_path / "logs.csv")
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert [row["_tick"] for row in rows] == ["0", "1", "2", "3"]
    assert rows[2]["loss"] == "3" and rows[3]["loss"] == "" and rows[3]["return"] == "9"


@pytest.mark.parametrize("torn", ["3", "3,17", "3,1795246641.4,", "3,1795246641.4,4", "3,1,2,\x00"])
def test_csv_survives_a_last_row_torn_by_a_crash(make_csv, tmp_path, torn):
    table = make_csv()
    for step in range(1, 4):
        table.write({"step": 10 * step, "loss": step})
    table.close()
    with open(tmp_path / "logs.csv", "a") as file:
        file.write(torn)
    table = make_csv(30)
    table.write({"step": 40, "loss": 4})
    rows = read(tmp_path / "logs.csv")
    steps = [int(row["step"]) for row in rows]
    assert steps == [10, 20, 30, 40]
    assert [row["_tick"] for row in rows] == ["0", "1", "2", "3"]


def test_csv_of_nothing_is_begun_anew(make_csv, tmp_path):
    (tmp_path / "logs.csv").touch()
    make_csv(100).write({"step": 200})
    assert [row["step"] for row in read(tmp_path / "logs.csv")] == ["200"]


# ------------------------------------------------------------------------------------ the screen


def test_mean_of_nothing_is_nothing_and_shown_as_a_dash():
    assert experiment.mean([]) is None
    assert experiment.mean([1, 2, 6]) == 3
    assert experiment.mean([0.1] * 10) == 0.1
    assert experiment.show_number(None) == "-"
    assert experiment.show_number(experiment.mean([-21.0, -20.0])) == "-20.5"
    assert experiment.show_number(123456.0) == "1.235e+05"
    assert not math.isnan(experiment.mean([0.0]))


# ------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number", experiment.STOP_SIGNALS)
def test_a_stop_signal_sets_the_event_and_is_remembered(number):
    before = {n: signal.getsignal(n) for n in experiment.STOP_SIGNALS}
    stop = threading.Event()
    with experiment.stop_on_signals(stop) as caught:
        assert not stop.is_set() and caught == []
        os.kill(os.getpid(), number)
        assert stop.wait(10)
        assert caught == [number]
        os.kill(os.getpid(), number)  # as make and timeout do; this does not end the process
        assert caught == [number, number]
    assert {n: signal.getsignal(n) for n in experiment.STOP_SIGNALS} == before


def test_a_second_signal_after_a_while_ends_the_process(tmp_path):
    (tmp_path / "script.py").write_text(
        "import os, signal, threading, time, experiment\n"
        "stop = threading.Event()\n"
        "with experiment.stop_on_signals(stop):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    assert stop.wait(10)\n"
        "    time.sleep(1.1)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(10)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.path.dirname(experiment.__file__)}
    command = [sys.executable, str(tmp_path / "script.py")]
    assert subprocess.run(command, env=environment, timeout=60).returncode == -signal.SIGINT


def test_without_a_signal_nothing_is_set():
    stop = threading.Event()
    with experiment.stop_on_signals(stop) as caught:
        pass
    assert caught == [] and not stop.is_set()


# ------------------------------------------------------------------------------------ who waits


def test_seconds_become_shares_of_the_time_since_the_last_call(monkeypatch):
    clock = [10.0]
    monkeypatch.setattr(timing.time, "monotonic", lambda: clock[0])
    shares = timing.TimeShares()
    clock[0] = 12.0
    assert shares(a=1.0, b=0.5) == {"a": 0.5, "b": 0.25}
    clock[0] = 16.0
    assert shares(a=1.0, b=4.5) == {"a": 0.0, "b": 1.0}


def test_a_stopwatch_counts_while_all_threads_wait_also_now(monkeypatch):
    clock = [10.0]
    monkeypatch.setattr(timing.time, "monotonic", lambda: clock[0])
    stopwatch = timing.Stopwatch(2)
    entered, leave = threading.Event(), threading.Event()

    def wait():
        with stopwatch:
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=wait)
    thread.start()
    assert entered.wait(30)
    clock[0] = 11.0
    assert stopwatch.seconds() == 0  # one of them has something to do
    with stopwatch:
        clock[0] = 13.0
        assert stopwatch.seconds() == 2
        clock[0] = 14.0
    clock[0] = 20.0
    assert stopwatch.seconds() == 3
    leave.set()
    thread.join()
    assert stopwatch.seconds() == 3


# ------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize(
    ("wanted", "knows_bf16", "devices", "chosen"),
    [
        (None, True, "yes", "bf16"),
        (None, True, "yes yes", "bf16"),
        (None, True, "yes no", "fp32"),  # a GPU that has it, actors on a CPU that has not
        (None, False, "yes", "fp32"),
        ("fp32", True, "yes", "fp32"),
        ("bf16", False, "no", "bf16"),
    ],
)
def test_precision_is_what_all_devices_and_the_net_are_good_at_unless_given(
    monkeypatch, caplog, wanted, knows_bf16, devices, chosen
):
    class Net:
        pass

    if knows_bf16:
        Net.knows_bf16 = True
    monkeypatch.setattr(experiment, "has_bf16", lambda device: device == "yes")
    flags = argparse.Namespace(precision=wanted)
    experiment.choose_precision(flags, Net, devices.split())
    assert flags.precision == chosen
    assert ("slower than fp32" in caplog.text) == (wanted == "bf16")


@pytest.mark.parametrize("features", ["avx512_bf16", "amx_bf16", ""])
def test_a_processor_tells_whether_it_multiplies_in_bfloat16(monkeypatch, features):
    capabilities = {"avx512_f": True, "avx512_bf16": False, "cpu_name": "x"}
    capabilities |= {feature: True for feature in features.split()}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert experiment.has_bf16(torch.device("cpu")) == bool(features)
