"""The price of a constraint is the paired difference to own token sets of the same scorer."""

import pytest

import kvbench
from kvbench.errors import UsageError
from kvbench.report.price import price_table


def test_pages_are_compared_with_own_tokens_of_their_scorer() -> None:
    fields = {"window": 8, "decode": "grow"}
    own, pages, other = (kvbench.make_policy(name, 48, **fields) for name in ("snapkv", "paged_snapkv", "paged_snapkv"))
    tova = kvbench.make_policy("paged_tova", 48, decode="grow")
    rows = kvbench.evaluate("pocket", policies=[own, pages, tova], tasks="niah", limit=5, lengths=[128])
    frame = price_table(rows).frame
    assert [*frame["policy"]] == ["paged_snapkv"], "no run with TOVA's own sets"
    scores = {row.policy: row.score for row in rows}
    price = float(frame["price (95% CI)"][0].split()[0])
    assert price == pytest.approx(scores["snapkv"] - scores["paged_snapkv"], abs=1e-3)
    assert other == pages
    with pytest.raises(UsageError, match="own token sets"):
        price_table([row for row in rows if row.policy != "snapkv"])
