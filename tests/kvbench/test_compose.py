"""Python reads one of our own files without Hydra where it can; the fields are those that Hydra composes."""

from unittest import mock

import pytest

from kvbench.config import compose

PLAIN = {"policy": "h2o", "wrapper": "caote", "model": "llama3_8b", "task": "longbench/hotpotqa"}
"""Without defaults, with those of its folder, and placed from another one."""


def assert_as_hydra(group: str, name: str) -> None:
    found = compose.read(group, name)
    compose._composed.cache_clear()
    with mock.patch.object(compose, "_shipped", return_value=None):
        expected = compose.read(group, name)
    compose._composed.cache_clear()
    assert found == expected
    assert list(found) == list(expected)


@pytest.mark.parametrize(("group", "name"), PLAIN.items())
def test_a_file_read_directly_has_the_fields_that_hydra_composes(group: str, name: str) -> None:
    assert compose._shipped(compose.CONF / group / f"{name}.yaml") is not None
    assert_as_hydra(group, name)


@pytest.mark.slow("composes every file of conf/ with Hydra")
@pytest.mark.parametrize("group", ["policy", "wrapper", "model", "task"])
def test_every_file_read_directly_has_the_fields_that_hydra_composes(group: str) -> None:
    for name in compose.names(group):
        assert_as_hydra(group, name)
