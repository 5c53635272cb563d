#include "snapkv-pass.h"

#include "snapkv-graph.h"
#include "snapkv-rules.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <system_error>
#include <thread>

//
// the context's cache
//

llama_kv_cache * snapkv_get_cache(const llama_context & lctx) {
    return llama_snapkv::get_caches(lctx.get_memory()).kv;
}

llama_snapkv_status snapkv_check(const llama_context & lctx) {
    auto * memory = lctx.get_memory();

    if (!memory || !lctx.get_cparams().causal_attn || llama_model_has_encoder(&lctx.get_model())) {
        return LLAMA_SNAPKV_STATUS_UNSUPPORTED_ENCODER;
    }
    if (lctx.get_cparams().embeddings) {
        return LLAMA_SNAPKV_STATUS_UNSUPPORTED_EMBEDDINGS;
    }
    if (dynamic_cast<llama_memory_recurrent *>(memory)) {
        return LLAMA_SNAPKV_STATUS_UNSUPPORTED_RECURRENT;
    }

    const llama_kv_cache * kv = snapkv_get_cache(lctx);

    return kv ? llama_snapkv::check_cache(*kv) : LLAMA_SNAPKV_STATUS_UNSUPPORTED_MEMORY;
}

llama_snapkv * snapkv_get(const llama_context & lctx) {
    return llama_snapkv::of(lctx.get_memory());
}

llama_snapkv * snapkv_get(const llama_context & lctx, llama_seq_id seq_id) {
    llama_snapkv * snapkv = snapkv_get(lctx);

    return snapkv && snapkv->has_seq(seq_id) ? snapkv : nullptr;
}

llama_snapkv_status snapkv_check_call(const llama_context & lctx, llama_seq_id seq_id, const llama_snapkv_params * params_in, llama_snapkv_params & params) {
    const llama_snapkv * snapkv = snapkv_get(lctx);
    if (!snapkv) {
        return LLAMA_SNAPKV_STATUS_NOT_ENABLED;
    }

    // the context can have changed since llama_snapkv_init()
    const auto supported = snapkv_check(lctx);
    if (supported != LLAMA_SNAPKV_STATUS_OK) {
        return supported;
    }
    if (!snapkv->has_seq(seq_id)) {
        return LLAMA_SNAPKV_STATUS_INVALID_SEQ;
    }

    params = params_in ? *params_in : snapkv->params;

    const char * err = llama_snapkv_params_check(params);
    if (!err && params.n_window > snapkv->params.n_window) {
        err = "n_window must not exceed that of llama_snapkv_init()";
    }
    if (!err && params.positions != snapkv->params.positions) {
        err = "positions must be those of llama_snapkv_init()";
    }
    if (err) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err);
        return LLAMA_SNAPKV_STATUS_INVALID_PARAMS;
    }

    return LLAMA_SNAPKV_STATUS_OK;
}

bool snapkv_reserve(llama_context & lctx) {
    lctx.set_embeddings_layer_inp(0, lctx.get_cparams().embeddings_layer_inp[0]); // changes nothing, but asks for it

    try {
        lctx.sched_reserve();
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
        return false;
    }

    return true;
}

static std::vector<size_t> snapkv_buffer_sizes(const llama_context & lctx) {
    ggml_backend_sched_t sched = lctx.get_sched();

    std::vector<size_t> res;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        res.push_back(ggml_backend_sched_get_buffer_size(sched, ggml_backend_sched_get_backend(sched, i)));
    }
    return res;
}

//
// attention of all tokens
//

static llama_snapkv_status snapkv_status_from_ggml(ggml_status status) {
    return status == GGML_STATUS_ABORTED ? LLAMA_SNAPKV_STATUS_ABORTED : LLAMA_SNAPKV_STATUS_FAILED_COMPUTE;
}

