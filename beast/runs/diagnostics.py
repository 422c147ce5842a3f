# SPDX-License-Identifier: Apache-2.0
"""Diagnostics: how off-policy an update was, and how good policy and baseline are.

`from_logits` computes the moments of one batch, for Discrete actions; `from_importance_weights`,
for other actions, needs no logits. `to_floats` makes floats of an update's metrics, those of its
moments among them. `Diagnostics` watches the metrics of each tick and says what is off. No metric
enters a loss, and a `compute_loss` that leaves them out loses nothing else.

    clipped_rhos           share of the transitions whose importance weight rho exceeds 1, where
                           V-trace clips it; about a half for similar policies
    effective_sample_size  (sum of rhos)^2 / sum of rhos^2, as a share of the transitions (Kish
                           1965): 1 on-policy, toward 0 where a few of them weigh for all
    log_rho_mean           mean and standard deviation of log rho, in nats; 0 on-policy
    log_rho_std
    behavior_target_kl     mean Kullback-Leibler divergence, in nats, from the policy that acted to
                           the one that learns; 0 on-policy
    entropy_share          mean entropy of the policy that learns, as a share of the largest one
    explained_variance     1 - variance of (vs - baseline) / variance of vs: 1 where the baseline
                           predicts the targets of V-trace, 0 where it does no better than a
                           constant; values below -1 are given as -1, or batches with almost no
                           rewards would hide all others in a plot
    clipped_updates        share of a tick's updates whose gradient was clipped (from `learn`)

Shapes: T unroll length, B batch size, A actions. Masked-out transitions are ignored.
"""

import logging
import math
import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F

# The limits are wide: a run that learns gets almost no hints.

# Below half of the particles, particle filters are resampled (Doucet and Johansen 2009).
MIN_EFFECTIVE_SAMPLE_SIZE = 0.5
# Ten times as far as TRPO lets an update go (0.01 nats, Schulman et al. 2015).
MAX_KL = 0.1
# Of six actions, one has 99.5 %.
MIN_ENTROPY_SHARE = 0.02
# At 0 a constant would do as well. After WARM_UP twelve runs in results/, none of which learned,
# were below this for 9 to 37 ticks in a row, all others for at most 8. Tasks that are solved,
# where states differ little in value, come close to it, too.
MIN_EXPLAINED_VARIANCE = 0.02
# Pong has up to 94 % in its first minutes. MinAtar's Asterix and Space Invaders stay above 95 % for
# most of their way, and learn: so this says that something may be gained, not that a run is lost.
MAX_CLIPPED_UPDATES = 0.95
# Updates. Whatever is under way makes up a few batches, or as many as there are environments to
# each rollout of a batch.
MAX_POLICY_LAG = 100
# Ticks in a row (a minute, where they come every five seconds) until something counts as off, or
# as well again.
PATIENCE = 12
# An action whose logit is below it is forbidden.
LEAST_LOGIT = -1e8
# Updates at the start that are not judged: the values are all wrong then, and gradients long.
WARM_UP = 1000


class Check(NamedTuple):
    """A metric that is abnormal beyond `limit`; its severity grows toward `worst`."""

    name: str
    label: str  # on the screen
    limit: float
    worst: float
    advice: str

    def severity(self, value):
        """Return 0 at the limit, 1 at the worst; negative values are normal."""
        return (value - self.limit) / (self.worst - self.limit)


FRESHER = (
    "lower --policy_clipping or --learning_rate; in ppo.py also --num_epochs; elsewhere raise "
    "--batch_size, have fewer environments, or lower --replay_ratio"
)
CHECKS = (
    Check(
        name="effective_sample_size",
        label="ESS",
        limit=MIN_EFFECTIVE_SAMPLE_SIZE,
        worst=0,
        advice="a few transitions weigh for all, as the policies that acted are far from the one "
        f"that learns: {FRESHER}",
    ),
    Check(
        name="behavior_target_kl",
        label="KL",
        limit=MAX_KL,
        worst=1,
        advice=f"the policies that acted are far from the one that learns: {FRESHER}",
    ),
    Check(
        name="policy_lag_max",
        label="lag",
        limit=MAX_POLICY_LAG,
        worst=10 * MAX_POLICY_LAG,
        advice="some rollouts were made with a policy that is that many updates old: look for an "
        "actor or a server that is slow or was stopped; else raise --batch_size or have fewer "
        "environments",
    ),
    Check(
        name="entropy_share",
        label="entropy",
        limit=MIN_ENTROPY_SHARE,
        worst=0,
        advice="the policy hardly explores any more: if it has not learned yet, raise "
        "--entropy_cost",
    ),
    Check(
        name="explained_variance",
        label="baseline",
        limit=MIN_EXPLAINED_VARIANCE,
        worst=-1,
        advice="the baseline predicts returns no better than a constant would, which is normal "
        "while rewards are rare, or where all states are worth the same; else lower "
        "--learning_rate or raise --baseline_cost, and scale observations so that background is "
        "0 (docs/model.md)",
    ),
    Check(
        name="clipped_updates",
        label="clipped",
        limit=MAX_CLIPPED_UPDATES,
        worst=1,
        advice="nearly every gradient is clipped: raise --grad_norm_clipping, or make the loss "
        "smaller (rewards; where it is a sum, also --batch_size and --unroll_length). Where the "
        "optimizer is Adam, this may do no harm",
    ),
)


