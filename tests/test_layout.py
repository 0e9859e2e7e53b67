"""Who may import whom, and how big things may get, read from the source itself."""

import ast
import functools
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Layers, lowest first. A module may import its own layer and those below, leaves only what
# their own rule allows. Names stand for the module and all below it.
HOST = ("rods_jax.types", "rods_jax.tools", "rods_jax.tasks", "rods_jax.text", "rods_jax.rewards",
        "rods_jax.rollout.pages")
DEVICE = ("rods_jax.models", "rods_jax.grpo", "rods_jax.boundary", "rods_jax.pool_state",
          "rods_jax.ranking", "rods_jax.task_pool", "rods_jax.rollout.shapes",
          "rods_jax.rollout.draw", "rods_jax.rollout.sampler")
JOINS = ("rods_jax.rollout", "rods_jax.synthesis")
TRAIN = ("rods_jax.train",)
# Reading and writing weights is what these are for.
WEIGHT_FILES = ("rods_jax.models.gguf", "rods_jax.models.hf")

ARRAYS = {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}
INPUT_OUTPUT = {"io", "os", "sys", "pathlib", "shutil", "tempfile", "subprocess", "socket",
                "logging", "json", "pickle", "urllib", "requests", "absl"}


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(*folders: str) -> dict[str, pathlib.Path]:
    return {module_name(p): p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))}


PRODUCT = sources("rods_jax", "experiments", "configs")
EVERYTHING = {**PRODUCT, **sources("tests")}


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def imports(name: str) -> frozenset[str]:
    """Every module the source of `name` imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(tree(PRODUCT[name])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} line {node.lineno}: write imports in full"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in PRODUCT else node.module)
    return frozenset(found)


def within(name: str, group: tuple[str, ...]) -> bool:
    return any(name == g or name.startswith(f"{g}.") for g in group)


def layer(name: str) -> str:
    for title, group in (("host", HOST), ("device", DEVICE), ("join", JOINS), ("train", TRAIN)):
        if within(name, group):
            return title
    if name.split(".")[0] in ("experiments", "configs"):
        return name.split(".")[0]
    return "package" if PRODUCT[name].name == "__init__.py" else "service"


def modules(title: str) -> list[str]:
    return [name for name in PRODUCT if layer(name) == title]


ALLOWED = {
    "host": {"host"},
    "device": {"device", "types"},
    "join": {"host", "device", "join"},
    "service": {"host", "device", "join", "service"},
    "train": {"host", "device", "join", "service"},
    "configs": {"host", "device", "join", "service", "configs"},
    "experiments": {"host", "device", "join", "service", "train", "configs", "experiments"},
    "package": {"package"},
}


def test_layers_are_not_empty():
    for title in ALLOWED:
        assert title == "configs" or modules(title), title


def test_imports_point_downwards():
    wrong = []
    for name in PRODUCT:
        allowed = ALLOWED[layer(name)] | {"package"}
        for other in imports(name) & PRODUCT.keys():
            if layer(other) not in allowed and not ("types" in allowed and other == "rods_jax.types"):
                wrong.append(f"{name} ({layer(name)}) imports {other} ({layer(other)})")
    assert not wrong


def test_only_entry_points_import_train():
    users = [name for name in PRODUCT if "rods_jax.train" in imports(name)]
    assert users and all(name.startswith("experiments.") for name in users), users


def roots(name: str) -> set[str]:
    return {imported.split(".")[0] for imported in imports(name)}


def test_host_leaves_do_not_import_jax():
    assert not {n: roots(n) & ARRAYS for n in modules("host") if roots(n) & ARRAYS}


def test_host_leaves_do_not_bring_jax_in_through_others():
    names = modules("host")
    code = ("import importlib, sys\n"
            f"for name in {names!r}:\n"
            "    importlib.import_module(name)\n"
            f"    loaded = [m for m in {sorted(ARRAYS)!r} if m in sys.modules]\n"
            "    assert not loaded, (name, loaded)\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1500:]


def calls(path: pathlib.Path) -> list[tuple[str, int]]:
    """(function, line) of calls to a bare name or to one of the builtins module."""
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name):
                found.append((function.id, node.lineno))
            elif (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
                    and function.value.id in ("builtins", "__builtins__")):
                found.append((function.attr, node.lineno))
    return found


def test_device_leaves_do_no_input_or_output():
    wrong = []
    for name in modules("device"):
        if not within(name, WEIGHT_FILES):
            wrong += [(name, r) for r in roots(name) & (INPUT_OUTPUT | {"ml_collections"})]
            wrong += [(name, c) for c in calls(PRODUCT[name]) if c[0] in ("open", "print", "input")]
    assert not wrong


def test_config_dict_is_seen_by_the_loader_only():
    users = [n for n in PRODUCT if n.startswith("rods_jax.") and "ml_collections" in roots(n)]
    assert users == ["rods_jax.config"]


def test_nothing_is_evaluated():
    banned = ("eval", "exec", "compile", "__import__")
    assert not [(n, c) for n, path in EVERYTHING.items() for c in calls(path) if c[0] in banned]


def test_files_stay_short():
    lines = {n: len(p.read_text(encoding="utf-8").splitlines()) for n, p in EVERYTHING.items()}
    assert not {n: count for n, count in lines.items() if count >= 500}


def test_functions_stay_short():
    lengths = [(name, node.name, node.end_lineno - node.lineno + 1)
            for name, path in PRODUCT.items() for node in ast.walk(tree(path))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    assert not [(name, function, n) for name, function, n in lengths if n > 80]


def test_nothing_is_left_undone():
    marks = ("TODO", "FIXME", "XXX", "NotImplementedError")
    assert not [(n, m) for n, p in PRODUCT.items() for m in marks
                if m in p.read_text(encoding="utf-8")]


def test_packages_have_an_init_and_test_names_are_unique():
    for name, path in PRODUCT.items():
        assert (path.parent / "__init__.py").exists(), f"{name} is not in a package"
    names = [p.name for p in (ROOT / "tests").rglob("*.py")]
    assert len(names) == len(set(names))


def test_ci_script_can_be_run():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
