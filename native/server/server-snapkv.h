#pragma once

// SnapKV in llama-server: what tools/server calls

#include "common-snapkv.h"
#include "json.h"

#include <cstdint>
#include <string>

struct server_tokens;

// of the tokens that a slot, or a saved state, holds
struct server_snapkv_prompt {
    int32_t n_released = 0; // tokens whose cells are free
    int32_t n_prompt   = 0; // tokens that the last pass chose among, 0: whole

    common_params_snapkv params; // of the last pass, not enabled if they are not known (restored from a file)

    // how many of n_common tokens a request with these settings can use: all or none
    int32_t n_usable(int32_t n_common, const common_params_snapkv & params) const;

    // whether what this serves covers what the other serves, if its tokens begin with the other's
    bool covers(const server_snapkv_prompt & other) const;
};

// false, or the settings
common_json server_snapkv_to_json(const common_params_snapkv & params);

// the field "snapkv" of a request: true, false, or an object of settings; what it does not name is as in params
// throws std::invalid_argument
common_params_snapkv server_snapkv_from_json(const common_json & value, const common_params_snapkv & params);

// the pass of one request
struct server_snapkv_stats {
    bool is_set = false;

    llama_snapkv_status status = LLAMA_SNAPKV_STATUS_OK;

    int32_t n_prompt       = 0; // tokens
    int32_t n_cells_before = 0;
    int32_t n_cells_after  = 0;
    int32_t n_window       = 0; // really used
    int64_t t_us           = 0;

    common_json to_json() const;
};

// since the server started
struct server_snapkv_metrics {
    bool is_enabled = false;

    uint64_t n_passes  = 0;
    uint64_t n_evicted = 0; // tokens
    uint64_t t_us      = 0;
    uint64_t n_cells   = 0; // in use now

    void add(const server_snapkv_stats & stats);

    // lines of Prometheus' text format, none if SnapKV is off
    std::string to_metrics() const;
};

// how many of the n_past tokens that a slot has in common with a new prompt can be used for it: all of them, fewer, so
// that the queries of the new prompt's last tokens are there to choose with, or none if they were compacted for another
// question or with other settings than the request's
int32_t server_snapkv_n_past(
        const llama_context        * ctx,
              llama_seq_id           seq_id,
        const server_tokens        & cached,
        const server_snapkv_prompt & state,
        const server_tokens        & prompt,
              int32_t                n_past,
        const common_params_snapkv & params);

// the pass after a prompt of n_prompt tokens
server_snapkv_stats server_snapkv_compact(llama_context * ctx, llama_seq_id seq_id, int32_t n_prompt, const common_params_snapkv & params);

// what is wrong with a sequence restored from a file, that should hold these tokens, null if nothing is
const char * server_snapkv_check_restored(const llama_context * ctx, llama_seq_id seq_id, const server_tokens & tokens, const std::string & path, size_t n_read);

// of what the sequence holds now
server_snapkv_prompt server_snapkv_state(const llama_context * ctx, llama_seq_id seq_id, const common_params_snapkv & params = {});

// cells that count against the n_ctx of a slot that holds n_tokens tokens: those in use, but not fewer than leave the tokens
// within the model's trained context, nor than a draft model's cache holds
int32_t server_snapkv_n_used(const llama_context * ctx, bool has_draft, int32_t n_ctx, int32_t n_tokens, int32_t n_released);
