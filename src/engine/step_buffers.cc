// One layout, carved over the host's side and over the device's.
#include "engine/step_buffers.h"

#include <algorithm>

#include "core/check.h"

namespace lacuna {
namespace {

template <class T>
void write(const std::vector<T>& list, T* to) {
  std::copy(list.begin(), list.end(), to);
}

}  // namespace

StepSizes step_sizes(const Batch& batch, const AttentionPlan& plan, int64_t draw_rows,
                     int64_t adjustments) {
  return {.rows = batch.num_rows(),
          .requests = batch.num_requests(),
          .table_width = batch.table_width,
          .draw_rows = draw_rows,
          .mha_entries = static_cast<int64_t>(plan.mha_starts.size()),
          .mha_bounds = static_cast<int64_t>(plan.cu_seqlens_k.size()),
          .adjustments = adjustments};
}

StepBuffers::Lists StepBuffers::carve_lists(Workspace& arena, const StepSizes& sizes) {
  Lists lists;
  lists.slot_mapping = arena.take<int64_t>(sizes.rows);
  for (int32_t** list : {&lists.token_ids, &lists.sources, &lists.positions, &lists.request_ids,
                         &lists.visible_lengths}) {
    *list = arena.take<int32_t>(sizes.rows);
  }
  for (int32_t** list : {&lists.mha_request_ids, &lists.mha_starts, &lists.mha_lengths}) {
    *list = arena.take<int32_t>(sizes.mha_entries);
  }
  lists.cu_seqlens_q = arena.take<int32_t>(sizes.mha_bounds);
  lists.cu_seqlens_k = arena.take<int32_t>(sizes.mha_bounds);
  for (float** list : {&lists.temperature, &lists.top_p, &lists.min_p, &lists.uniform}) {
    *list = arena.take<float>(sizes.draw_rows);
  }
  for (int32_t** list : {&lists.logits_rows, &lists.top_k, &lists.forced, &lists.forced_sources}) {
    *list = arena.take<int32_t>(sizes.draw_rows);
  }
  lists.block_table = arena.take<int32_t>(sizes.requests * sizes.table_width);
  // Last, so that the other lists lie where they lie whatever is edited.
  lists.adjust_rows = arena.take<int32_t>(sizes.adjustments);
  lists.adjust_ids = arena.take<int32_t>(sizes.adjustments);
  lists.adjust_repetition = arena.take<float>(sizes.adjustments);
  lists.adjust_add = arena.take<float>(sizes.adjustments);
  return lists;
}

StepBuffers::Results StepBuffers::carve_results(Workspace& arena) const {
  const int64_t rows = capacity_.draw_rows;
  Results results;
  results.ids = arena.take<int32_t>(rows);
  results.logprobs = arena.take<float>(rows);
  results.top_first = arena.take<float>(rows);
  results.top_ids = arena.take<int32_t>(rows * kTopLogprobsMax);
  results.top_scores = arena.take<float>(rows * kTopLogprobsMax);
  return results;
}

Result<std::unique_ptr<StepBuffers>> StepBuffers::create(const Runtime* runtime, Device device,
                                                         void* stream, const StepSizes& capacity) {
  auto buffers = std::unique_ptr<StepBuffers>(new StepBuffers(runtime, device, stream, capacity));
  Workspace lists;
  carve_lists(lists, capacity);
  buffers->inputs_bytes_ = lists.used_bytes();
  Workspace results;
  buffers->carve_results(results);
  buffers->results_bytes_ = results.used_bytes();
  Workspace without_top;
  without_top.take<int32_t>(capacity.draw_rows);
  without_top.take<float>(capacity.draw_rows);
  buffers->results_bytes_without_top_ = without_top.used_bytes();
  const int sides = buffers->is_host() ? 1 : kSides;
  for (int i = 0; i < sides; ++i) {
    Side& side = buffers->sides_[i];
    LACUNA_ASSIGN_OR_RETURN(side.inputs, PinnedMemory::allocate(runtime, buffers->inputs_bytes_));
    LACUNA_ASSIGN_OR_RETURN(side.results, PinnedMemory::allocate(runtime, buffers->results_bytes_));
    LACUNA_ASSIGN_OR_RETURN(side.sent, make_event(runtime, device.index));
    LACUNA_ASSIGN_OR_RETURN(side.fetched, make_event(runtime, device.index));
  }
  if (!buffers->is_host()) {
    LACUNA_ASSIGN_OR_RETURN(buffers->inputs_,
                            DeviceMemory::allocate(runtime, device.index, buffers->inputs_bytes_));
    LACUNA_ASSIGN_OR_RETURN(buffers->results_,
                            DeviceMemory::allocate(runtime, device.index, buffers->results_bytes_));
  }
  Workspace scratch;
  scratch.take<int32_t>(capacity.rows);
  scratch.take<float>(capacity.adjustments);
  LACUNA_ASSIGN_OR_RETURN(buffers->scratch_,
                          DeviceMemory::allocate(runtime, device.index, scratch.used_bytes()));
  return buffers;
}

int64_t StepBuffers::bytes() const { return inputs_bytes_ + results_bytes_ + scratch_.bytes(); }

void* StepBuffers::device_inputs() const {
  return is_host() ? sides_[0].inputs.data() : inputs_.data();
}

void* StepBuffers::device_results() const {
  return is_host() ? sides_[0].results.data() : results_.data();
}

StepTensors StepBuffers::tensors(const StepSizes& sizes) const {
  Workspace arena(device_inputs(), inputs_bytes_);
  const Lists lists = carve_lists(arena, sizes);
  const auto list = [&](const auto* data, int64_t count) {
    return view_of(data, {count}, device_);
  };
  StepTensors tensors;
  tensors.batch = {.token_ids = list(lists.token_ids, sizes.rows),
                   .positions = list(lists.positions, sizes.rows),
                   .request_ids = list(lists.request_ids, sizes.rows),
                   .visible_lengths = list(lists.visible_lengths, sizes.rows),
                   .slot_mapping = list(lists.slot_mapping, sizes.rows),
                   .block_table = view_of(static_cast<const int32_t*>(lists.block_table),
                                          {sizes.requests, sizes.table_width}, device_),
                   .logits_rows = list(lists.logits_rows, sizes.draw_rows),
                   .mha_request_ids = list(lists.mha_request_ids, sizes.mha_entries),
                   .mha_starts = list(lists.mha_starts, sizes.mha_entries),
                   .mha_lengths = list(lists.mha_lengths, sizes.mha_entries),
                   .cu_seqlens_q = list(lists.cu_seqlens_q, sizes.mha_bounds),
                   .cu_seqlens_k = list(lists.cu_seqlens_k, sizes.mha_bounds)};
  tensors.sources = list(lists.sources, sizes.rows);
  tensors.picked_tokens = view_of(static_cast<int32_t*>(scratch_.data()), {sizes.rows}, device_);
  tensors.draw = {.temperature = list(lists.temperature, sizes.draw_rows),
                  .top_p = list(lists.top_p, sizes.draw_rows),
                  .min_p = list(lists.min_p, sizes.draw_rows),
                  .uniform = list(lists.uniform, sizes.draw_rows),
                  .top_k = list(lists.top_k, sizes.draw_rows),
                  .forced = list(lists.forced, sizes.draw_rows),
                  .forced_sources = list(lists.forced_sources, sizes.draw_rows),
                  .adjust_rows = list(lists.adjust_rows, sizes.adjustments),
                  .adjust_ids = list(lists.adjust_ids, sizes.adjustments),
                  .adjust_repetition = list(lists.adjust_repetition, sizes.adjustments),
                  .adjust_add = list(lists.adjust_add, sizes.adjustments)};
  return tensors;
}

DrawOutputs StepBuffers::outputs(int64_t first_row, int64_t rows, int64_t adjustments) const {
  Workspace arena(device_results(), results_bytes_);
  const Results results = carve_results(arena);
  Workspace scratch(scratch_.data(), scratch_.bytes());
  scratch.take<int32_t>(capacity_.rows);
  float* saved = scratch.take<float>(capacity_.adjustments);
  const int64_t top = kTopLogprobsMax;
  return {.ids = view_of(results.ids + first_row, {rows}, device_),
          .logprobs = view_of(results.logprobs + first_row, {rows}, device_),
          .adjust_saved = view_of(saved, {adjustments}, device_),
          .top_ids = view_of(results.top_ids + first_row * top, {rows * top}, device_),
          .top_scores = view_of(results.top_scores + first_row * top, {rows * top}, device_),
          .top_first = view_of(results.top_first + first_row, {rows}, device_)};
}

ConstTensorView StepBuffers::drawn() const { return outputs(0, capacity_.draw_rows, 0).ids; }

void StepBuffers::write_adjustments(const Lists& lists, const DrawLists& draw,
                                    const DrawGroup& group) {
  for (int64_t i = 0; i < group.num_adjustments; ++i) {
    const int64_t from = group.first_adjustment + i;
    lists.adjust_rows[i] = draw.adjust_rows[from] - static_cast<int32_t>(group.first_row);
    lists.adjust_ids[i] = draw.adjust_ids[from];
    lists.adjust_repetition[i] = draw.adjust_repetition[from];
    lists.adjust_add[i] = draw.adjust_add[from];
  }
}

Status StepBuffers::send(int side_idx, const Batch& batch, const AttentionPlan& plan,
                         const DrawLists& draw, const DrawGroup& group) {
  Side& side = sides_[is_host() ? 0 : side_idx];
  const StepSizes sizes = step_sizes(batch, plan, draw.num_rows(), group.num_adjustments);
  LACUNA_CHECK(draw.num_rows() == static_cast<int64_t>(batch.logits_rows.size()));
  LACUNA_RETURN_IF_ERROR(runtime_->await_event(side.sent.get()));
  Workspace arena(side.inputs.data(), inputs_bytes_);
  const Lists lists = carve_lists(arena, sizes);
  write(batch.slot_mapping, lists.slot_mapping);
  write(batch.token_ids, lists.token_ids);
  if (batch.token_sources.empty()) {
    std::fill_n(lists.sources, sizes.rows, -1);
  } else {
    write(batch.token_sources, lists.sources);
  }
  write(batch.positions, lists.positions);
  write(batch.request_ids, lists.request_ids);
  write(batch.visible_lengths, lists.visible_lengths);
  write(plan.mha_request_ids, lists.mha_request_ids);
  write(plan.mha_starts, lists.mha_starts);
  write(plan.mha_lengths, lists.mha_lengths);
  write(plan.cu_seqlens_q, lists.cu_seqlens_q);
  write(plan.cu_seqlens_k, lists.cu_seqlens_k);
  write(draw.temperature, lists.temperature);
  write(draw.top_p, lists.top_p);
  write(draw.min_p, lists.min_p);
  write(draw.uniform, lists.uniform);
  write(batch.logits_rows, lists.logits_rows);
  write(draw.top_k, lists.top_k);
  write(draw.forced, lists.forced);
  write(draw.forced_sources, lists.forced_sources);
  write(batch.block_table, lists.block_table);
  write_adjustments(lists, draw, group);
  if (is_host()) {
    return ok_status();
  }
  LACUNA_RETURN_IF_ERROR(
      runtime_->copy(inputs_.data(), side.inputs.data(), arena.used_bytes(), stream_));
  return runtime_->record_event(side.sent.get(), stream_);
}

Status StepBuffers::send_adjustments(int side_idx, const StepSizes& sizes, const DrawLists& draw,
                                     const DrawGroup& group) {
  Side& side = sides_[is_host() ? 0 : side_idx];
  StepSizes others = sizes;
  others.adjustments = 0;
  Workspace before;
  carve_lists(before, others);
  others.adjustments = group.num_adjustments;
  LACUNA_RETURN_IF_ERROR(runtime_->await_event(side.sent.get()));
  Workspace arena(side.inputs.data(), inputs_bytes_);
  write_adjustments(carve_lists(arena, others), draw, group);
  if (is_host()) {
    return ok_status();
  }
  const int64_t begin = before.used_bytes();
  LACUNA_RETURN_IF_ERROR(runtime_->copy(static_cast<char*>(inputs_.data()) + begin,
                                        static_cast<const char*>(side.inputs.data()) + begin,
                                        arena.used_bytes() - begin, stream_));
  return runtime_->record_event(side.sent.get(), stream_);
}

Status StepBuffers::fetch(int side_idx, bool with_top) {
  if (is_host()) {
    return ok_status();
  }
  Side& side = sides_[side_idx];
  LACUNA_RETURN_IF_ERROR(runtime_->copy(side.results.data(), results_.data(),
                                        with_top ? results_bytes_ : results_bytes_without_top_,
                                        stream_));
  return runtime_->record_event(side.fetched.get(), stream_);
}

Result<DrawOutputs> StepBuffers::await(int side_idx) {
  const Side& side = sides_[is_host() ? 0 : side_idx];
  LACUNA_RETURN_IF_ERROR(runtime_->await_event(side.fetched.get()));
  Workspace arena(side.results.data(), results_bytes_);
  const Results results = carve_results(arena);
  const int64_t rows = capacity_.draw_rows;
  return DrawOutputs{.ids = view_of(results.ids, {rows}),
                     .logprobs = view_of(results.logprobs, {rows}),
                     .top_ids = view_of(results.top_ids, {rows * kTopLogprobsMax}),
                     .top_scores = view_of(results.top_scores, {rows * kTopLogprobsMax}),
                     .top_first = view_of(results.top_first, {rows})};
}

}  // namespace lacuna