llama_snapkv_status snapkv_observe(
        llama_context & lctx,
        llama_snapkv  & snapkv,
        llama_seq_id    seq_id,
        const std::vector<std::pair<llama_pos, uint32_t>> & order) {
    auto & seq = snapkv.seqs[seq_id];

    const uint32_t n     = order.size();
    const uint32_t n_new = n - std::min(n, seq.n_observed());

    if (n_new == 0) {
        return n == seq.n_observed() ? LLAMA_SNAPKV_STATUS_OK : LLAMA_SNAPKV_STATUS_NOT_OBSERVED;
    }
    if (snapkv_get_rule(snapkv.params.rule)->needs != SNAPKV_RULE_NEEDS_ALL || snapkv.get_n_queries(seq_id, order, n_new) < n_new) {
        return LLAMA_SNAPKV_STATUS_NOT_OBSERVED;
    }

    std::vector<uint32_t> layers(snapkv.layers.size());
    std::iota(layers.begin(), layers.end(), 0);

    // the scheduler is used for other graphs from here on
    snapkv.generation++;

    const ggml_status status = snapkv_try([&]() {
        auto observed = seq.observed;
        observed.resize(snapkv.get_i_head(layers.size()));

        const auto status = snapkv_compute_scores(lctx, snapkv, seq_id, order, n_new, layers, [&](uint32_t i, const std::vector<float> & attn) {
            const auto & info = snapkv.layers[i].info;

            const uint32_t n_group = info.n_head/info.n_head_kv;
            const uint32_t i_head  = snapkv.get_i_head(i);

            for (int32_t ih = 0; ih < info.n_head_kv; ++ih) {
                auto & dst = observed[i_head + ih];
                dst.resize(n, 0.0);
                for (uint32_t j = 0; j < n; ++j) {
                    double sum = 0.0;
                    for (uint32_t g = 0; g < n_group; ++g) {
                        sum += attn[((size_t) ih*n_group + g)*n + j];
                    }
                    dst[j] += sum/n_group;
                }
            }
        });

        if (status == GGML_STATUS_SUCCESS) {
            seq.observed     = std::move(observed);
            seq.pos_observed = order.back().first + 1;
        }
        return status;
    });

    if (status != GGML_STATUS_SUCCESS) {
        snapkv_reserve(lctx); // it may have lost its buffers
        return snapkv_status_from_ggml(status);
    }

    return LLAMA_SNAPKV_STATUS_OK;
}

//
// the pass
//

// run f(0) ... f(n - 1) in threads
template <typename F>
static void snapkv_parallel_for(uint32_t n, uint32_t n_threads, const F & f) {
    std::atomic<uint32_t> next(0);
    std::atomic<bool>     failed(false);

    const auto work = [&]() {
        try {
            for (uint32_t i = next++; i < n; i = next++) {
                f(i);
            }
        } catch (const std::bad_alloc &) {
            failed = true;
        }
    };

    std::vector<std::thread> threads;
    try {
        for (uint32_t t = 1; t < std::min(n, n_threads); ++t) {
            threads.emplace_back(work);
        }
    } catch (const std::system_error &) {
        // fewer threads will do
    }
    work();
    for (auto & t : threads) {
        t.join();
    }

    if (failed) {
        throw std::bad_alloc();
    }
}

