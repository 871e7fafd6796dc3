"""Code for other languages is generated and compiles; skipped where the tools are not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from protos.generate import LANGUAGES, main

SYSTEM_GO = Path("/usr/share/gocode")
"""Where Debian's packages of Go libraries are."""
NPM = {
    "@bufbuild/protobuf": "2",
    "@grpc/grpc-js": "1",
    "@types/node": "*",
    "ts-proto": "2",
    "typescript": "*",
}
TSCONFIG = {
    "compilerOptions": {
        "strict": True,
        "target": "es2022",
        "module": "nodenext",
        "moduleResolution": "nodenext",
        "noEmit": True,
        "skipLibCheck": True,
        "types": ["node"],
    },
    "include": ["gen", "call.ts"],
}
CALL_TS = """
import { credentials } from "@grpc/grpc-js";
import { GenerateChunk, GenerateRequest, GenerationServiceClient } from "./gen/protos/outrider/v1/generation";

const client = new GenerationServiceClient("localhost:9000", credentials.createInsecure());
const request = GenerateRequest.fromPartial({ text: "import os", stopping: { maxTokens: 8 } });
client.generateStream(request).on("data", (chunk: GenerateChunk) => process.stdout.write(chunk.text));
"""
CALL_GO = """package main

import (
	"context"
	"fmt"

	"google.golang.org/grpc"
	pb "outrider/v1"
)

func main() {
	channel, err := grpc.Dial("localhost:9000", grpc.WithInsecure())
	if err != nil {
		panic(err)
	}
	prompt := &pb.GenerateRequest_Text{Text: "import os"}
	client := pb.NewGenerationServiceClient(channel)
	stream, err := client.GenerateStream(context.Background(), &pb.GenerateRequest{Prompt: prompt})
	if err != nil {
		panic(err)
	}
	chunk, err := stream.Recv()
	fmt.Println(chunk.GetText(), err)
}
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_typescript_compiles(tmp_path):
    (tmp_path / "package.json").write_text(json.dumps({"private": True, "dependencies": NPM}))
    installed = subprocess.run(["npm", "install", "--no-audit", "--no-fund"], cwd=tmp_path, capture_output=True)
    if installed.returncode:
        pytest.skip("npm cannot install ts-proto here")
    programs = tmp_path / "node_modules" / ".bin"
    assert main(["--language", "typescript", "--out", str(tmp_path / "gen"), "--plugins", str(programs)]) == 0
    (tmp_path / "call.ts").write_text(CALL_TS)
    (tmp_path / "tsconfig.json").write_text(json.dumps(TSCONFIG))
    compiled = subprocess.run([programs / "tsc", "-p", "."], cwd=tmp_path, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(shutil.which, ("go", *LANGUAGES["go"][0]))) or not (SYSTEM_GO / "src/google.golang.org/grpc").is_dir(),
    reason="needs Go with gRPC: apt-get install golang-go protoc-gen-go protoc-gen-go-grpc golang-google-grpc-dev",
)
def test_go_compiles(tmp_path):
    assert main(["--language", "go", "--out", str(tmp_path / "src")]) == 0
    (tmp_path / "src" / "call").mkdir()
    (tmp_path / "src" / "call" / "main.go").write_text(CALL_GO)
    folders = {"GOPATH": f"{tmp_path}:{SYSTEM_GO}", "GOCACHE": str(tmp_path / "cache")}
    paths = {"GO111MODULE": "off", "GOFLAGS": "", **folders}
    words = ["go", "build", "-o", str(tmp_path / "called"), "call"]
    built = subprocess.run(words, cwd=tmp_path, env={**os.environ, **paths}, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr


def test_a_plugin_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="protoc-gen-go, protoc-gen-go-grpc not found: see docs/howto"):
        main(["--language", "go", "--out", str(tmp_path / "out")])


def test_a_language_needs_a_folder(capsys):
    with pytest.raises(SystemExit):
        main(["--language", "go"])
    assert "go together" in capsys.readouterr().err
