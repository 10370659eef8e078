"""The start-up script of a Cloud TPU's hosts, run for real: a git repository or a folder as a bucket, files as devices,
sockets as the TPU runtime, a metadata server, and a launcher that ends as it is told to."""

from __future__ import annotations

import http.server
import json
import os
import shlex
import signal
import socket
import threading

import psutil
import pytest
from tpu_vm_host import SCRIPT

pytestmark = [pytest.mark.skipif(os.name != "posix", reason="the script is bash"), pytest.mark.slow]


@pytest.fixture
def until():
    """until(condition): waits for it; fails the test after a minute."""
    pause = threading.Event().wait

    def wait(condition):
        for _ in range(3000):
            if condition():
                return
            pause(0.02)
        pytest.fail("condition not met")

    return wait


@pytest.fixture
def metadata():
    """metadata(attributes): the address of a metadata server that has them."""
    servers = []

    def serve(attributes):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                asked = self.path == "/computeMetadata/v1/instance/attributes/?recursive=true"
                self.send_response(200 if asked and self.headers["Metadata-Flavor"] == "Google" else 403)
                self.end_headers()
                self.wfile.write(json.dumps(attributes).encode())

            def log_message(self, *_):
                pass

        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"127.0.0.1:{servers[-1].server_address[1]}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


# ------------------------------------------------------------------------------------------------------- from git, once


def test_one_host_installs_and_trains_on_its_own_chips(host):
    done = host.train("--tf_version=2.20.0")
    assert done.returncode == 0, done.stderr
    assert host.calls[0] == "install tpu tensorflow-tpu==2.20.0"
    assert shlex.split(host.calls[1]) == [
        "main", "--gin_file=resnet_tpu.gin", "--gin_param=train.steps = 30", f"--model_dir={host.home}/run"
    ]  # fmt: skip
    assert host.environment == {
        "cwd": f"{host.home}/src",
        "TPU_NAME": "local",
        "TPU_LOAD_LIBRARY": "",
        "TF_CONFIG": "",
        "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": "/lib/fake_libtpu.so",
    }
    assert (host.status["state"], host.status["exit_code"]) == ("done", 0)
    log = (host.home / "startup.log").read_text()
    assert "line of the launcher" in log and "line of the launcher" in done.stdout


@pytest.mark.parametrize(
    ("version", "elsewhere"), [("2.16.1", True), ("2.18.0", True), ("2.19.1", False), ("2.20.0", False)]
)
def test_a_libtpu_that_pypi_does_not_have_is_looked_for_in_googles_storage(host, version, elsewhere):
    python = host.folder / "bin" / "python3.10"
    host.write(python, "#!/bin/sh\nexit 0\n")
    assert host.train(f"--tf_version={version}", PIP_FIND_LINKS="/mine", PYTHON=str(python)).returncode == 0
    links = "/mine https://storage.googleapis.com/libtpu-tf-releases/index.html" if elsewhere else "/mine"
    assert (host.notes / "given").read_text() == f"{python}\n{links}\n"


@pytest.mark.parametrize(
    ("version", "pythons"), [("2.18.0", "3.10"), ("2.19.1", "3.10 to 3.12"), ("2.20.0", "3.10 to 3.13")]
)
def test_a_python_without_wheels_is_named_and_not_tried_again(host, version, pythons):
    host.write(host.folder / "bin" / "python3.8", "#!/bin/sh\nexit 1\n")
    done = host.train(f"--tf_version={version}", PYTHON="python3.8")
    assert done.returncode == 64 and done.stderr.count("\n") == 1
    assert f"tensorflow-tpu {version} needs Python {pythons}: " in done.stderr
    assert host.status["state"] == "failed" and host.calls == []


def test_a_finished_job_is_not_started_again(host):
    assert host.train().returncode == 0
    before = host.calls
    done = host.train()
    assert done.returncode == 0 and "done already" in done.stdout
    assert host.calls == before and host.status["state"] == "done"


def test_another_job_is_started_with_what_is_installed(host):
    assert host.train().returncode == 0
    host.plan("0")
    assert host.run(f"--source={host.repository}", "--", "--gin_file=other.gin").returncode == 0
    assert [call.split()[0] for call in host.calls] == ["install", "main", "main"]


