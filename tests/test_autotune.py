# SPDX-License-Identifier: Apache-2.0
"""--autotune: what it finds, what it leaves alone, and how it ends."""

import math
import os
import pathlib
import re
import signal
import tempfile

import pytest
from program import TESTS, Program, load, read_meta, read_rows, run, shared_memory, wait_until

import autotune
import experiment
import monobeast
import polybeast

CATCH, CATCH_POLY = TESTS / "catch.py", TESTS / "catch_poly.py"
MONOBEAST = TESTS.parent / "monobeast.py"
# One flag is left open.
SMALL = "--env Catch --batch_size 4 --num_actors 1 --total_steps 1_000 --autotune --savedir"
SMALL_POLY = "--env Catch --batch_size 4 --num_servers 1 --total_steps 1_000 --autotune --savedir"
# A fork that does with two trials.
HASTY = """
import sys
sys.path.insert(0, {tests!r})
import {fork}, autotune, experiment, {program}

autotune.search = lambda measure, start: max(
    [start, dict.fromkeys(start, 4)], key=measure
)
if __name__ == "__main__":
    experiment.start_logging()
    sys.exit({program}.main())
"""


# -------------------------------------------------------------------------------------- the search


def hasty(folder, fork, program):
    script = folder / "hasty.py"
    script.write_text(HASTY.format(tests=str(TESTS), fork=fork, program=program))
    return script


