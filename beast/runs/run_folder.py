# SPDX-License-Identifier: Apache-2.0
"""A run's folder, `--savedir`/`--xpid`, and its status line on the screen.

    meta.json   flags, command, git commit, versions, machine, device, start and end
    changes-*.diff  what was not committed at a start, of files that git knows; for `git apply`
    logs.csv    a header and a row a tick: _tick,_time,step,...; _time in seconds since the epoch
    out.log     what was printed; out.rank1.log by another learner, and so on
    model.tar   the newest checkpoint
    best.tar    that with the highest mean return of the last 100 games
    events.*    the same metrics as logs.csv, for TensorBoard
    wandb/      the same for Weights & Biases, with --wandb
    .eval/      weights under evaluation, with --eval_interval; removed at the end

`latest` beside the runs' folders is a link to the newest one. No checkpoint, logs.csv or meta.json
is ever torn, and a full disk ends no run: the log says what is missing (atomic_files.py). A run
whose folder is gone ends.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import logging
import os
import platform
import shlex
import sys

import torch

from beast.errors import FlagError
from beast.processes.lifetime import LOG_FORMAT, lock_file
from beast.runs.atomic_files import CSVFile, EventFile, LogHandler, replace_file, set_aside
from beast.runs.background_evaluation import BackgroundEvaluation
from beast.runs.checkpoint import BEST, NEWEST, run_path
from beast.runs.checkpoint_writer import Writer
from beast.runs.code_version import describe_git, write_diff

MOST_REOPENED = 20  # times that a log is found replaced


class RunFolder:
    """The folder of a training run, locked against a second process, and its status line.

    Attributes:
      checkpoints, evaluations: a Writer and a BackgroundEvaluation, once it is started.
    """

    def __init__(self, flags):
        self.path = run_path(flags)
        self._flags = flags
        self._meta = _describe_run(flags)
        self._lock = self._out = self._owner = None
        self._earlier_meta = None  # meta.json to restore if this start is refused
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "a+")  # until the process ends
            lock_file(self._lock)
            for path in (NEWEST, BEST, "meta.json", "logs.csv"):  # of a process that was killed
                (self.path / f"{path}.tmp").unlink(missing_ok=True)
            if (self.path / "meta.json").exists():
                self._read_earlier()
            self._out = LogHandler(self.path / "out.log", LOG_FORMAT)
            self._write_meta()
        except BlockingIOError:
            self._lock.seek(0)
            owner = self._lock.read(200) or "an unknown one"
            raise FlagError(
                f"another process is training in {self.path} ({owner}); stop it or choose another "
                "--xpid. If its machine is gone, remove .lock there"
            ) from None
        except OSError as error:
            if self._out is not None:
                self._out.close()
            if self._lock is not None:
                self._lock.close()  # here, since whoever keeps the error keeps this object
            raise FlagError(f"cannot use --savedir {flags.savedir}: {error}") from None
        try:
            write_diff(self.path)
        except OSError as error:
            logging.error("What is not committed could not be written: %s", error)
        _link_latest(self.path)
        logging.getLogger().addHandler(self._out)
        self._csv = self._events = self._wandb = self.checkpoints = self.evaluations = None
        self._num_reopened = 0

    def start(self, learner):
        """Open logs.csv and the event file; drop rows beyond the learner's step."""
        step = learner.step
        try:
            # Where the file system knows no locks, it shows who has taken the folder over.
            self._owner = f"process {os.getpid()} of {platform.node()}, since {_now()}"
            self._lock.truncate(0)
            os.write(self._lock.fileno(), self._owner.encode())
            self._csv = CSVFile(self.path / "logs.csv", step)
            self._events = EventFile(self.path, step)
            self._meta["device"] = str(learner.device)
            self._write_meta()
        except OSError as error:
            raise FlagError(f"cannot use --savedir {self._flags.savedir}: {error}") from None
        if self._flags.wandb:
            self._start_wandb(step)
        self.checkpoints = Writer(self._flags, learner)
        last = self._csv.last_value("eval_step") if self._flags.eval_interval else None
        self.evaluations = BackgroundEvaluation(self._flags, step, last)
        self._earlier_meta = None

    def log(self, step, metrics, line):
        """Write metrics by name into the files, and a line to the screen; None: no value yet."""
        self._check_path()
        self._csv.write({"step": step, **metrics})
        known = {name: value for name, value in metrics.items() if value is not None}
        self._events.write(step, known)
        if self._wandb is not None:
            try:
                self._wandb.log(known, step)
            except Exception as error:  # an error of W&B must not end a run
                logging.error("Weights & Biases: %s", error)
        logging.info("%.1f%% | %s", min(100, 100 * step / self._flags.total_steps), line)

    def close(self, status, error=None):
        """Close all files; `status` and the error, if there is one, are written first."""
        if error is not None:
            status = f"{type(error).__name__}: {error}"[:10_000]  # a compiler's output is long
            information = (type(error), error, error.__traceback__)
            # To out.log only: the screen has the traceback.
            record = logging.LogRecord(
                "", logging.CRITICAL, __file__, 0, "The run failed", (), information
            )
            self._out.handle(record)
        self._meta |= {"end": _now(), "status": status}
        try:
            if self._other_owner():
                pass
            elif self._earlier_meta is None:
                self._write_meta()
            else:  # what was refused has changed nothing
                replace_file(self.path / "meta.json", self._earlier_meta)
        except OSError as reason:
            logging.error("Cannot write into meta.json (%s): %s", reason, status)
        for file in (self._events, self._csv):
            if file is not None:
                file.close()
        logging.getLogger().removeHandler(self._out)
        self._out.close()
        self._lock.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(error is not None))

    def _start_wandb(self, step):
        import wandb  # here, since few have it

        # By its id a resumed run goes on there, too. W&B's environment variables say the rest.
        earlier = reversed(self._meta.get("earlier", []) if step > 0 else [])
        earlier = [meta for meta in earlier if meta.get("wandb") and not self._is_copy_of(meta)]
        identifier = earlier[0]["wandb"] if earlier else None
        arguments = {"id": identifier, "resume": "allow", "name": self._flags.xpid}
        try:
            self._wandb = wandb.init(dir=self.path, config=vars(self._flags), **arguments)
        except wandb.Error as error:
            raise FlagError(f"--wandb: {error} (WANDB_MODE=offline needs no login)") from None
        self._meta["wandb"] = self._wandb.id
        self._write_meta()

    def _check_path(self):
        """Raise FlagError if the folder is gone, or another process's: all would be lost."""
        try:
            os.stat(self.path)
            if other := self._other_owner():
                raise FlagError(
                    f"{self.path} was taken over by another process ({other}), which has resumed "
                    "from the newest checkpoint: this one ends"
                )
            # Some file systems give a file another number from time to time: then do without.
            if self._num_reopened < MOST_REOPENED and not self._csv.is_current():
                self._num_reopened += 1
                self._csv.reopen()
            if self._num_reopened < MOST_REOPENED:
                self._out.follow()
        except FileNotFoundError:
            raise FlagError(
                f"{self.path} is gone: was the folder removed or moved? Resume a moved run with "
                "the --savedir and --xpid of its new place, or start a new one"
            ) from None
        except OSError:  # a file system that may come back
            pass

    def _is_copy_of(self, meta):
        """Return whether the folder of an earlier start is there, and another one than this."""
        with contextlib.suppress(OSError, LookupError, TypeError):
            return not os.path.samefile(run_path(argparse.Namespace(**meta["flags"])), self.path)
        return False

    def _other_owner(self):
        """Return who has taken over the folder since it was ours; None if nobody has."""
        with contextlib.suppress(OSError):
            owner = (self.path / ".lock").read_text()
            return owner if self._owner and owner not in (self._owner, "") else None

    def _read_earlier(self):
        path = self.path / "meta.json"
        try:
            last = json.loads(path.read_text())
            earlier = [*last.pop("earlier", []), last]
            if not all(isinstance(meta, dict) for meta in earlier):
                raise TypeError("an earlier start is no object")
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            set_aside(path, f"it is damaged ({type(error).__name__}: {error})")
        else:
            self._meta["earlier"] = earlier
            self._earlier_meta = path.read_bytes()

    def _write_meta(self):
        content = (json.dumps(self._meta, indent=2, default=str) + "\n").encode()
        replace_file(self.path / "meta.json", content)


