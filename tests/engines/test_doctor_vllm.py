"""uniagent engine doctor where vLLM is installed."""

from __future__ import annotations

import pytest

from uniagent.adapters.engines.cli import examine

pytestmark = pytest.mark.vllm


def test_the_real_vllm_works() -> None:
    report = examine()
    (vllm,) = (f for f in report.engines if f.engine == "vllm")
    assert vllm.works, vllm
    assert vllm.versions
    assert report.mend is None
