#include "snapkv-graph.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <new>
#include <numeric>

using snapkv_order = std::vector<std::pair<llama_pos, uint32_t>>;

namespace {

// collects small computations into graphs of bounded size and runs them in the way of the K-shift
struct graph_runner {
    graph_runner(llama_context & lctx) : sched(lctx.get_sched()), lctx(lctx), res(lctx.get_gf_res_reserve()) {
        ggml_backend_sched_set_eval_callback(sched, lctx.get_cparams().cb_eval, lctx.get_cparams().cb_eval_user_data);
        reset();
    }

    ggml_context * ctx() const { return res->get_ctx(); }

    // an input with its data, shared by all computations of the graph that ask for the same key
    template <typename T, typename F>
    ggml_tensor * input(ggml_type type, const std::vector<int64_t> & key, int64_t ne0, int64_t ne1, const F & fill) {
        auto & cur = inputs[key];
        if (!cur.first) {
            cur.first = ggml_new_tensor_2d(ctx(), type, ne0, ne1);
            cur.second.resize(ggml_nbytes(cur.first));

            ggml_set_input(cur.first);
            fill((T *) cur.second.data());

            n_bytes += cur.second.size();
        }
        return cur.first;
    }

    void output(ggml_tensor * t, std::function<void(const float *)> on_data) {
        ggml_set_output(t);
        outputs.emplace_back(t, std::move(on_data));

        n_bytes += ggml_nbytes(t);
    }

    // add a computation; the backend that holds the buffer runs all of its nodes, if it can: with layers on several backends
    // the scheduler would spread those that it may choose freely, and a copy into a view on another backend gets lost
    void expand(ggml_tensor * t, ggml_backend_buffer_t buffer) {
        auto * gf = res->get_gf();

        const int n_before = ggml_graph_n_nodes(gf);
        ggml_build_forward_expand(gf, t);

        for (int i = n_before; i < ggml_graph_n_nodes(gf); ++i) {
            placed.emplace_back(ggml_graph_node(gf, i), buffer);
        }
    }

    // the same for a tensor that computations write into by views; it takes its memory until the graph has run
    void place(ggml_tensor * t, ggml_backend_buffer_t buffer) {
        placed.emplace_back(t, buffer);

        n_bytes += ggml_nbytes(t);
    }

    // run what there is, if more could be too much
    ggml_status flush_if_full(size_t n_tensors_next) {
        const size_t n_tensors = ggml_used_mem(ctx())/ggml_tensor_overhead();

        if (n_bytes >= SNAPKV_N_BYTES_SLICE || n_tensors + n_tensors_next > (size_t) res->get_max_nodes()*3/4) {
            return flush();
        }
        return GGML_STATUS_SUCCESS;
    }

    ggml_status flush() {
        auto * gf = res->get_gf();

        if (ggml_graph_n_nodes(gf) == 0) {
            return GGML_STATUS_SUCCESS;
        }

        for (const auto & [t, buffer] : placed) {
            for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
                ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
                if (ggml_backend_supports_buft(backend, ggml_backend_buffer_get_type(buffer)) && ggml_backend_supports_op(backend, t)) {
                    ggml_backend_sched_set_tensor_backend(sched, t, backend);
                    break;
                }
            }
        }

        if (!ggml_backend_sched_alloc_graph(sched, gf)) {
            return GGML_STATUS_ALLOC_FAILED;
        }

        for (const auto & [key, inp] : inputs) {
            if (inp.first->buffer) {
                ggml_backend_tensor_set(inp.first, inp.second.data(), 0, inp.second.size());
            }
        }

        const auto status = lctx.graph_compute(gf, true);
        ggml_backend_sched_synchronize(sched);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }

        std::vector<float> data;
        for (const auto & [t, on_data] : outputs) {
            data.resize(ggml_nelements(t));
            ggml_backend_tensor_get(t, data.data(), 0, ggml_nbytes(t));
            on_data(data.data());
        }

        reset();

        return GGML_STATUS_SUCCESS;
    }

    ggml_backend_sched_t sched;

