# SPDX-License-Identifier: Apache-2.0
"""PPO on one machine: environments in processes, one batched answer a step, epochs of minibatches.

    python ppo.py --env PongNoFrameskip-v4                  train (again with --xpid: resume)
    python ppo.py --env HalfCheetah-v5                      the same, with continuous actions
    python ppo.py --num_epochs 1 --num_minibatches 1 --gae_lambda 1 --advantage_scaling none   A2C
    python ppo.py --mode test --xpid NAME                   play whole games with the checkpoint

    process 0: environments --+              T times: Net answers row t of all
    process 1: environments --+-- rows -->   environments, and so row t + 1 comes
    ...                       |                     | rollouts [T + 1, N]
    process k: environments --+                     v
       ^                                     targets once; then epochs of minibatches:
       +---------- actions --------------    loss, Adam; then the next rollouts

To change the model, edit Net; the loss, compute_loss; the environment, create_env; the optimizer,
create_optimizer; what is logged, the metrics that compute_loss and learn return.

Sources: Schulman et al. 2017 (PPO: clipping, and the adaptive penalty), Hafner et al. 2017
(BatchPPO: batched environments, normalization, the penalty's cutoff), Schulman et al. 2016 (GAE).

Shapes: T unroll length, N environments, A actions (or parts of one). A rollout has T + 1
rows; row 0 is the last row of the rollout before it. libtorchbeast/rows.py says what a row holds.
"""

import argparse
import contextlib
import functools

import gymnasium as gym
import torch
from torch import nn

import atari_wrappers
import vtrace
from beast.actors.collect import INPUTS, collect
from beast.actors.weights import Version
from beast.envs import gym_envs
from beast.envs.environments import sample_environment
from beast.envs.parallel import EnvironmentGroups, check_groups
from beast.errors import FlagError
from beast.flags import create_parser, parse_flags, run_program
from beast.learners import devices, nets
from beast.learners.learner import Learner
from beast.learners.normalizer import Normalizer, RewardScaler
from beast.nest import map_nest
from beast.parser import fraction, non_negative, positive
from beast.processes import randomness
from beast.processes.machine import count_cores
from beast.runs import diagnostics, evaluate
from beast.runs.run import Run
from libtorchbeast.rows import draw_seeds

# The defaults of flags: where actions are Discrete, much as in rlpyt (Stooke and Abbeel 2019);
# where they are continuous, as in the PPO paper's Table 3, with several environments.
DEFAULTS = {
    "total_steps": (5_000_000, 1_000_000),
    "num_envs": (32, 8),
    "unroll_length": (64, 256),
    "num_epochs": (4, 10),
    "num_minibatches": (4, 32),
    "learning_rate": (1e-3, 3e-4),
    "gae_lambda": (0.98, 0.95),
    "policy_clipping": (0.1, 0.2),
    "entropy_cost": (0.01, 0.0),
    "reward_scaling": ("clip", "std"),
    "grad_norm_clipping": (1.0, 0.5),
}


def default_of(name):
    return "Default: {}; {} for continuous actions.".format(*DEFAULTS[name])


# fmt: off
parser = create_parser(
    "ppo.py", "PPO on one machine.",
    without=["env_backend", "greedy", "elastic"],  # tests are greedy
)
parser.set_defaults(continuous=None)  # set by resolve

training = parser.add_argument_group("training")
training.add_argument("--total_steps", type=positive(int),
                      help=f"Agent steps to learn from. {default_of('total_steps')}")
training.add_argument("--num_envs", type=positive(int),
                      help=f"Environments. {default_of('num_envs')}")
training.add_argument("--num_groups", default=1, type=positive(int), help="Groups of environments; "
                      "one is stepped while the net answers another.")
training.add_argument("--num_env_processes", type=non_negative(int), help="Processes that step a "
                      "group; 0: in-process. Default: one a core, at most one an environment.")
training.add_argument("--unroll_length", type=positive(int),
                      help=f"Steps in a rollout. {default_of('unroll_length')}")
training.add_argument("--num_epochs", type=positive(int),
                      help=f"Epochs over each rollout. {default_of('num_epochs')}")
