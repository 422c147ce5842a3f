# SPDX-License-Identifier: Apache-2.0
"""Environment servers as a fork has them: Catch in the old Gym API, without spaces.

python tests/helpers/fork_env.py --pipes_basename unix:/tmp/catch --num_servers 4
"""

import argparse
import multiprocessing as mp
import pathlib
import signal
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))

from libtorchbeast import Server

parser = argparse.ArgumentParser(description="Catch servers")
parser.add_argument("--pipes_basename", default="unix:/tmp/catch")
parser.add_argument("--num_servers", type=int, default=2)

ROWS, COLUMNS = 5, 5


class Catch:
    """A ball falls; the paddle below should be under it. The return is 1 or -1."""

    def __init__(self):
        self.random = np.random.RandomState()

    def reset(self):
        self.ball = [0, self.random.randint(COLUMNS)]
        self.paddle = self.random.randint(COLUMNS)
        return self.observe()

    def step(self, action):
        assert isinstance(action, np.ndarray) and action.shape == (), repr(action)
        self.paddle = min(max(self.paddle + int(action) - 1, 0), COLUMNS - 1)
        self.ball[0] += 1
        done = self.ball[0] == ROWS - 1
        reward = (1.0 if self.ball[1] == self.paddle else -1.0) if done else 0.0
        return self.observe(), reward, done, {}

    def observe(self):
        board = np.zeros((ROWS, COLUMNS), np.uint8)
        board[tuple(self.ball)] = 255
        return {"board": board, "paddle": np.array(self.paddle)}


def serve(address):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    Server(Catch, server_address=address).run()


def start(flags):
    """Start the servers; return processes and addresses."""
    addresses = [f"{flags.pipes_basename}.{i}" for i in range(flags.num_servers)]
    processes = [mp.Process(target=serve, args=(a,), daemon=True) for a in addresses]
    for process in processes:
        process.start()
    return processes, addresses


if __name__ == "__main__":
    processes, _ = start(parser.parse_args())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # upon which daemons are ended
    for process in processes:
        process.join()