private:
    void reset() {
        // the allocator keeps its plan for a graph with as many nodes and leafs, whatever the order of the leafs: plan for one
        // that no other graph resembles
        ggml_backend_sched_reset(sched);
        res->reset();

        ggml_tensor * t = ggml_new_tensor_1d(ctx(), GGML_TYPE_F32, 1);
        ggml_set_input(t);
        ggml_build_forward_expand(res->get_gf(), ggml_dup(ctx(), t));
        if (!ggml_backend_sched_reserve(sched, res->get_gf())) {
            throw std::bad_alloc();
        }

        ggml_backend_sched_reset(sched);
        res->reset();

        inputs .clear();
        outputs.clear();
        placed .clear();

        n_bytes = 0;
    }

    llama_context & lctx;
    llm_graph_result * res;

    std::map<std::vector<int64_t>, std::pair<ggml_tensor *, std::vector<uint8_t>>> inputs;
    std::vector<std::pair<ggml_tensor *, std::function<void(const float *)>>>      outputs;
    std::vector<std::pair<ggml_tensor *, ggml_backend_buffer_t>>                   placed;

    size_t n_bytes = 0;
};

// kinds of inputs, the first number of their keys
enum input_kind { INPUT_Q_ROWS, INPUT_K_ROWS, INPUT_MASK, INPUT_SRC, INPUT_DST, INPUT_SHIFT, INPUT_HADAMARD };

// t seen as rows of ne0 elements of another type, [ne0, ne1], same bytes
ggml_tensor * view_as_rows(ggml_context * ctx, ggml_tensor * t, ggml_type type, int64_t ne0, int64_t ne1) {
    ggml_tensor * res = ggml_view_tensor(ctx, t);

    res->type  = type;
    res->ne[0] = ne0;
    res->ne[1] = ne1;
    res->ne[2] = 1;
    res->ne[3] = 1;
    res->nb[0] = ggml_type_size(type);
    res->nb[1] = ggml_row_size(type, ne0);
    res->nb[2] = res->nb[1]*ne1;
    res->nb[3] = res->nb[2];

    GGML_ASSERT(ggml_nbytes(res) <= ggml_nbytes(t));

    return res;
}

uint32_t div_up(uint32_t a, uint32_t b) {
    return (a + b - 1)/b;
}

}

//
// scores
//

