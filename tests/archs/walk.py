"""What the pass does with one model: run over all of upstream's architectures, each in a process that may die."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import gguf

N, N_NEXT, BUDGET = 200, 8, 64


@dataclass
class Found:
    """Of one model: kinds of its cache, the status of llama_snapkv_init(), and what went wrong."""

    name: str  # of the file: the architecture, and whether it is a mixture of experts
    caches: tuple[str, ...] = ()
    status: str = ""
    remarks: tuple[str, ...] = ()
    faults: list[str] = field(default_factory=list)

    @property
    def arch(self) -> str:
        """The architecture's name in GGUF."""
        return re.sub("-(dense|moe)$", "", self.name)


def look(path: Path) -> Found:
    """Compact a prompt of several ubatches with the model, compare with the oracle, and decode on."""
    import numpy as np
    from engine import Engine, logged, params, random_tokens

    from snapkv_gguf import _capi
    from snapkv_gguf._capi import Status

    found = Found(path.stem)
    settings = [params(BUDGET, 16, kernel=7), params(BUDGET, 8, 24, 5, "avg")]
    tokens = random_tokens(N, vocabulary_size(path), seed=1)

    for flash_attn in (True, False):
        logged()
        try:
            with Engine(path, params(N, 16), n_ctx=512, n_ubatch=48, flash_attn=flash_attn) as engine:
                found.caches = caches_of(logged())
                status = engine.init_status
                assert status is not None
                found.status = status.name
                if status is not Status.OK:
                    if engine.compact()[0] not in (Status.NOT_ENABLED, status):
                        found.faults.append("compacted though it was refused")
                    continue

                found.remarks = remarks_of(_capi.layers(engine.ctx))
                for setting in settings:
                    engine.check_pass(setting, tokens)
                    for i in range(N_NEXT):
                        if not np.isfinite(engine.decode([tokens[i]], N + i)).all():
                            found.faults.append("logits are not finite after the pass")
                            break

                # a budget of the prompt's size changes nothing
                engine.clear()
                engine.decode(tokens)
                if engine.compact(0, params(N, 16))[0] is not Status.WITHIN_BUDGET:
                    found.faults.append("compacted within the budget")
                enabled = engine.greedy(N_NEXT, N)
            with Engine(path, None, n_ctx=512, n_ubatch=48, flash_attn=flash_attn) as engine:
                engine.decode(tokens)
                if not np.array_equal(enabled[1], engine.greedy(N_NEXT, N)[1]):
                    found.faults.append("capture changes the logits")
        except AssertionError as err:
            found.faults.append(f"flash attention {flash_attn}: {str(err).strip() or repr(err)} at line {line_of(err)}")
    return found


def line_of(err: BaseException) -> int:
    trace = err.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_lineno if trace else 0


def vocabulary_size(path: Path) -> int:
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    return int(reader.fields[f"{arch}.vocab_size"].contents())


# kinds of memory by the functions that log at their creation
CACHES = {
    "llama_kv_cache_iswa": "sliding window beside full",
    "llama_kv_cache_dsa": "MLA with token indexer",
    "llama_kv_cache_dsa_iswa": "sliding window beside full",
    "llama_kv_cache_dsv4": "compressed blocks",
    "llama_kv_cache_msa": "full with block indexer",
    "llama_memory_recurrent": "recurrent",
}


def caches_of(log: str) -> tuple[str, ...]:
    names = set(re.findall(r"^(llama_kv_cache\w*|llama_memory_\w+):", log, re.M))
    kinds = [CACHES[name] for name in CACHES if name in names]
    if "llama_kv_cache" in names and not any(kind for kind in kinds if kind != "recurrent"):
        kinds.insert(0, "full")
    return tuple(dict.fromkeys(kinds)) or ("none",)


def remarks_of(layers: list[object]) -> tuple[str, ...]:
    """What is special about the layers that are compacted."""
    found = []
    if any(not any(t.is_v for t in layer.tensors) for layer in layers):
        found.append("K only (MLA)")
    if any(len(layer.readers) > len({t.il for t in layer.tensors}) for layer in layers):
        found.append("layers share K and V")
    if any(len({t.il for t in layer.tensors}) > 1 for layer in layers):
        found.append("layers share an indexer")
    if len({(layer.n_head, layer.n_head_kv) for layer in layers}) > 1:
        found.append("heads differ by layer")
    if any(reader.has_sinks for layer in layers for reader in layer.readers):
        found.append("sinks")
    if any(reader.softcap for layer in layers for reader in layer.readers):
        found.append("soft-capping")
    return tuple(found)


def walk(paths: list[Path]) -> Iterator[Found]:
    """look() at each model; one that kills its process is a fault."""
    pool = None
    for path in paths:
        pool = pool or ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        try:
            yield pool.submit(look, path).result()
        except BrokenProcessPool:
            yield Found(path.stem, faults=["the process died"])
            pool = None
        except Exception as err:  # of this model, the others go on
            yield Found(path.stem, faults=[repr(err)])
    if pool:
        pool.shutdown()
