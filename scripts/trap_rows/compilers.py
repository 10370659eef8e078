"""Rows about XLA's compilers, for devices that need not be there."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trap_rows import CannotTell, row

_GPU = "jax_plugins.xla_cuda12"
_H100 = (  # as XLA describes one
    "gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 "
    "shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 "
    "fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 "
    "memory_bandwidth: 3352000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 85899345920 "
    "registers_per_core_limit: 65536 registers_per_block_limit: 65536 "
    "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES } } platform_name: 'CUDA' "
    "dnn_version_info { major: 9 minor: 8 } runtime_version { major: 12 minor: 8 patch: 0 } "
    "device_description_str: 'NVIDIA H100'"
)
Shape = tuple[tuple[int, ...], str]


def _devices(platform: str, **topology: str) -> Sequence[Any]:
    from jax.experimental import topologies

    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    try:
        return topologies.get_topology_desc(platform=platform, **topology).devices
    except Exception as error:
        raise CannotTell(f"no compiler for {platform}: {str(error).splitlines()[0][:80]}") from None


def _compiled(function: Callable[..., Any], shapes: Sequence[Shape], devices: Sequence[Any], **options: str) -> Any:
    import jax

    on = jax.sharding.SingleDeviceSharding(devices[0])
    lowered = jax.jit(function).lower(*(jax.ShapeDtypeStruct(*shape, sharding=on) for shape in shapes))
    return lowered.compile(compiler_options=options)


def _for_tpu(function: Callable[..., Any], *shapes: Shape, kind: str = "v5e") -> Any:
    """What XLA makes of a function for one TPU."""
    return _compiled(function, shapes, _devices("tpu", topology_name=f"{kind}:2x2"))


def _for_gpu(function: Callable[..., Any], *shapes: Shape, **options: str) -> Any:
    """What XLA makes of a function for one H100."""
    return _compiled(function, shapes, _devices("cuda", topology="1x1x1", target_config=_H100), **options)


@row("jax", "libtpu")
def scan_cast() -> tuple[str, bool]:
    import jax

    def layers(weights: Any, x: Any) -> Any:
        def one(carry: Any, weight: Any) -> tuple[Any, None]:
            return jax.numpy.tanh(carry @ weight.astype("bfloat16")), None

        return jax.lax.scan(jax.checkpoint(one), x, weights)[0].astype("float32").sum()

    compiled = _for_tpu(jax.grad(layers), ((8, 4096, 4096), "float32"), ((512, 4096), "bfloat16"))
    share = compiled.memory_analysis().temp_size_in_bytes / (8 * 4096 * 4096 * 4)
    return f"{share:.2f} of the weights' bytes are held beside them; a layer in 16 bits is 0.06", share > 0.4


@row("jax", "libtpu")
def tpu_lookup_bytes() -> tuple[str, bool]:
    compiled = _for_tpu(_lookup, ((4_000_000, 128), "float32"), ((8192,), "int32"), kind="v6e")
    counted, table = compiled.cost_analysis()["bytes accessed"], 4_000_000 * 128 * 4
    return f"{counted / 1e9:.2f} GB counted for a lookup of 0.01 in {table / 1e9:.2f}", counted > 0.5 * table


@row("jax", "libtpu")
def tpu_lookup_text() -> tuple[str, bool]:
    compiled = _for_tpu(_lookup, ((4_000_000, 128), "float32"), ((8192,), "int32"), kind="v6e")
    try:
        return f"a text of {len(compiled.as_text())} characters", False
    except Exception as error:
        return str(error).strip().splitlines()[0][-80:], True


def _lookup(table: Any, rows: Any) -> Any:
    return table[rows]


@row("jax", "numpy")
def bfloat16_categorical() -> tuple[str, bool]:
    import jax
    import numpy as np

    logits = jax.numpy.zeros([3000], "bfloat16")
    drawn = np.asarray(jax.random.categorical(jax.random.key(0), logits, shape=(2000,)))
    share = float(np.mean(drawn < 1000))
    return f"{share:.0%} of draws among the first third of equal logits", share > 0.5


@row("jax", "libtpu", "numpy")
def float16_all_reduce() -> tuple[str, bool]:
    import jax
    import numpy as np

    devices = np.array(_devices("tpu", topology_name="v5e:2x2"))
    on = jax.sharding.PartitionSpec()
    mesh = jax.sharding.Mesh(devices, ("replica",))

    def summed(x: Any) -> Any:
        return jax.lax.psum(x, "replica")

    part = jax.jit(jax.shard_map(summed, mesh=mesh, in_specs=on, out_specs=on, check_vma=False))
    x = jax.ShapeDtypeStruct((517, 521), "float16", sharding=jax.sharding.NamedSharding(mesh, on))
    lines = part.lower(x).compile().as_text().splitlines()
    (found,) = (line.split("=")[1].split("{")[0].strip() for line in lines if " all-reduce(" in line)
    return f"an all-reduce of f16[517,521] is one of {found}", not found.startswith("f16")


@row("jax", "libtpu")
def rbg_masks() -> tuple[str, bool]:
    import jax

    def dropped(weight: Any, x: Any, seed: Any, kind: str) -> Any:
        hidden = x @ weight
        kept = jax.random.bernoulli(jax.random.wrap_key_data(seed, impl=kind), 0.9, hidden.shape)
        return (jax.numpy.where(kept, hidden, 0) @ weight.T).astype("float32").sum()

    held = {}
    for kind, words in (("rbg", 4), ("threefry2x32", 2)):
        gradient = jax.grad(lambda weight, x, seed, kind=kind: dropped(weight, x, seed, kind))
        shapes = ((1024, 4096), "bfloat16"), ((8192, 1024), "bfloat16"), ((words,), "uint32")
        held[kind] = _for_tpu(gradient, *shapes).memory_analysis().temp_size_in_bytes / (8192 * 4096)
    words_ = ", ".join(f"{kind} {number:.2f}" for kind, number in held.items())
    return f"bytes held for an element of a mask: {words_}", held["rbg"] > 0.9 + held["threefry2x32"]


@row("jax", _GPU)
def integer_labels() -> tuple[str, bool]:
    import jax

    def by(of_labels: Callable[[Any, Any], Any]) -> float:
        def loss(hidden: Any, weight: Any, labels: Any) -> Any:
            logits = (hidden @ weight).astype("float32")
            return (jax.nn.logsumexp(logits, -1) - of_labels(logits, labels)).mean()

        shapes = ((4096, 1024), "bfloat16"), ((1024, 32000), "bfloat16"), ((4096,), "int32")
        compiled = _for_gpu(jax.grad(loss, (0, 1)), *shapes)
        return compiled.memory_analysis().temp_size_in_bytes / (4096 * 32000 * 4)

    gathered = by(lambda logits, labels: jax.numpy.take_along_axis(logits, labels[:, None], -1)[:, 0])
    one_hot = by(lambda logits, labels: (logits * jax.nn.one_hot(labels, logits.shape[-1])).sum(-1))
    return f"of the logits' bytes {gathered:.2f} are held by a gather, {one_hot:.2f} by one-hot", gathered > 2 * one_hot


@row("jax", _GPU)
def dump_names() -> tuple[str, bool]:
    import jax

    def two(x: Any) -> Any:
        return jax.numpy.tanh(x * 2).sum() + jax.numpy.cos(x).max()

    with tempfile.TemporaryDirectory() as folder:
        _for_gpu(two, ((128, 128), "float32"), xla_dump_to=folder)
        (dump,) = (path.read_text() for path in Path(folder).glob("*_gpu_after_optimizations.txt"))
    numbered = re.findall(r"%[\w.]*fusion#\d", dump)
    return f"results of a fusion of two are {numbered[:2] or 'get-tuple-element'}", bool(numbered)


@row("jax", _GPU)
def stem_channels() -> tuple[str, bool]:
    import jax

    def stem(x: Any, kernel: Any) -> Any:
        return jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    padded = {}
    for dtype, short in (("float16", "f16"), ("bfloat16", "bf16")):
        text = _for_gpu(stem, ((8, 224, 224, 3), dtype), ((7, 7, 3, 64), dtype)).as_text()
        padded[dtype] = f" {short}[8,229,229,4]" in text
    return f"3 channels are padded to 4: {padded}", padded["float16"] != padded["bfloat16"]
