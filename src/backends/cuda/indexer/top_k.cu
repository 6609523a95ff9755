// Exact top-k of rows of scores. Three ways, one result: a block of threads a row; several blocks a
// row, in five launches, for few long rows; and a sort by id when columns have ids of their own.
#include <algorithm>
#include <bit>

#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/indexer/select.cuh"
#include "backends/cuda/kernels.h"
#include "backends/cuda/launch.h"

namespace lacuna::cuda {
namespace {

// ---- One block a row ----

// Two blocks hide each other's barriers; with half of the registers sm_80 would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kRowBlocksPerSm = 1;
#else
constexpr int kRowBlocksPerSm = 2;
#endif

struct RowScratch {
  HistogramScratch histogram;
  ListScratch list;
};

template <class T>
__device__ Threshold row_threshold(const RowVectors<T>& vectors, uint32_t wanted,
                                   HistogramScratch& histogram) {
  RadixState state = {0, wanted, 0};
  for (int i = 0; i < kSelectPasses; ++i) {
    const RadixPass pass = radix_pass(i);
    clear_bins(histogram);
    vectors.template visit<kSelectThreads>(
        0, vectors.num_vectors(), static_cast<int>(threadIdx.x), [&](uint32_t key) {
          if (in_prefix(key, state.prefix, pass)) {
            atomicAdd(&histogram.bins[key >> pass.shift & ((1u << pass.bits) - 1)], 1u);
          }
        });
    __syncthreads();
    state = find_bin(histogram.bins, pass, state, histogram);
    if (state.count == state.wanted && state.prefix > 0) {
      return {state.prefix - 1, 0, wanted};  // the whole bin is chosen
    }
  }
  return threshold_of(state, wanted);
}

template <class T>
__device__ void select_whole_row(const SelectParams& p, const SelectRow& row, RowScratch& scratch) {
  clear_mask(p.outputs, row.t, 0, 1);
  __syncthreads();
  if (row.all) {
    const int64_t chosen = row.count * p.kpool;
    finish_entries(p, row, 0, chosen, chosen, true);
    return;
  }
  const RowVectors<T> vectors(p, row);
  const Threshold threshold =
      row_threshold(vectors, static_cast<uint32_t>(p.k / p.kpool), scratch.histogram);
  uint32_t above = 0;
  uint32_t equal = 0;
  list_chosen(p, row, vectors, 0, vectors.num_vectors(), threshold, &above, &equal, scratch.list);
  __syncthreads();
  const int64_t chosen = int64_t{threshold.chosen()} * p.kpool;
  finish_entries(p, row, 0, chosen, chosen, true);
}

template <class T>
__global__ __launch_bounds__(kSelectThreads,
                             kRowBlocksPerSm) void select_rows_kernel(const SelectParams p) {
  __shared__ RowScratch scratch;
  select_whole_row<T>(p, select_row(p, blockIdx.x), scratch);
}

// ---- Several blocks a row ----

// A row shorter than this is one block's work: the launches would cost more than they save.
constexpr int64_t kSplitColumnsMin = 16384;
constexpr int64_t kColumnsPerSplit = 4096;

// What the blocks of a row share: a histogram a pass, and what was found before each pass.
struct SplitRow {
  uint32_t bins[kSelectPasses][kSelectBins];
  RadixState found[kSelectPasses + 1];
};
constexpr int64_t kSplitRowWords = sizeof(SplitRow) / 4;

struct SplitParams {
  SplitRow* rows;    // [T]
  uint32_t* counts;  // [T, splits, 2]: keys above the threshold and equal to it
  uint32_t splits;
};

struct Split {
  uint32_t idx;
  uint32_t active;     // blocks that share the row; at most 1: block 0 did all of it
  int64_t begin, end;  // vectors
};

template <class T>
__device__ Split split_of(const SelectRow& row, const RowVectors<T>& vectors,
                          const SplitParams& split) {
  Split s;
  s.idx = blockIdx.x % split.splits;
  const uint32_t wanted =
      static_cast<uint32_t>((row.count + kColumnsPerSplit - 1) / kColumnsPerSplit);
  s.active = row.all || row.count < kSplitColumnsMin ? 1
             : wanted < split.splits                 ? wanted
                                                     : split.splits;
  const Range range = even_range(static_cast<uint32_t>(vectors.num_vectors()), s.idx, s.active);
  s.begin = range.begin;
  s.end = range.end;
  return s;
}

// Pass 0 also does the whole of the short rows.
template <class T, int kPass>
__global__ __launch_bounds__(kSelectThreads,
                             1) void split_histogram_kernel(const SelectParams p,
                                                            const SplitParams split) {
  __shared__ RowScratch scratch;
  pdl_launch_dependents();
  pdl_wait();
  const SelectRow row = select_row(p, blockIdx.x / split.splits);
  const RowVectors<T> vectors(p, row);
  const Split s = split_of(row, vectors, split);
  if (s.idx >= s.active) {
    return;
  }
  if (s.active == 1) {
    if (kPass == 0) {
      select_whole_row<T>(p, row, scratch);
    }
    return;
  }
  SplitRow& shared = split.rows[row.t];
  HistogramScratch& histogram = scratch.histogram;
  constexpr RadixPass pass = radix_pass(kPass);
  RadixState state = {0, static_cast<uint32_t>(p.k / p.kpool), 0};
  if constexpr (kPass == 0) {
    clear_mask(p.outputs, row.t, s.idx, s.active);
  } else {
    if constexpr (kPass > 1) {
      state = shared.found[kPass - 1];
    }
    state = find_bin(shared.bins[kPass - 1], radix_pass(kPass - 1), state, histogram);
    if (s.idx == 0 && threadIdx.x == 0) {
      shared.found[kPass] = state;
    }
  }
  clear_bins(histogram);
  vectors.template visit<kSelectThreads>(
      s.begin, s.end, static_cast<int>(threadIdx.x), [&](uint32_t key) {
        if (kPass == 0 || in_prefix(key, state.prefix, pass)) {
          atomicAdd(&histogram.bins[key >> pass.shift & ((1u << pass.bits) - 1)], 1u);
        }
      });
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kSelectBins; i += kSelectThreads) {
    if (histogram.bins[i] != 0) {
      atomicAdd(&shared.bins[kPass][i], histogram.bins[i]);
    }
  }
}

template <class T>
__global__ __launch_bounds__(kSelectThreads, 1) void split_count_kernel(const SelectParams p,
                                                                        const SplitParams split) {
  __shared__ HistogramScratch histogram;
  __shared__ uint32_t sums[kSelectWarps];
  pdl_launch_dependents();
  pdl_wait();
  const SelectRow row = select_row(p, blockIdx.x / split.splits);
  const RowVectors<T> vectors(p, row);
  const Split s = split_of(row, vectors, split);
  if (s.idx >= s.active || s.active == 1) {
    return;
  }
  SplitRow& shared = split.rows[row.t];
  constexpr int kLast = kSelectPasses - 1;
  const RadixState state =
      find_bin(shared.bins[kLast], radix_pass(kLast), shared.found[kLast], histogram);
  if (s.idx == 0 && threadIdx.x == 0) {
    shared.found[kSelectPasses] = state;
  }
  const Threshold threshold = threshold_of(state, static_cast<uint32_t>(p.k / p.kpool));
  uint32_t above = 0;
  uint32_t equal = 0;
  vectors.template visit<kSelectThreads>(s.begin, s.end, static_cast<int>(threadIdx.x),
                                         [&](uint32_t key) {
                                           above += key > threshold.key ? 1 : 0;
                                           equal += key == threshold.key ? 1 : 0;
                                         });
  above = reduce_block<kSelectThreads>(above, Sum{}, sums);
  equal = reduce_block<kSelectThreads>(equal, Sum{}, sums);
  if (threadIdx.x == 0) {
    uint32_t* counts = split.counts + 2 * (row.t * split.splits + s.idx);
    counts[0] = above;
    counts[1] = equal;
  }
}

template <class T>
__global__ __launch_bounds__(kSelectThreads, 1) void split_list_kernel(const SelectParams p,
                                                                       const SplitParams split) {
  __shared__ ListScratch list;
  __shared__ uint32_t sums[kSelectWarps];
  pdl_wait();
  const SelectRow row = select_row(p, blockIdx.x / split.splits);
  const RowVectors<T> vectors(p, row);
  const Split s = split_of(row, vectors, split);
  if (s.idx >= s.active || s.active == 1) {
    return;
  }
  const Threshold threshold =
      threshold_of(split.rows[row.t].found[kSelectPasses], static_cast<uint32_t>(p.k / p.kpool));
  const uint32_t* counts = split.counts + 2 * row.t * split.splits;
  uint32_t above = 0;
  uint32_t equal = 0;
  for (int64_t i = threadIdx.x; i < s.idx; i += kSelectThreads) {
    above += counts[2 * i];
    equal += counts[2 * i + 1];
  }
  above = reduce_block<kSelectThreads>(above, Sum{}, sums);
  equal = reduce_block<kSelectThreads>(equal, Sum{}, sums);
  const auto entries = [&] {
    return int64_t{above + (equal < threshold.ties ? equal : threshold.ties)} * p.kpool;
  };
  const int64_t begin = entries();
  if (counts[2 * s.idx] != 0 || (counts[2 * s.idx + 1] != 0 && equal < threshold.ties)) {
    list_chosen(p, row, vectors, s.begin, s.end, threshold, &above, &equal, list);
  }
  __syncthreads();
  finish_entries(p, row, begin, entries(), int64_t{threshold.chosen()} * p.kpool,
                 s.idx == s.active - 1);
}

// ---- Columns with ids ----

struct CandidateParams {
  uint64_t* sorted;  // [T, capacity], or null: in shared memory
  int64_t capacity;  // a power of two
};

// The part of a candidate's order that ties are broken by: the lowest id is the largest.
__device__ uint32_t tie_key(int32_t id) { return 0x7fffffffu - static_cast<uint32_t>(id); }

// The wanted-th largest of the keys that `key_of` gives for columns [0, n).
template <class KeyOf>
__device__ RadixState radix_select(int64_t n, uint32_t wanted, HistogramScratch& histogram,
                                   const KeyOf& key_of) {
  RadixState state = {0, wanted, 0};
  for (int i = 0; i < kSelectPasses; ++i) {
    const RadixPass pass = radix_pass(i);
    clear_bins(histogram);
    for (int64_t j = threadIdx.x; j < n; j += kSelectThreads) {
      const uint32_t key = key_of(j);
      if (in_prefix(key, state.prefix, pass)) {
        atomicAdd(&histogram.bins[key >> pass.shift & ((1u << pass.bits) - 1)], 1u);
      }
    }
    __syncthreads();
    state = find_bin(histogram.bins, pass, state, histogram);
  }
  return state;
}

__device__ void sort_block(uint64_t* values, uint32_t count) {
  for (uint32_t size = 2; size != 0 && size <= count; size *= 2) {
    for (uint32_t stride = size / 2; stride > 0; stride /= 2) {
      for (uint32_t i = threadIdx.x; i < count / 2; i += kSelectThreads) {
        const uint32_t low = 2 * i - (i & (stride - 1));
        const uint64_t a = values[low];
        const uint64_t b = values[low + stride];
        if ((a > b) == ((low & size) == 0)) {
          values[low] = b;
          values[low + stride] = a;
        }
      }
      __syncthreads();
    }
  }
}

template <class T>
__global__ __launch_bounds__(kSelectThreads,
                             1) void select_candidates_kernel(const SelectParams p,
                                                              const CandidateParams candidates) {
  extern __shared__ uint64_t in_shared[];
  __shared__ HistogramScratch histogram;
  __shared__ uint32_t num_chosen;
  const SelectRow row = select_row(p, blockIdx.x);
  const T* x = static_cast<const T*>(p.logits) + row.t * p.logits_row_stride + row.begin;
  const int32_t* ids = p.candidate_ids.row(row.t) + row.begin;
  uint64_t* sorted =
      candidates.sorted == nullptr ? in_shared : candidates.sorted + row.t * candidates.capacity;
  // Of all candidates any is above the threshold.
  const auto key_of = [&](int64_t j) {
    return ids[j] < 0 ? 0u : row.all ? 1u : ordered_key(load_float(x[j]));
  };
  Threshold threshold = {};
  uint32_t tie_threshold = 0;
  if (!row.all) {
    const uint32_t wanted = static_cast<uint32_t>(p.k);
    const RadixState state = radix_select(row.count, wanted, histogram, key_of);
    threshold = threshold_of(state, wanted);
    if (threshold.ties != 0 && threshold.ties < state.count) {
      tie_threshold = radix_select(row.count, threshold.ties, histogram, [&](int64_t j) {
                        return key_of(j) == threshold.key ? tie_key(ids[j]) : 0u;
                      }).prefix;
    }
  }
  clear_mask(p.outputs, row.t, 0, 1);
  if (threadIdx.x == 0) {
    num_chosen = 0;
  }
  __syncthreads();
  for (int64_t j = threadIdx.x; j < row.count; j += kSelectThreads) {
    const uint32_t key = key_of(j);
    if (key > threshold.key ||
        (threshold.ties != 0 && key == threshold.key && tie_key(ids[j]) >= tie_threshold)) {
      const uint32_t slot = atomicAdd(&num_chosen, 1u);
      // Ids that are not unique after all must not write past the end.
      if (slot < candidates.capacity) {
        sorted[slot] = static_cast<uint64_t>(ids[j]) << 32 | static_cast<uint64_t>(j);
      }
    }
  }
  __syncthreads();
  const int64_t chosen = num_chosen < candidates.capacity ? num_chosen : candidates.capacity;
  uint32_t padded = 1;
  while (padded < chosen) {
    padded *= 2;
  }
  for (int64_t i = chosen + threadIdx.x; i < padded; i += kSelectThreads) {
    sorted[i] = ~uint64_t{0};
  }
  __syncthreads();
  sort_block(sorted, padded);
  const int32_t request = p.outputs.rows ? p.outputs.request_ids(row.t) : -1;
  const int64_t width = widest_list(p.outputs);
  for (int64_t e = threadIdx.x; e < (width > chosen ? width : chosen); e += kSelectThreads) {
    const uint64_t entry = e < chosen ? sorted[e] : 0;
    write_entry(p, row, request, e, e < chosen ? static_cast<int64_t>(entry >> 32) : -1,
                static_cast<int64_t>(entry & 0xffffffffu));
  }
  if (p.outputs.counts && threadIdx.x == 0) {
    p.outputs.counts(row.t) = static_cast<int32_t>(chosen);
  }
}

// ---- Host ----

// Rows that are few enough to be split: with more, a block a row fills the device.
int64_t split_rows_max(const DeviceInfo& device) { return device.sm_count / 2; }

int64_t splits_of(int64_t num_rows, int64_t num_columns, const DeviceInfo& device) {
  if (num_rows > split_rows_max(device) || num_columns < kSplitColumnsMin) {
    return 1;
  }
  // All blocks run at once: a second wave would double the time of every launch.
  return std::min(device.sm_count / num_rows, ceil_div(num_columns, kColumnsPerSplit));
}

// Bytes of shared memory that the chosen candidates of a row may take.
constexpr int64_t kSortSmemBytes = 32 * 1024;

int64_t sort_capacity(int64_t num_columns, int64_t k) {
  const int64_t most = std::clamp<int64_t>(std::min(num_columns, k), 1, int64_t{1} << 31);
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(most)));
}

