# SPDX-License-Identifier: Apache-2.0
"""Observation and action spaces as arrays, as sizes for nets, and as JSON."""

import json
import math
import types

import gymnasium as gym
import numpy as np

from beast.errors import EnvError, FlagError

# Of spaces that another machine names: bytes of an observation, as of a message, and actions.
MAX_BYTES, MAX_ACTIONS = 2**28, 2**20
MAX_DEPTH = 32  # of nests, as in messages
ACTION_MASK = "action_mask"  # its key, in a Dict observation or in info


def _check_package(space, name):
    """Raise an EnvError for a space that is none of Gymnasium's, such as those of the old gym."""
    if not isinstance(space, gym.spaces.Space):
        module, advice = type(space).__module__, "make it of gymnasium.spaces"
        if module.partition(".")[0] == "gym":
            advice = (
                "import gymnasium in place of the old package gym, or wrap the environment by the "
                "package shimmy"
            )
        elif isinstance(space, types.MethodType):  # as of PettingZoo's ParallelEnv
            advice = "an environment of several players needs a wrapper that is a gymnasium.Env"
        raise EnvError(
            f"the {name} is {space}, a {module}.{type(space).__qualname__} and no space of "
            f"gymnasium: {advice}"
        )


def find_outside(space, batch, path="observation"):
    """Return path, number in the batch and space of an observation outside its space, or None.

    Args:
      batch: of empty_observation.
    """
    if isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
        keys = batch if isinstance(batch, dict) else range(len(batch))
        found = (find_outside(space[key], batch[key], f"{path}[{key!r}]") for key in keys)
        return next(filter(None, found), None)
    if isinstance(space, gym.spaces.Box):
        low, high = space.low, space.high
    elif isinstance(space, gym.spaces.MultiBinary):
        low, high = 0, 1
    else:
        low, high = space.start, space.start + getattr(space, "nvec", getattr(space, "n", 1)) - 1
    outside = np.argwhere(~((low <= batch) & (batch <= high)))
    return (path, int(outside[0][0]), space) if len(outside) else None


def empty_observation(space, num_envs, path="observation", advice=""):
    """Return a nest of zeros [num_envs, ...] that holds a batch of observations of `space`."""
    _check_package(space, f"space of {path}")
    if isinstance(space, gym.spaces.Dict):
        items = space.spaces.items()
        if others := [key for key in space.spaces if not isinstance(key, str)]:
            raise EnvError(f"the space of {path} has keys that are no texts, {others}: rename them")
        keys = ",".join(str(key) for key, s in items if _is_array(s))
        if path == "observation" and keys:
            advice = f"leave it out, by --observation_keys {keys}"
        return {k: empty_observation(s, num_envs, f"{path}[{k!r}]", advice) for k, s in items}
    if isinstance(space, gym.spaces.Tuple):
        items = enumerate(space.spaces)
        return tuple(empty_observation(s, num_envs, f"{path}[{k}]", advice) for k, s in items)
    if not _is_array(space):
        advice = advice or "leave it out, or make it a Box, by a wrapper in create_env"
        raise EnvError(
            f"the space of {path} is {space}, which is no array of numbers of a tensor: {advice}"
        )
    return np.zeros((num_envs, *space.shape), space.dtype)


def leaves(space, path=()):
    """Yield the path (keys and numbers) and the space of each part of a nest."""
    if not isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
        yield path, space
        return
    keys = space.spaces if isinstance(space, gym.spaces.Dict) else range(len(space.spaces))
    for key in keys:
        yield from leaves(space[key], (*path, key))


def _is_array(space):
    return all(
        part.shape is not None
        and part.dtype is not None
        and part.dtype.kind in "biuf"
        and part.dtype.itemsize <= 8
        and part.dtype.isnative
        for _, part in leaves(space)
    )


def count_actions(space):
    """Return the size of an action space, as nets take it.

    Of Discrete, the number of actions; of MultiDiscrete, a tuple of the numbers of its k parts; of
    a Box, the number k of its parts.
    """
    _check_package(space, "action space")
    if isinstance(space, gym.spaces.Discrete):
        return int(space.n)
    if isinstance(space, gym.spaces.MultiDiscrete) and len(space.shape) == 1:
        return tuple(space.nvec.tolist())
    if isinstance(space, gym.spaces.Box) and len(space.shape) == 1 and space.dtype.kind == "f":
        return space.shape[0]
    raise EnvError(
        f"the action space is {space}; only Discrete, and MultiDiscrete and Box (of floats) of one "
        "dimension are supported, so wrap the environment to have one of these"
    )


