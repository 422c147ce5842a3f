# SPDX-License-Identifier: Apache-2.0
"""Metrics: from tensors to numbers, means and texts."""

import math

import pytest
import torch

from beast.runs import diagnostics, metrics


def test_metrics_become_floats():
    cases = {
        "tensor": (torch.tensor(1.5), 1.5),
        "one_element": (torch.tensor([[2]]), 2.0),
        "bool_tensor": (torch.tensor(True), 1.0),
        "half": (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        "grad": (torch.tensor(3.0, requires_grad=True), 3.0),
        "float": (0.1, 0.1),
        "int": (7, 7.0),
        "bool": (False, 0.0),
    }
    numbers = metrics.to_floats({name: given for name, (given, _) in cases.items()})
    assert all(type(value) is float for value in numbers.values())
    assert list(numbers.items()) == [(name, wanted) for name, (_, wanted) in cases.items()]


@pytest.mark.parametrize(
    "value", [torch.zeros(3), torch.zeros(2, 0), [1.0, 2.0], None, "good", torch.nn.Linear(1, 1)]
)
def test_a_metric_that_is_not_one_number_is_refused_by_name(value):
    what = r"has shape \[.*\]" if isinstance(value, torch.Tensor | list) else "is a .*"
    advice = ": sum it over the batch" if "shape" in what else ""
    with pytest.raises(ValueError, match=rf"the metric 'norms' {what}, but .* one number{advice}"):
        metrics.to_floats({"loss": torch.tensor(1.0), "norms": value})
    with pytest.raises(ValueError, match=rf"the metric 'norms' {what}, but .* one number"):
        metrics.mean_floats([{"loss": torch.tensor(1.0), "norms": value}] * 2)


def test_means_of_metrics_are_floats():
    dicts = [{"a": torch.tensor(True), "b": 1.0}, {"a": torch.tensor(False), "b": torch.ones(1)}]
    assert metrics.mean_floats(dicts) == {"a": 0.5, "b": 1.0}
    assert metrics.mean_floats([{"a": 0.1}, {"a": 0.3}]) == {"a": 0.2}


def test_mean_moments_are_those_of_all_transitions():
    log_rhos, vs, values = torch.randn(3, 6, 4)
    mask = torch.ones(6, 4, dtype=torch.bool)
    whole = diagnostics.from_importance_weights(log_rhos, vs, values, mask)
    halves = [
        diagnostics.from_importance_weights(log_rhos[h], vs[h], values[h], mask[h])
        for h in (slice(0, 2), slice(2, 6))
    ]
    assert metrics.mean_floats(halves) == pytest.approx(metrics.to_floats(whole), rel=1e-5)


def test_metrics_are_finite_if_all_of_them_are():
    assert metrics.is_finite({"a": 1.0, "b": -1e300}) and metrics.is_finite({})
    for value in (math.nan, math.inf, -math.inf):
        assert not metrics.is_finite({"a": 1.0, "b": value})


def test_the_mean_of_nothing_is_none_and_shown_as_a_dash():
    dicts = [{"a": 1.0, "b": 2.0}, {"a": 2.0}, {"c": 0.0}]
    assert metrics.means(dicts) == {"a": 1.5, "b": 2.0, "c": 0.0} and metrics.means([]) == {}
    assert metrics.mean([]) is None and metrics.show(None) == "-"
    assert metrics.mean([1, 2, 6]) == 3
    assert metrics.mean([0.1] * 10) == 0.1
    assert metrics.show(metrics.mean([-21.0, -20.0])) == "-20.5"
    assert metrics.show(123456.0) == "1.235e+05"
