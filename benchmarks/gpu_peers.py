"""A step of ResNet-50 and of a language model by hand on one GPU, in JAX and in PyTorch, for gpu_check.py.

    python benchmarks/gpu_peers.py resnet_jax            # or lm_jax, lm_jax_plain, resnet_torch, lm_torch
    python benchmarks/gpu_peers.py lm_jax --small        # sizes for CPUs

The work is that of gpu_check.py's recipes: 256 images of 224 in float16 with a loss scale; 64 rows of 512 tokens in
bfloat16, 81.8 million weights, AdamW. Batches lie on the GPU. PyTorch's steps are torch.compile's, the attention in JAX
is cuDNN's but for lm_jax_plain. Prints JSON: the median of three times ten steps after eight, and the peak of memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

Step = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of both models."""

    images: int = 256
    pixels: int = 224
    stages: tuple[int, ...] = (3, 4, 6, 3)
    rows: int = 64
    length: int = 512
    vocab: int = 8192
    width: int = 768
    layers: int = 12
    heads: int = 12
    kv_heads: int = 4
    hidden: int = 2048

    @property
    def head(self) -> int:
        return self.width // self.heads


SMALL = Sizes(
    images=4,
    pixels=32,
    stages=(1, 1, 1, 1),
    rows=2,
    length=64,
    vocab=64,
    width=64,
    layers=1,
    heads=4,
    kv_heads=2,
    hidden=64,
)


def timed(step: Step, wait: Callable[[], object], items: int) -> dict[str, Any]:
    """Milliseconds a step."""
    for _ in range(8):
        step()
    wait()
    times = []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(10):
            step()
        wait()
        times.append((time.perf_counter() - started) * 100)
    middle = statistics.median(times)
    return {
        "ms": round(middle, 2),
        "all_ms": [round(one, 2) for one in times],
        "items_per_second": round(items / middle * 1e3),
    }


