"""Shared by all tests."""

from __future__ import annotations

from hypothesis import settings

# A busy machine is no failure, and a run in CI must be repeatable: the same examples every time.
settings.register_profile("sparkfleet", deadline=None, derandomize=True)
settings.load_profile("sparkfleet")
