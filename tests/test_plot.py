# SPDX-License-Identifier: Apache-2.0
"""Plots: which runs become one curve, what the curves show, and how broken logs are refused."""

import csv
import json
import re
import sys

import cv2
import numpy as np
import pytest
from program import ROOT, run

from beast import plot
from beast.runs.checkpoint import NOT_RESUMED
from beast.runs.curves import NOT_SETTINGS, PlotError

ROWS = [{"_tick": i, "_time": 1e9 + 5 * i, "step": 1000 * i} for i in range(41)]


def write_run(folder, slope=1.0, rows=ROWS, meta=True, **flags):
    """Write the folder of a run, the return of which grows by `slope` in 1,000 steps."""
    folder.mkdir()
    rows = [r | {"mean_game_return": slope * r["step"] / 1000, "entropy": 2 * slope} for r in rows]
    with open(folder / "logs.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    if meta:
        flags = {"env": "Pong", "seed": 1, "frame_skip": 4, "xpid": folder.name} | flags
        meta = {
            "flags": flags,
            "command": ["/there/monobeast.py", "--seed", "1"],
            "git": {"commit": "0123456789", "changed": " M monobeast.py"},
            "versions": {"torch": "2.13.0"},
            "machine": {"host": "box", "system": "Linux", "cores": 8, "usable_cores": 2}
            | {"cpu": "Some CPU"},
            "start": "2026-11-21T13:52:01+00:00",
            "status": "running",
        }
        (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def draw_page(tmp_path, *words):
    """Return the page that is made of what the words name, and the data in it."""
    path = tmp_path / "page.html"
    plot.main([*map(str, words), "--out", str(path)])
    page = path.read_text(encoding="utf-8")
    return page, json.loads(re.search(r'<script type="application/json" id="data">(.*)<', page)[1])


def test_flags_that_are_not_resumed_do_not_part_curves():
    assert set(NOT_RESUMED) - {"disable_cuda", "render_mode"} <= NOT_SETTINGS


def curves(tmp_path, *words):
    return {curve["label"]: curve["metrics"] for curve in draw_page(tmp_path, *words)[1]["curves"]}


def test_seeds_are_one_curve_with_their_mean_lowest_and_highest(tmp_path):
    runs = [write_run(tmp_path / f"run{k}", slope=k, seed=k) for k in (1, 2, 6)]
    found = curves(tmp_path, *runs)
    assert list(found) == ["Pong (3 runs)"]
    for x_name, end in (("steps", 40_000), ("frames", 160_000), ("minutes", 200 / 60)):
        curve = found["Pong (3 runs)"]["mean_game_return"][x_name]
        assert curve["start"] == 0 and curve["end"] == pytest.approx(end)
        line = np.linspace(0, 40, len(curve["mean"]))
        for side, slope in (("mean", 3), ("low", 1), ("high", 6)):
            assert curve[side] == pytest.approx(slope * line, rel=1e-3, abs=1e-3), side
    assert set(found["Pong (3 runs)"]["entropy"]["steps"]["low"]) == {2.0}


def test_other_flags_make_other_curves_named_after_them(tmp_path):
    runs = [
        write_run(tmp_path / "a", learning_rate=0.1),
        write_run(tmp_path / "b", learning_rate=0.1, seed=2, use_lstm=False),  # a flag of later
        write_run(tmp_path / "c", learning_rate=0.2, use_lstm=True),
    ]
    names = ["learning_rate=0.1, no use_lstm (2 runs)", "learning_rate=0.2, use_lstm=True"]
    assert list(curves(tmp_path, *runs)) == names
    runs = [write_run(tmp_path / "d", momentum=0.0), write_run(tmp_path / "e", momentum=0.9)]
    assert list(curves(tmp_path, *runs)) == ["momentum=0.0", "momentum=0.9"]


def test_labels_join_and_part_runs_and_a_link_names_no_other_run(tmp_path):
    a, b = write_run(tmp_path / "a", entropy_cost=1), write_run(tmp_path / "b", entropy_cost=2)
    assert list(curves(tmp_path, f"both={a}", f"both={b}")) == ["both (2 runs)"]
    c, d = write_run(tmp_path / "c", seed=3), write_run(tmp_path / "d=1", seed=4)
    assert list(curves(tmp_path, f"one={c}", d)) == ["one", "Pong"]  # a path may have a = in it
    (tmp_path / "latest").symlink_to("a")
    found = curves(tmp_path, a, tmp_path / "latest")
    assert list(found) == ["Pong"] and "low" not in found["Pong"]["mean_game_return"]["steps"]


def test_a_curve_ends_with_its_shortest_run(tmp_path, capsys):
    runs = [write_run(tmp_path / "long"), write_run(tmp_path / "short", rows=ROWS[:21], seed=2)]
    curve = curves(tmp_path, *runs)["Pong (2 runs)"]["mean_game_return"]["steps"]
    assert curve["end"] == 20_000 and curve["mean"][-1] == 20
    assert "Pong: ends at 20,000 steps, as short does" in capsys.readouterr().out
    words = [f"{run.name}={run}" for run in runs]
    assert draw_page(tmp_path, *words)[1]["limits"]["steps"] == 40_000
    assert draw_page(tmp_path, *words, "--common")[1]["limits"]["steps"] == 20_000


def test_hours_leave_out_the_time_in_which_a_run_was_stopped(tmp_path):
    hour = [r | {"_time": 100 * r["_tick"] + 86_400 * (r["step"] > 20_000)} for r in ROWS]
    slow = [r | {"_time": 300 * r["_tick"]} for r in ROWS]  # which is not stopped all the time
    for name, rows, end in (("run", hour, 39 * 100), ("slow", slow, 40 * 300)):
        curve = curves(tmp_path, write_run(tmp_path / name, rows=rows))["Pong"]["mean_game_return"]
        assert curve["hours"]["end"] == pytest.approx(end / 3600)


def test_x_axes_and_metrics_have_defaults_and_can_be_chosen(tmp_path):
    rows = [r | {"_time": 100 * r["_tick"]} for r in ROWS]  # more than an hour
    long, short = write_run(tmp_path / "a", rows=rows), write_run(tmp_path / "b", frame_skip=1)
    assert list(draw_page(tmp_path, long)[1]["x_axes"]) == ["steps", "frames", "hours"]
    assert list(draw_page(tmp_path, short)[1]["x_axes"]) == ["steps", "minutes"]
    data = draw_page(tmp_path, short, "--x", "minutes,hours")[1]
    assert list(data["x_axes"]) == list(data["limits"]) == ["minutes", "hours", "steps"]
    with pytest.raises(PlotError, match="--x is days; it must be some of steps,frames,minutes,"):
        draw_page(tmp_path, short, "--x", "days")
    assert list(draw_page(tmp_path, long, "--metrics", "entropy")[1]["panels"]) == [
        *("mean_game_return", "entropy")
    ]
    with pytest.raises(PlotError, match="no run has ess, but there are mean_game_return, entropy"):
        draw_page(tmp_path, long, "--metrics", "entropy,ess")


def test_long_logs_are_averaged_not_sampled(tmp_path):
    rows = [{"_time": 5 * i, "step": 10 * i, "loss": i % 2} for i in range(10_000)]
    loss = curves(tmp_path, write_run(tmp_path / "run", rows=rows))["Pong"]["loss"]["steps"]
    assert loss["mean"] == pytest.approx([0.5] * len(loss["mean"]))


def test_all_are_measured_by_the_same_return(tmp_path):
    old = write_run(tmp_path / "old", meta=False)
    new = write_run(tmp_path / "new", rows=[r | {"mean_episode_return": 5} for r in ROWS])
    assert draw_page(tmp_path, new)[1]["main"] == "mean_game_return"
    log = (old / "logs.csv").read_text()
    (old / "logs.csv").write_text(log.replace("mean_game_return", "mean_episode_return"))
    data = draw_page(tmp_path, old, new)[1]
    assert data["main"] == "mean_episode_return"
    assert data["panels"]["mean_game_return"] == "mean_game_return"  # below, for those that have it


def test_what_is_not_a_number_or_half_written_is_left_out(tmp_path, capsys):
    values = ["", "nan", "1.5", "inf", "2.5"] + ["2"] * 36
    rows = [r | {"kl": v, "word": "good"} for r, v in zip(ROWS, values, strict=True)]
    run_folder = write_run(tmp_path / "run", rows=rows)
    kl = curves(tmp_path, run_folder)["Pong"]
    assert "word" not in kl and "column word is left out" in capsys.readouterr().out
    assert kl["kl"]["steps"]["start"] == 2000 and 2.4 < max(kl["kl"]["steps"]["mean"]) <= 2.5
    with open(run_folder / "logs.csv", "a") as file:
        file.write("41,1000000205.0,41000,2,good,41.0,-1")  # was to become -12.5
    assert curves(tmp_path, run_folder)["Pong"] == kl


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results").glob("*pong*.csv")))
def test_published_logs_can_be_drawn(tmp_path, path):
    curve = curves(tmp_path, path)[path.stem]
    assert {"mean_game_return", "policy_lag_mean", "grad_norm", "entropy_loss"} <= curve.keys()
    assert 15_000_000 > curve["mean_game_return"]["frames"]["end"] / 2 > 4_000_000


def test_a_picture_and_a_page_by_default(tmp_path, monkeypatch):
    run_folder = write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    plot.main(["run"])
    plot.main([str(run_folder), "--out", "one.png", "--x", "steps", "--metrics", ""])
    height, width, _ = cv2.imread("run/curves.png").shape
    small_height, small_width, _ = cv2.imread("one.png").shape
    assert small_width < width and small_height < height
    plot.main(["run", "--out", "picture.svg"])
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {"run", "one.png", "picture.svg"} and (run_folder / "curves.html").exists()
    plot.main(["run", "--output", "two.html"])
    assert (tmp_path / "two.html").exists()


def test_the_page_needs_no_network_and_labels_cannot_break_it(tmp_path):
    label = "</script><!--DATA--><script>alert(1)//"
    page, data = draw_page(tmp_path, f"{label}={write_run(tmp_path / 'run')}")
    assert data["curves"][0]["label"] == label
    assert label not in page and page.count("<script") == 2
    assert not re.findall(r"<link|<img|\bsrc=|\bhref=|@import|url\(|import\(|fetch\(", page)
    assert set(re.findall(r"https?://[^\"]*", page)) == {"http://www.w3.org/2000/svg"}  # a name
    assert "<!--" not in page.replace("<!-- SPDX", "")  # all parts are in their places


def test_the_page_shows_flags_commit_and_machine(tmp_path):
    run_folder = write_run(tmp_path / "run", learning_rate=0.0123)
    page, _ = draw_page(tmp_path, run_folder)
    text = re.sub(r"<[^>]*>", " ", page)
    for words in (
        *("learning_rate  0.0123", "0123456 + changes"),
        "box: 2 of 8 cores of Some CPU, no GPU, Linux",
        *("/there/monobeast.py --seed 1", "torch 2.13.0", str(run_folder), "2026-11-21 13:52"),
    ):
        assert words in text
    other = write_run(tmp_path / "other", learning_rate=0.5)
    page, _ = draw_page(tmp_path, run_folder, other)
    differing = page.split("Flags in which they differ")[1].split("Flags that are the same")[0]
    assert re.findall(r"<td>([^<]*)", differing) == ["learning_rate", "0.0123", "0.5"]


def test_without_matplotlib_there_is_the_page(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotError, match="pictures need matplotlib: pip install"):
        plot.main([str(write_run(tmp_path / "run")), "--out", str(tmp_path / "out")])
    assert (tmp_path / "out.html").exists() and not (tmp_path / "out.png").exists()


HEADER = "_tick,_time,step,mean_game_return\n"


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is empty: its run has not got as far"),
        (HEADER.encode(), "has nothing to draw yet"),
        (f"{HEADER}0,1.0,0,\n1,6.0,0,\n".encode(), "has nothing to draw yet"),
        (f"{HEADER}0,1.0,0,\n1,6.0,9,\n".encode(), "nothing to draw yet: no column has two values"),
        (f"{HEADER}0,1.0,0,\n1,6.\n2,8.0,9,1\n".encode(), "line 3 has 2 fields"),
        (f"{HEADER}0,1.0,0,\n1,6.0,x,\n2,8.0,9,\n".encode(), "column step.*'x'"),
        (f"{HEADER}0,1.0,5,\n1,6.0,9,\n2,8.0,3,\n".encode(), "do not grow after line 3"),
        (f"{HEADER}0,1.0,5,\n".encode() + bytes(4096) + b"\n", "line 3 has 1 fields"),
        (b"time,loss\n1,2\n", "names no _time and no step"),
        (b"\xff\xfe\x00\n" * 9, "cannot read .*logs.csv"),
    ],
)
def test_a_broken_log_is_refused_in_words(tmp_path, content, message):
    run_folder = write_run(tmp_path / "run")
    (run_folder / "logs.csv").write_bytes(content)
    with pytest.raises(PlotError, match=message):
        draw_page(tmp_path, run_folder)
    assert not (tmp_path / "page.html").exists()


