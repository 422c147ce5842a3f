# SPDX-License-Identifier: Apache-2.0
"""V-trace: off-policy corrected targets for an actor-critic learner.

Source: Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted
Actor-Learner Architectures", 2018. The value targets are equations 1 and 2 there, the advantage
that multiplies the policy gradient is the one of section 4.2.

Shapes: T is the unroll length, B the batch size, A the number of actions. Index t is one
transition: it leaves row t of a rollout and enters row t + 1. Behind B any further dimensions may
follow; all are treated as more batch.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F


class VTraceReturns(NamedTuple):
    vs: torch.Tensor  # [T, B, ...] targets for the baseline
    pg_advantages: torch.Tensor  # [T, B, ...] weights of the policy gradient


class VTraceFromLogitsReturns(NamedTuple):
    vs: torch.Tensor  # [T, B, ...]
    pg_advantages: torch.Tensor  # [T, B, ...]
    log_rhos: torch.Tensor  # [T, B, ...] log(target / behavior) of the action taken
    behavior_action_log_probs: torch.Tensor  # [T, B, ...]
    target_action_log_probs: torch.Tensor  # [T, B, ...]


def action_log_probs(policy_logits, actions):
    """Return log pi(action), [T, B, ...], for logits [T, B, ..., A]; differentiable."""
    log_probs = F.log_softmax(policy_logits, dim=-1)
    return log_probs.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def from_logits(
    behavior_policy_logits,
    target_policy_logits,
    actions,
    discounts,
    rewards,
    values,
    bootstrap_value,
    clip_rho_threshold=1.0,
    clip_pg_rho_threshold=1.0,
    mask=None,
    lambda_=1.0,
):
    """Compute V-trace for softmax policies; no gradient flows through the result.

    Args:
      behavior_policy_logits: [T, B, ..., A], of the policy that acted.
      target_policy_logits: [T, B, ..., A], of the policy that learns.
      actions: [T, B, ...] integers, what the behavior policy did.
      Everything else as in `from_importance_weights`.
    """
    behavior = action_log_probs(behavior_policy_logits, actions)
    target = action_log_probs(target_policy_logits, actions)
    log_rhos = target - behavior
    settings = (clip_rho_threshold, clip_pg_rho_threshold, mask, lambda_)
    returns = from_importance_weights(
        log_rhos, discounts, rewards, values, bootstrap_value, *settings
    )
    return VTraceFromLogitsReturns(*returns, log_rhos, behavior, target)


@torch.no_grad()
def from_importance_weights(
    log_rhos,
    discounts,
    rewards,
    values,
    bootstrap_value,
    clip_rho_threshold=1.0,
    clip_pg_rho_threshold=1.0,
    mask=None,
    lambda_=1.0,
):
    """Compute V-trace from log importance weights; no gradient flows through the result.

    Args:
      log_rhos: [T, B, ...], log(target / behavior) of the action taken.
      discounts: [T, B, ...], of the row entered: 0 where a new episode begins there.
      rewards: [T, B, ...], of the transition.
      values: [T, B, ...], the baseline of the row left.
      bootstrap_value: [B, ...], the baseline of the row after the last transition.
      clip_rho_threshold: rho-bar, the ceiling of the weights in the temporal differences, which
        decides whose value function is learned; None for no ceiling.
      clip_pg_rho_threshold: the same for the weights of the policy gradient.
      mask: [T, B, ...] booleans, or None for all true. False where the transition out of row t is
        to be ignored: row t holds the last observation of an episode and row t + 1 the first of the
        next one. Temporal difference and trace are 0 there: vs equals values, and the transition
        into row t bootstraps from that value, the one of the true last observation. The advantage
        there is 0. Values after a masked place, NaN included, do not affect those before it.
      lambda_: factor of the traces (remark 2 there), from 0, for targets of one step, to 1.
        On-policy, with log_rhos of 0, vs is the lambda-return, and vs - values the advantage of
        GAE(lambda) (Schulman et al. 2016).
    """
    inputs = {"log_rhos": log_rhos, "discounts": discounts, "rewards": rewards, "mask": mask}
    for name, tensor in inputs.items():  # or broadcasting would hide a missing dimension
        if tensor is not None and tensor.shape != values.shape:
            raise ValueError(f"{name} has shape {[*tensor.shape]}, but values {[*values.shape]}")
    if bootstrap_value.shape != values.shape[1:]:
        got, wanted = [*bootstrap_value.shape], [*values.shape[1:]]
        raise ValueError(f"bootstrap_value has shape {got}; to fit values it must be {wanted}")
    if mask is None:
        mask = torch.ones_like(values, dtype=torch.bool)

    rhos = log_rhos.exp()
    cs = lambda_ * _clip(rhos, 1.0)  # products of these would explode if they could pass 1
    next_values = torch.cat([values[1:], bootstrap_value.unsqueeze(0)])
    deltas = _clip(rhos, clip_rho_threshold) * (rewards + discounts * next_values - values)

    # vs - values, from the back. `where` cuts at the mask: a product with 0 would let NaN through.
    zero = torch.zeros_like(bootstrap_value)
    correction, corrections = zero, []
    steps = zip(deltas.unbind(), (discounts * cs).unbind(), mask.unbind(), strict=True)
    for delta, decay, keep in reversed(list(steps)):
        correction = torch.where(keep, delta + decay * correction, zero)
        corrections.append(correction)
    vs = values + torch.stack(corrections[::-1])

    next_vs = torch.cat([vs[1:], bootstrap_value.unsqueeze(0)])
    advantages = _clip(rhos, clip_pg_rho_threshold) * (rewards + discounts * next_vs - values)
    return VTraceReturns(vs, torch.where(mask, advantages, torch.zeros_like(advantages)))


def _clip(rhos, threshold):
    return rhos if threshold is None else rhos.clamp(max=threshold)
