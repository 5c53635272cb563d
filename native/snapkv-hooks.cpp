#include "snapkv-hooks.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>

llama_snapkv::llama_snapkv(llama_kv_cache & kv, llama_kv_cache * kv_idx, llama_snapkv_params params, uint32_t n_queries, uint32_t n_seq_max, uint32_t n_swa) :
    kv(kv), kv_idx(kv_idx), params(params), pos_packed(n_swa), n_ring(n_queries + LLAMA_SNAPKV_N_RING_SLACK), seqs(n_seq_max) {
    for (auto & seq : seqs) {
        seq.ring.assign(n_ring, -1);
    }

    const auto add_tensor = [](layer & dst, const llama_kv_cache & src, uint32_t ikv, bool is_v) {
        const auto & cur = src.layers[ikv];

        tensor t = {};

        t.info.il          = cur.il;
        t.info.n_embd_head = is_v ? src.hparams.n_embd_head_v(cur.il) : src.hparams.n_embd_head_k(cur.il);
        t.info.is_v        = is_v;
        t.info.type        = (is_v ? cur.v : cur.k)->type;
        t.kv               = &src;
        t.ikv              = ikv;

        dst.tensors.push_back(t);
    };

    // by layer in kv: index in layers, index of its K
    std::map<uint32_t, std::pair<uint32_t, uint32_t>> ikv_to_k;

    for (uint32_t ikv = 0; ikv < kv.layers.size(); ++ikv) {
        const auto & src = kv.layers[ikv];
        if (kv.hparams.n_head_kv(src.il) == 0) {
            continue; // a layer without attention
        }

        // a layer without an indexer of its own attends to what the one before chose, so it keeps the same cells
        const auto it_idx = kv_idx ? kv_idx->map_layer_ids.find(src.il) : std::unordered_map<int32_t, int32_t>::const_iterator();

        const bool has_idx = kv_idx && it_idx != kv_idx->map_layer_ids.end();

        if (!kv_idx || has_idx || layers.empty()) {
            auto & dst = layers.emplace_back();

            dst.info.il        = src.il;
            dst.info.n_head_kv = kv.hparams.n_head_kv(src.il);
        }

        auto & dst = layers.back();

        ikv_to_k[ikv] = { layers.size() - 1, dst.tensors.size() };

        add_tensor(dst, kv, ikv, false);
        if (src.v) {
            add_tensor(dst, kv, ikv, true);
        }
        if (has_idx) {
            add_tensor(dst, *kv_idx, it_idx->second, false);
        }
    }

    // which layers read them, in ascending order
    const std::map<int32_t, int32_t> il_to_ikv(kv.map_layer_ids.begin(), kv.map_layer_ids.end());

    std::map<ggml_backend_buffer_type_t, ggml_context_ptr> ctxs;

    for (const auto & [il, ikv] : il_to_ikv) {
        const auto it = ikv_to_k.find(ikv);
        if (it == ikv_to_k.end() || kv.hparams.n_head(il) == 0) {
            continue;
        }

        auto & dst = layers[it->second.first];

        auto & ctx = ctxs[ggml_backend_buffer_get_type(kv.layers[ikv].k->buffer)];
        if (!ctx) {
            ctx.reset(ggml_init({ /*.mem_size =*/ il_to_ikv.size()*ggml_tensor_overhead(), /*.mem_buffer =*/ nullptr, /*.no_alloc =*/ true }));
            if (!ctx) {
                throw std::bad_alloc();
            }
        }

        reader r = {};

        r.info.il       = il;
        r.info.n_head   = kv.hparams.n_head(il);
        r.info.i_tensor = it->second.second;

        r.q = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, (int64_t) dst.tensors[r.info.i_tensor].info.n_embd_head*r.info.n_head, n_ring*n_seq_max + 1);
        ggml_format_name(r.q, "snapkv_q_l%d", il);

        il_to_reader[il] = { it->second.first, dst.readers.size() };

        dst.readers.push_back(r);
    }

    for (auto & layer : layers) {
        for (const auto & r : layer.readers) {
            layer.info.n_head += r.info.n_head;
        }
        layer.info.n_tensor = layer.tensors.size();
        layer.info.n_reader = layer.readers.size();
    }

    for (auto & [buft, ctx] : ctxs) {
        ggml_backend_buffer_ptr buf(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
        if (!buf) {
            throw std::bad_alloc();
        }
        ggml_backend_buffer_clear(buf.get(), 0);

        LLAMA_LOG_INFO("%s: %10s query ring size = %8.2f MiB (%u rows, %u seqs)\n", __func__,
                ggml_backend_buffer_name(buf.get()), ggml_backend_buffer_get_size(buf.get())/1024.0/1024.0, n_ring, n_seq_max);

        ctxs_bufs.emplace_back(std::move(ctx), std::move(buf));
    }
}

