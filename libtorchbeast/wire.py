# SPDX-License-Identifier: Apache-2.0
"""Messages of rpcenv.proto from and to nests of NumPy arrays: the server's side.

Everything received from a client is checked; a ValueError says what is wrong.
"""

import functools
import math
import re
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from libtorchbeast import MAX_ENVS, rows, rpcenv_pb2

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 256 * 2**20  # of a Step
MAX_ACTION_BYTES = 4 * 2**20  # of an Action: with 4,096 environments, 1,024 each
MAX_METADATA_BYTES = 8192
MAX_NEST_DEPTH = 32
MAX_NEST_ITEMS = 1000  # in all, since an empty one is 2 bytes in a message, but 200 here

_DTYPES = [np.dtype(name.lower()) for name in rpcenv_pb2.DType.keys()]
_STEP_FIELDS = rpcenv_pb2.Step.DESCRIPTOR.fields_by_name
FIELDS = {key: (_STEP_FIELDS[key].number, dtype) for key, dtype in rows.DTYPES.items()}
# Numbers of a Step's other fields.
_HANDSHAKE, _OBSERVATION, _IS_FULL, _FULL, _LAST_ACTION_ARRAY = 1, 2, 13, 14, 16


class StreamOptions(NamedTuple):
    """Options of a stream, which the learner sends as metadata."""

    num_envs: int | None  # N; None: as the server likes
    seed: list[int] | None
    newest_frame_only: bool
    truncated_rows: bool


def read_stream_options(metadata):
    """Return the StreamOptions in a dict of metadata. Raises ValueError."""

    def read(name, pattern, what, default=None):
        text = metadata.get(name, default)
        if text is not None and not re.fullmatch(pattern, text):
            raise ValueError(f"{name} is {text[:100]!r}; it should be {what}")
        return text

    num_envs = read("num-envs", "[0-9]{1,9}", f"a number from 1 to {MAX_ENVS}")
    if num_envs is not None and not 1 <= int(num_envs) <= MAX_ENVS:
        raise ValueError(f"num-envs is {num_envs}; it should be from 1 to {MAX_ENVS}")
    seed = read("seed", "[0-9]{1,40}(,[0-9]{1,40}){,31}", "up to 32 numbers separated by commas")
    return StreamOptions(
        num_envs and int(num_envs),
        seed and [int(number) for number in seed.split(",")],
        read("newest-frame-only", "[01]", "0 or 1", "0") == "1",
        read("truncated-rows", "[01]", "0 or 1", "0") == "1",
    )


class Refusal(Exception):
    """The learner does not use the environments; the message says why."""


def decode_actions(request, num_envs, likeness):
    """Return the nest of arrays [N, ...] in a serialized Action. Raises ValueError and Refusal.

    Args:
      likeness: an array: the action must be one, too, of its shape, and of integers or floats as
        it is. None: the action may be any nest.
    """
    try:
        action = rpcenv_pb2.Action.FromString(request)
    except DecodeError as error:
        raise ValueError(f"the message is not an Action: {error}") from None
    if action.refusal:
        raise Refusal(f"{action.refusal:.500}")
    if not action.HasField("action"):
        raise ValueError("the message has no action")
    actions = _decode_nest(action.action, num_envs, MAX_NEST_DEPTH, [MAX_NEST_ITEMS])
    if likeness is not None:
        if not isinstance(actions, np.ndarray):
            raise ValueError("the action should be one array, but is a nest of them")
        kind, kinds = ("floats", "f") if likeness.dtype.kind == "f" else ("integers", "iu")
        if actions.shape != likeness.shape or actions.dtype.kind not in kinds:
            raise ValueError(
                f"the action should be {kind}{list(likeness.shape)}, "
                f"but is {actions.dtype}{list(actions.shape)}"
            )
    return actions


