# SPDX-License-Identifier: Apache-2.0
"""A run's folder: its lock, meta.json, `latest`, logs, a full disk, Weights & Biases."""

import errno
import importlib.metadata
import json
import logging
import os
import re
import shutil
import subprocess

import pytest
from files import fill
from program import read_meta, read_rows
from small_run import create_learner, parse, save

from beast.errors import FlagError
from beast.runs import code_version, run_folder
from beast.runs.run_folder import RunFolder


@pytest.fixture
def open_folder():
    """Return a function that opens a RunFolder at a step; those still open are closed."""
    folders = []

    def open_folder(flags, step=0):
        folders.append(RunFolder(flags))
        learner = create_learner(flags)
        learner.stats["step"] = step
        folders[-1].start(learner)
        return folders[-1]

    yield open_folder
    for folder in folders:
        if not folder._lock.closed:
            folder.close("ended")


def test_changes_of_the_code_are_alike_in_any_git_configuration(tmp_path, monkeypatch):
    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, *arguments], check=True, capture_output=True)

    (tmp_path / "beast/runs").mkdir(parents=True)
    monkeypatch.setattr(code_version, "__file__", str(tmp_path / "beast/runs/code_version.py"))
    path = tmp_path / "caf\u00e9"
    path.write_text("1\n" * 20)
    git("init")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "first")
    before = code_version.describe_code()
    content = b"1\n" * 19 + b"\r\n" + "\u00e9".encode("latin-1")  # not UTF-8
    path.write_bytes(content)
    changed = code_version.describe_code()
    assert "None" not in changed and changed != before
    options = ("core.abbrev 12", "diff.noprefix true", "diff.context 1", "color.diff always")
    options += ("core.quotePath false", "diff.external false", "diff.relative true")
    for option in (*options, "diff.interHunkContext 5"):
        git("config", *option.split())
        assert code_version.describe_code() == changed, option
    code_version.write_diff(tmp_path)
    git("checkout", "HEAD", "--", path.name)
    (diff,) = tmp_path.glob("changes-*.diff")
    git("apply", diff)
    assert path.read_bytes() == content and code_version.describe_code() == changed
    assert code_version.describe_git()["diff"] == diff.name


def test_a_program_that_git_does_not_know_is_a_change():
    git = {"changed": "?? fork.py\n M vtrace.py\n?? notes.txt"}
    assert code_version.list_changes(["/repo/fork.py"], git) == ["?? fork.py", " M vtrace.py"]
    assert code_version.list_changes(["monobeast.py"], git) == [" M vtrace.py"]


def test_without_git_the_code_itself_is_compared(tmp_path, monkeypatch):
    (tmp_path / "beast" / "runs").mkdir(parents=True)
    monkeypatch.setattr(code_version, "__file__", str(tmp_path / "beast/runs/code_version.py"))
    monkeypatch.setattr(code_version, "run_git", lambda *arguments: None)
    found = {code_version.describe_code()}
    for path in ("fork.py", "beast/runs/run.py"):
        (tmp_path / path).write_text("pass\n")
        found.add(code_version.describe_code())
    assert len(found) == 3
    assert code_version.describe_code() in found


def test_what_was_changed_since_the_last_start_is_pointed_out(
    tmp_path, open_folder, caplog, monkeypatch
):
    git = {"rev-parse": b"0123456789", "status": b" M fork.py", "diff": b"one edit"}
    monkeypatch.setattr(code_version, "run_git", lambda *arguments: git[arguments[0]])
    flags, path = parse(tmp_path), tmp_path / "run"
    save(flags)
    open_folder(flags).close("ended")
    name = read_meta(path)["git"]["diff"]
    assert (path / name).read_bytes() == b"one edit"
    parse(tmp_path, "--xpid run --mode test")
    assert "was written by" not in caplog.text
    git["diff"] = b"another edit of the same file"
    parse(tmp_path, "--xpid run --mode test")
    assert f"M fork.py, {name}); this is" in caplog.text
    caplog.clear()
    meta = read_meta(path)
    del meta["git"]["diff"]  # as earlier versions wrote it
    (path / "meta.json").write_text(json.dumps(meta))
    parse(tmp_path, "--xpid run --mode test")
    assert "was written by" not in caplog.text


def test_a_folder_in_use_is_refused_until_it_is_free(tmp_path, open_folder):
    flags, path = parse(tmp_path), tmp_path / "run"
    folder = open_folder(flags)
    before = (path / "meta.json").read_bytes()
    with pytest.raises(FlagError, match=f"another process is training in {path}"):
        RunFolder(flags)
    assert (path / "meta.json").read_bytes() == before
    folder.close("ended")
    open_folder(flags)


