"""The blocks of the guides for Go and Java are lines of code that those languages' own tests run.

So is the first program, which is the README's.
"""

import re

import pytest

from tests.support.process import ROOT

_SOURCES = {
    "go": "clients/go/guide_test.go",
    "java": "clients/java/src/test/java/io/vorrang/examples/Guide.java",
}


def _lines(code: str) -> str:
    """The code without its indentation, which differs between a page and a method."""
    return "\n" + "\n".join(line.strip() for line in code.splitlines()) + "\n"


@pytest.mark.parametrize("language", _SOURCES)
def test_every_block_of_a_guide_is_run_by_a_test(language: str) -> None:
    guide = (ROOT / f"docs/clients/{language}.md").read_text()
    source = _lines((ROOT / _SOURCES[language]).read_text())
    (program,) = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    blocks = re.findall(r"```(\w*)\n(.*?)```", guide, re.DOTALL)
    kinds = [kind for kind, _ in blocks]
    assert kinds.count(language) >= 10
    assert set(kinds) <= {language, "text", "xml"}
    for kind, block in blocks:
        assert kind != language or block == program or _lines(block) in source, block


@pytest.mark.parametrize("language", _SOURCES)
def test_the_pages_a_guide_points_to_exist(language: str) -> None:
    folder = ROOT / "docs/clients"
    for path in re.findall(r"\]\(([^)#:]+)\)", (folder / f"{language}.md").read_text()):
        assert (folder / path).exists(), path
