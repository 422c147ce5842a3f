# SPDX-License-Identifier: Apache-2.0
"""Metrics of updates and runs: from tensors to numbers, from numbers to texts."""

import math

import torch

from beast.runs import diagnostics


def to_floats(metrics):
    """Return a dict of metrics, each a tensor of one element or a number, as a dict of floats.

    `moments`, a tensor [..., moments], becomes the metrics that diagnostics.from_moments makes.

    Raises:
      ValueError: a metric is not one number; the message names it.
    """
    values = []
    for name, value in metrics.items():
        try:
            value = torch.as_tensor(value, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"the metric {name!r} is a {type(value).__name__}, but a metric is one number"
            ) from error
        if value.numel() != 1 and name != "moments":
            raise ValueError(
                f"the metric {name!r} has shape {list(value.shape)}, but a metric is one number: "
                "sum it over the batch (docs/loss.md), or give each element a name of its own"
            )
        values.append(value.detach())
    # In one go, since on a GPU each of them alone would be waited for.
    devices = {value.device for value in values if value.device.type != "cpu"}
    device = devices.pop() if devices else torch.device("cpu")
    numbers = torch.cat([value.flatten().to(device) for value in values]).tolist()
    floats = {}
    for name, value in zip(metrics, values, strict=True):
        own, numbers = numbers[: value.numel()], numbers[value.numel() :]
        if name == "moments":
            n = value.shape[-1]
            floats |= diagnostics.from_moments([own[i : i + n] for i in range(0, len(own), n)])
        else:
            (floats[name],) = own
    return floats


def mean_floats(dicts):
    """Return the mean of each metric over dicts that all have it, as `to_floats` takes them.

    Moments are those of the transitions of all.
    """
    to_floats(dicts[0])  # refuses what is not one number
    means = {}
    for name, first in dicts[0].items():
        dtype = None if torch.is_tensor(first) else torch.float64  # a number has more digits
        shape = (-1,) if name == "moments" else ()
        values = [torch.as_tensor(metrics[name], dtype=dtype).reshape(shape) for metrics in dicts]
        values = torch.stack(values)
        means[name] = values if name == "moments" else values.double().mean()
    return to_floats(means)


def is_finite(metrics):
    """Return whether all metrics, floats by name, are finite."""
    return all(map(math.isfinite, metrics.values()))


def mean(values):
    """Return the mean of some numbers; None, not NaN, where there are none yet."""
    return math.fsum(values) / len(values) if values else None


def means(dicts):
    """Return the mean of each metric over those dicts that have it."""
    names = dict.fromkeys(name for metrics in dicts for name in metrics)
    return {name: mean([m[name] for m in dicts if name in m]) for name in names}


def show(value):
    """Return a number as a short text; a dash for None."""
    return "-" if value is None else f"{value:.4g}"
