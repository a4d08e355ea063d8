"""The gateway's own cost: per turn of a long conversation, and per request with thousands of live sessions.

    python bench/gateway.py [--quick] [--out PATH] [--model FOLDER]

Turns: one tool call of about 200 sampled tokens and one result of about 200 tokens a turn, in the Anthropic dialect
with a moving cache_control (``turn_ms``) and in plain chat (``chat_turn_ms``). A turn's cost is everything between a
parsed request and the engine, and between the engine's result and the reply's bytes. Beside it stand what grows with
the conversation by nature: ``parse_ms``, one scan of the body, and ``copy_ms``, one copy of the prompt. flatness is the
cost at the last turn over that at turn 50. Every turn begins and leaves its scan with cold caches, as the turns of one
session among thousands do: to make and to scan a long body empties them, a short one would not, and the cost of the
same work would seem to grow.

Unless a model is named, the tokenizer is a byte-level BPE trained on the spot on this repository's text, which is as
fast as real vocabularies are, with a ChatML template.

Requests: sessions over HTTP keep-alive, a scripted engine, new first-turn requests of about 1.2 kB from a raw-socket
client in a second process, 256 in flight. cpu_ms_per_request is the server's own, kib_per_session the growth of its
memory. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import trio
from attrs import define, field

from uniagent.adapters.dialects.anthropic import Anthropic
from uniagent.adapters.dialects.chat import Chat
from uniagent.engine import collector, config, model_files
from uniagent.engine.gateway import server as gateway_server
from uniagent.engine.gateway.chat_template import ChatTemplate
from uniagent.engine.gateway.codec import Codec
from uniagent.engine.gateway.model_folder import build, tokenizer_json
from uniagent.engine.gateway.server import Wire, listen, server_of
from uniagent.engine.gateway.session import SessionParts, in_thread
from uniagent.engine.gateway.sessions import Gateway
from uniagent.engine.observe.lag import Lag, percentile, watch
from uniagent.engine.ports import Capacity, Finish, Generation, Ids, Sampling, SessionSampling, VersionSpan
from uniagent.engine.trajectory.nodes import Place

TURNS = (50, 100, 200, 400, 800)
QUICK_TURNS = (50, 100, 200)
WINDOW = 25  # turns whose median is the figure
NEW_TOKENS = 200
COLD = np.zeros(1 << 20)  # 8 MiB, several times a core's own cache
SYSTEM = "You are an agent that works in a directory. " * 20


@define
class InstantEngine:
    """Answers at once with what it is given; knows when it was called and when it let go."""

    answer: Ids
    called: float = 0.0
    left: float = 0.0

    async def generate(
        self,
        prompt: Ids,
        sampling: Sampling,
        *,
        session: str,
        on_tokens: Callable[[Ids], bool | None] | None = None,
        on_abort: Callable[[Generation], None] | None = None,
    ) -> Generation:
        self.called = time.perf_counter()
        n = len(self.answer)
        spans, kv = (VersionSpan(0, 0, n),), (VersionSpan(0, 0, len(prompt) + n),)
        generation = Generation(self.answer, np.full(n, -1.0, np.float32), spans, kv, Finish.STOP, 0)
        await trio.lowlevel.checkpoint()
        self.left = time.perf_counter()
        return generation

    async def update(self, weights: Any, version: int, kv: Any) -> None:
        raise NotImplementedError

    def capacity(self) -> Capacity:
        return Capacity(1 << 40, 1 << 40, 0, 0, 1 << 30)

    def resident(self, prompt: Ids) -> int:
        return 0


@define
class Copies:
    """Times ``Place.prompt``, the one copy of the prompt."""

    seconds: float = 0.0
    _real: Any = field(init=False, default=Place.prompt)

    def __enter__(self) -> Copies:
        real = self._real

        def timed(place: Place, delta: Any) -> Ids:
            start = time.perf_counter()
            out = real(place, delta)
            self.seconds = time.perf_counter() - start
            return out  # type: ignore[no-any-return]

        Place.prompt = timed  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Place.prompt = self._real  # type: ignore[method-assign]


def words(encode: Callable[[str], Any], tokens: int, salt: int) -> str:
    """Text of about so many tokens, another one for every salt."""
    line = f"line {salt}: the file named report_{salt}.txt has {salt * 7} words in it\n"
    return line * max(1, round(tokens / len(encode(line))))


async def conversation(codec: Codec, encode: Callable[[str], Any], dialect: Any, turns: int) -> dict[str, list[float]]:
    """Milliseconds of each turn: control, parse, copy."""
    engine = InstantEngine(np.zeros(0, np.int32))
    gateway = Gateway(SessionParts(codec, engine, in_thread), origin="http://x")
    session = gateway.open("bench", SessionSampling(max_tokens=1 << 20))
    wire = Wire(dialect)
    anthropic = dialect.name == "anthropic"
    schema = {"type": "object", "properties": {"content": {"type": "string"}}}
    messages: list[Any] = [{"role": "user", "content": "Write the reports."}]
    out: dict[str, list[float]] = {"control": [], "parse": [], "copy": []}
    gc.collect()
    gc.freeze()
    with Copies() as copies:
        for turn in range(turns):
            call = json.dumps({"name": "write", "arguments": {"content": words(encode, NEW_TOKENS - 20, turn)}})
            engine.answer = np.array(encode(f"<tool_call>\n{call}\n</tool_call><|im_end|>"), np.int32)
            body = json.dumps(request(messages, schema, anthropic)).encode()
            COLD.sum()
            start = time.perf_counter()
            parsed = wire.parse(body)
            scanned = time.perf_counter()
            COLD.sum()
            ready = time.perf_counter()
            replies = await session.complete(parsed)
            reply = json.dumps(dialect.reply(parsed, replies)).encode()
            session.delivered(replies)
            end = time.perf_counter()
            out["parse"].append(1e3 * (scanned - start))
            out["copy"].append(1e3 * copies.seconds)
            out["control"].append(1e3 * ((engine.called - ready) + (end - engine.left) - copies.seconds))
            messages += echo(json.loads(reply), words(encode, NEW_TOKENS, turn + 100_000), anthropic)
    gc.unfreeze()
    export = await session.finish()
    assert len(export.trajectories) == 1, "the conversation split"
    assert export.ledger.trainable == export.ledger.sampled
    return out


def request(messages: list[Any], schema: Any, anthropic: bool) -> dict[str, Any]:
    if not anthropic:
        tool = {"type": "function", "function": {"name": "write", "parameters": schema}}
        return {"model": "m", "messages": [{"role": "system", "content": SYSTEM}, *messages], "tools": [tool]}
    last = messages[-1]
    blocks = last["content"] if isinstance(last["content"], list) else [{"type": "text", "text": last["content"]}]
    marked = {**last, "content": [*blocks[:-1], {**blocks[-1], "cache_control": {"type": "ephemeral"}}]}
    tools = [{"name": "write", "input_schema": schema}]
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    body = {"model": "m", "max_tokens": 32000, "messages": [*messages[:-1], marked], "system": system, "tools": tools}
    return {**body, "stream": False, "metadata": {"user_id": "u"}}


def echo(reply: Any, result: str, anthropic: bool) -> list[Any]:
    if anthropic:
        content = reply["content"]
        block = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": [{"type": "text", "text": result}]}
        return [{"role": "assistant", "content": content}, {"role": "user", "content": [block]}]
    message = reply["choices"][0]["message"]
    return [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": result}]


def at(series: list[float], turns: tuple[int, ...]) -> dict[str, float]:
    return {str(t): round(statistics.median(series[t - WINDOW : t]), 4) for t in turns}


# ---------------------------------------------------------------- many sessions


async def crowd(codec: Codec, answer: Ids, sessions: int, seconds: float, turns: int) -> dict[str, float]:
    """Requests a second, lag and memory with so many live sessions on as many connections."""
    engine = InstantEngine(answer)
    gateway = Gateway(SessionParts(codec, engine, in_thread), max_sessions=sessions + 1)
    settings = config.Gateway(max_sessions=sessions + 1)
    server = server_of(gateway, settings)
    lag = Lag(1 << 16)
    async with trio.open_nursery() as nursery:
        await nursery.start(functools.partial(listen, gateway, settings, server=server))
        nursery.start_soon(collector.at_quiet_moments, lambda: True)
        await trio.sleep(0.1)
        before = memory()
        paths = []
        for i in range(sessions):
            session = gateway.open(f"s{i}", SessionSampling(max_tokens=64))
            paths.append(session.address.base_url.removeprefix(gateway.origin))
        port = gateway.origin.rpartition(":")[2]
        command = [sys.executable, __file__, "--client", port, str(seconds), str(turns)]
        client = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert client.stdin is not None and client.stdout is not None  # noqa: PT018
        await client.stdin.send_all("\n".join(paths).encode() + b"\n")
        await client.stdin.aclose()
        said = b""
        while b"warm\n" not in said:
            said += await some(client.stdout)
        gc.collect()
        grown = memory() - before
        nursery.start_soon(functools.partial(watch, lag, interval_s=0.01))
        busy = time.process_time()
        while not said.endswith(b"}\n"):
            said += await some(client.stdout)
        busy = time.process_time() - busy
        seen = list(lag._lags)
        client.terminate()
        await client.wait()
        nursery.cancel_scope.cancel()
    result = json.loads(said.partition(b"warm\n")[2])
    return {
        "requests_per_s": round(result["requests"] / result["seconds"], 1),
        "cpu_ms_per_request": round(1e3 * busy / result["requests"], 3),
        "loop_lag_p50_ms": round(1e3 * percentile(seen, 50), 2),
        "loop_lag_p99_ms": round(1e3 * percentile(seen, 99), 2),
        "kib_per_session": round(grown / sessions / 1024, 1),
    }


async def some(stream: trio.abc.ReceiveStream) -> bytes:
    data = await stream.receive_some()
    if not data:
        raise RuntimeError("the client ended early: see its error above")
    return bytes(data)


def memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_client(port: int, seconds: float, turns: int) -> None:
    """Every connection makes one request (or, for later turns, a whole conversation) to warm up; then new first-turn
    requests, or repeats of the last turn, for so many seconds, 256 at a time."""
    paths = sys.stdin.read().split()
    selector = selectors.DefaultSelector()
    sockets = []
    for path in paths:
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets.append((sock, path))
    padding = "lorem ipsum dolor sit amet " * 30
    histories: dict[int, list[Any]] = {}

    def send(i: int, number: int) -> None:
        sock, path = sockets[i]
        messages = [{"role": "user", "content": f"request {number} of client {i}: {padding}"}]
        if turns > 1:
            messages = histories.setdefault(i, messages)
        body = json.dumps({"model": "m", "messages": messages}).encode()
        head = f"POST {path}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)

    def receive(i: int) -> None:
        data = sockets[i][0].recv(65536)
        assert data.startswith(b"HTTP/1.1 200"), data[:200]
        if turns > 1 and len(histories[i]) < 2 * turns - 1:
            text = json.loads(data.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"]
            said = {"role": "assistant", "content": text}
            histories[i] = [*histories[i], said, {"role": "user", "content": f"go on {len(histories[i])} {padding}"}]

    def many(total: int | None, until: float) -> int:
        """Requests answered, the connections taking turns, 256 in flight."""
        begun = done = 0
        free = deque(range(len(sockets)))
        for i in range(len(sockets)):
            selector.register(sockets[i][0], selectors.EVENT_READ, i)
        while total is None or done < total:
            now = time.perf_counter()
            while begun - done < min(256, len(sockets)) and (begun < total if total is not None else now < until):
                send(free.popleft(), begun)
                begun += 1
            if begun == done:
                break
            for key, _ in selector.select():
                receive(key.data)
                free.append(key.data)
                done += 1
        for sock, _ in sockets:
            selector.unregister(sock)
        return done

    many(len(sockets) * turns, float("inf"))
    print("warm", flush=True)
    time.sleep(1.0)
    start = time.perf_counter()
    done = many(None, start + seconds)
    print(json.dumps({"requests": done, "seconds": time.perf_counter() - start}), flush=True)
    time.sleep(60)  # the server ends this process: thousands of connections closing are no part of the figures


# ---------------------------------------------------------------- all of it

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for tool_call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
{{- tool_call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'user' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def model_of(path: str | None) -> tuple[Codec, Any]:
    """The codec and the tokenizer of a model folder, or of a vocabulary made of this repository's text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if path is not None:
        folder = model_files.folder(path)
        return Codec.from_folder(folder), Tokenizer.from_str(tokenizer_json(folder))
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    root = Path(__file__).parent.parent
    texts = [p.read_text() for d in ("docs", "engine", "bench") for p in sorted((root / d).rglob("*.[mp][dy]"))]
    tokenizer.train_from_iterator(texts, trainer)
    return build(tokenizer.to_str(), ChatTemplate(TEMPLATE, now=datetime(2026, 1, 1))), tokenizer


