"""The door for JSON from outside: limits first, then types, each refusal with the path of the value."""

import dataclasses
import json
import pathlib

import pytest

from forebay.records.reading import LIMIT_BYTES, Unreadable, build, parse, read

pytestmark = pytest.mark.oldest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    size: int
    names: tuple[str, ...] = ()

    def __post_init__(self):
        assert self.size >= 0, f"a size of {self.size}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    rate: float = 1.0
    pair: tuple[int, str] | None = None
    table: dict[str, Inner] = dataclasses.field(default_factory=dict)
    path: pathlib.Path = pathlib.Path()


def test_values_become_the_types_of_the_fields():
    made = build(Outer, {"inner": {"size": 3, "names": ["a"]}, "rate": 2, "pair": [1, "x"], "table": {"k": {"size": 0}}, "path": "a/b"})
    assert made == Outer(inner=Inner(size=3, names=("a",)), rate=2, pair=(1, "x"), table={"k": Inner(size=0)}, path=pathlib.Path("a/b"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([], r"the value is \[\]; it must be an object"),
        ({}, "inner is missing"),
        ({"inner": {"size": "3"}}, "inner.size is '3'; it must be a whole number"),
        ({"inner": {"size": True}}, "inner.size is true; it must be a whole number"),
        ({"inner": {"size": 1.0}}, "inner.size is 1.0; it must be a whole number"),
        ({"inner": {"size": -1}}, "inner cannot be: a size of -1"),
        ({"inner": {"size": 1, "names": "a"}}, "inner.names is 'a'; it must be a list"),
        ({"inner": {"size": 1, "names": [None]}}, r"inner.names\[0\] is null; it must be a text"),
        ({"inner": {"size": 1}, "rate": "fast"}, "rate is 'fast'; it must be a number"),
        ({"inner": {"size": 1}, "rates": 1}, "rates is no field of it; did you mean 'rate'"),
        ({"inner": {"size": 1}, "pair": [1]}, r"pair is \[1\]; it must be a list or null"),
        ({"inner": {"size": 1}, "table": {"k": {}}}, "table.k.size is missing"),
        ({"inner": {"size": 1}, "path": 3}, "path is 3; it must be a path"),
    ],
)
def test_a_wrong_value_is_named_with_its_path(value, text):
    with pytest.raises(Unreadable, match=text):
        build(Outer, value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested more than 32 deep"),
        ("[" * 40 + "]" * 40, "nested more than 32 deep"),
        ("[" + "0," * 2_000_000 + "0]", "more than 1000000 values"),
        ("NaN", "NaN is not a JSON number"),
        ("-Infinity", "-Infinity is not a JSON number"),
        ("1e999", "not finite"),
        ("9" * 30, "more than 64 bits"),
        ("9" * 5000, "not JSON"),
        (json.dumps("\ud800"), "half of a surrogate pair"),
        ("{", "not JSON"),
    ],
    ids=lambda value: value[:20],
)
def test_what_no_record_needs_is_refused(text, message):
    with pytest.raises(Unreadable, match=message):
        parse(text)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(Unreadable, match="No such file"):
        read(tmp_path / "absent")
    with pytest.raises(Unreadable, match="null byte"):
        read("a\0b")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(Unreadable, match="not UTF-8"):
        read(tmp_path / "binary")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(LIMIT_BYTES + 1)
    with pytest.raises(Unreadable, match=r"more than 16\.0 MiB"):
        read(tmp_path / "large")
