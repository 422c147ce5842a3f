# SPDX-License-Identifier: Apache-2.0
"""Share a run's weights with a card, its curve, and a score that anybody can check.

    python -m beast.hub push ~/logs/torchbeast/RUN weights/pong    plays games, makes the folder
    python -m beast.hub push ~/logs/torchbeast/RUN hf:NAME/REPO    the same on the Hugging Face Hub
    python -m beast.hub pull hf:NAME/REPO ~/logs/torchbeast/RUN    for --mode test
    python -m beast.hub test weights/*                             plays all of their games again

A shared folder has model.safetensors, with the run's flags in its header; test.json, the score;
README.md, the card; and of the run meta.json, logs.csv, curves.png and what was not committed.
Reading it runs no code.
What stands behind -- are more flags of the tests, as in `push RUN TARGET -- --greedy`.

Needs safetensors, the Hub huggingface_hub, too (pip install safetensors huggingface_hub).
"""

import argparse
import contextlib
import json
import logging
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile

import torch

from beast import plot
from beast.errors import FlagError
from beast.parser import positive
from beast.runs import checkpoint, evaluate
from beast.runs.curves import PlotError, read_run
from beast.runs.statistics import show

ROOT = pathlib.Path(__file__).resolve().parent.parent
WEIGHTS, SCORE, CARD, PICTURE = "model.safetensors", "test.json", "README.md", "curves.png"
OF_RUN = ("meta.json", "logs.csv")
FILES = (WEIGHTS, SCORE, CARD, PICTURE, *OF_RUN)
CHANGES = "changes-*.diff"  # of a run whose code was not committed
# What of a checkpoint stands in the header of the weights, and of which types.
HEADER = {"step": 0, "time": 0.0, "net": "", "flags": {"program": ""}}
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
push_parser.add_argument("--half", action="store_true",
                         help="Weights in half of the bytes; the games are played with these.")
pull_parser = commands.add_parser("pull", help="Make a run, for --mode test, of packed weights.")
pull_parser.add_argument("source", help="A folder, or hf:NAME/REPO.")
pull_parser.add_argument("run", type=pathlib.Path, help="Folder of the run to be made.")
test_parser = commands.add_parser("test", help="Test packed weights as they were tested before.")
test_parser.add_argument("sources", nargs="+", metavar="SOURCE", help="A folder, or hf:NAME/REPO.")
for command in (push_parser, test_parser):
    command.add_argument("--num_episodes", default=100, type=positive(int),
                         help="Games to play. Default: %(default)s.")
# What a shared folder may ask of its test; nothing that imports modules or writes files.
test_flags = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
test_flags.add_argument("--greedy", action="store_true")
test_flags.add_argument("--num_test_envs", type=int)
test_flags.add_argument("--seed", type=int)
# fmt: on


