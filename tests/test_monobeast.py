# SPDX-License-Identifier: Apache-2.0
"""The whole program, as a process of its own: it learns, stops, goes on, plays, and fails well."""

import os
import re
import signal

import catch  # noqa: F401 - it makes the monobeast of this process play Catch
import numpy as np
import pytest
import torch
from program import (
    DEADLINE,
    TESTS,
    Program,
    column,
    last_step,
    load,
    read_meta,
    read_rows,
    run,
    shared_memory,
    split_words,
    wait_until,
)

import monobeast
from experiment import FlagError

CATCH, MONOBEAST = TESTS / "catch.py", TESTS.parent / "monobeast.py"
# Learns Catch in all of a dozen seeds; a few seconds on two cores.
GOOD = "--num_actors 1 --envs_per_actor 8 --learning_rate 0.01 --total_steps 150_000"
SMALL = "--num_actors 2 --envs_per_actor 2 --batch_size 4"


# ---------------------------------------------------------------------- one run from start to end


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Savedir, status and output of a run that learned Catch."""
    savedir = tmp_path_factory.mktemp("learned")
    status, output = run(CATCH, GOOD, "--env Catch --seed 12 --xpid first --savedir", savedir)
    return savedir, status, output


def test_catch_is_learned_in_under_a_minute(learned):
    savedir, status, output = learned
    assert status == 0, output
    rows = read_rows(savedir / "first")
    assert float(rows[-1]["mean_episode_return"]) >= 0.9
    assert float(rows[-1]["_time"]) - float(rows[0]["_time"]) < 60
    assert int(rows[-1]["step"]) >= 150_000


def test_folder_holds_what_happened(learned):
    folder = learned[0] / "first"
    for name in ("meta.json", "logs.csv", "out.log", "model.tar", "best.tar"):
        assert (folder / name).stat().st_size > 0, name
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    assert list(folder.glob("*.tmp")) == []
    latest = learned[0] / "latest"
    assert latest.is_symlink() and latest.resolve() == folder.resolve()
    assert "Saved" in (folder / "out.log").read_text()


def test_meta_tells_flags_and_circumstances(learned):
    meta = read_meta(learned[0] / "first")
    assert meta["flags"]["seed"] == 12 and meta["flags"]["learning_rate"] == 0.01
    assert meta["status"] == "ended"
    assert meta["start"] < meta["end"]
    assert meta["versions"]["torch"] == torch.__version__
    assert meta["machine"]["cores"] == os.cpu_count() and "cpu" in meta["machine"]
    assert {"commit", "changed"} <= meta["git"].keys()


def test_logs_go_forward_and_never_hold_a_nan(learned):
    folder = learned[0] / "first"
    text = (folder / "logs.csv").read_text()
    assert text.startswith("_tick,_time,step,")
    assert "nan" not in text.lower()
    rows = read_rows(folder)
    assert [int(row["_tick"]) for row in rows] == list(range(len(rows)))
    for key in ("_time", "step"):
        assert column(rows, key) == sorted(column(rows, key))
    wanted = {"mean_episode_return", "mean_game_return", "total_loss", "pg_loss", "baseline_loss"}
    wanted |= {"entropy_loss", "grad_norm", "learning_rate", "full_buffers", "actor_restarts"}
    wanted |= {"policy_lag_min", "policy_lag_mean", "policy_lag_max", "steps_per_second"}
    wanted |= {"learner_wait", "actor_wait"}
    assert wanted <= rows[0].keys()


def test_shares_of_time_spent_waiting_are_told(learned):
    savedir, _, output = learned
    rows = read_rows(savedir / "first")
    assert any(column(rows, "learner_wait"))
    for key in ("learner_wait", "actor_wait"):
        assert all(0 <= share <= 1 for share in column(rows, key))
    assert re.search(r"wait \d+%/\d+% ", output)


def test_figures_are_empty_before_the_first_episode(learned):
    savedir, _, output = learned
    first = read_rows(savedir / "first")[0]
    assert first["step"] == "0"
    assert first["mean_episode_return"] == first["policy_lag_mean"] == first["total_loss"] == ""
    line = next(line for line in output.splitlines() if "steps/s" in line)
    assert "return - " in line and "loss - " in line and "lag -/-/-" in line and "left -" in line
    assert "nan" not in output.lower() and "inf |" not in output


def test_screen_tells_steps_frames_returns_queue_and_lag(learned):
    line = [line for line in learned[2].splitlines() if "steps/s" in line][-1]
    number = r"-?[\d,.e+-]+"
    pattern = rf"100\.0% \| {number} steps \| {number} steps/s \({number} frames/s\) "
    pattern += rf"\| return {number} \| game {number} \| loss {number} "
    pattern += r"\| wait \d+%/\d+% \| full \d+/24 "
    pattern += rf"\| lag {number}/{number}/{number} \| health (ok|-|\w+ {number}) \| left 0:00:00"
    assert re.search(pattern, line), line


def test_policy_lag_is_small_but_not_nought(learned):
    rows = read_rows(learned[0] / "first")
    lags = [column(rows, f"policy_lag_{name}") for name in ("min", "mean", "max")]
    assert len(lags[0]) > 0
    for least, mean, most in zip(*lags, strict=True):
        assert 0 <= least <= mean <= most
    assert 0 < max(lags[2]) <= 24  # one at most for each buffer


def test_learning_rate_falls_linearly_to_nought(learned):
    for row in read_rows(learned[0] / "first"):
        left = 1 - min(int(row["step"]), 150_000) / 150_000
        assert float(row["learning_rate"]) == pytest.approx(0.01 * left)
    assert float(row["learning_rate"]) == 0


def test_checkpoint_holds_all_that_goes_on(learned):
    checkpoint = load(learned[0] / "first" / "model.tar")
    wanted = {"model_state_dict", "optimizer_state_dict", "scheduler_state_dict", "step", "stats"}
    assert wanted | {"random_states", "flags"} <= checkpoint.keys()
    assert checkpoint["step"] == checkpoint["stats"]["step"] >= 150_000
    assert checkpoint["flags"]["env"] == "Catch"


def play(capsys, *arguments):
    """Run a test in this process; return what it printed and the returns that it told of."""
    capsys.readouterr()
    assert monobeast.main(["--mode", "test", *split_words(arguments)]) == 0
    output = capsys.readouterr().out
    return output, [float(r) for r in re.findall(r"^game \d+: return (\S+) in", output, re.M)]


def test_mode_test_plays_the_latest_run_by_default(learned):
    status, output = run(CATCH, "--mode test --savedir", learned[0])
    assert status == 0, output
    returns = [float(r) for r in re.findall(r"^game \d+: return (\S+) in 9 steps", output, re.M)]
    assert len(returns) == 10
    mean = np.mean(returns)
    assert f"10 games: mean return {mean:.2f}, 95 % confidence interval " in output
    assert "sampling" in output and "Catch" in output and "at step 150," in output
    assert mean > 0.5


def test_mode_test_samples_or_is_greedy(learned, capsys):
    arguments = ("--xpid first --num_episodes 100 --savedir", learned[0])
    sampled, returns = play(capsys, *arguments)
    greedy, best = play(capsys, *arguments, "--greedy")
    assert "sampling" in sampled and "greedy" in greedy and "greedy" not in sampled
    assert len(returns) == len(best) == 100
    assert set(returns) <= {-1.0, 1.0} and np.mean(returns) > 0.8
    assert np.mean(best) >= np.mean(returns)
    assert "100 games: mean return" in greedy


def test_mode_test_plays_the_best_checkpoint(learned, capsys):
    step = load(learned[0] / "first" / "best.tar")["step"]
    output, returns = play(capsys, "--best --savedir", learned[0])
    assert f"at step {step:,}, Catch" in output and np.mean(returns) > 0.5


def test_mode_test_leaves_the_run_as_it_is(learned, capsys):
    folder = learned[0] / "first"
    before = {path: path.read_bytes() for path in folder.iterdir()}
    play(capsys, "--savedir", learned[0])
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_finished_run_is_refused_with_what_to_raise(learned):
    words = ["--xpid", "first", "--savedir", str(learned[0])]
    with pytest.raises(FlagError, match=r"has done its 150,\d+ steps: raise --total_steps"):
        monobeast.main(words)


def test_a_checkpoint_that_does_not_fit_is_refused_by_name_and_left_alone(learned):
    path = learned[0] / "first" / "model.tar"
    before = path.read_bytes()
    for mode in ("train", "test"):
        words = ["--xpid", "first", "--savedir", str(learned[0]), "--use_lstm", "--mode", mode]
        with pytest.raises(FlagError, match="does not fit .*--use_lstm was False, is True") as e:
            monobeast.main(words)
        assert str(path.parent) in str(e.value)
        assert "lstm.weight_ih_l0: missing in the checkpoint, [256, 64] in the net" in str(e.value)
        with pytest.raises(FlagError, match="--env is Counter, but the checkpoint .* is of Catch"):
            monobeast.main([*words, "--env", "Counter"])
    assert path.read_bytes() == before


@pytest.mark.parametrize("mode", ["train", "test"])
def test_a_corrupt_checkpoint_is_refused_by_name_and_left_alone(learned, tmp_path, mode):
    (tmp_path / "broken").mkdir()
    path = tmp_path / "broken" / "model.tar"
    whole = (learned[0] / "first" / "model.tar").read_bytes()
    for content in (b"", b"not a checkpoint", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(FlagError, match=rf"cannot read the checkpoint {path}"):
            monobeast.main(
                ["--xpid", "broken", "--savedir", str(tmp_path), "--mode", mode, "--env", "Catch"]
            )
        assert path.read_bytes() == content


def test_a_test_without_a_checkpoint_says_so(tmp_path):
    messages = {"": "there is no run in", "--xpid nothing": "no checkpoint in .*--xpid"}
    for words, message in messages.items():
        with pytest.raises(FlagError, match=message):
            monobeast.main(["--mode", "test", "--savedir", str(tmp_path), *words.split()])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num_actors 4 --envs_per_actor 8 --batch_size 8 --num_buffers 39", "39, .* 4 x 8 .* 40"),
        ("--batch_size 0", "--batch_size is 0"),
        ("--total_steps -5", "--total_steps is -5"),
        ("--checkpoint_interval_s 0", "--checkpoint_interval_s is 0.0"),
        ("--best", "--best is for --mode test"),
    ],
)
def test_contradictory_flags_are_refused_before_anything_starts(tmp_path, words, message):
    with pytest.raises(FlagError, match=message):
        monobeast.main(["--env", "Catch", "--savedir", str(tmp_path), *words.split()])
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------- an LSTM, an actor that is killed, a seed of its own


@pytest.fixture(scope="module")
def injured(tmp_path_factory):
    """Savedir, status and output of a run in which one actor is killed in mid-rollout."""
    savedir = tmp_path_factory.mktemp("injured")
    env = f"Failing-kill:{savedir / 'marker'}"
    status, output = run(
        CATCH, SMALL, "--total_steps 30_000 --use_lstm --num_learner_threads 2 --env", env,
        "--savedir", savedir,
    )  # fmt: skip
    return savedir, status, output


def test_an_actor_that_is_killed_is_replaced_and_the_run_goes_on(injured):
    savedir, status, output = injured
    assert status == 0, output
    assert (savedir / "marker").exists()
    assert re.search(r"ERROR .*Actor \d died and is started anew .* killed by SIGKILL", output)
    rows = read_rows(savedir / "latest")
    assert int(rows[-1]["step"]) >= 30_000
    assert rows[-1]["actor_restarts"] == "1"


def test_a_run_without_a_seed_keeps_the_one_it_drew(injured):
    meta, checkpoint = read_meta(injured[0] / "latest"), load(injured[0] / "latest" / "model.tar")
    assert isinstance(meta["flags"]["seed"], int)
    assert meta["flags"]["seed"] == checkpoint["flags"]["seed"]


def test_a_run_without_a_name_gets_one_of_the_time(injured):
    (folder,) = [path for path in injured[0].iterdir() if path.is_dir() and not path.is_symlink()]
    assert re.fullmatch(r"torchbeast-\d{8}-\d{6}", folder.name)


def test_mode_test_plays_with_an_lstm(injured, capsys):
    for words in ("", "--greedy"):  # --use_lstm is known from the checkpoint
        _, returns = play(capsys, "--num_episodes 7 --savedir", injured[0], words)
        assert len(returns) == 7


def test_mode_test_plays_by_its_seed(injured, capsys):
    def returns(words):
        return play(capsys, "--num_episodes 50 --savedir", injured[0], words)[1]

    # A policy this young wins some games and loses others.
    assert returns("") == returns("")
    assert returns("--seed 1") == returns("--seed 1") != returns("--seed 2")


# ---------------------------------------------------------------------------- stop, and go on


# Tells what the optimizer is at its first step.
SPY = """
import pathlib, sys
sys.path.insert(0, {tests!r})
import catch, experiment, monobeast, torch
learn = monobeast.learn

