# SPDX-License-Identifier: Apache-2.0
"""Priorities to draw from in proportion, for replay.py. NumPy alone."""

import itertools

import numpy as np

BRANCHES = 16  # children of a node: fewer levels than with 2, so fewer calls of NumPy


class SumTree:
    """Priorities of places 0..size - 1, in float64, drawn from in proportion.

    Sums are recomputed from their terms at each change, so rounding errors do not add up.
    """

    def __init__(self, size):
        self._levels = []  # from the priorities to the top: [nodes, BRANCHES]
        while size > 1 or not self._levels:
            size = -(-size // BRANCHES)
            self._levels.append(np.zeros((size, BRANCHES)))

    @property
    def total(self):
        return float(self._levels[-1].sum())

    @property
    def num_bytes(self):
        return sum(level.nbytes for level in self._levels)

    def get(self, places):
        return self._levels[0].reshape(-1)[places]

    def set(self, places, priorities):
        """Set priorities; of a place that is given twice, the last one holds."""
        self._levels[0].reshape(-1)[places] = priorities
        for level, parents in itertools.pairwise(self._levels):
            places = places // BRANCHES
            # Once for all neighbors, which share a parent.
            places = np.concatenate([places[:1], places[1:][places[1:] != places[:-1]]])
            parents.reshape(-1)[places] = level[places].sum(axis=1)

    def find(self, values):
        """Return the places [n] at which the cumulative sum of priorities first exceeds `values`.

        Values are at least 0; at or above the total they give the last place that can be drawn. A
        place with priority 0 is never returned, unless all are 0.
        """
        nodes, each = np.zeros(len(values), np.int64), np.arange(len(values))
        for level in reversed(self._levels):
            sums = level.take(nodes, axis=0).cumsum(axis=1)
            # Parents are rounded, too, so a value may be as large as the sum of all children.
            values = np.minimum(values, np.nextafter(sums[:, -1], 0))
            children = (sums > values[:, None]).argmax(axis=1)  # the first one
            values = values - np.where(children > 0, sums[each, children - 1], 0)
            nodes = nodes * BRANCHES + children
        return nodes
