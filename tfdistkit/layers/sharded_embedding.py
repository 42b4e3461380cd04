"""`ShardedEmbedding`: an embedding whose table is split into several variables."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistkit.errors import OptionError, UnsupportedError, explain
from tfdistkit.keras_adapter import table_parts
from tfdistkit.layers import initial_rows, partition
from tfdistkit.strategies import keras_patches
from tfdistkit.validation import require_integer

_SHARD_BYTES = 2**30

# Options of keras.layers.Embedding that replace its single variable.
_REFUSED = ("lora_rank", "lora_alpha", "quantization_config")

# Largest integer up to which each float dtype represents every integer exactly.
_EXACT_INTEGERS_UP_TO = {"float16": 2**11, "bfloat16": 2**8, "float32": 2**24, "float64": 2**53}

_tables = itertools.count()


@keras.saving.register_keras_serializable(package="tfdistkit", name="ShardedEmbedding")
class ShardedEmbedding(keras.layers.Layer):
    """Splits the table of a `keras.layers.Embedding` into several variables, for tables larger than one server.

    Under `parameter_server` the shards are placed on the servers in turn. A lookup reads the rows that it needs from
    the shards that hold them, and optimizers update each shard like any variable. Checkpoints do not depend on the
    number of shards: a saved table, with its optimizer state, loads into any number of shards, and into a
    `keras.layers.Embedding`, and the other way round.

    Without several servers the table is one variable, unless `shards` is given.

    Optimizers that compute on a whole variable (`Lamb`, `Adafactor`, `Muon`, and `clipnorm`) compute on each shard.

    Example:

    ```python
    table = tfdistkit.layers.ShardedEmbedding(100_000_000, 64, mask_zero=True)
    ```
    """

    built: bool

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *,
        shards: int | None = None,
        shard_bytes: int = _SHARD_BYTES,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        weights: Any = None,
        **kwargs: Any,
    ):
        """Makes the layer.

        Args:
            input_dim: Rows of the table: the largest id, plus 1.
            output_dim: Columns of the table.
            shards: The number of shards. None decides when the layer is built: one shard, or, for a table of more
                than 64 MiB under a strategy with several parameter servers, one for each server.
            shard_bytes: With `shards=None`, the largest shard in bytes: where one shard for each server would be
                larger, each server gets two, three, ...
            embeddings_initializer: A Keras initializer. Up to 1 GiB the table starts with the values of one
                `Embedding`; beyond it, with values of the same distribution.
            embeddings_regularizer: A Keras regularizer. It is applied to each shard, so it must be a sum over the
                elements, as L1 and L2 are.
            embeddings_constraint: A Keras constraint. It is applied to each shard, so it must work on elements or
                rows (`NonNeg()`, `MaxNorm(axis=1)`).
            mask_zero: Whether 0 is padding that later layers skip.
            weights: The initial table: an array of the shape `[input_dim, output_dim]`.
            **kwargs: Arguments of every Keras layer, such as `name` and `dtype`.

        Raises:
            OptionError: if an argument is out of range.
            UnsupportedError: for options of `Embedding` that need the table in one variable.
        """
        _refuse_unsupported(kwargs, embeddings_constraint)
        super().__init__(**kwargs)
        keras_patches.install()
        self.input_dim = require_integer("input_dim", input_dim)
        self.output_dim = require_integer("output_dim", output_dim)
        self.shards = None if shards is None else require_integer("shards", shards)
        self.shard_bytes = require_integer("shard_bytes", shard_bytes)
        if self.shards is not None and self.shards > self.input_dim:
            raise OptionError(
                explain(
                    "`shards` must be at most `input_dim`: each shard holds at least one row.",
                    received=f"shards={shards}, input_dim={input_dim}",
                )
            )
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.embeddings_regularizer = keras.regularizers.get(embeddings_regularizer)
        self.embeddings_constraint = keras.constraints.get(embeddings_constraint)
        self.mask_zero = mask_zero
        self.supports_masking = mask_zero
        self.autocast = False
        # XLA cannot compile shapes that depend on data, such as the number of ids in each shard.
        self.supports_jit = (self.shards or 1) == 1
        self._parts: list[Any] = []
        if weights is not None:
            self.build()
            self.set_weights(weights if isinstance(weights, list) else [weights])

    def build(self, input_shape: Any = None) -> None:
        """Makes the variables.

        Args:
            input_shape: Ignored.
        """
        if self.built:
            return
        row_bytes = self.output_dim * tf.as_dtype(self.variable_dtype).size
        count = self.shards or partition.count_shards(
            self.input_dim, row_bytes, partition.number_of_servers(), self.shard_bytes
        )
        first_rows = partition.first_rows(self.input_dim, count)
        initializers = initial_rows.initializers_of_parts(
            self.embeddings_initializer, first_rows, self.output_dim, row_bytes
        )
        table = next(_tables)
        for i, initializer in enumerate(initializers):
            variable = self.add_weight(
                name="embeddings" if count == 1 else f"embeddings_{i}",
                shape=(first_rows[i + 1] - first_rows[i], self.output_dim),
                initializer=initializer,
                regularizer=self.embeddings_regularizer,
                constraint=self.embeddings_constraint,
            )
            table_parts.mark(variable, table_parts.TablePart(table, i, count, first_rows[i]))
            self._parts.append(variable)
        self.supports_jit = count == 1
        self.built = True

    def call(self, inputs: Any) -> Any:
        """Looks up the rows of some ids.

        Args:
            inputs: The ids: a dense, ragged or sparse tensor of integers.

        Returns:
            Their rows, in the layer's compute dtype.
        """
        ids = self._as_ids(inputs)
        if len(self._parts) == 1:
            return keras.ops.cast(keras.ops.take(self._parts[0], ids, axis=0), self.compute_dtype)
        if isinstance(ids, tf.SparseTensor):
            ids = tf.sparse.to_dense(ids)  # As `Embedding` does: missing elements look up row 0.
        return _on_flat_values(lambda flat: partition.look_up(self._parts, flat, self.compute_dtype), ids)

    def _as_ids(self, inputs: Any) -> Any:
        dtype = keras.backend.standardize_dtype(inputs.dtype)
        if dtype in ("int32", "int64"):
            return inputs
        if self.input_dim - 1 > _EXACT_INTEGERS_UP_TO.get(dtype, self.input_dim):
            raise OptionError(
                explain(
                    f"Inputs of the layer {self.name!r} must be int32 or int64: {dtype} cannot represent every row id.",
                    received=f"inputs of {dtype} for {self.input_dim} rows",
                    do='Give the input a dtype: keras.Input((...), dtype="int64").',
                )
            )
        return keras.ops.cast(inputs, "int32")

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Returns a mask that is False for padding; None without `mask_zero`."""
        return keras.ops.not_equal(inputs, 0) if self.mask_zero else None

    def compute_output_shape(self, input_shape: Any) -> tuple:
        """Returns the shape of the inputs, followed by the columns of the table."""
        return (*input_shape, self.output_dim)

    def compute_output_spec(self, inputs: Any) -> Any:
        """Returns a symbolic tensor with the shape and dtype of the output of `call`."""
        shape = self.compute_output_shape(inputs.shape)
        ragged = {"ragged": True} if getattr(inputs, "ragged", False) else {}
        return keras.KerasTensor(shape, dtype=self.compute_dtype, **ragged)

    def whole_table(self) -> Any:
        """Returns the table as one tensor, like `Embedding.embeddings`; it must fit into the memory of one device."""
        return keras.ops.concatenate([keras.ops.convert_to_tensor(v) for v in self._parts], axis=0)

    def set_weights(self, weights: list[Any]) -> None:
        """Assigns the table.

        Args:
            weights: One array, as from `Embedding.get_weights()`; or one for each shard.
        """
        if len(weights) == 1 and len(self._parts) > 1:
            table_parts.assign_rows(self._parts, np.asarray(weights[0]))
        else:
            super().set_weights(weights)

    def save_own_variables(self, store: Any) -> None:
        """Writes the table as `Embedding` does."""
        if self.built:
            store["0"] = table_parts.joined(self._parts)

    def load_own_variables(self, store: Any) -> None:
        """Reads a table written by `save_own_variables`, of this class or of `Embedding`."""
        if not self.built or len(store.keys()) != 1:
            super().load_own_variables(store)  # Raises Keras's error.
        elif self.built:
            table_parts.assign_rows(self._parts, store["0"])

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the layer."""
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "shards": self.shards,
            "shard_bytes": self.shard_bytes,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "embeddings_regularizer": keras.regularizers.serialize(self.embeddings_regularizer),
            "embeddings_constraint": keras.constraints.serialize(self.embeddings_constraint),
            "mask_zero": self.mask_zero,
        }


# Keras names the weights of a layer in a file by its class. With this name, files of models with
# `ShardedEmbedding` and with `Embedding` are the same.
ShardedEmbedding.__name__ = "Embedding"


def _on_flat_values(look_up: Callable[[Any], Any], ids: Any) -> Any:
    if isinstance(ids, tf.RaggedTensor):
        return tf.ragged.map_flat_values(look_up, ids)
    return look_up(keras.ops.convert_to_tensor(ids))


def _refuse_unsupported(options: dict[str, Any], constraint: Any) -> None:
    """Removes the options of `Embedding` from `options` that a table in shards cannot support; they must be None."""
    for name in _REFUSED:
        value = options.pop(name, None)
        if value is not None:
            raise UnsupportedError(
                explain(
                    f"`{name}` must be None: it needs the table in one variable.",
                    received=f"{name}={value!r}",
                    do="Use keras.layers.Embedding, or leave it out.",
                )
            )
    axis = getattr(keras.constraints.get(constraint), "axis", None)
    if axis is not None and 0 in np.ravel(axis):
        raise UnsupportedError(
            explain(
                "`embeddings_constraint` must work on rows or elements: each shard holds some of the rows.",
                received=f"axis={axis}",
                do="Give it axis=1.",
            )
        )
