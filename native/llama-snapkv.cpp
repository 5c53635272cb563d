#include "llama-snapkv.h"

#include "snapkv-graph.h"
#include "snapkv-hooks.h"
#include "snapkv-pass.h"
#include "snapkv-rules.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <algorithm>
#include <new>

//
// parameters
//

// see docs/presets.md for the measurements behind the defaults
struct llama_snapkv_params llama_snapkv_default_params(void) {
    return {
        /*.n_budget  =*/ 1024,
        /*.n_window  =*/ 16,
        /*.n_recent  =*/ 512,
        /*.n_kernel  =*/ 21,
        /*.pool      =*/ LLAMA_SNAPKV_POOL_MAX,
        /*.rule      =*/ LLAMA_SNAPKV_RULE_SNAPKV,
        /*.positions =*/ LLAMA_SNAPKV_POSITIONS_TRUE,
    };
}

struct llama_snapkv_params llama_snapkv_paper_params(void) {
    return {
        /*.n_budget  =*/ 1024,
        /*.n_window  =*/ 32,
        /*.n_recent  =*/ 0,
        /*.n_kernel  =*/ 5,
        /*.pool      =*/ LLAMA_SNAPKV_POOL_AVG,
        /*.rule      =*/ LLAMA_SNAPKV_RULE_SNAPKV,
        /*.positions =*/ LLAMA_SNAPKV_POSITIONS_TRUE,
    };
}

// upper bounds keep sums of the parameters far from overflow
static constexpr uint32_t SNAPKV_N_WINDOW_MAX = 4096;
static constexpr uint32_t SNAPKV_N_BUDGET_MAX = 1u << 30;

const char * llama_snapkv_params_check(struct llama_snapkv_params params) {
    if (params.n_window < 1 || params.n_window > SNAPKV_N_WINDOW_MAX) {
        return "n_window must be between 1 and 4096";
    }
    if (params.n_kernel % 2 != 1 || params.n_kernel > SNAPKV_N_BUDGET_MAX) {
        return "n_kernel must be odd and at most 2^30";
    }
    if (params.pool != LLAMA_SNAPKV_POOL_AVG && params.pool != LLAMA_SNAPKV_POOL_MAX) {
        return "pool must be one of enum llama_snapkv_pool";
    }
    if (!snapkv_get_rule(params.rule)) {
        return "rule must be one of enum llama_snapkv_rule";
    }
    if (params.n_recent != 0 && params.n_recent < params.n_window) {
        return "n_recent must be 0 or at least n_window";
    }
    if (params.n_budget <= std::max(params.n_recent, params.n_window) || params.n_budget > SNAPKV_N_BUDGET_MAX) {
        return "n_budget must be greater than n_window and n_recent, and at most 2^30";
    }
    if (params.positions != LLAMA_SNAPKV_POSITIONS_TRUE && params.positions != LLAMA_SNAPKV_POSITIONS_PACKED) {
        return "positions must be one of enum llama_snapkv_positions";
    }
    if (params.positions == LLAMA_SNAPKV_POSITIONS_PACKED && params.n_budget < params.n_window + 2) {
        return "n_budget must be at least n_window + 2 with packed positions"; // a frontier of 0 would look whole
    }
    return nullptr;
}

const char * llama_snapkv_rule_name(enum llama_snapkv_rule rule) {
    const auto * res = snapkv_get_rule(rule);

    return res ? res->name : nullptr;
}

