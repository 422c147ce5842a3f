# SPDX-License-Identifier: Apache-2.0
"""Statistics of few runs on several games. Scores are arrays [runs, games]. No torch here.

After Agarwal et al. (2021), "Deep reinforcement learning at the edge of the statistical precipice".
Intervals are of 95 %, by percentiles of a bootstrap that is stratified: runs are drawn again for
each game by itself.
"""

import csv
import functools
import pathlib

import numpy as np

# Scores of a random player and a human in Atari's games, of DQN Zoo: no-op starts, at most 30
# minutes a game. Video Pinball swamps any mean.
HUMAN_SCORES = pathlib.Path(__file__).with_name("atari57.csv")
SEED, CHUNK = 0, 1000  # of the bootstrap; samples at a time, which bounds the memory


def read_references(path):
    """Return a dict from games to the scores that count as 0 and as 1."""
    with open(path, newline="") as file:
        rows = [row for row in list(csv.reader(file))[1:] if row]
    references = {row[0]: (float(row[1]), float(row[2])) for row in rows}
    if odd := [game for game, scores in references.items() if not np.isfinite(scores).all()]:
        raise ValueError(f"a score of {odd[0]} is no number")
    if equal := [game for game, (low, high) in references.items() if low == high]:
        raise ValueError(f"the two scores of {equal[0]} are equal")
    return references


@functools.cache
def _read_human_scores():
    return read_references(HUMAN_SCORES)


def human_normalized(game, score):
    """Return the human-normalized score: 0 random, 1 human; None for other games than Atari's."""
    if game not in _read_human_scores():
        return None
    random, human = _read_human_scores()[game]
    return (score - random) / (human - random)


def show(score):
    """Return a score as text, with four digits and all of those before the point."""
    return f"{score:,.0f}" if abs(score) >= 1000 else f"{score:.4g}"


def interquartile_mean(scores):
    """Return the mean of the middle half of all scores, [..., runs, games] -> [...]."""
    flat = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = flat.shape[-1] // 4
    return flat[..., cut : flat.shape[-1] - cut].mean(axis=-1)


def median(scores):
    """Return the median over games of their mean scores."""
    return np.median(scores.mean(axis=-2), axis=-1)


def mean(scores):
    return scores.mean(axis=(-2, -1))


def optimality_gap(scores):
    """Return by how much scores fall short of 1, on average."""
    return 1 - np.minimum(scores, 1).mean(axis=(-2, -1))


def profile(scores, levels):
    """Return for each level the share of scores above it, [..., runs, games] -> [..., levels]."""
    return (scores[..., None] > levels).mean(axis=(-3, -2))


def probability_of_improvement(scores, others):
    """Return how probably a run has a higher score than one of the others, averaged over games.

    Args:
      scores, others: [..., runs, games], of as many runs each as there are.
    """
    difference = scores[..., :, None, :] - others[..., None, :, :]
    return (0.5 + 0.5 * np.sign(difference)).mean(axis=(-3, -2, -1))


def interval(statistic, *scores, num_samples=10_000):
    """Return lowest and highest value, [2, ...], of a statistic of one or more arrays of scores."""
    random = np.random.default_rng(SEED)
    values = []
    for begin in range(0, num_samples, CHUNK):
        size = min(CHUNK, num_samples - begin)
        values.append(statistic(*(draw_again(s, size, random) for s in scores)))
    return np.percentile(np.concatenate(values), [2.5, 97.5], axis=0)


def draw_again(scores, num_samples, random):
    """Return samples [num_samples, runs, games], in each game of the runs that it has."""
    runs = random.integers(len(scores), size=(num_samples, *scores.shape))
    return np.take_along_axis(scores[None], runs, axis=1)
