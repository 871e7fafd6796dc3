"""Finds the field of a message that cannot be decoded.

Pure functions over the protobuf runtime, which does not name a string field that is not UTF-8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from core.errors import InvalidRequest

LENGTH_DELIMITED = 2
"""Wire type of strings, bytes, messages and packed numbers."""


def fault_in(data: bytes, kind: type[Message]) -> InvalidRequest:
    """The error for `data` that does not decode as `kind`. Names the first field that cannot be decoded."""
    field, problem = _first_fault(kind.DESCRIPTOR, data) or ("request", f"is not a {kind.DESCRIPTOR.name}")
    return InvalidRequest(field, problem)


def _first_fault(descriptor: Any, data: bytes, path: str = "") -> tuple[str, str] | None:
    """The path of the first field that cannot be decoded, and the reason; None if all can."""
    try:
        fields: Any = UnknownFieldSet(Empty.FromString(data))  # decodes the structure without checking strings
    except DecodeError:
        return path or "request", f"is not a {descriptor.name}: its encoding is corrupt"
    faults = (_fault_of(field, content, path) for field, content in _delimited(descriptor, fields))
    return next(filter(None, faults), None)


def _delimited(descriptor: Any, fields: Iterable[Any]) -> Iterator[tuple[Any, bytes]]:
    for entry in fields:
        field = descriptor.fields_by_number.get(entry.field_number)
        if field is not None and entry.wire_type == LENGTH_DELIMITED:
            yield field, entry.data


def _fault_of(field: Any, content: bytes, path: str) -> tuple[str, str] | None:
    name = f"{path}.{field.name}" if path else field.name
    if field.message_type is not None:
        return _first_fault(field.message_type, content, name)
    if field.type == FieldDescriptor.TYPE_STRING:
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            return name, f"must be UTF-8; byte {error.start} is not"
    return None
