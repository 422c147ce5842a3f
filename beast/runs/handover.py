# SPDX-License-Identifier: Apache-2.0
"""Which learner of a group writes into the run's folder, and how another one takes over."""

import logging

from beast.errors import FlagError
from beast.runs import checkpoint
from beast.runs.run_folder import LearnerLog, RunFolder


class Handover:
    """The folder of a run, as one of its learners has it.

    Attributes:
      folder: a RunFolder, or, while another learner has that, a LearnerLog.
      failure: why this learner, whose turn it is, cannot write into the run's folder; else empty.

    Raises:
      FlagError: the folder cannot be used.
    """

    def __init__(self, flags, learner):
        self._flags, self._learner, self._group = flags, learner, learner.group
        self.failure = ""
        name = self._group.name  # empty where this learner has the run's folder from the start
        self.folder = LearnerLog(flags, name) if name else None
        self._group.from_rank_0(self._open)

    def _open(self):
        if self.folder is None:
            self.folder = RunFolder(self._flags)

    def take(self, at_end=False):
        """Take over the run's folder from another learner, if it is now this learner's.

        Args:
          at_end: whether all learners are ending; then the one with the newest weights takes it.
        """
        if self.folder.checkpoints or self._group.by_torchrun:
            return
        if self._group.rank != 0:
            self.failure = ""
            if not at_end or self._group.rank is None:
                return
        folder = None
        try:
            saved = checkpoint.load(self._flags) if at_end else None
            if saved is not None and saved["step"] >= self._learner.step:
                return
            folder = RunFolder(self._flags)
            if not at_end:
                self._catch_up()
            folder.start(self._learner)
        except FlagError as error:  # the other one may be stopped, or about to end
            if folder is not None:
                folder.close("")
            if not self.failure:
                logging.error("This learner cannot write logs and checkpoints: %s", error)
            self.failure = f"nothing was saved: {error}"
            return
        self.failure = ""
        self.folder.close("")
        self.folder = folder
        logging.info("This learner writes logs and checkpoints from here on")

    def _catch_up(self):
        """Resume the checkpoint again, if others have gone on while this waited for a batch."""
        with self._learner.lock:
            try:
                saved, own = checkpoint.load(self._flags), self._learner.step
            except FlagError as error:  # it is damaged, and will be replaced
                if isinstance(error.__context__, OSError):  # which may not last
                    raise
                return
            if saved is None or saved["step"] <= own:
                return
            if self._group.size > 1:  # the other one has taken this learner's weights
                raise FlagError(f"the checkpoint is of step {saved['step']:,}, this of {own:,}")
            checkpoint.resume(self._flags, self._learner)
            self._group.share_state(self._learner)
            self._learner.publish()
            logging.info("Resuming again, at step %s, where others ended", f"{saved['step']:,}")
