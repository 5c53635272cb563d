#include "common-snapkv.h"

#include "arg.h"
#include "common.h"
#include "log.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <tuple>

// as in llama_snapkv_params_check()
static constexpr int32_t SNAPKV_N_WINDOW_MAX = 4096;
static constexpr double  SNAPKV_N_CELLS_MAX  = 1 << 30;

// as in snapkv_gguf/config.py
static constexpr int32_t SNAPKV_N_PROBE_MAX = 4096;

bool common_params_snapkv::operator==(const common_params_snapkv & other) const {
    const auto fields = [](const common_params_snapkv & p) {
        return std::make_tuple(p.enabled, p.budget, p.window, p.kernel, p.recent, p.pool, p.probe);
    };

    return fields(*this) == fields(other);
}

static bool snapkv_is_whole(double value) {
    return value == std::floor(value);
}

std::string common_snapkv_check(const common_params_snapkv & params, const std::string & prefix) {
    const auto error = [&](const char * name, double value, const std::string & text) {
        return string_format("%s%s %.10g: ", prefix.c_str(), name, value) + text;
    };

    // NaN fails every comparison
    if (!(params.window >= 1 && params.window <= SNAPKV_N_WINDOW_MAX)) {
        return error("window", params.window, string_format("must be between 1 and %d tokens, try 16 or 32", SNAPKV_N_WINDOW_MAX));
    }
    if (!(params.budget > 0 && params.budget <= SNAPKV_N_CELLS_MAX) || (params.budget >= 1 && !snapkv_is_whole(params.budget))) {
        return error("budget", params.budget, "must be a whole number of cells, at most 2^30, or between 0 and 1 for a share of the prompt");
    }
    if (params.budget >= 1 && params.budget <= params.window) {
        return error("budget", params.budget, string_format("must be more than %swindow %d", prefix.c_str(), params.window));
    }
    if (params.kernel < 1 || params.kernel > params.N_KERNEL_MAX || params.kernel % 2 == 0) {
        return error("kernel", params.kernel, string_format("must be odd, between 1 (no pooling) and %d, try 5 or 21", params.N_KERNEL_MAX));
    }
    if (!(params.recent >= 0 && params.recent <= SNAPKV_N_CELLS_MAX) || (params.recent >= 1 && !snapkv_is_whole(params.recent))) {
        return error("recent", params.recent, "must be a whole number of cells, at most 2^30, or between 0 and 1 for a share of the budget");
    }
    if (params.recent >= 1 && params.recent < params.window) {
        return error("recent", params.recent, string_format("must be 0 or at least %swindow %d", prefix.c_str(), params.window));
    }
    if (params.recent >= 1 && params.budget >= 1 && params.recent >= params.budget) {
        return error("recent", params.recent, string_format("must be less than %sbudget %.10g, else nothing is left to select", prefix.c_str(), params.budget));
    }
    if (!(params.chunk >= 0 && params.chunk <= SNAPKV_N_CELLS_MAX)) {
        return error("chunk", params.chunk, "must be a number of tokens, at most 2^30, or 0 for prompts that fit only, try 1024");
    }
    if (!(params.probe >= 0 && params.probe <= SNAPKV_N_PROBE_MAX)) {
        return error("probe", params.probe, string_format("must be between 0 (none) and %d tokens, try 32", SNAPKV_N_PROBE_MAX));
    }
    if (params.prompt_max < 0) {
        return error("prompt-max", params.prompt_max, "must be a number of tokens, or 0 for as many as the model allows");
    }

    return "";
}

llama_snapkv_params common_snapkv_resolve(const common_params_snapkv & params, int32_t n_tokens) {
    if (params.n_cells > 0) {
        n_tokens = std::min(n_tokens, params.n_cells);
    }

    const uint32_t n_window = params.window;
    const uint32_t n_fixed  = params.recent >= 1 ? std::max(n_window, (uint32_t) params.recent) : n_window;

    // a share leaves at least one cell to select
    const uint32_t n_budget = params.budget >= 1 ? (uint32_t) params.budget :
        std::max<uint32_t>(n_fixed + 1, std::nearbyint(params.budget*n_tokens));

    const uint32_t n_recent = params.recent >= 1 ? (uint32_t) params.recent : (uint32_t) (params.recent*n_budget);

    llama_snapkv_params res = llama_snapkv_default_params();
    res.n_budget = n_budget;
    res.n_window = n_window;
    res.n_recent = std::min(std::max(n_window, n_recent), n_budget - 1);
    res.n_kernel = params.kernel;
    res.pool     = params.pool;

    return res;
}

const char * common_snapkv_pool_name(enum llama_snapkv_pool pool) {
    return pool == LLAMA_SNAPKV_POOL_AVG ? "avg" : "max";
}

