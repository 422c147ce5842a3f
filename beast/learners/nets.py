# SPDX-License-Identifier: Apache-2.0
"""Creating a net for an environment and checking that they fit; layers that programs share."""

import inspect
import logging

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from beast.envs.spaces import ACTION_MASK, count_actions, empty_actions, empty_observation
from beast.envs.spaces import check_discrete as check_discrete  # programs use it
from beast.errors import FlagError
from beast.learners import learner_group
from beast.learners.exchange import describe_net
from beast.learners.observations import FORBIDDEN, Observations  # programs use both
from beast.nest import map_nest
from libtorchbeast.rows import DTYPES

STORED = {"policy_version", "actor"}  # stored beside rows and outputs
MIN_SIZE = 36  # the fewest pixels each way that the convolutions for Atari take
T, B = 2, 3  # sample sizes; with T = B = 1 a transposed answer would pass


def sample_rows(observation_space, action_space):
    """Return rows [T, B, ...] as an environment with these spaces gives them, all zeros."""
    rows = {key: np.zeros(T * B, dtype) for key, dtype in DTYPES.items()}
    rows["frame"] = empty_observation(observation_space, T * B)
    rows["last_action"] = empty_actions(action_space, T * B)
    return map_nest(lambda a: torch.from_numpy(a).view(T, B, *a.shape[1:]), rows)


def create_net(net_class, observation_space, action_space, **arguments):
    """Return a net, and its answer to sample rows: rows, outputs, new state, with T and B as above.

    Args:
      net_class: called with the observation space, count_actions of the action space, and, by
        name, `arguments`.

    Raises:
      FlagError: the net cannot be created for these spaces, or its outputs have other shapes.
    """
    learner_group.current().check_same("environment", f"{observation_space}, {action_space}")
    num_actions = count_actions(action_space)
    where = f"{net_class.__name__} in {inspect.getfile(net_class)}"
    spaces = f"frames {observation_space} and {num_actions} actions"
    try:
        model = net_class(observation_space, num_actions, **arguments)
    except Exception as error:
        raise FlagError(
            f"{where} cannot be made for {spaces} ({type(error).__name__}: {error}): edit it, see "
            "docs/model.md"
        ) from (None if isinstance(error, ValueError) else error)
    if any(map(nn.parameter.is_lazy, [*model.parameters(), *model.buffers()])):
        raise FlagError(f"{where} has lazy layers, which take no weights of others: give sizes")
    rows = sample_rows(observation_space, action_space)
    mask = _find_mask(rows["frame"], action_space)
    if mask is not None:
        mask[..., 0] = 1  # action 0 alone is allowed
    try:
        with torch.no_grad():
            state = model.initial_state(B)
            outputs, new_state = model(rows, state)
    except Exception as error:
        raise FlagError(
            f"{where} cannot answer rows of T = {T}, B = {B} with {spaces} "
            f"({type(error).__name__}: {error}): edit it, see docs/model.md"
        ) from error
    if odd := [name for name, x in model.state_dict().items() if not torch.is_tensor(x)]:
        raise FlagError(f"{where} has {odd[0]}, which is no tensor, in its state: make it a buffer")
    _check_outputs(outputs, rows, action_space, where)
    _check_state(state, new_state, where)
    if mask is not None and (outputs["policy_logits"][..., 1:] > FORBIDDEN / 2).any():
        logging.warning("%s ignores the action_mask in observations: see docs/model.md", where)
    learner_group.current().check_same("net", describe_net(model))
    for module in model.modules():
        if isinstance(module, Observations):
            logging.info("An observation is %s", module.describe())
    if layers := {type(module).__name__ for module in model.modules() if _differs(module)}:
        logging.warning(
            "%s has %s: the policy that acts is then not the one that learns; use LayerNorm for "
            "BatchNorm, and no dropout",
            where, ", ".join(sorted(layers)),
        )  # fmt: skip
    return model, (rows, outputs, new_state)


def _differs(module):
    """Return whether a layer answers by chance or by the batch in training mode.

    Both acting and learning are in that mode.
    """
    dropout = getattr(module, "p" if isinstance(module, _DropoutNd) else "dropout", 0)
    return isinstance(module, _BatchNorm) or (isinstance(dropout, float) and dropout > 0)


def _find_mask(frame, action_space):
    """Return the mask of a frame; None: there is none, or none of Discrete actions."""
    mask = frame.get(ACTION_MASK) if isinstance(frame, dict) else None
    is_mask = isinstance(action_space, gym.spaces.Discrete) and torch.is_tensor(mask)
    return mask if is_mask and mask.shape == (T, B, action_space.n) else None


