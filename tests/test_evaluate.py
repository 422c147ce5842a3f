# SPDX-License-Identifier: Apache-2.0
"""Whole games with a checkpoint: which are counted, what is told of them, and beside a training."""

import argparse
import importlib.util
import json
import logging
import math
import os
import re
import signal
import sys
import threading
import time
import types

import catch
import catch_poly  # noqa: F401 - it makes the polybeast of this process play Catch
import gymnasium as gym
import numpy as np
import pytest
import torch
from catch_env import Catch, Counter
from program import TESTS, Program, column, last_step, read_rows, split_words, wait_until

import atari_scores
import atari_wrappers
import autotune
import checkpoint
import evaluate
import evaluator
import monobeast
import polybeast
import polybeast_env
from environment import EnvError, Environments
from experiment import FlagError

PROGRAMS = {"monobeast": monobeast, "polybeast": polybeast}
SCRIPTS = {"monobeast": TESTS / "catch.py", "polybeast": TESTS / "catch_poly.py"}
PONG = ["--env", "PongNoFrameskip-v4", "--noop_max", "5"]
both = pytest.mark.parametrize("name", PROGRAMS)


class Still:
    """A model that takes action 0, and tells how many rows it was asked for at once."""

    def __init__(self):
        self.batch_sizes = []

    def initial_state(self, batch_size):
        return ()

    def __call__(self, inputs, agent_state):
        self.batch_sizes.append(inputs["reward"].shape[1])
        return {"action": torch.zeros(inputs["reward"].shape, dtype=torch.int64)}, agent_state


class Drawn(Counter):
    """A Counter whose every game has a length that is drawn: 2 or 40, at even odds."""

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed, options=options)
        self.length = int(self.np_random.choice([2, 40]))
        return result


class Lives(Counter):
    """A Counter of which each game is three lives, that is, three episodes."""

    def step(self, action):
        *result, info = super().step(action)
        return *result, info | {"game_over": self.episode % 3 == 2}


def play(environments, num_games):
    model = Still()
    games = list(evaluate.play(environments, model, num_games))
    environments.close()
    return games, model


def make_run(name, folder, *words):
    """Write a run's checkpoint, of step 1,234, without training; return the words that name it."""
    program = PROGRAMS[name]
    words = ["--savedir", str(folder), "--xpid", "run", *map(str, words)]
    flags = program.parser.parse_args(words)
    environment = catch.create_env(flags)
    model = program.Net(environment.observation_space, environment.action_space.n)
    (folder / "run").mkdir(parents=True)
    torch.save(checkpoint.pack_weights(flags, model, 1234), folder / "run" / "model.tar")
    return words


# --------------------------------------------------------------------- which games are counted


@pytest.mark.parametrize("num_games", [1, 3, 4, 5, 10])
def test_games_count_as_they_begin_so_that_long_ones_are_not_left_out(num_games):
    lengths = iter([2, 20, 2, 2])
    games, model = play(Environments(lambda: Counter(next(lengths)), 4, 1), num_games)
    # Of the first four that begin one is long; while it lasts, the others begin.
    expected = [2] * (num_games - 1) + [20] if num_games > 1 else [2]
    assert [steps for _, steps in games] == expected
    assert all(r == steps * (steps + 1) / 2 for r, steps in games)
    assert set(model.batch_sizes) == {4}


@pytest.mark.parametrize("truncates", [False, True])
def test_the_mean_does_not_depend_on_how_many_play_at_once(truncates):
    def mean_steps(num_envs, repetitions):
        steps = []
        for seed in range(repetitions):
            make = lambda: Drawn(truncates=truncates)  # noqa: E731
            steps += [n for _, n in play(Environments(make, num_envs, seed), 8)[0]]
        return np.mean(steps)

    # The standard error is 19 / sqrt(320) = 1.1; the first eight to end have a mean of 8.
    assert mean_steps(1, 40) == pytest.approx(21, abs=3.5)
    assert mean_steps(8, 40) == pytest.approx(21, abs=3.5)


