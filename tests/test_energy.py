# SPDX-License-Identifier: Apache-2.0
"""Joules of fake GPUs and of a fake /sys/class/powercap, and the columns that come of them."""

import ctypes
import logging
from types import SimpleNamespace

import pytest
from program import read_rows
from small_run import UPDATE, create_batch, create_learner, parse

from beast import energy
from beast.energy import Energy
from beast.learner_group import Alone
from beast.run import Run

NOTHING = {"gpu": None, "cpu": None}
NOT_SUPPORTED = 3  # of NVML's errors


class Powercap:
    """Files as in /sys/class/powercap: links to folders elsewhere."""

    def __init__(self, path):
        self._path = path
        (path / "class").mkdir()

    def add(self, domain, name, microjoules, span=262_143_328_850):
        folder = self._path / "devices" / domain
        folder.mkdir(parents=True)
        (self._path / "class" / domain).symlink_to(folder)
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text(f"{span}\n")
        self.set(domain, microjoules)

    def set(self, domain, microjoules):
        self.file(domain).write_text(f"{microjoules}\n")

    def file(self, domain, name="energy_uj"):
        return self._path / "devices" / domain / name


class FakeNVML:
    """GPUs with the functions of libnvidia-ml, called by C's convention, and a clock.

    Attributes:
      millijoules, milliwatts: by GPU; None is not supported.
    """

    def __init__(self, num_gpus):
        self.millijoules, self.milliwatts = [10**15] * num_gpus, [None] * num_gpus
        self.uuids = [f"GPU-{i}{i}{i}{i}-abcd" for i in range(num_gpus)]
        self.status, self.now = 0, 0.0
        self.library = SimpleNamespace(
            nvmlInit_v2=self._function(lambda: self.status),
            nvmlDeviceGetCount_v2=self._function(self._count, ctypes.POINTER(ctypes.c_uint)),
            nvmlDeviceGetHandleByIndex_v2=self._function(
                self._handle, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p)
            ),
            nvmlDeviceGetUUID=self._function(
                self._uuid, ctypes.c_void_p, ctypes.POINTER(ctypes.c_char), ctypes.c_uint
            ),
            nvmlDeviceGetTotalEnergyConsumption=self._function(
                lambda gpu, out: self._read(self.millijoules, gpu, out),
                ctypes.c_void_p,
                ctypes.POINTER(ctypes.c_ulonglong),
            ),
            nvmlDeviceGetPowerUsage=self._function(
                lambda gpu, out: self._read(self.milliwatts, gpu, out),
                ctypes.c_void_p,
                ctypes.POINTER(ctypes.c_uint),
            ),
        )

    @staticmethod
    def _function(function, *kinds):
        return ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(function)

    def _count(self, out):
        out[0] = len(self.uuids)
        return 0

    def _handle(self, index, out):
        out[0] = 2**40 + index  # as wide as a pointer
        return 0

    def _uuid(self, gpu, out, size):
        text = self.uuids[gpu - 2**40].encode() + b"\0"
        assert len(text) <= size
        ctypes.memmove(out, text, len(text))
        return 0

    def _read(self, values, gpu, out):
        value = values[gpu - 2**40]
        if value is None:
            return NOT_SUPPORTED
        out[0] = value
        return 0


@pytest.fixture(autouse=True)
def powercap(tmp_path, monkeypatch):
    """A machine without GPUs, whose Powercap has no domain yet."""
    (tmp_path / "sys").mkdir()
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "sys" / "class")
    monkeypatch.setattr(energy, "NVML", "libmissing-ml.so.1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Powercap(tmp_path / "sys")


@pytest.fixture
def nvml(monkeypatch):
    """Return a function that makes a FakeNVML of so many GPUs."""

    def make(num_gpus):
        fake = FakeNVML(num_gpus)
        monkeypatch.setattr(energy, "_load_nvml", lambda: fake.library)
        monkeypatch.setattr(energy, "time", SimpleNamespace(monotonic=lambda: fake.now))
        return fake

    return make


def test_a_machine_that_measures_nothing_has_no_joules_and_no_columns(tmp_path, monkeypatch):
    assert Energy().joules() == NOTHING and Energy().metrics(100) == {}
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "missing")
    assert Energy().joules() == NOTHING and Energy().metrics() == {}


# -------------------------------------------------------------------------------------- CPU


