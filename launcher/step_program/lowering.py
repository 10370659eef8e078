"""The training step of a recipe as one StableHLO program for all replicas of a pod, made on one CPU.

What is lowered is `ReplicaStep.__call__` of the session that training would build, traced in a replica context whose
collectives become those of the pod (`pod_replica`); nothing here knows what a step does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from launcher.data import batch_spec
from launcher.data.pipeline import Batch, Shard
from launcher.errors import UsageError
from launcher.machine import compile_cache
from launcher.optimizers.weight_shards import WeightShard
from launcher.run import plan as plan_lib
from launcher.run import session as session_lib
from launcher.runtime import initial_values
from launcher.runtime.tensorflow import TfRuntime
from launcher.runtime.traits import Held
from launcher.step.state import MODEL
from launcher.step_program import cannot_lower, graph_key, jax_parts, on_host, pod_module, tpu_random, weights_in_parts
from launcher.step_program.cannot_lower import CannotLowerError
from launcher.step_program.pod_replica import PodReplica

# Of more chips at once libtpu 0.0.52 scatters no sum, but makes all of it on each.
_MOST_SCATTERED = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Argument:
    """One parameter or result of a program; a "constant" is a tensor that the model holds beside its variables."""

    name: str  # of a variable, its name in a checkpoint; of a batch's tensor, its key
    shape: tuple[int, ...]  # of what one replica has of it
    dtype: str  # NumPy's name; "bfloat16" is ml_dtypes'
    kind: str  # "batch", "variable" or "constant"; of a result, "report" or "variable"
    axis: int | None = None  # the dimension of the whole that is divided among the replicas; None where each has all


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepProgram:
    """One training step of every replica.

    Attributes:
      stablehlo: MLIR text of one module with locations; "main" is what each replica runs.
      num_replicas: all of which its reductions are over.
      arguments: the parameters of "main" in order: one replica's batch, then variables and constants.
      results: its results in order: the scalars of `train_step.StepReport`, then the new value of each variable that
        the step changes, which takes the memory of the old one.
      gathered_bytes: of whole weights, put together from the replicas' parts for one microbatch.
    """

    stablehlo: str
    num_replicas: int
    arguments: tuple[Argument, ...]
    results: tuple[Argument, ...]
    gathered_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lowered:
    """A program and what it was made from.

    Attributes:
      variables: those variables, by their arguments' names.
      constants: value of each argument of the kind "constant".
      graph: what was lowered; its operations have the names that stand in the program's locations.
      notes: what of the step is not in the program.
      on_host: one replica's batch as the program takes it, where the host does some of the step's work on it.
    """

    program: StepProgram
    variables: dict[str, tf.Variable]
    constants: dict[str, np.ndarray]
    graph: tf.Graph
    notes: tuple[str, ...]
    on_host: Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]] | None = None


def build(plan: plan_lib.RunPlan, num_replicas: int, *, without_values: bool = False) -> session_lib.Session:
    """The session of one replica among `num_replicas`, to be lowered.

    Takes the memory of the recipe's variables, needs no data, no accelerator, and touches no device but the CPU.

    Args:
      plan: of any strategy; its policy, reduce dtype and seed are taken as they are.
      num_replicas: among which the recipe's global batch is divided.
      without_values: the variables have none, and take no memory.

    Raises:
      UsageError: JAX is missing, the batch cannot be divided, or the model refuses.
    """
    jax_parts.load()
    with initial_values.left_out() if without_values else contextlib.nullcontext():
        return session_lib.build_on(
            TfRuntime(tf.distribute.OneDeviceStrategy("/CPU:0")), for_replicas(plan, num_replicas)
        )


def for_replicas(plan: plan_lib.RunPlan, num_replicas: int) -> plan_lib.RunPlan:
    """The same plan on another number of replicas; UsageError where its batch cannot be divided among them."""
    strategy = dataclasses.replace(plan.strategy, num_replicas=num_replicas, local_replicas=num_replicas)
    pod = dataclasses.replace(plan, strategy=strategy)
    plan_lib.check_batches(pod)
    return pod


def whole_shard(plan: plan_lib.RunPlan) -> Shard:
    """All replicas of the plan, fed by one host."""
    return Shard(
        global_batch_size=plan.recipe.global_batch_size,
        num_replicas=plan.strategy.num_replicas,
        local_replicas=plan.strategy.num_replicas,
        seed=plan.seed,
        rows=plan.per_replica_batch_size,
        as_stored=plan.finish_stored is not None,
    )


def lower_session(session: session_lib.Session, *, for_tpu: bool = False) -> Lowered:
    """Lowers the step of a session that `build` made.

    Args:
      for_tpu: draw random numbers and put parts together as TensorFlow does on a TPU; otherwise as on CPUs and GPUs,
        the same everywhere.

    Raises:
      CannotLowerError: XLA cannot compile it; names the operation and the line of code.
      UsageError: the model refuses.
    """
    trainer, plan = session.trainer, session.plan
    return lower(
        trainer.state,
        # Of one tensor, lest a scalar that is known already, such as a constant rate, be no result at all.
        lambda batch: tf.unstack(trainer.replica_step(batch).flat()),
        batch_spec.of_one_replica(plan.data, whole_shard(plan)),
        strategy=session.runtime.host.strategy,
        num_replicas=plan.strategy.num_replicas,
        divides_weights=plan.recipe.shard == "all",
        names=lambda: trainer.report_names,
        microbatches=plan.microbatches,
        for_tpu=for_tpu,
    )


def lower(
    held: Held,
    on_replica: Callable[[Batch], list[tf.Tensor]],
    spec: Mapping[str, tf.TensorSpec],
    *,
    strategy: tf.distribute.Strategy,
    num_replicas: int,
    divides_weights: bool = False,
    names: Callable[[], Sequence[str]] | None = None,
    trains: bool = True,
    microbatches: int = 1,
    for_tpu: bool = False,
) -> Lowered:
    """Lowers a function of one replica's batch that gives a report of tensors; arguments and errors as `lower_session`.

    Args:
      held: the variables; of one that `trains` all may be read and changed, else the model's.
      strategy: under which they were made; of one device, so that they are plain ones.
      divides_weights: each replica has a part of the weights, too.
      names: of the tensors.
      microbatches: that are added up in a loop.
    """
    # In the graph because the step uses them, or because they are read here: every one is an argument.
    named = held.all_variables()
    named = named if trains else {name: one for name, one in named.items() if name.startswith(MODEL)}
    variables = list(named.values())

    # Specifications can be told from values only where each of them is an argument of its own.
    spec = dict(sorted(spec.items()))

    def step(*batch: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        with PodReplica(strategy, num_replicas, for_tpu=for_tpu and not divides_weights):
            report = on_replica(dict(zip(spec, batch, strict=True)))
        return report, [variable.read_value() for variable in variables]

    handles = {id(variable.handle) for variable in variables}
    of_whole = tf.function(step, jit_compile=True, autograph=False)
    with tf.device("/CPU:0"):
        whole = of_whole.get_concrete_function(*spec.values())
    in_part = parts(held, divides_weights=divides_weights)

    def lowered(cut: on_host.Cut | None) -> Lowered:
        at_devices, function = (spec, of_whole) if cut is None else (cut.spec, cut.step)
        with tf.device("/CPU:0"):
            traced = function.get_concrete_function(*at_devices.values())
            cannot_lower.check_resources(traced, handles, held.model)
        arguments, constants = _arguments(at_devices, traced.captured_inputs, named)
        found = traced.structured_outputs[0]
        of_report = names() if names else [f"result/{number}" for number in range(len(found))]
        reports = [_described(name, one, "report") for name, one in zip(of_report, found, strict=True)]
        results = [*reports, *(_described(name, variable, "variable") for name, variable in named.items())]

        def program() -> StepProgram:
            with tf.device("/CPU:0"):
                try:
                    # Leans on TensorFlow: a function gives its HLO for CPUs, also with resources as arguments. Noticed
                    # by tests/step_program/test_lowering.py. Then: look for `experimental_get_compiler_ir`'s successor;
                    # preflight and --engine=pjrt need it.
                    make_hlo = function.experimental_get_compiler_ir(*at_devices.values())
                    with warnings.catch_warnings():  # of the name, without which it draws a number to learn where it
                        warnings.simplefilter("ignore")  # is: --deterministic forbids that
                        hlo = make_hlo(stage="hlo_serialized", device_name="/device:CPU:0")
                except (ValueError, tf.errors.OpError) as error:
                    raise cannot_lower.explain(error, whole.graph, held.model) from None
            philox = tpu_random.names_of_philox(traced.graph) if for_tpu else None
            return _program(hlo, arguments, results, in_part, num_replicas, in_loop=microbatches > 1, philox=philox)

        if compile_cache.folder_in_use is None:
            made = program()
        else:
            divided = {name: (shard.shape, shard.axis) for name, shard in in_part.items()}
            values = [hashlib.sha256(one.tobytes()).digest() for one in constants.values()]
            about = (arguments, results, divided, values, num_replicas, microbatches > 1, for_tpu)
            key = graph_key.key_of(traced.graph, *about)
            made = _read(compile_cache.kept(key, lambda: json.dumps(dataclasses.asdict(program()))))
        unknown = None if for_tpu else pod_module.made_of_unknown_size(jax_parts.load(), made.stablehlo, num_replicas)
        if unknown is not None:
            raise cannot_lower.of_unknown_size(unknown, whole.graph, held.model)
        return Lowered(
            program=made,
            variables=named,
            constants=constants,
            graph=whole.graph,
            notes=tuple(cannot_lower.checks_left_out(whole.graph)),
            on_host=None if cut is None else cut.of_batch,
        )

    refused: dict[str, CannotLowerError] = {}  # by the operation; the host may do it, if it is about the batch alone
    while True:
        try:
            if (cut := on_host.cut(whole, spec, handles, refused, held.model)) is None and refused:
                raise next(reversed(refused.values()))
            return lowered(cut)
        except CannotLowerError as error:
            if error.operation is None or error.operation in refused:
                # The first one was of the whole step, and knows the line.
                raise refused.get(str(error.operation)) or next(reversed(refused.values()), error) from None
            refused[error.operation] = error


def _program(
    hlo: bytes,
    arguments: list[Argument],
    results: list[Argument],
    in_part: Mapping[str, WeightShard],
    num_replicas: int,
    *,
    in_loop: bool,
    philox: frozenset[str] | None,
) -> StepProgram:
    """The program of a traced step's HLO, whose arguments and results are whole."""
    jax = jax_parts.load()
    places = {argument.name: place for place, argument in enumerate(arguments) if argument.kind == "variable"}
    updates = {number: places[one.name] for number, one in enumerate(results) if one.kind == "variable"}
    module = pod_module.convert(
        jax, hlo, num_replicas=num_replicas, num_results=len(results), updates=updates, philox=philox
    )
    results = [results[index] for index in module.kept]
    for expected, found in ((arguments, module.arguments), (results, module.results)):
        if [(one.shape, one.dtype) for one in expected] != list(found):
            # TensorFlow leaves out of a program what it knows already; then the order would not be the one given here.
            raise RuntimeError(f"the program has {found}, expected {[(a.name, a.shape, a.dtype) for a in expected]}")
    text, gathered_bytes = module.text, 0
    axes = {
        place: shard.axis
        for place, argument in enumerate(arguments)
        if (shard := in_part.get(argument.name)) is not None and argument.shape != shard.shape
    }
    if axes:
        try:
            text, gathered_bytes = weights_in_parts.divide(
                jax,
                text,
                axes,
                num_replicas=num_replicas,
                in_loop=in_loop,
                most_scattered=None if philox is None else _MOST_SCATTERED,
            )
        except weights_in_parts.UnknownFormError as error:
            raise UsageError(
                f"train.shard = 'all': {arguments[error.number].name} is used in a form that cannot be computed from "
                f"parts ({error}): bind 'optimizer', which divides its state alone"
            ) from error
    arguments, results = (
        [
            dataclasses.replace(one, shape=shard.shape, axis=shard.axis) if (shard := in_part.get(one.name)) else one
            for one in ones
        ]
        for ones in (arguments, results)
    )
    return StepProgram(
        stablehlo=text,
        num_replicas=num_replicas,
        arguments=tuple(arguments),
        results=tuple(results),
        gathered_bytes=gathered_bytes,
    )


