# SPDX-License-Identifier: Apache-2.0
"""BatchingQueue and DynamicBatcher, which make batches of columns.

What comes out of the queue belongs to whoever took it; of the batcher, callers wait for their own
columns of what somebody answers for many at once.
"""

import gc
import weakref

import numpy as np
import pytest
import torch
from deadline import Thread, run_with_deadline, wait_until
from stream import as_lists

from libtorchbeast import AsyncError, Batch, BatchingQueue, ClosedBatchingQueue, DynamicBatcher

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
    assert as_lists(got) == as_lists(wanted)


BATCHING = {"batch_dim": 0, "minimum_batch_size": 2, "maximum_batch_size": 3, "timeout_ms": 10}


def test_arguments_and_defaults_are_those_of_torchbeast():
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
    options = BATCHING | {"check_inputs": True, "maximum_queue_size": 4}
    for queue in (BatchingQueue(*options.values()), BatchingQueue(**options, pin_memory=False)):
        queue.enqueue(columns(0, 4))
        assert numbers(next(queue)) == [0, 1, 2]


def test_arguments_of_the_batcher_have_torchbeasts_defaults_too():
    batcher = DynamicBatcher()
    caller = Thread(batcher.compute, torch.zeros(3, 1024))  # batch_dim=1, maximum_batch_size=1024
    batch = next(batcher)  # minimum_batch_size=1
    assert batch.get_inputs().shape == (3, 1024)
    with pytest.raises(ValueError):
        batch.set_outputs(torch.zeros(3))  # check_outputs=True
    batch.set_outputs(torch.ones(2, 1024))
    assert caller.result().shape == (2, 1024)
    options = BATCHING | {"check_outputs": True}
    for batcher in (DynamicBatcher(*options.values()), DynamicBatcher(**options)):
        threads = gather(batcher, columns(0, 1), columns(1, 2), columns(3, 1))
        for _ in range(2):
            batch = next(batcher)
            batch.set_outputs(-batch.get_inputs())
        assert [numbers(thread.result()) for thread in threads] == [[0], [-1, -2], [-3]]


def gather(batcher, *calls):
    """Start a thread for each call, one after the other; return the threads."""
    threads = []
    for call in calls:
        before = batcher.size()
        threads.append(Thread(batcher.compute, call))
        wait_until(lambda before=before: batcher.size() > before)
    return threads


both = pytest.mark.parametrize("closable", [BatchingQueue, DynamicBatcher])


def put(closable, n):
    return (closable.enqueue if isinstance(closable, BatchingQueue) else closable.compute)(n)


def put_and_take(closable, n):
    """Return all nests that come out: the queue's batch, or the batcher's inputs and outputs."""
    caller = Thread(put, closable, n)
    taken = next(closable)
    if isinstance(closable, BatchingQueue):
        return [taken]
    inputs = taken.get_inputs()
    taken.set_outputs(n)
    return [inputs, caller.result()]


@both
def test_what_the_core_refuses_is_a_value_error(closable):
    # batching_queue_test.cc, dynamic_batcher_test.cc and columns_test.cc have all that it refuses.
    for arguments in ({"batch_dim": -1}, {"minimum_batch_size": 5, "maximum_batch_size": 4}):
        with pytest.raises(ValueError):
            closable(**arguments)
    closable = closable()
    for n in ({"a": [], "b": {}}, {"a": torch.zeros(3, 4), "b": (torch.zeros(3),)}, np.array(1.0)):
        with pytest.raises(ValueError):
            put(closable, n)
        assert closable.size() == 0


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
    # Its errors can be told from one another.
    for error, other in ((AsyncError, ClosedBatchingQueue), (ClosedBatchingQueue, AsyncError)):
        assert issubclass(error, Exception)
        assert not issubclass(error, (ValueError, StopIteration, other))


@pytest.mark.parametrize("leaf", [None, 1, 1.5, "text", object(), {1, 2}], ids=type)
def test_leaves_that_are_no_arrays_are_refused(leaf):
    queue = BatchingQueue(batch_dim=0)
    with pytest.raises(TypeError):
        queue.enqueue((torch.zeros(2), leaf))
    assert queue.size() == 0


