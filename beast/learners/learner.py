# SPDX-License-Identifier: Apache-2.0
"""The learner: its batches, the state that its threads change, and the lock that guards it."""

import contextlib
import logging
import threading
import warnings
from typing import NamedTuple

import torch
from torch.optim.lr_scheduler import LambdaLR

from beast.errors import FlagError
from beast.learners import learner_group
from beast.nest import leaves_of, map_nest

SMALLEST_SQUARE = 1e-36  # lower bound that raise_squares sets


class Batch(NamedTuple):
    """Rollouts to learn from, with their lags and sources."""

    rows: dict  # nests of tensors [T + 1, B, ...], on the learner's device
    # Before row 0, a nest of tensors [layers, B, ...], there too; of `collect` a pair: before row 0
    # and before row T.
    agent_state: tuple
    cpu_rows: dict  # the same rows on the CPU
    policy_versions: list  # B numbers: of the weights that acted
    sources: dict  # the actors or streams that made them, for messages


class Learner:
    """Model, optimizer, schedule, counts and published weights.

    Args:
      model: on its device.
      optimizer: one, or a dict of several by their names.
      decay: function from agent steps to a factor of all learning rates.
      weights: SharedWeights, LocalWeights or Version, into which new weights are published.
      num_threads: of PyTorch, in each of the learner's threads.

    Raises:
      FlagError: an optimizer has parameters that are not the model's.

    Attributes:
      scheduler: of the optimizer, or a dict of those of several.
      group: of learners of the same policy, this one among them.
      lock: reentrant; held while any of this state is changed or copied.
      hold: returns a context manager, to enter before the lock is taken to save the state: it stops
        other processes that change it, as gala.py's agents do. By default it does nothing.
      stats: dict of step (agent steps learned from), episode_returns and game_returns (of the last
        100), skipped_updates and skipped_in_a_row.
    """

    def __init__(self, model, optimizer, decay, weights, num_threads=1):
        if not callable(decay):
            raise FlagError(
                f"create_optimizer has returned a {type(decay).__name__} as schedule: return a "
                "function from agent steps to a factor of the learning rate"
            )
        _check_parameters(model, leaves_of(optimizer))
        self.lock, self.hold = threading.RLock(), contextlib.nullcontext
        self.model, self.optimizer, self.weights = model, optimizer, weights
        self.group = learner_group.current()
        self.num_threads = num_threads
        self.device = next(model.parameters()).device
        self.stats = {"step": 0, "episode_returns": [], "game_returns": []}
        self.stats |= {"skipped_updates": 0, "skipped_in_a_row": 0}
        # A skipped update, a replay that fills, or optimizers of each agent: that is no mistake.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")

        def factor(_):
            return float(decay(self.step))  # NumPy's numbers are refused by checkpoints

        self.scheduler = map_nest(lambda o: LambdaLR(o, factor), optimizer)
        if self.device.type == "cpu":
            for one in leaves_of(optimizer):
                raise_squares(one)

    @property
    def step(self):
        return self.stats["step"]

    @property
    def learning_rate(self):
        """The learning rate of the optimizer, or of the first of several."""
        return next(leaves_of(self.optimizer)).param_groups[0]["lr"]

    @property
    def optimizer_name(self):
        """The name of the optimizer's class, or a dict of those of several."""
        return map_nest(lambda o: type(o).__name__, self.optimizer)

    def count(self, steps, episode_returns, game_returns):
        """Count an update: its agent steps, and the returns of what ended in its batch."""
        self.stats["step"] += int(steps)
        for one in leaves_of(self.scheduler):
            one.step()
        for name, returns in (("episode_returns", episode_returns), ("game_returns", game_returns)):
            self.stats[name] = (self.stats[name] + returns)[-100:]

    def state(self):
        """Return the state for another learner of the same policy: tensors and plain values."""
        state = {"parts": map_nest(lambda x: x.state_dict(), self._parts), "stats": self.stats}
        return state | {"buffers": list(self.model.buffers())}  # also those that are not saved

    def load_state(self, state):
        map_nest(lambda x, own: x.load_state_dict(own), self._parts, tuple(state["parts"]))
        for buffer, own in zip(self.model.buffers(), state["buffers"], strict=True):
            buffer.copy_(own)
        self.stats.update(state["stats"])

    @property
    def _parts(self):
        return self.model, self.optimizer, self.scheduler

    def publish(self):
        self.weights.publish(self.model)


def _check_parameters(model, optimizers):
    left = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    known = set(map(id, model.parameters()))
    for optimizer in optimizers:
        parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if parameters - known:
            raise FlagError(
                f"create_optimizer's {type(optimizer).__name__} has parameters that are not of "
                f"{type(model).__name__}, so they would not be saved, clipped or shared: make "
                "their module an attribute of the net (docs/loss.md)"
            )
        left = {one: name for one, name in left.items() if one not in parameters}
    if left:
        names = ", ".join(list(left.values())[:3]) + ", ..." * (len(left) > 3)
        logging.warning(f"No optimizer has {names}: such parameters of the net are not learned")


def create_state(optimizer):
    """Create an optimizer's state, which torch would create at the first step.

    Raises:
      FlagError: the state does not begin with zeros, so it depends on the first step.
    """
    if optimizer.state:  # the optimizer has created its state already
        return
    kept = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group.update({"weight_decay": 0.0} if "weight_decay" in group else {})
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # all gradients are 0, so no parameter changes
    optimizer.zero_grad()
    for group, before in zip(optimizer.param_groups, kept, strict=True):
        group.update(before)
    begins_otherwise = any(group.get("dampening") for group in kept)
    for state in optimizer.state.values():
        for name, tensor in state.items():
            if torch.is_tensor(tensor):
                begins_otherwise |= name != "step" and bool((tensor.abs() > SMALLEST_SQUARE).any())
                tensor.zero_()
    if begins_otherwise:
        raise FlagError(
            f"the state of {type(optimizer).__name__} does not begin with zeros, so agents cannot "
            "share it: choose another optimizer, as RMSprop, Adam, or SGD without dampening"
        )


def raise_squares(optimizer):
    """Clamp the mean squares of RMSProp or Adam to 1e-36: roots of smaller numbers are slow.

    Those of a dead unit decay to denormal numbers, with which a step takes up to 7 times as long
    (benchmarks/README.md). This changes no weight, since any epsilon is far larger.
    """

    def raise_them(optimizer, *_):
        names = "square_avg", "exp_avg_sq"
        squares = [s[name] for s in optimizer.state.values() for name in names if name in s]
        if squares:
            torch._foreach_clamp_min_(squares, SMALLEST_SQUARE)

    optimizer.register_step_post_hook(raise_them)
