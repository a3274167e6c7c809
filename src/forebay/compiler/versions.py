"""Which compiler stands on this machine: versions read from installed packages, without loading any of them."""

import functools
from importlib import metadata

from forebay.errors import CompilerError

_PACKAGES = {
    "jax": ("jax",),
    "jaxlib": ("jaxlib",),
    "plugin": ("jax-cuda13-plugin", "jax-cuda12-plugin"),
    "cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "libtpu": ("libtpu",),
}
_NEEDS = {"cuda": ("plugin", "compile-gpu"), "tpu": ("libtpu", "compile-tpu")}


@functools.cache
def installed() -> dict[str, str]:
    """Versions of jax, jaxlib, the CUDA plugin, cuDNN and libtpu; what is not installed is left out."""
    found = {}
    for word, packages in _PACKAGES.items():
        for package in packages:
            try:
                found.setdefault(word, metadata.version(package))
            except metadata.PackageNotFoundError:
                continue
    return found


def require(platform: str) -> None:
    """Raises CompilerError, naming the extra to install, where the compiler of ``platform`` is not installed."""
    word, extra = _NEEDS.get(platform, ("jaxlib", ""))
    if word not in installed():
        raise CompilerError(
            f"the compiler for {platform} is not installed: none of {', '.join(_PACKAGES[word])} is there. "
            f"Install it with: pip install 'forebay[{extra}]' (no {'GPU' if platform == 'cuda' else 'TPU'} and no driver is needed)"
        )
