"""The measured step beside its forecast, for the terminal. In: a line of residuals.jsonl. A figure that nothing gave is shown as a dash."""

from collections.abc import Callable, Mapping
from typing import Any

from forebay.units import show_bytes, show_seconds

NOTHING = "-"
_LANES = {
    "compute": "compute busy", "to_device": "copies to device busy", "to_host": "copies to host busy", "device": "copies in HBM busy",
    "collective": "collectives busy",
}  # fmt: skip


def render_profile(row: Mapping[str, Any]) -> str:
    """The table of one profiled run."""
    measured, forecast = row["measured"], row["forecast"] or {}
    lines = [f"one step of {row['model']} on {row['hardware']}, median of {measured['steps']} (measured)"]
    lines.append(f"  {'':24}{'forecast':>12}{'measured':>12}{'ratio':>8}")
    shown: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        ("step", "step_seconds", show_seconds), ("tokens/s", "tokens_per_second", "{:,.0f}".format),
        ("MFU (causal attention)", "mfu", "{:.1%}".format), ("HBM peak (compiled)", "hbm_bytes", show_bytes),
    )  # fmt: skip
    for title, key, show in shown:
        lines.append(_line(title, forecast.get(key), measured[key], show))
    busy, expected = measured["lanes"], forecast.get("lanes") or {}
    lines += [
        _line(title, expected.get(lane), busy.get(lane), show_seconds)
        for lane, title in _LANES.items()
        if lane in busy or expected.get(lane)
    ]
    lines.append(f"  measured from {show_seconds(measured['fastest_seconds'])} to {show_seconds(measured['slowest_seconds'])}")
    if forecast:
        lines.append(f"  forecast from {show_seconds(forecast['low_seconds'])} to {show_seconds(forecast['high_seconds'])}")
    lines += [f"  {said}" for said in (row["forecast_missing"], _missing(measured["lanes_missing"]), _on_cpu(row)) if said]
    return "\n".join(lines)


def _line(title: str, forecast: float | None, measured: float | None, show: Callable[[float], str]) -> str:
    left, right = (NOTHING if value is None else show(value) for value in (forecast, measured))
    ratio = f"{measured / forecast:.2f}" if forecast and measured is not None else NOTHING
    return f"  {title:24}{left:>12}{right:>12}{ratio:>8}"


def _missing(reason: str) -> str:
    return f"lanes are not measured: {reason}" if reason else ""


def _on_cpu(row: Mapping[str, Any]) -> str:
    return "busy times of a CPU are sums of its thunks over all threads" if row["chip"] == "cpu" and row["measured"]["lanes"] else ""
