# SPDX-License-Identifier: Apache-2.0
"""A run's folder and flags: what is kept, what is dropped, and what survives a crash."""

import argparse
import csv
import errno
import json
import logging
import math
import os
import random
import re
import signal
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from tensorboard.compat.proto.event_pb2 import Event

import checkpoint
import experiment
import timing
import whole_files
from experiment import FlagError


def Experiment(flags, step):
    """Return the folder of a run whose logs go on at `step`."""
    run = experiment.Experiment(flags)
    run.start_logs(step)
    return run


def make_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="train")
    parser.add_argument("--env", default="Pong")
    parser.add_argument("--checkpoint_interval_s", type=float, default=600)
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--xpid")
    parser.add_argument("--savedir")
    parser.add_argument("--disable_checkpoint", action="store_true")
    parser.add_argument("--disable_cuda", action="store_true")
    parser.add_argument("--wandb", action="store_true")
    parser.add_argument("--total_steps", type=int, default=1000)
    parser.add_argument("--learning_rate", type=float, default=0.5)
    parser.add_argument("--use_lstm", action="store_true")
    parser.add_argument("--frame_skip", type=int, default=4)
    parser.set_defaults(program="program.py")
    return parser


def parse(tmp_path, words="--xpid run"):
    return experiment.parse_flags(make_parser(), [*words.split(), "--savedir", str(tmp_path)])


class Agent:
    """A model with its optimizer, that has learned for some steps."""

    def __init__(self, flags, steps=0, size=3):
        self.model = torch.nn.Linear(size, 1)
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=flags.learning_rate)
        self.stats = {"step": 0, "episode_returns": [], "game_returns": []}
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
        return threading.Lock(), self.model, self.optimizer, self.scheduler, self.stats


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
    checkpoint.resume(flags, *agent.parts()[1:])
    assert agent.stats == saved.stats
    assert agent.stats == {"step": 200, "episode_returns": [], "game_returns": []}
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


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("words", ["", "--mode test", "--mode test --best"])
def test_a_checkpoint_with_code_in_it_is_refused_and_the_code_does_not_run(tmp_path, words, zipped):
    save(tmp_path)
    path = tmp_path / "run" / ("best.tar" if "best" in words else "model.tar")
    content = {"step": Evil(tmp_path / "evil")}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(FlagError) as error:
        parse(tmp_path, f"--xpid run {words}")
    for text in (str(path), "holds code, which was not run", "mkdir", "move it away or choose"):
        assert text in str(error.value)
    assert "weights_only" not in str(error.value)  # PyTorch's advice how to run it
    assert not (tmp_path / "evil").exists()
    torch.load(path, weights_only=False)  # which would have run it
    assert (tmp_path / "evil").exists()


def test_a_best_checkpoint_that_cannot_be_read_is_told_and_training_goes_on(tmp_path, caplog):
    save(tmp_path)
    torch.save(Evil(tmp_path / "evil"), tmp_path / "run" / "best.tar")
    with Experiment(parse(tmp_path), 200):
        pass
    assert re.search(r"best.tar: .* holds code", caplog.text)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("content", [{"model_state_dict": {}, "flags": {}}, torch.zeros(3), [1]])
def test_a_file_that_is_another_kind_of_checkpoint_is_refused_by_what_it_lacks(tmp_path, content):
    save(tmp_path)
    torch.save(content, tmp_path / "run" / "model.tar")
    with pytest.raises(FlagError, match="cannot use the checkpoint .*model.tar: it lacks"):
        parse(tmp_path)


@pytest.mark.parametrize("mode", ["train", "test"])
def test_a_checkpoint_of_another_environment_is_refused_with_both_names(tmp_path, mode):
    save(tmp_path)
    with pytest.raises(FlagError, match="--env is Breakout, .* is of Pong: leave --env out"):
        parse(tmp_path, f"--xpid run --env Breakout --mode {mode}")
    assert parse(tmp_path, f"--xpid run --env Pong --mode {mode}").env == "Pong"
    assert parse(tmp_path, "--xpid other --env Breakout").env == "Breakout"


@pytest.mark.parametrize("words", ["", "--mode test", "--mode test --best"])
def test_a_checkpoint_of_the_other_program_is_refused_with_both_names(tmp_path, words):
    save(tmp_path)
    (tmp_path / "run" / "best.tar").write_bytes((tmp_path / "run" / "model.tar").read_bytes())
    parser = make_parser()
    parser.set_defaults(program="other.py")
    with pytest.raises(FlagError, match="is of program.py, but this is other.py: run program.py"):
        experiment.parse_flags(
            parser, ["--xpid", "run", "--savedir", str(tmp_path), *words.split()]
        )


