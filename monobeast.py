# SPDX-License-Identifier: Apache-2.0
"""IMPALA on one machine: actor processes, shared-memory rollout buffers, one learner.

    python monobeast.py --env PongNoFrameskip-v4            train (again with --xpid: resume)
    python monobeast.py --mode test --xpid NAME             play whole games with the checkpoint

                 free queue (buffer indices)
       +--------------------<--------------------------+
       v                                               |
    actor 0: Net, N environments --+                   |
    actor 1: Net, N environments --+-> rollouts in --> learner threads: batch, V-trace,
    ...                            |   shared memory   loss, RMSProp
    actor k: Net, N environments --+                   |
       ^            full queue (buffer indices) -->    |
       +--------------------<--------------------------+
                 weights, as one consistent version

To change the model, edit Net; the loss, compute_loss; the environment, create_env; the
optimizer, create_optimizer; what is logged, the metrics that compute_loss and learn return.

Shapes: T unroll length, B batch size, N environments an actor, A actions. A rollout has T + 1
rows; row 0 is the last row of the rollout before it. libtorchbeast/rows.py says what a row holds.
"""

import argparse
import contextlib
import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import atari_wrappers
import vtrace
from beast.actors import rollout_buffers
from beast.actors.actors import Actors
from beast.actors.weights import SharedWeights
from beast.envs import gym_envs
from beast.envs.environments import create_environments, sample_environment
from beast.flags import create_parser, parse_flags, run_program
from beast.learners import devices, learner_group, nets, rollout_replay
from beast.learners.learner import Learner
from beast.nest import map_nest
from beast.parser import fraction, non_negative, positive
from beast.processes import machine, randomness
from beast.runs import diagnostics, evaluate
from beast.runs.run import Run

# fmt: off
parser = create_parser("monobeast.py", "IMPALA on one machine.")

training = parser.add_argument_group("training")
training.add_argument("--total_steps", default=5_000_000, type=positive(int),
                      help="Agent steps to learn from.")
training.add_argument("--num_actors", type=positive(int), help="Actor processes. Default: by "
                      "the number of cores; 2 for two cores.")
training.add_argument("--envs_per_actor", type=positive(int),
                      help="Environments that an actor steps with one batched forward pass. "
                      "Default: 8, or fewer for a small --batch_size.")
training.add_argument("--batch_size", default=8, type=positive(int), help="Rollouts in a batch.")
training.add_argument("--unroll_length", default=20, type=positive(int),
                      help="Steps in a rollout.")
training.add_argument("--num_buffers", type=positive(int), help="Rollouts in shared memory. "
                      "Default: num_actors * envs_per_actor + 2 * batch_size.")
training.add_argument("--num_learner_threads", default=1, type=positive(int),
                      help="Threads that batch rollouts; one learns at a time.")
training.add_argument("--deterministic", action="store_true",
                      help="Actors and learner take turns: runs with one --seed are identical, "
                      "and slower.")
training.add_argument("--use_lstm", action="store_true", help="Use an LSTM before the last layers.")

loss = parser.add_argument_group("loss")
loss.add_argument("--entropy_cost", default=3e-3, type=non_negative(float),
                  help="Weight of the entropy bonus, in nats.")
loss.add_argument("--baseline_cost", default=0.5, type=non_negative(float),
                  help="Weight of the baseline loss.")
loss.add_argument("--discounting", default=0.99, type=fraction,
                  help="Discount factor of a step (gamma).")
loss.add_argument("--reward_clipping", default="abs_one", choices=["abs_one", "none"],
                  help="Clip rewards to [-1, 1] in the learner, or not.")
loss.add_argument("--policy_clipping", default=0.2, type=positive(float),
                  help="PPO-style clipping range of the policy ratio; 1e9 disables it.")

rmsprop = parser.add_argument_group("optimizer (RMSProp)")
rmsprop.add_argument("--learning_rate", default=2e-3, type=positive(float),
                     help="Initial learning rate, annealed linearly to 0 at --total_steps.")
rmsprop.add_argument("--alpha", default=0.99, type=fraction,
                     help="RMSProp decay of the squared gradients.")
rmsprop.add_argument("--momentum", default=0.0, type=non_negative(float),
                     help="RMSProp momentum.")
rmsprop.add_argument("--epsilon", default=0.01, type=positive(float),
                     help="RMSProp epsilon, added outside the square root.")
rmsprop.add_argument("--grad_norm_clipping", default=40.0, type=positive(float),
                     help="Largest gradient norm of the loss, which is summed over the batch.")