def spy(flags, model, batch, initial_agent_state, optimizer):
    path = pathlib.Path({path!r})
    if not path.exists():
        torch.save({{
            "optimizer": optimizer.state_dict(), "model": model.state_dict(), "flags": vars(flags)
        }}, path)
    return learn(flags, model, batch, initial_agent_state, optimizer)

monobeast.learn = spy
if __name__ == "__main__":
    experiment.start_logging()
    sys.exit(monobeast.main())
"""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """What happened in a run that was stopped by SIGTERM, resumed, and stopped by Ctrl-C."""
    savedir = tmp_path_factory.mktemp("stopped")
    folder, facts = savedir / "run", {}
    facts["folder"], facts["shared_before"] = folder, shared_memory()
    words = "--env Catch --seed 5 --learning_rate 0.003 --alpha 0.98 --total_steps 2_000_000"
    with Program(CATCH, SMALL, words, "--xpid run --savedir", savedir) as program:
        program.wait_until(lambda: last_step(folder) > 1000)
        with pytest.raises(FlagError) as refused:
            monobeast.main(["--env", "Catch", "--xpid", "run", "--savedir", str(savedir)])
        facts["refused"] = str(refused.value)
        facts["members"] = len(program.members())
        program.process.send_signal(signal.SIGTERM)
        facts["term_status"], facts["term_output"] = program.end(30)
        program.wait_for_members()
    facts["checkpoint"] = load(folder / "model.tar")
    facts["meta"] = read_meta(folder)

    # As a run leaves it that is killed minutes after its last checkpoint.
    facts["rows"] = read_rows(folder)
    last = list(facts["rows"][-1].values())
    with open(folder / "logs.csv", "a") as file:
        file.write(",".join([str(int(last[0]) + 1), last[1], "1999999", *last[3:]]) + "\n")
        file.write("17,179524")

    spy, told = savedir / "spy.py", savedir / "told.tar"
    spy.write_text(SPY.format(tests=str(TESTS), path=str(told)))
    with Program(spy, "--xpid run --savedir", savedir) as program:
        step = facts["checkpoint"]["step"]
        program.wait_until(lambda: step + 1000 < last_step(folder) < 1999999)
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does
        facts["int_status"], facts["int_output"] = program.end(30)
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
    for word in ("Traceback", "KeyboardInterrupt", "died"):
        assert word not in stopped["int_output"]


def test_no_process_and_no_shared_memory_is_left(stopped):
    assert stopped["members"] >= 4  # while it ran: itself, a fork server, two actors
    # Other programs take some for a moment.
    wait_until(lambda: shared_memory() <= stopped["shared_before"])


def test_stopping_writes_a_checkpoint(stopped):
    checkpoint = stopped["checkpoint"]
    assert checkpoint["step"] == int(stopped["rows"][-1]["step"]) > 1000
    assert stopped["meta"]["status"].startswith("stopped by SIG") and stopped["meta"]["end"]
    later = load(stopped["folder"] / "model.tar")
    assert later["step"] == int(read_rows(stopped["folder"])[-1]["step"]) > checkpoint["step"]


def test_resuming_goes_on_with_the_same_flags(stopped):
    saved = dict(stopped["checkpoint"]["flags"])
    assert stopped["told"]["flags"] == saved
    assert saved["seed"] == 5 and saved["alpha"] == 0.98 and saved["env"] == "Catch"


def test_resuming_goes_on_with_the_same_model_and_optimizer(stopped):
    checkpoint, told = stopped["checkpoint"], stopped["told"]
    for key, value in told["model"].items():
        assert torch.equal(value, checkpoint["model_state_dict"][key]), key
    saved = checkpoint["optimizer_state_dict"]
    assert told["optimizer"]["param_groups"] == saved["param_groups"]
    assert told["optimizer"]["state"].keys() == saved["state"].keys() != {}
    for index, state in told["optimizer"]["state"].items():
        for key, value in state.items():
            assert torch.equal(value, saved["state"][index][key]), (index, key)


def test_learning_rate_goes_on_where_it_was(stopped):
    step = stopped["checkpoint"]["step"]
    (group,) = stopped["told"]["optimizer"]["param_groups"]
    assert group["lr"] == pytest.approx(0.003 * (1 - step / 2_000_000))
    assert group["initial_lr"] == 0.003
    for row in read_rows(stopped["folder"]):
        expected = 0.003 * (1 - int(row["step"]) / 2_000_000)
        assert float(row["learning_rate"]) == pytest.approx(expected)


def test_steps_in_the_log_never_go_back_and_rows_beyond_the_checkpoint_are_dropped(stopped):
    rows, before = read_rows(stopped["folder"]), stopped["rows"]
    assert rows[: len(before)] == before
    assert [int(row["_tick"]) for row in rows] == list(range(len(rows)))
    for key in ("_time", "step"):
        assert column(rows, key) == sorted(column(rows, key))
    first = int(rows[len(before)]["step"])
    assert stopped["checkpoint"]["step"] <= first < 1999999


def test_resuming_is_told_in_meta(stopped):
    meta = read_meta(stopped["folder"])
    assert meta["earlier"] == [stopped["meta"]]
    assert meta["start"] >= stopped["meta"]["end"]


def test_a_second_process_in_the_same_folder_is_refused(stopped):
    assert "another process is training in" in stopped["refused"]
    assert str(stopped["folder"]) in stopped["refused"]
    # And does no harm to the first, which went on to its end.
    assert stopped["term_status"] == 128 + signal.SIGTERM
    assert stopped["meta"]["flags"]["seed"] == 5


# ------------------------------------------------------------------------------ life and death


def test_children_end_by_themselves_after_sigkill(tmp_path):
    words = f"{SMALL} --env Catch --total_steps 100_000_000 --savedir {tmp_path} --xpid run"
    with Program(CATCH, words) as program:
        program.wait_until(lambda: last_step(tmp_path / "run") > 0)
        assert len(program.members()) >= 4
        program.process.kill()
        program.process.wait(DEADLINE)
        program.wait_for_members()


def out(savedir):
    return (savedir / "run" / "out.log").read_text()


def test_an_environment_that_always_raises_ends_the_run_with_a_clear_error(tmp_path):
    before = shared_memory()
    words = f"{SMALL} --env Failing-raise --xpid run --savedir {tmp_path}"
    status, output = run(CATCH, words)
    assert status not in (0, None)
    assert "died 5 times" in output
    assert 'raise ValueError("the game is broken")' in output  # of its traceback
    assert re.search(
        r"actor \d: environment \d \(.*\), step 25: step\(\d\) raised ValueError", output
    )
    assert re.search("all actors died 5 times", read_meta(tmp_path / "run")["status"])
    wait_until(lambda: shared_memory() <= before)  # other programs take some for a moment
    assert "started anew" in out(tmp_path)


FAILING_LEARNER = """
import sys
sys.path.insert(0, {tests!r})
import catch, experiment, monobeast
learn, calls = monobeast.learn, []

