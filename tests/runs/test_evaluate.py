# SPDX-License-Identifier: Apache-2.0
"""Whole games with a checkpoint: which are counted, how a result is described, and evaluations."""

import contextlib
import importlib.util
import json
import logging
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import types

import catch
import catch_poly  # noqa: F401 - it makes the polybeast of this process play Catch
import gymnasium as gym
import numpy as np
import pytest
import torch
from catch_env import Catch, Counter
from deadline import Thread
from program import HELPERS, Program, split_words, wait_until

import atari_wrappers
import gala
import monobeast
import polybeast
import ppo
from beast.envs.environments import Environments
from beast.errors import EnvError
from beast.gossip.population import Population
from beast.runs import checkpoint, evaluate, statistics
from beast.runs.background_evaluation import BackgroundEvaluation
from beast.runs.run import FlagError
from libtorchbeast.rows import draw_seeds

PROGRAMS = {"monobeast": monobeast, "polybeast": polybeast, "ppo": ppo, "gala": gala}


class Still:
    """A model that takes action 0, and keeps how many rows it was asked for at once."""

    def __init__(self, watch=lambda inputs, agent_state: agent_state):
        self.batch_sizes, self.watch = [], watch

    def initial_state(self, batch_size):
        return ()

    def __call__(self, inputs, agent_state):
        self.batch_sizes.append(inputs["reward"].shape[1])
        action = torch.zeros(inputs["reward"].shape, dtype=torch.int64)
        return {"action": action}, self.watch(inputs, agent_state)


class Lives(Counter):
    """A Counter of which each game is three lives, that is, three episodes."""

    def step(self, action):
        *result, info = super().step(action)
        return *result, info | {"game_over": self.episode % 3 == 2}


def play(environments, num_games, model=None):
    model = model or Still()
    games = list(evaluate.play(environments, model, num_games))
    environments.close()
    return games, model


def make_run(name, folder, *arguments):
    """Write a checkpoint of step 1,234 without training; return the arguments that name its run."""
    program = PROGRAMS[name]
    arguments = ["--savedir", str(folder), "--xpid", "run", *map(str, arguments)]
    flags = program.parser.parse_args(arguments)
    environment = gym.wrappers.FlattenObservation(catch.create_env(flags))  # of few axes
    model = program.Net(environment.observation_space, environment.action_space.n)
    if name == "gala":
        model = Population(model, flags.num_agents)
    (folder / "run").mkdir(parents=True)
    torch.save(checkpoint.pack_weights(flags, model, 1234), folder / "run" / "model.tar")
    return arguments


@pytest.mark.parametrize("num_games", [1, 3, 4, 5, 10])
def test_games_count_as_they_begin_so_that_long_ones_do_too(num_games):
    lengths = iter([2, 20, 2, 2])
    games, model = play(Environments(lambda: Counter(next(lengths)), 4, 1), num_games)
    # Of the first four that begin one is long; while it lasts, the others begin.
    expected = [2] * (num_games - 1) + [20] if num_games > 1 else [2]
    assert [steps for _, steps in games] == expected
    assert all(r == steps * (steps + 1) / 2 for r, steps in games)
    assert set(model.batch_sizes) == {4}


def test_a_game_is_whole_where_lives_are_lost():
    games, _ = play(Environments(lambda: Lives(length=4), 2, 1), 4)
    assert games == [(30.0, 12)] * 4


def test_a_state_that_shares_its_inputs_memory_is_kept():
    seen = []

    def watch(inputs, agent_state):
        if seen:
            assert torch.equal(agent_state, seen[-1])
        state = inputs["frame"].float()  # of float32 observations no copy
        seen.append(state.clone())
        return state

    play(Environments(lambda: Counter(5), 1, 1), 2, Still(watch))
    assert len(seen) == 10


def test_a_game_that_does_not_end_is_told(monkeypatch, caplog):
    monkeypatch.setattr(evaluate, "LONG_GAME", 10)
    play(Environments(lambda: Counter(5), 1, 1), 3)  # 15 steps in all
    assert not caplog.text
    play(Environments(lambda: Counter(12), 1, 1), 1)
    assert caplog.text.count("A game has not ended after 10 steps") == 1


@pytest.mark.parametrize(
    ("num_degrees", "expected"),
    # Any table of Student's t, such as that of the NIST/SEMATECH handbook (e-Handbook 1.3.6.7.2).
    [(1, 12.706), (4, 2.776), (9, 2.262), (19, 2.093), (30, 2.042), (31, 2.040), (40, 2.021),
     (60, 2.000), (99, 1.984), (1000, 1.962)],
)  # fmt: skip
def test_quantiles_are_those_of_students_t(num_degrees, expected):
    assert evaluate.t_quantile(num_degrees) == pytest.approx(expected, abs=1e-3)