@torch.no_grad()
def from_logits(behavior_policy_logits, target_policy_logits, targets, values, mask):
    """Return the moments of a batch whose policies are softmaxes, as a dict of one tensor.

    Args:
      behavior_policy_logits: [T, B, A], of the policy that acted; where an action is forbidden,
        -inf or below LEAST_LOGIT.
      target_policy_logits: [T, B, A], of the policy that learns.
      targets: what vtrace.from_logits has returned for the batch.
      values, mask: as of `from_importance_weights`.
    """
    behavior = F.log_softmax(behavior_policy_logits, dim=-1)
    target = F.log_softmax(target_policy_logits, dim=-1)
    # Zero for actions that are never taken; there the difference may be none.
    kl = torch.where(behavior > -math.inf, behavior.exp() * (behavior - target), 0).sum(-1)
    entropy = torch.special.entr(target.exp()).sum(-1)
    num_actions = (target > LEAST_LOGIT).sum(-1)  # those that are allowed
    shares = entropy / num_actions.clamp(min=2).log()
    entropy_share = torch.where(num_actions > 1, shares, entropy + 1)
    return from_importance_weights(
        targets.log_rhos, targets.vs, values, mask, kl=kl, entropy_share=entropy_share
    )


@torch.no_grad()
def from_importance_weights(log_rhos, vs, values, mask, kl=None, entropy_share=None):
    """Return the moments from which a batch's metrics are computed, as a dict of one tensor.

    They are always finite; the loss shows whether an update is finite.
    `to_floats` turns them, or those of several learners, into metrics.

    Args:
      log_rhos: [T, B, ...], log(target / behavior) of the action taken.
      vs: [T, B, ...], the targets of the baseline.
      values: [T, B, ...], the baseline.
      mask: [T, B, ...] booleans; transitions where it is false are ignored.
      kl: [T, B, ...], divergences from behavior to target policy; without them they are estimated
        from the actions taken, as the mean of rho - 1 - log rho, which has the same expectation.
      entropy_share: [T, B, ...], entropies as shares of the largest one; without them the metric is
        left out.
    """
    if kl is None:
        kl = torch.expm1(log_rhos) - log_rhos
    rows = [log_rhos, vs, vs - values, kl]
    if entropy_share is not None:
        rows.append(entropy_share)
    mask = mask.flatten()
    num_steps = mask.sum()
    # In double precision, in which no square of a float overflows; all rows in one go, since on a
    # GPU each operation costs as much as another, however small.
    x = torch.stack([row.flatten() for row in rows]).double()
    x = torch.where(mask, x.nan_to_num(0, 1e30, -1e30), 0)
    means = x.sum(1) / num_steps.clamp(min=1)
    variances = torch.where(mask, x - means[:, None], 0).square().sum(1) / num_steps.clamp(min=1)
    # Relative to the largest one, since sums of weights may overflow.
    log_weights = torch.where(mask, x[0], -1e31)
    largest = log_weights.max()
    weights = (log_weights - largest).exp()
    single = [num_steps, (x[0] > 0).sum(), largest, weights.sum(), weights.square().sum()]
    single = torch.stack([number.double() for number in single])
    return {"moments": torch.cat([single, means, variances.sqrt()])}  # which float32 can hold


