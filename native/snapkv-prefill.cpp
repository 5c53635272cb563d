// prompts and answers longer than the cells: decode a chunk, let the probe look at what is there, keep the best of it, go on

#include "llama-snapkv.h"

#include "snapkv-pass.h"
#include "snapkv-rules.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <algorithm>
#include <cstdint>
#include <limits>

struct llama_snapkv_prefill_params llama_snapkv_prefill_default_params(void) {
    return {
        /*.params             =*/ nullptr,
        /*.n_cells            =*/ 0,
        /*.n_chunk            =*/ 1024,
        /*.probe              =*/ nullptr,
        /*.n_probe            =*/ 32,
        /*.logits_all         =*/ false,
        /*.progress           =*/ nullptr,
        /*.progress_user_data =*/ nullptr,
    };
}

int32_t llama_snapkv_n_pos_max(const struct llama_context * ctx) {
    const auto * snapkv = snapkv_get(*ctx);

    if (snapkv && snapkv->params.positions == LLAMA_SNAPKV_POSITIONS_PACKED) {
        return std::numeric_limits<int32_t>::max();
    }

    const auto & cparams = ctx->get_cparams();
    const auto & hparams = ctx->get_model().hparams;

    // with another base nobody but the user knows
    if (cparams.rope_freq_base != hparams.rope_freq_base_train) {
        return std::numeric_limits<int32_t>::max();
    }

    double res = hparams.n_ctx_train;

    // the model's own scaling is in its trained context
    if (cparams.rope_freq_scale < hparams.rope_freq_scale_train) {
        res *= (double) hparams.rope_freq_scale_train/cparams.rope_freq_scale;
    }

    // one set of factors for short contexts, another one for long: llama_model::get_rope_factors() goes by the cells
    const auto & layers = ctx->get_model().layers;

    const bool is_short = !layers.empty() && layers[0].rope_freqs == nullptr && layers[0].rope_long != nullptr && cparams.n_ctx_seq <= hparams.n_ctx_orig_yarn;
    if (is_short) {
        res = std::min<double>(res, hparams.n_ctx_orig_yarn);
    }

    return std::min<double>(std::max<double>(res, cparams.n_ctx_seq), std::numeric_limits<int32_t>::max());
}

int32_t llama_snapkv_n_room(const struct llama_context * ctx, llama_seq_id seq_id, uint32_t n_cells) {
    const auto * snapkv = snapkv_get(*ctx, seq_id);
    if (!snapkv) {
        return -1;
    }

    const auto & cells = snapkv->get_cells(seq_id);

    const uint32_t n_free = cells.size() - cells.get_used();
    const uint32_t n_own  = cells.seq_pos_get(seq_id).size();

    return n_cells == 0 ? n_free : std::min(n_free, n_cells - std::min(n_cells, n_own));
}

namespace {

// of the budget of a pass with a probe, the recent part is at most 1/8
constexpr uint32_t N_RECENT_DIV = 8;

llama_snapkv_status lose_sequence(llama_context & lctx, llama_seq_id seq_id, llama_snapkv_status status) {
    lctx.get_memory()->seq_rm(seq_id, -1, -1);

    return status;
}

// what llama_decode() would refuse in the middle
bool has_bad_token(const llama_context & lctx, const llama_token * tokens, uint32_t n_tokens) {
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(&lctx.get_model()));

    for (uint32_t i = 0; i < n_tokens; ++i) {
        if (tokens[i] < 0 || tokens[i] >= n_vocab) {
            LLAMA_LOG_ERROR("%s: token %d, at %u, is not in the vocabulary of %d\n", __func__, tokens[i], i, n_vocab);
            return true;
        }
    }

    return false;
}

// decodes tokens of one sequence, each call one batch of at most n_max
struct decoder {
    decoder(llama_context & lctx, llama_seq_id seq_id, uint32_t n_max) :
        lctx(lctx), seq_id(seq_id), batch(llama_batch_init(n_max, 0, 1)) {}

