# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what they hold, checking and reading them, resuming to the last bit.

A checkpoint holds the weights, the states of optimizer, schedule and random generators, the
learner's `stats`, and the flags.
"""

import contextlib
import io
import logging
import math
import pathlib
import re
import time

import torch

from beast.errors import FlagError
from beast.nest import map_nest
from beast.processes.randomness import random_states, restore_random_states

# Flags of one call, which a checkpoint does not bring back.
NOT_RESUMED = (
    "mode", "xpid", "savedir", "disable_checkpoint", "disable_cuda", "pipes_basename",
    "write_profiler_trace", "compile", "best", "end_with_stdin", "record_video", "result_file",
    "render_mode", "wandb", "chosen", "fp32_devices", "rank", "num_learners", "elastic",
    # Nor shall a checkpoint from elsewhere open a port, or choose which secret is sent to servers.
    "listen", "insecure", "tls_cert", "tls_key", "tls_ca", "auth_token_file",
)  # fmt: skip
NEWEST, BEST = "model.tar", "best.tar"
# What a checkpoint must hold, and of which types.
PARTS = {"step": 0, "random_states": {}, "flags": {}, "model_state_dict": {}}
PARTS |= {"optimizer_state_dict": {}, "scheduler_state_dict": {}, "stats": {"step": 0}}
PARTS["stats"] |= {"episode_returns": [], "game_returns": []}
PARTS["stats"] |= {"skipped_updates": 0, "skipped_in_a_row": 0}
ADVICE = "move it away or choose another --xpid"


def run_path(flags):
    return pathlib.Path(flags.savedir).expanduser() / flags.xpid


def plain_name(name):
    """Return the name of a weight without the prefix that torch.compile adds."""
    return name.replace("_orig_mod.", "")


def _describe_net(model):
    """Return the weights of a net by their plain names, and the name of its class."""
    weights = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
    return weights, type(getattr(model, "_orig_mod", model)).__name__


def pack(flags, learner):
    """Return a checkpoint, made of tensors and plain values; the tensors are not copies."""
    weights, net = _describe_net(learner.model)
    return {
        "model_state_dict": weights,
        # Of several optimizers these are dicts by their names.
        "optimizer_state_dict": map_nest(lambda o: o.state_dict(), learner.optimizer),
        "scheduler_state_dict": map_nest(lambda s: s.state_dict(), learner.scheduler),
        "step": learner.step,
        "time": time.time(),
        "stats": learner.stats,
        "random_states": random_states(),
        "flags": vars(flags),
        "net": net,
        "optimizer": learner.optimizer_name,
    }


def to_bytes(content, *path):
    """Return a checkpoint, or the part of one at `path`, as the io.BytesIO that `load` can read.

    Raises:
      FlagError: a part could not be loaded again; the message names it.
    """
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
        buffer.seek(0)
        try:
            torch.load(buffer, map_location="meta", weights_only=True)  # which skips the tensors
        except NotImplementedError:  # quantized tensors cannot be loaded on meta
            buffer.seek(0)
            torch.load(buffer, map_location="cpu", weights_only=True)
        buffer.seek(0)
    except MemoryError:
        raise
    except Exception as error:
        parts = dict(enumerate(content)) if isinstance(content, (list, tuple)) else content
        for key, part in parts.items() if isinstance(parts, dict) else ():
            to_bytes(part, *path, key)
        name = " > ".join(map(str, path)).replace("flags > ", "--") or "the checkpoint"
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise FlagError(
            f"{name} is a {type(content).__module__}.{type(content).__qualname__}, with which no "
            f"checkpoint can be loaded ({reason:.100}): make it a tensor, a number, a text, or a "
            "list or dict of them (a flag by the `type` of its add_argument)"
        ) from None
    return buffer


def pack_weights(flags, model, step):
    """Return a checkpoint for --mode test, which cannot be resumed; the weights are copies."""
    weights, net = _describe_net(model)
    return {
        "model_state_dict": map_nest(
            lambda x: x.detach().to("cpu", copy=True) if torch.is_tensor(x) else x, weights
        ),
        "optimizer_state_dict": {},
        "scheduler_state_dict": {},
        "step": step,
        "time": time.time(),
        "stats": {"step": step},
        "random_states": {},
        "flags": vars(flags),
        "net": net,
    }


def load(flags, name=NEWEST):
    """Return a checkpoint of the run as a dict, its tensors on the CPU; None if it has none.

    Only tensors and plain values are read: a file that holds code is refused, and does not run it.
    """
    path = run_path(flags) / name
    try:
        if not path.exists():
            return None
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise FlagError(f"cannot read the checkpoint {path}, perhaps for now: {error}") from None
    except Exception as error:
        code = re.search(r"GLOBAL (\S+)|whose module (\S+) is blocked", str(error))
        if code:
            raise FlagError(
                f"cannot read the checkpoint {path}: it holds code, which "
                f"was not run ({code[1] or code[2]}); {ADVICE}"
            ) from None
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise FlagError(
            f"cannot read the checkpoint {path}: it is damaged, or none at all ({reason}); {ADVICE}"
        ) from None
    if not isinstance(checkpoint, dict) or not PARTS.keys() <= checkpoint.keys():
        lacks = sorted(PARTS.keys() - checkpoint.keys()) if isinstance(checkpoint, dict) else "all"
        raise FlagError(f"cannot use the checkpoint {path}: it lacks {lacks}; {ADVICE}")
    with refusing(path):
        check_types(checkpoint, PARTS)
        stats = checkpoint["stats"]
        for name in ("episode_returns", "game_returns"):
            math.fsum(stats.get(name, ()))  # raises where one is no number
        if not isinstance(checkpoint["flags"].get("env"), str | None):
            raise TypeError("--env is no text")
        if not 0 <= checkpoint["step"] == stats["step"]:
            raise ValueError(f"its step is {checkpoint['step']}, and {stats['step']} in its stats")
    program = checkpoint["flags"].get("program", flags.program)
    if program != flags.program:
        raise FlagError(
            f"the checkpoint {path} is of {program}, but this is {flags.program}: run {program}, "
            "or choose another --xpid"
        )
    return checkpoint


@contextlib.contextmanager
def refusing(path):
    """Context manager that turns errors about a checkpoint into a FlagError that names it."""
    try:
        yield
    except FlagError:
        raise
    except Exception as error:
        raise FlagError(
            f"cannot use the checkpoint {path}: it is damaged ({type(error).__name__}: {error}); "
            f"{ADVICE}"
        ) from None


def restore_weights(model, checkpoint, flags):
    """Load a checkpoint's weights, or raise a FlagError that says what differs."""
    saved = {plain_name(name): tensor for name, tensor in checkpoint["model_state_dict"].items()}
    own, net = _describe_net(model)
    shapes = {
        name: [_describe(d[name]) if name in d else "missing" for d in (saved, own)]
        for name in own | saved
    }
    lines = [
        f"{name}: {a} in the checkpoint, {b} in the net"
        for name, (a, b) in shapes.items()
        if a != b
    ]
    if not lines:
        weights = model.state_dict()  # which has the versions of modules, too
        weights.update({name: saved[plain_name(name)] for name in weights})
        model.load_state_dict(weights)
        return
    if len(lines) > 10:
        lines[10:] = [f"and {len(lines) - 10} more"]
    saved_flags = checkpoint["flags"]
    left = {*NOT_RESUMED, *saved_flags.get("chosen", [])}
    differing = [
        f"--{key} was {saved_flags[key]!r}, is {value!r}"
        for key, value in sorted(vars(flags).items())
        if key in saved_flags.keys() - left and saved_flags[key] != value
    ]
    raise FlagError(
        f"the checkpoint in {run_path(flags)}, a {checkpoint.get('net', 'net')} of "
        f"{checkpoint['flags'].get('env')}, does not fit this {net} of {flags.env} "
        f"({'; '.join(differing) or 'the environment or the code of Net has changed'}); undo that "
        "or choose another --xpid\n  " + "\n  ".join(lines)
    )


