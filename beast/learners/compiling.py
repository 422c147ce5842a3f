# SPDX-License-Identifier: Apache-2.0
"""--compile: losses and their gradients as machine code made for this net, by torch.compile."""

import functools
import logging
import os

import torch
import torch._functorch.config

from beast.errors import FlagError

# Else each process that compiles has processes of its own for it, which outlive one that is killed.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def check_compiler(flags):
    """Raise FlagError where --compile finds no compiler."""
    if not flags.compile:
        return
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes seconds to import

    try:
        get_cpp_compiler()
    except Exception as error:
        raise FlagError(f"--compile finds no C++ compiler: install g++ ({error})") from None


def compiled(function):
    """Have a function compiled at its first call if the flags, its first argument, say so.

    What cannot be compiled runs as it is, which the log says once. The function should have no
    other effects than its result: a part of it may have run before that is known.
    """
    machine_code = None

    @functools.wraps(function)
    def run(flags, *args, **kwargs):
        nonlocal machine_code
        if not flags.compile:
            return function(flags, *args, **kwargs)
        if machine_code is None:
            logging.info("Compiling %s, for up to a minute", function.__name__)
            # Else the gradient is compiled within backward(), where nothing can run as it is.
            torch._functorch.config.force_non_lazy_backward_lowering = True
            machine_code = torch.compile(function)
        try:
            return machine_code(flags, *args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            result = function(flags, *args, **kwargs)  # raises what is wrong with itself
            reason = str(error).strip().partition("\n")[0]
            logging.warning("%s cannot be compiled, and runs as it is: %s", run.__name__, reason)
            machine_code = function
            return result

    return run
