# SPDX-License-Identifier: Apache-2.0
"""Joules of a fake /sys/class/powercap, and the column that comes of them."""

import pytest
from program import read_rows
from small_run import create_learner, parse, record

from beast.runs import profiling
from beast.runs.profiling import CPUEnergy, UpdateProfiler
from beast.runs.run import Run


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


@pytest.fixture(autouse=True)
def powercap(tmp_path, monkeypatch):
    """A machine whose Powercap has no domain yet."""
    (tmp_path / "sys").mkdir()
    monkeypatch.setattr(profiling, "POWERCAP", tmp_path / "sys" / "class")
    return Powercap(tmp_path / "sys")


def test_cpu_joules_are_of_all_packages_and_count_nothing_twice(powercap):
    packages = {"intel-rapl:0": "package-0", "intel-rapl:1": "package-1-die-0"}
    others = {"intel-rapl:0:0": "core", "intel-rapl:0:1": "dram", "intel-rapl:2": "psys"}
    others |= {"intel-rapl-mmio:0": "package-0", "intel-rapl": "control"}
    for domain, name in (packages | others).items():
        powercap.add(domain, name, 5_000_000)
    measured = CPUEnergy()
    assert measured.metrics() == {"cpu_joules": 0.0}
    for domain in others:
        powercap.set(domain, 99_000_000)
    assert measured.metrics()["cpu_joules"] == 0.0
    powercap.set("intel-rapl:0", 7_500_000)
    powercap.set("intel-rapl:1", 15_000_000)
    assert measured.metrics()["cpu_joules"] == pytest.approx(12.5)
    assert measured.metrics()["cpu_joules"] == pytest.approx(12.5)  # and not since the last call


def test_a_cpu_counter_may_wrap_again_and_again(powercap):
    powercap.add("intel-rapl:0", "package-0", 90_000_000, span=100_000_000)
    measured = CPUEnergy()
    for microjoules, joules in ((10_000_000, 20), (95_000_000, 105), (94_000_000, 204)):
        powercap.set("intel-rapl:0", microjoules)
        assert measured.metrics()["cpu_joules"] == pytest.approx(joules)


@pytest.mark.parametrize("name", ["energy_uj", "max_energy_range_uj", "name"])
@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe"])
def test_joules_of_some_packages_alone_are_none(powercap, name, content):
    for i in range(2):
        powercap.add(f"intel-rapl:{i}", f"package-{i}", 0)
    file = powercap.file("intel-rapl:1", name)
    file.unlink()
    if content is None:
        file.mkdir()  # OSError, as with a file that only root can read
    else:
        file.write_bytes(content)
    has_no_name = (name, content) == ("name", b"")  # so it is no package
    assert CPUEnergy().metrics() == ({"cpu_joules": 0.0} if has_no_name else {})


@pytest.mark.parametrize("content", [None, "", "broken"])
def test_a_counter_that_is_lost_is_logged_once(powercap, content, caplog):
    powercap.add("intel-rapl:0", "package-0", 5_000_000)
    measured, file = CPUEnergy(), powercap.file("intel-rapl:0")
    file.unlink() if content is None else file.write_text(content)
    assert measured.metrics() == {}
    powercap.set("intel-rapl:0", 8_000_000)
    assert measured.metrics() == {}
    assert caplog.text.count("Cannot read the energy counter") == 1


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_run_logs_joules_where_they_are_measured(tmp_path, powercap, is_measured):
    if is_measured:
        powercap.add("intel-rapl:0", "package-0", 1_000_000)
    flags = parse(tmp_path)
    with Run(flags, create_learner(flags)) as run:
        if is_measured:
            powercap.set("intel-rapl:0", 21_000_000)
        record(run)
    row = read_rows(tmp_path / "run")[-1]
    assert row.get("cpu_joules") == ("20.0" if is_measured else None)


@pytest.mark.parametrize("has_folder", [True, False])  # without it, nothing can be written
def test_a_trace_that_could_not_be_written_is_not_said_to_be(tmp_path, has_folder, caplog):
    caplog.set_level("INFO")
    if has_folder:
        (tmp_path / "run").mkdir()
    profiler = UpdateProfiler(parse(tmp_path))
    for _ in range(50):
        profiler.count_update()
    path = tmp_path / "run" / "trace.json"
    assert path.exists() == (f"Wrote {path}" in caplog.text) == has_folder
    assert (f"Cannot write {path}: is the disk full?" in caplog.text) == (not has_folder)
