"""The local provider, confined and not, against the contract of sandboxes."""

from __future__ import annotations

from pathlib import Path

import pytest

from uniagent.adapters.sandboxes.contract import CHECKS, Check
from uniagent.adapters.sandboxes.local import LocalProvider


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(check: Check, isolation: str, tmp_path: Path) -> None:
    options = {"root": str(tmp_path / "root"), "warm": 0, "isolation": isolation}
    async with LocalProvider(options) as provider:
        async with provider.open({}) as sandbox:
            await check(sandbox)
        assert provider.warm
    assert not any((tmp_path / "root").iterdir()), "nothing is left behind"
