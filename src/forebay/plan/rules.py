"""Rules that a person writes: ``ROLE``, ``ROLE:GLOB`` or ``GLOB`` to a placement. The last rule that matches an entry wins."""

import dataclasses
import fnmatch
import re
from collections.abc import Mapping, Sequence

from forebay.errors import InputError, PlacementError, nearest
from forebay.records import LEGAL, NO_DISK, PLACEMENTS, ROLES
from forebay.workload import Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A parsed rule. ``role`` None: every role for which the placement is legal.

    ``layers``: only these layers of a stack of optimizer state, ``(start, stop)``, or a share of them, the first ``percent``.
    """

    text: str
    role: str | None
    glob: str
    placement: str
    layers: tuple[int, int] | None = None
    percent: float | None = None

    @property
    def whole_role(self) -> bool:
        return self.glob == "*" and self.role is not None

    @property
    def partial(self) -> bool:
        return self.layers is not None or self.percent is not None

    def window(self, layers: int) -> tuple[int, int]:
        """The layers that the rule names, of a stack of ``layers``.

        Raises:
            PlacementError: they are not within the stack.
        """
        if self.layers is not None:
            start, stop = self.layers
        else:
            assert self.percent is not None, f"{self.text} names no layers"
            start, stop = 0, round(layers * self.percent / 100)
        if not 0 <= start < stop <= layers:
            raise PlacementError(f"{self.text} names layers {start} to {stop} of a stack of {layers}")
        return start, stop


def parse_rules(rules: Mapping[str, str]) -> tuple[Rule, ...]:
    """Rules in the order in which they were written.

    Raises:
        InputError: an unknown placement.
        PlacementError: a placement that its role cannot have.
    """
    return tuple(_parse(key, value) for key, value in rules.items())


def _parse(key: str, value: str) -> Rule:
    part = re.fullmatch(r"(\w+)(?:\[(\d+):(\d+)\]|:(\d+(?:\.\d+)?)%)", str(value))
    if not part:
        return _parse_whole(key, value)
    placement, start, stop, percent = part.groups()
    rule = _parse_whole(key, placement)
    if rule.role not in (None, "optimizer"):
        raise PlacementError(f"{key}={value}: only optimizer state can be placed by layers, not a tensor of role {rule.role}")
    layers = (int(start), int(stop)) if start else None
    return dataclasses.replace(rule, text=f"{key}={value}", role="optimizer", layers=layers, percent=float(percent) if percent else None)


def _parse_whole(key: str, placement: str) -> Rule:
    if placement not in PLACEMENTS:
        known = NO_DISK if placement in ("disk", "nvme") else nearest(str(placement), PLACEMENTS)
        raise InputError(f"{placement!r} is not a placement ({key}={placement}); {known}")
    head, _, tail = key.partition(":")
    if head in ROLES:
        rule = Rule(text=f"{key}={placement}", role=head, glob=tail or "*", placement=placement)
        if placement not in LEGAL[head]:
            raise PlacementError(f"{rule.text}: a tensor of role {head} can stand in {' or '.join(LEGAL[head])}, not in {placement}")
        return rule
    return Rule(text=f"{key}={placement}", role=None, glob=key, placement=placement)


def matches(rule: Rule, tensor: Tensor) -> bool:
    """Whether a rule names this tensor, by its stored name or by all leaves that it holds.

    Raises:
        PlacementError: the rule names some of the leaves of a stack, but not all.
    """
    if rule.role not in (None, tensor.role) or rule.placement not in LEGAL[tensor.role]:
        return False
    path = tensor.name.partition(":")[2]
    if fnmatch.fnmatchcase(path, rule.glob) or fnmatch.fnmatchcase(tensor.name, rule.glob):
        return True
    hit = [m for m in tensor.members if fnmatch.fnmatchcase(m, rule.glob)]
    if hit and len(hit) < len(tensor.members) and tensor.role != "activation":  # an activation's members are its names
        raise PlacementError(
            f"{rule.text} names {len(hit)} of the {len(tensor.members)} leaves that are stored as one stack, {tensor.name}; "
            f"place the whole stack: {tensor.name}={rule.placement}"
        )
    return bool(hit)


def choose(rules: Sequence[Rule], tensors: Sequence[Tensor]) -> dict[str, Rule]:
    """The winning rule of each tensor that any rule names.

    Raises:
        InputError: a rule matches nothing.
    """
    chosen: dict[str, Rule] = {}
    for rule in rules:
        named = [t for t in tensors if matches(rule, t)]
        # A role may be empty (an optimizer without state, a model without loops): a rule for all of it is then kept to the letter.
        if not named and not (rule.whole_role and not any(t.role == rule.role for t in tensors)):
            raise InputError(f"the rule {rule.text} matches nothing; {_nearest_entry(rule, tensors)}")
        chosen.update((t.name, rule) for t in named)
    return chosen


def _nearest_entry(rule: Rule, tensors: Sequence[Tensor]) -> str:
    names = [t.name for t in tensors if rule.role in (None, t.role)]
    paths = {n.partition(":")[2]: n for n in names}
    text = nearest(rule.glob, [*paths, *ROLES] if rule.role is None else paths)
    return text if text.startswith("did") or rule.role is None else f"entries of role {rule.role}: " + ", ".join(names[:12])
