# SPDX-License-Identifier: Apache-2.0
import signal

import pytest
import torch

# Background jobs of a shell inherit that it is ignored, and so would the programs under test.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_compute_thread():
    """Tensors here are tiny, and the cores belong to the programs under test."""
    torch.set_num_threads(1)