@pytest.mark.parametrize("code", [42, 75, 1, 137])
def test_what_a_retry_may_help_is_run_again_at_the_next_boot(host, code):
    host.plan(code, 0)
    assert host.train().returncode == code
    assert (host.status["state"], host.status["exit_code"]) == ("waiting", code)
    assert host.train().returncode == 0
    assert (host.status["state"], host.status["exit_code"]) == ("done", 0)
    assert [call.split()[0] for call in host.calls] == ["install", "main", "main"]


@pytest.mark.parametrize("code", [64, 70])
def test_what_a_retry_would_not_help_is_not_run_again(host, code):
    host.plan(code, 0)
    assert host.train().returncode == code
    assert (host.status["state"], host.status["exit_code"]) == ("failed", code)
    done = host.train()
    assert done.returncode == code and "not started again" in done.stdout
    assert [call.split()[0] for call in host.calls] == ["install", "main"]
    host.plan(0)
    assert host.run(f"--source={host.repository}", "--", "--gin_file=mended.gin").returncode == 0


def test_only_installing_trains_nothing_and_the_next_time_is_quick(host):
    for _ in range(2):
        done = host.run(f"--source={host.repository}", "--install_only")
        assert done.returncode == 0, done.stderr
    assert [call.split()[0] for call in host.calls] == ["install"]
    assert host.status["state"] == "waiting" and (host.home / "python").exists()


def test_a_run_goes_on_with_the_code_it_began_with(host):
    host.plan(42, 0)
    assert host.train("--ref=main").returncode == 42
    (host.repository / "new").touch()
    host.commit()
    assert host.train("--ref=main").returncode == 0
    assert not (host.home / "src" / "new").exists()


def test_a_tag_is_checked_out_not_what_came_after_it(host):
    host.git("tag", "v1")
    (host.repository / "new").touch()
    host.commit()
    assert host.train("--ref=v1").returncode == 0
    assert not (host.home / "src" / "new").exists()


# ------------------------------------------------------------------------------------------------------------ cut short


def test_an_installation_that_was_killed_half_way_is_made_anew(host, until):
    (host.notes / "hang").touch()
    process = host.start(f"--source={host.repository}", "--", "--gin_file=x.gin")
    until((host.notes / "hanging").exists)
    assert host.status["state"] == "installing"
    group = psutil.Process(process.pid).children(recursive=True)  # each of which holds the lock until it is gone
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not psutil.wait_procs(group, timeout=60)[1]
    (host.notes / "hang").unlink()
    (host.home / "src" / "left_over").touch()
    done = host.run(f"--source={host.repository}", "--", "--gin_file=x.gin")
    assert done.returncode == 0, done.stderr
    assert [call.split()[0] for call in host.calls] == ["install", "install", "main"]
    assert host.status["state"] == "done" and not (host.home / "src" / "left_over").exists()


def test_while_the_launcher_lives_no_second_one_is_started(host, until):
    host.plan("hold", "0")
    process = host.start(f"--source={host.repository}", "--", "--gin_file=x.gin")
    until((host.notes / "holding").exists)
    assert host.status["state"] == "training"
    process.kill()  # the script alone
    process.wait()
    again = host.run(f"--source={host.repository}", "--", "--gin_file=x.gin")
    assert again.returncode == 0 and "runs already" in again.stdout
    assert host.run(f"--source={host.repository}", "--install_only").returncode == 75
    launcher = psutil.Process(int((host.notes / "holding").read_text()))
    launcher.kill()
    until(lambda: not psutil.pid_exists(launcher.pid))
    assert host.run(f"--source={host.repository}", "--", "--gin_file=x.gin").returncode == 0
    assert [call.split()[0] for call in host.calls] == ["install", "main", "main"]


def test_sigterm_reaches_the_launcher_once_and_the_next_boot_goes_on(host, until):
    host.plan("hold", "0")
    process = host.start(f"--source={host.repository}", "--", "--gin_file=x.gin")
    until((host.notes / "holding").exists)
    (host.notes / "busy").touch()
    for count in (1, 2):
        process.send_signal(signal.SIGTERM)
        until(lambda count=count: (host.home / "startup.log").read_text().count("told to stop") == count)
    until(lambda: "TERM" in host.calls)
    (host.notes / "busy").unlink()
    process.communicate(timeout=120)
    assert process.returncode == 42
    assert host.calls.count("TERM") == 1
    assert (host.status["state"], host.status["exit_code"]) == ("waiting", 42)
    assert host.run(f"--source={host.repository}", "--", "--gin_file=x.gin").returncode == 0


