"""Named models with their published dimensions, and the door to all others: a Hugging Face ``config.json``.

Sources: the ``config.json`` published with each checkpoint (meta-llama, Qwen, mistralai on Hugging Face).
`tests/training/models/test_presets.py` holds each against its published parameter count.
"""

from forebay.errors import InputError, nearest
from forebay.training.models.config import LlamaConfig, Rope
from forebay.training.models.huggingface import load_config

__all__ = ["find", "is_file", "load_config", "preset", "preset_names"]

_LLAMA3 = Rope(theta=500_000.0, kind="llama3", factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0)
_LLAMA32 = Rope(theta=500_000.0, kind="llama3", factor=32.0, low_frequency_factor=1.0, high_frequency_factor=4.0)
_MILLION = Rope(theta=1_000_000.0)


def _sizes(vocab: int, model: int, layers: int, heads: int, kv_heads: int, head_dim: int, mlp: int) -> dict:
    return {"vocab": vocab, "model": model, "layers": layers, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "mlp": mlp}


_PRESETS = {
    "llama-2-7b": _sizes(32000, 4096, 32, 32, 32, 128, 11008),
    "llama-2-70b": _sizes(32000, 8192, 80, 64, 8, 128, 28672),
    "llama-3.1-8b": _sizes(128256, 4096, 32, 32, 8, 128, 14336) | {"rope": _LLAMA3, "max_positions": 131072},
    "llama-3.1-70b": _sizes(128256, 8192, 80, 64, 8, 128, 28672) | {"rope": _LLAMA3, "max_positions": 131072},
    "llama-3.1-405b": _sizes(128256, 16384, 126, 128, 8, 128, 53248) | {"rope": _LLAMA3, "max_positions": 131072},
    "llama-3.2-1b": _sizes(128256, 2048, 16, 32, 8, 64, 8192) | {"rope": _LLAMA32, "max_positions": 131072, "tied": True},
    "qwen-2.5-7b": _sizes(152064, 3584, 28, 28, 4, 128, 18944)
    | {"rope": _MILLION, "max_positions": 131072, "norm_eps": 1e-6, "qkv_bias": True},
    "qwen-3-8b": _sizes(151936, 4096, 36, 32, 8, 128, 12288)
    | {"rope": _MILLION, "max_positions": 40960, "norm_eps": 1e-6, "qk_norm": True},
    "mistral-7b": _sizes(32000, 4096, 32, 32, 8, 128, 14336) | {"max_positions": 32768, "window": 4096},
    # For CPUs and tests: byte-sized vocabularies (256 bytes and room for special tokens).
    "tiny": _sizes(320, 64, 4, 4, 4, 16, 176) | {"dtype": "float32", "max_positions": 512},
    "tiny-gqa": _sizes(320, 64, 4, 4, 2, 16, 176) | {"dtype": "float32", "max_positions": 512, "rope": _LLAMA3},
    "tiny-qwen": _sizes(320, 64, 4, 4, 2, 16, 176) | {"dtype": "float32", "max_positions": 512, "qkv_bias": True, "qk_norm": True},
    "tiny-mistral": _sizes(320, 64, 4, 4, 2, 16, 176) | {"dtype": "float32", "max_positions": 512, "window": 24},
    "tiny-tied": _sizes(320, 64, 4, 4, 2, 16, 176) | {"dtype": "float32", "max_positions": 512, "tied": True},
}


def preset_names() -> list[str]:
    """The names that `preset` knows, largest families first."""
    return list(_PRESETS)


def is_file(model: str) -> bool:
    """Whether ``--model`` names a Hugging Face config.json, not a preset."""
    return model.endswith(".json") or "/" in model


def find(model: str) -> LlamaConfig:
    """The model configuration behind ``--model``: a preset, or the path of a Hugging Face config.json.

    Raises:
        InputError: there is no such preset, or the file is not a configuration that forebay knows.
    """
    return load_config(model) if is_file(model) else preset(model)


def preset(name: str) -> LlamaConfig:
    """The published configuration called ``name``, for example ``llama-3.1-8b``.

    Raises:
        InputError: no such preset; the text names the nearest.
    """
    fields = _PRESETS.get(name)
    if fields is None:
        raise InputError(f"there is no model {name!r}; {nearest(name, _PRESETS)} A Hugging Face config.json is welcome too")
    return LlamaConfig(name=name, **fields)