llama_snapkv::caches llama_snapkv::get_caches(llama_memory_i * memory) {
    caches res;

    if (auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        res.recr = hybrid->get_mem_recr();
        memory   = hybrid->get_mem_attn();
    } else if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        // an indexer of this kind reads blocks of positions
        const auto * hybrid_idx = dynamic_cast<llama_memory_hybrid_idx *>(memory);
        if (hybrid_idx && hybrid_idx->get_mem_idx()) {
            return res;
        }
        res.recr = hybrid->get_mem_recr();
        memory   = hybrid->get_mem_attn();
    }

    if (auto * iswa = dynamic_cast<llama_kv_cache_iswa *>(memory)) {
        res.swa = iswa->get_swa();
        memory  = iswa->get_base();
    } else if (auto * iswa = dynamic_cast<llama_kv_cache_dsa_iswa *>(memory)) {
        res.swa = iswa->get_swa();
        memory  = iswa->get_dsa();
    }

    if (auto * dsa = dynamic_cast<llama_kv_cache_dsa *>(memory)) {
        res.idx = dsa->get_lid();
        memory  = dsa->get_mla();
    }

    res.kv = dynamic_cast<llama_kv_cache *>(memory);

    return res;
}

llama_snapkv * llama_snapkv::of(llama_memory_i * memory) {
    const auto caches = get_caches(memory);

    return caches.kv ? caches.kv->get_snapkv() : nullptr;
}

size_t llama_snapkv::ring_size() const {
    size_t res = 0;
    for (const auto & [ctx, buf] : ctxs_bufs) {
        res += ggml_backend_buffer_get_size(buf.get());
    }
    return res;
}

//
// capture
//

namespace {

// which queries of the ubatch go to which rows of the ring
struct llm_graph_input_snapkv : public llm_graph_input_i {
    llm_graph_input_snapkv(llama_snapkv * snapkv, ggml_context * ctx, uint32_t n_tokens) :
            snapkv(snapkv), n_tokens(n_tokens), generation(snapkv->generation) {
        const uint32_t n = snapkv->n_copies(n_tokens);

        tokens = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n);
        rows   = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n);

        ggml_set_input(tokens);
        ggml_set_input(rows);
        ggml_set_name(tokens, "snapkv_tokens");
        ggml_set_name(rows,   "snapkv_rows");
    }

    void set_input(const llama_ubatch * ubatch) override {
        std::vector<int32_t> data_tokens(tokens->ne[0]);
        std::vector<int64_t> data_rows  (rows->ne[0]);

        snapkv->ring_copies(*ubatch, data_tokens.data(), data_rows.data());

        ggml_backend_tensor_set(tokens, data_tokens.data(), 0, ggml_nbytes(tokens));
        ggml_backend_tensor_set(rows,   data_rows.data(),   0, ggml_nbytes(rows));
    }

    bool can_reuse(const llm_graph_params & params) override {
        return n_tokens == params.ubatch.n_tokens && generation == snapkv->generation;
    }

    llama_snapkv * snapkv;

    ggml_tensor * tokens; // I32 [n_copies]
    ggml_tensor * rows;   // I64 [n_copies]

    const uint32_t n_tokens;
    const uint32_t generation;
};

}