@pytest.fixture
def temporary():
    """A folder for temporary files, whose path is short enough for sockets in folders in it."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield pathlib.Path(folder)


def bell(**peak):
    """Return a rate function with one maximum, by factors around it, and the list of its calls."""
    calls = []

    def measure(values):
        calls.append(dict(values))
        return 1000 / (1 + sum(math.log2(values[name] / peak[name]) ** 2 for name in peak))

    return measure, calls


@pytest.mark.parametrize("num_envs", [8, 16, 32])
@pytest.mark.parametrize("num_actors", [1, 2, 4])
def test_the_search_finds_the_maximum_in_at_most_six_trials(num_envs, num_actors):
    measure, calls = bell(envs_per_actor=num_envs, num_actors=num_actors)
    best = autotune.search(measure, {"envs_per_actor": 8, "num_actors": 2})
    assert best == {"envs_per_actor": num_envs, "num_actors": num_actors}
    assert len(calls) <= 6


def test_the_search_halves_where_doubling_does_not_gain():
    measure, _ = bell(envs_per_actor=4)
    assert autotune.search(measure, {"envs_per_actor": 8}) == {"envs_per_actor": 4}


def test_a_gain_as_small_as_noise_changes_nothing():
    measure = lambda values: 1000 + values["num_actors"]  # noqa: E731
    assert autotune.search(measure, {"num_actors": 2}) == {"num_actors": 2}


def test_what_cannot_work_is_not_chosen():
    measure = lambda values: values["num_actors"] if values["num_actors"] < 8 else 0  # noqa: E731
    assert autotune.search(measure, {"num_actors": 2}) == {"num_actors": 4}


def test_the_rate_is_that_after_the_warm_up(tmp_path):
    path, text = tmp_path / "logs.csv", "_tick,_time,step,steps_per_second\n0,100,0,0\n"
    assert autotune.read_rate(path, 1000) is None
    path.write_text(text + "1,105,100,20\n")
    assert autotune.read_rate(path, 1000) is None
    path.write_text(text + "1,105,100,20\n2,110,1100,200\n3,11")  # the last line is not whole
    assert autotune.read_rate(path, 1000) == 200
    path.write_text(text + "1,105,100,20\n2,110,100,0\n3,115,100,0\n4,120,400,60\n")
    assert autotune.read_rate(path, 1000) == 20  # slow, but seen for long enough


# ------------------------------------------------------------------- what is tried, without trials


@pytest.fixture
def trials(monkeypatch):
    """Flags of trials that are not run; the faster, the more there are of everything."""
    trials = []

    def run_trial(flags, parser, stop):
        trials.append(flags)
        names = ("num_actors", "num_servers", "envs_per_actor", "envs_per_stream")
        return math.prod(getattr(flags, name, None) or 1 for name in names)

    monkeypatch.setattr(autotune, "run_trial", run_trial)
    return trials


def tune(program, words):
    argv = words.split()
    flags = experiment.parse_flags(program.parser, argv)
    autotune.tune(flags, program.parser, argv, program.check_flags, program.tuned_flags)
    return flags


def test_flags_on_the_command_line_win(trials, tmp_path):
    flags = tune(monobeast, f"--num_actors 3 --savedir {tmp_path}")
    assert flags.num_actors == 3 and flags.envs_per_actor > 8
    assert {trial.num_actors for trial in trials} == {3}
    trials.clear()
    flags = tune(monobeast, f"--num_actors 3 --envs_per_actor 8 --savedir {tmp_path}")
    assert (flags.num_actors, flags.envs_per_actor) == (3, 8)
    assert trials == []


def test_servers_that_run_already_are_not_multiplied(trials, tmp_path):
    flags = tune(polybeast, f"--server_addresses a:1-3 --batch_size 99 --savedir {tmp_path}")
    assert flags.num_servers == 2 and flags.num_actors > 3 and flags.envs_per_stream > 8
    assert {trial.num_servers for trial in trials} == {2}


def test_what_is_learned_and_what_follows_from_the_flags_is_left_alone(trials, tmp_path):
    words = f"--batch_size 4 --savedir {tmp_path} --xpid run"
    before = vars(experiment.parse_flags(monobeast.parser, words.split()))
    after = vars(tune(monobeast, words))
    changed = {name for name in before if before[name] != after[name]}
    assert changed <= {"num_actors", "envs_per_actor"} and changed
    for trial in trials:
        changed = {name for name in before if before[name] != vars(trial)[name]}
        assert changed <= {"num_actors", "envs_per_actor"}


def test_so_many_environments_that_policies_would_lag_are_not_tried(trials, tmp_path, caplog):
    caplog.set_level("INFO")
    flags = tune(monobeast, f"--num_actors 2 --batch_size 4 --savedir {tmp_path}")
    assert flags.envs_per_actor == 16  # as many as make 8 batches
    assert "skipped" in caplog.text and "64 environments make more than 8 batches" in caplog.text
    assert max(trial.envs_per_actor for trial in trials) == 16


def test_a_combination_that_cannot_work_is_skipped_with_its_reason(trials, tmp_path, caplog):
    caplog.set_level("INFO")
    flags = tune(monobeast, f"--num_actors 2 --num_buffers 40 --savedir {tmp_path}")
    assert flags.envs_per_actor == 16
    assert re.search(r"skipped +--envs_per_actor 32: --num_buffers is 40, but", caplog.text)
    assert re.search(r"32 steps/s +--envs_per_actor 16\n", caplog.text)


def test_contradictory_flags_are_refused_before_any_trial(trials, tmp_path):
    with pytest.raises(experiment.FlagError, match="--num_buffers is 3"):
        tune(monobeast, f"--num_buffers 3 --savedir {tmp_path}")
    assert trials == []


@pytest.mark.parametrize("program", [monobeast, polybeast])
def test_a_command_line_made_of_flags_makes_the_same_flags(program, tmp_path):
    words = "--learning_rate 3e-5 --use_lstm --no_episodic_life --precision bf16 --frame_stack 2"
    flags = program.parser.parse_args([*words.split(), "--savedir", str(tmp_path)])
    made = experiment.command_words(program.parser, flags)
    assert program.parser.parse_args(made) == flags


# ---------------------------------------------------------------------------------- whole programs


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Savedir and output of a run that was tuned, and of its continuation, tuned anew."""
    savedir = tmp_path_factory.mktemp("tuned")
    script = hasty(tmp_path_factory.mktemp("script"), "catch", "monobeast")
    results = [run(script, SMALL, savedir, "--xpid run")]
    checkpoint = load(savedir / "run" / "model.tar")
    words = "--xpid run --total_steps 2_000 --autotune --num_actors 1 --savedir"
    results.append(run(script, words, savedir))
    return {"savedir": savedir, "results": results, "checkpoint": checkpoint}


def chosen(output):
    (words,) = re.findall(r"and train with --envs_per_actor (\d+)", output)
    return int(words)


