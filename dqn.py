# SPDX-License-Identifier: Apache-2.0
"""The DQN family on one machine: actor processes, prioritized replay, one learner.

    python dqn.py --env PongNoFrameskip-v4                  Rainbow without noise
    python dqn.py --env PongNoFrameskip-v4 --use_lstm       R2D1: sequences, stored states, burn-in
    python dqn.py --num_atoms 1 --n_step 1 --priority_exponent 0 --no_double --no_dueling   DQN
    python dqn.py --mode test --xpid NAME                   play whole games with the checkpoint

    actor 0: Net, N environments --+  rollouts in                   samples
    actor 1: Net, N environments --+- shared memory -> replay -+---------------> learner:
    ...                            |                    ^      |                 loss, Adam
    actor k: Net, N environments --+                    +------+-- priorities <--+
       ^                                                                         |
       +------------------ weights, as one consistent version <------------------+

Actors and learner wait for each other, so that --replay_ratio rows are learned from for each step.

To change the model, edit Net; the loss, compute_loss; the environment, create_env; the optimizer,
create_optimizer; what is logged, the metrics that compute_loss and learn return.

Sources: Mnih et al. 2015 (DQN), van Hasselt et al. 2016 (double), Wang et al. 2016 (dueling),
Schaul et al. 2016 (prioritized replay), Bellemare et al. 2017 (categorical), Hessel et al. 2018
(Rainbow), Kapturowski et al. 2019 (R2D2), Stooke and Abbeel 2019 (R2D1: R2D2 on one machine).

Shapes: T unroll length, N environments an actor, B batch size, A actions, Z atoms (1 without
--num_atoms), L rows of a sequence, R = L + n rows of a sample: those of the sequence and after it.
libtorchbeast/rows.py says what a row holds.
"""

import argparse
import contextlib
import copy
import functools
import itertools

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import atari_wrappers
from beast.actors import rollout_buffers
from beast.actors.actors import Actors
from beast.actors.collect import INPUTS
from beast.actors.weights import SharedWeights
from beast.envs import gym_envs
from beast.envs.environments import create_environments, sample_environment
from beast.errors import FlagError
from beast.flags import create_parser, parse_flags, run_program
from beast.learners import devices, nets, replay_feed
from beast.learners.learner import Learner
from beast.learners.replay import Replay
from beast.nest import map_nest
from beast.parser import fraction, non_negative, positive
from beast.processes import machine, randomness
from beast.runs import diagnostics, evaluate
from beast.runs.run import Run

# The defaults of flags: Rainbow's, with fewer and smaller batches than rlpyt's for two cores; and
# with --use_lstm R2D1's, with smaller batches and an epsilon of Adam that Pong's gradients need.
DEFAULTS = {
    "batch_size": (32, 16),
    "unroll_length": (20, 40),
    "replay_ratio": (4.0, 2.0),
    "n_step": (3, 5),
    "num_atoms": (51, 1),
    "discounting": (0.99, 0.997),
    "priority_exponent": (0.6, 0.9),
    "importance_exponent": (0.4, 0.6),
    "epsilon": (1.5e-4, 1e-5),
}
TEST_EPSILON = 0.001  # so that no game lasts for ever
REPLAY_KEYS = ("frame", "reward", "done", "truncated", "terminated", "last_action")
ANSWER_KEYS = ("policy_logits", "baseline")  # for first priorities of R2D1


def default_of(name):
    return "Default: {}; {} with --use_lstm.".format(*DEFAULTS[name])


# fmt: off
parser = create_parser(
    "dqn.py", "The DQN family on one machine, from DQN to Rainbow and R2D1.",
    without=["env_backend", "greedy", "elastic"],
)

training = parser.add_argument_group("training")
training.add_argument("--total_steps", default=2_000_000, type=positive(int),
                      help="Agent steps to play.")
training.add_argument("--num_actors", type=positive(int), help="Actor processes. Default: by "
                      "the number of cores; 2 for two cores.")
training.add_argument("--envs_per_actor", type=positive(int),
                      help="Environments that an actor steps with one batched forward pass. "
                      "Default: 8.")
