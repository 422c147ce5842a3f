# SPDX-License-Identifier: Apache-2.0
"""V-trace against the paper's definition, and what the mask promises at a time limit."""

import numpy as np
import pytest
import torch

import vtrace

KEYS = ("log_rhos", "discounts", "rewards", "values", "bootstrap_value")


def random_case(seed, shape, masked=False):
    """Return arguments in float64, [T, B, ...], with some discounts 0; mask only where asked."""
    rng = np.random.default_rng(seed)
    case = {
        "log_rhos": rng.normal(scale=1.5, size=shape),
        "discounts": rng.uniform(0.5, 1.0, size=shape) * (rng.random(shape) > 0.2),
        "rewards": rng.normal(size=shape),
        "values": rng.normal(scale=3.0, size=shape),
        "bootstrap_value": rng.normal(scale=3.0, size=shape[1:]),
    }
    if masked:
        case["mask"] = rng.random(shape) > 0.25
    return case


def compute(case, **kwargs):
    tensors = {key: torch.from_numpy(np.asarray(value)) for key, value in case.items()}
    return vtrace.from_importance_weights(**tensors, **kwargs)


def naive_vtrace(case, clip_rho_threshold=1.0, clip_pg_rho_threshold=1.0, lambda_=1.0):
    """The paper's explicit sum of products, term by term; no recursion."""
    log_rhos, discounts, rewards, values, bootstrap_value = (case[key] for key in KEYS)
    mask = case.get("mask", np.ones(values.shape, dtype=bool)).astype(float)
    unroll_length = len(values)
    rhos = np.exp(log_rhos)
    rho_bar = np.inf if clip_rho_threshold is None else clip_rho_threshold
    pg_rho_bar = np.inf if clip_pg_rho_threshold is None else clip_pg_rho_threshold
    v = np.concatenate([values, bootstrap_value[None]])

    vs = np.array(v)
    for s in range(unroll_length):
        for t in range(s, unroll_length):
            weight = np.ones_like(bootstrap_value)
            for i in range(s, t):
                weight = weight * discounts[i] * lambda_ * np.minimum(1.0, rhos[i]) * mask[i]
            delta = np.minimum(rho_bar, rhos[t]) * (rewards[t] + discounts[t] * v[t + 1] - v[t])
            vs[s] = vs[s] + weight * mask[t] * delta

    pg_advantages = np.zeros_like(values)
    for t in range(unroll_length):
        advantage = rewards[t] + discounts[t] * vs[t + 1] - v[t]
        pg_advantages[t] = mask[t] * np.minimum(pg_rho_bar, rhos[t]) * advantage
    return vs[:-1], pg_advantages


