# SPDX-License-Identifier: Apache-2.0
"""Spaces as JSON, by which servers and learners compare and rebuild them: beast/envs/spaces.py."""

import json

import gymnasium as gym
import numpy as np
import pytest

from beast.envs.spaces import (
    EnvError,
    count_actions,
    empty_observation,
    row_ranges,
    space_from_dict,
    spaces_from_json,
)
from libtorchbeast.spaces import space_to_dict, spaces_to_json

SPACES = {
    "frames": gym.spaces.Box(0, 255, (4, 84, 84), np.uint8),
    "unbounded": gym.spaces.Box(-np.inf, np.inf, (3,)),
    "mixed": gym.spaces.Box(np.array([-0.1, -np.inf]), np.array([np.inf, 0.1]), dtype=np.float64),
    "no dimension": gym.spaces.Box(0, 1, ()),
    "empty": gym.spaces.Box(0, 1, (0, 3)),
    "large": gym.spaces.Box(0, 2**64 - 1, (2,), np.uint64),
    "half": gym.spaces.Box(0, 0.1, (2, 2), np.float16),
    "discrete": gym.spaces.Discrete(5, start=-2, dtype=np.int32),
    "multi-discrete": gym.spaces.MultiDiscrete([[2, 3], [4, 5]], np.int8, start=[[1, 0], [0, 1]]),
    "multi-binary": gym.spaces.MultiBinary([2, 3]),
    "binary": gym.spaces.MultiBinary(4),
    "nested": gym.spaces.Dict(
        {"b": gym.spaces.Discrete(2), "a": gym.spaces.Tuple([gym.spaces.Box(0, 1.1, (2,))])}
    ),
}


@pytest.mark.parametrize("name", SPACES)
def test_spaces_survive_json(name):
    space, action_space = SPACES[name], gym.spaces.Discrete(3)
    text = spaces_to_json(space, action_space, 4)
    assert "[[[" not in text  # bounds that are equal everywhere are one number
    again, *rest = spaces_from_json(text)
    assert rest == [action_space, 4]
    assert again == space and repr(again) == repr(space)
    assert again.dtype == space.dtype and again.shape == space.shape
    if isinstance(space, gym.spaces.Box):  # which is equal to what is nearly the same
        assert again.low.tobytes() == space.low.tobytes()
        assert again.high.tobytes() == space.high.tobytes()
    assert json.dumps(space_to_dict(again)) == json.dumps(space_to_dict(space))


def test_a_million_actions_and_no_more_can_be_sent():
    for n in (2**20, 2**20 + 1):
        text = spaces_to_json(SPACES["unbounded"], gym.spaces.Discrete(n), 1)
        if n == 2**20:
            assert spaces_from_json(text)[1].n == n
    with pytest.raises(EnvError, match="there are more than 1,048,576 actions"):
        spaces_from_json(text)


def test_keys_that_are_no_texts_are_refused():
    space = gym.spaces.Dict([(1, SPACES["binary"]), (0, SPACES["binary"])])
    with pytest.raises(EnvError, match=r"observation has keys that are no texts, \[1, 0\]: rename"):
        empty_observation(space, 1)


def test_spaces_that_cannot_be_sent_are_refused_by_name():
    with pytest.raises(ValueError, match=r"Text\("):
        space_to_dict(gym.spaces.Dict(text=gym.spaces.Text(5)))
    with pytest.raises(EnvError, match="'Graph'"):
        space_from_dict({"type": "Graph"})


BOX = {"type": "Box", "shape": [2], "dtype": "float32", "low": 0, "high": 1}
TWO = {"type": "Discrete", "n": 2, "start": 0, "dtype": "int64"}


@pytest.mark.parametrize(
    "odd",
    ["no JSON", "[" * 10**5, "null", "{}", {"observation": {}}, {"action": {"type": "Graph"}},
     {"observation": BOX | {"shape": [10**6, 10**6]}}, {"observation": BOX | {"shape": [10**30]}},
     {"observation": BOX | {"shape": [-1, 2]}}, {"observation": BOX | {"dtype": "O"}},
     {"observation": BOX | {"shape": 10**5 * [10]}},
     {"observation": BOX | {"low": 2}}, {"observation": BOX | {"low": [0, 0, 0]}},
     {"observation": {"type": "Tuple", "spaces": 9 * [BOX | {"shape": [2**23]}]}},
     {"observation": BOX | {"dtype": ">f4"}}, {"observation": BOX | {"dtype": "float128"}},
     {"observation": TWO | {"n": 10**12}}, {"action": TWO | {"n": 0}},
     {"action": TWO | {"n": 10**9}},
     {"action": TWO | {"start": 2**63 - 1}, "observation": TWO | {"start": 2**63 - 1}},
     {"action": {"type": "MultiDiscrete", "nvec": [9, 10**9], "start": [0, 0], "dtype": "int64"}},
     {"action": {"type": "MultiBinary", "n": [10**6, 10**6]}}, {"frame_skip": "4"}],
    ids=lambda odd: str(odd)[:60],
)  # fmt: skip
def test_spaces_that_cannot_be_are_one_line(odd):
    text = odd if isinstance(odd, str) else json.dumps({"observation": BOX, "action": TWO} | odd)
    with pytest.raises(EnvError, match=r"^spaces that cannot be used \(.+\): .+$"):
        spaces_from_json(text)


def test_ranges_are_those_of_integers():
    nested = {"a": gym.spaces.Discrete(3, start=-1), "b": gym.spaces.Tuple([SPACES["frames"]])}
    nested |= {"c": SPACES["multi-discrete"], "d": gym.spaces.MultiBinary(2)}
    ranges = row_ranges(gym.spaces.Dict(nested), gym.spaces.Box(-1, 1, (5,)))
    assert ranges["last_action"].shape == (0, 5) and ranges["last_action"].dtype == np.float32
    frame = ranges["frame"]
    assert frame["a"].tolist() == [-1, 1] and frame["d"].tolist() == [[0, 0], [1, 1]]
    assert frame["b"][0].shape == (0, 4, 84, 84) and frame["b"][0].dtype == np.uint8
    assert frame["c"].tolist() == [[[1, 0], [0, 1]], [[2, 2], [3, 5]]]
    assert frame["c"].dtype == np.int8


@pytest.mark.parametrize(
    "space",
    [gym.spaces.Box(-1, 1, (2, 2)), gym.spaces.Box(0, 9, (2,), np.int64), gym.spaces.Text(5),
     gym.spaces.MultiDiscrete([[2, 3], [4, 5]]), gym.spaces.Tuple([gym.spaces.Discrete(2)])],
)  # fmt: skip
def test_unsupported_action_spaces_are_refused(space):
    with pytest.raises(EnvError, match="(?s)the action space is .* only Discrete"):
        count_actions(space)


def test_an_observation_space_of_no_array_is_named_by_its_key():
    text, pair = gym.spaces.Text(5), gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.Text(5)])
    with pytest.raises(
        EnvError, match="the space of observation is Text.*by a wrapper in create_env"
    ):
        empty_observation(text, 1)
    message = r"observation\['pair'\]\[1\] is Text.*"
    with pytest.raises(EnvError, match=message + "by a wrapper in create_env"):
        empty_observation(gym.spaces.Dict(pair=pair), 1)
    with pytest.raises(EnvError, match=message + "by --observation_keys b,a$"):
        empty_observation(gym.spaces.Dict(pair=pair, b=pair[0], a=pair[0]), 1)