training.add_argument("--batch_size", type=positive(int),
                      help=f"Transitions or sequences in a batch. {default_of('batch_size')}")
training.add_argument("--unroll_length", type=positive(int), help="Steps in a rollout. Sequences "
                      f"begin with a rollout. {default_of('unroll_length')}")
training.add_argument("--deterministic", action="store_true",
                      help="Actors and learner wait for each other: runs with one --seed are "
                      "identical, and slower.")
training.add_argument("--use_lstm", action="store_true", help="R2D1: an LSTM before the last "
                      "layers, and sequences in the replay.")
training.add_argument("--burn_in", default=40, type=non_negative(int), help="Rows before a "
                      "sequence that only update the LSTM state.")
training.add_argument("--sequence_length", default=80, type=positive(int),
                      help="Rows of a sequence to learn from, with --use_lstm.")

replay = parser.add_argument_group("replay")
replay.add_argument("--replay_capacity", default=500_000, type=positive(int),
                    help="Rows in the replay; an Atari row takes 7 kB.")
replay.add_argument("--replay_ratio", type=positive(float), help="Rows to learn from for each "
                    f"agent step. {default_of('replay_ratio')}")
replay.add_argument("--learning_starts", default=20_000, type=non_negative(int),
                    help="Agent steps before the first update.")
replay.add_argument("--priority_exponent", type=fraction, help="Exponent of priorities (alpha); "
                    f"0: uniform sampling. {default_of('priority_exponent')}")
replay.add_argument("--importance_exponent", type=fraction, help="Initial exponent of importance "
                    "weights (beta), raised linearly to 1 at --total_steps. "
                    f"{default_of('importance_exponent')}")

loss = parser.add_argument_group("loss")
loss.add_argument("--discounting", type=fraction, help="Discount factor of a step (gamma). "
                  f"{default_of('discounting')}")
loss.add_argument("--n_step", type=positive(int),
                  help=f"Rewards in a return. {default_of('n_step')}")
loss.add_argument("--num_atoms", type=positive(int), help="Atoms of the return's distribution; "
                  f"1: its mean. {default_of('num_atoms')}")
loss.add_argument("--value_range", default=10.0, type=positive(float), metavar="V",
                  help="Atoms are from -V to V; returns beyond are clipped.")
loss.add_argument("--no_double", action="store_false", dest="double",
                  help="Disable double Q-learning.")
loss.add_argument("--no_dueling", action="store_false", dest="dueling",
                  help="Disable the dueling architecture.")
loss.add_argument("--value_rescaling", action="store_true",
                  help="R2D2's value rescaling, by a signed square root; use it with "
                  "--reward_clipping none.")
loss.add_argument("--reward_clipping", default="abs_one", choices=["abs_one", "none"],
                  help="Clip rewards to [-1, 1] in the learner, or not.")
loss.add_argument("--target_interval", default=1000, type=positive(int),
                  help="Updates between copies to the target net.")

exploration = parser.add_argument_group("exploration")
exploration.add_argument("--final_epsilon", type=fraction, help="Probability of a random action "
                         "after --epsilon_steps. Default: 0.01; with --use_lstm 0.4 ** (1 + 7 i / "
                         "(n - 1)) for environment i of n, as in R2D2.")
exploration.add_argument("--epsilon_steps", default=100_000, type=positive(int),
                         help="Agent steps of epsilon annealing.")

adam = parser.add_argument_group("optimizer (Adam)")
adam.add_argument("--learning_rate", default=2.5e-4, type=positive(float), help="Learning rate.")
adam.add_argument("--epsilon", type=positive(float),
                  help=f"Adam epsilon. {default_of('epsilon')}")
adam.add_argument("--grad_norm_clipping", default=10.0, type=positive(float),
                  help="Largest gradient norm of the loss, a mean over the batch.")

atari_wrappers.add_flags(parser)
# fmt: on


def create_env(flags):
    """Return one environment with a Discrete action space."""
    if gym_envs.is_game(flags.env):
        return atari_wrappers.create_atari(flags, flags.render_mode)
    return gym_envs.create(flags)


