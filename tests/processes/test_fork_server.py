# SPDX-License-Identifier: Apache-2.0
"""Children of the fork server import the program; who edits it meanwhile is told.

Where its socket has been removed, another server takes its place."""

import subprocess
import sys

import pytest
from program import ROOT

SCRIPT = """
import logging
import pathlib

VALUE = 1


def send(pipe):
    pipe.send(VALUE)


if __name__ == "__main__":
    import contextlib
    import multiprocessing.util
    import shutil
    import sys
    import time
    from beast.errors import EnvError
    from beast.processes.fork_server import end_process, start_fork_server, start_process

    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    context, path = start_fork_server(), pathlib.Path(__file__)
    for i in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=send, args=(theirs,))
        if sys.argv[1] == "clean" and i == 1:
            shutil.rmtree(multiprocessing.util.get_temp_dir())
        while True:  # where its socket has gone, the old server has to end first
            with contextlib.suppress(EnvError):
                start_process(process, f"child {i}")
                break
            time.sleep(0.1)
        print(ours.recv())
        end_process(process, 5)
        if sys.argv[1] == "edit":
            path.write_text(path.read_text().replace("VALUE = 1", "VALUE = 25"))
"""


@pytest.mark.parametrize("action", ["edit", "clean"])  # of the temporary folder
def test_a_child_with_edited_code_is_told(tmp_path, action):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, str(path), action], capture_output=True, text=True, timeout=200,
        env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    first, *warnings, second = result.stdout.splitlines()
    assert (first, second) == ("1", "25" if action == "edit" else "1"), result.stderr
    expected = "child 1 starts with code that was edited after this run began (script.py)"
    assert [line.partition(":")[0] for line in warnings] == [expected] * (action == "edit")
