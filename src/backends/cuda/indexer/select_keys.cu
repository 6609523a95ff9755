// select_keys: scores of a chunk of rows into workspace, then their selection and translation,
// chunk after chunk. Which rows are scored at all is decided on the device.
#include <algorithm>

#include "backends/cuda/indexer/score.h"
#include "backends/cuda/indexer/select.h"
#include "backends/cuda/kernels.h"
#include "ops/select_keys_bounds.h"

namespace lacuna::cuda {
namespace {

struct Scratch {
  float* logits = nullptr;  // [rows of a chunk, columns]
  SelectScratch select;
  int64_t row_floats = 0;  // whole vectors
  int64_t chunk = 0;       // rows
};

Scratch take_scratch(const SelectKeysArgs& args, const DeviceInfo& device, Workspace& workspace) {
  const int64_t rows = args.q.shape[0];
  const int64_t columns = select_columns_max(args);
  const int64_t cap = select_logits_bytes_max(args);
  Scratch scratch;
  scratch.row_floats = std::max<int64_t>((columns + 3) / 4 * 4, 4);
  scratch.chunk = std::clamp<int64_t>(cap / (4 * scratch.row_floats), 1, rows);
  scratch.logits = workspace.take<float>(select_logits_floats(args, scratch.row_floats));
  scratch.select = take_select_scratch(workspace, rows, columns, args.k, false, device);
  return scratch;
}

int64_t select_keys_workspace(const SelectKeysArgs& args, const DeviceInfo& device) {
  Workspace workspace;
  take_scratch(args, device, workspace);
  return workspace.used_bytes();
}

template <class View>
void slice_rows(View* view, int64_t begin, int64_t count) {
  if (!view->empty()) {
    *view = view->slice(0, begin, count);
  }
}

Status run_select_keys(const SelectKeysArgs& args, const DeviceInfo& device, const Launch& where) {
  const int64_t columns = select_columns_max(args);
  Workspace workspace(where.workspace, where.workspace_bytes);
  const Scratch scratch = take_scratch(args, device, workspace);
  const int64_t num_rows = args.q.shape[0];
  for (int64_t begin = 0; begin < num_rows; begin += scratch.chunk) {
    const int64_t count = std::min(scratch.chunk, num_rows - begin);
    SelectKeysArgs part = args;
    if (part.outputs.request_ids.empty()) {
      part.outputs.request_ids = args.request_ids;
    }
    for (ConstTensorView* view : {&part.q, &part.head_weights, &part.request_ids,
                                  &part.visible_lengths, &part.outputs.request_ids}) {
      slice_rows(view, begin, count);
    }
    for (TensorView* view : {&part.outputs.indices, &part.outputs.scores, &part.outputs.counts,
                             &part.outputs.rows, &part.outputs.mask}) {
      slice_rows(view, begin, count);
    }
    const RowLengths lengths = {.request_ids = strided1<const int32_t>(part.request_ids),
                                .visible_lengths = strided1<const int32_t>(part.visible_lengths),
                                .length_max = args.visible_length_max >= 0
                                                  ? args.visible_length_max
                                                  : columns * args.kpool + args.kpool - 1,
                                .skip_at_most = args.outputs.scores.empty() ? args.k : -1,
                                .kpool = args.kpool};
    TensorView logits = view_of(scratch.logits, {count, columns}, args.keys.device);
    logits.strides[0] = scratch.row_floats;
    if (columns > 0) {
      const ScoreParams params = score_params(part, lengths, logits);
      LACUNA_RETURN_IF_ERROR(score_mma_supports(params).ok()
                                 ? score_mma(params, device, where)
                                 : score_generic(params, device, where));
    }
    const SelectParams params = {.logits = scratch.logits,
                                 .logits_row_stride = scratch.row_floats,
                                 .num_rows = count,
                                 .num_columns = columns,
                                 .lengths = lengths.visible_lengths,
                                 .padding_ids = lengths.request_ids,
                                 .length_max = lengths.length_max,
                                 .k = args.k,
                                 .kpool = args.kpool,
                                 .outputs = select_outputs(part.outputs)};
    LACUNA_RETURN_IF_ERROR(select_rows(params, scratch.select, device, where));
  }
  return ok_status();
}

}  // namespace

const Kernel<SelectKeysArgs> kSelectKeys = {.name = "cuda/select_keys",
                                            .supports = supports_all<SelectKeysArgs>,
                                            .workspace_bytes = select_keys_workspace,
                                            .run = run_select_keys};

}  // namespace lacuna::cuda
