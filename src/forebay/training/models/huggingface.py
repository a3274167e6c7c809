"""Read a Hugging Face ``config.json`` into a `LlamaConfig`. Nothing in the file is executed, only known fields are read.

Supported families: llama, mistral, qwen2, qwen3 (dense, SwiGLU, rotary positions). Anything that would change the
mathematics and is not implemented is refused by name; nothing is quietly ignored.
"""

import pathlib
from typing import Any

from forebay.errors import InputError, nearest
from forebay.records import reading
from forebay.training.models.config import LlamaConfig, Rope

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
}  # fmt: skip
_LARGEST_FILE_BYTES = 1 << 20
_MISSING = object()


class _Fields:
    """Typed reads from the parsed object; each error names the file and the field."""

    def __init__(self, values: dict, where: str):
        self.values, self.where = values, where

    def get(self, field: str, kinds: tuple[type, ...], default: Any = _MISSING) -> Any:
        value = self.values.get(field, None)
        if value is None:
            if default is _MISSING:
                raise InputError(f"{self.where}: the field {field!r} is missing")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(k.__name__ for k in kinds)
            raise InputError(f"{self.where}: {field} is {_short(value)}; it must be {wanted}")
        return value

    def integer(self, field: str, default: Any = _MISSING) -> Any:
        return self.get(field, (int,), default)

    def number(self, field: str, default: Any = _MISSING) -> Any:
        return self.get(field, (int, float), default)

    def flag(self, field: str, default: bool) -> bool:
        return self.get(field, (bool,), default)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def load_config(path: str | pathlib.Path) -> LlamaConfig:
    """The model described by ``path``: a Hugging Face ``config.json``, or the folder that holds one.

    Raises:
        InputError: the file is missing, too large, not JSON, lacks a field, or describes a model that is not supported.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        path = path / "config.json"
    values = _read(path)
    fields = _Fields(values, str(path))
    family = _family(fields)
    _refuse_unsupported(fields, family)
    heads = fields.integer("num_attention_heads")
    model = fields.integer("hidden_size")
    if heads < 1:
        raise InputError(f"{path}: num_attention_heads is {heads}; it must be at least 1")
    head_dim = fields.integer("head_dim", None)
    if head_dim is None and model % heads:
        raise InputError(f"{path}: hidden_size {model} is not a multiple of num_attention_heads {heads}, and there is no head_dim")
    try:
        return LlamaConfig(
            name=str(fields.get("_name_or_path", (str,), "") or path.parent.name or family),
            vocab=fields.integer("vocab_size"),
            model=model,
            layers=fields.integer("num_hidden_layers"),
            heads=heads,
            kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=head_dim if head_dim is not None else model // heads,
            mlp=fields.integer("intermediate_size"),
            max_positions=fields.integer("max_position_embeddings", 4096),
            rope=_rope(fields),
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            tied=fields.flag("tie_word_embeddings", False),
            window=_window(fields, family),
        )
    except InputError as error:
        if str(path) in str(error):
            raise
        raise InputError(f"{path}: {error}") from error


def _read(path: pathlib.Path) -> dict:
    if not path.exists():
        raise InputError(f"{path}: there is no such file; give a Hugging Face config.json or the folder that holds it")
    try:
        values = reading.read(path, _LARGEST_FILE_BYTES)
    except reading.Unreadable as problem:
        raise InputError(f"{path}: this is no model configuration: {problem}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: holds a JSON {type(values).__name__}; a model configuration is an object")
    return values


def _family(fields: _Fields) -> str:
    architectures = fields.get("architectures", (list,), [])
    family = fields.get("model_type", (str,), "")
    named = [a for a in architectures if isinstance(a, str)]
    for name in named:
        if name not in _ARCHITECTURES:
            raise InputError(f"{fields.where}: architecture {_short(name)} is not supported; {nearest(name, _ARCHITECTURES)}")
    if named and not family:
        family = _ARCHITECTURES[named[0]]
    if not family:
        raise InputError(f"{fields.where}: the field 'model_type' is missing")
    if family not in _ARCHITECTURES.values():
        raise InputError(f"{fields.where}: model_type {_short(family)} is not supported; {nearest(family, _ARCHITECTURES.values())}")
    if named and _ARCHITECTURES[named[0]] != family:
        raise InputError(f"{fields.where}: model_type {family!r} and architecture {named[0]!r} disagree")
    return family


def _refuse_unsupported(fields: _Fields, family: str):
    for field in ("attention_bias", "mlp_bias"):
        if fields.flag(field, False):
            raise InputError(f"{fields.where}: {field} is true; biases other than qwen2's q, k, v are not supported")
    if (act := fields.get("hidden_act", (str,), "silu")) != "silu":
        raise InputError(f"{fields.where}: hidden_act is {_short(act)}; only 'silu' is supported")
    if (partial := fields.number("partial_rotary_factor", 1.0)) != 1:
        raise InputError(f"{fields.where}: partial_rotary_factor is {partial}; only 1 is supported")
    for field in ("attention_dropout", "hidden_dropout"):
        if (rate := fields.number(field, 0.0)) != 0:
            raise InputError(f"{fields.where}: {field} is {rate}; dropout is not supported")
    kinds = {str(k) for k in fields.get("layer_types", (list,), [])}
    if len(kinds) > 1:
        raise InputError(f"{fields.where}: layers of several kinds ({', '.join(sorted(kinds))}) are not supported")


def _window(fields: _Fields, family: str) -> int | None:
    window = fields.integer("sliding_window", None)
    kinds = fields.get("layer_types", (list,), [])
    if family in ("qwen2", "qwen3"):
        if not fields.flag("use_sliding_window", False):
            return None
        if fields.integer("max_window_layers", 0) != 0:
            raise InputError(f"{fields.where}: a sliding window on some of the layers (max_window_layers) is not supported")
        return window
    if family == "llama" or (kinds and kinds[0] == "full_attention"):
        return None
    return window


def _rope(fields: _Fields) -> Rope:
    scaling = fields.get("rope_scaling", (dict,), None) or fields.get("rope_parameters", (dict,), None) or {}
    inner = _Fields(scaling, f"{fields.where}: rope_scaling")
    theta = fields.number("rope_theta", None) or inner.number("rope_theta", 10_000.0)
    kind = inner.get("rope_type", (str,), None) or inner.get("type", (str,), "default")
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=inner.number("factor"))
    if kind == "llama3":
        return Rope(
            theta=theta,
            kind=kind,
            factor=inner.number("factor"),
            low_frequency_factor=inner.number("low_freq_factor"),
            high_frequency_factor=inner.number("high_freq_factor"),
            original_positions=inner.integer("original_max_position_embeddings"),
        )
    return Rope(theta=theta, kind=kind)
