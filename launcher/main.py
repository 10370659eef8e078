"""Trains a TensorFlow model on one CPU, many GPUs, many hosts or a TPU pod.

    python -m launcher.main --gin_file=resnet_cpu.gin
    python -m launcher.main --gin_file=resnet_cpu.gin --replicas=2 --gin_param='train.steps = 30'
    python -m launcher.main --gin_file=resnet_gpu.gin --dry_run

The gin file says what to train, the flags where and how. Without --gin_file, the recipes are listed.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Sequence

from absl import flags

from launcher.config import gin_bindings
from launcher.errors import EXIT_DONE, LauncherError, UsageError, failures, user_code
from launcher.machine import installation
from launcher.machine.tensorflow_import import import_tensorflow
from launcher.supervised import drill, preemption, progress

_ORDER = (
    "gin_file", "gin_param", "model_dir", "mode", "input", "output", "export_dir", "strategy", "replicas", "tpu",
    "seed", "data_dir", "deterministic", "restore_from_chief", "tpu_type", "preflight_batch_sizes", "preflight_search",
    "preflight_timeout", "preflight_cache", "doctor_checks", "doctor_wait", "json", "dry_run", "help",
)  # fmt: skip


def define_flags() -> flags.FlagValues:
    """The launcher's flags, apart from absl's global ones, where TensorFlow and TFDS put theirs."""
    values = flags.FlagValues()
    flags.DEFINE_multi_string(
        "gin_file",
        [],
        "Recipe; may repeat, later files override. Looked for in the working directory, then in gin_configs/.",
        flag_values=values,
    )
    flags.DEFINE_multi_string(
        "gin_param", [], "One binding, such as 'train.steps = 30'; may repeat, overrides the files.", flag_values=values
    )
    flags.DEFINE_string(
        "model_dir", None, "Where all that the run writes goes. Default: runs/RECIPE.", flag_values=values
    )
    flags.DEFINE_string(
        "data_dir", None, "Prepared data sets. Default: $TFDS_DATA_DIR, else ~/tensorflow_datasets.", flag_values=values
    )
    flags.DEFINE_enum(
        "mode",
        "train_and_eval",
        ["train", "eval", "train_and_eval", "verify", "predict", "export", "export_step", "preflight"]
        + ["precision_report", "doctor"],
        "What to do; verify compares some steps on several topologies, predict answers lines of text, export writes a "
        "SavedModel, export_step the training step of --replicas replicas as a program that JAX can run, preflight "
        "compiles it for the slices of --tpu_type without a TPU, precision_report says what 16 bits do to the "
        "gradients and which loss scale fits, doctor examines this machine, also without a recipe.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "input", None, "For --mode=predict: UTF-8 text, a line each. Default: standard input.", flag_values=values
    )
    flags.DEFINE_string(
        "output", None, "For --mode=predict: one line for each. Default: standard output.", flag_values=values
    )
    flags.DEFINE_string(
        "export_dir",
        None,
        "For --mode=export and export_step: where it goes. Default: MODEL_DIR/export or MODEL_DIR/export_step.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "strategy",
        None,
        ["auto", "one_device", "mirrored", "multi_worker", "tpu"],
        "tf.distribute strategy. Default: the recipe's train.strategy, which is auto unless bound.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "replicas",
        None,
        "Local replicas; without an accelerator, that many logical CPU devices. With --tpu=NODE, the slice's cores. "
        "For --mode=export_step, those of the program; one by default.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "tpu", None, "Cloud TPU node name, grpc://host:port, or 'local' on the TPU VM itself.", flag_values=values
    )
    flags.DEFINE_integer("seed", None, "Base of all random numbers. Default: the recipe's.", flag_values=values)
    flags.DEFINE_bool(
        "deterministic", False, "Bitwise equal runs on one topology, at some cost in speed.", flag_values=values
    )
    flags.DEFINE_bool(
        "restore_from_chief",
        False,
        "Only worker 0 needs --model_dir: it reads the checkpoint and the others get the values over the wire.",
        flag_values=values,
    )
    flags.DEFINE_multi_string(
        "tpu_type",
        [],
        "For --mode=preflight: accelerator types, such as v5litepod-256; several, also with commas, are compared.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "preflight_batch_sizes",
        [],
        "For --mode=preflight: global batch sizes to compare. Default: the recipe's own.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "preflight_search",
        False,
        "For --mode=preflight: compile with each knob turned, too, not only until a step fits that does not.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "preflight_timeout", 3600.0, "For --mode=preflight: seconds for one compilation.", flag_values=values
    )
    flags.DEFINE_string(
        "preflight_cache",
        None,
        "For --mode=preflight: where results are kept. Default: launcher/preflight in $XDG_CACHE_HOME or ~/.cache.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "doctor_checks", [], "For --mode=doctor: only these; --dry_run lists them. Default: all.", flag_values=values
    )
    flags.DEFINE_float(
        "doctor_wait", 30.0, "For --mode=doctor: seconds to wait for the other workers' doctors.", flag_values=values
    )
    flags.DEFINE_bool("json", False, "For --mode=doctor: print the report as JSON.", flag_values=values)
    flags.DEFINE_bool("dry_run", False, "Print the plan and stop; nothing is written.", flag_values=values)
    flags.DEFINE_bool("help", False, "Show this text.", short_name="h", flag_values=values)
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, runs one mode and returns the exit code that DESIGN's contract documents."""
    argv = list(sys.argv if argv is None else argv)
    progress.install_stack_dump(os.environ)
    progress.Progress(os.environ).report(phase="startup")
    try:
        options = _parse(argv)
        if options.help:
            print(help_text(options))
            return EXIT_DONE
        if options.mode == "doctor":
            from launcher.doctor import command as doctor

            return doctor.run(options)
        if not options.gin_file:
            print(_recipe_list())
            return EXIT_DONE
        drill.install(os.environ)
        trains = options.mode in ("train", "train_and_eval") and not options.dry_run
        with preemption.before_training() if trains else contextlib.nullcontext():
            _require_tensorflow()
            # Everything below imports TensorFlow, which takes seconds and may be missing.
            from launcher import modes

            return modes.run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as raised:
        error = failures.explained(raised)
        code = failures.exit_code(error)
        progress.record_error(os.environ, error, code)
        is_told = isinstance(error, LauncherError)
        if not is_told or os.environ.get(user_code.TRACEBACK) == "1":  # ours: the whole traceback
            traceback.print_exc()
        if is_told:
            print(f"error: {error}", file=sys.stderr)
        return code


