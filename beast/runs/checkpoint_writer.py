# SPDX-License-Identifier: Apache-2.0
"""Writing the newest and the best checkpoint at intervals, and batches that end a run."""

import io
import logging
import time

import torch

from beast.errors import FlagError
from beast.nest import leaves_of, map_nest
from beast.runs.atomic_files import replace_file, set_aside
from beast.runs.checkpoint import ADVICE, BEST, NEWEST, load, pack, refusing, run_path, to_bytes
from beast.runs.diagnostics import mean

LARGE_VALUE = 1e6  # larger numbers in a bad batch are named


class Writer:
    """Writes the newest checkpoint of a run, and a copy of the best one.

    If that fails, as on a full disk, the previous checkpoint stays and the run goes on.

    Attributes:
      failure: message of the last attempt to save, if it failed; else empty.
    """

    def __init__(self, flags, learner):
        self._flags = flags
        self.failure = ""
        folder = run_path(flags)
        best, self._best_score = None, (0, None)
        if (folder / BEST).exists() and not (folder / NEWEST).exists():
            set_aside(folder / BEST, "the run begins anew, as it has no checkpoint")
        try:
            with refusing(folder / BEST):
                if not flags.disable_checkpoint and (best := load(flags, BEST)):
                    self._best_score = _score(best["stats"])
        except FlagError as error:  # only the comparison with the best is lost
            if isinstance(error.__context__, OSError):  # which a later start may not have
                raise
            best = None
            set_aside(folder / BEST, str(error).removesuffix(f"; {ADVICE}"))
        self._steps = {
            NEWEST: learner.step if (folder / NEWEST).exists() else None,
            BEST: best and best["step"],
        }
        self._due = time.monotonic() + flags.checkpoint_interval_s

    def are_due(self, within):
        """Return whether a checkpoint is due in so many seconds."""
        return time.monotonic() + within > self._due

    def save(self, learner):
        """Write the learner's state; its lock is held during the copy, not during the write.

        With several `skipped_in_a_row` nothing is written, since the model may have diverged,
        though no skipped update has changed it (in ppo.py, dqn.py and sac.py only by what of it
        was finite).

        Raises:
          FlagError: the checkpoint could not be loaded again; the previous one stays.
        """
        if self._flags.disable_checkpoint:
            return
        start = time.monotonic()
        with learner.hold(), learner.lock:
            step, score = learner.step, _score(learner.stats)
            weights = filter(torch.is_tensor, learner.model.state_dict().values())
            skipped = learner.stats["skipped_in_a_row"]
            if skipped > 2 or (skipped and not all(w.isfinite().all() for w in weights)):
                self.failure = (
                    f"no checkpoint was written at step {step:,}: the last {skipped} updates were "
                    "not finite"
                )
                logging.warning("%s", self.failure)
                return
            buffer = to_bytes(pack(self._flags, learner))
        self.failure = ""
        # The best one first: it must not be worse than the newest, whenever this is killed.
        for name in (BEST, NEWEST) if score > self._best_score else (NEWEST,):
            self._write(name, step, buffer.getbuffer())
        if self._steps[BEST] == step:
            self._best_score = score
        # The interval counts from one file on the disk to the next, however long writing takes.
        self._due = 2 * start - time.monotonic() + self._flags.checkpoint_interval_s

    def _write(self, name, step, content):
        path = run_path(self._flags) / name
        try:
            replace_file(path, content)
        except OSError as error:
            before = self._steps[name]
            before = "there is none" if before is None else f"that of step {before:,} stays"
            self.failure = (
                f"the checkpoint {path} of step {step:,} could not be written "
                f"({error.strerror or error}): {before}"
            )
            logging.error("%s", self.failure)
        else:
            self._steps[name] = step
            logging.info("Saved %s at step %s", path, f"{step:,}")


def _score(stats):
    """Return a score, higher for better checkpoints; lowest before there are enough games."""
    return len(stats["game_returns"]), mean(stats["game_returns"])


def save_bad_batch(folder, name, batch, update):
    """Save a Batch and the metrics of its update; return its path, or why it was not saved.

    Args:
      folder: of the run.
      name: of the learner, if it is not the one that writes the folder; else empty.
    """
    path = folder / (f"bad_batch.{name}.tar" if name else "bad_batch.tar")
    content = io.BytesIO()
    agent_state = map_nest(lambda x: x.cpu(), batch.agent_state)
    saved = {"batch": _all_rows(batch), "agent_state": agent_state}
    torch.save(saved | {"sources": batch.sources, "metrics": update}, content)
    try:
        replace_file(path, content.getbuffer())
    except OSError as error:  # a failure here must not hide the error that ends the run
        return f"could not be written into {path} ({error.strerror or error})"
    return f"is in {path}"


def describe_bad_batch(batch):
    """Return which rows and outputs of a Batch are not finite or very large, as text."""

    def is_large(x):
        return not (x.double().abs() <= LARGE_VALUE).all()

    rows = sorted(_all_rows(batch).items())
    names = [name for name, nest in rows if any(map(is_large, leaves_of(nest)))]
    return f"Beyond {LARGE_VALUE:g} or not finite in it: {', '.join(names) or 'nothing'}"


def _all_rows(batch):
    """Return the rows of a Batch on the CPU, with those that RolloutReplay.mix adds."""
    return batch.cpu_rows | map_nest(lambda x: x.cpu(), batch.rows)
