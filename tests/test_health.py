# SPDX-License-Identifier: Apache-2.0
"""Figures of an update's health, each against its definition; and the hints made of them."""

import logging
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from program import TESTS, column, read_rows, run
from test_parity import make_batch

import health
import monobeast
import polybeast
import vtrace

T, B, A = 6, 4, 5
GOOD = {
    "effective_sample_size": 0.9,
    "behavior_target_kl": 0.01,
    "policy_lag_max": 3,
    "entropy_share": 0.6,
    "explained_variance": 0.5,
    "clipped_updates": 0.2,
}


@pytest.fixture
def checkup():
    """A checkup that has seen enough to judge."""
    checkup = health.Checkup(40)
    for _ in range(health.WARM_UP):
        checkup.add({"grad_norm": 1.0})
    checkup.means()
    return checkup


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


def slow_figures(behavior, target, targets, values, mask, actions):
    """Return the figures by their definitions, one transition after the other."""
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


def floats(figures):
    return {name: float(value) for name, value in figures.items()}


@pytest.mark.parametrize("seed", range(5))
def test_each_figure_is_what_its_definition_says(seed):
    *batch, actions = random_batch(seed)
    figures = floats(health.from_logits(*batch))
    assert figures.keys() == set(health.NAMES)
    assert figures == pytest.approx(slow_figures(*batch, actions), rel=1e-4, abs=1e-6)


def test_what_is_masked_does_not_count():
    behavior, target, targets, values, mask, _ = random_batch(1)
    before = floats(health.from_logits(behavior, target, targets, values, mask))
    others = [torch.where(mask, x, math.nan) for x in (targets.vs, targets.log_rhos, values)]
    logits = [torch.where(mask[..., None], x, math.inf) for x in (behavior, target)]
    targets = targets._replace(vs=others[0], log_rhos=others[1])
    assert floats(health.from_logits(*logits, targets, others[2], mask)) == before


def test_on_policy_all_weights_are_one():
    behavior, _, targets, values, mask, _ = random_batch(2, difference=0)
    figures = floats(health.from_logits(behavior, behavior, targets, values, mask))
    assert figures["clipped_rhos"] == figures["log_rho_mean"] == figures["log_rho_std"] == 0
    assert figures["behavior_target_kl"] == 0
    assert figures["effective_sample_size"] == pytest.approx(1)


def test_an_even_policy_has_all_of_the_entropy_and_a_sure_one_none():
    _, _, targets, values, mask, _ = random_batch(3)
    for logits, share in (torch.zeros(A), 1), (torch.tensor([0.0, -100, -100, -100, -100]), 0):
        logits = logits.expand(T, B, A)
        figures = health.from_logits(logits, logits, targets, values, mask)
        assert float(figures["entropy_share"]) == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize(
    "values, share",
    [(lambda vs: vs + 3, 1), (lambda vs: torch.full_like(vs, 7), 0), (lambda vs: -9 * vs, -1)],
)
def test_explained_variance_is_of_what_a_constant_leaves(values, share):
    log_rhos, vs, mask = torch.zeros(T, B), torch.randn(T, B), torch.ones(T, B, dtype=torch.bool)
    figures = health.from_importance_weights(log_rhos, vs, values(vs), mask)
    assert float(figures["explained_variance"]) == pytest.approx(share, abs=1e-6)


def test_without_logits_the_divergence_is_estimated_from_the_actions_taken():
    num, rng = 200_000, torch.Generator().manual_seed(0)
    behavior, target = torch.randn(2, A, generator=rng).log_softmax(-1)
    actions = torch.multinomial(behavior.exp(), num, replacement=True, generator=rng)
    log_rhos = (target - behavior)[actions].view(1, num)
    rows = [torch.randn(1, num) for _ in range(2)]
    figures = health.from_importance_weights(log_rhos, *rows, torch.ones_like(log_rhos) > 0)
    kl = float((behavior.exp() * (behavior - target)).sum())
    assert float(figures["behavior_target_kl"]) == pytest.approx(kl, rel=0.02)
    assert figures.keys() == set(health.NAMES) - {"entropy_share"}


