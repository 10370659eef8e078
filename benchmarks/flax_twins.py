"""Training steps in Flax and Optax that do the work of three recipes, as StableHLO programs for many replicas.

    python benchmarks/flax_twins.py lm --replicas=4 --rows=16 --layers=2 > lm.mlir

Needs `pip install flax optax`. Written as their users write such steps: float32 weights, bfloat16 activations, the mean
gradient summed over replicas leaf by leaf, dropout by JAX's "rbg" generator. The models are those of resnet_tpu.gin,
transformer_tpu.gin and lm_gpu.gin (attention of 6 heads and 2 key heads, as lm_tpu.gin has them); `twins.py` compares
them. `--guarded` applies no gradient that is not finite, by what Optax has for it. `--tuned` writes the language model
as MaxText does: splash attention, one loop over the layers, a head of 16-bit operands (TPUs alone).
"""

from __future__ import annotations

import argparse
import functools
import os
import re
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

_SUM = "sum_over_replicas"
_CALL = re.compile(rf"(%\S+) = stablehlo\.custom_call @{_SUM}\((%\S+)\).*? : \((tensor<.*>)\) -> tensor<.*>")
Dense = functools.partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16)


class ResNet50(nn.Module):
    """He et al. 2016, the stride in the 3x3 convolution (v1.5), as Flax's own example has it."""

    @nn.compact
    def __call__(self, images):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=jnp.bfloat16)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=False, momentum=0.9, epsilon=1e-5, dtype=jnp.bfloat16
        )
        x = nn.relu(norm()(conv(64, (7, 7), (2, 2), padding=[(3, 3), (3, 3)])(images.astype(jnp.bfloat16))))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                filters, strides = 64 * 2**stage, (2, 2) if stage and not block else (1, 1)
                y = nn.relu(norm()(conv(filters, (1, 1))(x)))
                y = nn.relu(norm()(conv(filters, (3, 3), strides, padding=[(1, 1), (1, 1)])(y)))
                y = norm(scale_init=nn.initializers.zeros)(conv(4 * filters, (1, 1))(y))
                if not block:
                    x = norm()(conv(4 * filters, (1, 1), strides)(x))
                x = nn.relu(x + y)
        return nn.Dense(1000)(jnp.mean(x.astype(jnp.float32), axis=(1, 2)))


def _rotated(vectors, positions):
    planes = vectors.shape[-1] // 2
    angles = positions[..., None].astype(jnp.float32) * 10_000.0 ** (-jnp.arange(planes) / planes)
    cosines, sines = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    first, second = jnp.split(vectors.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cosines - second * sines, first * sines + second * cosines], axis=-1)
    return rotated.astype(vectors.dtype)


def _splash(query, key, value, segments):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, block = query.shape[1], min(512, query.shape[1])
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
    sizes = splash.BlockSizes(**{f"block_{name}": block for name in names}, use_fused_bwd_kernel=True)
    causal = masks.MultiHeadMask([masks.CausalMask((length, length))] * query.shape[2])
    kernel = splash.make_splash_mha_single_device(causal, block_sizes=sizes)
    of_heads = (jnp.swapaxes(one, 1, 2) for one in (query, key, value))
    return jnp.swapaxes(jax.vmap(kernel)(*of_heads, splash.SegmentIds(segments, segments)), 1, 2)


class Attention(nn.Module):
    """Grouped heads (Ainslie et al. 2023), float32 softmax; splash attention where the mask is the segments."""

    heads: int
    kv_heads: int
    rotary: bool = False

    @nn.compact
    def __call__(self, x, memory, mask, positions):
        width = x.shape[-1] // self.heads
        query = Dense(self.heads * width)(x).reshape(*x.shape[:2], self.heads, width)
        key, value = (
            Dense(self.kv_heads * width)(memory).reshape(*memory.shape[:2], self.kv_heads, width) for _ in range(2)
        )
        if self.rotary:
            query, key = _rotated(query, positions), _rotated(key, positions)
        if mask.ndim == 2:
            attended = _splash(query * width**-0.5, key, value, mask)
            return Dense(x.shape[-1])(attended.reshape(x.shape))
        query = query.reshape(*x.shape[:2], self.kv_heads, self.heads // self.kv_heads, width) * width**-0.5
        scores = jnp.einsum("bqgsd,bkgd->bgsqk", query, key, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30)).astype(jnp.bfloat16)
        return Dense(x.shape[-1])(jnp.einsum("bgsqk,bkgd->bqgsd", weights, value).reshape(x.shape))