def test_what_cannot_be_fetched_now_is_for_the_next_boot(host):
    done = host.run(f"--source={host.folder}/nowhere", "--", "--gin_file=x.gin")
    assert done.returncode == 75
    assert (host.status["state"], host.status["exit_code"]) == ("waiting", 75)
    assert "installing failed" in done.stderr and host.calls == []


def test_a_token_in_the_source_is_neither_printed_nor_kept(host):
    source = "--source=https://me:s3cret@127.0.0.1:1/launcher.git"
    dry = host.run(source, "--dry_run", "--install_only")
    assert dry.returncode == 0 and "https://HIDDEN@127.0.0.1:1/launcher.git" in dry.stdout
    done = host.run(source, "--", "--gin_file=x.gin")
    assert done.returncode == 75 and "https://HIDDEN@127.0.0.1:1/launcher.git" in done.stdout
    kept = [path.read_text() for path in host.home.rglob("*") if path.is_file() and path.suffix != ".sample"]
    assert len(kept) >= 2
    for text in (dry.stdout, dry.stderr, done.stdout, done.stderr, *kept):
        assert "s3cret" not in text


def test_a_source_without_launcher_is_a_mistake(host):
    (host.repository / "scripts" / "install.sh").rename(host.repository / "other")
    host.commit()
    done = host.train()
    assert done.returncode == 64 and "is no checkout of Launcher" in done.stderr
    assert (host.status["state"], host.status["exit_code"]) == ("failed", 64)
    assert host.train().returncode == 64 and host.calls == []


# -------------------------------------------------------------------------------------------------------------- the TPU


def test_without_a_tpu_the_next_boot_tries_again(host):
    done = host.train("--tpu_wait=0", TPU_DEVICES=f"{host.folder}/none*")
    assert done.returncode == 75 and "no TPU after 0 s" in done.stderr
    assert (host.status["state"], host.status["exit_code"]) == ("waiting", 75)
    assert [call.split()[0] for call in host.calls] == ["install"]


def test_the_tpu_is_waited_for(host, until):
    process = host.start(f"--source={host.repository}", "--", "--gin_file=x.gin", TPU_DEVICES=f"{host.folder}/late*")
    until(lambda: (host.home / "status.json").exists() and host.status["state"] == "waiting")
    (host.folder / "late0").touch()
    process.communicate(timeout=120)
    assert process.returncode == 0 and host.status["state"] == "done"


def test_host_0_of_a_pod_drives_all_by_the_name_of_the_node(host):
    pod = ("--hosts=127.0.0.1,localhost", "--worker=0", "--node=my-pod", "--replicas=16")
    with socket.create_server(("127.0.0.1", 0)) as runtime:
        port = str(runtime.getsockname()[1])
        done = host.train(*pod, TPU_RUNTIME_PORT=port)
    assert done.returncode == 0, done.stderr
    assert host.calls[-1].endswith(f"--model_dir={host.home}/run --replicas=16")
    assert (host.environment["TPU_NAME"], host.environment["TPU_LOAD_LIBRARY"]) == ("my-pod", "0")
    assert host.environment["TF_PLUGGABLE_DEVICE_LIBRARY_PATH"] == ""


def test_other_hosts_of_a_pod_leave_their_chips_to_the_runtime(host):
    done = host.train("--hosts=127.0.0.1,localhost", "--worker=1", "--node=my-pod")
    assert done.returncode == 0
    assert host.status["state"] == "waiting" and host.status["worker"] == 1
    assert [call.split()[0] for call in host.calls] == ["install"]


def test_a_pod_whose_runtime_does_not_answer_is_not_trained_on(host, free_ports):
    (port,) = free_ports(1)
    done = host.train("--hosts=127.0.0.1,localhost", "--node=my-pod", "--tpu_wait=0", TPU_RUNTIME_PORT=str(port))
    assert done.returncode == 75 and "127.0.0.1,localhost" in done.stderr
    assert [call.split()[0] for call in host.calls] == ["install"]


# --------------------------------------------------------------------------------------------------------- the metadata


