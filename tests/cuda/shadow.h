// What was done to each byte of memory in a launch, and whether something orders it: finds races.
//
// Two accesses of different threads to one byte, of which one writes, must be ordered; two atomics need not be.
// Orders are __syncthreads, __syncwarp among its lanes, and between blocks __threadfence before an atomic in the
// one, and behind an atomic of the same address in the other. Shuffles and votes order nothing, as in CUDA.
// Threads count their own waits (`tick`); an access is ordered before a thread if the thread has heard of a later
// tick of who did it. Blocks run one after the other, so no order of running hides a race between them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

namespace shadow {
enum Kind : uint32_t { READ, WRITE, ATOMIC };
enum What : uint32_t { RACE, NOT_WRITTEN, OUTSIDE };
struct Extent {  // of memory that a launch may touch
    const char *begin, *end;
    uint64_t shared, bytes_read;
};
struct Access {
    uint32_t block = 0, tick = 0;  // blocks count from 1, over all launches
    uint32_t where = 0;            // of its code
    uint16_t thread = 0;
};
struct Side {  // of a finding
    uint32_t kind, where, thread, block;
};
struct Finding {
    uint32_t what, extent;
    Side first, second;
    uint64_t offset;
};

// Who accessed a cell and is not ordered before one another, as far as it matters for who comes next: two threads
// of one warp, one of another warp, one of another block.
struct Group {
    Access of[4];
};
struct Cell {
    Access write;
    Group reads;
    std::unique_ptr<Group> atomics;
    std::unique_ptr<Cell[]> parts;  // its bytes, once one of them was accessed without the others
};
constexpr unsigned WORD = 4, PAGE = 1024, MOST_THREADS = 1024, MOST_FINDINGS = 64, MOST_PAGES = 8000;
struct Page {
    Cell cells[PAGE / WORD];
};

// For each block the ticks of its threads up to which something is ordered.
typedef std::map<uint32_t, std::vector<uint32_t>> View;
inline void join(View& to, const View& from) {
    for (auto& [block, ticks] : from) {
        auto& own = to[block];
        own.resize(MOST_THREADS);
        for (size_t i = 0; i < ticks.size(); i++) own[i] = std::max(own[i], ticks[i]);
    }
}
// What fences and atomics have ordered for a thread.
struct Fenced {
    View before, released, met;  // all of it; what an atomic would hand on; what a fence would make ours
    void add(const Fenced& other) {
        join(before, other.before);
        join(released, other.released);
        join(met, other.met);
    }
};

class Shadow {
    bool on = false, fences = false;
    std::vector<Extent> extents;
    const char* code = nullptr;
    uint32_t block = 0, first_block = 1;
    unsigned threads = 0;
    uint32_t tick[MOST_THREADS], base[MOST_THREADS];  // own; at the last barrier of the block
    uint32_t heard[MOST_THREADS][32];                 // of each lane, by barriers of the warp
    Fenced fenced[MOST_THREADS];
    std::unordered_map<uintptr_t, View> handed;  // on by atomics of an address
    std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
    struct {
        uintptr_t number;
        Page* page;
    } recent[256] = {};
    std::vector<Finding> found;

  public:
    // The next launch is looked at. An access is told as the distance of its code from `from`.
    void watch(std::vector<Extent> all, const char* from) { extents = std::move(all), code = from, on = true; }

    void launch_begins(unsigned count, const unsigned char* dynamic, size_t size) {
        if (!on) return;
        const char* at = reinterpret_cast<const char*>(dynamic);
        extents.push_back({at, at + size, 1, 0});
        threads = count, first_block = block + 1, fences = false;
        handed.clear();
        for (auto& each : fenced) each = {};
        if (pages.size() < MOST_PAGES) return;
        pages.clear();
        for (auto& each : recent) each = {};
    }
    void launch_ends() { on = false; }

