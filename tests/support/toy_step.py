"""Programs small enough to be counted by hand: one dense layer's step, as StableHLO."""

from __future__ import annotations


def dense_step(num_replicas: int, *, batch: int = 256, features: int = 1024, units: int = 512) -> str:
    """y = x w, gradient x^T y summed over all replicas, w updated in place; products in bfloat16."""
    x, w, y = f"tensor<{batch}x{features}xbf16>", f"tensor<{features}x{units}xf32>", f"tensor<{batch}x{units}xbf16>"
    wb = w.replace("f32", "bf16")
    return f"""
module @step attributes {{mhlo.num_replicas = {num_replicas} : i32, mhlo.num_partitions = 1 : i32}} {{
  func.func @main(%x: {x}, %w: {w} {{tf.aliasing_output = 1 : i32}}) -> (tensor<f32>, {w}) {{
    %wb = stablehlo.convert %w : ({w}) -> {wb}
    %y = stablehlo.dot_general %x, %wb, contracting_dims = [1] x [0] : ({x}, {wb}) -> {y} loc("dense/MatMul")
    %g = stablehlo.dot_general %x, %y, contracting_dims = [0] x [0]
       : ({x}, {y}) -> {w} loc("gradient_tape/dense/MatMul")
    %r = "stablehlo.all_reduce"(%g) <{{replica_groups = {_groups(num_replicas)}}}> ({{
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %s = stablehlo.add %a, %b : tensor<f32>
        stablehlo.return %s : tensor<f32>
    }}) : ({w}) -> {w}
    %new = stablehlo.subtract %w, %r : {w}
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %yf = stablehlo.convert %y : ({y}) -> {y.replace("bf16", "f32")}
    %l = stablehlo.reduce(%yf init: %zero) applies stablehlo.add across dimensions = [0, 1]
       : ({y.replace("bf16", "f32")}, tensor<f32>) -> tensor<f32>
    return %l, %new : tensor<f32>, {w}
  }}
}}
"""


def part_of_a_sum(num_replicas: int, *, rows: int, columns: int) -> str:
    """The part of a matrix, summed over all replicas, that a replica keeps: its share of the rows."""
    whole, part = f"tensor<{rows}x{columns}xf32>", f"tensor<{rows // num_replicas}x{columns}xf32>"
    return f"""
module @step attributes {{mhlo.num_replicas = {num_replicas} : i32, mhlo.num_partitions = 1 : i32}} {{
  func.func @main(%x: {whole}) -> {part} {{
    %r = "stablehlo.all_reduce"(%x) <{{replica_groups = {_groups(num_replicas)}}}> ({{
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %s = stablehlo.add %a, %b : tensor<f32>
        stablehlo.return %s : tensor<f32>
    }}) : ({whole}) -> {whole}
    %id = stablehlo.replica_id : tensor<ui32>
    %i = stablehlo.convert %id : (tensor<ui32>) -> tensor<i32>
    %rows = stablehlo.constant dense<{rows // num_replicas}> : tensor<i32>
    %begin = stablehlo.multiply %i, %rows : tensor<i32>
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %p = stablehlo.dynamic_slice %r, %begin, %zero, sizes = [{rows // num_replicas}, {columns}]
       : ({whole}, tensor<i32>, tensor<i32>) -> {part}
    return %p : {part}
  }}
}}
"""


def _groups(num_replicas: int) -> str:
    return f"dense<[{list(range(num_replicas))}]> : tensor<1x{num_replicas}xi64>"


def looped_product(turns: int) -> str:
    """x w w w ...: a loop of `turns` products of 512 x 512 matrices, the number of turns a constant."""
    m = "tensor<512x512xbf16>"
    return f"""
module @step attributes {{mhlo.num_replicas = 1 : i32, mhlo.num_partitions = 1 : i32}} {{
  func.func @main(%x: {m}, %w: {m}) -> {m} {{
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %end = stablehlo.constant dense<{turns}> : tensor<i32>
    %r:2 = stablehlo.while(%i = %zero, %a = %x) : tensor<i32>, {m}
      cond {{
        %go = stablehlo.compare LT, %i, %end : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %go : tensor<i1>
      }} do {{
        %p = stablehlo.dot_general %a, %w, contracting_dims = [1] x [0] : ({m}, {m}) -> {m}
        %t = stablehlo.tanh %p : {m}
        %n = stablehlo.add %i, %one : tensor<i32>
        stablehlo.return %n, %t : tensor<i32>, {m}
      }}
    return %r#1 : {m}
  }}
}}
"""


