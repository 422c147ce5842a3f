# SPDX-License-Identifier: Apache-2.0
"""BatchingQueue: columns go in, whole batches come out, which belong to whoever took them."""

import gc
import inspect
import weakref

import numpy as np
import pytest
import torch
from deadline import Thread, run_with_deadline, wait_until

from libtorchbeast import AsyncError, BatchingQueue, ClosedBatchingQueue, DynamicBatcher

# The main thread may wait where no signal reaches it.
pytestmark = pytest.mark.timeout(120, method="thread")


def columns(start, count, *rest):
    """Return int64 [count, *rest] whose column i is full of the number start + i."""
    numbers = torch.arange(start, start + count)
    return numbers.view(-1, *[1] * len(rest)).expand(count, *rest).contiguous()


def numbers(batch):
    return batch.flatten().tolist()


def assert_same(got, wanted):
    """Check two nests of tensors for equality, types and shapes included."""
    assert type(got) is type(wanted), (got, wanted)
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key in wanted:
            assert_same(got[key], wanted[key])
    elif isinstance(wanted, tuple):
        assert len(got) == len(wanted)
        for g, w in zip(got, wanted, strict=True):
            assert_same(g, w)
    else:
        assert got.dtype == wanted.dtype and got.shape == wanted.shape, (got, wanted)
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


# -------------------------------------------------------------------------------- construction


def test_defaults_are_those_of_the_contract():
    queue = BatchingQueue()
    queue.enqueue(torch.zeros(5, 1024))
    queue.enqueue(torch.zeros(5, 1))
    assert queue.size() == 1025
    assert next(queue).shape == (5, 1024)  # batch_dim=1, maximum_batch_size=1024
    assert next(queue).shape == (5, 1)  # minimum_batch_size=1
    with pytest.raises(ValueError):
        queue.enqueue(torch.zeros(5))  # check_inputs=True
    for _ in range(3):
        queue.enqueue(torch.zeros(1, 1000))  # maximum_queue_size=None
    assert queue.size() == 3000


def test_arguments_may_be_given_by_position_or_by_name():
    queue = BatchingQueue(0, 2, 3, 10, False, 4)
    for i in range(4):
        queue.enqueue(columns(i, 1))
    assert numbers(next(queue)) == [0, 1, 2]
    queue = BatchingQueue(
        batch_dim=0,
        minimum_batch_size=2,
        maximum_batch_size=3,
        timeout_ms=10,
        check_inputs=True,
        maximum_queue_size=4,
        pin_memory=False,
    )
    queue.enqueue(columns(0, 4))
    assert numbers(next(queue)) == [0, 1, 2]


# -------------------------------------------------------------------------------------- errors


both = pytest.mark.parametrize("closable", [BatchingQueue, DynamicBatcher])


def put(closable, n):
    return (closable.enqueue if isinstance(closable, BatchingQueue) else closable.compute)(n)


@both
@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_dim": -1},
        {"minimum_batch_size": 0},
        {"maximum_batch_size": 0},
        {"minimum_batch_size": 5, "maximum_batch_size": 4},
        {"timeout_ms": -1},
    ],
    ids=repr,
)
def test_invalid_arguments_raise_value_error(closable, arguments):
    with pytest.raises(ValueError):
        closable(**arguments)


@pytest.mark.parametrize("size", [-3, 0, 4])
def test_a_queue_that_is_too_small_for_a_batch_raises_value_error(size):
    with pytest.raises(ValueError):
        BatchingQueue(minimum_batch_size=5, maximum_queue_size=size)


@both
@pytest.mark.parametrize(
    ("batch_dim", "n"),
    [
        (0, ()),
        (0, {"a": [], "b": {}}),
        (0, np.array(1.0)),  # too few dimensions
        (1, {"a": torch.zeros(3, 4), "b": (torch.zeros(3),)}),
        (1, (torch.zeros(2, 1), torch.zeros(2, 3))),  # different numbers of columns
    ],
)
def test_nests_that_cannot_be_batched_raise_value_error(closable, batch_dim, n):
    closable = closable(batch_dim=batch_dim)
    with pytest.raises(ValueError):
        put(closable, n)
    assert closable.size() == 0


