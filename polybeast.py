# SPDX-License-Identifier: Apache-2.0
"""IMPALA on many machines: environment servers, dynamic batching, one learner.

    python polybeast.py --env PongNoFrameskip-v4              train, with servers of its own
    python polybeast.py --server_addresses host1:50051,...    train on servers that run already
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

To change the model, edit AtariNet; the loss, compute_loss; the environment, create_env in
polybeast_env.py.

Shapes: T unroll length, B batch size, N environments a stream, A actions. A rollout has T + 1
rows, of which the first is the last of the rollout before it; environment.py says what they hold.
"""

import packages  # noqa: F401 - tells what to install, if one of the following is missing

# isort: split

import argparse
import copy
import functools
import logging
import os
import pprint
import signal
import sys
import threading

import torch
import torch.nn.functional as F
from torch import nn

import atari_wrappers
import autotune
import checkpoint
import credentials
import evaluate
import evaluator
import experiment
import health
import libtorchbeast
import polybeast_env
import vtrace
from environment import EnvError, count_actions, empty_actions, empty_observation, map_nest
from servers import (
    ANSWER_TIMEOUT,
    CONNECT_TIMEOUT,
    LocalServers,
    check_servers,
    expand_addresses,
    query_servers,
    read_spaces,
)
from timing import Stopwatch, TimeShares
from watchdog import Watchdog, print_stacks_on_signal

# fmt: off
parser = argparse.ArgumentParser(
    description="IMPALA on many machines.", formatter_class=experiment.HelpFormatter,
    allow_abbrev=False)

run = parser.add_argument_group("run")
run.add_argument("--mode", default="train", choices=["train", "test", "test_render"],
                 help="Train; test: play whole games with a checkpoint; test_render: the same, "
                 "shown on screen.")
run.add_argument("--env", default="PongNoFrameskip-v4",
                 help="Atari game of ale-py; for any other environment, edit create_env (for "
                 "PolyBeast that of polybeast_env.py).")
run.add_argument("--env_backend", default="gym", choices=["gym", "ale_vector"],
                 help="What steps the games in training: one environment after the other, or "
                 "ale-py's AtariVectorEnv, whose games differ a little (docs/ale_vector.md). "
                 "--mode test always plays with gym.")
run.add_argument("--xpid", help="Name of the run; one that has a checkpoint is resumed. "
                 "By default a new name, made of the time; to test, the latest run.")
run.add_argument("--savedir", default="~/logs/torchbeast", help="Folder of all runs.")
run.add_argument("--seed", type=int, help="Seed of environments, model and action sampling. "
                 "By default a random one, which meta.json tells.")
run.add_argument("--checkpoint_interval_s", default=600, type=float,
                 help="Seconds from one checkpoint to the next: the most that a kill can cost.")
run.add_argument("--wandb", action="store_true",
                 help="Log to Weights & Biases, too (pip install wandb).")
run.add_argument("--disable_checkpoint", action="store_true", help="Save no checkpoint.")
run.add_argument("--disable_cuda", action="store_true", help="Learn on the CPU.")
run.add_argument("--precision", choices=["fp32", "bf16"],
                 help="Number format of the net's layers before the LSTM, in actors and learner; "
                 "all else is float32. By default bf16 where the machine multiplies in it, else "
                 "fp32.")
run.add_argument("--autotune", action="store_true",
                 help="First find, in a minute or two, the fastest num_servers (num_actors, where "
                 "servers run already), envs_per_stream and, with a GPU, num_inference_threads "
                 "for this machine; those on the command line stay.")
run.add_argument("--stall_timeout_s", default=60, type=float,
                 help="Seconds of silence after which the log tells of an actor, environment "
                 "server or thread, with its stack; an actor or server is killed and replaced "
                 "after five times as long.")

training = parser.add_argument_group("training")
training.add_argument("--total_steps", default=5_000_000, type=int,
                      help="Agent steps to learn from.")
training.add_argument("--batch_size", default=8, type=int, help="Rollouts in a batch.")
training.add_argument("--unroll_length", default=20, type=int, help="Steps in a rollout.")
training.add_argument("--num_learner_threads", default=2, type=int,
                      help="Threads that fetch batches; one learns while others fetch the next.")
training.add_argument("--num_inference_threads", default=1, type=int,
                      help="Threads that answer batches of rows.")
