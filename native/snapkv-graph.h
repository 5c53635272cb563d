#pragma once

// the two graphs of the pass: attention of the window to each cell, and the moves of the kept rows
// both run through the context's scheduler, in slices, so that scratch memory does not grow with the prompt

#include "snapkv-hooks.h"

#include <cstdint>
#include <functional>
#include <vector>

struct llama_context;

// what one graph may take for a temporary tensor, and for all that lives until it has run: inputs, outputs, logits
constexpr size_t SNAPKV_N_BYTES_SLICE = 12*1024*1024;

// attention of the last n_window cells of the order to each cell, summed over them, per layer and query head
// on_scores is called once per layer: [n_head][n], heads in the order of (KV head, reader, head of the reader)
// the queries of these cells must be in the ring
ggml_status snapkv_compute_scores(
        llama_context & lctx,
        llama_snapkv  & snapkv,
        llama_seq_id    seq_id,
        const std::vector<std::pair<llama_pos, uint32_t>> & order,
        uint32_t        n_window,
        const std::vector<uint32_t> & layers,
        const std::function<void(uint32_t i, const std::vector<float> & scores)> & on_scores);

// rows of the cells order[keep[layer][head][j]] go to the cells dst[j], as they are stored
// keep: by layer and KV head, ascending; the source cells can be overwritten
// rotated: positions that the K rows of the order are rotated to, those in dst are then rotated to snapkv.pos_packed + j; empty: as they are stored
ggml_status snapkv_compute_moves(
        llama_context & lctx,
        llama_snapkv  & snapkv,
        llama_seq_id    seq_id,
        const std::vector<std::pair<llama_pos, uint32_t>> & order,
        const std::vector<std::vector<std::vector<uint32_t>>> & keep,
        const std::vector<uint32_t> & dst,
        const std::vector<llama_pos> & rotated);
