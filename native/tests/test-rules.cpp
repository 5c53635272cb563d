// scores and selection of the rule "snapkv" against a direct computation

#include "snapkv-rules.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#define CHECK(cond) do { if (!(cond)) { fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #cond); exit(1); } } while (0)

static std::vector<uint32_t> select_direct(
        const std::vector<float> & scores, uint32_t n_group, uint32_t n, uint32_t n_window, uint32_t n_recent,
        uint32_t n_budget, uint32_t n_kernel, llama_snapkv_pool pool) {
    const int64_t n_prefix = n - n_window;

    std::vector<double> total(n_prefix, 0.0);
    for (uint32_t g = 0; g < n_group; ++g) {
        for (int64_t j = 0; j < n_prefix; ++j) {
            double sum = 0.0;
            double max = 0.0;
            for (int64_t k = j - n_kernel/2; k <= j + n_kernel/2; ++k) {
                if (k >= 0 && k < n_prefix) {
                    const double s = (double) scores[g*n + k]/n_window;
                    sum += s;
                    max  = std::max(max, s);
                }
            }
            total[j] += pool == LLAMA_SNAPKV_POOL_AVG ? sum/n_kernel : max;
        }
    }

    std::vector<uint32_t> order(n - n_recent);
    for (uint32_t j = 0; j < order.size(); ++j) {
        total[j] /= n_group;
        order[j] = j;
    }
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return total[a] > total[b]; });
    order.resize(n_budget - n_recent);
    std::sort(order.begin(), order.end());
    for (uint32_t j = n - n_recent; j < n; ++j) {
        order.push_back(j);
    }

    return order;
}

static std::vector<uint32_t> select_by_rule(
        const std::vector<float> & scores, uint32_t n_group, uint32_t n, uint32_t n_window, uint32_t n_recent,
        uint32_t n_budget, uint32_t n_kernel, llama_snapkv_pool pool) {
    const llama_snapkv_params params = { n_budget, n_window, n_recent, n_kernel, pool, LLAMA_SNAPKV_RULE_SNAPKV };

    return snapkv_select(snapkv_score(*snapkv_get_rule(params.rule), { params, n, n_group, 0, 0, scores.data(), nullptr }), n, n_recent, n_budget);
}

int main() {
    std::mt19937 rng(0);

    for (int it = 0; it < 2000; ++it) {
        const auto uniform = [&](uint32_t lo, uint32_t hi) { return std::uniform_int_distribution<uint32_t>(lo, hi)(rng); };

        const uint32_t n_window = uniform(1, 20);
        const uint32_t n_recent = n_window + (it % 3 ? 0 : uniform(0, 10));
        const uint32_t n_budget = n_recent + uniform(1, 60);
        const uint32_t n        = n_budget + uniform(1, 100);
        const uint32_t n_group  = uniform(1, 4);
        const uint32_t n_kernel = 2*uniform(0, it % 5 ? 12 : 200) + 1;

        const auto pool = it % 2 ? LLAMA_SNAPKV_POOL_AVG : LLAMA_SNAPKV_POOL_MAX;

        // few different values, so that there are ties
        std::vector<float> scores(n_group*n);
        for (auto & s : scores) {
            s = it % 4 == 0 ? std::uniform_real_distribution<float>(0.0f, 1.0f)(rng) : uniform(0, 3)/4.0f;
        }

        const auto res = select_by_rule(scores, n_group, n, n_window, n_recent, n_budget, n_kernel, pool);

        CHECK(res == select_direct(scores, n_group, n, n_window, n_recent, n_budget, n_kernel, pool));
        CHECK(res.size() == n_budget);
        CHECK(std::is_sorted(res.begin(), res.end()));
        CHECK(std::adjacent_find(res.begin(), res.end()) == res.end());
    }

    // equal scores: the first cells
    {
        const std::vector<float> scores(50, 0.5f);
        const auto res = select_by_rule(scores, 1, 50, 4, 4, 10, 1, LLAMA_SNAPKV_POOL_MAX);
        CHECK((res == std::vector<uint32_t>{ 0, 1, 2, 3, 4, 5, 46, 47, 48, 49 }));
    }

    // values that have no order
    {
        std::vector<float> scores(50, std::numeric_limits<float>::quiet_NaN());
        scores[7] = 0.5f;
        scores[9] = std::numeric_limits<float>::infinity();
        for (const auto pool : { LLAMA_SNAPKV_POOL_AVG, LLAMA_SNAPKV_POOL_MAX }) {
            const auto res = select_by_rule(scores, 1, 50, 4, 4, 10, 1, pool);
            CHECK((res == std::vector<uint32_t>{ 0, 1, 2, 3, 7, 9, 46, 47, 48, 49 }));
        }
    }

    printf("ok\n");

    return 0;
}
