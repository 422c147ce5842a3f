# SPDX-License-Identifier: Apache-2.0
import collections
import multiprocessing
import os
import signal
import subprocess
import sys

# Tensors here are tiny, and programs under test, several at once, would have one another's threads
# wait for a core, spinning. Read once, when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from forks import apply, load  # noqa: F401 - fixtures

# Background jobs of a shell inherit that it is ignored, and so would the programs under test.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Whichever test starts the fork server of this process: its processes then start in a moment.
multiprocessing.set_forkserver_preload(["torch", "gymnasium", "ale_py"])


def pytest_collection_modifyitems(items):
    """Begin with the files of the most whole programs, so that workers end at about one time."""
    count = collections.Counter(item.path for item in items if item.get_closest_marker("whole"))
    items.sort(key=lambda item: -count[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """What is printed and logged in tests is not always UTF-8, which is all that xdist can send."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory):
    """Programs that are killed leave sockets, and torchrun its logs, where pytest removes them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.getbasetemp()))
        yield


@pytest.fixture(autouse=True)
def algorithms_of_any_kind():
    """A run with --deterministic leaves PyTorch so."""
    yield
    if torch := sys.modules.get("torch"):
        torch.use_deterministic_algorithms(False)


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
