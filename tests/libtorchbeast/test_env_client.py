# SPDX-License-Identifier: Apache-2.0
"""EnvClient: programs that own their loop, with real learners' pools."""

import contextlib
import itertools
import subprocess
import sys
import threading

import counting
import gymnasium as gym
import numpy as np
import pytest
import torch
from counting import free_address
from deadline import Thread, wait_until
from dialing import Port
from program import ROOT
from rig import STATE, Rig, T, act_zero, answer, check_rows

from libtorchbeast import EnvClient
from libtorchbeast.spaces import spaces_to_json

pytestmark = pytest.mark.timeout(120, method="thread")

NUMBER, THREE = gym.spaces.Box(0, 2**62, (1,), np.int64), gym.spaces.Discrete(3)


class Learner(Port):
    """A port, and the rig that uses it once `play` is called."""

    rig = None

    def play(self, agent=act_zero, state=(), **options):
        options = {"dict_outputs": True, "num_envs": 1, "listener": self.listener} | options
        self.rig = Rig([], agent, state, **options)
        return self.rig

    def close(self):
        if self.rig is not None:
            self.rig.close()
        super().close()


class Gate:
    """An agent that answers as often as it is let; its actions are 1, 2, 0, 1, 2, ..."""

    def __init__(self):
        self.semaphore, self.count = threading.Semaphore(0), 0

    def __call__(self, env_outputs, state):
        assert self.semaphore.acquire(timeout=60)
        self.count += 1
        action = torch.full(env_outputs["reward"].shape, self.count % 3)
        return {"action": action}, state


@pytest.fixture
def learner():
    with Learner() as learner:
        yield learner


@pytest.fixture
def gated(learner):
    """A learner that is late: rig, its gate, and a client of it that observes a number."""
    gate = Gate()
    rig = learner.play(gate)
    with EnvClient(learner.address, NUMBER, THREE) as client:
        yield rig, gate, client
        gate.semaphore.release(10**6)


def play_episodes(client, env, count=None):
    """Play episodes of an environment of Gymnasium."""
    for _ in itertools.repeat(None) if count is None else range(count):
        action = client.reset(env.reset()[0])
        while action is not None:
            *outcome, _ = env.step(action)
            action = client.step(*outcome)


def take(gate, client, count=1):
    """Have the learner answer so many rows; return the next action."""
    gate.semaphore.release(count)
    actions = []
    wait_until(lambda: actions.append(client.poll()) or actions[-1] is not None)
    return actions[-1]


@pytest.mark.parametrize("env_class", [counting.Counting, counting.Truncated])
def test_rows_are_those_of_any_environment(learner, env_class):
    env, rig = env_class(), learner.play(answer, STATE)
    with EnvClient(learner.address, env.observation_space, env.action_space) as client:
        Thread(play_episodes, client, env, 4).result()
        rollouts = rig.columns(3)
        play = Thread(play_episodes, client, env)
        rollouts += rig.columns(3)
        client.close()
    with pytest.raises(ConnectionError, match="closed"):
        play.result()
    for column in rollouts:
        check_rows(*column, truncates=env.truncates)
    assert rollouts[0][0]["frame"][0].tolist() == [env.id, 0, 0, 0]
    for last, first in itertools.pairwise(rollouts):
        assert last[0]["frame"][-1].tolist() == first[0]["frame"][0].tolist()


@pytest.mark.parametrize(
    ("space", "chosen", "received"),
    [
        (gym.spaces.Discrete(5, start=-2, dtype=np.int32), 4, 2),
        (gym.spaces.MultiDiscrete([3, 5], np.int8, start=[1, 0]), [2, 4], [3, 4]),
        (gym.spaces.Box(-1, 1, (2,)), [0.5, 7], [0.5, 1]),
        (gym.spaces.Box(np.float32([-1, 0]), np.float32([1, 2])), [0.5, 7], [0.5, 2]),
        (gym.spaces.Box(-0.1, 0.1, (1,), np.float64), [0.5], [0.1]),
    ],
)
def test_actions_are_of_their_space(learner, space, chosen, received):
    def agent(env_outputs, state):
        dtype = torch.float32 if isinstance(space, gym.spaces.Box) else torch.int64
        return {"action": torch.tensor([[chosen]], dtype=dtype)}, state

    env, rig = counting.Mirror(space), learner.play(agent)
    with EnvClient(learner.address, env.observation_space, space) as client:
        action = Thread(client.reset, env.reset()[0]).result()
        assert action in space and np.asarray(action).tolist() == received
        for _ in range(T):
            Thread(client.step, action, 0).result()
        (rows, _), _ = rig.take()
    assert rows["last_action"][0].sum() == 0
    assert rows["last_action"][1:, 0].tolist() == [chosen] * T
    assert rows["frame"][1, 0].tolist() == received