def test_a_game_is_whole_where_lives_are_lost():
    games, _ = play(Environments(lambda: Lives(length=4), 2, 1), 4)
    assert games == [(30.0, 12)] * 4


# ------------------------------------------------------------------------- what is told of them


@pytest.mark.parametrize(
    ("num_degrees", "expected"),
    # Any table of Student's t, such as that of the NIST/SEMATECH handbook (e-Handbook 1.3.6.7.2).
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (10, 2.228),
     (19, 2.093), (30, 2.042), (60, 2.000), (99, 1.984), (1000, 1.962)],
)  # fmt: skip
def test_quantiles_are_those_of_students_t(num_degrees, expected):
    assert evaluate.t_quantile(num_degrees) == pytest.approx(expected, abs=6e-4)


def test_other_quantiles_are_right_as_well():
    assert evaluate.t_quantile(9, 0.99) == pytest.approx(3.250, abs=6e-4)
    assert evaluate.t_quantile(2, 0.9) == pytest.approx(2.920, abs=6e-4)


def test_intervals_hold_the_true_mean_95_times_in_100():
    returns = np.random.default_rng(1).normal(3, 2, (4000, 5))
    half = evaluate.t_quantile(4) * returns.std(1, ddof=1) / math.sqrt(5)
    held = (abs(returns.mean(1) - 3) <= half).mean()
    assert held == pytest.approx(0.95, abs=0.015)


def test_a_result_tells_mean_interval_and_spread():
    result = evaluate.summarize([1.0, 2.0, 3.0], [5, 6, 7])
    assert result["mean"] == 2 and result["stdev"] == 1
    assert result["ci95"] == pytest.approx(4.303 / 3**0.5, abs=1e-3)
    assert result["human_normalized"] is None
    text = "3 games: mean return 2.00, 95 % confidence interval -0.48 to 4.48, "
    assert evaluate.describe_result(result) == text + "standard deviation 1.00"
    assert json.loads(json.dumps(result)) == result


def test_one_game_has_no_interval():
    result = evaluate.summarize([1.5], [5], "pong")
    assert result["ci95"] is None and result["stdev"] is None
    text = "1 game: mean return 1.50; human-normalized 62.9 % (0 % is a random player)"
    assert evaluate.describe_result(result) == text


def test_human_normalized_is_0_for_a_random_player_and_1_for_a_human():
    for game, (random, human) in atari_scores.SCORES.items():
        assert human > random
        assert atari_scores.human_normalized(game, random) == 0
        assert atari_scores.human_normalized(game, human) == 1
    assert atari_scores.human_normalized("breakout", 402.3) == pytest.approx(13.91, abs=0.005)
    assert atari_scores.human_normalized("tetris", 100) is None
    assert atari_scores.human_normalized(None, 100) is None
    assert len(atari_scores.SCORES) == 57


def test_all_games_with_scores_are_ale_pys():
    import ale_py

    gym.register_envs(ale_py)
    specs = [spec for spec in gym.registry.values() if "AtariEnv" in str(spec.entry_point)]
    assert atari_scores.SCORES.keys() <= {spec.kwargs["game"] for spec in specs}


@pytest.mark.parametrize(
    ("env", "game"),
    [("PongNoFrameskip-v4", "pong"), ("ALE/MsPacman-v5", "ms_pacman"),
     ("MontezumaRevengeNoFrameskip-v4", "montezuma_revenge"), ("CartPole-v1", None)],
)  # fmt: skip
def test_a_game_is_known_by_its_environment(env, game):
    import ale_py

    gym.register_envs(ale_py)
    environment = gym.make(env)
    assert evaluate.game_name(environment) == game
    assert evaluate.game_name(Catch()) is None


