"""What a guarded sandbox may reach."""

from __future__ import annotations

import pytest

from uniagent.engine.egress.rules import Both, Listed, Verdict
from uniagent.engine.egress.target import parse
from uniagent.tasks.guards.network import Guarded
from uniagent.tasks.guards.origin import origin, quoted

ORIGIN = origin(
    {
        "repo": "https://github.com/Acme/Splitter.git",
        "base_date": "2024-05-01",
        "distribution": "Splitter",
        "version": "1.0",
        "fix_commit": "0123456789abcdef",
        "mirrors": ["https://git.example.net/m/split"],
        "docs": ["splitter.example.org"],
    }
)
PROBLEM = "As in https://github.com/acme/splitter/issues/12."
PROBLEM += " And [this](https://forum.example.org/t/5_(old)), see (https://x.org/a)."


def verdict(url: str, method: str = "GET") -> Verdict:
    return Guarded.of(ORIGIN, PROBLEM).judge(method, parse(url))


@pytest.mark.parametrize(
    "url",
    [
        "https://github.com/acme/splitter/issues/12",
        "http://github.com/acme/splitter/issues/12#issuecomment-1",
        "https://forum.example.org/t/5_(old)",
        "https://x.org/a",
        "https://pypi.org/simple/helper-lib/",
        "https://files.pythonhosted.org/packages/aa/splitter_tools-1.0.tar.gz",
        "https://registry.npmjs.org/@types%2fnode",
        "https://pypi.org/simple/splitter/",
        "https://docs.python.org/3/",
        "https://requests.readthedocs.io/en/latest/",
    ],
)
def test_what_honest_work_needs(url: str) -> None:
    assert verdict(url).allowed


@pytest.mark.parametrize(
    "url",
    [
        "https://github.com/acme/splitter",
        "https://github.com/acme/splitter.git/info/refs",
        "https://github.com/acme/splitter/issues/12/",
        "https://github.com/acme/splitter/issues/13",
        "https://GITHUB.com./ACME%2fsplitter/pull/13",
        "https://raw.githubusercontent.com/acme/splitter/main/a.py",
        "https://codeload.github.com/acme/splitter/tar.gz/main",
        "https://api.github.com/repos/acme/splitter/commits",
        "https://github.com/somebody/splitter",
        "https://gitlab.com/mirror/splitter/-/raw/main/a.py",
        "https://cdn.jsdelivr.net/gh/acme/splitter@main/a.py",
        "https://anything.example/?url=https%3A%2F%2Fgithub.com%2Facme%2Fsplitter",
        "https://git.example.net/m/split/raw/a.py",
        "https://github.com/x/y/commit/0123456789abcdef",
        "https://140.82.112.3/acme/splitter",
        "https://[::ffff:140.82.112.3]/",
        "https://140-82-112-3.names.example/",
        "https://files.pythonhosted.org/packages/aa/splitter-1.1.tar.gz",
        "https://files.pythonhosted.org/packages/aa/Splitter-1.0-py3-none-any.whl",
        "https://registry.npmjs.org/splitter/-/splitter-1.1.0.tgz",
        "https://deb.debian.org/debian/pool/main/p/python-splitter/python3-splitter_1.1-1_all.deb",
        "https://proxy.golang.org/github.com/acme/splitter/@v/list",
        "https://pypi.org/pypi/splitter/1.1/json",
        "https://splitter.readthedocs.io/en/latest/_modules/splitter.html",
        "https://docs.rs/crate/splitter/1.1.0/source/src/lib.rs",
    ],
)
def test_what_would_be_a_leak(url: str) -> None:
    found = verdict(url)
    assert not found.allowed
    assert found.leak, found.rule


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/",
        "https://github.com/other/project",
        "https://splitter.readthedocs.io/en/latest/",
        "https://splitter.example.org/guide",
        "https://pypi.org/project/splitter/",
        "https://x.org/b",
    ],
)
def test_what_is_refused_without_being_a_leak(url: str) -> None:
    found = verdict(url)
    assert (found.allowed, found.leak) == (False, False)


def test_reading_only() -> None:
    assert not verdict("https://pypi.org/legacy/", "POST").allowed
    assert verdict("https://pypi.org/simple/helper-lib/", "HEAD").allowed


def test_a_tunnel_is_only_for_hosts_of_which_no_url_matters() -> None:
    rules = Guarded.of(ORIGIN, PROBLEM)
    assert rules.tunnel("docs.python.org", 443).allowed
    for host in ("pypi.org", "github.com", "docs.rs", "splitter.readthedocs.io", "forum.example.org"):
        assert not rules.tunnel(host, 443).allowed, host


def test_a_persons_list_adds_to_a_tasks_rules_but_not_against_leaks() -> None:
    both = Both(Guarded.of(ORIGIN, PROBLEM), Listed(("example.org", "github.com")))
    assert both.judge("GET", parse("https://example.org/x")) == Verdict(True, "on the sandbox's list", private=True)
    assert not both.judge("GET", parse("https://github.com/acme/splitter")).allowed


def test_a_list_of_hosts() -> None:
    listed = Listed(("Example.org", "*.wild.example", "api.example:8443"))
    for host, port, there in [
        ("example.org", 443, True),
        ("example.org", 80, True),
        ("example.org", 22, False),
        ("sub.example.org", 443, False),
        ("a.wild.example", 443, True),
        ("wild.example", 443, False),
        ("evilwild.example", 443, False),
        ("api.example", 8443, True),
        ("api.example", 443, False),
    ]:
        assert listed.has(host, port) is there, (host, port)


def test_quoted_urls_end_where_the_sentence_goes_on() -> None:
    assert quoted(PROBLEM) == (
        "https://github.com/acme/splitter/issues/12",
        "https://forum.example.org/t/5_(old)",
        "https://x.org/a",
    )


def test_without_metadata_nothing_is_the_upstream() -> None:
    rules = Guarded.of(origin({}), "")
    assert rules.judge("GET", parse("https://pypi.org/simple/anything/")).allowed
    assert not rules.judge("GET", parse("https://github.com/a/b")).leak
