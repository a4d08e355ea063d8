"""``uniagent show``: an episode found in the record and printed so that every token's origin can be seen."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from uniagent.engine import run_folder
from uniagent.engine.config import Model, RunConfig
from uniagent.engine.episode import Episode
from uniagent.engine.errors import UserError
from uniagent.engine.journal import Record, Use, encode
from uniagent.engine.observe.show import find, show
from uniagent.engine.ports import Failure, TaskResult

Make = Callable[..., Episode]


@pytest.fixture
def run(tmp_path: Path, make_episode: Make) -> Path:
    """A run of three episodes, with a tokenizer that knows every token of theirs."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    words = {"<s>": 1, "hi": 10, "you": 11, "<a>": 2, "ls": 20, "-S": 21, "<e>": 3, "x\x1b[31m": 22}
    Tokenizer(WordLevel(words, unk_token="<s>")).save(str(tmp_path / "model" / "tokenizer.json"))
    config = RunConfig(model=Model(path=str(tmp_path / "model")))
    folder = run_folder.create(tmp_path / "run", config, stem="x", now=datetime.now(UTC))
    episodes = [make_episode("a"), make_episode("b", reward=0.0), make_episode("c", result=_infra(), error="no bwrap")]
    uses = [Use(1, tokens={"trained": 2}), Use(1), Use(0, "before")]
    lines = [encode(Record(e, u)) for e, u in zip(episodes, uses, strict=True)]
    folder.episodes.write_bytes(b'{"v":1,"kind":"header"}\n' + b"".join(lines) + b'{"v":1,"kind":"epis')
    return folder.path


def _infra() -> TaskResult:
    return TaskResult(0.0, failure=Failure.INFRA)


def printed(run: Path, which: str, *, terminal: bool = False) -> str:
    out = io.StringIO()
    show(
        run, which, Console(file=out, force_terminal=terminal, width=120, color_system="standard" if terminal else None)
    )
    return out.getvalue()


@pytest.mark.parametrize(
    ("which", "number", "session"), [("1", 1, "a"), ("3", 3, "c"), ("-1", 3, "c"), ("-3", 1, "a"), ("b", 2, "b")]
)
def test_an_episode_is_found_by_number_from_either_end_or_by_session(
    run: Path, which: str, number: int, session: str
) -> None:
    found = find(run / "episodes.jsonl", which)
    assert (found[0], found[1], found[2].episode.session) == (number, 3, session)


@pytest.mark.parametrize("which", ["0", "4", "-4", "nobody"])
def test_what_is_not_there_is_told_with_what_is(run: Path, which: str) -> None:
    with pytest.raises(UserError, match=f"there is no episode {which} in .*: it has episodes 1 to 3"):
        find(run / "episodes.jsonl", which)


def test_plain_marks_say_who_wrote_each_token(run: Path) -> None:
    text = printed(run, "1")
    assert "<s>hi you<a>«ls -S»[<e>]‹x␛[31m›" in text
    assert "«sampled, trainable»  ‹sampled, not trainable›" in text
    assert re.search(r"^ *0 +2 +live +verbatim +yes +-0\.250 +3 *$", text, re.MULTILINE)
    assert re.search(r"^ *1 +1 +retried +- +yes +-0\.250 +3 *$", text, re.MULTILINE)
    assert "reward 1 (solved)" in text
    assert "tokens sampled 3 = trainable 2 + context 0 + discarded (1 retried)" in text
    assert "in the batch 2 trained" in text
    assert "episode 1 of 3" in text


def test_a_failure_is_told(run: Path) -> None:
    text = printed(run, "-1")
    assert "failure infra: no bwrap" in text
    assert "evaluation 'before' of step 0" in text


def test_a_terminal_gets_colours_and_none_of_the_contents_escapes(run: Path) -> None:
    text = printed(run, "1", terminal=True)
    assert "\x1b[1;32mls -S\x1b[0m" in text
    assert "«" not in text
    assert "x\x1b[31m" not in text


def test_without_the_tokenizer_ids_are_shown(run: Path, tmp_path: Path) -> None:
    (tmp_path / "model" / "tokenizer.json").unlink()
    text = printed(run, "1")
    assert "token ids instead of text" in text
    assert "«20 21 »" in text