template <class T>
Status launch_split(const SelectParams& params, const SelectScratch& scratch, int64_t splits,
                    const DeviceInfo& device, const Launch& where) {
  constexpr const char* kName = "cuda/top_k";
  const SplitParams split = {.rows = reinterpret_cast<SplitRow*>(scratch.split_rows),
                             .counts = scratch.split_rows + params.num_rows * kSplitRowWords,
                             .splits = static_cast<uint32_t>(splits)};
  LACUNA_RETURN_IF_ERROR(cuda_status(cudaSetDevice(device.device.index), kName));
  LACUNA_RETURN_IF_ERROR(cuda_status(
      cudaMemsetAsync(split.rows, 0, static_cast<size_t>(params.num_rows) * sizeof(SplitRow),
                      static_cast<cudaStream_t>(where.stream)),
      kName));
  LaunchShape shape = {.grid = dim3(static_cast<unsigned>(params.num_rows * splits)),
                       .block = dim3(kSelectThreads)};
  LACUNA_RETURN_IF_ERROR(
      launch(kName, split_histogram_kernel<T, 0>, device, where, shape, params, split));
  shape.pdl = true;
  LACUNA_RETURN_IF_ERROR(
      launch(kName, split_histogram_kernel<T, 1>, device, where, shape, params, split));
  LACUNA_RETURN_IF_ERROR(
      launch(kName, split_histogram_kernel<T, 2>, device, where, shape, params, split));
  LACUNA_RETURN_IF_ERROR(launch(kName, split_count_kernel<T>, device, where, shape, params, split));
  return launch(kName, split_list_kernel<T>, device, where, shape, params, split);
}

