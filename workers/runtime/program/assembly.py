"""Makes a program for `workers.native.machine` from a recording, for any number of rows.

All operations between products and attention must treat rows independently. A value is described by the address of each
of its elements (the row, and the place in a register of the row), so torch's own views of such addresses say what a
view of the value is. Knows torch's operators and the machine's codes; must not know models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.native import arithmetic, machine
from workers.native.matrix import Matrix
from workers.native.vectors import PANEL
from workers.runtime.program.places import ROW, Part, Unsupported, by_row, row_dim_of, split
from workers.runtime.program.recorder import NUM_ROWS, Attended, Operation, Product, Recording

ALL, WANTED = range(2)
"""Kinds of rows: all rows of a step, and those whose logits are wanted."""
MAX_PARTS: Final = 64
"""Codes that one operation may take."""
_aten: Any = torch.ops.aten
_VIEWS: Final = {
    "alias", "detach", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "slice", "select", "split",
    "split_with_sizes", "unbind", "chunk", "unflatten", "movedim", "narrow",
}  # fmt: skip
_RESHAPES: Final = {"view", "_unsafe_view", "reshape", "_reshape_alias"}
_SAME: Final = {"clone", "contiguous", "dropout", "native_dropout", "lift_fresh"}
_BINARY: Final = {"add": arithmetic.ADD, "sub": arithmetic.SUB, "mul": arithmetic.MUL, "div": arithmetic.DIV}
_UNARY: Final = {
    "rsqrt": arithmetic.RSQRT, "sqrt": arithmetic.SQRT, "silu": arithmetic.SILU, "tanh": arithmetic.TANH,
    "exp": arithmetic.EXP, "sigmoid": arithmetic.SIGMOID, "relu": arithmetic.RELU,
}  # fmt: skip


@dataclass(eq=False, slots=True)
class Register:
    """A stretch of numbers that each row has."""

    width: int
    space: int
    stage: int = -1
    """Last stage that writes it."""
    first_stage: int = -1
    last_stage: int = -1
    """Last stage that reads it."""
    offset: int = -1


@dataclass(slots=True)
class Value:
    """A tensor of the recording: where each of its elements is."""

    register: Register
    addresses: Tensor


@dataclass(frozen=True, slots=True)
class Stretch:
    """Numbers of a row that follow each other in a register."""

    register: Register
    start: int
    width: int


@dataclass(slots=True)
class Stage:
    """Codes that all threads run before they wait for each other."""

    kind: int
    space: int
    codes: list[tuple[list[int], dict[int, Register]]] = field(default_factory=list)
    """Codes, and the registers whose offset and width belong at a column and the next one."""


@dataclass(slots=True)
class Program:
    """What `machine.run` needs of a model, except a step's rows."""

    stages: NDArray[np.int64]
    codes: NDArray[np.int64]
    constants: NDArray[np.float32]
    widths: tuple[int, int]
    """Numbers that a row, and a wanted row, has in all registers."""
    logits: Register
    vocab_size: int
    states: Sequence[Stretch]
    """The hidden states of each tapped layer, of all rows."""
    tables: Sequence[tuple[int, Tensor, int]]
    """Codes that look up a position, the recorded tensor that they need, and its dimension of rows."""
    positions: Tensor
    of_positions: Sequence[Operation]
    """Operations that compute these tensors from positions."""
    products: Sequence[tuple[int, Matrix]]
    """The code and the matrix of each product."""
    attended: Sequence[tuple[int, int]]
    """The code and the layer of each attention."""
    kept: Sequence[Any]
    """Tensors whose addresses are in the codes."""


