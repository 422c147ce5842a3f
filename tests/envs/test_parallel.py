# SPDX-License-Identifier: Apache-2.0
"""Environments in several processes: the same rows as in one, and what happens when one is lost."""

import contextlib
import functools
import itertools
import multiprocessing
import os
import pathlib
import signal
import subprocess
import time

import numpy as np
import pytest
from catch_env import Catch, Counter, Mixed
from deadline import Thread
from program import HELPERS, ROOT, Program, shared_memory, wait_until

from beast.envs import parallel
from beast.envs.environments import Environments
from beast.envs.parallel import EnvironmentGroups, ParallelEnvironments
from beast.errors import EnvError
from beast.nest import map_nest
from beast.processes import supervisor
from libtorchbeast.rows import draw_seeds

SEEDS = draw_seeds([3, 1], 5)


class Gated(Catch):
    """Catch whose step waits until a file is there."""

    def __init__(self, path):
        super().__init__()
        self.path = pathlib.Path(path)

    def step(self, action):
        (self.path.parent / f"stepping-{os.getpid()}").touch()
        while not self.path.exists():
            time.sleep(0.005)
        return super().step(action)


class Raising(Catch):
    def step(self, action):
        raise ValueError("no luck")

    def close(self):
        if multiprocessing.parent_process() is not None:  # not of the sample of the main process
            raise BrokenPipeError  # as of a simulator that has crashed


