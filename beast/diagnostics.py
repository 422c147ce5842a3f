# SPDX-License-Identifier: Apache-2.0
"""Diagnostics: how off-policy an update was, and how good policy and baseline are.

`from_logits` computes the metrics of one batch, for Discrete actions; `from_importance_weights`,
for other actions, needs no logits. `Diagnostics` watches the metrics of each tick and says what is
off. No metric enters a loss, and a `compute_loss` that leaves them out loses nothing else.

    clipped_rhos           share of the transitions whose importance weight rho exceeds 1, where
                           V-trace clips it; of two policies that are close, about a half
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

Shapes: T unroll length, B batch size, A actions. Transitions where the mask is false are none.
"""

import logging
import math
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
# At 0 a constant would do as well, and little below is noise around it, as before any reward.
MIN_EXPLAINED_VARIANCE = -0.2
# Pong has up to 72 % in its first minutes. MinAtar's Asterix and Space Invaders stay above 95 % for
# most of their way, and learn: so this says that something may be gained, not that a run is lost.
MAX_CLIPPED_UPDATES = 0.95
# Updates. Whatever is under way makes up a few batches, or as many as there are environments to
# each rollout of a batch.
MAX_POLICY_LAG = 100
# Ticks in a row (a minute, where they come every five seconds) until something counts as off, or
# as well again.
PATIENCE = 12
# Updates at the start that are not judged: the values are all wrong then, and gradients long.
WARM_UP = 1000


class Check(NamedTuple):
    """A metric that is off beyond `limit`; the nearer to `worst`, the worse."""

    name: str
    label: str  # on the screen
    limit: float
    worst: float
    advice: str

    def severity(self, value):
        """Return 0 at the limit, 1 at the worst; below 0: nothing is off."""
        return (value - self.limit) / (self.worst - self.limit)


FRESHER = (
    "lower --policy_clipping or --learning_rate, raise --batch_size, or have fewer environments"
)
CHECKS = (
    Check(
        name="effective_sample_size",
        label="ESS",
        limit=MIN_EFFECTIVE_SAMPLE_SIZE,
        worst=0,
        advice="a few transitions weigh for all, as the actors' policies are far from the "
        f"learner's: {FRESHER}",
    ),
    Check(
        name="behavior_target_kl",
        label="KL",
        limit=MAX_KL,
        worst=1,
        advice=f"the actors' policies are far from the learner's: {FRESHER}",
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
        advice="the baseline predicts returns worse than a constant would: unless there are too "
        "few rewards yet to learn it from, raise --baseline_cost or lower --learning_rate",
    ),
    Check(
        name="clipped_updates",
        label="clipped",
        limit=MAX_CLIPPED_UPDATES,
        worst=1,
        advice="the length of nearly every step is the clipping's, not the gradient's: raise "
        "--grad_norm_clipping, or make the loss smaller (rewards, --batch_size, --unroll_length)",
    ),
)


@torch.no_grad()
def from_logits(behavior_policy_logits, target_policy_logits, targets, values, mask):
    """Return the metrics of a batch whose policies are softmaxes.

    Args:
      behavior_policy_logits: [T, B, A], of the policy that acted.
      target_policy_logits: [T, B, A], of the policy that learns.
      targets: what vtrace.from_logits has returned for the batch.
      values, mask: as of `from_importance_weights`.
    """
    behavior = F.log_softmax(behavior_policy_logits, dim=-1)
    target = F.log_softmax(target_policy_logits, dim=-1)
    # Zero for actions that are never taken; there the difference may be none.
    kl = torch.where(behavior > -math.inf, behavior.exp() * (behavior - target), 0).sum(-1)
    entropy = torch.special.entr(target.exp()).sum(-1)
    num_actions = target.shape[-1]
    entropy_share = entropy / math.log(num_actions) if num_actions > 1 else entropy + 1
    return from_importance_weights(
        targets.log_rhos, targets.vs, values, mask, kl=kl, entropy_share=entropy_share
    )


@torch.no_grad()
def from_importance_weights(log_rhos, vs, values, mask, kl=None, entropy_share=None):
    """Return the metrics of a batch as a dict of tensors with one number each, on its device.

    They are finite whatever the batch holds: whether an update is finite is for its loss to say.

    Args:
      log_rhos: [T, B, ...], log(target / behavior) of the action taken.
      vs: [T, B, ...], the targets of the baseline.
      values: [T, B, ...], the baseline.
      mask: [T, B, ...] booleans, false where a transition is none.
      kl: [T, B, ...], divergences from behavior to target policy; without them they are estimated
        from the actions taken, as the mean of rho - 1 - log rho, which has the same expectation.
      entropy_share: [T, B, ...], entropies as shares of the largest one; without them the metric is
        left out.
    """
    if kl is None:
        kl = torch.expm1(log_rhos) - log_rhos
    rows = {"log_rho": log_rhos, "vs": vs, "error": vs - values, "kl": kl}
    if entropy_share is not None:
        rows["entropy_share"] = entropy_share
    mask = mask.flatten()
    num_steps = mask.sum().clamp(min=1)
    # In double precision, in which no square of a float overflows; all rows in one go, since on a
    # GPU each operation costs as much as another, however small.
    x = torch.stack([row.flatten() for row in rows.values()]).double()
    x = torch.where(mask, x.nan_to_num(0, 1e30, -1e30), 0)
    means = x.sum(1) / num_steps
    variances = torch.where(mask, x - means[:, None], 0).square().sum(1) / num_steps
    mean = dict(zip(rows, means, strict=True))
    variance = dict(zip(rows, variances, strict=True))

    # Softmax, since what the weights are divided by does not matter, and they may overflow.
    weights = torch.where(mask, x[0], -1e300).softmax(0)
    unexplained = variance["error"] / variance["vs"].clamp(min=torch.finfo(x.dtype).tiny)
    metrics = {
        "clipped_rhos": (x[0] > 0).sum() / num_steps,
        "effective_sample_size": (1 / (weights.square().sum() * num_steps)).clamp(max=1),
        "log_rho_mean": mean["log_rho"],
        "log_rho_std": variance["log_rho"].sqrt(),
        "behavior_target_kl": mean["kl"],
        "explained_variance": (1 - unexplained).clamp(min=-1),
    }
    if entropy_share is not None:
        metrics["entropy_share"] = mean["entropy_share"]
    return metrics


class Diagnostics:
    """Watches the metrics of each tick, and says in words what is off.

    What is off is logged once, when it has been so for PATIENCE ticks, and again when it is back
    within its limit; in between, its name and value are on the status line. There is a dash until
    there were WARM_UP updates.
    """

    def __init__(self):
        self._num_updates = 0  # of all ticks
        self._off = set()  # names
        self._contrary = {}  # for how many ticks in a row a name has not been as `_off` says
        self._text = "-"

    def text(self, metrics, num_updates):
        """Return a few characters for the status line, and log what has come or gone.

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
                    logging.warning("Health: %s is %.3g: %s", check.name, value, check.advice)
                else:
                    logging.info("Health: %s is within its limit again: %.3g", check.name, value)
            self._contrary[check.name] = contrary
        off = [check for check in values if check.name in self._off]
        worst = max(off, key=lambda check: check.severity(values[check]), default=None)
        self._text = f"{worst.label} {values[worst]:.3g}" if off else "ok"
        return self._text
