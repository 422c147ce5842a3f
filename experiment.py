# SPDX-License-Identifier: Apache-2.0
"""A run's folder, `--savedir`/`--xpid`, and what a run shows on screen.

    meta.json   flags, command, git commit, versions, machine, start and end
    logs.csv    a header and a row a tick: _tick,_time,step,...; _time in seconds since the epoch
    out.log     what was printed
    model.tar   the newest checkpoint
    best.tar    that with the highest mean return of the last 100 games
    events.*    the same figures as logs.csv, for TensorBoard
    wandb/      the same for Weights & Biases, with --wandb
    .eval/      what evaluator.py evaluates, with --eval_interval; gone at the end

`latest` beside the runs' folders is a link to the newest one. None of them is ever torn, and a full
disk does not end a run: the log tells what is missing, whole_files.py sees to it.
"""

import argparse
import contextlib
import ctypes
import datetime
import fcntl
import importlib.metadata
import importlib.util
import io
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
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

import checkpoint
from checkpoint import BEST, CALL_FLAGS, NEWEST, FlagError, run_path
from environment import EnvError
from watchdog import STOP_SIGNALS
from whole_files import CSVFile, EventFile, LogHandler, replace_file

MAX_SKIPPED = 10  # updates in a row that are not finite


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
    if flags.best and flags.mode == "train":
        raise FlagError("--best is for --mode test: training goes on with the newest checkpoint")
    saved = checkpoint.load(flags, BEST if flags.best else NEWEST)
    if saved is not None:
        known = {k: v for k, v in saved["flags"].items() if k in flags and k not in CALL_FLAGS}
        xpid, flags = flags.xpid, parser.parse_args(argv, argparse.Namespace(**known))
        flags.xpid = xpid
        # Servers that were started elsewhere may have served anything.
        if flags.env != saved["flags"]["env"] and not saved["flags"].get("server_addresses"):
            raise FlagError(
                f"--env is {flags.env}, but the checkpoint in {run_path(flags)} is of "
                f"{saved['flags']['env']}: leave --env out, or choose another --xpid"
            )
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


def check_flags(flags, *positive):
    """Refuse flags named in `positive` that are neither None nor positive; draw a seed, if none."""
    if sys.platform != "linux":
        raise FlagError(f"this runs on Linux alone, not on {sys.platform}")
    for name in positive:
        value = getattr(flags, name)
        if value is not None and not value > 0:
            raise FlagError(f"--{name} is {value}; it must be positive")
    if flags.seed is None:
        flags.seed = int.from_bytes(os.urandom(4), "little")


def run_program(main):
    """Run a program's `main` and exit with its status; what a user can mend needs no traceback."""
    start_logging()
    try:
        sys.exit(main())
    except (FlagError, EnvError) as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def is_good(figures):
    """Return whether all figures of an update, floats by name, are finite."""
    return all(map(math.isfinite, figures.values()))