training.add_argument("--max_learner_queue_size", type=int, help="Rollouts that wait for the "
                      "learner before actors do. By default batch_size.")
training.add_argument("--model", default="deep", choices=["deep", "shallow"],
                      help="IMPALA's residual net, or the net of MonoBeast.")
training.add_argument("--use_lstm", action="store_true", help="Use an LSTM before the last layers.")
training.add_argument("--write_profiler_trace", action="store_true",
                      help="Write a trace of 20 updates into the run's folder.")

servers = parser.add_argument_group("environment servers")
servers.add_argument("--server_addresses", help="Where servers run already: host:port, "
                     "host:first_port-last_port or unix:/path, separated by commas. By default, "
                     "and where it is empty, servers are started here.")
servers.add_argument("--num_servers", default=2, type=int, help="Server processes to start here.")
servers.add_argument("--pipes_basename", help="Start them at NAME.0, NAME.1, ... (a single one at "
                     "NAME), such as unix:/tmp/polybeast; or at host:port and the ports after it. "
                     "By default in a temporary folder.")
servers.add_argument("--num_actors", type=int, help="Streams, which the servers share. "
                     "By default one for each server.")
servers.add_argument("--envs_per_stream", type=int, help="Environments that a server steps as one "
                     "batch. By default as its own flag says, which is 8 unless it was given.")

credentials.add_flags(parser)

loss = parser.add_argument_group("loss")
loss.add_argument("--entropy_cost", default=3e-3, type=float, help="Weight of the entropy in nats.")
loss.add_argument("--baseline_cost", default=0.5, type=float, help="Weight of the baseline loss.")
loss.add_argument("--discounting", default=0.99, type=float, help="Discount factor of a step.")
loss.add_argument("--reward_clipping", default="abs_one", choices=["abs_one", "none"],
                  help="Clip rewards to [-1, 1] in the learner.")

optimizer = parser.add_argument_group("optimizer (RMSProp)")
optimizer.add_argument("--learning_rate", default=2e-3, type=float,
                       help="Learning rate at the start; falls linearly to 0 at total_steps.")
optimizer.add_argument("--alpha", default=0.99, type=float, help="Decay of the mean of squares.")
optimizer.add_argument("--momentum", default=0.0, type=float, help="Momentum.")
optimizer.add_argument("--epsilon", default=0.01, type=float, help="Added to that mean's root.")
optimizer.add_argument("--grad_norm_clipping", default=40.0, type=float,
                       help="Largest norm of the gradient of the loss, a sum over the batch.")

evaluate.add_flags(parser)
atari_wrappers.add_flags(parser)
parser.set_defaults(program="polybeast.py")  # whose checkpoints are not for the other one
# fmt: on

LOG_INTERVAL = 5  # seconds
ENV_SCRIPT = polybeast_env.__file__  # what local servers run


class CenteredConv2d(nn.Conv2d):
    """A convolution that sees how the pixels of a patch differ, not how bright all of them are.

    Most of a frame is background. If filters answered to it, the first updates would fit its
    brightness, and see a ball of two pixels only hundreds of thousands of steps later.
    """

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


def shallow_trunk(num_channels):
    return nn.Sequential(
        CenteredConv2d(num_channels, 32, kernel_size=8, stride=4),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, kernel_size=4, stride=2),
        nn.ReLU(inplace=True),
        nn.Conv2d(64, 64, kernel_size=3, stride=1),
        nn.ReLU(inplace=True),
    )


def deep_trunk(num_channels):
    layers = []
    for num_features in (16, 32, 32):
        conv = nn.Conv2d if layers else CenteredConv2d
        layers += [
            conv(num_channels, num_features, kernel_size=3, padding=1),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
            ResidualBlock(num_features),
            ResidualBlock(num_features),
        ]
        num_channels = num_features
    return nn.Sequential(*layers, nn.ReLU(inplace=True))