def test_figures_take_further_dimensions_of_the_batch():
    behavior, target, targets, values, mask, _ = random_batch(4)
    flat = health.from_importance_weights(targets.log_rhos, targets.vs, values, mask)
    nested = health.from_importance_weights(
        *(x.view(T, 2, 2) for x in (targets.log_rhos, targets.vs, values, mask))
    )
    assert floats(flat) == floats(nested)


@pytest.mark.parametrize("value", [0.0, 1e3, -1e3, 3e38, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["log_rhos", "vs", "values", "logits", "mask"])
def test_figures_are_finite_whatever_is_in_the_batch(where, value):
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
    figures = health.from_logits(behavior, target, targets, values, mask)
    assert all(map(math.isfinite, floats(figures).values()))


def test_one_action_is_all_that_there_is_to_explore():
    _, _, targets, values, mask, _ = random_batch(6)
    logits = torch.randn(T, B, 1)
    assert float(health.from_logits(logits, logits, targets, values, mask)["entropy_share"]) == 1


@pytest.mark.parametrize("program", [monobeast, polybeast])
def test_learning_is_the_same_without_the_figures(program, monkeypatch):
    outcomes = []
    for is_dropped in (False, True):
        if is_dropped:
            monkeypatch.setattr(health, "from_logits", lambda *_: {})
        torch.manual_seed(0)
        net = program.AtariNet(gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), 6)
        optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)
        flags = program.parser.parse_args([])
        figures = program.learn(flags, net, make_batch(1), net.initial_state(3), optimizer)
        outcomes.append((figures, net.state_dict()))
    (figures, weights), (fewer, same_weights) = outcomes
    assert set(health.NAMES) <= figures.keys()
    assert fewer == {k: v for k, v in figures.items() if k not in health.NAMES}
    for name in weights:
        assert torch.equal(weights[name], same_weights[name])


def test_figures_leave_the_device_together(monkeypatch):
    batch = random_batch(7)[:-1]
    refuse = property(lambda self: pytest.fail("a number left the device by itself"))
    for name in ("item", "__float__", "__bool__", "__int__", "tolist", "nonzero", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    health.from_logits(*batch)


def test_a_checkup_gives_means_over_the_updates_of_a_tick():
    checkup = health.Checkup(40)
    assert checkup.means() == {}
    for norm, share in (30.0, 0.5), (41.0, 0.25), (50.0, 0.75), (math.nan, 0.1), (39.0, math.inf):
        checkup.add({"total_loss": 1.0, "grad_norm": norm, "entropy_share": share})
    means = checkup.means()
    assert means == {"entropy_share": 0.5, "clipped_updates": pytest.approx(2 / 3)}
    assert checkup.means() == {}


def test_a_loss_without_figures_of_health_can_be_learned_with(checkup):
    checkup.add({"total_loss": 1.0, "grad_norm": 1.0})
    means = checkup.means()
    assert means == {"clipped_updates": 0}
    assert checkup.text(means) == "ok"


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("effective_sample_size", 0.3, "ESS 0.3"),
        ("behavior_target_kl", 0.2, "KL 0.2"),
        ("policy_lag_max", 150, "lag 150"),
        ("entropy_share", 0.012, "entropy 0.012"),
        ("explained_variance", -0.4, "baseline -0.4"),
        ("clipped_updates", 1.0, "clipped 1"),
    ],
)
def test_a_hint_appears_once_and_vanishes_again(checkup, caplog, name, value, text):
    caplog.set_level(logging.INFO)
    assert {checkup.text(GOOD) for _ in range(20)} == {"ok"} and not caplog.records
    bad = GOOD | {name: value}
    for _ in range(health.PATIENCE - 1):
        assert checkup.text(bad) == "ok"
    assert {checkup.text(bad) for _ in range(20)} == {text}
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith(f"Health: {name} is {value:g}: ")
    assert any(word in record.message for word in ("raise", "lower", "look"))
    for _ in range(health.PATIENCE - 1):
        assert checkup.text(GOOD).startswith(text.split()[0])
    assert {checkup.text(GOOD) for _ in range(20)} == {"ok"}
    assert caplog.messages[1:] == [f"Health: {name} is well again: {GOOD[name]:g}"]


