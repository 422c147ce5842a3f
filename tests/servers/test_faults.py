# SPDX-License-Identifier: Apache-2.0
"""Short campaigns of faults and of kills, and how the former notices growth and broken rows."""

import pytest
import torch
from program import ROOT, Program

# Long campaigns check times and rates; a machine that is busy with other tests has none. With this
# seed nearly each fault is of another kind, and most of them are noticed even if they are short.
SHORT = "--minutes 0.15 --faults 6 --seed 604 --patience 20"


@pytest.mark.whole
@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", ["polybeast", "monobeast"])
def test_training_survives_faults_and_leaves_nothing_behind(program, tmp_path):
    arguments = (SHORT, "--program", program, "--folder", tmp_path)
    with Program(ROOT / "campaigns" / "faults.py", *arguments) as campaign:
        status, output = campaign.end(seconds=500)
    assert status == 0 and "- Faults: 6," in output, output


@pytest.mark.whole
@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", ["monobeast", pytest.param("gala", marks=pytest.mark.long)])
def test_kills_at_random_moments_lose_nothing_that_was_saved(program):
    # It sees for itself that everything is as it should be.
    arguments = "--kills 2 --slack 60 --program"
    with Program(ROOT / "campaigns" / "preemption.py", arguments, program) as campaign:
        output = campaign.finish(seconds=500)
    assert f"| {program} | 2 | 0 + 1 + 1 |" in output, output


def samples(memory_at, pids=(1, 2)):
    """Return samples of 45 minutes of processes of a kind, which live one after the other."""
    same = {"kind": "server", "resident_mb": 300, "threads": 7}
    return [
        same | {"seconds": s, "own_mb": memory_at(s), "descriptors": 9 + s % 3,
                "pid": pids[s * len(pids) // 2700]}
        for s in range(0, 2700, 5)
    ]  # fmt: skip


def test_a_process_that_grows_is_found_and_one_that_jumps_is_not(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "campaigns")
    import memory

    assert memory.judge(samples(lambda seconds: 100 + 20 * (seconds > 2400))) == []
    assert memory.judge(samples(lambda seconds: 100 + seconds % 7)) == []
    (failure,) = memory.judge(samples(lambda seconds: 100 + seconds / 60 + seconds % 7))
    assert failure.startswith("server: own_mb grows by 6")  # MB an hour
    assert memory.judge(samples(lambda seconds: 100 + seconds / 60, pids=range(100))) == []
    assert "| server | 100 |" in capsys.readouterr().out


def test_the_learner_of_a_campaign_refuses_broken_rows(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "campaigns")
    from faulty.rows import check_rows

    zeros, frames = torch.zeros(3, 2), torch.zeros(3, 2, 4, 84, 84, dtype=torch.uint8)
    good = {"frame": frames, "reward": zeros, "episode_return": zeros}
    check_rows(good)
    broken = [("reward", zeros + float("nan")), ("reward", zeros + 1000)]
    broken += [
        ("episode_return", zeros - 22),
        ("frame", frames.float()),
        ("frame", frames[..., 1:]),
    ]
    for key, value in broken:
        with pytest.raises(AssertionError, match="a broken row"):
            check_rows(good | {key: value})
