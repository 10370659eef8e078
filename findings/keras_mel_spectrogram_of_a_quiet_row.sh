#!/usr/bin/env bash
# Keras: the MelSpectrogram of a quiet recording depends on which recordings are in its batch.
#
# keras.layers.MelSpectrogram gives decibels and cuts off what lies more than `top_db`, 80, below the maximum: that of the whole batch, and
# not of each recording. So a recording 80 dB below the loudest of its batch becomes one flat value, whatever is in it; alone, or at another
# place of a shuffled order, it has its features, and served one at a time it has others than in training. There is no warning. The
# page of the layer says max(10 * log10(S)) - top_db, and not over what. What helps: a top_db that cuts nothing off, such as 1000, or
# recordings made equally loud before the layer.
#
# Seen with tensorflow-cpu 2.21.0 and Keras 3.15.1 on Linux x86-64, Python 3.11, on 2026-11-28. Expected: the same features in any batch.
#
# Output seen:
#   the quiet one alone spreads by 10.7 dB, beside a loud one by 0.1, the features are up to 10.6 dB off
#   with top_db=1000 they are 0.0 dB off
#
# Ends with 0 where this is still so, with 1 where it has changed. Needs the network for pip; no accelerator.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf -- "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tensorflow-cpu==2.21.0 keras==3.15.1
TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1 "$folder/venv/bin/python" - <<'PY'
import sys

import keras
import numpy as np

sound = np.random.default_rng(0).normal(size=(2, 8000)) * [[1e-4], [1.0]]  # 80 dB apart


def features(**settings):
    layer = keras.layers.MelSpectrogram(
        num_mel_bins=8, fft_length=512, sequence_stride=256, sampling_rate=8000, **settings
    )
    return [np.asarray(layer(rows.astype("float32")))[0] for rows in (sound[:1], sound)]


alone, beside = features()
apart = np.abs(alone - beside).max()
spreads = np.ptp(alone), np.ptp(beside)
print(
    f"the quiet one alone spreads by {spreads[0]:.1f} dB, beside a loud one by {spreads[1]:.1f}, "
    f"the features are up to {apart:.1f} dB off"
)
alone, beside = features(top_db=1000.0)
uncut = np.abs(alone - beside).max()
print(f"with top_db=1000 they are {uncut:.1f} dB off")
sys.exit(not (apart > 5 and spreads[1] < 1 and uncut < 0.01))
PY
