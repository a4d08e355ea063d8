"""What became of every answer, by brute force: the rules of docs/trajectories.md read straight over all requests,
with none of the shortcuts of ``uniagent.engine.trajectory.fates``. Times are all different here."""

from __future__ import annotations

from uniagent.engine.trajectory.nodes import Node, Request
from uniagent.engine.trajectory.tree import TreePolicy, TurnTree


class Oracle:
    def __init__(self, tree: TurnTree, policy: TreePolicy) -> None:
        self.policy, self.actions, self.requests = policy, tree.history.actions, tree.history.requests
        self.requests = sorted(self.requests, key=lambda r: r.at)
        self.paths = {r: [tree.root, *r.end.path()] for r in self.requests}

    def fates(self) -> list[str]:
        fates = {a: self.fate(a) for a in self.actions}
        if self.policy.rewind == "discard":
            for a in [a for a in self.actions if fates[a] == "live" and self.rewound(a)]:
                fates[a] = "rewound"
            for a in [a for a in self.actions if fates[a] == "live"]:
                fates |= dict.fromkeys(a.chain(), "live")
        return [fates[a] for a in self.actions]

    def echoed_by(self, a: Node) -> list[Request]:
        return [r for r, path in self.paths.items() if any(n is a or (n.moved and n.moved[0] is a) for n in path)]

    def fate(self, a: Node) -> str:
        action = a.acted
        if self.echoed_by(a):
            return "live"
        if action.sampled.finish == "aborted":
            return "aborted"
        if not action.delivered:
            return "undelivered"
        gone = "retried" if self.retried(a) else next(iter(self.instead(a)), (None,))[0]
        if gone is None:
            return "side_call" if self.side_call(a) and self.policy.side_call == "discard" else "live"
        runs = all(c.value is not None and c.name in action.request.tool_names for c in a.message.calls)
        if action.parse_problem or not runs:
            return "refused" if self.policy.refused == "discard" else "live"
        return gone

    def retried(self, a: Node) -> bool:
        others = [n for n in self.actions if n.parent is a.parent]
        beside = {a}
        for _ in others:
            beside |= {n for n in others for b in beside if overlap(n, b)}
        answered = [n for n in others if n.acted.delivered or self.echoed_by(n)]
        return any(n not in beside and n.acted.request.at > a.acted.ended for n in answered)

    def instead(self, a: Node) -> list[tuple[str, Node]]:
        """(fate, what stands in its place), by the first request of each."""
        found: list[tuple[str, Node]] = []
        seen: set[Node] = set()
        for r in self.requests:
            path = self.paths[r]
            if r.at <= a.acted.ended or a.parent not in path[:-1]:
                continue
            child = path[path.index(a.parent) + 1]
            if child.action is not None or child in seen or (child.moved and child.moved[0] is a):
                continue
            seen.add(child)
            if self.brings_back(r, path[path.index(child) :], a):
                continue
            if child.message.role == "assistant":
                found.append(("replaced", child))
            elif a.message.calls or self.went_on(child):
                found.append(("dropped", child))
        return found

    def went_on(self, child: Node) -> bool:
        through = [r for r in self.requests if child in self.paths[r]]
        return any(r.end is not s.end and r.end in self.paths[s] for r in through for s in through)

    def brings_back(self, request: Request, path: list[Node], a: Node) -> bool:
        text = "\n".join(n.message.text for n in reversed(path))
        return any(b.order >= a.order and b.order < request.known and comes_back(b, text) for b in self.actions)

    def side_call(self, a: Node) -> bool:
        request, with_tools = a.acted.request, [r for r in self.requests if r.tool_names]
        size = {r: sum(len(n.message.text) for n in r.end.path()) for r in self.requests}
        main = with_tools[0] if with_tools else max(self.requests, key=lambda r: size[r])
        if request.tool_names or system(request.end) == system(main.end):
            return False
        if any(n.action or n.moved for n in request.end.path()):
            return False
        later = [n for r in self.requests for n in self.paths[r] if n.index > a.index]
        return not any(comes_back(a, n.message.text) for n in later)

    def rewound(self, a: Node) -> bool:
        last = max([r.at for r in self.echoed_by(a)] + [a.acted.request.at])
        for up in a.chain():
            for _, child in self.instead(up):
                if any(r.at > last for r in self.requests if child in self.paths[r]):
                    return True
        return False


def overlap(a: Node, b: Node) -> bool:
    return a.acted.request.at < b.acted.ended and b.acted.request.at < a.acted.ended


def comes_back(a: Node, text: str) -> bool:
    asked = "\n".join(n.message.text for n in a.acted.request.end.path())
    lines = [line.strip() for line in a.message.text.splitlines()]
    return any(len(line) >= 20 and line in text and line not in asked for line in lines)


def system(node: Node) -> str:
    path = node.path()[1:]
    k = next((i for i, n in enumerate(path) if n.message.role != "system"), len(path))
    return "\n".join(n.message.text for n in path[:k])
