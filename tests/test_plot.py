# SPDX-License-Identifier: Apache-2.0
"""Plots: which runs become one curve, what the curves show, and how broken logs are refused."""

import csv
import json

import cv2
import numpy as np
import pytest
from program import ROOT, run

from beast import plot
from beast.runs.checkpoint import NOT_RESUMED
from beast.runs.curves import NOT_SETTINGS, PlotError, read_run

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
        git = {"commit": "0123456789", "changed": " M monobeast.py"}
        meta = {"flags": flags, "command": ["/there/monobeast.py"], "git": git, "status": "running"}
        (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def collect(*words):
    """Return what is drawn of the runs that the words name; print what is said about them."""
    data, lines, _ = plot.collect_curves(plot.parser.parse_args([*map(str, words)]))
    print(*lines, sep="\n")
    return data


def test_flags_that_are_not_resumed_do_not_part_curves():
    assert set(NOT_RESUMED) - {"disable_cuda", "render_mode", "num_learners"} <= NOT_SETTINGS


def curves(*words):
    return {curve["label"]: curve["metrics"] for curve in collect(*words)["curves"]}


def test_seeds_are_one_curve_with_their_mean_lowest_and_highest(tmp_path):
    runs = [write_run(tmp_path / f"run{k}", slope=k, seed=k) for k in (1, 2, 6)]
    found = curves(*runs)
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
    assert list(curves(*runs)) == names
    runs = [write_run(tmp_path / "d", momentum=0.0), write_run(tmp_path / "e", momentum=0.9)]
    assert list(curves(*runs)) == ["momentum=0.0", "momentum=0.9"]


def test_numbers_of_learners_make_other_curves(tmp_path):
    runs = [write_run(tmp_path / f"{n}-{seed}", seed=seed, num_learners=n)
            for n in (1, 8) for seed in (1, 2)]  # fmt: skip
    older = write_run(tmp_path / "older", seed=3)
    names = ["no num_learners (3 runs)", "num_learners=8 (2 runs)"]
    assert list(curves(*runs, older)) == names


def test_files_that_git_does_not_know_are_no_changes(tmp_path):
    run = read_run(str(write_run(tmp_path / "a")), [])
    assert run.commits == ["0123456 + changes"]
    run.meta["git"]["changed"] = "?? report.md"
    assert run.commits == ["0123456"]


def test_labels_join_and_part_runs_and_a_link_names_no_other_run(tmp_path):
    a, b = write_run(tmp_path / "a", entropy_cost=1), write_run(tmp_path / "b", entropy_cost=2)
    assert list(curves(f"both={a}", f"both={b}")) == ["both (2 runs)"]
    c, d = write_run(tmp_path / "c", seed=3), write_run(tmp_path / "d=1", seed=4)
    assert list(curves(f"one={c}", d)) == ["one", "Pong"]  # a path may have a = in it
    (tmp_path / "latest").symlink_to("a")
    found = curves(a, tmp_path / "latest")
    assert list(found) == ["Pong"] and "low" not in found["Pong"]["mean_game_return"]["steps"]


def test_a_curve_ends_with_its_shortest_run(tmp_path, capsys):
    runs = [write_run(tmp_path / "long"), write_run(tmp_path / "short", rows=ROWS[:21], seed=2)]
    curve = curves(*runs)["Pong (2 runs)"]["mean_game_return"]["steps"]
    assert curve["end"] == 20_000 and curve["mean"][-1] == 20
    assert "Pong: ends at 20,000 steps, as short does" in capsys.readouterr().out
    words = [f"{run.name}={run}" for run in runs]
    assert collect(*words)["limits"]["steps"] == 40_000
    assert collect(*words, "--common")["limits"]["steps"] == 20_000


def test_a_curve_that_one_run_leaves_out_is_named(tmp_path, capsys):
    old, new = write_run(tmp_path / "old"), write_run(tmp_path / "new", rows=ROWS[:20])
    begun = write_run(tmp_path / "begun")
    log = (begun / "logs.csv").read_text()
    (begun / "logs.csv").write_text(log.replace("mean_game_return", "mean_other"))
    late = write_run(tmp_path / "late", rows=ROWS[30:])
    collect(f"a={new}", f"a={begun}", f"b={old}")
    assert "a (2 runs): no return is drawn: too few in begun" in capsys.readouterr().out
    collect(f"a={new}", f"a={late}", f"b={old}")
    assert "a (2 runs): no return is drawn: its runs do not overlap" in capsys.readouterr().out
    collect(f"a={new}", f"b={old}")
    assert "no return is drawn" not in capsys.readouterr().out


def test_hours_leave_out_the_time_in_which_a_run_was_stopped(tmp_path):
    hour = [r | {"_time": 100 * r["_tick"] + 86_400 * (r["step"] > 20_000)} for r in ROWS]
    slow = [r | {"_time": 300 * r["_tick"]} for r in ROWS]  # which is not stopped all the time
    for name, rows, end in (("run", hour, 39 * 100), ("slow", slow, 40 * 300)):
        curve = curves(write_run(tmp_path / name, rows=rows))["Pong"]["mean_game_return"]
        assert curve["hours"]["end"] == pytest.approx(end / 3600)


def test_x_axes_and_metrics_have_defaults_and_can_be_chosen(tmp_path):
    rows = [r | {"_time": 100 * r["_tick"]} for r in ROWS]  # more than an hour
    long, short = write_run(tmp_path / "a", rows=rows), write_run(tmp_path / "b", frame_skip=1)
    assert list(collect(long)["x_axes"]) == ["steps", "frames", "hours"]
    assert list(collect(short)["x_axes"]) == ["steps", "minutes"]
    data = collect(short, "--x", "minutes,hours")
    assert list(data["x_axes"]) == list(data["limits"]) == ["minutes", "hours"]
    with pytest.raises(PlotError, match="--x is days; it must be some of steps,frames,minutes,"):
        collect(short, "--x", "days")
    assert list(collect(long, "--metrics", "entropy")["panels"]) == ["mean_game_return", "entropy"]
    with pytest.raises(PlotError, match="no run has ess, but there are mean_game_return, entropy"):
        collect(long, "--metrics", "entropy,ess")


def test_long_logs_are_averaged_not_sampled(tmp_path):
    rows = [{"_time": 5 * i, "step": 10 * i, "loss": i % 2} for i in range(10_000)]
    loss = curves(write_run(tmp_path / "run", rows=rows))["Pong"]["loss"]["steps"]
    assert loss["mean"] == pytest.approx([0.5] * len(loss["mean"]))


def test_all_are_measured_by_the_same_return(tmp_path):
    old = write_run(tmp_path / "old", meta=False)
    new = write_run(tmp_path / "new", rows=[r | {"mean_episode_return": 5} for r in ROWS])
    assert collect(new)["main"] == "mean_game_return"
    log = (old / "logs.csv").read_text()
    (old / "logs.csv").write_text(log.replace("mean_game_return", "mean_episode_return"))
    data = collect(old, new)
    assert data["main"] == "mean_episode_return"
    assert data["panels"]["mean_game_return"] == "mean_game_return"  # below, for those that have it


def test_what_is_not_a_number_or_half_written_is_left_out(tmp_path, capsys):
    values = ["", "nan", "1.5", "inf", "2.5"] + ["2"] * 36
    rows = [r | {"kl": v, "word": "good"} for r, v in zip(ROWS, values, strict=True)]
    run_folder = write_run(tmp_path / "run", rows=rows)
    kl = curves(run_folder)["Pong"]
    assert "word" not in kl and "column word is left out" in capsys.readouterr().out
    assert kl["kl"]["steps"]["start"] == 2000 and 2.4 < max(kl["kl"]["steps"]["mean"]) <= 2.5
    with open(run_folder / "logs.csv", "a") as file:
        file.write("41,1000000205.0,41000,2,good,41.0,-1")  # was to become -12.5
    assert curves(run_folder)["Pong"] == kl


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results").glob("*pong*.csv")))
def test_published_logs_can_be_drawn(tmp_path, path):
    curve = curves(path)[path.stem]
    assert {"mean_game_return", "policy_lag_mean", "grad_norm", "entropy_loss"} <= curve.keys()
    assert 15_000_000 > curve["mean_game_return"]["frames"]["end"] / 2 > 4_000_000


@pytest.mark.whole
def test_a_picture_is_drawn_beside_the_log_or_where_asked(tmp_path, monkeypatch):
    run_folder = write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    plot.main(["run"])
    plot.main([str(run_folder), "--out", "one.png", "--x", "steps", "--metrics", ""])
    height, width, _ = cv2.imread("run/curves.png").shape
    small_height, small_width, _ = cv2.imread("one.png").shape
    assert small_width < width and small_height < height
    plot.main(["run", "--output", "picture.svg"])
    plot.main(["run", "--output", "pong-v5.1"])
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {"run", "one.png", "picture.svg", "pong-v5.1.png"}
    with pytest.raises(PlotError, match="page.html, but a picture is a .png, .pdf or .svg"):
        plot.main(["run", "--output", "page.html"])
    with pytest.raises(PlotError, match="--output is ., a folder: name a file in it"):
        plot.main(["run", "--output", "."])


def test_returns_commits_and_differing_flags_are_printed(tmp_path, capsys):
    run_folder = write_run(tmp_path / "run", learning_rate=0.0123)
    other = write_run(tmp_path / "other", slope=2, learning_rate=0.5)
    plot.main([f"a={run_folder}", f"b={other}", "--out", str(tmp_path / "picture")])
    lines = capsys.readouterr().out.splitlines()
    figures = "40,000 steps, 0.06 hours, running, commit 0123456 + changes"
    assert lines == [
        f"a: {run_folder}/logs.csv: return 40, {figures}",
        f"b: {other}/logs.csv: return 80, {figures}",
        "--learning_rate: 0.0123 (a); 0.5 (b)",
        f"Wrote {tmp_path}/picture.png",
    ]


FIRST = "_tick,_time,step,mean_game_return\n0,1.0,5,\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty: its run has logged no row"),
        (FIRST.replace("0,1.0,5,\n", ""), "has nothing to draw yet"),
        (FIRST + "1,6.0,5,\n", "has nothing to draw yet"),
        (FIRST + "1,6.0,9,\n", "nothing to draw yet: no column has two values"),
        (FIRST + "1,6.\n2,8.0,9,1\n", "line 3 has 2 fields"),
        (FIRST + "1,6.0,x,\n2,8.0,9,\n", "column step.*'x'"),
        (FIRST + "1,6.0,9,\n2,8.0,3,\n", "do not grow after line 3"),
        (FIRST + "\0" * 4096 + "\n", "line 3 has 1 fields"),
        ("time,loss\n1,2\n", "names no _time and no step"),
        ("\xff\xfe\0\n" * 9, "cannot read .*logs.csv"),
    ],
)
def test_a_broken_log_is_refused_in_words(tmp_path, content, message):
    run_folder = write_run(tmp_path / "run")
    (run_folder / "logs.csv").write_text(content, "latin-1")
    with pytest.raises(PlotError, match=message):
        plot.main([str(run_folder)])
    assert not (run_folder / "curves.png").exists()


