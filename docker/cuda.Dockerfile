# Launcher on NVIDIA GPUs. The CUDA libraries come with TensorFlow; the host gives the driver. In the checkout:
#
#     docker build --file=docker/cuda.Dockerfile --tag=launcher:cuda .
#     docker run --rm --gpus=all --shm-size=8g --volume=runs:/runs launcher:cuda \
#         --gin_file=resnet_cpu.gin --model_dir=/runs/resnet
FROM python:3.11-slim-bookworm

# Training needs no rights. Volumes must let user 1000 write.
RUN useradd --uid=1000 --create-home launcher && install --directory --owner=launcher /runs /data /recipes

COPY setup.py pyproject.toml constraints.txt README.md LICENSE NOTICE /src/
COPY launcher /src/launcher
COPY models /src/models
COPY gin_configs /src/gin_configs
RUN python -m pip install --no-cache-dir --constraint=/src/constraints.txt '/src[cuda,demo,text]'

ENV TFDS_DATA_DIR=/data NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER launcher
WORKDIR /recipes
VOLUME ["/runs", "/data"]
ENTRYPOINT ["launcher"]
