# SPDX-License-Identifier: Apache-2.0
"""Runs with one seed: the same with --deterministic; a resumed run plays other games."""

import shutil
import sys

import pytest
import torch
from catch import monobeast
from program import ROOT, column, load, read_rows, run, split_words

import dqn
import gala
import ppo
import sac
from beast.errors import FlagError
from beast.runs import checkpoint
from beast.runs.run import LOG_UPDATES

# What may differ from run to run: what a clock says, and how things stand at a moment.
TIMES = {"_time", "steps_per_second", "learner_wait", "actor_wait", "full_buffers"}
ARGUMENTS = "--num_actors 2 --envs_per_actor 2 --batch_size 4 --unroll_length 5 --use_lstm"
NUM_UPDATES = LOG_UPDATES + 10
STEPS = NUM_UPDATES * 4 * 5


def train(folder, name, arguments):
    """Return the rows of the log without times, and the final weights."""
    where = ("--env Catch --deterministic --xpid", name, "--savedir", folder)
    assert monobeast.main(split_words([ARGUMENTS, arguments, *where])) == 0
    rows = read_rows(folder / name)
    assert TIMES <= rows[0].keys()
    weights = load(folder / name / "model.tar")["model_state_dict"]
    for row in rows:  # of what no seed decides
        for key in [k for k in row if k in TIMES or "joule" in k]:
            row.pop(key)
    return rows, weights


def equal(weights, others):
    return all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Return the folder of a run, its log and its weights."""
    folder = tmp_path_factory.mktemp("first")
    return folder, *train(folder, "run", f"--seed 7 --total_steps {STEPS}")


@pytest.mark.whole
def test_runs_with_one_seed_are_the_same_and_lag_one_update(tmp_path, first):
    _, rows, weights = first
    assert column(rows, "step") == [980.0, 1200.0]  # one update fewer than versions
    assert len({row["total_loss"] for row in rows}) == 2 and rows[-1]["mean_episode_return"]
    others, other_weights = train(tmp_path, "same", f"--seed 7 --total_steps {STEPS}")
    assert rows == others and equal(weights, other_weights)
    assert column(rows, "policy_lag_max") == [1.0] * 2
    # But for the very first batch, as there was no update before it.
    assert column(rows, "policy_lag_min") == [0.0, 1.0]


@pytest.mark.whole
def test_what_follows_a_checkpoint_is_the_same_each_time(tmp_path, first):
    outcomes = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        shutil.copy(first[0] / "run" / "model.tar", tmp_path / name)
        outcomes.append(train(tmp_path, name, f"--total_steps {2 * STEPS}"))
    (rows, weights), (others, other_weights) = outcomes
    assert rows == others and column(rows, "step")[-1] == 2 * STEPS
    assert equal(weights, other_weights) and not equal(weights, first[2])


@pytest.mark.whole
def test_the_staleness_benchmark_acts_with_the_lag_asked_for(tmp_path):
    flags = "--env PongNoFrameskip-v4 --frame_size 42 --lag 7 --correction none --xpid run"
    arguments = (flags, ARGUMENTS, "--total_steps 300 --savedir", tmp_path)
    run(ROOT / "benchmarks" / "staleness.py", *arguments)
    (row,) = read_rows(tmp_path / "run")
    assert float(row["policy_lag_max"]) == 7 and float(row["policy_lag_min"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("--batch_size 8", r"--batch_size is 8.* of the 16 environments.* give --batch_size 16"),
     ("--batch_size 16 --num_learner_threads 2", "give --num_learner_threads 1"),
     ("--batch_size 16 --num_buffers 48", "num_buffers is 48.* give --num_buffers 32")],
)  # fmt: skip
def test_what_does_not_go_with_it_is_refused(arguments, message):
    flags = monobeast.parser.parse_args(["--deterministic", *arguments.split()])
    with pytest.raises(FlagError, match=message):
        monobeast.resolve(flags)


@pytest.mark.parametrize(
    ("program", "arguments"), [(monobeast, ["--batch_size", "16"]), (ppo, []), (gala, [])]
)
def test_evaluations_beside_it_are_refused_at_once(program, arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", program.__file__, raising=False)
    where = ["--env", "CartPole-v1", "--savedir", str(tmp_path)]
    with pytest.raises(FlagError, match="--eval_interval .* leave out one of them"):
        program.main([*where, "--deterministic", *arguments, "--eval_interval", "1000"])
    assert not list(tmp_path.iterdir())


class Begun(Exception):
    """Ends a run where it would begin to play."""


@pytest.mark.parametrize("step", [0, 500])
@pytest.mark.parametrize(
    ("program", "env", "function", "place"),
    [
        (monobeast, "Catch", "Actors", 3),
        (dqn, "CartPole-v1", "Actors", 3),
        (gala, "CartPole-v1", "Agents", 5),
        (ppo, "CartPole-v1", "draw_seeds", 2),
        (sac, "Pendulum-v1", "draw_seeds", 2),
    ],
)
def test_a_resumed_run_does_not_play_the_same_games_again(
    monkeypatch, tmp_path, program, env, function, place, step
):
    """Seeds of environments depend on the step at which the run goes on."""
    found = []

    def begin(*arguments):
        numbers = arguments[0] if function == "draw_seeds" else arguments
        found.append(numbers[place])
        raise Begun

    def resume(flags, learner):
        learner.stats["step"] = step

    monkeypatch.setattr(checkpoint, "resume", resume)
    monkeypatch.setattr(program, function, begin)
    arguments = f"--env {env} --disable_cuda --seed 1 --xpid run --savedir {tmp_path}"
    with pytest.raises(Begun):
        program.main(arguments.split())
    assert found == [step]
