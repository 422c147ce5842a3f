# SPDX-License-Identifier: Apache-2.0
"""The mathematics of the learner, row by row, through the `learn` of MonoBeast.

PolyBeast's is the same to the letter, as test_parity.py checks.

The model is a table: what it answers to a row is a parameter of that row's own. So the gradient
says of each row by itself what the loss wants of it.
"""

import argparse
import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import monobeast
import polybeast
from beast.runs.diagnostics import CHECKS, is_finite

T, A = 5, 3


def make_flags(**overrides):
    # With a discount that is exact in float32, too.
    defaults = {"discounting": 0.875, "grad_norm_clipping": 1e9}
    return argparse.Namespace(**vars(monobeast.parser.parse_args([])) | defaults | overrides)


class Table(nn.Module):
    """Answers to numbered rows: `frame` holds the numbers."""

    def __init__(self, policy_logits, baseline):
        super().__init__()
        self.policy_logits = nn.Parameter(policy_logits.clone())  # [rows, A]
        self.baseline = nn.Parameter(baseline.clone())  # [rows]

    def initial_state(self, batch_size):
        return ()

    def forward(self, inputs, agent_state):
        policy_logits = self.policy_logits[inputs["frame"]]
        noise = torch.empty_like(policy_logits).exponential_().log()
        action = (policy_logits - noise).argmax(-1)
        baseline = self.baseline[inputs["frame"]]
        return {"policy_logits": policy_logits, "baseline": baseline, "action": action}, agent_state


def random_stream(seed, num_rows):
    """Return the rows of one environment, no episode of which ends, and a table for them."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=rng)

    stream = {
        "frame": torch.arange(num_rows),
        "reward": normal(num_rows),
        "action": torch.randint(A, (num_rows,), generator=rng),
        "policy_logits": normal(num_rows, A),
    }
    for key in ("done", "truncated", "terminated"):
        stream[key] = torch.zeros(num_rows, dtype=torch.bool)
    return stream, Table(normal(num_rows, A), 3 * normal(num_rows))


def end_episode(stream, row, kind):
    """Have an episode end in `row`: with an extra row, or, if `kind` is done, without one."""
    stream[kind][row] = True
    if kind != "done":
        stream["done"][row + 1] = True
        for key in ("reward", "policy_logits"):  # the transition into it is none
            stream[key][row + 1] = math.nan


def rollouts(stream, unroll_length=T):
    """Cut a stream into a batch [T + 1, B]; the last row of a rollout is the next one's first."""
    starts = range(0, len(stream["frame"]) - 1, unroll_length)
    return {
        key: torch.stack([value[s : s + unroll_length + 1] for s in starts], dim=1)
        for key, value in stream.items()
    }


def learn(flags, model, batch, lr=0.0):
    """Return the metrics of one `learn`, and leave its gradient in the model's parameters."""
    return monobeast.learn(flags, model, batch, (), torch.optim.SGD(model.parameters(), lr))


def log_softmax(logits):
    logits = logits - logits.max()
    return logits - np.log(np.exp(logits).sum())


def naive_losses(batch, table, flags):
    """Losses and gradients in float64, one transition after the other, from their definitions."""
    num_rows, B = batch["frame"].shape
    batch = {key: value.numpy() for key, value in batch.items()}
    logits, values = table.policy_logits.detach().numpy(), table.baseline.detach().numpy()
    losses = {"pg_loss": 0.0, "baseline_loss": 0.0, "entropy_loss": 0.0, "steps": 0}
    logits_grad, values_grad = np.zeros_like(logits), np.zeros_like(values)
    for b in range(B):
        row = {key: value[:, b] for key, value in batch.items()}
        v = values[row["frame"]]
        vs, transitions = v.copy(), []
        for t in reversed(range(num_rows - 1)):  # from row t to row t + 1
            if row["truncated"][t] or row["terminated"][t]:
                continue  # so that vs equals v, and the trace from before ends
            reward = row["reward"][t + 1]
            if flags.reward_clipping == "abs_one":
                reward = min(max(reward, -1.0), 1.0)
            into_next = row["done"][t + 1] or row["terminated"][t + 1]
            discount = 0.0 if into_next else flags.discounting
            action = row["action"][t + 1]
            log_policy = log_softmax(logits[row["frame"][t]])
            rho = math.exp(log_policy[action] - log_softmax(row["policy_logits"][t + 1])[action])
            clipped = min(1.0, rho)
            vs[t] = v[t] + clipped * (reward + discount * vs[t + 1] - v[t])
            # With the c's equal to the rhos, V-trace is this recursion; rho times what follows.
            advantage = clipped * (reward + discount * vs[t + 1] - v[t])
            transitions.append((t, action, log_policy, advantage))
        losses["steps"] += len(transitions)
        for t, action, log_policy, advantage in transitions:
            policy, n = np.exp(log_policy), row["frame"][t]
            negative_entropy = (policy * log_policy).sum()
            losses["baseline_loss"] += flags.baseline_cost * 0.5 * (vs[t] - v[t]) ** 2
            losses["entropy_loss"] += flags.entropy_cost * negative_entropy
            log_rho = log_policy[action] - log_softmax(row["policy_logits"][t + 1])[action]
            if math.copysign(1, advantage) * log_rho > math.log(1 + flags.policy_clipping):
                advantage = 0  # it has moved far enough in this direction
            losses["pg_loss"] += -log_policy[action] * advantage
            logits_grad[n] += advantage * (policy - np.eye(A)[action])
            logits_grad[n] += flags.entropy_cost * policy * (log_policy - negative_entropy)
            values_grad[n] += flags.baseline_cost * (v[t] - vs[t])
    return losses, logits_grad, values_grad


