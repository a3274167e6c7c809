"""Classification: what each instruction of a scheduled module asks of the machine.

Only computations that run in sequence are visited (the entry, loop bodies, branches, called computations), each once, from a work
list; fused computations are read where they are called. What is not known is costed by its bytes with kind ``unknown`` and a
reason, and the forecast reports the share of time so costed. An unknown *syntax* is an error."""

from forebay.timeline.collectives import COLLECTIVES, collective_of, scattered
from forebay.timeline.parse import Computation, Instruction, Module
from forebay.timeline.products import attention_product, convolution_product, cublas_product, cudnn_convolution_product, dot_product
from forebay.timeline.shapes import HloSyntaxError, Shape, Tuple, arrays
from forebay.timeline.traffic import fusion_traffic, plain_traffic, shape_traffic
from forebay.timeline.trips import TripCounts
from forebay.timeline.work import Product, Program, Traffic, Work

_FREE = frozenset(
    "parameter constant get-tuple-element tuple bitcast after-all add-dependency partition-id replica-id opt-barrier domain "
    "get-dimension-size async-update token".split()
)
_FREE_TARGETS = frozenset({"AllocateBuffer", "Sharding", "AssumeGatherIndicesInBound", "annotate_device_placement", "CreateBuffer"})
_PLAIN = frozenset(
    """
    abs add and atan2 broadcast cbrt ceil clamp clz compare complex concatenate convert copy copy-start cosine divide
    dynamic-slice dynamic-update-slice erf exponential exponential-minus-one fft floor gather imag iota is-finite log log-
    plus-one logistic map maximum minimum multiply negate not or pad popcnt power real reduce reduce-precision reduce-window
    remainder reshape reverse rng rng-bit-generator rng-get-and-update-state round-nearest-afz round-nearest-even rsqrt
    scatter select select-and-scatter shift-left shift-right-arithmetic shift-right-logical sign sine slice sqrt stochastic-
    convert subtract tan tanh transpose triangular-solve xor sort bitcast-convert
    """.split()
)
_COPIES = frozenset({"copy", "slice", "dynamic-slice", "dynamic-update-slice"})
_PRODUCTS = frozenset({"dot", "convolution"})


def classify(module: Module) -> Program:
    """The program of a scheduled module. Raises HloSyntaxError for a module without a schedule."""
    if not module.scheduled:
        raise HloSyntaxError(
            f"the module {module.name!r} has no schedule (is_scheduled is not set): pass the text of the *compiled* program, "
            "such as verdict.hlo, not the text before optimisation"
        )
    done: dict[str, tuple[Work, ...]] = {}
    trips = TripCounts(module)
    waiting = [module.entry]
    while waiting:
        name = waiting.pop()
        if name in done:
            continue
        inside = module.computations[name]
        done[name] = tuple(_checked(i, inside, module, trips) for i in inside.instructions)
        waiting += [c for work in done[name] for c in work.callees]
    return Program(entry=module.entry, devices=module.devices, computations=done)


def _checked(instruction: Instruction, inside: Computation, module: Module, trips: TripCounts) -> Work:
    """The work of an instruction; one that lacks what its opcode needs is a syntax error with its line, not a KeyError."""
    try:
        return _loop(instruction, inside, trips) if instruction.opcode == "while" else _work(instruction, inside, module)
    except (KeyError, IndexError, ValueError) as error:
        where = f"HLO line {instruction.line}: {instruction.opcode} {instruction.name!r}"
        raise HloSyntaxError(f"{where} lacks something that it needs to be costed ({type(error).__name__}: {error})") from error


def _work(instruction: Instruction, inside: Computation, module: Module) -> Work:
    opcode = instruction.opcode
    if opcode in _FREE or (opcode == "custom-call" and instruction.target in _FREE_TARGETS):
        return _named(instruction, "free")
    if opcode.endswith("-done"):
        return _named(instruction, "done", awaits=_started(instruction, inside))
    if opcode.endswith("-update") and opcode != "dynamic-update-slice":
        return _named(instruction, "free")
    if opcode in ("conditional", "call") and not instruction.callees:
        raise KeyError("the computations that it calls")
    if opcode == "conditional":
        return _named(instruction, "conditional", callees=instruction.callees)
    if opcode == "call":
        return _named(instruction, "call", callees=instruction.callees[:1])
    if opcode.endswith("-start"):
        return _start(instruction, inside, module)
    return _plain(instruction, inside, module)