def empty_actions(space, num_envs):
    """Return zeros that hold a batch of actions of `space`, as agents choose them.

    Those of Discrete and MultiDiscrete are int64, [num_envs] and [num_envs, k], and count from 0
    wherever the space starts; those of a Box are float32, [num_envs, k].
    """
    dtype = np.float32 if isinstance(space, gym.spaces.Box) else np.int64
    return np.zeros((num_envs, *space.shape), dtype)


def action_range(space):
    """Return the least and the largest action, each a number or [k], as agents choose them."""
    if isinstance(space, gym.spaces.Discrete):
        return 0, int(space.n) - 1
    if isinstance(space, gym.spaces.MultiDiscrete):
        return np.zeros(space.shape, np.int64), space.nvec.astype(np.int64) - 1
    # Not infinite, since actions may not be.
    largest = float(min(np.finfo(dtype).max for dtype in (np.float32, space.dtype)))
    bounds = (bound.astype(np.float64) for bound in (space.low, space.high))
    return tuple(np.clip(bound, -largest, largest).astype(np.float32) for bound in bounds)


def find_invalid(actions, bounds, ignored):
    """Return the first column of `actions` outside of action_range; None where there is none."""
    least, largest = bounds
    allowed = (least <= actions) & (actions <= largest)  # False for NaN, too
    if allowed.all():
        return None
    invalid = ~allowed.reshape(len(actions), -1).all(axis=1) & ~np.asarray(ignored)
    return int(invalid.argmax()) if invalid.any() else None


def to_action(space, action):
    """Return one action, as agents choose it, as one that `space` contains."""
    if isinstance(space, gym.spaces.Discrete):
        return int(action) + int(space.start)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return (action + space.start.astype(np.int64)).astype(space.dtype)
    # A float32 at a bound may be a little beyond that of a float64.
    return np.clip(action.astype(space.dtype), space.low, space.high)


def check_discrete(space):
    """Raise a FlagError that names the programs for other actions."""
    if not isinstance(space, gym.spaces.Discrete):
        others = "ppo.py and, if bounded, sac.py take" if isinstance(space, gym.spaces.Box) else ""
        raise FlagError(
            f"the action space is {space}, but Net chooses Discrete actions: "
            f"{others or 'ppo.py takes'} it; or edit Net and the loss (docs/environment.md)"
        )


def check_mask(observation_space, action_space):
    """Raise an EnvError if a Dict has an action mask that does not fit the actions."""
    if (
        not isinstance(observation_space, gym.spaces.Dict)
        or ACTION_MASK not in observation_space.spaces
    ):
        return
    mask = observation_space[ACTION_MASK]
    size = int(action_space.n) if isinstance(action_space, gym.spaces.Discrete) else None
    if size is None or mask.shape != (size,):
        raise EnvError(
            f"observation['{ACTION_MASK}'] is {mask}, but the action space is {action_space}: a "
            "mask has a number for each Discrete action; leave it out by --observation_keys, or "
            "rename the key"
        )


def random_actions(space, num_envs, random, frame=None):
    """Return a batch of actions of `space`, as agents choose them, from a NumPy generator.

    Args:
      frame: a batch of observations, whose action mask, if any, is obeyed.
    """
    if isinstance(frame, dict) and ACTION_MASK in frame:
        allowed = frame[ACTION_MASK] != 0
        return np.where(allowed, random.random(allowed.shape), -1).argmax(axis=1)
    actions, (least, largest) = empty_actions(space, num_envs), action_range(space)
    if isinstance(space, gym.spaces.Box):
        actions[:] = random.standard_normal(actions.shape)
        return np.clip(actions, least, largest)
    return random.integers(least, largest + 1, actions.shape)


