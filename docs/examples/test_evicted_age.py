"""The age of evicted tokens against numbers counted by hand."""

import torch
from evicted_age import EvictedAge


def test_ages_count_the_tokens_after_an_evicted_one() -> None:
    watcher = EvictedAge()
    watcher.evicted(0, torch.tensor([[True, False, False, True, False]]), 5)  # tokens 0 and 3 of 5: ages 4 and 1
    watcher.evicted(0, torch.tensor([[False, True, False, False, False, False]]), 6)  # token 1 of 6: age 4
    assert watcher.value() == 3


def test_without_evictions_there_is_no_age() -> None:
    assert EvictedAge().value() is None