class KilledOnce(Counter):
    """Counter whose process is killed in the first reset of all."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def reset(self, **kwargs):
        if multiprocessing.parent_process() is not None:
            with contextlib.suppress(FileExistsError):
                self.path.touch(exist_ok=False)  # in one process alone
                os.kill(os.getpid(), signal.SIGKILL)
        return super().reset(**kwargs)


class Global(Catch):
    """Catch that draws its rewards from the generator of the process."""

    def step(self, action):
        observation, _, *ends = super().step(action)
        return observation, np.random.random(), *ends


class Nursery(Catch):
    """Catch with two processes of its own, of which it ends one, and leaves the other."""

    def __init__(self, folder=None):
        super().__init__()
        self.child = multiprocessing.get_context("fork").Process(target=signal.pause)
        self.child.start()
        if multiprocessing.parent_process() is not None:  # not for the sample of the main process
            process = subprocess.Popen(["sleep", "3600"])
            if folder:
                (folder / f"{process.pid}-{os.getpid()}").touch()

    def close(self):
        self.child.terminate()
        self.child.join()


def open_environments(create_env, num_processes, seeds=SEEDS, **kwargs):
    return ParallelEnvironments(create_env, seeds, num_processes, "environments", **kwargs)


@pytest.fixture
def environments(request):
    """ParallelEnvironments, by the arguments of open_environments; closed at the end."""
    opened = []

    def open_one(*args, **kwargs):
        opened.append(open_environments(*args, **kwargs))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()
    wait_until(
        lambda: not any(pathlib.Path(f"/proc/{p}").exists() for o in opened for p in pids_of(o))
    )


def pids_of(environments):
    return environments.supervisor.pids()


def copy(row):
    return map_nest(np.array, row)


def play(environments, num_steps, seed=0):
    """Return copies of the rows of random actions."""
    random = np.random.default_rng(seed)
    rows = [copy(environments.initial())]
    for _ in range(num_steps):
        rows.append(copy(environments.step(random.integers(3, size=environments.num_envs))))
    return rows


def assert_equal(rows, others):
    for row, other in zip(rows, others, strict=True):
        map_nest(np.testing.assert_array_equal, row, other)


@pytest.mark.whole
@pytest.mark.parametrize("num_processes", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("create_env", [Mixed, functools.partial(Counter, truncates=True)])
def test_rows_are_those_of_one_process(environments, create_env, num_processes):
    one, several = Environments(create_env, 5, 0), environments(create_env, num_processes)
    one.seeds = SEEDS
    rows = play(one, 100)
    assert_equal(play(several, 100), rows)
    assert sum(row["truncated"].sum() for row in rows) > 10
    assert_equal(play(several, 20), play(one, 20))  # begun anew


def test_each_process_draws_other_numbers_which_the_seeds_give(environments):
    first, again, others = (
        [row["reward"] for row in play(environments(Global, 5, [seed + i for i in SEEDS]), 3)]
        for seed in (0, 0, 1)
    )
    assert_equal(first, again)
    assert len(np.unique([first[1:], others[1:]])) == 2 * 3 * len(SEEDS)


@pytest.mark.whole
@pytest.mark.parametrize("num_processes", [0, 2])
def test_two_groups_in_turn_are_one_group_of_the_same_seeds(environments, num_processes):
    seeds = draw_seeds(7, 4)
    whole = environments(Mixed, num_processes, seeds)
    groups = [environments(Mixed, num_processes, seeds[i : i + 2]) for i in (0, 2)]
    random = np.random.default_rng(0)
    expected, parts = copy(whole.initial()), [copy(group.initial()) for group in groups]
    for _ in range(200):
        assert_equal([expected], [map_nest(lambda a, b: np.concatenate([a, b]), *parts)])
        actions = random.integers(3, size=4)
        for i, group in enumerate(groups):
            group.send(actions[2 * i : 2 * i + 2])
        expected = copy(whole.step(actions))
        parts = [copy(group.receive()) for group in groups]


def test_send_returns_while_environments_step_and_leaves_the_row(environments, tmp_path):
    gate = tmp_path / "gate"
    gated = environments(functools.partial(Gated, gate), 2)
    before = copy(gated.initial())
    gated.send(np.ones(5, np.int64))
    wait_until(lambda: len(list(tmp_path.glob("stepping-*"))) == 2)
    assert_equal([gated.row], [before])
    gate.touch()
    assert gated.receive()["last_action"].tolist() == [1] * 5


def test_an_environment_that_raises_gives_its_traceback(environments):
    raising = environments(Raising, 2)
    raising.initial()
    with pytest.raises(EnvError, match=r"(?s)environments, process \d failed.*in step.*no luck"):
        raising.step(np.zeros(5, np.int64))
    with pytest.raises(EnvError, match=r"(?s)environments, process \d has ended: .*no luck"):
        raising.step(np.zeros(5, np.int64))


def test_the_first_row_is_one_though_a_process_was_lost(environments, tmp_path):
    several = environments(functools.partial(KilledOnce, tmp_path / "killed"), 2)
    row = several.initial()
    assert row["done"].all() and not row["truncated"].any()
    assert several.supervisor.num_deaths() == 1


@pytest.mark.whole
@pytest.mark.parametrize(
    ("how", "num_steps"),
    [("SIGKILL", 4), ("SIGSTOP", 4), ("SIGKILL", 7)],  # after 7 episodes end, with a return of 28
)
def test_a_lost_process_is_replaced_and_its_episodes_are_cut(
    environments, caplog, monkeypatch, how, num_steps
):
    several = environments(Counter, 2)
    several.initial()
    actions = np.ones(5, np.int64)
    for _ in range(num_steps):
        before = copy(several.step(actions))
    has_ended = num_steps == 7
    assert before["done"].tolist() == [has_ended] * 5 and before["episode_return"][0] > 0
    pid = pids_of(several)[0]
    os.kill(pid, getattr(signal, how))
    if how == "SIGSTOP":  # in this step alone: under load a new process takes seconds to start
        monkeypatch.setattr(several.supervisor, "patience", 2)
    cut = copy(several.step(2 * actions))
    monkeypatch.undo()
    first = slice(0, 3)
    assert several.supervisor.num_deaths() == 1
    np.testing.assert_array_equal(cut["frame"][first], before["frame"][first])
    assert cut["truncated"].tolist() == [True] * 3 + [False] * 2
    assert not cut["done"].any() and cut["reward"][first].tolist() == [0] * 3
    returns = [0 if has_ended else before["episode_return"][0]] * 3  # of no episode twice
    assert cut["episode_return"][first].tolist() == cut["game_return"][first].tolist() == returns
    after = copy(several.step(actions))
    assert after["done"].tolist() == [True] * 3 + [False] * 2
    assert not after["game_done"].any() and not after["truncated"].any()
    assert after["episode_return"][first].tolist() == returns
    count = num_steps % 7 + 2
    assert after["frame"][:, 1].tolist() == [0, 0, 0, count, count]  # steps in the episode
    following = several.step(actions)
    assert following["episode_step"].tolist() == [1, 1, 1, count + 1, count + 1]
    cause = "killed by SIGKILL" if how == "SIGKILL" else "silent for 2 s"
    assert cause in caplog.text and pid not in pids_of(several)


def test_deaths_in_a_row_are_an_error(environments, monkeypatch):
    several = environments(Counter, 2)
    several.initial()
    with pytest.raises(EnvError, match="process 1 died 5 times with less than 200 steps"):
        for _ in range(6):
            os.kill(pids_of(several)[1], signal.SIGKILL)
            several.step(np.zeros(5, np.int64))
            several.step(np.zeros(5, np.int64))
    monkeypatch.setattr(parallel, "MIN_STEPS", 1)
    patient = environments(Counter, 1)
    patient.initial()
    for _ in range(6):
        os.kill(pids_of(patient)[0], signal.SIGKILL)
        patient.step(np.zeros(5, np.int64))
        patient.step(np.zeros(5, np.int64))


def test_a_process_that_cannot_be_replaced_is_an_error(environments, monkeypatch):
    several = environments(Counter, 2)
    several.initial()

    def fail(self):
        raise EOFError  # as where the fork server has died of it

    os.kill(pids_of(several)[1], signal.SIGKILL)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", fail)
    monkeypatch.setattr(supervisor, "RETRY_PAUSE", 0.1)
    several.step(np.zeros(5, np.int64))
    with pytest.raises(EnvError, match=r"died 5 times .*process 1 cannot be started \(EOFError"):
        several.step(np.zeros(5, np.int64))


def test_environments_may_start_processes_which_end_with_them(environments, tmp_path):
    several = environments(functools.partial(Nursery, tmp_path), 2, SEEDS[:2])
    several.initial()
    first, second = several.supervisor.children

    def child_lives(pid):
        (path,) = tmp_path.glob(f"*-{pid}")
        try:
            stat = pathlib.Path("/proc", path.name.split("-")[0], "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat.split()[2] not in "ZX"

    lost, kept = first.process.pid, second.process.pid
    assert child_lives(lost) and child_lives(kept)
    os.kill(lost, signal.SIGKILL)
    several.step(np.zeros(2, np.int64))
    wait_until(lambda: not child_lives(lost))
    several.step(np.zeros(2, np.int64))
    assert child_lives(first.process.pid) and child_lives(kept)
    several.close()
    wait_until(lambda: not child_lives(first.process.pid) and not child_lives(kept))
    assert second.process.exitcode == 0  # it has ended by itself


PARENT = """
import os, signal, sys
from test_parallel import Nursery, open_environments
if __name__ == "__main__":
    several = open_environments(Nursery, 1)
    several.initial()
    os.killpg(several.supervisor.pids()[0], signal.SIGSTOP)
    if sys.argv[1] == "raises":
        raise SystemError("of ours")
    if sys.argv[1] == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.whole
