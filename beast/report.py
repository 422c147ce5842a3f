# SPDX-License-Identifier: Apache-2.0
"""Compare runs as the field asks for it: interquartile means with intervals, profiles, a picture.

    python -m beast.report new=RUN new=RUN ... old=RUN ... --output report    report.md, report.png

Runs with the same label are one agent; each agent has the same games, and as many runs on each. A
run's score is its mean return of the last 100 games, at the end or at --steps, human-normalized: 0
is a random player, 1 a human one. runs/statistics.py has the formulas. The picture has intervals,
performance profiles, and interquartile means against steps; with --published, those of others, too.
"""

import argparse
import csv
import itertools
import math
import pathlib
import sys

import numpy as np
from matplotlib.figure import Figure

from beast.parser import positive
from beast.plot import COLORS, describe_commits, describe_flags, describe_runs
from beast.runs import statistics
from beast.runs.curves import RETURNS, PlotError, group, read_run

STATISTICS = {
    "interquartile mean": statistics.interquartile_mean,
    "median": statistics.median,
    "mean": statistics.mean,
    "optimality gap": statistics.optimality_gap,
}
NUM_POINTS = 30  # of a curve of interquartile means

# fmt: off
parser = argparse.ArgumentParser(
    prog="python -m beast.report", description="Compare agents by few runs on several games.",
    allow_abbrev=False)
parser.add_argument("runs", nargs="+", metavar="RUN",
                    help="Folder of a run, or its logs.csv; LABEL=RUN says of which agent.")
parser.add_argument("--output", default="report", metavar="NAME",
                    help="NAME.md and NAME.png are written. Default: %(default)s.")
parser.add_argument("--steps", type=positive(int),
                    help="Compare after so many agent steps. Default: at the end of each run.")
parser.add_argument("--scores", type=pathlib.Path, metavar="FILE",
                    default=statistics.HUMAN_SCORES,
                    help="CSV of game, score of a random player, and of one that counts as 1. "
                    "Default: Atari's 57 games and their human players.")
parser.add_argument("--published", type=pathlib.Path, metavar="FILE",
                    help="CSV of agent, game, agent steps, and the mean return of others' runs; "
                    "the table has those at --steps.")
# fmt: on


def read_references(path):
    try:
        return statistics.read_references(path)
    except (OSError, ValueError, IndexError, csv.Error) as error:
        raise PlotError(f"cannot read {path}: {error}") from None


def read_published(path, games):
    """Return a dict from agents to dicts from steps to scores [1, games], where no game lacks."""
    returns = {}
    try:
        with open(path, newline="") as file:
            for agent, game, steps, value in filter(None, list(csv.reader(file))[1:]):
                by_game = returns.setdefault(f"{agent} (published)", {}).setdefault(int(steps), {})
                by_game[game] = float(value)
                if not math.isfinite(by_game[game]):
                    raise ValueError(f"{agent} has a return of {value} in {game}")
    except (OSError, ValueError, csv.Error) as error:
        raise PlotError(f"cannot read {path}: {error}") from None
    published = {}
    for agent, by_steps in returns.items():
        for steps, by_game in sorted(by_steps.items()):
            if by_game.keys() >= set(games):
                row = np.array([[by_game[game] for game in games]])
                published.setdefault(agent, {})[steps] = row
    if not published:
        raise PlotError(f"{path} has no agent with all of {', '.join(games)}")
    return published


def name_game(run):
    """Return the game as the table of scores writes it: beam_rider of BeamRiderNoFrameskip-v4."""
    env = run.meta.get("flags", {}).get("env")
    if env is None:
        raise PlotError(f"{run.path}: meta.json, which names the game, is missing or has no --env")
    name = env.split("/")[-1].split("-v")[0].removesuffix("NoFrameskip")
    words = (f"_{c.lower()}" if c.isupper() else c for c in name)
    game = "".join(words).lstrip("_")
    # MinAtar has games of the same names.
    may_be_atari = env.startswith("ALE/") or ("/" not in env and "-v" in env)
    return game if may_be_atari and statistics.human_normalized(game, 0) is not None else env


def choose_returns(runs):
    """Give all runs a column "returns", some of which may be nan; return its name in the logs.

    It is that of whole games where any run has one: lives are not to be compared with games.
    """

    def have(name):
        return [run for run in runs if np.isfinite(run.columns.get(name, np.nan)).any()]

    name = next(filter(have, RETURNS), next(iter(RETURNS)))
    if others := [str(run.path) for run in runs if run not in have(name)]:
        raise PlotError(f"{', '.join(others)}: no {name} yet: leave out, or wait")
    for run in runs:
        run.columns["returns"] = run.columns[name]
    return name


def describe_mixtures(groups):
    """Return a line for each setting in which runs of one agent, or ids of one game, differ."""
    envs = {}
    for run in itertools.chain(*groups.values()):
        game = name_game(run)
        envs.setdefault(game, {})[run.meta["flags"]["env"]] = None
    lines = [f"{game} is of {', '.join(ids)}" for game, ids in envs.items() if len(ids) > 1]
    for label, runs in groups.items():
        names = dict.fromkeys(name for run in runs for name in run.settings if name != "env")
        for name in names:
            values = dict.fromkeys(str(run.settings.get(name, "-")) for run in runs)
            if len(values) > 1:
                lines.append(f"{label}: --{name} is {', '.join(values)} in runs of one agent")
    return lines


