"""Rules: what they name, which one wins, and an error for each way of naming nothing."""

import pytest

from forebay.errors import InputError, PlacementError
from forebay.plan.rules import choose, parse_rules
from forebay.workload import Tensor

pytestmark = pytest.mark.oldest


def tensor(name, members=()):
    return Tensor(name=name, role=name.partition(":")[0], shape=(4, 4), dtype="float32", bytes=64, members=members)


TENSORS = (
    tensor("parameter:embed", ("embed",)),
    tensor("gradient:embed", ("embed",)),
    tensor("parameter:layers/*/wq", ("layers/0/wq", "layers/1/wq")),
    tensor("gradient:layers/*/wq", ("layers/0/wq", "layers/1/wq")),
    tensor("optimizer:0/mu/embed", ("0/mu/embed",)),
    tensor("optimizer:0/mu/layers/*/wq", ("0/mu/layers/0/wq", "0/mu/layers/1/wq")),
    tensor("activation:attn_out"),
    tensor("batch:tokens"),
)


def placed(rules, tensors=TENSORS):
    return {name: rule.placement for name, rule in choose(parse_rules(rules), tensors).items()}


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ("optimizer", {"optimizer:0/mu/embed", "optimizer:0/mu/layers/*/wq"}),
        ("optimizer:*/embed", {"optimizer:0/mu/embed"}),
        ("parameter:layers/*", {"parameter:layers/*/wq"}),
        ("layers/*/wq", {"parameter:layers/*/wq", "gradient:layers/*/wq"}),
        ("layers/?/wq", {"parameter:layers/*/wq", "gradient:layers/*/wq"}),
        ("*embed", {"parameter:embed", "gradient:embed", "optimizer:0/mu/embed"}),
        ("parameter:layers/*/wq", {"parameter:layers/*/wq"}),
        ("attn_out", {"activation:attn_out"}),
    ],
)
def test_a_rule_is_a_role_a_role_with_a_pattern_or_a_pattern(rule, named):
    assert set(placed({rule: "host"})) == named


def test_the_last_rule_that_matches_wins():
    assert placed({"optimizer": "host", "optimizer:*/embed": "hbm"})["optimizer:0/mu/embed"] == "hbm"
    assert placed({"optimizer:*/embed": "hbm", "optimizer": "host"})["optimizer:0/mu/embed"] == "host"


def test_a_pattern_names_only_roles_that_may_stand_there():
    """``recompute`` is for activations alone, so a bare pattern skips the rest."""
    assert placed({"*": "recompute"}) == {"activation:attn_out": "recompute"}


@pytest.mark.parametrize(
    ("rules", "error", "text"),
    [
        ({"embde": "host"}, InputError, r"the rule embde=host matches nothing; did you mean 'embed'"),
        ({"parameter:attn_out": "host"}, InputError, r"matches nothing; entries of role parameter: parameter:embed, parameter:layers"),
        ({"optimiser": "host"}, InputError, r"did you mean 'optimizer'"),
        ({"optimizer": "hots"}, InputError, r"'hots' is not a placement \(optimizer=hots\); did you mean 'host'"),
        ({"optimizer": "recompute"}, PlacementError, r"a tensor of role optimizer can stand in hbm or host, not in recompute"),
        ({"communication": "host"}, PlacementError, r"role communication can stand in hbm, not in host"),
        ({"parameter:layers/0/*": "host"}, PlacementError, r"names 1 of the 2 leaves .*place the whole stack: parameter:layers/\*/wq=host"),
    ],
)  # fmt: skip
def test_each_mistake_has_its_message(rules, error, text):
    with pytest.raises(error, match=text):
        placed(rules)


def test_a_rule_for_a_whole_role_that_the_model_does_not_have_is_no_mistake():
    """An optimizer without state, a model without a loop: there is nothing to place, and nothing was misspelt."""
    stateless = tuple(t for t in TENSORS if t.role in ("parameter", "gradient"))
    assert placed({"optimizer": "host", "activation": "recompute", "accumulator": "host"}, stateless) == {}
    with pytest.raises(InputError, match="matches nothing"):
        placed({"optimizer:*": "host", "optimizer:0/*": "host"}, stateless)
