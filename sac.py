# SPDX-License-Identifier: Apache-2.0
"""Continuous control from replay on one machine: SAC, TD3 and DDPG.

    python sac.py --env HalfCheetah-v5                      SAC (again with --xpid: resume)
    python sac.py --env HalfCheetah-v5 --algorithm td3      TD3; ddpg: DDPG
    python sac.py --mode test --xpid NAME                   play whole episodes with the checkpoint

    environments --- rows ---> replay --- samples ---> critics, then the actor, then target nets
         ^                                                           |
         +---------------------- actions of the actor <--------------+

A step of all environments, then as many updates as --replay_ratio asks for; with
--num_env_processes the environments step meanwhile.

To change the model, edit Actor and Critics; the losses, compute_critic_loss and compute_actor_loss;
the environment, create_env; what is logged, the metrics that learn returns.

Sources: Haarnoja et al. 2018b (SAC with a learned temperature), Fujimoto et al. 2018 (TD3),
Lillicrap et al. 2016 (DDPG). Episodes cut by a time limit bootstrap from their last observation.

Shapes: N environments, B batch size, A parts of an action, E critics. libtorchbeast/rows.py says
what a row holds.
"""

import argparse
import contextlib
import copy
import functools
import math

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from beast.actors.weights import Version
from beast.envs import gym_envs
from beast.envs.environments import sample_environment
from beast.envs.parallel import EnvironmentGroups, check_groups
from beast.errors import FlagError
from beast.flags import create_parser, parse_flags, run_program
from beast.learners import devices, nets, replay_feed
from beast.learners.learner import Learner
from beast.learners.replay import Replay
from beast.nest import map_nest
from beast.parser import finite, fraction, non_negative, positive
from beast.processes import machine, randomness
from beast.runs import diagnostics, evaluate
from beast.runs.run import Run
from libtorchbeast.rows import draw_seeds

# The defaults of flags for sac, td3 and ddpg.
DEFAULTS = {
    "learning_rate": (1e-3, 3e-4, 1e-3),
    "num_critics": (2, 2, 1),
    "policy_delay": (1, 2, 1),
    "target_noise": (0.0, 0.2, 0.0),
}
ALGORITHMS = ("sac", "td3", "ddpg")
REPLAY_KEYS = ("frame", "reward", "done", "truncated", "terminated", "last_action")
MIN_LOG_STD, MAX_LOG_STD = -20, 2
NOISE_CLIP = 0.5  # of --target_noise
MAX_THREADS = 4  # of the learner: nets are small
RECORD_STEPS = 20  # steps of the environments between two records of metrics


def default_of(name):
    return "Default: {}, {}, {} by algorithm.".format(*DEFAULTS[name])


# fmt: off
parser = create_parser(
    "sac.py", "SAC, TD3 and DDPG on one machine.",
    without=["env_backend", "greedy", "elastic"], env="Pendulum-v1",
)

training = parser.add_argument_group("training")
training.add_argument("--algorithm", default="sac", choices=ALGORITHMS, help="Algorithm.")
training.add_argument("--total_steps", default=1_000_000, type=positive(int),
                      help="Agent steps to play.")
training.add_argument("--num_envs", default=1, type=positive(int), help="Environments.")
training.add_argument("--num_env_processes", default=0, type=non_negative(int),
                      help="Processes that step environments during learning; 0: in-process.")
training.add_argument("--batch_size", default=256, type=positive(int),
                      help="Transitions in a batch.")
training.add_argument("--deterministic", action="store_true",
                      help="Deterministic algorithms: runs with one --seed are identical.")

replay = parser.add_argument_group("replay")
replay.add_argument("--replay_capacity", default=1_000_000, type=positive(int),
                    help="Rows in the replay.")
replay.add_argument("--replay_ratio", default=256.0, type=positive(float),
                    help="Rows to learn from for each agent step.")
replay.add_argument("--learning_starts", default=10_000, type=non_negative(int),
                    help="Agent steps with random actions, before the first update.")

loss = parser.add_argument_group("loss")
loss.add_argument("--discounting", default=0.99, type=fraction,
                  help="Discount factor of a step (gamma).")
