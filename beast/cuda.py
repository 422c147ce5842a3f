# SPDX-License-Identifier: Apache-2.0
"""Memory that one CUDA stream writes and another one reads. On a CPU nothing here does anything.

A stream works in the background. Events order streams. A tensor is recorded with each stream that
reads it, since PyTorch reuses its memory when the stream that allocated it is done.

NOT RUN YET on a GPU, and so its gain is not measured: tests/test_cuda.py is for the first one.
"""

import torch

from beast.environments import map_nest


def record_event(device):
    """Return an event after all work that the current stream has now; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def use_after(event, nest, device):
    """Have the current stream use tensors that another one has written before the event."""
    if event is not None:
        stream = torch.cuda.current_stream(device)
        stream.wait_event(event)
        map_nest(lambda x: x.record_stream(stream), nest)


class DeviceCopies:
    """Copies of nests of tensors on a device, in a stream of their own, for one thread.

    The tensors must stay as they are until `wait` returns: their copies may be under way.
    """

    def __init__(self, device):
        self._device, self._copied = device, None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, nest):
        """Return a nest on the device, which the current stream may use at once."""
        if self._stream is None:
            return map_nest(lambda x: x.to(self._device), nest)
        with torch.cuda.stream(self._stream):
            copies = map_nest(lambda x: x.to(self._device, non_blocking=True), nest)
            self._copied = record_event(self._device)
        use_after(self._copied, copies, self._device)
        return copies

    def wait(self):
        """Wait until what was copied last may be written to again."""
        if self._copied is not None:
            self._copied.synchronize()
