#pragma once

// what llama.cpp's patched sources see of SnapKV: one object per KV cache, null unless llama_snapkv_init() was called

#include "llama-snapkv.h"

#include "ggml-cpp.h"

#include <algorithm>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

struct llm_graph_context;
struct llama_ubatch;

struct llama_context;

class llama_kv_cache;
class llama_kv_cells;
class llama_memory_recurrent;
struct llama_memory_i;

struct llama_snapkv {
    // rows that move together with those of the layer's other tensors
    struct tensor {
        llama_snapkv_tensor info;

        const llama_kv_cache * kv;
        uint32_t ikv; // index in its layers
    };

    // a layer of the model whose queries score the rows
    struct reader {
        llama_snapkv_reader info;

        // query ring, in the buffer type of the K that it reads, as rows of all heads
        // the row of position p of sequence s is s*n_ring + p % n_ring, the last row takes what is not kept
        ggml_tensor * q = nullptr; // F32 [n_embd_head*n_head, n_ring*n_seq_max + 1]

        ggml_tensor * sinks = nullptr; // F32 [n_head], a weight of the model

        // set when a graph is built, see on_attn()
        bool captured = false;
        bool has_bias = false;
    };

    struct layer {
        llama_snapkv_layer info;

        std::vector<tensor> tensors;
        std::vector<reader> readers;
    };

    // original positions of the rows in the cells at the frontier, by [layer*n_head_kv + head][cell in order]
    using kept_positions = std::vector<std::vector<llama_pos>>;

    struct sequence {
        llama_pos frontier = -1;
        llama_pos pos_end  =  0; // after the prompt that it was compacted for, with a frontier

        // how far the cells' positions are behind those of the tokens, and whether the rows up to the frontier are rotated to
        // the consecutive positions that end there
        llama_pos n_shift   = 0;
        bool      is_packed = false;

        std::vector<llama_pos> ring; // position whose query is in the row, -1: none

        std::shared_ptr<const kept_positions> kept; // null: not known

        // attention of all tokens up to pos_observed to each cell, by [layer*n_head_kv + head][cell in order]
        std::vector<std::vector<double>> observed;
        llama_pos pos_observed = 0;

        uint32_t n_observed() const { return observed.empty() ? 0 : observed[0].size(); }

        void forget_observed() {
            observed.clear();
            pos_observed = 0;
        }

        void set_whole() {
            frontier  = -1;
            n_shift   = 0;
            is_packed = false;
            kept.reset();
        }
    };

    // kv_idx: cache of the indexer's keys, whose cells are those of kv, null: none
    // n_queries: tokens whose queries the ring takes
    // n_swa: sliding window of the model's other layers, 0: none
    // allocates the ring, throws std::bad_alloc
    llama_snapkv(llama_kv_cache & kv, llama_kv_cache * kv_idx, llama_snapkv_params params, uint32_t n_queries, uint32_t n_seq_max, uint32_t n_swa);

    // parts of a context's memory, null if it has none such
    struct caches {
        llama_kv_cache         * kv   = nullptr; // whose cells are compacted
        llama_kv_cache         * idx  = nullptr;
        llama_kv_cache         * swa  = nullptr; // sliding-window layers
        llama_memory_recurrent * recr = nullptr;
    };

    static caches get_caches(llama_memory_i * memory);

    // null unless llama_snapkv_init() was called
    static llama_snapkv * of(llama_memory_i * memory);

    //
    // hooks
    //

    // called for each attention that reads this cache, q: F32 [n_embd_head_k, n_head, n_tokens] as it multiplies the cached K
    void on_attn(const llm_graph_context & g, ggml_tensor * q, ggml_tensor * kq_b, ggml_tensor * sinks, float kq_scale, int il);

