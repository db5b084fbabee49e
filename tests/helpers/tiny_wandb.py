"""wandb's files, and a stand-in for its server: the part of its HTTP interface that a run uses."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

Values = dict[str, Any]
KEY = "0123456789abcdef0123456789abcdef01234567"


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The whole records of a .wandb file, which is a LevelDB log: blocks of 32 KiB of pieces, each
    with a head of 7 bytes (checksum 4, length 2, kind 1); a record is one piece (kind 1), or the
    first (2), middle (3) and last one (4)."""
    block, head, at, record = 32_768, 7, 7, b""  # the file begins with a head of its own
    while at + head <= len(data):
        left = block - at % block
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if left < head or kind == 0:  # the rest of a block is empty
            at += left
            continue
        piece = data[at + head : at + head + length]
        if len(piece) < length:
            return
        record, at = record + piece, at + head + length
        if kind in (1, 4):
            yield record
            record = b""


def records(run_dir: Path) -> list[Record]:
    """Everything in the .wandb files of a run, in the order of their start."""
    files = sorted(run_dir.glob("wandb/*run-*/run-*.wandb"))
    return [Record.FromString(data) for file in files for data in wandb_records(file.read_bytes())]


def values_of(items: Any) -> Values:
    return {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}


def history(run_dir: Path) -> list[Values]:
    """The rows in a run's .wandb files."""
    return [values_of(r.history.item) for r in records(run_dir) if r.HasField("history")]


@dataclass
class ServedRun:
    """What a server knows of a run."""

    history: list[Values] = field(default_factory=list)
    summary: Values = field(default_factory=dict)
    config: Values = field(default_factory=dict)
    exit_codes: list[int] = field(default_factory=list)
    files: set[str] = field(default_factory=set)

    @property
    def iterations(self) -> list[int]:
        return [row["iteration"] for row in self.history]


class Server:
    """Keeps what is sent to it, and gives it back to a client that resumes a run, as wandb does."""

    def __init__(self) -> None:
        self.runs: dict[str, ServedRun] = {}
        self.url = ""

    def answer(self, query: str, values: Values) -> Any:
        """The answer to a GraphQL query."""
        match = re.search(r"(?:query|mutation)\s+(\w+)", query)
        name, run_name = match[1] if match else "", str(values.get("name"))
        project = {"id": "p", "name": values.get("project"), "entity": {"id": "e", "name": "us"}}
        run = self.runs.get(run_name)
        if name == "Viewer":
            return {"viewer": {"id": "v", "entity": "us", "flags": "{}", "teams": {"edges": []}}}
        if name == "RunResumeStatus":
            bucket = None if run is None else self._status(run_name, run)
            return {"model": {**project, "bucket": bucket}}
        if name == "UpsertBucket":
            is_new = run is None
            run = self.runs.setdefault(run_name, ServedRun())
            run.config = json.loads(values.get("config") or "{}")
            bucket = {"id": f"id-{run_name}", "name": run_name, "displayName": run_name}
            bucket |= {"project": project, "historyLineCount": len(run.history)}
            return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}
        if name == "CreateRunFiles":
            files = [{"name": f, "uploadUrl": f"{self.url}/file/{f}"} for f in values["files"]]
            self.runs[values["run"]].files |= set(values["files"])
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        if name == "ArtifactType":
            return {"project": {"artifact": {"artifactType": {"name": "run_table"}}}}
        if name == "CreateArtifact":
            artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": {"id": "s"}}
            return {"createArtifact": {"artifact": artifact}}
        return {}

    def _status(self, name: str, run: ServedRun) -> Values:
        return {
            "id": f"id-{name}",
            "name": name,
            "displayName": name,
            "tags": [],
            "config": json.dumps(run.config),
            "summaryMetrics": json.dumps(run.summary),
            "historyLineCount": len(run.history),
            "logLineCount": 0,
            "eventsLineCount": 0,
            "historyTail": json.dumps([json.dumps(row) for row in run.history[-1:]]),
            "eventsTail": "[]",
            "wandbConfig": '{"t": 1}',  # the run has begun
        }

    def stream(self, name: str, body: Values) -> None:
        """A piece of a run's stream."""
        run, files = self.runs[name], body.get("files") or {}
        if piece := files.get("wandb-history.jsonl"):
            rows, offset = [json.loads(line) for line in piece["content"]], piece["offset"]
            run.history[offset : offset + len(rows)] = rows
        if piece := files.get("wandb-summary.json"):
            run.summary = json.loads(piece["content"][-1])
        if body.get("complete"):
            run.exit_codes.append(body["exitcode"])


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_PUT(self) -> None:
            self._body()
            self._reply({})

        def do_POST(self) -> None:
            data = self._body()
            if self.path.endswith("/graphql"):
                body = json.loads(data)
                self._reply({"data": server.answer(body["query"], body.get("variables") or {})})
            else:
                if self.path.endswith("/file_stream"):
                    server.stream(self.path.split("/")[-2], json.loads(data))
                self._reply({"exitcode": None, "limits": {}})

        def _body(self) -> bytes:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return gzip.decompress(data) if self.headers["Content-Encoding"] == "gzip" else data

        def _reply(self, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    class HTTPServer(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            """A client that ends does not close its connections."""

    http = HTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{http.server_port}"
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