HUMAN = "human-normalized"
INTERVAL = "games: mean return {}, 95 % confidence interval {}, standard deviation {}"


@pytest.mark.parametrize(
    ("returns", "game", "text"),
    [
        ([1, 2, 3], None, f"3 {INTERVAL.format('2.0', '-0.5 to 4.5', '1.0')}"),
        ([0.955, 0.965, 0.961], None, f"3 {INTERVAL.format('0.960', '0.948 to 0.973', '0.005')}"),
        ([100, 500, 390, 20], None, f"4 {INTERVAL.format('252', '-112 to 617', '229')}"),
        ([1, 1], None, f"2 {INTERVAL.format('1.00', '1.00 to 1.00', '0.00')}"),  # of no width
        ([1.5], "pong", f"1 game: mean return 1.50; {HUMAN} 62.9 % (0 % is a random player)"),
    ],
)
def test_a_result_has_the_decimals_that_its_interval_is_worth(returns, game, text):
    result = evaluate.summarize(returns, [5] * len(returns), game)
    assert json.loads(json.dumps(result)) == result
    assert [result[key] is None for key in ("ci95", "stdev")] == [len(returns) == 1] * 2
    assert (result["human_normalized"] is None) == (game is None)
    assert evaluate.describe_result(result) == text


def test_human_normalized_is_0_for_random_and_1_for_human_play():
    scores = statistics.read_references(statistics.HUMAN_SCORES)
    for game, (random, human) in scores.items():
        assert human > random
        assert statistics.human_normalized(game, random) == 0
        assert statistics.human_normalized(game, human) == 1
    assert statistics.human_normalized("breakout", 402.3) == pytest.approx(13.91, abs=0.005)
    assert statistics.human_normalized("tetris", 100) is None
    assert statistics.human_normalized(None, 100) is None
    assert len(scores) == 57


@pytest.mark.parametrize(
    ("env", "game"),
    [("PongNoFrameskip-v4", "pong"), ("ALE/MsPacman-v5", "ms_pacman"),
     ("MontezumaRevengeNoFrameskip-v4", "montezuma_revenge"), ("CartPole-v1", None)],
)  # fmt: skip
def test_a_game_is_known_by_its_environment(env, game):
    import ale_py

    gym.register_envs(ale_py)
    assert evaluate.game_name(gym.make(env)) == game
    assert evaluate.game_name(Catch()) is None
    specs = [spec for spec in gym.registry.values() if "AtariEnv" in str(spec.entry_point)]
    scores = statistics.read_references(statistics.HUMAN_SCORES)
    assert scores.keys() <= {spec.kwargs["game"] for spec in specs}


