# SPDX-License-Identifier: Apache-2.0
"""MonoBeast's rollout buffers, the batches made of them, and `act`, which fills them."""

import argparse
import shutil

import catch
import gymnasium as gym
import numpy as np
import pytest
import torch
from catch_env import Counter, Echo
from torch import nn

import monobeast
from beast.actors import rollout_buffers
from beast.actors.rollout_buffers import create_buffers
from beast.actors.weights import SharedWeights
from beast.errors import FlagError
from beast.learners.devices import autocast, to_float32
from beast.learners.nets import create_net
from beast.nest import map_nest

T, N = 20, 2
DISCRETE = gym.spaces.Discrete(3)


def make_flags(**overrides):
    flags = vars(monobeast.parser.parse_args([])) | {"env": "Catch", "seed": 7}
    flags |= {"num_actors": 1, "envs_per_actor": N, "batch_size": 2, "unroll_length": T}
    flags = argparse.Namespace(**flags | overrides)
    return monobeast.resolve(flags)


class FreeBuffers:
    """Has `act` fill the same buffers again and again, each time with newer weights.

    Attributes:
      rollouts: copies of what was filled, [N, T + 1, ...]; weights: with which, by version.
    """

    def __init__(self, flags, model, buffers, weights, count):
        self._model, self._buffers, self._weights, self._count = model, buffers, weights, count
        self._indices = np.arange(flags.envs_per_actor)
        self.rollouts, self.weights = [], []

    def __iter__(self):
        for _ in range(self._count):
            self.weights.append({k: v.clone() for k, v in self._model.state_dict().items()})
            yield self._indices
            self.rollouts.append(map_nest(lambda b: b[self._indices].clone(), self._buffers))
            with torch.no_grad():
                for parameter in self._model.parameters():
                    parameter += 0.05 * torch.randn(parameter.shape)
            self._weights.publish(self._model)

    def beat(self):
        pass


def act(count, net_class=catch.Net, env=None, **overrides):
    """Return flags and FreeBuffers, after `count` rollouts of N environments."""
    flags = make_flags(num_buffers=2 * N, **overrides)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(monobeast, "Net", net_class)
        if env is not None:
            monkeypatch.setattr(monobeast, "create_env", lambda flags: env())
        space = monobeast.create_env(flags).observation_space
        torch.manual_seed(flags.seed)
        model, answer = create_net(net_class, space, DISCRETE, use_lstm=flags.use_lstm)
        buffers, weights = create_buffers(flags, *answer), SharedWeights(model)
        free_buffers = FreeBuffers(flags, model, buffers, weights, count)
        catch._act(flags, 5, [flags.seed, 1, 0, 0], free_buffers, buffers, weights)
    assert len(free_buffers.rollouts) == count
    map_nest(lambda b: b.requires_grad and pytest.fail("a buffer requires grad"), buffers)
    return flags, free_buffers


def time_first(rollout):
    """Return rows [T + 1, N, ...] and initial agent state [layers, N, ...], as a learner does."""
    rows = map_nest(lambda x: x.transpose(0, 1), rollout["rows"])
    state = map_nest(lambda s: torch.cat(list(s), dim=1), rollout["initial_agent_state"])
    return rows, state


def check_answers(flags, played, net_class, tolerance):
    """Check that rollouts hold what the model answers, with the state that the learner sees."""
    last_rows = next_state = None
    for k, rollout in enumerate(played.rollouts):
        assert rollout["policy_version"].tolist() == [k] * N
        assert rollout["actor"].tolist() == [5] * N
        rows, state = time_first(rollout)
        model = net_class(gym.spaces.Box(0, 1, rows["frame"].shape[2:]), 3, flags.use_lstm)
        model.load_state_dict(played.weights[k])
        if k == 0:
            map_nest(lambda s, i: torch.testing.assert_close(s, i), state, model.initial_state(N))
        else:
            for key in rows:
                assert torch.equal(rows[key][0], last_rows[key]), key
            map_nest(lambda s, n: torch.testing.assert_close(s, n, **tolerance), state, next_state)
        with torch.no_grad(), autocast(flags, torch.device("cpu")):
            inputs = map_nest(lambda x: x[:-1], rows)
            outputs, next_state = to_float32(model(inputs, state))
        # The answer to a row stands in the next one, beside what came of it.
        for key in ("policy_logits", "baseline"):
            torch.testing.assert_close(rows[key][1:], outputs[key], **tolerance)
        last_rows = map_nest(lambda x: x[-1], rows)
    return rows, state


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("use_lstm", [False, True], ids=["feed-forward", "lstm"])
def test_rollouts_hold_the_answers_of_the_weights_they_name(use_lstm, precision):
    # In batches of other sizes, bfloat16 rounds otherwise.
    tolerance = {"rtol": 0.05, "atol": 0.02} if precision == "bf16" else {}
    flags, played = act(4, env=Echo, use_lstm=use_lstm, precision=precision)
    rows, state = check_answers(flags, played, catch.Net, tolerance)
    for key in ("policy_logits", "baseline"):
        in_bf16 = torch.equal(rows[key], rows[key].bfloat16().float())
        assert in_bf16 == (precision == "bf16")
    assert len(state) == (2 if use_lstm else 0) and all(s.any() for s in state)


