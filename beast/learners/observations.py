# SPDX-License-Identifier: Apache-2.0
"""Split observations into images, vectors and action masks."""

import math
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from beast.envs.spaces import ACTION_MASK, leaves
from beast.nest import leaves_of

LARGEST_PIXEL = 2**16 - 1  # beyond it, bounds say what a dtype can hold, not what pixels are
MIN_SIDE = 3  # pixels that a convolution needs
FORBIDDEN = -1e9  # a logit: its probability is 0, and no product with it is NaN


class Image(NamedTuple):
    channels: int
    height: int
    width: int
    is_channels_last: bool  # [H, W, C], not [C, H, W]
    scale: float  # the largest absolute value of a pixel


def find_image(space, channels_last=None):
    """Return the Image that observations of a space are; None where they are none.

    Images are Boxes of three dimensions, of integers, bools, or floats that have bounds, with at
    least MIN_SIDE pixels each way. If the middle side equals one of the others, the third is the
    channels; if all are equal, the last, as in Gymnasium and MinAtar. Otherwise it is the first or
    last side, if that is clearly the shortest. Floats of any other shape are no image.

    Args:
      channels_last: whether an image is [H, W, C], if its shape does not show it.

    Raises:
      ValueError: the space does not show whether it is an image, where the channels are, or how
        large pixels can be.
    """
    if not isinstance(space, gym.spaces.Box) or 0 in space.shape:
        return None
    is_float, sides = space.dtype.kind == "f", space.shape
    if len(sides) in (2, 4) and sum(side >= 36 for side in sides) > 1 and not is_float:
        raise ValueError(
            f"{space} may be an image or a stack of some: give it three dimensions, or one, by "
            "gymnasium.wrappers.ReshapeObservation in create_env"
        )
    if len(sides) != 3 or min(sides[1], max(sides[0], sides[2])) < MIN_SIDE:
        return None
    first, middle, last = sides
    end, other = sorted((first, last))
    if middle in (first, last):
        channels_last = middle == first
    elif end < middle and (end <= 4 < other or 2 * end <= min(middle, other)):
        channels_last = last == end
    elif channels_last is None and is_float:
        return None
    elif channels_last is None:
        raise ValueError(
            f"the channels of {space} may be first or last: in the net, write "
            "nets.Observations(observation_space, channels_last=True), or False"
        )
    channels, *size = (last, first, middle) if channels_last else sides
    if min(size) < MIN_SIDE:
        return None
    scale = _largest(space)
    if scale <= LARGEST_PIXEL:
        return Image(channels, *size, channels_last, scale or 1.0)
    if is_float:
        return None
    raise ValueError(
        f"the pixels of {space} may be as large as {scale:.3g}, so their scale is not known: "
        "give the Box the bounds of what it holds"
    )


def scale_image(x, image):
    """Return images [N, ...] as [N, C, H, W], at most 1, in the dtype of the convolutions.

    Args:
      image: of find_image.
    """
    if image.is_channels_last:
        x = x.movedim(-1, 1)
    if torch.is_autocast_enabled(x.device.type):  # one cast instead of two, by way of float32
        x = x.to(torch.get_autocast_dtype(x.device.type))
    elif x.dtype != torch.uint8:  # a copy of uint8 is smaller
        x = x.float()
    return x.contiguous(memory_format=torch.channels_last) / image.scale


class Observations(nn.Module):
    """Splits observations into images, a vector of all other numbers, and a mask of actions.

    Args:
      space: a Box, Discrete, MultiDiscrete or MultiBinary, or a Dict or Tuple of them. The numbers
        of a part "action_mask" of a Dict are no input: where one is 0, that action is forbidden.
      channels_last: as of find_image.

    Attributes:
      images: an Image for each part that find_image takes for one.
      size: numbers of the vector, in which Discrete and MultiDiscrete parts are one-hot; 0: there
        is no vector.
    """

    def __init__(self, space, channels_last=None):
        super().__init__()
        self.has_mask = isinstance(space, gym.spaces.Dict) and ACTION_MASK in space.spaces
        self.images, self._image_paths, self._paths, others = [], [], [], []
        for path, part in leaves(space):
            if path == (ACTION_MASK,):
                continue
            try:
                image = find_image(part, channels_last)
            except ValueError as error:
                if not path:
                    raise
                name = "".join(f"[{key!r}]" for key in path)
                advice = "leave it out, by --observation_keys, or make it another one in create_env"
                raise ValueError(f"observation{name}: {error}; or {advice}") from None
            if image is not None:
                self.images.append(image)
                self._image_paths.append(path)
            else:
                others.append(part)
                self._paths.append(path)
        self.one_hot = OneHot(gym.spaces.Tuple(others))
        self.size = self.one_hot.size
        if not self.images and not self.size:
            raise ValueError(f"there is nothing to observe in {space}")

    def forward(self, frame):
        """Return images, a list of [N, C, H, W], and vectors [N, size], or None.

        Args:
          frame: a nest of [N, ...].
        """
        paths = zip(self._image_paths, self.images, strict=True)
        images = [scale_image(_get(frame, path), image) for path, image in paths]
        return images, self.vector(frame) if self.size else None

    def vector(self, frame):
        """Return vectors [N, size] of a nest of [N, ...]."""
        return self.one_hot(tuple(_get(frame, path) for path in self._paths))

    def mask(self, logits, frame):
        """Return logits [..., A], or values, in which those of forbidden actions are FORBIDDEN.

        An observation that forbids all actions forbids none.
        """
        allowed = self.allowed(frame)
        return logits if allowed is None else torch.where(allowed, logits, FORBIDDEN)

    def allowed(self, frame):
        """Return bools [..., A] of a nest of [..., A]; None: there is no mask."""
        if not self.has_mask:
            return None
        mask = frame[ACTION_MASK] != 0
        return mask | ~mask.any(dim=-1, keepdim=True)

    def describe(self):
        """Return in words how observations are taken, for the log."""
        parts = [
            f"an image{_name([path])} of {image.height} x {image.width} pixels with "
            f"{image.channels} channels {'last' if image.is_channels_last else 'first'}, divided "
            f"by {image.scale:g}"
            for path, image in zip(self._image_paths, self.images, strict=True)
        ]
        parts += [f"a vector{_name(self._paths)} of {self.size} numbers"] if self.size else []
        parts += ["a mask of actions"] if self.has_mask else []
        return ", ".join(parts)


