# SPDX-License-Identifier: Apache-2.0
import pytest
import torch


@pytest.fixture(autouse=True)
def one_compute_thread():
    """Tensors here are tiny, and the cores belong to the programs under test."""
    torch.set_num_threads(1)
