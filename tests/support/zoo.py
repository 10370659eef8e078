"""Small models, one for each of Keras's layers, losses, optimizers and operations, and what comes of each.

python zoo.py [--places=...] [NAME ...]: trains them on both engines, on one device and on four, with what is shared
out; prints one JSON line a model.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
import traceback
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import zoo_layers
import zoo_operations
from zoo_kinds import ROWS, Kind

from launcher.errors import UsageError
from launcher.machine.runtime_kinds import PJRT, TENSORFLOW, RuntimeKind
from launcher.run import session
from launcher.run.loading import Machine
from launcher.run.programs import FitCall
from launcher.step.layers import walk
from launcher.tasks.keras_model import KerasTask

STEPS, BATCH = 3, 16
GROUPS = (
    zoo_layers.layers,
    zoo_layers.drawing,
    zoo_layers.preprocessing,
    zoo_operations.losses,
    zoo_operations.optimizers,
    zoo_operations.operations,
)


@functools.cache
def kinds() -> dict[str, Kind]:
    """All, by name, that this Keras has."""
    found: dict[str, Kind] = {}
    for group in GROUPS:
        for name, kind in group():
            assert name not in found, name
            found[name] = kind
    return found


PLACES: dict[str, tuple[RuntimeKind, int, str]] = {
    "pjrt 4 all": (PJRT, 4, "all"),
    "pjrt 4 optimizer": (PJRT, 4, "optimizer"),
    "pjrt 4 none": (PJRT, 4, "none"),
    "pjrt 1 none": (PJRT, 1, "none"),
    "tf 4 optimizer": (TENSORFLOW, 4, "optimizer"),
    "tf 4 none": (TENSORFLOW, 4, "none"),
}
"""Beside TensorFlow's engine on one device."""


def trained(kind: Kind, runtime: RuntimeKind = TENSORFLOW, replicas: int = 1, shard: str = "none") -> np.ndarray:
    """The losses of its steps, and that of an evaluation; UsageError where it is refused."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    weight = np.linspace(0.5, 1.5, ROWS).astype("float32")
    task = KerasTask(build=kind.model, train=(kind.x, kind.y), validation=(kind.x, kind.y, weight), shuffle=False)
    settings = {"steps": STEPS, "global_batch_size": BATCH, "precision": "float32", "shard": shard, "seed": 1}
    call = FitCall(settings={"task": task, **settings}, replicas=replicas)
    machine = Machine(environ={}, replicas=replicas, runtime=runtime)
    made = session.build(machine.plan_of(call.recipe()))
    batches = made.trainer.batches(made.plan.data)
    losses = made.trainer.train(batches, STEPS).loss
    made.evaluator.needs_variables(last=True)
    return np.append(losses, made.evaluator.evaluate()["loss"]).astype("float64")


def refusal(kind: Kind, error: UsageError) -> str:
    """What it says, and whether that names a layer, a weight, the optimizer, the loss or a metric of the model."""
    keras.backend.clear_session()
    model = kind.model()
    compiled = (model.optimizer, model.loss, *model.metrics)
    parts = [*(one.place for one in walk(model) if one.around), *(getattr(one, "name", one) for one in compiled)]
    quoted = [f"'{name}'" for name in parts]
    names = [*quoted, *(weight.path for weight in model.weights)]
    return f"refused{'' if any(one in str(error) for one in names) else ' without a name'}: {error}"


def outcome(name: str, places: Iterable[str] = PLACES) -> dict[str, Any]:
    """What becomes of one model in each place: "=", a difference, a refusal, or what went wrong."""
    kind, found = kinds()[name], {"model": name}
    began = time.process_time()
    try:
        expected = trained(kind)
    except UsageError as error:
        return found | {"reference": refusal(kind, error)}
    except Exception as error:
        return found | {"reference": f"{type(error).__name__}: {error}"[:400]}
    if not np.isfinite(expected).all():
        return found | {"reference": f"not finite: {expected}"}
    for place in places:
        try:
            losses = trained(kind, *PLACES[place])
        except UsageError as error:
            found[place] = refusal(kind, error)
        except Exception as error:
            found[place] = f"TRACEBACK {type(error).__name__}: {str(error)[:600]}"
            found[f"{place} trace"] = traceback.format_exc()[-3000:]
        else:
            apart = float(np.max(np.abs(losses - expected) / np.maximum(np.abs(expected), 1e-3)))
            is_equal = np.isfinite(losses).all() if kind.draws else apart <= kind.tolerance
            found[place] = "=" if is_equal else f"apart {apart:.1e}"
    return found | {"seconds": round(time.process_time() - began, 1)}


def devices() -> None:
    """Four for TensorFlow's engine, before it has any."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--places", default=",".join(PLACES))
    options = parser.parse_args()
    devices()
    # JAX has as many devices in a process as it is first asked for.
    places = sorted(options.places.split(","), key=lambda place: -PLACES[place][1])
    Machine(environ={}, replicas=4, runtime=PJRT).set_up()
    for name in options.names or kinds():
        print(json.dumps(outcome(name, places)), flush=True)


if __name__ == "__main__":
    main()
