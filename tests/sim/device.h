// The memory of the simulated device.
#pragma once

#include <cstddef>

namespace sim {

// Every allocation has a red zone before and after it, of bytes that no number has; so it is filled itself. A kernel that reads outside of its
// buffer, or what nobody wrote, computes with what is not a number; one that writes outside is found by this, for the first byte of a storage.
bool red_zones_are_intact(const void* data);

}  // namespace sim
