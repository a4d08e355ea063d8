"""An LLM as a second reader of statements: can each hidden assertion be traced to a sentence, and can the statement be
read in two ways that contradict each other?

Any endpoint that speaks chat completions. The judge is asked several times; a finding is reported when most of the
answers have it, and agreement between the answers is measured by Fleiss' kappa (Fleiss 1971, "Measuring nominal scale
agreement among many raters"), so that a judge that guesses is seen to. Knows no task.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import httpx
import trio
from attrs import field, frozen

from uniagent.engine.errors import UserError
from uniagent.engine.ports import Json

CLEAR, UNTRACED = "traced", "untraced"
PROMPT = """You check whether a programming task is fair. Below are its statement, and the hidden tests that decide.
An engineer sees the statement and the code, not the tests.

For each test, find the sentence of the statement that what it asserts follows from (directly, or through an example or
the documentation quoted there). Then say whether the statement can be read in two ways that contradict each other.

Answer with one JSON object and nothing else:
{{"tests": {{"<test>": {{"traced": true or false, "sentence": "<the sentence, or empty>"}}, ...}},
 "contradictions": ["<two readings, in one sentence>", ...]}}

# Statement

{statement}

# Tests

{tests}
"""


@frozen
class Judge:
    """``base_url`` ends before /v1. ``runs`` answers are taken for each sample."""

    base_url: str
    model: str
    api_key: str = field(default="", repr=False)
    runs: int = 3
    temperature: float = 1.0
    timeout_s: float = 300.0


@frozen
class Reading:
    """One answer: ``traced`` by test, sentences where it named them, contradictory readings."""

    traced: Mapping[str, bool]
    sentences: Mapping[str, str] = field(factory=dict)
    contradictions: tuple[str, ...] = ()


@frozen
class Opinion:
    """Of one sample. ``untraced``: tests that most answers trace to no sentence; ``contradictions`` when most answers
    report some; ``readings`` all that could be read; ``unreadable`` answers that could not; ``cost`` in tokens."""

    untraced: tuple[str, ...]
    contradictions: tuple[str, ...]
    readings: tuple[Reading, ...] = field(repr=False)
    unreadable: int = 0
    tokens: int = 0


def endpoint(option: str, url: str | None, model: str, key: str | None, runs: int = 3) -> Judge | None:
    """From a command's options --OPTION, --OPTION-model and --OPTION-key (a variable's name). Raises UserError."""
    if url is None:
        return None
    if not model:
        raise UserError(f"--{option} needs --{option}-model, the name of the model at that endpoint")
    if key is not None and key not in os.environ:
        raise UserError(f"--{option}-key names the environment variable {key}, which is not set")
    return Judge(url, model, os.environ[key] if key else "", runs)


async def opinion(client: httpx.AsyncClient, judge: Judge, statement: str, tests: Mapping[str, str]) -> Opinion:
    """Raises UserError where the endpoint refuses or cannot be reached."""
    shown = "\n\n".join(f"## {name}\n\n```python\n{text}\n```" for name, text in tests.items())
    prompt = PROMPT.format(statement=statement, tests=shown)
    answers: list[tuple[Reading | None, int]] = []

    async def one(seed: int) -> None:
        text, tokens = await ask(client, judge, prompt, seed)
        answers.append((read(text, list(tests)), tokens))

    async with trio.open_nursery() as nursery:
        for seed in range(judge.runs):
            nursery.start_soon(one, seed)
    readings = tuple(reading for reading, _ in answers if reading is not None)
    most = len(readings) / 2
    untraced = tuple(test for test in tests if sum(not r.traced[test] for r in readings) > most)
    torn = [reading for reading in readings if reading.contradictions]
    contradictions = tuple(torn[0].contradictions) if len(torn) > most else ()
    return Opinion(untraced, contradictions, readings, len(answers) - len(readings), sum(n for _, n in answers))


async def ask(client: httpx.AsyncClient, judge: Judge, prompt: str, seed: int) -> tuple[str, int]:
    """(the answer's text, tokens of both ways)."""
    body = {"model": judge.model, "messages": [{"role": "user", "content": prompt}], "temperature": judge.temperature,
            "seed": seed}  # fmt: skip
    headers = {"Authorization": f"Bearer {judge.api_key}"} if judge.api_key else {}
    url = f"{judge.base_url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
    try:
        answer = await client.post(url, json=body, headers=headers, timeout=judge.timeout_s)
        answer.raise_for_status()
        found = answer.json()
        text = found["choices"][0]["message"]["content"] or ""
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as problem:
        raise UserError(f"the model at {url} gave no answer: {problem!r}; check the address and the model") from None
    return str(text), int((found.get("usage") or {}).get("total_tokens") or 0)


def read(text: str, tests: Sequence[str]) -> Reading | None:
    """The JSON object in an answer (fences and talk around it are ignored); None where there is none that covers every
    test."""
    match = re.search(r"\{.*\}", text, re.DOTALL)
    try:
        said: Json = json.loads(match.group()) if match else None
        given = said["tests"]
        traced = {test: bool(given[test]["traced"]) for test in tests}
        sentences = {test: str(given[test].get("sentence") or "") for test in tests}
        contradictions = tuple(str(one) for one in said.get("contradictions") or ())
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return Reading(traced, sentences, contradictions)


def agreement(opinions: Sequence[Opinion]) -> dict[str, float | int | None]:
    """Over all tests that as many answers as any looked at: ``fleiss_kappa`` (None where it is not defined: one answer,
    or everyone always says the same), the share of pairs of answers that agree, and how many were compared."""
    most = max((len(o.readings) for o in opinions), default=0)
    table = [
        Counter(CLEAR if reading.traced[test] else UNTRACED for reading in o.readings)
        for o in opinions
        if len(o.readings) == most
        for test in (o.readings[0].traced if o.readings else ())
    ]
    return {
        "fleiss_kappa": fleiss_kappa(table) if most > 1 else None,
        "pairs_agree": _agreeing(table) if most > 1 and table else None,
        "tests": len(table),
        "answers_each": most,
        "unreadable": sum(o.unreadable for o in opinions),
        "tokens": sum(o.tokens for o in opinions),
    }


def fleiss_kappa(table: Sequence[Mapping[str, int]]) -> float | None:
    """(P - Pe) / (1 - Pe), with P the mean share of agreeing pairs of raters per subject and Pe that of chance, from
    the categories' overall shares. ``table``: a row a subject, category -> number of raters; rows have equal sums."""
    if not table:
        return None
    raters = sum(table[0].values())
    totals: Counter[str] = Counter()
    for row in table:
        totals.update(row)
    chance = sum((count / (len(table) * raters)) ** 2 for count in totals.values())
    return None if chance == 1 else (_agreeing(table) - chance) / (1 - chance)


def _agreeing(table: Sequence[Mapping[str, int]]) -> float:
    raters = sum(table[0].values())
    pairs = raters * (raters - 1)
    return sum(sum(n * (n - 1) for n in row.values()) / pairs for row in table) / len(table)
