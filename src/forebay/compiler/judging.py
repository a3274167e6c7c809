"""``judge``: lower in this process, look in the cache, compile in a worker, and weigh the answer against the machine."""

import dataclasses
import os
import threading

from forebay.compiler import cache as store
from forebay.compiler import jaxcompat, lowering, outcome, versions
from forebay.compiler.detect import Evidence, avoided, hazards, refused
from forebay.compiler.hlo import read_hlo
from forebay.compiler.honour import compare
from forebay.compiler.outcome import Outcome
from forebay.compiler.pool import compile_in_worker
from forebay.compiler.validate import validate
from forebay.errors import InputError
from forebay.records.verdict import Memory, Verdict
from forebay.units import show_bytes

TIME_LIMIT_SECONDS = 900.0
MEMORY_SHARE = 0.8  # of this machine's memory, for one compile
_lowering = threading.Lock()


def judge(
    fn,
    args: tuple,
    hardware,
    plan=None,
    donate_argnums: tuple[int, ...] = (0,),
    compiler_options: dict | None = None,
    *,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
    memory_limit_bytes: int | None = None,
    cache: bool = True,
) -> Verdict:
    """What the real compiler of ``hardware`` makes of ``fn(*args)``: sizes, host copies, hazards, and whether it fits.

    ``fn`` is a plain function (``donate_argnums`` is used), or a jitted one or forebay's step (their own donation rules). ``args`` are
    pytrees of arrays or ShapeDtypeStructs; shardings may stand on an abstract or a concrete mesh, of as many devices as
    ``hardware`` has; without any mesh the program is compiled for one device. ``compiler_options`` go over those of ``plan``.
    A compile that fails, aborts or is stopped is a Verdict with a reason.

    Raises:
        InputError: an argument, an option or the mesh size cannot be used.
        CompilerError: the compiler of that platform is not installed, or jax cannot lower the program for it.
    """
    target = hardware.target
    versions.require(target.platform)
    with _lowering:
        lowered = lowering.lower(fn, tuple(args), target.platform, donate_argnums)
        settings = jaxcompat.settings()
    program = lowered.program
    if lowered.mesh_devices not in (None, hardware.devices):
        raise InputError(
            f"the program's mesh has {lowered.mesh_devices} devices and {hardware.name} has {hardware.devices}; make the mesh of "
            f"{hardware.devices} devices, or name the machine with {lowered.mesh_devices}"
        )
    options = _options(program.compiler_options, getattr(plan, "compiler_options", None), compiler_options)
    request = _request(program, target, options, settings)
    key = store.fingerprint(program, request, versions.installed())
    found, said = store.read(key) if cache else (None, ())
    cached = found is not None
    if found is None:
        limit = memory_limit_bytes if memory_limit_bytes is not None else _memory_limit_bytes()
        found = compile_in_worker(request, program.bytecode, time_limit_seconds, limit)
        said += store.write(key, found) if cache else ()
    messages = (*lowered.messages, *_dropped_flags(), *said, *found.messages)
    return _verdict(found, program, plan, hardware, request, messages, key, cached)


def _options(*sources: dict | None) -> dict:
    """The compiler options of jit, plan and call, the later over the earlier, as XLA takes them."""
    merged = {}
    for source in sources:
        merged.update(source or {})
    for name, value in merged.items():
        if not isinstance(name, str) or not isinstance(value, (bool, int, float, str)):
            raise InputError(f"the compiler option {name!r} = {value!r} is not a name with a bool, a number or a text")
    return merged


def _request(program, target, options: dict, settings: dict) -> dict:
    return {
        "platform": target.platform,
        "topology": target.topology,
        "target_config": target.target_config,
        "partitions": program.partitions,
        "tuple_arguments": program.tuple_arguments,
        "propagate_to_inputs": list(program.propagate_to_inputs),
        "propagate_to_outputs": list(program.propagate_to_outputs),
        "compiler_options": options,
        "settings": settings,
    }


def _memory_limit_bytes() -> int:
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * MEMORY_SHARE)


def _dropped_flags() -> tuple[str, ...]:
    said = "{}={!r} of your environment is not used here; give what the program needs as compiler_options"
    return tuple(said.format(name, os.environ[name]) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") if os.environ.get(name))


def _verdict(found: Outcome, program, plan, hardware, request: dict, messages: tuple[str, ...], key: str, cached: bool) -> Verdict:
    verdict = Verdict(
        fits=False if found.status == outcome.REFUSED else None,
        reason=f"{found.status}: {found.reason}",
        hbm=None,
        host=None,
        hbm_budget_bytes=hardware.hbm_budget_bytes,
        host_budget_bytes=hardware.host_budget_bytes_per_device,
        messages=messages,
        compile_seconds=found.compile_seconds,
        versions=versions.installed(),
        compiler_options=request["compiler_options"],
        target=f"{request['platform']} {request['topology']} ({hardware.name})",
        fingerprint=key,
        cached=cached,
    )
    return verdict if found.status != outcome.COMPILED else _with_findings(verdict, found, program, plan, request)


def _with_findings(verdict: Verdict, found: Outcome, program, plan, request: dict) -> Verdict:
    assert found.sizes is not None, "a compiled program has sizes"
    hbm, host = Memory(**found.sizes["hbm"]), Memory(**found.sizes["host"])
    verdict = dataclasses.replace(verdict, hbm=hbm, host=host, hlo_gzip=found.hlo_gzip)
    findings = read_hlo(verdict.hlo)
    evidence = Evidence(findings=findings, host=host, options=request["compiler_options"], settings=request["settings"])
    fits, reason = _weigh(hbm, host, verdict)
    jaxlib, platform = verdict.versions["jaxlib"], request["platform"]
    met = hazards(evidence, jaxlib, platform)
    if wrong := refused(met):
        fits, reason = False, f"{wrong}; {reason}"
    honoured, ignored = compare(program.arguments, findings, tuple(getattr(plan, "entries", ())))
    return dataclasses.replace(
        verdict,
        fits=fits,
        reason=reason,
        host_copies=findings.host_copies,
        hazards=met,
        messages=(*verdict.messages, *avoided(request["compiler_options"], jaxlib, platform)),
        facts=validate(findings, honoured, ignored),
        honoured=honoured,
        ignored=ignored,
        attention=findings.attention,
        remat_instructions=findings.remat_instructions,
    )


def _weigh(hbm: Memory, host: Memory, verdict: Verdict) -> tuple[bool, str]:
    parts, fits = [], True
    rows = (("HBM", hbm, verdict.hbm_budget_bytes), ("host memory", host, verdict.host_budget_bytes))
    for title, memory, budget in rows:
        within = memory.total_bytes <= budget
        fits &= within
        word = "within" if within else "over"
        parts.append(f"{title} {show_bytes(memory.total_bytes)} is {word} the budget of {show_bytes(budget)} per device")
    return fits, "; ".join(parts)
