# SPDX-License-Identifier: Apache-2.0
"""BatchingQueue: columns go in, whole batches come out, which belong to whoever took them."""

import collections
import contextlib
import gc
import inspect
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from deadline import DEADLINE, Thread, run_with_deadline, wait_until

from libtorchbeast import BatchingQueue, ClosedBatchingQueue

# The main thread may wait where no signal reaches it.
pytestmark = pytest.mark.timeout(120, method="thread")
DTYPES = [
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool,
]  # fmt: skip


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


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_dim": -1},
        {"minimum_batch_size": 0},
        {"minimum_batch_size": -1},
        {"maximum_batch_size": 0},
        {"minimum_batch_size": 5, "maximum_batch_size": 4},
        {"timeout_ms": -1},
        {"maximum_queue_size": 0},
        {"maximum_queue_size": -3},
        {"minimum_batch_size": 5, "maximum_queue_size": 4},  # it could never be taken from
    ],
    ids=repr,
)
def test_invalid_arguments_raise_value_error(arguments):
    with pytest.raises(ValueError):
        BatchingQueue(**arguments)


# -------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("n", [(), [], {}, ((), []), {"a": (), "b": {}}], ids=repr)
def test_an_empty_nest_raises_value_error(n):
    queue = BatchingQueue()
    with pytest.raises(ValueError):
        queue.enqueue(n)
    assert queue.size() == 0


@pytest.mark.parametrize(
    ("batch_dim", "n"),
    [
        (0, torch.tensor(1.0)),
        (0, np.array(1.0)),
        (1, torch.zeros(3)),
        (2, torch.zeros(3, 4)),
        (1, (torch.zeros(3, 4), torch.zeros(3))),
        (1, {"a": torch.zeros(3, 4), "b": (torch.tensor(1),)}),
    ],
)
def test_too_few_dimensions_raise_value_error(batch_dim, n):
    queue = BatchingQueue(batch_dim=batch_dim)
    with pytest.raises(ValueError):
        queue.enqueue(n)
    assert queue.size() == 0


@pytest.mark.parametrize(
    ("batch_dim", "n"),
    [
        (0, (torch.zeros(2, 3), torch.zeros(3, 3))),
        (1, {"a": torch.zeros(2, 3), "b": (torch.zeros(2, 4),)}),
        (1, (torch.zeros(2, 1), torch.zeros(2, 3))),  # nothing is repeated to fit
    ],
)
def test_leaves_with_different_numbers_of_columns_raise_value_error(batch_dim, n):
    queue = BatchingQueue(batch_dim=batch_dim)
    with pytest.raises(ValueError):
        queue.enqueue(n)
    assert queue.size() == 0


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


def test_after_an_error_the_queue_goes_on():
    queue = BatchingQueue(batch_dim=0)
    for n in ((), torch.tensor(1), (torch.zeros(2), torch.zeros(3)), "text"):
        with pytest.raises((TypeError, ValueError)):
            queue.enqueue(n)
    queue.enqueue(columns(1, 2))
    assert numbers(next(queue)) == [1, 2]


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(1, 3),  # another shape
        torch.zeros(1, 2, 1),  # another number of dimensions
        torch.zeros(1, 2, dtype=torch.float64),
        (torch.zeros(1, 2),),  # another structure
        {"a": torch.zeros(1, 2)},
    ],
)
def test_items_that_cannot_be_joined_raise_value_error_and_the_queue_goes_on(other):
    queue = BatchingQueue(batch_dim=0)
    queue.enqueue(torch.ones(1, 2))
    with pytest.raises(ValueError):
        queue.enqueue(other)
        next(queue)
    queue.enqueue(torch.ones(1, 2))
    assert torch.equal(next(queue)[0], torch.ones(2))


def test_an_item_without_columns_is_refused_or_adds_nothing():
    queue = BatchingQueue(batch_dim=0)
    with contextlib.suppress(ValueError):
        queue.enqueue((torch.zeros(0, 3), torch.zeros(0)))
    assert queue.size() == 0
    queue.enqueue((torch.ones(1, 3), torch.ones(1)))
    assert_same(next(queue), (torch.ones(1, 3), torch.ones(1)))


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


def test_a_batch_is_the_items_one_after_the_other():
    queue = BatchingQueue(batch_dim=0)
    for start, count in ((0, 2), (2, 1), (3, 3)):
        queue.enqueue(columns(start, count))
    assert queue.size() == 6
    assert numbers(next(queue)) == [0, 1, 2, 3, 4, 5]
    assert queue.size() == 0


