# SPDX-License-Identifier: Apache-2.0
"""Sharing weights: by folders, and by the Hugging Face Hub, of which a folder takes the place."""

import inspect
import json
import shutil
import sys

import pytest
import small_run
import torch
from program import load, run
from safetensors.torch import load_file, save_file

import ppo
from beast import hub
from beast.errors import FlagError
from beast.runs.checkpoint import NEWEST


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of ppo.py, and its weights, packed."""
    savedir = tmp_path_factory.mktemp("runs")
    for flags in ("--env CartPole-v1 --total_steps 2048 --seed 1", "--total_steps 4096"):
        run("ppo.py", flags, "--xpid one --savedir", savedir)  # a curve needs two rows
    hub.main(["push", str(savedir / "one"), str(savedir / "two words"), "--num_episodes", "4"])
    return savedir / "one", savedir / "two words"


@pytest.mark.whole
def test_packed_weights_are_those_of_the_run_with_score_and_card(trained):
    one, packed = trained
    names = {"model.safetensors", "test.json", "README.md", "meta.json", "logs.csv", "curves.png"}
    names |= {path.name for path in one.glob("changes-*.diff")}  # of a tree that is worked on
    assert {path.name for path in packed.iterdir()} == names
    weights, expected = load_file(packed / hub.WEIGHTS), load(one / NEWEST)["model_state_dict"]
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    score, card = json.loads((packed / "test.json").read_text()), (packed / "README.md").read_text()
    assert len(score["returns"]) == 4 and score["step"] == 4096
    assert f"**{hub.describe(score)}**" in card and "--mode test --xpid 'two words'" in card
    assert f"beast.hub pull '{packed}' ~/logs/torchbeast/'two words'\n" in card
    assert "python ppo.py --env CartPole-v1" in " ".join(card.split())
    assert "python ppo.py --total_steps 4096 --xpid one" in " ".join(card.split())


@pytest.mark.whole
def test_half_of_the_bytes_are_enough_to_play(trained, tmp_path):
    one, packed = trained
    hub.main(["push", str(one), str(tmp_path / "half"), "--half", "--num_episodes", "4"])
    full, half = (load_file(path / hub.WEIGHTS) for path in (packed, tmp_path / "half"))
    assert torch.float16 in {x.dtype for x in half.values()}
    for name, x in half.items():
        assert x.dtype == (torch.float16 if x.dim() > 1 else full[name].dtype)
        torch.testing.assert_close(x.to(full[name].dtype), full[name], rtol=1e-3, atol=1e-6)
    assert hub.main(["test", str(tmp_path / "half"), "--num_episodes", "4"]) is None


@pytest.mark.whole
def test_weights_of_a_fork_are_played_by_the_fork(trained, tmp_path, monkeypatch, caplog):
    one, _ = trained
    shutil.copytree(one, tmp_path / "one")
    meta = json.loads((one / "meta.json").read_text())
    meta["command"][0] = "fork.py"  # whose create_parser still says ppo.py
    (tmp_path / "one" / "meta.json").write_text(json.dumps(meta))
    monkeypatch.setattr(hub, "ROOT", tmp_path)
    for name in ("ppo.py", "fork.py"):
        (tmp_path / name).touch()
        (tmp_path / name[:-3]).mkdir()
        hub.pack(tmp_path / "one", NEWEST, tmp_path / name[:-3])
        assert hub.find_program(tmp_path / name[:-3]) == "ppo.py"
        (tmp_path / name).write_text('parser = create_parser("ppo.py", "A fork.")')
        assert hub.find_program(tmp_path / name[:-3]) == name
    (tmp_path / "fork.py").unlink()
    assert hub.find_program(tmp_path / "fork") == "ppo.py"
    assert "is of fork.py, which is not here: ppo.py takes its place" in caplog.text


@pytest.mark.whole
def test_pulled_weights_can_be_tested_and_not_trained(trained, tmp_path, capsys):
    _, packed = trained
    hub.main(["pull", str(packed), str(tmp_path / "new")])
    arguments = ["--num_episodes", "4", "--xpid", "new", "--savedir", str(tmp_path)]
    assert ppo.main(["--mode", "test", *arguments]) == 0
    score = json.loads((packed / "test.json").read_text())
    assert f"4 games: mean return {score['mean']:.3g}" in capsys.readouterr().out
    with pytest.raises(FlagError, match="for --mode test alone"):
        ppo.main(["--total_steps", "8192", *arguments])
    with pytest.raises(FlagError, match="new exists: choose another folder, or remove it"):
        hub.main(["pull", str(packed), str(tmp_path / "new")])


@pytest.mark.whole
def test_testing_again_finds_scores_that_differ(trained, tmp_path, capfd):
    _, packed = trained
    text = hub.describe(json.loads((packed / "test.json").read_text()))
    changed = shutil.copytree(packed, tmp_path / "changed")
    score = json.loads((changed / "test.json").read_text())
    # The stored mean is not believed: it is computed again from the games.
    (changed / "test.json").write_text(json.dumps(score | {"returns": [500.0] * 4, "ci95": 1e9}))
    sources = ["none", str(packed), str(changed)]
    problem = hub.main(["test", *sources, "--num_episodes", "4"])
    assert problem == f"failed, or with intervals that do not meet: none, {changed}"
    output = capfd.readouterr().out
    assert "| none | failed: none has no model.safetensors" in output
    assert f"| {packed} | {text} | {text} |" in output and f"| {changed} | 500 | " in output


@pytest.mark.whole
def test_the_hub_is_called_as_its_package_wants(trained, tmp_path, monkeypatch):
    package = pytest.importorskip("huggingface_hub")
    one, name, stored = tmp_path / "one", "user/pong", tmp_path / "stored"
    shutil.copytree(trained[0], one)

    class Api:
        def create_repo(self, *args, **kwargs):
            inspect.signature(package.HfApi.create_repo).bind(self, *args, **kwargs)
            assert kwargs["exist_ok"]

        def file_exists(self, *args):
            inspect.signature(package.HfApi.file_exists).bind(self, *args)
            return (stored / args[1]).exists()

        def upload_folder(self, **kwargs):
            inspect.signature(package.HfApi.upload_folder).bind(self, **kwargs)
            assert kwargs["repo_id"] == name
            shutil.copytree(kwargs["folder_path"], stored)

    def download(*args, **kwargs):
        inspect.signature(package.snapshot_download).bind(*args, **kwargs)
        assert args == (name,) and set(kwargs["allow_patterns"]) == {*hub.FILES, hub.CHANGES}
        shutil.copytree(stored, kwargs["local_dir"], dirs_exist_ok=True)

    monkeypatch.setattr(package, "HfApi", Api)
    monkeypatch.setattr(package, "snapshot_download", download)
    (one / "changes-01234567.diff").write_text("an edit\n")
    hub.main(["push", str(one), f"hf:{name}", "--num_episodes", "2"])
    assert (stored / "changes-01234567.diff").read_text() == "an edit\n"
    with pytest.raises(FlagError, match=f"hf:{name} has weights: choose another repository"):
        hub.main(["push", str(one), f"hf:{name}", "--num_episodes", "2"])
    assert f"beast.hub pull hf:{name} ~/logs/torchbeast/pong" in (stored / "README.md").read_text()
    hub.main(["pull", f"hf:{name}", str(tmp_path / "new")])
    assert (tmp_path / "new" / NEWEST).exists()
    assert (tmp_path / "new" / "changes-01234567.diff").exists()
    monkeypatch.setattr(package, "snapshot_download", lambda *_, **__: 1 / 0)
    with pytest.raises(FlagError, match=f"hf:{name}: ZeroDivisionError"):
        hub.main(["pull", f"hf:{name}", str(tmp_path / "other")])


def make_run(path):
    """Return the folder of a run that has one checkpoint."""
    small_run.save(small_run.parse(path))
    (path / "run" / "meta.json").write_text(json.dumps({"flags": {"program": "program.py"}}))
    return path / "run"


def make_packed(path, **change):
    path.mkdir()
    header = {"step": 1, "time": 0, "net": "Net", "flags": {"program": "ppo.py", "env": "x"}}
    save_file(
        {"x": torch.zeros(1)}, path / hub.WEIGHTS, {"checkpoint": json.dumps(header | change)}
    )
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("push none {new}", "none is no run: its meta.json cannot be read"),
     ("push {run} {old}", "old exists: choose another folder, or remove it"),
     ("push {run} {new} --best", "run has no best.tar"),
     ("push {run} {new} --num_episodes 1", "is 1, which has no interval: give 2 or more"),
     ("push {run}/strange {new}", "strange is no run: its meta.json cannot be read"),
     ("push {other} {new}", "model.tar cannot be shared: .*Tensor is not JSON serializable"),
     ("pull none {new}", "none has no model.safetensors"),
     ("push {run} {busy}", "busy.tmp is of another command: if that was killed, remove it"),
     ("pull {old} {run}", "run exists: choose another folder, or remove it"),
     ("pull {empty} {new}", "empty has no model.safetensors of beast.hub .*No such file")],
)  # fmt: skip
def test_what_cannot_be_shared_is_refused(arguments, message, tmp_path):
    make_packed(tmp_path / "old")
    (tmp_path / "empty").mkdir()
    (tmp_path / "busy.tmp").mkdir()
    names = ("run", "old", "new", "empty", "busy", "other")
    places = {name: tmp_path / name for name in names}
    run = make_run(tmp_path)
    (run / "strange").mkdir()
    (run / "strange" / "meta.json").write_text("[]")
    other = shutil.copytree(run, tmp_path / "other")
    small_run.change(other / NEWEST, "flags", "table", to=torch.zeros(1))
    with pytest.raises(FlagError, match=message):
        hub.main(arguments.format(**places).split())
    assert not list(tmp_path.glob("new*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"flags": {"program": "../x.py"}}, r"\.\./x\.py, which is not among the programs"),
     ({"flags": {"program": "README.md"}}, "README.md, which is not among the programs"),
     ({"flags": {"program": 3}}, "no model.safetensors of beast.hub .*'program' is of type int"),
     ({"flags": 3}, "no model.safetensors of beast.hub .*'flags' is of type int"),
     ({"step": "x"}, "no model.safetensors of beast.hub .*'step' is of type str"),
     ({"step": None}, "no model.safetensors of beast.hub")],
)  # fmt: skip
def test_weights_with_a_header_from_elsewhere_are_refused(change, message, tmp_path):
    packed = make_packed(tmp_path / "packed", **change)
    with pytest.raises(FlagError, match=message):
        hub.main(["pull", str(packed), str(tmp_path / "new")])
    assert not list(tmp_path.glob("new*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"arguments": ["--num_test_envs", "x"]}, "test.json: .*invalid int value"),
     ({"arguments": 3}, "test.json cannot be read"),
     ({"returns": ["x"]}, "test.json cannot be read"),
     ({"returns": [10**400]}, "test.json cannot be read"),
     ({"returns": []}, "test.json cannot be read")],
)  # fmt: skip
def test_a_score_that_cannot_be_read_is_refused(change, message, tmp_path):
    packed = make_packed(tmp_path / "packed")
    score = {"arguments": [], "returns": [1.0, 2.0], "steps": [1, 2]}
    (packed / hub.SCORE).write_text(json.dumps(score))
    assert hub.read_score(packed)[0]["mean"] == 1.5
    (packed / hub.SCORE).write_text(json.dumps(score | change))
    with pytest.raises(FlagError, match=message):
        hub.read_score(packed)


def test_flags_that_a_test_may_not_need_are_left_to_the_tester(tmp_path, caplog):
    packed = make_packed(tmp_path / "packed")
    arguments = ["--seed=2", "--env", "evil:X-v0", "--greedy", "--result_file", "x"]
    score = {"arguments": arguments, "returns": [1.0, 2.0], "steps": [1, 2]}
    (packed / hub.SCORE).write_text(json.dumps(score))
    assert hub.read_score(packed)[1] == ["--greedy", "--seed", "2"]
    assert "left out, unless given after --: --env evil:X-v0 --result_file x" in caplog.text


def test_a_package_that_lacks_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FlagError, match="hf: needs a package: pip install huggingface_hub"):
        hub.main(["pull", "hf:user/name", str(tmp_path / "x")])
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(FlagError, match="this needs a package: pip install safetensors"):
        hub.main(["pull", "x", str(tmp_path)])
