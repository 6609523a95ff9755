// One function a sublayer; each is a list of operations, to be read beside docs/notation.md.
#include "model/deepseek_v32.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/workspace.h"

namespace lacuna {
namespace {

// Hugging Face fixes this eps for the latents' norms and for the indexer's LayerNorm, whatever
// rms_norm_eps says.
constexpr double kLatentNormEps = 1e-6;

TensorView take(Workspace& arena, DType dtype, Device device,
                std::initializer_list<int64_t> shape) {
  int64_t count = 1;
  for (int64_t extent : shape) {
    count *= extent;
  }
  return make_view<void>(arena.take<char>(count * size_bytes(dtype)), dtype, shape, device);
}

TensorView rows_of(const TensorView& buffer, int64_t rows) { return buffer.slice(0, 0, rows); }

// [T, n] seen as [T, heads, n / heads].
TensorView split_heads(const TensorView& tensor, int64_t heads) {
  TensorView view = tensor;
  view.rank = 3;
  view.shape = {tensor.shape[0], heads, tensor.shape[1] / heads};
  view.strides = {tensor.strides[0], tensor.shape[1] / heads, 1};
  return view;
}

// [T, a, b] seen as [T, a * b].
TensorView join_heads(const TensorView& tensor) {
  TensorView view = tensor;
  view.rank = 2;
  view.shape = {tensor.shape[0], tensor.shape[1] * tensor.shape[2]};
  view.strides = {tensor.strides[0], 1};
  return view;
}

}  // namespace

DeepseekV32::DeepseekV32(const ModelConfig& config, ModelWeights weights,
                         const ModelOptions& options)
    : config_(config),
      weights_(std::move(weights)),
      options_(options),
      softmax_scale_(attention_scale(config)) {}

void DeepseekV32::carve(Workspace& arena) {
  constexpr DType kF32 = DType::kFloat32;
  constexpr DType kI32 = DType::kInt32;
  const DType act = options_.dtype;
  const Device device = options_.device;
  const int64_t rows = options_.rows_max;
  const int64_t width = config_.hidden_size;
  const int64_t heads = config_.num_attention_heads;
  const int64_t latent = config_.kv_lora_rank;
  const int64_t rope = config_.qk_rope_head_dim;
  const int64_t d_qk = config_.qk_nope_head_dim + rope;
  const int64_t head_up = config_.qk_nope_head_dim + config_.v_head_dim;
  const int64_t index_heads = config_.index_n_heads;
  const int64_t dim = config_.index_head_dim;
  const int64_t mlp_width =
      std::max(config_.intermediate_size, config_.n_shared_experts * config_.moe_intermediate_size);
  auto f32 = [&](std::initializer_list<int64_t> shape) { return take(arena, kF32, device, shape); };
  auto acts = [&](std::initializer_list<int64_t> shape) { return take(arena, act, device, shape); };
  Buffers& b = buffers_;
  b.hidden = f32({rows, width});
  b.delta = f32({rows, width});
  b.x = acts({rows, width});
  b.q_a = f32({rows, config_.q_lora_rank});
  b.q_latent = acts({rows, config_.q_lora_rank});
  b.q = f32({rows, heads, d_qk});
  b.q_act = acts({rows, heads, d_qk});
  b.kv_a = f32({rows, latent + rope});
  b.latent = acts({rows, latent});
  b.k_rope = acts({rows, 1, rope});
  b.index_k = f32({rows, dim});
  b.index_k_norm = f32({rows, 1, dim});
  b.index_k_act = acts({rows, 1, dim});
  b.index_q = f32({rows, index_heads, dim});
  b.index_q_act = acts({rows, index_heads, dim});
  b.head_weights = f32({rows, index_heads});
  b.positions = take(arena, kI32, device, {rows, config_.index_topk});
  b.rows = take(arena, kI32, device, {rows, config_.index_topk});
  b.counts = take(arena, kI32, device, {rows});
  b.q_absorbed = acts({rows, heads, latent});
  b.attended = acts({rows, heads, latent});
  b.heads_out = acts({rows, heads, config_.v_head_dim});
  b.mha_keys = acts({options_.mha_keys_max, latent + rope});
  b.mha_keys_up = acts({options_.mha_keys_max, heads * head_up});
  b.merged_out = f32({options_.chunked_rows_max, heads, config_.v_head_dim});
  b.merged_lse = f32({options_.chunked_rows_max, heads});
  b.piece_out = f32({options_.chunked_rows_max, heads, config_.v_head_dim});
  b.piece_lse = f32({options_.chunked_rows_max, heads});
  b.mask = take(arena, kI32, device, {options_.mask_words_max});
  b.gate = f32({rows, mlp_width});
  b.up = f32({rows, mlp_width});
  b.mlp_hidden = acts({rows, mlp_width});
  b.router_logits = f32({rows, std::max<int64_t>(1, config_.n_routed_experts)});
  b.expert_ids =
      take(arena, kI32, device, {rows, std::max<int64_t>(1, config_.num_experts_per_tok)});
  b.expert_weights = f32({rows, std::max<int64_t>(1, config_.num_experts_per_tok)});
  b.shared_out = f32({rows, width});
  b.logits_hidden = f32({options_.logits_rows_max, width});
  b.logits_x = acts({options_.logits_rows_max, width});
}

Result<std::unique_ptr<DeepseekV32>> DeepseekV32::create(const Context&, const Runtime* runtime,
                                                         const ModelConfig& config,
                                                         ModelWeights weights,
                                                         const ModelOptions& options) {
  LACUNA_CHECK(options.rows_max > 0 && options.model_len_max > 0 && options.logits_rows_max > 0);
  auto model = std::unique_ptr<DeepseekV32>(new DeepseekV32(config, std::move(weights), options));

  Workspace counting;
  model->carve(counting);
  LACUNA_ASSIGN_OR_RETURN(
      model->buffer_memory_,
      DeviceMemory::allocate(runtime, options.device.index, counting.used_bytes()));
  Workspace arena(model->buffer_memory_.data(), counting.used_bytes());
  model->carve(arena);
  if (options.device.kind != DeviceKind::kCpu) {
    // Rows that pad a graph are computed from what lies here; zeros are finite.
    LACUNA_RETURN_IF_ERROR(
        runtime->fill_bytes(model->buffer_memory_.data(), 0, counting.used_bytes(), nullptr));
    if (options.host_lists) {
      LACUNA_ASSIGN_OR_RETURN(model->list_writer_,
                              ListWriter::create(runtime, options.device, options.stream,
                                                 options.rows_max, config.index_topk));
      model->lists_.writer = model->list_writer_.get();
    }
  }

  // Angles are rounded to f32 before the cosine, as Hugging Face's are: that is what the oracles
  // hold.
  const std::vector<double> frequencies = rope_frequencies(config);
  const int64_t pairs = static_cast<int64_t>(frequencies.size());
  std::vector<float> tables(2 * options.model_len_max * pairs);
  float* cosines = tables.data();
  float* sines = cosines + options.model_len_max * pairs;
  for (int64_t p = 0; p < options.model_len_max; ++p) {
    for (int64_t i = 0; i < pairs; ++i) {
      const float angle = static_cast<float>(p) * static_cast<float>(frequencies[i]);
      cosines[p * pairs + i] = static_cast<float>(std::cos(static_cast<double>(angle)));
      sines[p * pairs + i] = static_cast<float>(std::sin(static_cast<double>(angle)));
    }
  }
  const int64_t table_bytes = static_cast<int64_t>(tables.size() * sizeof(float));
  LACUNA_ASSIGN_OR_RETURN(model->table_memory_,
                          DeviceMemory::allocate(runtime, options.device.index, table_bytes));
  LACUNA_RETURN_IF_ERROR(
      runtime->copy(model->table_memory_.data(), tables.data(), table_bytes, nullptr));
  LACUNA_RETURN_IF_ERROR(runtime->synchronize(options.device.index, nullptr));
  const float* device_tables = static_cast<const float*>(model->table_memory_.data());
  model->cos_table_ = view_of(device_tables, {options.model_len_max, pairs}, options.device);
  model->sin_table_ = view_of(device_tables + options.model_len_max * pairs,
                              {options.model_len_max, pairs}, options.device);
  return model;
}

Status DeepseekV32::form_groups(const PagedKvCache& cache) {
  LACUNA_ASSIGN_OR_RETURN(groups_, form_index_groups(config_.layer_has_indexer, cache));
  return ok_status();
}

Status DeepseekV32::index_keys(OpRunner& run, int layer, const Batch& batch,
                               const BatchTensors& tensors, const AttentionPlan& plan,
                               const PagedKvCache& cache, const SelectionSource& selection,
                               const Tap& tap) {
  const IndexerWeights& w = weights_.layers[layer].indexer;
  const int64_t rows = batch.num_rows();
  const TensorView x = rows_of(buffers_.x, rows);

  // Keys of all rows are written, also where nothing is scored: later steps need them.
  const TensorView k = rows_of(buffers_.index_k, rows);
  const TensorView k_norm = rows_of(buffers_.index_k_norm, rows);
  const TensorView k_act = rows_of(buffers_.index_k_act, rows);
  LACUNA_RETURN_IF_ERROR(
      run(LinearArgs{.x = x, .weight = w.wk.values, .weight_scale = w.wk.scale, .out = k}));
  LACUNA_RETURN_IF_ERROR(run(LayerNormArgs{.x = k,
                                           .weight = w.k_norm_weight,
                                           .bias = w.k_norm_bias,
                                           .eps = kLatentNormEps,
                                           .out = join_heads(k_norm)}));
  LACUNA_RETURN_IF_ERROR(run(RopeArgs{.x = k_norm,
                                      .positions = tensors.positions,
                                      .cos_table = cos_table_,
                                      .sin_table = sin_table_,
                                      .interleaved = config_.indexer_rope_interleave,
                                      .out = k_act}));
  LACUNA_RETURN_IF_ERROR(run(AppendIndexKeysArgs{
      .keys = join_heads(k_act), .slot_mapping = tensors.slot_mapping, .kv = cache.index(layer)}));
  if (tap && !run.measuring()) {
    tap("index_k", layer, join_heads(k_act));
  }
  const int64_t list_rows = plan.num_list_rows;
  if (list_rows == 0) {
    return ok_status();
  }
  const TensorView q = rows_of(buffers_.index_q, list_rows);
  const TensorView q_act = rows_of(buffers_.index_q_act, list_rows);
  const TensorView head_weights = rows_of(buffers_.head_weights, list_rows);
  if (plan.score_keys && selection.kind == SelectionSource::Kind::kIndexer) {
    LACUNA_RETURN_IF_ERROR(run(LinearArgs{.x = rows_of(buffers_.q_latent, list_rows),
                                          .weight = w.wq_b.values,
                                          .weight_scale = w.wq_b.scale,
                                          .out = join_heads(q)}));
    LACUNA_RETURN_IF_ERROR(run(RopeArgs{.x = q,
                                        .positions = tensors.positions.slice(0, 0, list_rows),
                                        .cos_table = cos_table_,
                                        .sin_table = sin_table_,
                                        .interleaved = config_.indexer_rope_interleave,
                                        .out = q_act}));
    LACUNA_RETURN_IF_ERROR(run(LinearArgs{
        .x = rows_of(buffers_.x, list_rows), .weight = w.weights_proj, .out = head_weights}));
    if (tap && !run.measuring()) {
      tap("index_q", layer, q_act);
      tap("index_head_weights", layer, head_weights);
    }
  }
  lists_.positions = rows_of(buffers_.positions, list_rows);
  lists_.counts = rows_of(buffers_.counts, list_rows);
  lists_.rows = rows_of(buffers_.rows, plan.num_mqa_rows);
  lists_.mask = {};
  if (plan.prefill_lane == Lane::kMaskedMha) {
    lists_.mask =
        view_of(buffers_.mask.as<int32_t>(),
                {plan.num_mha_rows(batch), mask_row_words(plan.seqlen_k_max)}, options_.device);
  }
  LACUNA_RETURN_IF_ERROR(select_group_keys(
      run, plan, batch, tensors, {.q = q_act, .head_weights = head_weights}, cache.index(layer),
      cache.latent(layer), selection, layer, config_.index_topk, &lists_));
  if (tap && !run.measuring()) {
    tap("topk", layer, lists_.positions);
  }
  return ok_status();
}

Status DeepseekV32::attention(OpRunner& run, int layer, const Batch& batch,
                              const BatchTensors& tensors, const AttentionPlan& plan,
                              const PagedKvCache& cache, const SelectionSource& selection,
                              const Tap& tap) {
  const LayerWeights& w = weights_.layers[layer];
  const int64_t rows = batch.num_rows();
  const int64_t nope = config_.qk_nope_head_dim;
  const int64_t rope = config_.qk_rope_head_dim;
  const int64_t latent_width = config_.kv_lora_rank;
  const TensorView x = rows_of(buffers_.x, rows);

  const TensorView q_a = rows_of(buffers_.q_a, rows);
  const TensorView q_latent = rows_of(buffers_.q_latent, rows);
  const TensorView q = rows_of(buffers_.q, rows);
  const TensorView q_act = rows_of(buffers_.q_act, rows);
  LACUNA_RETURN_IF_ERROR(
      run(LinearArgs{.x = x, .weight = w.q_a.values, .weight_scale = w.q_a.scale, .out = q_a}));
  LACUNA_RETURN_IF_ERROR(
      run(RmsNormArgs{.x = q_a, .weight = w.q_a_norm, .eps = kLatentNormEps, .out = q_latent}));
  LACUNA_RETURN_IF_ERROR(run(LinearArgs{
      .x = q_latent, .weight = w.q_b.values, .weight_scale = w.q_b.scale, .out = join_heads(q)}));
  LACUNA_RETURN_IF_ERROR(run(RopeArgs{.x = q,
                                      .positions = tensors.positions,
                                      .cos_table = cos_table_,
                                      .sin_table = sin_table_,
                                      .interleaved = true,
                                      .offset = nope,
                                      .out = q_act}));

  const TensorView kv_a = rows_of(buffers_.kv_a, rows);
  const TensorView latent = rows_of(buffers_.latent, rows);
  const TensorView k_rope = rows_of(buffers_.k_rope, rows);
  LACUNA_RETURN_IF_ERROR(
      run(LinearArgs{.x = x, .weight = w.kv_a.values, .weight_scale = w.kv_a.scale, .out = kv_a}));
  LACUNA_RETURN_IF_ERROR(run(RmsNormArgs{.x = kv_a.slice(1, 0, latent_width),
                                         .weight = w.kv_a_norm,
                                         .eps = kLatentNormEps,
                                         .out = latent}));
  LACUNA_RETURN_IF_ERROR(run(RopeArgs{.x = split_heads(kv_a.slice(1, latent_width, rope), 1),
                                      .positions = tensors.positions,
                                      .cos_table = cos_table_,
                                      .sin_table = sin_table_,
                                      .interleaved = true,
                                      .out = k_rope}));
  LACUNA_RETURN_IF_ERROR(run(AppendKvArgs{.latent = latent,
                                          .rope = join_heads(k_rope),
                                          .slot_mapping = tensors.slot_mapping,
                                          .kv = cache.latent(layer)}));
  if (config_.layer_has_indexer[layer]) {
    LACUNA_RETURN_IF_ERROR(index_keys(run, layer, batch, tensors, plan, cache, selection, tap));
  }

  // W_UK of head h is rows [h * (nope + v), + nope) of kv_b; its transpose absorbs the query. W_UV
  // follows it.
  const int64_t head_up = nope + config_.v_head_dim;
  ConstTensorView w_uk = w.kv_b;
  w_uk.rank = 3;
  w_uk.shape = {config_.num_attention_heads, latent_width, nope};
  w_uk.strides = {head_up * latent_width, 1, latent_width};
  ConstTensorView w_uv = w.kv_b;
  w_uv.data = w.kv_b.as<char>() + nope * latent_width * size_bytes(w.kv_b.dtype);
  w_uv.rank = 3;
  w_uv.shape = {config_.num_attention_heads, config_.v_head_dim, latent_width};
  w_uv.strides = {head_up * latent_width, latent_width, 1};

  const TensorView heads_out = rows_of(buffers_.heads_out, rows);
  const int64_t mqa_rows = plan.num_mqa_rows;
  if (mqa_rows > 0) {
    const TensorView absorbed = rows_of(buffers_.q_absorbed, mqa_rows);
    const TensorView attended = rows_of(buffers_.attended, mqa_rows);
    const TensorView q_mqa = rows_of(q_act, mqa_rows);
    LACUNA_RETURN_IF_ERROR(
        run(HeadLinearArgs{.x = q_mqa.slice(2, 0, nope), .weight = w_uk, .out = absorbed}));
    LACUNA_RETURN_IF_ERROR(sparse_mqa_lane(
        run, plan, cache.latent(layer), lists_,
        {.q_nope = absorbed,
         .q_rope = rope > 0 ? ConstTensorView(q_mqa.slice(2, nope, rope)) : ConstTensorView(),
         .softmax_scale = softmax_scale_,
         .out = attended}));
    LACUNA_RETURN_IF_ERROR(
        run(HeadLinearArgs{.x = attended, .weight = w_uv, .out = rows_of(heads_out, mqa_rows)}));
  }
  const int64_t mha_rows = plan.num_mha_rows(batch);
  if (mha_rows > 0) {
    const bool is_masked = plan.prefill_lane == Lane::kMaskedMha;
    const bool in_pieces = plan.mha_pieces.size() > 1;
    const auto partial = [&](const TensorView& buffer) {
      return in_pieces ? rows_of(buffer, mha_rows) : TensorView();
    };
    LACUNA_RETURN_IF_ERROR(mha_lane(run, plan, tensors, cache.latent(layer),
                                    {.q = q_act.slice(0, mqa_rows, mha_rows),
                                     .kv_b = w.kv_b,
                                     .mask = is_masked ? lists_.mask : TensorView(),
                                     .qk_nope_head_dim = nope,
                                     .v_head_dim = config_.v_head_dim,
                                     .softmax_scale = softmax_scale_,
                                     .keys = buffers_.mha_keys,
                                     .keys_up = buffers_.mha_keys_up,
                                     .merged_out = partial(buffers_.merged_out),
                                     .merged_lse = partial(buffers_.merged_lse),
                                     .piece_out = partial(buffers_.piece_out),
                                     .piece_lse = partial(buffers_.piece_lse),
                                     .out = heads_out.slice(0, mqa_rows, mha_rows)}));
  }
  return run(LinearArgs{.x = join_heads(heads_out),
                        .weight = w.o.values,
                        .weight_scale = w.o.scale,
                        .out = rows_of(buffers_.delta, rows)});
}

Status DeepseekV32::mlp(OpRunner& run, const MlpWeights& weights, int64_t rows, TensorView out) {
  const int64_t width = weights.gate.values.shape[0];
  const TensorView x = rows_of(buffers_.x, rows);
  const TensorView gate = rows_of(buffers_.gate, rows).slice(1, 0, width);
  const TensorView up = rows_of(buffers_.up, rows).slice(1, 0, width);
  const TensorView hidden = rows_of(buffers_.mlp_hidden, rows).slice(1, 0, width);
  LACUNA_RETURN_IF_ERROR(run(LinearArgs{
      .x = x, .weight = weights.gate.values, .weight_scale = weights.gate.scale, .out = gate}));
  LACUNA_RETURN_IF_ERROR(run(LinearArgs{
      .x = x, .weight = weights.up.values, .weight_scale = weights.up.scale, .out = up}));
  LACUNA_RETURN_IF_ERROR(run(SiluMulArgs{.gate = gate, .up = up, .out = hidden}));
  return run(LinearArgs{
      .x = hidden, .weight = weights.down.values, .weight_scale = weights.down.scale, .out = out});
}

Status DeepseekV32::moe(OpRunner& run, int layer, int64_t rows, const Tap& tap) {
  const LayerWeights& w = weights_.layers[layer];
  const TensorView x = rows_of(buffers_.x, rows);
  const TensorView logits = rows_of(buffers_.router_logits, rows);
  const TensorView ids = rows_of(buffers_.expert_ids, rows);
  const TensorView expert_weights = rows_of(buffers_.expert_weights, rows);
  const TensorView delta = rows_of(buffers_.delta, rows);
  LACUNA_RETURN_IF_ERROR(run(LinearArgs{.x = x, .weight = w.router, .out = logits}));
  LACUNA_RETURN_IF_ERROR(run(MoeRouteArgs{.logits = logits,
                                          .bias = w.router_bias,
                                          .num_groups = static_cast<int>(config_.n_group),
                                          .groups_kept = static_cast<int>(config_.topk_group),
                                          .normalize = config_.norm_topk_prob,
                                          .scale = config_.routed_scaling_factor,
                                          .ids = ids,
                                          .weights = expert_weights}));
  if (tap && !run.measuring()) {
    tap("router_ids", layer, ids);
    tap("router_weights", layer, expert_weights);
  }
  LACUNA_RETURN_IF_ERROR(run(MoeExpertsArgs{
      .x = x, .ids = ids, .weights = expert_weights, .experts = w.experts, .out = delta}));
  if (!w.shared_experts.gate.values.empty()) {
    const TensorView shared = rows_of(buffers_.shared_out, rows);
    LACUNA_RETURN_IF_ERROR(mlp(run, w.shared_experts, rows, shared));
    LACUNA_RETURN_IF_ERROR(run(AddArgs{.x = shared, .out = delta}));
  }
  return ok_status();
}

Status DeepseekV32::forward(OpRunner& run, const Batch& batch, const BatchTensors& tensors,
                            const AttentionPlan& plan, const PagedKvCache& cache,
                            const SelectionSource& selection, const Tap& tap) {
  const int64_t rows = batch.num_rows();
  LACUNA_CHECK(rows <= options_.rows_max && plan.num_mha_keys <= options_.mha_keys_max);
  LACUNA_CHECK(plan.mha_pieces.size() <= 1 ||
               plan.num_mha_rows(batch) <= options_.chunked_rows_max);
  LACUNA_CHECK(plan.prefill_lane != Lane::kMaskedMha ||
               plan.num_mha_rows(batch) * mask_row_words(plan.seqlen_k_max) <=
                   options_.mask_words_max);
  const TensorView hidden = rows_of(buffers_.hidden, rows);
  const TensorView delta = rows_of(buffers_.delta, rows);
  const TensorView x = rows_of(buffers_.x, rows);
  lists_.leader = -1;
  LACUNA_RETURN_IF_ERROR(
      run(EmbeddingArgs{.ids = tensors.token_ids, .table = weights_.embedding, .out = hidden}));
  for (int layer = 0; layer < config_.num_hidden_layers; ++layer) {
    const LayerWeights& w = weights_.layers[layer];
    run.set_layer(layer);
    LACUNA_RETURN_IF_ERROR(run(
        RmsNormArgs{.x = hidden, .weight = w.input_norm, .eps = config_.rms_norm_eps, .out = x}));
    LACUNA_RETURN_IF_ERROR(attention(run, layer, batch, tensors, plan, cache, selection, tap));
    if (tap && !run.measuring()) {
      tap("attn_out", layer, delta);
    }
    LACUNA_RETURN_IF_ERROR(run(RmsNormArgs{.x = hidden,
                                           .add = delta,
                                           .weight = w.post_attention_norm,
                                           .eps = config_.rms_norm_eps,
                                           .out = x}));
    if (config_.layer_is_moe[layer]) {
      LACUNA_RETURN_IF_ERROR(moe(run, layer, rows, tap));
    } else {
      LACUNA_RETURN_IF_ERROR(mlp(run, w.mlp, rows, delta));
    }
    LACUNA_RETURN_IF_ERROR(run(AddArgs{.x = delta, .out = hidden}));
    if (tap && !run.measuring()) {
      tap("hidden", layer, hidden);
    }
  }
  return ok_status();
}

Status DeepseekV32::logits(OpRunner& run, const ConstTensorView& row_ids, TensorView out) {
  const int64_t rows = row_ids.shape[0];
  LACUNA_CHECK(rows <= options_.logits_rows_max);
  const TensorView chosen = rows_of(buffers_.logits_hidden, rows);
  const TensorView x = rows_of(buffers_.logits_x, rows);
  LACUNA_RETURN_IF_ERROR(
      run(EmbeddingArgs{.ids = row_ids, .table = buffers_.hidden, .out = chosen}));
  LACUNA_RETURN_IF_ERROR(run(RmsNormArgs{
      .x = chosen, .weight = weights_.final_norm, .eps = config_.rms_norm_eps, .out = x}));
  return run(LinearArgs{.x = x, .weight = weights_.lm_head, .out = out});
}

}  // namespace lacuna
