# SPDX-License-Identifier: Apache-2.0
"""Play whole games with a checkpoint: `--mode test` of the programs.

The environments are those of training: create_env makes them, and where a lost life ends an episode
of training, it ends one here. But the result is about games, whose return is the sum of the raw
rewards of all their lives.
"""

import argparse
import importlib.util
import json
import logging
import math
import os
import pathlib
import statistics
import sys
import warnings

import gymnasium as gym
import numpy as np
import torch

from beast.envs.atari_games import is_spec_of_game
from beast.envs.environments import Environments, create_environments
from beast.errors import EnvError, FlagError
from beast.nest import map_nest
from beast.parser import non_negative, positive
from beast.processes.lifetime import exit_with_parent
from beast.runs import checkpoint
from beast.runs.atomic_files import replace_file
from beast.runs.checkpoint import BEST, NEWEST, run_path
from beast.runs.statistics import human_normalized
from libtorchbeast.rows import count_games

LONG_GAME = 100_000  # steps; games without a time limit may never end

# By degrees of freedom, from 1: t for which -t < T < t with a probability of 95 %, where T is
# distributed as Student's t.
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def add_flags(parser, without=()):
    # fmt: off
    group = parser.add_argument_group("evaluation")
    group.add_argument("--num_episodes", default=10, type=positive(int),
                       help="Games that a test or an evaluation plays.")
    group.add_argument("--num_test_envs", default=8, type=positive(int),
                       help="Environments that a test steps as one batch.")
    if "greedy" not in without:
        group.add_argument("--greedy", action="store_true", help="Take the most probable action in "
                           "tests and evaluations instead of sampling.")
    group.add_argument("--best", action="store_true", help="Test the checkpoint with the highest "
                       "mean return of the last 100 games.")
    group.add_argument("--record_video", metavar="DIR", help="With --mode test, save each game as "
                       "an mp4 in DIR (pip install moviepy).")
    group.add_argument("--result_file", metavar="FILE",
                       help="With --mode test, write the result into FILE as JSON.")
    group.add_argument("--eval_interval", default=0, type=non_negative(int), help="Agent steps "
                       "between evaluations of the newest weights in another process; 0: none.")
    # fmt: on
    parser.set_defaults(render_mode=None)  # with which create_env makes its environment


def check_flags(flags):
    for name in ("record_video", "result_file"):
        if getattr(flags, name) is not None and flags.mode != "test":
            raise FlagError(f"--{name} is for --mode test, not for --mode {flags.mode}")
    if flags.record_video is not None and importlib.util.find_spec("moviepy") is None:
        raise FlagError("--record_video needs a package that is not installed: pip install moviepy")
    shows = flags.mode == "test_render" or flags.record_video is not None
    if shows and flags.env_backend == "envpool":
        raise FlagError(
            "--env_backend envpool plays without pictures: use --mode test without --record_video"
        )


def test(flags, create_env, net_class, describe=None):
    """Play `flags.num_episodes` games with the checkpoint of the run; print and return the result.

    Args:
      create_env: called with flags; the program's function.
      net_class: called with an observation space and a number of actions.
      describe: called with the net; returns what of it belongs to the protocol.

    Returns:
      What `summarize` returns, with the checkpoint's step and a description of the protocol.

    Raises:
      FlagError: the checkpoint does not fit, or the flags do not.
      EnvError: an environment failed.
    """
    if flags.end_with_stdin:
        exit_with_parent(sys.stdin.fileno())
    saved = checkpoint.load(flags, BEST if flags.best else NEWEST)
    torch.set_num_threads(1)  # more do not help batches as small as these
    num_envs = min(flags.num_test_envs, flags.num_episodes)
    if flags.mode == "test_render" or flags.record_video is not None:
        render_mode = "human" if flags.mode == "test_render" else "rgb_array"
        flags, num_envs = argparse.Namespace(**vars(flags) | {"render_mode": render_mode}), 1
        check_rendering(create_env, flags)

    def create_test_env():
        env = create_env(flags)
        return env if flags.record_video is None else record_video(env, flags, saved["step"])

    seed = [0 if flags.seed is None else flags.seed, 2**31]  # not the games of training
    if flags.env_backend == "envpool":  # Gymnasium may not know these
        environments = create_environments(flags, create_env, num_envs, seed, "test")
        game = environments.game
    else:
        environments = Environments(create_test_env, num_envs, seed, "test")
        game = game_name(environments.envs[0])
    try:
        torch.manual_seed(np.random.SeedSequence(seed).generate_state(1)[0].item())
        model = net_class(environments.observation_space, environments.num_actions)
        checkpoint.restore_weights(model, saved, flags)
        model.train(not flags.greedy)  # in training mode it samples
        print(f"{run_path(flags)} at step {saved['step']:,}, {flags.env}")
        protocol = describe_protocol(environments, flags)
        protocol += f", {describe(model)}" if describe else ""
        print(f"Protocol: {protocol}")
        games = []
        for game_return, game_step in play(environments, model, flags.num_episodes):
            games.append((game_return, game_step))
            print(f"game {len(games)}: return {game_return:g} in {game_step} steps", flush=True)
        result = {"step": saved["step"], "protocol": protocol}
        result |= summarize(*zip(*games, strict=True), game)
        print(describe_result(result))
        if flags.result_file is not None:
            path = pathlib.Path(flags.result_file).expanduser()
            try:
                # A pipe or a device; or a link, perhaps to one, as /dev/stdout is.
                if path.is_symlink() or (path.exists() and not path.is_file()):
                    path.write_text(json.dumps(result))
                else:
                    replace_file(path, json.dumps(result).encode())
            except OSError as error:
                raise FlagError(f"cannot write --result_file {path}: {error}") from None
    finally:
        environments.close()
    return result