@both
def test_methods_say_what_they_take(closable):
    for method in ("enqueue" if closable is BatchingQueue else "compute", "close", "size"):
        assert inspect.getdoc(getattr(closable, method))


@both
def test_closed_means_closed(closable):
    closable = closable(batch_dim=0)
    assert iter(closable) is closable
    assert closable.is_closed() is False
    assert closable.close() is None
    assert closable.is_closed() is True
    assert list(closable) == []
    with pytest.raises(StopIteration):
        next(closable)
    with pytest.raises(ClosedBatchingQueue):
        put(closable, columns(0, 1))
    for _ in range(2):
        with pytest.raises(RuntimeError):
            closable.close()


def test_exceptions_can_be_told_from_one_another():
    for error, other in ((AsyncError, ClosedBatchingQueue), (ClosedBatchingQueue, AsyncError)):
        assert issubclass(error, Exception)
        assert not issubclass(error, (ValueError, StopIteration, other))


@pytest.mark.parametrize(
    "leaf",
    [None, 1, 1.5, "text", object(), {1, 2}, np.array(["a", "b"])],
    ids=type,
)
def test_leaves_that_are_no_arrays_are_refused(leaf):
    queue = BatchingQueue(batch_dim=0)
    with pytest.raises((TypeError, ValueError, BufferError)):
        queue.enqueue((torch.zeros(2), leaf))
    assert queue.size() == 0


def test_a_nest_that_is_too_deep_or_holds_itself_is_an_error_not_a_crash():
    run_with_deadline("""
        import torch
        from libtorchbeast import BatchingQueue, DynamicBatcher

        deep = torch.zeros(1, 1)
        for _ in range(100_000):
            deep = (deep,)
        cycle = [torch.zeros(1, 1)]
        cycle.append(cycle)
        for function in (BatchingQueue().enqueue, DynamicBatcher().compute):
            for n in (deep, cycle):
                try:
                    function(n)
                except (RecursionError, ValueError):
                    continue
                raise AssertionError("a nest without end was taken")
    """)


# ----------------------------------------------------------------------------------- what comes


DTYPES = "uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 bool"


@pytest.mark.parametrize("dtype", DTYPES.split())
def test_tensors_and_arrays_of_every_dtype_come_back_as_tensors(dtype):
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=3)
    whole = torch.arange(24).view(4, 6).remainder(2 if dtype == "bool" else 250)
    whole = whole.to(getattr(torch, dtype))
    queue.enqueue(whole[:2])
    queue.enqueue(whole[2:] if dtype == "bfloat16" else whole[2:].numpy())
    assert_same(next(queue), whole[:3])


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.t(),
        lambda t: t[1:, 2::2],
        lambda t: t[:1].expand(4, 6),
        lambda t: t.as_strided((3, 3), (1, 2)),
        lambda t: t.unsqueeze(0).transpose(0, 2),
        lambda t: t.numpy()[::-1],
        lambda t: np.broadcast_to(t.numpy()[0], (3, 6)),
    ],
)
def test_strided_inputs_come_out_as_they_look(make):
    strided = make(torch.arange(24, dtype=torch.int32).reshape(4, 6))
    queue = BatchingQueue(batch_dim=0)
    queue.enqueue(strided)
    batch = next(queue)
    assert_same(batch, torch.tensor(np.ascontiguousarray(strided)))
    batch += 1  # a tensor of its own, with room for each entry


