# SPDX-License-Identifier: Apache-2.0
"""Whether /dev/shm has room. No torch here."""

import os
import shutil

from beast.errors import FlagError


def count_learners():
    """Return how many learners torchrun has started on this machine, this one included."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def has_shared_memory(num_bytes):
    """Return whether /dev/shm has room for so much, also where each learner here needs it."""
    return num_bytes <= 0.95 * _free_bytes()


def _free_bytes():
    """Return this learner's share of what is free, since others may be about to take theirs."""
    return shutil.disk_usage("/dev/shm").free // count_learners()


def check_shared_memory(num_bytes, what, advice=""):
    """Refuse what /dev/shm has no room for: writing to it would end the run by SIGBUS.

    Raises:
      FlagError: it names `what` needs the memory, and how to get it, `advice` included.
    """
    if not has_shared_memory(num_bytes):
        num = count_learners()
        each = f" for each of {num} learners" if num > 1 else ""
        raise FlagError(
            f"{what} need {num_bytes / 2**20:,.0f} MiB of shared memory, but /dev/shm has "
            f"{_free_bytes() / 2**20:,.0f} MiB left{each}: enlarge it "
            f"(mount -o remount,size=... /dev/shm; in Docker: docker run --shm-size=...){advice}"
        )