namespace {

// the sum over the window's rows of one reader's attention, in slices
// on_scores: [n_head][n] of some of its heads, from head0 on, and of some of the rows: to be added up
ggml_status add_scores(
        graph_runner  & run,
        llama_snapkv  & snapkv,
        llama_seq_id    seq_id,
        const snapkv_order & order,
        uint32_t        n_window,
        const llama_snapkv::layer  & layer,
        const llama_snapkv::reader & reader,
        const std::function<void(uint32_t head0, uint32_t n_head, bool is_last, const float * data)> & on_scores) {
    const auto & t_k = layer.tensors[reader.info.i_tensor];

    const uint32_t n        = order.size();
    const uint32_t n_prefix = n - n_window;

    const int64_t  d       = t_k.info.n_embd_head;
    const uint32_t n_kv    = layer.info.n_head_kv;
    const uint32_t n_group = reader.info.n_head/n_kv;

    ggml_tensor * k_cache = snapkv.get_tensor(t_k, seq_id);

    // a slice holds some KV heads, else some of the query heads of one, and some rows of the window, but always all cells:
    // the softmax needs them
    uint32_t nh_slice = n_kv;
    uint32_t nw_slice = n_window;
    uint32_t ng_slice = n_group;

    const auto is_too_large = [&]() { return sizeof(float)*n*nh_slice*ng_slice*nw_slice > SNAPKV_N_BYTES_SLICE; };

    for (uint32_t * n_slice : { &nh_slice, &nw_slice, &ng_slice }) {
        while (*n_slice > 1 && is_too_large()) {
            *n_slice = div_up(*n_slice, 2);
        }
    }

    // cells whose K is converted to F32 at a time; not so few that the graph gets long
    const uint32_t nc_slice = std::max<uint32_t>({ 1, n_prefix/32, (uint32_t) (SNAPKV_N_BYTES_SLICE/2/(sizeof(float)*d*nh_slice)) });

    for (uint32_t h0 = 0; h0 < n_kv; h0 += nh_slice) {
        const uint32_t nh = std::min(nh_slice, n_kv - h0);

        for (uint32_t g0 = 0; g0 < n_group; g0 += ng_slice) {
            const uint32_t head0 = h0*n_group + g0;
            const uint32_t nq    = nh*std::min(ng_slice, n_group - g0);

            for (uint32_t w0 = 0; w0 < n_window; w0 += nw_slice) {
                const uint32_t nw = std::min(nw_slice, n_window - w0);

                const auto status = run.flush_if_full(48 + 12*(n_prefix/nc_slice + 2));
                if (status != GGML_STATUS_SUCCESS) {
                    return status;
                }

                ggml_context * ctx = run.ctx();

                // queries [d, nw, nq]
                ggml_tensor * q_rows = run.input<int32_t>(GGML_TYPE_I32, { INPUT_Q_ROWS, w0, nw }, nw, 1, [&](int32_t * data) {
                    for (uint32_t w = 0; w < nw; ++w) {
                        data[w] = snapkv.ring_row(seq_id, order[n_prefix + w0 + w].first);
                    }
                });
                ggml_tensor * q = ggml_get_rows(ctx, reader.q, q_rows);
                q = ggml_view_3d(ctx, q, d, nq, nw, sizeof(float)*d, q->nb[1], sizeof(float)*d*head0);
                q = ggml_permute(ctx, q, 0, 2, 1, 3);

                // K of one head as one row of the cache
                ggml_tensor * k_all = view_as_rows(ctx, k_cache, k_cache->type, d, (int64_t) n_kv*snapkv.get_kv_size());

                // logits [n, nw, nq]
                ggml_tensor * kq = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n, nw, nq);
                ggml_set_name(kq, "snapkv_kq");
                run.place(kq, k_cache->buffer);

                for (uint32_t c0 = 0; c0 < n; ) {
                    const bool is_window = c0 == n_prefix;

                    const uint32_t nc = is_window ? n_window : std::min(nc_slice, n_prefix - c0);

                    ggml_tensor * k_rows = run.input<int32_t>(GGML_TYPE_I32, { INPUT_K_ROWS, n_kv, h0, nh, c0, nc }, (int64_t) nc*nh, 1, [&](int32_t * data) {
                        for (uint32_t h = 0; h < nh; ++h) {
                            for (uint32_t c = 0; c < nc; ++c) {
                                *data++ = order[c0 + c].second*n_kv + h0 + h;
                            }
                        }
                    });

                    ggml_tensor * k = ggml_get_rows(ctx, k_all, k_rows);
                    k = ggml_reshape_3d(ctx, k, d, nc, nh);

                    ggml_tensor * cur = ggml_mul_mat(ctx, k, q); // [nc, nw, nq]
                    ggml_prec_set_acc(cur, GGML_PREC_F32);

                    if (reader.info.softcap != 0.0f) {
                        cur = ggml_tanh (ctx, ggml_scale(ctx, cur, reader.info.cap_scale/reader.info.softcap));
                        cur = ggml_scale(ctx, cur, reader.info.softcap);
                    }

                    // the window sees all of the prefix, and itself causally
                    if (is_window) {
                        ggml_tensor * mask = run.input<float>(GGML_TYPE_F32, { INPUT_MASK, w0, nw }, n_window, nw, [&](float * data) {
                            for (uint32_t w = w0; w < w0 + nw; ++w) {
                                for (uint32_t c = 0; c < n_window; ++c) {
                                    *data++ = c > w ? -INFINITY : 0.0f;
                                }
                            }
                        });
                        cur = ggml_add(ctx, cur, mask);
                    }

                    run.expand(ggml_cpy(ctx, cur, ggml_view_3d(ctx, kq, nc, nw, nq, kq->nb[1], kq->nb[2], sizeof(float)*c0)), k_cache->buffer);

                    c0 += nc;
                }

                ggml_tensor * cur = ggml_soft_max_ext(ctx, kq, nullptr, reader.info.kq_scale, 0.0f);
                if (reader.sinks) {
                    ggml_soft_max_add_sinks(cur, nq == (uint32_t) reader.info.n_head ? reader.sinks : ggml_view_1d(ctx, reader.sinks, nq, sizeof(float)*head0));
                }

                // sum over the rows of the window, pairwise
                ggml_tensor * rest = nullptr;
                while (cur->ne[1] > 1) {
                    const int64_t nr = cur->ne[1];
                    if (nr % 2) {
                        ggml_tensor * last = ggml_view_3d(ctx, cur, n, 1, nq, cur->nb[1], cur->nb[2], cur->nb[1]*(nr - 1));
                        rest = rest ? ggml_add(ctx, rest, last) : last;
                    }
                    cur = ggml_add(ctx,
                            ggml_view_3d(ctx, cur, n, nr/2, nq, cur->nb[1], cur->nb[2], 0),
                            ggml_view_3d(ctx, cur, n, nr/2, nq, cur->nb[1], cur->nb[2], cur->nb[1]*(nr/2)));
                }
                if (rest) {
                    cur = ggml_add(ctx, cur, rest);
                }

                run.expand(cur, k_cache->buffer);

                const bool is_last = head0 + nq == (uint32_t) reader.info.n_head && w0 + nw == n_window;

                run.output(cur, [=](const float * data) {
                    on_scores(head0, nq, is_last, data);
                });
            }
        }
    }

