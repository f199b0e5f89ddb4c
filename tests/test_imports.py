"""The house rules that a reader of one file cannot see: who imports whom, who may do what."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "deepinfer_jax"
BASE = {"config", "errors"}
ASKED = {"request", "sampling_params"}
LAZY_ONLY = {"training", "bench"}
# Room -> the rooms it may import besides itself. A room is a module or folder of the package.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "env": {"errors"},
    "config_json": {"errors"},
    "config": {"config_json", "errors"},
    "settings_file": {"errors"},
    "keywords": {"errors"},
    "settings": {"env", "settings_file", "keywords"} | BASE,
    "request": {"errors"},
    "sampling_params": {"errors"},
    "ops": {"errors"},
    "parallel": BASE,
    "model": {"ops", "parallel"} | BASE,
    "sampling": {"request", "errors"},
    "text": ASKED | BASE,
    "protocol": {"text", "files"} | ASKED | {"errors"},
    "checkpoint": {"files"} | BASE,
    "runner": {"model", "sampling", "parallel", "ops", "files"} | BASE,
    "engine": {"runner", "sampling", "parallel", "text", "ops", "model", "protocol"} | ASKED | BASE,
    "report": {"runner", "model", "ops", "settings", "env"} | BASE,
    "assembly": {"runner", "model", "parallel", "checkpoint", "report", "ops", "settings"} | BASE,
    "model_source": {"checkpoint", "settings", "env", "text"} | BASE,
    "drafting": {"checkpoint", "settings"} | BASE,
    "engine_settings": {"drafting", "assembly", "engine", "runner", "model", "report", "settings"}
    | BASE,
    "llm": {
        *(
            "engine_settings",
            "drafting",
            "model_source",
            "assembly",
            "engine",
            "runner",
            "model",
            "text",
        ),
        *("sampling", "request", "settings", "env", "ops", "report", "sampling_params"),
        "protocol",
    }
    | BASE,
    "evaluation": {"llm", "sampling", "protocol", "text", "files"} | ASKED | {"errors"},
    "skills": {"text"} | BASE,
    "training": {"model", "sampling", "checkpoint", "text", "ops", "skills", "files"} | BASE,
    "bench": {
        *("llm", "assembly", "engine", "runner", "model", "report", "settings", "ops", "sampling"),
        "skills",
    }
    | ASKED
    | BASE,
}
FORBIDDEN_NAMES = {"utils", "helpers", "common", "manager"}
LINES, KERNEL_LINES = 450, 600
MODULES = sorted(PACKAGE.rglob("*.py"))
IDS = [str(path.relative_to(PACKAGE)) for path in MODULES]


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def dotted(node: ast.AST) -> str:
    """`a.b.c` for a chain of attributes, else an empty text."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def imports(tree: ast.Module, package: str) -> Iterator[tuple[str, bool]]:
    """(absolute dotted name, whether it is inside a function) of everything imported."""
    inside = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, id(node) in inside


def wrong_imports(tree: ast.Module, room: str, package: str) -> list[str]:
    """What a module of `room` imports from rooms that it may not import."""
    wrong = []
    for name, in_function in imports(tree, package):
        if not name.startswith("deepinfer_jax."):
            continue
        target = name.split(".")[1]
        if target == room:
            continue
        if room in ("entrypoints", "__init__", "__main__"):
            late = target in LAZY_ONLY
            allowed = (room == "entrypoints" and in_function) if late else True
        else:
            allowed = target in MAY_IMPORT.get(room, set())
        if not allowed:
            wrong.append(name)
    return wrong


