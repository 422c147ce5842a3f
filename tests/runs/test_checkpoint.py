# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what they bring back, which ones are refused, and when they are written."""

import contextlib
import copy
import errno
import os
import random
import re
import threading
import types

import numpy as np
import pytest
import torch
from small_run import change, create_learner, parse, save, update

from beast.actors.weights import LocalWeights
from beast.errors import FlagError
from beast.learners.learner import Learner
from beast.processes.randomness import random_states
from beast.runs import checkpoint, checkpoint_writer
from beast.runs.checkpoint_writer import Writer


@pytest.fixture
def flags(tmp_path):
    """Flags of a run that has a folder and nothing in it."""
    (tmp_path / "run").mkdir()
    return parse(tmp_path)


@pytest.fixture
def newest(tmp_path):
    """The path of the run's newest checkpoint."""
    return tmp_path / "run" / "model.tar"


def saved_step(flags, name="model.tar"):
    return checkpoint.load(flags, name)["step"]


def test_a_checkpoint_restores_everything(tmp_path, flags, newest):
    save(parse(tmp_path, "--xpid run --disable_checkpoint"))
    learner = create_learner(flags)
    assert not newest.exists() and checkpoint.load(flags) is None
    assert not checkpoint.resume(flags, learner)
    saved, states = save(flags), random_states()
    draw = random.random(), np.random.random(), torch.rand(1)
    assert checkpoint.resume(flags, learner)
    assert str(random_states()) == str(states)
    assert (random.random(), np.random.random(), torch.rand(1)) == draw
    assert learner.stats == saved.stats and learner.step == 200
    for key in ("model", "optimizer", "scheduler"):
        mine, other = getattr(learner, key).state_dict(), getattr(saved, key).state_dict()
        assert str(mine) == str(other), key
    # And both continue alike, with the next random numbers of the generator, too.
    after_saving = torch.get_rng_state()
    update(saved)
    torch.set_rng_state(after_saving)
    update(learner)
    assert torch.equal(learner.model.weight, saved.model.weight)
    assert learner.scheduler.get_last_lr() == saved.scheduler.get_last_lr() == [0.5 * 0.7]


def test_weights_to_evaluate_are_a_copy_while_learning_goes_on(flags):
    learner = create_learner(flags)
    before = learner.model.weight.detach().clone()
    packed = checkpoint.pack_weights(flags, learner.model, 0)
    update(learner)
    assert torch.equal(packed["model_state_dict"]["weight"], before)
    assert not torch.equal(learner.model.weight, before)


def test_the_optimizer_flags_of_the_call_hold_after_resuming(tmp_path):
    save(parse(tmp_path))
    flags = parse(tmp_path, "--xpid run --learning_rate 0.25 --total_steps 2000")
    learner = create_learner(flags)
    checkpoint.resume(flags, learner)
    (group,) = learner.optimizer.param_groups
    assert group["lr"] == pytest.approx(0.25 * 0.9)
    # They hold before the state is loaded, too: a fused optimizer has its steps on the GPU.
    learner, groups = create_learner(flags), []
    learner.optimizer.register_load_state_dict_pre_hook(
        lambda _, state: groups.extend(state["param_groups"])
    )
    learner.optimizer.param_groups[0]["centered"] = True
    checkpoint.resume(flags, learner)
    assert groups[0]["centered"] and groups[0]["params"] == [0, 1]
    (group,) = learner.optimizer.param_groups
    assert group["centered"] and group["lr"] == pytest.approx(0.25 * 0.9)
    group["centered"] = False
    update(learner)
    assert group["lr"] == pytest.approx(0.25 * 0.85)


def create_with_two_optimizers(flags):
    actor, critic = torch.nn.Linear(3, 2), torch.nn.Linear(3, 1)
    optimizers = {
        "actor": torch.optim.Adam(actor.parameters(), lr=flags.learning_rate),
        "critic": torch.optim.RMSprop(critic.parameters(), lr=0.1),
    }
    model = torch.nn.ModuleList([actor, critic])
    decay = lambda step: 1 - step / flags.total_steps  # noqa: E731
    return Learner(model, optimizers, decay, LocalWeights(model))