training.add_argument("--num_minibatches", type=positive(int), help="Minibatches in an epoch; with "
                      f"--use_gru at most --num_envs. {default_of('num_minibatches')}")
training.add_argument("--deterministic", action="store_true",
                      help="Deterministic algorithms: runs with one --seed are identical.")
training.add_argument("--use_gru", action="store_true", help="Use a GRU before the last layers.")

loss = parser.add_argument_group("loss")
loss.add_argument("--penalty", default="clip", choices=["clip", "kl"], help="PPO's clipped "
                  "objective, or its adaptive KL penalty.")
loss.add_argument("--policy_clipping", type=positive(float), help="PPO's clipping range "
                  f"of the policy ratio. {default_of('policy_clipping')}")
loss.add_argument("--kl_target", default=0.01, type=positive(float),
                  help="Target KL of --penalty kl, in nats.")
loss.add_argument("--entropy_cost", type=non_negative(float),
                  help=f"Weight of the entropy bonus, in nats. {default_of('entropy_cost')}")
loss.add_argument("--baseline_cost", default=0.5, type=non_negative(float),
                  help="Weight of the baseline loss.")
loss.add_argument("--discounting", default=0.99, type=fraction,
                  help="Discount factor of a step (gamma).")
loss.add_argument("--gae_lambda", type=fraction, help="Lambda of GAE. "
                  f"{default_of('gae_lambda')}")
loss.add_argument("--reward_scaling", choices=["clip", "std", "none"], help="clip: to [-1, 1]; "
                  "std: divide by the standard deviation of discounted returns, and at least by "
                  f"0.01, then clip to [-10, 10]. {default_of('reward_scaling')}")
loss.add_argument("--advantage_scaling", default="batch", choices=["batch", "none"],
                  help="batch: standardize the advantages of an update (mean 0, deviation 1).")

adam = parser.add_argument_group("optimizer (Adam)")
adam.add_argument("--learning_rate", type=positive(float), help="Initial learning rate, "
                  f"annealed linearly to 0. {default_of('learning_rate')}")
adam.add_argument("--epsilon", default=1e-5, type=positive(float), help="Adam epsilon.")
adam.add_argument("--grad_norm_clipping", type=positive(float), help="Largest gradient norm of "
                  f"the loss, a mean over a minibatch. {default_of('grad_norm_clipping')}")

atari_wrappers.add_flags(parser)
# fmt: on


def create_env(flags):
    """Return one environment with a Discrete, MultiDiscrete or Box action space."""
    if gym_envs.is_game(flags.env):
        return atari_wrappers.create_atari(flags, flags.render_mode)
    env = gym_envs.create(flags)
    if isinstance(env.action_space, gym.spaces.Box):
        env = gym.wrappers.ClipAction(gym_envs.rescale_actions(env))  # a Gaussian has no bounds
    return env


