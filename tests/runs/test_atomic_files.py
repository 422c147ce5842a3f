# SPDX-License-Identifier: Apache-2.0
"""Files that are never torn, CSV files that grow, and TensorBoard's events."""

import contextlib
import errno
import time

import pytest
from files import fill, read_events
from program import read_rows

from beast.runs import atomic_files
from beast.runs.atomic_files import CSVFile, EventFile, GrowingFile


def test_a_piece_that_fits_in_part_is_taken_back(small_disk):
    path, written = small_disk / "file", 0
    file = GrowingFile(path)
    while file.append(b"a whole piece\n" * 7):
        written += 1
    assert 1000 < written < 20_000
    assert path.read_bytes() == b"a whole piece\n" * 7 * written
    file.close()


def test_files_of_one_stem_have_temporary_files_of_their_own(tmp_path, monkeypatch):
    one, two = tmp_path / "pong.1", tmp_path / "pong.2"
    write = atomic_files._write_all

    def write_both(file, content):
        monkeypatch.setattr(atomic_files, "_write_all", write)
        write(file, content)
        atomic_files.replace_file(two, b"2")

    monkeypatch.setattr(atomic_files, "_write_all", write_both)
    atomic_files.replace_file(one, b"1")
    assert (one.read_bytes(), two.read_bytes()) == (b"1", b"2")


@pytest.fixture
def make_csv(tmp_path):
    with contextlib.ExitStack() as opened:
        make = lambda step=0: CSVFile(tmp_path / "logs.csv", step)  # noqa: E731
        yield lambda *step: opened.enter_context(contextlib.closing(make(*step)))


def test_csv_grows_by_columns_and_can_be_read_after_each_row(make_csv, tmp_path):
    table = make_csv()
    assert (tmp_path / "logs.csv").read_text().split() == ["_tick,_time,step"]
    rows = [{"loss": 0.5}, {"loss": 0.25, "return": 3, "lag": None}, {"return": 4}]
    for i, row in enumerate(rows):
        table.write({"step": i + 1, **row})
        assert len(read_rows(tmp_path)) == i + 1
    rows = read_rows(tmp_path)
    assert list(rows[0]) == ["_tick", "_time", "step", "loss", "return", "lag"]
    times = [float(row.pop("_time")) for row in rows]
    assert times == sorted(times) and times[0] > 1.5e9  # seconds since the epoch
    values = [["0", "1", "0.5", "", ""], ["1", "2", "0.25", "3", ""], ["2", "3", "", "4", ""]]
    assert [list(row.values()) for row in rows] == values


@pytest.mark.parametrize(
    "num_rows, torn", [(5, ""), (3, ""), (3, "3"), (3, "3,1795246641.4,4"), (3, "3,1,2,\x00")]
)
def test_csv_continues_without_later_rows_and_a_torn_one(make_csv, tmp_path, num_rows, torn):
    table = make_csv()
    for step in range(1, num_rows + 1):
        table.write({"step": step, "loss": step})
    table.close()
    with open(tmp_path / "logs.csv", "a") as file:
        file.write(torn)
    make_csv(3).write({"step": 4, "return": 9})
    rows = read_rows(tmp_path)
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert [row["_tick"] for row in rows] == ["0", "1", "2", "3"]
    assert rows[2]["loss"] == "3" and rows[3]["loss"] == "" and rows[3]["return"] == "9"
    written = (tmp_path / "logs.csv").read_bytes()
    make_csv(0).write({"step": 0})  # by a run without checkpoint
    assert [row["step"] for row in read_rows(tmp_path)] == ["0"]
    assert (tmp_path / "logs.csv.1").read_bytes() == written


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize(
    "content",
    [b"\xff\x00\n\xfe\n", b"a,b\n1,2\n", b"a,b\n", b"step,b\n1," + b"x" * 300_000 + b"\n"]
    + ["step\n\u00b2\n".encode()],  # a digit that is no number
)
def test_a_damaged_csv_is_set_aside_and_costs_no_run(make_csv, tmp_path, caplog, content, step):
    (tmp_path / "logs.csv.1").touch()
    (tmp_path / "logs.csv").write_bytes(content)
    make_csv(step).write({"step": 4, "loss": 1})
    (row,) = read_rows(tmp_path)
    assert list(row) == ["_tick", "_time", "step", "loss"] and row["step"] == "4"
    assert (tmp_path / "logs.csv.2").read_bytes() == content
    assert "logs.csv is now logs.csv.2: " in caplog.text


