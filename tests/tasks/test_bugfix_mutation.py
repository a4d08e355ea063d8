"""bugfix: bugs are edits that can be undone, statements say what is right, and agents do not see the hidden tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uniagent.tasks.bugfix import data, hide, recipe
from uniagent.tasks.bugfix.mutate import OPERATORS, Bug, Edit, bugs
from uniagent.tasks.bugfix.project import Project
from uniagent.tasks.bugfix.recipe import Recipe, Repair, Wrong
from uniagent.tasks.bugfix.solutions import rewritten
from uniagent.tasks.bugfix.statement import Broken, Failure, piece, statement
from uniagent.tasks.bugfix.writer import acceptable

SOURCE = '''"""A module."""


class Box:
    """Holds things."""

    def put(self, thing, times=1):
        """Put a thing in.

        :param times: how often
        """
        if thing is None:
            raise ValueError("nothing")
        for _ in range(times):
            self.things.append(thing)  # the order stays
        return not self.full and len(self.things) < 3


def clamp(value, low, high):
    """The value, but not outside low and high."""
    if value < low or value == high - 1:
        return max(low, value)
    while True:
        "ünïcode"; value = min(value, high, key=lambda v: v); break
    text = value[1:] if value else "much"
    return text
'''
TESTS = """import pytest
from box import clamp


def test_low():
    low = 3
    unrelated = 7
    assert clamp(1, low, 9) == 3


class TestBox:
    def test_only(self):
        assert Box().put(1)


class TestMore:
    @pytest.mark.parametrize("high", [1, 2])
    def test_one(self, high):
        assert clamp(5, 0, high) == high

    def test_two(self):
        pass
"""


def found(operator: str) -> list[Bug]:
    return [bug for bug in bugs(SOURCE) if bug.operator == operator]


def test_every_bug_is_legal_python_another_program_and_can_be_undone() -> None:
    every = list(bugs(SOURCE))
    assert {bug.operator for bug in every} >= {*OPERATORS, "body", "function"} - {"jump"}
    for bug in every:
        broken = bug.edit.apply(SOURCE)
        assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(SOURCE))
        assert bug.edit.undo(broken) == SOURCE


@pytest.mark.parametrize(
    ("operator", "line"),
    [
        ("comparison", "    if value <= low or value == high - 1:\n"),
        ("boolean", "    if value < low and value == high - 1:\n"),
        ("arithmetic", "    if value < low or value == high + 1:\n"),
        ("slice", '    text = value[1 + 1:] if value else "much"\n'),
        ("branch", "    text = 'much' if value else value[1:]\n"),
        ("arguments", "        return max(value, low)\n"),
        ("guard", "        pass\n"),
        ("negation", "        return self.full and len(self.things) < 3\n"),
        ("jump", None),
        ("number", "        return not self.full and len(self.things) < 4\n"),
        ("statement", "            pass  # the order stays\n"),
    ],
)
def test_operators_change_one_place_and_leave_the_layout(operator: str, line: str | None) -> None:
    changed = [bug.edit.new for bug in found(operator)]
    if line is None:
        assert any("continue" in new for new in changed)
    else:
        assert line in changed


def test_removals_keep_the_documentation_or_take_all() -> None:
    body = next(bug for bug in found("body") if bug.function == "Box.put").edit.apply(SOURCE)
    assert '"""Put a thing in.' in body
    assert "raise NotImplementedError" in body
    gone = next(bug for bug in found("function") if bug.function == "clamp").edit.apply(SOURCE)
    assert "clamp" not in gone


def test_an_edit_refuses_a_file_that_is_another() -> None:
    with pytest.raises(ValueError, match="line 2"):
        Edit(2, "old\n", "new\n").apply("one\ntwo\n")


@given(st.integers(0, 30), st.text(alphabet="ab\n", max_size=5))
def test_undoing_is_the_inverse_of_applying(at: int, new: str) -> None:
    lines = [f"line {n}\n" for n in range(31)]
    edit = Edit(at + 1, lines[at], new)
    assert edit.undo(edit.apply("".join(lines))) == "".join(lines)


# ---------------------------------------------------------------- statements


def test_a_statement_names_the_function_quotes_its_documentation_and_the_failing_call() -> None:
    failure = Failure("test_box.py::test_low", "AssertionError: assert 1 == 3", 8)
    said = statement(Broken("src/box.py", "clamp", "comparison", SOURCE, [failure]), {"test_box.py": TESTS})
    assert said is not None
    assert "`box.clamp` (in `src/box.py`) does not do what it should" in said
    assert "The value, but not outside low and high." in said
    assert "    low = 3\n    assert clamp(1, low, 9) == 3\n" in said
    assert "unrelated" not in said
    assert "AssertionError: assert 1 == 3" in said


def test_parameters_of_a_failing_test_are_told() -> None:
    failure = Failure("test_box.py::TestMore::test_one[1]", "AssertionError: assert 5 == 1", 19, {"high": "1"})
    said = statement(Broken("box.py", "clamp", "comparison", SOURCE, [failure]), {"test_box.py": TESTS})
    assert said is not None
    assert "high = 1: AssertionError" in said