def learn_with_two_optimizers(learner):
    for net, optimizer in zip(learner.model, learner.optimizer.values(), strict=True):
        optimizer.zero_grad()
        net(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
    learner.count(100, [], [])
    return [parameter.detach().clone() for parameter in learner.model.parameters()]


def test_modules_that_read_old_versions_get_the_version(flags):
    class Versioned(torch.nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
            self.found = local_metadata.get("version")

    net = Versioned(1, 1)
    checkpoint.restore_weights(net, {"model_state_dict": dict(net.state_dict())}, flags)
    assert net.found == 3


def test_several_optimizers_of_a_learner_go_on_as_they_were(flags):
    saved, learner = create_with_two_optimizers(flags), create_with_two_optimizers(flags)
    learn_with_two_optimizers(saved)
    Writer(flags, saved).save(saved)
    assert checkpoint.resume(flags, learner) and learner.learning_rate == 0.5 * 0.9
    other = create_with_two_optimizers(flags)
    other.load_state(copy.deepcopy(saved.state()))  # as of another rank
    expected = learn_with_two_optimizers(saved)
    for resumed in (learner, other):
        learned = learn_with_two_optimizers(resumed)
        assert all(torch.equal(*pair) for pair in zip(learned, expected, strict=True))
        rates = [o.param_groups[0]["lr"] for o in resumed.optimizer.values()]
        assert rates == pytest.approx([0.5 * 0.8, 0.1 * 0.8])
    old = checkpoint.load(flags)
    del old["optimizer"]
    with pytest.raises(FlagError, match="is of one optimizer, but this is {'actor': 'Adam', "):
        checkpoint._check_optimizer(learner, old, flags)
    learner.optimizer = learner.optimizer["actor"]
    with pytest.raises(FlagError, match="is of {'actor': 'Adam', .*, but this is Adam: choose"):
        checkpoint.resume(flags, learner)


class Layers(torch.nn.Module):
    """A net of two layers, defined in one order or the other, and a part that is not saved."""

    def __init__(self, names):
        super().__init__()
        self.encoder = torch.nn.Linear(3, 3)
        for name in names:
            setattr(self, name, torch.nn.Linear(3, 1))

    def state_dict(self, *args, **kwargs):
        weights = super().state_dict(*args, **kwargs)
        for name in ("weight", "bias"):
            del weights[f"encoder.{name}"]
        return weights

    def load_state_dict(self, weights):
        super().load_state_dict(weights, strict=False)


def test_layers_in_another_order_are_refused(flags):
    # An optimizer's state goes by the order, and would be another layer's.
    learner = create_learner(flags, model=Layers("ab"))
    Writer(flags, learner).save(learner)
    assert checkpoint.resume(flags, create_learner(flags, model=Layers("ab")))
    with pytest.raises(FlagError, match="Net defines b.weight where .*run has a.weight: undo"):
        checkpoint.resume(flags, create_learner(flags, model=Layers("ba")))


@pytest.mark.parametrize("groups", [1, 2])
def test_a_checkpoint_of_another_optimizer_is_refused(flags, groups):
    save(flags)
    learner = create_learner(flags)
    if groups == 1:
        learner.optimizer = torch.optim.Adam(learner.model.parameters())
    else:
        learner.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(FlagError, match="is of RMSprop.*, but this is .*undo what was changed in"):
        checkpoint.resume(flags, learner)


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_checkpoint_with_code_is_refused_and_runs_none(tmp_path, flags, newest, caplog, zipped):
    content = {"step": Evil(tmp_path / "evil")}
    torch.save(content, newest, _use_new_zipfile_serialization=zipped)
    with pytest.raises(FlagError) as error:
        checkpoint.load(flags)
    for text in (str(newest), "holds code, which was not run", "mkdir", "move it away or choose"):
        assert text in str(error.value)
    assert "weights_only" not in str(error.value)  # PyTorch's advice how to run it
    best = newest.with_name("best.tar")  # costs a run only the comparison with it
    best.write_bytes(newest.read_bytes())
    learner = create_learner(flags)
    writer = Writer(flags, learner)
    assert re.search(r"best.tar is now best.tar.1: .* holds code", caplog.text)
    update(learner, [1.0])
    writer.save(learner)
    assert saved_step(flags, "best.tar") == 100 and not (tmp_path / "evil").exists()
    torch.load(best.with_name("best.tar.1"), weights_only=False)  # which would have run it
    assert (tmp_path / "evil").exists()


def test_a_file_that_is_no_checkpoint_is_refused_with_the_reason(flags, newest):
    save(flags)
    flags.program = "other.py"
    with pytest.raises(FlagError, match="is of program.py, but this is other.py: run program.py"):
        checkpoint.load(flags)
    for content in ({"model_state_dict": {}, "flags": {}}, torch.zeros(3), [1]):
        torch.save(content, newest)
        with pytest.raises(FlagError, match="cannot use the checkpoint .*model.tar: it lacks"):
            checkpoint.load(flags)
    newest.write_bytes(b"torn")
    with pytest.raises(FlagError, match="model.tar: it is damaged, or none at all"):
        checkpoint.load(flags)


@pytest.mark.parametrize(
    "keys, value, reason",
    [
        (["step"], "200", "'step' is of type str"),
        (["step"], 300, "its step is 300, and 200 in its stats"),
        (["flags"], None, "'flags' is of type NoneType"),
        (["stats", "game_returns"], None, "'game_returns' is of type NoneType"),
        (["stats", "episode_returns"], ["a"], "must be real number, not str"),
        (["stats"], {}, "KeyError: 'step'"),
        (["random_states"], {}, "KeyError: 'torch'"),
        (["random_states", "python"], 3, "TypeError"),
        (["scheduler_state_dict"], [], "'scheduler_state_dict' is of type list"),
        (["scheduler_state_dict"], {}, "KeyError: 'lr_lambdas'"),
        (["scheduler_state_dict", "last_epoch"], "x", "'last_epoch' is of type str"),
        (["optimizer_state_dict"], {}, "KeyError: 'param_groups'"),
        (["optimizer_state_dict", "state", 0, "square_avg"], torch.ones(2), "has shape .2., not"),
        (["model_state_dict"], 3, "'model_state_dict' is of type int"),
    ],
)
def test_a_part_of_a_wrong_type_is_refused_in_one_line(flags, newest, keys, value, reason):
    save(flags)
    change(newest, *keys, to=value)
    learner = create_learner(flags, num_updates=1)  # whose optimizer has a state
    damaged = f"use the checkpoint .*: it is damaged .*{reason}"
    with pytest.raises(FlagError, match=damaged) as error:
        checkpoint.resume(flags, learner)
    assert "\n" not in str(error.value) and "move it away" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64])