const char * llama_snapkv_status_str(enum llama_snapkv_status status) {
    switch (status) {
        case LLAMA_SNAPKV_STATUS_OK:                     return "ok";
        case LLAMA_SNAPKV_STATUS_WITHIN_BUDGET:          return "the sequence is within the budget";
        case LLAMA_SNAPKV_STATUS_INVALID_PARAMS:         return "invalid parameters";
        case LLAMA_SNAPKV_STATUS_NOT_ENABLED:            return "SnapKV is not enabled in this context";
        case LLAMA_SNAPKV_STATUS_INVALID_SEQ:            return "no such sequence in this context";
        case LLAMA_SNAPKV_STATUS_NO_QUERIES:             return "the queries of the last tokens were not captured (restored or copied state): decode at least one token first";
        case LLAMA_SNAPKV_STATUS_SHARED_CELLS:           return "the sequence shares cells with another one";
        case LLAMA_SNAPKV_STATUS_UNSUPPORTED_RECURRENT:  return "recurrent models have no KV cache to compact";
        case LLAMA_SNAPKV_STATUS_UNSUPPORTED_SWA:        return "all layers of the model attend to a sliding window only: there is nothing to compact";
        case LLAMA_SNAPKV_STATUS_UNSUPPORTED_MEMORY:     return "this kind of KV cache is not supported: it is read by blocks of positions, is compressed, or belongs to another context";
        case LLAMA_SNAPKV_STATUS_UNSUPPORTED_ENCODER:    return "the model has no KV cache, has an encoder, or its attention is not causal";
        case LLAMA_SNAPKV_STATUS_UNSUPPORTED_EMBEDDINGS: return "the context was created for embeddings";
        case LLAMA_SNAPKV_STATUS_UNSUPPORTED_ALIBI:      return "models with ALiBi are not supported: their scores depend on the distance between cells";
        case LLAMA_SNAPKV_STATUS_UNSUPPORTED_BIAS:       return "models that add a bias to the attention logits are not supported";
        case LLAMA_SNAPKV_STATUS_UNSUPPORTED_QUERIES:    return "the queries of some layers of this model cannot be captured";
        case LLAMA_SNAPKV_STATUS_NOT_EMPTY:              return "the context already holds tokens: clear its memory first";
        case LLAMA_SNAPKV_STATUS_NOT_OBSERVED:           return "the attention of some tokens was not added up: decode at most n_ubatch tokens between two calls of llama_snapkv_observe(), with the rule h2o from the start";
        case LLAMA_SNAPKV_STATUS_UNSUPPORTED_POSITIONS:  return "packed positions need a model whose keys are rotated by one position each (RoPE, not M-RoPE nor MLA)";
        case LLAMA_SNAPKV_STATUS_NOT_PACKED:             return "the sequence was restored from a state that was compacted without packed positions";
        case LLAMA_SNAPKV_STATUS_NO_ROOM:                return "the cells do not hold the budget, the probe and one more token: give the context more cells, or lower the budget or the probe";
        case LLAMA_SNAPKV_STATUS_BEYOND_CONTEXT:         return "the prompt is longer than the context the model was trained for: use packed positions, or scale RoPE";
        case LLAMA_SNAPKV_STATUS_ABORTED:                return "aborted, nothing was changed";
        case LLAMA_SNAPKV_STATUS_FAILED_RESERVE:         return "out of memory for the query ring or the compute buffers";
        case LLAMA_SNAPKV_STATUS_FAILED_COMPUTE:         return "the scores could not be computed, nothing was changed";
        case LLAMA_SNAPKV_STATUS_SEQUENCE_LOST:          return "failed half-way, the sequence was removed: decode it again";
        case LLAMA_SNAPKV_STATUS_CANCELLED:              return "stopped by the caller, the sequence was removed";
    }
    return "unknown status";
}

const char * llama_snapkv_build_info(void) {
    return "snapkv 1 TAG_SNAPKV";
}

//
// the context
//

enum llama_snapkv_status llama_snapkv_supported(const struct llama_context * ctx) {
    return snapkv_check(*ctx);
}