loss.add_argument("--target_rate", default=0.005, type=fraction,
                  help="Polyak averaging rate of the target nets (tau).")
loss.add_argument("--target_entropy", type=finite, help="Target entropy of SAC's learned "
                  "temperature, in nats. Default: minus the action dimension.")
loss.add_argument("--exploration_noise", default=0.1, type=non_negative(float),
                  help="Standard deviation of the noise on actions of td3 and ddpg.")
loss.add_argument("--target_noise", type=non_negative(float), help="Standard deviation of the "
                  f"noise on the target actor's actions. {default_of('target_noise')}")
loss.add_argument("--num_critics", type=positive(int), help="Critics; targets use the "
                  f"smallest value. {default_of('num_critics')}")
loss.add_argument("--policy_delay", type=positive(int), help="Critic updates per update "
                  f"of actor and target nets. {default_of('policy_delay')}")

adam = parser.add_argument_group("optimizer (Adam)")
adam.add_argument("--learning_rate", type=positive(float),
                  help=f"Learning rate. {default_of('learning_rate')}")
# fmt: on


def create_env(flags):
    """Return one environment with a Box action space, in which actions are from -1 to 1."""
    return gym_envs.rescale_actions(gym_envs.create(flags))


class Actor(nn.Module):
    """The policy: a perceptron from observations to actions, squashed by tanh to [-1, 1].

    Args:
      num_outputs: A, or 2 A for means and logarithms of standard deviations, of SAC.
    """

    def __init__(self, num_inputs, num_outputs, num_hidden=256):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(num_inputs, num_hidden),
            nn.ReLU(inplace=True),
            nn.Linear(num_hidden, num_hidden),
            nn.ReLU(inplace=True),
            nn.Linear(num_hidden, num_outputs),
        )

    def forward(self, x):
        x = self.layers[:-1](x)
        # Means and deviations are computed in full precision.
        with torch.autocast(x.device.type, enabled=False):
            return self.layers[-1](x.float())


class Critics(nn.Module):
    """E perceptrons from observations and actions to values, in one batched product a layer."""

    def __init__(self, num_critics, num_inputs, num_hidden=256):
        super().__init__()
        sizes = [num_inputs, num_hidden, num_hidden, 1]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for before, after in zip(sizes, sizes[1:], strict=False):
            bound = 1 / math.sqrt(before)  # as of nn.Linear
            for parameters, shape in ((self.weights, (before, after)), (self.biases, (1, after))):
                values = torch.empty(num_critics, *shape).uniform_(-bound, bound)
                parameters.append(nn.Parameter(values))

    def forward(self, x, action):
        """Return values [E, B] of observations [B, inputs] and actions [B, A]."""
        x = torch.cat([x, action], dim=-1)
        x = x.expand(self.weights[0].shape[0], *x.shape)
        *hidden, (weight, bias) = zip(self.weights, self.biases, strict=True)
        for hidden_weight, hidden_bias in hidden:
            x = torch.baddbmm(hidden_bias, x, hidden_weight).relu_()
        # Values are computed in full precision; a product with one column is slow on a CPU.
        with torch.autocast(x.device.type, enabled=False):
            return (x.float() * weight.mT).sum(dim=-1) + bias.squeeze(-1)