class Blocks(nn.Module):
    """A stack: pre-norm with RMS and SwiGLU for the language model, post-norm with ReLU for the Transformer."""

    layers: int
    heads: int
    kv_heads: int
    hidden: int
    dropout: float = 0.0
    is_lm: bool = False

    @nn.compact
    def __call__(self, x, mask, positions=None, memory=None, memory_mask=None):
        norm = nn.RMSNorm if self.is_lm else nn.LayerNorm
        attention = functools.partial(Attention, self.heads, self.kv_heads)
        for _ in range(self.layers):
            sublayers = [lambda y: attention(self.is_lm)(y, y, mask, positions)]
            if memory is not None:
                sublayers.append(lambda y: attention()(y, memory, memory_mask, None))
            for sublayer in [*sublayers, self._feed_forward]:
                normed = norm(dtype=jnp.bfloat16)
                drop = nn.Dropout(self.dropout, deterministic=not self.dropout)
                x = x + drop(sublayer(normed(x))) if self.is_lm else normed(x + drop(sublayer(x)))
        return x

    def _feed_forward(self, x):
        if self.is_lm:
            return Dense(x.shape[-1])(nn.silu(Dense(self.hidden)(x)) * Dense(self.hidden)(x))
        return Dense(x.shape[-1], use_bias=True)(nn.relu(Dense(self.hidden, use_bias=True)(x)))


def _together(queries, keys):
    return (queries[:, :, None] == keys[:, None, :]) & (keys[:, None, :] != 0)


def _causal(segments):
    return _together(segments, segments) & jnp.tril(jnp.ones([segments.shape[1]] * 2, bool))


class _Layer(nn.Module):
    @nn.compact
    def __call__(self, x, segments, positions):
        return Blocks(1, 6, 2, 2048, is_lm=True)(x, segments, positions), None