class ActionDecoder:
    """Decodes a stream's Actions as decode_actions does; faster if they keep their layout."""

    def __init__(self, num_envs, likeness):
        self._num_envs, self._likeness = num_envs, likeness
        self._last = None  # the last action, if it was an array
        self._head = b""  # of its message: all that stands before the data

    def decode(self, request):
        last, head = self._last, self._head
        if last is not None and len(request) == len(head) + last.nbytes:
            if request.startswith(head):
                return np.ndarray(last.shape, last.dtype, bytearray(request[len(head) :]))
        actions = decode_actions(request, self._num_envs, self._likeness)
        # The bytes of bools have to be checked each time.
        if isinstance(actions, np.ndarray) and actions.nbytes and actions.dtype != np.bool_:
            if request.endswith(actions.tobytes()):
                self._last, self._head = actions, request[: -actions.nbytes]
        return actions


def _decode_nest(nest, num_envs, depth, items_left):
    if depth == 0:
        raise ValueError(f"the action is a nest of more than {MAX_NEST_DEPTH} levels")
    if nest.HasField("array"):
        if nest.items or nest.keys:
            raise ValueError("a nest in the action is an array and has items as well")
        return _decode_array(nest.array, num_envs)
    items_left[0] -= len(nest.items)
    if items_left[0] < 0:
        raise ValueError(f"a nest in the action has more than {MAX_NEST_ITEMS} items")
    items = tuple(_decode_nest(item, num_envs, depth - 1, items_left) for item in nest.items)
    if not nest.keys:
        return items
    if len(nest.keys) != len(items) or len(set(nest.keys)) != len(items):
        keys = str(nest.keys[:10])[:100]
        raise ValueError(f"a dict in the action has {len(items)} items for the keys {keys}")
    return dict(zip(nest.keys, items, strict=True))


def _decode_array(array, num_envs):
    """Return a writable array with memory of its own."""
    shape, data = tuple(array.shape), array.data
    if not 0 <= array.dtype < len(_DTYPES):
        raise ValueError(f"an array in the action has the unknown dtype {array.dtype}")
    dtype = _DTYPES[array.dtype]
    if not shape or shape[0] != num_envs or min(shape) < 0 or len(shape) > MAX_NEST_DEPTH:
        raise ValueError(
            f"an array in the action has the shape {list(shape)[:100]}, "
            f"but there are {num_envs} environments"
        )
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"an array in the action has {len(data)} bytes of data, but is {dtype}{list(shape)}"
        )
    if dtype == np.bool_ and data.strip(b"\0\1"):
        raise ValueError("an array in the action is bool, but has bytes other than 0 and 1")
    return np.ndarray(shape, dtype, bytearray(data))


class RowEncoder:
    """Serializes rows as Steps.

    Written by hand: the protobuf classes copy each array three times. A message is its fields one
    after the other, so that each array goes straight from where it lies to its place.
    """

    def __init__(self, environments, newest_frame_only):
        self._num_envs = environments.num_envs
        self._spaces = environments.spaces
        self._stack_size = environments.stack_size if newest_frame_only else 0

    def encode_first(self, row, env):
        """Return the very first row as a serialized Step with the handshake.

        Args:
          env: the name of what is played; empty where it has none.
        """
        frame, K = row["frame"], self._stack_size
        if not (isinstance(frame, np.ndarray) and frame.ndim > 1 and frame.size > 0):
            self._stack_size = 0
        elif K < 2 or frame.shape[1] % K != 0:
            self._stack_size = 0
        else:
            self._stacks = _Stacks(frame, K)
        handshake = rpcenv_pb2.Handshake(
            protocol_version=PROTOCOL_VERSION,
            num_envs=self._num_envs,
            spaces=self._spaces,
            stack_size=self._stack_size,
            env=env,
        ).SerializeToString()
        return self.encode(row, [_head(_HANDSHAKE, len(handshake)), handshake])

    def encode(self, row, parts=()):
        """Return the row as a serialized Step."""
        parts = list(parts)
        for key, (number, dtype) in FIELDS.items():
            if key == "last_action" and row[key].ndim > 1:
                array = np.ascontiguousarray(row[key])
                parts += _array_head(_LAST_ACTION_ARRAY, array.dtype, array.shape), array
                continue
            array = np.ascontiguousarray(row[key], dtype)
            parts += _head(number, array.nbytes), array
        frame, full = row["frame"], ()
        if self._stack_size:
            frame, is_full, full = self._stacks.split(frame)
            parts += _head(_IS_FULL, is_full.nbytes), is_full
            if len(full):
                parts += _array_head(_FULL, full.dtype, full.shape), full
        num_bytes = _append_nest(_OBSERVATION, frame, parts) + getattr(full, "nbytes", 0)
        if num_bytes > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"the observations of {self._num_envs} environments are {num_bytes} bytes, but a "
                f"message has at most {MAX_MESSAGE_BYTES}: take fewer environments a stream"
            )
        return b"".join(parts)


