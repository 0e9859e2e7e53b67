"""rods_jax.startup and rods_jax.rollcall: flags, platform, who is missing."""

import os
import pathlib
import socket
import subprocess
import sys
import threading

import jax
import pytest

from rods_jax import startup
from rods_jax.config import UserError
from rods_jax.rollcall import RollCallError, roll_call
from rods_jax.startup import FlagPreset, Platform

ROOT = pathlib.Path(__file__).resolve().parents[1]
VERSIONS = {"jax": "0.10.2", "jaxlib": "0.10.2"}


def test_start_on_the_cpu_gives_the_record(monkeypatch):
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "RODS_PROCESSES"):
        monkeypatch.delenv(name, raising=False)
    record = startup.start("cpu")
    assert record["platform"] == "cpu" and record["device_count"] == jax.device_count()
    assert record["versions"]["jax"] == jax.__version__
    assert record["python"].split(".") == [str(v) for v in sys.version_info[:3]]


def test_wanted_platform_that_does_not_run_ends_the_start(monkeypatch):
    monkeypatch.setattr(startup, "installed_versions", lambda: dict(VERSIONS))
    with pytest.raises(startup.StartError) as error:
        startup.check_platform("gpu")
    assert str(error.value).startswith(
        "wanted platform gpu, jax runs on cpu: jax 0.10.2, jaxlib 0.10.2, no accelerator plugin; ")


@pytest.mark.parametrize("wanted, backend, plugins, words", [
    ("cpu", "cpu", {}, None), ("any", "cpu", {}, None), ("any", "gpu", {"libtpu": "1"}, None),
    ("gpu", "gpu", {}, None), ("tpu", "tpu", {}, None), ("cpu", "cpu", {"libtpu": "1"}, None),
    ("gpu", "cpu", {"jax-cuda13-plugin": "0.10.2"}, "jax-cuda13-plugin 0.10.2"),
    ("any", "cpu", {"jax-cuda13-plugin": "0.10.2"}, "wanted platform an accelerator"),
    ("tpu", "cpu", {"libtpu": "0.0.42"}, "libtpu 0.0.42"),
    ("cpu", "gpu", {}, "set JAX_PLATFORMS=cpu"), ("any", "none", {}, "jax runs on none (why)"),
])
def test_platform_problem(wanted, backend, plugins, words):
    got = startup.platform_problem(Platform(wanted), backend, {**VERSIONS, **plugins}, "why")
    assert got is None if words is None else words in got and "\n" not in got


def test_plugin_of_another_version_is_found_before_a_backend_starts(monkeypatch):
    monkeypatch.setattr(startup, "installed_versions",
                        lambda: {**VERSIONS, "jaxlib": "0.4.38", "jax-cuda12-plugin": "0.5.0"})
    monkeypatch.setattr(jax, "default_backend", lambda: pytest.fail("a backend was started"))
    for wanted in ("gpu", "any"):
        with pytest.raises(startup.StartError) as error:
            startup.check_platform(wanted)
        assert "jax-cuda12-plugin 0.5.0" in str(error.value) and "0.4.38" in str(error.value)