@torch.inference_mode()
def play(environments, model, num_games):
    """Yield (return, agent steps) of `num_games` whole games, in the order in which they end.

    Scores use the first games started, each played to its end. The first games that end
    would over-represent short games.
    """
    row = environments.initial()
    agent_state = model.initial_state(environments.num_envs)
    num_begun = environments.num_envs
    counts = [i < num_games for i in range(num_begun)]  # the game that each environment plays
    while any(counts):
        # Copies, since `step` overwrites the row, and the agent's state may share its memory.
        inputs = map_nest(lambda a: torch.tensor(a).unsqueeze(0), row)  # [1, N, ...]
        output, agent_state = model(inputs, agent_state)
        environments.step(output["action"].squeeze(0).numpy())
        if (row["game_step"] == LONG_GAME).any():
            logging.warning(
                "A game has not ended after %s steps; if none may ever do, have create_env end it "
                "by gymnasium.wrappers.TimeLimit", f"{LONG_GAME:,}",
            )  # fmt: skip
        for i in np.flatnonzero(row["game_done"]):
            if counts[i]:
                yield float(row["game_return"][i]), int(row["game_step"][i])
            counts[i] = num_begun < num_games
            num_begun += 1


def summarize(returns, steps, game=None):
    """Return statistics of games as a dict for JSON.

    Args:
      returns, steps: of each game; steps are the agent's.
      game: ale-py's name of the game, if it is one of ale-py's.

    Returns:
      returns, steps; mean; ci95, half the width of the 95 % confidence interval of the mean, and
      stdev, the standard deviation of the returns (both None for a single game); and
      human_normalized, None if there are no human scores for the game.
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
    """Return a result as one line, rounded to the precision of its confidence interval.

    Half the width of the interval gets two significant digits; the other numbers get as many
    decimals as that.
    """
    n, mean, ci95 = len(result["returns"]), result["mean"], result["ci95"]
    decimals = max(0, 1 - math.floor(math.log10(ci95))) if ci95 else 2
    text = f"{n} game{'s' * (n > 1)}: mean return {mean:.{decimals}f}"
    if ci95 is not None:
        low, high = mean - ci95, mean + ci95
        text += f", 95 % confidence interval {low:.{decimals}f} to {high:.{decimals}f}"
        text += f", standard deviation {result['stdev']:.{decimals}f}"
    if result["human_normalized"] is not None:
        percent = 100 * result["human_normalized"]
        text += f"; human-normalized {percent:.1f} % (0 % is a random player)"
    return text


def t_quantile(num_degrees):
    """Return the t of T_95 for any number of degrees of freedom, to within 0.001.

    With the ten games of a test, the normal distribution's 1.96 would make intervals a seventh too
    narrow.
    """
    return T_95[num_degrees - 1] if num_degrees <= len(T_95) else 1.96 + 2.45 / num_degrees


def game_name(env):
    """Return ale-py's name of an environment's game; None if it is not one of ale-py's."""
    spec = getattr(getattr(env, "unwrapped", None), "spec", None)
    return spec.kwargs.get("game") if is_spec_of_game(spec) else None