@pytest.mark.parametrize("reward_clipping, policy_clipping", [("abs_one", 0.2), ("none", 1e9)])
@pytest.mark.parametrize(
    "kinds", ["truncated", "terminated", "done", "truncated done truncated terminated"]
)
@pytest.mark.parametrize("first", range(2 * T))  # of the ends, also at the first and the last row
def test_losses_and_gradients_are_those_of_the_definitions(
    first, kinds, reward_clipping, policy_clipping
):
    stream, model = random_stream(first, 4 * T + 1)
    for row, kind in zip((0, T - 1, 2 * T - 1, 12), kinds.split(), strict=False):
        end_episode(stream, (row + first) % (4 * T), kind)
    stream["reward"] *= 2  # so that many are clipped
    overrides = {"entropy_cost": 0.3, "baseline_cost": 0.7}
    overrides |= {"reward_clipping": reward_clipping, "policy_clipping": policy_clipping}
    flags, batch = make_flags(**overrides), rollouts(stream)
    metrics = learn(flags, model, batch)
    assert {check.name for check in CHECKS} - {"policy_lag_max"} <= metrics.keys()
    losses, logits_grad, values_grad = naive_losses(batch, model, flags)
    assert metrics["steps"] == losses.pop("steps")  # none out of an extra row
    assert losses["pg_loss"] != 0 and losses["baseline_loss"] > 0 and losses["entropy_loss"] < 0
    for name, loss in losses.items():
        assert metrics[name] == pytest.approx(loss, rel=1e-8), name
    assert metrics["total_loss"] == pytest.approx(sum(losses.values()), rel=1e-8)
    np.testing.assert_allclose(model.policy_logits.grad.numpy(), logits_grad, atol=1e-8)
    np.testing.assert_allclose(model.baseline.grad.numpy(), values_grad, atol=1e-8)


def test_gradient_is_clipped_to_its_norm_and_keeps_its_direction():
    stream, model = random_stream(0, T + 1)
    gradients = []
    for norm in (1e9, 0.25):
        metrics = learn(make_flags(grad_norm_clipping=norm), model, rollouts(stream))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    full, clipped = gradients
    assert full.norm() > 1
    torch.testing.assert_close(clipped, full * (0.25 / full.norm()), rtol=1e-4, atol=1e-8)
    assert metrics["grad_norm"] == pytest.approx(full.norm().item())  # as it was


@pytest.mark.parametrize("program", [monobeast, polybeast])
def test_what_is_not_learned_changes_nothing(program):
    stream, table = random_stream(5, T + 1)
    flags, batch = make_flags(grad_norm_clipping=4.0, learning_rate=0.0), rollouts(stream)
    frozen = [table.baseline]
    learned = nn.ParameterList([table.policy_logits])
    optimizer, _ = program.create_optimizer(flags, learned)
    norms = [program.learn(flags, table, batch, (), optimizer)["grad_norm"] for _ in range(3)]
    assert norms == [norms[0]] * 3 and frozen[0].grad is not None
    optimizer.state_dict()  # has nothing of others
    optimizer, _ = program.create_optimizer(flags, table)
    assert len(optimizer.state) == 2


def test_a_logit_of_minus_infinity_is_an_action_of_probability_0():
    results = []
    for forbidden in (-math.inf, -1e9):
        stream, model = random_stream(0, 2 * T + 1)
        end_episode(stream, 3, "truncated")
        stream["action"] %= A - 1
        stream["policy_logits"][:, -1] = model.policy_logits.data[:, -1] = forbidden
        metrics = learn(make_flags(entropy_cost=3.0), model, rollouts(stream), lr=1.0)
        assert is_finite(metrics) and metrics["behavior_target_kl"] > 0
        results.append([metrics, model.policy_logits.grad, model.baseline.data])
    torch.testing.assert_close(*results)


def test_learn_takes_one_step_of_the_optimizer_each_time():
    stream, model = random_stream(0, T + 1)
    flags, batch = make_flags(), rollouts(stream)
    for _ in range(2):  # the second gradient holds nothing of the first
        old = model.baseline.detach().clone()
        _, _, expected = naive_losses(batch, model, flags)
        learn(flags, model, batch, lr=0.125)
        torch.testing.assert_close(model.baseline, old - 0.125 * torch.from_numpy(expected))


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("where", ["reward", "policy_logits", "weights"])
def test_an_update_that_is_not_finite_is_skipped(where, value):
    stream, model = random_stream(0, T + 1)
    flags, batch = make_flags(reward_clipping="none"), rollouts(stream)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)
    monobeast.learn(flags, model, batch, (), optimizer)
    if where == "weights":
        with torch.no_grad():
            model.policy_logits[2, 1] = value
    else:
        batch[where].view(-1)[2 * batch[where].shape[2:].numel()] = value
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    assert not is_finite(monobeast.learn(flags, model, batch, (), optimizer))
    after = [model.state_dict(), optimizer.state_dict()]
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