enum llama_snapkv_status llama_snapkv_init(struct llama_context * ctx, struct llama_snapkv_params params) {
    if (const char * err = llama_snapkv_params_check(params)) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err);
        return LLAMA_SNAPKV_STATUS_INVALID_PARAMS;
    }

    const auto status = snapkv_check(*ctx);
    if (status != LLAMA_SNAPKV_STATUS_OK) {
        return status;
    }

    const auto caches = llama_snapkv::get_caches(ctx->get_memory());

    llama_kv_cache * kv = caches.kv;

    const uint32_t n_seq_max = ctx->n_seq_max();

    for (uint32_t s = 0; s < n_seq_max; ++s) {
        if (kv->seq_pos_max(s) >= 0) {
            return LLAMA_SNAPKV_STATUS_NOT_EMPTY;
        }
    }

    if (!snapkv_reserve(*ctx)) {
        return LLAMA_SNAPKV_STATUS_FAILED_RESERVE;
    }

    const uint32_t n_swa = caches.swa ? llama_model_n_swa(&ctx->get_model()) : 0;

    const bool     is_observed = snapkv_get_rule(params.rule)->needs == SNAPKV_RULE_NEEDS_ALL;
    const uint32_t n_queries   = is_observed ? std::max(params.n_window, ctx->get_cparams().n_ubatch) : params.n_window;

    try {
        llama_snapkv::attach(*kv, std::make_shared<llama_snapkv>(*kv, caches.idx, params, n_queries, n_seq_max, n_swa));
    } catch (const std::bad_alloc &) {
        LLAMA_LOG_ERROR("%s: failed to allocate the query ring\n", __func__);
        return LLAMA_SNAPKV_STATUS_FAILED_RESERVE;
    }

    llama_snapkv_status res_status = LLAMA_SNAPKV_STATUS_OK;

    // each reader adds a reshape, a get_rows, a set_rows and perhaps a cont
    const auto * res = ctx->get_gf_res_reserve();
    if (ggml_graph_n_nodes(res->get_gf()) + 5*(int64_t) kv->get_snapkv()->il_to_reader.size() + 8 > res->get_max_nodes()) {
        LLAMA_LOG_ERROR("%s: the model's graph leaves no room to capture the queries\n", __func__);
        res_status = LLAMA_SNAPKV_STATUS_UNSUPPORTED_QUERIES;
    }

    if (res_status == LLAMA_SNAPKV_STATUS_OK && params.positions == LLAMA_SNAPKV_POSITIONS_PACKED && !kv->get_snapkv()->can_rotate()) {
        res_status = LLAMA_SNAPKV_STATUS_UNSUPPORTED_POSITIONS;
    }

    // building the graph tells what each layer does to its logits
    if (res_status == LLAMA_SNAPKV_STATUS_OK && !snapkv_reserve(*ctx)) {
        res_status = LLAMA_SNAPKV_STATUS_FAILED_RESERVE;
    }

    if (res_status == LLAMA_SNAPKV_STATUS_OK) {
        for (const auto & layer : kv->get_snapkv()->layers) {
            for (const auto & reader : layer.readers) {
                if (!reader.captured) {
                    res_status = LLAMA_SNAPKV_STATUS_UNSUPPORTED_QUERIES;
                }
            }
        }
        for (const auto & layer : kv->get_snapkv()->layers) {
            for (const auto & reader : layer.readers) {
                if (reader.has_bias) {
                    res_status = LLAMA_SNAPKV_STATUS_UNSUPPORTED_BIAS;
                }
            }
        }
    }

    if (res_status != LLAMA_SNAPKV_STATUS_OK) {
        llama_snapkv::attach(*kv, nullptr);
        snapkv_reserve(*ctx);
    }

    return res_status;
}

//
// the pass
//

enum llama_snapkv_status llama_snapkv_observe(struct llama_context * ctx, llama_seq_id seq_id) {
    llama_snapkv * snapkv = snapkv_get(*ctx);
    if (!snapkv) {
        return LLAMA_SNAPKV_STATUS_NOT_ENABLED;
    }
    if (!snapkv->has_seq(seq_id)) {
        return LLAMA_SNAPKV_STATUS_INVALID_SEQ;
    }

    ctx->synchronize();
    ctx->memory_update(false);

    return snapkv_observe(*ctx, *snapkv, seq_id, snapkv->get_order(seq_id));
}

enum llama_snapkv_status llama_snapkv_compact(
             struct llama_context       * ctx,
                   llama_seq_id           seq_id,
        const struct llama_snapkv_params * params_in,
              struct llama_snapkv_stats * stats_out) {
    llama_snapkv_stats stats = {};

    llama_snapkv_params params;

    auto status = snapkv_check_call(*ctx, seq_id, params_in, params);
    if (status == LLAMA_SNAPKV_STATUS_OK) {
        status = snapkv_pass(*ctx, *snapkv_get(*ctx), seq_id, params, params.n_window, stats);
    }

    // of a failure no more is told than the status
    if (stats_out) {
        *stats_out = status < 0 ? llama_snapkv_stats{} : stats;
    }

    return status;
}

int64_t llama_snapkv_get_observed(const struct llama_context * ctx, llama_seq_id seq_id, double * out, size_t n_max) {
    const auto * snapkv = snapkv_get(*ctx, seq_id);
    if (!snapkv) {
        return -1;
    }

    const auto & seq = snapkv->seqs[seq_id];

    const size_t n_res = seq.observed.size()*seq.n_observed();
    if (!out) {
        return n_res;
    }
    if (n_max < n_res) {
        return -1;
    }

    for (const auto & head : seq.observed) {
        out = std::copy(head.begin(), head.end(), out);
    }

    return n_res;
}