void llama_snapkv::on_attn(const llm_graph_context & g, ggml_tensor * q, ggml_tensor * kq_b, ggml_tensor * sinks, float kq_scale, int il) {
    const auto it = il_to_reader.find(il);
    if (it == il_to_reader.end()) {
        return; // no attention heads
    }

    const auto & layer = layers[it->second.first];

    reader & dst = layers[it->second.first].readers[it->second.second];

    const int64_t n_embd_head = layer.tensors[dst.info.i_tensor].info.n_embd_head;

    if (q->type != GGML_TYPE_F32 || q->ne[0] != n_embd_head || q->ne[1] != dst.info.n_head || q->ne[2] != g.ubatch.n_tokens ||
            dst.info.n_head % layer.info.n_head_kv != 0) {
        return; // not captured: llama_snapkv_init() refuses the model
    }

    // all layers of a graph share the input
    const llm_graph_input_snapkv * inp = nullptr;
    for (const auto & cur : g.res->inputs) {
        if (const auto * found = dynamic_cast<const llm_graph_input_snapkv *>(cur.get())) {
            inp = found;
        }
    }
    if (!inp) {
        inp = static_cast<llm_graph_input_snapkv *>(g.res->add_input(std::make_unique<llm_graph_input_snapkv>(this, g.ctx0, g.ubatch.n_tokens)));
    }

    // the scale, the sinks and the soft-cap are known only here, see llm_graph_context::build_attn_mha()
    const bool is_grok = g.arch == LLM_ARCH_GROK && !g.cparams.flash_attn;
    const bool is_caps = is_grok || g.hparams.attn_soft_cap;

    dst.info.softcap   = is_caps ? g.hparams.f_attn_logit_softcapping : 0.0f;
    dst.info.cap_scale = is_grok ? g.hparams.f_attn_out_scale : is_caps && g.cparams.flash_attn ? kq_scale : 1.0f;
    dst.info.kq_scale  = is_caps && g.cparams.flash_attn ? 1.0f : kq_scale;
    dst.info.has_sinks = sinks != nullptr;
    dst.sinks          = sinks;
    dst.captured       = true;
    dst.has_bias       = kq_b != nullptr;

    ggml_tensor * cur = ggml_is_contiguous(q) ? q : ggml_cont(g.ctx0, q);
    cur = ggml_reshape_2d(g.ctx0, cur, dst.q->ne[0], q->ne[2]);
    cur = ggml_get_rows  (g.ctx0, cur, inp->tokens);

    ggml_build_forward_expand(g.gf, ggml_set_rows(g.ctx0, dst.q, cur, inp->rows));
}

void llama_snapkv::ring_copies(const llama_ubatch & ubatch, int32_t * tokens, int64_t * rows) {
    const uint32_t n = n_copies(ubatch.n_tokens);

    // what is not needed goes to the last row
    std::fill(tokens, tokens + n, 0);
    std::fill(rows,   rows   + n, (int64_t) n_ring*seqs.size());

    // only the last n_ring positions of each sequence, so that no row is written twice
    std::vector<llama_pos> pos_max(seqs.size(), -1);
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_seq_id seq_id = ubatch.seq_id[i][0];
        if (ubatch.n_seq_id[i] == 1 && has_seq(seq_id)) {
            pos_max[seq_id] = std::max(pos_max[seq_id], ubatch.pos[i]);
        }
    }

    // from the last token on: tokens of an image share their position, and can be more than the ring takes
    uint32_t n_used = 0;
    for (uint32_t i = ubatch.n_tokens; i-- > 0 && n_used < n; ) {
        const llama_seq_id seq_id = ubatch.seq_id[i][0];
        const llama_pos    pos    = ubatch.pos[i];

        // a token of several sequences has no row of its own, its cell is shared
        if (ubatch.n_seq_id[i] != 1 || !has_seq(seq_id) || pos + (llama_pos) n_ring <= pos_max[seq_id]) {
            continue;
        }

        tokens[n_used] = i;
        rows  [n_used] = ring_row(seq_id, pos);
        n_used++;

        seqs[seq_id].ring[pos % n_ring] = pos;
    }
}

