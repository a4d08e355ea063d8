"""Inference by servers that take and return token ids (vLLM's and SGLang's own): finds, checks and opens them.

For evaluation, and for pools of their own. One server is a ``ServerEngine``, several are a ``Router`` over them; all
must serve the model whose tokenizer the node uses.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from attrs import fields, frozen

from uniagent.adapters.engines import completions
from uniagent.adapters.engines.completions import Interrupted
from uniagent.adapters.engines.prefixes import Chain
from uniagent.adapters.engines.server_engine import ServerEngine
from uniagent.engine import config
from uniagent.engine.errors import UserError, nearest
from uniagent.engine.ports import InferenceEngine, Sampling
from uniagent.engine.rollout.router import POLICIES, ReplicaLost, Router

CONNECT_S = 10.0
log = logging.getLogger("uniagent.engines.server")


@frozen
class Options:
    """``[engine.options]``. ``model``: the name it is served under, else the first; ``policy``: of the router;
    ``timeout_s``: without a sign of life from a server, prefill included, it counts as failed."""

    urls: tuple[str, ...]
    api_key: str = ""  # "$NAME" is read from the environment
    model: str = ""
    timeout_s: float = 600.0
    policy: str = "cache_aware"


@asynccontextmanager
async def build(settings: config.Engine, folder: Path) -> AsyncIterator[InferenceEngine]:
    """The registry's factory: an engine over the servers of ``engine.options.urls``, which must serve the model in
    ``folder``. UserError for options that make no sense, a server that is not there, or one that gives no token ids."""
    options = read_options(settings.options)
    headers = {"Authorization": f"Bearer {key}"} if (key := _secret(options.api_key)) else {}
    vocabulary, chain = vocabulary_of(folder), Chain()
    async with AsyncExitStack() as clients:
        replicas: list[InferenceEngine] = []
        for url in options.urls:
            client = httpx.AsyncClient(
                base_url=url,
                headers=headers,
                timeout=httpx.Timeout(options.timeout_s, connect=min(CONNECT_S, options.timeout_s), pool=None),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=settings.slots),
                trust_env=False,  # a proxy is no way to a machine of one's own
            )
            await clients.enter_async_context(client)
            model, context = await _served(client, options.model)
            engine = ServerEngine(
                client,
                model,
                context=min(settings.context, context or settings.context),
                slots=settings.slots,
                vocabulary=vocabulary,
                chain=chain,
            )
            await _probe(client, engine)
            replicas.append(engine)
        yield replicas[0] if len(replicas) == 1 else Router(replicas, options.policy)


build.shares_module = False  # type: ignore[attr-defined]  # read by the node
build.steps = False  # type: ignore[attr-defined]  # it gives an InferenceEngine, opened on the loop


def read_options(options: Any) -> Options:
    """``engine.options``, checked."""
    known = [a.name for a in fields(Options)]
    for name in options:
        if name not in known:
            raise UserError(f"engine.options: server knows no {name!r}: {nearest(name, known)}")
    urls = options.get("urls", ())
    urls = [urls] if isinstance(urls, str) else urls
    if not urls or not isinstance(urls, Sequence) or not all(_is_url(url) for url in urls):
        raise UserError(
            "engine.options.urls: name the servers, e.g. urls = ['http://127.0.0.1:8000']; got " + repr(list(urls))
        )
    found = Options(**{**options, "urls": tuple(url.rstrip("/").removesuffix("/v1") for url in urls)})
    if found.policy not in POLICIES:
        raise UserError(f"engine.options.policy: there is no {found.policy!r}: {nearest(found.policy, POLICIES)}")
    if not isinstance(found.timeout_s, (int, float)) or found.timeout_s <= 0:
        raise UserError(f"engine.options.timeout_s must be seconds above 0; got {found.timeout_s!r}")
    return found


def _is_url(url: object) -> bool:
    return isinstance(url, str) and url.startswith(("http://", "https://"))


def _secret(value: str) -> str:
    if not value.startswith("$"):
        return value
    if (found := os.environ.get(value[1:])) is None:
        raise UserError(f"engine.options.api_key names {value}, which is not set in the environment")
    return found


def vocabulary_of(folder: Path) -> int:
    """Token ids that the model in the folder knows."""
    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size = said.get("vocab_size") or (said.get("text_config") or {}).get("vocab_size")
    if not isinstance(size, int):
        raise UserError(f"model.path: {folder}/config.json does not say vocab_size")
    return size


async def _served(client: httpx.AsyncClient, wanted: str) -> tuple[str, int | None]:
    """The model's name, and the longest sequence of it."""
    try:
        found = {str(each["id"]): each.get("max_model_len") for each in await completions.models(client)}
    except Interrupted as problem:
        raise UserError(
            f"engine.options.urls: no server answers at {client.base_url} ({problem}); start it first, e.g. "
            "python -m vllm.entrypoints.openai.api_server --model FOLDER"
        ) from problem
    if not found or (wanted and wanted not in found):
        raise UserError(f"engine.options.model: {client.base_url} has no {wanted!r}: {nearest(wanted, found)}")
    name = wanted or next(iter(found))
    return name, found[name]


async def _probe(client: httpx.AsyncClient, engine: ServerEngine) -> None:
    """A token to see that it gives ids, and whether its logprobs are those of the distribution sampled from: with one
    token to choose from, that one's is 0."""
    try:
        answer = await engine.generate(np.zeros(1, np.int32), Sampling(1, top_k=1), session="probe")
    except (ReplicaLost, ValueError) as problem:
        raise UserError(f"engine.options.urls: {client.base_url} does not generate: {problem}") from problem
    if answer.logprobs[0] < -1e-3:
        log.warning(
            "%s gives the model's raw logprobs, not those sampled from: with a temperature, top-p or top-k they are "
            "wrong in what is recorded (vLLM: start it with --logprobs-mode processed_logprobs)",
            client.base_url,
        )
