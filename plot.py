# SPDX-License-Identifier: Apache-2.0
"""Draw the learning curves of runs, and all else that their logs tell: a picture and a web page.

    python plot.py ~/logs/torchbeast/latest                    curves.png and curves.html
    python plot.py ~/logs/torchbeast/pong-* --out pong         pong.png and pong.html
    python plot.py new=RUN new=RUN old=RUN --out new.html      named curves, the page alone

Runs that differ in nothing but the seed are one curve: the mean of the runs, in a band from the
lowest to the highest of them, as far as all of them go. Equal labels make one curve of any runs.
The page is one file that needs no network; plot.html is what it is made from.
"""

import argparse
import csv
import html
import io
import json
import pathlib
import shlex
import sys
from typing import NamedTuple

import numpy as np

POINTS = 250  # of a curve; each is a mean over its share of the rows
X_AXES = {"steps": "agent steps", "frames": "frames", "hours": "hours of running"}
RETURNS = {
    "mean_game_return": "mean return of the last 100 games",
    "mean_episode_return": "mean return of the last 100 episodes",
}
# Flags in which the runs of one curve may differ.
NOT_SETTINGS = {
    *("seed", "xpid", "savedir", "mode", "disable_checkpoint", "num_episodes", "greedy"),
    *("autotune", "eval_interval", "record_video", "wandb", "write_profiler_trace"),
    *("pipes_basename", "server_addresses", "num_test_envs"),
}
COLORS = ["#0072b2", "#d55e00", "#008060", "#b0478f", "#a87900", "#6b5b50"]  # as in plot.html
DASHES = ["", "6 3", "2 2"]  # of the first six curves, of the next six, ...
COLUMNS = 4  # of panels below the curves in the picture


class PlotError(ValueError):
    """What is given cannot be drawn; the message says what to change."""


class Run(NamedTuple):
    label: str  # empty: none was given
    path: pathlib.Path  # of its log
    name: str
    meta: dict  # empty: none was found
    columns: dict  # from names to arrays, NaN where there is no value; X_AXES among them

    @property
    def settings(self):
        """What runs of one curve have in common. A switch that is off may be missing as well."""
        flags = self.meta.get("flags", {}).items()
        # Not `in (None, False)`: 0 is False to that, and is a value.
        settings = {
            k: v for k, v in flags if k not in NOT_SETTINGS and v is not None and v is not False
        }
        return {"program": self.program} | settings if self.meta else {}

    @property
    def program(self):
        return pathlib.Path(self.meta.get("command", ["-"])[0]).name

    @property
    def commits(self):
        """Those that it was started and resumed with, marked where the files were not theirs."""
        git = [meta.get("git", {}) for meta in [*self.meta.get("earlier", []), self.meta]]
        git = [g for g in git if g.get("commit")]
        marked = [g["commit"][:7] + " + changes" * bool(g.get("changed")) for g in git]
        return list(dict.fromkeys(marked))


def read_run(word, notes):
    """Read a run as the command line names it: [LABEL=]PATH."""
    label, path = "", pathlib.Path(word)
    if "=" in word and not path.exists():
        label, _, path = word.partition("=")
        path = pathlib.Path(path).expanduser()
    if path.is_dir():
        path /= "logs.csv"
    in_folder = path.name == "logs.csv"
    name = path.resolve().parent.name if in_folder else path.stem
    meta_path = path.with_name("meta.json") if in_folder else path.with_suffix(".json")
    columns = read_log(path, notes)
    try:
        meta = dict(json.loads(meta_path.read_text()))
    except FileNotFoundError:
        meta = {}
        notes.append(f"{meta_path} is missing: {name} has no flags, and 4 frames a step")
    except (OSError, ValueError, TypeError) as error:
        raise PlotError(f"cannot read {meta_path} ({error}): mend it or move it away") from error
    flags = meta.get("flags", {"frame_skip": 4})
    columns["frames"] = columns["steps"] * flags.get("frame_skip", 1)
    return Run(label, path, name, meta, columns)


