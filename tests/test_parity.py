# SPDX-License-Identifier: Apache-2.0
"""MonoBeast and PolyBeast learn the same from the same batch, and say so in the same words."""

import inspect

import gymnasium as gym
import numpy as np
import pytest
import torch

import monobeast
import polybeast
from environment import map_nest

SPACE, A = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), 6
SAME_FUNCTIONS = (
    "CenteredConv2d",
    "compute_policy_gradient_loss",
    "compute_baseline_loss",
    "compute_entropy_loss",
    "compute_loss",
    "learn",
)


def make_batch(seed, T=7, B=3):
    """Return a batch in which everything happens: ends of episodes of all kinds, large rewards."""
    torch.manual_seed(seed)
    end = torch.randint(8, (T + 1, B))
    return {
        "frame": torch.randint(256, (T + 1, B, *SPACE.shape), dtype=torch.uint8),
        "reward": 3 * torch.randn(T + 1, B),
        "done": end == 0,
        "truncated": end == 1,
        "terminated": end == 2,
        "last_action": torch.randint(A, (T + 1, B)),
        "action": torch.randint(A, (T + 1, B)),
        "policy_logits": torch.randn(T + 1, B, A),
    }


def make_nets(use_lstm):
    nets = [monobeast.AtariNet(SPACE, A, use_lstm)]
    nets += [polybeast.AtariNet(SPACE, A, use_lstm, model="shallow")]
    for parameter in nets[0].parameters():  # not the last layer's small weights: a real policy
        torch.nn.init.normal_(parameter, std=0.05)
    nets[1].load_state_dict(nets[0].state_dict())
    return nets


@pytest.mark.parametrize("use_lstm", [False, True])
@pytest.mark.parametrize("flags", ["", "--reward_clipping none --discounting 0.9 --momentum 0.5"])
def test_learn_gives_equal_loss_gradients_and_weights(flags, use_lstm):
    nets = make_nets(use_lstm)
    outcomes = []
    for program, net in zip((monobeast, polybeast), nets, strict=True):
        parsed = program.parser.parse_args(flags.split())
        optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3, momentum=parsed.momentum)
        figures = []
        for seed in (1, 2):
            batch = make_batch(seed)
            state = net.initial_state(batch["reward"].shape[1])
            state = map_nest(lambda s: torch.full_like(s, 0.1), state)
            figures.append(program.learn(parsed, net, batch, state, optimizer))
        gradients = {name: p.grad for name, p in net.named_parameters()}
        outcomes.append((figures, gradients, net.state_dict()))
    mono, poly = outcomes
    assert mono[0] == poly[0]
    assert mono[0][0]["total_loss"] != 0 and mono[0][0]["grad_norm"] > 0
    for one, other in zip(mono[1:], poly[1:], strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), name


def test_both_say_the_same_of_losses_and_learning():
    for name in SAME_FUNCTIONS:
        one, other = (inspect.getsource(getattr(p, name)) for p in (monobeast, polybeast))
        assert one == other, name


def test_flags_of_both_have_the_same_meaning_and_default():
    mono, poly = (
        {action.dest: action for action in program.parser._actions}
        for program in (monobeast, polybeast)
    )
    ours = {"num_actors", "num_learner_threads", "autotune"}  # which mean something else in each
    for name in (mono.keys() & poly.keys()) - ours:
        assert mono[name].default == poly[name].default, name
        assert mono[name].help == poly[name].help, name


@pytest.mark.parametrize("model", ["shallow", "deep"])
@pytest.mark.parametrize("use_lstm", [False, True])
def test_bf16_gives_the_loss_and_the_gradients_of_fp32_to_its_tolerance(model, use_lstm):
    torch.manual_seed(1)
    net = polybeast.AtariNet(SPACE, A, use_lstm, model)
    for layer in (net.policy, net.baseline):  # a real policy, real values
        torch.nn.init.normal_(layer.weight, std=0.05)
    batch = make_batch(3)
    gradients, figures = [], []
    for precision in ("fp32", "bf16"):
        flags = polybeast.parser.parse_args(["--precision", precision])
        net.zero_grad()
        loss, all_figures = polybeast.compute_loss(flags, net, batch, net.initial_state(3))
        loss.backward()
        wide = (torch.float32, torch.float64, torch.int64)
        assert all(f.dtype in wide for f in all_figures.values())
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
        figures.append(torch.stack([f.double() for f in all_figures.values()]))
    # bfloat16 has 8 bits of precision, and a hundred rows average them out.
    torch.testing.assert_close(figures[1], figures[0], rtol=0.02, atol=0.2)
    assert not torch.equal(*gradients)
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99
    assert 0.97 < gradients[1].norm() / gradients[0].norm() < 1.03


def test_weights_stay_float32_in_bf16():
    flags = monobeast.parser.parse_args(["--precision", "bf16"])
    net = monobeast.AtariNet(SPACE, A)
    before = net.fc.weight.clone()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-4)
    monobeast.learn(flags, net, make_batch(1), (), optimizer)
    assert all(p.dtype == torch.float32 for p in net.parameters())
    assert 0 < (net.fc.weight - before).abs().max() < 1e-2
