# SPDX-License-Identifier: Apache-2.0
"""The parser of every program, and types of numbers for its `add_argument`. No torch here."""

import argparse
import difflib
import math
import os

# What others call our flags, without dashes.
ALIASES = {
    "learning_rate": "lr step_size",
    "discounting": "gamma discount discount_factor",
    "disable_cuda": "device cuda gpu cpu no_cuda use_cuda use_gpu num_gpus gpus",
    "num_envs": "n_envs nenvs num_environments",
    "num_actors": "num_workers n_workers workers num_processes num_envs n_envs num_environments",
    "envs_per_actor": "num_envs n_envs nenvs num_environments num_envs_per_worker",
    "num_servers": "num_workers n_workers workers num_processes",
    "envs_per_stream": "num_envs n_envs nenvs num_environments num_envs_per_worker",
    "num_env_processes": "num_workers n_workers workers num_processes num_cpu num_actors",
    "num_agents": "num_workers n_workers workers num_learners num_processes",
    "seed": "random_seed rng_seed torch_seed",
    "env": "env_id env_name environment game task gym_id",
    "total_steps": "total_timesteps timesteps num_timesteps num_steps max_steps steps num_frames "
    "total_frames",
    "unroll_length": "num_steps n_steps nsteps rollout_length rollout_fragment_length horizon",
    "entropy_cost": "ent_coef entropy_coef entropy_coeff entropy_coefficient beta",
    "baseline_cost": "vf_coef value_coef value_loss_coef vf_loss_coeff value_cost",
    "policy_clipping": "clip_range clip_coef clip_param clip_eps cliprange",
    "grad_norm_clipping": "max_grad_norm grad_clip clip_grad_norm",
    "num_epochs": "n_epochs update_epochs ppo_epoch epochs",
    "num_minibatches": "nminibatches num_mini_batch minibatch_size",
    "gae_lambda": "lam lambda gae",
    "reward_clipping": "clip_rewards reward_clip",
    "reward_scaling": "clip_rewards reward_clip norm_reward",
    "epsilon": "eps adam_eps rms_eps optimizer_eps",
    "use_lstm": "lstm recurrent rnn use_rnn",
    "use_gru": "gru recurrent rnn use_rnn",
    "xpid": "exp_name experiment_name name run_name run_id resume checkpoint load_checkpoint",
    "savedir": "logdir log_dir output_dir save_dir outdir",
    "mode": "eval evaluate test play",
    "num_episodes": "eval_episodes n_eval_episodes",
    "wandb": "track use_wandb",
}


def absolute_path(text):
    """Return a path that stays the same when an environment changes the current folder."""
    return os.path.abspath(os.path.expanduser(text))


class Parser(argparse.ArgumentParser):
    """An argument parser whose help shows defaults and whose errors are one line.

    Args:
      program: file name of the program; checkpoints store it.
    """

    all = []  # all parsers of this process

    def __init__(self, program, description):
        super().__init__(
            prog=program,
            description=description,
            usage="%(prog)s [flags]",
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        self.set_defaults(program=program)
        Parser.all.append(self)

    @classmethod
    def flag_names(cls, program):
        """Return the names that a program's flags have in its namespace."""
        actions = [
            action for parser in cls.all if parser.prog == program for action in parser._actions
        ]
        return {action.dest for action in actions if action.help != argparse.SUPPRESS}

    def check_types(self, values):
        """Raise a TypeError if a value has a type that its flag, its key, cannot have."""
        for action in self._actions:
            value = values.get(action.dest)
            if value is None or action.nargs not in (None, 0):
                continue
            kinds = (int, float) if hasattr(action.type, "kind") else object
            kinds = bool if isinstance(action.const, bool) else kinds
            is_known = action.choices is None or value in action.choices
            if not (is_known and isinstance(value, kinds)):
                raise TypeError(f"--{action.dest} is {value!r}")

    def error(self, message):
        unknown = message.partition("unrecognized arguments: ")[2].split()
        message += "".join(self._hint(word) for word in unknown if word.startswith("-"))
        self.exit(2, f"{self.prog}: {message} (--help lists all flags)\n")

    def _hint(self, word):
        """Return a suggestion for an unknown flag; empty if there is none."""
        word = word.partition("=")[0].lstrip("-").replace("-", "_")
        names = [option[2:] for option in self._option_string_actions if option[:2] == "--"]
        similar = [name for name in names if word.lower() in ALIASES.get(name, "").split()]
        # Without dashes, which would make all flags alike.
        similar = similar or difflib.get_close_matches(word, names, 1)
        others = [p.prog for p in Parser.all if f"--{word}" in p._option_string_actions]
        hint = f"; did you mean {' or '.join(f'--{name}' for name in similar)}?" if similar else ""
        if others and not hint.endswith(f" --{word}?"):
            hint += (
                f"; --{word} is a flag of {others[0]}: add it to {self.prog}, too "
                f"(docs/environment.md), or start {others[0]} yourself"
            )
        return hint


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not the False of a switch, nor None."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=30, width=100)

    def _get_default_metavar_for_optional(self, action):
        kind = getattr(action.type, "kind", action.type)
        return {int: "N", float: "X"}.get(kind, "TEXT")

    def _get_help_string(self, action):
        if action.default is None or isinstance(action.default, bool):
            return action.help
        return super()._get_help_string(action)


def positive(kind):
    """Return a type: an int or a float above 0."""
    return _checked(kind, lambda value: 0 < value < float("inf"), "must be positive")


def non_negative(kind):
    """Return a type: an int or a float of at least 0."""
    return _checked(kind, lambda value: 0 <= value < float("inf"), "must not be negative")


def folder_name(text):
    """A type: the name of one folder."""
    if not text.isprintable() or "/" in text or text.strip() in ("", ".", ".."):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not valid: it must be the name of one folder in --savedir, with no slash"
        )
    return text


def _whole(text):
    """Return an int, also of 5e6."""
    try:
        return int(text)
    except ValueError:
        if not float(text).is_integer():
            raise
        return int(float(text))


def _checked(kind, is_valid, rule):
    def parse(text):
        value = _whole(text) if kind is int else kind(text)
        if not is_valid(value):
            raise argparse.ArgumentTypeError(f"{text} is not valid: it {rule}")
        return value

    parse.kind = kind
    parse.__name__ = kind.__name__  # for the message where `kind` refuses the text
    return parse


finite = _checked(float, math.isfinite, "must be finite")
fraction = _checked(float, lambda value: 0 <= value <= 1, "must be from 0 to 1")


def value_of(name, arguments):
    """Return the value of a flag on a command line; None where it is not there."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}")
    return getattr(parser.parse_known_args(arguments)[0], name)
