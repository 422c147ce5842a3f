# SPDX-License-Identifier: Apache-2.0
"""What the programs' nets promise, and which nets are refused for an environment."""

import inspect

import gymnasium as gym
import numpy as np
import pytest
import torch
from catch import MonoNet
from catch import Net as CatchNet
from catch_poly import PolyNet

import gala
import ppo
from beast.errors import FlagError
from beast.learners import nets
from beast.learners.nets import create_net, sample_rows
from beast.learners.observations import Observations, OneHot, find_image
from beast.nest import map_nest

T, B, A = 6, 3, 5
SPACE = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
both = pytest.mark.parametrize("use_lstm", [False, True], ids=["feed-forward", "lstm"])


def make_net(use_lstm=False, space=SPACE, seed=0):
    """Return a network in eval mode whose answers differ clearly from row to row."""
    torch.manual_seed(seed)
    net = MonoNet(space, A, use_lstm)
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


def test_done_resets_the_lstm_state_and_stops_its_gradient():
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
def test_the_net_sees_action_reward_and_frame_not_brightness(use_lstm):
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
def test_gradients_reach_every_parameter_and_inputs_stay(use_lstm):
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
    net, (rows, outputs, state) = create_net(MonoNet, SMALL, DISCRETE, use_lstm=use_lstm)
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
        gym.spaces.Box(0, 255, (84, 90, 80), np.uint8),  # channels first or last
        gym.spaces.Dict(a=gym.spaces.Box(0, 2**63 - 1, (4, 84, 84), np.int64)),  # without bounds
        gym.spaces.Dict(a=gym.spaces.Tuple([gym.spaces.Box(0, 255, (55, 80), np.uint8)])),
    ],
    ids=lambda space: str(space)[:30],
)
def test_observations_that_a_net_cannot_take_are_refused(space):
    with pytest.raises(FlagError) as error:
        create_net(MonoNet, space, DISCRETE)
    where = f"Net in {inspect.getfile(MonoNet)} cannot be made for frames"
    path = {False: "", True: "observation['a']"}[isinstance(space, gym.spaces.Dict)]
    for text in (where, str(space), "docs/model.md", path):
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
         r"returns a state \[1, 1, 64\] torch.float32, but gets \[1, 3, 64\] torch.float32"),
        (lambda outputs, state: (outputs, tuple(s.double() for s in state)),
         r"returns a state \[1, 3, 64\] torch.float64, but gets \[1, 3, 64\] torch.float32"),
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


def test_a_net_whose_state_no_other_could_load_is_refused():
    class Lazy(CatchNet):
        def __init__(self, observation_space, num_actions):
            super().__init__(observation_space, num_actions)
            self.policy = torch.nn.LazyLinear(num_actions)

    class Extra(CatchNet):
        def get_extra_state(self):
            return {"updates": 1}

    with pytest.raises(FlagError, match="Lazy in .* has lazy layers, .*: give sizes"):
        create_net(Lazy, FEATURES, DISCRETE)
    with pytest.raises(FlagError, match="Extra in .* has _extra_state, .*: make it a buffer"):
        create_net(Extra, FEATURES, DISCRETE)


def test_a_net_of_other_actions_than_the_environments_is_refused():
    class Net(CatchNet):
        def __init__(self, observation_space, num_actions):
            super().__init__(observation_space, A)

    for space, wanted in (
        (gym.spaces.Box(-1, 1, (1,)), r"\[2, 3, 1\] of torch.float32"),
        (gym.spaces.MultiDiscrete([3, 5]), r"\[2, 3, 2\] of torch.int64"),
    ):
        with pytest.raises(FlagError, match=rf"\[2, 3\] of torch.int64, .* takes {wanted}"):
            create_net(Net, FEATURES, space)
        with pytest.raises(FlagError, match="Net in "):
            create_net(MonoNet, SPACE, space)


def test_a_net_with_dropout_or_that_ignores_masks_is_told(caplog):
    class Net(CatchNet):
        def __init__(self, observation_space, num_actions):
            super().__init__(observation_space["board"], num_actions)
            self.unused = torch.nn.ModuleList(
                [torch.nn.Dropout(), torch.nn.Dropout(0), torch.nn.LSTM(3, 3, 2, dropout=0.5),
                 *(torch.nn.BatchNorm1d(3) for _ in range(2)), torch.nn.LayerNorm(3)]
            )  # fmt: skip

        def forward(self, inputs, agent_state):
            return super().forward(inputs | {"frame": inputs["frame"]["board"]}, agent_state)

    mask = gym.spaces.MultiBinary(int(DISCRETE.n))
    space = gym.spaces.Dict(board=FEATURES, action_mask=mask)
    create_net(Net, space, DISCRETE)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 2 and "Net in " in warned[0] and "ignores the action_mask" in warned[0]
    assert "has BatchNorm1d, Dropout, LSTM: the policy that acts" in warned[1]
    caplog.clear()
    create_net(Net, gym.spaces.Dict(board=FEATURES, action_mask=FEATURES), DISCRETE)  # no mask
    create_net(MonoNet, gym.spaces.Dict(board=SPACE, action_mask=mask), DISCRETE)
    assert "ignores" not in caplog.text


