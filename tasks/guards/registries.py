"""The task's own distribution on package registries: recognised in URLs, and its indexes cut at the base date.

An index (PEP 503 in HTML, PEP 691 in JSON, an npm packument) is asked for in the form that has dates and given in the
form that was asked for, without the files that are younger; where it has no dates, without versions above the one at
the base commit. What it still shows is permitted, everything else of the distribution is not. Pure functions.
"""

from __future__ import annotations

import html
import io
import json
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from urllib.parse import unquote, urljoin

from attrs import define, field, frozen

from uniagent.engine.egress.rules import Rewrite, Withheld
from uniagent.engine.egress.target import Malformed, Target, parse
from uniagent.engine.ports import Json
from uniagent.tasks.guards.copies import ARCHIVE
from uniagent.tasks.guards.origin import Origin, normal

PEP_691 = b"application/vnd.pypi.simple.v1+json"
HTML = b"text/html"
LINK = re.compile(r"<a\b(?P<attributes>[^>]*)>(?P<text>[^<]*)</a>", re.IGNORECASE)
HREF = re.compile(r"href\s*=\s*[\"']([^\"']+)[\"']", re.IGNORECASE)
SIMPLE = re.compile(r"^/simple/([^/]+)/?$")
PYPI_JSON = re.compile(r"^/pypi/([^/]+)/json/?$")
NPM = ("registry.npmjs.org", "registry.yarnpkg.com")
PREFIXES = ("", "python-", "python3-", "py-", "node-", "lib", "r-", "ruby-", "golang-")
SUFFIX = re.compile(r"[-_.@]v?\d.*$")
HOLDS_A_COPY = "an archive that holds a copy of the task's package"
COMPANIONS = (".metadata", ".asc", ".sig")  # of a file: they come with it


def own(target: Target, origin: Origin) -> str | None:
    """``index`` for an index of the origin's distribution that can be cut, ``page`` for its web page, ``file`` for
    anything else of it; None for what is not its."""
    if not origin.names:
        return None
    if _index_name(target) in origin.names:
        return "index"
    for segment in re.split(r"[/;,?&=: ]", target.meaning.removeprefix(target.host)):
        if segment and _names(segment) & origin.names:
            return "page" if target.path.startswith("/project/") else "file"
    return None


def _names(segment: str) -> set[str]:
    """The distribution names that a part of a registry's path may stand for."""
    stem = segment.removesuffix(".metadata")
    candidates = {stem, SUFFIX.sub("", stem)}
    if match := ARCHIVE.match(stem):
        candidates.add(match["name"])
    found = {normal(c) for c in candidates if c}
    return found | {n.removeprefix(prefix) for n in found for prefix in PREFIXES if prefix and n.startswith(prefix)}


def _index_name(target: Target) -> str | None:
    """The distribution whose index a URL is, normalised."""
    path = unquote(target.path)
    if target.query:
        return None
    if match := SIMPLE.match(path) or PYPI_JSON.match(path):
        return normal(match[1])
    if target.host in NPM and re.fullmatch(r"/(@[^/]+/)?[^/@-][^/]*/?", path):
        return normal(path.strip("/"))
    return None


def rewrite(target: Target, origin: Origin, permitted: set[str]) -> Rewrite | None:
    """How an answer is changed: the index of the own distribution is cut, archives of others are looked into. None: as
    it is."""
    if own(target, origin) == "index":
        return Cut(origin, permitted)
    archive = target.path.lower().endswith((".whl", ".tar.gz", ".tgz", ".zip", ".tar.bz2", ".tar.xz"))
    return Inside(origin) if archive and origin.packages and own(target, origin) is None else None


@frozen
class Inside:
    """``engine.egress.rules.Rewrite`` that changes nothing, and withholds another distribution's archive that holds the
    task's package: a fork under another name, or a vendored copy."""

    origin: Origin
    optional: bool = True

    def request(self, headers: Mapping[bytes, bytes]) -> Mapping[bytes, bytes]:
        """Whole, uncompressed and unconditionally."""
        kept = {
            n: v for n, v in headers.items() if n not in (b"range", b"accept-encoding") and not n.startswith(b"if-")
        }
        return {**kept, b"accept-encoding": b"identity"}

    def answer(self, target: Target, headers: Mapping[bytes, bytes], body: bytes) -> tuple[bytes, bytes]:
        if any(self._copy(name) for name in listing(body)):
            raise Withheld(HOLDS_A_COPY)
        return headers.get(b"content-type", b"application/octet-stream"), body

    def _copy(self, name: str) -> bool:
        """Whether a path is a source file of one of the packages."""
        *folders, file = name.lower().split("/")
        stem = file.partition(".")[0]
        source = file.endswith((".py", ".pyx", ".so", ".js", ".ts", ".mjs"))
        return source and any(package.lower() in folders or package.lower() == stem for package in self.origin.packages)


def listing(archive: bytes) -> list[str]:
    """The paths in a zip or tar archive; none where it is neither."""
    data = io.BytesIO(archive)
    try:
        if zipfile.is_zipfile(data):
            return zipfile.ZipFile(data).namelist()
        data.seek(0)
        with tarfile.open(fileobj=data, mode="r:*") as tar:
            return tar.getnames()
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, ValueError, zlib.error):
        return []


