"""Every policy has a look of its own in pictures."""

from kvbench import preset_names
from kvbench.report.figures.style import BASELINE, family_of, looks_of


def test_only_the_full_cache_is_drawn_as_the_full_cache() -> None:
    assert [slug for slug in preset_names() if family_of(slug) == BASELINE] == ["full"]
    assert all(look.marker for slug, look in looks_of(preset_names()).items() if slug != "full")