    // false if [p0, p1) reaches into the compacted cells of a sequence without removing all of it
    // seq_id < 0: any sequence
    bool can_seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) const;

    // smallest position of which the compacted cells leave something to go on from
    llama_pos seq_pos_min(llama_seq_id seq_id) const;

    // as can_seq_rm(), and forgets what is removed if it is true
    bool on_seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1);

    void on_clear();
    void on_seq_cp(llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1); // before the copy
    void on_seq_keep(llama_seq_id seq_id);
    void on_state_read(llama_seq_id seq_id); // after it
    void on_refused(const char * what) const;

    //
    // capture
    //

    // number of queries of a ubatch that are copied: as many as the ring can take
    uint32_t n_copies(uint32_t n_tokens) const { return std::min<size_t>(n_tokens, n_ring*seqs.size()); }

    // which tokens of the ubatch are copied to which rows of the ring, [n_copies], and remembers the positions of the rows
    void ring_copies(const llama_ubatch & ubatch, int32_t * tokens, int64_t * rows);

    uint32_t ring_row(llama_seq_id seq_id, llama_pos pos) const { return seq_id*n_ring + pos % n_ring; }

    size_t ring_size() const;

    //
    // the cache
    //

    bool has_seq(llama_seq_id seq_id) const { return seq_id >= 0 && (size_t) seq_id < seqs.size(); }

    const llama_kv_cells & get_cells(llama_seq_id seq_id) const;

    // cells of the sequence in the order of (position, cell index)
    std::vector<std::pair<llama_pos, uint32_t>> get_order(llama_seq_id seq_id) const;

    // number of cells at the end of the order that have consecutive positions of their own, at most n_max
    uint32_t get_n_tail(llama_seq_id seq_id, const std::vector<std::pair<llama_pos, uint32_t>> & order, uint32_t n_max) const;

    // number of the last tokens whose queries are in the ring, at most n_max
    uint32_t get_n_queries(llama_seq_id seq_id, const std::vector<std::pair<llama_pos, uint32_t>> & order, uint32_t n_max) const;

    // original positions of the sequence's rows in (layer i, KV head ih), empty if not known
    std::vector<llama_pos> get_positions(llama_seq_id seq_id, const std::vector<std::pair<llama_pos, uint32_t>> & order, uint32_t i, uint32_t ih) const;

    // positions that the sequence's K rows are rotated to, empty if not known: compacted without packing
    std::vector<llama_pos> get_rotated(llama_seq_id seq_id, const std::vector<std::pair<llama_pos, uint32_t>> & order) const;

    // whether rows of K can be rotated to other positions
    bool can_rotate() const;

    // whether those of this tensor must be
    bool has_rope(const tensor & t) const;

    // F32 rows of the tensor, [n_embd_head, n], rotated further by I32 [n] positions
    // hadamard: see get_hadamard(), null if there is none
    ggml_tensor * rotate(const llama_context & lctx, ggml_context * ctx, const tensor & t, ggml_tensor * rows, ggml_tensor * shift, ggml_tensor * hadamard) const;

    // the matrix, its own inverse, that a quantized K is multiplied with after RoPE, [n, n], null if it is not
    const std::vector<float> * get_hadamard() const;

    // index of (layer i, KV head 0) among all layers' KV heads; i = layers.size(): their number
    uint32_t get_i_head(uint32_t i) const;

    bool has_shared_cells(llama_seq_id seq_id) const;

    // the n lowest cells that are the sequence's or free, so that those above leave the attention range
    std::vector<uint32_t> get_lowest_cells(llama_seq_id seq_id, uint32_t n) const;

    // the rows of the sequence's stream, [n_embd_gqa, kv_size] as the cache declares them
    ggml_tensor * get_tensor(const tensor & t, llama_seq_id seq_id) const;
    bool     is_transposed(const tensor & t) const;
    uint32_t get_kv_size() const;

    // the sequence's rows were moved into the cells dst (ascending; its own or free ones), kept: see kept_positions
    // n_tail: last cells that have a position of their own, is_packed: consecutive positions from pos_packed on
    // returns the new position of the last cell
    llama_pos set_compacted(
            llama_seq_id seq_id,
            const std::vector<std::pair<llama_pos, uint32_t>> & order,
            const std::vector<uint32_t> & dst,
            uint32_t n_tail,
            bool     is_packed,
            std::shared_ptr<const kept_positions> kept);

    // LLAMA_SNAPKV_STATUS_OK if this class of cache can be compacted
    static llama_snapkv_status check_cache(const llama_kv_cache & kv);

    static void attach(llama_kv_cache & kv, std::shared_ptr<llama_snapkv> snapkv);

    llama_kv_cache & kv;
    llama_kv_cache * kv_idx; // can be null

    const llama_snapkv_params params;

    // first packed position: leaves room for those that sliding-window layers still hold before the kept ones
    const llama_pos pos_packed;

    // raised by whatever resets the scheduler: graphs that were built before are not used again
    uint32_t generation = 0;

    const uint32_t n_ring; // rows per sequence

    std::vector<layer> layers;
    std::vector<sequence> seqs; // by sequence id

    std::unordered_map<int32_t, std::pair<uint32_t, uint32_t>> il_to_reader; // index of the layer, of its reader

    std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> ctxs_bufs;
};