NETS = {"monobeast": MonoNet, "polybeast": PolyNet, "ppo": ppo.Net, "gala": gala.Net}


@pytest.mark.parametrize(
    ("shape", "channels"),
    [
        *(((8, 8, 111), 111), ((111, 8, 8), 111), ((9, 9, 17), 17), ((17, 9, 9), 17)),
        *(((96, 96, 40), 40), ((84, 84, 83), 83), ((1, 5, 5), 1), ((10, 10, 10), 10)),
        *(((210, 160, 3), 3), ((12, 210, 160), 12), ((6, 5, 3), 3), ((3, 128, 400), 3)),
        *(((10, 9, 14), None), ((96, 90, 80), None), ((3, 5, 4), None), ((3, 64, 3), None)),
    ],
)
def test_channels_are_the_odd_side_or_the_clearly_shorter_end(shape, channels):
    space = gym.spaces.Box(0, 1, shape, np.uint8)
    if channels is not None:
        image = find_image(space)
        assert image.channels == channels
        assert image.is_channels_last == (shape[2] == channels)
    else:
        with pytest.raises(ValueError, match=r"Observations\(observation_space, ch"):
            find_image(space)
        assert find_image(space, channels_last=True)[:3] == (shape[2], *shape[:2])
        assert find_image(space, channels_last=False)[:3] == shape


def test_what_has_no_pixels_is_no_image():
    for shape in ((0, 84, 84), (2, 2, 2), (3, 2, 5), (21, 79), (7,)):
        assert find_image(gym.spaces.Box(0, 255, shape, np.uint8)) is None
    for high in (1, np.inf):  # channels that cannot be known, no bounds
        assert find_image(gym.spaces.Box(0, high, (5, 6, 7))) is None


@pytest.mark.parametrize("shape", [(84, 84), (4, 84, 84, 3)])
def test_images_of_two_or_four_dimensions_are_refused(shape):
    with pytest.raises(ValueError, match="three dimensions, or one, by .*ReshapeObservation"):
        find_image(gym.spaces.Box(0, 255, shape, np.uint8))


def test_channels_last_is_for_shapes_that_do_not_show_it():
    unclear = gym.spaces.Box(0, 255, (84, 90, 80), np.uint8)
    first, other = Observations(gym.spaces.Dict(a=SPACE, b=unclear), channels_last=True).images
    assert first[:3] == (4, 84, 84) and other[:3] == (80, 84, 90)


@pytest.mark.parametrize(
    ("low", "high", "dtype", "scale"),
    [(0, 255, np.uint8, 255), (0, 1, bool, 1), (0, 1, np.uint8, 1), (0, 65535, np.uint16, 65535),
     (-128, 127, np.int8, 128), (0, 10, np.int64, 10), (0, 2**32 - 1, np.uint32, "not known"),
     (-(2**63), 5, np.int64, "not known"), (-2, 0.5, np.float32, 2)],
)  # fmt: skip
@pytest.mark.parametrize("net_class", NETS.values(), ids=NETS)
def test_pixels_are_scaled_by_their_bounds(net_class, low, high, dtype, scale):
    space = gym.spaces.Box(low, high, (40, 40, 3), dtype)
    if not isinstance(scale, int):
        with pytest.raises(ValueError, match=scale):
            net_class(space, 2)
        return
    (x,), vector = net_class(space, 2).observations(
        torch.from_numpy(np.full((2, *space.shape), high, dtype))
    )
    assert x.shape == (2, 3, 40, 40) and x.dtype == torch.float32
    assert (x == high / scale).all() and vector is None


@pytest.mark.parametrize("net_class", NETS.values(), ids=NETS)
def test_an_image_is_the_same_with_its_channels_first_or_last(net_class):
    frame, answers = torch.randint(256, (2, 3, 40, 40, 40 + 8), dtype=torch.uint8), []
    for channels_last in (True, False):
        x = frame if channels_last else frame.movedim(-1, 2)
        space = gym.spaces.Box(0, 255, tuple(x.shape[2:]), np.uint8)
        torch.manual_seed(0)
        net = net_class(space, 2)
        answers.append(
            net(sample_rows(space, gym.spaces.Discrete(2)) | {"frame": x}, ())[0]["policy_logits"]
        )
    torch.testing.assert_close(*answers)