class Net(nn.Module):
    """Actor, critics and temperature.

    Args:
      observation_space: nests, too, are vectors, in which Discrete parts are one-hot.
      num_actions: A, the parts of an action.
    """

    knows_bf16 = True  # last layers stay in float32

    def __init__(self, observation_space, num_actions, algorithm, num_critics, exploration_noise):
        super().__init__()
        self.is_sac, self.exploration_noise = algorithm == "sac", exploration_noise
        self.observations = nets.Observations(observation_space)
        size = self.observations.size
        if self.observations.images:
            raise ValueError(
                "observations are images: give Net convolutions, group_parameters theirs, and "
                "learn what they return"
            )
        self.actor = Actor(size, num_actions * (2 if self.is_sac else 1))
        self.critics = Critics(num_critics, size + num_actions)
        self.log_alpha = nn.Parameter(torch.zeros(()), requires_grad=self.is_sac)

    def initial_state(self, batch_size):
        return ()

    def forward(self, inputs, agent_state):
        """Choose actions: of SAC a sample in training mode, else the mean; of others with noise.

        Args:
          inputs: rows as a dict of [T, B, ...] tensors, of which frame counts.

        Returns:
          A dict of action [T, B, A], policy_logits, which are the actor's outputs, and baseline
          [T, B], which is 0: critics learn from the replay. And the agent state, which is ().
        """
        T, B = inputs["done"].shape
        x = self.observations.vector(map_nest(lambda x: x.flatten(0, 1), inputs["frame"]))
        outputs = self.actor(x)
        if self.is_sac and self.training:
            action, _ = sample_action(outputs)
        else:
            action = outputs.chunk(2, dim=-1)[0].tanh() if self.is_sac else outputs.tanh()
            if self.training:
                noise = self.exploration_noise * torch.randn_like(action)
                action = (action + noise).clamp(-1, 1)
        outputs = {"action": action, "policy_logits": outputs, "baseline": x.new_zeros(T * B)}
        return {name: x.view(T, B, *x.shape[1:]) for name, x in outputs.items()}, agent_state


def net_arguments(flags):
    """Return the keyword arguments of Net's constructor."""
    names = "algorithm", "num_critics", "exploration_noise"
    return {name: getattr(flags, name) for name in names}


def sample_action(outputs):
    """Return actions [B, A] of SAC's policy, and the logarithms [B] of their densities.

    Args:
      outputs: [B, 2 A] of the actor.
    """
    mean, log_std = outputs.chunk(2, dim=-1)
    log_std = log_std.clamp(MIN_LOG_STD, MAX_LOG_STD)
    noise = torch.randn_like(mean)
    u = mean + log_std.exp() * noise
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    # The logarithm of the slope of tanh, in a form that is exact for large |u|.
    log_slope = 2 * (math.log(2) - u - F.softplus(-2 * u))
    return u.tanh(), (log_prob - log_slope).sum(dim=-1)


@devices.compiled
def compute_critic_loss(flags, model, target_model, x, action, next_x, returns, discounts):
    """Return the critics' loss, a mean over the batch and a sum over the critics; and metrics.

    Args:
      x, next_x: observations [B, inputs], those after the returns.
      returns, discounts: [B], discounted rewards, and discounts of the values that follow; 0 where
        the episode has ended.
    """
    with torch.no_grad():
        if model.is_sac:
            next_action, log_prob = sample_action(model.actor(next_x))
            next_values = target_model.critics(next_x, next_action).amin(dim=0)
            next_values = next_values - model.log_alpha.exp() * log_prob
        else:
            next_action = target_model.actor(next_x).tanh()
            noise = (flags.target_noise * torch.randn_like(next_action)).clamp(
                -NOISE_CLIP, NOISE_CLIP
            )
            next_action = (next_action + noise).clamp(-1, 1)
            next_values = target_model.critics(next_x, next_action).amin(dim=0)
        targets = returns + discounts * next_values
    values = model.critics(x, action)
    loss = 0.5 * (targets - values).square().mean(dim=1).sum()
    return loss, {"total_loss": loss.detach(), "mean_value": values.detach().mean()}


@devices.compiled
def compute_actor_loss(flags, model, x):
    """Return the actor's loss, a mean over the batch, and the mean log density of its actions."""
    if not model.is_sac:
        return -model.critics(x, model.actor(x).tanh())[0].mean(), None
    action, log_prob = sample_action(model.actor(x))
    values = model.critics(x, action).amin(dim=0)
    return (model.log_alpha.exp().detach() * log_prob - values).mean(), log_prob.detach().mean()


def create_optimizers(flags, model):
    """Return the optimizers, and a function from agent steps to a factor of their rates."""
    optimizers = {
        name: torch.optim.Adam(values, lr=flags.learning_rate, fused=True)
        for name, values in group_parameters(model).items()
    }
    return optimizers, lambda step: 1


