# SPDX-License-Identifier: Apache-2.0
"""Make the diffs in examples/ anew, for the programs as they are committed now.

    python scripts/remake_diffs.py [FILE ...]

Each diff names the file that it was made from by its blob ("index 2726c27..870f91b"). It is applied
to that, and what comes out is merged with today's file. Where both have changed the same lines, the
diff's lines win: read what `git diff` shows, and run tests/test_examples.py.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PART = re.compile(r"^diff --git a/(\S+) .*\nindex (\w+)\.\..*\n(?:(?!diff --git).*\n)*", re.M)


def git(folder, *arguments, **options):
    command = ["git", "-C", folder, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options).stdout


def remake(diff, clone):
    """Return a diff against the clone's HEAD that does the same."""
    for part in PART.finditer(diff):
        path, blob = part.groups()
        today = (clone / path).read_text()
        base = git(clone, "cat-file", "blob", blob)
        (clone / path).write_text(base)
        git(clone, "apply", "-", input=part.group())
        versions = {"today": today, "base": base, "edited": (clone / path).read_text()}
        for name, text in versions.items():
            (clone / ".git" / name).write_text(text)
        files = [clone / ".git" / name for name in versions]
        (clone / path).write_text(git(clone, "merge-file", "-p", "--theirs", *files))
    diff = git(clone, "diff", "-U1")
    git(clone, "checkout", "--quiet", ".")
    return diff


def main():
    files = [Path(name).resolve() for name in sys.argv[1:]]
    files = files or ROOT.glob("examples/*.diff")
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        git(ROOT, "clone", "--quiet", "--shared", ".", clone)
        for file in files:
            file.write_text(remake(file.read_text(), clone))


if __name__ == "__main__":
    main()