@pytest.mark.parametrize(
    "leaf",
    [np.array(["a", "b"]), np.zeros(2, ">f4"), np.zeros(2, np.longdouble), np.array([None, 1]),
     torch.zeros(2, device="meta"), torch.zeros(2).to_sparse(), torch.zeros(2, dtype=torch.cfloat)],
    ids=lambda leaf: str(leaf.dtype),
)  # fmt: skip
def test_arrays_that_cannot_be_used_are_refused(leaf):
    queue = BatchingQueue(batch_dim=0)
    with pytest.raises(ValueError):
        queue.enqueue((torch.zeros(2), leaf))
    assert queue.size() == 0


@pytest.mark.parametrize("size", [2**50, 3 * 2**60, 2**62])  # of which the bytes overflow
def test_more_than_memory_holds_is_refused(size):
    queue = BatchingQueue(batch_dim=0)
    with pytest.raises(MemoryError):
        queue.enqueue(torch.zeros(1).expand(size))
    assert queue.size() == 0


def test_tensors_and_arrays_of_every_dtype_come_back_as_tensors():
    dtypes = "uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64 bfloat16"
    numbers = torch.arange(24).view(4, 6)
    whole = [(numbers % 250).to(getattr(torch, name)) for name in dtypes.split()]
    whole.insert(0, numbers % 2 == 0)
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=3)
    queue.enqueue([x[:2] for x in whole])
    queue.enqueue([x[2:] if x.dtype == torch.bfloat16 else x[2:].numpy() for x in whole])
    assert_same(next(queue), tuple(x[:3] for x in whole))


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t[1:, 2::2],
        lambda t: t[:1].expand(4, 6),
        lambda t: t.unsqueeze(0).transpose(0, 2),
        lambda t: t.numpy()[::-1],
        lambda t: np.broadcast_to(t.numpy()[0], (3, 6)),
        lambda t: np.frombuffer(t.numpy().tobytes(), np.int32),  # read-only
        lambda t: t[:, :0],  # of no size
        lambda t: t.numpy()[:, :0].T[..., None].swapaxes(0, 1),
    ],
)
def test_inputs_strided_read_only_or_empty_come_out_as_they_look(make):
    given = make(torch.arange(24, dtype=torch.int32).reshape(4, 6))
    queue = BatchingQueue(batch_dim=0)
    queue.enqueue(given)
    batch = next(queue)
    assert_same(batch, torch.tensor(np.ascontiguousarray(given)))
    batch += 1  # a tensor of its own, with room for each entry


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_lazy_negation_is_not_lost(needs_grad):
    x = torch.tensor([[1 + 2j, 3 - 4j]]).requires_grad_(needs_grad)
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=1)
    queue.enqueue(x.conj().imag)
    assert next(queue).tolist() == [[-2, 4]]


@both
def test_what_comes_out_is_detached_and_shares_no_memory(closable):
    closable = closable(batch_dim=0, maximum_batch_size=2)
    tensor, array = torch.zeros(2, requires_grad=True), np.zeros(2)
    # Just one whole batch, so nothing need be joined.
    taken = [t for n in put_and_take(closable, (tensor, 0 * tensor, array)) for t in n]
    for t in taken:
        assert not t.requires_grad
        t.fill_(1)
    assert torch.all(tensor == 0) and np.all(array == 0) and tensor.requires_grad
    tensor.detach().fill_(2)
    array.fill(2)
    assert all(torch.all(t == 1) for t in taken)


def test_nests_keep_their_structure_and_lists_become_tuples():
    queue = BatchingQueue(batch_dim=0)
    for i in range(2):
        t = columns(i, 1)
        queue.enqueue([t, {"b": (t, [t]), "a": {}, "c": {"d": t}}, (), ((), [])])
    t = torch.tensor([0, 1])
    batch = next(queue)
    assert_same(batch, (t, {"b": (t, (t,)), "a": {}, "c": {"d": t}}, (), ((), ())))
    queue.enqueue(columns(7, 1))
    assert_same(next(queue), torch.tensor([7]))


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
def test_memory_is_reused_only_after_its_last_tensor_is_gone(keep):
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=4)

    def produce(value):
        whole = torch.full((4, 1000), value)
        queue.enqueue((whole, {"b": whole}))
        return next(queue)

    kept = keep(produce(1))
    gc.collect()
    for value in range(2, 50):
        produce(value)  # and drop it at once
    assert torch.all(torch.as_tensor(np.asarray(kept)) == 1)


