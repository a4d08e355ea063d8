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

from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.ports import Json
from uniagent.tasks.endpoint import Answer, Endpoint, ask

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


def endpoint(option: str, url: str | None, model: str, key: str | None) -> Endpoint | None:
    """From a command's options --OPTION, --OPTION-model and --OPTION-key (a variable's name). Raises UserError."""
    if url is None:
        return None
    if not model:
        raise UserError(f"--{option} needs --{option}-model, the name of the model at that endpoint")
    if key is not None and key not in os.environ:
        raise UserError(f"--{option}-key names the environment variable {key}, which is not set")
    return Endpoint(url, model, api_key_env=key or "", timeout_s=300.0)


async def opinion(
    client: httpx.AsyncClient, statement: str, tests: Mapping[str, str], *, judge: Endpoint, runs: int
) -> Opinion:
    """From ``runs`` answers. Raises UserError where the endpoint refuses or cannot be reached."""
    shown = "\n\n".join(f"## {name}\n\n```python\n{text}\n```" for name, text in tests.items())
    prompt = PROMPT.format(statement=statement, tests=shown)
    answers: list[Answer] = []
    problems: list[UserError] = []

    async def one(seed: int) -> None:
        try:
            answers.append(await answered(client, judge, prompt, seed=seed))
        except UserError as problem:
            problems.append(problem)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for seed in range(runs):
            nursery.start_soon(one, seed)
    if problems:
        raise problems[0]
    readings = tuple(r for r in (read(answer.text, list(tests)) for answer in answers) if r is not None)
    most = len(readings) / 2
    untraced = tuple(test for test in tests if sum(not r.traced[test] for r in readings) > most)
    torn = [reading for reading in readings if reading.contradictions]
    contradictions = tuple(torn[0].contradictions) if len(torn) > most else ()
    tokens = sum(a.tokens_in + a.tokens_out for a in answers)
    return Opinion(untraced, contradictions, readings, len(answers) - len(readings), tokens)


async def answered(client: httpx.AsyncClient, endpoint: Endpoint, prompt: str, *, seed: int) -> Answer:
    """One answer, for a command: an endpoint that stays away is the user's to mend."""
    try:
        return await ask(client, endpoint, prompt, seed=seed)
    except InfraError as problem:
        raise UserError(f"{problem}; check the address and the model") from None


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
