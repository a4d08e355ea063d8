"""SWE-bench, SWE-bench Multilingual and SWE-rebench: their rows to cases and samples.

SWE-bench's current rows carry ``image``, ``eval_script``, ``log_parser`` and ``eval_type`` (swebench 5). Those of older
revisions name a version of their repository, whose test command swebench 4 knows (``pip install 'swebench<5'``).
SWE-rebench's rows carry their own ``install_config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from uniagent.engine.errors import UserError
from uniagent.engine.ports import Json, Providers
from uniagent.tasks.config import TaskConfig
from uniagent.tasks.swe import parsers
from uniagent.tasks.swe.case import Case, archive_of, text, texts
from uniagent.tasks.swe.rows import samples
from uniagent.tasks.swe.script import CONDA, evaluation_script, files_to_run, recorded
from uniagent.tasks.swe.task import Repair

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CONDA_PATH = f"/opt/miniconda3/envs/testbed/bin:/opt/miniconda3/condabin:{SYSTEM_PATH}"
PROMPT = """The repository {repo} is checked out in {workdir}. Resolve the issue below by changing its source files; \
hidden tests decide. Leave the existing tests as they are.

<issue>
{problem}
</issue>"""


# ---------------------------------------------------------------- rows to cases


def swe_bench_case(row: Mapping[str, Json]) -> Case:
    """Of SWE-bench (Lite, Verified, Multilingual too); raises UserError that names the field."""
    common = _common(row)
    if "eval_script" in row:
        script, parser = recorded(text(row, "eval_script")), text(row, "log_parser")
        fail_only = text(row, "eval_type", "pass_and_fail") == "fail_only"
    else:
        script, parser, fail_only = _by_version(row)
    return Case(script=script, parser=parser, fail_only=fail_only, **common)


def swe_rebench_case(row: Mapping[str, Json]) -> Case:
    """Of SWE-rebench; raises UserError that names the field."""
    common = _common(row)
    where = f"instance {common['instance_id']!r}: the row's install_config"
    config = row.get("install_config")
    if not isinstance(config, Mapping):
        raise UserError(f"{where} is missing: it has the test command and the log parser")
    command = config.get("test_cmd")
    commands = [command] if isinstance(command, str) else command
    if not commands or not isinstance(commands, list) or not isinstance(config.get("log_parser"), str):
        raise UserError(f"{where} needs test_cmd and log_parser; it has: {', '.join(sorted(config))}")
    install = config.get("install") or []
    exports = [f"export {name}={value}" for name, value in (config.get("env_vars") or {}).items()]
    commands = [*commands[:-1], " ".join([commands[-1], *files_to_run(common["test_patch"], common["repo"])])]
    script = evaluation_script(
        workdir=common["workdir"],
        base_commit=common["base_commit"],
        test_patch=common["test_patch"],
        before=[*([] if common["archive"] else CONDA), *exports, *([install] if isinstance(install, str) else install)],
        commands=commands,
    )
    return Case(script=script, parser=config["log_parser"], **common)


def _common(row: Mapping[str, Json]) -> dict[str, Any]:
    """What the rows of all these data sets have."""
    return {
        "instance_id": text(row, "instance_id"),
        "repo": text(row, "repo"),
        "base_commit": text(row, "base_commit"),
        "problem": text(row, "problem_statement"),
        "fail_to_pass": texts(row, "FAIL_TO_PASS"),
        "pass_to_pass": texts(row, "PASS_TO_PASS"),
        "test_patch": text(row, "test_patch"),
        "gold": text(row, "patch"),
        "version": str(row.get("version", "")),
        "created_at": str(row.get("created_at", "")),
        "workdir": text(row, "workdir", "/testbed"),
        "archive": archive_of(row),
        "row": row,
    }


def _by_version(row: Mapping[str, Json]) -> tuple[str, str, bool]:
    """(script, parser, fail_only) from swebench 4's tables; raises UserError where they are not there."""
    name, repo, version = text(row, "instance_id"), text(row, "repo"), text(row, "version")
    constants, logs = parsers.harness("constants"), parsers.harness("log_parsers")
    specs = getattr(constants, "MAP_REPO_VERSION_TO_SPECS", None)
    if specs is None:
        raise UserError(
            f"instance {name!r}: the row has no eval_script, as rows of older revisions: take the data set's current "
            "revision, or pip install 'swebench<5', which knows their test commands"
        )
    if version not in specs.get(repo, {}):
        raise UserError(f"instance {name!r}: swebench knows no test command for version {version!r} of {repo!r}")
    make = parsers.harness("test_spec.create_scripts").make_eval_script_list
    lines = make(row, specs[repo][version], "testbed", "/testbed", text(row, "base_commit"), text(row, "test_patch"))
    script = "\n".join(["#!/bin/bash", "set -uxo pipefail", *lines]) + "\n"
    return recorded(script), logs.MAP_REPO_TO_PARSER[repo].__name__, repo in constants.FAIL_ONLY_REPOS


# ---------------------------------------------------------------- rows to samples


def swe_bench_sample(name: str, path: str | None, row: Mapping[str, Json]) -> dict[str, Any]:
    """A row of SWE-bench as a sample of the task ``name``; ``path`` is the PATH its images need."""
    image = row.get("image") or instance_image("swebench", text(row, "instance_id"))
    return _sample(name, str(image), path, row)


def swe_rebench_sample(row: Mapping[str, Json]) -> dict[str, Any]:
    image = row.get("docker_image") or row.get("image_name") or instance_image("swerebench", text(row, "instance_id"))
    return _sample("swe_rebench", str(image), CONDA_PATH, row)


def instance_image(namespace: str, instance_id: str) -> str:
    """The published image of an instance: a registry takes no double underscore, so it is written ``_1776_``."""
    return f"{namespace}/sweb.eval.x86_64.{instance_id}:latest".replace("__", "_1776_").lower()


def _sample(name: str, image: str, path: str | None, row: Mapping[str, Json]) -> dict[str, Any]:
    workdir = text(row, "workdir", "/testbed")
    prompt = PROMPT.format(repo=text(row, "repo"), workdir=workdir, problem=text(row, "problem_statement").strip())
    return {
        "name": name,
        "prompt": [{"role": "user", "content": prompt}],
        "sandbox": {"image": image, "workdir": workdir, **({"env": {"PATH": path}} if path else {})},
        "metadata": dict(row),
    }


# ---------------------------------------------------------------- the registry's names


def swe_bench(config: TaskConfig, providers: Providers) -> Repair:
    return Repair(config, providers, swe_bench_case(config.metadata))


def swe_rebench(config: TaskConfig, providers: Providers) -> Repair:
    return Repair(config, providers, swe_rebench_case(config.metadata))


swe_bench_samples = partial(samples, partial(swe_bench_sample, "swe_bench", CONDA_PATH))
multilingual_samples = partial(samples, partial(swe_bench_sample, "swe_bench_multilingual", None))
swe_rebench_samples = partial(samples, swe_rebench_sample)
