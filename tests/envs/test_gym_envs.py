# SPDX-License-Identifier: Apache-2.0
"""Environments by their ids: which parts are observed, masks of `info`, and what is refused."""

import sys
import types

import ale_py
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

from atari_wrappers import create_atari, make_atari
from beast.envs import gym_envs
from beast.envs.environments import Environments, try_out
from beast.envs.spaces import check_discrete
from beast.errors import EnvError, FlagError


class Any(gym.Env):
    """An environment of any space; without a render_mode."""

    def __init__(self, space, info, action_space):
        self.observation_space, self.info = space, info
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), dict(self.info)

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, dict(self.info)


gym.register("Any-v0", Any)
BOX = Box(-1, 1, (3,))


def create(monkeypatch, space, info=(), keys=None, action_space=None, render_mode=None):
    arguments = {"space": space, "info": dict(info), "action_space": action_space or Discrete(4)}
    monkeypatch.setattr(gym.registry["Any-v0"], "kwargs", arguments)
    gym_envs.masks_in_info.clear()
    return gym_envs.create(
        types.SimpleNamespace(env="Any-v0", render_mode=render_mode, observation_keys=keys)
    )


class Rendered(Any):
    def __init__(self, render_mode, **kwargs):
        super().__init__(**kwargs)
        self.render_mode = render_mode


def test_a_render_mode_is_given_only_where_it_is_needed(monkeypatch):
    create(monkeypatch, BOX)
    monkeypatch.setattr(gym.registry["Any-v0"], "entry_point", Rendered)
    assert create(monkeypatch, BOX).unwrapped.render_mode is None


class NetHack(gym.Env):
    """As nle.env.NLE: at its own limit it quits the game, and shows an empty screen."""

    StepStatus = None
    observation_space, action_space = Box(0, 9, (2,), np.int32), Discrete(2)
    _max_episode_steps = 5.0  # of some a float

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.num_steps = 0
        return np.array([1, 1], np.int32), {}

    def step(self, action):
        self.num_steps += 1
        is_over = self.num_steps == self._max_episode_steps
        return np.array([0, 0] if is_over else [1, 1], np.int32), 0.0, is_over, False, {}


def test_a_time_limit_of_nethack_is_no_death():
    gym.register("Limited-v0", NetHack)
    env = gym_envs.make("Limited-v0")
    env.reset()
    rows = [env.step(0) for _ in range(4)]
    assert [(terminated, truncated) for *_, terminated, truncated, _ in rows] == (
        [(False, False)] * 3 + [(False, True)]
    )
    assert rows[-1][0].tolist() == [1, 1]


def test_a_time_limit_of_minihack_is_no_death():
    pytest.importorskip("minihack")
    env = gym_envs.make("minihack:MiniHack-Room-5x5-v0", observation_keys=("blstats",))
    env.reset(seed=1)
    north = env.unwrapped.actions.index(ord("k"))  # to the wall, and then against it
    for _ in range(1000):
        frame, _, terminated, truncated, _ = env.step(north)
        if terminated or truncated:
            break
    assert truncated and not terminated and frame["blstats"].any()


def test_a_mask_in_info_becomes_a_part_of_the_observation(monkeypatch):
    mask = np.array([0, 1, 1, 0], np.int8)
    for space, keys in ((BOX, {"observation"}), (Dict(a=BOX, b=Discrete(2)), {"a", "b"})):
        env = create(monkeypatch, space, {"action_mask": mask.astype(bool)})
        assert env.observation_space["action_mask"] == MultiBinary(4)
        assert set(env.observation_space) == keys | {"action_mask"}
        for observation in (env.reset(seed=1)[0], env.step(1)[0]):
            assert env.observation_space.contains(observation)
            assert observation["action_mask"].tolist() == [0, 1, 1, 0]
    assert create(monkeypatch, BOX).observation_space == BOX


def test_a_step_without_the_mask_is_named_but_for_the_last_one(monkeypatch):
    env = create(monkeypatch, BOX, {"action_mask": np.ones(4)})
    env.reset()
    inner = env.unwrapped
    monkeypatch.setattr(inner, "step", lambda a: (BOX.sample(), 0.0, a == 1, False, {}))
    assert env.step(1)[0]["action_mask"].all()
    monkeypatch.setattr(inner, "info", {"action_mask": np.array([0, 1, 0, 1])})
    env.reset()  # what an end leaves out is as in the step before, for the value of a cut episode
    assert env.step(1)[0]["action_mask"].tolist() == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="info has no 'action_mask' in this step"):
        env.step(0)


def test_a_mask_that_the_net_does_not_get_is_told(monkeypatch, caplog):
    env = create(monkeypatch, BOX)
    env.unwrapped.info["action_mask"] = np.ones(4)
    try_out(Environments(lambda: env, 1, 1))
    assert "info has an action_mask, but the observation has none" in caplog.text
    parts = create(monkeypatch, BOX, action_space=MultiDiscrete([2, 2]))
    parts.unwrapped.info["action_mask"] = np.ones(4)
    try_out(Environments(lambda: parts, 1, 1))
    assert "which is ignored: it is for Discrete actions alone" in caplog.text


def test_the_first_reset_is_with_the_seed_of_the_copy(monkeypatch):
    seeds, reset = [], Any.reset
    monkeypatch.setattr(
        Any, "reset", lambda self, seed=None, **kw: seeds.append((self, seed)) or reset(self)
    )
    environments = Environments(lambda: create(monkeypatch, BOX), 2, 5)
    environments.initial()
    played = [env.unwrapped for env in environments.envs]
    assert [seed for env, seed in seeds if env in played] == environments.seeds


