"""A run that starts with the weights of a file or of another run, and what it refuses to start with."""

from __future__ import annotations

import json
import os
import struct
import sys
import zipfile

import h5py
import keras
import ml_dtypes
import numpy as np
import pytest
import safetensors as safetensors_lib
import tensorflow as tf
from cases import repeated_but
from places import SMALL_DIGITS
from small_run import GivenTask, assert_replicas_equal, build, train

import launcher
from launcher import main
from launcher.checkpoints import CheckpointStore, weight_files
from launcher.config import gin_bindings
from launcher.errors import UsageError
from launcher.models.mlp import mlp
from launcher.optimizers import Optimizer
from launcher.run.start import start_weights, starting_point
from launcher.run.start.start_weights import StartFrom
from launcher.serving import weights

pytestmark = pytest.mark.slow

X = np.random.default_rng(0).normal(size=(4, 4, 3)).astype(np.float32)


def two_parts(head="head", classes=2, nested=True):
    inner = keras.Input((3,))
    hidden = keras.layers.Dense(4, name="first")(inner)
    hidden = keras.layers.BatchNormalization(name="norm")(hidden)
    hidden = keras.layers.Dense(4)(hidden)  # Keras names it.
    if not nested:
        return keras.Model(inner, hidden, name="base")
    base = keras.Model(inner, hidden, name="base")
    outer = keras.Input((3,))
    return keras.Model(outer, keras.layers.Dense(classes, name=head)(base(outer)), name="whole")


class Own(keras.Model):
    """A subclassed model, whose variables have its name in their paths."""

    def __init__(self, name):
        super().__init__(name=name)
        self.query, self.out = keras.layers.Dense(4), keras.layers.Dense(2, name="head")
        self.attention = keras.layers.MultiHeadAttention(2, 4, name="attention")
        self.build((None, 3))

    def build(self, shape):
        self.query.build((None, 3))
        self.attention.build((None, 1, 4), (None, 1, 4))
        self.out.build((None, 4))

    def call(self, x, training=False):
        x = self.query(x)[:, None]
        return self.out(self.attention(x, x)[:, 0])


def task(make=two_parts):
    def loss(model, batch, training):
        return tf.reduce_sum(tf.square(model(batch["x"], training=training) - 1.0)), tf.constant(4.0), {}

    return GivenTask({"x": X}, make, loss)


def outputs(model):
    return model(X[0], training=False).numpy()


def safetensors(path, arrays, names=None):
    """The format as it is described at https://github.com/huggingface/safetensors, written by hand."""
    header, content = {"__metadata__": {"by": "test"}}, b""
    for name, array in arrays.items():
        kind = {"float32": "F32", "bfloat16": "BF16", "int64": "I64"}[array.dtype.name]
        offsets = [len(content), len(content) + array.nbytes]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": offsets}
        content += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)


def saved(kind, folder, make=two_parts):
    """Weights of a trained model, saved in one of the ways; returns where, and the model."""
    made = build(task(make), global_batch_size=4)
    train(made)
    # An h5 of another process would count its own layers; here they go on from those of this one.
    path = folder / f"weights{kind}"
    if kind == ".keras":
        made.model.save(path)
    elif kind == ".weights.h5":
        made.model.save_weights(path)
    elif kind == ".safetensors":
        safetensors(path, {v.path.replace("/", "."): v.numpy() for v in made.model.weights})
    else:
        store = CheckpointStore(str(path / "checkpoints"))
        store.save(4, made.trainer.state.snapshot())
    return str(path), made.model


def started(path, make=two_parts, replicas=1, start=(), **recipe):
    made = build(task(make), replicas, start={"path": path, **dict(start)}, **recipe)
    found = starting_point.begin(made.trainer, made.plan.recipe.start)
    return made, found


KINDS = (".keras", ".weights.h5", ".safetensors", "_model_dir")


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_starts_with_the_weights_of_each_kind_of_source(kind, tmp_path):
    path, source = saved(kind, tmp_path)
    made, found = started(path, replicas=2)
    for mine, theirs in zip(made.model.weights, source.weights, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy(), err_msg=mine.path)
    np.testing.assert_allclose(outputs(made.model), outputs(source), rtol=1e-6)
    assert_replicas_equal(made)
    assert f"{len(source.weights)} weights" in found.notes[0]
    assert made.trainer.step == 0