bool llama_snapkv_set_observed(struct llama_context * ctx, llama_seq_id seq_id, const double * in, size_t n) {
    auto * snapkv = snapkv_get(*ctx, seq_id);
    if (!snapkv) {
        return false;
    }

    const size_t n_head = snapkv->get_i_head(snapkv->layers.size());
    const size_t n_cell = n/n_head;

    if (n % n_head != 0 || snapkv_get_rule(snapkv->params.rule)->needs != SNAPKV_RULE_NEEDS_ALL) {
        return false;
    }

    auto & seq = snapkv->seqs[seq_id];

    try {
        const auto order = snapkv->get_order(seq_id);
        if (n_cell > order.size()) {
            return false;
        }

        seq.forget_observed();
        for (size_t i = 0; i < n_head && n_cell > 0; ++i) {
            seq.observed.emplace_back(in + i*n_cell, in + (i + 1)*n_cell);
            seq.pos_observed = order[n_cell - 1].first + 1;
        }
    } catch (const std::bad_alloc &) {
        seq.forget_observed();
        return false;
    }

    return true;
}

//
// inspection
//

int32_t llama_snapkv_n_cells(const struct llama_context * ctx, llama_seq_id seq_id) {
    const llama_kv_cache * kv = snapkv_get_cache(*ctx);
    if (!kv || seq_id < 0 || seq_id >= (llama_seq_id) ctx->n_seq_max()) {
        return -1;
    }

    return kv->get_cells(seq_id).seq_pos_get(seq_id).size();
}

int32_t llama_snapkv_n_tokens(const struct llama_context * ctx, llama_seq_id seq_id) {
    const auto * snapkv = snapkv_get(*ctx, seq_id);

    return snapkv ? snapkv->kv.seq_pos_max(seq_id) + 1 + snapkv->seqs[seq_id].n_shift : -1;
}

llama_pos llama_snapkv_frontier(const struct llama_context * ctx, llama_seq_id seq_id) {
    const auto * snapkv = snapkv_get(*ctx, seq_id);

    return snapkv ? snapkv->seqs[seq_id].frontier : -1;
}

llama_pos llama_snapkv_pos_end(const struct llama_context * ctx, llama_seq_id seq_id) {
    const auto * snapkv = snapkv_get(*ctx, seq_id);

    return snapkv && snapkv->seqs[seq_id].frontier >= 0 ? snapkv->seqs[seq_id].pos_end : 0;
}

llama_pos llama_snapkv_pos_min(const struct llama_context * ctx, llama_seq_id seq_id) {
    auto * memory = ctx->get_memory();
    if (!memory) {
        return -1;
    }
    if (llama_snapkv_frontier(ctx, seq_id) < 0) {
        return memory->seq_pos_min(seq_id);
    }

    const auto caches = llama_snapkv::get_caches(memory);

    return std::max<llama_pos>({ 0, caches.swa ? caches.swa->seq_pos_min(seq_id) : 0, caches.recr ? caches.recr->seq_pos_min(seq_id) : 0 });
}

bool llama_snapkv_can_seq_rm(const struct llama_context * ctx, llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    const auto * snapkv = snapkv_get(*ctx);

    return !snapkv || snapkv->can_seq_rm(seq_id, p0, p1);
}

size_t llama_snapkv_ring_size(const struct llama_context * ctx) {
    const auto * snapkv = snapkv_get(*ctx);

    return snapkv ? snapkv->ring_size() : 0;
}

int32_t llama_snapkv_n_layer(const struct llama_context * ctx) {
    const auto * snapkv = snapkv_get(*ctx);

    return snapkv ? snapkv->layers.size() : 0;
}

static bool snapkv_has_layer(const llama_snapkv * snapkv, int32_t i) {
    return snapkv && i >= 0 && (size_t) i < snapkv->layers.size();
}

bool llama_snapkv_get_layer(const struct llama_context * ctx, int32_t i, struct llama_snapkv_layer * out) {
    const auto * snapkv = snapkv_get(*ctx);
    if (!snapkv_has_layer(snapkv, i)) {
        return false;
    }

    *out = snapkv->layers[i].info;

    return true;
}

static const llama_snapkv::tensor * snapkv_get_tensor(const llama_snapkv * snapkv, int32_t i, int32_t it) {
    return snapkv_has_layer(snapkv, i) && it >= 0 && it < snapkv->layers[i].info.n_tensor ? &snapkv->layers[i].tensors[it] : nullptr;
}

static const llama_snapkv::reader * snapkv_get_reader(const llama_snapkv * snapkv, int32_t i, int32_t ir) {
    return snapkv_has_layer(snapkv, i) && ir >= 0 && ir < snapkv->layers[i].info.n_reader ? &snapkv->layers[i].readers[ir] : nullptr;
}

