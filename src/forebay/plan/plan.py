"""``Plan``: a placement for every tensor, with its reason; what a train step carries out and a verdict proves."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from forebay.errors import PlanError
from forebay.plan import binding, copies, planfile
from forebay.plan import by_hand as hand
from forebay.plan.fusion import gradient_dependent, shared_reads, why_not
from forebay.plan.halves import halves
from forebay.plan.options import unsliced_axes
from forebay.plan.state import Layout, State
from forebay.plan.streams import Stream, align, choose_stream
from forebay.records import Entry, Verdict
from forebay.workload import Workload
from forebay.workload.sharding import MeshShape, named


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Where each tensor of a training step stands on a machine, and why.

    ``entries`` hold bytes per device. ``mesh`` is None for one device. ``hardware`` is the machine as ``Hardware.to_json`` wrote
    it, or None. ``work`` is the traced workload; a plan read from a file has none until it is bound to one (``train_step``,
    ``init`` and ``bind`` do that, and refuse a workload that the plan was not made for).
    """

    workload: Mapping[str, Any]
    signature: Mapping[str, str]
    hardware: Mapping[str, Any] | None
    mesh: MeshShape | None
    entries: tuple[Entry, ...]
    options: Mapping[str, Any]
    verdict: Verdict | None = None
    forecast: Any = None
    candidates: tuple[Mapping[str, Any], ...] = ()
    work: Workload | None = dataclasses.field(default=None, repr=False)

    @classmethod
    def by_hand(
        cls, work: Workload, rules: Mapping[str, str] | None = None, hardware: Any = None, options: Mapping[str, Any] | None = None
    ) -> "Plan":
        """A plan from rules such as ``{"optimizer": "host", "activation:attn_*": "recompute"}``; the last match wins.

        Without shardings on the workload, forebay proposes FSDP over ``hardware``'s devices; without hardware, one device.

        Raises:
            InputError: a rule matches nothing, or the batch does not divide over the devices.
            PlacementError: a tensor cannot stand where a rule puts it.
        """
        made = hand.draft(work, rules or {}, hardware, options or {})
        if cuts := halves(cls._of(work, hardware, made)):
            made = hand.draft(work, rules or {}, hardware, options or {}, cuts)
        plan = cls._of(work, hardware, made)
        plan = dataclasses.replace(plan, entries=hand.with_fusion(plan))
        return dataclasses.replace(plan, entries=copies.with_copies(plan))

    @classmethod
    def _of(cls, work: Workload, hardware: Any, made: hand.Draft) -> "Plan":
        described = {
            "model": work.name, "parameters": work.parameters, "fingerprint": work.fingerprint, **_batch_facts(work),
            "mesh": None if made.mesh is None else dict(zip(made.mesh.names, made.mesh.sizes, strict=True)),
        }  # fmt: skip
        return cls(
            workload=described, signature=work.signature, hardware=hardware.to_json() if hardware is not None else None, mesh=made.mesh,
            entries=made.entries, options=made.options, work=made.work,
        )  # fmt: skip

    def placement(self, name: str) -> str:
        """The placement of the entry ``name``."""
        return self._by_name[name].placement

    @functools.cached_property
    def _by_name(self) -> dict[str, Entry]:
        return {e.name: e for e in self.entries}

    def role(self, role: str) -> tuple[Entry, ...]:
        """The entries of one role, in the order of the stored arrays; compute copies are not among them."""
        return tuple(e for e in self.entries if e.role == role and e.copy_of is None)

    @functools.cached_property
    def copies(self) -> dict[int, Entry]:
        """The compute copies by the stored parameter that each is a copy of, in the order in which a State holds them."""
        of = {e.copy_of: e for e in self.entries if e.copy_of is not None}
        return {p: of[e.name] for p, e in enumerate(self.role("parameter")) if e.name in of}

    @property
    def compiler_options(self) -> dict[str, object]:
        """XLA options that the step must be compiled with."""
        return dict(self.options.get("compiler", {}))

    def bind(self, work: Workload) -> "Plan":
        """This plan for ``work``.

        Raises:
            PlanError: the plan was made for other shapes; the message says which.
        """
        if dict(self.signature) != work.signature:
            raise PlanError(_differences(self.signature, work.signature))
        return dataclasses.replace(self, work=binding.bound(self, work))

    @property
    def bound(self) -> Workload:
        """The workload. Raises PlanError for a plan from a file that is not bound yet."""
        if self.work is None:
            raise PlanError("this plan was read from a file: bind it to its model first, Plan.load(path, fb.trace(...))")
        return self.work

    @functools.cached_property
    def layout(self) -> Layout:
        """How the user's trees are stored in a State."""
        work = self.bound
        return Layout(
            params_tree=jax.tree.structure(work.args.params),
            opt_tree=jax.tree.structure(work.opt_state),
            params=work.stored,
            opt_state=work.stored_state,
        )

    def abstract_mesh(self):
        """The mesh without devices; a mesh of one device where the plan has none."""
        return self._mesh_shape.abstract()

    def make_mesh(self, devices=None):
        """The mesh over real devices (default: this process's)."""
        return self._mesh_shape.concrete(devices)

    @property
    def _mesh_shape(self) -> MeshShape:
        return self.mesh or MeshShape(sizes=(1,), names=("fsdp",))

    def abstract_state(self, mesh: Any = None) -> State:
        """The state as ShapeDtypeStructs with shardings and memory kinds, on the abstract mesh or on ``mesh``. Needs no memory."""
        mesh = mesh if mesh is not None else self.abstract_mesh()
        work = self.bound
        plain = named(mesh, (), "hbm")

        def arrays(role: str, stored, tree):
            dtypes = [leaf.dtype for leaf in jax.tree.leaves(tree)]  # an entry's dtype is text, and no text names a random key's
            return tuple(
                jax.ShapeDtypeStruct(e.shape, dtypes[s.members[0]], sharding=named(mesh, e.spec, e.placement))
                for e, s in zip(self.role(role), stored, strict=True)
            )

        at = lambda like: None if like is None else jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=plain)  # noqa: E731
        return State(
            step=jax.ShapeDtypeStruct((), jnp.int32, sharding=plain),
            stored_params=arrays("parameter", work.stored, work.args.params),
            stored_opt_state=arrays("optimizer", work.stored_state, work.opt_state),
            key=at(work.args.key),
            extra=jax.tree.map(at, work.args.extra),
            layout=self.layout,
            stored_copies=copies.abstract(self, mesh),
        )

    def abstract_tree(self, mesh: Any = None) -> dict[str, Any]:
        """The state in the user's own trees, as ShapeDtypeStructs: what a checkpoint is restored into."""
        return self.abstract_state(mesh).to_tree()

    @property
    def shardings(self) -> State:
        """The shardings of the state, memory kinds included, on the abstract mesh."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state())

    def abstract_batch(self, mesh: Any = None) -> Any:
        """The batch as ShapeDtypeStructs with the plan's shardings."""
        mesh = mesh if mesh is not None else self.abstract_mesh()
        batch = self.bound.args.batch
        leaves = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=named(mesh, e.spec, "hbm"))
            for leaf, e in zip(jax.tree.leaves(batch), self.role("batch"), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(batch), leaves)

    @functools.cached_property
    def streams(self) -> tuple[Stream, ...]:
        """How each family of the optimizer's update is carried out."""
        return align(tuple(self._stream(f, self.on_host(f) or f in self.fused) for f in range(len(self.bound.families))))

    def _stream(self, f: int, moves: bool) -> Stream:
        work, family = self.bound, self.bound.families[f]
        spec = self.role("parameter")[family.params[0]].spec if family.params else ()
        unsliced = unsliced_axes(self.hardware["chip"]["platform"]) if self.hardware else frozenset()
        return choose_stream(work, family, spec, self.mesh, moves, self.options["whole_below_bytes"], unsliced)

    def on_host(self, f: int, *roles: str) -> bool:
        """Whether any array of a family stands on the host: of its parameters and its state, or of one of them."""
        family = self.bound.families[f]
        owned = {"parameter": family.params, "optimizer": family.state}
        return any(self.role(role)[k].placement == "host" for role in roles or owned for k in owned[role])

    @functools.cached_property
    def unfused(self) -> dict[int, str]:
        """Families with something on the host that are not updated inside the backward pass, with the reason."""
        return {f: why for f, why in self._fusion.items() if why}

    @functools.cached_property
    def fused(self) -> frozenset[int]:
        """Families that are updated layer by layer inside the backward pass: no stack of their gradients exists anywhere."""
        return frozenset(f for f, why in self._fusion.items() if not why)

    @property
    def two_pass(self) -> bool:
        """Whether a first backward pass must take sums that fused updates need."""
        work, tainted = self.bound, gradient_dependent(self.bound.update)
        return any(shared_reads(work.update, work.families[f], self.streams[f]) & tainted for f in self.fused)

    @functools.cached_property
    def managed(self) -> frozenset[int]:
        """Stored parameters that loops take layer by layer: they stand on the host, or are updated in the backward pass."""
        return self.hosted | {p for f in self.fused for p in self.bound.families[f].params}

    @functools.cached_property
    def hosted(self) -> frozenset[int]:
        """Stored parameters that stand on the host."""
        return frozenset(p for p, e in enumerate(self.role("parameter")) if e.placement == "host")

    @property
    def _fuse_update(self) -> str:
        return self.options.get("fuse_update", "auto")

    @functools.cached_property
    def _fusion(self) -> dict[int, str]:
        work, tainted = self.bound, gradient_dependent(self.bound.update)
        trained = [f for f, family in enumerate(work.families) if family.params and not any(work.frozen[p] for p in family.params)]
        hosted = [f for f in trained if self.on_host(f, "parameter")]
        if self._fuse_update == "never":
            return dict.fromkeys(hosted, "the option fuse_update is never")
        if self.options.get("microbatches", 1) > 1:
            return dict.fromkeys(hosted, "it waits for the last microbatch")
        tried = [f for f in trained if self._fuse_update == "always" or self.on_host(f)]
        two_pass = self._fuse_update == "two_pass"
        found = {f: why_not(work, work.families[f], self._stream(f, True), tainted, two_pass) for f in tried}
        if self._fuse_update == "auto" and self.options.get("duplex", "auto") != "never":
            loops = [
                {f for f, why in found.items() if not why and set(work.families[f].params) & set(loop.params)}
                for loop in work.program.loops
            ]
            lone = {f for inside in loops if len(inside) == 1 for f in inside if f not in hosted}
            found |= dict.fromkeys(
                lone, "alone in its loop its copies would take turns: behind the backward pass its halves run both ways at once"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """plan.json as a dict."""
        return planfile.to_json(self)

    def save(self, path: str | Path) -> None:
        """Write plan.json."""
        planfile.write(path, json.dumps(self.to_json(), indent=1))

    @classmethod
    def load(cls, path: str | Path, work: Workload | None = None) -> "Plan":
        """Read plan.json, and bind it to ``work`` if given.

        Raises:
            PlanError: not a readable plan of this schema, or made for another workload.
        """
        plan = cls(**planfile.fields(planfile.read(path), str(path)))
        return plan if work is None else plan.bind(work)

    def __str__(self) -> str:
        return planfile.describe(self)


def _batch_facts(work: Workload) -> dict[str, int]:
    first = next((t for t in work.tensors if t.role == "batch" and t.shape), None)
    facts = {"global_batch": first.shape[0] if first else 0}
    return facts | ({"sequence_length": first.shape[1]} if first and len(first.shape) > 1 else {})


def _differences(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    lines = [f"{n} was {old[n]} and is {new[n]}" for n in old if n in new and old[n] != new[n]]
    lines += [f"{n} is not in the model any more" for n in old if n not in new]
    lines += [f"{n} ({new[n]}) is not in the plan" for n in new if n not in old]
    more = f" and {len(lines) - 5} more" if len(lines) > 5 else ""
    return f"the plan was made for another model: {'; '.join(lines[:5])}{more}. Make a new plan for this model."