SHAPES = [(7, 4), (1, 1), (1, 5), (2, 3), (20, 4), (6,), (5, 3, 2), (4, 2, 3, 2)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("clip_pg_rho_threshold", [None, 0.9, 2.2])
@pytest.mark.parametrize("clip_rho_threshold", [None, 0.6, 1.0, 3.7])
@pytest.mark.parametrize("lambda_", [0.0, 0.8, 1.0])
def test_matches_the_definition_for_all_thresholds_and_shapes(
    lambda_, clip_rho_threshold, clip_pg_rho_threshold, masked
):
    clips = {"clip_rho_threshold": clip_rho_threshold}
    clips |= {"clip_pg_rho_threshold": clip_pg_rho_threshold, "lambda_": lambda_}
    for seed, shape in enumerate(SHAPES):
        case = random_case(seed, shape, masked)
        for got, wanted in zip(compute(case, **clips), naive_vtrace(case, **clips), strict=True):
            assert got.dtype == torch.float64
            np.testing.assert_allclose(got.numpy(), wanted, rtol=0, atol=1e-8, err_msg=str(shape))


def naive_gae(case, lambda_):
    """Return advantages and lambda-returns episode by episode, from the back of each."""
    _, discounts, rewards, values, bootstrap_value = (case[key] for key in KEYS)
    mask = case.get("mask", np.ones(values.shape, dtype=bool))
    T, advantages = len(values), np.zeros_like(values)
    for place in np.ndindex(values.shape[1:]):
        v = [*values[(slice(None), *place)], bootstrap_value[place]]
        advantage = 0.0
        for t in reversed(range(T)):
            at = (t, *place)
            # Behind a time limit there is no transition, but a value to bootstrap from.
            delta = rewards[at] + discounts[at] * v[t + 1] - v[t]
            advantage = delta + discounts[at] * lambda_ * advantage if mask[at] else 0.0
            advantages[at] = advantage
    return advantages, advantages + values


@pytest.mark.parametrize("lambda_", [0.0, 0.5, 0.95, 1.0])
def test_on_policy_targets_are_lambda_returns(lambda_):
    for seed, shape in enumerate(SHAPES):
        case = random_case(seed, shape, masked=True)
        case["log_rhos"] = np.zeros(shape)
        vs = compute(case, lambda_=lambda_).vs.numpy()
        advantages, returns = naive_gae(case, lambda_)
        np.testing.assert_allclose(vs - case["values"], advantages, rtol=0, atol=1e-12)
        np.testing.assert_allclose(vs, returns, rtol=0, atol=1e-12)


def test_from_logits_equals_log_softmax_in_numpy():
    rng = np.random.default_rng(7)
    behavior = rng.normal(scale=4.0, size=(6, 3, 2, 5))  # [T, B, extra, A]
    target = rng.normal(scale=4.0, size=(6, 3, 2, 5))
    actions = rng.integers(5, size=(6, 3, 2))

    def log_prob(logits):
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return np.take_along_axis(log_probs, actions[..., None], -1)[..., 0]

    case = random_case(7, (6, 3, 2), masked=True)
    case["log_rhos"] = log_prob(target) - log_prob(behavior)
    clips = {"clip_rho_threshold": 2.0, "clip_pg_rho_threshold": None, "lambda_": 0.7}
    returns = vtrace.from_logits(
        torch.from_numpy(behavior),
        torch.from_numpy(target),
        torch.from_numpy(actions),
        **{key: torch.from_numpy(case[key]) for key in (*KEYS[1:], "mask")},
        **clips,
    )
    vs, pg_advantages = naive_vtrace(case, **clips)
    expected = {
        "vs": vs,
        "pg_advantages": pg_advantages,
        "log_rhos": case["log_rhos"],
        "behavior_action_log_probs": log_prob(behavior),
        "target_action_log_probs": log_prob(target),
    }
    assert returns._fields == tuple(expected)
    for name, wanted in expected.items():
        np.testing.assert_allclose(getattr(returns, name).numpy(), wanted, rtol=0, atol=1e-8)


def test_action_log_probs_survive_huge_logits():
    logits = torch.tensor([[[1e4, -1e4, 0.0]]])  # [T, B, A]
    log_probs = [vtrace.action_log_probs(logits, torch.tensor([[a]])).item() for a in range(3)]
    assert log_probs == [0.0, -2e4, -1e4]


def test_no_gradient_flows_through_the_targets():
    logits = torch.randn(5, 3, 4, requires_grad=True)
    values = torch.randn(5, 3, requires_grad=True)
    bootstrap_value = torch.randn(3, requires_grad=True)
    rest = {"discounts": torch.full((5, 3), 0.9), "rewards": torch.randn(5, 3)}
    returns = vtrace.from_logits(
        torch.randn(5, 3, 4),
        logits,
        torch.zeros(5, 3, dtype=torch.long),
        values=values,
        bootstrap_value=bootstrap_value,
        **rest,
    )
    log_rhos = torch.zeros(5, 3, requires_grad=True)
    direct = vtrace.from_importance_weights(
        log_rhos, values=values, bootstrap_value=bootstrap_value, **rest
    )
    assert not any(tensor.requires_grad for tensor in (*returns, *direct))
    # The function that a policy gradient is built on does carry one.
    assert vtrace.action_log_probs(logits, torch.zeros(5, 3, dtype=torch.long)).requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_keeps_the_dtype_and_leaves_its_inputs_as_they_were(dtype):
    case = {k: torch.from_numpy(v) for k, v in random_case(2, (6, 3), masked=True).items()}
    case |= {key: case[key].to(dtype) for key in KEYS}
    before = {key: tensor.clone() for key, tensor in case.items()}
    assert {tensor.dtype for tensor in vtrace.from_importance_weights(**case)} == {dtype}
    assert all(torch.equal(case[key], before[key]) for key in case)


@pytest.mark.parametrize("key", [*KEYS, "mask"])
def test_wrong_shape_is_refused_by_name(key):
    case = random_case(0, (4, 3), masked=True)
    case[key] = case[key][..., None]
    with pytest.raises(ValueError, match=r"\[4, 3, 1\]|\[3, 1\]") as error:
        compute(case)
    assert key in str(error.value)


# A time limit cuts an episode: row 2 holds its true last observation, row 3 the first one of the
# next episode, so transition 2 (row 2 to row 3) is none. On policy, all numbers by hand.
TIME_LIMIT = {
    "log_rhos": np.zeros((4, 1)),
    "discounts": np.array([[0.5], [0.5], [0.0], [0.5]]),
    "rewards": np.array([[1.0], [2.0], [0.0], [3.0]]),
    "values": np.array([[1.0], [2.0], [4.0], [8.0]]),
    "bootstrap_value": np.array([16.0]),
    "mask": np.array([[True], [True], [False], [True]]),
}


def test_time_limit_bootstraps_from_the_true_last_observation():
    vs, pg_advantages = compute(TIME_LIMIT)
    # vs[3] = 3 + 0.5 * 16; vs[2] = values[2]; vs[1] = 2 + 0.5 * 4; vs[0] = 1 + 0.5 * 4.
    # If row 2 counted as terminal, vs[1] were 2; if row 3 were bootstrapped from, 2 + 0.5 * 11.
    assert vs.flatten().tolist() == [3.0, 4.0, 4.0, 11.0]
    assert pg_advantages.flatten().tolist() == [3.0 - 1.0, 4.0 - 2.0, 0.0, 11.0 - 8.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("key", ["log_rhos", "discounts", "rewards"])
def test_nan_at_a_masked_place_does_not_pass(key, bad):
    case = {**TIME_LIMIT, key: np.where(TIME_LIMIT["mask"], TIME_LIMIT[key], bad)}
    for got, wanted in zip(compute(case), compute(TIME_LIMIT), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("key", KEYS)
def test_nan_behind_a_masked_place_does_not_pass(key, bad):
    # Discount 0.5 into the reset row, too, so that only the mask can keep its value out.
    case = {**TIME_LIMIT, "discounts": np.full((4, 1), 0.5)}
    case[key] = case[key].copy()
    case[key][-1] = bad
    clips = {"clip_rho_threshold": None, "clip_pg_rho_threshold": None}
    for got, wanted in zip(compute(case, **clips), compute(TIME_LIMIT, **clips), strict=True):
        assert torch.equal(got[:3], wanted[:3])
