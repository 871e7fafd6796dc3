from __future__ import annotations

import shutil

import pytest

from protos import generate


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the sources and of what was generated from them, in which files may be changed."""
    for directory in ("protos", generate.CLIENT):
        shutil.copytree(generate.ROOT / directory, tmp_path / directory)
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    return tmp_path


def test_the_committed_code_is_what_the_protos_give():
    assert generate.drifted() == []


def test_a_changed_proto_is_found_and_generating_again_repairs_it(copy, capsys):
    source = copy / generate.SOURCES[0]
    source.write_text(source.read_text().replace("string request_id = 1;", "string request_name = 1;"))
    assert generate.main(["--check"]) == 1
    assert f"{generate.CLIENT}/generation_pb2.py" in capsys.readouterr().err
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0


@pytest.mark.parametrize("missing", list(generate.generated_paths()))
def test_a_missing_file_is_found(copy, missing):
    (copy / missing).unlink()
    assert generate.drifted() == [missing]


def test_the_clients_code_imports_nothing_from_here():
    for path in (generate.ROOT / generate.CLIENT).glob("*.py"):
        assert "import protos" not in path.read_text()
        assert "from protos" not in path.read_text()


def test_a_proto_that_does_not_parse_is_refused(copy):
    (copy / generate.SOURCES[0]).write_text("syntax = ")
    with pytest.raises(SystemExit, match="protoc"):
        generate.main(["--check"])
