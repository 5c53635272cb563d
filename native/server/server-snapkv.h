#pragma once

// SnapKV in llama-server: what tools/server calls

#include "common-snapkv.h"
#include "json.h"

#include <cstdint>
#include <functional>
#include <limits>
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

// SnapKV on the empty context of a server, each of whose slots has n_cells cells; completes the settings
// false, with the reason in the log, if they cannot go together
bool server_snapkv_init(llama_context * ctx, common_params_snapkv & params, int32_t n_cells, bool has_draft);

// the passes of one request that made room for more tokens than the cells hold
struct server_snapkv_chunks {
    bool is_on = false;

    int32_t n_passes        = 0; // while the prompt was read
    int32_t n_passes_answer = 0;
    int32_t n_evicted       = 0; // by all of them
    int32_t n_window        = 0; // tokens that chose, in one pass
    int64_t t_us            = 0; // of the prompt's, with their probes
    int64_t t_answer_us     = 0;
};

// the pass of one request
struct server_snapkv_stats {
    bool is_set = false; // at the prompt's end

    server_snapkv_chunks chunks;

    llama_snapkv_status status = LLAMA_SNAPKV_STATUS_OK;

    int32_t n_prompt       = 0; // tokens
    int32_t n_cells_before = 0;
    int32_t n_cells_after  = 0;
    int32_t n_window       = 0; // really used
    int64_t t_us           = 0;

    // one in the middle of a prompt of n_prompt tokens, or of its answer; n_released: of the slot's tokens
    void add(const server_snapkv_chunks & other, int32_t n_prompt, int32_t n_released);

    bool has_passes() const { return is_set || chunks.n_passes > 0 || chunks.n_passes_answer > 0; }

    common_json to_json() const;
};

// since the server started
struct server_snapkv_metrics {
    bool is_enabled = false;
    bool has_chunks = false;

    uint64_t n_passes        = 0; // at the ends of prompts
    uint64_t n_passes_chunk  = 0;
    uint64_t n_passes_answer = 0;
    uint64_t n_evicted       = 0; // tokens
    uint64_t t_us            = 0;
    uint64_t n_cells         = 0; // in use now

    void add(const server_snapkv_stats & stats);
    void add(const server_snapkv_chunks & chunks);

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

// what surrounds a slot that reads a prompt
struct server_snapkv_surroundings {
    int32_t n_cells  = 0; // that the slot may take
    int32_t n_share  = 0; // of a unified cache, while the prompt does not fit; 0: all of them
    int32_t n_taken  = 0; // cells that others take in this update
    int32_t n_spared = 0; // cells left for what others take before the slot can make room again
    bool    is_alone = true; // no other slot is at work that may release cells

    std::function<bool()> release_idle; // cells of one slot that is idle, false: there is none
};

// what a slot does next to read its prompt
struct server_snapkv_next {
    int32_t n_tokens  = 0; // can be decoded now, 0 and no room to make: wait
    bool    fits      = false; // they are all that is left
    bool    make_room = false; // first
    bool    is_stuck  = false; // neither will ever be possible
};

// a task whose prompt and answer may be longer than the slot's cells
struct server_snapkv_reader {
    int32_t n_tokens_max = 0; // of prompt and answer, 0: they must fit into the cells
    std::string hint;         // for a prompt that is too long

    int32_t  n_chunk_end = 0; // tokens of the prompt up to where no other pass is due
    bool     is_waiting  = false; // for cells that others have
    bool     is_deferred = false; // a pass is due, but not in this update
    uint64_t i_pass      = 0; // update of the last pass
    uint64_t i_refused   = 0; // update in which a pass was refused
    int32_t  n_room      = std::numeric_limits<int32_t>::max(); // cells that the answer may take in this update

    bool is_on() const { return n_tokens_max > 0; }

    // the rule of llama_snapkv_prefill(), for a prompt that is read beside others; if it is not on: all of it, or wait
    // n_past: tokens that were there when the task began, n_read: those that are there now
    server_snapkv_next next(
            const llama_context * ctx,
                  llama_seq_id    seq_id,
            const common_params_snapkv & params,
                  int32_t n_past,
                  int32_t n_read,
                  int32_t n_prompt,
            const server_snapkv_surroundings & around);
};

// what a task with these settings and this prompt may do in a slot of n_cells cells
server_snapkv_reader server_snapkv_begin(const common_params_snapkv & params, const common_params_snapkv & params_base, const server_tokens & prompt, int32_t n_cells);

// cells that a pass would release
int32_t server_snapkv_n_releasable(const llama_context * ctx, llama_seq_id seq_id, const common_params_snapkv & params);

// a pass in the middle of a prompt, of which n_past tokens were there when the task began, or, without one, of an answer
// res: this pass only
llama_snapkv_status server_snapkv_make_room(
              llama_context        * ctx,
              llama_seq_id           seq_id,
        const common_params_snapkv & params,
        const server_tokens        * prompt,
              int32_t                n_past,
              server_snapkv_chunks & res);

// of what the sequence holds now
server_snapkv_prompt server_snapkv_state(const llama_context * ctx, llama_seq_id seq_id, const common_params_snapkv & params = {});

// cells that count against the n_ctx of a slot that holds n_tokens tokens: those in use, but not fewer than leave the tokens
// within the model's trained context, nor than a draft model's cache holds
int32_t server_snapkv_n_used(const llama_context * ctx, bool has_draft, int32_t n_ctx, int32_t n_tokens, int32_t n_released);
