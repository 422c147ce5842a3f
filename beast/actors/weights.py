# SPDX-License-Identifier: Apache-2.0
"""The newest weights for actors and inference: always one complete version, without locks."""

import torch

from beast.learners.devices import record_event, use_after
from beast.processes.machine import check_shared_memory


class SharedCopies:
    """Copies of some tensors in one piece of shared memory. Index i is the tensors of copy i.

    In one piece, because each costs a file descriptor, and a process gets at most 256 at its start.

    Args:
      tensors: on any device; what each copy holds at first.
      what: names the tensors, for errors.

    Raises:
      FlagError: /dev/shm has no room for all copies.
    """

    def __init__(self, tensors, num_copies, what):
        like = [torch.empty_like(tensor, device="meta") for tensor in tensors]  # contiguous
        self.layout = [(t.dtype, t.shape, t.stride()) for t in like]
        size = sum(map(_size, self.layout))
        check_shared_memory(num_copies * size, what)
        self.data = torch.zeros(num_copies, size, dtype=torch.uint8).share_memory_()
        self._copies = [_split(data, self.layout) for data in self.data]
        for copy in self._copies:
            torch._foreach_copy_(copy, tensors)

    def __len__(self):
        return len(self._copies)

    def __getitem__(self, i):
        return self._copies[i]

    def __getstate__(self):
        return self.data, self.layout  # the copies are views of data

    def __setstate__(self, state):
        self.data, self.layout = state
        self._copies = [_split(data, self.layout) for data in self.data]


class SharedWeights:
    """Weights in shared memory, for actor processes.

    The slots are written in turn, and the version is written only after its slot is complete. A
    reader that finds the version unchanged after its copy knows that nobody wrote to that slot
    meanwhile. A lock would do too, until an actor is killed while it holds it.

    Args:
      model: has the initial weights, version 0.
      num_slots: how many versions are kept.

    Raises:
      FlagError: /dev/shm has no room for all slots.
    """

    def __init__(self, model, num_slots=2):
        self._slots = SharedCopies(_tensors(model), num_slots, "the weights of the net")
        self._version = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._device_data = None

    def __getstate__(self):
        """Return the state to send to a process that reads weights."""
        return {k: v for k, v in vars(self).items() if k != "_staging"} | {"_device_data": None}

    @property
    def version(self):
        return int(self._version)

    def publish(self, model):
        version, tensors = self.version + 1, _tensors(model)
        i = version % len(self._slots)
        if tensors[0].device.type == "cpu":
            torch._foreach_copy_(self._slots[i], tensors)
        else:  # one copy, since each makes the CPU wait
            data = self._slots.data
            if self._device_data is None:
                self._device_data = torch.empty_like(data[0], device=tensors[0].device)
                self._staging = torch.empty_like(data[0], pin_memory=True)
            torch._foreach_copy_(_split(self._device_data, self._slots.layout), tensors)
            data[i] = self._staging.copy_(self._device_data)
        self._version[0] = version

    def load_into(self, model, version=None):
        """Copy weights, by default the newest, into `model` and return their version.

        Until this returns, version + num_slots must not be published: it uses the same slot.
        With --deterministic the learner waits for that.
        """
        tensors = _tensors(model)
        while True:
            loaded = self.version if version is None else version
            torch._foreach_copy_(tensors, self._slots[loaded % len(self._slots)])
            if version is not None or loaded == self.version:
                return loaded


def _tensors(model):
    return list(model.state_dict().values())


def _size(layout):
    """Return the bytes of a tensor, rounded up to the alignment of the next one."""
    dtype, shape, _ = layout
    return -(-shape.numel() * dtype.itemsize // 64) * 64


def _split(data, layouts):
    """Return tensors of these layouts that lie one after the other in `data`, which is bytes."""
    parts = data.split([_size(layout) for layout in layouts])
    return [
        part[: shape.numel() * dtype.itemsize].view(dtype).as_strided(shape, stride)
        for part, (dtype, shape, stride) in zip(parts, layouts, strict=True)
    ]


class LocalWeights:
    """Weights for threads of this process: a copy that nobody writes to."""

    def __init__(self, model):
        self._current = (0, None, None)
        self.publish(model)

    @property
    def version(self):
        return self._current[0]

    def publish(self, model):
        tensors = _tensors(model)
        weights = [torch.empty_like(tensor) for tensor in tensors]
        torch._foreach_copy_(weights, tensors)
        event = record_event(tensors[0].device)
        # One assignment, so that readers see a complete version.
        self._current = (self.version + 1, weights, event)

    def load_into(self, model):
        """Copy the newest weights into `model` and return their version."""
        version, weights, event = self._current
        use_after(event, tuple(weights), weights[0].device)
        torch._foreach_copy_(_tensors(model), weights)
        return version


class Version:
    """A version number alone, for programs in which nobody else reads the weights."""

    def __init__(self):
        self.version = 0

    def publish(self, model):
        self.version += 1
