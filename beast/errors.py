# SPDX-License-Identifier: Apache-2.0
"""User errors, which programs print without a traceback. No torch here."""


class FlagError(ValueError):
    """Flags that contradict each other or the machine; the message says what to change."""


class EnvError(RuntimeError):
    """An environment or its server cannot be used; the message names it."""