class ResidualBlock(nn.Module):
    """Two convolutions beside the identity, which is all there is at first: conv2 begins at 0."""

    def __init__(self, num_features):
        super().__init__()
        self.conv1 = nn.Conv2d(num_features, num_features, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(num_features, num_features, kernel_size=3, padding=1)

    def forward(self, x):
        return x + self.conv2(F.relu(self.conv1(F.relu(x)), inplace=True))


class AtariNet(nn.Module):
    """An Atari network, with an optional LSTM: policy logits and baseline.

    `model` is "deep" (residual blocks, Espeholt et al. 2018, figure 3) or "shallow".
    """

    knows_bf16 = True  # its last layers stay in float32; else --precision is fp32 by default

    def __init__(self, observation_space, num_actions, use_lstm=False, model="deep"):
        super().__init__()
        shape = observation_space.shape
        if len(shape or ()) != 3 or min(shape[1:]) < 36 or not isinstance(num_actions, int):
            raise experiment.FlagError(
                f"Net is for frames [channels, height, width] of 36x36 pixels or more and Discrete "
                f"actions, not {observation_space}, {num_actions}: edit AtariNet in {__file__}"
            )
        self.num_actions = num_actions
        self.conv = deep_trunk(shape[0]) if model == "deep" else shallow_trunk(shape[0])
        with torch.no_grad():
            num_features = self.conv(torch.zeros(1, *shape)).numel()
        hidden_size = 256 if model == "deep" else 512
        self.fc = nn.Linear(num_features, hidden_size)
        core_size = hidden_size + num_actions + 1
        self.lstm = nn.LSTM(core_size, 256) if use_lstm else None
        if use_lstm:
            core_size = 256
        self.policy = nn.Linear(core_size, num_actions)
        self.baseline = nn.Linear(core_size, 1)
        # With initial weights as small as PyTorch's, the first updates push most ReLUs below zero.
        gains = {layer: 2**0.5 for layer in self.conv.modules() if isinstance(layer, nn.Conv2d)}
        gains |= {block.conv2: 0.0 for block in self.conv.modules() if hasattr(block, "conv2")}
        gains |= {self.fc: 2**0.5, self.policy: 0.01, self.baseline: 1.0}
        for layer, gain in gains.items():
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
        self.to(memory_format=torch.channels_last)  # faster convolutions, on CPU and GPU

    def initial_state(self, batch_size):
        """Return the recurrent state at the start of an episode: tensors [layers, B, hidden]."""
        if self.lstm is None:
            return ()
        return tuple(torch.zeros(1, batch_size, self.lstm.hidden_size) for _ in range(2))

    def forward(self, inputs, agent_state):
        """Answer each row.

        Args:
          inputs: rows as a dict of [T, B, ...] tensors; frame, reward, done and last_action count.
          agent_state: recurrent state before the first row.

        Returns:
          A dict of policy_logits [T, B, A], baseline [T, B] and action [T, B] (sampled in training
          mode, else the most probable), and the recurrent state after the last row.
        """
        x = inputs["frame"].flatten(0, 1)  # [T * B, C, H, W]
        if torch.is_autocast_enabled(x.device.type):  # at once, instead of by way of float32
            x = x.to(torch.get_autocast_dtype(x.device.type))
        x = x.contiguous(memory_format=torch.channels_last) / 255
        x = self.conv(x).permute(0, 2, 3, 1)  # as it lies in memory: no copy, and none backward
        x = F.relu(self.fc(x.flatten(1)))
        # What follows sets probabilities and values, and so stays in full precision.
        with torch.autocast(x.device.type, enabled=False):
            return self.core(x.float(), inputs, agent_state)

    def core(self, x, inputs, agent_state):
        """Answer as `forward` does, from the features x [T * B, hidden] of the frames."""
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

        policy_logits = self.policy(x)  # [T * B, A]
        baseline = self.baseline(x)
        if self.training:
            # By Gumbel's trick, since multinomial fails on a NaN, of which the learner is to tell.
            noise = torch.empty_like(policy_logits).exponential_().log()
            action = (policy_logits - noise).argmax(dim=1)
        else:
            action = policy_logits.argmax(dim=1)
        return {
            "policy_logits": policy_logits.view(T, B, self.num_actions),
            "baseline": baseline.view(T, B),
            "action": action.view(T, B),
        }, agent_state


Net = AtariNet  # what is trained


def autocast(flags, device):
    """Have the model compute in --precision; its weights stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=flags.precision == "bf16")


def to_float32(outputs):
    """Return what the model has answered in full precision, whichever it computed in."""
    return map_nest(lambda x: x.float() if x.dtype == torch.bfloat16 else x, outputs)


def compute_policy_gradient_loss(logits, actions, advantages, mask):
    cross_entropy = F.cross_entropy(logits.flatten(0, 1), actions.flatten(), reduction="none")
    return torch.sum(torch.where(mask, cross_entropy.view_as(advantages) * advantages, 0))


def compute_baseline_loss(advantages, mask):
    return 0.5 * torch.sum(torch.where(mask, advantages**2, 0))


def compute_entropy_loss(logits, mask):
    """Return the negative entropy."""
    log_policy = F.log_softmax(logits, dim=-1)
    return torch.sum(torch.where(mask, torch.sum(log_policy.exp() * log_policy, dim=-1), 0))


def compute_loss(flags, model, batch, initial_agent_state):
    """Return the loss of a batch of rollouts ([T + 1, B, ...] each), summed over T and B.

    The step sizes of the IMPALA paper (Table G.1) go with a sum, not with a mean.
    """
    with autocast(flags, batch["reward"].device):
        outputs, _ = to_float32(model(batch, initial_agent_state))
    bootstrap_value = outputs["baseline"][-1]  # [B]

    # Index t of all that follows is the transition from row t to row t + 1. What was recorded about
    # it stands in row t + 1; what the model says of it now comes from the row that it leaves.
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
    pg_loss = compute_policy_gradient_loss(
        target_policy_logits, actions, targets.pg_advantages, mask
    )
    baseline_loss = flags.baseline_cost * compute_baseline_loss(targets.vs - values, mask)
    entropy_loss = flags.entropy_cost * compute_entropy_loss(target_policy_logits, mask)
    total_loss = pg_loss + baseline_loss + entropy_loss
    return total_loss, {
        "total_loss": total_loss.detach(),
        "pg_loss": pg_loss.detach(),
        "baseline_loss": baseline_loss.detach(),
        "entropy_loss": entropy_loss.detach(),
        "steps": mask.sum(),
        **health.from_logits(behavior_policy_logits, target_policy_logits, targets, values, mask),
    }


def learn(flags, model, batch, initial_agent_state, optimizer):
    """Take one step of the optimizer, unless a number is not finite; return figures as floats."""
    total_loss, figures = compute_loss(flags, model, batch, initial_agent_state)
    optimizer.zero_grad()
    total_loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), flags.grad_norm_clipping)
    figures["grad_norm"] = grad_norm
    # All at once: each float() alone would wait for the GPU.
    values = torch.stack([value.double() for value in figures.values()]).tolist()
    figures = dict(zip(figures, values, strict=True))
    if experiment.is_good(figures):
        optimizer.step()
    return figures


class PublishedWeights:
    """The newest weights, always as one whole version: a copy that nobody writes to."""

    def __init__(self, model):
        self._current = (0, None)
        self.publish(model)

    @property
    def version(self):
        return self._current[0]

    def publish(self, model):
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        self._current = (self.version + 1, weights)  # at once: readers see both or neither

    def load_into(self, model):
        """Copy the newest weights into `model` and return their version."""
        version, weights = self._current
        model.load_state_dict(weights)
        return version


def inference(flags, model, batcher, weights, device, batch_sizes):
    """Answer batches of rows, [1, columns, ...], until the batcher is closed.

    The version of the weights goes along with each answer, and so into the rollout.
    """
    version = None
    # Within one autocast the weights are cast once; not so in inference mode.
    with torch.no_grad(), autocast(flags, device):
        for batch in batcher:
            inputs, agent_state = map_nest(lambda x: x.to(device), batch.get_inputs())
            if version != weights.version:
                version = weights.load_into(model)
                torch.clear_autocast_cache()  # of the old weights
            agent_output, agent_state = to_float32(model(inputs, agent_state))
            agent_output["policy_version"] = torch.full(inputs["reward"].shape, version)
            batch.set_outputs(map_nest(lambda x: x.cpu(), (agent_output, agent_state)))
            batch_sizes.append(inputs["reward"].shape[1])


def get_device(flags):
    cuda = torch.cuda.is_available() and not flags.disable_cuda
    return torch.device("cuda:0" if cuda else "cpu")


def check_flags(flags):
    """Refuse what cannot work, before anything starts; fill in what depends on other flags."""
    experiment.check_flags(
        flags, "num_servers", "num_actors", "envs_per_stream", "batch_size", "unroll_length",
        "total_steps", "num_learner_threads", "num_inference_threads", "max_learner_queue_size",
        "stall_timeout_s", "checkpoint_interval_s", "learning_rate", "grad_norm_clipping",
    )  # fmt: skip
    if (flags.max_learner_queue_size or flags.batch_size) < flags.batch_size:
        raise experiment.FlagError(
            f"--max_learner_queue_size is {flags.max_learner_queue_size}, but a batch needs "
            f"--batch_size = {flags.batch_size} rollouts: give it at least that"
        )
    try:
        check_servers(flags)
    except ValueError as error:
        raise experiment.FlagError(error) from None
    evaluate.check_flags(flags)
    experiment.choose_precision(flags, Net, [get_device(flags)])


def tuned_flags(flags):
    """Return what --autotune varies, and where it begins."""
    num_envs = flags.envs_per_stream or polybeast_env.parser.get_default("envs_per_stream")
    start = {"envs_per_stream": num_envs}
    if flags.server_addresses:
        start["num_actors"] = flags.num_actors or len(expand_addresses(flags.server_addresses))
    else:
        start["num_servers"] = len(os.sched_getaffinity(0))
    if get_device(flags).type == "cuda":
        start["num_inference_threads"] = flags.num_inference_threads
    return start


def train(flags):
    check_flags(flags)
    try:
        libtorchbeast.ActorPool  # noqa: B018 - where it is not built, this says how to build it
    except ImportError as error:
        raise experiment.FlagError(error) from None
    # Until the run's own handlers take over: have what has been started ended.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    experiment.keep_freed_memory()
    experiment.seed_generators([flags.seed, 0])
    if flags.server_addresses:
        return train_on(flags, expand_addresses(flags.server_addresses), None)
    words = experiment.command_words(polybeast_env.parser, flags)
    with LocalServers(flags, ENV_SCRIPT, *words) as local:
        return train_on(flags, local.addresses, local)


def train_on(flags, addresses, local):
    """Train on servers at `addresses`; `local` are those that were started here, or None."""
    T, B = flags.unroll_length, flags.batch_size
    device = get_device(flags)
    use_cuda = device.type == "cuda"
    two_gpus = use_cuda and torch.cuda.device_count() > 1
    inference_device = torch.device("cuda:1") if two_gpus else device
    # On a CPU, all else waits for the learning of the deep net, so that gets all cores. With the
    # shallow net servers and inference need theirs (benchmarks/README.md has the figures).
    num_threads = len(os.sched_getaffinity(0))
    if flags.model == "shallow" and local is not None:
        num_threads = max(1, num_threads - flags.num_servers)

    # One environment will do to answer, if we are to say how many there shall be.
    access = flags if local is None else None  # servers of ours are nobody else's
    handshake = query_servers(addresses, flags.envs_per_stream and 1, local, access)
    observation_space, action_space = read_spaces(handshake)
    N = flags.envs_per_stream or handshake["num_envs"]
    num_actors = flags.num_actors or len(addresses)
    max_queue_size = flags.max_learner_queue_size or B
    model = Net(observation_space, count_actions(action_space), flags.use_lstm, flags.model)
    with torch.no_grad():  # one answer shows that net and environment go together
        frame = map_nest(torch.from_numpy, empty_observation(observation_space, 1))
        row = {"frame": map_nest(lambda x: x.unsqueeze(0), frame), "reward": torch.zeros(1, 1)}
        row |= {"done": torch.ones(1, 1, dtype=torch.bool)}
        row |= {"last_action": torch.from_numpy(empty_actions(action_space, 1)).unsqueeze(0)}
        agent_output, _ = model(row, model.initial_state(1))
    experiment.check_actions(agent_output, row)
    initial_agent_state = model.initial_state(1)

    model.to(device)
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=flags.learning_rate, momentum=flags.momentum, eps=flags.epsilon,
        alpha=flags.alpha,
    )  # fmt: skip
    # The running mean of squares begins at 1, as in TensorFlow, where the paper's step sizes were
    # found. Begun at 0, the first steps are ten times as long, and the ReLUs die of them.
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros(()),
            "square_avg": torch.ones_like(parameter),
            "momentum_buffer": torch.zeros_like(parameter),
        }
    stats = {"step": 0, "episode_returns": [], "game_returns": []}
    stats |= {"skipped_updates": 0, "skipped_in_a_row": 0}
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda _: 1 - min(stats["step"], flags.total_steps) / flags.total_steps
    )

    stop = threading.Event()
    errors = []
    lock = threading.Lock()  # guards model, optimizer, scheduler, stats, figures, lags, checkup
    figures, lags, batch_sizes = {}, [], []
    checkup = health.Checkup(flags.grad_norm_clipping)
    learner_waits = Stopwatch(flags.num_learner_threads)  # no thread has a batch
    time_shares = TimeShares()
    profiled = threading.Lock()  # held by the one learner thread that is profiled

    inference_batcher = libtorchbeast.DynamicBatcher(
        batch_dim=1, minimum_batch_size=1, maximum_batch_size=max(512, N)
    )
    learner_queue = libtorchbeast.BatchingQueue(
        batch_dim=1, minimum_batch_size=B, maximum_batch_size=B,
        maximum_queue_size=max_queue_size, pin_memory=use_cuda,
    )  # fmt: skip

    def batch_and_learn():
        torch.set_num_threads(num_threads)
        copy_stream = torch.cuda.Stream(device) if use_cuda else None
        profiler = None  # a profiler sees the thread that starts it
        if flags.write_profiler_trace and profiled.acquire(blocking=False):
            profiler = experiment.start_profiler(run_folder.path)
        while True:
            watchdog.beat("waits for a batch")
            with learner_waits:
                rollouts = next(learner_queue, None)
            watchdog.beat("learns")
            if rollouts is None:
                return  # the queue is closed
            (env_outputs, agent_outputs), agent_state = rollouts
            batch = env_outputs | agent_outputs
            versions = batch.pop("policy_version")[1:]
            origin = {"streams": batch.pop("actor")[0].unique().tolist()}
            # Row 0 was counted when it was the last row of the rollout before.
            done, game_done = batch["done"][1:], batch["game_done"][1:]
            episode_returns = batch["episode_return"][1:][done].tolist()
            game_returns = batch["game_return"][1:][game_done].tolist()
            # Beside what another thread is learning from.
            with torch.cuda.stream(copy_stream):
                device_batch, agent_state = map_nest(
                    lambda x: x.to(device, non_blocking=True), (batch, agent_state)
                )
            if copy_stream is not None:
                copy_stream.synchronize()
            with lock:
                if stats["step"] >= flags.total_steps:
                    return
                lags.extend((weights.version - versions.float().mean(dim=0)).tolist())
                latest = learn(flags, model, device_batch, agent_state, optimizer)
                run_folder.check_update(latest, stats, (batch, agent_state), origin)
                weights.publish(model)
                stats["step"] += int(latest.pop("steps"))
                figures.update(latest)
                checkup.add(latest)
                scheduler.step()
                stats["episode_returns"] = (stats["episode_returns"] + episode_returns)[-100:]
                stats["game_returns"] = (stats["game_returns"] + game_returns)[-100:]
                if profiler is not None:
                    profiler.step()
                if stats["step"] >= flags.total_steps:
                    return

    def answer():
        torch.set_num_threads(1)
        actor_model = copy.deepcopy(model).to(inference_device)
        batches = watchdog.follow(inference_batcher, "waits for rows", "answers them")
        inference(flags, actor_model, batches, weights, inference_device, batch_sizes)

    def silences():
        return [
            (f"stream {i}", f"waits for {what} (server {addresses[i % len(addresses)]})", seconds,
             None)
            for i, (what, seconds) in enumerate(actors.silences()) if what != "learner"
        ]  # fmt: skip

    def tell():
        for event in iter(actors.next_event, None):
            logging.warning("%s", event)

    def start(function, name):
        """Start a thread; when one of them ends, for whatever reason, the run does."""

        def run_to_the_end():
            try:
                function()
            except BaseException as error:
                errors.append(error)
            finally:
                stop.set()

        thread = threading.Thread(target=run_to_the_end, name=name)
        thread.start()
        threads.append(thread)

    def log():
        with lock:
            step, latest = stats["step"], dict(figures)
            latest |= experiment.run_figures(stats, optimizer, lags) | checkup.means()
            lags.clear()
        actor_waited = {f"actor_wait_{k}": s / num_actors for k, s in actors.waits().items()}
        latest |= time_shares(learner_wait=learner_waits.seconds(), **actor_waited)
        sizes, batch_sizes[:] = list(batch_sizes), []
        latest["inference_batch_size"] = experiment.mean(sizes)
        latest["skipped_updates"] = stats["skipped_updates"]
        latest |= evaluations.tick(lock, model, stats)
        latest["learner_queue_size"] = learner_queue.size()
        latest["connected_actors"] = actors.num_connected()
        latest["reconnects"] = actors.num_reconnects()
        show = {key: experiment.show_number(value) for key, value in latest.items()}
        texts = {"return": show["mean_episode_return"]}
        if flags.episodic_life:
            texts["game"] = show["mean_game_return"]
        texts["loss"] = show.get("total_loss", "-")
        waits = ("learner_wait", *actor_waited)
        texts["wait"] = "/".join(f"{latest[key]:.0%}" for key in waits)
        texts["batch"] = show["inference_batch_size"]
        texts["queue"] = f"{latest['learner_queue_size']}/{max_queue_size}"
        texts["lag"] = "/".join(show[f"policy_lag_{name}"] for name in ("min", "mean", "max"))
        texts["actors"] = f"{latest['connected_actors']}/{num_actors}"
        texts["health"] = checkup.text(latest)
        run_folder.log(step, latest, texts)

    threads = []
    with (
        experiment.Experiment(flags) as run_folder,
        experiment.stop_on_signals(stop) as signals,
    ):
        logging.info("Flags:\n%s", pprint.pformat(vars(flags)))
        checkpoint.resume(flags, model, optimizer, scheduler, stats)
        first_step = stats["step"]
        run_folder.start_logs(first_step)
        weights = PublishedWeights(model)
        actors = libtorchbeast.ActorPool(
            T, learner_queue, inference_batcher,
            [addresses[i % len(addresses)] for i in range(num_actors)],
            initial_agent_state,
            dict_outputs=True, num_envs=flags.envs_per_stream, expected_num_envs=N,
            newest_frame_only=True,
            # Those of a resumed run must not play the same games again.
            seeds=[f"{flags.seed},{1 + i},{first_step}" for i in range(num_actors)],
            reconnect=True, spaces=handshake["spaces"], connect_timeout_s=CONNECT_TIMEOUT,
            step_timeout_s=ANSWER_TIMEOUT, **credentials.load(access),
        )  # fmt: skip
        watchdog = Watchdog(flags.stall_timeout_s, silences)
        evaluations = evaluator.Evaluator(flags, first_step)
        print_stacks_on_signal(lambda: [] if local is None else [local.process.pid])
        try:
            for function, name, count in (
                (actors.run, "actors", 1),
                (tell, "events", 1),
                (answer, "inference thread", flags.num_inference_threads),
                (batch_and_learn, "learner thread", flags.num_learner_threads),
            ):
                for i in range(count):
                    start(function, f"{name} {i}")
            interval = min(LOG_INTERVAL, flags.checkpoint_interval_s)
            while not stop.wait(interval):
                watchdog.beat("looks after the run")
                log()
                if local is not None and not local.check():
                    # Only they have failed; what was learned until now is good.
                    run_folder.save_checkpoint(lock, model, optimizer, scheduler, stats)
                    raise EnvError("the environment servers have ended: see above")
                if actors.num_connected() == 0:
                    logging.warning("No environment server answers: waiting for %s", addresses)
                if run_folder.checkpoint_is_due(within=interval):
                    run_folder.save_checkpoint(lock, model, optimizer, scheduler, stats)
        finally:
            learner_queue.close()
            inference_batcher.close()
            for thread in threads:
                thread.join()
            watchdog.close()
            evaluations.close()
        log()
        if signals:
            run_folder.status = f"stopped by {signal.Signals(signals[0]).name}"
        if errors:
            raise errors[0]
        run_folder.save_checkpoint(lock, model, optimizer, scheduler, stats)
        return 128 + signals[0] if signals else 0


def main(argv=None):
    print_stacks_on_signal()  # of this process; of all, once there are others
    flags = experiment.parse_flags(parser, argv)
    if flags.mode == "train":
        if flags.autotune:
            autotune.tune(flags, parser, argv, check_flags, tuned_flags)
        return train(flags)
    evaluate.test(flags, polybeast_env.create_env, functools.partial(Net, model=flags.model))
    return 0


if __name__ == "__main__":
    experiment.run_program(main)
