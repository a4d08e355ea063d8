"""What a person sees while a run goes on: one line a step, and on a terminal a live line below with what runs now.

The node talks to the ``Progress`` port; it never prints. No thread is started: the live line is drawn when something
is told, at most ten times a second.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

_REDRAW_S = 0.1
_BARS = "▁▂▃▄▅▆▇█"
_SHOWN = {  # metric -> how it is shown in a step's line
    "success": "success {:.3f}",
    "reward": "reward {:.3f}",
    "loss": "loss {:+.4f}",
    "tokens_per_s": "{:,.0f} tok/s",
    "staleness": "stale {:.2f}",
}


class Progress(Protocol):
    """A context manager that is told what happens. Every method returns at once and may be called from the loop."""

    def note(self, text: str) -> None:
        """Something worth a line of its own."""
        ...

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """What runs now (rollout, training, evaluation), and how far it is; called as often as it changes."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A training step ended. Shows success, reward, loss, tokens_per_s and staleness, where given."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Silent:
    """A Progress that shows nothing."""

    def note(self, text: str) -> None: ...
    def phase(self, name: str, done: int = 0, total: int = 0) -> None: ...
    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Lines:
    """A Progress on a console: lines that stay, and below them, where the console is a terminal, a live line."""

    def __init__(self, steps: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console()
        self._clock, self._steps = clock, steps
        self._ends: deque[float] = deque(maxlen=11)  # when the latest steps ended
        self._success: deque[float] = deque(maxlen=24)
        self._step, self._name, self._phase, self._drawn = 0, "", "", -math.inf
        drawable = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, auto_refresh=False) if drawable else None

    def note(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        if name != self._name:
            self._name, self._drawn = name, -math.inf  # a new phase shows at once
        self._phase = f"{name} {done}/{total}" if total else name
        if self._live is not None and self._clock() - self._drawn >= _REDRAW_S:
            self._drawn = self._clock()
            self._live.update(self._below(), refresh=True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._ends.append(self._clock())
        self._step = step
        self._success.append(metrics.get("success", math.nan))
        width = len(str(self._steps))
        given = {name: value for name, value in metrics.items() if math.isfinite(value)}
        shown = [text.format(given[name]) for name, text in _SHOWN.items() if name in given]
        self.note("  ".join(filter(None, [f"step {step:>{width}}/{self._steps}", *shown, self._left()])))
        if self._live is not None:
            self._live.update(self._below(), refresh=True)

    def _left(self) -> str:
        """Time left, from the pace of the latest ten steps; what came before the first one (loading) does not count."""
        if len(self._ends) < 2:
            return ""
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        seconds = round(pace * max(0, self._steps - self._step))
        hours, minutes = seconds // 3600, seconds // 60 % 60
        return f"{hours}:{minutes:02}:{seconds % 60:02} left" if hours else f"{minutes}:{seconds % 60:02} left"

    def _below(self) -> Text:
        if not self._steps:
            return Text(self._phase, "cyan")
        full = round(24 * min(1.0, self._step / self._steps))
        bar = Text("━" * full, "green") + Text("━" * (24 - full), "bright_black")
        curve = "".join(_BARS[min(7, int(8 * max(0.0, s)))] for s in self._success if math.isfinite(s))
        parts = [Text(f"{self._step}/{self._steps}"), Text(self._phase, "cyan"), Text(self._left())]
        if curve:
            parts.append(Text(f"success {curve}"))
        return bar + Text("  ") + Text("  ").join(p for p in parts if p)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(Text(""), refresh=True)
            self._live.stop()
