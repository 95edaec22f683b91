#include "fibers.h"

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace sim {
namespace {

constexpr size_t STACK_BYTES = size_t{128} << 10;

#if defined(__x86_64__)

// Saves the callee-saved registers on the stack of the one, and takes up the other where it left off. swapcontext would ask the kernel for the
// signal mask each time, which takes fifty times longer.
extern "C" void sim_switch(void** save, void* load);
asm(R"(
.text
.type sim_switch, @function
sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size sim_switch, .-sim_switch
)");

using Context = void*;
void switch_to(Context& save, Context& load) { sim_switch(&save, load); }
void prepare(Context& context, char* stack, void (*entry)()) {
  // Below the address that `entry` starts at: six registers. The stack is aligned as after a call.
  void** top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack) + STACK_BYTES) & ~uintptr_t{63}) - 1;
  *top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context = top;
}

#else

using Context = ucontext_t;
void switch_to(Context& save, Context& load) { swapcontext(&save, &load); }
void prepare(Context& context, char* stack, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = STACK_BYTES;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}

#endif

// Where threads meet: the last one to arrive lets all go on.
struct Meeting {
  uint32_t expected = 0, arrived = 0;
  uint64_t round = 0;
};

struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack;
  uint32_t thread = 0;
  bool running = false;
};

struct Group {
  uint32_t threads = 0;
  void (*body)(void*, uint32_t) = nullptr;
  void* context = nullptr;
  std::vector<Fiber> fibers;  // kept for the next group
  Fiber* current = nullptr;
  Context scheduler;
  Meeting barrier;
  std::vector<Meeting> simdgroups;
  std::vector<char> exchanged;  // [simdgroup][2][lane]
  uint64_t progress = 0;        // counts rounds of meetings and threads that end
  std::string error;
};

Group group;

void fiber_main() {
  while (true) {
    Fiber& fiber = *group.current;
    try {
      group.body(group.context, fiber.thread);
    } catch (const std::exception& error) {
      group.error = error.what();
    }
    fiber.running = false;
    ++group.progress;
    switch_to(fiber.context, group.scheduler);
  }
}

void meet(Meeting& meeting) {
  if (++meeting.arrived == meeting.expected) {
    meeting.arrived = 0;
    ++meeting.round;
    ++group.progress;
    return;
  }
  const uint64_t round = meeting.round;
  Fiber& fiber = *group.current;
  while (meeting.round == round) switch_to(fiber.context, group.scheduler);
}

Meeting& own_simdgroup() {
  if (group.threads % LANES != 0) throw std::runtime_error("a group of incomplete simdgroups exchanges values");
  return group.simdgroups[current_thread() / LANES];
}

std::vector<std::pair<void*, size_t>>& group_memory() {
  static std::vector<std::pair<void*, size_t>> memory;
  return memory;
}

}  // namespace

void run_group(uint32_t threads, bool backwards, void (*body)(void*, uint32_t), void* context) {
  group.threads = threads;
  group.body = body;
  group.context = context;
  group.barrier = {threads, 0, 0};
  group.simdgroups.assign((threads + LANES - 1) / LANES, Meeting{LANES, 0, 0});
  group.exchanged.resize(group.simdgroups.size() * 2 * LANES * EXCHANGED_BYTES);
  group.error.clear();
  for (size_t i = group.fibers.size(); i < threads; ++i) {
    Fiber& fiber = group.fibers.emplace_back();
    fiber.stack = std::make_unique<char[]>(STACK_BYTES);
    prepare(fiber.context, fiber.stack.get(), fiber_main);
  }
  for (uint32_t i = 0; i < threads; ++i) {
    group.fibers[i].thread = i;
    group.fibers[i].running = true;
  }
  for (uint32_t left = threads; left > 0;) {
    const uint64_t before = group.progress;
    left = 0;
    for (uint32_t i = 0; i < threads; ++i) {
      Fiber& fiber = group.fibers[backwards ? threads - 1 - i : i];
      if (!fiber.running) continue;
      group.current = &fiber;
      switch_to(group.scheduler, fiber.context);
      left += fiber.running;
    }
    const bool stuck = left > 0 && group.progress == before;
    if (stuck || (!group.error.empty() && left > 0)) {
      group.fibers.clear();  // their stacks hold unfinished calls
      if (group.error.empty()) group.error = std::to_string(left) + " threads of a group wait for threads that do not come";
      break;
    }
  }
  if (!group.error.empty()) throw std::runtime_error(group.error);
}

uint32_t current_thread() { return group.current->thread; }
void group_barrier() { meet(group.barrier); }
void lanes_barrier() { meet(own_simdgroup()); }

const char* exchange(const void* value, size_t bytes) {
  Meeting& simdgroup = own_simdgroup();
  char* const slots = group.exchanged.data() +
                      (current_thread() / LANES * 2 + simdgroup.round % 2) * LANES * EXCHANGED_BYTES;
  memcpy(slots + current_thread() % LANES * EXCHANGED_BYTES, value, bytes);
  meet(simdgroup);
  return slots;
}

void register_group_memory(void* memory, size_t bytes) {
  group_memory().emplace_back(memory, bytes);
  memset(memory, 0xff, bytes);
}
void poison_group_memory() {
  for (const auto& [memory, bytes] : group_memory()) memset(memory, 0xff, bytes);
}

}  // namespace sim
