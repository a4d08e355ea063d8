"""``uniagent serve``: the gateway alone, to debug a harness against a model or a script.

Prints one line of JSON when it is ready: ``{"base_url", "admin_token", "pid"}``. Sessions are opened with
``POST /sessions`` and the admin token; they are no training sessions unless that says so, so what a client asks of the
sampler is honoured. Ctrl-C lets answers end that are being written, then stops.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from uniagent.engine import collector, config, model_files
from uniagent.engine.errors import UserError
from uniagent.engine.gateway.codec import Codec
from uniagent.engine.gateway.model_folder import tokenizer_json
from uniagent.engine.gateway.server import listen, server_of
from uniagent.engine.gateway.session import SessionParts, in_thread
from uniagent.engine.gateway.sessions import Gateway
from uniagent.engine.observe.lag import Lag, watch
from uniagent.engine.ports import InferenceEngine, Json, SessionSampling
from uniagent.engine.registry import load

DRAIN_S = 5.0
SCRIPT_CONTEXT = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until Ctrl-C or SIGTERM; UserError for a model, a script or an address that cannot be used."""
    parser = argparse.ArgumentParser(prog="uniagent serve", description="Run the gateway alone, to debug a harness.")
    parser.add_argument("--model", default="builtin:tiny-shell", help="a Hugging Face folder, or builtin:NAME")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port; 0 takes a free one")
    parser.add_argument("--engine", default="transformers", help="transformers, scripted, server, ...")
    parser.add_argument("--script", type=Path, help="for --engine scripted: JSON lines, one a generation")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="one of engine.options; may be repeated"
    )
    parser.add_argument("--context", type=int, help="longest prompt + generation, in tokens")
    parser.add_argument("--parser", default="auto", help="parser of the model's tool calls")
    parser.add_argument("--admin-token", help="token of the sessions API; random when not given")
    args = parser.parse_args(argv)
    if (args.engine == "scripted") != (args.script is not None):
        raise UserError("--engine scripted and --script FILE go together")
    trio.run(_serve, args)
    return 0


async def _serve(args: argparse.Namespace) -> None:
    folder = model_files.folder(args.model)
    settings = config.Gateway(host=args.host, port=args.port)
    codec = Codec.from_folder(folder, parser=args.parser)
    lag = Lag()
    async with _engine(args, folder) as engine, trio.open_nursery() as nursery:
        gateway = Gateway(SessionParts(codec, engine, in_thread, trust_client=True), model_name=folder.name)
        token = args.admin_token or secrets.token_urlsafe(24)
        server = server_of(gateway, settings, admin_token=token)
        server.sampling = SessionSampling(max_tokens=engine.capacity().context)
        server.metrics.lag = lag.metrics
        try:
            origin = await nursery.start(functools.partial(listen, gateway, settings, server=server))
        except OSError as problem:
            why = problem.strerror or problem
            raise UserError(f"cannot listen on {args.host}:{args.port}: {why}; choose another --port") from problem
        nursery.start_soon(functools.partial(watch, lag))
        nursery.start_soon(collector.at_quiet_moments, lambda: any(session.running for session in gateway))
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            print(json.dumps({"base_url": origin, "admin_token": token, "pid": os.getpid()}), flush=True)
            await anext(aiter(signals))
        print(f"stopping: answers under way have {DRAIN_S:g} s", file=sys.stderr, flush=True)
        await server.http.drain(DRAIN_S)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _engine(args: argparse.Namespace, folder: Path) -> AsyncIterator[InferenceEngine]:
    if args.engine == "scripted":
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(tokenizer_json(folder))
        settings = config.Engine(
            "scripted", context=args.context or SCRIPT_CONTEXT, options={"script": str(args.script)}
        )
        yield load("engines", "scripted")(
            settings,
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
            decode=lambda ids: tokenizer.decode(ids.tolist(), skip_special_tokens=False),
        )
        return
    from uniagent.engine.accelerator import Accelerator
    from uniagent.engine.rollout.driver import StepDriver

    settings = config.Engine(args.engine, context=args.context or config.Engine().context, options=_options(args))
    factory = load("engines", args.engine)
    if not getattr(factory, "steps", True):
        async with factory(settings, folder) as engine:
            yield engine
        return

    def build() -> object:
        model = model_files.load(folder, dtype="auto", device=model_files.pick_device("auto"))
        return factory(settings, model, shared=getattr(factory, "shares_module", True))

    async with Accelerator.start() as accelerator:
        core = await accelerator.run(build, kind="engine")
        yield StepDriver(accelerator, core)  # type: ignore[arg-type]


def _options(args: argparse.Namespace) -> dict[str, Json]:
    """``--option KEY=VALUE``: a JSON value, or text where it is none."""
    found: dict[str, Json] = {}
    for setting in args.option:
        name, equals, value = setting.partition("=")
        if not equals:
            raise UserError(f"--option {setting}: write --option KEY=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
