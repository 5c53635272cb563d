// SnapKV (Li et al., 2024, arXiv:2404.14469) for llama.cpp: after the prompt, keep per layer and per KV head only the
// rows of the KV cache that the last prompt tokens attend to, and release the other cells.
//
// Typical use:
//
//   llama_snapkv_init   (ctx, params);          // once, on a fresh context
//   llama_decode        (ctx, prompt);          // as always, in batches of any size
//   llama_get_logits_ith(ctx, -1);              // the first generated token is exact
//   llama_snapkv_compact(ctx, 0, NULL, &stats); // the pass
//   llama_decode        (ctx, next token);      // as always, at the position after the prompt
//
// A prompt longer than the cells, or an answer:
//
//   llama_snapkv_prefill(ctx, 0, tokens, n_tokens, &prefill_params, &stats); // decodes, and makes room when the cells are full
//
// Words: a "cell" is one slot of the KV cache, shared by all layers. The "window" are the last n_window tokens of the
// sequence: their queries look. The "frontier" is the position that all kept cells before the window share after a pass.
// A "probe" are tokens that look in the place of the last ones, and are taken back: the question, while the text is read.

#pragma once

#include "llama.h"

// as many tokens can be removed right before a pass, such as rejected drafts: their window's queries are still there
#define LLAMA_SNAPKV_N_RING_SLACK 16

