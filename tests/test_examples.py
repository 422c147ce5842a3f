# SPDX-License-Identifier: Apache-2.0
"""The diffs in examples/ apply to the programs as they are, and what comes out learns."""

import contextlib
import itertools
import math
import re
import shutil
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from counting import free_address
from forks import DEADLINE, EXAMPLES, ROOT
from program import Program, column, last_step, read_rows, run, shared_memory, wait_until

from beast.envs.environments import Environments, try_out
from beast.learners.nets import create_net
from examples import congestion

PONG = "PongNoFrameskip-v4"
PROGRAMS = ("monobeast", "polybeast")
# By a word of a diff: the package of its environment, which is no game of ale-py, and its id.
ENVS = {
    "glyphs": ("nle", "nle:NetHackScore-v0"),
    "ClipAction": ("gymnasium", "MountainCarContinuous-v0"),
    "absent": ("gymnasium", "dials:Dials-v0"),
    "num_goals": ("gymnasium", "find"),
    "OldPlayer": ("pettingzoo", "connect_four:ConnectFour-v0"),
}
# One process plays, as fast as another one learns.
FLAGS = {
    "monobeast": "--num_actors 1 --envs_per_actor 16 --batch_size 16",
    "polybeast": "--num_servers 1 --envs_per_stream 16 --batch_size 16",
}
LEARNING = "--total_steps 1_000_000 --seed 3 --disable_checkpoint --checkpoint_interval_s 1"
# Many small updates, by policies that are not far behind.
CONTROL = (
    "--batch_size 8 --unroll_length 5 --discounting 0.98 --entropy_cost 0 --grad_norm_clipping 5 "
    "--total_steps 400_000 "
)
NEAR = {"monobeast": "--envs_per_actor 8 --deterministic", "polybeast": "--envs_per_stream 8"}

# The example, if any, the environment, and the mean return to reach.
GOALS = [
    (None, "MinAtar/Breakout-v1", 2.5),  # a random player's is 0.6
    (None, f"CartPole-v1 {CONTROL}", 400),  # 30
    (None, "recall:Recall-v0 --use_lstm", 0.9),  # 0
    ("attention", "recall:Recall-v0 --use_lstm", 0.9),
    ("find", "find", 0.9),  # 0; takes both the board and the goal
    ("multi_discrete", "dials:Dials-v0", 0.8),  # 0.4
    ("gaussian", f"InvertedPendulum-v5 {CONTROL}", 950),  # 20
]


