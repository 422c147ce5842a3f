# SPDX-License-Identifier: Apache-2.0
"""A learner as a fork has it: tuples of tensors, an LSTM, threads of its own, a little replay.

python tests/helpers/fork_learner.py --pipes_basename unix:/tmp/catch
"""

import argparse
import collections
import pathlib
import random
import sys
import threading
import time

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))

import fork_env
import nest
from deadline import Thread

import libtorchbeast
import vtrace

parser = argparse.ArgumentParser(description="Learn Catch", parents=[fork_env.parser],
                                 conflict_handler="resolve")  # fmt: skip
parser.add_argument("--num_actors", type=int, default=8)
parser.add_argument("--total_steps", type=int, default=300_000)
parser.add_argument("--external_servers", action="store_true", help="they are running already")

BATCH_SIZE, UNROLL_LENGTH, HIDDEN_SIZE = 8, 12, 32
NUM_THREADS = 2  # of learners, and of inference
GOAL = 0.9  # mean return of the last episodes at which it stops


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(fork_env.ROWS * fork_env.COLUMNS + fork_env.COLUMNS, 64)
        self.core = nn.LSTM(64, HIDDEN_SIZE)
        self.policy = nn.Linear(HIDDEN_SIZE + 64, 3)
        self.baseline = nn.Linear(HIDDEN_SIZE + 64, 1)

    def initial_state(self, batch_size=1):
        return tuple(torch.zeros(1, batch_size, HIDDEN_SIZE) for _ in range(2))

    def forward(self, frame, done, core_state):
        paddle = F.one_hot(frame["paddle"], fork_env.COLUMNS).float()
        x = F.relu(self.fc(torch.cat([frame["board"].flatten(2), paddle], dim=-1)))
        core_outputs = []
        for x_t, notdone in zip(x, (~done).float().unsqueeze(-1), strict=True):
            core_state = nest.map(notdone.mul, core_state)
            output, core_state = self.core(x_t.unsqueeze(0), core_state)
            core_outputs.append(output)
        x = torch.cat([torch.cat(core_outputs), x], dim=-1)
        policy_logits = self.policy(x)
        action = torch.distributions.Categorical(logits=policy_logits).sample()
        return (action, policy_logits, self.baseline(x).squeeze(-1)), core_state


def inference(inference_batcher, model, lock):
    with torch.no_grad():
        for batch in inference_batcher:
            (frame, _, done, *_), agent_state = batch.get_inputs()
            frame["board"] = frame["board"].float().div_(255)
            with lock:
                outputs = model(frame, done, agent_state)
            batch.set_outputs(outputs)


def compute_loss(model, batch, initial_agent_state):
    (frame, reward, done, *_), (action, behavior_policy_logits, _) = batch
    (_, policy_logits, baseline), _ = model(frame, done, initial_agent_state)
    action, policy_logits, values = action[1:], policy_logits[:-1], baseline[:-1]
    targets = vtrace.from_logits(
        behavior_policy_logits=behavior_policy_logits[1:],
        target_policy_logits=policy_logits,
        actions=action,
        discounts=(~done[1:]).float() * 0.99,
        rewards=reward[1:],
        values=values,
        bootstrap_value=baseline[-1],
    )
    log_policy = F.log_softmax(policy_logits, dim=-1)
    taken = log_policy.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    pg_loss = -torch.sum(taken * targets.pg_advantages)
    baseline_loss = 0.5 * torch.sum((targets.vs - values) ** 2)
    entropy_loss = torch.sum(log_policy.exp() * log_policy)
    return pg_loss + 0.5 * baseline_loss + 0.01 * entropy_loss


def checksum(tensors):
    return sum(float(t.double().sum()) for t in nest.flatten(tensors))


def learn(learner_queue, model, actor_model, optimizer, stats, lock, actor_lock):
    replay = collections.deque(maxlen=50)  # of batches, each with the sum of all that it holds
    for tensors in learner_queue:
        batch, initial_agent_state = tensors
        (frame, reward, done, episode_step, episode_return), _ = batch
        frame["board"] = frame["board"].float().div_(255)
        returns = episode_return[1:][done[1:]].tolist()
        reward.clamp_(-1, 1)  # all in place: the batch is ours
        episode_step.zero_()
        episode_return.neg_()
        with lock:
            replay.append((checksum(tensors), tensors))
            wanted, kept = random.choice(replay)
            if checksum(kept) != wanted:
                raise RuntimeError("a batch that was kept has changed")
            optimizer.zero_grad()
            loss = compute_loss(model, batch, initial_agent_state)
            loss = loss + 0.5 * compute_loss(model, *kept)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 40.0)
            optimizer.step()
            with actor_lock:
                actor_model.load_state_dict(model.state_dict())
            stats["step"] += UNROLL_LENGTH * BATCH_SIZE
            stats["returns"].extend(returns)
            if len(stats["returns"]) == stats["returns"].maxlen:
                stats["mean_return"] = sum(stats["returns"]) / len(stats["returns"])


def train(flags):
    torch.set_num_threads(1)
    servers, addresses = [], [f"{flags.pipes_basename}.{i}" for i in range(flags.num_servers)]
    if not flags.external_servers:
        servers, addresses = fork_env.start(flags)
    learner_queue = libtorchbeast.BatchingQueue(
        batch_dim=1,
        minimum_batch_size=BATCH_SIZE,
        maximum_batch_size=BATCH_SIZE,
        check_inputs=True,
        maximum_queue_size=4 * BATCH_SIZE,
    )
    inference_batcher = libtorchbeast.DynamicBatcher(
        batch_dim=1,
        minimum_batch_size=1,
        maximum_batch_size=512,
        timeout_ms=100,
        check_outputs=True,
    )
    model, actor_model = Net(), Net()
    actor_model.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    actors = libtorchbeast.ActorPool(
        unroll_length=UNROLL_LENGTH,
        learner_queue=learner_queue,
        inference_batcher=inference_batcher,
        env_server_addresses=[addresses[i % len(addresses)] for i in range(flags.num_actors)],
        initial_agent_state=model.initial_state(),
    )
    stats = {"step": 0, "returns": collections.deque(maxlen=300), "mean_return": float("nan")}
    lock, actor_lock = threading.Lock(), threading.Lock()
    learning = (learn, learner_queue, model, actor_model, optimizer, stats, lock, actor_lock)
    acting = (inference, inference_batcher, actor_model, actor_lock)
    threads = [Thread(actors.run)]
    for _ in range(NUM_THREADS):
        threads += [Thread(*learning), Thread(*acting)]
    try:
        while stats["step"] < flags.total_steps and not stats["mean_return"] >= GOAL:
            if not all(thread.is_alive() for thread in threads):
                break
            time.sleep(0.05)
            print(f"actors' steps {actors.count()}", flush=True)
    finally:
        inference_batcher.close()
        learner_queue.close()
        for server in servers:
            server.terminate()
            server.join()
    for thread in threads:
        thread.result()
    print(f"mean return {stats['mean_return']:.3f} after {stats['step']} steps")


if __name__ == "__main__":
    train(parser.parse_args())