#ifdef __cplusplus
extern "C" {
#endif

    // how the scores of neighbouring cells are pooled before the selection
    enum llama_snapkv_pool {
        LLAMA_SNAPKV_POOL_AVG = 0, // sum over the kernel, zero padded, divided by n_kernel
        LLAMA_SNAPKV_POOL_MAX = 1,
    };

    // what the cells before the recent part are scored by; all but the first are there to compare with
    enum llama_snapkv_rule {
        LLAMA_SNAPKV_RULE_SNAPKV       = 0, // pooled attention of the window, per layer and KV head
        LLAMA_SNAPKV_RULE_SHARED       = 1, // the same, averaged over all layers and heads, which keep the same cells
        LLAMA_SNAPKV_RULE_FIRST_RECENT = 2, // the first 4 and the most recent cells (StreamingLLM, arXiv:2309.17453)
        LLAMA_SNAPKV_RULE_RANDOM       = 3, // pseudo-random, the same for the same cell, layer and KV head
        LLAMA_SNAPKV_RULE_H2O          = 4, // attention of all tokens (heavy hitters, arXiv:2306.14048), see llama_snapkv_observe()
        LLAMA_SNAPKV_RULE_COUNT,
    };

    // positions of the kept cells, for the next tokens and for the model's RoPE
    enum llama_snapkv_positions {
        LLAMA_SNAPKV_POSITIONS_TRUE   = 0, // of the tokens: nothing is rotated, the model's trained context limits a prompt
        LLAMA_SNAPKV_POSITIONS_PACKED = 1, // K is rotated to consecutive positions, so that a prompt may be of any length
    };

    // > 0: a success that did nothing, < 0: a refusal or a failure
    enum llama_snapkv_status {
        LLAMA_SNAPKV_STATUS_OK                     =   0, // enabled, or compacted
        LLAMA_SNAPKV_STATUS_WITHIN_BUDGET          =   1, // the sequence has no more cells than the budget, nothing was changed

        // refusals: nothing was changed
        LLAMA_SNAPKV_STATUS_INVALID_PARAMS         =  -1, // see llama_snapkv_params_check()
        LLAMA_SNAPKV_STATUS_NOT_ENABLED            =  -2, // llama_snapkv_init() was not called or was refused
        LLAMA_SNAPKV_STATUS_INVALID_SEQ            =  -3, // the sequence id is out of range for this context
        LLAMA_SNAPKV_STATUS_NO_QUERIES             =  -4, // the last token's query was not captured (restored or copied sequence): decode first
        LLAMA_SNAPKV_STATUS_SHARED_CELLS           =  -5, // some cells belong to more than one sequence
        LLAMA_SNAPKV_STATUS_UNSUPPORTED_RECURRENT  =  -6, // recurrent memory has no cells to release
        LLAMA_SNAPKV_STATUS_UNSUPPORTED_SWA        =  -7, // all attention is to a sliding window
        LLAMA_SNAPKV_STATUS_UNSUPPORTED_MEMORY     =  -8, // a cache that is read by blocks of positions or is compressed (DSV4, MSA, QSA), or that of another context
        LLAMA_SNAPKV_STATUS_UNSUPPORTED_ENCODER    =  -9, // no KV cache, an encoder, or non-causal attention
        LLAMA_SNAPKV_STATUS_UNSUPPORTED_EMBEDDINGS = -10, // the context was created for embeddings
        LLAMA_SNAPKV_STATUS_UNSUPPORTED_ALIBI      = -11, // ALiBi scores depend on the distances that the pass gives up
        LLAMA_SNAPKV_STATUS_UNSUPPORTED_BIAS       = -12, // the model adds a bias to the attention logits
        LLAMA_SNAPKV_STATUS_UNSUPPORTED_QUERIES    = -13, // a layer reads its cache in a way that shows no queries
        LLAMA_SNAPKV_STATUS_NOT_EMPTY              = -14, // llama_snapkv_init() on a context that already holds tokens
        LLAMA_SNAPKV_STATUS_NOT_OBSERVED           = -15, // rule h2o: the attention of some tokens was not added up, see llama_snapkv_observe()
        LLAMA_SNAPKV_STATUS_UNSUPPORTED_POSITIONS  = -16, // packed positions: the model has no RoPE, or one that is not rotated by one number (M-RoPE, MLA)
        LLAMA_SNAPKV_STATUS_NOT_PACKED             = -17, // packed positions: the restored sequence was compacted without them
        LLAMA_SNAPKV_STATUS_NO_ROOM                = -18, // the cells do not hold the budget, the probe and one more token
        LLAMA_SNAPKV_STATUS_BEYOND_CONTEXT         = -24, // the prompt goes beyond the model's context, see llama_snapkv_n_pos_max()

        // failures
        LLAMA_SNAPKV_STATUS_FAILED_RESERVE         = -19, // llama_snapkv_init() ran out of memory
        LLAMA_SNAPKV_STATUS_ABORTED                = -20, // the abort callback stopped the scores, nothing was changed
        LLAMA_SNAPKV_STATUS_FAILED_COMPUTE         = -21, // the scores could not be computed, nothing was changed
        LLAMA_SNAPKV_STATUS_SEQUENCE_LOST          = -22, // failed in the middle of the moves or of a prefill, the sequence was removed: decode it again
        LLAMA_SNAPKV_STATUS_CANCELLED              = -23, // a callback stopped the prefill, the sequence was removed
    };

    struct llama_snapkv_params {
        uint32_t n_budget; // cells that a sequence keeps, recent part included, n_recent < n_budget
        uint32_t n_window; // last tokens whose queries score the others, > 0
        uint32_t n_recent; // last cells that are kept in any case, 0: n_window, else n_window <= n_recent
        uint32_t n_kernel; // pooling width, odd

        enum llama_snapkv_pool      pool;
        enum llama_snapkv_rule      rule;
        enum llama_snapkv_positions positions; // the same in all calls
    };

    struct llama_snapkv_stats {
        uint32_t n_cells_before;
        uint32_t n_cells_after;
        uint32_t n_window;      // window really used, smaller than asked for if queries of its first tokens are gone
        uint32_t n_recent;      // last cells kept in any case
        uint64_t n_bytes_freed; // bytes of the released cells, in the compacted layers
        uint64_t n_bytes_grown; // growth of the scheduler's compute buffers by the pass

        int64_t t_score_us;
        int64_t t_select_us;
        int64_t t_move_us;
        int64_t t_total_us;
    };

    // a layer that the pass compacts: per KV head, one selection of cells for all of its tensors
    // nearly always K and V of one layer, with the queries of that layer
    struct llama_snapkv_layer {
        int32_t il;       // layer index in the model, of the first tensor
        int32_t n_head;   // query heads of all readers
        int32_t n_head_kv;
        int32_t n_tensor;
        int32_t n_reader; // layers whose queries read it, > 1: layers that share K and V, or that share an indexer
    };

    // rows of the cache that move together: K, V unless it is a part of K (MLA), keys of the layer's indexer (DSA)
    struct llama_snapkv_tensor {
        int32_t il;
        int32_t n_embd_head;
        bool    is_v;

        enum ggml_type type;
    };

    // a layer's queries, and what the model makes of their products with K: kq_scale*cap(cap_scale*kq)
    struct llama_snapkv_reader {
        int32_t il;
        int32_t n_head;
        int32_t i_tensor; // what its queries multiply
        float   kq_scale;
        float   cap_scale;
        float   softcap;  // c in cap(x) = c*tanh(x/c), 0: cap(x) = x and cap_scale = 1
        bool    has_sinks;
    };

    // the recommended setting, see docs/presets.md
    LLAMA_API struct llama_snapkv_params llama_snapkv_default_params(void);

    // the setting of the paper: window 32, kernel 5, average
    LLAMA_API struct llama_snapkv_params llama_snapkv_paper_params(void);

    // NULL if the parameters are valid, else a sentence that says which is wrong, in static memory
    LLAMA_API const char * llama_snapkv_params_check(struct llama_snapkv_params params);

    // snapkv, shared, first-recent, random, h2o; NULL if there is no such rule
    LLAMA_API const char * llama_snapkv_rule_name(enum llama_snapkv_rule rule);

    LLAMA_API const char * llama_snapkv_status_str(enum llama_snapkv_status status);

    // whether sequences of this context can be compacted at all
    LLAMA_API enum llama_snapkv_status llama_snapkv_supported(const struct llama_context * ctx);

    // start to capture queries, allocates the query ring in the memory of each layer's device
    // the context must hold no tokens; can be called again on an emptied context to change the parameters
    // if it is refused, the context is as without it
    // from then on llama_memory_can_shift() is false
    LLAMA_API enum llama_snapkv_status llama_snapkv_init(struct llama_context * ctx, struct llama_snapkv_params params);

    // the pass, at any time, on any one sequence
    // params: NULL for those of llama_snapkv_init(), n_window must not exceed the one given there
    // stats:  can be NULL
    LLAMA_API enum llama_snapkv_status llama_snapkv_compact(
                 struct llama_context       * ctx,
                       llama_seq_id           seq_id,
            const struct llama_snapkv_params * params,
                  struct llama_snapkv_stats * stats);

    // the pass for a sequence that is still being read, down to the budget, by the queries of a probe
    // decodes the probe after the sequence, in cells that must be free, runs the pass, and takes the probe back; the last
    // n_recent cells before the probe are kept in any case, at most 1/8 of the budget
    // n_probe = 0, or a rule that needs no queries: no probe, the sequence's last tokens look
    // tokens: read for good before the probe, in the same batch if they can be, which costs less; only with a probe, and if
    // there is room for both; n_tokens = 0: none
    // params, stats: as in llama_snapkv_compact(), the budget without the probe; the logits of the last decode are lost
    LLAMA_API enum llama_snapkv_status llama_snapkv_make_room(
                 struct llama_context       * ctx,
                       llama_seq_id           seq_id,
            const      llama_token          * tokens,
                       uint32_t               n_tokens,
            const      llama_token          * probe,
                       uint32_t               n_probe,
            const struct llama_snapkv_params * params,
                  struct llama_snapkv_stats * stats);

    // called after each batch, with the tokens done and the tokens to do; false stops the prefill
    typedef bool (*llama_snapkv_progress)(uint32_t n_done, uint32_t n_tokens, void * user_data);

    struct llama_snapkv_prefill_params {
        const struct llama_snapkv_params * params; // of the passes, NULL for those of llama_snapkv_init()

        uint32_t n_cells; // that the sequence may take, 0: what the cache has
        uint32_t n_chunk; // tokens that are read at a time: a pass comes when the cells have no room for as many
                          // with less room than that beside the budget and the probe, all of the room is read at a time

        const llama_token * probe; // NULL: the last n_probe tokens of the prompt
        uint32_t n_probe;          // 0: none, what was read last looks

        bool logits_all; // of all tokens of a batch, to be read in the callback, else of the last token of the prompt

        llama_snapkv_progress progress; // can be NULL
        void * progress_user_data;
    };

    struct llama_snapkv_prefill_stats {
        uint32_t n_tokens;
        uint32_t n_passes;
        uint32_t n_evicted; // cells released by the passes
        uint32_t n_cells;   // in use at the end

        int64_t t_decode_us; // of the prompt, all but the next two
        int64_t t_probe_us;  // by their number, of the batches that hold tokens of the prompt, too
        int64_t t_pass_us;
        int64_t t_total_us;
    };

    // chunk 1024, probe 32 tokens
    LLAMA_API struct llama_snapkv_prefill_params llama_snapkv_prefill_default_params(void);

    // decode the tokens after what the sequence holds, and make room whenever the next ones would not fit
    // a prompt that fits is decoded as llama_decode() would in batches of n_batch, with the same logits bit for bit
    // does not run the pass at the end
    // after a refusal nothing is changed; after any other failure, and if it is stopped, the sequence is removed
    LLAMA_API enum llama_snapkv_status llama_snapkv_prefill(
                 struct llama_context               * ctx,
                       llama_seq_id                   seq_id,
            const      llama_token                  * tokens,
                       uint32_t                       n_tokens,
            const struct llama_snapkv_prefill_params * params,
                  struct llama_snapkv_prefill_stats * stats);

    // tokens that can be decoded now without a pass: free cells, at most n_cells (0: what the cache has) less those in use
    LLAMA_API int32_t llama_snapkv_n_room(const struct llama_context * ctx, llama_seq_id seq_id, uint32_t n_cells);

    // tokens that a sequence may have: with packed positions any number, else as many as the model was trained for, more if
    // the context scales RoPE
    LLAMA_API int32_t llama_snapkv_n_pos_max(const struct llama_context * ctx);

    // for rule h2o, which must be that of llama_snapkv_init(): add up the attention of the tokens since the last call, all
    // layers; the query ring then takes n_ubatch tokens, and no more may be decoded between two calls
    // the pass does the same for the last tokens; what is removed from the sequence, or restored, is forgotten with all sums
    LLAMA_API enum llama_snapkv_status llama_snapkv_observe(struct llama_context * ctx, llama_seq_id seq_id);

    // these sums, mean of the query heads of each KV head, F64 [KV heads of all layers, cells observed], returns the number of
    // elements; out can be NULL; a state does not hold them: set gives them back to a sequence with at least as many cells
    LLAMA_API int64_t llama_snapkv_get_observed(const struct llama_context * ctx, llama_seq_id seq_id, double * out, size_t n_max);
    LLAMA_API bool    llama_snapkv_set_observed(      struct llama_context * ctx, llama_seq_id seq_id, const double * in, size_t n);

    // cells of the sequence in the compacted cache
    LLAMA_API int32_t llama_snapkv_n_cells(const struct llama_context * ctx, llama_seq_id seq_id);

    // tokens that the sequence has read: with packed positions more than llama_memory_seq_pos_max() + 1
    // of a restored packed sequence the difference is lost
    LLAMA_API int32_t llama_snapkv_n_tokens(const struct llama_context * ctx, llama_seq_id seq_id);

    // the position that the kept cells before the window share, -1 if the sequence is whole or SnapKV is not enabled
    // positions at or below it cannot be removed without removing the whole sequence
    LLAMA_API llama_pos llama_snapkv_frontier(const struct llama_context * ctx, llama_seq_id seq_id);

    // the position after the prompt that the sequence was compacted for, 0 if the sequence is whole
    // what was kept was chosen by the last tokens of that prompt: a prompt that differs from it before this position should
    // be decoded from its beginning, also where it differs after the frontier; restored state: at most this position
    LLAMA_API llama_pos llama_snapkv_pos_end(const struct llama_context * ctx, llama_seq_id seq_id);

    // llama_memory_seq_pos_min() as if the sequence had not been compacted: what sliding-window layers still hold, else 0
    LLAMA_API llama_pos llama_snapkv_pos_min(const struct llama_context * ctx, llama_seq_id seq_id);

    // whether llama_memory_seq_rm() would remove [p0, p1), for callers that cannot go on when it refuses
    LLAMA_API bool llama_snapkv_can_seq_rm(const struct llama_context * ctx, llama_seq_id seq_id, llama_pos p0, llama_pos p1);

    // bytes of the query ring
    LLAMA_API size_t llama_snapkv_ring_size(const struct llama_context * ctx);

    //
    // inspection (tests, kept-token maps)
    // cells are always given in the order of (position, cell index)
    // functions that fill a buffer return the number of elements, -1 if it is too small or the arguments are wrong
    //

    LLAMA_API int32_t llama_snapkv_n_layer   (const struct llama_context * ctx);
    LLAMA_API bool    llama_snapkv_get_layer (const struct llama_context * ctx, int32_t i, struct llama_snapkv_layer * out);
    LLAMA_API bool    llama_snapkv_get_tensor(const struct llama_context * ctx, int32_t i, int32_t it, struct llama_snapkv_tensor * out);
    LLAMA_API bool    llama_snapkv_get_reader(const struct llama_context * ctx, int32_t i, int32_t ir, struct llama_snapkv_reader * out);

    // position and cell index of each cell of the sequence
    LLAMA_API int32_t llama_snapkv_get_cells(const struct llama_context * ctx, llama_seq_id seq_id, llama_pos * pos, int32_t * cell, int32_t n_max);

    // original positions of the cells' rows in layer i (index as in llama_snapkv_get_layer) and KV head ih
    // 0 if they are not known (restored state)
    LLAMA_API int32_t llama_snapkv_get_kept(const struct llama_context * ctx, llama_seq_id seq_id, int32_t i, int32_t ih, llama_pos * out, int32_t n_max);

    // the captured queries of the last tokens as reader ir multiplies them with the cached K, F32 [n_rows, n_head, n_embd_head]
    // returns the number of rows, at most n_window, less if older ones are gone; out can be NULL
    LLAMA_API int32_t llama_snapkv_get_queries(struct llama_context * ctx, llama_seq_id seq_id, int32_t i, int32_t ir, float * out, size_t n_max);

    // attention sinks of reader ir, F32 [n_head]; 0 if it has none
    LLAMA_API int32_t llama_snapkv_get_sinks(struct llama_context * ctx, int32_t i, int32_t ir, float * out, int32_t n_max);

    // attention to each cell, summed over the rows of the window, as computed by the pass, F32 [n_head, n_cells]
    // the heads in the order of (KV head, reader, head of the reader)
    LLAMA_API int64_t llama_snapkv_get_scores(struct llama_context * ctx, llama_seq_id seq_id, int32_t i, uint32_t n_window, float * out, size_t n_max);

    // rows of a tensor as stored, [n_cells, n_head_kv, bytes per head], also for the transposed V; returns bytes
    LLAMA_API int64_t llama_snapkv_get_rows_raw(struct llama_context * ctx, llama_seq_id seq_id, int32_t i, int32_t it, uint8_t * out, size_t n_max);

    // the same, converted to F32 [n_cells, n_head_kv, n_embd_head]; returns elements
    LLAMA_API int64_t llama_snapkv_get_rows_f32(struct llama_context * ctx, llama_seq_id seq_id, int32_t i, int32_t it, float * out, size_t n_max);

    // positions that the sequence's rows of K are rotated to, in the order of the cells; 0 if they are not known: packed
    // positions only, of which each KV head's rows have the same
    LLAMA_API int32_t llama_snapkv_get_rotated(const struct llama_context * ctx, llama_seq_id seq_id, llama_pos * out, int32_t n_max);

    // name and version of this interface, and the mark of its patches in llama.cpp's sources
    LLAMA_API const char * llama_snapkv_build_info(void);

#ifdef __cplusplus
}
#endif
