# SPDX-License-Identifier: Apache-2.0
"""Metrics of gossip: how far apart agents are, beside the bound of Proposition 1 in the GALA paper.

Source: Assran et al. 2019, "Gossip-based Actor-Learner Architectures for Deep Reinforcement
Learning".
"""

import math
import threading
from collections import deque

import torch
import torch.nn.functional as F


@torch.no_grad()
def flatten(tensors):
    """Return all numbers of some tensors, of any shapes and memory formats, as [numbers]."""
    return torch.cat([x.detach().flatten() for x in tensors])


class Consensus:
    """How far the agents' weights are apart, and how alike their gradients are.

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
        self._beta = torch.linalg.svdvals(self._matrix)[1:2].sum().item()  # the second, if any
        # Of updates whose round is not complete: few, but beside a straggler the newest.
        self._norms = [deque(maxlen=1000) for _ in mailboxes.weights]
        self._in_step, self._round = in_step, 0
        self._lock = threading.Lock()  # while it is held, agents in step come no further
        messages = self._messages()
        self.bound = (messages - messages.mean(0)).norm().item()  # 0, but in a run that is resumed

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
        """Return [agents, parameters], what each has sent last; in step, after the same update."""
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
                if math.isfinite(cosines[agent][other]):  # else one of the gradients was not
                    pairs["peers" if are_peers else "others"].append(cosines[agent][other])
        metrics = {f"gradient_cosine_{k}": sum(v) / len(v) if v else None for k, v in pairs.items()}
        return metrics | {"consensus_distance": self.distance(), "consensus_bound": self.bound}
