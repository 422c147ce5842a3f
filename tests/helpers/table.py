# SPDX-License-Identifier: Apache-2.0
"""A linear net in double precision and rollouts for it, to compare losses with definitions."""

import types

import torch

T, N = 7, 6  # unroll length, environments


class Table(torch.nn.Module):
    """A net in double precision whose answers are a linear function of frames [.., 3]."""

    observations = types.SimpleNamespace(size=0)  # no vectors to normalize

    def __init__(self, continuous=False):
        super().__init__()
        torch.manual_seed(0)
        self.continuous = continuous
        self.policy = torch.nn.Linear(3, 4, dtype=torch.float64)
        self.baseline = torch.nn.Linear(3, 1, dtype=torch.float64)
        self.register_buffer("kl_penalty", torch.ones((), dtype=torch.float64))

    def forward(self, inputs, agent_state):
        x = inputs["frame"]
        outputs = {"policy_logits": self.policy(x), "baseline": self.baseline(x).squeeze(-1)}
        return outputs, agent_state


def make_rows(model, seed=0):
    """Return rows [T + 1, N, ...] in float64, with ends and time limits everywhere, and answers."""
    random = torch.Generator().manual_seed(seed)
    rows = {
        "frame": torch.randn(T + 1, N, 3, generator=random, dtype=torch.float64),
        "reward": torch.randn(T + 1, N, generator=random, dtype=torch.float64),
        "done": torch.rand(T + 1, N, generator=random) < 0.2,
        "terminated": torch.zeros(T + 1, N, dtype=torch.bool),
        "truncated": torch.zeros(T + 1, N, dtype=torch.bool),
    }
    rows["truncated"][0, 0] = rows["truncated"][3, 1] = rows["truncated"][T, 2] = True
    rows["truncated"][T - 1, 3] = rows["terminated"][2, 4] = rows["terminated"][T, 5] = True
    rows["done"][1, 0] = rows["done"][4, 1] = rows["done"][T, 3] = rows["done"][3, 4] = True
    rows["done"] &= ~(rows["truncated"] | rows["terminated"])
    with torch.no_grad():
        outputs, _ = model(rows, ())
    for name, x in outputs.items():  # the answer to row t stands in row t + 1
        rows[name] = torch.cat([torch.full_like(x[:1], torch.nan), x[:-1]])
    if model.continuous:
        rows["action"] = torch.randn(T + 1, N, 2, generator=random, dtype=torch.float64)
    else:
        rows["action"] = torch.randint(4, (T + 1, N), generator=random)
    rows["last_action"] = rows["action"]
    return rows
