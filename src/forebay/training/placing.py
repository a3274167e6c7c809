"""The words of ``--place``: rules of a plan by hand, as the command line writes them. Loads no jax."""

import re
from collections.abc import Sequence

from forebay.errors import InputError, nearest
from forebay.records.entries import NO_DISK, PLACEMENTS


def placement_rules(place: Sequence[str]) -> dict[str, str]:
    """``("optimizer=host",)`` as ``Plan.by_hand`` takes it. A repeated rule moves to the end: the last match wins.

    A placement is ``hbm``, ``host`` or ``recompute``; of a stack's optimizer state also some layers, ``host[0:16]`` or ``host:50%``.

    Raises:
        InputError: a text without a rule, or with an unknown placement.
    """
    rules: dict[str, str] = {}
    for text in place:
        rule, _, placement = text.rpartition("=")
        if not rule:
            raise InputError(f"--place {text!r} is not a rule; write ROLE_OR_PATTERN=PLACEMENT, such as optimizer=host")
        word = re.split(r"\W", placement, maxsplit=1)[0]
        if word not in PLACEMENTS:
            known = NO_DISK if word in ("disk", "nvme") else nearest(word, PLACEMENTS)
            raise InputError(f"--place {text!r}: there is no placement {placement!r}; {known}")
        rules.pop(rule, None)
        rules[rule] = placement
    return rules
