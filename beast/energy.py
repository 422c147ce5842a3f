# SPDX-License-Identifier: Apache-2.0
"""How much energy GPUs and CPU have taken, where the machine measures it. No torch here.

GPU: of the whole GPUs that this process sees (CUDA_VISIBLE_DEVICES), by NVIDIA's NVML; where they
have no counter of energy, which came with Volta, power is sampled. CPU: of all its packages, by
RAPL in /sys/class/powercap. Both include what other processes take.

NOT RUN YET on a GPU: tests/test_energy.py has a fake NVML.
"""

import ctypes
import logging
import os
import pathlib
import re
import time

POWERCAP = pathlib.Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"  # comes with the driver


class Energy:
    """Joules since it was made.

    Read it once a minute or more often: a counter must not wrap twice in between, and power is
    sampled whenever it is read.

    Args:
      with_gpus: whether GPUs count.
    """

    def __init__(self, with_gpus=True):
        self._meters = {"gpu": _start(_find_gpus) if with_gpus else [], "cpu": _start(_find_cpu)}
        self._has_lost_some = False

    def joules(self):
        """Return {"gpu": joules, "cpu": joules}; None where they are not known, or not any more."""
        return {name: self._read(name) for name in self._meters}

    def metrics(self, frames=None):
        """Return what is known as metrics by name: gpu_joules, cpu_joules, frames_per_kilojoule.

        Args:
          frames: since this was made, or None: there is no frames_per_kilojoule then, as when only
            a part of the joules is known any more.
        """
        known = {name: joules for name, joules in self.joules().items() if joules is not None}
        metrics = {f"{name}_joules": joules for name, joules in known.items()}
        total = sum(known.values())
        if frames is not None and total > 0 and not self._has_lost_some:
            metrics["frames_per_kilojoule"] = 1000 * frames / total
        return metrics

    def _read(self, name):
        if not self._meters[name]:
            return None
        try:
            return sum(meter.joules() for meter in self._meters[name])
        except (OSError, ValueError) as error:  # which must not end a run
            logging.warning("The energy of the %s is not known any more: %s", name.upper(), error)
            self._meters[name], self._has_lost_some = [], True
            return None


class _Counter:
    """Sums up by how much a counter of joules grows, which after `span` joules wraps to 0."""

    def __init__(self, read, span=0.0):
        self._read, self._span = read, span
        self._last, self._total = read(), 0.0

    def joules(self):
        last, self._last = self._last, self._read()
        grown = self._last - last
        grown += self._span if grown < 0 else 0
        if grown < 0:
            raise ValueError(f"it fell from {last} to {self._last} J")
        self._total += grown
        return self._total


class _PowerSamples:
    """Integrates watts, which between two samples are taken to change evenly."""

    def __init__(self, read):
        self._read = read
        self._time, self._watts, self._total = time.monotonic(), read(), 0.0

    def joules(self):
        last_time, last_watts = self._time, self._watts
        self._time, self._watts = time.monotonic(), self._read()
        self._total += (self._time - last_time) * (self._watts + last_watts) / 2
        return self._total


def _start(find):
    """Return the meters that `find` makes; none where one cannot be read, as a part is no sum."""
    try:
        return find()
    except (OSError, ValueError, AttributeError):  # AttributeError: an NVML without a function
        return []


def _find_cpu():
    # Not intel-rapl:0:0, which is a part of intel-rapl:0; nor intel-rapl-mmio:0, the same again;
    # nor the one named psys, the whole machine. AMD's packages have these names, too.
    folders = [f for f in POWERCAP.glob("*") if re.fullmatch(r"intel-rapl:\d+", f.name)]
    packages = [f for f in folders if (f / "name").read_text().startswith("package")]
    return [_open_package(folder) for folder in packages]


def _open_package(folder):
    def read(name):
        return int((folder / name).read_text()) / 1e6  # of microjoules

    return _Counter(lambda: read("energy_uj"), span=read("max_energy_range_uj"))


def _find_gpus():
    nvml = _load_nvml()
    _check(nvml.nvmlInit_v2())
    count = ctypes.c_uint()
    _check(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    gpus = [_open_gpu(nvml, index) for index in range(count.value)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = _choose_visible(visible, [_read_uuid(nvml, gpu) for gpu in gpus], gpus)
    return [_start_gpu(nvml, gpu) for gpu in gpus]


def _load_nvml():
    return ctypes.CDLL(NVML)


def _check(status):
    if status != 0:
        raise OSError(f"NVML's error {status}")


def _open_gpu(nvml, index):
    gpu = ctypes.c_void_p()
    _check(nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(gpu)))
    return gpu


def _read_uuid(nvml, gpu):
    text = ctypes.create_string_buffer(96)
    _check(nvml.nvmlDeviceGetUUID(gpu, text, ctypes.c_uint(len(text))))
    return text.value.decode()


def _choose_visible(visible, uuids, gpus):
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, by number or by the beginning of a UUID.

    As with CUDA, the first name that is none ends the list. Numbers are those of the PCI bus, which
    CUDA counts by, too, unless GPUs of several models are mixed and CUDA_DEVICE_ORDER is not
    PCI_BUS_ID. A MIG instance is no GPU here: it has no counter of its own.
    """
    chosen = {}  # by number, since a GPU named twice counts once
    for name in map(str.strip, visible.split(",")):
        if re.fullmatch(r"[0-9]+", name):
            found = [int(name)] if int(name) < len(gpus) else []
        else:
            found = [i for i, uuid in enumerate(uuids) if name and uuid.startswith(name)]
        if not found:
            break
        chosen[found[0]] = gpus[found[0]]
    return list(chosen.values())


def _start_gpu(nvml, gpu):
    def read(function, kind):
        value = kind()
        _check(getattr(nvml, function)(gpu, ctypes.byref(value)))
        return value.value / 1000  # of millijoules or milliwatts

    try:
        return _Counter(lambda: read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong))
    except (OSError, AttributeError):
        return _PowerSamples(lambda: read("nvmlDeviceGetPowerUsage", ctypes.c_uint))
