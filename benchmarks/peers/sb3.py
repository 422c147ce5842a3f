# SPDX-License-Identifier: Apache-2.0
"""Stable-Baselines3's A2C, PPO, SAC or DQN, printing the steps learned from.

Further arguments, NAME=NUMBER, change SETTINGS.
"""

import sys
import time

import ale_py  # noqa: F401 (registers the games)
import torch
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecFrameStack,
    VecNormalize,
)

SETTINGS = {
    "ppo": 0,  # this, sac and dqn 0: A2C
    "sac": 0,
    "dqn": 0,
    "cheetah": 0,  # 1: HalfCheetah; 0: Pong
    "envs": 16,
    "processes": 1,  # one an environment; 0: all in the main process
    "rollout": 20,  # steps of an environment an update
    "epochs": 4,  # of PPO
    "minibatch": 256,  # of PPO, SAC and DQN
    "ratio": 8,  # rows to learn from for each step, of SAC and DQN
    "threads": 1,  # of the main process
}


class Progress(BaseCallback):
    def _on_rollout_start(self):
        print("steps", self.num_timesteps, time.time(), flush=True)

    def _on_step(self):
        return True


def main():
    s = SETTINGS | {k: int(v) for k, v in (arg.split("=") for arg in sys.argv[1:])}
    torch.set_num_threads(s["threads"])
    vec_env_cls = SubprocVecEnv if s["processes"] else DummyVecEnv
    if s["cheetah"]:
        policy = "MlpPolicy"
        envs = make_vec_env("HalfCheetah-v5", s["envs"], vec_env_cls=vec_env_cls)
        envs = VecNormalize(envs) if s["ppo"] else envs
    else:
        policy = "CnnPolicy"
        envs = make_atari_env("PongNoFrameskip-v4", s["envs"], vec_env_cls=vec_env_cls)
        envs = VecFrameStack(envs, 4)
    if s["ppo"]:
        options = {"n_epochs": s["epochs"], "batch_size": s["minibatch"]}
        model = PPO(policy, envs, n_steps=s["rollout"], device="cpu", **options)
    elif s["sac"] or s["dqn"]:
        options = {"batch_size": s["minibatch"], "learning_starts": 1000, "device": "cpu"}
        # So many updates follow so many steps of all environments.
        options["train_freq"] = max(1, s["minibatch"] // (s["ratio"] * s["envs"]))
        steps = options["train_freq"] * s["envs"]
        options["gradient_steps"] = s["ratio"] * steps // s["minibatch"]
        if s["sac"]:
            model = SAC(policy, envs, **options)
        else:
            model = DQN(policy, envs, buffer_size=50_000, target_update_interval=4000, **options)
    else:
        model = A2C(policy, envs, n_steps=s["rollout"], device="cpu")
    model.learn(10**9, callback=Progress())


if __name__ == "__main__":
    main()