    ~decoder() { llama_batch_free(batch); }

    decoder(const decoder &) = delete;
    decoder & operator=(const decoder &) = delete;

    // as llama_decode()
    int32_t decode(const llama_token * tokens, uint32_t n_tokens, bool logits_all, bool logits_last) {
        const llama_pos pos = lctx.get_memory()->seq_pos_max(seq_id) + 1;

        batch.n_tokens = n_tokens;
        for (uint32_t i = 0; i < n_tokens; ++i) {
            batch.token   [i]    = tokens[i];
            batch.pos     [i]    = pos + i;
            batch.n_seq_id[i]    = 1;
            batch.seq_id  [i][0] = seq_id;
            batch.logits  [i]    = logits_all || (logits_last && i + 1 == n_tokens);
        }

        return llama_decode(&lctx, batch);
    }

    // batch by batch, without logits; what fails loses the sequence
    llama_snapkv_status decode_all(const llama_token * tokens, uint32_t n_tokens) {
        for (uint32_t i = 0; i < n_tokens; ) {
            const uint32_t n = std::min(n_tokens - i, lctx.n_batch());

            const int32_t ret = decode(tokens + i, n, false, false);
            if (ret != 0) {
                return lose_sequence(lctx, seq_id, ret == 2 ? LLAMA_SNAPKV_STATUS_CANCELLED : LLAMA_SNAPKV_STATUS_SEQUENCE_LOST);
            }
            i += n;
        }

        return LLAMA_SNAPKV_STATUS_OK;
    }

    llama_context & lctx;
    llama_seq_id seq_id;
    llama_batch  batch;
};

