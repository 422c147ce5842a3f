# SPDX-License-Identifier: Apache-2.0
"""Draw the learning curves of runs from their logs.csv, up to where the shortest one ends.

python benchmarks/plot_curve.py ~/logs/torchbeast/latest/logs.csv curve.png
python benchmarks/plot_curve.py fp32=RUN/logs.csv bf16=OTHER/logs.csv curves.png
"""

import csv
import itertools
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def main(*csv_paths, png_path):
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    curves = []
    for path in csv_paths:
        label, _, path = path.rpartition("=")
        with open(path, newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["mean_game_return"]]
        steps = [int(row["step"]) / 1e6 for row in rows]
        axes.plot(steps, [float(row["mean_game_return"]) for row in rows], label=label)
        curves.append((rows, steps))
    axes.set_xlabel("million agent steps (4 frames each)")
    axes.set_ylabel("mean return of the last 100 games")
    axes.grid(alpha=0.3)
    if len(curves) == 1:
        draw_minutes(axes, *curves[0])
    else:
        axes.set_xlim(0, min(steps[-1] for _, steps in curves))
        axes.legend()
    figure.savefig(png_path, dpi=110)


def draw_minutes(axes, rows, steps):
    # Minutes of running: between two ticks there are seconds, unless the run was stopped there.
    times = [float(row["_time"]) for row in rows]
    gaps = [b - a if b - a < 60 else 0 for a, b in itertools.pairwise(times)]
    minutes = [m / 60 for m in itertools.accumulate(gaps, initial=0)]
    # The time of a step is not quite constant, so the upper axis is read off the log as well.
    top = axes.secondary_xaxis("top")
    ticks = range(0, int(minutes[-1]) + 1, 10)
    nearest = [min(range(len(rows)), key=lambda i, m=m: abs(minutes[i] - m)) for m in ticks]
    top.set_xticks([steps[i] for i in nearest], [str(m) for m in ticks])
    top.set_xlabel("minutes")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:-1], png_path=sys.argv[-1])