def play_and_save(run, agent, returns):
    agent.learn()
    agent.stats["game_returns"] = (agent.stats["game_returns"] + returns)[-100:]
    run.save_checkpoint(*agent.parts())


def best_step(tmp_path):
    return torch.load(tmp_path / "run" / "best.tar", weights_only=True)["step"]


def test_the_best_checkpoint_is_that_of_the_highest_mean_return_also_after_resuming(tmp_path):
    flags = parse(tmp_path)
    agent = Agent(flags)
    with Experiment(flags, 0) as run:
        play_and_save(run, agent, [])
        assert not (tmp_path / "run" / "best.tar").exists()  # nothing has been played to its end
        play_and_save(run, agent, [5.0])
        assert best_step(tmp_path) == 200
        play_and_save(run, agent, [0.0] * 99)  # a mean of a hundred says more than that of one
        assert best_step(tmp_path) == 300
        play_and_save(run, agent, [1.0] * 50)
        assert best_step(tmp_path) == 400
        play_and_save(run, agent, [0.0])
        assert best_step(tmp_path) == 400
        before = (tmp_path / "run" / "best.tar").read_bytes()
    flags = parse(tmp_path)
    agent = Agent(flags)
    checkpoint.resume(flags, *agent.parts()[1:])
    with Experiment(flags, 500) as run:
        play_and_save(run, agent, [0.0])
        assert (tmp_path / "run" / "best.tar").read_bytes() == before
        play_and_save(run, agent, [1.0] * 99)
        assert best_step(tmp_path) == 700
    assert checkpoint.load(flags)["step"] == 700


def test_best_is_for_tests_alone_and_brings_its_own_flags(tmp_path):
    save(tmp_path, parse(tmp_path, "--xpid run --learning_rate 0.25"))
    (tmp_path / "run" / "model.tar").rename(tmp_path / "run" / "best.tar")
    save(tmp_path, parse(tmp_path, "--xpid run --learning_rate 0.125"))
    assert parse(tmp_path, "--xpid run --mode test --best").learning_rate == 0.25
    assert parse(tmp_path, "--xpid run --mode test").learning_rate == 0.125
    with pytest.raises(FlagError, match="--best is for --mode test"):
        parse(tmp_path, "--xpid run --best")


def test_one_skipped_update_costs_no_checkpoint_unless_the_weights_are_broken(tmp_path):
    flags = parse(tmp_path, "--xpid run")
    agent = Agent(flags, 2)
    agent.stats["skipped_in_a_row"] = 1
    with Experiment(flags, 0) as run:
        run.save_checkpoint(*agent.parts())
    assert checkpoint.load(flags)["step"] == agent.stats["step"]
    with torch.no_grad():
        next(agent.model.parameters()).view(-1)[0] = torch.nan
    with pytest.raises(FlagError, match="no checkpoint was written"):
        with Experiment(flags, 0) as run:
            run.save_checkpoint(*agent.parts())


def test_no_checkpoint_is_written_while_the_last_updates_were_bad(tmp_path, caplog):
    flags = parse(tmp_path, "--xpid run --checkpoint_interval_s 0")
    agent = Agent(flags, 2)
    with pytest.raises(FlagError, match="no checkpoint was written at step 300"):
        with Experiment(flags, 0) as run:
            run.save_checkpoint(*agent.parts())
            agent.learn()
            agent.stats["skipped_in_a_row"] = 3
            run.save_checkpoint(*agent.parts())
            assert run.checkpoint_is_due(within=1)  # and so it is tried again at once
    assert "the last 3 updates were not finite" in caplog.text
    assert checkpoint.load(flags)["step"] == 200
    with Experiment(flags, 200) as run:
        run.save_checkpoint(*agent.parts())
        agent.stats["skipped_in_a_row"] = 0
        run.save_checkpoint(*agent.parts())
    assert checkpoint.load(flags)["step"] == 300


def test_the_lock_is_free_while_the_disk_is_waited_for(tmp_path):
    flags = parse(tmp_path)
    lock, *agent = Agent(flags, size=50_000).parts()  # more than a pipe holds
    with Experiment(flags, 0) as run:
        os.mkfifo(tmp_path / "run" / "model.tmp")  # which is written to at the reader's pace
        thread = threading.Thread(target=run.save_checkpoint, args=(lock, *agent), daemon=True)
        thread.start()
        with open(tmp_path / "run" / "model.tmp", "rb") as reader:
            assert reader.read(1)
            assert lock.acquire(timeout=60)
            lock.release()
            reader.read()
        thread.join(60)
        assert not thread.is_alive()
        run.save_checkpoint(lock, *agent)