@pytest.mark.whole
def test_missing_and_broken_files_are_named(tmp_path):
    run_folder = write_run(tmp_path / "run")
    (run_folder / "meta.json").write_text('{"flags": {"env"')
    with pytest.raises(PlotError, match="cannot read .*meta.json"):
        collect(run_folder)
    (run_folder / "logs.csv").unlink()
    with pytest.raises(PlotError, match=f"there is no {run_folder}/logs.csv"):
        collect(run_folder)
    words = ("beast.plot", write_run(tmp_path / "good"), "--out", tmp_path / "gone" / "picture.png")
    output = run("-m", *words, cwd=ROOT, status=1)
    assert "Traceback" not in output and str(words[-1]) in output


def test_copies_of_a_log_bring_their_meta_file_along(tmp_path, capsys):
    run_folder = write_run(tmp_path / "run", frame_skip=2)
    (run_folder / "logs.csv").rename(tmp_path / "pong.csv")
    assert curves(tmp_path / "pong.csv")["pong"]["entropy"]["frames"]["end"] == 160_000
    assert "pong.json is missing" in capsys.readouterr().out
    (run_folder / "meta.json").rename(tmp_path / "pong.json")
    assert curves(tmp_path / "pong.csv")["Pong"]["entropy"]["frames"]["end"] == 80_000
