# SPDX-License-Identifier: Apache-2.0
"""Atari games that fail when they are told to, and environment servers of them.

    FAULTS_FOLDER=/tmp/faults python benchmarks/faulty/environment.py --server_address ...

As any fork would, it replaces create_environments and leaves the rest of polybeast_env.py alone. A
file FOLDER/NAME.I that says, say, "17 nan" has environment I of server or actor NAME fail in its
next step; 17.taken then says in which process.
"""

import functools
import itertools
import os
import pathlib
import signal
import sys

import gymnasium as gym
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))

import polybeast_env
from environment import Environments

FOLDER = pathlib.Path(os.environ["FAULTS_FOLDER"])
POISON = 1000.0  # the reward of all steps that come after one that nobody should have taken


def write(name, text):
    """Write a file of the folder that nobody can read half of."""
    (FOLDER / f"{name}.new").write_text(text)
    (FOLDER / f"{name}.new").rename(FOLDER / name)


class Faulty(gym.Wrapper):
    def __init__(self, env, name):
        super().__init__(env)
        self.command = FOLDER / name
        self.broken = False

    def step(self, action):
        number, kind = self.take_command()
        if kind == "raise":
            raise RuntimeError(f"fault {number}")
        if kind == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "block":
            open(FOLDER / f"{number}.pipe").close()  # until somebody opens its other end
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self.broken:
            reward = POISON
        if kind == "nan":
            reward = float("nan")
        if kind == "shape":
            observation = observation[..., 1:]
        if kind == "dtype":
            observation = observation.astype(np.float32)
        self.broken |= kind in ("nan", "shape", "dtype")
        return observation, reward, terminated, truncated, info

    def take_command(self):
        if not self.command.exists():
            return None, None
        number, kind = self.command.read_text().split()
        self.command.unlink()
        write(f"{number}.taken", str(os.getpid()))
        return number, kind


def create_environments(create_env, flags, num_envs, seed, name):
    """Return environments that can be told to fail; `name` begins with the server or actor."""
    name = name.split(" for ")[0]
    write(f"{name}.pid", str(os.getpid()))
    indices = itertools.count()
    return Environments(
        lambda: Faulty(create_env(flags), f"{name}.{next(indices)}"), num_envs, seed, name
    )


def check_rows(batch):
    """Raise where a learner's batch holds what no game of Pong gives."""
    frame, reward, episode_return = batch["frame"], batch["reward"], batch["episode_return"]
    if str(frame.dtype) != "torch.uint8" or frame.shape[2:] != (4, 84, 84):
        raise AssertionError(f"a broken row: frames are {frame.dtype}{list(frame.shape)}")
    if not bool((reward.abs() <= 1).all()):  # nor NaN
        raise AssertionError(f"a broken row: rewards are {reward.unique().tolist()}")
    if not bool((episode_return.abs() <= 21).all()):
        raise AssertionError(f"a broken row: returns are {episode_return.unique().tolist()}")


polybeast_env.create_environments = functools.partial(create_environments, polybeast_env.create_env)

if __name__ == "__main__":
    sys.exit(polybeast_env.main())
