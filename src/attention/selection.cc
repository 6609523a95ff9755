// Lists that the indexer did not choose.
#include "attention/selection.h"

#include <algorithm>

#include "core/check.h"
#include "core/rng.h"

namespace lacuna {

void choose_keys(const SelectionSource& source, int layer, int64_t k,
                 std::span<const int32_t> visible_lengths, TensorView positions,
                 TensorView counts) {
  const int64_t width = positions.shape[1];
  std::vector<int32_t> list;
  for (int64_t t = 0; t < positions.shape[0]; ++t) {
    const int32_t visible = visible_lengths[t];
    list.clear();
    switch (source.kind) {
      case SelectionSource::Kind::kIndexer:
      case SelectionSource::Kind::kDense:
        LACUNA_CHECK(false);  // neither is a list that is made here
        break;
      case SelectionSource::Kind::kWindow:
        for (int32_t p = std::max<int32_t>(0, static_cast<int32_t>(visible - k)); p < visible;
             ++p) {
          list.push_back(p);
        }
        break;
      case SelectionSource::Kind::kRandom: {
        // Selection sampling (Knuth, TAOCP 2, algorithm S): each k-subset is equally likely.
        int64_t wanted = std::min<int64_t>(k, visible);
        for (int32_t p = 0; p < visible && wanted > 0; ++p) {
          const float u =
              philox_uniform(source.seed, static_cast<uint64_t>(p),
                             static_cast<uint64_t>(layer) << 32 | static_cast<uint32_t>(visible));
          if (u * static_cast<float>(visible - p) < static_cast<float>(wanted)) {
            list.push_back(p);
            --wanted;
          }
        }
        break;
      }
      case SelectionSource::Kind::kGiven: {
        const auto found = source.given.find(layer);
        const int64_t row = visible - 1;
        if (found != source.given.end() && row < source.given_positions) {
          const int64_t given_width =
              static_cast<int64_t>(found->second.size()) / source.given_positions;
          for (int64_t c = 0; c < given_width; ++c) {
            const int32_t p = found->second[row * given_width + c];
            if (p >= 0 && p < visible) {
              list.push_back(p);
            }
          }
        }
        break;
      }
    }
    const int64_t count = std::min<int64_t>(static_cast<int64_t>(list.size()), width);
    int32_t* out = positions.as<int32_t>() + t * positions.strides[0];
    std::copy_n(list.begin(), count, out);
    std::fill(out + count, out + width, -1);
    counts.as<int32_t>()[t * counts.strides[0]] = static_cast<int32_t>(count);
  }
}

Result<std::unique_ptr<ListWriter>> ListWriter::create(const Runtime* runtime, Device device,
                                                       void* stream, int64_t rows_max,
                                                       int64_t width) {
  auto writer = std::unique_ptr<ListWriter>(new ListWriter());
  writer->runtime_ = runtime;
  writer->stream_ = stream;
  LACUNA_ASSIGN_OR_RETURN(writer->positions_,
                          PinnedMemory::allocate(runtime, 4 * rows_max * width));
  LACUNA_ASSIGN_OR_RETURN(writer->counts_, PinnedMemory::allocate(runtime, 4 * rows_max));
  LACUNA_ASSIGN_OR_RETURN(writer->copied_, make_event(runtime, device.index));
  return writer;
}

Status ListWriter::write(const SelectionSource& source, int layer, int64_t k,
                         std::span<const int32_t> visible_lengths, TensorView positions,
                         TensorView counts) {
  const int64_t rows = positions.shape[0];
  const int64_t width = positions.shape[1];
  LACUNA_CHECK(positions.is_contiguous() && counts.is_contiguous() &&
               4 * rows * width <= positions_.bytes());
  LACUNA_RETURN_IF_ERROR(runtime_->await_event(copied_.get()));
  choose_keys(source, layer, k, visible_lengths,
              view_of(static_cast<int32_t*>(positions_.data()), {rows, width}),
              view_of(static_cast<int32_t*>(counts_.data()), {rows}));
  LACUNA_RETURN_IF_ERROR(
      runtime_->copy(positions.data, positions_.data(), 4 * rows * width, stream_));
  LACUNA_RETURN_IF_ERROR(runtime_->copy(counts.data, counts_.data(), 4 * rows, stream_));
  return runtime_->record_event(copied_.get(), stream_);
}

}  // namespace lacuna
