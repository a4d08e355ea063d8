"""What the engine asks of the world: ports as Protocols, and the small value types that cross them.

Knows no vendor, no model, no task. Arrays are numpy; ``[T]`` counts tokens. Everything here is either a
frozen value or a Protocol, and importing it loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

if TYPE_CHECKING:
    from trio import SocketListener

    from uniagent.engine.messages import Delta, ModelCall, Problem, Reply
    from uniagent.engine.shaping import Shaping

Json: TypeAlias = Any  # a JSON value: None, bool, int, float, str, list, dict
Ids: TypeAlias = npt.NDArray[np.int32]  # [T] token ids
Floats: TypeAlias = npt.NDArray[np.float32]  # [T]
SessionId: TypeAlias = str
Messages: TypeAlias = Sequence[Mapping[str, Json]]  # chat messages: {"role": ..., "content": ...}
Weights: TypeAlias = Any  # an iterable of (name, tensor), or None: the learner's own module, already changed in place


# ---------------------------------------------------------------- inference


class Finish(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # a stop id was sampled
    LENGTH = "length"  # max_tokens or the context limit
    ABORTED = "aborted"  # we ended it


class KvPolicy(StrEnum):
    """What happens to the KV cache of running requests when the weights change."""

    RECOMPUTE = "recompute"  # running requests are prefilled again under the new weights
    KEEP = "keep"  # they go on over KV written by older weights; the spans say which


@frozen
class VersionSpan:
    """Policy version of the tokens in [start, end)."""

    version: int
    start: int
    end: int


@frozen
class Sampling:
    """How one generation is sampled. Draws are keyed by (seed, session, turn, position)."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy (evaluation only); logprobs are then those at temperature 1
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    stop_ids: tuple[int, ...] = ()  # token ids; stop strings are the codec's
    seed: int = 0
    turn: int = 0  # which generation of its session this is; siblings of n > 1 get turns of their own


@frozen(eq=False)
class Generation:
    """What an engine sampled.

    token_ids [T] int32, the stop token included when it was sampled; logprobs [T] float32 in nats, of the
    distribution sampled from; versions cover [0, T); kv_versions cover prompt + [0, T) and say whose weights
    wrote the KV; kept[t] is the sorted array of token ids that top-p/top-k left at position t, or None where
    nothing was cut (kept is None when nothing was cut anywhere); cached_tokens of the prompt were not prefilled.
    """

    token_ids: Ids
    logprobs: Floats
    versions: tuple[VersionSpan, ...]
    kv_versions: tuple[VersionSpan, ...]
    finish: Finish
    cached_tokens: int
    kept: tuple[Ids | None, ...] | None = None


@frozen
class Capacity:
    """Load of one replica, in tokens and requests."""

    kv_total: int
    kv_free: int
    running: int
    waiting: int
    context: int  # longest prompt + generation one request may have
    scripted: bool = False  # answers are given, not sampled: what a client demands of them is the script's business


OnTokens: TypeAlias = Callable[[Ids], bool | None]  # new ids, as they come; True ends the generation here


class InferenceEngine(Protocol):
    """One replica. ``generate`` may be called by thousands of tasks at once; cancelling it aborts.

    ``on_tokens`` runs on the trio loop and sees every token once, in order, before ``generate`` returns. When it
    returns True (a stop string was seen) the generation is aborted and ``generate`` returns what was sampled by then,
    which may be a few tokens more than on_tokens saw: finish ABORTED. When it is cancelled, ``on_abort`` gets what was
    sampled by then, before Cancelled goes on: a session's ledger accounts for it. A prompt that can never be served
    raises ValueError.
    """

    async def generate(
        self,
        prompt: Ids,
        sampling: Sampling,
        *,
        session: SessionId,
        on_tokens: OnTokens | None = None,
        on_abort: Callable[[Generation], None] | None = None,
    ) -> Generation: ...

    async def update(self, weights: Weights, version: int, kv: KvPolicy) -> None:
        """New weights, atomically: no step runs between the first tensor and the last; no request is lost."""
        ...

    def capacity(self) -> Capacity: ...

    def resident(self, prompt: Ids) -> int:
        """Longest prefix of prompt whose KV this replica holds, in tokens."""
        ...


