// The threads of shim.h: fibers, one block after the other.
#include <ucontext.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "shadow.h"
#include "shim.h"

namespace shim {
Launch now;

namespace {
enum class Status { running, at_barrier, in_warp, done };
// Where to go on: of g++'s own setjmp, which keeps three words, for glibc's takes four times as long. Whoever
// jumps must be another function than who set it, and callers must not count on registers that these leave alone.
typedef void* Place[5];
#define APART __attribute__((noipa))
struct Fiber : Thread {
    ucontext_t context;  // to enter the stack for the first time; then jumps do, which ask nothing of the system
    Place here;
    bool entered;
    Status status;
    // What it waits with, and from when it goes on what it was given:
    Call call;
    unsigned mask, present;  // lanes that it wants; those that came
    uint64_t given;
};
constexpr unsigned MOST = 1024;
constexpr size_t STACK = (64 << 10) + 320;  // or else all of them have their tops in the same lines of the cache
Fiber fibers[MOST];
char* stacks = static_cast<char*>(malloc(MOST * STACK));  // what nobody touches takes no memory
unsigned count;
uint64_t slots[MOST];  // what a lane gave to the operation that its warp had last
bool any;              // what the block gave to its last barrier
std::string error;
Place scheduler;
void (*kernel)(void** arguments);
void** arguments;
shadow::Shadow memory;

Fiber& self() { return *static_cast<Fiber*>(now.current); }
[[noreturn]] APART void to_scheduler() { __builtin_longjmp(scheduler, 1); }
// The next thread's turn, as run_block would have it; it comes to those that have no stack yet.
[[noreturn]] APART void to_next(unsigned after) {
    for (unsigned i = after + 1; i < count; i++) {
        if (fibers[i].status != Status::running) continue;
        if (!fibers[i].entered) break;
        now.current = &fibers[i];
        __builtin_longjmp(fibers[i].here, 1);
    }
    to_scheduler();
}
APART void yield(Status status) {
    Fiber& fiber = self();
    fiber.status = status;
    if (!__builtin_setjmp(fiber.here)) to_next(fiber.number);
}
// What a fiber does: a thread of one block after the other.
void start() {
    for (;;) {
        kernel(arguments);
        yield(Status::done);
    }
}
[[noreturn]] APART void go_on(Fiber& fiber) {
    if (fiber.entered) __builtin_longjmp(fiber.here, 1);
    fiber.entered = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks + fiber.number * STACK;
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, start, 0);
    setcontext(&fiber.context);
    __builtin_unreachable();
}
APART void enter(Fiber& fiber) {
    now.current = &fiber;
    if (!__builtin_setjmp(scheduler)) go_on(fiber);
}

std::string place(const Fiber& fiber) {
    const char* name = strrchr(fiber.call.file, '/');
    return "thread " + std::to_string(fiber.number) + " at " + fiber.call.what + " in " +
           (name ? name + 1 : fiber.call.file) + ":" + std::to_string(fiber.call.line);
}
bool same(const char* a, const char* b) { return a == b || !strcmp(a, b); }
bool same(const Call& a, const Call& b) { return a.line == b.line && same(a.file, b.file); }

// Lets the block go on if every thread that lives waits at the barrier.
bool release_block() {
    Fiber* first = nullptr;
    bool given = false;
    for (unsigned i = 0; i < count; i++) {
        if (fibers[i].status == Status::done) continue;
        if (fibers[i].status != Status::at_barrier) return false;
        if (!first) first = &fibers[i];
        if (!same(first->call, fibers[i].call)) {
            error = "a barrier of two lines: " + place(*first) + ", " + place(fibers[i]);
            return false;
        }
        given |= fibers[i].given != 0;
    }
    if (!first) return false;
    any = given;
    memory.barrier();
    for (unsigned i = 0; i < count; i++)
        if (fibers[i].status == Status::at_barrier) fibers[i].status = Status::running;
    return true;
}
// Lets lanes go on that wait for one another: all that live of the mask, in the same operation.
bool release_warp(unsigned first) {
    unsigned living = 0;
    bool progress = false;
    Fiber* lanes = fibers + first;
    unsigned width = count - first < 32 ? count - first : 32;
    for (unsigned i = 0; i < width; i++) living |= unsigned(lanes[i].status != Status::done) << i;
    for (unsigned i = 0; i < width; i++) {
        if (lanes[i].status != Status::in_warp) continue;
        unsigned wanted = lanes[i].mask & living, came = 0;
        for (unsigned j = 0; j < width; j++)
            came |= unsigned(lanes[j].status == Status::in_warp && lanes[j].mask == lanes[i].mask &&
                             same(lanes[j].call.what, lanes[i].call.what)) << j;
        if (wanted & ~came) continue;
        for (unsigned j = 0; j < width; j++) {
            if (!(wanted >> j & 1)) continue;
            slots[first + j] = lanes[j].given;
            lanes[j].present = wanted;
            lanes[j].status = Status::running;
        }
        if (!strcmp(lanes[i].call.what, "__syncwarp")) memory.warp_barrier(first, wanted);
        progress = true;
    }
    return progress;
}
// Whether all of the block's threads came to their end; `error` is set if not.
bool run_block() {
    for (unsigned i = 0; i < count; i++) fibers[i].status = Status::running;
    memory.block_begins();
    for (;;) {
        for (unsigned i = 0; i < count && error.empty(); i++)
            if (fibers[i].status == Status::running) enter(fibers[i]);
        if (!error.empty()) return false;
        bool progress = false, living = false;
        for (unsigned first = 0; first < count; first += 32) progress |= release_warp(first);
        progress |= release_block();
        for (unsigned i = 0; i < count; i++) living |= fibers[i].status != Status::done;
        if (!living) return true;
        if (progress) continue;
        if (!error.empty()) return false;
        error = "threads wait that nobody releases";
        const Fiber* told = nullptr;
        for (unsigned i = 0; i < count; i++) {
            if (fibers[i].status == Status::done || (told && same(told->call, fibers[i].call))) continue;
            error += (told ? ", " : ": ") + place(fibers[i]);
            told = &fibers[i];
        }
        return false;
    }
}
// Ends the launch in the middle of a thread.
[[noreturn]] void fail(const std::string& why) {
    error = why;
    to_scheduler();
}
// A thread accesses memory; not its own stack, or what is here.
void see(shadow::Kind kind, const void* at, size_t size, const void* caller) {
    auto within = [=](const void* start, size_t room) { return uintptr_t(at) - uintptr_t(start) < room; };
    if (!memory.watching() || within(stacks, MOST * STACK) || within(fibers, sizeof fibers) || within(&now, sizeof now))
        return;
    if (!memory.see(self().number, kind, at, size, caller)) fail("memory that is not in the launch");
}
void wait_in_warp(unsigned mask, uint64_t x, Call call) {
    Fiber& fiber = self();
    fiber.call = call, fiber.mask = mask, fiber.given = x;
    if (!(mask >> fiber.number % 32 & 1)) fail("a mask without the lane itself: " + place(fiber));
    yield(Status::in_warp);
}
}  // namespace