@pytest.mark.parametrize("how", ["raises", "exits", "is killed"])
def test_processes_that_hang_end_with_their_parent(tmp_path, how):
    (tmp_path / "parent.py").write_text(PARENT)
    path = os.pathsep.join(map(str, [ROOT, pathlib.Path(__file__).parent, HELPERS]))
    with Program(tmp_path / "parent.py", pathlib.Path(how), PYTHONPATH=path) as program:
        program.finish({"raises": 1, "exits": 0, "is killed": -signal.SIGKILL}[how])


@pytest.mark.whole
@pytest.mark.parametrize("num_processes", [0, 2])
def test_wake_ends_a_wait_and_every_later_one(environments, tmp_path, num_processes):
    gated = environments(functools.partial(Gated, tmp_path / "gate"), num_processes)
    gated.initial()
    if num_processes:
        stepping = Thread(gated.step, np.zeros(5, np.int64))
        wait_until(lambda: len(list(tmp_path.glob("stepping-*"))) == 2)
        gated.wake()
        assert stepping.result() is None
    gated.wake()
    assert gated.step(np.zeros(5, np.int64)) is None and gated.initial() is None


def test_all_groups_are_watched(tmp_path):
    create_env, gate = functools.partial(Gated, tmp_path / "gate"), tmp_path / "gate"
    environments = EnvironmentGroups(create_env, SEEDS[:4], num_groups=2, num_processes=1)
    with contextlib.closing(environments):
        first, second = environments.groups
        for group in environments.groups:
            group.initial()
            group.send(np.ones(2, np.int64))
        wait_until(lambda: len(list(tmp_path.glob("stepping-*"))) == 2)
        names = [name for name, *_ in environments.silences()]
        assert names == ["group 0, process 0", "group 1, process 0"]
        assert environments.pids() == pids_of(first) + pids_of(second)
        os.kill(pids_of(second)[0], signal.SIGKILL)
        second.receive()
        assert environments.metrics() == {"process_restarts": 1}
        gate.touch()
        first.receive()
        environments.wake()
        assert first.receive() is None and second.receive() is None


def test_nothing_is_left_of_groups_when_one_cannot_be_made(monkeypatch):
    closed, close = [], ParallelEnvironments.close
    monkeypatch.setattr(ParallelEnvironments, "close", lambda self: closed.append(close(self)))
    made = itertools.count()
    with pytest.raises(EnvError, match="group 1: cannot create environment 0: ZeroDivisionError"):
        EnvironmentGroups(lambda: Catch() if next(made) < 2 else 1 / 0, SEEDS[:4], 2, 0)
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [(TypeError("cannot be pickled"), "cannot be pickled"),
     (BlockingIOError(), r"environments, process 1 cannot be started \(Blocking.*ulimit -u")],
)  # fmt: skip
def test_no_process_is_left_when_one_does_not_start(monkeypatch, error, message):
    started, start = [], multiprocessing.process.BaseProcess.start

    def start_one(process):
        if started:
            raise error
        start(process)
        started.append(process.pid)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start_one)
    with pytest.raises((TypeError, EnvError), match=message):
        open_environments(Mixed, 2)
    assert len(started) == 1 and not pathlib.Path(f"/proc/{started[0]}").exists()


def test_nothing_is_left_in_shared_memory():
    before = shared_memory()
    several = open_environments(Mixed, 2)
    several.initial()
    # Its files have no names. Those of tests beside this one have, for a moment.
    wait_until(lambda: shared_memory() <= before)
    pids = pids_of(several)
    several.close()
    several.close()
    assert not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids)


def test_an_environment_that_cannot_be_made_is_an_error_at_once():
    with pytest.raises(EnvError, match="cannot create environment 0: ZeroDivisionError"):
        open_environments(lambda: 1 / 0, 2)
