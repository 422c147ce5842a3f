# SPDX-License-Identifier: Apache-2.0
"""IMPALA on many machines: environment servers, dynamic batching, one learner.

    python polybeast.py --env PongNoFrameskip-v4              train, with servers of its own
    python polybeast.py --server_addresses host1:50051,...    train on servers that run already
    python polybeast.py --listen host:50050                   train on those that dial in, any time
    python polybeast.py --mode test --xpid NAME               play whole games with the checkpoint

    environment servers          actor pool (C++, one thread a stream)
    polybeast_env.py  --------->  actor 0 ---+ inference batcher   inference threads
      N environments  <-- gRPC -- actor 1 ---+------ rows ------->   Net, on batches of rows
    polybeast_env.py  --------->  ...        |<----- actions -----
      N environments  <---------- actor k ---+                          ^ weights, as one
                                    | rollouts                          | consistent version
                                    v                                   |
                                 learner queue --- batches ---> learner threads: V-trace, loss,
                                                                RMSProp

To change the model, edit Net; the loss, compute_loss; the environment, create_env in
polybeast_env.py; the optimizer, create_optimizer; what is logged, the metrics that compute_loss
and learn return.

Shapes: T unroll length, B batch size, N environments a stream, A actions. A rollout has T + 1
rows; row 0 is the last row of the rollout before it. libtorchbeast/rows.py says what a row holds.
"""

import argparse
import copy
import functools
import math
import os

import torch
import torch.nn.functional as F
from torch import nn

import atari_wrappers
import vtrace
from beast.actors import rollout_buffers
from beast.actors.weights import LocalWeights
from beast.errors import FlagError
from beast.flags import add_server_flags, create_parser, parse_flags, run_program
from beast.learners import devices, learner_group, nets, rollout_replay
from beast.learners.learner import Learner
from beast.nest import map_nest
from beast.parser import fraction, non_negative, positive
from beast.processes import machine, randomness
from beast.runs import diagnostics, evaluate
from beast.runs.run import Run
from beast.servers import servers
from beast.servers.streams import Streams, read_batches
from polybeast_env import create_env

# fmt: off
parser = create_parser("polybeast.py", "IMPALA on many machines.")
add_server_flags(parser)

training = parser.add_argument_group("training")
training.add_argument("--total_steps", default=5_000_000, type=positive(int),
                      help="Agent steps to learn from.")
training.add_argument("--batch_size", default=8, type=positive(int), help="Rollouts in a batch.")
training.add_argument("--unroll_length", default=20, type=positive(int),
                      help="Steps in a rollout.")
training.add_argument("--num_learner_threads", default=2, type=positive(int),
                      help="Threads that fetch batches; one learns at a time.")
training.add_argument("--num_inference_threads", default=1, type=positive(int),
                      help="Threads that compute the actions of batches of rows.")
training.add_argument("--max_learner_queue_size", type=positive(int), help="Rollouts queued "
                      "before actors wait. Default: --batch_size.")
training.add_argument("--model", default="deep", choices=["deep", "shallow"],
                      help="IMPALA's residual net, or MonoBeast's.")
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

ENV_SCRIPT = os.path.join(os.path.dirname(__file__), "polybeast_env.py")  # of local servers


