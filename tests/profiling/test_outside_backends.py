"""Patches of other packages: their size and licence, how they are applied, and what the page says of their results."""

from pathlib import Path
from typing import Any

import pytest
import torch

LICENCES = {"MIT licence", "Apache License 2.0"}
BEFORE = "import this\n\nfor x in xs:\n    h = f(h, x)\nlast = 1\n"
AFTER = "import this\nimport tensorloop\n\nh = scan(f, h, xs)\nlast = 1\n"
PATCH = """Made for some 1.0, MIT licence: a loop.
--- a/some/loop.py
+++ b/some/loop.py
@@ -1,0 +2 @@
+import tensorloop
@@ -3,2 +4 @@
-for x in xs:
-    h = f(h, x)
+h = scan(f, h, xs)
"""


@pytest.fixture
def some(scripts: dict[str, Any], tmp_path: Path) -> Any:
    """A patch of a package that nobody has."""
    (tmp_path / "some.patch").write_text(PATCH)
    return scripts["patching"].read(tmp_path / "some.patch")


def test_patches_are_small_and_name_their_licence(scripts: dict[str, Any]):
    patches = scripts["patching"].patches()
    assert {patch.package for patch in patches} == scripts["patched_calls"].CALLS.keys()
    for patch in patches:
        assert patch.lines <= 30, patch.package
        assert patch.licence in LICENCES
        assert sum(len(hunk.old) for hunks in patch.files.values() for hunk in hunks) <= 5, "theirs stays theirs"
        added = "\n".join(line for hunks in patch.files.values() for hunk in hunks for line in hunk.new)
        assert added.startswith("try:\n    import tensorloop\nexcept ImportError:\n    tensorloop = None\n")


def test_a_patch_is_applied_to_a_copy(scripts: dict[str, Any], some: Any, tmp_path: Path):
    assert (some.package, some.version, some.licence, some.what) == ("some", "1.0", "MIT licence", "a loop")
    assert (some.lines, some.folder) == (4, "some")
    installed, copy = tmp_path / "installed", tmp_path / "copy"
    (installed / "some").mkdir(parents=True)
    (installed / "some" / "loop.py").write_text(BEFORE)
    scripts["patching"].patched_copy(some, installed, copy)
    assert (copy / "some" / "loop.py").read_text() == AFTER
    assert (installed / "some" / "loop.py").read_text() == BEFORE


def test_ends_of_lines_stay(scripts: dict[str, Any], some: Any):
    windows = scripts["patching"].changed(BEFORE.replace("\n", "\r\n"), some.files["some/loop.py"])
    assert windows == AFTER.replace("\n", "\r\n")


def test_other_lines_are_refused(scripts: dict[str, Any], some: Any):
    with pytest.raises(scripts["patching"].DoesNotApply, match=r"^line 3 is \['for x in ys:'"):
        scripts["patching"].changed(BEFORE.replace("xs", "ys"), some.files["some/loop.py"])


def test_a_patch_without_a_licence_is_refused(scripts: dict[str, Any], tmp_path: Path):
    (tmp_path / "x.patch").write_text(PATCH.replace(", MIT licence", ""))
    with pytest.raises(ValueError, match=r"^x\.patch begins with 'Made for some 1\.0: a loop\.'; expected"):
        scripts["patching"].read(tmp_path / "x.patch")


def test_a_difference_is_seen(scripts: dict[str, Any]):
    script, ones = scripts["outside_backends"], torch.ones(3)
    assert script.distance(ones, ones) == 0
    assert script.distance(2 * ones, torch.tensor([2.0, 2.0, 2.5])) == 0.25
    assert script.distance(ones, torch.ones(2)) == float("inf")


def test_counts_of_a_test_run(scripts: dict[str, Any]):
    counts = scripts["outside_backends"].counts
    assert counts("128 passed, 34 errors in 14.51s") == {"passed": 128, "error": 34}
    assert counts("1 failed, 7 skipped, 1 xfailed in 2s") == {"failed": 1, "skipped": 7, "xfailed": 1}


def test_a_call_has_values_and_gradients(scripts: dict[str, Any]):
    calls, x = scripts["patched_calls"], torch.ones(2, requires_grad=True)
    value, gradient = calls.forward_backward(calls.Call(lambda: (x * 3, torch.tensor(1)), [x]))
    assert (value.tolist(), gradient.tolist()) == ([3, 3], [1.5, 4.5])


def test_what_is_missing_is_named(scripts: dict[str, Any]):
    script = scripts["outside_backends"]
    cell = {"kind": "calls", "package": "torchlpc", "set": "usual"}
    result = {"entries": [{"cell": cell, "raw": [{"absent": "not installed"}]}]}
    assert script.section(result, "").endswith("Left out: torchlpc: not installed.")
    assert (script.targets(result), script.summary(result)) == ([], [])


def test_slower_calls_are_named(scripts: dict[str, Any]):
    call = {"name": "f", "dtypes": ["x"] * 2, "apart": 1e-16, "first_s": [1, 2], "s": [1e-3, 3e-3], "bytes": [0, 0]}
    entry = {"cell": {"kind": "calls", "package": "torchlpc", "set": "usual"}, "raw": [{"calls": [call]}]}
    script = scripts["outside_backends"]
    assert script.summary({"entries": [entry]}) == [
        "1 calls of 1 packages take 3 times as long. Slower: torchlpc, f (3.0 times)."
    ]
    assert script.row_of({"package": "torchlpc"} | call)[2:] == ["1", "3", "3.00", "-", "1/2", "1e-16"]
