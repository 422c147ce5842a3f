# SPDX-License-Identifier: Apache-2.0
"""One of several learners, as torchrun starts it.

    torchrun --nproc-per-node 2 tests/helpers/rank.py updates FOLDER PROGRAM
    torchrun --nproc-per-node 2 tests/helpers/rank.py train FOLDER PROGRAM [flags]

`updates` learns with several nets from given batches, of which each rank has its part; `train` is
the program, playing Catch. At the end each rank writes what it has into FOLDER/rank0.tar and so on.

Files in FOLDER have a rank do something, once: `fail1` has rank 1 raise an error, `cut1` has it cut
all its connections. `spoil1` makes its rewards NaN from then on. Arguments after OTHER: are of rank
1 alone; OTHER:commit, OTHER:net, OTHER:optimizer and OTHER:environment give it another one; with
OTHER:late it has no environments for a long time. RANK_TIMEOUT in the environment is how long ranks
wait for one another.
"""

import contextlib
import hashlib
import os
import pathlib
import socket
import sys
import time

import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))

import catch_poly
from batches import SPACE, A, make_batch
from catch import MonoNet
from catch_poly import PolyNet

import monobeast
import polybeast
from beast.actors.weights import LocalWeights
from beast.learners import learner_group, torchrun
from beast.learners.exchange import Exchange
from beast.learners.learner import Learner
from beast.learners.learner_group import ALONE
from beast.nest import map_nest

# The latter two are the program's own. Many CPUs emulate bfloat16, which takes long.
NETS = {"small": 20, "fp32": 20, "bf16": 10}  # updates
PROGRAMS = {"monobeast": monobeast, "polybeast": polybeast}
COLUMNS = 4
EMPTY, BROKEN = 3, 7  # updates in which the last rank has no batch, or one with a NaN


class SmallNet(nn.Module):
    """A net in double precision; one parameter is never used, another one by some batches alone."""

    def __init__(self):
        super().__init__()
        self.policy, self.baseline = nn.Linear(4, A), nn.Linear(4, 1)
        self.unused = nn.Parameter(torch.ones(3))
        self.seldom = nn.Parameter(torch.ones(1))
        self.double()

    def initial_state(self, batch_size):
        return ()

    def forward(self, inputs, agent_state):
        x = inputs["frame"][..., 0, :4, 0].double() / 255
        baseline = self.baseline(x).squeeze(-1)
        positive = inputs["reward"][0] > 0.5
        if positive.any():
            baseline = torch.where(positive, baseline * self.seldom, baseline)
        return {"policy_logits": self.policy(x), "baseline": baseline}, agent_state


def make_net(program, name):
    torch.manual_seed(0)
    if name == "small":
        return SmallNet()
    # PolyBeast's deep net where only ranks are compared: it makes more of differences of rounding.
    arguments = {"model": "shallow"} if name == "fp32" and program is polybeast else {}
    net = (PolyNet if program is polybeast else MonoNet)(SPACE, A, **arguments)
    nn.init.normal_(net.policy.weight, std=0.05)
    return net


def learn(program, name, num_ranks, group=ALONE):
    """Learn from some batches, one of several ranks from its parts; return what came out."""
    precision = "bf16" if name == "bf16" else "fp32"
    # Random batches are far off-policy: with longer steps, differences of rounding soon grow.
    arguments = f"--disable_cuda --precision {precision} --learning_rate 0.0002"
    flags = program.parser.parse_args(arguments.split())
    net = make_net(program, name)
    optimizer, decay = program.create_optimizer(flags, net)
    learner = Learner(net, optimizer, decay, LocalWeights(net))
    learner.group.share_state(learner)
    size, rank, results = COLUMNS // num_ranks, group.rank, []
    for update in range(NETS[name]):
        batch = make_batch(update, B=COLUMNS)
        if name == "small":
            batch = map_nest(lambda x: x.double() if x.is_floating_point() else x, batch)
        if update == BROKEN:
            batch["reward"][2, -1] = torch.nan
            batch["truncated"][:] = False
            batch["terminated"][:] = False
        end = COLUMNS - size if update == EMPTY else COLUMNS
        part = slice(0, end)
        if group is not ALONE:
            part = slice(rank * size, min(end, (rank + 1) * size))
        columns = map_nest(lambda x, part=part: x[:, part], batch)
        columns = columns if columns["reward"].numel() else None
        metrics = program.learn(flags, net, columns, (), optimizer, group)
        if group is not ALONE:
            group.exchange.share_returns([], [])  # as an update is recorded
        results.append(metrics | {"not_finite": list(group.exchange.not_finite)})
        learner.count(int(metrics["steps"]), [], [])
    rate = learner.scheduler.get_last_lr()
    gradients = {n: p.grad for n, p in net.named_parameters()}
    return {"results": results, "weights": net.state_dict(), "rate": rate, "gradients": gradients}


def differ(program, what):
    """Give this rank another commit than the others have, or an environment that is late."""
    if what == "commit":
        torchrun.describe_code = lambda: "0123abc"
    else:

        def create_env(flags):
            (pathlib.Path(flags.savedir) / "late").touch()
            time.sleep(300)

        program.create_env = create_env


def disturb(folder, rank, batch):
    """Do what files in the folder say."""

    def remove(name):
        path = folder / f"{name}{rank}"
        is_there = path.exists()
        path.unlink(missing_ok=True)
        return is_there

    if remove("fail"):
        raise ValueError(f"rank {rank} was asked to fail")
    if remove("cut"):
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.shutdown(socket.SHUT_RDWR)
    if (folder / f"spoil{rank}").exists() and batch is not None:
        batch["reward"][1:] = torch.nan


def main():
    if sys.argv[1] == "--mode":  # an evaluation
        return PROGRAMS[os.environ["RANK_PROGRAM"]].main()
    kind, folder, program_name, *arguments = sys.argv[1:]
    torchrun.TIMEOUT = learner_group.TIMEOUT = int(os.environ.get("RANK_TIMEOUT", torchrun.TIMEOUT))
    program, os.environ["RANK_PROGRAM"] = PROGRAMS[program_name], program_name
    if kind == "updates":
        found = torchrun.join_group(program.parser.parse_args(["--disable_cuda"]))
        content = {}
        for name in NETS:
            found.exchange = Exchange()
            content[name] = learn(program, name, found.size, found)
        found.leave(is_over=True)
    else:
        made, found = [], None

        class Watched(Learner):
            def __init__(self, *args):
                super().__init__(*args)
                made.append(self)
                nonlocal found
                found = self.group

        def disturbed_learn(flags, model, batch, *others, learn=program.learn):
            disturb(pathlib.Path(folder), found.rank, batch)
            return learn(flags, model, batch, *others)

        program.Learner, program.learn = Watched, disturbed_learn
        of_rank_1 = [a.removeprefix("OTHER:") for a in arguments if a.startswith("OTHER:")]
        sys.argv[1:] = [a for a in arguments if not a.startswith("OTHER:")]
        for argument in of_rank_1 if os.environ["RANK"] == "1" else []:
            if argument in ("commit", "late"):
                differ(program, argument)
            else:
                sys.argv.append(argument)
        status = program.main()
        weights = b"".join(w.numpy().tobytes() for w in made[0].model.state_dict().values())
        content = {"weights": hashlib.sha256(weights).hexdigest(), "stats": made[0].stats}
        content |= {"status": status}
    torch.save(content, pathlib.Path(folder, f"rank{found.rank}.tar"))
    return content.get("status", 0)


if __name__ == "__main__":
    assert catch_poly  # with which PolyBeast plays Catch
    monobeast.run_program(main)
