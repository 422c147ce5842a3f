# SPDX-License-Identifier: Apache-2.0
"""The random number generators of a process: seeding, saving and restoring them."""

import os
import random

import numpy as np
import torch

from beast.errors import FlagError


def seed_generators(seed):
    """Seed all generators of this process from a sequence of ints."""
    words = np.random.SeedSequence(seed).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(words[1])
    torch.manual_seed(int(words[2]))


def make_deterministic(flags):
    """With --deterministic, have PyTorch use deterministic algorithms.

    Operations that have none raise RuntimeError from here on.

    Raises:
      FlagError: --eval_interval is given, too.
    """
    if not flags.deterministic:
        return
    if flags.eval_interval:
        raise FlagError(
            "--eval_interval logs evaluations at times that vary, so --deterministic could not "
            "make equal logs: leave out one of them"
        )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS refuses
    torch.use_deterministic_algorithms(True)


def random_states():
    """Return the states of all generators of this process, of types that weights_only loads."""
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
