# SPDX-License-Identifier: Apache-2.0
"""DynamicBatcher: callers wait for their own columns of what somebody answers for many at once."""

import gc
import inspect
import threading
import time

import numpy as np
import pytest
import torch
from deadline import DEADLINE, Thread, run_with_deadline, wait_until
from test_batching_queue import DTYPES, assert_same, columns, numbers

from libtorchbeast import AsyncError, Batch, ClosedBatchingQueue, DynamicBatcher

# The main thread may wait where no signal reaches it.
pytestmark = pytest.mark.timeout(120, method="thread")


def serve(batcher, function, sizes=None):
    """Answer each batch with `function(inputs)`, until closed."""
    for batch in batcher:
        inputs = batch.get_inputs()
        if sizes is not None:
            sizes.append(len(inputs))
        batch.set_outputs(function(inputs))


@pytest.fixture
def batcher():
    """A batcher that takes its time to gather calls: `gather` has them answered together."""
    batcher = DynamicBatcher(batch_dim=0, minimum_batch_size=1)
    yield batcher
    if not batcher.is_closed():
        batcher.close()


def gather(batcher, *calls):
    """Start a thread for each call, one after the other; return the threads."""
    threads = []
    for call in calls:
        before = batcher.size()
        threads.append(Thread(batcher.compute, call))
        wait_until(lambda before=before: batcher.size() > before)
    return threads


# -------------------------------------------------------------------------------- construction


def test_defaults_are_those_of_the_contract():
    batcher = DynamicBatcher()
    caller = Thread(batcher.compute, torch.zeros(3, 1024))  # batch_dim=1, maximum_batch_size=1024
    batch = next(batcher)  # minimum_batch_size=1
    assert batch.get_inputs().shape == (3, 1024)
    with pytest.raises(ValueError):
        batch.set_outputs(torch.zeros(3))  # check_outputs=True
    batch.set_outputs(torch.ones(2, 1024))
    assert caller.result().shape == (2, 1024)
    with pytest.raises(ValueError):
        batcher.compute(torch.zeros(3, 1025))


def test_arguments_may_be_given_by_position_or_by_name():
    for batcher in (
        DynamicBatcher(0, 2, 3, 10, False),
        DynamicBatcher(
            batch_dim=0,
            minimum_batch_size=2,
            maximum_batch_size=3,
            timeout_ms=10,
            check_outputs=True,
        ),
    ):
        threads = gather(batcher, columns(0, 1), columns(1, 2), columns(3, 1))
        serving = Thread(serve, batcher, lambda x: -x)
        assert [numbers(thread.result()) for thread in threads] == [[0], [-1, -2], [-3]]
        batcher.close()
        serving.result()


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_dim": -1},
        {"minimum_batch_size": 0},
        {"minimum_batch_size": -1},
        {"maximum_batch_size": 0},
        {"minimum_batch_size": 5, "maximum_batch_size": 4},
        {"timeout_ms": -1},
    ],
    ids=repr,
)
def test_invalid_arguments_raise_value_error(arguments):
    with pytest.raises(ValueError):
        DynamicBatcher(**arguments)


def test_a_timeout_of_none_waits_for_the_minimum():
    batcher = DynamicBatcher(batch_dim=0, minimum_batch_size=2, timeout_ms=None)
    first = Thread(batcher.compute, columns(0, 1))
    serving = Thread(serve, batcher, lambda x: x + 10)
    first.assert_blocked(0.3)
    assert numbers(batcher.compute(columns(1, 1))) == [11]
    assert numbers(first.result()) == [10]
    batcher.close()
    serving.result()


# ----------------------------------------------------------------------------- errors of compute


@pytest.mark.parametrize("n", [(), [], {}, ((), []), {"a": ()}], ids=repr)
def test_an_empty_nest_raises_value_error(batcher, n):
    with pytest.raises(ValueError):
        batcher.compute(n)
    assert batcher.size() == 0


@pytest.mark.parametrize(
    ("batch_dim", "n"),
    [
        (0, torch.tensor(1.0)),
        (1, torch.zeros(3)),
        (1, (torch.zeros(1, 3), np.zeros(3))),
        (2, {"a": torch.zeros(3, 4)}),
    ],
)
def test_too_few_dimensions_raise_value_error(batch_dim, n):
    batcher = DynamicBatcher(batch_dim=batch_dim)
    with pytest.raises(ValueError):
        batcher.compute(n)
    assert batcher.size() == 0


