# SPDX-License-Identifier: Apache-2.0
"""The losses of benchmarks/corrections.py, by their gradients."""

import math
import sys

import pytest
import torch
from program import ROOT

import monobeast

sys.path.insert(0, str(ROOT / "benchmarks"))
import corrections

T, B, A = 6, 4, 3


class Policy(torch.nn.Module):
    """A net whose policies and baseline are its parameters."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits.clone())
        self.baseline = torch.nn.Parameter(torch.zeros(T + 1, B))

    def forward(self, batch, agent_state):
        return {"policy_logits": self.logits * 1.0, "baseline": self.baseline * 1.0}, agent_state


def make_flags(correction, clipping=0.2):
    flags = monobeast.parser.parse_args(["--precision", "fp32", "--policy_clipping", str(clipping)])
    flags.correction = correction
    return flags


def make_batch(behavior_logits, seed=0):
    generator = torch.Generator().manual_seed(seed)
    no = torch.zeros(T + 1, B, dtype=torch.bool)
    batch = {
        "policy_logits": torch.cat([behavior_logits[:1], behavior_logits[:-1]]),  # a row later
        "action": torch.randint(A, (T + 1, B), generator=generator),
        "reward": torch.rand(T + 1, B, generator=generator) * 2 - 1,
        "done": no.clone(), "terminated": no.clone(), "truncated": no.clone(),
    }  # fmt: skip
    batch["truncated"][2, 1] = batch["done"][3, 1] = True
    return batch


def gradients(loss, flags, logits, batch):
    model = Policy(logits)
    total, metrics = loss(flags, model, batch, ())
    total.backward()
    return model.logits.grad, model.baseline.grad, metrics


def random_logits(seed, scale=1.0):
    return torch.randn(T + 1, B, A, generator=torch.Generator().manual_seed(seed)) * scale


def correct(correction, log_ratios, advantages, clipping=0.2, proximal=None):
    """Return the loss's gradient by the log-probabilities of single transitions, all [N]."""
    log_probs = torch.tensor(log_ratios)[:, None].requires_grad_()
    behavior = torch.zeros_like(log_probs)
    advantages = torch.tensor(advantages)[:, None]
    x = corrections.Transitions(
        log_probs, behavior, behavior if proximal is None else torch.tensor(proximal)[:, None],
        torch.ones_like(behavior, dtype=torch.bool), lambda _: (advantages, advantages), clipping,
    )  # fmt: skip
    corrections.CORRECTIONS[correction](x)[1].sum().backward()
    return log_probs.grad[:, 0]


