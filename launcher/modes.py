"""What `--mode` and `--dry_run` do, from the flags on."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

import keras
import tensorflow as tf

from launcher import assets, config, failures, gce, layer_policies, plan, session, starting_point, tpu_runtime, wire
from launcher.checkpoints import CheckpointStore, Saver
from launcher.controller import Controller
from launcher.doctor import precision_report
from launcher.doctor.settings import Settings as PrecisionSettings
from launcher.errors import EXIT_DONE, EXIT_FAILED, LauncherError, UsageError
from launcher.farewell import chief_last
from launcher.model_dir import check_model_dir, default_model_dir
from launcher.plan import RunPlan
from launcher.preemption import StopRequest
from launcher.preflight import command as preflight
from launcher.preflight import export_step, lowering
from launcher.progress import Progress
from launcher.recipe import Recipe
from launcher.reporting.reporter import Reporter
from launcher.reporting.summary import Stopwatch, make_summary
from launcher.serving import export, predict
from launcher.starting_point import StartingPoint
from launcher.trainer import Trainer
from launcher.verify import command as verify
from launcher.verify.settings import Settings as VerifySettings


def run(options: Any) -> int:
    """Runs the mode that the parsed flags ask for; returns the exit code."""
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    if options.mode == "verify":
        return _verify(options)
    if options.mode == "export_step":
        return _export_step(options)
    if options.mode == "preflight":
        return _preflight(options)
    if options.mode == "precision_report":
        return _precision_report(options)
    if options.mode in ("predict", "export") and not options.dry_run:
        return _serve(options)
    stopwatch = Stopwatch()
    with config.usage_errors():
        resolved = _resolve(options)
        if options.dry_run:
            return _dry_run(resolved)
        resolved.data.check()
        if check_task := getattr(resolved.recipe.task, "check", None):
            check_task()
        model_dir = options.model_dir or default_model_dir(options.gin_file)
        recipe, cluster = resolved.recipe, resolved.cluster
        handed_over = options.restore_from_chief and cluster.num_workers > 1
        if cluster.is_chief or not handed_over:
            check_model_dir(model_dir)
        built = session.build(resolved)
    store = CheckpointStore(
        os.path.join(model_dir, "checkpoints"),
        keep=recipe.keep_checkpoints,
        keep_every_hours=recipe.keep_checkpoint_every_hours,
        is_chief=cluster.is_chief,
        run={"seed": resolved.seed, "global_batch_size": recipe.global_batch_size},
    )
    with stopwatch.phase("checkpoint"):
        restore = starting_point.restore_from_chief if handed_over else starting_point.restore
        start = restore(store, built.trainer, same_order=options.mode != "eval")
    if start.step is not None and (cluster.is_chief or not handed_over):
        assets.check(model_dir, recipe.task)
    if options.mode == "eval" and start.step is None:
        raise UsageError(f"--mode=eval: no checkpoint in {model_dir}; train first, or name another --model_dir")
    with chief_last(cluster):
        return _run_session(options.mode, built, store, start, model_dir, stopwatch)


def _resolve(options: Any) -> RunPlan:
    import_builtins()
    config.load(options.gin_file, options.gin_param)
    VerifySettings()  # a recipe may say how it is to be verified
    PrecisionSettings()  # and examined
    return plan.resolve(
        Recipe(),
        environ=os.environ,
        strategy=options.strategy,
        replicas=options.replicas,
        tpu=options.tpu,
        seed=options.seed,
        deterministic=options.deterministic,
    )


def _serve(options: Any) -> int:
    if options.strategy is None and not options.tpu:
        options.strategy = "one_device"
    model_dir = options.model_dir or default_model_dir(options.gin_file)
    with config.usage_errors():
        resolved = _resolve(options)
        if options.mode == "predict":
            predict.run(resolved, model_dir, input_path=options.input, output_path=options.output)
        else:
            export_dir = options.export_dir or os.path.join(model_dir, "export")
            step = export.run(resolved, model_dir, export_dir=export_dir)
            print(f"exported step {step} of {model_dir} to {export_dir}")
    return EXIT_DONE


def _export_step(options: Any) -> int:
    for flag in ("strategy", "tpu"):
        if getattr(options, flag) is not None:
            raise UsageError(
                f"--{flag}={getattr(options, flag)}: --mode=export_step makes a program for any devices; leave it out, "
                "and say how many replicas it has with --replicas"
            )
    num_replicas = options.replicas or 1
    options.strategy, options.replicas = "one_device", None
    model_dir = options.model_dir or default_model_dir(options.gin_file)
    with config.usage_errors():
        resolved = _resolve(options)
        if options.dry_run:
            return _dry_run(lowering.for_replicas(resolved, num_replicas))
        export_dir = options.export_dir or os.path.join(model_dir, "export_step")
        done = export_step.run(resolved, model_dir=model_dir, export_dir=export_dir, num_replicas=num_replicas)
    print(f"exported the step after step {done.step} for {done.num_replicas} replicas to {export_dir}")
    if done.no_batches is not None:
        print(f"without a batch: {done.no_batches}")
    print(f"run it with JAX: python {os.path.join(export_dir, 'run.py')} --steps 10")
    return EXIT_DONE


def _preflight(options: Any) -> int:
    for flag in ("strategy", "replicas", "tpu"):
        if getattr(options, flag) is not None:
            raise UsageError(
                f"--{flag}={getattr(options, flag)}: --mode=preflight compiles for the slices that --tpu_type names, "
                "whatever this machine has; leave it out"
            )
    import_builtins()
    with config.usage_errors():
        return preflight.run(preflight.request(options), dry_run=options.dry_run)


def _verify(options: Any) -> int:
    for flag in ("strategy", "replicas", "tpu"):
        if getattr(options, flag) is not None:
            raise UsageError(
                f"--{flag}={getattr(options, flag)}: --mode=verify compares topologies of its own; bind them, such as "
                "--gin_param='verify.replicas = (2, 4)'"
            )
    with config.usage_errors():
        import_builtins()
        config.load(options.gin_file, options.gin_param)
        return verify.run(
            gin_files=options.gin_file,
            gin_params=options.gin_param,
            seed=options.seed,
            deterministic=options.deterministic,
            model_dir=check_model_dir(options.model_dir or default_model_dir(options.gin_file)),
            dry_run=options.dry_run,
        )


def _precision_report(options: Any) -> int:
    for flag in ("strategy", "tpu"):
        if getattr(options, flag) is not None:
            raise UsageError(
                f"--{flag}={getattr(options, flag)}: --mode=precision_report runs on this machine; leave it out, and "
                "say on how many replicas with --replicas"
            )
    with config.usage_errors():
        import_builtins()
        config.load(options.gin_file, options.gin_param)
        VerifySettings()
        return precision_report.run(
            gin_files=options.gin_file,
            replicas=options.replicas,
            seed=options.seed,
            model_dir=options.model_dir or default_model_dir(options.gin_file),
            dry_run=options.dry_run,
        )


def import_builtins() -> None:
    """Makes the names that recipes may bind known to gin."""
    for name in (
        "launcher.data.images",
        "launcher.data.text.corpus",
        "launcher.data.text.pairs",
        "launcher.tasks.image_classification",
        "launcher.tasks.language_modelling",
        "launcher.tasks.translation",
        "models.amplified",
        "models.lstm",
        "models.mlp",
        "models.resnet",
        "models.transformer",
    ):
        importlib.import_module(name)


def _dry_run(resolved: RunPlan) -> int:
    model = session.build_model(resolved)
    session.check_normalization(model, resolved)
    session.build_optimizer(resolved)
    config.check_all_used()
    lines = describe(resolved, model)
    try:
        resolved.data.check()
    except UsageError as error:
        lines["data"] += f"; NOT PREPARED: {error}"
    reporter = Reporter(model_dir="", total_steps=resolved.total_steps, is_chief=resolved.cluster.is_chief)
    reporter.plan(lines)
    return EXIT_DONE


def describe(resolved: RunPlan, model: keras.Model) -> dict[str, str]:
    """The plan with what only the built model can tell."""
    sizes = [int(variable.value.shape.num_elements()) for variable in model.trainable_variables]
    lines = resolved.describe()
    lines["parameters"] = f"{sum(sizes):,} trained of {model.count_params():,} in {model.name}"
    if overrides := layer_policies.in_effect(model, resolved.recipe.precision_overrides):
        lines["layer policies"] = layer_policies.describe(overrides)
    payload = wire.payload_bytes(sizes, resolved.wire_dtype.name)
    sent = wire.ring_bytes(payload, resolved.strategy.num_replicas)
    lines["wire"] = (
        f"{resolved.wire_dtype.name}: {payload / 2**20:.2f} MiB of gradients a step, "
        f"{sent / 2**20:.2f} MiB sent by each replica"
    )
    task_notes = getattr(resolved.recipe.task, "notes", None)
    more = task_notes(model, resolved.strategy.accelerator) if task_notes is not None else ()
    for number, note in enumerate((*resolved.notes, *more), start=1):
        lines[f"note {number}"] = note
    return lines


def _run_session(
    mode: str,
    built: session.Session,
    store: CheckpointStore,
    start: StartingPoint,
    model_dir: str,
    stopwatch: Stopwatch,
) -> int:
    resolved = built.plan
    is_chief = resolved.cluster.is_chief
    stop = StopRequest()
    reporter = Reporter(model_dir=model_dir, total_steps=resolved.total_steps, is_chief=is_chief)
    controller = Controller(
        trainer=built.trainer,
        evaluator=built.evaluator,
        data=resolved.data,
        saver=Saver(
            store,
            asynchronous=resolved.recipe.asynchronous_checkpoints,
            on_error=resolved.recipe.on_checkpoint_error,
            warn=reporter.note,
            best=start.best,
        ),
        reporter=reporter,
        stopwatch=stopwatch,
        recipe=resolved.recipe,
        total_steps=resolved.total_steps,
        evaluate=mode != "train",
        progress=Progress(os.environ),
        watch=session.watch(built) if mode != "eval" else None,
        stop_requested=stop,
        after_first_step=lambda: _save_operative_config(model_dir, reporter) if is_chief else None,
    )
    with config.usage_errors():
        if mode != "eval":
            with layer_policies.explained(resolved.recipe.precision_overrides):
                controller.prepare()
        # After the step is traced: a task may call configurables of its own in loss().
        config.check_all_used()
    if is_chief:
        _make_model_dir(model_dir)
        assets.save(model_dir, resolved.recipe.task)
    exit_code, error_text, lost_devices = EXIT_FAILED, None, False
    try:
        reporter.plan({**describe(resolved, built.model), **tpu_runtime.describe(built.strategy)})
        if mode != "eval":
            # What an attempt that died had logged past its last checkpoint is about to happen again.
            reporter.truncate_after(-1 if start.step is None else start.step)
        if start.step is not None:
            reporter.note(f"restored step {start.step} from {model_dir}")
        stopwatch.end_startup()
        if mode == "eval":
            controller.evaluate()
        else:
            with stop.installed():
                gce.watch(os.environ, stop.notice)
                controller.train()
        exit_code = EXIT_DONE
    except LauncherError as error:
        exit_code, error_text = error.exit_code, str(error)
        raise
    except BaseException as error:
        exit_code, error_text = failures.exit_code(error), f"{type(error).__name__}: {error}"
        # What a host that is gone held cannot be asked for, and to ask may mean to wait without end.
        lost_devices = failures.is_peer_failure(error)
        raise
    finally:
        step, loss_scale = _standing(built.trainer, start, lost_devices)
        summary = make_summary(
            exit_code=exit_code,
            error=error_text,
            metrics={"train": controller.outcome.train, "eval": controller.outcome.evaluation},
            step=step,
            strategy=resolved.strategy.kind,
            num_replicas=resolved.strategy.num_replicas,
            policy=resolved.policy,
            loss_scale=loss_scale,
            seconds=stopwatch.seconds(),
        )
        if mode == "eval":
            # The summary and the report tell of the training, which may even be going on beside us.
            reporter.close()
        else:
            reporter.finish(summary)
    return exit_code


def _standing(trainer: Trainer, start: StartingPoint, lost_devices: bool) -> tuple[int, float | None]:
    """Steps done and the loss scale; without devices to ask, what they said last."""
    if not lost_devices:
        return trainer.step, trainer.loss_scale
    return trainer.last_seen or (start.step or 0, None)


def _save_operative_config(model_dir: str, reporter: Reporter) -> None:
    try:
        config.save_operative(os.path.join(model_dir, "config.gin"))
    except OSError as error:
        reporter.note(
            f"Could not write config.gin in {model_dir}: {error.strerror or error}. Training goes on without."
        )


def _make_model_dir(model_dir: str) -> None:
    try:
        tf.io.gfile.makedirs(model_dir)
    except (OSError, tf.errors.OpError) as error:
        raise UsageError(f"--model_dir={model_dir} cannot be made: {error}; choose another --model_dir") from None
