"""Finding a request in the tree: which child a message may be, and the deepest path of a whole request.

Pure but for the memo a node keeps of the message last seen at it. Among branches the deepest match wins, so this is a
search and not a walk; among equally deep ones the better ranked. Knows no tokens but their number.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from attrs import define, field

from uniagent.engine.messages import Message
from uniagent.engine.trajectory import echo
from uniagent.engine.trajectory.nodes import Branch, Echo, Echoes, Node, Option

NEWEST = 16  # actions of one normal form or id that are tried for a moved echo


def deepest(stack: list[Branch], messages: tuple[Message, ...], answers: Answers) -> tuple[Branch, tuple[Branch, ...]]:
    """The deepest match that goes on from one of these branches (the last one first), and the branches not tried.
    Visits a node at most once, because a node stands for one depth only."""
    best = stack[-1]
    while stack:
        depth, node, link = stack.pop()
        while depth < len(messages):
            found = options(node, messages[depth], answers)
            if not found:
                break
            depth += 1
            for child, back in reversed(found[1:]):
                stack.append((depth, child, linked(back, link)))
            node, back = found[0]
            link = linked(back, link)
        if depth > best[0]:
            best = depth, node, link
        if best[0] == len(messages):
            break
    return best, tuple(stack)


def options(node: Node, message: Message, answers: Answers) -> tuple[Option, ...]:
    """Children this message may be, best first: answers it echoes, the same context, answers it alters."""
    if node.memo is not None and (node.memo[0] is message or node.memo[0] == message):
        return node.memo[1]
    known = node.context.get(echo.key(message), []) if node.context else []
    same: list[Option] = [
        (c, Echo(c.moved[0], "edited", c.moved[1], message) if c.moved is not None else None) for c in known
    ]
    if message.role == "assistant":
        echoed = answers.ranked([(n, *(n.moved or (n, n.acted.size))) for n in node.answers], message)
        exact = [(n, back) for n, back in echoed if back.tier != "edited"]
        altered = [(n, back) for n, back in echoed if back.tier == "edited"]
        best_first: dict[int, Option] = {}
        for option in (*exact, *same, *altered):
            best_first.setdefault(option[0].index, option)
        same = list(best_first.values())
    node.memo = message, tuple(same)
    return node.memo[1]


def _tier(home: Node, kept: int, message: Message) -> str | None:
    action = home.acted
    if kept < action.size:
        return "edited"
    if not action.sent:
        return None
    tier = echo.echo_tier(home.message, message, action.request.tool_names, action.request.stops)
    if tier == "edited" and not action.delivered and echo.head(home.message, action.sampled, message):
        return None  # the beginning of a cut stream, not the whole answer in another form
    return tier


def linked(back: Echo | None, link: Echoes) -> Echoes:
    return (back, link) if back is not None and back.node.acted.news(back) else link


def unlinked(link: Echoes) -> list[Echo]:
    out = []
    while link is not None:
        back, link = link
        out.append(back)
    return out[::-1]


@define(eq=False)
class Answers:
    """The session's answers by what a message can be known by: a call id, the normal form, both."""

    _found: dict[Hashable, list[tuple[Node, int]]] = field(factory=dict)

    def sent(self, reply: Message, action: Node) -> None:
        """An answer, as it was sent: the ids in it are ours."""
        self.also(reply, action, action.acted.size)
        form, ids = echo.key(reply), echo.ids(reply)
        for name in (*ids, *((i, form) for i in ids)):
            self._found.setdefault(name, []).append((action, action.acted.size))

    def also(self, message: Message, action: Node, kept: int) -> None:
        """A message of this normal form is the first ``kept`` tokens of an action."""
        self._found.setdefault(echo.key(message), []).append((action, kept))

    def ranked(self, entries: Iterable[tuple[Node, Node, int]], message: Message) -> list[tuple[Node, Echo]]:
        """Of (child, action, tokens of it that stand there): those that the message echoes, best first. Where it has
        an id that we gave, only the actions it was given to; then ids written out, the tier, reasoning, delivery, the
        newest."""
        mine = echo.ids(message)
        ours = any(i in self._found for i in mine)
        found = []
        for child, home, kept in entries:
            if ours and mine.isdisjoint(echo.ids(home.message)):
                continue
            tier = _tier(home, kept, message)
            if tier is not None:
                written = not mine and any(i in message.text for i in echo.ids(home.message))
                thought = home.message.reasoning.strip() != message.reasoning.strip()
                rank = (not written, echo.TIERS.index(tier), thought, not home.acted.delivered, -home.order)
                found.append((rank, (child, Echo(home, tier, kept, message))))
        found.sort(key=lambda f: f[0])
        return [option for _, option in found]

    def elsewhere(self, message: Message, parent: Node | None) -> Echo | None:
        """The action that an assistant message is though it stands in no known place: the head of an undelivered
        answer under ``parent``, or any answer, known by an id it carries or by its normal form."""
        for child in reversed(parent.answers if parent is not None else ()):
            action = child.action
            if action is not None and action.sent and not action.delivered:
                kept = echo.head(child.message, action.sampled, message)
                if kept:
                    return Echo(child, "edited", kept, message)
        form, ids = echo.key(message), echo.ids(message)
        for names in ([(i, form) for i in ids], list(ids), [form]):
            hits = [hit for name in names for hit in self._found.get(name, [])[-NEWEST:]]
            best = self.ranked([(action, action, kept) for action, kept in hits], message)
            if best:
                return best[0][1]
        return None
