# SPDX-License-Identifier: Apache-2.0
"""Draw the learning curves of runs, and all other metrics in their logs, as a picture.

    python -m beast.plot ~/logs/torchbeast/latest                  curves.png, in its folder
    python -m beast.plot ~/logs/torchbeast/pong-* --output pong    pong.png
    python -m beast.plot new=RUN new=RUN old=RUN --output new.svg  named curves

runs/curves.py says which runs become one curve.
"""

import argparse
import pathlib
import sys

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from beast.runs.curves import (
    NOT_SETTINGS,
    POINTS,
    RETURNS,
    X_AXES,
    PlotError,
    collect,
    default_x_names,
    group,
    read_run,
)
from beast.runs.statistics import show

COLORS = ["#0072b2", "#d55e00", "#008060", "#b0478f", "#a87900", "#6b5b50", "#1a1a1a", "#56b4e9"]
DASHES = ["", "6 3", "2 2"]  # of the first eight curves, of the next eight, ...
COLUMNS = 4  # of panels below the curves in the picture


def draw_picture(data, path):
    """Draw what curves.collect has returned."""
    x_names = list(data["x_axes"])

    def draw(axes, name, x_name):
        for i, curve in enumerate(data["curves"]):
            if name not in curve["metrics"]:
                continue
            drawn = curve["metrics"][name][x_name]
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
        if x_name in ("steps", "frames"):
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        else:
            axes.locator_params(axis="x", nbins=6)  # numbers of a short run have many digits

    handles = {}
    drawn = [by_x[x_names[0]] for curve in data["curves"] for by_x in curve["metrics"].values()]
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


def describe_runs(groups):
    """Return a line a run: where it is, what it reached, and with which code."""
    lines = []
    for label, members in groups.items():
        for run in members:
            returns = [run.columns[name] for name in RETURNS if name in run.columns]
            last = [
                f"return {show(r[np.isfinite(r)][-1])}, " for r in returns if np.isfinite(r).any()
            ]
            earlier = len(run.meta.get("earlier", []))
            lines.append(
                f"{label}: {run.path}: {''.join(last[:1])}{run.columns['steps'][-1]:,.0f} steps, "
                f"{run.columns['hours'][-1]:.2f} hours, {run.meta.get('status', 'no meta.json')}"
                f"{f' (resumed {earlier}x)' * bool(earlier)}, commit "
                f"{', '.join(run.commits) or 'unknown'}"
            )
    return lines


def describe_commits(groups):
    """Return a line for each label whose runs are of several commits."""
    commits = {
        label: {c for run in members for c in run.commits} for label, members in groups.items()
    }
    return [
        f"{label}: runs of several commits ({', '.join(sorted(found))})"
        for label, found in commits.items()
        if len(found) > 1
    ]


def describe_flags(groups):
    """Return a line for each flag in which curves differ."""
    groups = {label: members for label, members in groups.items() if members[0].meta}
    flags = [[run.meta.get("flags", {}) for run in members] for members in groups.values()]
    names = dict.fromkeys(name for members in flags for run in members for name in run)
    lines = []
    for name in (name for name in names if name not in NOT_SETTINGS):
        values = [", ".join(sorted({str(run.get(name, "-")) for run in m})) for m in flags]
        if len(set(values)) > 1:
            of_each = (f"{value} ({label})" for label, value in zip(groups, values, strict=True))
            lines.append(f"--{name}: {'; '.join(of_each)}")
    return lines


# fmt: off
parser = argparse.ArgumentParser(
    prog="python -m beast.plot",
    description="Draw the learning curves of runs as a picture.", allow_abbrev=False)
parser.add_argument("runs", nargs="+", metavar="RUN",
                    help="Folder of a run, its logs.csv, or a copy NAME.csv beside NAME.json, that "
                    "of meta.json. LABEL=RUN names its curve; equal labels make one curve.")
parser.add_argument("--output", "--out", dest="out", metavar="NAME",
                    help="Output file: NAME.png, .pdf or .svg. By default curves.png, in the "
                    "folder of the first run.")
parser.add_argument("--x", help="x axes of the return, one panel each; other metrics use "
                    f"the first. Some of {','.join(X_AXES)}; by default "
                    "steps,frames,hours, without frames where a step is one frame, and with "
                    "minutes for runs of less than an hour.")
parser.add_argument("--metrics", help="Columns of the logs to draw below, separated by commas; '' "
                    "for the return alone. By default all that hold numbers.")
parser.add_argument("--common", action="store_true",
                    help="Draw all curves only as far as the shortest one goes.")
# fmt: on


def count_returns(run):
    return max(np.isfinite(run.columns.get(name, np.nan)).sum() for name in RETURNS)


def collect_curves(flags):
    """Return what to draw, lines to print about its runs, and the folder of the first one."""
    metrics = None if flags.metrics is None else [n for n in flags.metrics.split(",") if n]
    notes = []
    runs = [read_run(argument, notes) for argument in flags.runs]
    # `latest` is a second name of another one.
    runs = list({(run.label, run.path.resolve()): run for run in runs}.values())
    x_names = default_x_names(runs) if flags.x is None else list(dict.fromkeys(flags.x.split(",")))
    if not set(x_names) <= X_AXES.keys():
        raise PlotError(f"--x is {flags.x}; it must be some of {','.join(X_AXES)}")
    groups = group(runs)
    for label, members in groups.items():
        ends = {run.columns["steps"][-1]: run.name for run in members}
        if (end := min(ends)) < 0.9 * max(ends):
            notes.append(f"{label}: ends at {end:,.0f} steps, as {ends[end]} does")
    data = collect(groups, metrics, flags.common, x_names)
    for curve, members in zip(data["curves"], groups.values(), strict=True):
        if data["main"] not in curve["metrics"]:
            few = [run.name for run in members if count_returns(run) < 2]
            reason = f"too few in {', '.join(few)}" if few else "its runs do not overlap"
            notes.append(f"{curve['label']}: no return is drawn: {reason}")
    lines = [*describe_runs(groups), *describe_flags(groups), *describe_commits(groups), *notes]
    return data, lines, runs[0].path.parent


def main(argv=None):
    flags = parser.parse_args(argv)
    data, lines, folder = collect_curves(flags)
    path = pathlib.Path(flags.out or folder / "curves.png")
    if not path.name:
        raise PlotError(f"--output is {path}, a folder: name a file in it")
    if path.suffix == ".html":
        raise PlotError(f"--output is {path}, but a picture is a .png, .pdf or .svg")
    if path.suffix not in (".png", ".pdf", ".svg"):  # the name of a run may have dots, too
        path = path.with_name(f"{path.name}.png")
    print(*lines, sep="\n")
    draw_picture(data, path)
    print(f"Wrote {path}")


if __name__ == "__main__":
    try:
        main()
    except (PlotError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
