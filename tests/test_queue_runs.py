# SPDX-License-Identifier: Apache-2.0
"""python -m beast.queue_runs: which runs it makes, where they run, and how the queue ends."""

import argparse
import collections
import csv
import json
import os
import re
import shlex
import signal
import sys
import time

import pytest
from program import ROOT, Program

import monobeast
from beast import queue_runs
from beast.processes import machine
from beast.runs import checkpoint

DOCS = ROOT / "docs" / "runs.md"
ONE_SLOT = "--cores_per_run 1 --gpus_per_run 8"

# A line when it starts, with where it runs, and one when it ends, in a file that all runs share.
CHILD = """
import argparse, json, os, pathlib, signal, sys, time
parser = argparse.ArgumentParser()
for name in ("xpid", "savedir", "seed", "mode"):
    parser.add_argument("--" + name)
flags = parser.parse_args()
folder = pathlib.Path(flags.savedir)

def write(what):
    cores = folder / f"{os.getpid()}.cores"  # of a machine with more cores than this one
    cores = json.loads(cores.read_text()) if cores.exists() else list(os.sched_getaffinity(0))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    line = json.dumps({"what": what, "xpid": flags.xpid, "cores": cores, "gpus": gpus.split(",")})
    with open(folder / "events", "a", 1) as file:
        file.write(line + "\\n")

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)

def stop(number, _):
    write(signal.Signals(number).name)
    sys.exit(128 + number)

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, stop)
write("start")
print("printed by", flags.xpid)
"""


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """Return a function that makes a Program: a queue whose runs do what `body` says."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")

    def make(body, options, xpid, script=("-m", "beast.queue_runs"), **kwargs):
        child = tmp_path / "child.py"
        child.write_text(CHILD + body + '\nwrite("end")\n')
        words = [*script, *options.split(), "--", sys.executable, "-S", child, "--xpid", xpid]
        return Program(*words, "--savedir", tmp_path, cwd=ROOT, PYTHONPATH=str(ROOT), **kwargs)

    return make


@pytest.fixture
def read(tmp_path):
    """Return functions that read what runs did, as (what, xpid), and queue.csv, by xpid."""

    def events():
        path = tmp_path / "events"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def rows():
        with open(tmp_path / "queue" / "queue.csv", newline="") as file:
            return {row["xpid"]: row for row in csv.DictReader(file)}

    return argparse.Namespace(
        events=events,
        rows=rows,
        starts=lambda: [e["xpid"] for e in events() if e["what"] == "start"],
        statuses=lambda: {xpid: row["status"] for xpid, row in rows().items()},
    )


def find_overlaps(events):
    """Return how many runs ran at once at most, and the cores and GPUs that two of them shared."""
    active, most, shared = {}, 0, []
    for event in events:
        if event["what"] != "start":
            del active[event["xpid"]]
            continue
        used = {f"{kind} {i}" for kind in ("cores", "gpus") for i in event[kind]}
        shared += [used & others for others in active.values() if used & others]
        active[event["xpid"]] = used
        most = max(most, len(active))
    assert not active
    return most, shared


# ------------------------------------------------------------------------------------------ braces


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--a 1", ["--a 1"]),
        ("--a={1,2}", ["--a=1", "--a=2"]),
        ("--learning-rate {1,2} {learning-rate}", ["--learning-rate 1 1", "--learning-rate 2 2"]),
        ("-{x} {x=1,2}", ["-1 1", "-2 2"]),  # before they have values, too
        ("--a {1,2} --b {a}{x=,y}", ["--a 1 --b 1", "--a 1 --b 1y", "--a 2 --b 2", "--a 2 --b 2y"]),
        ("--a {1,2}-{1,2} --b {a=1,2}", ["--a 1-1 --b 1", "--a 2-2 --b 2"]),
        ("{n=a,b}.py {x=c=d}", ["a.py c=d", "b.py c=d"]),
    ],
)
def test_names_of_braces(words, expected):
    assert [" ".join(command) for command in queue_runs.expand(words.split())] == expected


def test_spaces_around_values_do_not_count():
    assert queue_runs.expand(["--a", "{1, 2 }"]) == [["--a", "1"], ["--a", "2"]]


@pytest.mark.parametrize(
    ("options", "words", "message"),
    [
        ("", "", "give the command after --"),
        ("", "prog --xpid {seed}", r"{seed} has no values .*: none \(quote braces"),
        ("", "prog --env {a,b} --xpid {seed}", "{seed} has no values .*: env$"),
        ("", "prog --a {1,2}{3,4} --xpid x", r"a are 1,2 and 3,4: name one of them, {other=3,4}"),
        ("", "{a,b}.py --xpid x", r"{a,b}.py belongs to no flag: name its braces, {name=a,b}"),
        ("", "prog --seed {1,2}", "give the command an --xpid"),
        ("", "prog --env {ALE/A,B} --xpid {env}", "--xpid: 'ALE/A' is not valid: it must be the"),
        ("", "prog --seed {1,2} --xpid x", "2 runs have the --xpid x: put the names"),
        ("", "prog --seed {1,2} --xpid {seed} --savedir {seed}", "one --savedir, not 1, 2"),
        ("--cores_per_run 1000", "prog --xpid x", r"1000, but there are only \d+ cores"),
        ("--gpus_per_run 9", "prog --xpid x", "--gpus_per_run is 9, but 8 GPUs are in CUDA_VIS"),
        ("--runs_per_gpu 2", "prog --xpid x", "--runs_per_gpu needs --gpus_per_run"),
        ("--gpus_per_run 0", "prog --xpid x", "must be positive"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    options, words, message, capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr(queue_runs, "SAVEDIR", str(tmp_path))
    with pytest.raises(SystemExit) as error:
        queue_runs.main(["--cores_per_run", "1", *options.split(), "--", *words.split()])
    assert error.value.code == 2
    assert re.search(message, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- slots


@pytest.mark.parametrize("runs_per_gpu", [1, 2, 3])
@pytest.mark.parametrize("gpus_per_run", [None, 1, 2])
@pytest.mark.parametrize("cores_per_run", [1, 3])
@pytest.mark.parametrize("gpus", [2, 3, 8])
@pytest.mark.parametrize("cores", [3, 7, 40])
def test_no_core_has_two_slots_and_no_gpu_more_than_is_wished(
    cores, gpus, cores_per_run, gpus_per_run, runs_per_gpu
):
    words = f"--cores_per_run {cores_per_run} --runs_per_gpu {runs_per_gpu} "
    words += f"--gpus_per_run {gpus_per_run}" if gpus_per_run else ""
    flags = queue_runs.parser.parse_args(words.split())
    slots = queue_runs.make_slots(flags, list(range(cores)), [str(i) for i in range(gpus)])
    room = [cores // cores_per_run]
    room += [gpus * runs_per_gpu // gpus_per_run] if gpus_per_run else []
    assert len(slots) == min(room)
    taken = [core for slot in slots for core in slot.cores]
    assert len(taken) == len(set(taken)) == len(slots) * cores_per_run
    if gpus_per_run is None:
        assert all(slot.gpus is None for slot in slots)
        return
    assert all(len(set(slot.gpus)) == gpus_per_run for slot in slots)
    shared = collections.Counter(gpu for slot in slots for gpu in slot.gpus)
    assert max(shared.values()) <= runs_per_gpu
    assert max(shared.values()) <= min(shared[str(i)] for i in range(gpus)) + 1  # evenly


def test_gpus_are_those_of_the_environment_else_of_nvidia_smi(monkeypatch, tmp_path):
    for value, expected in {"": [], "2, 0": ["2", "0"], "GPU-a": ["GPU-a"], "-1": []}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert queue_runs.find_gpus() == expected
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert queue_runs.find_gpus() == []
    lines = "GPU 0: H100 (UUID: GPU-a)\n  MIG 1g.10gb Device 0: (UUID: MIG-b)\nGPU 1: H100"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n[ $1 = -L ] && echo '{lines}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert queue_runs.find_gpus() == ["0", "1"]


@pytest.fixture
def four_cores(monkeypatch):
    """Confine this process to four cores: 3, 4, 6 and 7."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 4, 6, 7})
    monkeypatch.setattr(machine, "_read_groups", lambda *names: [])