class Net(nn.Module):
    """Values of all actions: convolutions for images, else a perceptron; then, if any, an LSTM.

    Args:
      observation_space: find_image says what is an image; nests, too, are vectors, in which
        Discrete parts are one-hot.
      num_atoms: Z, of the distribution of each value, from -value_range to value_range; 1: values.
    """

    def __init__(
        self, observation_space, num_actions, num_atoms, value_range, dueling=True, use_lstm=False
    ):
        super().__init__()
        self.num_actions, self.num_atoms = num_actions, num_atoms
        self.observations = nets.Observations(observation_space)  # splits frames
        self.trunk = nets.Trunk(self.observations, nets.shallow_conv)
        self.knows_bf16 = self.trunk.has_large_images  # all else gains little
        size = self.trunk.size
        self.lstm = nn.LSTM(size + num_actions + 1, 256) if use_lstm else None
        size = 256 if use_lstm else size
        self.advantage = nn.Linear(size, num_actions * num_atoms)
        self.value = nn.Linear(size, num_atoms) if dueling else None
        nets.initialize([self.advantage, self.value], 0.1)
        support = torch.linspace(-value_range, value_range, num_atoms)
        self.register_buffer("support", support, persistent=False)
        self.to(memory_format=torch.channels_last)

    def initial_state(self, batch_size):
        """Return the recurrent state at the start of an episode: tensors [layers, B, hidden]."""
        if self.lstm is None:
            return ()
        return tuple(torch.zeros(1, batch_size, self.lstm.hidden_size) for _ in range(2))

    def forward(self, inputs, agent_state):
        """Choose the action of the largest value for each row.

        Args:
          inputs: rows as a dict of [T, B, ...] tensors, INPUTS; frame, and with an LSTM all, count.
          agent_state: recurrent state before the first row.

        Returns:
          A dict of action [T, B] (in evaluation mode one in a thousand is random), policy_logits
          [T, B, A], which are the values, and baseline [T, B], the largest one; and the recurrent
          state after the last row.
        """
        logits, agent_state = self.compute_logits(inputs, agent_state)
        values = self.observations.mask(self.compute_values(logits), inputs["frame"])
        baseline, action = values.max(dim=-1)
        if not self.training:
            action = explore(action, values, torch.tensor(TEST_EPSILON))
        return {"policy_logits": values, "baseline": baseline, "action": action}, agent_state

    def compute_logits(self, inputs, agent_state):
        """Return logits of the atoms, or values, [T, B, A, Z], and the new recurrent state."""
        T, B = inputs["done"].shape
        frame = map_nest(lambda x: x.flatten(0, 1), inputs["frame"])
        features = self.trunk(*self.observations(frame))
        # Values are computed in full precision.
        with torch.autocast(features.device.type, enabled=False):
            features = features.float()
            if self.lstm is not None:
                features, agent_state = self.run_lstm(features, inputs, agent_state)
            logits = self.advantage(features).view(T, B, self.num_actions, self.num_atoms)
            if self.value is not None:
                value = self.value(features).view(T, B, 1, self.num_atoms)
                logits = value + logits - logits.mean(dim=2, keepdim=True)
        return logits, agent_state

    def compute_values(self, logits):
        """Return values [..., A] of logits [..., A, Z]."""
        if self.num_atoms == 1:
            return logits.squeeze(-1)
        return (logits.softmax(dim=-1) * self.support).sum(dim=-1)

    def run_lstm(self, x, inputs, agent_state):
        """Return features [T * B, hidden] of the LSTM, and its new state."""
        T, B = inputs["done"].shape
        last_action = F.one_hot(inputs["last_action"].flatten(), self.num_actions).float()
        reward = inputs["reward"].clamp(-1, 1).view(T * B, 1)
        x, outputs = torch.cat([x, reward, last_action], dim=1).view(T, B, -1), []
        for x_t, done in zip(x, inputs["done"], strict=True):
            # A new episode begins in this row, so it starts from the initial state.
            keep = (~done).float().view(1, B, 1)
            agent_state = tuple(s * keep for s in agent_state)
            output, agent_state = self.lstm(x_t.unsqueeze(0), agent_state)
            outputs.append(output)
        return torch.cat(outputs).flatten(0, 1), agent_state


