#pragma once

#include "llama-snapkv.h"

#include <cstdint>
#include <vector>

// Which cells a KV head keeps. Runs on the host: ties and order are exact, and the kept positions are known for free.
//
// A rule scores the cells of the prefix [0, n - n_window); of those before the recent part, the best are kept.
// A new rule is a function, a line in the table in snapkv-rules.cpp, and a name in llama-snapkv.h.

struct snapkv_rule_input {
    const llama_snapkv_params & params; // n_window: as many as were scored

    uint32_t n;       // cells
    uint32_t n_group; // query heads of the KV head
    uint32_t i_layer;
    uint32_t i_head;  // KV head

    // attention to each cell; null if the rule does not need it
    const float  * attn_window; // summed over the window, [n_group][n]
    const double * attn_all;    // summed over all tokens, mean of the query heads, [n]
};

enum snapkv_rule_needs {
    SNAPKV_RULE_NEEDS_NOTHING,
    SNAPKV_RULE_NEEDS_WINDOW, // attn_window
    SNAPKV_RULE_NEEDS_ALL,    // attn_all: llama_snapkv_observe()
};

struct snapkv_rule {
    const char * name;

    enum snapkv_rule_needs needs;

    // the mean of the scores over all layers and heads decides, and all keep the same cells
    bool is_shared;

    // dst: [n - n_window]; values that have no order count as 0
    void (*score)(const snapkv_rule_input & in, double * dst);
};

// null if there is no such rule
const snapkv_rule * snapkv_get_rule(enum llama_snapkv_rule rule);

std::vector<double> snapkv_score(const snapkv_rule & rule, const snapkv_rule_input & in);

// n_budget indices into [0, n), ascending: the n_budget - n_recent best of [0, n - n_recent), ties to the lower index,
// and the last n_recent
std::vector<uint32_t> snapkv_select(const std::vector<double> & scores, uint32_t n, uint32_t n_recent, uint32_t n_budget);