def test_what_comes_and_goes_is_no_hint(checkup, caplog):
    bad = GOOD | {"entropy_share": 0.0}
    ticks = [bad] * (health.PATIENCE - 1) + [GOOD]
    assert {checkup.text(figures) for figures in ticks * 5} == {"ok"}
    assert not caplog.records


def test_the_first_updates_are_not_judged():
    checkup = health.Checkup(40)
    for _ in range(2 * health.PATIENCE):
        checkup.add({"grad_norm": 100.0})
        assert checkup.text(GOOD | checkup.means()) == "-"
    for _ in range(health.WARM_UP):
        checkup.add({"grad_norm": 1.0})
    assert checkup.text(GOOD | checkup.means()) == "ok"


def test_the_worst_is_shown_and_each_is_told(checkup, caplog):
    bad = GOOD | {"effective_sample_size": 0.4, "entropy_share": 0.001, "clipped_updates": 0.99}
    for _ in range(health.PATIENCE):
        text = checkup.text(bad)
    assert text == "entropy 0.001"
    assert len(caplog.records) == 3
    assert checkup.text(bad | {"effective_sample_size": 0.01}) == "ESS 0.01"


def test_a_tick_without_an_update_changes_nothing(checkup):
    assert checkup.text({"policy_lag_max": None}) == "-"
    bad = GOOD | {"entropy_share": 0.0}
    for _ in range(health.PATIENCE - 1):
        checkup.text(bad)
    stale = {k: v for k, v in bad.items() if k != "clipped_updates"}
    assert {checkup.text(stale) for _ in range(20)} == {"ok"}
    assert checkup.text(bad | {"policy_lag_max": None}) == "entropy 0"


def test_hints_are_in_the_programs_words():
    """Each check is of a figure that there is, its limit on the way to the worst."""
    for check in health.CHECKS:
        assert check.name in (*health.NAMES, "clipped_updates", "policy_lag_max")
        assert check.severity(check.limit) == 0 and check.severity(check.worst) == 1
        assert check.severity(GOOD[check.name]) < 0
        for flag in [w.strip("(),;:") for w in check.words.split() if w.startswith("--")]:
            for program in (monobeast, polybeast):
                assert flag[2:] in vars(program.parser.parse_args([]))


IMPATIENT = """
import sys

sys.path.insert(0, {tests!r})
import {fork}
import experiment
import health
import {program}

health.WARM_UP, health.PATIENCE = 5, 2

if __name__ == "__main__":
    experiment.start_logging()
    sys.exit({program}.main())
"""


@pytest.mark.parametrize("fork, program", [("catch", "monobeast"), ("catch_poly", "polybeast")])
def test_a_run_tells_of_its_health(tmp_path, fork, program):
    script = tmp_path / "fork.py"
    script.write_text(IMPATIENT.format(tests=str(TESTS), fork=fork, program=program))
    words = "--env Catch --total_steps 40_000 --seed 1 --disable_cuda --grad_norm_clipping 1e-5"
    status, output = run(script, words, "--xpid run --savedir", tmp_path)
    assert status == 0, output
    rows = read_rows(tmp_path / "run")
    shares = [n for n in health.NAMES if n.startswith(("clipped", "effective", "entropy"))]
    for name in shares:
        assert column(rows, name) and all(0 <= x <= 1 for x in column(rows, name)), name
    for name in set(health.NAMES).difference(shares):
        assert column(rows, name) and all(-1 <= x <= 1 for x in column(rows, name)), name
    assert set(column(rows, "clipped_updates")) == {1}
    assert output.count("Health: clipped_updates is 1: ") == 1
    assert " | health clipped 1 | " in output
    assert " | health - | " in output or " | health ok | " in output  # before
    (events,) = (tmp_path / "run").glob("events.*")
    assert all(name.encode() in events.read_bytes() for name in health.NAMES)