bool llama_snapkv_get_tensor(const struct llama_context * ctx, int32_t i, int32_t it, struct llama_snapkv_tensor * out) {
    const auto * t = snapkv_get_tensor(snapkv_get(*ctx), i, it);
    if (!t) {
        return false;
    }

    *out = t->info;

    return true;
}

bool llama_snapkv_get_reader(const struct llama_context * ctx, int32_t i, int32_t ir, struct llama_snapkv_reader * out) {
    const auto * r = snapkv_get_reader(snapkv_get(*ctx), i, ir);
    if (!r) {
        return false;
    }

    *out = r->info;

    return true;
}

int32_t llama_snapkv_get_cells(const struct llama_context * ctx, llama_seq_id seq_id, llama_pos * pos, int32_t * cell, int32_t n_max) {
    const auto * snapkv = snapkv_get(*ctx, seq_id);
    if (!snapkv) {
        return -1;
    }

    const auto order = snapkv->get_order(seq_id);
    if (n_max < (int32_t) order.size()) {
        return -1;
    }

    for (size_t j = 0; j < order.size(); ++j) {
        pos [j] = order[j].first;
        cell[j] = order[j].second;
    }

    return order.size();
}

int32_t llama_snapkv_get_kept(const struct llama_context * ctx, llama_seq_id seq_id, int32_t i, int32_t ih, llama_pos * out, int32_t n_max) {
    const auto * snapkv = snapkv_get(*ctx, seq_id);
    if (!snapkv_has_layer(snapkv, i) || ih < 0 || ih >= snapkv->layers[i].info.n_head_kv) {
        return -1;
    }

    const auto positions = snapkv->get_positions(seq_id, snapkv->get_order(seq_id), i, ih);
    if (n_max < (int32_t) positions.size()) {
        return -1;
    }

    std::copy(positions.begin(), positions.end(), out);

    return positions.size();
}

int32_t llama_snapkv_get_rotated(const struct llama_context * ctx, llama_seq_id seq_id, llama_pos * out, int32_t n_max) {
    const auto * snapkv = snapkv_get(*ctx, seq_id);
    if (!snapkv) {
        return -1;
    }

    const auto rotated = snapkv->get_rotated(seq_id, snapkv->get_order(seq_id));
    if (n_max < (int32_t) rotated.size()) {
        return -1;
    }

    std::copy(rotated.begin(), rotated.end(), out);

    return rotated.size();
}

int32_t llama_snapkv_get_queries(struct llama_context * ctx, llama_seq_id seq_id, int32_t i, int32_t ir, float * out, size_t n_max) {
    const auto * snapkv = snapkv_get(*ctx, seq_id);
    const auto * reader = snapkv_get_reader(snapkv, i, ir);
    if (!reader) {
        return -1;
    }

    ctx->synchronize();

    const auto order = snapkv->get_order(seq_id);

    const uint32_t n_rows = snapkv->get_n_queries(seq_id, order, snapkv->params.n_window);
    if (!out) {
        return n_rows;
    }

    ggml_tensor * q = reader->q;
    if (n_max < (size_t) n_rows*q->ne[0]) {
        return -1;
    }

    // the sequence's rows at once
    std::vector<float> ring(snapkv->n_ring*q->ne[0]);
    ggml_backend_tensor_get(q, ring.data(), snapkv->ring_row(seq_id, 0)*q->nb[1], snapkv->n_ring*q->nb[1]);

    for (uint32_t w = 0; w < n_rows; ++w) {
        const size_t row = order[order.size() - n_rows + w].first % snapkv->n_ring;
        std::copy_n(ring.data() + row*q->ne[0], q->ne[0], out + (size_t) w*q->ne[0]);
    }

    return n_rows;
}

int64_t llama_snapkv_get_scores(struct llama_context * ctx, llama_seq_id seq_id, int32_t i, uint32_t n_window, float * out, size_t n_max) {
    auto * snapkv = snapkv_get(*ctx, seq_id);
    if (!snapkv_has_layer(snapkv, i)) {
        return -1;
    }

    ctx->synchronize();
    ctx->memory_update(false);

    const auto order = snapkv->get_order(seq_id);

    const size_t n_res = order.size()*snapkv->layers[i].info.n_head;

    if (n_window == 0 || n_window >= order.size() || n_max < n_res || snapkv->get_n_queries(seq_id, order, n_window) < n_window) {
        return -1;
    }

    snapkv->generation++;

    const auto status = snapkv_try([&]() {
        return snapkv_compute_scores(*ctx, *snapkv, seq_id, order, n_window, { (uint32_t) i }, [&](uint32_t, std::vector<float> scores) {
            std::copy(scores.begin(), scores.end(), out);
        });
    });

    if (status != GGML_STATUS_SUCCESS) {
        snapkv_reserve(*ctx);
        return -1;
    }

    return n_res;
}

