"""The protos keep to the rules that buf's linter and its breaking-change check have, as far as descriptors tell."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protos.generate import CLIENT_SOURCES, LINK_SOURCES, SOURCES, described

RELEASED = json.loads((Path(__file__).parent / "released.json").read_text())
"""Every field, enum value and method that a release has had, by its full name, with its number. Nothing leaves it."""
PASCAL, SNAKE, UPPER = (
    re.compile(r"([A-Z][a-z0-9]*)+"),
    re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*"),
    re.compile("[A-Z_]+"),
)
SHARED = {"GenerateStream": ("GenerateRequest", "GenerateChunk")}
"""Methods that have not a request and a response of their own name."""


@pytest.fixture(scope="module", params=[*SOURCES, *LINK_SOURCES])
def file(request):
    return described(request.param)


def messages(file) -> Iterator[tuple[tuple[int, ...], str, Any]]:
    """Each message with its place in the source and its full name, those within others included."""

    def below(path, prefix, message):
        name = f"{prefix}.{message.name}"
        yield path, name, message
        for index, inner in enumerate(message.nested_type):
            if not inner.options.map_entry:
                yield from below((*path, 3, index), name, inner)

    for index, message in enumerate(file.message_type):
        yield from below((4, index), file.package, message)


def numbered(file) -> Iterator[tuple[str, int]]:
    """Whatever has a number on the wire; a method counts as 0."""
    for _, name, message in messages(file):
        yield from ((f"{name}.{field.name}", field.number) for field in message.field)
    for enum in file.enum_type:
        yield from ((f"{file.package}.{enum.name}.{value.name}", value.number) for value in enum.value)
    for service in file.service:
        yield from ((f"{file.package}.{service.name}.{method.name}", 0) for method in service.method)


def test_names_are_as_the_style_guide_has_them(file):
    for _, name, message in messages(file):
        assert PASCAL.fullmatch(message.name), name
        assert all(SNAKE.fullmatch(field.name) for field in message.field), name
    for enum in file.enum_type:
        prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper()
        assert all(UPPER.fullmatch(value.name) and value.name.startswith(f"{prefix}_") for value in enum.value)
        assert (enum.value[0].name, enum.value[0].number) == (f"{prefix}_UNSPECIFIED", 0)
    for service in file.service:
        assert service.name.endswith("Service")


def test_a_package_is_where_its_name_says_and_has_a_version(file):
    assert re.fullmatch(r"outrider(\.[a-z]+)*\.v\d+", file.package)
    assert Path(file.name).parent == Path("protos") / file.package.replace(".", "/")
    assert file.options.go_package.partition(";")[0] == file.package.replace(".", "/")
    assert file.syntax == "proto3"


def test_each_method_has_messages_of_its_own(file):
    for service in file.service:
        for method in service.method:
            expected = SHARED.get(method.name, (f"{method.name}Request", f"{method.name}Response"))
            assert (method.input_type, method.output_type) == tuple(f".{file.package}.{name}" for name in expected)


def test_everything_public_has_a_comment():
    (source,) = SOURCES
    file = described(source)
    comments = {tuple(place.path) for place in file.source_code_info.location if place.leading_comments.strip()}
    bare = [
        f"{name}.{field.name}"
        for path, name, message in messages(file)
        for index, field in enumerate(message.field)
        if (*path, 2, index) not in comments
    ]
    bare += [name for path, name, _ in messages(file) if path not in comments]
    for kind, owners in ((5, file.enum_type), (6, file.service)):
        for index, owner in enumerate(owners):
            members = owner.value if kind == 5 else owner.method
            bare += [member.name for i, member in enumerate(members) if (kind, index, 2, i) not in comments]
    assert not bare, "what a field means, its unit and its range stand above it"


def test_no_released_number_means_something_else_and_no_name_another_number():
    now = dict(numbered(described(SOURCES[0])))
    names = {(name.rpartition(".")[0], number): name for name, number in now.items()}
    for name, number in RELEASED.items():
        owner = name.rpartition(".")[0]
        if name in now:
            assert now[name] == number, f"{name} was {number}"
        else:
            assert names.get((owner, number)) is None or number == 0, f"{number} of {owner} was {name}: reserve it"


def test_what_was_taken_out_is_reserved():
    file = described(SOURCES[0])
    now = dict(numbered(file))
    for _, name, message in messages(file):
        gone = {n for each, n in RELEASED.items() if each.rpartition(".")[0] == name and each not in now}
        reserved = {number for span in message.reserved_range for number in range(span.start, span.end)}
        assert gone <= reserved, f"{name} must reserve {sorted(gone - reserved)}"
        assert reserved.isdisjoint(field.number for field in message.field)


def test_the_client_s_own_messages_are_those_of_their_sources():
    """Field for field as google.rpc has them: what is compared is what the client was given."""
    from google.rpc import error_details_pb2, status_pb2

    file = described(CLIENT_SOURCES[0])
    theirs = {
        "Status": status_pb2.Status,
        **{n: getattr(error_details_pb2, n) for n in ("RetryInfo", "BadRequest", "RequestInfo")},
    }
    for _, name, message in messages(file):
        original = theirs.get(name.rpartition(".")[2])
        for field in message.field if original is not None else ():
            assert original.DESCRIPTOR.fields_by_name[field.name].number == field.number, name
