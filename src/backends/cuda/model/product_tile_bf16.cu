// The instances of product_tile.cuh over bf16 weights.
#include "backends/cuda/model/product_tile.cuh"

namespace lacuna::cuda {

template Status launch_product_tiles<Bf16, 16, false>(const char*, const ProductParams&, int64_t,
                                                      const DeviceInfo&, const Launch&);
template Status launch_product_tiles<Bf16, 16, true>(const char*, const ProductParams&, int64_t,
                                                     const DeviceInfo&, const Launch&);
template Status launch_product_tiles<Bf16, 64, false>(const char*, const ProductParams&, int64_t,
                                                      const DeviceInfo&, const Launch&);
template Status launch_product_tiles<Bf16, 64, true>(const char*, const ProductParams&, int64_t,
                                                     const DeviceInfo&, const Launch&);
template Status launch_product_tiles<Bf16, 128, false>(const char*, const ProductParams&, int64_t,
                                                       const DeviceInfo&, const Launch&);
template Status launch_product_tiles<Bf16, 128, true>(const char*, const ProductParams&, int64_t,
                                                      const DeviceInfo&, const Launch&);

}  // namespace lacuna::cuda