def test_leaves_with_different_numbers_of_columns_raise_value_error(batcher):
    with pytest.raises(ValueError):
        batcher.compute((torch.zeros(2, 3), torch.zeros(3, 3)))
    with pytest.raises(ValueError):
        batcher.compute({"a": torch.zeros(2), "b": [torch.zeros(1)]})
    assert batcher.size() == 0


@pytest.mark.parametrize("leaf", [None, 1, "text", object()], ids=type)
def test_leaves_that_are_no_arrays_are_refused(batcher, leaf):
    with pytest.raises((TypeError, ValueError)):
        batcher.compute((torch.zeros(1), leaf))
    assert batcher.size() == 0


def test_a_call_larger_than_the_maximum_raises_value_error():
    batcher = DynamicBatcher(batch_dim=0, maximum_batch_size=3)
    with pytest.raises(ValueError):
        batcher.compute(columns(0, 4))
    (caller,) = gather(batcher, columns(0, 3))
    next(batcher).set_outputs(columns(5, 3))
    assert numbers(caller.result()) == [5, 6, 7]


def test_a_call_without_columns_is_no_call(batcher):
    caller = Thread(batcher.compute, torch.zeros(0, 3))
    with pytest.raises(ValueError):
        caller.result()


def test_calls_that_cannot_be_joined_fail_and_the_batcher_goes_on(batcher):
    first, other = gather(batcher, torch.zeros(1, 2), torch.zeros(1, 3))
    serving = Thread(serve, batcher, lambda x: x + 1)
    errors = []
    for thread in (first, other):
        try:
            thread.result()
        except ValueError as error:
            errors.append(error)
    assert errors  # at least the one that came later
    assert numbers(batcher.compute(torch.zeros(1, 2))) == [1, 1]
    batcher.close()
    serving.result()


# -------------------------------------------------------------------------------- what comes out


def test_compute_returns_the_callers_own_part(batcher):
    threads = gather(batcher, columns(0, 2), columns(2, 1), columns(3, 4))
    assert batcher.size() == 7
    batch = next(batcher)
    assert isinstance(batch, Batch) and batcher.size() == 0
    assert numbers(batch.get_inputs()) == [0, 1, 2, 3, 4, 5, 6]
    for thread in threads:
        thread.assert_blocked(0.03)
    assert batch.set_outputs((10 * columns(0, 7, 2), {"b": columns(0, 7).float()})) is None
    for thread, start, count in zip(threads, (0, 2, 3), (2, 1, 4), strict=True):
        wanted = columns(start, count)
        assert_same(thread.result(), (10 * columns(start, count, 2), {"b": wanted.float()}))


@pytest.mark.parametrize("batch_dim", [0, 1, 2])
def test_parts_are_right_along_any_dimension(batch_dim):
    batcher = DynamicBatcher(batch_dim=batch_dim, maximum_batch_size=6)
    torch.manual_seed(batch_dim)
    shape = [3, 4, 5]
    calls = []
    for count in (2, 1, 3):
        shape[batch_dim] = count
        strided = torch.randn(shape).transpose(0, 1).contiguous().transpose(0, 1)
        calls.append((torch.randn(shape), {"x": strided}))
    shape = [2, 3, 4]
    shape[batch_dim] = 6
    outputs = torch.randn(shape)
    threads = gather(batcher, *calls)
    batch = next(batcher)
    a, rest = batch.get_inputs()
    assert_same(a, torch.cat([a for a, _ in calls], batch_dim))
    assert_same(rest["x"], torch.cat([rest["x"] for _, rest in calls], batch_dim))
    batch.set_outputs({"y": outputs})
    for thread, part in zip(threads, outputs.split([2, 1, 3], batch_dim), strict=True):
        assert_same(thread.result()["y"], part.contiguous())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_in_and_out(batcher, dtype):
    whole = torch.arange(12).reshape(6, 2).remainder(2 if dtype == torch.bool else 250).to(dtype)
    threads = gather(batcher, *whole.split(2))
    batch = next(batcher)
    assert_same(batch.get_inputs(), whole)
    batch.set_outputs(whole.flip(0))
    for thread, part in zip(threads, whole.flip(0).split(2), strict=True):
        assert_same(thread.result(), part.contiguous())


