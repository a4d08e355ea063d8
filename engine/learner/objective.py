"""The loss of one batch: its per-token arrays on the device, and the forward and backward of each row.

Every token's weight in the loss is fixed by the whole optimizer step before the first forward, and what the loss
needs of a whole session is read from the arrays, so that the gradient does not depend on micro-batches, packing,
order or how a session is split into chains. Knows no optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from uniagent.engine.config import Learner
from uniagent.engine.learner import losses
from uniagent.engine.learner.batch import Batch
from uniagent.engine.learner.corrections import Correction, weights
from uniagent.engine.learner.diagnostics import Tokens, diagnostics
from uniagent.engine.learner.forest import Index
from uniagent.engine.learner.logprobs import Kept
from uniagent.engine.learner.packing import Row
from uniagent.engine.learner.planning import Needs
from uniagent.engine.learner.policy import Inputs, Policy
from uniagent.engine.learner.recipe import Recipe, recipe
from uniagent.engine.learner.router import load


def correction(config: Learner) -> Correction:
    """How tokens of another policy are weighted: not at all when the ratio itself is to that policy."""
    if config.proximal == "behaviour":
        return Correction("none", 0.0, 0.0)
    geometric = (config.geometric_low, config.geometric_high) if config.geometric_high else None
    return Correction(config.correction, config.correction_low, recipe(config).correction_high, geometric)


def needs(config: Learner, *, single: bool) -> Needs:
    """What has to be scored before rows are trained; ``single``: one optimizer step is taken on the batch."""
    to_policy = config.proximal == "policy"
    ratio_of_session = recipe(config).surrogate == "gspo" and not (to_policy and single)
    weight_of_session = correction(config).by_session and to_policy and single
    return Needs(
        reference=config.kl_coef > 0, old=to_policy and not single, sessions=ratio_of_session or weight_of_session
    )


class Objective:
    """minibatches[m] are the tokens of optimizer step m. Arrays are [N] over the batch's trained tokens."""

    def __init__(self, batch: Batch, minibatches: Sequence[Index], policy: Policy, config: Learner) -> None:
        self.batch, self.policy, self.config = batch, policy, config
        self.recipe: Recipe = recipe(config)
        self.how = correction(config)
        self.ranks = policy.ranks
        self.minibatches = [policy.put(m) for m in minibatches]
        # at ratio 1 by construction: the base of the ratio is the policy that is being trained
        self.on_policy = config.proximal == "policy" and len(minibatches) == 1
        self.behaviour, self.advantages = policy.put(batch.logprobs), policy.put(batch.advantages)
        self.session, self.sessions = policy.put(batch.session), len(batch.sessions)
        self.temperature = policy.put(batch.temperature) if (batch.temperature != 1).any() else None
        self.current, self.reference, self.entropy = (torch.zeros_like(self.behaviour) for _ in range(3))
        self.old = self.behaviour.clone() if config.proximal == "behaviour" else torch.zeros_like(self.behaviour)
        self.corrections = torch.ones_like(self.behaviour)
        self.mine = torch.zeros_like(self.behaviour, dtype=torch.bool)  # trained by this rank
        self.bad = torch.zeros(self.sessions, dtype=torch.int32, device=policy.device)
        self.weight = torch.zeros_like(self.behaviour, dtype=torch.float64)
        for mine in self.minibatches:
            self.weight[mine] = losses.aggregation(
                self.recipe.aggregation, self.session[mine], self.sessions, config.norm_tokens
            )

    def score(self, row: Row, policy: Policy, into: Tensor, *, idle: bool = False) -> None:
        """Writes the log-probabilities of this rank's tokens of the row into an array."""
        tokens, x = self._inputs(row, policy)
        lp = policy.score(x)
        if not idle:
            into[tokens] = lp.to(into.dtype)

    def exchange(self, array: Tensor, minibatch: int) -> None:
        """After the rows of a minibatch were scored: every rank gets the scores of all."""
        mine = self.minibatches[minibatch]
        array[mine] = self.ranks.sum(array[mine])

    def train(self, row: Row, minibatch: int, *, idle: bool = False) -> Tensor:
        """Forward and backward of one row; this rank's part of the step's loss, fp64, without gradient."""
        tokens, x = self._inputs(row, self.policy)
        with self.policy.running():
            lp, entropy = self.policy(x)
            if idle:
                (0.0 * lp.sum()).backward()
                return torch.zeros_like(self.weight[0])
            if self.policy.router:
                self.policy.router.count()
            self.mine[tokens] = True
            self.current[tokens] = lp.detach().to(self.current.dtype)
            self.entropy[tokens] = entropy.detach().to(self.entropy.dtype)
            if self.on_policy:
                self.old[tokens] = self.current[tokens]
            values = self._losses(tokens, lp, entropy, self.minibatches[minibatch])
            loss = (values.double() * self.weight[tokens]).sum()
            loss.backward()  # type: ignore[no-untyped-call]
        self.bad[self.session[tokens[~torch.isfinite(values.detach())]]] = 1
        return loss.detach()

    def take_bad(self) -> list[str]:
        """Sessions with a token whose loss was not finite since the last call."""
        found = self.ranks.sum(self.bad).tolist()
        self.bad.zero_()
        return [name for name, bad in zip(self.batch.sessions, found, strict=True) if bad]

    def metrics(self) -> dict[str, float]:
        current, entropy, corrections, old = (
            self.ranks.sum(torch.where(self.mine, x, 0.0))
            for x in (self.current, self.entropy, self.corrections, self.old)
        )
        tokens = Tokens(
            current=current,
            start=old if self.config.proximal == "policy" else current,
            base=old if self.config.proximal == "policy" else self.behaviour,
            behaviour=self.behaviour,
            correction=corrections,
            entropy=entropy,
            age=self.batch.version - self.policy.put(self.batch.versions),
            turn=self.policy.put(self.batch.turn),
        )
        how = self.recipe
        out = diagnostics(tokens, clip_low=how.clip_low, clip_high=how.clip_high, cap=how.correction_high)
        counts = self.policy.router.take() if self.policy.router else None
        if counts is not None:
            out |= load(self.ranks.sum(counts))
        if self.config.kl_coef:
            out["reference_kl"] = float(losses.kl(current, self.reference, "k3").mean())
        return out

    def _inputs(self, row: Row, policy: Policy) -> tuple[Tensor, Inputs]:
        """This rank's trained tokens of the row [n], and its part of the forward."""
        x, mine = policy.inputs(row)
        numbers = row.tokens[mine]
        tokens = policy.put(numbers)
        temperature = None if self.temperature is None else self.temperature[tokens]
        return tokens, evolve(x, temperature=temperature, kept=kept(self.batch, numbers, policy.device))

    def _losses(self, tokens: Tensor, lp: Tensor, entropy: Tensor, minibatch: Tensor) -> Tensor:
        """The loss of each token of the row, before its weight: [n]."""
        scored = losses.Scored(lp, self.old[tokens], self.advantages[tokens], self._session_ratio(minibatch)[tokens])
        clip = losses.Clip(self.recipe.clip_low, self.recipe.clip_high, self.config.dual_clip)
        values = losses.SURROGATES[self.recipe.surrogate](scored, clip)
        factor = self._corrections(tokens, minibatch)
        self.corrections[tokens] = factor
        values = torch.where(factor == 0, 0.0, factor * values)  # a factor that is not a number shows
        if self.config.kl_coef:
            values = values + self.config.kl_coef * losses.kl(lp, self.reference[tokens], self.config.kl)
        if self.config.entropy_coef:
            values = values - self.config.entropy_coef * entropy
        return values

    def _session_ratio(self, minibatch: Tensor) -> Tensor:
        """Mean log-ratio of each token's session, where the surrogate looks at it: [N]."""
        out = torch.zeros_like(self.current)
        if self.recipe.surrogate == "gspo" and not self.on_policy:
            moved = self.current[minibatch] - self.old[minibatch]
            out[minibatch] = losses.session_mean(moved, self.session[minibatch], self.sessions)
        return out

    def _corrections(self, tokens: Tensor, minibatch: Tensor) -> Tensor:
        if not self.how.by_session:
            gap = self.old[tokens] - self.behaviour[tokens]
            return weights(gap, self.session[tokens], self.sessions, self.how)
        old = self.current if self.on_policy else self.old
        out = torch.ones_like(self.current)
        gap = old[minibatch] - self.behaviour[minibatch]
        out[minibatch] = weights(gap, self.session[minibatch], self.sessions, self.how)
        return out[tokens]


def kept(batch: Batch, tokens: Index, device: torch.device) -> Kept | None:
    """The kept sets of trained tokens [n]; None where nothing was cut."""
    if batch.kept is None:
        return None
    sets = [batch.kept[i] for i in tokens]
    counts = [0 if s is None else len(s) for s in sets]
    if not any(counts):
        return None
    ids = np.concatenate([s for s in sets if s is not None]).astype(np.int64)
    return Kept(torch.from_numpy(ids).to(device), torch.from_numpy(np.cumsum([0, *counts])).to(device))
