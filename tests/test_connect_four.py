# SPDX-License-Identifier: Apache-2.0
"""Self-play in Connect Four: PettingZoo's rules, the fixed players, and games of old weights."""

import argparse
import contextlib
import copy
import importlib
import json
import os
import threading

import numpy as np
import pytest
import torch
from forks import DEADLINE, EXAMPLES, ROOT
from program import Program, run
from small_run import create_batch, create_learner

from beast.actors.rollout_buffers import create_buffers
from beast.actors.weights import SharedWeights
from beast.envs.environments import Environments
from beast.learners.nets import create_net
from beast.nest import map_nest

pettingzoo = pytest.importorskip("pettingzoo")
ENV = "connect_four:ConnectFour-v0"
COLUMNS = 7


@pytest.fixture
def connect_four(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("connect_four")


@pytest.fixture
def fork(apply, load, monkeypatch):
    """Return MonoBeast with the diff of self-play."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return load(apply(EXAMPLES["self_play_monobeast"]), "monobeast")


def create_board(text):
    """Return an observation of a board in words: x is the player to move, o the other one."""
    lines = [list(line) for line in text.split()]
    lines = [["."] * COLUMNS] * (6 - len(lines)) + lines
    board = np.array(lines)
    observation = np.stack([board == "x", board == "o"], axis=-1).astype(np.int8)
    return observation, (board[0] == ".").astype(np.int8)


def test_games_are_those_of_pettingzoo(connect_four):
    random, env = np.random.default_rng(0), connect_four.ConnectFour()
    game = pettingzoo.make("aec", connect_four.GAME)
    ends = set()
    for _ in range(60):
        (observation, _), is_over = env.reset(seed=1), False
        game.reset(seed=1)
        while not is_over:
            player = game.agent_selection
            expected = game.observe(player)
            for key in ("observation", "action_mask"):
                np.testing.assert_array_equal(observation[key], expected[key])
            assert env.observation_space.contains(observation)
            allowed = np.flatnonzero(observation["action_mask"])
            action = int(random.choice(allowed))
            observation, reward, is_over, truncated, _ = env.step(action)
            game.step(action)
            assert (reward, is_over, truncated) == (
                game.rewards[player], game.terminations[player], False
            )  # fmt: skip
            discs = observation["observation"].astype(bool)  # those of who has moved are second
            assert connect_four.has_four(discs[:, :, 1]) == (reward == 1)
            assert not connect_four.has_four(discs[:, :, 0])
        ends.add(reward)
    assert 1 in ends


def test_a_full_board_is_a_draw_and_a_full_column_is_forbidden(connect_four):
    env = connect_four.ConnectFour()
    env.reset(seed=1)
    # Two columns of xoxoxo, two of oxoxox, two of xoxoxo; the last one changes who begins.
    columns = [0] * 6 + [1] * 6 + [6] + [2] * 6 + [3] * 6 + [6] + [4] * 6 + [5] * 6 + [6] * 4
    for i, column in enumerate(columns):
        observation, reward, is_over, _, _ = env.step(column)
        assert reward == 0 and is_over == (i == 41)
        full = [columns[: i + 1].count(column) == 6 for column in range(COLUMNS)]
        if not is_over:
            assert observation["action_mask"].tolist() == [int(not x) for x in full]


def test_games_begin_with_random_moves(connect_four):
    env = connect_four.ConnectFour(max_opening=8)
    boards = [env.reset(seed=seed)[0]["observation"] for seed in range(200)]
    assert {int(board.sum()) for board in boards} == set(range(9))
    assert len({board.tobytes() for board in boards}) > 150
    env = connect_four.ConnectFour(max_opening=60)  # most games end in it, and begin again
    boards += [env.reset(seed=seed)[0]["observation"] for seed in range(20)]
    for board in boards:
        assert not any(connect_four.has_four(board[:, :, i].astype(bool)) for i in range(2))
        assert board[:, :, 0].sum() in (board[:, :, 1].sum(), board[:, :, 1].sum() - 1)


@pytest.mark.parametrize(
    ("board", "columns"),
    [
        ("xxx....", {3}),
        ("oo.oxxx", {2}),
        ("..o.... ..o.... x.o.x.x", {2}),
        ("..o..x. ..o..x. x.o..x.", {5}),  # wins, and does not block
        ("..ox... .oxo... oxox...", {3}),
        ("...xo.. ..xoo.. .xoox.. .ooxx.x", {0}),
        (".xxx... .oxo...", None),  # a disc would fall below the line
        (".......", None),
    ],
)
def test_the_simple_player_wins_else_blocks_else_is_random(connect_four, board, columns):
    random = np.random.default_rng(0)
    observation, mask = create_board(board)
    played = {connect_four.play_simple(observation, mask, random) for _ in range(100)}
    assert played == (columns or set(range(COLUMNS)))


def test_players_keep_to_the_mask(connect_four):
    random = np.random.default_rng(0)
    observation, mask = create_board("oxox.xo " * 3 + "xoxo.ox " * 3)
    for player in connect_four.PLAYERS.values():
        assert {player(observation, mask, random) for _ in range(20)} == {4}


class Fixed(torch.nn.Module):
    """A net that always plays one column."""

    def __init__(self, column):
        super().__init__()
        self.column = column

    def initial_state(self, batch_size):
        return ()

    def forward(self, inputs, agent_state):
        return {"action": torch.full_like(inputs["last_action"], self.column)}, agent_state


def test_scores_are_the_nets_who_begins_every_other_game(connect_four):
    def play_last(observation, action_mask, random):
        return 6

    # Whoever begins has four in a column first.
    scores = connect_four.play(Fixed(0), play_last, num_games=6)
    assert scores.tolist() == [1, -1, 1, -1, 1, -1]
    assert connect_four.count(scores) == {"wins": 3, "draws": 0, "losses": 3}


def test_the_simple_player_beats_the_random_one(connect_four):
    class Simple(Fixed):
        """A net that plays as the simple player does."""

        def forward(self, inputs, agent_state):
            frames = inputs["frame"]["observation"][0].numpy(), inputs["frame"]["action_mask"][0]
            columns = [
                connect_four.play_simple(board, mask, random)
                for board, mask in zip(*frames, strict=True)
            ]
            return {"action": torch.tensor([columns])}, agent_state

    random = np.random.default_rng(0)
    scores = connect_four.play(Simple(0), connect_four.play_random, num_games=40)
    assert (scores == 1).mean() > 0.8


def create_model(fork, connect_four, number):
    """Return a net that plays at random, and whose outputs show its number."""
    env = connect_four.ConnectFour()
    net = fork.Net(env.observation_space, COLUMNS)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
        net.policy.bias.copy_(torch.eye(COLUMNS)[number])
        net.baseline.bias.fill_(number)
    return net


@torch.no_grad()
def test_old_weights_play_one_side_then_the_other(fork, connect_four):
    N, new, old = 4, *(create_model(fork, connect_four, number) for number in (1, 2))
    flags = argparse.Namespace(envs_per_actor=N, pool_share=0.5, pool_size=3)
    player = fork.OldPlayer(flags, copy.deepcopy(new), SharedWeights(old, 4), 0)
    player.draw_weights()
    games = [[] for _ in range(N)]  # of each environment, and of each game who has made its moves
    played = [[] for _ in range(N)]  # whether an old player took part
    with contextlib.closing(Environments(connect_four.ConnectFour, N, 1)) as environments:
        row = environments.initial()
        inputs = map_nest(lambda a: torch.from_numpy(a).unsqueeze(0), row)
        for _ in range(300):
            output = {key: value[0].numpy() for key, value in new(inputs, ())[0].items()}
            player.move(inputs, output)
            for i in range(N):
                if row["done"][i]:
                    games[i].append([])
                    played[i].append(player.plays[i])
                number = int(output["baseline"][i])
                assert number == output["policy_logits"][i].argmax() or (
                    row["frame"]["action_mask"][i, number] == 0
                )
                games[i][-1].append(number)
            environments.step(output["action"])
    for i in range(N):
        assert len(games[i]) > 5
        for n, movers in enumerate(games[i]):
            old_side = (i + n + 1) % 2 if played[i][n] else None
            assert movers == [2 if side % 2 == old_side else 1 for side in range(len(movers))]
    assert 0.2 < np.mean(np.concatenate(played)) < 0.8


def test_weights_are_drawn_from_all_of_the_pool(fork, connect_four):
    model = create_model(fork, connect_four, 0)
    pool = SharedWeights(model, 4)
    flags = argparse.Namespace(envs_per_actor=1, pool_share=1.0, pool_size=3)
    player = fork.OldPlayer(flags, copy.deepcopy(model), pool, 0)
    for newest in range(7):
        if newest > 0:
            model.baseline.bias.data.fill_(newest)
            pool.publish(model)
        drawn = set()
        for _ in range(50):
            player.draw_weights()
            drawn.add(int(player.net.baseline.bias))
        assert drawn == set(range(max(0, newest - 2), newest + 1))


def test_an_actor_plays_with_old_weights(fork, connect_four):
    words = f"--env {ENV} --envs_per_actor 4 --num_buffers 8 --unroll_length 30 --pool_share 1"
    flags = fork.parser.parse_args(words.split())
    flags.precision, flags.fp32_devices = "fp32", []
    new, old = (create_model(fork, connect_four, number) for number in (1, 2))
    env = connect_four.ConnectFour()
    sample = create_net(fork.Net, env.observation_space, env.action_space)[1]
    buffers = create_buffers(flags, *sample)

    class FreeBuffers(list):
        def beat(self):
            pass

    indices = FreeBuffers([np.arange(4), np.arange(4, 8)])
    fork.act(flags, 0, [1], indices, buffers, SharedWeights(new), SharedWeights(old, 21))
    movers = buffers["rows"]["baseline"][:, 1:]
    assert 0.4 < (movers == 2).float().mean() < 0.6
    assert ((movers == 1) | (movers == 2)).all()


@pytest.mark.parametrize("first_step", [0, 5000])
def test_the_learner_adds_weights_to_the_pool(fork, monkeypatch, first_step):
    flags = argparse.Namespace(pool_interval=250)
    learner = create_learner(argparse.Namespace(learning_rate=0.5, total_steps=10_000))
    pool, counts = SharedWeights(learner.model, 4), []

    def record(metrics, batch):
        counts.append(pool.version)
        learner.count(100, [], [])

    run = argparse.Namespace(stop=threading.Event(), record=record, first_step=first_step)
    learner.count(first_step, [], [])
    monkeypatch.setattr(fork.rollout_buffers, "read_batches", lambda *_: [create_batch()] * 8)
    monkeypatch.setattr(fork, "learn", lambda *_: {})
    replay = argparse.Namespace(mix=lambda batch: batch, store=lambda *_: None)
    fork.batch_and_learn(flags, learner, None, None, replay, pool, run)
    assert counts == [0, 0, 0, 1, 1, 2, 2, 2]  # at 0, 100, ... 700 steps


def test_the_value_of_the_next_row_counts_against_the_player(fork, connect_four):
    """A game of three moves with values 1: the last move wins."""
    flags = fork.parser.parse_args(["--discounting", "0.5"])
    flags.precision, flags.fp32_devices = "fp32", []
    model = create_model(fork, connect_four, 1)
    env = connect_four.ConnectFour()
    _, (rows, outputs, _) = create_net(fork.Net, env.observation_space, env.action_space)
    batch = map_nest(lambda x: x[:1, :1].repeat(4, 1, *[1] * (x.dim() - 2)), rows | outputs)
    batch["policy_logits"][:] = model.policy.bias.detach()
    batch["done"] = torch.tensor([[True], [False], [False], [True]])
    batch["reward"] = torch.tensor([[0.0], [0.0], [0.0], [1.0]])
    _, metrics = fork.compute_loss(flags, model, batch, ())
    # Targets, from the last one: 1, -0.5 and 0.25; the model's values are 1.
    expected = 0.5 * 0.5 * ((1 - 1) ** 2 + (-0.5 - 1) ** 2 + (0.25 - 1) ** 2)
    assert metrics["baseline_loss"] == pytest.approx(expected)


@pytest.mark.whole
@pytest.mark.long
@pytest.mark.timeout(2 * DEADLINE)
def test_self_play_learns_to_beat_the_random_player(apply, monkeypatch, tmp_path):
    fork = apply(EXAMPLES["self_play_monobeast"])
    monkeypatch.setenv("PYTHONPATH", f"{fork / 'examples'}:{os.environ.get('PYTHONPATH', '')}")
    words = (
        f"--env {ENV} --num_actors 1 --envs_per_actor 32 --batch_size 4 --replay_ratio 1 "
        "--entropy_cost 0.005 --total_steps 200_000 --seed 1 --xpid run --savedir"
    )
    with Program(fork / "monobeast.py", words, tmp_path) as program:
        program.finish(seconds=DEADLINE)
    words = f"-m connect_four --xpid run --greedy --result_file {tmp_path}/result --savedir"
    run(*words.split(), tmp_path, cwd=fork)
    result = json.loads((tmp_path / "result").read_text())
    assert result["step"] >= 200_000 and result["greedy"]
    assert result["random"]["wins"] >= 180  # a random player has 100
    assert result["simple"]["wins"] >= 30  # 10
