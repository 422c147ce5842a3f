# SPDX-License-Identifier: Apache-2.0
"""Play whole games with a checkpoint: the test mode of both programs."""

import os
import statistics
import sys

import numpy as np
import torch

import checkpoint
from checkpoint import BEST, NEWEST, FlagError, run_path
from environment import Environments, map_nest


def test(flags, create_env, Net):
    """Play `flags.num_episodes` games with the checkpoint of the run, print and return the returns.

    Args:
      create_env, Net: the program's function and class.
    """
    saved = checkpoint.load(flags, BEST if flags.best else NEWEST)
    if saved is None:
        hint = "; a best one comes after the first game" if flags.best else ""
        raise FlagError(f"there is no checkpoint in {run_path(flags)}; name a run by --xpid{hint}")
    if flags.num_episodes < 1:
        raise FlagError(f"--num_episodes is {flags.num_episodes}; it must be positive")
    screens = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
    if flags.mode == "test_render" and sys.platform == "linux" and not any(map(os.getenv, screens)):
        # The emulator would play on, and show nothing.
        raise FlagError(
            "there is no screen to show games on: neither DISPLAY nor WAYLAND_DISPLAY is set; "
            "use --mode test, or a machine with a screen (ssh -X brings one along)"
        )
    torch.set_num_threads(1)  # more do not help a batch of one
    seed = [0 if flags.seed is None else flags.seed, 2**31]  # not the games of training
    environments = Environments(lambda: create_env(flags), 1, seed, "test")
    try:
        torch.manual_seed(np.random.SeedSequence(seed).generate_state(1)[0].item())
        model = Net(environments.observation_space, environments.num_actions, flags.use_lstm)
        checkpoint.restore_weights(model, saved, flags)
        model.train(not flags.greedy)  # in training mode it samples, else it takes the best
        how = "greedy" if flags.greedy else "sampling"
        print(f"{run_path(flags)} at step {saved['step']:,}, {flags.env}, {how}")
        returns = []
        for episode_return, episode_step in play(environments, model, flags.num_episodes):
            returns.append(episode_return)
            print(
                f"game {len(returns)}: return {episode_return:g} in {episode_step} steps",
                flush=True,
            )
    finally:
        environments.close()
    spread = statistics.stdev(returns) if len(returns) > 1 else 0.0
    print(f"{len(returns)} games: mean return {statistics.fmean(returns):.2f} +- {spread:.2f}")
    return returns


@torch.inference_mode()
def play(environments, model, num_episodes):
    """Yield (return, agent steps) of `num_episodes` episodes of one environment."""
    row = environments.initial()
    inputs = map_nest(lambda a: torch.from_numpy(a).unsqueeze(0), row)  # views: [1, 1, ...]
    agent_state = model.initial_state(1)
    while num_episodes > 0:
        output, agent_state = model(inputs, agent_state)
        environments.step(output["action"].squeeze(0).numpy())
        if row["done"][0]:
            yield float(row["episode_return"][0]), int(row["episode_step"][0])
            num_episodes -= 1
