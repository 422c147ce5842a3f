# SPDX-License-Identifier: Apache-2.0
"""A small learner and the flags of a run, for tests that need no whole program."""

import torch

from beast import flags as common
from beast.actors.weights import LocalWeights
from beast.flags import parse_flags
from beast.learners.learner import Batch, Learner
from beast.runs import checkpoint
from beast.runs.checkpoint_writer import Writer

T, B = 2, 3
UPDATE = {"steps": 100.0, "total_loss": 0.5}


def create_parser(program="program.py"):
    parser = common.create_parser(program, "A program.")
    parser.add_argument("--total_steps", default=1000, type=int)
    parser.add_argument("--learning_rate", default=0.5, type=float)
    parser.add_argument("--use_lstm", action="store_true")
    parser.add_argument("--frame_skip", default=4, type=int)
    return parser


def parse(savedir, arguments="--xpid run", parser=None):
    return parse_flags(
        parser or create_parser(), [*arguments.split(), "--savedir", str(savedir), "--seed", "1"]
    )


def create_learner(flags, num_updates=0, size=3, model=None):
    """Return a Learner that has learned from 100 steps an update."""
    model = model or torch.nn.Linear(size, 1)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=flags.learning_rate)
    decay = lambda step: 1 - step / flags.total_steps  # noqa: E731
    learner = Learner(model, optimizer, decay, LocalWeights(model))
    for _ in range(num_updates):
        update(learner)
    return learner


def update(learner, game_returns=()):
    learner.optimizer.zero_grad()
    learner.model(torch.randn(4, 3)).square().sum().backward()
    learner.optimizer.step()
    learner.count(100, [], list(game_returns))


def create_batch(policy_version=1, **rows):
    """Return a Batch of [T + 1, B] rows in which nothing ends, but for those given."""
    ends = dict.fromkeys(("done", "game_done"), torch.zeros(T + 1, B, dtype=torch.bool))
    returns = dict.fromkeys(("episode_return", "game_return"), torch.zeros(T + 1, B))
    rows = ends | returns | rows
    return Batch(rows, (), rows, [policy_version] * B, {"actors": [0]})


def record(run, update=UPDATE, batch=None):
    """Record an update as a program does."""
    with run._learner.lock:
        run._learner.publish()
        run.record(update, batch or create_batch(run._learner.weights.version - 1))


def save(flags, num_updates=2):
    """Write a checkpoint of a run that has learned; return its learner."""
    learner = create_learner(flags, num_updates)
    checkpoint.run_path(flags).mkdir(parents=True, exist_ok=True)
    Writer(flags, learner).save(learner)
    return learner


def change(path, *keys, to):
    """Save a checkpoint anew, with another value at these keys."""
    content = part = torch.load(path, weights_only=True)
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = to
    torch.save(content, path)
