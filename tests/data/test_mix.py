"""Mixed examples: what they are made of, against NumPy, and that no topology changes it."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from assembled import TOPOLOGIES, assert_same, global_batches, joined, shards
from cases import repeated_but
from sources import made

from launcher.data.images.image_data import image_data
from launcher.data.images.mix import Mix, beta_quantile, cut_boxes, partner_positions
from launcher.data.philox import uniform
from launcher.data.pipeline import ArrayExamples, RandomAccessData
from launcher.errors import UsageError

pytestmark = pytest.mark.slow

SIZE, BATCH, STEPS = 30, 12, 10  # 4 epochs
HEIGHT, WIDTH = 9, 6
BOTH = Mix(mixup=0.7, cutmix=1.0)


def _seeds(count: int) -> np.ndarray:
    return np.stack([np.arange(count), np.full(count, 77)], axis=1).astype(np.int32)


def _numbers(count: int) -> tf.Tensor:
    return uniform(_seeds(count), 1, purpose=9)[:, 0]


def _pixels(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, HEIGHT, WIDTH, 2)).astype(np.float32)


def _pair(count: int) -> tuple[dict, dict]:
    """Examples 0, 1, … and partners 1000, 1001, …"""
    batches = [
        {"image": tf.constant(_pixels(count, first)), "label": tf.range(first, first + count)} for first in (0, 1000)
    ]
    return batches[0], batches[1]


def _mixed(mix: Mix, count: int) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Images, the partners' images, and what becomes of them."""
    batch, partners = _pair(count)
    result = {key: value.numpy() for key, value in mix(batch, partners, _seeds(count)).items()}
    np.testing.assert_array_equal(result["label"], np.arange(count))
    np.testing.assert_array_equal(result["label_b"], 1000 + np.arange(count))
    assert result["mix"].dtype == np.float32 and result["mix"].min() >= 0 and result["mix"].max() <= 1
    return batch["image"].numpy(), partners["image"].numpy(), result


def _blend(image: np.ndarray, other: np.ndarray, share: np.ndarray) -> np.ndarray:
    share = share.astype(np.float64)[:, None, None, None]
    return share * image + (1 - share) * other


# ---------------------------------------------------------------------------------------------- the Beta distribution


DISTRIBUTIONS = {  # of Beta(alpha, alpha), in closed form
    0.5: lambda x: 2 / np.pi * np.arcsin(np.sqrt(x)),
    1.0: lambda x: x,
    2.0: lambda x: 3 * x**2 - 2 * x**3,
    3.0: lambda x: 10 * x**3 - 15 * x**4 + 6 * x**5,
}


@pytest.mark.parametrize("alpha", DISTRIBUTIONS)
def test_quantiles_are_those_of_the_distribution_in_closed_form(alpha):
    numbers = np.concatenate([np.arange(1, 2**24, 4099), [2**24 - 1]]) * 2.0**-24
    low, high = np.zeros_like(numbers), np.ones_like(numbers)
    for _ in range(60):
        middle = (low + high) / 2
        below = DISTRIBUTIONS[alpha](middle) < numbers
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    np.testing.assert_allclose(beta_quantile(numbers.astype(np.float32), alpha), low, rtol=0, atol=2e-6)


@pytest.mark.parametrize("alpha", [1e-6, 0.01, 0.2, 1.0, 5.0, 100.0])
def test_drawn_shares_have_the_moments_of_the_beta_distribution(alpha):
    count = 200_000
    drawn = beta_quantile(_numbers(count), alpha).numpy().astype(np.float64)
    assert drawn.min() >= 0 and drawn.max() <= 1
    variance = 1 / (4 * (2 * alpha + 1))
    fourth = 3 / (16 * (2 * alpha + 1) * (2 * alpha + 3))
    assert abs(drawn.mean() - 0.5) < 4 * np.sqrt(variance / count)
    assert abs(((drawn - 0.5) ** 2).mean() - variance) < 4 * np.sqrt((fourth - variance**2) / count) + 1e-7


@pytest.mark.parametrize("alpha", [0.2, 0.4, 1.0, 8.0])
def test_drawn_shares_are_distributed_as_numpys(alpha):
    count = 200_000
    drawn = np.sort(beta_quantile(_numbers(count), alpha))
    reference = np.sort(np.random.default_rng(1).beta(alpha, alpha, count).astype(np.float32))
    places = np.concatenate([drawn, reference])
    gap = np.searchsorted(drawn, places, "right") - np.searchsorted(reference, places, "right")
    # Kolmogorov-Smirnov for two samples: exceeded once in a thousand.
    assert np.abs(gap).max() / count < 1.95 * np.sqrt(2 / count)


