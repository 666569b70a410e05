// A CUDA device that is not there: its memory is the host's, and each of its operations runs the CPU's kernel on tensors
// that share that memory. To everyone above, tensors are on cuda:0 or cuda:1. Operations are counted, what would wait
// for a device is reported, and what CUDA refuses is refused.
#include "device.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace pretended {

using Watcher = int (*)(const char* what, const char* operation);
static std::atomic<Watcher> watcher{nullptr};

void report(const char* what, const char* operation) {
  Watcher call = watcher;
  const int refused = call ? call(what, operation) : 0;
  TORCH_CHECK(refused < 2, "CUDA error: an illegal memory access was encountered");
  TORCH_CHECK(!refused, "called a synchronizing CUDA operation: ", what, " by ", operation);
}

static bool is_one_of(const std::unordered_set<std::string>& names, const std::string& name) { return names.count(name); }

// ---- what an operation costs

static const std::unordered_map<std::string, const char*> WAITS = {
    {"aten::_local_scalar_dense", "item"}, {"aten::nonzero", "nonzero"}, {"aten::equal", "equal"},
    {"aten::masked_select", "masked_select"}, {"aten::_unique2", "unique"}, {"aten::_unique", "unique"},
    {"aten::unique_dim", "unique"}, {"aten::unique_consecutive", "unique"}, {"aten::bincount", "bincount"},
    {"aten::histc", "histc"}, {"aten::multinomial", "multinomial"}};

// The views are not among them: their schemas say what they are.
static const std::unordered_set<std::string> WITHOUT_LAUNCH = {
    "aten::empty", "aten::empty_strided", "aten::new_empty_strided", "aten::resize_", "aten::set_", "aten::is_set_to",
    "aten::_local_scalar_dense", "aten::_efficientzerotensor", "aten::record_stream"};

// Its first result is another look at memory that it does not write.
static bool is_view(const c10::FunctionSchema& schema) {
  auto* alias = schema.returns().empty() ? nullptr : schema.returns()[0].alias_info();
  return alias && !alias->isWrite();
}


// ---- one call of an operation: its arguments to the host, its results back

struct Call {
  const c10::OperatorHandle& op;
  const std::string& name;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;    // (on the device, on the host) of each argument
  std::vector<std::pair<c10::Storage, c10::Storage>> stores;  // the same of their memory
  std::optional<c10::Device> device;                          // of its tensors, or that it is to make some on
  std::unique_ptr<Draw> draw;                                 // of numbers, by the generator that it was given
  std::optional<c10::Device> other;                           // another device on which it found a tensor
  bool on_host = false, on_host_scalar = false, has_mask = false, hosts_numbers = false;

  explicit Call(const c10::OperatorHandle& op) : op(op), name(op.schema().name()) {}

  c10::Storage host_storage(const c10::Storage& there) {
    for (auto& [device, host] : stores)
      if (device.is_alias_of(there)) return host;
    auto* owner = new c10::Storage(there);
    c10::DataPtr data(
        const_cast<void*>(there.data()), owner, [](void* x) { delete static_cast<c10::Storage*>(x); },
        c10::Device(c10::DeviceType::CPU));
    c10::Storage host(c10::Storage::use_byte_size_t(), there.nbytes(), std::move(data),
                      c10::GetAllocator(c10::DeviceType::CPU), /*resizable=*/true);
    stores.emplace_back(there, host);
    return host;
  }

  c10::Storage device_storage(const c10::Storage& here) {
    for (auto& [device, host] : stores)
      if (host.is_alias_of(here) && host.data() == device.data()) return device;
    auto* owner = new c10::Storage(here);
    c10::DataPtr data(
        const_cast<void*>(here.data()), owner, [](void* x) { delete static_cast<c10::Storage*>(x); }, *device);
    c10::Storage there(c10::Storage::use_byte_size_t(), here.nbytes(), std::move(data), nullptr, false);
    stores.emplace_back(there, here);
    return there;
  }

  static c10::DispatchKeySet keys_on(const at::Tensor& x, c10::BackendComponent from, c10::BackendComponent to) {
    return x.key_set().remove_backend(from) | c10::DispatchKeySet(to);
  }

  // A view keeps the keys it is given, so that one of a tensor with a gradient has one in inference mode, too.
  static at::Tensor over(c10::Storage memory, const at::Tensor& like, c10::DispatchKeySet keys, bool view = false) {
    auto made = view ? at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(memory), keys, like.dtype())
                     : at::detail::make_tensor<c10::TensorImpl>(std::move(memory), keys, like.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    return made;
  }