def net_arguments(flags):
    """Return the keyword arguments of Net's constructor."""
    names = "num_atoms", "value_range", "dueling", "use_lstm"
    return {name: getattr(flags, name) for name in names}


def explore(action, values, epsilon):
    """Return actions, each of which is replaced with probability epsilon by a random allowed one.

    Args:
      values: [..., A], at most FORBIDDEN for actions that are not allowed.
    """
    random = torch.where(values > nets.FORBIDDEN, torch.rand_like(values), -1).argmax(dim=-1)
    return torch.where(torch.rand(action.shape, device=action.device) < epsilon, random, action)


def final_epsilons(flags):
    """Return the epsilon [num_actors * N] of each environment after --epsilon_steps."""
    num_envs = flags.num_actors * flags.envs_per_actor
    if flags.final_epsilon is not None:
        return torch.full((num_envs,), flags.final_epsilon)
    if not flags.use_lstm:
        return torch.full((num_envs,), 0.01)
    return 0.4 ** (1 + 7 * torch.linspace(0, 1, num_envs))


def rescale(x, eps=1e-3):
    """Return h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x (Pohlen et al. 2018), with all digits."""
    return x / ((x.abs() + 1).sqrt() + 1) + eps * x


def unscale(z, eps=1e-3):
    """Return the inverse of `rescale`, with all digits."""
    a = z.abs() + 1 + eps
    u = 2 * a / (1 + (1 + 4 * eps * a).sqrt())
    return z.sign() * (u**2 - 1)


def compute_targets(flags, returns, discounts, values):
    """Return targets: discounted returns, and the values [...] of the rows they end in."""
    if flags.value_rescaling:
        return rescale(returns + discounts * unscale(values))
    return returns + discounts * values


def project(returns, discounts, probabilities, support):
    """Return the distribution [..., Z] of returns + discounts * Z, on the atoms of the support.

    Args:
      returns, discounts: [...].
      probabilities: [..., Z], of the values of the rows that the returns end in.
    """
    step = support[1] - support[0]
    atoms = returns.unsqueeze(-1) + discounts.unsqueeze(-1) * support
    atoms = atoms.clamp(support[0], support[-1])
    distances = (atoms.unsqueeze(-2) - support.unsqueeze(-1)).abs() / step  # [..., to, from]
    return ((1 - distances).clamp(min=0) * probabilities.unsqueeze(-2)).sum(dim=-1)


def sequence_priorities(errors, mask, eta=0.9):
    """Return priorities [B] of absolute errors [L, B]: R2D2's mixture of maximum and mean."""
    errors = torch.where(mask, errors, 0)
    mean = errors.sum(dim=0) / mask.sum(dim=0).clamp(min=1)
    return eta * errors.amax(dim=0) + (1 - eta) * mean


def initial_priorities(flags, answers, returns, discounts, bootstrap, mask):
    """Return priorities [B] of new sequences, from what the actors computed; for a Replay.

    Args:
      answers: rows [R, B, ...] that follow those of the sequences.
      returns, discounts, bootstrap, mask: [L, B], as of a Sample.
    """
    rows = slice(flags.burn_in, None)
    answers = {name: torch.from_numpy(answers[name]) for name in (*ANSWER_KEYS, "last_action")}
    values = answers["baseline"].gather(0, torch.from_numpy(bootstrap))
    returns, discounts = torch.from_numpy(returns), torch.from_numpy(discounts)
    targets = compute_targets(flags, returns, discounts, values)
    L = returns.shape[0]
    taken = select(answers["policy_logits"][:L].unsqueeze(-1), answers["last_action"][:L])
    errors = (targets - taken.squeeze(-1)).abs()
    return sequence_priorities(errors[rows], torch.from_numpy(mask)[rows]).numpy()


