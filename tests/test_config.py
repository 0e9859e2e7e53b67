"""rods_jax.config: strict typed configs, overrides, entry points."""

import dataclasses
import enum
import errno
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Literal

import ml_collections
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rods_jax import config
from rods_jax.run_config import RunConfig


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float
    count: int = 3
    on: bool = False

    def __post_init__(self):
        if self.count < 0:
            raise ValueError(f"count is {self.count}, must not be negative")


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    name: str = "x"
    colour: Colour = Colour.RED
    sizes: tuple[int, ...] = ()
    pair: tuple[int, float] = (1, 2.0)
    many: tuple[Inner, ...] = ()
    maybe: Inner | None = None
    limit: int | float | None = None
    mode: Literal["fast", "slow"] = "fast"
    extra: Mapping[str, int] = dataclasses.field(default_factory=dict)
    anything: Any = None


def build(**fields):
    return config.typed(Outer, {"inner": {"rate": 0.5}, **fields}, "cfg.py")


def line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_converts_nested_config_dict():
    source = ml_collections.ConfigDict(
        {"inner": {"rate": 1, "on": True}, "colour": "blue", "sizes": [1, 2], "pair": (3, 4),
         "many": [{"rate": 0.1}], "maybe": {"rate": 2.5, "count": 7}, "limit": 4,
         "mode": "slow", "extra": {"a": 1}, "anything": [None]})
    got = config.typed(Outer, source, "cfg.py")
    assert got == Outer(Inner(1.0, 3, True), "x", Colour.BLUE, (1, 2), (3, 4.0), (Inner(0.1),),
                        Inner(2.5, 7), 4, "slow", {"a": 1}, [None])
    assert type(got.inner.rate) is float and type(got.pair[1]) is float
    assert type(got.limit) is int
    assert build(colour=Colour.BLUE).colour is Colour.BLUE
    assert build(maybe=None).maybe is None


@pytest.mark.parametrize("fields, path, words", [
    ({"inner": {"rate": 0.5, "cout": 1}}, "inner.cout", "did you mean count?"),
    ({"nmae": "y"}, "nmae", "did you mean name?"),
    ({"inner": {"rate": "fast"}}, "inner.rate", "got 'fast' (str), expected float"),
    ({"inner": {"rate": True}}, "inner.rate", "got True (bool), expected float"),
    ({"inner": {"rate": 1.0, "count": True}}, "inner.count", "got True (bool), expected int"),
    ({"inner": {"rate": 1.0, "count": 2.0}}, "inner.count", "write 2"),
    ({"inner": {"rate": 1.0, "on": 1}}, "inner.on", "write True or False"),
    ({"inner": {}}, "inner.rate", "got nothing, expected float; set inner.rate"),
    ({"inner": 3}, "inner", "got 3 (int), expected the fields of Inner"),
    ({"inner": {"rate": 1.0, "count": -1}}, "inner", "count is -1, must not be negative"),
    ({"name": 7}, "name", "put it in quotes"),
    ({"colour": "rod"}, "colour", "expected one of 'red', 'blue'; did you mean red?"),
    ({"sizes": 3}, "sizes", "write (3,)"),
    ({"sizes": [1, "2"]}, "sizes[1]", "got '2' (str), expected int"),
    ({"pair": [1]}, "pair", "give exactly 2"),
    ({"many": [{"rate": 1.0}, {"rate": 1.0, "no": 1}]}, "many[1].no", "an unknown field"),
    ({"maybe": {"rte": 1.0}}, "maybe.rte", "did you mean rate?"),
    ({"limit": "lots"}, "limit", "expected int | float | None"),
    ({"mode": "fsat"}, "mode", "did you mean fast?"),
    ({"extra": {"a": "b"}}, "extra.a", "got 'b' (str), expected int"),
])
def test_errors_are_one_line_with_file_path_and_remedy(fields, path, words):
    with pytest.raises(config.ConfigError) as error:
        build(**fields)
    assert line(error).startswith(f"cfg.py: {path}: ")
    assert words in line(error)


def test_unfilled_placeholder_is_a_missing_field():
    source = ml_collections.ConfigDict()
    source.inner = ml_collections.ConfigDict()
    source.inner.rate = ml_collections.config_dict.required_placeholder(float)
    with pytest.raises(config.ConfigError) as error:
        config.typed(Outer, source, "cfg.py")
    assert "inner.rate: got nothing" in line(error)