def test_tensors_that_require_grad_are_taken_and_detached():
    leaf = torch.ones(2, 3, requires_grad=True)
    for closable in (BatchingQueue(batch_dim=0), DynamicBatcher(batch_dim=0)):
        caller = Thread(put, closable, (leaf, 2 * leaf))
        taken = next(closable)
        if isinstance(closable, DynamicBatcher):
            assert not any(t.requires_grad for t in taken.get_inputs())
            taken.set_outputs((leaf, 2 * leaf))
            taken = caller.result()
        assert not any(t.requires_grad for t in taken)
        assert torch.all(taken[1] == 2)
    assert leaf.requires_grad


def test_read_only_arrays_are_taken():
    array = np.arange(6)
    array.flags.writeable = False
    queue = BatchingQueue(batch_dim=0)
    queue.enqueue(array)
    queue.enqueue(np.frombuffer(b"\1\0\0\0\0\0\0\0", np.int64))
    batch = next(queue)
    batch += 1
    assert numbers(batch) == [1, 2, 3, 4, 5, 6, 2]


@pytest.mark.parametrize("shape", [(2, 0), (2, 0, 3), (2, 3, 0), (0, 2), (0, 2, 0)])
def test_dimensions_of_no_size(shape):
    batch_dim = shape.index(2)
    queue = BatchingQueue(batch_dim=batch_dim, maximum_batch_size=3)
    queue.enqueue((torch.zeros(shape), torch.ones(*[2] * (batch_dim + 1))))
    queue.enqueue((torch.zeros(shape), torch.ones(*[2] * (batch_dim + 1))))
    wanted = list(shape)
    for size in (3, 1):
        wanted[batch_dim] = size
        empty, full = next(queue)
        assert list(empty.shape) == wanted and empty.dtype == torch.float32
        assert full.shape[batch_dim] == size and torch.all(full == 1)


def test_nests_keep_their_structure_and_lists_come_back_as_tuples():
    queue = BatchingQueue(batch_dim=0)
    for i in range(2):
        t = columns(i, 1)
        queue.enqueue([t, {"b": (t, [t]), "a": {}, "c": {"d": t}}, (), ((), [])])
    t = torch.tensor([0, 1])
    batch = next(queue)
    assert_same(batch, (t, {"b": (t, (t,)), "a": {}, "c": {"d": t}}, (), ((), ())))
    queue.enqueue(columns(7, 1))
    assert_same(next(queue), torch.tensor([7]))


# -------------------------------------------------------------------------------- owned memory


def test_batches_share_no_memory_with_what_was_put_in():
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=2)
    tensor, array = torch.zeros(2), np.zeros(2)
    queue.enqueue((tensor, array))  # just one whole batch, so nothing need be joined
    batch = next(queue)
    batch[0].fill_(1)
    batch[1].fill_(1)
    assert torch.all(tensor == 0) and np.all(array == 0)
    tensor.fill_(2)
    array.fill(2)
    assert torch.all(batch[0] == 1) and torch.all(batch[1] == 1)


@pytest.mark.parametrize(
    "keep",
    [
        lambda batch: batch[0],
        lambda batch: batch[1]["b"][1:],
        lambda batch: batch[0].numpy(),
        lambda batch: batch[1]["b"].view(-1).detach()[3:],
        lambda batch: memoryview(batch[0].numpy()),
    ],
)
def test_memory_is_used_again_only_after_the_last_tensor_on_it_is_gone(keep):
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=4)

    def produce(value):
        queue.enqueue((torch.full((4, 1000), value), {"b": torch.full((4, 1000), value)}))
        return next(queue)

    kept = keep(produce(1))
    gc.collect()
    for value in range(2, 50):
        produce(value)  # and drop it at once
    assert torch.all(torch.as_tensor(np.asarray(kept)) == 1)