def test_meta_and_log_say_how_a_run_and_earlier_ones_ended(tmp_path, open_folder, caplog):
    caplog.set_level(logging.INFO)
    flags, path = parse(tmp_path), tmp_path / "run"
    folder = open_folder(flags)
    meta = read_meta(path)
    assert meta["status"] == "running" and meta["end"] is None
    assert meta["flags"]["seed"] == 1 and {"commit", "changed"} <= meta["git"].keys()
    # Not torch.__version__, which says more than the package: 2.13.0+cu130.
    assert meta["versions"]["torch"] == importlib.metadata.version("torch")
    assert meta["machine"]["cores"] == os.cpu_count() and "cpu" in meta["machine"]
    folder.log(250, {"total_loss": None}, "a line")
    folder.close("ended", ValueError("out of luck"))
    assert read_meta(path)["status"] == "ValueError: out of luck"
    for text in ("25.0% | a line", "ValueError: out of luck"):
        assert text in (path / "out.log").read_text()
    for _ in range(2):
        open_folder(flags).close("ended")
    meta = read_meta(path)
    assert meta["status"] == "ended" and meta["start"] <= meta["end"]
    assert [m["status"] for m in meta["earlier"]] == ["ValueError: out of luck", "ended"]
    assert "earlier" not in meta["earlier"][1]
    damaged = ["{torn", "[1]", "3", '{"earlier": 1}', '{"earlier": [2]}', "[" * 100_000]
    for i, text in enumerate(damaged, 1):
        (path / "meta.json").write_text(text)
        open_folder(flags).close("ended")
        meta = read_meta(path)
        assert meta["status"] == "ended" and "earlier" not in meta
        assert (path / f"meta.json.{i}").read_text() == text
        assert f"meta.json is now meta.json.{i}: it is damaged" in caplog.text


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_run_of_another_program_or_commit_is_pointed_out(
    tmp_path, open_folder, caplog, monkeypatch, is_damaged
):
    flags, path = parse(tmp_path), tmp_path / "run" / "meta.json"
    save(flags)
    open_folder(flags).close("ended")
    parse(tmp_path, "--xpid run --mode test")
    assert "was written by" not in caplog.text
    monkeypatch.setattr(run_folder.sys, "argv", ["a/fork.py"])
    git = {"rev-parse": b"0123456789\n", "status": b" M fork.py\n?? notes\n", "diff": b"edit"}
    monkeypatch.setattr(code_version, "run_git", lambda *arguments: git[arguments[0]])
    if is_damaged:
        path.write_text("[]")
    parse(tmp_path, "--xpid run --mode test")
    text = r"run was written by .* of (no )?commit.*; this is fork.py of commit 0123456 "
    text += r"with changes \(M fork.py, changes-[0-9a-f]{8}.diff\): its"
    assert bool(re.search(text, caplog.text)) != is_damaged


def test_latest_links_the_newest_run_and_spares_what_is_no_link(tmp_path, open_folder, caplog):
    for xpid in ("one", "two", "one"):
        open_folder(parse(tmp_path, f"--xpid {xpid}")).close("ended")
        assert (tmp_path / "latest").resolve() == (tmp_path / xpid).resolve()
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "precious").touch()
    open_folder(parse(tmp_path))
    assert (tmp_path / "latest" / "precious").exists()
    assert "Could not link" in caplog.text


