# SPDX-License-Identifier: Apache-2.0
"""A run's folder, `--savedir`/`--xpid`, and what a run shows on screen.

    meta.json   flags, command, git commit, versions, machine, start and end
    logs.csv    a header and a row a tick: _tick,_time,step,...; _time in seconds since the epoch
    out.log     what was printed
    model.tar   the newest checkpoint
    events.*    the same figures as logs.csv, for TensorBoard
    wandb/      the same for Weights & Biases, with --wandb

`latest` beside the runs' folders is a link to the newest one.
"""

import argparse
import contextlib
import csv
import ctypes
import datetime
import fcntl
import importlib.metadata
import importlib.util
import json
import logging
import math
import os
import pathlib
import platform
import random
import signal
import subprocess
import sys
import threading
import time
from collections import deque

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

# Of this call alone, never taken over from a checkpoint.
_CALL_FLAGS = (
    *("mode", "xpid", "savedir", "disable_checkpoint", "disable_cuda", "num_buffers"),
    *("pipes_basename", "write_profiler_trace", "autotune"),
)


class FlagError(ValueError):
    """Flags that contradict each other or the machine; the message says what to change."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Tells defaults where they say something: not that a switch is off, or that None is None."""

    def _get_help_string(self, action):
        if action.default is None or isinstance(action.default, bool):
            return action.help
        return super()._get_help_string(action)


def parse_flags(parser, argv=None):
    """Parse the command line; what it leaves open comes from the run's checkpoint, if it has one.

    So `--xpid NAME` alone goes on with a run, or tests it, just as it was started.
    """
    flags = parser.parse_args(argv)
    if flags.xpid is None:
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        flags.xpid = f"torchbeast-{now}" if flags.mode == "train" else "latest"
    if flags.xpid == "latest":
        if not run_path(flags).exists():
            raise FlagError(f"there is no run in {flags.savedir} yet")
        flags.xpid = run_path(flags).resolve().name
    saved = load_checkpoint(flags)
    if saved is not None:
        known = {k: v for k, v in saved["flags"].items() if k in flags and k not in _CALL_FLAGS}
        xpid, flags = flags.xpid, parser.parse_args(argv, argparse.Namespace(**known))
        flags.xpid = xpid
    wants_wandb = flags.mode == "train" and getattr(flags, "wandb", False)
    if wants_wandb and importlib.util.find_spec("wandb") is None:
        raise FlagError("--wandb needs a package that is not installed: pip install wandb")
    return flags


def command_words(parser, flags):
    """Return the words of a command line which tell the parser what is not at its default."""
    words = []
    for action in parser._actions:
        value = getattr(flags, action.dest, None)
        if value not in (None, action.default):
            option = action.option_strings[0]
            words.append(option if action.nargs == 0 else f"{option}={value}")
    return words


def run_path(flags):
    return pathlib.Path(flags.savedir).expanduser() / flags.xpid


def load_checkpoint(flags):
    """Return the checkpoint of the run as a dict, its tensors on the CPU; None if it has none."""
    path = run_path(flags) / "model.tar"
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FlagError(
            f"cannot read the checkpoint {path} ({error}); move it away or choose another --xpid"
        ) from error


def restore_weights(model, checkpoint, flags):
    """Load a checkpoint's weights, or say which flags they were trained with."""
    try:
        model.load_state_dict(checkpoint["model_state_dict"])
    except RuntimeError as error:
        saved = checkpoint["flags"]
        differing = [
            f"--{key} was {saved[key]!r}, is {value!r}"
            for key, value in sorted(vars(flags).items())
            if key in saved and key not in _CALL_FLAGS and saved[key] != value
        ]
        raise FlagError(
            f"the checkpoint in {run_path(flags)} does not fit this model "
            f"({'; '.join(differing) or 'the code of Net has changed'}); "
            f"undo that or choose another --xpid. {error}"
        ) from error


