# SPDX-License-Identifier: Apache-2.0
"""What a learner counts, and when its threads stop."""

import argparse
import functools
import threading

import numpy as np
import pytest
import torch
from small_run import create_batch, create_learner

import monobeast
import polybeast
from beast.actors.weights import Version
from beast.errors import FlagError
from beast.learners.devices import get_device
from beast.learners.learner import Learner, create_state, raise_squares


def create(total_steps=1000):
    return create_learner(argparse.Namespace(learning_rate=0.5, total_steps=total_steps))


def test_updates_count_steps_returns_and_the_learning_rate():
    learner = create()
    learner.optimizer.step()
    learner.count(250, [1.0, 2.0], [])
    assert learner.step == learner.stats["step"] == 250
    assert learner.optimizer.param_groups[0]["lr"] == 0.5 * 0.75
    learner.count(250, [3.0] * 99, [4.0])
    assert learner.step == 500 and learner.optimizer.param_groups[0]["lr"] == 0.25
    assert learner.stats["episode_returns"] == [2.0] + [3.0] * 99  # the last hundred
    assert learner.stats["game_returns"] == [4.0]


def test_a_scheduler_of_torch_in_place_of_a_function_is_named():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(FlagError, match="returned a LinearLR as schedule: return a function"):
        Learner(model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer), Version())


@pytest.mark.parametrize("number", [np.float64, torch.tensor])
def test_a_schedule_may_return_any_number(number):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    Learner(model, optimizer, lambda step: number(0.5), Version())
    assert type(optimizer.param_groups[0]["lr"]) is float


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    ],
)
def test_an_optimizers_state_from_the_start_changes_no_learning(make):
    inputs, found = torch.randn(5, 4, 3), []
    for is_early in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 1)
        optimizer = make(model.parameters())
        if is_early:
            create_state(optimizer)
            assert len(optimizer.state) == 2 and optimizer.param_groups[0]["lr"] == 0.1
            names = {name for state in optimizer.state.values() for name in state}
        for x in inputs:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert names == {name for state in optimizer.state.values() for name in state}
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.NAdam(p, lr=0.1),
        lambda p: torch.optim.Rprop(p, lr=0.1),
        lambda p: torch.optim.ASGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    ],
)
def test_optimizers_with_state_of_the_first_step_are_refused(make):
    optimizer = make(torch.nn.Linear(3, 1).parameters())
    with pytest.raises(FlagError, match=rf"state of {type(optimizer).__name__} does not begin"):
        create_state(optimizer)


def test_an_optimizer_of_what_the_net_does_not_have_is_refused():
    model, predictor = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    own, both = (torch.optim.SGD(p, lr=0.1) for p in (model.parameters(), predictor.parameters()))
    both.add_param_group({"params": list(model.parameters())})
    for optimizer in (both, {"own": own, "both": both}):
        with pytest.raises(FlagError, match="SGD has parameters that are not of Linear, so they"):
            Learner(model, optimizer, lambda step: 1, None)
    Learner(model, {"own": own}, lambda step: 1, None)


def test_parameters_without_an_optimizer_are_told(caplog):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    optimizers = {str(i): torch.optim.SGD(model[i].parameters(), lr=0.1) for i in range(2)}
    Learner(model, optimizers, lambda step: 1, None)
    assert not caplog.records
    Learner(model, optimizers["1"], lambda step: 1, None)
    assert "No optimizer has 0.weight, 0.bias: such parameters" in caplog.text
    caplog.clear()
    model[0].requires_grad_(False)
    Learner(model, optimizers["1"], lambda step: 1, None)
    assert not caplog.records


def test_other_learners_get_buffers_that_no_checkpoint_has():
    learners = [create() for _ in range(2)]
    for value, learner in enumerate(learners):
        learner.model.register_buffer("noise", torch.tensor([float(value)]), persistent=False)
    learners[1].load_state(learners[0].state())
    assert learners[1].model.noise == 0


def test_learning_is_on_the_cpu_without_cuda(monkeypatch):
    for available, disabled, device in ((1, 0, "cuda:0"), (1, 1, "cpu"), (0, 0, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert get_device(argparse.Namespace(disable_cuda=disabled)) == torch.device(device)


@pytest.mark.parametrize(
    "make", [torch.optim.RMSprop, torch.optim.Adam, functools.partial(torch.optim.Adam, fused=True)]
)
def test_squares_of_gradients_do_not_become_denormal(make):
    found = []
    for is_raised in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 1)
        optimizer = make(model.parameters(), lr=0.1, eps=1e-8)
        if is_raised:
            raise_squares(optimizer)
        for scale in [1.0] + [0.0] * 3 + [1e-3, 1.0]:
            model.weight.grad = scale * torch.tensor([[1.0, -2.0, 0.0]])  # the last one is dead
            model.bias.grad = torch.full((1,), scale)
            optimizer.step()
            squares = [s.get("square_avg", s.get("exp_avg_sq")) for s in optimizer.state.values()]
            assert len(squares) == 2 and (min(x.min() for x in squares) > 1.2e-38) == is_raised
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*found)


@pytest.mark.parametrize("program", [monobeast, polybeast], ids=lambda p: p.__name__)
def test_mixed_batches_are_learned_from_until_the_last_step(monkeypatch, program):
    learner, mixed, calls, stored, recorded = create(), create_batch(7), [], [], []
    run, update = argparse.Namespace(stop=threading.Event()), ({"steps": 1000.0}, mixed)

    def record(*arguments):
        recorded.append(arguments)
        run.stop.set()  # that was the last step

    run.record = record
    module = program.rollout_buffers if program is monobeast else program
    monkeypatch.setattr(module, "read_batches", lambda *_: [create_batch(), create_batch()])
    monkeypatch.setattr(program, "learn", lambda *args: calls.append(args) or update[0])
    system = (None, None) if program is monobeast else (argparse.Namespace(queue=None),)
    replay = argparse.Namespace(mix=lambda _: mixed, store=lambda *args: stored.append(args))
    version = learner.weights.version
    program.batch_and_learn(None, learner, *system, replay, run)
    ((_, model, rows, state, optimizer, group, *_),) = (
        calls  # no thread learns from the other batch
    )
    assert rows is mixed.rows and state is mixed.agent_state
    assert (model, optimizer, group) == (learner.model, learner.optimizer, learner.group)
    assert stored == [update[::-1]] and recorded == [update]
    assert learner.weights.version == version + 1
