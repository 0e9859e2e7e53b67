"""tpu_scripts against a stand-in for gcloud that keeps its requests in a file."""

import os
import pathlib
import shlex
import signal
import subprocess
import time

import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parents[1] / "tpu_scripts"

# Requests are lines of name,state,owner in $FAKE/requests. Every call goes to
# $FAKE/calls, its words ended by US and the call by RS. A file $FAKE/refuse-N makes the N-th create fail with its text.
GCLOUD = r"""#!/usr/bin/env bash
{ printf '%s\037' "$@"; printf '\036'; } >>"$FAKE/calls"
shift 2
verb="$1 $2" name=${3:-}
case $verb in
  'queued-resources list') cat "$FAKE/requests" ;;
  'queued-resources describe') awk -F, -v n="$name" '$1 == n { print $2 }' "$FAKE/requests"
    # A request that waits is ready at the next look.
    if [[ ! -e $FAKE/stuck ]]; then sed -i "s/^$name,WAITING,/$name,ACTIVE,/" "$FAKE/requests"; fi ;;
  'queued-resources delete') sed -i "/^$name,/d" "$FAKE/requests" ;;
  'queued-resources create')
    n=$(($(cat "$FAKE/creates" 2>/dev/null || echo 0) + 1)); echo $n >"$FAKE/creates"
    if [[ -e $FAKE/refuse-$n ]]; then cat "$FAKE/refuse-$n" >&2; exit 1; fi
    for a in "$@"; do [[ $a == --labels=rods_owner=* ]] && owner=${a##*=}; done
    echo "$name,$(cat "$FAKE/first-state" 2>/dev/null || echo WAITING),$owner" >>"$FAKE/requests" ;;
  'tpu-vm describe') cat "$FAKE/addresses" ;;
  'tpu-vm ssh')
    for a in "$@"; do
      [[ $a == --worker=* ]] && w=${a#--worker=}
      [[ $a == --command=* ]] && c=${a#--command=}
    done
    if [[ -e $FAKE/dead-$w ]]; then exit 255; fi
    if [[ $c == *' state '* ]]; then cat "$FAKE/state"
    elif [[ $c == *' states' ]]; then echo "host run1 running: step 5"
    elif [[ $c == *' check' && -e $FAKE/busy ]]; then exit 3; fi ;;
  'tpu-vm scp') cp "$name" "$FAKE/bundle.tgz" ;;
esac
"""

OTHERS = "theirs,ACTIVE,bob\ntheirs-dead,FAILED,bob\nunlabelled,SUSPENDED,\n"
QUOTA = "ERROR: RESOURCE_EXHAUSTED: Quota limit 'TPUV5sPreemptible' has been\nexceeded. Limit: 8 in us-west4-a.\n"


@pytest.fixture
def fake(tmp_path):
    folder = tmp_path / "fake"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "gcloud").write_text(GCLOUD)
    (folder / "bin" / "gcloud").chmod(0o755)
    (folder / "requests").write_text(OTHERS)
    (folder / "addresses").write_text("10.0.0.2\n")
    (folder / "calls").write_text("")
    return folder


def environment(fake, **more):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RODS_", "XLA_", "LIBTPU"))}
    return {**clean, "PATH": f"{fake / 'bin'}:{os.environ['PATH']}", "FAKE": str(fake),
            "RODS_TPU_ZONE": "us-west4-a", "RODS_OWNER": "Ann.Lee", "RODS_POLL_S": "0", **more}


def run(fake, script, *arguments, **more):
    return subprocess.run([SCRIPTS / script, *arguments], env=environment(fake, **more),
                          capture_output=True, text=True, stdin=subprocess.DEVNULL)


def calls(fake, verb=""):
    found = [c.split("\x1f")[:-1] for c in (fake / "calls").read_text().split("\x1e")[:-1]]
    return [c[2:] for c in found if " ".join(c[2:]).startswith(verb)]


def requests(fake):
    return (fake / "requests").read_text()


