#include "server-snapkv.h"

#include "log.h"
#include "server-common.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <stdexcept>
#include <system_error>

json server_snapkv_to_json(const common_params_snapkv & params) {
    if (!params.enabled) {
        return false;
    }

    // cells as integers
    const auto number = [](double value) {
        return value >= 1 ? common_json_value((int64_t) value) : common_json_value(value);
    };

    json res = {
        {"budget", number(params.budget)},
        {"window", params.window},
        {"kernel", params.kernel},
        {"pool",   common_snapkv_pool_name(params.pool)},
        {"recent", number(params.recent)},
    };

    if (params.chunk > 0) {
        res["chunk"]      = params.chunk;
        res["probe"]      = params.probe;
        res["cells"]      = params.n_cells;
        res["prompt_max"] = params.prompt_max;
    }

    return res;
}

static double snapkv_number(const json & value, const std::string & name) {
    if (!value.is_number()) {
        throw std::invalid_argument(name + " must be a number");
    }
    return value.get<double>();
}

static int32_t snapkv_whole(const json & value, const std::string & name) {
    const double res = snapkv_number(value, name);
    if (res != std::floor(res)) {
        throw std::invalid_argument(name + " must be a whole number");
    }
    return (int32_t) std::clamp(res, -1e9, 1e9); // its range is checked later
}

common_params_snapkv server_snapkv_from_json(const json & value, const common_params_snapkv & params) {
    common_params_snapkv res = params;

    if (value.is_boolean() && !value.get<bool>()) {
        res.enabled = false;
        return res;
    }
    if (!value.is_boolean() && !value.is_object()) {
        throw std::invalid_argument("must be true, false or an object with budget, kernel, pool, recent or probe");
    }
    if (!params.enabled) {
        throw std::invalid_argument("the server was started without --snapkv");
    }
    if (value.is_boolean()) {
        return res;
    }

    for (const auto & [name, field] : value.items()) {
        if (name == "budget") {
            res.budget = snapkv_number(field, name);
        } else if (name == "kernel") {
            res.kernel = snapkv_whole(field, name);
        } else if (name == "pool") {
            if (!field.is_string()) {
                throw std::invalid_argument("pool must be 'avg' or 'max'");
            }
            try {
                res.pool = common_snapkv_pool_from_name(field.get<std::string>());
            } catch (const std::invalid_argument & err) {
                throw std::invalid_argument("pool " + std::string(err.what()));
            }
        } else if (name == "recent") {
            res.recent = snapkv_number(field, name);
        } else if (name == "probe") {
            if (params.chunk == 0) {
                throw std::invalid_argument("probe: the server was started without --snapkv-chunk");
            }
            res.probe = snapkv_whole(field, name);
        } else if (name == "chunk") {
            throw std::invalid_argument("chunk is set when the server starts, with --snapkv-chunk");
        } else if (name == "window") {
            throw std::invalid_argument("window is set when the server starts, with --snapkv-window");
        } else {
            throw std::invalid_argument("unknown setting '" + name + "', the settings are budget, kernel, pool, recent and probe");
        }
    }

    const std::string err = common_snapkv_check(res, "");
    if (!err.empty()) {
        throw std::invalid_argument(err);
    }

    return res;
}

bool server_snapkv_init(llama_context * ctx, common_params_snapkv & params, int32_t n_cells, bool has_draft) {
    if (!params.enabled) {
        if (params.chunk > 0) {
            LOG_WRN("%s: --snapkv-chunk %d has no effect without --snapkv\n", __func__, params.chunk);
        }
        return true;
    }

    params.n_cells = params.chunk > 0 ? n_cells : 0;

    if (!common_snapkv_init(ctx, params)) {
        return false;
    }
    if (params.chunk == 0) {
        return true;
    }
    if (has_draft) {
        LOG_ERR("%s: --snapkv-chunk %d: a draft model reads no prompt that is longer than its own cache, leave out one of them\n", __func__, params.chunk);
        return false;
    }

    const int64_t n_budget = common_snapkv_resolve(params, n_cells).n_budget;
    if (n_cells <= n_budget + params.probe) {
        LOG_ERR("%s: --snapkv-chunk %d: the %d cells of a slot must be more than budget %d and probe %d together, such as -c %d for one slot; or lower --snapkv-budget\n",
                __func__, params.chunk, n_cells, (int) n_budget, params.probe, (int) (n_budget + params.probe + params.chunk));
        return false;
    }

    const int32_t n_max = llama_snapkv_n_pos_max(ctx);
    if (params.prompt_max > n_max) {
        LOG_WRN("%s: --snapkv-prompt-max %d is more than the context of the model, it will be %d\n", __func__, params.prompt_max, n_max);
    }
    if (params.prompt_max == 0 || params.prompt_max > n_max) {
        params.prompt_max = n_max;
    }

    LOG_INF("%s: chunk = %d, probe = %d, a slot has %d cells for at most %d tokens\n", __func__, params.chunk, params.probe, n_cells, params.prompt_max);

    return true;
}

