# SPDX-License-Identifier: Apache-2.0
"""Connect Four of PettingZoo for self-play, and games of a run against fixed players.

    git apply examples/self_play_monobeast.diff
    PYTHONPATH=examples python monobeast.py --env connect_four:ConnectFour-v0 --xpid NAME
    PYTHONPATH=examples python -m connect_four --xpid NAME --greedy    # plays 200 games each

For another game of two players who take turns, with a mask of actions, change GAME.
"""

import contextlib
import json
import pathlib
import sys

import gymnasium as gym
import numpy as np
import pettingzoo
import torch

from beast.envs.environments import Environments
from beast.flags import parse_flags
from beast.nest import map_nest
from beast.runs import checkpoint

GAME = "classic/connect_four_v3"
ENV = "connect_four:ConnectFour-v0"
NUM_GAMES = 200


class ConnectFour(gym.Env):
    """Both sides of a game: a step is a move, and the players take turns.

    The observation is from the view of the player to move: the first plane of "observation" has
    that player's discs, the second one the other's. The reward is of the player who has moved: 1
    for the winning move. So the loser's -1 is in no row: it is learned from the next row's value,
    which counts negatively (self_play_monobeast.diff).

    Args:
      max_opening: a game begins with up to so many random moves, which belong to no player. Without
        them, a policy that is sure of itself plays the same few games again and again.
    """

    metadata = {"render_modes": ["human", "rgb_array"]}

    def __init__(self, max_opening=0, render_mode=None):
        self.max_opening = max_opening
        self.render_mode = render_mode
        # Without its wrappers, which take as long as the game itself and check what nets obey.
        self.game = pettingzoo.make("aec", GAME, render_mode=render_mode).unwrapped
        player = self.game.possible_agents[0]
        self.observation_space = self.game.observation_space(player)
        self.action_space = self.game.action_space(player)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.game.reset(seed=seed)
        for _ in range(self.np_random.integers(self.max_opening, endpoint=True)):
            self.game.step(play_random(**self._observe(), random=self.np_random))
            if any(self.game.terminations.values()):
                self.game.reset()
        return self._observe(), {}

    def step(self, action):
        player = self.game.agent_selection
        self.game.step(int(action))
        reward, is_over = self.game.rewards[player], self.game.terminations[player]
        return self._observe(), float(reward), is_over, False, {}

    def render(self):
        return self.game.render()

    def close(self):
        self.game.close()

    def _observe(self):
        return self.game.observe(self.game.agent_selection)


gym.register("ConnectFour-v0", ConnectFour, kwargs={"max_opening": 8})


def has_four(discs):
    """Return whether a player with these discs, bools [6, 7], has four in a line."""
    lines = (
        discs[:, :-3] & discs[:, 1:-2] & discs[:, 2:-1] & discs[:, 3:],
        discs[:-3] & discs[1:-2] & discs[2:-1] & discs[3:],
        discs[:-3, :-3] & discs[1:-2, 1:-2] & discs[2:-1, 2:-1] & discs[3:, 3:],
        discs[3:, :-3] & discs[2:-1, 1:-2] & discs[1:-2, 2:-1] & discs[:-3, 3:],
    )
    return any(line.any() for line in lines)


def play_random(observation, action_mask, random):
    """Return a column: any one that is allowed.

    Args:
      observation: [6, 7, 2], the discs of the player to move and those of the other one.
      action_mask: [7].
      random: a numpy.random.Generator.
    """
    return int(random.choice(np.flatnonzero(action_mask)))


def play_simple(observation, action_mask, random):
    """Return a column: one that wins, else one where the other player would win, else any one."""
    discs = observation.astype(bool)
    for side in range(2):
        for column in np.flatnonzero(action_mask):
            after = discs[:, :, side].copy()
            row = np.flatnonzero(~discs[:, column].any(axis=1))[-1]  # row 5 is the lowest
            after[row, column] = True
            if has_four(after):
                return int(column)
    return play_random(observation, action_mask, random)


PLAYERS = {"random": play_random, "simple": play_simple}


@torch.inference_mode()
def play(model, player, num_games=NUM_GAMES, seed=0):
    """Play the net against a player, as first in every other game; return a score for each game.

    Args:
      player: as play_random.

    Returns:
      scores [num_games]: 1 where the net has won, 0 for a draw, -1 where it has lost. It is first
      in games 0, 2, 4, ...
    """
    random = np.random.default_rng([seed, 1])
    torch.manual_seed(seed)
    net_side = np.arange(num_games) % 2
    scores, is_over = np.zeros(num_games, int), np.zeros(num_games, bool)
    with contextlib.closing(Environments(ConnectFour, num_games, seed)) as environments:
        row, state = environments.initial(), model.initial_state(num_games)
        while not is_over.all():
            inputs = map_nest(lambda a: torch.tensor(a).unsqueeze(0), row)  # [1, N, ...]
            output, state = model(inputs, state)
            actions = output["action"].squeeze(0).numpy()
            boards, masks = row["frame"]["observation"], row["frame"]["action_mask"]
            side = np.where(row["done"], 0, row["episode_step"]) % 2  # of the player to move
            for i in np.flatnonzero(~is_over & (side != net_side)):
                actions[i] = player(boards[i], masks[i], random)
            environments.step(actions)
            ended = row["done"] & ~is_over
            scores[ended] = np.where(side == net_side, row["reward"], -row["reward"])[ended]
            is_over |= ended
    return scores


def count(scores):
    return {
        name: int((scores == score).sum())
        for name, score in zip(("wins", "draws", "losses"), (1, 0, -1), strict=True)
    }


def main():
    """Play the run that the flags name, those of monobeast.py --mode test; print the scores."""
    import monobeast  # not above: the program that learns imports this module

    flags = parse_flags(monobeast.parser, ["--mode", "test", "--env", ENV, *sys.argv[1:]])
    saved = checkpoint.load(flags)
    env = ConnectFour()
    model = monobeast.Net(env.observation_space, 7, **monobeast.net_arguments(flags))
    checkpoint.restore_weights(model, saved, flags)
    model.train(not flags.greedy)  # in training mode it samples
    result = {"step": saved["step"], "greedy": flags.greedy}
    for name, player in PLAYERS.items():
        scores = play(model, player, seed=flags.seed or 0)
        result[name] = {"first": count(scores[::2]), "second": count(scores[1::2])}
        result[name] |= count(scores)
        print(f"{name}: {result[name]}")
    if flags.result_file is not None:
        pathlib.Path(flags.result_file).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