//
// frontier
//

bool llama_snapkv::can_seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) const {
    if (seq_id < 0) {
        for (size_t s = 0; s < seqs.size(); ++s) {
            if (!can_seq_rm(s, p0, p1)) {
                return false;
            }
        }
        return true;
    }

    if (!has_seq(seq_id) || seqs[seq_id].frontier < 0) {
        return true;
    }

    if (p0 >= 0 && p1 >= 0 && p0 >= p1) {
        return true; // empty
    }

    const bool whole = p0 <= 0 && (p1 < 0 || p1 > kv.seq_pos_max(seq_id));

    return whole || p0 > seqs[seq_id].frontier;
}

llama_pos llama_snapkv::seq_pos_min(llama_seq_id seq_id) const {
    return kv.seq_pos_min(seq_id);
}

bool llama_snapkv::on_seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    if (!can_seq_rm(seq_id, p0, p1)) {
        return false;
    }

    for (size_t s = 0; s < seqs.size(); ++s) {
        if (seq_id >= 0 && (size_t) seq_id != s) {
            continue;
        }

        auto & seq = seqs[s];

        for (auto & pos : seq.ring) {
            if (pos >= p0 && (p1 < 0 || pos < p1)) {
                pos = -1;
            }
        }

        if (p0 <= seq.frontier && (p1 < 0 || p0 < p1)) {
            seq.set_whole();
        }

        // what the removed tokens attended to is in the sums of the others
        if (p0 < seq.pos_observed && (p1 < 0 || p0 < p1)) {
            seq.forget_observed();
        }
    }

    return true;
}

void llama_snapkv::on_clear() {
    for (auto & seq : seqs) {
        seq.set_whole();
        seq.forget_observed();
        std::fill(seq.ring.begin(), seq.ring.end(), -1);
    }
}

void llama_snapkv::on_seq_cp(llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1) {
    if (seq_id_src == seq_id_dst || !has_seq(seq_id_dst)) {
        return;
    }

    auto & dst = seqs[seq_id_dst];

    // the copy's queries are in the ring of the source
    std::fill(dst.ring.begin(), dst.ring.end(), -1);
    dst.forget_observed();

    const bool is_replaced = kv.get_stream(seq_id_src) != kv.get_stream(seq_id_dst);
    if (is_replaced) {
        dst.set_whole();
    }

    if (!has_seq(seq_id_src)) {
        return;
    }

    const auto & src = seqs[seq_id_src];

    const bool is_copied = src.frontier >= 0 && (is_replaced || (p0 <= src.frontier && (p1 < 0 || p1 > src.frontier)));
    if (is_copied && src.frontier > dst.frontier) {
        dst.frontier  = src.frontier;
        dst.pos_end   = src.pos_end;
        dst.n_shift   = src.n_shift;
        dst.is_packed = src.is_packed;
        dst.kept      = kv.seq_pos_max(seq_id_dst) < 0 || is_replaced ? src.kept : nullptr;
    }
}

void llama_snapkv::on_seq_keep(llama_seq_id seq_id) {
    for (size_t s = 0; s < seqs.size(); ++s) {
        if ((llama_seq_id) s != seq_id && kv.get_stream(s) == kv.get_stream(seq_id)) {
            seqs[s].set_whole();
            seqs[s].forget_observed();
            std::fill(seqs[s].ring.begin(), seqs[s].ring.end(), -1);
        }
    }
}

