"""What a session keeps of raw requests: each as its difference to an earlier one, so a conversation is stored once.

``changes(base, now)`` and ``apply(base, changes)`` are inverse. In changes, ``set`` holds new and changed values,
``drop`` the keys that went, ``extend`` the lists that begin like the base's: ``[kept, new items]``. Equal values cost
a comparison of identities where the wire reader reused them. Pure JSON; knows no dialect.
"""

from __future__ import annotations

import json
import operator
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from uniagent.engine.messages import ModelCall, Reply
from uniagent.engine.ports import Json, Sampling

BASES = 4  # conversations beside each other (subagents) that are told apart


class Items(list[Any]):
    """A message list that says how it begins: with the first ``kept`` items of ``like``, the same objects."""

    __slots__ = ("begins", "name")

    def __init__(self, items: Sequence[Any] = (), like: Items | None = None, kept: int = 0) -> None:
        super().__init__(items)
        self.name = object()  # stands for this list without keeping it alive
        self.begins = (like.name, kept) if like is not None else (None, 0)


def common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the longest common prefix. Costs next to nothing where the items are the same objects, and nothing
    at all where one list says that it begins like the other."""
    if a is b:
        return len(a)
    end = min(len(a), len(b))
    if isinstance(a, Items) and isinstance(b, Items) and b.begins[0] is a.name:
        same = b.begins[1]
    else:
        alike = list(map(operator.is_, a, b))
        same = alike.index(False) if False in alike else end
    while same < end and _equal(a[same], b[same]):
        same += 1
    return same


def _equal(a: Any, b: Any) -> bool:
    """As JSON: 1, 1.0 and true are three values, which ``==`` does not tell apart."""
    if a is b:
        return True
    return bool(a == b) and (not isinstance(a, dict | list | int | float) or json.dumps(a) == json.dumps(b))


def changes(base: Mapping[str, Any], now: Mapping[str, Any], kept: Mapping[str, int] | None = None) -> dict[str, Json]:
    """What makes ``now`` of ``base``, JSON-able (attrs values become objects). ``kept``: what their lists share, where
    it is known."""
    kept = shared(base, now) if kept is None else kept
    out: dict[str, Json] = {}
    drop = [key for key in base if key not in now]
    if drop:
        out["drop"] = drop
    for key, value in now.items():
        same = kept.get(key)
        if same is not None:
            if same == len(base[key]) == len(value):
                continue
            if same:
                out.setdefault("extend", {})[key] = [same, [_json(item) for item in value[same:]]]
                continue
        elif key in base and _equal(base[key], value):
            continue
        out.setdefault("set", {})[key] = _json(value)
    return out


def shared(base: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, int]:
    """By key of a list in both: how many items it begins with in both."""
    return {
        key: common(base[key], value)
        for key, value in now.items()
        if isinstance(value, list | tuple) and isinstance(base.get(key), list | tuple)
    }


def apply(base: Mapping[str, Json], change: Mapping[str, Json]) -> dict[str, Json]:
    """The request again."""
    out = {key: value for key, value in base.items() if key not in change.get("drop", ())}
    out.update(change.get("set", {}))
    for key, (kept, new) in change.get("extend", {}).items():
        out[key] = [*base[key][:kept], *new]
    return out


def _json(value: Any) -> Json:
    if attrs.has(type(value)):
        return attrs.asdict(value)
    if isinstance(value, tuple):
        return [_json(item) for item in value]
    return value


class Requests:
    """The last requests of a session, to find what a new one has in common with them."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=BASES)

    def turn(
        self,
        call: ModelCall,
        sampling: Sampling,
        reply: Reply,
        action: int,
        times: tuple[float, float],
        cause: str | None,
    ) -> dict[str, Json]:
        """One generation, JSON-able. ``times``: when it started and ended; ``cause``: why we ended it, if we did."""
        request = call.raw if isinstance(call.raw, Mapping) else {"messages": call.messages, "tools": call.tools}
        asked = dict(call.asked)
        if call.max_tokens is not None:
            asked["max_tokens"] = call.max_tokens
        return {
            "turn": sampling.turn,
            "action": action,
            "dialect": call.dialect,
            "request": self.record(sampling.turn, request),
            "sampling": _flat(sampling),
            "asked": asked,
            "usage": _flat(reply.usage),
            "started": times[0],
            "ended": times[1],
            "finish": reply.finish,
            "reply": {
                "id": reply.id,
                "text": reply.text,
                "reasoning": reply.reasoning,
                "calls": [_flat(c) for c in reply.calls],
            },
            "cause": cause,
            "problem": reply.problem,
        }

    def record(self, turn: int, request: Mapping[str, Any]) -> dict[str, Json]:
        """``{"base": turn or None, "drop", "set", "extend"}`` of the request that this turn answers."""
        best: tuple[int, Mapping[str, Any]] | None = None
        kept: dict[str, int] = {}
        for earlier in reversed(self._last):
            same = shared(earlier[1], request)
            if best is None or sum(same.values()) > sum(kept.values()):
                best, kept = earlier, same
        if best is None:
            self._last.append((turn, request))
            return {"base": None, **changes({}, request)}
        if 2 * sum(kept.values()) >= sum(len(v) for v in best[1].values() if isinstance(v, list | tuple)):
            self._last.remove(best)  # the same conversation goes on
        self._last.append((turn, request))
        return {"base": best[0], **changes(best[1], request, kept)}


def _flat(value: Any) -> dict[str, Json]:
    """A small attrs value as an object, without the cost of a deep copy."""
    return {f.name: getattr(value, f.name) for f in attrs.fields(type(value))}


def replay(records: Sequence[Mapping[str, Json]]) -> list[dict[str, Json]]:
    """The raw requests of a session's turns, in their order: ``records`` are its ``turns``."""
    requests: dict[int, dict[str, Json]] = {}
    for record in records:
        change = record["request"]
        base = {} if change["base"] is None else requests[change["base"]]
        requests[record["turn"]] = apply(base, change)
    return list(requests.values())
