"""Asking another model: one chat completion over HTTP, with retries, and what it cost.

Any endpoint that speaks chat completions. Invariants: an answer that can come later (429, 5xx, a broken connection) is
asked for again, with pauses that grow and that ``Retry-After`` may lengthen; what no retry mends is a UserError, and
retries that are used up are an InfraError. Knows no question. The key comes from the environment, so that no config or
record holds it.
"""

from __future__ import annotations

import os
import random

import httpx
import trio
from attrs import field, frozen
from attrs.validators import ge, gt

from uniagent.engine.errors import InfraError, UserError

PASSING = {408, 409, 425, 429}  # besides 5xx
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 60.0


@frozen
class Endpoint:
    """``base_url`` ends before /v1. ``api_key_env`` names the environment variable that holds the key. Prices are in
    any currency, per million tokens."""

    base_url: str
    model: str
    api_key_env: str = ""
    temperature: float = field(default=1.0, validator=ge(0))
    max_tokens: int = field(default=2048, validator=ge(1))
    timeout_s: float = field(default=120.0, validator=gt(0))
    retries: int = field(default=5, validator=ge(0))
    price_in: float = field(default=0.0, validator=ge(0))
    price_out: float = field(default=0.0, validator=ge(0))

    @property
    def url(self) -> str:
        return f"{self.base_url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"

    def key(self) -> str:
        """Raises UserError when the variable is not set."""
        if self.api_key_env and not os.environ.get(self.api_key_env):
            raise UserError(f"the environment variable {self.api_key_env} is not set: it holds a model's API key")
        return os.environ.get(self.api_key_env, "") if self.api_key_env else ""


@frozen
class Answer:
    """What it said, and what that took."""

    text: str
    tokens_in: int = 0
    tokens_out: int = 0


def cost(endpoint: Endpoint, answers: list[Answer]) -> float:
    """In the currency of the prices."""
    paid = sum(a.tokens_in * endpoint.price_in + a.tokens_out * endpoint.price_out for a in answers)
    return paid / 1e6


async def ask(client: httpx.AsyncClient, endpoint: Endpoint, prompt: str, *, seed: int) -> Answer:
    """One answer. Raises UserError for what no retry mends, InfraError when the retries are used up."""
    body = {
        "model": endpoint.model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": endpoint.temperature,
        "max_tokens": endpoint.max_tokens,
        "seed": seed,
    }
    key = endpoint.key()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    pauses = random.Random(seed)
    said = ""
    for attempt in range(endpoint.retries + 1):
        least = 0.0
        try:
            response = await client.post(endpoint.url, json=body, headers=headers, timeout=endpoint.timeout_s)
        except httpx.TransportError as problem:
            said = f"{type(problem).__name__}: {problem}"
        else:
            if response.is_success:
                return _answer(endpoint, response)
            said = f"status {response.status_code}: {response.text[:200]}"
            if response.status_code not in PASSING and response.status_code < 500:
                raise UserError(f"the model at {endpoint.url} refuses: {said}")
            least = _seconds(response.headers.get("retry-after"))
        if attempt < endpoint.retries:
            growing = min(MOST_PAUSE_S, FIRST_PAUSE_S * 2**attempt) * pauses.uniform(0.5, 1.0)
            await trio.sleep(max(growing, min(least, MOST_PAUSE_S)))
    raise InfraError(f"the model at {endpoint.url} gave no answer in {endpoint.retries + 1} attempts; the last: {said}")


def _answer(endpoint: Endpoint, response: httpx.Response) -> Answer:
    try:
        found = response.json()
        text = found["choices"][0]["message"]["content"] or ""
        usage = found.get("usage") or {}
        return Answer(str(text), int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))
    except (ValueError, LookupError, TypeError, AttributeError) as problem:
        raise UserError(f"what answers at {endpoint.url} does not speak chat completions: {problem!r}") from None


def _seconds(header: str | None) -> float:
    try:
        return max(0.0, float(header or 0))
    except ValueError:  # a date; the growing pause will do
        return 0.0
