"""Every Python block of the README runs, and the text block after one is what it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```(?:\s*```text\n(.*?)```)?", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs_and_prints_what_the_readme_says(number: int, tmp_path: Path) -> None:
    code, expected = BLOCKS[number]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"],
        capture_output=True, text=True, cwd=tmp_path, timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    if expected:
        assert [line.rstrip() for line in run.stdout.splitlines()] == [line.rstrip() for line in expected.splitlines()]


def test_there_are_blocks_and_the_files_it_names_exist() -> None:
    assert len(BLOCKS) == 4
    for target in re.findall(r"\]\((examples/[^)]*)\)", README):
        assert (ROOT / target).exists(), target
    assert README.count("\n") < 250


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make ([a-z-]+)", README):
        if target != "nothing":
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
