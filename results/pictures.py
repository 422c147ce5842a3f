# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of this folder, and print figures of its tables.

    python results/pictures.py

A suite is a folder of runs, which are folders with meta.json and logs.csv. published.csv has what
others reported, which the pictures show as broken lines; the READMEs have the protocols.
"""

import csv
import pathlib
import sys

import numpy as np
from matplotlib.figure import Figure

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from beast.runs.curves import read_run

RETURN = "mean_game_return"  # of the last 100 whole games
START_UPDATES = 1000  # from which on the KL divergence is looked at
ARMS = {  # of the staleness runs, by --correction and --policy_clipping
    ("vtrace", 0.2): "V-trace, clipped policy (the default)",
    ("vtrace", 0.5): "the same, --policy_clipping 0.5",
    ("vtrace", 1e9): "V-trace",
    ("truncated", 0.2): "truncated weights",
    ("decoupled", 0.2): "decoupled PPO",
    ("m2po", 0.2): "M2PO",
    ("none", 0.2): "no correction",
}
GOALS = {  # for RETURN; MinAtar's for the mean of the seeds
    "PongNoFrameskip-v4": 18,
    "BreakoutNoFrameskip-v4": 400,  # ours, as Pong's
    "QbertNoFrameskip-v4": 15317,  # from here on ACER's, the best of A2C, ACER and PPO
    "SeaquestNoFrameskip-v4": 1740,
    "SpaceInvadersNoFrameskip-v4": 1214,
    "BeamRiderNoFrameskip-v4": 3863,
    "MinAtar/Asterix-v0": 30.6,  # 0.9 of one run without the clipped policy, and DQN's 20
    "MinAtar/Breakout-v0": 15.9,
    "MinAtar/Freeway-v0": 56.3,
    "MinAtar/Seaquest-v0": 20,
    "MinAtar/SpaceInvaders-v0": 115.6,
}
OLD_IDS = {"breakout": "MinAtar/Breakout-v0"}  # of an example that there was
AFTERWARDS = 500_000  # steps after the goal, over which a run should stay there
DIAGNOSTICS = {  # pictures of these columns, with the clipped policy and without
    "entropy_share": "entropy, share of the highest",
    "behavior_target_kl": "KL to the acting policy",
    "explained_variance": "explained variance",
}
COMPARED = {  # rows of that picture: their folders of runs, by arm
    "Pong": ("atari/pong-1[1-5]", "tuning/unclipped/pong-*"),
    "MinAtar Breakout": ("tuning/relu/breakout-*", "tuning/unclipped/minatar-breakout"),
}
LEARNERS = {  # panels of that picture: folders of runs of one learner, and of several
    "MinAtar Breakout": ("tuning/relu/breakout-*", "learners/breakout-*"),
    "Pong": ("atari/pong-1[1-5]", "learners/pong-*"),
}


def read_suite(name):
    """Return a dict from games to their runs, in the order of the folders' names."""
    games = {}
    for path in sorted((HERE / name).glob("*/logs.csv")):
        run = read_run(str(path), notes=[])
        env = run.meta["flags"]["env"]
        games.setdefault(OLD_IDS.get(env, env), []).append(run)
    return games


def finite(run, name):
    """Return steps and values of a column's rows that have a value."""
    steps, values = run.columns["steps"], run.columns[name]
    known = np.isfinite(values)
    return steps[known], values[known]


def large_kl(run):
    """Return the KL divergence's median, its 99th percentile, and the share of rows above 0.1."""
    flags = run.meta["flags"]
    steps, kl = finite(run, "behavior_target_kl")
    kl = kl[steps >= START_UPDATES * flags["batch_size"] * flags["unroll_length"]]
    return np.median(kl), np.quantile(kl, 0.99), np.mean(kl > 0.1)


def panels(games):
    """Return a figure with a panel for each game, in rows of three, and the panels."""
    columns = min(3, len(games))
    rows = -(-len(games) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.1 * rows), layout="constrained", dpi=90)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, game in zip(axes, games, strict=False):
        panel.set_title(game.removesuffix("NoFrameskip-v4"))
        panel.grid(alpha=0.3)
    for panel in axes[len(games) :]:
        panel.remove()
    return figure, axes