def _describe(weight):
    if not torch.is_tensor(weight):  # of get_extra_state
        return type(weight).__name__
    # A weight of another dtype would be cast without a word.
    return f"{list(weight.shape)} {weight.dtype}".replace("torch.", "").removesuffix(" float32")


def resume(flags, learner):
    """Restore a Learner from the run's checkpoint; return whether there is one.

    The optimizer uses the flags of this run, not the settings that the checkpoint holds.
    """
    checkpoint = load(flags)
    if checkpoint is not None:
        with refusing(run_path(flags) / NEWEST):
            _restore(flags, learner, checkpoint)
    return checkpoint is not None


def _restore(flags, learner, checkpoint):
    restore_weights(learner.model, checkpoint, flags)
    old, new = checkpoint["flags"], vars(flags)
    before = old.get("num_learners", 1), old.get("batch_size", 1)
    now = new.get("num_learners", 1), new.get("batch_size", 1)
    # The number of --elastic learners varies, and was not saved.
    is_elastic = old.get("elastic") or new.get("elastic")
    if math.prod(before) != math.prod(now) and not is_elastic:
        logging.warning(
            f"An update was of {before[0]} x {before[1]} rollouts (learners x --batch_size), and "
            f"now is of {now[0]} x {now[1]}: another --learning_rate may be better"
        )
    _check_optimizer(learner, checkpoint, flags)
    _check_order(learner.model, checkpoint, flags)
    learner.stats.update(checkpoint["stats"])  # of which the schedules make learning rates
    states = checkpoint["optimizer_state_dict"], checkpoint["scheduler_state_dict"]
    map_nest(restore_optimizer, learner.optimizer, learner.scheduler, *states)
    restore_random_states(checkpoint["random_states"])


