# SPDX-License-Identifier: Apache-2.0
"""DynamicBatcher: callers wait for their own columns of what somebody answers for many at once.

What it shares with BatchingQueue: test_batching_queue.py.
"""

import gc

import pytest
import torch
from deadline import Thread, wait_until
from test_batching_queue import assert_same, columns, numbers

from libtorchbeast import Batch, DynamicBatcher

# The main thread may wait where no signal reaches it.
pytestmark = pytest.mark.timeout(120, method="thread")


def gather(batcher, *calls):
    """Start a thread for each call, one after the other; return the threads."""
    threads = []
    for call in calls:
        before = batcher.size()
        threads.append(Thread(batcher.compute, call))
        wait_until(lambda before=before: batcher.size() > before)
    return threads


def test_arguments_have_torchbeasts_defaults_and_may_be_given_by_position_or_by_name():
    batcher = DynamicBatcher()
    caller = Thread(batcher.compute, torch.zeros(3, 1024))  # batch_dim=1, maximum_batch_size=1024
    batch = next(batcher)  # minimum_batch_size=1
    assert batch.get_inputs().shape == (3, 1024)
    with pytest.raises(ValueError):
        batch.set_outputs(torch.zeros(3))  # check_outputs=True
    batch.set_outputs(torch.ones(2, 1024))
    assert caller.result().shape == (2, 1024)
    names = "batch_dim", "minimum_batch_size", "maximum_batch_size", "timeout_ms", "check_outputs"
    values = (0, 2, 3, 10, True)
    named = DynamicBatcher(**dict(zip(names, values, strict=True)))
    for batcher in (DynamicBatcher(*values), named):
        threads = gather(batcher, columns(0, 1), columns(1, 2), columns(3, 1))
        for _ in range(2):
            batch = next(batcher)
            batch.set_outputs(-batch.get_inputs())
        assert [numbers(thread.result()) for thread in threads] == [[0], [-1, -2], [-3]]


def test_compute_returns_the_callers_own_part_of_outputs_that_are_set_once():
    batcher = DynamicBatcher(batch_dim=0)
    threads = gather(batcher, columns(0, 2), columns(2, 1))
    batch = next(batcher)
    assert isinstance(batch, Batch)
    for _ in range(2):
        assert numbers(batch.get_inputs()) == [0, 1, 2]
    outputs = columns(0, 3, 2), {"b": columns(0, 3).float()}
    assert batch.set_outputs(outputs) is None
    with pytest.raises(RuntimeError):
        batch.set_outputs(outputs)
    for thread, part in zip(threads, ((0, 2), (2, 1)), strict=True):
        assert_same(thread.result(), (columns(*part, 2), {"b": columns(*part).float()}))


def test_outputs_may_be_made_in_inference_mode():
    batcher = DynamicBatcher(batch_dim=0)
    (caller,) = gather(batcher, columns(0, 2))
    with torch.inference_mode():
        batch = next(batcher)
        batch.set_outputs(batch.get_inputs() + 1)
    result = caller.result()
    result += 1
    assert numbers(result) == [2, 3]


def test_what_came_out_outlives_batch_and_batcher():
    batcher = DynamicBatcher(batch_dim=0)
    (caller,) = gather(batcher, columns(3, 2, 100))
    batch = next(batcher)
    inputs = batch.get_inputs()
    batch.set_outputs(inputs)
    result = caller.result()
    batcher.close()
    del batch, batcher, caller
    gc.collect()
    assert torch.all(inputs + 1 == columns(4, 2, 100)) and torch.all(result == inputs)
