# SPDX-License-Identifier: Apache-2.0
"""Batches as a learner gets them, in which everything happens."""

import gymnasium as gym
import numpy as np
import torch

SPACE, A = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), 6


def make_batch(seed, T=7, B=3):
    """Return a batch in which everything happens: ends of episodes of all kinds, large rewards."""
    torch.manual_seed(seed)
    end = torch.randint(8, (T + 1, B))
    return {
        "frame": torch.randint(256, (T + 1, B, *SPACE.shape), dtype=torch.uint8),
        "reward": 3 * torch.randn(T + 1, B),
        "done": end == 0,
        "truncated": end == 1,
        "terminated": end == 2,
        "last_action": torch.randint(A, (T + 1, B)),
        "action": torch.randint(A, (T + 1, B)),
        "policy_logits": torch.randn(T + 1, B, A),
    }