rollout_replay.add_flags(parser)
atari_wrappers.add_flags(parser)
# fmt: on


def create_env(flags):
    """Return one environment with a Discrete action space."""
    if gym_envs.is_game(flags.env):
        return atari_wrappers.create_atari(flags, flags.render_mode)
    return gym_envs.create(flags)


class Net(nn.Module):
    """Policy logits and baseline: convolutions, or a perceptron, and then, if any, an LSTM."""

    def __init__(self, observation_space, num_actions, use_lstm=False):
        super().__init__()
        self.num_actions = num_actions
        self.observations = nets.Observations(observation_space)  # splits frames
        self.trunk = nets.Trunk(self.observations, nets.shallow_conv)
        self.knows_bf16 = self.trunk.has_large_images  # all else gains little
        core_size = self.trunk.size + num_actions + 1
        self.lstm = nn.LSTM(core_size, 256) if use_lstm else None
        if use_lstm:
            core_size = 256
        self.policy = nn.Linear(core_size, num_actions)
        self.baseline = nn.Linear(core_size, 1)
        nets.initialize([self.policy], 0.01)
        nets.initialize([self.baseline], 1.0)
        self.to(memory_format=torch.channels_last)  # faster convolutions, on CPU and GPU

    def initial_state(self, batch_size):
        """Return the recurrent state at the start of an episode: tensors [layers, B, hidden]."""
        if self.lstm is None:
            return ()
        return tuple(torch.zeros(1, batch_size, self.lstm.hidden_size) for _ in range(2))

    def forward(self, inputs, agent_state):
        """Compute action, policy logits and baseline for each row.

        Args:
          inputs: rows as a dict of [T, B, ...] tensors; frame, reward, done and last_action count.
          agent_state: recurrent state before the first row.

        Returns:
          A dict of policy_logits [T, B, A], baseline [T, B] and action [T, B] (sampled in training
          mode, else the most probable), and the recurrent state after the last row.
        """
        frame = map_nest(lambda x: x.flatten(0, 1), inputs["frame"])
        x = self.trunk(*self.observations(frame))
        # Probabilities and values are computed in full precision.
        with torch.autocast(x.device.type, enabled=False):
            return self.core(x.float(), inputs, agent_state)

    def core(self, x, inputs, agent_state):
        """Compute the result of `forward` from features x [T * B, hidden] of the frames."""
        T, B = inputs["reward"].shape
        last_action = F.one_hot(inputs["last_action"].flatten(), self.num_actions).float()
        reward = inputs["reward"].clamp(-1, 1).view(T * B, 1)
        x = torch.cat([x, reward, last_action], dim=1)

        if self.lstm is not None:
            outputs = []
            for x_t, done in zip(x.view(T, B, -1), inputs["done"], strict=True):
                # A new episode begins in this row, so it starts from the initial state.
                keep = (~done).float().view(1, B, 1)
                agent_state = tuple(s * keep for s in agent_state)
                output, agent_state = self.lstm(x_t.unsqueeze(0), agent_state)
                outputs.append(output)
            x = torch.cat(outputs).flatten(0, 1)

        policy_logits = self.policy(x).view(T, B, self.num_actions)
        policy_logits = self.observations.mask(policy_logits, inputs["frame"])
        if self.training:
            # By Gumbel's trick: multinomial would fail on a NaN, which the learner is to report.
            noise = torch.empty_like(policy_logits).exponential_().log()
            action = (policy_logits - noise).argmax(dim=-1)
        else:
            action = policy_logits.argmax(dim=-1)
        return {
            "policy_logits": policy_logits,
            "baseline": self.baseline(x).view(T, B),
            "action": action,
        }, agent_state


def net_arguments(flags):
    """Return the keyword arguments of Net's constructor."""
    return {"use_lstm": flags.use_lstm}


def compute_policy_gradient_loss(logits, actions, advantages, mask):
    cross_entropy = F.cross_entropy(logits.flatten(0, 1), actions.flatten(), reduction="none")
    return torch.sum(torch.where(mask, cross_entropy.view_as(advantages) * advantages, 0))


def compute_baseline_loss(advantages, mask):
    return 0.5 * torch.sum(torch.where(mask, advantages**2, 0))


def compute_entropy_loss(logits, mask):
    """Return the negative entropy."""
    log_policy = F.log_softmax(logits, dim=-1)
    # Finite, since 0 * -inf, of an action that is masked out, would be NaN.
    finite = log_policy.clamp(min=diagnostics.LEAST_LOGIT)
    return torch.sum(torch.where(mask, torch.sum(log_policy.exp() * finite, dim=-1), 0))


