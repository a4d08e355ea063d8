"""Weights by copy, and the checksum that both sides compare."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from uniagent.engine.learner.weights import SyncMismatch, checksum, compare, copy_weights, named_weights


def test_a_copy_has_the_same_checksum_and_the_same_function(kit: Any) -> None:
    source, target = kit.model(), kit.model()
    for p in target.parameters():
        p.data.zero_()
    assert checksum(named_weights(source)) != checksum(named_weights(target))
    copy_weights(named_weights(source), target)
    assert checksum(named_weights(source)) == checksum(named_weights(target))
    ids = torch.arange(1, 9)[None]
    assert torch.equal(source(ids).logits, target(ids).logits)


def test_the_checksum_sees_every_bit_and_no_order() -> None:
    tensors = [("a", torch.arange(6.0)), ("b", torch.ones(2, 2))]
    first = checksum(tensors)
    assert checksum(tensors[::-1]) == first
    changed = torch.arange(6.0)
    changed[3] = torch.nextafter(changed[3], torch.tensor(9.0))
    for others in (
        [("a", changed), tensors[1]],
        [("a", torch.arange(6.0).flip(0)), tensors[1]],
        [("c", tensors[0][1]), tensors[1]],
    ):
        assert checksum(others) != first
    assert checksum([("a", torch.ones(3, dtype=torch.bfloat16))]) != checksum([("a", torch.ones(3))])


def test_weights_can_be_handed_over_in_another_dtype(kit: Any) -> None:
    model = kit.model()
    names = dict(named_weights(model, dtype=torch.bfloat16))
    assert {t.dtype for t in names.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in names  # tied: once


def test_an_engine_that_does_not_hold_what_was_sent_is_found_out(kit: Any) -> None:
    learner, engine = kit.model(), kit.model(dtype="bfloat16").to(torch.bfloat16)
    copy_weights(named_weights(learner), engine)
    sent = list(named_weights(learner))
    held = dict(engine.named_parameters(remove_duplicate=False))
    assert compare(sent, held.items()) == checksum(named_weights(learner, dtype=torch.bfloat16))
    with torch.no_grad():
        held["model.norm.weight"][7] += 0.01
    with pytest.raises(SyncMismatch, match=r"model\.norm\.weight \(1 weights in all\)"):
        compare(sent, held.items())
    with pytest.raises(SyncMismatch, match=r"model\.embed_tokens\.weight"):
        compare(sent, [(name, p) for name, p in held.items() if "embed" not in name])


def test_names_and_shapes_must_fit(kit: Any) -> None:
    source, target = kit.model(), kit.model()
    with pytest.raises(ValueError, match="has no place"):
        copy_weights([("nowhere", torch.ones(1))], target)
    with pytest.raises(ValueError, match=r"missing from the source: .*model\.norm\.weight"):
        copy_weights((w for w in named_weights(source) if w[0] != "model.norm.weight"), target)
