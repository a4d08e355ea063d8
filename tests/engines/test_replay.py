"""One engine over several ranks: the leader's log, replayed. Both sides are whole engines here, the channel is a list
of pickled commands."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from attrs import define, field

from tests.engines.contract import prompt
from tests.engines.models import SIZE, module, reference
from uniagent.adapters.engines.replay import Command, Follower, Leader
from uniagent.adapters.engines.transformers import build
from uniagent.engine import config
from uniagent.engine.ports import KvPolicy, Sampling, StepRequest


class Whole:
    """A slot engine that also counts its sleeps; it is one rank's part."""

    def __init__(self) -> None:
        settings = config.Engine(slots=3, context=96, prefill_tokens=16)
        self.inner = build(settings, module("qwen3"), shared=False)
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")

    def close(self) -> None:
        self.calls.append("close")


@define
class Tape:
    """A channel that keeps all it is given; ``play`` is the followers' end of it."""

    sent: list[bytes] = field(factory=list)
    tensors: list[torch.Tensor] = field(factory=list)

    def commands(self, commands: list[Command] | None) -> list[Command]:
        self.sent.append(pickle.dumps(commands))
        return commands or []

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        self.tensors.append(tensor.clone())
        return tensor


@define
class Play:
    tape: Tape
    read: int = 0

    def commands(self, commands: list[Command] | None) -> list[Command]:
        self.read += 1
        found: list[Command] = pickle.loads(self.tape.sent[self.read - 1])
        return found

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(self.tape.tensors.pop(0))


def request(number: int, tokens: int = 12) -> StepRequest:
    ids = prompt(number, 5 + 9 * number, SIZE["vocab_size"])
    return StepRequest(number, ids, Sampling(tokens, top_p=0.9), f"s{number}")


def run(leader: Leader) -> Iterator[tuple[int, list[int]]]:
    """Requests, an abort, a refused one and an update in the middle."""
    for number in range(5):
        leader.add(request(number))
    with pytest.raises(ValueError, match="token"):
        leader.add(StepRequest(9, np.zeros(500, np.int32), Sampling(3), "s"))
    for step in range(1000):
        if step == 3:
            assert leader.abort(1) is not None
            assert leader.abort(77) is None
        if step == 6:
            leader.sleep()
            leader.update(reference("qwen3", 1).named_parameters(), 1, KvPolicy.RECOMPUTE)
        if not leader.busy():
            break
        for output in leader.step():
            if output.generation is not None:
                yield output.id, output.generation.token_ids.tolist()
    leader.wake()
    leader.end()


def test_a_follower_makes_the_same_steps_on_the_same_requests() -> None:
    tape, parts = Tape(), (Whole(), Whole())
    leader = Leader(parts[0], tape)
    wanted = dict(run(leader))
    assert sorted(wanted) == [0, 2, 3, 4]
    ended: dict[int, list[int]] = {}
    step = parts[1].inner.step

    def noted() -> Any:
        outputs = step()
        ended.update((o.id, o.generation.token_ids.tolist()) for o in outputs if o.generation is not None)
        return outputs

    parts[1].step = noted  # type: ignore[attr-defined]
    follower = Follower(parts[1], Play(tape))
    follower.follow()
    assert ended == wanted
    assert not parts[1].inner.busy()
    assert parts[1].calls == parts[0].calls == ["sleep", "wake"]
    assert parts[1].inner.capacity() == parts[0].inner.capacity()
    follower.close()
    assert parts[1].calls[-1] == "close"


def test_a_follower_that_samples_other_tokens_ends_with_an_error() -> None:
    tape = Tape()
    dict(run(Leader(Whole(), tape)))
    part = Whole()
    part.inner.update(reference("qwen3", 2).named_parameters(), 0, KvPolicy.RECOMPUTE)  # not the leader's weights
    with pytest.raises(RuntimeError, match="out of step"):
        Follower(part, Play(tape)).follow()


def test_a_verb_that_no_rank_knows_is_an_error() -> None:
    with pytest.raises(ValueError, match="dance"):
        Follower(Whole(), Play(Tape())).replay([("dance",)])
