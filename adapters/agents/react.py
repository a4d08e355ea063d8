"""``react``: the white-box agent. Ask the model, run its calls, show it the results, until it is done.

Made of parts that a sample's config selects: prompt (``system``), tools, context, error policies, stop rule
(``max_steps``, a call that submits, an answer without a call). It asks the model in this process, through the session's
gateway. Knows nothing of tokens, rewards or training; sampling is the session's.

``AgentResult.info``: ``stop`` (no_tool_call, submit, max_steps, a policy's name, or the session's spent budget),
``turns``, ``tool_calls``, ``problems`` (how often each trouble came up).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from attrs import define, field, frozen

from uniagent.adapters.agents.chat import as_chat, from_chat
from uniagent.adapters.agents.context import Context, ContextOptions, make_context
from uniagent.adapters.agents.policies import Policies, Troubles
from uniagent.adapters.options import options
from uniagent.adapters.tools.toolbox import SandboxToolbox, ToolSettings, build_toolbox
from uniagent.engine.config import key
from uniagent.engine.errors import UserError
from uniagent.engine.messages import Call, Message, ModelCall, Problem, Reply, Usage
from uniagent.engine.ports import AgentResult, Json, Messages, ModelEndpoint, Sandbox

DEFAULT_STEPS = 100
SPENT = ("context_length_exceeded", "generation_budget_spent")  # the session's budgets: an end, not a crash


@frozen
class ReactOptions:
    """Keys of ``agent.options``."""

    system: str = key("", "system message, put before the task's prompt; empty: none")
    nudge: str = key(
        "Go on: call a tool, or end the task with one.", "said after an answer without a call (no_tool_call = nudge)"
    )
    cut: str = key(
        "Your answer was cut off: it was too long. Go on.", "said after a cut answer (length_limit = continue)"
    )
    policies: Mapping[str, Json] = key(dict, "what to do when things go wrong: see Policies")
    context: Mapping[str, Json] = key(dict, "what of the conversation the model is shown: kind, keep, tokens")


class AgentSettings(Protocol):
    """The ``agent`` section of a task."""

    @property
    def tools(self) -> Sequence[ToolSettings]: ...
    @property
    def max_steps(self) -> int | None: ...
    @property
    def options(self) -> Mapping[str, Json]: ...


class React:
    """``engine.ports.Agent``; stateless, so one may run many episodes."""

    def __init__(self, settings: AgentSettings) -> None:
        """Raises UserError for an unknown key or value."""
        self.settings = settings
        self.options = options(ReactOptions, settings.options, "agent react: options")
        self.policies = options(Policies, self.options.policies, "agent react: options.policies")
        self.context = options(ContextOptions, self.options.context, "agent react: options.context")
        make_context(self.context)

    async def run(self, prompt: Messages, sandbox: Sandbox, model: ModelEndpoint) -> AgentResult:
        if model.complete is None:
            raise UserError("agent react asks the model in this process, and this endpoint is reachable over HTTP only")
        history = list(from_chat(prompt))
        if self.options.system:
            history.insert(0, Message("system", self.options.system))
        async with build_toolbox(self.settings.tools, sandbox) as toolbox:
            episode = Episode(
                model, toolbox, self.options, Troubles(self.policies), make_context(self.context), history,
                self.settings.max_steps or DEFAULT_STEPS,
            )  # fmt: skip
            return await episode.play()


@define(eq=False)
class Episode:
    """One run: the conversation so far, and how it ends."""

    model: ModelEndpoint
    toolbox: SandboxToolbox
    options: ReactOptions
    troubles: Troubles
    context: Context
    history: list[Message]
    max_steps: int
    tools: tuple[Mapping[str, Json], ...] = field(init=False)
    usage: Usage | None = None
    turns: int = 0
    tool_calls: int = 0

    def __attrs_post_init__(self) -> None:
        self.tools = tuple(schema.as_json() for schema in self.toolbox.schemas())

    async def play(self) -> AgentResult:
        """Turns until a stop; ``finished`` when the model itself ended it."""
        stop: str | None = None
        while stop is None:
            if self.turns == self.max_steps:
                stop = "max_steps"
                break
            try:
                reply = await self._ask()
            except Problem as problem:
                if problem.kind not in SPENT:
                    raise
                stop = problem.kind
                break
            self.turns += 1
            stop = await self._take(reply)
        info = {
            "stop": stop,
            "turns": self.turns,
            "tool_calls": self.tool_calls,
            "problems": dict(self.troubles.counts),
        }
        return AgentResult(stop in ("no_tool_call", "submit"), [as_chat(m) for m in self.history], info)

    async def _ask(self) -> Reply:
        messages = await self.context.view(self.history, self.usage, self._ask_aside)
        reply = await self._complete(messages, self.tools)
        self.usage = reply.usage
        self.history.append(reply.message())
        return reply

    async def _ask_aside(self, messages: Sequence[Message]) -> str:
        """A request beside the conversation, answered in text."""
        return (await self._complete(messages, self.tools)).text

    async def _complete(self, messages: Sequence[Message], tools: tuple[Mapping[str, Json], ...]) -> Reply:
        assert self.model.complete is not None
        call = ModelCall(tuple(messages), tools, model=self.model.model_name)
        reply: Reply = await self.model.complete(call)
        return reply

    async def _take(self, reply: Reply) -> str | None:
        """Act on an answer; why the episode stops here, None to go on."""
        if reply.finish == "length":
            if self.troubles.met("length_limit") == "end":
                return "length_limit"
            if not reply.calls:
                self._say(self.options.cut)
                return None
        if reply.calls:
            return await self._run(reply.calls)
        if reply.problem is not None:
            if self.troubles.met("malformed_call") == "end":
                return "malformed_call"
            self._say(f"Your tool call could not be read: {reply.problem}")
            return None
        if self.troubles.met("no_tool_call") == "end":
            return "no_tool_call"
        self._say(self.options.nudge)
        return None

    def _say(self, text: str) -> None:
        self.history.append(Message("user", text))

    async def _run(self, calls: Sequence[Call]) -> str | None:
        """Every call in turn; what ends the episode keeps the rest from being run."""
        for call in calls:
            if self.troubles.repeated(call):
                policy = self.troubles.met("repeated_call")
                if policy == "end":
                    return "repeated_call"
                if policy == "observe":
                    self._answer(call, "this is the call before it once more: it was not run again")
                    continue
            self.tool_calls += 1
            seen = await self.toolbox.call(call.name, call.arguments)
            self._answer(call, seen.text)
            if seen.done:
                return "submit"
            if seen.problem is not None and self.troubles.met(seen.problem) == "end":
                return seen.problem
        return None

    def _answer(self, call: Call, text: str) -> None:
        self.history.append(Message("tool", text, answers=call.id))