def test_a_late_action_counts_for_the_row_it_took_effect_in(gated):
    rig, gate, client = gated
    client.observe([0], 5)  # a reward that no action has earned
    wait_until(lambda: client.poll() or rig.pool.num_connected())
    assert take(gate, client) == 1
    client.observe([1], 1)
    client.observe([2], 10)
    client.observe([3], 100)
    assert client.poll() is None
    assert take(gate, client) == 2
    client.observe([4], 1000)
    # It ends before its action has come, which is then in force where the next episode begins.
    client.observe([5], 1)
    client.observe(None, 2, terminated=True)
    client.observe([6], 10)
    assert take(gate, client) == 0
    client.observe([7], 100)
    assert take(gate, client) == 1
    client.observe([8], 1000)
    # The same at a time limit.
    client.observe([9], 5, truncated=True)
    client.observe([10], 7)
    assert take(gate, client) == 2
    client.observe([11], 70)
    assert take(gate, client, 2) == 1  # the answer to the extra row is ignored
    client.observe([12], 700)
    # An episode that is over before its first row is left out.
    client.observe(None, 1, terminated=True)
    client.observe([13], 50)
    client.observe([14], 50, truncated=True)
    client.observe([15], 3)
    assert take(gate, client) == 2
    client.observe([16], 30)
    (first, _, _), (second, _, _) = rig.columns(2)
    rows = {key: first[key].tolist() + second[key][1:].tolist() for key in first}
    frames = [frame for (frame,) in rows["frame"]]
    assert frames == [0, 1, 4, 7, 8, 9, 11, 12, 16]
    assert rows["last_action"] == [0, 1, 2, 0, 1, 2, 2, 1, 2]
    assert rows["reward"] == [0, 1, 1110, 3, 1110, 5, 0, 777, 1]
    assert [frames[t] for t in range(9) if rows["done"][t]] == [0, 7, 11, 16]
    assert [frames[t] for t in range(9) if rows["truncated"][t]] == [9]
    assert not any(rows["terminated"])
    assert rows["episode_return"] == [0, 1, 1111, 1114, 1110, 1115, 1115, 777, 778]
    assert rows["episode_step"] == [0, 1, 2, 3, 1, 2, 2, 1, 2]


def test_reset_waits_for_an_action_of_its_own_episode(gated):
    rig, gate, client = gated
    client.observe([0])
    wait_until(lambda: client.poll() or rig.pool.num_connected())
    client.observe(None, 0, terminated=True)
    reset = Thread(client.reset, [1])
    gate.semaphore.release()
    reset.assert_blocked()
    gate.semaphore.release()
    assert reset.result() == 2


@pytest.mark.parametrize("waits", [True, False])
def test_a_learner_that_only_asks_for_the_spaces_is_not_noticed(learner, waits):
    """By a client that would otherwise raise an error."""
    with EnvClient(learner.address, NUMBER, THREE, env="Count", reconnect=False) as client:
        client.observe([7])
        if waits:
            acting = Thread(client.step, [8], 0)
        else:
            acting = Thread(wait_until, lambda: client.poll() is not None)
        handshake = learner.listener.query(None, 60)
        assert handshake["spaces"] == spaces_to_json(NUMBER, THREE, 1)
        assert handshake["env"] == "Count" and handshake["num_envs"] == 1
        rig = learner.play()
        acting.result()
        for i in range(T):
            Thread(client.step, [i], 1).result()
        ((rows, _, _),) = rig.columns(1)
    assert rows["frame"].flatten().tolist() == [8 if waits else 7, 0, 1, 2, 3]
    assert rows["done"].tolist() == [True, False, False, False, False]


def test_both_play_of_two_that_were_asked_for_the_spaces(learner):
    def make():
        return EnvClient(learner.address, NUMBER, THREE, env="Count", reconnect=False)

    with make() as first, make() as second:
        asking = Thread(learner.listener.query, None, 60)
        wait_until(lambda: None not in (first._newest, second._newest))
        acting = []
        for client in (first, second):
            client.observe([7])
            acting.append(Thread(wait_until, lambda client=client: client.poll() is not None))
            if client is first:
                assert asking.result()["env"] == "Count"
        learner.play()
        for thread in acting:
            thread.result()