class Experiment:
    """The folder and the screen of a training run. Use as a context manager.

    The folder is locked against a second process. On a wide terminal a progress bar shows every
    tick, elsewhere a plain line. At the end, a last checkpoint that could not be written raises
    FlagError.
    """

    def __init__(self, flags):
        self.path = run_path(flags)
        self.status = "ended"  # what meta.json says at the end, if there is no error
        self._flags = flags
        self._lost = ""  # what the last attempt to save could not, and why
        self._meta = _describe_run(flags)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "w")  # noqa: SIM115 - until the process ends
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in (NEWEST, BEST, "meta.json", "logs.csv"):  # of a process that was killed
                (self.path / path).with_suffix(".tmp").unlink(missing_ok=True)
            if (self.path / "meta.json").exists():
                with contextlib.suppress(ValueError):  # what is damaged there is not worth a run
                    earlier = json.loads((self.path / "meta.json").read_text())
                    self._meta["earlier"] = earlier.pop("earlier", []) + [earlier]
            self._write_meta()
            self._out = LogHandler(self.path / "out.log", LOG_FORMAT)
        except BlockingIOError:
            raise FlagError(
                f"another process is training in {self.path}; stop it or choose another --xpid"
            ) from None
        except OSError as error:
            raise FlagError(f"cannot use --savedir {flags.savedir}: {error}") from error
        _link_latest(self.path)
        logging.getLogger().addHandler(self._out)
        self._csv = self._events = self._ticks = self._wandb = None
        self._bar = tqdm(
            total=flags.total_steps,
            # A narrower one would cut off the lag and the time left.
            disable=not (sys.stderr.isatty() and os.get_terminal_size(2).columns >= 210),
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
        elif self._lost:
            self.status = f"{self.status}, but {self._lost}"
        self._meta["end"] = _now()
        self._meta["status"] = self.status
        try:
            self._write_meta()
        except OSError as reason:
            logging.error("Cannot write into meta.json (%s): %s", reason, self.status)
        if self._csv is not None:
            self._events.close()
            self._csv.close()
        logging.getLogger().removeHandler(self._out)
        self._out.close()
        self._lock.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(error is not None))
        if error is None and self._lost:
            raise FlagError(self._lost)

    def start_logs(self, step):
        """Open logs.csv and the event file; what they hold beyond `step` is dropped."""
        try:
            best = checkpoint.load(self._flags, BEST)
        except FlagError as error:  # which costs only the comparison with it
            logging.warning("%s", error)
            best = None
        self._merit = _merit(best["stats"]) if best else (0, None)
        self._saved_steps = {
            NEWEST: step if (self.path / NEWEST).exists() else None,
            BEST: best and best["step"],
        }
        self._save_time = time.monotonic() + self._flags.checkpoint_interval_s
        try:
            self._csv = CSVFile(self.path / "logs.csv", step)
            self._events = EventFile(self.path, step)
        except OSError as error:
            raise FlagError(f"cannot use --savedir {self._flags.savedir}: {error}") from error
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
        self._events.write(step, known)
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

    def checkpoint_is_due(self, within):
        """Say whether the interval will have passed when this is asked again in so many seconds."""
        return time.monotonic() + within > self._save_time

    def save_checkpoint(self, lock, model, optimizer, scheduler, stats):
        """Write the newest checkpoint, and the best one where it is that, too.

        Where that fails, as on a full disk, the checkpoint before stays, and so does the run.

        Args:
          lock: guards the rest; it is held while that is copied, not while the disk is waited for.
          stats: with several `skipped_in_a_row` nothing is written, since the model may have
            diverged, though no skipped update has changed it.
        """
        if self._flags.disable_checkpoint:
            return
        start = time.monotonic()
        with lock:
            step, merit, buffer = stats["step"], _merit(stats), io.BytesIO()
            weights = model.state_dict().values()
            skipped = stats.get("skipped_in_a_row", 0)
            if skipped > 2 or (skipped and not all(w.isfinite().all() for w in weights)):
                self._lost = (
                    f"no checkpoint was written at step {step:,}: the last {skipped} updates were "
                    "not finite"
                )
                logging.warning("%s", self._lost)
                return
            torch.save(checkpoint.pack(self._flags, model, optimizer, scheduler, stats), buffer)
        self._lost = ""
        # The best one first: it must not be worse than the newest, whenever this is killed.
        for name in (BEST, NEWEST) if merit > self._merit else (NEWEST,):
            try:
                replace_file(self.path / name, buffer.getbuffer())
            except OSError as error:
                before = self._saved_steps[name]
                before = "there is none" if before is None else f"that of step {before:,} stays"
                self._lost = (
                    f"the checkpoint {self.path / name} of step {step:,} could not be written "
                    f"({error.strerror or error}): {before}"
                )
                logging.error("%s", self._lost)
            else:
                self._saved_steps[name] = step
                if name == BEST:
                    self._merit = merit
                logging.info("Saved %s at step %s", self.path / name, f"{step:,}")
        # Until the next one is on the disk, not only begun, shall the interval last.
        self._save_time = 2 * start - time.monotonic() + self._flags.checkpoint_interval_s

    def check_update(self, figures, stats, batch, origin):
        """Count an update that was skipped since it is not good, and tell where its batch is from.

        Args:
          figures: of the update, floats by name.
          stats: whose skipped_updates and skipped_in_a_row count.
          batch, origin: what it was made of, and by whom; a nest of tensors, and a dict.

        Raises:
          FloatingPointError: there were too many in a row; the batch has been written.
        """
        if is_good(figures):
            stats["skipped_in_a_row"] = 0
            return
        stats["skipped_updates"] += 1
        stats["skipped_in_a_row"] += 1
        what = ", ".join(f"{name} {value}" for name, value in figures.items())
        logging.error(
            "The update was skipped, as it is not finite (%d in all; %d in a row, %d end the run): "
            "%s. Its batch comes from %s",
            *(stats["skipped_updates"], stats["skipped_in_a_row"], MAX_SKIPPED, what, origin),
        )
        if stats["skipped_in_a_row"] >= MAX_SKIPPED:
            path = self.path / "bad_batch.tar"
            content = io.BytesIO()
            torch.save({"batch": batch, "origin": origin, "figures": figures}, content)
            where = f"lies in {path}"
            try:
                replace_file(path, content.getbuffer())
            except OSError as error:  # which must not hide what ends the run
                where = f"could not be written into {path} ({error.strerror or error})"
            raise FloatingPointError(
                f"{MAX_SKIPPED} updates in a row were not finite, the last one with {what}. The "
                f"batch {where}, of {origin}; the checkpoint is from before. Look at the "
                "rewards and frames in it, and try a lower --learning_rate"
            )

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
        text = json.dumps(self._meta, indent=2, default=str) + "\n"
        replace_file(self.path / "meta.json", text.encode())


