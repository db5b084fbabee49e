"""An API key that an endpoint sends back, in any encoding, is neither logged nor stored."""

from __future__ import annotations

import base64
import json
import stat
from contextlib import closing
from urllib.parse import quote

import pytest
from tiny_faulty_judge import Fault, FaultyJudge, ask_all, envelope, with_client

from rl.judge.client import JudgeError
from rl.judge.http import ReplyJournal

KEY = "sk-ver/secret+0123456789"
ENCODED_KEYS = {
    "itself": KEY,
    "percent": quote(KEY, safe=""),
    "every character percent": "".join(f"%{ord(char):02x}" for char in KEY),
    "json": "".join(f"\\u{ord(char):04x}" for char in KEY),
    "json's slash": KEY.replace("/", "\\/"),
    "base64": base64.b64encode(f"user:{KEY}".encode()).decode(),
    "base64 of URLs": base64.urlsafe_b64encode(f"Bearer {KEY}".encode()).decode().rstrip("="),
    "hexadecimal": KEY.encode().hex(),
}


@pytest.mark.slow
@pytest.mark.parametrize("encoded", ENCODED_KEYS.values(), ids=range(len(ENCODED_KEYS)))
def test_an_echoed_key_is_written_nowhere(encoded: str, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("ODDLY_NAMED", KEY)
    good = json.dumps({"reasoning": f"said {encoded}", "score": [1, 2]})
    faults = {
        "refusal": Fault(401, body=f"wrong key {encoded}"),
        "redirect": Fault(307, headers={"Location": f"http://elsewhere/v1?key={encoded}"}),
        "failure": Fault(503, body="x" * 550 + encoded),
        "no reply": Fault(body=json.dumps({"error": encoded})),
        "body": Fault(body=f'{{"choices": [{{"message": {{"content": "{encoded}"}}}}]}}'),
        "reply": Fault(reply=good),
        "compressed": Fault(headers={"Content-Encoding": encoded}),
        "model": Fault(body=f'{{"model": "{encoded}", ' + envelope().decode()[1:]),
    }
    for name, fault in faults.items():
        journal = tmp_path / f"{name}.jsonl"
        with FaultyJudge(after=fault) as judge:
            try:
                config = {"api_key_env": "ODDLY_NAMED", "max_attempts": 1}
                output = repr(with_client(judge, lambda c: ask_all(c, 1), journal, **config))
            except JudgeError as error:
                output = str(error)
        output += caplog.text + journal.read_text()
        for secret in (KEY, encoded, KEY[:10], encoded[:16]):
            assert secret not in output, (name, output)
    kept = (tmp_path / "reply.jsonl").read_text()
    assert "<ODDLY_NAMED>" in kept and "score" in json.loads(kept)["reply"]


def test_the_journal_is_scrubbed_and_readable_only_by_its_owner(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", KEY)
    path = tmp_path / "replies.jsonl"
    path.write_text('{"key": "old", "reply": "kept"}\n')
    path.chmod(0o664)
    with closing(ReplyJournal(path)) as journal:
        kept = journal.put("new", f"said {KEY}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert kept == "said <SOME_TOKEN>" and KEY not in path.read_text()
    with closing(ReplyJournal(path)) as again:
        assert (again.get("old"), again.get("new")) == ("kept", kept), "as in the first run"
