# SPDX-License-Identifier: Apache-2.0
"""The newest weights, for actors and inference: always one whole version, without locks."""

import torch

from beast.shared_memory import check_shared_memory


class SharedWeights:
    """Weights in shared memory, for actor processes.

    The slots are written in turn, and the version is written only after its slot is complete. A
    reader that finds the version unchanged after its copy knows that nobody wrote to that slot
    meanwhile. A lock would do too, until an actor is killed while it holds it.

    Args:
      model: whose weights these are at first, as version 0.
      num_slots: how many versions are kept.

    Raises:
      FlagError: /dev/shm has no room for all slots.
    """

    def __init__(self, model, num_slots=2):
        weights = _flatten(model)
        check_shared_memory(num_slots * weights.numel(), "the weights of the net")
        self._version = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._slots = torch.stack([weights] * num_slots).share_memory_()

    @property
    def version(self):
        return int(self._version)

    def publish(self, model):
        version = self.version + 1
        self._slots[version % len(self._slots)] = _flatten(model)
        self._version[0] = version

    def load_into(self, model, version=None):
        """Copy weights into `model` and return their version: the newest, or what is asked for.

        Version + num_slots, which goes to the same slot as a version asked for, must not be
        published before this returns; with --deterministic the learner waits for that.
        """
        if version is None:
            while version != self.version:
                version = self.version
                weights = self._slots[version % len(self._slots)].clone()
        else:
            weights = self._slots[version % len(self._slots)].clone()
        tensors = model.state_dict().values()
        parts = weights.split([t.numel() * t.element_size() for t in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
        return version


def _flatten(model):
    """Return all weights as one tensor of bytes, since they may be of several types."""
    tensors = model.state_dict().values()
    return torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors]).cpu()


class LocalWeights:
    """Weights for threads of this process: a copy that nobody writes to."""

    def __init__(self, model):
        self._current = (0, None)
        self.publish(model)

    @property
    def version(self):
        return self._current[0]

    def publish(self, model):
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        self._current = (self.version + 1, weights)  # at once: readers see both or neither

    def load_into(self, model):
        """Copy the newest weights into `model` and return their version."""
        version, weights = self._current
        model.load_state_dict(weights)
        return version