@pytest.mark.parametrize("kind", [".weights.h5", "_model_dir"])
def test_a_subclassed_model_goes_by_the_names_of_its_layers(kind, tmp_path):
    path, source = saved(kind, tmp_path, lambda: Own("pretrained"))
    made, _ = started(path, lambda: Own("tuned"))
    np.testing.assert_allclose(outputs(made.model), outputs(source), rtol=1e-6)


@pytest.mark.parametrize("kind", repeated_but([".keras"], KINDS))
def test_a_base_saved_alone_starts_the_one_inside_a_model_with_a_new_head(kind, tmp_path):
    path, source = saved(kind, tmp_path, lambda: two_parts(nested=False))
    with pytest.raises(UsageError, match=r"2 of the model are not there: head/kernel.*, head/bias"):
        started(path)
    made, found = started(path, start={"allow_missing": ("head/.*",)})
    inside = made.model.get_layer("base")
    np.testing.assert_allclose(inside(X[0]).numpy(), outputs(source), rtol=1e-6)
    assert "2 as initialised: head/kernel, head/bias" in found.notes[0]


@pytest.mark.parametrize("kind", repeated_but(["_model_dir"], KINDS))
def test_a_head_of_another_width_is_refused_until_it_is_allowed(kind, tmp_path):
    path, source = saved(kind, tmp_path)
    with pytest.raises(UsageError, match=r"head/kernel float32\[4, 5\] \(head.* float32\[4, 2\] there\)"):
        started(path, lambda: two_parts(classes=5))
    made, found = started(path, lambda: two_parts(classes=5), start={"allow_missing": ("head/.*",)})
    assert made.model.get_layer("head").kernel.shape == (4, 5)
    np.testing.assert_array_equal(made.model.get_layer("base")(X[0]), source.get_layer("base")(X[0]))
    assert "as initialised\thead/kernel" in found.listing


def of_words(words="abc", boundaries=(0.5,), mean=1.0, given=False):
    inputs = {"word": keras.Input((1,), dtype="string", name="word"), "size": keras.Input((1,), name="size")}
    look_up = keras.layers.StringLookup(name="words", vocabulary=list(words) if given else None)
    if not given:
        look_up.adapt(np.array([word for count, word in enumerate(words[::-1], 1) for _ in range(count)]))
    split = keras.layers.Discretization(list(boundaries), output_mode="one_hot", name="split")
    scaled = keras.layers.Normalization(mean=mean, variance=1.0, axis=None, name="scaled")(inputs["size"])
    embedded = keras.layers.Flatten()(keras.layers.Embedding(4, 2, name="table")(look_up(inputs["word"])))
    x = keras.layers.Concatenate()([embedded, split(inputs["size"]), scaled])
    model = keras.Model(inputs, keras.layers.Dense(1, name="head")(x))
    model.compile("sgd", "mse")
    return model


def test_words_boundaries_and_means_that_are_others_are_refused_by_their_layers_name(tmp_path):
    folder, y = str(tmp_path / "run"), np.ones((4, 1), np.float32)
    x = {"word": np.array([["a"], ["b"], ["c"], ["a"]], object), "size": np.arange(4, dtype=np.float32)[:, None]}
    launcher.fit(of_words, x, y, batch_size=4, model_dir=folder)
    for path in (folder, f"{folder}/model.keras"):
        assert all(start_weights.read(StartFrom(path=path), of_words(given=one), None).weights for one in (True, False))
        for name, changed in (
            (r"words/vocabulary is \['c', 'b', 'a'\]", {"words": "cba"}),
            (r"split/bin_boundaries is \[2\], and was \[0.5\]", {"boundaries": (2.0,)}),
            ("scaled/mean is 3, and was 1", {"mean": 3.0}),
        ):
            with pytest.raises(UsageError, match=name):
                start_weights.read(StartFrom(path=path), of_words(**changed), None)
        start_weights.read(StartFrom(path=path, allow_missing=["words/vocabulary"]), of_words("cba"), None)
    with pytest.raises(UsageError, match=r"StringLookup 1.vocabulary: \['a', 'b', 'c'\] then, \['c', 'b', 'a'\] now"):
        launcher.fit(lambda: of_words("cba"), x, y, batch_size=4, model_dir=folder)