  at::Tensor to_host(const at::Tensor& x) {
    if (!x.defined()) return x;
    if (!x.is_cuda()) {
      if (!x.unsafeGetTensorImpl()->is_wrapped_number()) (x.dim() > 0 ? on_host : on_host_scalar) = true;
      return x;
    }
    if (!device) device = x.device();
    if (*device != x.device()) other = x.device();
    for (auto& [there, here] : tensors)
      if (there.is_same(x)) return here;
    auto keys = keys_on(x, c10::BackendComponent::CUDABit, c10::BackendComponent::CPUBit);
    auto here = over(host_storage(x.storage()), x, keys);
    tensors.emplace_back(x, here);
    return here;
  }

  at::Tensor to_device(const at::Tensor& x) {
    for (auto& [there, here] : tensors)
      if (here.is_same(x)) return resized(there, x);
    if (!x.defined() || !device || (*device).is_cpu()) return x;
    if (is_view(op.schema())) return over(device_storage(x.storage()), x, tensors[0].first.key_set(), true);
    auto keys = keys_on(x, c10::BackendComponent::CPUBit, c10::BackendComponent::CUDABit);
    return over(device_storage(x.storage()), x, keys);
  }

  // An argument that was written to, which may have other sizes and other memory now.
  at::Tensor resized(const at::Tensor& there, const at::Tensor& here) {
    auto* impl = there.unsafeGetTensorImpl();
    if (here.storage().data() != there.storage().data()) impl->set_storage_keep_dtype(device_storage(here.storage()));
    bool same = here.sizes() == there.sizes() && here.strides() == there.strides();
    if (!same || here.storage_offset() != there.storage_offset())
      impl->set_sizes_and_strides(here.sizes(), here.strides(), here.storage_offset());
    return there;
  }

  void mask(const at::Tensor& x) { has_mask |= x.defined() && (x.dtype() == at::kBool || x.dtype() == at::kByte); }

  c10::IValue argument_to_host(const c10::IValue& value) {
    if (value.isTensor()) return to_host(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& x : value.toTensorVector()) list.push_back(to_host(x));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (std::optional<at::Tensor> x : value.toOptionalTensorList()) {
        if (x) mask(*x);
        list.push_back(x ? std::make_optional(to_host(*x)) : x);
      }
      return list;
    }
    if (value.isStorage() && value.toStorage().device().is_cuda()) return host_storage(value.toStorage());
    if (value.isDevice() && value.toDevice().is_cuda()) {
      device = on_device(value.toDevice().index());
      return c10::Device(c10::DeviceType::CPU);
    }
    hosts_numbers |= value.isGenerator() && value.toGenerator().device().is_cpu();
    if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
      draw = std::make_unique<Draw>(*value.toGenerator().get<DeviceGenerator>());
      return draw->numbers;
    }
    return value;
  }

  c10::IValue result_to_device(const c10::IValue& value) {
    if (value.isTensor()) return to_device(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const at::Tensor& x : value.toTensorVector()) list.push_back(to_device(x));
    return list;
  }

  // ---- what CUDA would say

  bool indexes() const {
    static const std::unordered_set<std::string> names = {
        "aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index",
        "aten::_unsafe_index_put"};
    return is_one_of(names, name);
  }

  void refuse_mixed_devices() const {
    TORCH_CHECK(!hosts_numbers || !device || device->is_cpu(), "Expected a 'cuda' device type for generator but found 'cpu'");
    static const std::unordered_set<std::string> free = {"aten::set_", "aten::resize_"};
    static const std::unordered_set<std::string> take_scalars = {"aten::fill_", "aten::masked_fill_", "aten::floor_divide"};
    bool scalars = op.hasTag(at::Tag::pointwise) || is_one_of(take_scalars, name) || indexes();
    bool host = (on_host && !indexes()) || (on_host_scalar && !scalars);
    if (tensors.empty() || is_one_of(free, name) || !(host || other)) return;
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ",
                device->str(), " and ", other ? other->str() : "cpu", "! (in ", name, ")");
  }

  void report_copy(at::ArrayRef<c10::IValue> arguments) const {
    bool to_device = arguments[0].toTensor().is_cuda(), from_device = arguments[1].toTensor().is_cuda();
    if (to_device == from_device || (arguments[2].isBool() && arguments[2].toBool())) return;
    report(to_device ? "copy to the device" : "copy to the host", name.c_str());
  }

  void report_waits(at::ArrayRef<c10::IValue> arguments) const {
    if (auto found = WAITS.find(name); found != WAITS.end()) report(found->second, name.c_str());
    bool fills = name != "aten::index" && on_host_scalar;  // one number, where the mask is set
    if (indexes() && has_mask && !fills) report("index by a mask", name.c_str());
    if (indexes() && on_host) report("index to the device", name.c_str());
    if (name == "aten::repeat_interleave" && arguments.back().isNone()) report("repeat_interleave", name.c_str());
  }
};

