# SPDX-License-Identifier: Apache-2.0
"""Where does a net lose in MinAtar's Breakout, and does it try to save those balls?

    python results/tricks/plateau.py --env MinAtar/Breakout-v0 --xpid RUN    prints a table

Needs the checkpoint of a run of monobeast.py. Plays 3,200 games with sampled actions. A row is a
way in which balls come down that at most five moves reach, which is as many as there are: from
where, where the paddle was, and how many moves it needed; then how many came, how many were hit,
and the mean probabilities of moves to the left and to the right on the way.
"""

import collections
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np
import torch

import monobeast
from beast.flags import parse_flags, run_program
from beast.runs import checkpoint

NUM_ENVS, GAMES_OF_EACH, NUM_ROWS = 64, 50, 8
TOP, BOTTOM, WIDTH = 4, 9, 10  # TOP is the row below the bricks
LEFT, RIGHT = 3, 2  # what ball_dir is as a ball comes down; on its way up it is 0 or 1


def count_moves(x, direction, paddle):
    """Return how far the paddle is from where it hits the ball: below it, or where it goes."""
    columns = [x]
    for _ in range(BOTTOM - TOP):
        x += 1 if direction == RIGHT else -1
        if not 0 <= x < WIDTH:
            x, direction = min(max(x, 0), WIDTH - 1), LEFT + RIGHT - direction
        columns.append(x)
    return min(abs(paddle - x) for x in columns[-2:])


def main():
    monobeast.parser.set_defaults(mode="test")
    flags = parse_flags(monobeast.parser)
    envs = [monobeast.create_env(flags) for _ in range(NUM_ENVS)]
    games = [env.unwrapped.game.env for env in envs]
    net = monobeast.Net(envs[0].observation_space, int(envs[0].action_space.n)).train()  # samples
    checkpoint.restore_weights(net, checkpoint.load(flags), flags)
    torch.manual_seed(0)
    frames = [env.reset(seed=i)[0] for i, env in enumerate(envs)]
    rewards, dones = np.zeros(NUM_ENVS, np.float32), np.ones(NUM_ENVS, bool)
    actions = np.zeros(NUM_ENVS, np.int64)
    came, hit, falling = collections.Counter(), collections.Counter(), [None] * NUM_ENVS
    moves = collections.defaultdict(list)  # probabilities of going left and right
    left, right = (envs[0].unwrapped.action_set.index(action) for action in (1, 3))
    games_left = np.full(NUM_ENVS, GAMES_OF_EACH)
    while games_left.any():
        rows = {"frame": np.stack(frames), "reward": rewards, "done": dones, "last_action": actions}
        with torch.no_grad():
            outputs, _ = net({k: torch.as_tensor(x)[None] for k, x in rows.items()}, ())
        actions = outputs["action"][0].numpy()
        moving = outputs["policy_logits"][0].softmax(-1)[:, [left, right]].numpy()
        for i in np.flatnonzero(games_left):
            env, game = envs[i], games[i]
            if game.ball_dir in (LEFT, RIGHT) and game.ball_y == TOP:
                falling[i] = game.ball_x, game.ball_dir, game.pos
            if falling[i]:
                moves[falling[i]].append(moving[i])
            frames[i], rewards[i], dones[i], *_ = env.step(actions[i])
            is_up = game.ball_dir not in (LEFT, RIGHT)
            if falling[i] and (dones[i] or is_up):
                came[falling[i]] += 1
                hit[falling[i]] += not dones[i]
                falling[i] = None
            if dones[i]:
                games_left[i] -= 1
                rewards[i], (frames[i], _) = 0, env.reset()
    print("| a ball comes down from | paddle | moves needed | came | hit | left | right |")
    print("|---|---|---|---|---|---|---|")
    within_reach = [way for way in came if count_moves(*way) <= BOTTOM - TOP]
    for way in sorted(within_reach, key=lambda way: hit[way] - came[way])[:NUM_ROWS]:
        x, direction, paddle = way
        side = "left" if direction == LEFT else "right"
        cells = f"column {x}, to the {side}", paddle, count_moves(*way), came[way], hit[way]
        shares = (f"{share:.1%}" for share in np.mean(moves[way], axis=0))
        print("|", " | ".join(map(str, (*cells, *shares))), "|")
    return 0


if __name__ == "__main__":
    run_program(main)
