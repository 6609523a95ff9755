// The lists of linear, head_linear and moe_experts, the fastest kernel first.
#include "backends/cuda/model/linear.h"

#include "backends/cuda/kernels.h"

namespace lacuna::cuda {

const Kernel<LinearArgs> kLinear[6] = {
    {.name = "cuda/linear_few_rows",
     .supports = few_rows::supports,
     .preferred = few_rows::preferred,
     .run = few_rows::run},
    {.name = "cuda/linear_few_rows_fma",
     .supports = few_rows_fma::supports,
     .preferred = few_rows_fma::preferred,
     .run = few_rows_fma::run},
    {.name = "cuda/linear_cublaslt",
     .supports = cublaslt::supports,
     .workspace_bytes = cublaslt::workspace,
     .run = cublaslt::run},
    {.name = "cuda/linear_widened",
     .supports = widened::supports,
     .preferred = widened::preferred,
     .workspace_bytes = widened::workspace,
     .run = widened::run},
    {.name = "cuda/linear_tiles", .supports = tiles::supports, .run = tiles::run},
    {.name = "cuda/linear_generic", .supports = generic::supports, .run = generic::run},
};

const Kernel<HeadLinearArgs> kHeadLinear[3] = {
    {.name = "cuda/head_linear_few_rows",
     .supports = few_rows::supports,
     .preferred = few_rows::preferred,
     .run = few_rows::run},
    {.name = "cuda/head_linear_cublaslt",
     .supports = cublaslt::supports,
     .workspace_bytes = cublaslt::workspace,
     .run = cublaslt::run},
    {.name = "cuda/head_linear_generic", .supports = generic::supports, .run = generic::run},
};

const Kernel<MoeExpertsArgs> kMoeExperts[2] = {
    {.name = "cuda/moe_experts_tiles",
     .supports = tiles::supports,
     .workspace_bytes = tiles::workspace,
     .run = tiles::run},
    {.name = "cuda/moe_experts_generic",
     .supports = generic::supports,
     .workspace_bytes = generic::workspace,
     .run = generic::run},
};

}  // namespace lacuna::cuda
