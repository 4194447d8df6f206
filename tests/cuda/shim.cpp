// The threads of shim.h: fibers, one block after the other.
#undef _FORTIFY_SOURCE  // its longjmp refuses to go from one stack to another
#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <vector>

#include "shim.h"

namespace shim {
Thread* current;
dim3 block_dim, grid_dim;
uint3 block_index;
unsigned char* dynamic_shared;
uint64_t (*slots)[32];

namespace {
struct Fiber : Thread {
    ucontext_t context;  // to enter the stack for the first time; then jumps do, which ask nothing of the system
    jmp_buf here;
    bool entered = false;
    Status status;
    std::vector<char> stack;
};
static_assert(std::is_nothrow_move_constructible<Fiber>::value, "a copy would leave its stack");
std::vector<Fiber> fibers;
jmp_buf scheduler;
void (*kernel)(void** arguments);
void** arguments;

// What a fiber does: a thread of one block after the other.
void start() {
    for (;;) {
        kernel(arguments);
        yield(Status::done);
    }
}
void enter(Fiber& fiber) {
    current = &fiber;
    if (_setjmp(scheduler)) return;
    if (fiber.entered) _longjmp(fiber.here, 1);
    fiber.entered = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, start, 0);
    setcontext(&fiber.context);
}
// Lets all waiting fibers in [first, last) go on if every one that lives waits for `status`.
bool release(size_t first, size_t last, Status status) {
    size_t waiting = 0, living = 0;
    for (size_t i = first; i < last; i++) {
        living += fibers[i].status != Status::done;
        waiting += fibers[i].status == status;
    }
    if (!waiting || waiting != living) return false;
    for (size_t i = first; i < last; i++)
        if (fibers[i].status == status) fibers[i].status = Status::running;
    return true;
}
bool run_block() {
    size_t count = fibers.size();
    for (auto& fiber : fibers) fiber.status = Status::running;
    for (;;) {
        bool living = false;
        for (auto& fiber : fibers)
            if (fiber.status == Status::running) enter(fiber);
        bool progress = false;
        for (size_t first = 0; first < count; first += 32)
            progress |= release(first, first + 32 < count ? first + 32 : count, Status::in_warp);
        progress |= release(0, count, Status::at_barrier);
        for (auto& fiber : fibers) living |= fiber.status != Status::done;
        if (!living) return true;
        if (!progress) return false;
    }
}
}  // namespace

void yield(Status status) {
    Fiber* fiber = static_cast<Fiber*>(current);
    fiber->status = status;
    if (!_setjmp(fiber->here)) _longjmp(scheduler, 1);
}
}  // namespace shim

// Runs the kernel; 0, or 1 with `message` (200 bytes) set.
extern "C" int shim_launch(void (*kernel)(void**), void** arguments, const unsigned* grid, unsigned threads,
                           size_t shared, char* message) {
    using namespace shim;
    shim::kernel = kernel;
    shim::arguments = arguments;
    grid_dim = {grid[0], grid[1], grid[2]};
    block_dim = {threads, 1, 1};
    fibers.resize(threads);
    std::vector<uint64_t> exchanged((threads + 31) / 32 * 32);
    slots = reinterpret_cast<uint64_t(*)[32]>(exchanged.data());
    std::vector<unsigned char> memory(shared + 16);
    dynamic_shared = memory.data();
    for (unsigned i = 0; i < threads; i++) {
        fibers[i].index = {i, 0, 0};
        fibers[i].number = i;
        fibers[i].stack.resize(64 << 10);
    }
    for (unsigned z = 0; z < grid[2]; z++)
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned x = 0; x < grid[0]; x++) {
                block_index = {x, y, z};
                memset(dynamic_shared, 0xff, memory.size());  // as on the GPU, nobody has cleared it
                if (!run_block()) {
                    snprintf(message, 200, "block (%u, %u, %u): threads wait that nobody releases", x, y, z);
                    fibers.clear();  // they are in the middle of it
                    return 1;
                }
            }
    return 0;
}