def describe_protocol(environments, flags):
    """Return one line that describes the evaluation protocol."""
    parts = ["whole games", "raw rewards", "greedy" if flags.greedy else "sampling"]
    parts.append(f"{environments.num_actions} actions")
    if flags.env_backend == "envpool":
        parts += environments.describe_protocol()
    elif game_name(environments.envs[0]) is not None:
        parts += _describe_game(environments.envs[0])
    return ", ".join([*parts, f"{environments.num_envs} at once"])


def _describe_game(env):
    known = {"repeat_action_probability": 0.25} | env.unwrapped.spec.kwargs  # AtariEnv's default
    for name in ("noop_max", "frame_skip"):
        if env.has_wrapper_attr(name):
            known[name] = env.get_wrapper_attr(name)
    texts = {
        "noop_max": "1 to {} idle frames first",
        "frame_skip": "frame skip {}",
        "repeat_action_probability": "sticky actions {:g}",
        "max_num_frames_per_episode": "at most {:,} frames a game",
    }
    known = {name: known.get(name) for name in texts}
    parts = [text.format(known[name]) for name, text in texts.items() if known[name] is not None]
    wrappers = str(env)  # names all of them
    parts += ["each life an episode"] * ("EpisodicLife" in wrappers)
    parts += ["FIRE pressed to begin an episode"] * ("FireReset" in wrappers)
    return parts


def check_rendering(create_env, flags):
    """Refuse environments that cannot be rendered in `flags.render_mode`, before any is played.

    Raises:
      FlagError: there is no screen, or what `render` returns makes no video.
      EnvError: the environment failed.
    """
    screens = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
    if flags.render_mode == "human" and not any(map(os.getenv, screens)):
        # The emulator would play on, and show nothing.
        raise FlagError(
            "there is no screen to show games on: neither DISPLAY nor WAYLAND_DISPLAY is set; "
            "use --mode test, or a machine with a screen (ssh -X forwards one)"
        )
    environments = Environments(lambda: create_env(flags), 1, 0, "the environment")
    try:
        env = environments.envs[0]
        render_mode = getattr(env, "render_mode", None)
        if render_mode != flags.render_mode:
            raise FlagError(
                f"create_env has made an environment with render_mode {render_mode!r}, not "
                f"{flags.render_mode!r}: pass it render_mode=flags.render_mode"
            )
        if flags.render_mode == "rgb_array":
            environments.initial()
            try:
                frame = np.asarray(env.render())
            except Exception as error:  # where a package is missing, for example
                text = f"render() of {env} raised {type(error).__name__}: {error}"
                raise EnvError(text) from error
            if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
                raise FlagError(
                    f"--record_video needs frames of uint8 [height, width, 3], but render() of "
                    f"{env} returns {frame.dtype} {list(frame.shape)}: convert them in create_env"
                )
    finally:
        environments.close()


class Recorder(gym.wrappers.RecordVideo):
    """Gymnasium's recorder, but with a video for each whole game, and none of an unfinished one."""

    _game_over = True

    def step(self, action):
        result = super().step(action)
        *_, terminated, truncated, info = result
        self._game_over = info.get("game_over", terminated or truncated)
        return result

    def reset(self, *, seed=None, options=None):
        if self._game_over or seed is not None:
            return super().reset(seed=seed, options=options)
        num_games = count_games(self.env)
        result = self.env.reset(options=options)  # the game goes on after a lost life
        if count_games(self.env) != num_games:  # or has ended in a step of that
            self.episode_id += 1
            if self.recording:
                self.stop_recording()
            if self.episode_trigger(self.episode_id):
                self.start_recording(f"{self.name_prefix}-episode-{self.episode_id}")
        if self.recording:
            self._capture_frame()
        return result

    def close(self):
        self.recording, self.recorded_frames = False, []
        super().close()


def record_video(env, flags, step):
    """Return the environment with Gymnasium's recorder of `flags.num_episodes` videos around it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the folder may exist; names hold run and step
        return Recorder(
            env,
            os.path.expanduser(flags.record_video),
            episode_trigger=lambda episode: episode < flags.num_episodes,
            name_prefix=f"{run_path(flags).name}-step-{step}",
        )