def normalized(adapted=True):
    normalization = keras.layers.Normalization(name="scaled")
    if adapted:
        normalization.adapt(np.array([[5.0, 1, 2], [7, 5, 2.5]]))
    inputs = keras.Input((3,))
    return keras.Model(inputs, keras.layers.Dense(2, name="head")(normalization(inputs)))


def test_a_normalization_computes_by_the_mean_that_it_was_given_with_the_weights(tmp_path):
    path, source = saved("_model_dir", tmp_path, normalized)
    made, _ = started(path, lambda: normalized(adapted=False), replicas=2)
    np.testing.assert_allclose(outputs(made.model), outputs(source), rtol=1e-6)
    model = normalized(adapted=False)
    weights.put(model, weights.read(CheckpointStore(f"{path}/checkpoints"), 4, model, averaged=False).arrays)
    np.testing.assert_allclose(outputs(model), outputs(source), rtol=1e-6)


def test_names_on_both_sides_are_listed_with_the_nearest(tmp_path):
    path, _ = saved("_model_dir", tmp_path)
    with pytest.raises(UsageError) as caught:
        started(path, lambda: two_parts("heads"))
    message = str(caught.value)
    assert "2 of the model are not there: heads/kernel (nearest: head/kernel), heads/bias" in message
    assert "2 there are not of the model: head/kernel (nearest: heads/kernel)" in message
    assert "StartFrom.allow_missing = ('heads/.*',)" in message
    with pytest.raises(UsageError, match=r"StartFrom.allow_missing: 'haed/\.\*' matches the whole name of no weight"):
        started(path, start={"allow_missing": ("haed/.*",)})
    safetensors(tmp_path / "other.safetensors", {"something": np.zeros(3, np.float32)})
    with pytest.raises(UsageError, match=r"no weight of .*other\.safetensors is one of the model's"):
        started(str(tmp_path / "other.safetensors"), start={"allow_missing": (".*",)})


def test_axes_of_length_one_are_put_in_and_taken_out_and_16_bits_become_32(tmp_path):
    source = build(task()).model
    arrays = {v.path: v.numpy() for v in source.weights}
    arrays["norm/gamma"] = np.full((1, 1, 4), 2.0, np.float32)
    arrays["first/kernel"] = np.full((3, 4), 0.5, ml_dtypes.bfloat16)
    safetensors(tmp_path / "w.safetensors", arrays)
    made, found = started(str(tmp_path / "w.safetensors"))
    np.testing.assert_array_equal(made.model.get_layer("base").get_layer("norm").gamma, np.full(4, 2.0))
    np.testing.assert_array_equal(made.model.get_layer("base").get_layer("first").kernel, np.full((3, 4), 0.5))
    assert "1 reshaped: norm/gamma" in found.notes[0]

    arrays["first/kernel"] = np.full((4, 3), 0.5, np.float32)  # another order of axes is another matrix
    safetensors(tmp_path / "w.safetensors", arrays)
    with pytest.raises(UsageError, match=r"first/kernel float32\[3, 4\] \(first/kernel float32\[4, 3\] there\)"):
        started(str(tmp_path / "w.safetensors"))


def run_with_averages(folder):
    made = build(task(), ema_decay=0.9, optimizer=lambda: keras.optimizers.Adam(0.1))
    store = CheckpointStore(str(folder / "checkpoints"))
    for step in (2, 4):
        train(made, 2)
        store.save(step, made.trainer.state.snapshot())
    store.mark_best(2, metric="loss", value=1.0)
    return store


