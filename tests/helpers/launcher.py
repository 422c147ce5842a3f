# SPDX-License-Identifier: Apache-2.0
"""Several learners under torchrun, and what they leave at their ends."""

import contextlib
import pathlib
import uuid

from program import HELPERS, ROOT, Program, load, marked

SMALL = {
    "monobeast": "--num_actors 1 --envs_per_actor 4",
    "polybeast": "--num_servers 1 --num_actors 1 --envs_per_stream 4",
}


class Torchrun(Program):
    """Some learners, of which each writes rankN.tar into a folder in the end."""

    def __init__(self, num_ranks, *arguments, options="", where="--standalone", **environ):
        self.mark = f"TORCHRUN_TEST={uuid.uuid4()}"
        launcher = ("torch.distributed.run", where, f"--nproc-per-node {num_ranks}", options)
        name, value = self.mark.split("=")
        script = HELPERS / "rank.py"
        super().__init__("-m", *launcher, script, *arguments, cwd=ROOT, **environ, **{name: value})

    def members(self, word=""):
        """Return the ids of its processes, of which torchrun puts some in sessions of their own."""
        return marked(self.mark, word)

    def rank(self, number):
        """Return the process id of a rank."""
        for pid in self.members("rank.py"):
            with contextlib.suppress(OSError):
                environ = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if f"RANK={number}".encode() in environ:
                    return pid
        return None


def train(num_ranks, folder, program, *arguments, **options):
    return Torchrun(
        num_ranks, "train", folder, program, "--env Catch --xpid run --disable_cuda --batch_size 4",
        SMALL[program], "--savedir", folder, *arguments, **options,
    )  # fmt: skip


def results(folder, num_ranks=2):
    """Return what the ranks wrote at their ends, after checking that they are one policy."""
    contents = [load(folder / f"rank{i}.tar") for i in range(num_ranks)]
    for content in contents[1:]:
        assert content["weights"] == contents[0]["weights"]
        assert content["stats"]["step"] == contents[0]["stats"]["step"]
        assert content["stats"]["game_returns"] == contents[0]["stats"]["game_returns"]
    return contents
