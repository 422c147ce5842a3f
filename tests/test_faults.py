# SPDX-License-Identifier: Apache-2.0
"""A short fault campaign against each program, by the script that runs the long ones; its parts."""

import sys

import pytest
import torch
from program import TESTS, Program

BENCHMARKS = TESTS.parent / "benchmarks"
# The long campaigns look at times and rates; a machine that is busy with other things has none.
SHORT = "--minutes 0.5 --faults 10 --seed 1 --patience 20"


@pytest.fixture
def benchmarks(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("FAULTS_FOLDER", str(tmp_path))
    yield tmp_path
    for name in [n for n in sys.modules if n == "memory" or n.split(".")[0] == "faulty"]:
        del sys.modules[name]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", ["polybeast", "monobeast"])
def test_training_survives_faults_names_them_and_leaves_nothing_behind(program, tmp_path):
    words = (SHORT, "--program", program, "--folder", tmp_path)
    with Program(BENCHMARKS / "faults.py", *words) as campaign:
        status, output = campaign.end(seconds=500)
    assert status == 0 and "- Faults: 10," in output, output


def samples(memory_at, pids=(1, 2), minutes=45):
    """Return samples every 5 seconds of processes of a kind, which live one after the other."""
    rows = []
    for seconds in range(0, 60 * minutes, 5):
        pid = pids[seconds * len(pids) // (60 * minutes)]
        figures = {
            "own_mb": memory_at(seconds),
            "resident_mb": 300,
            "descriptors": 9 + seconds % 3,
            "threads": 7,
        }
        rows.append({"seconds": seconds, "kind": "server", "pid": pid, **figures})
    return rows


def test_a_process_that_grows_is_found_and_one_that_jumps_is_not(benchmarks, capsys):
    import memory

    assert memory.judge(samples(lambda seconds: 100 + 20 * (seconds > 2400))) == []
    assert memory.judge(samples(lambda seconds: 100 + seconds % 7)) == []
    (failure,) = memory.judge(samples(lambda seconds: 100 + seconds / 60 + seconds % 7))
    assert failure.startswith("server: own_mb grows by 6")  # MB an hour
    assert memory.judge(samples(lambda seconds: 100 + seconds / 60, pids=range(100))) == []
    assert "| server | 100 |" in capsys.readouterr().out


def good_batch():
    frame = torch.zeros(21, 8, 4, 84, 84, dtype=torch.uint8)
    return {"frame": frame, "reward": torch.zeros(21, 8), "episode_return": torch.zeros(21, 8)}


@pytest.mark.parametrize(
    "broken",
    [
        {"reward": torch.full((21, 8), float("nan"))},
        {"reward": torch.full((21, 8), 1000.0)},
        {"episode_return": torch.full((21, 8), -22.0)},
        {"frame": torch.zeros(21, 8, 4, 84, 84)},
        {"frame": torch.zeros(21, 8, 4, 84, 83, dtype=torch.uint8)},
    ],
)
def test_the_learner_of_a_campaign_sees_a_broken_row(benchmarks, monkeypatch, broken):
    import polybeast_env

    monkeypatch.setattr(polybeast_env, "create_environments", None)  # which the import replaces
    from faulty.environment import check_rows

    check_rows(good_batch())
    with pytest.raises(AssertionError, match="a broken row"):
        check_rows(good_batch() | broken)


def test_an_environment_fails_as_it_is_told_to(benchmarks, monkeypatch):
    import polybeast_env

    monkeypatch.setattr(polybeast_env, "create_environments", None)
    from faulty.environment import create_environments

    import atari_wrappers
    from environment import EnvError

    flags = polybeast_env.parser.parse_args([])
    for number, (kind, message) in enumerate(
        [
            ("raise", "step 1: step.* fault 0"),
            ("nan", "step 1: the reward is nan"),
            ("shape", r"uint8\[4, 84, 83\]"),
            ("dtype", r"float32\[4, 84, 84\]"),
        ]
    ):
        # Not polybeast_env.create_env, which other tests replace in this process.
        environments = create_environments(
            lambda flags: atari_wrappers.create_atari(flags, None),
            flags,
            2,
            1,
            "127.0.0.1:9 for somebody",
        )
        environments.initial()
        actions = torch.zeros(2, dtype=torch.int64).numpy()
        (benchmarks / "127.0.0.1:9.1").write_text(f"{number} {kind}")
        with pytest.raises(EnvError, match=f"127.0.0.1:9: environment 1 .*{message}"):
            environments.step(actions)
        assert (benchmarks / f"{number}.taken").exists()
        assert environments.step(actions)["reward"][1] in (0, 1000)  # nobody should have gone on
        environments.close()
