"""Statements written by a model behind a chat-completions endpoint, from the template's text.

It is told what the template tells, and asked for an issue as a user of the library would write it. What comes back must
name the function and must not hold a line of the fix; otherwise the template's text stands. Knows no project.
"""

from __future__ import annotations

import httpx

from uniagent.tasks.bugfix.recipe import Repair
from uniagent.tasks.check_judge import answered
from uniagent.tasks.endpoint import Endpoint

PROMPT = """Write the issue that a user of a Python library files about the defect below: a title, then a few sentences
on what was done, what was expected and what came instead, with the calls and values below kept exactly. Name the
function `{function}`. Do not guess the cause, and do not say how to mend it. Answer with the issue alone.

{statement}
"""


async def rewritten(client: httpx.AsyncClient, endpoint: Endpoint, repair: Repair) -> str | None:
    """The issue, or None where it would not do. Raises UserError where the endpoint gives no answer."""
    prompt = PROMPT.format(function=repair.function, statement=repair.statement)
    text = (await answered(client, endpoint, prompt, seed=0)).text
    return text.strip() if acceptable(text, repair) else None


def acceptable(text: str, repair: Repair) -> bool:
    """Whether the function is named and no line of the fix is told (short ones, such as ``return x``, say nothing)."""
    told = {line.strip() for line in repair.old.splitlines()} - {line.strip() for line in repair.new.splitlines()}
    said = " ".join(text.split())
    leaks = any(len(line) >= 15 and " ".join(line.split()) in said for line in told)
    return repair.function.rpartition(".")[2] in text and not leaks
