"""One engine over several ranks: the leader's commands go to a log, and the followers' engines replay them.

Each rank holds its part of the model (tensor parallelism), and a step is one collective of all, so that all must make
the same steps on the same requests. Invariants: a command reaches the log in the order in which the leader's engine
took it, and before the step that it is for; a refused request never reaches it; a follower whose tokens differ from the
leader's ends with an error, one step later. Only the leader has waiters, and only it is asked for load.

Knows any ``StepEngine`` that is deterministic, and no vendor.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from uniagent.engine.ports import Capacity, Generation, Ids, KvPolicy, StepEngine, StepOutput, StepRequest, Weights

Command: TypeAlias = tuple[Any, ...]  # (verb, arguments ...)


class Channel(Protocol):
    """From the leader to every follower, in order. Leader and followers make the same calls."""

    def commands(self, commands: list[Command] | None) -> list[Command]:
        """The leader gives them, a follower None; both get them."""
        ...

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The leader's, in a follower's memory."""
        ...


class Broadcast:
    """A ``Channel`` over a group of torch.distributed, whose first rank leads."""

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self._group, self._leader = group, dist.get_global_rank(group, 0) if group is not None else 0

    def commands(self, commands: list[Command] | None) -> list[Command]:
        import torch.distributed as dist

        box = [commands]
        dist.broadcast_object_list(box, src=self._leader, group=self._group)
        return box[0] or []

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        dist.broadcast(tensor, src=self._leader, group=self._group)
        return tensor


class Part(StepEngine, Protocol):
    """What each rank has of the engine."""

    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


class Leader:
    """A ``StepEngine`` over the leader's own part. Followers are told through ``channel``, or the one that ``lead``
    gives; ``end`` lets them go where the channel is theirs alone."""

    def __init__(self, inner: Part, channel: Channel) -> None:
        self._inner, self._channel = inner, channel
        self._pending: list[Command] = []
        self._digest = 0

    def lead(self, channel: Channel) -> None:
        self._channel = channel

    def add(self, request: StepRequest) -> None:
        self._inner.add(request)
        self._pending.append(("add", request))

    def abort(self, id: int) -> Generation | None:
        generation = self._inner.abort(id)
        if generation is not None:
            self._pending.append(("abort", id))
        return generation

    def busy(self) -> bool:
        return self._inner.busy()

    def step(self) -> list[StepOutput]:
        self._send(("step", self._digest))
        outputs = self._inner.step()
        self._digest = digest(outputs)
        return outputs

    def update(self, weights: Weights, version: int, kv: KvPolicy) -> None:
        pairs = [(name, tensor.detach()) for name, tensor in weights]
        shapes = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in pairs]
        self._send(("update", shapes, version, kv))
        self._inner.update([(name, self._channel.tensor(t.contiguous())) for name, t in pairs], version, kv)

    def sleep(self) -> None:
        self._send(("sleep",))
        self._inner.sleep()

    def wake(self) -> None:
        self._send(("wake",))
        self._inner.wake()

    def close(self) -> None:
        """This rank's part; the followers close theirs."""
        self._inner.close()

    def weights(self) -> Weights:
        return self._inner.weights()

    def capacity(self) -> Capacity:
        return self._inner.capacity()

    def resident(self, prompt: Ids) -> int:
        return self._inner.resident(prompt)

    def end(self) -> None:
        self._send(("end",))

    def _send(self, command: Command) -> None:
        commands, self._pending = [*self._pending, command], []
        self._channel.commands(commands)


class Follower:
    """Replays on ``inner``; ``channel``: of the tensors of an update; ``device``: where they are received."""

    def __init__(self, inner: Part, channel: Channel, device: str = "cpu") -> None:
        self._inner, self._channel, self._device = inner, channel, device
        self._digest = 0

    def follow(self) -> None:
        """Until the leader ends."""
        while self.replay(self._channel.commands(None)):
            continue

    def replay(self, commands: Sequence[Command]) -> bool:
        """False once the leader ended. RuntimeError when this rank has left the leader's path."""
        for verb, *arguments in commands:
            if verb == "add":
                self._inner.add(*arguments)
            elif verb == "abort":
                self._inner.abort(*arguments)
            elif verb == "step":
                if arguments[0] != self._digest:
                    raise RuntimeError("a follower sampled other tokens than its leader: the ranks are out of step")
                self._digest = digest(self._inner.step())
            elif verb == "update":
                shapes, version, kv = arguments
                empty = ((name, torch.empty(shape, dtype=dtype, device=self._device)) for name, shape, dtype in shapes)
                self._inner.update([(name, self._channel.tensor(tensor)) for name, tensor in empty], version, kv)
            elif verb in ("sleep", "wake"):
                getattr(self._inner, verb)()
            elif verb == "end":
                return False
            else:
                raise ValueError(f"the command log says {verb!r}, which no rank knows")
        return True

    def close(self) -> None:
        self._inner.close()


def digest(outputs: Sequence[StepOutput]) -> int:
    """Of a step's tokens, whatever the order of the requests."""
    each = sorted((output.id, output.token_ids.tolist()) for output in outputs)
    return zlib.crc32(np.asarray([n for id, ids in each for n in (id, len(ids), *ids)], np.int64).tobytes())