def test_cpu_joules_are_of_all_packages_and_count_nothing_twice(powercap):
    powercap.add("intel-rapl", "control", 0)
    for domain, name in (
        ("intel-rapl:0", "package-0"),
        ("intel-rapl:0:0", "core"),
        ("intel-rapl:0:1", "dram"),
        ("intel-rapl:1", "package-1-die-0"),
        ("intel-rapl:2", "psys"),
        ("intel-rapl-mmio:0", "package-0"),
    ):
        powercap.add(domain, name, 5_000_000)
    measured = Energy()
    assert measured.joules() == {"gpu": None, "cpu": 0.0}
    for domain in ("intel-rapl:0:0", "intel-rapl:0:1", "intel-rapl:2", "intel-rapl-mmio:0"):
        powercap.set(domain, 99_000_000)
    assert measured.joules()["cpu"] == 0.0
    powercap.set("intel-rapl:0", 7_500_000)
    powercap.set("intel-rapl:1", 15_000_000)
    assert measured.joules()["cpu"] == pytest.approx(12.5)
    assert measured.joules()["cpu"] == pytest.approx(12.5)  # and not since the last call


def test_a_cpu_counter_may_wrap_again_and_again(powercap):
    powercap.add("intel-rapl:0", "package-0", 90_000_000, span=100_000_000)
    measured = Energy()
    for microjoules, joules in ((10_000_000, 20), (95_000_000, 105), (94_000_000, 204)):
        powercap.set("intel-rapl:0", microjoules)
        assert measured.joules()["cpu"] == pytest.approx(joules)


@pytest.mark.parametrize("name", ["energy_uj", "max_energy_range_uj", "name"])
@pytest.mark.parametrize("content", [None, "", "\xff\xfe"])
def test_joules_of_some_packages_alone_are_none(powercap, name, content):
    for i in range(2):
        powercap.add(f"intel-rapl:{i}", f"package-{i}", 0)
    file = powercap.file("intel-rapl:1", name)
    file.unlink()
    if content is None:
        file.mkdir()  # OSError, as with a file that only root can read
    else:
        file.write_bytes(content.encode("latin-1"))
    if (name, content) == ("name", ""):
        assert Energy().joules()["cpu"] == 0.0  # a domain without a name is no package
    else:
        assert Energy().joules() == NOTHING


@pytest.mark.parametrize("content", [None, "", "broken", "-900000000000"])
def test_a_counter_that_is_lost_is_none_from_then_on_and_is_logged_once(powercap, content, caplog):
    powercap.add("intel-rapl:0", "package-0", 5_000_000)
    measured = Energy()
    powercap.set("intel-rapl:0", 7_000_000)
    assert measured.metrics(frames=10)["frames_per_kilojoule"] == pytest.approx(5000)
    powercap.file("intel-rapl:0").unlink()
    if content is not None:
        powercap.file("intel-rapl:0").write_text(content)
    assert measured.metrics(frames=10) == {}
    powercap.set("intel-rapl:0", 8_000_000)
    assert measured.joules() == NOTHING and measured.metrics(frames=10) == {}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "energy of the CPU is not known any more" in caplog.text


# -------------------------------------------------------------------------------------- GPU


def test_gpu_joules_are_those_of_the_counter(nvml):
    gpus = nvml(1)
    measured = Energy()
    assert measured.joules() == {"gpu": 0.0, "cpu": None}
    gpus.millijoules[0] += 2_500
    gpus.now += 1000.0  # time does not matter here
    assert measured.joules()["gpu"] == pytest.approx(2.5)
    gpus.millijoules[0] += 2**33  # more than 32 bits
    assert measured.joules()["gpu"] == pytest.approx(2.5 + 2**33 / 1000)


def test_a_run_on_the_cpu_counts_no_gpu(nvml):
    nvml(1)
    assert Energy(with_gpus=False).joules() == NOTHING


@pytest.mark.parametrize(
    ("visible", "counted"),
    [
        (None, {0, 1, 2}),
        ("", set()),
        ("-1", set()),
        ("1", {1}),
        ("2,0", {0, 2}),
        (" 2 , 0 ", {0, 2}),
        ("1,1", {1}),
        ("0,-1,2", {0}),  # as with CUDA, what is no GPU ends the list
        ("0,3,1", {0}),
        ("0,,1", {0}),
        ("GPU-1111-abcd", {1}),
        ("GPU-2,GPU-0", {0, 2}),  # the beginning of one is enough
        ("GPU-9", set()),
        ("MIG-1111-abcd", set()),
        ("broken", set()),
    ],
)
def test_only_visible_gpus_count(nvml, monkeypatch, visible, counted):
    gpus = nvml(3)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    measured = Energy()
    for i in range(3):
        gpus.millijoules[i] += 1000 * 10**i
    expected = sum(10**i for i in counted) if counted else None
    assert measured.joules()["gpu"] == pytest.approx(expected)