def read_log(path, notes):
    """Return the columns of a logs.csv as a dict of arrays."""
    try:
        with open(path, newline="") as file:
            text = file.read()
        # The last line may be half-written: by a run that goes on, or by one that crashed.
        rows = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1])))
    except FileNotFoundError:
        raise PlotError(f"there is no {path}: give a run's folder or its logs.csv") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PlotError(f"cannot read {path}: {error}") from error
    if not rows:
        raise PlotError(f"{path} is empty: its run has not got as far as the first row")
    header, *rows = rows
    if missing := {"step", "_time"}.difference(header):
        raise PlotError(
            f"{path} is no log of a run: its first line names no {' and no '.join(sorted(missing))}"
        )
    for line, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise PlotError(
                f"{path} is broken: line {line} has {len(row)} fields and the first line "
                f"{len(header)}; mend or delete that line"
            )
    if len(rows) < 2 or rows[0][header.index("step")] == rows[-1][header.index("step")]:
        raise PlotError(f"{path} has nothing to draw yet: it needs two rows with steps between")
    columns = {}
    for name, cells in zip(header, zip(*rows, strict=True), strict=True):
        try:
            columns[name] = np.array([float(cell or "nan") for cell in cells])
        except ValueError as error:
            if name in ("step", "_time"):
                raise PlotError(f"{path} is broken: column {name}, {error}") from None
            notes.append(f"{path}: column {name} is left out ({error})")
    fall = np.flatnonzero(~(np.diff(columns["step"]) >= 0))
    if len(fall):
        raise PlotError(
            f"{path} is broken: the steps do not grow after line {fall[0] + 2}; are these two logs "
            "in one file?"
        )
    columns["steps"] = columns.pop("step")
    columns["hours"] = hours_of_running(columns.pop("_time"))
    columns.pop("_tick", None)
    return columns


def hours_of_running(times):
    """Return hours since the first row, without those in which the run was stopped."""
    seconds = np.diff(times)
    # Between two rows there are seconds, or a little more with a slow net.
    running = (seconds > 0) & (seconds < max(60, 10 * np.median(seconds)))
    return np.cumsum(np.concatenate([[0], np.where(running, seconds, 0)])) / 3600


def group(runs):
    """Return a dict from the labels of curves to their runs."""
    groups = {}
    for run in runs:
        key = run.label or json.dumps(run.settings, sort_keys=True)
        groups.setdefault(key if run.label or run.settings else run.path, []).append(run)
    unnamed = [g[0].settings for g in groups.values() if not g[0].label and g[0].settings]
    names = list(dict.fromkeys(name for settings in unnamed for name in settings))
    differing = [n for n in names if len({repr(s.get(n, False)) for s in unnamed}) > 1]

    curves = {}
    for members in groups.values():
        first, settings = members[0], members[0].settings
        words = [f"{n}={settings[n]}" if n in settings else f"no {n}" for n in differing]
        label = first.label or (", ".join(words) if settings else first.name)
        if len(label) > 70 and not first.label:
            label = first.name
        label = label or str(settings.get("env", first.name))
        curves[f"{label} ({first.path})" if label in curves else label] = members
    return curves


def make_curve(runs, name, x_name):
    """Return mean, lowest and highest of some runs, as far as all go; None where one has nothing.

    They stand at POINTS values of x, evenly from `start` to `end`.
    """
    rows = []
    for run in runs:
        x, y = run.columns[x_name], run.columns.get(name, np.array([]))
        known = np.flatnonzero(np.isfinite(y))
        if len(known) < 2:
            return None
        part = np.arange(len(known)) * POINTS // max(POINTS, len(known))
        size = np.bincount(part)
        rows.append([np.bincount(part, a[known]) / size for a in (x, y)])
    start, end = max(x[0] for x, _ in rows), min(x[-1] for x, _ in rows)
    if start >= end:
        return None
    grid = np.linspace(start, end, POINTS)
    values = np.stack([np.interp(grid, x, y) for x, y in rows])
    curve = {"start": start, "end": end, "mean": short(values.mean(axis=0))}
    if len(runs) > 1:
        curve |= {"low": short(values.min(axis=0)), "high": short(values.max(axis=0))}
    return curve


def short(values):
    return [float(f"{value:.5g}") for value in values]


def collect(groups, figures, common):
    """Return what picture and page draw: panels, the first of which is the return, and curves."""
    runs = [run for members in groups.values() for run in members]
    known = {name: None for run in runs for name in run.columns if name not in X_AXES}
    # The same one for all, or two things would be compared.
    in_all = [n for n in RETURNS if all(make_curve(g, n, "steps") for g in groups.values())]
    returns = (in_all or [n for n in RETURNS if n in known])[:1]
    figures = known if figures is None else figures
    if unknown := [name for name in figures if name not in known]:
        raise PlotError(
            f"--figures: no run has {' or '.join(unknown)}, but there are {', '.join(known)}"
        )
    panels = list(dict.fromkeys([*returns, *figures]))
    curves = []
    for label, members in groups.items():
        drawn = {n: {x: make_curve(members, n, x) for x in X_AXES} for n in panels}
        drawn = {n: by_x for n, by_x in drawn.items() if all(by_x.values())}
        many = f" ({len(members)} runs)" if len(members) > 1 else ""
        curves.append({"label": label + many, "figures": drawn})
    panels = [name for name in panels if any(name in curve["figures"] for curve in curves)]
    if not panels:
        raise PlotError("nothing to draw yet: no figure has two values in each run of a curve")
    pick = min if common else max
    limits = {
        x: pick(max(f[x]["end"] for f in c["figures"].values()) for c in curves if c["figures"])
        for x in X_AXES
    }
    skips = {float(run.columns["frames"][-1] / run.columns["steps"][-1]) for run in runs}
    x_axes = dict(X_AXES)
    if len(skips) == 1:
        skip = skips.pop()
        x_axes["steps"] += f" ({skip:g} frame{'s' * (skip != 1)} each)"
    return {
        "x_axes": x_axes,
        "limits": limits,
        "panels": {name: RETURNS[name] if name in returns else name for name in panels},
        "main": returns[0] if returns and returns[0] in panels else None,
        "curves": curves,
    }