def test_a_removed_function_is_described_by_its_signature() -> None:
    failure = Failure("test_box.py::TestBox::test_only", "AttributeError: put", 13)
    said = statement(Broken("box.py", "Box.put", "function", SOURCE, [failure]), {"test_box.py": TESTS})
    assert said is not None
    assert "is missing" in said
    assert "def put(self, thing, times=1):" in said
    assert "how often" not in said  # field lists are for readers of the code


def test_no_statement_where_neither_documentation_nor_test_says_what_is_right() -> None:
    bare = "def helper(x):\n    return x + 1\n"
    tests = "def test_all():\n    assert everything()\n"
    failure = Failure("test_a.py::test_all", "AssertionError", 2)
    assert statement(Broken("a.py", "helper", "number", bare, [failure]), {"test_a.py": tests}) is None


def test_a_line_in_no_test_function_shows_nothing() -> None:
    assert piece(TESTS, 1) == ""
    assert piece("", 3) == ""


# ---------------------------------------------------------------- what the agent sees


def test_hidden_tests_are_taken_out_and_the_others_stay() -> None:
    names = hide.hidden_functions(
        ["t.py::TestMore::test_one[1]", "t.py::TestMore::test_one[2]", "t.py::TestBox::test_only"]
    )
    left = hide.without(TESTS, names["t.py"])
    assert "test_one" not in left
    assert "parametrize" not in left
    assert "test_only" not in left
    classes = {node.name: node for node in ast.parse(left).body if isinstance(node, ast.ClassDef)}
    assert isinstance(classes["TestBox"].body[0], ast.Pass)
    assert "test_two" in left
    assert "test_low" in left


def test_the_text_of_hidden_tests_is_found_by_id() -> None:
    found = hide.sources(["t.py::TestMore::test_one[1]"], {"t.py": TESTS})
    assert list(found) == ["t.py::TestMore::test_one"]
    assert "clamp(5, 0, high) == high" in found["t.py::TestMore::test_one"]


def test_another_solution_is_the_same_function_with_other_names() -> None:
    changed = rewritten(SOURCE, "clamp")
    assert changed is not None
    assert "text_value = value[1:]" in changed
    before, after = dict[str, object](), dict[str, object]()
    exec(SOURCE, before)
    exec(changed, after)
    assert after["clamp"]([1, 5], [3], [9]) == before["clamp"]([1, 5], [3], [9])  # type: ignore[operator]
    assert rewritten("def f(x):\n    return x\n", "f") is None


# ---------------------------------------------------------------- recipes and rows


def one_recipe() -> Recipe:
    tests = ("t.py::a", "t.py::b[1]", "t.py::b[2]", "t.py::c")
    repair = Repair("box.py", "clamp", "number", 3, "x = 1\ny = 2\n", "x = 1\ny = 3\n", tests[1:3], tests[:1],
                    "clamp is wrong", Wrong(3, "x = 1\n", "x = 2\n"))  # fmt: skip
    return Recipe(Project("some-thing==1.0", ("dep",)), tests, (repair,), {"no test fails": 4}, 1.5)


def test_a_recipe_is_written_and_read(tmp_path: Path) -> None:
    recipe.write(one_recipe(), tmp_path / "r.jsonl")
    assert recipe.read(tmp_path / "r.jsonl") == one_recipe()


def test_rows_are_swe_bench_shaped() -> None:
    (row,) = data.rows(one_recipe())
    metadata = row["metadata"]
    assert metadata["FAIL_TO_PASS"] == ["t.py::b[1]", "t.py::b[2]"]
    assert metadata["PASS_TO_PASS"] == ["t.py::a", "t.py::c"]
    assert metadata["instance_id"].startswith("some-thing-number-")
    assert metadata["patch"] == "--- a/box.py\n+++ b/box.py\n@@ -4 +4 @@\n-y = 3\n+y = 2\n"
    assert "clamp is wrong" in row["prompt"][0]["content"]


def test_shipped_samples_are_many_from_several_projects_and_well_formed() -> None:
    splits = {split: list(data.samples(split, 0)) for split in data.SPLITS}
    every = [row["metadata"] for rows in splits.values() for row in rows]
    assert len(every) >= 200
    assert len({one["source"] for one in every}) >= 3
    assert len({one["instance_id"] for one in every}) == len(every)
    assert len({one["operator"] for one in every}) >= 10
    for one in every:
        assert one["FAIL_TO_PASS"]
        assert not set(one["FAIL_TO_PASS"]) & set(one["PASS_TO_PASS"])
        assert one["function"].rpartition(".")[2] in one["problem_statement"]
    functions = {
        split: {(r["metadata"]["path"], r["metadata"]["function"]) for r in rows} for split, rows in splits.items()
    }
    assert not functions["train"] & functions["heldout"]


# ---------------------------------------------------------------- statements by a model


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("clamp(1, 3, 9) gives 1, and I expected 3.", True),
        ("Something is wrong with the numbers.", False),  # which function?
        ("clamp is wrong, it should say `if value < low or   value == high - 1:` there.", False),  # tells the fix
    ],
)
def test_a_written_statement_names_the_function_and_does_not_tell_the_fix(text: str, good: bool) -> None:
    bug = next(bug for bug in found("comparison") if "value <= low" in bug.edit.new)
    repair = Repair("box.py", "clamp", "comparison", bug.edit.line, bug.edit.old, bug.edit.new, ("t",), (), "said")
    assert acceptable(text, repair) is good
