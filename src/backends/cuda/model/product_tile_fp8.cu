// The instances of product_tile.cuh over FP8 weights.
#include "backends/cuda/model/product_tile.cuh"

namespace lacuna::cuda {

template Status launch_product_tiles<Fp8E4M3, 16, false>(const char*, const ProductParams&, int64_t,
                                                         const DeviceInfo&, const Launch&);
template Status launch_product_tiles<Fp8E4M3, 16, true>(const char*, const ProductParams&, int64_t,
                                                        const DeviceInfo&, const Launch&);
template Status launch_product_tiles<Fp8E4M3, 64, false>(const char*, const ProductParams&, int64_t,
                                                         const DeviceInfo&, const Launch&);
template Status launch_product_tiles<Fp8E4M3, 64, true>(const char*, const ProductParams&, int64_t,
                                                        const DeviceInfo&, const Launch&);

}  // namespace lacuna::cuda