void server_snapkv_stats::add(const server_snapkv_chunks & other, int32_t n_prompt_cur, int32_t n_released) {
    chunks.n_passes        += other.n_passes;
    chunks.n_passes_answer += other.n_passes_answer;
    chunks.n_evicted       += other.n_evicted;
    chunks.t_us            += other.t_us;
    chunks.t_answer_us     += other.t_answer_us;

    if (!is_set) {
        n_prompt       = n_prompt_cur;
        n_cells_before = n_prompt_cur - n_released;
        n_cells_after  = n_cells_before;
    }
}

json server_snapkv_stats::to_json() const {
    json res = {
        {"prompt_n", n_prompt},
        {"cells",    n_cells_after},
        {"evicted",  n_cells_before - n_cells_after + chunks.n_evicted},
        {"ms",       t_us/1000.0},
    };

    if (chunks.is_on) {
        res["chunk_passes"]  = chunks.n_passes;
        res["chunk_ms"]      = chunks.t_us/1000.0;
        res["answer_passes"] = chunks.n_passes_answer;
    }

    if (n_window > 0) {
        res["window"] = n_window;
    }

    if (status != LLAMA_SNAPKV_STATUS_OK) {
        res["reason"] = llama_snapkv_status_str(status);
    }

    return res;
}

void server_snapkv_metrics::add(const server_snapkv_stats & stats) {
    if (stats.status == LLAMA_SNAPKV_STATUS_OK) {
        n_passes  += 1;
        n_evicted += stats.n_cells_before - stats.n_cells_after;
        t_us      += stats.t_us;
    }
}

void server_snapkv_metrics::add(const server_snapkv_chunks & chunks) {
    n_passes_chunk  += chunks.n_passes;
    n_passes_answer += chunks.n_passes_answer;
    n_evicted       += chunks.n_evicted;
    t_us            += chunks.t_us + chunks.t_answer_us;
}

std::string server_snapkv_metrics::to_metrics() const {
    if (!is_enabled) {
        return "";
    }

    std::string res;

    const auto add = [&](const char * type, const char * name, const char * help, const std::string & value) {
        res += string_format("# HELP llamacpp:%s %s\n# TYPE llamacpp:%s %s\nllamacpp:%s %s\n", name, help, name, type, name, value.c_str());
    };

    add("counter", "snapkv_passes_total",         "Prompts that SnapKV compacted",                      std::to_string(n_passes));
    if (has_chunks) {
        add("counter", "snapkv_chunk_passes_total",  "Passes while prompts longer than the cells were read", std::to_string(n_passes_chunk));
        add("counter", "snapkv_answer_passes_total", "Passes for answers longer than the cells",             std::to_string(n_passes_answer));
    }
    add("counter", "snapkv_tokens_evicted_total", "Tokens whose cells SnapKV released",                 std::to_string(n_evicted));
    add("counter", "snapkv_seconds_total",        "Total time spent on compacting",                     string_format("%.6f", t_us/1.e6));
    add("gauge",   "snapkv_cells",                "KV cells that the slots use, those of idle slots too", std::to_string(n_cells));

    return res;
}

int32_t server_snapkv_n_past(
        const llama_context        * ctx,
              llama_seq_id           seq_id,
        const server_tokens        & cached,
        const server_snapkv_prompt & state,
        const server_tokens        & prompt,
              int32_t                n_past,
        const common_params_snapkv & params) {
    const llama_pos pos_end = llama_snapkv_pos_end(ctx, seq_id);

    n_past = state.n_usable(n_past, params);
    if (cached.pos_next(n_past) < pos_end) {
        return 0;
    }
    if (!params.enabled) {
        return n_past;
    }

    const int32_t n_prompt = prompt.size();

    if (n_prompt - state.n_released <= (int32_t) common_snapkv_resolve(params, n_prompt).n_budget) {
        return n_past; // nothing to choose
    }

    const int32_t n_window_past = std::min(n_past, std::max(state.n_prompt, n_prompt - params.window));

    // media are read as a whole
    for (int32_t i = n_window_past; i < n_past; ++i) {
        if (prompt[i] == LLAMA_TOKEN_NULL) {
            return n_past;
        }
    }

    return n_window_past;
}

int32_t server_snapkv_prompt::n_usable(int32_t n_common, const common_params_snapkv & other) const {
    if (n_prompt == 0) {
        return n_common;
    }

    const bool is_same = other.enabled && (!params.enabled || params == other);

    return is_same && n_common >= n_prompt ? n_common : 0;
}

