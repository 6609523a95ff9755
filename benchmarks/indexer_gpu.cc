// Keys lie in blocks of 64 tokens, and a row's blocks are scattered over a pool: each call takes
// the blocks that come next in a shuffled order, so that none is met again before all others were.
// The logits that top_k reads are index_logits' own.
#include "benchmarks/indexer_gpu.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "benchmarks/stream_floor.h"
#include "core/check.h"
#include "core/rng.h"

namespace lacuna::bench {
namespace {

constexpr int64_t kDim = 128;
constexpr int64_t kBlockSize = kIndexerBlockSize;
constexpr int64_t kPoolBytes = int64_t{4} << 30;
constexpr int64_t kFilledBlocks = 256;
// Sets of inputs of a shape: so many that they come from memory again when their turn comes again.
constexpr int64_t kSetBytes = int64_t{256} << 20;
constexpr int64_t kSetsMax = 60;

int64_t sets_of(int64_t bytes) {
  return std::clamp((kSetBytes + bytes - 1) / bytes, int64_t{1}, kSetsMax);
}

bool has(const std::vector<std::string>& ops, const char* op) {
  return std::find(ops.begin(), ops.end(), op) != ops.end();
}

struct Shape {
  int64_t rows;
  int64_t context;
  bool prefill;

  int64_t num_requests() const { return prefill ? 1 : rows; }
  int64_t visible(int64_t row) const { return prefill ? context - rows + row + 1 : context; }
  // Keys that the rows which see more than `skipped` of them see together.
  double pairs(int64_t skipped) const {
    double sum = 0;
    for (int64_t row = 0; row < rows; ++row) {
      sum += visible(row) > skipped ? static_cast<double>(visible(row)) : 0;
    }
    return sum;
  }
};

class Bench {
 public:
  Bench(GpuBench gpu, const IndexerGrid& grid, const TellLine& tell)
      : gpu_(std::move(gpu)), grid_(grid), tell_(tell) {}

  // The cache and the queries' type of the measurements that follow.
  Status set_keys(const std::string& dtype);
  // The rows and their keys.
  Status set_shape(const Shape& shape);
  Status measure_scores(int64_t heads);
  Status measure_top_k(int64_t k);
  Status measure_translation(int64_t k);

 private:
  template <class T>
  TensorView view(const DeviceMemory& memory, std::initializer_list<int64_t> shape,
                  int64_t set = 0) const {
    TensorView view = view_of(static_cast<T*>(memory.data()), shape, gpu_.where());
    view.data = static_cast<T*>(memory.data()) + set * view.num_elements();
    return view;
  }
  ConstTensorView tables(int64_t set) const {
    return view<int32_t>(tables_, {shape_.num_requests(), shape_.context / kBlockSize},
                         set % num_sets_);
  }
  Result<DeviceMemory> random_query(int64_t heads) {
    const int64_t count = shape_.rows * heads * kDim;
    return query_fp8_ ? gpu_.random_fp8(count, 11) : gpu_.random_bf16(count, 11);
  }
  IndexLogitsArgs logits_args(int64_t heads, const DeviceMemory& query, const DeviceMemory& weights,
                              const TensorView& logits, int64_t set) const;
  // Streams of `bytes`, call after call from another place of `memory`.
  std::vector<Enqueue> streams(const DeviceMemory& memory, int64_t bytes) const;
  Status measure(const char* op, const Subject& subject, const std::vector<Enqueue>& floors,
                 BenchLine line);

