# SPDX-License-Identifier: Apache-2.0
"""--eval_interval: evaluations during training, each in a process of its own."""

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

from beast.processes.edited_files import edited_files
from beast.runs import checkpoint
from beast.runs.atomic_files import replace_file
from beast.runs.checkpoint import NEWEST, run_path
from beast.runs.evaluate import describe_result

FOLDER = ".eval"  # in the run's folder while the run goes on
OUTPUT, RESULT = "out.log", "result.json"  # in that folder: of the newest evaluation


class BackgroundEvaluation:
    """Evaluates the newest weights at intervals, while training continues.

    An evaluation is a process: the same program in `--mode test`, as it is on disk then, with
    a copy of the weights and always the same seed. It has an actor's priority and one thread, and
    it ends with this process, however that ends. An evaluation that fails is logged, and the run
    goes on.

    Args:
      flags: those of the run.
      step: at which the run starts, or is resumed.
      last_step: of the last evaluation that the log has; None: it has none.
    """

    def __init__(self, flags, step, last_step=None):
        self._flags = flags
        self._folder = run_path(flags) / FOLDER
        self._process, self._last = None, {}  # metrics of one that had ended when all was closed
        edited_files()  # as they are now
        self._plan_next(step)
        interval = flags.eval_interval or math.inf
        if interval <= step and (last_step or 0) < step // interval * interval:
            self._next_step = step  # one that was cut short, or whose row is lost

    def tick(self, learner):
        """Start an evaluation if one is due; return metrics of a finished one, else None for each.

        Args:
          learner: has model and stats, and the lock that guards them.
        """
        if not self._flags.eval_interval:
            return {}
        metrics = dict.fromkeys(("eval_step", "eval_return_mean", "eval_return_ci95")) | self._last
        self._last = {}
        if self._process is not None and self._has_ended():
            metrics |= self._end()
        step = learner.stats["step"]
        if step >= self._next_step:
            self._plan_next(step)
            if self._process is None:
                self._start(learner)
            else:
                seconds = time.monotonic() - self._start_time
                logging.warning(
                    f"Skipped the evaluation at step {step:,}: that of step {self._step:,} is "
                    f"running ({seconds:.0f} s)"
                )
        return metrics

    def close(self):
        """End a running evaluation; no other starts. The next `tick` returns one that has ended."""
        if not self._flags.eval_interval:
            return
        self._next_step = math.inf
        if self._process is not None and self._has_ended():
            self._last = self._end()
        elif self._process is not None:
            logging.info("The evaluation at step %s is not finished", f"{self._step:,}")
            self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _plan_next(self, step):
        interval = self._flags.eval_interval or math.inf
        self._next_step = (step // interval + 1) * interval

    def _start(self, learner):
        with learner.hold(), learner.lock:
            self._step = learner.stats["step"]
            snapshot = checkpoint.pack_weights(self._flags, learner.model, self._step)
        if edited := edited_files():
            logging.warning(
                "This evaluation plays with code that was edited after this run began (%s): to "
                "edit while a run goes on, work in another clone", ", ".join(edited),
            )  # fmt: skip
        content = io.BytesIO()
        torch.save(snapshot, content)
        arguments = ["--mode", "test", "--savedir", self._folder.parent, "--xpid", FOLDER]
        arguments += ["--result_file", self._folder / RESULT, "--end_with_stdin"]
        arguments += [f"--env={self._flags.env}"] if self._flags.env else []
        try:
            shutil.rmtree(self._folder, ignore_errors=True)  # of the evaluation before
            self._folder.mkdir()
            replace_file(self._folder / NEWEST, content.getbuffer())
            with open(self._folder / OUTPUT, "w") as output:
                # nice, not a preexec_fn: that would run Python in a fork of all these threads.
                self._process = subprocess.Popen(
                    ["nice", sys.executable, sys.modules["__main__"].__file__, *arguments],
                    stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
                    process_group=0, env=os.environ | {"OMP_NUM_THREADS": "1"},
                )  # fmt: skip
            self._start_time = time.monotonic()
        except Exception as error:
            logging.error("Skipped the evaluation at step %s: %s", f"{self._step:,}", error)

    def _has_ended(self):
        # Without reaping it, so that its process id stays that of its group.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, options) is not None

    def _kill(self):
        """Kill the process, if it lives, and those that its environments have started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        self._process.stdin.close()
        self._process = None
        return status

    def _end(self):
        """Return the metrics of the evaluation that has ended; none if it failed."""
        status = self._kill()
        try:
            result = json.loads((self._folder / RESULT).read_text())
        except (OSError, ValueError) as error:
            try:
                reason = (self._folder / OUTPUT).read_text(errors="replace")[-4000:].strip()
            except OSError:
                reason = str(error)
            logging.error(
                f"The evaluation at step {self._step:,} failed (exit status {status}), and the run "
                f"goes on:\n{reason}"
            )
            return {}
        seconds = time.monotonic() - self._start_time
        logging.info(
            "Evaluation at step %s, %.0f s: %s", f"{self._step:,}", seconds, describe_result(result)
        )
        metrics = {"eval_step": self._step, "eval_return_mean": result["mean"]}
        metrics["eval_return_ci95"] = result["ci95"]
        if result["human_normalized"] is not None:
            metrics["eval_human_normalized"] = result["human_normalized"]
        return metrics