def _loop(instruction: Instruction, inside: Computation, trips: TripCounts) -> Work:
    body, condition = (instruction.attributes[part].strip("%") for part in ("body", "condition"))
    return _named(instruction, "loop", callees=(body, condition), trip_count=trips.of(instruction, inside))


def _named(instruction: Instruction, kind: str, **more) -> Work:
    return Work(
        name=instruction.name, kind=kind, opcode=instruction.opcode, op_name=instruction.op_name, operands=instruction.operands, **more
    )


def _started(done: Instruction, inside: Computation) -> str:
    """The start that a done awaits, through async updates."""
    seen = inside.by_name.get(done.operands[0]) if done.operands else None
    while seen is not None and seen.opcode.endswith("-update") and seen.operands:
        seen = inside.by_name.get(seen.operands[0])
    if seen is None:
        raise HloSyntaxError(f"{done.name} awaits {done.operands[:1]}, which is not started in the same computation")
    return seen.name


def _start(instruction: Instruction, inside: Computation, module: Module) -> Work:
    """An asynchronous start: XLA prints ``async-start`` of an instruction as that instruction's opcode with ``-start``."""
    base = instruction.opcode.removesuffix("-start")
    synchronous = '"is_sync":true' in instruction.attributes.get("backend_config", "").replace(" ", "")
    if base in COLLECTIVES:
        return _named(
            instruction, "collective", collective=collective_of(base, instruction, inside, module.devices), asynchronous=not synchronous
        )
    if base == "async":
        inner = module.computations[instruction.callees[0]]
        found = [w for w in (_work(i, inner, module) for i in inner.instructions) if w.kind != "free"]
        if len(found) == 1:
            one = found[0]
            return _named(
                instruction, one.kind, traffic=one.traffic, product=one.product, collective=one.collective, asynchronous=True,
                why_unknown=one.why_unknown,
            )  # fmt: skip
        return _unknown(instruction, inside, "an asynchronous call of several instructions", asynchronous=True)
    if base in ("copy", "fusion") or base in _COPIES:
        traffic, by_kernel = _start_traffic(base, instruction, inside, module), _by_kernel(base, instruction, module)
        return _moved(instruction, traffic, asynchronous=True, by_kernel=by_kernel)
    return _unknown(instruction, inside, f"asynchronous opcode {instruction.opcode!r}", asynchronous=True)


def _by_kernel(base: str, instruction: Instruction, module: Module) -> bool:
    """XLA:GPU does a dynamic slice in a fusion by copy engine only where the slice is annotated with its offsets; else it is a kernel."""
    fused = module.computations[instruction.callees[0]].instructions if base == "fusion" else ()
    slices = [i for i in fused if i.opcode in ("dynamic-slice", "dynamic-update-slice")]
    return any("dynamic_slice_config" not in i.attributes.get("backend_config", "") for i in slices)


def _start_traffic(base: str, instruction: Instruction, inside: Computation, module: Module) -> Traffic:
    result = _async_result(base, instruction.shape)
    if base == "fusion":
        return fusion_traffic(instruction, inside, module.computations[instruction.callees[0]], result)
    as_plain = Instruction(
        name=instruction.name, opcode=base, shape=result, operands=instruction.operands, attributes=instruction.attributes
    )
    return plain_traffic(as_plain, inside)


def _async_result(base: str, shape: Shape) -> Shape:
    """An async start's shape is (operands, result, context...); a copy-start's is (result, operand, context)."""
    if not isinstance(shape, Tuple) or len(shape.elements) < 2:
        raise HloSyntaxError(f"{base}-start has the shape {shape!r}; expected (operands, result, context)")
    return shape.elements[0] if base == "copy" else shape.elements[1]


def _moved(instruction: Instruction, traffic: Traffic, *, asynchronous: bool, by_kernel: bool = False) -> Work:
    kind = "host_copy" if traffic.host_bytes else "device_copy" if asynchronous else "memory"
    return _named(instruction, kind, traffic=traffic, asynchronous=asynchronous, by_kernel=by_kernel)


def _plain(instruction: Instruction, inside: Computation, module: Module) -> Work:
    opcode = instruction.opcode
    if opcode in COLLECTIVES:
        return _named(instruction, "collective", collective=collective_of(opcode, instruction, inside, module.devices))
    if opcode == "fusion":
        return _fusion(instruction, inside, module)
    if opcode == "custom-call":
        return _custom_call(instruction, inside)
    traffic = plain_traffic(instruction, inside)
    if opcode in _PRODUCTS:
        product = dot_product(instruction, inside) if opcode == "dot" else convolution_product(instruction, inside)
        return _named(instruction, "matmul" if opcode == "dot" else "convolution", traffic=traffic, product=product)
    if opcode in _COPIES and traffic.host_bytes:
        return _moved(instruction, traffic, asynchronous=False)
    if opcode in _PLAIN:
        return _named(instruction, "memory", traffic=traffic)
    return _unknown(instruction, inside, f"opcode {opcode!r}")