  GpuBench gpu_;
  const IndexerGrid& grid_;
  const TellLine& tell_;
  std::string dtype_;
  bool query_fp8_ = false;
  DeviceMemory pool_;
  KvCacheView keys_;
  std::vector<int32_t> block_order_;
  Shape shape_ = {};
  int64_t num_sets_ = 0;
  DeviceMemory request_ids_;
  DeviceMemory lengths_;
  DeviceMemory tables_;  // [sets, requests, blocks]
};

Status Bench::set_keys(const std::string& dtype) {
  dtype_ = dtype;
  query_fp8_ = dtype == "fp8";
  const KvLayout layout = dtype == "bf16" ? KvLayout::index_bf16(kDim) : KvLayout::index_fp8(kDim);
  const int64_t block_bytes = kBlockSize * layout.record_bytes();
  const int64_t num_blocks = kPoolBytes / block_bytes;
  pool_ = DeviceMemory();
  LACUNA_ASSIGN_OR_RETURN(pool_, gpu_.allocate(num_blocks * block_bytes));
  keys_ = paged_rows(pool_.data(), layout, num_blocks, kBlockSize, gpu_.where());
  constexpr int64_t kFilled = kFilledBlocks * kBlockSize;
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory values, gpu_.random_f32(kFilled * kDim, 3));
  std::vector<int64_t> slots(kFilled);
  std::iota(slots.begin(), slots.end(), 0);
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory device_slots, gpu_.upload(slots));
  LACUNA_RETURN_IF_ERROR(append_index_keys(gpu_.context(),
                                           {.keys = view<float>(values, {kFilled, kDim}),
                                            .slot_mapping = view<int64_t>(device_slots, {kFilled}),
                                            .kv = keys_},
                                           {.stream = gpu_.stream()}));
  LACUNA_RETURN_IF_ERROR(
      gpu_.repeat(pool_.data(), kFilledBlocks * block_bytes, num_blocks * block_bytes));
  LACUNA_RETURN_IF_ERROR(gpu_.synchronize());
  block_order_.resize(num_blocks);
  std::iota(block_order_.begin(), block_order_.end(), 0);
  for (int64_t i = num_blocks - 1; i > 0; --i) {
    const uint64_t other =
        philox4x32(5, static_cast<uint64_t>(i))[0] % static_cast<uint64_t>(i + 1);
    std::swap(block_order_[i], block_order_[static_cast<int64_t>(other)]);
  }
  return ok_status();
}

Status Bench::set_shape(const Shape& shape) {
  shape_ = shape;
  const int64_t keys = shape.num_requests() * shape.context;
  num_sets_ = sets_of(keys * keys_.row_bytes);
  std::vector<int32_t> request_ids(shape.rows);
  std::vector<int32_t> lengths(shape.rows);
  for (int64_t row = 0; row < shape.rows; ++row) {
    request_ids[row] = static_cast<int32_t>(shape.prefill ? 0 : row);
    lengths[row] = static_cast<int32_t>(shape.visible(row));
  }
  std::vector<int32_t> tables(num_sets_ * keys / kBlockSize);
  for (size_t i = 0; i < tables.size(); ++i) {
    tables[i] = block_order_[i % block_order_.size()];
  }
  LACUNA_ASSIGN_OR_RETURN(request_ids_, gpu_.upload(request_ids));
  LACUNA_ASSIGN_OR_RETURN(lengths_, gpu_.upload(lengths));
  LACUNA_ASSIGN_OR_RETURN(tables_, gpu_.upload(tables));
  return ok_status();
}

std::vector<Enqueue> Bench::streams(const DeviceMemory& memory, int64_t bytes) const {
  const int64_t step = (bytes + 255) / 256 * 256;  // as memory is aligned
  const int64_t places = std::max<int64_t>(1, memory.bytes() / step);
  std::vector<Enqueue> streams;
  for (const StreamShape& shape : stream_shapes()) {
    streams.push_back([this, &memory, bytes, step, places, shape](int64_t i, void* stream) {
      return read_stream(static_cast<const char*>(memory.data()) + i % places * step,
                         std::min(bytes, memory.bytes()), shape, gpu_.device(), stream);
    });
  }
  return streams;
}

Status Bench::measure(const char* op, const Subject& subject, const std::vector<Enqueue>& floors,
                      BenchLine line) {
  line.op = std::string(op) + (shape_.prefill ? "_prefill" : "");
  line.rows = shape_.rows;
  line.context = shape_.context;
  LACUNA_ASSIGN_OR_RETURN(const int64_t nodes, gpu_.nodes_for(subject));
  return gpu_.measure({subject}, floors, nodes, line, tell_);
}

IndexLogitsArgs Bench::logits_args(int64_t heads, const DeviceMemory& query,
                                   const DeviceMemory& weights, const TensorView& logits,
                                   int64_t set) const {
  return {.q = query_fp8_ ? view<Fp8E4M3>(query, {shape_.rows, heads, kDim})
                          : view<Bf16>(query, {shape_.rows, heads, kDim}),
          .head_weights = view<float>(weights, {shape_.rows, heads}),
          .keys = keys_,
          .request_ids = view<int32_t>(request_ids_, {shape_.rows}),
          .visible_lengths = view<int32_t>(lengths_, {shape_.rows}),
          .block_table = tables(set),
          .logits = logits,
          .kernel = grid_.kernel};
}