// the sequence's state that does not come back when its last tokens are removed
struct partial_state {
    partial_state(llama_context & lctx, llama_seq_id seq_id, uint32_t n_tokens) : lctx(lctx), seq_id(seq_id) {
        is_needed = is_needed_for(lctx, n_tokens);
        if (is_needed) {
            data.resize(llama_state_seq_get_size_ext(&lctx, seq_id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY));
            is_valid = llama_state_seq_get_data_ext(&lctx, data.data(), data.size(), seq_id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == data.size();
        }
    }

    static bool is_needed_for(llama_context & lctx, uint32_t n_tokens) {
        const auto caches = llama_snapkv::get_caches(lctx.get_memory());

        // one ubatch takes only cells of the sliding window that the next token no longer sees
        return caches.recr || (caches.swa && n_tokens > lctx.n_ubatch());
    }

    // before a pass, which can shift it
    bool restore() {
        return !is_needed || llama_state_seq_set_data_ext(&lctx, data.data(), data.size(), seq_id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == data.size();
    }

    // remove the tokens from p0 on, what was restored does not hold them
    bool remove(llama_pos p0) {
        if (!is_needed) {
            return lctx.get_memory()->seq_rm(seq_id, p0, -1);
        }

        const auto caches = llama_snapkv::get_caches(lctx.get_memory());

        return caches.kv->seq_rm(seq_id, p0, -1) && (!caches.idx || caches.idx->seq_rm(seq_id, p0, -1));
    }

    llama_context & lctx;
    llama_seq_id seq_id;

    bool is_needed;
    bool is_valid = true;

    std::vector<uint8_t> data;
};

// false: packed positions are asked for, and it is not known how the rows are rotated
bool can_pack(const llama_snapkv & snapkv, llama_seq_id seq_id, const llama_snapkv_params & params) {
    const auto order = snapkv.get_order(seq_id);

    return params.positions != LLAMA_SNAPKV_POSITIONS_PACKED || order.empty() || !snapkv.get_rotated(seq_id, order).empty();
}

// t_probe_us: without the pass, and without the tokens
llama_snapkv_status make_room(
        llama_context & lctx,
        llama_snapkv  & snapkv,
        llama_seq_id    seq_id,
        const llama_token * tokens,
        uint32_t        n_tokens,
        const llama_token * probe,
        uint32_t        n_probe,
        llama_snapkv_params params,
        llama_snapkv_stats & stats,
        int64_t       & t_probe_us) {
    if (n_probe == 0 || snapkv_get_rule(params.rule)->needs != SNAPKV_RULE_NEEDS_WINDOW) {
        if (n_tokens > 0) {
            return LLAMA_SNAPKV_STATUS_INVALID_PARAMS;
        }
        return snapkv_pass(lctx, snapkv, seq_id, params, params.n_window, stats);
    }

    lctx.synchronize();
    lctx.memory_update(false);

    // what the pass would refuse, before anything is changed
    const auto order = snapkv.get_order(seq_id);

    stats = {};
    stats.n_cells_before = order.size();
    stats.n_cells_after  = order.size();

    if (order.size() + n_tokens <= params.n_budget) {
        return LLAMA_SNAPKV_STATUS_WITHIN_BUDGET;
    }
    if (snapkv.has_shared_cells(seq_id)) {
        return LLAMA_SNAPKV_STATUS_SHARED_CELLS;
    }
    if (!can_pack(snapkv, seq_id, params)) {
        return LLAMA_SNAPKV_STATUS_NOT_PACKED;
    }

    const uint32_t n_room = llama_snapkv_n_room(&lctx, seq_id, 0);
    if (n_tokens > 0 && n_room < n_tokens + n_probe) {
        return LLAMA_SNAPKV_STATUS_NO_ROOM;
    }
    if (n_room < n_probe) {
        // first as much as the probe needs, by the sequence's own last tokens
        const uint32_t n_needed = n_probe - n_room;

        if (n_needed > order.size() - params.n_budget) {
            return LLAMA_SNAPKV_STATUS_NO_ROOM;
        }

        llama_snapkv_params first = params;
        first.n_budget = order.size() - n_needed;

        const auto status = snapkv_pass(lctx, snapkv, seq_id, first, first.n_window, stats);
        if (status == LLAMA_SNAPKV_STATUS_NO_QUERIES && n_room > 0) {
            probe  += n_needed;
            n_probe = n_room;
        } else if (status != LLAMA_SNAPKV_STATUS_OK || first.n_budget == params.n_budget) {
            return status; // nothing is left to be chosen
        }
    }

    const int64_t t_start_us = ggml_time_us() - stats.t_total_us;

    // more than an ubatch takes sliding-window cells that are still to be seen once the probe is gone
    const bool is_joined = n_tokens + n_probe <= std::min(lctx.n_batch(), lctx.n_ubatch()) && !partial_state::is_needed_for(lctx, n_probe);

    decoder decoder(lctx, seq_id, std::min(n_tokens + n_probe, lctx.n_batch()));

    const int64_t t_decode_us = ggml_time_us();

    if (!is_joined) {
        const auto status = decoder.decode_all(tokens, n_tokens);
        if (status != LLAMA_SNAPKV_STATUS_OK) {
            return status;
        }
        lctx.synchronize();
    }

    int64_t t_tokens_us = ggml_time_us() - t_decode_us;

    partial_state state(lctx, seq_id, n_probe);

    if (!state.is_valid) {
        return n_tokens > 0 ? lose_sequence(lctx, seq_id, LLAMA_SNAPKV_STATUS_SEQUENCE_LOST) : LLAMA_SNAPKV_STATUS_FAILED_COMPUTE;
    }

    std::vector<llama_token> batch(tokens, tokens + (is_joined ? n_tokens : 0));
    batch.insert(batch.end(), probe, probe + n_probe);

    const auto status_decode = decoder.decode_all(batch.data(), batch.size());
    if (status_decode != LLAMA_SNAPKV_STATUS_OK) {
        return status_decode;
    }

    lctx.synchronize();

    if (is_joined) {
        t_tokens_us = (ggml_time_us() - t_decode_us)*n_tokens/(n_tokens + n_probe); // their part of what both took
    }

    if (!state.restore()) {
        return lose_sequence(lctx, seq_id, LLAMA_SNAPKV_STATUS_SEQUENCE_LOST);
    }

    // What stands right before the probe is looked at most, and there it stands only now: with a large recent part besides,
    // older cells are pushed out pass by pass.
    params.n_recent  = std::min(params.n_recent, params.n_budget/N_RECENT_DIV);
    params.n_recent  = std::max(params.n_recent + n_probe, params.n_window);
    params.n_budget += n_probe;
    params.n_window  = std::min(params.n_window, n_probe);

    auto status = snapkv_pass(lctx, snapkv, seq_id, params, n_probe, stats);
    if (status == LLAMA_SNAPKV_STATUS_SEQUENCE_LOST) {
        return status;
    }
    if (status != LLAMA_SNAPKV_STATUS_OK) {
        return lose_sequence(lctx, seq_id, status == LLAMA_SNAPKV_STATUS_ABORTED ? LLAMA_SNAPKV_STATUS_CANCELLED : LLAMA_SNAPKV_STATUS_SEQUENCE_LOST);
    }

    const llama_pos pos = llama_snapkv::get_caches(lctx.get_memory()).kv->seq_pos_max(seq_id) + 1 - (llama_pos) n_probe;

    if (!state.remove(pos)) {
        return lose_sequence(lctx, seq_id, LLAMA_SNAPKV_STATUS_SEQUENCE_LOST);
    }
    snapkv.seqs[seq_id].pos_end = pos;

    stats.n_cells_before = order.size() + n_tokens;
    stats.n_cells_after -= n_probe;

    t_probe_us += ggml_time_us() - t_start_us - stats.t_total_us - t_tokens_us;

    return status;
}

}

enum llama_snapkv_status llama_snapkv_make_room(
             struct llama_context       * ctx,
                   llama_seq_id           seq_id,
        const      llama_token          * tokens,
                   uint32_t               n_tokens,
        const      llama_token          * probe,
                   uint32_t               n_probe,
        const struct llama_snapkv_params * params_in,
              struct llama_snapkv_stats * stats_out) {
    llama_snapkv_stats  stats = {};
    llama_snapkv_params params;