def test_a_dry_run_starts_nothing_and_says_what_it_would(capsys, tmp_path, four_cores):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "one" / "model.tar").touch()
    (tmp_path / "two" / "meta.json").write_text('{"status": "ended"}')
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "model.tar").touch()
    (tmp_path / "more" / "meta.json").write_text('{"status": "ended", "flags": {"total_steps": 9}}')
    command = f"python ppo.py --savedir {tmp_path} --xpid {{n=one,two,more,new}} --mode"
    for mode, actions in (
        ("train", "resume skip skip start"),
        ("train --total_steps 9", "resume skip skip start"),
        ("train --total_steps 1e1", "resume skip resume start"),
        ("test", "start " * 4),
    ):
        words = [*command.split(), *mode.split()]
        queue_runs.main(["--cores_per_run", "2", "--dry_run", "--", *words])
        *slots, one, two, more, new = capsys.readouterr().out.splitlines()
        assert slots == ["slot 0: cores 3,4", "slot 1: cores 6,7"]
        assert [line.split(":")[0] for line in (one, two, more, new)] == actions.split()
        assert new == f"start: python ppo.py --savedir {tmp_path} --xpid new --mode {mode}"
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "more"}


def test_folders_are_those_of_the_programs():
    assert queue_runs.SAVEDIR == monobeast.parser.get_default("savedir")
    assert queue_runs.CHECKPOINT == checkpoint.NEWEST


