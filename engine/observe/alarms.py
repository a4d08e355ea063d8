"""Alarms: numbers of a step that say a run is going wrong before its reward does.

A rule looks at one metric; it rings once when the metric has been beyond its limit for ``patience`` steps in a row, and
can ring again after a step within it. A metric that is missing or not finite says nothing: it neither counts nor
resets. Pure but for that count; knows nothing of what is done about an alarm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from attrs import define, field, frozen

from uniagent.engine.config import Alarms as Settings


@frozen
class Rule:
    """``sign`` 1: the metric may not be above ``limit``; -1: not below."""

    name: str
    metric: str
    sign: int
    limit: float
    hint: str


@frozen
class Alarm:
    """A rule that rang. ``stops``: the run is to end."""

    name: str
    text: str
    stops: bool


def rules(settings: Settings) -> tuple[Rule, ...]:
    """The rules that are on: a limit of 0 switches one off."""
    every = (
        Rule(
            "entropy",
            "entropy",
            -1,
            settings.entropy_below,
            "the policy hardly explores: a lower learner.lr, a higher learner.clip_high or learner.entropy_coef",
        ),
        Rule(
            "length",
            "answers/cut",
            1,
            settings.cut_above,
            "answers end at the token limit: raise the task's max_tokens, or use learner.overlong_limit",
        ),
        Rule(
            "malformed",
            "answers/malformed",
            1,
            settings.malformed_above,
            "tool calls cannot be parsed: look at some with uniagent show, and check model.parser",
        ),
        Rule(
            "mismatch",
            "mismatch_kl",
            1,
            settings.mismatch_kl_above,
            "engine and learner disagree, or tokens are old: see canary_gap and age_mean, lower rollout.max_staleness, "
            "or use another learner.correction",
        ),
    )
    return tuple(rule for rule in every if rule.limit)


@define(eq=False)
class Alarms:
    """The alarms of one run; ``look`` is called once a step."""

    settings: Settings
    _beyond: dict[str, int] = field(factory=dict)  # steps in a row

    def look(self, metrics: Mapping[str, float]) -> list[Alarm]:
        """What rings at this step."""
        ringing = []
        for rule in rules(self.settings):
            value = metrics.get(rule.metric, math.nan)
            if not math.isfinite(value):
                continue
            beyond = rule.sign * (value - rule.limit) > 0
            self._beyond[rule.name] = self._beyond.get(rule.name, 0) + 1 if beyond else 0
            if self._beyond[rule.name] == self.settings.patience:
                ringing.append(self._alarm(rule, value))
        return ringing

    def _alarm(self, rule: Rule, value: float) -> Alarm:
        side = "above" if rule.sign > 0 else "below"
        n = self.settings.patience
        steps = "at this step" if n == 1 else f"for {n} steps in a row"
        text = f"{rule.metric} = {value:.3g} is {side} {rule.limit:g} {steps}: {rule.hint}"
        return Alarm(rule.name, text, rule.name in self.settings.stop)
