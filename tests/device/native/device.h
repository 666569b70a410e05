// What the files of the pretended device share; dispatch.cpp says what it is.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/DeviceGuard.h>

namespace pretended {

constexpr c10::DeviceIndex DEVICES = 2;

// Tells Python what happened ("launch", "read" or a kind of sync) and of which operation; Python may refuse it.
void report(const char* what, const char* operation);

// The device whose turn it is in this thread.
c10::DeviceIndex& current_device();

inline c10::Device on_device(c10::DeviceIndex index) {
  TORCH_CHECK(index < DEVICES, "CUDA error: invalid device ordinal");
  return c10::Device(c10::DeviceType::CUDA, index < 0 ? current_device() : index);
}

// Numbers of a device: a generator of the CPU that says it belongs to the device.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(c10::Device device, at::Generator numbers = at::detail::createCPUGenerator())
      : GeneratorImpl(device, c10::DispatchKeySet(c10::DispatchKey::CUDA)), numbers(std::move(numbers)) {}
  void set_current_seed(uint64_t seed) override { offset++, numbers.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return offset; }
  uint64_t current_seed() const override { return numbers.current_seed(); }
  uint64_t seed() override { return numbers.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    offset++, numbers.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    report("read", "generator");
    return numbers.unsafeGetGeneratorImpl()->get_state();
  }
  GeneratorImpl* clone_impl() const override { return new DeviceGenerator(device(), numbers.clone()); }

  at::Generator numbers;
  uint64_t offset = 0;  // as CUDA's, it changes with each draw; here also where CUDA's may be what it was
};

at::Generator& default_generator(c10::DeviceIndex index);

}  // namespace pretended