def select(logits, actions):
    """Return the logits [T, B, Z] of actions [T, B], from those of all, [T, B, A, Z]."""
    index = actions[..., None, None].expand(-1, -1, 1, logits.shape[-1])
    return logits.gather(2, index).squeeze(2)


def run_net(flags, model, rows, agent_state, begin, end):
    """Return logits [R - begin, B, A, Z] of rows [R, B, ...] from `begin` on.

    Those before `begin` only move the recurrent state. The gradient flows in those before `end`.
    """
    num_rows = rows["done"].shape[0]
    bounds = [0 if flags.use_lstm else begin, begin, end, num_rows]
    logits = []
    for i, j in itertools.pairwise(bounds):
        if i == j:
            continue
        inputs = {name: map_nest(lambda x, i=i, j=j: x[i:j], rows[name]) for name in INPUTS}
        has_grad = torch.is_grad_enabled() and (i, j) == (begin, end)
        # An autocast each: older torch would keep weights cast without gradients for the others.
        with torch.set_grad_enabled(has_grad), devices.autocast(flags, rows["done"].device):
            part, agent_state = devices.to_float32(model.compute_logits(inputs, agent_state))
        logits += [part] if i >= begin else []
    return torch.cat(logits)


@devices.compiled
def compute_loss(flags, model, target_model, sample):
    """Return the loss of a Sample of tensors, a mean over its transitions; metrics; priorities [B].

    Without an LSTM a sequence is one transition, and L and R are 1 and 2.
    """
    burn_in, L = flags.burn_in, sample.returns.shape[0]
    returns, discounts, bootstrap, mask, actions = (
        x[burn_in:]
        for x in (sample.returns, sample.discounts, sample.bootstrap, sample.mask, sample.actions)
    )
    state = sample.agent_state
    # Of later rows, only double Q-learning needs the net's own values.
    rows = sample.rows if flags.double else map_nest(lambda x: x[:L], sample.rows)
    logits = run_net(flags, model, rows, state, burn_in, L)
    taken = select(logits[: L - burn_in], actions)  # [L - burn_in, B, Z]
    with torch.no_grad():
        # The first row that a return can end in is the one after the burn-in's last.
        first = burn_in + 1
        next_logits = run_net(flags, target_model, sample.rows, state, first, first)
        index = (bootstrap - first)[..., None, None].expand(-1, -1, *logits.shape[2:])
        next_logits = next_logits.gather(0, index)
        choosing = logits.gather(0, index + 1) if flags.double else next_logits
        next_values = model.compute_values(choosing)
        allowed = model.observations.allowed(sample.rows["frame"])
        if allowed is not None:
            allowed = allowed.gather(0, bootstrap.unsqueeze(-1).expand_as(next_values))
            next_values = torch.where(allowed, next_values, nets.FORBIDDEN)
        next_actions = next_values.argmax(dim=-1)
        next_logits = select(next_logits, next_actions)
    values = model.compute_values(taken)
    if flags.num_atoms == 1:
        targets = compute_targets(flags, returns, discounts, next_logits.squeeze(-1))
        losses = 0.5 * (targets - values).square()  # by Huber's, values would tend to a median
        errors = (targets - values).detach().abs()
    else:
        targets = project(returns, discounts, next_logits.softmax(dim=-1), model.support)
        losses = -(targets * taken.log_softmax(dim=-1)).sum(dim=-1)
        # The cross-entropy less the targets' entropy is the Kullback-Leibler divergence.
        errors = (losses.detach() - torch.special.entr(targets).sum(dim=-1)).clamp(min=0)
    num_rows = mask.sum().clamp(min=1)
    total_loss = (torch.where(mask, losses, 0) * sample.weights).sum() / num_rows
    return (
        total_loss,
        {
            "total_loss": total_loss.detach(),
            "mean_value": torch.where(mask, values.detach(), 0).sum() / num_rows,
            "mean_error": torch.where(mask, errors, 0).sum() / num_rows,
        },
        sequence_priorities(errors, mask),
    )


def create_optimizer(flags, model):
    """Return the optimizer, and a function from agent steps to a factor of its learning rate."""
    optimizer = torch.optim.Adam(
        model.parameters(), lr=flags.learning_rate, eps=flags.epsilon, fused=True
    )
    return optimizer, lambda step: 1


