# SPDX-License-Identifier: Apache-2.0
"""The module nest: tuples, lists and dicts of anything, and functions on their leaves."""

import collections
import contextlib
import gc
import sys
import threading
import weakref

import nest
import numpy as np
import pytest
import torch
from deadline import DEADLINE, Thread, run_with_deadline


class Leaf:
    """An object of which there is just one, with no equal."""


@pytest.mark.parametrize(
    ("n", "packed"),  # lists become tuples
    [
        ("a string is a leaf", "a string is a leaf"),
        ([], ()),
        ({}, {}),
        ((1, (2, 3), [4, {"b": 5, "a": (6,)}], ()), (1, (2, 3), (4, {"b": 5, "a": (6,)}), ())),
        ({"z": 1, "a": {"y": [2], "b": ()}}, {"z": 1, "a": {"y": (2,), "b": ()}}),
    ],
    ids=repr,
)
def test_map_and_pack_as_keep_structure_and_lists_become_tuples(n, packed):
    assert nest.map(lambda x: x, n) == packed
    flat = nest.flatten(n)
    assert nest.pack_as(n, flat) == nest.pack_as(n, tuple(flat)) == packed
    with pytest.raises(ValueError):
        nest.pack_as(n, [*flat, 1])


def test_leaves_may_be_anything_and_stay_the_same_objects():
    leaves = [Leaf(), None, "ab", {1, 2}, np.zeros(3), torch.ones(2), b"x", Leaf, lambda: 0]
    kept = [nest.map(lambda x: x, leaves), nest.flatten(leaves)]
    kept.append(nest.pack_as([0] * len(leaves), leaves))
    for same in kept:
        assert all(a is b for a, b in zip(same, leaves, strict=True))
    assert nest.front(leaves) is leaves[0]
    leaf = {"x": 1}  # what looks like a nest is a leaf for pack_as
    assert nest.pack_as([0], [leaf])[0] is leaf


def test_subclasses_of_tuple_and_dict_are_nests():
    Point = collections.namedtuple("Point", "x y")
    ordered = collections.OrderedDict(b=1, a=Point(2, 3))
    mapped = nest.map(lambda x: -x, ordered)
    assert mapped == {"b": -1, "a": (-2, -3)}
    assert type(mapped) is dict and type(mapped["a"]) is tuple


def test_map_many_gives_a_list_and_map_many2_two_arguments():
    # Dicts are matched by key, whatever their order.
    nests = ({"x": 1, "a": [2, ()]}, {"a": (20, []), "x": 10}, {"x": 100, "a": [200, ()]})
    assert nest.map_many(lambda leaves: leaves, *nests) == {
        "x": [1, 10, 100],
        "a": ([2, 20, 200], ()),
    }
    pairs = nest.map_many2(lambda *args: args, *nests[:2])
    assert pairs == {"x": (1, 10), "a": ((2, 20), ())}
    assert nest.map_many2(lambda a, b: (b, a), 0, 1) == (1, 0)


@pytest.mark.parametrize(
    ("a", "b"), [((1, 1), (2, 2, 2)), ((), {}), ({"a": {"b": 1}}, {"a": {"c": 1}})], ids=repr
)
def test_different_structures_raise_value_error(a, b):  # nest_test.cc has all that may differ
    with pytest.raises(ValueError):
        nest.map_many2(lambda x, y: 0, a, b)
    for nests in ((a, b), (a, a, b), (b, a, a)):
        with pytest.raises(ValueError):
            nest.map_many(lambda leaves: 0, *nests)


def test_flatten_returns_all_leaves_in_order_and_front_the_first():
    flat = nest.flatten(([], 1, [2, (3, ())], {"a": 4}, 5))
    assert flat == [1, 2, 3, 4, 5] and type(flat) is list
    for n in ([[[4]], 5], {"b": 5, "a": (4, 7)}, ((), [], (4,)), 4):
        assert nest.front(n) == nest.flatten(n)[0] == 4
    assert nest.flatten(None) == [None] and nest.front(None) is None
    for empty in ((), {"a": [], "b": {}}):
        assert nest.flatten(empty) == []
        with pytest.raises(ValueError):
            nest.front(empty)


def test_nothing_leaks_and_errors_of_the_function_come_through():
    leaf = Leaf()
    n = {"a": [leaf, (leaf,)]}
    fail = lambda *leaves: 1 / 0  # noqa: E731
    calls = [
        (None, nest.map, lambda x: x, n),
        (None, nest.map_many, lambda leaves: leaves, n, n),
        (None, nest.map_many2, lambda a, b: b, n, n),
        (None, nest.flatten, n),
        (None, nest.pack_as, n, [leaf, leaf]),
        (None, nest.front, n),
        (ValueError, nest.map_many2, lambda a, b: b, n, {"a": [leaf]}),
        (ValueError, nest.pack_as, n, [leaf]),
        (ValueError, nest.pack_as, n, [leaf] * 3),
        (ZeroDivisionError, nest.map, fail, n),
        (ZeroDivisionError, nest.map_many, fail, n, n),
        (ZeroDivisionError, nest.map_many2, fail, n, n),
    ]

    def call_all():
        for error, function, *arguments in calls:
            with pytest.raises(error) if error else contextlib.nullcontext():
                function(*arguments)

    def count():
        return sys.getrefcount(leaf), sys.getrefcount(n), sys.getrefcount(n["a"])

    before = count()
    for _ in range(100):
        call_all()
    assert count() == before

    mapped = nest.map(lambda x: Leaf(), (1, 2))
    alive = weakref.ref(mapped[0])
    gc.collect()
    assert alive() is not None
    del mapped
    assert alive() is None


def test_the_function_may_wait_for_other_threads():
    barrier = threading.Barrier(2, timeout=DEADLINE)

    def map_with_a_wait():
        return nest.map(lambda x: (barrier.wait(), -x)[1], (1, [2, 3]))

    threads = [Thread(map_with_a_wait) for _ in range(2)]
    assert [thread.result() for thread in threads] == [(-1, (-2, -3))] * 2


@pytest.mark.whole
def test_a_nest_too_deep_or_within_itself_is_an_error():
    run_with_deadline("""
        import nest
        import numpy as np
        from libtorchbeast import BatchingQueue, DynamicBatcher

        def refuse(function, *args):
            try:
                function(*args)
            except (RecursionError, ValueError):
                return
            raise AssertionError(f"{function} took a nest without end")

        deep = np.zeros((1, 1))
        for _ in range(100_000):
            deep = (deep,)
        cycle = [np.zeros((1, 1))]
        cycle.append(cycle)
        for n in (deep, cycle):
            refuse(nest.map, lambda x: x, n)
            refuse(nest.map_many, lambda x: x, n, n)
            refuse(nest.map_many2, lambda x, y: x, n, n)
            refuse(nest.pack_as, n, [])
            refuse(nest.flatten, n)
            refuse(nest.front, n)
            refuse(BatchingQueue().enqueue, n)
            refuse(DynamicBatcher().compute, n)
    """)
