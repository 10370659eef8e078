"""SliceFinding: one recipe's step on one target, resolved, lowered, compiled, and what the compiler makes of it."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from launcher.config import gin_used
from launcher.errors import UsageError
from launcher.optimizers.parts import bytes_of
from launcher.preflight import advice, hbm, hlo, roofline
from launcher.preflight.compilation import Compilation
from launcher.preflight.compiler import Compiler
from launcher.preflight.costs import Costs
from launcher.preflight.hbm import HbmUse
from launcher.preflight.hlo import Module
from launcher.preflight.roofline import Roofline
from launcher.preflight.targets import Target
from launcher.run import layer_settings, loading
from launcher.run.plan import RunPlan
from launcher.run.session import Session
from launcher.step import flops
from launcher.step.flops import Flops
from launcher.step.layers import group_size, walk
from launcher.step.trainer import Trainer
from launcher.step_program import lowering, op_source
from launcher.step_program.lowering import StepProgram

_STATUS = re.compile(r"^([A-Z_]+): ")
_LOCATION = re.compile(r'loc\("([^"]+)"(?:\("([^"]+)":(\d+))?')
_INSTRUCTION = re.compile(r"%([\w.\-]+) = ")
_SHOWN = 600

_HINTS = {
    "vmem": "one operation needs more on-chip memory than there is; make its window or block smaller",
    "UNIMPLEMENTED": "it has no code for it; write it with other operations",
    "INVALID_ARGUMENT": "it takes the program for a wrong one",
    "INTERNAL": "it failed by itself; another version of it may not",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is to be compiled.

    Attributes:
      where: the devices.
      changes: bindings on top of the command's own, such as "train.microbatches = 2".
    """

    where: Target
    changes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For people."""
        return ", ".join((self.where.name, *self.changes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What reports and suggestions must know of a model.

    Attributes:
      parameters, trained_parameters: numbers of weights.
      group_sizes: numbers of examples that normalisation layers take their statistics over.
      keeps_activations: whether `train.rematerialize` would have the model keep less of them.
      tokens_per_example: None where examples are no sequences.
      notes: what the task says of its model on such devices.
      shareable_bytes: of the optimizer's state and the averages, which `train.shard_optimizer` would share out; 0 where
        it does already or cannot.
      kind: its name and the size of its images, as published rates have it.
      computed: the plan's lines on how a step computes attention, loss and optimizer state.
      flops: of one replica's step, as its graph has them; None where it does not tell.
    """

    parameters: int
    trained_parameters: int
    group_sizes: tuple[int, ...]
    keeps_activations: bool
    tokens_per_example: float | None
    notes: tuple[str, ...]
    shareable_bytes: int = 0
    kind: str = ""
    computed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    flops: Flops | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceFinding:
    """What came of a case.

    Attributes:
      plan: the run as it would be there.
      model: of its model.
      compilation: what the compiler said.
      refusal: why it does not compile, in words; None when it does, or when all it lacks is memory.
      hbm, costs, roofline: None when it does not compile; the last two, too, when it does not fit.
      advice: what could be better, a sentence each.
      unread: what of the compiled program was not understood; then nothing is counted in it.
    """

    case: Case
    plan: RunPlan
    model: ModelFacts
    compilation: Compilation
    refusal: str | None
    hbm: HbmUse | None
    costs: Costs | None
    roofline: Roofline | None
    advice: tuple[str, ...]
    unread: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.hbm is not None and self.hbm.fits


class Examiner:
    """Examines cases of one recipe.

    Args:
      gin_files, gin_params: the recipe, as the flags gave it.
      seed, deterministic: as the flags.
      compiler: does the compiling.
      on_phase: called with the case and "lowering" or "compiling".
    """

    def __init__(
        self,
        *,
        gin_files: Sequence[str],
        gin_params: Sequence[str],
        seed: int | None,
        deterministic: bool,
        compiler: Compiler,
        on_phase: Callable[[Case, str], None],
    ):
        self._gin_files, self._gin_params = tuple(gin_files), tuple(gin_params)
        self._seed, self._deterministic = seed, deterministic
        self._compiler = compiler
        self._on_phase = on_phase

    def resolve(self, case: Case) -> RunPlan:
        """The run as it would be on the case's devices.

        Raises:
          UsageError: the recipe contradicts itself, cannot be divided among the replicas, or nothing can be told of it.
        """
        # The machine's own cluster and devices are not those of the run.
        resolved = loading.Machine(
            environ={},
            seed=self._seed,
            deterministic=self._deterministic,
            on=case.where.strategy(),
            connect=False,
        ).resolve(self._gin_files, [*self._gin_params, *case.changes])
        case.where.check(resolved)
        return resolved

    def examine(self, case: Case) -> SliceFinding:
        """Compiles a case and reads what came of it.

        Raises:
          UsageError: the recipe cannot be built, or the step cannot be one program at all.
        """
        resolved = self.resolve(case)
        self._on_phase(case, "lowering")
        case.where.configure()
        program, model, lines = _lowered(resolved, case.where.num_replicas)
        gin_used.check_all_used()
        self._on_phase(case, "compiling")
        compilation = self._compiler.compile(program.stablehlo, case.where)
        line_of = functools.partial(op_source.line_of, lines)
        module = hlo.parse(compilation.hlo, line_of) if compilation.hlo else None
        found = SliceFinding(
            case=case,
            plan=resolved,
            model=model,
            # Megabytes that nothing reads any more.
            compilation=dataclasses.replace(
                compilation, hlo="", buffer_assignment="", live_ranges="", before_libraries=""
            ),
            refusal=None,
            hbm=None,
            costs=None,
            roofline=None,
            advice=(),
        )
        if compilation.error is not None and hbm.refused_for_hbm(compilation.error) is None:
            return dataclasses.replace(
                found, refusal=explain_refusal(compilation.error, module, case.where.accelerator)
            )
        before = hlo.parse(compilation.before_libraries, line_of) if compilation.before_libraries else None
        # Of a program that was not read whole, the compiler's own figures are all that can be told.
        unread = tuple(what for one in (module, before) if one is not None for what in one.unread)
        costs = None if module is None or unread else case.where.count(module, before)
        accounted = hbm.account(
            compilation,
            module,
            argument_names=[argument.name for argument in program.arguments],
            result_names=[result.name for result in program.results],
            available=case.where.memory_bytes.value,
            reserved=functools.partial(case.where.reserved, costs),
        )
        return _measured(dataclasses.replace(found, unread=unread), accounted, costs)


