// What the files of the pretended device share; dispatch.cpp says what it is.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>
#include <map>
#include <memory>
#include <vector>

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

// Where a generator of CUDA's stands: what is drawn depends on seed and offset alone, and each draw moves the offset on.
struct Stand {
  uint64_t seed = c10::default_rng_seed_val, offset = 0;
};

// What a graph draws from one of them. Its kernels know how far `within` the graph they are, and read where the replay
// began: at a seed, and at an offset that is moved on by `whole` as soon as the replay is given to the device.
struct Share {
  uint64_t whole = 0, within = 0, seed = 0, base = 0;
};

struct GraphDraws {
  std::map<std::shared_ptr<Stand>, Share> shares;
  std::vector<std::shared_ptr<Stand>> order;  // from which it draws, one after the other
  size_t at = 0;
  bool replays = false;
};

// The graph that this thread records or replays.
GraphDraws*& graph_of_thread();

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(c10::Device device, std::shared_ptr<Stand> stand = std::make_shared<Stand>())
      : GeneratorImpl(device, c10::DispatchKeySet(c10::DispatchKey::CUDA)), stand(std::move(stand)) {}
  void set_current_seed(uint64_t seed) override {
    report("offset", "generator");
    *stand = {seed, 0};
  }
  void set_offset(uint64_t offset) override {
    report("offset", "generator");
    TORCH_CHECK(offset % 4 == 0, "offset must be a multiple of 4");
    stand->offset = offset;
  }
  uint64_t get_offset() const override {
    report("offset", "generator");
    return stand->offset;
  }
  uint64_t current_seed() const override { return stand->seed; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(false));
    return stand->seed;
  }
  void set_state(const c10::TensorImpl& state) override {
    report("offset", "generator");
    TORCH_CHECK(state.numel() == sizeof(Stand), "RNG state is wrong size");
    std::memcpy(stand.get(), state.data(), sizeof(Stand));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    report("read", "generator");
    auto state = at::empty({sizeof(Stand)}, at::TensorOptions(at::kCPU).dtype(at::kByte));
    std::memcpy(state.data_ptr(), stand.get(), sizeof(Stand));
    return state.getIntrusivePtr();
  }
  void graphsafe_set_state(const c10::intrusive_ptr<GeneratorImpl>& other) override {
    stand = static_cast<DeviceGenerator&>(*other).stand;
  }
  c10::intrusive_ptr<GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<DeviceGenerator>(device(), stand);
  }
  GeneratorImpl* clone_impl() const override { return new DeviceGenerator(device(), std::make_shared<Stand>(*stand)); }

  std::shared_ptr<Stand> stand;
};

// One draw from a generator: the numbers for it, and where the generator stands behind it.
struct Draw {
  explicit Draw(const DeviceGenerator& generator);
  void moves_on(int64_t numbers);

  std::shared_ptr<Stand> stand;
  Share* share;  // of the thread's graph
  at::Generator numbers;
};

at::Generator& default_generator(c10::DeviceIndex index);

}  // namespace pretended
