# SPDX-License-Identifier: Apache-2.0
"""What MonoBeast's Atari network promises, alone, without the program around it."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from catch import AtariNet

from experiment import FlagError, check_actions

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
def test_answers_have_the_shapes_of_a_rollout(use_lstm):
    net = make_net(use_lstm)
    outputs, state = net(make_rows(), net.initial_state(B))
    assert outputs.keys() == {"policy_logits", "baseline", "action"}
    assert outputs["policy_logits"].shape == (T, B, A)
    assert outputs["baseline"].shape == outputs["action"].shape == (T, B)
    assert outputs["action"].dtype == torch.int64
    assert [s.shape for s in state] == [s.shape for s in net.initial_state(B)]
    assert len(state) == (2 if use_lstm else 0)
    assert not any(s.any() for s in net.initial_state(B))


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


@both
def test_columns_are_answered_each_by_itself(use_lstm):
    net, rows = make_net(use_lstm), make_rows()
    rows["done"][2, 1] = True
    outputs, _ = net(rows, net.initial_state(B))
    for b in range(B):
        column = (slice(None), slice(b, b + 1))
        assert_same(net(part(rows, *column), net.initial_state(1))[0], part(outputs, *column))


def test_lstm_state_is_reset_at_done_inside_the_unroll():
    net, rows = make_net(use_lstm=True), make_rows()
    state = tuple(torch.randn(s.shape) for s in net.initial_state(B))
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


def test_no_gradient_flows_over_done_through_the_lstm():
    net, rows = make_net(use_lstm=True), make_rows()
    state = tuple(torch.randn(s.shape, requires_grad=True) for s in net.initial_state(B))
    rows["done"][3, 1] = True
    outputs, _ = net(rows, state)
    outputs["baseline"][3:].sum().backward()
    for s in state:
        assert not s.grad[:, 1].any()
        assert s.grad[:, 0].any() and s.grad[:, 2].any()


def test_lstm_goes_on_from_the_state_it_is_given():
    net, rows = make_net(use_lstm=True), make_rows()
    outputs, _ = net(rows, net.initial_state(B))
    _, state = net(part(rows, slice(None, 2)), net.initial_state(B))
    rest = slice(2, None)
    assert_same(net(part(rows, rest), state)[0], part(outputs, rest))
    assert differ(net(part(rows, rest), net.initial_state(B))[0], part(outputs, rest))


@both
def test_last_action_reward_and_frame_count(use_lstm):
    net, rows = make_net(use_lstm), make_rows(1)
    outputs, _ = net(rows, net.initial_state(B))
    for key, value in (
        ("last_action", (rows["last_action"] + 1) % A),
        ("reward", rows["reward"] + 0.5),
        ("frame", rows["frame"].flip(-1)),
    ):
        answer, _ = net(rows | {key: value}, net.initial_state(B))
        assert differ(answer, outputs) and differ(answer, outputs, "baseline"), key


@both
def test_reward_is_clipped(use_lstm):
    net, rows = make_net(use_lstm), make_rows(1)
    signs = torch.tensor([[1.0, -1.0, 1.0]])
    one, _ = net(rows | {"reward": signs}, net.initial_state(B))
    assert_same(net(rows | {"reward": 250 * signs}, net.initial_state(B))[0], one)


SMALL = gym.spaces.Box(0, 255, (1, 36, 36), np.uint8)  # the least it takes


def test_eval_mode_takes_the_most_probable_action():
    net, rows = make_net(space=SMALL), make_rows(20, 50, SMALL)
    outputs, _ = net(rows, ())
    assert torch.equal(outputs["action"], outputs["policy_logits"].argmax(-1))
    assert len(outputs["action"].unique()) > 1


def test_training_mode_samples_by_the_probabilities():
    net, num_samples = make_net(space=SMALL).train(), 20_000
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
def test_gradients_reach_every_parameter(use_lstm):
    net, rows = make_net(use_lstm).train(), make_rows()
    outputs, _ = net(rows, net.initial_state(B))
    (outputs["baseline"].sum() + outputs["policy_logits"].square().sum()).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("channels", [1, 4])
@both
def test_inputs_are_left_as_they_are(use_lstm, channels, dtype):
    # They are views of the environments' rows, and the learner's batch.
    space = gym.spaces.Box(0, 255, (channels, 40, 40), np.uint8)
    net, rows = make_net(use_lstm, space), make_rows(space=space)
    rows["frame"] = rows["frame"].to(dtype)
    before = {key: value.clone() for key, value in rows.items()}
    net(rows, net.initial_state(B))
    for key in rows:
        assert torch.equal(rows[key], before[key]), key


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Box(0, 1, (8,)),
        gym.spaces.Box(0, 255, (84, 84), np.uint8),
        gym.spaces.Box(0, 255, (4, 35, 84), np.uint8),
        gym.spaces.Box(0, 255, (84, 84, 4), np.uint8),  # channels last
        gym.spaces.Discrete(5),
        gym.spaces.Dict(frame=SPACE),
    ],
    ids=lambda space: str(space)[:30],
)
def test_observations_that_it_cannot_take_are_refused(space):
    with pytest.raises(FlagError, match=r"\[channels, height, width\].*edit AtariNet in "):
        AtariNet(space, A)


def test_actions_that_it_cannot_choose_are_refused():
    with pytest.raises(FlagError, match=r"actions, not .*, \(3, 5\): edit AtariNet in "):
        AtariNet(SPACE, (3, 5))


@pytest.mark.parametrize(
    ("num_parts", "dtype", "wanted"),
    [(1, torch.float32, r"\[1, 1, 1\] of torch.float32"), (2, torch.int64, r"\[1, 1, 2\]")],
    ids=["Box", "MultiDiscrete"],
)
def test_a_net_of_other_actions_than_those_of_the_environment_is_refused(num_parts, dtype, wanted):
    net = make_net()
    row = make_rows(1, 1)
    check_actions(net(row, ())[0], row)
    row["last_action"] = torch.zeros(1, 1, num_parts, dtype=dtype)
    chosen = {"action": torch.zeros(1, 1, dtype=torch.int64)}
    with pytest.raises(FlagError, match=rf"\[1, 1\] of torch.int64, .* takes {wanted}"):
        check_actions(chosen, row)


def test_how_bright_the_background_is_does_not_matter():
    net, rows = make_net(), make_rows()
    rows["frame"] = rows["frame"] // 2
    brighter = rows | {"frame": rows["frame"] + 87}  # Pong's background
    assert_same(net(rows, ())[0], net(brighter, ())[0])
    assert differ(net(rows, ())[0], net(rows | {"frame": rows["frame"].flip(-1)}, ())[0])
