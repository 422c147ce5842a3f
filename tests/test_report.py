# SPDX-License-Identifier: Apache-2.0
"""Statistics beside those of rliable 1.2.0, which does not load beside pandas 3; and the report."""

import csv
import json
import pathlib

import numpy as np
import pytest
from program import ROOT

from beast import report
from beast.runs import statistics
from beast.runs.curves import PlotError, group, read_run

A = np.array(
    [[2.154, 4.261, 1.565, 1.065], [2.183, 3.407, 0.443, 1.119], [1.718, 1.695, 0.839, 3.958],
     [1.451, 3.916, 0.757, 0.604], [5.939, 5.355, 0.158, 1.811]]
)  # fmt: skip
B = np.array(
    [[2.154, 2.805, 1.413, 1.922], [4.403, 3.082, 0.964, 1.271], [2.634, 4.372, 1.569, 1.236],
     [1.975, 8.218, 1.552, 2.21], [4.093, 8.827, 0.452, 2.003]]
)  # fmt: skip
# rliable's values, and its intervals with 50,000 samples.
VALUES = {"A": [1.8168, 2.2002, 2.2199, 0.10995], "B": [2.1906, 2.3901, 2.85775, 0.0292]}
LOWS = {"A": [1.4015, 1.4275, 1.7234, 0.0400], "B": [1.9439, 1.9355, 2.2664, 0.0]}
HIGHS = {"A": [2.5772, 3.0192, 2.7734, 0.1875], "B": [2.7044, 2.8658, 3.4839, 0.0840]}
LEVELS = np.array([0, 0.5, 1, 2, 4, 8])


@pytest.mark.parametrize(("name", "scores"), [("A", A), ("B", B)])
@pytest.mark.parametrize("i", range(4))
def test_statistics_and_intervals_are_rliables(name, scores, i):
    statistic = list(report.STATISTICS.values())[i]
    assert statistic(scores) == pytest.approx(VALUES[name][i], abs=1e-5)
    low, high = statistics.interval(statistic, scores, num_samples=50_000)
    tolerance = 0.02 * max(1, HIGHS[name][i] - LOWS[name][i])
    assert [low, high] == pytest.approx([LOWS[name][i], HIGHS[name][i]], abs=tolerance)


def test_profile_and_probability_of_improvement_are_rliables():
    assert statistics.profile(A, LEVELS) == pytest.approx([1, 0.9, 0.75, 0.4, 0.15, 0])
    lows, highs = statistics.interval(lambda x: statistics.profile(x, LEVELS), A)
    assert lows == pytest.approx([1, 0.8, 0.65, 0.25, 0, 0], abs=0.051)
    assert highs == pytest.approx([1, 1, 0.85, 0.55, 0.3, 0], abs=0.051)
    assert statistics.probability_of_improvement(B, A) == pytest.approx(0.695)  # with one tie
    low, high = statistics.interval(statistics.probability_of_improvement, B, A, num_samples=20_000)
    assert [low, high] == pytest.approx([0.505, 0.86], abs=0.011)


def test_runs_are_drawn_again_within_their_game():
    scores = np.arange(6.0).reshape(3, 2)
    samples = statistics.draw_again(scores, 500, np.random.default_rng(1))
    assert samples.shape == (500, 3, 2)
    assert set(samples[..., 0].flat) == {0, 2, 4} and set(samples[..., 1].flat) == {1, 3, 5}
    assert len({tuple(s) for s in samples[..., 0]}) == 27  # also differently in either game
    assert (samples[:, :, 1] - samples[:, :, 0] != 1).any()


