# SPDX-License-Identifier: Apache-2.0
"""Ways to learn from policies that are many updates old: the losses of staleness.py.

A correction is a function of `Transitions`. It returns targets of the baseline, and the policy's
loss of each transition, through which gradients flow, both [T, B]. All but `vtrace` take targets
and advantages as if the policy that learns had acted. Ratios stay finite, whatever the policies.
"""

import copy
import math
import types
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

import monobeast
import vtrace
from beast.learners import devices
from beast.runs import diagnostics

MAX_LOG_RATIO = 20.0  # either way; exp(20) is 5e8
SECOND_MOMENT = 0.04  # the largest one that M2PO lets in, in its paper
PROXIMAL_DECAY = 0.889  # the proximal policy is 8 updates old on average, as in PPO-EWMA's paper


class Transitions(NamedTuple):
    """A batch of transitions, [T, B]."""

    log_probs: torch.Tensor  # of the action taken, by the policy that learns; differentiable
    behavior_log_probs: torch.Tensor  # by the policy that acted
    proximal_log_probs: torch.Tensor | None  # by the average of the policies that have learned
    mask: torch.Tensor  # False where there is only a reset
    returns: Callable  # from log rhos to V-trace's targets and advantages
    clipping: float  # --policy_clipping


def ratio(log_probs, others):
    """Return the ratio of probabilities; beyond MAX_LOG_RATIO it is constant, without gradient."""
    return (log_probs - others).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def correct_by_vtrace(x):
    """V-trace, with MonoBeast's --policy_clipping, which 1e9 disables."""
    log_rhos = (x.log_probs - x.behavior_log_probs).detach()
    vs, advantages = x.returns(log_rhos)
    moved = log_rhos * advantages.sign() > math.log1p(x.clipping)
    return vs, -x.log_probs * torch.where(moved, 0, advantages)


def correct_nothing(x):
    vs, advantages = x.returns(torch.zeros_like(x.behavior_log_probs))
    return vs, -x.log_probs * advantages


def truncate_weights(x):
    """Weigh each transition by its importance weight, 1 at most: V-trace without its traces."""
    vs, advantages = x.returns(torch.zeros_like(x.behavior_log_probs))
    weights = ratio(x.log_probs, x.behavior_log_probs).detach().clamp(max=1)
    return vs, -x.log_probs * weights * advantages


def decouple_ppo(x):
    """PPO's clipped ratio to a proximal policy; one to the policy that acted weighs it, at most 1.

    After Hilton et al. (2022), "Batch size-invariance for policy optimization", equation 3, which
    has no bound of the weight.
    """
    vs, advantages = x.returns(torch.zeros_like(x.behavior_log_probs))
    ratios = ratio(x.log_probs, x.proximal_log_probs)
    clipped = ratios.clamp(1 - x.clipping, 1 + x.clipping)
    weights = ratio(x.proximal_log_probs, x.behavior_log_probs).clamp(max=1)
    return vs, -weights * torch.minimum(ratios * advantages, clipped * advantages)


def mask_second_moment(x):
    """Leave out the most distant transitions until the mean square of log ratios is small.

    After Zheng et al. (2025), "Prosperity before collapse: how far can off-policy RL reach with
    stale data on LLMs?" (M2PO), by the paper's text: their code bounds the ratio, too, and masks
    more, since it counts what it masks in the mean. The mean is over those that PPO might clip:
    where the policy is to move still farther from the one that acted. All others stay in.
    """
    vs, advantages = x.returns(torch.zeros_like(x.behavior_log_probs))
    log_ratios = (x.log_probs - x.behavior_log_probs).detach()
    farther = x.mask & (log_ratios * advantages > 0)
    squares = (log_ratios**2)[farther].sort().values
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    limit = squares[means <= SECOND_MOMENT].max() if (means <= SECOND_MOMENT).any() else -1.0
    out = farther & (log_ratios**2 > limit)
    weights = ratio(x.log_probs, x.behavior_log_probs)
    return vs, torch.where(out, 0, -weights * advantages)


CORRECTIONS = {
    "vtrace": correct_by_vtrace,
    "truncated": truncate_weights,
    "decoupled": decouple_ppo,
    "m2po": mask_second_moment,
    "none": correct_nothing,
}


class Loss:
    """MonoBeast's compute_loss, with the correction that --correction names."""

    def __init__(self):
        self._proximal = None  # the average net of `decoupled`

    def __call__(self, flags, model, batch, initial_agent_state):
        with devices.autocast(flags, batch["reward"].device):
            outputs, _ = devices.to_float32(model(batch, initial_agent_state))
        logits, behavior_logits = outputs["policy_logits"][:-1], batch["policy_logits"][1:]
        values, actions = outputs["baseline"][:-1], batch["action"][1:]
        mask = ~(batch["truncated"] | batch["terminated"])[:-1]
        discounts = flags.discounting * (~(batch["done"] | batch["terminated"])[1:]).float()
        rewards = batch["reward"][1:]
        if flags.reward_clipping == "abs_one":
            rewards = rewards.clamp(-1, 1)

        def returns(log_rhos):
            return vtrace.from_importance_weights(
                log_rhos, discounts, rewards, values, outputs["baseline"][-1], mask=mask
            )

        proximal = None
        if flags.correction == "decoupled":
            proximal_logits = self._follow(model, flags, batch, initial_agent_state)
            proximal = vtrace.action_log_probs(proximal_logits, actions)
        log_probs = vtrace.action_log_probs(logits, actions)
        behavior = vtrace.action_log_probs(behavior_logits, actions)
        transitions = Transitions(
            log_probs, behavior, proximal, mask, returns, flags.policy_clipping
        )
        vs, policy_loss = CORRECTIONS[flags.correction](transitions)
        pg_loss = torch.where(mask, policy_loss, 0).sum()
        baseline_loss = flags.baseline_cost * monobeast.compute_baseline_loss(vs - values, mask)
        entropy_loss = flags.entropy_cost * monobeast.compute_entropy_loss(logits, mask)
        total_loss = pg_loss + baseline_loss + entropy_loss
        log_rhos = (log_probs - behavior).detach()
        targets = types.SimpleNamespace(vs=vs, log_rhos=log_rhos)
        return total_loss, {
            "total_loss": total_loss.detach(),
            "pg_loss": pg_loss.detach(),
            "baseline_loss": baseline_loss.detach(),
            "entropy_loss": entropy_loss.detach(),
            "steps": mask[:, : flags.batch_size].sum(),  # of the new rollouts
            "total_variation": total_variation(logits.detach(), behavior_logits, mask),
            "second_moment": torch.where(mask, log_rhos**2, 0).sum() / mask.sum().clamp(min=1),
            **diagnostics.from_logits(behavior_logits, logits, targets, values, mask),
        }

    @torch.no_grad()
    def _follow(self, model, flags, batch, initial_agent_state):
        """Average the model's weights; return the policy logits of the average, [T, B, A]."""
        if self._proximal is None:
            self._proximal = copy.deepcopy(model)
        for mean, new in zip(self._proximal.parameters(), model.parameters(), strict=True):
            mean.lerp_(new, 1 - PROXIMAL_DECAY)
        with devices.autocast(flags, batch["reward"].device):
            outputs, _ = devices.to_float32(self._proximal(batch, initial_agent_state))
        return outputs["policy_logits"][:-1]


def total_variation(logits, others, mask):
    """Return the mean distance of two policies: half the sum of probabilities' differences."""
    distance = (F.softmax(logits, -1) - F.softmax(others, -1)).abs().sum(-1) / 2
    return torch.where(mask, distance, 0).sum() / mask.sum().clamp(min=1)
