"""The share of the global batch that a replica has where fewer workers are there than the job has.

Where they cannot share it evenly, all replicas have as many pieces, of which the last ones are padding, of weight 0. A
piece is what a microbatch of the whole job is, so that layers see and draw what they would there; where none of them
has statistics of the batch or random numbers, pieces are smaller, and less is padding.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import keras

from launcher.data.pipeline import rows_of_replica
from launcher.errors import UsageError
from launcher.run.plan import RunPlan
from launcher.step.layers import group_size, layers_of
from launcher.step.moving_statistics import seed_states


def of_fewer(plan: RunPlan, full_workers: int) -> RunPlan:
    """The plan of a job of `full_workers` on the workers that are there; UsageError where all could not share it."""
    here, replicas, size = plan.cluster.num_workers, plan.strategy.num_replicas, plan.recipe.global_batch_size
    fewer = dataclasses.replace(
        plan, full_workers=full_workers, microbatches=-(-plan.microbatches * full_workers // here)
    )
    if full_workers % here == 0 or rows_of_replica(plan.data, size, replicas):
        return fewer
    pieces = full_workers * (replicas // here) * plan.microbatches
    if size % pieces:
        raise UsageError(
            f"train.global_batch_size = {size} cannot be split evenly over the job's {full_workers} workers; use a "
            f"multiple of {pieces}"
        )
    evaluated = -(-plan.eval_batch_size // replicas) * replicas
    return dataclasses.replace(fewer, rows=fewer.microbatches * (size // pieces), eval_batch_size=evaluated)


def finer(
    plan: RunPlan, model: keras.Model, statistics: Sequence[keras.Variable], note: Callable[[str], None]
) -> RunPlan:
    """The same in pieces that leave less to pad, where no layer has `statistics` of whole pieces or draws numbers for
    them; `note` is told.
    """
    sizes = {id(one): group_size(layer) for layer in layers_of(model) for one in layer.variables if group_size(layer)}
    if not plan.rows or seed_states(model) or any(id(one) not in sizes for one in statistics):
        return plan
    unit = math.lcm(*(size or 1 for size in sizes.values()))
    units = -(-plan.recipe.global_batch_size // (plan.strategy.num_replicas * unit))
    microbatches = -(-units * unit // plan.microbatch_size)
    rows = microbatches * unit * -(-units // microbatches)
    note(f"microbatches have {rows // microbatches} in place of {plan.microbatch_size} examples, to leave less to pad")
    return dataclasses.replace(plan, microbatches=microbatches, rows=rows)