class LearnerLog:
    """The log of a learner while another one of its policy has the run's folder.

    It is in the same folder, such as `out.rank1.log`. No checkpoints, no evaluations.
    """

    checkpoints = evaluations = None

    def __init__(self, flags, name):
        self.path, self._flags = run_path(flags), flags
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._out = LogHandler(self.path / f"out.{name}.log", LOG_FORMAT)
        except OSError as error:
            raise FlagError(f"cannot use --savedir {flags.savedir}: {error}") from None
        logging.getLogger().addHandler(self._out)

    def start(self, learner):
        pass

    def log(self, step, metrics, line):
        logging.info("%.1f%% | %s", min(100, 100 * step / self._flags.total_steps), line)

    def close(self, status, error=None):
        if error is not None:
            logging.getLogger().critical("The run failed", exc_info=error)
        if status:
            logging.info("%s", status)
        logging.getLogger().removeHandler(self._out)
        self._out.close()


def _link_latest(path):
    link = path.parent / "latest"
    try:
        if link.is_symlink():
            link.unlink()
        link.symlink_to(path.name)
    except OSError as error:  # another run was quicker, or the file system knows no links
        logging.warning("Could not link %s: %s", link, error)


def resume_command(flags):
    """Return the command that resumes a run."""
    command = [*sys.argv]
    if f"--xpid {flags.xpid}" not in " ".join(command).replace("--xpid=", "--xpid "):
        command += ["--xpid", flags.xpid]
    return shlex.join(command)


def _describe_run(flags):
    return {
        "flags": vars(flags),
        "command": sys.argv,
        "git": describe_git(),
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
