# SPDX-License-Identifier: Apache-2.0
"""A learner as a fork has it: tuples of tensors, an LSTM, threads of its own, a little replay.

The net and the mathematics are those of catch.py and MonoBeast.

python tests/helpers/fork_learner.py --pipes_basename unix:/tmp/catch
"""

import argparse
import collections
import random
import threading
import time

import catch
import fork_env
import gymnasium as gym
import nest
import torch
import torch.nn.functional as F
from deadline import Thread

import libtorchbeast

parser = argparse.ArgumentParser(description="Learn Catch", parents=[fork_env.parser],
                                 conflict_handler="resolve")  # fmt: skip
parser.add_argument("--num_actors", type=int, default=8)
parser.add_argument("--total_steps", type=int, default=300_000)
parser.add_argument("--external_servers", action="store_true", help="they are running already")

BATCH_SIZE, UNROLL_LENGTH = 8, 12
NUM_THREADS = 2  # of learners, and of inference
GOAL = 0.9  # mean return of the last episodes at which it stops
MONOBEAST = catch.monobeast.parser.parse_args(["--entropy_cost", "0.01"])


def create_net():
    return catch.Net(gym.spaces.Box(0, 1, (30,)), 3, use_lstm=True)


def read_frame(frame):
    """Return the nest that is observed as one tensor [T, B, 30]."""
    board = frame["board"].float().div_(255).flatten(2)
    return torch.cat([board, F.one_hot(frame["paddle"], 5).float()], dim=-1)


def inference(inference_batcher, model, lock):
    with torch.no_grad():
        for batch in inference_batcher:
            (frame, _, done, *_), agent_state = batch.get_inputs()
            with lock:
                outputs, agent_state = model(
                    {"frame": read_frame(frame), "done": done}, agent_state
                )
            outputs = tuple(outputs[key] for key in ("action", "policy_logits", "baseline"))
            batch.set_outputs((outputs, agent_state))


def take_step(model, optimizer, batch, initial_agent_state):
    (frame, reward, done, *_), (action, policy_logits, _) = batch
    never = torch.zeros_like(done)
    rows = {"frame": read_frame(frame), "reward": reward, "done": done, "action": action}
    rows |= {"policy_logits": policy_logits, "truncated": never, "terminated": never}
    catch.monobeast.learn(MONOBEAST, model, rows, initial_agent_state, optimizer)


def checksum(tensors):
    return sum(float(t.double().sum()) for t in nest.flatten(tensors))


def learn(learner_queue, model, actor_model, optimizer, stats, lock, actor_lock):
    replay = collections.deque(maxlen=50)  # of batches, each with the sum of all that it holds
    for tensors in learner_queue:
        batch, initial_agent_state = tensors
        (_, reward, done, episode_step, episode_return), _ = batch
        returns = episode_return[1:][done[1:]].tolist()
        reward.clamp_(-1, 1)  # all in place: the batch is ours
        episode_step.zero_()
        episode_return.neg_()
        with lock:
            replay.append((checksum(tensors), tensors))
            wanted, kept = random.choice(replay)
            if checksum(kept) != wanted:
                raise RuntimeError("a batch that was kept has changed")
            for nest_of_tensors in (tensors, kept):
                take_step(model, optimizer, *nest_of_tensors)
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
    model, actor_model = create_net(), create_net()
    actor_model.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    actors = libtorchbeast.ActorPool(
        unroll_length=UNROLL_LENGTH,
        learner_queue=learner_queue,
        inference_batcher=inference_batcher,
        env_server_addresses=[addresses[i % len(addresses)] for i in range(flags.num_actors)],
        initial_agent_state=model.initial_state(1),
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
    for thread in threads:  # all, before the first error: what runs when Python ends aborts
        thread.join()
    for thread in threads:
        thread.result()
    print(f"mean return {stats['mean_return']:.3f} after {stats['step']} steps")


if __name__ == "__main__":
    train(parser.parse_args())
