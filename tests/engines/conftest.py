"""Assertions of the contract suite are explained like those of tests."""

import pytest

pytest.register_assert_rewrite("tests.engines.contract", "tests.engines.contract_updates")