class Net(nn.Module):
    """Policy and baseline: convolutions for images, else a perceptron each, or a GRU on one.

    Args:
      num_actions: of a Discrete action space, or of each part of a MultiDiscrete one; with
        `continuous` the parts of a Box.
      use_gru: whether a GRU follows, which policy and baseline share.
    """

    def __init__(self, observation_space, num_actions, continuous=False, use_gru=False):
        super().__init__()
        self.continuous = continuous
        self.observations = nets.Observations(observation_space)  # splits frames
        self.normalizer = Normalizer(self.observations.size)  # of vectors
        self.trunk = nets.Trunk(self.observations, nets.shallow_conv)
        self.knows_bf16 = self.trunk.has_large_images  # all else gains little
        size, self.baseline_trunk = self.trunk.size, None
        if not self.observations.images and not use_gru:  # else policy and baseline share the trunk
            self.baseline_trunk = nets.Trunk(self.observations, nets.shallow_conv)
        self.reward_scaler = RewardScaler()  # for --reward_scaling std
        self.gru = nn.GRU(size, 256) if use_gru else None
        size = 256 if use_gru else size
        # Parts of MultiDiscrete actions have as many logits as the largest one, some of which are
        # masked.
        exists, width = None, num_actions
        if isinstance(num_actions, tuple):
            exists = torch.arange(max(num_actions)) < torch.tensor(num_actions).unsqueeze(1)
            width = exists.numel()
        self.register_buffer("exists", exists, persistent=False)  # [parts, A], or None
        self.policy, self.baseline = nn.Linear(size, width), nn.Linear(size, 1)
        nets.initialize([self.policy], 0.01)
        nets.initialize([self.baseline], 1.0)
        if continuous:
            self.log_std = nn.Parameter(torch.zeros(num_actions))
        self.register_buffer("kl_penalty", torch.ones(()))  # of --penalty kl; adapted by learn
        self.to(memory_format=torch.channels_last)

    def initial_state(self, batch_size):
        """Return the recurrent state at the start of an episode: tensors [layers, N, hidden]."""
        return () if self.gru is None else (torch.zeros(1, batch_size, self.gru.hidden_size),)

    def forward(self, inputs, agent_state):
        """Compute action, policy logits and baseline for each row.

        Args:
          inputs: rows as a dict of [T, N, ...] tensors, INPUTS; frame and done count.
          agent_state: recurrent state before the first row.

        Returns:
          A dict of policy_logits [T, N, A] (of MultiDiscrete actions [T, N, parts, A]; of
          continuous ones [T, N, 2 * A]: means, and logarithms of standard deviations), baseline
          [T, N] and action (sampled in training mode, else the most probable), and the recurrent
          state after the last row.
        """
        T, N = inputs["done"].shape
        frame = map_nest(lambda x: x.flatten(0, 1), inputs["frame"])
        images, vector = self.observations(frame)
        x = images, None if vector is None else self.normalizer(vector)
        features = baseline_features = self.trunk(*x)
        if self.baseline_trunk is not None:
            baseline_features = self.baseline_trunk(*x)
        # Probabilities and values are computed in full precision.
        with torch.autocast(features.device.type, enabled=False):
            features, baseline_features = features.float(), baseline_features.float()
            if self.gru is not None:
                features, agent_state = self.run_gru(features.view(T, N, -1), inputs, agent_state)
                baseline_features = features
            policy_logits, baseline = self.policy(features), self.baseline(baseline_features)
            if self.exists is not None:
                policy_logits = policy_logits.unflatten(1, self.exists.shape)
                policy_logits = torch.where(self.exists, policy_logits, nets.FORBIDDEN)
            elif not self.continuous:
                policy_logits = self.observations.mask(policy_logits, frame)
            action = policy_logits
            if self.continuous:
                policy_logits = torch.cat([action, self.log_std.expand_as(action)], dim=1)
                if self.training:
                    action = action + self.log_std.exp() * torch.randn_like(action)
            else:
                if self.training:
                    # By Gumbel's trick: multinomial would fail on a NaN, which learn is to report.
                    action = action - torch.empty_like(action).exponential_().log()
                action = action.argmax(dim=-1)
        outputs = {"policy_logits": policy_logits, "baseline": baseline[:, 0], "action": action}
        return {name: x.view(T, N, *x.shape[1:]) for name, x in outputs.items()}, agent_state

    def run_gru(self, x, inputs, agent_state):
        """Return features [T * N, hidden] of the GRU, and its new state."""
        outputs = []
        for x_t, done in zip(x, inputs["done"], strict=True):
            # A new episode begins in this row, so it starts from the initial state.
            state = agent_state[0] * (~done).float().view(1, -1, 1)
            output, state = self.gru(x_t.unsqueeze(0), state)
            agent_state = (state,)
            outputs.append(output)
        return torch.cat(outputs).flatten(0, 1), agent_state


def net_arguments(flags):
    """Return the keyword arguments of Net's constructor."""
    return {"continuous": flags.continuous, "use_gru": flags.use_gru}


def distribution(policy_logits, continuous):
    """Return the policy as a torch.distributions.Distribution, of [T, N] actions."""
    if not continuous:
        policy = torch.distributions.Categorical(logits=policy_logits, validate_args=False)
        parts = policy_logits.dim() - 3  # 1 for MultiDiscrete actions
        return torch.distributions.Independent(policy, parts, validate_args=False)
    mean, log_std = policy_logits.chunk(2, dim=-1)
    normal = torch.distributions.Normal(mean, log_std.exp(), validate_args=False)
    return torch.distributions.Independent(normal, 1, validate_args=False)


