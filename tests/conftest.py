# SPDX-License-Identifier: Apache-2.0
import signal
import subprocess

import pytest
import torch

# Background jobs of a shell inherit that it is ignored, and so would the programs under test.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_compute_thread():
    """Tensors here are tiny, and the cores belong to the programs under test."""
    torch.set_num_threads(1)


@pytest.fixture
def small_disk(tmp_path):
    """A folder that holds a megabyte: a file system of its own, which only root can make."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder]
    try:
        subprocess.run(words, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small file system: {error}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)
