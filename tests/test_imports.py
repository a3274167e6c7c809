"""What importing forebay costs, which way the stages look, and the shape of the source tree."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import forebay

pytestmark = pytest.mark.oldest

SOURCE = Path(forebay.__file__).parent
STAGES = "records hardware workload plan runtime compiler timeline search trust testing training report cli".split()
EVERYWHERE = {"errors", "units"}
FILES = sorted(SOURCE.rglob("*.py"))


def _modules_after(code: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after ``code``."""
    probe = f"{code}\nimport sys\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return set(done.stderr.split())


def test_importing_forebay_loads_no_heavy_module():
    loaded = _modules_after("import forebay")
    assert not loaded & {"jax", "jaxlib", "scipy", "numpy", "optax", "orbax", "flax", "tyro", "rich"}


def test_every_public_name_is_found_in_its_stage():
    for name in forebay.__all__:
        assert callable(getattr(forebay, name)), name
        assert name in dir(forebay)


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Plant'"):
        _ = forebay.Plant


def _forebay_imports(path: Path) -> set[str]:
    """Top-level parts of forebay that ``path`` imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("forebay.")}
    return found


def _stage(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def _allowed(stage: str) -> set[str]:
    if stage in EVERYWHERE:
        return EVERYWHERE
    return EVERYWHERE | set(STAGES[: STAGES.index(stage) + 1]) | {"__version__"}


def test_a_stage_imports_only_stages_before_it():
    staged = [path for path in FILES if _stage(path) not in {"__init__", "__main__"}]
    wrong = {str(path.relative_to(SOURCE)): _forebay_imports(path) - _allowed(_stage(path)) for path in staged}
    assert not {path: names for path, names in wrong.items() if names}


def test_every_folder_is_a_stage_or_part_of_one():
    assert {_stage(path) for path in FILES} <= {*STAGES, *EVERYWHERE, "__init__", "__main__"}
    folders = {folder.name for path in FILES for folder in path.relative_to(SOURCE).parents if folder.name}
    assert not folders & {"utils", "util", "common", "helpers", "misc"}


def test_files_stay_under_400_lines_and_functions_under_40():
    long = [f"{path.relative_to(SOURCE)}: {lines} lines" for path in FILES if (lines := path.read_text().count("\n")) >= 400]
    for path in FILES:
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        where = path.relative_to(SOURCE)
        long += [f"{where}:{node.lineno} {node.name}: {_lines(node)} lines" for node in functions if _lines(node) > 40]
    assert not long


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    docstring = function.body[0] if ast.get_docstring(function) else None
    return function.end_lineno - function.lineno + 1 - (docstring.end_lineno - docstring.lineno + 1 if docstring else 0)


def test_every_file_opens_by_saying_what_it_is():
    assert not [str(path.relative_to(SOURCE)) for path in FILES if not ast.get_docstring(ast.parse(path.read_text()))]
