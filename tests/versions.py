"""Tests of what only newer versions do than the oldest that are promised (`make test-oldest`)."""

from importlib.metadata import version

import pytest


def needs(package: str, least: str, why: str) -> pytest.MarkDecorator:
    """Skip a test where a package is older than `least`, a version of two numbers."""
    found = tuple(int(each) for each in version(package).split(".")[:2])
    wanted = tuple(int(each) for each in least.split("."))
    return pytest.mark.skipif(found < wanted, reason=f"{package} before {least}: {why}")