@pytest.mark.parametrize("size", [3, 10])
def test_a_hadamard_layer_multiplies_two_normalized_ones(size):
    layer, x = nets.HadamardConv2d(4, 6, 3).double(), torch.rand(2, 4, size, size).double()
    windows, filters = x.unfold(2, 3, 1).unfold(3, 3, 1), layer.weight.detach()
    y = torch.einsum("ncuvkl,ockl->nouv", windows, filters) + layer.bias.detach().view(-1, 1, 1)
    halves = []
    for half in (y[:, :3], y[:, 3:]):
        mean, var = half.mean((1, 2, 3), True), half.var((1, 2, 3), False, keepdim=True)
        half = (half - mean) / (var + 1e-5).sqrt()
        halves.append(half * 0.5 * (1 + torch.erf(half / 2**0.5)))
    torch.testing.assert_close(layer(x), halves[0] * halves[1])


@pytest.mark.parametrize("net_class", NETS.values(), ids=NETS)
def test_only_nets_that_see_large_images_choose_bf16(net_class):
    small, vector = gym.spaces.Box(0, 1, (10, 10, 4), bool), gym.spaces.Box(0, 1, (3,))
    for parts in ([SPACE], [small, SPACE], [SPACE, vector], [small], [vector], [small, vector]):
        net = net_class(gym.spaces.Tuple(parts), 2)
        assert net.knows_bf16 == (SPACE in parts)


def test_choices_are_one_hot_wherever_they_are_in_a_nest():
    parts = [gym.spaces.MultiDiscrete([[2], [3]], start=[[0], [5]]), gym.spaces.Box(0, 9, (2,))]
    space = gym.spaces.Dict(
        a=gym.spaces.Discrete(3, start=-1),
        b=gym.spaces.Tuple([*parts, gym.spaces.MultiBinary(2)]),
        c=gym.spaces.Discrete(2, start=2**40),
        # Divided by what each holds at most, where that says more than the dtype.
        d=gym.spaces.Box(np.array([0, -5, 0]), np.array([9, 3, 10**6]), (3,), np.int64),
    )
    frame = {
        "a": torch.tensor([-1, 1]),
        "b": (
            torch.tensor([[[1], [5]], [[0], [7]]]),
            torch.tensor([[0.5, 7], [2, 3]]),
            torch.tensor([[1, 0], [0, 1]], dtype=torch.int8),
        ),
        "c": torch.tensor([2**40 + 1, 2**40]),
        "d": torch.tensor([[8, -5, 7], [9, 3, 0]]),
    }
    one_hot = OneHot(space)
    expected = [
        [*(1, 0, 0), *(0, 1, 1, 0, 0), *(0.5, 7), *(1, 0), *(0, 1), 8 / 9, -1, 7],
        [*(0, 0, 1), *(1, 0, 0, 0, 1), *(2, 3), *(0, 1), *(1, 0), 1, 3 / 5, 0],
    ]
    torch.testing.assert_close(one_hot(frame), torch.tensor(expected))
    assert one_hot.size == 17 and not one_hot.state_dict()


@pytest.mark.parametrize("name", ["monobeast", "ppo", "gala"])
@pytest.mark.parametrize(
    "space",
    [gym.spaces.Discrete(16), gym.spaces.MultiDiscrete([4, 4]), gym.spaces.Box(0, 1, (2, 3)),
     gym.spaces.Tuple([gym.spaces.Discrete(32), gym.spaces.Dict(a=gym.spaces.Discrete(2))])],
    ids=str,
)  # fmt: skip
def test_nets_tell_choices_apart(name, space):
    net, (rows, _, _) = create_net(NETS[name], space, gym.spaces.Discrete(2))
    frames = map_nest(lambda x: torch.zeros_like(x[:1]), rows["frame"])
    map_nest(lambda x: x.view(3, -1)[1:, :1].copy_(torch.tensor([[1], [3]])), frames)
    rows = {key: value[:1] for key, value in rows.items()} | {"frame": frames}
    _, x = net.observations(map_nest(lambda x: x.flatten(0, 1), frames))
    assert x.shape == (3, gym.spaces.flatdim(space)) and len(x.unique(dim=0)) == 3
    if not isinstance(space, gym.spaces.Box):
        assert set(x.unique().tolist()) == {0, 1}
    logits = net(rows, ())[0]["baseline"][0]
    assert len(logits.unique()) == 3