def test_items_are_split_where_the_batch_is_full():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=4, maximum_batch_size=4)
    for start, count in ((0, 3), (3, 3), (6, 9), (15, 1)):
        queue.enqueue(columns(start, count))
    sizes = []
    for start in (0, 4, 8, 12):
        sizes.append(queue.size())
        assert numbers(next(queue)) == [start, start + 1, start + 2, start + 3]
    assert sizes == [16, 12, 8, 4] and queue.size() == 0


def test_maximum_is_given_when_enough_is_there_and_the_rest_when_not():
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=8)
    queue.enqueue(columns(0, 20))
    assert [len(next(queue)) for _ in range(3)] == [8, 8, 4]


@pytest.mark.parametrize("batch_dim", [0, 1, 2, 3])
def test_columns_stay_whole_along_any_dimension(batch_dim):
    torch.manual_seed(batch_dim)
    queue = BatchingQueue(batch_dim=batch_dim, maximum_batch_size=5)
    items = []
    for count in (3, 1, 4, 2, 7, 3):
        a = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
        a = a.index_select(batch_dim, torch.arange(count) % a.shape[batch_dim]) + count
        b = torch.randn(*([3] * batch_dim), count)  # ends with its columns
        items.append((a, b))
        queue.enqueue((a, {"b": b}))
    wanted_a = torch.cat([a for a, _ in items], batch_dim)
    wanted_b = torch.cat([b for _, b in items], batch_dim)
    for i in range(4):
        a, rest = next(queue)
        assert_same(a, wanted_a.narrow(batch_dim, 5 * i, 5).contiguous())
        assert_same(rest["b"], wanted_b.narrow(batch_dim, 5 * i, 5).contiguous())
        assert a.is_contiguous() and rest["b"].is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch_dim", [0, 1])
def test_every_dtype(dtype, batch_dim):
    queue = BatchingQueue(batch_dim=batch_dim, maximum_batch_size=3)
    whole = torch.arange(24).reshape(4, 6).remainder(2 if dtype == torch.bool else 250).to(dtype)
    parts = whole.split([2] * (whole.shape[batch_dim] // 2), batch_dim)
    for part in parts:
        queue.enqueue(part)
    assert_same(next(queue), whole.narrow(batch_dim, 0, 3).contiguous())
    queue.enqueue(parts[0].contiguous())
    rest = whole.narrow(batch_dim, 3, whole.shape[batch_dim] - 3)
    wanted = torch.cat([rest, parts[0]], batch_dim).narrow(batch_dim, 0, 3)
    assert_same(next(queue), wanted.contiguous())


@pytest.mark.parametrize(
    "dtype", "? u1 u2 u4 u8 i1 i2 i4 i8 f2 f4 f8".split()
)  # all that numpy and torch both know
def test_numpy_arrays_come_back_as_tensors(dtype):
    queue = BatchingQueue(batch_dim=0)
    array = np.arange(12).reshape(3, 4).astype(dtype)
    queue.enqueue({"a": array, "b": torch.ones(3)})
    batch = next(queue)
    assert isinstance(batch["a"], torch.Tensor)
    assert batch["a"].numpy().dtype == array.dtype
    assert np.array_equal(batch["a"].numpy(), array)


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[1:, 2:],
        lambda t: t[:1].expand(4, 6),
        lambda t: t[:, :1].expand(4, 6),
        lambda t: t.as_strided((3, 3), (1, 2)),
        lambda t: t.unsqueeze(0).transpose(0, 2),
        lambda t: t.numpy()[::-1],
        lambda t: t.numpy()[:, ::-2],
        lambda t: np.asfortranarray(t.numpy()),
        lambda t: np.broadcast_to(t.numpy()[0], (3, 6)),
        lambda t: np.swapaxes(t.numpy().reshape(4, 3, 2), 0, 2),
    ],
)
@pytest.mark.parametrize("batch_dim", [0, 1])
def test_strided_inputs_come_out_as_they_look(make, batch_dim):
    strided = make(torch.arange(24, dtype=torch.int32).reshape(4, 6))
    wanted = torch.tensor(np.ascontiguousarray(strided))
    queue = BatchingQueue(batch_dim=batch_dim, maximum_batch_size=wanted.shape[batch_dim])
    queue.enqueue(strided)
    batch = next(queue)
    assert_same(batch, wanted)
    batch += 1  # a tensor of its own, with room for each entry


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


