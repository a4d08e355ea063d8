"""The one thread that owns the device: it runs learner calls and steps the attached engines.

``run(fn)`` executes a call on the thread and awaits its result; an attached ``Worker`` (an engine) is stepped whenever
it is busy. Commands are served in the order they were given, at most one call between two rounds of steps, so calls
and steps take turns and neither starves the other. Each round's results reach the trio loop as one batch.

Invariants
 - nothing but this thread calls ``fn``, ``busy`` or ``step``; nothing but the trio loop calls ``deliver`` or ``fail``;
 - a call that raises fails its caller alone; a step that raises ends the thread, fails every waiter with
   ``AcceleratorError`` and cancels the body of ``start``, which then raises it: loud, never a hang;
 - leaving ``start`` stops the thread after the call or step it is in, joins it, and takes at most ``stop_s``.

Knows nothing of models, torch or requests. A real thread and a virtual clock do not mix: tests on trio's mock clock
use an engine without a thread (``scripted``).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar, cast

import outcome
import trio
from attrs import define, field, frozen

T = TypeVar("T")


class AcceleratorError(RuntimeError):
    """The accelerator thread crashed, or was closed while something waited for it. The cause is chained."""


class Worker(Protocol):
    """What the thread steps: ``busy`` and ``step`` run on the thread, ``deliver`` and ``fail`` on the trio loop."""

    def busy(self) -> bool: ...
    def gather_s(self) -> float:
        """Seconds the next step may wait for more to do: fewer, fuller steps."""
        ...

    def step(self) -> Any:
        """What ``deliver`` gets; None: nothing to deliver."""
        ...

    def deliver(self, batch: Any) -> None:
        """Takes what one ``step`` returned."""
        ...

    def fail(self, cause: BaseException | None) -> None:
        """No step will come any more: fail every waiter. cause is None when the accelerator was closed in order."""
        ...


@define(eq=False)
class _Call:
    """A function to run on the thread, and where its result goes."""

    fn: Callable[[], Any]
    kind: str
    done: trio.Event = field(factory=trio.Event)
    result: outcome.Outcome[Any] | None = None
    dropped: bool = False  # its caller was cancelled


@frozen(eq=False)
class _Stop:
    pass


class Accelerator:
    """Made by ``start``. ``busy_s`` counts the seconds the thread worked, by kind: ``engine`` for steps, and what
    ``run`` was told for calls. For metrics only."""

    def __init__(self) -> None:
        self.busy_s: dict[str, float] = {"engine": 0.0, "learner": 0.0}
        self._commands: queue.SimpleQueue[_Call | _Stop | Callable[[], None]] = queue.SimpleQueue()
        self._workers: list[Worker] = []
        self._calls: set[_Call] = set()  # unanswered
        self._token = trio.lowlevel.current_trio_token()
        self._ended = trio.Event()
        self._crash: BaseException | None = None
        self._body = trio.CancelScope()
        self._thread = threading.Thread(target=self._main, name="accelerator", daemon=True)

    @classmethod
    @asynccontextmanager
    async def start(cls, *, stop_s: float = 60.0) -> AsyncIterator[Accelerator]:
        """The thread lives as long as the block. Raises AcceleratorError, and cancels the block, when it crashes."""
        accelerator = cls()
        accelerator._thread.start()
        try:
            with accelerator._body:
                yield accelerator
        finally:
            await accelerator._close(stop_s)
            if accelerator._crash is not None:
                raise accelerator._error()

    # ------------------------------------------------------------ called on the trio loop

    async def run(self, fn: Callable[..., T], *args: Any, kind: str = "learner") -> T:
        """``fn(*args)`` on the thread; its result or its exception.

        Cancelling drops the call when it has not begun; one that has begun ends on the thread and its result is lost.
        """
        if self._ended.is_set():
            raise self._error()
        call = _Call(lambda: fn(*args), kind)
        self._calls.add(call)
        self._commands.put(call)
        try:
            await call.done.wait()
        finally:
            call.dropped = True
            self._calls.discard(call)
        assert call.result is not None
        return cast(T, call.result.unwrap())

    def post(self, fn: Callable[[], None]) -> None:
        """Queue a short command; it must not raise (that would be a crash of the thread)."""
        if self._ended.is_set():
            raise self._error()
        self._commands.put(fn)

    def attach(self, worker: Worker) -> None:
        """From now on step it whenever it is busy."""
        self._workers.append(worker)
        self.post(lambda: None)  # wakes an idle thread

    @property
    def ended(self) -> bool:
        """Closed or crashed: nothing runs any more."""
        return self._ended.is_set()

    @property
    def engine_s(self) -> float:
        return self.busy_s["engine"]

    @property
    def learner_s(self) -> float:
        return self.busy_s["learner"]

    def _error(self) -> AcceleratorError:
        if self._crash is None:
            return AcceleratorError("the accelerator thread was closed")
        error = AcceleratorError(f"the accelerator thread crashed: {type(self._crash).__name__}: {self._crash}")
        error.__cause__ = self._crash
        return error

    async def _close(self, stop_s: float) -> None:
        self._commands.put(_Stop())
        with trio.move_on_after(stop_s, shield=True):
            await self._ended.wait()
        if not self._ended.is_set():
            raise AcceleratorError(f"the accelerator thread did not stop within {stop_s:g} s; it is left behind")
        self._thread.join()

    def _on_end(self, result: outcome.Outcome[None]) -> None:
        if isinstance(result, outcome.Error):
            self._crash = result.error
        self._ended.set()
        for call in tuple(self._calls):
            call.result = outcome.Error(self._error())
            call.done.set()
        for worker in self._workers:
            worker.fail(self._crash)
        if self._crash is not None:
            self._body.cancel()

    def _on_step(self, batches: list[tuple[Worker, Any]]) -> None:
        for worker, batch in batches:
            delivered = outcome.capture(worker.deliver, batch)  # an exception here would be trio's internal error
            if isinstance(delivered, outcome.Error):
                self._crash = delivered.error
                self._body.cancel()
                self._commands.put(_Stop())

    # ------------------------------------------------------------ on the thread

    def _main(self) -> None:
        result = outcome.capture(self._loop)
        self._tell(self._on_end, result)

    def _tell(self, fn: Callable[..., None], *args: Any) -> bool:
        """Call fn on the loop; False when the loop is gone."""
        try:
            self._token.run_sync_soon(fn, *args)
        except trio.RunFinishedError:
            return False
        return True

    def _loop(self) -> None:
        while True:
            patience = self._patience()
            if not self._serve(patience):
                return
            if patience is None:
                continue  # what woke the thread may be worth waiting for more
            batches = []
            for worker in tuple(self._workers):
                if worker.busy():
                    begun = time.perf_counter()
                    batch = worker.step()
                    self.busy_s["engine"] += time.perf_counter() - begun
                    if batch is not None:
                        batches.append((worker, batch))
            if batches and not self._tell(self._on_step, batches):
                return

    def _patience(self) -> float | None:
        """Seconds to wait for commands before the next round of steps; None: until one comes."""
        busy = [worker.gather_s() for worker in self._workers if worker.busy()]
        return min(busy) if busy else None

    def _serve(self, patience: float | None) -> bool:
        """Serve commands for ``patience`` seconds, at least those that are there, up to the first call, which is run;
        None: serve one, however long it takes to come. False: stop."""
        until = time.perf_counter() + (patience or 0.0)
        while True:
            left = until - time.perf_counter() if patience else 0.0
            try:
                command = self._commands.get(patience is None or left > 0, left if left > 0 else None)
            except queue.Empty:
                return True
            if isinstance(command, _Stop):
                return False
            if isinstance(command, _Call):
                return self._answer(command)
            command()
            if patience is None:
                return True
            patience = patience and self._patience()

    def _answer(self, call: _Call) -> bool:
        if call.dropped:
            return True
        begun = time.perf_counter()
        result = outcome.capture(call.fn)
        self.busy_s[call.kind] = self.busy_s.get(call.kind, 0.0) + time.perf_counter() - begun
        return self._tell(_resolve, call, result)


def _resolve(call: _Call, result: outcome.Outcome[Any]) -> None:
    call.result = result
    call.done.set()
