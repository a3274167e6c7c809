"""The planned run: the same steps under the plan, watched while they run.

The canary: before every step, arrays of NaN in the shapes of the whole state are made and freed again, so that memory which the step was
given and let go of holds NaN. A step that reads a buffer after it was donated then reads NaN, not yesterday's value.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forebay.plan import Plan, State
from forebay.runtime import place
from forebay.trust.reference import Outcome, plain
from forebay.trust.twin import Twin

COMPILED = "/jax/core/compile/backend_compile_duration"
KINDS = {"hbm": "device", "host": "pinned_host"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """``kept`` and ``misplaced`` name state arrays that were not consumed, and that do not stand as their entries say.

    ``compiles`` counts XLA compilations while the steps ran. ``used`` are bytes in use on each device before the state, with it, and at the
    highest point of this process; None where the backend does not tell.
    """

    outcome: Outcome
    kept: tuple[str, ...]
    misplaced: tuple[str, ...]
    compiles: int
    used: tuple[tuple[int, int, int], ...] | None


def run(twin: Twin, step: Callable) -> Run:
    """Place the twin's values, run all of its steps, and look at the state in between."""
    plan = twin.plan
    before = _in_use(twin)
    state = place(twin.params, twin.work.optimizer, plan, key=twin.key, mesh=twin.mesh, extra=twin.extra)
    with_state = _in_use(twin)
    batches = [jax.device_put(batch, batch_shardings(twin)) for batch in twin.batches]
    metrics, kept = [], []
    names = _names(plan)
    with compilations() as compiled:
        for batch in batches:
            _poison(state)
            old = state.stored_params + state.stored_opt_state
            state, measured = step(state, batch)
            # jit keeps a scalar that nothing reads (an injected hyperparameter), so arrays of one element may be left.
            kept += [name for name, leaf in zip(names, old, strict=True) if leaf.size > 1 and not leaf.is_deleted()]
            metrics.append(measured)
        jax.block_until_ready((state, metrics))
    highest = _in_use(twin, "peak_bytes_in_use")
    return Run(
        outcome=_outcome(state, metrics), kept=tuple(dict.fromkeys(kept)), misplaced=tuple(misplaced(plan, state)),
        compiles=len(compiled), used=tuple(zip(before, with_state, highest, strict=True)) or None,
    )  # fmt: skip


def undonated(twin: Twin, step: Callable) -> Callable:
    """The same step with nothing donated: a donation inside another jit is none."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, twin.plan.abstract_state(twin.mesh))
    return jax.jit(lambda state, batch: step(state, batch), out_shardings=(shardings, None))


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
    """The seconds of every XLA compilation of this process in the meantime."""
    found: list[float] = []

    def note(event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILED:
            found.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def misplaced(plan: Plan, state: State) -> Iterator[str]:
    """What is wrong with arrays of the state: memory kind, shape, or bytes on a device."""
    entries = (*plan.role("parameter"), *plan.role("optimizer"))
    for entry, array in zip(entries, state.stored_params + state.stored_opt_state, strict=True):
        kind, size = array.sharding.memory_kind, array.addressable_shards[0].data.nbytes
        if kind != KINDS[entry.placement]:
            yield f"{entry.name} stands in {kind} memory, planned {KINDS[entry.placement]}"
        elif (array.shape, size) != (entry.shape, entry.bytes_per_device):
            wanted = f"{list(entry.shape)} of {entry.bytes_per_device} bytes"
            yield f"{entry.name} is {list(array.shape)} of {size} bytes per device, planned {wanted}"


def _names(plan: Plan) -> list[str]:
    return [e.name for e in (*plan.role("parameter"), *plan.role("optimizer"))]


def batch_shardings(twin: Twin) -> Any:
    """Where the rows of a batch stand."""
    return jax.tree.map(lambda leaf: leaf.sharding, twin.plan.abstract_batch(twin.mesh))


def _poison(state: State) -> None:
    floats = [leaf for leaf in state.stored_params + state.stored_opt_state if jnp.issubdtype(leaf.dtype, jnp.floating)]
    made = [jax.device_put(np.full(leaf.shape, np.nan, leaf.dtype), leaf.sharding) for leaf in floats]
    jax.block_until_ready(made)
    for leaf in made:
        leaf.delete()


def _in_use(twin: Twin, field: str = "bytes_in_use") -> list[int]:
    """Bytes on each local device, in the backend's own count; none where it does not count."""
    stats = [device.memory_stats() for device in twin.mesh.local_devices]
    return [s[field] for s in stats] if all(s and field in s for s in stats) else []


def _outcome(state: State, metrics: list[dict[str, Any]]) -> Outcome:
    found = lambda name: np.array([float(m[name]) for m in metrics])  # noqa: E731
    params, opt_state, extra = plain((state.params, state.opt_state, state.extra))
    return Outcome(losses=found("loss"), norms=found("grad_norm"), params=params, opt_state=opt_state, extra=extra)
