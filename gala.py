# SPDX-License-Identifier: Apache-2.0
"""GALA: actor-learners that play and learn by themselves, and mix their weights by gossip.

    python gala.py --env PongNoFrameskip-v4                  train (again with --xpid: resume)
    python gala.py --exchange allreduce                      one A2C, its batch shared by all agents
    python gala.py --mode test --xpid NAME                   play whole games with the best agent

    agent 0: Net, N environments, RMSProp --- weights ---> agent 1: Net, N environments, RMSProp
       ^                                                      |
       | weights             each plays T steps, learns,      | weights
       |                     sends, and mixes what it got     v
    agent 3: Net, N environments, RMSProp <--- weights --- agent 2: Net, N environments, RMSProp

To change the model, edit Net; the loss, compute_loss; the environment, create_env; the optimizer,
create_optimizer; who sends to whom, find_in_peers; what is logged, the metrics that compute_loss
and learn return.

Source: Assran et al. 2019, "Gossip-based Actor-Learner Architectures for Deep Reinforcement
Learning". A2C: Mnih et al. 2016.

Shapes: T unroll length, N environments an agent, A actions. A rollout has T + 1 rows; row 0 is the
last row of the rollout before it. libtorchbeast/rows.py says what a row holds.
"""

import argparse
import contextlib
import functools

import torch
import torch.distributed as dist
from torch import nn

import atari_wrappers
import vtrace
from beast.actors.collect import collect
from beast.actors.weights import Version
from beast.envs import gym_envs
from beast.envs.environments import sample_environment
from beast.envs.parallel import ParallelEnvironments
from beast.errors import FlagError
from beast.flags import create_parser, parse_flags, run_program
from beast.gossip.agents import Agents
from beast.gossip.population import AgentMemory, Consensus, Population, flatten, make_equal
from beast.learners import devices, nets
from beast.learners.learner import Learner, create_state, raise_squares
from beast.nest import leaves_of, map_nest
from beast.parser import fraction, non_negative, positive
from beast.processes import randomness
from beast.processes.machine import count_cores, keep_freed_memory
from beast.runs import diagnostics, evaluate
from beast.runs.run import Run
from libtorchbeast.rows import draw_seeds

# fmt: off
parser = create_parser(
    "gala.py", "Gossiping actor-learners on one machine.",
    without=["env_backend", "write_profiler_trace", "greedy", "elastic"],
)

training = parser.add_argument_group("training")
training.add_argument("--total_steps", default=10_000_000, type=positive(int),
                      help="Agent steps to learn from, of all agents together.")
training.add_argument("--num_agents", default=4, type=positive(int), help="Actor-learners.")
training.add_argument("--envs_per_agent", default=16, type=positive(int),
                      help="Environments that an agent steps with one batched forward pass.")
training.add_argument("--unroll_length", default=5, type=positive(int), help="Steps in a rollout.")
training.add_argument("--agent", type=non_negative(int), help="Agent that --mode test plays "
                      "with. Default: the one with the highest mean return.")
training.add_argument("--deterministic", action="store_true",
                      help="All agents mix after the same update: runs with one --seed are "
                      "identical, and slower.")

exchange = parser.add_argument_group("exchange")
exchange.add_argument("--exchange", default="gossip", choices=["gossip", "allreduce", "none"],
                      help="gossip: mix weights with those of in-peers; allreduce: average "
                      "gradients in each update; none: neither.")
exchange.add_argument("--topology", default="ring", choices=["ring", "complete", "exponential"],
                      help="Senders: ring: predecessor; complete: all; exponential: predecessors "
                      "at distance 1, 2, 4, ...")
exchange.add_argument("--max_staleness", default=0, type=non_negative(int), help="Updates "
                      "without new weights of all in-peers until an agent waits; 0: never.")
exchange.add_argument("--message_delay", default=0, type=int, choices=[0, 1],
                      help="With --deterministic, the age of mixed weights in updates.")