    void block_begins() {
        if (!on) return;
        block++;
        std::fill(tick, tick + threads, 0);
        std::fill(base, base + threads, 0);
        std::fill(heard[0], heard[threads], 0);
        if (fences)
            for (auto& each : fenced) each = {};
    }

    // All threads of the block have come here.
    void barrier() {
        if (!on) return;
        for (unsigned i = 0; i < threads; i++) base[i] = ++tick[i];
        if (fences) join_fenced(0, threads, [](unsigned) { return true; });
    }

    // These lanes have come to a barrier of their warp.
    void warp_barrier(unsigned first, unsigned lanes) {
        if (!on) return;
        auto in = [=](unsigned i) { return lanes >> (i - first) & 1; };
        uint32_t most[32] = {};
        for (unsigned i = first; i < first + 32; i++)
            for (unsigned j = 0; j < 32 && in(i); j++) most[j] = std::max(most[j], heard[i][j]);
        for (unsigned i = first; i < first + 32; i++)
            if (in(i)) most[i - first] = ++tick[i];
        for (unsigned i = first; i < first + 32; i++)
            if (in(i)) std::copy(most, most + 32, heard[i]);
        if (fences) join_fenced(first, first + 32, in);
    }

    void fence(unsigned thread) {
        if (!on) return;
        fences = true;
        Fenced& own = fenced[thread];
        join(own.before, own.met);
        std::vector<uint32_t> ticks(base, base + threads);
        for (unsigned lane = 0, i = thread / 32 * 32; lane < 32 && i < threads; lane++, i++)
            ticks[i] = std::max(ticks[i], heard[thread][lane]);
        ticks[thread] = ++tick[thread];
        join(own.released, own.before);
        join(own.released, {{block, ticks}});
    }

    // False if there is no such memory.
    bool see(unsigned thread, Kind kind, const void* at, size_t size, const void* caller) {
        const char *begin = static_cast<const char*>(at), *end = begin + size;
        Access own = {block, tick[thread], uint32_t(static_cast<const char*>(caller) - code), uint16_t(thread)};
        size_t extent = 0;
        while (extent < extents.size() && !(extents[extent].begin <= begin && end <= extents[extent].end)) extent++;
        if (extent == extents.size()) {
            tell(OUTSIDE, {kind, own.where, thread, block - first_block}, {}, 0, 0);
            return false;
        }
        if (kind == READ) extents[extent].bytes_read += size;
        Place place = {extent, extents[extent].shared != 0, 0};
        for (auto next = begin; begin < end; begin = next) {
            auto word = reinterpret_cast<uintptr_t>(begin) / WORD * WORD;
            next = std::min(reinterpret_cast<const char*>(word + WORD), end);
            place.offset = begin - extents[extent].begin;
            Cell& whole = cell(word);
            if (!whole.parts && next - begin == WORD) {
                touch(whole, kind, own, place);
                continue;
            }
            if (!whole.parts) split(whole);
            for (auto byte = begin; byte < next; byte++)
                touch(whole.parts[reinterpret_cast<uintptr_t>(byte) - word], kind, own, place);
        }
        if (kind == ATOMIC && fences) {
            auto address = reinterpret_cast<uintptr_t>(at);
            join(fenced[thread].met, handed[address]);
            join(handed[address], fenced[thread].released);
        }
        return true;
    }
    bool watching() const { return on; }
    uint64_t bytes_read(unsigned extent) const { return extents[extent].bytes_read; }  // of the last launch

    unsigned take(Finding* to, unsigned most) {
        unsigned count = std::min<size_t>(found.size(), most);
        std::copy(found.begin(), found.begin() + count, to);
        found.clear();
        return count;
    }

  private:
    struct Place {  // that is accessed
        size_t extent;
        bool shared;
        uint64_t offset;
    };