void llama_snapkv::on_state_read(llama_seq_id seq_id) {
    for (size_t s = 0; s < seqs.size(); ++s) {
        if (seq_id >= 0 && (size_t) seq_id != s) {
            continue;
        }

        auto & seq = seqs[s];

        // the state holds no queries
        std::fill(seq.ring.begin(), seq.ring.end(), -1);
        seq.forget_observed();
        seq.set_whole();

        // a whole sequence starts at 0, a compacted one at its frontier: n > n_budget > n_window, so it is never 0
        const llama_pos pos_min = kv.seq_pos_min(s);
        if (pos_min <= 0) {
            continue;
        }

        seq.frontier = pos_min;
        seq.pos_end  = std::min(pos_min + 1 + (llama_pos) params.n_window, kv.seq_pos_max(s) + 1);

        // not packed, some are missing before the frontier
        const auto & order = get_cells(s).seq_pos_get(s);
        const auto   n_merged = std::count_if(order.begin(), order.end(), [&](const auto & cur) { return cur.first == pos_min; });

        seq.is_packed = pos_min + 1 - n_merged == pos_packed;
    }
}

void llama_snapkv::on_refused(const char * what) const {
    LLAMA_LOG_ERROR("%s: positions cannot be changed in a context with SnapKV, see llama_memory_can_shift()\n", what);
}

//
// the cache
//

const llama_kv_cells & llama_snapkv::get_cells(llama_seq_id seq_id) const {
    return kv.get_cells(seq_id);
}

std::vector<std::pair<llama_pos, uint32_t>> llama_snapkv::get_order(llama_seq_id seq_id) const {
    const auto & order = get_cells(seq_id).seq_pos_get(seq_id);

    return { order.begin(), order.end() };
}

uint32_t llama_snapkv::get_n_tail(llama_seq_id seq_id, const std::vector<std::pair<llama_pos, uint32_t>> & order, uint32_t n_max) const {
    const llama_pos frontier = seqs[seq_id].frontier;

    uint32_t res = 0;
    while (res < n_max && res < order.size()) {
        const auto & cur = order[order.size() - 1 - res];
        if (cur.first <= frontier || cur.first != order.back().first - (llama_pos) res) {
            break;
        }
        if (res + 1 < order.size() && order[order.size() - 2 - res].first == cur.first) {
            break; // tokens of an image
        }
        res++;
    }

    return res;
}

uint32_t llama_snapkv::get_n_queries(llama_seq_id seq_id, const std::vector<std::pair<llama_pos, uint32_t>> & order, uint32_t n_max) const {
    const uint32_t n_tail = get_n_tail(seq_id, order, n_max);

    // every other position is a wrong row: generated tokens overwrite the ring, and a roll-back does not bring them back
    uint32_t res = 0;
    while (res < n_tail) {
        const llama_pos pos = order.back().first - (llama_pos) res;
        if (seqs[seq_id].ring[pos % n_ring] != pos) {
            break;
        }
        res++;
    }

    return res;
}

std::vector<llama_pos> llama_snapkv::get_positions(llama_seq_id seq_id, const std::vector<std::pair<llama_pos, uint32_t>> & order, uint32_t i, uint32_t ih) const {
    const auto & seq = seqs[seq_id];

    std::vector<llama_pos> res;

    size_t n_merged = 0;
    for (const auto & [pos, cell] : order) {
        res.push_back(pos + seq.n_shift);
        n_merged += pos <= seq.frontier;
    }

    if (n_merged > 0) {
        if (!seq.kept || seq.kept->at(0).size() != n_merged) {
            return {};
        }

        const auto & positions = seq.kept->at(get_i_head(i) + ih);

        std::copy(positions.begin(), positions.end(), res.begin());
    }

    return res;
}