def test_what_a_killed_process_had_begun_to_write_is_removed(tmp_path, open_folder):
    flags = parse(tmp_path)
    save(flags)
    for name in ("model.tar", "best.tar", "meta.json", "logs.csv", "mine"):
        (tmp_path / "run" / f"{name}.tmp").write_text("half")
    open_folder(flags)
    assert [path.stem for path in (tmp_path / "run").glob("*.tmp")] == ["mine"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_tears_no_file_and_the_run_continues(small_disk, open_folder, caplog):
    caplog.set_level(logging.INFO)
    flags, path = parse(small_disk), small_disk / "run"
    folder = open_folder(flags)
    folder.log(100, {"loss": 1.0}, "a line")
    filler = fill(small_disk)
    with pytest.raises(FlagError, match=f"cannot use --savedir {small_disk}: .*No space left"):
        RunFolder(parse(small_disk, "--xpid other"))
    for step in range(101, 501):  # more than a block holds
        folder.log(step, {"loss": 1.0} | ({"new": 2.0} if step > 400 else {}), "a line")
    assert list(path.glob("*.tmp")) == []
    for name in ("logs.csv", "out.log"):
        # A shorter line may still fit into the last block, and then each change is logged.
        lost = caplog.text.count(f"Cannot write {path / name} (No space left on device)")
        again = caplog.text.count(f"Can write {path / name} again: ")
        assert lost == again + 1
        assert again < 50

    filler.unlink()
    folder.log(501, {"loss": 3.0, "new": 4.0}, "a line")
    folder.close("ended")
    rows = read_rows(path)
    written = [int(row["step"]) for row in rows]
    assert 1 < len(written) < 150 and written == sorted(set(written))
    assert written[0] == 100 and written[-1] == 501
    missing = re.findall(rf"Can write {path / 'logs.csv'} again: (\d+) entries", caplog.text)
    assert len(written) + sum(map(int, missing)) == 402
    assert [int(row["_tick"]) for row in rows] == list(range(len(rows)))
    assert rows[-1]["new"] == "4.0" and rows[-2]["new"] == ""
    assert all(line.startswith("[") for line in (path / "out.log").read_text().splitlines())
    assert read_meta(path)["status"] == "ended"


def test_a_run_whose_folder_was_moved_ends(tmp_path, open_folder, caplog):
    folder = open_folder(parse(tmp_path))
    folder.log(1, {}, "one")
    folder.path.rename(tmp_path / "moved")
    with pytest.raises(FlagError, match="was the folder removed or moved"):
        folder.log(2, {}, "two")
    folder.close("ended")
    assert [row["step"] for row in read_rows(tmp_path / "moved")] == ["1"]
    assert "Cannot write into meta.json" in caplog.text


def test_a_log_that_was_renamed_goes_on_in_a_new_file(tmp_path, open_folder, caplog):
    folder = open_folder(parse(tmp_path))
    folder.log(1, {"loss": 0.5}, "one")
    (folder.path / "logs.csv").rename(folder.path / "logs.csv.old")
    folder.log(2, {"loss": 0.25}, "two")
    assert [(row["step"], row["loss"]) for row in read_rows(folder.path)] == [("2", "0.25")]
    assert "logs.csv was renamed or replaced: rows go on under this name" in caplog.text


def test_logs_that_an_editor_or_a_rotation_replaces_go_on(tmp_path, open_folder, caplog):
    caplog.set_level(logging.INFO)
    folder = open_folder(parse(tmp_path))
    folder.log(1, {"loss": 0.5}, "one")
    for name in ("logs.csv", "out.log"):
        shutil.copy(folder.path / name, tmp_path / name)
        os.replace(tmp_path / name, folder.path / name)
    for step in (2, 3):
        folder.log(step, {"loss": 0.25}, f"line {step}")
    assert [(r["_tick"], r["step"]) for r in read_rows(folder.path)] == [
        ("0", "1"), ("1", "2"), ("2", "3")
    ]  # fmt: skip
    text = (folder.path / "out.log").read_text()
    assert text.count("one") == text.count("line 3") == 1


def test_a_run_whose_folder_another_has_taken_over_ends(tmp_path, open_folder, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    first = open_folder(parse(tmp_path))
    first.log(1, {}, "one")
    monkeypatch.setattr("platform.node", lambda: "elsewhere")
    RunFolder(parse(tmp_path)).close("")  # a start that is refused
    first.log(1, {}, "one")
    second = open_folder(parse(tmp_path))
    second.log(1, {}, "two")
    with pytest.raises(FlagError, match="taken over by another process .* of elsewhere, since"):
        first.log(2, {}, "three")
    first.close("ended")
    assert read_meta(tmp_path / "run")["status"] == "running"
    second.log(3, {}, "four")
    assert [row["step"] for row in read_rows(tmp_path / "run")] == ["1", "3"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told(tmp_path, open_folder, monkeypatch, caplog, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    open_folder(parse(tmp_path))
    assert f"{tmp_path / 'run'} is on a file system without locks" in caplog.text


def test_wandb_gets_the_same_metrics_and_resumes(tmp_path, open_folder, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    flags, ids = parse(tmp_path, "--xpid run --wandb"), []
    for name, step in (("run", 0), ("run", 100), ("run", 0), ("copy", 100)):
        if name == "copy":
            shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=True)
            flags = parse(tmp_path, "--xpid copy --wandb")
        folder = open_folder(flags, step)
        folder.log(step + 100, {"total_loss": 0.5, "mean_game_return": None}, "")
        folder.log(step + 200, {"total_loss": 0.25, "mean_game_return": None}, "")
        assert folder._wandb.step == step + 200 and folder._wandb.config["learning_rate"] == 0.5
        assert folder._wandb.summary["total_loss"] == 0.5  # of the last step that is complete
        assert "mean_game_return" not in dict(folder._wandb.summary)
        ids.append(folder._wandb.id)
        folder.close("ended")
        RunFolder(flags).close("")  # a start that is refused
    assert ids[0] == ids[1] and len({*ids}) == 3  # new, resumed, begun again; a copy
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*"))) >= 2
