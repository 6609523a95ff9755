// Changes one argument of a valid call at a time and demands an error that names it, from the call,
// from workspace_bytes and from explain. Nothing may crash, and nothing may be written.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tests/conformance/harness.h"

namespace lacuna::testing {

// What is fixed about a tensor argument: the name in messages, its dimensions that must agree with
// other arguments (a bit each), and whether its last dimension must be contiguous.
struct TensorRule {
  const char* name;
  unsigned fixed_dims;
  bool last_contiguous;
};

template <class Args>
class ArgumentFuzz {
 public:
  // `problem` must outlive the fuzz.
  ArgumentFuzz(BufferSet* buffers, const Args& valid) : buffers_(buffers), valid_(valid) {
    const Result<int64_t> needed = workspace_bytes(conformance_context(), valid);
    EXPECT_TRUE(needed.ok()) << needed.status().message();
    workspace_ = DeviceBuffer(buffers->where(), (needed.ok() ? *needed : 0) + (1 << 20));
    EXPECT_TRUE(call_valid().ok()) << "the unchanged call must succeed";
  }

  Status call_valid() { return call(conformance_context(), valid_, launch()); }

  // One change; the message must contain `name`.
  void expect_error(const std::string& what, const std::string& name,
                    const std::function<void(Args*)>& change) {
    Args args = valid_;
    change(&args);
    buffers_->upload();
    const Status status = call(conformance_context(), args, launch());
    buffers_->download();
    SCOPED_TRACE(std::string(Op<Args>::kName) + ": " + what);
    if (status.ok()) {
      ADD_FAILURE() << "was accepted";
      return;
    }
    EXPECT_NE(status.message().find(name), std::string::npos)
        << "the message does not name " << name << ": " << status.message();
    EXPECT_TRUE(buffers_->unchanged()) << "a refused call wrote";
    EXPECT_FALSE(workspace_bytes(conformance_context(), args).ok());
    EXPECT_FALSE(explain(conformance_context(), args).status.ok());
  }

  // Everything that can be wrong with a tensor. `get` returns the view within the arguments.
  template <class Get>
  void tensor(const TensorRule& rule, Get&& get) {
    const std::string name = rule.name;
    const auto change = [&](const std::string& what, auto&& apply) {
      expect_error(name + " " + what, name, [&](Args* args) { apply(get(args)); });
    };
    const auto original = get(&valid_);
    if (original.num_elements() > 0) {
      change("null", [](auto& view) { view.data = nullptr; });
    }
    change("of uint8", [](auto& view) { view.dtype = DType::kUInt8; });
    change("of one more dimension", [](auto& view) {
      view.shape[view.rank] = 1;
      view.strides[view.rank++] = 1;
    });
    expect_error(name + " on another device", "cuda:0",
                 [&](Args* args) { get(args).device = other_device(); });
    for (int d = 0; d < original.rank; ++d) {
      change("with a negative extent", [d](auto& view) { view.shape[d] = -1; });
      if ((rule.fixed_dims >> d) & 1u) {
        change("with a wrong extent " + std::to_string(d), [d](auto& view) { ++view.shape[d]; });
      }
    }
    if (rule.last_contiguous && original.shape[original.rank - 1] > 1) {
      for (int64_t stride : {-1, 0, 2}) {
        change("with last stride " + std::to_string(stride),
               [stride](auto& view) { view.strides[view.rank - 1] = stride; });
      }
    }
    if (size_bytes(original.dtype) > 1 && original.data != nullptr) {
      change("misaligned", [](auto& view) {
        using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(view.data)>>,
                                        const char, char>;
        view.data = static_cast<Byte*>(view.data) + 1;
      });
    }
  }

  // Everything that can be wrong with a cache view.
  void cache(const std::string& name, KvCacheView Args::*member, KvLayout wrong_kind) {
    const auto change = [&](const std::string& what, auto&& apply) {
      expect_error(name + " " + what, name, [&](Args* args) { apply(args->*member); });
    };
    change("null", [](KvCacheView& kv) { kv.data = nullptr; });
    change("with negative num_blocks", [](KvCacheView& kv) { kv.num_blocks = -1; });
    change("with negative block_size", [](KvCacheView& kv) { kv.block_size = -1; });
    change("with a small row_bytes", [](KvCacheView& kv) { --kv.row_bytes; });
    change("with overlapping blocks", [](KvCacheView& kv) { kv.block_stride_bytes /= 2; });
    change("with a negative block stride",
           [](KvCacheView& kv) { kv.block_stride_bytes = -kv.block_stride_bytes; });
    change("of the wrong kind", [&](KvCacheView& kv) {
      kv.layout = wrong_kind;
      kv.row_bytes = std::max(kv.row_bytes, wrong_kind.record_bytes());
      kv.block_stride_bytes = kv.row_bytes * kv.block_size;
    });
    change("of a layout without kernels", [](KvCacheView& kv) {
      kv.layout.format = KvFormat::kDsV41Fp8;
      kv.row_bytes = std::max<int64_t>(kv.row_bytes, 584);
      kv.block_stride_bytes = kv.row_bytes * kv.block_size;
    });
    change("misaligned", [](KvCacheView& kv) { kv.data = static_cast<char*>(kv.data) + 1; });
    expect_error(name + " on another device", "cuda:0",
                 [&](Args* args) { (args->*member).device = other_device(); });
  }

  // What every operation has: a forced kernel that is not there, and a workspace that is not one.
  void common() {
    expect_error("an unknown kernel", "nobody/nothing",
                 [](Args* args) { args->kernel = "nobody/nothing"; });
    const Result<int64_t> needed = workspace_bytes(conformance_context(), valid_);
    if (needed.ok() && *needed > 0) {
      const Status none = call(conformance_context(), valid_, {});
      EXPECT_EQ(none.code(), StatusCode::kOutOfMemory);
      EXPECT_NE(none.message().find("workspace"), std::string::npos) << none.message();
      Launch odd = launch();
      odd.workspace = static_cast<char*>(odd.workspace) + 8;
      const Status unaligned = call(conformance_context(), valid_, odd);
      EXPECT_EQ(unaligned.code(), StatusCode::kInvalidArgument);
      EXPECT_NE(unaligned.message().find("workspace"), std::string::npos) << unaligned.message();
    }
  }

 private:
  // Messages then name cuda:0, as the one that was given or as the one that was expected.
  Device other_device() const {
    return buffers_->where().device.kind == DeviceKind::kCpu ? Device{DeviceKind::kCuda, 0}
                                                             : Device{};
  }

  Launch launch() const {
    return {.workspace = workspace_.data(), .workspace_bytes = workspace_.size_bytes() - 8};
  }

  BufferSet* buffers_;
  Args valid_;
  DeviceBuffer workspace_;
};

// A getter for ArgumentFuzz::tensor.
#define LACUNA_FIELD(field) \
  [](auto* args) -> auto& { return args->field; }

}  // namespace lacuna::testing
