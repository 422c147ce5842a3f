# SPDX-License-Identifier: Apache-2.0
"""The threads of a run: the first one that ends, for whatever reason, ends them all."""

import logging
import threading


class Threads:
    """Starts threads; at the end of its `with` block wakes and joins them, and raises their error.

    Args:
      stop: threading.Event, set when a thread ends or raises: whoever waits for it leaves the
        block.
      on_exit: functions that wake the threads, called when the block is left.
    """

    def __init__(self, stop, on_exit=()):
        self._stop, self._on_exit = stop, on_exit
        self._threads, self._errors = [], []

    def start(self, function, *args, name=None, copies=1):
        """Start threads that call `function(*args)`; `name` is for logs, by default its name."""
        name = name or function.__name__.replace("_", " ")
        for i in range(copies):
            thread = threading.Thread(target=self._run, args=(function, args), name=f"{name} {i}")
            thread.start()
            self._threads.append(thread)

    def _run(self, function, args):
        try:
            function(*args)
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._stop.set()

    def __enter__(self):
        return self

    def __exit__(self, error_type, error, traceback):
        self._stop.set()
        for wake in self._on_exit:
            try:
                wake()
            except Exception as failure:  # the others are to be called all the same
                self._errors.append(failure)
        for thread in self._threads:
            thread.join()
        if self._errors and error is None:
            raise self._errors[0]
        if self._errors:
            logging.error("A thread failed, too", exc_info=self._errors[0])