@pytest.mark.whole
@pytest.mark.parametrize("diff", EXAMPLES.values(), ids=EXAMPLES)
def test_a_diff_applies_and_leaves_tidy_code_that_learns(apply, load, monkeypatch, diff):
    monkeypatch.syspath_prepend(ROOT / "examples")
    quoted = [line for line in diff.splitlines() if re.match(r"[ +-](import|from) ", line)]
    assert not quoted, "imports change often: write `import` into create_env"
    fork = apply(diff)
    for command in ("check", "format --check"):
        ruff = [sys.executable, "-m", "ruff", *command.split(), "--no-cache", *fork.glob("*.py")]
        done = subprocess.run(ruff, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    package, env = next((e for word, e in ENVS.items() if word in diff), ("ale_py", PONG))
    pytest.importorskip(package)
    module = server = load(fork, "polybeast" if "b/polybeast.py" in diff else "monobeast")
    if "b/polybeast.py" in diff:
        server = load(fork, "polybeast_env")
    flags = module.parser.parse_args(["--env", env])
    with contextlib.closing(Environments(lambda: server.create_env(flags), 1, 1)) as environments:
        try_out(environments)
        spaces = environments.observation_space, environments.action_space
    for use_lstm in (False, True):
        model, (rows, outputs, _) = create_net(module.Net, *spaces, use_lstm=use_lstm)
        optimizer, _ = module.create_optimizer(flags, model)
        state = model.initial_state(outputs["baseline"].shape[1])
        metrics = module.learn(flags, model, rows | outputs, state, optimizer)
        assert np.isfinite(list(metrics.values())).all()
        assert set(re.findall(r'^\+        "(\w+)":', diff, re.M)) <= metrics.keys()


@pytest.mark.whole
@pytest.mark.parametrize(
    ("program", "example", "env"),
    [
        ("monobeast", "multi_discrete", "dials:Dials-v0"),
        ("polybeast", "gaussian", "MountainCarContinuous-v0"),
    ],
)
def test_a_program_with_other_actions_trains(apply, monkeypatch, program, example, env):
    fork = apply(EXAMPLES[f"{example}_{program}"])
    monkeypatch.setenv("PYTHONPATH", str(fork / "examples"))
    arguments = (FLAGS[program], f"--env {env} --total_steps 500 --savedir", fork / "runs")
    run(fork / f"{program}.py", *arguments)


@pytest.mark.parametrize("program", PROGRAMS)
def test_popart_keeps_its_outputs_and_learns_their_scale(apply, load, program):
    module = load(apply(EXAMPLES[f"popart_{program}"]), program)
    torch.manual_seed(0)
    layer, x = module.PopArt(8).double(), torch.randn(50, 8).double()
    for mean, std in ((0.0, 1.0), (1e4, 3e3), (-5.0, 0.1)):
        before = layer(x)
        for _ in range(400):
            layer.update(mean, mean**2 + std**2, rate=0.1)
        torch.testing.assert_close(layer(x), before, rtol=1e-6, atol=1e-6)
        assert layer.mean.item() == pytest.approx(mean, rel=1e-3, abs=1e-6)
        assert layer.std.item() == pytest.approx(std, rel=1e-3)
    layer = module.PopArt(8)  # whose weights are in float32
    for _ in range(400):
        layer.update(*torch.tensor([1e4, 1e8 + 1], dtype=torch.float64), rate=0.1)
    assert layer.std.item() == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("program", PROGRAMS)
def test_deviations_of_the_gaussian_can_grow_again(apply, load, program):
    module = load(apply(EXAMPLES[f"gaussian_{program}"]), program)
    net = module.Net(gym.spaces.Box(-1, 1, (3,), np.float32), 2)
    rows = {"frame": torch.zeros(1, 1, 3), "reward": torch.zeros(1, 1)}
    rows |= {"done": torch.zeros(1, 1).bool(), "last_action": torch.zeros(1, 1, 2)}
    for value in (-8.0, -1.0, 3.0):
        net.log_std.data.fill_(value)
        log_std = net(rows, ())[0]["policy_logits"][..., 2:]
        assert (log_std > -1).all()
        (gradient,) = torch.autograd.grad(log_std.sum(), net.log_std)
        assert (gradient > 0).all()


def test_the_kl_loss_is_finite_where_actions_are_forbidden(apply, load):
    module = load(apply(EXAMPLES["kl_loss_monobeast"]), "monobeast")
    flags = module.parser.parse_args([])
    flags.precision, flags.fp32_devices = "fp32", []
    net, (rows, outputs, _) = create_net(
        module.Net, gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(3)
    )
    net.policy.bias.data[2] = outputs["policy_logits"][..., 2] = -math.inf
    outputs["action"].zero_()
    loss, metrics = module.compute_loss(flags, net, rows | outputs, ())
    loss.backward()
    assert torch.isfinite(metrics["kl_loss"]) and torch.isfinite(net.policy.weight.grad).all()


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_crop_of_nethack_is_around_the_player(apply, load, program):
    module = load(apply(EXAMPLES[f"nethack_{program}"]), program)
    glyphs, blstats = torch.randint(0, 9, (30, 21, 79)), torch.randint(0, 21, (30, 27))
    blstats[:2, :2] = torch.tensor([[0, 0], [78, 20]])  # two corners of the map
    crop = module.crop(glyphs, blstats)
    for i, (x0, y0) in enumerate(blstats[:, :2].tolist()):
        for y, x in np.ndindex(9, 9):
            place = y0 + y - 4, x0 + x - 4
            is_inside = 0 <= place[0] < 21 and 0 <= place[1] < 79
            assert crop[i, y, x] == (glyphs[i][place] if is_inside else module.BLANK)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_background_of_nethack_is_and_stays_zero(apply, load, program):
    module = load(apply(EXAMPLES[f"nethack_{program}"]), program)
    space = gym.spaces.Dict(
        glyphs=gym.spaces.Box(0, 5976, (21, 79), np.int16),
        blstats=gym.spaces.Box(-(2**31), 2**31 - 1, (27,), np.int64),
        message=gym.spaces.Box(0, 255, (256,), np.uint8),
    )
    net = module.Net(space, 5, use_lstm=True)
    frame = {key: torch.zeros(2, 3, *box.shape, dtype=torch.int64) for key, box in space.items()}
    frame["glyphs"] += module.BLANK
    frame["glyphs"][..., 3, 3] = 7  # something to learn from
    rows = {"frame": frame, "reward": torch.zeros(2, 3), "done": torch.zeros(2, 3).bool()}
    rows["last_action"] = torch.zeros(2, 3, dtype=torch.int64)
    optimizer = torch.optim.RMSprop(net.parameters())
    net(rows, net.initial_state(3))[0]["baseline"].sum().backward()
    optimizer.step()
    assert net.glyphs.weight.grad[7].any()
    assert not net.glyphs.weight[module.BLANK].any() and not net.letters.weight[0].any()


def make_attention(module):
    """Return a net whose answers differ clearly from row to row, and the size of its window."""
    torch.manual_seed(0)
    net = module.Net(gym.spaces.Box(-1, 1, (3,), np.float32), 4, use_lstm=True)
    with torch.no_grad():
        net.policy.weight.normal_()
        net.baseline.weight.normal_()
        for layer in net.attention.layers:
            layer.bias.normal_()
    return net.eval(), net.attention.window


def make_vector_rows(num_rows, batch_size):
    size = (num_rows, batch_size)
    rows = {"frame": torch.randn(*size, 3), "reward": torch.randn(size)}
    return rows | {
        "done": torch.zeros(size, dtype=torch.bool),
        "last_action": torch.randint(4, size),
    }


def unroll(net, rows, state, length):
    """Return policy logits and baseline [T, B, A + 1] of unrolls of a length, and the new state."""
    answers = []
    for t in range(0, len(rows["done"]), length):
        outputs, state = net({k: v[t : t + length] for k, v in rows.items()}, state)
        answers.append(torch.cat([outputs["policy_logits"], outputs["baseline"][..., None]], -1))
    return torch.cat(answers), state


@pytest.mark.parametrize("program", PROGRAMS)
def test_attention_answers_unrolls_of_any_length_equally(apply, load, program):
    net, window = make_attention(load(apply(EXAMPLES[f"attention_{program}"]), program))
    T = 3 * window
    rows = make_vector_rows(T, 6)
    rows["done"] = torch.rand(T, 6) < 3 / T
    rows["done"][:, 0] = False  # longer than the window
    rows["done"][window : window + 3, 1] = True  # one row long
    close = {"rtol": 1e-5, "atol": 1e-5}
    with torch.no_grad():
        expected, (cache, count) = unroll(net, rows, net.initial_state(6), 1)
        assert expected.std() > 0.5
        for length in (2, 21, window, T):
            answers, state = unroll(net, rows, net.initial_state(6), length)
            torch.testing.assert_close(answers, expected, **close)
            torch.testing.assert_close(state, (cache, count), **close)
    for b in range(6):  # each episode is answered as if it were the first one
        starts = sorted({0, *rows["done"][:, b].nonzero().flatten().tolist()})
        for start, end in itertools.pairwise([*starts, T]):
            episode = {key: value[start:end, b, None] for key, value in rows.items()}
            answers, _ = unroll(net, episode, net.initial_state(1), T)
            torch.testing.assert_close(answers, expected[start:end, b, None], **close)
        assert count[0, b] == min(T - starts[-1], window)


@pytest.mark.parametrize("program", PROGRAMS)
def test_attention_has_no_gradient_beyond_episode_and_window(apply, load, program):
    net, window = make_attention(load(apply(EXAMPLES[f"attention_{program}"]), program))
    T = 3 * window
    _, (cache, count) = unroll(net, make_vector_rows(T, 3), net.initial_state(3), T)
    cache, rows = cache.detach().requires_grad_(), make_vector_rows(T, 3)
    rows["frame"].requires_grad_()
    rows["done"][0, 1] = rows["done"][T - 5, 2] = True
    answers, _ = unroll(net, rows, (cache, count), T)
    # Each layer sees a window further back.
    for row, first in ((window // 2, (0, 0, 0)), (T - 1, (window - 1, window - 1, T - 5))):
        rows["frame"].grad = cache.grad = None
        answers[row].sum().backward(retain_graph=True)
        seen = rows["frame"].grad.any(-1)  # [T, 3]
        for b in range(3):
            assert seen[first[b] : row + 1, b].all() and seen[:, b].sum() == row + 1 - first[b]
        assert not cache.grad[:, 1].any()
        if row < window:
            assert cache.grad[0, 0].any(-1).all()
            assert cache.grad[1, 0].any(-1).tolist() == [j >= row for j in range(window)]
        else:
            assert not cache.grad[0].any() and not cache.grad[1].any()


def test_diffs_are_made_anew_and_win_over_the_program(tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    program, example = tmp_path / "program.py", tmp_path / "example.diff"

    def git(*arguments):
        command = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost", *arguments]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout

    def commit(text):
        program.write_text(text)
        git("add", "program.py")
        git("commit", "--quiet", "--message", "today")

    text = "".join(f"line {i}\n" for i in range(9))
    git("init", "--quiet")
    commit(text)
    program.write_text(text.replace("line 4", "example"))
    example.write_text(git("diff"))
    text = text.replace("line 4", "other").replace("line 0", "first\nsecond")
    commit(text)
    subprocess.run([sys.executable, tmp_path / "scripts" / "remake_diffs.py", example], check=True)
    git("apply", "example.diff")
    assert program.read_text() == text.replace("other", "example")


def learn(fork, program, arguments, goal):
    """Run until the mean return of the last 100 episodes reaches the goal; return the step."""
    folder = fork / "runs" / "run"
    arguments = (FLAGS[program], LEARNING, arguments, "--xpid run --savedir", fork / "runs")
    before = shared_memory()
    with Program(fork / f"{program}.py", *arguments) as process:
        process.wait_until(
            lambda: any(r >= goal for r in column(read_rows(folder), "mean_episode_return")),
            DEADLINE,
        )
        process.process.terminate()
        process.finish(128 + 15)
    wait_until(lambda: shared_memory() <= before)  # other programs take some for a moment
    return last_step(folder)


def is_long(env, program):
    """Return whether it is for `make examples`: all but one learn for a minute or two."""
    return not (env.startswith("MinAtar") and program == "monobeast")


@pytest.mark.whole
@pytest.mark.timeout(2 * DEADLINE)
@pytest.mark.parametrize(
    ("program", "example", "env", "goal"),
    [
        pytest.param(
            program, *goal, id=f"{program}-{goal[0] or goal[1].split()[0]}",
            marks=pytest.mark.long if is_long(goal[1], program) else (),
        )
        for goal in GOALS
        for program in PROGRAMS
    ],
)  # fmt: skip
def test_an_environment_is_learned(apply, monkeypatch, program, example, env, goal):
    if example == "gaussian":
        pytest.importorskip("mujoco")  # not among the requirements
    fork = apply(EXAMPLES[f"{example}_{program}"] if example else "")
    monkeypatch.setenv("PYTHONPATH", str(fork / "examples"))
    near = NEAR[program] if CONTROL in env else ""
    steps = learn(fork, program, f"--env {env} {near}", goal)
    if (
        "use_lstm" in env and program == "monobeast" and not example
    ):  # without a memory, it is not learned
        arguments = (FLAGS[program], LEARNING, f"--total_steps {steps} --xpid without --savedir")
        arguments = ("--env", env.split()[0], *arguments, fork / "runs")
        run(fork / "monobeast.py", *arguments)
        # A guess in a hundred episodes: a deviation of 0.1.
        assert column(read_rows(fork / "runs" / "without"), "mean_episode_return")[-1] < 0.5


@pytest.mark.whole
@pytest.mark.timeout(2 * DEADLINE)
@pytest.mark.parametrize(
    ("steps", "goal"), [(3000, 0), pytest.param(60_000, 70, marks=pytest.mark.long)]
)
def test_senders_that_do_not_wait_learn_their_rate(tmp_path, steps, goal):
    command = re.search(r"python (polybeast.py .*?)\n +python", congestion.__doc__, re.S)[1]
    script, *arguments = command.replace("\\\n", "").split()
    address = free_address()
    arguments[arguments.index("--listen") + 1] = address
    arguments += ["--total_steps", steps, "--seed 1 --xpid run --savedir", tmp_path]
    senders = ("-m", "examples.congestion", "--learner", address)
    with Program(*senders, cwd=ROOT), Program(ROOT / script, *arguments) as learner:
        learner.finish(seconds=DEADLINE)
    assert column(read_rows(tmp_path / "run"), "mean_episode_return")[-1] > goal


def test_a_rule_for_senders_is_worse_than_the_optimum():
    at_once, late = (
        [
            congestion.measure(policy, ticks, 10)
            for policy in (congestion.probe, congestion.find_best)
        ]
        for ticks in (0, 6)
    )
    assert 20 < late[0] < at_once[0] - 5 < at_once[1] - 8 and late[1] > 85
