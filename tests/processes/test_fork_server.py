# SPDX-License-Identifier: Apache-2.0
"""The fork server's children have the program as it was when the run began."""

import subprocess
import sys

from program import ROOT

SCRIPT = """
import pathlib

VALUE = 1


def send(pipe):
    pipe.send(VALUE)


if __name__ == "__main__":
    from beast.processes.fork_server import end_process, start_fork_server, start_process

    context, path = start_fork_server(), pathlib.Path(__file__)
    for _ in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=send, args=(theirs,))
        start_process(process, "child")
        print(ours.recv())
        end_process(process, 5)
        path.write_text(path.read_text().replace("VALUE = 1", "VALUE = 2"))
"""


def test_a_child_has_the_program_as_it_was_at_the_start(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    command = [sys.executable, str(path)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(ROOT)}
    )
    assert result.stdout.split() == ["1", "1"], result.stderr
    assert "VALUE = 2" in path.read_text()
