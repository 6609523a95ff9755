// Chunks of logits, compared with the tokens that came next.
#include "engine/prompt_scorer.h"

#include <algorithm>

#include "core/check.h"

namespace lacuna {

PromptScorer::Lists PromptScorer::carve(Workspace& arena) const {
  Lists lists;
  lists.rows = arena.take<int32_t>(rows_max_);
  lists.next = arena.take<int32_t>(rows_max_);
  lists.logprobs = arena.take<float>(rows_max_);
  lists.top_first = arena.take<float>(rows_max_);
  lists.top_ids = arena.take<int32_t>(rows_max_ * kTopLogprobsMax);
  lists.top_scores = arena.take<float>(rows_max_ * kTopLogprobsMax);
  return lists;
}

Result<std::unique_ptr<PromptScorer>> PromptScorer::create(const Runtime* runtime, Device device,
                                                           void* stream, int64_t rows_max) {
  auto scorer = std::unique_ptr<PromptScorer>(new PromptScorer(runtime, device, stream, rows_max));
  Workspace all;
  scorer->carve(all);
  Workspace inputs;
  inputs.take<int32_t>(rows_max);
  inputs.take<int32_t>(rows_max);
  scorer->inputs_bytes_ = inputs.used_bytes();
  LACUNA_ASSIGN_OR_RETURN(scorer->host_, PinnedMemory::allocate(runtime, all.used_bytes()));
  if (device.kind != DeviceKind::kCpu) {
    LACUNA_ASSIGN_OR_RETURN(scorer->memory_,
                            DeviceMemory::allocate(runtime, device.index, all.used_bytes()));
  }
  return scorer;
}

PromptScorer::Lists PromptScorer::device_lists() const {
  Workspace arena(memory_.data() == nullptr ? host_.data() : memory_.data(), host_.bytes());
  return carve(arena);
}

Status PromptScorer::rate(OpRunner& run, TensorView logits, const Lists& lists,
                          int32_t num_top) const {
  const int64_t count = logits.shape[0];
  const auto list = [&](auto* data, int64_t n) { return view_of(data, {n}, device_); };
  LACUNA_RETURN_IF_ERROR(run(TokenLogprobsArgs{
      .logits = logits, .ids = list(lists.next, count), .out = list(lists.logprobs, count)}));
  if (num_top == 0) {
    return ok_status();
  }
  return rank_tokens(run, logits, num_top,
                     {.top_ids = list(lists.top_ids, count * kTopLogprobsMax),
                      .top_scores = list(lists.top_scores, count * kTopLogprobsMax),
                      .top_first = list(lists.top_first, count)});
}

Status PromptScorer::measure(OpRunner& run, TensorView logits) const {
  return rate(run, logits, device_lists(), kTopLogprobsMax);
}

Status PromptScorer::score(OpRunner& run, DeepseekV32& model, TensorView logits, int64_t first_row,
                           std::span<const int32_t> next, int32_t num_top, const Tap& tap,
                           RequestRecord* record) {
  const bool is_host = device_.kind == DeviceKind::kCpu;
  const int64_t vocab = logits.shape[1];
  char* const host_data = static_cast<char*>(host_.data());
  char* const device_data = is_host ? host_data : static_cast<char*>(memory_.data());
  Workspace host_arena(host_data, host_.bytes());
  const Lists host = carve(host_arena);
  const Lists lists = device_lists();
  const int64_t total = static_cast<int64_t>(next.size());
  for (int64_t begin = 0; begin < total; begin += rows_max_) {
    const int64_t count = std::min(rows_max_, total - begin);
    for (int64_t i = 0; i < count; ++i) {
      host.rows[i] = static_cast<int32_t>(first_row + begin + i);
      host.next[i] = next[begin + i];
    }
    if (!is_host) {
      LACUNA_RETURN_IF_ERROR(runtime_->copy(device_data, host_data, inputs_bytes_, stream_));
    }
    const TensorView out = logits.slice(0, 0, count);
    LACUNA_RETURN_IF_ERROR(
        model.logits(run, view_of(static_cast<const int32_t*>(lists.rows), {count}, device_), out));
    if (tap) {
      tap("prompt_logits", -1, out);
    }
    LACUNA_RETURN_IF_ERROR(rate(run, out, lists, num_top));
    if (!is_host) {
      LACUNA_RETURN_IF_ERROR(runtime_->copy(host_data + inputs_bytes_, device_data + inputs_bytes_,
                                            host_.bytes() - inputs_bytes_, stream_));
      LACUNA_RETURN_IF_ERROR(runtime_->synchronize(device_.index, stream_));
      ++num_waits_;
    }
    record->prompt_logprobs.insert(record->prompt_logprobs.end(), host.logprobs,
                                   host.logprobs + count);
    const DrawOutputs ranked = {.top_ids = view_of(host.top_ids, {count * kTopLogprobsMax}),
                                .top_scores = view_of(host.top_scores, {count * kTopLogprobsMax}),
                                .top_first = view_of(host.top_first, {count})};
    for (int64_t i = 0; num_top > 0 && i < count; ++i) {
      record->prompt_top_logprobs.push_back(ranked_tokens(ranked, i, vocab, num_top, num_top));
    }
  }
  return ok_status();
}

}  // namespace lacuna