def resnet_jax(sizes: Sizes) -> dict[str, Any]:
    """As Flax's example has it."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import linen as nn

    conv = partial(nn.Conv, use_bias=False, dtype=jnp.float16)
    norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, epsilon=1e-5, dtype=jnp.float16)

    class Bottleneck(nn.Module):
        filters: int
        stride: int

        @nn.compact
        def __call__(self, x):
            y = nn.relu(norm()(conv(self.filters, (1, 1))(x)))
            y = nn.relu(norm()(conv(self.filters, (3, 3), (self.stride, self.stride))(y)))
            y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.filters, (1, 1))(y))
            if x.shape != y.shape:
                x = norm()(conv(4 * self.filters, (1, 1), (self.stride, self.stride))(x))
            return nn.relu(x + y)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(norm()(conv(64, (7, 7), (2, 2))(x.astype(jnp.float16))))
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
            for stage, count in enumerate(sizes.stages):
                for block in range(count):
                    x = Bottleneck(64 * 2**stage, 2 if stage and not block else 1)(x)
            return nn.Dense(1000, dtype=jnp.float32)(x.mean((1, 2)))

    net, tx = ResNet(), optax.chain(optax.add_decayed_weights(5e-5), optax.sgd(0.1, 0.9, nesterov=True))
    x = jax.random.normal(jax.random.key(0), (sizes.images, sizes.pixels, sizes.pixels, 3), jnp.float32)
    y = jax.random.randint(jax.random.key(1), (sizes.images,), 0, 1000)
    made = jax.jit(net.init)(jax.random.key(2), x)
    state = [made["params"], made["batch_stats"], jax.jit(tx.init)(made["params"]), jnp.float32(2.0**15)]

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def train(params, statistics_, slots, scale, x, y):
        def loss(params):
            out, new = net.apply({"params": params, "batch_stats": statistics_}, x, mutable=["batch_stats"])
            smooth = optax.smooth_labels(jax.nn.one_hot(y, 1000), 0.1)
            return optax.softmax_cross_entropy(out, smooth).mean() * scale, new["batch_stats"]

        gradients, new = jax.grad(loss, has_aux=True)(params)
        gradients = jax.tree.map(lambda one: one / scale, gradients)
        finite = jnp.all(jnp.stack([jnp.isfinite(one).all() for one in jax.tree.leaves(gradients)]))
        updates, moved = tx.update(gradients, slots, params)

        def gated(after, before):
            return jax.tree.map(lambda one, other: jnp.where(finite, one, other), after, before)

        return (
            gated(optax.apply_updates(params, updates), params),
            new,
            gated(moved, slots),
            jnp.where(finite, scale, scale / 2),
        )

    return _of_jax(state, lambda: train(*state, x, y), sizes.images)


def _of_jax(state: list, train: Callable[[], tuple], items: int) -> dict[str, Any]:
    import jax

    def step() -> None:
        state[:] = train()

    found = timed(step, lambda: jax.block_until_ready(state), items)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    weights = sum(one.size for one in jax.tree.leaves(state[0]))
    return {**found, "peak_gib": round(peak / 2**30, 2), "weights": weights}


def lm_jax(sizes: Sizes, attention: str = "cudnn") -> dict[str, Any]:
    """Of plain arrays and functions."""
    import jax
    import jax.numpy as jnp
    import optax

    keys = iter(jax.random.split(jax.random.key(0), 20 * sizes.layers))
    width, hidden, of_kv = sizes.width, sizes.hidden, 2 * sizes.kv_heads * sizes.head

    def weight(*shape):
        return jax.random.normal(next(keys), shape, jnp.float32) * 0.02

    def block():
        products = {"q": weight(width, width), "kv": weight(width, of_kv), "o": weight(width, width)}
        products |= {"up": weight(width, 2 * hidden), "down": weight(hidden, width)}
        return {"n1": jnp.ones(width), "n2": jnp.ones(width), **products}

    params = {"e": weight(sizes.vocab, width), "n": jnp.ones(width), "b": [block() for _ in range(sizes.layers)]}
    half = sizes.head // 2
    angles = jnp.outer(jnp.arange(sizes.length, dtype=jnp.float32), 10000 ** (-jnp.arange(half) / half))
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    is_gpu = jax.default_backend() == "gpu"

    def cast(one):
        return one.astype(jnp.bfloat16)

    def rms(h, gain):
        h = h.astype(jnp.float32)
        return cast(h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6) * gain)

    def turned(one):
        first, second = jnp.split(one, 2, -1)
        return cast(jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1))

    def model(params, x):
        h = cast(params["e"])[x]
        for one in params["b"]:
            z = rms(h, one["n1"])
            query = (z @ cast(one["q"])).reshape(*x.shape, sizes.heads, sizes.head)
            key, value = jnp.split((z @ cast(one["kv"])).reshape(*x.shape, 2 * sizes.kv_heads, sizes.head), 2, 2)
            how = "cudnn" if is_gpu and attention == "cudnn" else "xla"
            seen = jax.nn.dot_product_attention(turned(query), turned(key), value, is_causal=True, implementation=how)
            h = h + seen.reshape(*x.shape, width) @ cast(one["o"])
            up, gate = jnp.split(rms(h, one["n2"]) @ cast(one["up"]), 2, -1)
            h = h + (up * jax.nn.silu(gate)) @ cast(one["down"])
        return (rms(h, params["n"]) @ cast(params["e"]).T).astype(jnp.float32)

    tx = optax.adamw(6e-4)
    x = jax.random.randint(jax.random.key(1), (sizes.rows, sizes.length), 0, sizes.vocab)
    y = jnp.roll(x, -1, 1)
    state = [params, jax.jit(tx.init)(params)]

    @partial(jax.jit, donate_argnums=(0, 1))
    def train(params, slots, x, y):
        def loss(params):
            return optax.softmax_cross_entropy_with_integer_labels(model(params, x), y).mean()

        updates, slots = tx.update(jax.grad(loss)(params), slots, params)
        return optax.apply_updates(params, updates), slots

    return _of_jax(state, lambda: train(*state, x, y), sizes.rows * sizes.length)


def resnet_torch(sizes: Sizes) -> dict[str, Any]:
    """torchvision's model, channels last, autocast and GradScaler."""
    import torch
    import torchvision

    torch.backends.cudnn.benchmark = True
    on = "cuda" if torch.cuda.is_available() else "cpu"
    model = torchvision.models.resnet50().to(on).to(memory_format=torch.channels_last)
    x = torch.randn(sizes.images, 3, sizes.pixels, sizes.pixels, device=on).to(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, (sizes.images,), device=on)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=5e-5, nesterov=True)
    scaler, loss = torch.amp.GradScaler(on), torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    net = torch.compile(model)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(on, torch.float16):
            found = loss(net(x), y)
        scaler.scale(found).backward()
        scaler.step(optimizer)
        scaler.update()

    return _of_torch(step, sizes.images, model)