def test_the_command_in_the_docs_makes_six_runs(capsys, monkeypatch, four_cores):
    block = re.search(r"^python -m beast.queue_runs(?:.*\\\n)*.*", DOCS.read_text(), re.M)[0]
    words = shlex.split(block.replace("\\\n", " "))[3:]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    gpus = re.search(r"`--gpus_per_run 1` \(`(.+)`\)", DOCS.read_text())[1].split()
    queue_runs.main(["--dry_run", "--gpus_per_run", "1", *gpus, *words])
    assert "slot 1: cores 6,7, GPUs 0" in capsys.readouterr().out
    queue_runs.main(["--dry_run", *words])
    *slots, one, two, three, four, five, six = capsys.readouterr().out.splitlines()
    assert slots == ["slot 0: cores 3,4", "slot 1: cores 6,7"]
    names = []
    for line in (one, two, three, four, five, six):
        _, python, script, *arguments = shlex.split(line)
        assert (python, script) == ("python", "monobeast.py")
        flags = monobeast.parser.parse_args(arguments)
        names.append(f"{flags.env.removesuffix('NoFrameskip-v4')}-{flags.seed}")
        assert flags.xpid == names[-1]
    assert names == ["Pong-1", "Pong-2", "Pong-3", "Breakout-1", "Breakout-2", "Breakout-3"]


# --------------------------------------------------------------------------------------- processes


@pytest.mark.whole
def test_thirty_runs_on_eight_gpus_are_four_at_once(queue, read, tmp_path):
    """No machine for tests has them: which cores a process is confined to stands in a file."""
    fake = tmp_path / "fake.py"
    fake.write_text(f"""
import json, os, pathlib
from beast import queue_runs
queue_runs.count_cores, queue_runs.INTERVAL = (lambda: 40), 0.02
os.sched_getaffinity = lambda pid: set(range(40))
os.sched_setaffinity = lambda pid, cores: pathlib.Path(
    {str(tmp_path)!r}, f"{{os.getpid()}}.cores").write_text(json.dumps(cores))
queue_runs.main()
""")
    body = """
while (folder / "events").read_text().count('"start"') < min(30, int(flags.seed) + 3):
    time.sleep(0.01)  # so that four are always under way
"""
    names = [str(i + 1) for i in range(30)]
    options = "--cores_per_run 10 --gpus_per_run 2"
    # Its name is no flag's, so that the value of --seed can have it.
    with queue(body, options, f"r{{n={','.join(names)}}} --seed {{n}}", script=[fake]) as program:
        output = program.finish()
    assert find_overlaps(read.events()) == (4, [])
    assert {len(event["cores"]) for event in read.events()} == {10}
    assert sorted(read.starts()) == sorted(f"r{name}" for name in names)  # once each
    assert re.findall(r"r(\d+) starts", output) == names
    assert set(read.statuses().values()) == {"ended"}
    assert re.findall(r"(\d+) of 30 done \| \S+ ended", output) == names
    assert "30 ended" in output