def test_the_fastest_flags_are_trained_with_and_in_meta(tuned):
    for (status, output), meta in zip(
        tuned["results"],
        (read_meta(tuned["savedir"] / "run")["earlier"][0], read_meta(tuned["savedir"] / "run")),
        strict=True,
    ):
        assert status == 0, output
        rates = re.findall(r"([\d,]+) steps/s  --envs_per_actor (\d+)", output)
        assert len(rates) == 2
        assert meta["flags"]["envs_per_actor"] == chosen(output)
        assert str(chosen(output)) in {number for _, number in rates}
        assert meta["flags"]["num_actors"] == 1 and meta["flags"]["batch_size"] == 4


def test_the_folder_of_the_run_is_untouched_by_trials(tuned):
    savedir = tuned["savedir"]
    assert {path.name for path in savedir.iterdir()} == {"run", "latest"}
    assert tuned["checkpoint"]["step"] >= 1000
    meta = read_meta(savedir / "run")
    assert len(meta["earlier"]) == 1 and "--autotune" in meta["command"]
    assert [int(row["_tick"]) for row in read_rows(savedir / "run")][0] == 0
    assert "trial" not in (savedir / "run" / "out.log").read_text()


def test_a_tuned_run_is_resumed(tuned):
    _, output = tuned["results"][1]
    assert f"Resuming at step {tuned['checkpoint']['step']:,}" in output
    assert load(tuned["savedir"] / "run" / "model.tar")["step"] >= 2000


def test_polybeast_is_tuned(tmp_path, temporary):
    script = hasty(temporary, "catch_poly", "polybeast")
    status, output = run(script, SMALL_POLY, tmp_path, "--xpid run", TMPDIR=str(temporary))
    assert status == 0, output
    flags = read_meta(tmp_path / "run")["flags"]
    assert f"and train with --envs_per_stream {flags['envs_per_stream']}\n" in output
    assert {path.name for path in tmp_path.iterdir()} == {"run", "latest"}
    assert not [*temporary.glob("tune-*"), *temporary.glob("polybeast-*")]


@pytest.mark.parametrize(
    "script, words", [(CATCH, SMALL), (CATCH_POLY, SMALL_POLY)], ids=["mono", "poly"]
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_trial_ends_everything_and_leaves_nothing(
    tmp_path, temporary, script, words, number
):
    before, savedir = shared_memory(), tmp_path / "s"
    with Program(script, words, savedir, TMPDIR=str(temporary)) as program:
        program.wait_until(lambda: list(temporary.glob("tune-*/trial/logs.csv")))
        assert len(program.members()) >= 3
        os.killpg(program.pid, number)  # as a terminal does
        status, output = program.end(30)
        program.wait_for_members()
    assert status == 128 + number, output
    assert list(temporary.iterdir()) == [] and not savedir.exists()
    wait_until(lambda: shared_memory() <= before)  # other programs take some for a moment


def test_a_trial_ends_when_the_program_is_killed(tmp_path, temporary):
    with Program(CATCH, SMALL, tmp_path, TMPDIR=str(temporary)) as program:
        program.wait_until(lambda: list(temporary.glob("tune-*/trial/logs.csv")))
        program.process.kill()
        program.process.wait()
        program.wait_for_members()


def test_a_wrong_flag_is_told_as_without_trials(tmp_path):
    words = "--env PongNoFrameskipp-v4 --num_actors 2 --autotune --savedir"
    status, output = run(MONOBEAST, words, tmp_path)
    assert status == 1
    trying, line = output.strip().splitlines()
    assert "trying" in trying
    assert line.startswith("monobeast.py: ") and "such as PongNoFrameskip-v4" in line
    assert list(tmp_path.iterdir()) == []


def test_an_environment_that_raises_shows_its_traceback(tmp_path):
    words = SMALL.replace("Catch", "Failing-raise --unroll_length 30")  # fails at step 25
    status, output = run(CATCH, words, tmp_path)
    assert status == 1
    assert 'raise ValueError("the game is broken")' in output and "died 5 times" in output
    assert output.count("Autotune: trying") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_trial_that_never_steps_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "PATIENCE", 0.5)
    main = autotune.sys.modules["__main__"]  # which has no file in a process of pytest-xdist
    monkeypatch.setattr(main, "__file__", str(CATCH), raising=False)
    flags = monobeast.parser.parse_args(["--env", "Catch", "--savedir", str(tmp_path)])
    with pytest.raises(experiment.FlagError, match="no steps to measure within 0.5 s"):
        autotune.run_trial(flags, monobeast.parser, autotune.threading.Event())
