// The kernel for up to 8 heads.
#include "backends/sm90/attention/sparse_mla_small_head.cuh"

namespace lacuna::sm90 {

template Status launch_small_head<8>(const SmallHeadParams&, const DeviceInfo&, const Launch&);

}  // namespace lacuna::sm90
