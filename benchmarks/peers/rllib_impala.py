# SPDX-License-Identifier: Apache-2.0
"""RLlib's IMPALA on its new API stack, printing the steps learned from."""

import time

import ale_py
import gymnasium as gym
import ray
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.connectors.env_to_module.frame_stacking import FrameStackingEnvToModule
from ray.rllib.connectors.learner.frame_stacking import FrameStackingLearner
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.wrappers.atari_wrappers import wrap_atari_for_new_api_stack
from ray.tune.registry import register_env
from torch import nn

FRAGMENT = 50  # unroll length


class Net(TorchRLModule, ValueFunctionAPI):
    """The shallow net: RLlib's own one pads its convolutions and has two hidden layers of 512."""

    def setup(self):
        self.body = nn.Sequential(
            nn.Conv2d(4, 32, kernel_size=8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, kernel_size=3, stride=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(3136, 512),
            nn.ReLU(),
        )
        self.policy = nn.Linear(512, self.action_space.n)
        self.baseline = nn.Linear(512, 1)

    def embed(self, batch):
        return self.body(batch[Columns.OBS].permute(0, 3, 1, 2))

    def _forward(self, batch, **kwargs):
        embeddings = self.embed(batch)
        return {
            Columns.ACTION_DIST_INPUTS: self.policy(embeddings),
            Columns.EMBEDDINGS: embeddings,
        }

    def compute_values(self, batch, embeddings=None):
        embeddings = self.embed(batch) if embeddings is None else embeddings
        return self.baseline(embeddings).squeeze(-1)


def create_env(config):
    gym.register_envs(ale_py)
    env = gym.make("PongNoFrameskip-v4")
    return wrap_atari_for_new_api_stack(env, dim=84, framestack=None)


def main():
    # Ray counts processes, not cores, and starts none beyond its count.
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=10**9)
    register_env("pong", create_env)
    config = (
        IMPALAConfig()
        .environment("pong")
        .env_runners(
            num_env_runners=2,  # processes
            num_envs_per_env_runner=8,
            rollout_fragment_length=FRAGMENT,
            # Single frames travel, and are stacked in front of the net.
            env_to_module_connector=lambda *args, **kw: FrameStackingEnvToModule(num_frames=4),
        )
        .learners(
            num_learners=0,  # processes; the main process learns
            learner_connector=lambda *args, **kw: FrameStackingLearner(num_frames=4),
        )
        .training(train_batch_size_per_learner=500)
        .rl_module(rl_module_spec=RLModuleSpec(module_class=Net))
        .reporting(min_time_s_per_iteration=1)
    )
    algorithm = config.build_algo()
    while True:
        learned = algorithm.train().get("learners", {}).get("__all_modules__", {})
        steps = learned.get("num_env_steps_trained_lifetime", 0)
        # It counts a last observation with each fragment, for the bootstrap.
        steps *= FRAGMENT / (FRAGMENT + 1)
        print("steps", int(steps), time.time(), flush=True)


if __name__ == "__main__":
    main()
