"""Hugging Face configurations: published ones become the presets, and what cannot be used is named."""

import dataclasses
import json

import pytest

from forebay.errors import InputError
from forebay.training.models import load_config, preset

pytestmark = pytest.mark.oldest

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "vocab_size": 128256,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
                     "rope_type": "llama3"},
}  # fmt: skip
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
    "max_position_embeddings": 131072, "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "use_sliding_window": False,
    "vocab_size": 152064, "attention_dropout": 0.0, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3 = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
    "max_position_embeddings": 40960, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "sliding_window": None, "vocab_size": 151936, "rope_scaling": None, "rope_theta": 1000000, "attention_bias": False,
}  # fmt: skip
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000,
}  # fmt: skip


def write(tmp_path, values):
    path = tmp_path / "config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("values", "name"), [(LLAMA, "llama-3.1-8b"), (QWEN2, "qwen-2.5-7b"), (QWEN3, "qwen-3-8b"), (MISTRAL, "mistral-7b")]
)
def test_the_published_file_is_the_preset(tmp_path, values, name):
    write(tmp_path, values)
    assert dataclasses.replace(load_config(tmp_path), name=name) == preset(name)  # the folder is as good as the file


def test_rope_parameters_of_newer_files_are_read(tmp_path):
    new = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = LLAMA["rope_scaling"] | {"rope_theta": 500000.0}
    assert load_config(write(tmp_path, new)).rope == preset("llama-3.1-8b").rope


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "holds a JSON list; a model configuration is an object"),
        ("[" * 200_000, "nested more than 32 deep"),
        ('{"a": "' + "x" * (1 << 20) + '"}', "it has more than 1.0 MiB"),
        ('{"n": ' + "9" * 5000 + "}", "not JSON"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(InputError, match=message) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        load_config(tmp_path / "absent.json")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="it is not UTF-8 text"):
        load_config(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        load_config("config\0.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "the field 'hidden_size' is missing"),
        ({"vocab_size": "many"}, "vocab_size is 'many'; it must be int"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; it must be int"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_hidden_layers": -3}, "layers is -3"),
        ({"hidden_size": 4097}, "4097 is not a multiple of num_attention_heads 32"),
        ({"architectures": ["GemmaForCausalLM"]}, "architecture 'GemmaForCausalLM' is not supported"),
        ({"architectures": [], "model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"architectures": None, "model_type": None}, "the field 'model_type' is missing"),
        ({"model_type": "qwen2"}, "model_type 'qwen2' and architecture 'LlamaForCausalLM' disagree"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: the field 'factor' is missing"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3'; it must be dict"),
        ({"rope_theta": float("inf")}, "Infinity is not a JSON number"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5"),
        ({"attention_dropout": 0.1}, r"attention_dropout is 0\.1"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers of several kinds"),
    ],
)
def test_what_is_missing_or_unsupported_is_named(tmp_path, change, message):
    path = write(tmp_path, LLAMA | change)
    with pytest.raises(InputError, match=message) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_a_window_on_some_layers_is_refused(tmp_path):
    with pytest.raises(InputError, match="max_window_layers"):
        load_config(write(tmp_path, QWEN2 | {"use_sliding_window": True}))