@pytest.mark.whole
def test_runs_have_a_slot_each_and_a_failed_one_is_reported(queue, read, tmp_path):
    body = """
if flags.xpid in ("r2", "r3"):
    write("end")
    sys.exit("no such game") if flags.xpid == "r2" else os.kill(os.getpid(), signal.SIGKILL)
"""
    with queue(body, "--cores_per_run 1 --gpus_per_run 4", "r{n=1,2,3,4,5,6}") as program:
        output = program.finish(1)
    names = ["r1", "r2", "r3", "r4", "r5", "r6"]
    assert sorted(read.starts()) == names
    most, shared = find_overlaps(read.events())
    assert most <= min(machine.count_cores(), 2) and shared == []
    assert {len(event["cores"]) for event in read.events()} == {1}
    assert {tuple(event["gpus"]) for event in read.events()} <= {tuple("0123"), tuple("4567")}
    failed = {"r2": "failed (1)", "r3": "failed (SIGKILL)"}
    assert read.statuses() == dict.fromkeys(names, "ended") | failed
    assert list(read.rows()) == names
    assert all("T" in row["start"] <= row["end"] for row in read.rows().values())
    out = tmp_path / "queue" / "r2.out"
    assert out.read_text() == "printed by r2\nno such game\n"
    assert "[ERROR" in output and f"r2 failed (1): see {out}" in output


@pytest.mark.whole
def test_a_command_that_cannot_be_started_fails(tmp_path):
    words = ["--cores_per_run", "1", "--", "no-program", "--xpid", "x", "--savedir", tmp_path]
    with Program("-m", "beast.queue_runs", *words, cwd=ROOT) as program:
        status, output = program.end()
    assert status == 1 and "x failed: [Errno 2]" in output and "'no-program'" in output


@pytest.mark.whole
def test_ended_runs_are_skipped_and_others_are_resumed(queue, read, tmp_path):
    statuses = {"r1": "ended", "r2": "stopped by SIGTERM", "r3": "running", "r4": "ended, but"}
    for xpid, status in statuses.items():
        (tmp_path / xpid).mkdir()
        meta = {"status": status, "start": "2026-01-02T00:00:00+00:00", "end": None}
        (tmp_path / xpid / "meta.json").write_text(json.dumps(meta))
    (tmp_path / "r2" / "model.tar").touch()
    (tmp_path / "r3" / "model.tar").touch()
    (tmp_path / "r4" / "meta.json").write_text("torn")
    (tmp_path / "r6").mkdir()  # that lacks the newest best.tar, but has done its steps
    (tmp_path / "r6" / "model.tar").touch()
    status = "ended, but the checkpoint r6/best.tar of step 9 could not be written"
    (tmp_path / "r6" / "meta.json").write_text(json.dumps({"status": status}))
    (tmp_path / "queue").mkdir()
    (tmp_path / "queue" / "queue.csv").write_text(
        "xpid,slot,start,end,status\nother,0,1,2,ended\nx,0,1,,running\n"
    )
    with queue("", ONE_SLOT, "r{n=1,2,3,4,5,6}") as program:
        output = program.finish()
    for line in (
        "r1 skipped",
        "r6 skipped",
        "r2 resumes in",
        "r3 resumes in",
        "r4 starts in",
        "r5 starts in",
    ):
        assert line in output
    assert read.starts() == ["r2", "r3", "r4", "r5"]
    rows = read.rows()
    assert rows["r1"]["status"] == "skipped" and rows["r1"]["start"].startswith("2026-01-02")
    assert rows["x"]["status"] == "lost" and rows["other"]["status"] == "ended"
    assert list(rows) == "other x r1 r2 r3 r4 r5 r6".split()  # of an earlier queue, too


@pytest.mark.parametrize("content", [b"xpid,slot\na,1\n", b"xpid,status\n\xff\xfe,1\n"])
def test_a_damaged_table_stops_no_queue(queue, read, tmp_path, content):
    (tmp_path / "queue").mkdir()
    (tmp_path / "queue" / "queue.csv").write_bytes(content)
    with queue("", ONE_SLOT, "r{n=1}") as program:
        program.finish()
    assert read.rows()["r1"]["status"] == "ended"