def write_run(folder, env, returns):
    """Write a run whose returns are logged every 1,000 steps."""
    folder.mkdir(parents=True)
    with open(folder / "logs.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["_tick", "_time", "step", "mean_game_return"])
        writer.writerows([i, i, 1000 * (i + 1), value] for i, value in enumerate(returns))
    (folder / "meta.json").write_text(json.dumps({"flags": {"env": env}, "command": ["x.py"]}))
    return folder


@pytest.fixture
def runs(tmp_path):
    """Arguments: two agents, each with two runs of Pong and two of Beam Rider."""
    arguments = []
    for label, better in (("old", 0), ("new", 1)):
        for seed in (1, 2):
            for env, values in (
                ("PongNoFrameskip-v4", ["", -20, 14 + better + seed / 10]),
                ("ALE/BeamRider-v5", ["", 500, 5000 + 1000 * better]),
            ):
                folder = write_run(
                    tmp_path / f"{label}-{env[:5]}-{seed}".replace("/", ""), env, values
                )
                arguments.append(f"{label}={folder}")
    return arguments


def test_a_report_has_tables_and_a_picture(runs, tmp_path, capsys):
    report.main([*runs, "--output", str(tmp_path / "out")])
    text = (tmp_path / "out.md").read_text()
    assert "| new over old | 1.00 (1.00 to 1.00) |" in text and "| old over new | 0.00 (" in text
    assert "| beam_rider | 5,000, 5,000 | 6,000, 6,000 |" in text
    assert "| pong | 14.1, 14.2 | 15.1, 15.2 |" in text
    # Of a random player Pong's score is -20.7, of a human one 14.6; Beam Rider's 363.9, 16926.5.
    middle = ((14.1 + 20.7) / (14.6 + 20.7) + (5000 - 363.9) / (16926.5 - 363.9)) / 2
    assert f"| old | 2 x 2 games | {middle:.3f} (" in text
    assert (tmp_path / "out.png").stat().st_size > 10_000 and "out.png" in text
    assert text.splitlines()[0] in capsys.readouterr().out
    # What it says of its runs can be cited with it.
    assert "- Scores are of mean_game_return at the end" in text
    assert f"- old: {runs[0].partition('=')[2]}/logs.csv: return 14.1, 3,000 steps" in text


def test_a_run_with_two_names_counts_once_and_has_no_interval(tmp_path, capsys):
    one = write_run(tmp_path / "one", "PongNoFrameskip-v4", [1, 2, 3, 4, 5])
    (tmp_path / "latest").symlink_to("one")
    report.main([str(one), str(tmp_path / "latest"), "--output", str(tmp_path / "out")])
    assert f"| runs | 1 x 1 games | {(5 + 20.7) / (14.6 + 20.7):.3f} | " in capsys.readouterr().out
    two = write_run(tmp_path / "two", "PongNoFrameskip-v4", [1, 2])
    report.main([str(one), str(two), "--output", str(tmp_path / "out")])
    assert f"{two}/logs.csv ends at 2,000 steps, others later" in capsys.readouterr().out


def test_scores_are_those_at_the_steps_that_are_asked_for(runs, tmp_path):
    report.main([*runs, "--output", str(tmp_path / "out"), "--steps", "2500"])
    assert "| pong | -20.0, -20.0 | -20.0, -20.0 |" in (tmp_path / "out.md").read_text()


def test_curves_follow_the_runs(runs):
    read = [read_run(argument, []) for argument in runs[:4]]
    report.choose_returns(read)
    groups = group(read)
    references = report.read_references(statistics.HUMAN_SCORES)
    steps, scores = report.compute_curves(groups, references, "")["old"]
    assert (steps[0], steps[-1]) == (2000, 3000) and scores.shape == (report.NUM_POINTS, 2, 2)
    assert scores[0, :, 1] == pytest.approx((-20 + 20.7) / (14.6 + 20.7))
    assert scores[-1, :, 1] == pytest.approx([(x + 20.7) / (14.6 + 20.7) for x in (14.1, 14.2)])


def test_games_are_not_compared_with_lives(tmp_path, capsys):
    paths = [write_run(tmp_path / name, "PongNoFrameskip-v4", [1, 2]) for name in "ab"]
    lives = "_tick,_time,step,mean_game_return,mean_episode_return\n0,0,1000,,7\n1,1,2000,,8\n"
    (paths[1] / "logs.csv").write_text(lives)
    with pytest.raises(PlotError, match=f"{paths[1]}/logs.csv: no mean_game_return yet"):
        report.main([str(path) for path in paths])
    (paths[0] / "logs.csv").write_text(lives.replace("7", "5").replace("8", "6"))
    report.main([*map(str, paths), "--output", str(tmp_path / "out")])
    assert "| pong | 6.0, 8.0 |" in (tmp_path / "out.md").read_text()  # where none has games
    assert "Scores are of mean_episode_return" in capsys.readouterr().out


def with_commit(meta, commit):
    return json.dumps(json.loads(meta) | {"git": {"commit": commit}})


def test_only_games_of_atari_go_by_one_name(tmp_path, capsys):
    names = ["PongNoFrameskip-v4", "ALE/Pong-v5", "CartPole-v0", "CartPole-v1", "MinAtar/Pong-v1"]
    names.append("breakout")  # some other game
    runs = [read_run(str(write_run(tmp_path / str(i), n, [1, 2])), []) for i, n in enumerate(names)]
    assert [report.name_game(run) for run in runs] == ["pong", "pong", *names[2:]]
    one, two = (tmp_path / name for name in "01")
    text = (two / "meta.json").read_text()
    text = text.replace('"env"', '"sticky_actions": 0.25, "env"')
    (one / "meta.json").write_text(with_commit((one / "meta.json").read_text(), "abcdefg"))
    (two / "meta.json").write_text(with_commit(text, "1234567"))
    report.main([str(one), str(two), "--output", str(tmp_path / "out")])
    output = capsys.readouterr().out
    assert "runs: --sticky_actions is -, 0.25 in runs of one agent" in output
    assert "runs: runs of several commits (" in output
    assert "pong is of PongNoFrameskip-v4, ALE/Pong-v5" in output


def test_runs_that_do_not_overlap_have_no_curve(tmp_path):
    late = write_run(tmp_path / "a", "PongNoFrameskip-v4", ["", "", 1])
    early = write_run(tmp_path / "b", "PongNoFrameskip-v4", [1, 2])
    report.main([str(late), str(early), "--output", str(tmp_path / "out")])
    assert "| pong | 1.0, 2.0 |" in (tmp_path / "out.md").read_text()


def test_published_means_stand_beside_the_runs(runs, tmp_path):
    published = tmp_path / "published.csv"
    published.write_text(
        "agent,game,steps,return\nDQN,pong,2000,0\nDQN,beam_rider,2000,1000\nDQN,pong,3000,10\n"
        "DQN,beam_rider,3000,2000\n\nC51,pong,3000,5\n"
    )
    output = ["--output", str(tmp_path / "out"), "--published", str(published)]
    report.main([*runs, *output, "--steps", "3000"])
    text = (tmp_path / "out.md").read_text()
    assert "| pong | 14.1, 14.2 | 15.1, 15.2 | 10.0 |" in text and "C51" not in text
    assert "| game | old | new | DQN (published) |" in text
    middle = ((10 + 20.7) / (14.6 + 20.7) + (2000 - 363.9) / (16926.5 - 363.9)) / 2
    assert f"| DQN (published) | means | {middle:.3f} | " in text
    report.main([*runs, *output])  # who does not say at how many steps gets the curves alone
    text = (tmp_path / "out.md").read_text()
    assert "| DQN (published)" not in text
    assert "- the table is without DQN (published): no means at the end" in text


def write(folder, text):
    (folder / "scores.csv").write_text(text)
    return folder / "scores.csv"


def without_meta(run):
    (pathlib.Path(run.partition("=")[2]) / "meta.json").unlink()
    return run


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda runs, _: runs[:-1], "new needs as many runs of each game: beam_rider 1, pong 2"),
     (lambda runs, _: runs[:4] + runs[4::2], "only one of old and new has runs of beam_rider"),
     (lambda runs, _: [*runs, runs[0].partition("=")[2]], "some have none: write LABEL=RUN"),
     (lambda runs, _: [*runs, "--steps", "9000"], "ends at 3,000 steps, before --steps 9,000"),
     (lambda runs, _: [*runs, "--steps", "1500"], "no return yet after --steps 1,500"),
     (lambda runs, path: [write_run(path / "x", "MinAtar/Breakout-v0", [1, 2])],
      "no scores of MinAtar/Breakout-v0: give others by --scores"),
     (lambda runs, path: [write_run(path / "x", None, [1, 2])], "meta.json, which names the game"),
     (lambda runs, path: [without_meta(runs[0])], "meta.json, which names the game"),
     (lambda runs, path: [*runs, "--scores", path / "none.csv"], "cannot read .*none.csv"),
     (lambda runs, path: [*runs, "--scores", write(path, "game,low,high\n\npong,nan,1\n")],
      "a score of pong is no number"),
     (lambda runs, path: [*runs, "--published", path / "none.csv"], "cannot read .*none.csv"),
     (lambda runs, path: [*runs, "--published", str(statistics.HUMAN_SCORES)],
      "cannot read .*atari57.csv"),
     (lambda runs, path: [*runs, "--scores", write(path, "x" * 200_000)], "cannot read .*csv"),
     (lambda runs, path: [*runs, "--published", write(path, f"\n{'x' * 200_000}")],
      "cannot read .*csv"),
     (lambda runs, _: [*runs, "--output", "."], "--output is ., a folder: name a file in it"),
     (lambda runs, path: [*runs, "--published", ROOT / "results" / "dopamine.csv"],
      "no agent with all of beam_rider, pong")],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(change, message, runs, tmp_path):
    with pytest.raises(PlotError, match=message):
        report.main([str(word) for word in change(runs, tmp_path)])
    assert not list(tmp_path.glob("*.md"))


def test_other_games_with_scores_of_ones_own(tmp_path):
    table = tmp_path / "scores.csv"
    table.write_text("game,low,high\nMinAtar/Breakout-v0,0,10\n")
    run = write_run(tmp_path / "x", "MinAtar/Breakout-v0", [1, 5])
    report.main([str(run), "--scores", str(table), "--output", str(tmp_path / "out")])
    assert "| runs | 1 x 1 games | 0.500 |" in (tmp_path / "out.md").read_text()