bool server_snapkv_prompt::covers(const server_snapkv_prompt & other) const {
    return n_prompt == 0 || other.n_prompt > 0;
}

server_snapkv_stats server_snapkv_compact(llama_context * ctx, llama_seq_id seq_id, int32_t n_prompt, const common_params_snapkv & params) {
    const llama_snapkv_params resolved = common_snapkv_resolve(params, n_prompt);

    llama_snapkv_stats stats;

    server_snapkv_stats res;
    res.is_set   = true;
    res.n_prompt = n_prompt;
    res.status   = llama_snapkv_compact(ctx, seq_id, &resolved, &stats);

    if (res.status == LLAMA_SNAPKV_STATUS_OK) {
        res.n_cells_before = stats.n_cells_before;
        res.n_cells_after  = stats.n_cells_after;
        res.n_window       = stats.n_window;
        res.t_us           = stats.t_total_us;
    } else {
        res.n_cells_before = llama_snapkv_n_cells(ctx, seq_id);
        res.n_cells_after  = res.n_cells_before;
    }

    return res;
}

server_snapkv_reader server_snapkv_begin(const common_params_snapkv & params, const common_params_snapkv & params_base, const server_tokens & prompt, int32_t n_cells) {
    server_snapkv_reader res;

    if (!params_base.enabled) {
        return res;
    }
    if (params_base.chunk == 0) {
        res.hint = "; start the server with --snapkv-chunk 1024 for prompts that are longer than the cells";
        return res;
    }
    if (!params.enabled) {
        res.hint = string_format("; the full cache was asked for with \"snapkv\": false, compacted prompts may have %d tokens", params.prompt_max);
        return res;
    }

    const int64_t n_budget = common_snapkv_resolve(params, n_cells).n_budget;
    if (n_cells <= n_budget + params.probe) {
        res.hint = string_format("; longer prompts need more cells than budget %d and probe %d together", (int) n_budget, params.probe);
        return res;
    }

    for (size_t i = 0; i < prompt.size(); ++i) {
        if (prompt[i] == LLAMA_TOKEN_NULL) {
            res.hint = "; prompts with images or audio are not read in chunks";
            return res;
        }
    }

    res.n_tokens_max = params.prompt_max;
    res.hint = string_format(" with --snapkv-prompt-max, up to the context of the model; the %d cells of a slot are no limit", n_cells);

    return res;
}

server_snapkv_next server_snapkv_reader::next(
        const llama_context * ctx,
              llama_seq_id    seq_id,
        const common_params_snapkv & params,
              int32_t n_past,
              int32_t n_read,
              int32_t n_prompt,
        const server_snapkv_surroundings & around) {
    server_snapkv_next res;

    const int32_t n_rest = n_prompt - n_read;

    const auto n_free = [&]() { return std::max(0, llama_snapkv_n_room(ctx, seq_id, 0) - around.n_taken - around.n_spared); };

    if (!is_on()) {
        while (n_free() < n_rest && around.release_idle && around.release_idle()) {
        }
        res.fits     = n_rest <= n_free();
        res.n_tokens = res.fits ? n_rest : 0;
        res.is_stuck = !res.fits && around.is_alone;
        return res;
    }

    const int32_t n_budget = common_snapkv_resolve(params, around.n_cells).n_budget;
    const int32_t n_own    = llama_snapkv_n_cells(ctx, seq_id);

    // a single token asks nothing
    const int32_t n_new   = n_prompt - n_past;
    const int32_t n_probe = n_new > 1 ? std::min(params.probe, n_new) : 0;
    const int32_t n_body  = std::max(0, n_rest - n_probe);
    const int32_t n_want  = n_read < n_chunk_end ? std::min(n_chunk_end - n_read, n_body) : std::min(params.chunk, n_body);

    int32_t n_limit = around.n_cells;
    if (around.n_share > 0) {
        n_limit = std::min<int64_t>(n_limit, std::max<int64_t>(around.n_share, (int64_t) n_budget + n_probe + params.chunk));
    }

    const bool    can_fit  = n_rest <= around.n_cells - n_own;
    const int32_t n_useful = can_fit ? n_rest : n_limit - n_own;

    while (n_free() < n_useful && around.release_idle && around.release_idle()) {
    }

    if (can_fit && n_rest <= n_free()) {
        res.n_tokens = n_rest;
        res.fits     = true;
        return res;
    }

    // beside the probe
    const auto n_room = [&](int32_t n_released) {
        return std::max(0, std::min(n_free() + n_released, n_limit - n_own + n_released) - n_probe);
    };

    // others take the cells that a pass releases one by one: wait for a part of a chunk that is worth it
    const int32_t n_least    = around.is_alone ? 1 : std::max(1, std::min((n_want + 3)/4, n_limit - n_budget - n_probe));
    const int32_t n_missing  = around.is_alone ? 0 : std::max(0, n_budget - n_own);
    const int32_t n_released = std::max(0, n_own - n_budget);
    const int32_t n_now      = std::min(n_want, n_room(0));

    if ((n_now < n_want || n_now == 0) && n_released > 0 && n_room(n_released) >= n_least) {
        res.make_room = true;
    } else if (n_now > 0 && n_room(0) >= n_missing + n_least) {
        res.n_tokens = n_now;
        n_chunk_end  = n_read + n_now;
    } else {
        res.is_stuck = around.is_alone;
    }

    return res;
}