@pytest.mark.parametrize(
    ("words", "protocol"),
    [
        (
            "--env PongNoFrameskip-v4 --noop_max 5",
            "sampling, 6 actions, 1 to 5 idle frames first, frame skip 4, sticky actions 0, "
            "at most 108,000 frames a game, each life an episode, FIRE pressed to begin an episode",
        ),
        (
            "--env MsPacmanNoFrameskip-v4 --sticky_actions 0.25 --noop_max 0 --greedy "
            "--full_action_space --no_episodic_life",
            "greedy, 18 actions, frame skip 4, sticky actions 0.25, at most 108,000 frames a game",
        ),
        (
            "--env Endless-v5 --noop_max 0 --no_episodic_life --greedy",
            "greedy, 6 actions, frame skip 4, sticky actions 0.25, "
            "FIRE pressed to begin an episode",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*Overriding environment")
def test_the_protocol_says_how_an_atari_game_is_played(words, protocol):
    # Without a limit, and with AtariEnv's own sticky actions.
    gym.register("Endless-v5", "ale_py.env:AtariEnv", kwargs={"game": "pong"})
    flags = monobeast.parser.parse_args(["--mode", "test", *words.split()])
    environments = Environments(lambda: atari_wrappers.create_atari(flags), 2, 1)
    text = evaluate.describe_protocol(environments, flags)
    environments.close()
    assert text == f"whole games, raw rewards, {protocol}, 2 at once"


def run_test(name, arguments, *more):
    return PROGRAMS[name].main([*arguments, "--mode", "test", *split_words(more)])


@pytest.mark.parametrize("name", ["monobeast", "polybeast"])
def test_games_are_the_same_with_a_seed_and_results_are_written(name, tmp_path, capsys):
    words, file = make_run(name, tmp_path, "--env", "Catch"), tmp_path / "result.json"

    def play_and_read(seed, path=file):
        more = f"--seed {seed} --num_episodes 20 --num_test_envs 3 --result_file"
        assert run_test(name, words, more, path) == 0
        return json.loads(path.read_text())

    result, output = play_and_read(3), capsys.readouterr().out
    assert f"{tmp_path}/run at step 1,234, Catch\n" in output
    assert "Protocol: whole games, raw rewards, sampling, 3 actions, 3 at once\n" in output
    returns = [float(r) for r in re.findall(r"^game \d+: return (\S+) in 9 steps", output, re.M)]
    assert len(returns) == 20 and set(returns) <= {-1.0, 1.0}
    assert result["returns"] == returns and result["step"] == 1234
    assert output.endswith(evaluate.describe_result(result) + "\n") and "human" not in output
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "linked.json")
    assert play_and_read(3, link) == result != play_and_read(4) and link.is_symlink()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # which is written to, not replaced
    reading = Thread(pipe.read_text)
    run_test(name, words, "--num_episodes 2 --result_file", pipe)
    assert json.loads(reading.result())["step"] == 1234


@pytest.mark.parametrize(("words", "samples"), [("", True), ("--greedy", False)])
def test_a_test_samples_unless_greedy_in_games_of_its_own(tmp_path, monkeypatch, words, samples):
    found = []

    def play(environments, model, num_games):
        found.append((model.training, environments.seeds))
        return [(1.0, 9)] * num_games

    monkeypatch.setattr(evaluate, "play", play)
    run_test("monobeast", make_run("monobeast", tmp_path, "--env", "Catch"), words, "--seed 3")
    assert found == [(samples, draw_seeds([3, 2**31], 8))]  # no actor of training has this number


class Painter(Catch):
    """Catch with a screen, and two lives: a game is two episodes."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 12}

    def __init__(self, render_mode=None, dtype=np.uint8, error=None):
        super().__init__()
        self.render_mode, self.dtype, self.error, self.life = render_mode, dtype, error, 0

    def reset(self, **kwargs):
        self.life += 1
        return super().reset(**kwargs)

    def step(self, action):
        *result, info = super().step(action)
        return *result, info | {"game_over": result[2] and self.life % 2 == 0}

    def render(self):
        if self.error is not None:
            raise self.error
        board = np.kron(self._board()[0], np.ones((8, 8), self.dtype))
        return board[:, :, None].repeat(3, 2) * self.dtype(255)


def test_a_video_needs_moviepy_and_says_how_to_get_it(tmp_path, monkeypatch):
    words = make_run("monobeast", tmp_path, "--env", "Catch")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
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

    module = types.SimpleNamespace(ImageSequenceClip=ImageSequenceClip, __spec__="found")
    for name in ("moviepy", "moviepy.video.io.ImageSequenceClip"):
        monkeypatch.setitem(sys.modules, name, module)
    return written


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_game_of_a_test_becomes_a_video_and_no_other(name, tmp_path, monkeypatch, clips):
    words = make_run(name, tmp_path, "--env", "Catch")

    def create_env(flags):
        return gym.wrappers.FlattenObservation(Painter(flags.render_mode))

    monkeypatch.setattr(PROGRAMS[name], "create_env", create_env)
    run_test(name, words, "--num_episodes 3 --record_video", tmp_path / "videos")
    paths, frames, rates = zip(*clips, strict=True)
    folder = tmp_path / "videos"
    assert paths == tuple(f"{folder}/run-step-1234-episode-{i}.mp4" for i in range(3))
    assert [len(f) for f in frames] == [20] * 3  # a reset and nine steps a life
    assert frames[0][0].shape == (80, 40, 3) and rates == (12,) * 3


def test_a_game_that_ends_within_reset_has_a_video_of_its_own(tmp_path, clips):
    class Idle(Painter):
        @property
        def num_games(self):
            return (1 + self.life) // 2

        def step(self, action):
            *result, info = super().step(action)
            return *result, info | {"game_over": False}

    flags = types.SimpleNamespace(
        record_video=str(tmp_path), num_episodes=2, savedir=str(tmp_path), xpid="run"
    )
    env = evaluate.record_video(Idle("rgb_array"), flags, 7)
    for _ in range(5):
        env.reset()
        while not env.step(0)[2]:
            pass
    assert [len(frames) for _, frames, _ in clips] == [20, 20]
    assert len({path for path, _, _ in clips}) == 2


def test_a_video_that_cannot_be_written_ends_the_test(tmp_path, monkeypatch, clips):
    words = make_run("monobeast", tmp_path, "--env", "Catch")
    monkeypatch.setattr(monobeast, "create_env", lambda flags: Painter(flags.render_mode))
    tries = []

    def write_videofile(self, path, logger=None):
        tries.append(path)
        raise OSError("No space left on device")

    monkeypatch.setattr("moviepy.ImageSequenceClip.write_videofile", write_videofile)
    with pytest.raises(EnvError, match="No space left on device"):
        run_test("monobeast", words, "--num_episodes 3 --record_video", tmp_path / "videos")
    assert len(tries) == 1  # not once more when the environment is closed


@pytest.mark.parametrize(
    ("painter", "message"),
    [
        ({"render_mode": None}, "render_mode None, not 'rgb_array': pass it render_mode=flags"),
        (
            {"dtype": np.float64},
            r"needs frames of uint8 \[height, width, 3\], but render\(\) .* float64 \[80, 40, 3\]",
        ),
        ({"error": ImportError("no pygame")}, r"render\(\) of .* raised ImportError: no pygame"),
    ],
)
def test_frames_that_make_no_video_are_refused_before_a_game(
    painter, message, tmp_path, monkeypatch, clips, capsys
):
    words = make_run("monobeast", tmp_path, "--env", "Catch")
    make = lambda flags: Painter(**{"render_mode": flags.render_mode} | painter)  # noqa: E731
    monkeypatch.setattr(monobeast, "create_env", make)
    with pytest.raises((FlagError, EnvError), match=message):
        run_test("monobeast", words, "--record_video", tmp_path / "videos")
    assert not (tmp_path / "videos").exists() and capsys.readouterr().out == ""


GOOD = """
import json, pathlib, sys
path = pathlib.Path(sys.argv[sys.argv.index("--result_file") + 1])
assert (path.parent / "model.tar").exists() and "--end_with_stdin" in sys.argv
result = {"step": 0, "returns": [1.0, 3.0], "steps": [5, 5], "mean": 2.0, "ci95": 12.7}
result |= {"stdev": 1.4, "human_normalized": HUMAN}
path.write_text(json.dumps(result))
"""
BAD = "import sys; sys.exit('the game is broken')"
ENDLESS = """
import os, subprocess, sys, time
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
os.symlink(str(helper.pid), os.path.join(os.path.dirname(__file__), "helper"))
time.sleep(600)
"""


class Training:
    """Evaluations of a training that others pretend to do."""

    def __init__(self, tmp_path, monkeypatch, script, interval=100, step=0, last=None):
        path = tmp_path / "script.py"
        path.write_text(script)
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(path), raising=False)
        arguments = ["--savedir", str(tmp_path), "--xpid", "run", "--eval_interval", str(interval)]
        self.folder = tmp_path / "run"
        self.folder.mkdir(exist_ok=True)
        self.learner = types.SimpleNamespace(
            lock=threading.Lock(), hold=contextlib.nullcontext, model=torch.nn.Linear(2, 2)
        )
        self.evaluations = BackgroundEvaluation(monobeast.parser.parse_args(arguments), step, last)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.evaluations.close()

    def tick(self, step):
        self.learner.stats = {"step": step}
        metrics = self.evaluations.tick(self.learner)
        assert not self.learner.lock.locked()
        return metrics

    @property
    def process(self):
        """The evaluation that is under way."""
        return self.evaluations._process

    def wait(self, step):
        """Wait for the end of the evaluation that is under way; return its metrics."""
        wait_until(self.evaluations._has_ended)
        return self.tick(step)


NOTHING = {"eval_step": None, "eval_return_mean": None, "eval_return_ci95": None}


def test_an_evaluation_gives_its_metrics_once(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    with Training(tmp_path, monkeypatch, GOOD.replace("HUMAN", "0.5")) as training:
        assert training.tick(0) == training.tick(99) == NOTHING and training.process is None
        assert training.tick(104) == NOTHING and training.process is not None
        metrics = {"eval_step": 104, "eval_return_mean": 2.0, "eval_return_ci95": 12.7}
        assert training.wait(110) == metrics | {"eval_human_normalized": 0.5}
        assert "Evaluation at step 104, " in caplog.text and "2 games: mean return" in caplog.text
        assert training.tick(199) == NOTHING and training.process is None
        training.evaluations._flags.env = "our:Game"  # which a checkpoint alone may not name
        training.tick(200)
        assert "--env=our:Game" in training.process.args
        assert training.wait(200)["eval_step"] == 200
    assert list(training.folder.iterdir()) == []


def test_an_evaluation_with_edited_code_is_told(tmp_path, monkeypatch, caplog):
    with Training(tmp_path, monkeypatch, GOOD.replace("HUMAN", "None")) as training:
        training.tick(100)
        training.wait(110)
        assert "edited" not in caplog.text
        with open(tmp_path / "script.py", "a") as file:
            file.write("# a change for the next experiment\n")
        training.tick(200)
        training.wait(210)
    assert "code that was edited after this run began (script.py)" in caplog.text


def test_an_evaluation_that_has_ended_is_not_lost_at_the_end(tmp_path, monkeypatch):
    with Training(tmp_path, monkeypatch, GOOD.replace("HUMAN", "None")) as training:
        training.tick(104)
        wait_until(training.evaluations._has_ended)
        training.evaluations.close()
        assert training.tick(110)["eval_step"] == 104
        assert training.tick(110) == NOTHING


@pytest.mark.parametrize(
    ("step", "last", "due"),
    [(0, None, 100), (99, None, 100), (100, 100, 200), (250, 203, 300),
     (250, 104, 250), (250, None, 250)],  # whose evaluations were cut short
)  # fmt: skip
def test_a_resumed_run_is_evaluated_on_the_same_grid(tmp_path, monkeypatch, step, last, due):
    with Training(tmp_path, monkeypatch, ENDLESS, step=step, last=last) as training:
        training.tick(due - 1)
        assert training.process is None
        training.tick(due)
        assert training.process is not None


def test_without_an_interval_nothing_is_evaluated_or_removed(tmp_path, monkeypatch):
    (tmp_path / "run" / ".eval").mkdir(parents=True)  # somebody else's
    with Training(tmp_path, monkeypatch, GOOD, interval=0) as training:
        assert training.tick(0) == training.tick(10**9) == {} and training.process is None
    assert [path.name for path in training.folder.iterdir()] == [".eval"]


def test_a_failure_is_logged_and_the_next_one_comes(tmp_path, monkeypatch, caplog):
    with Training(tmp_path, monkeypatch, BAD) as training:
        for step in (100, 200):
            caplog.clear()
            training.tick(step)
            assert training.wait(step) == NOTHING
            assert f"The evaluation at step {step} failed (exit status 1)" in caplog.text
            assert "the game is broken" in caplog.text
        monkeypatch.setenv("PATH", str(tmp_path))  # where there is no nice
        assert training.tick(300) == NOTHING and training.process is None
        assert "Skipped the evaluation at step 300" in caplog.text and "nice" in caplog.text


def helper_lives(folder):
    try:
        pid = os.readlink(folder / "helper")
        return bool(pathlib.Path("/proc", pid, "cmdline").read_bytes())  # none of a zombie
    except OSError:
        return False


@pytest.mark.parametrize("killed", [False, True])
def test_one_plays_at_a_time_the_weights_of_its_step(tmp_path, monkeypatch, caplog, killed):
    caplog.set_level(logging.INFO)
    with Training(tmp_path, monkeypatch, ENDLESS) as training:
        training.tick(123)
        process = training.process
        with torch.no_grad():
            before = training.learner.model.weight.clone()
            training.learner.model.weight.zero_()
        saved = torch.load(training.folder / ".eval" / "model.tar", weights_only=True)
        assert saved["step"] == 123 and saved["flags"]["eval_interval"] == 100
        assert torch.equal(saved["model_state_dict"]["weight"], before)
        wait_until(lambda: helper_lives(tmp_path))
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(19, own + 10)
        assert training.tick(200) == NOTHING
        assert "Skipped the evaluation at step 200: that of step 123 is running" in caplog.text
        assert training.process is process and process.poll() is None and process.stdin.writable()
        if killed:
            process.kill()
            assert training.wait(250) == NOTHING
        training.evaluations.close()
        assert process.returncode == -signal.SIGKILL
        wait_until(lambda: not helper_lives(tmp_path))
        assert training.tick(10**6) == NOTHING and training.process is None  # closed is closed
    assert list(training.folder.iterdir()) == []


@pytest.mark.whole
def test_an_evaluation_ends_with_the_training_that_started_it(tmp_path):
    words = make_run("monobeast", tmp_path, "--env", "Catch")
    more = "--mode test --end_with_stdin --num_episodes 100_000_000"
    with Program(HELPERS / "catch.py", *words, more, stdin=subprocess.PIPE) as program:
        program.wait_until(lambda: "game 1:" in program.output)
        program.process.stdin.close()  # as by the end of the training, even by SIGKILL
        program.end()
        program.wait_for_members()
