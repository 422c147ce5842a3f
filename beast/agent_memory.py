# SPDX-License-Identifier: Apache-2.0
"""What the agents of gala.py share with each other and with the main process."""

import torch

from beast.consensus import flatten
from beast.mailboxes import Mailboxes
from beast.shared_memory import check_shared_memory
from beast.weights import SharedCopies


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