    int64_t t_probe_us = 0;

    auto status = snapkv_check_call(*ctx, seq_id, params_in, params);
    if (status == LLAMA_SNAPKV_STATUS_OK && (has_bad_token(*ctx, tokens, n_tokens) || has_bad_token(*ctx, probe, n_probe))) {
        status = LLAMA_SNAPKV_STATUS_INVALID_PARAMS;
    }
    if (status == LLAMA_SNAPKV_STATUS_OK) {
        status = make_room(*ctx, *snapkv_get(*ctx), seq_id, tokens, n_tokens, probe, n_probe, params, stats, t_probe_us);
    }

    if (stats_out) {
        *stats_out = status < 0 ? llama_snapkv_stats{} : stats;
    }

    return status;
}

enum llama_snapkv_status llama_snapkv_prefill(
             struct llama_context               * ctx,
                   llama_seq_id                   seq_id,
        const      llama_token                  * tokens,
                   uint32_t                       n_tokens,
        const struct llama_snapkv_prefill_params * params_in,
              struct llama_snapkv_prefill_stats * stats_out) {
    const int64_t t_start_us = ggml_time_us();

    const llama_snapkv_prefill_params prefill = params_in ? *params_in : llama_snapkv_prefill_default_params();

    llama_snapkv_prefill_stats stats = {};
    if (stats_out) {
        *stats_out = stats;
    }

    llama_snapkv_params params;

    auto status = snapkv_check_call(*ctx, seq_id, prefill.params, params);
    if (status != LLAMA_SNAPKV_STATUS_OK) {
        return status;
    }
    if (prefill.n_chunk == 0 || n_tokens > (uint32_t) std::numeric_limits<int32_t>::max()) {
        LLAMA_LOG_ERROR("%s: n_chunk must not be 0\n", __func__);
        return LLAMA_SNAPKV_STATUS_INVALID_PARAMS;
    }