def describe_goal(run):
    """Return cells of a table: goal, when it was passed, median and lowest return after that."""
    goal = GOALS[run.meta["flags"]["env"]]
    steps, returns = finite(run, RETURN)
    passed = np.flatnonzero(returns >= goal)
    if not passed.size:
        return f"{goal:,}", "-", "-"
    step = steps[passed[0]]
    minutes = run.columns["minutes"][run.columns["steps"] >= step][0]
    then = returns[(steps >= step) & (steps <= step + AFTERWARDS)]
    when = f"{step / 1e6:.2f} M, {minutes:.1f} min"
    return f"{goal:,}", when, f"{np.median(then):.5g}, {then.min():.5g}"


def draw_diagnostics(name="clipping"):
    """Draw what the log says about runs with the clipped policy, and about runs without."""
    figure = Figure(figsize=(12.6, 3.1 * len(COMPARED)), layout="constrained", dpi=90)
    axes = figure.subplots(len(COMPARED), len(DIAGNOSTICS), squeeze=False)
    for panels_of_game, (game, arms) in zip(axes, COMPARED.items(), strict=True):
        for panel, (column, title) in zip(panels_of_game, DIAGNOSTICS.items(), strict=True):
            panel.set_title(f"{game}: {title}", fontsize=9)
            panel.grid(alpha=0.3)
            for color, label, pattern in zip(
                ("C0", "C1"), ("clipped", "unclipped"), arms, strict=True
            ):
                for i, path in enumerate(sorted(HERE.glob(f"{pattern}/logs.csv"))):
                    steps, values = finite(read_run(str(path), notes=[]), column)
                    width = max(1, len(values) // 60)  # rows that a point is the mean of
                    means = [np.array_split(x, -(-len(x) // width)) for x in (steps, values)]
                    steps, values = ([part.mean() for part in parts] for parts in means)
                    panel.plot(
                        np.array(steps) / 1e6, values, color=color, linewidth=0.9,
                        label=None if i else label,
                    )  # fmt: skip
            if column == "behavior_target_kl":
                panel.set_yscale("log")
                panel.set_ylim(bottom=1e-4)
            panel.set_xlabel("million agent steps")
            panel.legend(fontsize=7)
    figure.savefig(HERE / f"{name}.png")


def draw_returns(name, games, describe, titles, linewidth=1):
    """Draw the return of each run against its steps, and print a row for each.

    `describe(run)` returns its arm (one color for each), and its cells for `titles`.
    """
    with open(HERE / "published.csv", newline="") as file:
        published = [row for row in csv.DictReader(file) if row["suite"] == name]
    figure, axes = panels(games)
    titles = ["run", "steps", "minutes", "last 100 games", "highest", *titles]
    print(f"\n{name}\n\n| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for panel, (game, runs) in zip(axes, games.items(), strict=False):
        colors = {}
        for run in runs:
            steps, returns = finite(run, RETURN)
            arm, cells = describe(run)
            panel.plot(
                steps / 1e6, returns, linewidth=linewidth, label=None if arm in colors else arm,
                color=colors.setdefault(arm, f"C{len(colors)}"),
            )  # fmt: skip
            numbers = f"{run.columns['minutes'][-1]:.1f}", f"{returns[-1]:.5g}"
            cells = [run.name, f"{steps[-1] / 1e6:.2f} M", *numbers, f"{returns.max():.5g}", *cells]
            print(f"| {' | '.join(cells)} |")
        shown = [row for row in published if row["env"] == game]
        for row, style in zip(shown, ("--", "-.", ":"), strict=False):
            panel.axhline(
                float(row["return"]), color="0.3", linestyle=style, linewidth=1, label=row["agent"]
            )
        panel.legend(fontsize=7)
        panel.set_xlabel("million agent steps")
    figure.suptitle("mean return of the last 100 games in training")
    figure.savefig(HERE / f"{name}.png")


def describe_suite(run):
    return run.name.rpartition("-")[0], []  # runs that differ by their seeds alone share a color


def describe_impala(run):
    kl, high, share = large_kl(run)
    flags = run.meta["flags"]
    kinds = {
        "with an LSTM": flags.get("use_lstm"),
        "PolyBeast's deep net": flags.get("model") == "deep",
        "with --replay_ratio 1": flags.get("replay_ratio"),
        "PolyBeast on a GPU": run.meta.get("device", "cpu") != "cpu",
    }
    arm = next((kind for kind, is_so in kinds.items() if is_so), "MonoBeast")
    return arm, [*describe_goal(run), f"{kl:.2g}, {high:.2g}", f"{share:.1%}"]


def describe_learners(run):
    number = run.meta["flags"].get("num_learners", 1)
    lag = finite(run, "policy_lag_mean")[1].mean()
    cells = [f"{number} x {run.meta['flags']['batch_size']}", f"{lag:.1f}"]
    return f"{number} learner{'s' * (number > 1)}", cells


def draw_staleness(name="staleness"):
    """Draw the last return against the lag, and print a row for each game, lag and arm."""
    games = read_suite(name)
    figure, axes = panels(games)
    columns = ("total_variation", "second_moment", "effective_sample_size")
    print(f"\n{name}\n\n| game | lag | correction | last 100, each seed | mean | of lag 1 ", end="")
    print(f"| {' | '.join(columns)} | KL above 0.1 |\n|{'---|' * 10}")
    for panel, (game, runs) in zip(axes, games.items(), strict=False):
        groups = {}
        for run in runs:
            flags = run.meta["flags"]
            arm = ARMS[flags["correction"], flags["policy_clipping"]]
            groups.setdefault(arm, {}).setdefault(flags["lag"], []).append(run)
        ticks = sorted({lag for arm in groups.values() for lag in arm})
        for i, arm in enumerate(ARMS.values()):
            lags, means = sorted(groups.get(arm, ())), []
            for lag in lags:
                chosen = groups[arm][lag]
                last = [finite(run, RETURN)[1][-1] for run in chosen]
                means.append(np.mean(last))
                panel.plot([ticks.index(lag)] * len(last), last, "o", color=f"C{i}", markersize=3)
                averages = [
                    np.mean([finite(run, column)[1].mean() for run in chosen]) for column in columns
                ]
                print(
                    f"| {game} | {lag} | {arm} | {', '.join(f'{r:.4g}' for r in last)} "
                    f"| {means[-1]:.4g} | {means[-1] / means[0] if lags[0] == 1 else np.nan:.2f} "
                    f"| {' | '.join(f'{x:.3g}' for x in averages)} "
                    f"| {max(large_kl(run)[2] for run in chosen):.0%} |"
                )
            if lags:
                panel.plot([ticks.index(lag) for lag in lags], means, color=f"C{i}", label=arm)
        panel.set_xticks(range(len(ticks)), ticks)
        panel.set_xlabel("policy lag, in updates")
        panel.set_ylim(bottom=0)
    figure.legend(
        *panel.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=7
    )
    figure.suptitle("mean return of the last 100 games\nafter 2 million frames")
    figure.savefig(HERE / f"{name}.png")


def draw_consensus(name="consensus"):
    """Draw the agents' distance from their mean beside its bound, and print their ratio."""
    runs = [run for runs in read_suite(name).values() for run in runs]
    figure, axes = panels([f"{run.meta['flags']['num_agents']} agents" for run in runs])
    print(f"\n{name}\n\n| agents | rounds | rows | distance / bound: median | highest |")
    print("|---|---|---|---|---|")
    for panel, run in zip(axes, runs, strict=True):
        steps, distances = finite(run, "consensus_distance")
        _, bounds = finite(run, "consensus_bound")
        flags = run.meta["flags"]
        agents = flags["num_agents"]
        rounds = steps / (agents * flags["envs_per_agent"] * flags["unroll_length"])
        panel.plot(rounds, bounds, color="0.3", linestyle="--", label="Proposition 1")
        panel.plot(rounds, distances, label="measured")
        panel.set_xlabel("updates of each agent")
        panel.set_ylim(bottom=0)
        panel.legend(fontsize=7)
        shares = distances[bounds > 0] / bounds[bounds > 0]
        print(
            f"| {agents} | {rounds[-1]:.0f} | {len(shares)} | {np.median(shares):.2f} "
            f"| {shares.max():.2f} |"
        )
    figure.suptitle("distance of the agents' weights from their mean")
    figure.savefig(HERE / f"{name}.png")


if __name__ == "__main__":
    titles = ["goal", "passed after, in", "then: median, lowest", "KL: median, 99 %", "above 0.1"]
    for suite in ("atari", "minatar"):
        draw_returns(suite, read_suite(suite), describe_impala, titles)
    for suite in ("ppo", "gala", "replay", "environments"):
        draw_returns(suite, read_suite(suite), describe_suite, [])
    learners = {
        game: [
            read_run(str(path), notes=[])
            for pattern in patterns
            for path in sorted(HERE.glob(pattern))
        ]
        for game, patterns in LEARNERS.items()
    }
    draw_returns(
        "learners", learners, describe_learners, ["learners x batch", "policy lag"], linewidth=0.9
    )
    draw_diagnostics()
    draw_staleness()
    draw_consensus()