class ResidualBlock(nn.Module):
    """Residual block of two convolutions; initially the identity, since conv2 starts at 0."""

    def __init__(self, num_features):
        super().__init__()
        self.conv1 = nn.Conv2d(num_features, num_features, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(num_features, num_features, kernel_size=3, padding=1)

    def forward(self, x):
        return x + self.conv2(F.relu(self.conv1(F.relu(x)), inplace=True))


def deep_conv(num_channels):
    layers = []
    for num_features in (16, 32, 32):
        conv = nn.Conv2d if layers else nets.CenteredConv2d
        layers += [
            conv(num_channels, num_features, kernel_size=3, padding=1),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
            ResidualBlock(num_features),
            ResidualBlock(num_features),
        ]
        num_channels = num_features
    return nn.Sequential(*layers, nn.ReLU(inplace=True))


class Net(nn.Module):
    """Policy logits and baseline: convolutions, or a perceptron, and then, if any, an LSTM.

    `model` is "deep" (residual blocks, Espeholt et al. 2018, figure 3) or "shallow".
    """

    def __init__(self, observation_space, num_actions, use_lstm=False, model="deep"):
        super().__init__()
        self.num_actions = num_actions
        self.observations = nets.Observations(observation_space)  # splits frames
        conv, num_features = (deep_conv, 256) if model == "deep" else (nets.shallow_conv, 512)
        self.trunk = nets.Trunk(self.observations, conv, num_features)
        self.knows_bf16 = self.trunk.has_large_images  # all else gains little
        for block in self.trunk.modules():
            if isinstance(block, ResidualBlock):
                nets.initialize([block.conv2], 0.0)
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
    return {"use_lstm": flags.use_lstm, "model": flags.model}


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


def inference(flags, learner, device, streams, run):
    """Answer batches of rows, [1, columns, ...], until the batcher is closed: a thread.

    Each answer includes the version of the weights, which the rollout stores.
    """
    torch.set_num_threads(1)
    with learner.lock:
        model = copy.deepcopy(learner.model).to(device)
    version, copies = None, devices.DeviceCopies(device)
    # Within one autocast weights are cast once; in inference mode they would be each time.
    with torch.no_grad(), devices.autocast(flags, device):
        for batch in run.watchdog.follow(streams.batcher, "waits for rows", "answers them"):
            inputs, agent_state = copies.copy(batch.get_inputs())
            if version != learner.weights.version:
                version = learner.weights.load_into(model)
                torch.clear_autocast_cache()  # of the old weights
            agent_output, agent_state = devices.to_float32(model(inputs, agent_state))
            agent_output["policy_version"] = torch.full(inputs["reward"].shape, version)
            batch.set_outputs(map_nest(lambda x: x.cpu(), (agent_output, agent_state)))
            streams.count_batch(inputs["reward"].shape[1])


def batch_and_learn(flags, learner, streams, replay, run):
    """Learn from batches until the queue is closed or all steps are made: a learner thread."""
    torch.set_num_threads(learner.num_threads)
    for batch in read_batches(streams.queue, learner.device, run):
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


def resolve(flags):
    """Return the flags as this run uses them; refuse those that contradict each other."""
    flags = argparse.Namespace(**vars(flags))
    device = devices.get_device(flags)
    if servers.starts_servers(flags):  # num_servers, num_actors, envs_per_stream
        machine.choose_servers(flags, has_gpu=device.type == "cuda")
    servers.check_servers(flags)
    if (flags.max_learner_queue_size or flags.batch_size) < flags.batch_size:
        raise FlagError(
            f"--max_learner_queue_size is {flags.max_learner_queue_size}, but a batch needs "
            f"--batch_size = {flags.batch_size} rollouts: give it at least that"
        )
    return flags


def train(flags):
    """Train until all steps are made or a signal comes; return the exit status."""
    flags = resolve(flags)
    randomness.seed_generators([flags.seed, flags.rank])
    # On a CPU, all else waits for the learning of the deep net, so that gets all cores. With the
    # shallow net servers and inference need theirs (measured in benchmarks/README.md).
    num_threads = machine.count_cores()
    if flags.model == "shallow" and flags.num_servers:
        num_threads = max(1, num_threads - flags.num_servers)
    device = devices.get_device(flags)
    two_gpus = device.type == "cuda" and torch.cuda.device_count() > 1
    inference_device = torch.device("cuda:1") if two_gpus else device

    group = learner_group.current()
    with servers.connect(flags, ENV_SCRIPT, nets.check_discrete, group) as env_servers:
        flags = servers.adopt_env(flags, env_servers)  # env, frames_per_step
        spaces = env_servers.observation_space, env_servers.action_space
        model, sample = nets.create_net(Net, *spaces, **net_arguments(flags))
        devices.choose_precision(flags, model, [device])
        initial_state = model.initial_state(1)
        optimizer, decay = create_optimizer(flags, model.to(device))
        learner = Learner(model, optimizer, decay, LocalWeights(model), num_threads)
        replay = rollout_replay.RolloutReplay(flags, rollout_buffers.count_bytes(flags, *sample))

        with Run(flags, learner) as run:
            streams = Streams(flags, env_servers, initial_state, run.first_step, device)
            with run.threads(on_exit=[streams.queue.close, streams.batcher.close]) as threads:
                threads.start(streams.run, name="actors")
                threads.start(streams.log_events)
                threads.start(streams.watch_servers, run.stop)
                threads.start(
                    inference, flags, learner, inference_device, streams, run,
                    copies=flags.num_inference_threads,
                )  # fmt: skip
                threads.start(
                    batch_and_learn, flags, learner, streams, replay, run,
                    copies=flags.num_learner_threads,
                )  # fmt: skip
                threads.start(learner_group.join_updates, flags, learner, run, learn)
                run.watch(streams)
    return run.exit_status


def main(argv=None):
    flags = parse_flags(parser, argv)
    if flags.mode == "train":
        return train(flags)
    evaluate.test(flags, create_env, functools.partial(Net, **net_arguments(flags)))
    return 0


if __name__ == "__main__":
    run_program(main)