def main() -> int:
    if sys.argv[1:2] == ["--client"]:
        run_client(int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="well under a minute: fewer turns and sessions")
    parser.add_argument("--out", type=Path, help="also write the JSON line to this file")
    parser.add_argument("--model", help="whose tokenizer and template are used, instead of those made here")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    codec, tokenizer = model_of(args.model)

    def encode(text: str) -> Any:
        return tokenizer.encode(text, add_special_tokens=False).ids

    turns = QUICK_TURNS if args.quick else TURNS
    figures: dict[str, Any] = {"turns": turns[-1], "offload_bytes": gateway_server.OFFLOAD_BYTES}
    for name, dialect in (("", Anthropic()), ("chat_", Chat())):
        series = trio.run(conversation, codec, encode, dialect, turns[-1])
        figures[f"{name}turn_ms"] = at(series["control"], turns)
        figures[f"{name}parse_ms"] = at(series["parse"], turns)
        figures[f"{name}copy_ms"] = at(series["copy"], turns)
        first, last = (figures[f"{name}turn_ms"][str(t)] for t in (turns[0], turns[-1]))
        figures[f"{name}flatness"] = round(last / first, 2)
    answer = np.array(encode("I have read it and will go on.<|im_end|>"), np.int32)
    sessions = 500 if args.quick else min(5000, hard - 200)
    figures |= {"sessions": sessions, **trio.run(crowd, codec, answer, sessions, 3.0 if args.quick else 10.0, 1)}
    if not args.quick:
        late = trio.run(crowd, codec, answer, 500, 10.0, 20)
        figures |= {f"turn_20_{k}": v for k, v in late.items()}
    table(figures, turns)
    line = json.dumps(figures)
    if args.out:
        args.out.write_text(line + "\n")
    print(line)
    return 0


def table(figures: dict[str, Any], turns: tuple[int, ...]) -> None:
    print(f"{'ms a turn':<28}" + "".join(f"{t:>9}" for t in turns))
    for name in ("turn_ms", "parse_ms", "copy_ms", "chat_turn_ms", "chat_parse_ms", "chat_copy_ms"):
        print(f"{name:<28}" + "".join(f"{figures[name][str(t)]:>9.3f}" for t in turns))
    for name, value in figures.items():
        if not isinstance(value, dict):
            print(f"{name:<28}{value:>9}")


if __name__ == "__main__":
    sys.exit(main())