def test_numpy_arrays_in_and_out(batcher):
    (caller,) = gather(batcher, (np.arange(3)[::-1], [np.ones((3, 2), np.float32)]))
    batch = next(batcher)
    a, (b,) = batch.get_inputs()
    assert numbers(a) == [2, 1, 0] and b.shape == (3, 2)
    batch.set_outputs(np.arange(6).reshape(2, 3).T)
    assert_same(caller.result(), torch.tensor([[0, 3], [1, 4], [2, 5]]))


def test_strided_outputs_come_as_they_look(batcher):
    threads = gather(batcher, columns(0, 1), columns(1, 2))
    whole = torch.arange(24).reshape(4, 6)
    batch = next(batcher)
    batch.set_outputs((whole.t()[:3], whole[:1, :3].t().expand(3, 5)))
    assert_same(threads[0].result(), (torch.tensor([[0, 6, 12, 18]]), torch.zeros(1, 5).long()))
    assert_same(
        threads[1].result(),
        (torch.tensor([[1, 7, 13, 19], [2, 8, 14, 20]]), torch.tensor([[1] * 5, [2] * 5])),
    )


def test_dimensions_of_no_size(batcher):
    (caller,) = gather(batcher, (torch.zeros(2, 0), torch.zeros(2, 3)))
    batch = next(batcher)
    assert batch.get_inputs()[0].shape == (2, 0)
    batch.set_outputs((torch.zeros(2, 0, 4), torch.ones(2, 1)))
    empty, full = caller.result()
    assert empty.shape == (2, 0, 4) and numbers(full) == [1, 1]


def test_tensors_that_require_grad_are_taken_and_detached(batcher):
    leaf = torch.ones(2, requires_grad=True)
    (caller,) = gather(batcher, (leaf, 2 * leaf))
    batch = next(batcher)
    assert not any(t.requires_grad for t in batch.get_inputs())
    batch.set_outputs((leaf, 3 * leaf))
    a, b = caller.result()
    assert not a.requires_grad and not b.requires_grad
    assert numbers(b) == [3, 3]


def test_outputs_may_be_made_in_inference_mode(batcher):
    (caller,) = gather(batcher, columns(0, 2))
    with torch.inference_mode():
        batch = next(batcher)
        batch.set_outputs(batch.get_inputs() + 1)
    result = caller.result()
    result += 1
    assert numbers(result) == [2, 3]


@pytest.mark.parametrize(
    "state",
    [
        (),
        columns(0, 2, 3).view(1, 2, 3),
        (columns(0, 2).view(1, 2), columns(4, 2, 5).view(1, 2, 5)),
        {"h": (columns(0, 2).view(1, 2), ()), "c": columns(1, 2).view(1, 2)},
        ((), {}),
    ],
)
def test_agent_states_may_be_any_nest_a_bare_tensor_or_nothing(state):
    batcher = DynamicBatcher()
    frame = torch.zeros(1, 2, 4)
    serving = Thread(serve, batcher, lambda inputs: ((inputs[0] + 1,), inputs[1]))
    outputs, new_state = batcher.compute((frame, state))
    assert_same(outputs, (frame + 1,))
    assert_same(new_state, state)
    batcher.close()
    serving.result()


def test_get_inputs_may_be_called_again(batcher):
    (caller,) = gather(batcher, {"a": columns(0, 3)})
    batch = next(batcher)
    assert_same(batch.get_inputs(), batch.get_inputs())
    batch.set_outputs(columns(0, 3))
    assert_same(batch.get_inputs(), {"a": columns(0, 3)})
    caller.result()


def test_outputs_may_be_the_inputs(batcher):
    threads = gather(batcher, columns(0, 2), columns(2, 1))
    batch = next(batcher)
    inputs = batch.get_inputs()
    inputs += 1
    batch.set_outputs(inputs)
    assert [numbers(thread.result()) for thread in threads] == [[1, 2], [3]]


# ---------------------------------------------------------------------------------- batch sizes


def test_calls_are_never_split_and_the_maximum_is_never_exceeded():
    batcher = DynamicBatcher(batch_dim=0, maximum_batch_size=5)
    threads = gather(batcher, *(columns(10 * i, n) for i, n in enumerate((3, 2, 4, 2, 5, 1))))
    sizes = []
    serving = Thread(serve, batcher, lambda x: x, sizes)
    for i, (thread, n) in enumerate(zip(threads, (3, 2, 4, 2, 5, 1), strict=True)):
        assert numbers(thread.result()) == list(range(10 * i, 10 * i + n))
    batcher.close()
    serving.result()
    assert sizes == [5, 4, 2, 5, 1]


