# SPDX-License-Identifier: Apache-2.0
"""Modules that normalize vectors and scale rewards."""

import torch
from torch import nn


class Normalizer(nn.Module):
    """Shifts and scales inputs to mean 0 and standard deviation 1, and clips them to [-5, 5].

    Mean and deviation are those of what `update` got.

    1e-4 is added to variances, so results' deviation is 0.7 where that of inputs is 0.01, and 0.1
    where it is 0.001.

    The moments are merged as in Chan, Golub and LeVeque 1979, in double precision, so that a
    large mean costs no digits.

    Args:
      size: of the last dimension of inputs.
    """

    def __init__(self, size):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("square_sum", torch.zeros(size, dtype=torch.float64))

    @torch.no_grad()
    def update(self, x):
        """Count more inputs, [number, size]."""
        number, x = len(x), x.double()
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
        x = (x - self.mean.to(x.dtype)) / self.std().to(x.dtype)
        return x.clamp(-5, 5)


class RewardScaler(nn.Module):
    """Divides rewards by the standard deviation of discounted returns up to each step.

    In double precision, since sums of large rewards may overflow float32.
    """

    def __init__(self):
        super().__init__()
        self.returns = Normalizer(1)
        self._return = torch.zeros(())  # of each environment so far, from one call to the next

    @torch.no_grad()
    def forward(self, rewards, done, mask, discounting):
        """Count a rollout and return its rewards, scaled and clipped to [-10, 10].

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
        return (x / self.returns.std()).clamp(-10, 10).to(rewards.dtype)
