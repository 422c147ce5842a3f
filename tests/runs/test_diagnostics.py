# SPDX-License-Identifier: Apache-2.0
"""Metrics: floats, means and texts; diagnostics by their definitions; hints made of them."""

import logging
import math
import re

import numpy as np
import pytest
import torch
from small_run import UPDATE, create_learner, parse, record

import monobeast
import polybeast
import ppo
import vtrace
from beast.runs import diagnostics
from beast.runs.diagnostics import mean_floats, to_floats
from beast.runs.run import Run

T, B, A = 6, 4, 5
NAMES = {
    "clipped_rhos", "effective_sample_size", "log_rho_mean", "log_rho_std",
    "behavior_target_kl", "entropy_share", "explained_variance",
}  # fmt: skip
GOOD = {
    "effective_sample_size": 0.9,
    "behavior_target_kl": 0.01,
    "policy_lag_max": 3,
    "entropy_share": 0.6,
    "explained_variance": 0.5,
    "clipped_updates": 0.2,
}


@pytest.fixture
def watched():
    """Diagnostics that have seen enough to judge."""
    watched = diagnostics.Diagnostics()
    watched.text({}, diagnostics.WARM_UP)
    return watched


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum())


def random_batch(seed, difference=0.5):
    """Return logits of both policies, V-trace's targets, values, mask and actions."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=rng)

    behavior, values = normal(T, B, A), normal(T, B)
    target = behavior + difference * normal(T, B, A)
    actions = torch.randint(A, (T, B), generator=rng)
    mask = torch.rand(T, B, generator=rng) > 0.3
    discounts, rewards = torch.full((T, B), 0.9), normal(T, B)
    targets = vtrace.from_logits(
        behavior, target, actions, discounts, rewards, values, normal(B), mask=mask
    )
    return behavior, target, targets, values, mask, actions


def slow_metrics(behavior, target, targets, values, mask, actions):
    """Return the metrics by their definitions, one transition after the other."""
    rhos, kls, entropies, vs, errors = [], [], [], [], []
    for t in range(T):
        for b in range(B):
            if not mask[t, b]:
                continue
            log_mu, log_pi = (log_softmax(x[t, b].double().numpy()) for x in (behavior, target))
            rhos.append(math.exp(log_pi[actions[t, b]] - log_mu[actions[t, b]]))
            kls.append(sum(math.exp(m) * (m - p) for m, p in zip(log_mu, log_pi, strict=True)))
            entropies.append(-sum(math.exp(p) * p for p in log_pi))
            vs.append(float(targets.vs[t, b]))
            errors.append(vs[-1] - float(values[t, b]))
    return {
        "clipped_rhos": sum(rho > 1 for rho in rhos) / len(rhos),
        "effective_sample_size": sum(rhos) ** 2 / sum(rho**2 for rho in rhos) / len(rhos),
        "log_rho_mean": np.mean(np.log(rhos)),
        "log_rho_std": np.std(np.log(rhos)),
        "behavior_target_kl": np.mean(kls),
        "entropy_share": np.mean(entropies) / np.log(A),
        "explained_variance": max(-1, 1 - np.var(errors) / np.var(vs)),
    }


@pytest.mark.parametrize("values", ["random", "constant", "good", "bad"])
@pytest.mark.parametrize("seed", range(5))
def test_each_metric_is_what_its_definition_says(seed, values):
    behavior, target, targets, old_values, mask, actions = random_batch(seed)
    vs = targets.vs
    values = {"constant": torch.full_like(vs, 7), "good": vs + 3, "bad": -9 * vs}.get(
        values, old_values
    )
    batch = (behavior, target, targets, values, mask)
    metrics = to_floats(diagnostics.from_logits(*batch))
    assert metrics.keys() == NAMES
    assert metrics == pytest.approx(slow_metrics(*batch, actions), rel=1e-4, abs=1e-6)


def test_what_is_masked_does_not_count():
    behavior, target, targets, values, mask, _ = random_batch(1)
    before = to_floats(diagnostics.from_logits(behavior, target, targets, values, mask))
    others = [torch.where(mask, x, math.nan) for x in (targets.vs, targets.log_rhos, values)]
    logits = [torch.where(mask[..., None], x, math.inf) for x in (behavior, target)]
    targets = targets._replace(vs=others[0], log_rhos=others[1])
    assert to_floats(diagnostics.from_logits(*logits, targets, others[2], mask)) == before


def test_without_logits_actions_estimate_the_divergence():
    num, rng = 200_000, torch.Generator().manual_seed(0)
    behavior, target = torch.randn(2, A, generator=rng).log_softmax(-1)
    actions = torch.multinomial(behavior.exp(), num, replacement=True, generator=rng)
    log_rhos = (target - behavior)[actions].view(1, num)
    rows = [torch.randn(1, num) for _ in range(2)]
    mask = torch.ones_like(log_rhos) > 0
    metrics = to_floats(diagnostics.from_importance_weights(log_rhos, *rows, mask))
    kl = float((behavior.exp() * (behavior - target)).sum())
    assert metrics["behavior_target_kl"] == pytest.approx(kl, rel=0.02)
    assert metrics.keys() == NAMES - {"entropy_share"}


@pytest.mark.parametrize("sizes", [(4,), (1, 3), (2, 2), (1, 1, 1, 1)])
def test_moments_of_learners_make_the_metrics_of_one_batch(sizes):
    behavior, target, targets, values, mask, _ = random_batch(3, difference=2)
    mask[:, 3] = False  # a learner whose batch has nothing to learn from
    together = to_floats(diagnostics.from_logits(behavior, target, targets, values, mask))
    batch = behavior, target, *targets, values, mask
    parts = zip(*(x.split(sizes, dim=1) for x in batch), strict=True)
    metrics = [
        diagnostics.from_logits(behavior, target, type(targets)(*rest), values, mask)
        for behavior, target, *rest, values, mask in parts
    ]
    # As they travel between learners; where a batch is empty, zeros do.
    moments = torch.stack([m["moments"].float() for m in metrics])
    assert to_floats({"moments": moments}) == pytest.approx(together, rel=1e-5)
    assert mean_floats(metrics) == pytest.approx(together, rel=1e-5)


@pytest.mark.parametrize("value", [0.0, 1e3, -1e3, 3e38, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["log_rhos", "vs", "values", "logits", "mask"])
def test_metrics_are_finite_whatever_is_in_the_batch(where, value):
    behavior, target, targets, values, mask, _ = random_batch(5)
    if where in ("log_rhos", "vs"):
        getattr(targets, where)[1, 2] = value
        getattr(targets, where)[2] = -value
    elif where == "values":
        values[:] = value
    elif where == "logits":
        behavior[0, :, 0] = target[0, :, 0] = value
        behavior[1, :, 1], target[2, :, 2] = value, value
    mask = torch.full_like(mask, where != "mask")
    moments = diagnostics.from_logits(behavior, target, targets, values, mask)
    assert all(map(math.isfinite, to_floats(moments).values()))


def test_metrics_leave_the_device_together(monkeypatch):
    batch, tolist, left = random_batch(7)[:-1], torch.Tensor.tolist, []
    refuse = property(lambda self: pytest.fail("a number left the device by itself"))
    for name in ("item", "__float__", "__bool__", "__int__", "nonzero", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: left.append(x) or tolist(x))
    to_floats(diagnostics.from_logits(*batch) | {"loss": torch.ones(())})
    assert len(left) == 1


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("effective_sample_size", 0.3, "ESS 0.3"),
        ("behavior_target_kl", 0.2, "KL 0.2"),
        ("policy_lag_max", 150, "lag 150"),
        ("entropy_share", 0.012, "entropy 0.012"),
        ("explained_variance", 0.001, "baseline 0.001"),
        ("clipped_updates", 1.0, "clipped 1"),
    ],
)
def test_a_hint_appears_once_and_vanishes_again(watched, caplog, name, value, text):
    caplog.set_level(logging.INFO)
    assert {watched.text(GOOD, 1) for _ in range(20)} == {"ok"} and not caplog.records
    bad = GOOD | {name: value}
    for _ in range(diagnostics.PATIENCE - 1):
        assert watched.text(bad, 1) == "ok"
    assert {watched.text(bad, 1) for _ in range(20)} == {text}
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith(f"Diagnostics: {name} is {value:g}: ")
    assert any(word in record.message for word in ("raise", "lower", "look"))
    for _ in range(diagnostics.PATIENCE - 1):
        assert watched.text(GOOD, 1).startswith(text.split()[0])
    assert {watched.text(GOOD, 1) for _ in range(20)} == {"ok"}
    assert caplog.messages[1:] == [f"Diagnostics: {name} is back within its limit: {GOOD[name]:g}"]


def test_the_worst_is_shown_and_each_is_logged(watched, caplog):
    bad = GOOD | {"effective_sample_size": 0.4, "entropy_share": 0.001, "clipped_updates": 0.99}
    for _ in range(diagnostics.PATIENCE):
        text = watched.text(bad, 1)
    assert text == "entropy 0.001"
    assert len(caplog.records) == 3
    assert watched.text(bad | {"effective_sample_size": 0.01}, 1) == "ESS 0.01"


def test_a_passing_value_or_a_tick_without_update_is_no_hint(watched, caplog):
    assert watched.text({}, 1) == "ok"  # of a loss of one's own
    bad = GOOD | {"entropy_share": 0.0}
    ticks = [bad] * (diagnostics.PATIENCE - 1)
    assert {watched.text(metrics, 1) for metrics in [*ticks, GOOD] * 5 + ticks} == {"ok"}
    assert {watched.text(bad, 0) for _ in range(20)} == {"ok"}
    assert not caplog.records
    assert watched.text(bad | {"policy_lag_max": None}, 1) == "entropy 0"
    assert watched.text({}, 1) == "ok"


def test_each_check_names_metrics_and_flags_that_exist():
    for check in diagnostics.CHECKS:
        assert check.name in (*NAMES, "clipped_updates", "policy_lag_max")
        assert check.severity(check.limit) == 0 and check.severity(check.worst) == 1
        assert check.severity(GOOD[check.name]) < 0
        for flag in re.findall(r"--(\w+)", check.advice):
            programs = [ppo] if flag == "num_epochs" else [monobeast, polybeast]
            for program in programs:
                assert flag in vars(program.parser.parse_args([]))


def test_a_run_logs_its_health_but_not_of_the_first_updates(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(diagnostics, "WARM_UP", 5)
    monkeypatch.setattr(diagnostics, "PATIENCE", 2)
    flags = parse(tmp_path)
    with Run(flags, create_learner(flags)) as run:
        for _ in range(8):
            good = {name: x for name, x in GOOD.items() if name != "policy_lag_max"}  # the run's
            record(run, UPDATE | good | {"clipped_updates": 1.0})
            run.tick()
    texts = re.findall(r"\| health (.*?) \|", caplog.text)
    # The last one as the run ends.
    assert texts == ["after 5 updates"] * 4 + ["ok"] + ["clipped 1"] * 4
    assert caplog.text.count("Diagnostics: clipped_updates is 1: ") == 1


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (torch.tensor(1.5, requires_grad=True), 1.5),
        (torch.tensor([[2]]), 2.0),
        (torch.tensor(True), 1.0),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (0.1, 0.1),
        (7, 7.0),
        (False, 0.0),
    ],
)
def test_metrics_become_floats(value, number):
    assert repr(to_floats({"a": 4, "b": value})) == repr({"a": 4.0, "b": number})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(3), r"has shape \[3\], but a metric is one number: sum it over the batch"),
        (torch.zeros(2, 0), r"has shape \[2, 0\], but a metric is one number: sum it over the b"),
        ([1.0, 2.0], r"has shape \[2\], but a metric is one number: sum it over the batch"),
        (None, "is a NoneType, but a metric is one number"),
        ("good", "is a str, but a metric is one number"),
        (torch.nn.Linear(1, 1), "is a Linear, but a metric is one number"),
    ],
)
def test_a_metric_that_is_not_one_number_is_refused_by_name(value, message):
    metrics = {"loss": torch.tensor(1.0), "norms": value}
    for convert in (to_floats, lambda metrics: mean_floats([metrics] * 2)):
        with pytest.raises(ValueError, match=f"the metric 'norms' {message}"):
            convert(metrics)


def test_a_metric_with_the_name_of_one_of_ours_is_refused():
    metrics = diagnostics.from_logits(*random_batch(1)[:5]) | {"explained_variance": torch.ones(())}
    with pytest.raises(ValueError, match="'explained_variance' is one of ours .*: rename"):
        to_floats(metrics)


def test_means_of_metrics_are_floats():
    dicts = [{"a": torch.tensor(True), "b": 1.0}, {"a": torch.tensor(False), "b": torch.ones(1)}]
    assert mean_floats(dicts) == {"a": 0.5, "b": 1.0}
    assert mean_floats([{"a": 0.1}, {"a": 0.3}]) == {"a": 0.2}
    # Some minibatches alone may have one.
    assert mean_floats([{"a": 1.0}, {"a": 3.0, "b": 5.0}]) == {"a": 2.0, "b": 5.0}


def test_metrics_are_finite_if_all_of_them_are():
    assert diagnostics.is_finite({"a": 1.0, "b": -1e300}) and diagnostics.is_finite({})
    for value in (math.nan, math.inf, -math.inf):
        assert not diagnostics.is_finite({"a": 1.0, "b": value})


def test_the_mean_of_nothing_is_none_and_shown_as_a_dash():
    assert diagnostics.means([]) == {} and diagnostics.mean([]) is None
    dicts = [{"a": 1.0, "b": 2.0}, {"a": 2.0}, {"c": 0.0}]
    assert diagnostics.means(dicts) == {"a": 1.5, "b": 2.0, "c": 0.0}
    assert diagnostics.mean([1, 2, 6]) == 3 and diagnostics.mean([0.1] * 10) == 0.1
    shown = {None: "-", -20.5: "-20.5", 123456.0: "1.235e+05"}
    assert {value: diagnostics.show(value) for value in shown} == shown