def test_all_that_waits_comes_in_one_batch():
    batcher = DynamicBatcher(batch_dim=0)
    threads = gather(batcher, *(columns(i, 1) for i in range(10)))
    sizes = []
    serving = Thread(serve, batcher, lambda x: x, sizes)
    assert [thread.result().item() for thread in threads] == list(range(10))
    batcher.close()
    serving.result()
    assert sizes == [10]


def test_next_waits_for_the_minimum():
    batcher = DynamicBatcher(batch_dim=0, minimum_batch_size=3, timeout_ms=3_600_000)
    server = Thread(next, batcher)
    threads = gather(batcher, columns(0, 1), columns(1, 1))
    server.assert_blocked()
    threads += [Thread(batcher.compute, columns(2, 1))]
    batch = server.result()
    assert numbers(batch.get_inputs()) == [0, 1, 2]
    batch.set_outputs(columns(5, 3))
    assert [thread.result().item() for thread in threads] == [5, 6, 7]


def test_after_the_timeout_next_takes_less_than_the_minimum():
    batcher = DynamicBatcher(batch_dim=0, minimum_batch_size=3, timeout_ms=200)
    start = time.monotonic()
    (caller,) = gather(batcher, columns(0, 2))
    batch = next(batcher)
    assert 0.1 < time.monotonic() - start < DEADLINE
    batch.set_outputs(batch.get_inputs())
    assert numbers(caller.result()) == [0, 1]


def test_nothing_comes_after_the_timeout_when_nobody_calls():
    batcher = DynamicBatcher(batch_dim=0, minimum_batch_size=2, timeout_ms=10)
    server = Thread(next, batcher)
    server.assert_blocked(0.2)
    (caller,) = [Thread(batcher.compute, columns(5, 1))]
    server.result().set_outputs(columns(6, 1))
    assert numbers(caller.result()) == [6]


# ------------------------------------------------------------------------------------ outputs


def test_setting_outputs_twice_raises_runtime_error(batcher):
    (caller,) = gather(batcher, columns(0, 1))
    batch = next(batcher)
    batch.set_outputs(columns(1, 1))
    for _ in range(2):
        with pytest.raises(RuntimeError):
            batch.set_outputs(columns(2, 1))
    assert numbers(caller.result()) == [1]


@pytest.mark.parametrize(
    "outputs",
    [
        torch.zeros(3),  # too few dimensions
        torch.tensor(1.0),
        (torch.zeros(3, 2), torch.zeros(2)),
        torch.zeros(3, 1),  # another batch size
        torch.zeros(2, 3),
        torch.zeros(2, 0),
        (torch.zeros(3, 2), {"b": torch.zeros(3, 3)}),
    ],
)
def test_wrong_outputs_raise_value_error_and_right_ones_may_follow(outputs):
    batcher = DynamicBatcher(batch_dim=1)
    callers = [Thread(batcher.compute, torch.zeros(3, 1)) for _ in range(2)]
    wait_until(lambda: batcher.size() == 2)
    batch = next(batcher)
    with pytest.raises(ValueError):
        batch.set_outputs(outputs)
    for caller in callers:
        caller.assert_blocked(0.02)
    batch.set_outputs(torch.ones(2, 2))
    for caller in callers:
        assert caller.result().shape == (2, 1)


def test_empty_outputs_are_refused_or_returned(batcher):
    (caller,) = gather(batcher, columns(0, 1))
    batch = next(batcher)
    try:
        batch.set_outputs(())
    except ValueError:
        batch.set_outputs(columns(0, 1))
        caller.result()
    else:
        assert caller.result() == ()


def test_without_check_outputs_wrong_ones_still_harm_nobody():
    run_with_deadline("""
        import numpy as np
        import torch
        from deadline import Thread
        from libtorchbeast import DynamicBatcher

        for outputs in (torch.zeros(1), torch.tensor(1.0), torch.zeros(1, 5), torch.zeros(4, 1)):
            batcher = DynamicBatcher(check_outputs=False)
            caller = Thread(batcher.compute, torch.zeros(1, 2))
            batch = next(batcher)
            try:
                batch.set_outputs(outputs)
            except (ValueError, RuntimeError, IndexError):
                pass
            del batch
            try:
                print(caller.result().shape)
            except Exception as error:
                print(type(error))
    """)


