# SPDX-License-Identifier: Apache-2.0
"""Imported by the fork server alone: the program, as it is when the run begins.

Each child would import it anew else, which may have been edited by then. Python's own fork server
is to do so for "__main__", but looks for the path under a key that is never there, and without
sys.path (CPython 3.11 to 3.13).
"""

import contextlib
import json
import multiprocessing.process
import multiprocessing.spawn
import os
import sys

NAME = "BEAST_PROGRAM"  # environment variable: what the server is to import


@contextlib.contextmanager
def announced():
    """Have a fork server that is started within this context find the program."""
    data = multiprocessing.spawn.get_preparation_data("fork server")
    known = {"init_main_from_path", "init_main_from_name", "sys_path", "sys_argv"}
    program = {key: data[key] for key in known & data.keys()}
    before = {key: os.environ.get(key) for key in (NAME, "PYTHONPATH")}
    program["PYTHONPATH"] = before["PYTHONPATH"]
    os.environ[NAME] = json.dumps(program)
    os.environ["PYTHONPATH"] = os.pathsep.join(data["sys_path"])  # where this module is
    try:
        yield
    finally:
        _restore(before)


def _restore(variables):
    for key, value in variables.items():
        os.environ.pop(key, None)
        if value is not None:
            os.environ[key] = value


def _import_program(program):
    _restore({"PYTHONPATH": program.pop("PYTHONPATH")})
    process = multiprocessing.process.current_process()
    process._inheriting = True  # it may start no processes
    try:
        multiprocessing.spawn.prepare(program)
    except Exception:  # the children will say so
        sys.modules.pop("__mp_main__", None)
    finally:
        del process._inheriting


if text := os.environ.pop(NAME, None):
    _import_program(json.loads(text))