@frozen(eq=False)
class StepRequest:
    """One generation as a synchronous engine sees it. prompt [P]. stream False: nobody looks at tokens before the end,
    so the engine gives a single output with the generation."""

    id: int
    prompt: Ids
    sampling: Sampling
    session: SessionId
    stream: bool = True


@frozen(eq=False)
class StepOutput:
    """New tokens of one request after a step; ``generation`` is set when it ended."""

    id: int
    token_ids: Ids
    generation: Generation | None = None


class StepEngine(Protocol):
    """A synchronous engine that the accelerator thread steps. Every method runs on that thread alone,
    save capacity and resident, which may be called from any thread and only read."""

    def add(self, request: StepRequest) -> None:
        """Queue it; raises ValueError for a prompt that can never be served."""
        ...

    def abort(self, id: int) -> Generation | None:
        """End it now; what it sampled so far, finish ABORTED. None: no such request, or it ended already."""
        ...

    def busy(self) -> bool: ...
    def step(self) -> list[StepOutput]: ...
    def update(self, weights: Weights, version: int, kv: KvPolicy) -> None: ...
    def weights(self) -> Weights:
        """What it samples from, by the names of ``update``, to be compared with what was sent; None: it holds them in
        another form (packed, fused or sharded), and only the canary can tell."""
        ...

    def capacity(self) -> Capacity: ...
    def resident(self, prompt: Ids) -> int: ...


@runtime_checkable
class Sleeper(Protocol):
    """A StepEngine that can give its memory to the learner while that works; ``update`` wakes it too. Requests stay."""

    def sleep(self) -> None: ...
    def wake(self) -> None: ...


# ---------------------------------------------------------------- sandboxes and tools


@frozen
class Completed:
    """A command that ended. ``code`` is the exit status, 128 + n after signal n; None: it was stopped at its
    time limit. ``output`` is stdout and stderr as they came (shell), or stdout (exec); ``dropped`` bytes of the
    middle were left out to keep to the cap."""

    code: int | None
    output: bytes
    errors: bytes = b""
    dropped: int = 0
    duration_s: float = 0.0
    restarted: bool = False  # the shell ended or could not be brought back: its state is lost, the next one is fresh

    @property
    def timed_out(self) -> bool:
        return self.code is None


class Shell(Protocol):
    """A persistent shell in a sandbox: cwd, environment and functions stay between commands."""

    async def run(self, command: str, *, timeout_s: float) -> Completed:
        """One command; at the time limit its process tree is killed and the shell stays usable."""
        ...


class Sandbox(Protocol):
    """Where an agent acts. An async context manager gives it; closing is idempotent, shielded and bounded."""

    workdir: PurePosixPath

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        cwd: PurePosixPath | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Completed: ...
    async def shell(self) -> Shell: ...
    async def upload(self, source: Path, target: PurePosixPath) -> None: ...
    async def download(self, source: PurePosixPath, target: Path) -> None: ...
    async def write(self, target: PurePosixPath, data: bytes) -> None: ...
    async def read(self, source: PurePosixPath, *, limit: int = 1 << 20) -> bytes: ...
    async def files(self, root: PurePosixPath) -> Mapping[PurePosixPath, bytes]:
        """Every regular file under root, by path relative to it; a link or special file has its kind as content
        (``b"<symlink>"``), so that verifiers can compare whole trees."""
        ...

    def reach(self, model: ModelEndpoint) -> AbstractAsyncContextManager[ModelEndpoint]:
        """The endpoint as programs inside reach it while the block lasts: the same, or with another ``base_url``. In a
        sandbox without a network this opens the way to the gateway, and to nothing else."""
        ...