def resume(flags, model, optimizer, scheduler, stats):
    """Restore everything from the run's checkpoint, if there is one; `stats` in place.

    What the flags say of the optimizer, then or now, holds from here on.
    """
    checkpoint = load_checkpoint(flags)
    if checkpoint is None:
        return
    restore_weights(model, checkpoint, flags)
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    base_lrs = scheduler.base_lrs
    scheduler.load_state_dict(checkpoint["scheduler_state_dict"])
    scheduler.base_lrs = base_lrs
    stats.update(checkpoint["stats"])
    if stats["step"] >= flags.total_steps:
        raise FlagError(
            f"{run_path(flags)} has done its {stats['step']:,} steps: raise --total_steps "
            f"({flags.total_steps:,}) to go on, or choose another --xpid"
        )
    for group, new, base_lr, schedule in zip(
        optimizer.param_groups, settings, base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group.update(new, lr=base_lr * schedule(scheduler.last_epoch))
    restore_random_states(checkpoint["random_states"])
    logging.info("Resuming at step %s", f"{stats['step']:,}")


class Experiment:
    """The folder and the screen of a training run. Use as a context manager.

    The folder is locked against a second process. On a wide terminal a progress bar shows every
    tick, elsewhere a plain line.
    """

    def __init__(self, flags):
        self.path = run_path(flags)
        self.status = "ended"  # what meta.json says at the end, if there is no error
        self._flags = flags
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "w")  # noqa: SIM115 - until the process ends
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FlagError(
                f"another process is training in {self.path}; stop it or choose another --xpid"
            ) from None
        except OSError as error:
            raise FlagError(f"cannot use --savedir {flags.savedir}: {error}") from error
        _link_latest(self.path)
        self._out = logging.FileHandler(self.path / "out.log")
        self._out.setFormatter(logging.Formatter(LOG_FORMAT))
        logging.getLogger().addHandler(self._out)
        self._meta = _describe_run(flags)
        if (self.path / "meta.json").exists():
            earlier = json.loads((self.path / "meta.json").read_text())
            self._meta["earlier"] = earlier.pop("earlier", []) + [earlier]
        self._write_meta()
        self._csv = self._events = self._ticks = self._wandb = None
        self._bar = tqdm(
            total=flags.total_steps,
            # A narrower one would cut off the lag and the time left.
            disable=not (sys.stderr.isatty() and os.get_terminal_size(2).columns >= 190),
            bar_format="{percentage:3.0f}% {bar:10} {desc}",
            dynamic_ncols=True,
        )
        # Log messages must not tear the bar apart.
        self._redirect = logging_redirect_tqdm() if not self._bar.disable else None

    def __enter__(self):
        logging.info("Run folder: %s", self.path)
        if self._redirect is not None:
            self._redirect.__enter__()
        return self

    def __exit__(self, error_type, error, traceback):
        if self._redirect is not None:
            self._redirect.__exit__(error_type, error, traceback)
        self._bar.close()
        if error is not None:
            self.status = f"{error_type.__name__}: {error}"
            self._write_out(logging.CRITICAL, "The run failed", (error_type, error, traceback))
        self._meta["end"] = _now()
        self._meta["status"] = self.status
        self._write_meta()
        if self._csv is not None:
            self._events.close()
            self._csv.close()
        logging.getLogger().removeHandler(self._out)
        self._out.close()
        self._lock.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(error is not None))

    def start_logs(self, step):
        """Open logs.csv and the event file; what they hold beyond `step` is dropped."""
        self._csv = _CSV(self.path / "logs.csv", step)
        self._events = SummaryWriter(self.path, purge_step=step)
        if getattr(self._flags, "wandb", False):
            self._start_wandb(step)
        # Of the last minute or so, for the time left.
        self._ticks = deque([(time.monotonic(), step)], maxlen=12)

    def log(self, step, figures, texts):
        """Tell of one tick: `figures` go into the files, the dict of short `texts` to the screen.

        A figure that is None has no value yet and stays empty.
        """
        now = time.monotonic()
        last_time, last_step = self._ticks[-1]
        rate = (step - last_step) / max(now - last_time, 1e-9)
        first_time, first_step = self._ticks[0]
        self._ticks.append((now, step))
        lasting_rate = (step - first_step) / max(now - first_time, 1e-9)
        left = "-"
        if lasting_rate > 0:
            seconds = max(0, self._flags.total_steps - step) / lasting_rate
            left = str(datetime.timedelta(seconds=round(seconds)))

        figures = {"steps_per_second": rate, **figures}
        self._csv.write({"step": step, **figures})
        known = {key: value for key, value in figures.items() if value is not None}
        for key, value in known.items():
            self._events.add_scalar(key, value, step)
        if self._wandb is not None:
            self._wandb.log(known, step)
        frames = getattr(self._flags, "frame_skip", 1)  # a step
        line = " | ".join(
            [
                f"{step:,} steps",
                f"{rate:,.0f} steps/s ({rate * frames:,.0f} frames/s)",
                *(f"{name} {text}" for name, text in texts.items()),
                f"left {left}",
            ]
        )
        if self._bar.disable:
            logging.info("%.1f%% | %s", min(100, 100 * step / self._flags.total_steps), line)
        else:
            self._bar.n = min(step, self._flags.total_steps)
            self._bar.set_description_str(line)
            self._write_out(logging.INFO, line)

    def save_checkpoint(self, model, optimizer, scheduler, stats):
        """Write the checkpoint as a whole or not at all: into a temporary file, then renamed."""
        if self._flags.disable_checkpoint:
            return
        checkpoint = {
            "model_state_dict": model.state_dict(),
            "optimizer_state_dict": optimizer.state_dict(),
            "scheduler_state_dict": scheduler.state_dict(),
            "step": stats["step"],
            "stats": stats,
            "random_states": random_states(),
            "flags": vars(self._flags),
        }
        path = self.path / "model.tar"
        with open(path.with_suffix(".tmp"), "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        path.with_suffix(".tmp").rename(path)
        logging.info("Saved %s at step %s", path, f"{stats['step']:,}")

    def _start_wandb(self, step):
        import wandb  # here, since few have it

        # By its id a resumed run goes on there, too. W&B's environment variables say the rest.
        earlier = self._meta.get("earlier", [{}])[-1] if step > 0 else {}
        words = {"id": earlier.get("wandb"), "resume": "allow", "name": self._flags.xpid}
        try:
            self._wandb = wandb.init(dir=self.path, config=vars(self._flags), **words)
        except wandb.Error as error:
            raise FlagError(f"--wandb: {error} (WANDB_MODE=offline needs no login)") from error
        self._meta["wandb"] = self._wandb.id
        self._write_meta()

    def _write_out(self, level, message, error=None):
        """Write to out.log alone what the screen shows in another way."""
        self._out.handle(logging.LogRecord("", level, __file__, 0, message, (), error))

    def _write_meta(self):
        temporary = self.path / "meta.tmp"
        temporary.write_text(json.dumps(self._meta, indent=2, default=str) + "\n")
        temporary.rename(self.path / "meta.json")


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOG_FORMAT = "[%(levelname)s %(asctime)s %(process)d] %(message)s"


def start_logging():
    logging.basicConfig(format=LOG_FORMAT, level=logging.INFO)


@contextlib.contextmanager
def stop_on_signals(stop):
    """Set the event `stop` on Ctrl-C and SIGTERM; yields a list of the signals that came.

    One that comes more than a second later ends the process at once. Within the second it is the
    same one again: make and timeout send it to the process and to its group.
    """
    caught, first = [], None

    def announce():
        stop.set()
        logging.info("Caught %s: ending", signal.Signals(caught[0]).name)

    def handle(number, _):
        nonlocal first
        caught.append(number)
        if first is None:
            first = time.monotonic()
            # In a thread, since the main one may be holding the very locks that this needs.
            threading.Thread(target=announce).start()
        elif time.monotonic() > first + 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    handlers = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield caught
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def keep_freed_memory():
    """Have malloc keep large blocks that are freed, rather than fault them in at each update.

    On a CPU this makes learning a fifth faster (benchmarks/README.md). For glibc; else nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
    mallopt(M_ARENA_MAX, 1)  # the arenas of other threads could not hold such blocks
    mallopt(M_MMAP_THRESHOLD, 2**30)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def has_bf16(device):
    """Say whether the device multiplies in bfloat16 by itself."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    features = torch.cpu.get_capabilities()
    return bool(features.get("avx512_bf16") or features.get("amx_bf16"))


def choose_precision(flags, model_class, devices):
    """Set flags.precision, where it is open, to what is fastest on all devices of the model."""
    fast = all(map(has_bf16, devices))
    if flags.precision is None:
        knows_bf16 = getattr(model_class, "knows_bf16", False)
        flags.precision = "bf16" if fast and knows_bf16 else "fp32"
    elif flags.precision == "bf16" and not fast:
        logging.warning("--precision bf16 is slower than fp32 on this machine, which emulates it")


def seed_generators(seed):
    """Seed all generators of this process from a sequence of ints."""
    words = np.random.SeedSequence(seed).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(words[1])
    torch.manual_seed(int(words[2]))


def random_states():
    """Return the states of all generators of this process, made of what weights_only loads."""
    numpy_state = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]],
        "python": random.getstate(),
    }