Status Bench::measure_scores(int64_t heads) {
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory query, random_query(heads));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory weights, gpu_.random_f32(shape_.rows * heads, 13));
  const double rows = static_cast<double>(shape_.rows);
  const int64_t key_bytes = shape_.num_requests() * shape_.context * keys_.row_bytes;
  const double query_bytes =
      rows * static_cast<double>(heads) * (static_cast<double>(kDim) * (query_fp8_ ? 1 : 2) + 4);
  const double pair_flops = 2.0 * static_cast<double>(heads) * static_cast<double>(kDim);
  // The keys of a prompt are few against the products with all of its rows.
  const std::vector<Enqueue> floors =
      shape_.prefill ? std::vector<Enqueue>{} : streams(pool_, key_bytes);
  const double bytes_read = static_cast<double>(key_bytes) + query_bytes;
  if (has(grid_.ops, "index_logits")) {
    LACUNA_ASSIGN_OR_RETURN(const DeviceMemory logits,
                            gpu_.allocate(4 * shape_.rows * shape_.context));
    LACUNA_ASSIGN_OR_RETURN(const Subject subject, gpu_.subject([&](int64_t i) {
      return logits_args(heads, query, weights, view<float>(logits, {shape_.rows, shape_.context}),
                         i);
    }));
    LACUNA_RETURN_IF_ERROR(
        measure("index_logits", subject, floors,
                {.heads = heads,
                 .d_qk = kDim,
                 .dtype = dtype_,
                 .bytes = bytes_read + 4 * rows * static_cast<double>(shape_.context),
                 .flops = pair_flops * shape_.pairs(0)}));
  }
  if (!has(grid_.ops, "select_keys")) {
    return ok_status();
  }
  for (const int64_t k : grid_.topk) {
    LACUNA_ASSIGN_OR_RETURN(const DeviceMemory lists, gpu_.allocate(8 * shape_.rows * k));
    LACUNA_ASSIGN_OR_RETURN(const DeviceMemory counts, gpu_.allocate(4 * shape_.rows));
    LACUNA_ASSIGN_OR_RETURN(const Subject subject, gpu_.subject([&](int64_t i) {
      const IndexLogitsArgs scores = logits_args(heads, query, weights, {}, i);
      return SelectKeysArgs{.q = scores.q,
                            .head_weights = scores.head_weights,
                            .keys = keys_,
                            .request_ids = scores.request_ids,
                            .visible_lengths = scores.visible_lengths,
                            .block_table = scores.block_table,
                            .visible_length_max = shape_.context,
                            .k = k,
                            .outputs = {.indices = view<int32_t>(lists, {shape_.rows, k}),
                                        .counts = view<int32_t>(counts, {shape_.rows}),
                                        .rows = view<int32_t>(lists, {shape_.rows, k}, 1),
                                        .block_table = scores.block_table,
                                        .num_blocks = keys_.num_blocks,
                                        .block_size = kBlockSize},
                            .kernel = grid_.kernel};
    }));
    LACUNA_RETURN_IF_ERROR(measure("select_keys", subject, floors,
                                   {.heads = heads,
                                    .d_qk = kDim,
                                    .topk = k,
                                    .dtype = dtype_,
                                    .bytes = bytes_read + rows * (8 * static_cast<double>(k) + 4),
                                    .flops = pair_flops * shape_.pairs(k)}));
  }
  return ok_status();
}

