# SPDX-License-Identifier: Apache-2.0
"""Whether /dev/shm has room. No torch here."""

import shutil

from beast.errors import FlagError


def check_shared_memory(num_bytes, what, advice=""):
    """Refuse what /dev/shm has no room for: writing to it would end the run by SIGBUS.

    Raises:
      FlagError: it names `what` needs the memory, and how to get it, `advice` included.
    """
    free = shutil.disk_usage("/dev/shm").free
    if num_bytes > 0.95 * free:
        raise FlagError(
            f"{what} need {num_bytes / 2**20:,.0f} MiB of shared memory, but /dev/shm has "
            f"{free / 2**20:,.0f} MiB left: enlarge it (mount -o remount,size=... /dev/shm; in "
            f"Docker: docker run --shm-size=...){advice}"
        )
