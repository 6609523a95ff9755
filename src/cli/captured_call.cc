// Everything of a call goes through one list of its pointers: captured, and uploaded for a replay.
#include "cli/captured_call.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "core/check.h"
#include "core/device_memory.h"
#include "ops/dispatch.h"
#include "tests/reference/element.h"
#include "tests/support/compare.h"

namespace lacuna::cli {
namespace {

int64_t span_bytes(const ConstTensorView& tensor) {
  if (tensor.num_elements() == 0) {
    return 0;
  }
  int64_t last = 0;
  for (int d = 0; d < tensor.rank; ++d) {
    last += (tensor.shape[d] - 1) * tensor.strides[d];
  }
  return (last + 1) * size_bytes(tensor.dtype);
}

int64_t span_bytes(const KvCacheView& kv) {
  return kv.num_blocks == 0
             ? 0
             : (kv.num_blocks - 1) * kv.block_stride_bytes + kv.block_size * kv.row_bytes;
}

// Calls move(pointer, bytes) for each input of the call, to be replaced by a pointer to a copy.
template <class Move>
Status move_inputs(SparseMlaArgs* args, Device to, Move&& move) {
  for (ConstTensorView* tensor :
       {&args->q, &args->q_nope, &args->q_rope, &args->indices, &args->block_table,
        &args->request_ids, &args->valid_counts, &args->sink, &args->schedule}) {
    if (!tensor->empty()) {
      LACUNA_ASSIGN_OR_RETURN(tensor->data, move(tensor->data, span_bytes(*tensor)));
      tensor->device = to;
    }
  }
  LACUNA_ASSIGN_OR_RETURN(args->kv.data, move(args->kv.data, span_bytes(args->kv)));
  args->kv.device = to;
  for (const float** scale : {&args->kv.latent_scale, &args->kv.rope_scale}) {
    if (*scale != nullptr) {
      LACUNA_ASSIGN_OR_RETURN(void* moved, move(*scale, sizeof(float)));
      *scale = static_cast<const float*>(moved);
    }
  }
  return ok_status();
}

// Every bit of a value that is not written is set: a NaN.
constexpr int kUnwritten = 0xff;

template <class Visit>
void for_each_element(const ConstTensorView& tensor, Visit&& visit) {
  for (int64_t t = 0; t < tensor.shape[0]; ++t) {
    for (int64_t h = 0; h < tensor.shape[1]; ++h) {
      for (int64_t i = 0; i < (tensor.rank > 2 ? tensor.shape[2] : 1); ++i) {
        visit(reference::element_address(tensor, t, h, i));
      }
    }
  }
}

}  // namespace

void grow(double* largest, double error) {
  if (std::isnan(error) || error > *largest) {
    *largest = error;
  }
}

Result<CapturedCall> CapturedCall::copy(const SparseMlaArgs& args, const Runtime* runtime) {
  CapturedCall call;
  call.args_ = args;
  const auto fetch = [&](const void* from, int64_t bytes) -> Result<void*> {
    std::vector<char>& image = call.images_.emplace_back(std::max<int64_t>(bytes, 1));
    LACUNA_RETURN_IF_ERROR(runtime->copy(image.data(), from, bytes, nullptr));
    return static_cast<void*>(image.data());
  };
  LACUNA_RETURN_IF_ERROR(move_inputs(&call.args_, {}, fetch));
  LACUNA_ASSIGN_OR_RETURN(call.args_.out.data, fetch(args.out.data, span_bytes(args.out)));
  call.args_.out.device = {};
  call.args_.lse = {};
  call.args_.max_logits = {};
  LACUNA_RETURN_IF_ERROR(runtime->synchronize(args.out.device.index, nullptr));
  call.expected_ = reference::sparse_mla(call.args_);
  return call;
}

int64_t CapturedCall::num_keys() const {
  int64_t keys = 0;
  for (int64_t t = 0; t < num_rows(); ++t) {
    const int64_t width = args_.indices.shape[1];
    const int64_t count =
        std::clamp<int64_t>(reference::integer_or(args_.valid_counts, t, width), 0, width);
    for (int64_t c = 0; c < count; ++c) {
      keys += reference::integer(args_.indices, t, c) >= 0 ? 1 : 0;
    }
  }
  return keys;
}

Result<Replay> CapturedCall::replay(const Context& context, const DeviceInfo& device,
                                    const Runtime* runtime, const std::string& kernel) const {
  const Device where = device.device;
  SparseMlaArgs args = args_;
  args.kernel = kernel;
  std::vector<DeviceMemory> memory;
  const auto allocate = [&](int64_t bytes) -> Result<void*> {
    LACUNA_ASSIGN_OR_RETURN(
        DeviceMemory piece,
        DeviceMemory::allocate(runtime, where.index, std::max<int64_t>(bytes, 1)));
    memory.push_back(std::move(piece));
    return memory.back().data();
  };
  LACUNA_RETURN_IF_ERROR(
      move_inputs(&args, where, [&](const void* from, int64_t bytes) -> Result<void*> {
        LACUNA_ASSIGN_OR_RETURN(void* to, allocate(bytes));
        LACUNA_RETURN_IF_ERROR(runtime->copy(to, from, bytes, nullptr));
        return to;
      }));
  const int64_t rows = num_rows();
  const int64_t heads = args.out.shape[1];
  const int64_t out_bytes = span_bytes(args.out);
  const int64_t lse_bytes = rows * heads * static_cast<int64_t>(sizeof(float));
  LACUNA_ASSIGN_OR_RETURN(args.out.data, allocate(out_bytes));
  args.out.device = where;
  LACUNA_ASSIGN_OR_RETURN(void* lse_data, allocate(lse_bytes));
  args.lse = make_view<void>(lse_data, DType::kFloat32, {rows, heads}, where);
  LACUNA_RETURN_IF_ERROR(runtime->fill_bytes(args.out.data, kUnwritten, out_bytes, nullptr));
  LACUNA_RETURN_IF_ERROR(runtime->fill_bytes(lse_data, kUnwritten, lse_bytes, nullptr));

  Replay result;
  const Explanation explanation = explain(context, args);
  if (!explanation.status.ok()) {
    for (const KernelRefusal& refusal : explanation.refusals) {
      if (refusal.kernel == kernel) {
        result.refusal = refusal.reason;
      }
    }
    return result.refusal.empty() ? Result<Replay>(explanation.status) : Result<Replay>(result);
  }
  LACUNA_ASSIGN_OR_RETURN(const int64_t workspace_bytes, lacuna::workspace_bytes(context, args));
  LACUNA_ASSIGN_OR_RETURN(void* workspace, allocate(workspace_bytes));
  LACUNA_RETURN_IF_ERROR(
      sparse_mla(context, args, {.workspace = workspace, .workspace_bytes = workspace_bytes}));
  std::vector<char> out(out_bytes);
  std::vector<float> lse(rows * heads);
  LACUNA_RETURN_IF_ERROR(runtime->copy(out.data(), args.out.data, out_bytes, nullptr));
  LACUNA_RETURN_IF_ERROR(runtime->copy(lse.data(), lse_data, lse_bytes, nullptr));
  LACUNA_RETURN_IF_ERROR(runtime->synchronize(where.index, nullptr));

  ConstTensorView out_view = args.out;
  out_view.data = out.data();
  out_view.device = {};
  const ConstTensorView lse_view = view_of(static_cast<const float*>(lse.data()), {rows, heads});
  const DType query = args.q.empty() ? args.q_nope.dtype : args.q.dtype;
  const bool exact = query == DType::kFloat32 && args.out.dtype == DType::kFloat32 &&
                     args.kv.layout.format == KvFormat::kLatentF32;
  result.error =
      testing::compare_attention(out_view, lse_view, {}, expected_, args.kv.layout.d_qk(), exact);
  double squares = 0;
  double squared_errors = 0;
  result.bit_equal = true;
  size_t at = 0;
  const int64_t element_bytes = size_bytes(out_view.dtype);
  for_each_element(out_view, [&](const char* value) {
    const double want = expected_.out[at++];
    const double difference = reference::decode(out_view.dtype, value) - want;
    grow(&result.max_abs, std::fabs(difference));
    squares += want * want;
    squared_errors += difference * difference;
    const char* engines = static_cast<const char*>(args_.out.data) + (value - out.data());
    result.bit_equal = result.bit_equal && std::memcmp(value, engines, element_bytes) == 0;
  });
  result.rel_frobenius =
      squares == 0 ? std::sqrt(squared_errors) : std::sqrt(squared_errors / squares);
  for (size_t i = 0; i < lse.size(); ++i) {
    if (static_cast<double>(lse[i]) != expected_.lse[i]) {
      grow(&result.lse_error, std::fabs(lse[i] - expected_.lse[i]));
    }
  }
  return result;
}

}  // namespace lacuna::cli
