"""The one door for JSON from outside: a file within limits becomes plain values, and plain values become a dataclass by its own types.

    path -> read -> plain values -> build(Entry, values) -> Entry

``read`` and ``parse`` refuse what JSON does not have or no record needs: more bytes, values or nesting than any real file, numbers that
are not finite or not within 64 bits, text that cannot be written out again. ``build`` walks the annotations of a dataclass: every
field that is missing, unknown or of another type is named with its path, and so is a value that ``__post_init__`` refuses. Nothing is
evaluated, imported or looked up by a name from the file. Cost: two passes over the values.
"""

import collections.abc
import dataclasses
import functools
import json
import math
import pathlib
import re
import types
import typing
from typing import Any

from forebay.errors import InputError, nearest
from forebay.units import show_bytes

LIMIT_BYTES = 16 * 2**20
LIMIT_DEPTH = 32
LIMIT_VALUES = 10**6
LIMIT_DIGITS = 100
LARGEST_INTEGER = 2**63 - 1
_LONG_NUMBER = re.compile(rf"\d{{{LIMIT_DIGITS}}}")
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
_NUMBERS = (int, float)


class Unreadable(InputError):
    """Values from a file that are not what they should be. The text says which value and why, without the name of the file."""


def read(path: str | pathlib.Path, limit_bytes: int = LIMIT_BYTES) -> Any:
    """The JSON in a file, as plain values.

    Raises:
        Unreadable: no such file, too large, not UTF-8, not JSON, or over a limit.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(limit_bytes + 1)
    except OSError as problem:
        raise Unreadable(f"it cannot be read: {problem.strerror}") from None
    except ValueError as problem:  # a null byte in the path
        raise Unreadable(f"it cannot be read: {problem}") from None
    if len(data) > limit_bytes:
        raise Unreadable(f"it has more than {show_bytes(limit_bytes)}")
    try:
        return parse(data.decode())
    except UnicodeDecodeError as problem:
        raise Unreadable(f"it is not UTF-8 text: {problem.reason} at byte {problem.start}") from None


def parse(text: str) -> Any:
    """The values of a JSON text. Raises Unreadable where it is not JSON, or over a limit."""
    if text.count(",") + text.count("[") + text.count("{") > LIMIT_VALUES:
        raise Unreadable(f"it holds more than {LIMIT_VALUES} values")
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise Unreadable(f"it is nested more than {LIMIT_DEPTH} deep") from None
    except ValueError as problem:
        raise Unreadable(f"it is not JSON: {problem}") from None
    _check(value)
    return value


def check_digits(text: str) -> None:
    """Refuse a text, of any form, with a number that Python will not read. Raises Unreadable."""
    if _LONG_NUMBER.search(text):
        raise Unreadable(f"it holds a number of more than {LIMIT_DIGITS} digits")


def _no_constant(name: str):
    raise ValueError(f"{name} is not a JSON number")


def _check(value: Any) -> None:
    """Depth, numbers and texts of parsed values, level by level (no recursion that a file could exhaust)."""
    level = [value]
    for _ in range(LIMIT_DEPTH):
        below = []
        for item in level:
            if isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str):
                _check_text(item)
            elif isinstance(item, float) and not math.isfinite(item):
                raise Unreadable("it holds a number that is not finite")
            elif isinstance(item, int) and abs(item) > LARGEST_INTEGER:
                raise Unreadable("it holds a whole number of more than 64 bits")
        if not below:
            return
        level = below
    raise Unreadable(f"it is nested more than {LIMIT_DEPTH} deep")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Unreadable(f"it holds half of a surrogate pair in {ascii(text)[:60]}") from None


def build(kind: Any, value: Any, where: str = "") -> Any:
    """``value`` as the type ``kind``: a dataclass, or what may stand in one (numbers, texts, tuples, lists, mappings, unions, paths).

    ``where`` is the path of the value in its file, for messages. Raises Unreadable, naming the field.
    """
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, value, where)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _build_union(inner, value, where)
    if kind in (Any, object) or (kind is float and type(value) in _NUMBERS) or (kind in _WORDS and type(value) is kind):
        return value
    if kind is pathlib.Path and isinstance(value, str):
        return pathlib.Path(value)
    if tuple in (kind, origin) and isinstance(value, (list, tuple)):
        return _build_tuple(inner, value, where)
    if list in (kind, origin) and isinstance(value, list):
        return [build(inner[0] if inner else Any, item, f"{where}[{k}]") for k, item in enumerate(value)]
    if (origin or kind) in (dict, collections.abc.Mapping) and isinstance(value, dict):
        kinds = inner or (str, Any)
        return {_key(kinds[0], key, where): build(kinds[1], item, _inside(where, key)) for key, item in value.items()}
    raise Unreadable(f"{where or 'the value'} is {_short(value)}; it must be {_name(kind)}")


def _key(kind: Any, key: str, where: str) -> Any:
    """A key of a mapping: JSON writes whole numbers as texts there."""
    if kind is int and isinstance(key, str):
        if not (key.isascii() and key.isdigit() and len(key) < 19):
            raise Unreadable(f"{where or 'the value'} has the key {_short(key)}; it must be a whole number")
        return int(key)
    return key


def _build_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise Unreadable(f"{where or 'the value'} is {_short(value)}; it must be an object")
    hints, required = _fields(kind)
    for name in value:
        if name not in hints:
            raise Unreadable(f"{_inside(where, name)} is no field of it; {nearest(name, hints)}")
    if missing := [name for name in required if name not in value]:
        raise Unreadable(f"{_inside(where, missing[0])} is missing")
    made = {name: build(hints[name], item, _inside(where, name)) for name, item in value.items()}
    try:
        return kind(**made)
    except AssertionError as problem:  # the invariant of a record that a file does not keep
        raise Unreadable(f"{where or 'the value'} cannot be: {problem}") from None


@functools.cache
def _fields(kind: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The types of a dataclass's fields by name, and those without a default."""
    hints = typing.get_type_hints(kind)
    fields = [field for field in dataclasses.fields(kind) if field.init]
    absent = dataclasses.MISSING
    required = tuple(f.name for f in fields if f.default is absent and f.default_factory is absent)
    return {field.name: hints[field.name] for field in fields}, required


