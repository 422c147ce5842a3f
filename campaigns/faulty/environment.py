# SPDX-License-Identifier: Apache-2.0
"""Atari games that fail on command, and environment servers for them.

    FAULTS_FOLDER=/tmp/faults python campaigns/faulty/environment.py --server_address ...

As any fork would, it replaces create_environments and leaves the rest of polybeast_env.py alone. A
file FOLDER/NAME.I with, say, the text "17 nan" has environment I of server or actor NAME fail in
its next step; then 17.taken holds the id of that process.
"""

import itertools
import os
import pathlib
import signal
import sys

import gymnasium as gym
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))

import polybeast_env
from beast.envs.environments import Environments

FOLDER = pathlib.Path(os.environ["FAULTS_FOLDER"])
POISON = 1000.0  # the reward after a broken row, where no step should follow


def write(name, text):
    """Write a file of the folder at once: nobody reads half of it."""
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
            open(FOLDER / f"{number}.pipe").close()  # waits until its other end is opened
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


def create_environments(flags, create_env, num_envs, seed, name):
    """Return environments that fail on command; `name` begins with the server or actor."""
    name = name.split(" for ")[0]
    write(f"{name}.pid", str(os.getpid()))
    indices = itertools.count()
    return Environments(
        lambda: Faulty(create_env(flags), f"{name}.{next(indices)}"), num_envs, seed, name
    )


polybeast_env.create_environments = create_environments

if __name__ == "__main__":
    sys.exit(polybeast_env.main())