template <class T>
Status select_rows_typed(const SelectParams& params, const SelectScratch& scratch,
                         const DeviceInfo& device, const Launch& where) {
  const LaunchShape shape = {.grid = dim3(static_cast<unsigned>(params.num_rows)),
                             .block = dim3(kSelectThreads)};
  if (params.candidate_ids) {
    const int64_t capacity = sort_capacity(params.num_columns, params.k);
    LaunchShape sorting = shape;
    sorting.smem_bytes = scratch.sorted == nullptr ? 8 * capacity : 0;
    return launch("cuda/top_k", select_candidates_kernel<T>, device, where, sorting, params,
                  CandidateParams{scratch.sorted, capacity});
  }
  const int64_t splits = splits_of(params.num_rows, params.num_columns, device);
  if (splits > 1) {
    return launch_split<T>(params, scratch, splits, device, where);
  }
  return launch("cuda/top_k", select_rows_kernel<T>, device, where, shape, params);
}

SelectScratch top_k_scratch(const TopKArgs& args, Workspace& workspace, const DeviceInfo& device) {
  return take_select_scratch(workspace, args.logits.shape[0], args.logits.shape[1], args.k,
                             !args.candidate_ids.empty(), device);
}

int64_t top_k_workspace(const TopKArgs& args, const DeviceInfo& device) {
  Workspace workspace;
  top_k_scratch(args, workspace, device);
  return workspace.used_bytes();
}

