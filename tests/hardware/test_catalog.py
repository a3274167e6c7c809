"""The catalog: every figure has a source, the chips of the design are there, and figures agree with each other where physics says so."""

import importlib.resources
import tomllib

import pytest

from forebay.errors import InputError
from forebay.hardware import Chip, Hardware, Quantity, catalog_names
from forebay.hardware.catalog import find_by_description, lookup

pytestmark = pytest.mark.oldest

CHIPS = [lookup(name) for name in catalog_names()]
GPUS = [chip for chip in CHIPS if chip.platform == "cuda"]
TENSOR_RATIOS = {"fp16": 1.0, "tf32": 0.5, "fp8": 2.0}


def _named(chip: Chip) -> str:
    return chip.name


def test_the_chips_that_the_design_promises_are_there():
    promised = "a100-sxm-40 a100-sxm-80 h100-sxm h100-pcie h200 b200 b300 gb200 gb300 gh200 l40s rtx-4090 rtx-5090 rtx-pro-6000"
    assert {*promised.split(), "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-7x"} <= set(catalog_names())


@pytest.mark.parametrize("chip", CHIPS, ids=_named)
def test_every_figure_has_a_source(chip):
    link, host = chip.link, chip.host
    figures = [chip.hbm_bytes, chip.hbm_bytes_per_second, *chip.peak_flops.values(), *chip.xla.values(), host.ram_bytes]
    figures += [link.to_device_bytes_per_second, link.to_host_bytes_per_second, link.both_bytes_per_second, host.dram_bytes_per_second]
    figures += [fabric.bytes_per_second for fabric in (chip.interconnect, chip.nic) if fabric]
    for figure in filter(None, figures):
        assert isinstance(figure, Quantity)
        assert len(figure.source) > 10
        assert figure.value > 0 or (figure.value == 0 and figure in chip.xla.values())


def test_every_source_is_cited_and_every_citation_has_a_source():
    files = [file for file in importlib.resources.files("forebay.hardware").joinpath("data").iterdir() if file.name.endswith(".toml")]
    tables = [tomllib.loads(file.read_text("utf-8")) for file in files]
    sources = [key for table in tables for key in table.get("source", {})]
    assert len(sources) == len(set(sources))
    cited = {value for table in tables for value in _strings({key: table[key] for key in table if key != "source"})}
    assert not set(sources) - cited


def _strings(value) -> list[str]:
    if isinstance(value, dict):
        return [text for part in value.values() for text in _strings(part)]
    if isinstance(value, list):
        return [text for part in value for text in _strings(part)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("chip", CHIPS, ids=_named)
def test_units_agree(chip):
    """A byte taken for a bit, a sparse rate for a dense one, or a GB for a GiB breaks one of these."""
    assert 10e9 < chip.hbm_bytes.value < 400e9
    assert 0.3e12 < chip.hbm_bytes_per_second.value < 10e12
    assert 100e12 < chip.peak_flops["bf16"].value < 3000e12
    for rate in (chip.link.to_device_bytes_per_second, chip.link.to_host_bytes_per_second):
        assert rate is None or 10e9 < rate.value < 500e9
    if chip.link.both_bytes_per_second:
        one_way = [chip.link.to_device_bytes_per_second.value, chip.link.to_host_bytes_per_second.value]
        assert max(one_way) < chip.link.both_bytes_per_second.value <= sum(one_way) + 1
    assert chip.nic is None or chip.interconnect is None or chip.nic.bytes_per_second.value < chip.interconnect.bytes_per_second.value


@pytest.mark.parametrize("chip", GPUS, ids=_named)
def test_dense_peaks_of_a_gpu_stand_in_their_ratios(chip):
    for dtype, ratio in TENSOR_RATIOS.items():
        if dtype in chip.peak_flops:
            assert chip.peak_flops[dtype].value == pytest.approx(ratio * chip.peak_flops["bf16"].value, rel=0.02), dtype


@pytest.mark.parametrize("chip", [chip for chip in GPUS if chip.name != "a100-pcie-80"], ids=_named)
def test_the_peak_of_a_gpu_is_what_its_cores_and_clock_can_do(chip):
    """Tensor cores do a power of two of multiply-adds per core and clock; the printed peak must be one of those, near the boost clock.

    Not a100-pcie-80: XLA publishes 1.1105 GHz for it, the boost clock is 1.41.
    """
    per_core = chip.peak_flops["bf16"].value / (2 * chip.xla["core_count"].value * chip.xla["clock_rate_ghz"].value * 1e9)
    assert min(abs(per_core / size - 1) for size in (256, 512, 1024, 2048, 4096)) < 0.14


@pytest.mark.parametrize("chip", GPUS, ids=_named)
def test_every_gpu_describes_itself_to_xla(chip):
    needed = "core_count clock_rate_ghz fpus_per_core l2_cache_size memory_bandwidth shared_memory_per_core shared_memory_per_block_optin"
    needed += " threads_per_block_limit threads_per_core_limit threads_per_warp registers_per_core_limit compute_capability_major"
    assert set(needed.split()) <= set(chip.xla)
    assert chip.derived == any(figure.kind in ("derived", "datasheet", "publication") for figure in (chip.xla["core_count"],))


def test_names_are_forgiven_case_underscores_and_missing_hyphens():
    assert lookup("H100_SXM") is lookup("h100-sxm")
    assert lookup("tpu7x") is lookup("tpu-7x")
    assert lookup("RTX4090") is lookup("rtx-4090")


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("h100", "choose h100-pcie or h100-sxm"),
        ("h10-sxm", "did you mean 'h100-sxm'"),
        ("tpu-v5", "choose tpu-v5e or tpu-v5p"),
        ("mi300", ""),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(wrong, hint):
    with pytest.raises(InputError) as error:
        lookup(wrong)
    assert repr(wrong) in str(error.value)
    assert hint in str(error.value)


@pytest.mark.parametrize("chip", CHIPS, ids=_named)
def test_a_chip_survives_json(chip):
    assert Chip.from_json(chip.to_json()) == chip


def test_a_driver_name_finds_its_chip():
    assert find_by_description("NVIDIA H200").name == "h200"
    assert find_by_description("NVIDIA A100 80GB PCIe").name == "a100-pcie-80"
    assert find_by_description("Radeon") is None


@pytest.mark.parametrize(("short", "full"), [("a100-80:4", "a100-sxm-80:4"), ("A100-40", "a100-sxm-40:1")])
def test_the_usual_short_name_is_the_usual_form(short, full):
    assert Hardware.named(short).name == full
