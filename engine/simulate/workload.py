"""What sessions do, drawn from distributions: turns, tokens a turn, tool latency, and how all of it grows over a run.

Heavy-tailed as agentic work is: lognormal turns, tokens and tool times; the sessions of one sample share a difficulty.
Invariants: a session's plan is a function of (seed, sample, replica) and of nothing that happens in the run, so that
every mode and policy meets the same sessions.
"""

from __future__ import annotations

import math
import random

from attrs import frozen


@frozen
class Turn:
    """One answer of ``tokens``, then a tool that takes ``tool_s`` and says ``observed`` tokens."""

    tokens: int
    tool_s: float
    observed: int


@frozen
class Plan:
    """One session: its turns after ``prompt`` tokens that its group shares."""

    prompt: int
    turns: tuple[Turn, ...]

    @property
    def sampled(self) -> int:
        return sum(t.tokens for t in self.turns)

    @property
    def length(self) -> int:
        return self.prompt + sum(t.tokens + t.observed for t in self.turns[:-1]) + self.turns[-1].tokens


@frozen
class Workload:
    """Medians of lognormals and their sigmas. ``drift_turns`` and ``drift_tokens`` are the factors by which turns and
    tokens a turn have grown at the end of ``samples`` samples."""

    prompt_tokens: int = 2000
    turns: float = 15.0
    turns_sigma: float = 0.7
    turns_min: int = 5
    turns_max: int = 100
    answer_tokens: float = 150.0
    answer_sigma: float = 0.8
    tool_tokens: float = 200.0
    tool_s: float = 2.0
    tool_sigma: float = 1.2
    drift_turns: float = 1.0
    drift_tokens: float = 1.0
    context: int = 128_000
    samples: int = 1

    def plan(self, seed: int, sample: int, replica: int) -> Plan:
        """The session of this sample and replica."""
        progress = min(1.0, sample / max(1, self.samples))
        longer, wordier = self.drift_turns**progress, self.drift_tokens**progress
        difficulty = random.Random(f"{seed}/{sample}").gauss(0, 1)
        rng = random.Random(f"{seed}/{sample}/{replica}")
        spread = self.turns_sigma * math.sqrt(0.5)
        count = self.turns * longer * math.exp(spread * difficulty + spread * rng.gauss(0, 1))
        turns: list[Turn] = []
        room = self.context - self.prompt_tokens
        for _ in range(min(self.turns_max, max(self.turns_min, round(count)))):
            tokens = max(1, round(self.answer_tokens * wordier * math.exp(self.answer_sigma * rng.gauss(0, 1))))
            observed = max(1, round(self.tool_tokens * wordier * math.exp(0.5 * rng.gauss(0, 1))))
            tool_s = self.tool_s * math.exp(self.tool_sigma * rng.gauss(0, 1))
            room -= tokens + observed
            if room < 0 and turns:
                break
            turns.append(Turn(min(tokens, self.context // 2), tool_s, observed))
        return Plan(self.prompt_tokens, tuple(turns))