int32_t server_snapkv_n_releasable(const llama_context * ctx, llama_seq_id seq_id, const common_params_snapkv & params) {
    return llama_snapkv_n_cells(ctx, seq_id) - (int32_t) common_snapkv_resolve(params, params.n_cells).n_budget;
}

llama_snapkv_status server_snapkv_make_room(
              llama_context        * ctx,
              llama_seq_id           seq_id,
        const common_params_snapkv & params,
        const server_tokens        * prompt,
              int32_t                n_past,
              server_snapkv_chunks & res) {
    // not a part of the pass
    llama_synchronize(ctx);

    const int64_t t_start_us = ggml_time_us();

    const llama_snapkv_params resolved = common_snapkv_resolve(params, params.n_cells);

    llama_tokens probe;
    if (prompt) {
        const int32_t n_prompt = prompt->size();
        const int32_t n_new    = n_prompt - n_past;

        for (int32_t i = n_prompt - (n_new > 1 ? std::min(params.probe, n_new) : 0); i < n_prompt; ++i) {
            probe.push_back((*prompt)[i]);
        }
    }

    llama_snapkv_stats stats;

    const auto status = llama_snapkv_make_room(ctx, seq_id, nullptr, 0, probe.data(), probe.size(), &resolved, &stats);

    const int64_t t_us = ggml_time_us() - t_start_us;

    res = {};
    res.is_on = true;

    if (status == LLAMA_SNAPKV_STATUS_OK) {
        res.n_evicted = stats.n_cells_before - stats.n_cells_after;
        res.n_window  = stats.n_window;

        (prompt ? res.n_passes : res.n_passes_answer) = 1;
        (prompt ? res.t_us     : res.t_answer_us)     = t_us;
    }

    return status;
}

const char * server_snapkv_check_restored(const llama_context * ctx, llama_seq_id seq_id, const server_tokens & tokens, const std::string & path, size_t n_read) {
    // caches of two models can be alike in what is read first
    std::error_code err;
    if (std::filesystem::file_size(path, err) != n_read || err) {
        return "The slot save file holds more than the state of this model";
    }

    const int32_t n_cells = llama_snapkv_n_cells(ctx, seq_id);

    if (llama_snapkv_ring_size(ctx) == 0) {
        const bool has_all = llama_snapkv_supported(ctx) != LLAMA_SNAPKV_STATUS_OK || n_cells >= (int32_t) tokens.size();

        return has_all ? nullptr : "The slot was saved after a SnapKV pass, start the server with --snapkv";
    }

    std::vector<llama_pos> pos(n_cells);
    std::vector<int32_t>   cells(n_cells);
    llama_snapkv_get_cells(ctx, seq_id, pos.data(), cells.data(), n_cells);

    const llama_pos frontier = llama_snapkv_frontier(ctx, seq_id);

    bool res = n_cells == 0 ? tokens.empty() : pos.front() >= 0 && pos.back() + 1 == tokens.pos_next();

    // several cells at the frontier, one at each position after it
    for (int32_t i = 1; i < n_cells; ++i) {
        res = res && (pos[i] == pos[i - 1] + 1 || (pos[i] == pos[i - 1] && pos[i] == frontier));
    }

    return res ? nullptr : "The tokens in the slot save file are not those of its KV cache";
}

server_snapkv_prompt server_snapkv_state(const llama_context * ctx, llama_seq_id seq_id, const common_params_snapkv & params) {
    server_snapkv_prompt res;

    if (llama_snapkv_frontier(ctx, seq_id) >= 0) {
        res.n_released = llama_memory_seq_pos_max(llama_get_memory(ctx), seq_id) + 1 - llama_snapkv_n_cells(ctx, seq_id);
        res.n_prompt   = llama_snapkv_pos_end(ctx, seq_id);
        res.params     = params;
    }

    return res;
}

int32_t server_snapkv_n_used(const llama_context * ctx, bool has_draft, int32_t n_ctx, int32_t n_tokens, int32_t n_released) {
    if (n_released == 0 || has_draft) {
        return n_tokens;
    }

    const int32_t n_spare = std::max(0, llama_model_n_ctx_train(llama_get_model(ctx)) - n_ctx);

    return n_tokens - std::min(n_released, n_spare);
}
