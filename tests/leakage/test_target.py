"""Every spelling of an address is one target, or is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uniagent.engine.egress.outside import public
from uniagent.engine.egress.target import Malformed, Target, canonical_host, parse

PLAIN = "https://github.com/acme/splitter/pull/13"


@pytest.mark.parametrize(
    "spelling",
    [
        "https://GitHub.COM/acme/splitter/pull/13",
        "HTTPS://github.com./acme/splitter/pull/13",
        "https://github.com:443/acme/splitter/pull/13",
        "https://github.com/acme/splitter/pull/13#files",
        "https://github.com/x/../acme/./splitter/pull/13",
        "https://github.com/%61cme/splitter/pull/%31%33",
        "https://github.com/x/%2e%2e/acme/splitter/pull/13",
        "https://ｇｉｔｈｕｂ．com/acme/splitter/pull/13",
        "https://github。com/acme/splitter/pull/13",
        "https://%67ithub.com/acme/splitter/pull/13",
    ],
)
def test_spellings_of_one_url(spelling: str) -> None:
    assert parse(spelling).url == PLAIN


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("2130706433", "127.0.0.1"),
        ("0x7f000001", "127.0.0.1"),
        ("0177.0.0.1", "127.0.0.1"),
        ("127.1", "127.0.0.1"),
        ("[::ffff:8.8.8.8]", "8.8.8.8"),
        ("[::FFFF:808:808]", "8.8.8.8"),
        ("[2001:DB8::1]", "2001:db8::1"),
        ("8.8.8.8.", "8.8.8.8"),
        ("１２７.0.0.1", "127.0.0.1"),
    ],
)
def test_every_way_of_writing_an_ip_address(host: str, address: str) -> None:
    target = parse(f"http://{host}/")
    assert target.address
    assert target.host == address


@pytest.mark.parametrize(
    "url",
    [
        "https://docs.python.org@github.com/",
        "https://docs.python.org%40github.com/",
        "https://git hub.com/",
        "https://github.com\\@docs.python.org/",
        "https://github.com/a\tb",
        "https://github.com/%zz",
        "https://github.com:0/",
        "https://github.com:99999/",
        "https://-x.example/",
        "https://1.2.3.4.5/",
        "https:///path",
        "https://xn--0.example/",
        "ftp://github.com/",
        "github.com/acme",
    ],
)
def test_what_can_be_understood_in_two_ways_is_refused(url: str) -> None:
    with pytest.raises(Malformed):
        parse(url)


def test_only_spellings_that_deceive_count_as_evasion() -> None:
    with pytest.raises(Malformed) as plain:
        parse("ftp://example.org/")
    with pytest.raises(Malformed) as sly:
        parse("https://docs.python.org@github.com/")
    assert (plain.value.evasion, sly.value.evasion) == (False, True)


@pytest.mark.parametrize(
    "path",
    [
        "/acme%2Fsplitter",
        "/ACME/splitter",
        "//acme///splitter",
        "/%2561cme/splitter",
        "/acme/./splitter",
        "/acme%5Csplitter",
    ],
)
def test_refusals_see_through_every_escape(path: str) -> None:
    assert "acme/splitter" in Target("https", "example.org", 443, path).meaning


@given(st.text(alphabet="abc/.%2eEfF0-_~:@", max_size=30))
def test_a_canonical_path_is_stable(path: str) -> None:
    try:
        once = parse(f"https://example.org/{path}")
    except Malformed:
        return
    assert parse(once.url) == once
    assert "/../" not in f"{once.path}/"


@given(st.text(max_size=30))
def test_a_canonical_host_is_stable_and_plain(host: str) -> None:
    try:
        once = canonical_host(host)
    except Malformed:
        return
    except UnicodeDecodeError:
        pytest.fail("a host that is no text must be refused in words")
    assert canonical_host(f"[{once}]" if ":" in once else once) == once
    assert once.isascii()
    assert once == once.lower()


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "169.254.169.254",
        "::1",
        "fe80::1%eth0",
        "::ffff:10.0.0.1",
        "64:ff9b::a00:1",
        "2002:a00:1::",
        "224.0.0.1",
        "0.0.0.0",
        "100.64.0.1",
        "nonsense",
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not public(address)


def test_public_addresses() -> None:
    assert public("140.82.112.3")
    assert public("2606:50c0:8000::153")