def test_a_number_has_the_same_quantile_in_any_batch():
    numbers = _numbers(53).numpy()
    alone = np.concatenate([beta_quantile(numbers[i : i + 1], 0.3) for i in range(len(numbers))])
    np.testing.assert_array_equal(beta_quantile(numbers, 0.3), alone)


# --------------------------------------------------------------------------------------------------- a batch is mixed


def test_mixup_is_the_average_with_the_shares_as_weights():
    image, other, result = _mixed(Mix(mixup=0.4), 200)
    np.testing.assert_allclose(result["image"], _blend(image, other, result["mix"]), atol=1e-6)
    assert len(set(result["mix"])) > 190
    assert (result["mix"] < 0.1).any() and (result["mix"] > 0.9).any()


def test_cutmix_pastes_one_rectangle_and_its_share_counts_the_pixels():
    image, other, result = _mixed(Mix(cutmix=1.0), 300)
    own, pasted = ((result["image"] == source).all(axis=-1) for source in (image, other))
    assert (own ^ pasted).all()
    np.testing.assert_allclose(result["mix"], own.mean(axis=(1, 2)), rtol=0, atol=1e-7)
    for inside in pasted:
        rows, columns = inside.any(axis=1), inside.any(axis=0)
        np.testing.assert_array_equal(inside, np.outer(rows, columns))
        assert (np.diff(np.flatnonzero(rows)) == 1).all() and (np.diff(np.flatnonzero(columns)) == 1).all()
    assert pasted.any(axis=0).all() and own.any(axis=0).all()  # every place of the image can be either


def test_boxes_are_those_of_the_paper():
    height, width = 32, 20
    numbers = np.random.default_rng(2).random((500, 3)).astype(np.float32)
    found = np.stack(cut_boxes(numbers[:, 0], numbers[:, 1:], height=height, width=width), axis=1)
    # Equation 2: the centre uniform in the image, the sides sqrt(1 - lambda) of the image's.
    share, y, x = numbers.astype(np.float64).T
    side = np.sqrt(share)
    edges = [y * height - side * height / 2, y * height + side * height / 2]
    edges += [x * width - side * width / 2, x * width + side * width / 2]
    expected = np.clip(np.stack(edges, axis=1), 0, [height, height, width, width])
    assert np.abs(found - expected).max() < 0.5 + 1e-4
    assert (found[:, 0] <= found[:, 1]).all() and (found[:, 2] <= found[:, 3]).all()


def test_cutmix_replaces_each_pixel_as_often_as_boxes_of_the_paper_cover_it():
    count = 20_000
    batch, partners = _pair(count)
    result = Mix(cutmix=1.0)(batch, partners, _seeds(count))
    covered = (result["image"].numpy() == partners["image"].numpy()).all(axis=-1).mean(axis=0)
    numbers = np.random.default_rng(3)
    side = np.sqrt(1 - numbers.beta(1, 1, count)) / 2

    def covers(length: int) -> np.ndarray:
        centre = numbers.random(count)
        first, last = (np.rint((centre + sign * side) * length) for sign in (-1, 1))
        places = np.arange(length)
        return (places >= first[:, None]) & (places < last[:, None])

    expected = np.einsum("nh,nw->hw", covers(HEIGHT).astype(float), covers(WIDTH).astype(float)) / count
    assert np.abs(covered - expected).max() < 5 * np.sqrt(2 * 0.25 / count)


def test_with_both_each_example_gets_one_of_them_and_half_get_each():
    count = 4000
    image, other, result = _mixed(BOTH, count)
    patched = ((result["image"] == image) | (result["image"] == other)).all(axis=(1, 2, 3))
    np.testing.assert_allclose(
        result["image"][~patched], _blend(image, other, result["mix"])[~patched], rtol=0, atol=1e-6
    )
    # A blend of share 0 or 1 cannot be told from a patch; at this alpha there is next to none.
    assert abs(patched.mean() - 0.5) < 4 * 0.5 / np.sqrt(count)
    kept = (result["image"] == image).all(axis=-1).mean(axis=(1, 2))
    np.testing.assert_allclose(result["mix"][patched], kept[patched], rtol=0, atol=1e-7)


def test_an_example_is_mixed_the_same_way_in_any_batch():
    whole = BOTH(*_pair(40), _seeds(40))
    for start in range(0, 40, 5):
        batch, partners = ({key: value[start : start + 5] for key, value in part.items()} for part in _pair(40))
        for key, value in BOTH(batch, partners, _seeds(40)[start : start + 5]).items():
            np.testing.assert_array_equal(value, whole[key][start : start + 5], err_msg=key)


