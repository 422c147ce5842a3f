# SPDX-License-Identifier: Apache-2.0
"""A full disk, and what TensorBoard reads."""

import errno

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def fill(folder):
    """Leave no block of a small disk free; return what to remove to have some again."""
    with open(folder / "filler", "wb", buffering=0) as file:
        with pytest.raises(OSError) as error:
            while True:
                file.write(bytes(4096))
    assert error.value.errno == errno.ENOSPC
    return folder / "filler"


def read_events(folder, name="loss"):
    """Return (step, value) of each event that TensorBoard finds, as it would show them."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]