def test_a_folder_that_is_moved_costs_rows_and_not_the_run(make_csv, tmp_path, caplog):
    table = make_csv()
    table.write({"step": 1})
    (tmp_path / "logs.csv").rename(tmp_path / "elsewhere.csv")
    table.write({"step": 2, "new": 3})
    assert "Cannot write" in caplog.text
    (tmp_path / "elsewhere.csv").rename(tmp_path / "logs.csv")
    table.write({"step": 3, "new": 4})
    assert [(row["step"], row["new"]) for row in read_rows(tmp_path)] == [("1", ""), ("3", "4")]


def test_a_log_whose_file_is_gone_stale_raises_nothing(tmp_path, caplog, monkeypatch):
    def fail(_):
        raise OSError(errno.ESTALE, "Stale file handle")

    file = GrowingFile(tmp_path / "file")
    with monkeypatch.context() as patch:
        patch.setattr(atomic_files.os, "fstat", fail)
        assert not file.append(b"lost\n")
    assert "Stale file handle" in caplog.text
    assert file.append(b"kept\n") and (tmp_path / "file").read_bytes() == b"kept\n"
    file.close()


def test_tensorboard_drops_events_beyond_the_step(tmp_path, monkeypatch):
    file = EventFile(tmp_path, 0)
    for step in (100, 200, 300):
        file.write(step, {"loss": step / 2, "return": 1})
        assert read_events(tmp_path)[-1] == (step, step / 2)  # at once
    file.close()
    # TensorBoard sorts files by their names (second, host, process, count) as text: 10 is before 9.
    next_second = time.time() + 1
    monkeypatch.setattr(atomic_files.time, "time", lambda: next_second)
    file = EventFile(tmp_path, 200)
    file.write(250, {"loss": 7.0})
    file.close()
    assert read_events(tmp_path) == [(100, 50.0), (250, 7.0)]


def test_a_run_goes_on_without_tensorboard(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(atomic_files, "SummaryWriter", None)
    file = EventFile(tmp_path, 0)
    file.write(100, {"loss": 1.0})
    file.close()
    assert list(tmp_path.iterdir()) == []
    assert "no event file" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_logged_and_events_follow_later(small_disk, caplog, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(atomic_files.time, "monotonic", lambda: clock[0])
    start = time.time()  # TensorBoard reads files in the order of the seconds in their names
    monkeypatch.setattr(atomic_files.time, "time", lambda: start + clock[0])
    file = EventFile(small_disk, 0)
    file.write(1, {"loss": 1.0})
    filler = fill(small_disk)
    for step in range(2, 202):  # more than a block holds
        file.write(step, {"loss": 1.0, "return": 2.0})
    (message,) = caplog.messages
    assert "Cannot write TensorBoard's events" in message and "No space left" in message
    assert message.endswith("trying again in 60 s")
    clock[0] += 61
    file.write(300, {"loss": 3.0})  # still full
    assert len(caplog.messages) == 2
    filler.unlink()
    file.write(301, {"loss": 4.0})  # too early
    clock[0] += 61
    file.write(302, {"loss": 4.0})  # still, as pauses grow: each attempt leaves a file
    clock[0] += 60
    file.write(400, {"loss": 5.0})
    file.close()
    assert len(caplog.messages) == 2
    events = read_events(small_disk)
    assert events[0] == (1, 1.0) and events[-1] == (400, 5.0)
    assert {(301, 4.0), (302, 4.0)}.isdisjoint(events)