def test_of_a_run_the_best_or_the_last_weights_are_taken_averaged_or_not(tmp_path):
    store = run_with_averages(tmp_path)
    for which, averaged, step, prefix in (
        ("best", True, 2, "ema"),
        ("last", True, 4, "ema"),
        ("last", False, 4, "model"),
    ):
        made, found = started(str(tmp_path), start={"which": which, "averaged": averaged}, ema_decay=0.5)
        state = made.trainer.state.snapshot()
        for path in ("first/kernel", "norm/moving_mean"):
            np.testing.assert_array_equal(state[f"model/{path}"], store.read(step)[f"{prefix}/{path}"])
            np.testing.assert_array_equal(state[f"ema/{path}"], state[f"model/{path}"])
        assert f"step {step}, the {which}" in found.notes[0]


def test_the_state_of_the_optimizer_is_taken_only_if_asked_for(tmp_path):
    store = run_with_averages(tmp_path)

    def optimizer():
        return keras.optimizers.Adam(0.1)

    without, _ = started(str(tmp_path), start={"which": "last"}, optimizer=optimizer)
    assert without.trainer.state.snapshot()["optimizer/adam/iteration"] == 0
    made, _ = started(str(tmp_path), start={"which": "last", "optimizer": True}, optimizer=optimizer)
    state, expected = made.trainer.state.snapshot(), store.read(4)
    slots = [name for name in state if name.startswith("optimizer/")]
    assert len(slots) > 10
    for name in slots:
        np.testing.assert_array_equal(state[name], expected[name], err_msg=name)
    assert state["counters/step"] == 0
    with pytest.raises(UsageError, match=r"of the model are not there: optimizer/lion/"):
        started(str(tmp_path), start={"optimizer": True}, optimizer=lambda: keras.optimizers.Lion(0.1))


@pytest.mark.skipif(not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="this Keras has no ScheduleFreeAdamW")
def test_slots_that_begin_as_copies_of_weights_begin_as_copies_of_those():
    def optimizer():
        return Optimizer(keras.optimizers.ScheduleFreeAdamW(0.1))

    made = build(task(), optimizer=optimizer)
    weights = {id(v): np.full(v.shape, 0.25, np.float32) for v in made.model.trainable_variables}
    state = made.trainer.state.started(weights, {})
    moments = [value for name, value in state.items() if name.endswith("_momentum")]
    assert len(moments) == len(weights)
    assert all(np.all(value == 0.25) for value in moments)


def test_a_resumed_run_goes_on_from_its_own_checkpoint_although_the_file_is_gone(tmp_path):
    path, _ = saved(".keras", tmp_path)
    store = CheckpointStore(str(tmp_path / "checkpoints"))
    made = build(task(), start={"path": path})
    begun = starting_point.restore(store, made.trainer, same_order=False, start_from=made.plan.recipe.start)
    assert begun.step is None and begun.listing
    train(made, 2)
    store.save(2, made.trainer.state.snapshot())
    resumed = build(task(), start={"path": "/nowhere/gone.keras"})
    found = starting_point.restore(store, resumed.trainer, same_order=False, start_from=resumed.plan.recipe.start)
    assert found.step == 2 and not found.listing
    np.testing.assert_array_equal(resumed.model.weights[0].numpy(), made.model.weights[0].numpy())


def test_unmatched_weights_end_a_command_with_one_message_before_anything_is_written(capsys, tmp_path):
    mlp(image_shape=(8, 8, 1), num_classes=3, units=32, layers=1).save_weights(tmp_path / "three.weights.h5")
    start = f"--gin_param=StartFrom.path = '{tmp_path / 'three.weights.h5'}'"
    for mode in ("--dry_run", "--mode=train"):
        gin_bindings.reset()
        folder = f"--model_dir={tmp_path / 'run'}"
        assert main.main(["launcher", f"--gin_file={SMALL_DIGITS}", mode, start, folder]) == 64
        out, err = capsys.readouterr()
        assert "logits/kernel float32[32, 10] (logits/0 float32[32, 3] there)" in err
        assert "StartFrom.allow_missing = ('logits/.*',)" in err
        assert "Traceback" not in out + err
        assert not (tmp_path / "run").exists()


