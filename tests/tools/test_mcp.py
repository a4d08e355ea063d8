"""MCP tools from a server that runs in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from attrs import field, frozen

from uniagent.adapters.sandboxes.local import LocalProvider
from uniagent.adapters.tools.toolbox import build_toolbox
from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.ports import Json

SERVER = """
import json, os, sys, time
print("a line that is no JSON", flush=True)
def say(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)
tools = [
    {"name": "add", "description": "Adds.", "inputSchema": {"type": "object", "properties": {"a": {"type": "integer"},
     "b": {"type": "integer"}}, "required": ["a", "b"]}},
    {"name": "fail", "inputSchema": {"type": "object"}},
    {"name": "hang", "inputSchema": {"type": "object"}},
    {"name": "die", "inputSchema": {"type": "object"}},
]
for line in sys.stdin:
    m = json.loads(line)
    method, params = m["method"], m.get("params") or {}
    if method == "initialize":
        assert params["protocolVersion"]
        say(id=m["id"], result={"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}})
    elif method == "tools/list":
        say(method="notifications/message", params={"data": "listing"})
        first = "cursor" not in params
        say(id=m["id"], result={"tools": tools[:1], "nextCursor": "x"} if first else {"tools": tools[1:]})
    elif method == "tools/call":
        name, given = params["name"], params["arguments"]
        if name == "add":
            say(id=99, method="ping")
            assert json.loads(sys.stdin.readline()) == {"jsonrpc": "2.0", "id": 99, "result": {}}
            total = str(given["a"] + given["b"]) + os.environ.get("UNIT", "")
            say(id=m["id"], result={"content": [{"type": "text", "text": total}, {"type": "image", "data": ""}]})
        elif name == "fail":
            say(id=m["id"], result={"content": [{"type": "text", "text": "it broke"}], "isError": True})
        elif name == "die":
            sys.exit(3)
        elif name == "hang":
            assert json.loads(sys.stdin.readline())["method"] == "notifications/cancelled"
    elif "id" in m:
        say(id=m["id"], error={"code": -32601, "message": "no such method"})
"""


@frozen
class Setting:
    name: str
    options: Mapping[str, Json] = field(factory=dict)


def setting(**options: Any) -> Setting:
    return Setting("mcp", {"command": ["python3", "server.py"], **options})


async def test_a_servers_tools(isolation: str) -> None:
    provider = LocalProvider({"warm": 0, "isolation": isolation})
    async with provider, provider.open({"files": {"server.py": SERVER}}) as box:
        settings = [setting(prefix="m_", env={"UNIT": " kg"}, timeout_s=20), Setting("submit")]
        async with build_toolbox(settings, box) as toolbox:
            assert [s.name for s in toolbox.schemas()] == ["submit", "m_add", "m_fail", "m_hang", "m_die"]
            assert toolbox.schemas()[1].parameters["required"] == ["a", "b"]
            assert (await toolbox.call("m_add", {"a": 2, "b": 3})).text == "5 kg\n[image content]"
            assert (await toolbox.call("m_add", {"a": 2})).problem == "malformed_call"
            seen = await toolbox.call("m_fail", {})
            assert (seen.text, seen.problem) == ("it broke", "tool_error")
            seen = await toolbox.call("m_die", {})
            assert (seen.text, seen.problem) == ("m_die failed: the server has ended", "tool_error")
        done = await box.exec(
            ["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[p]ython3 server.py'"], timeout_s=9
        )
        assert done.output == b"0\n" or isolation == "none", "the server went with the toolbox"


async def test_a_call_that_takes_too_long_is_given_up(confined: None) -> None:
    files = {"files": {"server.py": SERVER}}
    settings = [setting(timeout_s=0.3, only=["hang", "add"])]
    async with (
        LocalProvider({"warm": 0}) as provider,
        provider.open(files) as box,
        build_toolbox(settings, box) as toolbox,
    ):
        assert [s.name for s in toolbox.schemas()] == ["add", "hang"]
        assert (await toolbox.call("hang", {})).problem == "timeout"
        assert (await toolbox.call("add", {"a": 1, "b": 1})).text.startswith("2")


async def test_what_goes_wrong_at_the_start_is_told(confined: None) -> None:
    async with LocalProvider({"warm": 0}) as provider, provider.open({"files": {"server.py": SERVER}}) as box:
        for wrong, kind, complaint in (
            (setting(only=["sub"]), UserError, "no tool 'sub'; it has: add, fail, hang, die"),
            (setting(command=["nosuchserver"]), InfraError, "did not start: the server has ended; .*nosuchserver"),
            (setting(command=["sleep", "100"], start_timeout_s=0.2), InfraError, "did not list its tools in 0.2 s"),
        ):
            with pytest.raises(kind, match=complaint):
                async with build_toolbox([wrong], box):
                    pass
        with pytest.raises(UserError, match="command is missing"):
            build_toolbox([Setting("mcp")], box)
