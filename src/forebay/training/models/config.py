"""The shape of one Llama-family decoder, checked when it is made."""

import dataclasses
import math

from forebay.errors import InputError, nearest

DTYPES = ("bfloat16", "float16", "float32", "float64")
ATTENTIONS = ("auto", "cudnn", "blockwise")
ROPE_KINDS = ("default", "linear", "llama3")
_LARGEST = 2**31 - 1  # token ids and dimensions are int32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions: the base ``theta`` and how frequencies are stretched for long contexts.

    ``linear`` divides every frequency by ``factor``; ``llama3`` divides those whose wavelength exceeds
    ``original_positions / low_frequency_factor`` and blends down to ``original_positions / high_frequency_factor``.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192

    def __post_init__(self):
        if self.kind not in ROPE_KINDS:
            raise InputError(f"rope type {self.kind!r} is not supported; {nearest(self.kind, ROPE_KINDS)}")
        for field in ("theta", "factor", "low_frequency_factor", "high_frequency_factor", "original_positions"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise InputError(f"rope {field} is {value!r}; it must be a positive number")
        if self.kind == "llama3" and self.high_frequency_factor <= self.low_frequency_factor:
            raise InputError(
                f"rope high_frequency_factor is {self.high_frequency_factor}; it must exceed low_frequency_factor "
                f"({self.low_frequency_factor})"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """A decoder of ``layers`` blocks over ``vocab`` token ids, ``model`` wide, ``mlp`` wide inside the SwiGLU.

    ``window`` limits attention to that many last positions (the token itself counts). ``dtype`` is what the layers compute
    in; parameters are float32 masters (float64 with float64). ``attention`` is the kernel: ``auto`` takes cuDNN on CUDA
    targets where it is certain to be supported and the blockwise form elsewhere.

    Raises:
        InputError: a field that is not usable, with its value.
    """

    name: str = "custom"
    vocab: int
    model: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    max_positions: int = 4096
    rope: Rope = Rope()
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    window: int | None = None
    dtype: str = "bfloat16"
    attention: str = "auto"

    def __post_init__(self):
        for field in ("vocab", "model", "layers", "heads", "kv_heads", "head_dim", "mlp", "max_positions"):
            self._check_count(field)
        if self.window is not None:
            self._check_count("window")
        if self.heads % self.kv_heads:
            raise InputError(f"{self.name}: {self.heads} query heads cannot share {self.kv_heads} key/value heads; use a divisor of heads")
        if self.head_dim % 2:
            raise InputError(f"{self.name}: head_dim is {self.head_dim}; rotary positions need an even number")
        if isinstance(self.norm_eps, bool) or not isinstance(self.norm_eps, int | float) or not 0 < self.norm_eps < 1:
            raise InputError(f"{self.name}: norm_eps is {self.norm_eps!r}; it must be a number between 0 and 1")
        for field, known in (("dtype", DTYPES), ("attention", ATTENTIONS)):
            if (value := getattr(self, field)) not in known:
                raise InputError(f"{self.name}: {field} is {value!r}; {nearest(str(value), known)}")
        if self.attention == "cudnn" and not self.cudnn_shape():
            raise InputError(
                f"{self.name}: cuDNN attention needs bfloat16 or float16 and a head_dim that is a multiple of 8, at most 256; "
                f"this is {self.dtype}, head_dim {self.head_dim}. Use attention='blockwise'"
            )

    def _check_count(self, field: str):
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST:
            raise InputError(f"{self.name}: {field} is {value!r}; it must be a whole number from 1 to {_LARGEST}")

    def cudnn_shape(self, limit: int = 256) -> bool:
        """Whether cuDNN has a kernel for this dtype and head size; ``limit`` is 256 from Hopper on, 128 before."""
        return self.dtype in ("bfloat16", "float16") and self.head_dim % 8 == 0 and self.head_dim <= limit

    @property
    def kernel(self) -> str:
        """``cudnn`` or ``blockwise``: what a CUDA target runs. The GPU is unknown while tracing, so auto keeps to 128."""
        if self.attention == "auto":
            return "cudnn" if self.cudnn_shape(limit=128) else "blockwise"
        return self.attention
