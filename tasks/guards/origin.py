"""Where a task comes from: the metadata that leak rules are made of. Knows no rule."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import urlsplit

from attrs import fields_dict, frozen

from uniagent.engine.errors import UserError
from uniagent.engine.ports import Json
from uniagent.tasks.structure import structure

URL = re.compile(r"https?://[^\s<>\"'`\\^{}|]+", re.IGNORECASE)
AFTER_URL = ".,;:!?*_'\""  # punctuation of the sentence, not of the URL


@frozen
class Origin:
    """``repo`` is the upstream repository, as owner/name or a URL; ``base_date`` an ISO 8601 date, with its time zone
    or in UTC; ``distributions`` the names under which registries have it, ``version`` the one at the base commit;
    ``packages`` its import names; ``fix_commits`` ids of commits that hold the fix; ``mirrors`` more places that have
    it (URLs); ``docs`` hosts of its own documentation."""

    repo: str = ""
    base_commit: str = ""
    base_date: str = ""
    distributions: tuple[str, ...] = ()
    version: str = ""
    packages: tuple[str, ...] = ()
    fix_commits: tuple[str, ...] = ()
    mirrors: tuple[str, ...] = ()
    docs: tuple[str, ...] = ()

    @property
    def before(self) -> datetime | None:
        """What is younger may hold the fix; None: unknown. A day without a time ends at its midnight. Raises
        UserError."""
        if not self.base_date:
            return None
        try:
            moment = datetime.fromisoformat(self.base_date)
        except ValueError:
            raise UserError(
                f"metadata.base_date = {self.base_date!r} is no ISO 8601 date, such as 2024-05-01"
            ) from None
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)

    @property
    def slug(self) -> str:
        """owner/name in lower case; empty when there is none."""
        path = urlsplit(self.repo).path if "://" in self.repo else self.repo.rpartition(":")[2]
        return "/".join(path.strip("/").removesuffix(".git").lower().split("/")[-2:])

    @property
    def name(self) -> str:
        """The repository's own name."""
        return self.slug.rpartition("/")[2]

    @property
    def names(self) -> frozenset[str]:
        """Of its distributions, normalised; of one in a scope (@scope/name) the name alone too, as files have it."""
        whole = [normal(name) for name in self.distributions]
        return frozenset([*whole, *(name.rpartition("/")[2] for name in whole)])


def origin(metadata: Mapping[str, Json], where: str = "metadata") -> Origin:
    """The keys of a sample's metadata that ``Origin`` has; ``distribution`` and ``package`` may stand for lists of one.
    Raises UserError."""
    given = {name: value for name, value in metadata.items() if name in fields_dict(Origin)}
    for one, many in (("distribution", "distributions"), ("package", "packages"), ("fix_commit", "fix_commits")):
        if metadata.get(one):
            given.setdefault(many, [metadata[one]])
    found = structure(Origin, given, where)
    _ = found.before
    return found


def normal(distribution: str) -> str:
    """A distribution's name as registries compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def quoted(text: str) -> tuple[str, ...]:
    """The URLs in a problem statement, in order, each once; sentence punctuation and unbalanced brackets cut off."""
    found: dict[str, None] = {}
    for match in URL.findall(text):
        url = match.partition("](")[0].rstrip(AFTER_URL)  # [https://…](https://…) in Markdown
        for opening, closing in ("()", "[]"):
            while url.endswith(closing) and url.count(closing) > url.count(opening):
                url = url[:-1].rstrip(AFTER_URL)
        found[url] = None
    return tuple(found)
