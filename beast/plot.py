# SPDX-License-Identifier: Apache-2.0
"""Draw the learning curves of runs, and all other metrics in their logs: a picture and a web page.

    python -m beast.plot ~/logs/torchbeast/latest                  curves.png, .html in its folder
    python -m beast.plot ~/logs/torchbeast/pong-* --output pong    pong.png and pong.html
    python -m beast.plot new=RUN new=RUN old=RUN --output new.html named curves, the page alone

curves.py says which runs become one curve. The page is one file that needs no network; plot.html is
its template.
"""

import argparse
import html
import json
import pathlib
import shlex
import sys

import numpy as np

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

COLORS = ["#0072b2", "#d55e00", "#008060", "#b0478f", "#a87900", "#6b5b50"]  # as in plot.html
DASHES = ["", "6 3", "2 2"]  # of the first six curves, of the next six, ...
COLUMNS = 4  # of panels below the curves in the picture


# -------------------------------------------------------------------------------------- picture


def draw_picture(data, x_names, path):
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError:
        raise PlotError(
            "pictures need matplotlib: pip install -r requirements-dev.txt, or draw the page alone "
            "with --output NAME.html"
        ) from None

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
            axes.locator_params(axis="x", nbins=6)  # of a short run they have many digits

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
            if machine.get("cpu"):  # older runs do not have it
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
    """Return a table of the flags in which curves differ, and a folded one of the others."""
    groups = {label: members for label, members in groups.items() if members[0].meta}
    flags = [[run.meta.get("flags", {}) for run in members] for members in groups.values()]
    names = dict.fromkeys(name for members in flags for run in members for name in run)
    differ, same = [], []
    for name in (name for name in names if name not in NOT_SETTINGS):
        values = [", ".join(dict.fromkeys(str(run.get(name, "-")) for run in m)) for m in flags]
        (same if len(set(values)) == 1 else differ).append([name, *values])
    parts = ""
    if differ:
        parts += "<h2>Flags in which they differ</h2>" + table(["flag", *groups], differ)
    if same:
        same = table(["flag", "value"], [row[:2] for row in same])
        parts += f"<details><summary>Flags that are the same</summary>{same}</details>"
    return parts


# fmt: off
parser = argparse.ArgumentParser(
    prog="python -m beast.plot",
    description="Draw the learning curves of runs: a picture and a web page.", allow_abbrev=False)
parser.add_argument("runs", nargs="+", metavar="RUN",
                    help="Folder of a run, its logs.csv, or a copy NAME.csv beside NAME.json, that "
                    "of meta.json. LABEL=RUN names its curve; equal labels make one curve.")
parser.add_argument("--output", "--out", dest="out", metavar="NAME",
                    help="Where to write: NAME.png (or .pdf, .svg), NAME.html, or NAME for both. "
                    "By default curves, in the folder of the first run.")
parser.add_argument("--x", help="What the picture shows the return against, one panel each; all "
                    f"else is against the first. Some of {','.join(X_AXES)}; by default "
                    "steps,frames,hours, without frames where a step is one frame, and with "
                    "minutes for runs of less than an hour. The page has a switch.")
parser.add_argument("--metrics", help="Columns of the logs to draw below, separated by commas; '' "
                    "for the return alone. By default all that hold numbers.")
parser.add_argument("--common", action="store_true",
                    help="Draw all curves only as far as the shortest one goes.")
# fmt: on


def main(argv=None):
    flags = parser.parse_args(argv)
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
        if len(commits := {commit for run in members for commit in run.commits}) > 1:
            notes.append(f"{label}: one curve of several commits ({', '.join(sorted(commits))})")
        ends = {run.columns["steps"][-1]: run.name for run in members}
        if (end := min(ends)) < 0.9 * max(ends):
            notes.append(f"{label}: ends at {end:,.0f} steps, as {ends[end]} does")
    page_x_names = [*x_names, *(n for n in default_x_names(runs) if n not in x_names)]
    data = collect(groups, metrics, flags.common, page_x_names)
    for note in notes:
        print(note)
    out = flags.out or str(runs[0].path.parent / "curves")
    is_one = out.endswith((".html", ".png", ".pdf", ".svg"))
    for path in map(pathlib.Path, [out] if is_one else [f"{out}.html", f"{out}.png"]):
        if path.suffix == ".html":
            write_page(data, groups, notes, path)
        else:
            draw_picture(data, x_names, path)
        print(f"Wrote {path}")


if __name__ == "__main__":
    try:
        main()
    except (PlotError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
