# SPDX-License-Identifier: Apache-2.0
"""The games of ale-py by their ids in Gymnasium; atari_wrappers.py preprocesses them."""

import difflib

import gymnasium as gym

from beast.errors import FlagError

OTHERS = "give others without --env_backend ale_vector"


def is_game(env_id):
    """Return whether an id of Gymnasium is a game of ale-py."""
    _register()
    return is_spec_of_game(gym.registry.get(env_id))  # "module:Name-v0" registers later


def is_spec_of_game(spec):
    return spec is not None and "AtariEnv" in str(spec.entry_point)


def _register():
    import ale_py  # registered here, since spawned processes start without the games

    gym.register_envs(ale_py)


def find_spec(env_id):
    """Return Gymnasium's spec of an id that is a game of ale-py.

    Raises:
      FlagError: it is not, or its registration is not supported; the message says what
        to do instead.
    """
    _register()
    try:
        spec = gym.spec(env_id)
    except gym.error.Error as error:
        games = {i.lower(): i for i, s in gym.registry.items() if is_spec_of_game(s)}
        near = [games[i] for i in difflib.get_close_matches(env_id.lower(), games)]
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


SCORES = {  # scores of a random player and a human, by ale-py's name of the game
    "alien": (227.8, 7127.7),
    "amidar": (5.8, 1719.5),
    "assault": (222.4, 742.0),
    "asterix": (210.0, 8503.3),
    "asteroids": (719.1, 47388.7),
    "atlantis": (12850.0, 29028.1),
    "bank_heist": (14.2, 753.1),
    "battle_zone": (2360.0, 37187.5),
    "beam_rider": (363.9, 16926.5),
    "berzerk": (123.7, 2630.4),
    "bowling": (23.1, 160.7),
    "boxing": (0.1, 12.1),
    "breakout": (1.7, 30.5),
    "centipede": (2090.9, 12017.0),
    "chopper_command": (811.0, 7387.8),
    "crazy_climber": (10780.5, 35829.4),
    "defender": (2874.5, 18688.9),
    "demon_attack": (152.1, 1971.0),
    "double_dunk": (-18.6, -16.4),
    "enduro": (0.0, 860.5),
    "fishing_derby": (-91.7, -38.7),
    "freeway": (0.0, 29.6),
    "frostbite": (65.2, 4334.7),
    "gopher": (257.6, 2412.5),
    "gravitar": (173.0, 3351.4),
    "hero": (1027.0, 30826.4),
    "ice_hockey": (-11.2, 0.9),
    "jamesbond": (29.0, 302.8),
    "kangaroo": (52.0, 3035.0),
    "krull": (1598.0, 2665.5),
    "kung_fu_master": (258.5, 22736.3),
    "montezuma_revenge": (0.0, 4753.3),
    "ms_pacman": (307.3, 6951.6),
    "name_this_game": (2292.3, 8049.0),
    "phoenix": (761.4, 7242.6),
    "pitfall": (-229.4, 6463.7),
    "pong": (-20.7, 14.6),
    "private_eye": (24.9, 69571.3),
    "qbert": (163.9, 13455.0),
    "riverraid": (1338.5, 17118.0),
    "road_runner": (11.5, 7845.0),
    "robotank": (2.2, 11.9),
    "seaquest": (68.4, 42054.7),
    "skiing": (-17098.1, -4336.9),
    "solaris": (1236.3, 12326.7),
    "space_invaders": (148.0, 1668.7),
    "star_gunner": (664.0, 10250.0),
    "surround": (-10.0, 6.5),
    "tennis": (-23.8, -8.3),
    "time_pilot": (3568.0, 5229.2),
    "tutankham": (11.4, 167.6),
    "up_n_down": (533.4, 11693.2),
    "venture": (0.0, 1187.5),
    "video_pinball": (0.0, 17667.9),
    "wizard_of_wor": (563.5, 4756.5),
    "yars_revenge": (3092.9, 54576.9),
    "zaxxon": (32.5, 9173.3),
}


def human_normalized(game, score):
    """Return the human-normalized score: 0 random, 1 human; None for other games."""
    if game not in SCORES:
        return None
    random, human = SCORES[game]
    return (score - random) / (human - random)
