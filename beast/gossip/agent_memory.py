# SPDX-License-Identifier: Apache-2.0
"""What the agents of gala.py share with each other and with the main process."""

import torch

from beast.actors.weights import SharedCopies, SharedWeights
from beast.gossip.consensus import flatten
from beast.processes.machine import check_shared_memory


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


def state_of(net, optimizer):
    """Return all tensors that learning changes: of a net, and of its part of an optimizer."""
    of_optimizer = [x for p in net.parameters() for x in optimizer.state[p].values()]
    return [*net.state_dict().values(), *filter(torch.is_tensor, of_optimizer)]


def make_equal(population, optimizer):
    """Give all agents of a population what agent 0 has learned."""
    first, *others = (state_of(net, optimizer) for net in population.agents)
    for other in others:
        torch._foreach_copy_(other, first)


class AgentMemory:
    """In shared memory, of each agent: what it has learned, what it has sent, and its gradient.

    Args:
      population: a Population, of which each agent begins with its net.
      optimizer: of all parameters of the population, with its state.
      in_peers: of each agent, from whom it gets weights.

    Attributes:
      mailboxes: Mailboxes.
      gradients: [agents, parameters], which agents write now and then.

    Raises:
      FlagError: /dev/shm has no room.
    """

    def __init__(self, population, optimizer, in_peers):
        nets = list(population.agents)
        states = state_of(nets[0], optimizer)
        self._states = SharedCopies(states, len(nets), "the agents' weights and optimizers")
        for agent, net in enumerate(nets):
            self.save(agent, net, optimizer)
        self.mailboxes = Mailboxes(in_peers, nets)
        self.gradients = torch.zeros(len(nets), flatten(nets[0].parameters()).numel())
        check_shared_memory(self.gradients.nbytes, "the agents' gradients")
        self.gradients.share_memory_()

    def save(self, agent, net, optimizer):
        """Write what an agent has learned."""
        torch._foreach_copy_(self._states[agent], state_of(net, optimizer))

    def load(self, agent, net, optimizer):
        """Read what an agent has saved last, or what it began with."""
        torch._foreach_copy_(state_of(net, optimizer), self._states[agent])
