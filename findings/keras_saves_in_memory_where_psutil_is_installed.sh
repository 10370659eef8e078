#!/usr/bin/env bash
# Keras: with psutil installed, model.save() puts the whole .keras file together in memory; without it, on the disk.
#
# A .keras file is a zip archive with an HDF5 file in it. Of a model that takes more than half of the memory that is
# available, Keras writes the HDF5 file to the disk first; of any other, to a buffer in memory. What is available is
# psutil's word, or one GiB where psutil is not installed. So the same call takes next to nothing beside the model in one
# environment, and the size of weights and optimizer's state once more in another that has one package more, which many
# tools bring along. psutil tells of the machine's memory, not of the limit of a container. save_weights() to a
# .weights.h5 file never needs it.
# Seen with tensorflow-cpu 2.21.0, Keras 3.15.1, h5py 3.14.0 and psutil 7.2.2 on Linux x86-64, Python 3.11. Who saves a
# large model near a memory limit saves its weights instead, or leaves room for the model once more.
#
# Output seen (the largest growth of the process's memory while a model of 0.6 GB is saved, in sizes of the model):
#   without psutil: save 0.1, save_weights 0.1
#   with psutil: save 1.1, save_weights 0.1
#
# Ends with 0 where this is still so, with 1 where it has changed. Needs the network for pip, 3 GB of memory and Linux.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf -- "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tensorflow-cpu==2.21.0 keras==3.15.1 h5py==3.14.0
cat >"$folder/measure.py" <<'PY'
import importlib.util
import sys

import keras

SIZE = 16 * 4 * 3_000**2
has_psutil = importlib.util.find_spec("psutil") is not None


def kibibytes(what):
    (line,) = (line for line in open("/proc/self/status") if line.startswith(what))
    return int(line.split()[1])


def growth(write):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forgets the peak
    before = kibibytes("VmRSS")
    write()
    return round(1024 * (kibibytes("VmHWM") - before) / SIZE, 1)


layers = [keras.layers.Dense(3_000, use_bias=False, kernel_initializer="ones") for _ in range(16)]
model = keras.Sequential([keras.Input((3_000,)), *layers])
seen = growth(lambda: model.save("model.keras")), growth(lambda: model.save_weights("model.weights.h5"))
print("{} psutil: save {}, save_weights {}".format("with" if has_psutil else "without", *seen))
sys.exit(seen[1] > 0.4 or (seen[0] < 0.8 if has_psutil else seen[0] > 0.4))
PY
cd "$folder"
export TF_CPP_MIN_LOG_LEVEL=3
"$folder/venv/bin/python" measure.py
"$folder/venv/bin/pip" install -q psutil==7.2.2
"$folder/venv/bin/python" measure.py
