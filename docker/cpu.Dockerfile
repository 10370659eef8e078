# Launcher on CPUs. In the checkout:
#
#     docker build --file=docker/cpu.Dockerfile --tag=launcher:cpu .
#     docker run --rm --volume=runs:/runs launcher:cpu --gin_file=resnet_cpu.gin --model_dir=/runs/resnet
FROM python:3.11-slim-bookworm

# Training needs no rights. Volumes must let user 1000 write.
RUN useradd --uid=1000 --create-home launcher && install --directory --owner=launcher /runs /data /recipes

COPY setup.py pyproject.toml constraints.txt README.md LICENSE NOTICE /src/
COPY launcher /src/launcher
COPY models /src/models
COPY gin_configs /src/gin_configs
RUN python -m pip install --no-cache-dir --constraint=/src/constraints.txt '/src[cpu,demo,text]'

ENV TFDS_DATA_DIR=/data
USER launcher
WORKDIR /recipes
VOLUME ["/runs", "/data"]
ENTRYPOINT ["launcher"]
