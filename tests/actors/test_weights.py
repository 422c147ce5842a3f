# SPDX-License-Identifier: Apache-2.0
"""Published weights: always one whole version, for processes and for threads."""

import multiprocessing

import pytest
import torch

from beast.actors.weights import LocalWeights, SharedWeights

both = pytest.mark.parametrize("kind", [SharedWeights, LocalWeights])


def set_weights(model, version):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(version)


def create_model(version=0):
    model = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(6)])
    set_weights(model, version)
    return model


@both
def test_weights_of_several_types_are_copies_with_a_version(kind):
    model, other = (
        torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.BatchNorm1d(1)) for _ in range(2)
    )
    for net, memory_format in ((model, torch.channels_last), (other, torch.contiguous_format)):
        net[0].conv = torch.nn.Conv2d(2, 3, 2).to(memory_format=memory_format)
    model[0].register_buffer("with_gaps", torch.arange(12.0).view(3, 4)[:, ::2])
    other[0].register_buffer("with_gaps", torch.zeros(3, 2))
    model[0].register_buffer("empty", torch.zeros(0))
    other[0].register_buffer("empty", torch.zeros(0))
    weights = kind(model)
    first = weights.version
    for version in range(first, first + 4):
        assert weights.version == version
        published = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        set_weights(model, version + 1)
        model(torch.randn(5, 3))  # which counts the batches, in an integer
        assert weights.load_into(other) == version
        for name, tensor in other.state_dict().items():
            assert torch.equal(tensor, published[name]), name
        weights.publish(model)


def test_the_newest_weights_stay_whole_while_others_are_written(monkeypatch):
    model, reader, copy = create_model(), create_model(), torch._foreach_copy_
    weights = SharedWeights(model)

    def observed_copy(targets, sources):
        monkeypatch.setattr(torch, "_foreach_copy_", copy)
        copy(targets, sources)
        assert weights.load_into(reader) == 0
        assert all((p == 0).all() for p in reader.parameters())

    set_weights(model, 1)
    monkeypatch.setattr(torch, "_foreach_copy_", observed_copy)
    weights.publish(model)
    assert weights.load_into(reader) == 1


def test_threads_load_whole_weights_while_newer_are_published(monkeypatch):
    model, reader, copy = create_model(), create_model(5), torch._foreach_copy_
    weights = LocalWeights(model)
    first = weights.version

    def interrupted_copy(targets, sources):
        monkeypatch.setattr(torch, "_foreach_copy_", copy)
        set_weights(model, 1)
        weights.publish(model)
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", interrupted_copy)
    assert weights.load_into(reader) == first
    assert all((p == 0).all() for p in reader.parameters())


def test_there_must_be_room_for_all_copies(monkeypatch):
    sizes = []
    monkeypatch.setattr(
        "beast.actors.weights.check_shared_memory", lambda size, what: sizes.append(size)
    )
    model = torch.nn.Linear(16, 1, bias=False)  # a cache line
    SharedWeights(model, num_slots=3)
    assert sizes == [3 * 64]


def read_weights(weights, model, pipe):
    """Load weights 30,000 times; report of how many versions, and how often they were torn."""
    torch.set_num_threads(1)
    versions, torn = [], 0
    for _ in range(30_000):
        versions.append(weights.load_into(model))
        lowest, highest = model.weight.detach().aminmax()
        torn += not lowest == versions[-1] == highest == model.bias[0]
    assert versions == sorted(versions)
    pipe.send((len(set(versions)), torn))


@pytest.mark.whole
@pytest.mark.parametrize("num_slots", [2, 3])  # a learner's, and an agent's mailbox's
def test_weights_that_another_process_reads_are_never_torn(num_slots):
    model, copy = torch.nn.Linear(120, 120), torch.nn.Linear(120, 120)
    set_weights(model, 0)
    weights = SharedWeights(model, num_slots)
    context = multiprocessing.get_context("forkserver")
    pipe, far_end = context.Pipe()
    reader = context.Process(target=read_weights, args=(weights, copy, far_end), daemon=True)
    reader.start()
    while reader.is_alive():
        set_weights(model, weights.version + 1)
        weights.publish(model)  # as fast as it goes
    assert pipe.poll()
    num_versions, torn = pipe.recv()
    assert num_versions > 10 and torn == 0  # many, though how many the machine decides


@pytest.mark.parametrize("count", [1, 2, 3])
def test_weights_published_while_they_are_read_are_read_again(monkeypatch, count):
    model, reader = create_model(), create_model()
    weights = SharedWeights(model)
    copy = torch._foreach_copy_

    def interrupted_copy(targets, sources):
        monkeypatch.setattr(torch, "_foreach_copy_", copy)
        copy(targets[:5], sources[:5])
        for version in range(1, count + 1):
            set_weights(model, version)
            weights.publish(model)
        copy(targets[5:], sources[5:])

    monkeypatch.setattr(torch, "_foreach_copy_", interrupted_copy)
    assert weights.load_into(reader) == count
    assert all((p == count).all() for p in reader.parameters())


@pytest.mark.parametrize("num_slots", [2, 5])
def test_the_version_asked_for_is_loaded_not_a_newer_one(num_slots):
    model, reader = create_model(), create_model()
    weights = SharedWeights(model, num_slots)
    for version in range(1, 8):
        set_weights(model, version)
        weights.publish(model)
    for version in range(8 - num_slots, 8):
        assert weights.load_into(reader, version) == version
        assert all((p == version).all() for p in reader.parameters())
