"""The bars of a replayed step as columns of equal time: how busy each lane is in each. What plan.json keeps and the terminal draws."""

from collections.abc import Iterable

from forebay.timeline.replay import Event

COLUMNS = 72


def columns(events: Iterable[Event], step_seconds: float, count: int = COLUMNS) -> dict[str, tuple[float, ...]]:
    """For each lane the share of each of ``count`` columns that it is busy, from 0 to 1, to three digits."""
    rows: dict[str, list[float]] = {}
    width = step_seconds / count
    for event in events:
        row = rows.setdefault(event.lane, [0.0] * count)
        first, last = int(event.begin_seconds / width), int(event.end_seconds / width)
        for at in range(max(0, first), min(count - 1, last) + 1):
            begin, end = max(event.begin_seconds, at * width), min(event.end_seconds, (at + 1) * width)
            row[at] += event.share * max(0.0, end - begin) / width
    return {lane: tuple(round(min(1.0, share), 3) for share in row) for lane, row in rows.items()}
