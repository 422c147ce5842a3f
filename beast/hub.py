# SPDX-License-Identifier: Apache-2.0
"""Share a run's weights with a card, its curve, and a score that anybody can check.

    python -m beast.hub push ~/logs/torchbeast/RUN weights/pong    plays games, makes the folder
    python -m beast.hub push ~/logs/torchbeast/RUN hf:NAME/REPO    the same on the Hugging Face Hub
    python -m beast.hub pull hf:NAME/REPO ~/logs/torchbeast/RUN    for --mode test
    python -m beast.hub test weights/*                             plays all of their games again

A shared folder has model.safetensors, with the run's flags in its header; test.json, the score;
README.md, the card; and of the run meta.json, logs.csv and curves.png. Reading it runs no code.
What stands behind -- are flags of the test, as in `push RUN TARGET -- --greedy`.

Needs safetensors, the Hub huggingface_hub, too (pip install safetensors huggingface_hub).
"""

import argparse
import contextlib
import json
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

import torch

from beast import plot
from beast.errors import FlagError
from beast.parser import positive
from beast.runs import checkpoint
from beast.runs.curves import PlotError

ROOT = pathlib.Path(__file__).resolve().parent.parent
WEIGHTS, SCORE, CARD, PICTURE = "model.safetensors", "test.json", "README.md", "curves.png"
OF_RUN = ("meta.json", "logs.csv")
HUB = "hf:"
# A checkpoint's name of its optimizer: training cannot go on with it.
NO_OPTIMIZER = "no optimizer (pulled weights, for --mode test alone)"

# fmt: off
parser = argparse.ArgumentParser(
    prog="python -m beast.hub", description="Share weights with a card, a curve and a score.",
    allow_abbrev=False)
commands = parser.add_subparsers(dest="command", required=True)
push_parser = commands.add_parser("push", help="Pack the weights of a run, and test them.")
push_parser.add_argument("run", type=pathlib.Path, help="Folder of the run.")
push_parser.add_argument("target", help="A new folder, or hf:NAME/REPO.")
push_parser.add_argument("--best", action="store_true",
                         help="The checkpoint with the highest mean return of 100 games.")
pull_parser = commands.add_parser("pull", help="Make a run, for --mode test, of packed weights.")
pull_parser.add_argument("source", help="A folder, or hf:NAME/REPO.")
pull_parser.add_argument("run", type=pathlib.Path, help="Folder of the run to be made.")
test_parser = commands.add_parser("test", help="Test packed weights as they were tested before.")
test_parser.add_argument("sources", nargs="+", metavar="SOURCE", help="A folder, or hf:NAME/REPO.")
for command in (push_parser, test_parser):
    command.add_argument("--num_episodes", default=100, type=positive(int),
                         help="Games to play. Default: %(default)s.")
# fmt: on


def pack(run, name, folder):
    """Write the weights of a run's checkpoint into a folder, and what else belongs to the run."""
    from safetensors.torch import save_file

    try:
        program = json.loads((run / "meta.json").read_text())["flags"]["program"]
    except (OSError, ValueError, KeyError) as error:
        raise FlagError(f"{run} is no run: its meta.json cannot be read ({error!r})") from None
    saved = checkpoint.load(
        argparse.Namespace(savedir=run.parent, xpid=run.name, program=program), name
    )
    if saved is None:
        raise FlagError(f"{run} has no {name}")
    weights = saved.pop("model_state_dict")
    if others := [key for key, value in weights.items() if not torch.is_tensor(value)]:
        raise FlagError(f"{run / name} has weights that are no tensors: {', '.join(others)}")
    header = {key: saved.get(key) for key in ("step", "time", "net", "flags")}
    save_file(
        {key: value.clone(memory_format=torch.contiguous_format) for key, value in weights.items()},
        folder / WEIGHTS,
        {"checkpoint": json.dumps(header)},
    )
    for file in OF_RUN:
        shutil.copy(run / file, folder)
    with contextlib.redirect_stdout(sys.stderr):
        plot.main([str(run), "--output", str(folder / PICTURE)])


def read_header(folder):
    """Return what `pack` wrote beside the weights: step, time, net and flags."""
    from safetensors import safe_open

    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            return json.loads(file.metadata()["checkpoint"])
    except Exception as error:
        raise FlagError(f"{folder} has no {WEIGHTS} of beast.hub ({error!r})") from None


def unpack(folder, run):
    """Make a run of a shared folder."""
    from safetensors.torch import load_file

    header = read_header(folder)
    weights = load_file(folder / WEIGHTS)
    if (run / checkpoint.NEWEST).exists():
        raise FlagError(f"{run} has a checkpoint already: choose another folder")
    run.mkdir(parents=True, exist_ok=True)
    for file in (*OF_RUN, SCORE, CARD, PICTURE):
        if (folder / file).exists():
            shutil.copy(folder / file, run)
    states = {"optimizer_state_dict": {}, "scheduler_state_dict": {}, "random_states": {}}
    content = {"model_state_dict": weights, "optimizer": NO_OPTIMIZER, **states, **header}
    content["stats"] = {"step": header["step"]}
    (run / checkpoint.NEWEST).write_bytes(checkpoint.to_bytes(content).getvalue())