def kl_divergence(policy, other, continuous):
    """Return KL(policy, other), [T, N]: torch's, but finite where a probability of `other` is 0.

    A softmax may have a logit that is 104 below the largest one; its log-probability is finite.
    """
    if continuous:
        return torch.distributions.kl_divergence(policy, other)
    p, q = policy.base_dist, other.base_dist
    kl = torch.where(p.probs > 0, p.probs * (p.logits - q.logits), 0).sum(dim=-1)
    return kl.reshape(*kl.shape[:2], -1).sum(dim=-1)  # over the parts of MultiDiscrete actions


def compute_policy_loss(flags, log_rhos, advantages, kl, kl_penalty, mask):
    """Return the policy loss of --penalty, a mean over the transitions in the mask.

    Args:
      log_rhos: [T, N], log(target policy / behavior policy) of the actions taken.
      kl: [T, N], KL(behavior policy, target policy).
    """
    rhos, num_steps = log_rhos.exp(), mask.sum().clamp(min=1)
    objective = rhos * advantages
    if flags.penalty == "clip":  # equation 7 of the PPO paper
        clipped = rhos.clamp(1 - flags.policy_clipping, 1 + flags.policy_clipping) * advantages
        objective = torch.minimum(objective, clipped)
    policy_loss = -torch.where(mask, objective, 0).sum() / num_steps
    if flags.penalty == "kl":  # equation 8; the cutoff is BatchPPO's
        mean_kl = torch.where(mask, kl, 0).sum() / num_steps
        cutoff = 1000 * (mean_kl - 2 * flags.kl_target).clamp(min=0) ** 2
        policy_loss = policy_loss + kl_penalty * mean_kl + cutoff
    return policy_loss


@devices.compiled
def compute_loss(flags, model, batch, initial_agent_state):
    """Return the loss of a minibatch ([T, N, ...] each), a mean over its transitions.

    Args:
      batch: from `compute_targets`, or a part of it.
    """
    with devices.autocast(flags, batch["vs"].device):
        outputs, _ = devices.to_float32(model(batch, initial_agent_state))
    mask, num_steps = batch["mask"], batch["mask"].sum().clamp(min=1)
    policy = distribution(outputs["policy_logits"], model.continuous)
    behavior_policy = distribution(batch["behavior_policy_logits"], model.continuous)
    log_rhos = policy.log_prob(batch["action"]) - behavior_policy.log_prob(batch["action"])
    kl = kl_divergence(behavior_policy, policy, model.continuous)

    advantages, kl_penalty = batch["advantages"], model.kl_penalty
    policy_loss = compute_policy_loss(flags, log_rhos, advantages, kl, kl_penalty, mask)
    error = torch.where(mask, batch["vs"] - outputs["baseline"], 0)
    baseline_loss = flags.baseline_cost * error.square().sum() / num_steps
    entropy = torch.where(mask, policy.entropy(), 0).sum() / num_steps
    total_loss = policy_loss + baseline_loss - flags.entropy_cost * entropy
    is_clipped = (log_rhos.exp() - 1).abs() > flags.policy_clipping
    return total_loss, {
        "total_loss": total_loss.detach(),
        "policy_loss": policy_loss.detach(),
        "baseline_loss": baseline_loss.detach(),
        "entropy": entropy.detach(),
        "behavior_target_kl": torch.where(mask, kl.detach(), 0).sum() / num_steps,
        "clipped_rhos": (is_clipped & mask).sum() / num_steps,
    }


def create_optimizer(flags, model):
    """Return the optimizer, and a function from agent steps to a factor of its learning rate."""
    optimizer = torch.optim.Adam(
        model.parameters(), lr=flags.learning_rate, eps=flags.epsilon, fused=True
    )
    return optimizer, lambda step: 1 - min(step, flags.total_steps) / flags.total_steps


