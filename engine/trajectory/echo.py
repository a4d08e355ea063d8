"""How an assistant message that comes back is an earlier answer: normal form, echo tiers, cut streams.

Pure functions over messages. The tiers, strictest first:

* ``verbatim``: text, reasoning and calls as they were sent; arguments as the same text, or as the same object.
* ``normalised``: the same but for white space around the text, the form of the arguments as a JSON value (key order,
  white space, escapes, 1.0 for 1), ids, and reasoning that was kept in part or left out.
* ``edited``: a call that could not run as it was sent comes back in any form; one that could keeps its name and the
  values of the keys both have; calls were written out as text (all ids, or all names and argument values, appear);
  the text has a stop string back that the request asked to cut at; the text beside a call was left out or added; the
  reasoning is another.

Anything else is another message. Knows no tree, no tokens but the lengths in ``Sampled.text_ends``, no dialect.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from uniagent.engine.messages import Call, Message
from uniagent.engine.trajectory.types import Sampled

TIERS = ("verbatim", "normalised", "edited")


# ---------------------------------------------------------------- normal form


def canonical(value: Any) -> str:
    """A JSON value as text that is equal for equal values. A string is read as JSON, and stands for itself where it is
    none; numbers are compared as JavaScript clients hold them, in double precision."""
    try:
        written = value if isinstance(value, str) else json.dumps({} if value is None else value)
        plain = json.loads(written or "{}", parse_int=_number, parse_float=_number)
        return json.dumps(plain, sort_keys=True, ensure_ascii=False)
    except RecursionError:
        return "nested too deep"
    except ValueError:
        return written.strip()


def _number(written: str) -> float | int:
    value = float(written)
    return int(value) if value.is_integer() else value


def key(message: Message) -> Hashable:
    """Normal form: messages with one key are one node. Ids and reasoning do not count."""
    text = message.text.strip() if message.role == "assistant" else message.text.rstrip()
    return message.role, text, tuple((c.name, canonical(c.arguments)) for c in message.calls)


def ids(message: Message) -> frozenset[str]:
    """The call ids that a message carries."""
    return frozenset(c.id for c in message.calls if c.id)


def could_run(call: Call, tool_names: AbstractSet[str]) -> bool:
    """Whether a harness could have run the call as it was sent: an object of arguments for a tool of the request."""
    return call.name in tool_names and call.value is not None


# ---------------------------------------------------------------- tiers


def echo_tier(sent: Message, echo: Message, tool_names: AbstractSet[str], stops: Sequence[str] = ()) -> str | None:
    """The tier in which ``echo`` is the answer ``sent`` to a request with these tools and stop strings; None: it is
    another message."""
    if sent == echo or (sent.text == echo.text and sent.reasoning == echo.reasoning and _as_sent(sent, echo)):
        return "verbatim"
    if key(sent) == key(echo):
        return "normalised" if same_reasoning(sent, echo) else "edited"
    return "edited" if _edited(sent, echo, tool_names, stops) else None


def same_reasoning(sent: Message, echo: Message) -> bool:
    """Kept, trimmed or dropped."""
    return echo.reasoning.strip() in sent.reasoning


def _as_sent(sent: Message, echo: Message) -> bool:
    """Calls exactly as sent, or with the arguments that a client parses out of what was sent."""
    if len(sent.calls) != len(echo.calls):
        return False
    return all(
        s.id == e.id
        and s.name == e.name
        and (s.arguments == e.arguments if isinstance(e.arguments, str) else _same_object(s.value, e.arguments))
        for s, e in zip(sent.calls, echo.calls, strict=True)
    )


def _same_object(mine: dict[str, Any] | None, theirs: Any) -> bool:
    """Equal down to the order of the keys."""
    try:
        return mine is not None and json.dumps(mine) == json.dumps(theirs)
    except RecursionError:
        return False


def _edited(sent: Message, echo: Message, tool_names: AbstractSet[str], stops: Sequence[str]) -> bool:
    mine, theirs = sent.text.strip(), echo.text.strip()
    same_text = mine == theirs or any(theirs == (sent.text + stop).strip() for stop in stops)
    if not sent.calls:
        return same_text and not echo.calls
    if not echo.calls:
        gone = bool(mine) and same_text and not any(could_run(c, tool_names) for c in sent.calls)
        return gone or _written_out(sent, theirs)
    pairs, unsent, unreturned = _paired(sent.calls, echo.calls)
    if any(could_run(c, tool_names) for c in unreturned):
        return False
    if unsent and all(could_run(c, tool_names) for c in sent.calls):
        return False
    return (same_text or not mine or not theirs) and all(_kept(s, e, tool_names) for s, e in pairs)


def _paired(sent: Sequence[Call], echo: Sequence[Call]) -> tuple[list[tuple[Call, Call]], list[Call], list[Call]]:
    """Calls paired by id, the others in order where as many came back: (pairs, never sent, not returned)."""
    pairs: list[tuple[Call, Call]] = []
    unsent, unreturned = list(echo), []
    for s in sent:
        e = next((e for e in unsent if s.id and s.id == e.id), None)
        if e is None:
            unreturned.append(s)
        else:
            pairs.append((s, e))
            unsent.remove(e)
    if len(unsent) == len(unreturned):
        pairs += zip(unreturned, unsent, strict=True)
        return pairs, [], []
    return pairs, unsent, unreturned


def _kept(sent: Call, echo: Call, tool_names: AbstractSet[str]) -> bool:
    if not could_run(sent, tool_names):
        return True
    mine, theirs = sent.value or {}, echo.value
    if sent.name != echo.name or theirs is None:
        return False
    return all(canonical(mine[k]) == canonical(theirs[k]) for k in mine.keys() & theirs.keys())


def _written_out(sent: Message, theirs: str) -> bool:
    """Whether the calls stand in the text: by their ids, or by their names and every argument value."""
    named = ids(sent)
    if named and len(named) == len(sent.calls) and all(i in theirs for i in named):
        return True
    parts = [sent.text.strip(), *(c.name for c in sent.calls)]
    return all(p in theirs for p in parts) and all(
        any(form in theirs for form in _forms(value)) for call in sent.calls for value in _values(call)
    )


def _values(call: Call) -> Iterator[Any]:
    """The scalars among a call's arguments; the raw text where they are no object."""
    value = call.value
    stack: list[Any] = [call.arguments if value is None else value]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list):
            stack += value
        else:
            yield value


