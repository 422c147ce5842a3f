# SPDX-License-Identifier: Apache-2.0
"""Congestion control: senders whose clock does not wait for the learner.

    python polybeast.py --listen 127.0.0.1:50050 --envs_per_stream 1 --batch_size 8 \
        --unroll_length 5 --discounting 0.9 --reward_clipping none --grad_norm_clipping 5 \
        --learning_rate 0.005 --total_steps 60_000
    python -m examples.congestion --learner 127.0.0.1:50050
    python -m examples.congestion    # measures a rule and the optimum

Each sender has a link of its own, whose capacity it does not know, and may change its rate every
50 ms. A return of 100 is a link that is used fully, without a queue. All on one core: 70 after
30,000 steps (100 s), 77 after 52,000. A random sender has 20, the best constant rate 41; the rule
87 if it acts at once, 82, 72 and 67 if 15, 30 and 45 ms late; and whoever knows the capacity 94.

How late actions are treated: one takes effect at the tick at which it comes. If that is after the
next observation, this one is dropped, and the sender goes on at its rate; what it earns meanwhile
counts for the row in which the action took effect (libtorchbeast/env_client.py).
"""

import argparse
import contextlib
import copy
import itertools
import logging
import math
import time

import numpy as np

from beast.parser import positive
from libtorchbeast import EnvClient

FACTORS = (0.5, 0.8, 1.0, 1.25, 2.0)  # of the rate, by action
MOST_QUEUED = 50  # packets
TICK = 0.005  # seconds
INTERVAL = 10  # ticks between two observations
LENGTH = 100  # intervals in an episode
OBSERVATION_SPACE = {"type": "Box", "shape": [4], "dtype": "float32", "low": -10, "high": 10}
ACTION_SPACE = {"type": "Discrete", "n": len(FACTORS), "start": 0, "dtype": "int64"}


class Link:
    """A link with a queue, and a sender that does not know the link's capacity.

    Rates are in packets a tick. The capacity is from 1 to 10, and another one from time to time.
    """

    def __init__(self, random):
        self.random, self.rate, self.queue = random, 1.0, 0.0
        self.capacity = 10 ** random.random()
        self.counts = np.zeros(5)  # of this interval

    def act(self, action):
        self.rate = min(max(self.rate * FACTORS[action], 0.5), 20.0)

    def advance(self):
        """Let a tick pass."""
        if self.random.random() < 1 / 1000:
            self.capacity = 10 ** self.random.random()
        self.queue += self.rate
        delivered = min(self.queue, self.capacity)
        lost = max(0.0, self.queue - delivered - MOST_QUEUED)
        self.queue -= delivered + lost
        self.counts = self.counts + (self.rate, lost, delivered, self.capacity, self.queue)

    def observe(self):
        """Return what the sender sees of the interval that ends now, and its reward.

        The reward is 1 where the link was used fully and the queue was empty.
        """
        sent, lost, delivered, capacity, queues = self.counts.tolist()
        self.counts = np.zeros(5)
        throughput = delivered / INTERVAL
        delay = self.queue / throughput / MOST_QUEUED
        observation = math.log10(self.rate), math.log10(throughput), delay, lost / sent
        reward = delivered / capacity - queues / INTERVAL / MOST_QUEUED
        return np.array(observation, np.float32), reward


def play(address, num_links):
    """Run links in real time, for a learner."""
    links = [Link(np.random.default_rng()) for _ in range(num_links)]
    num_actions, clock = 0, time.monotonic()
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(EnvClient(address, OBSERVATION_SPACE, ACTION_SPACE, env="links"))
            for _ in links
        ]
        for now in itertools.count(1):
            for link, client in zip(links, clients, strict=True):
                link.advance()
                action = client.poll()
                if action is not None:
                    link.act(action)
                    num_actions += 1
                if now % INTERVAL == 0:
                    is_last = now % (INTERVAL * LENGTH) == 0
                    client.observe(*link.observe(), truncated=is_last)
            if now % (INTERVAL * LENGTH) == 0:
                logging.info("%.2f actions an interval", num_actions / num_links / LENGTH)
                num_actions = 0
            clock += TICK
            time.sleep(max(0, clock - time.monotonic()))


def probe(link, observation, late):
    """Send less once there is a queue, else more."""
    return 1 if observation[2] > 0.02 else 3


def find_best(link, observation, late):
    """Choose what is best until the next action, by what no sender knows."""
    rewards = []
    for action in range(len(FACTORS)):
        trial = copy.copy(link)
        for tick in range(INTERVAL + late):
            if tick == late:
                trial.act(action)
            trial.advance()
        rewards.append(trial.observe()[1])
    return int(np.argmax(rewards))


def measure(policy, late, num_episodes=50):
    """Return the mean return where each action takes effect so many ticks late."""
    link, total, action = Link(np.random.default_rng(1)), 0.0, 2
    for _ in range(num_episodes * LENGTH):
        for tick in range(INTERVAL):
            if tick == late:
                link.act(action)
            link.advance()
        observation, reward = link.observe()
        action = policy(link, observation, late)
        total += reward
    return total / num_episodes


def main():
    parser = argparse.ArgumentParser("congestion.py", description="Links that learn their rate.")
    parser.add_argument("--learner", metavar="HOST:PORT", help="Play for this learner.")
    parser.add_argument("--links", default=16, type=positive(int), help="Links.")
    flags = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if flags.learner:
        try:
            return play(flags.learner, flags.links)
        except (ConnectionError, ValueError) as error:  # it has refused us, or is no address
            parser.exit(1, f"congestion.py: {error}\n")
    for late in (0, 3, 6, 9):
        for policy in (probe, find_best):
            print(f"{policy.__name__}, {late} ticks late: {measure(policy, late):.0f}")


if __name__ == "__main__":
    main()
