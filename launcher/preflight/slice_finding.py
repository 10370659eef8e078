"""SliceFinding: one recipe's step on one target, resolved, lowered, compiled, and what the compiler makes of it."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping

import keras

from launcher.config import gin_used
from launcher.errors import UsageError
from launcher.modes import PreflightRequest
from launcher.optimizers.weight_shards import bytes_of
from launcher.preflight import advice, roofline
from launcher.preflight.compiled import Compilation, hbm, hlo
from launcher.preflight.compiled.costs import Costs
from launcher.preflight.compiled.hbm import HbmUse
from launcher.preflight.compiler import Compiler
from launcher.preflight.roofline import Roofline
from launcher.preflight.targets import Target
from launcher.reporting.console import Console
from launcher.reporting.units import bytes_text
from launcher.run import layer_settings, loading
from launcher.run.plan import RunPlan
from launcher.run.session import Session
from launcher.step import flops, op_source
from launcher.step.flops import Flops
from launcher.step.layers import group_sizes
from launcher.step.trainer import Trainer
from launcher.step_program import lowering

_STATUS = re.compile(r"^([A-Z_]+): ")
_SHOWN = 600

_WITHOUT_TRITON = (
    "with Triton's matrix products the compiler refuses the step, as no GPU is here to try their tiles on: all of this "
    "is of the program without them (--xla_gpu_enable_triton_gemm=false)"
)

_HINTS = {
    "vmem": "one operation needs more on-chip memory than there is; make its window or block smaller",
    "UNIMPLEMENTED": "it has no code for it; write it with other operations",
    "INVALID_ARGUMENT": "it takes the program for a wrong one",
    "INTERNAL": "it failed by itself; another version of it may not",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Target, and changes of the command, to compile for."""

    where: Target
    changes: tuple[str, ...] = ()  # bindings on top of the command's own, such as "train.microbatches = 2"

    @property
    def name(self) -> str:
        """For people."""
        return ", ".join((self.where.words, *self.changes))

    def changed(self, *bindings: str) -> Case:
        """The case with more changes."""
        return dataclasses.replace(self, changes=(*self.changes, *bindings))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts of a model that reports and suggestions need.

    Attributes:
      parameters, trained_parameters: numbers of weights.
      group_sizes: numbers of examples that normalisation layers take their statistics over.
      keeps_activations: whether `train.rematerialize` would have the model keep less of them.
      tokens_per_example: None where examples are no sequences.
      notes: what the task says of its model on such devices.
      shareable_bytes: of the optimizer's state and the averages, which `train.shard` would share out; 0 where
        it does already or cannot.
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
    computed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    flops: Flops | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceFinding:
    """Finding on a case.

    Attributes:
      plan: the run as it would be there.
      refusal: why it does not compile, in words; None when it does, or when all it lacks is memory.
      hbm, costs, roofline: None when it does not compile; the last two, too, when it does not fit.
      advice: what could be better, a sentence each.
      unread: what of the compiled program was not understood; then nothing is counted in it.
    """

    case: Case
    plan: RunPlan
    model: ModelFacts
    compilation: Compilation
    refusal: str | None = None
    hbm: HbmUse | None = None
    costs: Costs | None = None
    roofline: Roofline | None = None
    advice: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.hbm is not None and self.hbm.fits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examiner:
    """Examines cases of the recipe that the flags name."""

    request: PreflightRequest
    compiler: Compiler
    console: Console  # says which of the two parts a case is in, lowering or compiling

    def resolve(self, case: Case) -> RunPlan:
        """The run as it would be on the case's devices.

        Raises:
          UsageError: the recipe contradicts itself, or cannot be divided among the replicas.
        """
        return self._settled(case)[1]

    def _settled(self, case: Case) -> tuple[Case, RunPlan]:
        """The case as it can be compiled, and its run."""
        plan = self._plan(case)
        if plan.is_compiled:
            return case, plan
        case = dataclasses.replace(case, where=case.where.seen_whole())
        return case, self._plan(case)

    def _plan(self, case: Case) -> RunPlan:
        # The machine's own cluster and devices are not those of the run.
        machine = loading.Machine(
            environ={},
            seed=self.request.seed,
            deterministic=self.request.deterministic,
            on=case.where.strategy(),
            connect=False,
        )
        return machine.resolve(self.request.gin_file, [*self.request.gin_param, *case.changes])

    def examine(self, case: Case) -> SliceFinding:
        """Compiles a case and reads what came of it.

        Raises:
          UsageError: the recipe cannot be built, or the step cannot be one program at all.
        """
        case, resolved = self._settled(case)
        with self.console.waiting(f"{case.name}: lowering"):
            case.where.configure()
            program, model, lines = _lowered(resolved, case.where.num_replicas)
            gin_used.check_all_used()
        with self.console.waiting(f"{case.name}: compiling"):
            compilation = self.compiler.compile(program.stablehlo, case.where)
        line_of = functools.partial(op_source.line_of, lines)
        module, before = (
            hlo.parse(text, line_of) if text else None for text in (compilation.hlo, compilation.before_libraries)
        )
        # Megabytes that nothing reads any more.
        told = dataclasses.replace(compilation, hlo="", buffers="", before_libraries="")
        found = SliceFinding(case=case, plan=resolved, model=model, compilation=told)
        if compilation.error is not None and hbm.refused_for_hbm(compilation.error) is None:
            refusal = explain_refusal(compilation.error, module, case.where.accelerator)
            return dataclasses.replace(found, refusal=refusal)
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
        found = dataclasses.replace(found, hbm=accounted, unread=(*unread, *accounted.unread))
        return found if costs is None or found.unread else _measured(found, accounted, costs)


