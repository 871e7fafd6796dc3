from __future__ import annotations

import shutil

import pytest

from protos import generate


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of protos/ in which files may be changed."""
    shutil.copytree(generate.ROOT / "protos", tmp_path / "protos")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    return tmp_path


def test_the_committed_code_is_what_the_protos_give():
    assert generate.drifted() == []


def test_a_changed_proto_is_found_and_generating_again_repairs_it(copy, capsys):
    source = copy / generate.SOURCES[0]
    source.write_text(source.read_text().replace("string request_id = 1;", "string request_name = 1;"))
    assert generate.main(["--check"]) == 1
    assert "generation_pb2.py" in capsys.readouterr().err
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0


def test_a_missing_file_is_found(copy):
    missing = next(iter(generate.generated_paths()))
    (copy / missing).unlink()
    assert generate.drifted() == [missing]


def test_a_proto_that_does_not_parse_is_refused(copy):
    (copy / generate.SOURCES[0]).write_text("syntax = ")
    with pytest.raises(SystemExit, match="protoc"):
        generate.main(["--check"])
