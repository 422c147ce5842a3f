# SPDX-License-Identifier: Apache-2.0
"""Spaces as a handshake has them: dicts and lists, for JSON. Imports no Gymnasium.

{"type": "Box", "shape": [4], "dtype": "float32", "low": 0, "high": 1}    bounds may be lists
{"type": "Discrete", "n": 3, "start": 0, "dtype": "int64"}
{"type": "MultiDiscrete", "nvec": [3, 5], "start": [0, 0], "dtype": "int64"}
{"type": "MultiBinary", "n": 8}
{"type": "Dict", "spaces": [["key", space], ...]}
{"type": "Tuple", "spaces": [space, ...]}
"""

import json

import numpy as np


def spaces_to_json(observation_space, action_space, frame_skip):
    """Return spaces and frame skip as JSON, which environments and learners compare."""
    spaces = {
        "observation": space_to_dict(observation_space),
        "action": space_to_dict(action_space),
        "frame_skip": frame_skip,
    }
    return json.dumps(spaces, sort_keys=True)


def space_to_dict(space):
    """Return a space of Gymnasium as dicts and lists; equal spaces give equal ones.

    What is a dict already is returned as it is.
    """
    if isinstance(space, dict):
        return space
    names = {c.__name__ for c in type(space).__mro__}
    if "Dict" in names:
        items = [[key, space_to_dict(s)] for key, s in space.spaces.items()]
        return {"type": "Dict", "spaces": items}
    if "Tuple" in names:
        return {"type": "Tuple", "spaces": [space_to_dict(s) for s in space.spaces]}
    if "Box" in names:
        bounds = {"low": _bound_to_list(space.low), "high": _bound_to_list(space.high)}
        return {"type": "Box", "shape": list(space.shape), "dtype": space.dtype.name} | bounds
    if "Discrete" in names:
        numbers = {"n": int(space.n), "start": int(space.start)}
        return {"type": "Discrete", "dtype": space.dtype.name} | numbers
    if "MultiDiscrete" in names:
        numbers = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
        return {"type": "MultiDiscrete", "dtype": space.dtype.name} | numbers
    if "MultiBinary" in names:
        return {"type": "MultiBinary", "n": np.asarray(space.n).tolist()}
    raise ValueError(f"the space {space} is of a kind that cannot be sent")


def _bound_to_list(bound):
    if bound.size == 0:
        return 0
    return bound.flat[0].item() if (bound == bound.flat[0]).all() else bound.tolist()


def zero_observation(d):
    """Return a nest of zeros [1, ...] for an observation of a space, a dict."""
    if d["type"] == "Dict":
        return {key: zero_observation(s) for key, s in d["spaces"]}
    if d["type"] == "Tuple":
        return tuple(zero_observation(s) for s in d["spaces"])
    if d["type"] == "MultiBinary":
        return np.zeros((1, *np.atleast_1d(d["n"])), np.int8)
    shape = d["shape"] if d["type"] == "Box" else np.shape(d.get("nvec", 0))
    return np.zeros((1, *shape), d["dtype"])


def to_action(d, action):
    """Return an action as agents choose it, a number or [k], as one that the space, a dict, has.

    Raises:
      ValueError: there is no such action.
    """
    if d["type"] == "Box":
        # A float32 at a bound may be a little beyond that of a float64.
        return np.clip(action.astype(d["dtype"]), d["low"], d["high"]).astype(d["dtype"])
    if not ((action >= 0) & (action < d["n" if d["type"] == "Discrete" else "nvec"])).all():
        raise ValueError(f"the action {action} is outside its space, {d}")
    action = (action + np.asarray(d["start"])).astype(d["dtype"])
    return int(action) if d["type"] == "Discrete" else action
