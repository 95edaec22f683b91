"""An op's arguments, by what its schema says of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor


class Arguments:
    """An op's arguments as tensors and the rest, each in the order of the schema."""

    def __init__(self, op: torch._ops.OpOverload) -> None:
        arguments = op._schema.arguments
        self.names = [argument.name for argument in arguments]
        self.tensor_positions = [i for i, argument in enumerate(arguments) if "Tensor" in str(argument.type)]
        others = [i for i in range(len(arguments)) if i not in self.tensor_positions]
        self.tensor_names = [self.names[i] for i in self.tensor_positions]
        self.tensors = operator.itemgetter(*self.tensor_positions)
        self.rest = operator.itemgetter(*others)
        order = self.tensor_positions + others
        self._join = operator.itemgetter(*(order.index(i) for i in range(len(order))))
        self._no_rest = (None,) * len(others)

    def join(self, tensors: Sequence[Tensor | None], rest: tuple) -> tuple:
        return self._join((*tensors, *rest))

    def of_tensors(self, values: Sequence) -> tuple:
        """Values for the tensors, as values for all arguments: None for the rest."""
        return self._join((*values, *self._no_rest))
