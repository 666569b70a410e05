"""What a page shows below its blocks is what they print: written, and compared in a way that can fail."""

from pathlib import Path

import pytest

from docs import outputs
from docs.outputs import difference, run, same_line, written


def wrong(text: str) -> list[str]:
    return [found for one in run(text, "doc.md") if (found := difference(one))]


def rewritten(text: str) -> str:
    return written(text, run(text, "doc.md"))


def page(code: str, output: str) -> str:
    return f"# A page\n\n```python\n{code}\n```\n\n```output\n{output}\n```\n"


def test_what_is_printed_is_shown():
    assert wrong(page("print(1 + 1)", "2")) == []
    assert wrong(page("print(1 + 1)", "3")) == ["line 8: shown, then printed:\n3\n2"]


def test_a_block_that_prints_has_an_output():
    assert wrong("```python\nprint(1)\n```\n") == ["line 2: prints, and no output is shown:\n1"]


def test_a_block_that_prints_nothing_has_none():
    assert wrong(page("a = 1", "1")) == ["line 8: an output is shown, and the block prints nothing"]


@pytest.mark.parametrize("output", ["1\n2\n3", "1"])
def test_lines_are_not_left_out(output: str):
    (found,) = wrong(page("print(1)\nprint(2)", output))
    assert f"{len(output.splitlines())} lines shown, 2 printed" in found


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("kept 1,024 bytes", "kept   1,024  bytes"),
        ("0.5031 and T^1.93", "0.5049 and T^1.94"),
        ("tensor([1., -2.])", "tensor([1., -2.01])"),
        ("1.00e-05", "1.005e-05"),
        ("eager 12.1 ms, compiled 3 ms", "eager 800.5 ms, compiled 40 ms"),
        ("took 3 µs, 4μs, 5us", "took 1 µs, 1μs, 1us"),
        ("1.5 s", "12.5 s"),
        ("1,000 steps/s", "2,000 steps/s"),
        ("2.5 times faster", "9.1 times faster"),
        ("1.8x of 3 seconds", "7.1x of 1 seconds"),
    ],
)
def test_lines_that_are_the_same(shown: str, printed: str):
    assert same_line(shown, printed)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("1000", "1001"),
        ("1,000", "1,001"),
        ("0.50", "0.51"),
        ("T^1.90", "T^1.93"),
        ("-0.5", "0.5"),
        ("1e-05", "1.1e-05"),
        ("2", "2.0"),  # another type
        ("of 100.", "of 101."),  # an integer, and the end of a sentence
        ("float32", "float64"),
        ("v1.2.3", "v1.2.4"),
        ("doc.md:40", "doc.md:41"),
        ("eager 12 ms", "compiled 12 ms"),
        ("12 ms", "12 items"),
        ("12 samples", "13 samples"),
        ("3 terms", "4 terms"),
        ("a b", "ab"),
        ("nan", "1.0"),
    ],
)
def test_lines_that_are_not(shown: str, printed: str):
    assert not same_line(shown, printed)


def test_outputs_are_written_and_hold_then():
    text = "# A\n\n```python\nprint('x')\nprint()\nprint('  y')\n```\n\nText.\n\n```python\nb = 1\n```\n"
    new = rewritten(text)
    assert new == text.replace("\n\nText.", "\n\n```output\nx\n\n  y\n```\n\nText.")
    assert wrong(new) == []
    assert rewritten(new) == new


def test_outputs_that_hold_stay_and_others_are_replaced():
    assert rewritten(page("print('7 ms')", "5 ms")) == page("print('7 ms')", "5 ms")
    assert rewritten(page("print(2)\nprint(3)", "5")) == page("print(2)\nprint(3)", "2\n3")
    assert rewritten(page("a = 1", "5")) == "# A page\n\n```python\na = 1\n```\n"


def test_blocks_inside_lists():
    text = "- One:\n\n  ```python\n  if True:\n      print(' 1')\n  ```\n\n- Two.\n"
    new = rewritten(text)
    assert new == text.replace("\n- Two", "\n  ```output\n   1\n  ```\n\n- Two")
    assert wrong(new) == []
    assert wrong(new.replace("   1", "   2"))


def test_a_fence_that_is_printed_does_not_end_the_output():
    text = "```python\nprint('`' * 3)\n```\n"
    new = rewritten(text)
    assert new.endswith("````output\n```\n````\n")
    assert wrong(new) == []


def test_what_goes_to_stderr_is_not_shown():
    assert wrong("```python\nimport sys\nprint(1, file=sys.stderr)\n```\n") == []


@pytest.mark.parametrize(
    "text",
    [
        "```output\n1\n```\n",
        "```python\nprint(1)\n```\n\nText.\n\n```output\n1\n```\n",
        "```python\nprint(1)\n```\n\n```output\n1\n```\n\n```output\n1\n```\n",
    ],
)
def test_an_output_is_directly_below_its_block(text: str):
    with pytest.raises(ValueError, match="the output is not directly below a Python block"):
        run(text, "doc.md")


@pytest.mark.parametrize("info", ["Output", "outputs", "output text"])
def test_an_output_cannot_escape(info: str):
    with pytest.raises(ValueError, match="write 'output', so that it is compared"):
        run(f"```python\nprint(1)\n```\n\n```{info}\n2\n```\n", "doc.md")


def test_a_page_that_names_its_own_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """Writing the first output moves the line that the second names."""
    monkeypatch.setattr(outputs, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    doc = tmp_path / "docs" / "doc.md"
    doc.write_text(
        "```python\nprint(1)\n```\n\n```python\nimport sys\nframe = sys._getframe()\n"
        "print(f'{frame.f_code.co_filename}:{frame.f_lineno}')\n```\n"
    )
    monkeypatch.setattr("sys.argv", ["outputs", str(doc)])
    outputs.main()
    assert "docs/doc.md:12\n" in doc.read_text()
    assert capsys.readouterr().out == f"{doc}\n"
    monkeypatch.setattr("sys.argv", ["outputs", "--check", str(doc)])
    outputs.main()
    doc.write_text(before := doc.read_text().replace("md:12", "md:13"))
    with pytest.raises(
        SystemExit, match=r"docs/doc\.md, line 16: shown, then printed:\ndocs/doc\.md:13\ndocs/doc\.md:12"
    ):
        outputs.main()
    assert doc.read_text() == before


def test_a_page_that_never_prints_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outputs, "ROOT", tmp_path)
    (tmp_path / "doc.md").write_text("```python\nimport time\nprint(time.perf_counter_ns())\n```\n")
    with pytest.raises(RuntimeError, match=r"doc\.md prints something else each time"):
        outputs.write(tmp_path / "doc.md")