def test_a_checkpoint_is_due_once_within_each_interval(tmp_path):
    for seconds, is_due in ((1000, False), (10, False), (4, True), (0.001, True)):
        flags = parse(tmp_path, f"--xpid {seconds} --checkpoint_interval_s {seconds}")
        with Experiment(flags, 0) as run:
            assert run.checkpoint_is_due(within=5) == is_due
            run.save_checkpoint(*Agent(flags).parts())
            assert run.checkpoint_is_due(within=5) == is_due


def test_what_a_process_that_was_killed_had_begun_to_write_is_removed(tmp_path):
    save(tmp_path)
    for name in ("model", "best", "meta", "logs", "mine"):
        (tmp_path / "run" / f"{name}.tmp").write_text("half")
    with Experiment(parse(tmp_path), 200):
        assert [path.stem for path in (tmp_path / "run").glob("*.tmp")] == ["mine"]


def test_no_checkpoint_is_written_where_none_is_wanted(tmp_path):
    save(tmp_path, parse(tmp_path, "--xpid run --disable_checkpoint"))
    assert not (tmp_path / "run" / "model.tar").exists()
    assert checkpoint.load(parse(tmp_path)) is None


def test_random_states_are_restored():
    def draw():
        return random.random(), np.random.normal(), torch.rand(1).item()

    experiment.seed_generators([1, 2])
    np.random.normal()  # now NumPy holds the second one of a pair back
    states = checkpoint.random_states()
    first = draw()
    assert draw() != first
    checkpoint.restore_random_states(states)
    assert draw() == first


def test_generators_are_seeded_alike_by_the_same_numbers_only():
    def draw(seed):
        experiment.seed_generators(seed)
        return random.random(), np.random.rand(), torch.rand(1).item()

    assert draw([1, 2]) == draw([1, 2])
    others = [draw(seed) for seed in ([1, 2], [2, 1], [1, 3], [1, 2, 0, 0, 7])]
    for values in zip(*others, strict=True):
        assert len(set(values)) == 4


def test_weights_that_do_not_fit_are_refused_with_names_shapes_and_the_flags_that_differ(tmp_path):
    save(tmp_path)
    flags = parse(tmp_path, "--xpid run --use_lstm --frame_skip 2")
    with pytest.raises(FlagError) as error:
        checkpoint.resume(flags, *Agent(flags, size=4).parts()[1:])
    for text in (
        "--use_lstm was False, is True",
        "--frame_skip was 4, is 2",
        "a Linear of Pong, does not fit this Linear of Pong",
        "weight: [1, 3] in the checkpoint, [1, 4] in the net",
    ):
        assert text in str(error.value)
    assert "--xpid was" not in str(error.value) and "bias" not in str(error.value)
    flags = parse(tmp_path)
    with pytest.raises(FlagError, match="the code of Net has changed"):
        checkpoint.resume(flags, *Agent(flags, size=4).parts()[1:])
    agent = Agent(flags)
    agent.model = torch.nn.Bilinear(2, 3, 1, bias=False)
    with pytest.raises(FlagError) as error:
        checkpoint.resume(flags, *agent.parts()[1:])
    assert "does not fit this Bilinear" in str(error.value)
    assert "bias: [1] in the checkpoint, missing in the net" in str(error.value)


def test_a_finished_run_says_what_to_raise(tmp_path):
    save(tmp_path, steps=10)
    flags = parse(tmp_path)
    with pytest.raises(FlagError, match=r"has done its 1,000 steps: raise --total_steps \(1,000\)"):
        checkpoint.resume(flags, *Agent(flags).parts()[1:])
    flags = parse(tmp_path, "--xpid run --total_steps 1001")
    checkpoint.resume(flags, *Agent(flags).parts()[1:])


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
    saved = torch.load(path, weights_only=True)
    saved["flags"] |= {"disable_cuda": True, "disable_checkpoint": True, "savedir": "/gone"}
    torch.save(saved, path)
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
    saved = torch.load(path, weights_only=True)
    saved["flags"]["of_an_older_version"] = 3
    torch.save(saved, path)
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


# --------------------------------------------------------------------------------- a full disk


def fill(folder):
    """Leave no block of a small disk free; return what to remove to have some again."""
    with open(folder / "filler", "wb", buffering=0) as file:
        with pytest.raises(OSError) as error:
            while True:
                file.write(bytes(4096))
    assert error.value.errno == errno.ENOSPC
    return folder / "filler"