def stored_states(turns: int, *, rows: int, columns: int) -> str:
    """h = tanh(h + x[i]) in a loop that stores h and h * x[i] of every turn in float32, each where its turn stands."""
    one, all_ = f"tensor<{rows}x{columns}xf32>", f"tensor<{turns}x{rows}x{columns}xf32>"
    part = f"tensor<1x{rows}x{columns}xf32>"
    index = "tensor<i32>"
    slots = f"({all_}, {part}, {index}, {index}, {index}) -> {all_}"
    return f"""
module @step attributes {{mhlo.num_replicas = 1 : i32, mhlo.num_partitions = 1 : i32}} {{
  func.func @main(%xs: {all_}, %h: {one}) -> ({all_}, {all_}) {{
    %zero = stablehlo.constant dense<0> : {index}
    %step = stablehlo.constant dense<1> : {index}
    %end = stablehlo.constant dense<{turns}> : {index}
    %empty = stablehlo.constant dense<0.0> : {all_}
    %r:4 = stablehlo.while(%i = %zero, %s = %h, %a = %empty, %b = %empty) : {index}, {one}, {all_}, {all_}
      cond {{
        %go = stablehlo.compare LT, %i, %end : ({index}, {index}) -> tensor<i1>
        stablehlo.return %go : tensor<i1>
      }} do {{
        %x = stablehlo.dynamic_slice %xs, %i, %zero, %zero, sizes = [1, {rows}, {columns}]
           : ({all_}, {index}, {index}, {index}) -> {part}
        %xr = stablehlo.reshape %x : ({part}) -> {one}
        %sum = stablehlo.add %s, %xr : {one}
        %new = stablehlo.tanh %sum : {one}
        %product = stablehlo.multiply %new, %xr : {one}
        %n = stablehlo.reshape %new : ({one}) -> {part}
        %p = stablehlo.reshape %product : ({one}) -> {part}
        %ka = stablehlo.dynamic_update_slice %a, %n, %i, %zero, %zero : {slots}
        %kb = stablehlo.dynamic_update_slice %b, %p, %i, %zero, %zero : {slots}
        %next = stablehlo.add %i, %step : {index}
        stablehlo.return %next, %new, %ka, %kb : {index}, {one}, {all_}, {all_}
      }}
    return %r#2, %r#3 : {all_}, {all_}
  }}
}}
"""


def convolution_step(*, image: int, channels: int, filters: int, kernel: int, stride: int, batch: int = 4) -> str:
    """A convolution with padding "SAME" and the gradient of its kernel, from a cotangent of ones."""
    out = -(-image // stride)
    total = max((out - 1) * stride + kernel - image, 0)
    low, high = total // 2, total - total // 2
    x, k, y = (
        f"tensor<{batch}x{image}x{image}x{channels}xbf16>",
        f"tensor<{kernel}x{kernel}x{channels}x{filters}xbf16>",
        f"tensor<{batch}x{out}x{out}x{filters}xbf16>",
    )
    return f"""
module @step attributes {{mhlo.num_replicas = 1 : i32, mhlo.num_partitions = 1 : i32}} {{
  func.func @main(%x: {x}, %k: {k}) -> {y} {{
    %y = stablehlo.convolution(%x, %k) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f],
      window = {{stride = [{stride}, {stride}], pad = [[{low}, {high}], [{low}, {high}]]}}
      {{batch_group_count = 1 : i64, feature_group_count = 1 : i64}} : ({x}, {k}) -> {y}
    return %y : {y}
  }}
}}
"""
