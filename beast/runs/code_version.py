# SPDX-License-Identifier: Apache-2.0
"""Program and commit of a run."""

import hashlib
import json
import logging
import pathlib
import subprocess
import sys


def run_git(*arguments):
    """Return git's output for this folder, as bytes; None if it is no repository.

    It takes no lock, which would stay, and stop all commits, if we were killed meanwhile.
    """
    command = ["git", "--no-optional-locks", "-C", pathlib.Path(__file__).parent]
    command += ["-c", "core.quotePath=true"]
    try:
        return subprocess.run(
            [*command, *arguments], capture_output=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def compare_code(path):
    """Warn if a run's meta.json names another commit or program than this one."""
    try:
        meta = json.loads((path / "meta.json").read_text())
        theirs, has_diff = _name_code(meta["command"], meta["git"]), "diff" in meta["git"]
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return  # it is not there, or damaged
    # Earlier versions wrote no diff.
    ours = _name_code(sys.argv, describe_git() | ({} if has_diff else {"diff": None}))
    if theirs != ours:
        logging.warning(
            f"{path} was written by {theirs}; this is {ours}: its net or environment may differ"
        )


def list_changes(command, git):
    """Return the changed files of a run, by its command and what `describe_git` wrote."""
    lines = (git.get("changed") or "").splitlines()
    program = f"?? {pathlib.Path(command[0]).name}"
    # Of files that git does not know, as a log may be, the program counts.
    return [line for line in lines if line == program or not line.startswith("??")]


def _name_code(command, git):
    changes = list_changes(command, git)
    changes += [git["diff"]] if git.get("diff") else []
    commit = f"commit {git['commit'][:7]}" if git["commit"] else "no commit"
    changed = f" with changes ({', '.join(map(str.strip, changes))})" if changes else ""
    return f"{pathlib.Path(command[0]).name} of {commit}{changed}"


def describe_code():
    """Return the commit of this repository, with a hash of changes that are not committed.

    Where git does not work, it is a hash of all programs and modules.
    """
    if run_git("rev-parse", "HEAD") is None:
        root = pathlib.Path(__file__).parents[2]
        folders = "*.py", "beast/**/*.py", "libtorchbeast/**/*.py"
        files = sorted(file for pattern in folders for file in root.glob(pattern))
        return f"no git, all .py files {_hash(b''.join(file.read_bytes() for file in files))}"
    return f"{_read_text('rev-parse', 'HEAD')} with changes {_hash(_read_diff())}"


def describe_git():
    """Return commit, changed files, and the name of the file that `write_diff` makes, or None."""
    diff = _read_diff()
    return {
        "commit": _read_text("rev-parse", "HEAD"),
        "changed": _read_text("status", "--porcelain"),
        "diff": _name_diff(diff) if diff else None,
    }


def write_diff(folder):
    """Write what is not committed into a file, for `git apply`; not files that git does not know.

    Raises:
      OSError: it cannot be written.
    """
    from beast.runs.atomic_files import replace_file  # here, since that is torch's, but plots not

    if diff := _read_diff():
        replace_file(folder / _name_diff(diff), diff)


def _read_text(*arguments):
    output = run_git(*arguments)
    return None if output is None else output.decode(errors="replace").strip()


def _read_diff():
    # The same bytes for the same changes, whatever the clone and the user's configuration of git.
    options = "--full-index --no-ext-diff --no-textconv --no-color --no-renames --unified=3"
    options += " --diff-algorithm=myers --src-prefix=a/ --dst-prefix=b/ --no-relative"
    options += " --inter-hunk-context=0 --binary"
    return run_git("diff", *options.split(), "HEAD") or b""


def _name_diff(diff):
    return f"changes-{_hash(diff)}.diff"


def _hash(content):
    return hashlib.sha256(content).hexdigest()[:8]