def test_tensors_that_require_grad_are_taken_and_detached():
    queue = BatchingQueue(batch_dim=0)
    leaf = torch.ones(2, 3, requires_grad=True)
    queue.enqueue((leaf, 2 * leaf))
    a, b = next(queue)
    assert not a.requires_grad and not b.requires_grad and b.grad_fn is None
    assert torch.all(a == 1) and torch.all(b == 2)
    assert leaf.requires_grad
    queue.enqueue((torch.nn.Parameter(torch.ones(1, 3)), (2 * leaf)[:1]))
    assert numbers(next(queue)[1]) == [2, 2, 2]


def test_tensors_made_in_inference_mode_are_taken():
    queue = BatchingQueue(batch_dim=0)
    with torch.inference_mode():
        queue.enqueue(torch.ones(2) + 1)
    batch = next(queue)
    batch += 1
    assert numbers(batch) == [3, 3] and not batch.is_inference()


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


def test_dicts_are_joined_by_key_whatever_their_order():
    queue = BatchingQueue(batch_dim=0)
    queue.enqueue({"a": columns(0, 1), "b": columns(10, 1)})
    queue.enqueue({"b": columns(11, 1), "a": columns(1, 1)})
    batch = next(queue)
    assert numbers(batch["a"]) == [0, 1] and numbers(batch["b"]) == [10, 11]


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


def test_batches_share_no_memory_with_each_other():
    queue = BatchingQueue(batch_dim=1, maximum_batch_size=3)
    item = torch.zeros(2, 12, 5)
    queue.enqueue((item, item))  # one tensor twice, split into four
    batches = [next(queue) for _ in range(4)]
    tensors = [tensor for batch in batches for tensor in batch]
    for i, tensor in enumerate(tensors):
        tensor.fill_(i + 1)
    for i, tensor in enumerate(tensors):
        assert torch.all(tensor == i + 1)
    assert torch.all(item == 0)


def test_many_batches_can_be_changed_and_kept_while_more_are_produced():
    queue = BatchingQueue(
        batch_dim=1, minimum_batch_size=4, maximum_batch_size=4, maximum_queue_size=16
    )

    def produce():
        for i in range(100):
            queue.enqueue((columns(3 * i, 3, 50).t(), {"b": columns(3 * i, 3, 50).t()}))

    producer = Thread(produce)
    kept = []
    for i in range(75):
        a, b = next(queue)
        a.neg_()
        b["b"].mul_(2)
        kept.append((4 * i, a, b["b"] if i % 2 else b["b"].numpy()[:, 1:]))
    producer.result()
    for start, a, b in kept:
        wanted = torch.arange(start, start + 4).expand(50, 4)
        assert torch.equal(a, -wanted)
        assert torch.equal(torch.as_tensor(b), 2 * (wanted[:, 1:] if b.shape[1] == 3 else wanted))


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


def test_memory_of_dropped_batches_does_not_add_up():
    run_with_deadline("""
        import resource
        import torch
        from libtorchbeast import BatchingQueue

        queue = BatchingQueue(batch_dim=1, maximum_batch_size=5)
        item = torch.zeros(20, 4, 10_000)  # 3.2 MB
        for i in range(300):
            queue.enqueue(item)
            if queue.size() >= 5:
                next(queue)
            if i == 50:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 60_000, f"{grown} KiB more"  # all that went through are 960 MB
    """)


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


def test_a_batch_outlives_its_queue():
    queue = BatchingQueue(batch_dim=0)
    queue.enqueue(columns(0, 3, 1000))
    batch = next(queue)
    queue.close()
    del queue
    gc.collect()
    batch += 1
    assert batch[2, 999] == 3


# ----------------------------------------------------------------------------- waiting, closing


def test_next_waits_for_the_minimum():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=3)
    taker = Thread(next, queue)
    queue.enqueue(columns(0, 1))
    queue.enqueue(columns(1, 1))
    taker.assert_blocked()
    queue.enqueue(columns(2, 2))
    assert numbers(taker.result()) == [0, 1, 2, 3]


def test_after_the_timeout_next_takes_less_than_the_minimum():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=3, timeout_ms=200)
    queue.enqueue(columns(0, 2))
    start = time.monotonic()
    assert numbers(next(queue)) == [0, 1]
    assert 0.1 < time.monotonic() - start < DEADLINE


