// Which build this process runs: a hash of its executable.
#pragma once

#include <string>

namespace lacuna::server {

// 64-bit FNV-1a of /proc/self/exe, 16 hexadecimal digits; empty when it cannot be read. Computed at
// the first call.
const std::string& binary_hash();

}  // namespace lacuna::server
