"""The task: the agent works, the judge reads its last words (or its transcript, or files it left) and scores them.

The verifier's section holds the rubric and the endpoint. Invariants: an answer of the judge that cannot be read is
asked for anew, once a run; where none can be read the session is a failure of infrastructure, never reward 0.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

import httpx
import trio
from attrs import field, frozen
from attrs.validators import ge, in_

from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.ports import AgentResult, Json, ModelEndpoint, Providers, Sandbox, TaskResult
from uniagent.tasks.base import run_episode
from uniagent.tasks.config import TaskConfig
from uniagent.tasks.endpoint import Answer, Endpoint, ask, cost
from uniagent.tasks.llm_judge.rubric import Rubric, Verdict, grade
from uniagent.tasks.structure import structure
from uniagent.tasks.verify import last_words

CUT = "\n[... {n} characters are left out ...]\n"


@frozen
class Judging:
    """The keys of ``verifier`` beside ``timeout_s``. ``show``: what the judge reads; ``files`` are shown too. ``runs``:
    answers that are averaged."""

    rubric: Rubric
    judge: Endpoint
    runs: int = field(default=1, validator=ge(1))
    show: str = field(default="answer", validator=in_(("answer", "transcript", "nothing")))
    files: tuple[str, ...] = ()
    max_chars: int = field(default=40_000, validator=ge(1000))


class LlmJudge:
    """Made for one sample. ``client`` is for tests; by default each scoring opens its own."""

    def __init__(self, config: TaskConfig, providers: Providers, client: httpx.AsyncClient | None = None) -> None:
        self.config, self.providers, self.client = config, providers, client
        self.judging = structure(Judging, config.verifier.options, f"task {config.name!r}: verifier")
        self.judging.judge.key()

    async def run(self, model: ModelEndpoint) -> TaskResult:
        return await run_episode(self.config, self.providers, model, setup=self.setup, verify=self.verify)

    async def setup(self, sandbox: Sandbox) -> None:
        """``metadata.files`` (path -> text) are written before the agent starts."""
        for path, text in self.config.metadata.get("files", {}).items():
            await sandbox.write(sandbox.workdir / path, text.encode())

    async def verify(self, sandbox: Sandbox, acted: AgentResult) -> TaskResult:
        judging = self.judging
        task = "\n\n".join(str(m["content"]) for m in self.config.messages)
        question = judging.rubric.question(task, await self._work(sandbox, acted), f"=== {secrets.token_hex(8)} ===")
        if self.client is not None:
            answers, verdicts = await self._ask(self.client, question)
        else:
            async with httpx.AsyncClient() as client:
                answers, verdicts = await self._ask(client, question)
        if not verdicts:
            raise InfraError(f"no answer of the judge could be read; the last: {answers[-1].text[:300]!r}")
        graded = grade(judging.rubric, verdicts)
        return TaskResult(
            graded.reward,
            components=graded.components,
            outcome=graded.outcome,
            metrics={
                "judge_cost": cost(judging.judge, answers),
                "judge_tokens": float(sum(a.tokens_in + a.tokens_out for a in answers)),
                "judge_unreadable": float(len(answers) - len(verdicts)),
                "judge_agreeing": graded.agreeing,
                "judge_spread": graded.spread,
            },
            details={
                "judge_passes": list(graded.passes),
                "judge_scores": [dict(v.scores) for v in verdicts],
                "judge_reasons": dict(verdicts[0].reasons),
            },
        )

    async def _ask(self, client: httpx.AsyncClient, question: str) -> tuple[list[Answer], list[Verdict]]:
        """All answers, and those that could be read, in the order of the runs."""
        answers: list[Answer] = []
        verdicts: dict[int, Verdict] = {}
        problems: list[UserError | InfraError] = []

        async def one(run: int) -> None:
            for again in range(2):
                try:
                    answer = await ask(client, self.judging.judge, question, seed=run + again * self.judging.runs)
                except (UserError, InfraError) as problem:
                    problems.append(problem)
                    nursery.cancel_scope.cancel()
                    return
                answers.append(answer)
                verdict = self.judging.rubric.read(answer.text)
                if verdict is not None:
                    verdicts[run] = verdict
                    return

        async with trio.open_nursery() as nursery:
            for run in range(self.judging.runs):
                nursery.start_soon(one, run)
        if problems:
            raise problems[0]
        return answers, [verdicts[run] for run in sorted(verdicts)]

    async def _work(self, sandbox: Sandbox, acted: AgentResult) -> str:
        """What the judge reads, cut in the middle to ``max_chars``."""
        parts = []
        if self.judging.show == "answer":
            parts.append(last_words(acted))
        elif self.judging.show == "transcript":
            parts.append(said_and_done(acted.transcript))
        if self.judging.files:
            found = await sandbox.files(sandbox.workdir)
            for name in self.judging.files:
                content = found.get(PurePosixPath(name))
                text = "(not there)" if content is None else content.decode(errors="replace")
                parts.append(f"File {name}:\n{text}")
        text, most = "\n\n".join(parts) or "(nothing)", self.judging.max_chars
        if len(text) <= most:
            return text
        return text[: most // 2] + CUT.format(n=len(text) - most) + text[-(most // 2) :]


def said_and_done(transcript: Sequence[Mapping[str, Json]]) -> str:
    """The agent's messages, its calls, and what came of them."""
    lines = []
    for message in transcript:
        content = message.get("content") or ""
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
        told = [f"calls {c.get('name')}: {c.get('arguments')}" for c in calls]
        if message.get("role") in ("assistant", "tool"):
            lines.append(f"[{message['role']}] " + "\n".join(filter(None, [text, *told])))
    return "\n\n".join(lines)