    if (has_bad_token(*ctx, tokens, n_tokens) || has_bad_token(*ctx, prefill.probe, prefill.probe ? prefill.n_probe : 0)) {
        return LLAMA_SNAPKV_STATUS_INVALID_PARAMS;
    }

    llama_snapkv & snapkv = *snapkv_get(*ctx);

    const auto n_room = [&]() { return (uint32_t) llama_snapkv_n_room(ctx, seq_id, prefill.n_cells); };

    // the prompt's own end is read for good after all else
    const uint32_t n_probe = prefill.probe ? prefill.n_probe : std::min(prefill.n_probe, n_tokens);
    const uint32_t n_body  = prefill.probe ? n_tokens : n_tokens - n_probe;

    const llama_token * probe = prefill.probe ? prefill.probe : tokens + n_body;

    ctx->synchronize();
    ctx->memory_update(false);

    if (n_tokens > n_room()) {
        if (snapkv.has_shared_cells(seq_id)) {
            return LLAMA_SNAPKV_STATUS_SHARED_CELLS;
        }
        if (!can_pack(snapkv, seq_id, params)) {
            return LLAMA_SNAPKV_STATUS_NOT_PACKED;
        }

        const uint32_t n_all   = snapkv.get_cells(seq_id).seq_pos_get(seq_id).size() + llama_snapkv_n_room(ctx, seq_id, 0);
        const uint32_t n_cells = prefill.n_cells == 0 ? n_all : std::min(n_all, prefill.n_cells);
        if (n_cells < (uint64_t) params.n_budget + n_probe + (n_body > 0 ? 1 : 0)) {
            return LLAMA_SNAPKV_STATUS_NO_ROOM;
        }
    }
    if ((int64_t) llama_snapkv_n_tokens(ctx, seq_id) + n_tokens > llama_snapkv_n_pos_max(ctx)) {
        return LLAMA_SNAPKV_STATUS_BEYOND_CONTEXT;
    }

    // of a rule that adds up the attention of all tokens, no query may leave the ring unseen
    const bool     is_observed = snapkv_get_rule(params.rule)->needs == SNAPKV_RULE_NEEDS_ALL;
    const uint32_t n_batch     = std::min({ std::max<uint32_t>(n_tokens, 1), ctx->n_batch(), is_observed ? ctx->n_ubatch() : ctx->n_batch() });

    const auto observe = [&](uint32_t n_next) {
        const auto     order = snapkv.get_order(seq_id);
        const uint32_t n_new = order.size() - std::min<uint32_t>(order.size(), snapkv.seqs[seq_id].n_observed());

        return !is_observed || n_new == 0 || n_new + n_next <= ctx->n_ubatch() ||
            snapkv_observe(*ctx, snapkv, seq_id, order) == LLAMA_SNAPKV_STATUS_OK;
    };

    uint32_t i = 0; // tokens read

    // what the loop does in a state: the next tokens, or first a pass
    struct next_step {
        uint32_t n_next;
        bool     is_full;
    };

    const auto plan = [&](uint32_t i, uint32_t n_free, uint32_t n_own) -> next_step {
        if (n_tokens - i <= n_free) {
            return { n_tokens - i, false };
        }

        // beside the probe
        const uint32_t n_chunk = std::min(prefill.n_chunk, n_body - std::min(n_body, i));
        const uint32_t n_next  = std::min(n_chunk, n_free - std::min(n_free, n_probe));

        return { n_next, (n_next < n_chunk || n_next == 0) && n_own > params.n_budget };
    };