def test_platform_that_cannot_start_is_one_line():
    code = ("from rods_jax import config, startup\n"
            "config.run_main(lambda: startup.check_platform('gpu') and None)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "JAX_PLATFORMS": "cuda"})
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: wanted platform gpu, jax runs on none") and "jaxlib" in last


# ---------------------------------------------------------------- flags


@pytest.mark.parametrize("wanted, environment, want", [
    ("cpu", {}, {}),
    ("tpu", {"XLA_FLAGS": "--xla_tpu_a=1 --xla_b=2", "LIBTPU_INIT_ARGS": "--xla_tpu_c=3"},
     {"XLA_FLAGS": "--xla_b=2", "LIBTPU_INIT_ARGS": "--xla_tpu_c=3 --xla_tpu_a=1"}),
    ("cpu", {"XLA_FLAGS": "--xla_tpu_a=1 --xla_b=2"}, {"XLA_FLAGS": "--xla_b=2"}),
    ("gpu", {"XLA_FLAGS": "--xla_tpu_a=1"}, {"XLA_FLAGS": ""}),
    ("any", {"XLA_FLAGS": "--xla_tpu_a=1"}, {"XLA_FLAGS": "", "LIBTPU_INIT_ARGS": "--xla_tpu_a=1"}),
])
def test_tpu_flags_go_to_libtpu_only(wanted, environment, want):
    assert startup.compiler_flags(environment, Platform(wanted)) == want


def test_preset_gives_way_to_the_user():
    name = "--xla_gpu_enable_latency_hiding_scheduler"
    got = startup.compiler_flags({"XLA_FLAGS": f"{name}=false"}, Platform.GPU, FlagPreset.OVERLAP)
    assert got == {}
    got = startup.compiler_flags({}, Platform.GPU, FlagPreset.OVERLAP)
    assert f"{name}=true" in got["XLA_FLAGS"].split() and "LIBTPU_INIT_ARGS" not in got
    got = startup.compiler_flags({}, Platform.TPU, FlagPreset.OVERLAP)
    assert "XLA_FLAGS" not in got and "--xla_tpu_" in got["LIBTPU_INIT_ARGS"]
    assert startup.compiler_flags({}, Platform.CPU, FlagPreset.OVERLAP) == {}


@pytest.mark.parametrize("platform", [Platform.CPU, Platform.GPU, Platform.TPU])
@pytest.mark.parametrize("preset", list(FlagPreset))
def test_process_starts_with_each_preset(platform, preset):
    """XLA stops a process at a flag it does not know, so its own parser is the judge. The
    CPU compiler knows the GPU's flags and must never see the TPU's."""
    flags = startup.compiler_flags({"XLA_FLAGS": "--xla_tpu_unheard_of=1"}, platform, preset)
    clean = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    done = subprocess.run([sys.executable, "-c", "import jax; print(jax.numpy.ones(2).sum())"],
                          env={**clean, **flags, "JAX_PLATFORMS": "cpu"},
                          capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "2.0\n", done.stderr


# ---------------------------------------------------------------- roll call


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def call_all(indices, count, timeout_s, address=None):
    address = address or f"127.0.0.1:{free_port()}"
    answers = {}

    def one(index):
        try:
            roll_call(address, count, index, timeout_s)
            answers[index] = "go"
        except RollCallError as e:
            answers[index] = str(e)

    threads = [threading.Thread(target=one, args=(i,)) for i in indices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_roll_call_lets_all_go_when_all_are_there():
    assert call_all([3, 1, 0, 2], 4, 30) == dict.fromkeys(range(4), "go")
    assert call_all([0], 1, 30) == {0: "go"}


def test_roll_call_names_the_missing_to_everybody_present():
    answers = call_all([0, 2, 4], 6, 1.0)
    assert set(answers) == {0, 2, 4}
    for text in answers.values():
        assert text.startswith("no call from worker 1, 3, 5 within 1 s; ")


def test_worker_whose_coordinator_never_comes_says_where_it_called():
    port = free_port()
    (answer,) = call_all([1], 2, 0.5, f"127.0.0.1:{port}").values()
    assert answer.startswith(f"worker 1: worker 0 did not answer at 127.0.0.1:{port} within 0.5 s")


def test_roll_call_is_not_upset_by_strangers():
    port = free_port()

    def stranger(text):
        for _ in range(200):
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=5) as s:
                    s.sendall(text)
                    return
            except ConnectionRefusedError:
                threading.Event().wait(0.01)

    noise = [threading.Thread(target=stranger, args=(t,)) for t in (b"GET /\r\n", b"\xff\n", b"7\n", b"")]
    for thread in noise:
        thread.start()
    assert call_all([0], 2, 1.0, f"127.0.0.1:{port}")[0].startswith("no call from worker 1 ")
    for thread in noise:
        thread.join()


@pytest.mark.parametrize("settings, words", [
    ({}, "RODS_PROCESS_ID='' is not a whole number"),
    ({"RODS_PROCESS_ID": "x"}, "RODS_PROCESS_ID='x' is not a whole number"),
    ({"RODS_PROCESS_ID": "0"}, "'' is not host:port"),
    ({"RODS_PROCESS_ID": "2", "JAX_COORDINATOR_ADDRESS": "h:1"}, "process 2 of 2"),
])
def test_settings_of_a_pod_are_checked(settings, words):
    with pytest.raises(UserError) as error:
        startup.join_processes({"RODS_PROCESSES": "2", **settings})
    assert words in str(error.value)


def test_two_processes_join_through_the_same_port():
    code = ("from rods_jax import startup\nr = startup.start('cpu')\n"
            "print(r['process_count'], r['device_count'], r['local_device_count'])")
    shared = {**os.environ, "RODS_PROCESSES": "2", "RODS_START_TIMEOUT": "60",
              "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "",
              "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}"}
    started = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True,
                                env={**shared, "RODS_PROCESS_ID": str(i)},
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE) for i in (1, 0)]
    for process in started:
        out, err = process.communicate()
        assert out == "2 2 1\n", err[-1500:]