    template <class In> void join_fenced(unsigned first, unsigned last, In in) {
        Fenced all;
        for (unsigned i = first; i < last; i++)
            if (in(i)) all.add(fenced[i]);
        for (unsigned i = first; i < last; i++)
            if (in(i)) fenced[i] = all;
    }
    // Whether this is of the launch, or, in shared memory, of the block.
    bool alive(const Access& access, const Place& place) const {
        return access.block >= (place.shared ? block : first_block);
    }
    bool ordered(const Access& access, unsigned thread) const {  // before what the thread does now
        if (access.block == block) {
            if (access.thread == thread || access.tick < base[access.thread]) return true;
            if (access.thread / 32 == thread / 32 && access.tick < heard[thread][access.thread % 32]) return true;
        }
        if (!fences) return false;
        auto known = fenced[thread].before.find(access.block);
        return known != fenced[thread].before.end() && access.tick < known->second[access.thread];
    }

    Cell& cell(uintptr_t address) {
        uintptr_t number = address / PAGE;
        auto& entry = recent[number % 256];
        if (entry.number != number || !entry.page) {
            auto& page = pages[number];
            if (!page) page.reset(new Page);
            entry = {number, page.get()};
        }
        return entry.page->cells[address % PAGE / WORD];
    }
    void split(Cell& whole) {
        whole.parts.reset(new Cell[WORD]);
        for (unsigned i = 0; i < WORD; i++) {
            Cell& part = whole.parts[i];
            part.write = whole.write, part.reads = whole.reads;
            if (whole.atomics) part.atomics.reset(new Group(*whole.atomics));
        }
    }

    void touch(Cell& cell, Kind kind, const Access& own, const Place& place) {
        if (kind == READ && same(cell.reads.of[0], own)) return;
        if (kind == WRITE && same(cell.write, own) && !cell.reads.of[0].block && !cell.atomics) return;
        bool written = alive(cell.write, place) || (cell.atomics && alive(cell.atomics->of[0], place));
        if (place.shared && kind != WRITE && !written)
            tell(NOT_WRITTEN, {kind, own.where, own.thread, block - first_block}, {}, place.extent, place.offset);
        check(cell.write, WRITE, own, kind, place);
        for (auto& read : cell.reads.of)
            if (kind != READ) check(read, READ, own, kind, place);
        if (cell.atomics)
            for (auto& atomic : cell.atomics->of)
                if (kind != ATOMIC) check(atomic, ATOMIC, own, kind, place);
        if (kind == WRITE) {
            cell.write = own;
            cell.reads = {};
            cell.atomics.reset();
        } else if (kind == READ) {
            insert(cell.reads, own, place);
        } else {
            if (!cell.atomics) cell.atomics.reset(new Group);
            insert(*cell.atomics, own, place);
        }
    }
    static bool same(const Access& a, const Access& b) {
        return a.block == b.block && a.thread == b.thread && a.tick == b.tick;
    }
    void check(const Access& other, Kind kind, const Access& own, Kind own_kind, const Place& place) {
        if (!other.block || !alive(other, place) || ordered(other, own.thread)) return;
        tell(RACE, {kind, other.where, other.thread, other.block - first_block},
             {own_kind, own.where, own.thread, block - first_block}, place.extent, place.offset);
    }
    void insert(Group& group, const Access& own, const Place& place) {
        Access &first = group.of[0], &second = group.of[1], &warp = group.of[2], &far = group.of[3];
        for (auto& each : group.of)
            if (!alive(each, place) || ordered(each, own.thread)) each = {};  // who comes after `own` comes after it
        if (!first.block) std::swap(first, second);
        if (first.block && first.block != own.block) {
            if (!far.block) far = first;
            first = second = warp = {};
        }
        if (!first.block) first = own;
        else if (first.thread / 32 != own.thread / 32) warp = warp.block ? warp : own;
        else if (!second.block) second = own;
    }
    void tell(What what, Side first, Side second, size_t extent, uint64_t offset) {
        for (auto& each : found)
            if (each.what == what && each.first.where == first.where && each.second.where == second.where) return;
        if (found.size() < MOST_FINDINGS) found.push_back({what, uint32_t(extent), first, second, offset});
    }
};
}  // namespace shadow
