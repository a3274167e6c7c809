import pytest

from forebay.timeline.kinds import classify
from forebay.timeline.parse import parse_hlo

pytestmark = pytest.mark.oldest


def loop(module, *, start="0", step="1", bound="7", direction="LT", compare="%i, %n", carried=False, known=""):
    """A counted loop of the form that libtpu prints, which states no trip count."""
    last = "%i" if carried else f"s32[] constant({bound})"
    body = f"""
        %body (p: (s32[], s32[])) -> (s32[], s32[]) {{
          %p = (s32[], s32[]) parameter(0)
          %i = s32[] get-tuple-element(%p), index=0
          %b = s32[] get-tuple-element(%p), index=1
          %c = s32[] copy(%i)
          %s = s32[] constant({step})
          %next = s32[] add(%c, %s)
          ROOT %t = (s32[], s32[]) tuple(%next, %b)
        }}"""
    bounded = "%n = s32[] get-tuple-element(%q), index=1" if carried else f"%n = {last}"
    condition = f"""
        %cond (q: (s32[], s32[])) -> pred[] {{
          %q = (s32[], s32[]) parameter(0)
          %i = s32[] get-tuple-element(%q), index=0
          {bounded}
          ROOT %c = pred[] compare({compare}), direction={direction}
        }}"""
    entry = f"""%zero = s32[] constant({start})
        %copy = s32[] copy(%zero)
        %bound = s32[] constant({bound})
        %t = (s32[], s32[]) tuple(%copy, %bound)
        ROOT %w = (s32[], s32[]) while(%t), condition=%cond, body=%body{known}"""
    program = classify(parse_hlo(module(entry, body, condition)))
    return next(w.trip_count for w in program.computations["main"] if w.kind == "loop")


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 7),
        ({"start": "1"}, 6),
        ({"step": "2"}, 4),
        ({"direction": "LE"}, 8),
        ({"carried": True}, 7),
        ({"start": "7", "bound": "0", "step": "-1", "direction": "GT"}, 7),
        ({"direction": "NE"}, 7),
        ({"start": "9"}, 0),
        ({"known": ', backend_config={"known_trip_count":{"n":"3"}}'}, 3),
        ({"direction": "EQ"}, None),
        ({"compare": "%n, %i"}, None),
        ({"step": "-1"}, None),
        ({"direction": "NE", "step": "2"}, None),
    ],
)
def test_counted_loops_are_read_and_others_are_not_guessed(module, changes, count):
    assert loop(module, **changes) == count


@pytest.mark.parametrize(("name", "counts"), [("fsdp", [4, 4]), ("stream", [4]), ("offload", [3, 3]), ("control", [None])])
def test_loops_of_the_tpu_compiler(compiled, version, name, counts):
    program = classify(parse_hlo(compiled(name, "tpu", version)))
    assert [w.trip_count for w in program.computations[program.entry] if w.kind == "loop"] == counts
