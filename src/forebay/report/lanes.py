"""Forecasts for the terminal: a picture of the lanes over one step, where the time goes, and the exposed copies by buffer."""

from collections.abc import Iterable

from forebay.records.forecast import Forecast
from forebay.units import show_bytes, show_seconds

_ORDER = ("compute", "to_device", "to_host", "device", "collective", "side", "disk")
_SHADES = " .:-=+*#%@"


def lane_picture(events: Iterable, step_seconds: float, width: int = 72) -> str:
    """One row a lane, ``width`` columns of equal time; a darker character is a fuller column. Events as ``forebay.timeline.events``
    gives them."""
    rows: dict[str, list[float]] = {}
    column = step_seconds / width
    for event in events:
        row = rows.setdefault(event.lane, [0.0] * width)
        first, last = int(event.begin_seconds / column), int(event.end_seconds / column)
        for at in range(max(0, first), min(width - 1, last) + 1):
            begin, end = max(event.begin_seconds, at * column), min(event.end_seconds, (at + 1) * column)
            row[at] += event.share * max(0.0, end - begin) / column
    lines = [f"0 s{' ' * (width + 5)}{show_seconds(step_seconds)} (forecast)"]
    for lane in _ORDER:
        if lane in rows:
            marks = "".join(_SHADES[min(len(_SHADES) - 1, round(share * (len(_SHADES) - 1)))] for share in rows[lane])
            lines.append(f"{lane:>10} |{marks}|")
    return "\n".join(lines)


def step_table(forecast: Forecast) -> str:
    """The step's seconds, its band, and the causes that add up to it, the largest first."""
    low, middle, high = forecast.low_seconds, forecast.step_seconds, forecast.high_seconds
    lines = [f"step {show_seconds(middle)} (forecast, {show_seconds(low)} to {show_seconds(high)}) on {forecast.hardware}"]
    for cause, seconds in sorted(forecast.path.items(), key=lambda item: -item[1]):
        if seconds >= 0.0005 * middle:
            lines.append(f"  {cause:24} {show_seconds(seconds):>10} {100 * seconds / middle:5.1f} %")
    if forecast.tokens_per_second is not None:
        mfu = f", MFU {100 * forecast.mfu:.1f} % (attention counted causally)" if forecast.mfu else ""
        lines.append(f"  {forecast.tokens_per_second:,.0f} tokens/s{mfu}")
    for loop in forecast.loops:
        if loop.link_use:
            full = ", ".join(f"{way} {100 * share:.0f} %" for way, share in loop.link_use.items())
            head = f"  {loop.name} ({loop.iterations} iterations, {show_seconds(loop.seconds)})"
            lines.append(f"{head}: host link full {full}; bound by {loop.bound}")
    if forecast.unknown_share > 0 or forecast.unknowns:
        names = ", ".join(what for what, _, _ in forecast.unknowns)
        lines.append(f"  costed by bytes only: {100 * forecast.unknown_share:.2f} % of the step ({names})")
    return "\n".join(lines)


def copy_table(forecast: Forecast, count: int = 20) -> str:
    """Exposed time by host buffer with ms/GiB, the most exposed first."""
    if not forecast.copies:
        return "no host copies in this program"
    lines = [f"{'exposed':>10} {'busy':>10} {'moved':>10} {'ms/GiB':>7}  direction  buffer"]
    for copy in forecast.copies[:count]:
        lines.append(
            f"{show_seconds(copy.exposed_seconds):>10} {show_seconds(copy.busy_seconds):>10} {show_bytes(copy.moved_bytes):>10} "
            f"{copy.exposed_ms_per_gib:7.2f}  {copy.direction:9}  {copy.buffer}"
        )
    if len(forecast.copies) > count:
        lines.append(f"  and {len(forecast.copies) - count} more")
    return "\n".join(lines)