@pytest.mark.parametrize("clipping", [0.2, 1e9])
def test_vtrace_is_the_loss_of_monobeast(clipping):
    flags, logits = make_flags("vtrace", clipping), random_logits(1)
    flags.batch_size = B - 1  # the last rollout is one of the replay
    batch = make_batch(random_logits(2))
    own = gradients(corrections.Loss(), flags, logits, batch)
    expected = gradients(monobeast.compute_loss, flags, logits, batch)
    for a, b in zip(own[:2], expected[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert own[2]["total_loss"] == pytest.approx(expected[2]["total_loss"].item(), abs=1e-5)
    assert own[2]["steps"] == expected[2]["steps"] == T * (B - 1) - 1


@pytest.mark.parametrize("correction", corrections.CORRECTIONS)
def test_on_policy_all_are_alike(correction):
    logits, batch = random_logits(1), make_batch(random_logits(1))
    own = gradients(corrections.Loss(), make_flags(correction), logits, batch)
    plain = gradients(corrections.Loss(), make_flags("none"), logits, batch)
    for a, b in zip(own[:2], plain[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert own[2]["total_variation"] == pytest.approx(0, abs=1e-6)
    assert own[2]["second_moment"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("correction", corrections.CORRECTIONS)
def test_log_ratios_of_100_leave_all_finite(correction):
    behavior = torch.zeros(T + 1, B, A)
    behavior[..., 0] = 100
    logits = torch.zeros(T + 1, B, A)
    logits[..., 1] = 100
    loss = corrections.Loss()
    gradients(loss, make_flags(correction), behavior, make_batch(behavior))  # the proximal policy
    *own, metrics = gradients(loss, make_flags(correction), logits, make_batch(behavior))
    assert all(g.isfinite().all() for g in own)
    assert all(torch.as_tensor(value).isfinite().all() for value in metrics.values())
    assert metrics["second_moment"] > 4000
    for sign in (-1.0, 1.0):
        assert correct(correction, [100.0, -100.0], [sign, sign]).isfinite().all()


def test_distances_are_those_of_two_policies():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2])).expand(T + 1, B, A)
    behavior = torch.log(torch.tensor([0.2, 0.3, 0.5])).expand(T + 1, B, A)
    batch = make_batch(behavior)
    *_, metrics = gradients(corrections.Loss(), make_flags("none"), logits, batch)
    assert metrics["total_variation"] == pytest.approx(0.3)
    actions = batch["action"][1:][~batch["truncated"][:-1]]
    share = (actions != 1).float().mean().item()
    assert metrics["second_moment"] == pytest.approx(share * math.log(2.5) ** 2)


def test_truncated_weights_are_at_most_one():
    gradient = correct("truncated", [math.log(3), math.log(0.25), 0.0], [2.0, 2.0, -2.0])
    assert gradient.tolist() == pytest.approx([-2, -0.5, 2])


def test_decoupled_clips_the_ratio_to_the_proximal_policy():
    up = math.log(1.5)  # from the proximal policy, which is twice, then half the one that acted
    proximal = [math.log(2.0), math.log(2.0), math.log(0.5), math.log(0.5)]
    log_ratios = [proximal[0] + up, proximal[1] + up, proximal[2] - up, proximal[3]]
    gradient = correct("decoupled", log_ratios, [1.0, -1.0, 1.0, 1.0], proximal=proximal)
    assert gradient.tolist() == pytest.approx([0, 1.5, -0.5 / 1.5, -0.5])


def test_the_proximal_policy_is_an_average_of_all_before():
    loss, flags = corrections.Loss(), make_flags("decoupled")
    first, second = torch.zeros(T + 1, B, A), random_logits(3)
    batch = make_batch(first)
    gradients(loss, flags, first, batch)
    gradients(loss, flags, second, batch)
    mean = (1 - corrections.PROXIMAL_DECAY) * second
    torch.testing.assert_close(loss._proximal.logits.detach(), mean)


def test_m2po_leaves_out_the_most_distant_that_move_farther():
    gradient = correct("m2po", [0.1, 0.2, -0.5, 7.0, 0.0], [1.0, 1.0, -1.0, -1.0, 1.0])
    # Of the first three, which move farther, the third is left out; the fourth moves back.
    assert (0.01 + 0.04) / 2 < corrections.SECOND_MOMENT < (0.01 + 0.04 + 0.25) / 3
    expected = [-math.exp(0.1), -math.exp(0.2), 0, math.exp(7), -1]
    assert gradient.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("scale", [0.05, 0.25, 1.0])
def test_m2po_keeps_as_many_as_the_bound_allows(scale):
    generator = torch.Generator().manual_seed(0)
    ratios = torch.randn(1000, generator=generator) * scale
    signs = torch.randint(2, (1000,), generator=generator) * 2.0 - 1
    kept = correct("m2po", ratios.tolist(), signs.tolist()) != 0
    farther = ratios * signs > 0
    assert kept[~farther].all()
    squares = ratios[farther].square()
    inside, outside = squares[kept[farther]], squares[~kept[farther]]
    assert inside.mean() <= corrections.SECOND_MOMENT
    if len(outside):
        assert outside.min() > inside.max()
        added = (inside.sum() + outside.min()) / (len(inside) + 1)
        assert added > corrections.SECOND_MOMENT
    assert (len(outside) == 0) == (scale == 0.05)


@pytest.mark.parametrize("correction", ["m2po", "decoupled"])
def test_ratios_are_constant_where_they_would_overflow(correction):
    inside, outside = correct(correction, [19.0, 100.0], [-1.0, -1.0])
    assert inside == pytest.approx(math.exp(19)) and outside == 0


def test_a_batch_of_resets_alone_has_finite_metrics():
    batch = make_batch(random_logits(2))
    batch["truncated"][:] = True
    *own, metrics = gradients(corrections.Loss(), make_flags("m2po"), random_logits(1), batch)
    assert not any(g.any() for g in own)
    assert all(torch.as_tensor(value).isfinite().all() for value in metrics.values())