def _build_union(kinds: tuple, value: Any, where: str) -> Any:
    problems = []
    for kind in kinds:
        try:
            return build(kind, value, where)
        except Unreadable as problem:
            problems.append(problem)
    deep = [p for kind, p in zip(kinds, problems, strict=True) if dataclasses.is_dataclass(kind) and isinstance(value, dict)]
    if deep:
        raise deep[0]
    raise Unreadable(f"{where or 'the value'} is {_short(value)}; it must be {' or '.join(map(_name, kinds))}")


def _build_tuple(inner: tuple, value: Any, where: str) -> tuple:
    if not inner or inner[-1] is Ellipsis:
        return tuple(build(inner[0] if inner else Any, item, f"{where}[{k}]") for k, item in enumerate(value))
    if len(inner) != len(value):
        raise Unreadable(f"{where or 'the value'} has {len(value)} values; it must have {len(inner)}")
    return tuple(build(kind, item, f"{where}[{k}]") for k, (kind, item) in enumerate(zip(inner, value, strict=True)))


def _inside(where: str, name: Any) -> str:
    name = name if isinstance(name, str) and name.isidentifier() else repr(name)[:60]
    return f"{where}.{name}" if where else name


def _short(value: Any) -> str:
    text = ascii(value) if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def _name(kind: Any) -> str:
    if kind in _WORDS:
        return _WORDS[kind]
    plain = typing.get_origin(kind) or kind
    return "a list" if plain in (tuple, list) else "a path" if kind is pathlib.Path else "an object"
