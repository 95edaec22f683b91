// The kernels by their names, and how they are called. The parameters of a kernel are, in this order (tests/sim/build.py checks it): buffers, as
// pointers or references, numbered from 0; the position of the group in the grid, a uint3; and the indices of the thread in the group, of the
// simdgroup in the group and of the lane in the simdgroup, each a uint, of which the last ones may be left out.
#pragma once

#include <functional>
#include <string>
#include <tuple>
#include <utility>

namespace sim {

struct Call {
  void* const* buffers;
  uint32_t group[3];
  uint32_t thread;
};
using Kernel = std::function<void(const Call&)>;

bool register_kernel(const char* name, Kernel kernel);

template <typename P>
P argument(const Call& call, size_t position, size_t first_index) {
  if constexpr (std::is_pointer_v<P>) {
    return static_cast<P>(call.buffers[position]);
  } else if constexpr (std::is_reference_v<P>) {
    return *static_cast<std::remove_reference_t<P>*>(call.buffers[position]);
  } else if constexpr (std::is_same_v<P, uint32_t>) {
    const uint32_t indices[] = {call.thread, call.thread / LANES, call.thread % LANES};
    return indices[position - first_index];
  } else {
    return P(call.group[0], call.group[1], call.group[2]);
  }
}

template <typename... P, size_t... I>
Kernel caller(void (*kernel)(P...), std::index_sequence<I...>) {
  const size_t indices = (size_t{std::is_same_v<P, uint32_t>} + ... + 0);
  return [kernel, first = sizeof...(P) - indices](const Call& call) { kernel(argument<P>(call, I, first)...); };
}
template <typename... P>
Kernel caller_of(void (*kernel)(P...)) {
  return caller(kernel, std::index_sequence_for<P...>{});
}

}  // namespace sim