def test_a_lost_learner_is_dialed_again(caplog):
    address = free_address()
    port = int(address.rpartition(":")[2])
    with EnvClient(address, NUMBER, THREE, auth_token="secret") as client:
        for number in range(3):
            with Learner(port=port, auth_token="secret") as learner:
                rig = learner.play()
                act = client.reset if number == 0 else lambda frame: client.step(frame, 100)
                assert Thread(act, [number]).result() == 0
                for _ in range(T):
                    Thread(client.step, [9], 1).result()
                ((rows, _, _),) = rig.columns(1)
            assert rows["frame"].flatten().tolist() == [number, 9, 9, 9, 9]
            assert rows["episode_return"].tolist() == [0, 1, 2, 3, 4]


def test_or_an_error_says_that_it_was_lost():
    with Learner() as learner:
        learner.play()
        client = EnvClient(learner.address, NUMBER, THREE, reconnect=False)
        assert Thread(client.reset, [0]).result() == 0
    with contextlib.closing(client), pytest.raises(ConnectionError, match=learner.address):
        for _ in range(3):
            Thread(client.step, [0], 0).result()
    with EnvClient(free_address(), NUMBER, THREE, reconnect=False) as client:
        with pytest.raises(ConnectionError, match="cannot be reached"):
            Thread(client.reset, [0]).result()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 8}, "asks for 8 environments.*--envs_per_stream 1"),
        (
            {"spaces": spaces_to_json(NUMBER, gym.spaces.Discrete(9), 1)},
            "action.n is 3.* 9",
        ),
        ({"env": "Chess"}, "plays Count, expected Chess"),
    ],
)
def test_a_refusal_is_raised(learner, options, message):
    rig = learner.play(**options)
    with EnvClient(learner.address, NUMBER, THREE, env="Count") as client:
        client.observe([0])
        for act in (client.step, client.step, lambda *_: wait_until(client.poll)):
            with pytest.raises(ConnectionError, match=message):
                Thread(act, [0], 0).result()
    rig.wait_for_event(message)


def test_a_learner_of_another_token_refuses():
    with Learner(auth_token="secret") as learner:
        with EnvClient(learner.address, NUMBER, THREE, auth_token="other") as client:
            with pytest.raises(ConnectionError, match="auth_token_file"):
                Thread(client.reset, [0]).result()


def test_close_wakes_what_waits(learner):
    before = threading.active_count()
    for is_there in (False, True):
        address = learner.address if is_there else free_address()
        client = EnvClient(address, NUMBER, THREE)
        reset = Thread(client.reset, [0])
        reset.assert_blocked()
        client.close()
        client.close()
        with pytest.raises(ConnectionError, match="the client is closed"):
            reset.result()
    wait_until(lambda: threading.active_count() <= before)


BAD = {
    "shape": (lambda client: client.observe([0, 0]), r"int64\[2\], but should be int64\[1\]"),
    "reward": (lambda client: client.observe([0], float("nan")), "the reward is nan"),
    "end": (lambda client: client.observe([0], 0, 7), "terminated is 7"),
    "step": (lambda client: client.step([0], 0), "call reset"),
    "reset": (lambda client: (client.observe([0]), client.reset([0])), "has not ended"),
    "address": (lambda client: EnvClient("here", NUMBER, THREE), "'here' should be host:port"),
    "spaces": (lambda client: EnvClient("a:1", NUMBER, {"type": "Discrete"}), "'dtype'"),
    "kind": (lambda client: EnvClient("a:1", NUMBER, gym.spaces.Text(3)), "Text.* cannot be sent"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_refused_at_once(learner, bad):
    act, message = BAD[bad]
    with EnvClient(learner.address, NUMBER, THREE) as client:
        with pytest.raises((ValueError, RuntimeError), match=message):
            act(client)


ALONE = """
import sys

sys.modules |= dict.fromkeys(["torch", "gymnasium", "beast", "libtorchbeast._C"])

from libtorchbeast import EnvClient

box = {"type": "Box", "shape": [1], "dtype": "int64", "low": 0, "high": 2**62}
client = EnvClient(sys.argv[1], box, {"type": "Discrete", "n": 3, "start": 0, "dtype": "int64"})
assert client.reset([1]) == 0 and client.step([2], 1.0) == 0
"""


@pytest.mark.whole
def test_a_program_without_gymnasium_plays_and_may_end_unclosed(learner):
    learner.play(spaces=spaces_to_json(NUMBER, THREE, 1))
    command = [sys.executable, "-c", ALONE, learner.address]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
