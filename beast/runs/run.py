# SPDX-License-Identifier: Apache-2.0
"""A training run from its first line to its last: resuming, logs, checkpoints, signals, the end.

with Run(flags, learner) as run:
    with run.threads(on_exit=[queue.close]) as threads:
        threads.start(batch_and_learn, flags, learner, queue, run)
        run.watch(queue)
return run.exit_status
"""

import datetime
import logging
import pprint
import threading
import time
from collections import deque

from beast.errors import EnvError, FlagError
from beast.parser import Parser
from beast.processes.lifetime import StopSignals, Threads
from beast.processes.watchdog import Watchdog, print_stacks_on_signal
from beast.runs import checkpoint, checkpoint_writer, diagnostics
from beast.runs.handover import Handover
from beast.runs.profiling import CPUEnergy, Stopwatch, UpdateProfiler, WaitFractions
from beast.runs.run_folder import resume_command

LOG_INTERVAL = 5  # seconds
CENTURY = 3e9  # seconds; where more are left, none are shown, since timedelta has a largest one
LOG_UPDATES = 50  # updates between rows with --deterministic, where time must not matter
MAX_SKIPPED = 10  # updates in a row that are not finite
ENDS = ("done", "episode_return", "game_done", "game_return")  # keys that returns are read from
RESERVED = {"_tick", "_time", "step", "steps_per_second", "learning_rate", "learner_wait"}


