# SPDX-License-Identifier: Apache-2.0
"""Devices, number formats, threads, and copies to a GPU in streams of their own.

A CUDA stream works in the background. Events order streams. A tensor is recorded with each stream
that reads it, since PyTorch reuses its memory when the stream that allocated it is done. On a CPU
copies need nothing of this.
"""

import contextlib
import functools
import logging
import os
import time

import torch

from beast.learners.compiling import compiled as compiled  # programs use it
from beast.nest import map_nest


def get_device(flags):
    """Return the device to learn on."""
    cuda = torch.cuda.is_available() and not flags.disable_cuda
    return torch.device("cuda:0" if cuda else "cpu")


def autocast(flags, device):
    """Have the model compute in --precision; its weights stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=computes_in_bf16(flags, device))


def computes_in_bf16(flags, device):
    return flags.precision == "bf16" and device.type not in flags.fp32_devices


def to_float32(outputs):
    """Return a nest of tensors in which bfloat16 ones are converted to float32."""
    return map_nest(lambda x: x.float() if x.dtype == torch.bfloat16 else x, outputs)


@functools.cache
def has_bf16(device):
    """Return whether the device multiplies in bfloat16 natively, and faster than in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    features = getattr(torch.cpu, "get_capabilities", dict)()  # older torch has none
    if not (features.get("avx512_bf16") or features.get("amx_bf16")):
        return False
    # An Intel Xeon that has the instructions, but not AMX, takes twice as long in bfloat16.
    return time_of_product(torch.bfloat16) < 0.8 * time_of_product(torch.float32)


def time_of_product(dtype):
    """Return the seconds of CPU time in which one thread multiplies two matrices."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    matrix = torch.ones(512, 512, dtype=dtype)
    times = []
    for _ in range(6):  # the first ones make the kernel, and wake the core
        begin = time.thread_time()
        torch.mm(matrix, matrix)
        times.append(time.thread_time() - begin)
    torch.set_num_threads(num_threads)
    return min(times)


def choose_precision(flags, model, devices):
    """Set flags.precision if not given: bf16 if the net supports it and a device is faster in it.

    The other devices compute in fp32 then; flags.fp32_devices has their types.

    Args:
      model: its attribute knows_bf16 says whether it supports bf16: its last layers stay in
        float32.
      devices: of the learner and of the actors or inference.
    """
    slow = {device.type for device in devices if not has_bf16(device)}
    flags.fp32_devices = []
    if flags.precision is None:
        flags.chosen = [*flags.chosen, "precision"]
        some_fast = len(slow) < len({device.type for device in devices})
        knows_bf16 = getattr(model, "knows_bf16", False)
        flags.precision = "bf16" if some_fast and knows_bf16 else "fp32"
        flags.fp32_devices = sorted(slow) if flags.precision == "bf16" else []
    elif flags.precision == "bf16" and slow:
        logging.warning(
            "--precision bf16 is slower than fp32 on this machine (%s)",
            ", ".join(sorted(slow)),
        )


def use_threads(num_threads, device):
    """Set the number of PyTorch threads of this thread, 1 for a GPU; on two cores, pin two of them.

    In convolutions threads wait for each other without giving up their core. Where another program
    keeps a core busy, Linux has both share the other one, and a batch takes 20 times as long
    (benchmarks/README.md). Only for programs whose environments wait during learning.
    """
    # With a GPU they would only copy rows, and then spin beside the environments.
    torch.set_num_threads(num_threads if device.type == "cpu" else 1)
    cores, before = sorted(os.sched_getaffinity(0)), os.listdir("/proc/self/task")
    # More than two are not pinned: libgomp ends and starts some of them between layers, and those
    # would inherit the core of this one.
    if device.type != "cpu" or not len(cores) == num_threads == 2:
        return
    torch.ones(2**20).sum()  # starts the second thread
    started = [0, *map(int, set(os.listdir("/proc/self/task")).difference(before))]
    if len(started) == 2:  # otherwise other threads were started meanwhile
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            for thread, core in zip(started, cores, strict=True):
                os.sched_setaffinity(thread, {core})


def record_event(device):
    """Return an event recorded after the current stream's pending work; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def use_after(event, nest, device):
    """Let the current stream use tensors that another stream wrote before the event."""
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
        """Return a copy of a nest on the device, which the current stream may use at once."""
        if self._stream is None:
            return map_nest(lambda x: x.to(self._device), nest)
        with torch.cuda.stream(self._stream):
            copies = map_nest(lambda x: x.to(self._device, non_blocking=True), nest)
            self._copied = record_event(self._device)
        use_after(self._copied, copies, self._device)
        return copies

    def wait(self):
        """Wait until the source of the last copy may be overwritten."""
        if self._copied is not None:
            self._copied.synchronize()
