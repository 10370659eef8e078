"""What only a card can show, in one run on one NVIDIA GPU: right, as fast as by hand, in the memory that was forecast.

    scripts/gpu_check.sh --out=gpu_check.json

Each case runs commands of the launcher in processes of their own, each with a time limit; what it found is written as
soon as it is there. Cases in the order of what they settle:

  begin        a small run ends at all; where not, nothing else is tried
  peers        steps of ResNet-50 and of a language model by hand (gpu_peers.py)
  correct      20 steps against TensorFlow's on the CPU in float32, float16 and bfloat16, and with full float32; again;
               with --deterministic again, killed and gone on: then to the bit
  resnet, lm   the same steps by the launcher: time, peak memory
  kernel       cuDNN's attention: time, peak, and 20 losses beside plain attention's
  keras_attention  20 losses, time and peak of a model of Keras's own attention layers, with that kernel and plain
  transfer     the batch's way to the GPU beside a step (a program of matrix products)
  doctor, auto what the doctor says; the precision that 'auto' takes
  memory       a step that cannot fit; the share that JAX takes
  profile      kernels of traced steps, by time
  long         rows of 8,192 tokens, with the kernel and plain
  overflow     steps skipped in float16, and which layers it names, as TensorFlow's on the CPU
  sixteen      ResNet-50 in float32 beside its 16 bits; without groups; the language model deterministic
  forecast     memory of both steps as preflight forecasts it for this card
  several      two GPUs or more: all of them, and their state shared out

With --rehearse sizes are small and the GPU is played by CPU devices (tests/support/played_gpu): what cannot be played
is "not run", and the first case that fails ends it. With --engine=tensorflow the launcher's runs are TensorFlow's, for
machines with its own CUDA build.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu_check_runs import HERE, Check, NotRun, apart, bound, require

CPU = {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}
SHARED = {"XLA_CLIENT_MEM_FRACTION": "0.08"}  # of runs side by side
KERNEL = "train.attention = 'kernel'"
FLOAT32, FLOAT16, BFLOAT16 = (f"train.precision = '{one}'" for one in ("float32", "mixed_float16", "mixed_bfloat16"))
# Further apart than this, and something is wrong; of losses about 2 to 7.
FAR_ABOVE = 2  # steps of 20 whose loss scale overflows float16 in any order of adding
FAR_APART = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2, "attention": 1e-2}

# ------------------------------------------------------------------------------------------------------------- cases


def begin(check: Check) -> dict[str, Any]:
    """A small run from its start to its end: where it stands still, every case after it would, too."""
    return check.run("begin", check.digits(), seconds=240 if check.small else 90)


def peers(check: Check) -> dict[str, Any]:
    found = {}
    for name in ("resnet_jax", "lm_jax", "resnet_torch", "lm_torch"):
        command = [str(HERE / "gpu_peers.py"), name, *(["--small"] if check.small else [])]
        code, said = check.finish(check.begin(command, f"peer_{name}"), f"peer_{name}", 150)
        found[name] = json.loads(said.splitlines()[-1]) if code == 0 else {"error": said[-300:]}
        if "No module named" in found[name].get("error", ""):
            found[name] = f"not run: {found[name]['error']}"
    return found


def correct(check: Check) -> dict[str, Any]:
    """All runs side by side: they are small, and nothing is timed."""
    of_gpu = {
        "float32": (FLOAT32,), "float32_again": (FLOAT32,), "float16": (FLOAT16,), "bfloat16": (BFLOAT16,),
        "full_float32": (FLOAT32, "gpu.tf32 = False"),
    }  # fmt: skip
    of_cpu = {"cpu_float32": (FLOAT32,), "cpu_float16": (FLOAT16,), "cpu_bfloat16": (BFLOAT16,)}
    begun = [check.launch(name, check.digits(*more), SHARED) for name, more in of_gpu.items()]
    always, killed = "--deterministic", check.digits(FLOAT32, "train.checkpoint_every = 5")
    begun += [check.launch(name, [*check.digits(FLOAT32), always], SHARED) for name in ("same", "same_again")]
    begun.append(check.launch("killed", [*killed, always], SHARED))
    begun += [check.launch(name, check.digits(*more), CPU, on_gpu=False) for name, more in of_cpu.items()]
    _kill_after(check, begun, "killed", 12)
    runs = {run[0]: check.ended(run) for run in begun}
    resumed = check.ended(check.launch("killed", [*killed, always], SHARED))
    bad = {name: run for name, run in {**runs, "killed": resumed}.items() if run["exit"] != 0}
    require(not bad, f"{bad}"[:1500])
    found: dict[str, Any] = {
        name: {"largest_difference_of_losses": apart(runs[name], runs[f"cpu_{name.removeprefix('full_')}"])}
        for name in ("float32", "full_float32", "float16", "bfloat16")
    }
    found["again_same_bits"] = runs["float32"]["losses"] == runs["float32_again"]["losses"]
    of_same = found["deterministic"] = {
        "largest_difference_of_losses": apart(runs["same"], runs["cpu_float32"]),
        "again_same_bits": runs["same"]["losses"] == runs["same_again"]["losses"],
        "killed_and_gone_on_same_bits": resumed["losses"] == runs["same"]["losses"],
    }
    require(of_same["again_same_bits"] and of_same["killed_and_gone_on_same_bits"], f"--deterministic: {of_same}")
    for name in ("float32", "full_float32", "float16", "bfloat16"):
        far = FAR_APART[name.removeprefix("full_")]
        require(found[name]["largest_difference_of_losses"] < far, f"{name}: {found[name]}, more than {far}")
    return found


def _kill_after(check: Check, begun: Sequence[Any], name: str, step: int) -> None:
    """Ends a run with SIGKILL once it has logged a step."""
    process, path = next(one for one in begun if one[0] == name)[1], check.folder / name / "metrics.jsonl"
    while process.poll() is None and check.left > 0:
        if path.exists() and path.read_text().count("\n") >= step:
            os.killpg(process.pid, signal.SIGKILL)
            break
        time.sleep(0.02)


def resnet(check: Check) -> dict[str, Any]:
    return check.timed("resnet", check.resnet(), 256)


def lm(check: Check) -> dict[str, Any]:
    return check.timed("lm", check.lm("train.attention = 'plain'"), 64)


def kernel(check: Check) -> dict[str, Any]:
    if check.small:
        raise NotRun("cuDNN cannot be played")
    found = {"timed": check.timed("lm_kernel", check.lm(KERNEL), 64)}
    each = ("train.log_every = 1", "train.steps_per_loop = 1")
    plain = check.run("lm_20", check.lm("train.attention = 'plain'", *each, steps=20))
    mine = check.run("lm_kernel_20", check.lm(KERNEL, *each, steps=20))
    found["largest_difference_of_20_losses"] = apart(plain, mine)
    found["losses"] = {"plain": plain["losses"], "kernel": mine["losses"]}
    require(found["largest_difference_of_20_losses"] < FAR_APART["attention"], f"{found}")
    return found


def keras_attention(check: Check) -> dict[str, Any]:
    """Rows of odd length without a mask, padded ones, and causal ones of shared keys."""
    _needs_jax(check)
    never = ("train.evaluate_every = 100000", "train.checkpoint_every = 100000", "Checkpoints.save_model = 'none'")
    each = ("train.steps = 20", "train.log_every = 1", "train.steps_per_loop = 1", BFLOAT16, *never)
    flags = [f"--gin_file={HERE / 'gpu_keras_attention.py'}", *bound(*each)]
    more = {"SMALL": "1"} if check.small else {}
    plain = check.timed("keras_plain", [*flags, *bound("train.attention = 'plain'")], 32, 60, **more)
    if not check.has_kernel:
        return {"plain": plain, "kernel": "not run: cuDNN cannot be played"}
    mine = check.timed("keras_kernel", [*flags, *bound(KERNEL)], 32, 60)
    found = {"plain": plain, "kernel": mine, "largest_difference_of_20_losses": apart(plain, mine)}
    require(found["largest_difference_of_20_losses"] < FAR_APART["attention"], f"{found}")
    return found


def transfer(check: Check) -> dict[str, Any]:
    """Milliseconds of a step of matrix products with a batch that is on the GPU, put before it, or ahead of it."""
    _needs_jax(check)
    command = [str(HERE / "gpu_transfer.py"), *(["--small"] if check.small else [])]
    code, said = check.finish(check.begin(command, "transfer"), "transfer", 60)
    require(code == 0, said[-500:])
    return json.loads(said.splitlines()[-1])


def doctor(check: Check) -> dict[str, Any]:
    checks = "--doctor_checks=driver,devices,gpus"
    code, said = check.finish(
        check.begin(["-m", "launcher.main", "--mode=doctor", checks, "--json"], "doctor"), "doctor", 240
    )
    report = json.loads(said[said.index("{") : said.rindex("}") + 1])
    require(
        any("offered on each" in one["seen"] or "TensorFlow" in one["seen"] for one in report["findings"]), said[-900:]
    )
    return {"exit": code, "findings": [f"{one['status']} {one['check']}: {one['seen']}" for one in report["findings"]]}


def auto(check: Check) -> dict[str, Any]:
    flags = [*check.digits("train.precision = 'auto'"), f"--engine={check.engine}", "--dry_run"]
    code, said = check.finish(check.begin(["-m", "launcher.main", *flags], "auto"), "auto", 240)
    require(code == 0, said[-500:])
    return {"plan": [line for line in said.splitlines() if line.startswith(("policy", "strategy", "note"))]}


def memory(check: Check) -> dict[str, Any]:
    """Plain attention's scores of a batch that no card holds: refused before the first step, with both figures."""
    _needs_jax(check)
    more = {"PLAYED_GPU_BYTES": str(2**20)}
    flags = check.lm("train.attention = 'plain'", batch=2048, steps=4)
    found = check.ended(check.launch("memory", flags, more), 170)
    words = " ".join(found.get("said", []))
    require(found["exit"] == 64 and "Traceback" not in words and "each device" in words, f"{found}"[-1500:])
    said = [line for line in found["said"] if line.startswith("error:")]
    return {"exit": 64, "seconds": found["seconds"], "said": said}


