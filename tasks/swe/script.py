"""The evaluation script: puts the tests in place, runs them between two markers, takes the tests away again; pure.

Its form is that of the package swebench (``harness/test_spec/python.py`` of version 4, the column ``eval_script`` of
data for version 5), so that the package's parsers and marks fit the log.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from uniagent.tasks.swe.patches import touched

START = ">>>>> Start Test Output"
END = ">>>>> End Test Output"
EXIT_CODE = ">>>>> Test Exit Code"
PATCH_FAILED = ">>>>> Test Patch Failed"
VARIABLE = "UNIAGENT_TEST_EXIT_CODE"
DELIMITER = "EOF_114329324912"
NO_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
CONDA = ("source /opt/miniconda3/bin/activate", "conda activate testbed")


def evaluation_script(
    *, workdir: str, base_commit: str, test_patch: str, before: Sequence[str], commands: Sequence[str]
) -> str:
    """A script that applies the test patch to the tests as they were at the base commit and runs the commands.
    ``before`` runs first: activation, a rebuild."""
    files = touched(test_patch)
    checkout = (
        f"git checkout {base_commit} -- {shlex.join(files.before)}" if files.before else ": no test file to reset"
    )
    remove = f"rm -f -- {shlex.join(files.added)}" if files.added else ": no test file to remove"
    patch = test_patch.rstrip("\n")
    apply = f"git apply -v - <<'{DELIMITER}' || {{ echo '{PATCH_FAILED}'; exit 90; }}\n{patch}\n{DELIMITER}"
    lines = [
        "#!/bin/bash",
        "set -uxo pipefail",
        f"cd {shlex.quote(workdir)}",
        f"git config --global --add safe.directory {shlex.quote(workdir)}",
        *before,
        f"cd {shlex.quote(workdir)}",
        checkout,
        remove,
        apply if test_patch.strip() else ": no test patch",
        f": '{START}'",
        *commands,
        f": '{END}'",
        checkout,
        remove,
    ]
    return recorded("\n".join(lines) + "\n")


def recorded(script: str) -> str:
    """The script, made to print the exit status of its last test command after the end marker: a log without a failure
    of a command that failed does not tell what happened."""
    lines = script.splitlines()
    for number, line in enumerate(lines):
        if END in line:
            lines[number : number + 1] = [f"{VARIABLE}=$?", line, f'echo "{EXIT_CODE}: ${VARIABLE}"']
            break
    return "\n".join(lines) + "\n"


def files_to_run(test_patch: str, repo: str) -> list[str]:
    """What is given to the test command: the patch's files that are tests, as modules for django."""
    files = [path for path in touched(test_patch).after if not path.endswith(NO_TESTS)]
    if repo != "django/django":
        return files
    return [path.removesuffix(".py").removeprefix("tests/").replace("/", ".") for path in files]
