# SPDX-License-Identifier: Apache-2.0
"""Creating a net for an environment and checking that they fit; image formats; shared layers."""

import inspect
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from beast.envs.spaces import count_actions, empty_actions, empty_observation
from beast.errors import FlagError
from beast.learners import learner_group
from beast.learners.exchange import describe_net
from beast.nest import map_nest
from libtorchbeast.rows import DTYPES

STORED = {"policy_version", "actor"}  # stored beside rows and outputs
LARGEST_PIXEL = 2**16 - 1  # beyond it, bounds say what a dtype can hold, not what pixels are
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
        ) from error
    rows = sample_rows(observation_space, action_space)
    try:
        with torch.no_grad():
            state = model.initial_state(B)
            outputs, new_state = model(rows, state)
    except Exception as error:
        raise FlagError(
            f"{where} cannot answer rows of T = {T}, B = {B} with {spaces} "
            f"({type(error).__name__}: {error}): edit it, see docs/model.md"
        ) from error
    _check_outputs(outputs, rows, action_space, where)
    _check_state(state, new_state, where)
    learner_group.current().check_same("net", describe_net(model))
    return model, (rows, outputs, new_state)


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

    def compare(before, after):
        if before.shape != after.shape:
            raise FlagError(
                f"{where} returns a state of shape {list(after.shape)}, but gets "
                f"{list(before.shape)}"
            )

    map_nest(check, state)
    try:
        map_nest(compare, state, new_state)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        if isinstance(error, FlagError):
            raise
        raise FlagError(f"{where} returns a state unlike its initial_state: {error!r}") from None


class Image(NamedTuple):
    channels: int
    height: int
    width: int
    is_channels_last: bool  # [H, W, C], not [C, H, W]
    scale: float  # the largest absolute value of a pixel


def may_be_image(space):
    """Return whether a space is a Box of integers or bools of three dimensions."""
    if not isinstance(space, gym.spaces.Box) or len(space.shape) != 3:
        return False
    return space.dtype.kind in "biu" and 0 not in space.shape


def find_image(space, channels_last=None):
    """Return the Image that observations of a space are; None where they are none.

    Images are Boxes of integers or bools of three dimensions. If two sides are equal, the third
    is the channels; if all are equal, the last, as in Gymnasium and MinAtar. Otherwise it is
    the first or last side, if that is clearly the shortest.

    Args:
      channels_last: whether an image is [H, W, C], if its shape does not show it.

    Raises:
      ValueError: the space does not show where the channels are, or how large pixels can be.
    """
    if not may_be_image(space):
        return None
    first, middle, last = space.shape
    end, other = sorted((first, last))
    if channels_last is None:
        if middle in (first, last):
            channels_last = middle == first
        elif end < middle and (end <= 4 < other or 2 * end <= min(middle, other)):
            channels_last = last == end
        else:
            raise ValueError(
                f"the channels of {space} may be first or last: in the net, call "
                "find_image(observation_space, channels_last=True), or False"
            )
    scale = max(np.abs(bound.astype(np.float64)).max() for bound in (space.low, space.high))
    if scale > LARGEST_PIXEL:
        raise ValueError(
            f"the pixels of {space} may be as large as {scale:.3g}, so their scale is not known: "
            "give the Box the bounds of what it holds"
        )
    channels, *size = (last, first, middle) if channels_last else space.shape
    return Image(channels, *size, channels_last, float(scale) or 1.0)


def scale_image(x, image=None):
    """Return images [N, ...] as [N, C, H, W], at most 1, in the dtype of the convolutions.

    Args:
      image: of find_image; by default derived from x's shape and dtype.
    """
    if image is None:
        dtype = torch.empty(0, dtype=x.dtype).numpy().dtype
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        image = find_image(gym.spaces.Box(low, high, tuple(x.shape[1:]), dtype))
    if image.is_channels_last:
        x = x.movedim(-1, 1)
    if torch.is_autocast_enabled(x.device.type):  # one cast instead of two, by way of float32
        x = x.to(torch.get_autocast_dtype(x.device.type))
    elif x.dtype != torch.uint8:  # a copy of uint8 is smaller
        x = x.float()
    return x.contiguous(memory_format=torch.channels_last) / image.scale


class CenteredConv2d(nn.Conv2d):
    """Conv2d with zero-mean filters, which ignore uniform background.

    Most of a frame is background. Filters that respond to it spend the first updates on its
    brightness, and find a ball of two pixels only hundreds of thousands of steps later.
    """

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


def initialize(layers, gain):
    """Draw orthogonal weights for the convolutions and linear layers among `layers`; return all."""
    for layer in layers:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
    return layers


def image_trunk(image):
    """Return convolutions for images [C, H, W], an Image, and their number of features."""
    sample = torch.zeros(1, image.channels, image.height, image.width)
    if min(image.height, image.width) >= 36:
        layers, num_features = [(image.channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)], 512
    else:  # MinAtar's 10 x 10
        layers, num_features = [(image.channels, 16, 3, 1)], 128
    trunk = nn.Sequential()
    for num_inputs, num_filters, width, stride in layers:
        conv = CenteredConv2d if len(layers) > 1 and not len(trunk) else nn.Conv2d
        trunk.extend([conv(num_inputs, num_filters, width, stride), nn.ReLU(inplace=True)])
    trunk.append(nn.Flatten())
    trunk.extend([nn.Linear(trunk(sample).shape[1], num_features), nn.ReLU(inplace=True)])
    return initialize(trunk, 2**0.5), num_features


def vector_trunk(num_inputs):
    """Return a perceptron for vectors [num_inputs], with 64 features."""
    layers = nn.Linear(num_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()
    return initialize(nn.Sequential(*layers), 2**0.5)