int at_barrier(int x, Call call) {
    self().call = call, self().given = unsigned(x);
    yield(Status::at_barrier);
    return any;
}
void in_warp(unsigned mask, Call call) { wait_in_warp(mask, 0, call); }
void fence() { memory.fence(self().number); }
void atomic(const void* at, size_t size, const void* caller) { see(shadow::ATOMIC, at, size, caller); }

uint64_t shuffle(unsigned mask, uint64_t x, unsigned from, Call call) {
    wait_in_warp(mask, x, call);
    if (from > 31) return x;
    Fiber& fiber = self();
    if (!(fiber.present >> from & 1))
        fail("lane " + std::to_string(from) + " has ended or is not in the mask: " + place(fiber));
    return slots[fiber.number / 32 * 32 + from];
}
unsigned vote(unsigned mask, unsigned x, bool match, Call call) {
    wait_in_warp(mask, x, call);
    Fiber& fiber = self();
    unsigned result = 0;
    for (unsigned lane = 0; lane < 32; lane++) {
        bool here = fiber.present >> lane & 1;
        uint64_t other = here ? slots[fiber.number / 32 * 32 + lane] : 0;
        result |= unsigned(here && (match ? other == x : other != 0)) << lane;
    }
    return result;
}
}  // namespace shim

// What -fsanitize=thread calls.
#define SEEN(name, kind, size) \
    extern "C" void __tsan_##name(void* at) { shim::see(shadow::kind, at, size, __builtin_return_address(0)); }
#define SEEN_OF(size) SEEN(read##size, READ, size) SEEN(write##size, WRITE, size)
SEEN_OF(1) SEEN_OF(2) SEEN_OF(4) SEEN_OF(8) SEEN_OF(16)
extern "C" void __tsan_read_range(void* at, size_t size) {
    shim::see(shadow::READ, at, size, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* at, size_t size) {
    shim::see(shadow::WRITE, at, size, __builtin_return_address(0));
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}

// The next launch is watched: what it may touch, and from where its code is told.
extern "C" void shim_watch(const shadow::Extent* extents, unsigned count, const char* code) {
    shim::memory.watch({extents, extents + count}, code);
}
// What was found since: at most `most`; how many.
extern "C" unsigned shim_findings(shadow::Finding* to, unsigned most) { return shim::memory.take(to, most); }
// The bytes that its threads have read of one of its extents, each as often as it was read.
extern "C" uint64_t shim_bytes_read(unsigned extent) { return shim::memory.bytes_read(extent); }

// Runs the kernel; 0, or 1 with `message` (200 bytes) set.
extern "C" int shim_launch(void (*kernel)(void**), void** arguments, const unsigned* grid, unsigned threads,
                           size_t shared, char* message) {
    using namespace shim;
    shim::kernel = kernel;
    shim::arguments = arguments;
    now.grid_dim = {grid[0], grid[1], grid[2]};
    now.block_dim = {threads, 1, 1};
    count = threads;
    std::unique_ptr<unsigned char[]> dynamic(new unsigned char[shared + 16]);
    now.dynamic_shared = dynamic.get();
    memory.launch_begins(count, dynamic.get(), shared);
    for (unsigned i = 0; i < count; i++) {
        fibers[i].index = {i, 0, 0};
        fibers[i].number = i;
    }
    error.clear();
    for (unsigned z = 0; z < grid[2] && error.empty(); z++)
        for (unsigned y = 0; y < grid[1] && error.empty(); y++)
            for (unsigned x = 0; x < grid[0] && error.empty(); x++) {
                now.block_index = {x, y, z};
                memset(dynamic.get(), 0xff, shared + 16);  // as on the GPU, nobody has cleared it
                if (run_block()) continue;
                snprintf(message, 200, "block (%u, %u, %u): %s", x, y, z, error.c_str());
                for (auto& fiber : fibers) fiber.entered = false;  // they are in the middle of it
            }
    memory.launch_ends();
    return !error.empty();
}
