# SPDX-License-Identifier: Apache-2.0
"""Draw the learning curve of a run from its logs.csv.

python benchmarks/plot_curve.py ~/logs/torchbeast/latest/logs.csv curve.png
"""

import csv
import itertools
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def main(csv_path, png_path):
    with open(csv_path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["mean_game_return"]]
    steps = [int(row["step"]) / 1e6 for row in rows]
    # Minutes of running: between two ticks there are seconds, unless the run was stopped there.
    times = [float(row["_time"]) for row in rows]
    gaps = [b - a if b - a < 60 else 0 for a, b in itertools.pairwise(times)]
    minutes = [m / 60 for m in itertools.accumulate(gaps, initial=0)]
    returns = [float(row["mean_game_return"]) for row in rows]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(steps, returns)
    axes.set_xlabel("million agent steps (4 frames each)")
    axes.set_ylabel("mean return of the last 100 games")
    axes.grid(alpha=0.3)
    # The time of a step is not quite constant, so the upper axis is read off the log as well.
    top = axes.secondary_xaxis("top")
    ticks = range(0, int(minutes[-1]) + 1, 10)
    nearest = [min(range(len(rows)), key=lambda i, m=m: abs(minutes[i] - m)) for m in ticks]
    top.set_xticks([steps[i] for i in nearest], [str(m) for m in ticks])
    top.set_xlabel("minutes")
    figure.savefig(png_path, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