@torch.no_grad()
def compute_targets(flags, model, rows, last_agent_state):
    """Return transitions [T, N, ...] with targets and advantages, from rows [T + 1, N, ...].

    Index t is the transition from row t to row t + 1. What was recorded about it is in row t + 1.
    """
    inputs = {name: rows[name] for name in INPUTS}
    with devices.autocast(flags, rows["reward"].device):
        outputs, _ = devices.to_float32(model(map_nest(lambda x: x[-1:], inputs), last_agent_state))
    # Out of the last row of an episode there is no transition, only a reset.
    mask = ~(rows["truncated"] | rows["terminated"])[:-1]
    rewards, values = rows["reward"][1:], rows["baseline"][1:]
    discounts = flags.discounting * (~(rows["done"] | rows["terminated"])[1:]).to(values.dtype)
    if flags.reward_scaling == "clip":
        rewards = rewards.clamp(-1, 1)
    elif flags.reward_scaling == "std":
        rewards = model.reward_scaler(rewards, rows["done"][1:], mask, flags.discounting)
    targets = vtrace.from_importance_weights(
        log_rhos=torch.zeros_like(values),  # on-policy: the policy that acted learns
        discounts=discounts,
        rewards=rewards,
        values=values,
        bootstrap_value=outputs["baseline"][0],
        mask=mask,
        lambda_=flags.gae_lambda,
    )
    advantages = targets.vs - values
    if flags.advantage_scaling == "batch" and mask.any():
        std, mean = torch.std_mean(advantages[mask], correction=0)
        advantages = torch.where(mask, (advantages - mean) / (std + 1e-8), 0)
    return {
        **map_nest(lambda x: x[:-1], inputs),
        "action": rows["action"][1:],
        "behavior_policy_logits": rows["policy_logits"][1:],
        "values": values,
        "vs": targets.vs,
        "advantages": advantages,
        "mask": mask,
    }


