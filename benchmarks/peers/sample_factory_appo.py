# SPDX-License-Identifier: Apache-2.0
"""Sample Factory's Atari example, printing the steps learned from."""

import time

import ale_py  # noqa: F401 (registers the games, also in each worker)
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.train import make_runner
from sf_examples.atari.train_atari import parse_atari_args, register_atari_components

# The example itself makes four epochs of four small batches. V-trace is off, as there: version
# 2.1.1 ends with an error when it records statistics of V-trace.
FLAGS = """--env=atari_pong --device=cpu --train_for_env_steps=1000000000
--train_dir=. --restart_behavior=overwrite --summaries_use_frameskip=False
--num_workers=2 --num_envs_per_worker=16 --worker_num_splits=2 --async_rl=True
--decorrelate_experience_max_seconds=0 --normalize_returns=False --normalize_input=False
--rollout=20 --batch_size=640 --num_epochs=1 --num_batches_per_epoch=1"""


class Progress(AlgoObserver):
    def on_training_step(self, runner, training_iteration_since_resume):
        print("steps", sum(runner.env_steps.values()), time.time(), flush=True)


if __name__ == "__main__":
    register_atari_components()
    _, runner = make_runner(parse_atari_args(FLAGS.split()))
    runner.register_observer(Progress())
    runner.init()
    runner.run()
