#pragma once

// SnapKV in the command-line tools: settings as a user gives them, and their options

#include "llama-snapkv.h"

#include <cstdint>
#include <string>
#include <vector>

struct common_arg;

struct common_params_snapkv {
    // pooling is linear in it, and a request must not be able to stall a server
    static constexpr int32_t N_KERNEL_MAX = 255;

    bool enabled = false;

    double  budget = 1024; // cells that a sequence keeps, below 1: a share of the prompt
    int32_t window = 16;   // last tokens whose queries score the others
    int32_t kernel = 21;   // pooling width, odd
    double  recent = 0.5;  // last cells kept in any case, below 1: a share of the budget

    enum llama_snapkv_pool pool = LLAMA_SNAPKV_POOL_MAX;

    int32_t chunk      = 0;  // tokens read at a time of a prompt longer than the cells, 0: it must fit
    int32_t probe      = 32; // last tokens of such a prompt, that look meanwhile
    int32_t prompt_max = 0;  // tokens of a prompt and its answer, 0: as many as the model allows

    int32_t n_cells = 0; // of a sequence, with chunks, once they are known: a share of the prompt is at most one of these

    // the same selection from the same prompt
    bool operator==(const common_params_snapkv & other) const;
    bool operator!=(const common_params_snapkv & other) const { return !(*this == other); }
};

// empty if the settings are valid, else which one is wrong, its range, and the remedy
// prefix: of the names in the text, such as "--snapkv-"
std::string common_snapkv_check(const common_params_snapkv & params, const std::string & prefix);

// the settings in cells for a sequence of n_tokens tokens; valid settings give valid ones
llama_snapkv_params common_snapkv_resolve(const common_params_snapkv & params, int32_t n_tokens);

const char * common_snapkv_pool_name(enum llama_snapkv_pool pool);

// throws std::invalid_argument
enum llama_snapkv_pool common_snapkv_pool_from_name(const std::string & name);

// the options --snapkv, --snapkv-budget, ...
std::vector<common_arg> common_snapkv_args();

// llama_snapkv_init(), with the reason in the log if it is refused
bool common_snapkv_init(llama_context * ctx, const common_params_snapkv & params);
