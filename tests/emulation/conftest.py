"""Fixtures for tests of AMX code on machines with and without AMX."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import amx_tools


@pytest.fixture(scope="session")
def soft() -> amx_tools.Soft:
    """The software core, compiled for this run. Nothing is trapped yet."""
    if reason := amx_tools.why_not():
        pytest.skip(reason)
    return amx_tools.Soft(amx_tools.build())
