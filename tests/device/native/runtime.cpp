// What torch asks of a CUDA runtime: which devices there are, streams, events, generators, pinned memory. All work is
// done when it is asked for, so streams and events only have names.
#include "device.h"

#include <ATen/core/PhiloxRNGEngine.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <map>
#include <mutex>

namespace pretended {

c10::DeviceIndex& current_device() {
  static thread_local c10::DeviceIndex current = 0;
  return current;
}

static c10::StreamId& current_stream(c10::DeviceIndex index) {
  static thread_local c10::StreamId current[DEVICES] = {};
  return current[index];
}

at::Generator& default_generator(c10::DeviceIndex index) {
  static at::Generator generators[DEVICES] = {
      at::make_generator<DeviceGenerator>(on_device(0)), at::make_generator<DeviceGenerator>(on_device(1))};
  return generators[on_device(index).index()];
}

// ---- random numbers, and those of graphs

GraphDraws*& graph_of_thread() {
  static thread_local GraphDraws* graph = nullptr;
  return graph;
}

// While a graph records nothing runs, and nobody knows where a replay will begin.
Draw::Draw(const DeviceGenerator& generator) : stand(generator.stand), share(nullptr) {
  GraphDraws* graph = graph_of_thread();
  if (graph && graph->replays) stand = graph->order.at(graph->at++);
  if (graph && !graph->replays) graph->order.push_back(stand);
  if (graph) share = &graph->shares[stand];
  const uint64_t seed = share ? share->seed : stand->seed, offset = share ? share->base + share->within : stand->offset;
  numbers = at::detail::createCPUGenerator(at::Philox4_32(seed, 0, offset)());
}

// By fours, as many as 256 threads of 528 blocks take turns to draw four each; not at all where nothing was drawn.
void Draw::moves_on(int64_t count) {
  auto drawn = numbers.get<at::CPUGeneratorImpl>()->engine().data();
  if (drawn.left_ == 1 && drawn.next_ == 0) return;
  const uint64_t more = 4 * ((std::max<int64_t>(count, 1) - 1) / (256 * 528 * 4) + 1);
  (share ? share->within : stand->offset) += more;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Device getDevice() const override { return on_device(-1); }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device() = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    return on_device(std::exchange(current_device(), on_device(device.index()).index()));
  }

  c10::Stream getStream(c10::Device device) const override {
    device = on_device(device.index());
    return c10::Stream(c10::Stream::UNSAFE, device, current_stream(device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, on_device(device.index()));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return c10::Stream(c10::Stream::UNSAFE, on_device(device.index()), ++last);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    current_stream(stream.device_index()) = stream.id();
    return before;
  }

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = const_cast<Guard*>(this);  // any address but null: it has been recorded
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0; }
  void synchronizeStream(const c10::Stream&) const override { report("synchronize", "stream"); }
  void synchronizeEvent(void*) const override { report("synchronize", "event"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { report("synchronize", "device"); }
};

// Memory of the host that remembers being pinned.
struct Pinned final : c10::Allocator {
  static std::map<const void*, size_t>& sizes() {
    static auto* found = new std::map<const void*, size_t>;
    return *found;
  }
  static std::mutex& lock() {
    static auto* found = new std::mutex;
    return *found;
  }
  static void release(void* data) {
    std::lock_guard<std::mutex> held(lock());
    sizes().erase(data);
    std::free(data);
  }
  static bool has(const void* data) {
    std::lock_guard<std::mutex> held(lock());
    auto after = sizes().upper_bound(data);
    if (after == sizes().begin()) return false;
    auto [start, size] = *--after;
    return static_cast<const char*>(data) < static_cast<const char*>(start) + size;
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    std::lock_guard<std::mutex> held(lock());
    sizes()[data] = bytes;
    return c10::DataPtr(data, data, &release, c10::Device(c10::DeviceType::CPU));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return DEVICES; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex current_device() const override { return current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchangeDevice(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice(on_device(index)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  void deviceSynchronize(c10::DeviceIndex) const override { report("synchronize", "device"); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  // Python has no other way to the generators that a device draws from: the first one made for it is that.
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    static bool given[DEVICES] = {};
    c10::Device device = on_device(index);
    if (!std::exchange(given[device.index()], true)) return default_generator(device.index());
    return at::make_generator<DeviceGenerator>(device);
  }

  c10::Allocator* getPinnedMemoryAllocator() const override {
    static Pinned pinned;
    return &pinned;
  }
  bool isPinnedPtr(const void* data) const override { return Pinned::has(data); }
};

// Torch asked for its hooks when it was imported and keeps what it got: the new ones take that object's place.
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
static const auto* hooks = new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks;
static const c10::impl::DeviceGuardImplRegistrar guard(c10::DeviceType::CUDA, new Guard);

}  // namespace pretended

using pretended::GraphDraws;

// What a graph draws: made as it begins to record, and kept for as long as there is the graph.
extern "C" GraphDraws* draws_make() { return new GraphDraws; }
extern "C" void draws_drop(GraphDraws* graph) { delete graph; }
// Who draws in this thread from now on: a graph that records, or nobody's (null). Returns who did before.
extern "C" GraphDraws* draws_of(GraphDraws* graph) { return std::exchange(pretended::graph_of_thread(), graph); }

extern "C" void draws_recorded(GraphDraws* graph) {
  for (auto& [stand, share] : graph->shares) share.whole = share.within;
  graph->replays = true;
}

// A replay is given to the device: it begins where generators stand, which move on by all that it will draw.
extern "C" void draws_replayed(GraphDraws* graph) {
  graph->at = 0;
  for (auto& [stand, share] : graph->shares) {
    share = {share.whole, 0, stand->seed, stand->offset};
    stand->offset += share.whole;
    for (int of = 0; of < 2; of++) pretended::report("launch", "aten::fill_");  // where it begins is written there
  }
}
