# SPDX-License-Identifier: Apache-2.0
"""Files of a run's code that are edited while it goes on: processes that start later have those."""

import os
import sys
import sysconfig

_PACKAGES = tuple(
    os.path.join(sysconfig.get_path(name), "")
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_known = {}  # from files to when they were last changed, and their size, as first seen


def edited_files():
    """Return the files of imported modules, not of packages, that differ from earlier calls."""
    edited = set()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or os.path.abspath(file).startswith(_PACKAGES):
            continue
        try:
            status = os.stat(file)
            now = status.st_mtime_ns, status.st_size
        except OSError:  # it has gone
            now = None
        if _known.setdefault(file, now) != now:
            edited.add(os.path.basename(file))
    return sorted(edited)
