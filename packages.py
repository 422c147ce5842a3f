# SPDX-License-Identifier: Apache-2.0
"""Which command installs a package that is missing.

The programs import this before everything else, since anything else may be missing: from then on
an import of ours that fails ends the program with that command instead of a traceback.
"""

import os
import sys

# What the requirements name, by what is imported.
PACKAGES = {
    "ale_py": "ale-py",
    "cv2": "opencv-python-headless",
    "google": "protobuf",
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "gymnasium": "gymnasium",
    "numpy": "numpy",
    "tensorboard": "tensorboard",
    "torch": "torch",
    "tqdm": "tqdm",
}


def advice(error):
    """Return how to install what is missing, to be put behind the error; else an empty text."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    pip = f"{sys.executable} -m pip install"
    if error.name not in PACKAGES:
        return f"; if its package has the same name: {pip} {error.name.partition('.')[0]}"
    is_server = _program() == "polybeast_env.py"
    file = "requirements-env.txt" if is_server else "requirements.txt"
    file = os.path.join(os.path.dirname(os.path.abspath(__file__)), file)
    return f"; {PACKAGES[error.name]} and what else is needed: {pip} -r {file}"


def _program():
    return os.path.basename(sys.argv[0])


def _tell(kind, error, traceback):
    if isinstance(error, ModuleNotFoundError) and error.name in PACKAGES:
        print(f"{_program()}: {error}{advice(error)}", file=sys.stderr)
    else:
        _usual_hook(kind, error, traceback)


_usual_hook, sys.excepthook = sys.excepthook, _tell
