# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/ name is there: files, headings, flags, targets of make."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("monobeast", "polybeast", "polybeast_env")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


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
            words = shlex.split(line, comments=True)
            for i, word in enumerate(words):
                if word == "--wrap":  # Slurm's, which takes a command as one word
                    words[i + 1 : i + 2] = ["&&", *shlex.split(words[i + 1])]
            while words:
                end = next((i for i, word in enumerate(words) if word in ("&", "&&", "|")), None)
                found.append(words[:end])
                words = words[end + 1 :] if end is not None else []
    return [command for command in found if command]


def calls():
    """Return (page, program, its words) of all that Python is told to run."""
    return [
        pytest.param(command[i], command[i + 1 :], id=f"{name(page)}: {' '.join(command[i:])}")
        for page in PAGES
        for command in commands(page)
        for i, word in enumerate(command)
        if word.endswith(".py") and "python" in command[i - 1]
    ]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        path = (page.parent / path).resolve() if path else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_are_named_exist(page):
    file = re.compile(r"[\w./-]+\.(py|sh|diff|proto|md|toml|yaml|txt)")
    words = re.findall(r"`([^`\s]+)`", prose(page))
    words += [word for command in commands(page) for word in command]
    for word in filter(file.fullmatch, words):
        # The README's table of files names what stands in libtorchbeast/ and csrc/ without them.
        assert any((ROOT / folder / word).exists() for folder in ("", "libtorchbeast", "csrc")), (
            word
        )


@pytest.mark.parametrize("script, words", calls())
def test_flags_that_are_shown_are_taken(script, words):
    assert (ROOT / script).exists()
    if Path(script).stem in PROGRAMS and "/" not in script:
        importlib.import_module(Path(script).stem).parser.parse_args(words)
    else:
        source = (ROOT / script).read_text()
        for word in words:
            if word.startswith("--"):
                assert f'"{word.partition("=")[0]}"' in source, word


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_targets_of_make_exist(page):
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    for command in commands(page):
        if command[0] == "make":
            assert command[1] in targets


def test_compose_gives_flags_that_the_programs_take():
    text = (ROOT / "compose.yaml").read_text()
    found = re.findall(r"command: >-\n((?:      .*\n|    --.*\n|    python.*\n)+)", text)
    assert len(found) == 2
    for command in found:
        python, script, *words = command.split()
        assert python == "python"
        importlib.import_module(Path(script).stem).parser.parse_args(words)


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    for page in PAGES:
        assert page.name == "README.md" or f"({page.name})" in index


def test_the_diff_in_the_readme_is_the_one_that_is_applied():
    (block,) = [
        block for lang, block in FENCE.findall((ROOT / "README.md").read_text()) if lang == "diff"
    ]
    assert block == (ROOT / "examples" / "minatar_monobeast.diff").read_text()