    // a pass, with tokens that are read on the way
    const auto pass = [&](uint32_t n_with) {
        llama_snapkv_stats cur = {};

        const auto res = make_room(*ctx, snapkv, seq_id, tokens + i, n_with, probe, n_probe, params, cur, stats.t_probe_us);
        if (res != LLAMA_SNAPKV_STATUS_OK) {
            // a refusal in the middle leaves the sequence half read
            const bool is_failure = res == LLAMA_SNAPKV_STATUS_SEQUENCE_LOST || res == LLAMA_SNAPKV_STATUS_CANCELLED;
            return i == 0 || is_failure ? res : lose_sequence(*ctx, seq_id, LLAMA_SNAPKV_STATUS_SEQUENCE_LOST);
        }

        stats.n_passes++;
        stats.n_evicted += cur.n_cells_before - cur.n_cells_after;
        stats.t_pass_us += cur.t_total_us;

        i += n_with;

        return res;
    };

    // A probe in an ubatch of its own is slow: the CPU's flash attention is fast from 64 queries on.
    const uint32_t n_ubatch = std::min(n_batch, ctx->n_ubatch());
    const bool     can_join = snapkv_get_rule(params.rule)->needs == SNAPKV_RULE_NEEDS_WINDOW && !prefill.logits_all &&
        n_probe > 0 && n_probe < n_ubatch && !partial_state::is_needed_for(*ctx, n_probe);

    const auto progress = [&]() { return !prefill.progress || prefill.progress(i, n_tokens, prefill.progress_user_data); };

    decoder decoder(*ctx, seq_id, n_batch);

    while (i < n_tokens) {
        const uint32_t n_free = n_room();
        const uint32_t n_own  = snapkv.get_cells(seq_id).seq_pos_get(seq_id).size();

        const auto next = plan(i, n_free, n_own);

        if (next.is_full) {
            status = pass(0);
            if (status != LLAMA_SNAPKV_STATUS_OK) {
                return status;
            }
            continue;
        }
        if (next.n_next == 0) {
            // within the budget, but other sequences have taken the rest
            return i == 0 ? LLAMA_SNAPKV_STATUS_NO_ROOM : lose_sequence(*ctx, seq_id, LLAMA_SNAPKV_STATUS_SEQUENCE_LOST);
        }

        // the last of them are read together with the probe of the pass that follows
        const uint32_t end    = i + next.n_next;
        const bool     joins  = can_join && end < n_tokens && plan(end, n_free - next.n_next, n_own + next.n_next).is_full;
        const uint32_t n_with = joins ? std::min((next.n_next - 1) % n_batch + 1, n_ubatch - n_probe) : 0;

        while (i < end - n_with) {
            const uint32_t n = std::min(end - n_with - i, n_batch);

            if (!observe(n)) {
                return i == 0 ? LLAMA_SNAPKV_STATUS_NOT_OBSERVED : lose_sequence(*ctx, seq_id, LLAMA_SNAPKV_STATUS_SEQUENCE_LOST);
            }

            const int32_t ret = decoder.decode(tokens + i, n, prefill.logits_all, i + n == n_tokens);
            if (ret != 0) {
                LLAMA_LOG_ERROR("%s: llama_decode() returned %d\n", __func__, ret);
                return lose_sequence(*ctx, seq_id, ret == 2 ? LLAMA_SNAPKV_STATUS_CANCELLED : LLAMA_SNAPKV_STATUS_SEQUENCE_LOST);
            }
            i += n;

            if (!progress()) {
                return lose_sequence(*ctx, seq_id, LLAMA_SNAPKV_STATUS_CANCELLED);
            }
        }

        if (n_with > 0) {
            status = pass(n_with);
            if (status != LLAMA_SNAPKV_STATUS_OK) {
                return status;
            }
            if (!progress()) {
                return lose_sequence(*ctx, seq_id, LLAMA_SNAPKV_STATUS_CANCELLED);
            }
        }
    }

    // the time of the last batch
    ctx->synchronize();

    stats.n_tokens    = n_tokens;
    stats.n_cells     = snapkv.get_cells(seq_id).seq_pos_get(seq_id).size();
    stats.t_total_us  = ggml_time_us() - t_start_us;
    stats.t_decode_us = stats.t_total_us - stats.t_probe_us - stats.t_pass_us;

    if (stats_out) {
        *stats_out = stats;
    }

    return LLAMA_SNAPKV_STATUS_OK;
}
