# SPDX-License-Identifier: Apache-2.0
"""The mathematics of the learner, row by row, through the `learn` of both programs.

The model is a table: what it answers to a row is a parameter of that row's own. So the gradient
says of each row by itself what the loss wants of it.
"""

import argparse
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import experiment
import monobeast
import polybeast
from environment import Environments, map_nest

T, A = 5, 3
program = None  # what is tested now


@pytest.fixture(autouse=True, params=[monobeast, polybeast], ids=lambda module: module.__name__)
def each_program(request):
    global program
    program = request.param


def make_flags(**overrides):
    flags = vars(program.parser.parse_args([]))
    # So that the discount is exact in float32, too.
    return argparse.Namespace(**{**flags, "discounting": 0.875, **overrides})


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
    if kind == "done":
        stream["done"][row] = True
        return
    stream[kind][row] = True
    stream["done"][row + 1] = True
    stream["reward"][row + 1] = 0


def rollouts(stream, unroll_length=T):
    """Cut a stream into a batch [T + 1, B]; the last row of a rollout is the next one's first."""
    starts = range(0, len(stream["frame"]) - 1, unroll_length)
    return {
        key: torch.stack([value[s : s + unroll_length + 1] for s in starts], dim=1)
        for key, value in stream.items()
    }


def learn(batch, model, **overrides):
    """Return the figures of one `learn`, and leave its gradient in the model's parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    flags = make_flags(**{"grad_norm_clipping": 1e9, **overrides})
    return program.learn(flags, model, batch, (), optimizer)


def gradients(stream, model, **overrides):
    """Return one row of gradient for each row of the stream: logits and, last, the baseline."""
    learn(rollouts(stream), model, **overrides)
    return torch.cat([model.policy_logits.grad, model.baseline.grad[:, None]], dim=1)


def log_softmax(logits):
    logits = logits - logits.max()
    return logits - np.log(np.exp(logits).sum())


def naive_losses(batch, table, flags):
    """Losses and gradients in float64, one transition after the other, from their definitions."""
    num_rows, B = batch["frame"].shape
    batch = {key: value.numpy() for key, value in batch.items()}
    logits, values = table.policy_logits.detach().numpy(), table.baseline.detach().numpy()
    losses = {"pg_loss": 0.0, "baseline_loss": 0.0, "entropy_loss": 0.0}
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
        for t, action, log_policy, advantage in transitions:
            policy, n = np.exp(log_policy), row["frame"][t]
            negative_entropy = (policy * log_policy).sum()
            losses["pg_loss"] += -log_policy[action] * advantage
            losses["baseline_loss"] += flags.baseline_cost * 0.5 * (vs[t] - v[t]) ** 2
            losses["entropy_loss"] += flags.entropy_cost * negative_entropy
            logits_grad[n] += advantage * (policy - np.eye(A)[action])
            logits_grad[n] += flags.entropy_cost * policy * (log_policy - negative_entropy)
            values_grad[n] += flags.baseline_cost * (v[t] - vs[t])
    return losses, logits_grad, values_grad


@pytest.mark.parametrize("reward_clipping", ["abs_one", "none"])
@pytest.mark.parametrize("seed", range(6))
def test_losses_and_gradients_are_those_of_the_definitions(seed, reward_clipping):
    stream, model = random_stream(seed, 4 * T + 1)
    for row, kind in ((2, "truncated"), (T, "done"), (2 * T, "truncated"), (13, "terminated")):
        end_episode(stream, (row + seed) % (4 * T), kind)
    stream["reward"] *= 2  # so that many are clipped
    flags = make_flags(reward_clipping=reward_clipping, entropy_cost=0.3, baseline_cost=0.7)
    batch = rollouts(stream)
    figures = learn(
        batch, model, reward_clipping=reward_clipping, entropy_cost=0.3, baseline_cost=0.7
    )
    losses, logits_grad, values_grad = naive_losses(batch, model, flags)
    assert losses["pg_loss"] != 0 and losses["baseline_loss"] > 0 and losses["entropy_loss"] < 0
    for name, loss in losses.items():
        assert figures[name] == pytest.approx(loss, rel=1e-8), name
    assert figures["total_loss"] == pytest.approx(sum(losses.values()), rel=1e-8)
    np.testing.assert_allclose(model.policy_logits.grad.numpy(), logits_grad, atol=1e-8)
    np.testing.assert_allclose(model.baseline.grad.numpy(), values_grad, atol=1e-8)


def two_step_batch(rewards, actions):
    """Two transitions, both policies uniform over two actions, values 1, 2, 3."""
    batch = {
        "frame": torch.arange(3),
        "reward": torch.tensor(rewards),
        "action": torch.tensor(actions),
        "policy_logits": torch.zeros(3, 2),
        "done": torch.tensor([True, False, False]),
        "truncated": torch.zeros(3, dtype=torch.bool),
        "terminated": torch.zeros(3, dtype=torch.bool),
    }
    model = Table(torch.zeros(3, 2), torch.tensor([1.0, 2.0, 3.0]))
    batch = {key: value.unsqueeze(1) for key, value in batch.items()}
    figures = learn(batch, model, discounting=0.5, entropy_cost=0.01)
    return figures, model.policy_logits.grad.tolist(), model.baseline.grad.tolist()


def test_a_rollout_of_two_steps_computed_by_hand():
    figures, logits_grad, values_grad = two_step_batch([7.0, 1.0, -0.5], [1, 0, 1])
    # The reward of a transition stands in the row that it enters; the 7 belongs to one before.
    #   delta_1 = -0.5 + 0.5 * 3 - 2 = -1        vs_1 = 2 - 1 = 1
    #   delta_0 =  1   + 0.5 * 2 - 1 =  1        vs_0 = 1 + 1 - 0.5 * 1 = 1.5
    #   advantage_1 = -0.5 + 0.5 * 3 - 2 = -1    advantage_0 = 1 + 0.5 * 1 - 1 = 0.5
    log_2 = math.log(2)
    assert figures["pg_loss"] == pytest.approx(log_2 * (0.5 - 1))
    assert figures["baseline_loss"] == pytest.approx(0.5 * (0.5**2 + 1**2) / 2)
    assert figures["entropy_loss"] == pytest.approx(0.01 * 2 * -log_2)
    # Action 0 leads from row 0 to row 1 and is wanted, action 1 from there to row 2 is not.
    assert logits_grad == [[-0.25, 0.25], [-0.5, 0.5], [0, 0]]
    assert values_grad == [-0.25, 0.5, 0]


def test_rewards_one_row_off_would_show():
    figures, logits_grad, values_grad = two_step_batch([1.0, -0.5, 9.0], [1, 0, 1])
    # The 9 is clipped to 1.
    #   delta_1 =  1   + 0.5 * 3 - 2 =  0.5      vs_1 = 2 + 0.5 = 2.5
    #   delta_0 = -0.5 + 0.5 * 2 - 1 = -0.5      vs_0 = 1 - 0.5 + 0.5 * 0.5 = 0.75
    #   advantage_1 = 0.5                        advantage_0 = -0.5 + 0.5 * 2.5 - 1 = -0.25
    assert figures["pg_loss"] == pytest.approx(math.log(2) * 0.25)
    assert logits_grad == [[0.125, -0.125], [0.25, -0.25], [0, 0]]
    assert values_grad == [0.125, -0.25, 0]


def test_actions_one_row_off_would_show():
    _, logits_grad, _ = two_step_batch([7.0, 1.0, -0.5], [0, 1, 0])
    assert logits_grad == [[0.25, -0.25], [0.5, -0.5], [0, 0]]


def test_what_was_recorded_in_row_0_belongs_to_the_rollout_before():
    stream, model = random_stream(0, T + 1)
    before = gradients(stream, model)
    stream["reward"][0], stream["action"][0] = 9, (stream["action"][0] + 1) % A
    stream["policy_logits"][0] = 9
    stream["done"][0] = True
    assert torch.equal(gradients(stream, model), before)


LIMITS = [1, 2, T - 1, T, T + 1, 2 * T - 1]  # inside; at row T and the next one's row 0; at row 1


@pytest.mark.parametrize("kind", ["truncated", "terminated"])
@pytest.mark.parametrize("row", LIMITS)
def test_value_of_the_reset_row_changes_no_gradient_before_it(row, kind):
    stream, model = random_stream(row, 2 * T + 1)
    end_episode(stream, row, kind)
    before = gradients(stream, model)
    with torch.no_grad():
        model.baseline[row + 1] += 5
    after = gradients(stream, model)
    assert torch.equal(after[: row + 1], before[: row + 1])
    if row + 1 < 2 * T:
        assert not torch.allclose(after[row + 1], before[row + 1])  # but its own, for one


@pytest.mark.parametrize("kind", ["truncated", "terminated"])
@pytest.mark.parametrize("row", LIMITS)
def test_last_reward_before_the_end_counts(row, kind):
    stream, model = random_stream(row, 2 * T + 1)
    end_episode(stream, row, kind)
    before = gradients(stream, model, reward_clipping="none")
    stream["reward"][row] += 0.5
    changed = (gradients(stream, model, reward_clipping="none") != before).any(dim=1)
    assert changed[row - 1] and not changed[row:].any()


@pytest.mark.parametrize("row", LIMITS)
def test_value_of_the_true_last_observation_is_bootstrapped_from(row):
    stream, model = random_stream(row, 2 * T + 1)
    end_episode(stream, row, "truncated")
    before = gradients(stream, model)
    with torch.no_grad():
        model.baseline[row] += 5
    changed = (gradients(stream, model) != before).any(dim=1)
    assert changed[row - 1]
    assert not changed[row:].any()  # nor does anything want to change the value itself


@pytest.mark.parametrize("row", LIMITS)
def test_value_of_a_terminated_row_is_not_bootstrapped_from(row):
    stream, model = random_stream(row, 2 * T + 1)
    end_episode(stream, row, "terminated")
    before = gradients(stream, model)
    with torch.no_grad():
        model.baseline[row] += 5
    assert torch.equal(gradients(stream, model), before)


@pytest.mark.parametrize("kind", ["truncated", "terminated"])
@pytest.mark.parametrize("row", LIMITS)
def test_there_is_no_transition_out_of_the_last_row(row, kind):
    stream, model = random_stream(row, 2 * T + 1)
    end_episode(stream, row, kind)
    before, figures = gradients(stream, model), learn(rollouts(stream), model)
    assert figures["steps"] == 2 * T - 1
    assert not before[row].any()  # of policy gradient, baseline or entropy
    # Nothing recorded about it matters, be it not a number.
    stream["reward"][row + 1] = math.nan
    stream["action"][row + 1] = (stream["action"][row + 1] + 1) % A
    stream["policy_logits"][row + 1] = math.nan
    with torch.no_grad():
        model.policy_logits[row] += torch.tensor([1.0, 2.0, -1.0])
    assert torch.equal(gradients(stream, model), before)
    assert learn(rollouts(stream), model) == figures


@pytest.mark.parametrize("row", LIMITS)
def test_nothing_flows_back_over_done(row):
    stream, model = random_stream(row, 2 * T + 1)
    end_episode(stream, row, "done")
    stream["reward"] *= 0.25  # none is clipped
    before, figures = gradients(stream, model), learn(rollouts(stream), model)
    assert figures["steps"] == 2 * T  # the step that ended the episode is one
    with torch.no_grad():
        model.baseline[row:] += 5
        model.policy_logits[row:] *= -1
    stream["reward"][row + 1 :] *= -1
    assert torch.equal(gradients(stream, model)[:row], before[:row])
    stream["reward"][row] /= 2  # the last reward comes together with `done`
    assert not torch.equal(gradients(stream, model)[row - 1], before[row - 1])


def test_loss_is_a_sum_over_the_batch_and_not_a_mean():
    stream, model = random_stream(0, 2 * T + 1)
    end_episode(stream, 2, "truncated")
    batch = rollouts(stream)
    total, whole = learn(batch, model), gradients(stream, model)
    parts, figures = torch.zeros_like(whole), []
    for b in range(2):
        figures.append(learn({key: value[:, b : b + 1] for key, value in batch.items()}, model))
        parts += torch.cat([model.policy_logits.grad, model.baseline.grad[:, None]], dim=1)
    torch.testing.assert_close(whole, parts)
    assert total["total_loss"] == pytest.approx(sum(f["total_loss"] for f in figures))


def test_costs_weigh_their_losses_alone():
    stream, model = random_stream(0, T + 1)
    batch = rollouts(stream)
    one = learn(batch, model, baseline_cost=1.0, entropy_cost=1.0)
    other = learn(batch, model, baseline_cost=3.0, entropy_cost=0.0)
    assert other["pg_loss"] == one["pg_loss"]
    assert other["baseline_loss"] == pytest.approx(3 * one["baseline_loss"])
    assert other["entropy_loss"] == 0
    assert not model.policy_logits.grad[-1].any() and not model.baseline.grad[-1].any()


def test_entropy_cost_makes_the_policy_more_even():
    stream, model = random_stream(0, T + 1)
    flags = make_flags(entropy_cost=1.0, baseline_cost=0.0, grad_norm_clipping=1e9)
    with torch.no_grad():  # no advantage: nothing else is wanted
        model.baseline.zero_()
    stream["reward"].zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = [
        program.learn(flags, model, rollouts(stream), (), optimizer)["entropy_loss"]
        for _ in range(200)
    ]
    assert all(b < a for a, b in zip(losses[:20], losses[1:21], strict=True))
    assert losses[-1] == pytest.approx(-T * math.log(A), abs=0.01)


def test_gradient_is_clipped_to_its_norm_and_keeps_its_direction():
    stream, model = random_stream(0, T + 1)
    full = gradients(stream, model)
    assert full.norm() > 1
    figures = learn(rollouts(stream), model, grad_norm_clipping=0.25)
    clipped = torch.cat([model.policy_logits.grad, model.baseline.grad[:, None]], dim=1)
    torch.testing.assert_close(clipped, full * (0.25 / full.norm()), rtol=1e-4, atol=1e-8)
    assert figures["grad_norm"] == pytest.approx(full.norm().item())  # as it was


def test_learn_takes_one_step_of_the_optimizer_each_time():
    stream, model = random_stream(0, T + 1)
    flags, batch = make_flags(grad_norm_clipping=1e9), rollouts(stream)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for _ in range(2):  # the second gradient holds nothing of the first
        old = model.baseline.detach().clone()
        _, _, expected = naive_losses(batch, model, flags)
        program.learn(flags, model, batch, (), optimizer)
        torch.testing.assert_close(model.baseline, old - 0.125 * torch.from_numpy(expected))


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("where", ["reward", "policy_logits", "weights"])
def test_an_update_that_is_not_finite_is_skipped(where, value):
    stream, model = random_stream(0, T + 1)
    flags, batch = make_flags(reward_clipping="none"), rollouts(stream)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)
    program.learn(flags, model, batch, (), optimizer)
    if where == "weights":
        with torch.no_grad():
            model.policy_logits[2, 1] = value
    else:
        batch[where].view(-1)[2 * batch[where].shape[2:].numel()] = value
    before = [p.detach().clone() for p in model.parameters()]
    state = [s["square_avg"].clone() for s in optimizer.state.values()]
    figures = program.learn(flags, model, batch, (), optimizer)
    assert not experiment.is_good(figures)
    for old, new in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(old, new.detach(), rtol=0, atol=0, equal_nan=True)
    for old, new in zip(state, optimizer.state.values(), strict=True):
        assert torch.equal(old, new["square_avg"])


class Wheel(gym.Env):
    """Ten places around a wheel; each step goes on by one, and arriving at place 0 pays 1.

    A time limit cuts every episode after five steps; the next one begins anywhere. A limit is no
    part of the game, so the value of a place is that of the wheel turning for ever.
    """

    observation_space = gym.spaces.Discrete(10)
    action_space = gym.spaces.Discrete(A)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.count = int(self.np_random.integers(10)), 0
        return self.place, {}

    def step(self, action):
        self.place, self.count = (self.place + 1) % 10, self.count + 1
        return self.place, float(self.place == 0), False, self.count == 5, {}


WHEEL_VALUES = [0.875 ** (9 - place) / (1 - 0.875**10) for place in range(10)]


def learn_wheel(mistake=None):
    """Learn from fresh rollouts, each spoiled by `mistake`, and return the values learned."""
    torch.manual_seed(0)
    environments = Environments(Wheel, 8, 0)
    model = Table(torch.zeros(10, A), torch.zeros(10))
    flags = make_flags()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    row = map_nest(torch.from_numpy, environments.initial())
    rows = [row | model(row, ())[0]]
    for _ in range(150):
        rows = [map_nest(torch.clone, rows[-1])]
        for _ in range(T + 2):  # so that the limit goes through all rows of a rollout
            with torch.no_grad():
                answer, _ = model(rows[-1], ())
            environments.step(answer["action"].numpy())
            rows.append(map_nest(torch.clone, row) | answer)
        batch = {key: torch.stack([r[key] for r in rows]) for key in rows[0]}
        if mistake is not None:
            mistake(batch)
        program.learn(flags, model, batch, (), optimizer)
    return model.baseline.tolist()


def test_values_beyond_a_time_limit_are_learned():
    assert learn_wheel() == pytest.approx(WHEEL_VALUES, abs=0.02)


def test_a_time_limit_taken_for_the_end_is_seen_in_the_values():
    def take_for_end(batch):
        batch["done"] |= batch["truncated"]

    values = learn_wheel(take_for_end)
    assert max(v - w for v, w in zip(values, WHEEL_VALUES, strict=True)) < 0.02
    assert values[0] < 0.3 * WHEEL_VALUES[0]


def test_an_extra_row_taken_for_a_step_is_seen_in_the_values():
    def take_for_step(batch):
        batch["truncated"][:] = False

    values = learn_wheel(take_for_step)
    assert sum(WHEEL_VALUES) - sum(values) > 0.2 * sum(WHEEL_VALUES)