def failing_learn(*args):
    calls.append(args)
    if len(calls) == 3:
        raise ArithmeticError("the learner is broken")
    return learn(*args)

monobeast.learn = failing_learn
if __name__ == "__main__":
    experiment.start_logging()
    sys.exit(monobeast.main())
"""


def test_an_error_in_the_learner_ends_the_run_with_its_traceback(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING_LEARNER.format(tests=str(TESTS)))
    words = f"{SMALL} --num_learner_threads 2 --env Catch --xpid run --savedir {tmp_path}"
    status, output = run(script, words)  # which sees that no process is left
    assert status == 1
    assert "Traceback" in output and "in failing_learn" in output
    assert "ArithmeticError: the learner is broken" in output
    assert "ArithmeticError" in read_meta(tmp_path / "run")["status"]


# ------------------------------------------------------------------- monobeast.py as it stands


def test_an_unknown_game_is_a_short_error_that_says_what_to_change(tmp_path):
    status, output = run(MONOBEAST, "--env PongNoFrameskipp-v4 --savedir", tmp_path)
    assert status == 1
    (line,) = output.strip().splitlines()
    assert "PongNoFrameskipp-v4" in line and "such as PongNoFrameskip-v4" in line
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def pong(tmp_path_factory):
    """Savedir, status and output of a very short run of Pong."""
    savedir = tmp_path_factory.mktemp("pong")
    words = "--env PongNoFrameskip-v4 --num_actors 2 --envs_per_actor 2 --batch_size 4"
    status, output = run(MONOBEAST, words, "--total_steps 2000 --savedir", savedir)
    return savedir, status, output


def test_pong_is_trained(pong):
    savedir, status, output = pong
    assert status == 0, output
    checkpoint = load(savedir / "latest" / "model.tar")
    assert checkpoint["step"] >= 2000
    assert "conv.0.weight" in checkpoint["model_state_dict"]
    assert re.search(r"[1-9][\d,]* frames/s", output)


def test_a_whole_game_of_pong_is_played(pong):
    status, output = run(MONOBEAST, "--mode test --num_episodes 1 --savedir", pong[0])
    assert status == 0, output
    score, steps = map(float, re.search(r"game 1: return (\S+) in (\d+) steps", output).groups())
    assert -21 <= score <= 21 and steps > 500  # to 21 points, not to the first one
    assert "1 game: mean return" in output and "human-normalized" in output


@pytest.mark.skipif(
    any(map(os.getenv, ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"))), reason="has a screen"
)
def test_render_without_a_screen_says_why_it_cannot(pong):
    status, output = run(MONOBEAST, "--mode test_render --num_episodes 1 --savedir", pong[0])
    assert status == 1
    assert "screen" in output and "DISPLAY" in output and "--mode test" in output
    assert "Traceback" not in output and "game 1" not in output
