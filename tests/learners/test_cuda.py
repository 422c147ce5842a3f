# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show: a minute's tests, skipped where there is none.

`CUDA_TESTS_ON=cpu python -m pytest tests/learners/test_cuda.py` runs what can run on a CPU,
where it shows little more than that these tests are right.
"""

import json
import os
import threading
import types

import numpy as np
import pytest
import torch
from batches import SPACE, A, make_batch
from catch import MonoNet
from catch_poly import PolyNet
from deadline import Thread
from gymnasium.spaces import Discrete
from program import HELPERS, ROOT, last_step, load, run

import gala
import monobeast
import polybeast
import ppo
from beast.actors.weights import LocalWeights, SharedWeights
from beast.learners.devices import DeviceCopies
from beast.learners.learner import Batch
from beast.nest import map_nest
from beast.runs.checkpoint_writer import save_bad_batch
from libtorchbeast import BatchingQueue, ClosedBatchingQueue, DynamicBatcher

DEVICE = torch.device(os.environ.get("CUDA_TESTS_ON", "cuda"))
IS_CUDA = DEVICE.type == "cuda"
pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(IS_CUDA and not torch.cuda.is_available(), reason="needs a GPU"),
]


def ppo_loss(flags, net, batch, agent_state):
    flags = ppo.resolve(flags, Discrete(A))
    batch = batch | {"baseline": torch.zeros_like(batch["reward"])}
    return ppo.compute_loss(flags, net, ppo.compute_targets(flags, net, batch, ()), ())


NETS = {
    "monobeast": (monobeast, lambda lstm: MonoNet(SPACE, A, lstm)),
    "polybeast, shallow": (polybeast, lambda lstm: PolyNet(SPACE, A, lstm, "shallow")),
    "polybeast, deep": (polybeast, lambda lstm: PolyNet(SPACE, A, lstm, "deep")),
}
OTHERS = {  # without an LSTM
    "ppo": (types.SimpleNamespace(parser=ppo.parser, compute_loss=ppo_loss),
            lambda lstm: ppo.Net(SPACE, A)),
    "gala": (gala, lambda lstm: gala.Net(SPACE, A)),
}  # fmt: skip


def loss_and_gradients(program, net, batch, precision, device):
    """Return loss and gradients on a device, as tensors on the CPU."""
    flags = program.parser.parse_args(["--precision", precision])
    net, batch = net.to(device), map_nest(lambda x: x.to(device), batch)
    state = map_nest(lambda s: s.to(device), net.initial_state(batch["reward"].shape[1]))
    net.zero_grad()
    loss, _ = program.compute_loss(flags, net, batch, state)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten().float().cpu() for p in net.parameters()])


@pytest.mark.parametrize(
    ("name", "use_lstm"),
    [(name, lstm) for name in NETS for lstm in (False, True)] + [(name, False) for name in OTHERS],
)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 2e-2)])
def test_loss_and_gradients_are_those_of_the_cpu(name, use_lstm, precision, tolerance, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # fp32, not TF32
    torch.manual_seed(1)
    program, make = (NETS | OTHERS)[name]
    net, batch = make(use_lstm), make_batch(3)
    for layer in (net.policy, net.baseline):  # a real policy, real values
        torch.nn.init.normal_(layer.weight, std=0.05)
    loss, gradient = loss_and_gradients(program, net, batch, "fp32", torch.device("cpu"))
    other_loss, other = loss_and_gradients(program, net, batch, precision, DEVICE)
    assert other_loss == pytest.approx(loss, rel=tolerance)
    assert torch.cosine_similarity(gradient, other, dim=0) > 1 - tolerance
    assert other.norm().item() == pytest.approx(gradient.norm().item(), rel=2 * tolerance)


def test_a_bad_batch_can_be_read_on_a_machine_without_a_gpu(tmp_path):
    rows, state = {"reward": torch.zeros(3, 2)}, (torch.zeros(1, 2, 4),)
    on_device = map_nest(lambda x: x.to(DEVICE), (rows, state))
    save_bad_batch(tmp_path, "", Batch(*on_device, rows, [1, 1], {"actors": [0]}), {})
    saved = load(tmp_path / "bad_batch.tar")
    assert saved["batch"]["reward"].device.type == saved["agent_state"][0].device.type == "cpu"


@pytest.mark.skipif(not IS_CUDA, reason="a CPU makes nobody wait")
@pytest.mark.parametrize("name", NETS)
def test_nothing_waits_for_the_gpu_before_the_metrics_are_read(name):
    program, make = NETS[name]
    flags = program.parser.parse_args(["--precision", "bf16"])
    net = make(False).to(DEVICE)
    batch = map_nest(lambda x: x.to(DEVICE), make_batch(3))
    optimizer, _ = program.create_optimizer(flags, net)
    program.learn(flags, net, batch, (), optimizer)  # for the first time things are set up
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, metrics = program.compute_loss(flags, net, batch, ())
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(metric.cpu()).all() for metric in metrics.values())


def test_pinned_memory_may_be_written_to_again_after_the_wait():
    copies = DeviceCopies(DEVICE)
    rows = torch.empty(64, 2**16, dtype=torch.int32, pin_memory=IS_CUDA)
    sums = []
    for i in range(100):
        rows.fill_(i)
        (on_device,) = copies.copy((rows,))
        work = on_device.float()  # that is still under way when the copy is let go
        for _ in range(5):
            work = work * 1.0
        sums.append((work.mean(), on_device.max(), on_device.min()))
        del on_device
        copies.wait()
    for i, values in enumerate(sums):
        assert [v.item() for v in values] == [i, i, i]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_batches_of_the_batcher_are_answered_by_their_own_rows(num_threads):
    batcher = DynamicBatcher(batch_dim=0, maximum_batch_size=64, pin_memory=IS_CUDA)

    def answer():
        copies = DeviceCopies(DEVICE)
        for batch in batcher:
            inputs = batch.get_inputs()
            assert inputs.is_pinned() == IS_CUDA
            work = copies.copy(inputs).double()
            for _ in range(20):
                work = work + 1
            batch.set_outputs(work.sum(dim=1).cpu())

    threads = [Thread(answer) for _ in range(num_threads)]

    def call(number):
        for i in range(200):
            rows = torch.full((3, 5000), float(1000 * number + i))
            outputs = batcher.compute(rows)
            assert (outputs == 5000 * (1000 * number + i + 20.0)).all()

    callers = [Thread(call, i) for i in range(8)]
    for caller in callers:
        caller.result()
    batcher.close()
    for thread in threads:
        thread.result()


def test_batches_of_the_queue_arrive_on_the_device_as_they_were():
    queue = BatchingQueue(
        batch_dim=0, minimum_batch_size=4, maximum_batch_size=4, maximum_queue_size=8,
        pin_memory=IS_CUDA,
    )  # fmt: skip
    seen = []

    def learn():
        copies = DeviceCopies(DEVICE)
        for batch in queue:
            on_device = copies.copy(batch)
            assert batch.is_pinned() == IS_CUDA
            seen.append((on_device.amin(dim=1), on_device.amax(dim=1)))
            copies.wait()

    threads = [Thread(learn) for _ in range(2)]
    for i in range(800):
        queue.enqueue(np.full((1, 50_000), i))
    while queue.size():
        pass
    queue.close()
    for thread in threads:
        thread.result()
    for low, high in seen:
        assert torch.equal(low, high)  # each rollout is whole
    numbers = torch.cat([low.cpu() for low, _ in seen]).tolist()
    assert sorted(numbers) == list(range(800))
    with pytest.raises(ClosedBatchingQueue):
        queue.enqueue(np.zeros((1, 3)))


@pytest.mark.parametrize("own_streams", [False, True])
def test_published_weights_are_never_torn(own_streams):
    model = torch.nn.Sequential(*[torch.nn.Linear(500, 500) for _ in range(10)]).to(DEVICE)
    weights, stop, torn = LocalWeights(model), threading.Event(), []

    def stream():
        return torch.cuda.stream(torch.cuda.Stream(DEVICE) if own_streams and IS_CUDA else None)

    def read():
        mine = torch.nn.Sequential(*[torch.nn.Linear(500, 500) for _ in range(10)]).to(DEVICE)
        with stream(), torch.no_grad():
            while not stop.is_set():
                version = weights.load_into(mine)
                if version > 2:
                    torn.append(
                        torch.stack([(p != version).any() for p in mine.parameters()]).any()
                    )

    readers = [Thread(read) for _ in range(2)]
    with stream(), torch.no_grad():
        for _ in range(300):
            version = weights.version + 1
            for parameter in model.parameters():
                parameter.fill_(version)
            weights.publish(model)
    stop.set()
    for reader in readers:
        reader.result()
    assert len(torn) > 10 and not any(t.item() for t in torn)


def test_shared_weights_of_a_gpu_are_loaded_on_the_cpu():
    net, other = MonoNet(SPACE, A), MonoNet(SPACE, A)
    weights = SharedWeights(net)
    net.to(DEVICE)
    for version in range(1, 4):
        for parameter in net.parameters():
            torch.nn.init.normal_(parameter)
        weights.publish(net)
        assert weights.load_into(other) == version
        for one, two in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(one.cpu(), two)


@pytest.mark.parametrize("fork", ["catch", "catch_poly"])
def test_a_run_goes_on_where_it_was_on_another_device(tmp_path, fork):
    arguments = f"--env Catch --xpid run --seed 1 --savedir {tmp_path} --batch_size 4"
    here = "" if IS_CUDA else "--disable_cuda"
    for i, device in enumerate([here, "--disable_cuda", here], start=1):
        run(HELPERS / f"{fork}.py", arguments, f"--total_steps {2000 * i}", device)
        assert last_step(tmp_path / "run") >= 2000 * i
        meta = json.loads((tmp_path / "run" / "meta.json").read_text())
        assert torch.device(meta["device"]).type == ("cpu" if device else DEVICE.type)
    saved = load(tmp_path / "run" / "model.tar")
    assert all(torch.isfinite(w).all() for w in saved["model_state_dict"].values())


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("monobeast.py", "--use_lstm --batch_size 4"),
        ("polybeast.py", "--use_lstm --batch_size 4"),
        ("ppo.py", "--use_gru --num_envs 8 --unroll_length 32"),
        ("gala.py", "--num_agents 2 --envs_per_agent 4"),
        ("gala.py", "--num_agents 2 --envs_per_agent 4 --exchange allreduce"),
        ("monobeast.py", "--batch_size 4 --compile --replay_ratio 1"),
        ("dqn.py", "--learning_starts 1000"),
        ("dqn.py", "--use_lstm --learning_starts 1000"),
        ("sac.py", "--env Pendulum-v1 --learning_starts 2500"),
    ],
)
def test_pong_is_trained_for_a_moment(tmp_path, program, arguments):
    pytest.importorskip("cv2")
    run(ROOT / program, arguments, "--total_steps 3000 --xpid run --savedir", tmp_path)
    assert last_step(tmp_path / "run") >= 3000