enum llama_snapkv_pool common_snapkv_pool_from_name(const std::string & name) {
    if (name == "avg") { return LLAMA_SNAPKV_POOL_AVG; }
    if (name == "max") { return LLAMA_SNAPKV_POOL_MAX; }

    throw std::invalid_argument("must be 'avg' or 'max'");
}

static double snapkv_number(const std::string & text) {
    size_t n = 0;
    double res = 0;
    try {
        res = std::stod(text, &n);
    } catch (const std::exception &) {
        // said below
    }
    if (n == 0 || n != text.size()) {
        throw std::invalid_argument("must be a number");
    }
    return res;
}

std::vector<common_arg> common_snapkv_args() {
    const common_params_snapkv params;

    std::vector<common_arg> res;

    const auto add = [&](common_arg arg, const char * env) {
        res.push_back(arg.set_env(env).set_examples({ LLAMA_EXAMPLE_SERVER, LLAMA_EXAMPLE_CLI }));
    };

    add(common_arg({ "--snapkv" }, { "--no-snapkv" },
        "SnapKV: once a prompt is read, keep only the part of its KV cache that its last tokens attend to (default: disabled)",
        [](common_params & params, bool value) {
            params.snapkv.enabled = value;
        }
    ), "LLAMA_ARG_SNAPKV");
    add(common_arg({ "--snapkv-budget" }, "N",
        string_format("SnapKV: cells that a sequence keeps, or below 1 a share of the prompt (default: %g)", params.budget),
        [](common_params & params, const std::string & value) {
            params.snapkv.budget = snapkv_number(value);
        }
    ), "LLAMA_ARG_SNAPKV_BUDGET");
    add(common_arg({ "--snapkv-window" }, "N",
        string_format("SnapKV: last tokens of the prompt whose queries choose (default: %d)", params.window),
        [](common_params & params, int value) {
            params.snapkv.window = value;
        }
    ), "LLAMA_ARG_SNAPKV_WINDOW");
    add(common_arg({ "--snapkv-kernel" }, "N",
        string_format("SnapKV: width of the pooling over neighbouring cells, odd (default: %d)", params.kernel),
        [](common_params & params, int value) {
            params.snapkv.kernel = value;
        }
    ), "LLAMA_ARG_SNAPKV_KERNEL");
    add(common_arg({ "--snapkv-pool" }, "{avg,max}",
        string_format("SnapKV: pooling (default: %s)", common_snapkv_pool_name(params.pool)),
        [](common_params & params, const std::string & value) {
            params.snapkv.pool = common_snapkv_pool_from_name(value);
        }
    ), "LLAMA_ARG_SNAPKV_POOL");
    add(common_arg({ "--snapkv-recent" }, "N",
        string_format("SnapKV: last cells that are kept in any case, or below 1 a share of the budget (default: %g)", params.recent),
        [](common_params & params, const std::string & value) {
            params.snapkv.recent = snapkv_number(value);
        }
    ), "LLAMA_ARG_SNAPKV_RECENT");
    add(common_arg({ "--snapkv-chunk" }, "N",
        string_format("SnapKV: read prompts that are longer than the cells, with a pass every N tokens once they are full, 0 = off (default: %d)", params.chunk),
        [](common_params & params, int value) {
            params.snapkv.chunk = value;
        }
    ), "LLAMA_ARG_SNAPKV_CHUNK");
    add(common_arg({ "--snapkv-probe" }, "N",
        string_format("SnapKV: last tokens of such a prompt, the question, that choose while it is read, 0 = none (default: %d)", params.probe),
        [](common_params & params, int value) {
            params.snapkv.probe = value;
        }
    ), "LLAMA_ARG_SNAPKV_PROBE");
    add(common_arg({ "--snapkv-prompt-max" }, "N",
        "SnapKV: with --snapkv-chunk, longest prompt and answer in tokens, 0 = the context that the model was trained for (default: 0)",
        [](common_params & params, int value) {
            params.snapkv.prompt_max = value;
        }
    ), "LLAMA_ARG_SNAPKV_PROMPT_MAX");

    return res;
}

bool common_snapkv_init(llama_context * ctx, const common_params_snapkv & params) {
    const auto status = llama_snapkv_init(ctx, common_snapkv_resolve(params, llama_n_ctx(ctx)));
    if (status != LLAMA_SNAPKV_STATUS_OK) {
        LOG_ERR("%s: this model or context cannot be used with --snapkv: %s\n", __func__, llama_snapkv_status_str(status));
        return false;
    }

    LOG_INF("%s: budget = %g, window = %d, kernel = %d, pool = %s, recent = %g, query ring = %.2f MiB\n", __func__,
            params.budget, params.window, params.kernel, common_snapkv_pool_name(params.pool), params.recent,
            llama_snapkv_ring_size(ctx)/(1024.0*1024.0));

    return true;
}