def damaged(kind, folder):
    path = folder / f"damaged{kind}"
    if kind == ".safetensors":
        safetensors(path, {"first/kernel": np.zeros((3, 4), np.float32)})
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.write_bytes(b"nothing of the kind")
    return path


def quantizable(mode="", lora=False):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, name="first"), keras.layers.Dense(2)])
    if mode:
        model.quantize(mode)
    if lora:
        model.layers[0].enable_lora(2)
    return model


def test_of_loras_matrices_and_integers_it_is_told_what_a_file_of_keras_holds(tmp_path):
    source, files = quantizable("int8", lora=True), (str(tmp_path / "int8.keras"), str(tmp_path / "float.keras"))
    source.save(files[0])
    quantizable(lora=True).save(files[1])
    for make, path in ((quantizable, files[0]), (lambda: quantizable("int8"), files[1])):
        with pytest.raises(UsageError, match="quantized model, which only one") as raised:
            started(path, make)
        assert "int8[3, 4]" in str(raised.value) and "allow_missing" not in str(raised.value)
    with pytest.raises(UsageError, match=r"2 of the model are not there.*\n.*merges LoRA's.*\n.*'\.\*lora_\.\*'"):
        started(files[0], lambda: quantizable("int8", lora=True))
    made, found = started(
        files[0], lambda: quantizable("int8", lora=True), start={"allow_missing": (".*lora_.*",)}.items()
    )
    assert "LoRA's matrices are merged into the kernels there: first" in found.notes[0]
    np.testing.assert_array_equal(made.model.layers[0]._kernel.numpy(), source.layers[0]._kernel.numpy())


