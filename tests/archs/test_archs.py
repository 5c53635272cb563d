"""Every architecture of llama.cpp is compacted exactly, or refused with its reason."""

from __future__ import annotations
