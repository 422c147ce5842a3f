# SPDX-License-Identifier: Apache-2.0
"""The IMPALA recipe that comes with TorchRL's package, printing the steps learned from."""

import itertools
import sys
import time

import ale_py  # noqa: F401 (registers the games, also in each collector)
import torch
import torchrl
from omegaconf import OmegaConf
from torch.optim.optimizer import register_optimizer_step_post_hook

# The package leaves out the recipe's configuration. These are its numbers, but for the game, tests,
# and num_workers, which is 12 there. Frames a batch: of one rollout, 4 a step.
CONFIG = """
env: {env_name: PongNoFrameskip-v4, backend: gymnasium}
device: cpu
collector: {num_workers: 2, frames_per_batch: 80, total_frames: 1000000000}
loss: {batch_size: 32, sgd_updates: 1, gamma: 0.99, critic_coeff: 0.5, entropy_coeff: 0.01,
       loss_critic_type: l2}
optim: {lr: 0.0006, eps: 1.0e-8, weight_decay: 0.0, alpha: 0.99, max_grad_norm: 40.0,
        anneal_lr: true}
logger: {backend: null, test_interval: 1000000000000, num_test_episodes: 1}
"""

# torchvision, which resizes the frames, has compiled operators that do not load beside a torch
# without CUDA. It imports if they are declared; nothing here calls them.
library = torch.library.Library("torchvision", "FRAGMENT")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

sys.path.insert(0, f"{torchrl.__path__[0]}/../sota-implementations/impala")


def main():
    import impala_single_node

    config = OmegaConf.create(CONFIG)
    steps = itertools.count(step=config.loss.batch_size * config.collector.frames_per_batch // 4)
    register_optimizer_step_post_hook(
        lambda *args: print("steps", next(steps), time.time(), flush=True)
    )
    impala_single_node.main.__wrapped__(config)  # without Hydra, which wants a file


if __name__ == "__main__":
    main()
