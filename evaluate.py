# SPDX-License-Identifier: Apache-2.0
"""Play whole games with a checkpoint: the test mode of both programs.

A game is whole where a lost life does not end it; its return is the sum of raw rewards.
"""

import argparse
import importlib.util
import json
import math
import os
import signal
import statistics
import sys
import threading
import warnings

import gymnasium as gym
import numpy as np
import torch

import checkpoint
from atari_scores import human_normalized
from checkpoint import BEST, NEWEST, FlagError, run_path
from environment import Environments, map_nest
from whole_files import replace_file

RESULT = "result.json"  # of an evaluation that is under way


def add_flags(parser):
    # fmt: off
    group = parser.add_argument_group("evaluation")
    group.add_argument("--num_episodes", default=10, type=int, help="Whole games that a test "
                       "plays, and each evaluation of --eval_interval.")
    group.add_argument("--num_test_envs", default=8, type=int, help="Games played at once, "
                       "with one batched forward pass a step.")
    group.add_argument("--greedy", action="store_true",
                       help="In a test, take the most probable action instead of sampling.")
    group.add_argument("--best", action="store_true", help="Test the checkpoint with the highest "
                       "mean return of the last 100 games instead of the newest.")
    group.add_argument("--record_video", metavar="FOLDER", help="Have a test write each game into "
                       "this folder, as an mp4 (pip install moviepy); one game at a time.")
    group.add_argument("--eval_interval", default=0, type=int, help="While training, evaluate the "
                       "newest weights each time that so many agent steps have been learned from, "
                       "in a process of its own; one that is due while the last one still plays "
                       "is left out. 0: never.")
    group.add_argument("--evaluator", action="store_true", help=argparse.SUPPRESS)
    # fmt: on
    parser.set_defaults(render_mode=None)  # what create_env is to make its environment with


def check_flags(flags):
    for name in ("num_episodes", "num_test_envs"):
        if getattr(flags, name) < 1:
            raise FlagError(f"--{name} is {getattr(flags, name)}; it must be positive")
    for name in ("eval_interval", "seed"):
        value = getattr(flags, name)
        if value is not None and value < 0:
            raise FlagError(f"--{name} is {value}; it must not be negative")
    if flags.record_video is None:
        return
    if flags.mode != "test":
        raise FlagError(f"--record_video is for --mode test, not for --mode {flags.mode}")
    if importlib.util.find_spec("moviepy") is None:
        raise FlagError("--record_video needs a package that is not installed: pip install moviepy")


def test(flags, create_env, Net):
    """Play `flags.num_episodes` games with the checkpoint of the run; print and return the result.

    Args:
      create_env, Net: the program's function and class.

    Returns:
      What `summarize` does, the checkpoint's step, and the protocol in words.

    Raises:
      FlagError: there is no such checkpoint, it does not fit, or the flags do not.
      EnvError: an environment failed.
    """
    if flags.evaluator:
        threading.Thread(target=end_with_stdin, daemon=True).start()
    check_flags(flags)
    saved = checkpoint.load(flags, BEST if flags.best else NEWEST)
    if saved is None:
        hint = "; a best one comes after the first game" if flags.best else ""
        raise FlagError(f"there is no checkpoint in {run_path(flags)}; name a run by --xpid{hint}")
    screens = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
    if flags.mode == "test_render" and sys.platform == "linux" and not any(map(os.getenv, screens)):
        # The emulator would play on, and show nothing.
        raise FlagError(
            "there is no screen to show games on: neither DISPLAY nor WAYLAND_DISPLAY is set; "
            "use --mode test, or a machine with a screen (ssh -X brings one along)"
        )
    torch.set_num_threads(1)  # more do not help batches as small as these
    num_envs = min(flags.num_test_envs, flags.num_episodes)
    if flags.mode == "test_render":
        flags, num_envs = argparse.Namespace(**vars(flags) | {"render_mode": "human"}), 1
    elif flags.record_video is not None:  # all frames of a game are in memory until it ends
        flags, num_envs = argparse.Namespace(**vars(flags) | {"render_mode": "rgb_array"}), 1

    def create_test_env():
        env = create_env(flags)
        return env if flags.record_video is None else record_video(env, flags, saved["step"])

    seed = [0 if flags.seed is None else flags.seed, 2**31]  # not the games of training
    environments = Environments(create_test_env, num_envs, seed, "test")
    try:
        torch.manual_seed(np.random.SeedSequence(seed).generate_state(1)[0].item())
        model = Net(environments.observation_space, environments.num_actions, flags.use_lstm)
        checkpoint.restore_weights(model, saved, flags)
        model.train(not flags.greedy)  # in training mode it samples, else it takes the best
        print(f"{run_path(flags)} at step {saved['step']:,}, {flags.env}")
        protocol = describe_protocol(environments, flags)
        print(f"Protocol: {protocol}")
        games = []
        for game_return, game_step in play(environments, model, flags.num_episodes):
            games.append((game_return, game_step))
            print(f"game {len(games)}: return {game_return:g} in {game_step} steps", flush=True)
        result = {"step": saved["step"], "protocol": protocol}
        result |= summarize(*zip(*games, strict=True), game_name(environments.envs[0]))
    finally:
        environments.close()
    print(describe_result(result))
    if flags.evaluator:
        replace_file(run_path(flags) / RESULT, json.dumps(result).encode())
    return result