def test_safetensors_in_8_bits_are_read_and_of_fewer_bits_are_named(tmp_path):
    def written(**more):
        kinds = {"a.kernel": ("F8_E4M3", ml_dtypes.float8_e4m3fn), "b.kernel": ("F8_E5M2", ml_dtypes.float8_e5m2)}
        arrays = {name: (kind, values.astype(dtype).tobytes()) for name, (kind, dtype) in kinds.items()} | more
        header, content = {}, b""
        for name, (kind, raw) in arrays.items():
            header[name] = {"dtype": kind, "shape": [3], "data_offsets": [len(content), len(content) + len(raw)]}
            content += raw
        text = json.dumps(header).encode()
        (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content)
        return {one.name: one.value for one in weight_files.read(str(tmp_path / "w.safetensors"))}

    values = np.array([0.5, -448.0, 2.0**-6])
    read = written()
    np.testing.assert_array_equal([*map(float, read["a.kernel"])], values)
    assert float(read["b.kernel"][1]) == -448.0
    with pytest.raises(UsageError, match=r"a\.kernel is in 8 bits .* scale of its own, a\.kernel_scale"):
        written(**{"a.kernel_scale": ("F32", np.ones(3, np.float32).tobytes())})
    if tuple(map(int, safetensors_lib.__version__.split(".")[:2])) >= (0, 6):
        text = json.dumps({"c.kernel": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
        (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(2))
        (one,) = weight_files.read(str(tmp_path / "w.safetensors"))
        assert one.value.dtype == weight_files.NOT_READ and one.value.shape == (4,)


@pytest.mark.parametrize("kind", [".keras", ".weights.h5", ".safetensors"])
def test_a_damaged_file_is_one_message(kind, tmp_path):
    with pytest.raises(UsageError, match=r"damaged.* cannot be read: \S+"):
        weight_files.read(str(damaged(kind, tmp_path)))


def zipped(path, folder):
    """Claims 80 MiB of nothing in a few kilobytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("model.weights.h5", bytes(80 * 2**20))


def declared(path, folder):
    with h5py.File(path, "w") as file:
        file.create_dataset("layers/first/vars/0", shape=(2**31,), dtype="f4", chunks=(2**20,), compression="gzip")


def overlapping(path, folder):
    header = {f"{n}": {"dtype": "F32", "shape": [2**18], "data_offsets": [0, 2**20]} for n in range(80)}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(2**20))


def elsewhere(path, folder):
    (folder / "secret").write_bytes(bytes(64))
    with h5py.File(path, "w") as file:
        file.create_dataset("layers/first/vars/0", (16,), "f4", external=[(str(folder / "secret"), 0, 64)])


def linked(folder):
    """Links to another file, to nowhere and in a circle; and sixty groups, each by two names in the one around it."""
    with h5py.File(folder / "other.h5", "w") as file:
        file["vars/0"] = np.zeros(3)
    with h5py.File(folder / "w.weights.h5", "w") as file:
        file["layers/own/vars/0"] = np.ones(3)
        file["layers/other"] = h5py.ExternalLink(str(folder / "other.h5"), "/")
        file["layers/gone"] = h5py.SoftLink("/nowhere")
        file["layers/circle"] = h5py.SoftLink("/layers")
        group = file["layers"]
        for _ in range(60):
            group["b"] = group.create_group("a")
            group = group["a"]
    return folder / "w.weights.h5"


def test_of_a_file_of_keras_each_object_is_read_once_and_nothing_that_is_linked(tmp_path):
    assert [one.name for one in weight_files.read(str(linked(tmp_path)))] == ["own/0"]


def test_of_a_file_of_keras_what_stands_elsewhere_than_weights_is_not_passed_over(tmp_path):
    path = str(tmp_path / "w.weights.h5")
    with h5py.File(path, "w") as file:
        for name in ("layers/own/vars/0", "layers/own/later/0", "layers/own/vars/later/0", "later", "optimizer/vars/0"):
            file[name] = np.ones(3)
    found = [one.name for one in weight_files.read(path)]
    assert sorted(found) == ["/later", "/layers/own/later/0", "own/0", "own/later/0"]


def deep(path, folder):
    text = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def listed(path, folder):
    path.write_bytes(struct.pack("<Q", 9) + b'{"a": [1]}')


def pipe(path, folder):
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (zipped, ".keras", "it would unpack to 83886080 bytes"),
        (declared, ".weights.h5", "it would unpack to 8589934592 bytes"),
        (overlapping, ".safetensors", "[Oo]ffset"),
        (elsewhere, ".weights.h5", "/layers/first/vars/0 is in another file"),
        (deep, ".safetensors", "recursion"),
        (listed, ".safetensors", "cannot be read"),
        (pipe, ".keras", "it is not a file"),
        (pipe, ".safetensors", "it is not a file"),
    ],
)
def test_a_file_that_wants_more_than_itself_to_be_read_is_refused(make, kind, message, tmp_path):
    make(tmp_path / f"w{kind}", tmp_path)
    with pytest.raises(UsageError, match=message):
        weight_files.read(str(tmp_path / f"w{kind}"))


def test_of_a_run_only_weights_are_read_and_nothing_of_it_is_run(tmp_path):
    run_with_averages(tmp_path / "foreign")
    (tmp_path / "foreign/config.gin").write_text("import beside")
    (tmp_path / "foreign/beside.py").write_text("raise AssertionError")
    (tmp_path / "foreign/model.keras").write_bytes(b"nothing of the kind")
    made, _ = started(str(tmp_path / "foreign"))
    assert made.trainer.step == 0 and "beside" not in sys.modules


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ({"path": "/nowhere.keras"}, "there is no such file"),
        ({"path": "/nowhere.pth"}, r"expected a file that ends in \.keras, \.weights\.h5, \.safetensors"),
        ({"path": "/"}, "there is no checkpoint in this folder"),
        ({"path": "a", "which": "newest"}, "'newest': must be one of 'best', 'last'"),
        ({"path": "a.keras", "optimizer": True}, "is a file of weights, and the state of an optimizer"),
        ({"path": "a", "allow_missing": "head"}, "must be a list of regular expressions"),
    ],
)
def test_a_start_that_cannot_be_is_refused(start, message):
    with pytest.raises(UsageError, match=message):
        made = build(task(), start=start)
        starting_point.begin(made.trainer, made.plan.recipe.start)
