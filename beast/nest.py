# SPDX-License-Identifier: Apache-2.0
"""Nests: dicts and tuples of leaves, such as arrays or tensors. It imports nothing."""


def map_nest(function, nest, *others):
    """Apply `function` to each leaf of a nest of dicts and tuples (or of several alike ones)."""
    if isinstance(nest, dict):
        return {k: map_nest(function, v, *(o[k] for o in others)) for k, v in nest.items()}
    if isinstance(nest, tuple):
        return tuple(map_nest(function, *leaves) for leaves in zip(nest, *others, strict=True))
    return function(nest, *others)


def leaves_of(nest):
    """Yield the leaves of a nest, in order."""
    if not isinstance(nest, (dict, tuple)):
        yield nest
        return
    for part in nest.values() if isinstance(nest, dict) else nest:
        yield from leaves_of(part)
