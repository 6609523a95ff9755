// The list of MHA kernels, the fast one first.
#include "backends/cuda/attention/mha.h"

#include "backends/cuda/kernels.h"

namespace lacuna::cuda {

const Kernel<MhaArgs> kMha[2] = {
    {.name = "cuda/mha_mma", .supports = supports_mha_mma, .run = run_mha_mma},
    {.name = "cuda/mha_simt", .supports = supports_all<MhaArgs>, .run = run_mha_simt},
};

}  // namespace lacuna::cuda