def test_inputs_are_let_go_once_they_have_been_taken_or_the_queue_is_gone():
    def enqueue(queue):
        array = np.zeros(3)
        queue.enqueue((array, np.ones(3)))
        return weakref.ref(array)

    queue = BatchingQueue(batch_dim=0)
    first = enqueue(queue)
    batch = next(queue)
    queue.enqueue(batch)  # and what came out may go in again
    second = enqueue(queue)
    wait_until(lambda: (gc.collect(), first() is None)[1])
    queue.close()
    del queue
    wait_until(lambda: (gc.collect(), second() is None)[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_may_be_in_pinned_memory():
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=2, pin_memory=True)
    kept = []
    for i in range(10):
        queue.enqueue({"a": columns(2 * i, 2, 100)})
        kept.append(next(queue)["a"])
    assert all(batch.is_pinned() for batch in kept)
    assert [numbers(batch[:, 0]) for batch in kept] == [[2 * i, 2 * i + 1] for i in range(10)]


def test_iteration_ends_when_closed():
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=1)
    seen = []

    def consume():
        for batch in queue:
            seen.append(batch.item())
            if batch.item() == 2:
                queue.close()

    consumer = Thread(consume)
    for i in range(3):
        queue.enqueue(columns(i, 1))
    consumer.result()
    assert seen == [0, 1, 2]
    assert list(queue) == []
    with pytest.raises(StopIteration):
        next(queue)


# -------------------------------------------------------- deadlocks, each in a child that may hang


def test_the_alarm_rings_for_a_deadlock():
    with pytest.raises(AssertionError, match="deadlock after 2 s") as caught:
        run_with_deadline(
            """
            from libtorchbeast import BatchingQueue
            next(BatchingQueue())
            """,
            seconds=2,
        )
    assert '"<string>"' in str(caught.value)  # it says where


def test_other_threads_run_while_one_waits():
    run_with_deadline("""
        import numpy as np
        from deadline import Thread
        from libtorchbeast import BatchingQueue, ClosedBatchingQueue

        def attempt(function, *args):
            try:
                return function(*args)
            except (StopIteration, ClosedBatchingQueue) as error:
                return type(error).__name__

        # The other thread can only be found blocked, and the queue be closed, by one that runs.
        one = np.zeros((1, 1))
        queue = BatchingQueue()
        thread = Thread(attempt, next, queue)
        thread.assert_blocked()
        queue.close()
        assert thread.result() == "StopIteration"

        queue = BatchingQueue(maximum_queue_size=1, maximum_batch_size=1)
        queue.enqueue(one)
        thread = Thread(attempt, queue.enqueue, one)
        thread.assert_blocked()
        assert queue.size() == 1 and not queue.is_closed()
        next(queue)
        thread.result()
        thread = Thread(attempt, queue.enqueue, one)
        thread.assert_blocked()
        queue.close()
        assert thread.result() == "ClosedBatchingQueue"
    """)


def test_several_threads_may_be_the_first_to_use_a_queue():
    """Nobody has imported torch before: whoever does must not keep the others from the GIL."""
    run_with_deadline("""
        import sys
        import threading
        import numpy as np
        from deadline import Thread
        from libtorchbeast import BatchingQueue

        queue, barrier = BatchingQueue(), threading.Barrier(4)

        def enqueue():
            barrier.wait()
            queue.enqueue(np.zeros((1, 1)))

        sys.setswitchinterval(1e-5)
        for thread in [Thread(enqueue) for _ in range(4)]:
            thread.result()
        assert queue.size() == 4
    """)


def test_a_program_ends_while_threads_still_wait():
    run_with_deadline("""
        import numpy as np
        from deadline import Thread
        from libtorchbeast import BatchingQueue

        empty = BatchingQueue()
        full = BatchingQueue(maximum_batch_size=1, maximum_queue_size=1)
        full.enqueue(np.zeros((1, 1)))
        threads = [Thread(next, empty), Thread(list, empty)]
        threads.append(Thread(full.enqueue, np.zeros((1, 1))))
        for thread in threads:
            thread.assert_blocked()
    """)
