"""The modes: what each `--mode` does, the flags it reads and those it refuses, in one table.

A mode is a row of `MODES` and a module with `run(request)`, which is imported when the mode runs: a file beside this
one, or an instrument's own; a package may add one, see `launcher.config.plugins`. A flag is a field of `Request`, or of
a subclass where only some modes read it. `--help`, the refusal of a flag that does not go with the mode, and
`--dry_run` follow from both. Imports no TensorFlow: the supervisor reads the workers' flags.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from absl import flags

from launcher.config import gin_files, plugins
from launcher.errors import UsageError, advice
from launcher.machine import runtime_kinds
from launcher.model_dir import default_model_dir
from launcher.worker import preemption

_ENGINE = "train.engine"
_DEFINERS: dict[str, Callable[..., object]] = {
    "str": flags.DEFINE_string,
    "int": flags.DEFINE_integer,
    "float": flags.DEFINE_float,
    "bool": flags.DEFINE_bool,
    "tuple[str, ...]": flags.DEFINE_multi_string,
}


def flag(says: str, default: Any = None, define: Callable[..., object] | None = None, **more: Any) -> Any:
    """A field that is a flag of the same name: its text in --help, its default, and how absl defines it."""
    return dataclasses.field(default=default, metadata={"help": says, "define": define, "more": more})


def _define(field: dataclasses.Field, says: str, values: flags.FlagValues) -> None:
    """By absl's function, where a flag names one; else by the field's type."""
    kind = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    define = field.metadata["define"] or _DEFINERS[kind.removesuffix(" | None")]
    default = [*field.default] if isinstance(field.default, tuple) else field.default
    define(field.name, default=default, help=says, flag_values=values, **field.metadata["more"])


class _NameIn(flags.ArgumentParser):
    """Takes a name in a table, to which packages may add."""

    def __init__(self, table: plugins.Table[Any]):
        self.table = table

    def parse(self, argument: str) -> str:
        return argument if self.table[argument] else ""


def name_in(table: Callable[[], plugins.Table[Any]]) -> Callable[..., object]:
    """How absl defines a flag whose value is a name in the table."""

    def define(name: str, *, default: str, help: str, flag_values: flags.FlagValues) -> None:
        flags.DEFINE(_NameIn(table()), name, default, help, flag_values)

    return define


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Flags that every mode accepts, in the order of --help, with what the command line gives them."""

    gin_file: tuple[str, ...] = flag(
        "Recipe; may repeat, later files override. Looked for in the working directory, then in gin_configs/.", ()
    )
    gin_param: tuple[str, ...] = flag("One binding, such as 'train.steps = 30'; may repeat, overrides the files.", ())
    model_dir: str | None = flag("Where all that the run writes goes. Default: runs/RECIPE.")
    mode: str = flag("What to do", "train_and_eval", name_in(lambda: MODES))
    strategy: str | None = flag(
        "tf.distribute strategy. Default: the recipe's train.strategy, which is auto unless bound.",
        define=flags.DEFINE_enum,
        enum_values=["auto", "one_device", "mirrored", "multi_worker", "tpu"],
    )
    replicas: int | None = flag(
        "Local replicas; without an accelerator, that many logical CPU devices. With --tpu=NODE, the slice's cores."
    )
    tpu: str | None = flag("Cloud TPU node name, grpc://host:port, or 'local' on the TPU VM itself.")
    seed: int | None = flag("Base of all random numbers. Default: the recipe's.")
    data_dir: str | None = flag("Prepared data sets. Default: $TFDS_DATA_DIR, else ~/tensorflow_datasets.")
    deterministic: bool = flag("Bitwise equal runs on one topology, at some cost in speed.", False)
    restore_from_chief: bool = flag(
        "Only worker 0 needs --model_dir: it reads the checkpoint and the others get the values from it.", False
    )
    engine: str | None = flag(
        "What runs the steps; unless given, the recipe's train.engine, which is tensorflow unless bound",
        define=name_in(lambda: runtime_kinds.KINDS),
    )
    dry_run: bool = flag("Print the plan and stop; nothing is written.", False)

    @functools.cached_property
    def asked_runtime(self) -> runtime_kinds.RuntimeKind | None:
        """What the flag or the recipe has run the steps; None where neither says it."""
        if self.engine is not None:
            return runtime_kinds.KINDS[self.engine]
        name = gin_files.plain_value(self.gin_file, self.gin_param, _ENGINE)
        return None if name is None else runtime_kinds.KINDS.asked(name, f"{_ENGINE} = {name!r}")

    @property
    def runtime(self) -> runtime_kinds.RuntimeKind:
        """What runs the steps, as far as that can be told before the machine is looked at."""
        return self.asked_runtime or runtime_kinds.TENSORFLOW

    @property
    def run_dir(self) -> str:
        """The folder of the run: --model_dir, or runs/RECIPE."""
        return self.model_dir or default_model_dir(self.gin_file)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRequest(Request):
    """The flags of the modes that train."""

    profile_steps: str | None = flag(
        "a trace of these steps for TensorBoard's profiler, such as 10:20 for steps 10 to 20, of the chief."
    )
    metrics_port: int | None = flag(
        "port of 127.0.0.1 at which worker 0 serves the newest numbers to Prometheus, as text at /metrics."
    )
    compile_cache: str | None = flag(
        "a folder for what XLA compiles, by train.jit_compile or --engine=pjrt, reused by the next start."
    )
    stop_after: str | None = flag(
        "the time after which to save and end with 42, such as 3h50m. Default: shortly before SLURM_JOB_END_TIME."
    )
    notice_signals: str = flag("signals beside SIGTERM that ask to save and end with 42.", preemption.NOTICES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictRequest(Request):
    """The flags of `--mode=predict`."""

    input: str | None = flag(
        "UTF-8 text, a line each; images: a folder, a pattern such as 'photos/*.jpg', or one file; or arrays: a .npy "
        "file, or a .npz file whose keys are the model's inputs. Default: text on standard input."
    )
    output: str | None = flag(
        "a line for each, JSON for images; for arrays a .npy or .npz file. It is there when it is whole. Default: "
        "standard output."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportRequest(Request):
    """The flags of `--mode=export`."""

    export_dir: str | None = flag("where it goes. Default: MODEL_DIR/export.")
    export_format: str = flag(
        "what is written: a SavedModel, or Keras's model.keras.",
        "saved_model",
        flags.DEFINE_enum,
        enum_values=["saved_model", "keras"],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreflightRequest(Request):
    """The flags of `--mode=preflight`."""

    tpu_type: tuple[str, ...] = flag(
        "accelerator types, such as v5litepod-256; several, also with commas, are compared.", ()
    )
    gpu_type: tuple[str, ...] = flag(
        "NVIDIA GPUs, such as h100:8, or a100-80:8x8 for eight hosts of eight; several are compared as well.", ()
    )
    preflight_batch_sizes: tuple[str, ...] = flag(
        "global batch sizes to compare. Default: the recipe's own.", (), flags.DEFINE_list
    )
    largest_batch: bool = flag("look for the largest global batch that fits: compile one after another.", False)
    preflight_search: bool = flag("compile every suggested setting, also where the step fits.", False)
    preflight_timeout: float = flag("seconds for one compilation.", 3600.0)
    preflight_cache: str | None = flag(
        "where compilations are kept. Default: launcher/preflight in $XDG_CACHE_HOME or ~/.cache."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorRequest(Request):
    """The flags of `--mode=doctor`."""

    doctor_checks: tuple[str, ...] = flag("only these; --dry_run lists them. Default: all.", (), flags.DEFINE_list)
    doctor_wait: float = flag("seconds to wait for the other workers' doctors.", 30.0)
    json: bool = flag("print the report as JSON.", False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareRequest(Request):
    """The flags of `--mode=compare`."""

    run: tuple[str, ...] = flag(
        "the folder of a run; may repeat, or the folders stand there without a flag. compare.html goes to --model_dir.",
        (),
    )


@dataclasses.dataclass(frozen=True)
class Mode:
    """One row of the table.

    Attributes:
      name: as `--mode` gives it.
      says: what it does: the rest of a sentence that begins with its name, for --help.
      module: whose `run(request)` does it and returns the exit code; empty for the file `name` in launcher/modes.
      request: the flags that it reads.
      refuses: flags of `Request` that it cannot follow, each with what to do instead, as the rest of a sentence that
        begins with the mode.
      needs_recipe: whether nothing can be done without --gin_file.
      needs_tensorflow: whether TensorFlow is imported before it runs.
      needs_jax: whether it is done with JAX, too.
      trains: whether a signal asks it to save and leave, from the first second on.
      shows_plan: whether `run` follows --dry_run by itself; without, the plan of the recipe is shown instead of `run`.
      by_tensorflow: whether TensorFlow does it, whatever runs the steps of the recipe.
      starts_processes: whether it is a supervisor of its own, which `launcher.launch` cannot start.
    """

    name: str
    says: str
    module: str = ""
    request: type[Request] = Request
    refuses: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs_recipe: bool = True
    needs_tensorflow: bool = True
    needs_jax: bool = False
    trains: bool = False
    shows_plan: bool = False
    by_tensorflow: bool = False
    starts_processes: bool = False

    @property
    def own_flags(self) -> dict[str, dataclasses.Field]:
        """The flags that it reads and not every mode accepts, by name."""
        common = fields_of(Request)
        return {name: field for name, field in fields_of(self.request).items() if name not in common}


_DEVICES = ("strategy", "replicas", "tpu")
_NEEDS_NOTHING: dict[str, Any] = {"needs_recipe": False, "needs_tensorflow": False, "shows_plan": True}
_READS_FILES = {"refuses": dict.fromkeys(_DEVICES, "reads files only; leave it out"), **_NEEDS_NOTHING}

_ROWS = (
    Mode("train", "trains", request=TrainRequest, trains=True),
    Mode("eval", "evaluates the newest checkpoint", module="launcher.modes.train"),
    Mode(
        "train_and_eval",
        "trains and evaluates in turn",
        module="launcher.modes.train",
        request=TrainRequest,
        trains=True,
    ),
    Mode(
        "verify",
        "compares some steps on several topologies",
        module="launcher.verify.verification",
        refuses=dict.fromkeys(
            _DEVICES, "compares topologies of its own; bind them, such as --gin_param='verify.replicas = (2, 4)'"
        ),
        shows_plan=True,
        starts_processes=True,
    ),
    Mode("predict", "answers lines, images or arrays", module="launcher.modes.serve", request=PredictRequest),
    Mode(
        "export",
        "writes the model as a SavedModel or .keras file",
        module="launcher.modes.serve",
        request=ExportRequest,
        by_tensorflow=True,
    ),
    Mode(
        "preflight",
        "compiles the training step for the devices of --tpu_type and --gpu_type, which need not be there",
        module="launcher.preflight.command",
        request=PreflightRequest,
        refuses=dict.fromkeys(
            _DEVICES, "compiles for what --tpu_type and --gpu_type name, whatever this machine has; leave it out"
        ),
        needs_jax=True,
        shows_plan=True,
    ),
    Mode(
        "precision_report",
        "says what 16 bits do to the gradients and which loss scale fits",
        module="launcher.precision_report.command",
        by_tensorflow=True,
        refuses=dict.fromkeys(
            ("strategy", "tpu"), "runs on this machine; leave it out, and say on how many replicas with --replicas"
        ),
        shows_plan=True,
    ),
    Mode(
        "doctor",
        "examines this machine, also without a recipe",
        module="launcher.doctor.examination",
        request=DoctorRequest,
        **_NEEDS_NOTHING,
    ),
    Mode("report", "writes report.html from what is in --model_dir", **_READS_FILES),
    Mode(
        "clean",
        "deletes the folders of launcher.fit without model_dir, in runs/fit or --model_dir",
        module="launcher.modes.fit_folders",
        **_READS_FILES,
    ),
    Mode("compare", "compares the runs in the folders that it is given", request=CompareRequest, **_READS_FILES),
)
MODES: plugins.Table[Mode] = plugins.Table("mode", Mode, {mode.name: mode for mode in _ROWS}, " ")


def define_flags() -> flags.FlagValues:
    """Flags of all modes, in the order of --help, apart from absl's, to which TensorFlow and TFDS add theirs."""
    values = flags.FlagValues()
    define(fields_of(Request), values)
    for name, readers in _readers().items():
        field = readers[0].own_flags[name]
        _define(field, f"For {_named(readers)}: {field.metadata['help']}", values)
    define_about(values)
    return values


def fields_of(*tables: type) -> dict[str, dataclasses.Field]:
    """The flags of classes whose fields are `flag`s, by name."""
    return {field.name: field for table in tables for field in dataclasses.fields(table)}


def define(table: Mapping[str, dataclasses.Field], values: flags.FlagValues) -> None:
    """Defines the flags of `fields_of`."""
    for field in table.values():
        _define(field, field.metadata["help"], values)


def define_about(values: flags.FlagValues) -> None:
    """The flags that make a program tell of itself and do nothing else."""
    flags.DEFINE_bool("version", False, "Show the versions of Launcher, TensorFlow and Keras.", flag_values=values)
    flags.DEFINE_bool("help", False, "Show this text.", short_name="h", flag_values=values)


def help_text(about: str, values: flags.FlagValues, names: Sequence[str], ending: str) -> str:
    """The text of `--help`: what a program is about, a paragraph for each of the named flags, and an ending."""
    lines = [about.strip(), "", "Flags:"]
    for name in names:
        if name != values[name].short_name:
            usage, text = described(values[name])
            lines += [f"  {usage}", f"      {text}"]
    return "\n".join([*lines, "", ending])


def described(flag: flags.Flag) -> tuple[str, str]:
    """Usage of a flag, with its choices, and its meaning, with its default."""
    choices, told = "|".join(getattr(flag.parser, "enum_values", None) or []), ""
    if isinstance(flag.parser, _NameIn):
        choices, told = "|".join(flag.parser.table.names()), f": {flag.parser.table.told()}."
    # absl puts the choices in front of the text, and a remark on repeating behind it.
    text = re.sub(r"^<[^>]*>: |;\s+repeat this option.*$", "", flag.help, flags=re.DOTALL) + told
    if flag.default not in (None, False, []):
        text += f" Default: {flag.default}."
    return f"--{flag.name}{'' if flag.boolean else f'={choices or flag.name.upper()}'}", text


def options_of(argv: Sequence[str], others: Iterable[str] = ()) -> tuple[flags.FlagValues, list[str]]:
    """The flags of a worker's command line, parsed, and the rest of it; for `others`, see `parse`."""
    mode = flags.FlagValues()  # before all others: of a package's mode, they are known once it is
    mode.set_gnu_getopt(True)
    define({"mode": fields_of(Request)["mode"]}, mode)
    parse(mode, argv, known_only=True)
    values = define_flags()
    return values, parse(values, argv, others=others)


def parse(
    values: flags.FlagValues, argv: Sequence[str], *, known_only: bool = False, others: Iterable[str] = ()
) -> list[str]:
    """Gives the flags what a command line says, and returns the rest of it; `others` are more flags to advise."""
    try:
        return values(argv, known_only=known_only)[1:]
    except flags.UnrecognizedFlagError as error:
        meant = advice(error.flagname, [*others, *values])
        raise UsageError(f"unknown flag --{error.flagname}{meant}; --help shows every flag") from None
    except flags.Error as error:
        raise UsageError(f"{str(error).rstrip(' .')}; --help shows every flag") from None


def refuse_arguments(rest: Sequence[str]) -> None:
    """UsageError where a command line has anything but flags."""
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}: flags are written --name=value. --help shows every flag")


def make_request(values: flags.FlagValues) -> Request:
    """The request of the parsed flags; UsageError where one does not go with the mode, or is wrong in any."""
    mode = MODES[values.mode]
    if values.replicas is not None and values.replicas < 1:
        raise UsageError(f"--replicas={values.replicas}: must be 1 or more")
    for name, readers in _readers().items():
        if values[name].present and mode not in readers:
            raise UsageError(f"--{name} is for {_named(readers)}, and the mode is {mode.name}")
    for name, instead in mode.refuses.items():
        if values[name].value is not None:
            raise UsageError(f"--{name}={values[name].value}: --mode={mode.name} {instead}")
    given: dict[str, Any] = {}
    for field in dataclasses.fields(mode.request):
        value = values[field.name].value
        given[field.name] = tuple(value) if isinstance(value, list) else value
    return mode.request(**given)


def run(request: Request) -> int:
    """Runs the mode, or shows what it would do, and returns the exit code."""
    if MODES[request.mode].by_tensorflow and request.runtime is not runtime_kinds.TENSORFLOW:
        print(f"--mode={request.mode} is done by TensorFlow, and not by {request.runtime.flag}", flush=True)
        request = dataclasses.replace(request, engine=runtime_kinds.TENSORFLOW.name)
    return int(module_of(request).run(request))


def module_of(request: Request) -> ModuleType:
    """The module that does what is asked for, imported; its `run` does it."""
    mode = MODES[request.mode]
    shows_plan = request.dry_run and not mode.shows_plan
    return importlib.import_module(
        "launcher.preflight.dry_run" if shows_plan else mode.module or f"{__name__}.{mode.name}"
    )


def _readers() -> dict[str, list[Mode]]:
    """Who reads each flag that not every mode accepts."""
    readers: dict[str, list[Mode]] = {}
    for mode in MODES.values():
        for name in mode.own_flags:
            readers.setdefault(name, []).append(mode)
    return readers


def _named(modes: Sequence[Mode]) -> str:
    return f"--mode={' and '.join(mode.name for mode in modes)}"
