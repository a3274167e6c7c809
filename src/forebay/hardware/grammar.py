"""How a machine is written: ``h100-sxm``, ``h100-sxm:8``, ``h100-sxm:16x8`` (hosts x devices), ``tpu-v5p:2x2x1`` (libtpu's topology).

GPUs: ``name:N`` is N devices in whole nodes, so 16 of an 8-GPU node is 2 x 8, and a number that does not fill its nodes is an error.
TPUs: the topology is written out in chips, and the number of hosts follows from the block of the grid that one host holds.
"""

import math
import re
from dataclasses import dataclass

from forebay.errors import InputError
from forebay.hardware.catalog import lookup
from forebay.hardware.chip import Chip

MOST_DEVICES = 131072
"""More than any machine that was published; a larger number is a slip of the pen, and would take the compiler hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A machine as it was asked for: the chip, hosts, jax devices on each, and the topology in the words of the chip's compiler."""

    chip: Chip
    name: str
    hosts: int
    devices_per_host: int
    topology: str


def parse(text: str) -> Request:
    """The machine that ``text`` names.

    Raises:
        InputError: an unknown chip, a count that is not a number or not positive, a node that is not filled, or a shape that the
            chip's hosts cannot make.
    """
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{text!r} is not the name of a machine; write one such as h100-sxm:8 or tpu-v5p:2x2x1")
    return parse_shape(lookup(text.strip().partition(":")[0]), text)


def parse_shape(chip: Chip, text: str) -> Request:
    """The machine that ``text`` makes of ``chip``: what stands behind the colon is read, and ``chip.name`` is the name before it.

    Raises:
        InputError: as ``parse``, but for the chip; or a CPU, of which there is one.
    """
    _, colon, shape = text.strip().partition(":")
    if chip.platform == "cpu":
        raise InputError(f"{text!r}: {chip.name} is a CPU machine, which has no number of devices; write {chip.name} alone")
    if colon and not shape:
        raise InputError(f"{text!r} ends in a colon; write {_example(chip)}, or {chip.name} alone")
    if chip.platform == "tpu":
        return _tpu(chip, shape.strip().lower(), text)
    return _gpu(chip, shape.strip().lower(), text)


def _example(chip: Chip) -> str:
    if chip.platform == "tpu":
        return f"{chip.name}:{'x'.join(map(str, chip.host.bounds))}"
    return f"{chip.name}:{chip.host.chips}"


def _numbers(chip: Chip, shape: str, text: str) -> list[int]:
    """The positive whole numbers of ``2x8``."""
    if not re.fullmatch(r"-?[0-9]+(x-?[0-9]+)*", shape):
        raise InputError(f"{shape!r} in {text!r} is not a number of devices; write {_example(chip)}")
    numbers = [int(number) for number in shape.split("x")]
    if min(numbers) < 1:
        raise InputError(f"{shape!r} in {text!r}: a machine has at least one device; write {_example(chip)}")
    if math.prod(numbers) > MOST_DEVICES:
        raise InputError(f"{shape!r} in {text!r} is {math.prod(numbers)} devices; forebay plans for at most {MOST_DEVICES}")
    return numbers


def _gpu(chip: Chip, shape: str, text: str) -> Request:
    node = chip.host.chips
    numbers = _numbers(chip, shape or "1", text)
    if len(numbers) > 2:
        raise InputError(
            f"{shape!r} in {text!r} has {len(numbers)} numbers; a GPU machine is devices or hosts x devices: "
            f"{chip.name}:{node} or {chip.name}:2x{node}"
        )
    if len(numbers) == 2:
        hosts, devices = numbers
    else:
        hosts, devices = _whole_nodes(chip, numbers[0], text)
    if devices > node:
        raise InputError(
            f"{text!r} asks for {devices} devices on one host, but a {chip.name} node holds {node}; write {chip.name}:{hosts}x{node}"
        )
    name = f"{chip.name}:{hosts * devices}" if hosts == 1 or devices == node else f"{chip.name}:{hosts}x{devices}"
    return Request(chip=chip, name=name, hosts=hosts, devices_per_host=devices, topology=f"1x{hosts}x{devices}")


def _whole_nodes(chip: Chip, count: int, text: str) -> tuple[int, int]:
    node = chip.host.chips
    if count <= node:
        return 1, count
    if count % node:
        below, above = count // node * node, (count // node + 1) * node
        even = next(devices for devices in range(node, 0, -1) if count % devices == 0)
        raise InputError(
            f"{text!r}: {count} devices do not fill whole nodes of {node}; write {chip.name}:{below} or {chip.name}:{above}, "
            f"or hosts x devices such as {chip.name}:{count // even}x{even}"
        )
    return count // node, node


def _tpu(chip: Chip, shape: str, text: str) -> Request:
    bounds = chip.host.bounds
    grid = _numbers(chip, shape, text) if shape else list(bounds)
    if len(grid) != len(bounds):
        raise InputError(
            f"{shape!r} in {text!r}: a {chip.name} machine is written as its topology in chips, "
            f"{len(bounds)} numbers such as {_example(chip)}"
        )
    chips = math.prod(grid)
    if chips > chip.pod_chips:
        raise InputError(f"{text!r} is {chips} chips, but a slice of {chip.name} has at most {chip.pod_chips}")
    hosts, on_host = _tpu_hosts(chip, grid, text)
    written = "x".join(map(str, grid))
    devices = on_host * chip.devices_per_chip
    topology = f"{chip.compiler_name}:{written}"
    return Request(chip=chip, name=f"{chip.name}:{written}", hosts=hosts, devices_per_host=devices, topology=topology)


def _tpu_hosts(chip: Chip, grid: list[int], text: str) -> tuple[int, int]:
    """Hosts of ``grid`` and chips on each: one host where the grid fits into its block, else whole blocks."""
    bounds = chip.host.bounds
    if all(side <= bound for side, bound in zip(grid, bounds, strict=True)):
        return 1, math.prod(grid)
    if any(side % bound for side, bound in zip(grid, bounds, strict=True)):
        block = "x".join(map(str, bounds))
        raise InputError(f"{text!r} is not made of whole hosts: one {chip.name} host holds a block of {block} chips")
    return math.prod(grid) // math.prod(bounds), math.prod(bounds)