def ssh_commands(fake):
    return [next(a.removeprefix("--command=") for a in c if a.startswith("--command="))
            for c in calls(fake, "tpu-vm ssh")]


# ---------------------------------------------------------------- create and delete


def test_create_waits_until_it_runs(fake):
    done = run(fake, "create.sh", "mine", RODS_TPU_SPOT="1", RODS_TPU_PROJECT="p1")
    assert done.returncode == 0, done.stderr
    (create,) = calls(fake, "queued-resources create")
    assert create == [
        "queued-resources", "create", "mine", "--node-id=mine",
        "--accelerator-type=v5litepod-8", "--runtime-version=v2-alpha-tpuv5-lite",
        "--labels=rods_owner=ann-lee", "--spot", "--zone=us-west4-a", "--project=p1"]
    assert "mine: WAITING\nmine: ACTIVE\n" in done.stderr
    assert requests(fake) == OTHERS + "mine,ACTIVE,ann-lee\n"


def test_quota_deletes_own_dead_requests_only_and_tries_once_more(fake):
    mine = "a,ACTIVE,ann-lee\nb,SUSPENDED,ann-lee\nc,FAILED,ann-lee\nd,SUSPENDED,ann-lee\n"
    (fake / "requests").write_text(mine + OTHERS)
    (fake / "refuse-1").write_text(QUOTA)
    done = run(fake, "create.sh", "new")
    assert done.returncode == 0, done.stderr
    assert QUOTA in done.stderr
    assert [c[2] for c in calls(fake, "queued-resources delete")] == ["b", "c", "d"]
    assert len(calls(fake, "queued-resources create")) == 2
    assert requests(fake) == "a,ACTIVE,ann-lee\n" + OTHERS + "new,ACTIVE,ann-lee\n"


def test_quota_still_used_up_is_shown_whole_and_ends(fake):
    (fake / "requests").write_text("b,SUSPENDED,ann-lee\n" + OTHERS)
    for n in (1, 2):
        (fake / f"refuse-{n}").write_text(QUOTA)
    done = run(fake, "create.sh", "new")
    assert done.returncode == 1 and done.stderr.count(QUOTA) == 2
    assert len(calls(fake, "queued-resources create")) == 2
    assert requests(fake) == OTHERS


