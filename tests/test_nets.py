# SPDX-License-Identifier: Apache-2.0
"""What MonoBeast's Atari network promises, and which nets are refused for an environment."""

import inspect

import gymnasium as gym
import numpy as np
import pytest
import torch
from catch import AtariNet
from catch import Net as CatchNet

from beast import nets
from beast.errors import FlagError
from beast.nets import create_net

T, B, A = 6, 3, 5
SPACE = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
both = pytest.mark.parametrize("use_lstm", [False, True], ids=["feed-forward", "lstm"])


def make_net(use_lstm=False, space=SPACE, seed=0):
    """Return a network in eval mode whose answers differ clearly from row to row."""
    torch.manual_seed(seed)
    net = AtariNet(space, A, use_lstm)
    with torch.no_grad():
        net.policy.weight.normal_(std=0.2)
        net.baseline.weight.normal_(std=0.2)
    return net.eval()


def make_rows(num_rows=T, batch_size=B, space=SPACE, seed=0):
    rng = torch.Generator().manual_seed(seed)
    size = (num_rows, batch_size)
    return {
        "frame": torch.randint(256, (*size, *space.shape), generator=rng).to(torch.uint8),
        "reward": torch.randn(*size, generator=rng) / 2,
        "done": torch.zeros(*size, dtype=torch.bool),
        "last_action": torch.randint(A, size, generator=rng),
    }


def part(rows, *index):
    return {key: value[index] for key, value in rows.items()}


def assert_same(outputs, others):
    for key in ("policy_logits", "baseline"):
        torch.testing.assert_close(outputs[key], others[key], rtol=1e-4, atol=1e-4)


def differ(outputs, others, key="policy_logits"):
    return not torch.allclose(outputs[key], others[key], rtol=1e-3, atol=1e-3)


@both
def test_rows_at_once_are_answered_as_one_by_one(use_lstm):
    net, rows = make_net(use_lstm), make_rows()
    rows["done"][0] = True
    rows["done"][3, 1] = rows["done"][4, 2] = rows["done"][5, 2] = True
    outputs, last_state = net(rows, net.initial_state(B))
    state = net.initial_state(B)
    for t in range(T):
        answer, state = net(part(rows, slice(t, t + 1)), state)
        assert_same(answer, part(outputs, slice(t, t + 1)))
    for s, last in zip(state, last_state, strict=True):
        torch.testing.assert_close(s, last, rtol=1e-4, atol=1e-4)


def test_lstm_state_is_reset_at_done_inside_the_unroll_and_no_gradient_flows_over_it():
    net, rows = make_net(use_lstm=True), make_rows()
    state = tuple(torch.randn(s.shape, requires_grad=True) for s in net.initial_state(B))
    without, _ = net(rows, state)
    rows["done"][3, 1] = True
    outputs, _ = net(rows, state)
    before, after = (slice(None, 3), slice(None)), (slice(3, None), slice(1, 2))
    assert_same(part(outputs, *before), part(without, *before))
    # From there on it is as if the episode were all that ever was, and was not without `done`.
    fresh, _ = net(part(rows, *after), net.initial_state(1))
    assert_same(part(outputs, *after), fresh)
    assert differ(part(without, *after), fresh)
    others = (slice(3, None), [0, 2])
    assert_same(part(outputs, *others), part(without, *others))
    outputs["baseline"][3:].sum().backward()
    for s in state:
        assert not s.grad[:, 1].any()
        assert s.grad[:, 0].any() and s.grad[:, 2].any()