@pytest.mark.parametrize("mix", [Mix(mixup=1.0), Mix(cutmix=1.0), BOTH])
def test_weight_0_leaves_no_trace_and_other_weights_are_shared_like_the_labels(mix):
    count = 60
    (batch, partners), seeds = _pair(count), _seeds(count)
    plain = mix(batch, partners, seeds)
    own = np.tile(np.array([1, 0, 1, 0.5], np.float32), count // 4)
    other = np.tile(np.array([1, 1, 0, 2], np.float32), count // 4)
    result = mix({**batch, "weight": tf.constant(own)}, {**partners, "weight": tf.constant(other)}, seeds)
    untouched = (own == 0) | (other == 0)
    np.testing.assert_array_equal(
        result["image"], np.where(untouched[:, None, None, None], batch["image"], plain["image"])
    )
    share = plain["mix"].numpy().astype(np.float64)
    weight = np.where(untouched, own, share * own + (1 - share) * other)
    np.testing.assert_allclose(result["weight"], weight, rtol=1e-6)
    # The loss of a mixed example is share * own weight * own loss + the same of the partner.
    np.testing.assert_allclose(result["mix"] * result["weight"], np.where(untouched, own, share * own), atol=1e-6)
    np.testing.assert_array_equal(result["mix"].numpy()[untouched], 1.0)


def test_equal_weights_stay_exactly_as_they_are():
    batch, partners = ({**part, "weight": tf.ones([500])} for part in _pair(500))
    result = BOTH(batch, partners, _seeds(500))
    np.testing.assert_array_equal(result["weight"], 1.0)
    np.testing.assert_array_equal(result["mix"], BOTH(*_pair(500), _seeds(500))["mix"])


# --------------------------------------------------------------------------------------------------------- partners


@pytest.mark.parametrize("size", [2, 3, 30, 1437])
def test_in_an_epoch_everyone_is_the_partner_of_exactly_one_other(size):
    distances = set()
    for epoch in range(5):
        position = tf.range(epoch * size, (epoch + 1) * size, dtype=tf.int64)
        partner = partner_positions(position, seed=3, size=size).numpy()
        np.testing.assert_array_equal(np.sort(partner), position)
        assert (partner != position.numpy()).all()
        distances |= set((partner - position.numpy()) % size)
    assert size < 30 or len(distances) == 5  # an epoch has its own


def test_the_only_example_of_a_data_set_is_its_own_partner():
    np.testing.assert_array_equal(partner_positions(tf.range(4, dtype=tf.int64), seed=3, size=1), np.arange(4))


def test_partners_far_into_a_long_run_are_exact():
    size = 2**31 + 11
    position = tf.range(5 * size - 3, 5 * size + 3, dtype=tf.int64)
    partner = partner_positions(position, seed=3, size=size).numpy()
    np.testing.assert_array_equal(partner // size, [4, 4, 4, 5, 5, 5])
    assert set((partner - position.numpy())[:3] % size) == {(partner[0] - position.numpy()[0]) % size}


# --------------------------------------------------------------------------------------------------------- pipelines


def _jitter(batch, seeds):
    return {**batch, "image": batch["image"] + uniform(seeds, 1, purpose=7)[:, :, None, None]}


def _data(mix: Mix | None = BOTH) -> RandomAccessData:
    """Examples whose label is their number, each augmented by numbers of its own."""
    examples = ArrayExamples({"image": _pixels(SIZE), "label": np.arange(SIZE, dtype=np.int32)})
    return RandomAccessData(train=examples, evaluation=examples, augment=_jitter, mix=mix)


@pytest.fixture(scope="module")
def undisturbed():
    """The batches of a run on one replica."""
    return global_batches(_data().train_batches, hosts=1, replicas=1, batch=BATCH, steps=STEPS)


@pytest.mark.parametrize("mix", [Mix(mixup=0.7), Mix(cutmix=1.0)])
def test_a_mixed_example_is_made_of_two_of_its_epoch_each_augmented_as_where_it_stands_itself(mix):
    plain, mixed = (
        global_batches(_data(kind).train_batches, hosts=1, replicas=1, batch=BATCH, steps=STEPS) for kind in (None, mix)
    )
    labels, images = joined(plain, "label"), joined(plain, "image")
    np.testing.assert_array_equal(joined(mixed, "label"), labels)
    epochs = np.arange(len(labels)) // SIZE
    partner = [
        np.flatnonzero((labels == label) & (epochs == epoch)).item()
        for label, epoch in zip(joined(mixed, "label_b"), epochs, strict=True)
    ]
    if mix.mixup:
        np.testing.assert_allclose(
            joined(mixed, "image"), _blend(images, images[partner], joined(mixed, "mix")), atol=1e-6
        )
    else:
        own, pasted = ((joined(mixed, "image") == source).all(axis=-1) for source in (images, images[partner]))
        assert (own ^ pasted).all()
        np.testing.assert_allclose(joined(mixed, "mix"), own.mean(axis=(1, 2)), atol=1e-7)


@pytest.mark.nightly  # the next test has a topology, too
@pytest.mark.parametrize(("hosts", "replicas"), TOPOLOGIES)
def test_every_topology_sees_the_same_mixed_batches(undisturbed, hosts, replicas):
    batches = global_batches(_data().train_batches, hosts=hosts, replicas=replicas, batch=BATCH, steps=STEPS)
    assert_same(batches, undisturbed)


@pytest.mark.parametrize("start_step", repeated_but([7], [1, 7]))
def test_a_resumed_run_mixes_as_an_undisturbed_one(undisturbed, start_step):
    resumed = global_batches(
        _data().train_batches, hosts=2, replicas=2, batch=BATCH, steps=STEPS - start_step, start_step=start_step
    )
    assert_same(resumed, undisturbed[start_step:])


def test_partners_and_shares_change_with_the_epoch_and_with_the_seed(undisturbed):
    def of_each(batches, epoch):
        part = slice(epoch * SIZE, (epoch + 1) * SIZE)
        order = np.argsort(joined(batches, "label")[part])
        return joined(batches, "label_b")[part][order], joined(batches, "mix")[part][order]

    other_seed = global_batches(_data().train_batches, hosts=1, replicas=1, batch=BATCH, steps=STEPS, seed=6)
    partner, share = of_each(undisturbed, 0)
    np.testing.assert_array_equal(np.sort(partner), np.arange(SIZE))
    for batches, epoch in ((undisturbed, 1), (undisturbed, 2), (other_seed, 0)):
        other_partner, other_share = of_each(batches, epoch)
        assert (partner == other_partner).sum() < 8  # 1 expected
        assert np.abs(share - other_share).mean() > 0.1


def test_only_mixed_batches_carry_the_keys_of_mixing_and_evaluation_never_does():
    (shard,) = shards(hosts=1, replicas=2, batch=BATCH)
    plain = {
        "image": ((6, HEIGHT, WIDTH, 2), "float32"),
        "label": ((6,), "int32"),
        "weight": ((6,), "float32"),
    }
    mixed = {**plain, "label_b": ((6,), "int32"), "mix": ((6,), "float32")}
    for dataset, expected in (
        (_data().train_batches(shard), mixed),
        (_data().eval_batches(shard), plain),
        (_data(None).train_batches(shard), plain),
    ):
        found = {key: (tuple(spec.shape), spec.dtype.name) for key, spec in dataset.element_spec.items()}
        assert found == expected
    assert _data().train_batches(shard).cardinality() == tf.data.INFINITE_CARDINALITY


@pytest.mark.parametrize(
    "options",
    [
        {"name": "digits", "augmentation": "small"},
        {"name": "synthetic", "image_size": 6, "num_classes": 4, "train_examples": 100},
    ],
)
def test_image_data_mixes_training_images_and_leaves_evaluation_alone(options):
    def batches(kind, **mix):
        data = made(image_data, **options, **mix)
        make = data.train_batches if kind == "train" else data.eval_batches
        return global_batches(make, hosts=1, replicas=1, batch=100, steps=2)

    assert_same(batches("eval", mixup=0.2, cutmix=1.0), batches("eval"))
    plain, mixed = batches("train"), batches("train", mixup=0.2)
    np.testing.assert_array_equal(joined(mixed, "label"), joined(plain, "label"))
    assert (joined(mixed, "image") != joined(plain, "image")).any(axis=(1, 2, 3)).mean() > 0.8
    assert "mix" not in plain[0]
    # Mostly one of the two, as a Beta distribution of alpha 0.2 is.
    share = joined(mixed, "mix")
    assert 0.4 < np.mean((share < 0.1) | (share > 0.9)) < 0.8


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("alpha", [0.0, -0.2, 101.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_an_alpha_without_a_distribution_is_refused(name, alpha):
    with pytest.raises(UsageError, match=rf"image_data.{name} = {alpha}: must be above 0 .*or None"):
        made(image_data, name="digits", **{name: alpha})


def test_mixing_nothing_is_refused():
    with pytest.raises(UsageError, match="mixup or for cutmix"):
        Mix()
