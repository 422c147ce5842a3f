# SPDX-License-Identifier: Apache-2.0
"""Does a process grow? Samples of memory, descriptors and threads of processes.

    python campaigns/memory.py recorded.csv [picture.png]

prints and draws what faults.py has recorded. Memory is resident; pss, where shared pages are
divided among the processes that share them; or own: private and not of a file, which a leak adds
to. Prints Markdown.

Growth is the median of the slopes between any two samples of the same process in the second half of
the time, over all processes of a kind (Theil-Sen, which noise and jumps hardly change). The first
minute of a process is left out.
"""

import csv
import pathlib
import re
import sys

import numpy as np

FIELDS = ["seconds", "kind", "pid", "resident_mb", "pss_mb", "own_mb", "descriptors", "threads"]
WARM_UP = 60  # seconds in which a process may grow
# By how much a process may have grown at the end of the second half, going by the slope.
LIMITS = {"own_mb": 8, "resident_mb": 8, "descriptors": 2, "threads": 2}


def read_process(pid):
    """Return memory, descriptors and threads of a process as a dict; None if it has ended."""
    folder = pathlib.Path("/proc") / str(pid)
    try:
        lines = (folder / "smaps_rollup").read_text().splitlines()[1:]
        mb = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
        status = (folder / "status").read_text()
        return {
            "resident_mb": mb["Rss"],
            "pss_mb": mb["Pss"],
            "own_mb": mb["Private_Dirty"],
            "descriptors": len(list((folder / "fd").iterdir())),
            "threads": int(re.search(r"^Threads:\s+(\d+)", status, re.M)[1]),
        }
    except (FileNotFoundError, ProcessLookupError, KeyError):  # the last: it is a zombie
        return None


class Recorder:
    """Writes samples into a CSV file, and keeps them."""

    def __init__(self, path):
        self.rows = []
        self._file = open(path, "w", newline="")  # until the last sample
        self._writer = csv.DictWriter(self._file, FIELDS)
        self._writer.writeheader()

    def sample(self, seconds, kinds):
        """Take a sample of each process in `kinds`, a dict by id."""
        for pid, kind in kinds.items():
            sample = read_process(pid)
            if sample is not None:
                row = {"seconds": round(seconds, 1), "kind": kind, "pid": pid}
                row |= {k: round(v, 2) for k, v in sample.items()}
                self.rows.append(row)
                self._writer.writerow(row)
        self._file.flush()


def read_rows(path):
    with open(path, newline="") as file:
        return [
            {k: v if k == "kind" else float(v) for k, v in r.items()} for r in csv.DictReader(file)
        ]


def series(rows, kind, field):
    """Return pairs of arrays, times and values, one for each process of the kind."""
    by_pid = {}
    for row in rows:
        if row["kind"] == kind:
            by_pid.setdefault(row["pid"], []).append((row["seconds"], row[field]))
    return [tuple(np.array(s).T) for s in by_pid.values()]


def slope(rows, kind, field, warm_up=WARM_UP):
    """Return the growth of such a process in an hour; None where none lived for long."""
    middle = (rows[0]["seconds"] + rows[-1]["seconds"]) / 2
    slopes = []
    for times, values in series(rows, kind, field):
        late = (times >= middle) & (times >= times[0] + warm_up)
        times, values = times[late], values[late]
        if len(times) < 2 or times[-1] - times[0] < warm_up:
            continue
        apart = times - times[:, None]
        later = apart > 0
        slopes.append((values - values[:, None])[later] / apart[later] * 3600)
    return float(np.median(np.concatenate(slopes))) if slopes else None


def judge(rows, warm_up=WARM_UP):
    """Print a row for each kind of process; return what grows, as texts."""
    half = (rows[-1]["seconds"] - rows[0]["seconds"]) / 2 / 3600  # hours
    print("| process | number | own MB, median | most | MB an hour | resident MB, median | most |"
          " MB an hour | descriptors, median | most |"
          " an hour | threads, median | most | an hour |\n|" + "---|" * 14)  # fmt: skip
    failures = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        cells = [kind, str(len(series(rows, kind, "own_mb")))]
        for field, limit in LIMITS.items():
            values = [row[field] for row in rows if row["kind"] == kind]
            grows = slope(rows, kind, field, warm_up)
            cells += [f"{np.median(values):.0f}", f"{max(values):.0f}"]
            cells.append("-" if grows is None else f"{grows:+.1f}")
            if grows is not None and grows * half > limit:
                failures.append(f"{kind}: {field} grows by {grows:.1f} an hour")
        print("|", " | ".join(cells), "|")
    print(f"\nLimits of growth in {60 * half:.0f} minutes: {LIMITS}")
    return failures


def draw(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, all_axes = plt.subplots(len(LIMITS), figsize=(8, 8), sharex=True, layout="constrained")
    titles = {"own_mb": "own memory, MB", "resident_mb": "resident memory, MB"}
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    for axes, field in zip(all_axes, LIMITS, strict=True):
        for number, kind in enumerate(kinds):
            for i, (times, values) in enumerate(series(rows, kind, field)):
                label = kind if i == 0 else None
                axes.plot(times / 60, values, color=f"C{number}", linewidth=0.8, label=label)
        axes.set_ylabel(titles.get(field, field))
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    all_axes[0].legend()
    all_axes[-1].set_xlabel("minutes")
    figure.savefig(path, dpi=110)


def main(csv_path, png_path=None):
    rows = read_rows(csv_path)
    failures = judge(rows)
    if png_path:
        draw(rows, png_path)
    print("\n".join(failures))
    return bool(failures)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
