#pragma once

// the pass over one sequence, and what those who call it share

#include "snapkv-hooks.h"

#include "ggml.h"

#include <new>
#include <utility>
#include <vector>

struct llama_context;

// the context's cache, null if it is of another kind
llama_kv_cache * snapkv_get_cache(const llama_context & lctx);

// null if not enabled
llama_snapkv * snapkv_get(const llama_context & lctx);

// null if not enabled or no such sequence
llama_snapkv * snapkv_get(const llama_context & lctx, llama_seq_id seq_id);

// whether sequences of this context can be compacted at all
llama_snapkv_status snapkv_check(const llama_context & lctx);

// whether a pass can be called; params: to use for it, those of params_in, or of llama_snapkv_init() if it is null
llama_snapkv_status snapkv_check_call(const llama_context & lctx, llama_seq_id seq_id, const llama_snapkv_params * params_in, llama_snapkv_params & params);

// a new scheduler and new compute buffers, as after any other change of the graph
bool snapkv_reserve(llama_context & lctx);

// f(), or a status if it runs out of memory
template <typename F>
ggml_status snapkv_try(const F & f) {
    try {
        return f();
    } catch (const std::bad_alloc &) {
        return GGML_STATUS_ALLOC_FAILED;
    }
}

// add up the attention of the cells of the order that were not observed yet
llama_snapkv_status snapkv_observe(
        llama_context & lctx,
        llama_snapkv  & snapkv,
        llama_seq_id    seq_id,
        const std::vector<std::pair<llama_pos, uint32_t>> & order);

// params: checked
// n_tail: last cells that keep a position of their own, 0: params.n_window
llama_snapkv_status snapkv_pass(
        llama_context & lctx,
        llama_snapkv  & snapkv,
        llama_seq_id    seq_id,
        const llama_snapkv_params & params,
        uint32_t        n_tail,
        llama_snapkv_stats & stats);
