# Launcher on NVIDIA's container of TensorFlow, whose build is left as it is: for GPUs that TensorFlow's own wheels have
# no kernels for, such as Blackwell, and where NVIDIA's libraries are wanted. In the checkout:
#
#     docker build --file=docker/nvidia.Dockerfile --tag=launcher:nvidia .
#     docker run --rm --gpus=all --shm-size=8g --volume=runs:/runs launcher:nvidia \
#         --gin_file=resnet_cpu.gin --model_dir=/runs/resnet
#
# 25.02 is the last release that is known: TensorFlow 2.17.0+nv25.2, Python 3.12, CUDA 12.8. This project has not built it.
FROM nvcr.io/nvidia/tensorflow:25.02-tf2-py3

# Training needs no rights. Volumes must let user 1000 write, whom Ubuntu 24.04 may have already.
RUN useradd --non-unique --uid=1000 --create-home launcher && install --directory --owner=launcher /runs /data /recipes

COPY setup.py pyproject.toml README.md LICENSE NOTICE /src/
COPY launcher /src/launcher
COPY models /src/models
COPY gin_configs /src/gin_configs
# What TensorFlow was built with stays; Keras (3.3) and others are renewed, whatever the container's PIP_CONSTRAINT says.
RUN python -m pip list --format=freeze | grep -E '^(tensorflow|numpy|protobuf|h5py|ml[-_]dtypes|grpcio)==' >/src/vendor.txt \
    && grep '^tensorflow==.*nv' /src/vendor.txt
RUN PIP_CONSTRAINT=/src/vendor.txt python -m pip install --no-cache-dir --constraint=/src/vendor.txt '/src[demo,text]'

# Keras 3, also where the container is set to Keras 2.
ENV TF_USE_LEGACY_KERAS=0 TFDS_DATA_DIR=/data
USER launcher
WORKDIR /recipes
VOLUME ["/runs", "/data"]
ENTRYPOINT ["launcher"]
