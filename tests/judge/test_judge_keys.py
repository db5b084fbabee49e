"""A key that an endpoint sends back, in whatever spelling and place, is written nowhere."""

from __future__ import annotations

import base64
import json
import stat
from pathlib import Path
from urllib.parse import quote

import pytest
from tiny_faulty_judge import Fault, FaultyJudge, ask_all, with_client

from rl.judge.client import JudgeError
from rl.judge.journal import ReplyJournal

KEY = "sk-ver/secret+0123456789"
SPELLINGS = {
    "itself": KEY,
    "percent": quote(KEY, safe=""),
    "every sign percent": "".join(f"%{ord(char):02x}" for char in KEY),
    "json": "".join(f"\\u{ord(char):04x}" for char in KEY),
    "json's slash": KEY.replace("/", "\\/"),
    "base64": base64.b64encode(f"user:{KEY}".encode()).decode(),
    "base64 of URLs": base64.urlsafe_b64encode(f"Bearer {KEY}".encode()).decode().rstrip("="),
    "hexadecimal": KEY.encode().hex(),
}


def told(judge: FaultyJudge, journal: Path) -> str:
    """All that the client keeps or says of one question."""

    config = {"api_key_env": "ODDLY_NAMED", "max_attempts": 1}
    try:
        return repr(with_client(judge, lambda client: ask_all(client, 1), journal, **config))
    except JudgeError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("spelt", SPELLINGS.values(), ids=range(len(SPELLINGS)))
def test_an_echoed_key_is_written_nowhere(spelt: str, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("ODDLY_NAMED", KEY)
    good = json.dumps({"reasoning": f"said {spelt}", "score": [1, 2]})
    faults = {
        "refusal": Fault(401, body=f"wrong key {spelt}"),
        "redirect": Fault(307, headers={"Location": f"http://elsewhere/v1?key={spelt}"}),
        "failure": Fault(503, body="x" * 550 + spelt),
        "no reply": Fault(body=json.dumps({"error": spelt})),
        "body": Fault(body=f'{{"choices": [{{"message": {{"content": "{spelt}"}}}}]}}'),
        "reply": Fault(reply=good),
        "compressed": Fault(headers={"Content-Encoding": spelt}),
    }
    for name, fault in faults.items():
        journal = tmp_path / f"{name}.jsonl"
        with FaultyJudge(after=fault) as judge:
            said = told(judge, journal) + caplog.text + journal.read_text()
        for secret in (KEY, spelt, KEY[:10], spelt[:16]):
            assert secret not in said, (name, said)
    kept = (tmp_path / "reply.jsonl").read_text()
    assert "<ODDLY_NAMED>" in kept and "score" in json.loads(kept)["reply"]


def test_the_journal_is_scrubbed_and_this_users_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", KEY)
    path = tmp_path / "replies.jsonl"
    path.write_text('{"key": "old", "reply": "kept"}\n')
    path.chmod(0o664)
    journal = ReplyJournal(path)
    kept = journal.put("new", f"said {KEY}")
    journal.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert kept == "said <SOME_TOKEN>" and KEY not in path.read_text()
    again = ReplyJournal(path)
    assert (again.get("old"), again.get("new")) == ("kept", kept), "as the first run read it"
    again.close()
