from __future__ import annotations

from pathlib import Path

import pytest
from models import write_models


@pytest.fixture(scope="session")
def arch_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A small random model of every architecture."""
    return write_models(tmp_path_factory.mktemp("archs"))