class Run:
    """A training run; use as a context manager, in which the checkpoint, if any, is resumed.

    Args:
      flags: of the program. If present, num_learner_threads, deterministic, episodic_life
        and frames_per_step are used, too.
      learner: a Learner, which this restores, logs and saves.
      max_skipped: updates in a row that are not finite, after which the run ends; None: any number.

    Attributes:
      stop: threading.Event that ends the run: set by Ctrl-C, SIGTERM, the last step, or by others.
      first_step: agent step at which the run starts, or is resumed.
      exit_status: for the shell, when the block is left.

    At the end a last checkpoint is saved, unless an error other than EnvError ends the run.

    Raises:
      FlagError: the checkpoint or the folder cannot be used; or the last checkpoint could not be
        saved.
    """

    def __init__(self, flags, learner, max_skipped=MAX_SKIPPED):
        self._flags, self._learner, self._group = flags, learner, learner.group
        self._max_skipped = max_skipped
        self._frames = getattr(flags, "frames_per_step", 1)  # frames per step
        self.stop = threading.Event()
        self.exit_status = 0
        self._signals = StopSignals(self._announce_stop)
        self._system = None
        # Metrics since the last tick, and how many are of updates; the learner's lock guards them.
        self._updates, self._num_updates = [], 0
        self._lags = []  # of the rollouts since the last tick, in updates; likewise
        self._diagnostics = diagnostics.Diagnostics()
        self._learner_waits = Stopwatch(getattr(flags, "num_learner_threads", 1))
        self._wait_fractions = WaitFractions()
        self._profiler = UpdateProfiler(flags)

    def __enter__(self):
        if not self._flags.disable_checkpoint:
            checkpoint.to_bytes(checkpoint.pack(self._flags, self._learner))
        self._handover = Handover(self._flags, self._learner)
        self.path = self._folder.path
        self._signals.catch()
        try:
            self._start()
        except BaseException as error:
            self._signals.restore()
            self._folder.close("", error)
            raise
        return self

    @property
    def _folder(self):
        return self._handover.folder

    def _start(self):
        names = Parser.flag_names(self._flags.program)
        given = {name: value for name, value in vars(self._flags).items() if name in names}
        logging.info("Flags:\n%s", pprint.pformat(given))
        self._group.check_same("game", f"{self._flags.env}, {self._frames} frames a step")
        self._group.from_rank_0(lambda: checkpoint.resume(self._flags, self._learner))
        self._group.share_state(self._learner)
        if (size := self._group.size) > 1:
            num_rollouts = size * self._flags.batch_size
            logging.info("%d learners: an update sums over %d new rollouts", size, num_rollouts)
        self.first_step = self._learner.step
        if self.first_step:
            logging.info("Resuming %s at step %s", self.path, f"{self.first_step:,}")
        else:
            logging.info("New run: %s", self.path)
        self._folder.start(self._learner)
        self._energy = CPUEnergy()
        self._learner.publish()
        self.watchdog = Watchdog(self._flags.stall_timeout_s, self._silences)
        print_stacks_on_signal(lambda: self._system.pids() if self._system else [])
        # Times and steps of the last minute or so, for the time left.
        self._ticks = deque([(time.monotonic(), self.first_step)], maxlen=12)
        self._group.barrier()

    def __exit__(self, error_type, error, traceback):
        self.stop.set()
        self.watchdog.close()
        self._group.leave(is_over=error is None)
        status, failure = "ended", ""
        try:
            self._handover.take(at_end=isinstance(error, EnvError))
            if self._folder.checkpoints:
                if error is None or isinstance(error, EnvError):  # what was learned is good
                    self._folder.checkpoints.save(self._learner)
                failure = self._folder.checkpoints.failure
            if self._folder.evaluations:
                self._folder.evaluations.close()
            try:
                self.tick()
            except FlagError as gone:  # its folder; the run's own error is to be seen
                failure = failure or str(gone)
            failure = failure or self._handover.failure
            if failure and error is None:
                status = f"ended, but {failure}"
            self._announce_resume()
        except BaseException as last_error:
            error = error or last_error
            raise
        finally:
            if stopped_by := self._stopped_by():
                status = status.replace("ended", f"stopped by {stopped_by}", 1)
            # To torchrun any other status than 0 is a failure, after which it starts all anew.
            if stopped_by and self._signals.first and not self._group.by_torchrun:
                self.exit_status = 128 + self._signals.first
            try:
                self._folder.close(status, error)
            finally:
                self._signals.restore()
        # Torchrun must not restart a run that was stopped.
        has_to_stop = self._signals.first or self._group.exchange.has_to_stop
        is_wanted = self._group.by_torchrun and has_to_stop
        if failure and error is None and not is_wanted:
            raise FlagError(failure)

    def threads(self, on_exit=()):
        """Return Threads that end, as does the run, when one of them fails; see Threads."""
        return Threads(self.stop, on_exit)

    def follow(self, batches):
        """Yield from `batches`, and count how long all learner threads wait for them."""
        batches = iter(batches)
        while True:
            self.watchdog.beat("waits for a batch")
            with self._learner_waits:
                batch = next(batches, None)
            if batch is None:
                return
            self.watchdog.beat("learns")
            with self._group.batch_in_hand():
                yield batch

    def record(self, update, batch=None, is_update=True):
        """Count an update whose weights have been published; requires the learner's lock.

        Args:
          update: its metrics, floats by name, among them `steps`.
          batch: the Batch that it was made of; None where only other learners had one.
          is_update: False where there are only steps to be counted, but no update was due.

        Raises:
          ValueError: there is no metric `steps`, or one has the name of a column of ours.
          FloatingPointError: too many updates in a row were not finite; the batch has been saved.
        """
        returns = [], []
        if batch is not None:
            # Row 0 was counted when it was the last row of the rollout before.
            rows = {name: batch.cpu_rows[name][1:] for name in ENDS}
            returns = (
                rows["episode_return"][rows["done"]].tolist(),
                rows["game_return"][rows["game_done"]].tolist(),
            )
            version = self._learner.weights.version - 1  # the weights that this update started from
            self._lags += [version - v for v in batch.policy_versions]
        if self._group.exchange.num_batches == 0:  # the exchange dropped the only batch
            self._group.exchange.add_returns(*returns)
            return
        if "steps" not in update or not RESERVED.isdisjoint(update):
            raise ValueError(
                "the metrics of an update must have `steps`, the number of new transitions "
                f"(not replayed), and none of {sorted(RESERVED)}, but have {sorted(update)}"
            )
        self._learner.count(int(update["steps"]), *self._group.share_returns(*returns))
        if diagnostics.is_finite(update):
            self._learner.stats["skipped_in_a_row"] *= not is_update
            self._updates.append({k: v for k, v in update.items() if k != "steps"})
            self._num_updates += is_update
        else:
            self._skip(update, batch)
        if self._flags.write_profiler_trace and is_update:
            self._profiler.count_update()
        if self._group.exchange.has_to_stop and not self._signals.first:
            logging.info("Another learner asks to stop: ending")
        if self._learner.step >= self._flags.total_steps or self._group.exchange.has_to_stop:
            self.stop.set()
        if getattr(self._flags, "deterministic", False):
            if self._learner.weights.version % LOG_UPDATES == 0:
                self.tick()

    def watch(self, system=None):
        """Log and save from time to time, until `stop` is set.

        Args:
          system: actors, streams or the like, or None; it must have these methods:
            waits(): seconds since the start for which it waited, by name
            metrics(): numbers by name
            texts(metrics): a few characters for the status line, by name
            silences(): as for a Watchdog
            pids(): of its processes.
        """
        self._system = system
        interval = min(LOG_INTERVAL, self._flags.checkpoint_interval_s)
        while not self.stop.wait(interval):
            self.watchdog.beat("looks after the run")
            self._handover.take()
            if not getattr(self._flags, "deterministic", False):
                self.tick()
            checkpoints = self._folder.checkpoints
            if checkpoints and checkpoints.are_due(within=interval):
                checkpoints.save(self._learner)
            self.watchdog.beat("looks after the run", pause=interval)

    def tick(self):
        """Log a row of metrics."""
        learner, system = self._learner, self._system
        with learner.lock:
            step, stats = learner.step, learner.stats
            updates, num_updates = diagnostics.means(self._updates), self._num_updates
            latest = {
                "mean_episode_return": diagnostics.mean(stats["episode_returns"]),
                "mean_game_return": diagnostics.mean(stats["game_returns"]),
                "learning_rate": learner.learning_rate,
                "policy_lag_min": min(self._lags, default=None),
                "policy_lag_mean": diagnostics.mean(self._lags),
                "policy_lag_max": max(self._lags, default=None),
            }
            latest["skipped_updates"] = stats["skipped_updates"]
            self._updates, self._num_updates, self._lags = [], 0, []
        waits = {"learner_wait": self._learner_waits.seconds()} | (system.waits() if system else {})
        fractions = self._wait_fractions(**waits)
        latest |= fractions | self._energy.metrics()
        latest |= self._folder.evaluations.tick(learner) if self._folder.evaluations else {}
        latest |= system.metrics() if system else {}
        if taken := updates.keys() & latest.keys():
            raise ValueError(f"metrics of updates have names of ours, {sorted(taken)}: rename them")
        latest = updates | latest

        show = {name: diagnostics.show(value) for name, value in latest.items()}
        texts = {"return": show["mean_episode_return"]}
        if getattr(self._flags, "episodic_life", False):
            texts["game"] = show["mean_game_return"]
        texts["loss"] = show.get("total_loss", "-")
        texts["wait"] = "/".join(f"{fraction:.0%}" for fraction in fractions.values())
        texts |= system.texts(latest) if system else {}
        texts["lag"] = "/".join(show[f"policy_lag_{name}"] for name in ("min", "mean", "max"))
        texts["health"] = self._diagnostics.text(latest, num_updates)
        rate, line = self._status_line(step, texts)
        self._folder.log(step, {"steps_per_second": rate, **latest}, line)

    def _status_line(self, step, texts):
        now, ticks = time.monotonic(), self._ticks
        rate, lasting_rate = ((step - s) / max(now - t, 1e-9) for t, s in (ticks[-1], ticks[0]))
        ticks.append((now, step))
        steps_left, left = max(0, self._flags.total_steps - step), "-"
        if steps_left < lasting_rate * CENTURY:
            left = str(datetime.timedelta(seconds=round(steps_left / lasting_rate)))
        parts = [f"{step:,} steps", f"{rate:,.0f} steps/s ({rate * self._frames:,.0f} frames/s)"]
        parts += [f"{name} {text}" for name, text in texts.items()]
        return rate, " | ".join([*parts, f"left {left}"])

    def _skip(self, update, batch):
        """Count a skipped update, and log the sources of its batch."""
        stats, most = self._learner.stats, self._max_skipped
        stats["skipped_updates"] += 1
        stats["skipped_in_a_row"] += 1
        values = ", ".join(f"{name} {value}" for name, value in update.items())
        ranks = self._group.exchange.not_finite
        is_ours = batch is not None and (not ranks or self._group.rank in ranks)
        names = f"learners {ranks}" if ranks else "all learners"
        source = f"Its batch comes from {batch.sources}" if is_ours else f"See the logs of {names}"
        in_a_row, end = stats["skipped_in_a_row"], f", {most} end the run" if most else ""
        logging.error(
            f"The update was skipped, as it is not finite ({stats['skipped_updates']} in all; "
            f"{in_a_row} in a row{end}): {values}. {source}"
        )
        if most is None or in_a_row < most:
            return
        if not is_ours:
            raise FloatingPointError(f"{most} updates in a row were not finite. {source}")
        where = checkpoint_writer.save_bad_batch(self.path, self._group.name, batch, update)
        raise FloatingPointError(
            f"{most} updates in a row were not finite, the last one with {values}. The "
            f"batch {where}, of {batch.sources}; the checkpoint is from before. "
            f"{checkpoint_writer.describe_bad_batch(batch)}. Look at rewards, at frames (does the "
            "net scale them?) and at policy_logits (does a mask leave no action, or the loss "
            "multiply 0 by -inf?); else try a lower --learning_rate"
        )

    def _stopped_by(self):
        """Return who has stopped the run before its last step, or an empty text."""
        if self._learner.step >= self._flags.total_steps:
            return ""
        if self._signals.first:
            return self._signals.first.name
        return "another learner" if self._group.exchange.has_to_stop else ""

    def _announce_resume(self):
        is_saved = self._folder.checkpoints and (self.path / checkpoint.NEWEST).exists()
        if self._stopped_by() and is_saved and not self._flags.disable_checkpoint:
            launcher = "torchrun ..." if self._group.by_torchrun else "python"
            logging.info("To go on: %s %s", launcher, resume_command(self._flags))

    def _silences(self):
        return self._system.silences() if self._system else []

    def _announce_stop(self, name):
        self._group.ask_to_stop(self.stop)
        logging.info("Caught %s: ending", name)
