"""What is generated from the protos, and the protos themselves."""

import subprocess
import sys
from pathlib import Path

import pytest

from vorrang.v1 import control_pb2, errors_pb2, generation_pb2, types_pb2

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("what", ["check", "lint"])
def test_protos_are_clean_commented_and_their_code_up_to_date(what):
    done = subprocess.run(
        [sys.executable, "tools/protos.py", what], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_zero_value_is_unspecified():
    for module in (control_pb2, errors_pb2, generation_pb2, types_pb2):
        for enum in module.DESCRIPTOR.enum_types_by_name.values():
            assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")


def test_no_address_is_pinned():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or "://" not in line
        assert line.startswith("#") or "==" in line
