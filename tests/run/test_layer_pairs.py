"""Which stored layer is which of the model's: by name, by order only where that can mean one thing."""

import keras
import pytest

from launcher.run.start.start_comparison import Layer, counted_base, pair


def side(*layers, base="dense"):
    """Layers of one weight each, given as "path:width"; those named like `dense_3` are counted up from the base."""
    made = []
    for layer in layers:
        path, _, width = layer.partition(":")
        chain = tuple(path.split("/"))
        counted = base if counted_base(chain[-1], base.title()) else None
        made.append(Layer(chain, counted, {"kernel": (int(width or 1), 1)}))
    return made


def joined(pairs):
    return {"/".join(mine): "/".join(theirs) for mine, theirs in pairs.items()}


CASES = {
    "names of one's own": (["a", "b"], ["b", "a"], {"a": "a", "b": "b"}, []),
    "counted alike": (["dense", "dense_1"], ["dense", "dense_1"], {"dense": "dense", "dense_1": "dense_1"}, []),
    "counted on": (["dense_7", "dense_8"], ["dense", "dense_1"], {"dense_7": "dense", "dense_8": "dense_1"}, 2),
    "by number, not by letter": (
        ["dense_10:2", "dense_9"],
        ["dense", "dense_1:2"],
        {"dense_9": "dense", "dense_10": "dense_1"},
        2,
    ),
    "a name that means another layer": (
        ["dense", "dense_1"],
        ["dense_1", "dense_2"],
        {"dense": "dense_1", "dense_1": "dense_2"},
        2,
    ),
    "one more at the end": (["dense", "dense_1"], ["dense"], {"dense": "dense"}, []),
    "another number of them": (["dense_1", "dense_2"], ["dense"], {}, []),
    "other shapes": (["dense_1:3", "dense_2:4"], ["dense:4", "dense_1:3"], {}, []),
    "a part of a larger model": (["base/a", "base/b", "head"], ["a", "b"], {"base/a": "a", "base/b": "b"}, []),
    "taken out of a larger model": (["a"], ["net/base/a", "net/head"], {"a": "net/base/a"}, []),
    "two that it could be": (["a"], ["one/a", "two/a"], {}, []),
    "twins elsewhere": (["block_1/query", "block_2/query"], ["block_1/query"], {"block_1/query": "block_1/query"}, []),
    "weights of the model itself": ([""], [""], {"": ""}, []),
}


@pytest.mark.parametrize("name", CASES)
def test_layers_are_paired(name):
    mine, theirs, expected, by_order = CASES[name]
    pairs, found_by_order = pair(side(*mine), side(*theirs))
    assert joined(pairs) == expected
    assert len(found_by_order) == (by_order or 0)


def test_what_may_be_without_a_counterpart_does_not_count_in_an_order():
    mine, theirs = side("dense_4", "dense_5:9"), side("dense", "dense_1:7")
    assert pair(mine, theirs)[0] == {}
    assert joined(pair(mine, theirs, exempt=[("dense_5",), ("dense_1",)])[0]) == {"dense_4": "dense"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.layers.Dense(1),
        lambda: keras.layers.Conv2D(1, 1),
        lambda: keras.layers.BatchNormalization(),
        lambda: keras.layers.LSTM(1),
        lambda: keras.layers.ReLU(),
        lambda: keras.layers.MultiHeadAttention(1, 1),
        lambda: keras.layers.Conv1DTranspose(1, 1),
    ],
)
def test_names_that_keras_counted_up_are_told_from_others(make):
    layer, another = make(), make()
    for one in (layer, another):
        assert counted_base(one.name, type(one).__name__) is not None
    assert counted_base("base", type(layer).__name__) is None
