"""How a call begins in a model's template: the text put before the first sampled token so that the model must call.

``tool_choice`` demands a call, or one of a certain tool. Where an engine cannot hold a model to that, its turn is begun
for it: through the control token that opens a call, or through the tool's name. What the template writes there is read
off renders of calls that differ in name and arguments, and tried on the parser of the model's answers. Knows no ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from uniagent.engine.gateway.chat_template import ChatTemplate, RenderError
from uniagent.engine.gateway.conversation import TOOL, Shape
from uniagent.engine.gateway.template import TemplateStrategy
from uniagent.engine.ports import Json, Parsed

ARGUMENTS: tuple[dict[str, str], ...] = ({}, {"alpha": "one"}, {"beta": "two"})
NAMES = ("look_up", "write", "12")
LOOSE = ' "{[<'  # what may begin the arguments: left to the model

Read = Callable[[str, str], Parsed]  # (generation prompt, what follows it) -> what the parser makes of it


def opening(
    template: ChatTemplate,
    strategy: TemplateStrategy,
    last: Callable[[str], int],
    read: Read,
    name: str | None,
    role: str,
    closers: Sequence[str] = (),
) -> str | None:
    """The text that opens a call of the tool ``name`` (None: of any) after a message of ``role``; None where the
    template prints no calls, or where nothing that it prints makes a call.

    ``last`` gives where the last control token of a text ends (0: there is none), ``closers`` are markers that may end
    reasoning which the generation prompt opens."""
    if not strategy.shape.calls:
        return None
    prompt = strategy.prompts.get(role, "")
    try:
        turns = [_turn(template, strategy.shape, name or n, a, i) for n in NAMES for a in ARGUMENTS for i in (0, 1)]
    except RenderError:
        return None
    text = _shared(turns)
    lead = _shared([text, prompt])
    if lead != prompt:  # the prompt goes on otherwise, as by opening its reasoning
        lead = lead[: max(lead.rfind("\n") + 1, last(lead))]
    if name is None:
        text = text[: last(text)] or text
    elif name not in text:
        return None
    else:
        end = text.rindex(name) + len(name)
        text = text[:end] + text[end:].rstrip(LOOSE)
    if not text[len(lead) :].strip():
        return None
    rest = _turn(template, strategy.shape, name or NAMES[0], ARGUMENTS[1], 0)[len(text) :]
    thinks = [c for c in closers if prompt.rfind(c.replace("/", "")) > prompt.rfind(c)]
    for closer in [f"\n{c}\n\n" for c in thinks] or [""]:
        begun = closer + text[len(lead) :]
        found = read(prompt, begun + rest).calls
        if found and found[0].name == (name or NAMES[0]) and found[0].problem is None:
            return begun
    return None


def _shared(texts: Sequence[str]) -> str:
    """What all of them begin with."""
    low, high = min(texts), max(texts)
    at = next((n for n, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return low[:at]


def _turn(template: ChatTemplate, shape: Shape, name: str, arguments: dict[str, str], index: int) -> str:
    """What the template writes of a turn that is a call, opening words and all."""
    head = [{"role": "user", "content": "Ask"}]
    id = f"functions.{name}:{index}" if shape.call_ids == "functions" else "abcd00001"
    given: Json = json.dumps(arguments) if shape.arguments == "text" else arguments
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": given}}
    before = template.render(head, (TOOL,), False)
    whole = template.render([*head, {"role": "assistant", "content": "", "tool_calls": [call]}], (TOOL,), False)
    if not whole.startswith(before):
        raise RenderError("a call changes what stands before it")
    return whole[len(before) :]
