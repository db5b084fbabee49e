"""Commands end without tracebacks, suggest the right word, and use colour on terminals only."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_config import REPO
from tiny_messages import code_of, holds, refusal

from rl import printing
from rl.config.loading import nearest
from rl.config.schema import ConfigError
from rl.simple_launch import main as launch
from rl.tools.commands.audit_judge import main as judge
from rl.tools.commands.check_gpu import main as check_gpu
from rl.tools.commands.edit import main as edit
from rl.tools.commands.rehearse import main as rehearse
from rl.tools.commands.report import main as report
from rl.tools.commands.runs import main as runs


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (EOFError(), 130, "interrupted"),
        (ValueError("say why"), 1, "say why"),
        (PermissionError(13, "Permission denied", "/x"), 1, "/x: Permission denied ... access"),
        (FileNotFoundError(2, "No such file", "/x"), 1, "/x: No such file"),
        (ConfigError(["seed: wrong", "name: wrong"]), 1, "  - seed: wrong ...   - name: wrong"),
    ],
)
def test_an_error_becomes_a_sentence(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @printing.program
    def main(arguments: Sequence[str] | None = None) -> int:
        raise error

    assert main([]) == code
    assert holds(capsys.readouterr().err, message)


def test_a_bug_keeps_its_traceback() -> None:
    @printing.program
    def main(arguments: Sequence[str] | None = None) -> int:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        main([])


def test_an_early_interrupt_and_a_closed_pipe_print_no_traceback(tmp_path: Path) -> None:
    code = "import sys; sys.argv = ['-m']; import rl; raise KeyboardInterrupt"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert done.stderr == "interrupted\n"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "rl.tools.commands.runs", str(tmp_path)],
        cwd=REPO,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_colour_is_for_terminals_and_without_no_color(
    terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    for no_color, is_red in (("1", False), ("", True)):
        monkeypatch.setenv("NO_COLOR", no_color)
        printing.show("bad \x1b[32m", "red", terminal, marks={"bad": "bold"})
        assert ("\x1b[31" in terminal.getvalue() or ";31m" in terminal.getvalue()) == is_red
    assert terminal.getvalue().count("\\x1b[32m") == 2, "foreign colour is escaped"
    pipe = io.StringIO()
    printing.show("bad", "red", pipe)
    assert pipe.getvalue() == "bad\n"


def test_a_wrong_option_or_value_is_answered_with_the_nearest() -> None:
    for main, words, message in (
        (runs, "--sortt name", "rl runs: ... --sortt; did you mean '--sort'? ... rl runs --help"),
        (runs, "--sort held-ot", "held-ot ... choose from ... held-out"),
        # before minutes of checks, not after
        (check_gpu, f"configs/quickstart.jsonnet --tiny seed=1 --out {__file__}", "name a folder"),
    ):
        assert holds(refusal(main, words.split(), 2), message)


def test_what_may_be_left_out_is_neither_demanded_nor_guessed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for main, arguments, error in (
        (rehearse, [], "rl rehearse: the following arguments are required: config\n"),
        (judge, ["audit"], "rl judge: the following arguments are required: config\n"),
        (judge, ["x", "c"], "rl judge: argument action: invalid choice: 'x' (choose from "),
        (launch, ["--check"], "rl check: a config is missing, for example: rl check configs/"),
        (launch, ["--smok", "c"], "unrecognized arguments: --smok; did you mean '--smoke'?\n"),
        (edit, ["--only-words"], "rl enhance: the following arguments are required: what"),
        (report, ["x", "--agains", "y"], "did you mean '--against'?\n"),
    ):
        assert error in refusal(main, arguments, 2)
    for main in (runs, report):
        assert code_of(main, "--help") == 0
        shown = capsys.readouterr().out
        assert ("{written," in shown) == (main is runs) and "--refresh" not in shown


def test_of_many_known_words_only_the_nearest_are_shown() -> None:
    known = [f"some_key_{number}" for number in range(40)]
    assert nearest("x_7", known).count("some_key_") == 16
    assert "some_key_7" in nearest("x_7", known) and nearest("x_7", known).endswith(", ...")