std::vector<llama_pos> llama_snapkv::get_rotated(llama_seq_id seq_id, const std::vector<std::pair<llama_pos, uint32_t>> & order) const {
    const auto & seq = seqs[seq_id];

    const size_t n_merged = std::count_if(order.begin(), order.end(), [&](const auto & cur) { return cur.first <= seq.frontier; });
    if (n_merged > 0 && !seq.is_packed) {
        return {};
    }

    std::vector<llama_pos> res;
    for (size_t j = 0; j < order.size(); ++j) {
        res.push_back(j < n_merged ? seq.frontier + 1 - (llama_pos) (n_merged - j) : order[j].first);
    }

    return res;
}

bool llama_snapkv::can_rotate() const {
    const bool is_plain = kv.hparams.rope_type == LLAMA_ROPE_TYPE_NORM || kv.hparams.rope_type == LLAMA_ROPE_TYPE_NEOX;

    // MLA rotates the end of its rows only
    return is_plain && kv.hparams.n_lora_kv == 0 && !kv_idx;
}

bool llama_snapkv::has_rope(const tensor & t) const {
    return !t.info.is_v && kv.hparams.has_rope(t.info.il);
}

ggml_tensor * llama_snapkv::rotate(const llama_context & lctx, ggml_context * ctx, const tensor & t, ggml_tensor * rows, ggml_tensor * shift, ggml_tensor * hadamard) const {
    const auto & cparams = lctx.get_cparams();

    const uint32_t il = t.info.il;

    const float freq_base  = kv.model.get_rope_freq_base (cparams, il);
    const float freq_scale = kv.model.get_rope_freq_scale(cparams, il);

    // K has its magnitude already: what YaRN would multiply it with is cancelled
    const float attn_factor = cparams.yarn_ext_factor != 0.0f ? 1.0f/(1.0f + 0.1f*logf(1.0f/freq_scale)) : 1.0f;

    const auto multiply = [&](ggml_tensor * cur) {
        if (!hadamard) {
            return cur;
        }
        ggml_tensor * res = ggml_mul_mat(ctx, hadamard, ggml_reshape_2d(ctx, cur, hadamard->ne[0], ggml_nelements(cur)/hadamard->ne[0]));
        return ggml_reshape_2d(ctx, res, cur->ne[0], cur->ne[1]);
    };

    ggml_tensor * cur = multiply(rows);

    cur = ggml_reshape_3d(ctx, cur, cur->ne[0], 1, cur->ne[1]);
    cur = ggml_rope_ext(ctx, cur, shift, kv.model.get_rope_factors(cparams, il), kv.hparams.n_rot(il), kv.hparams.rope_type,
            cparams.n_ctx_orig_yarn, freq_base, freq_scale, cparams.yarn_ext_factor, attn_factor, cparams.yarn_beta_fast, cparams.yarn_beta_slow);
    cur = ggml_reshape_2d(ctx, cur, cur->ne[0], cur->ne[2]);

    return multiply(cur);
}

const std::vector<float> * llama_snapkv::get_hadamard() const {
    if (!kv.attn_rot_k) {
        return nullptr;
    }

    // as in llama_kv_cache::build_input_k_rot()
    int64_t n = 128;
    while (kv.n_embd_head_k_all % n == 0) {
        n *= 2;
    }

    return &kv.attn_rot_hadamard.at(n/2);
}

uint32_t llama_snapkv::get_i_head(uint32_t i) const {
    uint32_t res = 0;
    for (uint32_t j = 0; j < i; ++j) {
        res += layers[j].info.n_head_kv;
    }

    return res;
}

bool llama_snapkv::has_shared_cells(llama_seq_id seq_id) const {
    const auto & cells = get_cells(seq_id);

    for (const auto & [pos, cell] : cells.seq_pos_get(seq_id)) {
        if (cells.seq_count(cell) > 1) {
            return true;
        }
    }

    return false;
}

