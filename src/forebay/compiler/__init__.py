"""The compiler stage: any jittable function and a machine in, a Verdict out, from the target's real compiler.

A program is lowered in the user's process without touching its devices and compiled in a worker process, because XLA may abort
and reads its flags once per process. The package imports ``records``, ``hardware`` (by the shape of its objects) and jax;
jax only when ``judge`` is called, so that the worker can set its environment first.
"""

__all__ = ["judge"]


def __getattr__(name: str):
    if name != "judge":
        raise AttributeError(f"module 'forebay.compiler' has no attribute {name!r}")
    from forebay.compiler.judging import judge

    return judge