def test_the_timeout_is_not_waited_for_when_the_minimum_is_there():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=2, timeout_ms=3_600_000)
    taker = Thread(next, queue)
    queue.enqueue(columns(0, 1))
    taker.assert_blocked()
    queue.enqueue(columns(1, 1))
    assert numbers(taker.result()) == [0, 1]


def test_an_empty_queue_gives_nothing_after_the_timeout_either():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=2, timeout_ms=10)
    taker = Thread(next, queue)
    taker.assert_blocked(0.2)
    queue.enqueue(columns(5, 1))
    assert numbers(taker.result()) == [5]


def test_enqueue_waits_while_the_queue_is_full():
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=2, maximum_queue_size=2)
    queue.enqueue(columns(0, 1))
    queue.enqueue(columns(1, 1))
    putter = Thread(queue.enqueue, columns(2, 1))
    putter.assert_blocked()
    assert queue.size() == 2
    assert numbers(next(queue)) == [0, 1]
    putter.result()
    assert numbers(next(queue)) == [2]


def test_maximum_queue_size_counts_columns():
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=3, maximum_queue_size=6)
    queue.enqueue(columns(0, 3))
    queue.enqueue(columns(3, 3))
    putter = Thread(queue.enqueue, columns(6, 3))
    putter.assert_blocked()
    assert queue.size() == 6
    assert numbers(next(queue)) == [0, 1, 2]
    putter.result()
    assert queue.size() == 6


def test_no_item_is_too_large_for_the_queue_for_ever():
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=4, maximum_queue_size=4)
    putter = Thread(queue.enqueue, columns(0, 10))
    try:
        putter.result()
    except ValueError:
        return  # refused is fine, to wait for ever is not
    assert [numbers(next(queue)) for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


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


def test_a_closed_queue_gives_no_leftovers():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=2)
    queue.enqueue(columns(0, 1))
    queue.close()
    assert list(queue) == []


def test_iter_gives_the_queue_itself():
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=1)
    queue.enqueue(columns(0, 3))
    iterators = iter(queue), iter(queue)
    assert [next(i).item() for i in (*iterators, queue)] == [0, 1, 2]


def test_close_wakes_all_that_wait_in_next():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=2)
    queue.enqueue(columns(0, 1))
    takers = [Thread(lambda: list(queue)) for _ in range(4)]
    takers[0].assert_blocked()
    queue.close()
    assert [taker.result() for taker in takers] == [[], [], [], []]


def test_close_wakes_all_that_wait_in_enqueue():
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=1, maximum_queue_size=1)
    queue.enqueue(columns(0, 1))
    putters = [Thread(queue.enqueue, columns(i, 1)) for i in range(4)]
    putters[0].assert_blocked()
    queue.close()
    for putter in putters:
        with pytest.raises(ClosedBatchingQueue):
            putter.result()


def test_close_wakes_one_that_waits_for_its_timeout():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=2, timeout_ms=3_600_000)
    queue.enqueue(columns(0, 1))
    taker = Thread(lambda: list(queue))
    taker.assert_blocked()
    queue.close()
    assert taker.result() == []


def test_enqueue_into_a_closed_queue_raises():
    queue = BatchingQueue(batch_dim=0)
    queue.close()
    with pytest.raises(ClosedBatchingQueue):
        queue.enqueue(columns(0, 1))


def test_is_closed_tells_whether_close_was_called():
    queue = BatchingQueue()
    assert queue.is_closed() is False
    assert queue.close() is None
    assert queue.is_closed() is True


def test_a_second_close_raises_runtime_error():
    queue = BatchingQueue()
    queue.close()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            queue.close()
    assert queue.is_closed()


def test_of_many_that_close_at_once_one_succeeds():
    queue = BatchingQueue()
    barrier = threading.Barrier(8)
    outcomes = []

    def close():
        barrier.wait()
        try:
            queue.close()
            outcomes.append("closed")
        except RuntimeError:
            outcomes.append("too late")

    for thread in [Thread(close) for _ in range(8)]:
        thread.result()
    assert sorted(outcomes) == ["closed"] + ["too late"] * 7


def test_closed_batching_queue_is_an_exception_that_can_be_told_from_others():
    assert issubclass(ClosedBatchingQueue, Exception)
    assert not issubclass(ClosedBatchingQueue, (ValueError, StopIteration))


# ---------------------------------------------------------------------------------- contention


def produce(queue, starts, counts):
    for start, count in zip(starts, counts, strict=True):
        a = columns(start, count)
        queue.enqueue((a, {"b": np.repeat(a.numpy(), 3).reshape(count, 3)}))