def _largest(box):
    """Return the largest absolute value that a Box holds."""
    return float(max(np.abs(bound.astype(np.float64)).max() for bound in (box.low, box.high)))


def _name(paths):
    """Return the parts of a nest in words; nothing where there is but one."""
    names = ["".join(f"[{key!r}]" for key in path) for path in paths]
    return f" ({', '.join(names)})" if any(names) else ""


def _get(nest, path):
    for key in path:
        nest = nest[key]
    return nest


class OneHot(nn.Module):
    """Turns observations into vectors, in which Discrete and MultiDiscrete ones are one-hot.

    Each integer of a Box is divided by its largest value, unless that is above LARGEST_PIXEL.

    Attributes:
      size: of a vector.
    """

    def __init__(self, space):
        super().__init__()
        numbers = list(_choices(space))
        widths = torch.tensor([n or 1 for n, _ in numbers], dtype=torch.int64)
        starts = torch.tensor([start for _, start in numbers], dtype=torch.float64)
        first = (widths.cumsum(0) - widths).repeat_interleave(widths)
        self.size = len(first)
        columns = torch.arange(len(numbers)).repeat_interleave(widths)
        values = torch.arange(self.size) - first + starts[columns]
        # Of each element of a vector: the number that it is made of, and the value that it marks.
        self.register_buffer("columns", columns, persistent=False)
        self.register_buffer("values", values, persistent=False)
        is_choice = torch.tensor([n > 0 for n, _ in numbers], dtype=torch.bool)[columns]
        self.register_buffer("is_choice", is_choice, persistent=False)
        self._has_choices = bool(is_choice.any())
        scales = torch.tensor(list(_scales(space)), dtype=torch.float64)[columns]
        self.register_buffer("scales", scales, persistent=False)
        self._has_scales = bool((scales != 1).any())

    def forward(self, frame):
        """Return floats [N, size] of a nest of [N, ...]."""
        # Integers as float64, which is exact.
        parts = [x if x.is_floating_point() else x.double() for x in leaves_of(frame)]
        x = torch.cat([x.reshape(len(x), math.prod(x.shape[1:])) for x in parts], dim=1)
        if self._has_choices:
            x = x[:, self.columns]
            x = torch.where(self.is_choice, (x == self.values).to(x.dtype), x)
        if self._has_scales:
            x = x / self.scales
        return x.float()


def _scales(space):
    """Yield what each number of an observation is divided by."""
    for _, part in leaves(space):
        if isinstance(part, gym.spaces.Box) and part.dtype.kind in "iu":
            low, high = (abs(bound.astype(np.float64)).ravel() for bound in (part.low, part.high))
            largest = np.maximum(low, high).tolist()
            yield from (x if 0 < x <= LARGEST_PIXEL else 1.0 for x in largest)
        else:
            yield from [1.0] * math.prod(part.shape)


def _choices(space):
    """Yield, for each number of an observation, its number of values and the least value.

    Both are 0 for numbers that are not categorical, such as those of a Box.
    """
    for _, part in leaves(space):
        if isinstance(part, gym.spaces.Discrete):
            yield int(part.n), int(part.start)
        elif isinstance(part, gym.spaces.MultiDiscrete):
            yield from zip(part.nvec.flatten().tolist(), part.start.flatten().tolist(), strict=True)
        else:
            yield from [(0, 0)] * math.prod(part.shape)
