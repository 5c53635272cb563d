#include "snapkv-select.h"

#include <algorithm>
#include <deque>
#include <numeric>

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

std::vector<uint32_t> snapkv_select(
        const float * scores,
        uint32_t      n_group,
        uint32_t      n,
        uint32_t      n_window,
        uint32_t      n_recent,
        uint32_t      n_budget,
        uint32_t      n_kernel,
        enum llama_snapkv_pool pool) {
    const int64_t n_prefix = (int64_t) n - n_window;
    const int64_t n_radius = std::min<int64_t>(n_kernel/2, n_prefix);

    std::vector<double> row   (n_prefix);
    std::vector<double> pooled(n_prefix);
    std::vector<double> total (n_prefix, 0.0);

    for (uint32_t g = 0; g < n_group; ++g) {
        for (int64_t j = 0; j < n_prefix; ++j) {
            row[j] = (double) scores[(size_t) g*n + j] / n_window;
        }

        if (pool == LLAMA_SNAPKV_POOL_MAX) {
            pool_max(row.data(), n_prefix, n_radius, pooled.data());
        } else {
            pool_sum(row.data(), n_prefix, n_radius, pooled.data());
            for (auto & p : pooled) {
                p /= n_kernel;
            }
        }

        for (int64_t j = 0; j < n_prefix; ++j) {
            total[j] += pooled[j];
        }
    }

    for (auto & t : total) {
        t = t > 0.0 ? t / n_group : 0.0; // also NaN, which has no order
    }

    const uint32_t n_candidates = n - n_recent;
    const uint32_t n_top        = n_budget - n_recent;

    std::vector<uint32_t> res(n_candidates);
    std::iota(res.begin(), res.end(), 0);

    const auto better = [&](uint32_t a, uint32_t b) {
        return total[a] != total[b] ? total[a] > total[b] : a < b;
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