def _check_outputs(outputs, rows, action_space, where):
    num_actions = count_actions(action_space)
    if not isinstance(outputs, dict):
        raise FlagError(
            f"{where} should return a dict of outputs and a new state, but the first of them is a "
            f"{type(outputs).__name__}"
        )
    for name in ("action", "policy_logits", "baseline"):
        if name not in outputs:
            raise FlagError(f"the output of {where} has no {name!r}, only {sorted(outputs)}")
        if not isinstance(outputs[name], torch.Tensor):
            kind = type(outputs[name]).__name__
            raise FlagError(f"the output {name!r} of {where} should be a tensor, but is a {kind}")
    action, like = outputs["action"], rows["last_action"]
    if action.shape != like.shape or action.is_floating_point() != like.is_floating_point():
        raise FlagError(
            f"for rows of T = {T}, B = {B} {where} chooses actions {list(action.shape)} of "
            f"{action.dtype}, but the environment takes {list(like.shape)} of {like.dtype} "
            "([T, B, parts], without parts where actions are Discrete): edit the net and the "
            "losses (docs/environment.md)"
        )
    if outputs["baseline"].shape != (T, B):
        raise FlagError(
            f"for rows of T = {T}, B = {B} the baseline of {where} should have the shape "
            f"[{T}, {B}], but has {list(outputs['baseline'].shape)}"
        )
    logits = outputs["policy_logits"]
    is_discrete = isinstance(action_space, gym.spaces.Discrete)
    parts = (num_actions,) if is_discrete else logits.shape[2:]
    if logits.shape != (T, B, *parts) or logits.dim() < 3:
        raise FlagError(
            f"for rows of T = {T}, B = {B} the policy_logits of {where} should have the shape "
            f"[{T}, {B}, {num_actions if is_discrete else '...'}], but have {list(logits.shape)}"
        )
    taken = rows.keys() | STORED
    for name, output in outputs.items():  # all are stored beside the row
        if name in taken:
            raise FlagError(
                f"{where} has an output named {name!r}, which would replace the environment's: "
                f"rename it; taken are {', '.join(sorted(taken))}"
            )
        shape = getattr(output, "shape", ())
        if shape[:2] != (T, B):
            raise FlagError(
                f"for rows of T = {T}, B = {B} the output {name!r} of {where} should be a tensor "
                f"[{T}, {B}, ...], but is {list(shape) or type(output).__name__}: return only "
                "what is to be stored in rollouts"
            )


def _check_state(state, new_state, where):
    def check(before):
        if not isinstance(before, torch.Tensor) or before.dim() < 2 or before.shape[1] != B:
            raise FlagError(
                f"initial_state({B}) of {where} should return tensors [layers, {B}, ...], not "
                f"{list(getattr(before, 'shape', [])) or before}; () for no state"
            )

    def describe(x):
        return f"{list(x.shape)} {x.dtype}"

    def compare(before, after):  # states of new and old streams are joined
        if describe(before) != describe(after):
            raise FlagError(
                f"{where} returns a state {describe(after)}, but gets {describe(before)}"
            )

    map_nest(check, state)
    try:
        map_nest(compare, state, new_state)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        if isinstance(error, FlagError):
            raise
        raise FlagError(f"{where} returns a state unlike its initial_state: {error!r}") from None


class CenteredConv2d(nn.Conv2d):
    """Conv2d with zero-mean filters, which ignore uniform background.

    Most of a frame is background. Filters that respond to it spend the first updates on its
    brightness, and find a ball of two pixels only hundreds of thousands of steps later.
    """

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class HadamardConv2d(nn.Conv2d):
    """Conv2d whose halves are multiplied after layer norm and GELU.

    Hadamax (Kooi et al. 2025) without its max-pooling; out_channels / 2 come out. Nets with it
    learned two of MinAtar's games in fewer steps than with a ReLU (results/tricks). The norm takes
    away how bright an image is as a whole.
    """

    def forward(self, x):
        first, second = F.gelu(F.group_norm(super().forward(x), 2)).chunk(2, dim=1)
        return first * second


def initialize(layers, gain):
    """Draw orthogonal weights for the convolutions and linear layers among `layers`; return all."""
    for layer in layers:
        if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Linear)):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
    return layers


class Trunk(nn.Module):
    """From observations to features: convolutions for images, a perceptron for the vector.

    Args:
      observations: an Observations, by which `forward` gets its arguments.
      conv: called with the number of channels; returns convolutions for images of MIN_SIZE pixels
        and more each way. Smaller ones, such as MinAtar's, get one HadamardConv2d.
      num_features: of a large image; others have 128, vectors 64.

    Attributes:
      size: features in all.
      has_large_images: whether `conv` was called.
    """

    def __init__(self, observations, conv, num_features=512):
        super().__init__()
        self.convs, self.layers, self.size = nn.ModuleList(), nn.ModuleList(), 0
        self.has_large_images = False
        for image in observations.images:
            is_large = min(image.height, image.width) >= MIN_SIZE
            self.has_large_images |= is_large
            layers = conv(image.channels) if is_large else small_conv(image.channels)
            with torch.no_grad():
                size = layers(torch.zeros(1, *image[:3])).numel()
            self.convs.append(layers)
            self.layers.append(nn.Linear(size, num_features if is_large else 128))
            self.size += self.layers[-1].out_features
        initialize([*self.convs.modules(), *self.layers], 2**0.5)
        self.perceptron = None
        if observations.size:
            layers = nn.Linear(observations.size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()
            self.perceptron = nn.Sequential(*initialize(layers, 2**0.5))
            self.size += 64

    def forward(self, images, vector):
        """Return features [N, size]."""
        features = []
        for conv, layer, x in zip(self.convs, self.layers, images, strict=True):
            x = conv(x).permute(0, 2, 3, 1)  # as it lies in memory: no copy, and none backward
            features.append(F.relu(layer(x.flatten(1))))
        if self.perceptron is not None:
            features.append(self.perceptron(vector))
        return features[0] if len(features) == 1 else torch.cat(features, dim=1)


def shallow_conv(num_channels):
    """Return the convolutions of DQN (Mnih et al. 2015), the first one with zero-mean filters."""
    return nn.Sequential(
        CenteredConv2d(num_channels, 32, kernel_size=8, stride=4),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, kernel_size=4, stride=2),
        nn.ReLU(inplace=True),
        nn.Conv2d(64, 64, kernel_size=3, stride=1),
        nn.ReLU(inplace=True),
    )


def small_conv(num_channels):
    return HadamardConv2d(num_channels, 32, kernel_size=3)