def restore_random_states(states):
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_initialized() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    np.random.set_state(tuple(states["numpy"]))
    version, state, gauss = states["python"]
    random.setstate((version, tuple(state), gauss))


class _CSV:
    """A CSV file that grows by rows and, when a new figure turns up, by columns."""

    def __init__(self, path, step):
        self._path = path
        rows = []
        self._fields = ["_tick", "_time", "step"]
        if path.exists():
            lines = path.read_text().splitlines(keepends=True)
            if lines and not lines[-1].endswith("\n"):
                del lines[-1]  # torn by a crash
            reader = csv.DictReader(lines)
            rows = [row for row in reader if (row["step"] or "").isdigit()]
            rows = [row for row in rows if int(row["step"]) <= step]
            self._fields = list(reader.fieldnames or self._fields)
        self._rewrite(rows if step > 0 else [])

    def write(self, row):
        new = [key for key in row if key not in self._fields]
        if new:
            self._file.close()
            with open(self._path, newline="") as file:
                rows = list(csv.DictReader(file))
            self._fields += new
            self._rewrite(rows)
        self._writer.writerow({"_tick": self._tick, "_time": time.time(), **row})
        self._file.flush()
        self._tick += 1

    def close(self):
        self._file.close()

    def _rewrite(self, rows):
        """Write header and `rows` into a new file, put it in place, and go on at its end."""
        temporary = self._path.with_suffix(".tmp")
        self._tick = len(rows)
        self._file = open(temporary, "w", newline="")  # noqa: SIM115 - kept open for appending
        self._writer = csv.DictWriter(self._file, self._fields, extrasaction="ignore")
        self._writer.writeheader()
        self._writer.writerows(rows)
        self._file.flush()
        temporary.rename(self._path)