def test_a_batch_dropped_without_outputs_raises_async_error_in_all_its_callers(batcher):
    threads = gather(batcher, columns(0, 1), columns(1, 2), columns(3, 1))
    batch = next(batcher)
    batch.get_inputs()
    for thread in threads:
        thread.assert_blocked(0.02)
    del batch
    gc.collect()
    for thread in threads:
        with pytest.raises(AsyncError):
            thread.result()
    (caller,) = gather(batcher, columns(0, 1))  # and the batcher goes on
    next(batcher).set_outputs(columns(9, 1))
    assert numbers(caller.result()) == [9]


def test_an_error_in_the_serving_thread_reaches_the_callers(batcher):
    threads = gather(batcher, columns(0, 1), columns(1, 1))

    def fail(inputs):
        raise KeyError("out of memory, say")

    serving = Thread(serve, batcher, fail)
    with pytest.raises(KeyError):
        serving.result()
    del serving.error  # whose traceback holds the batch
    gc.collect()
    for thread in threads:
        with pytest.raises(AsyncError):
            thread.result()


def test_async_error_is_an_exception_that_can_be_told_from_others():
    assert issubclass(AsyncError, Exception)
    assert not issubclass(AsyncError, (ValueError, ClosedBatchingQueue))
    assert not issubclass(ClosedBatchingQueue, AsyncError)


# -------------------------------------------------------------------------------- owned memory


def test_inputs_share_no_memory_with_what_callers_gave(batcher):
    call, array = torch.zeros(2), np.zeros(2)
    (caller,) = gather(batcher, (call, array))
    batch = next(batcher)
    for inputs in batch.get_inputs():
        inputs.fill_(1)
    assert torch.all(call == 0) and np.all(array == 0)
    call.fill_(2)
    array.fill(2)
    assert all(torch.all(inputs == 1) for inputs in batch.get_inputs())
    batch.set_outputs(columns(0, 2))
    caller.result()


def test_what_the_setter_does_to_its_outputs_later_changes_nothing(batcher):
    threads = gather(batcher, columns(0, 1), columns(1, 2))
    batch = next(batcher)
    outputs = columns(5, 3)
    array = outputs.numpy().copy()
    batch.set_outputs((outputs, array))
    outputs.zero_()
    array[:] = 0
    results = [thread.result() for thread in threads]
    assert [[numbers(t) for t in result] for result in results] == [[[5], [5]], [[6, 7], [6, 7]]]
    results[0][0].fill_(9)
    assert torch.all(outputs == 0) and numbers(results[1][0]) == [6, 7]


def test_one_caller_alone_shares_no_memory_with_the_setter_either(batcher):
    (caller,) = gather(batcher, columns(0, 3))
    outputs = columns(0, 3)
    next(batcher).set_outputs(outputs)
    result = caller.result()
    result += 1
    assert numbers(outputs) == [0, 1, 2]


def test_results_can_be_changed_and_kept_while_more_are_computed():
    batcher = DynamicBatcher(batch_dim=1, maximum_batch_size=7)
    serving = Thread(serve, batcher, lambda x: ({"y": x * 2}, x))

    def call(number):
        kept = []
        for i in range(100):
            given = torch.full((30, 2), 1000 * number + i)
            outputs, same = batcher.compute(given)
            same.neg_()
            outputs["y"] += 1
            kept.append((outputs["y"], same))
        for i, (doubled, negated) in enumerate(kept):
            assert torch.all(doubled == 2 * (1000 * number + i) + 1)
            assert torch.all(negated == -(1000 * number + i))

    for thread in [Thread(call, number) for number in range(4)]:
        thread.result()
    batcher.close()
    serving.result()


def test_inputs_can_be_changed_and_kept_while_more_come():
    batcher = DynamicBatcher(batch_dim=0)
    kept = []

    def answer(inputs):
        kept.append(inputs)
        outputs = inputs.clone()
        inputs.neg_()
        return outputs

    serving = Thread(serve, batcher, answer)
    for i in range(1, 100):
        assert torch.all(batcher.compute(torch.full((2, 50), i)) == i)
    batcher.close()
    serving.result()
    assert [int(inputs[0, 0]) for inputs in kept] == [-i for i in range(1, 100)]
    assert all(len(inputs.unique()) == 1 for inputs in kept)


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


