"""The image is built from every package of the wheel; that it serves is for the deep tests."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_package_of_the_wheel_goes_into_the_image():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    built = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    packages = {path.split("/")[0] for path in built}

    copied = set(re.findall(r"^COPY (\w+) \1$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    let_in = set(re.findall(r"^!(\w+)", (ROOT / ".dockerignore").read_text(), re.MULTILINE))

    assert copied == packages
    assert packages <= let_in