def _link_latest(path):
    link = path.parent / "latest"
    try:
        if link.is_symlink():
            link.unlink()
        link.symlink_to(path.name)
    except OSError as error:  # another run was quicker, or the file system knows no links
        logging.warning("Could not link %s: %s", link, error)


def _describe_run(flags):
    def git(*words):
        try:
            return subprocess.run(
                ["git", "-C", pathlib.Path(__file__).parent, *words],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    return {
        "flags": vars(flags),
        "command": sys.argv,
        "git": {"commit": git("rev-parse", "HEAD"), "changed": git("status", "--porcelain")},
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "gpus": [
                torch.cuda.get_device_name(i)
                for i in range(0 if flags.disable_cuda else torch.cuda.device_count())
            ],
        },
        "start": _now(),
        "end": None,
        "status": "running",
    }


def _versions():
    packages = ("torch", "numpy", "gymnasium", "ale-py", "opencv-python-headless")
    found = {name: list(importlib.metadata.distributions(name=name)) for name in packages}
    return {name: d[0].version for name, d in found.items() if d}


def _now():
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def mean(values):
    """Return the mean of some numbers; None, not NaN, where there are none yet."""
    return math.fsum(values) / len(values) if values else None


def show_number(value):
    """Return a number as a short text; a dash for None."""
    return "-" if value is None else f"{value:.4g}"