def test_a_batch_outlives_its_batcher():
    batcher = DynamicBatcher(batch_dim=0)
    (caller,) = gather(batcher, columns(0, 1))
    batch = next(batcher)
    del batcher
    gc.collect()
    batch.set_outputs(columns(7, 1))
    assert numbers(caller.result()) == [7]


def test_memory_of_what_was_dropped_does_not_add_up():
    run_with_deadline("""
        import resource
        import torch
        from deadline import Thread
        from libtorchbeast import DynamicBatcher

        batcher = DynamicBatcher()

        def serve():
            for batch in batcher:
                batch.set_outputs((batch.get_inputs(), torch.zeros(1, 4)))

        serving = Thread(serve)
        given = torch.zeros(20, 4, 10_000)  # 3.2 MB
        for i in range(200):
            batcher.compute(given)
            if i == 30:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 60_000, f"{grown} KiB more"
        batcher.close()
        serving.result()
    """)


# -------------------------------------------------------------------------------------- closing


def test_close_wakes_callers_that_nobody_has_answered():
    batcher = DynamicBatcher(batch_dim=0)
    threads = gather(batcher, *(columns(i, 1) for i in range(3)))
    batcher.close()
    for thread in threads:
        with pytest.raises(ClosedBatchingQueue):
            thread.result()


def test_close_wakes_callers_whose_batch_is_being_answered():
    batcher = DynamicBatcher(batch_dim=0)
    threads = gather(batcher, columns(0, 1), columns(1, 1))
    batch = next(batcher)
    batcher.close()
    for thread in threads:
        with pytest.raises(ClosedBatchingQueue):
            thread.result()
    assert numbers(batch.get_inputs()) == [0, 1]


def test_outputs_may_be_set_after_close():
    batcher = DynamicBatcher(batch_dim=0)
    (caller,) = gather(batcher, columns(0, 2))
    batch = next(batcher)
    batcher.close()
    with pytest.raises(ClosedBatchingQueue):
        caller.result()
    batch.set_outputs(columns(0, 2))  # a serving thread ends by the end of iteration alone
    with pytest.raises(RuntimeError):
        batch.set_outputs(columns(0, 2))


def test_a_batch_may_be_dropped_after_close():
    batcher = DynamicBatcher(batch_dim=0)
    (caller,) = gather(batcher, columns(0, 2))
    batch = next(batcher)
    batcher.close()
    del batch, batcher
    gc.collect()
    with pytest.raises(ClosedBatchingQueue):
        caller.result()


def test_close_ends_iterations_that_wait():
    batcher = DynamicBatcher(batch_dim=0, minimum_batch_size=2, timeout_ms=3_600_000)
    threads = [Thread(lambda: list(batcher)) for _ in range(3)]
    (caller,) = gather(batcher, columns(0, 1))
    threads[0].assert_blocked()
    batcher.close()
    assert [thread.result() for thread in threads] == [[], [], []]
    with pytest.raises(ClosedBatchingQueue):
        caller.result()


def test_closed_means_closed():
    batcher = DynamicBatcher(batch_dim=0)
    assert batcher.is_closed() is False
    assert batcher.close() is None
    assert batcher.is_closed() is True
    assert list(batcher) == []
    with pytest.raises(StopIteration):
        next(batcher)
    with pytest.raises(ClosedBatchingQueue):
        batcher.compute(columns(0, 1))
    for _ in range(2):
        with pytest.raises(RuntimeError):
            batcher.close()


def test_iter_gives_the_batcher_itself():
    batcher = DynamicBatcher(batch_dim=0, maximum_batch_size=1)
    threads = gather(batcher, columns(0, 1), columns(1, 1))
    next(iter(batcher)).set_outputs(columns(5, 1))
    next(batcher).set_outputs(columns(6, 1))
    assert [thread.result().item() for thread in threads] == [5, 6]


# ---------------------------------------------------------------------------------- contention


