"""Config files: what is accepted, and the line each mistake gets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from uniagent.engine.config import RunConfig, check, sections
from uniagent.engine.config_file import FIELDS, allowed, dump, load, require
from uniagent.engine.errors import UserError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(text: str, name: str = "run.toml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return _write


def problems(path: Path, *sets: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(path, sets)
    return str(caught.value).splitlines()


def test_an_empty_file_is_all_defaults(write: Write) -> None:
    assert load(write("")) == RunConfig()


def test_a_file_names_only_what_differs(write: Write) -> None:
    config = load(write("[run]\nsteps = 7\n[learner]\nlr = 1\nbetas = [0.8, 1]\n"))
    assert (config.run.steps, config.run.seed) == (7, RunConfig().run.seed)
    assert config.learner.lr == 1.0
    assert isinstance(config.learner.lr, float)
    assert config.learner.betas == (0.8, 1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[run]\nstep = 3", ["run.step = 3", "did you mean 'steps'?", "allowed: drain_s"]),
        ("[runn]\nsteps = 3", ["[runn]", "did you mean 'run'?", "checkpoint, curriculum"]),
        ("steps = 3", ["steps = 3", "it belongs under [run]"]),
        ("run = 3", ["run = 3", "[run]"]),
        ("[learner]\ngroup_size = 3", ["learner.group_size = 3", "it belongs under [rollout]"]),
        ("[run]\nsteps = true", ["run.steps = true", "expected a whole number, got a boolean"]),
        ("[run]\nsteps = 3.0", ["run.steps = 3.0", "expected a whole number, got a decimal number"]),
        ('[run]\nsteps = "3"', ['run.steps = "3"', "expected a whole number, got text"]),
        ("[run]\nsteps = -1", ["run.steps = -1", "must be at least 0"]),
        ("[run]\nsteps = 2024-01-01", ["run.steps", "expected a whole number, got a date or time"]),
        ("[gateway]\nport = 70000", ["gateway.port = 70000", "must be at most 65535"]),
        ("[learner]\nlr = nan", ["learner.lr", "finite"]),
        ("[learner]\nlr = true", ["learner.lr = true", "expected a number"]),
        ("[learner]\nbetas = [0.9]", ["learner.betas = [0.9]", "expected a list of 2 numbers"]),
        ("[eval]\ngreedy = 1", ["eval.greedy = 1", "expected true or false"]),
        ("[engine]\noptions = 1", ["engine.options = 1", "expected a table"]),
        ('[trackers]\nnames = "x"', ['trackers.names = "x"', "expected a list of text, got text"]),
        (
            '[model]\ndtype = "float16"',
            ['model.dtype = "float16"', "did you mean 'bfloat16'?", "auto, bfloat16, float32"],
        ),
        ('[engine]\nname = "scriptd"', ['engine.name = "scriptd"', "did you mean 'scripted'?", "transformers"]),
        ('[model]\npath = "builtin:tiny"', ['model.path = "builtin:tiny"', "tiny-shell"]),
        ('[model]\npath = "no/such"', ['model.path = "no/such"', "no/such' does not exist", "builtin:NAME"]),
        ('[tasks]\nfile = "task.yaml"', ['tasks.file = "task.yaml"', "there is no file", "did you mean 'tasks.yaml'?"]),
        ('[tasks]\ndata = "x.jsonl"', ['tasks.data = "x.jsonl"', "neither a file", "shell_quest", "(as NAME/SPLIT)"]),
        ("[rollout]\nmax_sessions = 3", ["rollout.max_sessions = 3", "rollout.group_size (8)"]),
    ],
)
def test_a_mistake_is_one_line_with_file_key_value_and_what_is_allowed(
    write: Write, text: str, said: list[str]
) -> None:
    write("", "tasks.yaml")
    path = write(text)
    [line] = problems(path)
    assert line.startswith(f"{path}: ")
    for words in said:
        assert words in line


def test_all_mistakes_of_a_file_are_told_together(write: Write) -> None:
    lines = problems(write("[run]\nstep = 3\nseed = -1\n[lerner]\n[learner]\nlr = 'x'"), "run.threads=0")
    assert len(lines) == 5
    assert sum("--set run.threads=0: run.threads = 0: must be at least 1" in line for line in lines) == 1


def test_syntax_errors_have_line_and_column(write: Write) -> None:
    path = write("[run]\nsteps 3\n")
    assert problems(path)[0].startswith(f"{path}:2:7: not valid TOML")


@pytest.mark.parametrize("data", [b"\xff\xfe[\0r", b"\x00"])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(data)
    assert len(problems(path)) == 1


def test_a_missing_file_names_the_nearest(write: Write) -> None:
    path = write("", "quickstart.toml")
    assert "did you mean 'quickstart.toml'?" in problems(path.with_name("quickstrat.toml"))[0]
    assert "Is a directory" in problems(path.parent)[0]


class TestSet:
    def test_values_are_toml_and_bare_text_is_text(self, write: Write) -> None:
        path = write("[run]\nsteps = 7\nseed = 3\n")
        config = load(path, ["run.steps=9", "learner.schedule=cosine", "learner.betas=[0.5, 0.6]", "eval.greedy=false"])
        assert (config.run.steps, config.run.seed) == (9, 3)
        assert config.learner.schedule == "cosine"
        assert config.learner.betas == (0.5, 0.6)
        assert config.eval.greedy is False

    def test_text_keys_take_anything_as_it_stands(self, write: Write) -> None:
        assert load(write(""), ["gateway.host=1"]).gateway.host == "1"
        assert load(write(""), ["gateway.host=2024-01-01"]).gateway.host == "2024-01-01"

    def test_it_reaches_into_tables_and_leaves_the_rest(self, write: Write) -> None:
        path = write('[sandbox.options.local]\nisolation = "bwrap"\npids = 9\n')
        options = load(path, ["sandbox.options.local.isolation=none", "sandbox.options.ssh.port=2"]).sandbox.options
        assert options == {"local": {"isolation": "none", "pids": 9}, "ssh": {"port": 2}}

    def test_the_last_one_wins(self, write: Write) -> None:
        assert load(write(""), ["run.steps=1", "run.steps=2"]).run.steps == 2

    @pytest.mark.parametrize("setting", ["run.steps", "steps=3", "=3", "run.=3", "[run]=3"])
    def test_what_is_no_setting_is_told_with_an_example(self, write: Write, setting: str) -> None:
        assert "write section.key=value, for example" in "\n".join(problems(write(""), setting))

    def test_it_does_not_hide_a_broken_section(self, write: Write) -> None:
        assert "run = 3: it is a table" in problems(write("run = 3"), "run.steps=3")[0]

    def test_mistakes_name_the_setting(self, write: Write) -> None:
        assert problems(write(""), "learner.lr=fast") == [
            '--set learner.lr=fast: learner.lr = "fast": expected a number, got text'
        ]
        assert problems(write(""), "learnr.lr=1")[0].startswith("--set learnr.lr=1: [learnr]: there is no such section")


class TestPaths:
    def test_of_the_file_are_relative_to_it(
        self, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write("", "tasks.toml")
        write("", "rows.jsonl")
        (tmp_path / "model").mkdir()
        write("{}", "model/config.json")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        text = '[tasks]\nfile = "tasks.toml"\ndata = "rows.jsonl"\n[model]\npath = "model"\n'
        config = load(write(text))
        assert config.tasks.file == str(tmp_path / "tasks.toml")
        assert config.tasks.data == str(tmp_path / "rows.jsonl")
        assert config.model.path == str(tmp_path / "model")

    def test_of_a_setting_are_relative_to_the_current_folder(
        self, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "here").mkdir()
        write("", "here/tasks.toml")
        monkeypatch.chdir(tmp_path / "here")
        assert load(write(""), ["tasks.file=tasks.toml"]).tasks.file == str(tmp_path / "here" / "tasks.toml")

    def test_names_stay_names(self, write: Write) -> None:
        config = load(write('[tasks]\ndata = "shell_quest/train"\n[model]\npath = "builtin:tiny-shell"\n'))
        assert config.tasks.data == "shell_quest/train"
        assert config.model.path == "builtin:tiny-shell"

    def test_a_resolved_config_loads_from_anywhere(self, write: Write, tmp_path: Path) -> None:
        write("", "tasks.toml")
        config = load(write('[tasks]\nfile = "tasks.toml"\n'))
        (tmp_path / "runs").mkdir()
        assert load(write(dump(config), "runs/config.toml")) == config


def test_required_keys_are_told_by_name(write: Write) -> None:
    path = write("")
    with pytest.raises(UserError) as caught:
        require(load(path), path, "tasks.file", "eval.data")
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{path}: tasks.file is not set")
    assert second.startswith(f"{path}: eval.data is not set")


# ---------------------------------------------------------------- round trip

_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
_TABLE = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)


def _values(field: attrs.Attribute[Any]) -> st.SearchStrategy[Any]:
    low, high = field.metadata.get("at_least"), field.metadata.get("at_most")
    if field.metadata.get("path"):
        return st.just(field.default)
    if allowed(field):
        return st.sampled_from(allowed(field)) if field.type is str else st.just(())
    known: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(int(low or 0), int(high or 10**9)),
        float: st.floats(low, high, allow_nan=False, allow_infinity=False),
        str: _TEXT,
        tuple[float, float]: st.tuples(*[st.floats(0, 1)] * 2),
        tuple[str, ...]: st.just(()),
    }
    return known.get(field.type, st.dictionaries(_TEXT, _TABLE, max_size=2))


@settings(max_examples=60)
@given(st.data())
def test_what_is_dumped_loads_to_the_same_config(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    section = data.draw(st.sampled_from(sections()))
    names = data.draw(st.lists(st.sampled_from(sorted(FIELDS[section])), max_size=6, unique=True))
    chosen = {name: data.draw(_values(FIELDS[section][name]), name) for name in names}
    config = attrs.evolve(RunConfig(), **{section: attrs.evolve(getattr(RunConfig(), section), **chosen)})
    assume(not check(config))
    path = tmp_path_factory.getbasetemp() / "drawn.toml"
    path.write_text(dump(config))
    assert load(path) == config
