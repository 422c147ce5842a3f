# SPDX-License-Identifier: Apache-2.0
"""bad_batch.tar: the batch of an update that was not finite, for whoever wants to know why."""

import io

import torch

from beast.atomic_files import replace_file
from beast.environments import map_nest

LARGE = 1e6


def save(folder, name, batch, update):
    """Save a Batch and the metrics of its update; return where it is, or why it is nowhere.

    Args:
      folder: of the run.
      name: of the learner, where it is not the one that has the folder; else empty.
    """
    path = folder / (f"bad_batch.{name}.tar" if name else "bad_batch.tar")
    content = io.BytesIO()
    agent_state = map_nest(lambda x: x.cpu(), batch.agent_state)
    saved = {"batch": batch.cpu_rows, "agent_state": agent_state}
    torch.save(saved | {"sources": batch.sources, "metrics": update}, content)
    try:
        replace_file(path, content.getbuffer())
    except OSError as error:  # which must not hide what ends the run
        return f"could not be written into {path} ({error.strerror or error})"
    return f"is in {path}"


def suspects(batch):
    """Say which rows and outputs of a Batch have numbers that are not finite, or are very large."""
    names = set()
    for name, nest in batch.cpu_rows.items():
        map_nest(lambda x, name=name: (x.double().abs() <= LARGE).all() or names.add(name), nest)
    return f"Beyond {LARGE:g} or not finite in it: {', '.join(sorted(names)) or 'nothing'}"