def _measured(found: SliceFinding, accounted: HbmUse, costs: Costs | None) -> SliceFinding:
    """Adds what the optimised program tells, where there is one."""
    if costs is None:
        return dataclasses.replace(found, hbm=accounted)
    where, recipe = found.case.where, found.plan.recipe
    gradient_bytes = found.model.trained_parameters * found.plan.wire_dtype.size
    bounds = roofline.estimate(
        costs,
        where,
        global_batch_size=recipe.global_batch_size,
        tokens_per_example=found.model.tokens_per_example,
        steps=found.plan.total_steps,
        model_flops=found.model.flops.model if found.model.flops else None,
    )
    return dataclasses.replace(
        found,
        hbm=accounted,
        costs=costs,
        roofline=bounds if accounted.fits else None,
        advice=advice.advise(
            costs,
            accounted,
            where,
            policy=found.plan.policy,
            bounds=bounds,
            shared_gradient_bytes=gradient_bytes if recipe.shard_optimizer else 0,
        ),
    )


def _lowered(resolved: RunPlan, num_replicas: int) -> tuple[StepProgram, ModelFacts, dict[str, str]]:
    """The program, what its model is like, and the line of user code that each operation is from."""
    session = lowering.build(resolved, num_replicas)
    lowered = lowering.lower_session(session, for_tpu=resolved.strategy.accelerator == "tpu")
    facts = _facts(resolved, session)
    loops = [resolved.microbatches] if resolved.microbatches > 1 else []
    counted = flops.count(lowered.graph, loops)
    facts = dataclasses.replace(facts, notes=(*session.notes, *facts.notes, *lowered.notes), flops=counted)
    found = lowered.program, facts, op_source.user_lines(lowered.graph)
    # A model of the size of a chip's memory must not stay while the compiler needs this machine's. TensorFlow keeps a
    # graph with a custom gradient for good, and with it the variables: their values go by themselves.
    for variable in lowered.variables.values():
        nothing = tf.zeros([0], variable.dtype)
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=nothing, validate_shape=False)
    del session, lowered
    keras.utils.clear_session()  # collects garbage
    return found


def _facts(resolved: RunPlan, session: Session) -> ModelFacts:
    model = session.model
    sizes = [int(variable.value.shape.num_elements()) for variable in model.trainable_variables]
    groups = {size for layer, *_ in walk(model) if (size := group_size(layer))}
    weight = float(resolved.recipe.task.nominal_weight_per_example)
    return ModelFacts(
        parameters=model.count_params(),
        trained_parameters=sum(sizes),
        group_sizes=tuple(sorted(groups)),
        keeps_activations=not all(layer.rematerialize for layer in layer_settings.rematerializing(model)),
        tokens_per_example=None if weight == 1 else weight,
        notes=tuple(resolved.recipe.task.notes(model, resolved.strategy.accelerator)),
        shareable_bytes=0 if resolved.recipe.shard_optimizer else _shareable_bytes(session.trainer),
        kind=_kind(model),
        computed=layer_settings.describe(resolved, model),
    )


def _shareable_bytes(trainer: Trainer) -> int:
    try:
        trainer.optimizer.check_shardable()
    except UsageError:
        return 0
    return bytes_of([*trainer.optimizer.variables, *(average for _, average in trainer.ema.variables)])


def _kind(model: keras.Model) -> str:
    shape = getattr(model, "input_shape", None)  # of a functional model
    size = f" {shape[1]}x{shape[2]}" if isinstance(shape, tuple) and len(shape) == 4 else ""
    return f"{model.name}{size}"


def explain_refusal(error: str, module: Module | None, accelerator: str = "tpu") -> str:
    """The compiler's refusal: what it names, the place in the user's code if it is known, and what to do.

    Args:
      error: its own words.
      module: the program it gave up on, when it left one.
      accelerator: "tpu" or "gpu".
    """
    status = _STATUS.match(error)
    places = [place for place in (_named(error, module), _location(error)) if place]
    hint = _HINTS["vmem"] if re.search(r"\bvmem\b", error, re.IGNORECASE) else _HINTS.get(status[1] if status else "")
    words = " ".join(error.split())
    words = words if len(words) <= _SHOWN else f"{words[:_SHOWN]}…"
    about = f" {places[0]}:" if places else ""
    return f"the {accelerator.upper()} compiler refuses the step:{about} {words}{f' ({hint})' if hint else ''}"


def _named(error: str, module: Module | None) -> str:
    """Source of the first instruction that the error names."""
    if module is None:
        return ""
    wanted = set(_INSTRUCTION.findall(error)) | set(re.findall(r"%([\w.\-]+)", error))
    for computation in module.computations.values():
        for name, one in computation.instructions.items():
            if name in wanted and str(one.source):
                return str(one.source)
    return ""


def _location(error: str) -> str:
    found = _LOCATION.search(error)
    if found is None:
        return ""
    return f"{found[1]} at {found[2]}:{found[3]}" if found[2] else found[1]