def test_the_protocol_says_how_an_atari_game_is_played():
    def describe(*words):
        flags = monobeast.parser.parse_args(list(words))
        make = lambda: atari_wrappers.create_atari(flags)  # noqa: E731
        environments = Environments(make, 2, 1)
        text = evaluate.describe_protocol(environments, flags)
        environments.close()
        assert "\n" not in text
        return text

    text = describe(*PONG)
    for part in ("whole games", "raw rewards", "sampling", "6 actions", "1 to 5 idle frames",
                 "frame skip 4", "sticky actions 0,", "108,000 frames", "2 at once"):  # fmt: skip
        assert part in text
    text = describe(
        "--sticky_actions", "0.25", "--noop_max", "0", "--full_action_space", "--greedy"
    )
    for part in ("sticky actions 0.25", "18 actions", "greedy"):
        assert part in text
    assert "idle frames" not in text and "sampling" not in text


# ---------------------------------------------------------------------------------- mode test


def run_test(name, words, *more):
    return PROGRAMS[name].main([*words, "--mode", "test", *split_words(more)])


@both
def test_a_fork_without_any_atari_plays_several_games_at_once(name, tmp_path, capsys):
    words = make_run(name, tmp_path, "--env", "Catch")
    assert run_test(name, words, "--num_episodes 20 --num_test_envs 3") == 0
    output = capsys.readouterr().out
    assert f"{tmp_path}/run at step 1,234, Catch\n" in output
    assert "Protocol: whole games, raw rewards, sampling, 3 actions, 3 at once\n" in output
    returns = [float(r) for r in re.findall(r"^game \d+: return (\S+) in 9 steps", output, re.M)]
    assert len(returns) == 20 and set(returns) <= {-1.0, 1.0}
    half = evaluate.t_quantile(19) * np.std(returns, ddof=1) / math.sqrt(20)
    low, high = np.mean(returns) - half, np.mean(returns) + half
    assert f"20 games: mean return {np.mean(returns):.2f}, " in output
    assert f"95 % confidence interval {low:.2f} to {high:.2f}" in output
    assert "human" not in output


@both
@pytest.mark.parametrize("greedy", ["", "--greedy"])
def test_the_same_seed_plays_the_same_games(name, greedy, tmp_path, capsys):
    words = make_run(name, tmp_path, "--env", "Catch", "--seed", "3")
    outputs = []
    for _ in range(2):
        run_test(name, words, greedy)
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] and "game 10: " in outputs[0]


