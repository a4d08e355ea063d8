"""What a task's sandbox may reach: made from where the task comes from and what its problem statement quotes.

In this order: an address instead of a name is refused; the URLs that the statement quotes may be read; the upstream
repository, its mirrors, forks and raw files are leaks; registries may be used, but of the task's own distribution
only what an index showed as older than the base commit; documentation may be read, but not the project's own source
listings. Everything else is unknown and refused, which is no leak. Refusals look at every spelling of a URL,
permissions at one. Knows no socket.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from contextlib import suppress

from attrs import define, field

from uniagent.engine.egress.rules import UNLISTED, Listed, Rewrite, Verdict
from uniagent.engine.egress.target import Malformed, Target, parse
from uniagent.tasks.guards import registries
from uniagent.tasks.guards.copies import ARCHIVE
from uniagent.tasks.guards.hosts import DOCUMENTATION, FORGES, MIXED, REGISTRIES
from uniagent.tasks.guards.origin import Origin, normal, quoted

READING = ("GET", "HEAD", "OPTIONS", "CONNECT")
SOURCE_LISTINGS = re.compile(
    r"/_modules/|/_sources?/|/src/|/source/|/changelog|/changes|/history|/releases?\b|/whatsnew"
)
ANOTHER_INDEX = re.compile(r"/(simple|pypi|packages?|project|pool|dist)/|\.(whl|tar\.gz|tgz|zip|conda)\b")
BASE64 = re.compile(r"[A-Za-z0-9+_-]{16,}")
URL_SAFE = str.maketrans("-_", "+/")
ADDRESS_IN_NAME = re.compile(r"(^|\.)(\d{1,3}[.-]){3}\d{1,3}(\.|$)|\b[0-9a-f]{8}\.")


@define(eq=False)
class Guarded:
    """``engine.egress.rules.Rules`` of one session. ``permitted``: files of the own distribution that an index showed
    as old enough, as URLs."""

    origin: Origin
    urls: frozenset[str]  # that the statement quotes, canonical
    registries: frozenset[str] = REGISTRIES
    documentation: Listed = field(factory=lambda: Listed(DOCUMENTATION))
    permitted: set[str] = field(factory=set)

    @classmethod
    def of(cls, origin: Origin, problem: str, *, registries: Iterable[str] = REGISTRIES) -> Guarded:
        return cls(origin, frozenset(canonical(quoted(problem))), frozenset(registries))

    def judge(self, method: str, target: Target) -> Verdict:
        if target.address:
            return Verdict(False, "an IP address instead of a name", leak=True)
        if method not in READING:
            return Verdict(False, f"only reading is allowed, not {method}")
        if target.url in self.urls and method != "CONNECT":
            return Verdict(True, "quoted in the problem statement")
        if reason := self._upstream(target):
            return Verdict(False, reason, leak=True)
        if target.host in self.registries:
            return self._registry(target)
        if self.documentation.has(target.host, target.port):
            return self._documentation(target)
        if registries.own(target, self.origin) and ANOTHER_INDEX.search(target.meaning):
            return Verdict(False, "the task's own distribution on an index that is not known", leak=True)
        if ADDRESS_IN_NAME.search(target.host):
            return Verdict(False, "a name made of an IP address", leak=True)
        return Verdict(False, UNLISTED)

    def versions(self) -> frozenset[str]:
        """Of the files that are permitted."""
        names = (url.rpartition("/")[2] for url in self.permitted)
        return frozenset(match["version"] for name in names if (match := ARCHIVE.match(name)))

    def tunnel(self, host: str, port: int) -> Verdict:
        """Only documentation that is nobody's own: of every other host the URL matters."""
        verdict = self.judge("GET", Target("https", host, port))
        if verdict.allowed and (host in self.registries or host in MIXED):
            return Verdict(False, "the URLs of this host must be seen")
        return verdict

    def rewrite(self, target: Target) -> Rewrite | None:
        if target.host not in self.registries or target.url in self.urls:
            return None
        return registries.rewrite(target, self.origin, self.permitted)

    def _upstream(self, target: Target) -> str | None:
        """Which rule against the source of the fix a target meets."""
        origin, meaning = self.origin, unwrapped(target.meaning, f"{target.path}?{target.query}")
        if origin.slug and re.search(rf"(?<![\w.-]){re.escape(origin.slug)}(?![\w-])", meaning):
            return "the upstream repository"
        if any(mirror and mirror in meaning for mirror in mirrors(origin)):
            return "a mirror of the upstream repository"
        if any(len(commit) >= 7 and commit[:7].lower() in meaning for commit in origin.fix_commits):
            return "a commit of the fix"
        forge = any(target.host == host or target.host.endswith(f".{host}") for host in FORGES)
        if forge and origin.name and re.search(rf"(?<![\w]){re.escape(origin.name)}(?![\w])", meaning):
            return "a fork or copy of the upstream repository"
        return None

    def _registry(self, target: Target) -> Verdict:
        own = registries.own(target, self.origin)
        if own is None:
            return Verdict(True, "a package registry")
        if own == "index":
            return Verdict(True, "the index of the task's own distribution, without what is too young")
        if own == "page":
            return Verdict(False, "the web page of the task's own distribution, which is younger than the base commit")
        if target.url in self.permitted:
            return Verdict(True, "the task's own distribution, older than the base commit")
        return Verdict(False, "the task's own distribution, not known to be older than the base commit", leak=True)

    def _documentation(self, target: Target) -> Verdict:
        named = {*self.origin.names, normal(self.origin.name or "-")}
        places = [target.host.partition(".")[0], *target.meaning.removeprefix(target.host).split("/")]
        own = target.host in self.origin.docs or any(place and normal(place) in named for place in places)
        if own and SOURCE_LISTINGS.search(target.meaning):
            return Verdict(False, "the project's own source listings and release notes", leak=True)
        if own:
            return Verdict(False, "the project's own documentation, which is younger than the base commit")
        return Verdict(True, "documentation")


def canonical(urls: Iterable[str]) -> Iterable[str]:
    """Each URL in its canonical spelling, under both schemes: a forge sends readers of one to the other."""
    for url in urls:
        try:
            target = parse(url)
        except Malformed:
            continue
        yield target.url
        if target.port in (80, 443):
            other = ("http", 80) if target.scheme == "https" else ("https", 443)
            yield Target(*other[:1], target.host, other[1], target.path, target.query).url


def unwrapped(meaning: str, written: str) -> str:
    """What a URL means, and what the parts of it that look like base64 stand for."""
    found = [meaning]
    for word in BASE64.findall(written):
        with suppress(ValueError):
            decoded = base64.b64decode(word.translate(URL_SAFE) + "=" * (-len(word) % 4), validate=True)
            found.append(decoded.decode("latin-1").lower())
    return "\n".join(found)


def mirrors(origin: Origin) -> list[str]:
    """What URLs of a mirror contain, as ``Target.meaning`` writes it."""
    found = []
    for mirror in origin.mirrors:
        text = mirror if "://" in mirror else f"https://{mirror}"
        try:
            target = parse(text.removesuffix(".git").rstrip("/"))
        except Malformed:
            continue
        found.append(f"{target.host}{'' if target.path == '/' else target.path}".lower())
    return found