def test_weights_of_another_dtype_are_refused(flags, newest, dtype):
    save(flags)
    change(newest, "model_state_dict", to={"bias": torch.ones(1, dtype=dtype), "weight": None})
    with pytest.raises(FlagError) as error:
        checkpoint.resume(flags, create_learner(flags))
    assert f"bias: [1] {dtype} in the".replace("torch.", "") in str(error.value)
    assert "weight: NoneType in the checkpoint, [1, 3] in the net" in str(error.value)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_any_tensor_can_be_saved():
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)
    content = {"a": [quantized, torch.eye(2).to_sparse()], "b": torch.nn.Parameter(torch.ones(2))}
    loaded = torch.load(checkpoint.to_bytes(content), weights_only=True)
    assert loaded["a"][0].dequantize().tolist() == loaded["b"].tolist() == [1, 1]


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path):
    save(parse(tmp_path))
    flags = parse(tmp_path, "--xpid run --use_lstm --frame_skip 2")
    with pytest.raises(FlagError) as error:
        checkpoint.resume(flags, create_learner(flags, size=4))
    for text in (
        "--use_lstm was False, is True",
        "--frame_skip was 4, is 2",
        "a Linear of PongNoFrameskip-v4, does not fit this Linear of PongNoFrameskip-v4",
        "weight: [1, 3] in the checkpoint, [1, 4] in the net",
    ):
        assert text in str(error.value)
    assert "--xpid was" not in str(error.value) and "bias" not in str(error.value)
    flags = parse(tmp_path)
    flags.chosen = ["num_test_envs"]  # by training, so it is None in a test
    save(flags)
    flags.num_test_envs = None
    with pytest.raises(FlagError, match=r"\(the environment or the code of Net has changed\)"):
        checkpoint.resume(flags, create_learner(flags, size=4))
    flags = parse(tmp_path)
    with pytest.raises(FlagError, match="the code of Net has changed"):
        checkpoint.resume(flags, create_learner(flags, size=4))
    learner = create_learner(flags, model=torch.nn.Bilinear(2, 3, 1, bias=False))
    missing = r"does not fit this Bilinear(.|\n)*bias: \[1\] in the checkpoint, missing in the net"
    with pytest.raises(FlagError, match=missing):
        checkpoint.resume(flags, learner)


