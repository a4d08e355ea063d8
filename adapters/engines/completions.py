"""The wire of a server that takes and returns token ids: one streamed ``POST /v1/completions``, and ``GET /v1/models``.

vLLM's and SGLang's own servers speak it (``return_token_ids``). Whatever goes wrong is one of three: ``Interrupted``
(the server or the way to it failed: ask again), ValueError (it refuses this prompt), UserError (it is the wrong server,
model or key). Knows no retries and no replicas.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import trio
from attrs import define, frozen

from uniagent.engine.errors import UserError
from uniagent.engine.ports import Json, Sampling

TO_MEND = {
    401: "it wants an API key: set engine.options.api_key",
    403: "it refuses the API key: see engine.options.api_key",
    404: "there is no such model or path: see engine.options.model and urls",
}
PASSING = {408, 409, 425, 429}  # besides 5xx


class Interrupted(Exception):
    """The server, or the connection to it, failed on the way."""


@frozen
class Piece:
    """A part of an answer. ``cached``: tokens of the prompt that were not prefilled, where the server says so."""

    ids: list[int]
    logprobs: list[float]
    finish: str | None = None  # stop | length
    cached: int | None = None


def body(model: str, prompt: list[int], sampling: Sampling, *, max_tokens: int, seed: int) -> dict[str, Json]:
    """The request. Every parameter that shapes the distribution is said: what is left out, a server fills in from the
    model's own generation_config."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": seed,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # vLLM: no need to detokenize for the logprobs
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def models(client: httpx.AsyncClient) -> list[dict[str, Json]]:
    """What the server serves; Interrupted or UserError."""
    try:
        response = await client.get("/v1/models")
    except httpx.TransportError as problem:
        raise Interrupted(_named(problem)) from problem
    _accepted(response)
    try:
        found = response.json()["data"]
        return [dict(each) for each in found if each["id"]]
    except (ValueError, KeyError, TypeError) as problem:
        raise UserError(f"{client.base_url}: no inference server: it gave no list of models") from problem


async def stream(client: httpx.AsyncClient, request: dict[str, Json], take: Callable[[Piece], bool]) -> None:
    """Asks, and hands over pieces as they come. When ``take`` returns True (it wants no more), or this is cancelled,
    the connection is closed, which aborts the request."""
    hearing = _Hearing(client, take)
    try:
        with trio.CancelScope() as scope:  # the response's nested generators end well by an exception from within only
            async with client.stream("POST", "/v1/completions", json=request) as response:
                if response.status_code != 200:
                    await response.aread()
                    _accepted(response)
                async for line in response.aiter_lines():
                    if hearing.enough(line):
                        scope.cancel()
    except httpx.TransportError as problem:
        raise Interrupted(_named(problem)) from problem
    if hearing.failure is not None:
        raise hearing.failure
    if not hearing.over:
        raise Interrupted("the answer broke off")


@define(eq=False)
class _Hearing:
    """The lines of one answer. ``over``: all of it came, or as much as was wanted."""

    client: httpx.AsyncClient
    take: Callable[[Piece], bool]
    over: bool = False
    failure: Exception | None = None
    _enough: bool = False

    def enough(self, line: str) -> bool:
        """Hears a line; True when nothing more is wanted."""
        said = line.removeprefix("data:").strip()
        if self._enough or said == line or said == "[DONE]":
            return self._enough
        try:
            piece = _piece(said, self.client)
        except (Interrupted, ValueError, UserError) as problem:
            self.failure, self._enough = problem, True
            return True
        self._enough = self.take(piece)
        self.over = self.over or self._enough or piece.finish is not None
        return self._enough


def _piece(said: str, client: httpx.AsyncClient) -> Piece:
    event = _object(said)
    if error := event.get("error"):
        status = error.get("code") if isinstance(error, dict) else None
        raise _refusal(status if isinstance(status, int) else 500, str(error))
    try:
        cached = ((event.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
        if not event["choices"]:
            return Piece([], [], cached=cached)
        choice = event["choices"][0]
        ids, finish = choice.get("token_ids"), choice.get("finish_reason")
        logprobs = [float(s) for s in (choice.get("logprobs") or {}).get("token_logprobs") or ()]
    except (KeyError, TypeError, AttributeError) as problem:
        raise Interrupted(f"the server said {said[:200]!r}") from problem
    if len(ids or ()) != len(logprobs) or (ids is None and choice.get("text")):
        raise UserError(
            f"{client.base_url}: the server gave {len(logprobs)} logprobs with {len(ids or ())} token ids: it must "
            "know return_token_ids (vLLM from 0.10.2 on, SGLang from July 2026 on)"
        )
    if finish not in (None, "stop", "length"):
        raise Interrupted(f"the server ended the answer: {finish}")
    return Piece(list(ids or ()), logprobs, finish, cached)


def _object(said: str) -> dict[str, Any]:
    try:
        event = json.loads(said)
    except ValueError as problem:
        raise Interrupted(f"the server said {said[:200]!r}") from problem
    if not isinstance(event, dict):
        raise Interrupted(f"the server said {said[:200]!r}")
    return event


def _accepted(response: httpx.Response) -> None:
    if response.status_code != 200:
        raise _refusal(response.status_code, _message(response), str(response.url))


def _refusal(status: int, message: str, where: str = "") -> Exception:
    if status in TO_MEND:
        return UserError(f"{where}: {TO_MEND[status]} ({status}: {message})".removeprefix(": "))
    if status >= 500 or status in PASSING:
        return Interrupted(f"status {status}: {message}")
    return ValueError(f"the server refused the prompt's token ids or the sampling ({status}): {message}")


def _message(response: httpx.Response) -> str:
    try:
        said = response.json()
        return str(said.get("error", said).get("message", said))
    except (ValueError, AttributeError):
        return response.text[:300]


def _named(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".removesuffix(": ")
