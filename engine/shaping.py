"""Shaping: terms that are added to a session's reward for how it went, apart from what it achieved.

The outcome knows nothing of them: success, dynamic sampling and the record's ``outcome`` stay what the task's verifier
said, and each term stands in ``TaskResult.shaping`` under its name. An infrastructure failure is not shaped. Terms are
penalties, at most 0. Pure.
"""

from __future__ import annotations

from attrs import evolve, field, frozen
from attrs.validators import ge

from uniagent.engine.learner.advantages import overlong
from uniagent.engine.ports import Failure, TaskResult


@frozen
class Shaping:
    """What a sample's config asks for; a weight of 0 switches a term off.

    length: ``length_weight`` times DAPO's soft penalty of overlong sessions (``learner.advantages.overlong``), 0 up to
    ``length_limit - length_buffer`` sampled tokens, falling to -1 at ``length_limit``. format: ``format_weight`` times
    the share of answers whose tool calls could not be parsed. turns: ``turn_weight`` for every answer beyond
    ``free_turns``.
    """

    length_weight: float = field(default=0.0, validator=ge(0))
    length_limit: int = field(default=0, validator=ge(0))
    length_buffer: int = field(default=0, validator=ge(0))
    format_weight: float = field(default=0.0, validator=ge(0))
    turn_weight: float = field(default=0.0, validator=ge(0))
    free_turns: int = field(default=0, validator=ge(0))

    def __attrs_post_init__(self) -> None:
        if self.length_weight and not 0 < self.length_buffer <= self.length_limit:
            raise ValueError(
                f"length_weight needs 0 < length_buffer <= length_limit, not {self.length_buffer} and "
                f"{self.length_limit}"
            )


def shaped(result: TaskResult, shaping: Shaping, *, tokens: int, turns: int, malformed: int) -> TaskResult:
    """The result with its terms: ``tokens`` sampled in ``turns`` answers, ``malformed`` of which had calls that could
    not be parsed."""
    if result.failure is Failure.INFRA:
        return result
    terms: dict[str, float] = {}
    if shaping.length_weight:
        over = overlong(tokens, limit=shaping.length_limit, buffer=shaping.length_buffer)
        terms["length"] = shaping.length_weight * over
    if shaping.format_weight:
        terms["format"] = -shaping.format_weight * (malformed / turns if turns else 0.0)
    if shaping.turn_weight:
        terms["turns"] = -shaping.turn_weight * max(0, turns - shaping.free_turns)
    if not terms:
        return result
    return evolve(result, reward=result.reward + sum(terms.values()), outcome=result.solved, shaping=terms)