@define(eq=False)
class Cut:
    """``engine.egress.rules.Rewrite`` for one request."""

    optional = False

    origin: Origin
    permitted: set[str]
    accepted: bytes = field(default=b"")

    def request(self, headers: Mapping[bytes, bytes]) -> Mapping[bytes, bytes]:
        """Ask for the form with dates, uncompressed and unconditionally."""
        self.accepted = headers.get(b"accept", b"*/*")
        conditional = (b"accept-encoding", b"range", b"if-range", b"accept")
        kept = {n: v for n, v in headers.items() if n not in conditional and not n.startswith(b"if-")}
        accept = PEP_691 + b", application/json;q=0.9, text/html;q=0.1"
        return {**kept, b"accept": accept, b"accept-encoding": b"identity"}

    def answer(self, target: Target, headers: Mapping[bytes, bytes], body: bytes) -> tuple[bytes, bytes]:
        kind = headers.get(b"content-type", b"").lower()
        if b"json" not in kind:
            return b"text/html; charset=utf-8", self._html(target, body.decode(errors="replace")).encode()
        found = json.loads(body)
        if "files" in found:
            return self._simple(target, found)
        if "versions" in found and "dist-tags" in found:
            return b"application/json", json.dumps(self._packument(found)).encode()
        if "releases" in found:
            return b"application/json", json.dumps(self._releases(found)).encode()
        return b"application/json", b"{}"

    # ------------------------------------------------------------ forms of an index

    def _simple(self, target: Target, found: dict[str, Json]) -> tuple[bytes, bytes]:
        """PEP 691, given as HTML to who cannot read it."""
        files = [f for f in found["files"] if self._old(f.get("upload-time"), f.get("filename", ""))]
        for file in files:
            self._permit(urljoin(target.url, file["url"]))
        versions = {match["version"] for f in files if (match := ARCHIVE.match(f["filename"]))}
        found = {**found, "files": files}
        if "versions" in found:
            found["versions"] = [v for v in found["versions"] if v in versions]
        if b"json" in self.accepted:
            return PEP_691, json.dumps(found).encode()
        return b"text/html; charset=utf-8", _page(found.get("name", ""), files).encode()

    def _html(self, target: Target, page: str) -> str:
        """PEP 503, which has no dates: by version."""

        def keep(match: re.Match[str]) -> str:
            href = HREF.search(match["attributes"])
            name = html.unescape(match["text"]).strip()
            if href is None or not self._old(None, name):
                return ""
            self._permit(urljoin(target.url, html.unescape(href[1])))
            return match[0]

        return LINK.sub(keep, page)

    def _packument(self, found: dict[str, Json]) -> dict[str, Json]:
        """npm: versions with their times in a table of its own."""
        times: Mapping[str, str] = found.get("time", {})
        kept = {v: data for v, data in found["versions"].items() if self._old(times.get(v), "", v)}
        for data in kept.values():
            self._permit(data.get("dist", {}).get("tarball", ""))
        tags = {tag: version for tag, version in found["dist-tags"].items() if version in kept}
        if kept and "latest" not in tags:
            tags["latest"] = max(kept, key=lambda v: times.get(v, ""))
        shown = {"created", *kept}
        left = {k: v for k, v in found.items() if k not in ("readme", "time", "versions", "dist-tags", "_attachments")}
        return {**left, "versions": kept, "dist-tags": tags, "time": {k: v for k, v in times.items() if k in shown}}

    def _releases(self, found: dict[str, Json]) -> dict[str, Json]:
        """The JSON API's releases; what it says of the newest one is left out."""
        kept: dict[str, list[Json]] = {}
        for version, files in found["releases"].items():
            old = [f for f in files if self._old(f.get("upload_time_iso_8601") or f.get("upload_time"), "", version)]
            for file in old:
                self._permit(file.get("url", ""))
            if old:
                kept[version] = old
        info = {"name": found.get("info", {}).get("name", "")}
        return {"info": info, "releases": kept, "urls": []}

    # ------------------------------------------------------------ the cut

    def _permit(self, url: str) -> None:
        try:
            found = parse(url)
        except Malformed:
            return
        plain = found.url
        self.permitted.update((plain, *(plain + companion for companion in COMPANIONS)))

    def _old(self, time: str | None, filename: str, version: str = "") -> bool:
        """Whether a file was there at the base commit; by its version where it has no date."""
        before = self.origin.before
        if time and before is not None:
            try:
                moment = datetime.fromisoformat(time)
            except ValueError:
                return False
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) <= before
        match = ARCHIVE.match(filename)
        version = version or (match["version"] if match else "")
        return bool(version and self.origin.version) and not newer(version, self.origin.version)


def newer(version: str, than: str) -> bool:
    """Whether a version is above another one; one that cannot be compared counts as newer."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version) > Version(than)
    except InvalidVersion:
        return version != than


def _page(name: str, files: Iterable[Mapping[str, Json]]) -> str:
    """PEP 503 from PEP 691."""
    lines = []
    for file in files:
        digest = next((f"#{kind}={value}" for kind, value in file.get("hashes", {}).items()), "")
        extra = f' data-requires-python="{html.escape(file["requires-python"])}"' if file.get("requires-python") else ""
        lines.append(f'<a href="{html.escape(file["url"] + digest)}"{extra}>{html.escape(file["filename"])}</a><br/>')
    head = f"<!DOCTYPE html><html><head><title>Links for {html.escape(name)}</title></head><body>\n"
    return head + "\n".join(lines) + "\n</body></html>\n"
