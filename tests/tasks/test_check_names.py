"""Names that hidden tests need must stand where the agent can read them."""

from __future__ import annotations

from uniagent.tasks.check_names import needed, untold


def test_a_name_that_nothing_tells_is_found() -> None:
    tests = {"test_new": "def test_new():\n    box = make_box(lid=True)\n    assert box.contents_of('a') == []\n"}
    told = "Write `make_box`, which takes `lid`."
    assert untold(tests, told, []) == {"test_new": ["contents_of"]}
    assert untold(tests, told, ["class Box:\n    def contents_of(self, x): ...\n"]) == {}


def test_what_a_test_brings_along_is_no_name_it_needs() -> None:
    text = """    def test(self, tmp_path):
        from package import thing

        def helper(x):
            return x.strip()

        with self.assertRaises(ValueError) as caught:
            thing.run(helper("a"))
        pytest.skip(str(caught))
"""
    assert needed(text) >= {"thing", "run"}
    assert not needed(text) & {"helper", "assertRaises", "skip", "caught", "tmp_path"}


def test_text_that_is_no_python_needs_nothing() -> None:
    assert needed("not python at all") == set()