@devices.compiled
def compute_loss(flags, model, batch, initial_agent_state):
    """Return the loss of a batch of rollouts ([T + 1, B, ...] each), summed over T and B.

    The paper's learning rates (Espeholt et al. 2018, Table G.1) go with a sum, not with a mean.
    """
    with devices.autocast(flags, batch["reward"].device):
        outputs, _ = devices.to_float32(model(batch, initial_agent_state))
    bootstrap_value = outputs["baseline"][-1]  # [B]

    # From here on, index t is the transition from row t to row t + 1. What was recorded about it is
    # in row t + 1; the model's answer to it comes from the row that it leaves.
    actions = batch["action"][1:]
    behavior_policy_logits = batch["policy_logits"][1:]
    rewards = batch["reward"][1:]
    target_policy_logits = outputs["policy_logits"][:-1]
    values = outputs["baseline"][:-1]
    # Out of the last row of an episode there is no transition, only a reset.
    mask = ~(batch["truncated"] | batch["terminated"])[:-1]
    discounts = flags.discounting * (~(batch["done"] | batch["terminated"])[1:]).float()
    if flags.reward_clipping == "abs_one":
        rewards = rewards.clamp(-1, 1)

    targets = vtrace.from_logits(
        behavior_policy_logits=behavior_policy_logits,
        target_policy_logits=target_policy_logits,
        actions=actions,
        discounts=discounts,
        rewards=rewards,
        values=values,
        bootstrap_value=bootstrap_value,
        mask=mask,
    )
    # Much as in PPO (Schulman et al. 2017, equation 7): where the policy has moved far enough from
    # the one that acted, in the direction of the advantage, it is pushed no further.
    moved = targets.log_rhos * targets.pg_advantages.sign()
    pg_mask = mask & ~(moved > math.log1p(flags.policy_clipping))  # a NaN stays in, to be reported
    pg_loss = compute_policy_gradient_loss(
        target_policy_logits, actions, targets.pg_advantages, pg_mask
    )
    baseline_loss = flags.baseline_cost * compute_baseline_loss(targets.vs - values, mask)
    entropy_loss = flags.entropy_cost * compute_entropy_loss(target_policy_logits, mask)
    total_loss = pg_loss + baseline_loss + entropy_loss
    return total_loss, {
        "total_loss": total_loss.detach(),
        "pg_loss": pg_loss.detach(),
        "baseline_loss": baseline_loss.detach(),
        "entropy_loss": entropy_loss.detach(),
        "steps": mask[:, : flags.batch_size].sum(),  # of the new rollouts
        **diagnostics.from_logits(
            behavior_policy_logits, target_policy_logits, targets, values, mask
        ),
    }


def create_optimizer(flags, model):
    """Return the optimizer, and a function from agent steps to a factor of its learning rate."""
    optimizer = torch.optim.RMSprop(
        model.parameters(),
        lr=flags.learning_rate,
        momentum=flags.momentum,
        eps=flags.epsilon,
        alpha=flags.alpha,
    )
    # The mean of squares begins at 1, as in TensorFlow, where the paper's step sizes were found.
    # Begun at 0, the first steps are ten times as long, and the ReLUs die of them. Remove this loop
    # with another optimizer: torch adds its state only to parameters that have none.
    for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
        optimizer.state[parameter] = {
            "step": torch.zeros(()),
            "square_avg": torch.ones_like(parameter),
            "momentum_buffer": torch.zeros_like(parameter),
        }
    return optimizer, lambda step: 1 - min(step, flags.total_steps) / flags.total_steps