@pytest.mark.parametrize("endpoints", ["10.0.0.1", "unknown:unknown:10.0.0.1"])
def test_a_boot_reads_the_metadata_that_the_node_was_made_with(host, metadata, endpoints):
    # The keys that scripts/tpu_vm_create.sh sets, and those of the TPU.
    address = metadata(
        {
            "launcher-source": str(host.repository),
            "launcher-ref": "main",
            "launcher-node": "my-tpu",
            "launcher-save-to": "gs://bucket/run",
            "launcher-tf-version": "2.20.0",
            "launcher-replicas": "8",
            "launcher-flags": "--gin_file=resnet_tpu.gin\n--gin_param=a.b = (1, 2)",
            "agent-worker-number": "0",
            "worker-network-endpoints": endpoints,
        }
    )
    done = host.run("--foreground", GCE_METADATA_HOST=address)
    assert done.returncode == 0, done.stderr
    words = shlex.split(host.calls[1])
    assert words[1:3] == ["--gin_file=resnet_tpu.gin", "--gin_param=a.b = (1, 2)"]
    assert not any("--replicas" in word for word in words)  # one host counts its own chips
    assert (host.buckets / "bucket" / "run" / "checkpoints" / "step_2").exists()


def test_a_host_of_a_pod_knows_itself_from_the_metadata(host, metadata):
    address = metadata(
        {
            "launcher-source": str(host.repository),
            "launcher-node": "my-pod",
            "launcher-flags": "--gin_file=x.gin",
            "agent-worker-number": "3",
            "worker-network-endpoints": "a:1:10.0.0.1,b:2:10.0.0.2,c:3:10.0.0.3,d:4:10.0.0.4",
        }
    )
    assert host.run("--foreground", GCE_METADATA_HOST=address).returncode == 0
    assert host.status["worker"] == 3 and "host 3 leaves its chips" in host.status["message"]


def test_a_host_of_several_that_has_no_number_does_not_train_as_the_first(host, metadata):
    told = {"launcher-source": str(host.repository), "launcher-node": "my-pod", "launcher-flags": "--gin_file=x.gin"}
    address = metadata({**told, "worker-number": "1", "worker-network-endpoints": "a:1:10.0.0.1,b:2:10.0.0.2"})
    done = host.run("--foreground", GCE_METADATA_HOST=address)
    assert done.returncode == 64 and "is '', and its hosts are 10.0.0.1,10.0.0.2" in done.stderr and host.calls == []


def test_a_host_of_a_slice_finds_the_others_in_the_metadata(host, metadata):
    address = metadata(
        {
            "launcher-source": str(host.repository),
            "launcher-node": "my-slice",
            "launcher-save-to": "gs://bucket/run",
            "launcher-replicas": "4",
            "launcher-flags": "--gin_file=x.gin\n--engine=pjrt",
            "agent-worker-number": "1",
            "worker-network-endpoints": "a:1:10.0.0.1,b:2:10.0.0.2",
        }
    )
    done = host.run("--foreground", GCE_METADATA_HOST=address)
    assert done.returncode == 0, done.stderr
    assert host.calls[1].startswith("launch --backend=member ") and host.calls[1].endswith(" --replicas=4")
    config = json.loads(host.environment["TF_CONFIG"])
    assert (config["cluster"]["worker"], config["task"]["index"]) == (["10.0.0.1:2222", "10.0.0.2:2222"], 1)


def test_a_node_made_without_a_job_is_told_so(host, metadata):
    done = host.run("--foreground", GCE_METADATA_HOST=metadata({}))
    assert done.returncode == 64 and "launcher-source" in done.stderr and host.calls == []
    assert (host.status["state"], host.status["exit_code"]) == ("failed", 64)


def test_a_metadata_server_that_is_silent_is_for_the_next_boot(host, free_ports):
    done = host.run("--foreground", GCE_METADATA_HOST=f"127.0.0.1:{free_ports(1)[0]}")
    assert done.returncode == 75 and "metadata server does not answer" in done.stderr and host.calls == []
    assert (host.status["state"], host.status["exit_code"]) == ("waiting", 75)


def test_at_boot_it_becomes_a_service_that_is_asked_once_to_stop(host):
    words = host.notes / "systemd"
    for name, text in (
        ("systemctl", "#!/bin/sh\nexit 3\n"),
        ("systemd-run", f'#!/bin/sh\nprintf "%s\\n" "$@" >"{words}"\n'),
    ):
        host.write(host.folder / "bin" / name, text)
    assert host.run().returncode == 0
    told = words.read_text().splitlines()
    assert {"--unit=launcher", "--collect", "--property=KillMode=mixed"} <= set(told)
    assert told[-3:] == ["bash", f"{host.home}/startup.sh", "--foreground"]
    assert (host.home / "startup.sh").read_text() == SCRIPT.read_text()
    host.write(host.folder / "bin" / "systemctl", "#!/bin/sh\nexit 0\n")
    words.unlink()
    assert "runs already" in host.run().stdout and not words.exists()


