"""The repository as a package: what is installed, what importing it costs, and the rules every file keeps."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli

import uniagent.engine
from uniagent.engine import config_listing

ROOT = Path(__file__).parents[2]
FOLDERS = ("engine", "adapters", "tasks")
PYPROJECT = tomli.loads((ROOT / "pyproject.toml").read_text())


def modules() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def test_the_package_list_is_the_tree() -> None:
    found = {f"uniagent.{'.'.join(p.parent.relative_to(ROOT).parts)}" for p in modules()}
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(found)


def test_every_folder_with_modules_is_a_package() -> None:
    assert [str(p) for p in modules() if not (p.parent / "__init__.py").is_file()] == []


def test_the_version_is_said_once() -> None:
    assert uniagent.engine.__version__ == PYPROJECT["project"]["version"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_types_are_shipped(folder: str) -> None:
    assert (ROOT / folder / "py.typed").is_file()
    assert "py.typed" in PYPROJECT["tool"]["setuptools"]["package-data"][f"uniagent.{folder}"]


def test_the_namespace_has_no_module_of_its_own() -> None:
    assert not (ROOT / "uniagent").exists()
    assert not (ROOT / "__init__.py").exists()


@pytest.mark.parametrize("module", ["uniagent.engine", "uniagent.engine.cli", "uniagent.adapters", "uniagent.tasks"])
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'torch', 'transformers', 'vllm'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_a_command_that_needs_no_model_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from uniagent.engine.cli import main; main(['config']); "
        "main(['train', 'nowhere.toml']); print(*sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""
    assert "there is no such config file" in done.stderr


def test_it_runs_as_a_module_and_as_a_script() -> None:
    script = Path(sys.executable).with_name("uniagent")
    for command in ([sys.executable, "-m", "uniagent.engine"], [str(script)]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == f"uniagent {uniagent.engine.__version__}\n"


# ---------------------------------------------------------------- rules of the code


@pytest.mark.parametrize("path", list(modules()), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_says_what_it_is_for_and_is_short(path: Path) -> None:
    text = path.read_text()
    doc = ast.get_docstring(ast.parse(text)) or ""
    assert len(doc.split()) >= 4, "a docstring that says something"
    assert text.count("\n") <= 500


def test_every_test_file_asserts_something() -> None:
    """Itself, or a suite beside it that it imports."""
    silent = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        names = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
        suites = [root / f"{name.replace('.', '/')}.py" for name in names for root in (ROOT, path.parent)]
        if not any(
            _asserts(file) for file in (path, *suites) if file.is_file() and file.is_relative_to(ROOT / "tests")
        ):
            silent.append(str(path.relative_to(ROOT)))
    assert silent == []


def _asserts(path: Path) -> bool:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    called = {ast.unparse(n.func) for n in nodes if isinstance(n, ast.Call)}
    return "pytest.raises" in called or any(isinstance(n, ast.Assert) for n in nodes)


def test_layers_point_one_way() -> None:
    """The contracts in pyproject.toml, by import-linter."""
    script = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(script), "--no-cache"], cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stdout


# ---------------------------------------------------------------- docs


def test_the_config_page_is_current() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == config_listing.markdown() + "\n", (
        "run: uniagent config --markdown > docs/config.md"
    )


def test_docs_link_to_pages_that_exist() -> None:
    broken = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            if not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert broken == []


def test_the_index_links_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = [p.relative_to(ROOT / "docs") for p in sorted((ROOT / "docs").rglob("*.md")) if p.name != "index.md"]
    assert [str(p) for p in pages if f"]({p})" not in index] == []