std::vector<uint32_t> llama_snapkv::get_lowest_cells(llama_seq_id seq_id, uint32_t n) const {
    const auto & cells = get_cells(seq_id);

    std::vector<uint32_t> res;
    for (uint32_t i = 0; i < cells.size() && res.size() < n; ++i) {
        if (cells.is_empty(i) || cells.seq_has(i, seq_id)) {
            res.push_back(i);
        }
    }

    return res;
}

ggml_tensor * llama_snapkv::get_tensor(const tensor & t, llama_seq_id seq_id) const {
    const auto & layer = t.kv->layers[t.ikv];

    return (t.info.is_v ? layer.v_stream : layer.k_stream)[t.kv->get_stream(seq_id)];
}

bool llama_snapkv::is_transposed(const tensor & t) const {
    return t.info.is_v && t.kv->v_trans;
}

uint32_t llama_snapkv::get_kv_size() const {
    return kv.get_size();
}

llama_pos llama_snapkv::set_compacted(
        llama_seq_id seq_id,
        const std::vector<std::pair<llama_pos, uint32_t>> & order,
        const std::vector<uint32_t> & dst,
        uint32_t n_tail,
        bool     is_packed,
        std::shared_ptr<const kept_positions> kept) {
    const size_t    n_src    = order.size();
    const size_t    n_dst    = dst.size();
    const llama_pos pos_max  = is_packed ? pos_packed + (llama_pos) n_dst - 1 : order.back().first;
    const llama_pos frontier = pos_max - (llama_pos) n_tail;

    const auto ring    = seqs[seq_id].ring;
    const auto n_shift = seqs[seq_id].n_shift + order.back().first - pos_max;

    for (llama_kv_cache * cur : { &kv, kv_idx }) {
        if (!cur) {
            continue;
        }

        auto & cells = cur->v_cells[cur->get_stream(seq_id)];

        // the last n_dst tokens' extra info, so that lookups of the tokens before the next one stay right
        std::vector<llama_kv_cell_ext> exts;
        for (size_t j = 0; j < n_dst; ++j) {
            exts.push_back(cells.ext_get(order[n_src - n_dst + j].second));
        }

        const bool ok = cur->seq_rm(seq_id, -1, -1);
        GGML_ASSERT(ok && "removing a whole sequence is always possible");

        for (size_t j = 0; j < n_dst; ++j) {
            const bool is_tail = j >= n_dst - n_tail;

            cells.pos_set(dst[j], is_tail ? pos_max - (llama_pos) (n_dst - 1 - j) : frontier);
            cells.ext_set(dst[j], exts[j]);
            cells.seq_add(dst[j], seq_id);
        }
    }

    auto & seq = seqs[seq_id];

    seq.frontier  = frontier;
    seq.pos_end   = pos_max + 1;
    seq.n_shift   = n_shift;
    seq.is_packed = is_packed;
    seq.kept      = std::move(kept);

    // the queries of packed cells are rotated to the positions that they had
    if (pos_max == order.back().first) {
        seq.ring = ring;
    }

    return pos_max;
}

llama_snapkv_status llama_snapkv::check_cache(const llama_kv_cache & kv) {
    if (kv.other) {
        return LLAMA_SNAPKV_STATUS_UNSUPPORTED_MEMORY;
    }

    const bool has_attn = std::any_of(kv.layers.begin(), kv.layers.end(), [&](const auto & layer) { return kv.hparams.n_head_kv(layer.il) > 0; });
    if (!has_attn || kv.swa_type != LLAMA_SWA_TYPE_NONE) {
        return LLAMA_SNAPKV_STATUS_UNSUPPORTED_SWA;
    }
    if (kv.hparams.use_alibi || kv.hparams.f_max_alibi_bias > 0.0f) {
        return LLAMA_SNAPKV_STATUS_UNSUPPORTED_ALIBI;
    }
    return LLAMA_SNAPKV_STATUS_OK;
}

void llama_snapkv::attach(llama_kv_cache & kv, std::shared_ptr<llama_snapkv> snapkv) {
    kv.snapkv = std::move(snapkv);
}