@contextlib.contextmanager
def new_folder(path):
    """Context manager for a folder that gets its name when it is complete."""
    if path.exists():
        raise FlagError(f"{path} exists: choose another folder, or remove it")
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.mkdir(parents=True)
    except FileExistsError:
        raise FlagError(
            f"{temporary} is of another command: if that was killed, remove it"
        ) from None
    try:
        yield temporary
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def pack(run, name, folder, half=False):
    """Write the weights of a run's checkpoint into a folder, and what else belongs to the run.

    With `half`, matrices and filters become float16, unless a number is too large for it.
    """
    from safetensors.torch import save

    try:
        program = json.loads((run / "meta.json").read_text())["flags"]["program"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise FlagError(f"{run} is no run: its meta.json cannot be read ({error!r})") from None
    flags = argparse.Namespace(savedir=run.parent, xpid=run.name, program=program)
    saved = checkpoint.load(flags, name)
    if saved is None:
        raise FlagError(f"{run} has no {name}")
    weights = saved["model_state_dict"]
    if others := [key for key, value in weights.items() if not torch.is_tensor(value)]:
        raise FlagError(f"{run / name} has weights that are no tensors: {', '.join(others)}")
    # Copies, since safetensors refuses tensors that share memory, as tied weights do.
    weights = {key: x.clone(memory_format=torch.contiguous_format) for key, x in weights.items()}
    if half:
        large = {key: x for key, x in weights.items() if x.dim() > 1 and x.dtype == torch.float32}
        weights |= {key: x.half() for key, x in large.items() if x.half().isfinite().all()}
    try:
        header = json.dumps({key: saved[key] for key in HEADER})
    except (KeyError, TypeError) as error:  # a tensor among the flags, say
        raise FlagError(f"{run / name} cannot be shared: {error!r}") from None
    (folder / WEIGHTS).write_bytes(save(weights, {"checkpoint": header}))
    for file in [*OF_RUN, *(path.name for path in run.glob(CHANGES))]:
        shutil.copyfile(run / file, folder / file)
    with contextlib.redirect_stdout(sys.stderr):
        plot.main([str(run), "--output", str(folder / PICTURE)])


def read_header(folder):
    """Return what `pack` wrote beside the weights: HEADER's parts."""
    from safetensors import safe_open

    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            header = json.loads(file.metadata()["checkpoint"])
        header = {key: header[key] for key in HEADER}
        checkpoint.check_types(header, HEADER)
        program = pathlib.Path(header["flags"]["program"])
    except Exception as error:  # a file from elsewhere can be anything
        raise FlagError(f"{folder} has no {WEIGHTS} of beast.hub ({error!r})") from None
    if program.suffix != ".py" or program.name != str(program) or not (ROOT / program).is_file():
        raise FlagError(f"{folder} is of {program}, which is not among the programs of {ROOT}")
    return header


def find_program(folder):
    """Return the name of the program that made a run: a copy may still give its parser another."""
    program = read_header(folder)["flags"]["program"]
    try:
        name = pathlib.Path(json.loads((folder / "meta.json").read_text())["command"][0]).name
    except (OSError, ValueError, LookupError, TypeError):  # a file from elsewhere can be anything
        return program
    if name == program or not name.endswith(".py"):
        return program
    if not (ROOT / name).is_file():
        logging.warning("%s is of %s, which is not here: %s takes its place", folder, name, program)
        return program
    # A script of one's own may call a program's main.
    return name if "create_parser(" in (ROOT / name).read_text() else program


def unpack(folder, run):
    """Make a run of a shared folder."""
    from safetensors.torch import load_file

    content = read_header(folder)
    weights = load_file(folder / WEIGHTS)
    weights |= {key: x.float() for key, x in weights.items() if x.dtype == torch.float16}
    content |= {"model_state_dict": weights, "optimizer": NO_OPTIMIZER}
    content |= {"optimizer_state_dict": {}, "scheduler_state_dict": {}, "random_states": {}}
    content["stats"] = {"step": content["step"]}
    with new_folder(run) as new:
        for file in [*FILES, *(path.name for path in folder.glob(CHANGES))]:
            if file != WEIGHTS and (folder / file).exists():
                shutil.copyfile(folder / file, new / file)
        (new / checkpoint.NEWEST).write_bytes(checkpoint.to_bytes(content).getvalue())


def play(folder, num_episodes, arguments):
    """Return the result of --mode test with the weights of a folder, as a dict."""
    program = find_program(folder)
    with tempfile.TemporaryDirectory() as savedir:
        unpack(folder, pathlib.Path(savedir) / "run")
        result = pathlib.Path(savedir) / "result.json"
        flags = ["--mode", "test", "--xpid", "run", "--savedir", savedir]
        flags += ["--num_episodes", str(num_episodes), *arguments, "--result_file", result]
        status = subprocess.run([sys.executable, ROOT / program, *flags], stdout=sys.stderr)
        if status.returncode:
            raise FlagError(
                f"the test of {folder} failed: see above; flags that it asks for go behind --, "
                "as in: -- --env ID"
            )
        return json.loads(result.read_text())


def read_score(folder):
    """Return statistics of the games that were played before, and the flags of that test.

    Only those of test_flags are taken, since others could import modules or write files; who
    trusts them gives them again.
    """
    try:
        score = json.loads((folder / SCORE).read_text())
        arguments = list(map(str, score["arguments"]))
        result = evaluate.summarize(score["returns"], score["steps"])
    except Exception as error:  # a file from elsewhere can be anything
        raise FlagError(f"{folder / SCORE} cannot be read ({error!r})") from None
    try:
        flags, others = test_flags.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise FlagError(f"{folder / SCORE}: {error}") from None
    if others:
        logging.warning("%s: left out, unless given after --: %s", folder, shlex.join(others))
    known = {f"--{name}": value for name, value in vars(flags).items() if value is not None}
    arguments = ["--greedy"] * known.pop("--greedy")
    return result, arguments + [text for pair in known.items() for text in map(str, pair)]


def describe(result):
    """Return mean and 95 % confidence interval of a test as text."""
    mean, half = result["mean"], result["ci95"]
    return show(mean) + (f" ({show(mean - half)} to {show(mean + half)})" if half else "")


def write_card(folder, target):
    """Write README.md, with a header that the Hub reads."""
    run, score = read_run(str(folder), []), json.loads((folder / SCORE).read_text())
    flags, program = read_header(folder)["flags"], find_program(folder)
    name = pathlib.Path(target.removeprefix(HUB)).name
    test = shlex.join(["--num_episodes", str(len(score["returns"])), *score["arguments"]])
    metric = {"type": "mean_reward", "name": "mean return", "value": score["mean"]}
    task = {"type": "reinforcement-learning", "name": "reinforcement learning"}
    dataset = {"type": flags["env"], "name": flags["env"]}
    index = [{"name": name, "results": [{"task": task, "dataset": dataset, "metrics": [metric]}]}]
    lines = []
    for meta in [*run.meta.get("earlier", []), run.meta]:
        number = meta.get("flags", {}).get("num_learners", 1)
        start = "python" if number == 1 else f"torchrun --standalone --nproc-per-node {number}"
        diff = meta.get("git", {}).get("diff")
        changes = f"    # with {diff}" if diff else ""
        lines.append(f"{start} {shlex.join(meta['command'])}{changes}")
    lines = "\n".join(lines)
    (folder / CARD).write_text(f"""\
---
tags: [reinforcement-learning, {pathlib.Path(program).stem}]
model-index: {json.dumps(index)}
---
# {flags["env"]} by {program}

Mean return of {len(score["returns"])} games: **{describe(score)}** ({score["protocol"]}),
after {score["step"]:,} agent steps, by commit {", ".join(run.commits) or "unknown"}:

```bash
{lines}
```

![Learning curve]({PICTURE})

```bash
python -m beast.hub pull {shlex.quote(target)} ~/logs/torchbeast/{shlex.quote(name)}
python {program} --mode test --xpid {shlex.quote(name)} {test}
```
""")


@contextlib.contextmanager
def fetched(source):
    """Context manager for the folder of a source: the folder itself, or a copy from the Hub."""
    if not source.startswith(HUB):
        yield pathlib.Path(source).expanduser()
        return
    with tempfile.TemporaryDirectory() as copy:
        with translated(source):
            repository = source.removeprefix(HUB)
            get_hub().snapshot_download(
                repository, local_dir=copy, allow_patterns=[*FILES, CHANGES]
            )
        yield pathlib.Path(copy)


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
    run = flags.run.expanduser().resolve()  # perhaps `latest`
    repository = flags.target.removeprefix(HUB) if flags.target.startswith(HUB) else None
    with tempfile.TemporaryDirectory() as parent:
        target = pathlib.Path(flags.target).expanduser()
        # Of what can fail, the target comes first: the games may take minutes.
        with new_folder(pathlib.Path(parent) / "packed" if repository else target) as folder:
            pack(run, checkpoint.BEST if flags.best else checkpoint.NEWEST, folder, flags.half)
            with translated(flags.target):
                api = get_hub().HfApi() if repository else None
                if repository:
                    api.create_repo(repository, exist_ok=True)  # of a push that failed, say
                    if api.file_exists(repository, WEIGHTS):
                        raise FlagError(f"{flags.target} has weights: choose another repository")
            result = play(folder, flags.num_episodes, arguments) | {"arguments": arguments}
            (folder / SCORE).write_text(json.dumps(result))
            write_card(folder, flags.target)
            with translated(flags.target):
                if repository:
                    api.upload_folder(repo_id=repository, folder_path=folder)
    print(f"{flags.target}: {describe(result)}")


def test(flags, arguments):
    """Print scores then and now; return an error where something failed, or they differ."""
    failed = []
    print("| weights | score then | now |\n|---|---|---|", flush=True)
    for source in flags.sources:
        try:
            with fetched(source) as folder:
                read_header(folder)
                old, own = read_score(folder)
                new = play(folder, flags.num_episodes, [*own, *arguments])
        except (FlagError, OSError) as error:
            failed.append(source)
            print(f"| {source} | failed: {error} | |", flush=True)
            continue
        halves = (old["ci95"] or 0) + (new["ci95"] or 0)
        if not abs(old["mean"] - new["mean"]) <= halves:
            failed.append(source)
        print(f"| {source} | {describe(old)} | {describe(new)} |", flush=True)
    return f"failed, or with intervals that do not meet: {', '.join(failed)}" if failed else None


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    flags, arguments = parser.parse_args(argv[:cut]), argv[cut + 1 :]
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise FlagError("this needs a package: pip install safetensors") from None
    if getattr(flags, "num_episodes", 2) < 2:
        raise FlagError("--num_episodes is 1, which has no interval: give 2 or more")
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
