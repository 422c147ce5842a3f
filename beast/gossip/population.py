# SPDX-License-Identifier: Apache-2.0
"""The agents of gala.py as one module, what they share in memory, and how far apart they are.

Source: Assran et al. 2019, "Gossip-based Actor-Learner Architectures for Deep Reinforcement
Learning".
"""

import copy
import math
import threading
from collections import deque

import torch
import torch.nn.functional as F

from beast.actors.weights import SharedCopies, SharedWeights
from beast.processes.machine import check_shared_memory

LOWEST = torch.finfo(torch.float32).min  # finite, or checkpoints may be refused


class Population(torch.nn.Module):
    """The nets of several agents; one of them acts: `agent`, or the one with the best returns.

    Args:
      net: initial net of all agents.

    Attributes:
      agents: copies of it.
      agent: the number of the agent that acts.
      returns: [agents], the mean of the last games of each; the lowest number before the first.
    """

    def __init__(self, net, num_agents, agent=None):
        super().__init__()
        self.agents = torch.nn.ModuleList(copy.deepcopy(net) for _ in range(num_agents))
        self.register_buffer("returns", torch.full((num_agents,), LOWEST))
        self._agent = agent

    @property
    def agent(self):
        """The agent that acts."""
        return int(self.returns.argmax()) if self._agent is None else self._agent

    def initial_state(self, batch_size):
        return self.agents[0].initial_state(batch_size)

    def forward(self, inputs, agent_state):
        return self.agents[self.agent](inputs, agent_state)


@torch.no_grad()
def flatten(tensors):
    """Return all numbers of some tensors, of any shapes and memory formats, as [numbers]."""
    return torch.cat([x.detach().flatten() for x in tensors])


class Mailboxes:
    """The newest message of each agent, in shared memory; neither sending nor mixing waits.

    Args:
      in_peers: for each agent, the numbers of its senders.
      models: of all agents.
    """

    def __init__(self, in_peers, models):
        n = len(models)
        self.in_peers = in_peers
        # Three: while one is read that is an update old, and the newest, the next one is written.
        self.weights = [SharedWeights(model, num_slots=3) for model in models]
        self._mixed = [[0] * n for _ in range(n)]  # versions, of the agent whose process this is

    def has_news(self, agent):
        """Return whether each in-peer has sent weights that this agent has not mixed in yet."""
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
        """Return P: the weight of each agent's message in each agent's mean."""
        n = len(self.weights)
        matrix = torch.zeros(n, n, dtype=torch.float64)
        for agent, in_peers in enumerate(self.in_peers):
            matrix[agent, [agent, *in_peers]] = 1 / (1 + len(in_peers))
        return matrix


def state_of(net, optimizer):
    """Return all tensors that learning changes: of a net and of its optimizer state."""
    of_optimizer = [x for p in net.parameters() for x in optimizer.state.get(p, {}).values()]
    return [*net.state_dict().values(), *filter(torch.is_tensor, of_optimizer)]


def make_equal(population, optimizer):
    """Copy the weights and optimizer state of agent 0 to all agents of a population."""
    first, *others = (state_of(net, optimizer) for net in population.agents)
    for other in others:
        torch._foreach_copy_(other, first)


class AgentMemory:
    """Shared memory of each agent's learned state, newest message and gradient.

    Args:
      population: a Population, of which each agent begins with its net.
      optimizer: of all parameters of the population, with its state.
      in_peers: for each agent, the numbers of its senders.

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
        """Save an agent's learned state."""
        torch._foreach_copy_(self._states[agent], state_of(net, optimizer))

    def load(self, agent, net, optimizer):
        """Load an agent's newest saved state, or its initial one."""
        torch._foreach_copy_(state_of(net, optimizer), self._states[agent])


class Consensus:
    """Distance between the agents' weights, and similarity of their gradients.

    consensus_distance is the Frobenius norm of all agents' weights, mixed, less their mean;
    consensus_bound is the bound of Proposition 1, as a recursion. It holds in step and without
    delay, since both are of the same update then; else it is an indication, as is the distance,
    which is of the newest messages. Where agents have no in-peers, P is the unit matrix and the
    bound the sum of all updates.

    Args:
      mailboxes: the agents' Mailboxes.
      message: a net, which is overwritten.
      gradients: [agents, parameters], the newest of each agent.
      in_step: whether the agents make their updates together, at most two before they are counted.
    """

    def __init__(self, mailboxes, message, gradients, in_step=False):
        self._mailboxes, self._message, self._gradients = mailboxes, message, gradients
        self._matrix = mailboxes.matrix()
        # 0 without a second one.
        self._beta = torch.linalg.svdvals(self._matrix)[1:2].sum().item()
        # Of updates whose round is not complete: few, but beside a straggler the newest.
        self._norms = [deque(maxlen=1000) for _ in mailboxes.weights]
        self._in_step, self._round = in_step, 0
        self._lock = threading.Lock()  # while it is held, agents in step come no further
        messages = self._messages()
        self.bound = (messages - messages.mean(0)).norm().item()  # above 0 in a resumed run

    def count(self, agent, update_norm):
        """Count an update of an agent, by how far it has moved the weights."""
        with self._lock:
            self._norms[agent].append(update_norm)
            if all(self._norms):
                squares = sum(norms.popleft() ** 2 for norms in self._norms)
                self.bound = self._beta * (self.bound + squares**0.5)
                self._round += 1

    def distance(self):
        with self._lock:
            messages = self._messages()
        mixed = self._matrix.to(messages) @ messages
        return (mixed - mixed.mean(0)).norm().item()

    def _messages(self):
        """Return the newest messages, [agents, parameters]; if in step, of the same update."""
        messages = []
        for weights in self._mailboxes.weights:
            weights.load_into(self._message, self._round if self._in_step else None)
            messages.append(flatten(self._message.parameters()))
        return torch.stack(messages)

    def metrics(self):
        directions, in_peers = F.normalize(self._gradients, dim=1), self._mailboxes.in_peers
        cosines, pairs = (directions @ directions.T).tolist(), {"peers": [], "others": []}
        for agent in range(len(in_peers)):
            for other in range(agent):
                are_peers = other in in_peers[agent] or agent in in_peers[other]
                if math.isfinite(cosines[agent][other]):  # skipped if a gradient is not finite
                    pairs["peers" if are_peers else "others"].append(cosines[agent][other])
        metrics = {f"gradient_cosine_{k}": sum(v) / len(v) if v else None for k, v in pairs.items()}
        return metrics | {"consensus_distance": self.distance(), "consensus_bound": self.bound}
