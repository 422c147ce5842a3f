# SPDX-License-Identifier: Apache-2.0
"""--compile: the same results, plain names, and functions that cannot be compiled."""

import logging
from types import SimpleNamespace

import pytest
import torch
from deadline import Thread
from torch import nn
from torch._inductor import metrics

from beast.errors import FlagError
from beast.learners import compiling

FLAGS = SimpleNamespace(compile=True)


@compiling.compiled
def compute_loss(flags, net, x):
    return (net(x) - 1).square().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_compiled_loss_has_the_same_gradient_and_plain_names(dtype):
    net, x = nn.Linear(5, 3).to(dtype), torch.randn(7, 5, dtype=dtype)
    losses, gradients, names = [], [], list(net.state_dict())
    for compiled in (False, True):
        net.zero_grad()
        losses.append(compute_loss(SimpleNamespace(compile=compiled), net, x=x))
        num_kernels = metrics.generated_kernel_count
        losses[-1].backward()  # compiles nothing: who could run it as it is?
        assert metrics.generated_kernel_count == num_kernels
        gradients.append([p.grad.clone() for p in net.parameters()])
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)
    assert list(net.state_dict()) == names


def test_who_compiles_has_no_processes_for_it():
    from torch._inductor import config

    assert Thread(lambda: config.compile_threads).result() == 1  # of other threads, too


@pytest.fixture
def refusing(monkeypatch):
    """torch.compile that refuses at the first call, as it does."""

    def compile_it(function):
        def refuse(*args):
            raise torch._dynamo.exc.Unsupported("this branch depends on data\nand more")

        return refuse

    monkeypatch.setattr(torch, "compile", compile_it)


def test_what_cannot_be_compiled_runs_as_it_is_and_says_so(refusing, caplog):
    @compiling.compiled
    def double(flags, x):
        return 2 * x

    assert [double(FLAGS, x) for x in (1, 2, 3)] == [2, 4, 6]
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert line == "double cannot be compiled, and runs as it is: this branch depends on data"


def test_an_error_of_the_function_itself_is_raised(refusing):
    @compiling.compiled
    def fail(flags):
        raise KeyError("no such row")

    with pytest.raises(KeyError, match="no such row"):
        fail(FLAGS)


def test_without_a_compiler_it_is_refused(monkeypatch):
    compiling.check_compiler(FLAGS)
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    with pytest.raises(FlagError, match="--compile finds no C\\+\\+ compiler: install g\\+\\+"):
        compiling.check_compiler(FLAGS)
    compiling.check_compiler(SimpleNamespace(compile=False))
