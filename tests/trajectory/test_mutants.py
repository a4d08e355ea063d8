"""The checks notice damage: each mutant of the matcher, the judge or the exporter fails the random sessions, or at
least a scenario. A mutant is one function with one piece of its source replaced."""

from __future__ import annotations

import importlib
import inspect
import random
import sys
import textwrap

import pytest
from scenarios import SCENARIOS
from test_sessions import whole_check

from uniagent.engine.trajectory.tree import TreePolicy

PACKAGE = "uniagent.engine.trajectory"
SEEDS = 40

BY_SESSIONS = [  # the invariants, the oracle and the replay see these
    ("echo:_kept", "return all(", "return True or all("),
    ("echo:head", "n += 1", "n += 2"),
    ("match:deepest", "if depth > best[0]", "if depth < best[0]"),
    ("match:Answers.elsewhere", "form, ids =", "return None\n    form, ids ="),
    ("match:options", "(*exact, *same, *altered)", "(*same, *exact, *altered)[:1]"),
    ("tree:TurnTree.commit", "action.kept = max(action.kept, back.kept)", "pass"),
    ("tape:extended", "at is not None and at.end == at.tape.size", "at is not None"),
    ("export:_at_home", "before = action", "return True\n    before = action"),
    ("export:_body", "trained[order] = n", "pass"),
    ("fates:_Judge._retried", "cluster[n.order] > cluster[node.order]", "cluster[n.order] != cluster[node.order]"),
    ("fates:_Judge._instead", "node.message.calls or self", "node.message.calls and self"),
    ("fates:_Judge._instead", "if self._brings_back(place, child, node):", "if False:"),
    ("fates:_clusters", "max(latest, action, key=lambda a: (a.ended, a.order))", "action"),
    ("fates:is_side_call", "request.tool_names or", ""),
    ("fates:_Judge._rewound", "[inherited, *gone]", "[-1, *gone]"),
]
BY_SCENARIOS = [  # what only an expectation sees, or what is rare
    ("match:Answers.ranked", "ours = any(", "ours = False and any("),
    ("export:_chains", "(h.node.order, h.kept) not in through", "False"),
    ("echo:canonical", "sort_keys=True", "sort_keys=False"),
    ("tree:TurnTree._context", "child.moved == pending.moved", "True"),
    ("fates:_Traffic.first_after", "and self._through(place, node)", ""),
    ("echo:key", "message.text.strip()", "message.text"),
    ("echo:_edited", "return same_text and not echo.calls", "return True"),
    ("echo:same_reasoning", "in sent.reasoning", "== sent.reasoning"),
    ("echo:could_run", "call.name in tool_names and", ""),
    ("match:Answers.ranked", "not home.acted.delivered, -home.order", "-home.order"),
    ("nodes:Request.after", "self.known > action.order", "True"),
    ("fates:_Judge._fate", 'if action.sampled.finish == "aborted"', "if False"),
    ("fates:_Judge._fate", "action.parse_problem is not None or", ""),
    ("export:_relations", "shared[-1]", "None"),
]


def mutate(monkeypatch: pytest.MonkeyPatch, where: str, old: str, new: str) -> None:
    name, _, path = where.partition(":")
    module = importlib.import_module(f"{PACKAGE}.{name}")
    *owners, attribute = path.split(".")
    owner = getattr(module, owners[0]) if owners else module
    original = getattr(owner, attribute)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(old) == 1, f"{where} has {old!r} {source.count(old)} times"
    scope = dict(vars(module))
    exec(compile("from __future__ import annotations\n" + source.replace(old, new), where, "exec"), scope)
    if owners:
        monkeypatch.setattr(owner, attribute, scope[attribute])
        return
    for loaded in [m for n, m in sys.modules.items() if n.startswith(PACKAGE)]:
        for alias, value in list(vars(loaded).items()):
            if value is original:
                monkeypatch.setattr(loaded, alias, scope[attribute])


def survives_sessions() -> bool:
    for seed in range(SEEDS):
        rng = random.Random(seed)
        policy = TreePolicy(rewind=rng.choice(["split", "discard"]), edited=rng.choice(["train", "context"]))
        try:
            whole_check(rng, policy, 10)
        except Exception:  # noqa: BLE001 - a mutant may break in any way
            return False
    return True


def survives_scenarios() -> bool:
    for scenario in SCENARIOS:
        try:
            scenario()
        except Exception:  # noqa: BLE001
            return False
    return True


def test_the_code_as_it_is_survives() -> None:
    assert survives_sessions()
    assert survives_scenarios()


@pytest.mark.parametrize(("where", "old", "new"), BY_SESSIONS, ids=lambda v: v if ":" in v[:12] else "")
def test_random_sessions_kill(monkeypatch: pytest.MonkeyPatch, where: str, old: str, new: str) -> None:
    mutate(monkeypatch, where, old, new)
    assert not survives_sessions()


@pytest.mark.parametrize(("where", "old", "new"), BY_SCENARIOS, ids=lambda v: v if ":" in v[:12] else "")
def test_scenarios_kill(monkeypatch: pytest.MonkeyPatch, where: str, old: str, new: str) -> None:
    mutate(monkeypatch, where, old, new)
    assert not survives_scenarios()