def from_moments(learners):
    """Return the metrics of an update as a dict of floats.

    Args:
      learners: lists of floats, the moments of the batch of each learner.
    """
    learners = [moments for moments in learners if moments[0] > 0] or learners[:1]
    num_rows = (len(learners[0]) - 5) // 2
    num_steps, num_clipped = (sum(moments[i] for moments in learners) for i in (0, 1))
    shares = [moments[0] / max(1, num_steps) for moments in learners]
    largest = max(moments[2] for moments in learners)
    scales = [math.exp(moments[2] - largest) for moments in learners]
    weights = sum(scale * moments[3] for scale, moments in zip(scales, learners, strict=True))
    squares = sum(scale**2 * moments[4] for scale, moments in zip(scales, learners, strict=True))

    means, variances = [], []
    for i in range(5, 5 + num_rows):
        of_each = [(moments[i], moments[i + num_rows]) for moments in learners]
        mean = sum(share * m for share, (m, _) in zip(shares, of_each, strict=True))
        terms = [deviation**2 + (m - mean) ** 2 for m, deviation in of_each]
        means.append(mean)
        variances.append(sum(share * t for share, t in zip(shares, terms, strict=True)))
    unexplained = variances[2] / max(variances[1], sys.float_info.min)
    metrics = {
        "clipped_rhos": num_clipped / max(1, num_steps),
        "effective_sample_size": min(
            1, weights**2 / max(squares, sys.float_info.min) / max(1, num_steps)
        ),
        "log_rho_mean": means[0],
        "log_rho_std": math.sqrt(variances[0]),
        "behavior_target_kl": means[3],
        "explained_variance": max(-1, 1 - unexplained),
    }
    if num_rows > 4:
        metrics["entropy_share"] = means[4]
    return metrics


def to_floats(metrics):
    """Return a dict of metrics, each a tensor of one element or a number, as a dict of floats.

    `moments`, a tensor [..., moments], becomes the metrics that `from_moments` makes.

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
        new = {name: own[0]}
        if name == "moments":
            n = value.shape[-1]
            new = from_moments([own[i : i + n] for i in range(0, len(own), n)])
        if taken := floats.keys() & new.keys():
            raise ValueError(
                f"the metric {min(taken)!r} is one of ours (docs/logs.md): rename yours"
            )
        floats |= new
    return floats


def mean_floats(dicts):
    """Return the mean of each metric over those dicts that have it, as `to_floats` takes them.

    Moments are pooled over all transitions.
    """
    firsts = {name: value for metrics in reversed(dicts) for name, value in metrics.items()}
    to_floats(firsts)  # refuses what is not one number
    means = {}
    for name, first in firsts.items():
        dtype = None if torch.is_tensor(first) else torch.float64  # a number has more digits
        shape = (-1,) if name == "moments" else ()
        values = [m[name] for m in dicts if name in m]
        values = torch.stack([torch.as_tensor(x, dtype=dtype).reshape(shape) for x in values])
        means[name] = values if name == "moments" else values.double().mean()
    return to_floats(means)


def are_finite(metrics):
    """Return whether all metrics, as `to_floats` takes them, are finite, without floats of each."""
    try:
        total = torch.as_tensor(sum(metrics.values()))  # not finite where one of them is not
    except (TypeError, RuntimeError):
        return is_finite(to_floats(metrics))  # which names what is not one number
    return bool(total.isfinite().all())


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


class Diagnostics:
    """Checks the metrics of each tick and logs advice about abnormal ones.

    An abnormal metric is logged once, after PATIENCE ticks, and again when it is back
    within its limit; in between, its name and value are on the status line, which says at first
    that there were no WARM_UP updates yet.
    """

    def __init__(self):
        self._num_updates = 0  # of all ticks
        self._off = set()  # names
        self._contrary = {}  # for how many ticks in a row a name has not been as `_off` says
        self._text = f"after {WARM_UP:,} updates"

    def text(self, metrics, num_updates):
        """Return a short text for the status line; log metrics that became abnormal or normal.

        Args:
          metrics: of the tick, numbers by name, or None; those that are missing are not checked.
          num_updates: how many updates they are the means of.
        """
        warm = self._num_updates + num_updates >= WARM_UP
        self._num_updates += num_updates
        if not num_updates or not warm:
            return self._text
        values = {c: metrics[c.name] for c in CHECKS if metrics.get(c.name) is not None}
        for check, value in values.items():
            is_off = check.severity(value) > 0
            contrary = self._contrary.get(check.name, 0) + 1
            if is_off == (check.name in self._off):
                contrary = 0
            if contrary == PATIENCE:
                contrary = 0
                self._off ^= {check.name}
                if is_off:
                    logging.warning("Diagnostics: %s is %.3g: %s", check.name, value, check.advice)
                else:
                    logging.info(
                        "Diagnostics: %s is back within its limit: %.3g", check.name, value
                    )
            self._contrary[check.name] = contrary
        off = [check for check in values if check.name in self._off]
        worst = max(off, key=lambda check: check.severity(values[check]), default=None)
        self._text = f"{worst.label} {values[worst]:.3g}" if off else "ok"
        return self._text