class Assembler:
    """Turns operations into codes, one by one."""

    def __init__(self, recording: Recording, matrix_of: Callable[[Any], Matrix]) -> None:
        self._recording = recording
        self._matrix_of = matrix_of
        self._values: dict[int, Value] = {}
        self._of_positions: dict[int, Tensor] = {id(recording.positions): recording.positions}
        self._position_operations: list[Operation] = []
        self._stages: list[Stage] = []
        self._constants: list[NDArray[np.float32]] = []
        self._num_constants = 0
        self._tables: list[tuple[list[int], Tensor, int]] = []
        self._looked_up: dict[int, Value] = {}
        self._products: list[tuple[list[int], Matrix]] = []
        self._attended: list[tuple[list[int], int]] = []
        self._kept: list[Any] = []

    def program(self) -> Program:
        """Raises: Unsupported."""
        for operation in self._recording.operations:
            if isinstance(operation, Product):
                self._product(operation)
            elif isinstance(operation, Attended):
                self._attend(operation)
            else:
                self._operation(operation)
        logits = self._recording.logits
        value = self._values.get(id(logits))
        if logits is None or value is None or value.register.space != WANTED:
            raise Unsupported("its logits are not those of the wanted rows")
        states = [self._stretch(state) for state in self._recording.states]
        return self._finish(self._contiguous(value, at_start=True), logits.shape[-1], states)

    def _stretch(self, state: Tensor) -> Stretch:
        """Place of a hidden state.  # [T, hidden]"""
        value = self._values.get(id(state))
        if value is None or value.register.space != ALL:
            raise Unsupported("its hidden states are not those of all rows")
        value = self._contiguous(value)
        return Stretch(value.register, int(by_row(value.addresses)[0]), state.shape[-1])

    # Operations

    def _operation(self, operation: Operation) -> None:
        name = operation.function._schema.name.removeprefix("aten::")
        tensors = [each for each in _flat(operation.args) if isinstance(each, Tensor)]
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
            elif name in _BINARY:
                self._binary(_BINARY[name], operation)
            elif name in _UNARY:
                self._unary(_UNARY[name], operation)
            else:
                raise Unsupported(f"{name} is not an operation on single rows")

    def _note_position(self, operation: Operation) -> None:
        if operation.function is _aten._local_scalar_dense.default:
            raise Unsupported("its code depends on the positions of a step")
        self._position_operations.append(operation)
        for each in _flat([operation.result]):
            if isinstance(each, Tensor):
                self._of_positions[id(each)] = each

    def _ids_operation(self, name: str, operation: Operation) -> None:
        if name in _VIEWS | _RESHAPES | _SAME and operation.result.numel() == NUM_ROWS:
            self._recording.ids = operation.result  # [1, T], then only that is used
            return
        if name != "embedding":
            raise Unsupported(f"it computes {name} of token ids")
        weight, result = operation.args[0].detach(), operation.result
        register = self._new_register(prod(result.shape) // NUM_ROWS, ALL)
        code = [arithmetic.LOOKUP, 1, register.width, 0, 0, 0, 0, 0, weight.data_ptr()]
        code += [weight.stride(0) * weight.element_size(), int(weight.dtype == torch.bfloat16)]
        self._kept.append(weight)
        self._emit(machine.ROWS, ALL, code, {3: register}, [])
        self._values[id(result)] = self._value(register, result.shape, result.dim() - 2)

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
        self._bind(operation.result, [code], *operation.args[:2])

    def _unary(self, code: int, operation: Operation) -> None:
        self._bind(operation.result, [code], operation.args[0])

    def _gelu(self, operation: Operation) -> None:
        is_tanh = operation.kwargs.get("approximate", "none") == "tanh"
        self._unary(arithmetic.GELU_TANH if is_tanh else arithmetic.GELU, operation)

    def _neg(self, operation: Operation) -> None:
        self._bind(operation.result, [arithmetic.MUL], operation.args[0], -1.0)

    def _rsub(self, operation: Operation) -> None:
        self._bind(operation.result, [arithmetic.SUB], operation.args[1], operation.args[0])

    def _pow(self, operation: Operation) -> None:
        base, exponent = operation.args[:2]
        if exponent == 2:
            self._bind(operation.result, [arithmetic.MUL], base, base)
        elif exponent == 3:
            value = self._values[id(base)]
            self._bind_value(operation.result, [arithmetic.MUL], [self._computed(arithmetic.MUL, value, value), value])
        else:
            raise Unsupported(f"it computes the power {exponent}")

    def _mean(self, operation: Operation) -> None:
        source = operation.args[0]
        total = self._sum_of(self._values[id(source)], operation)
        share = self._constant(1 / source.shape[-1])
        self._bind_value(operation.result, [arithmetic.MUL], [total, share])

    def _sum(self, operation: Operation) -> None:
        total = self._sum_of(self._values[id(operation.args[0])], operation)
        self._bind_value(operation.result, [arithmetic.COPY], [total])

    def _sum_of(self, value: Value, operation: Operation) -> Value:
        dims, rank = operation.args[1], value.addresses.dim()
        if [dim % rank for dim in dims] != [rank - 1]:
            raise Unsupported("it sums over more than the last dimension")
        keeps = (operation.args[2] if len(operation.args) > 2 else False) or operation.kwargs.get("keepdim", False)
        shape = (*value.addresses.shape[:-1], 1)
        register = self._new_register(prod(shape) // self._rows_of(value), value.register.space)
        out = self._value(register, shape, row_dim_of(value.addresses))
        source, target = by_row(value.addresses), by_row(out.addresses)
        length = value.addresses.shape[-1]
        starts = source.view(-1, length)[:, 0]
        for place, start, row in zip(target.tolist(), starts.tolist(), source.view(-1, length), strict=True):
            if not torch.equal(row, torch.arange(start, start + length)):
                raise Unsupported("it sums numbers that do not follow each other")
            code = [arithmetic.SUM, 1, length, 0, 0, 0, 0, machine.REGISTER, 0, 0, 0, 1, machine.CONSTANT, 0, 0, 0, 0]
            self._emit(
                machine.ROWS,
                register.space,
                code,
                {3: register, 8: value.register},
                [value.register],
                {3: place, 8: start},
            )
        return out if keeps else Value(register, out.addresses.squeeze(-1))

    def _native_layer_norm(self, operation: Operation) -> None:
        source, shape, weight, bias, epsilon = operation.args
        if len(shape) != 1:
            raise Unsupported("it normalizes over more than the last dimension")
        value, share = self._values[id(source)], self._constant(1 / shape[0])
        summed = Operation(None, (source, [-1], True), {}, None)
        mean = self._computed(arithmetic.MUL, self._sum_of(value, summed), share)
        centred = self._computed(arithmetic.SUB, value, mean)
        squares = self._computed(arithmetic.MUL, centred, centred)
        variance = self._computed(arithmetic.MUL, self._sum_of(squares, summed), share)
        scale = self._computed(arithmetic.RSQRT, self._computed(arithmetic.ADD, variance, self._constant(epsilon)))
        found = self._computed(arithmetic.MUL, centred, scale)
        if weight is not None:
            found = self._computed(arithmetic.MUL, found, self._operand(weight))
        if bias is not None:
            found = self._computed(arithmetic.ADD, found, self._operand(bias))
        self._bind_value(operation.result[0], [arithmetic.COPY], [found])

    def _cat(self, operation: Operation) -> None:
        parts, result = [part for part in operation.args[0] if part.numel()], operation.result
        dim = (operation.args[1] if len(operation.args) > 1 else operation.kwargs.get("dim", 0)) % result.dim()
        values = [self._operand(part) for part in parts]
        space, row_dim = self._space_of(values), max(row_dim_of(value.addresses) for value in values)
        register = self._new_register(prod(result.shape) // result.shape[row_dim], space)
        out = self._value(register, result.shape, row_dim)
        first = 0
        for part, value in zip(parts, values, strict=True):
            place = out.addresses.narrow(dim, first, part.shape[dim])
            self._write([arithmetic.COPY], Value(register, place), [value], rounds=False)
            first += part.shape[dim]
        self._values[id(result)] = out

    def _index(self, operation: Operation) -> None:
        source, indices = operation.args
        chosen = [index for index in indices if index is not None]
        if len(chosen) != 1 or chosen[0].shape != self._recording.wanted.shape:
            raise Unsupported("it picks elements by index")
        value, result = self._values[id(source)], operation.result
        row_dim = row_dim_of(value.addresses)
        if indices.index(chosen[0]) != row_dim or not torch.equal(chosen[0], self._recording.wanted):
            raise Unsupported("it picks elements of a row by index")
        rows = self._contiguous(value)
        start = int(by_row(rows.addresses)[0])
        register = self._new_register(prod(result.shape) // result.shape[row_dim], WANTED)
        code = [
            arithmetic.COPY,
            1,
            register.width,
            0,
            0,
            0,
            0,
            machine.OF_ALL_ROWS,
            0,
            0,
            0,
            1,
            machine.CONSTANT,
            0,
            0,
            0,
            0,
        ]
        self._emit(machine.ROWS, WANTED, code, {3: register, 8: rows.register}, [rows.register], {8: start})
        self._values[id(result)] = self._value(register, result.shape, row_dim)

    def _product(self, product: Product) -> None:
        value = self._contiguous(self._values[id(product.rows)])
        matrix = self._matrix_of(product.layer)
        register = self._new_register(matrix.num_panels * PANEL, value.register.space)
        code = [matrix.kind, 0, 0, 0, 0, *[0] * 9, int(product.result.dtype == torch.bfloat16)]
        start = int(by_row(value.addresses)[0])
        self._products.append((code, matrix))
        self._emit(
            machine.PRODUCTS, register.space, code, {1: value.register, 3: register}, [value.register], {1: start}
        )
        row_dim = row_dim_of(value.addresses)
        self._values[id(product.result)] = self._value(register, product.result.shape, row_dim)

    def _attend(self, attended: Attended) -> None:
        kind = attended.kind
        query, key, value = (
            self._by_head(self._operand(each)) for each in (attended.query, attended.key, attended.value)
        )
        _, num_heads, _, key_width = attended.query.shape
        num_kv_heads, value_width = attended.key.shape[1], attended.value.shape[3]
        register = self._new_register(num_heads * value_width, ALL)
        sinks = None if kind.sinks is None else self._constant_vector(kind.sinks.detach().float().numpy())
        floats = [int(np.float32(number).view(np.uint32)) for number in (kind.scale, kind.softcap or 0.0)]
        is_short = attended.result.dtype == torch.bfloat16
        code = [0] * 8 + [0, 0, num_kv_heads * key_width, num_kv_heads * value_width, kind.window or 0, int(is_short)]
        code += [
            num_heads,
            num_heads // num_kv_heads,
            key_width,
            value_width,
            *floats,
            int(sinks is not None),
            sinks or 0,
        ]
        read = [query.register, key.register, value.register]
        self._emit(machine.ATTENTION, ALL, code, {0: read[0], 2: read[1], 4: read[2], 6: register}, read)
        self._attended.append((code, attended.layer))
        self._values[id(attended.result)] = self._value(register, attended.result.shape, 1)

    def _by_head(self, value: Value) -> Value:
        """A register of its own, with the heads of each row one after the other.  # [1, H, T, D]"""
        return self._contiguous(value, at_start=True)

    # Codes

    def _bind(self, result: Tensor, code: list[int], *operands: Any) -> None:
        self._bind_value(result, code, [self._operand(each) for each in operands])

    def _bind_value(self, result: Tensor, code: list[int], operands: Sequence[Value]) -> None:
        if not result.numel():  # the part of a head that partial rotary embeddings leave as it is
            self._values[id(result)] = Value(operands[0].register, operands[0].addresses.expand(result.shape))
            return
        self._values[id(result)] = self._make(code, operands, result.shape, rounds=result.dtype == torch.bfloat16)
        if result.dtype not in (torch.bfloat16, torch.float32):
            raise Unsupported(f"it computes in {result.dtype}")

    def _computed(self, code: int, *operands: Value) -> Value:
        """In float32, without a tensor of the recording."""
        sizes = (value.addresses.shape for value in operands)
        shape = torch.broadcast_shapes(*sizes)  # type: ignore[no-untyped-call]
        return self._make([code], operands, shape, rounds=False)

    def _make(self, code: list[int], operands: Sequence[Value], shape: Sequence[int], *, rounds: bool) -> Value:
        space = self._space_of(operands)
        spread = [Value(value.register, value.addresses.expand(shape)) for value in operands]
        row_dim = max(row_dim_of(value.addresses) for value in spread)
        register = self._new_register(prod(shape) // shape[row_dim], space)
        out = self._value(register, shape, row_dim)
        self._write(code, out, spread, rounds=rounds)
        return out

    def _write(self, code: list[int], out: Value, operands: Sequence[Value], *, rounds: bool) -> None:
        if len(operands) == 2 and code[0] in (arithmetic.ADD, arithmetic.MUL) and _is_single(operands[0]):
            operands = operands[::-1]
        row_dim, shape = row_dim_of(out.addresses), out.addresses.shape
        places = [by_row(value.addresses.expand(shape), row_dim) for value in (out, *operands)]
        inner_shape = [size for dim, size in enumerate(shape) if dim != row_dim]
        parts = split([place.view(inner_shape) for place in places])
        if len(parts) > MAX_PARTS:
            raise Unsupported("it reads numbers that do not follow each other")
        for part in parts:
            self._emit_part(code[0], out.register, operands, part, rounds=rounds)

    def _emit_part(self, op: int, out: Register, operands: Sequence[Value], part: Part, *, rounds: bool) -> None:
        code = [op, part.outer, part.inner, 0, 0, part.strides[0][0], int(rounds)]
        registers, starts = {3: out}, {3: part.starts[0]}
        for column, value, start, strides in zip((7, 12), operands, part.starts[1:], part.strides[1:], strict=False):
            is_constant = value.register.space < 0
            code += [machine.CONSTANT if is_constant else machine.REGISTER, start, 0, *strides]
            if not is_constant:
                registers[column + 1], starts[column + 1] = value.register, start
        code += [machine.CONSTANT, 0, 0, 0, 0] if len(operands) == 1 else []
        read = [value.register for value in operands if value.register.space >= 0]
        self._emit(machine.ROWS, out.space, code, registers, read, starts)

    def _emit(
        self, kind: int, space: int, code: list[int], registers: dict[int, Register], read: Sequence[Register],
        starts: Mapping[int, int] | None = None,
    ) -> None:  # fmt: skip
        """Add a code to the first stage that may run it. `starts`: places within registers, by column."""
        for column, start in (starts or {}).items():
            code[column] = start
        after = max([register.stage for register in read], default=-1)
        index = self._stage_for(kind, space, after)
        self._stages[index].codes.append((code, registers))
        for register in read:
            register.last_stage = max(register.last_stage, index)
        for register in registers.values():
            if all(register is not each for each in read):
                register.first_stage = index if register.first_stage < 0 else min(register.first_stage, index)
                register.stage = max(register.stage, index)
                register.last_stage = max(register.last_stage, index)

    def _stage_for(self, kind: int, space: int, after: int) -> int:
        for index in range(max(after, 0), len(self._stages)):
            stage = self._stages[index]
            is_open = stage.kind == kind != machine.ATTENTION and stage.space == space
            if is_open and (index > after or kind == machine.ROWS):
                return index
        self._stages.append(Stage(kind, space))
        return len(self._stages) - 1

    # Values

    def _operand(self, operand: Any) -> Value:
        if not isinstance(operand, Tensor):
            return self._constant(float(operand))
        if id(operand) in self._values:
            return self._values[id(operand)]
        if id(operand) in self._of_positions:
            return self._look_up(operand)
        numbers = operand.detach().float().contiguous().numpy()
        start = self._constant_vector(numbers.reshape(-1))
        addresses = torch.arange(start, start + numbers.size).view(operand.shape)
        return Value(Register(numbers.size, -1), addresses)

    def _look_up(self, tensor: Tensor) -> Value:
        """A register with a row's part of a tensor that depends on positions alone."""
        if id(tensor) not in self._looked_up:
            row_dims = [dim for dim, size in enumerate(tensor.shape) if size == NUM_ROWS]
            if len(row_dims) != 1 or not tensor.dtype.is_floating_point:
                raise Unsupported("what it computes from positions is no number for each row")
            register = self._new_register(tensor.numel() // NUM_ROWS, ALL)
            code = [arithmetic.LOOKUP, 1, register.width, 0, 0, 0, 0, 1, 0, 4 * register.width, 0]
            self._emit(machine.ROWS, ALL, code, {3: register}, [])
            self._tables.append((code, tensor, row_dims[0]))
            self._looked_up[id(tensor)] = self._value(register, tensor.shape, row_dims[0])
        return self._looked_up[id(tensor)]

    def _constant(self, number: float) -> Value:
        start = self._constant_vector(np.array([number], np.float32))
        return Value(Register(1, -1), torch.tensor(start))

    def _constant_vector(self, numbers: NDArray[np.float32]) -> int:
        self._constants.append(numbers)
        self._num_constants += numbers.size
        return self._num_constants - numbers.size

    def _contiguous(self, value: Value, *, at_start: bool = False) -> Value:
        """The value, or a copy of it, whose numbers of a row follow each other."""
        places = by_row(value.addresses)
        start = int(places[0])
        if torch.equal(places, torch.arange(start, start + len(places))) and not (at_start and start):
            return value
        return self._make([arithmetic.COPY], [value], value.addresses.shape, rounds=False)

    def _new_register(self, width: int, space: int) -> Register:
        return Register(width, space)

    def _value(self, register: Register, shape: Sequence[int], row_dim: int) -> Value:
        """A value that fills a register, in the order of its dimensions; the register may be wider."""
        num_rows = shape[row_dim]
        inner = [size for dim, size in enumerate(shape) if dim != row_dim]
        places = torch.arange(prod(inner)).view(inner).unsqueeze(row_dim)
        rows = (torch.arange(num_rows) * ROW).view([-1 if dim == row_dim else 1 for dim in range(len(shape))])
        return Value(register, rows + places)

    def _space_of(self, values: Sequence[Value]) -> int:
        spaces = {value.register.space for value in values} - {-1}
        if len(spaces) != 1:
            raise Unsupported("it combines wanted rows with others")
        return spaces.pop()

    def _rows_of(self, value: Value) -> int:
        return value.addresses.shape[row_dim_of(value.addresses)]

    # The whole program

    def _finish(self, logits: Value, vocab_size: int, states: Sequence[Stretch]) -> Program:
        for register in (logits.register, *(state.register for state in states)):
            register.last_stage = len(self._stages)
        widths = (self._place(ALL), self._place(WANTED))
        width = max(len(code) for stage in self._stages for code, _ in stage.codes)
        rows: list[list[int]] = []
        stages = []
        index_of: dict[int, int] = {}
        for stage in self._stages:
            stages.append([stage.kind, len(rows), len(stage.codes), stage.space])
            for code, registers in stage.codes:
                index_of[id(code)] = len(rows)
                rows.append(_placed(code, registers) + [0] * (width - len(code)))
        return Program(
            stages=np.array(stages, np.int64),
            codes=np.array(rows, np.int64),
            constants=np.concatenate([np.zeros(0, np.float32), *self._constants]),
            widths=widths,
            logits=logits.register,
            vocab_size=vocab_size,
            states=states,
            tables=[(index_of[id(code)], tensor, dim) for code, tensor, dim in self._tables],
            positions=self._recording.positions,
            of_positions=self._position_operations,
            products=[(index_of[id(code)], matrix) for code, matrix in self._products],
            attended=[(index_of[id(code)], layer) for code, layer in self._attended],
            kept=self._kept,
        )

    def _place(self, space: int) -> int:
        """Give registers their places; those of the same width share one if their times do not overlap."""
        registers = {id(each): each for stage in self._stages for _, named in stage.codes for each in named.values()}
        mine = sorted((each for each in registers.values() if each.space == space), key=lambda each: each.first_stage)
        free: dict[int, list[tuple[int, int]]] = {}
        total = 0
        for register in mine:
            places = free.setdefault(register.width, [])
            reusable = next((place for place in places if place[1] < register.first_stage), None)
            if reusable is None:
                register.offset, total = total, total + register.width
            else:
                places.remove(reusable)
                register.offset = reusable[0]
            places.append((register.offset, register.last_stage))
        return total


def _is_single(value: Value) -> bool:
    """Whether the last dimension is one number."""
    addresses = value.addresses
    return addresses.dim() == 0 or addresses.stride(-1) == 0 or addresses.shape[-1] == 1


def _placed(code: list[int], registers: Mapping[int, Register]) -> list[int]:
    """The code with its registers' places."""
    placed = code[:]
    for column, register in registers.items():
        placed[column] = (code[column] << 32) + register.offset  # where in the row, and where the row is
        placed[column + 1] = register.width
    return placed


def _flat(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        found += _flat(value) if isinstance(value, (list, tuple)) else [value]
    return found
