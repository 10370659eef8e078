"""Image sets too large for memory: read in sequence, shuffled as they pass, decoded after they were split over hosts.

Examples cannot be had in any order here, so the order comes about otherwise. The data set is cut into a fixed number of
streams. Each is shuffled by (seed, epoch, stream): its files first, then through a buffer. Every global batch takes the
same number of examples from each stream, and a host reads the streams that make up its part of the batch. Therefore

- the order is the same for any number of hosts that divides the number of streams (32, or the largest power of two
  below that divides the global batch), and for any number of replicas;
- with other numbers of hosts there is one stream a host, and the order depends on how many there are;
- a resumed run sees what an undisturbed one would have seen. It reads, without decoding, what its epoch has used up;
- the streams differ by at most one example in length, and each begins a new epoch for itself;
- the partner with which an example is mixed is the one that stood at its position of the global batch one step before,
  an earlier example of the same stream. The first step of all has none and is not mixed.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from launcher.data import tfds
from launcher.data.images.augment import ImageAugment, flips, window_numbers
from launcher.data.images.decode import ImageDecoder
from launcher.data.order import example_seeds
from launcher.data.pipeline import WEIGHT, Batch, Mixing, Shard, batch_pipeline, parallel_calls, weighted
from launcher.errors import UsageError
from launcher.machine.no_autograph import no_autograph

_MAX_STREAMS = 32

# Encoded examples held for each stream. With all streams on one host: 8,192 images, about 0.9 GB for ImageNet.
_SHUFFLE_BUFFER = 256

# Files of one stream read in turn.
_OPEN_FILES = 4

# TensorFlow takes global seeds modulo this number.
_GLOBAL_SEEDS = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamedImages:
    """`Data` from a prepared TFDS image set, without holding it in memory."""

    builder: Any  # a `tfds.core.DatasetBuilder`
    train_split: str
    eval_split: str
    decoder: ImageDecoder
    random_window: bool  # cut out of every training image, instead of the centre
    flip: bool  # with `random_window`, also mirror half of them
    augment: ImageAugment | None  # changes batches of stored training images
    finish: Callable[[Batch], Batch]  # changes every batch at the end
    mix: Mixing | None = None  # after that

    @property
    def num_train_examples(self) -> int:
        return tfds.num_examples(self.builder, self.train_split)

    @property
    def num_eval_examples(self) -> int:
        return tfds.num_examples(self.builder, self.eval_split)

    def check(self) -> None:
        tfds.check_prepared(self.builder, (self.train_split, self.eval_split))

    def damage(self, **where: int) -> str | None:
        """See `launcher.data.images.encoded.EncodedData.damage`; of all that is read."""
        return tfds.damage(self.builder, self.train_split, self.eval_split)

    def train_batches(self, shard: Shard) -> tf.data.Dataset:
        size, mix = shard.per_replica_batch_size, self.mix

        @no_autograph
        def batch_of(images: tf.Tensor, labels: tf.Tensor, seeds: tf.Tensor) -> Batch:
            images = images if self.augment is None else self.augment(images, seeds)
            batch = {"image": images, "label": labels}
            return weighted(batch if shard.as_stored else self.finish(batch), size)

        if mix is None:
            return batch_pipeline(self._stored_batches(shard), batch_of)

        @no_autograph
        def mixed(images: tf.Tensor, labels: tf.Tensor, seeds: tf.Tensor, *partner: tf.Tensor) -> Batch:
            other_images, other_labels, other_seeds, real = partner
            batch = batch_of(images, labels, seeds)
            others = {**batch_of(other_images, other_labels, other_seeds), WEIGHT: tf.fill([size], real)}
            return weighted(mix(batch, others, seeds), size)

        return batch_pipeline(self._with_partners(shard), mixed)

    def _stored_batches(self, shard: Shard) -> tf.data.Dataset:
        """One replica's decoded images, labels and seed pairs, before anything is done to whole batches."""
        hosts, host = _hosts(shard)
        streams = num_streams(shard.global_batch_size, hosts)
        elements = tf.data.Dataset.zip((self._encoded(shard, streams, host * streams // hosts, hosts), _seeds(shard)))
        decoded = elements.map(self._decoded, num_parallel_calls=parallel_calls(), deterministic=True)
        return decoded.batch(shard.per_replica_batch_size, drop_remainder=True)

    def _with_partners(self, shard: Shard) -> tf.data.Dataset:
        """`_stored_batches`, each followed by that of the step before and by its weight: 0 if there was no step."""
        resumed = shard.start_step > 0
        batches = self._stored_batches(dataclasses.replace(shard, start_step=shard.start_step - resumed))
        nothing = tuple(tf.zeros(spec.shape, spec.dtype) for spec in batches.element_spec)

        @no_autograph
        def shift(last: Any, batch: Any) -> tuple[Any, Any]:
            return (*last[1:], (*batch, 1.0)), (*batch, *last[0])

        paired = batches.scan(((*nothing, 0.0),) * shard.local_replicas, shift)
        return paired.skip(shard.local_replicas if resumed else 0)

    def eval_batches(self, shard: Shard) -> tf.data.Dataset:
        hosts, host = _hosts(shard)
        size = shard.per_replica_batch_size
        slots = shard.eval_steps(self.num_eval_examples) * shard.host_batch_size
        # The shares of hosts differ by at most one example, and the largest fits into the slots of its host.
        share = self._even_splits(self.eval_split, hosts)[host]
        examples = self._read(share).map(
            no_autograph(
                lambda example: (self.decoder.centre(example["image"]), tf.cast(example["label"], tf.int32), 1.0)
            ),
            num_parallel_calls=parallel_calls(),
            deterministic=True,
        )
        nothing = (tf.zeros(self.decoder.image_shape, tf.uint8), tf.zeros([], tf.int32), tf.zeros([]))
        padded = examples.concatenate(tf.data.Dataset.from_tensors(nothing).repeat()).take(slots)

        @no_autograph
        def batch_of(images: tf.Tensor, labels: tf.Tensor, mask: tf.Tensor) -> Batch:
            return weighted(self.finish({"image": images, "label": labels}), size, mask)

        return batch_pipeline(padded.batch(size, drop_remainder=True), batch_of)

    def _encoded(self, shard: Shard, streams: int, first: int, hosts: int) -> tf.data.Dataset:
        """The host's encoded examples and labels in the order of its positions in the global batches, without end."""
        share = shard.global_batch_size // streams
        splits = self._even_splits(self.train_split, streams)[first : first + streams // hosts]
        parts = [
            self._endless(split, seed=shard.seed, stream=first + number, used=shard.start_step * share)
            for number, split in enumerate(splits)
        ]
        turns = np.repeat(np.arange(len(parts), dtype=np.int64), share)
        return tf.data.Dataset.choose_from_datasets(
            parts, tf.data.Dataset.from_tensor_slices(turns).repeat(), stop_on_empty_dataset=True
        )

    def _endless(self, split: Any, *, seed: int, stream: int, used: int) -> tf.data.Dataset:
        """One stream, epoch after epoch, from the first example that is not used up."""
        first_epoch, skip = divmod(used, tfds.num_examples(self.builder, split))

        @no_autograph  # TFDS's functions are wrapped in a way it only warns about
        def epoch_of(epoch: tf.Tensor) -> tf.data.Dataset:
            # An operation's seed is paired with the global seed of its graph, which would come from the process. This
            # sets it for this function's graph alone. It must not be 0: TensorFlow then asks in Python whether the
            # other one is 0 as well, and those below are tensors.
            tf.random.set_seed(seed % _GLOBAL_SEEDS or 1)
            words = example_seeds(seed=seed, epoch=epoch[tf.newaxis], index=tf.constant([stream], tf.int64))[0]
            file_seed, buffer_seed = tf.unstack(tf.cast(words, tf.int64))
            examples = self._read(
                split,
                shuffle_files=True,
                config=tfds.read_config(
                    shuffle_seed=file_seed, shuffle_reshuffle_each_iteration=False, interleave_cycle_length=_OPEN_FILES
                ),
            )
            examples = examples.map(lambda example: (example["image"], tf.cast(example["label"], tf.int32)))
            examples = examples.shuffle(_SHUFFLE_BUFFER, seed=buffer_seed, reshuffle_each_iteration=False)
            return examples.skip(tf.where(epoch == first_epoch, tf.constant(skip, tf.int64), 0))

        epochs = tf.data.Dataset.counter(first_epoch, dtype=tf.int64)
        return epochs.flat_map(epoch_of).prefetch(tf.data.AUTOTUNE)

    def _read(self, split: Any, *, shuffle_files: bool = False, config: Any = None) -> tf.data.Dataset:
        return self.builder.as_dataset(
            split=split,
            shuffle_files=shuffle_files,
            decoders=tfds.skip_decoding(),
            read_config=config or tfds.read_config(),
        )

    def _even_splits(self, split: str, parts: int) -> list[Any]:
        count = tfds.num_examples(self.builder, split)
        if count < parts:
            raise UsageError(f"{count} examples, too few for {parts} streams; raise image_data.memory_limit_bytes")
        return tfds.module().even_splits(split, n=parts, drop_remainder=False)

    def _decoded(
        self, example: tuple[tf.Tensor, tf.Tensor], numbers: tuple[tf.Tensor, tf.Tensor, tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        (encoded, label), (seeds, window, mirrored) = example, numbers
        if not self.random_window:
            return self.decoder.centre(encoded), label, seeds
        return self.decoder.random_window(encoded, window, mirrored & self.flip), label, seeds


def num_streams(global_batch_size: int, hosts: int) -> int:
    """Into how many streams a data set is cut; divides the global batch, and the hosts divide it."""
    streams = math.gcd(global_batch_size, _MAX_STREAMS)
    return streams if streams % hosts == 0 else hosts


def _hosts(shard: Shard) -> tuple[int, int]:
    """How many hosts there are and which one this is."""
    if shard.num_replicas % shard.local_replicas or shard.first_replica % shard.local_replicas:
        raise ValueError(f"streaming needs as many replicas on every host: {shard}")
    return shard.num_replicas // shard.local_replicas, shard.first_replica // shard.local_replicas


def _seeds(shard: Shard) -> tf.data.Dataset:
    """For each position of this host: the seed pair, numbers for a window, whether to mirror.

    Positions stand for examples here: which one of its data set an example is, is not known when it passes.
    """
    host = tf.range(shard.host_batch_size, dtype=tf.int64) + shard.first_replica * shard.per_replica_batch_size

    @no_autograph
    def of_step(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        seeds = example_seeds(seed=shard.seed, epoch=0, index=step * shard.global_batch_size + host)
        return seeds, window_numbers(seeds), flips(seeds)

    return tf.data.Dataset.counter(shard.start_step, dtype=tf.int64).map(of_step).unbatch()
