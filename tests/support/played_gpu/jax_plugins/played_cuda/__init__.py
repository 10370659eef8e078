"""A CUDA machine for JAX that has none: CPU devices with a GPU's two names, for `PYTHONPATH`, so that children have it.

As on CUDA, a device's `platform` is "gpu", and programs are lowered for "cuda". What only CUDA can run, such as cuDNN's
kernels, cannot be played. `PLAYED_GPUS` is their number, `PLAYED_GPU_BYTES` the memory that each offers.
"""

from __future__ import annotations

import os


def initialize() -> None:
    """Registers the platform "cuda", as a plugin of JAX's does."""
    from jax._src import distributed, hardware_utils, xla_bridge
    from jaxlib import _jax, xla_client

    def make() -> xla_client.Client:
        peers = distributed.global_state
        collectives = peers.client and _jax.make_gloo_tcp_collectives(distributed_client=peers.client)
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        there = int(os.environ.get("PLAYED_GPUS", "1"))
        return xla_client.make_cpu_client(
            distributed_client=peers.client,
            node_id=peers.process_id,
            num_nodes=peers.num_processes,
            collectives=collectives,
            num_devices=there if chosen is None else chosen.count(",") + 1,
        )

    memory = int(os.environ.get("PLAYED_GPU_BYTES", str(16 * 2**30)))
    _jax.Device.platform = property(lambda device: "gpu")
    _jax.Device.memory_stats = lambda device: {"bytes_limit": memory, "bytes_in_use": 0, "peak_bytes_in_use": 0}
    _jax.Client.platform = property(lambda client: "gpu")
    _jax.Client._raw_platform = property(lambda client: "cuda")
    hardware_utils.has_visible_nvidia_gpu = lambda: True
    xla_bridge.register_backend_factory("cuda", make, priority=200, fail_quietly=False)