class _Stacks:
    """Splits stacks of K frames into the newest frames and those of the row before.

    Args:
      stacks: the first of them, [N, K * C, ...].
    """

    def __init__(self, stacks, stack_size):
        self._stack_size = stack_size
        self._channels = stacks.shape[1] // stack_size
        self._frame_bytes = stacks.nbytes // len(stacks) // stack_size
        # Compared as bytes, that is, to the last bit; many at once where possible.
        size = next(size for size in (8, 4, 2, 1) if self._frame_bytes % size == 0)
        self._word = np.dtype(f"u{size}")
        self._newest_words = self._frame_bytes // size
        self._before = None  # all but the oldest frame of the row before

    def split(self, stacks):
        """Return the newest frames, which columns need whole stacks, and these stacks."""
        N = len(stacks)
        stacks = np.ascontiguousarray(stacks)
        words = stacks.reshape(N, -1).view(self._word)
        if self._before is None:
            is_full = np.ones(N, bool)
            self._before = words[:, self._newest_words :].copy()
        else:
            is_full = (words[:, : -self._newest_words] != self._before).any(axis=1)
            self._before[...] = words[:, self._newest_words :]
        return stacks[:, -self._channels :], is_full, stacks[is_full]


def _append_nest(number, nest, parts):
    """Append a field that is a Nest to the parts of a message; return their length in bytes."""
    if not isinstance(nest, (dict, tuple)):
        array = np.ascontiguousarray(nest)
        head = _leaf_head(number, array.dtype, array.shape)
        parts += head, array
        return len(head) + array.nbytes
    at, num_bytes = len(parts), 0
    parts.append(None)  # the head, once it is known of how many bytes
    for item in nest.values() if isinstance(nest, dict) else nest:
        num_bytes += _append_nest(2, item, parts)
    for key in nest if isinstance(nest, dict) else ():
        if not isinstance(key, str):
            raise TypeError(f"an observation has the key {key!r}; it should be a string")
        key = key.encode()
        parts += _head(3, len(key)), key
        num_bytes += len(parts[-2]) + len(key)
    parts[at] = _head(number, num_bytes)
    return len(parts[at]) + num_bytes


@functools.lru_cache(1024)
def _head(number, num_bytes):
    """Return the header of a field of so many bytes: its number, wire type 2, the length."""
    head = bytearray()
    for value in (number << 3 | 2, num_bytes):
        while value > 127:
            head.append(value & 127 | 128)
            value >>= 7
        head.append(value)
    return bytes(head)


@functools.lru_cache(1024)
def _array_head(number, dtype, shape):
    """Return the header of a field that is an Array."""
    if dtype not in _DTYPES:
        raise TypeError(f"an array of {dtype} cannot be sent; only numbers and bools can")
    num_bytes = math.prod(shape) * dtype.itemsize
    array = rpcenv_pb2.Array(dtype=_DTYPES.index(dtype), shape=shape).SerializeToString()
    array += _head(3, num_bytes)
    return _head(number, len(array) + num_bytes) + array


@functools.lru_cache(1024)
def _leaf_head(number, dtype, shape):
    """Return the header of a field that is a Nest of one array."""
    head = _array_head(1, dtype, shape)
    return _head(number, len(head) + math.prod(shape) * dtype.itemsize) + head