# ----------------------------------------------------------------------------------------------------------- the bucket


def test_a_bucket_is_a_source_like_a_repository(host):
    folder = host.buckets / "bucket" / "launcher"
    folder.parent.mkdir()
    (host.repository / "scripts" / "install.sh").chmod(0o644)  # a bucket keeps no permissions
    host.repository.rename(folder)
    done = host.run("--source=gs://bucket/launcher", "--", "--gin_file=x.gin")
    assert done.returncode == 0, done.stderr
    assert host.said_to_gcloud == [f"storage rsync --recursive gs://bucket/launcher {host.home}/src"]
    assert [call.split()[0] for call in host.calls] == ["install", "main"]


def test_a_new_node_goes_on_from_what_the_lost_one_saved(host):
    host.plan(42, 0)
    assert host.train("--save_to=gs://bucket/run").returncode == 42
    saved = host.buckets / "bucket" / "run" / "checkpoints"
    assert sorted(path.name for path in saved.iterdir()) == ["step_2"]  # nothing half-written
    host.home.rename(host.folder / "lost")
    assert host.train("--save_to=gs://bucket/run").returncode == 0
    assert (host.notes / "found").read_text().split() == ["step_2"]


def test_while_it_trains_it_saves_and_when_it_is_told_to_stop(host, until):
    host.plan("hold")
    process = host.start(
        f"--source={host.repository}", "--save_to=gs://bucket/run", "--save_every=1", "--", "--gin_file=x.gin"
    )
    saved = host.buckets / "bucket" / "run" / "checkpoints"
    until((saved / "step_2").exists)
    assert not (saved / "saved").exists()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 42 and (saved / "saved").exists()


def test_a_run_is_not_begun_anew_because_the_bucket_cannot_be_read(host):
    (host.notes / "offline").touch()
    done = host.train("--save_to=gs://bucket/run")
    assert done.returncode == 75 and "cannot read gs://bucket/run" in done.stderr
    assert [call.split()[0] for call in host.calls] == ["install"]


# ------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--source=/x"], "which recipe?"),
        (["--sauce=/x"], "unknown option --sauce=/x"),
        (["--source=/x", "--tpu_wait=soon", "--", "--gin_file=x"], "--tpu_wait=soon"),
        (["--source=/x", "--save_every=0", "--", "--gin_file=x"], "--save_every=0"),
        (["--source=/x", "--worker=first", "--", "--gin_file=x"], "--worker=first"),
        (["--source=/x", "--home=here", "--", "--gin_file=x"], "--home=here"),
        (["--source=/x", "--home=/proc/no", "--", "--gin_file=x"], "cannot be written"),
        (["--source=/x", "--hosts=a,b", "--", "--gin_file=x"], "--node=NAME"),
        (["--source=/x", "--ref=--upload-pack=x", "--", "--gin_file=x"], "begin with a dash"),
        (["--dry_run"], "--dry_run asks nobody"),
    ],
)
def test_a_mistake_is_one_message_before_anything_is_installed(host, arguments, said):
    done = host.run(*arguments)
    assert done.returncode == 64
    assert done.stderr.startswith("error: ") and said in done.stderr and done.stderr.count("\n") == 1
    assert host.calls == [] and not (host.home / "src").exists()


def test_a_dry_run_prints_what_would_run_and_writes_nothing(host):
    done = host.train("--dry_run", "--ref=v1", "--tf_version=2.20.0", "--save_to=gs://bucket/run")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("+ ")]
    assert f"+ git -C {host.home}/src fetch --quiet --depth=1 {host.repository} v1" in lines
    assert any(line.endswith(f"bash {host.home}/src/scripts/install.sh tpu") for line in lines)
    assert any("TPU_NAME=local" in line and "launcher.main --gin_file=resnet_tpu.gin" in line for line in lines)
    assert lines[-1].endswith("gs://bucket/run")
    assert not host.home.exists() and host.calls == []