def _measured(found: SliceFinding, accounted: HbmUse, costs: Costs) -> SliceFinding:
    """Adds what the optimised program tells."""
    where, plan, model = found.case.where, found.plan, found.model
    bounds = roofline.estimate(
        costs,
        where,
        global_batch_size=plan.recipe.global_batch_size,
        tokens_per_example=model.tokens_per_example,
        steps=plan.total_steps,
        model_flops=model.flops.model if model.flops else None,
    )
    return dataclasses.replace(
        found,
        costs=costs,
        roofline=bounds if accounted.fits else None,
        advice=(
            *([_WITHOUT_TRITON] if found.compilation.without_triton else []),
            *advice.advise(
                costs,
                accounted,
                where,
                policy=plan.policy,
                bounds=bounds,
            ),
        ),
    )


def _lowered(resolved: RunPlan, num_replicas: int) -> tuple[lowering.StepProgram, ModelFacts, dict[str, str]]:
    """The program, what its model is like, and the line of user code that each operation is from."""
    session = lowering.build(resolved, num_replicas, without_values=True)
    lowered = lowering.lower_session(session, for_tpu=resolved.strategy.accelerator == "tpu")
    found = lowered.program, _facts(resolved, session, lowered), op_source.user_lines(lowered.graph)
    del session, lowered
    keras.utils.clear_session()  # collects garbage
    return found


def _facts(resolved: RunPlan, session: Session, lowered: lowering.Lowered) -> ModelFacts:
    model, task = session.model, resolved.recipe.task
    sizes = [int(variable.value.shape.num_elements()) for variable in model.trainable_variables]
    groups = group_sizes(model)
    weight = float(task.nominal_weight_per_example)
    batch = bytes_of([one for one in lowered.program.arguments if one.kind == "batch"])
    return ModelFacts(
        parameters=model.count_params(),
        trained_parameters=sum(sizes),
        group_sizes=tuple(sorted(groups)),
        keeps_activations=not all(layer.rematerialize for layer in layer_settings.rematerializing(model)),
        tokens_per_example=None if weight == 1 else weight,
        notes=(*session.notes, *task.notes(model, resolved.strategy.accelerator), *lowered.notes),
        shareable_bytes=0 if resolved.recipe.shard != "none" else _shareable_bytes(session.trainer),
        computed={"input": f"{bytes_text(batch)} a step and replica", **layer_settings.describe(resolved, model)},
        flops=flops.count(lowered.graph),
    )


def _shareable_bytes(trainer: Trainer) -> int:
    try:
        trainer.optimizer.check_shardable()
    except UsageError:
        return 0
    return bytes_of([*trainer.optimizer.variables, *(average for _, average in trainer.ema.variables)])


def explain_refusal(error: str, module: hlo.Module | None, accelerator: str = "tpu") -> str:
    """The compiler's refusal of a program in words, with the place in the user's code, if known, and what to do."""
    status = _STATUS.match(error)
    place = _named(error, module)
    hint = _HINTS["vmem"] if re.search(r"\bvmem\b", error, re.IGNORECASE) else _HINTS.get(status[1] if status else "")
    words = " ".join(error.split())
    words = words if len(words) <= _SHOWN else f"{words[:_SHOWN]}…"
    about = f" {place}:" if place else ""
    return f"the {accelerator.upper()} compiler refuses the step:{about} {words}{f' ({hint})' if hint else ''}"


def _named(error: str, module: hlo.Module | None) -> str:
    """Source of the first instruction that the error names."""
    if module is None:
        return ""
    wanted = set(re.findall(r"%([\w.\-]+)", error))
    return next((str(each.source) for each in module.instructions if each.name in wanted and str(each.source)), "")