@given(st.builds(
    Outer,
    inner=st.builds(Inner, st.floats(allow_nan=False), st.integers(0), st.booleans()),
    name=st.text(), colour=st.sampled_from(Colour), sizes=st.lists(st.integers()).map(tuple),
    pair=st.tuples(st.integers(), st.floats(allow_nan=False)), many=st.just(()),
    maybe=st.none(), limit=st.none() | st.integers() | st.floats(allow_nan=False),
    mode=st.sampled_from(["fast", "slow"]), extra=st.dictionaries(st.text(), st.integers()),
    anything=st.none()))
def test_json_round_trip(outer):
    text = json.dumps(config.to_json(outer))
    assert config.typed(Outer, json.loads(text), "saved") == outer


def test_to_json_refuses_what_has_no_json_form():
    with pytest.raises(TypeError, match="has no JSON form"):
        config.to_json({"a": object()})


# ---------------------------------------------------------------- files and overrides

FILE = """
import ml_collections
def get_config():
    c = ml_collections.ConfigDict()
    c.inner = ml_collections.ConfigDict({"rate": 0.5})
    c.name = "file"
    return c
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "base.py"
    path.write_text(FILE)
    return path


def test_load_applies_overrides_in_order(file):
    got = config.load(file, ["inner.rate=2", "inner.count=4", "inner.count=5", "sizes=(1, 2)",
                             "colour=blue", "maybe.rate=1e-3", "name=a=b", "mode='slow'"], Outer)
    assert got == Outer(Inner(2.0, 5), "a=b", Colour.BLUE, (1, 2), maybe=Inner(1e-3), mode="slow")


@pytest.mark.parametrize("override, words", [
    ("inner.cont=4", "--set inner.cont=4: inner.cont: got an unknown field"),
    ("inner.count=four", "--set inner.count=four: inner.count: got 'four' (str), expected int"),
    ("iner.count=4", "--set iner.count=4: iner: got an unknown field"),
    ("inner.rate.x=4", "inner.rate to be a group of fields, it is 0.5 (float)"),
    ("inner.count", "expected field.subfield=value"),
    ("inner..count=4", "expected field.subfield=value"),
    ("inner.on=true", "write True or False"),
    ("name=5", "put it in quotes"),
])
def test_bad_overrides(file, override, words):
    with pytest.raises(config.ConfigError) as error:
        config.load(file, [override], Outer)
    assert words in line(error)


def test_override_values_are_never_evaluated(file):
    got = config.load(file, ["name=__import__('os').getcwd()"], Outer)
    assert got.name == "__import__('os').getcwd()"


@pytest.mark.parametrize("source, words", [
    ("x = 1", "has no function get_config()"),
    ("def get_config():\n    return 3", "get_config() returned 3 (int)"),
    ("def get_config():\n    return {'inner': {'rate': 1 / 0}}",
     "line 2: ZeroDivisionError: division by zero"),
    ("def get_config(:", "line 1: SyntaxError"),
    ("import no_such_module_here", "line 1: ModuleNotFoundError"),
])
def test_broken_config_files(tmp_path, source, words):
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(config.ConfigError) as error:
        config.load(path, [], Outer)
    assert line(error).startswith(f"{path}: ") and words in line(error)


def test_missing_config_file_names_the_nearest(file):
    with pytest.raises(config.ConfigError) as error:
        config.load(file.parent / "bas.py", [], Outer)
    assert f"did you mean {file}?" in line(error)
    with pytest.raises(config.ConfigError) as error:
        config.load(file.parent / "none" / "a.py", [], Outer)
    assert "there is no folder" in line(error)


# ---------------------------------------------------------------- entry points


@pytest.mark.parametrize("raised, code, words", [
    (config.UserError("mend\nthis"), 2, "error: mend this"),
    (FileNotFoundError(errno.ENOENT, "No such file or directory", "/a/b"), 2,
     "error: /a/b: No such file or directory"),
    (FileNotFoundError("no model here"), 2, "error: no model here"),
    (OSError(errno.ENOSPC, "No space left on device", "/a/b"), 2,
     "error: /a/b: No space left on device: make room there"),
    (OSError(errno.EFBIG, "File too large"), 2,
     "error: File too large: raise the limit of a file's size (ulimit -f)"),
    (KeyError("k"), 2, "error: 'k'"),
    (KeyboardInterrupt(), 130, "interrupted"),
])
def test_run_main_tells_in_one_line(capsys, raised, code, words):
    def main():
        raise raised

    with pytest.raises(SystemExit) as end:
        config.run_main(main, user_errors=(KeyError,))
    assert end.value.code == code
    assert capsys.readouterr().err == words + "\n"


def test_run_main_leaves_faults_of_the_code_alone():
    def main():
        raise ValueError("a fault")

    with pytest.raises(ValueError, match="a fault"):
        config.run_main(main)
    with pytest.raises(SystemExit) as end:
        config.run_main(lambda: None)
    assert end.value.code == 0


def test_a_full_disk_that_has_no_name_gets_the_folders(tmp_path):
    with pytest.raises(config.UserError) as error, config.naming(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert line(error) == (f"{tmp_path}: No space left on device: make room there and start again, "
                           "with --resume where it has a checkpoint")
    with pytest.raises(OSError, match="odd") as other, config.naming(tmp_path):
        raise OSError(errno.EIO, "odd")
    assert other.value.errno == errno.EIO


def test_run_main_in_a_process(tmp_path):
    code = ("from rods_jax import config\n"
            "config.run_main(lambda: config.load('nowhere.py', [], dict))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: nowhere.py: no such config file; ")
    assert done.stderr.count("\n") == 1


def test_write_text_replaces_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "out.json"
    config.write_json(path, {"b": 1, "a": None})
    assert json.loads(path.read_text()) == {"a": None, "b": 1}
    with pytest.raises(UnicodeEncodeError):
        config.write_text(path, "\ud800")
    assert json.loads(path.read_text()) == {"a": None, "b": 1}
    assert [p.name for p in path.parent.iterdir()] == ["out.json"]


def test_write_json_to_standard_output_is_one_line(capsys):
    config.write_json("-", {"b": [1, 2], "a": None})
    assert capsys.readouterr().out == '{"a": null, "b": [1, 2]}\n'


@dataclasses.dataclass(frozen=True)
class Whole:
    inner: Inner
    most: int = 5

    def __post_init__(self):
        if self.inner.count > self.most:
            raise ValueError(f"inner.count {self.inner.count} is above most: lower it")


@pytest.mark.parametrize("given, said", [
    (["inner.count=-1"], "--set inner.count=-1: count is -1"),
    (["inner.count=9"], "--set inner.count=9: inner.count 9 is above most"),
    (["most=1"], "--set most=1: inner.count 3 is above most"),
])
def test_a_check_of_values_names_the_override_that_it_is_about(tmp_path, given, said):
    file = tmp_path / "c.py"
    file.write_text("def get_config():\n    return {'inner': {'rate': 1.0}}\n")
    with pytest.raises(config.ConfigError) as error:
        config.load(file, given, Whole)
    assert line(error).startswith(said)
    file.write_text("def get_config():\n    return {'inner': {'rate': 1.0, 'count': -1}}\n")
    with pytest.raises(config.ConfigError) as error:
        config.load(file, ["most=4"], Whole)
    assert line(error).startswith(f"{file}: inner: count is -1")


def test_whole_numbers_are_those_of_devices_but_for_bytes():
    def run(**fields):
        return config.typed(RunConfig, {"seed": 0, "steps": 1, **fields}, "here")

    most = 2 ** 31 - 1
    assert run(steps=most, seed=-most, sampler={"kv_bytes": 2 ** 40}).steps == most
    for fields, name in (({"seed": -2 ** 31}, "seed"), ({"queue": most + 1}, "queue"),
                         ({"curriculum": {"stages": [{"steps": 2 ** 31, "reward": "binary"}]}},
                          "curriculum.stages.steps")):
        with pytest.raises(config.ConfigError, match=f"{name} is .* give at most {most}"):
            run(**fields)


def test_a_runs_own_json_is_a_config(tmp_path):
    run = config.load("configs/bfcl_smollm2.py", ["policy.lora.rank=4"], RunConfig)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_json(run)))
    assert config.load(path, [], RunConfig) == run
    assert config.load(path, ["steps=7"], RunConfig) == dataclasses.replace(run, steps=7)
    for text, words in (("{", "is not JSON"), ("[]", "holds no object"),
                        ('{"seed": 0, "steps": 1, "stepz": 2}', "stepz")):
        path.write_text(text)
        with pytest.raises(config.UserError, match=words):
            config.load(path, [], RunConfig)