@pytest.mark.whole
@pytest.mark.parametrize("is_old", [False, True])  # whose names are as torch.compile has them
def test_a_compiled_net_has_the_checkpoints_of_a_plain_one(flags, is_old):
    def make(is_compiled):
        net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        if is_compiled:
            net[0] = torch.compile(net[0], backend="eager")
            net = torch.compile(net, backend="eager")
        return net

    learner = create_learner(flags, 1, model=make(True))
    of_net = checkpoint.pack_weights(flags, learner.model, 1)
    for saved in (checkpoint.pack(flags, learner), of_net):
        assert list(saved["model_state_dict"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert saved["net"] == "Sequential"
        if is_old:
            saved["model_state_dict"] = learner.model.state_dict()
            assert "_orig_mod.0._orig_mod.weight" in saved["model_state_dict"]
        for is_compiled in (False, True):
            net = make(is_compiled)
            checkpoint.restore_weights(net, saved, flags)
            for x, wanted in zip(net.parameters(), learner.model.parameters(), strict=True):
                assert torch.equal(x, wanted)
    with pytest.raises(FlagError, match=r"this Linear .*\n.*weight: missing in the checkpoint"):
        checkpoint.restore_weights(torch.compile(torch.nn.Linear(1, 1)), saved, flags)


def test_the_best_checkpoint_has_the_highest_mean_return(flags, newest):
    def play_and_save(returns, best):
        update(learner, returns)
        writer.save(learner)
        assert saved_step(flags) == learner.step and saved_step(flags, "best.tar") == best

    learner = create_learner(flags)
    writer = Writer(flags, learner)
    writer.save(learner)
    assert not newest.with_name("best.tar").exists()  # no game has ended
    play_and_save([5.0], 100)
    play_and_save([0.0] * 99, 200)  # a mean of a hundred says more than that of one
    play_and_save([1.0] * 50, 300)
    play_and_save([0.0], 300)

    learner = create_learner(flags)
    checkpoint.resume(flags, learner)
    writer = Writer(flags, learner)
    play_and_save([0.0], 300)
    play_and_save([1.0] * 99, 600)
    play_and_save([0.5] * 100, 600)
    play_and_save([0.9] * 100, 600)  # better than the last one, not than the best
    play_and_save([6.0] * 100, 900)


def test_a_run_that_begins_anew_sets_the_best_checkpoint_aside(flags, newest):
    learner = create_learner(flags)
    update(learner, [5.0])
    Writer(flags, learner).save(learner)
    newest.unlink()
    learner = create_learner(flags, 1)
    update(learner, [1.0])
    Writer(flags, learner).save(learner)
    assert saved_step(flags, "best.tar") == 200 and newest.with_name("best.tar.1").exists()


def test_a_best_checkpoint_that_cannot_be_read_for_now_stays(flags, newest, monkeypatch):
    learner = create_learner(flags)
    update(learner, [5.0])
    Writer(flags, learner).save(learner)

    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(FlagError, match="best.tar, perhaps for now: .*Input/output error"):
        Writer(flags, learner)
    assert not newest.with_name("best.tar.1").exists()


def test_the_best_checkpoint_is_written_before_the_newest(flags, monkeypatch):
    """It is never worse than the newest."""
    written, learner = [], create_learner(flags)
    update(learner, [1.0])
    replace_file = lambda path, _: written.append(path.name)  # noqa: E731
    monkeypatch.setattr(checkpoint_writer, "replace_file", replace_file)
    Writer(flags, learner).save(learner)
    assert written == ["best.tar", "model.tar"]


def test_no_checkpoint_is_written_while_updates_are_not_finite(flags, caplog):
    learner = save(flags)
    writer = Writer(flags, learner)
    update(learner)
    learner.stats["skipped_in_a_row"] = 3
    writer.save(learner)
    assert writer.failure == (
        "no checkpoint was written at step 300: the last 3 updates were not finite"
    )
    assert writer.failure in caplog.text and saved_step(flags) == 200
    learner.stats["skipped_in_a_row"] = 1  # which has not changed the weights
    writer.save(learner)
    assert writer.failure == "" and saved_step(flags) == 300
    update(learner)
    with torch.no_grad():
        learner.model.weight[0, 0] = torch.nan
    writer.save(learner)
    assert writer.failure and saved_step(flags) == 300


def test_an_unwritable_checkpoint_leaves_the_one_before(flags, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left")

    new, resumed = Writer(flags, create_learner(flags)), save(flags)
    writers = (new, "there is none"), (Writer(flags, resumed), "that of step 200 stays")
    monkeypatch.setattr(checkpoint_writer, "replace_file", fail)
    for writer, what in writers:
        writer.save(resumed)
        assert writer.failure.endswith(f"of step 200 could not be written (No space left): {what}")


def test_a_checkpoint_is_packed_under_the_lock_not_written_so(flags, monkeypatch):
    events, pack, learner = [], checkpoint.pack, create_learner(flags)
    learner.lock = threading.Lock()  # which has locked(); an RLock has not

    def note(event):
        events.append((event, learner.lock.locked()))

    @contextlib.contextmanager
    def hold():  # pauses other processes
        note("hold")
        yield
        note("go on")

    learner.hold = hold
    monkeypatch.setattr(checkpoint_writer, "pack", lambda *args: note("pack") or pack(*args))
    monkeypatch.setattr(checkpoint_writer, "replace_file", lambda *_: note("write"))
    Writer(flags, learner).save(learner)
    assert events == [("hold", False), ("pack", True), ("go on", False), ("write", False)]


def test_a_checkpoint_is_due_once_an_interval(tmp_path, monkeypatch):
    flags, now = parse(tmp_path, "--xpid run --checkpoint_interval_s 10"), [100.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0)
    monkeypatch.setattr(checkpoint_writer, "time", clock)
    monkeypatch.setattr(checkpoint_writer, "replace_file", lambda *_: now.insert(0, now[0] + 3))
    learner = create_learner(flags)
    writer = Writer(flags, learner)
    assert not writer.are_due(within=9) and writer.are_due(within=11)
    writer.save(learner)  # as slowly the next time: at 107, to be there at 110
    assert not writer.are_due(within=3) and writer.are_due(within=5)
    now.insert(0, 108.0)
    learner.stats["skipped_in_a_row"] = 3
    writer.save(learner)
    assert writer.are_due(within=0)  # as soon as possible after one that was not written
