// What the kernels of moe_experts share: rows grouped by expert on the device (the host does not
// know the routing), one output a (row, slot) pair, and their sum in the order of the slots.
#pragma once

#include "backends/cuda/model/product_tile.h"
#include "core/workspace.h"

namespace lacuna::cuda {

struct MoeShape {
  int64_t rows;
  int64_t width;   // D
  int64_t hidden;  // F
  int64_t chosen;  // entries a row
  int64_t experts;

  explicit MoeShape(const MoeExpertsArgs& args)
      : rows(args.x.shape[0]),
        width(args.x.shape[1]),
        hidden(args.experts[0].gate.shape[0]),
        chosen(args.ids.shape[1]),
        experts(static_cast<int64_t>(args.experts.size())) {}

  // Rows that are worked on together: their outputs, one an entry, are kept.
  int64_t chunk_rows() const;
  // Tiles that the entries of `rows` rows can make.
  int64_t tiles_max(int64_t rows, int64_t tile_rows) const;
};

// In the workspace, for one chunk.
struct MoeScratch {
  int32_t* entries;  // [rows * chosen], entry of each slot; an entry is row * chosen + place
  ExpertTile* tiles;
  int32_t* num_tiles;
  void* hidden;     // [slots, F] of x's dtype
  float* products;  // [rows * chosen, D] by entry
  int64_t used_bytes;
};

MoeScratch carve_moe(const MoeExpertsArgs& args, Workspace workspace);

// Equal distances between the experts' matrices, in elements.
struct ExpertStrides {
  int64_t gate = 0;
  int64_t up = 0;
  int64_t down = 0;
  int64_t gate_scale = 0;
  int64_t up_scale = 0;
  int64_t down_scale = 0;
};

// Refuses experts at other distances, and what no kernel here can run.
Result<ExpertStrides> expert_strides(const MoeExpertsArgs& args);

// Groups rows [begin, begin + rows) by expert and cuts each expert's into tiles. Ids that name no
// expert are left out. Which slot an entry gets is left to the hardware; no result depends on it.
Status launch_route(const MoeExpertsArgs& args, int64_t begin, int64_t rows, int64_t tile_rows,
                    const MoeScratch& scratch, const DeviceInfo& device, const Launch& where);

// out = sum over places of weight * product, in the order of the places.
Status launch_combine(const MoeExpertsArgs& args, int64_t begin, int64_t rows,
                      const MoeScratch& scratch, const DeviceInfo& device, const Launch& where);

}  // namespace lacuna::cuda