def test_quota_with_nothing_dead_and_other_refusals_do_not_retry(fake):
    (fake / "refuse-1").write_text(QUOTA)
    done = run(fake, "create.sh", "new")
    assert done.returncode == 1 and "none of your requests is suspended" in done.stderr
    (fake / "refuse-2").write_text("ERROR: no such accelerator type\n")
    done = run(fake, "create.sh", "new")
    assert done.returncode == 1
    assert "no such accelerator type\nerror: the request was refused\n" in done.stderr
    assert len(calls(fake, "queued-resources create")) == 2
    assert not calls(fake, "queued-resources delete") and requests(fake) == OTHERS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_create_deletes_what_it_asked_for(fake, number):
    (fake / "stuck").touch()
    # Under a shell that put the tests into the background SIGINT is ignored, and a script
    # that is started so cannot catch it.
    process = subprocess.Popen([SCRIPTS / "create.sh", "mine"], stderr=subprocess.PIPE, text=True,
                               env=environment(fake, RODS_POLL_S="30"),
                               preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
    assert process.stderr.readline() == "mine: WAITING\n"
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    assert "deleting the request mine" in process.stderr.read()
    process.stderr.close()
    assert requests(fake) == OTHERS


def test_failed_request_is_deleted(fake):
    (fake / "first-state").write_text("FAILED")
    done = run(fake, "create.sh", "mine")
    assert done.returncode == 1 and "mine did not come up" in done.stderr
    assert requests(fake) == OTHERS


def test_create_refuses_a_name_that_is_taken(fake):
    done = run(fake, "create.sh", "theirs")
    assert done.returncode == 2 and "there is a request theirs already" in done.stderr
    assert requests(fake) == OTHERS


def test_delete_takes_what_was_named_and_is_yours(fake):
    (fake / "requests").write_text("a,ACTIVE,ann-lee\nb,SUSPENDED,ann-lee\n" + OTHERS)
    done = run(fake, "delete.sh", "a", "theirs")
    assert done.returncode == 2 and "theirs belongs to bob, you are ann-lee" in done.stderr
    assert not calls(fake, "queued-resources delete")
    assert run(fake, "delete.sh", "nothing").returncode == 2
    assert run(fake, "delete.sh", "a").returncode == 0
    assert calls(fake, "queued-resources delete") == [
        ["queued-resources", "delete", "a", "--force", "--quiet", "--zone=us-west4-a"]]
    assert run(fake, "delete.sh", "--dead").returncode == 0
    assert requests(fake) == OTHERS


# ---------------------------------------------------------------- launch, status, setup, sweep


def test_launch_refuses_a_part_of_a_pod(fake):
    (fake / "addresses").write_text("10.0.0.2;10.0.0.3;10.0.0.4;10.0.0.5\n")
    done = run(fake, "launch.sh", "mine", "--worker=0", "--", "python", "x.py")
    assert done.returncode == 2
    assert "a pod of 4 workers and starts with --worker=all only, not --worker=0" in done.stderr
    assert not calls(fake, "tpu-vm ssh")


def test_launch_starts_every_worker_with_port_timeout_and_flags(fake):
    (fake / "addresses").write_text("10.0.0.2;10.0.0.3\n")
    done = run(fake, "launch.sh", "mine", "--run", "r1", "--", "python", "-m", "x", "--set",
               "name=it's a; $HOME", RODS_COORDINATOR_PORT="9000", RODS_START_TIMEOUT="1200",
               XLA_FLAGS="--xla_tpu_a=1 --xla_dump_to=/tmp/d", LIBTPU_INIT_ARGS="--xla_tpu_b=2")
    assert done.returncode == 0, done.stderr
    assert all("--worker=all" in c for c in calls(fake, "tpu-vm ssh"))
    check, start = ssh_commands(fake)
    assert check == "bash rods_jax/tpu_scripts/worker.sh check"
    assert shlex.split(start) == [
        "env", "RODS_PROCESSES=2", "RODS_START_TIMEOUT=1200",
        "JAX_COORDINATOR_ADDRESS=10.0.0.2:9000", "XLA_FLAGS=--xla_dump_to=/tmp/d",
        "LIBTPU_INIT_ARGS=--xla_tpu_a=1 --xla_tpu_b=2", "bash",
        "rods_jax/tpu_scripts/worker.sh", "start", "r1", "--", "python", "-m", "x", "--set",
        "name=it's a; $HOME"]


def test_launch_starts_nothing_where_the_tpu_is_held(fake):
    (fake / "busy").touch()
    done = run(fake, "launch.sh", "mine", "--", "true")
    assert done.returncode == 3 and "not free on every worker" in done.stderr
    assert len(ssh_commands(fake)) == 1


@pytest.mark.parametrize("arguments, words", [
    (["mine", "--run", "a b", "--", "x"], "not a run name"), (["Mine!", "--", "x"], "not a TPU name"),
    (["mine"], "launch.sh NAME"), (["mine", "--what", "--", "x"], "launch.sh NAME"), ([], "launch.sh NAME")])
def test_launch_usage(fake, arguments, words):
    done = run(fake, "launch.sh", *arguments)
    assert done.returncode == 2 and words in done.stderr and not calls(fake)


def test_launch_wait_gives_the_status_of_all_workers(fake):
    (fake / "addresses").write_text("10.0.0.2;10.0.0.3\n")
    (fake / "state").write_text("h0 r ended 0\nh1 r ended 0\n")
    assert run(fake, "launch.sh", "mine", "--run", "r", "--wait", "--", "x").returncode == 0
    (fake / "state").write_text("h0 r ended 0\nh1 r lost\n")
    done = run(fake, "launch.sh", "mine", "--run", "r", "--wait", "--", "x")
    assert done.returncode == 1 and "did not end well on every worker" in done.stderr


def test_launch_wait_ends_when_the_tpu_was_taken_back(fake):
    (fake / "requests").write_text("mine,SUSPENDED,ann-lee\n")
    done = run(fake, "launch.sh", "mine", "--run", "r", "--wait", "--", "x")
    assert done.returncode == 1 and "mine is SUSPENDED, r with it" in done.stderr


def test_status_lists_yours_and_names_silent_workers(fake):
    (fake / "requests").write_text("mine,ACTIVE,ann-lee\nwait,WAITING,ann-lee\n" + OTHERS)
    listed = run(fake, "status.sh").stdout
    assert [line.split() for line in listed.splitlines()] == [["mine", "ACTIVE"], ["wait", "WAITING"]]
    (fake / "addresses").write_text("10.0.0.2;10.0.0.3;10.0.0.4\n")
    (fake / "dead-1").touch()
    done = run(fake, "status.sh", "mine")
    assert done.returncode == 1 and done.stderr == "error: no answer from worker 1\n"
    assert "worker 0: host run1 running: step 5\nworker 2: " in done.stdout
    done = run(fake, "status.sh", "wait")
    assert done.returncode == 0 and done.stdout == "wait: WAITING\n"


def test_setup_sends_the_working_tree_to_every_worker(fake, tmp_path):
    tree = tmp_path / "tree"
    (tree / "tpu_scripts").mkdir(parents=True)
    for script in SCRIPTS.glob("*.sh"):
        (tree / "tpu_scripts" / script.name).write_bytes(script.read_bytes())
        (tree / "tpu_scripts" / script.name).chmod(0o755)
    (tree / ".gitignore").write_text("runs/\n")
    (tree / "runs").mkdir()
    for name in ("gone.py", "kept.py", "runs/big", "with blank.py"):
        (tree / name).write_text(name)
    git = ["git", "-C", tree]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "gone.py", "kept.py"], check=True)
    (tree / "gone.py").unlink()
    done = subprocess.run([tree / "tpu_scripts" / "setup.sh", "mine"], env=environment(fake),
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listed = subprocess.run(["tar", "-tzf", fake / "bundle.tgz"], capture_output=True, text=True)
    names = listed.stdout.split("\n")
    assert "kept.py" in names and "with blank.py" in names and "tpu_scripts/worker.sh" in names
    assert "gone.py" not in names and "runs/big" not in names
    assert "--worker=all" in calls(fake, "tpu-vm scp")[0]
    (install,) = ssh_commands(fake)
    assert 'install -q --upgrade -r requirements.txt "jax[tpu]"' in install


def test_sweep_runs_every_line_and_names_what_failed(fake, tmp_path):
    (fake / "state").write_text("h0 r ended 0\n")
    grid, config = tmp_path / "grid.txt", tmp_path / "c.py"
    config.write_text("")
    grid.write_text("a.b=1 seed=2  # first\n\n# nothing\na.b=3\n")
    done = run(fake, "sweep.sh", "mine", str(config), str(grid))
    assert done.returncode == 0, done.stderr
    starts = [shlex.split(c) for c in ssh_commands(fake) if " start " in c]
    assert [c[c.index("--") + 1:] for c in starts] == [
        ["python", "-m", "experiments.train", "--config", str(config), "--out", f"runs/grid-{n}", *sets]
        for n, sets in ((1, ["--set", "a.b=1", "--set", "seed=2"]), (4, ["--set", "a.b=3"]))]
    (fake / "state").write_text("h0 r ended 1\n")
    done = run(fake, "sweep.sh", "mine", str(config), str(grid))
    assert done.returncode == 1 and "failed: grid-1 grid-4" in done.stderr


def test_no_zone_and_no_gcloud_are_one_line(fake):
    done = run(fake, "status.sh", RODS_TPU_ZONE="")
    assert done.returncode == 2 and done.stderr.startswith("error: RODS_TPU_ZONE is not set")


# ---------------------------------------------------------------- on the worker


@pytest.fixture
def worker(tmp_path):
    home = tmp_path / "home"
    (home / "rods_jax").mkdir(parents=True)
    (home / "bin").mkdir()
    device = tmp_path / "accel0"
    device.touch()

    def call(*arguments, check=False):
        return subprocess.run(
            [SCRIPTS / "worker.sh", *arguments], capture_output=True, text=True, check=check,
            env={**os.environ, "RODS_HOME": str(home), "RODS_LOCK": str(tmp_path / "lock"),
                 "RODS_DEVICES": str(tmp_path / "accel*"),
                 "PATH": f"{home / 'bin'}:{os.environ['PATH']}"})

    call.home, call.lock, call.device = home, tmp_path / "lock", device
    return call


def test_stale_lock_is_removed(worker):
    assert worker("check").returncode == 0
    worker.lock.touch()
    done = worker("check")
    assert done.returncode == 0 and "removed the stale lock" in done.stderr
    assert not worker.lock.exists()


def test_live_holder_is_named_and_nothing_is_removed(worker):
    worker.lock.touch()
    with open(worker.device) as held:
        holder = subprocess.Popen(["sleep", "60"], stdin=held)
    try:
        done = worker("check")
        assert done.returncode == 3 and f"held by process {holder.pid} (sleep 60" in done.stderr
        assert worker.lock.exists() and holder.poll() is None
    finally:
        holder.kill()
        holder.wait()


def test_lock_of_another_user_says_who_and_what_to_run(worker):
    worker.lock.touch()
    stat = worker.home / "bin" / "stat"
    stat.write_text("#!/bin/sh\necho alice\n")
    stat.chmod(0o755)
    done = worker("check")
    assert done.returncode == 3 and worker.lock.exists()
    assert "belongs to user alice" in done.stderr
    assert f"run: sudo -u alice rm {worker.lock}" in done.stderr


def state(worker, name):
    return worker("state", name, check=True).stdout.split(maxsplit=2)[2].strip()


def wait_for(worker, name, want):
    for _ in range(500):
        if state(worker, name) == want:
            return
        time.sleep(0.02)
    raise AssertionError(f"{name} is {state(worker, name)}, not {want}")


def test_run_is_started_logged_and_its_status_kept(worker):
    assert worker("state", "r").stdout.split(maxsplit=2)[2] == "never started\n"
    worker("start", "r", "--", "bash", "-c", "echo $RODS_PROCESS_ID 'a  b'; exit 7", check=True)
    wait_for(worker, "r", "ended 7")
    assert (worker.home / "rods_runs" / "r.log").read_text() == "0 a  b\n"
    assert worker("states").stdout.strip().endswith("r ended 7: 0 a  b")
    again = worker("start", "r", "--", "true")
    assert again.returncode == 2 and "there is a run r already" in again.stderr


def test_worker_of_a_pod_asks_for_its_number(worker, monkeypatch):
    curl = worker.home / "bin" / "curl"
    curl.write_text("#!/bin/sh\necho 3\n")
    curl.chmod(0o755)
    monkeypatch.setenv("RODS_PROCESSES", "4")
    worker("start", "r", "--", "bash", "-c", "echo $RODS_PROCESS_ID of $RODS_PROCESSES", check=True)
    wait_for(worker, "r", "ended 0")
    assert (worker.home / "rods_runs" / "r.log").read_text() == "3 of 4\n"


def test_stop_ends_that_run_with_its_children_only(worker):
    for name in ("r", "rr"):
        worker("start", name, "--", "bash", "-c", "sleep 100 & wait", check=True)
        wait_for(worker, name, "running")
    worker("stop", "r", check=True)
    assert state(worker, "r") in ("lost", "ended 143")
    assert state(worker, "rr") == "running"
    worker("stop", "rr", check=True)
    assert state(worker, "rr") != "running"


def test_scripts_parse():
    for script in sorted(SCRIPTS.glob("*.sh")):
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert os.access(script, os.X_OK) == (script.name != "common.sh")