@runtime_checkable
class CanSnapshot(Protocol):
    """What a sandbox can do beside the port, where its backend can."""

    async def snapshot(self) -> str:
        """Keep its files as they are now. Gives the value of the key ``snapshot`` of a sandbox section of the same
        provider, good while the provider is open. Raises InfraError."""
        ...


class SandboxProvider(Protocol):
    """Opens sandboxes of one backend; owned by the node, shared by all sessions."""

    def open(self, config: Mapping[str, Json]) -> AbstractAsyncContextManager[Sandbox]: ...


@frozen
class ToolSchema:
    """A tool as the model sees it. ``parameters`` is a JSON schema object."""

    name: str
    description: str
    parameters: Mapping[str, Json]

    def as_json(self) -> dict[str, Json]:
        """The chat-completions form, which chat templates expect."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": dict(self.parameters)},
        }


@frozen
class Observation:
    """What a tool call gave. ``problem`` names the error policy that made it (None: the tool ran);
    ``done`` ends the episode (submit)."""

    text: str
    problem: str | None = None
    done: bool = False


class Tool(Protocol):
    """One model-visible action."""

    @property
    def schema(self) -> ToolSchema: ...
    async def __call__(self, arguments: Mapping[str, Json]) -> Observation: ...


class Toolbox(Protocol):
    """The tools of one session, bound to its sandbox; an async context manager that closes their state."""

    def schemas(self) -> Sequence[ToolSchema]: ...
    async def call(self, name: str, arguments: str) -> Observation: ...


# ---------------------------------------------------------------- agents and tasks


@frozen
class ModelEndpoint:
    """The live policy, as an agent reaches it: over HTTP by (base_url, api_key, model_name), where base_url ends
    before ``/v1``, or in this process through ``complete``, which is the same gateway session without a socket.
    ``serve`` answers requests on one more listening socket until it is cancelled: the way in for a sandbox whose
    loopback is its own. ``spent`` returns once a request was refused because no generation is left: there is nothing
    more for the agent to do. ``acted`` gives the session and the turn of its last action (-1: none yet)."""

    base_url: str
    api_key: str
    model_name: str
    complete: Callable[[ModelCall], Any] | None = field(default=None, repr=False, eq=False)  # async -> Reply
    serve: Callable[[SocketListener], Awaitable[None]] | None = field(default=None, repr=False, eq=False)
    spent: Callable[[], Awaitable[None]] | None = field(default=None, repr=False, eq=False)
    acted: Callable[[], tuple[SessionId, int]] | None = field(default=None, repr=False, eq=False)

    @property
    def openai_base_url(self) -> str:
        return self.base_url + "/v1"


@frozen
class AgentResult:
    """How an agent ended. ``finished``: by its own decision; ``info``: exit status, errors, counters."""

    finished: bool
    transcript: Sequence[Mapping[str, Json]] = ()
    info: Mapping[str, Json] = field(factory=dict)


class Agent(Protocol):
    """Decides how to solve a task: a white-box loop or an external harness."""

    async def run(self, prompt: Messages, sandbox: Sandbox, model: ModelEndpoint) -> AgentResult: ...


class Failure(StrEnum):
    """Whose fault an unscored session is."""

    INFRA = "infra"  # excluded from training and from the group's baseline, never reward 0
    AGENT = "agent"  # the agent crashed or ran out of budget: it has a reward


@frozen
class TaskResult:
    """Group statistics use ``reward``; ``step_rewards`` are added to an action's advantage after centring; dynamic
    sampling looks at ``outcome`` (None: reward > 0). ``shaping`` are the terms of the reward that the outcome knows
    nothing of, by name."""

    reward: float
    components: Mapping[str, float] = field(factory=dict)
    step_rewards: tuple[float, ...] = ()
    outcome: bool | None = None
    flags: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(factory=dict)
    details: Mapping[str, Json] = field(factory=dict)
    failure: Failure | None = None
    shaping: Mapping[str, float] = field(factory=dict)

    @property
    def solved(self) -> bool:
        """The outcome, where the task gave one, else whether there was any reward."""
        return self.reward > 0 if self.outcome is None else self.outcome


class Task(Protocol):
    """What should happen, and whether it did. Owns the sandbox's life; verifies before it closes."""

    async def run(self, model: ModelEndpoint) -> TaskResult: ...


