"""The gateway's store of sessions: open, find by key, reward, finish, delete.

Invariants: an id is opened once while it is in the store; a session's key is the only way in and cannot be guessed
(it is a keyed hash of the id, so that it is known before the session is opened and says nothing about others); at
most ``max_sessions`` are in the store. Knows no socket: ``origin`` and ``serve`` are set by the server once it listens.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Iterator

from attrs import define, field
from trio import SocketListener

from uniagent.engine.errors import UserError
from uniagent.engine.gateway.session import GatewaySession, SessionParts
from uniagent.engine.messages import Problem
from uniagent.engine.ports import ModelEndpoint, SessionSampling
from uniagent.engine.trajectory.nodes import TreePolicy
from uniagent.engine.trajectory.tree import TurnTree
from uniagent.engine.trajectory.types import Export

KEY_PREFIX = "sk-ua-"


@define(eq=False)
class Gateway:
    """All sessions of one node. ``on_export`` sees every finished session once (metrics)."""

    parts: SessionParts
    policy: TreePolicy = field(factory=TreePolicy)
    max_sessions: int = 20000
    model_name: str = "policy"
    origin: str = ""  # http://host:port, once a server listens
    serve: Callable[[SocketListener], Awaitable[None]] | None = None  # that server, on one more listener
    secret: bytes = field(factory=lambda: secrets.token_bytes(32), repr=False)
    on_export: Callable[[GatewaySession], None] | None = None
    _by_id: dict[str, GatewaySession] = field(factory=dict, repr=False)
    _by_key: dict[str, GatewaySession] = field(factory=dict, repr=False)

    def address(self, session_id: str) -> ModelEndpoint:
        """How a session is reached over HTTP, known before it is opened."""
        token = hashlib.blake2b(session_id.encode(), key=self.secret, digest_size=18).hexdigest()
        return ModelEndpoint(f"{self.origin}/s/{token}", KEY_PREFIX + token, self.model_name, serve=self.serve)

    def runtime(self, session_id: str) -> dict[str, str]:
        """The live endpoint as Task Configs take it."""
        address = self.address(session_id)
        return {"base_url": address.base_url, "api_key": address.api_key, "model_name": address.model_name}

    def open(self, session_id: str, sampling: SessionSampling, *, training: bool = True) -> GatewaySession:
        """Problem 409 for an id that is in use, 429 when the node is full; UserError for temperature 0 in training."""
        if training and sampling.temperature <= 0:
            raise UserError(
                f"session {session_id}: temperature {sampling.temperature:g} cannot be trained on: use a positive one, "
                "or evaluate greedily"
            )
        if session_id in self._by_id:
            raise Problem(
                409, "session_exists", f"session {session_id!r} is open: choose another id, or delete it first"
            )
        if len(self._by_id) >= self.max_sessions:
            raise Problem(
                429,
                "too_many_sessions",
                f"{self.max_sessions} sessions are open: finish and delete some, or raise gateway.max_sessions",
            )
        address = self.address(session_id)
        session = GatewaySession(session_id, address, self.parts, TurnTree(self.policy), sampling, training)
        self._by_id[session_id] = self._by_key[address.api_key] = session
        return session

    def get(self, session_id: str) -> GatewaySession:
        """Problem 404 when there is none."""
        session = self._by_id.get(session_id)
        if session is None:
            raise Problem(404, "no_such_session", f"there is no session {session_id!r}: open it with POST /sessions")
        return session

    def by_key(self, key: str) -> GatewaySession | None:
        """By API key, or by the token in the path, which is the key without its prefix."""
        return self._by_key.get(key) or self._by_key.get(KEY_PREFIX + key)

    async def finish(self, session_id: str, reward: float | None = None) -> Export:
        """Ends a session once and takes it out of the store."""
        session = self.get(session_id)
        export = await self.end(session, reward)
        self.forget(session)
        return export

    async def end(self, session: GatewaySession, reward: float | None = None) -> Export:
        """Exports; the session stays in the store until it is deleted, and the answer is the same when asked again."""
        first = session.export is None
        export = await session.finish(reward)
        if first and self.on_export is not None:
            self.on_export(session)
        return export

    async def delete(self, session_id: str) -> None:
        session = self.get(session_id)
        await self.end(session)
        self.forget(session)

    def forget(self, session: GatewaySession) -> None:
        self._by_id.pop(session.id, None)
        self._by_key.pop(session.address.api_key, None)
        for (
            node
        ) in session.tree.history.nodes:  # parents and children hold each other: let go, so that all is freed now
            node.context.clear()
            node.answers.clear()
            node.memo = None
            if node.action is not None:
                node.action.echoes.clear()

    def __iter__(self) -> Iterator[GatewaySession]:
        return iter(tuple(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)
