"""Makes ``theatre`` importable by the test files beside it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where sandboxes keep their files."""
    return tmp_path / "sandboxes"