@frozen
class SessionSampling:
    """How every generation of one session is sampled, and its budgets; from the sample's config."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 1024  # of one generation
    max_total_tokens: int | None = None  # prompt + generation of the longest request
    max_generations: int | None = None


@runtime_checkable
class ResolvedTask(Protocol):
    """One sample, merged with its Task Config, ready to be built."""

    @property
    def name(self) -> str: ...
    @property
    def sampling(self) -> SessionSampling: ...
    @property
    def shaping(self) -> Shaping: ...
    def as_json(self) -> dict[str, Json]:
        """The merged config without the endpoint."""
        ...

    def build(self, providers: Providers) -> Task: ...


class Providers(Protocol):
    """The node's long-lived parts that tasks build on."""

    def sandbox(self, name: str) -> SandboxProvider: ...
    def sandbox_options(self, name: str) -> Mapping[str, Json]:
        """What the run sets for a provider; it lies under every task's sandbox section."""
        ...


class TaskSource(Protocol):
    """Resolves sample rows to tasks (``TaskConfigResolver`` behind it)."""

    def resolve(self, sample: Mapping[str, Json], runtime_model: Mapping[str, str]) -> ResolvedTask: ...


# ---------------------------------------------------------------- text <-> tokens


class Tracker(Protocol):
    """Takes metrics as they come."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None: ...
    def close(self) -> None: ...


class Dialect(Protocol):
    """One wire format; pure, no sockets. ``parse`` raises ``Problem`` for what cannot be honoured.

    ``memo`` is the dialect's own, one per session: it recognises the part of a request that an earlier one had
    (the same objects, see ``engine.gateway.wire``), so that only what is new is parsed.
    """

    name: str
    items: str  # the key of the body's message list

    def memo(self) -> Any: ...
    def parse(self, body: Json, memo: Any = None) -> ModelCall: ...
    def reply(self, call: ModelCall, replies: Sequence[Reply]) -> Json: ...
    def events(self, call: ModelCall) -> EventWriter: ...
    def sent(self, call: ModelCall, replies: Sequence[Reply], memo: Any) -> None:
        """An answer is about to go out whole: later requests may refer to it."""
        ...

    def error(self, problem: Problem) -> tuple[int, Json]: ...


class EventWriter(Protocol):
    """Server-sent events of one streamed answer, as the deltas come. ``finish`` gives the closing events; ``ping``
    keeps an idle connection alive."""

    def start(self, reply_id: str, prompt_tokens: int) -> bytes: ...
    def delta(self, delta: Delta) -> bytes: ...
    def ping(self) -> bytes: ...
    def finish(self, replies: Sequence[Reply]) -> bytes: ...
    def error(self, problem: Problem) -> bytes: ...


CONTROL_MARK = "\ufdd0"  # a Unicode noncharacter: no model text has it, see Parser


class Parser(Protocol):
    """Model text to reasoning, text and calls; incremental. One per generation. Never raises on model text: what
    cannot be parsed is a typed problem on the result. In the text it is fed, CONTROL_MARK stands before each sampled
    control token that it asked to see, so that ordinary tokens which only spell one can be told apart."""

    def feed(self, text: str) -> Sequence[Delta]: ...
    def finish(self) -> tuple[Sequence[Delta], Parsed]: ...


@frozen
class ParsedCall:
    """A call as sampled: ``arguments`` is the raw JSON text; ``problem`` says why it could not be parsed; ``id`` is set
    where the model writes ids itself."""

    name: str
    arguments: str
    problem: str | None = None
    id: str | None = None


@frozen
class Parsed:
    """A whole answer taken apart."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()
    problem: str | None = None  # the first parse problem, None when all is well