def learn(flags, model, target_model, feed, optimizer, num_updates, beta):
    """Learn from samples of the replay, up to the first loss, gradient or metric not finite.

    Args:
      beta: exponent of importance weights.

    Returns:
      Means of the metrics as floats, those of the update that was not finite, if any, and the last
      sample. The updates before that one stay.
    """
    device, results = next(model.parameters()).device, []
    failed = sample = None
    for _ in range(num_updates):
        sample = replay_feed.to_tensors(feed.replay.sample(flags.batch_size, beta), device)
        total_loss, metrics, priorities = compute_loss(flags, model, target_model, sample)
        model.zero_grad()
        total_loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), flags.grad_norm_clipping)
        metrics["grad_norm"] = grad_norm
        metrics["clipped_updates"] = grad_norm > flags.grad_norm_clipping
        results.append(metrics)
        feed.count_update()
        if not diagnostics.are_finite(metrics | {"": total_loss.detach()}):
            failed = diagnostics.to_floats(results.pop())
            break
        optimizer.step()
        feed.replay.update(sample.handle, priorities.cpu().numpy())
        if feed.num_updates % flags.target_interval == 0:
            target_model.load_state_dict(model.state_dict())
    return diagnostics.mean_floats(results) if results else {}, failed, sample


@torch.no_grad()
def act(flags, actor, seed, free_buffers, buffers, weights):
    """Fill buffers with rollouts, N at a time: an actor process.

    Args:
      seed: a list of ints, another one for each process.
      free_buffers: yields indices [N] of buffers to fill, one for each environment.
      buffers: as of create_buffers.
      weights: SharedWeights.
    """
    N, T = flags.envs_per_actor, flags.unroll_length
    randomness.seed_generators([*seed, 0])
    environments = create_environments(flags, create_env, N, [*seed, 1], f"actor {actor}")
    with contextlib.closing(environments):
        model = Net(
            environments.observation_space, environments.num_actions, **net_arguments(flags)
        )
        final_epsilon = final_epsilons(flags)[actor * N : (actor + 1) * N]
        agent_state = model.initial_state(N)
        row = environments.initial()
        inputs = map_nest(lambda a: torch.from_numpy(a).unsqueeze(0), row)  # views: [1, N, ...]
        rows = map_nest(torch.Tensor.numpy, buffers["rows"])
        agent_output = {k: np.zeros_like(rows[k][:N, 0]) for k in rows.keys() - row.keys()}
        is_first = True
        for indices in free_buffers:
            # With --deterministic the learner may publish sooner than this reads.
            wanted = int(buffers["policy_version"][indices[0]]) if flags.deterministic else None
            buffers["policy_version"][indices] = weights.load_into(model, wanted)
            buffers["actor"][indices] = actor
            buffers["is_first"][indices], is_first = is_first, False
            buffers["environment"][indices] = actor * N + torch.arange(N)
            epsilon = 1 + buffers["exploration"][indices[0]] * (final_epsilon - 1)
            rollout_buffers.write_agent_state(buffers, indices, agent_state)
            # Within one autocast weights are cast once; in inference mode they would be each time.
            with devices.autocast(flags, torch.device("cpu")):
                for t in range(T + 1):
                    free_buffers.beat()
                    if t > 0:  # row 0 is the last one of the rollout before
                        outputs = devices.to_float32(model(inputs, agent_state))
                        # Copies, since parts of it may lie in the row, which step overwrites.
                        agent_output, agent_state = map_nest(torch.clone, outputs)
                        action = agent_output["action"]
                        values = agent_output["policy_logits"]
                        agent_output["action"] = explore(action, values, epsilon)
                        agent_output = {k: v.squeeze(0).numpy() for k, v in agent_output.items()}
                        environments.step(agent_output["action"])
                    rollout_buffers.write_row(rows, indices, t, row | agent_output)


