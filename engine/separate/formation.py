"""Who is who in a separate run: which ranks train, which roll out, where the head is and what opens its door.

Pure but for ``share``, which tells all ranks of the job the head's token over the process group. Invariants: a
placement that could never roll out is refused with a sentence before anything starts; the token is in no log and no
config.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from uniagent.engine.config import RunConfig
from uniagent.engine.errors import UserError
from uniagent.engine.team import world

TOKEN = "UNIAGENT_HEAD_TOKEN"  # the environment variable
FREE_PORT = 29501  # torchrun's default port, and one


def refuse(config: RunConfig, environment: Mapping[str, str] = os.environ) -> None:
    """UserError for a separate run that this job cannot be."""
    if config.rollout.mode != "separate":
        return
    train, (_, size) = config.placement.train_ranks, world(environment)
    if train > size:
        raise UserError(
            f"placement.train_ranks = {train}: the job has {size} rank{'s' * (size > 1)}; start more "
            f"(torchrun --nproc-per-node {train + 1}) or use at most {size}"
        )
    if train == size and not config.placement.joining:
        raise UserError(
            f"rollout.mode = 'separate': {'all ranks' if size > 1 else 'the only rank'} would train and none roll out; "
            f"start it with torchrun --nproc-per-node {train + 1} -m uniagent.engine, or set placement.joining = true "
            "and start rollout nodes with uniagent rollout --join"
        )
    if train % config.learner.context_parallel:
        raise UserError(
            f"learner.context_parallel = {config.learner.context_parallel} does not divide the {train} ranks that train"
        )
    for option in ("tensor_parallel", "pipeline_parallel"):
        if config.engine.options.get(option, 1) != 1:
            raise UserError(
                f"engine.options.{option} = {config.engine.options[option]!r}: in a separate run every rank has an "
                "engine of its own; leave it out"
            )
    hosts = int(environment.get("GROUP_WORLD_SIZE", "1"))
    if hosts > 1 and not config.rollout.bind:
        raise UserError(
            f"rollout.bind is not set and the job runs on {hosts} hosts: name an address of the first host that the "
            "others reach"
        )


def head_url(config: RunConfig, environment: Mapping[str, str] = os.environ) -> str:
    """Where nodes reach the head, ``http://HOST:PORT``."""
    if config.rollout.head_url:
        return config.rollout.head_url
    host = environment.get("MASTER_ADDR", "127.0.0.1")
    port = int(environment["MASTER_PORT"]) + 1 if "MASTER_PORT" in environment else FREE_PORT
    if not config.rollout.bind and int(environment.get("GROUP_WORLD_SIZE", "1")) == 1:
        host = "127.0.0.1"  # a host's own name may not resolve to the loopback that is listened on
    return f"http://{host}:{port}"


def door(config: RunConfig, url: str) -> tuple[str, int]:
    """(address, port) that the head listens on."""
    return config.rollout.bind or "127.0.0.1", urlsplit(url).port or FREE_PORT


def given_token(environment: Mapping[str, str] = os.environ) -> str:
    """The token that the environment gives; empty: none."""
    return environment.get(TOKEN, "").strip()


def own_token() -> str:
    """The token that the environment gives, or one that nobody can guess."""
    return given_token() or secrets.token_urlsafe(24)


def keep(token: str, file: Path) -> None:
    """The token where only its owner can read it."""
    with open(file, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
        out.write(token + "\n")


def share(token: str) -> str:
    """Rank 0's token, on every rank of the job. All ranks call it, on the accelerator's thread."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return token
    box = [token]
    dist.broadcast_object_list(box, src=0)
    return box[0]
