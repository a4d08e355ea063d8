"""The relay against lines that a service may bring: late, in pieces, with an image's greeting, never again."""

from __future__ import annotations

import base64
import json

import pytest
import trio
import trio.testing

from uniagent.adapters.sandboxes.relay import READY, SEND_S, WINDOW, Relay
from uniagent.engine.errors import InfraError


class ScriptedLine:
    """What was sent, and what the test brings."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.bring, self.brought = trio.open_memory_channel[str](100)
        self.stuck = False

    async def send(self, text: str) -> None:
        if self.stuck:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        self.sent.append(text)

    async def receive(self) -> str:
        return await self.brought.receive()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def test_lines_in_pieces_behind_a_greeting(autojump_clock: trio.testing.MockClock) -> None:
    line = ScriptedLine()
    relay = Relay(line, {"A": "b"})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(relay.run)
        for piece in ("Welcome\nc1 data 1 ", "xxxx\nuniagent rel", "ay ready\n"):
            await line.bring.send(piece)
        await relay.ready.wait()
        channel = await relay.open(["echo", "ü"])
        name, verb, asked = line.sent[0].split()
        assert (name, verb) == (channel.name, "open")
        assert json.loads(base64.b64decode(asked)) == {"argv": ["echo", "ü"], "env": {"A": "b"}, "cwd": None}
        whole = f"{name} data 1 {encoded(bytes([0, 255]))}\n{name} end 1\n{name} code 3\nc99 data 1 eA==\n"
        for character in whole:
            await line.bring.send(character)
            await trio.testing.wait_all_tasks_blocked()
        assert (await channel.read(), await channel.read(), await channel.code()) == (b"\x00\xff", b"", 3)
        assert f"{name} ack 1 2\n" in line.sent, "what was read makes room"
        nursery.cancel_scope.cancel()


async def test_a_program_that_does_not_read_holds_only_its_writer(autojump_clock: trio.testing.MockClock) -> None:
    line = ScriptedLine()
    relay = Relay(line, {})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(relay.run)
        await line.bring.send(f"{READY}\n")
        await relay.ready.wait()
        channel, other = await relay.open(["sleep"]), await relay.open(["cat"])
        nursery.start_soon(channel.write, bytes(3 * WINDOW))
        await trio.testing.wait_all_tasks_blocked()
        assert channel.room == 0
        with trio.fail_after(1):
            await other.write(b"x")
        await line.bring.send(f"{channel.name} ack 0 1000\n")
        await trio.testing.wait_all_tasks_blocked()
        assert channel.room == 0
        with pytest.raises(trio.BrokenResourceError):
            await line.bring.send(f"{other.name} broken\n")
            await trio.testing.wait_all_tasks_blocked()
            await other.write(b"y")
        nursery.cancel_scope.cancel()


async def test_the_end_of_the_line_wakes_everyone(autojump_clock: trio.testing.MockClock) -> None:
    line = ScriptedLine()
    relay = Relay(line, {})
    failed: list[str] = []

    async def wait_for(what: str) -> None:
        with pytest.raises(InfraError, match="the sandbox is gone"):
            await getattr(channel, what)()
        failed.append(what)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(relay.run)
        await line.bring.send(f"{READY}\n")
        await relay.ready.wait()
        channel = await relay.open(["cat"])
        nursery.start_soon(wait_for, "read")
        nursery.start_soon(wait_for, "code")
        await trio.testing.wait_all_tasks_blocked()
        await line.bring.send("")
    assert sorted(failed) == ["code", "read"]
    with pytest.raises(InfraError):
        await relay.open(["true"])


async def test_a_service_that_takes_nothing_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    line = ScriptedLine()
    relay = Relay(line, {})
    line.stuck = True
    with pytest.raises(InfraError, match=f"took nothing for {SEND_S:g} s"):
        await relay.open(["true"])
