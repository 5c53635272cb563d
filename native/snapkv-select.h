#pragma once

#include "llama-snapkv.h"

#include <cstdint>
#include <vector>

// Which cells one KV head keeps. Runs on the host: ties and order are exact, and the kept positions are known for free.
//
// scores:  attention to each cell, summed over the window, [n_group][n] row by row, one row per query head of the GQA group
// returns: n_budget indices into [0, n), ascending: the n_budget - n_recent best of [0, n - n_recent), ties to the lower
//          index, and the last n_recent
//
// Pooling sees the prefix [0, n - n_window) only, zero padded. Sums are float64, in ascending order of index and of head.
std::vector<uint32_t> snapkv_select(
        const float * scores,
        uint32_t      n_group,
        uint32_t      n,
        uint32_t      n_window,
        uint32_t      n_recent,
        uint32_t      n_budget,
        uint32_t      n_kernel,
        enum llama_snapkv_pool pool);
