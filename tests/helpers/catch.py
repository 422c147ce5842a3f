# SPDX-License-Identifier: Apache-2.0
"""A MonoBeast fork that learns the tiny environments of catch_env.py.

    python tests/helpers/catch.py --env Catch --savedir /tmp/runs

As any fork would, it replaces create_env and Net and leaves the rest alone.
"""

import pathlib
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))

from catch_env import Catch, Counter, Echo, Failing, create_env  # noqa: F401 - tests use them

import monobeast
from beast.actors import actors
from beast.runs import run as beast_run


class Net(nn.Module):
    def __init__(self, observation_space, num_actions, use_lstm=False):
        super().__init__()
        self.fc = nn.Linear(int(np.prod(observation_space.shape)), 64)
        # In channels_last, as MonoBeast's are: several learners must keep this memory layout.
        self.conv = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.lstm = nn.LSTM(64, 64) if use_lstm else None
        self.policy = nn.Linear(64, num_actions)
        self.baseline = nn.Linear(64, 1)

    def initial_state(self, batch_size):
        if self.lstm is None:
            return ()
        return tuple(torch.zeros(1, batch_size, 64) for _ in range(2))

    def forward(self, inputs, agent_state):
        x = F.relu(self.fc(inputs["frame"].flatten(2).float()))
        x = x + self.conv(x.reshape(-1, 4, 4, 4)).reshape(x.shape)
        if self.lstm is not None:
            outputs = []
            for x_t, done in zip(x, inputs["done"], strict=True):
                agent_state = tuple(s * (~done)[None, :, None] for s in agent_state)
                output, agent_state = self.lstm(x_t[None], agent_state)
                outputs.append(output)
            x = torch.cat(outputs)
        policy_logits = self.policy(x)
        if self.training:
            action = torch.distributions.Categorical(logits=policy_logits).sample()
        else:
            action = policy_logits.argmax(-1)
        return {
            "policy_logits": policy_logits,
            "baseline": self.baseline(x).squeeze(-1),
            "action": action,
        }, agent_state


def act(*args):
    """Be an actor of this fork: a process that is to run this function imports this file first."""
    _act(*args)


MonoNet, _act = monobeast.Net, monobeast.act
monobeast.create_env = create_env
monobeast.Net = Net
monobeast.act = act
beast_run.LOG_INTERVAL = 0.5
actors.PAUSES = (0, 0.1)

if __name__ == "__main__":
    monobeast.run_program(monobeast.main)