def append_rollouts(buffers, feed, indices):
    """Append the rollouts of full buffers to the replay."""
    for m in indices:
        rollout, state = map_nest(
            lambda x, m=m: x[m].numpy(), (buffers["rows"], buffers["initial_agent_state"])
        )
        names = "environment", "is_first", "policy_version", "actor"
        environment, is_first, version, actor = (buffers[name][m].item() for name in names)
        feed.append(environment, rollout, state, is_first, version, actor)


def release_buffers(flags, actors, buffers, learner, indices):
    """Give buffers back to the actors, with how far the exploration has come."""
    buffers["exploration"][indices] = min(1, learner.step / flags.epsilon_steps)
    actors.release(indices)


def write_replay(flags, actors, buffers, learner, feed):
    """Append rollouts to the replay until the actors are closed: a thread."""
    for indices in iter(lambda: actors.take(1), None):
        append_rollouts(buffers, feed, indices)
        feed.wait_to_play()
        release_buffers(flags, actors, buffers, learner, indices)


def take_turns(flags, actors, buffers, learner, feed):
    """Yield what `feed.batches` does after one rollout of each environment, until closed."""
    for indices in iter(lambda: actors.take(flags.num_actors * flags.envs_per_actor), None):
        append_rollouts(buffers, feed, indices)
        yield *feed.take_batch(), feed.count_due()
        buffers["policy_version"][indices] = learner.weights.version
        release_buffers(flags, actors, buffers, learner, indices)


def learn_from_replay(flags, learner, target_model, batches, feed, run):
    """Learn until the actors are closed or all steps are made: a learner thread."""
    torch.set_num_threads(learner.num_threads)
    for steps, batch, num_updates in run.follow(batches):
        with learner.lock:
            if run.stop.is_set():
                return
            progress = min(1, learner.step / flags.total_steps)
            beta = flags.importance_exponent + progress * (1 - flags.importance_exponent)
            metrics, failed, sample = learn(
                flags, learner.model, target_model, feed, learner.optimizer, num_updates, beta
            )
            learner.publish()
            if failed:
                if metrics:  # those before it are none in a row with it
                    run.record(metrics | {"steps": 0})
                metrics, batch = failed, replay_feed.add_sample(batch, sample)
            run.record(metrics | feed.metrics() | {"steps": steps}, batch, num_updates > 0)


def create_replay(flags, rows, outputs, state, stack_size):
    # Priorities of distributions are divergences, which the answers do not tell.
    uses_answers = flags.use_lstm and flags.num_atoms == 1
    keys = REPLAY_KEYS + (ANSWER_KEYS if uses_answers else ())
    example = {name: (rows | outputs)[name] for name in keys}
    priority = functools.partial(initial_priorities, flags) if uses_answers else None
    return Replay(
        map_nest(torch.Tensor.numpy, example),
        map_nest(torch.Tensor.numpy, state),
        flags.replay_capacity,
        flags.num_actors * flags.envs_per_actor,
        flags.unroll_length,
        sequence_length=flags.burn_in + flags.sequence_length,
        n_step=flags.n_step,
        discounting=flags.discounting,
        stack_size=stack_size,
        reward_limit=1 if flags.reward_clipping == "abs_one" else np.inf,
        alpha=flags.priority_exponent,
        initial_priority=priority,
        seed=flags.seed,
    )


