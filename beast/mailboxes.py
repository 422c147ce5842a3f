# SPDX-License-Identifier: Apache-2.0
"""Weights that agents send each other, and the means of them: what gossip is made of.

Source: Assran et al. 2019, "Gossip-based Actor-Learner Architectures for Deep Reinforcement
Learning".
"""

import torch

from beast.weights import SharedWeights


class Mailboxes:
    """What each agent has sent last, in shared memory: sending waits for nobody, nor does mixing.

    Args:
      in_peers: of each agent, from whom it gets weights.
      models: of all agents.
    """

    def __init__(self, in_peers, models):
        n = len(models)
        self.in_peers = in_peers
        # Three: while one is read that is an update old, and the newest, the next one is written.
        self.weights = [SharedWeights(model, num_slots=3) for model in models]
        self._mixed = [[0] * n for _ in range(n)]  # versions, of the agent whose process this is

    def has_news(self, agent):
        """Return whether each in-peer has sent weights that this agent has not mixed yet."""
        return all(self.weights[j].version > self._mixed[agent][j] for j in self.in_peers[agent])

    @torch.no_grad()
    def mix(self, agent, model, message, version=None):
        """Set a model to the mean of itself and of the messages of the agent's in-peers.

        Args:
          message: a model, which is overwritten.
          version: of the messages; by default the newest ones.
        """
        parameters = list(model.parameters())
        for j in self.in_peers[agent]:
            self._mixed[agent][j] = self.weights[j].load_into(message, version)
            torch._foreach_add_(parameters, list(message.parameters()))
        torch._foreach_div_(parameters, 1 + len(self.in_peers[agent]))

    def matrix(self):
        """Return P: with what weight each agent's message is in each agent's weights."""
        n = len(self.weights)
        matrix = torch.zeros(n, n, dtype=torch.float64)
        for agent, in_peers in enumerate(self.in_peers):
            matrix[agent, [agent, *in_peers]] = 1 / (1 + len(in_peers))
        return matrix
