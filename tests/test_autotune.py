# SPDX-License-Identifier: Apache-2.0
"""python -m beast.autotune: what it finds, what it leaves alone, and how it ends."""

import functools
import math
import pathlib
import re
import shlex
import signal
import subprocess
import tempfile

import pytest
from program import HELPERS, ROOT, Program, shared_memory, wait_until

import monobeast
import polybeast
from beast import autotune
from beast.processes import machine

pytestmark = pytest.mark.whole

CATCH, CATCH_POLY = HELPERS / "catch.py", HELPERS / "catch_poly.py"


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


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        (bell(num_actors=4)[0], 4),  # halved, where doubling gains nothing
        (lambda values: 1000 + values["num_actors"], 8),  # a gain as small as noise
        (lambda values: values["num_actors"] * (values["num_actors"] < 32), 16),  # 32 fails
    ],
)
def test_the_search_for_one_flag(measure, expected):
    assert autotune.search(measure, {"num_actors": 8}) == {"num_actors": expected}


def test_servers_are_doubled_with_their_streams():
    measure, calls = bell(num_servers=8, num_actors=8)
    best = autotune.search(measure, {"num_servers": 2, "num_actors": 4})
    assert calls[1] == {"num_servers": 4, "num_actors": 8}
    assert calls[2] == {"num_servers": 8, "num_actors": 16}
    assert best == {"num_servers": 4, "num_actors": 8}  # the next one is no better
    assert {"num_servers": 4, "num_actors": 4} in calls  # a stream a server


def test_the_rate_is_that_after_the_warm_up(tmp_path):
    path, text = tmp_path / "logs.csv", "_tick,_time,step,steps_per_second\n0,100,0,0\n"
    (tmp_path / "meta.json").write_text('{"flags": {"batch_size": 5, "unroll_length": 10}}')
    assert autotune.read_rate(tmp_path) is None
    path.write_text(text + "1,105,100,20\n")
    assert autotune.read_rate(tmp_path) is None
    path.write_text(text + "1,105,100,20\n2,110,1100,200\n3,11")  # the last line is not whole
    assert autotune.read_rate(tmp_path) == 200
    path.write_text(text + "1,105,100,20\n2,110,100,0\n3,115,100,0\n4,120,400,60\n")
    assert autotune.read_rate(tmp_path) == 20  # slow, but seen for long enough


@functools.cache
def run_once(*command, run=subprocess.run):
    return run(command, capture_output=True, text=True)


@pytest.fixture
def trials(monkeypatch):
    """Values of trials that are not run; the faster, the more there are of everything."""
    trials = []

    def run_trial(program, arguments, values):
        trials.append(values)
        num_actors = int(autotune.value_of("num_actors", arguments) or 4)
        flags = {"batch_size": 8, "num_actors": num_actors, "envs_per_actor": 8} | values
        rate = flags["num_actors"] * flags["envs_per_actor"]
        return autotune.Trial(rate, flags)

    monkeypatch.setattr(autotune, "run_trial", run_trial)
    monkeypatch.setattr(autotune.subprocess, "run", lambda command, **_: run_once(*command))
    return trials


def tune(capsys, *arguments):
    """Return the flags on the command line that is printed at the end, by name."""
    autotune.main([*map(str, arguments)])
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[: 1 + len(arguments)] == ["python", *map(str, arguments)]
    words = words[1 + len(arguments) :]
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


def test_given_flags_are_kept_and_others_begin_with_defaults(trials, capsys):
    assert tune(capsys, CATCH) == {"--num_actors": 16, "--envs_per_actor": 8}
    assert trials[:2] == [{}, {"num_actors": 8, "envs_per_actor": 8}]
    trials.clear()
    assert tune(capsys, CATCH, "--num_actors", "3") == {"--envs_per_actor": 32}
    assert trials.pop(0) == {}
    assert all(trial.keys() == {"envs_per_actor"} for trial in trials)
    trials.clear()
    with pytest.raises(SystemExit, match="sets all flags that could be varied"):
        autotune.main([str(CATCH), "--num_actors=3", "--envs_per_actor=8"])
    assert trials == []


