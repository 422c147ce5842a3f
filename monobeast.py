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

To change the model, edit AtariNet; the loss, compute_loss; the environment, create_env.

Shapes: T unroll length, B batch size, N environments an actor, A actions. A rollout has T + 1
rows, of which the first is the last of the rollout before it; environment.py says what they hold.
"""

import packages  # noqa: F401 - tells what to install, if one of the following is missing

# isort: split

import argparse
import contextlib
import logging
import os
import pprint
import signal
import threading
import time
import traceback

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import atari_wrappers
import autotune
import checkpoint
import evaluate
import evaluator
import experiment
import health
import vtrace
from actors import (
    Actors,
    check_buffers,
    check_lock_step,
    check_shared_memory,
    live_for_parent,
    start_fork_server,
)
from ale_vector import AtariEnvironments
from environment import Environments, map_nest
from timing import Stopwatch, TimeShares
from watchdog import Watchdog, print_stacks_on_signal

# fmt: off
parser = argparse.ArgumentParser(
    description="IMPALA on one machine.", formatter_class=experiment.HelpFormatter,
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
run.add_argument("--deterministic", action="store_true",
                 help="Have actors and learner go in lock step, policies always one update behind, "
                 "so that runs with one --seed on one machine are the same (and slower). Needs "
                 "--batch_size = num_actors * envs_per_actor.")
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
                 help="First find, in a minute or two, the fastest num_actors and envs_per_actor "
                 "for this machine; those on the command line stay.")
run.add_argument("--stall_timeout_s", default=60, type=float,
                 help="Seconds of silence after which the log tells of an actor, environment "
                 "server or thread, with its stack; an actor or server is killed and replaced "
                 "after five times as long.")

training = parser.add_argument_group("training")
training.add_argument("--total_steps", default=5_000_000, type=int,
                      help="Agent steps to learn from.")
training.add_argument("--num_actors", default=2, type=int, help="Actor processes.")
training.add_argument("--envs_per_actor", default=8, type=int,
                      help="Environments that an actor steps with one batched forward pass.")
training.add_argument("--batch_size", default=8, type=int, help="Rollouts in a batch.")
training.add_argument("--unroll_length", default=20, type=int, help="Steps in a rollout.")
training.add_argument("--num_buffers", type=int, help="Rollouts held in shared memory. "
                      "By default num_actors * envs_per_actor + 2 * batch_size; with "
                      "--deterministic, + batch_size.")
training.add_argument("--num_learner_threads", default=1, type=int,
                      help="Threads that make batches; one learns while others make the next.")
training.add_argument("--use_lstm", action="store_true", help="Use an LSTM before the last layers.")

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
parser.set_defaults(program="monobeast.py")  # whose checkpoints are not for the other one
# fmt: on

LOG_INTERVAL = 5  # seconds
LOG_UPDATES = 50  # in its place with --deterministic, where time must not count


def create_env(flags):
    """Return one environment with a Discrete action space."""
    if flags.mode != "train":
        flags = argparse.Namespace(**vars(flags) | {"episodic_life": False})  # whole games
    return atari_wrappers.create_atari(flags, flags.render_mode)


def create_environments(flags, num_envs, seed, name):
    """Return environments as the rows of a rollout."""
    if flags.env_backend == "ale_vector":
        return AtariEnvironments(flags, num_envs, seed, name)
    return Environments(lambda: create_env(flags), num_envs, seed, name)


class CenteredConv2d(nn.Conv2d):
    """A convolution that sees how the pixels of a patch differ, not how bright all of them are.

    Most of a frame is background. If filters answered to it, the first updates would fit its
    brightness, and see a ball of two pixels only hundreds of thousands of steps later.
    """

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class AtariNet(nn.Module):
    """The shallow Atari network, with an optional LSTM: policy logits and baseline."""

    knows_bf16 = True  # its last layers stay in float32; else --precision is fp32 by default

    def __init__(self, observation_space, num_actions, use_lstm=False):
        super().__init__()
        shape = observation_space.shape
        if len(shape or ()) != 3 or min(shape[1:]) < 36 or not isinstance(num_actions, int):
            raise experiment.FlagError(
                f"Net is for frames [channels, height, width] of 36x36 pixels or more and Discrete "
                f"actions, not {observation_space}, {num_actions}: edit AtariNet in {__file__}"
            )
        self.num_actions = num_actions
        self.conv = nn.Sequential(
            CenteredConv2d(shape[0], 32, kernel_size=8, stride=4),
            nn.ReLU(inplace=True),
            nn.Conv2d(32, 64, kernel_size=4, stride=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(64, 64, kernel_size=3, stride=1),
            nn.ReLU(inplace=True),
        )
        with torch.no_grad():
            num_features = self.conv(torch.zeros(1, *shape)).numel()
        self.fc = nn.Linear(num_features, 512)
        core_size = 512 + num_actions + 1
        self.lstm = nn.LSTM(core_size, 256) if use_lstm else None
        if use_lstm:
            core_size = 256
        self.policy = nn.Linear(core_size, num_actions)
        self.baseline = nn.Linear(core_size, 1)
        # With initial weights as small as PyTorch's, the first updates push most ReLUs below zero.
        gains = {layer: 2**0.5 for layer in (*self.conv[::2], self.fc)}
        for layer, gain in (gains | {self.policy: 0.01, self.baseline: 1.0}).items():
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
    """The newest weights in shared memory, read without locks, always as one whole version.

    Two slots are written in turn, and the version is told only after its slot is complete. A reader
    that finds the version unchanged after its copy knows that nobody wrote to that slot meanwhile.
    A lock would do too, until an actor is killed while it holds it.
    """

    def __init__(self, model):
        self._version = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._slots = torch.stack([self._flatten(model)] * 2).share_memory_()

    @property
    def version(self):
        return int(self._version)

    def publish(self, model):
        version = self.version + 1
        self._slots[version % 2] = self._flatten(model)
        self._version[0] = version

    def load_into(self, model, version=None):
        """Copy weights into `model` and return their version: the newest, or what is asked for.

        Version + 2, which goes to the same slot as a version asked for, must not be published
        before this returns; lock step sees to that.
        """
        if version is None:
            while version != self.version:
                version = self.version
                weights = self._slots[version % 2].clone()
        else:
            weights = self._slots[version % 2].clone()
        tensors = model.state_dict().values()
        parts = weights.split([t.numel() * t.element_size() for t in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
        return version

    def _flatten(self, model):
        """Return all weights as one tensor of bytes, since they may be of several types."""
        tensors = model.state_dict().values()
        return torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors]).cpu()


def act(flags, actor, seed, pipe, buffers, weights, heartbeats):
    """Fill buffers with rollouts for as long as the main process lives: an actor process."""
    live_for_parent()
    torch.set_num_threads(1)
    os.nice(10)  # the learner first; actors take what is left of the cores
    N, T = flags.envs_per_actor, flags.unroll_length
    environments = None
    try:
        experiment.seed_generators([*seed, 0])
        environments = create_environments(flags, N, [*seed, 1], f"actor {actor}")
        model = Net(environments.observation_space, environments.num_actions, flags.use_lstm)
        row = environments.initial()
        inputs = map_nest(lambda a: torch.from_numpy(a).unsqueeze(0), row)  # views: [1, N, ...]
        arrays = map_nest(lambda b: b.numpy(), buffers["rows"])
        agent_output = {k: np.zeros_like(arrays[k][:N, 0]) for k in arrays.keys() - row.keys()}
        agent_state = model.initial_state(N)

        pipe.send(("full", []))  # nothing yet, but ready for the first free buffers
        while True:
            indices = np.array(pipe.recv())  # [N]
            # In lock step the learner may be quicker to publish than we are to read.
            wanted = int(buffers["policy_version"][indices[0]]) if flags.deterministic else None
            buffers["policy_version"][indices] = weights.load_into(model, wanted)
            buffers["actor"][indices] = actor
            for i, index in enumerate(indices):
                for buffer, state in zip(buffers["initial_agent_state"], agent_state, strict=True):
                    buffer[index] = state[:, i : i + 1]
            # Within one autocast the weights are cast once; not so in inference mode.
            with torch.no_grad(), autocast(flags, torch.device("cpu")):
                for t in range(T + 1):
                    if pipe.poll():
                        return  # the main process has closed the pipe
                    heartbeats[actor] = time.monotonic()
                    if t > 0:  # row 0 is the last one of the rollout before
                        agent_output, agent_state = to_float32(model(inputs, agent_state))
                        agent_output = {k: v.squeeze(0).numpy() for k, v in agent_output.items()}
                        environments.step(agent_output["action"])
                    for key, value in (row | agent_output).items():
                        write = lambda a, v, at=(indices, t): a.__setitem__(at, v)  # noqa: E731
                        map_nest(write, arrays[key], value)
            pipe.send(("full", indices.tolist()))
    except (EOFError, BrokenPipeError):
        pass  # the main process has closed the pipe
    except Exception:
        with contextlib.suppress(OSError):
            pipe.send(("error", traceback.format_exc()))
    finally:
        if environments is not None:
            environments.close()


def create_buffers(flags, row, agent_output, agent_state):
    """Return the rollout buffers in shared memory: one tensor a key, [num_buffers, T + 1, ...].

    Args:
      row, agent_output: dicts of tensors [1, 1, ...] (or nests of them), agent_state: tuple of
        tensors [layers, 1, hidden]; all of them samples.
    """
    M, T = flags.num_buffers, flags.unroll_length
    rows = row | agent_output
    shapes = {  # on the device "meta", which has no memory
        "rows": map_nest(lambda x: x.to("meta").new_empty(M, T + 1, *x.shape[2:]), rows),
        "initial_agent_state": tuple(s.to("meta").new_empty(M, *s.shape) for s in agent_state),
        "policy_version": torch.empty(M, dtype=torch.int64, device="meta"),
        "actor": torch.empty(M, dtype=torch.int64, device="meta"),  # which has filled it
    }
    sizes = []
    map_nest(lambda x: sizes.append(x.numel() * x.element_size()), shapes)
    check_shared_memory(flags, sum(sizes))
    return map_nest(lambda x: torch.zeros_like(x, device="cpu").share_memory_(), shapes)


def get_device(flags):
    cuda = torch.cuda.is_available() and not flags.disable_cuda
    return torch.device("cuda" if cuda else "cpu")


def check_flags(flags):
    """Refuse what cannot work, before anything starts; fill in what depends on other flags."""
    experiment.check_flags(
        flags, "num_actors", "envs_per_actor", "batch_size", "unroll_length", "total_steps",
        "num_learner_threads", "stall_timeout_s", "checkpoint_interval_s", "learning_rate",
        "grad_norm_clipping",
    )  # fmt: skip
    if flags.deterministic:
        check_lock_step(flags)
    check_buffers(flags)
    evaluate.check_flags(flags)
    # Actors compute on the CPU.
    experiment.choose_precision(flags, Net, [get_device(flags), torch.device("cpu")])


def tuned_flags(flags):
    """Return what --autotune varies, and where it begins."""
    num_cores = len(os.sched_getaffinity(0))
    return {"envs_per_actor": flags.envs_per_actor, "num_actors": num_cores}


def train(flags):
    check_flags(flags)
    experiment.keep_freed_memory()
    if flags.deterministic:
        experiment.make_deterministic()
    experiment.seed_generators([flags.seed, 0])
    T, B = flags.unroll_length, flags.batch_size
    device = get_device(flags)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - flags.num_actors))

    # One environment and one answer of the model show that they work together, and all shapes.
    sample = create_environments(flags, 1, [flags.seed, 0], "the environment")
    model = Net(sample.observation_space, sample.num_actions, flags.use_lstm)
    with torch.no_grad():
        row = map_nest(lambda a: torch.from_numpy(a).unsqueeze(0), sample.initial())
        agent_output, agent_state = model(row, model.initial_state(1))
    experiment.check_actions(agent_output, row)
    sample.close()
    weights = PublishedWeights(model)
    buffers = create_buffers(flags, row, agent_output, agent_state)

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

    heartbeats = torch.zeros(flags.num_actors, dtype=torch.float64).share_memory_()
    context = start_fork_server()
    stop = threading.Event()
    errors = []
    lock = threading.Lock()  # guards model, optimizer, scheduler, stats, figures, lags, checkup
    figures, lags = {}, []
    checkup = health.Checkup(flags.grad_norm_clipping)
    learner_waits = Stopwatch(flags.num_learner_threads)  # no thread has a batch
    time_shares = TimeShares()

    def start_actor(actor, incarnation, pipe):
        # A restarted actor, or one of a resumed run, must not play the same games again.
        seed = [flags.seed, 1 + actor, incarnation, first_step]
        process = context.Process(
            target=act, daemon=True,
            args=(flags, actor, seed, pipe, buffers, weights, heartbeats),
        )  # fmt: skip
        process.start()
        return process

    def batch_and_learn():
        try:
            batch = map_nest(
                lambda b: torch.empty(
                    T + 1, B, *b.shape[2:], dtype=b.dtype, pin_memory=device.type == "cuda"
                ),
                buffers["rows"],
            )
            while stats["step"] < flags.total_steps:
                watchdog.beat("waits for rollouts")
                with learner_waits:
                    indices = actors.take(B)
                watchdog.beat("learns")
                if indices is None:
                    return
                for i, m in enumerate(indices):
                    map_nest(lambda x, b, i=i, m=m: x[:, i].copy_(b[m]), batch, buffers["rows"])
                agent_state = tuple(
                    torch.cat([b[m] for m in indices], dim=1).to(device)
                    for b in buffers["initial_agent_state"]
                )
                versions = buffers["policy_version"][indices]
                origin = {"actors": buffers["actor"][indices].tolist()}
                if not flags.deterministic:
                    actors.release(indices)
                # Row 0 was counted when it was the last row of the rollout before.
                done, game_done = batch["done"][1:], batch["game_done"][1:]
                episode_returns = batch["episode_return"][1:][done].tolist()
                game_returns = batch["game_return"][1:][game_done].tolist()
                device_batch = map_nest(lambda x: x.to(device, non_blocking=True), batch)
                with lock:
                    lags.extend((weights.version - versions).tolist())
                    latest = learn(flags, model, device_batch, agent_state, optimizer)
                    run_folder.check_update(latest, stats, (batch, agent_state), origin)
                    weights.publish(model)
                    stats["step"] += int(latest.pop("steps"))
                    figures.update(latest)
                    checkup.add(latest)
                    scheduler.step()
                    stats["episode_returns"] = (stats["episode_returns"] + episode_returns)[-100:]
                    stats["game_returns"] = (stats["game_returns"] + game_returns)[-100:]
                if flags.deterministic:  # who acts is told by which policy
                    buffers["policy_version"][indices] = weights.version
                    actors.release(indices)
                    if weights.version % LOG_UPDATES == 0:
                        log()
        except BaseException as error:
            errors.append(error)
        finally:
            stop.set()

    def log():
        with lock:
            step, latest = stats["step"], dict(figures)
            latest |= experiment.run_figures(stats, optimizer, lags) | checkup.means()
            lags.clear()
        latest |= time_shares(
            learner_wait=learner_waits.seconds(),
            actor_wait=actors.seconds_waited() / flags.num_actors,
        )
        latest["skipped_updates"] = stats["skipped_updates"]
        latest |= evaluations.tick(lock, model, stats)
        latest["full_buffers"] = actors.num_full()
        latest["actor_restarts"] = actors.num_restarts
        show = {key: experiment.show_number(value) for key, value in latest.items()}
        texts = {"return": show["mean_episode_return"]}
        if flags.episodic_life:
            texts["game"] = show["mean_game_return"]
        texts["loss"] = show.get("total_loss", "-")
        texts["wait"] = f"{latest['learner_wait']:.0%}/{latest['actor_wait']:.0%}"
        texts["full"] = f"{latest['full_buffers']}/{flags.num_buffers}"
        texts["lag"] = "/".join(show[f"policy_lag_{name}"] for name in ("min", "mean", "max"))
        texts["health"] = checkup.text(latest)
        run_folder.log(step, latest, texts)

    threads = [
        threading.Thread(target=batch_and_learn, name=f"learner thread {i}")
        for i in range(flags.num_learner_threads)
    ]
    with (
        experiment.Experiment(flags) as run_folder,
        experiment.stop_on_signals(stop) as signals,
    ):
        logging.info("Flags:\n%s", pprint.pformat(vars(flags)))
        checkpoint.resume(flags, model, optimizer, scheduler, stats)
        first_step = stats["step"]
        run_folder.start_logs(first_step)
        weights.publish(model)
        buffers["policy_version"].fill_(weights.version)
        actors = Actors(
            start_actor, flags.num_actors, flags.envs_per_actor, flags.num_buffers,
            heartbeats, flags.stall_timeout_s, lock_step=flags.deterministic,
        )  # fmt: skip
        watchdog = Watchdog(flags.stall_timeout_s, actors.silences)
        evaluations = evaluator.Evaluator(flags, first_step)
        print_stacks_on_signal(actors.pids)
        try:
            for thread in threads:
                thread.start()
            interval = min(LOG_INTERVAL, flags.checkpoint_interval_s)
            while not stop.wait(interval):
                watchdog.beat("looks after the run")
                if not flags.deterministic:
                    log()
                if run_folder.checkpoint_is_due(within=interval):
                    run_folder.save_checkpoint(lock, model, optimizer, scheduler, stats)
        finally:
            actors.close()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            watchdog.close()
            evaluations.close()
        log()
        if signals:
            run_folder.status = f"stopped by {signal.Signals(signals[0]).name}"
        if errors:
            raise errors[0]
        run_folder.save_checkpoint(lock, model, optimizer, scheduler, stats)
        actors.check()
        return 128 + signals[0] if signals else 0


def main(argv=None):
    print_stacks_on_signal()  # of this process; of all, once there are others
    flags = experiment.parse_flags(parser, argv)
    if flags.mode == "train":
        if flags.autotune:
            autotune.tune(flags, parser, argv, check_flags, tuned_flags)
        return train(flags)
    evaluate.test(flags, create_env, Net)
    return 0


if __name__ == "__main__":
    experiment.run_program(main)