def score(run, steps):
    """Return the mean return of a run's last 100 games, at its end or after so many steps."""
    returns = run.columns["returns"]
    if steps is not None and run.columns["steps"][-1] < steps:
        raise PlotError(
            f"{run.path} ends at {run.columns['steps'][-1]:,.0f} steps, before --steps {steps:,}"
        )
    inside = np.isfinite(returns)
    if steps is not None:
        inside &= run.columns["steps"] <= steps
        if not inside.any():
            raise PlotError(f"{run.path} has no return yet after --steps {steps:,}: give more")
    return returns[inside][-1]


def tabulate(groups, steps):
    """Return games, and for each agent its scores [runs, games]."""
    scores = {}
    for label, runs in groups.items():
        by_game = {}
        for run in runs:
            by_game.setdefault(name_game(run), []).append(score(run, steps))
        scores[label] = by_game
    first, by_game = next(iter(scores.items()))
    games = sorted(by_game)
    for label, own in scores.items():
        if missing := set(games) ^ set(own):
            raise PlotError(f"only one of {first} and {label} has runs of {', '.join(missing)}")
        if len(counts := {len(values) for values in own.values()}) > 1:
            listed = ", ".join(f"{game} {len(own[game])}" for game in games)
            raise PlotError(f"{label} needs as many runs of each game: {listed} ({min(counts)}?)")
    return games, {label: np.array([own[g] for g in games]).T for label, own in scores.items()}


def normalize(games, scores, references, path):
    """Return scores in which 0 is a random player, and 1 the one of the table."""
    if missing := [game for game in games if game not in references]:
        raise PlotError(
            f"{path} has no scores of {', '.join(missing)}: give others by --scores FILE"
        )
    low, high = np.array([references[game] for game in games]).T
    return {label: (values - low) / (high - low) for label, values in scores.items()}


def compute_curves(groups, references, path):
    """Return for each agent steps [N], and its normalized scores there [N, runs, games].

    N is 0 where one run ends before another one has a return.
    """
    curves = {}
    for label, runs in groups.items():
        known = [run.columns["steps"][np.isfinite(run.columns["returns"])] for run in runs]
        first, last = max(steps[0] for steps in known), min(steps[-1] for steps in known)
        points = np.unique(np.linspace(first, last, NUM_POINTS)) if first <= last else []
        scores = []
        for point in points:
            games, at_point = tabulate({label: runs}, point)
            scores.append(normalize(games, at_point, references, path)[label])
        curves[label] = np.array(points), np.array(scores)
    return curves


def describe(games, scores, normalized, published):
    """Return the report in Markdown, without the picture.

    Args:
      scores, normalized: dicts from agents to arrays [runs, games].
      published: the same of others' means, [1, games], as a pair.
    """
    lines = [f"| | runs | {' | '.join(STATISTICS)} |", "|---" * (2 + len(STATISTICS)) + "|"]
    for label, values in normalized.items():
        cells = []
        for statistic in STATISTICS.values():
            low, high = statistics.interval(statistic, values)
            interval = f" ({low:.3f} to {high:.3f})" if len(values) > 1 else ""
            cells.append(f"{statistic(values):.3f}{interval}")
        size = f"{len(values)} x {len(games)} games"
        lines.append(f"| {label} | {size} | {' | '.join(cells)} |")
    for label, values in published[1].items():
        cells = [f"{statistic(values):.3f}" for statistic in STATISTICS.values()]
        lines.append(f"| {label} | means | {' | '.join(cells)} |")
    if len(normalized) > 1:
        lines += ["", "| | probability of improvement |", "|---|---|"]
    for (label, values), (other, others) in itertools.permutations(normalized.items(), 2):
        probability = statistics.probability_of_improvement(values, others)
        low, high = statistics.interval(
            statistics.probability_of_improvement, values, others, num_samples=2000
        )
        is_known = min(len(values), len(others)) > 1
        interval = f" ({low:.2f} to {high:.2f})" if is_known else ""
        lines.append(f"| {label} over {other} | {probability:.2f}{interval} |")
    scores = scores | published[0]
    lines += ["", f"| game | {' | '.join(scores)} |", "|---" * (1 + len(scores)) + "|"]
    for i, game in enumerate(games):
        cells = [", ".join(map(show, values[:, i])) for values in scores.values()]
        lines.append(f"| {game} | {' | '.join(cells)} |")
    lines += [
        "",
        "Normalized scores. Intervals are of 95 % by a stratified bootstrap over the runs of each "
        "game. Of few runs they are too narrow: with 2, 3, 5 and 10 runs of each of five games "
        "they had the true value in 50 to 75, 72 to 88, 82 to 93 and 89 to 95 % of simulations, "
        "in the fewest where one game decides.",
        "",
    ]
    return "\n".join(lines) + "\n"


def show(value):
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"