@pytest.mark.parametrize("has_function", [True, False])  # an old driver lacks it
def test_a_gpu_without_a_counter_has_its_power_integrated(nvml, has_function):
    gpus = nvml(1)
    gpus.millijoules[0], gpus.milliwatts[0] = None, 100_000
    if not has_function:
        del gpus.library.nvmlDeviceGetTotalEnergyConsumption
    measured = Energy()
    assert measured.joules()["gpu"] == 0.0
    gpus.now, gpus.milliwatts[0] = 10.0, 300_000
    assert measured.joules()["gpu"] == pytest.approx(10 * 200)
    gpus.now = 12.0
    assert measured.joules()["gpu"] == pytest.approx(10 * 200 + 2 * 300)


def test_a_counter_and_power_samples_of_two_gpus_add_up(nvml):
    gpus = nvml(2)
    gpus.millijoules[0], gpus.milliwatts[0] = None, 50_000
    measured = Energy()
    gpus.now, gpus.millijoules[1] = 2.0, gpus.millijoules[1] + 7_000
    assert measured.joules()["gpu"] == pytest.approx(100 + 7)


def test_gpus_that_measure_nothing_or_a_driver_that_fails_have_no_joules(nvml):
    gpus = nvml(2)
    gpus.millijoules[1] = None  # and no watts
    assert Energy().joules() == NOTHING  # a part is not the sum
    gpus = nvml(1)
    gpus.status = 9  # the driver is not loaded
    assert Energy().joules() == NOTHING
    gpus = nvml(1)
    del gpus.library.nvmlDeviceGetHandleByIndex_v2
    assert Energy().joules() == NOTHING
    nvml(0)
    assert Energy().joules() == NOTHING


@pytest.mark.parametrize("value", [None, 5])  # an error; a counter that began anew
def test_a_lost_gpu_leaves_the_cpu_but_no_ratio_of_a_part(nvml, powercap, value, caplog):
    gpus = nvml(1)
    powercap.add("intel-rapl:0", "package-0", 0)
    measured = Energy()
    gpus.millijoules[0] += 3_000
    powercap.set("intel-rapl:0", 1_000_000)
    assert measured.metrics(frames=8) == {
        "gpu_joules": pytest.approx(3),
        "cpu_joules": pytest.approx(1),
        "frames_per_kilojoule": pytest.approx(2000),
    }
    gpus.millijoules[0] = value
    powercap.set("intel-rapl:0", 2_000_000)
    assert measured.metrics(frames=16) == {"cpu_joules": pytest.approx(2)}
    assert "energy of the GPU is not known any more" in caplog.text


# ------------------------------------------------------------------------------------- runs


def test_the_ratio_is_left_out_before_a_joule_and_where_frames_are_not_given(powercap):
    powercap.add("intel-rapl:0", "package-0", 0)
    measured = Energy()
    assert measured.metrics(frames=0) == {"cpu_joules": 0.0}
    powercap.set("intel-rapl:0", 1_000_000)
    assert measured.metrics() == {"cpu_joules": 1.0}
    assert measured.metrics(frames=0) == {"cpu_joules": 1.0, "frames_per_kilojoule": 0.0}


def play(tmp_path, powercap, microjoules, group=None):
    """Log a row after an update of 100 steps, of 4 frames each; return the last row."""
    flags = parse(tmp_path, "--xpid run --disable_cuda")
    flags.frames_per_step = 4
    learner = create_learner(flags)
    learner.group = group or learner.group
    with Run(flags, learner) as run:
        if microjoules is not None:
            powercap.set("intel-rapl:0", microjoules)
        with learner.lock:
            learner.publish()
            run.record(UPDATE, create_batch(learner.weights.version - 1))
    return read_rows(tmp_path / "run")[-1]


def test_a_run_logs_joules_and_frames_since_it_was_started_or_resumed(tmp_path, powercap, nvml):
    nvml(1)  # which --disable_cuda leaves out
    powercap.add("intel-rapl:0", "package-0", 1_000_000)
    row = play(tmp_path, powercap, 21_000_000)
    assert (row["step"], float(row["cpu_joules"])) == ("100", pytest.approx(20))
    assert float(row["frames_per_kilojoule"]) == pytest.approx(400 / 0.02)
    row = play(tmp_path, powercap, 31_000_000)
    assert (row["step"], float(row["cpu_joules"])) == ("200", pytest.approx(10))
    assert float(row["frames_per_kilojoule"]) == pytest.approx(400 / 0.01)
    assert "gpu_joules" not in row


def test_a_run_on_a_machine_that_measures_nothing_has_no_columns_of_it(tmp_path, powercap):
    assert not [name for name in play(tmp_path, powercap, None) if "joule" in name]


def test_one_of_several_learners_logs_its_joules_alone(tmp_path, powercap):
    powercap.add("intel-rapl:0", "package-0", 1_000_000)
    row = play(tmp_path, powercap, 21_000_000, group=Alone())
    assert float(row["cpu_joules"]) == pytest.approx(20) and "frames_per_kilojoule" not in row
