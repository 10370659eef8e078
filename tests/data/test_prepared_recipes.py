"""Every recipe that names a TFDS set trains, evaluates and resumes on one that TFDS's own builder has prepared."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import real_sets
from places import ROOT

from launcher.checkpoints import CheckpointStore

STEPS, SAVED, BATCH = 4, 2, 4

# Models and batches for a CPU. What is bound to the data makes it take the path of a set too large for memory.
_TRAIN = (
    f"train.global_batch_size = {BATCH}",
    f"train.steps_per_loop = {SAVED}",
    "train.log_every = 1",
    f"train.evaluate_every = {SAVED}",
    f"train.checkpoint_every = {SAVED}",
)
_RESNET = (
    "train.epochs = 0.375",  # 4.2 steps of the tiny set
    "resnet.depth = 8",
    "resnet.norm_group_size = 2",
    "image_data.memory_limit_bytes = 0",
    "cosine.peak = 0.01",
)
_TRANSLATION_AND_TEXT = (
    f"train.steps = {STEPS}",
    "train.eval_batch_size = 8",
    "text_pairs.vocab_size = 290",
    "text_pairs.max_length = 24",
    "text_pairs.row_length = 48",
    "text_pairs.memory_limit_bytes = 0",
    "transformer.layers = 1",
    "transformer.width = 16",
    "transformer.heads = 2",
    "transformer.hidden = 32",
    "transformer.dropout = 0.0",  # its masks are drawn for each replica
    "translation.decode_examples = 2",
    "translation.beam_size = 1",
)
_TRANSLATION = (*_TRANSLATION_AND_TEXT, "translation.decode = 'never'", "train.best_metric = 'loss'")
_LANGUAGE = (
    f"train.steps = {STEPS}",
    "text_corpus.vocab_size = 290",
    "text_corpus.length = 24",
    "text_corpus.memory_limit_bytes = 0",
    "language_modelling.max_new_tokens = 8",
    "language_model.layers = 1",
    "language_model.width = 16",
    "language_model.heads = 2",
    "language_model.kv_heads = 1",
    "language_model.hidden = 32",
)
_LONG = (*_LANGUAGE, "train.global_batch_size = 8", "train.attention = 'blocks'")
_WHOLE = (*_LONG, "train.shard = 'optimizer'")  # of what is in parts: TensorFlow's strategies hold weights whole
_TWO_LAYERS = (  # in place of some of the ResNets: the set is the point
    "train.epochs = 0.375",
    "image_classification.model = @mlp",
    "mlp.units = 16",
    "mlp.layers = 1",
    "image_data.memory_limit_bytes = 0",
    "cosine.peak = 0.01",
)
_IMAGENET = (*_RESNET, "image_data.image_size = 16")
_CIFAR = (*_TWO_LAYERS, "image_data.name = 'tfds:cifar10'")

RECIPES = {
    "resnet_tpu": _IMAGENET,
    "resnet_gpu": _IMAGENET,
    "resnet_multiworker": (*_TWO_LAYERS, "image_data.image_size = 16"),
    "resnet_cpu": _CIFAR,
    "transformer_base_wmt": _TRANSLATION_AND_TEXT,
    "transformer_big_wmt": _TRANSLATION,
    "transformer_tpu": _TRANSLATION,
    "lm_gpu": _LANGUAGE,
    "lm_tpu": _LANGUAGE,
    "lm_long_gpu": _LONG,
    "lm_long_tpu": _LONG,
    "lm_1b_gpu": _LONG,
    "lm_1b_tpu": _LONG,
    "lm_8b_gpu": _WHOLE,
    "lm_8b_tpu": _WHOLE,
}
ONE, MIRRORED, WORKERS = "one device", "two mirrored replicas", "two workers"
TOPOLOGIES = {
    ONE: ("--strategy=one_device",),
    MIRRORED: ("--strategy=mirrored", "--replicas=2"),
    WORKERS: ("--strategy=multi_worker",),
}
IN_PARTS = "two devices of JAX"
# How far losses of two topologies may be apart: 16 bits round a sum differently in another order.
TOLERANCE = {"float32": 1e-5, "mixed_bfloat16": 2e-2, "mixed_float16": 2e-3}


@pytest.fixture(scope="session")
def real_sets_dir(made_once: Callable[..., Path]) -> Path:
    """A folder in which TFDS's own builders have prepared tiny sets."""
    return made_once("real_sets", real_sets.prepare)


