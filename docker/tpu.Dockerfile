# Launcher on the TPU chips of one host. In the checkout:
#
#     docker build --file=docker/tpu.Dockerfile --tag=launcher:tpu .
#     docker run --rm --privileged --net=host --volume=runs:/runs launcher:tpu --gin_file=resnet_tpu.gin --tpu=local \
#         --model_dir=/runs/resnet --data_dir=gs://my-bucket/data
FROM python:3.11-slim-bookworm

COPY setup.py pyproject.toml constraints.txt README.md LICENSE NOTICE /src/
COPY launcher /src/launcher
COPY models /src/models
COPY gin_configs /src/gin_configs
# No constraints.txt: libtpu is the one that tensorflow-tpu asks for.
RUN python -m pip install --no-cache-dir '/src[tpu,demo,text]'
# TensorFlow finds the chips of its host by these two variables, as scripts/tpu_vm_startup.sh sets them.
ENV NEXT_PLUGGABLE_DEVICE_USE_C_API=true \
    TF_PLUGGABLE_DEVICE_LIBRARY_PATH=/usr/local/lib/python3.11/site-packages/libtpu/libtpu.so
RUN test -f "$TF_PLUGGABLE_DEVICE_LIBRARY_PATH"

ENV TFDS_DATA_DIR=/data
# As root, to which the device files of the chips belong.
WORKDIR /recipes
VOLUME ["/runs", "/data"]
ENTRYPOINT ["launcher"]
