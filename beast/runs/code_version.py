# SPDX-License-Identifier: Apache-2.0
"""Program and commit of a run."""

import hashlib
import json
import logging
import pathlib
import subprocess
import sys


def run_git(*arguments):
    """Return git's output for this folder; None if it is no repository."""
    try:
        return subprocess.run(
            ["git", "-C", pathlib.Path(__file__).parent, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def compare_code(path):
    """Warn if a run's meta.json names another commit or program than this one."""
    try:
        meta = json.loads((path / "meta.json").read_text())
        theirs = _name_code(meta["command"], meta["git"])
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return  # it is not there, or damaged
    ours = _name_code(sys.argv, describe_git())
    if theirs != ours:
        logging.warning(
            f"{path} was written by {theirs}; this is {ours}: its net or environment may differ"
        )


def _name_code(command, git):
    # A file that git does not know, as a log, is no change.
    changes = [line for line in (git["changed"] or "").splitlines() if not line.startswith("??")]
    commit = f"commit {git['commit'][:7]}" if git["commit"] else "no commit"
    changed = f" with changes ({', '.join(changes)})" if changes else ""
    return f"{pathlib.Path(command[0]).name} of {commit}{changed}"


def describe_code():
    """Return the commit of this repository, with a hash of changes that are not committed."""
    # The same text for the same changes, whatever the clone and the user's configuration of git.
    options = "--full-index --no-ext-diff --no-textconv --no-color --no-renames --unified=3"
    options += " --diff-algorithm=myers --src-prefix=a/ --dst-prefix=b/ --no-relative"
    options += " --inter-hunk-context=0"
    changes = run_git("-c", "core.quotePath=true", "diff", *options.split(), "HEAD") or ""
    changes = hashlib.sha256(changes.encode()).hexdigest()[:8]
    return f"{run_git('rev-parse', 'HEAD')} with changes {changes}"


def describe_git():
    return {
        "commit": run_git("rev-parse", "HEAD"),
        "changed": run_git("status", "--porcelain"),
    }