loss = parser.add_argument_group("loss")
loss.add_argument("--entropy_cost", default=0.01, type=non_negative(float),
                  help="Weight of the entropy bonus, in nats.")
loss.add_argument("--baseline_cost", default=0.5, type=non_negative(float),
                  help="Weight of the baseline loss.")
loss.add_argument("--discounting", default=0.99, type=fraction,
                  help="Discount factor of a step (gamma).")
loss.add_argument("--reward_clipping", default="abs_one", choices=["abs_one", "none"],
                  help="Clip rewards to [-1, 1] in the learner.")

rmsprop = parser.add_argument_group("optimizer (RMSProp)")
rmsprop.add_argument("--learning_rate", default=7e-4, type=positive(float),
                     help="Learning rate of each agent.")
rmsprop.add_argument("--alpha", default=0.99, type=fraction,
                     help="RMSProp decay of the squared gradients.")
rmsprop.add_argument("--epsilon", default=1e-5, type=positive(float),
                     help="RMSProp epsilon, added outside the square root.")
rmsprop.add_argument("--grad_norm_clipping", default=0.5, type=positive(float),
                     help="Largest gradient norm of the loss, a mean over transitions.")

atari_wrappers.add_flags(parser)
# fmt: on

GRADIENT_INTERVAL = 500  # steps of an environment between two measurements of gradients' cosines


def create_env(flags):
    """Return one environment with a Discrete action space."""
    if gym_envs.is_game(flags.env):
        return atari_wrappers.create_atari(flags, flags.render_mode)
    return gym_envs.create(flags)


class Net(nn.Module):
    """Policy and baseline: convolutions for images, two perceptrons where there are none.

    With a shared perceptron, the baseline's large errors dominate, and CartPole stays at 67.
    """

    def __init__(self, observation_space, num_actions):
        super().__init__()
        self.observations = nets.Observations(observation_space)  # splits frames
        self.trunk = nets.Trunk(self.observations, nets.shallow_conv)
        self.knows_bf16 = self.trunk.has_large_images  # all else gains little
        size, self.baseline_trunk = self.trunk.size, None
        if not self.observations.images:
            self.baseline_trunk = nets.Trunk(self.observations, nets.shallow_conv)
        self.policy, self.baseline = nn.Linear(size, num_actions), nn.Linear(size, 1)
        nets.initialize([self.policy], 0.01)
        nets.initialize([self.baseline], 1.0)
        self.to(memory_format=torch.channels_last)

    def initial_state(self, batch_size):
        return ()

    def forward(self, inputs, agent_state):
        """Compute action, policy logits and baseline for each row.

        Args:
          inputs: rows as a dict of [T, N, ...] tensors; frame counts.

        Returns:
          A dict of policy_logits [T, N, A], baseline [T, N] and action [T, N] (sampled in training
          mode, else the most probable), and the state, which is ().
        """
        T, N = next(leaves_of(inputs["frame"])).shape[:2]
        frame = map_nest(lambda x: x.flatten(0, 1), inputs["frame"])
        x = self.observations(frame)
        features = baseline_features = self.trunk(*x)
        if self.baseline_trunk is not None:
            baseline_features = self.baseline_trunk(*x)
        # Probabilities and values are computed in full precision.
        with torch.autocast(features.device.type, enabled=False):
            policy_logits = self.observations.mask(self.policy(features.float()), frame)
            baseline = self.baseline(baseline_features.float())
        action = policy_logits
        if self.training:
            # By Gumbel's trick: multinomial would fail on a NaN, which learn is to report.
            action = action - torch.empty_like(action).exponential_().log()
        return {
            "policy_logits": policy_logits.view(T, N, -1),
            "baseline": baseline.view(T, N),
            "action": action.argmax(dim=1).view(T, N),
        }, agent_state


