"""Presets against the parameter counts published with the checkpoints, and the checks of a configuration."""

import dataclasses

import pytest

from forebay.errors import InputError
from forebay.training.models import LlamaConfig, Rope, llama, preset, preset_names

pytestmark = pytest.mark.oldest

# As reported with each checkpoint on Hugging Face (safetensors metadata).
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "qwen-2.5-7b": 7_615_616_512,
    "qwen-3-8b": 8_190_735_360,
    "mistral-7b": 7_241_732_096,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameter_count_is_the_published_one(name):
    assert llama.parameter_count(preset(name)) == PUBLISHED[name]


def test_every_large_preset_has_a_published_count():
    assert {n for n in preset_names() if not n.startswith("tiny")} == set(PUBLISHED)


def test_an_unknown_model_names_the_nearest():
    with pytest.raises(InputError, match=r"no model 'llama-3\.1-7b'; did you mean .*'llama-3\.1-8b'"):
        preset("llama-3.1-7b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers is 0; it must be a whole number from 1"),
        ({"vocab": 2.5}, r"vocab is 2\.5"),
        ({"mlp": True}, "mlp is True"),
        ({"model": 10**30}, "model is 1000"),
        ({"window": 0}, "window is 0"),
        ({"kv_heads": 3}, "4 query heads cannot share 3 key/value heads"),
        ({"head_dim": 15}, "head_dim is 15; rotary positions need an even number"),
        ({"norm_eps": 0}, "norm_eps is 0"),
        ({"dtype": "float31"}, "dtype is 'float31'; did you mean"),
        ({"attention": "flash"}, "attention is 'flash'"),
        ({"attention": "cudnn"}, "cuDNN attention needs bfloat16 or float16 .* this is float32, head_dim 16"),
    ],
)
def test_a_field_that_cannot_be_used_is_named_with_its_value(change, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(preset("tiny"), **change)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "yarn"}, "rope type 'yarn' is not supported"),
        ({"theta": float("nan")}, "rope theta is nan"),
        ({"factor": -1.0}, r"rope factor is -1\.0"),
        ({"kind": "llama3", "high_frequency_factor": 1.0}, "must exceed low_frequency_factor"),
    ],
)
def test_a_rope_that_cannot_be_used_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        Rope(**fields)


def test_auto_attention_keeps_to_what_every_supported_gpu_has():
    assert preset("llama-3.1-8b").kernel == "cudnn"
    assert preset("tiny").kernel == "blockwise"  # float32
    wide = {"vocab": 256, "model": 256, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 256, "mlp": 256}
    assert LlamaConfig(**wide).kernel == "blockwise"
    assert LlamaConfig(**wide, attention="cudnn").kernel == "cudnn"  # asked for: Hopper and later have it