@pytest.mark.whole
def test_missing_and_broken_files_are_named(tmp_path):
    run_folder = write_run(tmp_path / "run")
    (run_folder / "meta.json").write_text('{"flags": {"env"')
    with pytest.raises(PlotError, match="cannot read .*meta.json"):
        draw_page(tmp_path, run_folder)
    (run_folder / "logs.csv").unlink()
    with pytest.raises(PlotError, match=f"there is no {run_folder}/logs.csv"):
        draw_page(tmp_path, run_folder)
    assert not list(tmp_path.glob("page*"))
    words = ("beast.plot", write_run(tmp_path / "good"), "--out", tmp_path / "gone" / "page.html")
    status, output = run("-m", *words, cwd=ROOT)
    assert status == 1 and "Traceback" not in output and str(words[-1]) in output


def test_copies_of_a_log_bring_their_meta_file_along(tmp_path, capsys):
    run_folder = write_run(tmp_path / "run", frame_skip=2)
    (run_folder / "logs.csv").rename(tmp_path / "pong.csv")
    assert curves(tmp_path, tmp_path / "pong.csv")["pong"]["entropy"]["frames"]["end"] == 160_000
    assert "pong.json is missing" in capsys.readouterr().out
    (run_folder / "meta.json").rename(tmp_path / "pong.json")
    assert curves(tmp_path, tmp_path / "pong.csv")["Pong"]["entropy"]["frames"]["end"] == 80_000
