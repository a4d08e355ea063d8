"""``mcp``: the tools of a Model Context Protocol server that runs inside the sandbox, over its stdin and stdout.

One session of JSON-RPC lines: initialize, tools/list, tools/call (modelcontextprotocol.io, revision 2025-06-18). Text
content is shown; other content is named. Calls run one after another. A server that does not answer in time is told to
give the call up; one that ended makes its tools say so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, cast

import trio
from attrs import frozen

from uniagent.adapters.options import options
from uniagent.adapters.sandboxes.channels import Channel, Opener
from uniagent.adapters.tools.text import shorten
from uniagent.engine.config import key
from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.ports import Json, Observation, Sandbox, ToolSchema

VERSION = "2025-06-18"
CLOSE_S = 5.0


@frozen
class McpOptions:
    """Keys of this tool in ``agent.tools``."""

    command: tuple[str, ...] = key((), "the server's command line, inside the sandbox")
    env: Mapping[str, str] = key(dict, "environment variables of the server")
    only: tuple[str, ...] = key((), "the tools to show, by their names; left out: all")
    prefix: str = key("", "put before each tool's name")
    timeout_s: float = key(60.0, "of one call", at_least=0.01)
    start_timeout_s: float = key(60.0, "until the server has listed its tools", at_least=0.01)
    max_chars: int = key(10000, "of an observation: the rest is cut out of its middle", at_least=16)


class Mcp:
    """``toolbox.ToolServer``: entered, it gives the server's tools."""

    def __init__(self, sandbox: Sandbox, given: Mapping[str, Json]) -> None:
        self.options = options(McpOptions, given, "tool mcp")
        if not self.options.command:
            raise UserError("tool mcp: command is missing, such as command = ['npx', '-y', 'some-mcp-server']")
        if not hasattr(sandbox, "open"):
            raise UserError("tool mcp: this sandbox's backend cannot run a server (it has no `open`)")
        self.opener = cast(Opener, sandbox)
        self.session: Session | None = None

    async def __aenter__(self) -> Sequence[McpTool]:
        """Raises InfraError for a server that does not start, UserError for ``only`` naming what it does not have."""
        wanted = self.options
        pairs = [f"{name}={value}" for name, value in wanted.env.items()]
        channel = await self.opener.open([*(["env", *pairs] if pairs else []), *wanted.command])
        self.session = Session(channel)
        try:
            with trio.move_on_after(wanted.start_timeout_s) as limit:
                found = await self.session.start()
            if limit.cancelled_caught:
                raise InfraError(
                    f"the MCP server {wanted.command[0]} did not list its tools in {wanted.start_timeout_s:g} s"
                )
            names = [tool["name"] for tool in found]
            if missing := [name for name in wanted.only if name not in names]:
                raise UserError(
                    f"tool mcp: the server has no tool {missing[0]!r}; it has: {', '.join(names) or 'none'}"
                )
        except BaseException:
            await self._close()
            raise
        return [McpTool(self, tool) for tool in found if not wanted.only or tool["name"] in wanted.only]

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        if self.session is not None:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S):
                await self.session.channel.close()
            self.session = None


class McpTool:
    """``engine.ports.Tool``: one tool of the server."""

    def __init__(self, server: Mcp, tool: Mapping[str, Json]) -> None:
        self.server, self.name = server, tool["name"]
        parameters = tool.get("inputSchema") or {"type": "object", "properties": {}}
        self.schema = ToolSchema(server.options.prefix + self.name, tool.get("description") or "", parameters)

    async def __call__(self, arguments: Mapping[str, Json]) -> Observation:
        assert self.server.session is not None
        wanted = self.server.options
        try:
            with trio.move_on_after(wanted.timeout_s):
                result = await self.server.session.request("tools/call", {"name": self.name, "arguments": arguments})
                text = shorten(_text(result.get("content") or []), wanted.max_chars)
                return Observation(text or "(no output)", problem="tool_error" if result.get("isError") else None)
        except RpcError as problem:
            return Observation(f"{self.schema.name} failed: {problem}", problem="tool_error")
        return Observation(f"{self.schema.name} did not answer within {wanted.timeout_s:g} s", problem="timeout")


class RpcError(Exception):
    """What the server said instead of a result, or that it is gone."""


class Session:
    """Requests and answers on a channel, one at a time."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.lock = trio.Lock()
        self.received = b""
        self.number = 0

    async def start(self) -> list[Mapping[str, Json]]:
        """The server's tools. Raises InfraError with what the server says when it does not speak the protocol."""
        try:
            client = {"name": "uniagent", "version": "1"}
            await self.request("initialize", {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": client})
            await self._send({"method": "notifications/initialized"})
            tools: list[Mapping[str, Json]] = []
            cursor: Mapping[str, Json] | None = {}
            while cursor is not None:
                page = await self.request("tools/list", cursor)
                tools += page["tools"]
                cursor = {"cursor": page["nextCursor"]} if page.get("nextCursor") else None
            return tools
        except RpcError as problem:
            with trio.move_on_after(1):
                said = (await self.channel.read(errors=True)).decode(errors="replace").strip()
                raise InfraError(f"the MCP server did not start: {problem}; {said}") from problem
            raise InfraError(f"the MCP server did not start: {problem}") from problem

    async def request(self, method: str, params: Mapping[str, Json]) -> Mapping[str, Json]:
        """The result of a request. Raises RpcError. Cancelled, it tells the server to give it up."""
        async with self.lock:
            self.number += 1
            number = self.number
            try:
                await self._send({"id": number, "method": method, "params": params})
                while True:
                    message = await self._receive()
                    if "method" in message:
                        await self._serve(message)
                    elif message.get("id") == number:
                        if "error" in message:
                            raise RpcError(message["error"].get("message") or str(message["error"]))
                        return message.get("result") or {}
            except trio.Cancelled:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                    await self._send({"method": "notifications/cancelled", "params": {"requestId": number}})
                raise

    async def _serve(self, message: Mapping[str, Json]) -> None:
        """A request of the server's: we offer nothing but an answer to ping. Notifications are passed over."""
        if message["method"] == "ping":
            await self._send({"id": message["id"], "result": {}})
        elif "id" in message:
            error = {"code": -32601, "message": f"the client does not offer {message['method']}"}
            await self._send({"id": message["id"], "error": error})

    async def _send(self, message: Mapping[str, Json]) -> None:
        try:
            await self.channel.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        except (BrokenPipeError, trio.BrokenResourceError, trio.ClosedResourceError) as problem:
            raise RpcError("the server has ended") from problem

    async def _receive(self) -> Mapping[str, Json]:
        """The next JSON object; lines that are none (a server that prints) are passed over."""
        while True:
            while b"\n" not in self.received:
                data = await self.channel.read()
                if not data:
                    raise RpcError("the server has ended")
                self.received += data
            line, _, self.received = self.received.partition(b"\n")
            try:
                message: Any = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict):
                return message


def _text(content: Sequence[Mapping[str, Json]]) -> str:
    return "\n".join(
        part.get("text") or "" if part.get("type") == "text" else f"[{part.get('type', 'unknown')} content]"
        for part in content
    )