def read_events(folder):
    """Return the events of a run, of which each must be whole."""
    (path,) = folder.glob("events.out.tfevents.*")
    content, events = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        assert len(content) >= 12 + length + 4
        events.append(Event.FromString(content[12 : 12 + length]))
        content = content[12 + length + 4 :]
    return events


def test_a_full_disk_tears_no_file_and_the_run_goes_on_and_tells(small_disk, caplog):
    caplog.set_level(logging.INFO)
    flags = parse(small_disk)
    folder, agent = small_disk / "run", Agent(flags, 2)
    with Experiment(flags, 0) as run:
        run.log(100, {"loss": 1.0}, {})
        play_and_save(run, agent, [1.0])
        before = {name: (folder / name).read_bytes() for name in ("model.tar", "best.tar")}
        filler = fill(small_disk)
        play_and_save(run, agent, [1.0])
        for name in before:
            words = f"{folder / name} of step 400 could not be written (No space left on device): "
            assert words + "that of step 300 stays" in caplog.text
        steps = range(101, 301)
        for step in steps:
            run.log(step, {"loss": 1.0} | ({"new": 2.0} if step > 200 else {}), {})
        assert {name: (folder / name).read_bytes() for name in before} == before
        assert list(folder.glob("*.tmp")) == []
        assert checkpoint.load(flags)["step"] == 300
        names = ("logs.csv", "out.log", next(folder.glob("events*")).name)
        for name in names:
            # A shorter line may still fit into the last block, and then each change is told.
            lost = caplog.text.count(f"Cannot write {folder / name} (No space left on device)")
            again = caplog.text.count(f"Can write {folder / name} again: ")
            assert lost == again + 1
            assert again < 50
        told = caplog.text

        filler.unlink()
        caplog.clear()
        run.log(301, {"loss": 3.0, "new": 4.0}, {})
        for name in names:
            assert f"Can write {folder / name} again: " in caplog.text
        play_and_save(run, agent, [1.0])
    rows = read(folder / "logs.csv")
    written = [int(row["step"]) for row in rows]
    assert 1 < len(written) < 150 and written == sorted(set(written))
    assert written[0] == 100 and written[-1] == 301
    words = rf"Can write {folder / 'logs.csv'} again: (\d+) entries"
    assert len(written) + sum(map(int, re.findall(words, told + caplog.text))) == 202
    assert [int(row["_tick"]) for row in rows] == list(range(len(rows)))
    assert {row["steps_per_second"] is None for row in rows} == {False}
    assert rows[-1]["new"] == "4.0" and rows[-2]["new"] == ""
    *_, last = events = read_events(folder)
    assert last.step == 301 and len(events) < 150
    lines = (folder / "out.log").read_text().splitlines()
    assert all(line.startswith("[") for line in lines)
    assert checkpoint.load(flags)["step"] == best_step(small_disk) == 500
    assert json.loads((folder / "meta.json").read_text())["status"] == "ended"


def test_a_last_checkpoint_that_cannot_be_written_is_an_error_that_says_what_is_lost(small_disk):
    flags = parse(small_disk)
    folder, agent = small_disk / "run", Agent(flags, 2)
    words = r"model.tar of step 300 could not be written \(No space .*that of step 200 stays"
    with pytest.raises(FlagError, match=words):
        with Experiment(flags, 0) as run:
            run.save_checkpoint(*agent.parts())
            filler = fill(small_disk)
            agent.learn()
            run.save_checkpoint(*agent.parts())
    # Which could not be told there either.
    assert json.loads((folder / "meta.json").read_text())["status"] == "running"
    filler.unlink()
    with Experiment(flags, 200) as run:
        run.save_checkpoint(*agent.parts())
    assert checkpoint.load(flags)["step"] == 300


def test_no_run_starts_on_a_full_disk(small_disk):
    fill(small_disk)
    with pytest.raises(FlagError, match=f"cannot use --savedir {small_disk}: .*No space left"):
        Experiment(parse(small_disk), 0)


def test_a_piece_that_fits_in_part_is_taken_back(small_disk):
    path, written = small_disk / "file", 0
    file = whole_files.GrowingFile(path)
    while file.append(b"a whole piece\n" * 7):
        written += 1
    assert 1000 < written < 20_000
    assert path.read_bytes() == b"a whole piece\n" * 7 * written
    file.close()


# --------------------------------------------------------------------------------------- the CSV


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def make_csv(tmp_path):
    opened = []

    def make(step=0):
        opened.append(whole_files.CSVFile(tmp_path / "logs.csv", step))
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