def _check_order(model, checkpoint, flags):
    """Raise a FlagError if parameters are in another order, by which optimizers have states."""
    saved = list(map(plain_name, checkpoint["model_state_dict"]))  # buffers, too
    own = [plain_name(name) for name, _ in model.named_parameters()]
    own, saved = [n for n in own if n in saved], [n for n in saved if n in own]
    if saved != own:
        at = next(i for i, pair in enumerate(zip(saved, own, strict=True)) if len(set(pair)) > 1)
        raise FlagError(
            f"Net defines {own[at]} where the checkpoint in {run_path(flags)} has {saved[at]}: "
            "undo the change of the order, or choose another --xpid"
        )


def _check_optimizer(learner, checkpoint, flags):
    """Raise a FlagError if a checkpoint is of another optimizer, or of other optimizers."""
    name = learner.optimizer_name
    # Older ones do not name it.
    saved = checkpoint.get("optimizer", "one optimizer" if isinstance(name, dict) else name)
    if saved == name:
        states = checkpoint["optimizer_state_dict"], pack(flags, learner)["optimizer_state_dict"]
        saved, name = (map_nest(_describe_optimizer, name, state) for state in states)
    if saved != name:
        raise FlagError(
            f"the checkpoint in {run_path(flags)} is of {saved}, but this is {name}: "
            "choose another --xpid, or undo what was changed in create_optimizer"
        )


def _describe_optimizer(name, state):
    sizes = [len(group["params"]) for group in state["param_groups"]]
    return f"{name} with groups of {sizes} parameters"


def check_types(saved, own, name=""):
    """Raise a TypeError if a part of a saved nest has another type or shape than ours."""
    kind = (int, float) if isinstance(own, float) else type(own)
    if isinstance(own, dict) and isinstance(saved, dict):
        for key in own.keys() & saved.keys():
            check_types(saved[key], own[key], key)
    elif isinstance(own, list) and isinstance(saved, list):
        for parts in zip(saved, own, strict=False):
            check_types(*parts, name)
    elif own is not None and not isinstance(saved, kind):
        raise TypeError(f"{name!r} is of type {type(saved).__name__}, not {type(own).__name__}")
    elif torch.is_tensor(own) and saved.shape != own.shape:
        raise TypeError(f"{name!r} has shape {list(saved.shape)}, not {list(own.shape)}")


def restore_optimizer(optimizer, scheduler, optimizer_state, scheduler_state):
    """Load the states of optimizer and scheduler, but keep the optimizer's current settings."""
    check_types(optimizer_state["state"], optimizer.state_dict()["state"])
    check_types(scheduler_state, scheduler.state_dict())
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    # Before the state is loaded, as it depends on them where it goes, on the CPU or to a GPU.
    saved = optimizer_state["param_groups"]
    groups = [group | new for group, new in zip(saved, settings, strict=True)]
    optimizer.load_state_dict(optimizer_state | {"param_groups": groups})
    base_lrs = scheduler.base_lrs
    scheduler.load_state_dict(scheduler_state)
    scheduler.base_lrs = base_lrs
    for group, base_lr, schedule in zip(
        optimizer.param_groups, base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = base_lr * schedule(scheduler.last_epoch)