def test_it_measures_one_learner_alone(trials, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        autotune.main([str(CATCH), "--elastic=host:1"])
    assert "leave --elastic out" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        autotune.main([str(CATCH), "--listen", "127.0.0.1:0"])
    assert "leave --listen out" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(SystemExit):
        autotune.main([str(CATCH)])
    assert "start it without torchrun" in capsys.readouterr().err
    assert trials == []


def test_environments_that_would_make_policies_lag_are_not_tried(trials, capsys):
    autotune.main([str(CATCH), "--num_actors", "4"])
    assert max(trial["envs_per_actor"] for trial in trials[1:]) == 32  # with 4, 16 batches of 8
    reason = r"skipped +--envs_per_actor 64: 256 environments make more than 16 batches"
    assert re.search(reason, capsys.readouterr().out)
    trials.clear()
    autotune.main([str(CATCH), "--num_actors", "64"])  # with 8 each, which make 64 batches
    assert trials == [{}, {"envs_per_actor": 4}]  # the program's own start is tried all the same
    output = capsys.readouterr().out
    assert "512 steps/s  --envs_per_actor 8" in output
    assert re.search("skipped +--envs_per_actor 16: 1024 environments make more", output)


@pytest.mark.parametrize(
    ("program", "cores", "has_gpu", "best"),
    [
        (CATCH, 32, False, {"num_actors": 32, "envs_per_actor": 4}),
        (CATCH, 32, True, {"num_actors": 31, "envs_per_actor": 4}),
        (CATCH, 64, True, {"num_actors": 64, "envs_per_actor": 2}),
        (CATCH, 128, True, {"num_actors": 128, "envs_per_actor": 1}),
        (CATCH_POLY, 16, False, {"num_servers": 16, "num_actors": 32, "envs_per_stream": 4}),
        (CATCH_POLY, 32, False, {"num_servers": 32, "num_actors": 64, "envs_per_stream": 2}),
        (CATCH_POLY, 32, True, {"num_servers": 32, "num_actors": 32, "envs_per_stream": 4}),
        (CATCH_POLY, 64, True, {"num_servers": 64, "num_actors": 64, "envs_per_stream": 2}),
    ],
)
def test_all_cores_are_used_with_fewer_environments_each(
    trials, capsys, monkeypatch, program, cores, has_gpu, best
):
    monkeypatch.setattr(machine, "count_cores", lambda: cores)
    monkeypatch.setattr(machine, "count_memory", lambda: 2**40)
    parser = monobeast.parser if program is CATCH else polybeast.parser
    choose = machine.choose_actors if program is CATCH else machine.choose_servers

    def run_trial(program, arguments, values):
        flags = parser.parse_args(autotune.as_arguments(values))
        choose(flags, has_gpu)
        trials.append(flags)
        rate = 100 * min(getattr(flags, next(iter(best))), cores)
        return autotune.Trial(rate, vars(flags))

    monkeypatch.setattr(autotune, "run_trial", run_trial)
    found = tune(capsys, program)
    assert {name: found[f"--{name}"] for name in best} == best
    if program is CATCH_POLY:
        assert all(flags.num_servers <= flags.num_actors for flags in trials)
    assert len(trials) <= 9


@pytest.mark.parametrize("servers", [{"num_servers": 4}, {"server_addresses": "a:1-4"}])
def test_fewer_streams_than_servers_are_not_tried(servers):
    flags = {"num_actors": 3, "envs_per_stream": 8, "batch_size": 8} | servers
    with pytest.raises(autotune.TrialError, match="4 servers need as many streams"):
        autotune.check_trial(flags, 128)


def test_what_is_varied_follows_the_programs_flags(trials):
    start = dict.fromkeys(["num_servers", "num_actors", "num_inference_threads"])
    assert autotune.find_flags(CATCH_POLY, ["--envs_per_stream", "8"]) == start
    arguments = ["--server_addresses", "a:1-3", "--num_inference_threads=2"]
    assert autotune.find_flags(CATCH_POLY, arguments) == {"num_actors": 3, "envs_per_stream": 8}
    with pytest.raises(autotune.TrialError, match="polybeast_env.py --help lists no --num_actors"):
        autotune.find_flags(ROOT / "polybeast_env.py", [])


def test_a_program_that_fails_or_never_steps_is_an_error(tmp_path, monkeypatch):
    script = tmp_path / "broken.py"
    script.write_text("raise ValueError('the game is broken')")
    with pytest.raises(autotune.TrialError, match="Traceback(.|\n)*the game is broken"):
        autotune.run_trial(script, [], {})
    monkeypatch.setattr(autotune, "PATIENCE", 0.5)
    script.write_text("import signal; signal.pause()")
    with pytest.raises(autotune.TrialError, match="no steps to measure within 0.5 s"):
        autotune.run_trial(script, [], {})


@pytest.mark.parametrize(
    ("script", "more", "printed", "number"),
    [
        (CATCH, "", r"\d steps/s  --envs_per_actor 8\n", signal.SIGINT),  # in the second trial
        (CATCH_POLY, "--num_servers 1", "Trying", signal.SIGKILL),
    ],
)
def test_a_trial_is_measured_and_ends_with_autotune(
    tmp_path, temporary, script, more, printed, number
):
    before = shared_memory()
    words = "--env Catch --batch_size 4 --num_actors 1", more, "--savedir", tmp_path
    environ = {"TMPDIR": str(temporary)}
    with Program("-m", "beast.autotune", script, *words, cwd=ROOT, **environ) as program:
        program.wait_until(lambda: re.search(printed, program.output))
        program.wait_until(lambda: list(temporary.glob("tune-*/trial/logs.csv")))
        program.wait_until(lambda: len(program.members()) >= 3)  # with actors or servers
        program.process.send_signal(number)
        program.finish(-number if number == signal.SIGKILL else 128 + number)
    assert list(tmp_path.iterdir()) == []
    wait_until(lambda: shared_memory() <= before)  # other programs take some for a moment
    assert number == signal.SIGKILL or list(temporary.iterdir()) == []