@both
def test_last_action_clipped_reward_and_frame_count_but_not_how_bright_it_is(use_lstm):
    net, rows = make_net(use_lstm), make_rows(1)
    outputs, _ = net(rows, net.initial_state(B))
    for key, value in (
        ("last_action", (rows["last_action"] + 1) % A),
        ("reward", rows["reward"] + 0.5),
        ("frame", rows["frame"].flip(-1)),
    ):
        answer, _ = net(rows | {key: value}, net.initial_state(B))
        assert differ(answer, outputs) and differ(answer, outputs, "baseline"), key
    one, _ = net(rows | {"reward": rows["reward"].sign()}, net.initial_state(B))
    many, _ = net(rows | {"reward": 250 * rows["reward"].sign()}, net.initial_state(B))
    assert_same(one, many)
    dark = rows | {"frame": rows["frame"] // 2}
    bright = rows | {"frame": dark["frame"] + 87}  # Pong's background
    assert_same(net(dark, net.initial_state(B))[0], net(bright, net.initial_state(B))[0])


SMALL = gym.spaces.Box(0, 255, (1, 36, 36), np.uint8)  # the least it takes


def test_eval_mode_takes_the_most_probable_action():
    net, rows = make_net(space=SMALL), make_rows(20, 50, SMALL)
    outputs, _ = net(rows, ())
    assert torch.equal(outputs["action"], outputs["policy_logits"].argmax(-1))
    assert len(outputs["action"].unique()) > 1


def test_training_mode_samples_by_the_probabilities():
    net, num_samples = make_net(space=SMALL).train(), 5_000
    torch.manual_seed(1)
    row = make_rows(1, 1, SMALL)
    rows = {key: value.expand(1, num_samples, *value.shape[2:]) for key, value in row.items()}
    with torch.no_grad():
        outputs, _ = net(rows, ())
    p = outputs["policy_logits"][0, 0].softmax(-1)
    assert p.max() < 0.95 and (p > 0.01).sum() > 2  # or there would be little to see
    frequencies = torch.bincount(outputs["action"].flatten(), minlength=A) / num_samples
    assert ((frequencies - p).abs() < 5 * (p * (1 - p) / num_samples).sqrt() + 1e-6).all()


@both
def test_gradients_reach_every_parameter_and_inputs_are_left_as_they_are(use_lstm):
    net, rows = make_net(use_lstm).train(), make_rows()
    for dtype in (torch.uint8, torch.float32):
        rows["frame"] = rows["frame"].to(dtype)
        before = {key: value.clone() for key, value in rows.items()}
        outputs, _ = net(rows, net.initial_state(B))
        for key in rows:
            assert torch.equal(rows[key], before[key]), key
    (outputs["baseline"].sum() + outputs["policy_logits"].square().sum()).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


FEATURES, DISCRETE = gym.spaces.Box(0, 1, (8,)), gym.spaces.Discrete(A)


@both
def test_a_net_is_created_with_its_answer_to_sample_rows(use_lstm):
    net, (rows, outputs, state) = create_net(AtariNet, SMALL, DISCRETE, use_lstm=use_lstm)
    assert net.num_actions == A and net.training
    assert rows["frame"].shape == (nets.T, nets.B, *SMALL.shape)
    assert {key: (value.shape, value.dtype) for key, value in outputs.items()} == {
        "policy_logits": ((nets.T, nets.B, A), torch.float32),
        "baseline": ((nets.T, nets.B), torch.float32),
        "action": ((nets.T, nets.B), torch.int64),
    }
    assert not outputs["policy_logits"].requires_grad
    initial_state = net.initial_state(nets.B)
    assert len(state) == (2 if use_lstm else 0) and not any(s.any() for s in initial_state)
    assert [s.shape for s in state] == [s.shape for s in initial_state]


@pytest.mark.parametrize(
    "space",
    [
        FEATURES,
        gym.spaces.Box(0, 255, (84, 84), np.uint8),
        gym.spaces.Box(0, 255, (4, 35, 84), np.uint8),
        gym.spaces.Box(0, 255, (84, 84, 4), np.uint8),  # channels last
        gym.spaces.Discrete(5),
        gym.spaces.Dict(frame=SPACE),
    ],
    ids=lambda space: str(space)[:30],
)
def test_observations_that_a_net_cannot_take_are_refused_with_space_and_file(space):
    with pytest.raises(FlagError) as error:
        create_net(AtariNet, space, DISCRETE)
    where = f"AtariNet in {inspect.getfile(AtariNet)} cannot be made for frames"
    for text in (where, str(space), "docs/model.md"):
        assert text in str(error.value)


class Changed(CatchNet):
    """Changes what it returns in one way."""

    change = None

    def forward(self, inputs, agent_state):
        return self.change(*super().forward(inputs, agent_state))


def change_output(name, function):
    def change(outputs, state):
        return outputs | {name: function(outputs[name])}, state

    return change


def without(name):
    return lambda outputs, state: ({k: v for k, v in outputs.items() if k != name}, state)


NUMBERS = r"for rows of T = 2, B = 3 "


@pytest.mark.parametrize(
    "change, message",
    [
        (change_output("action", torch.t), rf"{NUMBERS}Changed in .*test_nets.py chooses actions "
         r"\[3, 2\] of torch.int64, .* takes \[2, 3\] of torch.int64"),
        (change_output("action", torch.Tensor.float), r"\[2, 3\] of torch.float32, but the"),
        (change_output("policy_logits", lambda x: x.flatten(0, 1)),
         r"policy_logits of Changed in .* should have the shape \[2, 3, 5\], .* \[6, 5\]"),
        (change_output("policy_logits", lambda x: x[..., 1:]), r"\[2, 3, 5\], .* \[2, 3, 4\]"),
        (change_output("policy_logits", lambda x: x[..., 0]), r", 5\], but have \[2, 3\]"),
        (change_output("baseline", lambda x: x.unsqueeze(-1)),
         r"baseline of Changed in .* should have the shape \[2, 3\], but has \[2, 3, 1\]"),
        (change_output("baseline", torch.t), r"but has \[3, 2\]"),
        (without("action"), r"Changed in .*test_nets.py has no 'action', only \['baseline', 'pol"),
        (without("policy_logits"), "has no 'policy_logits', only"),
        (lambda outputs, state: (list(outputs.values()), state),
         "a dict of outputs and a new state, .* a list"),
        (lambda outputs, state: (outputs | {"baseline": None}, state),
         "'baseline' of .* should be a tensor, but is a NoneType"),
        (lambda outputs, state: (outputs | {"reward": outputs["baseline"]}, state),
         r"Changed in .* has an output named 'reward', .*: rename it; taken are actor, done, "),
        (lambda outputs, state: (outputs | {"policy_version": outputs["baseline"]}, state),
         "an output named 'policy_version'"),
        (lambda outputs, state: (outputs | {"features": outputs["baseline"].flatten()}, state),
         r"the output 'features' of .* should be a tensor \[2, 3, ...\], but is \[6\]"),
        (lambda outputs, state: (outputs | {"features": None}, state), "but is NoneType: return "),
        (lambda outputs, state: outputs, r"Changed in .*test_nets.py cannot answer rows of T = 2, "
         r"B = 3 .*\(ValueError: too many values to unpack"),
        (lambda outputs, state: (outputs, state[:1]), "returns a state unlike its initial_state"),
        (lambda outputs, state: (outputs, tuple(s[:, :1] for s in state)),
         r"returns a state of shape \[1, 1, 64\], but gets \[1, 3, 64\]"),
    ],
)  # fmt: skip
def test_a_net_whose_answers_have_another_form_is_refused(monkeypatch, change, message):
    monkeypatch.setattr(Changed, "change", staticmethod(change))
    with pytest.raises(FlagError, match=message):
        create_net(Changed, FEATURES, DISCRETE, use_lstm=True)


@pytest.mark.parametrize(
    "initial_state",
    [(torch.zeros(3, 64),) * 2, (torch.zeros(1, 1, 64),), [torch.zeros(1, 3, 9)], None, (3,)],
)
def test_a_wrong_initial_state_is_refused(initial_state):
    class Net(CatchNet):
        def forward(self, inputs, agent_state):
            outputs, _ = super().forward(inputs, super().initial_state(nets.B))
            return outputs, agent_state

        def initial_state(self, batch_size):
            return initial_state

    with pytest.raises(FlagError, match=r"initial_state\(3\) of Net in .* \[layers, 3, ...\]"):
        create_net(Net, FEATURES, DISCRETE, use_lstm=True)


def test_a_net_of_other_actions_than_those_of_the_environment_is_refused():
    class Net(CatchNet):
        def __init__(self, observation_space, num_actions):
            super().__init__(observation_space, A)

    for space, wanted in (
        (gym.spaces.Box(-1, 1, (1,)), r"\[2, 3, 1\] of torch.float32"),
        (gym.spaces.MultiDiscrete([3, 5]), r"\[2, 3, 2\] of torch.int64"),
    ):
        with pytest.raises(FlagError, match=rf"\[2, 3\] of torch.int64, .* takes {wanted}"):
            create_net(Net, FEATURES, space)
        with pytest.raises(FlagError, match="AtariNet in "):
            create_net(AtariNet, SPACE, space)
