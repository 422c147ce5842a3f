# SPDX-License-Identifier: Apache-2.0
"""What the learner of a fault campaign refuses."""


def check_rows(batch):
    """Raise AssertionError where a batch holds values that no game of Pong gives."""
    frame, reward, episode_return = batch["frame"], batch["reward"], batch["episode_return"]
    if str(frame.dtype) != "torch.uint8" or frame.shape[2:] != (4, 84, 84):
        raise AssertionError(f"a broken row: frames are {frame.dtype}{list(frame.shape)}")
    if not bool((reward.abs() <= 1).all()):  # nor NaN
        raise AssertionError(f"a broken row: rewards are {reward.unique().tolist()}")
    if not bool((episode_return.abs() <= 21).all()):
        raise AssertionError(f"a broken row: returns are {episode_return.unique().tolist()}")
