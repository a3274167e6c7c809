"""How a real file is damaged: JSON in its structure or its bytes, HLO in its lines, its words or its bytes. Everything follows a seed."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

DEEP, WIDE = "[" * 100_000, "[" + "0," * 50_000 + "0]"
VALUES = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, -(10**400), 0.5, -0.0, 1e308, 1e999, -1e999, float("nan"),
    "", "x", "hbm", "host", "\ud800", "\0", "../../etc/passwd", "/", "~", "a" * 10_000, "__class__", "{0.__class__}", "%s%n",
    [], {}, [[]], {"": None}, [None] * 1000, {"name": {"name": []}}, "float32", "object", "pred[]", [1] * 40, "optimizer:*", "parameter:[",
    "1" * 5000,
)  # fmt: skip
WORDS = (
    "", "-1", "0", "9" * 21, "9" * 5000, "1.2.3GiB", "S(5)", "f32[", "f32[0]", "f99[4]", "f32[99999999999,99999999999]", "(", ")", "{",
    "}", "%", ",", "=", "%x",
    "while", "body=%body", "copy-start", "fusion", "constant(", "token[]", "u4[3]", "((f32[1]{0}))", '"', "'", "\\", "\0", "\u2028",
    "replica_groups=[2,4]<=[8]", "known_trip_count", '{"n":"999999999999"}', "opaque", "ENTRY", "ROOT", "<=", "custom-call",
)  # fmt: skip


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each (container, key) of a JSON value."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
        for key in keys:
            yield item, key
            waiting.append(item[key])


def mutated_json(rng: random.Random, sample: Any) -> bytes:
    """One to four changes of structure, or of bytes."""
    value = copy.deepcopy(sample)
    for _ in range(rng.randint(1, 3)):
        places = list(_places(value))
        if not places:
            break
        container, key = rng.choice(places)
        _change(rng, value, container, key)
    data = json.dumps(value).encode(errors="surrogatepass")
    if rng.random() < 0.05:
        data = data.replace(b"null", rng.choice((DEEP, WIDE, "NaN", "1e999", "-Infinity", "1" * 4000)).encode(), 1)
    return mutated_bytes(rng, data) if rng.random() < 0.25 else data


def _change(rng: random.Random, value: Any, container: Any, key: Any) -> None:
    kind = rng.randrange(9)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container[rng.choice(("x", "", "\ud800", f"{key}s"))] = container.pop(key)
    elif kind == 2:
        container[key] = {"inner": container[key]} if rng.random() < 0.5 else [container[key]]
    elif kind == 3:
        other, at = rng.choice(list(_places(value)))
        container[key] = copy.deepcopy(other[at])
    elif kind >= 4 and isinstance(container[key], str):
        other, at = rng.choice(list(_places(value)))
        container[key] = other[at] if isinstance(other[at], str) else container[key][: len(container[key]) // 2]
    elif kind >= 4 and isinstance(container[key], (int, float)) and not isinstance(container[key], bool):
        container[key] = container[key] * rng.choice((-1, 0, 2, 10**9, 10**18)) + rng.choice((-1, 0, 1, 0.5))
    else:
        container[key] = copy.deepcopy(rng.choice(VALUES))


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bytes flipped, cut out, doubled or put in; or the end cut off."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(out) + 1)
        size = rng.choice((1, 1, 2, 8, 200))
        kind = rng.randrange(5)
        if kind == 0:
            out[at : at + size] = bytes(rng.randrange(256) for _ in range(size))
        elif kind == 1:
            del out[at : at + size]
        elif kind == 2:
            out[at:at] = out[at : at + size]
        elif kind == 3:
            out[at:at] = rng.choice((b"\xff\xfe", b"{", b"}", b"[", b"]", b'"', b"\\u d800", b"\0", b"\n", b",", b":"))
        elif rng.random() < 0.3:
            del out[at:]
    return bytes(out)


def mutated_hlo(rng: random.Random, sample: str) -> bytes:
    """Lines removed, doubled, swapped or cut; words replaced; or bytes. Often a single one, which passes the first door more often."""
    lines = sample.splitlines()
    for _ in range(rng.choice((1, 1, 1, 2, 6))):
        at = rng.randrange(len(lines))
        kind = rng.randrange(5)
        if kind == 0 and len(lines) > 1:
            del lines[at]
        elif kind == 1:
            lines.insert(rng.randrange(len(lines)), lines[at])
        elif kind == 2:
            lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
        else:
            words = lines[at].split(" ")
            words[rng.randrange(len(words))] = rng.choice((*WORDS, *rng.choice(lines).split(" ")))
            lines[at] = " ".join(words)
    data = "\n".join(lines).encode(errors="surrogatepass")
    return mutated_bytes(rng, data) if rng.random() < 0.2 else data