def test_a_run_that_another_learner_has_stopped_is_not_over(queue, read, tmp_path):
    meta = '{"status": "stopped by another learner"}'
    body = f"(folder / 'r1').mkdir()\n(folder / 'r1' / 'meta.json').write_text({meta!r})"
    with queue(body, ONE_SLOT, "r{n=1}") as program:
        status, output = program.end()
    assert status == 1 and read.statuses() == {"r1": "stopped"}, output


WAIT = 'wait_for("go")'


@pytest.mark.whole
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_leaves_no_process(queue, read, tmp_path, number):
    body = """
pid, log = os.getpid(), write
write = lambda what: os.getpid() == pid and log(what)
if os.fork() == 0:  # a run has processes of its own, which may take a moment longer
    time.sleep(100)
"""
    with queue(body + WAIT, ONE_SLOT, "r{n=1,2,3}") as program:
        program.wait_until(lambda: read.starts() == ["r1"] and len(program.members()) == 3)
        program.process.send_signal(number)
        status, output = program.end()
        assert program.members() == []
    assert status == 128 + number, output
    assert [event["what"] for event in read.events()] == ["start", number.name]
    assert read.statuses() == {"r1": "stopped", "r2": "waiting", "r3": "waiting"}
    assert "1 stopped, 2 waiting" in output


@pytest.mark.whole
def test_the_queue_waits_for_what_runs_do_at_a_signal(queue, read, tmp_path):
    body = """
def stop(number, _):
    write("stopping")
    wait_for("saved")
    (folder / flags.xpid).mkdir()
    (folder / flags.xpid / "meta.json").write_text('{"status": "stopped by SIGTERM"}')
    write("end")
    os._exit(0)  # as under torchrun
signal.signal(signal.SIGTERM, stop)
"""
    with queue(body + WAIT, ONE_SLOT, "r{n=1,2}") as program:
        program.wait_until(read.starts)
        program.process.send_signal(signal.SIGTERM)
        program.wait_until(lambda: read.events()[-1]["what"] == "stopping")
        assert program.process.poll() is None
        (tmp_path / "saved").touch()
        program.finish(143)
    assert read.statuses() == {"r1": "stopped", "r2": "waiting"}
    assert read.starts() == ["r1"]


@pytest.mark.whole
def test_a_queue_that_is_killed_takes_its_runs_along(queue, read):
    with queue(WAIT, ONE_SLOT, "r1") as program:
        program.wait_until(read.starts)
        program.process.kill()
        program.wait_for_members()
    assert [event["what"] for event in read.events()] == ["start", "SIGTERM"]


@pytest.mark.whole
def test_a_slot_is_free_when_all_processes_of_its_run_have_ended(queue, read, tmp_path):
    body = """
if flags.xpid == "r1":
    if os.fork() != 0: os._exit(0)
    wait_for("go")
"""
    with queue(body, ONE_SLOT, "r{n=1,2}") as program:
        program.wait_until(lambda: read.starts() == ["r1"] and len(program.members()) == 2)
        time.sleep(5 * queue_runs.INTERVAL)
        assert read.starts() == ["r1"]  # still
        (tmp_path / "go").touch()
        program.finish()
    events = [f"{event['what']} {event['xpid']}" for event in read.events()]
    assert events == ["start r1", "end r1", "start r2", "end r2"]


@pytest.mark.whole
def test_processes_that_outlive_their_run_for_long_are_killed(queue, read, tmp_path):
    fake = tmp_path / "fake.py"
    fake.write_text("from beast import queue_runs\nqueue_runs.GRACE = 0.2\nqueue_runs.main()")
    body = "if os.fork() == 0: signal.pause()"
    with queue(body, ONE_SLOT, "r1", script=[fake]) as program:
        program.finish()
    assert read.statuses() == {"r1": "ended"}


@pytest.mark.whole
def test_two_queues_do_not_share_a_folder(queue, read, tmp_path):
    with queue(WAIT, "--cores_per_run 1", "r1") as program:
        program.wait_until(read.starts)
        with queue(WAIT, "--cores_per_run 1", "r2") as second:
            status, output = second.end()
        assert status == 2 and "another queue uses it" in output
        (tmp_path / "go").touch()
        assert program.end()[0] == 0
    assert read.starts() == ["r1"]
    assert {tuple(event["gpus"]) for event in read.events()} == {tuple("01234567")}  # untouched
