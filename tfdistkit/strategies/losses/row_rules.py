"""Which operations of a graph keep the rows of a batch apart: each entry of the first dimension comes from one row.

An operation that is not known here counts as one that combines rows: the loss is then computed from the rows of all
replicas, which is exact for every loss, and costs a gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.strategies.sync.data_dependence import depends_on_data, is_first, is_later_size

# Each entry of the result comes from the entries of the inputs at the same place.
ELEMENTWISE = frozenset(
    (
        *("Abs", "Sign", "Neg", "Square", "Sqrt", "Rsqrt", "Reciprocal", "Inv", "Exp", "Expm1", "Log", "Log1p"),
        *("Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Atan2", "Sinh", "Cosh", "Tanh", "Asinh", "Acosh", "Atanh"),
        *("Sigmoid", "Softplus", "Softsign", "Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Erf", "Erfc", "Erfinv"),
        *("Lgamma", "Digamma", "Polygamma", "Zeta", "Betainc", "Igamma", "Igammac", "Ndtri", "BesselI0e", "BesselI1e"),
        *("Floor", "Ceil", "Round", "Rint", "Cast", "Bitcast", "Identity", "IdentityN", "Snapshot", "DeepCopy"),
        *("StopGradient", "PreventGradient", "CheckNumerics", "EnsureShape", "PlaceholderWithDefault"),
        *("IsNan", "IsInf", "IsFinite", "OnesLike", "ZerosLike", "ClipByValue", "BiasAdd", "Bucketize"),
        *("Add", "AddV2", "AddN", "Sub", "Mul", "MulNoNan", "Div", "DivNoNan", "RealDiv", "FloorDiv", "TruncateDiv"),
        *("Mod", "FloorMod", "Pow", "Maximum", "Minimum", "SquaredDifference", "Xlogy", "Xlog1py", "Xdivy"),
        *("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "ApproximateEqual"),
        *("LogicalAnd", "LogicalOr", "LogicalNot", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Invert"),
        *("Select", "SelectV2", "Real", "Imag", "Conj", "Angle", "ComplexAbs", "Complex"),
        *("StringLower", "StringUpper", "StringToNumber", "AsString", "BroadcastTo"),
    )
)

# These combine the entries along the last dimension, or the last two or more.
_LAST = {
    **dict.fromkeys(
        ("Softmax", "LogSoftmax", "TopK", "TopKV2", "InTopK", "InTopKV2", "FFT", "IFFT", "RFFT", "IRFFT"), 1
    ),
    **dict.fromkeys(("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits", "L2Normalize"), 1),
    **dict.fromkeys(("MatrixBandPart", "MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3", "Cholesky"), 2),
    **dict.fromkeys(("MatrixInverse", "MatrixDeterminant", "LogMatrixDeterminant", "Svd", "Qr", "Lu", "FFT2D"), 2),
    **dict.fromkeys(("IFFT2D", "RFFT2D", "IRFFT2D", "SelfAdjointEigV2", "MatrixSolve", "MatrixTriangularSolve"), 2),
}

# Convolutions and the like: the first input has the rows, the others have none.
_OF_IMAGES = frozenset(
    (
        *("Conv2D", "Conv3D", "DepthwiseConv2dNative", "AvgPool", "AvgPool3D", "MaxPool", "MaxPoolV2", "MaxPool3D"),
        *("LRN", "ExtractImagePatches", "ExtractVolumePatches", "SpaceToDepth", "DepthToSpace"),
        *("ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea"),
    )
)

HasRows = Sequence[bool]


def keeps_rows_apart(tensor: tf.Tensor, has_rows: HasRows) -> bool:
    """Returns whether the operation that made a tensor keeps the rows of its inputs apart.

    Args:
        tensor: Its result; its first dimension may hold rows.
        has_rows: Which inputs hold numbers of rows; the others are constants.
    """
    kind = tensor.op.type
    if kind in ELEMENTWISE:
        return all(_is_aligned(one, tensor) for one, has in zip(tensor.op.inputs, has_rows) if has)
    if kind in _LAST:
        return (tensor.op.inputs[0].shape.rank or 0) > _LAST[kind]
    if kind in _OF_IMAGES:
        return has_rows[0] and not any(has_rows[1:])
    rule = _RULES.get(kind)
    try:
        return rule is not None and rule(tensor, has_rows)
    except (TypeError, ValueError, IndexError, ArithmeticError):  # Sizes that are unknown, or zero.
        return False


def _is_aligned(one: tf.Tensor, result: tf.Tensor) -> bool:
    """Returns whether the first dimension of an input is that of the result, and not a later one or a repeated one."""
    return one.shape.rank == result.shape.rank and (one.shape[0] != 1 or result.shape[0] == 1)


def _static(tensor: tf.Tensor) -> Any:
    return tf.get_static_value(tensor, partial=True)


def _expand_dims(tensor: tf.Tensor, _: HasRows) -> bool:
    axis = _static(tensor.op.inputs[1])
    return axis is not None and int(np.ravel(axis)[0]) % tensor.shape.rank != 0


def _squeeze(tensor: tf.Tensor, _: HasRows) -> bool:
    before = tensor.op.inputs[0].shape
    axes = tensor.op.get_attr("squeeze_dims")
    if before.rank is None:
        return False
    return 0 not in [axis % before.rank for axis in axes] if axes else before[0] != 1


def _reshape(tensor: tf.Tensor, _: HasRows) -> bool:
    before, after = tensor.op.inputs[0].shape, tensor.shape
    if before.rank is None or after.rank is None:
        return False
    # Of a known size, which is a multiple of the rows; or as it was before it was made flat.
    if after[0] is not None or _is_shape(tensor.op.inputs[1]):
        return True
    if None in after[1:]:
        return _are_sizes_of_rows(tensor.op.inputs[1].op)
    # Rows are divided into parts of equal size, or stay; entries of several rows never meet.
    known = math.prod(size for size in before[1:] if size is not None)
    return bool(known % math.prod(after[1:]) == 0)


def _is_shape(sizes: tf.Tensor) -> bool:
    """Returns whether sizes are the shape of a tensor, or its first ones."""
    if sizes.op.type == "Slice" and np.all(tf.get_static_value(sizes.op.inputs[1]) == 0):
        sizes = sizes.op.inputs[0]
    return sizes.op.type == "Shape"


def _are_sizes_of_rows(sizes: Any) -> bool:
    """Returns whether sizes begin with the number of rows (`[tf.shape(x)[0], ...]`), or with -1 and other sizes."""
    if sizes.type != "Pack":
        return False
    first, *others = sizes.inputs
    if tf.get_static_value(first) == -1:
        return all(tf.get_static_value(one) is not None or is_later_size(one) for one in others)
    return first.op.type == "StridedSlice" and first.op.inputs[0].op.type == "Shape" and is_first(first.op)


def _transpose(tensor: tf.Tensor, _: HasRows) -> bool:
    order = _static(tensor.op.inputs[1])
    return order is not None and int(order[0]) == 0


def _tile(tensor: tf.Tensor, _: HasRows) -> bool:
    multiples = _static(tensor.op.inputs[1])
    return multiples is not None and multiples[0] == 1


def _pad(tensor: tf.Tensor, _: HasRows) -> bool:
    paddings = tf.get_static_value(tensor.op.inputs[1])
    return paddings is not None and not np.any(paddings[0])


def _pack(tensor: tf.Tensor, has_rows: HasRows) -> bool:
    one = next(one for one, has in zip(tensor.op.inputs, has_rows) if has)
    return one.shape.rank is not None and tensor.op.get_attr("axis") % (one.shape.rank + 1) != 0


def _unpack(tensor: tf.Tensor, _: HasRows) -> bool:
    rank = tensor.op.inputs[0].shape.rank
    return bool(rank) and tensor.op.get_attr("axis") % rank != 0


def _concat(tensor: tf.Tensor, _: HasRows) -> bool:
    axis = _static(tensor.op.inputs[-1])
    return axis is not None and bool(tensor.shape.rank) and int(axis) % tensor.shape.rank != 0


def _split(place: int) -> Callable[[tf.Tensor, HasRows], bool]:
    def rule(tensor: tf.Tensor, _: HasRows) -> bool:
        axis = _static(tensor.op.inputs[place])
        return axis is not None and bool(tensor.shape.rank) and int(axis) % tensor.shape.rank != 0

    return rule


def _matmul(tensor: tf.Tensor, has_rows: HasRows) -> bool:
    if tensor.op.type != "MatMul" and (tensor.shape.rank or 0) > 2:  # A product for each row.
        return all(_is_aligned(one, tensor) for one, has in zip(tensor.op.inputs, has_rows) if has)
    is_transposed = tensor.op.get_attr("transpose_a" if tensor.op.type == "MatMul" else "adj_x")
    return has_rows[0] and not has_rows[1] and not is_transposed


def _einsum(tensor: tf.Tensor, has_rows: HasRows) -> bool:
    inputs, _, output = tensor.op.get_attr("equation").decode().replace(" ", "").partition("->")
    firsts = {words[:1] for words, has in zip(inputs.split(","), has_rows) if has}
    return output[:1].isalpha() and firsts == {output[:1]}


def _gather(tensor: tf.Tensor, has_rows: HasRows) -> bool:
    operation = tensor.op
    if not has_rows[0]:
        return tf.get_static_value(operation.inputs[2]) == 0
    if operation.get_attr("batch_dims"):
        return True
    along_rows, indices = tf.get_static_value(operation.inputs[2]) in (None, 0), operation.inputs[1]
    return not along_rows or (indices.shape.rank != 0 and depends_on_data(indices))


def _begins_with_range(indices: tf.Tensor) -> bool:
    """Returns whether indices begin with the number of each row itself."""
    first = indices.op.inputs[0] if indices.op.type in ("Pack", "ConcatV2") else indices
    while first.op.type in ("ExpandDims", "Reshape", "Cast", "Identity"):
        first = first.op.inputs[0]
    return first.op.type in ("Range", "Where")


def _strided_slice(tensor: tf.Tensor, _: HasRows) -> bool:
    operation = tensor.op
    begins, ends, dots = (operation.get_attr(f"{name}_mask") & 1 for name in ("begin", "end", "ellipsis"))
    strides = _static(operation.inputs[3])
    if dots:  # Unless the others are all dimensions.
        given = len(strides) - 1 - operation.get_attr("new_axis_mask").bit_count()
        return bool((operation.inputs[0].shape.rank or 0) > given)
    return bool(begins and ends) and strides is not None and strides[0] == 1


def _slice(tensor: tf.Tensor, _: HasRows) -> bool:
    begins, sizes = _static(tensor.op.inputs[1]), _static(tensor.op.inputs[2])
    return begins is not None and sizes is not None and begins[0] == 0 and sizes[0] == -1


def _roll(tensor: tf.Tensor, _: HasRows) -> bool:
    axes = tf.get_static_value(tensor.op.inputs[2])
    return axes is not None and bool(tensor.shape.rank) and 0 not in np.ravel(axes) % tensor.shape.rank


_RULES: dict[str, Callable[[tf.Tensor, HasRows], bool]] = {
    "ExpandDims": _expand_dims,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    **dict.fromkeys(("Transpose", "ConjugateTranspose"), _transpose),
    "Tile": _tile,
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad"), _pad),
    "Pack": _pack,
    "Unpack": _unpack,
    "ConcatV2": _concat,
    "Split": _split(0),
    "SplitV": _split(2),
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _matmul),
    "Einsum": _einsum,
    "GatherV2": _gather,
    "StridedSlice": _strided_slice,
    "Slice": _slice,
    "Roll": _roll,
    "OneHot": lambda tensor, _: tensor.op.get_attr("axis") != 0,
    # The places that a mask keeps (`boolean_mask`), and one number out of each row, which the row itself tells.
    "Where": lambda tensor, _: True,
    "GatherNd": lambda tensor, has_rows: has_rows[1] and _begins_with_range(tensor.op.inputs[1]),
    "ReverseSequence": lambda tensor, _: tensor.op.get_attr("batch_dim") == 0,
    # Along other dimensions than the rows, which was looked at before.
    **dict.fromkeys(
        (
            *("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm", "ArgMax", "ArgMin"),
            *("ReverseV2", "Cumsum", "Cumprod", "CumulativeLogsumexp"),
        ),
        lambda tensor, _: True,
    ),
}