def spaces_from_json(text):
    """Return observation space, action space and frame skip.

    Raises:
      EnvError: the text, which is not trusted, describes no spaces that can be used.
    """
    try:
        spaces = json.loads(text)
        if not _size(spaces["observation"]) <= MAX_BYTES:
            raise ValueError(f"observations take more than {MAX_BYTES:,} bytes")
        if not _size(spaces["action"] | {"dtype": "bool"}) <= MAX_ACTIONS:  # a byte an action
            raise ValueError(f"there are more than {MAX_ACTIONS:,} actions")
        observation_space, action_space = (
            space_from_dict(spaces[key]) for key in ("observation", "action")
        )
        frame_skip = spaces.get("frame_skip", 1)
        if type(frame_skip) is not int or not 1 <= frame_skip <= MAX_ACTIONS:
            raise ValueError("the frame skip is no positive number")
        if not _is_array(observation_space):
            raise ValueError("a dtype is none that tensors have")
        row_ranges(observation_space, action_space)
        json.dumps(spaces, ensure_ascii=False).encode()  # fails for keys that are not valid Unicode
    except Exception as error:  # gymnasium and NumPy raise all kinds
        problem = str(error) or type(error).__name__
        raise EnvError(f"spaces that cannot be used ({problem:.300}): {text[:200]!r}") from None
    return observation_space, action_space, frame_skip


def _size(d, depth=0):
    """Return the bytes of an observation of a space, a dict for JSON."""
    if depth > MAX_DEPTH:
        raise ValueError(f"they are more than {MAX_DEPTH} levels deep")
    if d["type"] in ("Dict", "Tuple"):
        spaces = d["spaces"]
        return sum(_size(s[1] if d["type"] == "Dict" else s, depth + 1) for s in spaces)
    if d["type"] == "MultiDiscrete":
        return sum(np.ravel(d["nvec"]).tolist())
    size = d["shape"] if d["type"] == "Box" else d["n"]
    if isinstance(size, list) and len(size) > MAX_DEPTH:  # whose product could take hours
        raise ValueError(f"there are more than {MAX_DEPTH} dimensions")
    size = math.prod(size) if isinstance(size, list) else size
    return size * np.dtype(d.get("dtype", bool)).itemsize


def row_ranges(observation_space, action_space):
    """Return bounds of rows of these environments, for ActorPool.

    A dict of frame and last_action, each a nest of arrays: [2, ...] of the least and the largest
    integers, [0, ...] where there is no limit. Floats have no bounds: environments that exceed
    those of their Box a little are common.
    """
    count_actions(action_space)
    return {"frame": _ranges(observation_space), "last_action": empty_actions(action_space, 0)}


def _ranges(space):
    if isinstance(space, gym.spaces.Dict):
        return {key: _ranges(s) for key, s in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_ranges(s) for s in space.spaces)
    if isinstance(space, gym.spaces.Discrete):
        start = int(space.start)
        return np.array([start, start + int(space.n) - 1], space.dtype)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return np.stack([space.start, space.start + (space.nvec - 1)]).astype(space.dtype)
    if isinstance(space, gym.spaces.MultiBinary):
        return np.stack([np.zeros(space.shape, space.dtype), np.ones(space.shape, space.dtype)])
    return empty_observation(space, 0)


def space_from_dict(d):
    """Return the space that libtorchbeast.spaces.space_to_dict turned into `d`."""
    spaces = gym.spaces
    if d["type"] == "Dict":
        return spaces.Dict([(key, space_from_dict(s)) for key, s in d["spaces"]])
    if d["type"] == "Tuple":
        return spaces.Tuple([space_from_dict(s) for s in d["spaces"]])
    if d["type"] == "Box":
        shape = tuple(d["shape"])
        low, high = (
            np.broadcast_to(np.array(d[bound], d["dtype"]), shape).copy()
            for bound in ("low", "high")
        )
        return spaces.Box(low, high, shape, np.dtype(d["dtype"]))
    if d["type"] == "Discrete":
        return spaces.Discrete(d["n"], start=d["start"], dtype=np.dtype(d["dtype"]).type)
    if d["type"] == "MultiDiscrete":
        return spaces.MultiDiscrete(d["nvec"], np.dtype(d["dtype"]), start=d["start"])
    if d["type"] == "MultiBinary":
        return spaces.MultiBinary(d["n"])
    raise EnvError(f"there is no space of type {d['type']!r}")
