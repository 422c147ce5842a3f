# SPDX-License-Identifier: Apache-2.0
"""User errors, which programs print as one line. No torch here.

One that comes from an error in code that users write is raised `from` that: its traceback is
printed above the line. All others are raised `from None`.
"""

import traceback


class FlagError(ValueError):
    """Flags that contradict each other or the machine; the message says what to change."""


class EnvError(RuntimeError):
    """An environment or its server cannot be used; the message names it."""


def format_cause(error):
    """Return the traceback of what `error` was raised from, "" where that says what to change."""
    cause = error.__cause__
    if cause is None or isinstance(cause, FlagError):
        return ""
    return "".join(traceback.format_exception(cause))
