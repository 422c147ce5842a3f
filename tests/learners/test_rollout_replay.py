# SPDX-License-Identifier: Apache-2.0
"""Old rollouts are mixed whole into batches, behind the new ones."""

import types

import pytest
import torch
from program import load

from beast.errors import FlagError
from beast.learners.learner import Batch
from beast.learners.rollout_replay import RolloutReplay
from beast.nest import map_nest
from beast.processes import machine
from beast.runs.checkpoint_writer import describe_bad_batch, save_bad_batch

T, B = 3, 4


def make_flags(ratio=1.5, rollouts=10):
    return types.SimpleNamespace(
        replay_ratio=ratio, replay_rollouts=rollouts, batch_size=B, seed=1, rank=0,
        num_learners=2, elastic=None,
    )  # fmt: skip


def make_batch(number):
    """Return a Batch in which everything of rollout i of batch `number` is 10 * number + i."""
    values = 10 * number + torch.arange(float(B))
    rows = {"frame": values.expand(T + 1, B).clone(), "more": (values.expand(T + 1, B).clone(),)}
    rows["done"] = values.expand(T + 1, B) > 5
    return Batch(rows, (values.expand(1, B).clone(),), rows, [number] * B, {"actors": [number]})


def test_old_rollouts_stand_whole_behind_the_new_ones():
    replay, seen = RolloutReplay(make_flags(), 1), set()
    for number in range(40):
        batch = make_batch(number)
        mixed = replay.mix(batch)
        assert mixed.cpu_rows is batch.cpu_rows and mixed.policy_versions == [number] * B
        if number < 2:  # fewer than 6 are stored
            assert mixed is batch
        else:
            assert mixed.rows["frame"].shape == (T + 1, B + 6)
            assert mixed.sources == {"actors": [number], "old rollouts": 6}
            assert torch.equal(mixed.rows["frame"][:, :B], batch.rows["frame"])
            old = mixed.rows["frame"][0, B:]
            assert torch.equal(mixed.rows["more"][0], mixed.rows["frame"])
            assert torch.equal(mixed.agent_state[0], mixed.rows["frame"][:1])
            assert torch.equal(mixed.rows["done"], mixed.rows["frame"] > 5)
            assert len(set(old.tolist())) == 6 and old.max() < 10 * number
            assert old.min() >= 10 * (number - 3)  # of the newest ten
            seen |= {10 * number - value for value in old.tolist()}
        replay.store(mixed, {"total_loss": 1.0})
        map_nest(lambda x: x.zero_(), (batch.rows, batch.agent_state))  # as the next one does
    # Rollouts of the batch before, of the one before that, and, up to ten, the last two of a third.
    assert seen == {10, 9, 8, 7, 20, 19, 18, 17, 28, 27}


@pytest.mark.parametrize("kind", ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "float64"])
def test_frames_of_all_types_are_stored(kind):
    dtype = getattr(torch, kind)
    replay = RolloutReplay(make_flags(1.0), 1)
    for number in range(3):
        batch = make_batch(number)
        batch.rows["frame"] = batch.rows["frame"].to(dtype)
        mixed = replay.mix(batch)
        replay.store(mixed, {})
    frame, more = mixed.rows["frame"], mixed.rows["more"][0]
    assert frame.dtype == dtype and frame.shape[1] == 2 * B
    assert (frame.numpy() == more.to(dtype).numpy()).all()


def test_a_ratio_of_zero_changes_nothing():
    replay, batch = RolloutReplay(make_flags(0.0), 1), make_batch(0)
    for _ in range(5):
        assert replay.mix(batch) is batch
        replay.store(batch, {})


def test_an_update_that_is_not_finite_brings_nothing_back():
    replay, batch = RolloutReplay(make_flags(), 1), make_batch(10)
    for number in range(6):
        replay.store(make_batch(number), {"total_loss": float("nan") if number == 3 else 1.0})
        if number == 3:
            assert replay.mix(batch) is batch
    old = replay.mix(batch).rows["frame"][0, B:]
    assert set((old // 10).tolist()) == {4.0, 5.0}


def test_steps_that_count_old_rollouts_end_the_run():
    replay = RolloutReplay(make_flags(), 1)
    replay.store(make_batch(0), {"steps": 2.0 * T * B})  # of two learners
    with pytest.raises(ValueError, match="counts old rollouts"):
        replay.store(make_batch(1), {"steps": 2.0 * T * B + 1})
    flags = make_flags()
    flags.elastic = "host:1"
    RolloutReplay(flags, 1).store(make_batch(2), {"steps": 9.0 * T * B})  # of any number


def test_a_replay_that_is_too_small_or_too_large_is_refused(monkeypatch):
    with pytest.raises(FlagError, match=r"1.5 needs 6 old .* of 4 new .* is 5: give at least"):
        RolloutReplay(make_flags(rollouts=5), 1)
    with pytest.raises(FlagError, match="0.1 is less than one old .* of 4 new ones: .* least 0.25"):
        RolloutReplay(make_flags(0.1), 1)
    monkeypatch.setattr(machine, "count_memory", lambda: 2**30)
    with pytest.raises(FlagError, match="takes 2.0 GiB, but 1.0 GiB of memory are free: give at"):
        RolloutReplay(make_flags(rollouts=2**21), 2**10)
    RolloutReplay(make_flags(0, rollouts=2**21), 2**10)


def test_a_bad_batch_has_the_old_rollouts(tmp_path):
    replay, batch = RolloutReplay(make_flags(1.0), 1), make_batch(0)
    batch.rows["frame"][:] = 1e30
    replay.store(batch, {})
    mixed = replay.mix(make_batch(1))
    assert describe_bad_batch(mixed) == "Beyond 1e+06 or not finite in it: frame"
    save_bad_batch(tmp_path, "", mixed, {})
    saved = load(tmp_path / "bad_batch.tar")
    assert torch.equal(saved["batch"]["frame"], mixed.rows["frame"])
    assert saved["agent_state"][0].shape[1] == saved["batch"]["done"].shape[1] == 2 * B
