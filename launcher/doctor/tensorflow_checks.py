"""Checks of TensorFlow: its import, build and devices, and the recipe and data of a training."""

from collections.abc import Iterator

from launcher.doctor import child, nvidia
from launcher.doctor.check import Context, Finding, Skip, check, fail, ok, warn
from launcher.errors import EXIT_FAILED
from launcher.machine import installation
from launcher.machine.runtime_kinds import PJRT


@check("TensorFlow and Keras 3 start", waits_for="starting TensorFlow in a process of its own")
def tensorflow(context: Context) -> Iterator[Finding]:
    anew = installation.tensorflow_command()
    answer = context.tensorflow.answers.get("import")
    if answer is None:
        yield fail(
            f"the process that imports TensorFlow {context.tensorflow.how}",
            f"install it anew: {anew}; Illegal instruction (SIGILL): this CPU is too old for these wheels",
        )
    elif answer.problem:
        yield fail(f"cannot be imported: {answer.problem}", f"install it anew: {anew}")
    else:
        values = answer.values
        seen = (
            f"{values['tensorflow']} with Keras {values['keras']}, imported in {values['seconds']:.0f} s, "
            f"{values['resident_bytes'] / 2**30:.2f} GiB, from {values['file'].rpartition('/')[0]}"
        )
        if values["tf_keras"] != values["keras"]:
            yield fail(f"{seen}; tf.keras is {values['tf_keras']}", "unset TF_USE_LEGACY_KERAS")
        else:
            yield ok(seen)
        if context.tensorflow.returncode != 0:
            yield _crash(context.tensorflow)


def _crash(outcome: child.ChildResult) -> Finding:
    seen = f"after {list(outcome.answers)[-1]!r} its process {outcome.how}"
    fix = "look at the driver, and at what other programs do on the devices"
    return fail(seen, fix, exit_code=EXIT_FAILED)


@check("GPUs and TPUs, and the policy for each")
def devices(context: Context) -> Iterator[Finding]:
    answer = context.says("devices")
    if answer.error:
        yield fail(answer.error, "see nvidia-smi, and whether driver and CUDA libraries fit")
        return
    gpus, tpus, chips = answer.values["gpus"], answer.values["tpus"], answer.values["tpu_chips"]
    for index, gpu in enumerate(gpus):
        yield nvidia.can_be_used(context, f"GPU:{index} {gpu['model']}", gpu["compute_capability"])
    if tpus:
        yield ok(f"{len(tpus)} TPU cores: mixed_bfloat16")
    elif chips:
        yield warn(
            f"{', '.join(chips)} may be TPU chips, and TensorFlow lists no TPU device",
            f"on a TPU VM, {installation.command('tpu')}, and end other programs that hold the chips",
        )
    if not gpus:
        yield from nvidia.not_used(context, quiet=bool(tpus or chips))


@check("memory growth, TF32, a product on each GPU")
def gpus(context: Context) -> Iterator[Finding]:
    answer = context.says("gpus") if context.says("devices").values.get("gpus") else None
    if answer is None:
        yield from _of_jax(context)
        return
    if answer.problem:
        yield fail(answer.problem, "end other programs on the GPUs (see nvidia-smi), or set CUDA_VISIBLE_DEVICES")
        return
    growth = "memory is taken as it is needed" if all(answer.values["memory_growth"]) else "all memory is taken at once"
    tf32 = "TF32 on" if answer.values["tf32"] else "TF32 off"
    yield ok(f"each multiplies rightly; {growth} (gpu.memory_growth), {tf32} (gpu.tf32)")


def _of_jax(context: Context) -> Iterator[Finding]:
    """Findings on GPUs that TensorFlow does not list, and JAX would train on."""
    if not nvidia.count(context):
        raise Skip("no GPU")
    answer = context.says("jax_gpus")
    values = answer.values
    if answer.problem:
        yield warn(f"{PJRT.flag}: {answer.problem}", f"see nvidia-smi; {installation.command('jax_cuda12')}")
    else:
        yield ok(
            f"{PJRT.flag}: {values['count']} x {values['model']}, {values['bytes'] / 2**30:.1f} GiB offered on each "
            "(gpu.memory_share); each multiplies rightly, and an all-reduce adds up"
        )


@check("--gin_file loads")
def recipe(context: Context) -> Iterator[Finding]:
    _need_recipe(context)
    answer = context.says("recipe")
    if answer.problem:
        yield fail(answer.problem, "correct the recipe or --gin_param")
    else:
        yield ok(f"{', '.join(context.request.gin_file)} loads; train.precision = {answer.values['precision']!r}")


@check("the recipe's data set is prepared")
def data(context: Context) -> Iterator[Finding]:
    _need_recipe(context)
    answer = context.says("data")
    if answer.problem:
        yield fail(answer.problem, "prepare it with the command that the message names")
    else:
        count = answer.values["examples"]
        yield ok(f"{answer.values['name']} is there" + (f", {count:,} training examples" if count else ""))


@check("the recipe's model meets no trap of docs/traps.md")
def model(context: Context) -> Iterator[Finding]:
    _need_recipe(context)
    answer = context.says("model")
    if answer.problem:
        raise Skip(f"the model cannot be looked at: {answer.problem}")
    if not answer.values["traps"]:
        yield ok(f"{answer.values['model']} meets no trap that its layers and optimizer show")
    for trap in answer.values["traps"]:
        yield warn(f"{trap['path']}: {trap['text']}", trap["fix"])


def _need_recipe(context: Context) -> None:
    if not context.request.gin_file:
        raise Skip("no --gin_file")