def test_inputs_are_freed_once_taken_or_the_queue_is_gone():
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@both
def test_pinned_memory_without_a_gpu_is_a_clear_error(closable):
    with pytest.raises(RuntimeError, match="(?i)pin.*(CUDA|accelerator)"):
        closable(pin_memory=True)


def test_memory_that_cannot_be_pinned_fails_both_threads(monkeypatch):
    empty, can_pin = torch.empty, True

    def pin(*size, pin_memory=False, **kwargs):  # of a machine with a GPU
        if pin_memory and not can_pin:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*size, **kwargs)

    monkeypatch.setattr(torch, "empty", pin)
    batcher = DynamicBatcher(pin_memory=True)
    can_pin = False
    caller = Thread(batcher.compute, torch.zeros(1, 1))
    with pytest.raises(RuntimeError, match="CUDA error: out of memory"):
        next(batcher)
    with pytest.raises(RuntimeError, match="CUDA error: out of memory"):
        caller.result()


def test_compute_returns_the_callers_own_part_of_the_outputs():
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


def test_outputs_of_inference_mode_outlive_batch_and_batcher():
    batcher = DynamicBatcher(batch_dim=0)
    (caller,) = gather(batcher, columns(3, 2, 100))
    with torch.inference_mode():
        batch = next(batcher)
        inputs = batch.get_inputs()
        batch.set_outputs(inputs + 1)
    result = caller.result()
    batcher.close()
    del batch, batcher, caller
    gc.collect()
    result += 1
    assert torch.all(inputs == columns(3, 2, 100)) and torch.all(result == inputs + 2)


CHILD = """
    import gc
    import numpy as np
    from deadline import Thread
    from libtorchbeast import AsyncError, BatchingQueue, ClosedBatchingQueue, DynamicBatcher

    def attempt(function, *args):
        try:
            return function(*args)
        except (StopIteration, ClosedBatchingQueue, AsyncError) as error:
            return type(error).__name__

    def start(function, *args):
        # The other thread can only be found blocked, and be woken, by one that runs.
        thread = Thread(attempt, function, *args)
        thread.assert_blocked()
        return thread

    def start_all():
        full = BatchingQueue(maximum_queue_size=1, maximum_batch_size=1)
        full.enqueue(one)
        empty, idle, busy = BatchingQueue(), DynamicBatcher(timeout_ms=None), DynamicBatcher()
        threads = [start(next, empty), start(list, empty), start(full.enqueue, one)]
        threads += [start(next, idle), start(list, idle), Thread(attempt, busy.compute, one)]
        batch = next(busy)
        threads.append(start(busy.compute, one))
        return [full, empty, idle, busy], threads, batch

    one = np.zeros((1, 1))
    (full, *others), threads, batch = start_all()
    next(full)
    assert threads.pop(2).result() is None
    threads.append(start(full.enqueue, one))
    batch.get_inputs()
    del batch
    gc.collect()
    assert threads.pop(4).result() == "AsyncError"
    for closable in (full, *others):
        closable.close()
    ends = [thread.result() for thread in threads]
    assert ends == ["StopIteration", [], "StopIteration", [], *2 * ["ClosedBatchingQueue"]], ends
    left = start_all()  # and the program ends
"""


@pytest.mark.whole
def test_a_waiting_thread_blocks_no_other_and_any_end_wakes_it():
    run_with_deadline(CHILD)  # it may hang


@pytest.mark.whole
def test_a_generator_may_close_a_queue_at_the_exit():
    output = run_with_deadline("""
        from libtorchbeast import BatchingQueue

        def run():
            queue = BatchingQueue()
            try:
                yield queue
            finally:
                queue.close()
                print("closed")

        running = run()
        queue = next(running)
    """)
    assert output == "closed\n"


@pytest.mark.whole
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
