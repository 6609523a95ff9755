// Umbrella include of the kernel library. The engine is apart: lacuna/engine.h.
#pragma once

#include "lacuna/attention.h"
#include "lacuna/context.h"
#include "lacuna/dtype.h"
#include "lacuna/indexer.h"
#include "lacuna/kv_cache.h"
#include "lacuna/kv_layout.h"
#include "lacuna/status.h"
#include "lacuna/tensor.h"