// rows as stored, [n_cells, n_head_kv, bytes per head]
static std::vector<uint8_t> snapkv_read_rows(llama_context & lctx, const llama_snapkv & snapkv, llama_seq_id seq_id, int32_t i, const llama_snapkv::tensor & t) {
    lctx.synchronize();
    lctx.memory_update(false);

    const ggml_tensor * cache = snapkv.get_tensor(t, seq_id);

    const auto   order  = snapkv.get_order(seq_id);
    const size_t n_embd = (size_t) snapkv.layers[i].info.n_head_kv*t.info.n_embd_head;
    const size_t n_row  = ggml_row_size(t.info.type, n_embd);

    std::vector<uint8_t> res(order.size()*n_row);

    if (snapkv.is_transposed(t)) {
        const size_t n_el = ggml_type_size(t.info.type);

        std::vector<uint8_t> channel(snapkv.get_kv_size()*n_el);
        for (size_t c = 0; c < n_embd; ++c) {
            ggml_backend_tensor_get(cache, channel.data(), c*channel.size(), channel.size());
            for (size_t j = 0; j < order.size(); ++j) {
                std::copy_n(channel.data() + order[j].second*n_el, n_el, res.data() + j*n_row + c*n_el);
            }
        }
    } else {
        uint32_t n_cells = 0;
        for (const auto & [pos, cell] : order) {
            n_cells = std::max(n_cells, cell + 1);
        }

        // at once: on another machine each read is a round trip
        std::vector<uint8_t> data(n_cells*n_row);
        if (!data.empty()) {
            ggml_backend_tensor_get(cache, data.data(), 0, data.size());
        }
        for (size_t j = 0; j < order.size(); ++j) {
            std::copy_n(data.data() + order[j].second*n_row, n_row, res.data() + j*n_row);
        }
    }

    return res;
}

int64_t llama_snapkv_get_rows_raw(struct llama_context * ctx, llama_seq_id seq_id, int32_t i, int32_t it, uint8_t * out, size_t n_max) {
    const auto * snapkv = snapkv_get(*ctx, seq_id);
    const auto * t      = snapkv_get_tensor(snapkv, i, it);
    if (!t) {
        return -1;
    }

    const auto rows = snapkv_read_rows(*ctx, *snapkv, seq_id, i, *t);
    if (n_max < rows.size()) {
        return -1;
    }

    std::copy(rows.begin(), rows.end(), out);

    return rows.size();
}

int64_t llama_snapkv_get_rows_f32(struct llama_context * ctx, llama_seq_id seq_id, int32_t i, int32_t it, float * out, size_t n_max) {
    const auto * snapkv = snapkv_get(*ctx, seq_id);
    const auto * t      = snapkv_get_tensor(snapkv, i, it);
    if (!t) {
        return -1;
    }

    const auto type = t->info.type;
    const auto rows = snapkv_read_rows(*ctx, *snapkv, seq_id, i, *t);

    const size_t n_el = rows.size()/ggml_type_size(type)*ggml_blck_size(type);
    if (n_max < n_el) {
        return -1;
    }

    if (type == GGML_TYPE_F32) {
        std::copy(rows.begin(), rows.end(), (uint8_t *) out);
    } else {
        ggml_get_type_traits(type)->to_float(rows.data(), out, n_el);
    }

    return n_el;
}

int32_t llama_snapkv_get_sinks(struct llama_context * ctx, int32_t i, int32_t ir, float * out, int32_t n_max) {
    const auto * reader = snapkv_get_reader(snapkv_get(*ctx), i, ir);
    if (!reader) {
        return -1;
    }

    const ggml_tensor * sinks = reader->sinks;
    if (!sinks) {
        return 0;
    }
    if (n_max < ggml_nelements(sinks) || sinks->type != GGML_TYPE_F32) {
        return -1;
    }

    ggml_backend_tensor_get(sinks, out, 0, ggml_nbytes(sinks));

    return ggml_nelements(sinks);
}