def net_arguments(flags):
    """Return the keyword arguments of Net's constructor: none, unless a fork adds some."""
    return {}


@devices.compiled
def compute_loss(flags, model, batch, initial_agent_state):
    """Return A2C's loss of rollouts ([T + 1, N, ...] each), a mean over their transitions."""
    with devices.autocast(flags, batch["reward"].device):
        outputs, _ = devices.to_float32(model(batch, initial_agent_state))
    # Index t is the transition from row t to row t + 1. What was recorded about it is in row t + 1.
    actions, rewards = batch["action"][1:], batch["reward"][1:]
    values = outputs["baseline"][:-1]
    policy = torch.distributions.Categorical(
        logits=outputs["policy_logits"][:-1], validate_args=False
    )
    # Out of the last row of an episode there is no transition, only a reset.
    mask = ~(batch["truncated"] | batch["terminated"])[:-1]
    discounts = flags.discounting * (~(batch["done"] | batch["terminated"])[1:]).to(values.dtype)
    if flags.reward_clipping == "abs_one":
        rewards = rewards.clamp(-1, 1)
    returns = vtrace.from_importance_weights(
        log_rhos=torch.zeros_like(values),  # since the policy that acted learns
        discounts=discounts,
        rewards=rewards,
        values=values,
        bootstrap_value=outputs["baseline"][-1],
        mask=mask,
    ).vs
    num_steps = mask.sum().clamp(min=1)

    def mean(x):
        return torch.where(mask, x, 0).sum() / num_steps

    advantages = returns - values.detach()
    policy_loss = -mean(policy.log_prob(actions) * advantages)
    baseline_loss = flags.baseline_cost * mean((returns - values) ** 2)
    entropy = mean(policy.entropy())
    total_loss = policy_loss + baseline_loss - flags.entropy_cost * entropy
    return total_loss, {
        "total_loss": total_loss.detach(),
        "policy_loss": policy_loss.detach(),
        "baseline_loss": baseline_loss.detach(),
        "entropy": entropy.detach(),
        "steps": mask.sum(),
    }


def create_optimizer(flags, model):
    """Return the optimizer of a Net, and of the Population, whose `agents` are Nets."""
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=flags.learning_rate, eps=flags.epsilon, alpha=flags.alpha
    )
    create_state(optimizer)  # now, since agents copy the optimizer's state
    return optimizer


def gradient_of(model):
    """Return the gradient, [parameters], with zeros for parameters that have none."""
    return flatten(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())


def average_gradients(model):
    """Set the gradients to their means over all agents."""
    gradients = gradient_of(model)
    dist.all_reduce(gradients)
    gradients /= dist.get_world_size()
    sizes = [p.numel() for p in model.parameters()]
    for parameter, part in zip(model.parameters(), gradients.split(sizes), strict=True):
        if parameter.requires_grad:
            if parameter.grad is None:  # not used by this agent's batch
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(part.view_as(parameter))


def learn(flags, model, batch, initial_agent_state, optimizer, own_gradient=None):
    """Take one step of the optimizer, if all numbers are finite; return metrics as floats.

    Args:
      batch: rollouts, [T + 1, N, ...] each.
      own_gradient: [parameters], where this agent's own gradient is stored, before averaging.
    """
    model.zero_grad()
    total_loss, metrics = compute_loss(flags, model, batch, initial_agent_state)
    total_loss.backward()
    if own_gradient is not None:
        own_gradient.copy_(gradient_of(model))
    if not diagnostics.is_finite(diagnostics.to_floats(metrics)):  # this agent skips the step
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            parameter.grad = torch.full_like(parameter, torch.nan)
    if flags.exchange == "allreduce":
        average_gradients(model)  # NaN for all agents where it is for one
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), flags.grad_norm_clipping)
    metrics["grad_norm"] = grad_norm
    before = [p.detach().clone() for p in model.parameters()]
    if torch.isfinite(grad_norm):  # the same value in all agents with --exchange allreduce
        optimizer.step()
    moved = [p.detach() - x for p, x in zip(model.parameters(), before, strict=True)]
    metrics["update_norm"] = nn.utils.get_total_norm(moved)
    return diagnostics.to_floats(metrics)


