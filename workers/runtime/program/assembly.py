"""Makes a program for `workers.native.machine` from a recording, for any number of rows.

All operations between products and attention must treat rows independently. A value is described by the address of each
of its elements (the row, and the place in a register of the row), so torch's own views of such addresses say what a
view of the value is. Knows torch's operators and the machine's codes; must not know models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from workers.native import arithmetic, machine
from workers.native.matrix import Matrix
from workers.runtime.program import layers, sums
from workers.runtime.program.codes import NO_OPERAND, Codes
from workers.runtime.program.places import Unsupported, by_row, row_dim_of
from workers.runtime.program.program import Program, tables_of
from workers.runtime.program.recorder import (
    NUM_ROWS,
    Attended,
    Exchanged,
    Operation,
    Product,
    Recording,
    tensors_in,
)
from workers.runtime.program.values import ALL, CONSTANTS, WANTED, Register, Stretch, Value, filling, space_of

_aten: Any = torch.ops.aten
_VIEWS: Final = {
    "alias", "detach", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "slice", "select", "split",
    "split_with_sizes", "unbind", "chunk", "unflatten", "movedim", "narrow",
}  # fmt: skip
_RESHAPES: Final = {"view", "_unsafe_view", "reshape", "_reshape_alias"}
_SAME: Final = {"clone", "contiguous", "dropout", "native_dropout", "lift_fresh"}
_BINARY: Final = {"add": arithmetic.ADD, "sub": arithmetic.SUB, "mul": arithmetic.MUL, "div": arithmetic.DIV}
_IN_PLACE: Final = {f"{name}_" for name in _BINARY}
_UNARY: Final = {
    "rsqrt": arithmetic.RSQRT, "sqrt": arithmetic.SQRT, "silu": arithmetic.SILU, "tanh": arithmetic.TANH,
    "exp": arithmetic.EXP, "sigmoid": arithmetic.SIGMOID, "relu": arithmetic.RELU,
}  # fmt: skip


class Assembler:
    """Turns operations into codes, one by one."""

    def __init__(self, recording: Recording, matrix_of: Callable[[Any], Matrix]) -> None:
        self._recording = recording
        self._matrix_of = matrix_of
        self._codes = Codes()
        self._values: dict[int, Value] = {}
        self._of_positions: dict[int, Tensor] = {id(recording.positions): recording.positions}
        self._position_operations: list[Operation] = []
        self._tables: list[tuple[list[int], Tensor, int]] = []
        self._looked_up: dict[int, Value] = {}
        self._products: list[tuple[list[int], Matrix]] = []
        self._attended: list[tuple[list[int], int]] = []
        self._kept: list[Any] = []
        self._rows_of_ids: Tensor | None = None
        self._given: Register | None = None
        if (given := recording.given) is not None:
            self._given = Register(given.shape[1], ALL)
            self._values[id(given)] = filling(self._given, given.shape, 0)

    def program(self) -> Program:
        """Raises: Unsupported."""
        for operation in self._recording.operations:
            if isinstance(operation, Product):
                self._product(operation)
            elif isinstance(operation, Attended):
                self._attend(operation)
            elif isinstance(operation, Exchanged):
                rows = self._values[id(operation.part)]
                self._values[id(operation.result)] = layers.exchange(self._codes, operation, rows)
            else:
                self._operation(operation)
        logits = self._recording.logits
        value = self._values.get(id(logits))
        if logits is None or value is None or value.register.space != WANTED:
            raise Unsupported("its logits are not those of the wanted rows")
        states = [self._stretch(state) for state in self._recording.states]
        return self._finished(self._codes.contiguous(value, at_start=True), logits.shape[-1], states)

    def _finished(self, logits: Value, vocab_size: int, states: Sequence[Stretch]) -> Program:
        tables = tables_of(self._codes, [logits.register, *(state.register for state in states)])
        index_of = tables.index_of
        return Program(
            stages=tables.stages,
            codes=tables.codes,
            constants=self._codes.constants,
            widths=tables.widths,
            logits=logits.register,
            vocab_size=vocab_size,
            given=self._given,
            rows_of_ids=None if self._rows_of_ids is None else self._rows_of_ids.numpy(),
            states=states,
            tables=[(index_of[id(code)], tensor, dim) for code, tensor, dim in self._tables],
            positions=self._recording.positions,
            of_positions=self._position_operations,
            products=[(index_of[id(code)], matrix) for code, matrix in self._products],
            attended=[(index_of[id(code)], layer) for code, layer in self._attended],
            kept=self._kept,
        )

    def _stretch(self, state: Tensor) -> Stretch:
        """Place of a hidden state.  # [T, hidden]"""
        value = self._values.get(id(state))
        if value is None or value.register.space != ALL:
            raise Unsupported("its hidden states are not those of all rows")
        value = self._codes.contiguous(value)
        return Stretch(value.register, int(by_row(value.addresses)[0]), state.shape[-1])

    def _operation(self, operation: Operation) -> None:
        name = operation.function._schema.name.removeprefix("aten::")
        tensors = tensors_in(operation.args)
        if not any(id(each) in self._values or each is self._recording.ids for each in tensors):
            if any(id(each) in self._of_positions for each in tensors):
                self._note_position(operation)
            return  # constants are what torch has computed
        if any(each is self._recording.ids for each in tensors):
            self._ids_operation(name, operation)
        elif name in _VIEWS:
            self._view(operation)
        elif name in _RESHAPES:
            self._reshape(operation)
        elif name in _SAME:
            self._values[id(operation.result)] = self._values[id(operation.args[0])]
        else:
            handler = getattr(self, f"_{name.lstrip('_')}", None)
            if handler is not None:
                handler(operation)
            elif name in _IN_PLACE and self._is_unshared(operation.result):
                self._binary(_BINARY[name[:-1]], operation)
            elif name in _BINARY:
                self._binary(_BINARY[name], operation)
            elif name in _UNARY:
                self._unary(_UNARY[name], operation)
            else:
                raise Unsupported(f"{name} is not an operation on single rows")

    def _is_unshared(self, tensor: Tensor) -> bool:
        """Whether no other tensor may be a view of this one, so that it can be changed in place."""
        register = self._values[id(tensor)].register
        return sum(value.register is register for value in self._values.values()) == 1

    def _note_position(self, operation: Operation) -> None:
        if operation.function is _aten._local_scalar_dense.default:
            raise Unsupported("its code depends on the positions of a step")
        self._position_operations.append(operation)
        self._of_positions |= {id(each): each for each in tensors_in([operation.result])}

    def _ids_operation(self, name: str, operation: Operation) -> None:
        if name in _VIEWS | _RESHAPES | _SAME and operation.result.numel() == NUM_ROWS:
            self._recording.ids = operation.result  # [1, T], then only that is used
            return
        if name == "index" and self._rows_of_ids is None:  # a rank has some rows of the embedding
            self._rows_of_ids, self._recording.ids = operation.args[0], operation.result
            return
        if name != "embedding":
            raise Unsupported(f"it computes {name} of token ids")
        weight, result = operation.args[0].detach(), operation.result
        value, code = layers.lookup(self._codes, result, result.dim() - 2, by_position=False)
        code[8:] = weight.data_ptr(), weight.stride(0) * weight.element_size(), int(weight.dtype == torch.bfloat16)
        self._kept.append(weight)
        self._values[id(result)] = value

    def _view(self, operation: Operation) -> None:
        value = self._values[id(operation.args[0])]
        found = operation.function(value.addresses, *operation.args[1:], **operation.kwargs)
        results = operation.result if isinstance(operation.result, (list, tuple)) else [operation.result]
        for result, addresses in zip(results, found if isinstance(found, (list, tuple)) else [found], strict=True):
            self._values[id(result)] = Value(value.register, addresses)

    def _reshape(self, operation: Operation) -> None:
        value = self._values[id(operation.args[0])]
        self._values[id(operation.result)] = Value(value.register, value.addresses.reshape(operation.result.shape))

    def _to_copy(self, operation: Operation) -> None:
        source, result = operation.args[0], operation.result
        if result.dtype == source.dtype or result.dtype == torch.float32:
            self._values[id(result)] = self._values[id(source)]
        elif result.dtype == torch.bfloat16:
            self._unary(arithmetic.COPY, operation)
        else:
            raise Unsupported(f"it computes in {result.dtype}")

    def _binary(self, code: int, operation: Operation) -> None:
        if operation.kwargs.get("alpha", 1) != 1 or "rounding_mode" in operation.kwargs:
            raise Unsupported("it scales a sum, or rounds a quotient")
        self._bind(operation.result, code, *operation.args[:2])

    def _unary(self, code: int, operation: Operation) -> None:
        self._bind(operation.result, code, operation.args[0])

    def _gelu(self, operation: Operation) -> None:
        is_tanh = operation.kwargs.get("approximate", "none") == "tanh"
        self._unary(arithmetic.GELU_TANH if is_tanh else arithmetic.GELU, operation)

    def _neg(self, operation: Operation) -> None:
        self._bind(operation.result, arithmetic.MUL, operation.args[0], -1.0)

    def _rsub(self, operation: Operation) -> None:
        self._bind(operation.result, arithmetic.SUB, operation.args[1], operation.args[0])

    def _pow(self, operation: Operation) -> None:
        base, exponent = operation.args[:2]
        if exponent == 2:
            self._bind(operation.result, arithmetic.MUL, base, base)
        elif exponent == 3:
            value = self._values[id(base)]
            square = self._codes.computed(arithmetic.MUL, value, value)
            self._bind_value(operation.result, arithmetic.MUL, [square, value])
        else:
            raise Unsupported(f"it computes the power {exponent}")

    def _mean(self, operation: Operation) -> None:
        value, share = self._total(operation), self._codes.constant(1 / operation.args[0].shape[-1])
        self._bind_value(operation.result, arithmetic.MUL, [value, share])

    def _sum(self, operation: Operation) -> None:
        self._bind_value(operation.result, arithmetic.COPY, [self._total(operation)])

    def _total(self, operation: Operation) -> Value:
        source, dims, *rest = operation.args
        keeps = bool(rest and rest[0]) or operation.kwargs.get("keepdim", False)
        return sums.total(self._codes, self._values[id(source)], dims, keeps=keeps)

    def _native_layer_norm(self, operation: Operation) -> None:
        source, shape, weight, bias, epsilon = operation.args
        if len(shape) != 1:
            raise Unsupported("it normalizes over more than the last dimension")
        scale, shift = (None if each is None else self._operand(each) for each in (weight, bias))
        found = sums.layer_norm(self._codes, self._values[id(source)], scale, shift, epsilon)
        self._bind_value(operation.result[0], arithmetic.COPY, [found])

    def _cat(self, operation: Operation) -> None:
        parts, result = [part for part in operation.args[0] if part.numel()], operation.result
        dim = (operation.args[1] if len(operation.args) > 1 else operation.kwargs.get("dim", 0)) % result.dim()
        values = [self._operand(part) for part in parts]
        space, row_dim = space_of(values), max(row_dim_of(value.addresses) for value in values)
        register = Register(prod(result.shape) // result.shape[row_dim], space)
        out = filling(register, result.shape, row_dim)
        first = 0
        for part, value in zip(parts, values, strict=True):
            place = out.addresses.narrow(dim, first, part.shape[dim])
            self._codes.write(arithmetic.COPY, Value(register, place), [value], rounds=False)
            first += part.shape[dim]
        self._values[id(result)] = out

    def _constant_pad_nd(self, operation: Operation) -> None:
        source, (before, after, *others), *value = operation.args
        if before or any(others) or any(value):
            raise Unsupported("it pads more than the ends of rows with zeros")
        parts = [source, torch.zeros(*[1] * (source.dim() - 1), after)]
        self._cat(Operation(operation.function, [parts, -1], {}, operation.result))

    def _index(self, operation: Operation) -> None:
        source, indices = operation.args
        chosen = [index for index in indices if index is not None]
        if len(chosen) != 1 or chosen[0].shape != self._recording.wanted.shape:
            raise Unsupported("it picks elements by index")
        value, result = self._values[id(source)], operation.result
        row_dim = row_dim_of(value.addresses)
        if indices.index(chosen[0]) != row_dim or not torch.equal(chosen[0], self._recording.wanted):
            raise Unsupported("it picks elements of a row by index")
        rows = self._codes.contiguous(value)
        start = int(by_row(rows.addresses)[0])
        register = Register(prod(result.shape) // result.shape[row_dim], WANTED)
        code = [arithmetic.COPY, 1, register.width, 0, 0, 0, 0, machine.OF_ALL_ROWS, 0, 0, 0, 1, *NO_OPERAND]
        self._codes.emit(machine.ROWS, WANTED, code, {3: register, 8: rows.register}, [rows.register], {8: start})
        self._values[id(result)] = filling(register, result.shape, row_dim)

    def _product(self, product: Product) -> None:
        rows, matrix = self._values[id(product.rows)], self._matrix_of(product.layer)
        self._values[id(product.result)], code = layers.product(self._codes, product, rows, matrix)
        self._products.append((code, matrix))

    def _attend(self, attended: Attended) -> None:
        given = (self._operand(each) for each in (attended.query, attended.key, attended.value))
        self._values[id(attended.result)], code = layers.attention(self._codes, attended, *given)
        self._attended.append((code, attended.layer))

    def _bind(self, result: Tensor, code: int, *operands: Any) -> None:
        self._bind_value(result, code, [self._operand(each) for each in operands])

    def _bind_value(self, result: Tensor, code: int, operands: Sequence[Value]) -> None:
        if not result.numel():  # the part of a head that partial rotary embeddings leave as it is
            self._values[id(result)] = Value(operands[0].register, operands[0].addresses.expand(result.shape))
            return
        rounds = result.dtype == torch.bfloat16
        self._values[id(result)] = self._codes.make(code, operands, result.shape, rounds=rounds)
        if result.dtype not in (torch.bfloat16, torch.float32):
            raise Unsupported(f"it computes in {result.dtype}")

    def _operand(self, operand: Any) -> Value:
        if not isinstance(operand, Tensor):
            return self._codes.constant(float(operand))
        if id(operand) in self._values:
            return self._values[id(operand)]
        if id(operand) in self._of_positions:
            return self._look_up(operand)
        numbers = operand.detach().float().contiguous().numpy()
        start = self._codes.constant_vector(numbers.reshape(-1))
        addresses = torch.arange(start, start + numbers.size).view(operand.shape)
        return Value(Register(numbers.size, CONSTANTS), addresses)

    def _look_up(self, tensor: Tensor) -> Value:
        """A register with a row's part of a tensor that depends on positions alone."""
        if id(tensor) not in self._looked_up:
            row_dims = [dim for dim, size in enumerate(tensor.shape) if size == NUM_ROWS]
            if len(row_dims) != 1 or not tensor.dtype.is_floating_point:
                raise Unsupported("what it computes from positions is no number for each row")
            value, code = layers.lookup(self._codes, tensor, row_dims[0], by_position=True)
            self._tables.append((code, tensor, row_dims[0]))
            self._looked_up[id(tensor)] = value
        return self._looked_up[id(tensor)]
