# SPDX-License-Identifier: Apache-2.0
"""How many agent steps a second does one core make on an Atari game?

    python benchmarks/environments.py --repeats 5 --steps 3000

Four ways to step the game, with the same random actions, one after the other and over again, in one
process pinned to one core; and a fifth where EnvPool is installed (pip install envpool==1.2.7,
Python 3.12 and newer). A step is `--frame_skip` emulator frames. Seconds are CPU time of all
threads, so that other programs on the machine disturb little. Ratios are medians of the ratios
within a round. Prints Markdown.
"""

import argparse
import os
import statistics
import time

import ale_py
import gymnasium as gym
import numpy as np

try:
    import envpool
except ImportError:
    envpool = None

from machine import print_header

import atari_wrappers

NUM_VECTOR_ENVS = 8
os.environ.setdefault("OPENCV_FOR_THREADS_NUM", "1")  # before OpenCV is imported


def time_emulator(flags, actions):
    """Step the emulator alone; no frame is read from it."""
    game = gym.make(flags.env, frameskip=1).unwrapped
    game.reset(seed=flags.seed)
    ale, action_set = game.ale, game.ale.getMinimalActionSet()
    begin = time.process_time()
    for action in actions:
        for _ in range(flags.frame_skip):
            ale.act(action_set[action])
        if ale.game_over():
            ale.reset_game()
    return time.process_time() - begin


def time_gymnasium(flags, actions):
    env = gym.make(flags.env, frameskip=1)
    env = gym.wrappers.AtariPreprocessing(env, frame_skip=flags.frame_skip, screen_size=84)
    return time_env(gym.wrappers.FrameStackObservation(env, 4), flags, actions)


def time_ours(flags, actions):
    env = atari_wrappers.make_atari(flags.env, frame_skip=flags.frame_skip)
    env = atari_wrappers.wrap_pytorch(atari_wrappers.wrap_deepmind(env))
    return time_env(env, flags, actions)


def time_env(env, flags, actions):
    env.reset(seed=flags.seed)
    begin = time.process_time()
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    seconds = time.process_time() - begin
    env.close()
    return seconds


def time_vector(flags, actions):
    game = gym.spec(flags.env).kwargs["game"]
    envs = ale_py.vector_env.AtariVectorEnv(
        game,
        NUM_VECTOR_ENVS,
        num_threads=1,
        frameskip=flags.frame_skip,
        reward_clipping=False,
    )
    envs.reset(seed=flags.seed)
    return time_batches(envs, actions)


def time_batches(envs, actions):
    """Step N games at a time; return seconds for as many steps as there are actions."""
    batches = np.array(actions[: len(actions) // NUM_VECTOR_ENVS * NUM_VECTOR_ENVS])
    batches = batches.reshape(-1, NUM_VECTOR_ENVS)
    begin = time.process_time()
    for batch in batches:
        envs.step(batch)
    seconds = time.process_time() - begin
    envs.close()
    return seconds * len(actions) / batches.size


def time_envpool(flags, actions):
    # A game's id there is its name as in ALE/Pong-v5; its actions are sticky only if asked for.
    game = gym.spec(flags.env).kwargs["game"].title().replace("_", "")
    envs = envpool.make_gymnasium(
        f"{game}-v5",
        num_envs=NUM_VECTOR_ENVS,
        num_threads=1,
        seed=flags.seed,
        frame_skip=flags.frame_skip,
        reward_clip=False,
    )
    envs.reset()
    return time_batches(envs, actions)


WAYS = {
    "a: emulator alone, no frames read": time_emulator,
    "b: Gymnasium's AtariPreprocessing, FrameStackObservation": time_gymnasium,
    "c: ours, whole pipeline": time_ours,
    f"d: ale-py's AtariVectorEnv, {NUM_VECTOR_ENVS} games, one thread": time_vector,
}
if envpool is not None:
    WAYS[f"e: EnvPool {envpool.__version__}, {NUM_VECTOR_ENVS} games, one thread"] = time_envpool


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--env", default="PongNoFrameskip-v4", help="a game of ale-py")
    parser.add_argument("--frame_skip", type=int, default=4, help="frames an agent step")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each way")
    parser.add_argument("--steps", type=int, default=3000, help="agent steps a measurement")
    parser.add_argument("--seed", type=int, default=1, help="of games and actions")
    flags = parser.parse_args()

    print_header(ale_py, gym, np)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    gym.register_envs(ale_py)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    num_actions = gym.make(flags.env).action_space.n
    actions = np.random.default_rng(flags.seed).integers(num_actions, size=flags.steps).tolist()

    rates = {name: [] for name in WAYS}
    for _ in range(flags.repeats):
        for name, way in WAYS.items():  # interleaved, so that a slow minute slows all of them
            rates[name].append(flags.steps / way(flags, actions))

    emulator, gymnasium, *_ = rates.values()
    if envpool is None:
        print("- Without EnvPool, which is not installed: pip install envpool==1.2.7")
    print(f"- {flags.env}, one core, median of {flags.repeats} times {flags.steps} agent steps\n")
    print("| way | agent steps per CPU second | lowest | highest | to a | to b |")
    print("|---|---|---|---|---|---|")
    for name, values in rates.items():
        ratios = [
            statistics.median(rate / base for rate, base in zip(values, bases, strict=True))
            for bases in (emulator, gymnasium)
        ]
        print(
            f"| {name} | {statistics.median(values):,.0f} | {min(values):,.0f} "
            f"| {max(values):,.0f} | {ratios[0]:.2f} | {ratios[1]:.2f} |"
        )


if __name__ == "__main__":
    main()
