#include "server-snapkv.h"

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

    return json {
        {"budget", number(params.budget)},
        {"window", params.window},
        {"kernel", params.kernel},
        {"pool",   common_snapkv_pool_name(params.pool)},
        {"recent", number(params.recent)},
    };
}

static double snapkv_number(const json & value, const std::string & name) {
    if (!value.is_number()) {
        throw std::invalid_argument(name + " must be a number");
    }
    return value.get<double>();
}

common_params_snapkv server_snapkv_from_json(const json & value, const common_params_snapkv & params) {
    common_params_snapkv res = params;

    if (value.is_boolean() && !value.get<bool>()) {
        res.enabled = false;
        return res;
    }
    if (!value.is_boolean() && !value.is_object()) {
        throw std::invalid_argument("must be true, false or an object with budget, kernel, pool or recent");
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
            const double kernel = snapkv_number(field, name);
            if (kernel != std::floor(kernel)) {
                throw std::invalid_argument("kernel must be a whole number");
            }
            res.kernel = (int32_t) std::clamp(kernel, -1e9, 1e9); // its range is checked below
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
        } else if (name == "window") {
            throw std::invalid_argument("window is set when the server starts, with --snapkv-window");
        } else {
            throw std::invalid_argument("unknown setting '" + name + "', the settings are budget, kernel, pool and recent");
        }
    }

    const std::string err = common_snapkv_check(res, "");
    if (!err.empty()) {
        throw std::invalid_argument(err);
    }

    return res;
}

json server_snapkv_stats::to_json() const {
    json res = {
        {"prompt_n", n_prompt},
        {"cells",    n_cells_after},
        {"evicted",  n_cells_before - n_cells_after},
        {"ms",       t_us/1000.0},
    };

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

std::string server_snapkv_metrics::to_metrics() const {
    if (!is_enabled) {
        return "";
    }

    std::string res;

    const auto add = [&](const char * type, const char * name, const char * help, const std::string & value) {
        res += string_format("# HELP llamacpp:%s %s\n# TYPE llamacpp:%s %s\nllamacpp:%s %s\n", name, help, name, type, name, value.c_str());
    };

    add("counter", "snapkv_passes_total",         "Prompts that SnapKV compacted",                      std::to_string(n_passes));
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