def profile(check: Check) -> dict[str, Any]:
    steps = "2:3" if check.small else "40:44"
    flags = [
        *check.lm(KERNEL if check.has_kernel else "train.attention = 'plain'", steps=60),
        f"--profile_steps={steps}",
    ]
    check.run("profile", flags)
    summary = json.loads((check.folder / "profile" / "summary.json").read_text())
    require(bool(summary.get("kernels")) or check.small, "no kernels were traced")
    return {"kernels": summary.get("kernels", "not run: CPU devices have no streams")}


def long(check: Check) -> dict[str, Any]:
    tokens = 256 if check.small else 8192
    longer = (f"text_corpus.length = {tokens}", f"language_model.max_length = {tokens}")
    plain = check.timed("long_plain", check.lm(*longer, "train.attention = 'plain'", batch=4, steps=24), 4)
    if not check.has_kernel:
        return {"plain": plain, "kernel": "not run: cuDNN cannot be played"}
    mine = check.timed("long_kernel", check.lm(*longer, KERNEL, batch=4, steps=24), 4)
    return {"plain": plain, "kernel": mine, "largest_difference_of_losses": apart(mine, plain)}


def overflow(check: Check) -> dict[str, Any]:
    """The loss scale begins so high that gradients overflow: the first steps of both are skipped, and layers named.

    After them the scale lies where it is up to the order of adding whether the same gradients overflow, so that further
    steps may be skipped on one side: on an H200 the fifth was, on a CPU the fourth and the eleventh.
    """
    high = ("train.loss_scale = @DynamicLossScale()", "DynamicLossScale.initial_scale = 16777216.0")
    runs = [
        check.launch("overflow", check.digits(FLOAT16, *high), SHARED),
        check.launch("cpu_overflow", check.digits(FLOAT16, *high), CPU, on_gpu=False),
    ]
    found = {run[0]: check.ended(run) for run in runs}
    require(all(one["exit"] == 0 for one in found.values()), f"{found}"[:1500])
    mine, theirs = found.values()
    require(len(theirs["skipped"]) >= FAR_ABOVE, f"only {theirs['skipped']} overflowed")
    both = f"skipped {mine['skipped']}, on the CPU {theirs['skipped']}"
    require(mine["skipped"][:FAR_ABOVE] == theirs["skipped"][:FAR_ABOVE], both)
    require(abs(len(mine["skipped"]) - len(theirs["skipped"])) <= 2, both)
    return {"skipped": mine["skipped"], "on_the_cpu": theirs["skipped"]}