# -------------------------------------------------------------------------------------- picture


def draw_picture(data, x_names, path):
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError:
        raise PlotError(
            "pictures need matplotlib: pip install -r requirements-dev.txt, or draw the page alone "
            "with --out NAME.html"
        ) from None

    def draw(axes, name, x_name):
        for i, curve in enumerate(data["curves"]):
            if name not in curve["figures"]:
                continue
            drawn = curve["figures"][name][x_name]
            x = np.linspace(drawn["start"], drawn["end"], POINTS)
            inside = x <= data["limits"][x_name]
            dashes = [float(d) for d in DASHES[i // len(COLORS) % len(DASHES)].split()]
            style = {"linestyle": (0, dashes), "color": COLORS[i % len(COLORS)]}
            line = np.array(drawn["mean"])[inside]
            handles[i] = axes.plot(x[inside], line, linewidth=1.2, **style, label=curve["label"])[0]
            if "low" in drawn:
                low, high = (np.array(drawn[side])[inside] for side in ("low", "high"))
                axes.fill_between(x[inside], low, high, color=style["color"], alpha=0.2, lw=0)
        axes.set_xlim(0, data["limits"][x_name])
        axes.grid(alpha=0.3)
        if x_name != "hours":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        else:
            axes.locator_params(axis="x", nbins=6)  # of a short run they have many digits

    handles = {}
    drawn = [by_x["steps"] for curve in data["curves"] for by_x in curve["figures"].values()]
    has_band = any("low" in curve for curve in drawn)
    below = [name for name in data["panels"] if name != data["main"]]
    num_rows = -(-len(below) // COLUMNS)
    width = 12 if below or len(x_names) > 1 else 7
    heights = [4] * bool(data["main"]) + [1.8 * num_rows] * bool(below)
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    parts = list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False).flat)
    if data["main"]:
        top = parts.pop(0).subplots(1, len(x_names), sharey=True, squeeze=False)[0]
        for axes, x_name in zip(top, x_names, strict=True):
            draw(axes, data["main"], x_name)
            axes.set_xlabel(data["x_axes"][x_name])
        top[0].set_ylabel(data["panels"][data["main"]])
    if below:
        panels = list(parts[0].subplots(num_rows, COLUMNS, squeeze=False).flat)
        for axes, name in zip(panels, below, strict=False):
            draw(axes, name, x_names[0])
            axes.set_title(name, fontsize=9)
            axes.tick_params(labelsize=8)
        for axes in panels[len(below) :]:
            axes.set_axis_off()
        parts[0].supxlabel(data["x_axes"][x_names[0]], fontsize=9)
    handles = [handles[i] for i in sorted(handles)]
    figure.legend(
        handles=handles, loc="outside upper center", ncols=min(3, len(handles)),
        title="line: mean of the runs; band: lowest to highest" if has_band else None,
    )  # fmt: skip
    figure.savefig(path, dpi=110)


# ----------------------------------------------------------------------------------------- page


def write_page(data, groups, notes, path):
    template = pathlib.Path(__file__).with_name("plot.html").read_text()
    # Tags within the data would be taken for the page's own.
    data = json.dumps(data | {"dashes": DASHES}, allow_nan=False).replace("<", "\\u003c")
    parts = {
        "TITLE": html.escape(", ".join(groups)[:100]),
        "NOTES": "".join(f"<li>{html.escape(note)}</li>" for note in notes),
        "RUNS": table(*describe_runs(groups)),
        "FLAGS": describe_flags(groups),
        "DATA": data,
    }
    for name, part in parts.items():
        template = template.replace(f"<!--{name}-->", part, 1)
    path.write_text(template, encoding="utf-8")


def table(header, rows):
    def cells(tag, row):
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(c))}</{tag}>" for c in row) + "</tr>"

    return f"<table>{cells('th', header)}{''.join(cells('td', row) for row in rows)}</table>"


