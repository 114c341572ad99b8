"""A field of a task that has no meaning is refused with its name, its value and what is allowed."""

import pytest
from hydra.errors import InstantiationException
from task_data import build

WRONG = [
    ("niah", "lengths=1024", "lengths=1024 is not allowed, it must be a list"),
    ("niah", "frame='{context}'", "frame="),
    ("niah", "queries=2", "queries=2 is more than the keys=1"),
    ("niah", "truncation=right", "truncation must be refuse, middle or left, got 'right'"),
    ("niah", "stop=['']", "is not allowed"),
    ("arithmetic", "high=10", "high must be a whole number of at least 11, got 10"),
    ("arithmetic", "operation=product", "operation must be sum, difference or both, got 'product'"),
    ("math500", "chat_template_args=3", "chat_template_args must be fields, such as {enable_thinking: false}, got 3"),
    ("math500", "think_end=''", "think_end must be a text, such as </think>, or null"),
    ("math500", "protocol=authors", "protocol must be sound or kvpress, got 'authors'"),
    ("ruler/niah_single_1", "haystack=book", "haystack must be noise, needle or essay, got 'book'"),
    ("ruler/niah_single_1", "keys=26", "make more needles than the 25 lines"),
    ("ruler/vt", "hops=10", "hops=10 is too long for ruler_vt, at most 9"),
    ("ruler/cwe", "common=11", "common=11 is too large"),
    ("ruler_file", "task=niah", "task must be niah_single_1"),
    ("needlebench/4k", "size=2k", "size must be 4k, 8k or 32k, got '2k'"),
    ("needlebench/4k", "cells=0", "cells must be a whole number of at least 1, got 0"),
]


@pytest.mark.parametrize(("name", "field", "message"), WRONG, ids=[f"{name} {field}" for name, field, _ in WRONG])
def test_a_wrong_field_is_refused_with_its_name_and_value(name: str, field: str, message: str) -> None:
    with pytest.raises(InstantiationException) as raised:
        build(name, f"++task.{field}")
    assert message in str(raised.value.__cause__)
