# SPDX-License-Identifier: Apache-2.0
"""Reads logs of runs and makes curves of them. No torch here.

Runs that differ only in the seed are one curve: the mean of the runs, in a band from the
lowest to the highest of them, as far as all of them go. Equal labels make one curve of any runs.
"""

import csv
import io
import json
import pathlib
from typing import NamedTuple

import numpy as np

from beast.runs.code_version import list_changes

POINTS = 250  # of a curve; each is a mean over its share of the rows
X_AXES = {
    "steps": "agent steps",
    "frames": "frames",
    "minutes": "minutes of running",
    "hours": "hours of running",
}
RETURNS = {
    "mean_game_return": "mean return of the last 100 games",
    "mean_episode_return": "mean return of the last 100 episodes",
}
NOT_SETTINGS = {  # flags in which the runs of one curve may differ
    "seed", "xpid", "savedir", "mode", "disable_checkpoint", "num_episodes", "greedy",
    "eval_interval", "wandb", "write_profiler_trace", "end_with_stdin", "num_test_envs",
    "pipes_basename", "server_addresses", "tls_cert", "tls_key", "tls_ca", "auth_token_file",
    "checkpoint_interval_s", "stall_timeout_s", "best", "result_file", "record_video",
    "chosen", "fp32_devices", "rank", "elastic", "listen", "max_streams",
    "insecure", "spaces", "compile",
}  # fmt: skip


class PlotError(ValueError):
    """The runs cannot be drawn; the message says what to change."""


class Run(NamedTuple):
    label: str  # empty: none was given
    path: pathlib.Path  # of its log
    name: str
    meta: dict  # empty: none was found
    columns: dict  # from names to arrays, NaN where there is no value; X_AXES among them

    @property
    def settings(self):
        """Flags that runs of one curve share. An absent switch counts as off."""
        flags = self.meta.get("flags", {}).items()
        # Not `in (None, False)`: 0 is False to that, and is a value.
        settings = {
            k: v for k, v in flags if k not in NOT_SETTINGS and v is not None and v is not False
        }
        if settings.get("num_learners") == 1:  # older runs do not have it
            del settings["num_learners"]
        return {"program": self.program} | settings if self.meta else {}

    @property
    def program(self):
        return pathlib.Path(self.meta.get("command", ["-"])[0]).name

    @property
    def commits(self):
        """Commits that the run was started and resumed with; + marks uncommitted changes."""
        metas = [*self.meta.get("earlier", []), self.meta]
        code = [(meta.get("command", ["-"]), meta.get("git", {})) for meta in metas]
        marked = [
            git["commit"][:7] + " + changes" * bool(list_changes(command, git))
            for command, git in code
            if git.get("commit")
        ]
        return list(dict.fromkeys(marked))


def read_run(argument, notes):
    """Read a run given as [LABEL=]PATH; append warnings about it to `notes`."""
    label, path = "", pathlib.Path(argument)
    if "=" in argument and not path.exists():
        label, _, path = argument.partition("=")
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
        raise PlotError(f"cannot read {meta_path} ({error}): repair it or move it away") from error
    flags = meta.get("flags", {"frame_skip": 4})
    # Older runs have only the flag of Atari's wrappers.
    frames_per_step = flags.get("frames_per_step", flags.get("frame_skip", 1))
    columns["frames"] = columns["steps"] * frames_per_step
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
        raise PlotError(f"{path} is empty: its run has logged no row yet")
    header, *rows = rows
    if missing := {"step", "_time"}.difference(header):
        raise PlotError(
            f"{path} is no log of a run: its first line names no {' and no '.join(sorted(missing))}"
        )
    for line, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise PlotError(
                f"{path} is broken: line {line} has {len(row)} fields and the first line "
                f"{len(header)}; repair or delete that line"
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
    columns["minutes"] = 60 * columns["hours"]
    columns.pop("_tick", None)
    return columns


def hours_of_running(times):
    """Return hours of training since the first row.

    Times when the run was stopped are left out; so is work that was lost when the run was killed.
    """
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
        parts = [f"{n}={settings[n]}" if n in settings else f"no {n}" for n in differing]
        label = first.label or (", ".join(parts) if settings else first.name)
        if len(label) > 70 and not first.label:
            label = first.name
        label = label or str(settings.get("env", first.name))
        curves[f"{label} ({first.path})" if label in curves else label] = members
    return curves


def make_curve(runs, name, x_name):
    """Return mean, lowest and highest of runs up to the shortest; None if one has no values.

    They are interpolated at POINTS values of x, evenly from `start` to `end`.
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


def default_x_names(runs):
    """Return default x axes: frames if a step has several, minutes if runs are short."""
    names = ["steps"]
    if any(run.columns["frames"][-1] != run.columns["steps"][-1] for run in runs):
        names.append("frames")
    return [*names, "hours" if max(run.columns["hours"][-1] for run in runs) >= 1 else "minutes"]


def collect(groups, metrics, common, x_names):
    """Return axes, panels and curves to draw, as a dict.

    Args:
      groups: dict from the labels of curves to their runs.
      metrics: columns to draw besides the return; None: all of them.
      common: draw curves only as far as the shortest one goes.
      x_names: of X_AXES.

    Returns:
      x_axes: titles by name; limits: where each ends; panels: titles by column, the return first;
      main: the column that is the return, or None; curves: dicts of a label and metrics, by column
      and x axis.
    """
    runs = [run for members in groups.values() for run in members]
    known = {name: None for run in runs for name in run.columns if name not in X_AXES}
    # One return for all, or two things would be compared.
    in_all = [n for n in RETURNS if all(make_curve(g, n, "steps") for g in groups.values())]
    returns = (in_all or [n for n in RETURNS if n in known])[:1]
    metrics = known if metrics is None else metrics
    if unknown := [name for name in metrics if name not in known]:
        raise PlotError(
            f"--metrics: no run has {' or '.join(unknown)}, but there are {', '.join(known)}"
        )
    panels = list(dict.fromkeys([*returns, *metrics]))
    curves = []
    for label, members in groups.items():
        drawn = {n: {x: make_curve(members, n, x) for x in x_names} for n in panels}
        drawn = {n: by_x for n, by_x in drawn.items() if all(by_x.values())}
        many = f" ({len(members)} runs)" if len(members) > 1 else ""
        curves.append({"label": label + many, "metrics": drawn})
    panels = [name for name in panels if any(name in curve["metrics"] for curve in curves)]
    if not panels:
        raise PlotError("nothing to draw yet: no column has two values in each run of a curve")
    pick = min if common else max
    limits = {
        x: pick(max(m[x]["end"] for m in c["metrics"].values()) for c in curves if c["metrics"])
        for x in x_names
    }
    skips = {float(run.columns["frames"][-1] / run.columns["steps"][-1]) for run in runs}
    x_axes = {name: X_AXES[name] for name in x_names}
    if len(skips) == 1 and "steps" in x_axes:
        skip = skips.pop()
        x_axes["steps"] += f" ({skip:g} frame{'s' * (skip != 1)} each)"
    return {
        "x_axes": x_axes,
        "limits": limits,
        "panels": {name: RETURNS[name] if name in returns else name for name in panels},
        "main": returns[0] if returns and returns[0] in panels else None,
        "curves": curves,
    }