def learn(flags, model, batch, initial_agent_state, optimizer, group=learner_group.ALONE):
    """Take one step of the optimizer, unless a metric is not finite; return metrics as floats.

    In a group of learners it is one step with the sum of their gradients; a learner without a batch
    passes None.
    """
    metrics = {}
    model.zero_grad()
    if batch is not None:
        total_loss, metrics = compute_loss(flags, model, batch, initial_agent_state)
        total_loss.backward()
    metrics = group.sum(model, metrics)
    if not metrics:  # no learner has a batch
        return metrics
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), flags.grad_norm_clipping)
    metrics["grad_norm"] = grad_norm
    metrics["clipped_updates"] = grad_norm > flags.grad_norm_clipping
    metrics = diagnostics.to_floats(metrics)
    if diagnostics.is_finite(metrics):
        optimizer.step()
    return metrics


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
        agent_state = model.initial_state(N)
        row = environments.initial()
        inputs = map_nest(lambda a: torch.from_numpy(a).unsqueeze(0), row)  # views: [1, N, ...]
        rows = map_nest(torch.Tensor.numpy, buffers["rows"])
        agent_output = {k: np.zeros_like(rows[k][:N, 0]) for k in rows.keys() - row.keys()}
        for indices in free_buffers:
            # With --deterministic the learner may publish sooner than this reads.
            wanted = int(buffers["policy_version"][indices[0]]) if flags.deterministic else None
            buffers["policy_version"][indices] = weights.load_into(model, wanted)
            buffers["actor"][indices] = actor
            rollout_buffers.write_agent_state(buffers, indices, agent_state)
            # Within one autocast weights are cast once; in inference mode they would be each time.
            with devices.autocast(flags, torch.device("cpu")):
                for t in range(T + 1):
                    free_buffers.beat()
                    if t > 0:  # row 0 is the last one of the rollout before
                        outputs = devices.to_float32(model(inputs, agent_state))
                        # Copies, since parts of it may lie in the row, which step overwrites.
                        agent_output, agent_state = map_nest(torch.clone, outputs)
                        agent_output = {k: v.squeeze(0).numpy() for k, v in agent_output.items()}
                        environments.step(agent_output["action"])
                    rollout_buffers.write_row(rows, indices, t, row | agent_output)


def batch_and_learn(flags, learner, actors, buffers, replay, run):
    """Learn from batches until the actors are closed or all steps are made: a learner thread."""
    torch.set_num_threads(learner.num_threads)
    for batch in rollout_buffers.read_batches(flags, actors, buffers, learner, run):
        with learner.lock:
            if run.stop.is_set():
                return
            batch = replay.mix(batch)
            metrics = learn(
                flags, learner.model, batch.rows, batch.agent_state, learner.optimizer,
                learner.group,
            )  # fmt: skip
            learner.publish()
            replay.store(batch, metrics)
            run.record(metrics, batch)


def resolve(flags, frames_per_step=1, rollout_bytes=0):
    """Return the flags as this run uses them; refuse those that contradict each other.

    Args:
      frames_per_step: of the environment.
      rollout_bytes: of one rollout; where /dev/shm is small, fewer actors are chosen.
    """
    flags = argparse.Namespace(**vars(flags) | {"frames_per_step": frames_per_step})
    device = devices.get_device(flags)
    machine.choose_actors(flags, has_gpu=device.type == "cuda")  # num_actors, envs_per_actor
    rollout_buffers.choose_buffers(flags)  # num_buffers
    machine.fit_actors(flags, rollout_bytes)  # fewer of all three
    return flags


def train(flags):
    """Train until all steps are made or a signal comes; return the exit status."""
    randomness.make_deterministic(flags)
    randomness.seed_generators([flags.seed, flags.rank])

    sample = sample_environment(flags, create_env)
    spaces = sample.observation_space, sample.action_space
    nets.check_discrete(sample.action_space)
    model, (rows, outputs, state) = nets.create_net(Net, *spaces, **net_arguments(flags))
    weights = SharedWeights(model)  # first, as it takes shared memory
    rollout_bytes = rollout_buffers.count_bytes(flags, rows, outputs, state)
    flags = resolve(flags, sample.frame_skip, rollout_bytes)
    device = devices.get_device(flags)
    devices.choose_precision(flags, model, [device, torch.device("cpu")])  # that of actors
    buffers = rollout_buffers.create_buffers(flags, rows, outputs, state)
    optimizer, decay = create_optimizer(flags, model.to(device))
    num_threads = max(1, machine.count_cores() - flags.num_actors)
    learner = Learner(model, optimizer, decay, weights, num_threads)
    replay = rollout_replay.RolloutReplay(flags, rollout_bytes)

    with Run(flags, learner) as run:
        buffers["policy_version"].fill_(weights.version)
        actors = Actors(flags, act, (buffers, weights), run.first_step)
        with run.threads(on_exit=[actors.close]) as threads:
            threads.start(
                batch_and_learn, flags, learner, actors, buffers, replay, run,
                copies=flags.num_learner_threads,
            )  # fmt: skip
            threads.start(learner_group.join_updates, flags, learner, run, learn)
            run.watch(actors)
    return run.exit_status


def main(argv=None):
    flags = parse_flags(parser, argv)
    if flags.mode == "train":
        return train(flags)
    evaluate.test(flags, create_env, functools.partial(Net, **net_arguments(flags)))
    return 0


if __name__ == "__main__":
    run_program(main)
