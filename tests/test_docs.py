# SPDX-License-Identifier: Apache-2.0
"""What README.md and other pages name exists: files, headings, flags, targets of make."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import monobeast
from beast import queue_runs

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "campaigns", "docs", "examples", "results")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
PAGES += [page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md"))]
PROGRAMS = ("monobeast", "polybeast", "polybeast_env", "ppo", "gala", "dqn", "sac")
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.M | re.S)


def name(page):
    return str(page.relative_to(ROOT))


def prose(page):
    return FENCE.sub("", page.read_text())


def anchors(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page):
    """Return the commands in blocks of the shell, each as a list of words."""
    found = []
    for language, block in FENCE.findall(page.read_text()):
        if language not in ("bash", "sh"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            found.append([])
            words = shlex.split(line, comments=True)
            for i, word in enumerate(words):
                if word == "--wrap":  # Slurm's, which takes a command as one word
                    words[i + 1 : i + 2] = ["&&", *shlex.split(words[i + 1])]
            for word in words:
                if word in ("&", "&&", "|"):
                    found.append([])
                else:
                    found[-1].append(word)
    return [command for command in found if command]


def calls():
    """Return (script, its arguments) of all that Python is told to run."""
    for page in PAGES:
        for command in commands(page):
            for i, word in enumerate(command[:-1]):
                if word == "torchrun":
                    words = [word for word in command[i + 1 :] if word != "..."]
                    options = get_args_parser().parse_args(words)
                    script, arguments = options.training_script, options.training_script_args
                elif word.endswith("python"):
                    script, *arguments = command[i + 1 :]
                else:
                    continue
                if "beast.queue_runs" in command[:i]:
                    arguments = queue_runs.expand(arguments)[0]
                if script == "-m" and arguments[0].startswith("beast."):
                    script, *arguments = arguments
                    script = script.replace(".", "/") + ".py"
                if script == "beast/autotune.py":  # a program and its flags
                    script, *arguments = arguments
                if script in ("beast/queue_runs.py", "polybeast_ray.py"):  # its own, then others'
                    arguments = arguments[: arguments.index("--")]
                if script.endswith(".py") and script != "reinforce.py":
                    shown = f"{name(page)}: {' '.join(command[i:])}"
                    yield pytest.param(script, arguments, id=shown)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_files_and_targets_of_make_that_are_named_exist(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        path = (page.parent / path).resolve() if path else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), target
    file = re.compile(r"[\w./-]+\.(py|sh|diff|proto|md|toml|yaml)|requirements[\w-]*\.txt")
    words = re.findall(r"`([^`\s]+)`", prose(page))
    words += [word for command in commands(page) for word in command]
    for word in filter(file.fullmatch, words):
        folders = (ROOT, page.parent, ROOT / "beast")
        assert word == "reinforce.py" or any((folder / word).exists() for folder in folders), word
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"(?:^|`)make (\w+)", page.read_text(), re.M)) <= set(targets)


@pytest.mark.parametrize("script, arguments", list(calls()))
def test_flags_that_are_shown_are_taken(script, arguments):
    module = script.removesuffix(".py").replace("/", ".")
    if module in (*PROGRAMS, "beast.plot"):
        importlib.import_module(module).parser.parse_args(arguments)
    else:
        source = (ROOT / script).read_text()
        if "monobeast.parser" in source:  # MonoBeast's flags, and some of its own
            source += "".join(f'"{flag}"' for flag in monobeast.parser._option_string_actions)
        for word in arguments:
            if word.startswith("--"):
                assert f'"{word.partition("=")[0]}"' in source, word


MOST_WORDS = {
    "README.md": 900,
    "CONTRIBUTING.md": 350,
    "SECURITY.md": 900,
    "docs/*.md": 10_000,
    "benchmarks/README.md": 2_000,
    "campaigns/README.md": 800,
    "results/README.md": 1_500,
}


@pytest.mark.parametrize("pages", MOST_WORDS)
def test_pages_are_short(pages):
    words = [word for page in ROOT.glob(pages) for word in page.read_text().split()]
    assert 0 < len(words) <= MOST_WORDS[pages]


def test_docs_are_few_and_all_are_in_the_index():
    pages = [page.name for page in (ROOT / "docs").glob("*.md")]
    index = (ROOT / "docs" / "README.md").read_text()
    assert [page for page in pages if f"({page})" not in index] == ["README.md"]
    assert len(pages) <= 14


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_has_groups_defaults_and_seconds(program):
    parser = importlib.import_module(program).parser
    shown = " ".join(parser.format_help().split())
    groups = {group.title: group._group_actions for group in parser._action_groups}
    assert [action.dest for action in groups.pop("options")] == ["help"]
    actions = [action for group in groups.values() for action in group]
    assert len(groups) >= 3 and len(actions) >= 15
    for action in actions:
        assert action.help, action.dest
        if action.default is not None and not isinstance(action.default, bool):
            assert f"(default: {action.default})" in shown, action.dest
        elif action.default is None and action.type in (int, float):
            assert re.search("by default|default:|where", action.help.lower()), action.dest
        if action.dest.endswith("_s"):
            assert action.help.startswith("Seconds"), action.dest
