"""Indexes of the task's own distribution end at the base date; others are as they are."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from uniagent.engine.egress.target import parse
from uniagent.tasks.guards.network import Guarded
from uniagent.tasks.guards.origin import origin

FILES = "https://files.pythonhosted.org/packages/aa"
OLD, NEW = "splitter-1.0.tar.gz", "splitter-1.1-py3-none-any.whl"


def rules(**more: Any) -> Guarded:
    return Guarded.of(origin({"distribution": "splitter", "base_date": "2024-05-01", **more}), "")


def cut(guarded: Guarded, url: str, body: bytes, kind: bytes, accept: bytes = b"*/*") -> tuple[bytes, bytes]:
    target = parse(url)
    rewrite = guarded.rewrite(target)
    assert rewrite is not None
    asked = rewrite.request(
        {b"accept": accept, b"if-none-match": b'"x"', b"range": b"bytes=0-", b"accept-encoding": b"gzip"}
    )
    assert asked[b"accept-encoding"] == b"identity"
    assert not {b"if-none-match", b"range"} & asked.keys(), "a whole answer, never an old one"
    return rewrite.answer(target, {b"content-type": kind}, body)


def simple(*files: tuple[str, str | None]) -> bytes:
    listed = [
        {"filename": name, "url": f"../../packages/aa/{name}", "hashes": {"sha256": "00"}, "upload-time": time}
        for name, time in files
    ]
    return json.dumps({"name": "splitter", "meta": {}, "versions": ["1.0", "1.1"], "files": listed}).encode()


BOTH = simple((OLD, "2024-04-30T23:59:59.5Z"), (NEW, "2024-05-01T00:00:01Z"))


@pytest.mark.parametrize("accept", [b"application/vnd.pypi.simple.v1+json", b"text/html"])
def test_an_index_with_dates(accept: bytes) -> None:
    guarded = rules()
    kind, body = cut(guarded, "https://pypi.org/simple/splitter/", BOTH, b"application/vnd.pypi.simple.v1+json", accept)
    assert OLD.encode() in body
    assert NEW.encode() not in body
    assert (b"json" in kind) is (b"json" in accept), "in the form that was asked for"
    if b"json" in kind:
        assert json.loads(body)["versions"] == ["1.0"]
    assert guarded.judge("GET", parse(f"https://pypi.org/packages/aa/{OLD}")).allowed
    assert guarded.judge("GET", parse(f"https://pypi.org/packages/aa/{OLD}.metadata")).allowed
    assert not guarded.judge("GET", parse(f"https://pypi.org/packages/aa/{NEW}")).allowed
    assert guarded.versions() == {"1.0"}


def test_an_index_without_dates_goes_by_version() -> None:
    page = f'<a href="{FILES}/{OLD}#sha256=0">{OLD}</a><br/><a href="{FILES}/{NEW}">{NEW}</a>'.encode()
    _, body = cut(rules(version="1.0"), "https://pypi.org/simple/splitter/", page, b"text/html")
    assert re.findall(rb">(\S+)</a>", body) == [OLD.encode()]
    _, body = cut(rules(), "https://pypi.org/simple/splitter/", page, b"text/html")
    assert b"<a" not in body, "no date and no version: nothing is known to be old enough"


@pytest.mark.parametrize("name", ["splitter", "Splitter", "%73plitter"])
def test_spellings_of_a_name_are_one_index(name: str) -> None:
    assert rules().rewrite(parse(f"https://pypi.org/simple/{name}")) is not None


def test_other_indexes_are_as_they_are() -> None:
    assert rules().rewrite(parse("https://pypi.org/simple/splitter-tools/")) is None
    assert rules().rewrite(parse("https://registry.npmjs.org/left")) is None


def test_a_packument() -> None:
    versions = {
        v: {"dist": {"tarball": f"https://registry.npmjs.org/splitter/-/splitter-{v}.tgz"}} for v in ("1.0.0", "1.1.0")
    }
    body = {
        "name": "splitter",
        "dist-tags": {"latest": "1.1.0", "old": "1.0.0"},
        "versions": versions,
        "readme": "news",
        "time": {
            "created": "2023-01-01T00:00:00Z",
            "modified": "2024-07-01T00:00:00Z",
            "1.0.0": "2024-01-01T00:00:00Z",
            "1.1.0": "2024-06-01T00:00:00Z",
        },
    }
    guarded = rules()
    _, data = cut(guarded, "https://registry.npmjs.org/splitter", json.dumps(body).encode(), b"application/json")
    found = json.loads(data)
    assert list(found["versions"]) == ["1.0.0"]
    assert found["dist-tags"] == {"old": "1.0.0", "latest": "1.0.0"}
    assert "1.1.0" not in data.decode()
    assert "readme" not in found
    assert guarded.judge("GET", parse("https://registry.npmjs.org/splitter/-/splitter-1.0.0.tgz")).allowed


def test_a_scoped_package_is_known_by_its_files_too() -> None:
    guarded = Guarded.of(origin({"distribution": "@acme/splitter", "base_date": "2024-05-01"}), "")
    assert guarded.rewrite(parse("https://registry.npmjs.org/@acme%2fsplitter")) is not None
    assert guarded.judge("GET", parse("https://registry.npmjs.org/@acme/splitter/-/splitter-1.1.0.tgz")).leak


def test_the_json_api() -> None:
    body = {
        "info": {"name": "splitter", "version": "1.1", "description": "fixed the last chunk"},
        "urls": [{"url": NEW}],
        "releases": {
            "1.0": [{"url": f"{FILES}/{OLD}", "upload_time": "2024-04-01T00:00:00"}],
            "1.1": [{"url": f"{FILES}/{NEW}", "upload_time_iso_8601": "2024-06-01T00:00:00Z"}],
        },
    }
    _, data = cut(rules(), "https://pypi.org/pypi/splitter/json", json.dumps(body).encode(), b"application/json")
    assert list(json.loads(data)["releases"]) == ["1.0"]
    assert b"last chunk" not in data


def test_an_unknown_form_shows_nothing() -> None:
    assert cut(rules(), "https://pypi.org/simple/splitter/", b'{"a": 1}', b"application/json")[1] == b"{}"
