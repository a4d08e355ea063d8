"""What must come of what harnesses do: every row of docs/trajectories.md, and the corners."""

from collections.abc import Callable

import pytest
from scenarios import SCENARIOS


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_behaviour(scenario: Callable[[], None]) -> None:
    scenario()