def sixteen(check: Check) -> dict[str, Any]:
    found = {"float32": check.timed("resnet_float32", check.resnet(FLOAT32), 256)}
    found["without_groups"] = check.timed("resnet_no_groups", check.resnet("resnet.norm_group_size = None"), 256)
    found["deterministic"] = check.timed(
        "lm_deterministic", [*check.lm("train.attention = 'plain'"), "--deterministic"], 64
    )
    return found


def forecast(check: Check) -> dict[str, Any]:
    """Memory that preflight forecasts for this card, compiled on this machine."""
    card = check.card
    if card is None:
        raise NotRun("no card that preflight knows")
    found, on_cpu = {}, {"JAX_PLATFORMS": "cpu", "PYTHONPATH": check.unplayed}  # its compilers are real ones
    for name, flags in (("resnet", check.resnet()), ("lm", check.lm("train.attention = 'plain'"))):
        command = ["-m", "launcher.main", "--mode=preflight", f"--gpu_type={card}", f"--engine={check.engine}", *flags]
        folder = check.folder / f"forecast_{name}"
        code, said = check.finish(
            check.begin([*command, f"--model_dir={folder}"], f"forecast_{name}", on_cpu),
            "forecast_" + name,
            240,
        )
        if "is not installed" in said:
            raise NotRun(said.splitlines()[-1])
        require(code == 0, said[-500:])
        report = json.loads((folder / "preflight.json").read_text())["cases"][0]
        found[name] = {"program_gib": report["hbm"]["needed"] / 2**30, "time": report.get("roofline")}
    return found