def make_minibatches(flags, batch, agent_state):
    """Yield the minibatches of an epoch and the recurrent states before their first rows.

    With a GRU they are whole columns, else transitions in any order, as [1, minibatch, ...].
    """
    if not flags.use_gru:
        batch, agent_state = map_nest(lambda x: x.flatten(0, 1).unsqueeze(0), batch), ()
    n = batch["mask"].shape[1]
    order = torch.randperm(n, device=batch["mask"].device)
    # All in one go, since for small nets an index for each minibatch takes a tenth of its time.
    shuffled = map_nest(lambda x: x[:, order], (batch, agent_state))
    for i in range(flags.num_minibatches):
        part = slice(i * n // flags.num_minibatches, (i + 1) * n // flags.num_minibatches)
        yield map_nest(lambda x, part=part: x[:, part], shuffled)


@torch.no_grad()
def adapt_penalty(flags, model, batch, agent_state):
    """Move the weight of the penalty so that the KL of an update stays near its target."""
    kl = compute_loss(flags, model, batch, agent_state)[1]["behavior_target_kl"]
    if kl > 1.3 * flags.kl_target:
        model.kl_penalty *= 1.5
    elif kl < 0.7 * flags.kl_target:
        model.kl_penalty /= 1.5
    model.kl_penalty.clamp_(1e-6, 1e6)  # infinity, times a KL of 0, would be no number
    return model.kl_penalty.item()


def learn(flags, model, rows, agent_states, optimizer):
    """Learn from rollouts in epochs of minibatches; return metrics as floats.

    It stops at the first loss, gradient or metric that is not finite; the steps before that one
    stay.

    Args:
      agent_states: recurrent states before the first row, and before the last one.
    """
    batch, results = compute_targets(flags, model, rows, agent_states[1]), []
    mask, steps = batch["mask"], {"steps": float(batch["mask"].sum())}
    parameters = list(model.parameters())
    for _ in range(flags.num_epochs):
        for minibatch, agent_state in make_minibatches(flags, batch, agent_states[0]):
            total_loss, metrics = compute_loss(flags, model, minibatch, agent_state)
            model.zero_grad()
            total_loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(parameters, flags.grad_norm_clipping)
            metrics["grad_norm"] = grad_norm
            metrics["clipped_updates"] = grad_norm > flags.grad_norm_clipping
            results.append(metrics)
            if not diagnostics.are_finite(metrics | {"": total_loss.detach()}):
                return diagnostics.to_floats(metrics) | steps
            optimizer.step()
    # The KL of the last epoch is close to that after the update.
    last = diagnostics.mean_floats(results[-flags.num_minibatches :])
    metrics = diagnostics.mean_floats(results) | steps
    metrics["behavior_target_kl"] = last["behavior_target_kl"]
    if flags.penalty == "kl":
        metrics["kl_penalty"] = adapt_penalty(flags, model, batch, agent_states[0])
    if model.observations.size:
        frame = map_nest(lambda x: x[mask], batch["frame"])
        # Not sooner: with other moments, ratios would not begin at 1.
        model.normalizer.update(model.observations.vector(frame))
    vs, values = batch["vs"], batch["values"]
    moments = diagnostics.from_importance_weights(torch.zeros_like(vs), vs, values, mask)
    metrics["explained_variance"] = diagnostics.to_floats(moments)["explained_variance"]
    return metrics


def play_and_learn(flags, learner, groups, sample_rows, run):
    """Alternate playing and learning until all steps are made or the groups wake: a thread."""
    devices.use_threads(learner.num_threads, learner.device)
    for batch in run.follow(collect(flags, learner.model, groups, sample_rows)):
        with learner.lock:
            if run.stop.is_set():
                return
            metrics = learn(flags, learner.model, batch.rows, batch.agent_state, learner.optimizer)
            learner.publish()
            run.record(metrics, batch)


def resolve(flags, action_space, frames_per_step=1):
    """Return the flags as this run uses them; refuse those that contradict each other."""
    flags = argparse.Namespace(**vars(flags) | {"frames_per_step": frames_per_step})
    flags.continuous = isinstance(action_space, gym.spaces.Box)
    num_minibatches = flags.num_minibatches
    for name, values in DEFAULTS.items():
        if getattr(flags, name) is None:
            setattr(flags, name, values[flags.continuous])
    for name, penalty, default in (
        ("kl_target", "kl", parser.get_default("kl_target")),
        ("policy_clipping", "clip", DEFAULTS["policy_clipping"][flags.continuous]),
    ):
        if flags.penalty != penalty and (value := getattr(flags, name)) != default:
            raise FlagError(
                f"--{name} {value} is for --penalty {penalty}, but this is {flags.penalty}: give "
                f"another --penalty, or --{name} {default}"
            )
    check_groups(flags, flags.num_groups)
    most = flags.num_envs * (1 if flags.use_gru else flags.unroll_length)
    if num_minibatches is None:  # a resumed run chooses again
        flags.num_minibatches = min(flags.num_minibatches, most)
        flags.chosen = [*flags.chosen, "num_minibatches"]
    if flags.num_minibatches > most:
        what = "environments, which --use_gru leaves whole" if flags.use_gru else "steps"
        raise FlagError(
            f"--num_minibatches is {flags.num_minibatches}, but a rollout has {most} {what}: give "
            f"at most {most}"
        )
    return flags


def train(flags):
    """Train until all steps are made or a signal comes; return the exit status."""
    sample = sample_environment(flags, create_env)
    spaces = sample.observation_space, sample.action_space
    flags = resolve(flags, sample.action_space, sample.frame_skip)
    randomness.make_deterministic(flags)
    randomness.seed_generators([flags.seed])
    model, (rows, outputs, _) = nets.create_net(Net, *spaces, **net_arguments(flags))
    device = devices.get_device(flags)
    devices.choose_precision(flags, model, [device])
    optimizer, decay = create_optimizer(flags, model.to(device))
    # More threads slow small nets down.
    num_threads = count_cores() if model.observations.images else 1
    learner = Learner(model, optimizer, decay, Version(), num_threads)

    with contextlib.ExitStack() as stack, Run(flags, learner) as run:
        # A resumed run must not play the same games again.
        seeds = draw_seeds([flags.seed, 1, run.first_step], flags.num_envs)
        environments = stack.enter_context(contextlib.closing(EnvironmentGroups(
            functools.partial(create_env, flags), seeds, flags.num_groups,
            flags.num_env_processes, flags.stall_timeout_s,
        )))  # fmt: skip
        with run.threads(on_exit=[environments.wake]) as threads:
            threads.start(play_and_learn, flags, learner, environments.groups, rows | outputs, run)
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