class Aliasing(nn.Module):
    """Its state is the last frame, its baseline a part of the frame: no copies of its inputs."""

    def __init__(self, observation_space, num_actions, use_lstm=False):
        super().__init__()
        self.size = observation_space.shape[0]
        self.policy = nn.Linear(2 * self.size, num_actions)

    def initial_state(self, batch_size):
        return (torch.zeros(1, batch_size, self.size),)

    def forward(self, inputs, agent_state):
        x = inputs["frame"].float()  # which copies nothing
        policy_logits = self.policy(torch.cat([x, torch.cat([agent_state[0], x[:-1]])], dim=-1))
        action = policy_logits.argmax(-1)
        return {"policy_logits": policy_logits, "baseline": x[..., 1], "action": action}, (x[-1:],)


def test_a_net_may_return_its_inputs_as_state_and_outputs():
    flags, played = act(3, Aliasing, Counter, precision="fp32")
    check_answers(flags, played, Aliasing, {})
    # The state before row 0 is the frame of the row before it.
    first, second, _ = map(time_first, played.rollouts)
    assert torch.equal(second[1][0][0], first[0]["frame"][T - 1])


class LearnedState(Aliasing):
    """Has an initial state that is learned, and notes whether graphs are built."""

    graphs = []

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.state = nn.Parameter(torch.full((1, 1, self.size), 0.5))

    def initial_state(self, batch_size):
        return (self.state,) if batch_size == 1 else (self.state.expand(1, batch_size, -1),)

    def forward(self, inputs, agent_state):
        outputs, (state,) = super().forward(inputs, agent_state)
        state = state + 0 * self.state
        self.graphs.append(outputs["policy_logits"].requires_grad or state.requires_grad)
        return outputs, (state,)


@pytest.mark.parametrize("num_envs", [1, N])
def test_a_learned_initial_state_makes_no_buffer_require_grad(num_envs):
    LearnedState.graphs.clear()
    _, played = act(2, LearnedState, Counter, envs_per_actor=num_envs, precision="fp32")
    assert len(LearnedState.graphs) > 2 * T and not any(LearnedState.graphs)
    assert (played.rollouts[0]["initial_agent_state"][0] == 0.5).all()


@pytest.mark.parametrize("truncates", [False, True])
def test_actions_and_what_came_of_them_line_up(truncates):
    _, played = act(3, env=lambda: Echo(truncates=truncates))
    rollouts = [time_first(rollout)[0] for rollout in played.rollouts]
    rows = {k: torch.cat([r[k][min(i, 1) :] for i, r in enumerate(rollouts)]) for k in rollouts[0]}
    last, now = (
        map_nest(lambda x, part=part: x[part], rows) for part in (slice(-1), slice(1, None))
    )
    ended = last["truncated"]
    assert ended.any() == truncates and not now["terminated"].any()
    # The action in a row led to it, unless the row before was an extra one.
    expected = torch.where(ended, last["last_action"], now["action"])
    assert torch.equal(now["last_action"], expected) and len(expected.unique()) == 3
    # What the environment itself says of its episode, its step in it and its last action.
    episode, step, last_action = now["frame"].unbind(-1)
    assert torch.equal(last_action, expected.float())
    assert torch.equal(episode, now["done"].cumsum(0).float()) and episode.max() >= 5
    assert torch.equal(step == 0, now["done"])
    in_episode = ~now["done"]
    assert torch.equal(now["reward"][in_episode], step[in_episode])
    assert torch.equal(now["episode_step"][in_episode].float(), step[in_episode])
    reward = 0.0 if truncates else float(Echo().length)  # together with the reset, or before it
    assert (now["reward"][now["done"]] == reward).all()