@torch.inference_mode()
def play(environments, model, num_games):
    """Yield (return, agent steps) of `num_games` whole games, in the order in which they end.

    These are the first that begin, and each is played to its end. The first that end would not do:
    among games played side by side, those are the short ones.
    """
    row = environments.initial()
    inputs = map_nest(lambda a: torch.from_numpy(a).unsqueeze(0), row)  # views: [1, N, ...]
    agent_state = model.initial_state(environments.num_envs)
    num_begun = environments.num_envs
    counts = [i < num_games for i in range(num_begun)]  # the game that is under way
    while any(counts):
        output, agent_state = model(inputs, agent_state)
        environments.step(output["action"].squeeze(0).numpy())
        for i in np.flatnonzero(row["game_done"]):
            if counts[i]:
                yield float(row["game_return"][i]), int(row["game_step"][i])
            counts[i] = num_begun < num_games
            num_begun += 1


def summarize(returns, steps, game=None):
    """Return the result of some games as a dict that JSON can hold.

    Args:
      returns, steps: of each game; steps are the agent's.
      game: ale-py's name of it, if it is one of those.

    Returns:
      returns, steps; mean; ci95: half the width of the 95 % confidence interval of the mean, and
      stdev, the standard deviation of the returns: both None where there is but one game; and
      human_normalized, None where it is not known.
    """
    n, mean = len(returns), statistics.fmean(returns)
    stdev = statistics.stdev(returns) if n > 1 else None
    return {
        "returns": returns,
        "steps": steps,
        "mean": mean,
        "ci95": None if stdev is None else t_quantile(n - 1) * stdev / math.sqrt(n),
        "stdev": stdev,
        "human_normalized": human_normalized(game, mean),
    }


def describe_result(result):
    n, mean, ci95 = len(result["returns"]), result["mean"], result["ci95"]
    text = f"{n} game{'s' * (n > 1)}: mean return {mean:.2f}"
    if ci95 is not None:
        text += f", 95 % confidence interval {mean - ci95:.2f} to {mean + ci95:.2f}"
        text += f", standard deviation {result['stdev']:.2f}"
    if result["human_normalized"] is not None:
        percent = 100 * result["human_normalized"]
        text += f"; human-normalized {percent:.1f} % (0 % is a random player)"
    return text


def t_quantile(num_degrees, probability=0.95):
    """Return the t for which -t < T < t has the probability, T being distributed as Student's t.

    With the ten games of a test, the normal distribution's 1.96 would make intervals a seventh too
    narrow. `num_degrees` of freedom is an int; this bisects `t_probability`.
    """
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if t_probability(middle, num_degrees) < probability else (low, middle)
        )
    return low


def t_probability(t, num_degrees):
    """Return P(-t < T < t): a finite sum (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    angle, is_odd = math.atan(t / math.sqrt(num_degrees)), num_degrees % 2
    term, total = math.cos(angle) ** is_odd, 0.0
    for power in range(is_odd, num_degrees - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if is_odd else total


def game_name(env):
    """Return ale-py's name of the game that an environment plays; None where it is none of them."""
    spec = env.unwrapped.spec
    return spec.kwargs.get("game") if spec and "AtariEnv" in str(spec.entry_point) else None


def describe_protocol(environments, flags):
    """Return in one line how games are played, as far as the environments tell."""
    env = environments.envs[0]
    words = ["whole games", "raw rewards", "greedy" if flags.greedy else "sampling"]
    words.append(f"{environments.num_actions} actions")
    if game_name(env) is not None:
        known = dict(env.unwrapped.spec.kwargs)
        for name in ("noop_max", "skip"):
            if env.has_wrapper_attr(name):
                known[name] = env.get_wrapper_attr(name)
        texts = {
            "noop_max": "1 to {} idle frames first",
            "skip": "frame skip {}",
            "repeat_action_probability": "sticky actions {:g}",
            "max_num_frames_per_episode": "at most {:,} frames a game",
        }
        words += [text.format(known[name]) for name, text in texts.items() if name in known]
    return ", ".join([*words, f"{environments.num_envs} at once"])


class Recorder(gym.wrappers.RecordVideo):
    """Gymnasium's recorder, which leaves no video of a game that was not played to its end."""

    def close(self):
        self.recording, self.recorded_frames = False, []
        super().close()


def record_video(env, flags, step):
    """Return the environment with Gymnasium's recorder of `flags.num_episodes` videos around it."""
    if not str(env.render_mode).startswith("rgb_array"):
        raise FlagError(
            f"--record_video: create_env has made an environment with render_mode "
            f"{env.render_mode!r}; make it with render_mode=flags.render_mode"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the folder exists; names are of run and step
        return Recorder(
            env,
            os.path.expanduser(flags.record_video),
            episode_trigger=lambda episode: episode < flags.num_episodes,
            name_prefix=f"{run_path(flags).name}-step-{step}",
        )


def end_with_stdin():
    """End this process, and those that its environments have started, when standard input ends."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.killpg(0, signal.SIGKILL)