def broken_rules(tree: ast.Module, path: str) -> list[str]:
    """The reserved doings of a module at `path` (relative to the package) that are not its own."""
    room = path.split("/")[0].removesuffix(".py")
    found = []
    for node in ast.walk(tree):
        names = {dotted(node)} if isinstance(node, ast.Attribute) else set()
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = {f"{node.func.id}()"}
        for name in names:
            environment = name.startswith(("os.environ", "os.getenv", "os.putenv"))
            jit = name in ("jax.jit", "jax.pmap") or name.endswith(".pjit")
            output = name in ("print()", "sys.stdout", "sys.stderr", "rich.print")
            if environment and path != "env.py":
                found.append(f"{name}: only env.py touches the environment")
            if jit and path != "runner/compile.py" and room != "training":
                found.append(f"{name}: only runner/compile.py and training compile")
            if output and room != "entrypoints":
                found.append(f"{name}: only entrypoints print")
            if name.startswith("jax._src"):
                found.append(f"{name}: private to JAX")
    return found


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_a_module_imports_only_from_the_rooms_open_to_it(path: Path):
    package = ".".join(path.relative_to(PACKAGE.parent).parent.parts)
    tree = ast.parse(path.read_text())
    assert wrong_imports(tree, room_of(path), package) == []


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_a_module_leaves_reserved_doings_to_their_owner(path: Path):
    tree = ast.parse(path.read_text())
    assert broken_rules(tree, path.relative_to(PACKAGE).as_posix()) == []


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_a_module_is_short_and_named_for_what_it_owns(path: Path):
    parts = path.relative_to(PACKAGE).parts
    cap = KERNEL_LINES if parts[:2] == ("ops", "kernels") else LINES
    assert len(path.read_text().splitlines()) <= cap
    assert not FORBIDDEN_NAMES & {part.removesuffix(".py") for part in parts}


def test_every_room_is_in_the_table():
    known = {*MAY_IMPORT, "entrypoints", "__init__", "__main__"}
    assert {room_of(path) for path in MODULES} - known == set()


def test_params_do_not_know_how_they_are_stored():
    tree = ast.parse((PACKAGE / "model" / "params.py").read_text())
    names = [name for name, _ in imports(tree, "deepinfer_jax.model")]
    assert not [name for name in names if name.startswith("deepinfer_jax.checkpoint")]


@pytest.mark.parametrize(
    ("room", "code", "wrong"),
    [
        ("ops", "from deepinfer_jax.model import layers", ["deepinfer_jax.model.layers"]),
        ("ops", "from ..model import layers", ["deepinfer_jax.model.layers"]),
        ("ops", "from .. import llm", ["deepinfer_jax.llm"]),
        ("ops", "import deepinfer_jax.llm", ["deepinfer_jax.llm"]),
        ("ops", "from deepinfer_jax import llm", ["deepinfer_jax.llm"]),
        ("ops", "if TYPE_CHECKING:\n    import deepinfer_jax.llm", ["deepinfer_jax.llm"]),
        ("ops", "def f():\n    from deepinfer_jax import llm", ["deepinfer_jax.llm"]),
        ("ops", "from deepinfer_jax.ops.kernel import Kernel\nimport jax", []),
        ("entrypoints", "from deepinfer_jax.training import nano", ["deepinfer_jax.training.nano"]),
        ("entrypoints", "def f():\n    from deepinfer_jax.training import nano", []),
        ("engine", "from deepinfer_jax.training import nano", ["deepinfer_jax.training.nano"]),
    ],
)
def test_the_import_check_finds_what_it_looks_for(room: str, code: str, wrong: list[str]):
    assert wrong_imports(ast.parse(code), room, f"deepinfer_jax.{room}") == wrong


@pytest.mark.parametrize(
    ("path", "code", "count"),
    [
        ("llm.py", "import os\nos.environ['A']", 1),
        ("llm.py", "from os import getenv", 1),
        ("env.py", "import os\nos.environ['A']", 0),
        ("model/layers.py", "import jax\nf = jax.jit(g)", 1),
        ("model/layers.py", "import jax\n@jax.jit\ndef f(): ...", 1),
        ("model/layers.py", "from jax import jit", 1),
        ("runner/compile.py", "import jax\nf = jax.jit(g)", 0),
        ("engine/engine.py", "print(1)", 1),
        ("entrypoints/cli.py", "print(1)", 0),
        ("ops/linear.py", "from jax._src import core", 1),
        ("ops/linear.py", "import jax._src.core", 1),
    ],
)
def test_the_check_of_reserved_doings_finds_what_it_looks_for(path: str, code: str, count: int):
    assert len(broken_rules(ast.parse(code), path)) == count