def group_parameters(model):
    """Return lists of parameters by the name of their optimizer."""
    actor = [*model.actor.parameters(), *([model.log_alpha] if model.is_sac else [])]
    return {"critics": list(model.critics.parameters()), "actor": actor}


def step_down(optimizer, loss, parameters, metrics):
    """Take a step, unless loss, gradient or metrics are not finite; return the gradient's norm."""
    optimizer.zero_grad()
    loss.backward(inputs=parameters)
    grad_norm = nn.utils.get_total_norm([p.grad for p in parameters])
    if diagnostics.are_finite(metrics | {"": loss.detach() + grad_norm}):
        optimizer.step()
    return grad_norm


def learn(flags, model, target_model, sample, optimizers, num_updates):
    """Learn from a Sample of tensors; return metrics as tensors.

    Args:
      num_updates: those before this one.
    """
    frames = map_nest(lambda x: x.flatten(0, 1), sample.rows["frame"])
    x, next_x = model.observations.vector(frames).chunk(2)
    arguments = sample.actions[0], next_x, sample.returns[0], sample.discounts[0]
    with devices.autocast(flags, x.device):
        critic_loss, metrics = compute_critic_loss(flags, model, target_model, x, *arguments)
    parameters = group_parameters(model)
    metrics["grad_norm"] = step_down(
        optimizers["critics"], critic_loss, parameters["critics"], metrics
    )
    if (num_updates + 1) % flags.policy_delay == 0:
        with devices.autocast(flags, x.device):
            actor_loss, log_prob = compute_actor_loss(flags, model, x)
        metrics["actor_loss"] = actor_loss.detach()
        if model.is_sac:
            metrics |= {"entropy": -log_prob, "alpha": model.log_alpha.detach().exp()}
            actor_loss = actor_loss - model.log_alpha * (log_prob + flags.target_entropy)
        metrics["actor_grad_norm"] = step_down(
            optimizers["actor"], actor_loss, parameters["actor"], metrics
        )
        with torch.no_grad():
            targets, sources = list(target_model.parameters()), list(model.parameters())
            torch._foreach_lerp_(targets, sources, flags.target_rate)
    return metrics


@torch.no_grad()
def play(flags, model, environments, feed, num_random):
    """Play and append to the replay, until woken; yield steps so far, while environments step.

    Args:
      num_random: agent steps with random actions at the start.
    """
    device, num_steps, row = next(model.parameters()).device, 0, environments.initial()
    while row is not None:
        before = map_nest(np.array, row)
        if num_steps < num_random:
            action = np.random.uniform(-1, 1, before["last_action"].shape).astype(np.float32)
        else:
            inputs = {name: before[name] for name in ("frame", "reward", "done", "last_action")}
            inputs = map_nest(lambda a: torch.from_numpy(a).unsqueeze(0).to(device), inputs)
            action = model(inputs, ())[0]["action"][0].cpu().numpy()
        environments.send(action)
        yield num_steps
        row = environments.receive()
        for i in range(flags.num_envs if row else 0):
            rollout = map_nest(lambda x, y, i=i: np.array([x[i], y[i]]), before, row)
            feed.append(i, rollout, (), is_first=num_steps == 0, version=None, actor=i)
        num_steps += flags.num_envs


def play_and_learn(flags, learner, target_model, environments, feed, run):
    """Alternate playing and learning until all steps are made or woken: a thread."""
    devices.use_threads(learner.num_threads, learner.device)
    num_random = flags.learning_starts if run.first_step < flags.learning_starts else 0
    updates, model, optimizer = [], learner.model, learner.optimizer
    for step, _ in enumerate(run.follow(play(flags, model, environments, feed, num_random))):
        with learner.lock:
            if run.stop.is_set():
                return
            is_finite = True
            for _ in range(feed.count_due()):
                sample = feed.replay.sample(flags.batch_size)
                sample = replay_feed.to_tensors(sample, learner.device)
                update = learn(flags, model, target_model, sample, optimizer, feed.num_updates)
                feed.count_update()
                updates.append(diagnostics.to_floats(update))
                if not (is_finite := diagnostics.is_finite(updates[-1])):
                    break
            if not is_finite and len(updates) > 1:  # those before it are none in a row with it
                run.record(diagnostics.means(updates[:-1]) | {"steps": 0})
                updates = updates[-1:]
            if step % RECORD_STEPS == 0 or not is_finite:
                learner.publish()
                steps, batch = feed.take_batch()
                if not is_finite:
                    batch = replay_feed.add_sample(batch, sample)
                metrics = diagnostics.means(updates) | feed.metrics() | {"steps": steps}
                run.record(metrics, batch, bool(updates))
                updates = []