def test_the_seed_reaches_environments_and_sampling():
    one, same, other = [act(1, seed=seed)[1].rollouts[0]["rows"] for seed in (1, 1, 2)]
    for key in one:
        assert torch.equal(one[key], same[key]), key
    for key in ("frame", "action"):
        assert not torch.equal(one[key], other[key]), key
        assert not torch.equal(one[key][0], one[key][1]), key  # of its two environments


def make_buffers(flags, use_lstm=True):
    space = catch.Catch().observation_space
    return create_buffers(flags, *create_net(catch.Net, space, DISCRETE, use_lstm=use_lstm)[1])


def test_too_few_buffers_are_refused_with_the_numbers():
    with pytest.raises(FlagError, match=r"num_buffers is 39, .* 4 x 8 .* = 8 .* at least 40"):
        make_flags(num_actors=4, envs_per_actor=8, batch_size=8, num_buffers=39)
    assert make_flags(num_actors=4, envs_per_actor=8, batch_size=8, num_buffers=40)
    assert make_flags(num_actors=4, envs_per_actor=8, batch_size=8).num_buffers == 48


@pytest.mark.parametrize(
    ("allocate", "message"),
    [
        (
            lambda: make_buffers(make_flags(num_buffers=1000), use_lstm=False),
            r"the rollout buffers need 2 MiB .* has 1 MiB left: .*--num_buffers \(1000\)",
        ),
        (
            lambda: SharedWeights(nn.Linear(500, 500)),
            "the weights of the net need 2 MiB of shared memory, but /dev/shm has 1 MiB .*docker",
        ),
    ],
    ids=["buffers", "weights"],
)
def test_buffers_too_large_for_shared_memory_are_refused_first(monkeypatch, allocate, message):
    usage = shutil.disk_usage("/dev/shm")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    monkeypatch.setattr(
        torch.Tensor, "share_memory_", lambda _: pytest.fail("memory was taken all the same")
    )
    with pytest.raises(FlagError, match=message):
        allocate()


@pytest.mark.parametrize("deterministic", [False, True])
def test_batches_are_copies_and_buffers_go_back_to_the_actors(deterministic):
    flags = make_flags(deterministic=deterministic, num_buffers=4)
    buffers, taken, released = make_buffers(flags), [[0, 1], [2, 3], [0, 1]], []
    turns = iter(taken)

    def take(count):
        assert count == 2
        return next(turns, None)

    actors = argparse.Namespace(take=take, release=released.extend)
    weights = argparse.Namespace(version=4)
    run = argparse.Namespace(device=torch.device("cpu"), weights=weights, follow=iter)
    for m in range(4):
        buffers["rows"]["baseline"][m] = m
        map_nest(lambda b, m=m: b[m].fill_(m), buffers["initial_agent_state"])
        buffers["policy_version"][m], buffers["actor"][m] = 10 + m, 20 + m
    batches = rollout_buffers.read_batches(flags, actors, buffers, run, run)
    for k, batch in enumerate(batches):
        before, now = (sum(taken[: k + i], []) for i in (0, 1))
        assert released == (before if deterministic else now)
        a, b = taken[k]
        assert batch.rows["baseline"].tolist() == [[a, b]] * (T + 1)
        assert batch.cpu_rows.keys() == batch.rows.keys() == buffers["rows"].keys()
        assert [s[..., 0].tolist() for s in batch.agent_state] == [[[a, b]]] * 2
        # With --deterministic, actors are asked for the version after which buffers came back.
        versions = [4, 4] if deterministic and k == 2 else [10 + a, 10 + b]
        assert batch.policy_versions == versions
        assert batch.sources == {"actors": [20 + a, 20 + b]}
        buffers["rows"]["baseline"][[a, b]] = -1.0  # by the next actor
        assert batch.rows["baseline"].tolist() == [[a, b]] * (T + 1)
        buffers["rows"]["baseline"][[a, b]] = torch.tensor([[a], [b]], dtype=torch.float32)
    assert k == 2 and released == sum(taken, [])