Status Bench::measure_top_k(int64_t k) {
  constexpr int64_t kHeads = 64;
  const int64_t elements = shape_.rows * shape_.context;
  const int64_t num_sets = sets_of(4 * elements);
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory logits, gpu_.allocate(4 * elements * num_sets));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory query, random_query(kHeads));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory weights, gpu_.random_f32(shape_.rows * kHeads, 13));
  for (int64_t set = 0; set < num_sets; ++set) {
    IndexLogitsArgs args = logits_args(
        kHeads, query, weights, view<float>(logits, {shape_.rows, shape_.context}, set), set);
    args.kernel = {};
    LACUNA_RETURN_IF_ERROR(index_logits(gpu_.context(), args, {.stream = gpu_.stream()}));
  }
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory lists, gpu_.allocate(4 * shape_.rows * k));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory counts, gpu_.allocate(4 * shape_.rows));
  LACUNA_ASSIGN_OR_RETURN(const Subject subject, gpu_.subject([&](int64_t i) {
    return TopKArgs{.logits = view<float>(logits, {shape_.rows, shape_.context}, i % num_sets),
                    .lengths = view<int32_t>(lengths_, {shape_.rows}),
                    .k = k,
                    .outputs = {.indices = view<int32_t>(lists, {shape_.rows, k}),
                                .counts = view<int32_t>(counts, {shape_.rows})},
                    .kernel = grid_.kernel};
  }));
  const double read = 4 * shape_.pairs(k);
  return measure(
      "top_k", subject, streams(logits, static_cast<int64_t>(4 * shape_.pairs(0))),
      {.topk = k,
       .dtype = "f32",
       .bytes = read + static_cast<double>(shape_.rows) * (4 * static_cast<double>(k) + 4)});
}

Status Bench::measure_translation(int64_t k) {
  const int64_t entries = shape_.rows * k;
  const int64_t num_sets = sets_of(8 * entries);
  // Ascending positions, as top_k writes them: one of every context / k.
  std::vector<int32_t> positions(num_sets * entries);
  for (int64_t i = 0; i < std::ssize(positions); ++i) {
    const int64_t begin = i % k * shape_.context / k;
    const int64_t end = (i % k + 1) * shape_.context / k;
    positions[i] = static_cast<int32_t>(begin + philox4x32(17, static_cast<uint64_t>(i))[0] %
                                                    std::max<int64_t>(1, end - begin));
  }
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory lists, gpu_.upload(positions));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory rows, gpu_.allocate(4 * entries));
  LACUNA_ASSIGN_OR_RETURN(const Subject subject, gpu_.subject([&](int64_t i) {
    return TranslateIndicesArgs{.indices = view<int32_t>(lists, {shape_.rows, k}, i % num_sets),
                                .request_ids = view<int32_t>(request_ids_, {shape_.rows}),
                                .block_table = tables(i),
                                .num_blocks = keys_.num_blocks,
                                .block_size = kBlockSize,
                                .rows = view<int32_t>(rows, {shape_.rows, k}),
                                .kernel = grid_.kernel};
  }));
  return measure("translate_indices", subject, streams(lists, 4 * entries),
                 {.topk = k, .dtype = "i32", .bytes = 8 * static_cast<double>(entries)});
}

}  // namespace

Status measure_indexer(GpuBench gpu, const IndexerGrid& grid, const TellLine& tell) {
  std::vector<Shape> shapes;
  for (const int64_t context : grid.contexts) {
    for (const bool prefill : {false, true}) {
      for (const int64_t rows : prefill ? grid.prefill_rows : grid.rows) {
        if (rows > 0) {
          shapes.push_back({.rows = rows, .context = context, .prefill = prefill});
        }
      }
    }
  }
  Bench bench(std::move(gpu), grid, tell);
  for (size_t d = 0; d < grid.dtypes.size(); ++d) {
    LACUNA_RETURN_IF_ERROR(bench.set_keys(grid.dtypes[d]));
    for (const Shape& shape : shapes) {
      LACUNA_RETURN_IF_ERROR(bench.set_shape(shape));
      for (const int64_t heads : grid.heads) {
        LACUNA_RETURN_IF_ERROR(bench.measure_scores(heads));
      }
      // The rest knows neither heads nor types of keys.
      for (const int64_t k : grid.topk) {
        if (d == 0 && has(grid.ops, "top_k")) {
          LACUNA_RETURN_IF_ERROR(bench.measure_top_k(k));
        }
        if (d == 0 && has(grid.ops, "translate_indices")) {
          LACUNA_RETURN_IF_ERROR(bench.measure_translation(k));
        }
      }
    }
  }
  return ok_status();
}

std::string indexer_method(const GpuMethod& method) {
  return method_text(method, "2 to 60 calls, at least 2 ms",
                     "each call has other keys, logits or lists") +
         "; decode rows are requests with keys of their own, rows of _prefill the last ones of one "
         "prompt; floor: the fastest of the kernels that only read as many bytes, in order, taking "
         "turns with the subject: the keys (index_logits, select_keys), the logits (top_k), the "
         "lists (translate_indices); 0 where arithmetic is the bound (_prefill over keys)";
}

}  // namespace lacuna::bench
