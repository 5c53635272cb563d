// random operations on a context with SnapKV, on a seeded tiny model that the test writes itself
// for the sanitizers; the values are checked in tests/tiny

#include "llama-snapkv.h"

#include "gguf.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#define CHECK(cond) do { if (!(cond)) { fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #cond); exit(1); } } while (0)

static const uint32_t N_VOCAB   = 64;
static const uint32_t N_LAYER   = 2;
static const uint32_t N_HEAD    = 4;
static const uint32_t N_HEAD_KV = 2;
static const uint32_t N_EMBD    = 4*32;
static const uint32_t N_FF      = 64;

static void write_model(const char * path) {
    gguf_context * gguf = gguf_init_empty();

    gguf_set_val_str(gguf, "general.architecture", "llama");
    gguf_set_val_u32(gguf, "llama.context_length", 4096);
    gguf_set_val_u32(gguf, "llama.embedding_length", N_EMBD);
    gguf_set_val_u32(gguf, "llama.block_count", N_LAYER);
    gguf_set_val_u32(gguf, "llama.feed_forward_length", N_FF);
    gguf_set_val_u32(gguf, "llama.attention.head_count", N_HEAD);
    gguf_set_val_u32(gguf, "llama.attention.head_count_kv", N_HEAD_KV);
    gguf_set_val_f32(gguf, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    gguf_set_val_u32(gguf, "llama.vocab_size", N_VOCAB);
    gguf_set_val_str(gguf, "tokenizer.ggml.model", "no_vocab");

    ggml_context * ctx = ggml_init({ /*.mem_size =*/ 16u*1024*1024, /*.mem_buffer =*/ nullptr, /*.no_alloc =*/ false });

    std::mt19937 rng(0);
    std::normal_distribution<float> normal(0.0f, 0.3f);

    const auto add = [&](const std::string & name, int64_t ne0, int64_t ne1) {
        ggml_tensor * t = ne1 > 0 ? ggml_new_tensor_2d(ctx, GGML_TYPE_F32, ne0, ne1) : ggml_new_tensor_1d(ctx, GGML_TYPE_F32, ne0);
        ggml_set_name(t, name.c_str());
        for (int64_t i = 0; i < ggml_nelements(t); ++i) {
            ((float *) t->data)[i] = ne1 > 0 ? normal(rng) : 1.0f;
        }
        gguf_add_tensor(gguf, t);
    };

    const uint32_t n_embd_kv = N_EMBD/N_HEAD*N_HEAD_KV;

    add("token_embd.weight",  N_EMBD, N_VOCAB);
    add("output_norm.weight", N_EMBD, 0);
    add("output.weight",      N_EMBD, N_VOCAB);
    for (uint32_t il = 0; il < N_LAYER; ++il) {
        const std::string blk = "blk." + std::to_string(il) + ".";

        add(blk + "attn_norm.weight",   N_EMBD, 0);
        add(blk + "attn_q.weight",      N_EMBD, N_EMBD);
        add(blk + "attn_k.weight",      N_EMBD, n_embd_kv);
        add(blk + "attn_v.weight",      N_EMBD, n_embd_kv);
        add(blk + "attn_output.weight", N_EMBD, N_EMBD);
        add(blk + "ffn_norm.weight",    N_EMBD, 0);
        add(blk + "ffn_gate.weight",    N_EMBD, N_FF);
        add(blk + "ffn_up.weight",      N_EMBD, N_FF);
        add(blk + "ffn_down.weight",    N_FF, N_EMBD);
    }

    CHECK(gguf_write_to_file(gguf, path, false));

    gguf_free(gguf);
    ggml_free(ctx);
}

struct abort_state {
    int n_calls = 0;
    int n_max   = 0;
};

static bool abort_after(void * data) {
    auto * state = (abort_state *) data;
    return state->n_calls++ >= state->n_max;
}

// rows of all layers and heads of a sequence, with the positions that they were computed for
static std::vector<std::vector<uint8_t>> read_rows(llama_context * ctx, llama_seq_id seq_id, int32_t i, int32_t it, int32_t ih) {
    std::vector<uint8_t> data(4u*1024*1024);

    const int64_t n_bytes = llama_snapkv_get_rows_raw(ctx, seq_id, i, it, data.data(), data.size());
    CHECK(n_bytes >= 0);

    const int32_t n_cells = llama_snapkv_n_cells(ctx, seq_id);
    const size_t  n_row   = n_bytes/std::max(1, n_cells)/N_HEAD_KV;

    std::vector<std::vector<uint8_t>> res;
    for (int32_t j = 0; j < n_cells; ++j) {
        const uint8_t * row = data.data() + (j*N_HEAD_KV + ih)*n_row;
        res.emplace_back(row, row + n_row);
    }
    return res;
}

struct progress_state {
    uint32_t n_done = 0;
    uint32_t n_max  = 0;
};

static bool stop_after(uint32_t n_done, uint32_t n_tokens, void * data) {
    auto * state = (progress_state *) data;
    CHECK(n_done > state->n_done && n_done <= n_tokens);
    state->n_done = n_done;
    return n_done < state->n_max;
}

static void run(llama_model * model, bool unified, bool flash_attn, ggml_type type_kv, llama_snapkv_positions positions, uint32_t seed) {
    const uint32_t n_seq = 3;

    auto cparams = llama_context_default_params();

    cparams.n_ctx           = unified ? 256 : 256*n_seq;
    cparams.n_batch         = 64;
    cparams.n_ubatch        = 24;
    cparams.n_seq_max       = n_seq;
    cparams.n_threads       = 1; // a barrier costs more than a layer
    cparams.n_threads_batch = unified && flash_attn && type_kv == GGML_TYPE_F16 ? 2 : 1;
    cparams.kv_unified      = unified;
    cparams.flash_attn_type = flash_attn ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    cparams.type_k          = type_kv;
    cparams.type_v          = flash_attn ? type_kv : GGML_TYPE_F16;

    llama_context * ctx = llama_init_from_model(model, cparams);
    CHECK(ctx);

    const bool is_packed = positions == LLAMA_SNAPKV_POSITIONS_PACKED;

    CHECK(llama_snapkv_init(ctx, { 64, 8, 0, 5, LLAMA_SNAPKV_POOL_MAX, LLAMA_SNAPKV_RULE_SNAPKV, positions }) == LLAMA_SNAPKV_STATUS_OK);

    llama_memory_t mem = llama_get_memory(ctx);

    std::mt19937 rng(seed);
    const auto uniform = [&](int lo, int hi) { return std::uniform_int_distribution<int>(lo, hi)(rng); };

    llama_batch batch = llama_batch_init(64, 0, 1);

    std::vector<uint8_t> state;

    int n_compacted = 0;
    int n_room_made = 0;
    int n_stopped   = 0;

    for (int it = 0; it < 600; ++it) {
        const llama_seq_id seq_id = uniform(0, n_seq - 1);
        const llama_pos    pos    = llama_memory_seq_pos_max(mem, seq_id) + 1;

        switch (uniform(0, 11)) {
            case 0: case 1: case 2: // a prompt or a token, sometimes aborted
                {
                    batch.n_tokens = uniform(0, 1) ? 1 : uniform(1, 64);
                    for (int i = 0; i < batch.n_tokens; ++i) {
                        batch.token   [i]    = uniform(0, N_VOCAB - 1);
                        batch.pos     [i]    = pos + i;
                        batch.n_seq_id[i]    = 1;
                        batch.seq_id  [i][0] = seq_id;
                        batch.logits  [i]    = i == batch.n_tokens - 1;
                    }

                    abort_state abort;
                    abort.n_max = uniform(0, 3) ? 1 << 30 : uniform(0, 50);
                    llama_set_abort_callback(ctx, abort_after, &abort);

                    if (llama_decode(ctx, batch) == 0) {
                        const float * logits = llama_get_logits_ith(ctx, -1);
                        CHECK(std::all_of(logits, logits + N_VOCAB, [](float x) { return std::isfinite(x); }));
                    }

                    llama_set_abort_callback(ctx, nullptr, nullptr);
                } break;
            case 3: case 4: case 5: // a pass: the rows are those of the positions that it says
                {
                    llama_snapkv_params params = {
                        (uint32_t) uniform(10, 100), 8, 0, (uint32_t) uniform(0, 10)*2 + 1, uniform(0, 1) ? LLAMA_SNAPKV_POOL_AVG : LLAMA_SNAPKV_POOL_MAX,
                        LLAMA_SNAPKV_RULE_SNAPKV, positions,
                    };
                    if (params.n_budget > 20 && uniform(0, 1)) {
                        params.n_recent = params.n_budget/2;
                    }

                    const int32_t n_before = llama_snapkv_n_cells(ctx, seq_id);

                    std::vector<llama_pos> old_pos(n_before);
                    const bool is_known = n_before == 0 || llama_snapkv_get_kept(ctx, seq_id, 1, 1, old_pos.data(), n_before) == n_before;

                    const int32_t it_row   = is_packed ? 1 : it % 2; // packed keys are rotated
                    const auto    old_rows = read_rows(ctx, seq_id, 1, it_row, 1);

                    llama_snapkv_stats stats;
                    const auto status = llama_snapkv_compact(ctx, seq_id, &params, &stats);

                    if (status == LLAMA_SNAPKV_STATUS_OK) {
                        CHECK(llama_snapkv_n_cells(ctx, seq_id) == (int32_t) params.n_budget);
                        CHECK(stats.n_bytes_grown < 64u*1024*1024);

                        std::vector<llama_pos> pos_now(params.n_budget);
                        if (is_known) {
                            CHECK(llama_snapkv_get_kept(ctx, seq_id, 1, 1, pos_now.data(), params.n_budget) == (int32_t) params.n_budget);
                            const auto rows = read_rows(ctx, seq_id, 1, it_row, 1);
                            for (uint32_t j = 0; j < params.n_budget; ++j) {
                                const size_t src = std::find(old_pos.begin(), old_pos.end(), pos_now[j]) - old_pos.begin();
                                CHECK(src < old_rows.size() && rows[j] == old_rows[src]);
                            }
                        }
                        n_compacted++;
                    } else {
                        CHECK(status == LLAMA_SNAPKV_STATUS_WITHIN_BUDGET || status == LLAMA_SNAPKV_STATUS_NO_QUERIES || status == LLAMA_SNAPKV_STATUS_SHARED_CELLS ||
                            (is_packed && status == LLAMA_SNAPKV_STATUS_NOT_PACKED));
                        CHECK(llama_snapkv_n_cells(ctx, seq_id) == n_before);
                    }
                } break;
            case 6: // removals, possible or not
                {
                    const llama_pos frontier = llama_snapkv_frontier(ctx, seq_id);
                    const llama_pos p0 = uniform(-1, std::max(0, pos));
                    const llama_pos p1 = uniform(0, 1) ? -1 : p0 + uniform(1, 20);
                    const bool whole = p0 <= 0 && (p1 < 0 || p1 >= pos);
                    CHECK(llama_memory_seq_rm(mem, seq_id, p0, p1) == (frontier < 0 || whole || p0 > frontier));
                } break;
            case 7: // copies
                {
                    const llama_seq_id other = (seq_id + 1) % n_seq;
                    llama_memory_seq_rm(mem, other, -1, -1);
                    llama_memory_seq_cp(mem, seq_id, other, -1, -1);
                    CHECK(llama_snapkv_frontier(ctx, other) == llama_snapkv_frontier(ctx, seq_id));
                } break;
            case 8: // save and restore
                {
                    if (uniform(0, 1) || state.empty()) {
                        state.resize(llama_state_seq_get_size(ctx, seq_id));
                        CHECK(llama_state_seq_get_data(ctx, state.data(), state.size(), seq_id) == state.size());
                    } else {
                        llama_state_seq_set_data(ctx, state.data(), state.size(), seq_id);
                    }
                } break;
            case 9: case 10: // a prompt of any length, sometimes stopped or aborted
                {
                    std::vector<llama_token> tokens(uniform(0, 400));
                    for (auto & token : tokens) {
                        token = uniform(0, N_VOCAB - 1);
                    }

                    const llama_snapkv_params params = { (uint32_t) uniform(20, 80), 8, (uint32_t) uniform(0, 1)*10, 5, LLAMA_SNAPKV_POOL_MAX, LLAMA_SNAPKV_RULE_SNAPKV, positions };

                    progress_state progress;
                    progress.n_max = uniform(0, 3) ? 1 << 30 : uniform(0, 400);

                    abort_state abort;
                    abort.n_max = uniform(0, 3) ? 1 << 30 : uniform(0, 400);
                    llama_set_abort_callback(ctx, abort_after, &abort);

                    auto prefill = llama_snapkv_prefill_default_params();
                    prefill.params             = &params;
                    prefill.n_chunk            = uniform(1, 100);
                    prefill.n_cells            = uniform(0, 1)*uniform(0, 256);
                    prefill.n_probe            = uniform(0, 40);
                    prefill.probe              = uniform(0, 1) || prefill.n_probe > tokens.size() ? nullptr : tokens.data();
                    prefill.logits_all         = uniform(0, 1);
                    prefill.progress           = stop_after;
                    prefill.progress_user_data = &progress;

                    const int32_t n_before = llama_snapkv_n_cells(ctx, seq_id);

                    llama_snapkv_prefill_stats stats;
                    const auto status = llama_snapkv_prefill(ctx, seq_id, tokens.data(), tokens.size(), &prefill, &stats);

                    llama_set_abort_callback(ctx, nullptr, nullptr);

                    const int32_t n_after = llama_snapkv_n_cells(ctx, seq_id);

                    if (status == LLAMA_SNAPKV_STATUS_OK) {
                        CHECK(n_after == (int32_t) stats.n_cells && n_after == n_before + (int32_t) tokens.size() - (int32_t) stats.n_evicted);
                        n_room_made += stats.n_passes;
                    } else if (status == LLAMA_SNAPKV_STATUS_CANCELLED || status == LLAMA_SNAPKV_STATUS_SEQUENCE_LOST) {
                        CHECK(n_after == 0 && llama_memory_seq_pos_max(mem, seq_id) == -1);
                        n_stopped++;
                    } else {
                        CHECK(n_after == n_before);
                    }
                } break;
            case 11: // make room
                {
                    if (uniform(0, 2) == 0) {
                        llama_memory_seq_rm(mem, seq_id, -1, -1);
                        CHECK(llama_snapkv_frontier(ctx, seq_id) == -1);
                    }
                } break;
        }
    }

    printf("unified %d, flash attention %d, %s, %s positions: %d passes, room made %d times, %d prompts stopped\n",
            unified, flash_attn, ggml_type_name(type_kv), is_packed ? "packed" : "true", n_compacted, n_room_made, n_stopped);
    CHECK(n_compacted > 10);
    CHECK(n_room_made > 10);
    CHECK(n_stopped   >  5);

    llama_batch_free(batch);
    llama_free(ctx);
}

int main() {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr); // aborts and full caches are wanted

    llama_backend_init();

    const char * path = "test-pass.gguf";
    write_model(path);

    llama_model * model = llama_model_load_from_file(path, llama_model_default_params());
    CHECK(model);

    for (const bool unified : { true, false }) {
        run(model, unified, true,  GGML_TYPE_F16,  LLAMA_SNAPKV_POSITIONS_TRUE,   1);
        run(model, unified, true,  GGML_TYPE_Q8_0, LLAMA_SNAPKV_POSITIONS_TRUE,   2);
        run(model, unified, true,  GGML_TYPE_Q4_1, LLAMA_SNAPKV_POSITIONS_TRUE,   3);
        run(model, unified, false, GGML_TYPE_F16,  LLAMA_SNAPKV_POSITIONS_TRUE,   4);
        run(model, unified, true,  GGML_TYPE_F16,  LLAMA_SNAPKV_POSITIONS_PACKED, 5);
        run(model, unified, true,  GGML_TYPE_Q8_0, LLAMA_SNAPKV_POSITIONS_PACKED, 6);
    }

    llama_model_free(model);
    llama_backend_free();

    remove(path);

    printf("ok\n");

    return 0;
}