def describe_runs(groups):
    header = ["curve", "run", "seed", "return", "steps", "hours", "steps/s", "status", "started"]
    header += ["commit", "machine", "versions", "command"]
    rows = []
    for label, members in groups.items():
        for run in members:
            meta, columns = run.meta, run.columns
            returns = [columns.get(name, np.array([])) for name in RETURNS]
            last = [f"{r[np.isfinite(r)][-1]:.4g}" for r in returns if np.isfinite(r).any()]
            steps, hours = columns["steps"][-1] - columns["steps"][0], columns["hours"][-1]
            machine, earlier = meta.get("machine", {}), len(meta.get("earlier", []))
            gpus = ", ".join(machine.get("gpus", [])) or "no GPU"
            cores = f"{machine.get('usable_cores')} of {machine.get('cores')} cores"
            if machine.get("cpu"):  # runs of before do not tell it
                cores += f" of {machine['cpu']}"
            rows.append([
                label, run.path, meta.get("flags", {}).get("seed", "-"), *(last or ["-"])[:1],
                f"{columns['steps'][-1]:,.0f}", f"{hours:.2f}",
                f"{steps / hours / 3600:,.0f}" if hours else "-",
                meta.get("status", "-") + f" (resumed {earlier}x)" * bool(earlier),
                meta.get("start", "-")[:16].replace("T", " "),
                ", ".join(run.commits) or "-",
                f"{machine['host']}: {cores}, {gpus}, {machine['system']}" if machine else "-",
                ", ".join(f"{k} {v}" for k, v in meta.get("versions", {}).items()) or "-",
                shlex.join(meta.get("command", ["-"])),
            ])  # fmt: skip
    return header, rows


def describe_flags(groups):
    """Return a table of the flags in which curves differ, and a folded one of all others."""
    groups = {label: members for label, members in groups.items() if members[0].meta}
    flags = [[run.meta.get("flags", {}) for run in members] for members in groups.values()]
    names = dict.fromkeys(name for members in flags for run in members for name in run)
    differ, same = [], []
    for name in (name for name in names if name not in NOT_SETTINGS):
        told = [list(dict.fromkeys(str(run.get(name, "-")) for run in m)) for m in flags]
        words = [", ".join(curve) for curve in told]
        (same if len(set(words)) == 1 else differ).append([name, *words])
    parts = ""
    if differ:
        parts += "<h2>Flags in which they differ</h2>" + table(["flag", *groups], differ)
    if same:
        same = table(["flag", "value"], [row[:2] for row in same])
        parts += f"<details><summary>Flags that are the same</summary>{same}</details>"
    return parts


# fmt: off
parser = argparse.ArgumentParser(
    description="Draw the learning curves of runs: a picture and a web page.", allow_abbrev=False)
parser.add_argument("runs", nargs="+", metavar="RUN",
                    help="Folder of a run, its logs.csv, or a copy NAME.csv beside NAME.json, that "
                    "of meta.json. LABEL=RUN names its curve; equal labels make one curve.")
parser.add_argument("--out", default="curves",
                    help="Where to write: NAME.png (or .pdf, .svg), NAME.html, or NAME for both. "
                    "By default %(default)s.")
parser.add_argument("--x", default="steps,frames,hours",
                    help="What the picture shows the return against, one panel each; all else is "
                    "against the first. By default %(default)s. The page has a switch.")
parser.add_argument("--figures", help="Columns of the logs to draw below, separated by commas; '' "
                    "for the return alone. By default all that hold numbers.")
parser.add_argument("--common", action="store_true",
                    help="Draw all curves only as far as the shortest one goes.")
# fmt: on


def main(argv=None):
    flags = parser.parse_args(argv)
    x_names = flags.x.split(",")
    if not set(x_names) <= X_AXES.keys():
        raise PlotError(f"--x is {flags.x}; it must be some of {','.join(X_AXES)}")
    figures = None if flags.figures is None else [n for n in flags.figures.split(",") if n]
    notes = []
    runs = [read_run(word, notes) for word in flags.runs]
    # `latest` is a second name of another one.
    runs = list({(run.label, run.path.resolve()): run for run in runs}.values())
    groups = group(runs)
    for label, members in groups.items():
        if len(commits := {commit for run in members for commit in run.commits}) > 1:
            notes.append(f"{label}: one curve of several commits ({', '.join(sorted(commits))})")
        ends = {run.columns["steps"][-1]: run.name for run in members}
        if (end := min(ends)) < 0.9 * max(ends):
            notes.append(f"{label}: ends at {end:,.0f} steps, as {ends[end]} does")
    data = collect(groups, figures, flags.common)
    for note in notes:
        print(note)
    out = flags.out if flags.out.endswith((".html", ".png", ".pdf", ".svg")) else ""
    for path in map(pathlib.Path, [out] if out else [f"{flags.out}.html", f"{flags.out}.png"]):
        if path.suffix == ".html":
            write_page(data, groups, notes, path)
        else:
            draw_picture(data, x_names, path)
        print(f"Wrote {path}")


if __name__ == "__main__":
    try:
        main()
    except (PlotError, OSError) as error:
        sys.exit(f"plot.py: {error}")