    return GGML_STATUS_SUCCESS;
}

}

ggml_status snapkv_compute_scores(
        llama_context & lctx,
        llama_snapkv  & snapkv,
        llama_seq_id    seq_id,
        const snapkv_order & order,
        uint32_t        n_window,
        const std::vector<uint32_t> & layers,
        const std::function<void(uint32_t i, const std::vector<float> & scores)> & on_scores) {
    const uint32_t n = order.size();

    graph_runner run(lctx);

    for (uint32_t i : layers) {
        const auto & layer = snapkv.layers[i];

        const uint32_t n_group_all = layer.info.n_head/layer.info.n_head_kv;

        auto scores = std::make_shared<std::vector<float>>((size_t) layer.info.n_head*n, 0.0f);

        uint32_t g0 = 0; // first head of the reader among those of a KV head

        for (const auto & reader : layer.readers) {
            const uint32_t n_group = reader.info.n_head/layer.info.n_head_kv;

            const bool is_last_reader = &reader == &layer.readers.back();

            const auto status = add_scores(run, snapkv, seq_id, order, n_window, layer, reader, [=, &on_scores](uint32_t head0, uint32_t n_head, bool is_last, const float * data) {
                for (uint32_t head = head0; head < head0 + n_head; ++head) {
                    float * dst = scores->data() + (size_t) (head/n_group*n_group_all + g0 + head%n_group)*n;
                    for (uint32_t j = 0; j < n; ++j) {
                        dst[j] += *data++;
                    }
                }
                if (is_last && is_last_reader) {
                    on_scores(i, *scores);
                }
            });
            if (status != GGML_STATUS_SUCCESS) {
                return status;
            }

            g0 += n_group;
        }
    }

    return run.flush();
}

//
// moves
//

