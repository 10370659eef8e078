"""The step that Launcher compiles beside one in Flax that does the same work, by the same compiler. Prints JSON.

    python benchmarks/twins.py lm --on=v5litepod-4 --layers=2
    python benchmarks/twins.py resnet --on=h100:4

No TPU or GPU is needed, and nothing is timed: matrix FLOPs, memory traffic, cycles of the compiler's own cost model (of
TPUs alone; `unestimated` says of how many operations worth mentioning it knows nothing), peak memory and copies are
counted in the two optimised programs.
Needs `pip install '.[cpu,preflight]' flax optax` (for GPUs '.[cpu,gpu_preflight]').
Dropout draws from TensorFlow's generator on our side and from JAX's "rbg" on the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

# Recipe, rows of one replica, and what makes it the same work.
RECIPES = {
    "resnet": ("resnet_tpu.gin", 64, ["resnet.norm_group_size = 64"]),
    "transformer": ("transformer_tpu.gin", 16, ["transformer.layers = {layers}"]),
    "lm": (
        "lm_gpu.gin", 16,
        ["language_model.layers = {layers}", "language_model.heads = 6", "language_model.kv_heads = 2"],
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=RECIPES)
    parser.add_argument("--on", default="v5litepod-4", help="a TPU or GPU type, as --mode=preflight takes it")
    parser.add_argument("--layers", type=int, default=2, help="of a text model")
    parser.add_argument(
        "--guarded", action="store_true", help="the twin applies no gradient that is not finite, either"
    )
    parser.add_argument("--tuned", action="store_true", help="the twin of lm as MaxText writes it, on TPUs")
    parser.add_argument("--cache", default="~/.cache/launcher/preflight")
    parser.add_argument("--gin_param", action="append", default=[], help="for our side")
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    print(json.dumps(compare(options), indent=2))


def compare(options: argparse.Namespace) -> dict[str, object]:
    """Both sides and their ratios, Launcher's divided by Flax's: below 1, Launcher's is less."""
    from launcher.preflight import gpus, slices
    from launcher.preflight.compiler import Compiler

    where = gpus.find(options.on) if ":" in options.on else slices.find(options.on)
    compiler = Compiler(cache_dir=options.cache, timeout_seconds=3600)
    recipe, rows, changes = RECIPES[options.model]
    changes = [
        *(change.format(layers=options.layers) for change in changes),
        f"train.global_batch_size = {rows * where.num_replicas}",
        "train.strategy = 'auto'",
        "train.precision = 'mixed_bfloat16'",
        "train.jit_compile = True",
        *options.gin_param,
    ]
    sides = {
        "launcher": figures(where, compiler.compile(ours(where, recipe, changes), where)),
        "flax": figures(where, compiler.compile(flax(options, where, rows), where)),
    }
    ratios = {
        name: round(of / sides["flax"][name], 3)
        for name, of in sides["launcher"].items()
        if isinstance(of, (int, float)) and sides["flax"][name]
    }
    told = {name: getattr(options, name) for name in ("model", "layers", "on", "guarded", "tuned")}
    return {**told, **sides, "ratios": ratios}


def ours(where, recipe: str, changes: list[str]) -> str:
    """StableHLO of the recipe's step, as --mode=preflight compiles it."""
    from launcher.run import loading
    from launcher.step_program import lowering

    machine = loading.Machine(environ={}, seed=0, deterministic=False, on=where.strategy(), connect=False)
    plan = machine.resolve([recipe], changes)
    where.configure()
    session = lowering.build(plan, where.num_replicas)
    return lowering.lower_session(session, for_tpu=where.accelerator == "tpu").program.stablehlo


def flax(options: argparse.Namespace, where, rows: int) -> str:
    """StableHLO of the twin, made in a process of its own: JAX and TensorFlow need not share one."""
    program = [sys.executable, str(Path(__file__).with_name("flax_twins.py")), options.model]
    sizes = [f"--replicas={where.num_replicas}", f"--rows={rows}", f"--layers={options.layers}"]
    platform = "tpu" if where.accelerator == "tpu" else "cuda"
    flags = [f"--{name}" for name in ("guarded", "tuned") if getattr(options, name)]
    command = [*program, *sizes, f"--platform={platform}", *flags]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def figures(where, compilation) -> dict[str, float]:
    """What is counted in an optimised program."""
    from launcher.preflight.compiled import hbm, hlo
    from launcher.preflight.compiled.costs import executed

    if compilation.error is not None:
        raise SystemExit(f"the compiler refuses it: {compilation.error[:2000]}")
    module = hlo.parse(compilation.hlo)
    before = hlo.parse(compilation.before_libraries) if compilation.before_libraries else None
    if module.unread:
        raise SystemExit(f"not all of the program was read: {module.unread[:3]}")
    costs = where.count(module, before)
    memory = hbm.account(compilation, module, argument_names=[], result_names=[], available=where.memory_bytes.value)
    run = [one for computation in module.computations.values() for one in computation.instructions.values()]
    cycles = sum(times * (one.cycles or 0) for one, times in executed(module.entry))
    return {
        "matrix_tflop": round(costs.flops / 1e12, 4),
        "memory_gb": round(costs.hbm_bytes / 1e9, 3),
        "cost_model_mcycles": round(cycles / 1e6, 2),
        "unestimated": costs.unestimated,
        "peak_mib": round((memory.arguments + memory.outputs + memory.temporaries) / 2**20),
        "collective_mb": round(sum(one.bytes for one in costs.collectives) / 1e6, 2),
        "copies": sum(one.opcode in ("copy", "copy-start") for one in run),
        "compile_seconds": round(compilation.seconds, 1),
    }


if __name__ == "__main__":
    main()
