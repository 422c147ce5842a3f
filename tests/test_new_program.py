# SPDX-License-Identifier: Apache-2.0
"""The program in docs/new_program.md runs as it stands there, with few lines for systems."""

import ast
import importlib
import logging
import re

import pytest
from program import ROOT, column, last_step, load, read_rows, run, split_words

PAGE = (ROOT / "docs" / "new_program.md").read_text()
(PROGRAM,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
SYSTEMS = ("play_and_learn", "train", "main")


def test_what_is_not_its_algorithm_takes_at_most_100_lines():
    """Counted are imports from beast, lines of the parser, SYSTEMS, and the last two lines."""
    lines = 0
    for node in ast.parse(PROGRAM).body:
        source = ast.unparse(node)
        is_import = isinstance(node, ast.ImportFrom) and node.module.startswith("beast")
        is_function = isinstance(node, ast.FunctionDef) and node.name in SYSTEMS
        if is_import or is_function or source.startswith(("parser", "if __name__")):
            lines += node.end_lineno - node.lineno + 1
    assert lines <= 100
    assert int(re.search(r"(\d+) in all", PAGE)[1]) == lines


@pytest.mark.whole
def test_the_program_learns_resumes_and_plays(tmp_path, monkeypatch, caplog, capsys):
    caplog.set_level(logging.INFO)
    script, folder = tmp_path / "reinforce.py", tmp_path / "runs" / "cartpole"
    script.write_text(PROGRAM)
    where = ("--xpid cartpole --savedir", folder.parent)
    arguments = (*where, "--env CartPole-v1 --seed 1 --total_steps 8000")
    run(script, *arguments, PYTHONPATH=str(ROOT))
    first, step = load(folder / "model.tar"), last_step(folder)
    assert step >= 8000 and column(read_rows(folder), "baseline_loss")

    monkeypatch.syspath_prepend(tmp_path)  # the rest in this process, which is faster
    reinforce = importlib.import_module("reinforce")

    def main(arguments):
        assert reinforce.main(split_words([*where, arguments])) == 0

    main("--total_steps 16000")
    assert f"Resuming {folder} at step {step:,}" in caplog.text
    assert last_step(folder) >= 16000
    second = load(folder / "model.tar")
    assert any(
        (weights != second["model_state_dict"][name]).any()
        for name, weights in first["model_state_dict"].items()
    )
    assert column(read_rows(folder), "mean_episode_return")[-1] > 30  # a random player: 22
    main("--mode test --num_episodes 3")
    assert "3 games: mean return" in capsys.readouterr().out