Status run_top_k(const TopKArgs& args, const DeviceInfo& device, const Launch& where) {
  Workspace workspace(where.workspace, where.workspace_bytes);
  SelectParams params = {.logits = args.logits.data,
                         .dtype = args.logits.dtype,
                         .logits_row_stride = args.logits.strides[0],
                         .num_rows = args.logits.shape[0],
                         .num_columns = args.logits.shape[1],
                         .row_starts = strided1<const int32_t>(args.row_starts),
                         .lengths = strided1<const int32_t>(args.lengths),
                         .length_max = std::numeric_limits<int64_t>::max(),
                         .candidate_ids = strided2<const int32_t>(args.candidate_ids),
                         .k = args.k,
                         .kpool = args.kpool,
                         .outputs = select_outputs(args.outputs)};
  return select_rows(params, top_k_scratch(args, workspace, device), device, where);
}

}  // namespace

SelectOutputs select_outputs(const SelectionOutputs& outputs) {
  return {.indices = strided2<int32_t>(outputs.indices),
          .rows = strided2<int32_t>(outputs.rows),
          .scores = strided2<float>(outputs.scores),
          .indices_width = outputs.indices.shape[1],
          .rows_width = outputs.rows.shape[1],
          .scores_width = outputs.scores.shape[1],
          .counts = strided1<int32_t>(outputs.counts),
          .request_ids = strided1<const int32_t>(outputs.request_ids),
          .positions_to_rows = positions_to_rows(outputs.block_table, outputs.num_blocks,
                                                 std::max<int64_t>(outputs.block_size, 1),
                                                 outputs.block_stride_rows),
          .mask = strided2<int32_t>(outputs.mask),
          .mask_words = outputs.mask.shape[1],
          .mask_stride = std::max(outputs.mask.strides[0], outputs.mask.shape[1])};
}

