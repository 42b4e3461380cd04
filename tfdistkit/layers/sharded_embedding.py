"""`ShardedEmbedding`: an embedding whose table lies in several variables."""

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

_SHARD_BYTES = 2**30

# Options of keras.layers.Embedding that change what its one variable is.
_REFUSED = ("lora_rank", "lora_alpha", "quantization_config")

# Up to here a float tells every integer from its neighbours.
_FLOATS_TELL_APART = {"float16": 2**11, "bfloat16": 2**8, "float32": 2**24, "float64": 2**53}

_tables = itertools.count()


@keras.saving.register_keras_serializable(package="tfdistkit", name="ShardedEmbedding")
class ShardedEmbedding(keras.layers.Layer):
    """`keras.layers.Embedding` whose table lies in several variables, for tables larger than one server.

    Under `parameter_server` each part lies on another server. A lookup reads the rows that it needs from the
    parts that have them, and optimizers update the parts as they update any variable. Files do not know of the
    parts: what is saved is one table, with the optimizer's state of one, which loads into any number of parts,
    and into a model with `keras.layers.Embedding` in its place; and the other way round.

    Without several servers the table is one variable, unless `shards` says otherwise.

    Optimizers that look at a variable as a whole (`Lamb`, `Adafactor`, `Muon`, and `clipnorm`) look at each part.

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
            input_dim: Rows of the table: the largest number that is looked up, plus 1.
            output_dim: Columns of the table.
            shards: In how many parts the table lies. None decides when the layer is built: one part, or, for a
                table of more than 64 MiB under a strategy with several parameter servers, one for each of them.
            shard_bytes: With `shards=None`, the largest part in bytes: a table for which one part for each
                server would be larger gets two, three, ... for each.
            embeddings_initializer: An initializer of Keras. Up to 1 GiB the table starts with the numbers of one
                `Embedding`; beyond it, with numbers of the same distribution.
            embeddings_regularizer: A regularizer of Keras. It sees each part, so it has to be a sum over the
                elements, as L1 and L2 are.
            embeddings_constraint: A constraint of Keras. It sees each part, so it has to work on elements or rows
                (`NonNeg()`, `MaxNorm(axis=1)`).
            mask_zero: Whether 0 is padding that later layers skip.
            weights: What the table starts with: an array of the shape `[input_dim, output_dim]`.
            **kwargs: What every layer of Keras takes, such as `name` and `dtype`.

        Raises:
            OptionError: if a number cannot be right.
            UnsupportedError: for options of `Embedding` that need the table in one variable.
        """
        _refuse_unsupported(kwargs, embeddings_constraint)
        super().__init__(**kwargs)
        keras_patches.install()
        self.input_dim = _positive("input_dim", input_dim)
        self.output_dim = _positive("output_dim", output_dim)
        self.shards = None if shards is None else _positive("shards", shards)
        self.shard_bytes = _positive("shard_bytes", shard_bytes)
        if self.shards is not None and self.shards > self.input_dim:
            raise OptionError(
                explain(
                    "`shards` is larger than the table.",
                    received=f"shards={shards}, input_dim={input_dim}",
                    expected="at least one row for each part",
                )
            )
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.embeddings_regularizer = keras.regularizers.get(embeddings_regularizer)
        self.embeddings_constraint = keras.constraints.get(embeddings_constraint)
        self.mask_zero = mask_zero
        self.supports_masking = mask_zero
        self.autocast = False
        # XLA compiles nothing whose shape depends on data, as the rows that each part is asked for do.
        self.supports_jit = (self.shards or 1) == 1
        self._parts: list[Any] = []
        if weights is not None:
            self.build()
            self.set_weights(weights if isinstance(weights, list) else [weights])

    def build(self, input_shape: Any = None) -> None:
        """Makes the variables.

        Args:
            input_shape: Not looked at.
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
        """Looks rows up.

        Args:
            inputs: Row numbers: a dense, ragged or sparse tensor of integers.

        Returns:
            Their rows, of the layer's compute dtype.
        """
        ids = self._as_ids(inputs)
        if len(self._parts) == 1:
            return keras.ops.cast(keras.ops.take(self._parts[0], ids, axis=0), self.compute_dtype)
        if isinstance(ids, tf.SparseTensor):
            ids = tf.sparse.to_dense(ids)  # As `Embedding` does: where nothing is given, it looks row 0 up.
        return _on_flat_values(lambda flat: partition.look_up(self._parts, flat, self.compute_dtype), ids)

    def _as_ids(self, inputs: Any) -> Any:
        dtype = keras.backend.standardize_dtype(inputs.dtype)
        if dtype in ("int32", "int64"):
            return inputs
        if self.input_dim - 1 > _FLOATS_TELL_APART.get(dtype, self.input_dim):
            raise OptionError(
                explain(
                    f"Numbers of {dtype} cannot name each row of the table of the layer {self.name!r}.",
                    received=f"inputs of {dtype} for {self.input_dim} rows",
                    expected="inputs of int32 or int64",
                    do='Give the input a dtype: keras.Input((...), dtype="int64").',
                )
            )
        return keras.ops.cast(inputs, "int32")

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Returns which inputs are no padding; None without `mask_zero`."""
        return keras.ops.not_equal(inputs, 0) if self.mask_zero else None

    def compute_output_shape(self, input_shape: Any) -> tuple:
        """Returns the shape of the inputs with the columns of the table behind it."""
        return (*input_shape, self.output_dim)

    def compute_output_spec(self, inputs: Any) -> Any:
        """Returns what `call` returns, as a symbolic tensor."""
        shape = self.compute_output_shape(inputs.shape)
        ragged = {"ragged": True} if getattr(inputs, "ragged", False) else {}
        return keras.KerasTensor(shape, dtype=self.compute_dtype, **ragged)

    def whole_table(self) -> Any:
        """Returns the table as one tensor, as `Embedding.embeddings` is: for tables that fit into one place."""
        return keras.ops.concatenate([keras.ops.convert_to_tensor(v) for v in self._parts], axis=0)

    def set_weights(self, weights: list[Any]) -> None:
        """Sets the table.

        Args:
            weights: One array, as of `Embedding.get_weights()`; or one for each part.
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
        """Reads what `save_own_variables` wrote, here or in an `Embedding`."""
        if not self.built or len(store.keys()) != 1:
            super().load_own_variables(store)  # It says what is wrong.
        elif self.built:
            table_parts.assign_rows(self._parts, store["0"])

    def get_config(self) -> dict[str, Any]:
        """Returns what the layer is made from."""
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


# In a file Keras calls the weights of a layer in a Sequential or functional model by its class. With this name
# the files of models with `ShardedEmbedding` and with `Embedding` are the same.
ShardedEmbedding.__name__ = "Embedding"


def _on_flat_values(look_up: Callable[[Any], Any], ids: Any) -> Any:
    if isinstance(ids, tf.RaggedTensor):
        return tf.ragged.map_flat_values(look_up, ids)
    return look_up(keras.ops.convert_to_tensor(ids))


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value <= 0:
        raise OptionError(
            explain(f"`{name}` is no number of it.", received=f"{name}={value!r}", expected="a positive integer")
        )
    return int(value)


def _refuse_unsupported(options: dict[str, Any], constraint: Any) -> None:
    """Takes options of `Embedding` out of `options`, which have no meaning here and must be left out or None."""
    for name in _REFUSED:
        value = options.pop(name, None)
        if value is not None:
            raise UnsupportedError(
                explain(
                    f"`{name}` needs the table in one variable.",
                    received=f"{name}={value!r}",
                    do="Take keras.layers.Embedding, or leave it out.",
                )
            )
    axis = getattr(keras.constraints.get(constraint), "axis", None)
    if axis is not None and 0 in np.ravel(axis):
        raise UnsupportedError(
            explain(
                "`embeddings_constraint` looks along the whole table, of which each variable has a part.",
                received=f"axis={axis}",
                expected="a constraint of rows or elements",
                do="Give it axis=1.",
            )
        )