@both
def test_flags_that_cannot_be_are_refused(name, tmp_path):
    words = make_run(name, tmp_path, "--env", "Catch")
    for more, message in {
        "--num_episodes 0": "--num_episodes is 0; it must be positive",
        "--num_test_envs 0": "--num_test_envs is 0; it must be positive",
        "--eval_interval -1": "--eval_interval is -1",
        "--seed -1": "--seed is -1; it must not be negative",
    }.items():
        with pytest.raises(FlagError, match=message):
            run_test(name, words, more)
        with pytest.raises(FlagError, match=message):  # before anything starts
            PROGRAMS[name].main([*words[:-1], "other", "--env", "Catch", *more.split()])
    with pytest.raises(FlagError, match="--record_video is for --mode test"):
        PROGRAMS[name].main([*words, "--record_video", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# ------------------------------------------------------------------------------------- videos


class Painter(Catch):
    """Catch with a screen, that tells how often it was read."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 12}

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode = render_mode

    def render(self):
        return np.kron(self._board()[0], np.ones((8, 8), np.uint8))[:, :, None].repeat(3, 2) * 255


def test_a_video_needs_moviepy_and_says_how_to_get_it(tmp_path, monkeypatch):
    words = make_run("monobeast", tmp_path, "--env", "Catch")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "moviepy" else find(name, *a)
    )
    with pytest.raises(FlagError, match="pip install moviepy"):
        run_test("monobeast", words, "--record_video", tmp_path / "videos")
    assert not (tmp_path / "videos").exists()


@pytest.fixture
def clips(monkeypatch):
    """What a moviepy of ours was asked to write: (path, frames, frames a second) a clip."""
    written = []

    class ImageSequenceClip:
        def __init__(self, frames, fps):
            self.frames, self.fps = list(frames), fps

        def write_videofile(self, path, logger=None):
            written.append((path, self.frames, self.fps))

    names = ["moviepy", *(f"moviepy.video{part}" for part in ("", ".io", ".io.ImageSequenceClip"))]
    for name in names:
        module = types.ModuleType(name)
        module.__path__, module.__spec__ = [], importlib.util.spec_from_loader(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules[names[-1]].ImageSequenceClip = ImageSequenceClip
    return written


@both
def test_each_game_of_a_test_becomes_a_video_and_no_other(name, tmp_path, monkeypatch, clips):
    words = make_run(name, tmp_path, "--env", "Catch")
    owner = monobeast if name == "monobeast" else polybeast_env
    monkeypatch.setattr(owner, "create_env", lambda flags: Painter(flags.render_mode))
    run_test(name, words, "--num_episodes 3 --record_video", tmp_path / "videos")
    paths, frames, rates = zip(*clips, strict=True)
    folder = tmp_path / "videos"
    assert paths == tuple(f"{folder}/run-step-1234-episode-{i}.mp4" for i in range(3))
    assert [len(f) for f in frames] == [10] * 3  # of the reset and of nine steps
    assert frames[0][0].shape == (80, 40, 3) and rates == (12,) * 3


def test_a_video_that_cannot_be_written_ends_the_test_with_the_reason(tmp_path, monkeypatch, clips):
    words = make_run("monobeast", tmp_path, "--env", "Catch")
    monkeypatch.setattr(monobeast, "create_env", lambda flags: Painter(flags.render_mode))
    tries = []

    def write_videofile(self, path, logger=None):
        tries.append(path)
        raise OSError("No space left on device")

    clip = sys.modules["moviepy.video.io.ImageSequenceClip"].ImageSequenceClip
    monkeypatch.setattr(clip, "write_videofile", write_videofile)
    with pytest.raises(EnvError, match="No space left on device"):
        run_test("monobeast", words, "--num_episodes 3 --record_video", tmp_path / "videos")
    assert len(tries) == 1  # not once more when the environment is closed


def test_an_environment_without_a_screen_is_told_how_to_get_one(tmp_path, clips):
    words = make_run("monobeast", tmp_path, "--env", "Catch")
    with pytest.raises(EnvError, match="render_mode None; .*render_mode=flags.render_mode"):
        run_test("monobeast", words, "--record_video", tmp_path / "videos")


@pytest.mark.parametrize("frame_skip", [1, 4])
def test_atari_videos_have_the_speed_of_the_console(frame_skip):
    flags = monobeast.parser.parse_args([*PONG, "--frame_skip", str(frame_skip)])
    env = atari_wrappers.create_atari(flags, "rgb_array")
    assert env.metadata["render_fps"] == 60 / frame_skip
    env.reset(seed=1)
    screen = env.render()
    assert screen.shape == (210, 160, 3) and len(np.unique(screen.reshape(-1, 3), axis=0)) > 2
    env.close()


def test_a_game_of_pong_becomes_an_mp4_that_plays(tmp_path):
    pytest.importorskip("moviepy")
    import cv2

    flags = polybeast.parser.parse_args(
        [*PONG, "--mode", "test", "--num_episodes", "2", "--num_test_envs", "2",
         "--savedir", str(tmp_path), "--xpid", "run", "--record_video", str(tmp_path / "videos")]
    )  # fmt: skip

    class Net(torch.nn.Linear):
        def __init__(self, *_):
            super().__init__(1, 1)

        def initial_state(self, batch_size):
            return ()

        def forward(self, inputs, agent_state):
            return Still()(inputs, agent_state)

    def create_env(flags):
        flags = argparse.Namespace(**vars(flags) | {"episodic_life": False})
        return atari_wrappers.create_atari(flags, flags.render_mode)

    (tmp_path / "run").mkdir()
    torch.save(checkpoint.pack_weights(flags, Net(), 7), tmp_path / "run" / "model.tar")
    result = evaluate.test(flags, create_env, Net)
    assert result["human_normalized"] == pytest.approx((result["mean"] + 20.7) / 35.3)
    paths = sorted((tmp_path / "videos").iterdir())
    assert [p.name for p in paths] == [f"run-step-7-episode-{i}.mp4" for i in range(2)]
    for path, steps in zip(paths, result["steps"], strict=True):
        video = cv2.VideoCapture(str(path))
        assert video.get(cv2.CAP_PROP_FPS) == pytest.approx(15)
        count, (is_whole, frame) = 0, video.read()
        assert frame.shape == (210, 160, 3)
        while is_whole:
            count, (is_whole, _) = count + 1, video.read()
        assert count == steps + 1


# ----------------------------------------------------------------------------- beside a training

GOOD = """
import json, pathlib, sys, time
folder = pathlib.Path(*(sys.argv[sys.argv.index(word) + 1] for word in ("--savedir", "--xpid")))
assert (folder / "model.tar").exists()
result = {"step": 0, "returns": [1.0, 3.0], "steps": [5, 5], "mean": 2.0, "ci95": 12.7}
result |= {"stdev": 1.4, "human_normalized": HUMAN}
(folder / "result.json").write_text(json.dumps(result))
"""
BAD = "import sys; sys.exit('the game is broken')"
ENDLESS = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "--helper"])
time.sleep(600)
"""


class Beside:
    """An Evaluator of a training that others pretend to do."""

    def __init__(self, tmp_path, monkeypatch, script, interval=100, step=0):
        path = tmp_path / "script.py"
        path.write_text(script)
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(path), raising=False)
        words = ["--savedir", str(tmp_path), "--xpid", "run", "--eval_interval", str(interval)]
        self.flags = monobeast.parser.parse_args(words)
        self.folder = tmp_path / "run"
        self.folder.mkdir(exist_ok=True)
        self.lock, self.model = threading.Lock(), torch.nn.Linear(2, 2)
        self.evaluator = evaluator.Evaluator(self.flags, step)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.evaluator.close()

    def tick(self, step):
        figures = self.evaluator.tick(self.lock, self.model, {"step": step})
        assert not self.lock.locked()
        return figures

    @property
    def is_playing(self):
        return self.evaluator._process is not None

    def wait(self, step):
        """Wait for the end of the evaluation that is under way; return its figures."""
        wait_until(self.evaluator._has_ended)
        return self.tick(step)


NOTHING = {"eval_step": None, "eval_return_mean": None, "eval_return_ci95": None}


def test_an_evaluation_gives_its_figures_once(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    with Beside(tmp_path, monkeypatch, GOOD.replace("HUMAN", "None")) as beside:
        assert beside.tick(0) == beside.tick(99) == NOTHING and not beside.is_playing
        assert beside.tick(104) == NOTHING and beside.is_playing
        figures = beside.wait(110)
        assert figures == {"eval_step": 104, "eval_return_mean": 2.0, "eval_return_ci95": 12.7}
        assert "Evaluation at step 104, " in caplog.text and "2 games: mean return" in caplog.text
        assert beside.tick(199) == NOTHING and not beside.is_playing
        beside.tick(200)
        assert beside.wait(200)["eval_step"] == 200
    assert list(beside.folder.iterdir()) == []


def test_a_human_normalized_score_is_a_figure_where_it_is_known(tmp_path, monkeypatch):
    with Beside(tmp_path, monkeypatch, GOOD.replace("HUMAN", "0.5")) as beside:
        beside.tick(100)
        assert beside.wait(100)["eval_human_normalized"] == 0.5


@pytest.mark.parametrize(("step", "due"), [(0, 100), (99, 100), (100, 200), (250, 300)])
def test_a_resumed_run_is_evaluated_at_the_next_step_of_the_same_grid(
    tmp_path, monkeypatch, step, due
):
    with Beside(tmp_path, monkeypatch, ENDLESS, step=step) as beside:
        beside.tick(due - 1)
        assert not beside.is_playing
        beside.tick(due)
        assert beside.is_playing


def test_off_is_off(tmp_path, monkeypatch):
    (tmp_path / "run" / ".eval").mkdir(parents=True)  # whosever that may be
    with Beside(tmp_path, monkeypatch, GOOD, interval=0) as beside:
        assert beside.tick(0) == beside.tick(10**9) == {} and not beside.is_playing
    assert [path.name for path in beside.folder.iterdir()] == [".eval"]


def test_a_failure_is_logged_with_what_was_printed_and_the_next_one_comes(
    tmp_path, monkeypatch, caplog
):
    with Beside(tmp_path, monkeypatch, BAD) as beside:
        for step in (100, 200):
            caplog.clear()
            beside.tick(step)
            assert beside.wait(step) == NOTHING
            assert f"The evaluation at step {step} failed (exit status 1)" in caplog.text
            assert "the game is broken" in caplog.text


def test_what_cannot_be_started_is_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no nice
    with Beside(tmp_path, monkeypatch, GOOD) as beside:
        assert beside.tick(100) == NOTHING and not beside.is_playing
        assert "Cannot evaluate at step 100" in caplog.text and "nice" in caplog.text


def helpers(pid):
    """Return the ids of the helpers of a process group that have not ended."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            words = open(f"/proc/{entry}/cmdline").read()  # noqa: SIM115
            if entry.isdigit() and os.getpgid(int(entry)) == pid and "--helper" in words:
                found.append(int(entry))
        except OSError:
            continue
    return found


def test_only_one_plays_at_a_time_and_closing_ends_it_with_its_children(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    with Beside(tmp_path, monkeypatch, ENDLESS) as beside:
        beside.tick(100)
        process = beside.evaluator._process
        wait_until(lambda: helpers(process.pid))
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(19, own + 10)
        assert beside.tick(200) == NOTHING
        assert "No evaluation at step 200: that of step 100 has been playing for" in caplog.text
        assert beside.evaluator._process is process and process.poll() is None
        began = time.monotonic()
        beside.evaluator.close()
        assert time.monotonic() - began < 5
        assert process.returncode == -signal.SIGKILL
        wait_until(lambda: not helpers(process.pid), 5)
        assert beside.tick(10**6) == NOTHING and not beside.is_playing  # closed is closed
    assert list(beside.folder.iterdir()) == []


def test_one_that_has_died_leaves_no_process_of_its_own(tmp_path, monkeypatch):
    with Beside(tmp_path, monkeypatch, ENDLESS) as beside:
        beside.tick(100)
        pid = beside.evaluator._process.pid
        wait_until(lambda: helpers(pid))
        os.kill(pid, signal.SIGKILL)
        assert beside.wait(150) == NOTHING
        wait_until(lambda: not helpers(pid), 5)


def test_a_snapshot_is_as_of_its_step_and_holds_copies(tmp_path, monkeypatch):
    with Beside(tmp_path, monkeypatch, ENDLESS) as beside:
        beside.tick(123)
        with torch.no_grad():
            before = beside.model.weight.clone()
            beside.model.weight.zero_()
        saved = torch.load(beside.folder / ".eval" / "model.tar", weights_only=True)
        assert saved["step"] == 123 and saved["flags"]["eval_interval"] == 100
        assert torch.equal(saved["model_state_dict"]["weight"], before)


# --------------------------------------------------------------------------- the whole programs

SMALL = {
    "monobeast": "--num_actors 1 --envs_per_actor 4 --batch_size 4",
    "polybeast": "--num_servers 1 --envs_per_stream 4 --batch_size 4",
}
LONG = "--env Catch --xpid run --total_steps 1_000_000_000 --eval_interval 500"


@both
def test_a_training_is_evaluated_stops_and_goes_on(name, tmp_path):
    words = (SMALL[name], LONG, "--num_episodes 4 --greedy --savedir", tmp_path)
    folder, steps = tmp_path / "run", []
    for _ in range(2):
        with Program(SCRIPTS[name], *words) as program:
            known = len(steps)
            program.wait_until(lambda: len(column(read_rows(folder), "eval_step")) > known)  # noqa: B023
            program.process.terminate()
            status, output = program.end()
            program.wait_for_members()
        assert status == 128 + signal.SIGTERM, output
        assert re.search(r"Evaluation at step [\d,]+, \d+ s: 4 games: mean return", output)
        steps = column(read_rows(folder), "eval_step")
    rows = read_rows(folder)
    assert list(rows[0]).count("eval_return_mean") == 1
    for row in rows:
        assert bool(row["eval_step"]) == bool(row["eval_return_mean"])
        if row["eval_step"]:
            assert 500 <= int(row["eval_step"]) <= int(row["step"])
            assert -1 <= float(row["eval_return_mean"]) <= 1 and float(row["eval_return_ci95"]) >= 0
    assert steps == sorted(steps) and len(set(steps)) == len(steps) >= 2
    assert not (folder / ".eval").exists()


@both
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_evaluation_ends_with_its_run(name, number, tmp_path):
    words = (SMALL[name], LONG, "--num_episodes 1_000_000_000 --savedir", tmp_path)
    with Program(SCRIPTS[name], *words, TMPDIR=str(tmp_path)) as program:
        log = tmp_path / "run" / ".eval" / "out.log"
        program.wait_until(lambda: log.exists() and "game 1:" in log.read_text())
        (pid,) = program.members("--evaluator")
        assert os.getpriority(os.PRIO_PROCESS, pid) >= 10
        step = last_step(tmp_path / "run")
        program.wait_until(lambda: last_step(tmp_path / "run") > step)  # nobody waits for it
        os.killpg(program.pid, number)  # as a terminal does
        program.end(15)
        program.wait_for_members()
    assert (tmp_path / "run" / ".eval").exists() == (number == signal.SIGKILL)


@both
def test_an_evaluation_that_is_killed_is_told_and_the_run_goes_on(name, tmp_path):
    words = (SMALL[name], LONG, "--num_episodes 1_000_000_000 --savedir", tmp_path)
    with Program(SCRIPTS[name], *words) as program:
        program.wait_until(lambda: program.members("--evaluator"))
        os.kill(program.members("--evaluator")[0], signal.SIGKILL)
        program.wait_until(lambda: "failed (exit status -9), and the run goes on" in program.output)
        step = last_step(tmp_path / "run")
        program.wait_until(lambda: last_step(tmp_path / "run") > step)
        program.process.terminate()
        assert program.end()[0] == 128 + signal.SIGTERM
        program.wait_for_members()


def test_trials_of_autotune_are_not_evaluated(monkeypatch):
    def refuse(words, **_):
        raise FlagError(" ".join(words))

    monkeypatch.setattr(autotune.subprocess, "Popen", refuse)
    main = autotune.sys.modules["__main__"]  # which has no file in a process of pytest-xdist
    monkeypatch.setattr(main, "__file__", "monobeast.py", raising=False)
    flags = monobeast.parser.parse_args(["--eval_interval", "500", "--unroll_length", "7"])
    with pytest.raises(FlagError, match="--unroll_length=7") as error:
        autotune.run_trial(flags, monobeast.parser, threading.Event())
    assert "eval" not in str(error.value).partition(" ")[2]
