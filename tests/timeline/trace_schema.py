"""The JSON form of the Chrome trace event format, as far as it is written here, as a JSON schema; and a checker of the few keywords used.

Source of the format: the document "Trace Event Format" of the Chromium project (complete events and metadata events).
"""

NUMBER, TEXT = {"type": "number"}, {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}


def _event(phase: str, properties: dict, required: list[str]) -> dict:
    base = {"ph": {"enum": [phase]}, "pid": COUNT, "tid": COUNT, "name": TEXT, "args": {"type": "object"}}
    return {
        "type": "object",
        "properties": base | properties,
        "required": ["ph", "pid", "tid", "name", *required],
        "additionalProperties": False,
    }


SCHEMA = {
    "type": "object",
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    _event("X", {"ts": NUMBER | {"minimum": 0}, "dur": NUMBER | {"minimum": 0}, "cat": TEXT}, ["ts", "dur"]),
                    _event("M", {"name": {"enum": ["process_name", "thread_name", "thread_sort_index"]}}, ["args"]),
                ]
            },
        },
    },
    "required": ["traceEvents"],
    "additionalProperties": False,
}
_TYPES = {"object": dict, "array": list, "string": str, "number": (int, float), "integer": int}


def problems(value, schema: dict, path: str = "$") -> list[str]:
    """What of ``value`` the schema forbids."""
    if "oneOf" in schema:
        tried = [problems(value, one, path) for one in schema["oneOf"]]
        return [] if sum(not one for one in tried) == 1 else min(tried, key=len) or [f"{path}: more than one form fits"]
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{path}: {value!r} is none of {schema['enum']}"]
    if isinstance(value, bool) or not isinstance(value, _TYPES[schema["type"]]):
        return [f"{path}: {value!r} is no {schema['type']}"]
    below = "minimum" in schema and not value >= schema["minimum"]
    found = [f"{path}: {value} is not {schema['minimum']} or more"] if below else []
    if schema["type"] == "array":
        return [p for n, item in enumerate(value) for p in problems(item, schema["items"], f"{path}[{n}]")]
    if schema["type"] == "object" and "properties" in schema:
        found += [f"{path}: lacks {key!r}" for key in schema["required"] if key not in value]
        found += [f"{path}: has {key!r}" for key in value if key not in schema["properties"]]
        found += [
            p for key in value if key in schema["properties"] for p in problems(value[key], schema["properties"][key], f"{path}.{key}")
        ]
    return found