@pytest.fixture
def data_dir(real_sets_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TFDS_DATA_DIR", str(real_sets_dir))
    return real_sets_dir


@dataclasses.dataclass(frozen=True)
class Run:
    """What a finished run has left in its folder."""

    model_dir: Path

    def events(self, split: str) -> list[dict]:
        lines = (self.model_dir / "metrics.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["split"] == split]

    @property
    def losses(self) -> np.ndarray:
        return np.array([event["loss"] for event in self.events("train")])

    @property
    def policy(self) -> str:
        return json.loads((self.model_dir / "summary.json").read_text())["policy"]

    def state(self) -> dict[str, np.ndarray]:
        return CheckpointStore(str(self.model_dir / "checkpoints")).read(STEPS)

    def stopped_early(self, model_dir: Path) -> Path:
        """A copy as it was when the first of the two checkpoints had been written."""
        shutil.copytree(self.model_dir, model_dir)
        shutil.rmtree(model_dir / "checkpoints" / f"step_{STEPS:08}")
        return model_dir


Train = Callable[..., Run]


@pytest.fixture
def train(data_dir, run_launcher, run_workers, monkeypatch) -> Train:
    """train(recipe, topology, seed, model_dir, *bindings, in_process=False, mode=...): a run of the command line."""
    devices = {**TOPOLOGIES, IN_PARTS: ("--engine=pjrt", "--replicas=2")}

    def run(recipe, topology, seed, model_dir, *bindings, in_process=False, mode="train_and_eval") -> Run:
        flags = [f"--gin_file={recipe}.gin", f"--model_dir={model_dir}", f"--mode={mode}", *devices[topology]]
        flags += [f"--seed={seed}"] if seed else []  # 0 is every recipe's own
        flags += [f"--gin_param={binding}" for binding in (*_TRAIN, *RECIPES[recipe], *bindings)]
        if topology == WORKERS:
            finished = run_workers(2, *flags)
            assert [worker.returncode for worker in finished] == [0, 0], finished[0].stderr + finished[1].stderr
        elif in_process:
            from launcher import main as entry
            from launcher.config import gin_bindings

            assert entry.main(["launcher", *flags]) == 0
            gin_bindings.reset()
        else:
            finished = run_launcher(*flags)
            assert finished.returncode == 0, finished.stderr
        return Run(Path(model_dir))

    return run


def assert_trained_on_the_prepared_set(run: Run, recipe: str) -> None:
    assert [event["step"] for event in run.events("train")] == list(range(1, STEPS + 1))
    assert np.isfinite(run.losses).all()
    if recipe.startswith("resnet"):
        assert [event["examples"] for event in run.events("eval")] == [real_sets.HELD_OUT_IMAGES] * 2


def assert_same_losses(found: Run, expected: Run) -> None:
    np.testing.assert_allclose(found.losses, expected.losses, rtol=TOLERANCE[expected.policy])
    for field in ("step", "examples"):
        assert [e[field] for e in found.events("eval")] == [e[field] for e in expected.events("eval")]


def assert_same_state(found: Run, expected: Run) -> None:
    """Bit for bit."""
    state, wanted = found.state(), expected.state()
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)
    np.testing.assert_array_equal(found.losses, expected.losses)


def test_every_recipe_that_names_a_set_to_prepare_is_tried_here():
    folder = ROOT / "gin_configs"

    def text(path: Path) -> str:
        words = path.read_text()
        return words + "".join(text(folder / name) for name in re.findall(r"^include '(.*)'", words, re.M))

    found = {path.stem for path in folder.glob("*.gin") if re.search(r"'tfds:|tfds_(pairs|corpus)\.name", text(path))}
    assert found == set(RECIPES) - {"resnet_cpu"}


# Of one set by default. The nightly cases have every set, topology and seed, and resumptions; test_recipes.py makes a
# plan of each recipe, and test_tfds_text.py reads sets of text. XLA would double the time.
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("recipe", "topology", "seed", "more"),
    [
        ("resnet_multiworker", ONE, 0, ""),
        pytest.param("resnet_multiworker", WORKERS, 0, "compare", marks=pytest.mark.nightly),
        pytest.param("resnet_gpu", ONE, 7, "", marks=pytest.mark.nightly),
        pytest.param("resnet_tpu", MIRRORED, 0, "", marks=pytest.mark.nightly),
        pytest.param("resnet_cpu", MIRRORED, 7, "resume", marks=pytest.mark.nightly),
        pytest.param("transformer_base_wmt", MIRRORED, 0, "", marks=pytest.mark.nightly),
        pytest.param("transformer_big_wmt", MIRRORED, 7, "", marks=pytest.mark.nightly),
        pytest.param("transformer_tpu", ONE, 0, "", marks=pytest.mark.nightly),
        pytest.param("lm_gpu", ONE, 0, "resume", marks=pytest.mark.nightly),
        pytest.param("lm_tpu", MIRRORED, 7, "compare", marks=pytest.mark.nightly),
        pytest.param("lm_long_tpu", ONE, 0, "", marks=pytest.mark.nightly),
        pytest.param("lm_long_gpu", MIRRORED, 7, "", marks=pytest.mark.nightly),
        pytest.param("lm_1b_gpu", MIRRORED, 0, "resume", marks=pytest.mark.nightly),
        pytest.param("lm_1b_tpu", ONE, 7, "", marks=pytest.mark.nightly),
        pytest.param("lm_8b_gpu", MIRRORED, 0, "", marks=pytest.mark.nightly),
        pytest.param("lm_8b_tpu", ONE, 7, "", marks=pytest.mark.nightly),
    ],
)
def test_a_recipe_trains_and_evaluates_on_its_prepared_set(train, tmp_path, recipe, topology, seed, more):
    def run(name: str, topology: str, mode: str = "train_and_eval") -> Run:
        return train(recipe, topology, seed, tmp_path / name, "train.jit_compile = False", in_process=True, mode=mode)

    undisturbed = run("undisturbed", topology)
    assert_trained_on_the_prepared_set(undisturbed, recipe)
    if more == "resume":
        undisturbed.stopped_early(tmp_path / "resumed")
        assert_same_state(run("resumed", topology, "train"), undisturbed)
    if more == "compare":
        alone = run("one device", ONE)
        assert_trained_on_the_prepared_set(alone, recipe)
        assert_same_losses(undisturbed, alone)


