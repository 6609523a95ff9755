// `lacuna info`: devices, backends and kernels; and why a kernel would be refused for given
// arguments.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "cli/commands.h"
#include "cli/engine_flags.h"
#include "core/check.h"
#include "ops/dispatch.h"

namespace lacuna::cli {
namespace {

struct InfoFlags {
  int threads = 0;
  std::string tuning_file;
  bool explain = false;
  int64_t rows = 1;
  int64_t heads = 16;
  int64_t latent = 512;
  int64_t rope = 64;
  int64_t topk = 2048;
  std::string kv_dtype = "bfloat16";
  std::string device = "cpu";
  std::string kernel;
};

// A sparse_mla call of the asked shape. The pointers are never followed: only `supports` and
// `preferred` look at it.
Result<SparseMlaArgs> shape_to_explain(const InfoFlags& flags) {
  if (flags.rows < 1 || flags.heads < 1 || flags.latent < 1 || flags.rope < 0 || flags.topk < 0) {
    return invalid_argument("--rows, --heads, --latent, --rope, --topk: " +
                            fmt::format("{}, {}, {}, {}, {}", flags.rows, flags.heads, flags.latent,
                                        flags.rope, flags.topk) +
                            ", expected sizes");
  }
  Device device;
  if (flags.device == "cuda") {
    device = {DeviceKind::kCuda, 0};
  } else if (flags.device != "cpu") {
    return invalid_argument("--device: \"" + flags.device + "\", expected cpu or cuda");
  }
  KvLayout layout = KvLayout::latent_bf16(flags.latent, flags.rope);
  if (flags.kv_dtype == "float32") {
    layout = KvLayout::latent_f32(flags.latent, flags.rope);
  } else if (flags.kv_dtype == "fp8_ds_mla") {
    layout = {KvFormat::kFp8DsMla, flags.latent, flags.rope};
  } else if (flags.kv_dtype != "bfloat16") {
    return invalid_argument("--kv-dtype: \"" + flags.kv_dtype +
                            "\", expected bfloat16, float32 or fp8_ds_mla");
  }
  alignas(64) static char somewhere[64];
  const auto view = [&](DType dtype, std::initializer_list<int64_t> shape) {
    return make_view<void>(static_cast<void*>(somewhere), dtype, shape, device);
  };
  return SparseMlaArgs{
      .q = view(DType::kBFloat16, {flags.rows, flags.heads, flags.latent + flags.rope}),
      .kv = paged_rows(somewhere, layout, 64, 64, device),
      .indices = view(DType::kInt32, {flags.rows, flags.topk}),
      .softmax_scale = 0.1,
      .out = view(DType::kBFloat16, {flags.rows, flags.heads, flags.latent}),
      .kernel = flags.kernel};
}

// Why no device of this machine runs a backend.
std::string unavailable(const ContextState& state) {
  return state.cuda_status.empty() ? "no device of its kind" : state.cuda_status;
}

Result<int> info(const InfoFlags& flags) {
  LACUNA_ASSIGN_OR_RETURN(
      const Context context,
      Context::create({.num_threads = flags.threads, .tuning_file = flags.tuning_file}));
  const ContextState& state = context.state();
  if (flags.explain) {
    LACUNA_ASSIGN_OR_RETURN(const SparseMlaArgs args, shape_to_explain(flags));
    const Explanation explanation = explain(context, args);
    if (explanation.status.ok()) {
      fmt::print("sparse_mla would run {}{}\n", explanation.kernel,
                 explanation.preferred ? "" : " (nothing that pays runs this)");
      if (!explanation.detail.empty()) {
        fmt::print("  {}\n", explanation.detail);
      }
    } else {
      fmt::print("sparse_mla would fail: {}\n", explanation.status.message());
    }
    for (const KernelRefusal& refusal : explanation.refusals) {
      fmt::print("  not {}: {}\n", refusal.kernel, refusal.reason);
    }
    return explanation.status.ok() ? 0 : 1;
  }
  fmt::print("lacuna {}\n\ndevices\n", LACUNA_VERSION);
  bool has_gpu = false;
  for (const DeviceInfo& device : state.devices) {
    fmt::print("  {:<8} {}, {:.1f} GB, ", device_text(device.device), device.name,
               device.memory_bytes / 1e9);
    if (device.device.kind == DeviceKind::kCpu) {
      fmt::print("{} threads, {}\n", device.num_threads, device.isa);
      continue;
    }
    has_gpu = true;
    fmt::print("compute capability {}.{}, {} SMs, {} KB of shared memory a block, {} MB of L2\n",
               device.compute_capability / 10, device.compute_capability % 10, device.sm_count,
               device.smem_optin_bytes / 1024, device.l2_bytes / (1 << 20));
  }
  if (!state.cuda_status.empty()) {
    fmt::print("  {}: {}\n", has_gpu ? "of the other GPUs" : "no GPU", state.cuda_status);
  }
  fmt::print("\nbackends, in dispatch order\n");
  for (const Backend* backend : state.backends) {
    const bool runs =
        std::any_of(state.devices.begin(), state.devices.end(), [&](const DeviceInfo& device) {
          return device.device.kind == backend->device_kind && backend->available(device);
        });
    fmt::print("  {:<8} {}\n", backend->name, runs ? "" : "cannot run here: " + unavailable(state));
  }
  fmt::print("\nkernels by operation, in dispatch order\n");
  for_each_op(AllOps{}, [&]<class Args>(Args*) {
    std::string names;
    for (const Backend* backend : state.backends) {
      for (const Kernel<Args>& kernel : Op<Args>::list(*backend)) {
        names += (names.empty() ? "" : ", ") + std::string(kernel.name);
      }
    }
    fmt::print("  {:<18} {}\n", Op<Args>::kName, names.empty() ? "-" : names);
  });
  const std::string model = default_model_dir();
  fmt::print("\nmodel that ships: {}\n", model.empty() ? "not found" : model);
  return 0;
}

}  // namespace

void add_info(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand(
      "info", "Devices, backends and kernels; with --explain, which kernel a shape takes and why");
  auto flags = std::make_shared<InfoFlags>();
  command->add_option("--threads", flags->threads, "CPU threads; 0: one per core");
  command->add_option("--tuning-file", flags->tuning_file,
                      "The table that lacuna tune measured on a GPU of this machine");
  CLI::Option* explain = command->add_flag(
      "--explain", flags->explain,
      "Say which sparse_mla kernel would run for the shape below, and why not others");
  command->add_option("--rows", flags->rows, "Query rows")->needs(explain)->capture_default_str();
  command->add_option("--heads", flags->heads, "Query heads")
      ->needs(explain)
      ->capture_default_str();
  command->add_option("--latent", flags->latent, "Latent width")
      ->needs(explain)
      ->capture_default_str();
  command->add_option("--rope", flags->rope, "Rope width")->needs(explain)->capture_default_str();
  command->add_option("--topk", flags->topk, "List width")->needs(explain)->capture_default_str();
  command->add_option("--kv-dtype", flags->kv_dtype, "bfloat16, float32 or fp8_ds_mla")
      ->needs(explain)
      ->capture_default_str();
  command->add_option("--device", flags->device, "cpu or cuda")
      ->needs(explain)
      ->capture_default_str();
  command->add_option("--kernel", flags->kernel, "Force this kernel")->needs(explain);
  command->callback([flags, &action] {
    action = [flags] {
      const Result<int> code = info(*flags);
      return code.ok() ? *code : report(code.status());
    };
  });
}

}  // namespace lacuna::cli