SelectScratch take_select_scratch(Workspace& workspace, int64_t num_rows, int64_t num_columns,
                                  int64_t k, bool candidate_ids, const DeviceInfo& device) {
  SelectScratch scratch;
  if (candidate_ids) {
    const int64_t capacity = sort_capacity(num_columns, k);
    if (8 * capacity > kSortSmemBytes) {
      int64_t count = 0;
      if (__builtin_mul_overflow(num_rows, capacity, &count)) {
        count = std::numeric_limits<int64_t>::max();
      }
      scratch.sorted = workspace.take<uint64_t>(count);
    }
  } else if (num_columns >= kSplitColumnsMin) {
    // More rows than that are not split; two counts for each of their blocks.
    const int64_t rows = std::min(num_rows, split_rows_max(device));
    scratch.split_rows =
        workspace.take<uint32_t>(rows * kSplitRowWords + 2 * int64_t{device.sm_count});
  }
  return scratch;
}

Status select_rows(const SelectParams& params, const SelectScratch& scratch,
                   const DeviceInfo& device, const Launch& where) {
  return params.dtype == DType::kBFloat16
             ? select_rows_typed<Bf16>(params, scratch, device, where)
             : select_rows_typed<float>(params, scratch, device, where);
}

const Kernel<TopKArgs> kTopK = {.name = "cuda/top_k",
                                .supports = supports_all<TopKArgs>,
                                .workspace_bytes = top_k_workspace,
                                .run = run_top_k};

}  // namespace lacuna::cuda