def _of_torch(step: Step, items: int, model: Any) -> dict[str, Any]:
    import torch

    there = torch.cuda.is_available()
    found = timed(step, torch.cuda.synchronize if there else lambda: None, items)
    peak = torch.cuda.max_memory_allocated() if there else 0
    return {**found, "peak_gib": round(peak / 2**30, 2), "weights": sum(one.numel() for one in model.parameters())}


def lm_torch(sizes: Sizes) -> dict[str, Any]:
    """The same model of torch.nn, with its own scaled_dot_product_attention and fused AdamW."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.set_float32_matmul_precision("high")
    on = "cuda" if torch.cuda.is_available() else "cpu"
    width, hidden, heads, of_kv = sizes.width, sizes.hidden, sizes.heads, 2 * sizes.kv_heads * sizes.head

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.n1, self.n2 = nn.RMSNorm(width), nn.RMSNorm(width)
            self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, of_kv, bias=False)
            self.o = nn.Linear(width, width, bias=False)
            self.up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

        def forward(self, h, cos, sin):
            rows, length, _ = h.shape

            def turned(one):
                first, second = one.chunk(2, -1)
                return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(value.dtype)

            z = self.n1(h)
            query = self.q(z).view(rows, length, heads, sizes.head).transpose(1, 2)
            key, value = self.kv(z).view(rows, length, 2, sizes.kv_heads, sizes.head).unbind(2)
            key, value = key.transpose(1, 2), value.transpose(1, 2)
            seen = F.scaled_dot_product_attention(turned(query), turned(key), value, is_causal=True, enable_gqa=True)
            h = h + self.o(seen.transpose(1, 2).reshape(rows, length, width))
            up, gate = self.up(self.n2(h)).chunk(2, -1)
            return h + self.down(up * F.silu(gate))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.n = nn.Embedding(sizes.vocab, width), nn.RMSNorm(width)
            self.blocks = nn.ModuleList(Block() for _ in range(sizes.layers))
            half = sizes.head // 2
            angles = torch.outer(torch.arange(sizes.length).float(), 10000 ** (-torch.arange(half).float() / half))
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())

        def forward(self, x):
            h = self.e(x)
            for block in self.blocks:
                h = block(h, self.cos, self.sin)
            return self.n(h) @ self.e.weight.t()

    model = Model().to(on)
    x = torch.randint(0, sizes.vocab, (sizes.rows, sizes.length), device=on)
    y = torch.roll(x, -1, 1)
    optimizer, net = torch.optim.AdamW(model.parameters(), 6e-4, fused=True), torch.compile(model)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(on, torch.bfloat16):
            out = net(x)
        F.cross_entropy(out.float().view(-1, sizes.vocab), y.view(-1)).backward()
        optimizer.step()

    return _of_torch(step, sizes.rows * sizes.length, model)


PEERS: dict[str, Callable[[Sizes], dict[str, Any]]] = {
    "resnet_jax": resnet_jax,
    "lm_jax": lm_jax,
    "lm_jax_plain": partial(lm_jax, attention="plain"),
    "resnet_torch": resnet_torch,
    "lm_torch": lm_torch,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--small", action="store_true", help="sizes for CPUs, for trying this program out")
    options = parser.parse_args()
    try:
        found = PEERS[options.peer](SMALL if options.small else Sizes())
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"[:400]}
    print(json.dumps({"peer": options.peer, **found}), flush=True)


if __name__ == "__main__":
    main()
