"""Room for tokens to come: no more than may come, and told apart from what is used. Bytes worked by hand."""

import pytest
import torch
from kv_models import prompt, tiny

from kvbench import make_policy
from kvbench.cache.hook import prepare
from kvbench.engine.generate import Generation, generate_tokens

PROMPT = 40
STORES = ["full", "ada_snapkv", "snapkv_kivi_g8_r8", "kcvc", "h2o"]


def ran(policy: str, may_come: int, stop_after: int) -> Generation:
    ids = torch.tensor([prompt(PROMPT)])
    fields = {"window": 8} if "snapkv" in policy else {}
    made = make_policy(policy, budget=None if policy.startswith(("full", "ki", "kc")) else 16, **fields)
    model = prepare(tiny("llama"))
    return generate_tokens(model, ids, made, max_new_tokens=may_come, stop=lambda tokens: len(tokens) == stop_after)


@pytest.mark.parametrize("policy", STORES)
def test_what_is_used_does_not_depend_on_how_many_tokens_might_have_come(policy: str) -> None:
    tight, roomy = ran(policy, 9, 9).cache, ran(policy, 400, 9).cache
    assert tight.held_nbytes == roomy.held_nbytes == roomy.nbytes - roomy.spare_nbytes
    assert 0 <= tight.spare_nbytes <= roomy.spare_nbytes < roomy.nbytes
    assert tight.nbytes <= roomy.nbytes
    assert torch.equal(tight.kept_tokens(), roomy.kept_tokens())
