"""What the gateway counts, as Prometheus text (exposition format 0.0.4). Knows no HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from attrs import define, field

from uniagent.engine.gateway.session import GatewaySession
from uniagent.engine.gateway.sessions import Gateway
from uniagent.engine.messages import Reply

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HELP = {
    "requests_total": "HTTP requests answered, by route and status",
    "disconnects_total": "clients that left before the last byte of their answer, by route",
    "replies_total": "answers of the model that were delivered, by dialect and finish",
    "tokens_total": "tokens of delivered answers and their prompts, by kind",
    "parse_problems_total": "answers with a call that could not be parsed",
    "sessions_finished_total": "sessions exported",
    "ledger_tokens_total": "sampled tokens of finished sessions, by where they went",
    "actions_total": "answers of finished sessions, by fate",
    "template_breaks_total": "chains begun anew because the template changed what the engine had seen",
    "chains_total": "trajectories of finished sessions, by kind",
    "sessions": "sessions in the store",
    "generations_running": "generations under way",
    "connections": "open HTTP connections",
}


@define(eq=False)
class Metrics:
    """``lag`` gives the loop's lag, where something measures it."""

    lag: Callable[[], Mapping[str, float]] | None = None
    _counts: Counter[tuple[str, tuple[tuple[str, str], ...]]] = field(factory=Counter)

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        self._counts[name, tuple(labels.items())] += amount  # type: ignore[assignment]

    def replied(self, dialect: str, replies: Iterable[Reply]) -> None:
        """These replies were delivered."""
        for i, reply in enumerate(replies):
            self.add("replies_total", dialect=dialect, finish=reply.finish)
            if i == 0:
                self.add("tokens_total", reply.usage.prompt_tokens, kind="prompt")
                self.add("tokens_total", reply.usage.cached_tokens, kind="cached")
            self.add("tokens_total", reply.usage.completion_tokens, kind="completion")
            if reply.problem is not None:
                self.add("parse_problems_total")

    def exported(self, session: GatewaySession) -> None:
        """A session ended."""
        export = session.export
        if export is None:
            return
        self.add("sessions_finished_total")
        self.add("template_breaks_total", session.breaks)
        self.add("ledger_tokens_total", export.ledger.trainable, place="trainable")
        self.add("ledger_tokens_total", export.ledger.context, place="context")
        for cause, tokens in export.ledger.discarded.items():
            self.add("ledger_tokens_total", tokens, place=cause)
        for fate in export.fates:
            self.add("actions_total", fate=fate)
        for trajectory in export.trajectories:
            self.add("chains_total", kind=trajectory.kind)

    def text(self, gateway: Gateway, connections: int) -> str:
        """Everything, with the present state of the gateway."""
        values: dict[str, list[tuple[str, float]]] = {}
        for (name, labels), amount in sorted(self._counts.items()):
            values.setdefault(name, []).append((_labels(labels), amount))
        values["sessions"] = [("", len(gateway))]
        values["generations_running"] = [("", sum(s.running for s in gateway))]
        values["connections"] = [("", connections)]
        if self.lag is not None:
            for name, value in self.lag().items():
                values[name] = [("", value)]
        lines = []
        for name, samples in values.items():
            lines.append(f"# HELP uniagent_{name} {HELP.get(name, name.replace('_', ' '))}")
            lines.append(f"# TYPE uniagent_{name} {'counter' if name.endswith('_total') else 'gauge'}")
            lines += [f"uniagent_{name}{labels} {value:.12g}" for labels, value in samples]
        return "\n".join(lines) + "\n"


def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    if not labels:
        return ""
    escaped = ((k, v.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")) for k, v in labels)
    return "{" + ",".join(f'{k}="{v}"' for k, v in escaped) + "}"
