"""Write the exact versions of the running environment to constraints.txt, without addresses."""

from importlib.metadata import distributions
from pathlib import Path

HEADER = """\
# Exact versions CI uses. No addresses: any index that has them will do.
# Regenerate: make constraints
"""
OWN = {"vorrang", "pip", "setuptools"}

if __name__ == "__main__":
    pins = {d.metadata["Name"].lower(): d.version for d in distributions()}
    lines = [f"{name}=={version}\n" for name, version in sorted(pins.items()) if name not in OWN]
    (Path(__file__).resolve().parent.parent / "constraints.txt").write_text(HEADER + "".join(lines))