// ---- the kernel of every operation

// While a device's operation runs, numbers come from its generator: kernels of the CPU ask for the CPU's.
struct DrawsFromDevice {
  explicit DrawsFromDevice(Call& call) {
    static std::mutex one_at_a_time;
    if (!call.op.hasTag(at::Tag::nondeterministic_seeded) || !call.device || !call.device->is_cuda()) return;
    held = std::unique_lock<std::mutex>(one_at_a_time);
    auto& own = default_generator(call.device->index());
    if (!call.draw) call.draw = std::make_unique<Draw>(*own.get<DeviceGenerator>());
    numbers = call.draw->numbers;
    std::swap(hosts(), numbers);
  }
  ~DrawsFromDevice() {
    if (held.owns_lock()) std::swap(hosts(), numbers);
  }
  static at::Generator& hosts() { return const_cast<at::Generator&>(at::detail::getDefaultCPUGenerator()); }
  at::Generator numbers;
  std::unique_lock<std::mutex> held;
};

static void run(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  Call call(op);
  const at::ArrayRef<c10::IValue> arguments(stack->data() + first, schema.arguments().size());
  if (call.name == "aten::copy_") call.report_copy(arguments);
  for (size_t i = first; i < stack->size(); i++) (*stack)[i] = call.argument_to_host((*stack)[i]);
  if (call.name != "aten::copy_") call.refuse_mixed_devices();
  call.report_waits(arguments);
  if (watcher.load() && !is_view(schema) && !is_one_of(WITHOUT_LAUNCH, call.name)) report("launch", call.name.c_str());
  {
    c10::impl::ExcludeDispatchKeyGuard plain(
        c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
        c10::functorch_transforms_ks | c10::DispatchKeySet(c10::DispatchKey::Python) |
        c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot));
    DrawsFromDevice draws(call);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    if (call.draw) call.draw->moves_on(stack->back().isTensor() ? stack->back().toTensor().numel() : 1);
  }
  if (call.name == "aten::copy_") call.device.reset();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
    (*stack)[i] = call.result_to_device((*stack)[i]);
}

// Kernels of CUDA for lists of tensors note themselves that they have written: autograd does it for single ones only.
static void note_writes(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  for (size_t i = first; i < stack->size(); i++) {
    auto* alias = schema.arguments()[i - first].alias_info();
    if (!alias || !alias->isWrite() || !(*stack)[i].isTensorList()) continue;
    for (const at::Tensor& x : (*stack)[i].toTensorVector()) x.unsafeGetTensorImpl()->bump_version();
  }
}

static void run_list(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  note_writes(op, stack);
  run(op, keys, stack);
}


// 2 is the kernel that tests/device/fused.py has, 0 composes attention of others.
static int64_t choose_attention(const at::Tensor& q, const at::Tensor&, const at::Tensor& v,
                                const std::optional<at::Tensor>& mask, double dropout, bool, std::optional<double>, bool gqa) {
  bool odd = q.dtype() == at::kDouble || q.size(-1) != v.size(-1) || !q.numel() || (mask && mask->requires_grad());
  return odd || dropout > 0 || gqa ? 0 : 2;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

// What torch composes of others on any device, but for CUDA has in one kernel.
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("record_stream", [](at::Tensor&, c10::Stream) {});
  for (auto* name : {"copy_", "convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = *dispatcher.findOp(name);
    bool list = name.name.rfind("aten::_foreach_", 0) == 0;
    bool one = name.name.rfind("aten::", 0) == 0 && op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
    if ((list || one) && !op.hasKernelForDispatchKey(c10::DispatchKey::CUDA))
      m.impl(toString(name).c_str(), list ? torch::CppFunction::makeFromBoxedFunction<&run_list>()
                                          : torch::CppFunction::makeFromBoxedFunction<&run>());
  }
}

}  // namespace pretended

namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &pretended::choose_attention)
}

// `watch(function)` calls it at each launch and each sync of any thread, `watch(null)` no more.
extern "C" void watch(pretended::Watcher call) { pretended::watcher = call; }
