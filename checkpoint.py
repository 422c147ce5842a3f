# SPDX-License-Identifier: Apache-2.0
"""What a run has learned, in a file: read with every doubt, and gone on from to the bit.

A checkpoint holds the weights, the states of optimizer, schedule and generators, what was counted
(`stats`), and the flags. Experiment.save_checkpoint writes it.
"""

import logging
import pathlib
import random
import re
import time

import numpy as np
import torch

# Of this call alone, never taken over from a checkpoint.
CALL_FLAGS = (
    *("mode", "xpid", "savedir", "disable_checkpoint", "disable_cuda", "num_buffers"),
    *("pipes_basename", "write_profiler_trace", "autotune", "best"),
    *("record_video", "evaluator", "render_mode", "greedy", "wandb"),
    # Nor shall a checkpoint that came from elsewhere choose which secret is sent to its servers.
    *("auth_token_file", "tls_cert", "tls_key", "tls_ca"),
)
NEWEST, BEST = "model.tar", "best.tar"


class FlagError(ValueError):
    """Flags that contradict each other or the machine; the message says what to change."""


def run_path(flags):
    return pathlib.Path(flags.savedir).expanduser() / flags.xpid


def pack(flags, model, optimizer, scheduler, stats):
    """Return a checkpoint, made of tensors and plain values; the tensors are not copies."""
    return {
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "scheduler_state_dict": scheduler.state_dict(),
        "step": stats["step"],
        "time": time.time(),
        "stats": stats,
        "random_states": random_states(),
        "flags": vars(flags),
        "net": type(model).__name__,
    }


def pack_weights(flags, model, step):
    """Return a checkpoint that can be tested, not gone on from; the weights are copies."""
    weights = {
        name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()
    }
    return {
        "model_state_dict": weights,
        "optimizer_state_dict": {},
        "scheduler_state_dict": {},
        "step": step,
        "time": time.time(),
        "stats": {"step": step},
        "random_states": {},
        "flags": vars(flags),
        "net": type(model).__name__,
    }


def load(flags, name=NEWEST):
    """Return a checkpoint of the run as a dict, its tensors on the CPU; None if it has none.

    Only tensors and plain values are read: a file that holds code is refused, and does not run it.
    """
    path = run_path(flags) / name
    if not path.exists():
        return None
    advice = "move it away or choose another --xpid"
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        code = re.search(r"GLOBAL (\S+)|whose module (\S+) is blocked", str(error))
        if code:
            raise FlagError(
                f"cannot read the checkpoint {path}: it is none of ours, as it holds code, which "
                f"was not run ({code[1] or code[2]}); {advice}"
            ) from None
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise FlagError(
            f"cannot read the checkpoint {path}: it is damaged, or none at all ({reason}); {advice}"
        ) from error
    wanted = {"model_state_dict", "optimizer_state_dict", "scheduler_state_dict", "step", "stats"}
    wanted |= {"random_states", "flags"}
    if not isinstance(checkpoint, dict) or not wanted <= checkpoint.keys():
        lacks = sorted(wanted - checkpoint.keys()) if isinstance(checkpoint, dict) else "all"
        raise FlagError(f"cannot use the checkpoint {path}: it lacks {lacks}; {advice}")
    program = checkpoint["flags"].get("program", flags.program)
    if program != flags.program:
        raise FlagError(
            f"the checkpoint {path} is of {program}, but this is {flags.program}: run {program}, "
            "or choose another --xpid"
        )
    return checkpoint


def restore_weights(model, checkpoint, flags):
    """Load a checkpoint's weights, or say in what they and the flags of then differ from these."""
    saved, own = checkpoint["model_state_dict"], model.state_dict()
    shapes = {
        name: [str(list(d[name].shape)) if name in d else "missing" for d in (saved, own)]
        for name in own | saved
    }
    lines = [
        f"{name}: {a} in the checkpoint, {b} in the net"
        for name, (a, b) in shapes.items()
        if a != b
    ]
    if not lines:
        model.load_state_dict(saved)
        return
    if len(lines) > 10:
        lines[10:] = [f"and {len(lines) - 10} more"]
    differing = [
        f"--{key} was {checkpoint['flags'][key]!r}, is {value!r}"
        for key, value in sorted(vars(flags).items())
        if key in checkpoint["flags"].keys() - CALL_FLAGS and checkpoint["flags"][key] != value
    ]
    raise FlagError(
        f"the checkpoint in {run_path(flags)}, a {checkpoint.get('net', 'net')} of "
        f"{checkpoint['flags']['env']}, does not fit this {type(model).__name__} of {flags.env} "
        f"({'; '.join(differing) or 'the environment or the code of Net has changed'}); undo that "
        "or choose another --xpid\n  " + "\n  ".join(lines)
    )


def resume(flags, model, optimizer, scheduler, stats):
    """Restore everything from the run's checkpoint, if there is one; `stats` in place.

    What the flags say of the optimizer, then or now, holds from here on.
    """
    checkpoint = load(flags)
    if checkpoint is None:
        return
    restore_weights(model, checkpoint, flags)
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    base_lrs = scheduler.base_lrs
    scheduler.load_state_dict(checkpoint["scheduler_state_dict"])
    scheduler.base_lrs = base_lrs
    stats.update(checkpoint["stats"])
    if stats["step"] >= flags.total_steps:
        raise FlagError(
            f"{run_path(flags)} has done its {stats['step']:,} steps: raise --total_steps "
            f"({flags.total_steps:,}) to go on, or choose another --xpid"
        )
    for group, new, base_lr, schedule in zip(
        optimizer.param_groups, settings, base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group.update(new, lr=base_lr * schedule(scheduler.last_epoch))
    restore_random_states(checkpoint["random_states"])
    logging.info("Resuming at step %s", f"{stats['step']:,}")


def random_states():
    """Return the states of all generators of this process, made of what weights_only loads."""
    numpy_state = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]],
        "python": random.getstate(),
    }


def restore_random_states(states):
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_initialized() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    np.random.set_state(tuple(states["numpy"]))
    version, state, gauss = states["python"]
    random.setstate((version, tuple(state), gauss))
