"""Shapes as HLO text prints them: element type, dimensions, layout, memory space; tuples of such.

``f32[8,128]{1,0:T(8,128)S(5)}`` is an array of 4096 bytes in memory space 5 (host memory). Sizes are logical: padding by tiles is
not counted."""

import functools
import math
import re
from dataclasses import dataclass

from forebay.errors import InputError
from forebay.records.reading import LARGEST_INTEGER

HOST_SPACE = 5
"""Memory space of pinned host memory on GPU and TPU, printed ``S(5)``."""
VECTOR_SPACE = 1
"""Memory space of on-chip vector memory on TPU, printed ``S(1)``."""

_BITS = {"pred": 8, "token": 0, "opaque": 0, "tuple": 0, "bf16": 16, "c64": 64, "c128": 128, "f4e2m1fn": 4, "f8e8m0fnu": 8}
_NUMBER = re.compile(r"(?:[sufb]|bf)(\d+)(?:e\d+m\d+\w*)?\Z")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^{}]*)\})?")
_ANNOTATION = re.compile(r"(?:([A-Z]+|#)((?:\([^()]*(?:\([^()]*\))?[^()]*\))+)|\*)")
_KNOWN_ANNOTATIONS = frozenset({"T", "S", "E", "D", "L", "M", "SC", "P", "#"})
_COMMENT = re.compile(r"/\*.*?\*/")


class HloSyntaxError(InputError):
    """A piece of HLO text that this parser does not know; it is never guessed."""


@dataclass(frozen=True, slots=True)
class Array:
    """An array shape. ``minor_to_major`` is empty where the text gives no layout."""

    dtype: str
    dimensions: tuple[int, ...]
    minor_to_major: tuple[int, ...] = ()
    space: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.dimensions)

    @property
    def bytes(self) -> int:
        return (self.elements * element_bits(self.dtype) + 7) // 8

    @property
    def on_host(self) -> bool:
        return self.space == HOST_SPACE


@dataclass(frozen=True, slots=True)
class Tuple:
    """A tuple of shapes, possibly nested."""

    elements: tuple["Array | Tuple", ...]

    @property
    def bytes(self) -> int:
        return sum(a.bytes for a in arrays(self))


Shape = Array | Tuple


@functools.cache
def element_bits(dtype: str) -> int:
    """Bits of one element of an HLO type name such as ``bf16``, ``f8e4m3fn``, ``s4``; an unknown name is an error."""
    if dtype in _BITS:
        return _BITS[dtype]
    match = _NUMBER.match(dtype)
    if match is None:
        raise HloSyntaxError(f"unknown HLO element type {dtype!r}; its size cannot be told, so the program cannot be costed")
    return int(match.group(1))


def arrays(shape: Shape) -> tuple[Array, ...]:
    """The array leaves of a shape, left to right."""
    if isinstance(shape, Array):
        return (shape,)
    leaves: list[Array] = []
    stack = list(reversed(shape.elements))
    while stack:
        item = stack.pop()
        if isinstance(item, Array):
            leaves.append(item)
        else:
            stack.extend(reversed(item.elements))
    return tuple(leaves)


@functools.lru_cache(maxsize=65536)
def parse_shape(text: str) -> Shape:
    """A whole shape text; trailing text is an error."""
    text = _COMMENT.sub("", text).strip()
    shape, end = read_shape(text, 0)
    if end != len(text):
        raise HloSyntaxError(f"unexpected text after the shape {text[:end]!r}: {text[end : end + 40]!r}")
    return shape


def read_shape(text: str, at: int) -> tuple[Shape, int]:
    """The shape that starts at ``at`` (comments removed beforehand) and the position after it. Nesting is kept on an explicit stack."""
    stack: list[list[Shape]] = []
    while True:
        at = _skip_spaces(text, at)
        if text[at : at + 1] == "(":
            stack.append([])
            at = _skip_spaces(text, at + 1)
            if text[at : at + 1] != ")":
                continue
        else:
            item, at = _read_array(text, at)
            if not stack:
                return item, at
            stack[-1].append(item)
            at = _skip_spaces(text, at)
        while text[at : at + 1] == ")":
            done = Tuple(tuple(stack.pop()))
            if not stack:
                return done, at + 1
            stack[-1].append(done)
            at = _skip_spaces(text, at + 1)
        if text[at : at + 1] != ",":
            raise HloSyntaxError(f"a tuple shape needs ',' or ')' at {text[at : at + 40]!r}")
        at += 1


def _skip_spaces(text: str, at: int) -> int:
    while at < len(text) and text[at] == " ":
        at += 1
    return at


def _read_array(text: str, at: int) -> tuple[Array, int]:
    match = _ARRAY.match(text, at)
    if match is None:
        raise HloSyntaxError(f"expected a shape at {text[at : at + 60]!r}")
    return _array(match.group(1), match.group(2), match.group(3) or ""), match.end()


@functools.lru_cache(maxsize=65536)
def _array(dtype: str, dimensions: str, layout: str) -> Array:
    element_bits(dtype)
    sizes = tuple(int(d.strip().removeprefix("<=")) for d in dimensions.split(",") if d.strip())
    if math.prod(sizes) > LARGEST_INTEGER:
        raise HloSyntaxError(f"an array of {dimensions} elements is larger than any memory")
    order, _, annotations = layout.partition(":")
    minor = tuple(int(i) for i in order.split(",") if i.strip())
    return Array(dtype, sizes, minor, _memory_space(annotations))


def _memory_space(annotations: str) -> int:
    at, space = 0, 0
    while at < len(annotations):
        match = _ANNOTATION.match(annotations, at)
        if match is None or (match.group(1) or "T") not in _KNOWN_ANNOTATIONS:
            raise HloSyntaxError(f"unknown layout annotation {annotations[at:]!r}")
        if match.group(1) == "S":
            space = int(match.group(2)[1:-1])
        at = match.end()
    return space
