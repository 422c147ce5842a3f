# SPDX-License-Identifier: Apache-2.0
"""The games of ale-py by their ids in Gymnasium; atari_wrappers.py preprocesses them."""

import difflib
import importlib
import logging

import gymnasium as gym

from beast.errors import FlagError

OTHERS = "give others without --env_backend ale_vector"


def is_game(env_id):
    """Return whether an id of Gymnasium is a game of ale-py, which others do not need."""
    try:
        name = _register(env_id)
    except ModuleNotFoundError:
        if _has_name_of_game(env_id):
            raise FlagError(f"{env_id} needs a package: pip install ale-py") from None
        return False
    return is_spec_of_game(gym.registry.get(name))


def _has_name_of_game(env_id):
    return env_id.startswith("ALE/") or "NoFrameskip" in env_id


def warn_of_name(env_id, env):
    """Warn where a create_env of one's own goes by the name of a game: results would be its."""
    spec = getattr(getattr(env, "unwrapped", None), "spec", None)
    if _has_name_of_game(env_id or "") and not is_spec_of_game(spec):
        logging.warning("--env is %s, but create_env made %s: give its name by --env", env_id, env)


def is_spec_of_game(spec):
    """Return whether it is of ale-py's own class: our frame skip calls no other one's `step`."""
    return spec is not None and str(spec.entry_point) in (
        "ale_py.env:AtariEnv", "ale_py:AtariEnv", "<class 'ale_py.env.AtariEnv'>"
    )  # fmt: skip


def _register(env_id):
    """Register all games, and what the module of "module:ID" does; return the ID alone."""
    import ale_py  # registered here, since spawned processes start without the games

    gym.register_envs(ale_py)
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise FlagError(f"--env {env_id}: {module} cannot be imported: {error}") from error
    return name


def find_spec(env_id):
    """Return Gymnasium's spec of an id that is a game of ale-py.

    Raises:
      FlagError: it is not, or its registration is not supported; the message says what
        to do instead.
    """
    name = _register(env_id)
    try:
        spec = gym.spec(name)
    except gym.error.Error as error:
        games = {i.lower(): i for i, s in gym.registry.items() if is_spec_of_game(s)}
        near = [games[i] for i in difflib.get_close_matches(name.lower(), games)]
        raise FlagError(
            f"there is no environment {env_id!r} ({error}); "
            + (f"is it {' or '.join(near)}? Else " if near else "")
            + f"name a game of ale-py, such as PongNoFrameskip-v4 or ALE/Pong-v5, or {OTHERS}"
        ) from None
    if not is_spec_of_game(spec):
        raise FlagError(
            f"{env_id} is not a game of ale-py, so Atari preprocessing does not fit it; name one, "
            f"such as PongNoFrameskip-v4 or ALE/Pong-v5, or {OTHERS}"
        )
    # Our frame skip drives the emulator itself, below such wrappers.
    if spec.max_episode_steps is not None:
        raise FlagError(
            f"{env_id} is registered with max_episode_steps, which would not end a game here: "
            "register it with kwargs={'max_num_frames_per_episode': ...} instead"
        )
    if spec.additional_wrappers:
        raise FlagError(
            f"{env_id} is registered with additional_wrappers, which would see no step here: edit "
            "create_env to add them (docs/environment.md)"
        )
    kwargs = spec.kwargs
    if kwargs.get("continuous") or kwargs.get("sound_obs") or kwargs.get("obs_type") == "ram":
        raise FlagError(
            f"{env_id} is registered with continuous actions, sound or RAM, but here a game has "
            "discrete actions and images: edit create_env to make it another way"
        )
    return spec


def check_keys(flags):
    if keys := getattr(flags, "observation_keys", None):  # no flag of atari_wrappers.py
        raise FlagError(
            f"--observation_keys is {keys}, but an Atari game shows one image: leave the flag out"
        )


def check_sticky_actions(sticky_actions):
    if not 0 <= sticky_actions <= 1:
        raise FlagError(f"sticky_actions is a probability from 0 to 1, not {sticky_actions}")


def waits_for_fire(ale):
    """Return whether the game waits for FIRE, by the actions that it uses.

    The set of all 18 actions always has a FIRE.
    """
    used = ale.getMinimalActionSet()
    return len(used) >= 3 and used[1].name == "FIRE"
