#include "snapkv-rules.h"

#include <algorithm>
#include <deque>
#include <numeric>

//
// pooling
//

// sum over [j - r, j + r] for each j
static void pool_sum(const double * src, int64_t n, int64_t r, double * dst) {
    for (int64_t j = 0; j < n; ++j) {
        double sum = 0.0;
        for (int64_t k = std::max<int64_t>(0, j - r); k <= std::min(n - 1, j + r); ++k) {
            sum += src[k];
        }
        dst[j] = sum;
    }
}

// maximum over [j - r, j + r] for each j, in linear time; scores are not negative, so padding with zeros changes nothing
static void pool_max(const double * src, int64_t n, int64_t r, double * dst) {
    std::deque<int64_t> best; // indices of falling values
    for (int64_t k = 0; k < n + r; ++k) {
        if (k < n) {
            while (!best.empty() && src[best.back()] <= src[k]) {
                best.pop_back();
            }
            best.push_back(k);
        }

        const int64_t j = k - r;
        if (j >= 0) {
            while (best.front() < j - r) {
                best.pop_front();
            }
            dst[j] = src[best.front()];
        }
    }
}

//
// rules
//

// Pooling sees the prefix only, zero padded. Sums are float64, in ascending order of index and of head.
static void score_snapkv(const snapkv_rule_input & in, double * dst) {
    const int64_t n_prefix = (int64_t) in.n - in.params.n_window;
    const int64_t n_radius = std::min<int64_t>(in.params.n_kernel/2, n_prefix);

    std::vector<double> row   (n_prefix);
    std::vector<double> pooled(n_prefix);

    std::fill(dst, dst + n_prefix, 0.0);

    for (uint32_t g = 0; g < in.n_group; ++g) {
        for (int64_t j = 0; j < n_prefix; ++j) {
            row[j] = (double) in.attn_window[(size_t) g*in.n + j] / in.params.n_window;
        }

        if (in.params.pool == LLAMA_SNAPKV_POOL_MAX) {
            pool_max(row.data(), n_prefix, n_radius, pooled.data());
        } else {
            pool_sum(row.data(), n_prefix, n_radius, pooled.data());
            for (auto & p : pooled) {
                p /= in.params.n_kernel;
            }
        }

        for (int64_t j = 0; j < n_prefix; ++j) {
            dst[j] += pooled[j];
        }
    }

    for (int64_t j = 0; j < n_prefix; ++j) {
        dst[j] /= in.n_group;
    }
}

static void score_first_recent(const snapkv_rule_input & in, double * dst) {
    const uint32_t n_first = 4;

    for (uint32_t j = 0; j < in.n - in.params.n_window; ++j) {
        dst[j] = j < n_first ? in.n : j;
    }
}

// the finalizer of splitmix64 on a counter of (layer, head, cell)
static void score_random(const snapkv_rule_input & in, double * dst) {
    for (uint32_t j = 0; j < in.n - in.params.n_window; ++j) {
        uint64_t z = ((uint64_t) in.i_layer << 48) + ((uint64_t) in.i_head << 32) + j + 0x9e3779b97f4a7c15;

        z = (z ^ (z >> 30))*0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27))*0x94d049bb133111eb;
        z =  z ^ (z >> 31);

        dst[j] = (double) (z >> 11);
    }
}

static void score_h2o(const snapkv_rule_input & in, double * dst) {
    std::copy_n(in.attn_all, in.n - in.params.n_window, dst);
}

static const snapkv_rule RULES[LLAMA_SNAPKV_RULE_COUNT] = {
    /* SNAPKV       */ { "snapkv",       SNAPKV_RULE_NEEDS_WINDOW,  false, score_snapkv       },
    /* SHARED       */ { "shared",       SNAPKV_RULE_NEEDS_WINDOW,  true,  score_snapkv       },
    /* FIRST_RECENT */ { "first-recent", SNAPKV_RULE_NEEDS_NOTHING, true,  score_first_recent },
    /* RANDOM       */ { "random",       SNAPKV_RULE_NEEDS_NOTHING, false, score_random       },
    /* H2O          */ { "h2o",          SNAPKV_RULE_NEEDS_ALL,     false, score_h2o          },
};

const snapkv_rule * snapkv_get_rule(enum llama_snapkv_rule rule) {
    return rule >= 0 && rule < LLAMA_SNAPKV_RULE_COUNT ? &RULES[rule] : nullptr;
}

std::vector<double> snapkv_score(const snapkv_rule & rule, const snapkv_rule_input & in) {
    std::vector<double> res(in.n - in.params.n_window);

    rule.score(in, res.data());

    for (auto & s : res) {
        s = s > 0.0 ? s : 0.0; // also NaN, which has no order
    }

    return res;
}

//
// selection
//

std::vector<uint32_t> snapkv_select(const std::vector<double> & scores, uint32_t n, uint32_t n_recent, uint32_t n_budget) {
    const uint32_t n_candidates = n - n_recent;
    const uint32_t n_top        = n_budget - n_recent;

    std::vector<uint32_t> res(n_candidates);
    std::iota(res.begin(), res.end(), 0);

    const auto better = [&](uint32_t a, uint32_t b) {
        return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
    };

    if (n_top < n_candidates) {
        std::nth_element(res.begin(), res.begin() + n_top, res.end(), better);
        res.resize(n_top);
    }
    std::sort(res.begin(), res.end());

    for (uint32_t j = n - n_recent; j < n; ++j) {
        res.push_back(j);
    }

    return res;
}
