"""The user's source line of an instruction: ``source_file``/``source_line`` of its metadata, or the tables of stack frames of newer HLO
text.

From the innermost frame outwards, the first that is neither jax's nor forebay's own machinery is the user's (a library such as optax
counts as the user's: its line says more than the call of ``train_step``).
"""

import re
from dataclasses import dataclass, field

_FILE = re.compile(r'source_file="((?:[^"\\]|\\.)*)"')
_LINE = re.compile(r"source_line=(\d+)")
_FRAME_OF = re.compile(r"stack_frame_id=(\d+)")
_ROW = re.compile(r"(\d+) (?:\"((?:[^\"\\]|\\.)*)\"|\{(.*)\})\s*\Z")
_NUMBER = re.compile(r"(\w+)=(\d+)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_MACHINERY = re.compile(r"/(?:site-packages/jax(?:lib)?|jax/_src|forebay/(?:workload|runtime|compiler|plan))/")
_DEEPEST = 1000


@dataclass(frozen=True, slots=True)
class Frames:
    """``frames`` maps a frame to its file, line and the frame around it (0: none)."""

    frames: dict[int, tuple[str, int, int]] = field(default_factory=dict)

    def source(self, metadata: str) -> str:
        """``model.py:41`` for an instruction's metadata, or an empty string."""
        stated, line = _FILE.search(metadata), _LINE.search(metadata)
        if stated:
            return _short(stated.group(1), int(line.group(1)) if line else 0)
        frame = _FRAME_OF.search(metadata)
        return self._nearest(int(frame.group(1))) if frame else ""

    def _nearest(self, frame: int) -> str:
        innermost = ""
        for _ in range(_DEEPEST):
            if frame not in self.frames:
                break
            file, line, frame = self.frames[frame]
            innermost = innermost or _short(file, line)
            if not _MACHINERY.search(file):
                return _short(file, line)
        return innermost


def read_frames(text: str) -> Frames:
    """The stack frames that stand before the first computation of an HLO text; empty where the text has none."""
    tables: dict[str, dict[int, tuple[str, dict[str, int]]]] = {name: {} for name in _TABLES}
    current = None
    for line in text.splitlines():
        if line in tables:
            current = line
        elif current and (row := _ROW.match(line)):
            numbers = {key: int(value) for key, value in _NUMBER.findall(row.group(3) or "")}
            tables[current][int(row.group(1))] = (row.group(2) or "", numbers)
        elif line.endswith("{") and line.startswith(("%", "ENTRY")):
            break
    frames = tables["StackFrames"]
    # Newer text counts parents from 1 (0 is "no parent"), so that a first frame names itself; older text names the parent itself.
    shift = 1 if any(numbers.get("parent_frame_id") == at for at, (_, numbers) in frames.items()) else 0
    found = {}
    for at, (_, numbers) in frames.items():
        place = tables["FileLocations"].get(numbers.get("file_location_id", 0), ("", {}))[1]
        file = tables["FileNames"].get(place.get("file_name_id", 0), ("", {}))[0]
        found[at] = (file, place.get("line", 0), numbers.get("parent_frame_id", 0) - shift)
    return Frames(found)


def _short(file: str, line: int) -> str:
    """The file's last two names: enough to find it, and the same on every machine."""
    return f"{'/'.join(file.split('/')[-2:])}:{line}" if file else ""