def play(folder, num_episodes, arguments):
    """Return the result of --mode test with the weights of a folder, as a dict."""
    program = read_header(folder)["flags"]["program"]
    if pathlib.Path(program).name != program or not (ROOT / program).exists():
        raise FlagError(f"{folder} is of {program}, which is not among the programs of {ROOT}")
    with tempfile.TemporaryDirectory() as savedir:
        unpack(folder, pathlib.Path(savedir) / "run")
        result = pathlib.Path(savedir) / "result.json"
        flags = ["--mode", "test", "--xpid", "run", "--savedir", savedir, "--result_file", result]
        command = [sys.executable, ROOT / program, *flags, "--num_episodes", str(num_episodes)]
        status = subprocess.run([*command, *arguments], stdout=sys.stderr).returncode
        if status:
            raise FlagError(f"the test of {folder} failed: see above")
        return json.loads(result.read_text())


def describe(result):
    """Return mean and 95 % confidence interval of a test as text."""
    mean, half = result["mean"], result["ci95"]
    return f"{mean:.4g}" + (f" ({mean - half:.4g} to {mean + half:.4g})" if half else "")


def write_card(folder, target):
    """Write README.md, with a header that the Hub reads."""
    meta, score = (json.loads((folder / name).read_text()) for name in ("meta.json", SCORE))
    flags, name = read_header(folder)["flags"], pathlib.Path(target.removeprefix(HUB)).name
    test = shlex.join(["--num_episodes", str(len(score["returns"])), *score["arguments"]])
    metric = {"type": "mean_reward", "name": "mean return", "value": score["mean"]}
    task = {"type": "reinforcement-learning", "name": "reinforcement learning"}
    dataset = {"type": flags["env"], "name": flags["env"]}
    index = [{"name": name, "results": [{"task": task, "dataset": dataset, "metrics": [metric]}]}]
    (folder / CARD).write_text(f"""\
---
tags: [reinforcement-learning, {pathlib.Path(flags["program"]).stem}]
model-index: {json.dumps(index)}
---
# {flags["env"]} by {flags["program"]}

Mean return of {len(score["returns"])} games: **{describe(score)}** ({score["protocol"]}).
After {score["step"]:,} agent steps; commit {meta.get("git", {}).get("commit")}.

```bash
python {shlex.join(meta["command"])}
```

![Learning curve]({PICTURE})

```bash
python -m beast.hub pull {shlex.quote(target)} ~/logs/torchbeast/{name}
python {flags["program"]} --mode test --xpid {name} {test}
```
""")


@contextlib.contextmanager
def fetched(source):
    """Context manager for the folder of a source: the folder itself, or a copy from the Hub."""
    with tempfile.TemporaryDirectory() as copy:
        if source.startswith(HUB):
            with translated(source):
                get_hub().snapshot_download(source.removeprefix(HUB), local_dir=copy)
        yield pathlib.Path(copy if source.startswith(HUB) else source).expanduser()


def deliver(folder, target):
    """Copy a folder to its place, or upload it."""
    if target.startswith(HUB):
        with translated(target):
            api, repository = get_hub().HfApi(), target.removeprefix(HUB)
            api.create_repo(repository, exist_ok=True)
            api.upload_folder(repo_id=repository, folder_path=folder)
        return
    place = pathlib.Path(target).expanduser()
    place.mkdir(parents=True)
    for file in folder.iterdir():  # without their modes, which are those of temporary files
        shutil.copyfile(file, place / file.name)


def get_hub():
    try:
        import huggingface_hub
    except ImportError:
        raise FlagError(f"{HUB} needs a package: pip install huggingface_hub") from None
    return huggingface_hub


@contextlib.contextmanager
def translated(place):
    """Context manager that turns the Hub's errors into a FlagError: it has many kinds of them."""
    try:
        yield
    except FlagError:
        raise
    except Exception as error:
        raise FlagError(f"{place}: {type(error).__name__}: {error}") from None


def push(flags, arguments):
    target = pathlib.Path(flags.target).expanduser()
    if flags.target.startswith(HUB):
        get_hub()
    elif target.exists():
        raise FlagError(f"{target} exists: choose another folder, or remove it")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        run = flags.run.expanduser().resolve()  # perhaps `latest`
        pack(run, checkpoint.BEST if flags.best else checkpoint.NEWEST, folder)
        result = play(folder, flags.num_episodes, arguments) | {"arguments": arguments}
        (folder / SCORE).write_text(json.dumps(result | {"time": time.time()}))
        write_card(folder, flags.target)
        deliver(folder, flags.target)
    print(f"{flags.target}: {describe(result)}")


def test(flags, arguments):
    """Print scores of old and now; return an error where their intervals do not meet."""
    if arguments:
        raise FlagError(f"test has no flags of a test: it takes those of `push` ({arguments[0]})")
    differing = []
    print("| weights | score then | now |\n|---|---|---|", flush=True)
    for source in flags.sources:
        with fetched(source) as folder:
            read_header(folder)
            old = json.loads((folder / SCORE).read_text())
            new = play(folder, flags.num_episodes, old["arguments"])
        halves = (old["ci95"] or 0) + (new["ci95"] or 0)
        if abs(old["mean"] - new["mean"]) > halves:
            differing.append(source)
        print(f"| {source} | {describe(old)} | {describe(new)} |", flush=True)
    return f"scores differ: {', '.join(differing)}" if differing else None


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    flags, arguments = parser.parse_args(argv[:cut]), argv[cut + 1 :]
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise FlagError("this needs a package: pip install safetensors") from None
    if flags.command == "push":
        return push(flags, arguments)
    if flags.command == "test":
        return test(flags, arguments)
    with fetched(flags.source) as folder:
        unpack(folder, flags.run.expanduser())
    return print(f"{flags.run} is ready for --mode test")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (FlagError, PlotError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