@pytest.mark.parametrize(("minimum", "maximum"), [(1, 1024), (1, 5), (4, 4), (6, 30)])
def test_every_caller_gets_its_own_answer_amid_many(minimum, maximum):
    batcher = DynamicBatcher(0, minimum, maximum, timeout_ms=1)
    sizes = []
    servers = [
        Thread(serve, batcher, lambda x: (x + 1, {"y": x.float().neg()}), sizes) for _ in range(3)
    ]

    def call(number):
        for i in range(150):
            given = columns(1_000_000 * number + 10 * i, 1 + (i + number) % 4, 2)
            plus, rest = batcher.compute(given)
            assert torch.equal(plus, given + 1)
            assert torch.equal(rest["y"], -given.float())

    for thread in [Thread(call, number) for number in range(12)]:
        thread.result()
    batcher.close()
    for server in servers:
        server.result()
    assert max(sizes) <= maximum
    assert sum(sizes) == sum(1 + (i + n) % 4 for i in range(150) for n in range(12))


def test_a_batcher_that_is_closed_amid_traffic_wakes_everyone():
    for _ in range(20):
        batcher = DynamicBatcher(batch_dim=0, maximum_batch_size=3)
        done = threading.Event()

        def call(batcher=batcher, done=done):
            with pytest.raises(ClosedBatchingQueue):
                while True:
                    assert numbers(batcher.compute(columns(1, 2))) == [1, 2]
                    done.set()

        threads = [Thread(call) for _ in range(4)]
        threads += [Thread(serve, batcher, lambda x: x) for _ in range(2)]
        assert done.wait(DEADLINE)
        batcher.close()
        for thread in threads:
            thread.result()


def test_batches_dropped_amid_traffic_fail_no_other_calls():
    batcher = DynamicBatcher(batch_dim=0, maximum_batch_size=4)
    counts = {"dropped": 0, "failed": 0}

    def drop_some():
        number = 0
        for batch in batcher:
            number += 1
            if number % 3 == 0:
                counts["dropped"] += len(batch.get_inputs())
            else:
                batch.set_outputs(batch.get_inputs())
            del batch

    lock = threading.Lock()

    def call():
        for i in range(100):
            try:
                assert batcher.compute(columns(i, 1)).item() == i
            except AsyncError:
                with lock:
                    counts["failed"] += 1

    serving = Thread(drop_some)
    for thread in [Thread(call) for _ in range(6)]:
        thread.result()
    batcher.close()
    serving.result()
    assert counts["failed"] == counts["dropped"] > 0


# -------------------------------------------------------- deadlocks, each in a child that may hang


def test_other_threads_run_while_one_waits_and_any_end_wakes_it():
    run_with_deadline("""
        import gc
        import numpy as np
        from deadline import Thread, wait_until
        from libtorchbeast import AsyncError, ClosedBatchingQueue, DynamicBatcher

        def attempt(function, *args):
            try:
                return function(*args)
            except (StopIteration, ClosedBatchingQueue, AsyncError) as error:
                return type(error).__name__

        # The other thread can only be found blocked, and be woken, by one that runs.
        one = np.zeros((1, 1))
        batcher = DynamicBatcher(timeout_ms=None)
        server = Thread(attempt, next, batcher)
        server.assert_blocked()
        caller = Thread(attempt, batcher.compute, one)
        batch = server.result()
        server.value = None
        caller.assert_blocked()
        del batch
        gc.collect()
        assert caller.result() == "AsyncError"

        pending, flying = (Thread(attempt, batcher.compute, one) for _ in range(2))
        wait_until(lambda: batcher.size() == 2)
        batch = next(batcher)
        pending.assert_blocked()
        server = Thread(attempt, next, batcher)
        server.assert_blocked()
        batcher.close()
        assert server.result() == "StopIteration"
        assert pending.result() == flying.result() == "ClosedBatchingQueue"
        batch.set_outputs(np.zeros((1, 2)))
    """)


def test_a_program_ends_while_threads_still_wait():
    run_with_deadline("""
        import numpy as np
        from deadline import Thread
        from libtorchbeast import DynamicBatcher

        idle, busy = DynamicBatcher(), DynamicBatcher()
        threads = [Thread(next, idle), Thread(list, idle)]
        threads.append(Thread(busy.compute, np.zeros((1, 1))))
        batch = next(busy)
        threads.append(Thread(busy.compute, np.zeros((1, 1))))
        for thread in threads:
            thread.assert_blocked()
    """)


def test_methods_say_what_they_take():
    for method in ("compute", "close", "is_closed", "size"):
        assert inspect.getdoc(getattr(DynamicBatcher, method))
    for method in ("get_inputs", "set_outputs"):
        assert inspect.getdoc(getattr(Batch, method))
