// The threads of one group of a GPU as fibers on one thread of the host: barriers, and exchange between the lanes of a simdgroup (warp).
//
// The threads run one after the other, each until it waits: in the order of their numbers in one group, in the opposite order in the next. So
// where a barrier is missing, the first threads read what the others have not written, every time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sim {

constexpr uint32_t LANES = 32;
constexpr size_t EXCHANGED_BYTES = 64;  // at most, of one lane

// Runs body(context, thread) for every thread of a group, and throws std::runtime_error where they cannot go on: some wait at a barrier, or for
// lanes of their simdgroup, that others do not reach. Barriers and exchanges need groups of whole simdgroups.
void run_group(uint32_t threads, bool backwards, void (*body)(void* context, uint32_t thread), void* context);

// The following are called by the threads of a group.
uint32_t current_thread();
void group_barrier();
void lanes_barrier();

// Every lane gives `bytes` bytes. Returns those of all lanes, EXCHANGED_BYTES apart, valid until the exchange after the next.
const char* exchange(const void* value, size_t bytes);

// Memory of the group: it holds nothing that is a number when a group starts. See threadgroup_memory.
void poison_group_memory();
void register_group_memory(void* memory, size_t bytes);

// One array for each type and place in the source.
template <typename Array, int PLACE>
Array& threadgroup_memory() {
  alignas(64) static char memory[sizeof(Array)];
  [[maybe_unused]] static const bool registered = (register_group_memory(memory, sizeof(memory)), true);
  return reinterpret_cast<Array&>(memory);
}

}  // namespace sim