@pytest.mark.heavy
@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_agrees_with_itself_on_every_topology_and_when_it_is_resumed(train, tmp_path, recipe, seed):
    runs = {}
    bindings = ["train.jit_compile = False"] if seed else []  # with XLA where the recipe says so, once
    for topology in TOPOLOGIES:
        runs[topology] = run = train(recipe, topology, seed, tmp_path / topology, *bindings)
        assert_trained_on_the_prepared_set(run, recipe)
        model_dir = run.stopped_early(tmp_path / f"{topology}, resumed")
        assert_same_state(train(recipe, topology, seed, model_dir, *bindings, mode="train"), run)
        print(f"{recipe}.gin | {topology} | {seed} | 0 | {run.losses[-1]:.6f} | bitwise ({run.policy})", flush=True)
    for run in runs.values():
        assert_same_losses(run, runs[ONE])


@pytest.mark.heavy
@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ["lm_8b_gpu", "lm_8b_tpu"])
def test_a_recipe_of_weights_in_parts_trains_as_with_whole_ones_and_resumes(train, tmp_path, recipe):
    run = train(recipe, IN_PARTS, 0, tmp_path / "parts", "train.shard = 'all'")
    assert_trained_on_the_prepared_set(run, recipe)
    assert_same_losses(run, train(recipe, MIRRORED, 0, tmp_path / "whole", "train.jit_compile = False"))
    model_dir = run.stopped_early(tmp_path / "resumed")
    assert_same_state(train(recipe, IN_PARTS, 0, model_dir, "train.shard = 'all'", mode="train"), run)
