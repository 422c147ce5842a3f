# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed, stopped while they resume, or whose disk becomes full."""

import errno
import pathlib
import re
import signal

import pytest
from program import HELPERS, ROOT, Program, last_step, load, read_meta, read_rows, run, wait_until

pytestmark = pytest.mark.whole

CAMPAIGN = ROOT / "campaigns" / "preemption.py"
PROGRAMS = {
    "monobeast": (HELPERS / "catch.py", "--num_actors 1 --envs_per_actor 4"),
    "polybeast": (HELPERS / "catch_poly.py", "--num_servers 1 --envs_per_stream 4"),
}
ARGUMENTS = "--env Catch --batch_size 4 --total_steps 100_000_000 --xpid run"


@pytest.fixture(params=PROGRAMS)
def start(request, tmp_path):
    """Return a function that starts one of the programs."""
    script, own = PROGRAMS[request.param]

    def start(*arguments):
        return Program(script, ARGUMENTS, own, *arguments, TMPDIR=str(tmp_path))

    return start


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_few_kills_at_random_moments_lose_nothing_that_was_saved(program):
    # It sees for itself that everything is as it should be.
    status, output = run(CAMPAIGN, "--kills 3 --program", program)
    assert status == 0, output
    assert f"| {program} | 3 | 1 + 1 + 1 |" in output, output


@pytest.mark.parametrize("moment", ["Flags:", r"Resuming \S+ at step", "Saved .*model.tar"])
def test_sigterm_saves_whatever_a_resumed_run_is_doing(start, tmp_path, moment):
    folder = tmp_path / "runs" / "run"
    arguments = f"--checkpoint_interval_s 0.5 --savedir {tmp_path / 'runs'}"
    with start(arguments) as program:
        program.wait_until(lambda: last_step(folder) > 0 and (folder / "model.tar").exists())
        program.process.kill()
        program.end()
        program.wait_for_members()
    step = load(folder / "model.tar")["step"]
    with start(arguments) as program:
        program.wait_until(lambda: re.search(moment, program.output))
        program.process.send_signal(signal.SIGTERM)
        status, output = program.end()
        program.wait_for_members()
    assert status == 128 + signal.SIGTERM, output
    assert "Traceback" not in output
    # It says of what step the checkpoint is, and this is where the run stood.
    (*_, saved) = re.findall(r"Saved \S*model.tar at step ([\d,]+)", output)
    saved = int(saved.replace(",", ""))
    assert saved == load(folder / "model.tar")["step"] == last_step(folder) >= step
    assert read_meta(folder)["status"] == "stopped by SIGTERM"


def fill(folder):
    with open(folder / "filler", "wb", buffering=0) as file, pytest.raises(OSError) as error:
        while True:
            file.write(bytes(4096))
    assert error.value.errno == errno.ENOSPC
    return pathlib.Path(folder, "filler")


def test_a_run_goes_on_while_its_disk_is_full_and_says_at_the_end_what_is_lost(start, small_disk):
    folder = small_disk / "run"
    arguments = f"--checkpoint_interval_s 0.5 --savedir {small_disk}"
    with start(arguments) as program:
        program.wait_until(lambda: last_step(folder) > 0 and (folder / "model.tar").exists())
        filler = fill(small_disk)
        program.wait_until(
            lambda: (
                program.output.count("model.tar of step") > 1  # at the next interval, too
                and f"Cannot write {folder / 'logs.csv'} (No space left on device)"
                in program.output
            )
        )
        steps = load(folder / "model.tar")["step"], len(read_rows(folder))
        filler.unlink()
        program.wait_until(lambda: load(folder / "model.tar")["step"] > steps[0])
        program.wait_until(lambda: len(read_rows(folder)) > steps[1])
        assert f"Can write {folder / 'logs.csv'} again: " in program.output
        filler = fill(small_disk)
        step = load(folder / "model.tar")["step"]
        program.process.send_signal(signal.SIGTERM)
        status, output = program.end()
        program.wait_for_members()
    assert status == 1, output
    # One traceback is of TensorBoard's thread, whose error we log as a line.
    assert "The run failed" not in output
    last = output.strip().splitlines()[-1]
    assert re.search(
        rf"^catch\w*.py: the checkpoint {folder}/model.tar of step \d[\d,]* could not be written "
        rf"\(No space left on device\): that of step {step:,} stays$",
        last,
    ), last
    assert list(folder.glob("*.tmp")) == []
    rows = read_rows(folder)
    assert all(row["learning_rate"] and int(row["step"]) >= 0 for row in rows)

    filler.unlink()
    with start(arguments) as program:
        program.wait_until(lambda: re.search(rf"Resuming \S+ at step {step:,}\n", program.output))
        wait_until(lambda: load(folder / "model.tar")["step"] > step)
        program.process.send_signal(signal.SIGTERM)
        assert program.end()[0] == 128 + signal.SIGTERM
