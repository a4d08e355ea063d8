"""The gateway's own API: sessions opened, rewarded, finished and deleted by whoever holds the admin token.

JSON in, JSON out; every mistake is a Problem that says what to change. Knows no dialect and no socket.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from typing import Any

from attrs import evolve, fields

from uniagent.engine.errors import UserError, nearest
from uniagent.engine.gateway.export_json import export_json
from uniagent.engine.gateway.session import GatewaySession
from uniagent.engine.gateway.sessions import Gateway
from uniagent.engine.gateway.wire import load
from uniagent.engine.messages import Problem
from uniagent.engine.ports import Json, SessionSampling

OPEN_KEYS = ("session_id", "sampling", "training")
MAX_ID = 200


def open_session(gateway: Gateway, body: bytes, default: SessionSampling) -> dict[str, Json]:
    """``{session_id?, sampling?, training?}`` to ``{session_id, base_url, api_key, model}``."""
    wanted = _object(body)
    _known(wanted, OPEN_KEYS, "")
    session_id = wanted.get("session_id")
    if session_id is None:
        session_id = f"s-{secrets.token_hex(8)}"
    if not isinstance(session_id, str) or not 0 < len(session_id) <= MAX_ID or not session_id.isprintable():
        raise Problem(400, "invalid_request", f"session_id must be 1 to {MAX_ID} printable characters")
    training = wanted.get("training")
    if training is None:
        training = not gateway.parts.trust_client
    if not isinstance(training, bool):
        raise Problem(400, "invalid_request", "training must be true or false")
    try:
        session = gateway.open(session_id, _sampling(wanted.get("sampling"), default), training=training)
    except UserError as problem:
        raise Problem(400, "invalid_request", str(problem)) from problem
    address = session.address
    return {
        "session_id": session_id,
        "base_url": address.base_url,
        "api_key": address.api_key,
        "model": address.model_name,
    }


def describe(session: GatewaySession) -> dict[str, Json]:
    """What ``GET /sessions/{id}`` says."""
    return {
        "session_id": session.id,
        "state": "open" if session.export is None else "finished",
        "base_url": session.address.base_url,
        "generations": session.generations,
        "running": session.running,
        "training": session.training,
        "reward": session.reward,
    }


def set_reward(session: GatewaySession, body: bytes) -> dict[str, Json]:
    """``{reward}``: remembered until the session is finished."""
    wanted = _object(body)
    _known(wanted, ("reward",), "")
    reward = _reward(wanted)
    if reward is None:
        raise Problem(400, "invalid_request", "reward is missing: give a number")
    if session.export is not None:
        raise Problem(409, "session_finished", f"session {session.id} is finished: its reward can no longer change")
    session.reward = reward
    return {"session_id": session.id, "reward": reward}


async def finish(gateway: Gateway, session: GatewaySession, body: bytes) -> dict[str, Json]:
    """``{reward?}`` to the export; the same answer when asked again."""
    wanted = _object(body) if body.strip() else {}
    _known(wanted, ("reward",), "")
    export = await gateway.end(session, _reward(wanted))
    out = await gateway.parts.offload(export_json, export, session.reward)
    return {"session_id": session.id, **out}


async def delete(gateway: Gateway, session: GatewaySession) -> dict[str, Json]:
    await gateway.delete(session.id)
    return {"session_id": session.id, "deleted": True}


def _object(body: bytes) -> dict[str, Any]:
    return load(body) if body.strip() else {}


def _known(wanted: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in wanted:
        if key not in keys:
            raise Problem(400, "invalid_request", f"{where}{key} is not known: {nearest(key, keys)}")


def _reward(wanted: Mapping[str, Any]) -> float | None:
    reward = wanted.get("reward")
    if reward is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise Problem(400, "invalid_request", f"reward must be a finite number, got {json.dumps(reward)[:40]}")
    return float(reward)


def _sampling(wanted: Any, default: SessionSampling) -> SessionSampling:
    if wanted is None:
        return default
    if not isinstance(wanted, dict):
        raise Problem(400, "invalid_request", "sampling must be an object")
    _known(wanted, tuple(f.name for f in fields(SessionSampling)), "sampling.")
    values: dict[str, Any] = {}
    for key, value in wanted.items():
        whole = key not in ("temperature", "top_p")
        if value is None and key in ("max_total_tokens", "max_generations"):
            values[key] = None
            continue
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            kind = "an integer" if whole else "a number"
            raise Problem(400, "invalid_request", f"sampling.{key} must be {kind}, got {json.dumps(value)[:40]}")
        low, high = {"temperature": (0, 100), "top_p": (0, 1), "top_k": (0, math.inf)}.get(key, (1, math.inf))
        if not low <= value <= high:
            raise Problem(400, "invalid_request", f"sampling.{key} must be between {low:g} and {high:g}, got {value}")
        values[key] = value if whole else float(value)
    return evolve(default, **values)