def _merit(stats):
    """Return what is larger for the better checkpoint: with fewer games, a mean says nothing."""
    return len(stats["game_returns"]), mean(stats["game_returns"])


def start_profiler(folder):
    """Return a profiler that writes a trace of 20 updates, once they are under way."""

    def write(profiler):
        profiler.export_chrome_trace(str(folder / "trace.json"))
        logging.info("Wrote %s", folder / "trace.json")

    schedule = torch.profiler.schedule(wait=20, warmup=5, active=20, repeat=1)
    profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=write)
    profiler.start()
    return profiler


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


def check_actions(agent_output, row):
    """Refuse a net whose actions are not those of the environment.

    Args:
      agent_output, row: an answer of the net and the row that it answers, [1, 1, ...] each.
    """
    chosen, taken = agent_output["action"], row["last_action"]
    if chosen.shape != taken.shape or chosen.is_floating_point() != taken.is_floating_point():
        raise FlagError(
            f"Net chooses actions {list(chosen.shape)} of {chosen.dtype}, but the environment "
            f"takes {list(taken.shape)} of {taken.dtype} ([T, B, parts], without parts where "
            "actions are Discrete): edit Net and the losses (docs/action_spaces.md)"
        )


def make_deterministic():
    """Have PyTorch compute the same from the same; what cannot raises RuntimeError."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS refuses
    torch.use_deterministic_algorithms(True)


def seed_generators(seed):
    """Seed all generators of this process from a sequence of ints."""
    words = np.random.SeedSequence(seed).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(words[1])
    torch.manual_seed(int(words[2]))


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
            "cpu": _cpu_name(),
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


def _cpu_name():
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        return next(
            (s.partition(":")[2].strip() for s in lines if s.startswith("model name")), None
        )


def _versions():
    packages = ("torch", "numpy", "gymnasium", "ale-py", "opencv-python-headless")
    found = {name: list(importlib.metadata.distributions(name=name)) for name in packages}
    return {name: d[0].version for name, d in found.items() if d}


def _now():
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def run_figures(stats, optimizer, lags):
    """Return the mean returns, the learning rate and the policy lag as columns of the log."""
    return {
        "mean_episode_return": mean(stats["episode_returns"]),
        "mean_game_return": mean(stats["game_returns"]),
        "learning_rate": optimizer.param_groups[0]["lr"],
        "policy_lag_min": min(lags, default=None),
        "policy_lag_mean": mean(lags),
        "policy_lag_max": max(lags, default=None),
    }


def mean(values):
    """Return the mean of some numbers; None, not NaN, where there are none yet."""
    return math.fsum(values) / len(values) if values else None


def show_number(value):
    """Return a number as a short text; a dash for None."""
    return "-" if value is None else f"{value:.4g}"