def create_replay(flags, rows, state):
    example = {name: map_nest(torch.Tensor.numpy, rows[name]) for name in REPLAY_KEYS}
    return Replay(
        example, state, flags.replay_capacity, flags.num_envs, unroll_length=1,
        discounting=flags.discounting, seed=flags.seed,
    )  # fmt: skip


def resolve(flags, action_space, frames_per_step=1):
    """Return the flags as this run uses them; refuse those that contradict each other."""
    flags = argparse.Namespace(**vars(flags) | {"frames_per_step": frames_per_step})
    if not isinstance(action_space, gym.spaces.Box) or not action_space.is_bounded():
        raise FlagError(
            f"the action space is {action_space}, but this needs a bounded Box: dqn.py takes "
            "Discrete ones, ppo.py both"
        )
    for name, values in DEFAULTS.items():
        if getattr(flags, name) is None:
            setattr(flags, name, values[ALGORITHMS.index(flags.algorithm)])
    target_entropy = -float(np.prod(action_space.shape))
    if flags.target_entropy is None:
        flags.target_entropy = target_entropy
    is_sac = flags.algorithm == "sac"
    for name, is_used, default in (
        ("target_entropy", is_sac, target_entropy),
        ("target_noise", not is_sac, 0.0),
        ("exploration_noise", not is_sac, parser.get_default("exploration_noise")),
    ):
        if not is_used and (value := getattr(flags, name)) != default:
            raise FlagError(
                f"--{name} {value:g} is not for --algorithm {flags.algorithm}: give --{name} "
                f"{default:g}"
            )
    replay_feed.check_learning_starts(flags)
    check_groups(flags)
    return flags


def train(flags):
    """Train until all steps are made or a signal comes; return the exit status."""
    sample = sample_environment(flags, create_env)
    spaces = sample.observation_space, sample.action_space
    flags = resolve(flags, sample.action_space, sample.frame_skip)
    randomness.make_deterministic(flags)
    randomness.seed_generators([flags.seed])
    model, (rows, _, state) = nets.create_net(Net, *spaces, **net_arguments(flags))
    replay = create_replay(flags, rows, state)
    device = devices.get_device(flags)
    devices.choose_precision(flags, model, [device])
    optimizers, decay = create_optimizers(flags, model.to(device))
    num_threads = min(MAX_THREADS, machine.count_cores())
    learner = Learner(model, optimizers, decay, Version(), num_threads)
    ratio = flags.replay_ratio
    feed = replay_feed.ReplayFeed(replay, ratio, flags.learning_starts, flags.batch_size, slack=0)

    with contextlib.ExitStack() as stack, Run(flags, learner) as run:
        target_model = copy.deepcopy(model)
        replay_feed.announce_refill(flags, run.first_step)
        # A resumed run must not play the same games again.
        seeds = draw_seeds([flags.seed, 1, run.first_step], flags.num_envs)
        environments = stack.enter_context(contextlib.closing(EnvironmentGroups(
            functools.partial(create_env, flags), seeds, 1, flags.num_env_processes,
            flags.stall_timeout_s,
        )))  # fmt: skip
        with run.threads(on_exit=[environments.wake]) as threads:
            arguments = flags, learner, target_model, environments.groups[0], feed, run
            threads.start(play_and_learn, *arguments)
            run.watch(environments)
    return run.exit_status


def main(argv=None):
    flags = parse_flags(parser, argv)
    if flags.mode == "train":
        return train(flags)
    evaluate.test(flags, create_env, functools.partial(Net, **net_arguments(flags)))
    return 0


if __name__ == "__main__":
    run_program(main)