def _parse(argv: Sequence[str]) -> flags.FlagValues:
    options = define_flags()
    try:
        rest = options(argv)
    except flags.Error as error:
        raise UsageError(f"{str(error).rstrip(' .')}; --help shows every flag") from None
    if len(rest) > 1:
        raise UsageError(f"unexpected argument {rest[1]!r}: flags are written --name=value. --help shows every flag")
    if options.replicas is not None and options.replicas < 1:
        raise UsageError(f"--replicas={options.replicas}: must be 1 or more")
    for name, modes in (("input", ("predict",)), ("output", ("predict",)), ("export_dir", ("export", "export_step"))):
        if getattr(options, name) is not None and options.mode not in modes:
            raise UsageError(f"--{name} is for --mode={' and '.join(modes)}, and the mode is {options.mode}")
    for name in ("tpu_type", "preflight_batch_sizes", "preflight_search", "preflight_timeout", "preflight_cache"):
        if options[name].present and options.mode != "preflight":
            raise UsageError(f"--{name} is for --mode=preflight, and the mode is {options.mode}")
    for name in ("doctor_checks", "doctor_wait", "json"):
        if options[name].present and options.mode != "doctor":
            raise UsageError(f"--{name} is for --mode=doctor, and the mode is {options.mode}")
    if options.data_dir is not None:
        # TFDS reads the same variable, and so do the processes this one starts.
        os.environ["TFDS_DATA_DIR"] = os.path.expanduser(options.data_dir)
    return options


def help_text(options: flags.FlagValues) -> str:
    """Usage, one flag a paragraph, with defaults and choices."""
    lines = [(__doc__ or "").strip(), "", "Flags:"]
    for name in _ORDER:
        flag = options[name]
        values = "|".join(getattr(flag.parser, "enum_values", None) or [])
        value = "" if flag.boolean else f"={values or name.upper()}"
        # absl puts the choices in front of the text, and a remark on repeating behind it.
        text = re.sub(r"^<[^>]*>: |;\s+repeat this option.*$", "", flag.help, flags=re.DOTALL)
        lines += [f"  --{name}{value}", f"      {text}"]
        if flag.default not in (None, False, []):
            lines[-1] += f" Default: {flag.default}."
    lines += [
        "",
        "Exit codes: 0 done; 42 saved and preempted, run again; 64 bad flags, gin or input;",
        "70 failed and a retry will not help; 75 a peer or the machine failed, run again.",
    ]
    return "\n".join(lines)


def _recipe_list() -> str:
    recipes = gin_bindings.recipes()
    width = max((len(name) for name, _ in recipes), default=0)
    lines = ["Recipes (python -m launcher.main --gin_file=NAME):"]
    lines += [f"  {name:<{width}}  {purpose}" for name, purpose in recipes]
    return "\n".join(lines)


def _require_tensorflow() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if os.environ["KERAS_BACKEND"] != "tensorflow":
        raise UsageError(f"KERAS_BACKEND={os.environ['KERAS_BACKEND']}: Launcher needs KERAS_BACKEND=tensorflow")
    try:
        import_tensorflow()
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "tensorflow":
            raise
        raise UsageError(
            f"TensorFlow is not installed. Choose the extra for this machine: {installation.tensorflow_command()}"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