def _unknown(
    instruction: Instruction, inside: Computation, why: str, *, asynchronous: bool = False, product: Product | None = None
) -> Work:
    touched = [inside.by_name[o].shape for o in instruction.operands if o in inside.by_name]
    result = instruction.shape.elements[1] if asynchronous and isinstance(instruction.shape, Tuple) else instruction.shape
    traffic = sum((shape_traffic(s, read=True) for s in touched), shape_traffic(result, read=False))
    return _named(instruction, "unknown", traffic=traffic, why_unknown=why, asynchronous=asynchronous, product=product)


def _fusion(instruction: Instruction, inside: Computation, module: Module) -> Work:
    fused = module.computations[instruction.callees[0]]
    traffic = fusion_traffic(instruction, inside, fused, instruction.shape)
    kind, products, collective = "memory", [], None
    for piece, within in _pieces(fused, module):
        if piece.opcode in _PRODUCTS:
            products.append(dot_product(piece, within) if piece.opcode == "dot" else convolution_product(piece, within))
            kind = "matmul" if kind == "memory" else kind
        elif piece.opcode == "custom-call" and piece.target.startswith(("__cublas", "__cudnn")):
            found = _custom_call(piece, within)
            kind, products = found.kind, products + ([found.product] if found.product else [])
        elif piece.opcode in COLLECTIVES:
            collective = scattered(collective_of(piece.opcode, piece, within, module.devices), within)
    if collective is not None and not products:
        return _named(instruction, "collective", collective=collective, traffic=traffic)
    if not products:
        only_copies = all(p.opcode in _COPIES or p.opcode in _FREE for p in fused.instructions)
        return _moved(instruction, traffic, asynchronous=False) if only_copies else _named(instruction, "memory", traffic=traffic)
    largest = max(products, key=lambda p: p.flops)
    flops = sum(p.flops for p in products)
    product = Product(flops=flops, dtype=largest.dtype, m=largest.m, n=largest.n, k=largest.k, batch=largest.batch)
    return _named(instruction, kind, traffic=traffic, product=product, collective=collective)


def _pieces(fused: Computation, module: Module):
    """Every instruction of a fused computation and of those that it calls, with the computation that holds it."""
    waiting, seen = [fused], set()
    while waiting:
        computation = waiting.pop()
        if computation.name in seen:
            continue
        seen.add(computation.name)
        for piece in computation.instructions:
            yield piece, computation
            waiting += [module.computations[c] for c in piece.callees if c in module.computations]


def _custom_call(instruction: Instruction, inside: Computation) -> Work:
    target = instruction.target
    outputs = [a for a in arrays(instruction.shape) if a.dtype not in ("s8", "u8")] or list(arrays(instruction.shape))
    read = sum((shape_traffic(inside.by_name[o].shape, read=True) for o in instruction.operands), Traffic())
    traffic = sum((shape_traffic(a, read=False) for a in outputs), read)
    if target.startswith("__cublas$"):
        return _named(instruction, "matmul", traffic=traffic, product=cublas_product(instruction, inside))
    if target.startswith("__cudnn$fmha"):
        kind = "attention_backward" if "Backward" in target else "attention_forward"
        return _named(instruction, kind, traffic=traffic, product=attention_product(instruction, inside))
    if target.startswith("__cudnn$conv"):
        return _named(instruction, "convolution", traffic=traffic, product=cudnn_convolution_product(instruction, inside))
    estimate = _stated_cost(instruction)
    if estimate is not None:
        return _named(instruction, "kernel", traffic=traffic, product=estimate)
    return _unknown(instruction, inside, f"custom call {target!r}")


def _stated_cost(instruction: Instruction) -> Product | None:
    """The cost estimate that a Pallas kernel's author wrote beside it, if any."""
    config = instruction.backend_config.get("custom_call_config", {})
    flops = float((config.get("cost_estimate") or {}).get("flops", 0) or 0)
    if flops <= 0:
        return None
    side = (flops / 2) ** (1 / 3)
    return Product(flops=flops, dtype=arrays(instruction.shape)[0].dtype, m=side, n=side, k=side)