def test_no_two_copies_are_alive_at_once(monkeypatch):
    class Single(Any):
        alive = 0

        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            Single.alive += 1
            assert Single.alive == 1, "the port is in use"

        def close(self):
            Single.alive -= 1

    monkeypatch.setattr(gym.registry["Any-v0"], "entry_point", Single)
    create(monkeypatch, BOX, {"action_mask": np.ones(4)}).close()
    create(monkeypatch, BOX).close()
    create(monkeypatch, BOX, action_space=Box(-1, 1, (2,))).close()
    assert Single.alive == 0


def test_what_cannot_be_rendered_or_is_a_game_is_told(monkeypatch):
    with pytest.raises(FlagError, match="Any-v0 cannot be rendered: it takes no render_mode"):
        create(monkeypatch, BOX, render_mode="human")
    flags = types.SimpleNamespace(env="PongNoFrameskip-v4", observation_keys="image")
    with pytest.raises(FlagError, match="PongNoFrameskip-v4 is a game of Atari: dqn.py"):
        gym_envs.create(flags)
    with pytest.raises(FlagError, match="--observation_keys is image, but an Atari game shows one"):
        create_atari(flags)


def test_a_game_without_its_version_is_not_played_unprocessed():
    name = "PongNoFrameskip"
    flags = types.SimpleNamespace(env=name, render_mode=None, observation_keys=None)
    assert not gym_envs.is_game(name)
    with pytest.raises(FlagError, match=f"is ale-py's {name}-v4: give --env {name}-v4"):
        gym_envs.create(flags)


def test_a_module_may_register_a_game(monkeypatch, tmp_path):
    register = 'gym.register("Hard-v0", "ale_py.env:AtariEnv", kwargs={"game": "pong", "mode": 1})'
    (tmp_path / "hard_games.py").write_text(f"import gymnasium as gym\n{register}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert gym_envs.is_game("hard_games:Hard-v0")
    env = make_atari("hard_games:Hard-v0")
    assert env.unwrapped.spec.kwargs["mode"] == 1
    with pytest.raises(FlagError, match="no_such_module cannot be imported: No module named"):
        gym_envs.is_game("no_such_module:PongNoFrameskip-v4")


def test_a_subclass_of_a_game_is_an_environment_like_any_other(monkeypatch):
    class Shaped(ale_py.AtariEnv):
        """Has a `step` of its own."""

    for entry_point, is_game in ((Shaped, False), (ale_py.AtariEnv, True)):
        monkeypatch.setitem(
            gym.registry, "A-v0", gym.envs.registration.EnvSpec("A-v0", entry_point)
        )
        assert gym_envs.is_game("A-v0") == is_game


def test_only_games_of_atari_need_ale_py(monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    assert not gym_envs.is_game("CartPole-v1")
    for env_id in ("PongNoFrameskip-v4", "ALE/Pong-v5"):
        with pytest.raises(FlagError, match=f"{env_id} needs a package: pip install ale-py"):
            gym_envs.is_game(env_id)


@pytest.mark.parametrize(("space", "program"), [(BOX, "sac.py"), (MultiDiscrete([2]), "ppo.py")])
def test_other_actions_are_refused_with_who_takes_them(space, program):
    with pytest.raises(FlagError, match=f"the action space is .*{program}"):
        check_discrete(space)


def test_a_mask_of_another_length_is_refused(monkeypatch):
    env = create(monkeypatch, BOX, {"action_mask": np.ones(3, np.int8)})
    with pytest.raises(ValueError, match=r"has the shape \[3\], but there are 4 actions"):
        env.reset()
    for space, actions in ((Dict(a=BOX, action_mask=BOX), None), (Dict(action_mask=BOX), BOX)):
        with pytest.raises(EnvError, match=r"observation\['action_mask'\] is Box.*but the action"):
            Environments(lambda s=space, a=actions: create(monkeypatch, s, (), None, a), 1, 1)


def test_text_is_refused_by_its_key_which_a_flag_leaves_out(monkeypatch):
    space = Dict(image=BOX, mission=Text(9), turn=Discrete(4))
    with pytest.raises(EnvError, match=r"observation\['mission'\] is .*--observation_keys image,t"):
        Environments(lambda: create(monkeypatch, space), 1, 1)
    assert set(create(monkeypatch, space, (), "image,turn").observation_space) == {"image", "turn"}
    masked = Dict(a=BOX, b=BOX, action_mask=MultiBinary(4))  # a mask is always kept
    assert set(create(monkeypatch, masked, (), "a").observation_space) == {"a", "action_mask"}
    env = create(monkeypatch, space, (), "image")
    assert env.observation_space == BOX and BOX.contains(env.reset()[0])
    with pytest.raises(FlagError, match="has board, but .*: name some of image, mission, turn"):
        create(monkeypatch, space, (), "image,board")
    with pytest.raises(FlagError, match="has image, but .*: leave the flag out"):
        create(monkeypatch, BOX, (), "image")


def test_try_out_obeys_masks(monkeypatch):
    env = create(monkeypatch, BOX, {"action_mask": np.array([0, 0, 1, 0], np.int8)})
    actions = []
    monkeypatch.setattr(env, "step", lambda a, step=env.step: actions.append(a) or step(a))
    try_out(Environments(lambda: env, 1, 1))
    assert set(actions) == {2}


@pytest.mark.parametrize(
    "space", [BOX, Discrete(3), MultiBinary(3), Tuple([Discrete(3), Dict(a=BOX)])], ids=str
)
def test_spaces_are_observed_as_they_are(monkeypatch, space):
    environments = Environments(lambda: create(monkeypatch, space), 2, 1)
    try_out(environments)
    assert environments.observation_space == space
