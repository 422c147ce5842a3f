# SPDX-License-Identifier: Apache-2.0
"""The nets of several agents as one module."""

import copy

import torch

LOWEST = torch.finfo(torch.float32).min  # finite, or checkpoints may be refused


class Population(torch.nn.Module):
    """The nets of several agents, of which one answers: `agent`, or that with the best returns.

    Args:
      net: with which all agents begin.

    Attributes:
      agents: copies of it.
      agent: the number of the one that answers.
      returns: [agents], the mean of the last games of each; the lowest number before the first.
    """

    def __init__(self, net, num_agents, agent=None):
        super().__init__()
        self.agents = torch.nn.ModuleList(copy.deepcopy(net) for _ in range(num_agents))
        self.register_buffer("returns", torch.full((num_agents,), LOWEST))
        self._agent = agent

    @property
    def agent(self):
        """The agent that answers."""
        return int(self.returns.argmax()) if self._agent is None else self._agent

    def initial_state(self, batch_size):
        return self.agents[0].initial_state(batch_size)

    def forward(self, inputs, agent_state):
        return self.agents[self.agent](inputs, agent_state)