class LanguageModel(nn.Module):
    layers: int
    tuned: bool = False

    @nn.compact
    def __call__(self, batch):
        matrix = self.param("embedding", nn.initializers.normal(768**-0.5), (32_000, 768))
        x = (matrix[batch["tokens"]] * 768**0.5).astype(jnp.bfloat16)
        if self.tuned:
            kinds = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": nn.broadcast}
            x, _ = nn.scan(_Layer, length=self.layers, **kinds)()(x, batch["segments"], batch["positions"])
            x = nn.RMSNorm(dtype=jnp.bfloat16)(x)
            return jnp.einsum("bld,vd->blv", x, matrix.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        blocks = Blocks(self.layers, 6, 2, 2048, is_lm=True)
        x = nn.RMSNorm(dtype=jnp.bfloat16)(blocks(x, _causal(batch["segments"]), batch["positions"]))
        return x.astype(jnp.float32) @ matrix.T


class Transformer(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, batch):
        width = 1024
        matrix = self.param("embedding", nn.initializers.normal(width**-0.5), (36_992, width))

        def embedded(name):
            angles = batch[f"{name}_positions"][..., None] * 10_000.0 ** (-jnp.arange(width // 2) / (width // 2))
            places = jnp.stack([jnp.sin(angles), jnp.cos(angles)], -1).reshape(*angles.shape[:2], width)
            x = (matrix[batch[name]] * width**0.5).astype(jnp.bfloat16) + places.astype(jnp.bfloat16)
            return nn.Dropout(0.3, deterministic=False)(x)

        source, target = batch["source_segments"], batch["target_segments"]
        blocks = functools.partial(Blocks, self.layers, 8, 8, 4096, 0.3)
        memory = blocks()(embedded("source"), _together(source, source))
        x = blocks()(embedded("target"), _causal(target), None, memory, _together(target, source))
        return x.astype(jnp.float32) @ matrix.T


def _all_sum(tree):
    """The sum over replicas, written as a call that `program` replaces: JAX itself would partition one program."""
    return jax.tree.map(
        lambda x: jax.ffi.ffi_call(_SUM, jax.ShapeDtypeStruct(x.shape, x.dtype), has_side_effect=False)(x), tree
    )


def program(step: Callable, state: Any, batch: Any, replicas: int, platform: str) -> str:
    """StableHLO of `step(state, batch)` for so many replicas of a platform, the state donated."""
    traced = jax.jit(step, donate_argnums=0, keep_unused=True).trace(state, batch)
    # JAX lowers the gradient of max pooling in another way for each platform.
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    groups = f"dense<[{list(range(replicas))}]> : tensor<1x{replicas}xi64>"

    def all_reduce(call: re.Match) -> str:
        result, operand, kind = call.groups()
        scalar = f"tensor<{kind.rstrip('>').rpartition('x')[2].removeprefix('tensor<')}>"
        return (
            f'{result} = "stablehlo.all_reduce"({operand}) <{{replica_groups = {groups}}}> ({{\n'
            f"^bb0(%left: {scalar}, %right: {scalar}):\n  %sum = stablehlo.add %left, %right : {scalar}\n"
            f"  stablehlo.return %sum : {scalar}\n}}) : ({kind}) -> {kind}"
        )

    text = _CALL.sub(all_reduce, text)
    if _SUM in text:
        raise SystemExit("a sum over replicas was not found in the program's text; another version of JAX?")
    return text.replace("mhlo.num_replicas = 1", f"mhlo.num_replicas = {replicas}")


def _guard(optimizer: optax.GradientTransformation, guarded: bool) -> optax.GradientTransformation:
    return optax.apply_if_finite(optimizer, max_consecutive_errors=10) if guarded else optimizer


def resnet(rows: int, replicas: int, platform: str, guarded: bool) -> str:
    """ResNet-50 with momentum, L2 of 5e-5 and label smoothing of 0.1."""
    model = ResNet50()
    batch = {"image": _shape(rows, 224, 224, 3, dtype=jnp.float32), "label": _shape(rows)}
    optimizer = optax.chain(optax.add_decayed_weights(5e-5), optax.sgd(0.1, momentum=0.9, nesterov=True))
    optimizer = _guard(optimizer, guarded)
    variables = jax.eval_shape(model.init, jax.random.key(0), batch["image"])
    params, statistics = variables["params"], variables["batch_stats"]

    def loss_of(params, statistics, batch):
        logits, moved = model.apply(
            {"params": params, "batch_stats": statistics}, batch["image"], mutable=["batch_stats"]
        )
        smooth = optax.smooth_labels(jax.nn.one_hot(batch["label"], 1000), 0.1)
        right = jnp.sum(jnp.argmax(logits, -1) == batch["label"])
        return optax.softmax_cross_entropy(logits, smooth).mean() / replicas, (moved["batch_stats"], right)

    def step(state, batch):
        params, statistics, slots = state
        (loss, (statistics, right)), grads = jax.value_and_grad(loss_of, has_aux=True)(params, statistics, batch)
        grads, loss, right = _all_sum((grads, loss, right.astype(jnp.float32)))
        updates, slots = optimizer.update(grads, slots, params)
        return (optax.apply_updates(params, updates), statistics, slots), (loss, right)

    return program(step, (params, statistics, jax.eval_shape(optimizer.init, params)), batch, replicas, platform)


def text_model(
    model: nn.Module, names: tuple[str, ...], rows: int, length: int, replicas: int, platform: str, guarded: bool
) -> str:
    """Adam and what the recipe adds: clipping and decay to the language model, smoothing and averages to the other."""
    is_lm = isinstance(model, LanguageModel)
    batch = {name: _shape(rows, length) for name in names}
    smoothing = 0.0 if is_lm else 0.1
    if is_lm:
        adam = optax.adamw(1e-3, b1=0.9, b2=0.95, weight_decay=0.1)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam)
    else:
        optimizer = optax.adam(1e-3, b1=0.9, b2=0.98, eps=1e-9)
    optimizer = _guard(optimizer, guarded)
    keys = {name: jax.random.key(0) for name in ("params", "dropout")}
    params = jax.eval_shape(model.init, keys, batch)["params"]

    def loss_of(params, batch, key):
        logits = model.apply({"params": params}, batch, rngs={"dropout": key})
        labels, weight = batch["target"], (batch["target"] != 0).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        if smoothing:
            even = jax.nn.logsumexp(logits, -1) - logits.mean(-1)
            losses = (1 - smoothing) * losses + smoothing * even
        right = jnp.sum((jnp.argmax(logits, -1) == labels) * weight)
        return jnp.sum(losses * weight) / (rows * length * replicas), (jnp.sum(weight), right)

    def step(state, batch):
        params, slots, averages, count = state
        key = jax.random.fold_in(jax.random.key(0, impl="rbg"), count)
        (loss, (weight, right)), grads = jax.value_and_grad(loss_of, has_aux=True)(params, batch, key)
        grads, loss, weight, right = _all_sum((grads, loss, weight, right))
        updates, slots = optimizer.update(grads, slots, params)
        params = optax.apply_updates(params, updates)
        averages = averages and jax.tree.map(lambda old, new: 0.999 * old + 0.001 * new, averages, params)
        return (params, slots, averages, count + 1), (loss, weight, right)

    state = (params, jax.eval_shape(optimizer.init, params), None if is_lm else params, _shape())
    return program(step, state, batch, replicas, platform)


def _shape(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def make(
    model: str, *, replicas: int, rows: int, layers: int, platform: str, guarded: bool, tuned: bool = False
) -> str:
    """The program of "resnet", "transformer" or "lm"."""
    if model == "resnet":
        return resnet(rows, replicas, platform, guarded)
    if model == "lm":
        names = ("tokens", "segments", "positions", "target")
        return text_model(LanguageModel(layers, tuned), names, rows, 512, replicas, platform, guarded)
    kinds = ("", "_segments", "_positions")
    names = (*(f"source{kind}" for kind in kinds), *(f"target{kind}" for kind in kinds))
    return text_model(Transformer(layers), names, rows, 256, replicas, platform, guarded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("resnet", "transformer", "lm"))
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rows", type=int, default=16, help="examples of one replica")
    parser.add_argument("--layers", type=int, default=2, help="of a text model")
    parser.add_argument("--platform", choices=("tpu", "cuda"), default="tpu")
    parser.add_argument("--guarded", action="store_true", help="no update by a gradient that is not finite")
    parser.add_argument("--tuned", action="store_true", help="lm with splash attention, a loop, a 16-bit head")
    print(make(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
