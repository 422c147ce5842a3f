# SPDX-License-Identifier: Apache-2.0
"""The diffs in examples/ and docs/ apply to the programs as they are, and what comes out learns."""

import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from program import Program, column, last_step, read_rows, run, shared_memory, wait_until

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.diff"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTED = [
    pytest.param(block, id=f"{page.name}-{i}")
    for page in PAGES
    for i, block in enumerate(re.findall(r"^```diff\n(.*?)^```$", page.read_text(), re.M | re.S))
]
# What a diff says where it is for a game that is not ours: its package, its name.
GAMES = {"minatar": ("minatar", "breakout"), "glyphs": ("nle", "nle:NetHackScore-v0")}
# Each of these learns in a minute or so on two idle cores. What bounds it is the number of steps:
# other programs may take the cores.
DEADLINE = 1200  # seconds
pytestmark = pytest.mark.timeout(2 * DEADLINE)
# One process that plays: what is learned here is played faster than it is learned.
WORDS = {
    "monobeast": "--num_actors 1 --envs_per_actor 16 --batch_size 16",
    "polybeast": "--num_servers 1 --envs_per_stream 16 --batch_size 16 --model shallow",
}
LEARNING = "--total_steps 1_000_000 --seed 3 --disable_checkpoint"

both = pytest.mark.parametrize("program", ["monobeast", "polybeast"])
# Each learns for a minute or two, all of them too long for `make test`: `make examples`.
long = pytest.mark.long
one_is_quick = pytest.mark.parametrize(
    "program", ["monobeast", pytest.param("polybeast", marks=long)]
)


@pytest.fixture
def apply(tmp_path):
    """Apply a diff to a copy of the programs; return the folder of the fork."""
    if not shutil.which("git"):
        pytest.skip("git, which applies diffs, is missing")
    fork = tmp_path / "fork"
    shutil.copytree(ROOT / "libtorchbeast", fork / "libtorchbeast")
    shutil.copytree(ROOT / "examples", fork / "examples")
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*.so"), ROOT / "pyproject.toml"]:
        shutil.copy(path, fork)

    def apply(diff):
        command = ["git", "-C", fork, "apply", "--verbose", "-"]
        # Else git would look for the repository that the copy may lie in.
        environ = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path)}
        done = subprocess.run(command, input=diff, capture_output=True, text=True, env=environ)
        assert done.returncode == 0, (
            f"{done.stderr}\nWhere it changes, the programs have changed: git apply --3way, mend "
            f"the conflicts, and write it anew with git diff -U1 HEAD"
        )
        return fork

    return apply


def read_example(name, program):
    return (ROOT / "examples" / f"{name}_{program}.diff").read_text()


def learn(fork, program, words, goal):
    """Run until the mean return of the last 100 episodes reaches the goal; return the step."""
    folder = fork / "runs" / "run"
    words = (WORDS[program], LEARNING, words, "--xpid run --savedir", fork / "runs")
    before = shared_memory()
    with Program(fork / f"{program}.py", *words) as process:
        process.wait_until(
            lambda: any(r >= goal for r in column(read_rows(folder), "mean_episode_return")),
            DEADLINE,
        )
        process.process.terminate()
        status, output = process.end()
        assert status == 128 + 15, output
        process.wait_for_members()
    wait_until(lambda: shared_memory() <= before)  # other programs take some for a moment
    return last_step(folder)


def changed_places(diff):
    """Return {file: {function or class: number of changed lines}}."""
    places = {}
    for line in diff.splitlines():
        if line.startswith("+++ b/"):
            file = places.setdefault(line.removeprefix("+++ b/"), {})
        elif line.startswith("@@"):
            place = line.split("@@")[2].strip()
            continue
        elif re.match("[ +-](def|class) ", line):
            place = line[1:]
        if line.startswith(("+", "-")) and not line.startswith(("+++", "---")):
            file[place] = file.get(place, 0) + 1
    return places


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_changes_create_env_and_the_net_alone(path):
    """And the loss, where actions are not of a Discrete space."""
    places = changed_places(path.read_text())
    wanted, most_lines = ("class AtariNet",), 45
    if path.stem.startswith(("multi_discrete", "gaussian")):
        wanted, most_lines = (*wanted, "def compute_", "def gaussian"), 85
    if "polybeast" in path.stem:
        assert places.keys() == {"polybeast.py", "polybeast_env.py"}
        assert any("create_env" in place for place in places["polybeast_env.py"])
        assert all(place.startswith(wanted) for place in places["polybeast.py"]), places
    else:
        assert places.keys() == {"monobeast.py"}
    for file in places.values():
        for place, num_lines in file.items():
            # Beside them one line, which imports the environment.
            assert place.startswith(("def create_env", *wanted)) or num_lines == 1, place
    assert sum(sum(file.values()) for file in places.values()) <= most_lines


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_leaves_tidy_code(apply, path):
    fork = apply(path.read_text())
    for command in ("check", "format --check"):
        words = [sys.executable, "-m", "ruff", *command.split(), "--no-cache", fork]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def random_return(env, num_steps=20_000):
    """Return the mean return of a player who does not look."""
    returns, total = [], 0.0
    env.reset(seed=1)
    env.action_space.seed(1)
    for _ in range(num_steps):
        _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        total += reward
        if terminated or truncated:
            returns.append(total)
            total = 0.0
            env.reset()
    return np.mean(returns)


