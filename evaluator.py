# SPDX-License-Identifier: Apache-2.0
"""--eval_interval: evaluations beside a training, each in a process of its own."""

import contextlib
import io
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import torch

import checkpoint
from checkpoint import NEWEST, run_path
from evaluate import RESULT, describe_result
from whole_files import replace_file

FOLDER, OUTPUT = ".eval", "out.log"  # within the run's, as long as that goes on


class Evaluator:
    """Evaluates the newest weights now and then, while others learn.

    Each evaluation is a process of its own: the same program, testing a snapshot of the weights,
    always on the same seed. It has an actor's priority and one thread, and it ends with this
    process, however that ends. What goes wrong in it is told in the log, and ends nothing else.

    Args:
      flags: those of the run.
      step: at which the run begins, or goes on.
    """

    def __init__(self, flags, step):
        self._flags = flags
        self._folder = run_path(flags) / FOLDER
        self._process = None
        self._plan_next(step)

    def tick(self, lock, model, stats):
        """Start an evaluation if one is due; return the figures of one that has ended, else Nones.

        Args:
          lock: guards the rest; it is held while the weights are copied.
        """
        if not self._flags.eval_interval:
            return {}
        figures = dict.fromkeys(("eval_step", "eval_return_mean", "eval_return_ci95"))
        if self._process is not None and self._has_ended():
            figures |= self._end()
        if stats["step"] >= self._next_step:
            self._plan_next(stats["step"])
            if self._process is None:
                self._start(lock, model, stats)
            else:
                logging.warning(
                    "No evaluation at step %s: that of step %s has been playing for %.0f s",
                    *(f"{step:,}" for step in (stats["step"], self._step)),
                    time.monotonic() - self._start_time,
                )
        return figures

    def close(self):
        """End an evaluation that is under way; no other one will begin."""
        if not self._flags.eval_interval:
            return
        self._next_step = math.inf
        if self._process is not None:
            logging.info("The evaluation at step %s is not finished", f"{self._step:,}")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process.stdin.close()
            self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _plan_next(self, step):
        interval = self._flags.eval_interval or math.inf
        self._next_step = (step // interval + 1) * interval

    def _start(self, lock, model, stats):
        with lock:
            self._step = stats["step"]
            snapshot = checkpoint.pack_weights(self._flags, model, self._step)
        content = io.BytesIO()
        torch.save(snapshot, content)
        words = [*f"--mode test --evaluator --xpid {FOLDER} --savedir".split(), self._folder.parent]
        words += ["--greedy"] if self._flags.greedy else []
        try:
            shutil.rmtree(self._folder, ignore_errors=True)  # of the one before
            self._folder.mkdir()
            replace_file(self._folder / NEWEST, content.getbuffer())
            with open(self._folder / OUTPUT, "w") as output:
                # nice, not a preexec_fn: that would run Python in a fork of all these threads.
                self._process = subprocess.Popen(
                    ["nice", sys.executable, sys.modules["__main__"].__file__, *words],
                    stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
                    process_group=0, env=os.environ | {"OMP_NUM_THREADS": "1"},
                )  # fmt: skip
            self._start_time = time.monotonic()
        except Exception as error:
            logging.error("Cannot evaluate at step %s, and go on: %s", f"{self._step:,}", error)

    def _has_ended(self):
        # Left unwaited for, so that its number stays that of its group.
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, how) is not None

    def _end(self):
        process, self._process = self._process, None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has left behind
        process.wait()
        process.stdin.close()
        try:
            result = json.loads((self._folder / RESULT).read_text())
        except (OSError, ValueError) as error:
            try:
                reason = (self._folder / OUTPUT).read_text(errors="replace")[-4000:].strip()
            except OSError:
                reason = str(error)
            logging.error(
                "The evaluation at step %s failed (exit status %d), and the run goes on:\n%s",
                *(f"{self._step:,}", process.returncode, reason),
            )
            return {}
        seconds = time.monotonic() - self._start_time
        logging.info(
            "Evaluation at step %s, %.0f s: %s", f"{self._step:,}", seconds, describe_result(result)
        )
        figures = {"eval_step": self._step, "eval_return_mean": result["mean"]}
        figures["eval_return_ci95"] = result["ci95"]
        if result["human_normalized"] is not None:
            figures["eval_human_normalized"] = result["human_normalized"]
        return figures
