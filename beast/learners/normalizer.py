# SPDX-License-Identifier: Apache-2.0
"""Modules that turn observations into vectors and normalize them, and scale rewards."""

import math

import gymnasium as gym
import torch
from torch import nn

from beast.nest import map_nest


class Normalizer(nn.Module):
    """Shifts and scales inputs to mean 0 and standard deviation 1, those of what `update` got.

    The moments are merged as in Chan, Golub and LeVeque 1979, in double precision, so that a
    large mean costs no digits.

    Args:
      size: of the last dimension of inputs.
      limit: results are clipped to [-limit, limit].
      encode: a module that encodes what `update` and `forward` get; None: no encoding.
    """

    def __init__(self, size, limit=5.0, encode=None):
        super().__init__()
        self._limit = limit
        self._encode = encode or nn.Identity()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("square_sum", torch.zeros(size, dtype=torch.float64))

    @torch.no_grad()
    def update(self, x):
        """Count more inputs, [number, size]."""
        number, x = len(x), self._encode(x).double()
        if number == 0:
            return
        mean = x.mean(0)
        difference, count = mean - self.mean, self.count + number
        self.square_sum += (x - mean).square().sum(0)
        self.square_sum += difference.square() * self.count * number / count
        self.mean += difference * number / count
        self.count.copy_(count)

    def std(self):
        """Return the standard deviations, [size]: a sample's, 1 before there are two inputs."""
        variance = self.square_sum / (self.count - 1).clamp(min=1)
        return torch.where(self.count > 1, (variance + 1e-4).sqrt() + 1e-8, 1.0)

    def forward(self, x):
        """Return [..., size], normalized."""
        x = self._encode(x)
        x = (x - self.mean.to(x.dtype)) / self.std().to(x.dtype)
        return x.clamp(-self._limit, self._limit)


class RewardScaler(nn.Module):
    """Divides rewards by the standard deviation of discounted returns up to each step.

    In double precision, since sums of large rewards may overflow float32.
    """

    def __init__(self, limit=10.0):
        super().__init__()
        self._limit = limit
        self.returns = Normalizer(1)
        self._return = torch.zeros(())  # of each environment so far, from one call to the next

    @torch.no_grad()
    def forward(self, rewards, done, mask, discounting):
        """Count a rollout and return its rewards, scaled and clipped.

        Args:
          rewards, done: [T, N], of the row that each transition enters.
          mask: [T, N]; transitions where it is false do not count.
        """
        x, returns = rewards.double(), []
        current = self._return.to(x)
        if current.shape != rewards.shape[1:]:
            current = torch.zeros_like(x[0])
        for reward, ends in zip(x, done, strict=True):
            returns.append(reward + discounting * current)
            current = torch.where(ends, 0, returns[-1])
        self._return = current
        self.returns.update(torch.stack(returns)[mask].unsqueeze(1))
        return (x / self.returns.std()).clamp(-self._limit, self._limit).to(rewards.dtype)


def flatten(frame):
    """Return a nest of [N, ...] as floats [N, numbers]; integers as float64, which is exact."""
    parts = []
    map_nest(lambda x: parts.append(x if x.is_floating_point() else x.double()), frame)
    return torch.cat([x.reshape(len(x), math.prod(x.shape[1:])) for x in parts], dim=1)


class OneHot(nn.Module):
    """Turns observations into vectors, in which Discrete and MultiDiscrete ones are one-hot.

    Attributes:
      size: of a vector.
    """

    def __init__(self, space):
        super().__init__()
        numbers = list(_choices(space))
        widths = torch.tensor([n or 1 for n, _ in numbers])
        starts = torch.tensor([start for _, start in numbers], dtype=torch.float64)
        first = (widths.cumsum(0) - widths).repeat_interleave(widths)
        self.size = len(first)
        columns = torch.arange(len(numbers)).repeat_interleave(widths)
        values = torch.arange(self.size) - first + starts[columns]
        # Of each element of a vector: the number that it is made of, and the value that it marks.
        self.register_buffer("columns", columns, persistent=False)
        self.register_buffer("values", values, persistent=False)
        is_choice = torch.tensor([n > 0 for n, _ in numbers])[columns]
        self.register_buffer("is_choice", is_choice, persistent=False)
        self._has_choices = bool(is_choice.any())

    def forward(self, frame):
        """Return floats [N, size] of a nest of [N, ...], or of what `flatten` has made of one."""
        x = flatten(frame)
        if self._has_choices:
            x = x[:, self.columns]
            x = torch.where(self.is_choice, (x == self.values).to(x.dtype), x)
        return x.float()


def _choices(space):
    """Yield, for each number of an observation, its number of values and the least value.

    Both are 0 for numbers that are not categorical, such as those of a Box.
    """
    if isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
        parts = space.spaces
        for part in parts.values() if isinstance(parts, dict) else parts:
            yield from _choices(part)
    elif isinstance(space, gym.spaces.Discrete):
        yield int(space.n), int(space.start)
    elif isinstance(space, gym.spaces.MultiDiscrete):
        yield from zip(space.nvec.flatten().tolist(), space.start.flatten().tolist(), strict=True)
    else:
        yield from [(0, 0)] * math.prod(space.shape)