def resolve(flags, action_space, frames_per_step=1):
    """Return the flags as this run uses them; refuse those that contradict each other."""
    flags = argparse.Namespace(**vars(flags) | {"frames_per_step": frames_per_step})
    nets.check_discrete(action_space)
    for name, values in DEFAULTS.items():
        if getattr(flags, name) is None:
            setattr(flags, name, values[flags.use_lstm])
    for name, is_used, needed, unused in (
        ("burn_in", flags.use_lstm, "--use_lstm", 0),
        ("sequence_length", flags.use_lstm, "--use_lstm", 1),
        ("value_range", flags.num_atoms > 1, "--num_atoms above 1", None),
    ):
        value, default = getattr(flags, name), parser.get_default(name)
        if not is_used and value not in (unused, default):
            raise FlagError(
                f"--{name} {value:g} needs {needed}: add that, or give --{name} {default:g}"
            )
    if not flags.use_lstm:
        flags.burn_in, flags.sequence_length = 0, 1
    elif flags.burn_in + flags.sequence_length == 1:
        raise FlagError("--sequence_length 1 without a --burn_in is no sequence: give 2 or more")
    elif flags.unroll_length > flags.sequence_length:  # sequences begin where rollouts do
        raise FlagError(
            f"of each --unroll_length {flags.unroll_length} rows only the --sequence_length "
            f"{flags.sequence_length} would be learned from: give at most as many"
        )
    replay_feed.check_learning_starts(flags)
    if flags.value_rescaling and flags.num_atoms > 1:
        raise FlagError("--value_rescaling rescales values, not distributions: add --num_atoms 1")
    flags.num_buffers = None
    has_gpu = devices.get_device(flags).type == "cuda"
    machine.choose_actors(flags, has_gpu)  # num_actors, envs_per_actor
    flags.num_buffers = 2 * flags.num_actors * flags.envs_per_actor
    return flags


def train(flags):
    """Train until all steps are made or a signal comes; return the exit status."""
    randomness.make_deterministic(flags)
    randomness.seed_generators([flags.seed])
    sample = sample_environment(flags, create_env)
    spaces = sample.observation_space, sample.action_space
    # Of stacks the replay keeps the newest frame. Only those of atari_wrappers are sure to be
    # made of the frames before.
    stack_size = max(1, sample.stack_size) if gym_envs.is_game(flags.env) else 1
    flags = resolve(flags, sample.action_space, sample.frame_skip)
    model, (rows, outputs, state) = nets.create_net(Net, *spaces, **net_arguments(flags))
    replay = create_replay(flags, rows, outputs, state, stack_size)
    weights = SharedWeights(model)
    buffers = rollout_buffers.create_buffers(flags, rows, outputs, state)
    for name, dtype in (
        ("environment", torch.int64), ("is_first", torch.bool), ("exploration", torch.float32)
    ):  # fmt: skip
        buffers[name] = torch.zeros(flags.num_buffers, dtype=dtype).share_memory_()
    device = devices.get_device(flags)
    devices.choose_precision(flags, model, [device, torch.device("cpu")])  # that of actors
    optimizer, decay = create_optimizer(flags, model.to(device))
    # Actors wait for the learner most of the time. More threads slow small nets down.
    num_threads = machine.count_cores() if model.observations.images else 1
    learner = Learner(model, optimizer, decay, weights, num_threads)
    rollout_rows = flags.replay_ratio * flags.unroll_length
    feed = replay_feed.ReplayFeed(
        replay, flags.replay_ratio, flags.learning_starts,
        rows_per_update=flags.batch_size * flags.sequence_length,
        slack=rollout_rows * flags.num_actors * flags.envs_per_actor,
    )  # fmt: skip

    with Run(flags, learner) as run:
        # Moved again, which makes an LSTM's weights one block, as GPUs want them.
        target_model = copy.deepcopy(model).to(device)
        buffers["exploration"].fill_(min(1, run.first_step / flags.epsilon_steps))
        buffers["policy_version"].fill_(weights.version)
        replay_feed.announce_refill(flags, run.first_step)
        actors = Actors(flags, act, (buffers, weights), run.first_step)
        with run.threads(on_exit=[actors.close, feed.close]) as threads:
            arguments = flags, actors, buffers, learner, feed
            if flags.deterministic:
                batches = take_turns(*arguments)
            else:
                threads.start(write_replay, *arguments)
                batches = feed.batches()
            threads.start(learn_from_replay, flags, learner, target_model, batches, feed, run)
            run.watch(actors)
    return run.exit_status


def main(argv=None):
    flags = parse_flags(parser, argv)
    if flags.mode == "train":
        return train(flags)
    net_class = functools.partial(Net, **net_arguments(flags))
    evaluate.test(flags, create_env, net_class, lambda _: f"{TEST_EPSILON:.1%} random actions")
    return 0


if __name__ == "__main__":
    run_program(main)
