# SPDX-License-Identifier: Apache-2.0
"""Time limits: threads whose errors are raised when they are joined, and code that may deadlock."""

import pathlib
import subprocess
import sys
import textwrap
import threading
import time

ROOT = pathlib.Path(__file__).parent.parent.parent
DEADLINE = 60  # seconds; a loaded machine may need some, an idle one never


class Thread(threading.Thread):
    """A running thread that calls a function; `result` waits and returns, or raises, its outcome.

    It is a daemon, so that a test that fails while it is blocked can end.
    """

    def __init__(self, function, *args, **kwargs):
        super().__init__(daemon=True)
        self.function, self.args, self.kwargs = function, args, kwargs
        self.value = self.error = None
        self.start()

    def run(self):
        try:
            self.value = self.function(*self.args, **self.kwargs)
        except BaseException as error:
            self.error = error

    def result(self, seconds=DEADLINE):
        self.join(seconds)
        assert not self.is_alive(), f"{self.function} has not come back in {seconds} s"
        if self.error is not None:
            raise self.error
        return self.value

    def assert_blocked(self, seconds=0.1):
        """Check that it is still waiting after a while."""
        self.join(seconds)
        if self.error is not None:
            raise self.error
        assert self.is_alive(), f"{self.function} should still wait, but returned {self.value!r}"


def wait_until(condition, seconds=200):
    """Ask until the condition holds; return what it then is."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return result


# A thread that waits for the GIL for good cannot tell where: this needs no GIL.
PREAMBLE = """
import faulthandler, sys
faulthandler.enable()
faulthandler.dump_traceback_later({seconds}, exit=True)
sys.path[:0] = [{root!r}, {tests!r}]
"""


def run_with_deadline(code, seconds=DEADLINE):
    """Run code that may deadlock, in a process of its own; return what it printed.

    Raises:
      AssertionError: it failed, or was not through in time; says where its threads stood then.
    """
    preamble = PREAMBLE.format(
        seconds=seconds, root=str(ROOT), tests=str(pathlib.Path(__file__).parent)
    )
    done = subprocess.run(
        [sys.executable, "-c", preamble + textwrap.dedent(code)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=seconds + 10,  # where not even the alarm could end it
        text=True,
    )
    assert "Timeout (" not in done.stdout, f"deadlock after {seconds} s:\n{done.stdout}"
    assert done.returncode == 0, f"status {done.returncode}:\n{done.stdout}"
    return done.stdout