def several(check: Check) -> dict[str, Any]:
    gpus = 2 if check.small else len(check.gpus)
    if gpus < 2:
        raise NotRun("one GPU is there")
    played, shared = {"PLAYED_GPUS": f"{gpus}"}, "all" if check.engine == "pjrt" else "optimizer"
    one = check.ended(check.launch("one_of_several", check.digits(FLOAT32), played))
    found: dict[str, Any] = {"gpus": gpus}
    for name, more in (("all", ()), ("shared_out", (f"train.shard = '{shared}'",))):
        run = check.ended(check.launch(f"several_{name}", check.digits(FLOAT32, *more), played, gpus=gpus))
        require(run["exit"] == 0, f"{run}")
        found[name] = {"largest_difference_of_losses": apart(run, one), "seconds": run["seconds"]}
        require(apart(run, one) < FAR_APART["float32"], f"{found}")
    return found


def _needs_jax(check: Check) -> None:
    if check.engine != "pjrt":
        raise NotRun("of JAX's runtime alone: --engine=pjrt")


CASES: dict[str, Callable[[Check], dict[str, Any]]] = {
    one.__name__: one
    for one in (
        begin,
        peers,
        correct,
        resnet,
        lm,
        kernel,
        keras_attention,
        transfer,
        doctor,
        auto,
        memory,
        profile,
        long,
        overflow,
        sixteen,
        forecast,
        several,
    )
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="where what was found goes, as JSON")
    parser.add_argument("--seconds", type=float, default=600, help="for all cases")
    parser.add_argument("--cases", default=",".join(CASES), help="some of them, with commas")
    parser.add_argument("--engine", choices=("pjrt", "tensorflow"), default="pjrt")
    parser.add_argument("--keep", help="a folder for what the runs print")
    parser.add_argument("--rehearse", action="store_true", help="on CPU devices that play a GPU")
    options = parser.parse_args()
    unknown = set(options.cases.split(",")) - CASES.keys()
    if unknown:
        parser.error(f"--cases: no such case: {', '.join(sorted(unknown))}")
    return run(options)


def run(options: argparse.Namespace) -> int:
    """Runs the cases; 0 where none has failed."""
    check = Check(options)
    found: dict[str, Any] = {"date": str(datetime.date.today()), "engine": options.engine, "rehearsed": check.small}
    found |= {"gpus": check.gpus, "versions": versions(), "cases": {}, "runs": check.runs}
    failed = False
    for name in options.cases.split(","):
        started = time.monotonic()
        try:
            case, how = CASES[name](check), "passed"
        except NotRun as why:
            case, how = {"not_run": str(why)}, f"not run: {why}"
        except Exception as error:
            failed, case, how = True, {"failed": f"{type(error).__name__}: {error}"}, f"FAILED: {error}"
        found["cases"][name] = {"seconds": round(time.monotonic() - started, 1), **case}
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"## {name}: {how}\n{json.dumps(case)[:1200]}", flush=True)
        if failed and (check.small or name == "begin"):
            break
    return int(failed)


def versions() -> dict[str, str]:
    """Of what computes."""
    import importlib.metadata

    names = (
        "tensorflow",
        "tensorflow-cpu",
        "keras",
        "jax",
        "jaxlib",
        "jax-cuda12-pjrt",
        "jax-cuda13-pjrt",
        "torch",
        "flax",
    )
    found = {"python": sys.version.split()[0]}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


if __name__ == "__main__":
    sys.exit(main())
