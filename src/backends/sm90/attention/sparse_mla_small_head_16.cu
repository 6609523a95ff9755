// The kernel for up to 16 heads.
#include "backends/sm90/attention/sparse_mla_small_head.cuh"

namespace lacuna::sm90 {

template Status launch_small_head<16>(const SmallHeadParams&, const DeviceInfo&, const Launch&);

}  // namespace lacuna::sm90