ggml_status snapkv_compute_moves(
        llama_context & lctx,
        llama_snapkv  & snapkv,
        llama_seq_id    seq_id,
        const snapkv_order & order,
        const std::vector<std::vector<std::vector<uint32_t>>> & keep,
        const std::vector<uint32_t> & dst,
        const std::vector<llama_pos> & rotated) {
    const uint32_t n_dst = dst.size();

    const auto * hadamard = snapkv.get_hadamard();

    const int64_t kv_size = snapkv.get_kv_size();

    graph_runner run(lctx);

    for (uint32_t i = 0; i < snapkv.layers.size(); ++i) {
        const auto & layer = snapkv.layers[i];

        for (uint32_t it = 0; it < layer.tensors.size(); ++it) {
            const auto & t = layer.tensors[it];

            ggml_tensor * cache = snapkv.get_tensor(t, seq_id);

            const bool trans = snapkv.is_transposed(t);

            const int64_t d = t.info.n_embd_head;

            const size_t n_bytes_head = ggml_row_size(cache->type, d);

            // what moves as one row: a head of a cell, read as 32-bit words so that no bit changes;
            // for the transposed V, and for quantized heads of odd size, which are no words, the elements themselves
            // as elements also what is rotated on its way
            const bool is_rotated = !rotated.empty() && snapkv.has_rope(t);
            const bool is_words   = !trans && !is_rotated && n_bytes_head % sizeof(float) == 0;

            const ggml_type type = is_words ? GGML_TYPE_F32 : cache->type;

            int64_t n_row = trans ? 1 : is_words ? n_bytes_head/sizeof(float) : d;

            // units of rows that move together: KV heads, or channels of the transposed V
            uint32_t n_unit = layer.info.n_head_kv*(trans ? d : 1);

            // units do not touch each other, so a slice of them may overwrite its own sources once it has read them all;
            // a unit that is too much for one slice is cut into shorter rows
            const auto n_bytes_unit = [&]() { return n_dst*(sizeof(float)*n_row*(is_rotated ? 2 : 1) + sizeof(int32_t) + sizeof(int64_t)); };

            while (is_words && n_row % 2 == 0 && n_bytes_unit() > SNAPKV_N_BYTES_SLICE) {
                n_row  /= 2;
                n_unit *= 2;
            }

            const uint32_t n_unit_head = n_unit/layer.info.n_head_kv;

            // row of a unit in a cell
            const auto row = [&](uint32_t cell, uint32_t u) -> int64_t { return trans ? u*kv_size + cell : (int64_t) cell*n_unit + u; };

            const uint32_t nu_slice = std::clamp<size_t>(SNAPKV_N_BYTES_SLICE/n_bytes_unit(), 1, n_unit);

            for (uint32_t u0 = 0; u0 < n_unit; u0 += nu_slice) {
                const uint32_t nu = std::min(nu_slice, n_unit - u0);

                const auto status = run.flush_if_full(20);
                if (status != GGML_STATUS_SUCCESS) {
                    return status;
                }

                ggml_context * ctx = run.ctx();

                ggml_tensor * idx_src = run.input<int32_t>(GGML_TYPE_I32, { INPUT_SRC, i, it, u0 }, (int64_t) n_dst*nu, 1, [&](int32_t * data) {
                    for (uint32_t u = u0; u < u0 + nu; ++u) {
                        for (uint32_t j : keep[i][u/n_unit_head]) {
                            *data++ = row(order[j].second, u);
                        }
                    }
                });
                ggml_tensor * idx_dst = run.input<int64_t>(GGML_TYPE_I64, { INPUT_DST, n_unit, trans, u0, nu }, (int64_t) n_dst*nu, 1, [&](int64_t * data) {
                    for (uint32_t u = u0; u < u0 + nu; ++u) {
                        for (uint32_t cell : dst) {
                            *data++ = row(cell, u);
                        }
                    }
                });

                ggml_tensor * rows = view_as_rows(ctx, cache, type, n_row, n_unit*kv_size);

                ggml_tensor * cur = ggml_get_rows(ctx, rows, idx_src);

                if (is_rotated) {
                    ggml_tensor * shift = run.input<int32_t>(GGML_TYPE_I32, { INPUT_SHIFT, i, it, u0 }, (int64_t) n_dst*nu, 1, [&](int32_t * data) {
                        for (uint32_t u = u0; u < u0 + nu; ++u) {
                            for (uint32_t k = 0; k < n_dst; ++k) {
                                *data++ = snapkv.pos_packed + (llama_pos) k - rotated[keep[i][u][k]];
                            }
                        }
                    });
                    ggml_tensor * rot = nullptr;
                    if (hadamard) {
                        const int64_t n_rot = std::lround(std::sqrt(hadamard->size()));
                        rot = run.input<float>(GGML_TYPE_F32, { INPUT_HADAMARD }, n_rot, n_rot, [&](float * data) {
                            std::copy(hadamard->begin(), hadamard->end(), data);
                        });
                    }
                    cur = snapkv.rotate(lctx, ctx, t, cur, shift, rot);
                }

                cur = ggml_set_rows(ctx, rows, cur, idx_dst);

                run.expand(cur, cache->buffer);
            }
        }
    }

    return run.flush();
}
