# SPDX-License-Identifier: Apache-2.0
"""The number format and the threads of nets, and the generators of random numbers."""

import os
import random

import numpy as np
import pytest
import torch
from batches import SPACE, A, make_batch
from catch import MonoNet
from catch_poly import PolyNet
from deadline import Thread

import monobeast
import polybeast
from beast.learners import devices
from beast.learners.devices import computes_in_bf16
from beast.processes.fork_server import all_cores
from beast.processes.randomness import random_states, restore_random_states, seed_generators
from beast.runs.diagnostics import to_floats


@pytest.mark.parametrize("model", ["shallow", "deep"])
@pytest.mark.parametrize("use_lstm", [False, True])
def test_bf16_gives_loss_and_gradients_close_to_fp32(model, use_lstm):
    torch.manual_seed(1)
    net = PolyNet(SPACE, A, use_lstm, model)
    for layer in (net.policy, net.baseline):  # a real policy, real values
        torch.nn.init.normal_(layer.weight, std=0.05)
    batch = make_batch(3)
    gradients, metrics = [], []
    for number_format in ("fp32", "bf16"):
        flags = polybeast.parser.parse_args(["--precision", number_format])
        net.zero_grad()
        loss, all_metrics = polybeast.compute_loss(flags, net, batch, net.initial_state(3))
        loss.backward()
        wide = (torch.float32, torch.float64, torch.int64)
        assert all(m.dtype in wide for m in all_metrics.values())
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
        metrics.append(torch.tensor(list(to_floats(all_metrics).values())))
    # bfloat16 has 8 bits of precision, and a hundred rows average them out.
    torch.testing.assert_close(metrics[1], metrics[0], rtol=0.02, atol=0.2)
    assert not torch.equal(*gradients)
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99
    assert 0.97 < gradients[1].norm() / gradients[0].norm() < 1.03


@pytest.mark.whole
def test_weights_stay_float32_in_bf16():
    flags = monobeast.parser.parse_args(["--precision", "bf16"])
    net = MonoNet(SPACE, A)
    before = net.trunk.layers[0].weight.clone()
    optimizer, _ = monobeast.create_optimizer(flags, net)
    monobeast.learn(flags, net, make_batch(1), (), optimizer)
    assert all(p.dtype == torch.float32 for p in net.parameters())
    assert 0 < (net.trunk.layers[0].weight - before).abs().max() < 1e-1


@pytest.mark.parametrize(
    ("wanted", "knows_bf16", "names", "in_bf16"),
    [
        # Those of learner and actors; a capital letter has it.
        (None, True, "CUDA CPU", "CUDA CPU"),
        (None, True, "CUDA cpu", "CUDA"),
        (None, True, "cuda CPU", "CPU"),
        (None, True, "cpu", ""),
        (None, False, "CPU", ""),
        ("fp32", True, "CUDA CPU", ""),
        ("bf16", False, "cuda cpu", "cuda cpu"),
    ],
)
def test_each_device_has_a_default_precision(
    monkeypatch, caplog, wanted, knows_bf16, names, in_bf16
):
    monkeypatch.setattr(devices, "has_bf16", lambda device: device.type.upper() in names)
    flags = monobeast.parser.parse_args(["--precision", wanted] if wanted else [])
    all_devices = [torch.device(name) for name in names.lower().split()]
    model = torch.nn.Identity()
    model.knows_bf16 = knows_bf16
    devices.choose_precision(flags, model, all_devices)
    enabled = [device.type for device in all_devices if computes_in_bf16(flags, device)]
    assert enabled == in_bf16.lower().split()
    assert flags.precision == ("bf16" if in_bf16 else "fp32")
    assert ("precision" in flags.chosen) == (wanted is None)
    assert ("slower than fp32" in caplog.text) == (wanted == "bf16")


@pytest.mark.parametrize("features", ["avx512_bf16", "amx_bf16", ""])
@pytest.mark.parametrize("is_faster", [True, False])
def test_a_processor_has_bf16_if_it_multiplies_faster_in_it(monkeypatch, features, is_faster):
    capabilities = {"avx512_f": True, "avx512_bf16": False, "cpu_name": "x"}
    capabilities |= {feature: True for feature in features.split()}
    times = {torch.float32: 2.0, torch.bfloat16: 1.0 if is_faster else 3.0}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(devices, "time_of_product", times.get)
    has_bf16 = devices.has_bf16.__wrapped__  # what it answered before is kept
    assert has_bf16(torch.device("cpu")) == (bool(features) and is_faster)
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # as in older torch
    assert not has_bf16(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_timing_a_product_changes_no_other_number_of_threads(monkeypatch, dtype):
    num_threads = torch.get_num_threads()
    multiply, seen = torch.mm, []

    def mm(a, b):
        seen.append((a.dtype, torch.get_num_threads()))
        return multiply(a, b)

    monkeypatch.setattr(torch, "mm", mm)
    assert devices.time_of_product(dtype) > 0
    assert set(seen) == {(dtype, 1)}
    assert torch.get_num_threads() == num_threads


def draw():
    return random.random(), np.random.normal(), torch.rand(1).item()


def test_random_states_are_restored():
    seed_generators([1, 2])
    np.random.normal()  # now NumPy holds the second one of a pair back
    states = random_states()
    first = draw()
    assert draw() != first
    restore_random_states(states)
    assert draw() == first


def test_generators_are_seeded_alike_by_the_same_numbers_only():
    def draw_with(seed):
        seed_generators(seed)
        return draw()

    assert draw_with([1, 2]) == draw_with([1, 2])
    others = [draw_with(seed) for seed in ([1, 2], [2, 1], [1, 3], [1, 2, 0, 0, 7])]
    for values in zip(*others, strict=True):
        assert len(set(values)) == 4


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="needs two cores")
@pytest.mark.parametrize("are_all", [True, False])
def test_threads_share_the_cores_and_leave_none_without(are_all):
    cores = os.sched_getaffinity(0)

    def compute():
        num_threads = len(cores) if are_all else 1
        torch.set_num_threads(num_threads)  # which starts some that do not compute here
        before = set(os.listdir("/proc/self/task"))
        devices.use_threads(num_threads, torch.device("cpu"))
        assert torch.get_num_threads() == num_threads
        started = map(int, set(os.listdir("/proc/self/task")) - before)
        return [os.sched_getaffinity(thread) for thread in (0, *started)]

    def has_all_cores_for_a_while():
        compute()
        own = os.sched_getaffinity(0)
        with all_cores():
            meanwhile = os.sched_getaffinity(0)
        return meanwhile == cores and os.sched_getaffinity(0) == own

    assert Thread(has_all_cores_for_a_while).result()
    affinities = Thread(compute).result()
    expected = [{core} for core in sorted(cores)] if are_all else [cores]
    assert sorted(map(sorted, affinities)) == list(map(sorted, expected))
    assert os.sched_getaffinity(0) == cores