def consume(queue, lock, taken, sizes, total):
    """Take all that comes, until closed; close when everything has been taken."""
    for a, rest in queue:
        assert torch.equal(a[:, None].expand(-1, 3), rest["b"])  # leaves are cut alike
        with lock:
            sizes.append(len(a))
            taken.extend(a.tolist())
            if len(taken) == total:
                queue.close()


@pytest.mark.parametrize(
    ("minimum", "maximum", "limit", "timeout_ms"),
    [(1, 7, 10, None), (5, 5, 10, None), (1, 1024, None, None), (6, 8, 20, 1)],
)
def test_each_column_arrives_once_from_many_producers_to_many_consumers(
    minimum, maximum, limit, timeout_ms
):
    queue = BatchingQueue(
        batch_dim=0,
        minimum_batch_size=minimum,
        maximum_batch_size=maximum,
        maximum_queue_size=limit,
        timeout_ms=timeout_ms,
    )
    counts = [1, 2, 3, 4] * 50  # 500 columns a producer
    total = 8 * sum(counts)
    lock, taken, sizes = threading.Lock(), [], []
    consumers = [Thread(consume, queue, lock, taken, sizes, total) for _ in range(4)]
    starts = np.cumsum([0, *counts[:-1]])
    producers = [
        Thread(produce, queue, (starts + p * sum(counts)).tolist(), counts) for p in range(8)
    ]
    for thread in producers + consumers:
        thread.result()
    assert collections.Counter(taken) == collections.Counter(range(total))
    assert max(sizes) <= maximum
    if timeout_ms is None:
        assert min(sizes) >= minimum


def test_one_consumer_gets_the_columns_of_each_producer_in_order():
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=5, maximum_queue_size=9)
    producers = [
        Thread(produce, queue, range(1000 * p, 1000 * p + 300, 3), [3] * 100) for p in range(4)
    ]
    taken = []
    consume(queue, threading.Lock(), taken, [], 1200)
    for p, producer in enumerate(producers):
        producer.result()
        own = [number for number in taken if number // 1000 == p]
        assert own == list(range(1000 * p, 1000 * p + 300))


def test_a_queue_that_is_closed_amid_traffic_wakes_everyone():
    for _ in range(20):
        queue = BatchingQueue(batch_dim=0, maximum_batch_size=3, maximum_queue_size=4)

        def put(queue=queue):
            with pytest.raises(ClosedBatchingQueue):
                while True:
                    queue.enqueue(columns(0, 2))

        threads = [Thread(put) for _ in range(3)]
        threads += [Thread(collections.deque, queue, 0) for _ in range(3)]
        wait_until(lambda queue=queue: queue.size() > 0)
        queue.close()
        for thread in threads:
            thread.result()


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


def test_the_last_name_of_a_queue_may_go_while_threads_wait_on_it():
    run_with_deadline("""
        import gc
        import numpy as np
        from deadline import Thread
        from libtorchbeast import BatchingQueue, ClosedBatchingQueue

        threads, queues = [], []
        for call in (
            lambda queue: list(queue),
            lambda queue: next(queue, None),
            lambda queue: [queue.enqueue(np.zeros((1, 1))) for _ in range(2)],
        ):
            queue = BatchingQueue(minimum_batch_size=1, maximum_batch_size=1, maximum_queue_size=1)
            threads.append(Thread(call, queue))
            queues.append(queue)
        for thread in threads[:2]:
            thread.assert_blocked()
        closes = [queue.close for queue in queues]
        del queue, queues
        gc.collect()
        threads[2].assert_blocked()
        for close in closes:
            close()
        del closes, close
        assert threads[0].result() == [] and threads[1].result() is None
        try:
            threads[2].result()
        except ClosedBatchingQueue:
            pass
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


def test_the_last_tensor_on_a_batch_may_go_in_any_thread():
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=4)
    for i in range(50):
        queue.enqueue(columns(4 * i, 4, 100))
    batches = [next(queue) for _ in range(50)]
    views = [[batch[j] for j in range(4)] for batch in batches]
    del batches
    threads = [Thread(lambda part=views[i::5]: [view.clear() for view in part]) for i in range(5)]
    for i in range(50):
        queue.enqueue(columns(4 * i, 4, 100))
        assert numbers(next(queue)[:, 0]) == [4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3]
    for thread in threads:
        thread.result()


def test_methods_say_what_they_take():
    for method in ("enqueue", "close", "is_closed", "size"):
        assert inspect.getdoc(getattr(BatchingQueue, method))