def _forms(value: Any) -> Iterator[str]:
    """A scalar as a client may print it: plain, or escaped as JSON or Python would."""
    if isinstance(value, str):
        yield value.strip()
        yield json.dumps(value)[1:-1]
        yield json.dumps(value, ensure_ascii=False)[1:-1]
        yield repr(value)[1:-1]
    else:
        yield json.dumps(value)
        yield repr(value)


def differences(sent: Message, echo: Message) -> tuple[str, ...]:
    """What an echo changed, for the record: text, reasoning, calls, ids, names, arguments."""
    found = [name for name in ("text", "reasoning") if getattr(sent, name) != getattr(echo, name)]
    if len(sent.calls) != len(echo.calls):
        return (*found, "calls")
    pairs = list(zip(sent.calls, echo.calls, strict=True))
    for name, plural in (("id", "ids"), ("name", "names"), ("arguments", "arguments")):
        found += [plural] if any(getattr(s, name) != getattr(e, name) for s, e in pairs) else []
    return tuple(found)


# ---------------------------------------------------------------- cut streams


def head(sent: Message, sampled: Sampled, echo: Message) -> int:
    """How many of an undelivered answer's tokens a harness kept that took its cut stream for the end; 0: none.

    It kept whole calls, and text: the tokens after which those calls were out, and those whose text ends within the
    text it kept, white space aside. ``text_ends`` and ``call_ends`` say where each one ends.
    """
    ends, calls, kept = sampled.text_ends, sampled.call_ends, echo.text.rstrip()
    if ends is None or not (kept or echo.calls) or not sent.text.startswith(kept):
        return 0
    if len(calls) < len(echo.calls) or not all(_same_call(*c) for c in zip(sent.calls, echo.calls, strict=False)):
        return 0
    ends = ends[: sampled.used]
    if len(sent.calls) == len(echo.calls):
        last = calls[-1] - 1 if echo.calls else 0
        if kept == sent.text.rstrip() or (not kept and not sent.text[ends[last] :].strip()):
            return 0  # all of it, or all but the text beside the calls: a plain echo
    n = int(np.searchsorted(ends, len(kept))) if kept else 0  # the token that completes the kept text
    if kept and n < len(ends) and not sent.text[len(kept) : ends[n]].strip():
        n += 1
    if echo.calls:
        through = calls[len(echo.calls) - 1]
        if kept and len(kept) < len(sent.text[: ends[through - 1]].rstrip()):
            return 0  # text is missing that came before a call it kept
        n = max(n, through)
    following = calls[len(echo.calls)] if len(echo.calls) < len(calls) else len(ends) + 1
    return n if n < following else 0  # text from behind a call that it did not keep


def _same_call(sent: Call, echo: Call) -> bool:
    return sent.name == echo.name and canonical(sent.arguments) == canonical(echo.arguments)