llama_snapkv_status snapkv_pass(
        llama_context & lctx,
        llama_snapkv  & snapkv,
        llama_seq_id    seq_id,
        const llama_snapkv_params & params,
        uint32_t        n_tail_max,
        llama_snapkv_stats & stats) {
    const int64_t t_start_us = ggml_time_us();

    stats = {};

    // pending copies of streams
    lctx.synchronize();
    lctx.memory_update(false);

    const auto order = snapkv.get_order(seq_id);

    const uint32_t n        = order.size();
    const uint32_t n_recent = std::max(params.n_recent, params.n_window);

    stats.n_cells_before = n;
    stats.n_cells_after  = n;

    if (n <= params.n_budget) {
        stats.t_total_us = ggml_time_us() - t_start_us;
        return LLAMA_SNAPKV_STATUS_WITHIN_BUDGET;
    }
    if (snapkv.has_shared_cells(seq_id)) {
        return LLAMA_SNAPKV_STATUS_SHARED_CELLS;
    }

    const uint32_t n_window = snapkv.get_n_queries(seq_id, order, params.n_window);
    if (n_window == 0) {
        return LLAMA_SNAPKV_STATUS_NO_QUERIES;
    }

    const bool is_packed = params.positions == LLAMA_SNAPKV_POSITIONS_PACKED;

    const auto rotated = is_packed ? snapkv.get_rotated(seq_id, order) : std::vector<llama_pos>();
    if (is_packed && rotated.empty()) {
        return LLAMA_SNAPKV_STATUS_NOT_PACKED;
    }

    const auto & rule = *snapkv_get_rule(params.rule);

    const auto sizes_before = snapkv_buffer_sizes(lctx);

    if (rule.needs == SNAPKV_RULE_NEEDS_ALL) {
        const auto observed = snapkv_observe(lctx, snapkv, seq_id, order);
        if (observed != LLAMA_SNAPKV_STATUS_OK) {
            return observed;
        }
    }

    stats.n_window = n_window;
    stats.n_recent = n_recent;

    const uint32_t n_layer = snapkv.layers.size();

    llama_snapkv_params params_used = params;
    params_used.n_window = n_window;

    // which rows each layer and KV head keeps
    std::vector<std::vector<std::vector<uint32_t>>> keep(n_layer);

    std::vector<double> scores_shared(n - n_window, 0.0);

    std::vector<uint32_t> layers(n_layer);
    std::iota(layers.begin(), layers.end(), 0);

    const auto on_scores = [&](uint32_t i, const std::vector<float> & attn) {
        const int64_t t_select_us = ggml_time_us();

        const auto & info = snapkv.layers[i].info;

        const uint32_t n_group = info.n_head/info.n_head_kv;

        keep[i].resize(info.n_head_kv);

        std::vector<std::vector<double>> scores(rule.is_shared ? info.n_head_kv : 0);

        // a thread must be worth its start
        const uint32_t n_threads = std::min<uint64_t>(lctx.n_threads_batch(), 1 + (uint64_t) info.n_head*n/65536);

        snapkv_parallel_for(info.n_head_kv, n_threads, [&](uint32_t ih) {
            const auto & observed = snapkv.seqs[seq_id].observed;

            auto cur = snapkv_score(rule, {
                params_used, n, n_group, i, ih,
                rule.needs == SNAPKV_RULE_NEEDS_WINDOW ? attn.data() + (size_t) ih*n_group*n : nullptr,
                rule.needs == SNAPKV_RULE_NEEDS_ALL    ? observed[snapkv.get_i_head(i) + ih].data() : nullptr,
            });
            if (rule.is_shared) {
                scores[ih] = std::move(cur);
            } else {
                keep[i][ih] = snapkv_select(cur, n, n_recent, params.n_budget);
            }
        });

        for (const auto & cur : scores) {
            for (uint32_t j = 0; j < cur.size(); ++j) {
                scores_shared[j] += cur[j];
            }
        }

        stats.t_select_us += ggml_time_us() - t_select_us;
    };

    // the scheduler is used for other graphs from here on
    snapkv.generation++;

    ggml_status status = snapkv_try([&]() {
        if (rule.needs == SNAPKV_RULE_NEEDS_WINDOW) {
            return snapkv_compute_scores(lctx, snapkv, seq_id, order, n_window, layers, on_scores);
        }
        for (uint32_t i : layers) {
            on_scores(i, {});
        }
        return GGML_STATUS_SUCCESS;
    });

    if (rule.is_shared) {
        const auto chosen = snapkv_select(scores_shared, n, n_recent, params.n_budget);
        for (auto & heads : keep) {
            std::fill(heads.begin(), heads.end(), chosen);
        }
    }

    stats.t_score_us = ggml_time_us() - t_start_us - stats.t_select_us;

    if (status != GGML_STATUS_SUCCESS) {
        snapkv_reserve(lctx); // it may have lost its buffers
        return snapkv_status_from_ggml(status);
    }

    const std::vector<uint32_t> dst = snapkv.get_lowest_cells(seq_id, params.n_budget);

    const int64_t t_move_us = ggml_time_us();

    status = snapkv_try([&]() {
        return snapkv_compute_moves(lctx, snapkv, seq_id, order, keep, dst, rotated);
    });

    const auto sizes_after = snapkv_buffer_sizes(lctx);
    for (size_t i = 0; i < sizes_before.size(); ++i) {
        stats.n_bytes_grown += sizes_after[i] > sizes_before[i] ? sizes_after[i] - sizes_before[i] : 0;
    }

    if (status != GGML_STATUS_SUCCESS) {
        snapkv_reserve(lctx);
        lctx.get_memory()->seq_rm(seq_id, -1, -1);
        LLAMA_LOG_ERROR("%s: %s\n", __func__, llama_snapkv_status_str(LLAMA_SNAPKV_STATUS_SEQUENCE_LOST));
        return LLAMA_SNAPKV_STATUS_SEQUENCE_LOST;
    }

    stats.t_move_us = ggml_time_us() - t_move_us;

    const uint32_t n_tail = snapkv.get_n_tail(seq_id, order, n_tail_max);

    auto kept = std::make_shared<llama_snapkv::kept_positions>();
    for (uint32_t i = 0; i < n_layer; ++i) {
        for (uint32_t ih = 0; ih < keep[i].size(); ++ih) {
            const auto positions = snapkv.get_positions(seq_id, order, i, ih);

            auto & cur = kept->emplace_back();
            for (size_t j = 0; j < params.n_budget - n_tail && !positions.empty(); ++j) {
                cur.push_back(positions[keep[i][ih][j]]);
            }
        }
    }

    for (const auto & layer : snapkv.layers) {
        for (const auto & t : layer.tensors) {
            stats.n_bytes_freed += (n - params.n_budget)*ggml_row_size(t.info.type, (int64_t) t.info.n_embd_head*layer.info.n_head_kv);
        }
    }

    const bool is_known = !kept->at(0).empty();

    // the sums of what was kept
    std::vector<std::vector<double>> observed;
    if (snapkv.seqs[seq_id].n_observed() == n) {
        for (const auto & heads : keep) {
            for (const auto & head : heads) {
                const auto & src = snapkv.seqs[seq_id].observed[observed.size()];

                auto & cur = observed.emplace_back();
                for (uint32_t j : head) {
                    cur.push_back(src[j]);
                }
            }
        }
    }

    const llama_pos pos_max = snapkv.set_compacted(seq_id, order, dst, n_tail, is_packed, is_known ? std::move(kept) : nullptr);

    if (!observed.empty()) {
        snapkv.seqs[seq_id].observed     = std::move(observed);
        snapkv.seqs[seq_id].pos_observed = pos_max + 1;
    }

    // what has no rows to move moves by its positions
    if (pos_max != order.back().first) {
        const auto caches = llama_snapkv::get_caches(lctx.get_memory());
        const auto shift  = pos_max - order.back().first;

        if (caches.swa) {
            caches.swa->seq_add(seq_id, 0, -1, shift);
            lctx.memory_update(false);
        }
        if (caches.recr) {
            caches.recr->seq_add(seq_id, 0, -1, shift);
        }
    }

    stats.n_cells_after = params.n_budget;
    stats.t_total_us    = ggml_time_us() - t_start_us;

    return LLAMA_SNAPKV_STATUS_OK;
}