def _read(text: str) -> StepProgram:
    found = json.loads(text)
    ones = {
        key: tuple(Argument(**one | {"shape": tuple(one["shape"])}) for one in found[key])
        for key in ("arguments", "results")
    }
    return StepProgram(**found | ones)


def _arguments(
    spec: batch_spec.BatchSpec, captured: Sequence[tf.Tensor], named: dict[str, tf.Variable]
) -> tuple[list[Argument], dict[str, np.ndarray]]:
    """The program's parameters as TensorFlow orders them: the batch by its keys, then what the step captured."""
    names = {id(variable.handle): name for name, variable in named.items()}
    arguments = [_described(key, spec[key], "batch") for key in spec]
    constants: dict[str, np.ndarray] = {}
    for tensor in captured:
        if id(tensor) in names:
            name = names[id(tensor)]
            arguments.append(_described(name, named[name], "variable"))
        else:
            name = f"constant/{len(constants)}"
            constants[name] = tensor.numpy()
            arguments.append(_described(name, tensor, "constant"))
    return arguments, constants


def parts(held: Held, *, divides_weights: bool) -> dict[str, WeightShard]:
    """By name, the shard that of a replica: the optimizer's state, averages and, if they are divided, weights."""
    weights = held.weight_shards() if divides_weights else {}
    found = {name: held.shard_of(one) or weights.get(id(one)) for name, one in held.variables().items()}
    return {name: shard for name, shard in found.items() if shard is not None}


def _described(name: str, tensor: tf.Variable | tf.Tensor | tf.TensorSpec, kind: str) -> Argument:
    return Argument(name=name, shape=tuple(tensor.shape), dtype=tf.dtypes.as_dtype(tensor.dtype).name, kind=kind)