@one_is_quick
def test_minatar_is_learned(apply, program):
    from minatar.gym import BaseEnv

    goal = 2.5
    assert goal > 4 * random_return(BaseEnv("breakout"))
    fork = apply(read_example("minatar", program))
    learn(fork, program, "--env breakout --frame_skip 1", goal)


@long
@both
def test_a_dict_of_observations_is_learned_from(apply, program):
    from examples.find import Find

    assert random_return(Find()) < 0
    fork = apply(read_example("find", program))
    learn(fork, program, "", 0.9)  # which takes both the board and the goal


@long
@both
def test_what_takes_a_memory_is_learned_with_the_lstm_alone(apply, program):
    fork = apply(read_example("recall", program))
    steps = learn(fork, program, "--use_lstm", 0.9)
    if program == "monobeast":  # one of them will do
        words = (WORDS[program], LEARNING, f"--total_steps {steps} --xpid without --savedir")
        status, output = run(fork / "monobeast.py", *words, fork / "runs")
        assert status == 0, output
        # A guess in a hundred episodes: a deviation of 0.1.
        assert column(read_rows(fork / "runs" / "without"), "mean_episode_return")[-1] < 0.5


# Many small updates, by policies that are not far behind. LEARNING has the rest.
CONTROL = (
    "--frame_skip 1 --batch_size 8 --unroll_length 5 --discounting 0.98 --entropy_cost 0 "
    "--grad_norm_clipping 5 --total_steps 400_000"
)
NEAR = {"monobeast": "--envs_per_actor 8 --deterministic", "polybeast": "--envs_per_stream 8"}


@long
@both
def test_cartpole_is_learned(apply, program):
    assert random_return(gym.make("CartPole-v1")) < 30
    fork = apply(read_example("cartpole", program))
    learn(fork, program, f"--env CartPole-v1 {CONTROL} {NEAR[program]}", 400)


@long
@both
def test_actions_of_two_parts_are_learned(apply, program):
    from examples.dials import Dials

    assert random_return(Dials()) < 0.4
    fork = apply(read_example("multi_discrete", program))
    learn(fork, program, "", 0.8)


@long
@both
def test_forces_are_learned(apply, program):
    pytest.importorskip("mujoco")  # not among the requirements
    env = gym.make("InvertedPendulum-v5")
    assert random_return(env) < 20
    fork = apply(read_example("gaussian", program))
    goal = env.spec.reward_threshold
    learn(fork, program, f"--env InvertedPendulum-v5 {CONTROL} {NEAR[program]}", goal)


@both
@pytest.mark.parametrize("flag", ["", "--use_lstm"])
def test_forces_are_chosen_and_learned_from(apply, program, flag):
    fork = apply(read_example("gaussian", program))
    words = f"--env MountainCarContinuous-v0 {WORDS[program]} {flag} --total_steps 5000 --xpid run"
    status, output = run(fork / f"{program}.py", words, "--savedir", fork / "runs")
    assert status == 0, output
    rows = read_rows(fork / "runs" / "run")
    assert column(rows, "entropy_loss")[-1] != 0 and column(rows, "skipped_updates")[-1] == 0


@pytest.mark.parametrize("diff", DOCUMENTED)
def test_a_documented_diff_applies_and_runs(apply, diff):
    fork = apply(diff)
    env = "PongNoFrameskip-v4"
    for word, (package, game) in GAMES.items():
        if word in diff:
            pytest.importorskip(package)
            env = game
    program = "polybeast" if "+++ b/polybeast.py" in diff else "monobeast"
    envs = "envs_per_actor" if program == "monobeast" else "envs_per_stream"
    words = (
        f"--env {env} --{envs} 2 --batch_size 2 --total_steps 400 --use_lstm --xpid run --savedir"
    )
    status, output = run(fork / f"{program}.py", words, fork / "runs")
    assert status == 0, output
    new_figures = set(re.findall(r'^\+        "(\w+)":', diff, re.M))
    assert new_figures <= read_rows(fork / "runs" / "run")[-1].keys()


def test_the_script_for_slurm_learns_saves_and_asks_for_its_job_again(tmp_path):
    """Slurm is not here; what it would do is done by two scripts, on this machine."""
    job = next(i for i in itertools.count(os.getpid()) if is_free(20_000 + i % 20_000))
    for command, text in {
        "srun": 'shift 2; exec "$@"',  # without --het-group and --cpus-per-task
        "scontrol": f'[ "$1" = show ] && echo 127.0.0.1 || echo "$@" >{tmp_path}/asked',
    }.items():
        (tmp_path / command).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / command).chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NAME": "pong",
        "SLURM_CPUS_PER_TASK_HET_GROUP_0": "1",
        "SLURM_CPUS_PER_TASK_HET_GROUP_1": "1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "node[1-1]",
    }
    shell = ("bash", "-c", f'exec bash {ROOT}/examples/slurm.sh "$@"')  # whose $0 is Python
    words = ("--model shallow --envs_per_stream 2 --batch_size 2 --savedir", tmp_path / "runs")
    folder = tmp_path / "runs" / f"pong-{job}"
    with Program("PongNoFrameskip-v4", *words, prefix=shell, **environ) as script:
        script.wait_until(lambda: last_step(folder) > 0)
        script.process.terminate()
        status, output = script.end()
        assert status == 128 + 15, output
        script.wait_for_members()
    assert (folder / "model.tar").exists()
    assert (tmp_path / "asked").read_text() == f"requeue {job}\n"


def is_free(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
