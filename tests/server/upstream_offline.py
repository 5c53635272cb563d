"""pytest plugin for upstream's own server tests: local models instead of downloads, see upstream.py."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

# which model stands in for which repository; all else needs the network
STANDS_IN = {
    "ggml-org/models": "llama",
    "ggml-org/test-model-stories260K": "llama",
    "ggml-org/test-model-stories260K-infill": "llama",
    "ggml-org/stories15M_MOE": "llama",
    "ggml-org/tinygemma3-GGUF:Q8_0": "gemma3",
}


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    sys.path.insert(0, str(config.rootpath))
    import utils  # type: ignore[import-not-found]  # upstream's

    started = utils.ServerProcess.start

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.model_hf_repo:
            name = STANDS_IN.get(self.model_hf_repo, "")
            if "bert" in (self.model_hf_file or ""):
                name = "bert"
            if not name or self.mmproj_url or "reranker" in (self.model_hf_file or ""):
                pytest.skip(f"needs the network: {self.model_hf_repo} {self.model_hf_file or ''}")
            self.model_file = os.environ[f"UPSTREAM_MODEL_{name.upper()}"]
            self.model_hf_repo = self.model_hf_file = None
        if self.model_url or self.model_draft:
            pytest.skip("needs the network: a model by URL, or a draft model")
        started(self, *args, **kwargs)

    utils.ServerProcess.start = start
    utils.ServerPreset.load_all = staticmethod(lambda: None)