def draw(normalized, curves, published, steps, path):
    """Draw intervals, performance profiles, and interquartile means against steps.

    Args:
      normalized: a dict from agents to scores [runs, games].
      curves: what compute_curves returns.
      published: a dict from agents to dicts from steps to normalized means [1, games].
      steps: which of the published means stand beside the scores.
    """
    colors = dict(zip([*normalized, *published], itertools.cycle(COLORS), strict=False))
    theirs = {agent: means[steps] for agent, means in published.items() if steps in means}
    rows = normalized | theirs
    figure = Figure(figsize=(12, 4.6 + 0.4 * max(3, len(rows))), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[1, 2])
    panels = list(upper.subplots(1, len(STATISTICS)))
    shares, means = lower.subplots(1, 2)
    for panel, (name, statistic) in zip(panels, STATISTICS.items(), strict=True):
        for i, (label, values) in enumerate(rows.items()):
            low, high = statistics.interval(statistic, values)
            color = colors[label]
            panel.barh(-i, high - low, left=low, height=0.6, color=color, alpha=0.4)
            panel.plot([statistic(values)] * 2, [-i - 0.3, -i + 0.3], color=color)
        panel.set_yticks(-np.arange(len(rows)), rows if panel is panels[0] else [])
        panel.set_title(name, fontsize=10)
        panel.use_sticky_edges = False  # else a bar that begins leftmost has no margin
        panel.margins(x=0.1)
        panel.grid(axis="x", alpha=0.3)
    iqm = statistics.interquartile_mean
    highest = max(values.max() for values in normalized.values())
    levels = np.linspace(0, max(1.0, highest), 100)
    for label, values in normalized.items():
        low, high = statistics.interval(
            lambda x: statistics.profile(x, levels), values, num_samples=1000
        )
        color = colors[label]
        shares.plot(levels, statistics.profile(values, levels), color=color, label=label)
        shares.fill_between(levels, low, high, color=color, alpha=0.2, lw=0)
        at, scores = curves[label]
        if len(at):
            bands = [statistics.interval(iqm, row, num_samples=1000) for row in scores]
            means.plot(at / 1e6, iqm(scores), color=color, label=label)
            means.fill_between(at / 1e6, *np.transpose(bands), color=color, alpha=0.2, lw=0)
    for label, by_steps in published.items():
        points = [(at / 1e6, iqm(scores)) for at, scores in by_steps.items()]
        means.plot(*zip(*points, strict=True), "--", color=colors[label], label=label)
    shares.set_title("share of runs with a score above", fontsize=10)
    means.set_title("interquartile mean, against million steps", fontsize=10)
    last = [at[-1] for at, _ in curves.values() if len(at)]
    means.set_xlim(0, 1.02 * max(last) / 1e6 if last else None)
    for panel in (shares, means):
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main(argv=None):
    flags = parser.parse_args(argv)
    notes = []
    runs = [read_run(argument, notes) for argument in flags.runs]
    runs = list({(run.label, run.path.resolve()): run for run in runs}.values())  # `latest`, say
    at = "at the end" if flags.steps is None else f"after {flags.steps:,} steps"
    notes.append(f"Scores are of {choose_returns(runs)} {at}")
    ends = {run.columns["steps"][-1]: run.path for run in runs}
    if flags.steps is None and (end := min(ends)) < 0.9 * max(ends):
        notes.append(f"{ends[end]} ends at {end:,.0f} steps, others later: compare by --steps")
    labels = {run.label for run in runs}
    if "" in labels and len(labels) > 1:
        raise PlotError("some runs have a label and some have none: write LABEL=RUN for all")
    groups = group(runs) if "" not in labels else {"runs": runs}
    notes += [line for line in describe_flags(groups) if not line.startswith("--env:")]
    notes += describe_mixtures(groups) + describe_commits(groups) + describe_runs(groups)
    games, scores = tabulate(groups, flags.steps)
    references = read_references(flags.scores)

    def normalized(by_label):
        return normalize(games, by_label, references, flags.scores)

    published = read_published(flags.published, games) if flags.published else {}
    theirs = {agent: means.get(flags.steps) for agent, means in published.items()}
    if out := [agent for agent, values in theirs.items() if values is None]:
        notes.append(f"the table is without {', '.join(out)}: no means {at}")
    theirs = {agent: values for agent, values in theirs.items() if values is not None}
    text = describe(games, scores, normalized(scores), (theirs, normalized(theirs)))
    output = pathlib.Path(flags.output)
    if not output.name:
        raise PlotError(f"--output is {output}, a folder: name a file in it")
    picture, table = (output.with_name(f"{output.name}{end}") for end in (".png", ".md"))
    draw(
        normalized(scores),
        compute_curves(groups, references, flags.scores),
        {agent: normalized(by_steps) for agent, by_steps in published.items()},
        flags.steps,
        picture,
    )
    text += "".join(f"- {note}\n" for note in notes)
    table.write_text(f"{text}\n![Intervals and performance profiles]({picture.name})\n")
    print(text)
    print(f"Wrote {table} and {picture}")


if __name__ == "__main__":
    try:
        main()
    except (PlotError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