def find_in_peers(topology, agent, num_agents):
    """Return the agents whose weights an agent averages with its own."""
    if topology == "ring":
        distances = [1]
    elif topology == "complete":
        distances = range(1, num_agents)
    else:
        distances = [2**k for k in range(num_agents.bit_length()) if 2**k < num_agents]
    return sorted({(agent - d) % num_agents for d in distances} - {agent})


def gossip(flags, link, mailboxes, model, message, misses):
    """Average with the in-peers' weights, if all have sent new ones; return `misses` after that.

    Args:
      message: a net, which is overwritten.
      misses: for how many updates in a row weights of an in-peer were missing.
    """
    agent = link.agent
    if flags.deterministic:
        version = mailboxes.weights[agent].version
        link.wait_until(lambda: all(w.version >= version for w in mailboxes.weights))
        mailboxes.mix(agent, model, message, version - flags.message_delay)
        return 0
    if not mailboxes.has_news(agent):
        if not flags.max_staleness or misses + 1 < flags.max_staleness:
            return misses + 1
        if not link.wait_until(lambda: mailboxes.has_news(agent)):
            return misses + 1
    mailboxes.mix(agent, model, message)
    return 0


def learn_alone(flags, link, sample_rows, make_net, memory, port):
    """Play and learn, send weights, average with received ones: an agent process.

    Args:
      link: an AgentLink.
      sample_rows: as of `collect`.
      make_net: returns a Net with any weights.
      memory: an AgentMemory, from which this agent begins, and which it writes when it has to hold.
      port: of the store by which agents find each other with --exchange allreduce.
    """
    agent, device = link.agent, devices.get_device(flags)
    torch.set_num_threads(max(1, count_cores() // flags.num_agents))
    model, message = (make_net().to(device) for _ in range(2))
    randomness.seed_generators([*link.seed, 0])
    randomness.make_deterministic(flags)
    optimizer = create_optimizer(flags, model)
    if device.type == "cpu":
        keep_freed_memory()
        raise_squares(optimizer)
    memory.load(agent, model, optimizer)
    mailboxes, in_peers = memory.mailboxes, memory.mailboxes.in_peers[agent]
    if link.is_replacement:
        mailboxes.weights[in_peers[0] if in_peers else agent].load_into(model)
    if flags.exchange == "allreduce":
        link.join_group(port)
    seeds = draw_seeds([*link.seed, 1], flags.envs_per_agent)
    environments = ParallelEnvironments(
        functools.partial(create_env, flags), seeds, 0, f"agent {agent}"
    )
    misses = 0
    with contextlib.closing(environments):
        for i, batch in enumerate(collect(flags, model, [environments], sample_rows)):
            is_compared = i % max(1, GRADIENT_INTERVAL // flags.unroll_length) == 0
            own_gradient = memory.gradients[agent] if is_compared else None
            metrics = learn(flags, model, batch.rows, batch.agent_state[0], optimizer, own_gradient)
            mailboxes.weights[agent].publish(model)
            if flags.exchange == "gossip":
                misses = gossip(flags, link, mailboxes, model, message, misses)
            link.report(metrics, batch)
            if link.has_to_hold():
                memory.save(agent, model, optimizer)
                link.hold()


def count_updates(learner, agents, consensus, run):
    """Record the updates of all agents, until they stop at the end: a thread."""
    with contextlib.closing(agents.updates()) as updates:
        for agent, metrics, batch in updates:
            run.watchdog.beat("counts updates")
            with learner.lock:
                learner.publish()
                consensus.count(agent, metrics["update_norm"])
                run.record(metrics, batch)
            if run.stop.is_set():  # here, so that --deterministic ends after the same update
                agents.finish()


def check_flags(flags):
    """Refuse flags that contradict each other."""
    how = f"--exchange {flags.exchange}" + " --deterministic" * flags.deterministic
    for name, ways in (
        ("topology", ("--exchange gossip", "--exchange gossip --deterministic")),
        ("max_staleness", ("--exchange gossip",)),
        ("message_delay", ("--exchange gossip --deterministic",)),
    ):
        value, default = getattr(flags, name), parser.get_default(name)
        if value != default and how not in ways:
            raise FlagError(
                f"--{name} is {value}, which is for {' or '.join(ways)}, not for {how}: give "
                f"another --exchange, or --{name} {default}"
            )
    if flags.agent is not None and flags.mode == "train":
        raise FlagError(f"--agent {flags.agent} is for --mode test: all agents train")
    if flags.agent is not None and flags.agent >= flags.num_agents:
        raise FlagError(f"--agent is {flags.agent}, but --num_agents is {flags.num_agents}")


def resolve(flags, action_space, frames_per_step):
    """Return the flags as this run uses them; refuse action spaces that are not Discrete."""
    nets.check_discrete(action_space)
    return argparse.Namespace(**vars(flags) | {"frames_per_step": frames_per_step})


def train(flags):
    """Train until all steps are made or a signal comes; return the exit status."""
    check_flags(flags)
    randomness.make_deterministic(flags)
    randomness.seed_generators([flags.seed])
    sample = sample_environment(flags, create_env)
    spaces = sample.observation_space, sample.action_space
    flags = resolve(flags, sample.action_space, sample.frame_skip)
    net, (rows, outputs, _) = nets.create_net(Net, *spaces, **net_arguments(flags))
    make_net = functools.partial(Net, spaces[0], sample.num_actions, **net_arguments(flags))
    devices.choose_precision(flags, net, [devices.get_device(flags)])
    population = Population(net, flags.num_agents)
    optimizer = create_optimizer(flags, population)
    learner = Learner(population, optimizer, lambda step: 1.0, Version())
    learner.device = devices.get_device(flags)  # of the agents; the population is on the CPU

    with contextlib.ExitStack() as stack, Run(flags, learner, max_skipped=None) as run:
        in_peers, port, n = [[] for _ in population.agents], None, flags.num_agents
        if flags.exchange == "gossip":
            in_peers = [find_in_peers(flags.topology, agent, n) for agent in range(n)]
        elif flags.exchange == "allreduce":
            make_equal(population, optimizer)  # agents of a checkpoint may differ
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            port = store.port
        memory = AgentMemory(population, optimizer, in_peers)
        in_step = flags.exchange == "allreduce" or flags.deterministic
        consensus = Consensus(memory.mailboxes, make_net(), memory.gradients, in_step)
        agents = Agents(
            flags, learner.stats.setdefault("games_of_agents", [[] for _ in in_peers]),
            learn_alone, (rows | outputs, make_net, memory, port), in_step, run.first_step,
            consensus.metrics,
        )  # fmt: skip
        stack.enter_context(contextlib.closing(agents))
        learner.hold = functools.partial(agents.hold_and_copy, population, optimizer, memory)
        with run.threads(on_exit=[agents.finish]) as threads:
            threads.start(count_updates, learner, agents, consensus, run)
            run.watch(agents)
    return run.exit_status


def main(argv=None):
    flags = parse_flags(parser, argv)
    if flags.mode == "train":
        return train(flags)
    check_flags(flags)

    def create_population(observation_space, num_actions):
        net = Net(observation_space, num_actions, **net_arguments(flags))
        return Population(net, flags.num_agents, flags.agent)

    evaluate.test(flags, create_env, create_population, lambda net: f"agent {net.agent}")
    return 0


if __name__ == "__main__":
    run_program(main)
