# SPDX-License-Identifier: Apache-2.0
"""PolyBeast's core: queues, dynamic batching and the actor pool (compiled), environment servers.

Names are loaded when they are first used: environment servers need no compiled part.
"""

import importlib

MAX_STREAMS = 16  # streams per server
MAX_ENVS = 4096  # environments per stream

_MODULES = {
    "Server": "libtorchbeast.server",
    "Dialer": "libtorchbeast.dialer",
    "EnvClient": "libtorchbeast.env_client",
} | dict.fromkeys(
    (
        "ActorPool",
        "AsyncError",
        "Batch",
        "BatchingQueue",
        "ClosedBatchingQueue",
        "DynamicBatcher",
        "Listener",
        "query_server",
    ),
    "libtorchbeast._C",
)
__all__ = sorted(_MODULES)


def __getattr__(name):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(_MODULES[name])
    except ImportError as error:
        if _MODULES[name] != "libtorchbeast._C":
            raise
        raise ImportError(
            f"{name} is in the compiled part of libtorchbeast, which cannot be loaded ({error}); "
            "build it: pip install --no-build-isolation -e . where setup.py is"
        ) from error
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__():
    return sorted(globals().keys() | _MODULES)
